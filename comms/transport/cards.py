"""Large messages between two ranks over all network cards of their hosts, by what each card gives.

As `gradwire.comms.transport.streams`, with connections on every card. Who takes the next chunk is not who asks first:
a kernel takes up to a fifth of a second of data at once, so a card a third as fast would be given as much as the other
one, and the message would wait for it. A card takes a chunk while what it has under way is through before all cards
together could be through with everything. What each gives is what the kernel counts: bytes that were acknowledged
while there was something to send.

A message is done here when its receiver has said so, so a card may fail at any moment: what was on its way over it, and
is not known to have come, goes over the others; what comes twice is thrown away. A card has failed when its interface
has no link, when the kernel has no way to a peer over it, or when a peer acknowledges nothing over it and does so over
another one. Where a card's words stand behind a chunk whose time has not come, two ranks could wait for each other, so
each card has one more connection, for words alone.

No bit depends on which card carried what.

Source: Lim et al., "ECF: An MPTCP Path Scheduler to Manage Heterogeneous Paths", CoNEXT 2017, for the rule; tcp(7),
TCP_INFO; Linux include/uapi/linux/tcp.h and tcp_ioctl for what the kernel counts.
"""

import errno
import fcntl
import logging
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

from torch import Tensor

from gradwire.comms.bootstrap.cards import Cards, Rail, gloos_failure, is_running
from gradwire.comms.bootstrap.kernel import TcpInfo
from gradwire.comms.errors import PeerError
from gradwire.comms.links.distance import MOST_CONNECTIONS
from gradwire.comms.transport.streams import (
    HEADER,
    LEAST_UNSENT_NBYTES,
    Alarm,
    Ended,
    Line,
    StreamedExchange,
    StreamedMessage,
    StreamedPeer,
    StreamListener,
    Streams,
    allow_unsent,
    chunk_nbytes,
    closed_by,
    connect,
    nbytes_of,
    views_of,
)
from gradwire.compressors.base import Work

log = logging.getLogger("gradwire")

WORDS = 1 << 31
"""Added to the rank in the first bytes of a connection that carries words alone."""

CONNECT_SECONDS = 5.0
"""Seconds for a card's connections, all of them: a network that does not reach a peer in that time is left out."""

PATIENCE_SECONDS = 5.0
"""How long a card may have something under way and nothing acknowledged, at most a quarter of the time-out: by then TCP
has sent it again four times."""

_TICK_SECONDS, _REST_SECONDS = 1.0, 0.01
"""Seconds between two looks at the cards while something is under way, and until a card that was passed over is asked
again."""

_NOT_A_MESSAGE = 2**64 - 1
_CAME, _FAILED, _ECHO = 0, 1, 2
"""What a header without a message says: which message has come, which card has failed, or nothing."""

_UNACKNOWLEDGED = 0x5411
"""SIOCOUTQ: bytes that were given to the kernel and not acknowledged yet. Source: tcp(7)."""

_NO_WAY = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}
"""Errors that are of the way and not of the process at its end."""

MOST_LINES = MOST_CONNECTIONS + 1
"""Most connections to each rank over each card."""

_MOST_UNSENT_NBYTES = 1 << 20
"""Most bytes that wait in a connection's kernel: a quarter of its even share of what is left. `_takes` keeps slow cards
from hoarding, so this need not, and a thread that comes 50 ms late finds a link of 100 Mbit/s busy."""

_LEAST_SECONDS = 0.01
"""Seconds of sending before a connection's rate is believed."""

_MEMORY_SECONDS = 0.5
"""Seconds of sending over which a card's rate is averaged; older counts half."""


@dataclass(frozen=True, slots=True)
class CardConnections:
    """Connections to one rank over one card.

    Attributes:
        card: Which.
        words: The one for words.
        data: The others.
        outside: Whether the rank is on another host.
    """

    card: int
    words: socket.socket
    data: Sequence[socket.socket]
    outside: bool


class _CardMessage(StreamedMessage):
    """One that may be sent again in parts."""

    def __init__(
        self, peer: int, number: int, sent: memoryview, received: memoryview, exchange: StreamedExchange
    ) -> None:
        super().__init__(peer, number, sent, received, exchange)
        self.again: list[tuple[int, int]] = []
        """(start, stop) of chunks that may not have come."""
        self.came: set[int] = set()
        """Offsets of the chunks that have come."""
        self.only: int | None = None
        """The card that carries all of it; None: all of them."""

    @property
    def left(self) -> int:
        """See `StreamedMessage.left`."""
        return super().left + sum(stop - start for start, stop in self.again)

    def next_chunk(self, nbytes: int) -> tuple[int, int]:
        """See `StreamedMessage.next_chunk`."""
        return self.again.pop() if self.again else super().next_chunk(nbytes)


class _CardLine(Line):
    """A connection over one card."""

    def __init__(self, connection: socket.socket, peer: int, of: CardConnections, cards: Cards) -> None:
        super().__init__(connection, peer)
        self._cards = cards
        self.card, self.outside, self.is_for_words = of.card, of.outside, connection is of.words
        self.words: deque[tuple[int, int]] = deque()
        """(kind, value) that are to be said."""
        self.said: deque[tuple[int, int]] = deque(maxlen=1024)
        self.under_way: deque[tuple[_CardMessage, int, int]] = deque()
        """Chunks that it was given, as long as their messages have not come."""
        self.chunk: tuple[_CardMessage, int, int] | None = None
        """The chunk that it receives."""
        self.rests = False
        """A card was passed over, and is asked again in a moment."""
        self.acknowledged, self.moved, self.proved = 0, time.monotonic(), 0.0
        """Bytes when last looked at; since when they stand still with something under way; when they last grew."""
        self.counted: tuple[int, float] | None = None
        """(bytes, seconds) up to which its rate has been counted."""
        self.average = (0.0, 0.0)
        """Bytes carried, and seconds in which it could; lately."""

    def has_to_send(self, peer: StreamedPeer) -> bool:
        """See `Line.has_to_send`."""
        return bool(self.outgoing or self.words or (peer.outgoing and not (self.is_for_words or self.rests)))

    def has_sent(self) -> None:
        """See `Line.has_sent`; that a message has come its receiver says."""
        if self.sending is not None and self.outside:
            self._cards.carried(self.card, self.payload_left, 0)
        self.sending = None

    def unacknowledged(self) -> int:
        """Bytes that are not known to have come, of what it was given."""
        answer = fcntl.ioctl(self.connection, _UNACKNOWLEDGED, bytes(4))
        return int(struct.unpack("i", answer)[0]) + sum(map(len, self.outgoing))

    def last_words(self) -> list[tuple[int, int]]:
        """The words that came before the connection broke in sending, and were not heard: they may say why."""
        if not self.is_for_words:
            return []
        rest = bytearray(self.header[: self.have])
        with suppress(OSError):
            while part := self.connection.recv(4096):
                rest += part
        whole = len(rest) // HEADER.size * HEADER.size
        return [(kind, value) for _, kind, value in HEADER.iter_unpack(rest[:whole])]

    def count(self) -> None:
        """Counts what it carried since the last time, while there was something to carry all along."""
        info = TcpInfo.of(self.connection)
        nbytes, busy = info.acknowledged_nbytes, info.busy_seconds - info.receiver_seconds
        if self.counted is not None and self.unacknowledged():
            carried = self.average[0] + nbytes - self.counted[0]
            seconds = self.average[1] + busy - self.counted[1]
            self.average = (carried / 2, seconds / 2) if seconds > _MEMORY_SECONDS else (carried, seconds)
        self.counted = nbytes, busy


class _CardPeer(StreamedPeer):
    """What is under way to and from one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.unconfirmed: dict[int, _CardMessage] = {}
        self.failed: set[int] = set()
        """Cards over which it is not reached any more."""

    @property
    def is_waited_for(self) -> bool:
        """See `StreamedPeer.is_waited_for`."""
        return bool(super().is_waited_for or self.unconfirmed)


class CardStreams(Streams):
    """Exchanges with other ranks over several network cards; a thread moves the bytes.

    Args:
        connections: Rank -> those over each card.
        cards: This rank's.
        timeout: For an exchange.
        alarm: Asked about once a second while an exchange is waited for.
    """

    PACES = False
    """Each card has a rate of its own, which `_takes` deals by."""
    PEER = _CardPeer
    MESSAGE = _CardMessage

    def __init__(
        self,
        connections: Mapping[int, Sequence[CardConnections]],
        cards: Cards,
        timeout: timedelta,
        alarm: Alarm | None,
    ) -> None:
        self._cards = cards
        self._patience = min(PATIENCE_SECONDS, timeout.total_seconds() / 4)
        self._next_look = 0.0
        self._last_words: tuple[float, str] | None = None
        """Deadline for last words, and what all ends with then."""
        self._ends: float | None = None
        """Deadline for a peer to say why it does not reach this rank any more."""
        self._of = {each: found for several in connections.values() for found in several for each in _sockets(found)}
        self._data_lines = max(sum(len(each.data) for each in several) for several in connections.values())
        flat = {rank: [each for found in several for each in _sockets(found)] for rank, several in connections.items()}
        super().__init__(flat, timeout, alarm)

    def _line(self, connection: socket.socket, rank: int) -> Line:
        return _CardLine(connection, rank, self._of[connection], self._cards)

    @property
    def count(self) -> int:
        """Connections to each rank that carry messages."""
        return self._data_lines

    @property
    def cards_in_use(self) -> list[int]:
        """The cards that reach some rank."""
        return sorted({line.card for line in cast(list[_CardLine], self._lines) if line.is_open})

    def exchange_over(self, card: int, pieces: Sequence[tuple[int, Tensor, Tensor]]) -> Work:
        """As `exchange`, over one card alone: to see what it gives.

        Args:
            card: Which; every rank names the same one.
            pieces: As for `exchange`.
        """
        views = views_of(pieces)
        exchange = StreamedExchange(nbytes_of(views))
        with self._lock:
            messages = self._numbered(views, exchange)
            for message in messages:
                cast(_CardMessage, message).only = card
            self._submit(messages, exchange)
        self._nudge()
        return self._pending(exchange)

    def _with(self, rank: int) -> _CardPeer:
        return cast(_CardPeer, self._peers[rank])

    def _to(self, rank: int, *, words: bool = False) -> list[_CardLine]:
        """The open connections to a rank that carry messages, or those that carry words."""
        lines = cast(list[_CardLine], self._lines)
        return [line for line in lines if line.peer == rank and line.is_open and line.is_for_words == words]

    # What is sent.

    def _load(self, line: Line) -> bool:
        line = cast(_CardLine, line)
        if line.words:
            word = line.words.popleft()
            line.said.append(word)
            line.outgoing, line.sending = [memoryview(HEADER.pack(_NOT_A_MESSAGE, *word))], None
            return True
        peer = self._with(line.peer)
        if line.is_for_words or not peer.outgoing:
            return False
        message = cast(_CardMessage, peer.outgoing[0])
        left = sum(each.left for each in peer.outgoing)
        nbytes = chunk_nbytes(left, self.count)
        line.count()
        if not self._takes(line, message, left, nbytes):
            line.rests = True
            return False
        allow_unsent(line, max(nbytes, LEAST_UNSENT_NBYTES, min(left // (4 * self.count), _MOST_UNSENT_NBYTES)))
        start, stop = message.next_chunk(nbytes)
        if message.left == 0:
            peer.outgoing.popleft()
        peer.unconfirmed[message.number] = message
        line.under_way.append((message, start, stop))
        line.outgoing = [memoryview(HEADER.pack(message.number, start, stop - start)), message.sent[start:stop]]
        line.sending, line.payload_left = message.exchange, stop - start
        return True

    def _takes(self, line: _CardLine, message: _CardMessage, left: int, nbytes: int) -> bool:
        """Whether a connection's card is through with one more chunk by when all cards can be through with all."""
        if message.only is not None:
            return line.card == message.only
        waiting = self._waiting(line.peer)
        if len(waiting) == 1:
            return True
        rates = self._rates(line.peer)
        level = (left + sum(waiting.values())) / sum(rates[card] for card in waiting)
        ends = {card: (queued + nbytes / 2) / rates[card] for card, queued in waiting.items()}
        return ends[line.card] <= level or line.card == min(ends, key=ends.__getitem__)

    def _waiting(self, rank: int) -> dict[int, int]:
        """Bytes under way to a rank over each card that reaches it."""
        found: dict[int, int] = {}
        for line in self._to(rank):
            found[line.card] = found.get(line.card, 0) + line.unacknowledged()
        return found

    def _rates(self, rank: int) -> dict[int, float]:
        """Bytes per second to a rank over each card that reaches it: seen here, else elsewhere, else their mean."""
        seen: dict[int, float | None] = {}
        for line in self._to(rank):
            carried, seconds = line.average
            own = carried / seconds if seconds > _LEAST_SECONDS else None
            if own is not None:
                seen[line.card] = (seen.get(line.card) or 0.0) + own
            else:
                seen.setdefault(line.card, None)
        known = {card: rate or self._cards.rate(card) for card, rate in seen.items()}
        there = [rate for rate in known.values() if rate]
        usual = sum(there) / len(there) if there else 1.0
        return {card: rate or usual for card, rate in known.items()}

    def _say(self, rank: int, kind: int, value: int) -> None:
        """Tells a rank something, over the card that has the least under way."""
        lines = self._to(rank, words=True)
        if not lines:
            return  # nobody hears it; who waits for that rank has been told
        waiting, rates = self._waiting(rank), self._rates(rank)
        line = min(lines, key=lambda each: waiting.get(each.card, 0) / rates.get(each.card, 1.0))
        line.words.append((kind, value))
        self._watch(line)

    # What comes.

    def _serve(self, line: Line, events: int) -> None:
        line = cast(_CardLine, line)
        if not line.is_open:  # lost since
            return
        try:
            if line.parked and events & (select.POLLHUP | select.POLLERR):
                if error := line.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(error, os.strerror(error))
                self._lose(line)
                return
            super()._serve(line, events)
        except OSError as error:
            if error.errno in _NO_WAY and line.outside:
                self._leave_out(line.peer, line.card, f"{os.strerror(error.errno)}", tell=True)
            else:
                for kind, value in line.last_words():
                    self._hear(line.peer, kind, value)
                self._lose(line)

    def _begin(self, line: Line) -> None:
        line = cast(_CardLine, line)
        number, start, nbytes = HEADER.unpack(line.header)
        if number == _NOT_A_MESSAGE:
            line.have = 0
            self._hear(line.peer, start, nbytes)
            return
        peer = self._with(line.peer)
        message = cast(_CardMessage | None, peer.incoming.get(number))
        line.parked = message is None and number >= peer.taken_up
        if line.parked:
            self._watch(line)
            return
        if message is None or start in message.came:  # over another card, before this one was given up
            line.chunk, line.target = None, memoryview(bytearray(nbytes))
            return
        if start + nbytes > len(message.received):
            raise Ended(f"rank {line.peer} of the group sends more than the {len(message.received)} bytes asked for")
        line.chunk, line.target = (message, start, nbytes), message.received[start : start + nbytes]

    def _has_received(self, line: Line, nbytes: int) -> None:
        line = cast(_CardLine, line)
        if not line.is_open or line.target:
            return
        chunk, line.chunk, line.target, line.have = line.chunk, None, None, 0
        if chunk is None or chunk[1] in chunk[0].came:
            return
        message, start, nbytes = chunk
        message.came.add(start)
        message.to_come -= nbytes
        if line.outside:
            self._cards.carried(line.card, 0, nbytes)
        if message.to_come == 0:
            del self._with(line.peer).incoming[message.number]
            for other in self._to(line.peer):
                if other.chunk is not None and other.chunk[0] is message and other.target:
                    other.chunk, other.target = None, memoryview(bytearray(len(other.target)))
            self._say(line.peer, _CAME, message.number)
        message.exchange.book(nbytes)

    def _hear(self, rank: int, kind: int, value: int) -> None:
        """Takes in what a rank says."""
        if kind == _FAILED:
            self._leave_out(
                rank, value, f"rank {rank} of the group is not reached over it, as that one says", tell=False
            )
        if kind != _CAME:
            return
        peer = self._with(rank)
        message = peer.unconfirmed.pop(value, None)
        if message is None:
            return
        if message in peer.outgoing:
            peer.outgoing.remove(message)
        rates = self._rates(rank)
        for line in self._to(rank):
            while line.under_way and line.under_way[0][0].number not in peer.unconfirmed:
                line.under_way.popleft()
            if line.outside and line.average[1] > _LEAST_SECONDS:
                self._cards.seen(line.card, rates[line.card])
        message.exchange.book(len(message.sent))

    # What fails.

    def _close(self, line: Line) -> None:
        self._lose(cast(_CardLine, line))

    def _check_reaches(self, rank: int) -> None:
        if self._peers[rank].is_waited_for and not self._to(rank):
            if self._to(rank, words=True) and self._ends is None:  # which may say why
                self._ends = time.monotonic() + _TICK_SECONDS
            if self._to(rank, words=True) and time.monotonic() < (self._ends or 0.0):
                return
            if self._last_words is not None:
                raise Ended(self._last_words[1])
            failed = [self._cards.names[card] for card in sorted(self._with(rank).failed)]
            if failed:
                raise Ended(f"no network card reaches rank {rank} of the group any more: {', '.join(failed)} failed")
            raise Ended(closed_by(rank))

    def _lose(self, line: _CardLine) -> None:
        """Gives a connection up: what it carried, and is not known to have come, goes over others."""
        if not line.is_open:
            return
        self._poll.unregister(line.connection)
        line.is_open = False
        with suppress(OSError):  # its other end has been faster
            line.connection.shutdown(socket.SHUT_RDWR)
        peer = self._with(line.peer)
        for message, start, stop in line.under_way:
            if message.number in peer.unconfirmed:
                message.again.append((start, stop))
                if message not in peer.outgoing:
                    peer.outgoing.appendleft(message)
        line.under_way.clear()
        line.outgoing, line.sending, line.chunk = [], None, None
        if line.is_for_words:  # nothing is heard over its card any more
            for other in self._to(line.peer):
                if other.card == line.card:
                    self._lose(other)
        for kind, value in (*line.said, *line.words):
            self._say(line.peer, kind, value)
        line.words.clear()
        self._check_reaches(line.peer)
        for other in self._to(line.peer):
            self._watch(other)

    def _leave_out(self, rank: int, card: int, why: str, *, tell: bool) -> None:
        """Gives up all connections to a rank over one card, and goes on over the others."""
        peer = self._with(rank)
        if card in peer.failed or not 0 <= card < len(self._cards.names):
            return
        peer.failed.add(card)
        self._cards.leave_out(card, why)
        if card == self._cards.gloos and self._last_words is None:
            text = gloos_failure(self._cards.names[card], self._cards.own[card], why)
            self._last_words = time.monotonic() + _TICK_SECONDS, text
        for line in (*self._to(rank, words=True), *self._to(rank)):
            if line.card == card:
                self._lose(line)
        if tell:
            self._say(rank, _FAILED, card)

    def _take_up(self) -> None:
        super()._take_up()
        self._check_links()

    def _check_links(self) -> None:
        """Leaves out what has no link."""
        for card, name in enumerate(self._cards.names):
            if not is_running(name):
                for rank in sorted({line.peer for line in cast(list[_CardLine], self._lines) if line.outside}):
                    self._leave_out(rank, card, "its link is down", tell=True)

    def _events(self) -> list[tuple[int, int]]:
        lines = cast(list[_CardLine], self._lines)
        resting = [line for line in lines if line.rests]
        busy = any(not each.done.is_set() for each in self._under_way)
        seconds = _REST_SECONDS if resting else _TICK_SECONDS if busy or self._last_words else None
        found = self._poll.poll(None if seconds is None else 1e3 * seconds)
        for line in resting:
            line.rests = False
            if line.is_open:
                self._watch(line)
        now = time.monotonic()
        if busy and now >= self._next_look:
            self._next_look = now + _TICK_SECONDS
            self._look(now)
        if self._ends is not None and now > self._ends:
            for rank in self._peers:
                self._check_reaches(rank)
        if self._last_words is not None:
            until, text = self._last_words
            words = [line for line in lines if line.is_for_words and line.is_open]
            if now > until or not any(line.words or line.outgoing for line in words):
                raise Ended(text)
        return found

    def _look(self, now: float) -> None:
        """Finds cards over which a peer acknowledges nothing, while it does so over others."""
        self._check_links()
        silent: dict[tuple[int, int], float] = {}
        for line in cast(list[_CardLine], self._lines):
            if not line.is_open or not line.outside:
                continue
            info = TcpInfo.of(line.connection)
            if info.acknowledged_nbytes != line.acknowledged:
                line.acknowledged, line.moved, line.proved = info.acknowledged_nbytes, now, now
            elif not line.unacknowledged():
                line.moved = now
            elif info.timeouts >= 2 and now - line.moved >= self._patience:
                silent[line.peer, line.card] = line.moved
        for (rank, card), since in silent.items():
            others = [line for line in (*self._to(rank), *self._to(rank, words=True)) if line.card != card]
            if any(line.proved > since + self._patience / 2 for line in others):
                why = f"rank {rank} of the group has acknowledged nothing over it for {now - since:.0f} s"
                self._leave_out(rank, card, why, tell=True)
                continue
            for line in others:
                if line.is_for_words and not line.words:
                    line.words.append((_ECHO, 0))
                    self._watch(line)

    def _move(self) -> None:
        """See `Streams._move`; in the end peers hear of what has come: with that theirs are done, too."""
        super()._move()
        # Who is through may leave while its last words are here: others wait for them.
        for line in cast(list[_CardLine], self._lines):
            if line.is_open and (line.words or line.outgoing):
                words = b"".join(HEADER.pack(_NOT_A_MESSAGE, *word) for word in line.words if line.is_for_words)
                rest = b"".join(line.outgoing) if line.is_for_words else b""
                line.connection.settimeout(_TICK_SECONDS)
                with suppress(OSError):  # nobody listens any more
                    line.connection.sendall(rest + words)


def _sockets(of: CardConnections) -> tuple[socket.socket, ...]:
    return of.words, *of.data


Tell = Callable[[bytes, str], list[tuple[Any, ...]]]
"""Tells all ranks something, and returns what each has told, by rank."""


def open_streams(
    rail: Rail, gloos_address: str, tell: Tell, count: int, timeout: timedelta, alarm: Alarm | None
) -> CardStreams | None:
    """Connects some ranks over their cards; all of them call it. None where fewer than two cards connect them.

    Args:
        rail: The ranks' cards.
        gloos_address: Of this rank, on the interface that gloo uses.
        tell: Among these ranks.
        count: Connections over each card; the largest answer counts.
        timeout: For an exchange.
        alarm: See `CardStreams`.

    Raises:
        PeerError: Another rank has given up.
    """
    cards, rank, size = rail.cards, rail.rank, len(rail.addresses)
    if gloos_address in cards.own:
        cards.gloos = cards.own.index(gloos_address)
    number = len(cards.names)
    listeners = [_listener(address, MOST_LINES * size) if cards.usable(card) else None
                 for card, address in enumerate(cards.own)]  # fmt: skip
    made: list[dict[int, CardConnections] | None] = []
    try:
        places = [(each.port, each.token) if each is not None else (0, 0) for each in listeners]
        form = "=I" + "HQ" * number
        told = tell(struct.pack(form, count, *(word for place in places for word in place)), form)
        count = max(each[0] for each in told)
        for card, listener in enumerate(listeners):
            ports = [each[1 + 2 * card : 3 + 2 * card] for each in told]
            if listener is None or not all(port for port, _ in ports):
                made.append(None)
                continue
            made.append(_connected(rail, card, listener, ports, count, alarm))
        flags = tell(struct.pack("?" * number, *(each is not None for each in made)), "?" * number)
    except BaseException:
        _close_all(made)
        raise
    finally:
        for each in listeners:
            if each is not None:
                each.close()
    together = [all(column) for column in zip(*flags, strict=True)]
    for card in [card for card, connects in enumerate(together) if not connects]:
        _close_all([made[card]])
        cards.leave_out(card, f"it does not connect all of {size} ranks within {CONNECT_SECONDS:g} s")
    usable = [found for found, connects in zip(made, together, strict=True) if connects and found is not None]
    if len(usable) < 2:
        _close_all(usable)
        return None
    others = [other for other in range(size) if other != rank]
    return CardStreams({other: [found[other] for found in usable] for other in others}, cards, timeout, alarm)


def _listener(address: str, backlog: int) -> StreamListener | None:
    try:
        return StreamListener(_family(address), address, backlog)
    except OSError as error:  # the address is gone
        log.debug("cannot listen at %s: %s", address, error)
        return None


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _connected(
    rail: Rail,
    card: int,
    listener: StreamListener,
    ports: Sequence[tuple[int, int]],
    count: int,
    alarm: Alarm | None,
) -> dict[int, CardConnections] | None:
    """The connections to all other ranks over one card; None where one of them is not reached.

    Raises:
        PeerError: Another rank has given up.
    """
    own, rank, size = rail.addresses[rail.rank][card], rail.rank, len(rail.addresses)
    words: dict[int, list[socket.socket]] = {}
    data: dict[int, list[socket.socket]] = {}
    try:
        deadline = time.monotonic() + CONNECT_SECONDS
        for other in range(rank):
            place, (port, token) = rail.addresses[other][card], ports[other]
            way = (_family(place), place, port, token)
            words[other] = connect(*way, rank | WORDS, 1, deadline, alarm, own)
            data[other] = connect(*way, rank, count, deadline, alarm, own)
        higher = range(rank + 1, size)
        wanted = dict.fromkeys(higher, count) | {other | WORDS: 1 for other in higher}
        came = listener.accept(wanted, deadline + CONNECT_SECONDS, alarm)
    except PeerError:
        _close_sockets(words, data)
        raise
    except (OSError, RuntimeError) as error:
        log.debug("%s does not connect: %s", rail.cards.names[card], error)
        _close_sockets(words, data)
        return None
    words |= {other: came[other | WORDS] for other in higher}
    data |= {other: came[other] for other in higher}
    return {
        other: CardConnections(card, words[other][0], tuple(data[other]), rail.addresses[other][card] != own)
        for other in data
    }


def _close_all(made: Sequence[Mapping[int, CardConnections] | None]) -> None:
    for found in made:
        for each in (found or {}).values():
            for connection in _sockets(each):
                connection.close()


def _close_sockets(*several: Mapping[int, Sequence[socket.socket]]) -> None:
    for each in (each for found in several for sockets in found.values() for each in sockets):
        each.close()
