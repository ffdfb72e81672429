from dataclasses import Field, fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from gradwire.topology.graph import Defect, GivenPath, Gpu, Machine, Nic, NvSwitch
from gradwire.topology.paths import Distances, PathType
from gradwire.topology.presets import dgx_h100
from gradwire.topology.readers.detect import PROVIDED, detect_machine
from gradwire.topology.readers.merge import merge

if TYPE_CHECKING:
    from topology.conftest import SysTree


def flat(machine: Machine) -> Machine:
    """The machine as a virtual machine sees it: everything right below the CPUs, no links, no names."""
    gpus = tuple(
        replace(gpu, parent=Distances(machine).cpu_of(gpu), compute_capability=None, name=None) for gpu in machine.gpus
    )
    nics = tuple(replace(nic, parent=Distances(machine).cpu_of(nic)) for nic in machine.nics)
    return replace(
        machine, switches=(), links=(), links_known=False, nvswitches=(), gpus=gpus, nics=nics, sources=("sysfs",)
    )


def test_a_second_source_restores_what_the_first_could_not_see() -> None:
    whole = dgx_h100()
    merged = merge(flat(whole), whole, add=False)
    assert set(merged.switches) == set(whole.switches)
    assert replace(merged, switches=whole.switches, sources=whole.sources) == whole
    assert merged.sources == ("sysfs", "preset")


def test_merging_a_machine_with_itself_changes_nothing() -> None:
    whole = dgx_h100()
    assert replace(merge(whole, whole, add=True), sources=whole.sources) == whole


NOT_TAKEN_OVER = {"nics", "unclassified"}
"""Fields of a second description that a first one without them does not get: its NICs are this host's, see `merge`."""


@pytest.mark.parametrize("field", fields(Machine), ids=lambda field: str(field.name))
def test_each_field_is_taken_from_the_second_source_or_named_as_not_taken(field: Field[object]) -> None:
    whole = dgx_h100()
    gpus = whole.gpus[:2]
    path = GivenPath(a=gpus[0].key, b=gpus[1].key, name="SYS")
    whole = replace(
        whole,
        hostname="a",
        product="b",
        given_paths=(path,),
        unclassified=("0000:01:00.0",),
        defects=(Defect(kind="self_link", where="d"),),
        virtual=True,
        notes=("c",),
    )
    nothing, everything = getattr(Machine(), field.name), getattr(whole, field.name)
    assert everything != nothing, "give the field a value above"
    merged = merge(replace(whole, **{field.name: nothing}), whole, add=True)
    found, wanted = getattr(merged, field.name), nothing if field.name in NOT_TAKEN_OVER else everything
    assert (set(found) == set(wanted)) if isinstance(found, tuple) else found == wanted


def test_a_file_about_another_machine_adds_no_devices_and_is_noted() -> None:
    whole = dgx_h100()
    own = replace(whole, gpus=whole.gpus[:2], nics=whole.nics[:2])
    merged = merge(own, whole, add=False)
    assert merged.gpus == own.gpus
    assert len([note for note in merged.notes if "does not have" in note]) == 14
    assert len(merge(own, whole, add=True).gpus) == 8


def test_a_providers_file_gives_a_virtual_machine_its_switches(systree: "SysTree") -> None:
    whole = dgx_h100()
    systree.host({0: "0-55", 1: "56-111"}, virtual=True)
    devices: list[Gpu | Nic] = [*whole.gpus, *whole.nics]
    for device in devices:
        numa = int(str(Distances(whole).cpu_of(device))[4:])
        kind = 0x030200 if device in whole.gpus else 0x020700
        systree.device("pci0000:00", device.key, kind=kind, vendor=0x10DE if kind == 0x030200 else 0x15B3, numa=numa)
    before = detect_machine(systree.root)
    below = "".join(
        f'<pci busid="{gpu.parent}" class="0x060400"><pci busid="{gpu.bus}" class="0x030200"><gpu dev="{gpu.index}" '
        f'sm="90"/></pci><pci busid="{nic.bus}" class="0x020700"/></pci>'
        for gpu, nic in zip(whole.gpus, whole.nics[:8], strict=True)
    )
    systree.write(PROVIDED, f'<system version="1"><cpu numaid="0">{below}</cpu></system>')
    after = detect_machine(systree.root)
    assert Distances(before).nearest_nics(before.gpus[0])[0] is PathType.PHB
    assert Distances(after).nearest_nics(after.gpus[0])[0] is PathType.PIX
    assert after.sources == ("sysfs", "NCCL XML")
    systree.write(PROVIDED, "<graphs/>")
    broken = detect_machine(systree.root)
    assert broken.gpus == before.gpus
    assert any("was left out" in note and "graph file" in note for note in broken.notes)


def test_a_missing_driver_is_noted_only_where_there_is_a_gpu(systree: "SysTree") -> None:
    systree.host({0: "0-15"})
    silent = SimpleNamespace()
    assert detect_machine(systree.root, library=silent).notes == (
        "No PCI device is visible: in a container, mount the host's /sys.",
    )
    systree.device("pci0000:00", "0000:01:00.0", kind=0x030200, vendor=0x10DE)
    (note,) = detect_machine(systree.root, library=silent).notes
    assert note.startswith("NVLink and GPU models are unknown: NVML does not start")
    systree.write("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA L4")
    (note,) = detect_machine(systree.root, library=silent).notes
    assert note.startswith("NVLink is unknown: NVML does not start")


def test_the_driver_names_the_gpus_that_sysfs_found(systree: "SysTree") -> None:
    systree.host({0: "0-15"})
    systree.device("pci0000:00", "0000:01:00.0", kind=0x030200, vendor=0x10DE)
    library = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId="00000000:01:00.0"),
        nvmlDeviceGetName=lambda handle: b"NVIDIA L4",
    )
    (gpu,) = detect_machine(systree.root, library=library).gpus
    assert (gpu.name, gpu.index, gpu.parent) == ("NVIDIA L4", 0, "numa0")


@pytest.mark.parametrize("switched", [False, True])
def test_grace_reaches_its_nic_through_the_chip_to_chip_link(systree: "SysTree", switched: bool) -> None:
    systree.host({0: "0-71"})
    above = systree.switch("pci0009:00", 1, 0x40, 1)[0] if switched else ("pci0009:00",)
    systree.device(*above, "0009:01:00.0", kind=0x030200, vendor=0x10DE)
    systree.device("pci0000:00", "0000:03:00.0", kind=0x020700, vendor=0x15B3)
    values = {170: 10, 172: 44_000}
    library = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId="00000009:01:00.0"),
        nvmlDeviceGetFieldValues=lambda handle, fields: [
            SimpleNamespace(nvmlReturn=int(field not in values) * 3, value=SimpleNamespace(uiVal=values.get(field)))
            for field, _ in fields
        ],
    )
    machine = detect_machine(systree.root, library=library)
    assert Distances(machine).nearest_nics(machine.gpus[0])[0] is PathType.P2C
    assert machine.links[0].bytes_per_second == 440e9


def test_this_host_is_read_without_an_error() -> None:
    machine = detect_machine()
    assert machine.cpus
    assert "sysfs" in machine.sources


@pytest.mark.parametrize("add", [True, False])
def test_what_is_known_is_never_overwritten(add: bool) -> None:
    whole = dgx_h100()
    other = replace(
        whole, nvswitches=(NvSwitch(key="hidden"),), gpus=tuple(replace(g, name="other") for g in whole.gpus)
    )
    merged = merge(whole, other, add=add)
    assert merged.nvswitches == whole.nvswitches
    assert merged.gpus == whole.gpus
