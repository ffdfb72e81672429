"""Compiled files are loaded once for each device, on that device, for an architecture that the compiler knows."""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gradwire.compressors.kernels import cuda, dispatch, reference
from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.kernels.cuda import load
from gradwire.compressors.kernels.cuda.families import FAMILIES
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


class SlowCompiler:
    """An NVRTC that notes each compilation as a line of a file, and takes its time."""

    NVRTCError = ValueError

    def __init__(self, notes: Path) -> None:
        self._notes = notes

    def getVersion(self) -> tuple[int, int]:
        return 13, 0

    def getSupportedArchs(self) -> list[int]:
        return [80, 90]

    def createProgram(self, source: str, name: str, headers: object, names: object) -> str:
        return name

    def compileProgram(self, program: str, options: object) -> None:
        with self._notes.open("a") as file:
            file.write(f"{program}\n")
        time.sleep(0.3)

    def getCUBIN(self, program: str) -> bytes:
        return program.encode()

    def destroyProgram(self, program: str) -> None:
        pass


class Loaded:
    """What CuPy makes of a compiled file."""

    def __init__(self, path: str) -> None:
        assert Path(path).read_bytes()

    def get_function(self, name: str) -> object:
        return lambda grid, block, arguments: None


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine whose NVRTC compiles slowly, and whose user has no compiled kernels; yields the file of its notes."""
    notes = tmp_path / "notes"
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nvrtc=SlowCompiler(notes)))
    monkeypatch.setattr(load, "require_cupy", lambda index: SimpleNamespace(RawModule=Loaded))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.delitem(dispatch.KERNELS_ON, "cuda", raising=False)
    caches = (load_kernel, load._load_file, load._cache_folder)
    for each in caches:
        each.cache_clear()
    yield notes
    dispatch.KERNELS_ON.pop("cuda", None)
    for each in caches:
        each.cache_clear()


def test_one_rank_of_a_node_compiles_and_the_others_wait(compiler: Path) -> None:
    """Four ranks that need the same kernels at the same time: each file is compiled once, and all four load it."""
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)

    def rank(index: int) -> None:
        start.wait(60)
        dispatch.prepare_kernels(torch.device("cuda", index), {"quantize", "dgc"})
        os._exit(0 if dispatch.kernels_name(torch.device("cuda", index)) == "cuda" else 1)

    ranks = [context.Process(target=rank, args=(index,)) for index in range(4)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
    assert [each.exitcode for each in ranks] == [0] * 4
    assert sorted(compiler.read_text().split()) == ["dgc_select.cu", "dgc_step.cu", "quantize.cu"]


def test_a_waiting_rank_compiles_for_itself_when_the_other_takes_too_long(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(load, "COMPILE_SECONDS", 0.1)
    with load._one_at_a_time(tmp_path):  # a process that was stopped while it compiles
        assert load.cached_cubin("cast", 90, tmp_path).exists()
    assert compiler.read_text() == "cast.cu\n"


def test_kernels_that_the_compiler_refuses_are_replaced_before_the_first_step(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str, architecture: int) -> bytes:
        raise CudaKernelsError(f"NVRTC refuses {name}")

    device = torch.device("cuda", 0)
    monkeypatch.setattr(load, "require_kernels", lambda index: None)
    assert dispatch.kernels_for(device) is cuda
    monkeypatch.setattr(load, "compile_cubin", refuse)
    dispatch.prepare_kernels(device, {"cast"})
    assert dispatch.kernels_for(device) is reference
    assert "torch operators, which are slower on a GPU" in caplog.text and "NVRTC refuses cast" in caplog.text


@pytest.mark.usefixtures("compiler")
def test_a_codec_without_kernels_for_cuda_is_noticed_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(load, "require_kernels", lambda index: None)
    dispatch.prepare_kernels(device, {"cast"})
    assert dispatch.kernels_for(device) is cuda
    dispatch.prepare_kernels(device, {"cast", "ternary"})
    assert dispatch.kernels_for(device) is reference
    assert "counts that: csrc/cuda has kernels for dgc, cast, " in caplog.text
    assert "not for ternary" in caplog.text


def test_each_file_of_kernels_has_grids_for_its_block_codec() -> None:
    assert set(load.FILES_OF_FAMILY) - {dispatch.DGC_FAMILY, dispatch.POWERSGD_FAMILY} == set(FAMILIES)


def test_a_user_without_a_home_shares_a_folder_that_nobody_else_can_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = load._temporary_folder()
    assert shared == load._temporary_folder() == tmp_path / f"gradwire-cuda-{os.getuid()}"
    assert shared.stat().st_mode & 0o777 == 0o700
    shared.chmod(0o777)  # somebody else's, who got there first
    assert load._temporary_folder() not in (shared, load._temporary_folder())
    shared.rmdir()
    shared.symlink_to(tmp_path)
    assert load._temporary_folder() != shared
