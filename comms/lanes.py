"""Lanes and the order in which jobs pass through them.

A *lane* is a pipeline stage with its own worker thread and communicators (see `run.lane_executor`). Every rank submits
the same jobs in the same order, and a job uses a communicator in the same lanes on all members of it, so each
communicator sees the same sequence of collectives on all its ranks; no decision depends on a clock or on which bucket
happens to be ready. While one chunk is on the wire, the next one is reduced inside the node.

A job that needs fewer rounds than the one before it could overtake it in front of a lane that both visit, on some
ranks only. A lane therefore serves its jobs in the order of submission, and waits for a job that is late.
"""

import queue
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from gradwire.compressors.base import Work

Lane = tuple[int, int]
"""A pipeline stage: an index of a phase, and of a step inside it if the phase takes several.

A job goes to the next stage only after asynchronous collectives. It issues them in the stage it is in, and waits for
them in the next one; a synchronous phase needs no stage of its own. So stage (1, 0) is not always that of phase 1: an
exact hierarchical sum on two nodes passes (0, 0) and (2, 0), a compressed one (0, 0), (1, 1), (1, 2) and (2, 0), as
each of the codec's two rounds ends in a stage of its own."""


@dataclass(frozen=True, slots=True)
class Transition:
    """Describes the transition of a job to another lane.

    Attributes:
        lane: Next lane.
        works: Collectives that must be done before the job continues there.
    """

    lane: Lane
    works: Sequence[Work]


ChunkSteps = Iterator[Transition]
"""Coroutine that does the work of a chunk in its present lane and yields the transition to the next one."""


@dataclass(slots=True, eq=False)
class LaneJob:
    """Holds a chunk of an all-reduce, or another operation in its place, which moves from lane to lane.

    Attributes:
        steps: Coroutine that does the work and yields its transition to the next lane.
        visits: Lanes that the job visits in any case, in which it is served in the order of submission. In lanes that
            are not listed, which only some jobs visit, it is served when it arrives.
        lane: Lane that the job is in.
        works: Collectives to wait for before the next step.
        transition: Transition after the current step, set by the thread of the lane; None if the job has ended.
    """

    steps: ChunkSteps
    visits: tuple[Lane, ...] = ((0, 0),)
    lane: Lane = (0, 0)
    works: Sequence[Work] = ()
    transition: Transition | None = None


class _Signal(Enum):
    """Messages to the thread of a lane that are no jobs: look at the queue again, or end."""

    LOOK_AGAIN = auto()
    CLOSE = auto()


class _StageQueue:
    """Holds the jobs in front of one lane: those expected, in the order of submission, and those that have arrived."""

    def __init__(self) -> None:
        self.arrivals: queue.SimpleQueue[LaneJob | _Signal] = queue.SimpleQueue()
        self.expected: deque[LaneJob] = deque()
        self.present: dict[LaneJob, None] = {}


class Lanes:
    """Holds the queues of jobs in front of all lanes of one rank.

    Thread safety: any thread may submit and close; one thread serves each lane.
    """

    def __init__(self) -> None:
        self._queues: defaultdict[Lane, _StageQueue] = defaultdict(_StageQueue)
        self._in_flight: dict[LaneJob, None] = {}
        self._lock = threading.Lock()  # Guards _queues, _in_flight and _closed, and `expected` of each queue.
        self._closed = False

    def submit(self, job: LaneJob) -> None:
        """Queues a new job for its first lane, and keeps a place for it in every lane of `job.visits`.

        A lane serves these jobs in the order of submission, whichever arrives there first. Invariant: all ranks submit
        the same jobs in the same order.

        Args:
            job: The job, whose `lane` is its first one.

        Raises:
            RuntimeError: The lanes are closed: by the user, or as the thread of one has failed, which is logged.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("gradwire is closed: close() was called, or its process group has been destroyed")
            for lane in job.visits:
                self._queues[lane].expected.append(job)
            self._in_flight[job] = None
            self._queues[job.lane].arrivals.put(job)

    def serve(self, lane: Lane) -> Iterator[LaneJob]:
        """Yields the jobs of a lane in turn, and blocks while none is due; ends when closed and no job is in flight.

        The caller runs the step of each job that it gets, and sets its `transition`. When it asks for the next job,
        this one is queued for its next lane, or counts as ended.

        Args:
            lane: Lane to serve; by one thread only.
        """
        with self._lock:
            waiting = self._queues[lane]
        while True:
            with self._lock:
                job = self._next(waiting, lane)
            if job is None:
                news = waiting.arrivals.get()
                if news is _Signal.CLOSE:
                    return
                if isinstance(news, LaneJob):
                    waiting.present[news] = None
                # Hold no job while the next one is waited for: it may arrive much later, and a job keeps its buckets.
                del news
                continue
            yield job
            if job.transition is None:
                self._end(job)
            else:
                with self._lock:
                    job.lane, job.works = job.transition.lane, job.transition.works
                    self._queues[job.lane].arrivals.put(job)
            del job

    def close(self) -> None:
        """Makes `submit` raise from now on, and each `serve` end once all submitted jobs have ended; does not wait."""
        with self._lock:
            self._closed = True
            self._close_if_drained()

    def in_flight(self) -> list[LaneJob]:
        """Returns the jobs that were submitted and have not ended, in the order of submission."""
        with self._lock:
            return list(self._in_flight)

    def _end(self, job: LaneJob) -> None:
        """Removes a job that has ended from all queues, so that the jobs behind it can pass."""
        with self._lock:
            for lane in job.visits:
                waiting = self._queues[lane]
                if job in waiting.expected:
                    waiting.expected.remove(job)
                    waiting.arrivals.put(_Signal.LOOK_AGAIN)
            del self._in_flight[job]
            if self._closed:
                self._close_if_drained()

    def _close_if_drained(self) -> None:
        """Ends every `serve` if no job is in flight; the caller holds the lock."""
        if not self._in_flight:
            for waiting in self._queues.values():
                waiting.arrivals.put(_Signal.CLOSE)

    def _next(self, waiting: _StageQueue, lane: Lane) -> LaneJob | None:
        """Takes the job out of a lane's queue that the lane's thread shall run now; the caller holds the lock.

        Args:
            waiting: Queue of the lane: the jobs expected in the order of submission, and those that have arrived.
            lane: The lane.

        Returns:
            An arrived job that was not submitted for this lane (`visits` lacks it), because nothing waits for its turn;
            else the first expected job. None if there is no such job and the first expected one has not arrived, even
            if later ones have.
        """
        passing = next((job for job in waiting.present if lane not in job.visits), None)
        first = waiting.expected[0] if waiting.expected else None
        job = passing or (first if first in waiting.present else None)
        if job is not None:
            del waiting.present[job]
            if passing is None:
                waiting.expected.popleft()
        return job
