"""Flat all-reduces as lists of messages: the ring, NCCL's double binary tree, NVLS, recursive halving and doubling.

Each function gives the messages of one all-reduce over all ranks, so that bytes are counted and not looked up. The
simulator runs the same algorithms on data.

Sources: ring: Patarasuk and Yuan, JPDC 2009. Double binary tree: Sanders, Speck and Traeff, "Two-tree algorithms for
full bandwidth broadcast, reduction and scan", Parallel Computing 2009; the shape as NCCL builds it between nodes, a
chain inside each node (NCCL 2.4 release notes, "Massively scale your deep learning training with NCCL 2.4").
NVLS and NVLSTree: the NVSwitch sums what the GPUs of a node hold and gives each sum to all of them; each GPU stands for
its share of the bucket, whose tree between the nodes is the double binary one (NCCL v2.30 src/transport/nvls.cc,
src/graph/connect.cc). The simulator does not run these two.
Recursive halving and doubling, with the fold for other counts than powers of two: Thakur, Rabenseifner and Gropp,
IJHPCA 2005, section 4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gradwire.comms.plan.plan import HALVING_DOUBLING, NVLS, NVLS_TREE, RING, TREE
from gradwire.comms.plan.traffic import Floats, Ints, Shape


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages of an algorithm, as arrays.

    Attributes:
        sources: Sending rank of each message.
        targets: Receiving rank.
        nbytes: Bytes of each message, for one byte of the bucket.
        critical_seconds: Function from the latency of each message to that of the longest chain of messages.
    """

    sources: Ints
    targets: Ints
    nbytes: Floats
    critical_seconds: Callable[[Floats], float]


def flat_messages(shape: Shape, algorithm: str) -> Messages:
    """Returns the messages that one all-reduce over all ranks sends by an algorithm: sender, receiver, bytes of each.

    Args:
        shape: Placement of the ranks.
        algorithm: `ring`, `tree`, `nvls`, `nvls_tree` or `halving_doubling`. `nvls` gives the messages of `nvls_tree`,
            which on one node is the same.

    Raises:
        ValueError: `algorithm` is unknown.
    """
    known = {RING: _ring, TREE: _tree, NVLS: _nvls_tree, NVLS_TREE: _nvls_tree, HALVING_DOUBLING: _halving_doubling}
    if algorithm not in known:
        raise ValueError(f"`algorithm` is {algorithm!r}; wanted one of {', '.join(known)}")
    return known[algorithm](shape)


def _ring(shape: Shape) -> Messages:
    ranks = np.arange(shape.size)
    passes = 2 * (shape.size - 1) / shape.size
    # The first piece to be done passes every edge but one, twice; the one that it may leave out is the slowest: so
    # NCCL counts 2 (N - 1) steps between N nodes (NCCL src/graph/tuning.cc).
    return Messages(
        ranks,
        (ranks + 1) % shape.size,
        np.full(shape.size, passes),
        lambda alphas: 2 * float(alphas.sum() - alphas.max()),
    )


def tree_edges(nodes: list[list[int]]) -> list[list[tuple[int, int]]]:
    """Returns the edges (child, parent) between ranks of both trees; each carries half of the bucket up and down.

    Args:
        nodes: The ranks of each node: a chain whose first rank is the node's place in the tree.
    """
    chain = [(below, above) for ranks in nodes for above, below in pairwise(ranks)]
    size = len(nodes)
    mirrored = [size - 1 - place if size % 2 == 0 else (place + 1) % size for place in range(size)]
    trees = []
    for node_at in (range(size), mirrored):  # so that a leaf of one tree is inside the other
        edges = [(index, binary_tree_parent(index, size)) for index in range(1, size)]
        trees.append(chain + [(nodes[node_at[child]][0], nodes[node_at[parent]][0]) for child, parent in edges])
    return trees


def binary_tree_parent(index: int, size: int) -> int:
    """Returns the parent of a place in the binary tree that NCCL builds: numbered in order, all odd places leaves.

    Place 0 is the root and has one child. Source: NCCL, ncclGetBtree in src/graph/trees.cc.

    Args:
        index: The place, 1 to `size` - 1.
        size: Number of places.
    """
    lowest = index & -index
    parent = (index ^ lowest) | (lowest << 1)
    return parent if parent < size else index ^ lowest


def _tree(shape: Shape) -> Messages:
    first, second = tree_edges(_nodes(shape))
    up = np.array(first + second, dtype=np.intp).reshape(-1, 2)
    half = np.full(2 * len(up), 0.5)
    return Messages(
        np.concatenate((up[:, 0], up[:, 1])),
        np.concatenate((up[:, 1], up[:, 0])),
        half,
        lambda alphas: max(
            (_deepest(tree, alphas[start : start + len(tree)]) for tree, start in ((first, 0), (second, len(first)))),
            default=0.0,
        ),
    )


def _nodes(shape: Shape) -> list[list[int]]:
    """Returns the ranks of each node."""
    inner = shape.unit_ids[1] if shape.depth > 1 else np.zeros(shape.size, dtype=np.intp)
    nodes: list[list[int]] = [[] for _ in range(int(inner.max()) + 1)]
    for rank, node in enumerate(inner.tolist()):
        nodes[node].append(rank)
    return nodes


def _nvls_tree(shape: Shape) -> Messages:
    """Returns the messages of NVLSTree: the switch reads each GPU's bucket, and each GPU sends on a share of sums."""
    nodes = _nodes(shape)
    heads = min(map(len, nodes))
    inside = [(rank, ranks[(place + 1) % len(ranks)], 1.0 + (place < heads) / heads)
              for ranks in nodes if len(ranks) > 1 for place, rank in enumerate(ranks)]  # fmt: skip
    trees = tree_edges([[number] for number in range(len(nodes))])
    between = [
        (nodes[one][head], nodes[other][head], 0.5 / heads)
        for edges in trees
        for child, parent in edges
        for one, other in ((child, parent), (parent, child))
        for head in range(heads)
    ]
    messages = np.array(inside + between, dtype=float).reshape(-1, 3)

    def critical(alphas: Floats) -> float:
        steps = 2 * (len(nodes).bit_length() - 1)
        return float(alphas[: len(inside)].max(initial=0.0) + steps * alphas[len(inside) :].max(initial=0.0))

    return Messages(messages[:, 0].astype(np.intp), messages[:, 1].astype(np.intp), messages[:, 2], critical)


def _deepest(edges: list[tuple[int, int]], alphas: Floats) -> float:
    """Returns twice (up and down) the latency in seconds from the farthest leaf of a tree to its root.

    Args:
        edges: (Child, parent) of each edge.
        alphas: Latency of each edge in seconds.
    """
    parents = {child: (parent, float(alpha)) for (child, parent), alpha in zip(edges, alphas, strict=True)}
    distance: dict[int, float] = {}

    def to_root(rank: int) -> float:
        path = []
        while rank in parents and rank not in distance:
            path.append(rank)
            rank = parents[rank][0]
        seconds = distance.get(rank, 0.0)
        for passed in reversed(path):
            seconds += parents[passed][1]
            distance[passed] = seconds
        return seconds

    return 2 * max((to_root(rank) for rank in parents), default=0.0)


def halving_steps(size: int) -> tuple[int, list[int]]:
    """Returns the number of ranks that first fold into a neighbour, and the distances of partners in later steps.

    The nearest partners come first, so that the large messages stay inside the node.
    """
    steps = size.bit_length() - 1
    return size - (1 << steps), [1 << step for step in range(steps)]


def halving_ranks(size: int) -> Ints:
    """Returns the ranks that take part after the fold, in order."""
    folded, distances = halving_steps(size)
    return np.concatenate((np.arange(folded) * 2 + 1, np.arange(2 * folded, size))) if distances else np.arange(size)


def _halving_doubling(shape: Shape) -> Messages:
    folded, distances = halving_steps(shape.size)
    ranks = halving_ranks(shape.size)
    evens = np.arange(folded) * 2
    sources, targets, nbytes = [evens, evens + 1], [evens + 1, evens], [np.ones(folded)] * 2
    stages = [folded, folded]
    for step, distance in enumerate(distances):
        partners = ranks[np.arange(len(ranks)) ^ distance]
        sources.append(ranks)
        targets.append(partners)
        nbytes.append(np.full(len(ranks), 2 * 0.5 ** (step + 1)))  # halving, and the same again when doubling
        stages.append(len(ranks))
    twice = [1, 1] + [2] * len(distances)

    def critical(alphas: Floats) -> float:
        pieces = np.split(alphas, np.cumsum(stages)[:-1])
        return sum(times * float(piece.max()) for times, piece in zip(twice, pieces, strict=True) if len(piece))

    return Messages(
        np.concatenate(sources).astype(np.intp),
        np.concatenate(targets).astype(np.intp),
        np.concatenate(nbytes),
        critical,
    )
