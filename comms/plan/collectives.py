"""Plans of all_gather, reduce_scatter and broadcast between nodes: which ranks move which elements, and what it costs.

In an all_gather and a reduce_scatter of n ranks the tensor has n equal pieces, piece p being rank p's. In every other
node one rank stands for piece p: the one whose place in its node corresponds to p's place in its own. So

    all_gather      each piece goes once to every other node, to the rank that stands for it there; then the ranks of a
                    node gather through shared memory what they have
    reduce_scatter  the mirror image: each node sums a piece on the rank that stands for it, which sends that sum to its
                    owner; the owner adds the nodes' sums in the order of the ranks that made them
    broadcast       the root's node copies through shared memory, its ranks send a part each to the next node, which
                    passes it on to the one after it, and each node but the first gathers the parts inside

A NIC sends each of its node's pieces to each other node: (N - 1)/N of the tensor with N equal nodes, the lower bound;
a broadcast crosses each NIC once. Chunks are columns: the same run of elements of every piece.

In sharded training with compression the phase between the nodes is compressed: see `plan_compressed`.

What gloo does instead: a binomial tree (gloo/broadcast.cc), a ring of all ranks (gloo/allgather.cc), and for a
reduce_scatter an all_reduce of the whole (ProcessGroupGloo.cpp).
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from gradwire.comms.plan.algorithms import Messages, flat_messages
from gradwire.comms.plan.cost import CostModel, PhaseCost, busiest, exchange_cost, sent_nbytes
from gradwire.comms.plan.plan import ALL_GATHER, REDUCE_SCATTER, RING, Exchange, Message, Phase, Plan, Transfer
from gradwire.comms.plan.planner import CHUNK_COUNTS, CHUNK_TOLERANCE, MINIMUM_CHUNK_NBYTES, MINIMUM_GAIN
from gradwire.comms.plan.rank_plans import Chunk, PhasePart, RankPlan
from gradwire.comms.plan.schedule import child_shares
from gradwire.comms.plan.traffic import shape_of
from gradwire.compressors.base import even_bounds
from gradwire.topology.cluster import Cluster

BROADCAST = "broadcast"
ALIGN_NBYTES = 64
"""Bytes of a cache line, at whose multiples columns and parts start if the dtype allows it."""

SMALL_NBYTES = 64 << 10
"""Tensors below this stay with gloo: a plan saves less on the wire than its threads cost. At this
size plans measured 0.86 to 2.8 times as fast as gloo at 200 Mbit, most of them 1.3 (2-core EPYC VM, 2026-11-22)."""

Steps = list[list[Transfer]]
"""Transfers of all ranks for one chunk, by phase and step."""


@dataclass(frozen=True, slots=True)
class CollectivePlan:
    """The plan of one all_gather, reduce_scatter or broadcast, for all ranks.

    Attributes:
        plan: Phases, number of chunks and prediction.
        numel: Number of elements of a piece (all_gather, reduce_scatter) or of the tensor (broadcast).
        columns: (First element, one past the last) of each chunk, in every piece, or in the tensor of a broadcast.
        chunks: Transfers of all ranks for each chunk, by phase.
    """

    plan: Plan
    numel: int
    columns: tuple[tuple[int, int], ...]
    chunks: tuple[Steps, ...]

    def rank_plan(self, rank: int) -> RankPlan:
        """Returns one rank's part in the plan, in the form that executors run.

        Args:
            rank: The rank.
        """
        plan = self.plan
        chunks = []
        for (start, stop), steps in zip(self.columns, self.chunks, strict=True):
            parts = [_part(phase, transfers, rank) for phase, transfers in zip(plan.phases, steps, strict=True)]
            chunks.append(Chunk(start, stop, tuple(parts)))
        hops = [(number + 1, 0) for number, phase in enumerate(plan.phases) if phase.asynchronous]
        turn = max((number for number, phase in enumerate(plan.phases, 1) if phase.op != ALL_GATHER), default=0)
        return RankPlan(plan, tuple(chunks), ((0, 0), *hops), turn, direct=False)

    def own_runs(self, rank: int) -> list[tuple[int, int]]:
        """Returns the ranges of a reduce_scatter's input that it overwrites with sums on one rank, ascending, disjoint.

        They are the rank's own piece, and those that the rank sums for its node. To keep the input, save them first.

        Args:
            rank: The rank.
        """
        runs = [
            (transfer.start + transfer.bounds[place], transfer.start + transfer.bounds[place + 1])
            for steps in self.chunks
            for transfer in steps[0]
            if not isinstance(transfer, Exchange) and rank in transfer.members
            for place in [transfer.members.index(rank)]
        ]
        runs.append((rank * self.numel, (rank + 1) * self.numel))
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(run for run in runs if run[0] < run[1]):
            if joined and start <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(stop, joined[-1][1])
            else:
                joined.append((start, stop))
        return joined


@lru_cache(maxsize=64)
def stand_ins(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Returns which rank of each node sends and receives each piece between nodes.

    In the node of the piece's owner it is the owner. Pieces are spread evenly over the ranks of each other node.

    Args:
        cluster: Placement of the ranks.

    Returns:
        `found[node][piece]` is the rank.
    """
    nodes = cluster.nodes
    found = [[0] * cluster.size for _ in nodes]
    for home in nodes:
        for node, ranks in enumerate(nodes):
            shares = child_shares(len(home), len(ranks))
            for place, piece in enumerate(home):
                found[node][piece] = ranks[bisect_right(shares, place, 1) - 1]
    return tuple(map(tuple, found))


@lru_cache(maxsize=256)
def plan_collective(
    cluster: Cluster, op: str, numel: int, element_nbytes: int = 1, *, root: int = 0, chunks: int = 0
) -> CollectivePlan:
    """Plans one collective of CPU tensors.

    Args:
        cluster: Placement of the ranks, and link rates.
        op: `all_gather`, `reduce_scatter` or `broadcast`.
        numel: Elements of a piece; of the tensor of a broadcast.
        element_nbytes: Bytes of an element.
        root: Rank that sends the tensor of a broadcast.
        chunks: Number of chunks; 0 chooses.

    Raises:
        ValueError: `op` is unknown.
    """
    if op not in (ALL_GATHER, REDUCE_SCATTER, BROADCAST):
        raise ValueError(f"`op` is {op!r}; wanted {ALL_GATHER}, {REDUCE_SCATTER} or {BROADCAST}")
    # Choose the number of chunks with the shortest predicted time.
    whole = numel * element_nbytes * (1 if op == BROADCAST else cluster.size)
    inside, between, egress = _costs(cluster, op, root)
    rails = cluster.widest(0) if op == BROADCAST else cluster.size
    best: tuple[int, float] | None = None
    for count in (chunks,) if chunks else CHUNK_COUNTS:
        if chunks or count == 1 or whole / rails / count >= MINIMUM_CHUNK_NBYTES:
            # In columns the summands of a piece follow one another; whole pieces are summed by all ranks at once.
            alone = (cluster.widest(0) + 1) / 2 if op == REDUCE_SCATTER and count > 1 else 1.0
            took = [alone * inside.seconds(whole / count), *(hop.seconds(whole / count) for hop in between)]
            seconds = math.fsum(took) + (count - 1) * max(took)
            if best is None or seconds < best[1] * (1 - CHUNK_TOLERANCE):
                best = count, seconds
    assert best is not None
    count, seconds = best
    # Cut the pieces into columns, one for each chunk, and plan the transfers of each.
    align = max(1, ALIGN_NBYTES // element_nbytes)
    columns = tuple(run for run in pairwise(even_bounds(numel, count, align)) if run[0] < run[1]) or ((0, 0),)
    phases = _phases(cluster, op)
    if op == BROADCAST:
        steps = tuple(_broadcast(cluster, root, start, stop, align) for start, stop in columns)
    else:
        steps = tuple(_in_two_steps(cluster, op, numel, column) for column in columns)
    priced = [(cost, float(whole)) for cost in egress]
    why = f"{op} between nodes first-hand: each piece crosses each NIC once."
    plan = Plan("hierarchical", phases, len(columns), whole, seconds, busiest(cluster, priced), why)
    return CollectivePlan(plan, numel, columns, steps)


@lru_cache(maxsize=256)
def plan_compressed(
    cluster: Cluster, op: str, numel: int, element_nbytes: int, compressor: str, payload_nbytes: int, *, flat: bool
) -> CollectivePlan:
    """Plans an all_gather or a reduce_scatter of CPU tensors in which nodes send each other payloads of the pieces.

    The phase between the nodes is compressed, the one inside them exact. All is one chunk: the blocks and the random
    numbers of a payload depend on where its piece begins.

    Args:
        cluster: Placement of the ranks, and link rates.
        op: `all_gather` or `reduce_scatter`.
        numel: Elements of a piece.
        element_nbytes: Bytes of an element.
        compressor: Name of the format of the payloads.
        payload_nbytes: Bytes of the payload of one piece. 0 leaves out the phase between the nodes, for an all_gather
            of pieces that all nodes have already.
        flat: Whether each rank counts as a node of its own; else all nodes have the same number of ranks.
    """
    size = cluster.size
    whole, sent = numel * size * element_nbytes, payload_nbytes * size
    if flat:
        # Payloads of all ranks for all ranks, which is one of the two rounds of `exchange_cost`.
        across = Phase(op, 0, whole=True, asynchronous=len(cluster.nodes) > 1)
        transfers = [Transfer(op, 0, tuple(range(size)), 0, numel * size, ())]
        cost = exchange_cost(cluster)
        one_round = replace(cost, alpha_seconds=cost.alpha_seconds / 2)
        between: tuple[tuple[PhaseCost, float], ...] = ((one_round, sent / 2),)
        parts = [(replace(across, compressor=compressor), transfers, between)]
        why = f"{op} in {compressor} between all ranks."
    else:
        inside, crossing, _ = _costs(cluster, op, 0)
        phases = {phase.level: phase for phase in _phases(cluster, op)}
        transfers = [Transfer(op, 1, ranks, 0, numel * size, ()) for ranks in correspondents(cluster)]
        between = tuple((cost, float(sent)) for cost in crossing)
        parts = [
            (replace(phases[1], compressor=compressor), transfers, between),
            (phases[0], _inside(cluster, op, numel, (0, numel)), ((inside, float(whole)),)),
        ]
        why = f"{op} in {compressor} between nodes: the payload of each piece crosses each NIC once."
    if not payload_nbytes:
        parts, why = parts[1:], f"{op} inside the nodes: each of them has all pieces already."
    if op == REDUCE_SCATTER:
        parts.reverse()
    moved = [each for _, _, costs in parts for each in costs]
    seconds = math.fsum(cost.seconds(nbytes) for cost, nbytes in moved)
    plan = Plan(
        "flat" if flat else "hierarchical",
        tuple(phase for phase, _, _ in parts),
        1,
        whole,
        seconds,
        busiest(cluster, moved),
        why,
    )
    return CollectivePlan(plan, numel, ((0, numel),), ([transfers for _, transfers, _ in parts],))


def library_seconds(cluster: Cluster, op: str, nbytes: int, root: int = 0) -> float:
    """Returns the predicted seconds of gloo's own collective over all ranks.

    Args:
        cluster: Placement of the ranks, and link rates.
        op: `all_gather`, `reduce_scatter` or `broadcast`.
        nbytes: Bytes of the whole tensor, that is, of all pieces.
        root: Sending rank of a broadcast.
    """
    cost, times = _library_cost(cluster, op, root)
    return times * cost.seconds(nbytes)


def beats_library(cluster: Cluster, op: str, nbytes: int, root: int = 0) -> bool:
    """Returns whether the plan is predicted to be clearly faster than gloo's own; False for less than 64 KiB.

    Args:
        cluster: Placement of the ranks, and link rates.
        op: `all_gather`, `reduce_scatter` or `broadcast`.
        nbytes: Bytes of the whole tensor, that is, of all pieces.
        root: Sending rank of a broadcast.
    """
    if nbytes < SMALL_NBYTES:
        return False
    numel = nbytes if op == BROADCAST else nbytes // cluster.size
    planned = plan_collective(cluster, op, numel, root=root).plan.seconds
    return planned < library_seconds(cluster, op, nbytes, root) * (1 - MINIMUM_GAIN)


def _phases(cluster: Cluster, op: str) -> tuple[Phase, ...]:
    parts = cluster.widest(0)
    inside = Phase(REDUCE_SCATTER if op == REDUCE_SCATTER else ALL_GATHER, 0, parts)
    if len(cluster.nodes) == 1:
        return (replace(inside, parts=1) if op == BROADCAST else inside,)
    between = Phase(inside.op, 1, parts, asynchronous=True)
    if op == REDUCE_SCATTER:
        return inside, between
    if op == ALL_GATHER:
        return between, inside
    hops = (replace(between, parts=1),) * (len(cluster.nodes) - 1)
    return replace(inside, parts=1), *hops, inside


def _part(phase: Phase, transfers: Iterable[Transfer], rank: int) -> PhasePart:
    own = tuple(transfer for transfer in transfers if rank in transfer.members)
    sent = 0.0
    # The payloads of a compressed phase are counted when they are sent.
    for transfer in own if phase.compressor is None else ():
        if isinstance(transfer, Exchange):
            sent += sum(each.stop - each.start for each in transfer.messages if each.source == rank)
        else:
            place, count = transfer.members.index(rank), len(transfer.members)
            sent += sent_nbytes(transfer.op, transfer.stop - transfer.start, count, place, transfer.bounds)
    logical = sum(transfer.stop - transfer.start for transfer in own)
    # Together the transfers of a phase take all that this rank has: a factor is applied in their pass.
    return PhasePart(phase, (own,), (), (), True, len(own), logical, sent)


def _in_two_steps(cluster: Cluster, op: str, numel: int, column: tuple[int, int]) -> Steps:
    """Plans an all_gather (between the nodes first) or a reduce_scatter (inside the nodes first) of one chunk.

    Args:
        cluster: Placement of the ranks.
        op: `all_gather` or `reduce_scatter`.
        numel: Number of elements of a piece.
        column: First element of the chunk in every piece, and one past the last.
    """
    inside = _inside(cluster, op, numel, column)
    if len(cluster.nodes) == 1:
        return [inside]
    between = _between(cluster, op, numel, column)
    return [between, inside] if op == ALL_GATHER else [inside, between]


def _inside(cluster: Cluster, op: str, numel: int, column: tuple[int, int]) -> list[Transfer]:
    """Returns the transfers inside each node, of elements `column` of each piece that its ranks hold.

    They go through shared memory. See `_in_two_steps` for pieces of `numel` elements, `stand_ins` for the holders.
    """
    start, stop = column
    transfers: list[Transfer] = []
    if start == stop:
        return transfers
    for node, ranks in enumerate(cluster.nodes):
        places = {rank: place for place, rank in enumerate(ranks)}
        holders = [places[rank] for rank in stand_ins(cluster)[node]]
        if len(ranks) == 1:
            continue
        for first, last in _runs(holders, whole=column == (0, numel)):
            held = holders[first:last]
            width = stop - start
            bounds = tuple(width * sum(holder < place for holder in held) for place in range(len(ranks) + 1))
            begin = first * numel + start
            transfers.append(Transfer(op, 0, ranks, begin, begin + bounds[-1], bounds))
    return transfers


def _runs(holders: Sequence[int], *, whole: bool) -> list[tuple[int, int]]:
    """Splits the pieces into ranges of consecutive ones, each of which one collective can move.

    Args:
        holders: Index within its node of the rank that holds each piece, by piece.
        whole: Whether whole pieces are moved, so that they are adjacent; otherwise each piece is a range of its own.

    Returns:
        (First piece, one past the last) of each range; inside a range the holders ascend.
    """
    ends = [
        place
        for place in range(1, len(holders) + 1)
        if place == len(holders) or not whole or holders[place] < holders[place - 1]
    ]
    return list(pairwise([0, *ends]))


def _between(cluster: Cluster, op: str, numel: int, column: tuple[int, int]) -> list[Transfer]:
    """Returns the messages of each piece between its owner and its stand-ins elsewhere; see `_in_two_steps`."""
    start, stop = column
    if start == stop:
        return []
    messages = []
    for piece in range(cluster.size):
        for row in stand_ins(cluster):
            if row[piece] != piece:
                source, target = (piece, row[piece]) if op == ALL_GATHER else (row[piece], piece)
                messages.append(Message(source, target, piece * numel + start, piece * numel + stop))
    return [
        Exchange(op, 1, members, 0, cluster.size * numel, (), tuple(own))
        for members in correspondents(cluster)
        for own in [[message for message in messages if message.source in members]]
    ]


@lru_cache(maxsize=64)
def correspondents(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Returns the sets of ranks that exchange pieces with each other; in equal nodes one rank of each node."""
    joined = {rank: {rank} for rank in range(cluster.size)}
    for row in stand_ins(cluster):
        for piece, rank in enumerate(row):
            if joined[piece] is not joined[rank]:
                joined[piece] |= joined[rank]
                for member in joined[rank]:
                    joined[member] = joined[piece]
    return tuple(dict.fromkeys(tuple(sorted(members)) for members in joined.values()))


def _broadcast(cluster: Cluster, root: int, start: int, stop: int, align: int) -> Steps:
    order, parts = _from_root(cluster, root), cluster.widest(0)
    bounds = even_bounds(stop - start, parts, align)
    home, place = order[0], order[0].index(root)
    owned = (0,) * (place + 1) + (stop - start,) * (len(home) - place)
    steps: Steps = [[Transfer(ALL_GATHER, 0, home, start, stop, owned)] if len(home) > 1 and start < stop else []]
    holders = [_holders(ranks, parts) for ranks in order]
    for givers, takers in pairwise(holders):
        steps.append(
            [
                Transfer(ALL_GATHER, 1, (giver, taker), start + begin, start + end, (0, end - begin, end - begin))
                for giver, taker, (begin, end) in zip(givers, takers, pairwise(bounds), strict=True)
                if begin < end
            ]
        )
    if len(order) > 1:
        gathers = []
        for ranks in order[1:]:
            if len(ranks) > 1 and start < stop:
                owned = tuple(bounds[share] for share in child_shares(parts, len(ranks)))
                gathers.append(Transfer(ALL_GATHER, 0, ranks, start, stop, owned))
        steps.append(gathers)
    return steps


def _from_root(cluster: Cluster, root: int) -> Sequence[tuple[int, ...]]:
    """Returns the nodes in the order in which a broadcast reaches them."""
    first = cluster.node_rank(root)
    return [*cluster.nodes[first:], *cluster.nodes[:first]]


def _holders(ranks: Sequence[int], parts: int) -> list[int]:
    """Returns the rank of a node that sends and receives each part of a broadcast between nodes.

    Args:
        ranks: Ranks of the node.
        parts: Number of parts.
    """
    shares = child_shares(parts, len(ranks))
    return [ranks[bisect_right(shares, part) - 1] for part in range(parts)]


@lru_cache(maxsize=128)
def _costs(cluster: Cluster, op: str, root: int) -> tuple[PhaseCost, tuple[PhaseCost, ...], tuple[PhaseCost, ...]]:
    """Returns the costs of a planned collective for one byte of the tensor.

    Args:
        cluster: Placement of the ranks, and link rates.
        op: `all_gather`, `reduce_scatter` or `broadcast`.
        root: Sending rank of a broadcast.

    Returns:
        Cost inside the nodes; costs between the nodes, one for each hop of a broadcast, none on a single node; and all
        of these costs together.
    """
    model = CostModel(cluster, {})
    inside = model.phase(Phase(ALL_GATHER if op == ALL_GATHER else REDUCE_SCATTER, 0, cluster.widest(0)))
    if op == BROADCAST:
        inside = model.phase(Phase(ALL_GATHER, 0))
    nodes = cluster.nodes
    if len(nodes) == 1:
        return inside, (), (inside,)
    # A broadcast goes from node to node: each hop has a cost of its own.
    if op == BROADCAST:
        order, parts = _from_root(cluster, root), cluster.widest(0)
        hops = tuple(
            model.messages(
                _messages(
                    [
                        (giver, taker, 1 / parts)
                        for giver, taker in zip(_holders(givers, parts), _holders(takers, parts), strict=True)
                    ],
                    rounds=1,
                )
            )
            for givers, takers in pairwise(order)
        )
        return inside, hops, (inside, *hops)
    # The other two send each piece between its owner and the ranks that stand for it, all in flight together.
    pairs = [
        (piece, row[piece], 1 / cluster.size)
        for row in stand_ins(cluster)
        for piece in range(cluster.size)
        if row[piece] != piece
    ]
    if op == REDUCE_SCATTER:
        pairs = [(target, source, nbytes) for source, target, nbytes in pairs]
    crossing = model.messages(_messages(pairs, rounds=len(nodes) - 1))
    return inside, (crossing,), (inside, crossing)


@lru_cache(maxsize=128)
def _library_cost(cluster: Cluster, op: str, root: int) -> tuple[PhaseCost, float]:
    """Returns the cost of gloo's own collective, as that of an algorithm and a factor on its seconds.

    Args:
        cluster: Placement of the ranks, and link rates.
        op: `all_gather` (half of a ring all_reduce), `reduce_scatter` (a whole one) or `broadcast` (a binomial tree).
        root: Sending rank of a broadcast.
    """
    model = CostModel(cluster, {})
    if op != BROADCAST:
        cost = model.messages(flat_messages(shape_of(cluster), RING), ring=True)
        return cost, 0.5 if op == ALL_GATHER else 1.0
    pairs, rounds, distance = list[tuple[int, int, float]](), 0, 1
    while distance < cluster.size:
        for place in range(min(distance, cluster.size - distance)):
            pairs.append(((place + root) % cluster.size, (place + distance + root) % cluster.size, 1.0))
        rounds, distance = rounds + 1, 2 * distance
    return model.messages(_messages(pairs, rounds)), 1.0


def _messages(pairs: Sequence[tuple[int, int, float]], rounds: int) -> Messages:
    """Converts a list of messages to arrays, for the cost model.

    Args:
        pairs: (Sending rank, receiving rank, bytes for one byte of the tensor) of each message.
        rounds: Number of messages in the longest chain of messages that wait for each other.
    """
    sources, targets = (np.array([pair[place] for pair in pairs], dtype=np.intp) for place in range(2))
    nbytes = np.array([pair[2] for pair in pairs])
    return Messages(sources, targets, nbytes, lambda alphas: rounds * float(alphas.max(initial=0.0)))
