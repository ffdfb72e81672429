"""An all_reduce whose sums do not depend on where an element lies.

A ring starts the sum of each slice at another rank, so the order of an element's sum, and its last bits, depend on its
place. Here every element is summed by the same tree over the ranks, whoever works it out: neighbours on one node halve
what they hold between them, as long as all ranks have such a neighbour; then each slice goes to an owner, who sums in rank
order; and all the way back. That a + b = b + a holds for floats is all that the halving needs.

The halving keeps out of the network what a flat all_reduce would send there: 8 MB over 4 nodes of 2 ranks on 200 Mbit/s
took 930 to 1060 ms with owners alone (2.4 S out of each card), 640 to 790 with halving, a ring 600 to 640. Between nodes
owners are better: halving on takes turns on the same link, 870 ms in one chunk against 650, no difference in eight (590; a
ring 520, because its segments keep the link fuller than n - 1 flows that end at different times).

Source: recursive halving and doubling, near partners first: Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH", IJHPCA 2005, section 4. Times: 2-core EPYC VM, 2026-11-21.
"""

from collections.abc import Callable
from dataclasses import replace

from gradwire.comms.plan.plan import ALL_GATHER, REDUCE_SCATTER
from gradwire.comms.plan.schedule import Transfer

SameNode = Callable[[tuple[int, ...]], bool]
"""Whether these ranks share a node."""


def rank_order_ladder(transfer: Transfer, rank: int, same_node: SameNode) -> list[Transfer]:
    """An all_reduce of one rank as collectives over fewer ranks, one after another.

    Args:
        transfer: The all_reduce.
        rank: One of its members.
        same_node: Answers alike on all members.

    Returns:
        As many for every member; some may be empty.
    """
    down: list[Transfer] = []
    up: list[Transfer] = []
    rest, place = transfer, transfer.members.index(rank)
    while len(rest.members) > 2 and _all_have_neighbours(rest.members, same_node):
        side, numel = place % 2, rest.stop - rest.start
        scatter, gather = _both_ways(replace(rest, members=rest.members[place - side : place - side + 2]))
        down.append(scatter)
        up.insert(0, gather)
        bounds = (0, numel // 2, numel)
        rest = replace(
            rest, members=rest.members[side::2], start=rest.start + bounds[side], stop=rest.start + bounds[side + 1]
        )
        place //= 2
    return [*down, *((rest,) if len(rest.members) == 2 else _both_ways(rest)), *up]


def _all_have_neighbours(members: tuple[int, ...], same_node: SameNode) -> bool:
    return len(members) % 2 == 0 and all(map(same_node, zip(members[::2], members[1::2], strict=True)))


def _both_ways(transfer: Transfer) -> tuple[Transfer, Transfer]:
    """An all_reduce as a reduce_scatter and an all_gather over nearly equal slices."""
    numel, count = transfer.stop - transfer.start, len(transfer.members)
    bounds = (*(numel // count * place for place in range(count)), numel)
    return replace(transfer, op=REDUCE_SCATTER, bounds=bounds), replace(transfer, op=ALL_GATHER, bounds=bounds)
