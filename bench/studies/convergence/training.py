"""One training: which compressor under which optimizer, set up as a user would, and the quality at each tenth of it.

It runs on two logical nodes of two ranks. Time plays no part in it.
"""

import importlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gradwire
import gradwire.fsdp
from gradwire.bench.emulation.fork import LAZY, ForkedRank, fork_ranks
from gradwire.bench.emulation.launch import held_port
from gradwire.bench.emulation.placement import place_ranks
from gradwire.bench.studies.convergence.tasks import RANKS, Task, marks_of, quality_of_ranks, schedules_of
from gradwire.compressors.registry import Option, options_of
from gradwire.compressors.registry import names as compressor_names

PLAIN, TORCH_FP16 = "plain DDP", "torch fp16 hook"


@dataclass(frozen=True, slots=True)
class Method:
    """Describes a method of averaging gradients."""

    name: str
    """Name in the tables; unique within an optimizer."""
    compressor: str | None = None
    """Name of gradwire's compressor; None for torch's own hooks."""
    options: dict[str, Option] = field(default_factory=dict)
    """Options that differ from the compressor's defaults."""
    sharding: "Sharding | None" = None
    """Sharding of the model by FSDP2; None replicates it."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """Describes how FSDP2 shards a model, with arguments of `gradwire.fsdp.apply`."""

    inside_nodes: bool
    """True shards inside the nodes and replicates between them; False shards over all ranks."""
    shards: str | None = "exact"
    """Compressor of the gradients' shards; None is plain FSDP2 without gradwire."""
    weights: str = "exact"
    """Compressor of the gathered weights."""


def _gradwire(name: str, **options: Option) -> Method:
    words = "".join(f", {key} {value}" for key, value in options.items())
    return Method(f"gradwire {name}{words}", name, options)


_EVERYWHERE = (
    Method(PLAIN),
    Method(TORCH_FP16),
    *(_gradwire(name) for name in ("none", "fp16", "bf16", "int8", "int4", "powersgd")),
)
METHODS = {
    "sgd": (
        *_EVERYWHERE,
        _gradwire("onebit"),
        _gradwire("onebit", return_bits=8),
        _gradwire("dgc", density=0.001),
        _gradwire("dgc", density=0.01),
    ),
    "adamw": _EVERYWHERE,
}
"""Optimizer -> its methods; the first is the baseline."""
PLAIN_FSDP = "plain FSDP2"
SHARDED_METHODS = (
    Method(PLAIN_FSDP, sharding=Sharding(False, None)),
    Method("HSDP int8", "int8", sharding=Sharding(True)),
    Method("HSDP int4", "int4", sharding=Sharding(True)),
    Method("FSDP2 shards=int8 weights=int8", sharding=Sharding(False, "int8", "int8")),
    Method("FSDP2 shards=int4 weights=int8", sharding=Sharding(False, "int4", "int8")),
    Method("FSDP2 shards=waterfill4 weights=waterfill4", sharding=Sharding(False, "waterfill4", "waterfill4")),
    Method("FSDP2 shards=int4", sharding=Sharding(False, "int4")),
)
"""Methods for models whose parameters are sharded, under any optimizer; the first is the baseline."""


@dataclass(frozen=True, slots=True)
class MethodTraining:
    """Holds a model and its optimizer on one rank, ready to train."""

    model: nn.Module
    optimizer: Optimizer
    dense_steps: int
    """Number of steps at the start whose gradients are sent without compression."""

    def take_step(self, loss: Callable[[nn.Module], object]) -> None:
        """Takes one optimizer step; all ranks have to call it.

        Args:
            loss: Function of the model that returns the loss of this rank's batch, a scalar tensor.
        """
        self.optimizer.zero_grad()
        loss(self.model).backward()  # type: ignore[attr-defined]
        self.optimizer.step()


def make_training(
    task: Task,
    method: Method,
    *,
    seed: int = 0,
    node: str | None = None,
    nic_bytes_per_second: float | None = None,
    warm: bool = False,
) -> MethodTraining:
    """Sets a model up as a user would; all ranks make the same ones in the same order.

    Args:
        task: Task that makes model and optimizer.
        method: Method of averaging gradients.
        seed: Seed of the weights.
        node: Name of this rank's node; None takes the machine's host name.
        nic_bytes_per_second: Rate of the links; None leaves it to gradwire's default.
        warm: True compresses from the second step on, as for timing, in place of a longer dense start.
    """
    model = task.model(seed)
    if method.sharding is not None:
        return _sharded(task, model, method, method.sharding, node, nic_bytes_per_second)
    optimizer = task.optimizer(model.parameters())
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if method.name == TORCH_FP16:
        wrapped.register_comm_hook(None, fp16_compress_hook)
    if method.compressor is None:
        return MethodTraining(wrapped, optimizer, 0)
    options = {**options_of(method.compressor), **method.options}
    if options.get("momentum") and method.compressor != "none":
        options |= gradwire.take_momentum(optimizer)
    if method.compressor == "none":
        options = {}
    elif warm and "warmup_steps" in options:
        options["warmup_steps"] = 1
    gradwire.check_optimizer(method.compressor, optimizer, options)
    gradwire.attach(
        wrapped,
        compressor=method.compressor,
        compressor_options=options,
        hostname=node,
        nic_bytes_per_second=nic_bytes_per_second,
    )
    return MethodTraining(wrapped, optimizer, int(options.get("warmup_steps") or 0))  # type: ignore[arg-type]


def _sharded(
    task: Task, model: nn.Module, method: Method, sharding: Sharding, node: str | None, rate: float | None
) -> MethodTraining:
    """Shards a model with FSDP2, one unit for each block and one for the rest, and applies gradwire to it."""
    mesh = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("replicate", "shard"))
    sharers = mesh["shard"] if sharding.inside_nodes else init_device_mesh("cpu", (RANKS,))
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=sharers)
    fully_shard(model, mesh=sharers)
    if sharding.shards is not None:
        state = gradwire.fsdp.apply(
            model,
            replicas=mesh["replicate"] if sharding.inside_nodes else None,
            shards=sharding.shards,
            weights=sharding.weights,
            compressor=method.compressor,
            hostname=node,
            nic_bytes_per_second=rate,
        )
        model.gradwire_state = state  # type: ignore[assignment]  # kept as long as the model
    return MethodTraining(model, task.optimizer(model.parameters()), 0)


EVALUATED = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)
"""Shares of the run after which the quality is measured; denser where the runs reach their last quality."""


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Holds the result of one training run."""

    task: str
    method: str
    seed: int
    dense_steps: int
    """Number of steps at the start whose gradients were sent without compression."""
    curve: tuple[tuple[int, float], ...]
    """(steps taken, quality), ascending."""

    @property
    def final(self) -> float:
        """Returns the quality at the end."""
        return self.curve[-1][1]


def method_of(task: Task, name: str) -> Method:
    """Returns the method with this name under the task's optimizer: one of the tables, or a registered compressor.

    Args:
        task: Task whose optimizer decides the methods.
        name: Name in the tables, `plain DDP` or `gradwire int8`, or of a compressor, also one that `--import` added.

    Raises:
        ValueError: There is no such method or compressor.
    """
    found = {method.name: method for method in (*METHODS[task.facts.optimizer], *SHARDED_METHODS)}
    if name in found:
        return found[name]
    if name in compressor_names():
        return found.get(f"gradwire {name}", _gradwire(name))
    raise ValueError(
        f"`--method` is {name!r}; {task.facts.name} has {', '.join(found)}, and the compressors are "
        f"{', '.join(compressor_names())}: `--import MODULE` brings one of your own"
    )


def train(task: Task, method: Method, seed: int) -> TrainingRun:
    """Trains once on forked ranks.

    Args:
        task: Task with its data loaded, so that the ranks share them.
        method: Method of averaging gradients.
        seed: Seed of weights and batches.

    Raises:
        RuntimeError: A rank failed; it has printed why.
    """
    name = f"{task.facts.name}, {method.name}, seed {seed}"
    return run_from(on_forked_ranks((2, 2), lambda place: asdict(train_as_rank(task, method, seed, place)), name))


def on_forked_ranks(
    nodes: Sequence[int], body: Callable[[ForkedRank], dict[str, object]], name: str
) -> dict[str, object]:
    """Runs a function on forked ranks of this machine, each with one thread, in their default process group.

    Args:
        nodes: Number of ranks of each logical node.
        body: Function that each rank runs; its result has to be plain data for JSON.
        name: Description of the run, for the error.

    Returns:
        The result of rank 0.

    Raises:
        RuntimeError: A rank failed; it has printed why.
    """
    for module in LAZY:  # once here, not in every rank
        importlib.import_module(module)
    with held_port() as port, tempfile.TemporaryDirectory(prefix="gradwire-convergence-") as folder:
        places = [
            ForkedRank(placement.rank, sum(nodes), placement.node, tuple(nodes), "127.0.0.1", port, "lo")
            for placement in place_ranks(nodes)
        ]
        file = Path(folder, "run.json")

        def rank_main(place: ForkedRank, _: list[str]) -> int:
            torch.set_num_threads(1)
            place.connect()
            found = body(place)
            if place.rank == 0:
                file.write_text(json.dumps(found))
            place.leave()
            return 0

        if status := fork_ranks(places, rank_main, []):
            raise RuntimeError(f"a rank of {name} ended with status {status}")
        found: dict[str, object] = json.loads(file.read_text())
        return found


def run_from(record: dict[str, object]) -> TrainingRun:
    """Rebuilds a run from the dictionary that `asdict` made and JSON stored."""
    curve = record["curve"]
    assert isinstance(curve, list)
    return TrainingRun(**{**record, "curve": tuple((int(step), float(value)) for step, value in curve)})  # type: ignore[arg-type]


def train_as_rank(task: Task, method: Method, seed: int, place: ForkedRank) -> TrainingRun:
    """Trains as one rank of a run, and returns its result, the same on all ranks.

    Args:
        task: Task to train, with its data loaded.
        method: Method of averaging gradients.
        seed: Seed of weights and batches.
        place: Rank and nodes of the forked job, whose default process group is connected.
    """
    steps = task.facts.steps
    training = make_training(task, method, seed=seed, node=f"node{place.node}")
    (schedule,), marks = schedules_of([training.optimizer], steps), marks_of(steps, EVALUATED)
    curve = []
    for step in range(steps):
        training.take_step(lambda model, step=step: task.loss(model, step, place.rank, seed))  # type: ignore[misc]
        schedule.step()
        if step + 1 in marks:
            curve.append((step + 1, quality_of_ranks(task, training.model, place.rank)))
    return TrainingRun(task.facts.name, method.name, seed, training.dense_steps, tuple(curve))
