"""A machine for the terminal: the tree as lstopo would print it, the matrix as `nvidia-smi topo -m` would.

Unlike nvidia-smi's, the matrix has every network card, those without verbs (Slingshot, EFA, plain Ethernet) included,
and `gradwire.topology.readers.smi` reads it back.
"""

import re

from rich.markup import escape
from rich.tree import Tree

from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Cpu, Gpu, Machine, Nic, PciSwitch
from gradwire.topology.labels import (
    UNKNOWN,
    Labels,
    cpu_name,
    gigabytes,
    model_name,
    nic_name,
    nic_rate,
    nic_summary,
    nic_with_state,
    pcie_text,
    switch_name,
)
from gradwire.topology.paths import PathType

MAX_MATRIX_COLUMNS = 256


def headline(machine: Machine) -> str:
    """Returns one line about the whole machine, its name first.

    Args:
        machine: The machine.
    """
    return f"{title(machine)} · {summary(machine)}"


def title(machine: Machine) -> str:
    """Returns a machine's name: host and model, as far as they are known, else the file that describes it.

    Args:
        machine: The machine.
    """
    files = (match[1] for source in machine.sources if (match := re.search(r" \((.+)\)$", source)))
    named = " · ".join(filter(None, (machine.hostname, machine.product)))
    return named or next(files, "unnamed machine")


def summary(machine: Machine) -> str:
    """Returns one line with the numbers of a machine's devices and the sources they were read from.

    Args:
        machine: The machine.
    """
    domain = machine.nvlink_domain
    counts = [
        (sum(cpu.numa is not None for cpu in machine.cpus), "NUMA node"),
        (len(machine.gpus), "GPU"),
        (len(machine.nics), "NIC"),
        (len(machine.nvswitches), "NVSwitch"),
        (len(machine.unclassified), "unclassified PCI function"),
    ]
    parts = [
        f"{count} {name}{'' if count == 1 else 'es' if name.endswith('ch') else 's'}" for count, name in counts if count
    ]
    if any(switch.key == "hidden" for switch in machine.nvswitches):
        parts = ["NVSwitch" if part.endswith("NVSwitch") else part for part in parts]
    parts += [f"NVLink domain of several hosts, clique {domain.rpartition('/')[2]}"] if domain else []
    kind = {True: "virtual machine", False: "bare metal", None: ""}[machine.virtual]
    return " · ".join([*filter(None, [kind]), *parts, f"from {', '.join(machine.sources) or 'nothing'}"])


def tree(machine: Machine) -> Tree:
    """Returns the machine as a tree that rich prints.

    Args:
        machine: The machine.
    """
    labels = Labels(machine)
    root = Tree(f"[bold]{escape(headline(machine))}[/]")
    cpus = sorted(machine.cpus, key=lambda cpu: (cpu.numa is None, cpu.numa or 0, cpu.key))
    nodes: dict[str | None, Tree] = {cpu.key: root.add(_cpu(cpu)) for cpu in cpus}
    used = used_switches(machine)
    for switch in used:
        nodes[switch.key] = nodes.get(switch.parent, root).add(_switch(switch))
    nowhere: Tree | None = None
    devices: list[Gpu | Nic] = [*machine.gpus, *machine.nics]
    for device in devices:
        below = nodes.get(device.parent)
        if below is None:
            nowhere = nowhere or root.add("[dim]place unknown[/]")
            below = nowhere
        below.add(_gpu(device, labels) if isinstance(device, Gpu) else _nic(device, labels))
    if len(used) < len(machine.switches):
        root.add(f"[dim]{len(machine.switches) - len(used)} PCIe switches without a GPU or NIC below them[/]")
    for note in (*machine.notes, *labels.link_notes()):
        root.add(f"[yellow]note[/] {escape(note)}")
    return root


def used_switches(machine: Machine) -> list[PciSwitch]:
    """Returns the switches that have a device below them, so that each stands after the one above it.

    Args:
        machine: The machine.
    """
    switches = {switch.key: switch for switch in machine.switches}
    ordered: dict[str, PciSwitch] = {}
    devices: list[Gpu | Nic] = [*machine.gpus, *machine.nics]
    for device in devices:
        above: list[PciSwitch] = []
        key = device.parent
        while key in switches and key not in ordered:
            above.append(switches[key])
            key = switches[key].parent
        ordered |= {switch.key: switch for switch in reversed(above)}
    return list(ordered.values())


def _cpu(cpu: Cpu) -> str:
    about = [cpu_name(cpu)]
    about += [f"socket {cpu.socket}"] if cpu.socket is not None else []
    about += [cpu.vendor] if cpu.vendor else []
    about += [f"cores {cpu.cores}"] if cpu.cores else []
    return f"[bold blue]{escape(' · '.join(about))}[/]"


def _switch(switch: PciSwitch) -> str:
    rate = "" if switch.virtual else pcie_text(switch.pcie)
    return f"[magenta]{escape(switch_name(switch))}[/]" + (f" [dim]{escape(rate)}[/]" if rate else "")


def _gpu(gpu: Gpu, labels: Labels) -> str:
    slices = f"{len(gpu.slices)} MIG slice{'s' * (len(gpu.slices) > 1)}" if gpu.slices else ""
    about = [gpu.bus or "", model_name(gpu), slices, pcie_text(gpu.pcie), labels.c2c(gpu)]
    if labels.bundles[gpu.key]:
        kind = labels.bundles[gpu.key][0].kind.replace("nvlink", "NVLink").replace("xgmi", "xGMI")
        rate = labels.link_bytes_per_second(gpu)
        about.append(f"{kind} x{labels.link_count(gpu)}" + ("" if rate is None else f", {gigabytes(rate)}"))
    path, nics = labels.distances.nearest_nics(gpu)
    if path is not None:
        names = ", ".join(nic_with_state(nic) for nic in nics[:4]) + (" ..." if len(nics) > 4 else "")
        about.append(f"nearest NIC {path.name}: {names}")
    return f"[green]{labels.gpu(gpu)}[/] {escape(' · '.join(filter(None, about)))}".rstrip()


def _nic(nic: Nic, labels: Labels) -> str:
    near = [labels.gpu(gpu) for gpu in labels.machine.gpus if labels.distances.qualifies_for_gdr(gpu, nic)]
    gdr = f"[bold green]GDR distance to {', '.join(near)}[/]" if near else ""
    return " ".join(filter(None, [f"[cyan]{escape(nic_name(nic))}[/]", escape(nic_summary(nic)), gdr]))


def matrix(machine: Machine) -> str:
    """Returns the distances between all GPUs and NICs as a table, with affinities and legends.

    Args:
        machine: The machine.

    Raises:
        TopologyError: There are too many devices for a table.
    """
    labels = Labels(machine)
    gpus, nics = sorted(machine.gpus, key=lambda gpu: _natural(labels.gpu(gpu))), sorted(machine.nics, key=_nic_order)
    devices: list[Gpu | Nic] = [*gpus, *nics]
    if len(devices) > MAX_MATRIX_COLUMNS:
        raise TopologyError(f"{len(devices)} devices do not fit a matrix of at most {MAX_MATRIX_COLUMNS} columns")
    names = [labels.gpu(gpu) for gpu in gpus] + [f"NIC{i}" for i in range(len(nics))]
    rows = [["", *names, "CPU Affinity", "NUMA Affinity"]]
    for name, device in zip(names, devices, strict=True):
        cells = [_cell(labels, device, other) for other in devices]
        rows.append([name, *cells, *_affinity(labels, device)])
    legend = ["", "Legend:", "", "  X    = self", "  NV#  = NVL over # links, as NVL below"]
    legend += [f"  {kind.name:<4} = {kind.value}" for kind in PathType if kind is not PathType.LOC]
    legend += [f"  {UNKNOWN:<4} = unknown"]
    if nics:
        legend += ["", "NIC Legend:", ""]
        legend += [f"  NIC{i}: {nic_name(nic)}  {_nic_legend(nic)}" for i, nic in enumerate(nics)]
    return "\n".join([*("\t".join(row).rstrip() for row in rows), *legend])


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a sort key under which mlx5_2 comes before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d{1,9})", name)]


def _nic_order(nic: Nic) -> list[tuple[int, str]]:
    """Returns a sort key that orders NICs by their ports' names, as nvidia-smi does; those without ports come first."""
    return _natural(nic_name(nic)) if nic.ports else [(-1, nic_name(nic))]


def _cell(labels: Labels, a: Gpu | Nic, b: Gpu | Nic) -> str:
    """Returns one cell of the matrix: ` X ` for the device itself, a path type, or `?`."""
    if a.key == b.key:
        return " X "
    if isinstance(a, Gpu) and isinstance(b, Gpu):
        return labels.gpu_gpu(a, b)
    if isinstance(a, Gpu) and isinstance(b, Nic):
        path = labels.distances.gpu_nic(a, b)
    elif isinstance(a, Nic) and isinstance(b, Gpu):
        path = labels.distances.gpu_nic(b, a)
    else:
        assert isinstance(a, Nic) and isinstance(b, Nic)
        path = labels.distances.nic_nic(a, b)
    return UNKNOWN if path is None else path.name


def _affinity(labels: Labels, device: Gpu | Nic) -> list[str]:
    """Returns the two cells after the matrix: the CPU's cores and its NUMA node, empty and `N/A` if unknown."""
    cpu = labels.cpu(device)
    if cpu is None:
        return ["", "N/A"]
    return [cpu.cores or "", "N/A" if cpu.numa is None else str(cpu.numa)]


def _nic_legend(nic: Nic) -> str:
    """Returns a NIC's bus id and rate in brackets, for the legend."""
    bus = nic.bus if nic.bus != nic_name(nic) else None
    rate = nic_rate(nic)
    about = [bus, "rate unknown" if rate == UNKNOWN else rate]
    return f"({', '.join(filter(None, about))})"
