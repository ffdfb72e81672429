"""This module limits the rate of many connections on a long path to slightly more than the path was seen to carry.

Without a limit each connection tries to send faster, and they fill the queues before the path, in both directions.
Acknowledgements then wait in a queue with data and arrive in bunches, so data is sent in bunches, too, and one queue
overflows while the other one is empty. Over 80 ms and 0.1 % loss, 64 connections got 0.71 of a link of 100 Mbit/s
without a limit, 0.94 if all together were limited to the link's rate, 0.92 at 1.1 times and 0.83 at twice that rate.

The rate of a path is measured as the bytes that are acknowledged while a message is handed out to the connections,
divided by the seconds in which they had bytes in flight. If a message is handed out within a few round trips, the
measurement goes on until the next message. The result is at most the path's rate, and less if windows had to grow first
or a processor was late. So the largest of several results counts, and the limit is somewhat above it.

Source: Zhang, Shenker, Clark, "Observations on the dynamics of a congestion control algorithm: the effects of two-way
traffic", SIGCOMM 1991; Aggarwal, Savage, Anderson, "Understanding the performance of TCP pacing", INFOCOM 2000.
"""

import socket
from collections import deque
from collections.abc import Sequence

from gradwire.comms.bootstrap.kernel import TcpInfo, pace
from gradwire.comms.links.distance import LEAST_ROUND_TRIP_SECONDS

GAIN = 1.15
"""Limit as a multiple of the largest measured rate."""

SHORT_GAIN = 3.0
"""Limit as a multiple of the largest measured rate if messages are handed out within a few round trips: windows still
grow, so the path carries more than was measured. With 1.15, 1.5, 2 and 3 a sum of 4 MB over 150 ms and 100 Mbit/s took
0.62, 0.65, 0.63 and 0.51 s, without a limit 0.56; of 1 MB over 20 ms 0.14, 0.12, 0.14 and 0.14 s (2026-11-24)."""

LIMITED, GROWTH = 0.9, 1.5
"""Share of the limit from which a rate shows that the limit was too low, and the factor by which it is then raised."""

REMEMBERED = 8
"""Number of last messages whose rates count."""

LEAST_TRIPS = 2.0
"""Shortest duration of a message, in round trips, for its rate to count."""


def next_pace(pace: float | None, rates: Sequence[float], gain: float = GAIN) -> float:
    """Returns the limit for all connections together, in bytes per second.

    It is `gain` times the largest rate; `GROWTH` times the last limit if the latest rate came near that (`LIMITED`).

    Args:
        pace: Limit during the last message, in bytes per second; None if there was none.
        rates: Measured rates of messages in bytes per second, the latest one last; not empty.
        gain: Ratio of the limit to the largest rate.
    """
    if pace is not None and rates[-1] > LIMITED * pace:
        return GROWTH * pace
    return gain * max(rates)


class Pacing:
    """Limits the total rate of connections that send together, by the rates of their last messages.

    Attributes:
        pace: Limit of all connections together in bytes per second; None until a rate is measured.
    """

    def __init__(self) -> None:
        self.pace: float | None = None
        self._rates: deque[float] = deque(maxlen=REMEMBERED)
        self._is_handing_out = False
        self._began: list[tuple[socket.socket, TcpInfo]] = []
        """Each connection with its counters at the start of the message that is being measured."""
        self._held: dict[int, int] = {}
        """Descriptor -> limit in bytes per second that the kernel was last given."""

    def begin(self, sockets: Sequence[socket.socket]) -> None:
        """Starts to measure the rate of a message, and sets the limit of its connections.

        Called each time that connections get bytes to send; calls before `end` belong to the same message and do
        nothing.

        Args:
            sockets: Sockets of the connections that send, which share the limit equally.
        """
        if self._is_handing_out:
            return
        self._is_handing_out = True
        self._learn(SHORT_GAIN)  # if the last message was handed out too fast, its measurement ends here
        self._hold(sockets)
        counts = [(each, TcpInfo.of(each)) for each in sockets]
        goes_on = [each for each, _ in self._began] == list(sockets) and any(now.unacknowledged for _, now in counts)
        if not goes_on:  # parts of one bucket follow each other and are measured together
            self._began = counts

    def end(self) -> None:
        """Ends the message, because all of it has been handed out to connections, and updates the limit."""
        if self._is_handing_out:
            self._is_handing_out = False
            self._learn(GAIN)

    def _learn(self, gain: float) -> None:
        """Measures the rate of the last message, unless it was too short, and updates the limit.

        Args:
            gain: Ratio of the limit to the largest rate.
        """
        counted = [(before, TcpInfo.of(connection)) for connection, before in self._began]
        trip = max((now.trip_seconds for _, now in counted), default=0.0)
        longest = max((now.busy_seconds - before.busy_seconds for before, now in counted), default=0.0)
        if trip < LEAST_ROUND_TRIP_SECONDS or longest < LEAST_TRIPS * trip:
            return
        self._began = []
        # In the first round trip nothing can be acknowledged, unless bytes were in flight before.
        rate = sum(
            (now.acknowledged_nbytes - before.acknowledged_nbytes)
            / (
                max(now.busy_seconds - before.busy_seconds, LEAST_TRIPS * trip)
                - (0.0 if before.unacknowledged else trip)
            )
            for before, now in counted
        )
        if rate > 0:
            self._rates.append(rate)
            self.pace = next_pace(self.pace, self._rates, gain)

    def _hold(self, sockets: Sequence[socket.socket]) -> None:
        """Sets the limit of each connection in the kernel, if it has changed."""
        if self.pace is None or not sockets:
            return
        each = round(self.pace / len(sockets))
        for connection in sockets:
            descriptor = connection.fileno()
            if self._held.get(descriptor) != each:
                pace(connection, each)
                self._held[descriptor] = each
