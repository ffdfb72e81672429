"""Puts the stand-in below CuPy, in a process that runs in the stand-in's environment.

CuPy's own runtime, which lies inside its extension module, is made the stand-in's before that module's first line runs;
and gradwire's kernels, compiled for the host, are given to the driver. Nothing of CuPy is changed on disk.
"""

import ctypes
import fcntl
import hashlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

RUNTIME_MODULE = "cupy_backends.cuda.api.runtime"
RACES = "GPU_STANDIN_KERNEL_RACES"
"""Environment variable: 1 looks for races between a kernel's threads, and ends the process where there is one."""
_LAZY = os.RTLD_LAZY | os.RTLD_GLOBAL


class DriverError(ImportError):
    """The stand-in cannot be put below CuPy; the message says why."""


class CupyFinder(importlib.abc.MetaPathFinder):
    """Finds CuPy's module of the CUDA runtime, and prepares it.

    Args:
        libraries: The folder of the stand-in's libraries.
    """

    def __init__(self, libraries: Path) -> None:
        self._libraries = libraries

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See importlib.abc.MetaPathFinder."""
        if fullname != RUNTIME_MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        driver = load_driver(self._libraries)
        ctypes.CDLL(spec.origin, os.RTLD_NOW)  # the import will get this one
        take = driver.gpu_standin_take_runtime_of
        take.restype = ctypes.c_char_p
        if reason := take(spec.origin.encode()):
            raise DriverError(f"CuPy's CUDA runtime cannot be replaced: {reason.decode()}")
        give_kernels(driver, self._libraries)
        return spec


def load_driver(libraries: Path) -> ctypes.CDLL:
    """Loads the stand-in's driver, so that whoever asks for `libcuda.so.1` after that gets it."""
    return ctypes.CDLL(str(libraries / "libcuda.so.1"), _LAZY)


def give_kernels(driver: ctypes.CDLL, libraries: Path) -> None:
    """Compiles gradwire's kernels for the host, where their sources have changed, and gives them to the driver."""
    from gradwire.compressors.kernels.cuda.load import ENTRY_POINTS, kernel_source
    from kernels_on_cpu import emulator

    watched = os.environ.get(RACES) == "1"
    texts = {name: kernel_source(name) for name in ENTRY_POINTS}
    for path in sorted(emulator.HERE.glob("*.*")):
        texts[path.name] = path.read_text(encoding="utf-8")
    digest = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:16]
    folder = libraries / f"kernels-{digest}"
    folder.mkdir(exist_ok=True)
    with Path(folder, "lock").open("w") as lock:  # ranks of one job begin together
        fcntl.flock(lock, fcntl.LOCK_EX)
        engine = emulator.build_engine(folder)
        built = {name: emulator.build_named(folder, name, watched=watched) for name in ENTRY_POINTS}
        words = {name: emulator.parameter_names(folder, name) for name in ENTRY_POINTS}
    give = driver.gpu_standin_kernels
    give.restype = ctypes.c_char_p
    for name, library in built.items():
        lines = [" ".join((kernel, *names)).encode() for kernel, names in words[name].items()]
        array = (ctypes.c_char_p * (len(lines) + 1))(*lines, None)
        if reason := give(str(engine).encode(), str(library).encode(), array, int(watched)):
            raise DriverError(f"the kernels of {library} cannot be loaded: {reason.decode()}")


def install(libraries: str) -> None:
    """Called when the environment's Python begins, by a .pth file.

    Args:
        libraries: The folder of the stand-in's libraries.
    """
    sys.meta_path.insert(0, CupyFinder(Path(libraries)))
