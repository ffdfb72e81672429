"""Analysis on rank 0: reads the statuses of all ranks, and logs stragglers, slow links, stalls and disagreements.

Each poll reads the newest status of every rank and updates one report. If something hangs, or a late rank is to be
explained, the analyzer requests the last collectives of all ranks, and diagnoses their responses in a later poll: it
never waits.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from gradwire.comms.observe.diagnosis import Stuck, continues
from gradwire.comms.watch.collective import one_in_words, sender_of
from gradwire.comms.watch.links import LinkWatch, SlowLink
from gradwire.comms.watch.rank import RankStatus
from gradwire.comms.watch.report import Episode, GroupSummary, WatchReport, late_in_words
from gradwire.comms.watch.stragglers import StragglerFinder, WatchStraggler, longest_waited_in
from gradwire.comms.watch.timeline_writer import RESPONSE_SECONDS, TimelineWriter
from gradwire.comms.watch.trouble import (
    find_absent,
    find_all_stuck,
    find_disagreements,
    positions_in,
    stalls_in_words,
    stuck_in_words,
)
from gradwire.comms.watch.watch_store import WatchStore
from gradwire.topology.wording import duration, ranks_in_words

log = logging.getLogger("gradwire")

SILENT_SECONDS = 5.0
"""Age of a status after which its rank counts as frozen or failed: ten times the interval between statuses."""

REQUEST_AFTER_SECONDS = (1.0, 5.0, 15.0)
"""Times from naming a late rank to requesting in which collective the others wait for it. The request is repeated while
the parameters in that collective are unknown, because models are searched for at long intervals."""


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request for the last collectives of all ranks.

    Attributes:
        number: Number of the request in the store.
        until: Monotonic time after which ranks that have not responded are left out.
        stuck: Stuck groups and channels for which the request was made; empty for another reason.
        compares: True to search for ranks that disagree. False in a job that makes progress, where ranks may issue
            collectives from different lines.
    """

    number: int
    until: float
    stuck: tuple[Stuck, ...] = ()
    compares: bool = True


class Analyzer:
    """Analyzes the statuses of all ranks, and logs what is new.

    Thread safety: none. `Session` calls it under its lock.

    Args:
        store: Store from which statuses are read.
        stall_seconds: Time without progress until a stall is logged; it is logged again each time that the longest wait
            has doubled.
        trace: File for the timeline; None writes none.

    Attributes:
        report: Findings so far.
    """

    def __init__(self, store: WatchStore, stall_seconds: float, trace: Path | None = None) -> None:
        self.report = WatchReport(0.0)
        self._store = store
        self._stall_seconds = self._next_stall = stall_seconds
        self._began = time.monotonic()
        self._members: dict[str, tuple[int, ...]] = {}
        self._hosts: dict[int, str] = {}
        self._late: StragglerFinder | None = None
        self._beats: dict[int, tuple[int, float]] = {}
        """Rank -> number of its newest status, and the monotonic time at which it was first read."""
        self._request: OpenRequest | None = None
        self._last_request = 0
        self._statuses: dict[int, RankStatus] = {}
        self._reported: tuple[Stuck, float] | None = None
        """Cause of the stall that was logged, and monotonic time since when nothing moves; until training continues."""
        self._links = LinkWatch()
        self._drawing = None if trace is None else TimelineWriter(store, trace)

    def poll(self) -> None:
        """Reads the newest status of all ranks, updates the report, and logs what is new.

        If something hangs, or a late rank is to be explained, it asks all ranks, by a number in the store, for their
        last collectives. A later poll diagnoses the responses, once all have come or the time for them is over. It also
        asks for the times of the timeline, if one is drawn. It waits for no rank, but each of its calls of the store
        may block for up to 2 s (`REQUEST_TIMEOUT`).

        Raises:
            RuntimeError: The store is gone, or does not respond.
        """
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
        self._log_continuation(now)
        if self._request is None:
            self._update_stall(now)
            self._request_for_late(now)
        else:
            self._diagnose_responses(now)
        if self._drawing is not None and self._members:
            self._drawing.go_on(self._hosts, now)

    def draw_soon(self) -> None:
        """Requests a new timeline at the next poll, because something has happened."""
        if self._drawing is not None:
            self._drawing.begin_soon()

    def adopt(self, number: int) -> None:
        """Takes over the request of a rank that is about to end, so that the responses to it are diagnosed.

        It replaces the open request, if there is one.

        Args:
            number: Number of the request in the store; one that is not newer than the last one is ignored.
        """
        if number > self._last_request:
            self._last_request = number
            self._request = OpenRequest(number, time.monotonic() + RESPONSE_SECONDS)

    def _read_groups(self) -> None:
        """Reads the hosts and groups of all ranks again, if a host is not known or a status has an unknown group.

        With other groups than before, the detection of stragglers starts again from nothing.
        """
        names = {name for status in self._statuses.values() for name in status.groups}
        if names <= set(self._members) and len(self._hosts) == self._store.size:
            return
        found = self._store.groups()
        self._hosts = {rank: host for rank, (host, _) in found.items()}
        members = {name: ranks for _, groups in found.values() for name, ranks in groups.items()}
        if members != self._members:
            self._members, self._late = members, StragglerFinder(members)

    def _summarize(self, now: float) -> None:
        """Updates the summary of each group in the report."""
        self.report.seconds = now - self._began
        self.report.groups = []
        for name, ranks in self._members.items():
            known = {rank: self._statuses[rank].groups for rank in ranks if rank in self._statuses}
            states = {rank: groups[name] for rank, groups in known.items() if name in groups}
            if states:
                waited = {rank: state.waited_seconds for rank, state in states.items()}
                ended = max(state.ended for state in states.values())
                self.report.groups.append(GroupSummary(name, ranks, ended, waited))

    def _update_late(self, late: list[WatchStraggler], now: float) -> None:
        """Begins episodes of late ranks, each with a warning, and ends those of ranks that are late no longer.

        Updates the suspects as well.

        Args:
            late: The stragglers as of now.
            now: Monotonic seconds.
        """
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
        """Notes which ranks may be late, for a job that ends before a late rank could be named."""
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
        """Returns the open episodes of which it is not known in which collective, with which parameters, ranks wait.

        Episodes in channels are left out.
        """
        late = [each for each in self.report.late if each.ended is None and sender_of(each.late.group) is None]
        return [each for each in late if each.waited_in is None or each.waited_in.holds is None]

    def _request_for_late(self, now: float) -> None:
        """Requests the last collectives of all ranks, to learn in which one the others wait for a late rank.

        Does so at the times of `REQUEST_AFTER_SECONDS`, until that collective and its parameters are known.

        Args:
            now: Monotonic seconds.
        """
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
        """Updates the traffic in the report, begins episodes of slow links, each with a warning, and ends others."""
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
        """Returns the ranks whose newest status is older than `SILENT_SECONDS`."""
        return tuple(rank for rank, seconds in self._quiet_seconds(now).items() if seconds > SILENT_SECONDS)

    def _quiet_seconds(self, now: float) -> dict[int, float]:
        """Returns rank -> seconds since its newest status was first read, or since the watch began if it has none."""
        return {rank: now - self._beats.get(rank, (0, self._began))[1] for rank in range(self._store.size)}

    def _update_stall(self, now: float) -> None:
        """Requests the last collectives of all ranks, if a rank has waited in a group or channel for too long.

        Args:
            now: Monotonic seconds.
        """
        # A rank that waits for a waiting rank may have begun to wait before it: half of the time counts for others.
        found = find_all_stuck(self._statuses, self._members, self._silent(now), self._stall_seconds / 2)
        longest = max((each.seconds for each in found), default=0.0)
        if longest < self._stall_seconds:
            self._next_stall = self._stall_seconds
        elif longest >= self._next_stall:
            self._next_stall = 2 * longest
            self._last_request = self._store.request_collectives()
            self._request = OpenRequest(self._last_request, now + RESPONSE_SECONDS, tuple(found))

    def _log_continuation(self, now: float) -> None:
        """Logs that training continues after a stall, once the ranks that waited have issued later collectives.

        Does not log it, also later, if a rank is about to end.
        """
        if self._reported is None:
            return
        stuck, began = self._reported
        # A time-out ends a collective as well: a rank that is about to end does not continue.
        if any(status.leaves is not None for status in self._statuses.values()):
            self._reported = None
        elif continues(stuck, positions_in(stuck.group, self._statuses)):
            late = (*stuck.missing, *stuck.silent)
            named = f" ({ranks_in_words(late)})" if late else ""
            log.warning("watch: training continues after a stall of %s%s", duration(now - began), named)
            self._reported = None

    def _diagnose_responses(self, now: float) -> None:
        """Compares the last collectives that ranks have sent on request, once all have responded or the time is over.

        Logs ranks that disagree, the cause of a stall, and the collective in which the others wait for a late rank.
        Then marks the request as concluded, for ranks that wait for that before they end.

        Args:
            now: Monotonic seconds.
        """
        assert self._request is not None
        request, responses = self._request, self._store.responses(self._request.number)
        if len(responses) < self._store.size and now < request.until:
            return
        self._request = None
        # Name the collective in which the others wait for a late rank.
        for episode in self._unnamed():
            issued = {rank: response.get(episode.late.group, []) for rank, response in responses.items()}
            episode.waited_in = longest_waited_in(issued, episode.late.waiting)
            if episode.waited_in is not None and episode.waited_in.holds is not None:
                log.warning("watch: rank %d is waited for%s", episode.late.rank, episode.longest_in())
        # Compare what the ranks have issued.
        compares = request.compares or any(status.leaves is not None for status in self._statuses.values())
        disagreements = list(find_disagreements(responses)) if compares else []
        for each in disagreements:
            self._add_disagreement(str(each))
        # Name the ranks for which a stalled group waits, or those whose end has broken a collective.
        if request.stuck:
            cause, text = stalls_in_words(request.stuck, self._statuses, responses, self._hosts)
            self._add_stall(cause, text, disagree=bool(disagreements))
            self._reported = self._reported or (cause, now - cause.seconds)
        elif request.compares:
            for stuck in find_absent(responses, self._statuses, self._members, self._quiet_seconds(now)):
                text = stuck_in_words(stuck, self._statuses, responses, self._hosts)
                self._add_stall(stuck, text, disagree=bool(disagreements))
        self._store.conclude(request.number)

    def _add_stall(self, stuck: Stuck, text: str, *, disagree: bool) -> None:
        """Logs a stall, adds it to the report, and requests a new timeline.

        Args:
            stuck: The stall.
            text: Sentence about it.
            disagree: Whether ranks have issued different collectives. If no rank is missing, that is the cause, and
                `text`, which blames a link, is replaced.
        """
        if disagree and not (stuck.missing or stuck.silent):
            text = f"{one_in_words(stuck.group, stuck.number)} has been in flight for {duration(stuck.seconds)}"
        self.report.stalls.append(text)
        self.draw_soon()
        log.warning("watch: stall: %s", text)

    def _add_disagreement(self, text: str) -> None:
        """Logs a sentence about ranks that disagree, and adds it to the report, unless it is there already.

        If it is new, also requests a new timeline.
        """
        if text not in self.report.disagreements:
            self.report.disagreements.append(text)
            self.draw_soon()
            log.warning("watch: %s", text)
