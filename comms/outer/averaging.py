"""Averages pseudo-gradients over the ranks of a session: `FragmentAveraging` starts an exchange and waits for it.

In elastic training it repeats an exchange after a rank failure. exchange.py decides when to start one, and applies its
result. No average is applied here: the compressor's new residuals are staged until `decide` commits or drops them.
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
from gradwire.comms.outer.messages import BarrierCounters
from gradwire.comms.plan.plan import Plan
from gradwire.comms.plan.rank_plans import RankPlans
from gradwire.comms.run.all_reduces import AllReduce, Bucket, FutureTensor
from gradwire.comms.session import AveragingSession
from gradwire.compressors.base import Layout, StateDict
from gradwire.compressors.residual import keep_until_read

PUBLISH_AFTER_SECONDS = 0.2
"""Seconds that a rank waits for a result before it publishes that it waits, for ranks that have taken fewer steps. It
does not publish at once, because requests to the store use the same link as the exchange."""


def agreement_of(store: Store, rank: int, size: int, timeout: timedelta, ended: FindExited | None = None) -> Agreement:
    """Returns the agreement by which the ranks compare settings, choices and saved states.

    Args:
        store: Store that all ranks share, with keys of its own for each agreement.
        rank: Rank of this process.
        size: Number of ranks.
        timeout: Longest wait for the last rank.
        ended: Returns which of the given ranks have exited; None disables the check.
    """
    return Agreement(store, rank, size, "Outer", timeout, "make Outer, load its state and synchronize it", ended)


@dataclass(slots=True)
class SentBytes:
    """Bytes that have left the busiest node through its NIC so far, computed from the plans, not measured.

    On a single node they are those of the busiest rank.

    Attributes:
        exchanged: Bytes of exchanges of pseudo-gradients.
        synchronized: Bytes of `synchronize`, which averages in full precision.
    """

    exchanged: float = 0.0
    synchronized: float = 0.0


@dataclass(slots=True)
class Pending:
    """An exchange in flight.

    Attributes:
        number: Index of the fragment in the model.
        due: Number of the optimizer step after which the result takes effect.
        flat: (numel) pseudo-gradient, replaced by its average over all ranks.
        sent: (numel) parameters when the exchange began; None if the result takes effect at once.
        compares: True if the ranks compare the fragment's anchors meanwhile.
        future: Future of the average; None if it is there or nothing is sent.
        checksums: Future of the ranks' checksums, int64; None if they are not compared.
        differing: Ranks whose anchors differ from those of rank 0.
        finite: Whether the average is finite; None while it is in flight.
        error: Error of the exchange, after which there is no average; None otherwise.
        communicator: Communicator that the exchange began with; None if it could not be started because a rank had
            failed.
        bucket: Bucket that is sent; None if nothing is sent.
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
    """Keeps the memory of exchanges, which all fragments share, because one exchange is in flight at a time."""

    def __init__(self) -> None:
        self._fragments: Sequence[Fragment] = ()  # the fragments that `_parts` belongs to
        self._parts: list[tuple[Tensor, Tensor]] = []

    def of(self, fragments: Sequence[Fragment], number: int) -> tuple[Tensor, Tensor]:
        """Returns the (numel) tensors `Pending.flat` and `Pending.sent` for the exchange of one fragment.

        Args:
            fragments: Fragments of the model. They are replaced once, when the schedule is chosen.
            number: Index of the fragment.
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
    """Computes how many bytes leave the busiest node in an exchange, from its plan; on a single node, the busiest rank.

    The result for each layout is kept.
    """

    def __init__(self) -> None:
        self._known: dict[Layout | None, tuple[Plan, float]] = {}

    def nbytes(self, rank_plans: RankPlans, flat: Tensor, layout: Layout | None) -> float:
        """Returns the bytes that leave the busiest node in the exchange of `flat`.

        Args:
            rank_plans: Plans of the communicator.
            flat: Pseudo-gradient, 1-D.
            layout: Place of each parameter in `flat` if it is compressed; None for full precision.
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
    """Averages pseudo-gradients over the ranks of a session, also after some of them have failed.

    Args:
        session: Ranks that hold the same parameters (of a sharded model: the same shards); closed by the caller.
        agreement: Agreement of all ranks of the job; None if the session has all of them.
        alone: True if there is one worker: nothing is sent, and its own pseudo-gradient is the average.

    Attributes:
        session: Present ranks, their compressor, and the listeners of the exchanges.
        agreement: Agreement of all present ranks of the job.
        alone: True if nothing is sent.
        messages: Counters that ranks publish for those that have taken other numbers of steps.
        nic_bytes: Bytes that have left the busiest node, by the plans; on one node, the busiest rank.
        waited_seconds: Seconds in which this rank has only waited for a result.
        resilient_ops: Repeats operations after a rank failure; None if a rank failure ends the job.
    """

    def __init__(self, session: AveragingSession, agreement: Agreement | None, alone: bool) -> None:
        self.session, communicator = session, session.communicator
        self.agreement = agreement or agreement_of(
            communicator.plain_store,
            communicator.rank,
            communicator.size,
            communicator.config.timeout,
            communicator.peer_wait().exited_among,
        )
        self.alone = alone or communicator.size == 1
        self.messages = BarrierCounters(communicator)
        self.nic_bytes, self.waited_seconds = SentBytes(), 0.0
        self.resilient_ops: ResilientOps | None = None
        self._memory, self._leaving = _Memory(), _Leaving()

    @property
    def communicator(self) -> Communicator:
        """Communicator of the present ranks."""
        return self.session.communicator

    @property
    def compression(self) -> "Compression | None":
        """State of the communicator's compressor; None exchanges exactly."""
        return self.session.compression

    def reconnect(self, session: AveragingSession, agreement: Agreement) -> None:
        """Continues with the ranks that are left after a rank failure, and renumbers the compressor's state for them.

        From then on nothing is sent if one rank is left. It repeats no exchange itself.

        Args:
            session: Session of the ranks that are left, with the compressor of the session before.
            agreement: Agreement of the same ranks.
        """
        self.session, self.agreement, communicator = session, agreement, session.communicator
        self.messages.reconnect(communicator)
        self.alone = communicator.size == 1
        if self.compression is not None:
            self.compression.renumber(communicator.rank, communicator.size)
            communicator.state_loaded(as_saved=False)  # a failed worker may have held a part of its node's state

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Gives all ranks of the session rank 0's values, in place and uncompressed; all of them call it.

        Args:
            tensors: Floating-point tensors, the same in number and shape on all ranks.

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
        """Returns a new exchange with a fragment's present pseudo-gradient, in memory that all exchanges share.

        Args:
            fragments: Fragments of the model.
            number: Index of the fragment.
            due: Step after which the result takes effect.
            kept: True keeps a copy of the present parameters, in `Pending.sent`.
            compares: True makes the ranks compare the fragment's anchors meanwhile.
        """
        flat, sent = self._memory.of(fragments, number)
        fragments[number].write_pseudo_gradient(flat, sent if kept else None)
        return Pending(number, due, flat, sent if kept else None, compares)

    def launch(self, fragment: Fragment, pending: Pending) -> None:
        """Starts the all-reduce of a fragment's pseudo-gradient, and returns without waiting for it.

        All ranks of the session call it, in the same order. The bytes are added to `nic_bytes.exchanged`. With one
        worker nothing is sent: the compressor's residual is added to the pseudo-gradient, which is the average then.
        Nothing happens for a fragment without elements on this rank.

        Args:
            fragment: Fragment of the exchange.
            pending: The exchange: `flat` is averaged in place; `future`, `communicator`, `bucket` and, if anchors are
                compared, `checksums` are set.

        Raises:
            RuntimeError: The all-reduce could not be started.
        """
        pending.future, pending.checksums, pending.communicator = None, None, self.communicator
        flat = pending.flat
        if not fragment.numel:
            return
        if self.alone:
            self._add_residual(fragment, flat)
            return
        arrived = self.communicator.clock.now() if self.session.listeners.wants_times else None
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
        """Waits until an exchange has ended, and stores its result in `pending`.

        Args:
            fragment: Fragment of the exchange.
            pending: The exchange, which `launch` has started. On return `flat` is the average, `finite` says whether
                it is finite, and `differing` has the ranks with other anchors if anchors are compared. `error` is set
                if the exchange fails. `future` and `checksums` are None afterwards in both cases.
            begun: Number of exchanges that this rank has begun. It is published while this rank waits: ranks that have
                begun fewer, because they have taken fewer steps, then start this exchange, too.

        Raises:
            RuntimeError: The exchange failed. Residuals that it has staged are dropped, except on CUDA.
        """
        sends = not self.alone and fragment.numel > 0
        began = time.perf_counter()
        try:
            if sends:
                self._arrive(fragment, pending, begun)
                if self.resilient_ops is None and pending.checksums is not None:
                    pending.differing = _differing(pending.checksums.wait())
            finite = is_finite(pending.flat)  # on CUDA the host waits here
            if sends:
                self.communicator.executor.release()  # raises the error of an abort meanwhile
        except RuntimeError as error:
            pending.error = error  # `flat` holds no average
            if (
                self.communicator.device.type != "cuda"
            ):  # on CUDA nothing can be issued after an abort, and nothing commits
                self.decide(False, [fragment])
            raise
        finally:
            pending.future = pending.checksums = None
            self.waited_seconds += time.perf_counter() - began if sends else 0.0
        pending.finite = finite

    def decide(self, finite: bool, fragments: Sequence[Fragment]) -> None:
        """Ends exchanges for the compressor: commits the new residuals that it has staged, or drops them.

        Without a compressor it does nothing.

        Args:
            finite: Whether the averages are finite: True commits the new residuals, False keeps the old ones.
            fragments: Fragments that were exchanged.
        """
        layouts = [fragment.layout for fragment in fragments if fragment.numel]
        if self.compression is not None and layouts:
            with self.communicator.exclusive():
                self.compression.decide(finite, layouts)

    def averages(self, fragments: Sequence[Fragment], announce: Callable[[], None]) -> tuple[list[Tensor], str]:
        """Averages all fragments' pseudo-gradients now, in full precision and with the compressor's residuals.

        All ranks call it. If all averages are finite, the residuals are cleared; else they stay. The bytes count as
        `nic_bytes.synchronized`.

        Args:
            fragments: Fragments of the model.
            announce: Publishes that this rank is in `synchronize`, for ranks that wait there after a rank failure.

        Returns:
            The averages, and the name of a parameter that is not finite on some rank; "" if all are finite.

        Raises:
            RuntimeError: The ranks could not exchange them.
        """
        # Count what is sent here as bytes of `synchronize`, not of exchanges.
        finite, before = False, self.nic_bytes.exchanged
        try:
            averages, nonfinite = self._averages(fragments, announce)
            finite = not nonfinite
        finally:
            self.decide(finite, fragments)
            if self.compression is not None:
                self.compression.flushing = False
            self.nic_bytes = SentBytes(before, self.nic_bytes.synchronized + self.nic_bytes.exchanged - before)
        # When this ends, all ranks have the averages, and none keeps a copy for others.
        if self.resilient_ops is not None and not self.alone:
            self.mean_of(fragments[0].anchor.new_zeros(1))
        return averages, nonfinite

    def differing(self, fragments: Sequence[Fragment]) -> tuple[int, ...]:
        """Compares the fragments' anchors and momenta, and returns the ranks whose values differ from those of rank 0.

        All ranks of the session call it, and wait for the result.

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
        """Returns a new tensor with the average of a small tensor over all ranks, uncompressed; all ranks call it.

        Args:
            flat: 1-D floating-point tensor; not changed.
            announce: Publishes that this rank is in `synchronize`, for ranks that wait there after a rank failure.

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

    def check_loadable(self, held: StateDict) -> None:
        """Checks whether the compressor can load a state, by loading it and then its own state again.

        Without a compressor it does nothing.

        Args:
            held: Result of the session's `state_dict`; empty without a compressor.

        Raises:
            ValueError: It cannot load the state; it has its own again.
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
        """Does what `averages` does, except for the residuals; in elastic training repeated after a rank failure."""
        resilient_ops = self.resilient_ops
        if resilient_ops is None or self.alone:
            return self._averages_now(fragments)
        names = ["", *(name for fragment in fragments for name in fragment.names)]
        sizes = [fragment.numel for fragment in fragments]
        wide = max((fragment.anchor.dtype for fragment in fragments), key=lambda dtype: dtype.itemsize)

        def attempt() -> Tensor:
            # Drop what an earlier attempt has staged. Ranks may have failed before all others saw that all were here.
            self.decide(False, fragments)
            if not self.messages.announced:
                announce()
            averages, nonfinite = self._averages_now(fragments)
            mark = averages[0].new_tensor([names.index(nonfinite)], dtype=wide)
            return torch.cat([mark, *(average.to(wide) for average in averages)])

        like = torch.empty(1, dtype=wide, device=self.communicator.device).expand(1 + sum(sizes))
        found = resilient_ops.complete(attempt, like)
        assert found is not None
        parts = found[1:].split_with_sizes(sizes)
        averages = [part.to(each.anchor.dtype) for part, each in zip(parts, fragments, strict=True)]
        return averages, names[int(found[0])]

    def _averages_now(self, fragments: Sequence[Fragment]) -> tuple[list[Tensor], str]:
        """Averages the pseudo-gradients of all fragments now, uncompressed and with residuals; all ranks call it.

        It does not try again after a rank failure; `_averages` does. See `_average_of` for what happens to residuals.

        Args:
            fragments: Fragments of the model, in the same order on all ranks.

        Returns:
            New (numel) tensor with the average of each fragment. And the name of a parameter whose average has an
            element that is not finite, or "" without one: the same on all ranks, also on those that do not hold it.

        Raises:
            RuntimeError: An exchange failed.
        """
        averages, nonfinite = [self._average_of(number, each) for number, each in enumerate(fragments)], ""
        for fragment, average in zip(fragments, averages, strict=True):
            if not nonfinite and not is_finite(average):
                nonfinite = fragment.nonfinite(average)[0]
        self.communicator.executor.release()  # raises the error of an abort meanwhile; on CUDA the host has waited
        return averages, next((name for name in self.agreement.gather(nonfinite) if name), "")

    def _average_of(self, number: int, fragment: Fragment) -> Tensor:
        """Averages one fragment's present pseudo-gradients over all ranks now, uncompressed and with residuals.

        It leaves the compressor in flush mode (sends no payloads, but adds its residuals to what it sends exactly); the
        caller ends that mode. The cleared residuals are only staged until `decide`.

        Args:
            number: Index of the fragment in the model.
            fragment: The fragment.

        Returns:
            New (numel) tensor with the average; on one worker its own pseudo-gradient with the residual.

        Raises:
            RuntimeError: The exchange failed.
        """
        if self.compression is not None:
            self.compression.flushing = True
        pending = Pending(number, 0, fragment.empty(), None)
        fragment.write_pseudo_gradient(pending.flat, None)
        self.launch(fragment, pending)
        if pending.future is not None:
            began = time.perf_counter()
            self._wait(pending.future)
            self.waited_seconds += time.perf_counter() - began
        return pending.flat

    def _add_residual(self, fragment: Fragment, flat: Tensor) -> None:
        """Adds the residual to a pseudo-gradient.

        Used by the last worker, which no longer sends: the residual would be lost otherwise. The next commit
        clears it.

        Args:
            fragment: Fragment of the model.
            flat: (numel) pseudo-gradient of the fragment, changed in place.
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
        """Waits until `pending.flat` holds the average; in elastic training, the average of the surviving ranks.

        Args:
            fragment: Fragment of the exchange.
            pending: The exchange, which `launch` has started; `flat` is set, and in elastic training `differing`.
            begun: Number of exchanges that this rank has begun. It is published while this rank waits, for ranks that
                have taken fewer steps; see `PUBLISH_AFTER_SECONDS`.

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
                if not arrived.wait(PUBLISH_AFTER_SECONDS):
                    self.messages.publish_begun(begun)
            pending.future.wait()
            return
        average = self.resilient_ops.complete(lambda: self._attempt(fragment, pending, begun), like=pending.flat)
        assert average is not None
        pending.flat.copy_(average)

    def _attempt(self, fragment: Fragment, pending: Pending, begun: int) -> Tensor:
        """Waits for the average of an exchange in elastic training; called again after each rank failure.

        If the exchange was started among other ranks than the present ones, or not at all, this drops what it has
        staged, computes the pseudo-gradient again and starts the exchange anew.

        Args:
            fragment: Fragment of the exchange.
            pending: The exchange. `flat` becomes the average; `differing` is set if anchors are compared.
            begun: Number of exchanges that this rank has begun, which is published before it waits.

        Returns:
            (numel) copy of the average, which `ResilientOps.complete` keeps for ranks that have missed it.

        Raises:
            RuntimeError: A rank has failed, or the exchange has.
        """
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
        """Waits for a future and returns its value; in elastic training raises as soon as a rank has failed."""
        return future.wait() if self.resilient_ops is None else self.resilient_ops.wait(future)

    def _launch_checksums(self, fragments: Sequence[Fragment]) -> FutureTensor:
        """Starts an all-reduce whose result is (ranks) int64, with each rank's checksum of the fragments in its place.

        The checksum is of anchors and momenta.
        """
        words = torch.zeros(self.communicator.size, dtype=torch.int64, device=self.communicator.device)
        for fragment in fragments:
            own = words[self.communicator.rank]
            own.mul_(31).add_(fragment.checksum())
        return self.communicator.all_reduce(words)

    def _all_reduce_dense(self, flat: Tensor, scale: float) -> Tensor:
        """Sums a 1-D tensor over the ranks uncompressed, times `scale`, in place; waits for it and returns it.

        Nothing is sent of a tensor without elements. A report does not count the sum as a bucket.
        """
        bucket = Bucket.of(flat)
        if flat.numel():
            self.communicator.start(AllReduce((flat,), None, (bucket,), counted=False), scale=scale)
            self._wait(bucket.result())
        return flat


def _differing(checksums: Tensor) -> tuple[int, ...]:
    """Returns the ranks whose checksum, in a (ranks) int64 tensor, is not that of rank 0; on CUDA the host waits."""
    first, *others = checksums.tolist()
    return tuple(rank for rank, each in enumerate(others, 1) if each != first)
