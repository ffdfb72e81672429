"""Times the steps of a running job: how long a step takes, and how long it waits for buckets."""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.comms.run.all_reduces import Times
from gradwire.comms.step.listeners import EndedStep, StepListener
from gradwire.comms.streams import Clock, HostClock, Mark

STEPS_KEPT = 50
"""Number of last timed steps that medians are taken of."""
LEAST_SPREAD = 4
"""Number of timed steps from which on `Observed.middle_half` is known."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Holds the median times of the last steps of one rank.

    Attributes:
        step_seconds: Seconds from the end of a backward pass to the end of the next one.
        backward_seconds: Seconds from the first bucket to the end of the backward pass: the part that can hide
            communication.
        exposed_seconds: Seconds from the end of the backward pass to the end of the last bucket's all-reduce.
        steps: Number of steps that the medians are of.
        middle_half: First and third quartile of `step_seconds`; None with fewer than `LEAST_SPREAD` steps.
    """

    step_seconds: float
    backward_seconds: float
    exposed_seconds: float
    steps: int
    middle_half: tuple[float, float] | None = None

    @property
    def headroom_seconds(self) -> float:
        """Seconds of a step without exposed communication: no plan and no compressor can make it shorter."""
        return max(self.step_seconds - self.exposed_seconds, 0.0)


class StepWatch(StepListener):
    """Times the steps of one rank, and returns medians of the last `STEPS_KEPT`.

    Args:
        clock: Clock of the times in buckets; None is the host's.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or HostClock()
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=STEPS_KEPT)
        self._ended: Mark | None = None
        self._running: tuple[Mark, Mark, Sequence[Times]] | None = None

    def step_ended(self, step: EndedStep) -> None:
        """Records the end of a step; after one that was not timed, the step before it is not counted either."""
        if step.timed:
            self.note([bucket.times for bucket in step.buckets])
        else:
            self._ended = self._running = None

    def note(self, buckets: Sequence[Times]) -> None:
        """Records the end of a timed backward pass, and adds the times of the step before it.

        That one is complete only now: its last all-reduce may have ended after its backward pass. On CUDA the host may
        wait for the device to finish that step.

        Args:
            buckets: Times of the buckets of the step that ends now, in the order of their arrival.
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
        """Returns the medians of the last steps; None before three timed steps in a row have ended."""
        if not self._steps:
            return None
        step, backward, exposed = (statistics.median(column) for column in zip(*self._steps, strict=True))
        middle_half = None
        if len(self._steps) >= LEAST_SPREAD:
            first, _, last = statistics.quantiles((each[0] for each in self._steps), n=4, method="inclusive")
            middle_half = first, last
        return Observed(step, backward, exposed, len(self._steps), middle_half)
