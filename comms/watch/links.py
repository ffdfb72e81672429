"""Detection of slow links from the kernel's counters of the TCP connections between hosts.

If one link slows an all-reduce down, the all-reduce still ends on all ranks at the same moment: no rank is late, all
wait. But for each connection the kernel counts the time in which it had data to send that was not acknowledged. Of
links that carry as many bytes in the same time, the slow one is busy for longer. Time in which the receiver did not
read is subtracted, because a late rank is not a slow link.

Linux counts all of this since 5.4. RDMA and shared memory have no such counters, so their links are not compared.
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
"""Host that sends, host that receives."""

LINKS_SECONDS = 1.0
"""Interval between two readings of one rank, which take 1.5 ms for 40 connections and 30 files (AMD EPYC, 2026-11-24,
load 50)."""
SLICE_SECONDS = 3.0
"""Length of the slices in which links are compared."""
SLICES = 3
"""Number of slices in a row in which a link must be slow before it is named."""
LEAST_NBYTES = 1 << 20
"""Least bytes of a link in a slice. With less, latency decides how long it is busy, not its rate."""
BUSY_SHARE = 0.25
"""Least share of a slice in which a slow link has data to send."""
ALIKE, SLOWER = 0.5, 2.0
"""Least ratio of the bytes of two links that are compared, and least ratio of their rates for one to be slow."""


@dataclass(frozen=True, slots=True)
class LinkState:
    """Counters of the connections of one process with one address, since they were opened.

    Attributes:
        busy_seconds: Time in which there was data to send, and room for it at the receiver.
        nbytes: Acknowledged bytes.
        segments: TCP segments with data.
        again: Segments that were sent again because they were lost.
    """

    busy_seconds: float = 0.0
    nbytes: int = 0
    segments: int = 0
    again: int = 0

    def __add__(self, other: "LinkState") -> "LinkState":
        """Adds the counters of two connections of one link. Both are busy at the same time: the longer time counts."""
        return LinkState(
            max(self.busy_seconds, other.busy_seconds),
            self.nbytes + other.nbytes,
            self.segments + other.segments,
            self.again + other.again,
        )

    def since(self, before: "LinkState") -> "LinkState":
        """Returns the increase of each counter since `before`; 0 for one that is lower now: connections were closed."""
        return LinkState(
            max(self.busy_seconds - before.busy_seconds, 0.0),
            max(self.nbytes - before.nbytes, 0),
            max(self.segments - before.segments, 0),
            max(self.again - before.again, 0),
        )


def connection_states() -> dict[str, LinkState]:
    """Reads the kernel's counters of this process's TCP connections whose two ends have different addresses.

    Returns:
        `own address>peer's address` -> sum of the counters of the connections between the two; empty if the kernel is
        older than 5.4, or does not show the process's descriptors.
    """
    found: dict[str, LinkState] = {}
    for own, peer, connection in outside_connections():
        try:
            info = TcpInfo.of(connection)
        except OSError as error:
            # Sockets of MPTCP are listed like those of TCP, but have no such counters.
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
    """Traffic of one link since the watch has first seen it.

    Attributes:
        source: Host that sends.
        target: Host that receives.
        nbytes: Acknowledged bytes.
        busy_seconds: Time in which there was data to send, and room for it at the receiver: the longest of the
            connections between the two hosts.
        again_share: Share of its segments that were sent again.
    """

    source: str
    target: str
    nbytes: int
    busy_seconds: float
    again_share: float

    def in_words(self, seconds: float) -> str:
        """Returns the line of the report about the link: its rate, how long it sent, and repeated segments.

        Args:
            seconds: Time since the watch began, of which the share of sending is computed.
        """
        again = f"; {self.again_share:.1%} of its segments were sent again" if self.again_share >= 1e-3 else ""
        sending = self.nbytes / self.busy_seconds if self.busy_seconds > 0 else 0.0
        return (
            f"link from {self.source} to {self.target}: {rate(sending)} while it sends, "
            f"{min(self.busy_seconds / seconds, 1.0):.0%} of the time{again}"
        )


@dataclass(frozen=True, slots=True)
class Slowness:
    """Comparison of a slow link with the others.

    Attributes:
        bytes_per_second: Rate of the link while it sends.
        usual_bytes_per_second: Rate of the fastest link that carries as much, while it sends.
        busy_share: Share of the time in which the slow link sends.
    """

    bytes_per_second: float
    usual_bytes_per_second: float
    busy_share: float


@dataclass(slots=True)
class SlowLink:
    """Episode in which a link was slow.

    Attributes:
        which: Name of the link, `from node1 to node2`; or `of node2` if all links of a host are slow.
        slowness: Comparison at the time at which it was named.
        began: Begin, in seconds since the watch began.
        ended: End, in seconds since the watch began; None while it lasts.
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
    """Finds slow links from the counters that all ranks publish."""

    def __init__(self) -> None:
        self._first: dict[Pair, LinkState] = {}
        self._last: dict[Pair, LinkState] = {}
        self._slice: tuple[float, dict[Pair, LinkState]] | None = None
        self._slow: deque[dict[str, Slowness]] = deque(maxlen=SLICES)

    def receive(self, links: Mapping[int, Mapping[str, LinkState]], hosts: Mapping[int, str], now: float) -> None:
        """Adds the newest counters, and compares the links if the present slice has lasted `SLICE_SECONDS`.

        A slice begins anew when a link appears or vanishes.

        Args:
            links: Rank -> result of `connection_states`.
            hosts: Rank -> its host.
            now: Monotonic seconds.
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
        """Returns the links that were slow in each of the last `SLICES` slices: `SlowLink.which` -> newest comparison.

        Empty before there are so many slices.
        """
        if len(self._slow) < SLICES:
            return {}
        newest = self._slow[-1]
        return {which: newest[which] for which in newest if all(which in each for each in self._slow)}

    def summaries(self) -> list[LinkSummary]:
        """Returns the traffic so far of each link that was in the last counters and carried `LEAST_NBYTES` or more."""
        found = []
        for (source, target), state in sorted(self._last.items()):
            done = state.since(self._first[source, target])
            if done.nbytes >= LEAST_NBYTES:
                again = done.again / max(done.segments, 1)
                found.append(LinkSummary(source, target, done.nbytes, done.busy_seconds, again))
        return found


def states_of_hosts(links: Mapping[int, Mapping[str, LinkState]], hosts: Mapping[int, str]) -> dict[Pair, LinkState]:
    """Adds up the counters of all ranks by link: returns (host that sends, host that receives) -> sum.

    Args:
        links: Rank -> `own address>peer's` -> counters of the connections between the two addresses.
        hosts: Rank -> its host. The address of a peer that is no rank of the job counts as a host of its own.
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
    """Returns the links that are slower than another link that carried about as many bytes in the same time.

    Only links count that carried 1 MiB (`LEAST_NBYTES`) and were busy, that is, had data to send. Their rate is bytes
    over busy seconds. The rules, in this order:

    1. A link is slow if its busy seconds are a quarter of the slice or more (`BUSY_SHARE`), and its rate is at most
    half (`SLOWER`) of the highest rate of the other links with half to twice as many bytes (`ALIKE`).
    2. If there are two slow links or more, and they are all links from and to just one host, that host is named.
    3. If more than half of the links that count are slow, none is named: the network is uneven.
    4. Else each slow link is named.

    Args:
        done: (Host that sends, host that receives) -> increase of the link's counters during a slice.
        seconds: Length of the slice.

    Returns:
        Name -> comparison with the faster link. Names are as in `SlowLink.which`: `from node1 to node2`, or `of node2`
        for a host, whose comparison is that of its slowest link.
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
