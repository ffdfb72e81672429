"""The three ways in which launch.py could be wrong about streams, planted: each is found as a race."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_cuda.drive import on_cuda
from fake_cuda.machine import RaceError
from fake_cupy.jobs import alike, owned_by_some
from gradwire.compressors.kernels.cuda import launch as cuda_launch
from kernels_on_cpu.emulator import Emulator


def _shared_scratch(device: torch.device, nbytes: int, made: dict[Any, Tensor]) -> Tensor:
    if device not in made or made[device].numel() < nbytes:
        made[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return made[device]


def plant(what: str, patch: pytest.MonkeyPatch) -> None:
    """Makes launch.py wrong."""
    if what == "scratch shared by streams":
        patch.setattr(cuda_launch, "scratch", functools.partial(_shared_scratch, made={}))
    elif what == "tables shared by streams":
        real = cuda_launch._uploaded
        patch.setattr(cuda_launch, "_uploaded", functools.cache(lambda words, device, stream: real(words, device, 0)))
    else:
        assert what == "kernels on CuPy's default stream"
        patch.setattr(cuda_launch, "_cupy_stream", functools.cache(lambda handle, index: contextlib.nullcontext()))


@pytest.mark.parametrize(
    ("what", "compressor", "buckets"),
    [
        ("scratch shared by streams", "dgc", alike),
        ("scratch shared by streams", "powersgd", owned_by_some),
        ("tables shared by streams", "dgc", alike),
        ("kernels on CuPy's default stream", "int8", alike),
        ("kernels on CuPy's default stream", "dgc", alike),
    ],
)
def test_a_launch_that_is_wrong_about_streams_is_found(
    what: str,
    compressor: str,
    buckets: Callable[[str], Callable[..., Any]],
    emulated: Emulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(what, monkeypatch)
    with pytest.raises(RaceError, match="race"):
        on_cuda(4, buckets(compressor), emulated=emulated)
