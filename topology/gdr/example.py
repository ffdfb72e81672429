"""A made-up healthy machine: one H100 and one RoCE NIC below one switch."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gradwire.topology.gdr.host import Host
from gradwire.topology.gdr.inputs.facts import facts_from_json
from gradwire.topology.gdr.inputs.files import Files
from gradwire.topology.gdr.inputs.nccl_log import parse_nccl_log
from gradwire.topology.gdr.pci_files import tree_files
from gradwire.topology.readers.pci import PciFunction, PciTree
from gradwire.topology.readers.pci_config import ConfigSpace
from gradwire.topology.readers.pci_sysfs import read_tree

ROOT_PORT, SWITCH, GPU_PORT, NIC_PORT = "0000:00:01.0", "0000:01:00.0", "0000:02:00.0", "0000:02:01.0"
GPU, NIC = "0000:03:00.0", "0000:04:00.0"

_PORT = "sys/class/infiniband/mlx5_0/ports/1"
_FILES = {
    "proc/self/status": "Uid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\nCpus_allowed_list:\t0-63\n",
    "proc/self/limits": "Max locked memory         unlimited            unlimited            bytes\n",
    "proc/1/cgroup": "0::/init.scope\n",
    "proc/cpuinfo": "flags : fpu\n",
    "proc/cmdline": "ro quiet iommu=pt\n",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n",
    "boot/config-6.8.0": "CONFIG_PCI_P2PDMA=y\n",
    "sys/class/dmi/id/sys_vendor": "Dell Inc.\n",
    "sys/class/dmi/id/product_name": "PowerEdge XE9680\n",
    "sys/class/net/ens1/mtu": "9000\n",
    "sys/class/net/ens1/operstate": "up\n",
    "sys/class/net/eth0/operstate": "up\n",
    "sys/class/infiniband/mlx5_0/hca_type": "MT4129\n",
    "sys/class/infiniband/mlx5_0/fw_ver": "28.43.1014\n",
    f"{_PORT}/state": "4: ACTIVE\n",
    f"{_PORT}/phys_state": "5: LinkUp\n",
    f"{_PORT}/link_layer": "Ethernet\n",
    f"{_PORT}/rate": "400 Gb/sec (4X NDR)\n",
    f"{_PORT}/gids/3": "0000:0000:0000:0000:0000:ffff:0a00:0001\n",
    f"{_PORT}/gid_attrs/types/3": "RoCE v2\n",
    f"{_PORT}/gid_attrs/ndevs/3": "ens1\n",
    f"{_PORT}/hw_counters/out_of_sequence": "0\n",
    f"{_PORT}/hw_counters/packet_seq_err": "0\n",
    "sys/module/nvidia_peermem/version": "570.86.15\n",
    "sys/kernel/mm/memory_peers/nv_mem/version": "570.86.15\n",
    "sys/module/mlx5_core/version": "24.10-0.7.0\n",
    "sys/module/gdrdrv/version": "2.4\n",
    "sys/kernel/iommu_groups/0/type": "identity\n",
    "dev/gdrdrv": "",
    "dev/infiniband/uverbs0": "",
    "sys/devices/system/node/node0/cpulist": "0-31\n",
    "sys/devices/system/node/node1/cpulist": "32-63\n",
}
_CONFIG = ConfigSpace(
    header_only=False,
    pci_express=True,
    extended=True,
    acs_control=0,
    relaxed_ordering=True,
    max_payload_nbytes=256,
    max_read_request_nbytes=4096,
)
_LINK = {"current_gigatransfers": 32.0, "max_gigatransfers": 32.0, "current_width": 16, "max_width": 16}
_PLACE = {"numa_node": 0, "host_bridge": "pci0000:00"}


def _functions() -> list[PciFunction]:
    bridge = {"class_code": 0x060400, "vendor": 0x1000, "config": _CONFIG}
    endpoint = {"local_cpulist": "0-31", "iommu_group": 0, "config": _CONFIG}
    gpu = {
        "class_code": 0x030200,
        "vendor": 0x10DE,
        "device": 0x2330,
        "driver": "nvidia",
        "bar_nbytes": (1 << 24, 1 << 37),
    }
    nic = {"class_code": 0x020000, "vendor": 0x15B3, "device": 0x1021, "driver": "mlx5_core", "net_devices": ("ens1",)}
    above = (SWITCH, ROOT_PORT)
    rows: list[tuple[str, tuple[str, ...], Mapping[str, object]]] = [
        (ROOT_PORT, (), bridge),
        (SWITCH, (ROOT_PORT,), bridge),
        (GPU_PORT, above, bridge),
        (NIC_PORT, above, bridge),
        (GPU, (GPU_PORT, *above), endpoint | gpu),
        (NIC, (NIC_PORT, *above), endpoint | nic | {"rdma_devices": ("mlx5_0",)}),
    ]
    return [
        PciFunction(bus_id=bus_id, parents=parents, **_LINK, **_PLACE, **more)  # type: ignore[arg-type]  # literals above
        for bus_id, parents, more in rows
    ]


def _facts() -> dict[str, object]:
    gpu: dict[str, object] = {
        "bus_id": GPU,
        "name": "NVIDIA H100 80GB HBM3",
        "gdr_supported": True,
        "dmabuf_supported": True,
    }
    gpu |= {"bar1_nbytes": 1 << 37, "memory_nbytes": 80 << 30, "nvlinks": 18, "nvlinks_active": 18}
    gpu |= {"mig": False, "confidential": False, "c2c": False}
    return {
        "kernel": "6.8.0",
        "driver_version": "570.86.15",
        "cuda_version": 12080,
        "gpus": [gpu],
        "verbs_devices": ["mlx5_0"],
        "verbs_dmabuf": True,
        "verbs_relaxed_ordering": True,
        "active_mtu": {"mlx5_0/1": 4096},
        "device_files": {"/dev/infiniband/uverbs0": 0},
        "shm_nbytes": 64 << 30,
        "kernel_log": [],
        "nccl_version": "2.27.3",
        "ofed_version": "MLNX_OFED_LINUX-24.10-0.7.0.0:",
        "registrations": [{"gpu": GPU, "device": "mlx5_0", "peermem_errno": 0, "dmabuf_errno": 0}],
    }


@dataclass
class ExampleMachine:
    """Builds a healthy machine below a folder; take parts away to see what the checks find.

    Attributes:
        root: Folder that the files are written to.
        functions: PCI functions by bus id.
        facts: Facts that driver libraries would report, in the form that `facts_from_json` reads.
        environment: NCCL's variables; None if unknown.
        log: Lines of NCCL's log; None if there is none. A new instance starts with a healthy log.
        peers: Results of the other hosts.
        bandwidths: Measured Gbit/s, as in `Host`.
    """

    root: Path
    functions: dict[str, PciFunction] = field(default_factory=lambda: {f.bus_id: f for f in _functions()})
    facts: dict[str, object] = field(default_factory=_facts)
    environment: dict[str, str] | None = field(default_factory=dict)
    log: list[str] | None = None
    peers: tuple[Mapping[str, object], ...] = ()
    bandwidths: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Writes the files below the root."""
        for path, text in _FILES.items():
            self.write(path, text)
        self.link("sys/class/infiniband/mlx5_0/device", f"sys/bus/pci/devices/{NIC}")
        self.log = [
            f"node:1:1 [0] NCCL INFO Channel 00/0 : {a}[0] -> {b}[0] [{direction}] via NET/IB/0/GDRDMA"
            for a, b, direction in ((0, 1, "send"), (1, 0, "receive"))
        ]

    def write(self, path: str, text: str | bytes) -> None:
        """Writes one file below the root."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode() if isinstance(text, str) else text)

    def link(self, path: str, target: str) -> None:
        """Links one path to another, both below the root."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(Path(*[".."] * path.count("/")) / target)

    def remove(self, *paths: str) -> None:
        """Removes files or folders below the root; a path that does not exist is ignored."""
        for path in paths:
            place = self.root / path
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)

    def write_tree(self) -> None:
        """Writes the PCI functions as sysfs shows them, in place of those written before."""
        self.remove("sys/bus/pci", "sys/devices/pci0000:00", "sys/devices/pci0000:80")
        contents, links = tree_files(PciTree(self.functions))
        for path, content in contents.items():
            self.write(path, content)
        for path, target in links.items():
            self.link(path, target)

    def host(self) -> Host:
        """Reads the machine back as the checker does."""
        if self.functions:
            self.write_tree()
        log = None if self.log is None else parse_nccl_log(self.log)
        return Host(
            Files(self.root),
            read_tree(self.root),
            facts_from_json(self.facts),
            self.environment,
            log,
            peers=self.peers,
            bandwidths=self.bandwidths,
        )
