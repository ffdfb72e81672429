"""Where a backward pass stands: the one place that says when a step begins and when it ends.

DDP calls the hook with bucket after bucket, and says which is the last; autograd calls back when backward has ended. A
step ends once both are through, and neither alone is enough: DDP may launch its last bucket long before autograd has
ended, with static_graph it does not say in the first step which is the last, and a checkpoint in which the first bucket
comes runs a backward pass of its own, whose end is not the step's.
"""

from enum import Enum

TIMED_FROM, TIMED_UNTIL, TIMED_EVERY, STEPS_IN_A_ROW = 3, 23, 100, 3
"""Steps whose events `report()` and `advise()` go by on CUDA, where events cost host time: 20 of the first ones, then 3
in a hundred. Their uncompressed buckets travel beside the stream that computes even where one all-reduce is all."""


def is_timed(step: int) -> bool:
    """Whether a step on CUDA is timed: two in a row give a step's length, the first ones hold start-up.

    Args:
        step: Backward passes before this one.
    """
    return TIMED_FROM <= step < TIMED_UNTIL or step % TIMED_EVERY < STEPS_IN_A_ROW


class StepState(Enum):
    """Where a step stands."""

    BETWEEN_STEPS = "no bucket has come since the last step ended"
    IN_BACKWARD = "buckets come, and autograd will call when backward has ended"
    LAST_BUCKET_CAME = "all buckets are there, and autograd will call when backward has ended"
    ON_ITS_OWN = "buckets come, and nobody will call: the last of them ends the step"


class StepLife:
    """Follows the steps of one model. Each method says what has happened; those that return a bool end a step by it.

    Attributes:
        state: Where the step stands.
        announces_last: Whether DDP says which bucket is a step's last. With static_graph it does not in the first step,
            and waits for the futures before autograd says that backward has ended: then nothing may be held back.
    """

    def __init__(self) -> None:
        self.state = StepState.BETWEEN_STEPS
        self.announces_last = False

    @property
    def in_step(self) -> bool:
        """Whether a step has begun and not ended."""
        return self.state is not StepState.BETWEEN_STEPS

    def begin(self, *, autograd_calls: bool) -> None:
        """The first bucket of a step has come.

        Args:
            autograd_calls: Autograd will call when backward has ended.
        """
        self.state = StepState.IN_BACKWARD if autograd_calls else StepState.ON_ITS_OWN

    def last_bucket_came(self) -> bool:
        """DDP has handed over the bucket that it says is the last.

        Returns:
            Whether the step ends by it.
        """
        self.announces_last = True
        if self.state is StepState.ON_ITS_OWN:
            self.state = StepState.BETWEEN_STEPS
            return True
        self.state = StepState.LAST_BUCKET_CAME
        return False

    def backward_ended(self, *, inside: bool = False) -> bool:
        """Autograd has ended a backward pass: the step's, or one inside it, before the last bucket.

        Args:
            inside: It is known to be one inside; where it is not, a pass is taken for one as long as DDP announces
                which bucket is the last.

        Returns:
            Whether the step ends by it.
        """
        if self.state is StepState.LAST_BUCKET_CAME or (self.in_step and not self.announces_last and not inside):
            self.state = StepState.BETWEEN_STEPS
            return True
        if self.in_step:
            self.state = StepState.ON_ITS_OWN
        return False
