"""Placement of the ranks that share a model's parameters, and the two steps of their collectives with a codec.

If all nodes have the same number of ranks, every rank has a counterpart on each other node: the rank at the same place.
The step inside a node is exact; only counterparts exchange compressed payloads. So each byte crosses a NIC once, where
a flat exchange would send it once for each rank of the node.

On a CPU a collective is a coroutine that a communicator's executor runs in two lanes, one for each step, in the order
in which collectives are started. On CUDA it is issued at once on the current stream.
"""

import json
import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms.backend.work import FutureWork
from gradwire.comms.bootstrap.kernel import host_identity
from gradwire.comms.boundary.gathering import gather_bytes
from gradwire.comms.boundary.messages import MessageType
from gradwire.comms.communicator import Communicator
from gradwire.comms.lanes import Hop, Lane
from gradwire.comms.run.all_reduces import Bucket
from gradwire.comms.sharded.ordered_launches import TorchGroups
from gradwire.comms.transport.groups import Transport
from gradwire.compressors.base import Work

log = logging.getLogger("gradwire")

_all_gather = dist.all_gather_single
_reduce_scatter = dist.reduce_scatter_single

_HOST: MessageType[tuple[str, str, str]] = MessageType(tuple[str, str, str])
"""Message by which ranks exchange the result of `host_identity`: what identifies a rank's host."""

INSIDE, BETWEEN = "inside", "between"
LANES: dict[str, Lane] = {INSIDE: (-1, 0), BETWEEN: (-2, 0)}
"""Step -> its lane in a communicator on the CPU. No plan has these lanes, nor have sums of sparse gradients."""

NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")
"""Value of a collective's future: the result itself is in the collective's output tensor."""

Steps = Generator[Hop, None, None]
"""A collective of both steps, as a coroutine that yields the lane in which it continues; on CUDA it yields nothing."""


class Members(Protocol):
    """The ranks of one step and their collectives. Tensors are contiguous, with the same numel and dtype on all ranks.

    Each collective is a coroutine: `yield from` it. Its result is there when it ends, on CUDA for work that is queued
    on the current stream afterwards.
    """

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks of this step, as indices in the group that shares parameters, in the order of the parts below."""

    @property
    def rank(self) -> int:
        """Index of this rank in `ranks`."""

    @property
    def size(self) -> int:
        """Number of ranks in this step."""

    def reduce_scatter(self, output: Tensor, source: Tensor) -> Steps:
        """Sums `source` over the ranks, and fills `output` with this rank's part of the sum.

        Args:
            output: This rank's part, overwritten.
            source: (size * output.numel()), the parts of all ranks in their order; overwritten.
        """

    def all_gather(self, output: Tensor, source: Tensor) -> Steps:
        """Fills `output` (numel = size * source.numel()) with every rank's `source`, in the order of `ranks`."""

    def all_to_all(self, output: Tensor, source: Tensor) -> Steps:
        """Sends the r-th of `size` equal parts of `source` to rank r; fills `output` with what the ranks send here."""


class TorchMembers:
    """Members on a group of torch's, for CUDA: collectives run in the order of the current stream.

    Args:
        group: The process group of this step's ranks.
        everyone: All ranks that share parameters, by their ranks in the default group.
        torchs: Serializes launches of several NCCL communicators on one device; None issues at once.
    """

    def __init__(self, group: dist.ProcessGroup, everyone: Sequence[int], torchs: TorchGroups | None = None) -> None:
        self._group = group
        self._torchs = torchs
        self.ranks = [everyone.index(one) for one in dist.get_process_group_ranks(group)]
        self.rank = group.rank()
        self.size = group.size()

    def reduce_scatter(self, output: Tensor, source: Tensor) -> Steps:
        """See `Members`."""
        yield from self._issue(lambda: _reduce_scatter(output, source, op=dist.ReduceOp.SUM, group=self._group))

    def all_gather(self, output: Tensor, source: Tensor) -> Steps:
        """See `Members`."""
        yield from self._issue(lambda: _all_gather(output, source, group=self._group))

    def all_to_all(self, output: Tensor, source: Tensor) -> Steps:
        """See `Members`."""
        yield from self._issue(lambda: dist.all_to_all_single(output, source, group=self._group))

    def _issue(self, collective: Callable[[], None]) -> Steps:
        if self._torchs is None:
            collective()
        else:
            self._torchs.issue(self._group, collective)
        yield from ()


class LinkedMembers:
    """Runs the collectives of one step on the CPU, in the lane of this step in a communicator's executor.

    Ranks of a node exchange data through shared memory, ranks of different nodes through the communicator's transport.

    Args:
        communicator: Connects all ranks that share parameters.
        ranks: The ranks of this step, by their ranks in the communicator, ascending.
        step: `INSIDE` (a node) or `BETWEEN` (nodes): decides the lane.
    """

    def __init__(self, communicator: Communicator, ranks: Sequence[int], step: str) -> None:
        self._communicator = communicator
        self._step = step
        self._lane = LANES[step]
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(communicator.rank)
        self.size = len(self.ranks)

    def reduce_scatter(self, output: Tensor, source: Tensor) -> Steps:
        """See `Members`."""
        bounds = [output.numel() * number for number in range(self.size + 1)]
        yield from self._run("reduce_scatter", lambda on: on.reduce_scatter(source, bounds))
        output.copy_(source[bounds[self.rank] : bounds[self.rank + 1]])

    def all_gather(self, output: Tensor, source: Tensor) -> Steps:
        """See `Members`."""
        yield from self._run("all_gather", lambda on: on.all_gather(output, source))

    def all_to_all(self, output: Tensor, source: Tensor) -> Steps:
        """See `Members`."""
        yield from self._run("all_to_all", lambda on: on.all_to_all(output, source))

    def _run(self, op: str, issue: Callable[[Transport], Work]) -> Steps:
        """Hops to the lane of this step, then issues a collective there and waits for it.

        Args:
            op: Name of the collective, for errors and traces.
            issue: Issues it on the lane's transport, and returns its work.
        """
        # Invariant: only the thread of this lane issues on its transports, so all ranks issue in the same order.
        yield Hop(self._lane, ())
        where = "inside the node" if self._step == INSIDE else "between nodes"
        self._communicator.run_collective(
            f"{op} {where} (of shards)", lambda: issue(self._communicator.transport(self._lane, self.ranks)), self.ranks
        )


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


def _in_lanes(steps: Steps, lane: Lane, inference: bool) -> Generator[Hop, None, Tensor]:
    """Runs a collective in the lanes' threads, without autograd and with the caller's inference mode.

    Args:
        steps: The collective.
        lane: The lane that it begins in: a hop to the lane that it is in is skipped.
        inference: Whether the caller was in inference mode.

    Yields:
        The hops to other lanes.
    """
    while True:
        with torch.inference_mode(inference), torch.no_grad():
            hop = next(steps, None)
        if hop is None:
            return NOTHING
        if hop.lane != lane:
            lane = hop.lane
            yield hop


@dataclass(frozen=True, slots=True, eq=False)
class ShardNodes:
    """The ranks of one group that shares parameters, by node; all nodes have the same number of ranks.

    Attributes:
        size: Number of ranks.
        members: For each node, the indices of its ranks in the group; a rank's place is its position here.
        place: Place of this rank in its node.
        inside: Members of the step inside this node; None if this rank is the only one.
        places: Places of the ranks of `inside`, in their order.
        between: Members of the step between nodes: this rank and its counterparts; None if there is one node.
        numbers: Numbers of the nodes of `between`'s ranks, in their order.
        communicator: The communicator whose executor runs the collectives; None on CUDA.
    """

    size: int
    members: tuple[tuple[int, ...], ...]
    place: int
    inside: Members | None
    places: tuple[int, ...]
    between: Members | None
    numbers: tuple[int, ...]
    communicator: Communicator | None = None

    def start(self, name: str, steps: Steps, first: str) -> ShardWork | None:
        """Starts a collective of both steps; on the CPU in the lanes, behind all that were started before.

        Args:
            name: Name of the collective, for errors and traces.
            steps: The collective; resumed without autograd, and in inference mode if the caller is in it.
            first: The step whose lane it begins in; the same on all ranks.

        Returns:
            Its work; None on CUDA, where it was issued on the current stream.

        Raises:
            RuntimeError: The executor is closed.
        """
        if self.communicator is None:
            for _ in steps:
                pass
            return None
        second = BETWEEN if first == INSIDE else INSIDE
        bucket, lanes = Bucket.of(NOTHING), (LANES[first], LANES[second])
        inference = torch.is_inference_mode_enabled()
        self.communicator.executor.start_steps(bucket, name, _in_lanes(steps, lanes[0], inference), lanes)
        return ShardWork(bucket.result(), self.communicator)

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
    torchs: TorchGroups | None = None,
) -> ShardNodes:
    """Finds the node of each rank of a group, and makes the members of the two steps. All ranks of the group call it.

    Args:
        group: Group of the ranks that share parameters.
        hostname: Host name from the configuration; None takes the system's.
        flat: Count each rank as a node of its own.
        communicator: Connects the same ranks, on a CPU; None (CUDA) makes groups of torch's.
        torchs: On CUDA, serializes launches on torch's groups; see `TorchMembers`.
    """
    if communicator is not None:
        hosts: list[object] = [communicator.cluster.unit(rank, 0) for rank in range(group.size())]
    else:
        hosts = [_HOST.read(each) for each in gather_bytes(json.dumps(host_identity(hostname)).encode(), group)]
    members = arrange(range(group.size()) if flat else hosts)
    rank = group.rank()
    node = next(indices for indices in members if rank in indices)
    place = node.index(rank)
    # Invariant: all ranks make the inner groups first, then the outer ones, so that no ranks wait for each other in a
    # circle.
    inside = _part(group, communicator, torchs, node, INSIDE)
    between = _part(group, communicator, torchs, sorted(indices[place] for indices in members), BETWEEN)
    places = [] if inside is None else [node.index(one) for one in inside.ranks]
    numbers = [] if between is None else [_node_of(members, one) for one in between.ranks]
    return ShardNodes(group.size(), members, place, inside, tuple(places), between, tuple(numbers), communicator)


def _node_of(members: Sequence[Sequence[int]], index: int) -> int:
    """Returns the number of the node on which the rank with this index is."""
    return next(number for number, indices in enumerate(members) if index in indices)


def _part(
    group: dist.ProcessGroup,
    communicator: Communicator | None,
    torchs: TorchGroups | None,
    indices: Sequence[int],
    step: str,
) -> Members | None:
    """Returns the members of a step; None if this rank is the only one. On CUDA it may make a group of torch's.

    Args:
        group: All ranks that share parameters.
        communicator: Connects them on a CPU; None on CUDA.
        torchs: Orders launches on torch's groups on CUDA; None issues at once.
        indices: The step's ranks, as indices in `group`, ascending.
        step: `INSIDE` or `BETWEEN`.
    """
    if len(indices) == 1:
        return None
    if communicator is not None:
        return LinkedMembers(communicator, indices, step)
    everyone = dist.get_process_group_ranks(group)
    if len(indices) == group.size():
        return TorchMembers(group, everyone, torchs)
    part = dist.new_group(
        [everyone[index] for index in indices], use_local_synchronization=True, group_desc="gradwire_sharded"
    )
    return TorchMembers(part, everyone, torchs)
