"""gradwire's own launches on the fake GPUs: launch.py as it is, above a fake CuPy that runs the kernels on the CPU.

What a launch reads and writes is what its threads touch: the kernels are compiled so that every access is seen
(tests/kernels_on_cpu). So a table, scratch memory or a stream that launch.py gets wrong is a race like any other.
"""

import bisect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor

from fake_cuda.clocks import Block, Timeline
from fake_cuda.machine import machine
from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.kernels.cuda import load as cuda_load
from kernels_on_cpu.emulator import Emulator, Touched


class _Current(threading.local):
    """CuPy's current streams, by their handles: the innermost last. Without any it is the default stream."""

    def __init__(self) -> None:
        self.handles: list[int] = []


_current = _Current()


class FakeCupyStream:
    """In the place of cupy.cuda.Stream, of which `from_external` alone is used."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @classmethod
    def from_external(cls, stream: Any) -> "FakeCupyStream":
        """A stream of somebody else's."""
        _, handle = stream.__cuda_stream__()
        return cls(handle)

    def __enter__(self) -> Self:
        _current.handles.append(self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        _current.handles.pop()


def _timeline() -> Timeline:
    """What CuPy would launch on."""
    own = machine().devices[machine().here.device]
    if not _current.handles:
        return own.default
    return next(each for each in own.timelines if each.number == _current.handles[-1])


def _located(ranges: list[Touched]) -> Iterator[tuple[Touched, Block, Tensor]]:
    """Each range of memory with the block that it lies in, and a tensor of that extent.

    Raises:
        AssertionError: A range lies in no block: a kernel has left its tensors, or one was freed.
    """
    blocks = machine().blocks()
    bases = [block.base for block in blocks]
    for each in ranges:
        place = bisect.bisect_right(bases, each.start) - 1
        block = blocks[place] if place >= 0 else None
        if block is None or each.stop > block.base + block.nbytes:
            raise AssertionError(f"bytes {each.start:#x} to {each.stop:#x} are of no tensor that is alive")
        extent = torch.empty(each.stop - block.base, dtype=torch.uint8, device="meta")[each.start - block.base :]
        yield each, block, extent


class FakeFunction:
    """In the place of a kernel that CuPy has loaded."""

    def __init__(self, emulated: Emulator, file: str, kernel: str) -> None:
        self._emulated, self._file, self._kernel = emulated, file, kernel

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """Runs the kernel, and notes on CuPy's current stream what it has touched."""
        library, order = self._emulated.libraries[self._file], self._emulated.next_order()
        ranges = library.launch(self._kernel, grid[0], block[0], args, seed=order, keep_ranges=True)
        reads: list[tuple[Block, Tensor]] = []
        writes: list[tuple[Block, Tensor]] = []
        for each, memory, extent in _located(ranges):
            if each.read:
                reads.append((memory, extent))
            if each.written:
                writes.append((memory, extent))
        machine().access(_timeline(), self._kernel, reads, writes)


def forget() -> None:
    """Empties what launch.py keeps from step to step."""
    cuda_launch._scratch.clear()
    cuda_launch._uploaded.cache_clear()
    cuda_launch._cupy_stream.cache_clear()
    cuda_launch._multiprocessors.cache_clear()


@contextmanager
def launched_by(emulated: Emulator) -> Iterator[None]:
    """Inside it launch.py finds this CuPy and these kernels, and refuses those that no HookState has loaded before.

    Args:
        emulated: A watched one.
    """
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    vars(cupy)["cuda"] = cuda
    vars(cuda)["Stream"] = FakeCupyStream

    loaded: set[tuple[str, str, int]] = set()

    def load(file: str, kernel: str, device_index: int) -> FakeFunction:
        loaded.add((file, kernel, device_index))
        return FakeFunction(emulated, file, kernel)

    def find(file: str, kernel: str, device_index: int) -> FakeFunction:
        assert (file, kernel, device_index) in loaded, f"{file}.{kernel} is compiled in the first step"
        return FakeFunction(emulated, file, kernel)

    forget()
    try:
        with (
            patch.dict(sys.modules, {"cupy": cupy, "cupy.cuda": cuda}),
            patch.object(cuda_load, "load_kernel", load),
            patch.object(cuda_launch, "load_kernel", find),
        ):
            yield
    finally:
        forget()
