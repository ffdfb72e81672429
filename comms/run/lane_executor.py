"""One thread serves each lane on a CPU, takes the chunk whose turn it is, and issues its collectives phase by phase.

A chunk stays in its lane as long as its collectives are done when they return (shared memory). After an asynchronous
phase it continues in the next lane, which waits for the collectives in flight. From phase to phase lane changes depend
on the plan only, so all ranks change lanes at the same points, also those that have nothing to send in a phase. In a
compressed phase each round of the compressor ends in a lane (phase, round) of its own. The ranks that exchange a shard
have the same rounds; those of a node, which compress different shards, may have more or fewer.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from gradwire.comms.bootstrap.failure_reporter import CollectiveError, FailureReporter
from gradwire.comms.bootstrap.threads import BackgroundThread
from gradwire.comms.lanes import ChunkSteps, Lane, LaneJob, Lanes, Transition
from gradwire.comms.plan.rank_plans import Chunk, RankPlan
from gradwire.comms.run.all_reduces import AllReduce, RunningAllReduce, WaitingAllReduce, finish, pack
from gradwire.comms.run.executor import CLOSING_SECONDS, Executor
from gradwire.comms.run.failure_handler import FailureHandler
from gradwire.comms.run.phase_stats import PhaseStats
from gradwire.comms.run.programs import Programs
from gradwire.comms.streams import HostClock
from gradwire.comms.transport.groups import Groups
from gradwire.compressors.base import Compressor
from gradwire.topology.cluster import Cluster

if TYPE_CHECKING:  # loaded where it is asked for
    from gradwire.comms.observe.recorder import Recorder


GIVING_UP_SECONDS = 2.0
"""Longest wait in seconds for lanes to end after an abort; a lane that waits for gloo looks once a second."""


@dataclass(slots=True, eq=False)
class _ChunkJob(LaneJob):
    """Work for the lanes' threads: a chunk of an all-reduce, a collective without a plan, or a migration of state.

    A lane is a pipeline stage with a thread of its own; a chunk passes from lane to lane, in which its phases run.

    Attributes:
        run: All-reduce that the chunk belongs to; None for a migration of compression state, which completes no future.
        name: Name of the collective without a plan, or of the migration, for errors; empty for a chunk.
        stays: Whether the thread of the first lane runs the chunk through all its phases, without passing it on.
        start: Index of the chunk's first element in the all-reduce.
    """

    run: RunningAllReduce | None = None
    name: str = ""
    stays: bool = False
    start: int = 0


class LaneExecutor(Executor):
    """Runs all-reduces in one thread for each lane, on a CPU; for thread safety see `Executor`.

    Args:
        name: Name of the threads.
        groups: Transports by lane and members.
        rank: This rank.
        cluster: Placement of the ranks.
        compressor: Compressor of the phases that name one; None if all phases are exact.
        reporter: Exchanges reports between ranks that survive a failure, to find the cause.
    """

    def __init__(
        self,
        name: str,
        groups: Groups,
        rank: int,
        cluster: Cluster,
        compressor: Compressor | None,
        reporter: FailureReporter,
    ) -> None:
        stats = PhaseStats(HostClock(), cluster.level_names)
        programs = Programs(groups, rank, cluster, compressor, stats)
        super().__init__(programs, stats, FailureHandler(groups, reporter, rank))
        self._name = name
        self._rank = rank
        self._level_names = cluster.level_names
        self._lanes = Lanes()
        self._threads: dict[Lane, threading.Thread] = {}
        self._lock = threading.Lock()  # Guards _threads, and `pending` of every RunningAllReduce.

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
        """Joins the buckets of an all-reduce, queues its chunks for the lanes' threads, and returns.

        Args:
            all_reduce: The tensors, changed in place, and the buckets whose futures are completed at the end.
            rank_plan: This rank's part in the plan.
            scale: Factor on every rank's contribution, applied before any conversion to a narrower dtype.
            flush: Whether to send uncompressed, with the compressor's residuals added.
            hold: Not used on a CPU.
            after: Factor on the sum of all contributions.

        Raises:
            RuntimeError: The executor is closed, or there is no memory to join buckets.
        """
        now = self.stats.clock.now()
        run = RunningAllReduce(
            all_reduce,
            pack(all_reduce),
            rank_plan,
            scale,
            flush,
            len(rank_plan.chunks),
            self.launches,
            now,
            after=after,
        )
        self.launches += 1
        stays = all_reduce.alone and len(rank_plan.chunks) == 1
        visits = ((0, 0),) if stays else rank_plan.lanes
        for chunk in rank_plan.chunks:
            steps = self.run_chunk(run, chunk)
            self._submit(_ChunkJob(steps, visits, run=run, stays=stays, start=chunk.start))

    def _start_steps(self, run: RunningAllReduce, name: str, steps: ChunkSteps, lanes: tuple[Lane, ...]) -> None:
        run.began = self.stats.clock.now()
        self._submit(_ChunkJob(steps, lanes, lanes[0], run=run, name=name))

    def _start_migration(self, steps: ChunkSteps) -> None:
        self._submit(_ChunkJob(steps, name="migration of compression state"))

    def run_chunk(self, run: RunningAllReduce, chunk: Chunk) -> ChunkSteps:
        """Makes the coroutine that takes one chunk through its phases; the last chunk to end completes the futures."""
        if self.failure_handler.error is not None:
            self._refuse_if_failed()
        yield from self._programs.run_chunk(run, chunk)
        with self._lock:
            run.pending -= 1
            last = run.pending == 0
        if last:
            now = self.stats.clock.now()
            try:
                self.stats.note_end(run, now)
            except BaseException as error:
                # No other chunk is left that would complete the futures.
                finish(run.all_reduce, run.flat, error, now)
                raise
            finish(run.all_reduce, run.flat, None, now)

    def close(self, seconds: float | None = None) -> bool:
        """Waits for the all-reduces in flight and ends the threads of all lanes; see `Executor.close`. Returns True.

        If some do not end in time, it aborts them on all ranks, completes their futures with an error, and waits for
        2 s more (`GIVING_UP_SECONDS`). It does not wait if a lane's own thread calls it, as the garbage collector may.
        """
        self._lanes.close()
        if threading.current_thread() in list(self._threads.values()):
            return True
        self._join(CLOSING_SECONDS if seconds is None else seconds)
        if self._lanes.in_flight():
            self._abort_all(f"gradwire was closed on rank {self._rank}")
            self._join(GIVING_UP_SECONDS)
        self.failure_handler.forget_frames()
        return True

    def _join(self, seconds: float) -> None:
        """Waits until the threads of all lanes have ended, or `seconds` have passed."""
        deadline = time.monotonic() + seconds
        for thread in list(self._threads.values()):  # others may be opened meanwhile
            thread.join(max(0.0, deadline - time.monotonic()))

    def _abort_all(self, why: str) -> None:
        """Aborts all all-reduces in flight, makes the other ranks abort, too, and refuses all later ones.

        Their futures are completed with an error: an earlier failure of this rank if there is one, else one with the
        reason. The groups are aborted, which wakes lanes that wait. If nothing is in flight, it only refuses later
        all-reduces.

        Args:
            why: Reason, as a clause that names this rank.
        """
        self._lanes.close()
        jobs = self._lanes.in_flight()
        if not jobs:
            return
        self.failure_handler.leave(CollectiveError(f"{why} while an all-reduce was in flight", ()))
        assert self.failure_handler.error is not None
        for job in jobs:
            assert isinstance(job, _ChunkJob)
            self._give_up(job, self.failure_handler.error)

    @property
    def has_ended(self) -> bool:
        """Whether the threads of all lanes have ended; see `Executor.has_ended`."""
        return not any(thread.is_alive() for thread in list(self._threads.values()))

    def _submit(self, job: _ChunkJob) -> None:
        self._lanes.submit(job)
        self._open((*job.visits, job.lane))

    def _open(self, lanes: Sequence[Lane]) -> None:
        """Starts a thread for each lane that has none."""
        for lane in lanes:
            if lane in self._threads:
                continue
            thread = BackgroundThread(
                f"{self._name} lane {lane}",
                partial(self._serve, lane),
                without="all-reduces fail on this rank",
                # Jobs behind it would wait for this lane for ever.
                on_failure=lambda error: self._abort_all(
                    f"the thread of a lane has failed on rank {self._rank} ({type(error).__name__}: {error})"
                ),
                end=self._lanes.close,
                give_up=partial(self._abort_all, f"the process of rank {self._rank} ends"),
            )
            with self._lock:
                is_first = self._threads.setdefault(lane, thread) is thread
            if is_first:
                thread.start()

    def _serve(self, lane: Lane) -> None:
        # A thread inherits `torch.set_flush_denormal` from the thread that starts it. If a script had set it on one
        # rank only, that rank would decode payloads to other bits than the others.
        torch.set_flush_denormal(False)
        for job in self._lanes.serve(lane):
            assert isinstance(job, _ChunkJob)
            self._step(job, lane)
            # Release the job's buckets now: the next job may arrive much later.
            del job

    def _step(self, job: _ChunkJob, lane: Lane) -> None:
        """Waits for a job's works and advances it until its next phase is in another lane, or it ends.

        Called in the lane's thread. An error is not raised: it aborts everything, and completes the job's futures.

        Args:
            job: The job; its `transition` is set to the change of lanes, or to None at its end. A job with `stays` is
                not passed on: this thread runs it to its end, through all lanes.
            lane: Lane of this thread.
        """
        job.transition = None
        try:
            while True:
                if self.stats.recorder is None:
                    for work in job.works:
                        work.wait()
                    job.works = ()
                    transition = next(job.steps, None)
                else:
                    transition = self._recorded_step(self.stats.recorder, job, lane)
                if transition is None:
                    return
                if not job.stays:
                    self._open((transition.lane,))
                    job.transition = transition
                    return
                lane = job.lane = transition.lane
                job.works = transition.works
        except BaseException as error:  # noqa: BLE001 - whatever it is, the futures carry it
            # The first failure aborts all groups, and asks the other ranks for a diagnosis: that may take some seconds.
            self._give_up(job, self.failure_handler.fail(self._phase_of(job), self._programs.node, error))

    def _recorded_step(self, recorder: "Recorder", job: _ChunkJob, lane: Lane) -> Transition | None:
        """Waits for a job's works, advances it by one step, and records both as spans of a trace.

        Args:
            recorder: Recorder of the trace.
            job: The job.
            lane: Lane that the job is in.

        Returns:
            The next transition; None if the job has ended.
        """
        track, number = f"lane {lane[0]}.{lane[1]}", -1 if job.run is None else job.run.number
        if job.works:
            with recorder.span(track, f"wait for {self._phase_of(job)}", launch=number):
                for work in job.works:
                    work.wait()
        job.works = ()
        with recorder.span(track, self._phase_of(job, lane[0]), launch=number):
            return next(job.steps, None)

    def oldest(self) -> WaitingAllReduce | None:
        """Returns the oldest all-reduce in flight and its phase; None if there is none. See `Executor.oldest`."""
        for job in self._lanes.in_flight():
            assert isinstance(job, _ChunkJob)
            run = job.run
            if run is not None and isinstance(run.began, float):
                seconds = time.perf_counter() - run.began
                return WaitingAllReduce(run.number, run.all_reduce.buckets[0], self._phase_of(job), seconds)
        return None

    def _phase_of(self, job: _ChunkJob, least: int = 0) -> str:
        """Returns the phase that a job is in, such as `reduce_scatter intra_node`; without a plan the job's name.

        Args:
            job: The job.
            least: Index of the phase that the job begins in its lane, where it is still in the one that it waited for.
        """
        if job.run is None or job.name:
            return job.name
        phases = job.run.rank_plan.plan.phases
        if not phases:
            return "nothing"
        phase = phases[min(max(job.run.phases.get(job.start, 0), least), len(phases) - 1)]
        return f"{phase.op} {phase.place(self._level_names)}"

    def _give_up(self, job: _ChunkJob, error: CollectiveError) -> None:
        """Completes the futures of a job's all-reduce with an error, once; its other chunks complete nothing later.

        Does nothing for a migration of state, which has no future.
        """
        if job.run is None:
            return
        with self._lock:
            first = job.run.pending > 0
            job.run.pending = -1
        if first:
            finish(job.run.all_reduce, job.run.flat, error, None)
