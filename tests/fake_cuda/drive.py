"""Drives gradwire on fake CUDA, or on a CPU for comparison, through what its users call.

What stands in for DDP: buckets in buffers that live on from step to step, handed to the hook during a real backward
pass of autograd, in whose end callbacks run as in training; gradients that a kernel writes on the current stream before
the hook sees them; futures that are waited for at the end of the backward pass, as DDP's reducer does; and an optimizer
that reads the averages on the current stream.
"""

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from fake_cuda.kernel import run_kernel
from fake_cuda.machine import Machine, machine
from fake_cuda.patch import fake_cuda
from fake_cuda.ranks import FakeProcessGroup, process_groups, run_ranks
from fake_cupy.launches import launched_by
from gradwire.bench.studies.gpu.backward import HandedBucket, in_backward
from gradwire.comms.bootstrap.compat import GroupOptions
from gradwire.compressors.kernels import cuda
from kernels_on_cpu.emulator import Emulator

TIMEOUT = timedelta(seconds=30)
SHAPES = {
    "one_weight": (48, 64),
    "one_bias": (48,),
    "two_weight": (40, 90),
    "two_bias": (40,),
    "norm": (33,),
    "three_weight": (64, 40),
    "three_bias": (64,),
}
FIRST = (("three_bias", "three_weight", "norm", "two_bias", "two_weight", "one_bias", "one_weight"),)
"""DDP's first step: one bucket, in the order of the model backwards."""
REBUILT = (("three_bias", "three_weight", "norm"), ("two_bias", "two_weight"), ("one_bias", "one_weight"))
OPTIONS: dict[str, dict[str, bool | int | float | str]] = {
    "fp16": {},
    "bf16": {},
    "int8": {},
    "int4": {},
    "onebit": {"warmup_steps": 1, "momentum": 0.0},
    "dgc": {"density": 0.05, "momentum": 0.5, "warmup_steps": 1},
    "powersgd": {"rank": 2, "warmup_steps": 1},
}
"""Every compressor, with options that let a few steps go through its warm-up and beyond."""


def first_module(*names: str) -> Any:
    """The first of these modules that the installed gradwire has."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("gradwire"):
                raise
    raise ModuleNotFoundError(f"this gradwire has none of {', '.join(names)}")


class Watched:
    """Kernels that the recorder sees as one operation each: torch's compositions, run on the memory as it lies.

    What a kernel writes shows in the version counters of its arguments.
    """

    def __init__(self, *modules: Any) -> None:
        self._modules = modules

    def __getattr__(self, name: str) -> Any:
        kernel = next((found for each in self._modules if callable(found := getattr(each, name, None))), None)
        if kernel is None:
            raise AttributeError(name)

        def call(*arguments: Any, **named: Any) -> Any:
            return run_kernel(name, kernel, arguments, named)

        setattr(self, name, call)
        return call


@contextmanager
def cuda_job(size: int, emulated: Emulator | None = None) -> Iterator[Machine]:
    """Fake CUDA with a GPU for each rank.

    Args:
        size: Ranks.
        emulated: What runs CUDA's own kernels (`launches`); by default the reference kernels are in their place.
    """
    dispatch = first_module("gradwire.compressors.kernels.dispatch", "gradwire.compressors.kernels")
    names = ("reference", "reference_dgc", "reference_pack", "reference_powersgd")
    kernels = "gradwire.compressors.kernels.reference"
    try:
        references = [importlib.import_module(kernels)]
    except ModuleNotFoundError:
        references = [importlib.import_module(f"gradwire.compressors.{name}") for name in names]
    table = next(value for name, value in vars(dispatch).items() if name in ("KERNELS_ON", "_chosen"))
    for name in ("gradwire.comms.hook", "gradwire.comms.fusion"):
        importlib.import_module(name)  # before torch is patched: what a module takes from torch by name, it keeps
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with fake_cuda(size) as running:
        before = dict(table)
        table["cuda"] = Watched(*references) if emulated is None else cuda
        try:
            with nullcontext() if emulated is None else launched_by(emulated):
                yield running
        finally:
            table.clear()
            table.update(before)
            torch.set_num_threads(threads)


class Model(nn.Module):
    """Parameters of given shapes, on a device, as DDP holds them."""

    def __init__(self, group: FakeProcessGroup, device: torch.device, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.process_group = group
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, device=device)))


@dataclass
class Job:
    """One rank's training: `step` once for each backward pass.

    Args:
        state: The hook's.
        model: Whose gradients travel.
        device: Where they are.
        rank: This rank.
        quiet: Forbid host waits during the backward pass, but for what was issued before it.
    """

    state: Any
    model: Model
    device: torch.device
    rank: int
    quiet: bool = False
    results: list[list[Tensor]] = field(default_factory=list)
    _buffers: dict[tuple[str, ...], Tensor] = field(default_factory=dict)

    def step(self, buckets: Sequence[Sequence[str]], gradients: Mapping[str, Tensor]) -> None:
        """One backward pass.

        Args:
            buckets: Names of the parameters in each bucket, in the order in which they are ready.
            gradients: This rank's, on the CPU, by name.
        """
        named = dict(self.model.named_parameters())
        sources = {name: gradients[name].to(self.device) for names in buckets for name in names}
        futures: list[Any] = []
        kept: dict[tuple[str, ...], Tensor] = {}
        for names in map(tuple, buckets):
            numel = sum(named[name].numel() for name in names)
            kept[names] = self._buffers[names] if names in self._buffers else torch.zeros(numel, device=self.device)
        self._buffers = kept  # rebuilt buckets: the old ones are let go, as DDP does

        def finalize() -> None:
            self._allocate()
            for future in futures:
                future.wait()

        def body() -> None:
            for number, names in enumerate(map(tuple, buckets)):
                flat = self._buffers[names]
                parts = torch.split(flat, [named[name].numel() for name in names])
                for part, name in zip(parts, names, strict=True):
                    part.copy_(sources[name].view(-1))  # the kernel of backward that fills the bucket
                bucket = HandedBucket(number, flat, [named[name] for name in names], number == len(buckets) - 1)
                self._allocate()
                futures.append(self.state.reduce(bucket))
                self._allocate()
            torch.autograd.Variable._execution_engine.queue_callback(finalize)

        forbidding = self.quiet and self.device.type == "cuda"
        with machine().forbid_host_waits(late=True) if forbidding else nullcontext():
            in_backward(body)
        self.results.append([self._buffers[tuple(names)].clone() for names in buckets])  # the optimizer

    def _allocate(self) -> None:
        """What backward does all the time: memory that came back to the current stream is handed out again."""
        torch.empty(1, device=self.device)

    def averages(self) -> list[list[Tensor]]:
        """What every step gave, bucket by bucket, on the CPU."""
        return [[bucket.cpu() for bucket in step] for step in self.results]


def make_state(group: FakeProcessGroup, model: Model, node: str, **options: Any) -> Any:
    """A HookState bound to a model and a group, on the node of that name."""
    config = first_module("gradwire.comms.config").Config
    hook = first_module("gradwire.comms.hook").HookState
    settings = {"timeout": TIMEOUT, "hostname": node} | options
    return hook(model, config=config(**settings))


def gradient(
    rank: int, step: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES, *, whole: bool = False
) -> dict[str, Tensor]:
    """A rank's gradients of one step: random, or whole numbers whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if whole:
        return {name: torch.randint(-64, 64, shape, generator=generator).float() for name, shape in shapes.items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


Body = Callable[[int, torch.device, FakeProcessGroup], Any]
"""What a rank does: rank, device, process group."""


def on_cuda(
    size: int, body: Body, *, check: bool = True, emulated: Emulator | None = None
) -> tuple[list[Any], Machine]:
    """Runs a body on every rank of a job on fake CUDA.

    Args:
        size: Ranks.
        body: Of each rank.
        check: Raise what the recorder found.
        emulated: See `cuda_job`.

    Returns:
        The results in rank order, and the recorder.
    """
    with cuda_job(size, emulated) as running, process_groups(size) as groups:
        results = run_ranks(running, size, lambda rank: body(rank, torch.device("cuda", rank), groups[rank]))
        if check:
            running.check()
        return results, running


def on_cpu(size: int, body: Body) -> list[Any]:
    """The same on the CPU: shared memory inside a node, gloo between nodes."""
    with ExitStack() as stack:
        for module in (dist, distributed_c10d):
            stack.enter_context(patch.object(module, "is_initialized", lambda: True))
        groups = stack.enter_context(process_groups(size))
        results: dict[int, Any] = {}
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                results[rank] = body(rank, torch.device("cpu"), groups[rank])
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(size)]


def train(
    nodes: str,
    buckets: Sequence[Sequence[Sequence[str]]],
    *,
    before: Callable[[Job, int], None] = lambda job, step: None,
    whole: bool = False,
    quiet: bool = False,
    gradients: Callable[[int, int], Mapping[str, Tensor]] | None = None,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    rates: Sequence[float] = (),
    **options: Any,
) -> Body:
    """The body of a training: one step for each entry of `buckets`.

    Args:
        nodes: A letter for each rank's node.
        buckets: Of each step.
        before: Called with the job before each step, and its number.
        whole: Gradients are whole numbers.
        quiet: No host wait during a backward pass.
        gradients: A rank's gradients of a step; by default `gradient`.
        shapes: Of the parameters.
        rates: `nic_bytes_per_second` of each rank; of none by default.
        **options: Fields of `Config`.
    """

    def body(rank: int, device: torch.device, group: FakeProcessGroup) -> Any:
        model = Model(group, device, shapes)
        rate = {"nic_bytes_per_second": rates[rank]} if rates else {}
        job = Job(make_state(group, model, nodes[rank], **rate, **options), model, device, rank, quiet)
        try:
            for step, names in enumerate(buckets):
                before(job, step)
                own = gradients(rank, step) if gradients else gradient(rank, step, shapes, whole=whole)
                job.step(names, own)
            return job.averages()
        finally:
            job.state.close()

    return body


def group_options(store: Any, rank: int, size: int, name: str) -> GroupOptions:
    """What a process group of the backend is made with."""
    return GroupOptions(store, rank, size, TIMEOUT, name, list(range(size)))
