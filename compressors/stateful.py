"""Base of compressors with state: staging and commit, saving, loading, migration, rescaling."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import (
    CompressorTraits,
    Layout,
    StateDict,
    StateRun,
    StateValue,
    check_factor,
    check_finite,
)
from gradwire.compressors.residual import ElementStore, Piece

RESIDUAL_FIELDS = frozenset(("residual", "server", "total"))
"""Names of fields that hold compression errors or unsent gradients; all other fields hold averages."""


class Stateful(CompressorTraits):
    """Keeps the state of one compressor on one rank: named element stores, the step count, and the model's parameters.

    A compressor derives from it and implements `partition`, `wire_nbytes`, `all_reduce` and `flush`. In a step it reads
    `self.fields[field].read(layout, device)` and writes into `self.fields[field].stage(layout, device)`, which
    `end_step` commits or discards. A key of the state dict is `<field>/<start>/<parameter name>`: the run of that
    parameter from element `start` on.

    Args:
        name: Name by which the user chooses the compressor, `compressor=`.
        fields: Names of the values that are stored for each gradient element: "residual", "momentum".
    """

    def __init__(self, name: str, fields: Iterable[str] = ()) -> None:
        self.name = name
        self.step = 0
        """Finite steps so far."""
        self.fields = {field: ElementStore() for field in fields}
        self._numels: dict[str, int] = {}

    def bind_model(self, numels: Mapping[str, int]) -> None:
        """Stores the number of elements of each parameter, by which another model's state is refused.

        Args:
            numels: Elements of each parameter, by name.
        """
        self._numels = dict(numels)

    def end_step(self, finite: bool | Tensor) -> None:
        """Commits or drops the staged values of all fields, and counts a finite step; see `Compressor.end_step`.

        Args:
            finite: Whether the step's averages were finite on all ranks. A 0-dim bool tensor decides on its device, and
                the step is counted in any case; see `retract_step`.

        Raises:
            TypeError: `finite` is a tensor, but no 0-dim bool one; nothing was changed.
        """
        check_finite(finite)
        for store in self.fields.values():
            if isinstance(finite, Tensor):
                store.select(finite)
            elif finite:
                store.commit()
            else:
                store.drop()
        self.step += 1 if isinstance(finite, Tensor) else int(finite)

    def exchanged(self, layouts: Sequence[Layout], finite: bool | Tensor, unused: Collection[str] = ()) -> None:
        """Keeps the stored values of the parameters in `unused`, and drops what was staged of them.

        Args:
            layouts: Layouts that were exchanged; not used here.
            finite: Whether all averages of the step are finite; not used here.
            unused: Names of parameters whose averages are not used.
        """
        if unused:
            for store in self.fields.values():
                store.pass_over(unused)

    def retract_step(self) -> None:
        """Takes the last step out of the count, because it was not finite; see `Compressor.retract_step`."""
        self.step -= 1

    def note(self) -> str:
        """Returns a line for reports about what this compressor has done so far; empty for none."""
        return ""

    def rescale(self, factor: float | Tensor) -> None:
        """Multiplies all fields by `factor`, because the loss scale has changed; see `Compressor.rescale`.

        Args:
            factor: A number, or a 0-dim float32 or float64 tensor.

        Raises:
            TypeError: `factor` is a tensor, but no 0-dim floating-point one; nothing was changed.
        """
        check_factor(factor)
        for store in self.fields.values():
            store.rescale(factor)

    def element_scales(self) -> Iterable[Piece]:
        """Yields the factors by which stored residuals become gradients; elements without one have factor 1."""
        return ()

    def residual_square(self) -> float:
        """Returns the squared norm of this rank's residuals. Blocks until the device is done; changes nothing."""
        residuals: dict[str, list[Piece]] = {}
        for field in sorted(RESIDUAL_FIELDS & self.fields.keys()):
            for piece in self.fields[field].pieces():
                residuals.setdefault(piece.name, []).append(piece)
        scales: dict[str, list[Piece]] = {}
        for piece in self.element_scales() if residuals else ():
            scales.setdefault(piece.name, []).append(piece)
        square = 0.0
        for name, pieces in residuals.items():
            flat = torch.zeros(max(piece.stop for piece in pieces), dtype=torch.float32, device=pieces[0].value.device)
            for piece in pieces:
                flat[piece.start : piece.stop] += piece.value
            for scale in scales.get(name, ()):
                flat[scale.start : scale.stop] *= scale.value[: max(0, flat.numel() - scale.start)]
            square += float(torch.linalg.vector_norm(flat)) ** 2
        return square

    def state_runs(self) -> Iterator[StateRun]:
        """Yields the run of each stored piece, field by field."""
        for store in self.fields.values():
            for name, start, numel in store.runs():
                yield StateRun(name, start, numel)

    def export(self, layout: Layout, device: torch.device) -> Tensor:
        """Removes and returns all that is stored about the elements of `layout`.

        Returns:
            2-D float32 (fields, layout.numel), zero for elements without state here: the sum of the ranks' exports is
            the state of a whole bucket, whatever its cuts were.
        """
        rows = torch.empty(len(self.fields), layout.numel, dtype=torch.float32, device=device)
        for row, store in zip(rows, self.fields.values(), strict=True):
            row.copy_(store.export(layout, device))
        return rows

    def adopt(self, layout: Layout, rows: Tensor) -> None:
        """Adds exported rows to the stored values.

        Args:
            layout: Layout of the elements.
            rows: 2-D float32 (fields, layout.numel), as `export` returns them; copied.
        """
        for store, row in zip(self.fields.values(), rows, strict=True):
            store.adopt(layout, row)

    def state_dict(self) -> StateDict:
        """Returns a copy of all fields, under `<field>/<start>/<parameter name>`, and the step count."""
        state: StateDict = {"compressor": self.name, "step": self.step}
        for field, store in self.fields.items():
            for piece in store.pieces():
                state[f"{field}/{piece.start}/{piece.name}"] = piece.value.clone()
        return state

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Replaces all fields and the step count by those of a `state_dict()`.

        Raises:
            ValueError: The state is of another compressor or another model, or is damaged; nothing was changed.
        """
        pieces = self._check_state(state)
        for field, store in self.fields.items():
            store.replace(pieces[field])
        self.step = int(state["step"])

    def _check_state(self, state: Mapping[str, StateValue]) -> dict[str, list[Piece]]:
        """Returns field -> its pieces, copied from a state dict.

        Raises:
            ValueError: The state is of another compressor or another model, or is damaged.
        """
        if state.get("compressor") != self.name:
            raise ValueError(
                f"`state` belongs to compressor {state.get('compressor')!r}, this one is {self.name!r}: "
                "load it into the compressor that saved it, or start without it"
            )
        step = state.get("step")
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"`state['step']` is {step!r}; wanted the number of steps, an integer >= 0")
        pieces: dict[str, list[Piece]] = {field: [] for field in self.fields}
        for key, value in state.items():
            if key not in ("compressor", "step") and not self._checks(key, value):
                piece = self._check_piece(key, value, pieces)
                pieces[key.split("/", 1)[0]].append(piece)
        return pieces

    def _checks(self, key: str, value: StateValue) -> bool:
        """Returns whether the entry is one of a subclass, which has checked it; False here.

        Raises:
            ValueError: It is one of the subclass, and is damaged.
        """
        return False

    def _check_piece(self, key: str, value: StateValue, pieces: dict[str, list[Piece]]) -> Piece:
        """Returns an entry of a state dict as a piece of its field.

        Args:
            key: Key of the entry.
            value: Value of the entry.
            pieces: Field -> pieces of earlier entries, which it must not overlap.

        Raises:
            ValueError: The entry is of another compressor or model, or is damaged.
        """
        field, _, rest = key.partition("/")
        start, _, name = rest.partition("/")
        if field not in self.fields or not start.isdigit() or not name:
            raise ValueError(
                f"`state[{key!r}]` is no entry of compressor {self.name!r}; wanted "
                f"<field>/<start>/<parameter> with a field of {', '.join(self.fields) or 'none'}"
            )
        if not isinstance(value, Tensor) or value.dim() != 1 or value.dtype != torch.float32:
            raise ValueError(f"`state[{key!r}]` is no 1-D float32 tensor")
        self.check_parameter(key, name, int(start) + value.numel())
        piece = Piece(name, int(start), value.clone())
        for other in pieces[field]:
            if other.name == name and other.start < piece.stop and piece.start < other.stop:
                raise ValueError(f"`state[{key!r}]` overlaps another entry of the same parameter: the state is damaged")
        return piece

    def check_parameter(self, key: str, name: str, stop: int) -> None:
        """Refuses an entry for a parameter that the model does not have, or has with fewer than `stop` elements.

        Raises:
            ValueError: The model has no such parameter, or it is smaller; never raised before `bind_model` was called.
        """
        if not self._numels:
            return
        if name not in self._numels:
            raise ValueError(f"`state[{key!r}]`: the model has no parameter {name!r}; the state is another model's")
        if stop > self._numels[name]:
            raise ValueError(
                f"`state[{key!r}]`: parameter {name!r} has {self._numels[name]} elements, the state "
                f"reaches to {stop}; the state is another model's"
            )
