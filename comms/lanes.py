"""The one ordered executor: jobs pass through lanes, each lane a thread that serves them in the order of submission.

Communicators belong to lanes. A job is a generator that yields `Hop(lane, work)`: "when `work` is done, go on in
`lane`". As every rank submits the same jobs in the same order and every job visits the same lanes, each communicator
sees the same sequence of collectives on all ranks, and no rank has to look at the clock, or at which bucket happens to
be ready, to decide what comes next. While one chunk is on the wire, the next one is reduced inside the node.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from gradwire.compressors.base import Work

Lane = tuple[int, int]
"""Index of the phase, and of the step inside it where a compressor needs several."""


@dataclass(frozen=True, slots=True)
class Hop:
    """Where a job goes on, and what must be done by then."""

    lane: Lane
    work: Work


@dataclass(slots=True, eq=False)
class Job:
    """A bucket's chunk on its way through the lanes.

    Attributes:
        steps: The generator that does the work.
        failed: Called once, from a lane's thread, with what went wrong.
        visits: The lanes it will come through whatever happens, in which it keeps its place in the order of submission.
            It may also come through others, which only some jobs take: there it is first come, first served.
        lane: The lane it is in.
        arrival: What must be waited for before its next step.
    """

    steps: Iterator[Hop]
    failed: Callable[[BaseException], None]
    visits: tuple[Lane, ...] = ((0, 0),)
    lane: Lane = (0, 0)
    arrival: Work | None = None


class _Signal(Enum):
    """What a lane is told other than a job that arrives."""

    LOOK_AGAIN = auto()
    CLOSE = auto()


class _Line:
    """The jobs in front of one lane: those expected, in their order, and those that have arrived."""

    def __init__(self) -> None:
        self.arrivals: queue.SimpleQueue[Job | _Signal] = queue.SimpleQueue()
        self.expected: deque[Job] = deque()


class Lanes:
    """Threads made on first use; `close()` ends them.

    A job that needs fewer rounds than the one before it would overtake it on the way to a lane that both visit, and
    would do so on some ranks only. So a lane serves its visitors in the order of submission, and waits for one that is
    late.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines: dict[Lane, _Line] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        self._current = threading.local()

    def submit(self, job: Job) -> None:
        """Starts a job in its lane. All ranks submit the same jobs in the same order.

        Raises:
            RuntimeError: The executor is closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("gradwire is closed: its process group has been destroyed")
            for lane in job.visits:
                self._line(lane).expected.append(job)
            self._line(job.lane).arrivals.put(job)

    @property
    def current(self) -> Lane:
        """The lane whose thread is running this code."""
        lane: Lane = self._current.lane
        return lane

    def close(self) -> None:
        """Ends all lanes after the jobs they hold; later submissions fail."""
        with self._lock:
            self._closed = True
            for line in self._lines.values():
                line.arrivals.put(_Signal.CLOSE)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)

    def _line(self, lane: Lane) -> _Line:
        """The line of a lane; opens the lane at its first job. Called with the lock held."""
        if lane not in self._lines:
            self._lines[lane] = _Line()
            thread = threading.Thread(target=self._serve, args=(lane,), name=f"{self._name} lane {lane}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self._lines[lane]

    def _serve(self, lane: Lane) -> None:
        self._current.lane = lane
        with self._lock:
            line = self._lines[lane]
        arrived: dict[Job, None] = {}
        while (news := line.arrivals.get()) is not _Signal.CLOSE:
            if isinstance(news, Job):
                arrived[news] = None
            while (ready := self._next(line, lane, arrived)) is not None:
                self._step(ready)

    def _next(self, line: _Line, lane: Lane, arrived: dict[Job, None]) -> Job | None:
        """Takes the job whose turn it is off the line, if it has arrived."""
        with self._lock:
            passing = next((job for job in arrived if lane not in job.visits), None)
            job = passing or (line.expected[0] if line.expected and line.expected[0] in arrived else None)
            if job is not None:
                del arrived[job]
                if passing is None:
                    line.expected.popleft()
            return job

    def _step(self, job: Job) -> None:
        try:
            if job.arrival is not None:
                job.arrival.wait()
            hop = next(job.steps, None)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the job's owner must hear of it
            job.failed(error)
            hop = None
        with self._lock:
            if hop is None:
                self._leave(job)
            else:
                job.lane, job.arrival = hop.lane, hop.work
                self._line(hop.lane).arrivals.put(job)

    def _leave(self, job: Job) -> None:
        """Takes a job that has ended out of the lines it will not come to, and lets those behind it pass."""
        for lane in job.visits:
            line = self._lines[lane]
            if job in line.expected:
                line.expected.remove(job)
                line.arrivals.put(_Signal.LOOK_AGAIN)
