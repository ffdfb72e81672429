"""Shows the results: as tables, and in a picture for each task, quality over training time with a line a method."""

from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.bench.plot.style import BASELINE, PEERS, load_pyplot, strip
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


def sharded_tables(record: Record) -> dict[str, list[list[str]]]:
    """Returns a table for each task that was trained with a sharded model, against plain DDP.

    Returns:
        `sharded_TASK` -> rows of the table, with the headings first; tasks without such trainings are missing.
    """
    found = {}
    for make in TASKS.values():
        facts = make().facts
        names = [method.name for method in SHARDED_METHODS if record.runs_of(facts.name, method.name)]
        if not names or not record.runs_of(facts.name, PLAIN):
            continue
        rows = [["setting", "final", "against plain DDP", "lowest to highest", "of each seed", "seeds"]]
        for name in [PLAIN, *names]:
            runs = sorted(record.runs_of(facts.name, name), key=lambda run: run.seed)
            plain = {run.seed: run.final for run in record.runs_of(facts.name, PLAIN)}
            apart = [run.final - plain[run.seed] for run in runs if run.seed in plain]
            end = ending(runs)
            rows.append(
                [
                    name,
                    f"{end.mean:.3f}",
                    f"{sum(apart) / len(apart):+.3f}" if apart else "",
                    f"{end.low:.3f} to {end.high:.3f}",
                    ", ".join(f"{each:+.3f}" for each in apart),
                    f"{len(runs)}",
                ]
            )
        found[f"sharded_{facts.name}"] = rows
    return found


def tables(record: Record) -> dict[str, list[list[str]]]:
    """Returns a table for each task, and one of the links under the name `links`, with the headings first.

    Tasks without a training by plain DDP are missing; so is `links` if no step was timed.
    """
    found = {}
    links = [
        [
            "task",
            "steps",
            "to reach",
            "link",
            "plain DDP's share of a step on communication",
            "s a step without a limit",
        ]
    ]
    for make in TASKS.values():
        facts = make().facts
        if not record.runs_of(facts.name, PLAIN):
            continue
        found[facts.name] = _table(record, facts)
        for speed in _speeds(record, facts):
            share = 1.0 - speed.free_seconds / speed.seconds(PLAIN)
            wanted = f"{target(record, facts):.2f}"
            links.append([facts.name, f"{facts.steps}", wanted, speed.nic, f"{share:.0%}", f"{speed.free_seconds:.3f}"])
    return found | ({"links": links} if len(links) > 1 else {})


def untrained(record: Record) -> dict[str, list[str]]:
    """Returns, for each task that has any, its methods that were not trained yet."""
    return {
        facts.name: missing
        for facts in (make().facts for make in TASKS.values())
        if (missing := [each.name for each in METHODS[facts.optimizer] if not record.runs_of(facts.name, each.name)])
    }


def _speeds(record: Record, facts: TaskFacts) -> list[Speed]:
    return [speed for share in LINKS if (speed := record.speed_of(facts.name, share)) is not None]


def _table(record: Record, facts: TaskFacts) -> list[list[str]]:
    speeds = _speeds(record, facts)
    rows = [
        [
            "method",
            "final",
            "against plain DDP",
            "lowest to highest",
            "seeds",
            "steps to reach",
            *(f"{word}, {speed.nic}" for speed in speeds for word in ("s a step", "time to quality", "speed-up")),
        ]
    ]
    for method in METHODS[facts.optimizer]:
        runs = record.runs_of(facts.name, method.name)
        if not runs:
            continue
        end = ending(runs)
        steps = steps_of(record, facts, method.name)
        apart = end.mean - ending(plain_runs(record, facts.name, method.name)).mean
        rows.append(
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
    return rows


def _times(record: Record, facts: TaskFacts, method: str, speed: Speed) -> tuple[str, str, str]:
    per_step = f"{speed.seconds(method):.3f}"
    seconds, plain = seconds_to(record, facts, method, speed), seconds_to(record, facts, PLAIN, speed)
    if seconds is None or plain is None:
        return per_step, "never", "-"
    return per_step, f"{seconds:.0f} s", f"{plain / seconds:.2f}x"


if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN_FROM = 0.4
"""Share of the run from which the quality is drawn: the first steps differ too much in scale from the last ones."""
COLOURS = {PLAIN: BASELINE, TORCH_FP16: PEERS}
_OURS = ("#0b6e4f", "#1982c4", "#6a4c93", "#f2a541", "#2f2f2f", "#8ac926", "#c9184a", "#00a6a6", "#7f5539", "#ff70a6")


def draw(record: Record, name: Path) -> list[Path]:
    """Draws each task whose steps were timed on every link.

    Args:
        record: Record with trainings and timed steps.
        name: Beginning of the pictures' names; the task and `.png` are appended: `NAME-TASK.png`.

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
    strip(axes)
