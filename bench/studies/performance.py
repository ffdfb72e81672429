"""Measures every figure of docs/results/performance.md again, and keeps its machine, date and command.

    python -m gradwire.bench.studies.performance              # all sections; an hour on 2 quiet cores, needs root
    python -m gradwire.bench.studies.performance hook sweep   # these alone; the others keep their files
    python -m gradwire.bench.studies.tables                   # the page

A section is a command that writes JSON. What it found becomes CSV files in docs/results/data/performance, and a row of
`runs.csv` there. A section whose command fails keeps its files, and the failure is printed. Each run adds a row to
`history.csv`, with its commit and its ratios, and draws the picture of all rows.
"""

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.bench.machine import machine_line
from gradwire.bench.studies import history, hook_speed, shm_peers
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.bench.studies.tables.page import read, write

DATA = Path("docs/results/data/performance")
PICTURE = Path("docs/pictures/history.png")
RUNS_HEAD = ["section", "command", "what ran", "machine and date"]

Record = Mapping[str, Any]
"""Parsed JSON that a section's command wrote."""
Rows = list[list[str]]
Found = tuple[dict[str, Rows], str]
"""(name of a CSV file without suffix -> its rows, with the headings first; a sentence on what ran)."""


def compared(name: str) -> Callable[[Record], Found]:
    """Returns a function that turns the JSON of `gradwire compare` into the rows of one file called `name`."""

    def made(record: Record) -> Found:
        rows = [["compared", "s per step", "MB on NIC", "gradient error", "speed-up"]]
        ran = [one for one in record["results"] if one["seconds"] is not None]
        for one in sorted(ran, key=lambda each: float(each["seconds"])):
            nbytes = "-" if one["nic_nbytes"] is None else f"{one['nic_nbytes'] / 1e6:.2f}"
            error = "-" if one["error"] is None else f"{one['error']:.1e}"
            rows.append([one["name"], f"{one['seconds']:.3f}", nbytes, error, f"{one['speed_up']:.2f}x"])
        words = record["title"]
        if record["source"]:
            words += f". Step time: {record['source']}"
        if record["expected_plain_seconds"] is not None:
            words += f". Plain DDP by its waits and its link alone: {record['expected_plain_seconds']:.3f} s a step"
        refused = [one["name"] for one in record["results"] if one["seconds"] is None]
        return {name: rows}, words + (f". Does not run: {', '.join(refused)}" if refused else "")

    return made


def hook_speeds(record: Record) -> Found:
    """Turns the JSON of the study `hook_speed` into the rows of one file."""
    rows = [hook_speed.HookSpeedResult(**one).cells() for one in record["results"]]
    return {"hook": [list(hook_speed.COLUMNS), *rows]}, f"{record['megabytes']:g} MB, links of {record['nic']}"


def sweep(record: Record) -> Found:
    """Turns the JSON of `gradwire bench all_reduce` with several backends into a file: microseconds of each size."""
    backends = [block["facts"]["backend"] for block in record["blocks"]]
    times: dict[int, list[str]] = {}
    for row in record["results"]:
        times.setdefault(row["size"], []).extend(f"{row[half]['time']:.2f}" for half in ("out_of_place", "in_place"))
    head = ["bytes", *(f"{name}, {word}" for name in backends for word in ("us", "in place"))]
    config = record["config"]
    words = f"{config['warmup_iters']} warm-up, {config['iterations']} iterations"
    wrong = record["out_of_bounds"]["count"]
    return {
        "sweep": [head, *([str(size), *found] for size, found in times.items())]
    }, f"{words}; {wrong or 'nothing'} wrong"


def peers(record: Record) -> Found:
    """Turns the JSON of the study `shm_peers` into a file for each number of ranks.

    Cells are microseconds: the median of the rounds, and the best round in parentheses.
    """
    files = {}
    for ranks, rounds in record["seconds"].items():
        sizes = sorted({int(size) for results in rounds.values() for result in results for size in result})
        rows = [["size", *rounds]]
        for size in sizes:
            cells = (shm_peers.cell([result[str(size)] for result in results]) for results in rounds.values())
            rows.append([shm_peers.size_name(size), *cells])
        files[f"peers_{ranks}"] = rows
    count = max(len(results) for rounds in record["seconds"].values() for results in rounds.values())
    return files, f"{count} rounds in turns"


def kernels(record: Record) -> Found:
    """Turns the JSON of `gradwire bench kernels` into the rows of one file."""
    rows = [["kernel", "bytes", "ms", "GB/s", "of a copy", "torch ms", "vs torch"]]
    for one in record["results"]:
        took = f"{one['seconds'] * 1e3:.2f}", f"{one['bytes_per_second'] / 1e9:.1f}", f"{one['of_floor']:.2f}"
        beside = f"{one['composed_seconds'] * 1e3:.2f}", f"{one['speedup']:.1f}x"
        rows.append([one["kernel"], f"{one['nbytes']:,}", *took, *beside])
    return {"kernels": rows}, "25 MiB of float32, one thread"


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the page, with the command that measures it.

    Attributes:
        name: Name of the section on the command line.
        command: Words after `python -m`; `measure` adds the file for the command's JSON.
        made: Function that turns the command's JSON into the rows of CSV files.
    """

    name: str
    command: tuple[str, ...]
    made: Callable[[Record], Found]


def _compare(name: str, *words: str) -> Section:
    return Section(name, ("gradwire", "compare", *words), compared(name))


_SIZES = ("-b", "8", "-e", "64M", "-f", "8")
_ALONE = ("--megabytes", "16", "--rounds", "60", "--only", "gradwire flat")

SECTIONS = (
    Section(
        "hook",
        ("gradwire.bench.studies.hook_speed", "2x2", "2x4", "4x2", "4x4", "3+1", "2x2 round-robin"),
        hook_speeds,
    ),
    _compare("overhead", "--nodes", "1", "--ranks-per-node", "1", *_ALONE),
    _compare("one_node", "--nodes", "1", "--ranks-per-node", "2", *_ALONE),
    Section(
        "sweep",
        ("gradwire", "bench", "all_reduce", *_SIZES, "-g", "2", "--backend", "gradwire,shm,gloo"),
        sweep,
    ),
    _compare("compare", "--megabytes", "16", "--plot", "docs/pictures/speedup.png"),
    _compare("swin_2x8", "--replay", "swin_t", "--nodes", "2", "--stream", "5gbit"),
    _compare("swin_4x8", "--replay", "swin_t", "--stream", "5gbit"),
    _compare("resnet50", "--replay", "resnet50"),
    _compare("bert", "--replay", "bert_base", "--only", "hier,onebit"),
    _compare("vgg16", "--replay", "vgg16", "--nodes", "2"),
    Section("peers", ("gradwire.bench.studies.shm_peers",), peers),
    Section("kernels", ("gradwire", "bench", "kernels"), kernels),
)


def measure(section: Section, timeout_seconds: float, extra: list[str]) -> Record | None:
    """Runs a section's command and returns its JSON.

    Args:
        section: Section to measure.
        timeout_seconds: Time limit of the command.
        extra: Further words of the command line.

    Returns:
        The parsed JSON; None if the command failed, wrote no file or took too long, which stderr then says.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        # Only nccl-tests' table has a flag of its own for a file of JSON, which may not be there yet.
        target = ["-J", str(file)] if section.name == "sweep" else ["--json", str(file)]
        words = [sys.executable, "-m", *section.command, *extra, *target]
        print(f"{section.name}: {shlex.join(words[1:])}", file=sys.stderr, flush=True)
        try:
            status = subprocess.run(words, stdout=sys.stderr, timeout=timeout_seconds, check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"{section.name}: took longer than {timeout_seconds:g} s; its old files stay", file=sys.stderr)
            return None
        if status or not file.exists():
            print(f"{section.name}: status {status}; its old files stay", file=sys.stderr)
            return None
        found: Record = json.loads(file.read_text())
        return found


def keep(section: Section, record: Record, extra: list[str], folder: Path) -> None:
    """Writes the CSV files of a section, and replaces its row of `runs.csv`.

    Args:
        section: Section that was measured.
        record: JSON that its command wrote.
        extra: Further words of the command line, for the row.
        folder: Folder of the files; made if it does not exist.
    """
    files, words = section.made(record)
    for name, rows in files.items():
        write(folder / f"{name}.csv", rows)
    runs = folder / "runs.csv"
    rows = read(runs)[1:] if runs.exists() else []
    row = [section.name, f"`python -m {shlex.join([*section.command, *extra])}`", words, machine_line()]
    order = [each.name for each in SECTIONS]
    rows = [*(each for each in rows if each[0] != section.name), row]
    write(runs, [RUNS_HEAD, *sorted(rows, key=lambda each: order.index(each[0]) if each[0] in order else len(order))])


def build_parser() -> StudyParser:
    """Returns the parser of the command line."""
    parser = StudyParser("performance", __doc__)
    parser.add_names("section", [one.name for one in SECTIONS])
    parser.add_argument("--data", type=Path, default=DATA, metavar="FOLDER", help=f"for the files (default {DATA})")
    parser.add_argument(
        "--picture", type=Path, default=PICTURE, metavar="FILE", help=f"of the history (default {PICTURE})"
    )
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for one section (default 1200)")
    parser.add_argument("--mpi-venv", action="append", default=[], metavar="NAME=DIR", help="for the section `peers`")
    return parser


def main(argv: list[str]) -> int:
    """Measures and writes the files; returns 1 if a section failed, 2 for a bad word.

    Args:
        argv: Sections and options.
    """
    options = build_parser().parse_args(argv)
    failed, commit = False, history.commit_of(Path())
    measured = []
    for section in SECTIONS:
        if options.sections and section.name not in options.sections:
            continue
        extra = [word for venv in options.mpi_venv for word in ("--mpi-venv", venv)] if section.name == "peers" else []
        record = measure(section, options.timeout, extra)
        failed = failed or record is None
        if record is not None:  # at once: an hour's work is not lost to the last one
            keep(section, record, extra, options.data)
            measured.append(section.name)
    if any(ratio.section in measured for ratio in history.RATIOS):
        for words in history.add_run(options.data, measured, commit):
            print(f"slower than before: {words}", file=sys.stderr)
        try:
            history.draw(options.data, options.picture)
        except RuntimeError as error:
            print(f"no picture of the history: {error}", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
