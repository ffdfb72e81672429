"""Shares of a bucket that units own if their links have different rates.

Between N units a bucket of S bytes is exchanged in two stages: each unit owns a share f_i of it, receives the others'
contributions to that share, and sends the sum to all. Unit i then sends, and receives,

    (1 - f_i) S + (N - 1) f_i S  =  S (1 + (N - 2) f_i)

bytes. With equal shares that is the 2 (N - 1) / N S of a ring; a unit that owns nothing sends S, and no all-reduce
without help from the network can put less on its link, because its own contribution must leave and the sum must arrive.
The shares with which the exchange ends earliest, after T seconds, give every unit an f_i with

    S (1 + (N - 2) f_i) / B_i  <=  T    and    sum f_i = 1

for the least T, where B_i is the rate of unit i's link: f_i(T) = max(0, (T B_i / S - 1) / (N - 2)). Two units send S
each, whatever they own.

If the units then exchange the shares that they own at a further level, over the same links, a unit sends u f_i S more
(u is 2 (R - 1) / R between R equal units), and N - 2 becomes N - 2 + u above.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from gradwire.topology.cluster import Cluster, Unit

UNITS_PER_MEMBER = 16
"""Shares are whole multiples of 1 / (16 N): a unit's bytes are then within (N - 2) / (16 N) < 1/16 S of the optimum, at
least S, and what is rounded up falls to the units that it delays least."""

EVEN_WITHIN = 0.05
"""Relative difference of rates below which they count as equal: the scatter of measurements."""


@lru_cache(maxsize=256)
def owner_shares(rates: tuple[float, ...], further: float = 0.0) -> tuple[int, ...]:
    """Returns the share of each of N members that lets the exchange end first, in parts of 1 / (16 N).

    Args:
        rates: Bytes per second of each member's link.
        further: Bytes that a member sends in addition over the same link, for each byte that it owns.

    Returns:
        Whole numbers >= 0 that add up to 16 N; empty if equal shares are as good: equal rates, or two members.
    """
    count, owning = len(rates), len(rates) - 2 + further
    if owning <= 0 or max(rates) <= min(rates) * (1 + EVEN_WITHIN):
        return ()
    exact = exact_shares(rates, owning)
    total = UNITS_PER_MEMBER * count
    shares = [int(share * total) for share in exact]
    for _ in range(total - sum(shares)):
        # Give the next part to the member that is done first with it.
        least = min(range(count), key=lambda index: ((1 + owning * (shares[index] + 1) / total) / rates[index], index))
        shares[least] += 1
    return tuple(shares)


def exact_shares(rates: Sequence[float], owning: float) -> list[float]:
    """Returns the f_i of the module's docstring; 0 for units so slow that sending S alone takes T.

    Args:
        rates: Bytes per second of each unit's link.
        owning: Additional bytes that a unit sends for each byte that it owns: N - 2.
    """
    owners = sorted(range(len(rates)), key=lambda index: -rates[index])
    while True:
        # sum over the owners of (T B_i - 1) / owning = 1, with S = 1
        seconds = (owning + len(owners)) / math.fsum(rates[index] for index in owners)
        if seconds * rates[owners[-1]] >= 1:
            break
        owners.pop()
    return [(seconds * rate - 1) / owning if index in owners else 0.0 for index, rate in enumerate(rates)]


@lru_cache(maxsize=64)
def rank_shares(cluster: Cluster, level: int) -> tuple[int, ...]:
    """Returns the weight of each rank's part in an all_reduce between the units of one level.

    A weight follows the link rate of the rank's unit, so that slower units own less.

    Args:
        cluster: Placement of the ranks, with the rates of the level's units.
        level: Level of the all_reduce, the outermost one with a phase.

    Returns:
        Whole numbers, comparable among ranks of the same unit above; empty if equal parts are as good.
    """
    rates = cluster.levels[level].unit_rates
    if not rates:
        return ()
    units = cluster.units(level - 1)
    shares: dict[Unit, int] = {}
    for (number, _), siblings in cluster.children().items():
        if number == level:
            owned = owner_shares(tuple(rates[units.index(unit)] for unit in siblings)) or (1,) * len(siblings)
            shares.update(zip(siblings, owned, strict=True))
    found = tuple(shares[cluster.unit(rank, level - 1)] for rank in range(cluster.size))
    return found if len(set(found)) > 1 else ()


def part_shares(cluster: Cluster, level: int, parts: int) -> tuple[int, ...]:
    """Returns the weight of each part that a reduce_scatter between the units of one level cuts a region into.

    The k-th part goes to the k-th child of every unit, so the slowest of all k-th children decides its weight.

    Args:
        cluster: Placement of the ranks, with the rates of the level's units.
        level: Level of the reduce_scatter.
        parts: Number of parts.

    Returns:
        One whole number for each part; empty if equal parts are as good.
    """
    rates = cluster.levels[level].unit_rates
    if not rates or parts == 1:
        return ()
    units = cluster.units(level - 1)
    groups = [siblings for (number, _), siblings in cluster.children().items() if number == level]
    if any(len(siblings) != parts for siblings in groups):
        return ()
    slowest = tuple(min(rates[units.index(siblings[place])] for siblings in groups) for place in range(parts))
    above = len(groups)
    return owner_shares(slowest, 2 * (above - 1) / above)
