"""Several compressors side by side: the rules say which one compresses a parameter."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.compressors.base import (
    Collective,
    Compressor,
    CompressorTraits,
    Layout,
    Member,
    Request,
    Slice,
    StateDict,
    StateRun,
    StateValue,
    check_factor,
    check_finite,
    check_gradient,
    traits_of,
)
from gradwire.compressors.dense import Dense
from gradwire.compressors.residual import ElementStore
from gradwire.compressors.rules import DEFAULT_RULES, Rule, rules_from
from gradwire.compressors.stateful import Stateful

if TYPE_CHECKING:
    from gradwire.compressors.registry import Option

SEPARATOR = "|"
"""Separator between the number of a compressor and a key of its own in a state dict. No parameter's name, which is an
attribute path, holds it."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a shard that one compressor handles."""

    layout: Layout
    """Layout of the selected slices, moved together, as the compressor sees them."""
    runs: tuple[tuple[int, int], ...]
    """Runs (start, stop) of the selected slices in the shard; adjacent slices are one run."""

    sizes: tuple[int, ...] = ()
    """Lengths of gaps and runs in turn: the gap before the first run, the first run, the next gap, and so on; empty for
    one run."""

    def gather(self, shard: Tensor) -> Tensor:
        """Returns the selected elements of `shard`, 1-D: a view if they are one run, else a copy; see `scatter`."""
        if len(self.runs) == 1:
            start, stop = self.runs[0]
            return shard if stop - start == shard.numel() else shard[start:stop]
        return torch.cat(self._views(shard))

    def scatter(self, part: Tensor, shard: Tensor) -> None:
        """Writes `part`, which `gather` has returned, back to its places in `shard`; a view is there already."""
        if len(self.runs) > 1:
            torch._foreach_copy_(self._views(shard), part.split_with_sizes(self.sizes[1::2]))

    def _views(self, shard: Tensor) -> tuple[Tensor, ...]:
        """Returns views of `shard`, one for each of the runs, of which there are several."""
        return shard[: self.runs[-1][1]].split_with_sizes(self.sizes)[1::2]


def _selection(slices: Sequence[tuple[int, int, int]], layout: Layout) -> Selection:
    """Returns the selection of some slices of a shard.

    Args:
        slices: (index of the slice in `layout`, start, stop) of each, ascending.
        layout: Layout of the shard.
    """
    moved: list[Slice] = []
    runs: list[tuple[int, int]] = []
    at = 0
    for index, start, stop in slices:
        moved.append(replace(layout.slices[index], start=at))
        at += stop - start
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    sizes, at = [], 0
    for start, stop in runs if len(runs) > 1 else ():
        sizes += [start - at, stop - start]
        at = stop
    return Selection(Layout(tuple(moved)), tuple(runs), tuple(sizes))


class Composite(CompressorTraits):
    """Compresses parameters that match a rule with the rule's compressor, and all others with a main one.

    Args:
        name: Name of the main compressor.
        options: Options of the main compressor; None takes the defaults.
        rules: Rules, of which the first that matches a parameter decides.

    Attributes:
        main: The main compressor.
        rules: Rules, of which the first that matches a parameter decides.
        choices: The main compressor, then that of each rule; one may occur several times.

    Raises:
        ValueError: An unknown compressor or option, or a value out of range.
        TypeError: An option's value of the wrong type.
    """

    def __init__(
        self, name: str, options: "Mapping[str, Option] | None" = None, rules: Sequence[Rule] = DEFAULT_RULES
    ) -> None:
        self.name = name
        from gradwire.compressors.registry import make  # here: it knows every compressor

        self.main = make(name, options)
        self.rules = tuple(rules)
        exact = Dense(momentum=getattr(self.main, "momentum", 0.0), nesterov=getattr(self.main, "nesterov", False))
        others = [exact if rule.compressor == "none" else make(rule.compressor, rule.options) for rule in self.rules]
        self.choices: tuple[Compressor, ...] = (self.main, *others)
        self._known: dict[Layout, list[tuple[Compressor, Selection]]] = {}

    @property
    def by_element(self) -> bool:
        """True if each element is compressed by itself in every compressor, so that a bucket may be cut anywhere."""
        return all(isinstance(each, Stateful) and each.by_element for each in self.choices)

    def every(self) -> tuple[Compressor, ...]:
        """Returns the main compressor, then that of each rule; one compressor may occur several times."""
        return self.choices

    def choice_of(self, layout: Layout, index: int) -> int:
        """Returns the index in `choices` of the compressor of a slice; 0 is the main one.

        Rules that share a compressor have the index of the first of them. A bucket whose slices are ordered by this
        index is not copied, because the slices of each compressor are then one run.

        Args:
            layout: Layout of the shard.
            index: Index of the slice in it.
        """
        item = layout.slices[index]
        number = next((number for number, rule in enumerate(self.rules, 1) if rule.matches(item)), 0)
        return next(first for first, other in enumerate(self.choices) if other is self.choices[number])

    def partition(self, layout: Layout, parts: int) -> tuple[int, ...]:
        """Cuts a bucket into shards where the main compressor cuts it."""
        return self.main.partition(layout, parts)

    def wire_nbytes(self, layout: Layout, group_size: int) -> int:
        """Returns the bytes that one rank sends for a shard: the sum of what all compressors send of it."""
        return sum(
            compressor.wire_nbytes(selection.layout, group_size) for compressor, selection in self._split(layout)
        )

    def parts(self, layout: Layout) -> list[tuple[Compressor, Layout]]:
        """Returns the compressors of a shard, and which of its parameters each gets, moved together."""
        return [(compressor, selection.layout) for compressor, selection in self._split(layout)]

    def all_reduce(self, shard: Tensor, layout: Layout, group: Member) -> Iterator[Request]:
        """Sums each parameter of `shard` by its compressor; the collectives of all are in flight together."""
        if layout not in self._known:
            check_gradient(shard)
        split = self._split(layout)
        if len(split) == 1 and split[0][1].layout is layout:  # one compressor has all of it
            return split[0][0].all_reduce(shard, layout, group)
        return _side_by_side(shard, split, group)

    def end_step(self, finite: bool | Tensor) -> None:
        """Ends a step of every compressor: commits or drops their staged state; see `Compressor.end_step`.

        Args:
            finite: Whether the step's averages were finite on all ranks; a bool, or a 0-dim bool tensor.

        Raises:
            TypeError: `finite` is a tensor, but no 0-dim bool one; nothing was changed.
        """
        check_finite(finite)
        for compressor in self._compressors():
            compressor.end_step(finite)

    def prepare(self, device: torch.device) -> None:
        """Compiles and loads the kernels of all compressors for a device."""
        for each in self._compressors():
            traits_of(each).prepare(device)

    def shared(self) -> list[ElementStore]:
        """Returns the stores of all compressors whose values must be equal on all nodes."""
        return [store for each in self._compressors() if isinstance(each, Stateful) for store in each.shared()]

    def residual_square(self) -> float:
        """Returns the squared norm of this rank's residuals in all compressors; blocks until the device is done."""
        return sum(each.residual_square() for each in self._compressors() if isinstance(each, Stateful))

    def report_lines(self) -> list[str]:
        """Returns one line for each compressor that has something to report."""
        return [note for each in self._compressors() if isinstance(each, Stateful) and (note := each.note())]

    def exchanged(self, layouts: Sequence[Layout], finite: bool | Tensor, unused: Collection[str] = ()) -> None:
        """Passes on to every compressor what was exchanged in the step; see `CompressorTraits.exchanged`.

        Args:
            layouts: Layouts that were exchanged, those of all ranks.
            finite: Whether all averages of the step are finite.
            unused: Names of parameters whose averages are not used.
        """
        for each in self._compressors():
            traits_of(each).exchanged(layouts, finite, unused)

    def retract_step(self) -> None:
        """Takes the last step out of the count of every compressor; see `Compressor.retract_step`."""
        for compressor in self._compressors():
            compressor.retract_step()

    def rescale(self, factor: float | Tensor) -> None:
        """Multiplies residuals and momenta of all compressors by `factor`; see `Compressor.rescale`.

        Args:
            factor: A number, or a 0-dim float32 or float64 tensor.

        Raises:
            TypeError: `factor` is a tensor, but no 0-dim floating-point one; nothing was changed.
        """
        check_factor(factor)
        for compressor in self._compressors():
            compressor.rescale(factor)

    def bind_model(self, numels: Mapping[str, int]) -> None:
        """Sets the model in all compressors, so that each can refuse another model's state.

        Args:
            numels: Elements of each parameter, by name.
        """
        for compressor in self._compressors():
            compressor.bind_model(numels)

    def flush(self, shard: Tensor, layout: Layout) -> None:
        """Adds the residuals of all compressors to `shard`, in place; see `Compressor.flush`.

        Args:
            shard: 1-D float32, changed in place.
            layout: Places of the parameters in `shard`.
        """
        for compressor, selection in self._split(layout):
            part = selection.gather(shard)
            compressor.flush(part, selection.layout)
            selection.scatter(part, shard)

    def state_runs(self) -> Iterator[StateRun]:
        """Yields the runs of elements that any of the compressors keeps state of."""
        for compressor in self._compressors():
            yield from compressor.state_runs()

    def export(self, layout: Layout, device: torch.device) -> Tensor:
        """Removes and returns the state of the elements of `layout`: the rows of all compressors, one below the other.

        Args:
            layout: Layout of a bucket or a part of one.
            device: Device of the result.

        Returns:
            2-D float32 (sum of the compressors' rows, layout.numel); zero for elements that a compressor does not have.
        """
        split = {id(compressor): selection for compressor, selection in self._split(layout)}
        blocks = []
        for compressor in self._compressors():
            selection = split.get(id(compressor), Selection(Layout(()), ()))
            rows = compressor.export(selection.layout, device)
            block = torch.zeros(len(rows), layout.numel, dtype=torch.float32, device=device)
            for row, target in zip(rows, block, strict=True):
                _spread(row, selection, target)
            blocks.append(block)
        return torch.cat(blocks)

    def adopt(self, layout: Layout, rows: Tensor) -> None:
        """Adds exported rows to the state of each compressor, which takes as many of them as it exports.

        Args:
            layout: Layout of the elements.
            rows: 2-D float32, as `export` returns them for this layout.
        """
        split = {id(compressor): selection for compressor, selection in self._split(layout)}
        at = 0
        for compressor in self._compressors():
            count = len(compressor.export(Layout(()), rows.device))
            selection = split.get(id(compressor))
            if selection is not None:
                compressor.adopt(
                    selection.layout,
                    torch.stack([selection.gather(row) for row in rows[at : at + count]])
                    if count
                    else rows[:0, : selection.layout.numel],
                )
            at += count

    def state_dict(self) -> StateDict:
        """Returns the state of all compressors; each key begins with the number of the compressor and "|"."""
        return {
            f"{number}{SEPARATOR}{key}": value
            for number, compressor in enumerate(self._compressors())
            for key, value in compressor.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Restores the state of all compressors; if one refuses its part, all get their previous state back.

        Raises:
            ValueError: The state is of other compressors, other rules or another model; nothing was changed.
        """
        compressors = self._compressors()
        parts: list[dict[str, StateValue]] = [{} for _ in compressors]
        for key, value in state.items():
            number, separator, rest = key.partition(SEPARATOR)
            if not separator or not number.isdigit() or int(number) >= len(parts):
                raise ValueError(
                    f"`state` belongs to compressor {saved_by(state)}, this one is {self.name!r} with "
                    f"{len(compressors)} compressors, and {key!r} is no entry of it: load it into the compressor and "
                    "the rules that saved it, or start without it"
                )
            parts[int(number)][rest] = value
        before = [compressor.state_dict() for compressor in compressors]
        try:
            for compressor, part in zip(compressors, parts, strict=True):
                compressor.load_state_dict(part)
        except Exception:  # whatever a file may hold
            for compressor, old in zip(compressors, before, strict=True):
                compressor.load_state_dict(old)
            raise

    def _compressors(self) -> list[Compressor]:
        """Returns every compressor once, in the order of `choices`."""
        return [
            compressor
            for number, compressor in enumerate(self.choices)
            if all(compressor is not other for other in self.choices[:number])
        ]

    def _split(self, layout: Layout) -> list[tuple[Compressor, Selection]]:
        """Returns the compressors that have elements in `layout`, in the order of `choices`, with what each handles."""
        if layout not in self._known:
            places: dict[int, list[tuple[int, int, int]]] = {}
            for index, item in enumerate(layout.slices):
                places.setdefault(self.choice_of(layout, index), []).append((index, item.start, item.stop))
            self._known[layout] = [
                (self.choices[number], _selection(triples, layout)) for number, triples in sorted(places.items())
            ]
        return self._known[layout]


def _side_by_side(shard: Tensor, split: Sequence[tuple[Compressor, Selection]], group: Member) -> Iterator[Request]:
    """Runs several compressors on one shard, in place; yields their next collectives together, so that they overlap."""
    parts = [selection.gather(shard) for _, selection in split]
    running = [
        compressor.all_reduce(part, selection.layout, group)
        for (compressor, selection), part in zip(split, parts, strict=True)
    ]
    while running:
        requests: list[Collective] = []
        still = []
        for steps in running:
            request = next(steps, None)
            if request is not None:
                requests += (request,) if isinstance(request, Collective) else request
                still.append(steps)
        if requests:
            yield tuple(requests)
        running = still
    for (_, selection), part in zip(split, parts, strict=True):
        selection.scatter(part, shard)


def _spread(part: Tensor, selection: Selection, target: Tensor) -> None:
    """Writes the elements of `part` (1-D) to the places of the selection in `target` (1-D, the shard)."""
    at = 0
    for start, stop in selection.runs:
        target[start:stop] = part[at : at + stop - start]
        at += stop - start


def make_composite(
    name: str, options: "Mapping[str, Option] | None" = None, rules: Sequence[Rule | Mapping[str, object]] = ()
) -> Compressor:
    """Returns the compressor that a hook uses: `name` with its options, the user's rules and the default ones.

    Args:
        name: One of `registry.names()`.
        options: Options of that compressor; None takes the defaults.
        rules: The user's rules, before the default ones, which leave biases, norms and tiny parameters dense.

    Raises:
        ValueError: An unknown compressor, option or rule field, or a value out of range.
        TypeError: An option's value of the wrong type.
    """
    from gradwire.compressors.registry import make  # here: as above

    return make(name, options) if name == "none" and not rules else Composite(name, options, rules_from(rules))


def saved_by(state: Mapping[str, StateValue]) -> str:
    """Returns the names of the compressors that have saved a state, for errors: `'int8', 'none'`; `None` if unknown."""
    named = (str(value) for key, value in state.items() if key.rpartition(SEPARATOR)[2] == "compressor")
    return ", ".join(map(repr, dict.fromkeys(named))) or "None"
