"""Operations that all ranks carry out, whoever is lost meanwhile: repeated by the survivors until they come to an end.

Each rank counts the operations that have come to an end here: the reduction of a step's gradients is one, a broadcast
of DDP's buffers is another. Each ends with an all-reduce that needs every rank, so that no rank can end an operation
before every other one has ended the one before it: after a failure the survivors' counts differ by one at most. Who is
behind takes the result from who is ahead (of a step all have had the gradients already: that is what its last
all-reduce tells), so no rank steps where another does not. Where all are alike the operation is repeated among the
survivors, from what it was given: no step is lost but the part of it that the lost ranks had computed.
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

import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import PrefixStore, Store
from gradwire.comms.bootstrap.failure_reporter import CollectiveError, FailureReporter
from gradwire.comms.bootstrap.failures import FAILED, Failures, PeerFailure
from gradwire.comms.bootstrap.store import unprefixed
from gradwire.comms.communicator import Communicator, FailurePolicy
from gradwire.comms.elastic.joining import Newcomer, Requests
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

log = logging.getLogger("gradwire")

AGREEMENT_SECONDS = 4 * (SILENCE_SECONDS + LEADER_SECONDS)
"""Seconds for an agreement, with three leaders that are lost over it."""

LANES_SECONDS = 60.0
"""Seconds for lanes to end whose connections are gone: milliseconds, on a machine that has time for them."""

MOST_REPEATS = 3
"""The most repeats of one operation by the same members: a connection that broke is made anew, an error that comes
again is raised."""

MEETING_SECONDS = 60.0
"""Seconds for members that all live to meet: a network between two of them that is mended within that time ends no
job."""

MOST_REFUSALS = 2
"""The most times that the system refuses a rank memory or files while the ranks meet again: what it lacks may be there
a moment later, when others have given theirs back. Then the rank leaves, and the others go on."""

_REFUSALS = frozenset({errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE})
"""What an errno says that is this process's or its host's own affair, whatever its peers do: errno(3)."""

Rebuild = Callable[[View, Store, FailurePolicy], Communicator]
"""Makes the communicator of a new generation; the one before is closed."""


KEPT_CHANGES = 1000
"""Latest changes of the ranks that are kept, each with what took how long."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the ranks, as one of them has gone through it.

    Attributes:
        generation: The new generation's number.
        reason: Why.
        lost: Names of those that are gone.
        joined: Names of those that are new.
        repeats: Whether an operation is carried out again after it.
        began: When, by time.time().
        seconds: What of it took how long, in order: `close` (what was under way is given up), `agree` (on who is left,
            or on who joins), `place` (the ranks anew, and plan), `meet` (the first all-reduce, for which groups
            connect), `hand over` (the state, to who has joined).
    """

    generation: int
    reason: str
    lost: tuple[str, ...]
    joined: tuple[str, ...]
    repeats: bool
    began: float
    seconds: dict[str, float]

    def __str__(self) -> str:
        """`0.52 s: close 0.02, agree 0.11, ...`."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.2f} s ({parts})"


class _Stopwatch:
    """Splits the time that a change takes into parts."""

    def __init__(self) -> None:
        self.began = time.time()
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


class OutOfResourcesError(CollectiveError):
    """A collective has failed because the system refused this rank memory or files; no peer is at fault."""


def _is_refusal(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _REFUSALS and not isinstance(error, PeerSystemError)
    return isinstance(error, (OutOfResourcesError, torch.OutOfMemoryError))


class GenerationFailureReporter(FailureReporter):
    """Where a failure of one generation's communicator is told: the membership finds out who is left.

    Args:
        rank: This rank in it.
        failures: What is known of failures in it.
    """

    def diagnose(
        self, error: BaseException, phase: str, members: Sequence[int], *, launches: int = 0, waiting: bool = True
    ) -> CollectiveError:
        """Ends the generation for all ranks; who is missing, the membership finds out."""
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        self.signal_abort(f"{phase} failed: {cause}")
        kind = OutOfResourcesError if _is_refusal(error) else CollectiveError
        return kind(f"{phase} failed: {cause}", ())


def first_failure_policy(rank: int, size: int, timeout: timedelta) -> FailurePolicy:
    """Returns the failure policy of the first communicator; the membership, made later, shares its `failures`."""
    reporter = GenerationFailureReporter(rank, Failures())
    return FailurePolicy(reporter, lambda store: GenerationStore(store, timeout, reporter.abort_reason, ranks=size))


def first_membership(communicator: Communicator, prefix: str, timeout: timedelta, first: FailurePolicy) -> Membership:
    """The membership of the ranks that start together.

    Args:
        communicator: Of all of them.
        prefix: Of its keys, in the store without any prefix; with the name of this start.
        timeout: For the other ranks' answers.
        first: Failure policy of `communicator`.
    """
    names = tuple(f"rank {rank}" for rank in range(communicator.size))
    said = {name: packed(each) for name, each in zip(names, communicator.peer_infos, strict=True)}
    place = PrefixStore(prefix, unprefixed(communicator.plain_store))
    return Membership(place, View(0, communicator.rank, names), timeout, said, first.reporter.failures)


def unheld(rebuild: Rebuild) -> Rebuild:
    """A method, as a function that does not keep its object alive."""
    method = weakref.WeakMethod(rebuild)

    def call(view: View, store: Store, failure_policy: FailurePolicy) -> Communicator:
        found = method()
        assert found is not None
        return found(view, store, failure_policy)

    return call


def failure_policy_of(view: View, membership: Membership, timeout: timedelta) -> FailurePolicy:
    """Returns the failure policy of the communicator that the members of `view` make."""
    reporter = GenerationFailureReporter(view.rank, membership.failures)
    return FailurePolicy(
        reporter,
        lambda store: GenerationStore(store, timeout, reporter.abort_reason, ranks=view.size),
        peer_infos(view.members, membership.said),
    )


class ResilientOps:
    """Runs the operations of one rank so that they complete even if other ranks fail.

    Args:
        membership: Who is left.
        communicator: Of the membership's generation.
        joins: Whether this rank joins with this generation: every error is raised until the first `complete` has
            returned. From then on it is a rank like the others.
        rebuild: Makes the next one.
        timeout: For what the ranks of a generation tell each other through the store.

    Attributes:
        position: Number of operations completed on this rank.
        communicator: Communicator of the present generation.
        repeated: Number of operations that were started again.
        has_begun: Whether this rank has sent a part of an operation for which it calls `complete` later.
        by_itself: Whether this rank ran the last operation itself, rather than got its result from ranks that were
            ahead. In that case either all ranks of the present generation ran it in this generation, or none did.
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
        membership.on_alarm = self._interrupt
        membership.overdue = self._overdue
        membership.waited = self._waited
        if joins:
            self._catch_up(None)

    @property
    def view(self) -> View:
        """The members as of now."""
        return self.membership.view

    def complete(self, attempt: Callable[[], Tensor | None], like: Tensor | None = None) -> Tensor | None:
        """Carries out an operation; all ranks, in the same order.

        Args:
            attempt: Carries it out once, with `communicator`, and returns its result; None where all ranks have it by
                then, whoever is lost later. May be called again, and then begins anew.
            like: Of the shape and dtype of the result, on the communicator's device; None where that is None. The
                result may have fewer rows, where it has one of each rank.

        Returns:
            The result, of this rank or of one that is ahead.

        Raises:
            EvictedError: This rank cannot go on.
            RuntimeError: The operation has failed `MOST_REPEATS` times though nobody was lost, and this rank was the
                first to fail. Those that have only heard of it go on without this one.
        """
        self._started = self.position + 1
        alike = 0
        self.by_itself = True
        self._waits_since = time.monotonic()
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
        """Goes on among those that are left, where a rank has been lost since the last one (between two operations).

        Only where no rank can be further than this one; else what it has missed would be lost.

        Raises:
            EvictedError: This rank cannot go on.
        """
        if (failure := self.membership.failures.first) is not None:
            self._recover(RuntimeError(failure.reason), None)

    def admit(self, newcomers: Sequence[Newcomer], requests: Requests) -> bool:
        """Enters a generation with new ranks; all ranks, between the same two operations.

        Args:
            newcomers: Which.
            requests: Where they wait for an answer.

        Returns:
            Whether one of them is there now.
        """
        names = [name for _, name, _ in newcomers]
        # Who had to take the last result from others was not there when they tried, and they have gone on without.
        if self.by_itself and not set(names) & set(self.view.members):
            self._waits_since = time.monotonic()
            try:
                watch = _Stopwatch()
                view = self.membership.admit({name: said for _, name, said in newcomers})
                if view.rank == 0:
                    requests.answer(newcomers, view, self.membership.said)
                watch.lap("agree")
                self.communicator.close()
                watch.lap("close")
                self._begin(view)
                watch.lap("place")
                self._catch_up(None)
                watch.lap("meet")
                _trim_heap()
                self._note(view, "ranks have joined", False, watch)
            except EvictedError:
                raise
            except (RuntimeError, OSError) as error:
                self._recover(error, None)
            self._waits_since = None
        return bool(set(names) & set(self.view.members))

    def wait(self, future: FutureTensor) -> Tensor:
        """Waits for an all-reduce, on CUDA on the host, too.

        Raises:
            RuntimeError: It has failed.
        """
        value = future.wait()
        if value.is_cuda:
            self.synchronize(value.device)
        return value

    def synchronize(self, device: torch.device) -> None:
        """Waits on the host until a CUDA device has come to the end of what is on the current stream.

        Raises:
            RuntimeError: What was under way has been given up.
        """
        passed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        passed.record(torch.cuda.current_stream(device))
        while not passed.query():  # type: ignore[no-untyped-call]
            time.sleep(POLL_SECONDS)
        self.communicator.executor.release()
        if (failure := self.membership.failures.first) is not None:
            raise RuntimeError(failure.reason)

    def close(self) -> None:
        """Leaves the others: in order between two operations, else they go on without this rank."""
        self.membership.close(orderly=self._started == self.position and not self.has_begun())
        self.communicator.close()

    def _interrupt(self, reason: str) -> None:
        self.communicator.abandon(reason)

    def _waited(self) -> float:
        since = self._waits_since
        return 0.0 if since is None else time.monotonic() - since

    def _overdue(self) -> PeerFailure | None:
        deadline = self.communicator.executor.deadline
        return None if deadline is None else deadline.overdue()

    def _recover(self, error: Exception, like: Tensor | None) -> tuple[bool, Tensor | None]:
        """Forms the groups of the next generation; whether the running operation has come to its end, and its result.

        Raises:
            EvictedError: This rank cannot go on.
            RuntimeError: The same members have failed to meet again and again, for `MEETING_SECONDS`; or the system has
                refused this rank memory or files `MOST_REFUSALS` times, and the others go on without it.
            OSError: The system has refused this rank memory or files, as above.
        """
        alike, refusals, began = 0, 0, time.monotonic()
        while True:
            before, former = self.view, weakref.ref(self.communicator)  # a failed meeting's error holds this frame
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if before.size == 1:
                raise EvictedError(f"no other rank is left, and this one has failed: {reason}") from error
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
            view = self.membership.next(AGREEMENT_SECONDS)
            watch.lap("agree")
            try:
                self._begin(view)
                watch.lap("place")
                found = self._catch_up(like)
                watch.lap("meet")
            except (RuntimeError, OSError) as failed:
                alike = alike + 1 if view.members == before.members else 0
                if alike >= MOST_REPEATS and time.monotonic() - began > MEETING_SECONDS:
                    raise
                # A future of torch's keeps an error's text alone; the communicator has the error itself.
                begun = self.communicator is not former()
                refusals += _is_refusal((begun and self.communicator.executor.failure) or failed)
                if refusals >= MOST_REFUSALS:
                    self.membership.failures.report(PeerFailure.of(failed))
                    raise
                _forget(error)
                error = failed
                continue
            _forget(error)
            _trim_heap()
            change = self._note(view, reason, not found[0] and self._started > self.position, watch)
            log.warning(
                "%s: %d of %d ranks go on as generation %d after %s",
                f"lost {', '.join(view.lost)}" if view.lost else reason,
                view.size,
                before.size,
                view.generation,
                change,
            )
            return found

    def _note(self, view: View, reason: str, repeats: bool, watch: _Stopwatch) -> Change:
        change = Change(view.generation, reason, view.lost, view.joined, repeats, watch.began, watch.seconds)
        self.changes.append(change)
        return change

    def _begin(self, view: View) -> None:
        self.communicator = self._rebuild(
            view, self.membership.store, failure_policy_of(view, self.membership, self._timeout)
        )

    def _catch_up(self, like: Tensor | None) -> tuple[bool, Tensor | None]:
        """Takes the result of the running operation from ranks that have come to its end."""
        device, rank, size = self.communicator.device, self.view.rank, self.view.size
        words = torch.zeros((size, 2), dtype=torch.int64, device=device)
        if not self._joins:
            words[rank] = words.new_tensor([self.position + 1, 0 if self._last is None else self._last.nbytes])
        self.wait(self.communicator.all_reduce(words.view(-1)))
        ended = [count - 1 for count, _ in words.tolist()]
        furthest = max(ended)
        first = ended.index(furthest)
        behind, joins = self.position < furthest, self._joins
        if joins:
            self.position = self._started = furthest
        if not any(0 <= count < furthest for count in ended):
            return False, None
        result = torch.zeros(int(words[first, 1]), dtype=torch.uint8, device=device)
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
    """Lets go of what an error's frames hold: groups of a generation that is over, with gloo's threads and connections.

    They are in circles, which only a full collection would find; with torch imported that takes tenths of a second.
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
    """Gives the system back what is free in the C library's heaps.

    Each lane's thread takes its memory from a heap of its own, of which glibc has eight for each processor, and what
    lies free in those of threads that have ended stays resident. 2x2, onebit, a model of 0.3 MB: 4.5 MB more after each
    change, in all of which was free; 12 ms for a heap of 250 MB (2-core EPYC VM, 2026-11-22).
    """
    if _trim is not None:
        _trim(ctypes.c_size_t(0))


POLL_SECONDS = 0.0002
"""Seconds between two looks at whether a CUDA device has come to the end of a step."""


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, 1-D uint8; the same memory. Sums of such with zeros are exact."""
    return tensor.reshape(-1).view(torch.uint8)
