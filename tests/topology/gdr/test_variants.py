"""The finer outcomes of single checks: same machine, one thing different, one word that has to be in the answer."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.topology.gdr.example import GPU, NIC, NIC_PORT, ExampleMachine
from gradwire.topology.gdr.stages import CHECKS

Change = Callable[[ExampleMachine], object]

PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03\n"
PEERMEM = ("sys/module/nvidia_peermem", "sys/kernel/mm/memory_peers")
PORT = "sys/class/infiniband/mlx5_0/ports/1"


def env(**values: str) -> Change:
    return lambda machine: setattr(machine, "environment", values)


def facts(**values: object) -> Change:
    return lambda machine: machine.facts.update(values)


def gpu(**values: object) -> Change:
    return lambda machine: machine.facts["gpus"][0].update(values)  # type: ignore[index]


def function(bus_id: str, **changes: object) -> Change:
    return lambda machine: machine.functions.__setitem__(
        bus_id,
        replace(machine.functions[bus_id], **changes),  # type: ignore[arg-type]
    )


def file(path: str, text: str) -> Change:
    return lambda machine: machine.write(path, text)


def without(*paths: str) -> Change:
    return lambda machine: machine.remove(*paths)


def all_of(*changes: Change) -> Change:
    return lambda machine: [change(machine) for change in changes]


virtual = file("proc/cpuinfo", "flags : hypervisor")
efa = function(NIC, vendor=0x1D0F, device=0xEFA1, driver="efa")


def nvswitch(machine: ExampleMachine) -> None:
    switch = replace(machine.functions[NIC], bus_id="0000:05:00.0", class_code=0x068000, vendor=0x10DE, rdma_devices=())
    machine.functions[switch.bus_id] = replace(switch, net_devices=(), driver=None)


topology = '<system version="1"><cpu numaid="0"><pci busid="{}"/></cpu></system>'


@pytest.mark.parametrize(
    ("name", "change", "outcome", "word"),
    [
        ("E0", file("proc/self/status", "Uid:\t0\t0\t0\t0\nCapEff:\t0\n"), "warn", "hidden"),
        ("E1", file("sys/bus/pci/devices/junk", ""), "warn", "1 entries"),
        ("G1", facts(nvml_error="Driver/library version mismatch"), "fail", "mismatch"),
        ("G1", facts(nvml_error="crashed (SIGSEGV)"), "fail", "NVML crashed (SIGSEGV)"),
        ("G1", facts(nvml_error="no answer within 60 s"), "fail", "NVML no answer within 60 s"),
        ("G1", facts(nvml_error="nvidia-ml-py is not installed"), "pass", "570"),
        ("G2", all_of(facts(gpus=None), function(GPU, device=0x2330)), "pass", "H100"),
        ("G2", all_of(facts(gpus=None, cuda_error="crashed (SIGSEGV)"), function(GPU, device=1)), "unknown", "SIGSEGV"),
        ("G2", gpu(gdr_supported=None, name="NVIDIA GeForce RTX 4090"), "fail", "GeForce"),
        ("G3", file("proc/driver/nvidia/version", PROPRIETARY), "info", "peer memory serves"),
        ("G3", all_of(file("proc/driver/nvidia/version", PROPRIETARY), without("sys/module")), "info", "peer memory"),
        ("G4", gpu(dmabuf_supported=False), "info", "not needed"),
        ("G4", all_of(facts(gpus=None, cuda_error="cuInit: error 999"), without(*PEERMEM)), "unknown", "error 999"),
        ("G6", virtual, "info", "virtual"),
        ("G7", gpu(nvlinks_active=0, name="NVIDIA H100 PCIe"), "info", "without an NVLink bridge"),
        ("G7", gpu(nvlinks_active=0), "warn", "has 0 of 18"),
        ("G8", gpu(fabric_state=3, fabric_status=0), "pass", "ready"),
        ("G8", gpu(fabric_state=3, fabric_status=999), "fail", "not ready"),
        (
            "G8",
            all_of(nvswitch, facts(cuda_error="cuInit: CUDA_ERROR_SYSTEM_NOT_READY (802)")),
            "fail",
            "does not start",
        ),
        ("G8", all_of(nvswitch, facts(cuda_error="cuInit: CUDA_ERROR_NO_DEVICE (100)")), "unknown", "not known"),
        ("G9", gpu(confidential=True), "warn", "confidential"),
        ("R1", function(NIC, vendor=1, class_code=0x020000, rdma_devices=()), "pass", "mlx5_0"),
        ("R2", facts(device_files={"/dev/infiniband/uverbs0": 13}), "fail", "EACCES"),
        ("R3", facts(verbs_error="libibverbs.so.1: cannot open"), "fail", "cannot open"),
        ("R4", file("sys/class/infiniband/mlx5_0/ports/2/state", "1: DOWN"), "warn", "mlx5_0/2 DOWN"),
        ("R5", file(f"{PORT}/rate", "fast"), "unknown", "no rate"),
        ("R6", without("sys/class"), "pass", "PCI bus"),
        ("R7", file(f"{PORT}/link_layer", "InfiniBand"), "info", "no RoCE"),
        ("R7", env(NCCL_IB_GID_INDEX="7"), "fail", "GID_INDEX=7"),
        ("R7", facts(nccl_version="2.18.3"), "warn", "NCCL_IB_GID_INDEX=3"),
        ("R8", all_of(facts(active_mtu=None), file("sys/class/net/ens1/mtu", "1500")), "warn", "ens1 1500"),
        ("R9", file(f"{PORT}/link_layer", "InfiniBand"), "info", "lossless"),
        ("R10", file("proc/self/limits", "Max locked memory 99999999 99999999 bytes"), "warn", "95 MiB"),
        ("R12", file(".dockerenv", ""), "pass", "1 RoCE"),
        ("M2", file("sys/module/nv_peer_mem/version", "1"), "warn", "legacy"),
        (
            "M2",
            all_of(
                without(*PEERMEM),
                facts(
                    kernel="4.18.0", kernel_log=["x disagrees about version of symbol ib_register_peer_memory_client"]
                ),
            ),
            "fail",
            "disagrees about version of symbol",
        ),
        ("M3", file("boot/config-6.8.0", "# CONFIG_PCI_P2PDMA is not set"), "info", "P2PDMA"),
        ("M4", facts(nccl_version=None), "pass", "every release"),
        (
            "M4",
            all_of(without("sys/kernel/mm"), facts(nccl_version=None, nccl_error="crashed (SIGSEGV)")),
            "unknown",
            "SIGSEGV",
        ),
        ("M4", all_of(facts(nccl_version="2.26.2"), gpu(c2c=True)), "warn", "C2C"),
        ("M4", all_of(without("sys/kernel/mm"), facts(nccl_version="2.20.5")), "pass", "uses dma-buf"),
        ("M4", all_of(without("sys/kernel/mm"), facts(nccl_version="2.11.4")), "fail", "2.11.4"),
        ("M6", without("sys/module/gdrdrv", "dev/gdrdrv"), "info", "optional"),
        ("M7", all_of(efa, facts(nccl_plugin=True)), "pass", "plugin found"),
        ("M7", all_of(efa, file("sys/class/infiniband/mlx5_0/uevent", "")), "unknown", "not looked for"),
        ("P4", without("sys/kernel/iommu_groups"), "pass", "off"),
        ("P4", virtual, "info", "virtual"),
        ("P5", virtual, "info", "ATS"),
        (
            "P10",
            all_of(function(GPU, numa_node=-1), file("proc/self/status", "Cpus_allowed_list: 0")),
            "warn",
            "no NUMA",
        ),
        ("P11", virtual, "pass", "visible"),
        ("V1", env(NCCL_NET="Socket"), "fail", "NCCL_NET=Socket (environment)"),
        ("V1", env(NCCL_IB_HCA="bnxt"), "fail", "matches none of mlx5_0"),
        ("V1", all_of(efa, env(NCCL_NET_PLUGIN="none")), "fail", "EFA needs the plugin"),
        ("V2", env(NCCL_NET_GDR_LEVEL="NODE"), "warn", "no level"),
        ("V2", env(NCCL_NET_GDR_LEVEL="2"), "warn", "legacy number"),
        ("V2", env(NCCL_NET_GDR_READ="0"), "warn", "sends go through the host"),
        ("V3", env(NCCL_DMABUF_ENABLE="0"), "pass", "peer memory works and is used instead"),
        ("V3", env(OFI_NCCL_DISABLE_GDR_REQUIRED_CHECK="1"), "warn", "unnoticed"),
        ("V4", all_of(env(NCCL_IB_GID_INDEX="3"), facts(nccl_version="2.18.3")), "pass", "before 2.21"),
        ("V4", env(NCCL_IB_GID_INDEX="-1"), "pass", "not set"),
        ("V6", env(NCCL_SOCKET_IFNAME="=eth0"), "pass", "eth0"),
        ("V6", all_of(env(NCCL_SOCKET_IFNAME="eth"), file("sys/class/net/eth0/operstate", "down")), "fail", "down"),
        (
            "V6",
            all_of(env(NCCL_SOCKET_IFNAME="docker"), file("sys/class/net/docker0/operstate", "up")),
            "fail",
            "leave",
        ),
        ("V2", env(NCCL_IB_GDR_LEVEL="PHB"), "warn", "not read from NCCL 2.4 on; set NCCL_NET_GDR_LEVEL instead"),
        ("V2", env(NCCL_IB_CUDA_SUPPORT="1"), "warn", "set NCCL_NET_GDR_LEVEL instead"),
        ("V2", env(NCCL_IB_GDR_LEVEL="PHB", NCCL_NET_GDR_LEVEL="PXB"), "pass", "within PXB"),
        ("V7", env(NCCL_IB_GDR_LEVEL="PHB"), "warn", "set NCCL_NET_GDR_LEVEL instead"),
        ("V7", env(NCCL_TREE_THRESHOLD="0"), "warn", "not read from NCCL 2.5 on; set NCCL_ALGO instead"),
        ("V7", env(NCCL_LL_THRESHOLD="16384"), "warn", "set NCCL_PROTO instead"),
        ("V7", env(NCCL_SINGLE_RING_THRESHOLD="1"), "warn", "not read from NCCL 2.3 on; unset it"),
        ("V7", env(NCCL_TIMEOUT="3600"), "warn", "read by no release; set `timeout` of init_process_group"),
        ("V7", env(NCCL_MAX_NRINGS="2"), "pass", "no near miss"),
        ("V7", env(NCCL_BLOCKING_WAIT="1"), "pass", "no near miss"),
        ("V7", env(NCCL_NET_GDR_LEVLE="PHB"), "warn", "is NCCL_NET_GDR_LEVEL meant?"),
        ("V7", env(NCCL_MY_SITE_THING="1"), "pass", "no near miss"),
        ("V8", all_of(env(NCCL_TOPO_FILE="/t.xml"), file("t.xml", "<graphs>")), "fail", "no NCCL topology"),
        (
            "V8",
            all_of(env(NCCL_TOPO_FILE="/t.xml"), file("t.xml", topology.format("ffff:00:00.0"))),
            "warn",
            "no device",
        ),
        ("V8", all_of(env(NCCL_TOPO_FILE="/t.xml"), file("t.xml", topology.format(GPU))), "pass", "/t.xml"),
        ("V9", env(NCCL_NET="FasTrak"), "fail", "FASTRAK"),
        ("V9", all_of(efa, env(FI_PROVIDER="tcp")), "warn", "EFA NICs are not used"),
        ("U1", facts(registrations=[{"gpu": GPU, "device": "mlx5_0", "note": "no memory"}]), "unknown", "no memory"),
        ("U1", facts(registrations=None, probe_error="cuInit returned 802"), "unknown", "802"),
        (
            "U1",
            facts(registrations=[{"gpu": GPU, "device": "mlx5_0", "peermem_errno": 14, "dmabuf_errno": 0}]),
            "pass",
            "peer memory EFAULT (Bad address), dma-buf ok",
        ),
        (
            "U1",
            facts(
                registrations=[{"gpu": GPU, "device": "mlx5_0", "peermem_errno": 14, "note": "no dma-buf: error 801"}]
            ),
            "fail",
            "peer memory EFAULT (Bad address), no dma-buf: error 801",
        ),
    ],
)
def test_variant(name: str, change: Change, outcome: str, word: str, tmp_path: Path) -> None:
    machine = ExampleMachine(tmp_path)
    if name == "E1":
        machine.write_tree()
    change(machine)
    host = machine.host()
    if name == "E1":
        host.tree = replace(host.tree, problems=("one",))
    finding = next(check for check in CHECKS if check.name == name).find(host)
    assert (str(finding.outcome), word in finding.text) == (outcome, True), finding


def test_a_port_that_is_slower_than_its_card_is_found_and_a_wider_one_is_not(tmp_path: Path) -> None:
    check = next(check for check in CHECKS if check.name == "P9")
    machine = ExampleMachine(tmp_path)
    machine.functions[NIC_PORT] = replace(machine.functions[NIC_PORT], current_width=8)
    assert "0000:02:01.0 32 GT/s x8" in check.find(machine.host()).text
    machine.functions[NIC_PORT] = replace(machine.functions[NIC_PORT], current_width=16, max_width=32)
    assert check.find(machine.host()).outcome == "pass"


def test_slingshot_is_seen_without_verbs(tmp_path: Path) -> None:
    machine = ExampleMachine(tmp_path)
    machine.remove("sys/class/infiniband", "dev/infiniband")
    changes = {"vendor": 0x17DB, "device": 0x0501, "driver": "cxi_ss1", "rdma_devices": (), "net_devices": ("hsn0",)}
    function(NIC, **changes)(machine)
    machine.link("sys/class/cxi/cxi0/device", f"sys/bus/pci/devices/{NIC}")
    machine.write("sys/class/net/hsn0/operstate", "up")
    machine.write("sys/class/net/hsn0/speed", "200000")
    machine.write("dev/cxi0", "")
    host = machine.host()
    found = {check.name: check.find(host) for check in CHECKS if check.name in ("R1", "R3", "R4", "R5", "M7")}
    assert {name: str(f.outcome) for name, f in found.items()} == {
        "R1": "pass",
        "R3": "info",
        "R4": "pass",
        "R5": "pass",
        "M7": "unknown",
    }
    assert "cxi0" in found["R1"].text and "200 Gb/s Slingshot" in found["R5"].text
