"""The record of all measurements with its file, and the time in which a method reaches plain DDP's quality."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gradwire.bench.machine import machine_line
from gradwire.bench.studies.convergence.tasks import TaskFacts
from gradwire.bench.studies.convergence.training import PLAIN, TrainingRun, run_from

HALF = 1.0
"""Share of the rate at which plain DDP spends half of its step on the link."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Holds the time and bytes of a step of one method: medians over the rounds."""

    method: str
    seconds: float
    """Duration of the step on the slowest rank."""
    nic_nbytes: float
    """Bytes sent or received by the busiest node, whichever is more."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Holds the steps of all methods of a task, taken in turns on one emulated link."""

    task: str
    share: float
    """Rate of the link relative to the one at which plain DDP spends half of its step on the link."""
    nic: str
    """Rate of the links in words."""
    free_seconds: float
    """Duration of a step of plain DDP on links without a limit."""
    machine: str
    steps: tuple[Timed, ...]

    def seconds(self, method: str) -> float:
        """Returns the seconds of a step of a method, which has to be among those timed."""
        return next(timed.seconds for timed in self.steps if timed.method == method)


class Record:
    """Holds all results, in memory and in a JSON file that is replaced at each addition.

    Args:
        file: JSON file; read if it exists.

    Raises:
        ValueError: The file was not written by this tool.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.runs: list[TrainingRun] = []
        self.speeds: list[Speed] = []
        self.machine = machine_line()
        if not file.exists():
            return
        held = json.loads(file.read_text())
        if not isinstance(held, dict) or held.get("kind") != "convergence":
            raise ValueError(f"`--json` {file} is no file of this tool; wanted a new name, or one that it wrote")
        self.machine = held["machine"]
        self.runs = [run_from(each) for each in held["runs"]]
        self.speeds = [
            Speed(**{**each, "steps": tuple(Timed(**timed) for timed in each["steps"])}) for each in held["speeds"]
        ]

    def has_run(self, task: str, method: str, seed: int) -> bool:
        """Returns whether the training of a task with this method and seed is recorded."""
        return any((run.task, run.method, run.seed) == (task, method, seed) for run in self.runs)

    def runs_of(self, task: str, method: str) -> list[TrainingRun]:
        """Returns the recorded trainings of a task with this method, for all seeds."""
        return [run for run in self.runs if (run.task, run.method) == (task, method)]

    def speed_of(self, task: str, share: float) -> Speed | None:
        """Returns the timed steps of a task on the link with this share of the rate, or None."""
        return next((speed for speed in self.speeds if (speed.task, speed.share) == (task, share)), None)

    def rate_of_half(self, task: str) -> tuple[str, float] | None:
        """Returns (rate, free seconds) of the link on which plain DDP spends half of its step; None if unknown yet."""
        half = self.speed_of(task, HALF)
        return None if half is None else (half.nic, half.free_seconds)

    def add_run(self, run: TrainingRun) -> None:
        """Adds a run and writes the file."""
        self.runs.append(run)
        self._write()

    def add_speed(self, speed: Speed) -> None:
        """Adds timings and writes the file."""
        self.speeds.append(speed)
        self._write()

    def _write(self) -> None:
        record = {
            "kind": "convergence",
            "machine": self.machine,
            "runs": [asdict(run) for run in self.runs],
            "speeds": [asdict(speed) for speed in self.speeds],
        }
        new = self._file.with_name(self._file.name + ".new")
        new.write_text(json.dumps(record, indent=1) + "\n")
        new.replace(self._file)


DENSE = "gradwire none"
"""Method that is timed for the steps of a dense start, in which a compressor sends exact gradients."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Holds the mean and the extremes of a method's final quality over its seeds."""

    mean: float
    low: float
    high: float


def ending(runs: Sequence[TrainingRun]) -> Ending:
    """Returns mean and extremes of the runs' final quality."""
    finals = [run.final for run in runs]
    return Ending(statistics.fmean(finals), min(finals), max(finals))


def mean_curve(runs: Sequence[TrainingRun]) -> list[tuple[int, float]]:
    """Returns (steps, mean quality over the seeds): the runs were measured after the same steps."""
    return [
        (points[0][0], statistics.fmean(quality for _, quality in points))
        for points in zip(*(run.curve for run in runs), strict=True)
    ]


def plain_runs(record: Record, task: str, method: str) -> list[TrainingRun]:
    """Returns plain DDP's runs with the seeds of the method's runs, so that weights and batches are the same."""
    seeds = {run.seed for run in record.runs_of(task, method)}
    return [run for run in record.runs_of(task, PLAIN) if run.seed in seeds]


def target(record: Record, facts: TaskFacts, method: str = PLAIN) -> float:
    """Returns the quality that a method has to reach: plain DDP's mean over the same seeds, worse by the tolerance."""
    sign = -1.0 if facts.higher_is_better else 1.0
    return ending(plain_runs(record, facts.name, method)).mean + sign * facts.tolerance


def steps_of(record: Record, facts: TaskFacts, method: str) -> float | None:
    """Returns after how many steps the method's mean curve reaches its target; None if it never does."""
    curve = mean_curve(record.runs_of(facts.name, method))
    return steps_to(curve, target(record, facts, method), facts.higher_is_better)


def steps_to(curve: Sequence[tuple[int, float]], wanted: float, higher_is_better: bool) -> float | None:
    """Returns after how many steps a curve first reaches a quality; None if it never does.

    Args:
        curve: Points (steps, quality), ascending; between them the quality is interpolated linearly.
        wanted: Quality to reach.
        higher_is_better: True if a higher quality is better, as for an accuracy.
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


def seconds_after(steps: float, run: TrainingRun, speed: Speed) -> float:
    """Returns the seconds of a run's first steps on a link; those of a dense start take as long as exact ones.

    Args:
        steps: Number of steps from the beginning.
        run: A run of the method, for the length of its dense start.
        speed: Timed steps of the task on the link.
    """
    dense = min(steps, run.dense_steps)
    dense_seconds = speed.seconds(DENSE) if dense else 0.0
    return dense * dense_seconds + (steps - dense) * speed.seconds(run.method)


def seconds_to(record: Record, facts: TaskFacts, method: str, speed: Speed) -> float | None:
    """Returns the seconds in which a method reaches plain DDP's quality on a link; None if it never does."""
    steps = steps_of(record, facts, method)
    return None if steps is None else seconds_after(steps, record.runs_of(facts.name, method)[0], speed)
