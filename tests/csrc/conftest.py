"""The CUDA kernels on what this machine has: their own source on the CPU, or a GPU."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kernels_on_cpu.emulator import RACES, Emulator
from kernels_on_cpu.run_on import run_on

NUMELS = (1, 7, 33, 129, 513, 1023, 1024, 1025, 4097, 9001)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device")


@pytest.fixture(scope="session")
def compiled_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the kernels are compiled for the CPU: one folder for all of pytest-xdist's workers."""
    if shutil.which("g++") is None:
        pytest.skip("no g++: the kernels cannot be run on the CPU")
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "emulator"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="session")
def emulator(compiled_folder: Path) -> Emulator:
    """Runs the kernels on the CPU; with GRADWIRE_KERNEL_RACES=1 all tests look for races."""
    return Emulator(compiled_folder, watched=os.environ.get(RACES) == "1")


@pytest.fixture(scope="session")
def watched_emulator(compiled_folder: Path) -> Emulator:
    """The same with kernels whose every access is looked at: some ten times slower."""
    return Emulator(compiled_folder, watched=True)


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the kernels run: on the CPU, each launch in another order of threads and CTAs, or on a real GPU."""
    if request.param == "gpu":
        yield torch.device("cuda", torch.cuda.current_device())
        return
    with pytest.MonkeyPatch.context() as patch:
        yield run_on(request.getfixturevalue("emulator"), patch)


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
