"""The interface of executors, which run all-reduces by plans: `LaneExecutor` in threads, `StreamExecutor` on CUDA.

The communicator makes one of the two when it connects. Callers use `Executor` alone: methods that only a CUDA device
needs do nothing in a `LaneExecutor`, where futures raise what has failed, transports wake the lanes that wait for them,
and callers wait for averages before they read them. An executor knows no optimizer and no report.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.comms.bootstrap.failure_reporter import CollectiveError
from gradwire.comms.lanes import ChunkSteps, Lane, Transition
from gradwire.comms.plan.rank_plans import Chunk, RankPlan
from gradwire.comms.run.all_reduces import NO_PLAN, AllReduce, Bucket, RunningAllReduce, WaitingAllReduce, finish
from gradwire.comms.run.failure_handler import FailureHandler
from gradwire.comms.run.phase_stats import PhaseStats
from gradwire.comms.run.programs import Programs
from gradwire.compressors.base import Layout

if TYPE_CHECKING:  # each is loaded where it is asked for
    from gradwire.comms.bootstrap.deadline import Deadline
    from gradwire.comms.streams import IssuedWork

CLOSING_SECONDS = 5.0
"""Seconds that `close` waits for all-reduces in flight by default; longer than a bucket takes."""


class Executor(ABC):
    """Runs all-reduces in the order in which they are started, each by its plan.

    Invariant: all ranks start the same all-reduces in the same order, so their numbers agree.

    Thread safety: one thread starts all-reduces; `oldest`, `interrupt` and `has_ended` may be called from any thread.

    Args:
        programs: Generators that issue the collectives of a chunk.
        stats: Counters of bytes and times, one set for each phase.
        failure_handler: Handler of the first failure on this rank.

    Attributes:
        stats: Counters of bytes and times, one set for each phase.
        failure_handler: Handler of the first failure on this rank.
        launches: Number of all-reduces started so far.
        carried: On CUDA, the index of the first bucket of each of the last 256 all-reduces.
        checking: On CUDA, whether the averages of compressed buckets are checked for NaN and infinity; see `extremes`.
        last: On CUDA, an event after everything issued before the last `release`; None before the first.
        deadline: On CUDA, watches for collectives that exceed the time-out; None on a CPU.
        activity: Present activity of this rank, for error messages.
        aborted: Whether the groups of this rank were aborted by a call of `abort`, and not by a failure.
    """

    def __init__(self, programs: Programs, stats: PhaseStats, failure_handler: FailureHandler) -> None:
        self.stats = stats
        self.failure_handler = failure_handler
        self.launches = 0
        self.carried: deque[int] = deque(maxlen=256)
        self.checking = False
        self.last: torch.cuda.Event | IssuedWork | None = None
        self.deadline: Deadline | None = None
        self.activity = "an all-reduce"
        self.aborted = False
        self._programs = programs

    @abstractmethod
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
        """Starts an all-reduce and returns at once. All ranks start the same ones in the same order.

        Args:
            all_reduce: The tensors, changed in place, and the buckets whose futures are completed at the end.
            rank_plan: This rank's part in the plan.
            scale: Factor on every rank's contribution, applied before any conversion to a narrower dtype.
            flush: Whether to send uncompressed, with the compressor's residuals added.
            hold: On CUDA, whether the last all-gathers may wait until the next `start`, or `release`.
            after: Factor on the sum of all contributions.

        Raises:
            RuntimeError: The executor is closed, or on a CPU there is no memory to join buckets.
            CollectiveError: On CUDA: an earlier all-reduce has failed, or this one could not be issued.
            torch.OutOfMemoryError: On CUDA: no memory to join buckets, or for a phase. The gradients of this all-reduce
                are unchanged. The other ranks are told, and nothing more can be started.
        """

    def start_steps(
        self, bucket: Bucket, name: str, steps: Generator[Transition, None, Tensor], lanes: tuple[Lane, ...]
    ) -> None:
        """Starts a coroutine that follows no plan, such as a sparse sum; returns at once, on CUDA when all is issued.

        Args:
            bucket: Bucket whose tensor is replaced by the coroutine's result, and whose future is completed then.
            name: Name of the operation, for errors.
            steps: The coroutine: issues collectives and yields the next lane; on CUDA it may block the host.
            lanes: Lanes that it visits on every rank, in this order; no plan uses them.

        Raises:
            As `start`.
        """
        run = RunningAllReduce(AllReduce((bucket.flat,), None, (bucket,)), bucket.flat, NO_PLAN, 1.0, False, 1)
        run.number, self.launches = self.launches, self.launches + 1
        self._start_steps(run, name, self._completing(run, steps), lanes)

    @abstractmethod
    def _start_steps(self, run: RunningAllReduce, name: str, steps: ChunkSteps, lanes: tuple[Lane, ...]) -> None:
        """Starts a coroutine that completes its own all-reduce; see `start_steps`.

        Args:
            run: Stands for the operation among the all-reduces in flight.
            name: Name of the operation, for errors.
            steps: The coroutine, which also completes the bucket's future.
            lanes: Lanes that it visits, in order.
        """

    def _completing(self, run: RunningAllReduce, steps: Generator[Transition, None, Tensor]) -> ChunkSteps:
        """Makes a coroutine that runs another one, and at its end puts the result into the bucket and its future."""
        self._refuse_if_failed()
        (bucket,) = run.all_reduce.buckets
        bucket.flat = yield from steps
        finish(run.all_reduce, bucket.flat, None, self.stats.now())

    def run_chunk(self, run: RunningAllReduce, chunk: Chunk) -> ChunkSteps:
        """Makes the coroutine that takes one chunk through the phases of its plan; see `Programs.run_chunk`.

        Raises:
            CollectiveError: An earlier all-reduce has failed; raised at the coroutine's first step.
        """
        self._refuse_if_failed()
        yield from self._programs.run_chunk(run, chunk)

    def migrate(self, layout: Layout, rank_plan: RankPlan, device: torch.device, *, ask: bool = True) -> None:
        """Starts to move compression state between the ranks of this node, for a bucket with a new layout.

        Changes the compressor's state in place; all ranks of the node call it. Does nothing without a compressor, or if
        the ranks of a node do not compress different shards of the bucket (`RankPlan.shares_ownership`).

        On a CPU it is queued for the first lane and returns at once: it runs once all earlier all-reduces have left
        that lane, though they may go on in others, and before the next one begins. On CUDA it is issued to its end on a
        side stream before this returns, after all earlier all-reduces and before all later ones.

        Args:
            layout: Place of each parameter in the bucket.
            rank_plan: The bucket's plan: gives the elements that this rank compresses.
            device: Device of the bucket.
            ask: Whether the ranks of the node first ask each other whether there is state to move; see
                `migration.migrate`.
        """
        if self._programs.has_compressor and rank_plan.shares_ownership:
            self._start_migration(self._programs.migrate(layout, rank_plan.compressed_shards(), device, ask))

    @abstractmethod
    def _start_migration(self, steps: ChunkSteps) -> None:
        """Starts a coroutine of `Programs.migrate`, to run before the next all-reduce.

        On a CPU it is queued for the first lane, and runs when the all-reduces started before have left that lane. On
        CUDA it is advanced to its end, on a side stream after all all-reduces issued before, before this returns.

        Args:
            steps: Coroutine that moves compression state (residuals and the like) between the ranks of this node.
        """

    @abstractmethod
    def close(self, seconds: float | None = None) -> bool:
        """Waits for the all-reduces in flight, and ends the executor; later ones raise an error.

        All-reduces that are unfinished after the wait are given up. On a CPU they are aborted on all ranks, and their
        futures completed with an error, for which it waits up to 2 s more. On CUDA their averages are undefined, and
        one element of the bucket that `poison` was called for becomes NaN, so that the step is not taken for a good
        one.

        Args:
            seconds: Longest wait. None: `CLOSING_SECONDS` (5 s) on a CPU; on CUDA the time-out of collectives. A rank
                that fails ends the wait on CUDA.

        Returns:
            Whether transports may be closed in order; False if the device may wait for a rank that will not come.
            Always True on a CPU.
        """

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether all of its threads have ended, so that none of them reads or writes a gradient from now on.

        Always True on CUDA, where there are no threads: it says nothing about what the device still does.
        """

    @property
    def failure(self) -> CollectiveError | None:
        """The first failure, with what the other ranks reported; None if nothing has failed.

        On CUDA it may wait for the reports of the other ranks, some seconds.
        """
        return self.failure_handler.error

    def _refuse_if_failed(self) -> None:
        """Raises the first failure, if there is one, as nothing may be started or continued after it.

        Raises:
            CollectiveError: An all-reduce has failed on this rank, or was ended because of another.
        """
        if (failure := self.failure) is not None:
            # Without the traceback, whose frames would keep the tensors of earlier all-reduces.
            raise failure.with_traceback(None)

    @abstractmethod
    def oldest(self) -> WaitingAllReduce | None:
        """Returns the oldest all-reduce in flight and its phase; None if there is none, and on CUDA. Any thread.

        May also be None for the moment in which a job passes from one lane to the next.
        """

    def release(self) -> None:  # noqa: B027 - for CUDA
        """Issues the all-gathers that `start` has deferred; all ranks call it at the same point of the sequence.

        Does nothing on a CPU, where none is deferred.

        Raises:
            CollectiveError: On CUDA: an all-reduce has failed, or another rank has exited.
        """

    def extremes(self) -> list[Tensor]:
        """Returns the least and largest average of each compressed all-reduce since the last call: 0-dim CUDA tensors.

        NaN and infinity show in them. Empty on a CPU, where averages are checked when their futures are done, and
        without `checking`. Call `release` before.
        """
        return []

    def interrupt(self, error: Exception) -> None:  # noqa: B027 - for CUDA
        """Aborts everything in flight because of an error on this rank or another. Any thread.

        Returns after the diagnosis, for which it asks the other ranks: that may take some seconds. Does nothing on a
        CPU, where waits get errors from their transports.

        Args:
            error: The error; it becomes the cause of this rank's failure unless one is known already.
        """

    def raise_failure(self) -> None:  # noqa: B027 - for CUDA
        """Raises the first failure that is known without asking the device; on a CPU does nothing, as futures raise it.

        Raises:
            CollectiveError: A collective has failed, or `interrupt` was called.
        """

    def poison(self, bucket: Bucket) -> None:  # noqa: B027 - for CUDA
        """Has the device make one average NaN if this rank aborts before the step's last bucket is done; only on CUDA.

        The host may have issued the optimizer's step by then, which must not use wrong averages without a sign. Without
        an abort it changes no value. The current stream waits for the bucket, as DDP makes it do anyway.

        Args:
            bucket: The last bucket of the step, whose all-reduce ends after all others.
        """

    def exclusive(self) -> AbstractContextManager[None]:
        """Returns a context for reading or changing a compressor's state: see `Communicator.exclusive`."""
        return nullcontext()

    def sync_current_stream(self) -> None:  # noqa: B027 - for CUDA
        """Makes the current CUDA stream, not the host, wait for everything issued so far; on a CPU does nothing."""
