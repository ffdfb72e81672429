"""What rank 0 makes of the statuses of all ranks: who is late, what hangs, who disagrees."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gradwire.comms.report import duration
from gradwire.comms.watch.collective import IssuedCollective, one_in_words, sender_of
from gradwire.comms.watch.late import Lateness, LateRank, longest_waited_in
from gradwire.comms.watch.links import LinkWatch, SlowLink
from gradwire.comms.watch.rank import RankStatus
from gradwire.comms.watch.report import Episode, GroupSummary, WatchReport, late_in_words
from gradwire.comms.watch.timeline_writer import RESPONSE_SECONDS, TimelineWriter
from gradwire.comms.watch.trouble import Stuck, find_absent, find_disagreements, find_stuck, origin, stuck_in_words
from gradwire.comms.watch.watch_store import WatchStore

log = logging.getLogger("gradwire")

SILENT_SECONDS = 5.0
"""A rank whose status is older is frozen or lost."""

REQUEST_AFTER_SECONDS = (1.0, 5.0, 15.0)
"""Seconds from naming a late rank to asking all in which collective they stand for it; again while it is not known
whose gradients that one carries, as models are looked for only now and then."""


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """What all ranks have been asked for: their last collectives.

    Attributes:
        number: Its number on the store.
        until: Monotonic seconds; who has not answered by then is left out.
        stuck: What hangs, where that is why.
        compares: Ranks that disagree are looked for. Not in a job that goes on, where ranks may ask from unlike lines.
    """

    number: int
    until: float
    stuck: Stuck | None = None
    compares: bool = True


class Analyzer:
    """Judges, and logs what is new.

    Args:
        store: Where statuses are read.
        size: Of the default group.
        stall_seconds: Without progress, until that is said; then again after twice the time.
        trace: A file for the timeline; None writes none.

    Attributes:
        report: What was found so far.
    """

    def __init__(self, store: WatchStore, size: int, stall_seconds: float, trace: Path | None = None) -> None:
        self.report = WatchReport(0.0)
        self._store = store
        self._size = size
        self._stall_seconds = self._next_stall = stall_seconds
        self._began = time.monotonic()
        self._members: dict[str, tuple[int, ...]] = {}
        self._hosts: dict[int, str] = {}
        self._late: Lateness | None = None
        self._beats: dict[int, tuple[int, float]] = {}
        self._request: OpenRequest | None = None
        self._last_request = 0
        self._statuses: dict[int, RankStatus] = {}
        self._links = LinkWatch()
        self._drawing = None if trace is None else TimelineWriter(store, size, trace)

    def look(self) -> None:
        """Reads all statuses, and says what is new."""
        self._statuses = self._store.statuses()
        self._read_groups()
        now = time.monotonic()
        for rank, status in self._statuses.items():
            if self._beats.get(rank, (None, 0.0))[0] != status.beat:
                self._beats[rank] = status.beat, now
        self._summarize(now)
        if self._late is not None:
            self._update_late(self._late.receive(self._statuses), now)
            self._update_links(now)
        if self._request is None:
            self._update_stall(now)
            self._request_what_is_waited_in(now)
        else:
            self._compare_responses(now)
        if self._drawing is not None and self._members:
            self._drawing.go_on(self._hosts, now)

    def draw_soon(self) -> None:
        """Has the timeline be drawn anew: something has happened."""
        if self._drawing is not None:
            self._drawing.begin_soon()

    def adopt(self, number: int) -> None:
        """Takes over a request that a rank has asked which is about to end."""
        if number > self._last_request:
            self._last_request = number
            self._request = OpenRequest(number, time.monotonic() + RESPONSE_SECONDS)

    def _read_groups(self) -> None:
        names = {name for status in self._statuses.values() for name in status.groups}
        if names <= set(self._members) and len(self._hosts) == self._size:
            return
        found = self._store.groups()
        self._hosts = {rank: host for rank, (host, _) in found.items()}
        members = {name: ranks for _, groups in found.values() for name, ranks in groups.items()}
        if members != self._members:
            self._members, self._late = members, Lateness(members)

    def _summarize(self, now: float) -> None:
        self.report.seconds = now - self._began
        self.report.groups = []
        for name, ranks in self._members.items():
            states = {
                r: self._statuses[r].groups[name]
                for r in ranks
                if r in self._statuses and name in self._statuses[r].groups
            }
            if states:
                waited = {rank: state.waited_seconds for rank, state in states.items()}
                ended = max(state.ended for state in states.values())
                self.report.groups.append(GroupSummary(name, ranks, ended, waited))

    def _update_late(self, late: list[LateRank], now: float) -> None:
        open_ = {each.late.rank: each for each in self.report.late if each.ended is None}
        for each in late:
            if each.rank in open_:
                episode = open_.pop(each.rank)
                episode.late = each if each.busy_with is not None else episode.late
                continue
            episode = Episode(each, self._host(each.rank), now - self._began)
            self.report.late.append(episode)
            log.warning("watch: %s", episode)
        for episode in open_.values():
            episode.ended = now - self._began
        self._suspect()

    def _suspect(self) -> None:
        """Notes who may be late, for a job that ends before a late rank could be named."""
        assert self._late is not None
        report = self.report
        report.decided = report.decided or self._late.decided
        known = {each.late.rank for each in report.late}
        report.suspects = [
            late_in_words(each, self._host(each.rank), "may be late, as far as so few steps show")
            for each in (() if report.decided else self._late.suspects(self._statuses))
            if each.rank not in known
        ]

    def _host(self, rank: int) -> str:
        return self._hosts.get(rank, "a host not known")

    def _unnamed(self) -> list[Episode]:
        """Ranks that are late, and others stand for them in a collective of which it is not known what it carries."""
        late = [each for each in self.report.late if each.ended is None and sender_of(each.late.group) is None]
        return [each for each in late if each.waited_in is None or each.waited_in.holds is None]

    def _request_what_is_waited_in(self, now: float) -> None:
        for each in self._unnamed() if self._request is None else ():
            if (
                each.requested < len(REQUEST_AFTER_SECONDS)
                and now - self._began >= each.began + REQUEST_AFTER_SECONDS[each.requested]
            ):
                each.requested += 1
                self._last_request = self._store.request_collectives()
                self._request = OpenRequest(self._last_request, now + RESPONSE_SECONDS, compares=False)
                return

    def _update_links(self, now: float) -> None:
        self._links.receive({rank: status.links for rank, status in self._statuses.items()}, self._hosts, now)
        self.report.links = self._links.summaries()
        slow = self._links.slow()
        for link in self.report.slow_links:
            if link.ended is None and slow.pop(link.which, None) is None:
                link.ended = now - self._began
        for which, slowness in slow.items():
            link = SlowLink(which, slowness, now - self._began)
            self.report.slow_links.append(link)
            log.warning("watch: %s", link)

    def _silent(self, now: float) -> tuple[int, ...]:
        return tuple(rank for rank, seconds in self._quiet_seconds(now).items() if seconds > SILENT_SECONDS)

    def _quiet_seconds(self, now: float) -> dict[int, float]:
        """Rank -> how old its newest status is."""
        return {rank: now - self._beats.get(rank, (0, self._began))[1] for rank in range(self._size)}

    def _update_stall(self, now: float) -> None:
        # Who waits for a rank that waits itself may have begun before it: so half of that time counts as well.
        found = find_stuck(self._statuses, self._members, self._silent(now), self._stall_seconds / 2)
        longest = max((each.seconds for each in found), default=0.0)
        stuck = origin(found)
        if stuck is None or longest < self._stall_seconds:
            if self._next_stall > self._stall_seconds:
                log.warning("watch: it goes on")
            self._next_stall = self._stall_seconds
        elif longest >= self._next_stall:
            self._next_stall = 2 * longest
            self._last_request = self._store.request_collectives()
            self._request = OpenRequest(self._last_request, now + RESPONSE_SECONDS, stuck)

    def _compare_responses(self, now: float) -> None:
        assert self._request is not None
        request, responses = self._request, self._store.responses(self._request.number)
        if len(responses) < self._size and now < request.until:
            return
        self._request = None
        for episode in self._unnamed():
            issued = {rank: response.get(episode.late.group, []) for rank, response in responses.items()}
            episode.waited_in = longest_waited_in(issued, episode.late.waiting)
            if episode.waited_in is not None and episode.waited_in.holds is not None:
                log.warning("watch: rank %d is waited for%s", episode.late.rank, episode.longest_in())
        compares = request.compares or any(status.leaves is not None for status in self._statuses.values())
        disagreements = list(find_disagreements(responses)) if compares else []
        for each in disagreements:
            self._add(self.report.disagreements, str(each))
        if request.stuck is not None:
            self._add_stall(request.stuck, responses, disagree=bool(disagreements))
        elif request.compares:
            for stuck in find_absent(responses, self._statuses, self._members, self._quiet_seconds(now)):
                self._add_stall(stuck, responses, disagree=bool(disagreements))
        self._store.conclude(request.number)

    def _add_stall(
        self, stuck: Stuck, responses: Mapping[int, Mapping[str, list[IssuedCollective]]], *, disagree: bool
    ) -> None:
        issued = {rank: response.get(stuck.group, []) for rank, response in responses.items()}
        text = stuck_in_words(stuck, self._statuses, issued, self._hosts)
        if disagree and not (stuck.missing or stuck.silent):
            text = f"{one_in_words(stuck.group, stuck.number)} has been under way for {duration(stuck.seconds)}"
        self.report.stalls.append(text)
        self.draw_soon()
        log.warning("watch: stall: %s", text)

    def _add(self, kept: list[str], text: str) -> None:
        if text not in kept:
            kept.append(text)
            self.draw_soon()
            log.warning("watch: %s", text)
