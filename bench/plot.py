"""`gradwire plot FILE.json...`: pictures of what `bench -J`, `compare --json` and `hook_speed --json` wrote.

Files of `bench` become two pictures, bus bandwidth over size and time over size, one line for each file and block; a
file of `compare` or `hook_speed` becomes bars of seconds with the speed-up written on them.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]

OURS, PEERS, BASELINE = "#0b6e4f", "#8d99ae", "#c1440e"
"""gradwire, the others, and what speed-ups are measured against."""
_MARKERS = "os^vDPX*"
_KIBI = 1024


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a picture over sizes.

    Attributes:
        label: In the legend.
        sizes: In bytes, ascending.
        microseconds: Of the in-place half.
        busbw: In GB/s, of the in-place half.
    """

    label: str
    sizes: tuple[int, ...]
    microseconds: tuple[float, ...]
    busbw: tuple[float, ...]


def load_pyplot() -> Any:
    """Imports matplotlib without a screen.

    Raises:
        RuntimeError: It is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("matplotlib is needed to draw: install it with `pip install gradwire[plot]`") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot
    return matplotlib.pyplot


def curves(record: Record) -> list[Curve]:
    """The lines of one file of `gradwire bench -J`: one for each block."""
    found = []
    for number, block in enumerate(record["blocks"]):
        rows = [row for row in record["results"] if row["block"] == number and row["size"] > 0]
        facts = block["facts"]
        words = [facts.get("backend", ""), facts.get("algorithm", ""), facts.get("compressor", "")]
        label = " ".join(word for word in words if word and word != "none")
        label = "gradwire's shared memory alone" if label == "shm" else label
        halves = [row["in_place"] for row in rows]
        found.append(Curve(label, tuple(row["size"] for row in rows), tuple(half["time"] for half in halves),
                           tuple(half["bus_bw"] for half in halves)))
    return found


def size_text(nbytes: float) -> str:
    """Bytes as nccl-tests writes them on its command line: 64K, 1M."""
    for unit, scale in (("G", _KIBI**3), ("M", _KIBI**2), ("K", _KIBI)):
        if nbytes >= scale:
            return f"{nbytes / scale:g}{unit}"
    return f"{nbytes:g}"


def time_text(microseconds: float) -> str:
    """Microseconds in the largest unit that keeps the number above 1."""
    if microseconds >= 1e6:
        return f"{microseconds / 1e6:g} s"
    return f"{microseconds / 1e3:g} ms" if microseconds >= 1e3 else f"{microseconds:g} us"


def draw_sizes(records: list[Record], output: Path) -> list[Path]:
    """Draws bus bandwidth and time over size.

    Args:
        records: Files of `gradwire bench -J`, all of one collective.
        output: The pictures are named after it, with `-busbw` and `-time` before the ending.

    Returns:
        The files drawn.
    """
    pyplot = load_pyplot()
    lines = [curve for record in records for curve in curves(record)]
    first = records[0]
    drawn = []
    for kind in ("busbw", "time"):
        figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
        for number, curve in enumerate(lines):
            values = curve.busbw if kind == "busbw" else curve.microseconds
            axes.plot(curve.sizes, values, marker=_MARKERS[number % len(_MARKERS)], markersize=5, linewidth=1.8,
                      label=curve.label)
        _label_sizes(axes, kind, [size for curve in lines for size in curve.sizes], str(first["results"][0]["experiment_name"]))
        axes.legend(title="what runs the collective", frameon=False)
        figure.text(0.01, -0.01, caption(first), fontsize=8, color="#555555", va="top")
        name = output.with_name(f"{output.stem}-{kind}{output.suffix}")
        figure.savefig(name, dpi=150, bbox_inches="tight")
        pyplot.close(figure)
        drawn.append(name)
    return drawn


def _label_sizes(axes: "Axes", kind: str, sizes: list[int], collective: str) -> None:
    """Axes with units: sizes in powers of two, times over decades."""
    axes.set_xscale("log", base=2)
    ticks = sorted(set(sizes))
    step = max(1, -(-len(ticks) // 9))
    axes.set_xticks(ticks[::step], [size_text(size) for size in ticks[::step]])
    axes.set_xlabel("size of the tensor (bytes; K, M: powers of 1024)")
    axes.grid(True, which="major", alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if kind == "busbw":
        axes.set_ylabel("bus bandwidth (GB/s), higher is better")
        axes.set_ylim(bottom=0)
        axes.set_title(f"{collective}: how much of the link is used")
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: time_text(value))
        axes.set_ylabel("time of one operation, lower is better")
        axes.set_title(f"{collective}: how long it takes")


def caption(record: Record) -> str:
    """Machine, ranks and date of a bench file."""
    ranks = record["blocks"][0]["facts"].get("ranks", "")
    files = ("-J", "--output_file", "--csv")
    words = record["args"]
    kept = [word for place, word in enumerate(words) if word not in files and (not place or words[place - 1] not in files)]
    command = " ".join(kept)
    return f"{record['machine']}; ranks: {ranks}\nin place, {record['config']['iterations']} iterations; `{command}`"


def draw_compare(record: Record, output: Path) -> None:
    """Draws seconds per step as bars, the speed-up over plain DDP written on each.

    Args:
        record: What `gradwire compare --json` writes.
        output: .png or .svg.
    """
    ran = sorted((each for each in record["results"] if each["seconds"] is not None), key=lambda each: -each["seconds"])
    texts = []
    for each in ran:
        text = f" {each['seconds']:.3g} s, {each['speed_up']:.2f}x"
        text += f", {each['nic_nbytes'] / 1e6:.3g} MB" if each["nic_nbytes"] is not None else ""
        texts.append(text + (f", error {each['error']:.0e}" if each["error"] is not None else ""))
    missing = [each["name"] for each in record["results"] if each["seconds"] is None]
    notes = [record["machine"]] + ([f"do not run here: {', '.join(missing)}"] if missing else [])
    _bars([each["name"] for each in ran], [each["seconds"] for each in ran], texts, record["title"], output,
          "seconds per training step, lower is better\n(beside the bars: speed-up over plain DDP, bytes on the busiest "
          "network card, relative error of the gradients)",
          notes)


def draw_hook_speed(record: Record, output: Path) -> None:
    """Draws seconds for one bucket on each cluster as bars, from `hook_speed --json`."""
    rows = [each for each in record["results"] if each["name"] != "gloo all_reduce"][::-1]
    texts = [f" {each['seconds']:.3g} s, {each['speed_up']:.2f}x, {each['limit_share']:.0%} of the link's limit"
             for each in rows]
    title = f"one bucket of {record['megabytes']:g} MB through the DDP hook, links of {record['nic']}"
    _bars([f"{each['case']}: {each['name']}" for each in rows], [each["seconds"] for each in rows], texts, title, output,
          "seconds, lower is better (speed-up over plain DDP on the same cluster)", [record["machine"]])


def _bars(names: list[str], values: list[float], texts: list[str], title: str, output: Path, axis: str,
          notes: Iterable[str]) -> None:
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.34 * len(names)), layout="constrained")
    colours = [OURS if "gradwire" in name else BASELINE if "plain DDP" in name else PEERS for name in names]
    axes.barh(names, values, color=colours, height=0.7)
    for position, (value, text) in enumerate(zip(values, texts, strict=True)):
        axes.text(value, position, text, va="center", fontsize=8)
    axes.set_xlim(0, 1.7 * max(values))
    axes.set_xlabel(axis, fontsize=9)
    axes.set_title(_wrapped(title, 100), fontsize=10, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    legend = "green: gradwire, red: plain DDP, grey: other peers"
    figure.text(0.01, -0.02, "\n".join([*(_wrapped(note, 130) for note in notes), legend]), fontsize=8,
                color="#555555", va="top")
    figure.savefig(output, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def _wrapped(text: str, width: int) -> str:
    import textwrap
    return textwrap.fill(text, width)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(prog="gradwire plot", description="Draws what bench, compare and hook_speed measured.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=".png or .svg (default: beside the first file)")
    return parser


def read(file: Path) -> Record:
    """One file.

    Raises:
        ValueError: It is missing, or none of ours.
    """
    try:
        record: Record = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"`FILE.json` is {file}: {error.strerror}; wanted what `gradwire bench -J` wrote") from None
    except ValueError as error:
        raise ValueError(f"`FILE.json` {file} is no JSON: {error}") from None
    if not isinstance(record, dict) or not (record.get("kind") in ("compare", "hook_speed") or "blocks" in record):
        raise ValueError(f"`FILE.json` {file} is none of gradwire's; wanted the output of `gradwire bench -J`, `gradwire "
                         "compare --json` or `hook_speed --json`")
    return record


def draw(files: list[Path], output: Path | None) -> list[Path]:
    """Draws all files; returns the pictures.

    Raises:
        ValueError: A file is none of ours, or files of different kinds are mixed.
        RuntimeError: matplotlib is not installed.
    """
    target = output or files[0].with_suffix(".png")
    if target.suffix not in (".png", ".svg"):
        raise ValueError(f"`--output` is {target}; wanted a name that ends in .png or .svg")
    records = [read(file) for file in files]
    kinds = {record.get("kind", "bench") for record in records}
    if kinds == {"bench"}:
        collectives = {row["experiment_name"] for record in records for row in record["results"]}
        if len(collectives) > 1:
            raise ValueError(f"`FILE.json`: found {', '.join(sorted(collectives))}; wanted files of one collective")
        return draw_sizes(records, target)
    if len(records) > 1:
        raise ValueError(f"`FILE.json`: found {len(records)} files of {', '.join(sorted(kinds))}; wanted one such file, or "
                         "several of bench")
    (draw_compare if kinds == {"compare"} else draw_hook_speed)(records[0], target)
    return [target]


def main(argv: list[str]) -> int:
    """Draws and prints the names of the pictures; returns the exit status.

    Args:
        argv: Files and options.
    """
    options = build_parser().parse_args(argv)
    try:
        for picture in draw(options.files, options.output):
            print(picture)
    except (ValueError, RuntimeError) as error:
        print(f"gradwire plot: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
