"""What a queue of trainings has come to: its data file, and the tables and the picture that are made of it."""

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
"""Among an entry's options, what is of no compressor: how many nodes of two ranks, and which parameters are exact."""
HIGHER_IS_BETTER = frozenset(name for name, make in TASKS.items() if make().facts.higher_is_better)
SOURCE = "queue"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
"""Between them a page holds the tables."""
ACCUMULATED_BEGIN, ACCUMULATED_END = "<!-- accumulated: begin -->", "<!-- accumulated: end -->"
"""Between them a page holds the table of accumulation."""
BATCH_SECONDS = 0.0404
"""Of a batch of the text task of 0.5 M parameters, on two emulated nodes of two ranks: docs/results/outer.md, run A."""
UPDATE_SECONDS = {"10 Mbit": 2.722 - BATCH_SECONDS, "100 Mbit": 8 * 2.908e6 / 100e6}
"""What an exact sum takes besides: measured at 10 Mbit (the same page), at 100 Mbit computed from its 2908 kB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One training."""

    task: str
    size: str
    """About how many parameters."""
    optimizer: str
    """`muon`, or the task's own."""
    compressor: str
    """gradwire's, `accumulate` or `Outer`."""
    options: Mapping[str, Option]
    """Other than the compressor's defaults; of `accumulate`, the `batches` and a factor of the learning rate, `lr`; and
    `OF_ALL`."""
    seed: int
    steps: int
    """Batches of each rank."""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same training."""
        return tuple(json.dumps(each, sort_keys=True) for each in asdict(self).values())

    @property
    def nodes(self) -> int:
        """Of two ranks each."""
        return int(cast(int, self.options.get(NODES_KEY, 2)))

    @property
    def exact(self) -> tuple[str, ...]:
        """Patterns of the parameters that are not compressed."""
        return tuple(filter(None, str(self.options.get(EXACT_KEY, "")).split(",")))

    @property
    def kind(self) -> tuple[str, str, int, int]:
        """Task, size, steps and nodes: what is compared has these in common."""
        return self.task, self.size, self.steps, self.nodes

    @property
    def method(self) -> str:
        """The compressor with its options, as a list has it, but for the nodes."""
        shown = {key: value for key, value in self.options.items() if key != NODES_KEY}
        return self.compressor + (json.dumps(shown, separators=(",", ":")) if shown else "")

    def __str__(self) -> str:
        trained = f"{self.task} {self.size} {self.optimizer} {self.method}"
        return f"{trained} {self.nodes} nodes, seed {self.seed}, {self.steps} steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a training came to, where and when."""

    entry: Entry
    curve: tuple[tuple[int, float], ...]
    """(updates, quality), ascending."""
    ratio: float
    """Times fewer bytes between the nodes than float32 at every batch."""
    processor_seconds: float | None
    """Of this process, for the whole training; None where nobody noted it."""
    date: str
    machine: str
    load: float | None
    """Of the machine over the last 15 minutes, when it ended; None where nobody noted it."""
    source: str = field(default=SOURCE)
    """What trained it."""

    @property
    def quality(self) -> float:
        """At the end."""
        return self.curve[-1][1]


def results_from(file: Path) -> list[Result]:
    """Reads a data file; one that does not exist holds nothing.

    Raises:
        ValueError: A line is none of this tool's.
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
        results: In any order; those of accumulation are in `accumulations`.
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
        results: In any order.
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
    """Returns how far the results lie behind an exact sum of the same optimizer and seed; those without one are left.

    What lies ahead of it has a minus, whether the task's quality is a loss or an accuracy.

    Args:
        results: Of one method.
        everything: Of the same kind.
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
    """What was run where and when: each source once."""
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
        results: Of them those of the most frequent task, size and steps.
        file: Overwritten.

    Raises:
        ValueError: No result has an exact one beside it.
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
