"""Selection of the backends to measure from the command line, and their connection."""

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
from gradwire.comms.plan.codec_price import with_short_start
from gradwire.compressors.base import Compressor
from gradwire.compressors.registry import names

_CUDA_ALONE = ("nccl", "nccl-raw")


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """Backend of one table (block), with its plan and compressor.

    Attributes:
        backend: Name of the backend, as in `--backend`.
        algorithm: Plan of gradwire; empty for other backends.
        compressor: Compressor of gradwire, or `none`; empty for other backends.
    """

    backend: str
    algorithm: str = ""
    compressor: str = ""

    def facts(self) -> dict[str, str]:
        """Returns the fields that are not empty, to print with the table."""
        found = {"backend": self.backend, "algorithm": self.algorithm, "compressor": self.compressor}
        return {key: value for key, value in found.items() if value}

    @property
    def lossy(self) -> bool:
        """Whether a compressor makes the result an approximation."""
        return self.compressor not in ("", "none")


def backend_specs(options: argparse.Namespace) -> list[BackendSpec]:
    """Returns every combination of backend, plan and compressor that the options ask for.

    Args:
        options: Options of the command line.

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
    """Makes a compressor that compresses from its first step on, without the dense steps at the start of a training.

    Args:
        name: Name of the compressor; None is returned for `none` and for an empty name.
    """
    if name in ("", "none"):
        return None
    compressor = with_short_start(name)
    compressor.end_step(True)  # an empty step: its dense start is over
    return compressor


def check_device(options: argparse.Namespace, *, before_fork: bool = False) -> str:
    """Returns the kind of device of the tensors, `cpu` or `cuda`, and checks that all flags fit it.

    Args:
        options: Options of the command line.
        before_fork: Whether this process will fork ranks; CUDA is then initialized in a child process only.

    Raises:
        ValueError: A flag needs a GPU that is not there, or does not work on this kind of device.
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
    """Returns the device of this rank; a CUDA device is made the current one.

    Args:
        options: Options of the command line.
        local_rank: Index of this rank on its node, by which it gets one of the node's GPUs.

    Raises:
        ValueError: A flag does not fit the device, see `check_device`.
    """
    if check_device(options) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def connect(
    specs: list[BackendSpec], world: World, device: torch.device, timeout: timedelta, cycle: int
) -> Iterator[tuple[BackendSpec, Backend]]:
    """Connects one backend after the other and yields it; each is closed before the next one is made. Collective.

    Args:
        specs: Backends to connect.
        world: All ranks.
        device: Device of the tensors.
        timeout: Time limit for connecting, and of the collectives.
        cycle: Number that keeps the store keys of repeated calls apart.

    Raises:
        RuntimeError: A library is missing, or a rank did not connect in time.
        ValueError: A backend cannot be used on these nodes.
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
