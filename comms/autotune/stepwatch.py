"""What a running job shows about itself: how long a step is, when buckets come, and what waiting for them costs."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradwire.comms.execute import Times

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
        clock: Seconds that only grow; the one that buckets carry the times of.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=STEPS_KEPT)
        self._ended: float | None = None
        self._running: tuple[float, float, Sequence[Times]] | None = None

    def step_ended(self, buckets: Sequence[Times]) -> None:
        """Notes the end of a backward pass.

        The step before it is complete only now: its last bucket may have been reduced after its own end.

        Args:
            buckets: Times of those of the step that ends now, in the order in which they came.
        """
        now = self._clock()
        if self._running is not None and self._ended is not None:
            step, backward, reduced = self._running
            exposed = max((bucket.reduced for bucket in reduced), default=0.0) - self._ended
            self._steps.append((step, backward, max(exposed, 0.0)))
        if self._ended is not None and buckets:
            self._running = (now - self._ended, now - buckets[0].came, buckets)
        self._ended = now

    def observed(self) -> Observed | None:
        """Medians of the last steps; None before the third."""
        if not self._steps:
            return None
        step, backward, exposed = (statistics.median(column) for column in zip(*self._steps, strict=True))
        return Observed(step, backward, exposed, len(self._steps))
