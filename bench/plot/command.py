"""`gradwire plot FILE.json...`: pictures of what `bench -J`, `compare --json` and `hook_speed --json` wrote.

Files of `bench` become two pictures, bus bandwidth over size and time over size, one line for each file and block; a
file of `compare` or `hook_speed` becomes bars of seconds with the speed-up written on them.
"""

import argparse
import json
import sys
from pathlib import Path

from gradwire.bench.plot.bars import draw_compare, draw_hook_speed
from gradwire.bench.plot.sizes import draw_sizes
from gradwire.bench.plot.style import PlotRecord
from gradwire.bench.terminal import STDOUT, working, write_json


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="gradwire plot", description="Draws what bench, compare and hook_speed measured."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=".png or .svg (default: beside the first file)"
    )
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
    if not isinstance(record, dict) or not (record.get("kind") in ("compare", "hook_speed") or "blocks" in record):
        raise ValueError(
            f"`FILE.json` {file} is none of gradwire's; wanted the output of `gradwire bench -J`, `gradwire "
            "compare --json` or `hook_speed --json`"
        )
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
    records = {file: read(file) for file in files}
    kinds = {record.get("kind", "bench") for record in records.values()}
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
            pictures = draw(options.files, options.output)
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
