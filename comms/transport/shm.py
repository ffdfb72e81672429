"""This module implements `Transport` for CPU tensors of ranks on one node, through shared memory; see `ShmGroup`.

The collectives themselves are in csrc/cpu/shm; here arguments are checked and errors raised.

Each rank holds a record lock on the segment, which the kernel drops when the process exits, however it exits. A rank
that waits looks for the locks of those that have not come every 100 ms (csrc/cpu/shm/wait.cpp). If one is gone (and the
process, of a rank that has closed the group, or 5 s have passed), or the time-out is over, it writes the reason and the
missing ranks into the segment and wakes all others; the call raises a `PeerError` with `missing` on each of them.
`abort` does the same without missing ranks.
"""

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from gradwire.comms.bootstrap.probe import PeerWait
from gradwire.comms.errors import MismatchError, PeerError
from gradwire.comms.transport.segment import open_group
from gradwire.comms.transport.works import Done
from gradwire.compressors.compiled import native

BLOCK_NBYTES = 512 << 10
"""Bytes of staging memory for each rank and slot. Larger blocks do not fit the second-level cache, smaller ones need
more barriers. Source: bench/studies/shm_peers.py on a 2-core EPYC VM."""

_SMALLEST_BLOCK_NBYTES = 4096
_DTYPES = {
    dtype: code
    for code, dtype in enumerate(
        (
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int32,
            torch.int64,
            torch.uint8,
            torch.int8,
            torch.int16,
        )
    )
}
_FLOATING = 4
"""Number of floating-point types, which have the smallest codes; csrc/cpu/shm/kernels.h has the same order."""
_BYTES_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_OPS = {"sum": 0, "max": 1, "min": 2}
_DONE = Done()
_STRIDED = torch.strided


def _code(name: str, tensor: Tensor, scale: float) -> int:
    """Returns the native code of a tensor's dtype.

    Args:
        name: Name of the argument, for errors.
        tensor: Tensor to be summed.
        scale: Factor of its elements.

    Raises:
        TypeError: Shared memory cannot sum this dtype.
        ValueError: The tensor is not on the CPU or not contiguous, or `scale` is not 1 for integers.
    """
    code = _DTYPES.get(tensor.dtype)
    _check(name, tensor)
    if code is None:
        raise TypeError(
            f"`{name}` has dtype {tensor.dtype}; shared memory reduces "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _DTYPES)}: convert it first"
        )
    if scale != 1.0 and code >= _FLOATING:
        raise ValueError(f"`scale` is {scale} for an integer `{name}`; wanted 1: scale it in a floating dtype")
    return code


def _number_of(op: str) -> int:
    """Returns the native number of `sum`, `max` or `min`; raises a ValueError for another operation."""
    number = _OPS.get(op)
    if number is None:
        raise ValueError(f"`op` is {op!r}; wanted one of {', '.join(map(repr, _OPS))}")
    return number


def _check(name: str, tensor: Tensor) -> None:
    """Refuses a tensor that is not on the CPU or not contiguous, with a ValueError that names the argument."""
    # Only cheap properties first: `tensor.device.type` takes 0.25 us, a tenth of a small collective.
    if tensor.is_cpu and tensor.layout is _STRIDED and tensor.is_contiguous():
        return
    if not tensor.is_cpu:
        raise ValueError(
            f"`{name}` is on device {tensor.device}; shared memory takes CPU tensors: use the nccl "
            "transport or copy it to the CPU"
        )
    raise ValueError(f"`{name}` of shape {tuple(tensor.shape)} is not contiguous: pass {name}.contiguous()")


def _bytes(name: str, tensor: Tensor) -> tuple[int, int]:
    """Returns (numel, native code) of a supported dtype with as many bytes, to copy a tensor of any dtype."""
    _check(name, tensor)
    code = _DTYPES.get(tensor.dtype)
    if code is not None:
        return tensor.numel(), code
    width = tensor.element_size()
    carrier = _BYTES_OF_WIDTH[width]
    return tensor.numel() * width // carrier.itemsize, _DTYPES[carrier]


class ShmGroup:
    """The collectives of `Transport` among ranks that share memory; all ranks call `create`.

    Every rank adds in rank order, so the bits are the same on all ranks and in every run. float16 and bfloat16 are
    summed in float32 and rounded once. A collective is done when its call returns, and raises what `all_reduce` raises;
    `bounds`, a `root` or an `output` that does not fit is a ValueError.

    Thread safety: collectives are called from one thread at a time. `abort` may be called from any thread.
    """

    def __init__(self, group: native.SharedMemoryGroup, rank: int, size: int, members: Sequence[int]) -> None:
        self.rank = rank
        self.size = size
        self._native = group
        self._members = members

    @classmethod
    def create(
        cls,
        store: Store,
        rank: int,
        size: int,
        *,
        key: str,
        timeout: timedelta,
        block_nbytes: int | None = None,
        peer_wait: PeerWait | None = None,
        members: Sequence[int] | None = None,
    ) -> "ShmGroup":
        """Maps shared memory together with the other ranks; returns when all of them have mapped it.

        Args:
            store: Store that all ranks of the group share.
            rank: 0 <= rank < size.
            size: Number of ranks, all on this node.
            key: Name of the group in `store`; used only once.
            timeout: Longest wait for a peer, here and in each collective.
            block_nbytes: Bytes of one staging block, a multiple of 64; each rank has three. None: `BLOCK_NBYTES`.
            peer_wait: Liveness check while ranks that have not arrived are waited for; None disables it.
            members: Rank in the job of each rank of the group, for `PeerError.missing`; None: they are the same.

        Raises:
            OSError: Rank 0 cannot allocate the memory, or this rank cannot map it.
            ValueError: An argument is out of range, or differs between the ranks.
            PeerError: A rank did not join within `timeout`, has exited, or has failed.
        """
        block = BLOCK_NBYTES if block_nbytes is None else block_nbytes
        if not 1 <= size <= native.SHM_MAX_RANKS:
            raise ValueError(f"`size` is {size}; wanted 1 to {native.SHM_MAX_RANKS}")
        if not 0 <= rank < size:
            raise ValueError(f"`rank` is {rank}; wanted 0 <= rank < {size}")
        if block % 64 or block < max(_SMALLEST_BLOCK_NBYTES, 64 * size):
            raise ValueError(
                f"`block_nbytes` is {block}; wanted a multiple of 64, at least {max(_SMALLEST_BLOCK_NBYTES, 64 * size)}"
            )
        if timeout <= timedelta(0):
            raise ValueError(f"`timeout` is {timeout}; wanted a positive duration")
        members = range(size) if members is None else members
        try:
            opened = open_group(store, rank, size, key, timeout, block, peer_wait)
        except PeerError as error:
            error.missing = tuple(members[index] for index in error.missing)
            raise
        return cls(opened, rank, size, members)

    def _finish(self, passed: bool) -> Done:
        """Returns a finished work, or raises the error of a native call that has failed (`passed` is False).

        Raises:
            MismatchError: The ranks have called different collectives.
            PeerError: A rank has exited, aborted or did not come in time.
        """
        if passed:
            return _DONE
        mismatch, reason, missing = self._native.failure()
        if mismatch:
            raise MismatchError(reason)
        raise PeerError(
            f"shared-memory group of {self.size} (ranks as in it), seen from rank {self.rank}: {reason}",
            tuple(self._members[index] for index in missing),
        )

    def _check_bounds(self, tensor: Tensor, bounds: Sequence[int]) -> list[int]:
        """Returns `bounds` as a list; raises a ValueError if they do not divide `tensor` into a slice for each rank."""
        offsets = list(bounds)
        ascending = all(left <= right for left, right in pairwise(offsets))
        if len(offsets) != self.size + 1 or not ascending or offsets[0] != 0 or offsets[-1] != tensor.numel():
            raise ValueError(
                f"`bounds` is {offsets}; wanted {self.size + 1} ascending offsets from 0 to {tensor.numel()}"
            )
        return offsets

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ValueError(f"`root` is {root}; wanted 0 <= root < {self.size}")

    def all_reduce(self, tensor: Tensor, scale: float = 1.0, op: str = "sum") -> Done:
        """Replaces `tensor` by the reduction of `scale * tensor` over the ranks, with the same bits on all ranks.

        Args:
            tensor: CPU tensor, contiguous; changed in place.
            scale: Factor on every rank's contribution; 1 for integers.
            op: Reduction: `sum`, `max` or `min`.

        Raises:
            TypeError: Shared memory cannot reduce this dtype, such as a complex one.
            ValueError: Wrong device, not contiguous, unknown `op`, or an integer tensor with a `scale`.
            MismatchError: Another rank has called another collective, or with another numel or dtype.
            PeerError: A peer has exited or aborted, or did not come within the time-out.
        """
        code = _code("tensor", tensor, scale)
        number = _number_of(op)
        return self._finish(self._native.all_reduce(tensor.data_ptr(), tensor.numel(), code, number, scale))

    def reduce(self, tensor: Tensor, root: int, scale: float = 1.0, op: str = "sum") -> Done:
        """Reduces like `all_reduce`, but changes only the `tensor` of rank `root`.

        Args:
            tensor: CPU tensor, contiguous.
            root: Rank in this group whose `tensor` is replaced by the result.
            scale: Factor on every rank's contribution; 1 for integers.
            op: Reduction: `sum`, `max` or `min`.
        """
        code = _code("tensor", tensor, scale)
        self._check_root(root)
        number = _number_of(op)
        return self._finish(self._native.reduce(tensor.data_ptr(), tensor.numel(), code, root, number, scale))

    def reduce_scatter(self, tensor: Tensor, bounds: Sequence[int], scale: float = 1.0) -> Done:
        """Sums `scale * tensor` in place, so that `tensor[bounds[r]:bounds[r + 1]]` holds the sum on rank r.

        The rest of `tensor` is not changed.

        Args:
            tensor: CPU tensor, contiguous, of a dtype that `all_reduce` takes.
            bounds: `size + 1` ascending offsets from 0 to `tensor.numel()`; empty slices are fine.
            scale: Factor on every rank's contribution; 1 for integers.
        """
        code = _code("tensor", tensor, scale)
        offsets = self._check_bounds(tensor, bounds)
        return self._finish(self._native.reduce_scatter(tensor.data_ptr(), tensor.numel(), code, offsets, scale))

    def all_gather_slices(self, tensor: Tensor, bounds: Sequence[int]) -> Done:
        """Copies every rank's slice to all ranks, in place, for any dtype; the inverse of `reduce_scatter`."""
        numel, code = _bytes("tensor", tensor)
        offsets = self._check_bounds(tensor, bounds)
        if numel != tensor.numel():  # complex128 is copied as pairs
            offsets = [offset * numel // tensor.numel() for offset in offsets]
        return self._finish(self._native.all_gather_slices(tensor.data_ptr(), numel, code, offsets))

    def all_gather(self, output: Tensor, source: Tensor) -> Done:
        """Fills `output` (numel = size * source.numel(), any dtype) with every rank's `source`, in rank order."""
        self._check_pair(output, source, self.size)
        numel, code = _bytes("source", source)
        return self._finish(self._native.all_gather(output.data_ptr(), source.data_ptr(), numel, code))

    def all_to_all(self, output: Tensor, source: Tensor) -> Done:
        """Sends the r-th of `size` equal parts of `source` (dim 0) to rank r; `output` has its dtype and numel."""
        self._check_pair(output, source, 1)
        if source.numel() % self.size:
            raise ValueError(f"`source` has {source.numel()} elements; wanted a multiple of the {self.size} ranks")
        if source.numel() and output.data_ptr() == source.data_ptr():
            raise ValueError("`output` is `source`; wanted memory of its own")
        numel, code = _bytes("source", source)
        return self._finish(self._native.all_to_all(output.data_ptr(), source.data_ptr(), numel, code))

    def broadcast(self, tensor: Tensor, root: int) -> Done:
        """Copies `tensor` (any dtype) of rank `root` to all ranks, in place."""
        self._check_root(root)
        numel, code = _bytes("tensor", tensor)
        return self._finish(self._native.broadcast(tensor.data_ptr(), numel, code, root))

    def barrier(self) -> Done:
        """Waits until all ranks have arrived.

        Raises:
            PeerError: A peer has exited or aborted, or did not come within the time-out.
        """
        return self._finish(self._native.barrier())

    def _check_pair(self, output: Tensor, source: Tensor, times: int) -> None:
        _check("output", output)
        if output.dtype != source.dtype or output.numel() != times * source.numel():
            raise ValueError(
                f"`output` has {output.numel()} elements of {output.dtype}; wanted "
                f"{times * source.numel()} of {source.dtype}, as `source` says"
            )

    def abort(self, reason: str) -> None:
        """Makes every rank that waits in this group, now or later, raise a PeerError with `reason`."""
        self._native.abort(reason)

    def close(self) -> None:
        """Leaves the group and unmaps its memory; a peer that still waits for this rank raises a PeerError."""
        self._native.close()
