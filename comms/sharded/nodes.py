"""Placement of the ranks that share a model's parameters, and their collectives with compression between nodes.

If all nodes have the same number of ranks, every rank has a counterpart on each other node: the rank at the same place.
The step inside a node is exact; only counterparts exchange payloads. So each byte crosses a NIC once, where a flat
exchange would send it once for each rank of the node.

On a CPU a collective follows a plan of which one phase is compressed (`plan_compressed`), in the lanes of a
communicator's executor. On CUDA it is issued at once on the current stream, through groups of torch's.
"""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms.backend.work import FutureWork
from gradwire.comms.bootstrap.kernel import host_identity
from gradwire.comms.boundary.gathering import gather_bytes
from gradwire.comms.boundary.messages import MessageType
from gradwire.comms.communicator import Communicator
from gradwire.comms.plan.collectives import plan_compressed
from gradwire.comms.plan.plan import ALL_GATHER, REDUCE_SCATTER
from gradwire.comms.plan.rank_plans import RankPlan
from gradwire.comms.run.all_reduces import AllReduce, Bucket, Coded, FutureTensor
from gradwire.comms.run.phase_stats import PhaseStats
from gradwire.comms.run.programs import sent_nbytes_of
from gradwire.comms.sharded.ordered_launches import TorchGroups
from gradwire.compressors.base import Collective, Member, Request
from gradwire.topology.cluster import LEVEL_NAMES

log = logging.getLogger("gradwire")

_all_gather = dist.all_gather_single
_reduce_scatter = dist.reduce_scatter_single

_HOST: MessageType[tuple[str, str, str]] = MessageType(tuple[str, str, str])
"""Message by which ranks exchange the result of `host_identity`: what identifies a rank's host."""

Summing = Callable[[Sequence[Tensor], Member], Iterator[Request]]
"""Exchange of a reduce-scatter between a rank and its counterparts: yields the collectives that it needs.

It is given this node's sum of the flat shard (1-D) of each counterpart, this rank included, and this rank's place among
them. It stores the sum of this rank's flat shard itself."""

Gathering = Callable[[Member], Generator[Request, None, Tensor]]
"""Exchange of an all-gather between a rank and its counterparts: yields the collectives that it needs, and returns
(nodes, numel): what each counterpart has sent, in the order of their places."""

PlaceShard = Callable[[int, Tensor], object]
"""Takes what one rank has sent in an all-gather: (index of the rank in the group, 1-D tensor)."""


class ShardWork(FutureWork):
    """A collective of a sharded model in the lanes of a communicator.

    Args:
        future: Completed by the executor.
        communicator: Runs it; its configuration has the timeout, and it keeps the first failure.
    """

    def __init__(self, future: "torch.futures.Future[Any]", communicator: Communicator) -> None:
        super().__init__(future, communicator.config.timeout)
        self._communicator = communicator

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the result is there.

        Args:
            timeout: Longest wait; None takes the time-out of the communicator's configuration.

        Raises:
            CollectiveError: This collective, or one before it in the executor, failed.
            RuntimeError: It is not done within `timeout`.
        """
        try:
            return super().wait(timeout)
        except RuntimeError:
            if (failure := self._communicator.executor.failure) is not None:
                raise failure from None
            raise


class ShardNodes(ABC):
    """The ranks of one group that shares parameters, by node, and their collectives with a codec between the nodes.

    All nodes have the same number of ranks: `arrange` counts each rank as a node if hosts have different numbers.

    Args:
        members: For each node, the indices of its ranks in the group; a rank's place is its index among those of its
            node.
        rank: Index of this rank in the group.

    Attributes:
        members: For each node, the indices of its ranks in the group.
        size: Number of ranks.
        place: Place of this rank in its node.
        planned: Plans of its collectives as this rank runs them; empty on CUDA.
    """

    def __init__(self, members: tuple[tuple[int, ...], ...], rank: int) -> None:
        self.members = members
        self.size = sum(map(len, members))
        self.place = next(node for node in members if rank in node).index(rank)
        self.planned: dict[tuple[object, ...], RankPlan] = {}

    @abstractmethod
    def reduce_scatter(self, choice: str, payload_nbytes: int, source: Tensor, exchange: Summing) -> ShardWork | None:
        """Starts a reduce-scatter: sums flat shards inside the node, then has `exchange` sum them over the nodes.

        Args:
            choice: Name of the format between nodes.
            payload_nbytes: Bytes of the payload of one flat shard.
            source: (ranks * numel of a flat shard), 1-D; flat shard r is for rank r. May be overwritten.
            exchange: Exchange between the nodes, which also stores this rank's sum.

        Returns:
            Its work; None on CUDA, where it was issued on the current stream.

        Raises:
            RuntimeError: The executor is closed.
        """

    @abstractmethod
    def all_gather(
        self, choice: str, payload_nbytes: int, row: tuple[int, torch.dtype], exchange: Gathering, place: PlaceShard
    ) -> ShardWork | None:
        """Starts an all-gather: `exchange` gets flat shards of the counterparts, which the ranks of a node then share.

        Args:
            choice: Name of the format between nodes.
            payload_nbytes: Bytes of the payload of one flat shard; 0 if `exchange` communicates nothing.
            row: Number of elements and dtype of the flat shards that `exchange` returns.
            exchange: Exchange between the nodes.
            place: Called with the flat shard of each rank at the end.

        Returns:
            Its work; None on CUDA, where it was issued on the current stream.

        Raises:
            RuntimeError: The executor is closed.
        """

    @property
    def crosses(self) -> bool:
        """Whether the ranks are on several nodes, so that something is compressed."""
        return len(self.members) > 1

    @property
    def counterparts(self) -> list[int]:
        """For each rank of the group, the index of its counterpart on the first node."""
        found = [0] * self.size
        for node in self.members:
            for place, index in enumerate(node):
                found[index] = self.members[0][place]
        return found

    def describe(self) -> str:
        """Returns the placement for a report: `2 nodes of 4`, `4 ranks of one node, exact` or `8 ranks, flat`."""
        nodes, width = len(self.members), len(self.members[0])
        if nodes == 1:
            return f"{width} ranks of one node, exact"
        return f"{nodes} nodes of {width}" if width > 1 else f"{nodes} ranks, flat"


class PlannedNodes(ShardNodes):
    """Runs the compressed collectives of a shard group on CPUs, by plans that the lanes of a communicator execute.

    Args:
        members: For each node, the indices of its ranks in the group; a rank's place is its position here.
        communicator: Connects all ranks of the group.
    """

    def __init__(self, members: tuple[tuple[int, ...], ...], communicator: Communicator) -> None:
        super().__init__(members, communicator.rank)
        self._communicator = communicator
        self._counterparts = sorted(node[self.place] for node in members)
        self._member = Member(self._counterparts.index(communicator.rank), len(members))

    def reduce_scatter(self, choice: str, payload_nbytes: int, source: Tensor, exchange: Summing) -> ShardWork:
        """Starts a planned reduce-scatter of gradients: exact inside a node, with `exchange` between nodes.

        Args:
            choice: Name of the format between nodes, such as "int8".
            payload_nbytes: Bytes of the payload of one flat shard.
            source: (ranks * numel of a flat shard), 1-D; flat shard r is for rank r. Overwritten.
            exchange: Exchange between the nodes, which also stores this rank's sum.
        """
        plan = self._plan(REDUCE_SCATTER, source.numel() // self.size, source.dtype, choice, payload_nbytes)

        def coded(region: Tensor, member: Member) -> Iterator[Request]:
            rows = region.view(self.size, -1)
            yield from exchange([rows[rank] for rank in self._counterparts], member)

        return ShardWork(self._start(plan, source, coded), self._communicator)

    def all_gather(
        self, choice: str, payload_nbytes: int, row: tuple[int, torch.dtype], exchange: Gathering, place: PlaceShard
    ) -> ShardWork:
        """Starts a planned all-gather of weights: with `exchange` between nodes, then copied inside each node.

        Args:
            choice: Name of the format between nodes, such as "int8".
            payload_nbytes: Bytes of the payload of one flat shard; 0 if `exchange` communicates nothing.
            row: Number of elements and dtype of the flat shards that `exchange` returns.
            exchange: Exchange between the nodes.
            place: Called with (rank's index in the group, its flat shard) for each rank, once all have arrived.
        """
        # The threads of lanes write to these flat shards, so they are made outside of a caller's inference mode.
        inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(False):
            flat = torch.empty(self.size * row[0], dtype=row[1], device="cpu")

        def coded(region: Tensor, member: Member) -> Iterator[Request]:
            found = yield from exchange(member)
            rows = region.view(self.size, -1)
            for rank, one in zip(self._counterparts, found, strict=True):
                rows[rank] = one

        if not payload_nbytes:
            # The plan has no phase between the nodes: fill the flat shards before it starts.
            with torch.inference_mode(False), torch.no_grad():
                for _ in coded(flat, self._member):
                    raise AssertionError("an exchange without a payload communicates")
        plan = self._plan(ALL_GATHER, *row, choice, payload_nbytes)

        def placed(done: FutureTensor) -> Tensor:
            done.value()  # Raises the error of a failed collective.
            with torch.inference_mode(inference), torch.no_grad():
                for rank, one in enumerate(flat.view(self.size, -1)):
                    place(rank, one)
            return flat

        return ShardWork(self._start(plan, flat, coded).then(placed), self._communicator)

    def _start(self, plan: RankPlan, flat: Tensor, coded: Coded) -> FutureTensor:
        """Starts a collective in the lanes, after all that were started before.

        Args:
            plan: This rank's part in the plan.
            flat: Flat shards of all ranks, end to end, 1-D; changed in place.
            coded: Runs the compressed phase, without autograd.

        Returns:
            Future that is done when the collective is.
        """
        bucket = Bucket.of(flat)
        all_reduce = AllReduce((flat,), None, (bucket,), coded=torch.no_grad()(coded))
        self._communicator.executor.start(all_reduce, plan, 1.0, flush=False)
        return bucket.result()

    def _plan(self, op: str, numel: int, dtype: torch.dtype, choice: str, payload_nbytes: int) -> RankPlan:
        """Returns this rank's part in the plan of a collective; each is made once.

        Args:
            op: `all_gather` or `reduce_scatter`.
            numel: Elements of a flat shard.
            dtype: Their dtype.
            choice: Name of the format between nodes.
            payload_nbytes: Bytes of the payload of one flat shard; 0 if nothing is sent between nodes.
        """
        key = (op, numel, dtype, choice, payload_nbytes)
        if key not in self.planned:
            cluster = self._communicator.cluster
            flat = self.members != cluster.nodes
            plan = plan_compressed(cluster, op, numel, dtype.itemsize, choice, payload_nbytes, flat=flat)
            self.planned[key] = plan.rank_plan(self._communicator.rank)
        return self.planned[key]


class TorchMembers:
    """Ranks of one step on CUDA, in a group of torch's: collectives run in the order of the current stream.

    Tensors are contiguous, and of the same numel and dtype on all ranks.

    Args:
        group: The process group of this step's ranks.
        everyone: All ranks that share parameters, by their ranks in the default group.
        torchs: Serializes launches of several NCCL communicators on one device; None issues at once.

    Attributes:
        ranks: Ranks of this step, as indices in the group that shares parameters, in the order of their parts.
        rank: Index of this rank in `ranks`.
        size: Number of ranks in this step.
    """

    def __init__(self, group: dist.ProcessGroup, everyone: Sequence[int], torchs: TorchGroups | None = None) -> None:
        self._group = group
        self._torchs = torchs
        self.ranks = [everyone.index(one) for one in dist.get_process_group_ranks(group)]
        self.rank = group.rank()
        self.size = group.size()

    def reduce_scatter(self, output: Tensor, source: Tensor) -> None:
        """Sums `source` over the ranks, and fills `output` with this rank's part of the sum.

        Args:
            output: This rank's part, overwritten.
            source: (size * output.numel()), the parts of all ranks in their order.
        """
        self._issue(lambda: _reduce_scatter(output, source, op=dist.ReduceOp.SUM, group=self._group))

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        """Fills `output` (numel = size * source.numel()) with every rank's `source`, in the order of `ranks`."""
        self._issue(lambda: _all_gather(output, source, group=self._group))

    def all_to_all(self, output: Tensor, source: Tensor) -> None:
        """Sends the r-th of `size` equal parts of `source` to rank r; fills `output` with what the ranks send here."""
        self._issue(lambda: dist.all_to_all_single(output, source, group=self._group))

    def _issue(self, collective: Callable[[], None]) -> None:
        if self._torchs is None:
            collective()
        else:
            self._torchs.issue(self._group, collective)


class StreamNodes(ShardNodes):
    """Ranks on CUDA: both steps of a collective are issued at once on the current stream.

    Args:
        members: For each node, the indices of its ranks in the group; a rank's place is its position here.
        rank: Index of this rank in the group.
        inside: Members of the step inside this node; None if this rank is the only one.
        between: Members of the step between nodes: this rank and its counterparts; None if there is one node.
        stats: Counts what is sent between nodes.
    """

    def __init__(
        self,
        members: tuple[tuple[int, ...], ...],
        rank: int,
        inside: TorchMembers | None,
        between: TorchMembers | None,
        stats: PhaseStats,
    ) -> None:
        super().__init__(members, rank)
        self._inside = inside
        self._between = between
        self._stats = stats
        node = next(node for node in members if rank in node)
        self._places = [node.index(one) for one in inside.ranks] if inside is not None else [self.place]
        counterparts = between.ranks if between is not None else [rank]
        self._nodes = [next(node for node in members if one in node) for one in counterparts]
        """Ranks of each node, in the order of the counterparts in `between`."""
        self._member = Member(counterparts.index(rank), len(counterparts))

    def reduce_scatter(self, choice: str, payload_nbytes: int, source: Tensor, exchange: Summing) -> None:
        """Issues both steps on the current stream: a reduce-scatter inside the node, then the compressed exchange.

        Args:
            choice: Ignored: `exchange` has the format.
            payload_nbytes: Ignored.
            source: (ranks * numel of a flat shard), 1-D; flat shard r is for rank r.
            exchange: Exchange between the nodes, which also stores this rank's sum.
        """
        rows = source.view(self.size, -1)
        mine = [rows[node[self.place]] for node in self._nodes]
        if self._inside is not None:
            # Views are stacked, because an index tensor would be copied to the device.
            ordered = torch.stack([rows[node[place]] for place in self._places for node in self._nodes])
            sums = torch.empty(len(self._nodes), rows.shape[1], dtype=rows.dtype, device=rows.device)
            self._inside.reduce_scatter(sums.view(-1), ordered.view(-1))
            mine = list(sums)
        for request in exchange(mine, self._member):
            self._issue(REDUCE_SCATTER, source.nbytes, request)

    def all_gather(
        self, choice: str, payload_nbytes: int, row: tuple[int, torch.dtype], exchange: Gathering, place: PlaceShard
    ) -> None:
        """Issues both steps on the current stream: the compressed exchange, then an all-gather inside the node.

        Args:
            choice: Ignored: `exchange` has the format.
            payload_nbytes: Ignored.
            row: Number of elements and dtype of the flat shards that `exchange` returns.
            exchange: Exchange between the nodes.
            place: Called with (rank's index in the group, its flat shard) for each rank, in the current stream's order.
        """
        requests = exchange(self._member)
        while True:
            try:
                self._issue(ALL_GATHER, self.size * row[0] * row[1].itemsize, next(requests))
            except StopIteration as ended:
                found: Tensor = ended.value
                break
        everyone = found.unsqueeze(0)
        if self._inside is not None:
            everyone = torch.empty(self._inside.size, *found.shape, dtype=found.dtype, device=found.device)
            self._inside.all_gather(everyone.view(-1), found.contiguous().view(-1))
        for theirs, other in zip(everyone, self._places, strict=True):
            for one, node in zip(theirs, self._nodes, strict=True):
                place(node[other], one)

    def _issue(self, op: str, logical_nbytes: int, request: Request) -> None:
        """Issues the collectives between nodes that an exchange asks for, and counts what they send.

        Args:
            op: Collective of the sharded model, as it is called in reports.
            logical_nbytes: Bytes of the tensor that it moves.
            request: Collectives of the exchange.
        """
        assert self._between is not None  # else nothing is compressed
        for each in (request,) if isinstance(request, Collective) else request:
            getattr(self._between, each.op)(*each.tensors)
            sent = sent_nbytes_of(each, self._between.size, self._between.rank)
            self._stats.add(0, op, LEVEL_NAMES[1], logical_nbytes, sent)


def arrange(hosts: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """Returns the indices of the ranks of each node, nodes in the order of their first rank.

    If nodes have different numbers of ranks, some would have no counterpart: then each rank counts as a node of its own
    and the exchange is flat.

    Args:
        hosts: Host of each rank: any hashable value, equal for ranks on one node.
    """
    nodes: dict[object, list[int]] = {}
    for index, host in enumerate(hosts):
        nodes.setdefault(host, []).append(index)
    found = tuple(tuple(indices) for indices in nodes.values())
    if len({len(indices) for indices in found}) > 1:
        log.info("nodes hold %s ranks that share parameters: exchanged flat", [len(indices) for indices in found])
        return tuple((index,) for index in range(len(hosts)))
    return found


def find_nodes(
    group: dist.ProcessGroup,
    hostname: str | None,
    flat: bool,
    communicator: Communicator | None,
    torchs: TorchGroups | None,
    stats: PhaseStats,
) -> ShardNodes:
    """Finds the node of each rank of a group; on CUDA also makes the groups of the two steps. All of its ranks call it.

    Args:
        group: Group of the ranks that share parameters.
        hostname: Host name from the configuration; None takes the system's.
        flat: Whether to count each rank as a node of its own.
        communicator: Connects the same ranks, on a CPU; None (CUDA) makes groups of torch's.
        torchs: Serializes launches on torch's groups, on CUDA; None issues at once.
        stats: Counts what is sent on CUDA; on a CPU the communicator's executor has counters of its own.
    """
    if communicator is not None:
        cluster = communicator.cluster
        return PlannedNodes(
            arrange(range(cluster.size) if flat else [cluster.unit(rank, 0) for rank in range(cluster.size)]),
            communicator,
        )
    hosts = [_HOST.read(each) for each in gather_bytes(json.dumps(host_identity(hostname)).encode(), group)]
    members = arrange(range(group.size()) if flat else hosts)
    rank = group.rank()
    node = next(indices for indices in members if rank in indices)
    place = node.index(rank)
    # Invariant: all ranks make the inner groups first, then the outer ones, so that no ranks wait for each other in a
    # circle.
    inside = _torch_members(group, torchs, node)
    between = _torch_members(group, torchs, sorted(indices[place] for indices in members))
    return StreamNodes(members, rank, inside, between, stats)


def _torch_members(group: dist.ProcessGroup, torchs: TorchGroups | None, indices: Sequence[int]) -> TorchMembers | None:
    """Returns the members of a step on CUDA; None if this rank is the only one. May make a group of torch's.

    Args:
        group: All ranks that share parameters.
        torchs: Orders launches on torch's groups; None issues at once.
        indices: The step's ranks, as indices in `group`, ascending.
    """
    if len(indices) == 1:
        return None
    everyone = dist.get_process_group_ranks(group)
    if len(indices) == group.size():
        return TorchMembers(group, everyone, torchs)
    part = dist.new_group(
        [everyone[index] for index in indices], use_local_synchronization=True, group_desc="gradwire_sharded"
    )
    return TorchMembers(part, everyone, torchs)
