"""The command line gives the backends that are measured: one for each algorithm and compressor asked for."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.bench.emulation.fork import ask_in_child
from gradwire.bench.nccl_tests.backends.backend import Backend
from gradwire.bench.nccl_tests.backends.gradwire_backend import GradwireBackend
from gradwire.bench.nccl_tests.backends.shm_backend import ShmBackend
from gradwire.bench.nccl_tests.backends.torch_backend import TorchBackend
from gradwire.bench.nccl_tests.ranks import World
from gradwire.comms.backend.register import register
from gradwire.comms.bootstrap.compat import PrefixStore
from gradwire.comms.config import Config
from gradwire.comms.plan.codec_price import settling
from gradwire.compressors.base import Compressor
from gradwire.compressors.registry import names

_CUDA_ALONE = ("nccl", "nccl-raw")


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """What one block of output measures.

    Attributes:
        backend: As `--backend` names it.
        algorithm: gradwire's plan; empty for the others.
        compressor: gradwire's compressor or `none`; empty for the others.
    """

    backend: str
    algorithm: str = ""
    compressor: str = ""

    def facts(self) -> dict[str, str]:
        """What stands above its table."""
        found = {"backend": self.backend, "algorithm": self.algorithm, "compressor": self.compressor}
        return {key: value for key, value in found.items() if value}

    @property
    def lossy(self) -> bool:
        """Whether the result is an approximation."""
        return self.compressor not in ("", "none")


def backend_specs(options: argparse.Namespace) -> list[BackendSpec]:
    """Every combination that the options ask for.

    Raises:
        ValueError: An option does not apply, or names an unknown compressor.
    """
    compressors = list(dict.fromkeys(options.compressor.split(",")))
    for name in compressors:
        check_compressor(name)
    if "gradwire" not in options.backend and (options.algorithm != ("auto",) or compressors != ["none"]):
        raise ValueError(
            f"`--algorithm` and `--compressor` are gradwire's, but `--backend` is {','.join(options.backend)}; "
            "wanted --backend gradwire, or neither of them"
        )
    if compressors != ["none"] and options.collective != "all_reduce":
        raise ValueError(
            f"`--compressor` is {options.compressor} and the collective {options.collective}; wanted "
            "all_reduce: no other collective is compressed"
        )
    found = []
    for backend in options.backend:
        if backend == "gradwire":
            found += [BackendSpec(backend, algorithm, name) for algorithm in options.algorithm for name in compressors]
        else:
            found.append(BackendSpec(backend))
    return found


def check_compressor(name: str) -> None:
    """Raises ValueError unless `name` is `none` or a registered compressor."""
    if name == "none":
        return
    if name not in names():
        raise ValueError(f"`--compressor`: found {name!r}, wanted one of {', '.join(names())}")


def make_compressor(name: str) -> Compressor | None:
    """A new compressor; None for `none` and for backends that have none."""
    if name in ("", "none"):
        return None
    compressor = settling(name)
    compressor.end_step(True)  # an empty step: its dense start is over
    return compressor


def check_device(options: argparse.Namespace, *, before_fork: bool = False) -> str:
    """Where the tensors are: `cpu` or `cuda`.

    Args:
        options: Of the command line.
        before_fork: Leave CUDA untouched, so that this process may still fork ranks.

    Raises:
        ValueError: A flag needs a GPU that is not there, or another kind of tensor.
    """
    asked: str = options.device
    needs_cuda = [name for name in options.backend if name in _CUDA_ALONE]
    if asked == "auto":
        asked = "cuda" if needs_cuda else "cpu"
    if asked == "cpu":
        if needs_cuda:
            raise ValueError(
                f"`--backend` is {needs_cuda[0]} and `--device` is cpu; wanted --device cuda: NCCL takes CUDA "
                "tensors alone"
            )
        if options.cudagraph:
            raise ValueError(f"`-G` is {options.cudagraph}, but the tensors are on the CPU; wanted 0, or --device cuda")
        return asked
    found = ask_in_child(_finds_a_gpu) if before_fork else _finds_a_gpu()
    if not found:
        cause = f"`--backend` is {needs_cuda[0]}" if needs_cuda else "`--device` is cuda"
        raise ValueError(
            f"{cause}, but torch finds no CUDA device here; wanted a GPU and a CUDA build of torch, or "
            "--backend gradwire, gloo, shm or mpi"
        )
    on_cpu = [name for name in options.backend if name in ("shm", "mpi")]
    if on_cpu:
        raise ValueError(f"`--backend` is {on_cpu[0]} and the tensors are on CUDA; wanted --device cpu for it")
    return asked


def _finds_a_gpu() -> bool:
    return torch.cuda.device_count() > 0


def device_of(options: argparse.Namespace, local_rank: int) -> torch.device:
    """This rank's device, made the current one.

    Raises:
        ValueError: See `check_device`.
    """
    if check_device(options) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def connect(
    specs: list[BackendSpec], world: World, device: torch.device, timeout: timedelta, cycle: int
) -> Iterator[tuple[BackendSpec, Backend]]:
    """Connects one backend after the other; each is closed before the next one is made. All ranks together.

    Raises:
        RuntimeError: A library is missing, or a rank did not come.
        ValueError: A backend cannot be used on this cluster.
    """
    for number, spec in enumerate(specs):
        backend = _make(spec, world, device, timeout, f"bench{cycle}.{number}")
        yield spec, backend
        backend.close()


def _make(spec: BackendSpec, world: World, device: torch.device, timeout: timedelta, name: str) -> Backend:
    store = PrefixStore(name, world.store)
    if spec.backend == "shm":
        if len({info.hostname for info in world.ranks}) > 1:
            raise ValueError(f"`--backend` is shm, but the ranks are {world.shape()}; wanted one node")
        return ShmBackend.connect(store, world.rank, world.size, timeout)
    if spec.backend == "mpi":
        from gradwire.bench.nccl_tests.backends.mpi_backend import MpiBackend  # mpi4py is optional

        return MpiBackend()
    if spec.backend == "nccl-raw":
        from gradwire.bench.nccl_tests.backends.nccl_raw_backend import NcclRawBackend

        return NcclRawBackend.connect(store, world.rank, world.size, device)
    if spec.backend != "gradwire":
        return TorchBackend(dist.new_group(backend=spec.backend, timeout=timeout), spec.backend)
    config = Config.from_env(plan=spec.algorithm, timeout=timeout)
    register()
    group = dist.new_group(backend="gradwire", timeout=timeout, pg_options=replace(config, compressor=None))
    return GradwireBackend(
        store, world.rank, world.size, device, config, group, name=name, compressor=make_compressor(spec.compressor)
    )
