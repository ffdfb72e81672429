"""Bus bandwidth and time over size: what `gradwire bench -J` wrote."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.bench.plot.style import PlotRecord, load_pyplot, save, shown_command, strip

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "os^vDPX*"
_KIBI = 1024
_MOST_TICKS = 9


@dataclass(frozen=True, slots=True)
class Curve:
    """Holds the points of one line of a picture over sizes.

    Attributes:
        label: Text in the legend.
        sizes: Sizes of the tensor in bytes, ascending.
        microseconds: Time of one in-place operation at each size.
        busbw: Bus bandwidth of in-place operations in GB/s at each size.
    """

    label: str
    sizes: tuple[int, ...]
    microseconds: tuple[float, ...]
    busbw: tuple[float, ...]


def curves(record: PlotRecord) -> list[Curve]:
    """Returns the curves of one file of `gradwire bench -J`, one for each block."""
    found = []
    for number, block in enumerate(record["blocks"]):
        rows = [row for row in record["results"] if row["block"] == number and row["size"] > 0]
        facts = block["facts"]
        words = [facts.get("backend", ""), facts.get("algorithm", ""), facts.get("compressor", "")]
        label = " ".join(word for word in words if word and word != "none")
        label = "gradwire's shared memory alone" if label == "shm" else label
        halves = [row["in_place"] for row in rows]
        found.append(
            Curve(
                label,
                tuple(row["size"] for row in rows),
                tuple(half["time"] for half in halves),
                tuple(half["bus_bw"] for half in halves),
            )
        )
    return found


def size_text(nbytes: float) -> str:
    """Formats bytes as nccl-tests writes them on its command line: 64K, 1M."""
    for unit, scale in (("G", _KIBI**3), ("M", _KIBI**2), ("K", _KIBI)):
        if nbytes >= scale:
            return f"{nbytes / scale:g}{unit}"
    return f"{nbytes:g}"


def time_text(microseconds: float) -> str:
    """Formats microseconds in the largest unit that keeps the number above 1."""
    if microseconds >= 1e6:
        return f"{microseconds / 1e6:g} s"
    return f"{microseconds / 1e3:g} ms" if microseconds >= 1e3 else f"{microseconds:g} us"


def draw_sizes(records: dict[Path, PlotRecord], output: Path) -> list[Path]:
    """Draws bus bandwidth and time over size.

    Args:
        records: File -> parsed output of `gradwire bench -J`, all of one collective. With several files the legend
            has their names.
        output: Path of a picture; `-busbw` and `-time` are inserted before its ending.

    Returns:
        Paths of the two pictures.
    """
    pyplot = load_pyplot()
    lines = [
        replace(curve, label=f"{curve.label}, {file.stem}" if len(records) > 1 else curve.label)
        for file, record in records.items()
        for curve in curves(record)
    ]
    collective = str(next(iter(records.values()))["results"][0]["experiment_name"])
    notes = [
        f"{file.stem}: {note}" if len(records) > 1 else note
        for file, record in records.items()
        for note in caption(record)
    ]
    drawn = []
    for kind in ("busbw", "time"):
        figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
        for number, curve in enumerate(lines):
            values = curve.busbw if kind == "busbw" else curve.microseconds
            axes.plot(
                curve.sizes,
                values,
                marker=_MARKERS[number % len(_MARKERS)],
                markersize=5,
                linewidth=1.8,
                label=curve.label,
            )
        _label_sizes(axes, kind, [size for curve in lines for size in curve.sizes], collective)
        axes.legend(title="what runs the collective", frameon=False)
        name = output.with_name(f"{output.stem}-{kind}{output.suffix}")
        save(figure, name, notes)
        drawn.append(name)
    return drawn


def _label_sizes(axes: "Axes", kind: str, sizes: list[int], collective: str) -> None:
    """Labels the axes with units: sizes in powers of two, times in decades."""
    axes.set_xscale("log", base=2)
    ticks = sorted(set(sizes))
    step = max(1, -(-len(ticks) // _MOST_TICKS))
    axes.set_xticks(ticks[::step], [size_text(size) for size in ticks[::step]])
    axes.set_xlabel("size of the tensor (bytes; K, M: powers of 1024)")
    axes.grid(True, which="major", alpha=0.3)
    strip(axes)
    if kind == "busbw":
        axes.set_ylabel("bus bandwidth (GB/s = 10^9 bytes/s), higher is better")
        axes.set_ylim(bottom=0)
        axes.set_title(f"{collective}: what each rank's link carries, whatever the number of ranks")
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: time_text(value))
        axes.set_ylabel("time of one operation, lower is better")
        axes.set_title(f"{collective}: how long one operation takes")


def caption(record: PlotRecord) -> list[str]:
    """Returns the caption of a bench file: machine, ranks, date and command."""
    ranks = record["blocks"][0]["facts"].get("ranks", "")
    return [
        f"{record['machine']}; ranks: {ranks}",
        f"in place, mean of {record['config']['iterations']} operations; `{shown_command(record['args'])}`",
    ]
