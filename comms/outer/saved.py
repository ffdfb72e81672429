"""What an exchange that is under way is, and what a state keeps of the exchanges: written, and read with all checks."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.comms.communicator import Communicator
from gradwire.comms.compression import refuse_not_finite
from gradwire.comms.outer.fragments import Fragment, OuterSettings
from gradwire.comms.run.launches import Bucket, FutureTensor
from gradwire.compressors.base import StateDict, StateValue

FIXED = ("fragments", "warmup_steps", "warmup_every")
"""Settings that a state keeps: they tell which fragment an exchange is of, and whether it is of the warm-up. The others
may change from one run to the next."""

SEPARATOR = "|"
"""The separator between the parts of a key in a state; parameter names are attribute paths and cannot hold it."""


@dataclass(slots=True)
class Pending:
    """An exchange under way.

    Attributes:
        number: Which fragment.
        due: The step after which it is taken up.
        flat: (numel) the pseudo-gradient, in place its average over all ranks.
        sent: (numel) the parameters when it began; None where it is taken up at once.
        future: Of the average; None where it is there.
        finite: Whether the average is finite; None while it is under way.
        error: Why there is none and will be none.
        communicator: With which it was begun.
        bucket: What travels; None where nothing does.
        before: What the compressor held before it, where that was saved; else None.
    """

    number: int
    due: int
    flat: Tensor
    sent: Tensor | None
    future: FutureTensor | None
    finite: bool | None = None
    error: RuntimeError | None = None
    communicator: Communicator | None = None
    bucket: Bucket | None = None
    before: StateDict | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """What a state holds.

    Attributes:
        steps: Of the inner optimizer.
        begun: Exchanges.
        flats: The anchor and the momentum of each fragment.
        pending: The exchange that was under way.
        held: What the compressor has saved.
    """

    steps: int
    begun: int
    flats: Sequence[tuple[Tensor, Tensor | None]]
    pending: Pending | None
    held: StateDict

    @property
    def taken_up(self) -> int:
        """Exchanges that have been taken up."""
        return self.begun - (self.pending is not None)

    def digest(self) -> str:
        """The digest of anchors and momenta: one on all ranks with the same shards that have taken up as many."""
        found = hashlib.sha256()
        for flat in (each for pair in self.flats for each in pair if each is not None):
            found.update(flat.cpu().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def written(saved: Saved, fragments: Sequence[Fragment], settings: OuterSettings) -> StateDict:
    """The state; what tensors hold is copied.

    Args:
        saved: What it is to hold.
        fragments: Of the model.
        settings: Of the exchanges.
    """
    state: StateDict = {"steps": saved.steps, "begun": saved.begun}
    pending, held = saved.pending, saved.held
    before: StateDict = {} if pending is None or pending.before is None else pending.before
    state |= {name: getattr(settings, name) for name in FIXED}
    for fragment, flats in zip(fragments, saved.flats, strict=True):
        for kind, flat in zip(("anchor", "momentum"), flats, strict=True):
            if flat is not None:
                views = zip(fragment.names, fragment.views(flat), strict=True)
                state |= {f"{kind}{SEPARATOR}{name}": view.clone() for name, view in views}
    if pending is not None:
        state |= {
            "pending|number": pending.number,
            "pending|due": pending.due,
            "pending|flat": pending.flat.clone(),
            "pending|finite": int(bool(pending.finite)),
            "pending|new": "\n".join(key for key in held if key not in before),
        }
        if pending.sent is not None:
            state["pending|sent"] = pending.sent.clone()
        changed = {key: value for key, value in before.items() if not _same(held.get(key), value)}
        state |= {f"before{SEPARATOR}{key}": value for key, value in changed.items()}
    state |= {f"compression{SEPARATOR}{key}": value for key, value in held.items()}
    return state


def read(state: StateDict, fragments: Sequence[Fragment], settings: OuterSettings) -> Saved:
    """What a state holds.

    Args:
        state: What `written` has returned.
        fragments: Of the model.
        settings: Of the exchanges.

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
    return Saved(steps, begun, flats, _pending(state, fragments), held)


def _flats(fragment: Fragment, state: StateDict) -> tuple[Tensor, Tensor | None]:
    anchor = _flat(fragment, "anchor", state)
    if fragment.momentum is None:
        return anchor, None
    if not any(key.startswith(f"momentum{SEPARATOR}") for key in state):  # it was saved without: momentum begins here
        return anchor, torch.zeros_like(anchor)
    return anchor, _flat(fragment, "momentum", state)


def _flat(fragment: Fragment, kind: str, state: StateDict) -> Tensor:
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


def _pending(state: StateDict, fragments: Sequence[Fragment]) -> Pending | None:
    if "pending|number" not in state:
        return None
    number, due, finite = (state.get(f"pending{SEPARATOR}{key}") for key in ("number", "due", "finite"))
    flat, sent = (state.get(f"pending{SEPARATOR}{key}") for key in ("flat", "sent"))
    if (
        not isinstance(number, int)
        or not isinstance(due, int)
        or finite not in (0, 1)
        or not isinstance(state.get("pending|new"), str)
        or not 0 <= number < len(fragments)
        or not isinstance(flat, Tensor)
        or not isinstance(sent, Tensor)
        or not flat.shape == sent.shape == fragments[number].anchor.shape
        or not flat.dtype == sent.dtype == fragments[number].anchor.dtype
    ):
        raise ValueError("`state` holds an exchange under way that does not fit this model: it is damaged")
    like = fragments[number].anchor
    pending = Pending(number, due, flat.to(like, copy=True), sent.to(like, copy=True), None, bool(finite))
    pending.before = held_before(state)
    return pending


def held_before(state: StateDict) -> StateDict:
    """What the compressor held before the exchange that was under way when a state was saved."""
    new = set(str(state.get("pending|new", "")).split("\n"))
    found: StateDict = {}
    for kind in ("compression", "before"):
        parts = ((key.partition(SEPARATOR), value) for key, value in state.items())
        found |= {rest: value for (first, _, rest), value in parts if first == kind and rest not in new}
    return found


def _same(one: StateValue | None, other: StateValue) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and one == other
