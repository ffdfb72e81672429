"""Well-known machines in a few lines each: to predict plans for a machine one does not have, and to test with.

Source: NVIDIA DGX A100 and DGX H100 user guides (block diagrams); the A100's PCIe layout as `nvidia-smi topo -m` shows
it there: two GPUs and two NICs below each stack of switches, all at PXB.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations

from gradwire.topology.bandwidth import nvlink_bytes_per_second, xgmi_bytes_per_second
from gradwire.topology.graph import Cpu, DeviceLink, Gpu, Machine, Nic, NvSwitch, PcieLink, PciSwitch, Port
from gradwire.topology.networks import THUNDERBOLT_BITS_PER_SECOND, THUNDERBOLT_DRIVER
from gradwire.topology.pci_ids import AMAZON, CRAY, MELLANOX

GEN3, GEN4, GEN5 = (PcieLink(gigatransfers_per_second=rate, lanes=16) for rate in (8.0, 16.0, 32.0))


def dgx_a100() -> Machine:
    """Returns a DGX A100: 8 A100, 6 NVSwitches, 8 compute NICs of 200 Gb/s and 2 for storage."""
    switches, gpus, nics = [], [], []
    for group, numa in enumerate((3, 1, 7, 5)):
        top = f"0000:{0x10 + 0x20 * group:02x}:00.0"
        switches.append(_switch(top, f"numa{numa}"))
        for place in range(4):
            below = f"{top[:5]}{0x11 + 0x20 * group + place:02x}:00.0"
            switches.append(_switch(below, top))
            if place < 2:
                gpus.append(_gpu(2 * group + place, f"{below[:8]}08.0", below, "NVIDIA A100-SXM4-80GB", 80, GEN4))
            else:
                nics.append(_nic(f"mlx5_{2 * group + place - 2}", f"{below[:8]}09.0", below, 200e9, GEN4))
    storage = [_nic(f"mlx5_{8 + i}", f"0000:{bus}:00.0", f"numa{numa}", 200e9, GEN4) for i, (bus, numa) in
               enumerate((("a1", 0), ("b1", 4)))]  # fmt: skip
    cpus = [_cpu(numa, numa // 4, "AuthenticAMD", 49, 16) for numa in range(8)]
    return _sxm(Machine(cpus=tuple(cpus), switches=tuple(switches), nics=(*nics, *storage)), gpus, (2,) * 6)


def p4d() -> Machine:
    """Returns an AWS p4d.24xlarge: 8 A100 of 40 GB, NVSwitches, 4 EFA cards of 100 Gb/s, one for two GPUs, PCIe 3.

    Source: aws-ofi-nccl topology/p4d-24xl-topo.xml.
    """
    switches, gpus, nics = [], [], []
    for group, bus in enumerate((0x10, 0x20, 0x90, 0xA0)):
        switch = f"0000:{bus:02x}:00.0"
        switches.append(_switch(switch, f"numa{group // 2}"))
        for place, slot in enumerate(("1c", "1d")):
            gpus.append(_gpu(2 * group + place, f"0000:{bus:02x}:{slot}.0", switch, "NVIDIA A100-SXM4-40GB", 80, GEN3))
        nics.append(_nic(f"rdmap{bus}s27", f"0000:{bus:02x}:1b.0", switch, 100e9, GEN3, "EFA"))
    cpus = tuple(_cpu(numa, numa, "GenuineIntel", 85, 24) for numa in range(2))
    machine = Machine(cpus=cpus, switches=tuple(switches), nics=tuple(nics))
    return replace(_sxm(machine, gpus, (2,) * 6), hostname="p4d")


def dgx_h100(name: str = "NVIDIA H100 80GB HBM3", capability: int = 90) -> Machine:
    """Returns a DGX H100, or another machine of that shape: 8 GPUs, a 400 Gb/s NIC next to each and 2 for storage.

    Args:
        name: Name of the GPUs.
        capability: Compute capability of the GPUs times ten; it also decides the NVLinks, 18 for each GPU, and the
            hostname. 90 gives 4 NVSwitches with 5, 4, 4 and 5 links from each GPU, and the hostname `dgx_h100`
            (`dgx_h200` for an H200). Any other number gives 2 NVSwitches with 9 links each, and the hostname
            `dgx_b200` (`dgx_a100` for 80).
    """
    switches, gpus, nics = [], [], []
    for index, bus in enumerate((0x15, 0x38, 0x48, 0x59, 0x97, 0xB7, 0xC7, 0xD7)):
        switch = f"0000:{bus:02x}:00.0"
        switches.append(_switch(switch, f"numa{index // 4}"))
        gpus.append(_gpu(index, f"0000:{bus + 3:02x}:00.0", switch, name, capability, GEN5))
        nics.append(_nic(f"mlx5_{index}", f"0000:{bus + 4:02x}:00.0", switch, 400e9, GEN5))
    storage = [_nic(f"mlx5_{8 + numa}", f"0000:{bus}:00.0", f"numa{numa}", 400e9, GEN5) for numa, bus in
               enumerate(("2a", "aa"))]  # fmt: skip
    cpus = [_cpu(numa, numa, "GenuineIntel", 0x8F, 56) for numa in range(2)]
    bundles = (5, 4, 4, 5) if capability == 90 else (9, 9)
    return _sxm(Machine(cpus=tuple(cpus), switches=tuple(switches), nics=(*nics, *storage)), gpus, bundles)


def gb200_nvl72() -> Machine:
    """Returns a compute tray of a GB200 NVL72: 2 Grace, 4 GB200 and 4 NICs of 400 Gb/s, one of 18 of its NVLink domain.

    Source: NVIDIA GB200 NVL72 data sheet and DGX GB200 user guide (18 NVLinks of a GPU, all to switch trays).
    """
    tray = _grace("gb200_nvl72", "NVIDIA GB200", 100, gpus_per_cpu=2, bits_per_second=400e9)
    links = tuple(
        DeviceLink(a=gpu.key, b="hidden", kind="nvlink", count=18, bytes_per_second=nvlink_bytes_per_second(gpu, 18))
        for gpu in tray.gpus
    )
    gpus = tuple(replace(gpu, nvlink_domain="nvl72/0") for gpu in tray.gpus)
    return replace(tray, gpus=gpus, nvswitches=(NvSwitch(key="hidden"),), links=links + tray.links)


def gh200() -> Machine:
    """Returns a node of 4 GH200, each with 6 NVLinks to each other one, without an NVSwitch, and a 200 Gb/s NIC.

    There are hosts of one GH200, too: one rank a node is such a host. Source: CSCS, Alps hardware (4 modules and 4
    Slingshot 11 NICs); NVIDIA, GH200 data sheet (18 NVLinks).
    """
    node = _grace("gh200", "NVIDIA GH200", 90, gpus_per_cpu=1, bits_per_second=200e9, link_layer="Slingshot")
    links = tuple(
        DeviceLink(a=a.key, b=b.key, kind="nvlink", count=6, bytes_per_second=nvlink_bytes_per_second(a, 6))
        for a, b in combinations(node.gpus, 2)
    )
    return replace(node, links=links + node.links)


def _grace(
    hostname: str, name: str, capability: int, *, gpus_per_cpu: int, bits_per_second: float,
    link_layer: str = "InfiniBand",
) -> Machine:  # fmt: skip
    """Returns a node of Grace CPUs with 4 GPUs, joined to their CPU over C2C alone, and a NIC for each."""
    cpus = tuple(
        Cpu(key=f"numa{i}", numa=i, socket=i, architecture="arm64", cores=f"{72 * i}-{72 * i + 71}")
        for i in range(4 // gpus_per_cpu)
    )
    gpus = tuple(_gpu(i, f"{8 * (i % 2) + 16 * (i // 2):04x}:01:00.0", f"numa{i // gpus_per_cpu}", name, capability,
                      GEN5) for i in range(4))  # fmt: skip
    device = "mlx5_" if link_layer == "InfiniBand" else "cxi"
    nics = tuple(_nic(f"{device}{i}", f"{i % 2 + 16 * (i // 2):04x}:03:00.0", f"numa{i // gpus_per_cpu}",
                      bits_per_second, GEN5, link_layer) for i in range(4))  # fmt: skip
    links = tuple(DeviceLink(a=gpu.key, b=gpu.parent or "", kind="c2c") for gpu in gpus)
    return Machine(
        hostname=hostname, cpus=cpus, gpus=gpus, nics=nics, links=links, links_known=True, sources=("preset",),
        virtual=False,
    )  # fmt: skip


def pcie_box(gpus: int = 4) -> Machine:
    """Returns a server with A10 cards on the CPUs' own lanes, no NVLink, and one 100 Gb/s NIC.

    Args:
        gpus: Number of cards, divided between two sockets.
    """
    cards = [
        _gpu(i, f"0000:{0x11 + 0x10 * i:02x}:00.0", f"numa{2 * i // gpus}", "NVIDIA A10", 86, GEN4) for i in range(gpus)
    ]
    cpus = (_cpu(0, 0, "GenuineIntel", 0x6A, 32), _cpu(1, 1, "GenuineIntel", 0x6A, 32))
    nic = _nic("mlx5_0", "0000:e1:00.0", "numa0", 100e9, GEN4)
    return Machine(
        hostname="pcie_box", cpus=cpus, gpus=tuple(cards), nics=(nic,), links_known=True, sources=("preset",)
    )


def dgx_spark() -> Machine:
    """Returns a DGX Spark: one GB10, and one port of 200 Gb/s of its ConnectX-7.

    The port is two PCIe functions of four lanes each; GB10 has no GPUDirect RDMA. Source: NVIDIA DGX Spark user guide,
    Hardware overview and Spark stacking.
    """
    cpu = Cpu(key="numa0", numa=0, socket=0, architecture="arm64", cores="0-19")
    gpu = replace(_gpu(0, "000f:01:00.0", "numa0", "NVIDIA GB10", 121, GEN5), gdr=False, pcie=None)
    port = Port(
        name="rocep1s0f0", interfaces=("enp1s0f0np0",), link_layer="Ethernet", bits_per_second=200e9, active=True
    )
    nic = Nic(
        key="0000:01:00.0", bus="0000:01:00.0", parent="numa0", vendor=0x15B3, class_code=0x020000, driver="mlx5_core",
        ports=(port,),
    )  # fmt: skip
    return Machine(hostname="dgx_spark", cpus=(cpu,), gpus=(gpu,), nics=(nic,), links_known=True, sources=("preset",))


def rtx_pro_6000() -> Machine:
    """Returns a workstation with 4 RTX PRO 6000 on PCIe 5 without peer-to-peer, and two ports of 25 Gb/s Ethernet."""
    gpus = tuple(
        replace(_gpu(i, f"0000:{0x11 + 0x10 * i:02x}:00.0", "numa0", _PRO_6000, 120, GEN5), gdr=False, peers=False)
        for i in range(4)
    )
    note = "GPUs do not reach each other directly: what they send each other passes through the host's memory."
    nic = _ethernet("0000:e1:00.0", 25e9, GEN4, "enp225s0f0np0", "enp225s0f1np1")
    return Machine(
        hostname="rtx_pro_6000", cpus=(_cpu(0, 0, "AuthenticAMD", 0x11, 32),), gpus=gpus, nics=(nic,), links_known=True,
        notes=(note,), sources=("preset",),
    )  # fmt: skip


def rtx_5090() -> Machine:
    """Returns a desktop with 2 RTX 5090 on eight lanes of PCIe 5 each, and 10 Gb/s Ethernet."""
    lanes = replace(GEN5, lanes=8)
    gpus = tuple(
        replace(
            _gpu(i, f"0000:{i + 1:02x}:00.0", "numa0", "NVIDIA GeForce RTX 5090", 120, lanes), gdr=False, peers=False
        )
        for i in range(2)
    )
    nic = _ethernet("0000:0a:00.0", 10e9, replace(GEN4, lanes=4), "enp10s0")
    return Machine(
        hostname="rtx_5090", cpus=(_cpu(0, 0, "AuthenticAMD", 0x44, 16),), gpus=gpus, nics=(nic,), links_known=True,
        sources=("preset",),
    )  # fmt: skip


def strix_halo() -> Machine:
    """Returns a Ryzen AI Max+ 395: one Radeon 8060S in the processor, and USB4 with its network interface.

    Source: AMD, Ryzen AI Max+ 395 (two USB4 ports); the rate is that of `networks.THUNDERBOLT_BITS_PER_SECOND`.
    """
    gpu = Gpu(
        key="0000:c5:00.0", bus="0000:c5:00.0", parent="numa0", index=0, name="Radeon 8060S", vendor=0x1002,
        class_code=0x030000, architecture="gfx1151", gdr=False,
    )  # fmt: skip
    port = Port(
        name="thunderbolt0", interfaces=("thunderbolt0",), link_layer="Ethernet", active=True,
        bits_per_second=THUNDERBOLT_BITS_PER_SECOND,
    )  # fmt: skip
    nic = Nic(key="thunderbolt0", parent="numa0", driver=THUNDERBOLT_DRIVER, ports=(port,))
    return Machine(
        hostname="strix_halo", cpus=(_cpu(0, 0, "AuthenticAMD", 0x70, 16),), gpus=(gpu,), nics=(nic,), links_known=True,
        sources=("preset",),
    )  # fmt: skip


def mi300x(name: str = "MI300X", architecture: str = "gfx942") -> Machine:
    """Returns a server with 8 MI300X, each joined to all others by one xGMI link, and a 400 Gb/s card beside each.

    Source: AMD Instinct MI300X and MI355X platform data sheets (7 Infinity Fabric links a GPU).

    Args:
        name: Name of the GPUs; MI350X and MI355X have the same links.
        architecture: Their architecture.
    """
    gpus = tuple(
        Gpu(
            key=(bus := f"0000:{0x05 + 0x1A * i:02x}:00.0"), bus=bus, parent=f"numa{i // 4}", index=i,
            name=f"AMD Instinct {name}", vendor=0x1002, class_code=0x120000, architecture=architecture, gdr=True,
            pcie=GEN5,
        )
        for i in range(8)
    )  # fmt: skip
    links = tuple(
        DeviceLink(a=a.key, b=b.key, kind="xgmi", bytes_per_second=xgmi_bytes_per_second(a, 1))
        for a, b in combinations(gpus, 2)
    )
    nics = tuple(_nic(f"mlx5_{i}", f"0000:{0x06 + 0x1A * i:02x}:00.0", f"numa{i // 4}", 400e9, GEN5) for i in range(8))
    cpus = (_cpu(0, 0, "AuthenticAMD", 0x11, 96), _cpu(1, 1, "AuthenticAMD", 0x11, 96))
    return Machine(
        hostname=name.lower(), cpus=cpus, gpus=gpus, nics=nics, links=links, links_known=True, sources=("preset",)
    )


_PRO_6000 = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"


def _ethernet(bus: str, bits_per_second: float, pcie: PcieLink, *names: str) -> Nic:
    ports = tuple(
        Port(name=name, interfaces=(name,), link_layer="Ethernet", bits_per_second=bits_per_second, active=True)
        for name in names
    )
    return Nic(key=bus, bus=bus, parent="numa0", vendor=0x8086, class_code=0x020000, ports=ports, pcie=pcie)


def cpu_only() -> Machine:
    """Returns a server with two processors, without GPUs and with one Ethernet card."""
    cpus = tuple(_cpu(numa, numa, "AuthenticAMD", 0x11, 32) for numa in range(2))
    port = Port(name="eth0", interfaces=("eth0",), link_layer="Ethernet", bits_per_second=25e9, active=True)
    nic = Nic(key="0000:01:00.0", bus="0000:01:00.0", parent="numa0", vendor=0x14E4, ports=(port,), pcie=GEN4)
    return Machine(hostname="cpu_only", cpus=cpus, nics=(nic,), sources=("preset",))


def _sxm(machine: Machine, gpus: list[Gpu], bundles: tuple[int, ...]) -> Machine:
    """Returns a machine with GPUs and NVSwitches added, and named after the GPUs' compute capability.

    Args:
        machine: Machine without GPUs.
        gpus: GPUs to add, each joined to every NVSwitch.
        bundles: Number of NVLinks from each GPU to each NVSwitch, one entry for each switch.
    """
    nvswitches = tuple(NvSwitch(key=f"0000:{0xF0 + i:02x}:00.0") for i in range(len(bundles)))
    links = tuple(
        DeviceLink(
            a=gpu.key, b=switch.key, kind="nvlink", count=count, bytes_per_second=nvlink_bytes_per_second(gpu, count)
        )
        for gpu in gpus
        for switch, count in zip(nvswitches, bundles, strict=True)
    )
    h200 = "H200" in (gpus[0].name or "")
    name = {80: "dgx_a100", 90: "dgx_h200" if h200 else "dgx_h100"}.get(gpus[0].compute_capability or 0, "dgx_b200")
    return replace(
        machine,
        hostname=name,
        gpus=tuple(gpus),
        nvswitches=nvswitches,
        links=links,
        links_known=True,
        sources=("preset",),
        virtual=False,
    )


def _cpu(numa: int, socket: int, vendor: str, model: int, cores: int) -> Cpu:
    span = f"{numa * cores}-{(numa + 1) * cores - 1}"
    return Cpu(
        key=f"numa{numa}", numa=numa, socket=socket, architecture="x86_64", vendor=vendor, model=model, cores=span
    )


def _switch(key: str, parent: str) -> PciSwitch:
    return PciSwitch(key=key, parent=parent, vendor=0x1000)


def _gpu(index: int, bus: str, parent: str, name: str, capability: int, pcie: PcieLink) -> Gpu:
    return Gpu(
        key=bus, bus=bus, parent=parent, index=index, name=name, vendor=0x10DE, class_code=0x030200,
        compute_capability=capability, gdr=True, pcie=pcie,
    )  # fmt: skip


_CARDS = {
    "InfiniBand": (MELLANOX, None, 0x020700, "mlx5_core"),
    "EFA": (AMAZON, 0xEFA0, 0x020000, "efa"),
    "Slingshot": (CRAY, 0x0501, 0x020000, "cxi_ss1"),
}
"""Link layer of a port -> its card's vendor, device and class on PCI, and its driver."""


def _nic(
    name: str, bus: str, parent: str, bits_per_second: float, pcie: PcieLink, link_layer: str = "InfiniBand"
) -> Nic:
    vendor, device, class_code, driver = _CARDS[link_layer]
    port = Port(name=name, link_layer=link_layer, bits_per_second=bits_per_second, active=True, gdr=True)
    return Nic(
        key=bus, bus=bus, parent=parent, vendor=vendor, device=device, class_code=class_code, driver=driver, pcie=pcie,
        ports=(port,),
    )  # fmt: skip


PRESETS: dict[str, Callable[[], Machine]] = {
    "dgx_a100": dgx_a100,
    "dgx_b200": partial(dgx_h100, "NVIDIA B200", 100),
    "dgx_h100": dgx_h100,
    "dgx_h200": partial(dgx_h100, "NVIDIA H200"),
    "dgx_spark": dgx_spark,
    "gb200_nvl72": gb200_nvl72,
    "gh200": gh200,
    "mi300x": mi300x,
    "mi325x": partial(mi300x, "MI325X"),
    "mi350x": partial(mi300x, "MI350X", "gfx950"),
    "mi355x": partial(mi300x, "MI355X", "gfx950"),
    "p4d": p4d,
    "pcie_box": pcie_box,
    "pcie_box_8": partial(pcie_box, 8),
    "rtx_5090": rtx_5090,
    "rtx_pro_6000": rtx_pro_6000,
    "strix_halo": strix_halo,
    "cpu_only": cpu_only,
}
"""Name for the command line -> function that describes such a machine."""

_BY_GPU = {
    "pcie_box": ("PCIe", "PCIE", "NVL", "A10"), "dgx_a100": ("A100",), "gh200": ("GH200",),
    "dgx_h200": ("H200",), "dgx_h100": ("H100", "H800"), "gb200_nvl72": ("GB200", "GB300"),
    "dgx_b200": ("B200", "B300"), "dgx_spark": ("GB10",), "rtx_5090": ("RTX 5090",),
    "rtx_pro_6000": ("RTX PRO 6000",), "strix_halo": ("8060S",), "mi300x": ("MI300X",), "mi325x": ("MI325X",),
    "mi350x": ("MI350X",), "mi355x": ("MI355X",),
}  # fmt: skip
"""Preset -> words of its GPUs' names; the first that fits counts. PCIe cards have no NVSwitch."""


def preset_with(gpu_name: str) -> str | None:
    """Returns the name of the preset with such GPUs; None if there is none.

    Args:
        gpu_name: Name that the driver reports.
    """
    return next(
        (preset for preset, parts in _BY_GPU.items() if any(re.search(rf"\b{part}\b", gpu_name) for part in parts)),
        None,
    )
