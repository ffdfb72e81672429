"""Streams are a law, in launch.py, too: each compressor with CUDA's own kernels, launched as on a GPU.

The bits are those of the CPU path; what a launch touches is seen by the recorder, so that the three ways in which
launch.py could be wrong about streams are found when they are planted.
"""

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # registers its operators once, before threads do
from torch import Tensor

from fake_cuda.drive import OPTIONS, REBUILT, on_cpu, on_cuda, train
from fake_cuda.machine import RaceError
from fake_cuda.test_compressed_streams import APPROXIMATE
from gradwire.compressors.kernels.cuda import launch as cuda_launch
from kernels_on_cpu.emulator import Emulator

MORE: dict[str, dict[str, Any]] = {"waterfill4": {}, "chunk_topk": {}}
COMPRESSORS = OPTIONS | MORE


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    if shutil.which("g++") is None:
        pytest.skip("no g++: the kernels cannot be run on the CPU")
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "emulator"
    shared.mkdir(exist_ok=True)
    return Emulator(shared, watched=True)


def job(compressor: str, buckets: Sequence[Sequence[Sequence[str]]], **more: Any) -> Callable[..., Any]:
    settings: dict[str, Any] = {"nodes": "aabb", "plan": "hierarchical", "chunks": 2, "compressor": compressor}
    settings["compressor_options"] = COMPRESSORS[compressor]
    return train(buckets=buckets, **settings | more)


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_the_kernels_of_cuda_give_the_bits_of_the_cpu(compressor: str, emulated: Emulator) -> None:
    body = job(compressor, (REBUILT,) * 4, quiet=True)
    results, _ = on_cuda(4, body, emulated=emulated)
    for have, want in zip(results, on_cpu(4, body), strict=True):
        for one, other in zip(have, want, strict=True):
            for mine, theirs in zip(one, other, strict=True):
                if compressor in APPROXIMATE:
                    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
                else:
                    assert torch.equal(mine, theirs)


ALIKE = {"one": (48, 64), "two": (48, 64), "three": (48, 64), "four": (48, 64)}
"""Buckets of one layout, whose tables have the same words."""


def alike(compressor: str) -> Callable[..., Any]:
    return job(compressor, ((("one",), ("two",), ("three",)),) * 3, shapes=ALIKE)


def owned_by_some(compressor: str) -> Callable[..., Any]:
    """A rank shares a bucket's matrices with three others, and the next bucket's with one of them.

    So what it waits for in the second says nothing of what it has issued last for the first.
    """
    return job(compressor, ((("one", "two", "three"), ("four",)),) * 4, nodes="aaab", chunks=1, shapes=ALIKE)


@pytest.mark.parametrize("buckets", [alike, owned_by_some])
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_no_launch_has_a_race(
    compressor: str, buckets: Callable[[str], Callable[..., Any]], emulated: Emulator
) -> None:
    on_cuda(4, buckets(compressor), emulated=emulated)


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
