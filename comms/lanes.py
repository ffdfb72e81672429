"""The order in which jobs pass through lanes: a queue in front of each lane, and whose turn it is.

Communicators belong to lanes, and a lane is served by one thread (see `run.lane_executor`). As every rank submits the
same jobs in the same order and every job visits the same lanes, each communicator sees the same sequence of
collectives on all ranks, and no rank has to look at the clock, or at which bucket happens to be ready, to decide what
comes next. While one chunk is on the wire, the next one is reduced inside the node.

A job that needs fewer rounds than the one before it would overtake it before a lane that both visit, and would do
so on some ranks only. So a lane serves its visitors in the order of submission, and waits for one that is late.
"""

import queue
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from gradwire.compressors.base import Work

Lane = tuple[int, int]
"""Index of the phase, and of the step inside it where one phase takes several."""


@dataclass(frozen=True, slots=True)
class Hop:
    """Where a job goes on, and what must be done by then."""

    lane: Lane
    works: Sequence[Work]


@dataclass(slots=True, eq=False)
class LaneJob:
    """A chunk of a launch, which moves from lane to lane.

    Attributes:
        steps: The generator that does the work: it yields where it wants to go on.
        visits: The lanes it will visit whatever happens, in which it keeps its place in the order of submission.
            Others, which only some jobs visit, serve in the order of arrival.
        lane: The lane it is in.
        works: What must be waited for before its next step.
        hop: Where it goes on, once the lane it is in is done with it; None where it has ended.
    """

    steps: Iterator[Hop]
    visits: tuple[Lane, ...] = ((0, 0),)
    lane: Lane = (0, 0)
    works: Sequence[Work] = ()
    hop: Hop | None = None


class _Signal(Enum):
    """What is put into a queue besides a job that arrives."""

    LOOK_AGAIN = auto()
    CLOSE = auto()


class _StageQueue:
    """The jobs in front of one lane: those expected, in their order, and those that have arrived."""

    def __init__(self) -> None:
        self.arrivals: queue.SimpleQueue[LaneJob | _Signal] = queue.SimpleQueue()
        self.expected: deque[LaneJob] = deque()
        self.present: dict[LaneJob, None] = {}


class Lanes:
    """The queues in front of all lanes of one rank. Several threads may use it; one thread serves each lane."""

    def __init__(self) -> None:
        self._queues: defaultdict[Lane, _StageQueue] = defaultdict(_StageQueue)
        self._under_way: dict[LaneJob, None] = {}
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, job: LaneJob) -> None:
        """Takes in a new job. All ranks submit the same jobs in the same order.

        Raises:
            RuntimeError: The lanes are closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("gradwire is closed: its process group has been destroyed")
            for lane in job.visits:
                self._queues[lane].expected.append(job)
            self._under_way[job] = None
            self._queues[job.lane].arrivals.put(job)

    def serve(self, lane: Lane) -> Iterator[LaneJob]:
        """The jobs of a lane, each when its turn has come; the end, once all lanes are closed and no job is under way.

        Whoever takes a job forward leaves in its `hop` where it goes on. It is passed on before the next one is waited
        for.
        """
        while (job := self._take(lane)) is not None:
            yield job
            if job.hop is None:
                self._end(job)
            else:
                self._move(job, job.hop)
            del job  # or its buckets would live as long as the next one is waited for

    def close(self) -> None:
        """Lets every `serve` end once all jobs under way have ended; later submissions fail."""
        with self._lock:
            self._closed = True
            self._close_if_drained()

    def under_way(self) -> list[LaneJob]:
        """The jobs that were submitted and have not ended."""
        with self._lock:
            return list(self._under_way)

    def _take(self, lane: Lane) -> LaneJob | None:
        """Waits for the job whose turn it is; None once all lanes are closed and no job is under way."""
        with self._lock:
            waiting = self._queues[lane]
        while True:
            with self._lock:
                job = self._next(waiting, lane)
            if job is not None:
                return job
            news = waiting.arrivals.get()
            if news is _Signal.CLOSE:
                return None
            if isinstance(news, LaneJob):
                waiting.present[news] = None

    def _move(self, job: LaneJob, hop: Hop) -> None:
        """Puts a job that was taken into the queue of the lane it goes on in."""
        with self._lock:
            job.lane, job.works = hop.lane, hop.works
            self._queues[hop.lane].arrivals.put(job)

    def _end(self, job: LaneJob) -> None:
        """Takes a job that has ended out of the queues that it will not reach, and lets those behind it pass."""
        with self._lock:
            for lane in job.visits:
                waiting = self._queues[lane]
                if job in waiting.expected:
                    waiting.expected.remove(job)
                    waiting.arrivals.put(_Signal.LOOK_AGAIN)
            del self._under_way[job]
            if self._closed:
                self._close_if_drained()

    def _close_if_drained(self) -> None:
        if not self._under_way:
            for waiting in self._queues.values():
                waiting.arrivals.put(_Signal.CLOSE)

    def _next(self, waiting: _StageQueue, lane: Lane) -> LaneJob | None:
        """Takes the job whose turn it is off the queue, if it is there."""
        passing = next((job for job in waiting.present if lane not in job.visits), None)
        first = waiting.expected[0] if waiting.expected else None
        job = passing or (first if first in waiting.present else None)
        if job is not None:
            del waiting.present[job]
            if passing is None:
                waiting.expected.popleft()
        return job
