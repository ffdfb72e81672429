"""An all_reduce whose sums do not depend on where an element lies, with the bytes of a ring.

A ring starts the sum of each slice at another rank, so the order of an element's sum, and its last bits, depend on its
place. Here every element is summed by the same tree over the ranks, ((0 + 1) + (2 + 3)) + ..., whoever works it out:
neighbours halve what they hold between them, then those that kept the same half, and so on, and the way back doubles.
That a + b = b + a holds for floats is all that this needs. Where an odd number of ranks is left, each slice goes to an
owner, who sums in rank order.

Each rung is an exchange of two, so both directions of a link are busy with one flow each. Sending all slices to their
owners at once moves the same bytes as n - 1 flows that end at different times: 1.13 to 1.24 times a ring's time at four
nodes of two ranks on 200 Mbit/s, and over a flat plan's eight ranks, of which neighbours share a node, 1.55 times.

Source: recursive halving and doubling, near partners first: Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH", IJHPCA 2005, section 4.
"""

from dataclasses import replace

from gradwire.comms.plan import ALL_GATHER, REDUCE_SCATTER
from gradwire.comms.schedule import Transfer


def rank_order_ladder(transfer: Transfer, rank: int) -> list[Transfer]:
    """An all_reduce of one rank as collectives over fewer ranks, one after another.

    Args:
        transfer: The all_reduce.
        rank: One of its members.

    Returns:
        As many for every member; some may be empty.
    """
    down: list[Transfer] = []
    up: list[Transfer] = []
    rest, place = transfer, transfer.members.index(rank)
    while len(rest.members) > 2 and len(rest.members) % 2 == 0:
        side, numel = place % 2, rest.stop - rest.start
        scatter, gather = _both_ways(replace(rest, members=rest.members[place - side:place - side + 2]))
        down.append(scatter)
        up.insert(0, gather)
        bounds = (0, numel // 2, numel)
        rest = replace(rest, members=rest.members[side::2], start=rest.start + bounds[side], stop=rest.start + bounds[side + 1])
        place //= 2
    return [*down, *((rest,) if len(rest.members) == 2 else _both_ways(rest)), *up]


def _both_ways(transfer: Transfer) -> tuple[Transfer, Transfer]:
    """An all_reduce as a reduce_scatter and an all_gather over nearly equal slices."""
    numel, count = transfer.stop - transfer.start, len(transfer.members)
    bounds = (*(numel // count * place for place in range(count)), numel)
    return replace(transfer, op=REDUCE_SCATTER, bounds=bounds), replace(transfer, op=ALL_GATHER, bounds=bounds)
