r"""Measures whether training under a compressor reaches plain DDP's quality, and how soon.

    python -m gradwire.bench.studies.convergence quality --json runs.json   # every task, method and seed; an hour
    python -m gradwire.bench.studies.convergence speed --json runs.json     # seconds per step on emulated links; root
    python -m gradwire.bench.studies.convergence show --json runs.json \
        --data docs/results/data/convergence --draw docs/pictures/convergence

All of it goes into one file. Runs that are in it already are not repeated, so that a stopped measurement goes on.
"""

import argparse
import sys
from pathlib import Path

from gradwire.bench.arguments import add_import_option, import_modules
from gradwire.bench.emulation.signals import clean_end
from gradwire.bench.studies.convergence.record import Record
from gradwire.bench.studies.convergence.show import draw, sharded_tables, tables, untrained
from gradwire.bench.studies.convergence.speed import LINKS, measure
from gradwire.bench.studies.convergence.tasks import TASKS
from gradwire.bench.studies.convergence.training import METHODS, method_of, train
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.bench.studies.tables.page import markdown, write

SEEDS = (0, 1, 2)


def measure_quality(record: Record, options: argparse.Namespace) -> None:
    """Runs the trainings that the record does not hold yet; every method is trained once before any is trained twice.

    Args:
        record: Record that each run is added to when it ends, in its file too.
        options: Parsed options of the command line.
    """
    tasks = [TASKS[name]() for name in options.task or TASKS]
    pairs = [
        (task, method_of(task, word))
        for task in tasks
        for word in options.method or [method.name for method in METHODS[task.facts.optimizer]]
    ]
    missing = [
        (seed, task, method)
        for seed in options.seed or SEEDS
        for task, method in pairs
        if not record.has_run(task.facts.name, method.name, seed)
    ]
    for seed, task, method in missing:
        task.load()
        run = train(task, method, seed)
        record.add_run(run)
        print(f"{task.facts.name}, {method.name}, seed {seed}: {run.final:.3f} {task.facts.quality}", flush=True)


def measure_speed(record: Record, options: argparse.Namespace) -> None:
    """Times a step of every method on every link that the record does not hold yet.

    Args:
        record: Record that the timings are added to, in its file too.
        options: Parsed options of the command line.
    """
    for name in options.task or TASKS:
        for share in LINKS:
            if record.speed_of(name, share) is None:
                speed = measure(TASKS[name](), share, record.rate_of_half(name))
                record.add_speed(speed)
                print(
                    f"{name}, {speed.nic}: "
                    + ", ".join(f"{timed.method} {timed.seconds:.3f} s" for timed in speed.steps),
                    flush=True,
                )


def build_parser() -> StudyParser:
    """Returns the parser of the command line."""
    parser = StudyParser("convergence", __doc__)
    parser.add_argument("what", choices=("quality", "speed", "show"))
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="holds all results; added to")
    parser.add_argument("--task", action="append", choices=TASKS, help="repeatable (default: all)")
    parser.add_argument(
        "--method",
        action="append",
        metavar="NAME",
        help="of the tables, or a compressor; repeatable (default: all of the task's)",
    )
    add_import_option(parser)
    parser.add_argument("--seed", action="append", type=int, help=f"repeatable (default: {SEEDS})")
    parser.add_argument("--draw", type=Path, metavar="NAME", help="with show: pictures NAME-TASK.png")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="with show: TASK.csv and others are written there")
    return parser


def main(argv: list[str]) -> int:
    """Measures or shows; returns 0, or 1 for a bad method, module or file, or a failed rank."""
    options = build_parser().parse_args(argv)
    try:
        with clean_end():
            import_modules(options.imports)
            record = Record(options.json)
            if options.what == "quality":
                measure_quality(record, options)
            elif options.what == "speed":
                measure_speed(record, options)
            else:
                for name, rows in (tables(record) | sharded_tables(record)).items():
                    print(name, markdown(rows), sep="\n\n", end="\n\n")
                    if options.data:
                        write(options.data / f"{name}.csv", rows)
                for task, missing in untrained(record).items():
                    print(f"{task}, not trained yet: {'; '.join(missing)}")
                print(f"Machine: {record.machine}")
                for picture in draw(record, options.draw) if options.draw else []:
                    print(picture)
    except (ValueError, RuntimeError) as error:
        print(f"convergence: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
