"""Sums sparse gradients (`nn.Embedding(sparse=True)`): first inside the nodes, then between them.

The first ranks of each node, as many as the smallest node has, each own a part of the rows, and receive those rows from
the other ranks of their node: so a row that several of them have looked up leaves the node once. Owners of the same
rows exchange them between the nodes, as rows or as a dense tensor, whichever is smaller, and send the sum to their
node. Sizes depend on the batch, so ranks first exchange their numbers of rows, and every decision is made by ranks that
have the same numbers.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from gradwire.comms.lanes import Lane, Transition
from gradwire.comms.plan.plan import ALL_GATHER, ALL_REDUCE
from gradwire.comms.plan.rank_plans import LaneGroup
from gradwire.comms.transport.groups import Groups, Transport
from gradwire.compressors.base import ALL_TO_ALL, Work
from gradwire.topology.cluster import Cluster

LANES: tuple[Lane, ...] = ((-3, 0), (-3, 1), (-3, 2))
"""Lanes of the steps (inside the node and the numbers of rows between them; the rows between them; inside the node
again), in a communicator whose plans have lanes from (0, 0) on."""

BETWEEN = 1
"""Index in `LANES` of the exchange between the nodes."""

KEY_NBYTES = 8
"""Bytes of a row index, an int64."""

AUTO = "auto"

Count = Callable[[int, str, int, float], None]
"""Function that counts a collective: (index in `LANES`, operation, bytes of gradient, bytes sent)."""


@dataclass(slots=True)
class Rows:
    """Holds rows of a sparse gradient, each once, in ascending order of their keys.

    Attributes:
        keys: Index of each row among all rows of the gradient, int64, 1-D; several sparse dimensions count as one.
        values: Values of the rows, of shape (rows, elements of a row).
    """

    keys: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of `keys` and `values`."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True, slots=True)
class Sharing:
    """Assigns the rows of a sparse gradient to owners, and names the ranks with which one rank exchanges rows.

    Attributes:
        node: Ranks of this rank's node, itself included, which sum among themselves first.
        owners: Number of owners on each node, which are its first ranks; owner k owns the rows with
            `key % owners == k`.
        rail: Owners of the same rows on all nodes, in the order of the nodes; empty for a rank that owns none.
    """

    node: tuple[int, ...]
    owners: int
    rail: tuple[int, ...]

    @classmethod
    def of(cls, cluster: Cluster, rank: int, plan: str) -> "Sharing":
        """Returns how a plan shares a sparse gradient's rows out to owners, and with whom this rank exchanges them.

        Args:
            cluster: Placement of the ranks.
            rank: This rank.
            plan: Name of a plan: `flat` treats every rank as a node of its own; `leader` has one owner on each node;
                any other has as many owners on each node as the smallest node has ranks.
        """
        nodes = tuple((each,) for each in range(cluster.size)) if plan == "flat" else cluster.nodes
        owners = 1 if plan == "leader" else min(map(len, nodes))
        node = next(ranks for ranks in nodes if rank in ranks)
        place = node.index(rank)
        return cls(node, owners, tuple(ranks[place] for ranks in nodes) if place < owners else ())


def groups_of(cluster: Cluster, plan: str) -> dict[LaneGroup, bool]:
    """Returns every (lane, set of ranks) in which sparse gradients are summed, each with the value True.

    It is for `RankPlans.groups`, whose result has the same type.

    Args:
        cluster: Placement of the ranks.
        plan: Name of a plan, as for `Sharing.of`.
    """
    groups: dict[LaneGroup, bool] = {}
    for rank in range(cluster.size):
        sharing = Sharing.of(cluster, rank, plan)
        used = [(LANES[0], sharing.node), (LANES[0], sharing.rail), (LANES[1], sharing.rail), (LANES[2], sharing.node)]
        groups |= {(lane, members): True for lane, members in used if len(members) > 1}
    return groups


def check_sparse(sparse: Tensor) -> None:
    """Refuses a tensor that `sum_sparse` cannot sum.

    Args:
        sparse: Gradient from DDP.

    Raises:
        TypeError: `sparse` has another layout than torch.sparse_coo, or does not hold floating-point numbers.
    """
    if sparse.layout != torch.sparse_coo:
        raise TypeError(
            f"a gradient has the layout {sparse.layout}; wanted torch.sparse_coo, as nn.Embedding(sparse=True) "
            "makes it, or dense ones: sparse=False"
        )
    if not sparse.is_floating_point():
        raise TypeError(
            f"a sparse gradient holds {sparse.dtype}; wanted floating-point numbers. Complex ones are sent dense only: "
            "nn.Embedding(sparse=False)"
        )


def sum_sparse(
    sparse: Tensor, groups: Groups, rank: int, sharing: Sharing, *, scale: float, as_dense: bool | str, count: Count
) -> Generator[Transition, None, Tensor]:
    """Makes a coroutine that sums a sparse tensor over all ranks, in the three `LANES`, and returns the sum.

    Args:
        sparse: torch.sparse_coo, floating-point, of one shape and dtype on all ranks; not changed.
        groups: Transports by lane and members.
        rank: This rank.
        sharing: Assignment of rows to the ranks that sum them, seen from this rank.
        scale: Factor on every rank's contribution, applied before the sum.
        as_dense: Whether a dense tensor is sent between the nodes, not rows; "auto" decides by the number of bytes.
        count: Called for each collective, to count what this rank sends.

    Returns:
        The coalesced sum, the same bits on all ranks. It holds every row that at least one rank has, even if its values
        add up to zero. float16 and bfloat16 rows are summed in float32 and rounded once inside the node and once
        between nodes; as a dense tensor they are summed as the transport does it.
    """
    node, rail = sharing.node, sharing.rail
    sparse_dim, shape = sparse.sparse_dim(), sparse.shape
    own = _rows(sparse, scale)
    if len(node) > 1:
        own = _to_owners(own, groups[LANES[0], node], sharing.owners, count)
    if len(rail) > 1:
        own = yield from _between(own, groups, rail, _owned(sharing, rank, shape[:sparse_dim]), as_dense, count)
    else:
        yield Transition(LANES[1], ())
        yield Transition(LANES[2], ())
    if len(node) > 1:
        own = _to_all(own, groups[LANES[2], node], count)
    places = torch.stack(torch.unravel_index(own.keys, shape[:sparse_dim]))
    values = own.values.view(-1, *shape[sparse_dim:])
    return torch.sparse_coo_tensor(
        places, values, shape, device=values.device, is_coalesced=True, check_invariants=False
    )


def _rows(sparse: Tensor, scale: float) -> Rows:
    """Returns the rows of a sparse tensor, each once and multiplied by `scale`, in ascending order of their keys."""
    coalesced, sparse_dim = sparse.coalesce(), sparse.sparse_dim()
    keys = coalesced.indices()[0].clone()
    for size, index in zip(sparse.shape[1:sparse_dim], coalesced.indices()[1:], strict=True):
        keys.mul_(size).add_(index)
    return Rows(keys, (coalesced.values() * scale).view(-1, prod(sparse.shape[sparse_dim:])))


def _owned(sharing: Sharing, rank: int, shape: Sequence[int]) -> range:
    """Returns the keys of all rows that a rank owns, whether or not they are in a gradient.

    A row's key is its index among all rows; owner k of n has the keys k, k + n, k + 2n, ...

    Args:
        sharing: Assignment of rows to owners, seen from `rank`.
        rank: An owner.
        shape: Sizes of the sparse dimensions, whose product is the number of rows.
    """
    return range(sharing.node.index(rank), prod(shape), sharing.owners)


def _summed(parts: Sequence[Rows]) -> Rows:
    """Returns the sum of the rows of several ranks: every row that any of them has.

    Parts are added in the order given: ranks that pass the same parts get the same bits. float16 and bfloat16 are added
    in float32 and rounded once.
    """
    keys = torch.unique(torch.cat([part.keys for part in parts]))
    dtype, width = parts[0].values.dtype, parts[0].values.shape[1]
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = parts[0].values.new_zeros((keys.numel(), width), dtype=wide)
    for part in parts:
        total.index_add_(0, torch.searchsorted(keys, part.keys), part.values.to(wide))
    return Rows(keys, total.to(dtype))


def _counts(transport: Transport, own: Sequence[int], like: Tensor) -> tuple[Tensor, Work]:
    """Starts to gather the numbers of rows of all ranks of a group; all of them call it.

    Args:
        transport: Transport of the group.
        own: Numbers of this rank, equally many on all ranks.
        like: Tensor on the device of the gradients.

    Returns:
        int64 tensor (ranks, numbers), valid once the work is done; and that work.
    """
    source = torch.tensor(own, dtype=torch.int64, device=like.device)
    found = source.new_empty(transport.size, len(own))
    return found, transport.all_gather(found, source)


def _to_owners(own: Rows, transport: Transport, owners: int, count: Count) -> Rows:
    """Sends each row to its owner on this node, waits, and returns the sum of the rows that this rank receives.

    Args:
        own: Rows of this rank.
        transport: Transport of the node's ranks.
        owners: Number of owners on each node; see `Sharing`.
        count: Counts what is sent.

    Returns:
        Sums of the rows that this rank owns; none on a rank that is no owner.
    """
    size, width = transport.size, own.values.shape[1]
    owner = own.keys % owners
    parts = [(owner == place).nonzero().view(-1) for place in range(size)]
    found, work = _counts(transport, [part.numel() for part in parts], own.keys)
    work.wait()
    counts: list[list[int]] = found.tolist()
    most = max(map(max, counts))
    keys, values = own.keys.new_zeros((size, most)), own.values.new_zeros((size, most, width))
    for place, part in enumerate(parts):
        keys[place, : part.numel()] = own.keys[part]
        values[place, : part.numel()] = own.values[part]
    got_keys, got_values = torch.empty_like(keys), torch.empty_like(values)
    transport.all_to_all(got_keys, keys).wait()
    transport.all_to_all(got_values, values).wait()
    count(0, ALL_TO_ALL, own.nbytes, (keys.nbytes + values.nbytes) * (size - 1) / size)
    mine = [each[transport.rank] for each in counts]
    return _summed([Rows(got_keys[place, :count], got_values[place, :count]) for place, count in enumerate(mine)])


def _between(
    own: Rows, groups: Groups, rail: tuple[int, ...], owned: range, as_dense: bool | str, count: Count
) -> Generator[Transition, None, Rows]:
    """Makes a coroutine that sums an owner's rows over the nodes; it yields each change to the next of `LANES`.

    It starts in the first, where the owners exchange their numbers of rows, unless a dense tensor is sent in any case.
    It sends the rows or the tensor in the second; in the third it adds the rows, or takes them from the summed tensor.

    Args:
        own: Sums of the rows of this node that this rank owns.
        groups: Transports by lane and members.
        rail: Owners of the same rows on all nodes.
        owned: Keys of all rows that these ranks own.
        as_dense: Whether a dense tensor is sent instead of rows; "auto" decides by the number of bytes.
        count: Counts what is sent.

    Returns:
        Sums of the rows that any node has.
    """
    size, width, element_nbytes = len(rail), own.values.shape[1], own.values.element_size()
    counts: list[int] = []
    if as_dense is True:
        yield Transition(LANES[1], ())
    else:
        found, work = _counts(groups[LANES[0], rail], [own.keys.numel()], own.keys)
        yield Transition(LANES[1], (work,))
        counts = found.view(-1).tolist()
        if as_dense == AUTO:
            rows_nbytes = max(counts) * (KEY_NBYTES + width * element_nbytes) * (size - 1)
            as_dense = rows_nbytes > 2 * (size - 1) / size * len(owned) * (width + 1) * element_nbytes
    transport = groups[LANES[1], rail]
    if as_dense:
        # A last column counts the nodes that have the row: what adds up to zero is a row of the sum all the same.
        dense = own.values.new_zeros((len(owned), width + 1))
        dense[(own.keys - owned.start) // owned.step] = torch.nn.functional.pad(own.values, (0, 1), value=1.0)
        count(BETWEEN, ALL_REDUCE, own.nbytes, 2 * (size - 1) / size * dense.nbytes)
        yield Transition(LANES[2], (transport.all_reduce(dense.view(-1)),))
        there = dense[:, width].nonzero().view(-1)
        return Rows(there * owned.step + owned.start, dense[there, :width])
    parts, works = _gathered(own, transport, counts)
    count(BETWEEN, ALL_GATHER, own.nbytes, own.nbytes * (size - 1))
    yield Transition(LANES[2], works)
    return _summed(parts)


def _gathered(own: Rows, transport: Transport, counts: Sequence[int]) -> tuple[list[Rows], list[Work]]:
    """Starts to gather the rows of every rank of a group, on all of them; all of them call it.

    Args:
        own: Rows of this rank.
        transport: Transport of the group.
        counts: Number of rows of each rank.

    Returns:
        Rows of each rank, valid once the works are done; and those works.
    """
    bounds = tuple(accumulate(counts, initial=0))
    width, start, stop = own.values.shape[1], bounds[transport.rank], bounds[transport.rank + 1]
    keys, values = own.keys.new_empty(bounds[-1]), own.values.new_empty((bounds[-1], width))
    keys[start:stop], values[start:stop] = own.keys, own.values
    works = [
        transport.all_gather_slices(keys, bounds),
        transport.all_gather_slices(values.view(-1), [bound * width for bound in bounds]),
    ]
    return [Rows(keys[start:stop], values[start:stop]) for start, stop in pairwise(bounds)], works


def _to_all(own: Rows, transport: Transport, count: Count) -> Rows:
    """Gathers the sums of the node's owners on all ranks of the node, and returns them in ascending order of keys.

    Args:
        own: Sums of the rows that this rank owns; none on a rank that is no owner.
        transport: Transport of the node's ranks.
        count: Counts what is sent.
    """
    found, work = _counts(transport, [own.keys.numel()], own.keys)
    work.wait()
    parts, works = _gathered(own, transport, found.view(-1).tolist())
    for work in works:
        work.wait()
    count(2, ALL_GATHER, own.nbytes, own.nbytes * (transport.size - 1))
    keys, order = torch.cat([part.keys for part in parts]).sort()
    return Rows(keys, torch.cat([part.values for part in parts])[order])
