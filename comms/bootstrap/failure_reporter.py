"""Reports a failure to the other ranks, and agrees within seconds on which ranks are missing.

A dead rank cannot report, so the survivors do. Each rank that sees a collective fail publishes a report in the store,
waits for the reports of the others, and names those that published none. If all have reported, no rank is missing: one
of them has failed by itself, perhaps for want of memory, and the error message quotes the reports that explain it.

How failures are detected and what they carry is in `failures`; `AbortSignal` is the store key that tells all ranks to
stop.
"""

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Annotated, Any

from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.bootstrap.failures import FAILED, LONGEST_REASON, OVERDUE, GroupFailures, PeerFailure
from gradwire.comms.bootstrap.probe import (
    ANSWERS,
    EXITED,
    INDIRECT_PROBES,
    MOST_PROBES,
    REFUSED,
    UNANSWERED,
    PeerAddress,
    PeerTable,
    PeerWait,
    ProbeServer,
)
from gradwire.comms.bootstrap.store import PollingStore, StoreUnreachableError
from gradwire.comms.boundary.messages import Count, MessageError, MessageType, Most, Rank
from gradwire.comms.errors import PeerError

log = logging.getLogger("gradwire")

PATIENCE = timedelta(seconds=15)
"""Time that survivors wait for the others' reports, in addition to the time between two polls. Most ranks report within
a second; the rest is for busy machines."""

PROBE_AFTER = timedelta(seconds=2)
"""Delay after a failure before ranks that have not reported are probed directly, in addition to the time between two
polls, within which a rank that lives learns of the failure."""

STORE_PATIENCE = timedelta(seconds=5)
"""Timeout of each store request after a failure. On expiry, survivors probe each other directly."""

ABORT_PATIENCE = timedelta(seconds=1)
"""Timeout of a poll of the abort signal. No new poll is sent while one is pending."""

BLOCK = 64
"""Ranks whose reports are read in one store request."""

POLL_SECONDS = 1.0
"""Seconds between two polls of the abort signal, in groups of up to `POLLS_PER_SECOND` ranks."""

POLLS_PER_SECOND = 2048
"""Polls per second of all ranks of a group together, at most: one store server answers them, on one thread. Each rank
of torch's own NCCL group polls it once a second, too (TORCH_NCCL_COORD_CHECK_MILSEC in ProcessGroupNCCL.hpp)."""

MOST_SEEN = 4
"""Ranks whose reports are quoted if no rank is missing, at most."""

NAP_SECONDS = 0.05
"""First pause between two polls for reports; each later one is twice as long, up to `poll_seconds`."""


def poll_seconds(size: int) -> float:
    """Returns the seconds between two polls of the abort signal by each of `size` ranks."""
    return max(POLL_SECONDS, size / POLLS_PER_SECOND)


class CollectiveError(RuntimeError):
    """Raised by every rank when a collective failed. `missing` holds the ranks that are gone, as far as known.

    Ranks that reach the store agree on these. The message is each rank's own: it names the phase and cause seen there.
    """

    def __init__(self, message: str, missing: tuple[int, ...]) -> None:
        super().__init__(message)
        self.missing = missing


class FailureReporter(ABC):
    """Tells the other ranks that this one aborts, and knows whether one of them has.

    Args:
        rank: This rank, as the reporter numbers it.
        failures: Failures of the ranks that the reporter is for.
    """

    def __init__(self, rank: int, failures: GroupFailures) -> None:
        self.rank = rank
        self.failures = failures

    def abort_reason(self) -> str | None:
        """Returns the reason of the first failure that is known, of another rank or this one; None if there is none.

        If none is known yet, the sources of `failures` are asked whether another rank has aborted.
        """
        failure = self.failures.poll()
        return None if failure is None else failure.reason

    def signal_abort(self, reason: str, *, directly: bool = False) -> None:
        """Makes the other ranks abort with this reason, unless a failure is known already; does not wait for them.

        Args:
            reason: Reason, for their error messages.
            directly: Whether to notify peers without the store, too, because the store may end with this process; not
                read here, but by reporters that can.
        """
        self.failures.report(PeerFailure(reason, FAILED))

    @abstractmethod
    def diagnose(
        self, error: BaseException, phase: str, members: Sequence[int], *, launches: int = 0, waiting: bool = True
    ) -> CollectiveError:
        """Reports a failure of this rank to the other ranks, and returns the error to raise.

        Args:
            error: Error that the transport raised.
            phase: Operation and phase, such as `all_reduce inter_node`.
            members: Ranks of the failed collective, as the group numbers them; empty if unknown. Without the store
                those next to this rank are among the ranks that it probes.
            launches: Number of launches that this rank has started, if all ranks count them.
            waiting: Whether the device waits for other ranks.
        """


class AbortSignal:
    """Store key that holds the failure for which all ranks of a group stop: the first one that is set counts.

    Thread safety: all methods may be called from any thread.

    Args:
        store: Store shared by the ranks, with a prefix of its own.
        rank: This rank.
        key: Name of the key.
    """

    def __init__(self, store: PollingStore, rank: int, key: str = "abort") -> None:
        self._store = store
        self._rank = rank
        self._key = key

    def read(self) -> PeerFailure | None:
        """Returns the failure that a rank has signalled, or None if no rank has.

        Raises:
            MessageError: The value is malformed.
            RuntimeError: The store is unreachable.
        """
        return PeerFailure.unpacked(self._store.read(self._key)) if self._store.check([self._key]) else None

    def set(self, failure: PeerFailure) -> None:
        """Sets the failure unless one is set.

        Raises:
            RuntimeError: The store is unreachable.
        """
        self._store.compare_set(self._key, "", failure.packed(self._rank).decode())

    def try_set(self, failure: PeerFailure) -> None:
        """Sets the failure unless one is set; if the store is unreachable, that is only logged."""
        try:
            self.set(failure)
        except RuntimeError as error:
            log.debug("the store was unreachable when rank %d signalled an abort: %s", self._rank, error)


class _PolledAbortSignal(AbortSignal):
    """An `AbortSignal` that is polled while ranks work; a store that does not answer counts as no signal.

    Args:
        store: Store shared by the ranks, with a prefix of its own.
        rank: This rank.
    """

    def __init__(self, store: PollingStore, rank: int) -> None:
        super().__init__(store.within(STORE_PATIENCE), rank)
        self._polled = AbortSignal(store.within(ABORT_PATIENCE), rank)
        self._answering = store
        self._store_is_gone = False

    def poll(self) -> PeerFailure | None:
        """Returns the failure that a rank has signalled; None if there is none, or if the store does not answer.

        After an error of the store other than a timeout, no request is made any more. None, too, for a malformed value.
        """
        if self._store_is_gone or not self._answering.is_answering:
            return None
        try:
            return self._polled.read()
        except MessageError as error:
            log.debug("the abort signal in the store is malformed: %s", error)
        except StoreUnreachableError as error:
            # It may come back; broken connections show by themselves.
            log.debug("the abort signal cannot be polled: %s", error)
        except RuntimeError as error:
            # It will not come back, and torch logs a whole stack for every further request.
            self._store_is_gone = True
            log.debug("the abort signal cannot be polled any more: %s", error)
        return None


@dataclass(frozen=True, slots=True)
class _Report:
    """Report of a rank that lives, though it has aborted.

    Attributes:
        dead: Ranks that it knows to have failed.
        launches: Number of launches that it had started.
        waiting: Whether its device waits for other ranks.
        overdue: Whether it aborted because of a timeout.
        seen: Error that it saw, as text; empty if it only received another rank's abort.
        own: Whether its own error came first, rather than the failure of a peer.
        phase: Phase of the collective that failed; empty for an abort outside of collectives.
    """

    dead: tuple[Rank, ...]
    launches: Count
    waiting: bool
    overdue: bool
    seen: Annotated[str, Most(2 * LONGEST_REASON)]
    own: bool
    phase: str = ""


_REPORT: MessageType[_Report] = MessageType(_Report)
_VERDICT: MessageType[tuple[tuple[int, ...], Mapping[int, str]]] = MessageType(
    tuple[tuple[Rank, ...], Annotated[Mapping[int, str], Most(MOST_SEEN)]]
)
"""A packed verdict: missing ranks, and what others saw, by rank."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Result of collecting all reports.

    Attributes:
        missing: Ranks that are gone.
        seen: Errors of up to `MOST_SEEN` ranks, by rank, if no rank is missing; else empty.
    """

    missing: set[int]
    seen: dict[int, str]

    @classmethod
    def unpacked(cls, data: bytes) -> "_Verdict":
        """Parses what `packed` returned on another rank.

        Raises:
            MessageError: The bytes are malformed.
        """
        missing, seen = _VERDICT.read(data)
        return cls(set(missing), dict(seen))

    def packed(self) -> str:
        """Serializes this for the store."""
        return json.dumps([sorted(self.missing), self.seen])


class StoreFailureReporter(FailureReporter):
    """Reporter of one group of ranks, or of several groups that wait for each other, over their store.

    Args:
        store: Store shared by all ranks, with a prefix of its own, whose waits block no other user.
        rank: This rank.
        size: Number of ranks.
        may_miss: Returns the ranks that may be missing, and is called after a failure; None means all ranks.
        peer_table: Addresses of the other ranks; None if they publish them in the store (see `publish`).
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        may_miss: Callable[[], Iterable[int]] | None = None,
        peer_table: PeerTable | None = None,
    ) -> None:
        polling = store if isinstance(store, PollingStore) else PollingStore(store, STORE_PATIENCE, ranks=size)
        self._abort = _PolledAbortSignal(polling, rank)
        self._peer_table = table = peer_table or PeerTable("", rank, {})
        super().__init__(rank, GroupFailures((table.reported_failure, self._abort.poll), self._abort.try_set))
        self._store = polling.within(STORE_PATIENCE)
        self._size = size
        self._may_miss = may_miss or (lambda: range(size))
        self._group: Sequence[int] = range(size)

    def signal_abort(self, reason: str, *, directly: bool = False) -> None:
        """Makes the other ranks abort with this reason, unless a failure is known already; does not wait for them.

        Also publishes this rank's report, if it has none yet: peers that collect reports after a failure then do not
        wait for it.

        Args:
            reason: Reason, for their error messages.
            directly: Whether to notify up to `MOST_PROBES` peers at their probe servers, too, because the store may
                end with this process.
        """
        peer_table = self._peer_table
        if directly:
            # Read the addresses first: peers may stop the store once the signal is set.
            with suppress(StoreUnreachableError):
                peer_table = self._addresses_of(range(self._size), range(self._size))
        # Peers may see a connection of this rank close before they see the signal, and then quote this.
        seen = f"a reason to give up: {reason}"[:LONGEST_REASON]
        report = {"dead": [], "launches": 0, "waiting": True, "overdue": False, "seen": seen, "own": True}
        try:
            self._store.compare_set(f"report/{self.rank}", "", json.dumps(report))
        except RuntimeError as error:
            log.debug("the store was unreachable before rank %d could publish its report: %s", self.rank, error)
        super().signal_abort(reason)
        if directly:
            peer_table.notify(peer_table.probe_targets(()), PeerFailure(reason, FAILED))

    @property
    def plain_store(self) -> Store:
        """The plain torch store of these ranks, for other users, who add a prefix of their own."""
        return self._store.plain

    def of_group(self, ranks: Sequence[int]) -> "StoreFailureReporter":
        """Returns this reporter as one of several groups uses it.

        Args:
            ranks: The reporter's number of each of the group's ranks.
        """
        reporter = copy(self)
        reporter._group = tuple(ranks)
        return reporter

    def peer_wait(self) -> PeerWait:
        """Returns a `PeerWait` for operations that report no failures themselves, such as making gloo groups.

        It probes the ranks that have published an address.
        """
        members = range(self._size)

        def exited(ranks: Sequence[int]) -> list[int]:
            try:
                return self._addresses_of(ranks, members).exited(ranks)
            except StoreUnreachableError:
                # The process that served the store may have exited after it notified this one.
                if self.abort_reason() is None:
                    raise
                return []

        found = PeerWait(members, self.rank, exited, self.abort_reason)
        found.notify = partial(self.signal_abort, directly=True)
        return found

    def publish(self, generation: str) -> None:
        """Publishes the address of this process's probe server, which stays open as long as the process lives.

        Failures that peers report to it become a source of `failures`.

        Args:
            generation: Id of these ranks' generation, the same on all of them.

        Raises:
            StoreUnreachableError: The store does not answer.
        """
        server = ProbeServer.open()
        server.register(generation, self.rank)
        self._store.set(f"address/{self.rank}", PeerAddress.here(server.port, self._store.host).packed())
        self._peer_table = PeerTable(generation, self.rank, {}, server=server)
        self.failures.add_source(self._peer_table.reported_failure)

    def diagnose(
        self, error: BaseException, phase: str, members: Sequence[int], *, launches: int = 0, waiting: bool = True
    ) -> CollectiveError:
        """Publishes this rank's report, agrees with the others on who is missing, and returns the error to raise.

        Blocks until all have reported, or for `PATIENCE` and a few polls if ranks do not. If the store is unreachable,
        it probes up to `MOST_PROBES` peers instead, and notifies those that answer.

        Args:
            error: Error that the transport raised.
            phase: Operation and phase, such as `all_reduce inter_node`.
            members: Ranks of the failed collective, as the group numbers them; empty if unknown. Without the store
                those next to this rank are among the ranks that it probes.
            launches: Number of launches that this rank has started, if all ranks count them.
            waiting: The device waits for other ranks. After a timeout, a rank whose device does not, and which has
                started fewer launches than another one, is the missing rank.

        Returns:
            The error for every future of this rank.
        """
        # What this rank knows by itself.
        missing_of = error.missing if isinstance(error, PeerError) else ()
        # A peer may have named them, so they need not be ranks of this communicator.
        dead = {self._group[rank] for rank in missing_of if 0 <= rank < len(self._group)}
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        overdue = PeerFailure.of(error).source == OVERDUE
        first = self.failures.first
        from_peer = first is not None and first.reported_by not in (None, self.rank) and first.reason in str(error)
        seen = "" if from_peer else f"{phase} fail: {cause}"[:LONGEST_REASON]
        # gloo raises RuntimeError for failures of peers, too.
        own = type(error) is not RuntimeError and not isinstance(error, PeerError)
        report = {"dead": sorted(dead), "phase": phase, "launches": launches, "waiting": waiting, "overdue": overdue}
        # Agree with the others; without the store, probe some of them.
        try:
            # A thread of this process may have waited for the store in vain already.
            self._store.give_up_if_silent(STORE_PATIENCE)
            verdict = self._agree_on_missing({**report, "seen": seen, "own": own}, cause)
        except RuntimeError as store_error:
            return self._without_store(f"{phase} failed on rank {self.rank}", cause, store_error, members, dead)
        # Word the verdict.
        missing = self._others(verdict.missing)
        if missing:
            who = self._who(missing)
        else:
            who = f"none of the {self._size} ranks is missing"
            others = [f"rank {rank} saw {text}" for rank, text in verdict.seen.items() if text != seen]
            cause = "; ".join([*([] if from_peer and others else [cause]), *others])
        return CollectiveError(f"{phase} failed on rank {self.rank}: {who}. Cause: {cause}", missing)

    def _without_store(
        self, what: str, cause: str, store_error: RuntimeError, members: Sequence[int], dead: set[int]
    ) -> CollectiveError:
        """Probes some peers directly and returns the error to raise.

        The first rank to do so notifies the peers of the result: they would take its own exit for the failure.
        """
        reason = str(store_error).splitlines()[0].rstrip(".")
        # Another rank may have probed the peers already, and notified this one of the result.
        if (reported := self._peer_table.reported_failure()) is not None:
            missing = self._others({*dead, *reported.ranks})
            return CollectiveError(
                f"{what}: {self._who(missing, ', and ')}{reason}. {reported.reason}. Cause: {cause}", missing
            )
        found = self._peer_table.probe(self._peer_table.probe_targets(members))
        of = {
            outcome: [rank for rank, each in found.items() if each == outcome]
            for outcome in (EXITED, REFUSED, UNANSWERED, ANSWERS)
        }
        missing = tuple(sorted((dead | set(of[EXITED])) - {self.rank}))
        result = f"Of the ranks that rank {self.rank} has probed at their own ports, " + "; ".join(
            f"{_list(ranks)} {outcome if len(ranks) == 1 else outcome_of_many}"
            for (outcome, ranks), outcome_of_many in zip(
                of.items(), ("have ended", "refuse connections", "do not answer", "answer"), strict=True
            )
            if ranks
        )
        if of[UNANSWERED] and not of[EXITED]:
            result += " (a rank that does not is stopped, or cut off from this host)"
        if of[REFUSED]:
            result += " (a rank that refuses them has ended, or a firewall rejects them)"
        if not found:
            result = "No rank could be probed"
        self._peer_table.notify(of[ANSWERS], PeerFailure(result, FAILED, missing, self.rank))
        return CollectiveError(f"{what}: {self._who(missing, ', and ')}{reason}. {result}. Cause: {cause}", missing)

    def _others(self, named: Iterable[int]) -> tuple[int, ...]:
        """Returns the other ranks among those that peers have named, ascending; other numbers are no ranks."""
        return tuple(sorted(set(named) & set(range(self._size)) - {self.rank}))

    def _who(self, missing: Sequence[int], then: str = "") -> str:
        if not missing:
            return ""
        which, verb = ("rank", "is") if len(missing) == 1 else ("ranks", "are")
        return f"{which} {_list(missing)} of {self._size} {verb} missing{then}"

    def _agree_on_missing(self, report: dict[str, object], cause: str) -> _Verdict:
        """Publishes this rank's report and returns the verdict.

        The first rank to arrive collects all reports; the others wait for its verdict, which keeps the store at O(n)
        requests instead of O(n^2).

        Raises:
            RuntimeError: The store is unreachable.
        """
        source = OVERDUE if report["overdue"] else FAILED
        self._store.set(f"report/{self.rank}", json.dumps(report))
        self._abort.set(PeerFailure(f"rank {self.rank} saw {report['phase']} fail: {cause}", source))
        first = self._store.elect("collector", self.rank) == self.rank
        deadline = time.monotonic() + PATIENCE.total_seconds() + poll_seconds(self._size)
        if not first:
            nap_seconds = max(NAP_SECONDS, poll_seconds(self._size) / 8)
            while not (decided := self._store.check(["verdict"])) and time.monotonic() < deadline + POLL_SECONDS:
                time.sleep(nap_seconds)
                nap_seconds = min(2 * nap_seconds, poll_seconds(self._size))
            if decided:
                try:
                    return _Verdict.unpacked(self._store.read("verdict"))
                except MessageError as error:
                    log.debug("the verdict is malformed, and is made again: %s", error)
        # This rank is the collector, or the collector has failed.
        verdict = self._collect(report, deadline)
        self._store.set("verdict", verdict.packed())
        return verdict

    def _collect(self, own: dict[str, Any], deadline: float) -> _Verdict:
        """Reads the reports until every rank has reported or is known to have failed, or the deadline has passed.

        One store request reads `BLOCK` reports; ranks of incomplete blocks are polled one by one, ever more rarely.

        Args:
            own: This rank's report.
            deadline: Monotonic seconds.
        """
        reports, silent, dead = {self.rank: own}, set(self._may_miss()) - {self.rank}, set(own["dead"])
        began = time.monotonic()
        probing = began + PROBE_AFTER.total_seconds() + poll_seconds(self._size)
        nap_seconds, thorough = NAP_SECONDS, began
        while True:
            now = time.monotonic()
            last = now > deadline
            # Read whole blocks each time, single ranks at growing intervals.
            one_by_one = last or self._size <= BLOCK or now >= thorough
            if one_by_one:
                thorough = now + 2 * (now - began) + POLL_SECONDS
            for block in _blocks(silent - dead):
                found = self._read(block) or (
                    [one for rank in block for one in self._read([rank])] if one_by_one else []
                )
                for rank, report in found:
                    silent.discard(rank)
                    reports[rank] = report
                    dead |= {*self._others(report["dead"])}
            # Once, probe the ranks that have not reported: those that have exited are not waited for.
            if now > probing:
                probing = deadline + 1.0
                first = sorted(silent - dead)[:MOST_PROBES]
                dead |= set(self._addresses_of(silent - dead, reports).exited(first))
            if not silent - dead or last:
                break
            time.sleep(nap_seconds)
            nap_seconds = min(2 * nap_seconds, POLL_SECONDS)
        # A rank that has reported is not missing, even if it has exited since.
        for rank in dead & silent:
            reports.update(self._read([rank]))
        missing = (dead | silent) - reports.keys()
        # After a timeout, the rank that is behind and waits for no one is the missing one.
        if not missing and any(each["overdue"] for each in reports.values()):
            most = max(each["launches"] for each in reports.values())
            missing = {rank for rank, each in reports.items() if each["launches"] < most and not each["waiting"]}
        if missing:
            return _Verdict(missing, {})
        return _Verdict(set(), {rank: reports[rank]["seen"] for rank in self._quoted_ranks(reports)})

    def _quoted_ranks(self, reports: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """Chooses up to `MOST_SEEN` ranks whose reports the error message quotes.

        First ranks that failed by themselves, then the one that signalled the abort, then those that blame no peer.
        """
        signal = self._abort.poll()
        signaller = None if signal is None else signal.reported_by

        def order(rank: int) -> tuple[bool, bool, bool, int]:
            return not reports[rank]["own"], rank != signaller, bool(reports[rank]["dead"]), rank

        return sorted((rank for rank in reports if reports[rank]["seen"]), key=order)[:MOST_SEEN]

    def _addresses_of(self, silent: Collection[int], living: Collection[int]) -> PeerTable:
        """Returns the addresses of silent ranks, and of living ones close to them, which may run on the same hosts.

        Raises:
            StoreUnreachableError: The addresses are in the store, and it does not answer.
        """
        if self._peer_table.addresses:
            return self._peer_table
        wanted = set(sorted(silent)[:MOST_PROBES])
        for rank in tuple(wanted):
            wanted |= set(sorted(living, key=lambda each: abs(each - rank))[:INDIRECT_PROBES])
        addresses = {}
        for rank in wanted - {self.rank}:
            if self._store.check([f"address/{rank}"]):
                try:
                    addresses[rank] = PeerAddress.unpacked(self._store.read(f"address/{rank}"))
                except MessageError as error:
                    log.debug("the address of rank %d is malformed: %s", rank, error)
        return replace(self._peer_table, addresses=addresses)

    def _read(self, ranks: Sequence[int]) -> list[tuple[int, dict[str, Any]]]:
        """Reads reports of some ranks: (rank, report) each, without malformed ones; empty if one has published none."""
        keys = [f"report/{rank}" for rank in ranks]
        if not self._store.check(keys):
            return []
        texts = self._store.multi_get(keys) if len(keys) > 1 else [self._store.read(keys[0])]
        found = []
        for rank, text in zip(ranks, texts, strict=True):
            try:
                found.append((rank, asdict(_REPORT.read(text))))
            except MessageError as error:
                log.debug("the report of rank %d is malformed: %s", rank, error)
        return found


def _blocks(ranks: set[int]) -> list[list[int]]:
    """Splits ranks, in order, by the block that they belong to."""
    found: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        found.setdefault(rank // BLOCK, []).append(rank)
    return list(found.values())


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
