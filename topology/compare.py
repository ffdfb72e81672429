"""Compares the machines of a cluster: finds the node that differs, and ranks that are badly placed."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gradwire.topology.assign import fastest_nics, nic_sharing
from gradwire.topology.graph import Gpu, Machine, Nic
from gradwire.topology.labels import Labels, nic_name, nic_rate, nic_with_state
from gradwire.topology.paths import GDR_BY_DEFAULT, PathType

Facts = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """Describes the placement of one rank: its node, its GPU and its NIC."""

    rank: int
    node: int
    """Index into the sequence of machines."""
    gpu: int | None = None
    """The driver's number of its GPU; None for a rank on the CPU."""
    nic: str | None = None
    """Name of the port it sends through (`mlx5_0`); None if none was chosen."""


def compare(machines: Sequence[Machine], placements: Sequence[RankPlacement]) -> list[str]:
    """Compares the nodes of a cluster and the placement of its ranks; returns one sentence for each finding.

    The list is empty if all nodes are equal and all ranks are well placed.

    Args:
        machines: Descriptions of the nodes, in the order that `RankPlacement.node` counts.
        placements: Placement of each rank.

    Raises:
        IndexError: A placement names a node that is not there.
    """
    names = [machine.hostname or f"node {index}" for index, machine in enumerate(machines)]
    return [
        *_differing(machines, names),
        *_far_from_nic(machines, names, placements),
        *_shared_gpus(names, placements),
        *_shared_nics(machines, names, placements),
        *_scattered(names, placements),
    ]


def nvlink_domains(machines: Sequence[Machine]) -> list[str]:
    """Returns a sentence per NVLink domain that joins several nodes.

    Args:
        machines: Descriptions of the nodes; a sentence names them by their index.
    """
    nodes: dict[str, list[int]] = defaultdict(list)
    for index, machine in enumerate(machines):
        if machine.nvlink_domain is not None:
            nodes[machine.nvlink_domain].append(index)
    return [
        f"Nodes {_list(members)} are one NVLink domain (clique {domain.rpartition('/')[2]}): NCCL joins their GPUs "
        "over NVLink, and no network card is used between them."
        for domain, members in nodes.items()
        if len(members) > 1
    ]


def _facts(machine: Machine) -> Facts:
    """Returns the properties that should be the same on all nodes: title -> value, both as text."""
    labels = Labels(machine)
    paths = [labels.distances.nearest_nics(gpu)[0] for gpu in machine.gpus]
    nvlinks = sorted({labels.link_count(gpu) for gpu in machine.gpus})
    return {
        "GPUs": _counted(gpu.name or (gpu.device and f"{gpu.device:04x}") or "unknown" for gpu in machine.gpus),
        "NICs": _counted(nic_rate(nic) for nic in machine.nics),
        "NUMA nodes": str(len(machine.cpus)),
        "NVLinks of a GPU": ", ".join(map(str, nvlinks)) or "none",
        "NVSwitches": str(len(machine.nvswitches)),
        "nearest NIC of the GPUs": _counted("unknown" if path is None else path.name for path in paths),
    }


def _counted(names: Iterable[str]) -> str:
    """Returns how often each name occurs, `8 x A100, 1 x T4`; `none` without names."""
    return ", ".join(f"{count} x {name}" for name, count in sorted(Counter(names).items())) or "none"


def _differing(machines: Sequence[Machine], names: Sequence[str]) -> list[str]:
    """Returns a sentence per node and property that differ from the most common value, though it be no majority.

    Of values that are equally common, the first in the order of the nodes is the reference.
    """
    facts = [_facts(machine) for machine in machines]
    found = []
    for title in facts[0] if facts else ():
        usual, votes = Counter(fact[title] for fact in facts).most_common(1)[0]
        for name, fact in zip(names, facts, strict=True):
            if fact[title] != usual:
                found.append(f"{name} differs: {title}: {fact[title]}; {votes} of {len(facts)} nodes have {usual}.")
    return found


def _far_from_nic(machines: Sequence[Machine], names: Sequence[str], placements: Sequence[RankPlacement]) -> list[str]:
    """Returns a sentence per rank whose GPU has a nearer NIC, or none near enough for GPUDirect RDMA by default."""
    labels = [Labels(machine) for machine in machines]
    found = []
    for place in placements:
        gpu = None if place.gpu is None else _gpu(machines[place.node], place.gpu)
        if gpu is not None:
            reason = _bad_nic(labels[place.node], gpu, place.nic)
            found += [f"Rank {place.rank} on {names[place.node]}: {reason}"] if reason else []
    return found


def _gpu(machine: Machine, index: int) -> Gpu | None:
    """Returns the GPU with this driver's number, or by position if the driver numbered none; None if there is none."""
    numbered = {gpu.index: gpu for gpu in machine.gpus if gpu.index is not None}
    return numbered.get(index) or (machine.gpus[index] if not numbered and index < len(machine.gpus) else None)


def _bad_nic(labels: Labels, gpu: Gpu, port: str | None) -> str | None:
    """Returns a sentence on why a GPU's NIC is badly chosen; None if it is not, or if no distance is known."""
    best, nearest = labels.distances.nearest_nics(gpu)
    if best is None:
        return None
    nic = _nic(labels.machine, port) if port is not None else None
    path = best if nic is None else labels.distances.gpu_nic(gpu, nic)
    name = nic_name(nic or nearest[0])
    order = list(PathType)
    if path is not None and order.index(path) > order.index(best):
        better = next((near for near in nearest if any(port.carries for port in near.ports)), nearest[0])
        return f"{labels.gpu(gpu)} sends through {name} at {path.name}; {nic_with_state(better)} is at {best.name}."
    if path is not None and path not in GDR_BY_DEFAULT:
        return f"{labels.gpu(gpu)} has no NIC nearer than {name} at {path.name}: no GPUDirect RDMA by default."
    return None


def _nic(machine: Machine, port: str) -> Nic | None:
    """Returns the NIC with a port of this name, or None."""
    return next((nic for nic in machine.nics if any(port == own.name for own in nic.ports)), None)


def _shared_gpus(names: Sequence[str], placements: Sequence[RankPlacement]) -> list[str]:
    """Returns a sentence per GPU that several ranks use."""
    users: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place in placements:
        if place.gpu is not None:
            users[place.node, place.gpu].append(place.rank)
    shared = {where: ranks for where, ranks in users.items() if len(ranks) > 1}
    return [f"Ranks {_list(ranks)} share GPU{gpu} of {names[node]}." for (node, gpu), ranks in sorted(shared.items())]


def _shared_nics(machines: Sequence[Machine], names: Sequence[str], placements: Sequence[RankPlacement]) -> list[str]:
    """Returns a sentence per node whose ranks share a NIC while one as fast is idle."""
    drivers: dict[int, dict[int, str | None]] = defaultdict(dict)
    for place in placements:
        drivers[place.node][place.rank] = place.nic
    found = []
    for node, nics in sorted(drivers.items()):
        ports = [[port.name for port in nic.ports] for nic in fastest_nics(machines[node].nics)]
        text = nic_sharing(nics, [names_of[0] for names_of in ports if names_of])
        found += [f"On {names[node]} {text}."] if text else []
    return found


def _scattered(names: Sequence[str], placements: Sequence[RankPlacement]) -> list[str]:
    """Returns a sentence per node whose ranks are not consecutive, and what that costs a ring in rank order."""
    node_of = {place.rank: place.node for place in placements}
    ranks_of: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(node_of):
        ranks_of[node_of[rank]].append(rank)
    scattered = [node for node, ranks in ranks_of.items() if ranks[-1] - ranks[0] + 1 != len(ranks)]
    found = [f"The ranks of {names[node]} are not consecutive: {_list(ranks_of[node])}." for node in sorted(scattered)]
    cost = ring_cost(node_of)
    if scattered and cost > 1:
        found.append(
            f"A ring in rank order puts {cost} times the necessary bytes on the busiest node's NIC; "
            "a hierarchical plan, or launching node by node, avoids it."
        )
    return found


def ring_cost(node_of: Mapping[int, int]) -> int:
    """Returns how many edges of a ring in rank order leave the busiest node; 1 is the least possible, 0 is one node.

    Args:
        node_of: Rank -> index of its node.
    """
    ranks = sorted(node_of)
    following = [*ranks[1:], *ranks[:1]]
    leaving = Counter(node_of[a] for a, b in zip(ranks, following, strict=True) if node_of[a] != node_of[b])
    return max(leaving.values(), default=0)


def _list(ranks: Sequence[int]) -> str:
    """Returns the first sixteen rank numbers, joined by commas, with `...` if there are more."""
    return ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
