"""Lets the ranks of a job agree, after a rank failure, on the members of the next generation.

A *generation* is the time between two changes of the members. Its ranks are numbered from 0, and each store key that it
uses contains its number. The first failure ends it for all ranks. In each generation a ring of connections detects
within a second that a process has exited (see `bootstrap.liveness`), even while the training thread computes. During a
step a collective over a broken connection often fails sooner: the executor reports that to the same `GroupFailures`
(by `GenerationFailureReporter` of resilient_ops.py), which the ring's thread polls.

Then the ring threads agree in two rounds through the store. Each rank that learns of the failure sets a key of its own.
The leader, the first rank to claim that role, waits until every other rank has set its key or is known to be gone, and
writes the list of members. The list is written once, by compare-and-set, so two leaders, or one that fails meanwhile,
cannot make two different lists. A rank that is not in the list is evicted: its calls raise `EvictedError`.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from gradwire.comms.bootstrap.compat import PrefixStore, Store
from gradwire.comms.bootstrap.failure_reporter import AbortSignal
from gradwire.comms.bootstrap.failures import OVER, UNREACHED, GroupFailures, PeerFailure
from gradwire.comms.bootstrap.kernel import LISTENS, NOTHING_LISTENS
from gradwire.comms.bootstrap.liveness import LivenessRing
from gradwire.comms.bootstrap.ring_connections import rank_state
from gradwire.comms.bootstrap.store import PollingStore, Result
from gradwire.comms.bootstrap.threads import call_each
from gradwire.comms.boundary.messages import MessageError, MessageType, Rank
from gradwire.comms.elastic.peer_info import next_across
from gradwire.comms.errors import PeerError

log = logging.getLogger("gradwire")

PROBE_AFTER_SECONDS = 0.5
"""Seconds from the start of a vote until silent ranks are probed whose connections have not ended. A rank's thread sets
its key within milliseconds, on a busy machine within tenths of a second."""

POLL_SECONDS = 0.1
"""Seconds between two probes, during the vote on the members, of silent ranks whose connections have ended."""

SILENCE_SECONDS = 5.0
"""Seconds from the start of a vote until a silent rank is left out of the next generation, even if its process may
live. Longer than a thread waits for the GIL on a busy machine."""

LEADER_SECONDS = 3.0
"""Seconds in addition to `SILENCE_SECONDS` after which a leader of the vote counts as gone and another rank leads."""

NAP_SECONDS = 0.01
"""Seconds between two polls of the store during the vote on the members."""

PROBES_AT_ONCE = 32
"""Number of silent ranks that are probed at a time: a host that is gone takes a second for each of its addresses."""


@dataclass(frozen=True, slots=True)
class _Members:
    """The members of the next generation, as its leader writes them into the store.

    Attributes:
        left: Ranks of this generation that stay, ascending.
        joined: Name -> peer info (in the form of `packed`) of processes that join, in the order of their new ranks.
    """

    left: tuple[Rank, ...]
    joined: Mapping[str, str]


_MEMBERS: MessageType[_Members] = MessageType(_Members, most_nbytes=1 << 24)
_RANKS: MessageType[tuple[int, ...]] = MessageType(tuple[Rank, ...])


@dataclass(frozen=True, slots=True)
class View:
    """The ranks of one generation, seen from one of them.

    Attributes:
        generation: Number of the generation: 0 at the start, one more after each change of the members.
        rank: This rank's number in the generation, 0 <= rank < size.
        members: Name of each rank's process, by rank; a survivor comes before all that have joined after it.
        lost: Names of the processes that were in the generation before and are not in this one.
        joined: Names of the processes that joined with this generation.
    """

    generation: int
    rank: int
    members: tuple[str, ...]
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)


class EvictedError(PeerError):
    """Raised on a rank or process that cannot take part in an elastic job, whether the others go on without it or not.

    - The other ranks have left it out of the next generation, because they took it for failed.
    - It has failed and no other rank is left, or its own collectives in flight did not end.
    - The ranks did not agree in time on who is left, or rank 0 did not publish the members in time.
    - It asked to join, and the job refused it, or did not answer in time.
    """


class GenerationStore(PollingStore):
    """A store whose calls raise a PeerError, with the reason, as soon as a rank of its generation has failed.

    So a rank that waits for the failed one while groups are made, in gloo too, does not wait until the time-out.

    Args:
        store: Store that holds the keys.
        timeout: Longest wait for a key; see `PollingStore`.
        aborted: Returns the reason why the generation is over; None as long as it is not.
        ranks: Number of ranks that poll the store; see `PollingStore`.
    """

    def __init__(self, store: Store, timeout: timedelta, aborted: Callable[[], str | None], *, ranks: int = 1) -> None:
        super().__init__(store, timeout, ranks=ranks)
        self._aborted = aborted

    def within(self, timeout: timedelta) -> "GenerationStore":
        """Returns a store of the same keys over the same connection, with another time-out."""
        return GenerationStore(self._store, timeout, self._aborted, ranks=self._ranks)

    def below(self, prefix: str) -> "GenerationStore":
        """Returns a store of the keys that begin with `prefix/`, over the same connection."""
        timeout = timedelta(seconds=self._seconds)
        return GenerationStore(PrefixStore(prefix, self._store), timeout, self._aborted, ranks=self._ranks)

    def _ask(self, description: str, request: Callable[[], Result], seconds: float | None = None) -> Result:
        """Makes a request unless the generation is over; raises the reason as a `PeerError` then."""
        if reason := self._aborted():
            raise PeerError(reason)
        return super()._ask(description, request, seconds)


class Membership:
    """Agrees with the other ranks on the members of each generation. `close` ends its threads.

    The threads of the rings enter each new generation at once, even while the training thread computes; that thread
    follows with `next`.

    Thread safety: the training thread calls all methods; `close` may be called from any thread.

    Args:
        store: Store of all present and future ranks, with a prefix that is unique to this start of the job.
        view: Members of the first generation.
        timeout: Longest wait for an answer of another rank, unless a call gives a shorter one.
        packed_infos: Name of each member -> its peer info, in the form of `packed`; None for none.
        failures: Rank failures found in the first generation so far; None for none.

    Attributes:
        packed_infos: Peer info of all members so far, by name; that of processes that join later is added.
        note: JSON text that this rank leaves in the store in case it fails; None for none. The ring's thread stores it
            within about a second, at no cost to the training thread.
        on_abort: Called from a ring's thread with the reason when the training thread's generation is over, to wake
            that thread if it waits in a collective.
        overdue: Called about once a second from a ring's thread: returns a failure if work on a CUDA device exceeds
            the time-out, else None.
        waited: Returns the seconds for which the training thread has been in an operation of all ranks; 0 outside one.
        started: Returns the number of operations that this rank has started; the same on all ranks at the same point.
    """

    def __init__(
        self,
        store: Store,
        view: View,
        timeout: timedelta,
        packed_infos: Mapping[str, str] | None = None,
        failures: GroupFailures | None = None,
    ) -> None:
        self.packed_infos = dict(packed_infos or {})
        self.note: str | None = None
        # The note that the store has.
        self._noted: str | None = None
        self.on_abort: Callable[[str], None] = lambda reason: None
        self.overdue: Callable[[], PeerFailure | None] = lambda: None
        self.waited: Callable[[], float] = lambda: 0.0
        self.started: Callable[[], int] = lambda: 0
        self._plain = store
        self._store = PollingStore(store, timeout, ranks=view.size)
        self._timeout = timeout
        self._closed = False
        self._changed = threading.Condition()  # Guards _latest and _failure; notified when either changes.
        self._failure: Exception | None = None
        self._current = self._latest = _Generation(view, failures)
        self._begin(self._latest)

    @property
    def view(self) -> View:
        """The ranks of the generation that the training thread is in."""
        return self._current.view

    @property
    def store(self) -> Store:
        """The store below a prefix of this generation, in which its ranks connect and exchange messages."""
        return PrefixStore(f"{self.view.generation}/ranks", self._plain)

    @property
    def failures(self) -> GroupFailures:
        """Failures known to this rank in the generation that the training thread is in; the first ends it for all."""
        return self._current.failures

    def was_first(self, view: View) -> bool:
        """Returns whether this rank was the first to report the failure that ended a generation.

        Then the cause is on this rank or in one of its own connections; the others received its report.

        Args:
            view: The generation, seen from this rank.

        Returns:
            Whether it was the first; also True if the store does not answer, so that it is unknown.
        """
        try:
            first = PeerFailure.unpacked(self._store.read(f"{view.generation}/abort")).reported_by
        except RuntimeError as error:
            log.debug("the store does not answer who reported generation %d as over: %s", view.generation, error)
            return True
        return first == view.rank

    def next(self, seconds: float) -> View:
        """Waits until the ranks that live have voted on who goes on after a failure, and enters that generation.

        The ring threads vote; this is for the training thread.

        Args:
            seconds: Longest wait for the vote.

        Returns:
            The generation entered, seen from this rank.

        Raises:
            EvictedError: The other ranks go on without this one, the vote failed, or it took longer than `seconds`.
        """
        generation = self._current
        with self._changed:
            self._changed.wait_for(lambda: self._latest is not generation or self._failure is not None, seconds)
            if self._failure is not None:
                raise EvictedError(str(self._failure)) from self._failure
            if self._latest is generation:
                reason = generation.failures.first.reason if generation.failures.first is not None else "all live"
                raise EvictedError(f"no agreement in {seconds:g} s on which ranks are left: {reason}")
            self._current = self._latest
        generation.failures.report(
            PeerFailure(f"generation {generation.view.generation} is over", OVER), known_to_all=True
        )
        return self._current.view

    def admit(self, joining: Mapping[str, str]) -> View:
        """Enters a generation of the present ranks and new ones; all present ranks call it at the same point.

        If a rank fails meanwhile, the generation entered may be one without that rank and without the new ones.

        Args:
            joining: Name -> peer info (in the form of `packed`) of the new processes, in the order of their ranks.

        Returns:
            The generation entered, seen from this rank.

        Raises:
            EvictedError: The other ranks go on without this one, rank 0 did not write the members in time, or a rank
                failed meanwhile and the vote did not end in time.
            RuntimeError: The store does not answer.
        """
        generation, key = self._current, f"{self.view.generation}/members"
        if self.view.rank == 0:
            word = {"left": list(range(self.view.size)), "joined": dict(joining)}
            self._store.compare_set(key, "", json.dumps(word))
        deadline = time.monotonic() + self._timeout.total_seconds()
        while self._latest is generation and generation.failures.first is None:
            if self._store.check([key]):
                generation.close()
                self._enter(generation)
                break
            if time.monotonic() > deadline:
                seconds = self._timeout.total_seconds()
                raise EvictedError(f"rank 0 did not publish the members of the next generation within {seconds:g} s")
            time.sleep(NAP_SECONDS)
        return self.next(2 * SILENCE_SECONDS + LEADER_SECONDS)

    def note_of(self, name: str) -> str | None:
        """Returns the last `note` of a failed member.

        Args:
            name: Name of the member.

        Returns:
            The note; None if it stored none, or if the store does not answer.
        """
        try:
            key = f"note/{name}"
            return self._store.read(key).decode() if self._store.check([key]) else None
        except RuntimeError as error:
            log.debug("the note of %s cannot be read from the store: %s", name, error)
            return None

    def close(self, *, orderly: bool = True) -> None:
        """Leaves the other ranks and ends the threads.

        Args:
            orderly: Whether this rank has finished, so that its end is no failure; otherwise the others detect a rank
                failure and go on without it.
        """
        self._closed = True
        with self._changed:
            latest = self._latest
        latest.close(orderly=orderly)

    def _begin(self, generation: "_Generation") -> None:
        """Connects this rank to the ring of connections that detects failures in a generation (`LivenessRing`).

        A single rank has no ring. A failure that this rank finds is then published in the store for the others.

        Args:
            generation: The generation that begins; its `ring` and the `notify` of its `failures` are set here.
        """
        view = generation.view
        signal = AbortSignal(self._store, view.rank, f"{view.generation}/abort")
        generation.failures.send = signal.try_set
        if view.size == 1:
            return
        ring = self._ring_store(view)

        def poll_signal() -> PeerFailure | None:
            # Called about once a second, so the note is stored at no cost to the training thread.
            if (note := self.note) is not None and note is not self._noted:
                self._store.set(f"note/{view.members[view.rank]}", note)
                self._noted = note
            return signal.read()

        def started() -> int:
            return self.started() if generation is self._current else 0

        def overdue() -> PeerFailure | None:
            return self.overdue() if generation is self._current else None

        generation.ring = LivenessRing(
            ring,
            view.rank,
            view.size,
            generation.failures,
            lambda error: self._on_failure(generation, error),
            (poll_signal, overdue),
            started,
            lambda: self.waited(),
            next_across(view.members, view.rank, self.packed_infos),
            SILENCE_SECONDS,
            generation.knows_unreached,
        )

    def _on_failure(self, generation: "_Generation", error: Exception) -> None:
        """Wakes the training thread after a failure, votes on the members, and begins the next generation.

        Runs once in a generation, in the ring's thread. An error is kept for `next` to raise.

        Args:
            generation: The generation that is over.
            error: Error with which the ring has ended; it names the failed rank, if one is known.
        """
        failure = PeerFailure.of(error)
        generation.failures.report(failure)
        if generation is self._current:
            self.on_abort(failure.reason)
        try:
            self._agree(generation)
            if not self._closed:  # after `close` the vote ends early, so there may be no list of members to read
                self._enter(generation)
            generation.ring = None  # its thread ends here; each of the two knows the other
        except Exception as failed:  # noqa: BLE001 - the training thread raises it
            with self._changed:
                self._failure = failed
                self._changed.notify_all()

    def _enter(self, generation: "_Generation") -> None:
        """Begins the generation after a given one, with the members that its leader has listed in the store.

        It becomes `_latest`, and the training thread, which enters it by `next`, is notified. Does nothing if it has
        begun already, or after `close`.

        Args:
            generation: The generation that is over.

        Raises:
            EvictedError: This rank is not among the members.
            MessageError: The list names ranks that do not exist.
        """
        view = generation.view
        # Read the list of members, and check it.
        word = _MEMBERS.read(self._store.read(f"{view.generation}/members"))
        left, joined = list(word.left), tuple(word.joined)
        if any(rank >= view.size for rank in left):
            raise MessageError(f"the members of generation {view.generation + 1} are {left} of {view.size} ranks")
        self.packed_infos.update(word.joined)
        if view.rank not in left:
            raise EvictedError(
                f"rank {view.rank} was removed from the job by the other ranks, which received nothing from "
                f"it for at least {SILENCE_SECONDS:g} s: restart its process with GRADWIRE_ELASTIC=HOST:PORT to rejoin"
            )
        members = (*(view.members[rank] for rank in left), *joined)
        lost = tuple(name for name in view.members if name not in members)
        following = _Generation(View(view.generation + 1, left.index(view.rank), members, lost, joined))
        following.knows_unreached = (
            generation.failures.first is not None and generation.failures.first.source == UNREACHED
        )
        with self._changed:
            if self._latest is not generation or self._closed:
                return
            self._latest = following
            self._begin(following)
            self._changed.notify_all()

    def _agree(self, generation: "_Generation") -> None:
        """Votes on the surviving ranks: returns when a leader has written the list of members, or after `close`.

        Args:
            generation: The generation that is over.

        Raises:
            RuntimeError: The store does not answer, or every leader failed.
        """
        number, rank = generation.view.generation, generation.view.rank
        # First round: publish that this rank lives, and which ranks it knows to have failed.
        self._store.set(f"{number}/here/{rank}", json.dumps(sorted(generation.failures.ranks)))
        self._store.add(f"{number}/votes", 1)
        key = f"{number}/members"
        # Second round: the elected leader writes the list; if it fails, the next attempt elects another one.
        for attempt in range(generation.view.size):
            if self._store.check([key]):
                return
            leader = self._store.elect(f"{number}/leader/{attempt}", rank)
            if leader == rank:
                word = {"left": self._collect(generation), "joined": {}}
                self._store.compare_set(key, "", json.dumps(word))
            began = time.monotonic()
            backoff = _Backoff(began)
            while not self._store.check([key]) and not self._closed:
                if time.monotonic() > began + SILENCE_SECONDS + LEADER_SECONDS:
                    break
                if backoff.are_due():
                    generation.poll_closed()
                    if self._has_gone(generation, leader, ask=backoff.may_ask()):
                        break  # the leader has failed during the vote: another rank leads at once
                time.sleep(NAP_SECONDS)
            if self._closed:
                return
        if not self._store.check([key]):
            raise RuntimeError(
                f"no agreement on the surviving ranks: all {generation.view.size} leaders failed during the vote"
            )

    def _collect(self, generation: "_Generation") -> list[int]:
        """Waits, on the leader of the vote, until every rank has set its key or is known to be gone.

        Args:
            generation: The generation that is over.

        Returns:
            The ranks that have set their keys, ascending; others are left out after `SILENCE_SECONDS`.
        """
        number, members = generation.view.generation, set(range(generation.view.size))
        began = time.monotonic()
        backoff = _Backoff(began)
        gone, here = set(generation.failures.ranks), {generation.view.rank}
        # Poll a counter of the keys that are set, and read them only when it has changed.
        while time.monotonic() < began + SILENCE_SECONDS:
            if self._store.add(f"{number}/votes", 0) > len(here):
                for rank in members - here:
                    if self._store.check([f"{number}/here/{rank}"]):
                        here.add(rank)
                        gone |= set(_RANKS.read(self._store.read(f"{number}/here/{rank}")))
            silent = sorted(members - here - gone)
            if not silent:
                break
            if backoff.are_due():
                generation.poll_closed()
                ask = backoff.may_ask()
                for start in range(0, len(silent), PROBES_AT_ONCE):
                    some = silent[start : start + PROBES_AT_ONCE]
                    found = call_each(partial(self._has_gone, generation, ask=ask), some, "gradwire call")
                    gone |= {rank for rank, has in zip(some, found, strict=True) if has}
            time.sleep(NAP_SECONDS)
        return sorted(here)

    def _has_gone(self, generation: "_Generation", rank: int, *, ask: bool) -> bool:
        """Probes a rank that is silent during the vote, and publishes in the store that it is gone if it is.

        It is gone if its connection with this rank has ended and nothing listens at its port, or if this
        host's kernel says that its process has ended. A rank that has finished the vote closes its connections too, but
        then the list of members exists, and it does not count as gone.

        Args:
            generation: The generation that is over.
            rank: The silent rank.
            ask: Whether to probe a rank whose connections are not known to have ended.

        Returns:
            Whether it is known to be gone, from this rank's probe or another rank's.
        """
        number = generation.view.generation
        if self._store.check([f"{number}/gone/{rank}"]):
            return True
        closed = generation.ring is not None and rank in generation.ring.closed
        if not closed and not ask:
            return False
        found = rank_state(self._ring_store(generation.view), rank)
        if found == LISTENS or (found != NOTHING_LISTENS and not closed) or self._store.check([f"{number}/members"]):
            return False
        self._store.set(f"{number}/gone/{rank}", "1")
        return True

    def _ring_store(self, view: View) -> PollingStore:
        """Returns the store of a generation's liveness ring."""
        return self._store.below(f"{view.generation}/ring")


class _Backoff:
    """Schedules the probes of silent ranks during the vote on the members.

    Args:
        began: Start of the vote, by time.monotonic().
    """

    def __init__(self, began: float) -> None:
        self._next = began
        self._ask = began + PROBE_AFTER_SECONDS

    def are_due(self) -> bool:
        """Returns True once every `POLL_SECONDS`: ranks whose connections have ended are then to be probed.

        The call sets the time of the next one.
        """
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + POLL_SECONDS
        return True

    def may_ask(self) -> bool:
        """Returns True once a second, from `PROBE_AFTER_SECONDS` on: ranks with open connections are then probed, too.

        The call sets the time of the next one.
        """
        now = time.monotonic()
        if now < self._ask:
            return False
        self._ask = now + 1.0
        return True


class _Generation:
    """The state of one generation on this rank.

    Args:
        view: The generation's ranks, seen from this one.
        failures: Rank failures found in it.

    Attributes:
        view: The generation's ranks, seen from this one.
        failures: Rank failures found in it.
        ring: This rank's end of the ring of connections; None for a single rank, and after the generation has ended.
    """

    def __init__(self, view: View, failures: GroupFailures | None = None) -> None:
        self.view = view
        self.failures = failures or GroupFailures()
        self.ring: LivenessRing | None = None
        self.knows_unreached = False
        """Whether the generation before ended because a rank could not be reached. If that rank is still a member, it
        has shown in the vote that it lives, so it is not reported as failed again because it cannot be reached."""

    def poll_closed(self) -> None:
        """Makes the ring add ranks whose connections have ended to `closed`; see `LivenessRing.poll_closed`."""
        if self.ring is not None:
            self.ring.poll_closed()

    def close(self, *, orderly: bool = True) -> None:
        """Leaves the ring; see `LivenessRing.close`.

        Args:
            orderly: Whether this rank has finished, so that its end is no failure.
        """
        if self.ring is not None:
            self.ring.close(orderly=orderly)


def own_name() -> str:
    """Returns a unique name for this process among the members: HOST/PID/RANDOM."""
    return f"{socket.gethostname()}/{os.getpid()}/{os.urandom(4).hex()}"
