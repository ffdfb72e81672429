"""What of gradwire's CUDA code a run has touched, and what there is of it: counted, never listed by hand.

Kernels: the functions that compressors call, and the entry points of csrc/cuda. NCCL: the places in
comms/transport/nccl.py that call torch's group, as its own source has them.
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
"""The attribute of `NcclTransport` that is torch's group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """How much of one kind was touched.

    Attributes:
        kind: In words: `CUDA kernels`.
        all: Every name there is.
        touched: Those that were called.
    """

    kind: str
    all: tuple[str, ...]
    touched: tuple[str, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """Those that were not, in the order of `all`."""
        return tuple(name for name in self.all if name not in self.touched)

    def words(self) -> str:
        """`35 of 35 CUDA kernels`."""
        return f"{len(self.all) - len(self.missing)} of {len(self.all)} {self.kind}"


def all_kernels() -> tuple[str, ...]:
    """The `__global__` functions of csrc/cuda, `file.kernel`."""
    return tuple(f"{file}.{kernel}" for file, kernels in ENTRY_POINTS.items() for kernel in kernels)


def all_functions() -> tuple[str, ...]:
    """What every set of kernels offers to the compressors."""
    return tuple(sorted(name for name in vars(Kernels) if not name.startswith("_")))


class RecordedKernels:
    """A set of kernels that notes which of its functions were asked for.

    Args:
        kernels: A module, or an object.
        touched: Gets their names.
    """

    def __init__(self, kernels: Kernels, touched: set[str]) -> None:
        self._recorded = kernels
        self._touched = touched

    def __getattr__(self, name: str) -> object:
        """The kernels' own function."""
        self._touched.add(name)
        return getattr(self._recorded, name)


def touched_functions(names: Iterable[str], device: str) -> Touched:
    """The functions' part of the coverage.

    Args:
        names: That were called.
        device: `cpu` or `cuda`.
    """
    wanted = all_functions()
    return Touched(kind=f"kernel functions on {device}", all=wanted, touched=tuple(sorted(set(names) & set(wanted))))


def touched_kernels(names: Iterable[str]) -> Touched:
    """The CUDA kernels' part of the coverage."""
    return Touched(kind="CUDA kernels", all=all_kernels(), touched=tuple(sorted(set(names))))


@contextmanager
def recorded_launches() -> Iterator[set[str]]:
    """Notes the name of every kernel that is launched inside the block, `file.kernel`, and yields the set of them.

    Inside it `launch` is another function, for this process alone. A launch counts when it was made without an error.
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
    """A place that calls torch's group.

    Attributes:
        line: In comms/transport/nccl.py.
        call: Name of the group's method.
        function: That holds the line.
    """

    line: int
    call: str
    function: str

    def words(self) -> str:
        """`_all_reduce: allreduce, line 298`."""
        return f"{self.function}: {self.call}, line {self.line}"


@cache
def nccl_sites() -> tuple[NcclSite, ...]:
    """Every place of comms/transport/nccl.py that calls a method of torch's group, in the order of its lines."""
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
    """`self._group.NAME`, or `getattr(self._group, NAME)` with a constant of the module; None for anything else."""
    match node:
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=attribute), attr=name):
            return name if attribute == GROUP else None
        case ast.Call(func=ast.Name(id="getattr"), args=[ast.Attribute(attr=attribute), ast.Name(id=constant)]):
            return str(getattr(nccl, constant)) if attribute == GROUP else None
    return None


class RecordedGroup:
    """Torch's group, whose methods note from which line of comms/transport/nccl.py they were asked for.

    Args:
        group: Torch's own.
        touched: Gets the places; the same set may serve several groups.
    """

    def __init__(self, group: TorchGroup, touched: set[NcclSite]) -> None:
        self._recorded = group
        self._touched = touched

    def __getattr__(self, name: str) -> object:
        """The group's own method."""
        caller = sys._getframe(1)
        if caller.f_code.co_filename == nccl.__file__:
            self._touched.update(site for site in nccl_sites() if (site.line, site.call) == (caller.f_lineno, name))
        return getattr(self._recorded, name)


def touched_calls(sites: Iterable[NcclSite]) -> Touched:
    """NCCL's part of the coverage.

    Args:
        sites: That were touched.
    """
    return Touched(
        kind="NCCL call sites",
        all=tuple(site.words() for site in nccl_sites()),
        touched=tuple(site.words() for site in sorted(set(sites))),
    )
