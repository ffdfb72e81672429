"""How fast connections of a long path may send together: laws of the rule, and what the kernel is told."""

import socket
import time
from collections import deque

import pytest

from gradwire.comms.bootstrap.kernel import TcpInfo
from gradwire.comms.transport.pacing import GAIN, REMEMBERED, SHORT_GAIN, Pacing, next_pace

SO_MAX_PACING_RATE = 47


def settled(link: float, reached: float, first: float, gain: float) -> tuple[float, int]:
    """The pace after so many messages that it does not change any more, and how many that took.

    Args:
        link: Bytes per second that the path carries.
        reached: Share of what they may send that connections manage.
        first: Rate of the first message, which is held to nothing.
        gain: Over the largest rate.
    """
    rates, pace = deque([first], maxlen=REMEMBERED), None
    for message in range(200):
        following = next_pace(pace, rates, gain)
        if following == pace:
            return following, message
        pace = following
        rates.append(min(link, reached * pace))
    return pace or 0.0, 200


@pytest.mark.parametrize("reached", [0.92, 0.96, 1.0])
@pytest.mark.parametrize("first", [0.001, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("gain", [GAIN, SHORT_GAIN])
def test_whatever_the_first_message_got_a_path_is_filled_and_not_flooded(
    gain: float, first: float, reached: float
) -> None:
    for link in (1e6, 12.5e6, 1.25e9):
        pace, messages = settled(link, reached, first * link, gain)
        assert link <= pace <= gain * link
        assert messages < 150


def test_a_path_that_carries_less_from_now_on_is_found_out() -> None:
    rates, pace = deque([12e6] * REMEMBERED, maxlen=REMEMBERED), GAIN * 12e6
    for _ in range(REMEMBERED):
        rates.append(min(3e6, pace))
        pace = next_pace(pace, rates)
    assert pace == pytest.approx(GAIN * 3e6)


def test_one_slow_message_slows_nothing() -> None:
    assert next_pace(13e6, [12e6, 1e6]) == pytest.approx(GAIN * 12e6)


def counted(trip_seconds: float) -> TcpInfo:
    """What the kernel says of a connection that has carried nothing."""
    return TcpInfo(0, 0, 0, 0, trip_seconds, 0, 0.0, 0.0, 0.0, 0, True)


class Path:
    """What the kernel would count of connections over a path, by hand.

    Args:
        count: Connections.
        trip_seconds: The shortest round trip.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, trip_seconds: float) -> None:
        self.sockets = [socket.socket() for _ in range(count)]
        self.counts = {each: counted(trip_seconds=trip_seconds) for each in self.sockets}
        monkeypatch.setattr(TcpInfo, "of", self.counts.__getitem__)

    def carry(self, nbytes: int, seconds: float, is_busy: bool = False) -> None:
        """Each connection has had so much acknowledged, and something under way for so long, or still has."""
        for each, was in self.counts.items():
            self.counts[each] = was._replace(
                unacknowledged=int(is_busy),
                acknowledged_nbytes=was.acknowledged_nbytes + nbytes,
                busy_seconds=was.busy_seconds + seconds,
            )

    def close(self) -> None:
        for each in self.sockets:
            each.close()


def test_what_was_handed_out_at_once_is_judged_when_the_next_message_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    path, held = Path(monkeypatch, 4, 0.08), Pacing()
    held.begin(path.sockets)
    held.end()  # all of it is in the kernel, and nothing has arrived
    assert held.pace is None
    path.carry(60_000, 0.38)  # of these a round trip until the first acknowledgement
    held.begin(path.sockets)
    assert held.pace == pytest.approx(SHORT_GAIN * 4 * 60_000 / 0.3)
    assert [each.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) for each in path.sockets] == [600_000] * 4
    path.close()


def test_who_has_nothing_of_a_short_message_makes_it_no_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three chunks one connection of four gets none: the others' rates are what they are."""
    path, held = Path(monkeypatch, 4, 0.08), Pacing()
    held.begin(path.sockets)
    held.end()
    path.carry(60_000, 0.38)
    idle = path.sockets[0]
    path.counts[idle] = counted(trip_seconds=0.08)
    held.begin(path.sockets)
    assert held.pace == pytest.approx(SHORT_GAIN * 3 * 60_000 / 0.3)
    path.close()


def test_the_parts_of_one_bucket_are_judged_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins while the one before it is under way, and takes less than two round trips."""
    path, held = Path(monkeypatch, 4, 0.08), Pacing()
    for _ in range(3):
        held.begin(path.sockets)
        held.end()
        path.carry(20_000, 0.12, is_busy=True)
    held.begin(path.sockets)
    assert held.pace == pytest.approx(SHORT_GAIN * 4 * 40_000 / 0.16)
    path.close()


def test_what_takes_less_than_some_round_trips_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    path, held = Path(monkeypatch, 4, 0.08), Pacing()
    for _ in range(3):
        held.begin(path.sockets)
        held.end()
        path.carry(10_000, 0.1)
    assert held.pace is None
    path.close()


def test_a_long_message_is_judged_once_when_it_has_been_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    path, held = Path(monkeypatch, 4, 0.08), Pacing()
    held.begin(path.sockets)
    path.carry(1_000_000, 1.08)
    held.end()
    assert held.pace == pytest.approx(GAIN * 4e6)
    path.carry(10_000, 1.0)  # what was still under way says nothing
    held.begin(path.sockets)
    assert held.pace == pytest.approx(GAIN * 4e6)
    path.close()


def test_the_kernel_holds_each_connection_to_its_share() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = [socket.create_connection(server.getsockname()) for _ in range(4)]
        theirs = [server.accept()[0] for _ in ours]
        held = Pacing()
        unlimited = [each.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) for each in ours]
        held.begin(ours)
        held.begin(ours[:1])  # the message is the same one
        held.end()
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
        info = TcpInfo.of(ours)
        # The kernel counts the connection's own first byte (RFC 4898: tcpEStatsAppHCThruOctetsAcked).
        assert info.unacknowledged == info.timeouts == 0 and info.acknowledged_nbytes in (12_345, 12_346)
        assert 0 < info.trip_seconds < 10 and info.busy_seconds < 10 and info.segments >= 1
        ours.close()
        theirs.close()


def test_the_kernel_counts_how_long_something_is_under_way() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs = server.accept()[0]
        before = TcpInfo.of(ours)
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:  # nobody reads: the last bytes cannot arrive
                ours.send(bytes(1 << 20))
        time.sleep(0.1)
        now = TcpInfo.of(ours)
        assert now.busy_seconds - before.busy_seconds > 0.05
        time.sleep(0.05)
        assert TcpInfo.of(ours).busy_seconds > now.busy_seconds
        ours.close()
        theirs.close()
