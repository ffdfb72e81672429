"""Runs plans: one thread serves each lane, takes the chunk whose turn it is, and issues its collectives phase by phase.

A chunk stays in the lane it is in as long as its collectives are done when they return (shared memory); after an
asynchronous phase it goes on in the next lane, which waits for what is under way. All of that is in the plan, so all
ranks hop alike, also those that have nothing to send in a phase.

Everything here calls downward: lanes say whose turn it is, transports move bytes, compressors yield the collectives
that they need. What happens at the end of a transfer (copying back, completing futures) is in the transfer itself, as
data.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradwire.comms.bootstrap.failure import CollectiveError, FailureBoard
from gradwire.comms.lanes import Hop, Lane, LaneJob, Lanes
from gradwire.comms.migration import migrate
from gradwire.comms.plan.plan import ALL_GATHER, ALL_REDUCE, Transfer
from gradwire.comms.plan.routes import Chunk, PhasePart, Route
from gradwire.comms.streams import SideStreams
from gradwire.comms.transport.groups import Groups
from gradwire.compressors.base import ALL_TO_ALL, Collective, Compressor, Layout, Member, Request, Work
from gradwire.topology.cluster import Cluster

log = logging.getLogger("gradwire")

FutureTensor = torch.futures.Future[Tensor]
Open = torch.futures.Future[Tensor | BaseException]
"""To be completed with a tensor, or with the error that took its place: raised only in a `.then`, an error's message
survives DDP's reducer."""

_PENDING = threading.Lock()
"""Held while a bucket's count of launches changes: its pieces may end in different lanes."""

CLOSING_SECONDS = 5.0
"""How long `close` waits for the launches under way: longer than a bucket takes."""

OVERCOMMITTING = ("cpu",)
"""Devices that hand out more memory than they have: running out ends the process there, and no error is raised."""


def unwrap(done: Open) -> Tensor:
    """The tensor of a finished future, the bucket's own; for `done.then(unwrap)`.

    Raises:
        BaseException: The value, where it is an error.
    """
    value = done.value()
    if isinstance(value, BaseException):
        raise value
    return value


class Pool:
    """Buffers for launches: none is used twice at a time, and those of ended launches are kept for the next step.

    On CUDA nothing is kept: torch's allocator already reuses memory, and knows which streams still read it.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self._lock = threading.Lock()
        self.allocated = 0

    def take(self, numel: int, like: Tensor) -> Tensor:
        """A 1-D buffer of exactly `numel` elements, its content undefined.

        Args:
            numel: Elements.
            like: Gives dtype and device.
        """
        with self._lock:
            free = self._free.get((like.dtype, numel))
            if free:
                return free.pop()
            self.allocated += 1
        return torch.empty(numel, dtype=like.dtype, device=like.device)

    def give_back(self, buffer: Tensor) -> None:
        """Takes a buffer that `take` returned, once nothing reads or writes it any more."""
        if buffer.device.type != "cuda":
            with self._lock:
                self._free.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)


@dataclass(slots=True)
class Times:
    """When a bucket arrived and when it was reduced, by time.perf_counter; 0.0 before."""

    arrived: float
    reduced: float = 0.0


@dataclass(slots=True, eq=False)
class Bucket:
    """A flat tensor to be averaged, and the future that says when it is.

    Attributes:
        flat: 1-D, contiguous; changed in place. Not to be touched until the future is done.
        layout: Which parameter lies where in it; None where it is never compressed.
        future: Completed with `flat`, or with an error.
        times: When it arrived, and when its last launch ended.
        pending: Launches that still carry a part of it.
        error: What went wrong first.
    """

    flat: Tensor
    layout: Layout | None
    future: Open
    times: Times
    pending: int = 1
    error: BaseException | None = None

    @classmethod
    def of(cls, flat: Tensor, layout: Layout | None = None) -> "Bucket":
        """A bucket that arrives now, with an open future for work on its device."""
        future: Open = torch.futures.Future(devices=[flat.device] if flat.is_cuda else [])
        return cls(flat, layout, future, Times(time.perf_counter()))


@dataclass(slots=True, eq=False)
class Launch:
    """One all-reduce to start: a bucket, a piece of one, or several joined ones.

    Attributes:
        flat: 1-D, contiguous: what travels, averaged in place.
        layout: Which parameter lies where in it, if it may be compressed.
        buckets: What it carries, whole or in part; their futures are completed at its end.
        returns: (from `flat`, to a bucket) pairs of runs that are copied back when it has ended; empty where `flat` is
            a view of the bucket.
        pool: Takes `flat` back when it has ended.
    """

    flat: Tensor
    layout: Layout | None
    buckets: Sequence[Bucket]
    returns: Sequence[tuple[Tensor, Tensor]] = ()
    pool: Pool | None = None


def finish(launch: Launch, error: BaseException | None) -> None:
    """Ends a launch: copies averages back, and completes the futures of buckets that no other launch still carries.

    Args:
        launch: Whose `flat` holds the averages.
        error: What went wrong, if anything did; the buckets' futures are completed with the first error.
    """
    if error is None and launch.returns:
        sources, targets = zip(*launch.returns, strict=True)
        try:
            torch._foreach_copy_(list(targets), list(sources))  # one launch on CUDA
        except BaseException as failed:  # noqa: BLE001 - whatever it is, the futures carry it
            error = failed
    if launch.pool is not None and error is None:  # after an error another chunk may still write to it
        launch.pool.give_back(launch.flat)
    for bucket in launch.buckets:
        with _PENDING:
            bucket.pending -= 1
            bucket.error = bucket.error or error
            done = bucket.pending == 0
        if done:
            bucket.times.reduced = time.perf_counter()
            bucket.future.set_result(bucket.flat if bucket.error is None else bucket.error)


@dataclass(slots=True)
class PhaseTotals:
    """One phase of a plan, summed over all chunks of all buckets that went through it.

    Attributes:
        phase: Its place in the plan.
        op: The collective.
        level: Name of the level, or `all ranks`.
        calls: Collectives that this rank took part in.
        logical_nbytes: Bytes of gradient that this rank contributed to them.
        wire_nbytes: Bytes that this rank sent, headers not counted.
        seconds: From issuing a chunk's collectives to having their result, summed; phases of different chunks overlap.
    """

    phase: int
    op: str
    level: str
    calls: int = 0
    logical_nbytes: int = 0
    wire_nbytes: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class RunningLaunch:
    """A launch under way.

    Attributes:
        launch: What is under way.
        route: Its plan, and this rank's part in it.
        scale: Factor on every rank's contribution.
        flush: Travel dense, with what the compressor holds back added.
        pending: Chunks that have not ended.
    """

    launch: Launch
    route: Route
    scale: float
    flush: bool
    pending: int


@dataclass(slots=True, eq=False)
class _ChunkJob(LaneJob):
    """A chunk in the lanes; `run` is None for a migration, which has no future."""

    run: RunningLaunch | None = None
    name: str = ""


@dataclass(slots=True)
class _Ended:
    """How a phase ends: the works still under way, and the bytes sent that the plan alone does not give."""

    works: list[Work]
    sent_nbytes: float = 0.0


@dataclass(slots=True)
class _Totals:
    rows: dict[tuple[int, str, str], PhaseTotals] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Executor:
    """Runs launches along their routes, and counts what was sent.

    Args:
        name: Of the threads.
        groups: Where transports come from.
        rank: This rank.
        cluster: Where the ranks are.
        compressor: Used by the phases that name one.
        board: Where ranks that survive a failure exchange what they saw.
        streams: On CUDA; None issues everything from the threads of the lanes.
    """

    def __init__(
        self,
        name: str,
        groups: Groups,
        rank: int,
        cluster: Cluster,
        compressor: Compressor | None,
        board: FailureBoard,
        streams: SideStreams | None = None,
    ) -> None:
        self._name = name
        self._groups = groups
        self._rank = rank
        self._level_names = cluster.level_names
        self._node = cluster.ranks(cluster.unit(rank, 0))
        self._compressor = compressor
        self._board = board
        self._streams = streams
        self._lanes = Lanes()
        self._threads: list[threading.Thread] = []
        self._failure: CollectiveError | None = None
        self._totals = _Totals()
        self._lock = threading.Lock()
        self._diagnosing = threading.Lock()

    def start(self, launch: Launch, route: Route, scale: float, flush: bool) -> None:
        """Starts an all-reduce; returns at once. All ranks start the same ones in the same order.

        Args:
            launch: What is reduced, and whose futures it completes.
            route: Its plan, and this rank's part in it.
            scale: Factor on every rank's contribution, applied before anything is narrowed.
            flush: Travel dense, with what the compressor holds back added.

        Raises:
            RuntimeError: The executor is closed.
        """
        run = RunningLaunch(launch, route, scale, flush, len(route.chunks))
        walks = [self.walk(run, chunk) for chunk in route.chunks]
        if self._streams is not None:
            issue_at_once(self._streams, launch, walks)
            return
        for walk in walks:
            self._submit(_ChunkJob(walk, route.lanes, run=run))

    def migrate(self, layout: Layout, route: Route, device: torch.device) -> None:
        """Starts to move compression state inside this node, for a bucket whose parameters travel in a new layout.

        Runs in the order of the launches, before whatever is started next; changes the compressor's state in place.

        Args:
            layout: Which parameter lies where in the bucket.
            route: The bucket's: says which runs of elements this rank compresses.
            device: Where the bucket is.
        """
        if self._compressor is None or not route.shares_ownership:
            return
        walk = self._migrate(self._compressor, layout, route.compressed_shards(), device)
        if self._streams is not None:
            for _ in walk:
                pass
        else:
            self._submit(_ChunkJob(walk, name="migration of compression state"))

    def totals(self) -> tuple[PhaseTotals, ...]:
        """What has travelled so far, in the order of the phases."""
        with self._totals.lock:
            return tuple(replace(row) for _, row in sorted(self._totals.rows.items()))

    def close(self) -> None:
        """Ends all lanes when the launches under way have ended; later launches fail.

        Those that have not ended after `CLOSING_SECONDS` (a rank they need is gone, say) are given up, and their
        futures completed with an error. Called from a lane (by the garbage collector, say), it waits for nothing.
        """
        self._lanes.close()
        if threading.current_thread() in self._threads:
            return
        deadline = time.monotonic() + CLOSING_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for job in self._lanes.under_way():
            assert isinstance(job, _ChunkJob)
            self._failure = self._failure or CollectiveError(
                f"gradwire was closed on rank {self._rank} while an all-reduce was under way", ()
            )
            self._give_up(job, self._failure)

    def _submit(self, job: _ChunkJob) -> None:
        self._open(self._lanes.submit(job))

    def _open(self, lanes: Sequence[Lane]) -> None:
        """Makes a thread for each new lane."""
        for lane in lanes:
            thread = threading.Thread(target=self._serve, args=(lane,), name=f"{self._name} lane {lane}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, lane: Lane) -> None:
        while (job := self._lanes.take(lane)) is not None:
            assert isinstance(job, _ChunkJob)
            self._step(job, lane)
            del job  # or its buckets would live as long as this thread waits for the next one

    def _step(self, job: _ChunkJob, lane: Lane) -> None:
        """Waits for what is under way, and takes a job forward to its next hop, or to its end."""
        try:
            for work in job.works:
                work.wait()
            job.works = ()
            hop = next(job.steps, None)
            if hop is not None:
                self._open(self._lanes.move(job, hop))
                return
        except BaseException as error:  # noqa: BLE001 - whatever it is, the futures carry it
            self._fail(job, lane, error)
        self._lanes.end(job)

    def walk(self, run: RunningLaunch, chunk: Chunk) -> Iterator[Hop]:
        """One chunk's walk through the phases of its plan; each step issues collectives and names the lane to go on in.

        Args:
            run: The launch; elements `chunk.start` to `chunk.stop` of its `flat` (1-D, any dtype that the transports
                sum) are replaced by the scaled sum over all ranks, in place. In a compressed phase they go through
                float32. The last chunk to end completes the launch, on a CPU.
            chunk: Which run of elements, and this rank's transfers.

        Raises:
            CollectiveError: A launch before this one has failed.
        """
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # the frames of earlier launches hold their tensors
        flat, scale = run.launch.flat, run.scale
        lane: Lane = (0, 0)
        for index, part in enumerate(chunk.parts):
            began = time.perf_counter()
            if scale != 1.0 and not part.whole_chunk:
                flat[chunk.start : chunk.stop].mul_(scale)
                scale = 1.0
            if part.layouts:
                ended = yield from self._compressed(run, part, lane, index, scale)
            else:
                ended = yield from self._exact(flat, part, lane, index, scale)
            scale = 1.0
            if part.phase.asynchronous:
                lane = (index + 1, 0)
                yield Hop(lane, ended.works)
                ended.works.clear()  # they hold the buffers that were received
            self._count(index, part, flat.element_size(), time.perf_counter() - began, ended.sent_nbytes)
        if scale != 1.0:  # a single rank: its plan has no phases
            flat[chunk.start : chunk.stop].mul_(scale)
        with self._lock:
            run.pending -= 1
            last = run.pending == 0
        if last and self._streams is None:
            finish(run.launch, None)

    def _exact(
        self, flat: Tensor, part: PhasePart, lane: Lane, index: int, scale: float
    ) -> Generator[Hop, None, _Ended]:
        """The steps of an exact phase, each in a lane of its own."""
        works: list[Work] = []
        for number, step in enumerate(part.steps):
            if number:
                lane, scale = (index, number), 1.0
                yield Hop(lane, works)
                works.clear()
            works = [self._issue(flat, transfer, lane, scale) for transfer in step]
        return _Ended(works)

    def _compressed(
        self, run: RunningLaunch, part: PhasePart, lane: Lane, index: int, scale: float
    ) -> Generator[Hop, None, _Ended]:
        """The compressed phase: this rank's shards go through the compressor side by side, each round in a lane."""
        compressor, (transfers,) = self._compressor, part.steps
        assert compressor is not None
        shards = [run.launch.flat[transfer.start : transfer.stop] for transfer in transfers]
        wide = [_contribution(shard, scale) for shard in shards]
        running: list[tuple[tuple[int, ...], Iterator[Request]]] = []
        for transfer, layout, shard in zip(transfers, part.layouts, wide, strict=True):
            member = Member(transfer.members.index(self._rank), len(transfer.members))
            steps = _flushed(compressor, shard, layout) if run.flush else compressor.all_reduce(shard, layout, member)
            running.append((transfer.members, steps))
        sent_nbytes, rounds = 0.0, 0
        while True:
            works: list[Work] = []
            for members, steps in running:
                request = next(steps, None)
                for each in (request,) if isinstance(request, Collective) else request or ():
                    works.append(getattr(self._groups[lane, members], each.op)(*each.tensors))
                    sent_nbytes += _sent_nbytes(each, len(members))
            if not works:
                break
            rounds += 1
            lane = (index, rounds)
            yield Hop(lane, works)
        for shard, result in zip(shards, wide, strict=True):
            if result.data_ptr() != shard.data_ptr():
                shard.copy_(result)
        return _Ended([], sent_nbytes)

    def _issue(self, flat: Tensor, transfer: Transfer, lane: Lane, scale: float) -> Work:
        group = self._groups[lane, transfer.members]
        view = flat[transfer.start : transfer.stop]
        if transfer.op == ALL_GATHER:
            return group.all_gather_slices(view, transfer.bounds)
        if transfer.op == ALL_REDUCE:
            return group.all_reduce(view, scale)
        return group.reduce_scatter(view, transfer.bounds, scale)

    def _migrate(
        self, compressor: Compressor, layout: Layout, shards: list[tuple[int, int]], device: torch.device
    ) -> Iterator[Hop]:
        node = self._groups[(0, 0), self._node] if len(self._node) > 1 else None
        migrate(compressor, layout, shards, node, device)
        yield from ()

    def _fail(self, job: _ChunkJob, lane: Lane, error: BaseException) -> None:
        """Ends a job that has failed, and with the first one everything that comes after it."""
        with self._diagnosing:  # a lane that fails because of the first failure takes its diagnosis
            if self._failure is None:
                self._failure = self._diagnose(job, lane, error)
                log.error("%s", self._failure)
        self._give_up(job, self._failure)

    def _diagnose(self, job: _ChunkJob, lane: Lane, error: BaseException) -> CollectiveError:
        phases = job.run.route.plan.phases if job.run is not None else ()
        where = job.name
        if phases:
            phase = phases[min(lane[0], len(phases) - 1)]
            where = f"{phase.op} {phase.place(self._level_names)}"
        try:
            self._groups.abort(f"rank {self._rank} gave up in {where}: {error}")
            return self._board.diagnose(error, lane, where, self._node)
        except Exception as second:  # noqa: BLE001 - or nobody would hear of the first
            return CollectiveError(
                f"{where} failed on rank {self._rank} ({type(error).__name__}: {error}), and asking the other ranks "
                f"failed too ({type(second).__name__}: {second})",
                (),
            )

    def _give_up(self, job: _ChunkJob, error: CollectiveError) -> None:
        """Ends a job's launch with an error; its other chunks' ends do not count any more."""
        if job.run is None:
            return
        with self._lock:
            first = job.run.pending > 0
            job.run.pending = -1
        if first:
            finish(job.run.launch, error)

    def _count(self, index: int, part: PhasePart, element_nbytes: int, seconds: float, sent_nbytes: float) -> None:
        phase = part.phase
        level = "all ranks" if phase.whole else self._level_names[phase.level]
        key = (index, phase.op, level)
        with self._totals.lock:
            row = self._totals.rows.get(key)
            if row is None:
                row = self._totals.rows[key] = PhaseTotals(*key)
            row.seconds += seconds
            row.calls += part.shards
            row.logical_nbytes += part.logical_numel * element_nbytes
            row.wire_nbytes += part.sent_numel * element_nbytes + sent_nbytes


def issue_at_once(streams: SideStreams, launch: Launch, walks: Sequence[Iterator[Hop]]) -> None:
    """Issues all phases of all chunks behind what is on the current stream now; the host waits for nothing.

    Collectives are issued in one order on all ranks, whatever the GPUs are doing: each chunk starts one round after the
    chunk before it, so that one is between the nodes while the next one is summed inside them.

    Args:
        streams: The chunks take turns on them.
        launch: What travels; its buckets are completed behind everything that was issued.
        walks: A generator for each chunk, which issues one phase up to the hop that it yields.

    Raises:
        torch.OutOfMemoryError: A phase has found no memory. The current stream then waits for what was issued before:
            whoever catches the error may use the gradients at once.
    """
    streams.begin(launch.flat, *(bucket.flat for bucket in launch.buckets))
    coming = deque(enumerate(walks))
    running: list[tuple[int, Iterator[Hop]]] = []
    try:
        while coming or running:
            if coming:
                running.append(coming.popleft())
            running = [(number, walk) for number, walk in running if _turn(streams, number, walk)]
    except BaseException:
        streams.rejoin()
        raise
    with streams.last():
        finish(launch, None)


def _turn(streams: SideStreams, number: int, walk: Iterator[Hop]) -> bool:
    """Takes a chunk one phase forward; whether it goes on."""
    with streams.of(number):
        hop = next(walk, None)
        for work in hop.works if hop else ():
            work.wait()
        return hop is not None


def _contribution(shard: Tensor, scale: float) -> Tensor:
    """Returns scale * shard in float32: the shard itself, or a copy that leaves it intact until the end.

    A compressor takes memory as it goes. Where that may fail, a gradient that is scaled first is not scaled in place.
    """
    if shard.dtype != torch.float32:
        return shard.float().mul_(scale)
    if scale == 1.0:
        return shard
    return shard.mul_(scale) if shard.device.type in OVERCOMMITTING else shard * scale


def _flushed(compressor: Compressor, shard: Tensor, layout: Layout) -> Iterator[Request]:
    """An exact all-reduce that sends what was held back along."""
    compressor.flush(shard, layout)
    yield Collective(ALL_REDUCE, (shard,))


def _sent_nbytes(collective: Collective, size: int) -> float:
    """Bytes that each of `size` ranks sends in a collective of a compressor, headers not counted."""
    nbytes = collective.tensors[-1].nbytes
    if collective.op == ALL_REDUCE:
        return 2 * (size - 1) / size * nbytes
    return nbytes * (size - 1) / (size if collective.op == ALL_TO_ALL else 1)
