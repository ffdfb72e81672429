r"""Runs a list of trainings one after the other in the background, for docs/results/optimizers.md.

    nohup python -m gradwire.bench.studies.convergence.queue run --data FILE.jsonl --entries entries.txt &
    python -m gradwire.bench.studies.convergence.queue show --data FILE.jsonl --draw docs/pictures/optimizers.png

`python -m gradwire.bench.studies.tables` puts what docs/results/data/optimizers.jsonl holds into the page.

A line of the list is a task, a size, an optimizer, a compressor with its options, and seeds:

    text 0.5M muon waterfill4 0,1,2
    text 0.5M muon powersgd{"rank":16} 0
    text 10M adamw none 0 steps=8
    text 0.5M adamw accumulate{"batches":4} 0
    text 0.5M muon Outer{"nodes":4,"every":5,"fragments":5,"compressor":"waterfill2"} 0
    words 0.3M adam int8{"exact":"embedding.*,classifier.*"} 0

`none` is an exact sum, `accumulate` one for several batches, and `Outer` trains workers that exchange their models'
changes, in a process for each node. `nodes` is the number of nodes, of two ranks each (default 2); `exact` names the
parameters that are not compressed. Trainings that the data file has are skipped, so that a queue that was stopped goes
on; each result is appended as a line as soon as it is there. Trainings run in this process, on one thread, at the
lowest priority unless `--nice` sets another; a lock on the data file keeps a second queue from using it. The list is
read again after each training, so lines may be added to it meanwhile.
"""

import argparse
import datetime
import fcntl
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch

from gradwire.bench.machine import machine_line
from gradwire.bench.studies.convergence.alone import NODES, train_alone
from gradwire.bench.studies.convergence.optimizers import MUON
from gradwire.bench.studies.convergence.outer import UNSAID, JoinedTask, SlowLinkMethod
from gradwire.bench.studies.convergence.outer import train as train_units
from gradwire.bench.studies.convergence.results import (
    ACCUMULATE,
    ACCUMULATED_BEGIN,
    ACCUMULATED_END,
    BEGIN,
    END,
    EXACT,
    OF_ALL,
    OUTER,
    Entry,
    Result,
    accumulations,
    draw,
    missing,
    results_from,
    tables,
)
from gradwire.bench.studies.convergence.tasks import (
    IMAGE_SIZES,
    RANKS,
    TEXT_SIZES,
    BatchedTask,
    FashionTask,
    TextTask,
)
from gradwire.bench.studies.convergence.words import WORDS_SIZE, WordsTask
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.bench.studies.tables.page import put_between
from gradwire.compressors.registry import Option, options_of

LEAST_PRIORITY = 19
RANKS_OF_NODE = RANKS // NODES


def task_of(name: str, size: str, ranks: int = RANKS) -> BatchedTask:
    """Returns the task of this name and size for a number of ranks; its data are not loaded yet.

    Raises:
        ValueError: There is no such task or size.
    """
    if name == "text" and size in TEXT_SIZES:
        return TextTask(size=size)
    if name == "fashion" and size in IMAGE_SIZES:
        return FashionTask(ranks=ranks, size=size)
    if name == "words" and size == WORDS_SIZE:
        return WordsTask()
    raise ValueError(
        f"`{name} {size}` is no task; wanted text {' or '.join(TEXT_SIZES)}, fashion {' or '.join(IMAGE_SIZES)}, "
        f"or words {WORDS_SIZE}"
    )


def entries_from(text: str) -> list[Entry]:
    """Reads a list of trainings.

    Args:
        text: Lines in the form of the module's docstring; empty lines and those that begin with # are ignored.

    Raises:
        ValueError: A line has another form or an unknown name; the message has its number.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            found += _entries_of(words)
        except ValueError as error:
            raise ValueError(f"`--entries` line {number}: {error}") from error
    return found


def _entries_of(words: list[str]) -> list[Entry]:
    if len(words) not in (5, 6) or (len(words) == 6 and not words[5].startswith("steps=")):
        raise ValueError(f"found {' '.join(words)!r}; wanted TASK SIZE OPTIMIZER COMPRESSOR SEEDS [steps=N]")
    name, size, optimizer, method, seeds = words[:5]
    facts = task_of(name, size).facts
    if optimizer not in (MUON, facts.optimizer):
        raise ValueError(f"optimizer {optimizer!r}; {name} is trained with {facts.optimizer} or {MUON}")
    compressor, brace, rest = method.partition("{")
    options = json.loads(brace + rest) if brace else {}
    given = {key: value for key, value in options.items() if key not in OF_ALL}
    if compressor == ACCUMULATE:
        if set(options) - {"batches", "lr"} or "batches" not in options:
            raise ValueError(f"{method!r}; wanted {ACCUMULATE} with `batches`, and `lr` where it is not 1")
        if not isinstance(options["batches"], int) or options["batches"] < 1:
            raise ValueError(f"{method!r} has `batches` {options['batches']!r}; wanted a whole number, 1 or more")
    elif compressor == OUTER:
        if unknown := set(given) - {"every", "fragments", "delay", "compressor", "lr", "momentum", "warmup_steps"}:
            raise ValueError(f"{OUTER} has no option {', '.join(sorted(unknown))} here")
    elif unknown := set(given) - set(options_of(compressor)):
        raise ValueError(f"{compressor} has no option {', '.join(sorted(unknown))}")
    steps = int(words[5].removeprefix("steps=")) if len(words) == 6 else facts.steps
    return [
        Entry(
            task=name,
            size=size,
            optimizer=optimizer,
            compressor=compressor,
            options=options,
            seed=int(seed),
            steps=steps,
        )
        for seed in seeds.split(",")
    ]


def train(entry: Entry) -> Result:
    """Runs one training and returns its result: on the calling thread, or for `Outer` in a process for each node."""
    task = task_of(entry.task, entry.size, entry.nodes * RANKS_OF_NODE)
    task.load()
    began = _processor_seconds()
    options = {key: value for key, value in entry.options.items() if key not in OF_ALL}
    if entry.compressor == OUTER:
        curve, ratio = _units(task, options, entry)
    else:
        accumulates = entry.compressor == ACCUMULATE
        run = train_alone(
            task,
            None if accumulates or entry.compressor == EXACT else entry.compressor,
            {} if accumulates else options,
            entry.seed,
            entry.steps,
            optimizer=entry.optimizer,
            accumulate=int(cast(int, options["batches"])) if accumulates else 1,
            lr=float(cast(float, options.get("lr", 1.0))) if accumulates else 1.0,
            nodes=entry.nodes,
            exact=entry.exact,
        )
        curve, ratio = run.curve, run.ratio
    return Result(
        entry=entry,
        curve=curve,
        ratio=ratio,
        processor_seconds=round(_processor_seconds() - began, 1),
        date=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="minutes"),
        machine=machine_line(),
        load=os.getloadavg()[2],
    )


def _units(
    task: BatchedTask, options: Mapping[str, Option], entry: Entry
) -> tuple[tuple[tuple[int, float], ...], float]:
    """Trains with `Outer` on a process for each node.

    Returns:
        (curve of (steps, quality), bytes of a float32 all-reduce at every step over the bytes sent).
    """
    method = SlowLinkMethod(entry.method, UNSAID | dict(options))
    joined = JoinedTask(task, RANKS_OF_NODE)
    found = train_units(joined, method, entry.seed, [1] * entry.nodes, entry.steps, entry.optimizer)
    curve = cast("list[tuple[int, float]]", found["curve"])
    dense_bits = 32 * 2 * (entry.nodes - 1) / entry.nodes
    return tuple((step, quality) for step, quality in curve), dense_bits / float(cast(float, found["bits"]))


def _processor_seconds() -> float:
    """Returns the processor seconds of this process and of those that it has forked and waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def run_queue(entries: Path, data: Path, until: datetime.datetime | None = None, nice: int = LEAST_PRIORITY) -> None:
    """Runs the trainings of a list that have no result in a data file yet, until none is left.

    Args:
        entries: File with the list; read again after each training.
        data: File that results are appended to, a line each.
        until: Time after which no training begins; None sets no limit.
        nice: Minimum niceness of this process, 0 to 19; 19 is the lowest priority.

    Raises:
        ValueError: The list or the data file has an invalid line.
        RuntimeError: Another queue works on the data file.
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
    torch.set_num_threads(1)
    with data.open("a") as lines:
        try:
            fcntl.flock(lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(f"`--data` {data} is in use by another queue: let it go on, or end it") from error
        while todo := missing(entries_from(entries.read_text()), results_from(data)):
            if until is not None and datetime.datetime.now(tz=datetime.UTC) >= until:
                print(f"{len(todo)} trainings are left", flush=True)
                return
            result = train(todo[0])
            lines.write(json.dumps(asdict(result)) + "\n")
            lines.flush()
            print(f"{result.date} {result.entry}: {result.quality:.4f}, {len(todo) - 1} left", flush=True)


def with_tables(page: str, data: Path) -> str:
    """Returns a page with the tables of all results put in.

    Args:
        page: Text of the page in Markdown.
        data: File with a result on each line.

    Raises:
        ValueError: The page has no place for the tables, or a line of the file is invalid.
    """
    results = results_from(data)
    page = put_between(page, tables(results), BEGIN, END)
    found = accumulations(results)
    return put_between(page, found, ACCUMULATED_BEGIN, ACCUMULATED_END) if found else page


def _time_of_day(word: str) -> datetime.datetime:
    try:
        wanted = datetime.time.fromisoformat(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{word!r} is no time of day; wanted HH:MM, in UTC") from error
    return datetime.datetime.combine(datetime.datetime.now(tz=datetime.UTC).date(), wanted, datetime.UTC)


def build_parser() -> StudyParser:
    """Returns the parser of the command line."""
    parser = StudyParser("convergence.queue", __doc__)
    parser.add_argument("what", choices=("run", "show"))
    parser.add_argument("--data", type=Path, required=True, metavar="FILE.jsonl", help="a line for each result")
    parser.add_argument("--entries", type=Path, metavar="FILE", help="with run: the list of trainings")
    parser.add_argument("--until", type=_time_of_day, metavar="HH:MM", help="with run: begin none after it, in UTC")
    parser.add_argument(
        "--nice",
        type=int,
        choices=range(LEAST_PRIORITY + 1),
        default=LEAST_PRIORITY,
        metavar="0..19",
        help=f"with run: the priority, 19 being the least (default {LEAST_PRIORITY})",
    )
    parser.add_argument("--draw", type=Path, metavar="FILE.png", help="with show: the picture")
    return parser


def main(argv: list[str]) -> int:
    """Runs the queue, or prints the tables and draws the picture; returns 0, or 1 if a file or an entry is unusable."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.what == "run" and options.entries is None:
        parser.error("`--entries` is missing")
    try:
        if options.what == "run":
            run_queue(options.entries, options.data, options.until, options.nice)
        else:
            results = results_from(options.data)
            print(tables(results))
            if options.draw:
                draw(results, options.draw)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"queue: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
