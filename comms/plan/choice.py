"""Which compressor each layer gets: the shortest step whose error stays within a budget.

A step hands gradients over layer by layer while the backward pass runs, and the network takes them one after the other.
With a_l the moment at which layer l is there and t_l(c) how long it occupies what limits it under compressor c, the
network is through with it at

    D_l = max(D_{l-1}, a_l) + t_l(c_l)

and the step's end is D of the last layer. Of all choices with sum_l E_l(c_l) <= budget, E being squared errors, the one
with the smallest D is found by a dynamic program over (layer, error so far): a smaller D_l with no more error is never
worse, whatever follows. Errors are counted in parts of the budget; what has been chosen is added up exactly before it
is returned.

What is measured and predicted is not exact, so the program is not believed blindly (`choose_robustly`): it plans for
transfers that take longer than predicted, so that what hides does so with a margin; a second compressor in a
transfer costs its messages; and where nothing is to be gained that the model could tell, the best compressor
everywhere is taken.

Source: the dynamic program over layers and rounded errors: Alimohammadi et al., L-GreCo, MLSys 2024 (arXiv 2210.17357),
section 3, there for bytes; a timeline as the objective: Wang et al., Espresso, EuroSys 2023, section 4.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

ERROR_PARTS = 1024
"""Parts of the budget that errors are counted in: of 500 layers, 250 parts are lost to rounding up at worst, and
what they are worth is looked for once more afterwards."""

TOLERANCE = 0.005
"""Share by which choices may differ and count as equally fast: the least error wins, so what hides stays exact."""


MARGIN = 1.25
"""How many times as long transfers may take as predicted without what hides coming to light. Rates that were measured
while the machine was shared were off by up to so much."""

MINIMUM_GAIN = 0.10
"""A choice that differs from layer to layer replaces the best compressor everywhere where it is predicted to take so
much less time, and so does another compressor everywhere the one that the budget names. Steps were predicted up to so
much too short for one compressor beside another (`bench/studies/layer_choice.py speed`, 2026-11-22)."""


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """What each candidate would cost a layer.

    Attributes:
        arrival: When the backward pass hands its gradient over, in seconds from the first one.
        seconds: For each candidate, how long the layer occupies what limits it.
        errors: For each candidate the squared error; inf where it is no choice. The first candidate is exact: 0.
        transfer: Number of the transfer that the layer travels in; layers of one follow each other. -1: it is alone.
    """

    arrival: float
    seconds: tuple[float, ...]
    errors: tuple[float, ...]
    transfer: int = -1


def finish(layers: Sequence[LayerCosts], choice: Sequence[int], mixing_seconds: float = 0.0) -> float:
    """When the last layer is through, in seconds from the first gradient.

    Args:
        layers: In the order in which they travel.
        choice: The candidate of each.
        mixing_seconds: What each candidate of a transfer but the first costs besides: its messages.
    """
    done, transfer, used = 0.0, -1, {-1}
    for layer, number in zip(layers, choice, strict=True):
        done = max(done, layer.arrival) + layer.seconds[number]
        if layer.transfer != transfer or transfer < 0:
            transfer, used = layer.transfer, {number}
        elif number not in used:
            used.add(number)
            done += mixing_seconds
    return done


def total_error(layers: Sequence[LayerCosts], choice: Sequence[int]) -> float:
    """The squared errors of a choice, added up."""
    return sum(layer.errors[number] for layer, number in zip(layers, choice, strict=True))


def choose(layers: Sequence[LayerCosts], budget: float) -> list[int]:
    """The candidate of each layer with which the step is shortest within the budget.

    Args:
        layers: In the order in which they travel; the first candidate of each has no error.
        budget: Of the squared errors together, >= 0.

    Returns:
        A number for each layer. Their errors never add up to more than `budget`; of choices that are as good within
        `TOLERANCE`, the one with the smallest error.
    """
    if not layers:
        return []
    best = _program(layers, budget) if budget > 0.0 else [0] * len(layers)
    return _lean(layers, _improve(layers, best, budget), budget)


def choose_robustly(
    layers: Sequence[LayerCosts], budget: float, mixing_seconds: float = 0.0, named: int | None = None
) -> list[int]:
    """The candidate of each layer, where arrivals, prices and rates are known roughly: as `choose`, but for these.

    All transfers are planned `MARGIN` times as long; transfers whose layers would gain less by different candidates
    than their messages cost have one; and a candidate everywhere within the budget is left only for `MINIMUM_GAIN`,
    but for transfers that hide: these become exact as a whole.

    Args:
        layers: As for `choose`.
        budget: As for `choose`.
        mixing_seconds: As for `finish`.
        named: The candidate that the budget is the error of: another one everywhere has to beat it.

    Returns:
        A number for each layer. Their errors never add up to more than `budget`. As predicted, and also if all
        transfers take `MARGIN` times as long, the step is no longer than with any candidate everywhere within the
        budget (and exact where it is no choice); with `named`, no longer than with that one, and with no other
        candidate everywhere would it be shorter by `MINIMUM_GAIN`.
    """
    if not layers:
        return []
    slower = [replace(each, seconds=tuple(MARGIN * seconds for seconds in each.seconds)) for each in layers]
    timelines = ((layers, mixing_seconds), (slower, MARGIN * mixing_seconds))
    mixed = _unmix(slower, choose(slower, budget), budget, MARGIN * mixing_seconds)
    uniform = min(
        (each for each in uniform_choices(layers) if total_error(layers, each) <= budget),
        key=lambda each: finish(layers, each, mixing_seconds),
    )

    def beats(choice: Sequence[int], other: Sequence[int]) -> bool:
        return all(
            finish(timeline, choice, mixing) <= (1 - MINIMUM_GAIN) * finish(timeline, other, mixing)
            for timeline, mixing in timelines
        )

    if named is not None and not beats(uniform, own := uniform_choices(layers)[named]):
        uniform = own
    if beats(mixed, uniform):
        return mixed
    return _expose(slower, uniform, MARGIN * mixing_seconds)


def uniform_choices(layers: Sequence[LayerCosts]) -> list[list[int]]:
    """Each candidate everywhere where it may be chosen, else exact."""
    return [
        [number if layer.errors[number] < math.inf else 0 for layer in layers]
        for number in range(len(layers[0].errors))
    ]


def _transfers(layers: Sequence[LayerCosts]) -> list[list[int]]:
    """The places of the layers of each transfer."""
    found: list[list[int]] = []
    for place, layer in enumerate(layers):
        if found and layer.transfer >= 0 and layers[found[-1][0]].transfer == layer.transfer:
            found[-1].append(place)
        else:
            found.append([place])
    return found


def _unmix(layers: Sequence[LayerCosts], choice: list[int], budget: float, mixing_seconds: float) -> list[int]:
    """Gives a transfer one candidate where that is faster, as fewer messages are worth more than fewer bytes."""
    best, error = finish(layers, choice, mixing_seconds), total_error(layers, choice)
    for places in _transfers(layers):
        if mixing_seconds <= 0.0 or len({choice[place] for place in places}) < 2:
            continue
        for number in range(len(layers[0].seconds)):
            trial = list(choice)
            for place in places:
                if layers[place].errors[number] < math.inf:
                    trial[place] = number
            if (errs := total_error(layers, trial)) > budget:
                continue
            ends = finish(layers, trial, mixing_seconds)
            if (ends, errs) < (best, error):
                choice, best, error = trial, ends, errs
    return choice


def _expose(layers: Sequence[LayerCosts], choice: list[int], mixing_seconds: float) -> list[int]:
    """Makes transfers exact that hide even so."""
    best = finish(layers, choice, mixing_seconds)
    for places in sorted(_transfers(layers), key=lambda each: -sum(layers[at].errors[choice[at]] for at in each)):
        trial = list(choice)
        for place in places:
            trial[place] = 0
        if trial != choice and finish(layers, trial, mixing_seconds) <= best:
            choice = trial
    return choice


def _program(layers: Sequence[LayerCosts], budget: float) -> list[int]:
    done = np.zeros(ERROR_PARTS + 1)
    taken = np.zeros((len(layers), ERROR_PARTS + 1), dtype=np.int16)
    kept = [_useful(layer, budget) for layer in layers]
    parts = [
        [math.ceil(layer.errors[candidate] / budget * ERROR_PARTS) for candidate in useful]
        for layer, useful in zip(layers, kept, strict=True)
    ]
    for number, (layer, useful, needed) in enumerate(zip(layers, kept, parts, strict=True)):
        began = np.maximum(done, layer.arrival)
        done = began + layer.seconds[useful[0]]
        taken[number] = useful[0]
        for candidate, part in zip(useful[1:], needed[1:], strict=True):
            ends = began[: ERROR_PARTS + 1 - part] + layer.seconds[candidate]
            better = ends < done[part:]
            np.copyto(done[part:], ends, where=better)
            np.copyto(taken[number, part:], candidate, where=better)
    at = int(np.searchsorted(-done, -float(done[-1]) * (1 + TOLERANCE), side="left"))
    found = []
    for number in range(len(layers) - 1, -1, -1):
        candidate = int(taken[number, at])
        found.append(candidate)
        at -= parts[number][kept[number].index(candidate)]
    return found[::-1]


def _useful(layer: LayerCosts, budget: float) -> list[int]:
    """The candidates that are within the budget and faster than each one with no more error; the exact one first."""
    found, fastest = [0], layer.seconds[0]
    for number in sorted(range(1, len(layer.seconds)), key=lambda each: (layer.errors[each], layer.seconds[each])):
        if layer.errors[number] <= budget and layer.seconds[number] < fastest:
            found.append(number)
            fastest = layer.seconds[number]
    return found


def _slacks(layers: Sequence[LayerCosts], choice: Sequence[int]) -> list[float]:
    """The time by which each layer could take longer before the step does, the others as they are."""
    ends, done = [], 0.0
    for layer, number in zip(layers, choice, strict=True):
        done = max(done, layer.arrival) + layer.seconds[number]
        ends.append(done)
    slack, room = [0.0] * len(layers), 0.0
    for place in range(len(layers) - 1, -1, -1):
        slack[place] = room
        if place:
            room += max(0.0, layers[place].arrival - ends[place - 1])
    return slack


def _improve(layers: Sequence[LayerCosts], choice: list[int], budget: float) -> list[int]:
    """Spends what rounding has left of the budget where it saves most time for its error."""
    choice, error = list(choice), total_error(layers, choice)
    useful = [_useful(layer, budget) for layer in layers]
    slacks = _slacks(layers, choice)
    offers = []
    for place, layer in enumerate(layers):
        now = choice[place]
        for candidate in useful[place]:
            saved, costs = layer.seconds[now] - layer.seconds[candidate], layer.errors[candidate] - layer.errors[now]
            if saved > 0.0 and costs > 0.0 and slacks[place] <= 0.0:
                offers.append((saved / costs, place, candidate))
    for _, place, candidate in sorted(offers, reverse=True):
        layer, now = layers[place], choice[place]
        costs = layer.errors[candidate] - layer.errors[now]
        if layer.seconds[candidate] < layer.seconds[now] and error + costs <= budget:
            choice[place] = candidate
            error += costs
    return choice


def _lean(layers: Sequence[LayerCosts], choice: list[int], budget: float) -> list[int]:
    """Makes layers exact, or as good as possible, whose time does not show; within the budget as counted exactly."""
    choice, slacks = list(choice), _slacks(layers, choice)
    for place in sorted(range(len(layers)), key=lambda each: -layers[each].errors[choice[each]]):
        layer, now = layers[place], choice[place]
        if not now or slacks[place] <= 0.0:
            continue
        for number in _useful(layer, budget):
            better = layer.errors[number] < layer.errors[now]
            if better and layer.seconds[number] - layer.seconds[now] <= slacks[place]:
                choice[place] = number
                slacks = _slacks(layers, choice)
                break
    while total_error(layers, choice) > budget:  # rounding of floats alone: the parts are rounded up
        worst = max(range(len(layers)), key=lambda each: layers[each].errors[choice[each]])
        choice[worst] = 0
    return choice
