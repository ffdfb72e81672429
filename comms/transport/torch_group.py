"""Transports on torch's own process groups for CPU tensors: gloo.

Gloo informs a sender that its receiver is ready through the connection that carries the receiver's own data. Of two
ranks that exchange something the later one finds the other ready and begins to send at once, and its own readiness
waits behind all of that: one direction after the other, in twice the time. So a large exchange goes to higher ranks
through one group and to lower ranks through another. Two nodes of one rank, 200 Mbit/s, 2 MiB in each direction: 172 ms
in one group, 88 ms in two; the wire alone takes 84 (2-core EPYC VM, 2026-11-21).
"""

import os
import socket
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate, pairwise
from queue import Empty
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms.bootstrap.compat import (
    ALL_GATHER_SINGLE,
    ALL_TO_ALL_SINGLE,
    AllgatherOptions,
    BackendWork,
    PairwiseGroup,
    PrefixStore,
    Store,
    TorchGroup,
    knows_gloo_sums,
    make_gloo,
)
from gradwire.comms.bootstrap.kernel import TcpInfo
from gradwire.comms.bootstrap.probe import PeerWait
from gradwire.comms.bootstrap.threads import in_thread, outcome_of
from gradwire.comms.environment import gloo_interfaces
from gradwire.comms.errors import PeerError
from gradwire.comms.transport.gloo_sockets import Connection, GlooSockets
from gradwire.comms.transport.sum_order import RANK_ORDER, SlicesToSum, SumOrder, ring_numel, sums_as_rings
from gradwire.comms.transport.works import SLICE, Alarm, Then, Waiting, Works
from gradwire.compressors.base import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, Collective, Work

if TYPE_CHECKING:
    from gradwire.comms.transport.parallel_tcp import Streams

Result = TypeVar("Result")


LARGE_NBYTES = 256 << 10
"""Messages from here on go through two groups. At 200 Mbit/s two groups were ahead at 128 KiB between two nodes and
behind between four, where the second collective costs more; at 512 KiB they were ahead between both."""

FAR_NBYTES = 4 << 10
"""Messages from here on travel over a long path by connections of gradwire's own, once there are some: gloo's wait a
round trip for a word from the receiver, so that int8 sums of 4 MB in two chunks, 128 KiB a message, took three of 150
ms (2026-11-25)."""

OPENING_NBYTES = 32 << 10
"""The first message of so many has all ranks look whether the path is a long one."""

_PLACE = "iiIQ48s"
"""What ranks tell each other of where they listen: connections wanted, family, port, token, address."""


TOGETHER_NBYTES = 64 << 10
"""Collectives of two ranks that send less than this in all travel in one message. Each of gloo's own takes a processor
0.25 ms in its threads and the kernel (2-core EPYC VM, 2026-11-22), and copying this much 0.01."""


class TorchTransport:
    """The collectives of `Transport` on a torch process group.

    Args:
        group: Made by `make_gloo`.
        rank: This rank's index in the group.
        size: Number of ranks.
        alarm: Asked about once a second while a work is waited for; what it returns, another rank has given up for.
            A broken connection shows only to its two ends, and gloo cannot wake the others.
        timeout: That the group was made with.
    """

    def __init__(
        self,
        group: TorchGroup,
        rank: int,
        size: int,
        alarm: Alarm | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        self.rank = rank
        self.size = size
        self._group = group
        self._alarm = alarm
        self._timeout = timeout

    def _waiting(self, work: BackendWork) -> Work:
        """A work of the group, whose wait hears the alarm and has a deadline."""
        return Waiting(work, self._alarm or (lambda: None), self._timeout)

    def all_reduce(self, tensor: Tensor, scale: float = 1.0) -> Work:
        """See `Transport.all_reduce`. Gloo runs a ring: each element is summed on one rank and copied to the others."""
        scale_in_place(tensor, scale)
        return self._waiting(self._group.allreduce([tensor], dist.AllreduceOptions()))

    def all_to_all(self, output: Tensor, source: Tensor) -> Work:
        """See `Transport.all_to_all`."""
        parts = [source.numel() // self.size] * self.size
        return self.exchange(output.view(-1), source.view(-1), parts, parts, source.nbytes // self.size)

    def all_gather(self, output: Tensor, source: Tensor) -> Work:
        """See `Transport.all_gather`."""
        issue = getattr(self._group, ALL_GATHER_SINGLE)
        return self._waiting(issue(output.view(-1), source.view(-1), AllgatherOptions()))

    def reduce_scatter(
        self, tensor: Tensor, bounds: Sequence[int], scale: float = 1.0, order: SumOrder = RANK_ORDER
    ) -> Work:
        """See `Transport.reduce_scatter`. Every rank sends each slice to its owner, which sums in rank order.

        One message for each peer and (size - 1)/size of the tensor sent: the lower bound. Gloo's own reduce_scatter
        needs equal slices and measured slower.

        Args:
            tensor: As for `Transport.reduce_scatter`.
            bounds: Likewise.
            scale: Likewise.
            order: Order in which the contributions to each element are added.
        """
        sizes = [stop - start for start, stop in pairwise(bounds)]
        own = sizes[self.rank]
        received = tensor.new_empty(own * self.size)
        rows = SlicesToSum(received.view(self.size, own))
        scale_in_place(
            tensor, scale
        )  # not before all memory is taken: where there is none, the gradient stays as it is
        work = self.exchange(received, tensor, [own] * self.size, sizes, max(sizes) * tensor.element_size())
        start, stop = bounds[self.rank], bounds[self.rank + 1]
        return Then(work, lambda: order.sum(rows, tensor[start:stop], start, self.size))

    def all_gather_slices(self, tensor: Tensor, bounds: Sequence[int]) -> Work:
        """See `Transport.all_gather_slices`: one all_gather of equal slices, a broadcast where one rank has all.

        Else every rank sends its slice to each of the others, and nothing on behalf of others.
        """
        numel = bounds[1] - bounds[0]
        if (
            numel
            and all(bounds[rank] == rank * numel for rank in range(self.size))
            and bounds[-1] - bounds[-2] >= numel
        ):
            return self._gather_equal(tensor, numel, bounds[-1])
        sizes = [stop - start for start, stop in pairwise(bounds)]
        roots = [root for root, size in enumerate(sizes) if size]
        if len(roots) < 2:
            return Works([self.broadcast(tensor[bounds[root] : bounds[root + 1]], root) for root in roots])
        own = tensor[bounds[self.rank] : bounds[self.rank + 1]]
        source = own.repeat(self.size)
        splits, largest = [own.numel()] * self.size, max(sizes) * tensor.element_size()
        return Then(self.exchange(tensor[: bounds[-1]], source, sizes, splits, largest), held=source)

    def _gather_equal(self, tensor: Tensor, numel: int, stop: int) -> Work:
        """One all_gather for slices of `numel` elements, and a broadcast for what the last one has beyond that."""
        even = numel * self.size
        own = tensor[self.rank * numel : (self.rank + 1) * numel].clone()
        works: list[Work] = [self.all_gather(tensor[:even], own)]
        if stop > even:
            works.append(self.broadcast(tensor[even:stop], self.size - 1))
        return Works(works)

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """See `Transport.broadcast`."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._waiting(self._group.broadcast([tensor], options))

    def exchange(
        self, output: Tensor, source: Tensor, output_splits: list[int], source_splits: list[int], largest_nbytes: int
    ) -> Work:
        """Sends runs of a flat tensor to the other ranks, as many elements to each as both ends say.

        Args:
            output: 1-D; takes what arrives, in the order of the ranks.
            source: 1-D; what is sent, in the order of the ranks.
            output_splits: Elements that arrive from each rank; from this one as many as `source` has for it.
            source_splits: Elements for each rank, this one among them.
            largest_nbytes: Of the largest message of any rank; the same on all of them.
        """
        if len({*output_splits, *source_splits}) == 1:
            output_splits = source_splits = []  # equal parts
        issue = getattr(self._group, ALL_TO_ALL_SINGLE)
        return self._waiting(issue(output, source, output_splits, source_splits, dist.AllToAllOptions()))


class GlooTransport(TorchTransport):
    """The collectives of `Transport` on gloo, with large exchanges at full duplex.

    Attributes:
        takes_sum_order: True: `reduce_scatter` takes a `SumOrder`.

    Args:
        connect: Connects the same ranks under a name; called for the second group at the first large exchange.
        rank: This rank's index in the group.
        size: Number of ranks.
        alarm: See `TorchTransport`.
        connections: From the round trip in seconds between the farthest two ranks, how many connections large messages
            between two of them travel over; the largest answer of all ranks counts. Below 2 they are gloo's. None: 1.
        timeout: That the groups are made with, and for what those connections carry.
    """

    takes_sum_order = True

    def __init__(
        self,
        connect: Callable[[str], TorchGroup],
        rank: int,
        size: int,
        alarm: Alarm | None = None,
        *,
        connections: Callable[[float], int] | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        self._sockets = GlooSockets()
        self._connect = connect
        super().__init__(self._sockets.opened_by(lambda: connect("first")), rank, size, alarm, timeout)
        self._downwards: TorchGroup | None = None
        self._choose = connections
        self._streams: Streams | None = None
        self._adds_as_ring = False
        """Whether gloo's ring was seen to add in the order of `ring_runs`; alike on all ranks."""

    def disconnect(self) -> None:
        """Ends the connections; see `GlooSockets.shut_down`."""
        self._sockets.shut_down()

    def all_reduce(self, tensor: Tensor, scale: float = 1.0) -> Work:
        """See `Transport.all_reduce`. Over long paths two ranks swap all they have, and both add it up.

        That is as many bytes as the ring of two sends, in one round trip in place of two; a + b = b + a, so the bits
        are those of the ring. Of more ranks each sums its part of the ring, in the ring's order, and sends it to all:
        again as many bytes, in two round trips in place of 2 (n - 1).
        """
        if self.size == 1 or (found := self._streams_for(tensor.nbytes)) is None:
            return super().all_reduce(tensor, scale)
        if self.size > 2:
            return (
                self._sum_by_owners(found, tensor, scale) if self._adds_as_ring else super().all_reduce(tensor, scale)
            )
        received = torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device)
        scale_in_place(tensor, scale)
        work = found.exchange([(1 - self.rank, tensor, received)])
        return Then(work, lambda: _hand_out(received, [Collective(ALL_REDUCE, (tensor,))], self.rank))

    def _sum_by_owners(self, found: "Streams", tensor: Tensor, scale: float) -> Work:
        flat, own = tensor.view(-1), self.rank
        part = ring_numel(flat.numel(), flat.element_size(), self.size)
        slices = [flat[rank * part : (rank + 1) * part] for rank in range(self.size)]
        rows = list(flat.new_empty((self.size, slices[own].numel())))
        rows[own] = slices[own]
        to_sum = SlicesToSum(rows)
        scale_in_place(tensor, scale)
        others = [rank for rank in range(self.size) if rank != own]
        # An owner sends its sum once it has all contributions, so what arrives is not read here any more.
        work = found.exchange_twice(
            [(rank, slices[rank], rows[rank]) for rank in others],
            lambda: to_sum.sum_as_rings(slices[own], [(slices[own].numel(), own)]),
            [(rank, slices[own], slices[rank]) for rank in others],
        )
        return Then(work, held=tensor)

    def issue_together(self, collectives: Sequence[Collective]) -> Work | None:
        """Issues small collectives of two ranks as one: each sends the other what is for it, in one message.

        Args:
            collectives: The same on both ranks, in the same order.

        Returns:
            None where they do not fit, and nothing was issued: more ranks, unequal parts, or so many bytes that a
            message of their own is no loss.
        """
        if (
            len(collectives) < 2
            or self.size != 2
            or any(each.bounds or each.op not in _FOR_PEER for each in collectives)
        ):
            return None
        widest_first = sorted(collectives, key=lambda each: -each.tensors[-1].element_size())  # aligns them all
        parts = [_FOR_PEER[each.op](each.tensors[-1].view(-1), 1 - self.rank) for each in widest_first]
        if sum(part.nbytes for part in parts) >= TOGETHER_NBYTES:
            return None
        sent = torch.cat([part.view(torch.uint8) for part in parts])
        received = torch.empty_like(sent)
        splits = [sent.numel() * (rank != self.rank) for rank in range(2)]
        work = self.exchange(received, sent, splits, splits, sent.nbytes)
        return Then(work, lambda: _hand_out(received, widest_first, self.rank), sent)

    def all_gather(self, output: Tensor, source: Tensor) -> Work:
        """See `Transport.all_gather`. Of gloo's ring through two ranks both directions are one connection, too."""
        found = self._streams_for(source.nbytes) if self.size > 1 else None
        if found is None and (self.size != 2 or not source.numel()):
            return super().all_gather(output, source)
        own, places = source.view(-1), output.view(self.size, source.numel())
        places[self.rank].copy_(own)
        if found is not None:
            others = [rank for rank in range(self.size) if rank != self.rank]
            return Then(found.exchange([(rank, own, places[rank]) for rank in others]), held=source)
        # In place of gloo's ring, which would send two messages.
        splits = [own.numel() * (rank != self.rank) for rank in range(2)]
        return Then(self.exchange(places[1 - self.rank], own, splits, splits, own.nbytes), held=source)

    def exchange(
        self, output: Tensor, source: Tensor, output_splits: list[int], source_splits: list[int], largest_nbytes: int
    ) -> Work:
        """See `TorchTransport.exchange`."""
        found = self._streams_for(largest_nbytes) if self.size > 1 else None
        if self.size == 1 or (found is None and largest_nbytes < LARGE_NBYTES):
            return super().exchange(output, source, output_splits, source_splits, largest_nbytes)
        return self._both_ways(output, source, output_splits, source_splits, found)

    def sendrecv(self, other: int, received: Tensor, sent: Tensor) -> Work:
        """Exchanges a tensor with one other rank, and no word with the rest, at full duplex: for measurements.

        All ranks have called `connect_both_ways` before. Its wait hears no alarm: see `listening`.

        Args:
            other: Index of the other rank, which calls it too.
            received: Takes what the other one has sent; as large as that.
            sent: What is sent.
        """
        upwards, downwards = (cast(PairwiseGroup, group) for group in (self._group, self.connect_both_ways()))
        sending, receiving = (upwards, downwards) if other > self.rank else (downwards, upwards)
        coming = receiving.recv([received], other, 0)
        sent_work = sending.send([sent], other, 0)
        return Works([Waiting(each, None, self._timeout) for each in (sent_work, coming)])

    def listening(self, call: Callable[[], Result]) -> Result:
        """What `call` returns, which swaps and knows no alarm: it runs in a thread, and this one asks the alarm.

        Where the wait for a single message times out, gloo gives up the connection, so that wait cannot be cut short
        as those for collectives are. Once another rank has given up these connections are ended, which wakes it; after
        two seconds, so that the ranks at their other ends have heard the reason, too.

        Args:
            call: Issues its work on this transport.

        Raises:
            PeerError: Another rank has given up.
            BaseException: What `call` has raised.
        """
        told = in_thread(call, "gradwire swaps")
        while True:
            try:
                return outcome_of(told.get(timeout=SLICE.total_seconds()))
            except Empty:
                if self._alarm is not None and (reason := self._alarm()):
                    in_thread(self._disconnect_later, "gradwire disconnects", awaited=False)
                    raise PeerError(reason) from None

    def _disconnect_later(self) -> None:
        time.sleep(2 * SLICE.total_seconds())
        self.disconnect()

    def connect_both_ways(self) -> TorchGroup:
        """Connects the group of what goes to lower ranks, where no large exchange has done so; every rank calls it."""
        if self._downwards is None:
            self._downwards = self._sockets.opened_by(lambda: self._connect("downwards"))
        return self._downwards

    def connect_for(self, nbytes: int) -> None:
        """See `MeetsInPairs.connect_for`."""
        if self.size > 1 and nbytes >= LARGE_NBYTES:
            self.connect_both_ways()

    def _both_ways(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: list[int],
        source_splits: list[int],
        found: "Streams | None",
    ) -> Work:
        """Exchanges over the connections that were found; without, all that goes upwards takes the first group.

        What goes to lower ranks takes the second one.
        """
        lower_out, own_out, higher_out = self._sections(output, output_splits)
        lower_in, own_in, higher_in = self._sections(source, source_splits)
        own_out.copy_(own_in)
        if found is not None:
            return Then(found.exchange(self._pieces(output, source, output_splits, source_splits)), held=source)
        downwards = self.connect_both_ways()
        up = getattr(self._group, ALL_TO_ALL_SINGLE)(
            lower_out, higher_in, self._lower(output_splits), self._higher(source_splits), dist.AllToAllOptions()
        )
        down = getattr(downwards, ALL_TO_ALL_SINGLE)(
            higher_out, lower_in, self._higher(output_splits), self._lower(source_splits), dist.AllToAllOptions()
        )
        return Works([self._waiting(up), self._waiting(down)])

    def _pieces(
        self, output: Tensor, source: Tensor, output_splits: list[int], source_splits: list[int]
    ) -> list[tuple[int, Tensor, Tensor]]:
        """(rank, what it is sent, what takes its) of each other rank."""
        sent, taken = (
            [flat[stop - numel : stop] for numel, stop in zip(splits, accumulate(splits), strict=True)]
            for flat, splits in ((source, source_splits), (output, output_splits))
        )
        return [(rank, sent[rank], taken[rank]) for rank in range(self.size) if rank != self.rank]

    def _streams_for(self, nbytes: int) -> "Streams | None":
        """The connections for a message, opened at the first one of size; None where gloo's own will do.

        Every rank calls it at the same point of the sequence of collectives.

        Args:
            nbytes: Of the message, the largest of all ranks.
        """
        if self._choose is not None and nbytes >= OPENING_NBYTES:
            choose, self._choose = self._choose, None
            self._streams = made = self._opened(choose)
            if made is not None:
                self._sockets.connections += [Connection(each, os.fstat(each).st_ino) for each in made.by_descriptor]
                weakref.finalize(self, made.close)
                if self.size > 2 and knows_gloo_sums():
                    self._adds_as_ring = all(each for (each,) in self._told(struct.pack("?", sums_as_rings(self)), "?"))
        return self._streams if nbytes >= FAR_NBYTES else None

    def _opened(self, choose: Callable[[float], int]) -> "Streams | None":
        """Tells all ranks the round trip, the choice and where to connect; and connects, if it is to be several."""
        from gradwire.comms.links.distance import MOST_CONNECTIONS
        from gradwire.comms.transport import parallel_tcp  # here: most networks have short round trips

        own, trip = self._farthest()
        listener = None if own is None else parallel_tcp.StreamListener(*own, backlog=MOST_CONNECTIONS * self.size)
        try:
            trips = sorted(each for (each, *_) in self._told(struct.pack("d", trip), "d"))
            # Each pair's is seen at both of its ends, one of which may have looked at a busy moment.
            count = choose(trips[-2])
            address = "" if own is None else own[1]
            port, token = (0, 0) if listener is None else (listener.port, listener.token)
            family = socket.AF_UNSPEC if own is None else own[0]
            told = self._told(struct.pack(_PLACE, count, family, port, token, address.encode()), _PLACE)
            count = max(each[0] for each in told)
            if count < 2 or listener is None or not all(each[4].strip(b"\0") for each in told):
                return None
            deadline = time.monotonic() + self._timeout.total_seconds()
            found: dict[int, list[socket.socket]] = {}
            for rank, (_, kind, port, token, text) in enumerate(told[: self.rank]):
                place = text.strip(b"\0").decode()
                found[rank] = parallel_tcp.connect(kind, place, port, token, self.rank, count, deadline, self._alarm)
            higher = dict.fromkeys(range(self.rank + 1, self.size), count)
            found |= listener.accept(higher, deadline, self._alarm)
        finally:
            if listener is not None:
                listener.close()
        return parallel_tcp.Streams(found, self._timeout, self._alarm)

    def _farthest(self) -> tuple[tuple[int, str] | None, float]:
        """This rank's family and address on gloo's interface, and the longest of the round trips to the others."""
        own, trip = None, 0.0
        for connection in self._sockets.connections:
            with suppress(OSError), socket.socket(fileno=os.dup(connection.descriptor)) as copy:
                own = own or (int(copy.family), str(copy.getsockname()[0]))
                trip = max(trip, TcpInfo.of(copy).trip_seconds)
        return own, trip

    def _told(self, own: bytes, form: str) -> list[tuple[Any, ...]]:
        """What every rank says, by rank."""
        source = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        output = source.new_empty(self.size * len(own))
        super().all_gather(output, source).wait()
        return list(struct.iter_unpack(form, output.numpy().tobytes()))

    def _sections(self, flat: Tensor, splits: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """What belongs to lower ranks, to this one, and to higher ones."""
        start = sum(splits[: self.rank])
        stop = start + splits[self.rank]
        return flat[:start], flat[start:stop], flat[stop : sum(splits)]

    def _lower(self, splits: list[int]) -> list[int]:
        return [numel * (rank < self.rank) for rank, numel in enumerate(splits)]

    def _higher(self, splits: list[int]) -> list[int]:
        return [numel * (rank > self.rank) for rank, numel in enumerate(splits)]


def connect_gloo(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    alarm: Alarm | None = None,
    interface: str | None = None,
    threads: int | None = None,
    connections: Callable[[float], int] | None = None,
    peer_wait: Callable[[], PeerWait] | None = None,
) -> GlooTransport:
    """Connects `size` ranks over TCP; returns when all of them have joined.

    Gloo listens on the interface given, else on the one that GLOO_SOCKET_IFNAME names, else on the one that the
    hostname resolves to.

    Args:
        store: A store with a prefix of its own for this group.
        rank: This rank's index in the group.
        size: Number of ranks.
        timeout: For the connection and for every collective.
        alarm: See `TorchTransport`.
        interface: Name of a network interface of this host, `eth0`.
        threads: Collectives that may be under way at a time; None leaves it to torch, which has two.
        connections: See `GlooTransport`.
        peer_wait: Makes the liveness check while the other ranks connect; None checks the abort signal alone.

    Raises:
        RuntimeError: A rank did not join.
        PeerError: A rank has ended before it had connected, or has given up.
    """
    interfaces = gloo_interfaces() if interface is None else (interface,)

    def connected(name: str) -> TorchGroup:
        own = PrefixStore(name, store)
        others = PeerWait(range(size), rank, None, alarm) if peer_wait is None else peer_wait()
        return _within(timeout, others, lambda: make_gloo(own, rank, size, timeout, interfaces, threads))

    return GlooTransport(connected, rank, size, alarm, connections=connections, timeout=timeout)


def _within(timeout: timedelta, peer_wait: PeerWait, connect: Callable[[], TorchGroup]) -> TorchGroup:
    """Has a thread connect, and waits no longer for it than the time-out, or until another rank has given up or ended.

    Once all addresses are in the store, gloo waits five time-outs for a connection (`Pair::waitUntil` in its tcp
    transport): a rank that has left its address and died there would hold up the others as long. Nothing can wake gloo
    in that, so its thread is left to it; whatever it still makes is released at once.
    """
    made = in_thread(connect, "gradwire connects")
    deadline = time.monotonic() + (timeout + SLICE).total_seconds()  # the store's own error, which knows more, is first
    while True:
        with suppress(Empty):
            return outcome_of(made.get(timeout=SLICE.total_seconds()))
        if (lost := peer_wait.failure("before it had connected")) is not None:
            raise PeerError(str(lost))  # by name: these are not the members of a node
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"a rank that had come did not connect within `timeout` ({timeout.total_seconds():g} s): it has ended, "
                "or a firewall is between it and this rank"
            )


_FOR_PEER: dict[str, Callable[[Tensor, int], Tensor]] = {
    ALL_REDUCE: lambda flat, peer: flat,
    ALL_GATHER: lambda flat, peer: flat,
    ALL_TO_ALL: lambda flat, peer: flat.view(2, flat.numel() // 2)[peer],
}
"""What one of two ranks sends the other of its last tensor."""


def _hand_out(received: Tensor, collectives: Sequence[Collective], rank: int) -> None:
    """Puts the peer's part of each of several collectives, which came in one message, where that one wants it.

    Args:
        received: 1-D uint8: the parts, end to end.
        collectives: Whose parts they are, in this order.
        rank: This one of two.
    """
    start = 0
    for each in collectives:
        output, source = each.tensors[0].view(-1), each.tensors[-1].view(-1)
        own = _FOR_PEER[each.op](source, rank)  # what this rank would send itself
        stop = start + own.nbytes
        arrived = received[start:stop].view(source.dtype)
        start = stop
        if each.op == ALL_REDUCE:
            torch.add(*((arrived, own) if rank else (own, arrived)), out=output)
        else:
            first, second = output.chunk(2) if output.numel() else (output, output)
            (second if rank else first).copy_(own)  # which may lie there already
            (first if rank else second).copy_(arrived)


def scale_in_place(tensor: Tensor, scale: float) -> None:
    """Multiplies `tensor` by `scale`, unless that is 1: integers have no other."""
    if scale != 1.0:
        tensor.mul_(scale)
