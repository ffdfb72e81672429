"""Results of a queue of trainings: the data file, and the tables and the picture that are made of it."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

from gradwire.bench.plot.style import BASELINE, load_pyplot, strip
from gradwire.bench.studies.convergence.tasks import TASKS
from gradwire.compressors.registry import Option

EXACT, ACCUMULATE, OUTER = "none", "accumulate", "Outer"
NODES_KEY, EXACT_KEY = OF_ALL = ("nodes", "exact")
"""Keys of an entry's options that belong to no compressor: number of nodes of two ranks, and exact parameters."""
HIGHER_IS_BETTER = frozenset(name for name, make in TASKS.items() if make().facts.higher_is_better)
SOURCE = "queue"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
"""Marks of a page between which the tables are put."""
ACCUMULATED_BEGIN, ACCUMULATED_END = "<!-- accumulated: begin -->", "<!-- accumulated: end -->"
"""Marks of a page between which the table of accumulation is put."""
BATCH_SECONDS = 0.0404
"""Seconds that a batch of the text task of 0.5 M parameters computes, on two emulated nodes of two ranks. Source:
docs/results/outer.md, run A."""
UPDATE_SECONDS = {"10 Mbit": 2.722 - BATCH_SECONDS, "100 Mbit": 8 * 2.908e6 / 100e6}
"""Link rate -> seconds that an exact sum takes besides: measured at 10 Mbit (the same page), at 100 Mbit computed from
its 2908 kB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Describes one training of the list."""

    task: str
    size: str
    """Approximate number of parameters: `0.5M`."""
    optimizer: str
    """`muon`, or the task's own."""
    compressor: str
    """Name of one of gradwire's compressors, `accumulate` or `Outer`."""
    options: Mapping[str, Option]
    """Options that differ from the compressor's defaults; for `accumulate` the number of `batches` and `lr`, a factor
    of the learning rate; and the keys in `OF_ALL`."""
    seed: int
    steps: int
    """Number of batches of each rank."""

    @property
    def key(self) -> tuple[object, ...]:
        """Returns a hashable identity, equal for the same training."""
        return tuple(json.dumps(each, sort_keys=True) for each in asdict(self).values())

    @property
    def nodes(self) -> int:
        """Returns the number of nodes of two ranks each."""
        return int(cast(int, self.options.get(NODES_KEY, 2)))

    @property
    def exact(self) -> tuple[str, ...]:
        """Returns the name patterns of the parameters that are not compressed."""
        return tuple(filter(None, str(self.options.get(EXACT_KEY, "")).split(",")))

    @property
    def kind(self) -> tuple[str, str, int, int]:
        """Returns task, size, steps and nodes, which compared trainings have in common."""
        return self.task, self.size, self.steps, self.nodes

    @property
    def method(self) -> str:
        """Returns the compressor with its options, as in the list of trainings, without the number of nodes."""
        shown = {key: value for key, value in self.options.items() if key != NODES_KEY}
        return self.compressor + (json.dumps(shown, separators=(",", ":")) if shown else "")

    def __str__(self) -> str:
        trained = f"{self.task} {self.size} {self.optimizer} {self.method}"
        return f"{trained} {self.nodes} nodes, seed {self.seed}, {self.steps} steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Holds the result of a training, with machine and date."""

    entry: Entry
    curve: tuple[tuple[int, float], ...]
    """(number of updates, quality), ascending."""
    ratio: float
    """Bytes of float32 gradients at every batch over the bytes sent between the nodes."""
    processor_seconds: float | None
    """Processor time of this process for the whole training; None if it was not recorded."""
    date: str
    machine: str
    load: float | None
    """Load of the machine over the last 15 minutes, at the end; None if it was not recorded."""
    source: str = field(default=SOURCE)
    """Name of the tool that trained it."""

    @property
    def quality(self) -> float:
        """Returns the quality at the end of the training."""
        return self.curve[-1][1]


def results_from(file: Path) -> list[Result]:
    """Reads a data file; one that does not exist holds nothing.

    Raises:
        ValueError: A line was not written by this tool.
    """
    found = []
    for number, line in enumerate(file.read_text().splitlines() if file.exists() else (), 1):
        try:
            row = json.loads(line)
            row["entry"] = Entry(**row["entry"])
            row["curve"] = tuple((int(step), float(quality)) for step, quality in row["curve"])
            found.append(Result(**row))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"`--data` {file} line {number} is no result of this tool: {error}") from error
    return found


def missing(entries: Iterable[Entry], results: Iterable[Result]) -> list[Entry]:
    """Returns the entries that have no result yet, each once, in their order."""
    had = {result.entry.key for result in results}
    return list({entry.key: entry for entry in entries if entry.key not in had}.values())


def tables(results: Sequence[Result]) -> str:
    """Returns a table for each task, size and number of steps: a row a method, and how far it ends behind an exact sum.

    Args:
        results: Results in any order; those of `accumulate` are left out, see `accumulations`.
    """
    parts = []
    results = [each for each in results if each.entry.compressor != ACCUMULATE]
    for kind in dict.fromkeys(each.entry.kind for each in results):
        mine = [each for each in results if each.entry.kind == kind]
        optimizers = sorted({each.entry.optimizer for each in mine})
        task, size, steps, nodes = kind
        many = "" if nodes == 2 else f", {nodes} nodes of two ranks"
        lines = [
            f"## {task}, {size[:-1]} M parameters, {steps} batches of each rank{many}",
            "",
            _line(["method", "fewer bytes", *(f"{name}: end, seeds | behind `none`" for name in optimizers)]),
        ]
        lines.append("|---" * (lines[-1].count("|") - 1) + "|")
        methods = list(dict.fromkeys(each.entry.method for each in mine))
        for method in sorted(methods, key=lambda word: (word != EXACT, _worst(mine, word))):
            rows = [each for each in mine if each.entry.method == method]
            words = [f"`{method}`", f"{rows[0].ratio:.1f}x"]
            for name in optimizers:
                words += _words([each for each in rows if each.entry.optimizer == name], mine)
            lines.append(_line(words))
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, _places(results)])


def accumulations(results: Sequence[Result]) -> str:
    """Returns a table of the trainings with an exact sum for several batches; empty if there are none.

    Args:
        results: Results in any order; only those of `accumulate` are shown.
    """
    mine = [each for each in results if each.entry.compressor == ACCUMULATE]
    if not mine:
        return ""
    names = ["task", "optimizer", "batches an update", "learning rate", "updates", "batches of each rank"]
    lines = [_line([*names, *(f"seconds at {link}" for link in UPDATE_SECONDS), "end (seed)"])]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for each in sorted(mine, key=lambda one: (one.entry.task, one.entry.optimizer, one.curve[-1][0], one.entry.steps)):
        entry = each.entry
        rate, updates = float(cast(float, entry.options.get("lr", 1.0))), each.curve[-1][0]
        words = [f"{entry.task} {entry.size}", entry.optimizer, str(entry.options["batches"]), f"{rate:g}x"]
        took = [f"{wire * updates + BATCH_SECONDS * entry.steps:.0f}" for wire in UPDATE_SECONDS.values()]
        lines.append(_line([*words, str(updates), str(entry.steps), *took, f"{each.quality:.3f} ({entry.seed})"]))
    return "\n".join([*lines, "", _places(mine)])


def over_exact(results: Sequence[Result], everything: Sequence[Result]) -> list[float]:
    """Returns how much worse each result is than an exact sum with the same optimizer and seed, in units of quality.

    A better result is negative, whether the quality is a loss or an accuracy. Results without a matching exact sum are
    left out.

    Args:
        results: Results of one method.
        everything: All results of the same kind, exact sums included.
    """
    exact = {(each.entry.optimizer, each.entry.seed): each.quality for each in everything if each.entry.method == EXACT}
    keys = [(each.entry.optimizer, each.entry.seed) for each in results]
    return [
        (exact[key] - each.quality) if each.entry.task in HIGHER_IS_BETTER else (each.quality - exact[key])
        for key, each in zip(keys, results, strict=True)
        if key in exact
    ]


def _worst(everything: Sequence[Result], method: str) -> float:
    return max(over_exact([each for each in everything if each.entry.method == method], everything), default=0.0)


def _words(results: Sequence[Result], everything: Sequence[Result]) -> list[str]:
    if not results:
        return ["", ""]
    ordered = sorted(results, key=lambda each: each.entry.seed)
    ends = ", ".join(f"{each.quality:.3f}" for each in ordered)
    seeds = ", ".join(str(each.entry.seed) for each in ordered)
    apart = over_exact(ordered, everything)
    return [f"{ends} ({seeds})", f"{statistics.fmean(apart):+.3f}" if apart else "?"]


def _places(results: Sequence[Result]) -> str:
    """Returns a list in Markdown with a line for each source: number of trainings, machine, dates and load."""
    groups: dict[str, list[Result]] = {}
    for each in results:
        groups.setdefault(each.source, []).append(each)
    lines = []
    for source, rows in groups.items():
        days = sorted({each.date[:10] for each in rows})
        loads = [each.load for each in rows if each.load is not None]
        load = f", load {min(loads):.0f} to {max(loads):.0f}" if loads else ""
        machine = rows[0].machine.rpartition(", ")[0]
        count = f"{len(rows)} training{'s' if len(rows) > 1 else ''}"
        lines.append(f"- {source}: {count}; {machine}, {' to '.join(dict.fromkeys((days[0], days[-1])))}{load}.")
    return "\n".join(lines)


def _line(words: Sequence[str]) -> str:
    return f"| {' | '.join(words)} |"


COLOURS = {"muon": "#0b6e4f", "adamw": "#1982c4", "adam": "#1982c4", "sgd": "#6a4c93"}


def draw(results: Sequence[Result], file: Path) -> None:
    """Draws how far each method ends behind an exact sum: a point a seed, a colour an optimizer.

    Args:
        results: Results of any kind; only those of the most frequent kind (task, size, steps, nodes) are drawn.
        file: Picture to write, overwritten.

    Raises:
        ValueError: No result has a matching exact sum.
        RuntimeError: matplotlib is not installed.
    """
    results = [each for each in results if each.entry.compressor != ACCUMULATE]
    kinds = [each.entry.kind for each in results]
    mine = [each for each, kind in zip(results, kinds, strict=True) if kind == statistics.mode(kinds)]
    methods = sorted({each.entry.method for each in mine} - {EXACT}, key=lambda word: _worst(mine, word))
    points = {
        (method, name): over_exact(
            [each for each in mine if (each.entry.method, each.entry.optimizer) == (method, name)], mine
        )
        for method in methods
        for name in COLOURS
    }
    if not any(points.values()):
        raise ValueError(f"`--data` has no method beside an exact sum (`{EXACT}`) of the same optimizer and seed")
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 0.35 * len(methods) + 1.6), layout="constrained")
    for name, colour in COLOURS.items():
        found = [(value, place) for place, method in enumerate(methods) for value in points[method, name]]
        if found:
            axes.scatter(*zip(*found, strict=True), color=colour, label=name, s=28, alpha=0.8)
    axes.axvline(0.0, color=BASELINE, linewidth=1)
    axes.set_yticks(range(len(methods)), methods, fontsize=8)
    axes.set_xlabel("behind an exact sum of the same optimizer and seed", fontsize=9)
    task, size, steps, nodes = statistics.mode(kinds)
    axes.set_title(f"{task}, {size[:-1]} M parameters, {steps} steps, {nodes} nodes x 2 ranks", fontsize=10, loc="left")
    axes.legend(frameon=False)
    strip(axes)
    figure.savefig(file, dpi=90)
    pyplot.close(figure)
