"""Gradients weighed by samples: how many each rank's are the mean of, told to all ranks beside a step's first bucket.

With n_i samples on rank i and N on all of them, the average over samples is the sum of (n_i / N) g_i. So each rank
scales by n_i / N before anything is narrowed, and the ranks sum: plans, casts, compressors and what these hold back see
a contribution like any other. N must be known before the first bucket travels. It comes with a
small exchange that starts when the first bucket arrives; buckets wait for it beside backward, which goes on. On CUDA
the host waits for it at the last bucket, as it has to issue what follows; no GPU has run that.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from gradwire.comms.observe.share import Shared
from gradwire.comms.run.all_reduces import AllReduce, Times
from gradwire.comms.step.listeners import EndedStep, StepListener

if TYPE_CHECKING:
    from gradwire.comms.communicator import Communicator

UNKNOWN = -1.0
"""What a rank says of a number that it does not have."""

NOT_SAID = (
    "`reduction` is samples, and rank {ranks} has not said how many samples its gradients are the mean of; wanted "
    "`state.samples = len(batch)` on every rank before backward"
)
NO_SAMPLES = (
    "`samples` is 0 on every rank: there is no gradient to average; leave such a step out on all ranks, or say how "
    "many samples it is of"
)


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank has told all others as a step began.

    Attributes:
        samples: Of the step; `UNKNOWN` where it has not said.
        seconds: It has worked in an earlier step, waits for others left out; `UNKNOWN` where that was not timed.
        samples_then: Of that step.
        place: Of the sampler: the next batch that it will draw.
        assignment: Checksum of how the sampler assigns samples to ranks; the same on all ranks.
    """

    samples: float
    seconds: float
    samples_then: float
    place: float
    assignment: float


class SampleAssigner(Protocol):
    """Assigns the samples of each batch to ranks, from the speeds that the ranks report."""

    @property
    def place(self) -> int:
        """The next batch that will be drawn here."""

    @property
    def checksum(self) -> int:
        """CRC-32 of how the next batches are assigned."""

    def heard(self, told: Sequence[Told]) -> None:
        """Takes in what all ranks have told, in their order; the same on all of them, once a step."""


class SampleWeights(StepListener):
    """One rank's weight in each step, and what waits for it.

    Args:
        communicator: Of the gradients.

    Attributes:
        count: Samples that this rank's next gradients are the mean of; None where it was not said.
        scale: n_i / N of the step.
        assigner: Receives the reports of all ranks in each step; None if no sampler balances the samples.
    """

    wants_arrivals = True

    def __init__(self, communicator: "Communicator") -> None:
        self.count: int | None = None
        self.scale = 0.0
        self.assigner: SampleAssigner | None = None
        self._communicator = communicator
        self._shared: Shared | None = None
        self._held: list[AllReduce] = []
        self._steps: deque[tuple[float, Sequence[Times]]] = deque(maxlen=2 + communicator.clock.lag)

    @property
    def wants_times(self) -> bool:
        """Whether steps are timed on CUDA, which only an assigner of samples needs."""
        return self.assigner is not None

    def step_began(self, steps: int) -> None:
        """Starts the exchange of the step that begins; see `StepListener.step_began`."""
        count = UNKNOWN if self.count is None else float(self.count)
        seconds, then = self._worked()
        place, checksum = (0, 0) if self.assigner is None else (self.assigner.place, self.assigner.checksum)
        self._shared = Shared(self._communicator, [count, seconds, then, float(place), float(checksum)])

    def step_ended(self, step: EndedStep) -> None:
        """Notes when the buckets of a step came and went."""
        count = UNKNOWN if self.count is None else float(self.count)
        self._steps.append((count, [bucket.times for bucket in step.buckets]))

    def due(self, launches: Sequence[AllReduce], *, wait: bool) -> Sequence[AllReduce]:
        """What may travel now, in order: nothing, as long as the step's weights have not come.

        Args:
            launches: That are to travel after what waits.
            wait: Have the host wait for the weights.

        Raises:
            ValueError: On all ranks alike: one has not said its samples, or none has any.
        """
        self._held += launches
        if self._shared is not None:
            if not (wait or self._shared.has_come):
                return ()
            shared, self._shared = self._shared, None
            self._take(shared)
        due, self._held = self._held, []
        for all_reduce in due:
            for part in all_reduce.parts:
                self.weigh(part)
        return due

    def weigh(self, gradient: Tensor) -> None:
        """Scales a gradient by n_i / N in place, before anything is narrowed.

        Not as the factor of a collective: ranks that share memory scale what they read, all by the same number.

        Args:
            gradient: Floating-point or complex, dense or torch.sparse_coo.
        """
        values = gradient._values() if gradient.is_sparse else gradient
        if self.scale == 0.0:
            values.zero_()  # a mean over no samples is NaN, and so is 0 times that
        else:
            values.mul_(self.scale)

    def _take(self, shared: Shared) -> None:
        rows = shared.read()
        if rows is None:  # what has failed comes out of the first launch
            return
        told = [Told(*row) for row in rows]
        if missing := [str(rank) for rank, each in enumerate(told) if each.samples == UNKNOWN]:
            raise ValueError(NOT_SAID.format(ranks=", ".join(missing)))
        total = sum(each.samples for each in told)
        if total == 0:
            raise ValueError(NO_SAMPLES)
        self.scale = told[self._communicator.rank].samples / total
        if self.assigner is not None:
            self.assigner.heard(told)

    def _worked(self) -> tuple[float, float]:
        """Seconds of this rank's work in the newest step that all is known of, and its samples.

        From the moment at which the step before it was reduced to the arrival of its own last bucket: in between nobody
        waits for another rank.
        """
        if len(self._steps) < 2 + self._communicator.clock.lag:
            return UNKNOWN, UNKNOWN
        (_, before), (count, own) = self._steps[0], self._steps[1]
        ended = [each.reduced for each in before if each.reduced is not None]
        arrived = own[-1].arrived if own else None
        if arrived is None or not ended or len(ended) < len(before):
            return UNKNOWN, UNKNOWN
        return min(self._communicator.clock.between(each, arrived) for each in ended), count
