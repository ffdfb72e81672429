"""Which network card each GPU, or each local rank, should drive."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from gradwire.topology.bandwidth import nic_bytes_per_second, pcie_bytes_per_second
from gradwire.topology.graph import Gpu, Machine, Nic
from gradwire.topology.paths import Distances
from gradwire.topology.visible import visible_gpus

NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


def _speed(nic: Nic) -> float:
    """Returns what a card is worth: its line rate, else what its PCIe link carries, else nothing."""
    return nic_bytes_per_second(nic) or pcie_bytes_per_second(nic.pcie) or 0.0


def _usable(nics: Sequence[Nic]) -> list[Nic]:
    """Returns the cards with a port that is not known to be down or in reserve; all of them where no port is known."""
    if not any(nic.ports for nic in nics):
        return list(nics)
    return [nic for nic in nics if any(port.carries for port in nic.ports)]


def fastest_nics(nics: Sequence[Nic]) -> list[Nic]:
    """Returns the fastest of the cards that are not down, in the order given.

    Args:
        nics: Cards of one machine.
    """
    usable = _usable(nics)
    best = max(map(_speed, usable), default=0.0)
    return [nic for nic in usable if _speed(nic) == best]


def nics_of_gpus(machine: Machine) -> dict[str, Nic | None]:
    """Returns GPU key -> the card it should drive: the fastest of the nearest, GPUs with the same choice taking turns.

    Cards that are down are passed over, as in NCCL, however near they are.

    Args:
        machine: The machine.

    Source: NCCL v2.30 src/transport/net_ib (a port that is not ACTIVE is no device).
    """
    distances = Distances(replace(machine, nics=tuple(_usable(machine.nics))))
    turns: dict[tuple[str, ...], int] = {}
    chosen: dict[str, Nic | None] = {}
    for gpu in machine.gpus:
        candidates = fastest_nics(distances.nearest_nics(gpu)[1])
        choice = tuple(nic.key for nic in candidates)
        turn = turns.get(choice, 0)
        turns[choice] = turn + 1
        chosen[gpu.key] = candidates[turn % len(candidates)] if candidates else None
    return chosen


def gpu_for_local_rank(machine: Machine, local_rank: int, variables: Mapping[str, str] = NO_VARIABLES) -> Gpu | None:
    """Returns the GPU that a local rank drives, or None where there is none or it cannot be known.

    Args:
        machine: The machine.
        local_rank: 0 <= local_rank; rank i drives GPU i of those that it sees, modulo their number.
        variables: Those of `visible.VARIABLES` that are set for the rank.
    """
    seen = visible_gpus(machine, variables)
    return seen.gpus[local_rank % len(seen.gpus)] if seen.gpus and not seen.unknown else None


def nic_for_local_rank(machine: Machine, local_rank: int, variables: Mapping[str, str] = NO_VARIABLES) -> Nic | None:
    """Returns the card a local rank should drive: its GPU's, else the fastest active ones of the host in turns.

    Where it is not known which of several GPUs is the rank's, it is the card that all of them drive, if that is one.

    Args:
        machine: The machine.
        local_rank: 0 <= local_rank.
        variables: As for `gpu_for_local_rank`.
    """
    if machine.gpus:
        seen, cards = visible_gpus(machine, variables), nics_of_gpus(machine)
        if seen.unknown:
            possible = {cards[gpu.key] for gpu in seen.gpus}
            return possible.pop() if len(possible) == 1 else None
        return cards[seen.gpus[local_rank % len(seen.gpus)].key] if seen.gpus else None
    nics = fastest_nics(machine.nics)
    return nics[local_rank % len(nics)] if nics else None


def crowded(drivers: Mapping[int, str | None], fastest: Sequence[str]) -> str | None:
    """Returns which ranks of a machine share a card while one as fast is idle, or None where none do.

    Args:
        drivers: Rank -> name of the card it drives; None where that is unknown.
        fastest: Names of the machine's fastest cards.
    """
    users: dict[str | None, list[int]] = defaultdict(list)
    for rank, nic in drivers.items():
        users[nic].append(rank)
    idle = [nic for nic in fastest if nic not in users]
    shared = next((nic for nic, ranks in users.items() if nic in fastest and len(ranks) > 1), None)
    if shared is None or not idle or None in users:
        return None
    return f"ranks {', '.join(map(str, users[shared]))} share {shared} while {', '.join(idle)} is idle"
