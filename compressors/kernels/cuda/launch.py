"""Launches of CUDA kernels on torch's current stream, with addresses as arguments, without waiting for the device."""

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
RUN = 8
"""kRun of csrc/cuda/formats.cuh: elements that a thread decodes at once."""
_MOST_CTAS = 8 * RESIDENT_CTAS
"""CTAs for each multiprocessor. Registers let some kernels keep only three CTAs resident: of a grid of eight, the last
two would run alone in a third turn. With many, a CTA that has finished is replaced at once."""

Argument = int | np.float32 | np.int32 | np.uint32
"""An int is passed as 64 bits: an address, a number of elements or of bytes."""


@functools.cache
def _multiprocessors(device_index: int) -> int:
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


def blocks_for(device: torch.device, threads: int, most: int = _MOST_CTAS) -> int:
    """Returns how many CTAs to start for this many threads, up to a limit; above it, the kernel's loop does the rest.

    Args:
        device: CUDA device on which the kernel runs.
        threads: Number of threads, one for each independent piece of the work.
        most: Maximum number of CTAs for each multiprocessor.
    """
    return min(-(-threads // THREADS), _multiprocessors(_index(device)) * most)


def even_grid(ctas: int, slots: int) -> int:
    """Returns how many CTAs to start of a kernel that loops over its work, so that its last wave is not nearly empty.

    A wave is what runs on the device at a time. 2.02 waves of CTAs with one turn of the loop each take as long as 3.
    So a third of these CTAs is started, which fits into one wave, and all end together after three turns. Of more than
    eight waves the last one costs little, and CTAs that replace each other are balanced better: eight are started.

    Args:
        ctas: Number of CTAs if each had one turn of the loop.
        slots: Number of CTAs that run on the device at a time.

    Returns:
        `ctas` divided by its number of waves, rounded up; 8 * `slots` for more than eight waves.
    """
    turns = -(-ctas // slots)
    return min(ctas, 8 * slots) if turns > 8 else -(-ctas // max(turns, 1))


def blocks_in_waves(device: torch.device, threads: int, resident: int) -> int:
    """Returns how many CTAs to start for this many threads, in whole waves; see `even_grid`.

    Args:
        device: CUDA device on which the kernel runs.
        threads: Number of threads, one for each independent piece of the work.
        resident: Number of CTAs of this kernel that run on a multiprocessor at a time.
    """
    return even_grid(-(-threads // THREADS), _multiprocessors(_index(device)) * resident)


def blocks_of_pieces(numel: int, width: int, block: int) -> int:
    """Returns the number of blocks in all pieces of a tensor; each piece begins a new block, its last may be short.

    Args:
        numel: Elements of the tensor.
        width: Elements of a piece; the last may be shorter.
        block: Elements of a block.
    """
    return numel // width * -(-width // block) + -(-(numel % width) // block)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def stream_of(device: torch.device) -> int:
    """Returns the handle of torch's current stream there."""
    return int(torch.cuda.current_stream(_index(device)).cuda_stream)  # by its number: torch takes a device apart


class _TorchStream:
    """A torch stream in the form that CuPy 14 accepts. Source: NVIDIA cuda-core, "CUDA stream protocol"."""

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
        device: CUDA device of the tensors.
        blocks: CTAs to start; 0 starts nothing.
        arguments: Arguments of the kernel, in its own order and types.
        threads: Threads of each CTA.

    Raises:
        CudaKernelsError: The kernels cannot be used on this machine.
    """
    if not blocks:
        return
    index = _index(device)
    with torch.cuda.device(index):  # also while the file is loaded: CUDA loads it on the current device
        function = load_kernel(file, kernel, index)
        with _cupy_stream(stream_of(device), index):
            function((blocks,), (threads,), tuple(arguments))


_scratch: dict[tuple[str, int | None, int], Tensor] = {}


def scratch(device: torch.device, nbytes: int) -> Tensor:
    """Returns at least `nbytes` of memory for the launches that follow on the current stream.

    One tensor is kept for each stream, and replaced if more is needed: after the first steps nothing is allocated.
    Launches on one stream run one after the other, so they can share it.

    Returns:
        1-D uint8, uninitialised.
    """
    key = device.type, device.index, stream_of(device)
    found = _scratch.get(key)
    if found is None or found.numel() < nbytes:
        found = _scratch[key] = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return found


@functools.lru_cache(maxsize=1024)
def _uploaded(words: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Does what `upload` does, cached for each stream: only work on that stream is ordered after the copy."""
    table = torch.tensor(words, dtype=torch.int64, device="cpu")
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
    """Returns the address of the tensor's first element; 0 for None."""
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
    """Refuses payloads whose rows a kernel would read wrongly.

    Raises:
        ValueError: `rows` is not 2-D, has no row, is not on `device`, or its rows are shorter than `nbytes` or not
            contiguous.
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
        device: Device on which `payloads` must be.
        payloads: 2-D uint8, one row for each piece.
        numel: Elements of the tensor.
        width: Elements of a piece.
        nbytes: Bytes of a payload of `width` elements.

    Raises:
        ValueError: `width` is less than 1, or `payloads` has too few rows, or rows that `check_rows` refuses.
    """
    if not 1 <= width:
        raise ValueError(f"`width` is {width}; wanted the elements of a piece, 1 or more")
    check_rows(device, "payloads", payloads, nbytes)
    if len(payloads) * width < numel:
        raise ValueError(f"`payloads` has {len(payloads)} rows; wanted one for each {width} of {numel} elements")
