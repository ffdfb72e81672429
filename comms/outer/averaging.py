"""Averages fragments' pseudo-gradients over the ranks: starts an exchange, waits for it, repeats it after a loss.

exchange.py decides when, and applies the result. Nothing takes effect here: what the compressor keeps back is staged
until `decide` commits or drops it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.bootstrap.probe import FindExited
from gradwire.comms.communicator import Communicator
from gradwire.comms.compression import Compression, is_finite
from gradwire.comms.elastic.resilient_ops import ResilientOps
from gradwire.comms.outer.fragments import Fragment
from gradwire.comms.outer.messages import MeetingMessages
from gradwire.comms.plan.plan import Plan
from gradwire.comms.plan.rank_plans import RankPlans
from gradwire.comms.run.all_reduces import AllReduce, Bucket, FutureTensor
from gradwire.comms.step.listeners import Listeners
from gradwire.compressors.base import Layout, StateDict
from gradwire.compressors.residual import keep_until_read

TELL_SECONDS = 0.2
"""Seconds that a rank waits for a result before it publishes so, for ranks that have taken fewer steps. Not at once,
because the store is on the link that is waited for."""


def agreement_of(store: Store, rank: int, size: int, timeout: timedelta, ended: FindExited | None = None) -> Agreement:
    """Makes the agreement by which the ranks compare settings, choices and saved states.

    Args:
        store: Store that all ranks share, with keys of its own for each agreement.
        rank: Rank of this process.
        size: Number of ranks.
        timeout: Longest wait for the last rank.
        ended: Returns which of the given ranks have exited; None disables the check.
    """
    return Agreement(store, rank, size, "Outer", timeout, "make Outer, load its state and synchronize it", ended)


@dataclass(slots=True)
class LeavingBytes:
    """Bytes that have left a node's NIC.

    Attributes:
        exchanged: In exchanges.
        synchronized: In `synchronize`, which averages in full precision.
    """

    exchanged: float = 0.0
    synchronized: float = 0.0


@dataclass(slots=True)
class Pending:
    """An exchange in flight.

    Attributes:
        number: Index of the fragment.
        due: Step after which the result takes effect.
        flat: (numel) the pseudo-gradient, in place its average over all ranks.
        sent: (numel) the parameters when it began; None if it takes effect at once.
        compares: Whether the ranks compare the fragment's anchors meanwhile.
        future: Of the average; None once it is there.
        checksums: Future of the ranks' checksums, int64; None if they are not compared.
        differing: Ranks whose anchors differ from those of rank 0.
        finite: Whether the average is finite; None while it is in flight.
        error: Why there is no average and will be none.
        communicator: The one that it was begun with.
        bucket: What is sent; None if nothing is.
    """

    number: int
    due: int
    flat: Tensor
    sent: Tensor | None
    compares: bool = False
    future: FutureTensor | None = None
    checksums: FutureTensor | None = None
    differing: tuple[int, ...] = ()
    finite: bool | None = None
    error: RuntimeError | None = None
    communicator: Communicator | None = None
    bucket: Bucket | None = None


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

    def nbytes(self, rank_plans: RankPlans, flat: Tensor, layout: Layout | None) -> float:
        """Bytes that leave the busiest node in the exchange of `flat`.

        Args:
            rank_plans: By which it travels.
            flat: The pseudo-gradient.
            layout: Of a compressed one; None for one in full precision.
        """
        if layout is None:
            plan = rank_plans.unlisted(flat.numel(), flat.dtype).plan
        else:
            plan = rank_plans.plan_for(flat.numel(), flat.dtype, layout).plan
        known = self._known.get(layout)
        if known is None or known[0] is not plan:
            names = rank_plans.cluster.level_names
            level = names[1 if len(names) > 1 and len(rank_plans.cluster.nodes) > 1 else 0]
            known = self._known[layout] = plan, plan.bytes_by_level.get(level, 0.0)
        return known[1]


class FragmentAveraging:
    """Averages pseudo-gradients over the ranks of a communicator, also after some of them were lost.

    Args:
        communicator: Ranks that hold the same parameters (of a sharded model: the same shards); closed by the caller.
        compression: State of the communicator's compressor; None exchanges exactly.
        agreement: Agreement of all ranks of the job; None if the communicator has all of them.
        alone: Whether there is one worker: nothing is sent, and its own pseudo-gradient is the average.

    Attributes:
        messages: Counters that ranks publish for those that have taken other numbers of steps.
        nic_bytes: Bytes that have left the busiest node, by the plans; on one node, the busiest rank.
        waited_seconds: Seconds in which this rank has only waited for a result.
        resilient_ops: Repeats operations after a rank failure; None if a rank failure ends the job.
        listeners: Listeners of the exchanges, which may want times; None if there are none.
    """

    def __init__(
        self, communicator: Communicator, compression: Compression | None, agreement: Agreement | None, alone: bool
    ) -> None:
        self.communicator = communicator
        self.compression = compression
        self.agreement = agreement or agreement_of(
            communicator.plain_store,
            communicator.rank,
            communicator.size,
            communicator.config.timeout,
            communicator.peer_wait().exited_among,
        )
        self.alone = alone or communicator.size == 1
        self.messages = MeetingMessages(communicator)
        self.nic_bytes, self.waited_seconds = LeavingBytes(), 0.0
        self.resilient_ops: ResilientOps | None = None
        self.listeners: Listeners | None = None
        self._memory, self._leaving = _Memory(), _Leaving()

    def reconnect(self, communicator: Communicator, agreement: Agreement) -> None:
        """Goes on among other ranks.

        Args:
            communicator: Of the ranks that are left.
            agreement: Of the same ones.
        """
        self.communicator, self.agreement = communicator, agreement
        self.messages.reconnect(communicator)
        self.alone = communicator.size == 1
        if self.compression is not None:
            self.compression.renumber(communicator.rank, communicator.size)
            communicator.state_loaded(alike=False)  # of a node's workers one may be lost, with its part

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Gives all ranks rank 0's values, in place.

        Args:
            tensors: Floating-point.

        Raises:
            RuntimeError: The ranks could not exchange them.
        """
        if self.communicator.size > 1:
            for tensor in tensors:
                flat = tensor.reshape(-1).clone() if self.communicator.rank == 0 else tensor.new_zeros(tensor.numel())
                self._all_reduce_dense(flat, 1.0)
                tensor.copy_(flat.view(tensor.shape))

    def prepared(
        self, fragments: Sequence[Fragment], number: int, due: int, *, kept: bool, compares: bool = False
    ) -> Pending:
        """A fragment's pseudo-gradient as of now, to be exchanged, in memory that all exchanges take turns in.

        Args:
            fragments: Of the model.
            number: Which of them.
            due: The step after which it is taken up.
            kept: The parameters as of now are kept beside it.
            compares: Whether the ranks compare the fragment's anchors meanwhile.
        """
        flat, sent = self._memory.of(fragments, number)
        fragments[number].set_out(flat, sent if kept else None)
        return Pending(number, due, flat, sent if kept else None, compares)

    def launch(self, fragment: Fragment, pending: Pending) -> None:
        """Sends a pseudo-gradient on its way; the host goes on."""
        pending.future, pending.checksums, pending.communicator = None, None, self.communicator
        flat = pending.flat
        if not fragment.numel:
            return
        if self.alone:
            self._take_back(fragment, flat)
            return
        timed = self.listeners is not None and self.listeners.wants_times
        arrived = self.communicator.clock.now() if timed else None
        pending.bucket = bucket = Bucket.of(flat, fragment.layout, arrived, pending.number)
        flush = self.compression is not None and self.compression.flushing
        all_reduce = AllReduce(
            (flat,), fragment.layout if self.compression is not None else None, (bucket,), alone=True
        )
        self.communicator.start(all_reduce, scale=1.0 / self.communicator.size, flush=flush)
        pending.future = bucket.result()
        if pending.compares:
            pending.checksums = self._launch_checksums([fragment])
        self.nic_bytes.exchanged += self._leaving.nbytes(
            self.communicator.rank_plans, flat, None if flush else all_reduce.layout
        )

    def finish(self, fragment: Fragment, pending: Pending, begun: int) -> None:
        """Waits until `flat` holds the average, and sees whether that is finite.

        Args:
            fragment: Of the model.
            pending: Its exchange, which is under way.
            begun: Exchanges that this rank has begun.

        Raises:
            RuntimeError: The exchange failed; the next call raises the same.
        """
        travels = not self.alone and fragment.numel > 0
        began = time.perf_counter()
        try:
            if travels:
                self._arrive(fragment, pending, begun)
                if self.resilient_ops is None and pending.checksums is not None:
                    pending.differing = _differing(pending.checksums.wait())
            finite = is_finite(pending.flat)  # on CUDA the host waits here
            if travels:
                self.communicator.executor.release()  # and hears here of what was given up meanwhile
        except RuntimeError as error:
            pending.error = error  # what `flat` holds then is no average, and never will be
            if self.communicator.device.type != "cuda":  # there nothing can be issued any more: nothing commits it
                self.decide(False, [fragment])
            raise
        finally:
            pending.future = pending.checksums = None
            self.waited_seconds += time.perf_counter() - began if travels else 0.0
        pending.finite = finite

    def decide(self, finite: bool, fragments: Sequence[Fragment]) -> None:
        """Says what becomes of what the compressor has staged for some fragments: whether their averages count."""
        layouts = [fragment.layout for fragment in fragments if fragment.numel]
        if self.compression is not None and layouts:
            with self.communicator.exclusive():
                self.compression.decide(finite, layouts)

    def averages(self, fragments: Sequence[Fragment], announce: Callable[[], None]) -> tuple[list[Tensor], str]:
        """Averages all fragments' pseudo-gradients now, in full precision, with what is held back, and decides on that.

        Args:
            fragments: Of the model.
            announce: Says that this rank has come to the meeting, to ranks that a loss has left.

        Returns:
            The averages, and the name of a parameter that is not finite on some rank; "" without one.

        Raises:
            RuntimeError: The ranks could not exchange them.
        """
        finite, before = False, self.nic_bytes.exchanged
        try:
            averages, unfinished = self._averages(fragments, announce)
            finite = not unfinished
        finally:
            self.decide(finite, fragments)
            if self.compression is not None:
                self.compression.flushing = False
            self.nic_bytes = LeavingBytes(before, self.nic_bytes.synchronized + self.nic_bytes.exchanged - before)
        if (
            self.resilient_ops is not None and not self.alone
        ):  # when it ends, all have the averages, and nobody keeps them
            self.mean_of(fragments[0].anchor.new_zeros(1))
        return averages, unfinished

    def differing(self, fragments: Sequence[Fragment]) -> tuple[int, ...]:
        """Compares all anchors and momenta over the ranks, and returns those whose differ from rank 0's.

        Raises:
            RuntimeError: The ranks could not exchange their checksums.
        """

        def attempt() -> Tensor:
            return self._wait(self._launch_checksums(fragments))

        if self.resilient_ops is None:
            return _differing(attempt())
        like = torch.empty(self.communicator.size, dtype=torch.int64, device=self.communicator.device)
        found = self.resilient_ops.complete(attempt, like)
        assert found is not None
        return _differing(found)

    def mean_of(self, flat: Tensor, announce: Callable[[], None] | None = None) -> Tensor:
        """Returns the average of a small tensor over all ranks, a new one.

        Args:
            flat: 1-D floating-point; read.
            announce: Publishes that this rank has come to the meeting, for ranks that a loss has left in it.

        Raises:
            RuntimeError: The ranks could not exchange it.
        """

        def attempt() -> Tensor:
            if announce is not None and not self.messages.announced:
                announce()
            return self._all_reduce_dense(flat.clone(), 1.0 / self.communicator.size)

        found = attempt() if self.resilient_ops is None else self.resilient_ops.complete(attempt, like=flat)
        assert found is not None
        return found

    def held(self) -> StateDict:
        """What the compressor holds back."""
        if self.compression is None:
            return {}
        held = self.compression.state_dict()
        self.communicator.sync_current_stream()
        return held

    def load_held(self, held: StateDict) -> None:
        """Restores what `held` has returned."""
        if self.compression is not None:
            with self.communicator.exclusive():
                self.compression.load_state_dict(held)
            self.communicator.state_loaded(alike=self.compression.alike)

    def try_on(self, held: StateDict) -> None:
        """Checks that the compressor can load a state, and leaves it as it was.

        Raises:
            ValueError: It cannot.
        """
        if self.compression is None:
            return
        with self.communicator.exclusive():
            present = self.compression.state_dict()
            try:
                self.compression.load_state_dict(held)
            finally:
                self.compression.load_state_dict(present)
        self.communicator.sync_current_stream()

    def _averages(self, fragments: Sequence[Fragment], announce: Callable[[], None]) -> tuple[list[Tensor], str]:
        resilient_ops = self.resilient_ops
        if resilient_ops is None or self.alone:
            return self._averages_now(fragments)
        names = ["", *(name for fragment in fragments for name in fragment.names)]
        sizes = [fragment.numel for fragment in fragments]
        wide = max((fragment.anchor.dtype for fragment in fragments), key=lambda dtype: dtype.itemsize)

        def attempt() -> Tensor:
            self.decide(False, fragments)  # what an attempt before this one has staged
            if not self.messages.announced:  # others may not have seen that all have met before a rank was lost
                announce()
            averages, unfinished = self._averages_now(fragments)
            mark = averages[0].new_tensor([names.index(unfinished)], dtype=wide)
            return torch.cat([mark, *(average.to(wide) for average in averages)])

        like = torch.empty(1, dtype=wide, device=self.communicator.device).expand(1 + sum(sizes))
        found = resilient_ops.complete(attempt, like)
        assert found is not None
        parts = found[1:].split_with_sizes(sizes)
        averages = [part.to(each.anchor.dtype) for part, each in zip(parts, fragments, strict=True)]
        return averages, names[int(found[0])]

    def _averages_now(self, fragments: Sequence[Fragment]) -> tuple[list[Tensor], str]:
        averages, unfinished = [self._average_of(number, each) for number, each in enumerate(fragments)], ""
        for fragment, average in zip(fragments, averages, strict=True):
            if not unfinished and not is_finite(average):
                unfinished = fragment.unfinished(average)[0]
        self.communicator.executor.release()  # on CUDA the host has waited, and hears of what was given up
        return averages, next((name for name in self.agreement.gather(unfinished) if name), "")

    def _average_of(self, number: int, fragment: Fragment) -> Tensor:
        """The average of a fragment's pseudo-gradients now, in memory of its own; decides nothing."""
        if self.compression is not None:
            self.compression.flushing = True
        pending = Pending(number, 0, fragment.empty(), None)
        fragment.set_out(pending.flat, None)
        self.launch(fragment, pending)
        if pending.future is not None:
            began = time.perf_counter()
            self._wait(pending.future)
            self.waited_seconds += time.perf_counter() - began
        return pending.flat

    def _take_back(self, fragment: Fragment, flat: Tensor) -> None:
        """Adds the residual to a pseudo-gradient.

        Used when this is the last worker: nothing is sent any more, so the residual would be lost. The next commit
        clears it.

        Args:
            fragment: Of the model.
            flat: (numel) its pseudo-gradient, changed in place.
        """
        if self.compression is None:
            return
        with self.communicator.exclusive():
            held = torch.zeros_like(flat, dtype=torch.float32)
            self.compression.compressor.flush(held, fragment.layout)
        self.communicator.sync_current_stream()
        keep_until_read(held)
        flat.add_(held)

    def _arrive(self, fragment: Fragment, pending: Pending, begun: int) -> None:
        """Waits until `flat` holds the average, of those that are left where ranks are lost and that is wanted.

        Raises:
            RuntimeError: The exchange failed.
        """
        if self.resilient_ops is None:
            assert pending.future is not None
            if self.communicator.device.type == "cuda":
                self.messages.publish_begun(begun)
            elif not pending.future.done():
                arrived = threading.Event()
                pending.future.add_done_callback(lambda _: arrived.set())
                if not arrived.wait(TELL_SECONDS):
                    self.messages.publish_begun(begun)
            pending.future.wait()
            return
        average = self.resilient_ops.complete(lambda: self._attempt(fragment, pending, begun), like=pending.flat)
        assert average is not None
        pending.flat.copy_(average)

    def _attempt(self, fragment: Fragment, pending: Pending, begun: int) -> Tensor:
        """The average: a copy, which is kept for ranks that a loss has left behind. Begun anew among other ranks."""
        if pending.communicator is not self.communicator:
            self.decide(False, [fragment])
            now = fragment.gather(pending.flat) if pending.sent is None else pending.sent
            fragment.progress(now, pending.flat)
            self.launch(fragment, pending)
        if pending.future is not None:
            self.messages.publish_begun(begun)
            self._wait(pending.future)
            if pending.checksums is not None:
                pending.differing = _differing(self._wait(pending.checksums))
        return pending.flat.clone()

    def _wait(self, future: FutureTensor) -> Tensor:
        return future.wait() if self.resilient_ops is None else self.resilient_ops.wait(future)

    def _launch_checksums(self, fragments: Sequence[Fragment]) -> FutureTensor:
        """Starts the exchange of checksums: (ranks) int64, each rank's own in its place."""
        words = torch.zeros(self.communicator.size, dtype=torch.int64, device=self.communicator.device)
        for fragment in fragments:
            own = words[self.communicator.rank]
            own.mul_(31).add_(fragment.checksum())
        return self.communicator.all_reduce(words)

    def _all_reduce_dense(self, flat: Tensor, scale: float) -> Tensor:
        bucket = Bucket.of(flat)
        if flat.numel():
            self.communicator.start(AllReduce((flat,), None, (bucket,), counted=False), scale=scale)
            self._wait(bucket.result())
        return flat


def _differing(checksums: Tensor) -> tuple[int, ...]:
    """Ranks whose checksum is not that of rank 0; on CUDA the host waits for them."""
    first, *others = checksums.tolist()
    return tuple(rank for rank, each in enumerate(others, 1) if each != first)
