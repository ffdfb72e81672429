"""Data-parallel training of a byte-level transformer, under one communication hook or several side by side.

Start it with torchrun or `gradwire emulate`:

    gradwire emulate --nodes 2 --ranks-per-node 2 --nic 50mbit -- python -m gradwire.bench.train.train --hook gradwire

With several `--hook`, each trains its own copy of the same model on the same batches, and they take turns step by
step: whatever else the machine does slows all of them alike, so that their ratio means something.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.bench.arguments import CommandParser
from gradwire.bench.configuration import Configuration, take_turns
from gradwire.bench.train.model import ByteTransformer, loss_in_nats
from gradwire.bench.train.text import batch_at, library_text, split_text
from gradwire.comms.boundary.files import replace_text
from gradwire.comms.environment import launcher_variables

PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 10
HOOKS = "plain, torch-fp16, gradwire, gradwire:COMPRESSOR"
"""Values of `--hook`, as one text for messages."""
CPU = torch.device("cpu")


def check_hook(hook: str) -> None:
    """Raises ValueError unless `hook` is a value of `--hook` that this program knows.

    The name of a compressor is not checked; gradwire does that when it is used.

    Args:
        hook: "plain", "torch-fp16", "gradwire", or "gradwire:" and the name of a compressor.
    """
    if hook not in ("plain", "torch-fp16", "gradwire") and not hook.startswith("gradwire:"):
        raise ValueError(f"`--hook`: found {hook!r}, wanted one of {HOOKS}")


def attach_hook(
    model: DistributedDataParallel, hook: str, nic_bytes_per_second: float | None = None, node: str | None = None
) -> gradwire.HookState | None:
    """Registers a communication hook.

    Args:
        model: Model that gets the hook, in place; nothing is registered for `plain`.
        hook: "plain", "torch-fp16", "gradwire", or "gradwire:" and the name of a compressor; see `check_hook`.
        nic_bytes_per_second: Rate of a node's link; None if unknown, then gradwire assumes one.
        node: Name of this rank's node; None leaves it to GRADWIRE_HOSTNAME, else to the machine.

    Returns:
        The state of gradwire's hook; None for the others.

    Raises:
        ValueError: The hook is unknown.
    """
    check_hook(hook)
    name, _, compressor = hook.partition(":")
    if name == "gradwire":
        placed: dict[str, Any] = {} if node is None else {"hostname": node}
        return gradwire.attach(
            model, compressor=compressor or None, nic_bytes_per_second=nic_bytes_per_second, **placed
        )
    if hook == "torch-fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    return None


class HookTraining:
    """A model, its optimizer and one communication hook; takes one training step when it is its turn."""

    def __init__(
        self,
        hook: str,
        *,
        steps: int,
        context: int,
        nic_bytes_per_second: float | None = None,
        device: torch.device = CPU,
        node: str | None = None,
    ) -> None:
        """Makes the model (the same one for every hook) and registers the hook.

        Args:
            hook: Communication hook; see `check_hook`.
            steps: Length of the learning rate's schedule, in steps.
            context: Bytes in a sequence.
            nic_bytes_per_second: Rate of a node's link; None if unknown, then gradwire assumes one.
            device: Device on which the model trains.
            node: Name of this rank's node, see `attach_hook`.
        """
        self.hook = hook
        self.device = device
        self.model = DistributedDataParallel(ByteTransformer(context=context).to(device))
        self.state = attach_hook(self.model, hook, nic_bytes_per_second, node)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: _share_of_peak(step, steps))
        self._loss = torch.zeros(())
        self.batch = (torch.empty(0, context), torch.empty(0, context))
        """(inputs, targets) of the next step: (batch, context), int64, on `device`."""
        self.losses: list[float] = []
        """Loss of each of this rank's batches so far, in nats per byte."""

    @property
    def gradient_nbytes(self) -> int:
        """Returns the bytes of all gradients of one rank."""
        return sum(weights.numel() * weights.element_size() for weights in self.model.parameters())

    def take_step(self, _: int) -> None:
        """Trains on `batch`; all ranks call it together."""
        self._loss = loss_in_nats(self.model, *self.batch)
        self._loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without annotations
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the clock stops when the step is done, not when it was asked for

    def end_step(self, _: int) -> None:
        """Advances the schedule and reads the loss, outside the timed part of a step."""
        self._schedule.step()
        self.losses.append(self._loss.item())


def _share_of_peak(step: int, steps: int) -> float:
    """Returns the learning rate over its peak: a linear warm-up, then half a cosine down to a tenth."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = min(1.0, (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))
    return 0.55 + 0.45 * math.cos(math.pi * progress)


VALIDATION_BATCHES = 8
LAST_STEPS = 10
STEPS_TO_PREDICT = 4
"""Steps before a prediction is possible: HookState.advise() needs three whole ones."""
FIRST_STEPS = 2
"""Steps left out of the timing: DDP rebuilds its buckets after the first, gradwire connects its groups in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """Results of a training under one hook; the same on all ranks."""

    hook: str
    steps: int
    gradient_nbytes: int
    """Size of all gradients of one rank."""
    seconds_per_step: float
    """Duration of a step on the slowest rank, median over the steps."""
    nic_nbytes_per_step: float | None
    """Bytes of a step on the busiest node's link, in its busier direction, median over the steps; None if not
    counted."""
    first_loss: float
    final_loss: float
    """Training loss in nats per byte, mean of the last 10 steps over all ranks."""
    loss_deviation: float
    """Standard deviation of the losses of these steps; 0 for a single step."""
    validation_bits_per_byte: float
    report: str | None
    """The hook's own report, as text."""
    predicted_seconds: dict[str, float] | None = None
    """Compressor that fits the optimizer -> seconds predicted from the start of a backward pass to the last gradient.
    Set only on rank 0, for gradwire without a compressor; None also if the links' rate is unknown."""
    predicted_plain_seconds: float | None = None
    """Predicted seconds of the same for plain DDP; None if `predicted_seconds` is None."""
    node_nbytes_per_step: float | None = None
    """Bytes that a node's ranks send to other nodes in a step, mean over nodes: counted from gradwire's transfers,
    computed for a ring of all ranks for other hooks. None for one node, or if nodes have unequal numbers of ranks."""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = CommandParser(prog="python -m gradwire.bench.train.train", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hook", action="append", metavar="HOOK", help=f"{HOOKS}; repeat to compare (default plain)")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps (default 120)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step (default 8)")
    parser.add_argument("--context", type=int, default=128, help="bytes in a sequence (default 128)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model trains (default cpu)")
    parser.add_argument(
        "--nodes", metavar="LETTERS", help="node of each rank as gradwire is told, such as aabb (default: its machine)"
    )
    parser.add_argument("--nic-interface", metavar="NAME", help="count this interface's bytes, for example eth0")
    parser.add_argument(
        "--nic-bytes-per-second",
        type=float,
        metavar="RATE",
        help="of a node's link; without it gradwire presumes a rate, and so are its predictions",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="rank 0 writes the results there")
    return parser


def train(
    trainings: Sequence[HookTraining],
    text: torch.Tensor,
    *,
    steps: int,
    batch: int,
    context: int,
    interface: str | None = None,
) -> list[Configuration]:
    """Trains every model for the same steps on the same batches, in turns.

    Args:
        trainings: Models with their hooks and optimizers; changed in place.
        text: Training text, uint8, 1-d.
        steps: Number of optimizer steps of each model.
        batch: Number of sequences per rank and step.
        context: Bytes in a sequence.
        interface: Network interface whose bytes are counted; None counts nothing.

    Returns:
        Seconds and bytes of each model's steps, equal on all ranks.
    """
    configurations = [Configuration(one.hook, one.take_step, one.end_step) for one in trainings]

    def draw(step: int) -> None:
        inputs, targets = batch_at(text, step, dist.get_rank(), batch=batch, context=context)
        for training in trainings:
            training.batch = (inputs.to(training.device), targets.to(training.device))

    width = len(f"step {0:>4}/{steps}")
    widths = [max(len(one.hook), len("loss 0.000 0.00 s")) for one in trainings]

    def show(_: str, turn: int, turns: int) -> None:
        step, unfinished = divmod(turn, len(trainings))
        if turn == 1:
            hooks = (f"{one.hook:<{column}}" for one, column in zip(trainings, widths, strict=True))
            print("  ".join([" " * width, *hooks]).rstrip(), flush=True)
        if not unfinished and step % max(1, steps // 15) == 0:
            columns = (
                f"{f'loss {one.losses[-1]:.3f} {configuration.seconds[-1]:.2f} s':<{column}}"
                for one, configuration, column in zip(trainings, configurations, widths, strict=True)
            )
            print("  ".join([f"step {step:>4}/{steps}", *columns]).rstrip(), flush=True)

    take_turns(configurations, rounds=steps, warmup=0, interface=interface, before_round=draw, progress=show)
    return configurations


@torch.no_grad()
def validate(training: HookTraining, text: torch.Tensor, *, batch: int, context: int) -> float:
    """Returns the bits per byte on text that was not trained on, the mean over all ranks.

    Args:
        training: Training whose model is validated; not changed.
        text: Validation text, uint8, 1-d.
        batch: Number of sequences in a batch.
        context: Bytes in a sequence.
    """
    losses = []
    for number in range(VALIDATION_BATCHES):
        inputs, targets = batch_at(text, number, dist.get_rank(), batch=batch, context=context)
        # DDP's forward would synchronise buffers; the bare model needs no other rank.
        losses.append(loss_in_nats(training.model.module, inputs.to(training.device), targets.to(training.device)))
    mean = torch.stack(losses).mean().cpu()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size() / math.log(2)


def summarize(
    training: HookTraining,
    configuration: Configuration,
    validation: torch.Tensor,
    *,
    batch: int,
    context: int,
    counted: bool,
) -> TrainingResult:
    """Combines the figures of all ranks.

    Args:
        training: The training, after its last step.
        configuration: Times and bytes of its steps.
        validation: The validation text; uint8, 1-d.
        batch: Sequences at a time in validation.
        context: Bytes in a sequence.
        counted: True if the bytes of the NIC were counted.
    """
    losses = torch.tensor(training.losses) / dist.get_world_size()
    dist.all_reduce(losses)
    last = losses[-LAST_STEPS:].tolist()
    predicted, flat = predict(training)
    timed = slice(FIRST_STEPS if len(losses) > FIRST_STEPS else 0, None)
    return TrainingResult(
        hook=training.hook,
        steps=len(losses),
        gradient_nbytes=training.gradient_nbytes,
        seconds_per_step=statistics.median(configuration.seconds[timed]),
        nic_nbytes_per_step=float(statistics.median(configuration.nic_nbytes[timed])) if counted else None,
        first_loss=losses[0].item(),
        final_loss=losses[-LAST_STEPS:].mean().item(),
        loss_deviation=statistics.pstdev(last),
        validation_bits_per_byte=validate(training, validation, batch=batch, context=context),
        report=None if training.state is None else str(training.state.report()),
        predicted_seconds=predicted,
        predicted_plain_seconds=flat,
        node_nbytes_per_step=node_nbytes(training),
    )


def predict(training: HookTraining) -> tuple[dict[str, float] | None, float | None]:
    """Predicts the backward pass's seconds with each compressor and under plain DDP.

    Args:
        training: Training after its last step.

    Returns:
        `TrainingResult.predicted_seconds` and `predicted_plain_seconds`; (None, None) where they are not set.
    """
    state = training.state
    if state is None or state.config.compressor is not None:
        return None, None
    if dist.get_rank() != 0 or len(training.losses) < STEPS_TO_PREDICT or (advised := state.advise("adamw")).assumed:
        return None, None
    # Subtract the rest of an observed step: it includes the turns of the other hooks.
    rest = max(0.0, advised.headroom_seconds - advised.observed.backward_seconds)
    best: dict[str, float] = {}
    for candidate in advised.advice.candidates:
        if candidate.available and not candidate.warning:
            best[candidate.compressor] = min(candidate.step_seconds - rest, best.get(candidate.compressor, math.inf))
    return best, advised.advice.candidate("flat").step_seconds - rest


def node_nbytes(training: HookTraining) -> float | None:
    """Returns the bytes that a node sends to others in a step, `TrainingResult.node_nbytes_per_step`.

    All ranks have to call it together.

    Args:
        training: Training after its last step.
    """
    ranks, local = dist.get_world_size(), int(launcher_variables().get("LOCAL_WORLD_SIZE", "0"))
    if not 0 < local < ranks or ranks % local:
        return None
    if training.state is None:
        narrow = 2 if training.hook == "torch-fp16" else 1
        return 2 * (ranks - 1) / ranks * training.gradient_nbytes / narrow
    report = training.state.report()
    sent = {
        level: torch.tensor([sum(row.wire_nbytes for row in report.rows if row.level == level)], dtype=torch.float64)
        for level in ("inter_node", "all ranks")
    }
    for nbytes in sent.values():
        dist.all_reduce(nbytes)
    # Around a ring of all ranks every rank sends the same, and the messages of one rank a node leave it.
    crossed = sent["inter_node"].item() / (ranks // local) + sent["all ranks"].item() / ranks
    return crossed / report.steps


def rank_device(kind: str) -> torch.device:
    """Selects this rank's device, makes it the current one and returns it; GPUs are assigned in the order of ranks.

    The ranks of a logical or emulated cluster share the machine's GPUs, so the global rank decides and not the local
    one; on a cluster whose ranks fill one node after the other both give the same GPU.

    Args:
        kind: `cpu` or `cuda`.
    """
    if kind == "cpu":
        return CPU
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def run(options: argparse.Namespace) -> list[TrainingResult]:
    """Trains in the default process group, and returns a result for each hook.

    Args:
        options: Parsed options, see `build_parser`.
    """
    shape = {"batch": options.batch, "context": options.context}
    training, validation = split_text(library_text())
    hooks = options.hook or ["plain"]
    device = rank_device(options.device)
    trainings = [
        HookTraining(
            hook,
            steps=options.steps,
            context=options.context,
            nic_bytes_per_second=options.nic_bytes_per_second,
            device=device,
            node=None if options.nodes is None else options.nodes[dist.get_rank()],
        )
        for hook in hooks
    ]
    if dist.get_rank() == 0:
        weights = sum(parameter.numel() for parameter in trainings[0].model.parameters())
        print(f"{weights:,} parameters, {training.numel():,} bytes of text, {dist.get_world_size()} ranks", flush=True)
    configurations = train(trainings, training, steps=options.steps, interface=options.nic_interface, **shape)
    counted = options.nic_interface is not None
    return [
        summarize(one, configuration, validation, counted=counted, **shape)
        for one, configuration in zip(trainings, configurations, strict=True)
    ]


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for unusable options, before the ranks connect.

    Args:
        options: Parsed options, see `build_parser`.
    """
    for name in ("steps", "batch", "context"):
        if getattr(options, name) < 1:
            raise ValueError(f"`--{name}`: found {getattr(options, name)}, wanted at least 1")
    for hook in options.hook or []:
        check_hook(hook)
    ranks = int(launcher_variables().get("WORLD_SIZE", "1"))
    if options.nodes is not None and len(options.nodes) != ranks:
        raise ValueError(f"`--nodes`: found {options.nodes!r}, wanted a letter for each of {ranks} ranks")
    if options.device == "cuda" and torch.cuda.device_count() == 0:
        raise ValueError(f"`--device`: found cuda, but torch {torch.__version__} finds no CUDA device; wanted cpu")
    if options.nic_interface is not None and not Path("/sys/class/net", options.nic_interface).exists():
        raise ValueError(f"`--nic-interface`: this node has no {options.nic_interface!r}; see `ip link`")


def main(argv: list[str]) -> int:
    """Trains as one rank of a job that torchrun or `gradwire emulate` started; returns the exit status.

    Args:
        argv: Words of the command line.
    """
    options = build_parser().parse_args(argv)
    try:
        check(options)
    except ValueError as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    # On CUDA the figures and barriers still go through Gloo: only what is trained shall be NCCL's.
    dist.init_process_group("gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl")
    results = run(options)
    if dist.get_rank() == 0:
        for result in results:
            if result.report is not None:
                print(f"{result.hook}:\n{result.report}", flush=True)
        if options.json is not None:
            replace_text(options.json, json.dumps([asdict(result) for result in results], indent=2) + "\n")
    # Rank 0 serves the store: nobody may still need it when it leaves.
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
