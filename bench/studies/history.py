"""Keeps the speed-ups of every run of the study `performance`: a row for each run, and a picture of them over the runs.

Feeds docs/results/performance.md.

Only ratios are kept, each of two times that took turns in one run: seconds of one machine say nothing about another's.
A ratio more than `MOST_LOSS` below the best earlier one on the same machine carries a `!`.
"""

import re
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradwire.bench.machine import machine_line
from gradwire.bench.plot.style import load_pyplot, save, strip
from gradwire.bench.studies.tables.page import read, write

MOST_LOSS = 0.05
"""Share of the best earlier ratio that one may lose before it is marked; medians of 5 to 7 steps on a quiet 2-core
virtual machine differ by up to 0.04 from run to run."""
NOT_MEASURED, LOST = "-", "!"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Names one figure of the history, and the cell that it is taken from.

    Attributes:
        name: Heading of its column.
        section: Section of the study `performance`, which is also the name of its CSV file.
        row: First cells of the row.
        column: Heading of the column in that file.
    """

    name: str
    section: str
    row: tuple[str, ...]
    column: str


_COMPRESSORS = ("fp16", "int8", "int4", "waterfill4", "onebit", "dgc", "powersgd")

RATIOS = (
    *(Ratio(f"{each} exact", "hook", (each, "gradwire"), "speed-up") for each in ("2x2", "2x4", "4x2", "3+1")),
    Ratio("torch's fp16 hook", "compare", ("torch fp16 hook",), "speed-up"),
    Ratio("hierarchical", "compare", ("gradwire hierarchical",), "speed-up"),
    *(Ratio(each, "compare", (f"gradwire {each}",), "speed-up") for each in _COMPRESSORS),
    *(Ratio(each, "kernels", (each,), "of a copy") for each in ("int8_encode", "dgc_step", "powersgd_step")),
)
HEAD = ["date", "commit", "machine", *(each.name for each in RATIOS)]


def add_run(folder: Path, sections: Collection[str], commit: str, machine: str | None = None) -> list[str]:
    """Appends a row to history.csv with the ratios of the sections that have just been measured.

    Args:
        folder: Folder of the CSV files of the study `performance`.
        sections: Names of the sections whose files are new; cells of the others are `NOT_MEASURED`.
        commit: Commit that was measured.
        machine: Processor, cores and torch's version, then the date, with commas; None for those of now.

    Returns:
        Words for each ratio that is marked.
    """
    file = folder / "history.csv"
    rows = read(file)[1:] if file.exists() else []
    where, _, date = (machine or machine_line()).rpartition(", ")
    earlier = [row for row in rows if row[2] == where]
    cells, lost = [], []
    for column, ratio in enumerate(RATIOS, len(HEAD) - len(RATIOS)):
        now = _ratio(folder, ratio) if ratio.section in sections else None
        best = max(((value(row[column]), row) for row in earlier if row[column] != NOT_MEASURED), default=None)
        if now is not None and best is not None and now < (1 - MOST_LOSS) * best[0]:
            lost.append(f"{ratio.name} is {now:.2f}, and was {best[0]:.2f} at {best[1][1]} ({best[1][0]})")
            cells.append(f"{now:.2f}{LOST}")
        else:
            cells.append(NOT_MEASURED if now is None else f"{now:.2f}")
    write(file, [HEAD, *rows, [date, commit, where, *cells]])
    return lost


def value(cell: str) -> float:
    """Parses the figure of a cell, with or without a mark."""
    return float(cell.rstrip(f"x{LOST}"))


def _ratio(folder: Path, ratio: Ratio) -> float | None:
    """Returns a ratio from its section's file; None if it has no such row, as where a configuration did not run."""
    head, *rows = read(folder / f"{ratio.section}.csv")
    cells = [row[head.index(ratio.column)] for row in rows if tuple(row[: len(ratio.row)]) == ratio.row]
    return value(cells[0]) if cells else None


def commit_of(checkout: Path) -> str:
    """Returns the commit of a checkout, with a `+` if files differ from it; `unknown` where git knows none."""
    words = ["git", "-C", str(checkout), "describe", "--always", "--exclude=*", "--abbrev=8", "--dirty=+"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def draw(folder: Path, output: Path) -> None:
    """Draws each ratio over the runs, as a share of its first value on the same machine.

    Args:
        folder: Folder of history.csv.
        output: Picture to write, .png or .svg.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    pyplot = load_pyplot()
    rows = read(folder / "history.csv")[1:]
    figure, all_axes = pyplot.subplots(
        1, len(_GROUPS), figsize=(4.2 * len(_GROUPS), 3.6), layout="constrained", sharey=True
    )
    for axes, (title, sections) in zip(all_axes, _GROUPS.items(), strict=True):
        for column, ratio in enumerate(RATIOS, len(HEAD) - len(RATIOS)):
            if ratio.section in sections:
                shares = _shares(rows, column)
                axes.plot([run for run, _ in shares], [share for _, share in shares], marker="o", label=ratio.name)
        axes.axhline(1 - MOST_LOSS, color="#555555", linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(rows)), [f"{row[1]}\n{row[0]}" for row in rows], fontsize=7)
        axes.set_title(title, fontsize=9, loc="left")
        axes.legend(frameon=False, fontsize=7)
        strip(axes)
    all_axes[0].set_ylabel("share of the first run on the same machine", fontsize=8)
    machines = "; ".join(dict.fromkeys(row[2] for row in rows))
    save(figure, output, [f"{machines}. Dotted: {MOST_LOSS:.0%} below the first run"])


_GROUPS = {
    "exact, one bucket, over plain DDP": ("hook",),
    "a transformer, over plain DDP": ("compare",),
    "kernels, over a copy of the same bytes": ("kernels",),
}
"""Title of a part of the picture -> its sections."""


def _shares(rows: Sequence[Sequence[str]], column: int) -> list[tuple[int, float]]:
    """Returns (number of the run, ratio over the first one on the same machine) of the runs that measured a ratio."""
    first: dict[str, float] = {}
    found = []
    for run, row in enumerate(rows):
        if re.match(r"\d", row[column]):
            found.append((run, value(row[column]) / first.setdefault(row[2], value(row[column]))))
    return found
