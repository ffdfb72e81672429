"""The emulator of kernels that all tests of launches run on."""

import os
import shutil

import pytest

from kernels_on_cpu.emulator import Emulator


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    if shutil.which("g++") is None:
        pytest.skip("no g++: the kernels cannot be run on the CPU")
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "emulator"
    shared.mkdir(exist_ok=True)
    return Emulator(shared, watched=True)
