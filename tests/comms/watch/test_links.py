"""Laws of slow links: the one that all wait for is named, whoever is late, and nobody where all are alike."""

import os
import random
import socket
import threading

import pytest

from gradwire.comms.watch.links import SLICE_SECONDS, SLICES, LinkState, LinkWatch, connection_states, slow_links

HOSTS = ("a", "b", "c", "d")
RATE = 1e7


def sent(nbytes: float, rate: float, chance: random.Random | None = None) -> LinkState:
    noise = 1.0 if chance is None else chance.uniform(0.8, 1.2)
    return LinkState(noise * nbytes / rate, int(nbytes), int(nbytes / 1448), 0)


def ring(slow: dict[tuple[str, str], float], nbytes: float, chance: random.Random) -> dict[tuple[str, str], LinkState]:
    pairs = list(zip(HOSTS, (*HOSTS[1:], HOSTS[0]), strict=True))
    return {pair: sent(nbytes, RATE / slow.get(pair, 1.0), chance) for pair in pairs}


@pytest.mark.parametrize("seed", range(20))
def test_the_slow_link_or_the_host_of_all_slow_ones_is_named_and_none_of_like_ones(seed: int) -> None:
    chance = random.Random(seed)
    times = chance.uniform(3.5, 10)
    nbytes, seconds = 1e7, 1e7 * times / RATE
    assert slow_links(ring({}, nbytes, chance), seconds) == {}
    assert list(slow_links(ring({("a", "b"): times}, nbytes, chance), seconds)) == ["from a to b"]
    of_host = slow_links(ring({("a", "b"): times, ("b", "c"): times}, nbytes, chance), seconds)
    assert list(of_host) == ["of b"]
    all_but_one = {("a", "b"): times, ("b", "c"): times, ("c", "d"): times}
    assert slow_links(ring(all_but_one, nbytes, chance), seconds) == {}, "one that is faster makes the others not slow"


def test_a_link_that_carries_less_or_is_seldom_used_is_not_compared() -> None:
    pairs = {("a", "b"): sent(1e7, RATE), ("b", "a"): sent(4e6, RATE / 9)}
    assert slow_links(pairs, 4.0) == {}
    assert slow_links({("a", "b"): sent(1e7, RATE), ("b", "a"): sent(1e7, RATE / 9)}, 1000.0) == {}
    assert slow_links({("a", "b"): sent(1e5, RATE), ("b", "a"): sent(1e5, RATE / 9)}, 0.1) == {}
    assert list(slow_links({("a", "b"): sent(1e7, RATE), ("b", "a"): sent(1e7, RATE / 9)}, 9.0)) == ["from b to a"]


def words(states: dict[str, LinkState]) -> dict[int, dict[str, LinkState]]:
    return {0: {"10.0.0.1>10.0.0.2": states["ab"]}, 1: {"10.0.0.2>10.0.0.1": states["ba"]}}


def test_a_link_is_named_after_some_slices_and_no_longer_once_it_is_mended() -> None:
    watch, hosts = LinkWatch(), {0: "a", 1: "b"}
    ab = ba = LinkState()
    named = []
    for number in range(2 * SLICES + 4):
        slow = 5.0 if number < SLICES + 1 else 1.0
        watch.receive(words({"ab": ab, "ba": ba}), hosts, SLICE_SECONDS * number)
        named.append(list(watch.slow()))
        ba = LinkState(ba.busy_seconds + slow * 1e7 / RATE, ba.nbytes + 10**7)
        ab = LinkState(1e7 / RATE * (number + 1), 10**7 * (number + 1))
    assert named[SLICES - 1] == [] and named[SLICES] == ["from b to a"] and named[-1] == []
    said = watch.summaries()
    assert [(each.source, each.target) for each in said] == [("a", "b"), ("b", "a")]
    assert "link from a to b: 80 Mbit/s while it sends" in said[0].in_words(60.0)


def test_what_a_kernel_counts_is_read_from_this_processs_own_connections() -> None:
    """Two addresses of the loopback stand for two hosts; what one end sent the other has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname(), source_address=("127.0.0.2", 0))
        receiver, _ = server.accept()
        took = bytearray()

        def take() -> None:
            while chunk := receiver.recv(1 << 16):
                took.extend(chunk)

        taker = threading.Thread(target=take)
        taker.start()
        sender.sendall(bytes(3 << 20))
        sender.shutdown(socket.SHUT_WR)
        taker.join()
        before = [os.get_blocking(each.fileno()) for each in (sender, receiver, server)]
        socket.setdefaulttimeout(5.0)
        try:
            found = connection_states()
        finally:
            socket.setdefaulttimeout(None)
        assert [os.get_blocking(each.fileno()) for each in (sender, receiver, server)] == before == [True] * 3
        sender.close()
        receiver.close()
    if not found:
        pytest.skip("this kernel does not count for how long a connection is busy (Linux 5.4)")
    state = found["127.0.0.2>127.0.0.1"]
    assert len(took) == 3 << 20
    assert (3 << 20) - (64 << 10) <= state.nbytes <= (3 << 20) + 2 and state.segments > 0  # SYN and FIN count
    assert found["127.0.0.1>127.0.0.2"].nbytes == 0
    assert "127.0.0.2>127.0.0.1" not in connection_states(), "what is closed is gone"
