"""`compressor="auto"`: measures what each compressor would leave out, and gives each layer the one it is worth.

Until the first choice all layers travel exactly, and the moments at which their gradients arrive are noted. Then, every
so often, one step measures: each rank encodes its own part of each layer with every candidate, without sending any of
it, and notes the squared norms of what is left out, of the gradient, of the sum, and of what the layer's own compressor
really holds back. At the end of that step rank 0 gathers the numbers, chooses (comms/plan/choice.py), and all ranks
follow. What a candidate would hold back in the long run is predicted from what one payload leaves out
(`outstanding_share`); where it is in use, the prediction is corrected by what is really outstanding.

The moments of arrival, the prices of the codecs, the links' rates and the steps from one choice to the next are found
once, before the first choice, and are part of the state: what is chosen later depends on the gradients alone, also in a
run that goes on from a checkpoint.
"""

import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any, cast

from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.communicator import Communicator
from gradwire.comms.compression import Compression
from gradwire.comms.links.probe import line_up
from gradwire.comms.plan.choice import LayerCosts, choose_robustly, finish, total_error, uniform_choices
from gradwire.comms.plan.codec_price import (
    ELEMENT_NBYTES,
    alone,
    codec_seconds,
    measured_price,
    square_layout,
    wire_ratio,
)
from gradwire.comms.plan.cost import EXACT, CodecPrice
from gradwire.comms.plan.payloads import gpu_memory
from gradwire.comms.plan.planner import ByteCosts, byte_costs
from gradwire.comms.report import Choices, LayerChoice, Report
from gradwire.comms.run.launches import Bucket
from gradwire.comms.step.listeners import EndedStep, StepListener
from gradwire.comms.streams import Mark
from gradwire.compressors.adaptive import NARROW, Adaptive, LayerNumbers, outstanding_share, takes_whole
from gradwire.compressors.base import Layout, Slice, planned

log = logging.getLogger("gradwire")

MEASURING_SHARE = 0.01
"""Share of the time of all steps that measuring may take: steps between two measurements grow until it is no more."""

PROFILED_STEPS = 20
"""Last steps whose arrivals are kept for the first choice."""

PRICED_NBYTES = 8 << 20
"""Gradient that the candidates are timed on."""

PLANNED_SHARE = 0.9
"""Share of a numeric budget that is planned with: what a codec leaves out changes by some percent from step to step."""

MOST_OUTSTANDING = 1.0
"""Squared norm that a layer may hold back, over that of its gradient, whatever the budget: beyond it the layer learns
from gradients of steps long ago. Source: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, theorem II, whose
slow-down grows with that."""

EARLIER, SOONEST = 8, 10
"""The second choice comes after an eighth of the steps between two, but not before so many; then they double. What low
ranks and sparse values hold back is known when they are in use: noise that they never send adds up for some steps."""

FORGOTTEN = {True: 0.5, False: 0.9}
"""Power that a correction upwards is taken to at each measurement while its compressor is not in use. A quantizer holds
back no more than the bound in the long run: it looked worse beside a gradient that had become small, or with what the
compressor before it had left. Low ranks and sparse values are tried again rarely."""

MOST_CORRECTION = 100.0
"""Largest factor that corrects a prediction downwards: a layer in its first steps is not believed more."""

WORST_CORRECTION = 1e6
"""Largest factor that corrects one upwards: no budget has room for more, and it is forgotten within some choices."""


@dataclass(slots=True)
class Numbers:
    """The numbers of one layer, of all ranks together: `LayerNumbers`, added up.

    Attributes:
        gradient: The squared norm of what the ranks contribute.
        total: That of the sum, once for each rank of the group.
        left_out: That of what one payload of each candidate would leave out.
        outstanding: That of what the layer's own compressor holds back after the step.
    """

    gradient: float = 0.0
    total: float = 0.0
    left_out: list[float] = field(default_factory=list)
    outstanding: float = 0.0


class LayerChooser(StepListener):
    """One rank's part in the choice, for one model. Every rank calls the same methods at the same steps.

    Args:
        communicator: That the model's gradients travel through.
        compression: Its compressor is an `Adaptive`.
        consensus: All its ranks'.
    """

    def __init__(self, communicator: Communicator, compression: Compression, consensus: Agreement) -> None:
        self._communicator = communicator
        self._compression = compression
        self._adaptive = cast(Adaptive, compression.compressor)
        self._consensus = consensus
        self._steps: list[tuple[tuple[Layout, ...], tuple[Mark, ...]]] = []
        self._ended: list[float] = []
        self._narrow: set[str] = set()
        self.choices: Choices | None = None

    def step_began(self, steps: int) -> None:
        """Says whether the step measures; before its first bucket travels. The host waits for no device."""
        adaptive = self._adaptive
        adaptive.measuring = adaptive.step + 1 >= adaptive.next_plan and not self._compression.flushing
        if adaptive.measuring:
            adaptive.measuring_seconds = 0.0
            self._recut()

    def _recut(self) -> None:
        """Has shards be cut anew from the next launch on, as a step that measures wants them whole, or no more."""
        if self._adaptive.measures_matrices:
            self._communicator.state_loaded()

    def step_ended(self, step: EndedStep) -> None:
        """Takes in a step; where it has measured, chooses anew. Nothing is in flight on a CPU."""
        buckets = step.buckets
        self._note(buckets)
        self._narrow = {
            item.name
            for bucket in buckets
            if bucket.flat.dtype in NARROW and bucket.layout is not None
            for item in bucket.layout.slices
        }
        if not self._adaptive.measuring:
            return
        self._adaptive.measuring = False
        self._recut()
        with self._communicator.alone():
            self._compression.settle()
            numbers = self._adaptive.collect()
        self._communicator.rejoin()
        if self._adaptive.step < self._adaptive.next_plan:
            return  # the step was not finite, on all ranks alike: it changes nothing, and the next one measures
        self._plan(numbers, step.transfers)

    def add_to(self, report: Report) -> Report:
        """The report, with the choices."""
        return replace(report, choices=self.choices)

    def _note(self, buckets: Sequence[Bucket]) -> None:
        self._ended = [*self._ended[-PROFILED_STEPS:], time.perf_counter()]
        if "arrivals" in self._adaptive.notes or not buckets:
            return
        marks = tuple(bucket.times.arrived for bucket in buckets if bucket.times.arrived is not None)
        layouts = tuple(bucket.layout for bucket in buckets if bucket.layout is not None)
        if len(layouts) == len(marks) == len(buckets):
            self._steps = [*self._steps[-PROFILED_STEPS:], (layouts, marks)]

    def _arrivals(self) -> dict[str, float]:
        """When each parameter's gradient comes, in seconds from the first bucket's: medians of steps like the last."""
        if not self._steps:
            return {}
        layouts, between = self._steps[-1][0], self._communicator.clock.between
        alike = [[between(marks[0], mark) for mark in marks] for other, marks in self._steps if other == layouts]
        usual = [statistics.median(times) for times in zip(*alike, strict=True)]
        return {item.name: at for layout, at in zip(layouts, usual, strict=True) for item in layout.slices}

    def _prices(self) -> tuple[list[list[float]], float]:
        """Seconds per byte, seconds per call and rounds of each candidate, and whether payloads are exchanged.

        And the share of a core that this rank had while all of them computed.
        """
        communicator, specs = self._communicator, self._adaptive.specs
        nodes = self._group_size()
        layout = square_layout(PRICED_NBYTES, side=256)
        shares: list[float] = []

        def noted(processor_seconds: float, share: float) -> float:
            shares.append(share)
            return processor_seconds

        prices = []
        for spec in specs:
            price = EXACT
            if spec.name != EXACT.name and communicator.device.type == "cpu":
                price = measured_price(
                    spec.name, layout, nodes, together=lambda: line_up(communicator), agree=noted, make=spec.make
                )
            elif spec.name != EXACT.name:
                memory = gpu_memory(communicator.cluster)
                price = CodecPrice(spec.name, 1.0, codec_seconds(spec.name.partition("+")[0], memory))
            prices.append(price)
        # One share of a core for all of them: what one codec is worth beside another is not a matter of its neighbours.
        share = statistics.median(shares) if shares else 1.0
        return [
            [alone(each.seconds_per_byte, share), alone(each.call_seconds, share), float(each.rounds), each.exchanged]
            for each in prices
        ], share

    def _group_size(self) -> int:
        cluster = self._communicator.cluster
        return cluster.size if self._communicator.routes.chooser.compressed_name() == "flat" else len(cluster.nodes)

    def _plan(self, numbers: Mapping[str, LayerNumbers], transfers: Sequence[Layout]) -> None:
        adaptive = self._adaptive
        first = "arrivals" not in adaptive.notes
        prices, core = self._prices() if first else (None, 1.0)
        gaps = [after - before for before, after in zip(self._ended, self._ended[1:], strict=False)]
        own = {
            "numbers": {name: list(astuple(each)) for name, each in numbers.items()},
            "arrivals": self._arrivals() if first else None,
            "prices": prices,
            "core": core,
            "measuring": adaptive.measuring_seconds,
            "step": statistics.median(gaps) if gaps else 0.0,
        }
        self.follow(self._consensus.decide(own, lambda ranks: self.decide(ranks, transfers)))

    def follow(self, decided: object) -> None:
        """Takes over what rank 0 has chosen, from the next step on; all ranks alike.

        Args:
            decided: What `decide` has returned.
        """
        adaptive, device = self._adaptive, self._communicator.device
        verdict = cast(dict[str, Any], decided)
        notes = adaptive.notes = dict(verdict["notes"])
        wait = int(notes["wait"])
        notes["soon"] = soon = min(wait, 2 * int(notes["soon"]) if "soon" in notes else max(SOONEST, wait // EARLIER))
        adaptive.next_plan = adaptive.step + soon
        with self._communicator.alone():
            changed = adaptive.choose(verdict["choice"], device)
        self._communicator.rejoin()
        if changed:
            self._communicator.state_loaded()
        shown = verdict["shown"]
        self.choices = Choices(
            **(
                shown
                | {
                    "step": adaptive.step,
                    "layers": tuple(LayerChoice(**row) for row in shown["layers"]),
                    "uniform": tuple((str(name), seconds, error) for name, seconds, error in shown["uniform"]),
                }
            )
        )
        log.info("%s\n%d layers change", self.choices, len(changed))

    # On rank 0.

    def decide(self, ranks: Sequence[object], transfers: Sequence[Layout]) -> object:
        """The choice, from what all ranks have measured.

        Args:
            ranks: What each has to say.
            transfers: Which parameters travel together, in the order of the launches.

        Returns:
            For `follow`, of plain values.
        """
        adaptive = self._adaptive
        every = [cast(dict[str, Any], each) for each in ranks]
        notes: dict[str, Any] = dict(adaptive.notes)
        if "arrivals" not in notes:
            arrivals: dict[str, float] = {}
            for each in every:
                for name, at in each["arrivals"].items():
                    arrivals[name] = max(arrivals.get(name, 0.0), at)
            notes["arrivals"] = arrivals
            prices = zip(*(each["prices"] for each in every), strict=True)
            notes["prices"] = [[max(column) for column in zip(*rows, strict=True)] for rows in prices]
            notes["core"] = max(each["core"] for each in every)
            notes["costs"] = [asdict(costs) for costs in self._byte_costs(notes["prices"])]
            notes["corrections"] = {}
        began = time.perf_counter()
        merged = _merge([each["numbers"] for each in every], len(adaptive.specs))
        corrections = corrected(notes["corrections"], merged, adaptive, self._group_size())
        notes["corrections"] = corrections
        layers, items = self._layers(transfers, notes, merged)
        budget, gradient = self._budget(layers, merged)
        message = max(each["message_seconds"] for each in notes["costs"])
        choice = choose_robustly(layers, budget, message, self._named)
        chosen = {
            item.name: number for item, number in zip(items, choice, strict=True) if number and item.name in merged
        }
        took = time.perf_counter() - began
        measuring = max(each["measuring"] for each in every)
        if "wait" not in notes:
            step = max(each["step"] for each in every)
            notes["wait"] = max(adaptive.plan_every, math.ceil(measuring / (MEASURING_SHARE * step)) if step else 0)
        shown = {
            "layers": [asdict(row) for row in self._rows(items, layers, choice, merged, budget)],
            "error": total_error(layers, choice) / gradient if gradient else 0.0,
            "budget": budget / gradient if gradient else 0.0,
            "seconds": finish(layers, choice),
            "uniform": self._uniform(layers, gradient),
            "planning_seconds": took,
            "measuring_seconds": measuring,
        }
        return {"choice": chosen, "notes": notes, "shown": shown}

    def _byte_costs(self, prices: Sequence[Sequence[float]]) -> list[ByteCosts]:
        cluster, name = self._communicator.cluster, self._communicator.routes.chooser.compressed_name()
        if name is None:
            return [ByteCosts(0, 0.0, (), 0.0) for _ in prices]
        return [byte_costs(cluster, name, price) for price in _as_prices(prices, self._adaptive)]

    def _layers(
        self, transfers: Sequence[Layout], notes: Mapping[str, Any], merged: Mapping[str, Numbers]
    ) -> tuple[list[LayerCosts], list[Slice]]:
        """What each layer would cost with each candidate, in the order in which they travel."""
        adaptive, size = self._adaptive, self._group_size()
        prices = _as_prices(notes["prices"], adaptive)
        costs = [_byte_costs_of(each) for each in notes["costs"]]
        layers: list[LayerCosts] = []
        items: dict[str, Slice] = {}
        latest = 0.0
        for transfer, layout in enumerate(transfers):
            arrivals = [notes["arrivals"].get(item.name, latest) for item in layout.slices]
            latest = max([latest, *arrivals])
            for item in layout.slices:
                if item.name in items:  # a further part of one that was cut: its first part stands for all of it
                    continue
                found = merged.get(item.name) if adaptive.is_planned(item) else None
                numel, wider = math.prod(item.shape), 2.0 if item.name in self._narrow else 1.0
                whole = items[item.name] = Slice(item.name, item.shape, 0, 0, numel)
                lone, part = Layout((whole,)), numel / max(numel, layout.numel, 1)
                seconds, errors = [], []
                for number, (candidate, price, cost) in enumerate(zip(adaptive.candidates, prices, costs, strict=True)):
                    ratio = wider * wire_ratio(candidate, lone, size) if number else 1.0
                    matrix = takes_whole(candidate, whole)
                    nbytes = ELEMENT_NBYTES / wider * numel
                    price = replace(price, seconds_per_byte=wider * price.seconds_per_byte)
                    seconds.append(cost.seconds(nbytes, ratio, price, part=part, whole=matrix, core=notes["core"]))
                    error = 0.0 if not number else math.inf
                    # of a matrix that travels in several transfers no part is one
                    if number and found is not None and (item.numel == numel or not matrix):
                        error = self._error(item.name, number, found, notes["corrections"])
                        own = adaptive.specs[number].text == adaptive.budget
                        error = error if own or error <= MOST_OUTSTANDING * found.gradient else math.inf
                    errors.append(error)
                layers.append(LayerCosts(latest, tuple(seconds), tuple(errors), transfer))
        return layers, list(items.values())

    def _error(self, name: str, number: int, found: Numbers, corrections: Mapping[str, Any]) -> float:
        text = self._adaptive.specs[number].text
        if found.gradient <= 0.0:  # it took no part in the step that measured: nothing is known of it
            return math.inf
        return predicted_error(self._adaptive, number, found, self._group_size()) * float(
            corrections.get(name, {}).get(text, 1.0)
        )

    def _budget(self, layers: Sequence[LayerCosts], merged: Mapping[str, Numbers]) -> tuple[float, float]:
        """What the squared errors may add up to, and the squared norm of the gradients that are planned."""
        adaptive = self._adaptive
        gradient = sum(each.gradient for each in merged.values())
        if not isinstance(adaptive.budget, str):
            return PLANNED_SHARE * adaptive.budget * gradient, gradient
        assert self._named is not None
        return total_error(layers, uniform_choices(layers)[self._named]), gradient

    @property
    def _named(self) -> int | None:
        """The number of the candidate that the budget names; None where the budget is a number."""
        texts = [spec.text for spec in self._adaptive.specs]
        return texts.index(self._adaptive.budget) if isinstance(self._adaptive.budget, str) else None

    def _uniform(self, layers: Sequence[LayerCosts], gradient: float) -> list[tuple[str, float, float]]:
        """Each candidate everywhere where one may be chosen: (name, seconds, squared error over the gradient's)."""
        found = []
        for spec, choice in zip(self._adaptive.specs, uniform_choices(layers), strict=True):
            error = total_error(layers, choice)
            found.append((spec.text, finish(layers, choice), error / gradient if gradient else 0.0))
        return found

    def _rows(
        self,
        items: Sequence[Slice],
        layers: Sequence[LayerCosts],
        choice: Sequence[int],
        merged: Mapping[str, Numbers],
        budget: float,
    ) -> list[LayerChoice]:
        adaptive, size, nodes = self._adaptive, self._group_size(), len(self._communicator.cluster.nodes)
        ends, slack = finish(layers, choice), budget - total_error(layers, choice)
        found = []
        for place, (item, layer, number) in enumerate(zip(items, layers, choice, strict=True)):
            wider = 2.0 if item.name in self._narrow else 1.0
            exact = 2 * (nodes - 1) / nodes * ELEMENT_NBYTES / wider * item.numel
            ratio = wider * wire_ratio(adaptive.candidates[number], Layout((item,)), size) if number else 1.0
            norm = merged[item.name].gradient if item.name in merged else 0.0
            error = layer.errors[number] / norm if norm else 0.0
            why = _why(adaptive, item, layers, choice, place, ends, slack)
            found.append(LayerChoice(item.name, adaptive.specs[number].text, error, exact * ratio, exact, why))
        return found


def _why(
    adaptive: Adaptive,
    item: Slice,
    layers: Sequence[LayerCosts],
    choice: Sequence[int],
    place: int,
    ends: float,
    slack: float,
) -> str:
    layer, number = layers[place], choice[place]
    if not adaptive.is_planned(item):
        return "as a rule says"
    faster = [other for other, seconds in enumerate(layer.seconds) if seconds < layer.seconds[number]]
    beyond = [other for other in faster if layer.errors[other] - layer.errors[number] > slack]
    limit = f"; {adaptive.specs[beyond[0]].text} would leave the budget" if beyond else ""
    if number:
        otherwise = list(choice)
        otherwise[place] = 0
        saved = finish(layers, otherwise) - ends
        return f"saves {saved * 1e3:.3g} ms of the step{limit}"
    if not faster:
        return "exact is as fast as anything"
    saved = 0.0
    if len(beyond) < len(faster):
        otherwise = list(choice)
        otherwise[place] = min(faster, key=lambda other: layer.seconds[other])
        saved = ends - finish(layers, otherwise)
    if len(beyond) < len(faster) or saved <= 0.0:
        return "its transfer hides: nothing would save time"
    return f"exact{limit}"


def predicted_error(adaptive: Adaptive, number: int, found: Numbers, group_size: int) -> float:
    """The squared error that a layer would have with a candidate in the long run, on all ranks together.

    What a rank leaves out of its contribution; where owners encode the sum once more, what they leave out of that; each
    with what is still outstanding of earlier steps, where it is kept.

    Args:
        adaptive: Whose candidate.
        number: Which.
        found: Of the layer.
        group_size: Ranks that each shard is summed over: all of them have seen the whole sum.
    """
    candidate, left_out = adaptive.candidates[number], found.left_out[number]
    keeps = planned(candidate).keeps_left_out
    if found.gradient <= 0.0:
        return 0.0
    share = outstanding_share(left_out, found.gradient) if keeps else left_out / found.gradient
    encoded = found.gradient + (found.total / group_size if planned(candidate).two_stage else 0.0)
    return share * encoded


def _merge(ranks: Sequence[Mapping[str, Sequence[Any]]], candidates: int) -> dict[str, Numbers]:
    merged: dict[str, Numbers] = {}
    for numbers in ranks:
        for name, (gradient, total, left_out, outstanding) in numbers.items():
            each = merged.setdefault(name, Numbers(left_out=[0.0] * candidates))
            each.gradient += gradient
            each.total += total
            each.outstanding += outstanding
            each.left_out = [a + b for a, b in zip(each.left_out, left_out, strict=True)]
    return merged


def corrected(
    corrections: Mapping[str, Mapping[str, float]], merged: Mapping[str, Numbers], adaptive: Adaptive, group_size: int
) -> dict[str, dict[str, float]]:
    """What is really outstanding over what was predicted, for each layer and the candidates that it has had."""
    sound = {spec.text: planned(each).two_stage for spec, each in zip(adaptive.specs, adaptive.candidates, strict=True)}
    found = {
        name: {text: ratio ** FORGOTTEN[sound[text]] if ratio > 1.0 else ratio for text, ratio in each.items()}
        for name, each in corrections.items()
    }
    for name, numbers in merged.items():
        number = adaptive.candidate_of(name)
        predicted = predicted_error(adaptive, number, numbers, group_size) if number else 0.0
        ratio = numbers.outstanding / predicted if predicted > 0.0 else 0.0
        if 0.0 < ratio < math.inf:  # else, as where a residual has overflowed, it says nothing of the compressor
            ratio = min(max(ratio, 1 / MOST_CORRECTION), WORST_CORRECTION)
            found.setdefault(name, {})[adaptive.specs[number].text] = ratio
    return found


def _as_prices(rows: Sequence[Sequence[float]], adaptive: Adaptive) -> list[CodecPrice]:
    return [
        CodecPrice(spec.text, 1.0, per_byte, call, round(rounds), bool(exchanged))
        for spec, (per_byte, call, rounds, exchanged) in zip(adaptive.specs, rows, strict=True)
    ]


def _byte_costs_of(plain: dict[str, Any]) -> ByteCosts:
    others = tuple((int(resource), float(seconds)) for resource, seconds in plain["others"])
    return ByteCosts(**(plain | {"others": others}))
