"""What a running job shows about itself: how long a step is, and how long it waits for buckets."""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.comms.run.all_reduces import Times
from gradwire.comms.step.listeners import EndedStep, StepListener
from gradwire.comms.streams import Clock, HostClock, Mark

STEPS_KEPT = 50
LEAST_SPREAD = 4
"""Steps from which on it is said how far apart they are."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Medians over the last steps of one rank.

    Attributes:
        step_seconds: From the end of a backward pass to the end of the next.
        backward_seconds: From the first bucket to the end of the backward pass: the part that can hide communication.
        exposed_seconds: From the end of the backward pass to the last reduced bucket.
        steps: How many steps that is.
        middle_half: Between which two times the middle half of the whole steps lie, where that is known.
    """

    step_seconds: float
    backward_seconds: float
    exposed_seconds: float
    steps: int
    middle_half: tuple[float, float] | None = None

    @property
    def headroom_seconds(self) -> float:
        """The step without communication: what no plan and no compressor can go below."""
        return max(self.step_seconds - self.exposed_seconds, 0.0)


class StepWatch(StepListener):
    """Watches the steps of one rank.

    Args:
        clock: The one that buckets carry the times of; the host's where None is given.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or HostClock()
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=STEPS_KEPT)
        self._ended: Mark | None = None
        self._running: tuple[Mark, Mark, Sequence[Times]] | None = None

    def step_ended(self, step: EndedStep) -> None:
        """Notes the end of a step; of one that was not timed nothing is said, nor about the one before it."""
        if step.timed:
            self.note([bucket.times for bucket in step.buckets])
        else:
            self._ended = self._running = None

    def note(self, buckets: Sequence[Times]) -> None:
        """Notes the end of a backward pass that was timed.

        The step before it is complete only now: its last bucket may have been reduced after its own end.

        Args:
            buckets: Times of those of the step that ends now, in the order in which they arrived.
        """
        now, between = self._clock.now(), self._clock.between
        if self._running is not None:
            before, ended, seen = self._running
            exposed = [between(ended, bucket.reduced) for bucket in seen if bucket.reduced is not None]
            if seen[0].arrived is not None:
                backward = between(seen[0].arrived, ended)
                self._steps.append((between(before, ended), backward, max([*exposed, 0.0])))
        self._running = (self._ended, now, buckets) if self._ended is not None and buckets else None
        self._ended = now

    def observed(self) -> Observed | None:
        """Medians of the last steps; None before the third."""
        if not self._steps:
            return None
        step, backward, exposed = (statistics.median(column) for column in zip(*self._steps, strict=True))
        middle_half = None
        if len(self._steps) >= LEAST_SPREAD:
            first, _, last = statistics.quantiles((each[0] for each in self._steps), n=4, method="inclusive")
            middle_half = first, last
        return Observed(step, backward, exposed, len(self._steps), middle_half)
