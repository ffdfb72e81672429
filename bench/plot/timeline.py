"""Draws one step of all ranks from a trace: when gradients were computed, transfers ran, and ranks waited."""

import statistics
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire.bench.plot.style import OURS, PlotRecord, load_pyplot, save, strip

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KIND = "gradwire trace"
"""Value of `otherData.kind` in a trace file."""

MOST_RANKS = 8
"""Maximum number of ranks in a picture; of more, the earliest, the latest and some between are drawn."""

BACKWARD, WAIT, CODEC, GATHER = "#cfd8dc", "#f2b8a0", "#7b4397", "#5fa8d3"
COLOURS = {
    "backward": BACKWARD,
    "reduce_scatter": "#88c0a8",
    "all_reduce": OURS,
    "all_gather": GATHER,
    "codec": CODEC,
    "wait": WAIT,
}

WAITS_FOR = "wait for "
"""Prefix of the name of an event in which a lane waits for a transfer; the collective and level follow."""

CLOSE = 0.015
"""Share of the picture's width below which the numbers of two buckets would overlap."""

_ROWS = {"step": "backward", "arrivals": "buckets"}
"""Row of a rank that belongs to no lane -> its label."""


@dataclass(frozen=True, slots=True)
class TimelineBar:
    """Describes a rectangle in a rank's rows.

    Attributes:
        began: Left edge: time in seconds on the trace's clock.
        ended: Right edge: time in seconds on the trace's clock.
        kind: Key of `COLOURS`.
        thin: True draws it with half the height, inside another one.
        text: Label, written if there is room.
    """

    began: float
    ended: float
    kind: str
    thin: bool = False
    text: str = ""


def is_trace(record: PlotRecord) -> bool:
    """Returns whether a file was written by `HookState.trace`."""
    about = record.get("otherData")
    return isinstance(about, dict) and about.get("kind") == KIND


def rows_of(record: PlotRecord, step: int) -> dict[int, dict[str, list[TimelineBar]]]:
    """Returns rank -> row -> bars of one step: the step itself, arrivals of buckets, and each lane's activity.

    Args:
        record: Parsed trace.
        step: Number of the step.

    Raises:
        ValueError: The trace does not hold the step.
    """
    spans = spans_of(record)
    if step not in spans:
        held = sorted(spans)
        raise ValueError(f"`--step`: found {step}, wanted {held[0]} to {held[-1]}, which the trace holds")
    first, last = spans[step]
    entered = _entered(record)
    found: dict[int, dict[str, list[TimelineBar]]] = defaultdict(lambda: defaultdict(list))
    for event in record["traceEvents"]:
        if event["ph"] != "X":
            continue
        began = event["ts"] / 1e6
        ended = began + event["dur"] / 1e6
        rank, track, name = int(event["pid"]), str(event["cat"]), str(event["name"])
        if track == "step" and event["args"].get("step") == step:
            kind = "wait" if "wait for buckets" in name else "backward"
            found[rank]["step"].append(TimelineBar(began, ended, kind))
        elif track == "buckets" and event["args"].get("step") == step:
            number = event["args"]["bucket"]
            found[rank]["arrivals"].append(TimelineBar(began, ended, "backward", text=str(number)))
        elif track.startswith(("lane ", "phase ")) and ended > first and began < last:
            what = next((each for each in COLOURS if name.startswith(each)), None)
            if what is not None:
                complete = min(max(began, entered.get(id(event), began)), ended)
                if complete > began:
                    found[rank][track].append(TimelineBar(max(began, first), min(complete, last), "wait"))
                found[rank][track].append(TimelineBar(max(complete, first), min(ended, last), what, what == "codec"))
    for rank, track, bar in _in_flight(record):
        if bar.ended > first and bar.began < last:
            found[rank][track].append(replace(bar, began=max(bar.began, first), ended=min(bar.ended, last)))
    return found


def _entered(record: PlotRecord) -> dict[int, float]:
    """Returns the id of an event -> when the last rank of its node entered the same collective, in seconds.

    A collective in shared memory waits inside for that rank. All ranks of a node run their collectives in one order, so
    the n-th of a launch and phase is the same on each.

    Args:
        record: Parsed trace.
    """
    events = sorted(record["traceEvents"], key=lambda each: each.get("ts", 0.0))
    nodes = {each["pid"]: each["args"]["name"].partition(", ")[2] for each in events if each["name"] == "process_name"}
    counts: Counter[tuple[int, object, str]] = Counter()
    same: dict[tuple[object, ...], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        name = event["name"]
        if event["ph"] == "X" and name.endswith(" intra_node") and not name.startswith(WAITS_FOR):
            key = event["pid"], event["args"].get("launch"), name
            counts[key] += 1
            same[nodes.get(key[0]), *key[1:], counts[key]].append(event)
    return {id(event): group[-1]["ts"] / 1e6 for group in same.values() for event in group}


def _in_flight(record: PlotRecord) -> Iterator[tuple[int, str, TimelineBar]]:
    """Yields (rank, row, bar) of transfers that no lane carries: those that run while the next lane waits for them.

    A chunk's transfer is issued when the lane before it is done with the chunk, and has ended when the wait for it has.
    Chunks go through each lane in one order, so the n-th wait of an all-reduce belongs to the n-th chunk.
    """
    events = sorted((each for each in record["traceEvents"] if each["ph"] == "X"), key=lambda each: each["ts"])
    done: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for event in events:
        rank, launch, name, track = (
            int(event["pid"]),
            event["args"].get("launch"),
            str(event["name"]),
            str(event["cat"]),
        )
        if launch is None or not track.startswith("lane "):
            continue
        lane, ended = int(track.removeprefix("lane ").partition(".")[0]), (event["ts"] + event["dur"]) / 1e6
        op, _, level = name.removeprefix(WAITS_FOR).partition(" ")
        if not name.startswith(WAITS_FOR):
            done[rank, launch, lane].append(ended)
        # The phase of the transfer has the number between the two lanes.
        elif op in COLOURS and (chunks := done[rank, launch, lane - 2]):
            yield rank, f"lane {lane - 1}, {level}", TimelineBar(chunks.pop(0), ended, op)


def spans_of(record: PlotRecord) -> dict[int, tuple[float, float]]:
    """Returns step -> (begin on the first rank, end on the last rank), in seconds."""
    spans: dict[int, tuple[float, float]] = {}
    for event in record["traceEvents"]:
        if event["ph"] == "X" and event["cat"] in ("step", "buckets") and "step" in event["args"]:
            began = event["ts"] / 1e6
            ended = began + event["dur"] / 1e6
            known = spans.get(event["args"]["step"], (began, ended))
            spans[event["args"]["step"]] = min(began, known[0]), max(ended, known[1])
    return spans


def middle_step(record: PlotRecord) -> int:
    """Returns the number of the step of median length.

    Raises:
        ValueError: The trace holds no step.
    """
    lengths = {step: last - first for step, (first, last) in spans_of(record).items()}
    if not lengths:
        raise ValueError("`FILE.json` is a trace without a step; wanted what `HookState.trace` wrote")
    middle = statistics.median_low(lengths.values())
    return next(step for step, length in lengths.items() if length == middle)


def draw_timeline(record: PlotRecord, output: Path, step: int | None) -> None:
    """Draws one step of a trace.

    Args:
        record: Parsed trace that `HookState.trace` wrote.
        output: Picture to write, .png or .svg.
        step: Number of the step; None takes the one of median length.

    Raises:
        ValueError: The trace does not hold the step.
        RuntimeError: matplotlib is not installed.
    """
    # What is drawn: the step's bars, and a row for each track of each shown rank.
    pyplot = load_pyplot()
    step = middle_step(record) if step is None else step
    rows = rows_of(record, step)
    first, last = spans_of(record)[step]
    names = {
        int(event["pid"]): str(event["args"]["name"])
        for event in record["traceEvents"]
        if event["ph"] == "M" and event["name"] == "process_name"
    }
    ranks = shown_ranks(rows)
    lines = [(rank, track) for rank in ranks for track in _tracks(rows[rank])]
    scale, unit = (1e3, "ms") if last - first < 1 else (1.0, "s")
    figure, axes = pyplot.subplots(figsize=(11, 1.4 + 0.27 * len(lines) + 0.1 * len(ranks)), layout="constrained")
    # A height for each row, with a gap and a line between ranks.
    heights, at = {}, 0.0
    for place, (rank, track) in enumerate(lines):
        if place and lines[place - 1][0] != rank:
            at += 0.5
            axes.axhline(at - 0.28, color="#e0e0e0", linewidth=0.8)
        heights[rank, track] = at
        at += 1.0
    # The bars, and a dotted line at the last arrival of each bucket.
    for (rank, track), height in heights.items():
        bars = rows[rank][track] if track != "arrivals" else _readable(rows[rank][track], CLOSE * (last - first))
        for bar in bars:
            _draw_bar(axes, bar, height, first, scale, track)
    late = [bar for rank in rows for bar in rows[rank]["arrivals"]]
    for number in sorted({bar.text for bar in late}, key=int):
        latest = max(bar.began for bar in late if bar.text == number)
        axes.axvline((latest - first) * scale, color="#c1440e", linewidth=0.7, linestyle=":", zorder=0)
    # Labels of rows and ranks, axes, legend and caption.
    axes.set_yticks(list(heights.values()), [_ROWS.get(track, track) for _, track in lines], fontsize=7)
    for rank in ranks:
        own = [height for (each, _), height in heights.items() if each == rank]
        axes.text(
            -0.135,
            (min(own) + max(own)) / 2,
            textwrap.fill(names[rank].replace(", node ", "\n"), 18, replace_whitespace=False),
            transform=axes.get_yaxis_transform(),
            fontsize=8,
            ha="center",
            va="center",
            fontweight="bold",
        )
    axes.set_ylim(at - 0.3, -0.7)
    axes.set_xlim(0, (last - first) * scale)
    axes.set_xlabel(f"{unit} from the first rank's first bucket of the step", fontsize=9)
    axes.set_title(f"step {step}: {(last - first) * scale:.3g} {unit}", fontsize=10, loc="left")
    strip(axes)
    axes.tick_params(axis="y", length=0)
    used = [kind for kind in COLOURS if any(bar.kind == kind for rank, track in lines for bar in rows[rank][track])]
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in used]
    handles.append(pyplot.Line2D([], [], color="#c1440e", linewidth=0.9, linestyle=":"))
    axes.legend(
        handles,
        [*("waiting" if kind == "wait" else kind for kind in used), "a bucket's last arrival"],
        frameon=False,
        fontsize=8,
        ncols=len(handles),
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.2,
        handlelength=1.2,
        columnspacing=1.2,
    )
    about = record["otherData"]
    error = max(about.get("clock_error_seconds") or [0.0])
    more = "" if len(ranks) == len(rows) else f"; {len(ranks)} of {len(rows)} ranks"
    save(figure, output, [f"{about['cluster']}{more}; clocks aligned to {error * 1e3:.2g} ms", *about["plans"][:1]])


def shown_ranks(rows: dict[int, dict[str, list[TimelineBar]]]) -> list[int]:
    """Returns the ranks to draw, ascending: all, or those with the earliest and latest last bucket and some between."""
    ranks = sorted(rows, key=lambda rank: max((bar.began for bar in rows[rank]["arrivals"]), default=0.0))
    if len(ranks) > MOST_RANKS:
        ranks = [ranks[round(place * (len(ranks) - 1) / (MOST_RANKS - 1))] for place in range(MOST_RANKS)]
    return sorted(set(ranks))


def _readable(bars: Sequence[TimelineBar], apart: float) -> list[TimelineBar]:
    """Joins the numbers of buckets that arrive within `apart` seconds of each other into one text: `0,1,2`."""
    found: list[TimelineBar] = []
    labelled = 0
    for bar in sorted(bars, key=lambda each: each.began):
        if found and bar.began - found[labelled].began < apart:
            found[labelled] = replace(found[labelled], text=f"{found[labelled].text},{bar.text}")
            found.append(replace(bar, text=""))
        else:
            labelled = len(found)
            found.append(bar)
    return found


def _tracks(rows: dict[str, list[TimelineBar]]) -> list[str]:
    others = sorted(track for track, bars in rows.items() if track not in ("step", "arrivals") and bars)
    return ["step", "arrivals", *others]


def _draw_bar(axes: "Axes", bar: TimelineBar, height: float, first: float, scale: float, track: str) -> None:
    began, width = (bar.began - first) * scale, max((bar.ended - bar.began) * scale, 0.0)
    if track == "arrivals":
        axes.plot([began, began + width], [height, height], color="#90a4ae", linewidth=1.2, zorder=2)
        axes.plot([began], [height], marker="v", color="#37474f", markersize=4, zorder=3)
        axes.text(began, height - 0.42, bar.text, fontsize=6, ha="center", va="center", color="#37474f")
        return
    axes.barh(
        [height],
        [width],
        left=[began],
        height=0.34 if bar.thin else 0.72,
        color=COLOURS[bar.kind],
        hatch="////" if bar.kind == "wait" else None,
        edgecolor="white" if bar.kind == "wait" else COLOURS[bar.kind],
        linewidth=0.0 if bar.kind == "wait" else 0.2,
        zorder=3 if bar.thin else 2,
    )
