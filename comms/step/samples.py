"""Weighs gradients by samples: ranks exchange how many samples each one's gradients are the mean of, in each step.

With n_i samples on rank i and N on all of them, the average over samples is the sum of (n_i / N) g_i. So each rank
scales by n_i / N before any conversion to a narrower dtype, and the ranks sum: for plans, casts, compressors and their
residuals it is a contribution like any other. N must be known before the first bucket is sent. It comes with a small
exchange that starts when the first bucket arrives; all-reduces wait for it while backward goes on. On CUDA the host
waits for it at the last bucket, as it has to issue what follows; no GPU has run that.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from gradwire.comms.observe.number_exchange import NumberExchange
from gradwire.comms.run.all_reduces import AllReduce
from gradwire.comms.step.listeners import StepListener

if TYPE_CHECKING:
    from gradwire.comms.communicator import Communicator

UNKNOWN = -1.0
"""Number of samples that a rank reports if the user has set none."""

MISSING_SAMPLES = (
    "`reduction` is samples, and rank {ranks} has not set how many samples its gradients are the mean of; wanted "
    "`state.samples = len(batch)` on every rank before backward"
)
NO_SAMPLES = (
    "`samples` is 0 on every rank: there is no gradient to average; leave such a step out on all ranks, or set how "
    "many samples it is of"
)


class SampleWeights(StepListener):
    """Scales each step's gradients by this rank's share n_i / N of the samples, and defers them until it is known.

    Args:
        communicator: Communicator of the gradients.

    Attributes:
        count: Number of samples in this rank's next gradients, which are their mean; None if the user has set none.
        scale: Weight n_i / N of the present step; 0.0 before the first.
    """

    def __init__(self, communicator: "Communicator") -> None:
        self.count: int | None = None
        self.scale = 0.0
        self._communicator = communicator
        self._shared: NumberExchange | None = None
        self._held: list[AllReduce] = []

    def step_began(self, steps: int) -> None:
        """Starts to send this rank's number of samples to all ranks, and returns at once."""
        self._shared = NumberExchange(self._communicator, [UNKNOWN if self.count is None else float(self.count)])

    def due(self, launches: Sequence[AllReduce], *, wait: bool) -> Sequence[AllReduce]:
        """Returns the all-reduces that may start now, in order, with their gradients scaled by this rank's weight.

        Args:
            launches: All-reduces to start after those that are deferred; their parts are scaled in place.
            wait: Whether the host waits for the weights of the step.

        Returns:
            All deferred all-reduces and `launches`; none as long as the weights are not known.

        Raises:
            ValueError: On all ranks: a rank has not set its samples, or all have 0.
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
        """Sets the weight of the step from the numbers of all ranks, for which it waits.

        If the exchange has failed, the weight stays as it was: the next all-reduce raises the failure.

        Args:
            shared: Exchange of the ranks' numbers of samples.

        Raises:
            ValueError: On all ranks: a rank has not set its samples, or all have 0.
        """
        if (numbers := shared.read()) is None:
            return
        counts = [count for (count,) in numbers]
        if missing := [str(rank) for rank, count in enumerate(counts) if count == UNKNOWN]:
            raise ValueError(MISSING_SAMPLES.format(ranks=", ".join(missing)))
        total = sum(counts)
        if total == 0:
            raise ValueError(NO_SAMPLES)
        self.scale = counts[self._communicator.rank] / total
