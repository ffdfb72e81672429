"""One training run on two logical nodes of two ranks, and the quality on the way. Time plays no part in it."""

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire.bench.emulation.fork import Place, fork_ranks
from gradwire.bench.emulation.logical import free_port
from gradwire.bench.studies.convergence.methods import METHODS, Method, Trainee, make_trainee
from gradwire.bench.studies.convergence.tasks import RANKS, Task, share_of_peak

EVALUATED = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)
"""Shares of the run after which the quality is measured; denser where the runs reach their last quality."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one training run came to."""

    task: str
    method: str
    seed: int
    dense_steps: int
    """At the start, sent as without a compressor."""
    curve: tuple[tuple[int, float], ...]
    """(steps taken, quality), ascending."""

    @property
    def final(self) -> float:
        """Quality at the end."""
        return self.curve[-1][1]


def method_of(task: Task, name: str) -> Method:
    """Returns the method of that name under the task's optimizer.

    Raises:
        ValueError: There is none.
    """
    found = {method.name: method for method in METHODS[task.facts.optimizer]}
    if name not in found:
        raise ValueError(f"`--method` is {name!r}; {task.facts.name} has {', '.join(found)}")
    return found[name]


def train(task: Task, method: Method, seed: int) -> Run:
    """Trains once on forked ranks.

    Args:
        task: Loaded, so that the ranks share its data.
        method: One of the task's.
        seed: Of weights and batches.

    Raises:
        RuntimeError: A rank failed; it has printed why.
    """
    places = [
        Place(rank, RANKS, rank // 2, (2, 2), "127.0.0.1", port, "lo")
        for port in [free_port()]
        for rank in range(RANKS)
    ]
    with tempfile.TemporaryDirectory(prefix="gradwire-convergence-") as folder:
        file = Path(folder, "run.json")

        def rank_main(place: Place, _: list[str]) -> int:
            place.connect()
            run = train_as_rank(task, method, seed, place)
            if place.rank == 0:
                file.write_text(json.dumps(asdict(run)))
            place.leave()
            return 0

        status = fork_ranks(places, rank_main, [])
        if status:
            raise RuntimeError(f"a rank of {task.facts.name}, {method.name}, seed {seed} ended with status {status}")
        return run_from(json.loads(file.read_text()))


def run_from(record: dict[str, object]) -> Run:
    """Returns the run that `asdict` and JSON made a record of."""
    curve = record["curve"]
    assert isinstance(curve, list)
    return Run(**{**record, "curve": tuple((int(step), float(value)) for step, value in curve)})  # type: ignore[arg-type]


def train_as_rank(task: Task, method: Method, seed: int, place: Place) -> Run:
    """One rank's part of a run.

    Args:
        task: What is trained.
        method: How gradients are averaged.
        seed: Of weights and batches.
        place: Of this rank; the default process group is connected.
    """
    torch.set_num_threads(1)
    steps = task.facts.steps
    trainee = make_trainee(task, method, steps=steps, seed=seed, node=f"node{place.node}")
    schedule = torch.optim.lr_scheduler.LambdaLR(trainee.optimizer, lambda step: share_of_peak(step, steps))
    marks = {max(1, round(steps * share)) for share in EVALUATED}
    curve = []
    for step in range(steps):
        trainee.take_step(lambda model, step=step: task.loss(model, step, place.rank, seed))  # type: ignore[misc]
        schedule.step()
        if step + 1 in marks:
            curve.append((step + 1, _quality(task, trainee, place.rank)))
    return Run(task.facts.name, method.name, seed, trainee.dense_steps, tuple(curve))


@torch.no_grad()
def _quality(task: Task, trainee: Trainee, rank: int) -> float:
    model = getattr(trainee.model, "module", trainee.model)
    total = task.score(model, rank)
    dist.all_reduce(total)
    return float(total[0] / total[1])
