"""What a round trip and lost packets make of a link between nodes of CPUs: connections, their rate, and latency.

A connection of TCP sends a window of W bytes in each round trip R. Packets lost with probability p leave it
W = MSS sqrt(3 / (2 p)) on average; after a pause it begins with ten packets and doubles them in each round trip until
the path of B bytes per second is full. So n connections lose, against a link that is full at once,

    k R - (2^k - 1) n W_0 / B    with k = log2(B R / (n W_0)), where that is positive;

as many connections are opened as make that nothing, up to a limit.

Source: Mathis et al., "The macroscopic behavior of the TCP congestion avoidance algorithm", CCR 27 (1997), equation 3;
RFC 6928 for the ten packets W_0; RFC 2861 for the pause.
"""

import math
from dataclasses import replace

from gradwire.topology.cluster import Link

LEAST_ROUND_TRIP_SECONDS = 0.005
"""Shortest round trip for which connections are opened: below it one in each direction fills a link of 1 Gbit/s."""

MOST_CONNECTIONS = 64

SEGMENT_NBYTES = 1448
"""Bytes of payload in a packet: MTU 1500 with TCP's time stamps."""

FIRST_SEGMENTS = 10
"""Segments in TCP's initial window. Source: RFC 6928."""

FIRST_WINDOW_NBYTES = FIRST_SEGMENTS * SEGMENT_NBYTES
"""What a connection may have under way after a pause, and what it is trusted with: a bucket ends before many round
trips have passed. Over 20 ms and 0.01 % loss connections of 64 KiB each got 0.77 of 100 Mbit/s, of this 0.91."""

MOST_ROUND_TRIP_SECONDS = 10.0
"""Longest round trip that makes sense to ask for: fifty times around the earth."""


def connections_for(round_trip_seconds: float, bytes_per_second: float) -> int:
    """How many connections fill a path in one direction.

    Args:
        round_trip_seconds: Between the two ranks.
        bytes_per_second: Of the link.

    Returns:
        1 where the round trip is short; else as many first windows as there are bytes under way on a full path, at most
        `MOST_CONNECTIONS`.
    """
    if round_trip_seconds < LEAST_ROUND_TRIP_SECONDS:
        return 1
    return min(MOST_CONNECTIONS, max(1, math.ceil(round_trip_seconds * bytes_per_second / FIRST_WINDOW_NBYTES)))


def connection_rate(round_trip_seconds: float, loss: float) -> float:
    """Bytes per second that one connection carries on average; infinite without loss.

    Args:
        round_trip_seconds: Between its ends.
        loss: Probability that a packet is lost.
    """
    if not loss or not round_trip_seconds:
        return math.inf
    return SEGMENT_NBYTES * math.sqrt(1.5 / loss) / round_trip_seconds


def carried_together(bytes_per_second: float, connections: int, round_trip_seconds: float, loss: float) -> float:
    """Bytes per second that connections carry of a link, each of which loses packets at moments of its own.

    Well below the link they carry n times the rate of one, well above it the link's; between, some have just lost and
    the others do not make up for all of it: L / sqrt(1 + (L / n r)^2), which has both limits, and is within 0.05 of the
    shares 0.92, 0.72 and 0.51 that were measured for 64 connections at 0.1 % and 1 % over 80 ms and 1 % over 150 ms.

    Args:
        bytes_per_second: Of the link.
        connections: That share it.
        round_trip_seconds: Of the path.
        loss: Probability that a packet is lost.
    """
    together = connections * connection_rate(round_trip_seconds, loss)
    return bytes_per_second / math.hypot(1.0, bytes_per_second / together)


def ramp_seconds(round_trip_seconds: float, bytes_per_second: float, connections: int) -> float:
    """What a message after a pause takes longer than on a path that is full at once.

    Args:
        round_trip_seconds: Of the path.
        bytes_per_second: Of the link.
        connections: That share the message.
    """
    first, full = FIRST_WINDOW_NBYTES * connections, round_trip_seconds * bytes_per_second
    if full <= first:
        return 0.0
    return round_trip_seconds * math.log2(full / first) - (full - first) / bytes_per_second


def over_distance(link: Link, nodes: int, round_trip_seconds: float, loss: float = 0.0) -> Link:
    """A link between nodes of CPUs over a round trip: what sums and exchanges of large buckets get of it.

    Two nodes swap what they have in half a round trip; more of them exchange twice. Where a round trip is too short for
    connections of gradwire's own, a message of gloo takes a whole one: its receiver says that it is ready.

    Args:
        link: Without a round trip.
        nodes: That exchange over it.
        round_trip_seconds: Between two of them.
        loss: Probability that a packet is lost.

    Raises:
        ValueError: A number makes no sense.
    """
    if not 0 <= round_trip_seconds <= MOST_ROUND_TRIP_SECONDS:
        raise ValueError(f"`rtt` is {round_trip_seconds:g} s; wanted 0 to {MOST_ROUND_TRIP_SECONDS:g} s")
    if not 0 <= loss < 1:
        raise ValueError(f"`loss` is {loss:g}; wanted a probability from 0 to below 1")
    count = connections_for(round_trip_seconds, link.bytes_per_second)
    if count == 1 or nodes < 2:
        carried = min(link.stream_bytes_per_second, connection_rate(round_trip_seconds, loss))
        alpha = link.alpha_seconds + round_trip_seconds
        return replace(link, alpha_seconds=alpha, stream_bytes_per_second=carried)
    ramp = ramp_seconds(round_trip_seconds, link.bytes_per_second, count)
    once = round_trip_seconds / 2
    sums = once if nodes == 2 else 2 * once
    return replace(
        link,
        alpha_seconds=link.alpha_seconds + (sums + ramp) / (2 * (nodes - 1)),
        exchange_alpha_seconds=link.alpha_seconds + (once + ramp / 2) / (nodes - 1),
        channels=count,
        stream_bytes_per_second=min(
            link.stream_bytes_per_second,
            carried_together(link.bytes_per_second, count, round_trip_seconds, loss) / count,
        ),
    )
