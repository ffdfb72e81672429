"""Chooses `every`, `fragments` and `delay` of `Outer` if the user omits them.

The choice depends on the link and on the duration of a step. An exchange of a fragment must end within `delay` steps,
all exchanges together may use half of the link, and a delay of more than one step may be a third of `every` at most.
Among the schedules that satisfy this, the smallest `every` is taken, which costs the least quality; then the shortest
delay; then a number of fragments that divides `every`; then the fewest fragments, because most of the processor time of
an exchange does not depend on its size.

Source: docs/results/outer.md, for the order and for each constant.
"""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from gradwire.comms.outer.exchange import OuterExchange
from gradwire.comms.outer.fragments import Fragment, OuterSettings
from gradwire.compressors.base import StateDict
from gradwire.topology.cluster import Cluster

log = logging.getLogger("gradwire")

CHOSEN = ("every", "fragments", "delay")
"""Names of the settings that may be chosen."""

MEASURED_STEPS, START_UP_STEPS = 8, 2
"""Steps before the choice, and how many of them are not measured because they include start-up work."""

FILL = 0.5
"""Share of the link that exchanges may use. On 10 Mbit/s, ranks waited 2 % of the time when exchanges used 0.52 of the
link (every 5, waterfill2), and trained at 0.80 of their speed when they used all of it (every 5, int4)."""

LEAST_TURNS = 3
"""Smallest ratio of `every` to a delay of more than one step. Every 5 with delay 4 was no better than every 30 with
delay 1; with delay 2 it ended slightly worse than plain DDP."""

MOST_EVERY = 500
"""Largest `every`, also for slower links: the largest that was published (arXiv 2311.08105, section 3)."""

ALONE_EVERY = 30
"""`every` of a single worker, which sends nothing."""

TRIPS = 4
"""Number of one-way latencies in an exchange: in each of its two stages the receiver's ready message, and the data."""


@dataclass(frozen=True, slots=True)
class OuterLink:
    """Time of an exchange on the link between workers.

    Attributes:
        wire_seconds: Time for the whole model at the link's rate, for the bytes that leave a worker; as many arrive.
        trip_seconds: Latency of one exchange, whatever its size.
    """

    wire_seconds: float
    trip_seconds: float

    @classmethod
    def of(cls, cluster: Cluster, nbytes: float) -> "OuterLink":
        """Returns the times of an exchange on the links between the outermost units (nodes, racks or regions).

        Args:
            cluster: Placement of the ranks, with given, measured or assumed link rates.
            nbytes: Payload of the whole model in bytes, of all ranks of a node together.
        """
        link, workers = cluster.levels[cluster.outermost].link, cluster.widest(cluster.outermost)
        return cls(2 * (workers - 1) / workers * nbytes / link.bytes_per_second, TRIPS * link.alpha_seconds)


def choose(
    link: OuterLink, step_seconds: float, parameters: int, given: Mapping[str, int] | None = None, least_every: int = 1
) -> tuple[int, int, int]:
    """Chooses `every`, `fragments` and `delay`.

    Args:
        link: Times on the link between the workers.
        step_seconds: Duration of a step of the slowest worker, without exchanges.
        parameters: Number of parameter tensors; the number of fragments is at most that.
        given: Settings of the user by name; they stay as they are.
        least_every: Lower limit of `every`, unless that is given.

    Returns:
        (every, fragments, delay). If the given `every`, or any up to `MOST_EVERY`, is too small for the link, the delay
        is the longest that costs little quality, and ranks will wait for exchanges.
    """
    # The smallest `every` for which the link is not too full.
    fixed = dict(given or {})
    wire = link.wire_seconds
    least = max(least_every, fixed.get("fragments", 1) * max(fixed.get("delay", 1), 1))
    every = fixed.get("every")
    least = max(least, min(math.ceil(wire / (FILL * step_seconds)), MOST_EVERY))
    choices = [every] if every is not None else range(least, max(MOST_EVERY, least) + 1)
    # For each `every`, try all numbers of fragments, with the shortest delay in which a fragment arrives.
    for number in choices:
        fitting = []
        for fragments in [fixed["fragments"]] if "fragments" in fixed else range(1, min(number, parameters) + 1):
            needed = max(1, math.ceil((wire / fragments + link.trip_seconds) / step_seconds))
            delay = fixed.get("delay", needed)
            late = "delay" not in fixed and delay > 1 and LEAST_TURNS * delay > number
            if fragments * delay <= number and wire <= FILL * number * step_seconds and not late:
                fitting.append((delay, number % fragments > 0, fragments))
        if fitting:
            delay, _, fragments = min(fitting)
            return number, fragments, delay
    # No schedule fits: take the largest `every` and the longest acceptable delay.
    number = choices[-1]
    fragments = fixed.get("fragments", min(LEAST_TURNS, number, parameters, number // max(fixed.get("delay", 1), 1)))
    longest = min(number // fragments, max(1, number // LEAST_TURNS))
    return number, fragments, fixed.get("delay", longest)


class ScheduleSelection:
    """Measures the first steps, and then chooses missing settings together with all other ranks.

    Workers exchange nothing before the choice: the anchors stay at the common start.

    Args:
        exchange: Exchanges whose settings are chosen; its other settings stay.
        given: Settings of the user, by name.
        link: Returns the times of an exchange on the link; called at the choice.
        cut: Divides the model into fragments for given settings.

    Attributes:
        is_made: True once the settings are chosen.
        reason: Reason of the choice, as a sentence; empty before.
    """

    def __init__(
        self,
        exchange: OuterExchange,
        given: Mapping[str, int],
        link: Callable[[], OuterLink],
        cut: Callable[[OuterSettings], Sequence[Fragment]],
    ) -> None:
        self.is_made = False
        self.reason = ""
        self._exchange = exchange
        self._given = dict(given)
        self._link = link
        self._cut = cut
        self._before: tuple[OuterSettings, tuple[Fragment, ...]] | None = None
        self._ends: deque[float] = deque(maxlen=MEASURED_STEPS + 1 - START_UP_STEPS)

    def step_ended(self) -> None:
        """Counts a step and measures its duration; after `MEASURED_STEPS` steps all ranks choose the missing settings.

        Raises:
            RuntimeError: A rank did not join the choice within the time-out.
        """
        self._exchange.steps += 1
        self._ends.append(time.perf_counter())
        if self._exchange.steps >= MEASURED_STEPS:
            self.make()

    def make(self) -> None:
        """Chooses the missing settings now, together with all ranks, for the slowest rank's median duration of a step.

        They are used from now on, and rank 0 logs them. If no rank has ended three steps yet, of which two durations
        are known, the ranks choose nothing.

        Raises:
            RuntimeError: A rank did not join within the time-out.
        """
        exchange, link = self._exchange, self._link()
        seconds = [after - before for before, after in pairwise(self._ends)]
        own = statistics.median(seconds) if len(seconds) > 1 else 0.0
        # The slowest rank's values count, so that all ranks choose the same.
        measured = exchange.averaging.agreement.gather([own, link.wire_seconds, link.trip_seconds])
        step, wire, trips = (max(column) for column in zip(*measured, strict=True))
        if step == 0.0:
            return
        names = sum(len(fragment.names) for fragment in exchange.fragments)
        least = exchange.settings.warmup_every
        found = choose(OuterLink(wire, trips), step, names, self._given, least)
        self.reason = (
            f"a step takes {1e3 * step:.3g} ms, all of an exchange {1e3 * wire:.3g} ms at the link's rate and "
            f"{1e3 * trips:.3g} ms of latency"
        )
        self._adopt(dict(zip(CHOSEN, found, strict=True)))
        if exchange.averaging.agreement.rank == 0:
            log.info("Outer exchanges %s: %s", describe(exchange.settings), self.reason)

    def load(self, state: StateDict | Exception) -> StateDict | Exception:
        """Takes the settings that a saved run has chosen, unless some are chosen already. All ranks call it.

        Settings that the user gave stay as they are.

        Args:
            state: State of `OuterExchange.state_dict` with the settings; or the error because of which this rank has
                none.

        Returns:
            `state`; or a ValueError if the states of the ranks have different settings, or this one was saved before
            settings were chosen and here they are chosen. `OuterExchange.load_state_dict` raises a returned error on
            all ranks.
        """
        saved: dict[str, int] = {}
        if not isinstance(state, Exception) and state.get("chosen"):
            saved = {name: value for name in CHOSEN if isinstance(value := state.get(name), int)} | self._given
        saved_on_ranks = self._exchange.averaging.agreement.gather(sorted(saved.items()))
        if isinstance(state, Exception):
            return state
        if any(each != saved_on_ranks[0] for each in saved_on_ranks) or len(saved) not in (0, len(CHOSEN)):
            return ValueError(
                "`state` was saved with other settings on another rank, or before they were chosen there, or does not "
                "fit there; wanted states that all ranks saved in one call"
            )
        if self.is_made and not saved:
            return ValueError(
                "`state` was saved before settings were chosen, and here they are; wanted a new Outer for it"
            )
        if saved and not self.is_made:
            self._before = self._exchange.settings, self._exchange.fragments
            self._adopt(saved)
            self.reason = "as in the state that was loaded"
        return state

    def loaded(self, *, refused: bool) -> None:
        """Ends what `load` has begun: keeps the saved settings, or restores those from before it.

        Args:
            refused: Whether the exchange has refused the state, so that the settings are restored.
        """
        if refused and self._before is not None:
            self._exchange.adopt(*self._before)
            self.is_made, self.reason = False, ""
        self._before = None

    @torch.no_grad()
    def _adopt(self, chosen: Mapping[str, int]) -> None:
        """Uses the chosen settings from now on: divides the model into fragments for them, and sets `is_made`.

        Each parameter keeps its anchor: the value, common to all workers, from which its progress is counted.

        Args:
            chosen: `every`, `fragments` and `delay`, by name.
        """
        exchange = self._exchange
        every, fragments, delay = (chosen[name] for name in CHOSEN)
        settings = replace(exchange.settings, every=every, fragments=fragments, delay=delay)
        anchors = {
            name: view
            for fragment in exchange.fragments
            for name, view in zip(fragment.names, fragment.views(fragment.anchor), strict=True)
        }
        parts = tuple(self._cut(settings))
        for fragment in parts:
            for name, view in zip(fragment.names, fragment.views(fragment.anchor), strict=True):
                view.copy_(anchors[name])
        exchange.adopt(settings, parts)
        self.is_made = True


def describe(settings: OuterSettings) -> str:
    """Returns the schedule of the exchanges as a phrase."""
    pieces = "in one piece" if settings.fragments == 1 else f"in {settings.fragments} fragments"
    often = f"every {settings.every} steps" if settings.every > 1 else "at every step"
    return f"{often} {pieces}, delay {settings.delay}"
