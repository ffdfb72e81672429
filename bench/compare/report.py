"""Results of a comparison, and their output: a table, a JSON file, a picture."""

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.progress import Progress, TaskID
from rich.table import Table

from gradwire.bench.compare.configurations import PLAIN
from gradwire.bench.compare.replay import ReplayCase, Scale, load_case
from gradwire.bench.emulation.rate import parse_rate
from gradwire.bench.emulation.signals import EndedBySignal
from gradwire.bench.machine import machine_line
from gradwire.bench.terminal import STDOUT, CleanConsole, PlainLines, complain, right_columns, write_json, writing


@dataclass(frozen=True, slots=True)
class ConfigurationResult:
    """Measurements of one configuration; all are None but `name` and `reason` if it does not run.

    Attributes:
        name: Name of the configuration in the table.
        seconds: Median over the rounds of a step's time on the slowest rank.
        nic_nbytes: Median over the rounds of the bytes that the busiest node sent or received, whichever is more; None
            if they were not counted.
        error: Relative error of the gradients, mean over the rounds; None in a replay, whose gradients are random, and
            with a script.
        speed_up: Median seconds of plain DDP divided by `seconds`.
        reason: Reason for which it does not run; None if it runs.
        speed_up_range: First and third quartile of the speed-ups of single rounds, or their minimum and maximum if
            there are fewer than four rounds; None for plain DDP.
        loss: Mean training loss of the last steps over all ranks; None if nothing is trained.
    """

    name: str
    seconds: float | None = None
    nic_nbytes: float | None = None
    error: float | None = None
    speed_up: float | None = None
    reason: str | None = None
    speed_up_range: tuple[float, float] | None = None
    loss: float | None = None


def middle(values: list[float]) -> tuple[float, float]:
    """Returns the first and the third quartile, or the minimum and maximum of fewer than four values."""
    if len(values) < 4:
        return min(values), max(values)
    first, _, third = statistics.quantiles(values, n=4)
    return first, third


GREAT_ERROR = 0.5
"""Relative error of a gradient above which the report explains that the compressor is not broken."""

RECORDS = frozenset(("turn", "gradient_nbytes", "reason", "nic_nbytes"))
"""Keys that tell the records of rank 0 apart: each record has one of them."""


class Collector:
    """Reads the lines that the ranks print, moves the progress bar, and collects the measurements of rank 0.

    Args:
        progress: Progress bar, which gets a task.
        lines: Lines of progress that are printed instead of the bar if stderr is no terminal.
    """

    def __init__(self, progress: Progress, lines: PlainLines) -> None:
        self._progress, self._lines = progress, lines
        self._task: TaskID = progress.add_task("starting", total=None)
        self._done = "nothing was measured yet"
        self._so_far: dict[str, list[float]] = {}
        self._ran: dict[str, dict[str, Any]] = {}
        self._refused: list[ConfigurationResult] = []
        self.gradient_nbytes = 0
        self.other: list[str] = []
        """Lines of all ranks that are not records: warnings, tracebacks."""

    def line(self, _: int, text: str) -> None:
        """Handles one line that a rank printed: a record of JSON, or else a line to keep in `other`.

        Args:
            text: The line.
        """
        try:
            record = json.loads(text)
        except ValueError:
            record = None
        if not isinstance(record, dict) or record.keys().isdisjoint(RECORDS):  # a module of --import may log JSON, too
            self.other.append(text)
        elif "turn" in record:
            self._progress.update(
                self._task, total=record["turns"], completed=record["turn"], description=record["name"]
            )
            self._turn(record)
        elif "gradient_nbytes" in record:
            self.gradient_nbytes = record["gradient_nbytes"]
        elif "reason" in record:
            self._refused.append(ConfigurationResult(record["name"], reason=record["reason"]))
        else:
            self._ran[record["name"]] = record

    def _turn(self, record: dict[str, Any]) -> None:
        """Prints the progress of a turn, and keeps its time for `so_far`."""
        if record["turns"] is None:
            self._lines.show(record["name"], at_once=True)
            return
        self._done = f"step {record['turn']} of {record['turns']}"
        self._lines.show(f"{self._done}: {record['name']}")
        if record["seconds"] is not None:
            self._so_far.setdefault(record["name"], []).append(record["seconds"])

    def so_far(self) -> str:
        """Returns a sentence with the median step times until now, for a command that is being stopped."""
        found = [
            f"{name} {statistics.median(seconds):.3g} s a step (of {len(seconds)})"
            for name, seconds in self._so_far.items()
        ]
        return f"stopped: {self._done}; {', '.join(found) if found else 'no timed step was over'}"

    @contextmanager
    def stopped_in_words(self) -> Iterator[None]:
        """Prints `so_far` on stderr if a signal ends the block, and raises the exception again."""
        try:
            yield
        except EndedBySignal:
            complain("compare", self.so_far())
            raise

    def results(self, counted: bool) -> list[ConfigurationResult]:
        """Returns the results of all configurations, those that do not run at the end.

        Args:
            counted: Whether the bytes of a network card were counted; otherwise `nic_nbytes` is None.
        """
        found = []
        for name, record in self._ran.items():
            plain, own = self._ran[PLAIN]["seconds"], record["seconds"]
            seconds = statistics.median(own)
            each = [p / one for p, one in zip(plain, own, strict=True)]
            found.append(
                ConfigurationResult(
                    name,
                    seconds,
                    statistics.median(record["nic_nbytes"]) if counted else None,
                    record["error"],
                    speed_up=statistics.median(plain) / seconds,
                    speed_up_range=None if name == PLAIN else middle(each),
                )
            )
        return found + self._refused


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a comparison, with the setting in which they were made.

    Attributes:
        results: Results of all configurations.
        where: Description of the cluster for the title.
        nodes: Number of ranks of each node.
        gradient_nbytes: Bytes of one rank's gradients in one step.
        scale: Factors by which a replay was shrunk and slowed down; both are 1 without a replay.
        expected_seconds: Predicted seconds of a replayed step of plain DDP, from its waits and its link alone; None if
            there is no prediction.
        script: Name of the user's script that was trained; None for a model of this command's own.
    """

    results: list[ConfigurationResult]
    where: str
    nodes: list[int]
    gradient_nbytes: int
    scale: Scale
    expected_seconds: float | None = None
    script: str | None = None


def report(options: argparse.Namespace, argv: list[str], measured: Measured) -> None:
    """Prints the table of results with its remarks, and writes the files of `--json` and `--plot` if they were given.

    With `--json -` the JSON goes to stdout in place of the table.

    Args:
        options: Options of the command line, as `options.parse` returns them.
        argv: Words of the command line after `compare`, which the JSON file records.
        measured: Measurements to report.
    """
    # The title says what was trained, on which cluster, and how the steps were taken.
    case = load_case(options.replay, options.batch) if options.replay else None
    what = (
        f"{measured.script or options.model}, {measured.gradient_nbytes / 1e6:.1f} MB of gradients"
        if case is None
        else _describe_replay(case, measured)
    )
    turns = "taken in turns" if measured.script is None else "one configuration after the other"
    title = f"{what}; {measured.where}; median of {options.rounds} steps, {turns}"
    # Print the table, and below it the remarks that keep a reader from a wrong conclusion.
    if options.json != STDOUT:
        console = CleanConsole(highlight=False, markup=False)
        console.print(f"{title}; {machine_line()}", table(measured.results), sep="\n")
        unsure = [
            f"{each.name} ({each.speed_up_range[0]:.2f}x to {each.speed_up_range[1]:.2f}x)"
            for each in measured.results
            if each.speed_up_range is not None
            and (options.rounds == 1 or each.speed_up_range[0] <= 1.0 <= each.speed_up_range[1])
        ]
        if unsure:
            console.print(
                f"No faster and no slower than plain DDP, as far as these steps say: {', '.join(unsure)}. More "
                "--rounds say more, or a machine with nothing else to do."
            )
        if any(one.error is not None and one.error > GREAT_ERROR for one in measured.results):
            console.print("A gradient error near 1 is one step's: error feedback sends later what a step leaves out.")
        for one in measured.results:
            if one.reason is not None:
                console.print(f"{one.name} does not run: {one.reason}")
        if case is not None:
            console.print(f"step time: {case.source}")
        if measured.expected_seconds is not None:
            console.print(f"plain DDP by its waits and its link alone: {measured.expected_seconds:.3f} s per step")
    # Write the record, and draw it.
    record = {
        "kind": "compare",
        "title": title,
        "machine": machine_line(),
        "args": argv,
        "rounds": options.rounds,
        "nodes": measured.nodes,
        "source": case.source if case else None,
        "scale": asdict(measured.scale),
        "expected_plain_seconds": measured.expected_seconds,
        "results": [asdict(one) for one in measured.results],
    }
    write_json(options.json, record)
    if options.plot is not None:
        from gradwire.bench.plot.bars import draw_compare  # matplotlib is optional

        with writing("--plot", options.plot):
            draw_compare(record, options.plot)


def table(results: list[ConfigurationResult]) -> Table:
    """Returns a table of the configurations that ran, the fastest first."""
    trained = any(one.loss is not None for one in results)
    figures = right_columns("s per step", "MB on NIC", "loss" if trained else "gradient error", "speed-up")
    rows = Table("compared", *figures, box=SIMPLE_HEAD, padding=0)
    for one in sorted((each for each in results if each.seconds is not None), key=lambda each: each.seconds or 0.0):
        nbytes = "-" if one.nic_nbytes is None else f"{one.nic_nbytes / 1e6:.2f}"
        error = "-" if one.error is None else f"{one.error:.1e}"
        error = error if one.loss is None else f"{one.loss:.4g}"
        rows.add_row(one.name, f"{one.seconds:.3f}", nbytes, error, f"{one.speed_up:.2f}x")
    return rows


def describe_emulated(options: argparse.Namespace, nodes: list[int], scale: Scale) -> str:
    """Returns a description of the emulated cluster for the title.

    Args:
        options: Options of the command line, as `options.parse` returns them.
        nodes: Number of ranks of each node.
        scale: Factors by which a replay is shrunk and slowed down.
    """
    order = " round-robin" if options.order == "round-robin" else ""
    link = scale.link(parse_rate(options.nic, "--nic"))
    scaled = f", replayed on links of {link / 1e6:.3g} Mbit" if options.replay else ""
    stream = f" ({options.stream} a connection)" if options.stream else ""
    return f"{shape(nodes)} ranks{order} behind {options.nic}{stream}{scaled}"


def shape(nodes: list[int]) -> str:
    """Returns the numbers of nodes and ranks as a word: `2x8`, or `3+1` if the nodes have different numbers.

    Args:
        nodes: Number of ranks of each node.
    """
    return f"{len(nodes)}x{nodes[0]}" if len(set(nodes)) == 1 else "+".join(map(str, nodes))


def _describe_replay(case: ReplayCase, measured: Measured) -> str:
    scale = measured.scale
    return (
        f"{case.name} replayed, gradients and links 1/{scale.factor}, {scale.slow_motion} times slower: "
        f"{measured.gradient_nbytes / 1e6:.2f} MB of gradients (really {case.nbytes / 1e6:.0f}), "
        f"{case.step_seconds * scale.slow_motion:.2f} s of waits a step (really {case.step_seconds * 1e3:.0f} ms)"
    )
