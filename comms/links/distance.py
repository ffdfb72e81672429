"""Models TCP over a link between CPU nodes with a long round trip or lost packets.

A TCP connection sends a window of W bytes in each round trip R. If packets are lost with probability p, the window is
W = MSS sqrt(3 / (2 p)) on average. After a pause a connection starts with W_0 = ten packets and doubles its window in
each round trip, until the path of B bytes per second is full. Compared with a link that is full at once, n connections
therefore lose

    k R - (2^k - 1) n W_0 / B    with k = log2(B R / (n W_0)), if that is positive.

`over_distance` applies the model to a link. `connections_for` returns the number of connections that makes this loss
zero, up to a limit.

Source: Mathis et al., "The macroscopic behavior of the TCP congestion avoidance algorithm", CCR 27 (1997), equation 3;
RFC 6928 for the ten packets W_0; RFC 2861 for the pause.
"""

import math
from dataclasses import replace

from gradwire.topology.cluster import Link

LEAST_ROUND_TRIP_SECONDS = 0.005
"""Shortest round trip for which several connections are opened. Below it, one in each direction fills 1 Gbit/s."""

MOST_CONNECTIONS = 64
"""Largest number of connections between two ranks; more cost file descriptors and slow down the last chunks."""

SEGMENT_NBYTES = 1448
"""Payload of a packet in bytes, with an MTU of 1500 and TCP's time stamps."""

FIRST_SEGMENTS = 10
"""Segments in TCP's initial window. Source: RFC 6928."""

FIRST_WINDOW_NBYTES = FIRST_SEGMENTS * SEGMENT_NBYTES
"""Bytes that a connection may have in flight after a pause. `connections_for` counts no more for each connection,
because a bucket ends before many round trips have passed: over 20 ms and 0.01 % loss, 64 KiB for each connection got
0.77 of 100 Mbit/s, this many bytes 0.91."""

MOST_ROUND_TRIP_SECONDS = 10.0
"""Longest round trip that `over_distance` accepts; light in a fibre circles the earth fifty times meanwhile."""


def connections_for(round_trip_seconds: float, bytes_per_second: float) -> int:
    """Returns how many TCP connections between two ranks fill a path in one direction.

    Args:
        round_trip_seconds: Round trip between the two ranks.
        bytes_per_second: Rate of the link.

    Returns:
        1 if the round trip is short; else the bytes in flight on a full path divided by the first window, at most
        `MOST_CONNECTIONS`.
    """
    if round_trip_seconds < LEAST_ROUND_TRIP_SECONDS:
        return 1
    return min(MOST_CONNECTIONS, max(1, math.ceil(round_trip_seconds * bytes_per_second / FIRST_WINDOW_NBYTES)))


def connection_rate(round_trip_seconds: float, loss: float) -> float:
    """Returns the average rate of one TCP connection in bytes per second; infinite without loss or round trip.

    Args:
        round_trip_seconds: Round trip between its ends.
        loss: Probability that a packet is lost.
    """
    if not loss or not round_trip_seconds:
        return math.inf
    return SEGMENT_NBYTES * math.sqrt(1.5 / loss) / round_trip_seconds


def combined_rate(bytes_per_second: float, connections: int, round_trip_seconds: float, loss: float) -> float:
    """Returns the sum of the rates of several TCP connections that share one link, in bytes per second.

    With n connections of rate r on a link of rate L it is L / sqrt(1 + (L / n r)^2): close to n r if that is far below
    L, and close to L if it is far above. In between, some connections have just lost a packet and the others do not
    make up for all of it. The formula is within 0.05 of the measured shares 0.92, 0.72 and 0.51 of 64 connections at
    0.1 % and 1 % over 80 ms and at 1 % over 150 ms.

    Args:
        bytes_per_second: Rate of the link.
        connections: Number of connections that share it.
        round_trip_seconds: Round trip of the path.
        loss: Probability that a packet is lost.
    """
    unlimited = connections * connection_rate(round_trip_seconds, loss)
    return bytes_per_second / math.hypot(1.0, bytes_per_second / unlimited)


def ramp_seconds(round_trip_seconds: float, bytes_per_second: float, connections: int) -> float:
    """Returns the seconds that a message after a pause takes longer than on a path that is full at once; 0 if none.

    Args:
        round_trip_seconds: Round trip of the path.
        bytes_per_second: Rate of the link.
        connections: Number of connections that share the message.
    """
    first, full = FIRST_WINDOW_NBYTES * connections, round_trip_seconds * bytes_per_second
    if full <= first:
        return 0.0
    return round_trip_seconds * math.log2(full / first) - (full - first) / bytes_per_second


def over_distance(link: Link, nodes: int, round_trip_seconds: float, loss: float = 0.0) -> Link:
    """Returns a copy of a link between CPU nodes with the latency and rates of large buckets over a long round trip.

    Two nodes exchange their tensors in half a round trip, and more nodes exchange twice. If the round trip is too short
    for gradwire's own connections, gloo sends the messages, and each takes a whole round trip, because the receiver
    first says that it is ready.

    Args:
        link: Link without the round trip.
        nodes: Number of nodes that exchange over it.
        round_trip_seconds: Round trip between two of them.
        loss: Probability that a packet is lost.

    Raises:
        ValueError: A number is out of range.
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
            combined_rate(link.bytes_per_second, count, round_trip_seconds, loss) / count,
        ),
    )
