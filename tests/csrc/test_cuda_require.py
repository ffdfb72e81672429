"""What is missing is named with what to install, and a machine without CUDA never loads CuPy."""

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gradwire.compressors.kernels import dispatch as kernels
from gradwire.compressors.kernels import reference
from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.kernels.cuda.launch import blocks_for, even_grid
from gradwire.compressors.kernels.cuda.load import cached_cubin, load_kernel
from gradwire.compressors.kernels.cuda.require import CudaKernelsError, CudaSetup, check, require_cupy

GOOD = CudaSetup("13.0", 1, 13000, "", 13000, (9, 0), "H200")


def test_a_good_machine_is_accepted() -> None:
    check(GOOD)
    check(dataclasses.replace(GOOD, torch_cuda="12.8", cupy_cuda=12090, driver=13000, capability=(7, 0)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"torch_cuda": None}, r"no CUDA: this torch was built without it.*cupy-cuda13x"),
        ({"torch_cuda": None, "torch_hip": "7.0"}, r"no kernels for AMD's GPUs: torch was built for ROCm 7\.0"),
        ({"device_count": 0}, r"no CUDA device: torch was built for CUDA 13\.0"),
        (
            {"cupy_cuda": None, "cupy_problem": "No module named 'cupy'"},
            r"no CuPy \(No module named 'cupy'\).*`pip install cupy-cuda13x`",
        ),
        ({"cupy_cuda": None, "torch_cuda": "12.8"}, r"`pip install cupy-cuda12x`"),
        ({"cupy_cuda": 12090}, r"CUDA 12\.9, torch for CUDA 13\.0.*pip uninstall cupy-cuda12x.*cupy-cuda13x"),
        ({"driver": 12040}, r"driver supports CUDA 12\.4 at most.*CUDA 13\.0.*cupy-cuda12x"),
        ({"capability": (6, 1), "device_name": "GTX 1080"}, r"GTX 1080 has compute capability 6\.1.*7\.0"),
    ],
)
def test_what_is_missing_is_named(change: dict[str, object], said: str) -> None:
    with pytest.raises(CudaKernelsError, match=said):
        check(dataclasses.replace(GOOD, **change))  # type: ignore[arg-type]  # the names are CudaSetup's own


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_this_machine_without_cuda_says_so() -> None:
    with pytest.raises(CudaKernelsError, match="no CUDA"):
        require_cupy(0)


class NoAnswer(Exception):
    """What CuPy's runtime raises."""


def no_answer() -> int:
    raise NoAnswer("cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version")


def test_a_driver_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(runtimeGetVersion=lambda: 13000, driverGetVersion=no_answer, CUDARuntimeError=NoAnswer)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(CudaKernelsError, match=r"cudaErrorInsufficientDriver.*install a newer driver"):
        require_cupy(0)


def test_a_cupy_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise AttributeError("_ARRAY_API not found\nsecond line")

    monkeypatch.setattr(importlib, "import_module", broken)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(CudaKernelsError, match=r"no CuPy \(_ARRAY_API not found\)"):
        require_cupy(0)


def test_a_missing_nvrtc_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing() -> tuple[int, int]:
        raise RuntimeError("CuPy failed to load libnvrtc.so.13")

    cuda = SimpleNamespace(nvrtc=SimpleNamespace(getVersion=missing))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    with pytest.raises(CudaKernelsError, match=r"no NVRTC \(CuPy failed to load libnvrtc"):
        cached_cubin("cast", 90, tmp_path)


def test_a_table_is_not_uploaded_into_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_launch, "stream_of", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run the same step once"):
        cuda_launch.upload([1, 2], torch.device("cuda", 0))


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(KeyError, match="cast_encode_f64"):
        load_kernel("cast", "cast_encode_f64", 0)


def test_the_cpu_path_never_imports_cupy() -> None:
    script = """
import sys, torch
from gradwire.compressors.codecs.onebit import OneBitCodec
x, payload = torch.randn(64), torch.empty(12, dtype=torch.uint8)
OneBitCodec().encode(x, payload)
found = [name for name in sys.modules if name.startswith(("cupy", "gradwire.compressors.kernels.cuda"))]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_cuda_tensor_asks_for_the_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The door, without a device: what it would choose, and that nothing is chosen silently where that fails."""
    from gradwire.compressors.kernels import cuda
    from gradwire.compressors.kernels.cuda import load as cuda_load

    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(cuda_load, "require_kernels", asked.append)
    assert kernels._choose("cuda") is cuda
    assert kernels._choose("cuda", 5) is cuda
    assert asked == [3, 5], "the tensor's own device, where it is known"


def test_a_device_without_kernels_takes_the_reference_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """AMD's: CuPy, which could be there for another program, is not imported, and the cost is said."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 4))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "AMD Instinct MI300X")
    monkeypatch.setattr(importlib, "import_module", pytest.fail)
    monkeypatch.delitem(kernels.KERNELS_ON, "cuda", raising=False)
    device = torch.device("cuda", 1)
    try:
        assert kernels.kernels_for(device) is kernels.kernels_for(device) is reference
        assert kernels.kernels_name(device) == "reference"
    finally:
        kernels.KERNELS_ON.pop("cuda", None)
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warned) == 1 and "torch was built for ROCm 7.0" in warned[0] and "5 to 140 times as many" in warned[0]


@pytest.mark.parametrize("slots", [1, 7, 396])
def test_a_grid_of_few_waves_ends_all_at_once(slots: int) -> None:
    for ctas in (1, slots - 1, slots, slots + 1, 2 * slots + 8, 8 * slots, 8 * slots + 1, 50 * slots):
        grid = even_grid(ctas, slots)
        turns = -(-ctas // slots)
        if turns > 8:
            assert grid == 8 * slots
        elif ctas:
            assert grid <= min(ctas, slots), "resident at once"
            assert -(-ctas // grid) == turns, "and no more turns than there must be"
        else:
            assert grid == 0


@pytest.mark.gpu
def test_the_grid_is_what_the_device_holds() -> None:
    device = torch.device("cuda", 0)
    assert blocks_for(device, 1) == 1
    assert blocks_for(device, 1 << 40, 8) == 8 * torch.cuda.get_device_properties(0).multi_processor_count
