"""How a CUDA kernel starts: on torch's current stream, from addresses, without waiting for the device."""

import functools
import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import cast

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors.kernels.cuda.load import load_kernel

DEVICE_TYPE = "cuda"
THREADS = 256
"""Threads of a CTA, but for one kernel; the kernels' own kThreads."""
RESIDENT_CTAS = 8
"""2048 threads fill a multiprocessor. Source: CUDA C++ Programming Guide, "Technical Specifications per Capability"."""
_MOST_CTAS = 8 * RESIDENT_CTAS
"""Of a multiprocessor. Registers let some kernels keep only three CTAs resident: of a grid of eight, two would be left for
a third turn and run alone. With many, each place is taken again as soon as it is free."""

Argument = int | np.float32 | np.int32 | np.uint32
"""An int travels as 64 bits: an address, a number of elements or of bytes."""


@functools.cache
def _multiprocessors(device_index: int) -> int:
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


def blocks_for(device: torch.device, threads: int, most: int = _MOST_CTAS) -> int:
    """Returns how many CTAs to start for this many threads; what is beyond that is the kernel's loop.

    Args:
        device: Where the kernel runs.
        threads: As many as there is work for.
        most: CTAs for each multiprocessor.
    """
    return min(-(-threads // THREADS), _multiprocessors(_index(device)) * most)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def stream_of(device: torch.device) -> int:
    """Returns the handle of torch's current stream there."""
    return int(torch.cuda.current_stream(device).cuda_stream)


class _TorchStream:
    """A stream of torch's in the form that CuPy 14 takes. Source: NVIDIA cuda-core, "CUDA stream protocol"."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@functools.lru_cache(maxsize=64)
def _cupy_stream(handle: int, device_index: int) -> AbstractContextManager[object]:
    cuda = importlib.import_module("cupy.cuda")
    if hasattr(cuda.Stream, "from_external"):
        return cast(AbstractContextManager[object], cuda.Stream.from_external(_TorchStream(handle)))
    return cast(AbstractContextManager[object], cuda.ExternalStream(handle, device_index))  # CuPy 13


def launch(
    file: str, kernel: str, device: torch.device, blocks: int, arguments: Sequence[Argument], threads: int = THREADS
) -> None:
    """Puts a kernel of csrc/cuda on torch's current stream.

    Args:
        file: The .cu file's name, without its suffix.
        kernel: Name of the kernel.
        device: Where the tensors lie.
        blocks: CTAs to start; 0 starts nothing.
        arguments: In the kernel's own order and types.
        threads: Threads of each CTA.

    Raises:
        CudaKernelsError: The kernels cannot be used on this machine.
    """
    if not blocks:
        return
    index = _index(device)
    function = load_kernel(file, kernel, index)
    with torch.cuda.device(index), _cupy_stream(stream_of(device), index):
        function((blocks,), (threads,), tuple(arguments))


_scratch: dict[tuple[str, int | None, int], Tensor] = {}


def scratch(device: torch.device, nbytes: int) -> Tensor:
    """Returns at least `nbytes` of memory for the launches that follow on the current stream.

    It is kept, one piece a stream, and grows: after the first steps nothing is allocated. Launches on one stream run
    one after the other, so they can share it.
    """
    key = device.type, device.index, stream_of(device)
    found = _scratch.get(key)
    if found is None or found.numel() < nbytes:
        found = _scratch[key] = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return found


@functools.lru_cache(maxsize=1024)
def _uploaded(words: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    table = torch.tensor(words, dtype=torch.int64)
    if device.type != "cuda":
        return table
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph is being captured, and a table of addresses would be copied from memory that is "
            "gone when the graph is replayed: run the same step once, on the same tensors, before"
        )
    return table.pin_memory().to(device, non_blocking=True)


def upload(words: Sequence[int], device: torch.device) -> Tensor:
    """Returns the words as int64 on the device, ordered before what follows on the current stream.

    A table that was uploaded before is used again; otherwise it is copied from pinned memory, which waits for nothing.

    Raises:
        RuntimeError: A CUDA graph is being captured, and this table was not uploaded before.
    """
    return _uploaded(tuple(words), device, stream_of(device))


def address(tensor: Tensor | None) -> int:
    """Returns where the tensor's elements start, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def check_tensors(device: torch.device, numel: int, dtype: torch.dtype, **tensors: Tensor | None) -> None:
    """Refuses what a kernel would read or write wrongly.

    Raises:
        ValueError: A tensor is not on the device, not contiguous, or not of this numel and dtype.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        fits = tensor.numel() == numel and tensor.dtype == dtype and tensor.is_contiguous() and tensor.device == device
        if not fits or device.type != DEVICE_TYPE:
            raise ValueError(
                f"`{name}` is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; wanted {numel} "
                f"contiguous elements of {dtype} on one {DEVICE_TYPE} device ({device})"
            )


def check_rows(device: torch.device, name: str, rows: Tensor, nbytes: int) -> None:
    """Refuses a table of payloads that has no row, or whose rows are shorter than `nbytes`, not contiguous or elsewhere.

    Raises:
        ValueError: As said.
    """
    long_enough = rows.dim() == 2 and len(rows) and rows.shape[1] * rows.element_size() >= nbytes
    if not long_enough or rows.stride(1) != 1 or rows.device != device:
        raise ValueError(
            f"`{name}` is {tuple(rows.shape)} {rows.dtype} on {rows.device}; wanted rows of at least "
            f"{nbytes} contiguous bytes on {device}"
        )


def check_pieces(device: torch.device, payloads: Tensor, numel: int, width: int, nbytes: int) -> None:
    """Refuses payloads that are fewer or shorter than the pieces of a tensor need.

    Args:
        device: Where they must lie.
        payloads: 2-D uint8, one row a piece.
        numel: Elements of the tensor.
        width: Of a piece.
        nbytes: Of a payload of `width` elements.

    Raises:
        ValueError: As said, or there is no such width.
    """
    if not 1 <= width:
        raise ValueError(f"`width` is {width}; wanted the elements of a piece, 1 or more")
    check_rows(device, "payloads", payloads, nbytes)
    if len(payloads) * width < numel:
        raise ValueError(f"`payloads` has {len(payloads)} rows; wanted one for each {width} of {numel} elements")
