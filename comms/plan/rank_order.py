"""Splits an all_reduce so that the order of sums does not depend on the position of an element.

A ring starts the sum of each slice at another rank, so the order of an element's sum, and its last bits, depend on its
place. Here every element is summed by the same tree over the ranks, whoever does the sum: neighbours on one node halve
their region between them, as long as all ranks have such a neighbour; then each slice goes to an owner, which sums in
rank order; then the sums go back in reverse. The halving needs only that a + b = b + a, which holds for floats.

The halving keeps out of the network what a flat all_reduce would send there: 8 MB over 4 nodes of 2 ranks on 200 Mbit/s
took 930 to 1060 ms with owners alone (2.4 S out of each NIC), 640 to 790 with halving, a ring 600 to 640. Between
nodes owners are better: further halving would use the same link step by step, and took 870 ms in one chunk against 650,
with no difference in eight (590; a ring 520, because its segments keep the link fuller than n - 1 flows that end at
different times).

Source: recursive halving and doubling, near partners first: Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH", IJHPCA 2005, section 4. Times: 2-core EPYC VM, 2026-11-21.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gradwire.comms.plan.plan import ALL_GATHER, REDUCE_SCATTER, Transfer
from gradwire.compressors.base import weighted_bounds

SameNode = Callable[[tuple[int, ...]], bool]
"""Function that returns whether some ranks share a node."""


def rank_ordered(transfer: Transfer, same_node: SameNode, shares: Sequence[int] = ()) -> list[list[Transfer]]:
    """Splits an all_reduce into steps of collectives over fewer ranks; a step begins when the one before it is done.

    Args:
        transfer: The all_reduce.
        same_node: Returns whether some ranks share a node.
        shares: Weight of each member's part of the region; empty for equal parts.

    Returns:
        Collectives of each step, over disjoint sets of ranks, without empty ones.
    """
    if shares:
        return [[each] for each in _scatter_and_gather(transfer, shares)]
    down: list[list[Transfer]] = []
    up: list[list[Transfer]] = []
    groups = [transfer]
    while len(groups[0].members) > 2 and all(_all_have_neighbours(group.members, same_node) for group in groups):
        pairs = [
            _scatter_and_gather(replace(group, members=pair)) for group in groups for pair in _pairs(group.members)
        ]
        down.append([scatter for scatter, _ in pairs])
        up.insert(0, [gather for _, gather in pairs])
        groups = [half for group in groups for half in _halves(group)]
    if len(groups[0].members) == 2:
        middle = [groups]
    else:
        exchanges = [_scatter_and_gather(group) for group in groups]
        middle = [[scatter for scatter, _ in exchanges], [gather for _, gather in exchanges]]
    return [[each for each in step if each.start < each.stop] for step in (*down, *middle, *up)]


def _all_have_neighbours(members: tuple[int, ...], same_node: SameNode) -> bool:
    return len(members) % 2 == 0 and all(map(same_node, _pairs(members)))


def _pairs(members: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(zip(members[::2], members[1::2], strict=True))


def _halves(group: Transfer) -> tuple[Transfer, Transfer]:
    """Splits a group: the first ranks of all pairs take the first half of the region, the others the second."""
    middle = group.start + (group.stop - group.start) // 2
    first = replace(group, members=group.members[::2], stop=middle)
    return first, replace(group, members=group.members[1::2], start=middle)


def _scatter_and_gather(transfer: Transfer, shares: Sequence[int] = ()) -> tuple[Transfer, Transfer]:
    """Splits an all_reduce into a reduce_scatter and an all_gather over slices, equal or in proportion to `shares`."""
    numel, count = transfer.stop - transfer.start, len(transfer.members)
    bounds = (*(numel // count * place for place in range(count)), numel)
    if shares:
        bounds = weighted_bounds(numel, shares)
    return replace(transfer, op=REDUCE_SCATTER, bounds=bounds), replace(transfer, op=ALL_GATHER, bounds=bounds)
