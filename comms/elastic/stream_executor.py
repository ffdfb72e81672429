"""The executor of CUDA tensors in elastic training, where a failure ends a generation and not the training."""

from gradwire.comms.run.all_reduces import Bucket
from gradwire.comms.run.stream_executor import StreamExecutor


class ResilientStreamExecutor(StreamExecutor):
    """Raises a failure only in calls that issue collectives: operations of all ranks, which survivors then repeat.

    A rank may fail at any moment after all ranks have a step's averages: while the step ends, while a checkpoint is
    made, before the optimizer steps. These averages are right on all ranks, so nothing of that may raise, and no
    average may become NaN. The next operation of all ranks raises the failure, and enters the next generation.

    Invariant: the host has waited for a step's averages before they are used (`ElasticTraining.complete_step`).
    """

    def release(self) -> None:
        """Issues the all-gathers that `start` has deferred; with none deferred, a known failure is not raised.

        Raises:
            CollectiveError: All-gathers are deferred, and a failure is known or they fail.
        """
        if self._held is not None or self.failure_handler.error is None:
            super().release()

    def poison(self, bucket: Bucket) -> None:
        """Does nothing: the host has waited for the averages of the bucket, so none of them is wrong."""

    def raise_failure(self) -> None:
        """Does nothing at the end of a step, where a hook without elastic training raises a failure that is known.

        The next operation of all ranks raises it, and is repeated.
        """
