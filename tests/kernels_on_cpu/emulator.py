"""Compiles the kernels for the CPU, starts them, and says what was found about them."""

import ctypes
import fcntl
import functools
import json
import os
import re
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gradwire.compressors.kernels.cuda.launch import THREADS, Argument
from gradwire.compressors.kernels.cuda.load import ENTRY_POINTS, FOLDER, kernel_source

HERE = Path(__file__).resolve().parent
ORDER = "GRADWIRE_KERNEL_ORDER"
"""Environment variable: a seed for the order of threads and CTAs; every launch takes the next. 0: always ascending."""
RACES = "GRADWIRE_KERNEL_RACES"
"""Environment variable: 1 has the tests of tests/csrc look at every access of every kernel; some ten times slower."""
ENGINE = "libcuda_on_cpu.so"
_OPTIONS = (
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-U_FORTIFY_SOURCE",  # its longjmp takes a jump to another stack for an error
    "-Wno-unknown-pragmas",
    f"-I{HERE}",
    f"-I{FOLDER}",
)
_WATCHED = ("-g", "-fsanitize=thread", "-fno-gnu-unique")
"""The compiler calls __tsan_read4 and the like before each access; they are race.cpp's: libtsan is not linked."""
_MOST_FAULTS = 32
_one_launch = threading.Lock()
"""The engine knows what the last launch has left."""
_KINDS = ("reads", "reads past the caches", "writes", "changes atomically")


class KernelRaceError(AssertionError):
    """Two threads of a kernel touch the same bytes, and nothing orders them; the message names all that was found."""


class _Parameter(ctypes.Structure):
    _fields_ = (("nbytes", ctypes.c_uint), ("pointer", ctypes.c_bool), ("writes", ctypes.c_bool))


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("count", ctypes.c_uint),
        ("parameters", ctypes.POINTER(_Parameter)),
        ("call", ctypes.c_void_p),
        ("shared_begin", ctypes.c_void_p),
        ("shared_end", ctypes.c_void_p),
    )


class _Fault(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("pc", ctypes.c_uint64 * 2),
        ("cta", ctypes.c_uint32 * 2),
        ("thread", ctypes.c_uint32 * 2),
        ("nbytes", ctypes.c_uint32),
        ("kind", ctypes.c_uint8 * 2),
        ("shared", ctypes.c_uint8),
    )


class _Range(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_uint64),
        ("stop", ctypes.c_uint64),
        ("read", ctypes.c_uint32),
        ("written", ctypes.c_uint32),
    )


@dataclass(frozen=True, slots=True)
class Touched:
    """Bytes of memory that a launch used."""

    start: int
    stop: int
    read: bool
    written: bool


def _compile(target: Path, *arguments: str) -> None:
    """Compiles a shared library, unless it is there."""
    if target.exists():
        return
    unfinished = target.with_suffix(".part")
    subprocess.run(["g++", *_OPTIONS, *arguments, "-o", str(unfinished)], check=True)
    unfinished.rename(target)


def build_engine(folder: Path) -> Path:
    """Compiles the engine, which all kernels' libraries of a process share, into `folder`; returns the library."""
    target = folder / ENGINE
    _compile(target, "-O2", f"-Wl,-soname,{ENGINE}", str(HERE / "engine.cpp"), str(HERE / "race.cpp"))
    return target


def build_kernels(folder: Path, name: str, source: str, kernels: Sequence[str], *, watched: bool) -> Path:
    """Compiles kernels into `folder`, beside the engine; returns the library.

    Args:
        folder: Where `build_engine` has put the engine.
        name: Of the library's file, without its suffix.
        source: Text of a .cu file that needs no further file.
        kernels: Names of its `__global__` functions, which are in the namespace gradwire.
        watched: Tell the engine of every access.
    """
    path, target = folder / f"{name}.cpp", folder / f"{name}.so"
    if not target.exists():
        launchers = "\n".join(f"EMULATE({kernel})" for kernel in kernels)
        path.write_text(f'#include "cuda_on_cpu.h"\n{source}\n{launchers}\n')
    options: tuple[str, ...] = ("-O1", *_WATCHED) if watched else ("-O1",)
    linked = (str(path), "-Wl,-Bsymbolic", "-Wl,-rpath,$ORIGIN", f"-L{folder}", f"-l:{ENGINE}")
    if watched:  # -fsanitize=thread when linking would bring libtsan
        middle = folder / f"{name}.o"
        if not target.exists():
            subprocess.run(["g++", *_OPTIONS, *options, "-c", str(path), "-o", str(middle)], check=True)
        linked = (str(middle), *linked[1:])
        options = ()
    _compile(target, *options, *linked)
    return target


def build_named(folder: Path, name: str, *, watched: bool) -> Path:
    """The same for a file of csrc/cuda, by its name without the suffix."""
    target = f"{name}_watched" if watched else name
    return build_kernels(folder, target, kernel_source(name), ENTRY_POINTS[name], watched=watched)


def parameter_names(folder: Path, name: str) -> dict[str, list[str]]:
    """The names of the parameters of each kernel in a file of csrc/cuda; kept in `folder`."""
    kept = folder / f"{name}.parameters.json"
    if not kept.exists():
        source = folder / f"{name}.parameters.cpp"
        source.write_text(f'#include "cuda_on_cpu.h"\n{kernel_source(name)}\n')
        command = ["g++", *_OPTIONS, "-D__global__=A_KERNEL", "-E", "-P", str(source)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.findall(r"A_KERNEL\s+void\s+(\w+)\s*\(([^)]*)\)\s*\{", text)
        words = {kernel: [re.findall(r"\w+", each)[-1] for each in given.split(",")] for kernel, given in found}
        kept.write_text(json.dumps({kernel: words[kernel] for kernel in ENTRY_POINTS[name]}))
    names: dict[str, list[str]] = json.loads(kept.read_text())
    return names


class Library:
    """Kernels of one source file, compiled for the CPU."""

    def __init__(self, path: Path, engine: ctypes.CDLL) -> None:
        self.path, self._engine = path, engine
        self._library = ctypes.CDLL(str(path))

    @functools.cache  # noqa: B019 - a library lives as long as the process
    def kernel(self, name: str) -> _Kernel:
        function = getattr(self._library, f"kernel_{name}")
        function.restype = ctypes.POINTER(_Kernel)
        found: _Kernel = function().contents
        return found

    def launch(
        self,
        name: str,
        blocks: int,
        threads: int,
        arguments: Sequence[Argument],
        *,
        seed: int = 0,
        check: bool = False,
        keep_ranges: bool = False,
    ) -> list[Touched]:
        """Runs a kernel to its end.

        Args:
            name: Of the kernel.
            blocks: CTAs.
            threads: Of a CTA: a multiple of 32, at most 1024.
            arguments: As for `launch.launch`.
            seed: Of the order of threads and CTAs; 0 is the ascending one.
            check: Find races; the library must be a watched one.
            keep_ranges: Return what memory it used; the library must be a watched one.

        Raises:
            KernelRaceError: Races were found.
            ValueError: The arguments are not those of the kernel's parameters.
        """
        kernel = self.kernel(name)
        cells = [np.array([np.int64(x) if isinstance(x, int) else x]) for x in arguments]
        wanted = [kernel.parameters[index].nbytes for index in range(kernel.count)]
        if [cell.nbytes for cell in cells] != wanted:
            found = [cell.nbytes for cell in cells]
            raise ValueError(f"`arguments` of {name} have {found} bytes; its parameters have {wanted}")
        pointers = (ctypes.c_void_p * len(cells))(*(cell.ctypes.data for cell in cells))
        run = self._engine.emulation_launch
        with _one_launch:
            wrong = run(
                ctypes.byref(kernel), blocks, threads, pointers, ctypes.c_uint64(seed), int(check), int(keep_ranges)
            )
            if wrong:
                raise ValueError(f"`threads` of {name} are {threads}; wanted a multiple of 32, at most 1024")
            if check:
                self._raise_faults(name, seed)
            return self._ranges() if keep_ranges else []

    def _ranges(self) -> list[Touched]:
        count = self._engine.emulation_ranges(None, ctypes.c_size_t(0))
        found = (_Range * count)()
        self._engine.emulation_ranges(found, ctypes.c_size_t(count))
        return [Touched(each.start, each.stop, bool(each.read), bool(each.written)) for each in found]

    def _raise_faults(self, name: str, seed: int) -> None:
        faults = (_Fault * _MOST_FAULTS)()
        count = self._engine.emulation_faults(faults, ctypes.c_size_t(_MOST_FAULTS))
        if not count:
            return
        lines = [self._spelled(fault) for fault in faults[:count]]
        raise KernelRaceError(f"{name}, order {seed}: {count} races:\n" + "\n".join(lines))

    def _spelled(self, fault: _Fault) -> str:
        memory = "shared" if fault.shared else "global"
        verb = [_KINDS[kind] for kind in fault.kind]
        later = f"thread {fault.thread[1]} of CTA {fault.cta[1]} {verb[1]} {memory} memory at {self._line(fault.pc[1])}"
        if not fault.pc[0]:
            return f"{later}: no thread of the CTA has written it"
        earlier = f"thread {fault.thread[0]} of CTA {fault.cta[0]} {verb[0]} it at {self._line(fault.pc[0])}"
        return f"{later}; {earlier}, and nothing orders them"

    def _line(self, pc: int) -> str:
        """The lines of the source, innermost first; `pc` is where the call returns to."""
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        base = min(int(line.split("-")[0], 16) for line in maps if line.endswith(str(self.path)))
        command = ["addr2line", "-i", "-f", "-s", "-e", str(self.path), hex(pc - base - 1)]
        words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
        text = self.path.with_suffix(".cpp").read_text(encoding="utf-8").splitlines()
        places = []
        for line in words[1::2]:
            file, _, number = line.split(" ")[0].rpartition(":")
            if file == self.path.with_suffix(".cpp").name and number.isdigit():
                places.append(f"`{text[int(number) - 1].strip()}`")
        return " < ".join(places) or hex(pc - base)


class Emulator:
    """All kernels of csrc/cuda, with a `launch` that takes the place of `launch.launch`."""

    def __init__(self, folder: Path, *, watched: bool = False) -> None:
        """Compiles what is not in the folder yet: the workers of one run share it, and one of them compiles."""
        with Path(folder, "lock").open("w") as lock, ThreadPoolExecutor(os.cpu_count()) as pool:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.engine = engine = ctypes.CDLL(str(build_engine(folder)))
            build = functools.partial(build_named, folder, watched=watched)
            paths = list(pool.map(build, ENTRY_POINTS))
        self.libraries = {name: Library(path, engine) for name, path in zip(ENTRY_POINTS, paths, strict=True)}
        self.watched = watched
        self.order = int(os.environ.get(ORDER, "1"))
        self.launched: set[str] = set()

    def next_order(self) -> int:
        """The seed of the next launch's order; 0 where `GRADWIRE_KERNEL_ORDER` is."""
        if self.order:
            self.order += 1
        return self.order

    def launch(
        self,
        file: str,
        kernel: str,
        device: torch.device,
        blocks: int,
        arguments: Sequence[Argument],
        threads: int = THREADS,
    ) -> None:
        """See launch.launch; a watched library's kernels are looked at for races.

        Raises:
            KernelRaceError: There is one.
        """
        if not blocks:
            return
        self.launched.add(kernel)
        self.libraries[file].launch(kernel, blocks, threads, arguments, seed=self.next_order(), check=self.watched)
