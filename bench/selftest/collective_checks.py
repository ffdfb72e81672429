"""Checks of every collective that gradwire issues on inputs with known sums, and of every call it makes of NCCL."""

import math
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.bench.selftest.checks import Attempt, Mismatch, NotHere, compare
from gradwire.bench.selftest.coverage import NcclSite, RecordedGroup
from gradwire.comms.bootstrap.compat import (
    PrefixStore,
    TorchGroup,
    make_nccl,
    makes_group_calls,
    nccl_backend_of,
    store_of,
)
from gradwire.comms.errors import PeerError
from gradwire.comms.run.programs import issue_together
from gradwire.comms.transport.groups import Transport
from gradwire.comms.transport.nccl import NcclTransport
from gradwire.comms.transport.torch_group import connect_gloo
from gradwire.compressors.base import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, Collective, even_bounds

TIMEOUT = timedelta(seconds=60)
"""Time limit for connecting, and of each collective."""
NUMELS = (1, 17, 40_001)
LARGE_NUMEL = 25 * 2**20 // 4
"""Elements of 25 MiB of float32, the default size of DDP's buckets."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.complex64)
NARROW_TOLERANCE = 2.0**-7
"""Relative tolerance of 16-bit types for factors that are no power of two: a unit in the last place of bfloat16."""


class CollectiveChecks:
    """Checks of the collectives on one rank; all ranks run them in the same order.

    Args:
        group: Default process group, of NCCL or gloo.
        device: Device of this rank, with its index.
        touched: Set to which the places of comms/transport/nccl.py that were used are added.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, touched: set[NcclSite]) -> None:
        self._group = group
        self._device = device
        self._touched = touched
        self._rank, self._size = group.rank(), group.size()
        self._transport: Transport | None = None

    def attempts(self) -> Iterator[tuple[str, Attempt]]:
        """Yields the name and the function of each check."""
        yield "connect", self._connect
        for dtype in DTYPES:
            yield f"all_reduce {_short(dtype)}", partial(self._all_reduce, dtype)
        for kind in ("equal", "uneven", "one owner"):
            for dtype in (torch.float32, torch.bfloat16):
                yield f"slices, {kind}, {_short(dtype)}", partial(self._slices, kind, dtype)
        yield "all_to_all", self._all_to_all
        yield "all_gather", self._all_gather
        yield "broadcast", self._broadcast
        yield "several at once", self._together
        yield "all_reduce of 25 MiB", self._large
        if self._device.type == "cuda":
            yield "the process group's own communicator", self._borrowed
            yield "a group call that fails", self._failed_group_call
            yield "close", self._close

    def _open(self, name: str) -> NcclTransport:
        """Makes a new communicator of NCCL over all ranks, and connects it.

        Args:
            name: Name of the communicator, which no other has.
        """
        store = PrefixStore(f"selftest/{name}", store_of(self._group))
        made = make_nccl(store, self._rank, self._size, TIMEOUT, name=name, global_ranks=range(self._size))
        transport = self._recorded(made, owned=True)
        transport.connect(self._device, TIMEOUT)
        return transport

    def _recorded(self, group: TorchGroup, *, owned: bool) -> NcclTransport:
        recorded: object = RecordedGroup(group, self._touched)
        group_calls = makes_group_calls(group)
        return NcclTransport(recorded, self._rank, self._size, owned=owned, group_calls=group_calls)  # type: ignore[arg-type]

    def _connect(self) -> float:
        if self._device.type == "cuda":
            self._transport = self._open("own")
        else:
            store = PrefixStore("selftest", store_of(self._group))
            self._transport = connect_gloo(store, self._rank, self._size, TIMEOUT)
        return 0.0

    @property
    def _connected(self) -> Transport:
        if self._transport is None:
            raise NotHere("the ranks are not connected")
        return self._transport

    def _given(self, numel: int, dtype: torch.dtype, rank: int | None = None) -> Tensor:
        """Returns a rank's input on the CPU: small whole numbers, whose sum is exact in any order.

        Args:
            numel: Number of elements.
            dtype: Type of the elements.
            rank: Rank whose input is returned; None for this rank.
        """
        return torch.arange(numel).add(self._rank if rank is None else rank).remainder(5).mul(4).to(dtype)

    def _sum(self, numel: int, dtype: torch.dtype, scale: float) -> Tensor:
        total = torch.zeros(numel, dtype=torch.complex128 if dtype.is_complex else torch.float64)
        for rank in range(self._size):
            total += self._given(numel, torch.float64, rank)
        return (total * scale).to(dtype)

    def _scales(self, dtype: torch.dtype) -> tuple[float, ...]:
        """Returns factors of a sum for which NCCL runs different operations; only 1 for integers.

        They are 1 (a sum), 1/n (an average), 0.25 (a premultiplied sum), and a factor that is rounded.
        """
        return (1.0, 1.0 / self._size, 0.25, 1.0 / (3 * self._size)) if _has_fractions(dtype) else (1.0,)

    def _all_reduce(self, dtype: torch.dtype) -> float:
        worst = 0.0
        for numel in NUMELS:
            for scale in self._scales(dtype):
                flat = self._given(numel, dtype).to(self._device)
                self._connected.all_reduce(flat, scale).wait()
                worst = max(worst, _compared(flat, self._sum(numel, dtype, scale), scale, f"{numel} times {scale:.3g}"))
        return worst

    def _large(self) -> float:
        flat = torch.full((LARGE_NUMEL,), float(self._rank), device=self._device)
        self._connected.all_reduce(flat).wait()
        return _compared(flat, torch.full((LARGE_NUMEL,), float(sum(range(self._size)))))

    def _slices(self, kind: str, dtype: torch.dtype) -> float:
        worst = 0.0
        for numel in NUMELS:
            bounds = self._bounds(kind, numel)
            own = slice(bounds[self._rank], bounds[self._rank + 1])
            for scale in self._scales(dtype):
                flat, wanted = self._given(numel, dtype).to(self._device), self._sum(numel, dtype, scale)
                where = f"{numel} in slices {bounds} times {scale:.3g}"
                self._connected.reduce_scatter(flat, bounds, scale).wait()
                worst = max(worst, _compared(flat[own], wanted[own], scale, f"reduce_scatter of {where}"))
                flat[: own.start], flat[own.stop :] = 0, 0  # is undefined
                self._connected.all_gather_slices(flat, bounds).wait()
                worst = max(worst, _compared(flat, wanted, scale, f"all_gather_slices of {where}"))
        return worst

    def _bounds(self, kind: str, numel: int) -> tuple[int, ...]:
        """Returns the offsets that divide a tensor into one slice for each rank, one more than there are ranks.

        Args:
            kind: `equal`, `uneven`, or `one owner`: the first rank has all elements.
            numel: Elements of the tensor.

        Raises:
            NotHere: There is one rank only, and the slices would all be the same.
        """
        size = self._size
        if kind == "equal":
            return (*(numel // size * rank for rank in range(size)), numel)
        if size == 1:
            raise NotHere("needs two ranks: one rank has one slice")
        if kind == "one owner":
            return (0, *([numel] * size))
        return tuple(numel * rank * rank // (size * size) for rank in range(size + 1))

    def _all_to_all(self) -> float:
        numel = 1000
        parts = [self._given(numel, torch.float32).add(100 * self._rank + place) for place in range(self._size)]
        source = torch.cat(parts).to(self._device)
        output = torch.zeros_like(source)
        self._connected.all_to_all(output, source).wait()
        wanted = [self._given(numel, torch.float32, rank).add(100 * rank + self._rank) for rank in range(self._size)]
        return _compared(output, torch.cat(wanted))

    def _all_gather(self) -> float:
        own = self._given(1000, torch.uint8).to(self._device)
        output = torch.zeros(1000 * self._size, dtype=torch.uint8, device=self._device)
        self._connected.all_gather(output, own).wait()
        return _compared(output, torch.cat([self._given(1000, torch.uint8, rank) for rank in range(self._size)]))

    def _broadcast(self) -> float:
        for root in range(self._size):
            flat = self._given(1000, torch.float32).add(self._rank).to(self._device)
            self._connected.broadcast(flat, root).wait()
            _compared(flat, self._given(1000, torch.float32, root).add(root), where=f"from rank {root}")
        return 0.0

    def _together(self) -> float:
        """Checks several collectives in one group: an all-reduce, and exchanges of parts of unequal length."""
        rows = 10 * (self._size + 1)
        bounds = even_bounds(rows, self._size) if self._size == 1 else self._bounds("uneven", rows)
        own = bounds[self._rank + 1] - bounds[self._rank]
        flat = self._given(500, torch.float32).to(self._device)
        sent = self._given(3 * rows, torch.float32).add(self._rank).view(rows, 3).to(self._device)
        received = torch.zeros(self._size * own, 3, device=self._device)
        part = self._given(3 * rows, torch.float32, 0).view(rows, 3)[bounds[self._rank] : bounds[self._rank + 1]]
        whole = torch.zeros(rows, 3, device=self._device)
        issue_together(
            self._connected,
            [
                Collective(ALL_REDUCE, (flat,)),
                Collective(ALL_TO_ALL, (received, sent), bounds),
                Collective(ALL_GATHER, (whole, part.contiguous().to(self._device)), bounds),
            ],
        ).wait()
        _compared(flat, self._sum(500, torch.float32, 1.0), where="all_reduce")
        wanted = [
            self._given(3 * rows, torch.float32, rank).add(rank).view(rows, 3)[bounds[self._rank] :][:own]
            for rank in range(self._size)
        ]
        _compared(received, torch.cat(wanted), where="all_to_all")
        return _compared(whole, self._given(3 * rows, torch.float32, 0).view(rows, 3), where="all_gather")

    def _borrowed(self) -> float:
        backend = nccl_backend_of(self._group, self._device)
        if backend is None:
            raise NotHere("the process group is not NCCL's own: TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it")
        transport = self._recorded(backend, owned=False)
        transport.connect(self._device, TIMEOUT)
        flat = self._given(1000, torch.float32).to(self._device)
        transport.all_reduce(flat).wait()
        transport.close()
        return _compared(flat, self._sum(1000, torch.float32, 1.0))

    def _failed_group_call(self) -> float:
        """Checks a group of calls of which one is refused.

        The error must be raised, the communicator must refuse further collectives, and another one must still work.
        """
        transport = self._open("given up")
        flat, wrong = torch.ones(100, device=self._device), torch.zeros(7, device=self._device)
        try:
            transport.issue_together([Collective(ALL_REDUCE, (flat,)), Collective(ALL_GATHER, (wrong, flat))])
        except (RuntimeError, ValueError):
            pass
        else:
            raise Mismatch("a gather into a tensor that is too short was not refused", math.inf)
        try:
            transport.all_reduce(flat)
        except PeerError:
            transport.close()
            return self._all_reduce(torch.float32)
        raise Mismatch("a communicator that was given up takes another collective", math.inf)

    def _close(self) -> float:
        assert isinstance(self._connected, NcclTransport), "on CUDA the transport is NCCL's"
        self._connected.close()
        return 0.0


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compared(found: Tensor, wanted: Tensor, scale: float = 1.0, where: str = "") -> float:
    """Compares a result with the expected one; returns the largest difference.

    Args:
        found: Result, on any device.
        wanted: Expected result, on the CPU.
        scale: Factor of the sum; only if it is no power of two, a difference is allowed.
        where: Beginning of the error message.

    Raises:
        Mismatch: The difference is larger than allowed.
    """
    exact = math.frexp(scale)[0] == 0.5
    tolerance = 0.0 if exact else NARROW_TOLERANCE if wanted.element_size() == 2 else 1e-6
    if wanted.is_complex():
        found, wanted = torch.view_as_real(found), torch.view_as_real(wanted)
    try:
        return compare(found, wanted, tolerance)
    except Mismatch as error:
        raise Mismatch(f"{where}: {error}" if where else str(error), error.difference) from None
