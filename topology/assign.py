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
    """Returns GPU key -> the card it should drive: a fastest one of its nearest, shared by as few GPUs as possible.

    Cards that are down are passed over, as in NCCL, however near they are. Of several ways to share the cards equally
    well, the one in the machine's order is taken.

    Args:
        machine: The machine.

    Source: NCCL v2.30 src/transport/net_ib (a port that is not ACTIVE is no device); Kuhn, "The Hungarian method for
    the assignment problem", 1955 (augmenting paths).
    """
    distances = Distances(replace(machine, nics=tuple(_usable(machine.nics))))
    choices = {gpu.key: fastest_nics(distances.nearest_nics(gpu)[1]) for gpu in machine.gpus}
    keys = {gpu: [nic.key for nic in nics] for gpu, nics in choices.items()}
    cards = {nic.key: nic for nics in choices.values() for nic in nics}
    chosen = _dealt(keys)
    return {gpu.key: cards[chosen[gpu.key]] if gpu.key in chosen else None for gpu in machine.gpus}


def _dealt(choices: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Deals cards to GPUs so that the card with the most GPUs has as few as possible.

    Args:
        choices: GPU -> the cards that are as good for it; a GPU without one is left out of the answer.
    """
    holders: dict[str, list[str]] = {card: [] for cards in choices.values() for card in cards}
    waiting = [gpu for gpu in sorted(choices, key=lambda gpu: len(choices[gpu])) if choices[gpu]]
    room = 0

    def take(gpu: str, tried: set[str]) -> bool:
        """Gives a GPU one of its cards, if need be by moving another GPU to another card."""
        free = next((card for card in choices[gpu] if len(holders[card]) < room), None)
        if free is not None:
            holders[free].append(gpu)
            return True
        for card in choices[gpu]:
            if card in tried:
                continue
            tried.add(card)
            for other in holders[card]:
                if take(other, tried):
                    holders[card][holders[card].index(other)] = gpu
                    return True
        return False

    while waiting:
        room += 1
        waiting = [gpu for gpu in waiting if not take(gpu, set())]
    return {gpu: card for card, gpus in holders.items() for gpu in gpus}


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
