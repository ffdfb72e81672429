"""From curves and seconds per step to the time in which a method reaches plain DDP's quality."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.bench.studies.convergence.methods import ONEBIT_ADAM, PLAIN
from gradwire.bench.studies.convergence.quality import Run
from gradwire.bench.studies.convergence.record import Record, Speed
from gradwire.bench.studies.convergence.tasks import Facts

DENSE = "gradwire none"
"""How gradwire's compressors travel during a dense start."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Final quality of a method over its seeds."""

    mean: float
    low: float
    high: float


def ending(runs: Sequence[Run]) -> Ending:
    """Returns mean and extremes of the runs' final quality."""
    finals = [run.final for run in runs]
    return Ending(statistics.fmean(finals), min(finals), max(finals))


def mean_curve(runs: Sequence[Run]) -> list[tuple[int, float]]:
    """Returns (steps, mean quality over the seeds): the runs were measured after the same steps."""
    return [
        (points[0][0], statistics.fmean(quality for _, quality in points))
        for points in zip(*(run.curve for run in runs), strict=True)
    ]


def plain_runs(record: Record, task: str, method: str) -> list[Run]:
    """Returns plain DDP's runs of the seeds that the method was trained with: weights and batches are theirs too."""
    seeds = {run.seed for run in record.runs_of(task, method)}
    return [run for run in record.runs_of(task, PLAIN) if run.seed in seeds]


def target(record: Record, facts: Facts, method: str = PLAIN) -> float:
    """Returns the quality that a method has to reach: plain DDP's mean over the same seeds, less the tolerance."""
    sign = -1.0 if facts.higher_is_better else 1.0
    return ending(plain_runs(record, facts.name, method)).mean + sign * facts.tolerance


def steps_of(record: Record, facts: Facts, method: str) -> float | None:
    """Returns after how many steps the method's mean curve reaches its target; None if it never does."""
    curve = mean_curve(record.runs_of(facts.name, method))
    return steps_to(curve, target(record, facts, method), facts.higher_is_better)


def steps_to(curve: Sequence[tuple[int, float]], wanted: float, higher_is_better: bool) -> float | None:
    """Returns after how many steps a curve first reaches a quality; None if it never does.

    Args:
        curve: (steps, quality), ascending; straight lines in between.
        wanted: The quality.
        higher_is_better: Its direction.
    """
    sign = 1.0 if higher_is_better else -1.0
    before: tuple[int, float] | None = None
    for step, quality in curve:
        if sign * (quality - wanted) >= 0.0:
            if before is None:
                return float(step)
            return before[0] + (step - before[0]) * (wanted - before[1]) / (quality - before[1])
        before = (step, quality)
    return None


def seconds_after(steps: float, run: Run, speed: Speed) -> float:
    """Returns how long so many steps take on a link; the dense ones at the start count as dense.

    Args:
        steps: Taken from the beginning.
        run: One of the method.
        speed: Of the task on the link.
    """
    dense = min(steps, run.dense_steps)
    dense_seconds = speed.seconds(PLAIN if run.method == ONEBIT_ADAM else DENSE) if dense else 0.0
    return dense * dense_seconds + (steps - dense) * speed.seconds(run.method)


def seconds_to(record: Record, facts: Facts, method: str, speed: Speed) -> float | None:
    """Returns the seconds in which a method reaches plain DDP's quality on a link; None if it never does."""
    steps = steps_of(record, facts, method)
    return None if steps is None else seconds_after(steps, record.runs_of(facts.name, method)[0], speed)
