"""`gradwire plot FILE.json...`: pictures of what `bench -J`, `compare --json`, `hook_speed --json` and traces hold.

Files of `bench` become two pictures, bus bandwidth over size and time over size, one line for each file and block; a
file of `compare` or `hook_speed` becomes bars of seconds with the speed-up written on them. Of a trace that
`HookState.trace` wrote, one step of all ranks is drawn.
"""

import argparse
import json
import sys
from pathlib import Path

from gradwire.bench.plot.bars import draw_compare, draw_hook_speed
from gradwire.bench.plot.sizes import draw_sizes
from gradwire.bench.plot.style import PlotRecord
from gradwire.bench.plot.timeline import draw_timeline, is_trace
from gradwire.bench.terminal import STDOUT, working, write_json


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="gradwire plot", description="Draws what bench, compare and hook_speed measured, or a step of a trace."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=".png or .svg (default: beside the first file)"
    )
    parser.add_argument("--step", type=int, metavar="N", help="of a trace (default: the step of median length)")
    parser.add_argument("--json", action="store_true", help="print the names of the pictures as JSON")
    return parser


def read(file: Path) -> PlotRecord:
    """One file.

    Raises:
        ValueError: It is missing, or none of ours.
    """
    try:
        record: PlotRecord = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"`FILE.json` is {file}: {error.strerror}; wanted what `gradwire bench -J` wrote") from None
    except ValueError as error:
        raise ValueError(f"`FILE.json` {file} is no JSON: {error}") from None
    ours = isinstance(record, dict) and (
        record.get("kind") in ("compare", "hook_speed") or "blocks" in record or is_trace(record)
    )
    if not ours:
        raise ValueError(
            f"`FILE.json` {file} is none of gradwire's; wanted the output of `gradwire bench -J`, `gradwire "
            "compare --json`, `hook_speed --json` or `HookState.trace`"
        )
    return record


def draw(files: list[Path], output: Path | None, step: int | None = None) -> list[Path]:
    """Draws all files; returns the pictures.

    Args:
        files: Of one kind.
        output: .png or .svg; None takes the first file's name.
        step: Of a trace; None takes the one of median length.

    Raises:
        ValueError: A file is none of ours, or files of different kinds are mixed.
        RuntimeError: matplotlib is not installed.
    """
    target = output or files[0].with_suffix(".png")
    if target.suffix not in (".png", ".svg"):
        raise ValueError(f"`--output` is {target}; wanted a name that ends in .png or .svg")
    records = {file: read(file) for file in files}
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
    if kinds == {"trace"}:
        draw_timeline(records[files[0]], target, step)
        return [target]
    (draw_compare if kinds == {"compare"} else draw_hook_speed)(records[files[0]], target)
    return [target]


def main(argv: list[str]) -> int:
    """Draws and prints the names of the pictures; returns the exit status.

    Args:
        argv: Files and options.
    """
    options = build_parser().parse_args(argv)
    try:
        with working("drawing"):
            pictures = draw(options.files, options.output, options.step)
        if options.json:
            write_json(STDOUT, {"pictures": [str(picture) for picture in pictures]})
        else:
            print(*pictures, sep="\n")
    except (ValueError, RuntimeError) as error:
        print(f"gradwire plot: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
