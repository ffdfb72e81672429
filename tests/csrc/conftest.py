"""The CUDA kernels on what this machine has: their own source on the CPU, or a GPU."""

import ctypes
import fcntl
import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.kernels.cuda.load import ENTRY_POINTS, FOLDER, kernel_source

NUMELS = (1, 7, 33, 129, 513, 1023, 1024, 1025, 4097, 9001)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device")


class Emulator:
    """Compiled kernels whose threads are fibers; see cuda_on_cpu.h."""

    def __init__(self, folder: Path) -> None:
        """Compiles what is not in the folder yet: the workers of one run share it, and one of them compiles."""
        with Path(folder, "lock").open("w") as lock, ThreadPoolExecutor(os.cpu_count()) as pool:
            fcntl.flock(lock, fcntl.LOCK_EX)
            libraries = list(pool.map(functools.partial(self._build, folder), ENTRY_POINTS))
        self._libraries = dict(zip(ENTRY_POINTS, libraries, strict=True))

    @staticmethod
    def _build(folder: Path, name: str) -> ctypes.CDLL:
        source, library, unfinished = (folder / f"{name}.{ending}" for ending in ("cpp", "so", "so.part"))
        if library.exists():
            return ctypes.CDLL(str(library))
        launchers = "\n".join(f"EMULATE({kernel})" for kernel in ENTRY_POINTS[name])
        source.write_text(f'#include "cuda_on_cpu.h"\n{kernel_source(name)}\n{launchers}\n')
        subprocess.run(
            [
                "g++",
                "-std=c++17",
                "-O1",
                "-fPIC",
                "-shared",
                "-ffp-contract=off",
                "-fno-strict-aliasing",
                "-U_FORTIFY_SOURCE",  # its longjmp takes a jump to another stack for an error
                "-Wno-unknown-pragmas",
                f"-I{Path(__file__).parent}",
                f"-I{FOLDER}",
                str(source),
                "-o",
                str(unfinished),
            ],
            check=True,
        )
        unfinished.rename(library)
        return ctypes.CDLL(str(library))

    def launch(
        self,
        file: str,
        kernel: str,
        device: torch.device,
        blocks: int,
        arguments: Sequence[cuda_launch.Argument],
        threads: int = cuda_launch.THREADS,
    ) -> None:
        if not blocks:
            return
        words = [np.int64(x) if isinstance(x, int) else x for x in arguments]
        cells = [np.array([word]) for word in words]
        pointers = (ctypes.c_void_p * len(cells))(*(cell.ctypes.data for cell in cells))
        nbytes = (ctypes.c_size_t * len(cells))(*(cell.nbytes for cell in cells))
        wrong = getattr(self._libraries[file], f"emulate_{kernel}")(blocks, threads, pointers, nbytes, len(cells))
        assert not wrong, f"{kernel}: argument {wrong} has another width than the kernel's parameter (-1: their number)"


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    if shutil.which("g++") is None:
        pytest.skip("no g++: the kernels cannot be run on the CPU")
    # Beside the folders of all of pytest-xdist's workers; without workers this run's own.
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "emulator"
    shared.mkdir(exist_ok=True)
    return Emulator(shared)


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the kernels run: few CTAs on the CPU, so that the grid-stride loops turn, or a real GPU."""
    if request.param == "gpu":
        yield torch.device("cuda", torch.cuda.current_device())
        return
    emulated: Emulator = request.getfixturevalue("emulator")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_launch, "DEVICE_TYPE", "cpu")
        patch.setattr(cuda_launch, "launch", emulated.launch)
        patch.setattr(cuda_launch, "blocks_for", lambda device, threads, most=0: min(-(-threads // 256), 2))
        patch.setattr(cuda_launch, "blocks_in_waves", lambda device, threads, resident: min(-(-threads // 256), 2))
        patch.setattr(cuda_launch, "stream_of", lambda device: 0)
        yield torch.device("cpu")


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
