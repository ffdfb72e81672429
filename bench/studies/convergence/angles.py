"""Measures the angle by which a compressor turns Muon's steps, for docs/results/optimizers.md; takes a minute.

    python -m gradwire.bench.studies.convergence.angles int8 int4 waterfill4 waterfill2

A transformer is trained with Muon and exact sums for some steps, and the gradients of its matrices are kept, of each of
two nodes. The compressors then make their sums of them, with what they hold back, and a momentum is kept of those as
Muon does. Both momenta, of the exact sums and of the others, are made orthogonal as Muon makes them: the angle between
them says how much of a step is noise.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
from torch import Tensor
from torch.optim import Muon

from gradwire.bench.machine import machine_line
from gradwire.bench.studies.convergence.alone import NODES, reduce_together
from gradwire.bench.studies.convergence.optimizers import INSIDE, MUON, MUON_MOMENTUM, is_muons, optimizers_of
from gradwire.bench.studies.convergence.tasks import RANKS, TextTask
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.bench.terminal import complain
from gradwire.comms.plan.codec_price import layout_of
from gradwire.compressors.base import Layout
from gradwire.compressors.registry import make

BEFORE, KEPT = 60, 70
"""Steps of training before gradients are kept, and with them: past the rise of the learning rate."""
SETTLED, BETWEEN = 30, 4
"""Kept steps before the first comparison of momenta, and from one comparison to the next."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Holds recorded gradients of the matrices that Muon trains."""

    layout: Layout
    steps: tuple[tuple[Tensor, ...], ...]
    """Gradient of each node at each step, (layout.numel,) float32; their sum over the nodes is the mean over all
    ranks."""


def keep_gradients(task: TextTask, seed: int, only: str = "*") -> Kept:
    """Trains with exact sums, and returns the gradients of the last `KEPT` steps.

    Args:
        task: Task with its data loaded.
        seed: Seed of weights and batches.
        only: Name pattern of the matrices whose gradients are kept.

    Raises:
        ValueError: No matrix that Muon trains has such a name.
    """
    model = task.model(seed)
    optimizers = optimizers_of(task, model, MUON)
    named = [(name, each) for name, each in model.named_parameters() if is_muons(name, each) and fnmatch(name, only)]
    if not named:
        raise ValueError(f"`only` is {only!r}, and no matrix that Muon trains has such a name; wanted one as {INSIDE}*")
    kept = []
    for step in range(BEFORE + KEPT):
        model.zero_grad()
        flats: list[Tensor] = []
        for node in range(NODES):
            for rank in range(node * RANKS // NODES, (node + 1) * RANKS // NODES):
                (task.loss(model, step, rank, seed) / RANKS).backward()  # type: ignore[no-untyped-call]
            so_far = torch.cat([each.grad.reshape(-1) for _, each in named if each.grad is not None])
            flats.append(so_far - sum(flats))
        if step >= BEFORE:
            kept.append(tuple(flats))
        for optimizer in optimizers:
            optimizer.step()
    return Kept(layout_of([(name, tuple(each.shape)) for name, each in named]), tuple(kept))


def orthogonal(matrix: Tensor) -> Tensor:
    """Returns the orthogonalized momentum, from a step of torch's Muon on a matrix of zeros."""
    parameter = torch.nn.Parameter(torch.zeros_like(matrix))
    parameter.grad = matrix.clone()
    Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()  # type: ignore[no-untyped-call]
    return parameter.detach()


def _looked_ahead(momentum: Tensor, gradient: Tensor) -> Tensor:
    """Updates a momentum in place; returns Nesterov's look-ahead, the matrix that Muon makes orthogonal."""
    momentum.lerp_(gradient, 1 - MUON_MOMENTUM)
    return gradient.lerp(momentum, MUON_MOMENTUM)


def degrees(kept: Kept, compressor: str) -> tuple[float, float, float]:
    """Measures the angles in degrees between Muon's steps with a compressor and with exact sums.

    Args:
        kept: Recorded gradients.
        compressor: Name of the compressor.

    Returns:
        (mean over the matrices, smallest, largest).
    """
    compressors = [make(compressor) for _ in range(NODES)]
    exact, other = torch.zeros(kept.layout.numel), torch.zeros(kept.layout.numel)
    cosines: dict[str, list[float]] = {item.name: [] for item in kept.layout.slices}
    for number, nodes in enumerate(kept.steps):
        flats = [each.clone() for each in nodes]
        reduce_together(compressors, flats, kept.layout)
        ahead = _looked_ahead(exact, torch.stack(nodes).sum(0)), _looked_ahead(other, flats[0])
        if number < SETTLED or (number - SETTLED) % BETWEEN:
            continue
        for item in kept.layout.slices:
            one, two = (orthogonal(each[item.start : item.stop].view(item.shape)).view(-1) for each in ahead)
            cosines[item.name].append(float(torch.nn.functional.cosine_similarity(one, two, dim=0)))
    means = [math.degrees(math.acos(min(1.0, sum(each) / len(each)))) for each in cosines.values()]
    return sum(means) / len(means), min(means), max(means)


def table(kept: Kept, names: Sequence[str]) -> Iterator[str]:
    """Yields the lines of a table with a row for each compressor."""
    yield "| compressor | bits an element | degrees, mean over the matrices | least to largest |"
    yield "|---|---|---|---|"
    for name in names:
        mean, least, largest = degrees(kept, name)
        bits = 8 * make(name).wire_nbytes(kept.layout, NODES) / kept.layout.numel
        yield f"| `{name}` | {bits:.2f} | {mean:.0f} | {least:.0f} to {largest:.0f} |"


def main(argv: list[str]) -> int:
    """Measures the compressors that the command line names, and prints the table; returns 0, or 2 for a bad option."""
    parser = StudyParser("convergence.angles", __doc__)
    parser.add_argument("compressor", nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of the names of matrices (default: all)")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    task = TextTask()
    task.load()
    try:
        kept = keep_gradients(task, asked.seed, asked.only)
    except ValueError as error:
        complain("angles", error)
        return 2
    for line in table(kept, asked.compressor):
        print(line, flush=True)
    print(f"\n{machine_line()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
