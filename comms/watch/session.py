"""One rank's part in watching one default group: it looks, publishes, responses, and on rank 0 judges."""

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
from gradwire.comms.watch.publisher import Publisher
from gradwire.comms.watch.rank import RankLog
from gradwire.comms.watch.report import WatchReport
from gradwire.comms.watch.timeline_writer import RESPONSE_SECONDS
from gradwire.comms.watch.trouble import find_disagreements
from gradwire.comms.watch.watch_store import WatchStore

log = logging.getLogger("gradwire")

POLL_SECONDS = 0.02
"""Seconds between two looks at this rank's groups: 10 us for the state of its groups, and 20 us for where its thread
stands."""

STATUS_SECONDS = 0.5
"""Seconds between two statuses of a rank."""

CONCLUDE_SECONDS = RESPONSE_SECONDS + 2.0
"""How long a rank that ends with an error waits until the others have answered, and rank 0 has said what they mean."""

MOST_FAILURES = 5
"""The most failures of the store, one after the other; then this rank watches no more."""


class Session:
    """Watches the default group that there is now, and all groups within it.

    Args:
        stall_seconds: Without progress, until it is said.
        messages: Notes the point-to-point messages of this process.
        trace: A file for the timeline, written by rank 0; None writes none.

    Attributes:
        group: The default group.
    """

    def __init__(self, stall_seconds: float, messages: MessageNotes, trace: Path | None) -> None:
        if dist.group.WORLD is None:
            raise RuntimeError("the default group has been destroyed")
        self.group = dist.group.WORLD
        rank, size = dist.get_rank(), dist.get_world_size()
        self._store = WatchStore(store_of(self.group), rank, size)
        self._publisher = Publisher(self._store, traces=trace is not None)
        self._analyzer = Analyzer(self._store, stall_seconds, trace) if rank == 0 else None
        self._messages = messages
        self._thread = threading.main_thread().ident or 0
        self._flight = FlightReader(messages.counts)
        self._log = RankLog()
        self._activity = Activity(self._thread)
        self._began = self._last = time.monotonic()
        self._next_status = 0.0
        self._failures = 0
        self._leaves: str | None = None
        self._lock = threading.Lock()  # the training thread publishes, too, where it ends with an error

    @property
    def report(self) -> WatchReport | None:
        """What was found; None on all ranks but the first."""
        return None if self._analyzer is None else self._analyzer.report

    @property
    def is_unanswered(self) -> bool:
        """Whether the store no longer responses."""
        return self._failures >= MOST_FAILURES

    @property
    def is_over(self) -> bool:
        """Whether another group has taken the default group's place, or the store no longer responses."""
        return self.is_unanswered or not dist.is_initialized() or dist.group.WORLD is not self.group

    def look(self) -> None:
        """Looks at this rank; now and then publishes to the others."""
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
        except Exception as error:  # noqa: BLE001 - the store, whose loss whoever trains will hear of; or others' statuses
            self._failures += 1
            log.log(
                logging.WARNING if self.is_unanswered and not isinstance(error, RuntimeError) else logging.DEBUG,
                "watch: rank %d cannot look at its groups or speak to the others%s: %r",
                self._store.rank,
                ", and leaves it" if self.is_unanswered else "",
                error,
            )

    def publish(self) -> None:
        """Leaves a status, responses what was asked, and judges on rank 0.

        Raises:
            RuntimeError: The store is gone, or silent.
        """
        with self._lock:
            self._publisher.publish_groups(self._flight.members | self._messages.members)
            self._flight.look_for_models(time.monotonic() - self._began)
            doings = self._activity.seconds | {QUEUE: queue_seconds(threading.main_thread().native_id or 0)}
            self._publisher.publish(
                dict(self._log.states()) | dict(self._messages.states()),
                {kind: round(seconds, 3) for kind, seconds in doings.items()},
                self._activity.lines(),
                line_of_thread(self._thread),
                self._leaves,
                self._log.links(self._last),
            )
            request = self._publisher.respond(
                self._issued, lambda: self._flight.issued(lines=False) | self._messages.issued()
            )
            if self._analyzer is not None:
                if request:
                    self._analyzer.adopt(request)
                self._analyzer.look()

    @property
    def leaves(self) -> bool:
        """Whether the training thread is about to end, and compares first."""
        return self._leaves is not None

    @property
    def waits(self) -> bool:
        """Whether a collective was under way at the last look, or a thread stands waiting for a message."""
        return self._log.waits or self._messages.waits

    def _issued(self) -> dict[str, list[IssuedCollective]]:
        return self._flight.issued() | self._messages.issued()

    def leave(self, why: str) -> None:
        """Compares what all ranks have issued last, where this one is about to end while others may wait for it.

        Args:
            why: It ends.
        """
        self._leaves = why
        try:
            request = self._store.request_collectives()
            until = time.monotonic() + CONCLUDE_SECONDS
            self.publish()
            while time.monotonic() < until and not self._store.is_concluded(request):
                time.sleep(POLL_SECONDS)
                if threading.current_thread() is not threading.main_thread() and self._analyzer is not None:
                    self.publish()
            if not self._store.is_concluded(request):  # C++ has ended rank 0, as gloo does for unlike sizes
                self._store.conclude(request)
                for each in find_disagreements(self._store.responses(request)):
                    log.warning("watch: %s", each)
        except Exception as gone:  # noqa: BLE001 - the store, or what others have said: this rank ends all the same
            last = [
                f"{each[-1]}, {one_in_words(name, each[-1].number)}, at {each[-1].line}"
                for name, each in self._issued().items()
                if each
            ]
            log.warning(
                "watch: rank %d ends with %s, and cannot ask the others what they did: %s; its own last collective: %s",
                self._store.rank,
                why,
                gone,
                "; ".join(last),
            )
