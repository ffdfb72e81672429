"""Programs: generators that issue the collectives of a chunk and yield the lane in which the chunk continues.

Transports move bytes, and compressors yield the collectives that they need. An executor decides when and in which
thread or stream a program is advanced; programs know no executor.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from gradwire.comms.lanes import ChunkSteps, Lane, Transition
from gradwire.comms.plan.plan import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Exchange, Transfer
from gradwire.comms.plan.rank_plans import Chunk, PhasePart
from gradwire.comms.run.all_reduces import RunningAllReduce
from gradwire.comms.run.phase_stats import PhaseStats
from gradwire.comms.streams import Mark
from gradwire.comms.transport.groups import Groups, IssuesTogether, Transport
from gradwire.comms.transport.sum_order import RingOrder
from gradwire.comms.transport.works import Works
from gradwire.compressors.base import Collective, Compressor, Layout, Member, Request, Work, weighted_bounds
from gradwire.topology.cluster import Cluster

if TYPE_CHECKING:  # each is loaded where it is asked for
    from gradwire.comms.transport.torch_group import GlooTransport

ALL_GATHER_SLICES = "all_gather_slices"
"""Method of a transport that is the inverse of `reduce_scatter`; an operation in addition to those of compressors."""

OVERCOMMITTING = ("cpu",)
"""Device types that overcommit memory: running out of it kills the process there, and raises no error."""


@dataclass(slots=True)
class _Ended:
    """Result of a phase: works still in flight, and bytes sent in addition to what the plan says."""

    works: list[Work]
    sent_nbytes: float = 0.0


class Programs:
    """Makes the programs of one rank: generators that run the chunks of all-reduces, and that move compression state.

    Args:
        groups: Transports by lane and members.
        rank: This rank.
        cluster: Placement of the ranks.
        compressor: Compressor of the phases that name one; None if all phases are exact.
        stats: Counters of bytes and times.

    Attributes:
        node: Ranks of this rank's node, itself included.
    """

    def __init__(
        self, groups: Groups, rank: int, cluster: Cluster, compressor: Compressor | None, stats: PhaseStats
    ) -> None:
        self.node = cluster.ranks(cluster.unit(rank, 0))
        self._groups = groups
        self._rank = rank
        self._level_names = cluster.level_names
        self._compressor = compressor
        self._stats = stats

    @property
    def has_compressor(self) -> bool:
        """Whether there is a compressor."""
        return self._compressor is not None

    def run_chunk(self, run: RunningAllReduce, chunk: Chunk) -> ChunkSteps:
        """Makes the coroutine that takes one chunk through the phases of its plan.

        Each step issues collectives, and yields the lane in which the next step runs and the works to wait for before.
        At the end it counts what this rank has sent, and the times of the phases if they are timed.

        Args:
            run: The all-reduce. Elements `chunk.start` to `chunk.stop` of its `flat` (1-D, any dtype that transports
                sum) are replaced by the scaled sum over all ranks, in place. Compressed phases convert to float32.
            chunk: Range of elements, and this rank's transfers.
        """
        flat, scale = run.flat, run.scale
        lane: Lane = (0, 0)
        marks = [self._stats.clock.now()] if chunk.parts and self._stats.timing else []
        sent: list[float] = []
        for index, part in enumerate(chunk.parts):
            run.phases[chunk.start] = index
            # The factor is applied here, unless the first transfer covers the chunk and applies it in its own pass.
            if scale != 1.0 and not part.whole_chunk:
                flat[chunk.start : chunk.stop].mul_(scale)
                scale = 1.0
            if part.phase.compressor:
                ended = yield from self._compressed(run, part, lane, index, scale)
            else:
                ended = yield from self._exact(flat, part, lane, index, scale)
            scale = 1.0
            # Continue in the lane of the next phase, which waits for the works, so that this lane is free meanwhile.
            if part.phase.asynchronous:
                lane = (index + 1, 0)
                yield Transition(lane, ended.works)
                # Works keep the buffers that were received.
                ended.works.clear()
            sent.append(ended.sent_nbytes)
            if marks:
                marks.append(self._stats.clock.now())
                if self._stats.recorder is not None:
                    self._note(run, index, part, marks[-2], marks[-1])
        if run.all_reduce.counted and chunk.parts:
            self._stats.count(chunk, flat.element_size(), marks, sent)
        # The factor on the sum; also the factor on the contribution of a single rank, whose plan has no phases.
        scale *= run.after
        if scale != 1.0:
            flat[chunk.start : chunk.stop].mul_(scale)

    def migrate(self, layout: Layout, shards: list[tuple[int, int]], device: torch.device, ask: bool) -> ChunkSteps:
        """Makes a coroutine that moves compression state between the ranks of this node in one step, and waits for it.

        Args:
            layout: Place of each parameter in a bucket.
            shards: Ranges of elements that this rank compresses.
            device: Device of the bucket.
            ask: Whether the ranks of the node first ask each other whether there is state to move; see
                `migration.migrate`.
        """
        assert self._compressor is not None
        node = self._groups[(0, 0), self.node] if len(self.node) > 1 else None
        from gradwire.comms.migration import migrate  # here: exact tensors have no state

        migrate(self._compressor, layout, shards, node, device, ask=ask)
        yield from ()

    def _exact(
        self, flat: Tensor, part: PhasePart, lane: Lane, index: int, scale: float
    ) -> Generator[Transition, None, _Ended]:
        """Makes the coroutine of an exact phase, which issues each step of the phase in a lane of its own.

        Args:
            flat: 1-D tensor of the all-reduce, changed in place.
            part: This rank's part in the phase.
            lane: Lane of the first step.
            index: Index of the phase in the plan.
            scale: Factor on this rank's contribution, applied in the first step.
        """
        works: list[Work] = []
        for number, step in enumerate(part.steps):
            if number:
                lane, scale = (index, number), 1.0
                yield Transition(lane, works)
                works.clear()
            works = []
            for transfer in step:
                works.append(self.issue(flat, transfer, lane, scale, part.rings))
        return _Ended(works)

    def _compressed(
        self, run: RunningAllReduce, part: PhasePart, lane: Lane, index: int, scale: float
    ) -> Generator[Transition, None, _Ended]:
        """Makes the coroutine of a compressed phase: all shards of this rank advance by one round in each lane.

        Args:
            run: The all-reduce; its `flat` is changed in place.
            part: This rank's part in the phase.
            lane: Lane of the first round.
            index: Index of the phase in the plan.
            scale: Factor on this rank's contribution.
        """
        coded, compressor, (transfers,) = run.all_reduce.coded, self._compressor, part.steps
        recorder = self._stats.recorder
        # Start a generator for each shard of this rank: the compressor's, on float32 contributions, or the caller's.
        shards = [run.flat[transfer.start : transfer.stop] for transfer in transfers]
        wide = [_contribution(shard, scale) for shard in shards] if coded is None else shards
        running: list[tuple[tuple[int, ...], Iterator[Request]]] = []
        for number, (transfer, shard) in enumerate(zip(transfers, wide, strict=True)):
            shares = part.shares[number] if part.shares else ()
            member = Member(transfer.members.index(self._rank), len(transfer.members), shares)
            if coded is not None:
                requests = coded(shard, member)
            else:
                assert compressor is not None
                layout = part.layouts[number]
                requests = (
                    _flushed(compressor, shard, layout) if run.flush else compressor.all_reduce(shard, layout, member)
                )
            if shares:
                requests = self._by_owners(requests, shares, part.phase.in_ring_order)
            running.append((transfer.members, requests))
        # Each round issues the next collectives of all shards, then waits for them in the next lane.
        sent_nbytes, rounds = 0.0, 0
        while True:
            works: list[Work] = []
            for members, requests in running:
                if recorder is None:
                    request = next(requests, None)
                else:
                    with recorder.span(f"lane {lane[0]}.{lane[1]}", f"codec {part.phase.compressor}"):
                        request = next(requests, None)
                if request is None:
                    continue
                collectives = (request,) if isinstance(request, Collective) else request
                works.append(issue_together(self._groups[lane, members], collectives))
                sent_nbytes += sum(
                    sent_nbytes_of(each, len(members), members.index(self._rank)) for each in collectives
                )
            if not works:
                break
            rounds += 1
            lane = (index, rounds)
            yield Transition(lane, works)
        # Copy back what was converted or kept apart.
        for shard, result in zip(shards, wide, strict=True):
            if result.data_ptr() != shard.data_ptr():
                shard.copy_(result)
        return _Ended([], sent_nbytes)

    def issue(
        self, flat: Tensor, transfer: Transfer, lane: Lane, scale: float, rings: Sequence[tuple[int, int]] = ()
    ) -> Work:
        """Issues one transfer of an exact phase, and returns its work.

        Args:
            flat: 1-D tensor of the all-reduce; the transfer's range is changed in place.
            transfer: Collective, range of elements and members.
            lane: Lane whose transports are used.
            scale: Factor on this rank's contribution.
            rings: Ranges of `flat` that are summed in the order of gloo's rings; empty if the order is free.

        Returns:
            The work, in flight; of a transport through shared memory it is done.

        Raises:
            TypeError: There are `rings`, and the transport sums in another order; or it cannot send unequal messages,
                and the transfer needs them.
        """
        group = self._groups[lane, transfer.members]
        if isinstance(transfer, Exchange):
            from gradwire.comms.transport.exchange import exchange  # here: ranks of like nodes need none

            return exchange(group, flat, transfer, self._rank)
        # Avoid the view if the range is everything: it costs the host as much as ten lines of Python.
        whole = transfer.stop - transfer.start == flat.numel()
        view = flat if whole else flat[transfer.start : transfer.stop]
        if transfer.op == ALL_GATHER:
            return group.all_gather_slices(view, transfer.bounds)
        if transfer.op == ALL_REDUCE:
            return group.all_reduce(view, scale)
        if rings:
            shifted = tuple((start - transfer.start, stop - transfer.start) for start, stop in rings)
            return _with_sum_order(group).reduce_scatter(view, transfer.bounds, scale, RingOrder(shifted))
        return group.reduce_scatter(view, transfer.bounds, scale)

    def _by_owners(self, requests: Iterator[Request], shares: Sequence[int], as_ring: bool) -> Iterator[Request]:
        """Yields a compressor's requests, each all_reduce split into a reduce_scatter to unequal owners and a gather.

        Args:
            requests: The compressor's requests.
            shares: Weight of each member of the group: the larger, the larger the part that it sums and sends to all.
            as_ring: Whether sums keep the order of gloo's ring with equal parts.
        """
        for request in requests:
            collectives = (request,) if isinstance(request, Collective) else request
            sums = [each for each in collectives if each.op == ALL_REDUCE]
            if not sums:
                yield request
                continue
            others = [each for each in collectives if each.op != ALL_REDUCE]
            for op in (REDUCE_SCATTER, ALL_GATHER_SLICES):
                flats = [each.tensors[0].view(-1) for each in sums]
                halves = [Collective(op, (flat,), weighted_bounds(flat.numel(), shares), as_ring) for flat in flats]
                yield (*halves, *others)
                others = []

    def _note(self, run: RunningAllReduce, index: int, part: PhasePart, began: Mark, ended: Mark) -> None:
        """Records a phase in a trace; does nothing on a CPU, where lanes record each transition themselves."""


def issue_together(transport: Transport, collectives: Sequence[Collective]) -> Work:
    """Issues independent collectives as one, if the transport can, else one after another; returns one work of all.

    NCCL has group calls; gloo between two ranks sends small ones in one message.

    Args:
        transport: Transport that all of them are issued on.
        collectives: Collectives, the same on all ranks in the same order; at least one.

    Raises:
        RuntimeError: One could not be issued. On NCCL the transport cannot be used afterwards.
    """
    # The usual case first: a single collective with equal parts.
    if len(collectives) == 1 and not collectives[0].bounds:
        return _issue_one(transport, collectives[0])
    # hasattr, because isinstance() of a protocol takes longer than a small collective.
    if hasattr(transport, "issue_together"):
        together = cast("IssuesTogether", transport).issue_together(collectives)
        if together is not None:
            return together
    works = [_issue_one(transport, each) for each in collectives]
    return works[0] if len(works) == 1 else Works(works)


def _with_sum_order(transport: Transport) -> "GlooTransport":
    """Returns `transport` itself if it can sum in the order of gloo's rings, and raises otherwise.

    Args:
        transport: Transport of a plan whose bits depend on that order.

    Raises:
        TypeError: The transport sums in another order, which would give other bits.
    """
    if not getattr(transport, "takes_sum_order", False):
        raise TypeError(
            f"`transport` is a {type(transport).__name__}, and the plan sums in the order of gloo's rings; wanted a "
            'GlooTransport: set `nic_bytes_per_second` to "assume" with other transports'
        )
    return cast("GlooTransport", transport)


def _issue_one(transport: Transport, collective: Collective) -> Work:
    issue = getattr(transport, collective.op)
    if not collective.bounds:
        return cast(Work, issue(*collective.tensors))
    if collective.as_ring and collective.op == REDUCE_SCATTER:
        (flat,) = collective.tensors
        order = RingOrder(((0, flat.numel()),))
        return _with_sum_order(transport).reduce_scatter(flat, collective.bounds, order=order)
    if collective.op in (REDUCE_SCATTER, ALL_GATHER_SLICES):
        return cast(Work, issue(*collective.tensors, collective.bounds))
    output, source = collective.tensors
    width = output.shape[1:].numel()
    if collective.op == ALL_GATHER:
        start, stop = collective.bounds[transport.rank : transport.rank + 2]
        output[start:stop] = source
        return transport.all_gather_slices(output.view(-1), [width * bound for bound in collective.bounds])
    from gradwire.comms.transport.exchange import all_to_all_of  # here: equal parts need none

    splits = [width * (stop - start) for start, stop in pairwise(collective.bounds)]
    return all_to_all_of(transport, output.view(-1), source.view(-1), splits)


def _contribution(shard: Tensor, scale: float) -> Tensor:
    """Returns `scale * shard` in float32: the shard itself, or a copy that leaves the gradient intact until the end.

    Returns the shard itself, changed in place if `scale` is not 1, if it is float32 on a CPU; on CUDA only if `scale`
    is 1. Otherwise a copy is made, because on CUDA the compressor may fail for lack of memory later, and the gradient
    must be unchanged then.

    Args:
        shard: This rank's gradients, floating-point.
        scale: Factor.
    """
    if shard.dtype != torch.float32:
        return shard.float().mul_(scale)
    if scale == 1.0:
        return shard
    return shard.mul_(scale) if shard.device.type in OVERCOMMITTING else shard * scale


def _flushed(compressor: Compressor, shard: Tensor, layout: Layout) -> Iterator[Request]:
    """Yields an exact all-reduce of a shard, after adding the compressor's residuals to it in place.

    Args:
        compressor: Compressor that holds the residuals.
        shard: Contribution of this rank, float32.
        layout: Place of each parameter in the shard.
    """
    compressor.flush(shard, layout)
    yield Collective(ALL_REDUCE, (shard,))


def sent_nbytes_of(collective: Collective, size: int, rank: int) -> float:
    """Returns the bytes that a rank sends in a collective of a compressor, without headers.

    An all-reduce counts as one in a ring. In all others a rank sends each other rank what that rank is to get from it.

    Args:
        collective: Collective with its tensors; the last one is the source.
        size: Number of ranks of the group.
        rank: This rank's index in the group.
    """
    nbytes, bounds = collective.tensors[-1].nbytes, collective.bounds
    if collective.op == ALL_REDUCE:
        return 2 * (size - 1) / size * nbytes
    if collective.op == ALL_GATHER:
        return nbytes * (size - 1)
    own = (bounds[rank + 1] - bounds[rank]) / max(bounds[-1], 1) if bounds else 1 / size
    return nbytes * own * (size - 1) if collective.op == ALL_GATHER_SLICES else nbytes * (1 - own)
