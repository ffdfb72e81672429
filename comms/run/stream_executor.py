"""The executor of CUDA tensors: the calling thread issues everything at once, and streams keep the order.

It has no threads, and all-reduces by plans make the host wait for nothing during a step. A coroutine that follows no
plan, such as a sparse sum, may block the host.
"""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import BackendWork
from gradwire.comms.bootstrap.failure_reporter import CollectiveError, FailureReporter
from gradwire.comms.lanes import ChunkSteps, Lane
from gradwire.comms.plan.plan import Transfer
from gradwire.comms.plan.rank_plans import PhasePart, RankPlan
from gradwire.comms.run.all_reduces import AllReduce, Bucket, Open, RunningAllReduce, WaitingAllReduce, finish, pack
from gradwire.comms.run.executor import Executor
from gradwire.comms.run.failure_handler import FailureHandler
from gradwire.comms.run.phase_stats import PhaseStats
from gradwire.comms.run.programs import Programs
from gradwire.comms.streams import STREAMS, Clock, IssuedWork, Mark, SideStreams
from gradwire.comms.transport.groups import Groups
from gradwire.compressors.base import Compressor, Request, Work
from gradwire.topology.cluster import Cluster

if TYPE_CHECKING:  # loaded where it is asked for
    from gradwire.comms.bootstrap.deadline import Deadline

log = logging.getLogger("gradwire")

CLOSING_POLL_SECONDS = 0.02
"""Seconds between two checks whether the device is done, in `close`."""

CLOSED = "gradwire is closed on this rank: make a new HookState, or a new process group, for further all-reduces"


@dataclass(slots=True, eq=False)
class _HeldChunk:
    """Holds a chunk whose all-gathers are deferred: they are issued after the reducing phases of the next chunk.

    Attributes:
        run: All-reduce that it belongs to.
        steps: Coroutine of the chunk.
        number: Number of the chunk in the step; chooses its stream.
    """

    run: RunningAllReduce
    steps: ChunkSteps
    number: int


class DevicePrograms(Programs):
    """Programs for CUDA: NCCL chooses the order of sums, and phases are timed by events of the device."""

    def issue(
        self, flat: Tensor, transfer: Transfer, lane: Lane, scale: float, rings: Sequence[tuple[int, int]] = ()
    ) -> Work:
        """Issues one transfer, see `Programs.issue`, and records in a trace how long issuing it takes on the host."""
        if self._stats.recorder is None:
            return super().issue(flat, transfer, lane, scale, rings)
        with self._stats.recorder.host_range(f"{transfer.op} among {len(transfer.members)} ranks"):
            return super().issue(flat, transfer, lane, scale, rings)

    def _by_owners(self, requests: Iterator[Request], shares: Sequence[int], as_ring: bool) -> Iterator[Request]:
        """Returns `requests` unchanged: no rank owns a part of a compressor's all-reduce, because NCCL sums by itself.

        On a CPU, `Programs._by_owners` divides the sum between owners. See docs/develop/cuda.md.
        """
        return requests

    def _note(self, run: RunningAllReduce, index: int, part: PhasePart, began: Mark, ended: Mark) -> None:
        assert self._stats.recorder is not None
        words = f"{part.phase.op} {part.phase.place(self._level_names)}"
        self._stats.recorder.note(f"phase {index}: {words}", words, began, ended, launch=run.number)


class StreamExecutor(Executor):
    """Issues all-reduces on side streams of a CUDA device, in the calling thread.

    Args:
        groups: Transports by lane and members.
        rank: This rank.
        cluster: Placement of the ranks.
        compressor: Compressor of the phases that name one; None if all phases are exact.
        reporter: Exchanges reports between ranks that survive a failure, to find the cause.
        streams: Side streams, in addition to the current stream that computes.
        clock: Clock of the device.
        deadline: Watches for collectives that exceed the time-out; None if nothing is watched.
    """

    def __init__(
        self,
        groups: Groups,
        rank: int,
        cluster: Cluster,
        compressor: Compressor | None,
        reporter: FailureReporter,
        streams: SideStreams,
        clock: Clock,
        deadline: "Deadline | None" = None,
    ) -> None:
        stats = PhaseStats(clock, cluster.level_names)
        programs = DevicePrograms(groups, rank, cluster, compressor, stats)
        super().__init__(programs, stats, FailureHandler(groups, reporter, rank, self._device_state))
        self.deadline = deadline
        self._rank = rank
        self._size = cluster.size
        self._streams = streams
        self._held: _HeldChunk | None = None
        self._interrupted = False
        self._closed = False
        self._direct: BackendWork | None = None
        self._issued = 0
        self._extremes: list[Tensor] = []

    def start(
        self,
        all_reduce: AllReduce,
        rank_plan: RankPlan,
        scale: float,
        flush: bool,
        *,
        hold: bool = False,
        after: float = 1.0,
    ) -> None:
        """Issues an all-reduce on side streams, after the work on the current stream; the host does not wait.

        See `Executor.start` for the arguments and errors.

        The reducing phases of a chunk are issued at once. Its all-gathers are issued after the reducing phases of the
        next chunk, which may be of the next bucket. A communicator runs its collectives in the order of issue, so
        otherwise the next chunk would wait inside the node until this one is back from the network, and the network
        would be idle meanwhile.

        Invariant: the order depends on chunks and phases alone, so it is the same on all ranks. The number of rounds of
        a compressor may differ between the ranks of a node (a dense rule, an empty shard), because no collective of
        another chunk comes between them.
        """
        self._refuse_if_failed()
        streams, stats = self._streams, self.stats
        self.launches += 1
        self.carried.append(all_reduce.buckets[0].index)
        try:
            if (
                rank_plan.direct
                and not stats.timing
                and after == 1.0
                and self._issue_alone(all_reduce, rank_plan, scale)
            ):
                return
            # Number the chunks within the step; a number decides the stream.
            numbers = range(self._issued, self._issued + len(rank_plan.chunks))
            self._issued += len(numbers)
            last = numbers[-1] if numbers else self._issued
            streams.begin((*numbers, last), all_reduce.parts)
            with streams.of(last):
                run = RunningAllReduce(
                    all_reduce, pack(all_reduce), rank_plan, scale, flush, len(rank_plan.chunks), self.launches - 1
                )
                run.after = after
                if stats.recorder is not None:
                    run.began = stats.now()
                if self.checking and all_reduce.layout is not None and run.flat.numel():
                    run.extremes = (run.flat.new_empty(()), run.flat.new_empty(()))  # while the gradient is intact
            # The buffer of joined buckets belongs to the last chunk's stream: the other streams wait for the copy.
            if len(all_reduce.parts) > 1:
                packed = streams.mark(last)
                for number in numbers[:-1][:STREAMS]:
                    streams.wait(number, (packed,))
            # Issue the reducing phases of each chunk, then the all-gathers of the chunk before it.
            for number, chunk in zip(numbers, rank_plan.chunks, strict=True):
                steps = self.run_chunk(run, chunk)
                with streams.of(number):
                    _advance(steps, rank_plan.turn)
                before, self._held = self._held, _HeldChunk(run, steps, number)
                if before is not None:
                    self._issue_rest(before)
            # End: nothing to issue (one rank), no chunk may wait for a later one, or none has all-gathers.
            if not numbers:
                with streams.of(last):
                    self._end(run)
            elif not hold:
                self.release()
            elif rank_plan.turn == len(rank_plan.plan.phases):
                held, self._held = self._held, None
                if held is not None:
                    self._issue_rest(held)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must learn of it
            self._give_up_now(error)

    def _issue_alone(self, all_reduce: AllReduce, rank_plan: RankPlan, scale: float) -> bool:
        """Issues a flat all-reduce of one whole bucket as torch's own hook does, if that is possible.

        Such a bucket is as fast as under plain DDP, so it must cost no more: it uses no stream, event or future but
        those of the collective.

        Args:
            all_reduce: The all-reduce; its bucket gets the future of the collective.
            rank_plan: This rank's part in a plan that is one all-reduce over all ranks.
            scale: Factor on this rank's contribution.

        Returns:
            Whether it was issued. Not so if it carries several buckets, a piece of one, or one whose future is already
            in use.
        """
        (bucket, *others), (chunk,) = all_reduce.buckets, rank_plan.chunks
        if others or bucket.future is not None or all_reduce.parts[0] is not bucket.flat:
            return False
        (part,) = chunk.parts
        for transfer in part.steps[0]:
            work = cast(BackendWork, self._programs.issue(bucket.flat, transfer, (0, 0), scale))
            self._direct = work
            bucket.future = cast(Open, work.get_future().then(_only))
            bucket.pending = 0  # the collective completes it
            if all_reduce.counted:
                self.stats.count(chunk, bucket.flat.element_size(), (), (0.0,))
        return bucket.future is not None

    def _issue_rest(self, held: _HeldChunk) -> None:
        """Issues the all-gathers of a chunk that was deferred, and ends the all-reduce after its last chunk."""
        run = held.run
        with self._streams.of(held.number):
            _advance(held.steps, len(run.rank_plan.plan.phases) + 1)
            run.pending -= 1
            if run.pending:
                run.ends.append(self._streams.mark(held.number))
                return
            self._streams.wait(held.number, run.ends)
            if run.extremes:
                torch.aminmax(run.flat, out=run.extremes)
                self._extremes += run.extremes
            for bucket in run.all_reduce.buckets:
                if bucket.pending == 1:
                    self._streams.wait(held.number, bucket.ends)
            self._end(run)
            waiting = [bucket for bucket in run.all_reduce.buckets if bucket.pending]
            if waiting:
                ended = self._streams.mark(held.number)
                for bucket in waiting:
                    bucket.ends.append(ended)

    def _end(self, run: RunningAllReduce) -> None:
        now = self.stats.now()
        if self.stats.recorder is not None and now is not None:
            self.stats.recorder.note_all_reduce(run, now)
        finish(run.all_reduce, run.flat, None, now)

    def _start_steps(self, run: RunningAllReduce, name: str, steps: ChunkSteps, lanes: tuple[Lane, ...]) -> None:
        self._refuse_if_failed()
        self.carried.append(run.all_reduce.buckets[0].index)
        try:
            self.release()
            with self._streams.exclusive():
                _advance(steps, 1)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must learn of it
            self._give_up_now(error)

    def _start_migration(self, steps: ChunkSteps) -> None:
        with self.exclusive():
            for _ in steps:
                pass

    def release(self) -> None:
        """Issues the all-gathers that `start` has deferred; see `Executor.release` for the errors.

        It also sets `last` to an event after everything issued since the last call, which `deadline` watches.
        """
        if self._closed and self._held is None and self.failure_handler.error is None:
            return
        self._refuse_if_failed()
        held, self._held = self._held, None
        if held is not None:
            try:
                self._issue_rest(held)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must learn of it
                self._give_up_now(error)
        if self._issued:
            self.last = self._streams.mark(self._issued - 1)
            if self.deadline is not None:
                self.deadline.watch(self.last.query)
        if self._direct is not None:
            self.last = IssuedWork(self._direct, lambda: self._interrupted)
            if self.deadline is not None:
                self.deadline.watch(self.last.query)
        self._direct = None
        self._issued = 0  # the same bucket is sent on the same stream in each step

    def extremes(self) -> list[Tensor]:
        """Returns the least and the largest average of each compressed all-reduce since the last call (0-dim, CUDA)."""
        extremes, self._extremes = self._extremes, []
        return extremes

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Makes a context whose work runs on a side stream, after all earlier all-reduces and before all later ones.

        The work also comes after what was issued on the current stream before. Deferred all-gathers are issued first.
        Neither the host nor the current stream waits for the work: call `sync_current_stream` before the current stream
        uses what it has changed.

        Raises:
            CollectiveError: An all-reduce has failed, or another rank has exited; the block does not run.
        """
        self.release()
        with self._streams.exclusive():
            yield

    def oldest(self) -> WaitingAllReduce | None:
        """Returns None: the host does not know which all-reduce the device has reached."""
        return None

    def sync_current_stream(self) -> None:
        """Makes the current stream, not the host, wait for everything issued on the side streams so far."""
        self._streams.sync_current_stream()

    def close(self, seconds: float | None = None) -> bool:
        """Waits for the device, which may be several steps behind the host, and ends; see `Executor.close`.

        The failure of a rank ends the wait. Returns False if work is still in flight, or if collectives were aborted.
        """
        self._closed = True
        until = math.inf if seconds is None else time.monotonic() + seconds
        while not self._interrupted and self._device_is_busy and not self._is_overdue and time.monotonic() < until:
            time.sleep(CLOSING_POLL_SECONDS)
        if self.is_in_flight:
            self._streams.verdict.give_up()  # The averages of what an abort ends are undefined.
        self.failure_handler.forget_frames()
        return not (self.aborted or self.is_in_flight)

    @property
    def has_ended(self) -> bool:
        """True: this executor has no threads. It says nothing about what the device still does."""
        return True

    @property
    def is_in_flight(self) -> bool:
        """Whether the device has not finished everything started; True for ever once `interrupt` was called."""
        return self._interrupted or self._held is not None or self._device_is_busy

    @property
    def _device_is_busy(self) -> bool:
        direct = self._direct is not None and not IssuedWork(self._direct, lambda: self._interrupted).query()
        return direct or (self.deadline is not None and self.deadline.is_in_flight)

    @property
    def _is_overdue(self) -> bool:
        return self.deadline is not None and self.deadline.overdue() is not None

    def _give_up_now(self, error: Exception) -> None:
        """Aborts everything because a collective could not be issued, and raises the reason.

        Other ranks may have issued it, so later collectives would not match theirs.

        Args:
            error: Error with which the collective failed.

        Raises:
            torch.OutOfMemoryError: `error` itself, if it is one.
            CollectiveError: The diagnosis, for any other error.
            torch.AcceleratorError: The device has failed.
        """
        self._held = None
        self.interrupt(error)
        # Behind the abort: it raises if the device has failed, and the other ranks must learn of that.
        self._streams.sync_current_stream()
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        self._refuse_if_failed()

    def interrupt(self, error: Exception) -> None:
        """Aborts everything in flight because of an error on this rank or another; see `Executor.interrupt`.

        Aborts NCCL's communicators, so that a device that waits for a failed rank continues. The gradients of this step
        are undefined then, and `poison` makes one NaN. The next all-reduce, the end of the step, or the optimizer's
        next step raises the failure.
        """
        self._interrupted = True
        give_up = self._streams.verdict.give_up  # before the device can go on
        self.failure_handler.fail(self.activity, range(self._size), error, first=give_up)

    def poison(self, bucket: Bucket) -> None:
        """Has the device make one average of the last bucket NaN if this rank aborts before; see `Executor.poison`."""
        if bucket.flat.is_floating_point() and bucket.flat.numel():
            bucket.result().wait()  # done for the host since it was issued
            self._streams.verdict.apply_to(bucket.flat)

    @property
    def failure(self) -> CollectiveError | None:
        """The first failure, after waiting for its diagnosis if `interrupt` was called; see `Executor.failure`."""
        # The thread that has interrupted makes the diagnosis.
        return self.failure_handler.diagnosed() if self._interrupted else self.failure_handler.error

    def raise_failure(self) -> None:
        """Raises the first failure if `interrupt` was called; see `Executor.raise_failure`."""
        if self._interrupted:
            self._refuse_if_failed()

    def _refuse_if_failed(self) -> None:
        """Raises the first failure, or an error if the executor is closed."""
        super()._refuse_if_failed()
        if self._closed:
            raise RuntimeError(CLOSED)

    def _device_state(self) -> tuple[int, bool]:
        """Returns the state of this rank that `FailureHandler` reports to the others when a collective has failed.

        By it they find, after a timeout, the rank that is behind and waits for no other.

        Returns:
            (Number of all-reduces started, whether the device may be waiting for other ranks). The latter is True if
            any watched work is unfinished or all-gathers are deferred, whatever they wait for, and if the device
            cannot be queried.
        """
        try:
            return self.launches, self._held is not None or self._device_is_busy
        except RuntimeError as error:
            log.warning("the device of rank %d cannot be asked whether it waits: %s", self._rank, error)
            return self.launches, True


def _only(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    """Returns the only tensor of a finished future, or raises its error; for `future.then(_only)`.

    Args:
        done: Finished future of a collective over one tensor.
    """
    (tensor,) = done.value()
    return tensor


def _advance(steps: ChunkSteps, phase: int) -> None:
    """Issues the collectives of a chunk on the current stream, up to the phase of index `phase`, or to its end.

    The stream waits for each of them, not the host, unless a transport or a sparse sum blocks it.
    """
    for transition in steps:
        for work in transition.works:
            work.wait()
        if transition.lane[0] >= phase:
            return
