"""The kernels of csrc/cuda: one text for each file, compiled by NVRTC, kept on disk, loaded by CuPy.

CuPy's own compilation adds -ftz=true after the caller's options (cupy issue 9576), which would turn subnormal numbers
into zero, so that payloads would differ from the CPU's. So NVRTC is called directly, through CuPy's binding of it, and
`RawModule` gets the compiled file.
"""

import fcntl
import functools
import hashlib
import importlib
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast

import torch

from gradwire.compressors.kernels.cuda.require import CudaKernelsError, require_cupy

logger = logging.getLogger("gradwire")

FOLDER = Path(__file__).resolve().parents[3] / "csrc"
"""csrc/ lies beside compressors/, in a checkout and in an installed package alike."""

ENTRY_POINTS: dict[str, tuple[str, ...]] = {
    "cast": tuple(
        f"cast_{stage}_{format}" for stage in ("encode", "decode_reduce", "reduce_encode") for format in ("f16", "bf16")
    ),
    "onebit": ("onebit_encode", "onebit_decode_pieces", "onebit_decode_reduce", "onebit_reduce_encode"),
    "quantize": tuple(
        f"quantize_{stage}_{bits}"
        for stage in ("encode", "decode_pieces", "decode_reduce", "reduce_encode")
        for bits in (8, 4)
    ),
    "waterfill": (
        "waterfill_encode",
        "waterfill_decode_pieces",
        "waterfill_decode_reduce",
        "waterfill_reduce_encode",
    ),
    "dgc_step": ("dgc_sample", "dgc_advance"),
    "dgc_select": ("dgc_radix", "dgc_count", "dgc_write", "dgc_sum", "dgc_scatter_add"),
    "powersgd": ("powersgd_orthogonalize", "powersgd_restore"),
}
"""File of csrc/cuda, without its suffix -> the `__global__` functions it defines."""

FILES_OF_FAMILY = {"dgc": ("dgc_step", "dgc_select")} | {
    name: (name,) for name in ENTRY_POINTS if not name.startswith("dgc_")
}
"""Family of kernels, as `prepare_kernels` takes it -> the files of csrc/cuda that hold its kernels."""

COMPILE_SECONDS = 120.0
"""Longest wait for another process that compiles; after it this process compiles for itself. NVRTC takes seconds."""
POLL_SECONDS = 0.05
"""Seconds between two attempts to take the lock of that wait."""

_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)


def _inline(file: Path, seen: set[Path]) -> str:
    """Returns the file's text with each file that it includes by quotes in place of its first include.

    Later includes of the same file, and `#pragma once`, are left out.

    Args:
        file: File of csrc.
        seen: Files that are in the text already; files are added to it.
    """
    if file in seen:
        return ""
    seen.add(file)

    def replace(match: re.Match[str]) -> str:
        beside = file.parent / match[1]
        return _inline(beside if beside.exists() else FOLDER / match[1], seen)

    return _INCLUDE.sub(replace, file.read_text().replace("#pragma once\n", ""))


@functools.cache
def kernel_source(name: str) -> str:
    """Returns one file of csrc/cuda as a single text, so that a cache keyed by the text sees every change.

    Args:
        name: A key of `ENTRY_POINTS`.

    Raises:
        FileNotFoundError: The kernels were not installed with the package.
    """
    try:
        return _inline(FOLDER / "cuda" / f"{name}.cu", set())
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"the CUDA kernel source {error.filename} is missing: this installation of gradwire is "
            "incomplete; install it again"
        ) from error


OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
"""Every operation rounds by itself, as IEEE 754 requires and as the CPU's kernels do: payloads are the same bits."""


class Launchable(Protocol):
    """A kernel that CuPy has loaded."""

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[object, ...]) -> None:
        """Puts the kernel on the current stream."""


def _nvrtc() -> ModuleType:
    """Returns CuPy's binding of NVRTC.

    Raises:
        CudaKernelsError: The library is not there.
    """
    try:
        nvrtc: ModuleType = importlib.import_module("cupy.cuda").nvrtc
        nvrtc.getVersion()  # the first call loads the library
    except (ImportError, RuntimeError, OSError) as error:
        major = str(torch.version.cuda).split(".")[0]
        raise CudaKernelsError(
            f"no NVRTC ({error}): the CUDA kernels are compiled by it once; `pip install cupy-cuda{major}x` brings "
            "it, or install the CUDA toolkit of that version"
        ) from error
    return nvrtc


def nearest_architecture(architecture: int) -> int:
    """Returns the architecture to compile for: the device's own, or the next smaller one that NVRTC knows.

    It has the device's major number: a cubin runs on devices of the same major and no smaller minor compute capability.
    Source: CUDA C++ Programming Guide, "Binary Compatibility".

    Args:
        architecture: Compute capability of the device as 10 * major + minor, such as 121.

    Returns:
        Compute capability in the same form: 120, say, if NVRTC does not know 121.

    Raises:
        CudaKernelsError: NVRTC is missing, or knows no such architecture.
    """
    nvrtc = _nvrtc()
    known: tuple[int, ...] = tuple(nvrtc.getSupportedArchs())
    fitting = [each for each in known if each // 10 == architecture // 10 and each <= architecture]
    if not fitting:
        raise CudaKernelsError(
            f"NVRTC {'.'.join(map(str, nvrtc.getVersion()))} compiles for sm_{min(known)} to "
            f"sm_{max(known)}, not for sm_{architecture}: update CuPy and its CUDA components"
        )
    return max(fitting)


def compile_cubin(name: str, architecture: int) -> bytes:
    """Compiles one file of csrc/cuda for a compute capability; needs no GPU.

    Args:
        name: A key of `ENTRY_POINTS`.
        architecture: Compute capability as 10 * major + minor, such as 90.

    Raises:
        CudaKernelsError: NVRTC does not know the architecture, or refuses the source.
    """
    nvrtc = _nvrtc()
    architecture = nearest_architecture(architecture)
    program = nvrtc.createProgram(kernel_source(name), f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*OPTIONS, f"-arch=sm_{architecture}"))
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise CudaKernelsError(
            f"NVRTC refuses csrc/cuda/{name}.cu for sm_{architecture} ({error}):\n{nvrtc.getProgramLog(program)}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)


@functools.cache
def _cache_folder() -> Path:
    """Returns the user's folder for compiled kernels; a temporary one of this user if that is not writable."""
    try:
        folder = Path.home() / ".cache" / "gradwire" / "cuda"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        temporary = _temporary_folder()
        logger.warning(
            "gradwire: ~/.cache/gradwire/cuda cannot be written (%s): CUDA kernels are compiled again into %s",
            error,
            temporary,
        )
        return temporary


def _temporary_folder() -> Path:
    """Returns the temporary folder that all processes of this user share; a private one if its name is taken.

    What lies in the folder is loaded into the GPU: it must belong to this user, and no other user may write to it.
    """
    folder = Path(tempfile.gettempdir()) / f"gradwire-cuda-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:  # a file of that name, or no space
        return Path(tempfile.mkdtemp(prefix="gradwire-cuda-"))
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return folder if own else Path(tempfile.mkdtemp(prefix="gradwire-cuda-"))


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Runs its body in one process at a time of all that compile into a folder.

    The others wait for `COMPILE_SECONDS` at most, and not at all on a file system without locks; they then run it
    beside each other, which only costs time. A process that ends gives the lock back.
    """
    with (folder / "lock").open("a") as file:  # for writing: NFS locks no other
        deadline = time.monotonic() + COMPILE_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(POLL_SECONDS)
            except OSError:
                break
            else:
                break
        yield


def cached_cubin(name: str, architecture: int, folder: Path) -> Path:
    """Returns the path of a compiled file, which is compiled if `folder` has none of this source and architecture.

    Of several processes that need it at the same time, such as the ranks of a node, one compiles and the others wait.

    Args:
        name: A key of `ENTRY_POINTS`.
        architecture: Compute capability as 10 * major + minor, such as 90.
        folder: Folder of compiled files.
    """
    version = _nvrtc().getVersion()
    architecture = nearest_architecture(architecture)
    key = repr((kernel_source(name), OPTIONS, architecture, version)).encode()
    path = folder / f"{name}-sm{architecture}-{hashlib.sha256(key).hexdigest()[:32]}.cubin"
    if not path.exists():
        with _one_at_a_time(folder):
            if not path.exists():  # else another process has compiled it meanwhile
                cubin = compile_cubin(name, architecture)
                with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:  # never half a file at `path`
                    file.write(cubin)
                Path(file.name).replace(path)
    return path


def require_kernels(device_index: int) -> None:
    """Checks, before anything is compiled, that the kernels can be used on a device.

    Raises:
        CudaKernelsError: They cannot; the message says what to install.
    """
    require_cupy(device_index)
    nearest_architecture(_architecture(device_index))


def _architecture(device_index: int) -> int:
    major, minor = torch.cuda.get_device_capability(device_index)
    return 10 * major + minor


class _Module(Protocol):
    """A compiled file that CuPy has loaded."""

    def get_function(self, name: str) -> Launchable:
        """Returns the kernel with this name."""


@functools.cache
def _load_file(name: str, device_index: int) -> _Module:
    """Loads one file of csrc/cuda on the current device, which is that of the index."""
    cupy = require_cupy(device_index)
    path = cached_cubin(name, _architecture(device_index), _cache_folder())
    return cast(_Module, cupy.RawModule(path=str(path)))


def load_families(families: Collection[str], device_index: int) -> None:
    """Compiles the kernels of some families if that has not been done before, and loads them on a device.

    Args:
        families: Keys of `FILES_OF_FAMILY`.
        device_index: Index of the CUDA device.

    Raises:
        CudaKernelsError: The compiler or the driver refuses them, or csrc/cuda has none for a family.
    """
    if unknown := sorted(set(families) - set(FILES_OF_FAMILY)):
        raise CudaKernelsError(f"csrc/cuda has kernels for {', '.join(FILES_OF_FAMILY)}, not for {', '.join(unknown)}")
    files = sorted({file for family in families for file in FILES_OF_FAMILY[family]})
    with torch.cuda.device(device_index):
        for file in files:
            try:
                for kernel in ENTRY_POINTS[file]:
                    load_kernel(file, kernel, device_index)
            except CudaKernelsError:
                raise
            except RuntimeError as error:  # CuPy's CUDADriverError
                raise CudaKernelsError(
                    f"the driver refuses csrc/cuda/{file}.cu, compiled for sm_{_architecture(device_index)} ({error}): "
                    "install a driver for the CUDA that CuPy was built for"
                ) from error


@functools.cache
def load_kernel(name: str, kernel: str, device_index: int) -> Launchable:
    """Returns a kernel, ready for one device.

    Args:
        name: A key of `ENTRY_POINTS`.
        kernel: Name of a kernel in that file, one of the key's values.
        device_index: Index of the CUDA device, which must be the current one.

    Raises:
        CudaKernelsError: The kernels cannot be used on this machine; the message says what to install.
        KeyError: There is no such kernel.
    """
    if kernel not in ENTRY_POINTS[name]:
        raise KeyError(f"`kernel` is {kernel!r}; csrc/cuda/{name}.cu has {', '.join(ENTRY_POINTS[name])}")
    return _load_file(name, device_index).get_function(kernel)
