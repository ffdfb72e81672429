"""Repeats operations of all ranks after a rank failure, among the survivors, until they complete.

Each rank counts the operations that it has completed: the reduction of a step's gradients is one, a broadcast of DDP's
buffers is another. Each ends with an all-reduce that needs every rank, so no rank can complete an operation before
every other one has completed the one before it: after a failure the survivors' counts differ by at most one. A rank
that is behind takes the result from one that is ahead (for a step, its last all-reduce shows that all ranks have the
averages already), so no rank steps where another does not. If all counts are equal the survivors repeat the operation
from copies of its input: of the step only the part that the failed ranks had computed is lost.
"""

import ctypes
import errno
import logging
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import PrefixStore, Store
from gradwire.comms.bootstrap.failure_reporter import CollectiveError, FailureReporter
from gradwire.comms.bootstrap.failures import FAILED, GroupFailures, PeerFailure
from gradwire.comms.bootstrap.store import unprefixed
from gradwire.comms.communicator import Communicator, FailurePolicy
from gradwire.comms.elastic.joining import JoiningProcess, Requests
from gradwire.comms.elastic.membership import (
    LEADER_SECONDS,
    SILENCE_SECONDS,
    EvictedError,
    GenerationStore,
    Membership,
    View,
)
from gradwire.comms.elastic.peer_info import packed, peer_infos
from gradwire.comms.errors import PeerSystemError
from gradwire.comms.run.all_reduces import FutureTensor

if TYPE_CHECKING:  # loaded where it is asked for
    from gradwire.comms.run.stream_executor import StreamExecutor

log = logging.getLogger("gradwire")

AGREEMENT_SECONDS = 4 * (SILENCE_SECONDS + LEADER_SECONDS)
"""Longest wait in seconds for the vote on the surviving ranks, even if three of its leaders fail meanwhile."""

LANES_SECONDS = 60.0
"""Longest wait in seconds for lanes to end after their connections were aborted; usually milliseconds."""

MOST_REPEATS = 3
"""Number of repeats of one operation by the same members after which an error is raised: a broken connection is made
again, so an error that recurs has another cause."""

RECONNECT_SECONDS = 60.0
"""Seconds for which members that all live try to connect again; a network that recovers meanwhile ends no job."""

MOST_REFUSALS = 2
"""Number of times at which a rank leaves because the system has refused it memory or files while the ranks connect
again. After the first refusal it tries again, as other processes may have freed some; the other ranks go on."""

_REFUSALS = frozenset({errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE})
"""Error numbers (errno(3)) for resources that this process or its host lacks, whatever its peers do."""

Rebuild = Callable[[View, Store, FailurePolicy], Communicator]
"""Makes the communicator of a new generation; the one before is closed by then."""


KEPT_CHANGES = 1000
"""Number of the latest changes of the ranks that `ResilientOps.changes` keeps."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the ranks, and the time that it took on this rank.

    Attributes:
        generation: Number of the new generation.
        reason: Cause of the change, in counts.
        lost: Names of the processes that left or failed.
        joined: Names of the processes that joined.
        repeats: Whether the operation in progress, such as a step's reduction, is repeated after it.
        began: Time of its beginning, by time.time().
        seconds: Duration of each part in seconds, in order: `close` (aborting and closing the old communicator),
            `agree` (the vote on the members), `place` (placing the ranks and planning), `connect` (the first
            all-reduce, for which groups connect), `transfer` (sending the state to processes that join; only then).
    """

    generation: int
    reason: str
    lost: tuple[str, ...]
    joined: tuple[str, ...]
    repeats: bool
    began: float
    seconds: dict[str, float]

    def __str__(self) -> str:
        """Returns the whole duration and that of each part, as in `0.13 s (close 0.02, agree 0.11)`."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.2f} s ({parts})"


class _Stopwatch:
    """Measures how long the parts of a change of the ranks take.

    Attributes:
        began: Time at which it was made, by time.time().
        seconds: Name of each part -> its duration in seconds.
    """

    def __init__(self) -> None:
        self.began = time.time()
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Adds the time since the last call to the part `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


class OutOfResourcesError(CollectiveError):
    """A collective has failed because the system refused this rank memory or files; no peer is at fault."""


def _is_refusal(error: BaseException) -> bool:
    """Returns whether an error means that the system has refused this rank memory or files."""
    if isinstance(error, OSError):
        return error.errno in _REFUSALS and not isinstance(error, PeerSystemError)
    return isinstance(error, (OutOfResourcesError, torch.OutOfMemoryError))


class GenerationFailureReporter(FailureReporter):
    """Reports failures of one generation's communicator; which ranks are left, `Membership` finds out.

    Args:
        rank: This rank's number in the generation.
        failures: Rank failures found in the generation so far; reports are added to it.
    """

    def diagnose(
        self, error: BaseException, phase: str, members: Sequence[int], *, launches: int = 0, waiting: bool = True
    ) -> CollectiveError:
        """Ends the generation for all ranks, and returns the error for this rank's futures.

        Args:
            error: Error that the collective raised on this rank.
            phase: Name of the collective, for the message.
            members: Not used here: the vote on the members finds the missing ranks.
            launches: Not used here.
            waiting: Not used here.

        Returns:
            An error without missing ranks; an `OutOfResourcesError` if the system refused this rank memory or files.
        """
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        self.signal_abort(f"{phase} failed: {cause}")
        kind = OutOfResourcesError if _is_refusal(error) else CollectiveError
        return kind(f"{phase} failed: {cause}", ())


def first_failure_policy(rank: int, size: int, timeout: timedelta) -> FailurePolicy:
    """Returns the failure policy of the first communicator; the membership, made later, shares its `failures`.

    Args:
        rank: This rank.
        size: Number of ranks that start.
        timeout: Longest wait for a key in the store.
    """
    reporter = GenerationFailureReporter(rank, GroupFailures())
    return FailurePolicy(
        reporter,
        lambda store: GenerationStore(store, timeout, reporter.abort_reason, ranks=size),
        on_cuda=_stream_executor,
    )


def first_membership(communicator: Communicator, prefix: str, timeout: timedelta, first: FailurePolicy) -> Membership:
    """Makes the membership of the ranks that start together; they are named `rank 0`, `rank 1` and so on.

    Args:
        communicator: Communicator of all ranks that start.
        prefix: Prefix of the membership's keys in the store; unique to this start of the job.
        timeout: Longest wait for an answer of another rank.
        first: Failure policy of `communicator`.
    """
    names = tuple(f"rank {rank}" for rank in range(communicator.size))
    packed_infos = {name: packed(each) for name, each in zip(names, communicator.peer_infos, strict=True)}
    place = PrefixStore(prefix, unprefixed(communicator.plain_store))
    return Membership(place, View(0, communicator.rank, names), timeout, packed_infos, first.reporter.failures)


def unheld(rebuild: Rebuild) -> Rebuild:
    """Wraps a bound method in a function that does not keep the method's object alive.

    Args:
        rebuild: Method of an object that the caller keeps alive; afterwards the function must not be called.
    """
    method = weakref.WeakMethod(rebuild)

    def call(view: View, store: Store, failure_policy: FailurePolicy) -> Communicator:
        found = method()
        assert found is not None
        return found(view, store, failure_policy)

    return call


def failure_policy_of(view: View, membership: Membership, timeout: timedelta) -> FailurePolicy:
    """Returns the failure policy of the communicator that the members of a generation make.

    Args:
        view: Ranks of the generation, seen from this one.
        membership: Membership whose present generation it is.
        timeout: Longest wait for a key in the store.
    """
    reporter = GenerationFailureReporter(view.rank, membership.failures)
    return FailurePolicy(
        reporter,
        lambda store: GenerationStore(store, timeout, reporter.abort_reason, ranks=view.size),
        peer_infos(view.members, membership.packed_infos),
        _stream_executor,
    )


def _stream_executor() -> "type[StreamExecutor]":
    """Returns the class of the executor on CUDA."""
    from gradwire.comms.elastic.stream_executor import ResilientStreamExecutor  # here: CPU jobs need no streams

    return ResilientStreamExecutor


class ResilientOps:
    """Runs operations of all ranks (a step's reduction, a broadcast) so that they complete even if other ranks fail.

    Args:
        membership: Agrees with the other ranks on the members of each generation.
        communicator: Communicator of the membership's present generation.
        rebuild: Makes the communicator of the next generation.
        timeout: Longest wait for what the ranks of a generation exchange through the store.
        joins: Whether this rank joins a running job with this generation: every error is raised until the first
            `complete` has returned. From then on it is a rank like the others.

    Attributes:
        position: Number of operations completed on this rank.
        communicator: Communicator of the present generation.
        membership: Agrees with the other ranks on the members of each generation.
        repeated: Number of repeats of operations so far.
        has_begun: Returns whether this rank has sent a part of an operation for which it calls `complete` later.
        by_itself: Whether this rank ran the last operation to its end itself. If it did, so did all ranks of its
            generation, or they take the result in the next one. False if it took the result, after a rank failure, from
            ranks that had completed the operation before.
        changes: The last changes of membership, oldest first.
    """

    def __init__(
        self,
        membership: Membership,
        communicator: Communicator,
        rebuild: Rebuild,
        timeout: timedelta,
        *,
        joins: bool = False,
    ) -> None:
        self.membership = membership
        self.communicator = communicator
        self.position = 0
        self._joins = joins
        self.repeated = 0
        self.has_begun: Callable[[], bool] = lambda: False
        self.by_itself = True
        self.changes: deque[Change] = deque(maxlen=KEPT_CHANGES)
        self._rebuild = rebuild
        self._timeout = timeout
        self._started = 0
        self._waits_since: float | None = None
        self._last: Tensor | None = None
        membership.started = lambda: self._started
        membership.on_abort = self._interrupt
        membership.overdue = self._overdue
        membership.waited = self._waited
        if joins:
            self._catch_up(None)

    @property
    def view(self) -> View:
        """The ranks of the present generation, seen from this one."""
        return self.membership.view

    def complete(self, attempt: Callable[[], Tensor | None], like: Tensor | None = None) -> Tensor | None:
        """Runs an operation to its end even if ranks fail; all ranks run the same operations in the same order.

        Args:
            attempt: Runs the operation once on `communicator` and returns its result, or None if a rank that missed
                its end needs no result. Called again from the beginning after a failure.
            like: Tensor with the shape and dtype of the result, on the communicator's device; None if `attempt` returns
                None. The result may have fewer rows if it has one for each rank.

        Returns:
            The result of `attempt` on this rank, or that of a rank that had completed the operation before a failure.

        Raises:
            EvictedError: The other ranks go on without this one, or no rank is left to go on with.
            RuntimeError: The operation has failed `MOST_REPEATS` times in a row among the same members, and this rank
                was the first to report it. The others go on without this one.
        """
        self._started = self.position + 1
        alike = 0
        self.by_itself = True
        self._waits_since = time.monotonic()
        # Attempt the operation until it completes here, or its result comes from a rank that had completed it.
        while True:
            before = self.view
            try:
                result = attempt()
                break
            except EvictedError:
                raise
            except (RuntimeError, OSError) as error:
                if self._joins:
                    raise
                ended, result = self._recover(error, like)
                if ended:
                    self.by_itself = False
                    break
                # Repeat it, unless it has failed too often among the same members and this rank is the cause.
                self.repeated += 1
                alike = alike + 1 if self.view.members == before.members else 0
                if alike >= MOST_REPEATS and self.membership.was_first(before):
                    raise
        self.position += 1
        self._waits_since = None
        self._joins = False
        self._last = result
        return result

    def follow(self) -> None:
        """Continues with the ranks that are left, if one is known to have failed; does nothing otherwise.

        For a caller that waits between two operations, without a collective that would notice the failure. No rank may
        have completed more operations than this one: their results would be discarded here.

        Raises:
            EvictedError: The other ranks go on without this one, or no rank is left to go on with.
        """
        if (failure := self.membership.failures.first) is not None:
            self._recover(RuntimeError(failure.reason), None)

    def admit(self, joining: Sequence[JoiningProcess], requests: Requests) -> bool:
        """Enters a generation with new processes; all ranks call it between the same two operations.

        A rank that took the last result from others does not try: the others, which were ahead, tried to admit the
        processes without it, which failed, and have gone on without them.

        Args:
            joining: The processes that join.
            requests: Queue of their requests, which rank 0 answers.

        Returns:
            Whether at least one of them is a member now; not so if a rank failed meanwhile.

        Raises:
            EvictedError: The other ranks go on without this one, or no rank is left to go on with.
        """
        names = [name for _, name, _ in joining]
        # A rank that took the last result from others missed their attempt to admit these processes.
        if self.by_itself and not set(names) & set(self.view.members):
            self._waits_since = time.monotonic()
            try:
                watch = _Stopwatch()
                view = self.membership.admit({name: info for _, name, info in joining})
                if view.rank == 0:
                    requests.answer(joining, view, self.membership.packed_infos)
                watch.lap("agree")
                self.communicator.close()
                watch.lap("close")
                self._begin(view)
                watch.lap("place")
                self._catch_up(None)
                watch.lap("connect")
                _trim_heap()
                self._record(view, "ranks have joined", False, watch)
            except EvictedError:
                raise
            except (RuntimeError, OSError) as error:
                self._recover(error, None)
            self._waits_since = None
        return bool(set(names) & set(self.view.members))

    def wait(self, future: FutureTensor) -> Tensor:
        """Waits on the host for an all-reduce and returns its tensor; on CUDA for the device as well.

        Raises:
            RuntimeError: The all-reduce failed, or a rank failed meanwhile.
        """
        value = future.wait()
        if value.is_cuda:
            self.synchronize(value.device)
        return value

    def synchronize(self, device: torch.device) -> None:
        """Waits on the host until a CUDA device has finished the work on the current stream.

        Raises:
            RuntimeError: A rank has failed, so the work was aborted and its results are undefined.
        """
        passed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        passed.record(torch.cuda.current_stream(device))
        while not passed.query():  # type: ignore[no-untyped-call]
            time.sleep(POLL_SECONDS)
        self.communicator.executor.release()
        if (failure := self.membership.failures.first) is not None:
            raise RuntimeError(failure.reason)

    def close(self) -> None:
        """Leaves the other ranks. Between two operations that is orderly; during one they detect a rank failure."""
        self.membership.close(orderly=self._started == self.position and not self.has_begun())
        self.communicator.close()

    def _interrupt(self, reason: str) -> None:
        """Aborts the communicator, so that the training thread stops waiting; called from a ring's thread."""
        self.communicator.abandon(reason)

    def _waited(self) -> float:
        """Returns the seconds for which the training thread has been in an operation of all ranks; 0 outside one."""
        since = self._waits_since
        return 0.0 if since is None else time.monotonic() - since

    def _overdue(self) -> PeerFailure | None:
        """Returns a failure if work on a CUDA device exceeds its timeout, else None."""
        deadline = self.communicator.executor.deadline
        return None if deadline is None else deadline.overdue()

    def _recover(self, error: Exception, like: Tensor | None) -> tuple[bool, Tensor | None]:
        """Enters the next generation after a failure: aborts, waits for the vote on the members, and connects again.

        Args:
            error: Error of the operation or of the last attempt to connect, on this rank.
            like: Template of the running operation's result; see `complete`.

        Returns:
            Whether other ranks had completed the running operation, which is not repeated then; and its result, None if
            it has none or is to be repeated.

        Raises:
            EvictedError: The other ranks go on without this one, no rank is left, or lanes did not stop.
            RuntimeError: The same members failed to connect for `RECONNECT_SECONDS`; or the system has refused this
                rank memory or files `MOST_REFUSALS` times, and the others go on without it.
            OSError: The system has refused this rank memory or files, as above.
        """
        alike, refusals, began = 0, 0, time.monotonic()
        while True:
            before, former = self.view, weakref.ref(self.communicator)  # the error of a failed attempt holds this frame
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if before.size == 1:
                raise EvictedError(f"no other rank is left, and this one has failed: {reason}") from error
            # Abort what is in flight, and wait until it has stopped.
            watch = _Stopwatch()
            self.membership.failures.report(PeerFailure(reason, FAILED))
            self.communicator.abandon(reason)
            self.communicator.close(LANES_SECONDS)
            # Invariant: gradients are restored and sent again only after nothing writes to their memory any more.
            if not self.communicator.has_stopped:
                raise EvictedError(
                    f"communication in flight did not stop within {LANES_SECONDS:g} s after: {reason}"
                ) from error
            watch.lap("close")
            # Enter the generation that the vote on the members has made, and connect its ranks.
            view = self.membership.next(AGREEMENT_SECONDS)
            watch.lap("agree")
            try:
                self._begin(view)
                watch.lap("place")
                found = self._catch_up(like)
                watch.lap("connect")
            except (RuntimeError, OSError) as failed:
                alike = alike + 1 if view.members == before.members else 0
                if alike >= MOST_REPEATS and time.monotonic() - began > RECONNECT_SECONDS:
                    raise
                # A torch future keeps only the text of an error; the communicator has the error itself.
                begun = self.communicator is not former()
                refusals += _is_refusal((begun and self.communicator.executor.failure) or failed)
                if refusals >= MOST_REFUSALS:
                    self.membership.failures.report(PeerFailure.of(failed))
                    raise
                _forget(error)
                error = failed
                continue
            # Free what the old generation held, and record the change.
            _forget(error)
            _trim_heap()
            change = self._record(view, reason, not found[0] and self._started > self.position, watch)
            log.warning(
                "%s: %d of %d ranks continue as generation %d after %s",
                f"lost {', '.join(view.lost)}" if view.lost else reason,
                view.size,
                before.size,
                view.generation,
                change,
            )
            return found

    def _record(self, view: View, reason: str, repeats: bool, watch: _Stopwatch) -> Change:
        """Adds a change of the ranks to `changes`, and returns it."""
        change = Change(view.generation, reason, view.lost, view.joined, repeats, watch.began, watch.seconds)
        self.changes.append(change)
        return change

    def _begin(self, view: View) -> None:
        """Makes the communicator of a new generation; the previous one is closed by then."""
        self.communicator = self._rebuild(
            view, self.membership.store, failure_policy_of(view, self.membership, self._timeout)
        )

    def _catch_up(self, like: Tensor | None) -> tuple[bool, Tensor | None]:
        """Exchanges the operation counts of a new generation's ranks, and takes a missed result from a rank ahead.

        A rank that joins takes over the largest count and no result.

        Args:
            like: Template of the running operation's result; None if it has none.

        Returns:
            Whether this rank had missed the end of the operation; and its result, None if it has none or none is due.

        Raises:
            RuntimeError: A rank failed.
        """
        device, rank, size = self.communicator.device, self.view.rank, self.view.size
        counts = torch.zeros((size, 2), dtype=torch.int64, device=device)
        if not self._joins:
            counts[rank] = counts.new_tensor([self.position + 1, 0 if self._last is None else self._last.nbytes])
        # Each rank fills its own row: operations completed plus one (0 for a rank that joins), and bytes of its result.
        self.wait(self.communicator.all_reduce(counts.view(-1)))
        ended = [count - 1 for count, _ in counts.tolist()]
        furthest = max(ended)
        first = ended.index(furthest)
        behind, joins = self.position < furthest, self._joins
        if joins:
            self.position = self._started = furthest
        if not any(0 <= count < furthest for count in ended):
            return False, None
        # The first rank that is ahead sends its result, as a sum with zeros.
        result = torch.zeros(int(counts[first, 1]), dtype=torch.uint8, device=device)
        if rank == first and self._last is not None:
            result.copy_(as_bytes(self._last))
        if result.numel():
            self.wait(self.communicator.all_reduce(result))
        if not behind or joins:
            return False, None
        if like is None:
            return True, None
        result = result.view(like.dtype)
        return True, result.view(like.shape if result.numel() == like.numel() else (-1, *like.shape[1:]))


def _forget(error: BaseException) -> None:
    """Clears the stack frames of an error, whose variables keep the old generation's groups and connections alive.

    The frames are in reference cycles, which only a full garbage collection would free; with torch imported that takes
    tenths of a second.

    Args:
        error: The error; its causes and contexts are cleared, too.
    """
    known: set[int] = set()
    open_errors: list[BaseException | None] = [error]
    while open_errors:
        each = open_errors.pop()
        if each is not None and id(each) not in known:
            known.add(id(each))
            traceback.clear_frames(each.__traceback__)
            open_errors += [each.__cause__, each.__context__]


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc's malloc_trim; None in other C libraries."""


def _trim_heap() -> None:
    """Gives memory that is free in the C library's heaps back to the system.

    Each lane's thread allocates from a heap of its own (glibc has up to eight for each processor), and the free memory
    of threads that have ended stays resident: without this call 4.5 MB more after each change of the ranks (2x2 ranks,
    onebit, a model of 0.3 MB). The call takes 12 ms for a heap of 250 MB (2-core EPYC VM, 2026-11-22).
    """
    if _trim is not None:
        _trim(ctypes.c_size_t(0))


POLL_SECONDS = 0.0002
"""Seconds between two polls whether a CUDA device has finished the work of a step."""


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns a 1-D uint8 view of a contiguous tensor's memory; a sum of such bytes with zeros is exact."""
    return tensor.reshape(-1).view(torch.uint8)
