"""Coverage of gradwire's CUDA code by a self-test: which kernels and which calls of NCCL a run has used.

The full lists are read from the code, never written by hand. Kernels are the functions that compressors call, and the
entry points of csrc/cuda. Calls of NCCL are the places in comms/transport/nccl.py that call torch's group.
"""

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from gradwire.comms.bootstrap.compat import TorchGroup
from gradwire.comms.transport import nccl
from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.kernels.cuda.load import ENTRY_POINTS
from gradwire.compressors.kernels.dispatch import Kernels

GROUP = "_group"
"""Name of the attribute of `NcclTransport` that holds torch's group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """Coverage of one kind of code.

    Attributes:
        kind: Kind of code in words, such as `CUDA kernels`.
        all: Names of all functions or places of this kind.
        touched: Names of those that the run has called.
    """

    kind: str
    all: tuple[str, ...]
    touched: tuple[str, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of those that the run has not called, in the order of `all`."""
        return tuple(name for name in self.all if name not in self.touched)

    def words(self) -> str:
        """Returns the coverage in words, as `35 of 35 CUDA kernels`."""
        return f"{len(self.all) - len(self.missing)} of {len(self.all)} {self.kind}"


def all_kernels() -> tuple[str, ...]:
    """Returns the names of the `__global__` functions of csrc/cuda, each as `file.kernel`."""
    return tuple(f"{file}.{kernel}" for file, kernels in ENTRY_POINTS.items() for kernel in kernels)


def all_functions() -> tuple[str, ...]:
    """Returns the names of the functions that every set of kernels offers to the compressors."""
    return tuple(sorted(name for name in vars(Kernels) if not name.startswith("_")))


class RecordedKernels:
    """Wrapper of a set of kernels that records which of its functions were looked up.

    Args:
        kernels: Module or object with the functions.
        touched: Set to which the names are added.
    """

    def __init__(self, kernels: Kernels, touched: set[str]) -> None:
        self._recorded = kernels
        self._touched = touched

    def __getattr__(self, name: str) -> object:
        """Returns the function of the wrapped kernels, and records its name."""
        self._touched.add(name)
        return getattr(self._recorded, name)


def touched_functions(names: Iterable[str], device: str) -> Touched:
    """Returns the coverage of the kernel functions.

    Args:
        names: Names of the functions that were called; others than `all_functions` are ignored.
        device: Device of the run, `cpu` or `cuda`.
    """
    wanted = all_functions()
    return Touched(kind=f"kernel functions on {device}", all=wanted, touched=tuple(sorted(set(names) & set(wanted))))


def touched_kernels(names: Iterable[str]) -> Touched:
    """Returns the coverage of the CUDA kernels.

    Args:
        names: Names of the kernels that were launched, each as `file.kernel`.
    """
    return Touched(kind="CUDA kernels", all=all_kernels(), touched=tuple(sorted(set(names))))


@contextmanager
def recorded_launches() -> Iterator[set[str]]:
    """Records the names of the kernels that are launched inside the block; yields the set, which grows meanwhile.

    Names are `file.kernel`. A launch counts if it raised no error. Inside the block, this process's
    `compressors.kernels.cuda.launch.launch` is replaced.
    """
    launched: set[str] = set()
    start = cuda_launch.launch

    def noted(
        file: str,
        kernel: str,
        device: torch.device,
        blocks: int,
        arguments: Sequence[cuda_launch.Argument],
        threads: int = cuda_launch.THREADS,
    ) -> None:
        start(file, kernel, device, blocks, arguments, threads)
        if blocks:
            launched.add(f"{file}.{kernel}")

    cuda_launch.launch = noted
    try:
        yield launched
    finally:
        cuda_launch.launch = start


@dataclass(frozen=True, slots=True, order=True)
class NcclSite:
    """Place in comms/transport/nccl.py that calls torch's group.

    Attributes:
        line: Number of the line.
        call: Name of the group's method.
        function: Name of the function that contains the line.
    """

    line: int
    call: str
    function: str

    def words(self) -> str:
        """Returns the place in words, as `_all_reduce: allreduce, line 298`."""
        return f"{self.function}: {self.call}, line {self.line}"


@cache
def nccl_sites() -> tuple[NcclSite, ...]:
    """Returns every place of comms/transport/nccl.py that calls a method of torch's group, ordered by line."""
    tree = ast.parse(inspect.getsource(nccl))
    return tuple(sorted(site for node in tree.body for site in _sites_below(node, "")))


def _sites_below(node: ast.AST, function: str) -> Iterable[NcclSite]:
    if isinstance(node, ast.FunctionDef):
        function = node.name
    call = _called(node)
    if call is not None and isinstance(node, ast.expr):
        yield NcclSite(node.lineno, call, function)
    for child in ast.iter_child_nodes(node):
        yield from _sites_below(child, function)


def _called(node: ast.AST) -> str | None:
    """Returns the name of the group's method that an expression looks up; None if it looks up none.

    The expression is `self._group.NAME`, or `getattr(self._group, NAME)` with a constant of the module.
    """
    match node:
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=attribute), attr=name):
            return name if attribute == GROUP else None
        case ast.Call(func=ast.Name(id="getattr"), args=[ast.Attribute(attr=attribute), ast.Name(id=constant)]):
            return str(getattr(nccl, constant)) if attribute == GROUP else None
    return None


class RecordedGroup:
    """Wrapper of torch's group that records which lines of comms/transport/nccl.py look up its methods.

    Args:
        group: Group to wrap.
        touched: Set to which the places are added; several groups may share it.
    """

    def __init__(self, group: TorchGroup, touched: set[NcclSite]) -> None:
        self._recorded = group
        self._touched = touched

    def __getattr__(self, name: str) -> object:
        """Returns the method of the wrapped group, and records the place that looks it up."""
        caller = sys._getframe(1)
        if caller.f_code.co_filename == nccl.__file__:
            self._touched.update(site for site in nccl_sites() if (site.line, site.call) == (caller.f_lineno, name))
        return getattr(self._recorded, name)


def touched_calls(sites: Iterable[NcclSite]) -> Touched:
    """Returns the coverage of the calls of NCCL.

    Args:
        sites: Places that were used.
    """
    return Touched(
        kind="NCCL call sites",
        all=tuple(site.words() for site in nccl_sites()),
        touched=tuple(site.words() for site in sorted(set(sites))),
    )
