"""Machine <-> JSON: a summary with the answers people look for, and under `graph` the machine itself, lossless."""

import json

from gradwire.topology.assign import nics_of_gpus
from gradwire.topology.bandwidth import nic_bytes_per_second, pcie_bytes_per_second
from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Gpu, Machine, Nic
from gradwire.topology.labels import Labels
from gradwire.topology.paths import Distances
from gradwire.topology.pci_ids import normal_bus_id
from gradwire.topology.show.plain import from_plain, to_plain

Object = dict[str, object]


def write(machine: Machine) -> str:
    """Returns a machine as JSON text.

    Args:
        machine: The machine.
    """
    return json.dumps(to_object(machine), indent=1)


def read(text: str) -> Machine:
    """Returns the machine in a text that `write` returned.

    Args:
        text: JSON with the machine under `graph`.

    Raises:
        TopologyError: The text is no JSON, has no `graph`, or something in it has the wrong type.
    """
    try:
        document: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise TopologyError(f"not JSON: {error.msg}", line=error.lineno) from None
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"not JSON: {error}") from None
    if not isinstance(document, dict) or "graph" not in document:
        raise TopologyError("JSON without the key `graph`; expected what `gradwire topo --json` prints")
    machine = from_plain(document["graph"], Machine, "graph")
    _check(machine)
    return machine


def _check(machine: Machine) -> None:
    """Raises TopologyError if keys repeat, bus ids are malformed, links lead nowhere, or devices form a cycle."""
    keys: set[str] = set()
    for group in (machine.cpus, machine.switches, machine.gpus, machine.nics, machine.nvswitches):
        for item in group:
            if item.key in keys:
                raise TopologyError(f"`graph` has two things with the key {item.key!r}")
            keys.add(item.key)
    bus_ids = [switch.key for switch in machine.switches]
    bus_ids += [device.bus for group in (machine.gpus, machine.nics) for device in group if device.bus is not None]
    for bus in bus_ids:
        if normal_bus_id(bus) != bus:
            raise TopologyError(f"`graph` has the bus id {bus!r}, expected for example 0000:04:00.0")
    for link in machine.links:
        for end in (link.a, link.b):
            if end not in keys and end != "hidden":
                raise TopologyError(f"`graph.links` names {end!r}, which is not in the graph")
    Distances(machine)


def to_object(machine: Machine) -> Object:
    """Returns a machine as nested dictionaries and lists.

    Args:
        machine: The machine.
    """
    labels = Labels(machine)
    chosen = nics_of_gpus(machine)
    gpu_pairs = [(a, b) for i, a in enumerate(machine.gpus) for b in machine.gpus[i + 1 :]]
    gpu_keys = {gpu.key for gpu in machine.gpus}
    between = [link for link in machine.links if link.a in gpu_keys and link.b in gpu_keys]
    return {
        "hostname": machine.hostname,
        "product": machine.product,
        "n_gpu": len(machine.gpus),
        "n_nic": len(machine.nics),
        "n_numa": _n_numa(machine),
        "nvswitch": bool(machine.nvswitches),
        "nvlink_domain": machine.nvlink_domain,
        "virtual": machine.virtual,
        "nics": [_nic(nic) for nic in machine.nics],
        "gpus": [_gpu(gpu, labels, chosen[gpu.key]) for gpu in machine.gpus],
        "gpu_gpu": sorted({labels.gpu_gpu(a, b) for a, b in gpu_pairs} - {"?"}),
        "gpu_gpu_links": len(between),
        "gpu_gpu_link_kinds": sorted({link.kind for link in between}),
        "self_nvlink": any(defect.kind == "self_link" for defect in machine.defects),
        "per_gpu": {labels.gpu(gpu): _per_gpu(gpu, labels) for gpu in machine.gpus},
        "asymmetric_cells": [defect.where for defect in machine.defects if defect.kind == "asymmetric_cell"],
        "short_rows": [defect.where for defect in machine.defects if defect.kind == "short_row"],
        "unclassified": list(machine.unclassified),
        "notes": [*machine.notes, *labels.link_notes()],
        "sources": list(machine.sources),
        "graph": to_plain(machine),
    }


def _n_numa(machine: Machine) -> int:
    """Returns the number of NUMA nodes, told apart by number or else by cores; those without either count as one."""
    return len({cpu.cores if cpu.numa is None else cpu.numa for cpu in machine.cpus})


def _flag(value: bool | None) -> str | None:
    """Returns a yes or no as NCCL's file writes it, `1` or `0`; None stays None."""
    return None if value is None else str(int(value))


def _number(value: int | None) -> str | None:
    """Returns a number as NCCL's file writes it, as text; None stays None."""
    return None if value is None else str(value)


def _nic(nic: Nic) -> Object:
    return {
        "bus": nic.bus,
        "nets": [port.name for port in nic.ports],
        "gdr": [flag for flag in (_flag(port.gdr) for port in nic.ports) if flag is not None],
        "key": nic.key,
        "name": nic.name,
        "driver": nic.driver,
        "link_layers": sorted({port.link_layer for port in nic.ports if port.link_layer}),
        "bytes_per_second": nic_bytes_per_second(nic),
        "pcie_bytes_per_second": pcie_bytes_per_second(nic.pcie),
        "virtual": any(port.virtual for port in nic.ports),
        "virtual_functions": nic.virtual_functions,
    }


def _nets_or_bus(nic: Nic) -> list[str] | str:
    """Returns a card's name as a list of its ports, or its bus id where ports are unknown."""
    return [port.name for port in nic.ports] or nic.bus or nic.key


def _lists_links(machine: Machine) -> bool:
    """Returns whether 0 links means that the source lists none: NCCL's file does, whether or not NCCL will add some."""
    return machine.links_known or any(source.startswith("NCCL XML") for source in machine.sources)


def _gpu(gpu: Gpu, labels: Labels, chosen: Nic | None) -> Object:
    distances = labels.distances
    path, nearest = distances.nearest_nics(gpu)
    cpu = labels.cpu(gpu)
    flags = sorted({flag for nic in nearest for port in nic.ports if (flag := _flag(port.gdr)) is not None})
    return {
        "bus": gpu.bus,
        "dev": _number(gpu.index),
        "sm": _number(gpu.compute_capability),
        "numa": None if cpu is None else _number(cpu.numa),
        "nvlinks": labels.link_count(gpu) if _lists_links(labels.machine) else None,
        "nearest_path": None if path is None else path.name,
        "nearest": [_nets_or_bus(nic) for nic in nearest],
        "within_default_level": _uses_gdr(gpu, labels),
        "gdr_gpu_attr": _flag(gpu.gdr),
        "gdr_net_attr": flags,
        "name": gpu.name,
        "nic": None if chosen is None else _nets_or_bus(chosen),
        "nvlink_bytes_per_second": labels.link_bytes_per_second(gpu),
        "pcie_bytes_per_second": pcie_bytes_per_second(gpu.pcie),
    }


def _uses_gdr(gpu: Gpu, labels: Labels) -> bool | None:
    """Returns whether NCCL uses GPUDirect RDMA on a GPU's nearest cards; None where no distance to a card is known."""
    path, nearest = labels.distances.nearest_nics(gpu)
    if path is None and labels.machine.nics:
        return None
    return any(labels.distances.qualifies_for_gdr(gpu, nic) for nic in nearest)


def _per_gpu(gpu: Gpu, labels: Labels) -> Object:
    path, nearest = labels.distances.nearest_nics(gpu)
    return {
        "best": None if path is None else path.name,
        "nics": [port.name for nic in nearest for port in nic.ports],
        "gdr_default": _uses_gdr(gpu, labels),
    }
