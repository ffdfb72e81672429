"""Assigns a NIC to each GPU, or to each local rank."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from gradwire.topology.bandwidth import nic_bytes_per_second, pcie_bytes_per_second
from gradwire.topology.graph import Gpu, Machine, Nic
from gradwire.topology.networks import rdma_ports
from gradwire.topology.paths import Distances
from gradwire.topology.visible import visible_gpus, without_idle_gpus

NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


WIRELESS = 0x0280
"""PCI class and sub-class that wireless cards have: network controller, other. Source: PCI Code and ID Assignment
Specification 1.11, section 1.3."""


def _speed(nic: Nic) -> float:
    """Returns the bytes per second by which NICs are ranked: the line rate, else the PCIe link's rate, else 0.

    A wireless card reports no line rate, and its PCIe link is no measure of the air.
    """
    wireless = (nic.class_code or 0) >> 8 == WIRELESS
    return nic_bytes_per_second(nic) or (0.0 if wireless else pcie_bytes_per_second(nic.pcie)) or 0.0


def _for_gpus(nics: Sequence[Nic]) -> list[Nic]:
    """Returns the NICs that NCCL uses: if any has RDMA, those with it alone, however fast the others are.

    Source: NCCL v2.30 src/plugin/net.cc (the first network that finds a device is taken, sockets come last).
    """
    usable = _usable(nics)
    return [nic for nic in usable if any(port.carries for port in rdma_ports(nic))] or usable


def _usable(nics: Sequence[Nic]) -> list[Nic]:
    """Returns the NICs with a port that is neither known to be down nor a bond's standby; all, if none lists a port."""
    if not any(nic.ports for nic in nics):
        return list(nics)
    return [nic for nic in nics if any(port.carries for port in nic.ports)]


def fastest_nics(nics: Sequence[Nic]) -> list[Nic]:
    """Returns the fastest NICs that are not down, in the order of `nics`; several if they are equally fast.

    Args:
        nics: NICs of one machine.
    """
    usable = _usable(nics)
    best = max(map(_speed, usable), default=0.0)
    return [nic for nic in usable if _speed(nic) == best]


def nics_of_gpus(machine: Machine) -> dict[str, Nic | None]:
    """Assigns a NIC to each GPU: one of the fastest among its nearest, shared by as few GPUs as possible.

    As in NCCL, NICs that are down are ignored, however near they are, and those without RDMA if any has it. Of equally
    good assignments the one in the machine's order is chosen.

    Args:
        machine: Machine with the GPUs and NICs.

    Returns:
        GPU key -> NIC; None if no path from the GPU to a NIC is known.

    Source: NCCL v2.30 src/transport/net_ib (a port that is not ACTIVE is no device); Kuhn, "The Hungarian method for
    the assignment problem", 1955 (augmenting paths).
    """
    distances = Distances(replace(machine, nics=tuple(_for_gpus(machine.nics))))
    choices = {gpu.key: fastest_nics(distances.nearest_nics(gpu)[1]) for gpu in machine.gpus}
    keys = {gpu: [nic.key for nic in nics] for gpu, nics in choices.items()}
    by_key = {nic.key: nic for nics in choices.values() for nic in nics}
    chosen = spread(keys)
    return {gpu.key: by_key[chosen[gpu.key]] if gpu.key in chosen else None for gpu in machine.gpus}


def spread(choices: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Assigns NICs to GPUs so that the NIC with the most GPUs has as few as possible; returns GPU -> NIC.

    Args:
        choices: GPU -> the NICs that are equally good for it; a GPU without any is missing in the result.
    """
    holders: dict[str, list[str]] = {nic: [] for nics in choices.values() for nic in nics}
    waiting = [gpu for gpu in sorted(choices, key=lambda gpu: len(choices[gpu])) if choices[gpu]]
    room = 0

    def take(gpu: str, tried: set[str]) -> bool:
        """Assigns a GPU one of its NICs, if necessary by moving another GPU; returns False if that is impossible."""
        free = next((nic for nic in choices[gpu] if len(holders[nic]) < room), None)
        if free is not None:
            holders[free].append(gpu)
            return True
        for nic in choices[gpu]:
            if nic in tried:
                continue
            tried.add(nic)
            for other in holders[nic]:
                if take(other, tried):
                    holders[nic][holders[nic].index(other)] = gpu
                    return True
        return False

    while waiting:
        room += 1
        waiting = [gpu for gpu in waiting if not take(gpu, set())]
    return {gpu: nic for nic, gpus in holders.items() for gpu in gpus}


def gpu_for_local_rank(machine: Machine, local_rank: int, variables: Mapping[str, str] = NO_VARIABLES) -> Gpu | None:
    """Returns the GPU that a local rank drives, or None if it has none or if it cannot be known.

    Args:
        machine: The rank's machine.
        local_rank: Index of the rank on this machine, from 0; rank i drives GPU i of the visible ones, modulo their
            number.
        variables: Name -> value of those variables in `visible.VARIABLES` that are set for the rank.
    """
    seen = visible_gpus(machine, variables)
    return seen.gpus[local_rank % len(seen.gpus)] if seen.gpus and not seen.unknown else None


def nic_for_local_rank(machine: Machine, local_rank: int, variables: Mapping[str, str] = NO_VARIABLES) -> Nic | None:
    """Returns the NIC a local rank should drive: that of its GPU; without GPUs, the fastest active ones in turns.

    If it is unknown which of several GPUs the rank has, the NIC that all of them drive is returned, if it is one.

    Args:
        machine: The rank's machine.
        local_rank: Index of the rank on this machine, from 0.
        variables: Name -> value of those variables in `visible.VARIABLES` that are set for the rank.

    Returns:
        The NIC, or None if there is none or it cannot be known.
    """
    if machine.gpus:
        seen, chosen = visible_gpus(machine, variables), nics_of_gpus(without_idle_gpus(machine, variables))
        if seen.unknown:
            possible = {chosen[gpu.key] for gpu in seen.gpus}
            return possible.pop() if len(possible) == 1 else None
        return chosen[seen.gpus[local_rank % len(seen.gpus)].key] if seen.gpus else None
    nics = fastest_nics(machine.nics)
    return nics[local_rank % len(nics)] if nics else None


def nic_sharing(drivers: Mapping[int, str | None], fastest: Sequence[str]) -> str | None:
    """Returns a clause on the ranks that share one of the fastest NICs while another of them is idle.

    Args:
        drivers: Rank -> name of the NIC it drives; None if that is unknown.
        fastest: Names of the machine's fastest NICs.

    Returns:
        `ranks 0, 1 share mlx5_0 while mlx5_1 is idle`; None if there is nothing to say, or if any NIC is unknown.
    """
    users: dict[str | None, list[int]] = defaultdict(list)
    for rank, nic in drivers.items():
        users[nic].append(rank)
    idle = [nic for nic in fastest if nic not in users]
    shared = next((nic for nic, ranks in users.items() if nic in fastest and len(ranks) > 1), None)
    if shared is None or not idle or None in users:
        return None
    return f"ranks {', '.join(map(str, users[shared]))} share {shared} while {', '.join(idle)} is idle"
