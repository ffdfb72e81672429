"""A picture for each task: quality over training time on each link, one line a method, its seeds as a band."""

from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.bench.plot.style import BASELINE, PEERS, load_pyplot
from gradwire.bench.studies.convergence.methods import METHODS, PLAIN, TORCH_FP16
from gradwire.bench.studies.convergence.reach import seconds_after, target
from gradwire.bench.studies.convergence.record import Record, Speed
from gradwire.bench.studies.convergence.speed import LINKS
from gradwire.bench.studies.convergence.tasks import TASKS, Facts

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


def _draw_task(record: Record, facts: Facts, speeds: list[Speed], file: Path) -> None:
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


def _draw_link(axes: "Axes", record: Record, facts: Facts, speed: Speed) -> None:
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
