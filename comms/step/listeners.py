"""Those who follow the steps of one communicator: what tunes, measures, chooses and watches beside a bucket's path.

A feature is a `StepListener`, made and imported only where it is asked for (`features.py`). All ranks have the same
listeners and call them at the same points of the sequence of launches, in `ORDER`: several of them start collectives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradwire.comms.report import Report
from gradwire.comms.run.all_reduces import Bucket
from gradwire.compressors.base import Layout

LOADED, UNIT_RATES, FIRST_STEPS, STEP_WATCH, RESIDUAL_NOTES, OBSERVER, CUTS, SAMPLES = ORDER = (
    "loaded",
    "unit_rates",
    "first_steps",
    "step_watch",
    "residual_notes",
    "observer",
    "cuts",
    "samples",
)
"""The order in which listeners hear of a step's begin, and of its end. Both come after the compressor's own.

- `loaded` comes first: ranks that go on from unlike states send each other unlike messages, whatever is sent.
- `unit_rates` and `first_steps` come next at a begin: they change the links' rates, which all that follows plans by,
  and measure while nothing is in flight.
- `step_watch` comes before the observer and `cuts`, whose exchanges take time that is none of the step's.
- `residual_notes` reads residuals, so it comes before the observer's exchange is in flight.
- `observer` comes before `cuts`: its exchange belongs to the step that has ended, and travels by that step's plan.
- `cuts` changes the cuts of the next step, so it comes behind whatever travels at an end.
- `samples` comes last: it starts an exchange at a begin, when those that measure links are through, and none at an end.
"""


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A backward pass that has ended; all its launches are under way.

    Attributes:
        number: From 1.
        buckets: In the order in which they arrived.
        transfers: Which parameters travelled together, in the order of the launches; empty without a compressor.
        report: Makes a report, for whoever exports it.
        timed: Whether the times of its buckets and phases were taken.
        together: All ranks have made the step with this communicator; else none of them says that they have.
    """

    number: int
    buckets: Sequence[Bucket]
    transfers: Sequence[Layout]
    report: Callable[[], Report]
    timed: bool = True
    together: bool = True


class StepListener:
    """Follows steps; does nothing by itself.

    Attributes:
        wants_arrivals: Every bucket is to say when it arrived, in steps that are not timed, too.
    """

    wants_arrivals = False

    @property
    def wants_times(self) -> bool:
        """Whether the step that begins is to be timed on CUDA, where others are not."""
        return False

    def step_began(self, steps: int) -> None:
        """Called before a step's first bucket travels; nothing is in flight.

        Args:
            steps: That have ended.
        """

    def step_ended(self, step: EndedStep) -> None:
        """Called at the end of a step, on all ranks at the same point of the sequence of launches."""

    def add_to(self, report: Report) -> Report:
        """The report, with what this listener knows besides."""
        return report


class Listeners:
    """The listeners of one communicator."""

    def __init__(self) -> None:
        self._made: dict[str, StepListener] = {}

    def add(self, name: str, listener: StepListener) -> None:
        """Takes one in, at its place in `ORDER`.

        Raises:
            ValueError: The order has no such name.
        """
        if name not in ORDER:
            raise ValueError(f"`name` is {name!r}; wanted one of {', '.join(ORDER)}: say there when it is called")
        found = {**self._made, name: listener}
        self._made = {each: found[each] for each in ORDER if each in found}

    def get(self, name: str) -> StepListener | None:
        """A listener by its name in `ORDER`; None where it was not asked for."""
        return self._made.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Those there are, in the order in which they are called."""
        return tuple(self._made)

    @property
    def wants_arrivals(self) -> bool:
        """Whether one of them wants to know when each bucket arrived."""
        return any(each.wants_arrivals for each in self._made.values())

    @property
    def wants_times(self) -> bool:
        """Whether one of them wants this step to be timed."""
        return any(each.wants_times for each in self._made.values())

    def step_began(self, steps: int) -> None:
        """Tells all of them that a step begins."""
        for each in self._made.values():
            each.step_began(steps)

    def step_ended(self, step: EndedStep) -> None:
        """Tells all of them that a step has ended."""
        for each in self._made.values():
            each.step_ended(step)

    def add_to(self, report: Report) -> Report:
        """The report, with what all of them know."""
        for each in self._made.values():
            report = each.add_to(report)
        return report
