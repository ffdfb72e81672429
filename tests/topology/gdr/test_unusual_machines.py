"""Machines whose owners were told to do what cannot help: what is said of them, and what is not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.topology.gdr.capture import opened_capture, write_capture
from gradwire.topology.gdr.example import GPU, NIC, NIC_PORT, ExampleMachine
from gradwire.topology.gdr.host import Host
from gradwire.topology.gdr.inputs.files import Files
from gradwire.topology.gdr.inputs.nccl_log import parse_nccl_log
from gradwire.topology.gdr.model import CheckOutcome, Finding, Verdict
from gradwire.topology.gdr.runner import run_checks
from gradwire.topology.gdr.stages import CHECKS
from gradwire.topology.gdr.stages.stage2_rdma import devices_of_hardware
from gradwire.topology.readers.pci_sysfs import read_tree

PORT = "sys/class/infiniband/mlx5_0/ports/1"
OTHER, OTHER_PORT = "0002:01:00.0", "sys/class/infiniband/roceP2p1s0f0/ports/1"
GUID = "fc4c:ea03:00f9:4230\n"
GLUE = ("G3", "G4", "M1", "M2", "M3", "M4")


def findings(machine: ExampleMachine, *names: str) -> dict[str, Finding]:
    host = machine.host()
    return {check.name: check.find(host) for check in CHECKS if check.name in names}


def words(found: dict[str, Finding]) -> str:
    return " ".join(f"{each.text} {each.fix}" for each in found.values())


def two_halves(machine: ExampleMachine) -> None:
    """One port of 200 Gb/s behind two links of four lanes, as on GB10: a second function in another domain."""
    lanes = {"current_gigatransfers": 32.0, "current_width": 4, "max_width": 4}
    half = replace(machine.functions[NIC], **lanes)  # type: ignore[arg-type]
    machine.functions[NIC] = half
    machine.functions[OTHER] = replace(
        half, bus_id=OTHER, parents=(), host_bridge="pci0002:00", rdma_devices=("roceP2p1s0f0",), net_devices=("enP2",)
    )
    machine.link("sys/class/infiniband/roceP2p1s0f0/device", f"sys/bus/pci/devices/{OTHER}")
    for top in ("sys/class/infiniband/mlx5_0", "sys/class/infiniband/roceP2p1s0f0"):
        machine.write(f"{top}/sys_image_guid", GUID)
        port = f"{top}/ports/1"
        machine.write(f"{port}/rate", "200 Gb/sec (2X NDR)\n")
        machine.write(f"{port}/state", "4: ACTIVE\n")
        machine.write(f"{port}/link_layer", "Ethernet\n")
        machine.write(f"{port}/gids/3", "0000:0000:0000:0000:0000:ffff:0a00:0001\n")
        machine.write(f"{port}/gid_attrs/types/3", "RoCE v2\n")


def test_two_halves_of_one_port_are_no_slow_slot(tmp_path: Path) -> None:
    machine = ExampleMachine(tmp_path)
    two_halves(machine)
    found = findings(machine, "R5")["R5"]
    assert found.outcome is CheckOutcome.PASS
    assert "mlx5_0 and roceP2p1s0f0 are halves of one 200 Gb/s port, 126 each" in found.text


@pytest.mark.parametrize(("change", "word"), [
    (lambda machine: machine.environment.update(NCCL_IB_HCA="mlx5_0"), "leaves out roceP2p1s0f0"),
    (lambda machine: machine.write(f"{OTHER_PORT}/gids/3", "fe80:0000:0000:0000:0000:0000:0000:0001\n"),
     "roceP2p1s0f0 has no address"),
])  # fmt: skip
def test_one_half_that_is_left_out_is_half_of_the_rate(
    tmp_path: Path, change: Callable[[ExampleMachine], object], word: str
) -> None:
    machine = ExampleMachine(tmp_path)
    two_halves(machine)
    change(machine)
    found = findings(machine, "R5")["R5"]
    assert found.outcome is CheckOutcome.WARN and word in found.text
    assert "NCCL_IB_HCA=mlx5_0,roceP2p1s0f0" in found.fix and "slot" not in found.fix


def test_two_cards_are_no_halves(tmp_path: Path) -> None:
    machine = ExampleMachine(tmp_path)
    two_halves(machine)
    machine.write("sys/class/infiniband/roceP2p1s0f0/sys_image_guid", "fc4c:ea03:00f9:9999\n")
    found = findings(machine, "R5")["R5"]
    assert found.outcome is CheckOutcome.WARN and found.text.count("200 Gb/s port on 126 Gb/s of PCIe") == 2


@pytest.mark.parametrize(("most", "said"), [(16, "bifurcation"), (4, "as many lanes")])
def test_four_lanes_under_a_fast_card_say_whose_they_are(tmp_path: Path, most: int, said: str) -> None:
    machine = ExampleMachine(tmp_path)
    machine.write(f"{PORT}/rate", "200 Gb/sec (4X HDR)\n")
    for bus in (NIC, NIC_PORT):
        machine.functions[bus] = replace(
            machine.functions[bus], current_gigatransfers=16.0, current_width=4, max_width=most
        )
    found = findings(machine, "R5")["R5"]
    assert found.outcome is CheckOutcome.WARN and said in found.fix
    assert "200 Gb/s port on 63 Gb/s of PCIe (16 GT/s x4" in found.text


@pytest.mark.parametrize("change", [
    lambda gpu: gpu.update(gdr_supported=False, name="NVIDIA GB10"),
    lambda gpu: gpu.update(gdr_supported=None, name="NVIDIA GB10"),
    lambda gpu: gpu.update(gdr_supported=None, name="NVIDIA GeForce RTX 5090"),
])  # fmt: skip
def test_nobody_is_told_to_load_a_module_for_a_gpu_that_has_no_gpudirect(
    tmp_path: Path, change: Callable[[dict[str, object]], object]
) -> None:
    machine = ExampleMachine(tmp_path)
    change(machine.facts["gpus"][0])  # type: ignore[index]
    machine.remove("sys/module/nvidia_peermem", "sys/kernel/mm/memory_peers")
    machine.log = [
        "node:1:1 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'",
        "node:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0",
    ]
    found = findings(machine, "G2", *GLUE, "U3")
    assert found["G2"].outcome is CheckOutcome.FAIL and found["U3"].outcome is CheckOutcome.FAIL
    assert all(found[name].outcome is CheckOutcome.INFO for name in GLUE)
    assert not any(text in words(found) for text in ("modprobe", "load nvidia_peermem", "install"))


def test_a_level_that_was_lowered_is_unset_before_a_card_is_moved(tmp_path: Path) -> None:
    machine = ExampleMachine(tmp_path)
    machine.log = [
        "node:1:1 [0] NCCL INFO NCCL_NET_GDR_LEVEL set by environment to LOC",
        "node:1:1 [0] NCCL INFO GPU Direct RDMA Disabled for GPU 3000 / HCA 0 (distance 4 > 0)",
        "node:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0",
    ]
    assert parse_nccl_log(machine.log).overrides == {"NCCL_NET_GDR_LEVEL": "LOC"}
    found = findings(machine, "U3")["U3"]
    assert "env -u NCCL_NET_GDR_LEVEL" in found.fix and "move the card" not in found.fix


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("p5.48xlarge", True), ("g5.48xlarge", True), ("g5.xlarge", False), ("g7e.8xlarge", True),
        ("g7e.48xlarge", True), ("g7e.4xlarge", False), ("p6-b200.48xlarge", True),
    ],
)  # fmt: skip
def test_efa_that_was_never_attached_is_named(tmp_path: Path, kind: str, named: bool) -> None:
    machine = ExampleMachine(tmp_path)
    machine.functions[NIC] = replace(
        machine.functions[NIC], vendor=0x1D0F, device=0xEC20, driver="ena", rdma_devices=()
    )
    machine.remove("sys/class/infiniband")
    machine.write("sys/class/dmi/id/sys_vendor", "Amazon EC2\n")
    machine.write("sys/class/dmi/id/product_name", f"{kind}\n")
    found = findings(machine, "R1")["R1"]
    assert found.outcome is CheckOutcome.FAIL
    assert ("none is attached" in found.text) is named and ("type efa" in found.fix) is named


def efa_machine(tmp_path: Path) -> ExampleMachine:
    machine = ExampleMachine(tmp_path)
    config = machine.functions[NIC].config
    assert config is not None
    machine.functions[NIC] = replace(
        machine.functions[NIC],
        vendor=0x1D0F,
        device=0xEFA1,
        driver="efa",
        config=replace(config, relaxed_ordering=False, ats_enabled=None),
    )
    machine.write("proc/cpuinfo", "flags : hypervisor\n")
    return machine


def test_nvidias_tools_are_for_nvidias_cards(tmp_path: Path) -> None:
    machine = efa_machine(tmp_path)
    machine.write(f"{PORT}/hw_counters/out_of_sequence", "7\n")
    found = findings(machine, "P6", "P8", "R9")
    assert "retransmissions" in found["R9"].text
    assert "mlxconfig" not in words(found) and "mlnx_qos" not in words(found)
    assert "EFA" in words(found)


@pytest.mark.parametrize(("file", "outcome"), [
    ("opt/amazon/ofi-nccl/lib/libnccl-net.so", "pass"),
    ("usr/lib/libc.so.6", "fail"),
    (None, "unknown"),
])  # fmt: skip
def test_a_plug_in_is_looked_for_below_the_root(tmp_path: Path, file: str | None, outcome: str) -> None:
    machine = efa_machine(tmp_path)
    if file is not None:
        machine.write(file, "")
    found = findings(machine, "M7")["M7"]
    assert str(found.outcome) == outcome
    assert GPU in machine.functions


def with_virtual_function(machine: ExampleMachine) -> None:
    """The card's RDMA device is its virtual function's alone."""
    lent = "0000:04:00.2"
    card = replace(machine.functions[NIC], rdma_devices=(), virtual_functions=(lent,))
    machine.functions |= {
        NIC: card,
        lent: replace(card, bus_id=lent, rdma_devices=("mlx5_0",), virtual_functions=(), physical_function=NIC),
    }
    machine.link("sys/class/infiniband/mlx5_0/device", f"sys/bus/pci/devices/{lent}")


def test_a_pod_with_a_virtual_function_is_not_told_to_load_a_module_for_the_card(tmp_path: Path) -> None:
    machine = ExampleMachine(tmp_path)
    with_virtual_function(machine)
    outside = findings(machine, "R1")["R1"]
    assert outside.outcome is CheckOutcome.WARN and NIC in outside.text
    machine.environment = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert findings(machine, "R1")["R1"].outcome is CheckOutcome.PASS


def test_what_a_port_states_that_is_down_is_no_rate(tmp_path: Path) -> None:
    """An InfiniBand port without a cable states 10 Gb/s."""
    machine = ExampleMachine(tmp_path)
    spare = "sys/class/infiniband/mlx5_0/ports/2"
    for name, text in (("state", "1: DOWN"), ("phys_state", "2: Polling"), ("rate", "10 Gb/sec (4X SDR)")):
        machine.write(f"{spare}/{name}", f"{text}\n")
    machine.write(f"{spare}/link_layer", "InfiniBand\n")
    found = findings(machine, "R4", "R5")
    assert found["R4"].outcome is CheckOutcome.WARN and "mlx5_0/2 DOWN (Polling)" in found["R4"].text
    assert found["R5"].outcome is CheckOutcome.PASS and "400 Gb/s Ethernet" in found["R5"].text
    machine.write(f"{PORT}/state", "1: DOWN\n")
    assert findings(machine, "R5")["R5"].outcome is CheckOutcome.UNKNOWN


@pytest.mark.parametrize("place", ["0000:99:00.0", "mlx5_core.sf.4"])
def test_a_device_whose_function_is_not_shown_is_not_denied(tmp_path: Path, place: str) -> None:
    """A part of /sys in a container, or a scalable function of a card that shows nothing else."""
    machine = ExampleMachine(tmp_path)
    machine.functions[NIC] = replace(machine.functions[NIC], rdma_devices=())
    machine.link("sys/class/infiniband/mlx5_0/device", f"sys/bus/pci/devices/{place}")
    for shown in (True, False):
        if not shown:
            del machine.functions[NIC]
        found = findings(machine, "R1")["R1"]
        assert found.outcome is CheckOutcome.UNKNOWN and "mlx5_0 cannot be matched" in found.text


FAR, FAR_PORT = "0000:81:00.0", "sys/class/infiniband/mlx5_1/ports/1"


def with_a_far_card(machine: ExampleMachine) -> None:
    """A second card, below the other processor."""
    place = {"host_bridge": "pci0000:80", "numa_node": 1, "parents": ()}
    far = {"bus_id": FAR, "rdma_devices": ("mlx5_1",), "net_devices": ("ens2",)}
    machine.functions[FAR] = replace(machine.functions[NIC], **place, **far)  # type: ignore[arg-type]
    machine.link("sys/class/infiniband/mlx5_1/device", f"sys/bus/pci/devices/{FAR}")
    for name, text in (("state", "4: ACTIVE"), ("link_layer", "InfiniBand"), ("rate", "400 Gb/sec (4X NDR)")):
        machine.write(f"{FAR_PORT}/{name}", f"{text}\n")


@pytest.mark.parametrize("state", ["1: DOWN", "2: INIT"])
def test_a_card_that_is_down_is_no_gpus_nearest(tmp_path: Path, state: str) -> None:
    """What NCCL passes over is not what a GPU has: P1 and R4 say the same."""
    machine = ExampleMachine(tmp_path)
    with_a_far_card(machine)
    assert findings(machine, "P1")["P1"].outcome is CheckOutcome.PASS
    machine.write(f"{PORT}/state", f"{state}\n")
    found = findings(machine, "P1", "R4")
    assert found["P1"].outcome is found["R4"].outcome is CheckOutcome.WARN
    assert "to 0000:81:00.0 is SYS: not by default, and mlx5_0, which is nearer, is down (R4)" in found["P1"].text
    assert "bring up the port" in found["P1"].fix
    host = machine.host()
    report = run_checks(host)
    assert host.best_pairs == ((GPU, FAR),)
    assert report.pairs[GPU, NIC][Verdict.CONFIGURED].outcome is CheckOutcome.FAIL
    assert "no port of mlx5_0 is ACTIVE" in report.pairs[GPU, NIC][Verdict.CONFIGURED].text
    assert "SYS is beyond" in report.pairs[GPU, FAR][Verdict.CONFIGURED].text  # not what another card's port is


def test_where_all_cards_are_down_they_are_judged_as_they_hang(tmp_path: Path) -> None:
    machine = ExampleMachine(tmp_path)
    with_a_far_card(machine)
    for port in (PORT, FAR_PORT):
        machine.write(f"{port}/state", "1: DOWN\n")
    assert machine.host().best_pairs == ((GPU, NIC),)
    assert findings(machine, "R4")["R4"].outcome is CheckOutcome.FAIL


def with_a_scalable_function(machine: ExampleMachine) -> str:
    """An RDMA device of a part of the card; returns where its device is."""
    machine.write_tree()
    part = str((machine.root / "sys/bus/pci/devices" / NIC).resolve().relative_to(machine.root.resolve()))
    part = f"{part}/mlx5_core.sf.4"
    machine.write(f"{part}/uevent", "DRIVER=mlx5_core.sf\n")
    machine.link("sys/class/infiniband/mlx5_2/device", part)
    port = "sys/class/infiniband/mlx5_2/ports/1"
    for name, text in (("state", "4: ACTIVE"), ("link_layer", "InfiniBand"), ("rate", "400 Gb/sec (4X NDR)")):
        machine.write(f"{port}/{name}", f"{text}\n")
    return part


@pytest.mark.parametrize("alone", [False, True])
def test_a_scalable_function_is_a_part_of_its_card(tmp_path: Path, alone: bool) -> None:
    machine = ExampleMachine(tmp_path / "machine")
    if alone:
        machine.functions[NIC] = replace(machine.functions[NIC], rdma_devices=())
        machine.remove("sys/class/infiniband/mlx5_0")
    part = with_a_scalable_function(machine)
    host = Host(Files(machine.root), read_tree(machine.root))
    (nic,) = host.nics
    assert (nic.bus_id, nic.name, nic.gigabits) == (NIC, "mlx5_2" if alone else "mlx5_0", 400)
    assert devices_of_hardware(host).outcome is CheckOutcome.PASS
    archive = tmp_path / "machine.tar.gz"
    write_capture(archive, host)
    with opened_capture(archive) as capture:
        again = Host(Files(capture.root, capture.denied), read_tree(capture.root))
        assert [device.bus_id for device in again.rdma_devices or ()] == [NIC] * (1 if alone else 2)
        assert devices_of_hardware(again).outcome is CheckOutcome.PASS
    assert part.endswith(f"{NIC}/mlx5_core.sf.4")


@pytest.mark.parametrize(("gpus", "shared"), [(2, ""), (3, "(2 GPUs)")])
def test_gpus_with_a_choice_of_cards_share_none_as_long_as_each_has_one(tmp_path: Path, gpus: int, shared: str) -> None:
    """Two cards below the GPUs' switch, and one that is near to none: a third GPU makes two of them share."""
    machine = ExampleMachine(tmp_path)
    for number in range(1, gpus):
        bus = f"{GPU[:-1]}{number}"
        machine.functions[bus] = replace(machine.functions[GPU], bus_id=bus)
    first = machine.functions[NIC]
    for bus, name, parents in (f"{NIC[:-1]}1", "mlx5_8", first.parents), ("0000:80:00.0", "mlx5_9", (NIC_PORT,)):
        machine.functions[bus] = replace(first, bus_id=bus, parents=parents, rdma_devices=(name,), net_devices=())
        machine.write(f"sys/class/infiniband/{name}/hca_type", "MT4129\n")
        machine.link(f"sys/class/infiniband/{name}/device", f"sys/bus/pci/devices/{bus}")
    found = findings(machine, "P2")["P2"]
    assert found.outcome is (CheckOutcome.WARN if shared else CheckOutcome.PASS), found.text
    assert shared in found.text
