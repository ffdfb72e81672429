"""Runs plans: one thread serves each lane, takes the chunk whose turn it is, and issues its collectives phase by phase.

A chunk stays in the lane it is in as long as its collectives are done when they return (shared memory); after an
asynchronous phase it goes on in the next lane, which waits for what is under way. All of that is in the plan, so all
ranks hop alike, also those that have nothing to send in a phase.

On CUDA there are no threads: the caller issues everything at once (see `_issue_now`).

Everything here calls downward: lanes say whose turn it is, transports move bytes, compressors yield the collectives
that they need. What happens at the end of a transfer (copying back, completing futures) is in the transfer itself, as
data.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import BackendWork
from gradwire.comms.bootstrap.failure import Board, CollectiveError
from gradwire.comms.bootstrap.threads import BackgroundThread
from gradwire.comms.lanes import Hop, Lane, LaneJob, Lanes
from gradwire.comms.plan.plan import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Exchange, Plan, Transfer
from gradwire.comms.plan.routes import Chunk, PhasePart, Route
from gradwire.comms.plan.schedule import has_owners_by_links
from gradwire.comms.streams import STREAMS, Clock, HostClock, Mark, SideStreams
from gradwire.comms.transport.exchange import all_to_all_of, exchange
from gradwire.comms.transport.groups import Groups, IssuesTogether, Transport, way_back
from gradwire.comms.transport.torch_group import GlooTransport, Works
from gradwire.compressors.base import (
    PRODUCTS,
    Collective,
    Compressor,
    Layout,
    Member,
    Request,
    Work,
    weighted_bounds,
)
from gradwire.topology.cluster import Cluster

if TYPE_CHECKING:  # each is loaded where it is asked for
    from gradwire.comms.bootstrap.liveness import Deadline
    from gradwire.comms.observe.recorder import Recorder
    from gradwire.compressors.adasum import Adasum

log = logging.getLogger("gradwire")

FutureTensor = torch.futures.Future[Tensor]
Open = torch.futures.Future[Tensor | BaseException]
"""To be completed with a tensor, or with the error that took its place: raised only in a `.then`, an error's message
survives DDP's reducer."""

_PENDING = threading.Lock()
"""Held while a bucket's count of launches changes: its pieces may end in different lanes."""

CLOSING_SECONDS = 5.0
"""How long `close` waits for the launches under way: longer than a bucket takes."""

LOOK_SECONDS = 0.001
"""Between two looks at a collective, where somebody waits for it on the host."""

CLOSING_LOOK_SECONDS = 0.02
"""Between two looks at whether the device has come to the end."""

NO_ROUTE = Route(Plan("none", (), 1, 0, 0.0, {}, ""), (), (), 0, False)
"""Of what follows no plan."""

ALL_GATHER_SLICES = "all_gather_slices"
"""The method of a transport that is the inverse of `reduce_scatter`, beside the operations of compressors."""

CLOSED = "gradwire is closed on this rank: make a new HookState, or a new process group, for further all-reduces"

OVERCOMMITTING = ("cpu",)
"""Devices that hand out more memory than they have: running out ends the process there, and no error is raised."""


def unwrap(done: Open) -> Tensor:
    """The tensor of a finished future, the bucket's own; for `done.then(unwrap)`.

    Raises:
        BaseException: The value, where it is an error.
    """
    value = done.value()
    if isinstance(value, BaseException):
        try:
            raise value.with_traceback(None)
        finally:
            # The traceback keeps this frame, and the future keeps the error: a circle through C++, never collected.
            del done, value
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
    """When a bucket arrived and when it was reduced, by the executor's clock; None before, and where nothing is timed.

    Attributes:
        arrived: When the hook was given it; on CUDA, when its gradients were there.
        reduced: When its last launch ended.
    """

    arrived: Mark | None = None
    reduced: Mark | None = None


@dataclass(slots=True, eq=False)
class Bucket:
    """A flat tensor to be averaged, and the future that says when it is.

    Attributes:
        flat: 1-D, contiguous; changed in place. Not to be touched until the future is done.
        layout: Which parameter lies where in it; None where it is never compressed.
        times: When it arrived, and when its last launch ended.
        future: Completed with `flat`, or with an error. On CUDA made when it is needed.
        pending: Launches that still carry a part of it.
        error: What went wrong first.
        ends: On CUDA, where launches that carried a part of it stand on their streams.
        index: Its place among the buckets of its step.
    """

    flat: Tensor
    layout: Layout | None
    times: Times
    future: Open | None = None
    pending: int = 1
    error: BaseException | None = None
    ends: list[torch.cuda.Event] = field(default_factory=list)
    index: int = 0

    @classmethod
    def of(cls, flat: Tensor, layout: Layout | None = None, arrived: Mark | None = None, index: int = 0) -> "Bucket":
        """A bucket that arrives now, with an open future."""
        return cls(flat, layout, Times(arrived), None if flat.is_cuda else torch.futures.Future(), index=index)

    def result(self) -> FutureTensor:
        """The future of the averaged `flat`; on a CPU waiting for it raises what went wrong.

        On CUDA whoever starts the launch gets the error, and the future has an event on the device: no callback, which
        would take one more stream.
        """
        if not self.flat.is_cuda:
            assert self.future is not None
            return self.future.then(unwrap)
        if self.future is None:
            self.future = torch.futures.Future(devices=[self.flat.device])
        return cast(FutureTensor, self.future)


@dataclass(slots=True, eq=False)
class Launch:
    """One all-reduce to start: a bucket, a piece of one, or several joined ones.

    Attributes:
        parts: 1-D, contiguous, of one dtype and device: what travels, end to end; averaged in place.
        layout: Which parameter lies where in all of them together, if they may be compressed.
        buckets: Whose parts these are; their futures are completed at its end.
        pool: Where the memory that several parts travel in comes from; None takes new memory.
        counted: Whether reports count it; what the ranks tell each other about themselves is not.
        alone: Nothing else is under way from here until it has ended, on any rank: one thread takes it through all
            lanes then, where it is one chunk, and no other one is woken.
    """

    parts: Sequence[Tensor]
    layout: Layout | None
    buckets: Sequence[Bucket]
    pool: Pool | None = None
    counted: bool = True
    alone: bool = False

    @property
    def numel(self) -> int:
        """Elements of all parts."""
        return sum(part.numel() for part in self.parts)


def pack(launch: Launch) -> Tensor:
    """What travels in one piece: the only part itself, or a copy of all of them, end to end.

    Raises:
        torch.OutOfMemoryError: There is no memory for the copy; the gradients are as they were.
    """
    parts = launch.parts
    if len(parts) == 1:
        return parts[0]
    if launch.pool is None:
        return torch.cat(list(parts))
    return torch.cat(list(parts), out=launch.pool.take(launch.numel, parts[0]))


def finish(launch: Launch, flat: Tensor, error: BaseException | None, now: Mark | None) -> None:
    """Ends a launch: copies averages back, and completes the futures of buckets that no other launch still carries.

    Args:
        launch: Which.
        flat: What `pack` gave, with the averages.
        error: What went wrong, if anything did; the buckets' futures are completed with the first error.
        now: The moment, for the buckets' times.
    """
    if error is None and len(launch.parts) > 1:
        try:
            sources = torch.split(flat, [part.numel() for part in launch.parts])
            torch._foreach_copy_(list(launch.parts), list(sources))  # one launch on CUDA
        except BaseException as failed:  # noqa: BLE001 - whatever it is, the futures carry it
            error = failed
        if launch.pool is not None and error is None:  # after an error another chunk may still write to it
            launch.pool.give_back(flat)
    for bucket in launch.buckets:
        with _PENDING:
            bucket.pending -= 1
            bucket.error = bucket.error or error
            done = bucket.pending == 0
        if done:
            bucket.times.reduced = now
            if bucket.future is None:
                bucket.result()
            assert bucket.future is not None
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
            On CUDA by events, in the steps that are timed, and from those for all calls.
        timed_calls: Calls that `seconds` was measured for.
    """

    phase: int
    op: str
    level: str
    calls: int = 0
    logical_nbytes: int = 0
    wire_nbytes: float = 0.0
    seconds: float = 0.0
    timed_calls: int = 0


@dataclass(slots=True, eq=False)
class RunningLaunch:
    """A launch under way.

    Attributes:
        launch: What is under way.
        flat: What travels, in one piece.
        route: Its plan, and this rank's part in it.
        scale: Factor on every rank's contribution.
        flush: Travel dense, with what the compressor holds back added.
        pending: Chunks that have not ended.
        number: Launches started before it; the same on all ranks.
        began: When it was started, where that is of interest.
        ends: On CUDA, where the chunks that have ended stand on their streams.
        extremes: On CUDA, where the averages are looked at: memory for the least and the largest, 0-dim.
        after: Factor on the sum.
    """

    launch: Launch
    flat: Tensor
    route: Route
    scale: float
    flush: bool
    pending: int
    number: int = 0
    began: Mark | None = None
    ends: list[torch.cuda.Event] = field(default_factory=list)
    extremes: tuple[Tensor, ...] = ()
    after: float = 1.0


@dataclass(frozen=True, slots=True)
class EndedLaunch:
    """A launch that has ended well, by the host's clock.

    Attributes:
        plan: What was done.
        began: When it was started, in seconds.
        ended: When its last chunk ended.
    """

    plan: Plan
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class WaitingLaunch:
    """Where the oldest launch under way stands.

    Attributes:
        number: Launches started before it; the same on all ranks.
        bucket: The first that it carries.
        phase: `reduce_scatter intra_node`.
        seconds: Since it was started.
    """

    number: int
    bucket: Bucket
    phase: str
    seconds: float


class IssuedWork:
    """The end of a collective that was issued without an event, in the shape of an event.

    Args:
        work: Torch's.
        given_up: Whether the communicator is being aborted. Then the work is not asked: it would wait for the abort,
            and keep the GIL.
    """

    def __init__(self, work: BackendWork, given_up: Callable[[], bool]) -> None:
        self._work = work
        self._given_up = given_up

    def query(self) -> bool:
        """Whether the device has passed it."""
        return self._given_up() or self._work.is_completed()

    def synchronize(self) -> None:
        """Blocks the host until the device has passed it."""
        while not self.query():
            time.sleep(LOOK_SECONDS)


@dataclass(slots=True, eq=False)
class _HeldChunk:
    """On CUDA: a chunk whose all-gathers are issued behind the way up of the chunk that follows it."""

    run: RunningLaunch
    walk: Iterator[Hop]
    number: int


@dataclass(slots=True, eq=False)
class _ChunkJob(LaneJob):
    """A chunk in the lanes, or what follows no plan and has a name; `run` is None for a migration: it has no future.

    One that `stays` is taken through all lanes by the thread of the first one.
    """

    run: RunningLaunch | None = None
    name: str = ""
    stays: bool = False


@dataclass(slots=True)
class _Ended:
    """How a phase ends: the works still under way, and the bytes sent that the plan alone does not give."""

    works: list[Work]
    sent_nbytes: float = 0.0


@dataclass(slots=True)
class _Totals:
    rows: dict[tuple[int, str, str], PhaseTotals] = field(default_factory=dict)
    issued: list[tuple[PhaseTotals, int, Mark, Mark]] = field(default_factory=list)
    """On CUDA: (row, calls, began, ended) of the step before this one, to be read."""
    being_issued: list[tuple[PhaseTotals, int, Mark, Mark]] = field(default_factory=list)
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
        clock: Tells when phases begin and end.
        deadline: On CUDA, watches what is under way.

    Attributes:
        timing: Whether phases are timed from now on; on a CPU they always are.
        launches: How many have been started.
        carried: On CUDA, the first bucket that each of the last launches carried.
        ended: On a CPU takes the launches that end; None, and nothing is kept.
        recorder: Notes what happens when, while a trace or a profiler is on; None otherwise.
        checking: Whether the averages of compressed launches are looked at for what is not finite: see `extremes`.
        last: On CUDA, a moment behind everything that came before the last `release`; None before the first.
    """

    def __init__(
        self,
        name: str,
        groups: Groups,
        rank: int,
        cluster: Cluster,
        compressor: Compressor | None,
        board: Board,
        streams: SideStreams | None = None,
        clock: Clock | None = None,
        deadline: "Deadline | None" = None,
    ) -> None:
        self.timing = True
        self.launches = 0
        self.carried: deque[int] = deque(maxlen=256)
        self.ended: list[EndedLaunch] | None = None
        self.recorder: Recorder | None = None
        self.checking = False
        self.last: torch.cuda.Event | IssuedWork | None = None
        self._name = name
        self._groups = groups
        self._rank = rank
        self._size = cluster.size
        self._level_names = cluster.level_names
        self._node = cluster.ranks(cluster.unit(rank, 0))
        self._compressor = compressor
        self._board = board
        self._streams = streams
        self._clock = clock or HostClock()
        self.deadline = deadline
        self.activity = "an all-reduce"
        """What this rank is about, for errors: before the first launch the groups are connected."""
        self._held: _HeldChunk | None = None
        self._interrupted = False
        self._closed = False
        self._direct: BackendWork | None = None
        self._issued = 0
        self._extremes: list[Tensor] = []
        self._lanes = Lanes()
        self._threads: list[threading.Thread] = []
        self._failure: CollectiveError | None = None
        self._totals = _Totals()
        self._lock = threading.Lock()
        self._diagnosing = threading.Lock()

    def start(
        self, launch: Launch, route: Route, scale: float, flush: bool, *, hold: bool = False, after: float = 1.0
    ) -> None:
        """Starts an all-reduce; returns at once. All ranks start the same ones in the same order.

        Args:
            launch: What is reduced, and whose futures it completes.
            route: Its plan, and this rank's part in it.
            scale: Factor on every rank's contribution, applied before anything is narrowed.
            flush: Travel dense, with what the compressor holds back added.
            hold: On CUDA the last all-gathers may wait until another launch has started, or `release` is called.
            after: Factor on the sum.

        Raises:
            RuntimeError: The executor is closed.
            CollectiveError: On CUDA: a launch before this one has failed.
            torch.OutOfMemoryError: There is no memory to join buckets in, or on CUDA for a phase; the stream that
                computes then waits for what was issued before, and the gradients of this launch are as they were. On
                CUDA the other ranks hear of it, and nothing can be started any more.
        """
        if self._streams is not None:
            self._issue_now(self._streams, launch, route, scale, flush, hold, after)
            return
        run = RunningLaunch(
            launch, pack(launch), route, scale, flush, len(route.chunks), self.launches, self._clock.now(), after=after
        )
        self.launches += 1
        walks = [self.walk(run, chunk) for chunk in route.chunks]
        stays = launch.alone and len(walks) == 1
        for walk in walks:
            self._submit(_ChunkJob(walk, ((0, 0),) if stays else route.lanes, run=run, stays=stays))

    def start_steps(
        self, bucket: Bucket, name: str, steps: Generator[Hop, None, Tensor], lanes: tuple[Lane, ...]
    ) -> None:
        """Starts what follows no plan; returns at once, on CUDA when all is issued.

        Args:
            bucket: Its tensor becomes what the steps return; completed at their end.
            name: What it is, for errors.
            steps: Issue collectives; on CUDA they may make the host wait.
            lanes: That they pass on every rank, in this order; no plan has them.

        Raises:
            As `start`.
        """
        run = RunningLaunch(Launch((bucket.flat,), None, (bucket,)), bucket.flat, NO_ROUTE, 1.0, False, 1)
        run.number, self.launches = self.launches, self.launches + 1
        if self._streams is None:
            run.began = self._clock.now()
            self._submit(_ChunkJob(self._completing(run, steps), lanes, lanes[0], run=run, name=name))
            return
        self._raise_failure()
        self.carried.append(bucket.index)
        try:
            self.release()
            with self._streams.alone():
                _advance(self._completing(run, steps), 1)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            self._give_up_now(self._streams, error)

    def _completing(self, run: RunningLaunch, steps: Generator[Hop, None, Tensor]) -> Iterator[Hop]:
        self._raise_failure()
        (bucket,) = run.launch.buckets
        bucket.flat = yield from steps
        finish(run.launch, bucket.flat, None, self._now())

    def book(self, index: int, op: str, level: str, logical_nbytes: int, wire_nbytes: float) -> None:
        """Counts a collective that belongs to no plan.

        Args:
            index: Its place in the report, behind the phases of plans.
            op: In words.
            level: Name of the level, or `all ranks`.
            logical_nbytes: Of gradient.
            wire_nbytes: That this rank sends.
        """
        with self._totals.lock:
            row = self._totals.rows.setdefault((index, op, level), PhaseTotals(index, op, level))
            row.calls += 1
            row.logical_nbytes += logical_nbytes
            row.wire_nbytes += wire_nbytes

    def release(self) -> None:
        """Issues what `start` has held back; all ranks, at the same point of the sequence of launches.

        Raises:
            CollectiveError: On CUDA: a launch has failed, or another rank is gone.
        """
        if self._streams is None or (self._closed and self._held is None and self._failure is None):
            return
        self._raise_failure()
        held, self._held = self._held, None
        if held is not None:
            try:
                self._issue_rest(held)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
                self._give_up_now(self._streams, error)
        if self._issued:
            self.last = self._streams.mark(self._issued - 1)
            if self.deadline is not None:
                self.deadline.watch(self.last.query)
        if self._direct is not None:
            self.last = IssuedWork(self._direct, lambda: self._interrupted)
            if self.deadline is not None:
                self.deadline.watch(self.last.query)
        self._direct = None
        self._issued = 0  # the same bucket travels on the same stream in each step

    def extremes(self) -> list[Tensor]:
        """On CUDA, 0-dim: least and largest average of each compressed launch since the last call. `release` first."""
        extremes, self._extremes = self._extremes, []
        return extremes

    def migrate(self, layout: Layout, route: Route, device: torch.device, *, ask: bool = True) -> None:
        """Starts to move compression state inside this node, for a bucket whose parameters travel in a new layout.

        Runs in the order of the launches, before whatever is started next; changes the compressor's state in place.

        Args:
            layout: Which parameter lies where in the bucket.
            route: The bucket's: says which runs of elements this rank compresses.
            device: Where the bucket is.
            ask: See `migration.migrate`.
        """
        if self._compressor is None or not route.shares_ownership:
            return
        walk = self._migrate(self._compressor, layout, route.compressed_shards(), device, ask)
        if self._streams is not None:
            self.release()
            with self._streams.alone():
                for _ in walk:
                    pass
        else:
            self._submit(_ChunkJob(walk, name="migration of compression state"))

    def totals(self) -> tuple[PhaseTotals, ...]:
        """What has travelled so far, in the order of the phases. On CUDA waits for what was issued."""
        for _ in range(2):
            self.read_times()
        with self._totals.lock:
            return tuple(
                replace(row, seconds=row.seconds * row.calls / max(row.timed_calls, 1))
                for _, row in sorted(self._totals.rows.items())
            )

    def phase_seconds(self) -> dict[tuple[int, str, str], tuple[float, int, int]]:
        """For each phase, by its place, collective and level: seconds and calls so far that were timed, bytes so far.

        On CUDA as far as they have been read. Waits for nothing.
        """
        with self._totals.lock:
            return {key: (row.seconds, row.timed_calls, row.logical_nbytes) for key, row in self._totals.rows.items()}

    def seconds_of_phases(self) -> list[float]:
        """The seconds that `phase_seconds` gives, in the same order, in a tenth of the time; phases come at its end."""
        with self._totals.lock:
            return [row.seconds for row in self._totals.rows.values()]

    def read_times(self) -> None:
        """On CUDA: reads the times of the phases that were issued before the last call: the device has passed them."""
        totals = self._totals
        passed, totals.issued, totals.being_issued = totals.issued, totals.being_issued, []
        for row, calls, began, ended in passed:
            row.seconds += self._clock.between(began, ended)
            row.timed_calls += calls

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Ends all lanes when the launches under way have ended; later launches fail.

        Those that have not ended after so many seconds (a rank they need is gone, say) are given up, and their futures
        completed with an error. Called from a lane (by the garbage collector, say), it waits for nothing.
        On CUDA it waits as long for the device, and gives up nothing: see `is_under_way`.
        """
        self._lanes.close()
        self._closed = True
        if threading.current_thread() in self._threads:
            return
        deadline = time.monotonic() + seconds
        while not self._interrupted and self._device_is_busy and time.monotonic() < deadline:
            time.sleep(CLOSING_LOOK_SECONDS)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for job in self._lanes.under_way():
            assert isinstance(job, _ChunkJob)
            self._failure = self._failure or CollectiveError(
                f"gradwire was closed on rank {self._rank} while an all-reduce was under way", ()
            )
            self._give_up(job, self._failure)
        if self._failure is not None:  # futures keep it, and its frames what was under way: gloo's works, and so on
            self._failure.__traceback__ = self._failure.__context__ = None

    @property
    def has_ended(self) -> bool:
        """Whether no lane runs any more: nothing touches the memory of a launch from here on."""
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def is_under_way(self) -> bool:
        """On CUDA: whether the device has not come to the end of what was started, or never will."""
        return self._interrupted or self._held is not None or self._device_is_busy

    @property
    def _device_is_busy(self) -> bool:
        direct = self._direct is not None and not IssuedWork(self._direct, lambda: self._interrupted).query()
        return direct or (self.deadline is not None and self.deadline.is_under_way)

    def _submit(self, job: _ChunkJob) -> None:
        self._open(self._lanes.submit(job))

    def _open(self, lanes: Sequence[Lane]) -> None:
        """Makes a thread for each new lane."""
        for lane in lanes:
            thread = BackgroundThread(f"{self._name} lane {lane}", partial(self._serve, lane))
            self._threads.append(thread)
            thread.start()

    def _serve(self, lane: Lane) -> None:
        while (job := self._lanes.take(lane)) is not None:
            assert isinstance(job, _ChunkJob)
            self._step(job, lane)
            del job  # or its buckets would live as long as this thread waits for the next one

    def _step(self, job: _ChunkJob, lane: Lane) -> None:
        """Waits for what is under way, and takes a job forward to its next hop, or to its end; all hops if it stays."""
        try:
            while True:
                if self.recorder is None:
                    for work in job.works:
                        work.wait()
                    job.works = ()
                    hop = next(job.steps, None)
                else:
                    hop = self._recorded_step(self.recorder, job, lane)
                if hop is None:
                    break
                if not job.stays:
                    self._open(self._lanes.move(job, hop))
                    return
                lane = job.lane = hop.lane
                job.works = hop.works
        except BaseException as error:  # noqa: BLE001 - whatever it is, the futures carry it
            self._fail(job, lane, error)
        self._lanes.end(job)

    def _recorded_step(self, recorder: "Recorder", job: _ChunkJob, lane: Lane) -> Hop | None:
        """What `_step` does, noted: the wait for what is under way, and what is issued then."""
        track, number = f"lane {lane[0]}.{lane[1]}", -1 if job.run is None else job.run.number
        if job.works:
            with recorder.span(track, f"wait for {self._place_of(job)}", launch=number):
                for work in job.works:
                    work.wait()
        job.works = ()
        with recorder.span(track, self._place_of(job), launch=number):
            return next(job.steps, None)

    def oldest(self) -> WaitingLaunch | None:
        """Where the launch stands that was started first of those under way; None without one, and on CUDA. Any thread.

        Also None between two looks of a lane: ask again.
        """
        for job in self._lanes.under_way():
            assert isinstance(job, _ChunkJob)
            run = job.run
            if run is not None and isinstance(run.began, float):
                seconds = time.perf_counter() - run.began
                return WaitingLaunch(run.number, run.launch.buckets[0], self._place_of(job), seconds)
        return None

    def _place_of(self, job: _ChunkJob) -> str:
        """The phase that a job is in, in words."""
        if job.run is None or job.name:
            return job.name
        phases = job.run.route.plan.phases
        if not phases:
            return "nothing"
        # After an asynchronous phase a job waits for it in the lane of the next one.
        index = job.lane[0] - (1 if job.works and job.lane[1] == 0 else 0)
        phase = phases[min(max(index, 0), len(phases) - 1)]
        return f"{phase.op} {phase.place(self._level_names)}"

    def walk(self, run: RunningLaunch, chunk: Chunk) -> Iterator[Hop]:
        """One chunk's walk through the phases of its plan; each step issues collectives and names the lane to go on in.

        Args:
            run: The launch; elements `chunk.start` to `chunk.stop` of its `flat` (1-D, any dtype that the transports
                sum) are replaced by the scaled sum over all ranks, in place. In a compressed phase they go through
                float32. On a CPU the last chunk to end completes the launch.
            chunk: Which run of elements, and this rank's transfers.

        Raises:
            CollectiveError: A launch before this one has failed.
        """
        self._raise_failure()
        flat, scale = run.flat, run.scale
        lane: Lane = (0, 0)
        for index, part in enumerate(chunk.parts):
            began = self._clock.now() if self.timing else None
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
            if run.launch.counted:
                self._count(index, part, flat.element_size(), began, ended.sent_nbytes)
            if self.recorder is not None and self._streams is not None and began is not None:
                words = f"{part.phase.op} {part.phase.place(self._level_names)}"
                self.recorder.note(f"phase {index}: {words}", words, began, self._clock.now(), launch=run.number)
        scale *= run.after
        if scale != 1.0:  # also for a single rank: its plan has no phases
            flat[chunk.start : chunk.stop].mul_(scale)
        if self._streams is None:
            with self._lock:
                run.pending -= 1
                last = run.pending == 0
            if last:
                self._finish(run, self._clock.now())

    def _finish(self, run: RunningLaunch, now: Mark | None) -> None:
        """Ends a launch well."""
        if self.recorder is not None and run.launch.counted and run.began is not None and now is not None:
            buckets = [bucket.index for bucket in run.launch.buckets]
            self.recorder.note(
                "transfers",
                f"transfer of bucket {', '.join(map(str, buckets))}",
                run.began,
                now,
                launch=run.number,
                buckets=buckets,
                nbytes=run.flat.nbytes,
                plan=run.route.plan.name,
                compressor=next((phase.compressor for phase in run.route.plan.phases if phase.compressor), None),
            )
        if self.ended is not None and run.launch.counted and isinstance(run.began, float) and isinstance(now, float):
            self.ended.append(EndedLaunch(run.route.plan, run.began, now))
        finish(run.launch, run.flat, None, now)

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
            works = []
            for transfer in step:
                by_links = number > 0 and has_owners_by_links(part.phase, transfer)
                works.append(self._issue(flat, transfer, way_back(lane) if by_links else lane, scale, part.rings))
        return _Ended(works)

    def _compressed(
        self, run: RunningLaunch, part: PhasePart, lane: Lane, index: int, scale: float
    ) -> Generator[Hop, None, _Ended]:
        """The compressed phase: this rank's shards go through the compressor side by side, each round in a lane."""
        compressor, (transfers,) = self._compressor, part.steps
        assert compressor is not None
        shards = [run.flat[transfer.start : transfer.stop] for transfer in transfers]
        wide = [_contribution(shard, scale) for shard in shards]
        running: list[tuple[tuple[int, ...], Iterator[Request]]] = []
        by_links: set[tuple[int, ...]] = set()
        bucket = run.launch.layout
        products: Tensor | None = None
        # Of `Planned`, without a call on a bucket's path; a compressor of somebody else's has no such attribute.
        adasum = cast("Adasum", compressor) if getattr(compressor, "whole_parameters", False) else None
        if adasum is not None and bucket is not None and transfers:
            products = adasum.products(bucket, len(transfers[0].members), run.flat.device)
        for transfer, layout, shares, shard in zip(transfers, part.layouts, part.shares, wide, strict=True):
            place = transfer.members.index(self._rank)
            member = Member(place, len(transfer.members), shares, part.break_even, run.flat.dtype, scale)
            if adasum is not None and bucket is not None and products is not None:
                running.append((transfer.members, adasum.combine(shard, layout, member, bucket, products)))
                continue
            steps = _flushed(compressor, shard, layout) if run.flush else compressor.all_reduce(shard, layout, member)
            if shares:
                by_links.add(transfer.members)
            if shares and self._streams is None:  # on CUDA sums are NCCL's own: docs/develop/cuda.md
                steps = _by_owners(steps, shares, part.phase.in_ring_order)
            running.append((transfer.members, steps))
        sent_nbytes, rounds = 0.0, 0
        while True:
            works: list[Work] = []
            summed = False
            for members, steps in running:
                if self.recorder is None:
                    request = next(steps, None)
                else:
                    with self.recorder.span(f"lane {lane[0]}.{lane[1]}", f"codec {compressor.name}"):
                        request = next(steps, None)
                if request is None:
                    continue
                if request == PRODUCTS and products is not None:
                    summed = True
                    continue
                collectives = (request,) if isinstance(request, Collective) else request
                issued_in = way_back(lane) if rounds and members in by_links else lane
                works.append(issue_together(self._groups[issued_in, members], collectives))
                sent_nbytes += sum(_sent_nbytes(each, len(members), members.index(self._rank)) for each in collectives)
            if summed and products is not None:  # all shards of this rank have added theirs
                owners = len(part.owners)
                works.append(self._groups[lane, part.owners].all_reduce(products.view(-1)))
                sent_nbytes += 2 * (owners - 1) / owners * products.nbytes
            if not works:
                break
            rounds += 1
            lane = (index, rounds)
            yield Hop(lane, works)
        for shard, result in zip(shards, wide, strict=True):
            if result.data_ptr() != shard.data_ptr():
                shard.copy_(result)
        return _Ended([], sent_nbytes)

    def _issue(
        self, flat: Tensor, transfer: Transfer, lane: Lane, scale: float, rings: Sequence[tuple[int, int]] = ()
    ) -> Work:
        if self.recorder is not None and self._streams is not None:
            with self.recorder.host_range(f"{transfer.op} among {len(transfer.members)} ranks"):
                return self._issued_work(flat, transfer, lane, scale, rings)
        return self._issued_work(flat, transfer, lane, scale, rings)

    def _issued_work(
        self, flat: Tensor, transfer: Transfer, lane: Lane, scale: float, rings: Sequence[tuple[int, int]]
    ) -> Work:
        group = self._groups[lane, transfer.members]
        if isinstance(transfer, Exchange):
            return exchange(group, flat, transfer, self._rank)
        whole = transfer.stop - transfer.start == flat.numel()  # a view costs the host what ten lines of Python do
        view = flat if whole else flat[transfer.start : transfer.stop]
        if transfer.op == ALL_GATHER:
            return group.all_gather_slices(view, transfer.bounds)
        if transfer.op == ALL_REDUCE:
            return group.all_reduce(view, scale)
        if rings:
            shifted = tuple((start - transfer.start, stop - transfer.start) for start, stop in rings)
            return _sums_as_rings(group).reduce_scatter(view, transfer.bounds, scale, shifted)
        return group.reduce_scatter(view, transfer.bounds, scale)

    def _migrate(
        self,
        compressor: Compressor,
        layout: Layout,
        shards: list[tuple[int, int]],
        device: torch.device,
        ask: bool,
    ) -> Iterator[Hop]:
        node = self._groups[(0, 0), self._node] if len(self._node) > 1 else None
        from gradwire.comms.migration import migrate  # here: exact tensors have no state

        migrate(compressor, layout, shards, node, device, ask=ask)
        yield from ()

    def _issue_now(
        self, streams: SideStreams, launch: Launch, route: Route, scale: float, flush: bool, hold: bool, after: float
    ) -> None:
        """Issues a launch on CUDA, behind what is on the current stream now; the host waits for nothing.

        Each chunk goes its way up at once: all phases up to the one that ends its reduction. Its way down, the
        all-gathers, is issued behind the way up of the chunk after it, also where that is of the next bucket. Each
        communicator runs its collectives in the order of issue, so otherwise the next chunk would wait, inside the
        node, for this one to come back from the network, and the network would idle meanwhile.

        The order is that of chunks and phases alone. How many rounds a compressor needs differs between the ranks of a
        node (a dense rule, an empty shard) and does not matter: no collective of another chunk comes in between.
        """
        self._raise_failure()
        self.launches += 1
        self.carried.append(launch.buckets[0].index)
        try:
            if route.direct and not self.timing and after == 1.0 and self._issue_alone(launch, route, scale):
                return
            numbers = range(self._issued, self._issued + len(route.chunks))
            self._issued += len(numbers)
            last = numbers[-1] if numbers else self._issued
            streams.begin((*numbers, last), launch.parts)
            with streams.of(last):
                run = RunningLaunch(launch, pack(launch), route, scale, flush, len(route.chunks), self.launches - 1)
                run.after = after
                if self.recorder is not None and self.timing:
                    run.began = self._clock.now()
                if self.checking and launch.layout is not None and run.flat.numel():
                    run.extremes = (run.flat.new_empty(()), run.flat.new_empty(()))  # while the gradient is intact
            if len(launch.parts) > 1:
                # The memory of joined buckets belongs to the last chunk's stream, which all others end before.
                packed = streams.mark(last)
                for number in numbers[:-1][:STREAMS]:
                    streams.wait(number, (packed,))
            for number, chunk in zip(numbers, route.chunks, strict=True):
                walk = self.walk(run, chunk)
                with streams.of(number):
                    _advance(walk, route.turn)
                before, self._held = self._held, _HeldChunk(run, walk, number)
                if before is not None:
                    self._issue_rest(before)
            if not numbers:
                with streams.of(last):
                    self._finish(run, self._now())
            elif not hold:
                self.release()
            elif route.turn == len(route.plan.phases):
                held, self._held = self._held, None
                if held is not None:
                    self._issue_rest(held)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            self._give_up_now(streams, error)

    def _give_up_now(self, streams: SideStreams, error: Exception) -> None:
        """Ends everything because a launch could not be issued, and raises why.

        Others may have issued it, so no launch of this rank can be paired with theirs any more.
        """
        self._held = None
        streams.rejoin()
        self.interrupt(error)
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        self._raise_failure()

    def interrupt(self, error: Exception) -> None:
        """On CUDA: gives up what is under way, and all that would come, because of an error here or elsewhere.

        NCCL's communicators are aborted, so that a device that waits for a lost rank goes on; what the gradients of
        this step then hold is undefined, and `spoil` says so. The next launch, the end of the step, or the optimizer's
        next step raises what happened. Any thread.
        """
        self._interrupted = True
        with self._diagnosing:
            if self._failure is None:
                everybody = range(self._size)
                if self._streams is not None:
                    self._streams.verdict.give_up()  # before the device can go on
                self._failure = self._diagnose(self.activity, (0, 0), everybody, error)
                log.error("%s", self._failure)

    def spoil(self, bucket: Bucket) -> None:
        """On CUDA: has the device make one average NaN where gradwire gives up before the step's last bucket has ended.

        The host may have issued the optimizer's step by then. Changes nothing otherwise; the current stream waits for
        the bucket, as DDP has it do in any case.

        Args:
            bucket: The last one that was launched in this step: it ends behind all others.
        """
        if self._streams is not None and bucket.flat.is_floating_point() and bucket.flat.numel():
            bucket.result().wait()  # done for the host since it was issued
            self._streams.verdict.apply_to(bucket.flat)

    @property
    def failure(self) -> CollectiveError | None:
        """What has failed first, once the other ranks have been asked."""
        if self._interrupted:
            with self._diagnosing:  # by the thread that has interrupted
                pass
        return self._failure

    def raise_failure(self) -> None:
        """On CUDA: raises what has failed, so far as that is known; costs nothing otherwise.

        Raises:
            CollectiveError: See `interrupt`.
        """
        if self._interrupted:
            self._raise_failure()

    def _raise_failure(self) -> None:
        """Raises what has failed, or that the executor is closed."""
        failure = self.failure
        if failure is not None:
            raise failure.with_traceback(None)  # the frames of earlier launches hold their tensors
        if self._closed and self._streams is not None:
            raise RuntimeError(CLOSED)

    def _issue_alone(self, launch: Launch, route: Route, scale: float) -> bool:
        """Issues one all-reduce of a whole bucket as torch's own hook does; False where it travels otherwise.

        Nothing is gained here, so nothing may be lost: no stream, no event and no future but the collective's own.
        """
        (bucket, *others), (chunk,) = launch.buckets, route.chunks
        if others or bucket.future is not None or launch.parts[0] is not bucket.flat:
            return False
        (part,) = chunk.parts
        for transfer in part.steps[0]:
            work = cast(BackendWork, self._issue(bucket.flat, transfer, (0, 0), scale))
            self._direct = work
            bucket.future = cast(Open, work.get_future().then(_only))
            if launch.counted:
                self._count(0, part, bucket.flat.element_size(), None, 0.0)
        return bucket.future is not None

    def _issue_rest(self, held: _HeldChunk) -> None:
        """Issues a chunk's way down, and ends its launch behind all of its chunks."""
        assert self._streams is not None
        run = held.run
        with self._streams.of(held.number):
            _advance(held.walk, len(run.route.plan.phases) + 1)
            run.pending -= 1
            if run.pending:
                run.ends.append(self._streams.mark(held.number))
                return
            self._streams.wait(held.number, run.ends)
            if run.extremes:
                torch.aminmax(run.flat, out=run.extremes)
                self._extremes += run.extremes
            for bucket in run.launch.buckets:
                if bucket.pending == 1:
                    self._streams.wait(held.number, bucket.ends)
            self._finish(run, self._now())
            waiting = [bucket for bucket in run.launch.buckets if bucket.pending]
            if waiting:
                ended = self._streams.mark(held.number)
                for bucket in waiting:
                    bucket.ends.append(ended)

    def _now(self) -> Mark | None:
        return self._clock.now() if self.timing else None

    def _fail(self, job: _ChunkJob, lane: Lane, error: BaseException) -> None:
        """Ends a job that has failed, and with the first one everything that comes after it."""
        phases = job.run.route.plan.phases if job.run is not None else ()
        phase = phases[min(lane[0], len(phases) - 1)] if phases else None
        where = f"{phase.op} {phase.place(self._level_names)}" if phase else job.name
        self._give_up(job, self.failed(where, lane, self._node, error))

    def failed(self, where: str, lane: Lane, members: Sequence[int], error: BaseException) -> CollectiveError:
        """On a CPU: ends everything because a collective has failed, and says what happened to the ranks.

        Args:
            where: Which collective, in words.
            lane: Where it ran.
            members: The ranks that an error's `missing` are indices of.
            error: What it raised.

        Returns:
            The diagnosis of the first failure: one that comes of it takes it too.
        """
        with self._diagnosing:
            if self._failure is None:
                self._failure = self._diagnose(where, lane, members, error)
                log.error("%s", self._failure)
        return self._failure

    def _diagnose(self, where: str, lane: Lane, members: Sequence[int], error: BaseException) -> CollectiveError:
        try:
            waiting = self._streams is not None and self._waits_for_others()
            self._groups.abort(f"rank {self._board.rank} gave up in {where}: {error}")
            if self._streams is None:
                return self._board.diagnose(error, lane, where, members)
            return self._board.diagnose(error, lane, where, members, launches=self.launches, waiting=waiting)
        except Exception as second:  # noqa: BLE001 - or nobody would hear of the first
            return CollectiveError(
                f"{where} failed on rank {self._rank} ({type(error).__name__}: {error}), and asking the other ranks "
                f"failed too ({type(second).__name__}: {second})",
                (),
            )

    def _waits_for_others(self) -> bool:
        """On CUDA: whether the device waits; so it does where it cannot be asked any more."""
        try:
            return self._held is not None or self._device_is_busy
        except RuntimeError as error:
            log.warning("the device of rank %d cannot be asked whether it waits: %s", self._rank, error)
            return True

    def _give_up(self, job: _ChunkJob, error: CollectiveError) -> None:
        """Ends a job's launch with an error; its other chunks' ends do not count any more."""
        if job.run is None:
            return
        with self._lock:
            first = job.run.pending > 0
            job.run.pending = -1
        if first:
            finish(job.run.launch, job.run.flat, error, None)

    def _count(self, index: int, part: PhasePart, element_nbytes: int, began: Mark | None, sent_nbytes: float) -> None:
        phase = part.phase
        level = "all ranks" if phase.whole else self._level_names[phase.level]
        key = (index, phase.op, level)
        with self._totals.lock:
            row = self._totals.rows.get(key)
            if row is None:
                row = self._totals.rows[key] = PhaseTotals(*key)
            if isinstance(began, float):
                row.seconds += time.perf_counter() - began
                row.timed_calls += part.shards
            elif began is not None:
                self._totals.being_issued.append((row, part.shards, began, self._clock.now()))
            row.calls += part.shards
            row.logical_nbytes += part.logical_numel * element_nbytes
            row.wire_nbytes += part.sent_numel * element_nbytes + sent_nbytes


def issue_together(transport: Transport, collectives: Sequence[Collective]) -> Work:
    """Issues collectives that may be under way together, one after the other where the transport knows no better way.

    NCCL has group calls; of two ranks on gloo small ones travel in one message.

    Args:
        transport: Of all of them.
        collectives: The same on all ranks, in the same order.

    Raises:
        RuntimeError: One of them could not be issued. On NCCL the transport is then of no use any more.
    """
    if hasattr(transport, "issue_together"):  # a protocol's isinstance() costs more than many a collective
        together = cast("IssuesTogether", transport).issue_together(collectives)
    else:
        together = None
    if together is not None:
        return together
    works = [_issue_one(transport, each) for each in collectives]
    return works[0] if len(works) == 1 else Works(works)


def _sums_as_rings(transport: Transport) -> GlooTransport:
    """The same transport.

    Raises:
        TypeError: It cannot sum in the order of gloo's rings, and other bits would come of another order.
    """
    if not isinstance(transport, GlooTransport):
        raise TypeError(
            f"`transport` is a {type(transport).__name__}, and the plan sums in the order of gloo's rings; wanted a "
            "GlooTransport: leave `probe` False with other transports"
        )
    return transport


def _issue_one(transport: Transport, collective: Collective) -> Work:
    issue = getattr(transport, collective.op)
    if not collective.bounds:
        return cast(Work, issue(*collective.tensors))
    if collective.as_ring and collective.op == REDUCE_SCATTER:
        (flat,) = collective.tensors
        return _sums_as_rings(transport).reduce_scatter(flat, collective.bounds, rings=((0, flat.numel()),))
    if collective.op in (REDUCE_SCATTER, ALL_GATHER_SLICES):
        return cast(Work, issue(*collective.tensors, collective.bounds))
    output, source = collective.tensors
    width = output.shape[1:].numel()
    if collective.op == ALL_GATHER:
        start, stop = collective.bounds[transport.rank : transport.rank + 2]
        output[start:stop] = source
        return transport.all_gather_slices(output.view(-1), [width * bound for bound in collective.bounds])
    splits = [width * (stop - start) for start, stop in pairwise(collective.bounds)]
    return all_to_all_of(transport, output.view(-1), source.view(-1), splits)


def _by_owners(steps: Iterator[Request], shares: Sequence[int], as_ring: bool) -> Iterator[Request]:
    """A compressor's collectives, with every all_reduce as a reduce_scatter to unequal owners and an all_gather."""
    for request in steps:
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


def _only(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    """The tensor of a collective of one, as torch's own comm hooks take it."""
    (tensor,) = done.value()
    return tensor


def _advance(walk: Iterator[Hop], phase: int) -> None:
    """Takes a chunk forward on the current stream, to the phase of that index or to its end."""
    for hop in walk:
        for work in hop.works:
            work.wait()
        if hop.lane[0] >= phase:
            return


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


def _sent_nbytes(collective: Collective, size: int, rank: int) -> float:
    """Bytes that one of `size` ranks sends in a collective of a compressor, headers not counted."""
    nbytes, bounds = collective.tensors[-1].nbytes, collective.bounds
    if collective.op == ALL_REDUCE:
        return 2 * (size - 1) / size * nbytes
    if collective.op == ALL_GATHER:
        return nbytes * (size - 1)
    own = (bounds[rank + 1] - bounds[rank]) / max(bounds[-1], 1) if bounds else 1 / size
    return nbytes * own * (size - 1) if collective.op == ALL_GATHER_SLICES else nbytes * (1 - own)
