"""Two descriptions of one machine made one: what the first does not know is taken from the second.

A field of `Machine` that `merge` does not name is taken from the second if it is None or empty in the first, as a field
of a device is. `unclassified` is never taken over: the first has looked at the same PCI functions itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TypeVar

from gradwire.topology.graph import Cpu, Gpu, Machine, Nic, PciSwitch

Known = TypeVar("Known", Gpu, Nic, Cpu, Machine)
Device = TypeVar("Device", Gpu, Nic, Cpu)


def filled(first: Known, second: Known) -> Known:
    """Returns `first` with its unknown fields (None or empty) taken from `second`.

    Args:
        first: Device or machine whose known fields take precedence.
        second: The same one from another source.
    """
    gaps = {field.name for field in fields(first) if getattr(first, field.name) in (None, ())}
    return replace(first, **{name: getattr(second, name) for name in gaps})


def merge(first: Machine, second: Machine, *, add: bool) -> Machine:
    """Merges two descriptions of one machine; fields that `first` does not know are taken from `second`.

    A device moves to its place in `second` if only `second` has a switch above it: virtual machines are flat, and
    their providers publish the real tree as a file. Devices of `second` that the result lacks are named in the notes.

    Args:
        first: Description that takes precedence.
        second: Description of the same host from another source.
        add: True adds GPUs that only `second` has, as for a driver; False ignores them, as for a file.
    """
    switches = {switch.key: switch for switch in first.switches}
    adopted = _adopted(first, second, switches)
    cpus = _united(first.cpus, second.cpus, add=True)
    gpus, nics = _united(first.gpus, second.gpus, add=add), _united(first.nics, second.nics, add=False)
    known = {gpu.key for gpu in gpus} | {nic.key for nic in nics}
    foreign = [device.key for device in _devices(second) if device.key not in known]
    notes = [f"{', '.join(second.sources)} names {key}, which this host does not have." for key in foreign]
    return replace(
        filled(first, second),
        cpus=cpus,
        switches=(*first.switches, *adopted[0]),
        gpus=tuple(replace(gpu, parent=adopted[1].get(gpu.key, gpu.parent)) for gpu in gpus),
        nics=tuple(replace(nic, parent=adopted[1].get(nic.key, nic.parent)) for nic in nics),
        links_known=first.links_known or second.links_known,
        links=first.links or tuple(link for link in second.links if link.a in known),
        given_paths=first.given_paths or tuple(path for path in second.given_paths if {path.a, path.b} <= known),
        unclassified=first.unclassified,
        defects=(*first.defects, *second.defects),
        notes=(*first.notes, *second.notes, *notes),
        sources=(*first.sources, *second.sources),
    )


def _united(first: Sequence[Device], second: Sequence[Device], *, add: bool) -> tuple[Device, ...]:
    """Returns the devices of `first` with gaps filled from `second`, then, if `add`, those that only `second` has."""
    others: dict[str, Device] = {device.key: device for device in second}
    both: list[Device] = [filled(device, others.get(device.key, device)) for device in first]
    mine = {device.key for device in first}
    both.extend(device for device in second if add and device.key not in mine)
    return tuple(both)


def _devices(machine: Machine) -> list[Gpu | Nic]:
    """Returns the GPUs and NICs."""
    return [*machine.gpus, *machine.nics]


def _adopted(
    first: Machine, second: Machine, known: Mapping[str, PciSwitch]
) -> tuple[list[PciSwitch], dict[str, str | None]]:
    """Finds the GPUs and NICs that are below no switch in `first`, and below one in `second`.

    Args:
        first: Description that takes precedence, such as a virtual machine's own, without switches.
        second: Description whose switches are taken over.
        known: Key -> switch of `first`.

    Returns:
        (switches to add to `first`: those above such devices, as far as it lacks them; key of the device -> key of the
        switch right above it).
    """
    theirs = {switch.key: switch for switch in second.switches}
    places = {device.key: device.parent for device in _devices(second)}
    moved = {
        device.key: places[device.key]
        for device in _devices(first)
        if device.parent not in known and places.get(device.key) in theirs
    }
    needed: dict[str, PciSwitch] = {}
    for place in moved.values():
        key = place
        while key is not None and key in theirs and key not in needed and key not in known:
            needed[key] = theirs[key]
            key = theirs[key].parent
    return list(needed.values()), moved
