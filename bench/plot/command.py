"""`gradwire plot FILE.json...`: draws what `bench -J`, `compare --json`, `make run` and `HookState.trace` wrote.

Files of `bench` become two pictures, bus bandwidth over size and time over size, with one line for each file and block.
A file of `compare` or `make run` becomes bars of seconds with the speed-up written on them. A trace becomes a picture
of one step of all ranks.
"""

import argparse
import json
import sys
from pathlib import Path

from gradwire.bench.arguments import CommandParser, check_output, check_picture, read_input
from gradwire.bench.pipe import reader_may_leave
from gradwire.bench.plot.bars import draw_compare, draw_training
from gradwire.bench.plot.sizes import draw_sizes
from gradwire.bench.plot.style import PlotRecord
from gradwire.bench.plot.timeline import draw_timeline, is_trace
from gradwire.bench.terminal import STDOUT, complain, working, write_json, writing
from gradwire.topology.printable import printable

_MOST_NBYTES = 1 << 28
"""Most bytes of a file; a trace of 20 steps on 64 ranks has some 20 MB."""


_DRAWN = {"compare": draw_compare, "main_job": draw_training}
"""Kind of a file that is drawn by itself -> function that draws it."""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog="gradwire plot", description="Draws what bench, compare and make run measured, or a step of a trace."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="file to draw")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="picture, .png or .svg (default: next to the first file)"
    )
    parser.add_argument("--step", type=int, metavar="N", help="step of a trace (default: the one of median length)")
    parser.add_argument("--json", action="store_true", help="print the names of the pictures as JSON")
    return parser


def read(file: Path) -> PlotRecord:
    """Reads one JSON file and checks that gradwire wrote it.

    Raises:
        ValueError: The file is missing, or gradwire did not write it.
    """
    text = read_input("FILE.json", file, _MOST_NBYTES)
    try:
        record: PlotRecord = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`FILE.json` {file} is no JSON: {error}") from None
    kind = str(record.get("kind", "bench")) if isinstance(record, dict) else None
    ours = kind in _DRAWN or (kind == "bench" and ("blocks" in record or is_trace(record)))
    if not ours:
        raise ValueError(
            f"`FILE.json` {file} is none of gradwire's; wanted the output of `gradwire bench -J`, `gradwire "
            "compare --json`, `make run` with `--json` or `HookState.trace`"
        )
    return record


def draw(files: list[Path], output: Path | None, step: int | None = None) -> list[Path]:
    """Draws all files and returns the paths of the pictures.

    Args:
        files: JSON files of one kind.
        output: Picture to write, .png or .svg; None takes the first file's name with .png.
        step: Number of the step of a trace; None takes the one of median length.

    Raises:
        ValueError: A file was not written by gradwire, or files of different kinds are mixed.
        RuntimeError: matplotlib is not installed.
    """
    target = output or files[0].with_suffix(".png")
    check_picture("--output", target)
    check_output("--output", target)
    records = {file: read(file) for file in files}
    try:
        with writing("--output", target):
            return _draw(records, target, step)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"`FILE.json` {', '.join(map(str, files))}: {type(error).__name__}: {error}; wanted files as "
            "gradwire wrote them"
        ) from error


def _draw(records: dict[Path, PlotRecord], target: Path, step: int | None) -> list[Path]:
    kinds = {"trace" if is_trace(record) else record.get("kind", "bench") for record in records.values()}
    if step is not None and kinds != {"trace"}:
        raise ValueError(f"`--step` is {step}, but there is no trace to take it from; leave it out")
    if kinds == {"bench"}:
        collectives = {row["experiment_name"] for record in records.values() for row in record["results"]}
        if len(collectives) > 1:
            raise ValueError(f"`FILE.json`: found {', '.join(sorted(collectives))}; wanted files of one collective")
        return draw_sizes(records, target)
    if len(records) > 1:
        raise ValueError(
            f"`FILE.json`: found {len(records)} files of {', '.join(sorted(kinds))}; wanted one such file, or "
            "several of bench"
        )
    first = next(iter(records.values()))
    if kinds == {"trace"}:
        draw_timeline(first, target, step)
        return [target]
    _DRAWN[kinds.pop()](first, target)
    return [target]


def main(argv: list[str]) -> int:
    """Draws and prints the names of the pictures; returns the exit status: 0, or 2 if a picture cannot be drawn.

    Args:
        argv: Words after `plot`: files and options.
    """
    options = build_parser().parse_args(argv)
    try:
        with working("drawing"):
            pictures = draw(options.files, options.output, options.step)
        if options.json:
            write_json(STDOUT, {"pictures": [str(picture) for picture in pictures]})
        else:
            with reader_may_leave():
                print(*(printable(str(picture)) for picture in pictures), sep="\n")
    except (ValueError, RuntimeError) as error:
        complain("plot", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
