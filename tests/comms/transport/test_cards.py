"""Law: no bit depends on which network card carried what, or on one that fails."""

import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import cast

import pytest
import torch
from torch import Tensor

from gradwire.comms.bootstrap import cards as host_cards
from gradwire.comms.bootstrap.cards import Cards
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.transport import cards as card_streams
from gradwire.comms.transport.cards import CardStreams
from gradwire.comms.transport.streams import Line
from gradwire.comms.transport.torch_group import LARGE_NBYTES, GlooTransport, connect_gloo
from support.threads import run_ranks

TIMEOUT = timedelta(seconds=60)
NUMEL = LARGE_NBYTES + 3
"""Large in every dtype, and of no round number of chunks."""


def cards_of(rank: int, size: int, number: int) -> Cards:
    """So many cards: addresses of the loopback, each in a network of its own, of each rank another one."""
    addresses = {other: tuple(f"127.{card + 1}.0.{other + 1}" for card in range(number)) for other in range(size)}
    return Cards(["lo"] * number, addresses, rank)


def on_cards(
    size: int,
    number: int,
    body: Callable[[GlooTransport], object],
    *,
    count: int = 1,
    cards: Callable[[int], Cards] | None = None,
) -> list[object]:
    """What `body(transport)` returns on each rank, with so many cards, and connections over each of them."""
    store, met = HashStore(), threading.Barrier(size)

    def run(rank: int) -> object:
        own = cards(rank) if cards is not None else cards_of(rank, size, number)
        rail = None if number == 1 else own.rail(range(size), rank)
        transport = connect_gloo(
            store, rank, size, TIMEOUT, interface="lo", connections=(lambda _: count) if rail else None, rail=rail
        )
        try:
            return body(transport)
        finally:
            met.wait(60)

    return run_ranks(size, run)


def contribution(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 100
    return drawn.to(dtype)


def everything(transport: GlooTransport) -> list[Tensor]:
    """Every collective that plans issue, several at a time, waited for in another order."""
    rank, size = transport.rank, transport.size
    sums = [contribution(10 * place + rank, NUMEL + 7 * place) for place in range(3)]
    source = contribution(rank, size * NUMEL)
    output, gathered = torch.empty_like(source), torch.empty(size * NUMEL)
    bounds = [0, *(NUMEL * (place + 1) + 5 * place for place in range(size))]
    scattered = contribution(rank + 10, bounds[-1])
    narrow = contribution(rank + 20, NUMEL, torch.bfloat16)
    works = [transport.all_reduce(tensor, 0.3) for tensor in sums]
    works.append(transport.all_to_all(output, source))
    works.append(transport.all_gather(gathered, source[:NUMEL].clone()))
    works.append(transport.reduce_scatter(scattered, bounds, 0.5))
    works.append(transport.all_reduce(narrow))
    for work in reversed(works):
        work.wait()
    transport.all_gather_slices(scattered, bounds).wait()
    return [*sums, output, gathered, scattered, narrow]


def bits(tensors: object) -> list[bytes]:
    assert isinstance(tensors, list)
    return [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_number_of_cards_gives_the_bits_of_one(size: int, number: int, count: int) -> None:
    def body(transport: GlooTransport) -> list[Tensor]:
        found = everything(transport)
        assert isinstance(transport._streams, CardStreams)
        return found

    alone, several = on_cards(size, 1, everything), on_cards(size, number, body, count=count)
    for one, other in zip(alone, several, strict=True):
        assert bits(one) == bits(other)


LINKS = ("first", "second", "third")


def named_cards(rank: int, size: int, number: int) -> Cards:
    """As `cards_of`, with names of their own; `linked` says which of them have a link."""
    plain = cards_of(rank, size, number)
    return Cards([f"{LINKS[card]}{rank}" for card in range(number)], plain.addresses, rank)


@pytest.fixture
def down(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of cards without a link."""
    names: set[str] = set()
    for module in (host_cards, card_streams):
        monkeypatch.setattr(module, "is_running", lambda name: name not in names)
    return names


TURNS, LARGE = 6, 4 * NUMEL


def in_turns(transport: GlooTransport, between: Callable[[int], None], turns: int = TURNS) -> list[Tensor]:
    """Sums one after the other; `between(turn)` is called while each is under way."""
    found = []
    for turn in range(turns):
        tensor = contribution(100 * turn + transport.rank, LARGE)
        work = transport.all_reduce(tensor)
        between(turn)
        work.wait()
        found.append(tensor)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_a_card_that_loses_its_link_is_left_out_and_no_bit_changes(
    size: int, down: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    alone = on_cards(size, 1, lambda transport: in_turns(transport, lambda turn: None))

    def body(transport: GlooTransport) -> list[Tensor]:
        def lose(turn: int) -> None:
            if turn == 2 and transport.rank == 1:
                down.add("second1")

        found = in_turns(transport, lose)
        streams = transport._streams
        assert isinstance(streams, CardStreams)
        assert all(
            line.card == 0 for rank in range(size) if rank != 1 for line in streams._to(rank) if transport.rank == 1
        )
        return found

    several = on_cards(size, 2, body, cards=lambda rank: named_cards(rank, size, 2))
    for one, other in zip(alone, several, strict=True):
        assert bits(one) == bits(other)
    assert "the network card second1 (127.2.0.2) is left out: its link is down" in caplog.text
    assert "the network card second0 (127.2.0.1) is left out: rank 1 of the group is not reached over it" in caplog.text


def test_connections_that_break_at_any_moment_lose_nothing(down: set[str]) -> None:
    """One connection after the other is shut down under what travels, of either kind, until one card is left."""
    alone = on_cards(2, 1, lambda transport: in_turns(transport, lambda turn: None, 8))

    def body(transport: GlooTransport) -> list[Tensor]:
        def cut(turn: int) -> None:
            streams = transport._streams
            assert isinstance(streams, CardStreams)
            if turn in (1, 3, 5, 6) and transport.rank == turn % 2:
                lines = [line for line in streams._to(1 - transport.rank, words=turn == 6) if line.card == 1 + turn % 2]
                for line in lines[:1]:
                    line.connection.shutdown(socket.SHUT_RDWR)

        return in_turns(transport, cut, 8)

    several = on_cards(2, 3, body, count=3, cards=lambda rank: named_cards(rank, 2, 3))
    for one, other in zip(alone, several, strict=True):
        assert bits(one) == bits(other)


def test_what_comes_twice_is_thrown_away() -> None:
    """A card is given up before the word is heard that all has come: what it carried is sent again."""
    alone = on_cards(2, 1, lambda transport: in_turns(transport, lambda turn: None))

    def body(transport: GlooTransport) -> tuple[list[Tensor], int, int]:
        streams = transport.open_cards()
        assert streams is not None
        if transport.rank == 0:
            hear, events, held = streams._hear, streams._events, list[int]()

            def deaf(rank: int, kind: int, value: int) -> None:
                if kind != card_streams._CAME or value != 2:
                    hear(rank, kind, value)
                    return
                held.append(value)
                streams._leave_out(1, 1, "a test says so", tell=False)

            def late() -> list[tuple[int, int]]:
                sent_again = not any(each.left for each in streams._with(1).outgoing)
                if held and sent_again and not any(line.outgoing for line in streams._to(1)):
                    hear(1, card_streams._CAME, held.pop())
                return events()

            streams._hear, streams._events = deaf, late  # type: ignore[method-assign]
        found = in_turns(transport, lambda turn: None)
        totals = streams._cards.totals()
        return found, sum(each.sent_nbytes for each in totals), sum(each.received_nbytes for each in totals)

    found = cast(list[tuple[list[Tensor], int, int]], on_cards(2, 2, body))
    (mine, sent, _), (theirs, _, received) = found
    assert [bits(mine), bits(theirs)] == [bits(each) for each in alone]
    assert sent > received == TURNS * LARGE * 4


def test_the_end_of_gloos_own_card_is_said_by_name_on_both_ranks(down: set[str]) -> None:
    def body(transport: GlooTransport) -> str:
        def lose(turn: int) -> None:
            assert isinstance(transport._streams, CardStreams)
            transport._streams._cards.gloos = 0
            if turn == 2 and transport.rank == 1:
                down.add("first1")

        with pytest.raises(RuntimeError) as caught:
            in_turns(transport, lose)
        return str(caught.value)

    mine, theirs = on_cards(2, 2, body, cards=lambda rank: named_cards(rank, 2, 2))
    assert "the network card first1 (127.1.0.2) has failed: its link is down" in str(theirs)
    assert "the network card first0 (127.1.0.1) has failed: rank 1 of the group is not reached over it" in str(mine)


def test_last_words_are_heard_where_sending_to_who_said_them_fails(down: set[str]) -> None:
    """A connection that breaks as this rank sends has more to be read than the word that was read before."""
    ended, met = threading.Event(), threading.Barrier(2)

    def body(transport: GlooTransport) -> str:
        streams = transport.open_cards()
        assert isinstance(streams, CardStreams)
        streams._cards.gloos, serve = 0, streams._serve

        def late(line: Line, events: int) -> None:
            words = [each for card in streams._lines if (each := cast(card_streams._CardLine, card)).is_for_words]
            if line in words and not ended.is_set():
                assert ended.wait(20)
                for each in words:
                    each.words.append((card_streams._ECHO, 0))
                    if each.is_open:
                        serve(each, select.POLLIN | select.POLLOUT)
            serve(line, events)

        def lose(turn: int) -> None:
            if transport.rank == 1:
                for line in streams._to(0, words=True):
                    line.words += [(card_streams._ECHO, 0)] * 3
                down.add("first1")

        if transport.rank == 0:
            streams._serve = late  # type: ignore[method-assign]
        met.wait(20)  # or the word could come before this rank is ready to miss it
        with pytest.raises(RuntimeError) as caught:
            in_turns(transport, lose)
        ended.set()
        return str(caught.value)

    mine, _ = on_cards(2, 2, body, cards=lambda rank: named_cards(rank, 2, 2))
    assert "the network card first0 (127.1.0.1) has failed: rank 1 of the group is not reached over it" in str(mine)


def test_who_closes_as_soon_as_all_has_come_keeps_nobody_waiting() -> None:
    """The other rank is done when it hears that all of its own has come, which is said behind the last byte."""

    def body(transport: GlooTransport) -> bool:
        streams = transport.open_cards()
        assert streams is not None
        sent, received = contribution(transport.rank, LARGE), torch.empty(LARGE)
        streams.exchange([(1 - transport.rank, sent, received)]).wait()
        streams.close()
        return torch.equal(received, contribution(1 - transport.rank, LARGE))

    for _ in range(5):
        assert on_cards(2, 2, body) == [True, True]


def test_a_peer_that_ends_is_no_card_that_fails() -> None:
    met = threading.Barrier(2)

    def body(transport: GlooTransport) -> str:
        tensor = contribution(transport.rank, LARGE)
        transport.all_reduce(tensor).wait()
        met.wait(20)
        if transport.rank == 1:
            transport.disconnect()
            return ""
        with pytest.raises(RuntimeError) as caught:
            transport.all_reduce(tensor).wait()
        return str(caught.value)

    found = on_cards(2, 2, body)
    assert "rank 1 of the group has ended or given up" in str(found[0])


def test_a_card_gets_no_more_than_it_gives() -> None:
    """Of a message that fits into the kernels' buffers a slow card is given its share, and not as much as they hold."""

    def body(transport: GlooTransport) -> list[int]:
        streams = transport.open_cards()
        assert streams is not None
        given = {0: 0, 1: 0}

        def has_sent(line: card_streams._CardLine) -> None:
            given[line.card] += line.payload_left  # nothing is acknowledged as long as something is left

        for line in streams._to(1 - transport.rank):
            line.has_sent = partial(has_sent, line)  # type: ignore[method-assign]
        streams._waiting = lambda rank: dict(given)  # type: ignore[method-assign]
        streams._rates = lambda rank: {0: 9e6, 1: 1e6}  # type: ignore[method-assign]
        transport.all_reduce(torch.ones(1 << 20)).wait()
        return list(given.values())

    for fast, slow in cast(list[list[int]], on_cards(2, 2, body)):
        assert fast + slow == 4 << 20
        assert abs(slow / (fast + slow) - 0.1) < 0.03


def test_where_a_card_does_not_connect_the_others_carry_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(card_streams, "CONNECT_SECONDS", 0.3)
    real = card_streams._connected

    def connected(rail: host_cards.Rail, card: int, *rest: object) -> object:
        return None if card == 1 and rail.rank == 1 else real(rail, card, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(card_streams, "_connected", connected)

    def body(number: int) -> Callable[[GlooTransport], object]:
        def run(transport: GlooTransport) -> object:
            found = everything(transport)
            assert number == 1 or isinstance(transport._streams, CardStreams) == (number == 3)
            return found

        return run

    alone = on_cards(2, 1, body(1))
    for number in (2, 3):
        for one, other in zip(alone, on_cards(2, number, body(number)), strict=True):
            assert bits(one) == bits(other)
    assert "it does not connect all of 2 ranks within 0.3 s" in caplog.text


def test_where_there_is_one_card_nothing_of_it_is_loaded() -> None:
    script = """
import sys, threading
from datetime import timedelta
from functools import partial
from typing import cast
import torch
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
store = HashStore()
def run(rank):
    config = Config(hostname="ab"[rank], timeout=timedelta(seconds=60), nics="one")
    communicator = Communicator(store, rank, 2, torch.device("cpu"), config, name="test")
    assert communicator.cards is None
    communicator.all_reduce(torch.ones(1 << 18)).wait()
    communicator.close()
threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
for each in threads: each.start()
for each in threads: each.join()
print([name for name in sys.modules if name.endswith((".cards", ".card_trial"))])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
