"""Selection of `every`, `fragments` and `delay` that the user omits, from the link and the length of a step.

An exchange of a fragment is to be through in `delay` steps, and all of them together are to fill no more than half of
the link. Of what that allows the smallest `every` is taken, which costs the least quality, then the shortest delay,
then the fewest fragments, because most of what an exchange costs a processor does not depend on its size.

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
from gradwire.comms.session import AveragingSession
from gradwire.compressors.base import StateDict
from gradwire.topology.cluster import Cluster

log = logging.getLogger("gradwire")

CHOSEN = ("every", "fragments", "delay")
"""The settings that may be chosen."""

LOOK_STEPS, START_UP_STEPS = 8, 2
"""Steps that are measured before the choice, and how many of them hold start-up."""

FILL = 0.5
"""Share of the link that exchanges may take. On 10 Mbit/s ranks waited for 2 % of the time where exchanges took 0.52 of
the link (every 5 in waterfill2), and went at 0.80 of their speed where they took all of it (every 5 in int4)."""

LEAST_TURNS = 3
"""A delay of more than one step is at most `every` over this: every 5 with a delay of 4 was no better than every 30
with one of 1, with one of 2 it ended just outside of plain DDP's quality."""

MOST_EVERY = 500
"""What was published at most (arXiv 2311.08105, section 3): a link that cannot carry that gets it nevertheless."""

ALONE_EVERY = 30
"""`every` of a single worker, which exchanges nothing: it looks seldom at what it has learned."""

TRIPS = 4
"""One-way trips of an exchange: a message in each of its two stages, and the receiver's word before it."""


@dataclass(frozen=True, slots=True)
class OuterLink:
    """What an exchange takes on the link between workers.

    Attributes:
        wire_seconds: For the whole model at the link's rate, all that leaves a worker counted; as much arrives.
        trip_seconds: For the trips of one exchange, whatever its size.
    """

    wire_seconds: float
    trip_seconds: float

    @classmethod
    def of(cls, cluster: Cluster, nbytes: float) -> "OuterLink":
        """The link that crosses most, of a whole model.

        Args:
            cluster: With links as given, measured or assumed.
            nbytes: Of the model's payload, of all ranks of a node together.
        """
        link, workers = cluster.levels[cluster.outermost].link, cluster.widest(cluster.outermost)
        return cls(2 * (workers - 1) / workers * nbytes / link.bytes_per_second, TRIPS * link.alpha_seconds)


def choose(
    link: OuterLink, step_seconds: float, parameters: int, given: Mapping[str, int] | None = None, least_every: int = 1
) -> tuple[int, int, int]:
    """Chooses `every`, `fragments` and `delay`.

    Args:
        link: Between the workers.
        step_seconds: Of the slowest worker, without exchanges.
        parameters: Of the model: there are no more fragments.
        given: Those that the user has said, by name; they are taken as they are.
        least_every: No fewer steps.

    Returns:
        The three. Where no `every` up to `MOST_EVERY`, or the given one, is enough for the link, the delay is the
        longest that costs little, and ranks will wait.
    """
    said = dict(given or {})
    wire = link.wire_seconds
    least = max(least_every, said.get("fragments", 1) * max(said.get("delay", 1), 1))
    every = said.get("every")
    least = max(least, min(math.ceil(wire / (FILL * step_seconds)), MOST_EVERY))
    choices = [every] if every is not None else range(least, max(MOST_EVERY, least) + 1)
    for number in choices:
        fitting = []
        for fragments in [said["fragments"]] if "fragments" in said else range(1, min(number, parameters) + 1):
            needed = max(1, math.ceil((wire / fragments + link.trip_seconds) / step_seconds))
            delay = said.get("delay", needed)
            late = "delay" not in said and delay > 1 and LEAST_TURNS * delay > number
            if fragments * delay <= number and wire <= FILL * number * step_seconds and not late:
                fitting.append((delay, number % fragments > 0, fragments))
        if fitting:
            delay, _, fragments = min(fitting)
            return number, fragments, delay
    number = choices[-1]
    fragments = said.get("fragments", min(LEAST_TURNS, number, parameters, number // max(said.get("delay", 1), 1)))
    longest = min(number // fragments, max(1, number // LEAST_TURNS))
    return number, fragments, said.get("delay", longest)


class ScheduleSelection:
    """Measures the first steps, and selects settings for them with all other ranks.

    Until then workers exchange nothing: fragments keep where all workers have begun.

    Args:
        exchange: Whose settings are chosen; those that it has stand for what is not chosen.
        session: Of its communicator.
        given: Settings that the user has said, by name.
        link: What an exchange takes here, asked for at the choice.
        cut: The model's parameters, cut into the fragments that settings ask for.

    Attributes:
        is_made: Whether it was made.
        reason: Of the choice, in words; empty before.
    """

    def __init__(
        self,
        exchange: OuterExchange,
        session: AveragingSession,
        given: Mapping[str, int],
        link: Callable[[], OuterLink],
        cut: Callable[[OuterSettings], Sequence[Fragment]],
    ) -> None:
        self.is_made = False
        self.reason = ""
        self._exchange = exchange
        self._session = session
        self._given = dict(given)
        self._link = link
        self._cut = cut
        self._before: tuple[OuterSettings, tuple[Fragment, ...]] | None = None
        self._ends: deque[float] = deque(maxlen=LOOK_STEPS + 1 - START_UP_STEPS)

    def step_ended(self) -> None:
        """Notes a step; after the last of those that are measured all ranks choose."""
        self._exchange.steps += 1
        self._ends.append(time.perf_counter())
        if self._exchange.steps >= LOOK_STEPS:
            self.make()

    def make(self) -> None:
        """Chooses now, on all ranks; where none has seen three steps, later.

        Raises:
            RuntimeError: A rank has not come within the time-out.
        """
        exchange, link = self._exchange, self._link()
        seconds = [after - before for before, after in pairwise(self._ends)]
        own = statistics.median(seconds) if len(seconds) > 1 else 0.0
        said = exchange.averaging.agreement.gather([own, link.wire_seconds, link.trip_seconds])
        step, wire, trips = (max(column) for column in zip(*said, strict=True))
        if step == 0.0:
            return
        names = sum(len(fragment.names) for fragment in exchange.fragments)
        least = exchange.settings.warmup_every
        found = choose(OuterLink(wire, trips), step, names, self._given, least)
        self.reason = (
            f"a step takes {1e3 * step:.3g} ms, all of an exchange {1e3 * wire:.3g} ms at the link's rate and "
            f"{1e3 * trips:.3g} ms of trips"
        )
        self._take_up(dict(zip(CHOSEN, found, strict=True)))
        if exchange.averaging.agreement.rank == 0:
            log.info("Outer exchanges %s: %s", describe(exchange.settings), self.reason)

    def load(self, state: StateDict | Exception) -> StateDict | Exception:
        """Takes up what a saved run has chosen; what the user has said wins. All ranks call it.

        Args:
            state: Of `OuterExchange.state_dict`, and the settings; or why this rank has none.

        Returns:
            The state; or why no rank can load its own.
        """
        saved: dict[str, int] = {}
        if not isinstance(state, Exception) and state.get("chosen"):
            saved = {name: value for name in CHOSEN if isinstance(value := state.get(name), int)} | self._given
        said = self._exchange.averaging.agreement.gather(sorted(saved.items()))
        if isinstance(state, Exception):
            return state
        if any(each != said[0] for each in said) or len(saved) not in (0, len(CHOSEN)):
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
            self._take_up(saved)
            self.reason = "as in the state that was loaded"
        return state

    def loaded(self, *, refused: bool) -> None:
        """Gives up, where the state was refused, what `load` has taken up of it."""
        if refused and self._before is not None:
            self._exchange.settings, self._exchange.fragments = self._before
            self._exchange.be_watched(self._session)
            self.is_made, self.reason = False, ""
        self._before = None

    @torch.no_grad()
    def _take_up(self, chosen: Mapping[str, int]) -> None:
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
        exchange.settings, exchange.fragments = settings, parts
        exchange.be_watched(self._session)
        self.is_made = True


def describe(settings: OuterSettings) -> str:
    """When workers exchange."""
    pieces = "in one piece" if settings.fragments == 1 else f"in {settings.fragments} fragments"
    often = f"every {settings.every} steps" if settings.every > 1 else "at every step"
    return f"{often} {pieces}, delay {settings.delay}"
