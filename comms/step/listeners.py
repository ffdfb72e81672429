"""Listeners follow the steps of one communicator: each optional feature is one, so the hook passes on events to all.

One is named in the path of a bucket: `hook.py` asks `session.weights`, the listener `samples`, which weighs gradients
before they are sent, and which all-reduces are due.

A listener is imported and created only if its option asks for it; `step_watch` and `observer` are always there, and
`first_steps` is by default. The functions of `features.py` create them, but for those that need elastic training
(`elastic/ddp.py`). All ranks have the same listeners and call them at the same points of the sequence of all-reduces,
in the order of `ORDER`: several of them start collectives.

A new listener is a name in `ORDER` and the reason for its place, a function of `features.py` that adds it, and a call
of that one where a session is made (`GradientSession` of session.py). Nothing outside gradwire can add one: a user's
code wraps the hook, or registers a compressor, whose `exchanged` and `end_step` are called at the end of each step.

`HookState` passes on all events of a step. `FsdpState` passes on `step_began`, `bucket_arrived` (of flat shards, with
no layout) and `step_ended`, `Outer` only `step_began` and `step_ended`; both commit the compressor's state themselves.
A sharded model without `replicas` has no session, and so no listeners. In a step that `Join` takes for a rank without
inputs, DDP's hook is called outside of autograd: then no listener gets `bucket_arrived`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gradwire.comms.report import Report
from gradwire.comms.run.all_reduces import AllReduce, Bucket
from gradwire.compressors.base import Layout

(
    USED_MAP,
    RETURNED,
    PASSES,
    DISCARDED,
    COMPRESSED_STEPS,
    LOADED,
    UNIT_RATES,
    FIRST_STEPS,
    STEP_WATCH,
    RESIDUAL_NOTES,
    OBSERVER,
    CUTS,
    SAMPLES,
    MEMBERSHIP,
) = ORDER = (
    "used_map",
    "returned",
    "passes_per_step",
    "discarded",
    "compressed_steps",
    "loaded",
    "unit_rates",
    "first_steps",
    "step_watch",
    "residual_notes",
    "observer",
    "cuts",
    "samples",
    "membership",
)
"""Names of the listeners, in the order in which each event is passed to them.

- `used_map` is first: on CUDA it waits for a collective of DDP, which must not overlap with any of ours.
- `returned` and `passes_per_step` refuse gradients, so they come before any listener that uses them.
- `discarded` reads gradients and warns; it sends nothing, and may be anywhere.
- `compressed_steps` commits or drops the compressor's state, which `residual_notes` reads.
- `loaded` comes before all that send: ranks that loaded different states send messages of different sizes.
- `unit_rates` and `first_steps` change the rates of the links, by which all later listeners plan, and measure while
  nothing is in flight.
- `step_watch` comes before `observer` and `cuts`, because the time of their exchanges is not part of the step.
- `residual_notes` reads residuals, so it comes before the exchange of `observer` is in flight.
- `observer` comes before `cuts`: its exchange belongs to the finished step, and uses the plan of that step.
- `cuts` changes the bucket boundaries of the next step, so it comes after all that sends at the end of a step.
- `samples` starts an exchange at the beginning of a step, after the measurements of the links.
- `membership` calls the user, who must see a finished step.
"""


@dataclass(frozen=True, slots=True)
class EndedStep:
    """Describes a finished backward pass to listeners; all its all-reduces have been started, perhaps not finished.

    A listener that reads averages on a CPU waits for them first (`bucket.result().wait()`), unless it comes after
    `compressed_steps` in `ORDER` and that one is there: it has waited for all buckets.

    Attributes:
        number: Number of the step, from 1.
        buckets: The dense buckets, in the order of their arrival.
        reduced_layouts: Layouts of the all-reduces, in the order in which they were started; empty if neither a
            compressor nor the mode of training needs parameter names.
        report: Makes the report of this rank's counters so far, given the number of the step. It refers to no session,
            so that who keeps it does not keep the session from being collected.
        timed: Whether the times of buckets and phases were recorded.
        taken_by_all: Whether all ranks took the step with this communicator. False only in elastic training, after a
            rank has failed: then listeners send the other ranks nothing about the step.
        sparse: The buckets of sparse gradients, in the order of their arrival.
    """

    number: int
    buckets: Sequence[Bucket]
    reduced_layouts: Sequence[Layout]
    report: Callable[[int], Report]
    timed: bool = True
    taken_by_all: bool = True
    sparse: Sequence[Bucket] = ()


class Grouping(Protocol):
    """Protocol of objects that decide which buckets of a step are joined into all-reduces, and when these start."""

    @property
    def prescribed(self) -> Tensor | None:
        """The all-reduces of a saved step that this one has to use, as `encode_all_reduces` returns them; else None."""

    def add(self, bucket: Bucket) -> Sequence[AllReduce]:
        """Adds a bucket that has arrived, and returns the all-reduces to start now, in this order.

        They may hold earlier buckets, too. Empty if the bucket is deferred: it waits for others to be joined with.
        """

    def flush(self) -> Sequence[AllReduce]:
        """Returns the all-reduces of all deferred buckets, to start now; called after the last bucket of a step."""

    def end_step(self) -> Sequence[AllReduce]:
        """Returns the all-reduces of buckets that are still deferred, to start now, and prepares the next step."""


class Issues(Protocol):
    """Protocol of communicators: the part that listeners use while a step runs."""

    def sync_current_stream(self) -> None:
        """Makes the current CUDA stream wait for all collectives issued so far."""


class StepListener:
    """Follows the steps of one communicator; the base class ignores all events.

    Attributes:
        wants_arrivals: Whether the arrival of each bucket is to be timed, even in steps that are otherwise not timed.
        wants_buckets: Whether `bucket_arrived` is to be called.
    """

    wants_arrivals = False
    wants_buckets = False

    @property
    def wants_times(self) -> bool:
        """Whether the next step is to be timed on CUDA, where only a few steps are timed otherwise; here False."""
        return False

    @property
    def ends_after_ddp(self) -> bool:
        """Whether a step shall end only after DDP's own callback at the end of backward; here False."""
        return False

    def step_began(self, steps: int) -> None:
        """Called before the first bucket of a step is sent; those of earlier steps are done, on CUDA issued.

        An exchange of numbers that `observer` has started at the end of an earlier step may be in flight.

        Args:
            steps: Number of finished steps.
        """

    def bucket_arrived(self, layout: Layout | None, parameters: Sequence[Tensor], flat: Tensor) -> None:
        """Called before a dense bucket is sent, if `wants_buckets`.

        Args:
            layout: Layout of the bucket; None if no feature needs parameter names.
            parameters: The bucket's parameters, in the order of the layout.
            flat: The bucket's gradients, 1-D, which the averages will replace.
        """

    def last_bucket_sent(self, communicator: Issues) -> None:
        """Called in backward after the bucket that DDP marks as last, when all of the step's sums have been started.

        That is, queued on a CPU and issued on CUDA. Not called if DDP marks none (`GradBucket.is_last`). Here a no-op.

        Args:
            communicator: Communicator of the step.
        """

    def ddp_ended(self) -> None:
        """Called when DDP has written the averages into the gradients, if a listener `ends_after_ddp`.

        Gradients of parameters that no rank has used stay as they were.
        """

    def step_ended(self, step: EndedStep) -> None:
        """Called at the end of a step, on all ranks at the same point of the sequence of all-reduces.

        Args:
            step: The step that has ended.
        """


class Listeners:
    """Keeps the listeners of one communicator, and passes each event of a step on to all of them, in `ORDER`.

    Attributes:
        for_buckets: The listeners that want each bucket, in order.
    """

    def __init__(self) -> None:
        self._made: dict[str, StepListener] = {}
        self.for_buckets: tuple[StepListener, ...] = ()

    def add(self, name: str, listener: StepListener) -> None:
        """Adds a listener at its place in `ORDER`, instead of one that was added under the same name.

        Raises:
            ValueError: `name` is not in `ORDER`.
        """
        if name not in ORDER:
            raise ValueError(f"`name` is {name!r}; wanted one of {', '.join(ORDER)}: say there when it is called")
        found = {**self._made, name: listener}
        self._made = {each: found[each] for each in ORDER if each in found}
        self.for_buckets = tuple(each for each in self._made.values() if each.wants_buckets)

    def get(self, name: str) -> StepListener | None:
        """Returns the listener that was added under a name of `ORDER`; None if there is none."""
        return self._made.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the listeners, in the order in which they are called."""
        return tuple(self._made)

    @property
    def wants_arrivals(self) -> bool:
        """Whether a listener needs the time at which each bucket arrives at the hook, even if the step is not timed."""
        return any(each.wants_arrivals for each in self._made.values())

    @property
    def wants_times(self) -> bool:
        """Whether a listener needs the next step timed on CUDA, where only a few steps are timed otherwise."""
        return any(each.wants_times for each in self._made.values())

    @property
    def ends_after_ddp(self) -> bool:
        """Whether a listener needs steps to end only after DDP's own callback, which writes averages into gradients."""
        return any(each.ends_after_ddp for each in self._made.values())

    def step_began(self, steps: int) -> None:
        """Passes the beginning of a step to all listeners, before its first bucket is sent.

        Args:
            steps: Number of finished steps.
        """
        for each in self._made.values():
            each.step_began(steps)

    def last_bucket_sent(self, communicator: Issues) -> None:
        """Passes on that all collectives of the step's buckets have been issued."""
        for each in self._made.values():
            each.last_bucket_sent(communicator)

    def ddp_ended(self) -> None:
        """Passes on that DDP has finished its part of a backward pass."""
        for each in self._made.values():
            each.ddp_ended()

    def step_ended(self, step: EndedStep) -> None:
        """Passes the end of a step to all listeners."""
        for each in self._made.values():
            each.step_ended(step)
