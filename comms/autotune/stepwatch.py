"""What a running job shows about itself: how long a step is, when buckets come, and what waiting for them costs."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gradwire.comms.futures import FutureTensor

STEPS_KEPT = 50


@dataclass(frozen=True, slots=True)
class Observed:
    """Medians over the last steps of one rank.

    Attributes:
        step_seconds: From the end of a backward pass to the end of the next.
        backward_seconds: From the first bucket to the end of the backward pass: the part that can hide communication.
        exposed_seconds: From the end of the backward pass to the last reduced bucket.
        steps: How many steps that is.
    """

    step_seconds: float
    backward_seconds: float
    exposed_seconds: float
    steps: int

    @property
    def headroom_seconds(self) -> float:
        """The step without communication: what no plan and no compressor can go below."""
        return max(self.step_seconds - self.exposed_seconds, 0.0)


class StepWatch:
    """Watches the steps of one rank.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=STEPS_KEPT)
        self._first: float | None = None
        self._ended: float | None = None
        self._running: tuple[float, float] | None = None
        self._done = 0.0

    def bucket_came(self) -> None:
        """Notes a bucket; the first of a step closes the books of the step before."""
        now = self._clock()
        if self._first is None:
            self._first = now

    def watch(self, future: FutureTensor) -> None:
        """Notes when a bucket is reduced."""
        future.add_done_callback(self._reduced)

    def step_ended(self) -> None:
        """Notes the end of a backward pass."""
        now = self._clock()
        if self._running is not None and self._ended is not None:
            step, backward = self._running
            self._steps.append((step, backward, max(self._done - self._ended, 0.0)))
        if self._ended is not None and self._first is not None:
            self._running = (now - self._ended, now - self._first)
        self._ended, self._first = now, None

    def observed(self) -> Observed | None:
        """Medians of the last steps; None before the third."""
        if not self._steps:
            return None
        step, backward, exposed = (statistics.median(column) for column in zip(*self._steps, strict=True))
        return Observed(step, backward, exposed, len(self._steps))

    def _reduced(self, _: FutureTensor) -> None:
        self._done = max(self._done, self._clock())
