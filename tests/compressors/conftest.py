"""Inputs and layouts that the laws are checked on, and the two sets of kernels."""

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from gradwire import _native
from gradwire.compressors.base import Layout, Slice
from gradwire.compressors.kernels import native

NUMELS = (1, 2, 7, 15, 17, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 2500, 4097)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["plain", "avx2", "avx512"])
def native_kernels(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The compiled kernels, limited to one instruction set."""
    best = _native.isa()
    _native.limit_isa(request.param)
    if _native.isa() != request.param:
        pytest.skip(f"this processor has no {request.param}")
    yield native
    _native.limit_isa(best)


@pytest.fixture
def layout() -> Layout:
    """Two matrices, a convolution, a bias, and half of a parameter that another shard continues."""
    shapes = {"a.weight": (70, 50), "a.bias": (37,), "conv.weight": (24, 8, 3, 3), "b.weight": (40, 60)}
    slices, start = [], 0
    for name, shape in shapes.items():
        numel = torch.Size(shape).numel()
        slices.append(Slice(name, shape, 0, start, numel))
        start += numel
    slices.append(Slice("cut.weight", (30, 30), 450, start, 450))
    return Layout(tuple(slices))


@pytest.fixture
def each_numel() -> Callable[[Callable[[int], None]], None]:
    """A function that runs a check on each number of elements, and says with which one it failed.

    One test for all of them: pytest would take longer to set a test up than the check takes.
    """

    def run(check: Callable[[int], None]) -> None:
        for numel in NUMELS:
            try:
                check(numel)
            except Exception as error:
                error.add_note(f"with {numel} elements")
                raise

    return run
