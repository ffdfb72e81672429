"""The one ordered executor: jobs pass through lanes, each lane a thread that serves them in the order of submission.

Communicators belong to lanes. A job is a generator that yields `Hop(lane, work)`: "when `work` is done, go on in
`lane`". As every rank submits the same jobs in the same order and every job visits the same lanes, each communicator
sees the same sequence of collectives on all ranks, and no rank has to look at the clock, or at which bucket happens to
be ready, to decide what comes next. While one chunk is on the wire, the next one is reduced inside the node.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gradwire.compressors.base import Work

Lane = tuple[int, int]
"""Index of the phase, and of the step inside it where a compressor needs several."""


@dataclass(frozen=True, slots=True)
class Hop:
    """Where a job goes on, and what must be done by then."""

    lane: Lane
    work: Work


@dataclass(slots=True)
class Job:
    """A bucket's chunk on its way through the lanes.

    Attributes:
        steps: The generator that does the work.
        failed: Called once, from a lane's thread, with what went wrong.
        lane: The lane it is in.
        arrival: What must be waited for before its next step.
    """

    steps: Iterator[Hop]
    failed: Callable[[BaseException], None]
    lane: Lane = (0, 0)
    arrival: Work | None = None


class Lanes:
    """Threads made on first use; `close()` ends them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queues: dict[Lane, queue.SimpleQueue[Job | None]] = {}
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
            if job.lane not in self._queues:
                self._open(job.lane)
            self._queues[job.lane].put(job)

    @property
    def current(self) -> Lane:
        """The lane whose thread is running this code."""
        lane: Lane = self._current.lane
        return lane

    def close(self) -> None:
        """Ends all lanes after the jobs they hold; later submissions fail."""
        with self._lock:
            self._closed = True
            for waiting in self._queues.values():
                waiting.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)

    def _open(self, lane: Lane) -> None:
        jobs = self._queues[lane] = queue.SimpleQueue()
        thread = threading.Thread(target=self._serve, args=(lane, jobs), name=f"{self._name} lane {lane}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, lane: Lane, jobs: "queue.SimpleQueue[Job | None]") -> None:
        self._current.lane = lane
        while (job := jobs.get()) is not None:
            self._step(job)

    def _step(self, job: Job) -> None:
        try:
            if job.arrival is not None:
                job.arrival.wait()
            hop = next(job.steps, None)
            if hop is not None:
                job.lane, job.arrival = hop.lane, hop.work
                self.submit(job)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the job's owner must hear of it
            job.failed(error)
