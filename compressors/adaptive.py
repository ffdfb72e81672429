"""The compressor "auto": one of several for each layer, changed while training runs, under a budget for the error.

What is chosen is decided elsewhere (comms/autotune/choose.py), on all ranks alike. Here are the candidates, what they
leave out of a layer (measured now and then), and the change from one to another: what the old one has held back is
added to the layer's next gradient, so that nothing is lost.
"""

import ast
import json
import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from gradwire.compressors.base import (
    Collective,
    Compressor,
    HeldRun,
    Layout,
    Member,
    Request,
    Slice,
    StateDict,
    StateValue,
    check_factor,
    check_gradient,
    equal_bounds,
)
from gradwire.compressors.codecs.cast import CAST_DTYPES, CastCodec
from gradwire.compressors.dense import Dense
from gradwire.compressors.leftover import Leftover
from gradwire.compressors.matrices import cut_between
from gradwire.compressors.powersgd import PowerSGD
from gradwire.compressors.registry import Option, make, options_of
from gradwire.compressors.residual import Piece
from gradwire.compressors.routed import CHOSEN, Routed, saved_by
from gradwire.compressors.rules import DEFAULT_RULES, Rule
from gradwire.compressors.stateful import Stateful
from gradwire.compressors.two_stage import SHARD_ALIGN, Residuals, two_stage

AUTO = "auto"
EXACT = "none"
PREFIX = CHOSEN
"""The prefix of the entries of a state dict that are not a candidate's."""

CANDIDATES = (
    "bf16",
    "int8",
    "waterfill5",
    "waterfill4",
    "waterfill3",
    "int4",
    "powersgd(rank=4)",
    "powersgd+int8(rank=4)",
    "powersgd+int8(rank=16)",
)
"""What layers may get besides `none`. The only place where they are listed: another codec becomes a candidate here.

Not among them: "dgc", as momentum or Adam behind a hundredth of the gradient costs accuracy that a squared error does
not show; "onebit", which wants a momentum of its own, and holds back more than a gradient; and "fp16", whose range a
gradient may leave between two measurements, where "bf16" takes as many bytes."""

SETTLED: Mapping[str, Option] = {"warmup_steps": 0, "momentum": 0.0}
"""Options of every candidate that has them: the dense start is over when something is chosen, and momentum stays with
the optimizer, whichever compressor a layer has."""

_SPEC = re.compile(r"\s*([A-Za-z0-9_+.-]+)\s*(?:\((.*)\))?\s*")


NARROW: Mapping[torch.dtype, str] = {dtype: name for name, dtype in CAST_DTYPES.items()}
"""What exact layers travel in where it is the dtype of their gradients, by torch's name."""


class Exact(Dense):
    """An exact sum: gradients of 16 bits travel in 16 bits, and are summed in float32 and rounded once.

    What the ranks contribute has been multiplied with 1 / ranks, say, and has more than 16 bits then, or falls below
    what float16 can hold. So the factor is taken off before the cast, which gives the very bits of the gradient: the
    two roundings to float32 are thousands of times finer than the grid of 16 bits. The owners apply it to the sum, in
    float32 and before the cast back, so that a mean that fits stays finite. With float32 on the wire the same comes
    out but for the order of float32 roundings, in twice the bytes: the bucket that the sum is written to has 16 bits.
    """

    @property
    def by_element(self) -> bool:
        """See `Stateful.by_element`: not so of the candidates that may take its place."""
        return False

    def all_reduce(self, shard: Tensor, layout: Layout, group: Member) -> Iterator[Collective]:
        """See `Compressor.all_reduce`."""
        narrow = NARROW.get(group.dtype)
        if narrow is None or group.size == 1 or not shard.numel():
            yield from super().all_reduce(shard, layout, group)
            return
        check_gradient(shard)
        codec = back = CastCodec(narrow)
        if group.scale != 1.0:
            codec, back = CastCodec(narrow, 1.0 / group.scale), CastCodec(narrow, group.scale)
        yield from two_stage(shard, shard, group, codec, back, Residuals())


@runtime_checkable
class Measurable(Protocol):
    """A compressor that can say what it would leave out of a gradient, without any state."""

    def left_out(self, flat: Tensor, item: Slice) -> Tensor:
        """Returns the squared norm of what one payload leaves out.

        Args:
            flat: 1-D float32, one slice of a shard; not changed.
            item: Which.

        Returns:
            0-dim float64, on the same device.
        """


@dataclass(frozen=True, slots=True)
class CandidateSpec:
    """A candidate as the user writes it.

    Attributes:
        text: `powersgd(rank=2)`: its name in reports and states.
        name: As in `compressor=`.
        options: All that were given, and `SETTLED`.
    """

    text: str
    name: str
    options: Mapping[str, Option] = field(default_factory=dict)

    def make(self) -> Compressor:
        """A new compressor."""
        return make(self.name, self.options)


def parse_candidate(text: str) -> CandidateSpec:
    """Reads `int8`, `powersgd(rank=2)` or `dgc(density=0.01, value_dtype='float16')`.

    Raises:
        ValueError: It is neither; or an unknown compressor or option.
    """
    found = _SPEC.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f"`candidates` has {text!r}; wanted a compressor such as 'int8' or 'powersgd(rank=2)'")
    name, inside = found.group(1), found.group(2)
    given: dict[str, Option] = {}
    try:
        call = ast.parse(f"f({inside or ''})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args:
            raise ValueError("options need names")
        given = {str(each.arg): cast(Option, ast.literal_eval(each.value)) for each in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"`candidates` has {text!r} ({error}); wanted options by name, as in 'powersgd(rank=2)'"
        ) from None
    known = options_of(name)
    return CandidateSpec(text.strip(), name, {key: SETTLED[key] for key in SETTLED if key in known} | given)


def candidates_of(options: Mapping[str, object], budget: str | float) -> tuple[CandidateSpec, ...]:
    """The candidates that the options of "auto" name, `none` first, and the compressor that the budget names.

    Args:
        options: `compressor_options`.
        budget: What stands behind `auto:`.

    Raises:
        ValueError: One is unknown, or the options are.
        TypeError: `candidates` is no sequence of strings.
    """
    given = options.get("candidates", CANDIDATES)
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):
        raise TypeError(f"`candidates` is {given!r}; wanted a sequence of names, as ('bf16', 'int8')")
    texts = [EXACT, *given, *([budget] if isinstance(budget, str) else [])]
    specs = {spec.text: spec for spec in map(parse_candidate, texts)}
    return tuple(specs.values())


def check_auto(options: Mapping[str, object], budget: str | float | None) -> None:
    """Refuses `compressor="auto"` without the user's word on how much error it may make, or with options it lacks.

    Raises:
        ValueError: No budget, one out of range, or an unknown option or candidate.
        TypeError: Neither a name nor a number.
    """
    if budget is None:
        raise ValueError(
            '`compressor` is "auto" and names no budget; wanted your word on how much error it may make: "auto:int8" '
            'for no more than that compressor everywhere, or "auto:1e-3", the squared error over the gradient\'s '
            "squared norm. Without it nothing is made lossy"
        )
    if isinstance(budget, bool) or not isinstance(budget, str | float | int):
        raise TypeError(f'the budget of "auto" is {budget!r}; wanted a compressor\'s name, or a number between 0 and 1')
    if not isinstance(budget, str) and not 0.0 < budget < 1.0:
        raise ValueError(f'`compressor` is "auto:{budget}"; wanted a compressor\'s name, or a number between 0 and 1')
    if isinstance(budget, str) and parse_candidate(budget).name == EXACT:
        raise ValueError('`compressor` is "auto:none"; that is compressor="none"')
    known = ("candidates", "plan_every", "first_plan")
    for key in options:
        if key not in known:
            raise ValueError(
                f"`compressor_options` has {key!r}, which 'auto' does not take; it takes {', '.join(known)}"
            )
    for key, least in (("plan_every", 2), ("first_plan", 2)):
        value = options.get(key, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"`{key}` of compressor 'auto' is {value!r}; wanted a number of steps >= {least}")
    for spec in candidates_of(options, budget):
        if spec.name != EXACT and not isinstance(spec.make(), Measurable):
            raise ValueError(
                f"`candidates` has {spec.text!r}, which cannot say what it leaves out of a gradient; wanted a codec "
                "(register_codec), or a compressor with `left_out`"
            )


def takes_whole(compressor: Compressor, item: Slice) -> bool:
    """Whether a compressor takes a slice as a matrix, which must then lie in one shard."""
    return isinstance(compressor, PowerSGD) and compressor.matrix(item) is not None


def outstanding_share(left_out: float, norm: float) -> float:
    """What stays outstanding in the long run, where each payload leaves out a share of what it encodes.

    With r' = (g + r) - C(g + r) and |r'| <= q |g + r|, |r| tends to at most q / (1 - q) |g|.

    Args:
        left_out: Squared norm of what one payload leaves out.
        norm: Squared norm of what it encodes.

    Returns:
        The squared norm of the residual over that of the gradient; inf where nothing is sent.

    Source: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, lemma 3 (a bounded residual).
    """
    if norm <= 0.0 or left_out <= 0.0:
        return 0.0
    share = (left_out / norm) ** 0.5
    return (share / (1.0 - share)) ** 2 if share < 1.0 else float("inf")


@dataclass(slots=True)
class LayerNumbers:
    """What one rank has measured of one layer in one step; squared norms of its own shards.

    Attributes:
        gradient: Of what it contributes.
        total: Of the sum over the group, as it was received.
        left_out: Of what one payload of each candidate would leave out, in their order.
        outstanding: Of what the layer's own compressor holds back after the step.
    """

    gradient: float
    total: float
    left_out: tuple[float, ...]
    outstanding: float


class Adaptive(Routed):
    """One of several compressors for each parameter that no rule claims; exact until something is chosen.

    Args:
        budget: What stands behind `auto:`.
        options: `candidates`, `plan_every` and `first_plan`.
        rules: The first that matches a parameter decides; such a parameter is never planned.

    Raises:
        ValueError: An unknown compressor or option, or no budget.
        TypeError: A value of the wrong type.
    """

    def __init__(
        self,
        budget: str | float | None,
        options: Mapping[str, object] | None = None,
        rules: Sequence[Rule] = DEFAULT_RULES,
    ) -> None:
        options = options or {}
        check_auto(options, budget)
        assert budget is not None
        self.budget = budget.strip() if isinstance(budget, str) else budget
        self.plan_every = cast(int, options.get("plan_every", 100))
        self.first_plan = cast(int, options.get("first_plan", 6))
        self.specs = candidates_of(options, budget)
        self.candidates = (Exact(), *(spec.make() for spec in self.specs[1:]))
        self.name = AUTO
        self.main = self.candidates[0]
        self.rules = tuple(rules)
        others = [self.main if rule.compressor == EXACT else make(rule.compressor, rule.options) for rule in self.rules]
        self.routes = (*self.candidates, *others)
        self._known = {}
        self.step = 0
        """Finite steps so far."""
        self.measuring = False
        """Whether the all-reduces of this step measure what each candidate would leave out."""
        self.measuring_seconds = 0.0
        """Processor time that the last measurement took; of the host alone where the gradients are on a GPU."""
        self.next_plan = self.first_plan
        """The step that measures, and after which it is chosen anew."""
        self.notes: dict[str, object] = {}
        """What the choice goes by besides the gradients, of plain values: part of the state."""
        self._choice: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._wide: set[str] = set()
        """Parameters that have not travelled since another compressor held back of them, on all ranks alike: shards
        that one is in send exact layers in float32, as what was held back needs its bits."""
        self._wide_undecided: set[str] = set()
        self._leftover = Leftover()
        self._numels: dict[str, int] = {}
        self._measured: dict[tuple[str, int], list[Tensor]] = {}
        self._measured_lock = threading.Lock()

    def candidate_of(self, name: str) -> int:
        """The number of a parameter's candidate; 0 is exact."""
        return self._choice.get(name, 0)

    def is_planned(self, item: Slice) -> bool:
        """Whether no rule claims the parameter."""
        return not any(rule.matches(item) for rule in self.rules)

    def route_of(self, layout: Layout, index: int) -> int:
        """See `Routed.route_of`."""
        item = layout.slices[index]
        self._shapes[item.name] = item.shape
        number = next((number for number, rule in enumerate(self.rules) if rule.matches(item)), None)
        found = self.candidate_of(item.name) if number is None else len(self.candidates) + number
        return next(first for first, other in enumerate(self.routes) if other is self.routes[found])

    @property
    def measures_matrices(self) -> bool:
        """Whether shards are cut otherwise in a step that measures: matrices that may get a low rank lie in one."""
        return any(isinstance(each, PowerSGD) for each in self.candidates)

    def partition(self, layout: Layout, parts: int) -> tuple[int, ...]:
        """See `Compressor.partition`: as a low-rank compressor wants it where one is in use or measured, else equal."""
        low_rank = [item for item in layout.slices if self._keeps_whole(item)]
        if low_rank:
            return cut_between(layout, parts, low_rank.__contains__)
        return equal_bounds(layout.numel, parts, SHARD_ALIGN)

    def _keeps_whole(self, item: Slice) -> bool:
        """Whether the parameter's compressor takes it as a matrix, or one does that is measured now."""
        number = next((number for number, rule in enumerate(self.rules) if rule.matches(item)), None)
        used = self.routes[self.candidate_of(item.name) if number is None else len(self.candidates) + number]
        others = self.candidates if self.measuring and number is None else ()
        return any(takes_whole(each, item) for each in (used, *others))

    def all_reduce(self, shard: Tensor, layout: Layout, group: Member) -> Iterator[Request]:
        """See `Compressor.all_reduce`."""
        measuring = self.measuring and group.size > 1
        if measuring:
            self._measure(shard, layout)
        self._leftover.add(shard, layout)
        if not self._wide.isdisjoint(item.name for item in layout.slices):
            group = replace(group, dtype=torch.float32)
        yield from super().all_reduce(shard, layout, group)
        if measuring:
            for item in layout.slices:
                numbers = self._measured.get((item.name, item.parameter_start))
                if numbers is not None:
                    numbers.append(_squared_norm(shard[item.start : item.stop]))

    def choose(self, choice: Mapping[str, int], device: torch.device) -> list[str]:
        """Gives parameters other compressors, from the next step on; all ranks alike, between two steps.

        What the old ones hold back is added to the next gradients. Routes that were planned before are out of date.

        Args:
            choice: Parameter -> number of its candidate; parameters that are not named become exact.
            device: Of the gradients.

        Returns:
            The parameters that change.
        """
        names = {*choice, *self._choice}
        changed = {name for name in names if choice.get(name, 0) != self.candidate_of(name)}
        for number, compressor in enumerate(self.candidates):
            leaving = {name for name in changed if self.candidate_of(name) == number}
            if leaving:
                self._leftover.take_back(compressor, leaving, self._shapes, device)
        self._wide |= {name for name in changed if self.candidate_of(name)}
        self._choice = {name: number for name, number in choice.items() if number}
        self._known.clear()
        return sorted(changed)

    def collect(self) -> dict[str, LayerNumbers]:
        """Takes out what the step that measured has found; the host waits for the device.

        Returns:
            By parameter, for those that this rank has a part of; empty where a gradient is not finite.
        """
        with self._measured_lock:
            measured, self._measured = self._measured, {}
        complete = {key: numbers for key, numbers in measured.items() if len(numbers) == len(self.candidates) + 1}
        if not complete:
            return {}
        rows = torch.stack([torch.stack([each.double() for each in numbers]) for numbers in complete.values()]).cpu()
        count = len(self.candidates) - 1
        if not bool(rows[:, [0, 1 + count]].isfinite().all()):
            return {}
        rows.nan_to_num_(nan=float("inf"), posinf=float("inf"))  # a candidate whose range the gradient leaves
        found: dict[str, LayerNumbers] = {}
        for (name, _), row in zip(complete, rows.tolist(), strict=True):
            old = found.get(name, LayerNumbers(0.0, 0.0, (0.0,) * (1 + count), 0.0))
            left_out = (0.0, *(a + b for a, b in zip(old.left_out[1:], row[1 : 1 + count], strict=True)))
            found[name] = LayerNumbers(old.gradient + row[0], old.total + row[1 + count], left_out, 0.0)
        for name, value in self._outstanding(found).items():
            found[name].outstanding = value
        return found

    def _outstanding(self, names: Mapping[str, object]) -> dict[str, float]:
        sums: dict[str, Tensor] = {}
        for number, compressor in enumerate(self.candidates):
            own = {name for name in names if self.candidate_of(name) == number}
            if own and isinstance(compressor, Stateful):
                sums.update(compressor.held_squares(own))
        return {name: float(value) for name, value in sums.items()}

    def travelled(self, transfers: Sequence[Layout], finite: bool | Tensor, left_alone: Collection[str] = ()) -> None:
        """See `Planned.travelled`: what was held back of the others has gone."""
        super().travelled(transfers, finite, left_alone)
        self._leftover.pass_over(left_alone)
        names = {item.name for layout in transfers for item in layout.slices}.difference(left_alone)
        self._wide -= self._wide_undecided
        self._wide_undecided = self._wide & names if isinstance(finite, Tensor) else set()
        if not isinstance(finite, Tensor) and finite:
            self._wide -= names

    def end_step(self, finite: bool | Tensor) -> None:
        """See `Compressor.end_step`."""
        super().end_step(finite)
        self._leftover.end_step(finite)
        self.step += 1 if isinstance(finite, Tensor) else int(finite)

    def retract_step(self) -> None:
        """See `Compressor.retract_step`."""
        super().retract_step()
        self._leftover.retract_step()
        self._wide_undecided = set()
        self.step -= 1

    def rescale(self, factor: float | Tensor) -> None:
        """See `Compressor.rescale`."""
        check_factor(factor)
        super().rescale(factor)
        self._leftover.store.rescale(factor)

    def bind_model(self, numels: Mapping[str, int]) -> None:
        """See `Compressor.bind_model`."""
        super().bind_model(numels)
        self._numels = dict(numels)

    def flush(self, shard: Tensor, layout: Layout) -> None:
        """See `Compressor.flush`."""
        super().flush(shard, layout)
        self._leftover.add(shard, layout)

    def held(self) -> Iterator[HeldRun]:
        """See `Compressor.held`."""
        yield from super().held()
        for name, start, numel in self._leftover.store.runs():
            yield HeldRun(name, start, numel)

    def export(self, layout: Layout, device: torch.device) -> Tensor:
        """See `Compressor.export`; the last row is what the compressors before have held back."""
        return torch.cat([super().export(layout, device), self._leftover.store.export(layout, device).unsqueeze(0)])

    def adopt(self, layout: Layout, rows: Tensor) -> None:
        """See `Compressor.adopt`."""
        super().adopt(layout, rows[:-1])
        self._leftover.adopt(layout, rows[-1])

    def state_dict(self) -> StateDict:
        """See `Compressor.state_dict`; what is chosen is in it."""
        state = super().state_dict()
        chosen = {name: self.specs[number].text for name, number in sorted(self._choice.items())}
        state[PREFIX + "step"] = self.step
        state[PREFIX + "next_plan"] = self.next_plan
        state[PREFIX + "wide"] = json.dumps([sorted(self._wide), sorted(self._wide_undecided)])
        state[PREFIX + "candidates"] = json.dumps([spec.text for spec in self.specs])
        state[PREFIX + "choice"] = json.dumps(chosen)
        state[PREFIX + "notes"] = json.dumps(self.notes, sort_keys=True)
        for piece in self._leftover.store.pieces():
            state[f"{PREFIX}leftover/{piece.start}/{piece.name}"] = piece.value.clone()
        return state

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """See `Compressor.load_state_dict`.

        Raises:
            ValueError: The state is of other candidates, other rules or another model; nothing was changed.
        """
        own = {key[len(PREFIX) :]: value for key, value in state.items() if key.startswith(PREFIX)}
        texts = [spec.text for spec in self.specs]
        missing = {"step", "next_plan", "wide", "candidates", "choice", "notes"} - own.keys()
        if missing:
            if len(own) == 0:
                raise ValueError(
                    f"`state` belongs to compressor {saved_by(state)}, this one is 'auto': load it into the compressor "
                    "that saved it, or start without it"
                )
            raise ValueError(f"`state` lacks {', '.join(sorted(missing))} of compressor 'auto': it is damaged")
        if (saved := json.loads(str(own["candidates"]))) != texts:
            raise ValueError(f"`state` has the candidates {saved}, this compressor {texts}: use those that saved it")
        chosen: dict[str, str] = json.loads(str(own["choice"]))
        pieces = []
        for key, value in own.items():
            if key.startswith("leftover/"):
                _, start, name = key.split("/", 2)
                if not isinstance(value, Tensor) or value.dim() != 1 or value.dtype != torch.float32:
                    raise ValueError(f"`state[{PREFIX + key!r}]` is no 1-D float32 tensor")
                pieces.append(Piece(name, int(start), value.clone()))
        strangers = {*chosen, *(piece.name for piece in pieces)} - self._numels.keys() if self._numels else set()
        if strangers:
            raise ValueError(f"`state` is of parameter {min(strangers)!r}, which the model does not have")
        choice = {name: texts.index(text) for name, text in chosen.items()}
        step, next_plan = int(own["step"]), int(own["next_plan"])
        wide, undecided = (set(names) for names in json.loads(str(own["wide"])))
        notes = dict(json.loads(str(own["notes"])))
        super().load_state_dict({key: value for key, value in state.items() if not key.startswith(PREFIX)})
        self._choice, self.step, self.next_plan, self.notes = choice, step, next_plan, notes
        self._wide, self._wide_undecided = wide, undecided
        self._known.clear()
        self._leftover.replace(pieces)
        self._measured.clear()

    def _measure(self, shard: Tensor, layout: Layout) -> None:
        began = time.thread_time()
        for item in layout.slices:
            if self.is_planned(item):
                flat = shard[item.start : item.stop]
                numbers = [_squared_norm(flat)]
                numbers += _left_out(self.candidates[1:], flat, item)
                with self._measured_lock:
                    self._measured[item.name, item.parameter_start] = numbers
        with self._measured_lock:
            self.measuring_seconds += time.thread_time() - began


def _left_out(candidates: Sequence[Compressor], flat: Tensor, item: Slice) -> list[Tensor]:
    """What one payload of each would leave out; low ranks of one size are found once."""
    factors: dict[tuple[int, int], Tensor] = {}
    found = []
    for each in candidates:
        if isinstance(each, PowerSGD):
            key = each.rank, each.random_seed
            if key not in factors:
                factors[key] = each.measured_factor(flat, item)
            found.append(each.left_out_beside(factors[key], flat, item))
        else:
            found.append(cast(Measurable, each).left_out(flat, item))
    return found


def _squared_norm(flat: Tensor) -> Tensor:
    """0-dim float64."""
    squared: Tensor = torch.linalg.vector_norm(flat, dtype=torch.float64).square()
    return squared
