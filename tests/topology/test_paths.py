from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Cpu, DeviceLink, Gpu, Machine, Nic, NvSwitch, PciSwitch, Port
from gradwire.topology.paths import Distances, PathType, path_of_printed
from gradwire.topology.presets import dgx_a100, pcie_box

ORDER = list(PathType)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Random forests: switches hang off earlier switches or CPUs, devices off anything."""
    cpus = [Cpu(key=f"numa{i}", numa=i) for i in range(draw(st.integers(1, 3)))]
    places = [cpu.key for cpu in cpus]
    switches = []
    for i in range(draw(st.integers(0, 6))):
        switches.append(PciSwitch(key=f"0000:{i:02x}:00.0", parent=draw(st.sampled_from(places)), vendor=0x11F8))
        places.append(switches[-1].key)
    gpus = [
        Gpu(key=f"0000:4{i}:00.0", bus=f"0000:4{i}:00.0", index=i, parent=draw(st.sampled_from(places)), vendor=0x10DE,
            class_code=0x030200, compute_capability=draw(st.sampled_from([70, 80, 90])))
        for i in range(draw(st.integers(0, 5)))
    ]  # fmt: skip
    nics = [
        Nic(key=f"0000:5{i}:00.0", bus=f"0000:5{i}:00.0", parent=draw(st.sampled_from(places)), class_code=0x020700,
            ports=(Port(name=f"mlx5_{i}", index=i, gdr=draw(st.booleans())),))
        for i in range(draw(st.integers(0, 4)))
    ]  # fmt: skip
    pairs = [(a.key, b.key) for i, a in enumerate(gpus) for b in gpus[i + 1 :]]
    joined = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=5)) if pairs else []
    links = tuple(DeviceLink(a=a, b=b, kind="nvlink", count=2) for a, b in joined)
    return Machine(cpus=tuple(cpus), switches=tuple(switches), gpus=tuple(gpus), nics=tuple(nics), links=links)


@settings(max_examples=200, deadline=None)
@given(machines())
def test_distances_are_symmetric_and_local_to_oneself(machine: Machine) -> None:
    distances = Distances(machine)
    for a in machine.gpus:
        assert distances.gpu_gpu(a, a) is PathType.LOC
        for b in machine.gpus:
            assert distances.gpu_gpu(a, b) is distances.gpu_gpu(b, a)
    for one in machine.nics:
        for other in machine.nics:
            assert distances.nic_nic(one, other) is distances.nic_nic(other, one)


@settings(max_examples=200, deadline=None)
@given(machines())
def test_nearest_nics_are_exactly_those_at_the_least_distance(machine: Machine) -> None:
    distances = Distances(machine)
    for gpu in machine.gpus:
        best, nearest = distances.nearest_nics(gpu)
        for nic in machine.nics:
            path = distances.gpu_nic(gpu, nic)
            assert path is not None
            assert best is not None
            assert (path is best) == (nic in nearest)
            assert ORDER.index(best) <= ORDER.index(path)


def stacked(device: int, upper: int, lower: int) -> Machine:
    """GPU below the lower, NIC below the upper of two Broadcom switches with these subsystem ids."""
    half = PciSwitch(key="", vendor=0x1000, device=device, subsystem_vendor=0x1000)
    return Machine(
        cpus=(Cpu(key="numa0", numa=0),),
        switches=(
            replace(half, key="0000:01:00.0", parent="numa0", subsystem_device=upper),
            replace(half, key="0000:02:00.0", parent="0000:01:00.0", subsystem_device=lower),
        ),
        gpus=(Gpu(key="g", parent="0000:02:00.0"),),
        nics=(Nic(key="n", parent="0000:01:00.0"),),
    )


@pytest.mark.parametrize(
    ("device", "upper", "lower", "expected"),
    [
        (0xC010, 0xA023, 0xA042, PathType.PIX),
        (0xC030, 0x0123, 0x1123, PathType.PIX),
        (0xC030, 0x1123, 0x0123, PathType.PXB),
        (0xC010, 0xB023, 0xB042, PathType.PXB),
        (0xC012, 0xA023, 0xA042, PathType.PXB),
    ],
)
def test_stacked_broadcom_switches_count_as_one(device: int, upper: int, lower: int, expected: PathType) -> None:
    machine = stacked(device, upper, lower)
    assert Distances(machine).gpu_nic(machine.gpus[0], machine.nics[0]) is expected


def test_a_chip_to_chip_link_turns_the_way_through_the_cpu_into_p2c() -> None:
    box = pcie_box(2)
    grace = replace(box, links=(DeviceLink(a=box.gpus[0].key, b="numa0", kind="c2c"),))
    assert Distances(box).gpu_nic(box.gpus[0], box.nics[0]) is PathType.PHB
    assert Distances(grace).gpu_nic(box.gpus[0], box.nics[0]) is PathType.P2C
    assert Distances(grace).qualifies_for_gdr(box.gpus[0], box.nics[0])


def test_two_hops_of_nvlink_are_nvb() -> None:
    box = pcie_box(3)
    keys = [gpu.key for gpu in box.gpus]
    chained = replace(box, links=tuple(DeviceLink(a=a, b=b, kind="nvlink") for a, b in pairwise(keys)))
    distances = Distances(chained)
    assert distances.gpu_gpu(box.gpus[0], box.gpus[1]) is PathType.NVL
    assert distances.gpu_gpu(box.gpus[0], box.gpus[2]) is PathType.NVB


def test_an_unknown_numa_node_is_unknown_and_not_another_socket() -> None:
    machine = Machine(
        cpus=(Cpu(key="numa?@pci0000:00"), Cpu(key="numa?@pci0001:00"), Cpu(key="numa0", numa=0)),
        gpus=(Gpu(key="g", parent="numa?@pci0000:00"), Gpu(key="h")),
        nics=(Nic(key="same", parent="numa?@pci0000:00"), Nic(key="other", parent="numa?@pci0001:00"),
              Nic(key="known", parent="numa0")),
    )  # fmt: skip
    distances = Distances(machine)
    paths = [distances.gpu_nic(machine.gpus[0], nic) for nic in machine.nics]
    assert paths == [PathType.PHB, None, None]
    assert distances.nearest_nics(machine.gpus[1]) == (None, ())


def test_a_nic_that_cannot_register_gpu_memory_does_not_qualify() -> None:
    machine = dgx_a100()
    gpu, nic = machine.gpus[0], next(nic for nic in machine.nics if nic.ports[0].name == "mlx5_0")
    unable = replace(nic, ports=(replace(nic.ports[0], gdr=False),))
    assert Distances(machine).qualifies_for_gdr(gpu, nic)
    assert not Distances(machine).qualifies_for_gdr(gpu, unable)
    assert not Distances(machine).qualifies_for_gdr(replace(gpu, gdr=False), nic)


@pytest.mark.parametrize("length", [2, 70, 20_000])
def test_cycles_and_towers_of_switches_are_refused(length: int) -> None:
    ring = tuple(PciSwitch(key=str(i), parent=str((i + 1) % length)) for i in range(length))
    with pytest.raises(TopologyError, match="below itself"):
        Distances(Machine(switches=ring))


def test_more_gpus_than_a_machine_can_have_are_refused() -> None:
    with pytest.raises(TopologyError, match="1000 GPUs"):
        Distances(Machine(gpus=tuple(Gpu(key=str(i)) for i in range(1000))))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("NV12", PathType.NVL), ("NODE", PathType.PHB), ("PXB", PathType.PXB), ("?", None), ("NVX", None), ("", None)],
)
def test_printed_names(name: str, expected: PathType | None) -> None:
    assert path_of_printed(name) is expected


def test_hidden_switch_joins_all_gpus() -> None:
    box = pcie_box(3)
    links = tuple(DeviceLink(a=gpu.key, b="hidden", kind="nvlink", count=18) for gpu in box.gpus)
    machine = replace(box, links=links, nvswitches=(NvSwitch(key="hidden"),))
    assert Distances(machine).gpu_gpu(box.gpus[0], box.gpus[2]) is PathType.NVL
