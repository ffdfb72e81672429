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

import torch
import torch.distributed as dist

from gradwire.bench.train.contender import HOOKS, Contestant, NicCounter, check_hook
from gradwire.bench.train.model import loss_in_nats
from gradwire.bench.train.text import batch_at, library_text, split_text

VALIDATION_BATCHES = 8
LAST_STEPS = 10
FIRST_STEPS = 2
"""Left out of the timing: DDP rebuilds its buckets after the first step, gradwire connects its groups in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """What a training run under one hook came to; the same on all ranks."""

    hook: str
    steps: int
    gradient_nbytes: int
    """Size of all gradients of one rank."""
    seconds_per_step: float
    """Median over the steps, of the slowest rank."""
    nic_nbytes_per_step: float | None
    """Median over the steps, of the busiest node and direction; None where it was not counted."""
    first_loss: float
    final_loss: float
    """Training loss in nats per byte, mean of the last 10 steps over all ranks."""
    validation_bits_per_byte: float
    report: str | None
    """The hook's own report, as text."""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench.train.train", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--hook", action="append", metavar="HOOK", help=f"{HOOKS}; repeat to compare (default plain)")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps (default 120)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step (default 8)")
    parser.add_argument("--context", type=int, default=128, help="bytes in a sequence (default 128)")
    parser.add_argument("--nic-interface", metavar="NAME", help="count this interface's bytes, for example eth0")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rank 0 writes the results there")
    return parser


def train(contestants: Sequence[Contestant], text: torch.Tensor, *, steps: int, batch: int, context: int) -> None:
    """Trains every contestant for the same steps on the same batches, in turns.

    Args:
        contestants: Each changed in place.
        text: The training text; uint8, 1-d.
        steps: Optimizer steps of each.
        batch: Sequences per rank and step.
        context: Bytes in a sequence.
    """
    rank = dist.get_rank()
    for step in range(steps):
        inputs, targets = batch_at(text, step, rank, batch=batch, context=context)
        for contestant in contestants:
            contestant.take_step(inputs, targets)
        if rank == 0 and (step + 1) % max(1, steps // 15) == 0:
            columns = (f"{one.hook}: loss {one.losses[-1]:.3f}, {one.seconds[-1]:.2f} s" for one in contestants)
            print(f"step {step + 1:>4}/{steps}  " + "  |  ".join(columns), flush=True)


@torch.no_grad()
def validate(contestant: Contestant, text: torch.Tensor, *, batch: int, context: int) -> float:
    """Returns the bits per byte on text that was not trained on, the mean over all ranks.

    Args:
        contestant: Left as it is.
        text: The validation text; uint8, 1-d.
        batch: Sequences at a time.
        context: Bytes in a sequence.
    """
    losses = []
    for number in range(VALIDATION_BATCHES):
        inputs, targets = batch_at(text, number, dist.get_rank(), batch=batch, context=context)
        # DDP's forward would synchronise buffers; the bare model needs no other rank.
        losses.append(loss_in_nats(contestant.model.module, inputs, targets))
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size() / math.log(2)


def summarize(
    contestant: Contestant, validation: torch.Tensor, *, batch: int, context: int, counted: bool
) -> TrainingResult:
    """Brings the ranks' figures together.

    Args:
        contestant: After its last step.
        validation: The validation text; uint8, 1-d.
        batch: Sequences at a time in validation.
        context: Bytes in a sequence.
        counted: Whether the network card's bytes were counted.
    """
    seconds = torch.tensor(contestant.seconds)
    nbytes = torch.stack(contestant.nic_nbytes)
    losses = torch.tensor(contestant.losses) / dist.get_world_size()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(nbytes, dist.ReduceOp.MAX)
    dist.all_reduce(losses)
    timed = slice(FIRST_STEPS if len(seconds) > FIRST_STEPS else 0, None)
    return TrainingResult(
        hook=contestant.hook,
        steps=len(losses),
        gradient_nbytes=sum(weights.numel() * weights.element_size() for weights in contestant.model.parameters()),
        seconds_per_step=statistics.median(seconds[timed].tolist()),
        nic_nbytes_per_step=float(statistics.median(nbytes.amax(dim=1)[timed].tolist())) if counted else None,
        first_loss=losses[0].item(),
        final_loss=losses[-LAST_STEPS:].mean().item(),
        validation_bits_per_byte=validate(contestant, validation, batch=batch, context=context),
        report=None if contestant.report is None else contestant.report(),
    )


def run(options: argparse.Namespace) -> list[TrainingResult]:
    """Trains as the options say, in the default process group.

    Args:
        options: Of `build_parser`.
    """
    shape = {"batch": options.batch, "context": options.context}
    training, validation = split_text(library_text())
    nic = NicCounter(options.nic_interface)
    hooks = options.hook or ["plain"]
    contestants = [Contestant(hook, steps=options.steps, context=options.context, nic=nic) for hook in hooks]
    if dist.get_rank() == 0:
        weights = sum(parameter.numel() for parameter in contestants[0].model.parameters())
        print(f"{weights:,} parameters, {training.numel():,} bytes of text, {dist.get_world_size()} ranks", flush=True)
    train(contestants, training, steps=options.steps, **shape)
    counted = options.nic_interface is not None
    return [summarize(one, validation, counted=counted, **shape) for one in contestants]


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for options that make no sense, before the ranks meet.

    Args:
        options: Of `build_parser`.
    """
    for name in ("steps", "batch", "context"):
        if getattr(options, name) < 1:
            raise ValueError(f"`--{name}`: found {getattr(options, name)}, wanted at least 1")
    for hook in options.hook or []:
        check_hook(hook)
    if options.nic_interface is not None and not Path("/sys/class/net", options.nic_interface).exists():
        raise ValueError(f"`--nic-interface`: this node has no {options.nic_interface!r}; see `ip link`")


def main(argv: list[str]) -> int:
    """Trains as one rank of a job that torchrun or `gradwire emulate` started; returns the exit status.

    Args:
        argv: Options.
    """
    options = build_parser().parse_args(argv)
    try:
        check(options)
    except ValueError as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = run(options)
    if dist.get_rank() == 0:
        for result in results:
            if result.report is not None:
                print(f"{result.hook}:\n{result.report}", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    # Rank 0 serves the store: nobody may still need it when it leaves.
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
