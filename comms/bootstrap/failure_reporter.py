"""When a rank is lost: every survivor says which rank is missing and in which phase, within seconds.

A dead rank cannot speak, so the survivors do: each one that sees a collective fail publishes that it is alive and what
it saw, waits a moment for the others to do the same, and names those that said nothing. Where all have spoken, nobody
is missing: one of them has failed by itself, for want of memory perhaps, and each repeats what those saw whom no other
one had told.

What notices a failure, everywhere in gradwire, and how it is told, is in `failures`.
"""

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Annotated, Any

from gradwire.comms.bootstrap.addresses import own_addresses
from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.bootstrap.failures import FAILED, LONGEST_REASON, OVERDUE, Failures, PeerFailure
from gradwire.comms.bootstrap.kernel import own_kernel
from gradwire.comms.bootstrap.probe import (
    ANSWERS,
    ENDED,
    INDIRECT_PROBES,
    MOST_PROBES,
    REFUSED,
    SILENT,
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
"""How long survivors wait for the others' word, besides the time between two looks at the reporter. Most look once a
second; the rest is for busy machines."""

CALLING_AFTER = timedelta(seconds=2)
"""Delay after a failure before ranks that have not reported are probed directly."""

STORE_PATIENCE = timedelta(seconds=5)
"""The store patience for each answer of the store, once a collective has failed: survivors go on to call each other
instead."""

ALARM_PATIENCE = timedelta(seconds=1)
"""The alarm patience for the store to say whether there is an alarm; a store that is late is not asked again before it
has answered."""

BLOCK = 64
"""Ranks whose words are asked for in one question."""

POLL_SECONDS = 1.0
"""Seconds between two looks at the store's alarm, in groups of up to `POLLS_PER_SECOND` ranks."""

POLLS_PER_SECOND = 2048
"""Most looks a second of all ranks of a group together: one server answers them, on one thread. Each rank of torch's
own NCCL group asks it once a second, too (TORCH_NCCL_COORD_CHECK_MILSEC in ProcessGroupNCCL.hpp)."""

MOST_SEEN = 4
"""Ranks whose words are repeated where nobody is missing, at most."""

NAP_SECONDS = 0.05
"""Seconds between the first two looks at the reporter; each later one comes twice as late, up to `poll_seconds`."""


def poll_seconds(size: int) -> float:
    """Seconds between two looks of each of `size` ranks at the store's alarm."""
    return max(POLL_SECONDS, size / POLLS_PER_SECOND)


class CollectiveError(RuntimeError):
    """A collective failed. `missing` holds the ranks that are gone, as far as the survivors know."""

    def __init__(self, message: str, missing: tuple[int, ...]) -> None:
        super().__init__(message)
        self.missing = missing


class FailureReporter(ABC):
    """Where a rank that gives up tells the others, and hears of them.

    Args:
        rank: This rank, as the reporter numbers it.
        failures: What is known of those whom the reporter is for.
    """

    def __init__(self, rank: int, failures: Failures) -> None:
        self.rank = rank
        self.failures = failures

    def abort_reason(self) -> str | None:
        """Why another rank has given up; None while none has."""
        failure = self.failures.poll()
        return None if failure is None else failure.reason

    def signal_abort(self, reason: str) -> None:
        """Raises the alarm, and waits for nobody: the other ranks give up with this reason."""
        self.failures.report(PeerFailure(reason, FAILED))

    def signal_abort_to_each(self, reason: str) -> None:
        """As `warn`, so that they hear it, too, where what the alarm is raised through ends with this rank."""
        self.signal_abort(reason)

    @abstractmethod
    def diagnose(
        self, error: BaseException, phase: str, members: Sequence[int], *, launches: int = 0, waiting: bool = True
    ) -> CollectiveError:
        """Report a failure to the other ranks and return the error to raise; see `StoreFailureReporter.diagnose`."""


class _StoreAlarm:
    """What the ranks of a group tell each other of a failure through their store: the first one counts. Any thread.

    Args:
        store: As of a `StoreFailureReporter`.
        rank: This rank.
    """

    def __init__(self, store: PollingStore, rank: int) -> None:
        self._store = store.within(STORE_PATIENCE)
        self._asked = store.within(ALARM_PATIENCE)
        self._rank = rank
        self._store_is_gone = False

    def told(self) -> PeerFailure | None:
        """The failure; None where nobody has given up, or where the store is gone (connections break then)."""
        if self._store_is_gone or not self._store.is_answering:
            return None
        try:
            return PeerFailure.unpacked(self._store.read("alarm")) if self._asked.check(["alarm"]) else None
        except MessageError as error:
            log.debug("what stands in the store in place of an alarm is none: %s", error)
            return None
        except StoreUnreachableError as error:  # stopped or cut off, it may be back; torch says what is broken
            log.debug("the store cannot be asked for alarms: %s", error)
            return None
        except RuntimeError as error:  # it stays so, and torch logs the whole stack for every question
            self._store_is_gone = True
            log.debug("the store cannot be asked for alarms any more: %s", error)
            return None

    def tell(self, failure: PeerFailure) -> None:
        """Tells the others of a failure, if the store is there."""
        try:
            self.set(failure)
        except RuntimeError as error:
            log.debug("the store was gone before rank %d could raise the alarm: %s", self._rank, error)

    def set(self, failure: PeerFailure) -> None:
        """As `tell`.

        Raises:
            RuntimeError: The store is gone.
        """
        self._store.compare_set("alarm", "", failure.packed(self._rank).decode())


@dataclass(frozen=True, slots=True)
class _Word:
    """What a rank says that lives, though it has given up: see `StoreFailureReporter.diagnose`."""

    dead: tuple[Rank, ...]
    launches: Count
    waiting: bool
    overdue: bool
    seen: Annotated[str, Most(2 * LONGEST_REASON)]
    own: bool
    phase: str = ""


_WORD: MessageType[_Word] = MessageType(_Word)
_VERDICT: MessageType[tuple[tuple[int, ...], Mapping[int, str]]] = MessageType(
    tuple[tuple[Rank, ...], Annotated[Mapping[int, str], Most(MOST_SEEN)]]
)
"""Ranks that are gone, and by rank what others saw."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What the collector of all words has found.

    Attributes:
        missing: Ranks that are gone.
        seen: Where none is: by rank, what those saw whom no other one had told. A few of them.
    """

    missing: set[int]
    seen: dict[int, str]

    @classmethod
    def unpacked(cls, said: bytes) -> "_Verdict":
        missing, seen = _VERDICT.read(said)
        return cls(set(missing), dict(seen))

    def packed(self) -> str:
        return json.dumps([sorted(self.missing), self.seen])


class StoreFailureReporter(FailureReporter):
    """Where the survivors of one group leave their word, or those of several groups that wait for each other.

    Args:
        store: A store that all ranks share, with a prefix of its own; one whose waits block nobody else.
        rank: This rank.
        size: Number of ranks.
        everybody: Gives the ranks that may be missing; None: all of them. Asked when something has failed.
        directory: Where the other ranks can be called; None where they say in the store where.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        everybody: Callable[[], Iterable[int]] | None = None,
        directory: PeerTable | None = None,
    ) -> None:
        polling = store if isinstance(store, PollingStore) else PollingStore(store, STORE_PATIENCE, ranks=size)
        self._alarm = _StoreAlarm(polling, rank)
        self._directory = directory or PeerTable("", rank, {})
        super().__init__(rank, Failures((self._directory.reported_failure, self._alarm.told), self._alarm.tell))
        self._store = polling.within(STORE_PATIENCE)
        self._size = size
        self._everybody = everybody or (lambda: range(size))
        self._group: Sequence[int] = range(size)

    def signal_abort(self, reason: str) -> None:
        """See `FailureReporter`. Also publishes this rank's report, so that peers do not wait for it."""
        seen = f"a reason to give up: {reason}"[:LONGEST_REASON]  # some see a connection close before they hear it
        word = {"dead": [], "launches": 0, "waiting": True, "overdue": False, "seen": seen, "own": True}
        try:
            self._store.compare_set(f"word/{self.rank}", "", json.dumps(word))
        except RuntimeError as error:
            log.debug("the store was gone before rank %d could say that it lives: %s", self.rank, error)
        super().signal_abort(reason)

    def signal_abort_to_each(self, reason: str) -> None:
        """See `FailureReporter`. Also notifies peers directly: this process may host the store."""
        try:
            directory = self._addresses_of(range(self._size), range(self._size))
        except StoreUnreachableError:
            directory = self._directory
        self.signal_abort(reason)
        directory.notify(directory.probe_targets(()), PeerFailure(reason, FAILED))

    @property
    def plain_store(self) -> Store:
        """What else the ranks tell each other goes through, below a prefix of its own."""
        return self._store.plain

    def of_group(self, ranks: Sequence[int]) -> "StoreFailureReporter":
        """The same reporter for one of several groups.

        Args:
            ranks: The reporter's number of each of the group's ranks.
        """
        reporter = copy(self)
        reporter._group = tuple(ranks)
        return reporter

    def peer_wait(self) -> PeerWait:
        """Return a `PeerWait` for operations that report no failures themselves, such as making gloo groups.

        Of several groups they are the ranks of the store that have said where they can be called.
        """
        everybody = range(self._size)

        def ended(ranks: Sequence[int]) -> list[int]:
            try:
                return self._addresses_of(ranks, everybody).exited(ranks)
            except StoreUnreachableError:
                if self.abort_reason() is None:
                    raise
                return []  # who served the store has told why, and ended

        found = PeerWait(everybody, self.rank, ended, self.abort_reason)
        found.notify = self.signal_abort_to_each
        return found

    def publish(self, start: str) -> None:
        """Says in the store where the others can call this process, as long as it lives: see `_addresses_of`.

        Args:
            start: Names these ranks; the same on all of them.
        """
        server = ProbeServer.open()
        server.register(start, self.rank)
        place = PeerAddress(server.port, tuple(own_addresses(self._store.host)), own_kernel())
        self._store.set(f"address/{self.rank}", place.packed())
        self._directory = PeerTable(start, self.rank, {}, server=server)
        self.failures.add_source(self._directory.reported_failure)

    def diagnose(
        self, error: BaseException, phase: str, members: Sequence[int], *, launches: int = 0, waiting: bool = True
    ) -> CollectiveError:
        """Publishes this rank's word, listens to the others, and says what happened.

        Args:
            error: What the transport raised.
            phase: The phase in words: `all_reduce inter_node`.
            members: Ranks, as the group numbers them, of what failed in it, where known.
            launches: How many launches this rank has started, where all ranks say so.
            waiting: Whether its device waits for others. After a time-out one that does not, and has started fewer
                launches than another one, is the rank that did not come.

        Returns:
            The error for every future of this rank; within `PATIENCE` where ranks are silent, else as soon as all have
            published what they saw.
        """
        missing_of = error.missing if isinstance(error, PeerError) and members else ()
        dead = {self._group[members[index]] for index in missing_of}
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        overdue = PeerFailure.of(error).source == OVERDUE
        first = self.failures.first
        told = first is not None and first.said_by not in (None, self.rank) and first.reason in str(error)
        seen = "" if told else f"{phase} fail: {cause}"[:LONGEST_REASON]
        own = type(error) is not RuntimeError and not isinstance(error, PeerError)  # gloo's are about others, too
        word = {"dead": sorted(dead), "phase": phase, "launches": launches, "waiting": waiting, "overdue": overdue}
        try:
            self._store.give_up_if_silent(STORE_PATIENCE)  # the stall watch has asked it, or a look for alarms
            verdict = self._listen({**word, "seen": seen, "own": own}, cause)
        except RuntimeError as store_error:
            return self._without_store(f"{phase} failed on rank {self.rank}", cause, store_error, members, dead)
        missing = tuple(sorted(verdict.missing - {self.rank}))
        if missing:
            who = self._who(missing)
        else:
            who = f"none of the {self._size} ranks is missing"
            others = [f"rank {rank} saw {text}" for rank, text in verdict.seen.items() if text != seen]
            cause = "; ".join([*([] if told and others else [cause]), *others])
        return CollectiveError(f"{phase} failed on rank {self.rank}: {who}. Cause: {cause}", missing)

    def _without_store(
        self, what: str, cause: str, store_error: RuntimeError, members: Sequence[int], dead: set[int]
    ) -> CollectiveError:
        """Probe some peers directly: which have exited, which do not answer.

        The first rank to come tells the others what it has found, who would take it for lost, too, once it has ended.
        """
        reason = str(store_error).splitlines()[0].rstrip(".")
        if (told := self._directory.reported_failure()) is not None:
            missing = tuple(sorted({*dead, *told.ranks} - {self.rank}))
            return CollectiveError(
                f"{what}: {self._who(missing, ', and ')}{reason}. {told.reason}. Cause: {cause}", missing
            )
        found = self._directory.probe(self._directory.probe_targets(members))
        of = {
            outcome: [rank for rank, each in found.items() if each == outcome]
            for outcome in (ENDED, REFUSED, SILENT, ANSWERS)
        }
        missing = tuple(sorted((dead | set(of[ENDED])) - {self.rank}))
        heard = f"Of the ranks that rank {self.rank} has called at their own ports, " + "; ".join(
            f"{_list(ranks)} {outcome if len(ranks) == 1 else outcome_of_many}"
            for (outcome, ranks), outcome_of_many in zip(
                of.items(), ("have ended", "refuse connections", "do not answer", "answer"), strict=True
            )
            if ranks
        )
        if of[SILENT] and not of[ENDED]:
            heard += " (who does not is stopped, or cut off from this host)"
        if of[REFUSED]:
            heard += " (who refuses them has ended, or a firewall rejects them)"
        if not found:
            heard = "No rank could be called"
        self._directory.notify(of[ANSWERS], PeerFailure(heard, FAILED, missing, self.rank))
        return CollectiveError(f"{what}: {self._who(missing, ', and ')}{reason}. {heard}. Cause: {cause}", missing)

    def _who(self, missing: Sequence[int], then: str = "") -> str:
        if not missing:
            return ""
        which, verb = ("rank", "is") if len(missing) == 1 else ("ranks", "are")
        return f"{which} {_list(missing)} of {self._size} {verb} missing{then}"

    def _listen(self, word: dict[str, object], cause: str) -> _Verdict:
        """Who is missing.

        The first rank to come collects all words and publishes the verdict, which the others wait for: if
        everybody collected, the store would be asked as many questions as there are pairs of ranks.
        """
        source = OVERDUE if word["overdue"] else FAILED
        self._store.set(f"word/{self.rank}", json.dumps(word))
        self._alarm.set(PeerFailure(f"rank {self.rank} saw {word['phase']} fail: {cause}", source))
        first = int(self._store.compare_set("collector", "", str(self.rank))) == self.rank
        deadline = time.monotonic() + PATIENCE.total_seconds() + poll_seconds(self._size)
        if not first:
            nap_seconds = max(NAP_SECONDS, poll_seconds(self._size) / 8)
            while not (told := self._store.check(["verdict"])) and time.monotonic() < deadline + POLL_SECONDS:
                time.sleep(nap_seconds)
                nap_seconds = min(2 * nap_seconds, poll_seconds(self._size))
            if told:
                try:
                    return _Verdict.unpacked(self._store.read("verdict"))
                except MessageError as error:
                    log.debug("the verdict cannot be read, and is found anew: %s", error)
        verdict = self._collect(word, deadline)
        self._store.set("verdict", verdict.packed())
        return verdict

    def _collect(self, own: dict[str, Any], deadline: float) -> _Verdict:
        """Reads all words, a block of ranks in a question; who is silent is asked for alone, ever more rarely."""
        words, silent, dead = {self.rank: own}, set(self._everybody()) - {self.rank}, set(own["dead"])
        began = time.monotonic()
        calling = began + CALLING_AFTER.total_seconds() + poll_seconds(self._size)
        nap_seconds, thorough = NAP_SECONDS, began
        while True:
            now = time.monotonic()
            last = now > deadline
            one_by_one = last or self._size <= BLOCK or now >= thorough
            if one_by_one:
                thorough = now + 2 * (now - began) + POLL_SECONDS
            for block in _blocks(silent - dead):
                said = self._read(block) or (
                    [one for rank in block for one in self._read([rank])] if one_by_one else []
                )
                for rank, word in said:
                    silent.discard(rank)
                    words[rank] = word
                    dead |= set(word["dead"])
            if now > calling:
                calling = deadline + 1.0
                first = sorted(silent - dead)[:MOST_PROBES]
                dead |= set(self._addresses_of(silent - dead, words).exited(first))
            if not silent - dead or last:
                break
            time.sleep(nap_seconds)
            nap_seconds = min(2 * nap_seconds, POLL_SECONDS)
        for rank in dead & silent:  # who has spoken is not missing, though it has ended since
            words.update(self._read([rank]))
        missing = (dead | silent) - words.keys()
        if not missing and any(each["overdue"] for each in words.values()):
            most = max(each["launches"] for each in words.values())
            missing = {rank for rank, each in words.items() if each["launches"] < most and not each["waiting"]}
        if missing:
            return _Verdict(missing, {})
        return _Verdict(set(), {rank: words[rank]["seen"] for rank in self._telling(words)})

    def _telling(self, words: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """Whose words are repeated: who fails by itself first, then who has raised the alarm, who accuses nobody."""
        alarm = self._alarm.told()
        teller = None if alarm is None else alarm.said_by

        def order(rank: int) -> tuple[bool, bool, bool, int]:
            return not words[rank]["own"], rank != teller, bool(words[rank]["dead"]), rank

        return sorted((rank for rank in words if words[rank]["seen"]), key=order)[:MOST_SEEN]

    def _addresses_of(self, silent: Collection[int], living: Collection[int]) -> PeerTable:
        """Where silent ranks can be called, and the living ones beside them, that may be of their hosts."""
        if self._directory.addresses:
            return self._directory
        wanted = set(sorted(silent)[:MOST_PROBES])
        for rank in tuple(wanted):
            wanted |= set(sorted(living, key=lambda each: abs(each - rank))[:INDIRECT_PROBES])
        addresses = {}
        for rank in wanted - {self.rank}:
            if self._store.check([f"address/{rank}"]):
                try:
                    addresses[rank] = PeerAddress.unpacked(self._store.read(f"address/{rank}"))
                except MessageError as error:
                    log.debug("rank %d has not said where it can be called: %s", rank, error)
        return replace(self._directory, addresses=addresses)

    def _read(self, ranks: Sequence[int]) -> list[tuple[int, dict[str, Any]]]:
        """The words of some ranks; none where one of them is silent. What is no word counts for silence."""
        keys = [f"word/{rank}" for rank in ranks]
        if not self._store.check(keys):
            return []
        texts = self._store.multi_get(keys) if len(keys) > 1 else [self._store.read(keys[0])]
        found = []
        for rank, text in zip(ranks, texts, strict=True):
            try:
                found.append((rank, asdict(_WORD.read(text))))
            except MessageError as error:
                log.debug("the word of rank %d cannot be read: %s", rank, error)
        return found


def _blocks(ranks: set[int]) -> list[list[int]]:
    """Ranks in order, those of one block together."""
    found: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        found.setdefault(rank // BLOCK, []).append(rank)
    return list(found.values())


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
