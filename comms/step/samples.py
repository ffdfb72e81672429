"""Weighs gradients by samples: ranks exchange how many samples each one's gradients are the mean of, in each step.

With n_i samples on rank i and N on all of them, the average over samples is the sum of (n_i / N) g_i. So each rank
scales by n_i / N before any conversion to a narrower dtype, and the ranks sum: for plans, casts, compressors and their
residuals it is a contribution like any other. N must be known before the first bucket is sent. It comes with a small
exchange that starts when the first bucket arrives; buckets wait for it while backward goes on. On CUDA the host waits
for it at the last bucket, as it has to issue what follows; no GPU has run that.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from gradwire.comms.observe.number_exchange import NumberExchange
from gradwire.comms.run.all_reduces import AllReduce, Times
from gradwire.comms.step.listeners import EndedStep, StepListener

if TYPE_CHECKING:
    from gradwire.comms.communicator import Communicator

UNKNOWN = -1.0
"""Value that a rank reports for a number that it does not know."""

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
    """The report that one rank sends to all others as a step begins.

    Attributes:
        samples: Number of samples in its gradients of this step; `UNKNOWN` if the user has set none.
        seconds: Seconds that it worked in an earlier step, without waits for other ranks; `UNKNOWN` if not timed.
        samples_then: Number of its samples in that earlier step; `UNKNOWN` if that step was not timed.
        place: Number of the next batch that its sampler will draw; 0 without a sampler.
        assignment: Checksum of the sampler's assignment of samples to ranks, which must be equal on all ranks; 0
            without a sampler.
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
        """Number of the next batch that this rank will draw, counted on from epoch to epoch.

        The ranks change to a new assignment at the largest of their places: a batch that none has drawn.
        """

    @property
    def checksum(self) -> int:
        """CRC-32 of the settings and of the assignment of samples to ranks; equal on consistent ranks."""

    def heard(self, told: Sequence[Told]) -> None:
        """Receives the reports of all ranks, by rank; called once a step, with the same reports on all ranks."""


class SampleWeights(StepListener):
    """Scales each step's gradients by this rank's weight n_i / N, and holds them back until the weight is known.

    Args:
        communicator: Communicator of the gradients.

    Attributes:
        count: Number of samples in this rank's next gradients, which are their mean; None if the user has set none.
        scale: Weight n_i / N of the present step; 0.0 before the first.
        assigner: Receives the reports of all ranks in each step; None if no sampler balances the samples.
    """

    wants_arrivals = True

    def __init__(self, communicator: "Communicator") -> None:
        self.count: int | None = None
        self.scale = 0.0
        self.assigner: SampleAssigner | None = None
        self._communicator = communicator
        self._shared: NumberExchange | None = None
        self._held: list[AllReduce] = []
        self._steps: deque[tuple[float, Sequence[Times]]] = deque(maxlen=2 + communicator.clock.lag)

    @property
    def wants_times(self) -> bool:
        """Whether steps are timed on CUDA, which only an assigner of samples needs."""
        return self.assigner is not None

    def step_began(self, steps: int) -> None:
        """Starts to send this rank's report to all ranks; see `StepListener.step_began`."""
        count = UNKNOWN if self.count is None else float(self.count)
        seconds, then = self._worked()
        place, checksum = (0, 0) if self.assigner is None else (self.assigner.place, self.assigner.checksum)
        self._shared = NumberExchange(self._communicator, [count, seconds, then, float(place), float(checksum)])

    def step_ended(self, step: EndedStep) -> None:
        """Records the times of a step's buckets, for the report on this rank's speed."""
        count = UNKNOWN if self.count is None else float(self.count)
        self._steps.append((count, [bucket.times for bucket in step.buckets]))

    def due(self, launches: Sequence[AllReduce], *, wait: bool) -> Sequence[AllReduce]:
        """Returns the all-reduces that may start now, in order, with their gradients scaled by this rank's weight.

        Args:
            launches: All-reduces to start after those that are held back; their parts are scaled in place.
            wait: Whether the host waits for the weights of the step.

        Returns:
            All held all-reduces and `launches`; none as long as the weights are not known.

        Raises:
            ValueError: On all ranks: a rank has not set its samples, or all have 0; or their samplers differ.
            RuntimeError: This rank's sampler has drawn batches meanwhile; see `SpeedBatchSampler.heard`.
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
        """Scales a gradient by n_i / N in place, before any conversion to a narrower dtype.

        The factor of a collective cannot do that: ranks that share memory scale what they read by one number.

        Args:
            gradient: Floating-point or complex, dense or torch.sparse_coo.
        """
        values = gradient._values() if gradient.is_sparse else gradient
        if self.scale == 0.0:
            values.zero_()  # a mean over no samples is NaN, and so is 0 times that
        else:
            values.mul_(self.scale)

    def _take(self, shared: NumberExchange) -> None:
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
        """Measures this rank's work in the newest step whose times are complete.

        The work lasts from the end of the last all-reduce of the step before it to the arrival of its own last bucket:
        in between this rank waits for no other one.

        Returns:
            Seconds of work, and the number of samples in them; (`UNKNOWN`, `UNKNOWN`) if times are missing.
        """
        if len(self._steps) < 2 + self._communicator.clock.lag:
            return UNKNOWN, UNKNOWN
        (_, before), (count, own) = self._steps[0], self._steps[1]
        ended = [each.reduced for each in before if each.reduced is not None]
        arrived = own[-1].arrived if own else None
        if arrived is None or not ended or len(ended) < len(before):
            return UNKNOWN, UNKNOWN
        return min(self._communicator.clock.between(each, arrived) for each in ended), count
