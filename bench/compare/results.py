"""What the ranks of a comparison say, line by line, and the figures that come out of it."""

import json
import statistics
from dataclasses import dataclass, replace

from rich.progress import Progress, TaskID

from gradwire.bench.compare.contenders import PLAIN


@dataclass(frozen=True, slots=True)
class Result:
    """One way's figures: medians over the rounds.

    Attributes:
        name: As the table shows it.
        seconds: Per step, of the slowest rank; None where it does not run here.
        nic_nbytes: Per step, the most that a node sent or received; None where it was not counted.
        error: Relative error of the gradients; None where gradients mean nothing.
        speed_up: Seconds of plain DDP over `seconds`.
        reason: Why it does not run.
    """

    name: str
    seconds: float | None = None
    nic_nbytes: float | None = None
    error: float | None = None
    speed_up: float | None = None
    reason: str | None = None


class Collector:
    """Takes in what rank 0 says, moves the progress bar, and keeps the figures."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID = progress.add_task("starting", total=None)
        self._ran: list[Result] = []
        self._refused: list[Result] = []
        self.gradient_nbytes = 0
        self.other: list[str] = []
        """Lines that are no records: warnings, tracebacks."""

    def line(self, _: int, text: str) -> None:
        """One line that a rank printed."""
        if not text.startswith("{"):
            self.other.append(text)
            return
        record = json.loads(text)
        if "turn" in record:
            self._progress.update(
                self._task, total=record["turns"], completed=record["turn"], description=record["name"]
            )
        elif "gradient_nbytes" in record:
            self.gradient_nbytes = record["gradient_nbytes"]
        elif "reason" in record:
            self._refused.append(Result(record["name"], reason=record["reason"]))
        else:
            self._ran.append(
                Result(
                    record["name"],
                    statistics.median(record["seconds"]),
                    statistics.median(record["nic_nbytes"]),
                    record["error"],
                )
            )

    def results(self, counted: bool) -> list[Result]:
        """All figures; what does not run is at the end.

        Args:
            counted: Whether the network card's bytes mean something.
        """
        seconds = {one.name: one.seconds for one in self._ran if one.seconds}
        return [
            replace(one, nic_nbytes=one.nic_nbytes if counted else None, speed_up=seconds[PLAIN] / seconds[one.name])
            for one in self._ran
        ] + self._refused
