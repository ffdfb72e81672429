"""The results as Markdown tables, and a picture for each task: quality over training time, one line a method."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.bench.plot.style import BASELINE, PEERS, load_pyplot
from gradwire.bench.studies.convergence.record import (
    Record,
    Speed,
    ending,
    plain_runs,
    seconds_after,
    seconds_to,
    steps_of,
    target,
)
from gradwire.bench.studies.convergence.speed import LINKS
from gradwire.bench.studies.convergence.tasks import TASKS, TaskFacts
from gradwire.bench.studies.convergence.training import METHODS, PLAIN, SHARDED_METHODS, TORCH_FP16

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
"""Between them a page holds the tables."""
SHARDED_BEGIN, SHARDED_END = "<!-- sharded: begin -->", "<!-- sharded: end -->"
"""Between them it holds those of sharded models."""


def replace_tables(page: Path, text: str, first: str = BEGIN, last: str = END) -> None:
    """Puts `text` where a page holds its tables.

    Args:
        page: A file of Markdown.
        text: The tables.
        first: The line before them.
        last: The line behind them.

    Raises:
        ValueError: The page has no such place.
    """
    before, begin, rest = page.read_text().partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"`--page` {page} has no lines `{first}` and `{last}`; put them where the tables belong")
    page.write_text(f"{before}{first}\n\n{text}\n\n{last}{after}")


def sharded_tables(record: Record) -> str:
    """Returns a table for each task that was trained with a sharded model, against plain DDP; empty if none was."""
    parts = []
    for make in TASKS.values():
        facts = make().facts
        names = [method.name for method in SHARDED_METHODS if record.runs_of(facts.name, method.name)]
        if not names or not record.runs_of(facts.name, PLAIN):
            continue
        lines = [f"{facts.title[0].upper()}{facts.title[1:]}, {facts.steps} steps; {facts.quality}:", ""]
        lines.append(_line(["setting", "final", "against plain DDP", "lowest to highest", "of each seed", "seeds"]))
        lines.append("|---" * (lines[-1].count("|") - 1) + "|")
        for name in [PLAIN, *names]:
            runs = sorted(record.runs_of(facts.name, name), key=lambda run: run.seed)
            plain = {run.seed: run.final for run in record.runs_of(facts.name, PLAIN)}
            apart = [run.final - plain[run.seed] for run in runs if run.seed in plain]
            end = ending(runs)
            lines.append(
                _line(
                    [
                        name,
                        f"{end.mean:.3f}",
                        f"{sum(apart) / len(apart):+.3f}" if apart else "",
                        f"{end.low:.3f} to {end.high:.3f}",
                        ", ".join(f"{each:+.3f}" for each in apart),
                        f"{len(runs)}",
                    ]
                )
            )
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, f"Machine: {record.machine}."]) if parts else ""


def tables(record: Record) -> str:
    """Returns a heading, a line of facts and a table for each task that was trained."""
    parts = []
    for make in TASKS.values():
        facts = make().facts
        if record.runs_of(facts.name, PLAIN):
            parts.append(
                "\n".join([f"### {facts.title}", "", _introduction(record, facts), "", *_table(record, facts)])
            )
    return "\n\n".join([*parts, f"Machine: {record.machine}."])


def _introduction(record: Record, facts: TaskFacts) -> str:
    wanted = target(record, facts)
    text = (
        f"{facts.steps} steps; quality: {facts.quality}. To reach: "
        f"{wanted:.2f}, which is plain DDP's mean within {facts.tolerance:g}."
    )
    for speed in _speeds(record, facts):
        share = 1.0 - speed.free_seconds / speed.seconds(PLAIN)
        text += (
            f" On {speed.nic} links plain DDP spends {share:.0%} of its step on communication "
            f"({speed.free_seconds:.3f} s without a limit)."
        )
    return text


def _speeds(record: Record, facts: TaskFacts) -> list[Speed]:
    return [speed for share in LINKS if (speed := record.speed_of(facts.name, share)) is not None]


def _table(record: Record, facts: TaskFacts) -> list[str]:
    speeds = _speeds(record, facts)
    lines = [
        _line(
            [
                "method",
                "final",
                "against plain DDP",
                "lowest to highest",
                "seeds",
                "steps to reach",
                *(word for speed in speeds for word in (f"s per step, {speed.nic}", "time to quality", "speed-up")),
            ]
        )
    ]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    missing = [method.name for method in METHODS[facts.optimizer] if not record.runs_of(facts.name, method.name)]
    for method in METHODS[facts.optimizer]:
        if method.name in missing:
            continue
        runs = record.runs_of(facts.name, method.name)
        end = ending(runs)
        steps = steps_of(record, facts, method.name)
        apart = end.mean - ending(plain_runs(record, facts.name, method.name)).mean
        lines.append(
            _line(
                [
                    method.name,
                    f"{end.mean:.2f}",
                    f"{apart:+.2f}",
                    f"{end.low:.2f} to {end.high:.2f}",
                    f"{len(runs)}",
                    "never" if steps is None else f"{steps:.0f}",
                    *(word for speed in speeds for word in _times(record, facts, method.name, speed)),
                ]
            )
        )
    return lines + (["", f"Not trained yet: {'; '.join(missing)}."] if missing else [])


def _times(record: Record, facts: TaskFacts, method: str, speed: Speed) -> tuple[str, str, str]:
    per_step = f"{speed.seconds(method):.3f}"
    seconds, plain = seconds_to(record, facts, method, speed), seconds_to(record, facts, PLAIN, speed)
    if seconds is None or plain is None:
        return per_step, "never", ""
    return per_step, f"{seconds:.0f} s", f"{plain / seconds:.2f}x"


def _line(words: Sequence[str]) -> str:
    return f"| {' | '.join(words)} |"


if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN_FROM = 0.4
"""Share of the run from which the quality is drawn: the first steps differ too much in scale from the last ones."""
COLOURS = {PLAIN: BASELINE, TORCH_FP16: PEERS}
_OURS = ("#0b6e4f", "#1982c4", "#6a4c93", "#f2a541", "#2f2f2f", "#8ac926", "#c9184a", "#00a6a6", "#7f5539", "#ff70a6")


def draw(record: Record, name: Path) -> list[Path]:
    """Draws each task whose steps were timed on every link.

    Args:
        record: What was measured.
        name: The pictures become `name` with the task and `.png` behind it.

    Returns:
        The files drawn.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    drawn = []
    for make in TASKS.values():
        facts = make().facts
        speeds = [record.speed_of(facts.name, share) for share in LINKS]
        if record.runs_of(facts.name, PLAIN) and all(speeds):
            file = name.with_name(f"{name.name}-{facts.name}.png")
            _draw_task(record, facts, [speed for speed in speeds if speed is not None], file)
            drawn.append(file)
    return drawn


def _draw_task(record: Record, facts: TaskFacts, speeds: list[Speed], file: Path) -> None:
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(1, len(speeds), figsize=(12, 4.6), layout="constrained", sharey=True)
    for axes, speed in zip(panels, speeds, strict=True):
        _draw_link(axes, record, facts, speed)
    panels[0].set_ylabel(facts.quality)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    figure.suptitle(f"{facts.title}: quality over time, 2 nodes x 2 ranks", fontsize=11, x=0.01, ha="left")
    figure.text(
        0.01,
        -0.01,
        "means over the seeds, bands from the worst to the best; "
        f"dotted: plain DDP's quality within {facts.tolerance:g}; time is steps times the measured seconds per "
        f"step\n{speeds[0].machine}; python -m gradwire.bench.studies.convergence",
        fontsize=8,
        color="#555555",
        va="top",
    )
    figure.savefig(file, dpi=90, bbox_inches="tight")
    pyplot.close(figure)


def _draw_link(axes: "Axes", record: Record, facts: TaskFacts, speed: Speed) -> None:
    ours = iter(_OURS)
    for method in METHODS[facts.optimizer]:
        runs = record.runs_of(facts.name, method.name)
        if not runs:
            continue
        points = [
            point
            for point in zip(*(run.curve for run in runs), strict=True)
            if point[0][0] >= SHOWN_FROM * runs[0].curve[-1][0]
        ]
        times = [seconds_after(point[0][0], runs[0], speed) for point in points]
        values = [[quality for _, quality in point] for point in points]
        colour = COLOURS.get(method.name) or next(ours)
        axes.plot(
            times,
            [sum(each) / len(each) for each in values],
            color=colour,
            label=method.name,
            linewidth=1.6,
            marker="o",
            markersize=3,
        )
        axes.fill_between(
            times, [min(each) for each in values], [max(each) for each in values], color=colour, alpha=0.12
        )
    axes.axhline(target(record, facts), color=BASELINE, linestyle=":", linewidth=1)
    _label_time(axes)
    axes.set_title(f"links of {speed.nic}", fontsize=10)


def _label_time(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("training time, seconds (logarithmic)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
