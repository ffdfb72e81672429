"""Whose link is slow: what the kernel says of the TCP connections between hosts, side by side.

An all-reduce ends on all ranks at nearly the same moment, also where one link makes it slow: then nobody is late, and
all wait. But of each connection the kernel counts for how long it had something to send that was not acknowledged. Of
links that carry as many bytes in the same time the slow one has for longer: it is that one which all wait for. Time in
which the receiver took nothing in does not count: a rank that is late is not its link.

Linux counts all of this from 5.4 on. RDMA and shared memory have no such counters, and are not seen.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from gradwire.comms.bootstrap.kernel import TcpInfo, outside_connections
from gradwire.topology.wording import duration, rate

log = logging.getLogger("gradwire")

Pair = tuple[str, str]
"""The host that sends, and the one that receives."""

LINKS_SECONDS = 1.0
"""Time between two readings of one rank: 1.5 ms for 40 connections and 30 files (AMD EPYC, 2026-11-24, load 50)."""
SLICE_SECONDS = 3.0
SLICES = 3
"""A link has to be slow in all of the last ones before it is named."""
LEAST_NBYTES = 1 << 20
"""Least bytes of a link in a slice: less is waiting for responses, whatever the rate."""
BUSY_SHARE = 0.25
"""Share of a slice in which a slow link has something to send."""
ALIKE, SLOWER = 0.5, 2.0
"""A slow link carries this share of what the others do at least, and is busy so many times as long for each byte."""


@dataclass(frozen=True, slots=True)
class LinkState:
    """What connections of one process with one address have sent so far.

    Attributes:
        busy_seconds: For how long there was something to send, and room for it at the receiver.
        nbytes: Acknowledged.
        segments: With data.
        again: Of these sent again, and not for nothing.
    """

    busy_seconds: float = 0.0
    nbytes: int = 0
    segments: int = 0
    again: int = 0

    def __add__(self, other: "LinkState") -> "LinkState":
        """Joins two connections, or two processes, that use one link at a time: the busier counts."""
        return LinkState(
            max(self.busy_seconds, other.busy_seconds),
            self.nbytes + other.nbytes,
            self.segments + other.segments,
            self.again + other.again,
        )

    def since(self, before: "LinkState") -> "LinkState":
        """What was added; nothing of connections that were closed."""
        return LinkState(
            max(self.busy_seconds - before.busy_seconds, 0.0),
            max(self.nbytes - before.nbytes, 0),
            max(self.segments - before.segments, 0),
            max(self.again - before.again, 0),
        )


def connection_states() -> dict[str, LinkState]:
    """What this process's TCP connections with other hosts have sent: `own address>peer's` -> state.

    Empty where the kernel is too old to count it, or shows no descriptors.
    """
    found: dict[str, LinkState] = {}
    for own, peer, connection in outside_connections():
        try:
            info = TcpInfo.of(connection)
        except OSError as error:  # of another kind than its name says, as sockets of MPTCP
            log.debug("the kernel does not count what a connection sends: %s", error)
            continue
        if info.is_whole:
            busy = max(info.busy_seconds - info.receiver_seconds, 0.0)
            again = max(info.retransmitted - info.sent_twice, 0)
            one = LinkState(busy, info.acknowledged_nbytes, info.segments, again)
            found[f"{own}>{peer}"] = found.get(f"{own}>{peer}", LinkState()) + one
    return found


@dataclass(frozen=True, slots=True)
class LinkSummary:
    """What one link has carried while it was watched.

    Attributes:
        source: The host that sends.
        target: The host that receives.
        nbytes: Acknowledged.
        busy_seconds: For how long there was something to send.
        again_share: Of its segments, those that were sent again.
    """

    source: str
    target: str
    nbytes: int
    busy_seconds: float
    again_share: float

    def in_words(self, seconds: float) -> str:
        """One line of the report.

        Args:
            seconds: For how long it was watched.
        """
        again = f"; {self.again_share:.1%} of its segments were sent again" if self.again_share >= 1e-3 else ""
        sending = self.nbytes / self.busy_seconds if self.busy_seconds > 0 else 0.0
        return (
            f"link from {self.source} to {self.target}: {rate(sending)} while it sends, "
            f"{min(self.busy_seconds / seconds, 1.0):.0%} of the time{again}"
        )


@dataclass(frozen=True, slots=True)
class Slowness:
    """How slow a link is beside others.

    Attributes:
        bytes_per_second: While it sends.
        usual_bytes_per_second: Of the fastest of those that carry as much, while it sends.
        busy_share: Of the time.
    """

    bytes_per_second: float
    usual_bytes_per_second: float
    busy_share: float


@dataclass(slots=True)
class SlowLink:
    """How long one link was slow.

    Attributes:
        which: `of node2`, where all of a host's are slow; `from node1 to node2`.
        slowness: As it was when it was named.
        began: Seconds since the watch began.
        ended: When it was no longer slow; None while it is.
    """

    which: str
    slowness: Slowness
    began: float
    ended: float | None = None

    def __str__(self) -> str:
        when = f"from {duration(self.began)} on" if self.ended is None else f"{self.began:.0f} to {self.ended:.0f} s"
        slow = self.slowness
        return (
            f"the link {self.which} is slow, {when}: {rate(slow.bytes_per_second)} while it sends, "
            f"{slow.busy_share:.0%} of the time; another one carries as much at "
            f"{rate(slow.usual_bytes_per_second)}"
        )


class LinkWatch:
    """Judges from the words of all ranks whose link is slow."""

    def __init__(self) -> None:
        self._first: dict[Pair, LinkState] = {}
        self._last: dict[Pair, LinkState] = {}
        self._slice: tuple[float, dict[Pair, LinkState]] | None = None
        self._slow: deque[dict[str, Slowness]] = deque(maxlen=SLICES)

    def receive(self, links: Mapping[int, Mapping[str, LinkState]], hosts: Mapping[int, str], now: float) -> None:
        """Takes in what ranks say of their connections.

        Args:
            links: Rank -> what `connection_states` has found.
            hosts: Rank -> its host.
            now: Seconds.
        """
        found = states_of_hosts(links, hosts)
        for pair, state in found.items():
            self._first.setdefault(pair, state)
        self._last = found
        if self._slice is None or set(found) != set(self._slice[1]):
            self._slice = now, found
        elif now - self._slice[0] >= SLICE_SECONDS:
            seconds = now - self._slice[0]
            done = {pair: found[pair].since(was) for pair, was in self._slice[1].items()}
            self._slow.append(slow_links(done, seconds))
            self._slice = now, found

    def slow(self) -> dict[str, Slowness]:
        """Links that are slow now, as `SlowLink.which` names them."""
        if len(self._slow) < SLICES:
            return {}
        return {which: said for which, said in self._slow[-1].items() if all(which in each for each in self._slow)}

    def summaries(self) -> list[LinkSummary]:
        """What each link has carried so far; those that carried little are left out."""
        found = []
        for (source, target), state in sorted(self._last.items()):
            done = state.since(self._first[source, target])
            if done.nbytes >= LEAST_NBYTES:
                again = done.again / max(done.segments, 1)
                found.append(LinkSummary(source, target, done.nbytes, done.busy_seconds, again))
        return found


def states_of_hosts(links: Mapping[int, Mapping[str, LinkState]], hosts: Mapping[int, str]) -> dict[Pair, LinkState]:
    """What hosts have sent each other.

    Args:
        links: Rank -> `own address>peer's` -> state.
        hosts: Rank -> its host; a peer's address that no rank has stands for itself.
    """
    owners = {key.partition(">")[0]: hosts[rank] for rank, some in links.items() if rank in hosts for key in some}
    found: defaultdict[Pair, LinkState] = defaultdict(LinkState)
    for rank, some in links.items():
        for key, state in some.items():
            peer = key.partition(">")[2]
            target = owners.get(peer, peer)
            if rank in hosts and target != hosts[rank]:
                found[hosts[rank], target] += state
    return dict(found)


def slow_links(done: Mapping[Pair, LinkState], seconds: float) -> dict[str, Slowness]:
    """The links that were slower than the fastest of those that carried as much.

    Where these are more than half of all, the network is uneven, and no link is named; unless they are all links of
    one host.

    Args:
        done: In this time.
        seconds: Of it.

    Returns:
        `from node1 to node2`, or `of node2` where all links of a host are slow -> how slow; of a host its slowest.
    """
    used = {pair: each for pair, each in done.items() if each.nbytes >= LEAST_NBYTES and each.busy_seconds > 0}
    slow = {}
    for pair, mine in used.items():
        rates = [
            each.nbytes / each.busy_seconds
            for other, each in used.items()
            if other != pair and ALIKE <= mine.nbytes / each.nbytes <= 1 / ALIKE
        ]
        rate, share = mine.nbytes / mine.busy_seconds, min(mine.busy_seconds / seconds, 1.0)
        if rates and share >= BUSY_SHARE and SLOWER * rate <= max(rates):
            slow[pair] = Slowness(rate, max(rates), share)
    hosts = [host for host in set(chain(*slow)) if {pair for pair in used if host in pair} == set(slow)]
    if len(hosts) == 1 and len(slow) > 1:
        return {f"of {hosts[0]}": min(slow.values(), key=lambda each: each.bytes_per_second)}
    if 2 * len(slow) > len(used):
        return {}
    return {f"from {source} to {target}": found for (source, target), found in slow.items()}
