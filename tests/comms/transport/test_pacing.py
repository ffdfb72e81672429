"""How fast connections of a long path may send together: laws of the rule, and what the kernel is told."""

import socket
import struct
from collections import deque

import pytest

from gradwire.comms.transport import pacing
from gradwire.comms.transport.pacing import GAIN, REMEMBERED, Pacing, next_pace

SO_MAX_PACING_RATE = 47


def settled(link: float, reached: float, first: float) -> tuple[float, int]:
    """The pace after so many messages that it does not change any more, and how many that took.

    Args:
        link: Bytes per second that the path carries.
        reached: Share of what they may send that connections manage.
        first: Rate of the first message, which is held to nothing.
    """
    rates, pace = deque([first], maxlen=REMEMBERED), None
    for message in range(200):
        following = next_pace(pace, rates)
        if following == pace:
            return following, message
        pace = following
        rates.append(min(link, reached * pace))
    return pace or 0.0, 200


@pytest.mark.parametrize("reached", [0.92, 0.96, 1.0])
@pytest.mark.parametrize("first", [0.001, 0.1, 0.7, 1.0])
def test_whatever_the_first_message_got_a_path_is_filled_and_not_flooded(first: float, reached: float) -> None:
    for link in (1e6, 12.5e6, 1.25e9):
        pace, messages = settled(link, reached, first * link)
        assert link <= pace <= GAIN * link
        assert messages < 150


def test_a_path_that_carries_less_from_now_on_is_found_out() -> None:
    rates, pace = deque([12e6] * REMEMBERED, maxlen=REMEMBERED), GAIN * 12e6
    for _ in range(REMEMBERED):
        rates.append(min(3e6, pace))
        pace = next_pace(pace, rates)
    assert pace == pytest.approx(GAIN * 3e6)


def test_one_slow_message_slows_nothing() -> None:
    assert next_pace(13e6, [12e6, 1e6]) == pytest.approx(GAIN * 12e6)


def test_the_kernel_holds_each_connection_to_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = [socket.create_connection(server.getsockname()) for _ in range(4)]
        theirs = [server.accept()[0] for _ in ours]
        held = Pacing()
        monkeypatch.setattr(pacing, "LEAST_ROUND_TRIP_SECONDS", 0.0)
        unlimited = [each.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) for each in ours]
        held.begin(ours)
        held.begin(ours[:1])  # the message is the same one
        for each, other in zip(ours, theirs, strict=True):
            each.sendall(bytes(10_000))
            other.recv(10_000, socket.MSG_WAITALL)
        held.end()
        assert held.pace is not None and held.pace > 0
        assert [each.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) for each in ours] == unlimited
        held.pace = 4e6
        held.begin(ours)
        assert [each.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) for each in ours] == [1_000_000] * 4
        for each in (*ours, *theirs):
            each.close()


def test_short_paths_are_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs = server.accept()[0]
        held = Pacing()
        for _ in range(3):
            held.begin([ours])
            ours.sendall(bytes(10_000))
            theirs.recv(10_000, socket.MSG_WAITALL)
            held.end()
        assert held.pace is None
        ours.close()
        theirs.close()


def test_what_the_kernel_counts_stands_where_it_is_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs = server.accept()[0]
        ours.sendall(bytes(12_345))
        theirs.recv(12_345, socket.MSG_WAITALL)
        theirs.sendall(b"!")  # carries the acknowledgement
        ours.recv(1)
        facts = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, pacing._TCP_INFO.size)
        segments, acknowledged, trip = pacing._TCP_INFO.unpack(facts)
        # The kernel counts the connection's own first byte (RFC 4898: tcpEStatsAppHCThruOctetsAcked).
        assert segments == 0 and acknowledged in (12_345, 12_346) and 0 < trip < 10_000_000
        assert len(struct.pack("=I", 2**32 - 1)) == 4
        ours.close()
        theirs.close()
