"""The file that holds what was measured: training runs, and seconds per step on emulated links."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from gradwire.bench.machine import machine_line
from gradwire.bench.studies.convergence.quality import Run, run_from

HALF = 1.0
"""Share of the rate at which plain DDP spends half of its step on the link."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A step of one method: medians over the rounds."""

    method: str
    seconds: float
    """Of the slowest rank."""
    nic_nbytes: float
    """Most that a node sent or received."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Steps of all methods of a task, taken in turns on one emulated link."""

    task: str
    share: float
    """Of the rate at which plain DDP spends half of its step on the link."""
    nic: str
    """Rate of the links."""
    free_seconds: float
    """A step of plain DDP on links without a limit."""
    machine: str
    steps: tuple[Timed, ...]

    def seconds(self, method: str) -> float:
        """Seconds of a step of that method."""
        return next(timed.seconds for timed in self.steps if timed.method == method)


class Record:
    """All results, in memory and in a JSON file that is replaced at each addition.

    Args:
        file: Read if it exists.

    Raises:
        ValueError: It is none of this tool's.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.runs: list[Run] = []
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
        """Whether that training was done."""
        return any((run.task, run.method, run.seed) == (task, method, seed) for run in self.runs)

    def runs_of(self, task: str, method: str) -> list[Run]:
        """The runs of all seeds."""
        return [run for run in self.runs if (run.task, run.method) == (task, method)]

    def speed_of(self, task: str, share: float) -> Speed | None:
        """The steps on that link, if they were timed."""
        return next((speed for speed in self.speeds if (speed.task, speed.share) == (task, share)), None)

    def rate_of_half(self, task: str) -> tuple[str, float] | None:
        """(rate, free seconds) of the link that takes half of plain DDP's step, if it was found already."""
        half = self.speed_of(task, HALF)
        return None if half is None else (half.nic, half.free_seconds)

    def add_run(self, run: Run) -> None:
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
