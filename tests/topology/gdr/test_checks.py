"""Every check shows pass, bad (warn or fail) and unknown, each on a machine that differs in one thing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.topology.gdr.example import GPU, GPU_PORT, NIC, NIC_PORT, ExampleMachine
from gradwire.topology.gdr.model import CheckOutcome
from gradwire.topology.gdr.stages import CHECKS
from gradwire.topology.readers.pci_config import ConfigSpace

Change = Callable[[ExampleMachine], object]

HIDDEN = ConfigSpace(header_only=True)
PORT = "sys/class/infiniband/mlx5_0/ports/1"
PEERMEM = ("sys/module/nvidia_peermem", "sys/kernel/mm/memory_peers")
STATUS = "proc/self/status"
VERSION = "proc/driver/nvidia/version"
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03\n"


def healthy(machine: ExampleMachine) -> None:
    """Changes nothing."""


def without(*paths: str) -> Change:
    return lambda machine: machine.remove(*paths)


def file(path: str, text: str) -> Change:
    return lambda machine: machine.write(path, text)


def fact(name: str, value: object) -> Change:
    return lambda machine: machine.facts.__setitem__(name, value)


def gpu_fact(name: str, value: object) -> Change:
    return lambda machine: machine.facts["gpus"][0].__setitem__(name, value)  # type: ignore[index]


def variable(name: str, value: str) -> Change:
    return lambda machine: machine.environment.__setitem__(name, value)  # type: ignore[index]


def attribute(name: str, value: object) -> Change:
    return lambda machine: setattr(machine, name, value)


def function(bus_id: str, **changes: object) -> Change:
    return lambda machine: machine.functions.__setitem__(
        bus_id,
        replace(machine.functions[bus_id], **changes),  # type: ignore[arg-type]
    )


def config(bus_id: str, **changes: object) -> Change:
    def change(machine: ExampleMachine) -> None:
        old = machine.functions[bus_id]
        assert old.config is not None
        machine.functions[bus_id] = replace(old, config=replace(old.config, **changes))  # type: ignore[arg-type]

    return change


def both(*changes: Change) -> Change:
    return lambda machine: [change(machine) for change in changes]


def no_functions(machine: ExampleMachine) -> None:
    """A root whose device list leads in a circle: nothing can be said about the bus."""
    machine.functions = {}
    machine.remove("sys/bus/pci", "sys/devices/pci0000:00")
    machine.link("sys/bus/pci/devices", "sys/bus/pci/devices")


def empty_bus(machine: ExampleMachine) -> None:
    machine.functions = {}
    machine.remove("sys/bus/pci")
    (machine.root / "sys/bus/pci/devices").mkdir(parents=True)


def with_switch(machine: ExampleMachine) -> None:
    bridge = replace(machine.functions[NIC], bus_id="0000:05:00.0", class_code=0x068000, vendor=0x10DE, rdma_devices=())
    machine.functions[bridge.bus_id] = replace(bridge, net_devices=(), driver=None)


def on_root_ports(machine: ExampleMachine) -> None:
    """GPU and NIC each below a root port of their own: PHB."""
    for bus_id, port in ((GPU, GPU_PORT), (NIC, NIC_PORT)):
        machine.functions[port] = replace(machine.functions[port], parents=())
        machine.functions[bus_id] = replace(machine.functions[bus_id], parents=(port,))


def second_nic(**changes: object) -> Change:
    def change(machine: ExampleMachine) -> None:
        twin = replace(machine.functions[NIC], bus_id="0000:80:00.0", rdma_devices=("mlx5_9",), net_devices=())
        machine.functions[twin.bus_id] = replace(twin, **changes)  # type: ignore[arg-type]
        machine.write("sys/class/infiniband/mlx5_9/hca_type", "MT4129\n")
        machine.link("sys/class/infiniband/mlx5_9/device", f"sys/bus/pci/devices/{twin.bus_id}")

    return change


def second_gpu(machine: ExampleMachine) -> None:
    twin = replace(machine.functions[GPU], bus_id="0000:03:00.1")
    machine.functions[twin.bus_id] = twin


efa_function = function(NIC, vendor=0x1D0F, device=0xEFA1, driver="efa")
flat_parents = both(function(GPU, parents=None), function(NIC, parents=None))
virtual = file("proc/cpuinfo", "flags : fpu hypervisor\n")
place_unknown = without("proc/cpuinfo", "sys/class/dmi")
no_environment = attribute("environment", None)
no_log = attribute("log", None)
staged = "NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0"
limit = "Max locked memory  {0}  {0}  bytes\n"

# check -> (pass, bad, unknown)
CASES: dict[str, tuple[Change, Change, Change]] = {
    "E0": (healthy, file(STATUS, "Uid:\t7\t7\t7\t7\n"), without(STATUS)),
    "E1": (healthy, empty_bus, no_functions),
    "E2": (healthy, file("proc/cmdline", "numa=off"), without("proc/cmdline")),
    "G1": (healthy, both(without(VERSION), function(GPU, driver=None)), without(VERSION)),
    "G2": (healthy, gpu_fact("gdr_supported", False), both(fact("gpus", None), function(GPU, device=1))),
    "G3": (healthy, both(file(VERSION, PROPRIETARY), without(*PEERMEM)), without(VERSION)),
    "G4": (
        healthy,
        both(gpu_fact("dmabuf_supported", False), without(*PEERMEM)),
        both(fact("gpus", None), without(*PEERMEM)),
    ),
    "G5": (healthy, gpu_fact("bar1_nbytes", 256 << 20), both(fact("gpus", None), function(GPU, bar_nbytes=()))),
    "G6": (healthy, function(GPU, current_width=8), function(GPU, current_width=None)),
    "G7": (healthy, gpu_fact("nvlinks_active", 17), fact("gpus", None)),
    "G8": (healthy, gpu_fact("fabric_state", 2), with_switch),
    "G9": (healthy, gpu_fact("mig", True), fact("gpus", None)),
    "R1": (healthy, both(without("sys/class/infiniband"), function(NIC, rdma_devices=())), without("sys/class")),
    "R2": (healthy, without("dev/infiniband"), fact("device_files", None)),
    "R3": (healthy, fact("verbs_devices", []), fact("verbs_devices", None)),
    "R4": (healthy, file(f"{PORT}/state", "1: DOWN"), without(f"{PORT}/state")),
    "R5": (healthy, function(NIC, current_gigatransfers=16.0), without(f"{PORT}/rate")),
    "R6": (
        healthy,
        lambda machine: machine.write("sys/class/infiniband/rxe0/node_type", "1: CA\n"),
        both(without("sys/class"), function(NIC, vendor=1, class_code=0x020000)),
    ),
    "R7": (healthy, file(f"{PORT}/gids/3", "fe80:0000:0000:0000:0000:0000:0000:0001"), without(f"{PORT}/gids")),
    "R8": (
        healthy,
        fact("active_mtu", {"mlx5_0/1": 1024}),
        both(fact("active_mtu", None), without("sys/class/net/ens1/mtu")),
    ),
    "R9": (healthy, file(f"{PORT}/hw_counters/out_of_sequence", "71"), without(f"{PORT}/hw_counters")),
    "R10": (
        healthy,
        both(file("proc/self/limits", limit.format(65536)), file(STATUS, "Uid:\t7\t7\t7\t7\n")),
        without("proc/self/limits"),
    ),
    "R11": (healthy, fact("shm_nbytes", 64 << 20), fact("shm_nbytes", None)),
    "R12": (healthy, both(file(".dockerenv", ""), without("sys/class/net/ens1")), without("proc/1/cgroup")),
    "M1": (
        healthy,
        both(without(*PEERMEM), fact("verbs_dmabuf", False)),
        both(without(*PEERMEM), fact("verbs_dmabuf", None)),
    ),
    "M2": (
        healthy,
        both(without(*PEERMEM), fact("verbs_dmabuf", False)),
        both(without(*PEERMEM), fact("verbs_dmabuf", None)),
    ),
    "M3": (healthy, both(without(*PEERMEM), fact("kernel", "5.4.0")), fact("cuda_version", None)),
    "M4": (
        healthy,
        both(fact("nccl_version", "2.20.5"), without("sys/kernel/mm/memory_peers"), fact("verbs_dmabuf", False)),
        both(fact("nccl_version", None), without("sys/kernel/mm/memory_peers")),
    ),
    "M5": (
        healthy,
        fact("ofed_version", "MLNX_OFED_LINUX-5.8-2.0:"),
        both(fact("ofed_version", None), without("sys/module/mlx5_core", "sys/class/infiniband/mlx5_0/fw_ver")),
    ),
    "M6": (healthy, without("dev/gdrdrv"), without("sys/module")),
    "M7": (healthy, both(efa_function, fact("nccl_plugin", False)), efa_function),
    "P1": (healthy, on_root_ports, flat_parents),
    "P2": (healthy, both(second_gpu, second_nic(parents=(NIC_PORT,), numa_node=1)), flat_parents),
    "P3": (healthy, second_nic(parents=(), numa_node=1), no_environment),
    "P4": (healthy, file("sys/kernel/iommu_groups/0/type", "DMA-FQ"), without("sys/kernel")),
    "P5": (healthy, config(NIC_PORT, acs_control=0x1D), function(GPU_PORT, config=HIDDEN)),
    "P6": (healthy, virtual, place_unknown),
    "P7": (healthy, config(NIC, max_read_request_nbytes=512), function(NIC, config=HIDDEN)),
    "P8": (healthy, config(NIC, relaxed_ordering=False), function(NIC, config=HIDDEN)),
    "P9": (healthy, function(NIC, current_width=8), function(NIC, current_width=None)),
    "P10": (healthy, file(STATUS, "Cpus_allowed_list:\t32-63\n"), without(STATUS)),
    "P11": (healthy, both(virtual, on_root_ports), place_unknown),
    "V1": (healthy, variable("NCCL_IB_DISABLE", "1"), no_environment),
    "V2": (healthy, variable("NCCL_NET_GDR_LEVEL", "LOC"), no_environment),
    "V3": (healthy, both(variable("NCCL_DMABUF_ENABLE", "0"), without(*PEERMEM)), no_environment),
    "V4": (healthy, variable("NCCL_IB_GID_INDEX", "3"), no_environment),
    "V5": (healthy, variable("NCCL_P2P_DISABLE", "1"), no_environment),
    "V6": (healthy, variable("NCCL_SOCKET_IFNAME", "bond"), no_environment),
    "V7": (healthy, variable("CCL_NET_GDR_LEVEL", "PHB"), no_environment),
    "V8": (healthy, variable("NCCL_TOPO_FILE", "/nowhere.xml"), no_environment),
    "V9": (healthy, variable("FI_EFA_USE_DEVICE_RDMA", "1"), no_environment),
    "U1": (
        healthy,
        fact("registrations", [{"gpu": GPU, "device": "mlx5_0", "peermem_errno": 14, "dmabuf_errno": 95}]),
        fact("registrations", None),
    ),
    "U2": (
        attribute("bandwidths", {"host": 390.0, "gdr": 380.0}),
        attribute("bandwidths", {"host": 390.0, "gdr": 190.0}),
        healthy,
    ),
    "U3": (healthy, lambda machine: machine.log.append(staged), no_log),  # type: ignore[union-attr]
    "U4": (
        attribute("bandwidths", {"default": 300.0, "LOC": 200.0}),
        attribute("bandwidths", {"default": 100.0, "LOC": 200.0}),
        healthy,
    ),
    "U5": (
        attribute("peers", ({"checks": [{"id": "M1", "outcome": "pass"}]},) * 3),
        attribute("peers", ({"checks": [{"id": "M1", "outcome": "pass"}]},) * 2 + ({"checks": []},)),
        healthy,
    ),
}
EXPECTED = (
    ("pass", {CheckOutcome.PASS}),
    ("bad", {CheckOutcome.WARN, CheckOutcome.FAIL}),
    ("unknown", {CheckOutcome.UNKNOWN}),
)


def test_every_check_has_its_three_cases() -> None:
    assert list(CASES) == [check.name for check in CHECKS]
    assert all(len(cases) == len(EXPECTED) for cases in CASES.values())


@pytest.mark.parametrize("kind", range(len(EXPECTED)), ids=[name for name, _ in EXPECTED])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_check(check: object, kind: int, tmp_path: Path) -> None:
    machine = ExampleMachine(tmp_path)
    row = next(row for row in CHECKS if row is check)
    CASES[row.name][kind](machine)
    finding = row.find(machine.host())
    assert finding.outcome in EXPECTED[kind][1], finding
    assert finding.text and "\n" not in finding.text
    if finding.outcome in (CheckOutcome.WARN, CheckOutcome.FAIL):
        assert finding.fix, "a bad finding says what to do"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_check_names_command_and_source(check: object) -> None:
    row = next(row for row in CHECKS if row is check)
    words = row.function.__doc__ or ""
    assert "Command: `" in words and "Source: " in words


def test_names_are_in_the_order_of_the_checklist_and_needs_come_first() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names) == 56
    for check in CHECKS:
        assert all(names.index(need) < names.index(check.name) for need in check.needs)


def fix_of(name: str, machine: ExampleMachine) -> str:
    return next(check for check in CHECKS if check.name == name).find(machine.host()).fix


def test_peer_to_peer_that_is_off_is_no_fault_where_it_would_hang(tmp_path: Path) -> None:
    """ACS or an IOMMU in between: without NCCL_P2P_DISABLE the job hangs, so nobody is told to unset it."""
    off = variable("NCCL_P2P_DISABLE", "1")
    changes = {
        "plain": off,
        "acs": both(off, config(GPU_PORT, acs_control=0x1D)),
        "iommu": both(off, file("sys/kernel/iommu_groups/0/type", "DMA-FQ")),
    }
    said = {}
    for name, change in changes.items():
        machine = ExampleMachine(tmp_path / name)
        change(machine)
        said[name] = fix_of("V5", machine)
    assert "short run without it" in said["plain"], said
    assert "may hang" in said["acs"] and "may hang" in said["iommu"], said
    assert not any(words.startswith("unset") for words in said.values()), said


def test_a_level_that_was_lowered_is_raised_and_no_card_is_moved(tmp_path: Path) -> None:
    machine = ExampleMachine(tmp_path)
    variable("NCCL_NET_GDR_LEVEL", "LOC")(machine)
    assert "env -u NCCL_NET_GDR_LEVEL" in fix_of("V2", machine)


@pytest.mark.parametrize(
    ("version", "variables", "outcome"),
    [
        ("2.21.5", {}, CheckOutcome.FAIL),
        ("2.26.2", {}, CheckOutcome.FAIL),
        ("2.26.2", {"NCCL_NET_GDR_C2C": "1"}, CheckOutcome.PASS),
        ("2.27.3", {"NCCL_NET_GDR_C2C": "0"}, CheckOutcome.FAIL),
        ("2.21.5", {"NCCL_NET_GDR_LEVEL": "PHB"}, CheckOutcome.PASS),
    ],
)
def test_nobody_is_told_to_move_a_card_that_is_soldered_on(
    version: str, variables: dict[str, str], outcome: CheckOutcome, tmp_path: Path
) -> None:
    """A GB200: the card is on the GPU's own CPU, so what helps is NCCL's release or a variable."""
    machine = ExampleMachine(tmp_path)
    for bus_id, port in ((GPU, GPU_PORT), (NIC, NIC_PORT)):
        machine.functions[port] = replace(machine.functions[port], parents=())
        machine.functions[bus_id] = replace(machine.functions[bus_id], parents=(port,))
    machine.facts["gpus"][0]["c2c"] = True  # type: ignore[index]
    machine.facts["nccl_version"] = version
    machine.environment = variables
    finding = next(check for check in CHECKS if check.name == "V2").find(machine.host())
    assert finding.outcome is outcome, finding
    if outcome is CheckOutcome.FAIL:
        assert "NCCL 2.27" in finding.fix and "NCCL_NET_GDR_C2C=1" in finding.fix
        assert "move" not in finding.fix
