"""Law: what travels over many connections is what would have travelled over gloo's, bit for bit."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.communicator import _connections
from gradwire.comms.config import Config
from gradwire.comms.errors import PeerError
from gradwire.comms.links.distance import FIRST_WINDOW_NBYTES, connections_for
from gradwire.comms.plan.rank_plans import RankPlans
from gradwire.comms.transport import parallel_tcp, sum_order
from gradwire.comms.transport.parallel_tcp import (
    HEADER,
    LEAST_CHUNK_NBYTES,
    MOST_CHUNK_NBYTES,
    UNSEEN_RATE,
    StreamListener,
    Streams,
    chunk_nbytes,
)
from gradwire.comms.transport.torch_group import FAR_NBYTES, LARGE_NBYTES, OPENING_NBYTES, GlooTransport, connect_gloo
from gradwire.compressors.base import Work
from gradwire.topology.cluster import LEVEL_NAMES, Cluster, Level, Link
from support.threads import run_ranks

Pieces = Sequence[tuple[int, Tensor, Tensor]]
TIMEOUT = timedelta(seconds=60)
NUMEL = LARGE_NBYTES + 3
"""Large in every dtype, and of no round number of chunks."""


def on_transports(size: int, count: int, body: Callable[[GlooTransport], object]) -> list[object]:
    """What `body(transport)` returns on each rank, with so many connections between two."""
    store, met = HashStore(), threading.Barrier(size)

    def run(rank: int) -> object:
        transport = connect_gloo(store, rank, size, TIMEOUT, interface="lo", connections=lambda _: count)
        found = body(transport)
        met.wait(60)
        return found

    return run_ranks(size, run)


def contribution(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 100
    return drawn.to(dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32])
def test_sums_have_the_bits_of_gloos_ring(dtype: torch.dtype, size: int) -> None:
    """Several at a time, of more and of fewer elements than segments of the ring, waited for in another order."""
    scale = 1.0 if dtype == torch.int32 else 0.3

    def body(transport: GlooTransport) -> list[Tensor]:
        tensors = [contribution(10 * place + transport.rank, NUMEL + 7 * place, dtype) for place in range(3)]
        works = [transport.all_reduce(tensor, scale) for tensor in tensors]
        for work in reversed(works):
            work.wait()
            work.wait()  # again: it changes nothing
        return tensors

    ring, several = (on_transports(size, count, body) for count in (1, 7))
    for plain, striped in zip(ring, several, strict=True):
        assert isinstance(plain, list) and isinstance(striped, list)
        for one, other in zip(plain, striped, strict=True):
            assert one.view(torch.uint8).equal(other.view(torch.uint8))


def test_sums_of_three_ranks_travel_over_the_connections() -> None:
    def body(transport: GlooTransport) -> int:
        transport.all_reduce(contribution(transport.rank, 10)).wait()
        found = transport._streams_for(LARGE_NBYTES)
        assert found is not None
        sent: list[Tensor] = []
        real = found.exchange_twice

        def noted(first: Pieces, between: Callable[[], None], second: Pieces) -> Work:
            sent.extend(tensor for _, tensor, _ in (*first, *second))
            return real(first, between, second)

        found.exchange_twice = noted  # type: ignore[method-assign]
        transport.all_reduce(contribution(transport.rank, NUMEL)).wait()
        return sum(tensor.nbytes for tensor in sent)

    part = sum_order.ring_numel(NUMEL, 4, 3)
    own = [part, part, NUMEL - 2 * part]
    # A ring sends 2 (n - 1)/n of it; here each rank sends the others' parts, and its own sum to both.
    assert on_transports(3, 5, body) == [4 * (NUMEL - each + 2 * each) for each in own]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("numel", [FAR_NBYTES // 4 - 1, FAR_NBYTES // 4, OPENING_NBYTES // 4 + 3, 40_001])
def test_small_messages_have_the_same_bits_over_the_connections_of_a_long_path(numel: int, size: int) -> None:
    def body(transport: GlooTransport) -> list[Tensor]:
        transport.all_reduce(torch.zeros(OPENING_NBYTES // 4)).wait()  # looks at the path
        own = contribution(transport.rank, numel)
        summed, gathered, exchanged = own.clone(), own.new_empty(size * numel), own.new_empty(size * numel)
        splits = [numel] * size
        for work in (
            transport.all_reduce(summed, 0.3),
            transport.all_gather(gathered, own),
            transport.exchange(exchanged, own.repeat(size), splits, splits, own.nbytes),
        ):
            work.wait()
        return [summed, gathered, exchanged]

    by_gloo, by_own = (on_transports(size, count, body) for count in (1, 7))
    for plain, striped in zip(by_gloo, by_own, strict=True):
        assert isinstance(plain, list) and isinstance(striped, list)
        for one, other in zip(plain, striped, strict=True):
            assert one.view(torch.uint8).equal(other.view(torch.uint8))


@pytest.mark.parametrize(("nbytes", "travels"), [(FAR_NBYTES - 4, False), (FAR_NBYTES, True), (LARGE_NBYTES, True)])
def test_which_messages_travel_over_the_connections(nbytes: int, travels: bool) -> None:
    def body(transport: GlooTransport) -> bool:
        transport.all_reduce(torch.zeros(nbytes // 4)).wait()
        seldom = nbytes < OPENING_NBYTES and transport._streams is None
        transport.all_reduce(torch.zeros(OPENING_NBYTES // 4)).wait()
        found = transport._streams
        assert found is not None and seldom == (nbytes < OPENING_NBYTES)
        before = sum(peer.numbered for peer in found._peers.values())
        transport.all_reduce(torch.zeros(nbytes // 4)).wait()
        return sum(peer.numbered for peer in found._peers.values()) > before

    assert on_transports(2, 5, body) == [travels] * 2


def test_a_first_window_holds_each_connections_part_of_a_small_message() -> None:
    """Else it takes a round trip more."""
    for connections in (2, 18, 64):
        for nbytes in (connections * 1000, connections * 8_000, connections * 12_000):
            chunks, left = [0] * connections, nbytes
            for place in range(10**6):
                if left <= 0:
                    break
                size = min(left, chunk_nbytes(left, connections)) + HEADER.size
                chunks[place % connections] += size
                left -= size - HEADER.size
            assert max(chunks) <= FIRST_WINDOW_NBYTES


def test_where_gloos_order_is_another_its_ring_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank that sees another order is enough."""
    real = sum_order.adds_as_ring
    monkeypatch.setattr(sum_order, "adds_as_ring", lambda rail, *given: real(rail, *given) and rail.rank != 1)

    def body(transport: GlooTransport) -> bool:
        transport.all_reduce(contribution(transport.rank, NUMEL)).wait()
        return transport._streams is not None and not transport._adds_as_ring

    assert on_transports(3, 2, body) == [True] * 3


def test_what_fails_between_two_exchanges_ends_them_by_its_words() -> None:
    own, theirs = pairs(2)
    mine, other = Streams({1: own}, TIMEOUT, None), Streams({0: theirs}, TIMEOUT, None)
    first, second = contribution(0, NUMEL), contribution(1, NUMEL)

    def fail() -> None:
        raise ValueError("of no use")

    work = mine.exchange_twice([(1, first, torch.empty_like(first))], fail, [(1, first, second)])
    peers = other.exchange_twice([(0, second, torch.empty_like(second))], lambda: None, [(0, second, first)])
    with pytest.raises(RuntimeError, match="the bytes that arrived cannot be processed: of no use"):
        work.wait()
    with pytest.raises(RuntimeError, match=r"rank 0 of the group has ended|a connection to another rank was lost"):
        peers.wait()
    other.close()


@pytest.mark.parametrize("call", ["_move", "_take_up", "_watch", "_serve", "_send", "_load"])
def test_a_thread_that_fails_ends_every_wait_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def full(*_: object) -> None:
        raise MemoryError("no room for a header")

    monkeypatch.setattr(Streams, call, full)
    own, theirs = pairs(2)
    mine = Streams({1: own}, TIMEOUT, None)
    tensor = contribution(0, NUMEL)
    with pytest.raises(RuntimeError, match=r"thread of the connections .*MemoryError: no room for a header"):
        mine.exchange([(1, tensor, torch.empty_like(tensor))]).wait()
    assert "'gradwire streams' has failed (MemoryError" in caplog.text
    for each in theirs:
        each.close()


def test_a_caller_never_waits_for_the_thread_to_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may be busy with a sum, or wait for Python's lock, while others wake it again and again."""
    busy, nudged = threading.Event(), threading.Event()
    monkeypatch.setattr(Streams, "_take_up", lambda streams: busy.wait(60))
    own, theirs = pairs(1)
    mine = Streams({1: own}, TIMEOUT, None)

    def nudge() -> None:
        for _ in range(10_000):  # the kernel holds some hundred bytes that were sent one by one
            mine._nudge()
        nudged.set()

    threading.Thread(target=nudge, daemon=True).start()
    try:
        assert nudged.wait(20)
    finally:
        busy.set()
        mine.close()
        theirs[0].close()


def test_behind_a_drain_nothing_more_is_received() -> None:
    """Elastic training restores gradients in place once a lane has left its wait; the thread must not write there."""
    own, theirs = pairs(1)
    mine = Streams({1: own}, TIMEOUT, None)
    received = torch.full((1024,), 5.0)
    mine.exchange([(1, torch.ones(1024), received)])
    theirs[0].sendall(HEADER.pack(0, 0, received.nbytes) + bytes(received.nbytes // 2))
    deadline = time.monotonic() + 20
    while received[0] != 0:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    theirs[0].sendall(bytes(received.nbytes // 4))
    assert mine.drain(20)
    assert mine.by_descriptor and all(each.socket.fileno() == -1 for each in mine._connections)
    received.fill_(7.0)
    with suppress(OSError):
        theirs[0].sendall(bytes(received.nbytes // 4))
    assert bool((received == 7.0).all())
    theirs[0].close()


def test_chunks_shrink_as_less_is_left() -> None:
    for connections in (1, 4, 64):
        left, sizes = 16 << 20, list[int]()
        while left > 0:
            sizes.append(chunk_nbytes(left, connections))
            left -= sizes[-1]
        assert sizes == sorted(sizes, reverse=True)
        assert {LEAST_CHUNK_NBYTES} <= set(sizes) <= {LEAST_CHUNK_NBYTES << power for power in range(8)}
        assert sizes[0] == (MOST_CHUNK_NBYTES if connections < 64 else MOST_CHUNK_NBYTES // 2)
        # What one connection may have in hand at the end is a small part of what all of them have carried.
        assert all(size == LEAST_CHUNK_NBYTES for size in sizes[-2 * connections :])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_exchanges_are_the_same_over_any_number_of_connections(size: int) -> None:
    def body(transport: GlooTransport) -> list[Tensor]:
        source = contribution(transport.rank, size * NUMEL)
        output = torch.empty_like(source)
        gathered = torch.empty(size * NUMEL)
        bounds = [0, *(NUMEL * (place + 1) + 5 * place for place in range(size))]
        tensor = contribution(transport.rank + 10, bounds[-1])
        # All are under way together, and are waited for in another order.
        works = [
            transport.all_to_all(output, source),
            transport.all_gather(gathered, source[:NUMEL].clone()),
            transport.reduce_scatter(tensor, bounds),
        ]
        for work in reversed(works):
            work.wait()
        return [output, gathered, tensor[bounds[transport.rank] : bounds[transport.rank + 1]]]

    for plain, striped in zip(on_transports(size, 1, body), on_transports(size, 3, body), strict=True):
        assert isinstance(plain, list) and isinstance(striped, list)
        assert all(one.equal(other) for one, other in zip(plain, striped, strict=True))


def test_ranks_agree_on_the_largest_number_that_any_wants() -> None:
    store = HashStore()

    def run(rank: int) -> int | None:
        transport = connect_gloo(store, rank, 2, TIMEOUT, interface="lo", connections=lambda _: 1 + 4 * rank)
        tensor = contribution(rank, NUMEL)
        transport.all_reduce(tensor).wait()
        found = transport._streams
        return found.count if found else None

    assert run_ranks(2, run) == [5, 5]


def test_their_number_goes_by_the_rate_that_was_seen() -> None:
    """A look at the links changes what is predicted and not what plans are chosen by; connections change no bit."""
    unseen = Link(1e-4, 1.25e9, presumed=True)
    cluster = Cluster(((0,), (1,)), (Level(LEVEL_NAMES[0], unseen), Level(LEVEL_NAMES[1], unseen)))
    rank_plans = RankPlans(cluster, 0, "cpu", Config(), None)
    choose = _connections(Config(), rank_plans)
    assert choose is not None
    assert choose(0.02) == connections_for(0.02, UNSEEN_RATE)
    seen = replace(unseen, bytes_per_second=14e6, presumed=False)
    rank_plans.learned((cluster.levels[0], Level(LEVEL_NAMES[1], seen)), at_start=True)
    assert choose(0.02) == connections_for(0.02, 14e6) < connections_for(0.02, UNSEEN_RATE)


@pytest.mark.parametrize("count", [1, 0])
def test_one_connection_is_gloos_own(count: int) -> None:
    def body(transport: GlooTransport) -> bool:
        transport.all_reduce(contribution(transport.rank, NUMEL)).wait()
        return transport._streams is None

    assert on_transports(2, count, body) == [True, True]


def test_small_messages_open_nothing() -> None:
    def body(transport: GlooTransport) -> bool:
        transport.all_reduce(contribution(transport.rank, 1000)).wait()
        return transport._streams is None

    assert on_transports(2, 5, body) == [True, True]


def pairs(count: int) -> tuple[list[socket.socket], list[socket.socket]]:
    """Two ends of so many connections."""
    ends = []
    with socket.create_server(("127.0.0.1", 0), backlog=count) as server:
        for _ in range(count):
            connecting = socket.create_connection(server.getsockname())
            ends.append((connecting, server.accept()[0]))
    return [one for one, _ in ends], [other for _, other in ends]


def test_a_rank_that_has_ended_is_named_at_once() -> None:
    own, theirs = pairs(4)
    mine = Streams({3: own}, TIMEOUT, None)
    tensor = contribution(0, NUMEL)
    work = mine.exchange([(3, tensor, torch.empty_like(tensor))])
    for each in theirs:
        each.close()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 3 of the group has ended|a connection to another rank was lost"):
        work.wait()
    assert time.monotonic() - began < TIMEOUT.total_seconds() / 2
    with pytest.raises(RuntimeError):
        mine.exchange([(3, tensor, torch.empty_like(tensor))])
    mine.close()


def test_a_rank_may_leave_once_it_has_all_and_has_sent_all() -> None:
    """Its connections end in any order, before what it sent over others of them is read."""
    own, theirs = pairs(6)
    first, second = contribution(0, 20 * LEAST_CHUNK_NBYTES), contribution(1, 20 * LEAST_CHUNK_NBYTES)
    taken = torch.empty_like(second), torch.empty_like(first)
    mine, other = Streams({1: own}, TIMEOUT, None), Streams({0: theirs}, TIMEOUT, None)
    work = mine.exchange([(1, first, taken[0])])
    other.exchange([(0, second, taken[1])]).wait()
    other.close()
    work.wait()
    assert taken[0].equal(second) and taken[1].equal(first)
    mine.close()


def test_an_alarm_ends_a_wait() -> None:
    own, theirs = pairs(2)
    mine = Streams({1: own}, TIMEOUT, lambda: "rank 5 has run out of memory")
    tensor = contribution(0, NUMEL)
    with pytest.raises(PeerError, match="rank 5 has run out of memory"):
        mine.exchange([(1, tensor, torch.empty_like(tensor))]).wait()
    mine.close()
    for each in theirs:
        each.close()


def test_a_time_out_ends_a_wait() -> None:
    own, theirs = pairs(2)
    mine = Streams({1: own}, timedelta(seconds=0.5), None)
    tensor = contribution(0, NUMEL)
    with pytest.raises(RuntimeError, match="Timed out"):
        mine.exchange([(1, tensor, torch.empty_like(tensor))]).wait()
    mine.close()
    for each in theirs:
        each.close()


def test_more_than_was_asked_for_is_refused_and_not_written() -> None:
    own, theirs = pairs(1)
    mine = Streams({1: own}, TIMEOUT, None)
    room = torch.zeros(100, dtype=torch.uint8)
    work = mine.exchange([(1, room[:0], room[:50])])
    theirs[0].sendall(struct.pack("!QQQ", 0, 40, 20) + bytes([7]) * 20)
    with pytest.raises(RuntimeError, match="sends more than the 50 bytes asked for"):
        work.wait()
    assert not room.any()
    mine.close()
    theirs[0].close()


def test_an_address_that_cannot_be_reached_at_all_is_named() -> None:
    with pytest.raises(OSError, match=r"cannot connect to rank at 255\.255\.255\.255: "):
        parallel_tcp.connect(socket.AF_INET, "255.255.255.255", 9, 0, 0, 1, time.monotonic() + 30, None)


def test_who_came_is_let_go_where_others_do_not_come() -> None:
    listener = StreamListener(socket.AF_INET, "127.0.0.1", 8)
    deadline = time.monotonic() + 30
    asking = (socket.AF_INET, "127.0.0.1", listener.port, listener.token, 1, 1, deadline, None)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(parallel_tcp.connect, *asking)
        with pytest.raises(RuntimeError, match="did not open its connections") as caught:
            listener.accept({1: 2}, time.monotonic() + 2.0, None)
        (early,) = calling.result()
    early.settimeout(30)
    assert early.recv(1) == b"", f"still open behind {caught.value}"
    early.close()
    listener.close()


def test_strangers_are_not_let_in() -> None:
    listener = StreamListener(socket.AF_INET, "127.0.0.1", 8)
    place = ("127.0.0.1", listener.port)
    stranger = socket.create_connection(place)
    stranger.sendall(struct.pack("!I32s", 1, bytes(32)))
    deadline = time.monotonic() + 30
    asking = (socket.AF_INET, *place, listener.token, 1, 2, deadline, None)
    knocking = threading.Thread(target=parallel_tcp.connect, args=asking)
    knocking.start()
    found = listener.accept({1: 2}, deadline, None)
    knocking.join()
    assert len(found[1]) == 2
    assert len(stranger.recv(16)) == 16 and stranger.recv(1) == b""
    for each in (*found[1], stranger):
        each.close()
    listener.close()


@pytest.mark.parametrize("wrong", [-1, 257])
def test_a_number_that_makes_no_sense_is_refused_by_name(wrong: int) -> None:
    with pytest.raises(ValueError, match=f"`transport` is 'gloo:{wrong}'; wanted auto or gloo with 1 to 256"):
        Config(transport=f"gloo:{wrong}")
