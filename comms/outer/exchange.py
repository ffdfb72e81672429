"""Exchanges of pseudo-gradients between units: begun in turn, under way beside training, taken up some steps later.

A unit is what holds the same parameters at every step: the ranks of a node (or rack, or region) that average gradients,
or one rank alone. After `every` steps a fragment's pseudo-gradient (where it was after its last exchange, minus where
it is now) is averaged over all ranks, which gives a unit the weight of its ranks, and an outer SGD takes one step with
it. All units then have the same anchor, bit for bit.

What a unit has learned while an exchange was under way is kept whole: the parameters become the new anchor plus the
progress made since the exchange began. Streaming DiLoCo (arXiv 2501.18512, section 2.3) mixes the unit's parameters
with the new ones instead, by a share alpha. Kept whole, no step is lost, none counts twice (the next pseudo-gradient
holds those steps), and there is nothing to tune.

An exchange is a transaction. What changes (anchor, momentum, residuals, parameters) changes when its result is there,
and only if every element of that is finite: all ranks have the same result, so all decide alike.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.compression import Compression, is_finite
from gradwire.comms.execute import Bucket, FutureTensor, Launch
from gradwire.comms.observe.observer import Observer
from gradwire.comms.outer.fragments import Fragment, OuterSettings
from gradwire.compressors.base import Layout, StateDict

log = logging.getLogger("gradwire")

LOOK_SECONDS = 0.05
"""Between two looks at how far the other ranks are, where ranks that have taken different numbers of steps meet."""

SEPARATOR = "|"
"""Between the parts of a key in a state; parameter names are attribute paths and cannot hold it."""


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
    """

    number: int
    due: int
    flat: Tensor
    sent: Tensor | None
    future: FutureTensor | None
    finite: bool | None = None


class OuterExchange:
    """The exchanges of one model's fragments on one rank.

    Args:
        communicator: Of all ranks that hold the same parameters (of a sharded model: the same shards). Not closed here.
        compression: Of the communicator's compressor; None exchanges exactly.
        fragments: Of the model.
        settings: When, and what becomes of the result.
        observer: Of the communicator; None watches nothing.
        alone: There is one unit: nothing travels, and its own pseudo-gradient is the average.

    Attributes:
        steps: Of the inner optimizer.
        begun: Exchanges begun; the same on all ranks that have taken as many steps.
        done: Exchanges taken up.
        skipped: Exchanges whose average was not finite, so that they changed nothing.
        card_nbytes: What has left the busiest node in exchanges, as the plans say; on one node, the busiest rank.
        waited_seconds: Time in which this rank has done nothing but wait for a result.
    """

    def __init__(
        self,
        communicator: Communicator,
        compression: Compression | None,
        fragments: Sequence[Fragment],
        settings: OuterSettings,
        observer: Observer | None = None,
        *,
        alone: bool = False,
    ) -> None:
        self.settings = settings
        self.fragments = tuple(fragments)
        self.communicator = communicator
        self.compression = compression
        self.alone = alone or communicator.size == 1
        self.steps = self.begun = self.done = self.skipped = 0
        self.waited_seconds = self.card_nbytes = 0.0
        self._pending: Pending | None = None
        self._meetings = 0
        self._store = PollingStore(communicator.plain_store, communicator.config.timeout, ranks=communicator.size)
        if observer is not None:
            observer.contents.update(
                (number, (fragment.numel, fragment.names)) for number, fragment in enumerate(self.fragments)
            )

    @property
    def numel(self) -> int:
        """Elements that this rank holds of all parameters."""
        return sum(fragment.numel for fragment in self.fragments)

    @torch.no_grad()
    def start_alike(self, tensors: Sequence[Tensor]) -> None:
        """Gives all ranks rank 0's values, in place, and takes the parameters for the fragments' anchors.

        Args:
            tensors: Floating-point; the parameters, and what else shall be the same at the start.

        Raises:
            RuntimeError: The ranks could not exchange them.
        """
        if self.communicator.size > 1:
            for tensor in tensors:
                flat = tensor.reshape(-1).clone() if self.communicator.rank == 0 else tensor.new_zeros(tensor.numel())
                self._all_reduce_dense(flat, 1.0)
                tensor.copy_(flat.view(tensor.shape))
        for fragment in self.fragments:
            fragment.anchor = fragment.gather()

    @torch.no_grad()
    def step_ended(self) -> None:
        """Runs after every step of the inner optimizer: takes up what is due, and begins what is next.

        Raises:
            RuntimeError: An exchange failed: parameters, anchors and what is held back are as they were before it.
        """
        self.steps += 1
        pending = self._pending
        if pending is not None and pending.due <= self.steps:
            self._take_up()
        if self.settings.is_turn(self.steps):
            if self._pending is not None:  # loaded from a state that was saved with a longer delay
                self._take_up()
            self._begin(self.settings.delay)
            if self.settings.delay == 0:
                self._take_up()

    @torch.no_grad()
    def synchronize(self, buffers: Sequence[Tensor] = ()) -> None:
        """Ends what is under way, has all ranks begin the same number of exchanges, and averages all parameters.

        In full precision, with what is held back, and without outer momentum, which would carry the parameters past
        what any unit has found; it stays as it is. All ranks call it, whatever numbers of steps they have taken.

        Args:
            buffers: Floating-point tensors that are averaged in place.

        Raises:
            RuntimeError: A rank did not come within the time-out; or, on all ranks alike, a parameter is not finite.
        """
        if self._pending is not None:
            self._take_up()
        if not self.alone:
            self._meet()
        skipped = self.skipped
        for number in range(len(self.fragments)):
            if self.compression is not None:
                self.compression.flushing = True
            self._start(number, 0)
            self._take_up(average=True)
        if self.skipped > skipped:
            raise RuntimeError(
                "parameters of a rank are not finite, so the ranks were not synchronized and each keeps its own: load "
                "the last checkpoint on all ranks"
            )
        for buffer in [] if self.alone else buffers:
            flat = buffer.reshape(-1).clone()
            buffer.copy_(self._all_reduce_dense(flat, 1.0 / self.communicator.size).view(buffer.shape))

    def state_dict(self) -> StateDict:
        """Anchors, momenta, counts, what is held back, and the result of an exchange that is under way.

        Waits for that result; it is taken up when it would have been.
        """
        state: StateDict = {"steps": self.steps, "begun": self.begun, "fragments": len(self.fragments)}
        for fragment in self.fragments:
            for kind, flat in (("anchor", fragment.anchor), ("momentum", fragment.momentum)):
                if flat is not None:
                    views = zip(fragment.names, fragment.views(flat), strict=True)
                    state |= {f"{kind}{SEPARATOR}{name}": view.clone() for name, view in views}
        pending = self._pending
        if pending is not None:
            self._settle(pending)
            state |= {
                "pending|number": pending.number,
                "pending|due": pending.due,
                "pending|flat": pending.flat.clone(),
            }
            state |= {"pending|finite": int(bool(pending.finite))}
            if pending.sent is not None:
                state["pending|sent"] = pending.sent.clone()
        if self.compression is not None:
            held = self.compression.state_dict()
            self.communicator.rejoin()
            state |= {f"compression{SEPARATOR}{key}": value for key, value in held.items()}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: StateDict) -> None:
        """Restores what `state_dict` returned on this rank; see there.

        Raises:
            ValueError: The state is of another model or other settings, or is damaged; nothing was changed.
        """
        loaded = [
            tuple(self._loaded(fragment, kind, state) for kind in ("anchor", "momentum")) for fragment in self.fragments
        ]
        counts = [state.get(key) for key in ("steps", "begun", "fragments")]
        if any(not isinstance(count, int) for count in counts):
            raise ValueError("`state` lacks the counts of gradwire's Outer: wanted what Outer.state_dict() returned")
        if counts[2] != len(self.fragments):
            raise ValueError(
                f"`fragments` is {len(self.fragments)}, and `state` was saved with {counts[2]}; wanted the same number"
            )
        pending = self._loaded_pending(state)
        held = {
            key.removeprefix(f"compression{SEPARATOR}"): value
            for key, value in state.items()
            if key.startswith(f"compression{SEPARATOR}")
        }
        if (self.compression is None) != (not held):
            raise ValueError(
                f"`compressor` is {self.communicator.config.compressor!r}, and `state` was saved "
                f"{'with' if held else 'without'} one; wanted the compressor that saved it"
            )
        if self.compression is not None:
            with self.communicator.alone():
                self.compression.load_state_dict(held)
            self.communicator.state_loaded()
        if self._pending is not None:
            self._settle(self._pending)
        self.steps, self.begun, _ = (int(count) for count in counts if isinstance(count, int))
        self._pending = pending
        for fragment, (anchor, momentum) in zip(self.fragments, loaded, strict=True):
            assert anchor is not None
            fragment.anchor, fragment.momentum = anchor, momentum
        self._store.set(f"outer/begun/{self.communicator.rank}", str(self.begun))

    def _begin(self, delay: int) -> None:
        self._start(self.begun % len(self.fragments), delay)
        self.begun += 1

    def _start(self, number: int, delay: int) -> None:
        """Starts the exchange of a fragment; the host goes on."""
        fragment = self.fragments[number]
        now = fragment.gather()
        flat = fragment.progress(now)
        bucket = Bucket.of(flat, fragment.layout, index=number)
        future: FutureTensor | None = None
        if not self.alone and fragment.numel:
            flush = self.compression is not None and self.compression.flushing
            launch = Launch((flat,), fragment.layout if self.compression is not None else None, (bucket,))
            self.communicator.start(launch, scale=1.0 / self.communicator.size, flush=flush)
            future = bucket.result()
            self.card_nbytes += self._leaving_nbytes(flat, None if flush else launch.layout)
        self._pending = Pending(number, self.steps + delay, flat, now if delay else None, future)

    def _leaving_nbytes(self, flat: Tensor, layout: Layout | None) -> float:
        """Bytes that leave the busiest node in the exchange of `flat`."""
        routes = self.communicator.routes
        dense = routes.unlisted(flat.numel(), flat.dtype)
        plan = dense.plan if layout is None else routes[flat.numel(), flat.dtype, layout].plan
        names = routes.cluster.level_names
        return plan.bytes_by_level.get(names[1 if len(names) > 1 and len(routes.cluster.nodes) > 1 else 0], 0.0)

    def _take_up(self, *, average: bool = False) -> None:
        """Waits for the exchange that is under way, and has it take effect; where it is not finite, none at all.

        Args:
            average: The average itself is the result: no outer SGD.
        """
        pending, self._pending = self._pending, None
        assert pending is not None
        self._settle(pending)
        fragment = self.fragments[pending.number]
        if not pending.finite:
            self.skipped += 1
            return
        if average:
            fragment.anchor.sub_(pending.flat)
        else:
            fragment.update(pending.flat, self.settings)
        if pending.sent is None:
            fragment.scatter(fragment.anchor)
        else:
            fragment.scatter(fragment.gather().sub_(pending.sent).add_(fragment.anchor))
        self.done += 1

    def _settle(self, pending: Pending) -> None:
        """Waits for the average, and decides what becomes of what the compressor holds back."""
        if pending.finite is not None:
            return
        fragment = self.fragments[pending.number]
        if pending.future is not None:
            began = time.perf_counter()
            if self.communicator.device.type == "cuda" or not pending.future.done():
                self._store.set(f"outer/begun/{self.communicator.rank}", str(self.begun))
            try:
                pending.future.wait()
            except RuntimeError:
                self._decide(False, fragment)
                raise
            finally:
                pending.future = None
                self.waited_seconds += time.perf_counter() - began
        pending.finite = is_finite(pending.flat)
        if not pending.finite:
            names = fragment.unfinished(pending.flat)
            log.warning(
                "exchange %d of fragment %d is not finite (`%s`%s) and is skipped: each unit goes on with what it has",
                self.begun,
                pending.number,
                names[0],
                f" and {len(names) - 1} more" if len(names) > 1 else "",
            )
        self._decide(pending.finite, fragment)

    def _decide(self, finite: bool, fragment: Fragment) -> None:
        if self.compression is not None and not self.alone and fragment.numel:
            with self.communicator.alone():
                self.compression.decide(finite, [fragment.layout])

    def _all_reduce_dense(self, flat: Tensor, scale: float) -> Tensor:
        bucket = Bucket.of(flat)
        if flat.numel():
            self.communicator.start(Launch((flat,), None, (bucket,), counted=False), scale=scale)
            bucket.result().wait()
        return flat

    def _meet(self) -> None:
        """Returns when all ranks have come here and begun the same number of exchanges.

        Ranks may have taken different numbers of steps: a GradScaler skips some, or data ran out. A rank that is ahead
        waits in an exchange for those behind, and has left its count in the store before: they begin theirs.

        Raises:
            RuntimeError: A rank has not come within the time-out.
        """
        rank, ranks = self.communicator.rank, range(self.communicator.size)
        place = f"outer/meeting{self._meetings}"
        self._meetings += 1
        self._store.set(f"{place}/{rank}", str(self.begun))
        arrived: dict[int, int] = {}
        timeout = self.communicator.config.timeout
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            arrived |= self._counts(place, [each for each in ranks if each not in arrived])
            waiting = self._counts("outer/begun", [each for each in ranks if each not in arrived])
            if max((*arrived.values(), *waiting.values())) > self.begun:
                self._begin(0)
                self._take_up()
            elif len(arrived) == len(ranks):
                return
            elif time.monotonic() > deadline:
                missing = ", ".join(str(each) for each in ranks if each not in arrived)
                raise RuntimeError(
                    f"synchronize(): rank {missing} has not come within `timeout` of {timeout}; all ranks must call it"
                )
            else:
                time.sleep(LOOK_SECONDS)

    def _counts(self, place: str, ranks: Sequence[int]) -> dict[int, int]:
        """Exchanges begun by those of some ranks that have left a word."""
        return {
            rank: int(self._store.read(f"{place}/{rank}")) for rank in ranks if self._store.check([f"{place}/{rank}"])
        }

    def _loaded(self, fragment: Fragment, kind: str, state: StateDict) -> Tensor | None:
        if kind == "momentum" and fragment.momentum is None:
            return None
        flat = torch.empty_like(fragment.anchor)
        for name, view in zip(fragment.names, fragment.views(flat), strict=True):
            value = state.get(f"{kind}{SEPARATOR}{name}")
            if not isinstance(value, Tensor) or value.shape != view.shape:
                found = f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "none"
                raise ValueError(
                    f"`state` holds {found} as the {kind} of `{name}`; wanted shape {tuple(view.shape)}: load the "
                    "state of this model, saved by this rank with the same settings"
                )
            view.copy_(value)
        return flat

    def _loaded_pending(self, state: StateDict) -> Pending | None:
        if "pending|number" not in state:
            return None
        number, due, finite = (state.get(f"pending{SEPARATOR}{key}") for key in ("number", "due", "finite"))
        flat, sent = (state.get(f"pending{SEPARATOR}{key}") for key in ("flat", "sent"))
        if (
            not isinstance(number, int)
            or not isinstance(due, int)
            or not 0 <= number < len(self.fragments)
            or not isinstance(flat, Tensor)
            or not isinstance(sent, Tensor)
            or not flat.shape == sent.shape == self.fragments[number].anchor.shape
        ):
            raise ValueError("`state` holds an exchange under way that does not fit this model: it is damaged")
        like = self.fragments[number].anchor
        return Pending(number, due, flat.to(like, copy=True), sent.to(like, copy=True), None, bool(finite))
