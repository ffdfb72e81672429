"""Writes and reads the state of the exchanges: counters, anchors, momenta and the compressor's state.

A state is validated when it is read. No exchange is in flight when a state is saved: `OuterExchange.state_dict` has
finished it on all ranks.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.comms.compression import refuse_not_finite
from gradwire.comms.outer.fragments import Fragment, OuterSettings
from gradwire.compressors.base import StateDict

FIXED = ("fragments", "warmup_steps", "warmup_every")
"""Settings that a run must share with the run that saved its state: they determine the fragment of an exchange, and
whether it is in the warm-up. Other settings may change."""

SEPARATOR = "|"
"""Separator between the parts of a key. Names of parameters are attribute paths and do not contain it."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A state of the exchanges.

    Attributes:
        steps: Number of steps of the optimizer.
        begun: Number of exchanges begun.
        flats: (anchor, momentum) of each fragment, each (numel); momentum is None if none is kept.
        held: State of the compressor; empty without one.
        parameters: Checksum of all parameters when the state was made; see `parameters_checksum`.
    """

    steps: int
    begun: int
    flats: Sequence[tuple[Tensor, Tensor | None]]
    held: StateDict
    parameters: str

    def digest(self) -> str:
        """Returns a digest of anchors and momenta, equal on all ranks that hold the same shards."""
        found = hashlib.sha256()
        for flat in (each for pair in self.flats for each in pair if each is not None):
            found.update(flat.cpu().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def parameters_checksum(fragments: Sequence[Fragment]) -> str:
    """Returns a checksum of this rank's present parameters in 16 hex digits, whichever fragments they are in."""
    sums = {name: each for fragment in fragments for name, each in fragment.parameter_checksums().items()}
    return hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()[:16]


def written(saved: Saved, fragments: Sequence[Fragment], settings: OuterSettings) -> StateDict:
    """Converts a state to a flat dict of numbers, strings and tensors, which `read` parses.

    Anchors and momenta are copied; the compressor's state is taken as it is.

    Args:
        saved: The state.
        fragments: Fragments of the model.
        settings: Settings of the exchanges.
    """
    state: StateDict = {"steps": saved.steps, "begun": saved.begun, "parameters": saved.parameters}
    state |= {name: getattr(settings, name) for name in FIXED}
    for fragment, flats in zip(fragments, saved.flats, strict=True):
        for kind, flat in zip(("anchor", "momentum"), flats, strict=True):
            if flat is not None:
                views = zip(fragment.names, fragment.views(flat), strict=True)
                state |= {f"{kind}{SEPARATOR}{name}": view.clone() for name, view in views}
    state |= {f"compression{SEPARATOR}{key}": value for key, value in saved.held.items()}
    return state


def read(state: StateDict, fragments: Sequence[Fragment], settings: OuterSettings) -> Saved:
    """Parses and validates a state; the compressor's part of it is only taken out (`check_loadable` checks that).

    Args:
        state: Result of `written`.
        fragments: Fragments of the model.
        settings: Settings of the exchanges.

    Raises:
        ValueError: The state is of another model or other settings, or is damaged.
    """
    steps, begun = (state.get(key) for key in ("steps", "begun"))
    if not (isinstance(steps, int) and isinstance(begun, int) and steps >= 0 and begun >= 0):
        raise ValueError(
            f"`state` has {steps!r} for steps and {begun!r} for exchanges; wanted what Outer.state_dict() returned"
        )
    for name in FIXED:
        own, saved = getattr(settings, name), state.get(name, "none")
        if own != saved:
            raise ValueError(
                f"`{name}` is {own}, and `state` was saved with {saved}; wanted the same: make Outer with "
                f"`{name}={saved}`, or train on from the model without the state"
            )
    flats = [_flats(fragment, state) for fragment in fragments]
    held = {
        key.removeprefix(f"compression{SEPARATOR}"): value
        for key, value in state.items()
        if key.startswith(f"compression{SEPARATOR}")
    }
    return Saved(steps, begun, flats, held, str(state.get("parameters")))


def _flats(fragment: Fragment, state: StateDict) -> tuple[Tensor, Tensor | None]:
    """Reads a fragment's (anchor, momentum) from a state, each (numel), new; momentum is None if it keeps none.

    If it keeps one and the state was saved without any, the momentum is 0.

    Raises:
        ValueError: A parameter's tensor is missing, has another dtype or shape, or is not finite.
    """
    anchor = _flat(fragment, "anchor", state)
    if fragment.momentum is None:
        return anchor, None
    if not any(key.startswith(f"momentum{SEPARATOR}") for key in state):  # saved without momentum: it starts at 0
        return anchor, torch.zeros_like(anchor)
    return anchor, _flat(fragment, "momentum", state)


def _flat(fragment: Fragment, kind: str, state: StateDict) -> Tensor:
    """Reads a fragment's tensor from a state into a new (numel) tensor.

    Args:
        fragment: The fragment.
        kind: `anchor` or `momentum`.
        state: The state.

    Raises:
        ValueError: A parameter's tensor is missing, has another dtype or shape, or is not finite.
    """
    flat = torch.empty_like(fragment.anchor)
    for name, view in zip(fragment.names, fragment.views(flat), strict=True):
        value = state.get(f"{kind}{SEPARATOR}{name}")
        if not isinstance(value, Tensor) or value.shape != view.shape or value.dtype != view.dtype:
            found = f"one of {value.dtype}, shape {tuple(value.shape)}" if isinstance(value, Tensor) else "none"
            raise ValueError(
                f"`state` holds {found} as the {kind} of `{name}`; wanted {view.dtype}, shape {tuple(view.shape)}: "
                "load the state of this model, saved by this rank with the same settings"
            )
        refuse_not_finite({f"{kind}{SEPARATOR}{name}": value})
        view.copy_(value)
    return flat
