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

import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.communicator import Communicator
from gradwire.comms.compression import Compression, is_finite
from gradwire.comms.elastic.survive import Survivor
from gradwire.comms.outer.fragments import Fragment, OuterSettings
from gradwire.comms.outer.saved import Pending, Saved, held_before, read, written
from gradwire.comms.outer.words import Words
from gradwire.comms.plan.plan import Plan
from gradwire.comms.plan.routes import Routes
from gradwire.comms.run.launches import Bucket, FutureTensor, Launch
from gradwire.comms.session import AveragingSession
from gradwire.comms.step.listeners import EndedStep
from gradwire.compressors.base import Layout, StateDict
from gradwire.compressors.residual import keep_until_read

log = logging.getLogger("gradwire")

LOOK_SECONDS = 0.05
"""Seconds between two looks at how far the other ranks are, where ranks that have taken different numbers of steps
meet."""

TELL_SECONDS = 0.2
"""That a rank waits for a result before it says so, to ranks that may have taken fewer steps: the store is on the link
that is waited for."""


def agreement_of(store: Store, rank: int, size: int, timeout: timedelta) -> Agreement:
    """What ranks tell each other about exchanges: few words, in rounds that all of them take part in.

    Args:
        store: That all ranks share; with keys of its own for each agreement.
        rank: This one.
        size: How many there are.
        timeout: For the last rank to speak.
    """
    return Agreement(store, rank, size, "Outer", timeout, "make Outer, load its state and synchronize it")


@dataclass(slots=True)
class LeavingBytes:
    """Bytes that have left a node's card.

    Attributes:
        exchanged: In exchanges.
        synchronized: In `synchronize`, which averages in full precision.
    """

    exchanged: float = 0.0
    synchronized: float = 0.0


class _Memory:
    """Memory for exchanges: one is under way at a time, so all fragments share it."""

    def __init__(self) -> None:
        self._fragments: Sequence[Fragment] = ()
        self._parts: list[tuple[Tensor, Tensor]] = []

    def of(self, fragments: Sequence[Fragment], number: int) -> tuple[Tensor, Tensor]:
        """What the exchange of one fragment takes: twice its size.

        Args:
            fragments: Of the model: others, once they have been chosen.
            number: Which of them.
        """
        if self._fragments is not fragments:
            self._fragments, self._parts = fragments, []
            large: dict[torch.dtype, Fragment] = {}
            for fragment in fragments:
                known = large.setdefault(fragment.anchor.dtype, fragment)
                large[fragment.anchor.dtype] = max(known, fragment, key=lambda each: each.numel)
            both = {dtype: (fragment.empty(), fragment.empty()) for dtype, fragment in large.items()}
            for fragment in fragments:
                first, second = (whole[: fragment.numel] for whole in both[fragment.anchor.dtype])
                self._parts.append((fragment.keep(first), fragment.keep(second)))
        return self._parts[number]


class _Leaving:
    """What leaves the busiest node, as the plans say; on one node, the busiest rank."""

    def __init__(self) -> None:
        self._known: dict[Layout | None, tuple[Plan, float]] = {}

    def nbytes(self, routes: Routes, flat: Tensor, layout: Layout | None) -> float:
        """Bytes that leave the busiest node in the exchange of `flat`.

        Args:
            routes: By which it travels.
            flat: The pseudo-gradient.
            layout: Of a compressed one; None for one in full precision.
        """
        if layout is None:
            plan = routes.unlisted(flat.numel(), flat.dtype).plan
        else:
            plan = routes[flat.numel(), flat.dtype, layout].plan
        known = self._known.get(layout)
        if known is None or known[0] is not plan:
            names = routes.cluster.level_names
            level = names[1 if len(names) > 1 and len(routes.cluster.nodes) > 1 else 0]
            known = self._known[layout] = plan, plan.bytes_by_level.get(level, 0.0)
        return known[1]


class OuterExchange:
    """The exchanges of one model's fragments on one rank.

    Args:
        communicator: Of all ranks that hold the same parameters (of a sharded model: the same shards). Not closed here.
        compression: Of the communicator's compressor; None exchanges exactly.
        fragments: Of the model.
        settings: When, and what becomes of the result.
        session: Of the communicator, whose listeners hear of each exchange as of a step; None has none.
        agreement: Of all ranks of the job; None where those of the communicator are all.
        alone: There is one unit: nothing travels, and its own pseudo-gradient is the average.

    Attributes:
        steps: Of the inner optimizer; after `synchronize` those of the rank that has taken most.
        begun: Exchanges begun; the same on all ranks that have taken as many steps.
        done: Exchanges taken up.
        skipped: Exchanges whose average was not finite, so that they changed nothing.
        card: What has left the busiest node for others, as the plans say; on one node, the busiest rank.
        waited_seconds: Time in which this rank has done nothing but wait for a result.
    """

    def __init__(
        self,
        communicator: Communicator,
        compression: Compression | None,
        fragments: Sequence[Fragment],
        settings: OuterSettings,
        session: AveragingSession | None = None,
        *,
        agreement: Agreement | None = None,
        alone: bool = False,
    ) -> None:
        self.settings = settings
        self.fragments = tuple(fragments)
        self.communicator = communicator
        self.compression = compression
        self.alone = alone or communicator.size == 1
        self.steps = self.begun = self.done = self.skipped = 0
        self.waited_seconds, self.card = 0.0, LeavingBytes()
        self._pending: Pending | None = None
        self._memory, self._leaving = _Memory(), _Leaving()
        self._halfway = False
        self.agreement = agreement or agreement_of(
            communicator.plain_store, communicator.rank, communicator.size, communicator.config.timeout
        )
        self._words = Words(communicator)
        self._survivor: Survivor | None = None
        self._session: AveragingSession | None = None
        if session is not None:
            self.be_watched(session)

    def be_watched(self, session: AveragingSession) -> None:
        """Has the listeners of a session follow the exchanges, and tells what travels in them."""
        self._session = session
        session.observer.contents.update(
            (number, (fragment.numel, fragment.names)) for number, fragment in enumerate(self.fragments)
        )

    def survive(self, survivor: Survivor) -> None:
        """Goes on from here where ranks are lost: what was under way then is begun again among those that are left."""
        self._survivor = survivor
        survivor.has_begun = lambda: self._pending is not None and self._pending.finite is None

    def reconnect(self, communicator: Communicator, agreement: Agreement) -> None:
        """Goes on among other ranks.

        Args:
            communicator: Of the ranks that are left.
            agreement: Of the same ones.
        """
        self.communicator, self.agreement = communicator, agreement
        self._words.reconnect(communicator)
        self.alone = communicator.size == 1
        if self.compression is not None:
            self.compression.renumber(communicator.rank, communicator.size)
            communicator.state_loaded()
            if self.alone:  # what an attempt has staged that was given up; among others the next attempt drops it
                self._decide(False, self.fragments)

    @property
    def numel(self) -> int:
        """Elements that this rank holds of all parameters."""
        return sum(fragment.numel for fragment in self.fragments)

    @torch.no_grad()
    def start_alike(self, tensors: Sequence[Tensor]) -> None:
        """Gives all ranks rank 0's values, in place, and takes the parameters for the fragments' anchors.

        Args:
            tensors: Floating-point, such as the parameters.

        Raises:
            RuntimeError: The ranks could not exchange them.
        """
        if self.communicator.size > 1:
            for tensor in tensors:
                flat = tensor.reshape(-1).clone() if self.communicator.rank == 0 else tensor.new_zeros(tensor.numel())
                self._all_reduce_dense(flat, 1.0)
                tensor.copy_(flat.view(tensor.shape))
        for fragment in self.fragments:
            fragment.gather(fragment.anchor)

    @torch.no_grad()
    def step_ended(self) -> None:
        """Runs after every step of the inner optimizer: takes up what is due, and begins what is next.

        Raises:
            RuntimeError: An exchange failed: parameters, anchors and what is held back are as they were before it.
        """
        self._refuse_halfway()
        self.steps += 1
        pending = self._pending
        if pending is not None and pending.due <= self.steps:
            self._take_up()
        delay = self.settings.delay_of(self.steps)
        for _ in range(self.settings.turns(self.steps)):
            if self._pending is not None:  # loaded from a state that was saved with a longer delay
                self._take_up()
            self._begin(delay)
            if delay == 0:
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
        self._refuse_halfway()
        for fragment in self.fragments:
            fragment.check()
        if self._pending is not None:
            self._take_up()
        if not self.alone:
            self._meet()
        finite, before = False, self.card.exchanged
        try:
            averages, unfinished = self._averages()
            finite = not unfinished
        finally:
            self._decide(finite, self.fragments)
            if self.compression is not None:
                self.compression.flushing = False
            self.card = LeavingBytes(before, self.card.synchronized + self.card.exchanged - before)
        if self._survivor is not None and not self.alone:  # when it ends, all have the averages, and nobody keeps them
            self._mean_of(self.fragments[0].anchor.new_zeros(1))
        if not finite:
            self.skipped += len(self.fragments)
            raise RuntimeError(
                f"`{unfinished}` and perhaps more are not finite on a rank, so the ranks were not synchronized and "
                "each keeps its own: load the last checkpoint on all ranks"
            )
        for fragment, average in zip(self.fragments, averages, strict=True):
            fragment.update(average, None)
            fragment.scatter(fragment.anchor)
        self.done += len(self.fragments)
        for buffer in [] if self.alone else buffers:
            buffer.copy_(self._mean_of(buffer.reshape(-1)).view(buffer.shape))

    def state_dict(self) -> StateDict:
        """Anchors, momenta, counts, what is held back, and the result of an exchange that is under way.

        Waits for that result; it is taken up when it would have been. What the compressor held before that exchange is
        there, too: where others had not begun it yet when they saved, it is made again.
        """
        self._refuse_halfway()
        pending, held = self._pending, {}
        if pending is not None:
            self._settle(pending, saving=True)
        if self.compression is not None:
            held = self.compression.state_dict()
            self.communicator.rejoin()
        saved = Saved(self.steps, self.begun, [(each.anchor, each.momentum) for each in self.fragments], pending, held)
        return written(saved, self.fragments, self.settings)

    @torch.no_grad()
    def load_state_dict(self, state: StateDict | ValueError) -> None:
        """Restores what `state_dict` returned on this rank; see there. All ranks call it.

        Args:
            state: Or why this rank has none, which is raised here; the others are told.

        Raises:
            ValueError: The state of this rank or of another one is of another model or other settings, or is damaged;
                or a rank had taken up an exchange that another one had not begun. Nothing was changed.
            RuntimeError: A rank has not come within the time-out; or the exchange that is under way has failed.
        """
        if self._pending is not None:
            self._settle(self._pending)
        try:
            if isinstance(state, ValueError):
                raise state
            saved = read(state, self.fragments, self.settings)
            if (self.compression is None) != (not saved.held):
                raise ValueError(
                    f"`compressor` is {self.communicator.config.compressor!r}, and `state` was saved "
                    f"{'with' if saved.held else 'without'} one; wanted the compressor that saved it"
                )
            self._try_on([saved.held] if saved.pending is None else [saved.held, held_before(state)])
        except ValueError as error:
            self.agreement.gather(json.dumps({"error": str(error)}))
            raise
        pending, held = saved.pending, saved.held
        again = self._agree_on(saved.steps, saved.begun, pending)
        self._halfway = True
        if again and pending is not None:
            held, pending.finite = held_before(state), None
        if self.compression is not None:
            with self.communicator.alone():
                self.compression.load_state_dict(held)
            self.communicator.state_loaded()
        self.steps, self.begun = saved.steps, saved.begun
        self._pending = pending
        for fragment, (anchor, momentum) in zip(self.fragments, saved.flats, strict=True):
            fragment.anchor.copy_(anchor)
            fragment.momentum = momentum
        self._words.forget()
        if again and pending is not None and pending.sent is not None:
            self.fragments[pending.number].progress(pending.sent, pending.flat)
            self._launch(pending)
        self._halfway = False

    def _refuse_halfway(self) -> None:
        if self._halfway:
            raise RuntimeError(
                "load_state_dict() has failed after the ranks had agreed, so that this rank has a part of the state: "
                "load it again on all ranks"
            )

    def _agree_on(self, steps: int, begun: int, pending: Pending | None) -> bool:
        """Returns if all ranks can load their states, and can go on from the same exchange.

        A rank that is ahead has the result of an exchange for which the others, in their states, have yet to compute.
        If that is under way, it makes it again with them: what it sends is in its state, and what the compressor held.

        Returns:
            Whether this rank has to.

        Raises:
            ValueError: On all ranks.
        """
        word = {"steps": steps, "begun": begun, "again": pending is not None and pending.sent is not None}
        found = [json.loads(each) for each in self.agreement.gather(json.dumps(word))]
        for rank, each in enumerate(found):
            if "error" in each:
                raise ValueError(f"`state` of rank {rank} does not fit, so no rank has loaded its own: {each['error']}")
        ahead, behind = (one(found, key=lambda each: int(each["begun"])) for one in (max, min))
        if ahead["begun"] == behind["begun"]:
            return False
        cannot = next((each for each in found if each["begun"] == ahead["begun"] and not each["again"]), None)
        if ahead["begun"] > behind["begun"] + 1 or cannot is not None:
            one, other = found.index(behind), found.index(cannot or ahead)
            raise ValueError(
                f"`state` was saved after {behind['begun']} exchanges and {behind['steps']} steps on rank {one}, and "
                f"after {ahead['begun']} and {found[other]['steps']} on rank {other}, which has taken up the last one; "
                "wanted as many exchanges on all ranks, or one more that is still under way, as each is for `delay` "
                f"steps ({self.settings.delay_of(behind['steps'] + 1)} there): where ranks take such different numbers "
                "of steps (a GradScaler skips some), call synchronize() before state_dict()"
            )
        return begun == int(ahead["begun"])

    def _try_on(self, states: Sequence[StateDict]) -> None:
        """Has the compressor say whether it can load each of some states; then it is as it was.

        Raises:
            ValueError: It cannot load one.
        """
        if self.compression is None:
            return
        with self.communicator.alone():
            present = self.compression.state_dict()
            try:
                for each in states:
                    self.compression.load_state_dict(each)
            except TypeError as error:
                raise ValueError(f"`state` is damaged in what the compressor saved: {error}") from error
            finally:
                self.compression.load_state_dict(present)
        self.communicator.rejoin()

    def _begin(self, delay: int) -> None:
        if self._session is not None and not self.alone:
            self._session.listeners.step_began(self.begun)
        pending = self._prepared(self.begun % len(self.fragments), delay)
        try:
            self._launch(pending)
        except (RuntimeError, OSError):
            if self._survivor is None:
                raise
            pending.communicator = None  # a rank was lost: it is begun again when it is waited for
        self._pending = pending
        self.begun += 1

    def _averages(self) -> tuple[list[Tensor], str]:
        """The averages of all fragments, and the name of a parameter that is not finite on some rank; "" without one.

        Raises:
            RuntimeError: The ranks could not exchange them.
        """
        survivor = self._survivor
        if survivor is None or self.alone:
            return self._averages_now()
        names = ["", *(name for fragment in self.fragments for name in fragment.names)]
        sizes = [fragment.numel for fragment in self.fragments]
        wide = max((fragment.anchor.dtype for fragment in self.fragments), key=lambda dtype: dtype.itemsize)

        def attempt() -> Tensor:
            self._decide(False, self.fragments)  # what an attempt before this one has staged
            if not self._words.announced:  # others may not have seen that all have met before a rank was lost
                self._words.announce(self.steps, self.begun)
            averages, unfinished = self._averages_now()
            mark = averages[0].new_tensor([names.index(unfinished)], dtype=wide)
            return torch.cat([mark, *(average.to(wide) for average in averages)])

        like = torch.empty(1, dtype=wide, device=self.communicator.device).expand(1 + sum(sizes))
        found = survivor.complete(attempt, like)
        assert found is not None
        parts = found[1:].split_with_sizes(sizes)
        averages = [part.to(each.anchor.dtype) for part, each in zip(parts, self.fragments, strict=True)]
        return averages, names[int(found[0])]

    def _averages_now(self) -> tuple[list[Tensor], str]:
        averages, unfinished = [self._average_of(number) for number in range(len(self.fragments))], ""
        for fragment, average in zip(self.fragments, averages, strict=True):
            if not unfinished and not is_finite(average):
                unfinished = fragment.unfinished(average)[0]
        self.communicator.executor.release()  # on CUDA the host has waited, and hears of what was given up
        return averages, next((name for name in self.agreement.gather(unfinished) if name), "")

    def _average_of(self, number: int) -> Tensor:
        """The average of a fragment's pseudo-gradients now, in full precision, with what is held back; decides nothing.

        Raises:
            RuntimeError: The ranks could not exchange it.
        """
        if self.compression is not None:
            self.compression.flushing = True
        pending = self._prepared(number, 0, own=True)
        self._launch(pending)
        if pending.future is not None:
            began = time.perf_counter()
            self._wait(pending.future)
            self.waited_seconds += time.perf_counter() - began
        return pending.flat

    def _wait(self, future: FutureTensor) -> Tensor:
        return future.wait() if self._survivor is None else self._survivor.wait(future)

    def _prepared(self, number: int, delay: int, *, own: bool = False) -> Pending:
        """A fragment's pseudo-gradient as of now, to be exchanged.

        Args:
            number: Which fragment.
            delay: See `OuterSettings`.
            own: In memory of its own; else in that which all exchanges take turns in.
        """
        fragment = self.fragments[number]
        flat, sent = (fragment.empty(), fragment.empty()) if own else self._memory.of(self.fragments, number)
        kept = sent if delay else None
        fragment.set_out(flat, kept)
        return Pending(number, self.steps + delay, flat, kept, None)

    def _launch(self, pending: Pending) -> None:
        """Sends a pseudo-gradient on its way; the host goes on."""
        pending.future, pending.communicator = None, self.communicator
        fragment, flat = self.fragments[pending.number], pending.flat
        if not fragment.numel:
            return
        if self.alone:
            self._take_back(fragment, flat)
            return
        timed = self._session is not None and self._session.listeners.wants_times
        arrived = self.communicator.clock.now() if timed else None
        pending.bucket = bucket = Bucket.of(flat, fragment.layout, arrived, pending.number)
        flush = self.compression is not None and self.compression.flushing
        launch = Launch((flat,), fragment.layout if self.compression is not None else None, (bucket,), alone=True)
        self.communicator.start(launch, scale=1.0 / self.communicator.size, flush=flush)
        pending.future = bucket.result()
        self.card.exchanged += self._leaving.nbytes(self.communicator.routes, flat, None if flush else launch.layout)

    def _take_back(self, fragment: Fragment, flat: Tensor) -> None:
        """Adds to a pseudo-gradient what the compressor has held back of it: with nobody else left it travels no more.

        Zero from the next decision on that commits it; where there was one unit from the start, nothing is held.

        Args:
            fragment: Of the model.
            flat: (numel) its pseudo-gradient, changed in place.
        """
        if self.compression is None:
            return
        with self.communicator.alone():
            held = torch.zeros_like(flat, dtype=torch.float32)
            self.compression.compressor.flush(held, fragment.layout)
        self.communicator.rejoin()
        keep_until_read(held)
        flat.add_(held)

    def _take_up(self) -> None:
        """Waits for the exchange that is under way, and has it take effect; where it is not finite, none at all.

        Raises:
            RuntimeError: It failed, now or earlier: nothing has changed, and it stays under way.
        """
        pending = self._pending
        assert pending is not None
        fragment = self.fragments[pending.number]
        fragment.check()
        self._settle(pending)
        self._pending = None
        if pending.finite:
            fragment.arrive(pending.flat, pending.sent, None if self.settings.warms_up(self.begun) else self.settings)
        self.done += bool(pending.finite)
        self.skipped += not pending.finite
        if self._session is not None and not self.alone:
            self._tell_ended(self._session, pending)

    def _tell_ended(self, session: AveragingSession, pending: Pending) -> None:
        """Tells the listeners of an exchange that has been taken up. Ranks that may be lost ask each other nothing."""
        buckets = [] if pending.bucket is None else [pending.bucket]
        together, steps = self._survivor is None, self.steps
        report = lambda: session.report(steps)
        session.listeners.step_ended(EndedStep(self.begun, buckets, (), report, timed=False, together=together))

    def _settle(self, pending: Pending, *, saving: bool = False) -> None:
        """Waits for the average, and decides what becomes of what the compressor holds back.

        Args:
            pending: Is under way.
            saving: Keep what it has held until then.
        """
        if pending.error is not None:
            raise pending.error
        if pending.finite is not None:
            return
        fragment = self.fragments[pending.number]
        travels = not self.alone and fragment.numel > 0
        began = time.perf_counter()
        try:
            if travels:
                self._arrive(pending)
            finite = is_finite(pending.flat)  # on CUDA the host waits here
            if travels:
                self.communicator.executor.release()  # and hears here of what was given up meanwhile
        except RuntimeError as error:
            pending.error = error  # what `flat` holds then is no average, and never will be
            if self.communicator.device.type != "cuda":  # there nothing can be issued any more: nothing commits it
                self._decide(False, [fragment])
            raise
        finally:
            pending.future = None
            self.waited_seconds += time.perf_counter() - began if travels else 0.0
        pending.finite = finite
        if not pending.finite:
            names = fragment.unfinished(pending.flat)
            log.warning(
                "exchange %d of fragment %d is not finite (`%s`%s) and is skipped: each unit goes on with what it has",
                self.begun,
                pending.number,
                names[0],
                f" and {len(names) - 1} more" if len(names) > 1 else "",
            )
        if saving and self.compression is not None:
            pending.before = self.compression.state_dict()
            self.communicator.rejoin()
        self._decide(pending.finite, [fragment])

    def _arrive(self, pending: Pending) -> None:
        """Waits until `flat` holds the average, of those that are left where ranks are lost and that is wanted.

        Raises:
            RuntimeError: The exchange failed.
        """
        if self._survivor is None:
            assert pending.future is not None
            if self.communicator.device.type == "cuda":
                self._words.tell(self.begun)
            elif not pending.future.done():
                arrived = threading.Event()
                pending.future.add_done_callback(lambda _: arrived.set())
                if not arrived.wait(TELL_SECONDS):
                    self._words.tell(self.begun)
            pending.future.wait()
            return
        average = self._survivor.complete(lambda: self._attempt(pending), like=pending.flat)
        assert average is not None
        pending.flat.copy_(average)

    def _attempt(self, pending: Pending) -> Tensor:
        """The average: a copy, which is kept for ranks that a loss has left behind. Begun anew among other ranks."""
        if pending.communicator is not self.communicator:
            fragment = self.fragments[pending.number]
            self._decide(False, [fragment])
            now = fragment.gather(pending.flat) if pending.sent is None else pending.sent
            fragment.progress(now, pending.flat)
            self._launch(pending)
        if pending.future is not None:
            self._words.tell(self.begun)
            self._wait(pending.future)
        return pending.flat.clone()

    def _mean_of(self, flat: Tensor) -> Tensor:
        """The average of a small tensor over all ranks: a new one.

        Raises:
            RuntimeError: The ranks could not exchange it.
        """

        def attempt() -> Tensor:
            return self._all_reduce_dense(flat.clone(), 1.0 / self.communicator.size)

        found = attempt() if self._survivor is None else self._survivor.complete(attempt, like=flat)
        assert found is not None
        return found

    def _decide(self, finite: bool, fragments: Sequence[Fragment]) -> None:
        layouts = [fragment.layout for fragment in fragments if fragment.numel]
        if self.compression is not None and layouts:
            with self.communicator.alone():
                self.compression.decide(finite, layouts)

    def _all_reduce_dense(self, flat: Tensor, scale: float) -> Tensor:
        bucket = Bucket.of(flat)
        if flat.numel():
            self.communicator.start(Launch((flat,), None, (bucket,), counted=False), scale=scale)
            self._wait(bucket.result())
        return flat

    def _meet(self) -> None:
        """Returns when all ranks have come here and begun the same number of exchanges, with the same count of steps.

        Ranks may have taken different numbers of steps: a GradScaler skips some, or data ran out. A rank that is ahead
        waits in an exchange for those behind, and has left its count in the store before: they begin theirs.

        Raises:
            RuntimeError: A rank has not come within the time-out.
        """
        timeout = self.communicator.config.timeout
        deadline = time.monotonic() + timeout.total_seconds()
        self._words.announced = False
        while True:
            if self._survivor is not None:
                self._survivor.follow()
            if self.alone:
                return
            if not self._words.announced:
                self._words.announce(self.steps, self.begun)
                ranks, arrived = range(self.communicator.size), dict[int, int]()
            arrived |= self._words.arrived([each for each in ranks if each not in arrived])
            waiting = self._words.waiting([each for each in ranks if each not in arrived])
            if max((*arrived.values(), *waiting.values())) > self.begun:
                self._begin(0)
                self._take_up()
            elif len(arrived) == len(ranks):  # turns go by steps: who has caught up goes on where the furthest is
                self.steps = max(self._words.steps(ranks).values())
                return
            elif time.monotonic() > deadline:
                missing = ", ".join(str(each) for each in ranks if each not in arrived)
                raise RuntimeError(
                    f"synchronize(): rank {missing} has not come within `timeout` of {timeout}; all ranks must call it"
                )
            else:
                time.sleep(LOOK_SECONDS)
