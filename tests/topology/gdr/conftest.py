"""Driver libraries that do as they are told, built from C once, and found by the loader as real ones are."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

COMPILER = shutil.which("cc") or shutil.which("gcc")
SOURCES = Path(__file__).with_name("standins")
LIBRARIES = {
    "cuda": ("libcuda.so.1", SOURCES / "cuda.c"),
    "verbs": ("libibverbs.so.1", SOURCES / "ibverbs.c"),
    "nccl": ("libnccl.so.2", SOURCES / "nccl.c"),
    "nvml": ("libnvidia-ml.so.1", SOURCES.parents[1] / "readers" / "nvml_standin.c"),
}
NVML = {
    "GPUS": 1,
    "SM": 90,
    "LINKS": 18,
    "SWITCH": 1,
    "HIDDEN": 0,
    "NO_P2P": 0,
    "ASLEEP": 0,
    "LOST": 0,
    "MIG": 3,
    "INIT": 0,
}


@pytest.fixture(scope="session")
def built_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every library as `NAME`, and as `NAME.old` an early release that lacks some calls."""
    if COMPILER is None:
        pytest.skip("no C compiler to build the stand-ins with")
    folder = tmp_path_factory.mktemp("standins")
    constants = [f"-D{name}={value}" for name, value in NVML.items()]
    for name, source in LIBRARIES.values():
        for target, flags in ((name, constants), (f"{name}.old", [*constants, "-DOLD"])):
            command = [COMPILER, "-shared", "-fPIC", "-w", *flags, str(source), "-o", str(folder / target)]
            subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture
def standins(built_libraries: Path, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Returns a function to the variables under which a child finds the libraries.

    Its arguments: a plan that they follow, such as `ibv_reg_mr=14`, and the names of those that are old.
    """
    folder = tmp_path / "libraries"

    def variables(plan: str = "", *, old: tuple[str, ...] = ()) -> dict[str, str]:
        folder.mkdir(exist_ok=True)
        for short, (name, _) in LIBRARIES.items():
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(built_libraries / (f"{name}.old" if short in old else name))
        return {"LD_LIBRARY_PATH": str(folder), "STANDIN": plan, "STANDIN_REPORT": str(tmp_path / "report")}

    return variables


@pytest.fixture
def complaints(tmp_path: Path) -> Callable[[], list[str]]:
    """Returns a function to what the stand-ins found wrong: bad calls, and what was not given back."""

    def lines() -> list[str]:
        reported = (tmp_path / "report").read_text().splitlines()
        return [line for line in reported if not line.endswith(": kept 0")]

    return lines
