"""How fast many connections together may send over a long path: hardly faster than it has been seen to carry.

Connections that each try for more fill the queues before the path, in both directions. Acknowledgements then wait
behind data and come in bunches, what they set free is sent in bunches, and of two queues one is full, and drops, while
the other one is empty: over 80 ms and 0.1 % loss 64 connections got 0.71 of a link of 100 Mbit/s. With all of them
together held to its rate they got 0.94, to 1.1 times that 0.92, to twice 0.83.

What the path carries is what has been acknowledged while a message was handed out, or, where it was handed out within
less than some round trips, until the next one begins, by the seconds in which connections had something under way. That
is at most the path's rate, and less where the connections had to grow first or a processor came late, so it is the
largest of some messages that counts, with some more to find out whether there is more.

Source: Zhang, Shenker, Clark, "Observations on the dynamics of a congestion control algorithm: the effects of two-way
traffic", SIGCOMM 1991; Aggarwal, Savage, Anderson, "Understanding the performance of TCP pacing", INFOCOM 2000.
"""

import socket
from collections import deque
from collections.abc import Sequence

from gradwire.comms.bootstrap.kernel import TcpInfo, pace
from gradwire.comms.links.distance import LEAST_ROUND_TRIP_SECONDS

GAIN = 1.15
"""The factor over the largest rate seen."""

SHORT_GAIN = 3.0
"""The factor where messages are handed out within some round trips: their windows are still growing, so that the path
carries more than they show. With 1.15, 1.5, 2 and 3 a sum of 4 MB over 150 ms and 100 Mbit/s took 0.62, 0.65, 0.63 and
0.51 s, held to nothing 0.56; of 1 MB over 20 ms 0.14, 0.12, 0.14 and 0.14 s (2026-11-24)."""

LIMITED, GROWTH = 0.9, 1.5
"""What carried this share of what it was held to was held back by that alone, and is held to so much more."""

REMEMBERED = 8
"""Messages whose rates count."""

LEAST_TRIPS = 2.0
"""Round trips that a message has to take before its rate is believed."""


def next_pace(pace: float | None, rates: Sequence[float], gain: float = GAIN) -> float:
    """Bytes per second to hold all connections to.

    Args:
        pace: What they were held to in the last message; None for nothing.
        rates: That messages have had, the last one at the end; not empty.
        gain: The factor over them.
    """
    if pace is not None and rates[-1] > LIMITED * pace:
        return GROWTH * pace
    return gain * max(rates)


class Pacing:
    """Holds connections that send together to the rate that they have had together."""

    def __init__(self) -> None:
        self.pace: float | None = None
        """Bytes per second of all together; None while nothing is known."""
        self._rates: deque[float] = deque(maxlen=REMEMBERED)
        self._is_handing_out = False
        self._began: list[tuple[socket.socket, TcpInfo]] = []
        """Each connection and its counts, as the message began whose rate is not known yet."""
        self._held: dict[int, int] = {}
        """Descriptor -> bytes per second, as the kernel was last told."""

    def begin(self, sockets: Sequence[socket.socket]) -> None:
        """There is something to hand out to these connections, where there was nothing."""
        if self._is_handing_out:
            return
        self._is_handing_out = True
        self._learn(SHORT_GAIN)  # the last message may have been handed out at once
        self._hold(sockets)
        counts = [(each, TcpInfo.of(each)) for each in sockets]
        goes_on = [each for each, _ in self._began] == list(sockets) and any(now.unacknowledged for _, now in counts)
        if not goes_on:  # else the parts of one bucket follow each other, each too short to be judged
            self._began = counts

    def end(self) -> None:
        """All has been handed out."""
        if self._is_handing_out:
            self._is_handing_out = False
            self._learn(GAIN)

    def _learn(self, gain: float) -> None:
        """Takes in the rate of the message that began last, if it has been under way for long enough."""
        counted = [(before, TcpInfo.of(connection)) for connection, before in self._began]
        trip = max((now.trip_seconds for _, now in counted), default=0.0)
        longest = max((now.busy_seconds - before.busy_seconds for before, now in counted), default=0.0)
        if trip < LEAST_ROUND_TRIP_SECONDS or longest < LEAST_TRIPS * trip:
            return
        self._began = []
        # Nothing can have been acknowledged within the first round trip, unless something was on its way.
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
        """Tells the kernel, where that is something new."""
        if self.pace is None or not sockets:
            return
        each = round(self.pace / len(sockets))
        for connection in sockets:
            descriptor = connection.fileno()
            if self._held.get(descriptor) != each:
                pace(connection, each)
                self._held[descriptor] = each
