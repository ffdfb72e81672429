"""Who runs launches: lanes of threads on a CPU, streams on a device. The communicator chooses, and nobody asks again.

Callers know an `Executor`; what only a device needs does nothing in lanes, and they say why.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.comms.bootstrap.failure_reporter import CollectiveError
from gradwire.comms.lanes import Hop, Lane
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
"""How long `close` waits for the launches under way: longer than a bucket takes."""


class Executor(ABC):
    """Runs launches along their plans.

    Args:
        programs: What is issued for a chunk.
        stats: Counts what is sent.
        failures: Keeps what has failed first.

    Attributes:
        stats: See above.
        failures: See above.
        launches: How many have been started.
        carried: On CUDA, the first bucket that each of the last launches carried.
        checking: On CUDA, whether the averages of compressed launches are looked at for what is not finite: see
            `extremes`.
        last: On CUDA, a moment behind everything that came before the last `release`; None before the first.
        deadline: On CUDA, watches what is under way.
        activity: What this rank is about, for errors: before the first launch the groups are connected.
        aborted: Whether this rank has given up its groups.
    """

    def __init__(self, programs: Programs, stats: PhaseStats, failures: FailureHandler) -> None:
        self.stats = stats
        self.failures = failures
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
        """Starts an all-reduce; returns at once. All ranks start the same ones in the same order.

        Args:
            all_reduce: What is reduced, and whose futures it completes.
            rank_plan: Its plan, and this rank's part in it.
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
        run = RunningAllReduce(AllReduce((bucket.flat,), None, (bucket,)), bucket.flat, NO_PLAN, 1.0, False, 1)
        run.number, self.launches = self.launches, self.launches + 1
        self._start_steps(run, name, self._completing(run, steps), lanes)

    @abstractmethod
    def _start_steps(self, run: RunningAllReduce, name: str, steps: Iterator[Hop], lanes: tuple[Lane, ...]) -> None:
        """Starts steps that complete their launch by themselves; see `start_steps`."""

    def _completing(self, run: RunningAllReduce, steps: Generator[Hop, None, Tensor]) -> Iterator[Hop]:
        self._raise_failure()
        (bucket,) = run.all_reduce.buckets
        bucket.flat = yield from steps
        finish(run.all_reduce, bucket.flat, None, self.stats.now())

    def run_chunk(self, run: RunningAllReduce, chunk: Chunk) -> Iterator[Hop]:
        """Takes one chunk through the phases of its plan; see `Programs.run_chunk`.

        Raises:
            CollectiveError: A launch before this one has failed.
        """
        self._raise_failure()
        yield from self._programs.run_chunk(run, chunk)

    def migrate(self, layout: Layout, rank_plan: RankPlan, device: torch.device, *, ask: bool = True) -> None:
        """Starts to move compression state inside this node, for a bucket whose parameters travel in a new layout.

        Runs in the order of the launches, before whatever is started next; changes the compressor's state in place.

        Args:
            layout: Which parameter lies where in the bucket.
            rank_plan: The bucket's: says which runs of elements this rank compresses.
            device: Where the bucket is.
            ask: See `migration.migrate`.
        """
        if self._programs.compresses and rank_plan.shares_ownership:
            self._start_migration(self._programs.migrate(layout, rank_plan.compressed_shards(), device, ask))

    @abstractmethod
    def _start_migration(self, steps: Iterator[Hop]) -> None:
        """Has steps that move compression state take their turn among the launches."""

    @abstractmethod
    def close(self, seconds: float | None = None) -> bool:
        """Ends everything when the launches under way have ended; later launches fail.

        Args:
            seconds: For the launches under way; by default `CLOSING_SECONDS` on a CPU, and on CUDA as long as the other
                ranks are there, at most the time-out: nobody has waited for the step's averages yet. On a CPU those
                that have not ended then (a rank they need is gone, say) are given up, and their futures completed with
                an error. On CUDA nothing is given up here, and averages of what has not ended become NaN.

        Returns:
            Whether what it used may be closed in order: nothing waits on a device for what will not come.
        """

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether no thread of it runs any more: none touches the memory of a launch from here on."""

    @property
    def failure(self) -> CollectiveError | None:
        """What has failed first, once the other ranks have been asked."""
        return self.failures.error

    def _raise_failure(self) -> None:
        """Raises what has failed."""
        failure = self.failure
        if failure is not None:
            raise failure.with_traceback(None)  # the frames of earlier launches hold their tensors

    @abstractmethod
    def oldest(self) -> WaitingAllReduce | None:
        """Where the launch stands that was started first of those under way; None without one, and on CUDA. Any thread.

        Also None between two looks of a lane: ask again.
        """

    @abstractmethod
    def release(self) -> None:
        """Issues what `start` has held back; all ranks, at the same point of the sequence of launches.

        Raises:
            CollectiveError: On CUDA: a launch has failed, or another rank is gone.
        """

    @abstractmethod
    def extremes(self) -> list[Tensor]:
        """The least and largest average of each compressed launch since the last call: CUDA, 0-dim. `release` first."""

    @abstractmethod
    def interrupt(self, error: Exception) -> None:
        """Gives up what is under way, and all that would come, because of an error here or elsewhere (on CUDA)."""

    @abstractmethod
    def raise_failure(self) -> None:
        """Raises what has failed, so far as that is known; costs nothing otherwise (on CUDA).

        Raises:
            CollectiveError: See `interrupt`.
        """

    @abstractmethod
    def poison(self, bucket: Bucket) -> None:
        """Has the device make one average NaN where gradwire gives up before the step's last bucket has ended, on CUDA.

        The host may have issued the optimizer's step by then. Changes nothing otherwise; the current stream waits for
        the bucket, as DDP has it do in any case.

        Args:
            bucket: The last one that was launched in this step: it ends behind all others.
        """

    @abstractmethod
    def exclusive(self) -> AbstractContextManager[None]:
        """Brackets what reads or changes a compressor's state outside of a launch: see `Communicator.exclusive`."""

    @abstractmethod
    def sync_current_stream(self) -> None:
        """Puts the current stream behind everything that was issued (on CUDA)."""
