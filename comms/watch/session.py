"""Session of a watch: one rank polls its groups, publishes its status, responds to requests, and on rank 0 analyzes.

A session lasts as long as the default group that it watches. The thread of the watch polls every `POLL_SECONDS`, and
publishes every `STATUS_SECONDS`. A training thread that is about to end with an error publishes as well, once, so that
the other ranks learn why.
"""

import logging
import threading
import time
from pathlib import Path

import torch.distributed as dist

from gradwire.comms.bootstrap.compat import store_of
from gradwire.comms.observe.stack import line_of_thread
from gradwire.comms.watch.activity import QUEUE, Activity, queue_seconds
from gradwire.comms.watch.analyzer import Analyzer
from gradwire.comms.watch.collective import IssuedCollective, one_in_words
from gradwire.comms.watch.flight import FlightReader
from gradwire.comms.watch.messages import MessageNotes
from gradwire.comms.watch.rank import RankLog, RankStatus
from gradwire.comms.watch.report import WatchReport
from gradwire.comms.watch.timeline_writer import RESPONSE_SECONDS
from gradwire.comms.watch.trouble import find_disagreements
from gradwire.comms.watch.watch_store import WatchStore

log = logging.getLogger("gradwire")

POLL_SECONDS = 0.02
"""Interval between two polls of this rank's groups. A poll takes 10 us for the groups and 20 us for the stack."""

STATUS_SECONDS = 0.5
"""Interval between two statuses of a rank."""

CONCLUDE_SECONDS = RESPONSE_SECONDS + 2.0
"""Longest time for which a rank that ends with an error waits for the comparison: the time to respond, and two seconds
for statuses that are published late."""

MOST_FAILURES = 5
"""Failed requests to the store in a row after which this rank stops watching."""


class Session:
    """Watches the present default group, and all groups within it.

    Thread safety: `poll` is called by the thread of the watch; `publish` and `leave` may be called by the training
    thread as well.

    Args:
        stall_seconds: Time without progress until a stall is logged.
        messages: Notes of the point-to-point messages of this process.
        trace: File for the timeline, written by rank 0; None writes none.

    Attributes:
        group: The default group that is watched.

    Raises:
        RuntimeError: The default group has been destroyed, or its store does not respond.
    """

    def __init__(self, stall_seconds: float, messages: MessageNotes, trace: Path | None) -> None:
        if dist.group.WORLD is None:
            raise RuntimeError("the default group has been destroyed")
        self.group = dist.group.WORLD
        rank, size = dist.get_rank(), dist.get_world_size()
        self._store = WatchStore(store_of(self.group), rank, size)
        self._traces = trace is not None
        self._beats = 0
        self._analyzer = Analyzer(self._store, stall_seconds, trace) if rank == 0 else None
        self._messages = messages
        self._thread = threading.main_thread().ident or 0
        self._flight = FlightReader(messages.counts)
        self._log = RankLog()
        self._activity = Activity(self._thread)
        self._last = time.monotonic()
        self._next_status = 0.0
        self._failures = 0
        self._leaves: str | None = None
        self._lock = threading.Lock()  # Guards _store, _beats, _flight.issued, _analyzer and the log's states.

    @property
    def report(self) -> WatchReport | None:
        """Findings so far; None on all ranks but rank 0."""
        return None if self._analyzer is None else self._analyzer.report

    @property
    def is_unanswered(self) -> bool:
        """True if the store no longer responds."""
        return self._failures >= MOST_FAILURES

    @property
    def is_over(self) -> bool:
        """True if another default group has replaced this one, or the store no longer responds."""
        return self.is_unanswered or not dist.is_initialized() or dist.group.WORLD is not self.group

    def poll(self) -> None:
        """Records the progress of this rank's groups; publishes its status if it is time.

        Never raises: an error is logged, and after `MOST_FAILURES` without a status in between the session is over.
        """
        now = time.monotonic()
        publishes = now >= self._next_status
        try:
            self._log.note(now, self._flight.progress())
            self._activity.sample(now - self._last)
            self._last = now
            if publishes:
                self._next_status = now + STATUS_SECONDS
                self.publish()
                self._failures = 0
        except Exception as error:  # noqa: BLE001 - diagnostics must not end the job: five in a row end the session
            self._failures += 1
            log.log(
                logging.WARNING if self.is_unanswered and not isinstance(error, RuntimeError) else logging.DEBUG,
                "watch: rank %d cannot poll its groups or reach the others%s: %r",
                self._store.rank,
                ", and stops watching" if self.is_unanswered else "",
                error,
            )

    def publish(self) -> None:
        """Publishes the status of this rank, responds to requests, and on rank 0 analyzes all statuses.

        Raises:
            RuntimeError: The store is gone, or does not respond.
        """
        with self._lock:
            self._store.publish_groups(self._flight.members | self._messages.members)
            now = time.monotonic()
            self._flight.search_models()
            doings = self._activity.seconds | {QUEUE: queue_seconds(threading.main_thread().native_id or 0)}
            self._beats += 1
            status = RankStatus(
                self._beats,
                now,
                dict(self._log.states()) | dict(self._messages.states()),
                {kind: round(seconds, 3) for kind, seconds in doings.items()},
                self._activity.lines(),
                line_of_thread(self._thread),
                self._leaves,
                self._log.links(self._last),
            )
            self._store.publish_status(status)
            request = self._store.respond(self._issued, self._times if self._traces else None)
            if self._analyzer is not None:
                if request:
                    self._analyzer.adopt(request)
                self._analyzer.poll()

    @property
    def leaves(self) -> bool:
        """True if the training thread is about to end, and compares collectives before that."""
        return self._leaves is not None

    @property
    def waits(self) -> bool:
        """True if a collective was in flight at the last poll, or a thread waits for a message."""
        return self._log.waits or self._messages.waits

    def _issued(self) -> dict[str, list[IssuedCollective]]:
        return self._flight.issued() | self._messages.issued()

    def _times(self) -> dict[str, list[IssuedCollective]]:
        return self._flight.issued(lines=False) | self._messages.issued()

    def leave(self, why: str) -> None:
        """Has all ranks compare their last collectives before this one ends, because others may wait for it.

        Returns once rank 0 has compared them. If it has not within `CONCLUDE_SECONDS`, this rank compares them and logs
        who disagrees; if the store is gone, it logs its own last collectives. Never raises.

        Args:
            why: Error or signal with which this rank ends.
        """
        self._leaves = why
        try:
            request = self._store.request_collectives()
            until = time.monotonic() + CONCLUDE_SECONDS
            self.publish()
            while time.monotonic() < until and not self._store.is_concluded(request):
                time.sleep(POLL_SECONDS)
                # On rank 0 this may be the thread of the watch, which analyzes: then no other thread does.
                if threading.current_thread() is not threading.main_thread() and self._analyzer is not None:
                    self.publish()
            # C++ may have ended rank 0, as gloo does if sizes differ: then this rank compares.
            if not self._store.is_concluded(request):
                self._store.conclude(request)
                for each in find_disagreements(self._store.responses(request)):
                    log.warning("watch: %s", each)
        except Exception as gone:  # noqa: BLE001 - the store may be gone: this rank ends all the same
            last = [
                f"{each[-1]}, {one_in_words(name, each[-1].number)}, at {each[-1].line}"
                for name, each in self._issued().items()
                if each
            ]
            log.warning(
                "watch: rank %d ends with %s, and cannot request the collectives of the others: %s; its own last "
                "collective: %s",
                self._store.rank,
                why,
                gone,
                "; ".join(last),
            )
