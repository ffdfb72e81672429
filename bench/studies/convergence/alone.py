"""Trains with a compressor as all nodes in one process, and reports the quality: for docs/results/convergence.md.

One process instead of four, and no network, so that a recipe can be tried in minutes: the gradients of each node's
ranks are averaged exactly, the compressors of both nodes take turns, and one optimizer steps. Bytes and quality are
those of the real job, but for the order in which floats are added; nothing is timed.

    python -m gradwire.bench.studies.convergence.alone --task text --compressor powersgd --options '{"rank": 16}'
    python -m gradwire.bench.studies.convergence.alone --task text --import my_codecs --compressor two_bits
    python -m gradwire.bench.studies.convergence.alone --task text --optimizer muon --compressor waterfill4
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from gradwire.bench.arguments import add_import_option, check_number, import_modules
from gradwire.bench.studies.convergence.optimizers import INSIDE, MUON, MUON_MOMENTUM, optimizers_of
from gradwire.bench.studies.convergence.tasks import RANKS, TASKS, Task, marks_of, schedules_of
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.bench.terminal import complain
from gradwire.comms.plan.codec_price import layout_of
from gradwire.compressors.base import (
    ALL_GATHER,
    ALL_REDUCE,
    Collective,
    Compressor,
    Layout,
    Member,
    Request,
    traits_of,
)
from gradwire.compressors.composite import make_composite
from gradwire.compressors.optim.fit import take_momentum
from gradwire.compressors.registry import Option, options_of

NODES = 2
EVALUATED = (0.25, 0.5, 0.75, 0.875, 1.0)
"""Shares of the run after which the quality is measured."""
TIMED_UPDATES = 10
"""Number of updates after which the duration of the run is estimated: the first ones are hardly slower than others."""

Told = Callable[[int, int, float | None], None]
"""Function of (updates done, updates of the run, quality or None if not measured), called after each update."""


@dataclass(frozen=True, slots=True)
class LoneRun:
    """Holds the result of a run."""

    curve: tuple[tuple[int, float], ...]
    """(number of updates, quality in the task's unit), ascending."""
    ratio: float
    """Bytes of float32 gradients of every batch over the bytes sent between the nodes, over the whole run."""

    @property
    def quality(self) -> float:
        """Returns the quality at the end of the run."""
        return self.curve[-1][1]


@torch.no_grad()
def quality_of(task: Task, models: Sequence[nn.Module], ranks: int = RANKS) -> float:
    """Returns the quality on the held-out data, whose shares all ranks score.

    Args:
        task: Task with its data loaded.
        models: One model for all ranks, or one for each.
        ranks: Number of ranks among which the held-out data are divided.
    """
    chosen = models if len(models) == ranks else [models[0]] * ranks
    total = torch.stack([task.score(model, rank) for rank, model in enumerate(chosen)]).sum(0)
    return float(total[0] / total[1])


def meet(requests: Sequence[Request]) -> None:
    """Carries out the collectives that the nodes' compressors request at the same point, in place.

    Args:
        requests: Request of each node; all ask for the same collectives, on tensors of their own.

    Raises:
        ValueError: A collective has unequal parts, which this simulation does not support.
    """
    for collectives in zip(*((each,) if isinstance(each, Collective) else each for each in requests), strict=True):
        first = collectives[0]
        if first.bounds:
            raise ValueError(f"`{first.op}` has unequal parts; wanted equal ones")
        if first.op == ALL_REDUCE:
            total = torch.stack([each.tensors[0] for each in collectives]).sum(0)
            for each in collectives:
                each.tensors[0].copy_(total)
        elif first.op == ALL_GATHER:
            everybody = torch.cat([each.tensors[1].view(-1) for each in collectives])
            for each in collectives:
                each.tensors[0].view(-1).copy_(everybody)
        else:
            sent = [each.tensors[1].chunk(len(collectives)) for each in collectives]
            for node, each in enumerate(collectives):
                each.tensors[0].copy_(torch.cat([parts[node] for parts in sent]).view_as(each.tensors[0]))


def run_together(running: Sequence[Iterator[Request]]) -> float:
    """Runs the members' generators to their ends, each as far as its next collective in turn.

    Returns:
        The bytes that one member sends in the collectives' bandwidth-optimal algorithms, in units of an all-reduce's:
        4 n for one of n float32.
    """
    sent = 0.0
    while (first := next(running[0], None)) is not None:
        meet([first, *(next(each) for each in running[1:])])
        for one in (first,) if isinstance(first, Collective) else first:
            # Half of what an all-reduce does, which is a reduce-scatter and an all-gather.
            sent += one.tensors[0].nbytes / (1 if one.op == ALL_REDUCE else 2)
    for each in running[1:]:
        next(each, None)
    return sent


def compressors_of(
    compressor: str,
    options: Mapping[str, Option],
    optimizers: Sequence[Optimizer],
    *,
    nodes: int = NODES,
    exact: Sequence[str] = (),
) -> list[Compressor]:
    """Makes a compressor for each node; one that applies momentum itself takes it over from the optimizer.

    Under Muon a compressor with momentum gets only the matrices that Muon trains; all others are sent in float16.

    Args:
        compressor: Name of the compressor.
        options: Options that differ from its defaults.
        optimizers: Optimizers from `optimizers_of`; their momentum is changed in place.
        nodes: Number of nodes.
        exact: Name patterns of the parameters that are not compressed.
    """
    kept: tuple[Mapping[str, object], ...] = tuple({"pattern": each} for each in exact)
    if {**options_of(compressor), **options}.get("momentum") and compressor != "none":
        if not isinstance(optimizers[0], Muon):
            options = {**options, **take_momentum(optimizers[0])}
        else:
            for group in optimizers[0].param_groups:
                group["momentum"] = 0.0
            inside = {"momentum": MUON_MOMENTUM, **options}
            rules = (*kept, {"max_dim": 1}, {"pattern": f"{INSIDE}*", "compressor": compressor, "options": inside})
            return [make_composite("fp16", {}, rules) for _ in range(nodes)]
    return [make_composite(compressor, options, kept) for _ in range(nodes)]


def train_alone(
    task: Task,
    compressor: str | None,
    options: Mapping[str, Option],
    seed: int,
    steps: int | None = None,
    *,
    optimizer: str | None = None,
    accumulate: int = 1,
    lr: float = 1.0,
    nodes: int = NODES,
    exact: Sequence[str] = (),
    told: Told | None = None,
) -> LoneRun:
    """Trains a task once, with all nodes in this process.

    Args:
        task: Task with its data loaded.
        compressor: Name of the compressor; None sums exactly.
        options: Options that differ from the compressor's defaults.
        seed: Seed of weights and batches.
        steps: Number of batches of each rank; None takes the task's own.
        optimizer: Kind of optimizer, see `optimizers_of`; None takes the task's own.
        accumulate: Number of batches of each rank for one update; gradients are sent only once an update.
        lr: Factor of the learning rates.
        nodes: Number of nodes, of two ranks each.
        exact: Name patterns of the parameters that are not compressed.
        told: Function that is called after each update, see `Told`; None calls nothing.

    Raises:
        ValueError: `steps` is no multiple of `accumulate`.
    """
    # The model, its optimizers, and a compressor for each node.
    steps = steps or task.facts.steps
    if steps % accumulate:
        raise ValueError(f"`accumulate` is {accumulate}; wanted a divisor of {steps} steps")
    updates = steps // accumulate
    model = task.model(seed)
    parameters = dict(reversed(list(model.named_parameters())))
    optimizers = optimizers_of(task, model, optimizer or task.facts.optimizer, lr=lr)
    layout = layout_of([(name, tuple(parameter.shape)) for name, parameter in parameters.items()])
    numel = layout.numel
    compressors = (
        [] if compressor is None else compressors_of(compressor, options, optimizers, nodes=nodes, exact=exact)
    )
    ranks = nodes * RANKS // NODES
    schedules, marks = schedules_of(optimizers, updates), marks_of(updates, EVALUATED)
    sent, curve = 0, []
    for update in range(updates):
        # The averaged gradient of each node's ranks.
        flats = []
        for node in range(nodes):
            model.zero_grad()
            for step in range(update * accumulate, (update + 1) * accumulate):
                for rank in range(node * RANKS // NODES, (node + 1) * RANKS // NODES):
                    (task.loss(model, step, rank, seed) / (ranks * accumulate)).backward()  # type: ignore[no-untyped-call]
            flats.append(torch.cat([_gradient(parameter) for parameter in parameters.values()]))
        # The sum over the nodes, compressed or exact, becomes the model's gradient.
        if compressors:
            sent += sent_nbytes(compressors[0], layout, nodes, update)
            both = enumerate(zip(compressors, flats, strict=True))
            run_together([each.all_reduce(flat, layout, Member(node, nodes)) for node, (each, flat) in both])
            for one in compressors:
                one.end_step(True)
        else:
            sent += 4 * numel
            for flat in flats[1:]:
                flats[0] += flat
        for item, parameter in zip(layout.slices, parameters.values(), strict=True):
            parameter.grad = flats[0][item.start : item.stop].view_as(parameter)
        # One update, and the quality where it is measured.
        for each in optimizers:
            each.step()
        for schedule in schedules:
            schedule.step()
        quality = quality_of(task, [model], ranks) if update + 1 in marks else None
        if quality is not None:
            curve.append((update + 1, quality))
        if told is not None:
            told(update + 1, updates, quality)
    return LoneRun(tuple(curve), 4 * numel * steps / sent)


def sent_nbytes(compressor: Compressor, layout: Layout, nodes: int, update: int) -> int:
    """Returns the bytes that a node sends in an update; during a dense start they are those of float32.

    Args:
        compressor: Compressor of the node.
        layout: Shapes of all parameters.
        nodes: Number of nodes.
        update: Number of the update, from 0.
    """
    found = 0
    for each, part in traits_of(compressor).parts(layout):
        # The start of dgc is not dense: it sends more of the gradient.
        dense = not each.name.startswith("dgc") and update < getattr(each, "warmup_steps", 0)
        found += 4 * part.numel if dense else each.wire_nbytes(part, nodes)
    return found


class Teller:
    """Prints the progress of a run on stderr: each quality when measured, and an estimate of the remaining time.

    Args:
        run: Description of the run, printed before each line.
        unit: Unit of the quality.
    """

    def __init__(self, run: str, unit: str) -> None:
        self._run, self._unit = run, unit
        self._began = time.monotonic()

    def begin(self, updates: int) -> None:
        """Prints after which updates the quality will be measured.

        Args:
            updates: Number of updates of the whole run.
        """
        marks = ", ".join(map(str, marks_of(updates, EVALUATED)))
        self._say(f"{updates} steps; figures after {marks}. How long that takes is said after {TIMED_UPDATES}.")

    def __call__(self, done: int, updates: int, quality: float | None) -> None:
        """Prints a line after an update with a quality, or with the time estimate; arguments as for `Told`."""
        seconds = time.monotonic() - self._began
        if quality is not None:
            self._say(f"step {done} of {updates}: {self._unit} {quality:.4f}, after {seconds:.0f} s")
        elif done == TIMED_UPDATES:
            first = next(mark for mark in marks_of(updates, EVALUATED) if mark > done)
            said = [f"{seconds * mark / done / 60:.1f} minutes" for mark in (first, updates)]
            self._say(f"{done} steps took {seconds:.1f} s: about {said[0]} to the next figure, {said[1]} in all")

    def _say(self, text: str) -> None:
        print(f"{self._run}: {text}", file=sys.stderr, flush=True)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter).view(-1) if parameter.grad is None else parameter.grad.reshape(-1)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = StudyParser("convergence.alone", __doc__)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--optimizer", help=f"{MUON}, or the task's own (default)")
    parser.add_argument("--compressor", help="its name (default: an exact sum)")
    add_import_option(parser)
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="of the compressor")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="batches of each rank (default: the task's own, 800 of text)"
    )
    parser.add_argument("--seed", action="append", type=int, help="repeatable (default: 0)")
    return parser


def main(argv: list[str]) -> int:
    """Trains once for each seed, and prints where each ended; returns 0, or 2 for a bad option."""
    asked = build_parser().parse_args(argv)
    try:
        check_number("--steps", asked.steps, 1, 10**9)
        import_modules(asked.imports)
        if asked.compressor is not None:
            options_of(asked.compressor)
    except ValueError as error:
        complain("alone", error)
        return 2
    torch.set_num_threads(1)
    task = TASKS[asked.task]()
    task.load()
    for seed in asked.seed or [0]:
        optimizer = asked.optimizer or task.facts.optimizer
        run = f"{asked.task}, {optimizer}, {asked.compressor or 'exact'} {asked.options or ''} seed {seed}"
        teller = Teller(run, task.facts.quality)
        teller.begin(asked.steps or task.facts.steps)
        ending = train_alone(
            task, asked.compressor, asked.options, seed, asked.steps, optimizer=asked.optimizer, told=teller
        )
        print(
            f"{run}: {task.facts.quality} {ending.quality:.4f}, {ending.ratio:.1f} times fewer bytes between the nodes",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
