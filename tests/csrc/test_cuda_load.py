"""Compiled files are loaded once for each device, on that device, for an architecture that the compiler knows."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.kernels.cuda import load
from gradwire.compressors.kernels.cuda.load import load_kernel, nearest_architecture
from gradwire.compressors.kernels.cuda.require import CudaKernelsError


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NVRTC of CUDA 12.8."""
    nvrtc = SimpleNamespace(getVersion=lambda: (12, 8), getSupportedArchs=lambda: [75, 80, 86, 89, 90, 100, 101, 120])
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nvrtc=nvrtc))


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(("device", "wanted"), [(80, 80), (87, 86), (90, 90), (103, 101), (121, 120)])
def test_a_newer_minor_runs_what_an_older_one_is_compiled_for(device: int, wanted: int) -> None:
    assert nearest_architecture(device) == wanted


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("device", [70, 72, 110])
def test_another_major_and_an_older_minor_are_refused(device: int) -> None:
    with pytest.raises(CudaKernelsError, match=rf"NVRTC 12\.8 compiles for sm_75 to sm_120, not for sm_{device}"):
        nearest_architecture(device)


def test_a_file_is_loaded_once_for_each_device_and_on_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded: list[tuple[str, int]] = []
    here = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, here[0] = here[0], index
        yield
        here[0] = before

    class RawModule:
        def __init__(self, path: str) -> None:
            loaded.append((Path(path).name, here[0]))

        def get_function(self, name: str) -> object:
            return lambda grid, block, arguments: None

    streams = SimpleNamespace(from_external=lambda stream: nullcontext())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(Stream=streams))
    monkeypatch.setattr(load, "require_cupy", lambda index: SimpleNamespace(RawModule=RawModule))
    monkeypatch.setattr(load, "cached_cubin", lambda name, architecture, folder: tmp_path / name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(cuda_launch, "stream_of", lambda of: 0)
    for each in (load_kernel, load._load_file, cuda_launch._cupy_stream):
        each.cache_clear()
    try:
        for index in (1, 2, 1):
            for kernel in ("quantize_encode_8", "quantize_decode_reduce_8"):
                cuda_launch.launch("quantize", kernel, torch.device("cuda", index), 1, ())
    finally:
        for each in (load_kernel, load._load_file, cuda_launch._cupy_stream):
            each.cache_clear()
    assert loaded == [("quantize", 1), ("quantize", 2)]
