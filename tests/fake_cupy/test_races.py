"""Streams are a law, in launch.py, too: what a launch touches is seen by the recorder, and no two launches race."""

from collections.abc import Callable
from typing import Any

import pytest

from fake_cuda.drive import on_cuda
from fake_cupy.jobs import COMPRESSORS, alike, owned_by_some
from kernels_on_cpu.emulator import Emulator


@pytest.mark.parametrize("buckets", [alike, owned_by_some])
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_no_launch_has_a_race(
    compressor: str, buckets: Callable[[str], Callable[..., Any]], emulated: Emulator
) -> None:
    on_cuda(4, buckets(compressor), emulated=emulated)
