"""`gradwire doctor`: two nodes are slower than one, and why.

    torchrun --nnodes 2 --nproc-per-node 8 ... -m gradwire doctor [--gradient-mb 350]

Starts as your script starts: torchrun, mpirun, srun, or any pod with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
Alone it looks at this machine only.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from rich.console import Console

from gradwire.bench.doctor.checks import diagnose
from gradwire.bench.doctor.examine import Wanted, examine_alone, examine_job, left_behind, open_control
from gradwire.bench.doctor.facts import Diagnosis, JobFacts
from gradwire.bench.doctor.picture import svg
from gradwire.bench.doctor.show import as_record, print_report
from gradwire.bench.emulation.rate import parse_rate
from gradwire.bench.nccl_tests.ranks import Start, find_start, speaks
from gradwire.bench.terminal import STDOUT, StatusLine, add_json_option, fitting_width, write_json
from gradwire.comms.config import launcher_variables

PIPE_WIDTH = 120
NOTHING, FINDINGS, BAD_USE = 0, 1, 2


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's options."""
    options = argparse.ArgumentParser(
        prog="gradwire doctor",
        description="Looks for what slows a job down, and says what it costs and what to type. Start it as you start "
        "your script, on all nodes; it takes about a minute and changes nothing.",
        epilog="exit status: 0 nothing found, 1 something found, 2 bad use. After --run all is the script's.",
    )
    options.add_argument(
        "--gradient-mb", type=float, metavar="MB", help="size of all gradients, in 10^6 bytes (default: 100)"
    )
    options.add_argument("--step-seconds", type=float, metavar="S", help="a step of your training, if you know it")
    options.add_argument(
        "--link", metavar="RATE", help="what a node's link should give, 25gbit, where its card does not say"
    )
    options.add_argument(
        "--seconds", type=float, default=45.0, metavar="S", help="how long to measure, about; at least 5 (default: 45)"
    )
    options.add_argument("--svg", type=Path, metavar="FILE", help="draw the rates between all nodes")
    add_json_option(options)
    options.add_argument(
        "--run",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="run your script for a few steps and measure its gradients and step time; at most a minute more",
    )
    return options


def main(argv: list[str]) -> int:
    """Runs `gradwire doctor` as one rank, or alone; rank 0 prints.

    Args:
        argv: Words after `doctor`.

    Returns:
        0 where nothing was found, 1 where something was, 2 for bad use; on the other ranks 0 or 2.
    """
    variables = launcher_variables()
    try:
        options = parser().parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    status = StatusLine(shown=speaks(variables))
    try:
        wanted = _wanted(options, status)
        start = find_start(variables)
        if start is not None and start.size == 1:
            start = None
    except (ValueError, RuntimeError) as error:
        if speaks(variables):
            print(f"gradwire doctor: {error}", file=sys.stderr)
        return BAD_USE
    status_number = _examined(options, wanted, start, status)
    if left_behind:  # a thread in gloo's connect cannot be stopped, and would crash the interpreter's own end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status_number)
    return status_number


def _examined(options: argparse.Namespace, wanted: Wanted, start: Start | None, status: StatusLine) -> int:
    """Examines and reports; the exit status."""
    began = time.monotonic()
    try:
        facts = examine_alone(wanted) if start is None else _job(start, wanted)
    except RuntimeError as error:
        status.clear()
        rank = 0 if start is None else start.rank
        print(f"gradwire doctor: rank {rank}: {error}", file=sys.stderr, flush=True)
        return FINDINGS
    status.clear()
    return NOTHING if facts is None else _report(facts, options, time.monotonic() - began)


def _job(start: Start, wanted: Wanted) -> JobFacts | None:
    try:
        control = open_control(start)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise RuntimeError(
            f"nobody serves the ranks at {start.address}:{start.port}: {first}; is the first node's name right, does "
            "it run, and does a firewall let this node through?"
        ) from error
    return examine_job(start, control, wanted)


def _wanted(options: argparse.Namespace, status: StatusLine) -> Wanted:
    for name in ("gradient_mb", "step_seconds"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ValueError(f"`--{name.replace('_', '-')}`: found {value:g}, wanted more than 0")
    if options.seconds < 5:
        raise ValueError(f"`--seconds`: found {options.seconds:g}, wanted 5 or more: less shows noise")
    script = tuple(options.run or ())
    if options.run is not None and not script:
        raise ValueError("`--run`: found nothing after it, wanted a script, for example --run train.py")
    if script and not Path(script[0]).is_file():
        raise ValueError(f"`--run`: there is no file {script[0]}; wanted a Python script, and its arguments after it")
    for name in ("svg", "json"):
        target = getattr(options, name)
        if target not in (None, STDOUT) and not target.absolute().parent.is_dir():
            raise ValueError(f"`--{name}`: the folder of {target} does not exist; make it first")
    return Wanted(
        gradient_nbytes=None if options.gradient_mb is None else int(options.gradient_mb * 1e6),
        step_seconds=options.step_seconds,
        link_bytes_per_second=None if options.link is None else parse_rate(options.link, "--link") / 8,
        script=script,
        seconds=options.seconds,
        say=status.show,
    )


def _report(facts: JobFacts, options: argparse.Namespace, took_seconds: float) -> int:
    found: list[Diagnosis] = diagnose(facts)
    status = FINDINGS if found else NOTHING
    if options.json != STDOUT:
        console = Console(highlight=False, emoji=False, width=fitting_width(PIPE_WIDTH))
        print_report(facts, found, console, took_seconds)
    if options.svg is not None:
        if facts.pairs:
            options.svg.write_text(svg(facts), encoding="utf-8")
            print(f"wrote {options.svg}", file=sys.stderr)
        else:
            print(f"gradwire doctor: `--svg` {options.svg} was not written: no link was measured", file=sys.stderr)
    write_json(options.json, as_record(facts, found, status, took_seconds))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
