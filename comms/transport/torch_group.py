"""This module implements `Transport` on process groups of torch for CPU tensors, with gloo.

`TorchTransport` has the collectives of any such group, `GlooTransport` adds what gloo alone is slow at: exchanges of
large messages in both directions, many small messages between two ranks, and paths with a long round trip.

Gloo sends the ready message of a receiver over the connection that carries the receiver's own data. When two ranks
exchange tensors, the later one finds its peer ready and begins to send at once, and its own ready message is queued
behind that data: the two directions run one after the other, in twice the time. A large exchange therefore sends to
higher ranks through one group and to lower ranks through another. Measured between two nodes of one rank at 200 Mbit/s
with 2 MiB in each direction: 172 ms in one group, 88 ms in two; the wire alone takes 84 ms (2-core EPYC VM,
2026-11-21).
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
from gradwire.comms.transport.works import SLICE, Aborted, Then, Waiting, Works, drain
from gradwire.compressors.base import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, Collective, Work

if TYPE_CHECKING:
    from gradwire.comms.transport.parallel_tcp import Streams

Result = TypeVar("Result")


LARGE_NBYTES = 256 << 10
"""Smallest message, in bytes, that is exchanged through two groups. At 200 Mbit/s two groups were faster than one at
128 KiB between two nodes and slower between four, where the second collective costs more; at 512 KiB they were faster
in both cases."""

FAR_NBYTES = 4 << 10
"""Smallest message, in bytes, that is sent over gradwire's own connections on a long path, once they are open. Gloo
waits a round trip for the receiver's ready message, so that int8 sums of 4 MB in two chunks, 128 KiB a message, took
three round trips of 150 ms (2026-11-25)."""

OPENING_NBYTES = 32 << 10
"""Size in bytes from which the first message makes all ranks measure whether the path is a long one."""

_PLACE = "iiIQ48s"
"""Struct format by which ranks publish where they listen: connections wanted, family, port, token, address."""


TOGETHER_NBYTES = 64 << 10
"""Bytes below which several collectives of two ranks are sent as one message. A collective of gloo takes 0.25 ms of a
processor in gloo's threads and the kernel, copying this many bytes 0.01 ms (2-core EPYC VM, 2026-11-22)."""


class TorchTransport:
    """The collectives of `Transport` on a torch process group.

    Args:
        group: Process group, made by `make_gloo`.
        rank: This rank's index in the group.
        size: Number of ranks.
        abort_reason: Returns the reason why another rank has aborted; called about once a second while a work is waited
            for. Only the two ends of a broken connection see that it is broken, and gloo cannot wake the other ranks.
        timeout: Time-out that the group was made with.
    """

    def __init__(
        self,
        group: TorchGroup,
        rank: int,
        size: int,
        abort_reason: Aborted | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        self.rank = rank
        self.size = size
        self._group = group
        self._aborted = abort_reason
        self._timeout = timeout
        self._in_flight: dict[int, BackendWork] = {}
        """Works of the group that have not been waited for to their end. An entry is added by the thread that
        issues, and removed by the one that waits; other threads read them only after those have ended."""

    def _waiting(self, work: BackendWork) -> Work:
        """Returns a work of the group with a deadline, whose wait ends if another rank aborts."""
        self._in_flight[id(work)] = work
        return Waiting(work, self._aborted or (lambda: None), self._timeout, self._in_flight)

    def all_reduce(self, tensor: Tensor, scale: float = 1.0) -> Work:
        """Multiplies the tensor by `scale`, then starts gloo's all_reduce of it, in place.

        Gloo sums in a ring: each element is summed on one rank and copied to the others.

        Args:
            tensor: Contiguous, on the CPU; changed in place.
            scale: Factor on every rank's contribution; 1 for integers.
        """
        scale_in_place(tensor, scale)
        return self._waiting(self._group.allreduce([tensor], dist.AllreduceOptions()))

    def all_to_all(self, output: Tensor, source: Tensor) -> Work:
        """Sends the r-th of `size` equal parts of `source` (along dim 0) to rank r; see `Transport.all_to_all`."""
        parts = [source.numel() // self.size] * self.size
        return self.exchange(output.view(-1), source.view(-1), parts, parts, source.nbytes // self.size)

    def all_gather(self, output: Tensor, source: Tensor) -> Work:
        """Starts an all_gather of torch's group: fills `output` with each rank's `source`, in rank order."""
        issue = getattr(self._group, ALL_GATHER_SINGLE)
        return self._waiting(issue(output.view(-1), source.view(-1), AllgatherOptions()))

    def reduce_scatter(
        self, tensor: Tensor, bounds: Sequence[int], scale: float = 1.0, order: SumOrder = RANK_ORDER
    ) -> Work:
        """Sends each slice to its owner, which adds the contributions of all ranks in `wait`.

        One message for each peer and (size - 1)/size of the tensor sent: the lower bound. Gloo's own reduce_scatter
        needs equal slices and measured slower.

        Args:
            tensor: 1-D; undefined outside this rank's slice afterwards.
            bounds: `size + 1` ascending offsets of the slices.
            scale: Factor on every rank's contribution.
            order: Order in which the contributions to each element are added.
        """
        sizes = [stop - start for start, stop in pairwise(bounds)]
        own = sizes[self.rank]
        received = tensor.new_empty(own * self.size)
        rows = SlicesToSum(received.view(self.size, own))
        # Only after all memory is allocated: a failed allocation leaves the gradient as it was.
        scale_in_place(tensor, scale)
        work = self.exchange(received, tensor, [own] * self.size, sizes, max(sizes) * tensor.element_size())
        start, stop = bounds[self.rank], bounds[self.rank + 1]
        return Then(work, lambda: order.sum(rows, tensor[start:stop], start, self.size))

    def all_gather_slices(self, tensor: Tensor, bounds: Sequence[int]) -> Work:
        """Copies every rank's slice to all ranks, in place.

        Equal slices are sent by one all_gather; if only the last one is longer, what it has beyond that by a broadcast.
        A single slice that is not empty is sent by a broadcast. In all other cases every rank sends its slice to each
        other rank, and forwards nothing.

        Args:
            tensor: 1-D; slices of the other ranks are overwritten.
            bounds: `size + 1` ascending offsets; rank r's slice is `tensor[bounds[r]:bounds[r + 1]]`.
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
        """All-gathers slices of `numel` elements, and broadcasts what the last slice has beyond that, up to `stop`."""
        even = numel * self.size
        own = tensor[self.rank * numel : (self.rank + 1) * numel].clone()
        works: list[Work] = [self.all_gather(tensor[:even], own)]
        if stop > even:
            works.append(self.broadcast(tensor[even:stop], self.size - 1))
        return Works(works)

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Starts a broadcast of torch's group: rank `root`'s tensor, in place; see `Transport.broadcast`."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._waiting(self._group.broadcast([tensor], options))

    def exchange(
        self, output: Tensor, source: Tensor, output_splits: list[int], source_splits: list[int], largest_nbytes: int
    ) -> Work:
        """Sends runs of a flat tensor to the other ranks, and receives one from each.

        Args:
            output: 1-D; takes the runs that arrive, in rank order.
            source: 1-D; the runs to send, in rank order.
            output_splits: Elements that arrive from each rank, this one included.
            source_splits: Elements for each rank, this one included.
            largest_nbytes: Bytes of the largest message of any rank; the same number on all ranks.
        """
        if len({*output_splits, *source_splits}) == 1:
            output_splits = source_splits = []  # equal parts
        issue = getattr(self._group, ALL_TO_ALL_SINGLE)
        return self._waiting(issue(output, source, output_splits, source_splits, dist.AllToAllOptions()))


class GlooTransport(TorchTransport):
    """The collectives of `Transport` on gloo, with large exchanges at full duplex.

    Args:
        connect: Makes a gloo group of the same ranks with a given name; called again for the second group.
        rank: This rank's index in the group.
        size: Number of ranks.
        abort_reason: Returns the reason why another rank has aborted; called about once a second during waits.
        connections: Maps the round trip in seconds between the two most distant ranks to a number of TCP connections
            for large messages; the largest result of all ranks counts. Below 2, gloo sends all messages. None: 1.
        timeout: Time-out of the groups, and of messages over those connections.

    Attributes:
        takes_sum_order: True, because `reduce_scatter` takes a `SumOrder`.
    """

    takes_sum_order = True

    def __init__(
        self,
        connect: Callable[[str], TorchGroup],
        rank: int,
        size: int,
        abort_reason: Aborted | None = None,
        *,
        connections: Callable[[float], int] | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        self._sockets = GlooSockets()
        self._connect = connect
        super().__init__(self._sockets.opened_by(lambda: connect("first")), rank, size, abort_reason, timeout)
        self._downwards: TorchGroup | None = None
        self._choose = connections
        self._streams: Streams | None = None
        self._adds_as_ring = False
        """True if a trial showed that gloo's ring adds in the order of `ring_runs`; the same on all ranks."""

    def disconnect(self) -> None:
        """Shuts down this rank's TCP connections of gloo, so that waits on both of their ends raise an error."""
        self._sockets.shut_down()

    def drain(self, seconds: float) -> bool:
        """Waits until nothing uses a tensor of this transport any more, after `disconnect`; see `works.drain`.

        Also closes gradwire's own connections, if there are any.

        Args:
            seconds: Longest wait for gloo's works, and again for the thread of those connections.

        Returns:
            Whether nothing uses them any more.
        """
        return drain(self._in_flight, seconds) and (self._streams is None or self._streams.drain(seconds))

    def all_reduce(self, tensor: Tensor, scale: float = 1.0) -> Work:
        """Sums a tensor over the ranks, in place: by gloo's ring, or on long paths with fewer round trips.

        The latter needs gradwire's own connections (see `_streams_for`), and a tensor of at least `FAR_NBYTES` (4 KiB).
        Two ranks exchange their tensors and both add them: one round trip instead of two, and the same bits, because a
        + b = b + a. Of more ranks, each sums the part that it owns in the ring, in the ring's order, and sends the sum
        to all: two round trips instead of 2 (n - 1). They do so only if trial sums had the bits of gloo's ring on all
        ranks.
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
        """Issues an all-reduce in two exchanges: each rank sums the slice that it owns, and sends the sum.

        Args:
            found: Connections to the other ranks.
            tensor: Replaced by the sum.
            scale: Factor on every rank's contribution.
        """
        flat, own = tensor.view(-1), self.rank
        part = ring_numel(flat.numel(), flat.element_size(), self.size)
        slices = [flat[rank * part : (rank + 1) * part] for rank in range(self.size)]
        rows = list(flat.new_empty((self.size, slices[own].numel())))
        rows[own] = slices[own]
        to_sum = SlicesToSum(rows)
        scale_in_place(tensor, scale)
        others = [rank for rank in range(self.size) if rank != own]
        # An owner sends its sum after it has all contributions, so slices that sums arrive in have been sent before.
        work = found.exchange_twice(
            [(rank, slices[rank], rows[rank]) for rank in others],
            lambda: to_sum.sum_as_rings(slices[own], [(slices[own].numel(), own)]),
            [(rank, slices[own], slices[rank]) for rank in others],
        )
        return Then(work, held=tensor)

    def issue_together(self, collectives: Sequence[Collective]) -> Work | None:
        """Issues small collectives of two ranks as one exchange of one message in each direction.

        Args:
            collectives: Collectives to issue; the same on both ranks, in the same order.

        Returns:
            The work of all of them; None, with nothing issued, if there is only one collective, if there are not two
            ranks, if parts are unequal, or if they have so many bytes (`TOGETHER_NBYTES`) that separate messages cost
            no more.
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
        """Gathers each rank's `source` into `output`, in rank order.

        Ranks send over gradwire's own connections if these are open and `source` has at least `FAR_NBYTES`.
        Otherwise two ranks exchange one message, because gloo's ring would send two, and more ranks use gloo's
        all-gather.
        """
        found = self._streams_for(source.nbytes) if self.size > 1 else None
        if found is None and (self.size != 2 or not source.numel()):
            return super().all_gather(output, source)
        own, places = source.view(-1), output.view(self.size, source.numel())
        places[self.rank].copy_(own)
        if found is not None:
            others = [rank for rank in range(self.size) if rank != self.rank]
            return Then(found.exchange([(rank, own, places[rank]) for rank in others]), held=source)
        splits = [own.numel() * (rank != self.rank) for rank in range(2)]
        return Then(self.exchange(places[1 - self.rank], own, splits, splits, own.nbytes), held=source)

    def exchange(
        self, output: Tensor, source: Tensor, output_splits: list[int], source_splits: list[int], largest_nbytes: int
    ) -> Work:
        """Exchanges runs with the other ranks, large messages in both directions at once; see `TorchTransport`.

        Messages are large from `LARGE_NBYTES` (256 KiB) on. Over gradwire's own connections, if they are open, both
        directions run at once from `FAR_NBYTES` (4 KiB) on.
        """
        found = self._streams_for(largest_nbytes) if self.size > 1 else None
        if self.size == 1 or (found is None and largest_nbytes < LARGE_NBYTES):
            return super().exchange(output, source, output_splits, source_splits, largest_nbytes)
        return self._both_ways(output, source, output_splits, source_splits, found)

    def sendrecv(self, other: int, received: Tensor, sent: Tensor) -> Work:
        """Exchanges a tensor with one other rank at full duplex, without the rest of the ranks: for measurements.

        All ranks have called `connect_both_ways` before. The wait of the work does not react to an abort signal; see
        `listening`.

        Args:
            other: Index of the other rank, which makes the same call.
            received: Tensor for what the other rank sends; of the same size.
            sent: Tensor to send.
        """
        upwards, downwards = (cast(PairwiseGroup, group) for group in (self._group, self.connect_both_ways()))
        sending, receiving = (upwards, downwards) if other > self.rank else (downwards, upwards)
        coming = receiving.recv([received], other, 0)
        sent_work = sending.send([sent], other, 0)
        return Works([Waiting(each, None, self._timeout) for each in (sent_work, coming)])

    def listening(self, call: Callable[[], Result]) -> Result:
        """Runs `call` in another thread, and returns its result; raises within a second if another rank aborts.

        Gloo closes a connection when the wait for a single message times out, so that wait cannot be cut into slices as
        those for collectives are. After an abort, `call` goes on in its thread for two seconds, in which the other
        ranks learn the reason; then the connections are shut down, which ends it.

        Args:
            call: Function that uses `sendrecv` of this transport, and may wait for its works.

        Raises:
            PeerError: Another rank has aborted.
            BaseException: Whatever `call` has raised.
        """
        outcome = in_thread(call, "gradwire pairwise")
        while True:
            try:
                return outcome_of(outcome.get(timeout=SLICE.total_seconds()))
            except Empty:
                if self._aborted is not None and (reason := self._aborted()):
                    in_thread(self._disconnect_later, "gradwire disconnects", awaited=False)
                    raise PeerError(reason) from None

    def _disconnect_later(self) -> None:
        """Shuts down the connections after two seconds, in which the other ranks learn the reason of the abort."""
        time.sleep(2 * SLICE.total_seconds())
        self.disconnect()

    def connect_both_ways(self) -> TorchGroup:
        """Connects the group for messages to lower ranks, unless it is connected; every rank calls it."""
        if self._downwards is None:
            self._downwards = self._sockets.opened_by(lambda: self._connect("downwards"))
        return self._downwards

    def connect_for(self, nbytes: int) -> None:
        """Connects the second group if a message of `nbytes` would use it; every rank calls it."""
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
        """Exchanges over gradwire's own connections, if there are any.

        Otherwise messages to higher ranks go through the first group, and messages to lower ranks through the second.
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
        """Returns (rank, view of `source` to send, view of `output` to receive into) for each other rank."""
        sent, taken = (
            [flat[stop - numel : stop] for numel, stop in zip(splits, accumulate(splits), strict=True)]
            for flat, splits in ((source, source_splits), (output, output_splits))
        )
        return [(rank, sent[rank], taken[rank]) for rank in range(self.size) if rank != self.rank]

    def _streams_for(self, nbytes: int) -> "Streams | None":
        """Returns gradwire's own connections if they are to carry a message; None if gloo sends it.

        They are opened at the first message of at least `OPENING_NBYTES` (32 KiB), if the function that chooses their
        number gives two or more, and carry messages of at least `FAR_NBYTES` (4 KiB). Every rank calls this at the same
        point of the sequence of collectives.

        Args:
            nbytes: Bytes of the largest message of any rank.
        """
        if self._choose is not None and nbytes >= OPENING_NBYTES:
            choose, self._choose = self._choose, None
            self._streams = made = self._opened(choose)
            if made is not None:
                self._sockets.connections += [Connection(each, os.fstat(each).st_ino) for each in made.by_descriptor]
                weakref.finalize(self, made.close)
                if self.size > 2 and knows_gloo_sums():
                    as_rings = self._gathered(struct.pack("?", sums_as_rings(self)), "?")
                    self._adds_as_ring = all(each for (each,) in as_rings)
        return self._streams if nbytes >= FAR_NBYTES else None

    def _opened(self, choose: Callable[[float], int]) -> "Streams | None":
        """Agrees with all ranks on a number of connections, and opens as many to each of them; None if fewer than two.

        Also None if a rank has no connection of gloo from which to take its address.

        Args:
            choose: Maps a round trip in seconds to the number of connections to one rank. It gets the second largest of
                the numbers that the ranks contribute, each the longest round trip of its gloo connections; the largest
                result of all ranks counts.
        """
        from gradwire.comms.links.distance import MOST_CONNECTIONS
        from gradwire.comms.transport import parallel_tcp  # here: most networks have short round trips

        own, trip = self._farthest()
        listener = None if own is None else parallel_tcp.StreamListener(*own, backlog=MOST_CONNECTIONS * self.size)
        try:
            trips = sorted(each for (each, *_) in self._gathered(struct.pack("d", trip), "d"))
            # Both ends of a pair measure its round trip, and a busy moment inflates one of them: the second largest.
            count = choose(trips[-2])
            address = "" if own is None else own[1]
            port, token = (0, 0) if listener is None else (listener.port, listener.token)
            family = socket.AF_UNSPEC if own is None else own[0]
            places = self._gathered(struct.pack(_PLACE, count, family, port, token, address.encode()), _PLACE)
            count = max(each[0] for each in places)
            if count < 2 or listener is None or not all(each[4].strip(b"\0") for each in places):
                return None
            deadline = time.monotonic() + self._timeout.total_seconds()
            found: dict[int, list[socket.socket]] = {}
            for rank, (_, kind, port, token, text) in enumerate(places[: self.rank]):
                place = text.strip(b"\0").decode()
                found[rank] = parallel_tcp.connect(kind, place, port, token, self.rank, count, deadline, self._aborted)
            higher = dict.fromkeys(range(self.rank + 1, self.size), count)
            found |= listener.accept(higher, deadline, self._aborted)
        finally:
            if listener is not None:
                listener.close()
        return parallel_tcp.Streams(found, self._timeout, self._aborted)

    def _farthest(self) -> tuple[tuple[int, str] | None, float]:
        """Returns this rank's address family and address on gloo's interface, and its longest round trip in seconds."""
        own, trip = None, 0.0
        for connection in self._sockets.connections:
            with suppress(OSError), socket.socket(fileno=os.dup(connection.descriptor)) as copy:
                own = own or (int(copy.family), str(copy.getsockname()[0]))
                trip = max(trip, TcpInfo.of(copy).trip_seconds)
        return own, trip

    def _gathered(self, own: bytes, form: str) -> list[tuple[Any, ...]]:
        """All-gathers `own`, and returns each rank's values by the struct format `form`, in rank order."""
        source = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        output = source.new_empty(self.size * len(own))
        super().all_gather(output, source).wait()
        return list(struct.iter_unpack(form, output.numpy().tobytes()))

    def _sections(self, flat: Tensor, splits: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Divides a tensor into the runs of lower ranks, of this rank, and of higher ranks."""
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
    abort_reason: Aborted | None = None,
    interface: str | None = None,
    connections: Callable[[float], int] | None = None,
    peer_wait: Callable[[], PeerWait] | None = None,
) -> GlooTransport:
    """Connects `size` ranks over TCP; returns when all of them have joined.

    Gloo listens on `interface`, else on the one that GLOO_SOCKET_IFNAME names, else on the one that the hostname
    resolves to.

    Args:
        store: Store with a prefix of its own for this group.
        rank: This rank's index in the group.
        size: Number of ranks.
        timeout: Time-out of connecting and of every collective.
        abort_reason: Returns the reason why another rank has aborted; called about once a second during waits.
        interface: Name of a network interface of this host, such as `eth0`.
        connections: Maps a round trip in seconds to the number of TCP connections for large messages; None: 1.
        peer_wait: Makes the liveness check while the other ranks connect; None checks the abort signal alone.

    Raises:
        RuntimeError: A rank did not join.
        PeerError: A rank has exited before it had connected, or has aborted.
    """
    interfaces = gloo_interfaces() if interface is None else (interface,)

    def connected(name: str) -> TorchGroup:
        own = PrefixStore(name, store)
        others = PeerWait(range(size), rank, None, abort_reason) if peer_wait is None else peer_wait()
        return connect_within(timeout, others, lambda: make_gloo(own, rank, size, timeout, interfaces))

    return GlooTransport(connected, rank, size, abort_reason, connections=connections, timeout=timeout)


def connect_within(timeout: timedelta, peer_wait: PeerWait, connect: Callable[[], Result]) -> Result:
    """Connects in another thread, for gloo or MPI, and waits until the time-out, or until a rank aborts or exits.

    Once all addresses are in the store, gloo waits five time-outs for a connection (`Pair::waitUntil` in its tcp
    transport), so a rank that published its address and died would delay the others as long. Gloo cannot be interrupted
    there: its thread is abandoned, and what it still makes is released at once.

    Args:
        timeout: Longest wait; one second (`SLICE`) more is allowed, so that the error of the store comes first.
        peer_wait: Liveness check of the ranks that connect, made once a second.
        connect: Function that connects, and returns what it has made.

    Returns:
        The result of `connect`.

    Raises:
        PeerError: A rank has exited before it had connected, or has aborted.
        RuntimeError: `connect` did not return in time, or has raised it.
    """
    made = in_thread(connect, "gradwire connects")
    # One slice after the time-out: the store's own error says more and comes first.
    deadline = time.monotonic() + (timeout + SLICE).total_seconds()
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
"""Op -> function that returns the part of a flat tensor that one of two ranks sends to the other."""


def _hand_out(received: Tensor, collectives: Sequence[Collective], rank: int) -> None:
    """Completes several collectives of two ranks with the peer's parts, which arrived in one message.

    Args:
        received: 1-D uint8: the parts, end to end.
        collectives: Collectives that the parts belong to, in this order.
        rank: This rank, 0 or 1.
    """
    start = 0
    for each in collectives:
        output, source = each.tensors[0].view(-1), each.tensors[-1].view(-1)
        own = _FOR_PEER[each.op](source, rank)  # this rank's own contribution
        stop = start + own.nbytes
        arrived = received[start:stop].view(source.dtype)
        start = stop
        if each.op == ALL_REDUCE:
            torch.add(*((arrived, own) if rank else (own, arrived)), out=output)
        else:
            first, second = output.chunk(2) if output.numel() else (output, output)
            (second if rank else first).copy_(own)  # a no-op if it is there already
            (first if rank else second).copy_(arrived)


def scale_in_place(tensor: Tensor, scale: float) -> None:
    """Multiplies `tensor` by `scale`, unless that is 1, which is the only factor for integers."""
    if scale != 1.0:
        tensor.mul_(scale)
