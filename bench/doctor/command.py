"""`gradwire doctor` finds out why a job on several nodes is slow, and says what to type.

    torchrun --nnodes 2 --nproc-per-node 8 ... -m gradwire doctor [--gradient-mb 350]

Start it as you start your script: by torchrun, mpirun, srun, or in pods with RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. Without a launcher it examines this machine only.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from gradwire.bench.arguments import MOST_SECONDS, CommandParser, check_number, check_output
from gradwire.bench.doctor.alone import examine_alone
from gradwire.bench.doctor.arrival import StartNotice
from gradwire.bench.doctor.checks import diagnose
from gradwire.bench.doctor.facts import Diagnosis, JobFacts
from gradwire.bench.doctor.picture import svg
from gradwire.bench.doctor.show import as_record, print_report
from gradwire.bench.doctor.wanted import Wanted, left_behind
from gradwire.bench.emulation.rate import parse_rate
from gradwire.bench.nccl_tests.start import Start, find_start, speaks
from gradwire.bench.terminal import (
    STDOUT,
    CleanConsole,
    StatusLine,
    add_json_option,
    complain,
    fitting_width,
    write_json,
    writing,
)
from gradwire.comms.bootstrap.requirement import require_torch
from gradwire.comms.boundary.files import replace_text
from gradwire.comms.environment import launcher_variables
from gradwire.topology.printable import printable

PIPE_WIDTH = 120
"""Columns of the report if stdout is no terminal."""
NOTHING, FINDINGS, BAD_USE = 0, 1, 2
"""Exit statuses: nothing was found, something was found, the command was used wrongly."""
LEAST_GRADIENT_MB, MOST_GRADIENT_MB = 1e-6, 1e9
"""Bounds of `--gradient-mb`: one byte to a petabyte."""
LEAST_STEP_SECONDS = 1e-6
LEAST_SECONDS = 5.0
"""Lower bound of `--seconds`: shorter transfers measure noise."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's options."""
    options = CommandParser(
        prog="gradwire doctor",
        description="Finds out why a multi-node job is slow, what it costs and what to type. Start it as you start "
        "your script, on all nodes; it takes about a minute and changes nothing.",
        epilog="exit status: 0 nothing found, 1 something found, 2 bad use; if --script fails, its status.",
    )
    options.add_argument(
        "--gradient-mb", type=float, metavar="MB", help="size of all gradients, in 10^6 bytes (default: 100)"
    )
    options.add_argument("--step-seconds", type=float, metavar="S", help="length of a training step on these nodes")
    options.add_argument("--link", metavar="RATE", help="expected rate of a link, 25gbit, if the NIC does not say")
    options.add_argument(
        "--seconds", type=float, default=45.0, metavar="S", help="approximate time to measure, at least 5 (default: 45)"
    )
    options.add_argument("--svg", type=Path, metavar="FILE", help="draw the rates between all nodes")
    add_json_option(options)
    options.add_argument(
        "--script",
        "--run",  # its first name, which torchrun takes for an option of its own and refuses
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="run your script for a few steps and measure its gradients and step time; at most a minute more; "
        "everything after --script is the script's",
    )
    return options


def main(argv: list[str]) -> int:
    """Runs `gradwire doctor` as one rank of a job, or on this machine alone; rank 0 prints the report.

    If a thread still waits in gloo's connect, the process ends here, by `os._exit`.

    Args:
        argv: Words of the command line after `doctor`.

    Returns:
        The exit status: 0 if nothing was found; 1 if something was, or the examination failed; 2 for bad use, or if the
        report cannot be written. If the script of `--script` failed, its status. Ranks other than 0 return 0 unless
        they fail themselves.
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
            complain("doctor", error)
        return BAD_USE
    status_number = _examined(options, wanted, start, status)
    if left_behind:  # a thread in gloo's connect cannot be stopped, and would crash the interpreter's own end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status_number)
    return status_number


def _examined(options: argparse.Namespace, wanted: Wanted, start: Start | None, status: StatusLine) -> int:
    """Examines the job or this machine, and reports on rank 0; returns the exit status.

    Args:
        options: Options of the command line.
        wanted: The same options as the examination takes them.
        start: Rank, size and store address of this process; None to examine this machine alone.
        status: Line of progress, which is erased before the report.
    """
    began = time.monotonic()
    try:
        facts = examine_alone(wanted) if start is None else _job(start, wanted)
    except (RuntimeError, ImportError) as error:
        status.clear()
        rank = 0 if start is None else start.rank
        complain("doctor", f"rank {rank}: {error}")
        return FINDINGS
    status.clear()
    try:
        return NOTHING if facts is None else _report(facts, options, time.monotonic() - began)
    except RuntimeError as error:  # the disk is full
        complain("doctor", error)
        return BAD_USE


def _job(start: Start, wanted: Wanted) -> JobFacts | None:
    """Examines the job as one of its ranks, and tells the others of its start before it imports torch.

    Returns:
        Facts of the job on rank 0; None on the other ranks.

    Raises:
        RuntimeError: The rendezvous store cannot be reached, or a rank did not respond in time.
        ImportError: torch cannot be imported.
    """
    notice = StartNotice(start.address, start.port, start.rank)
    try:
        require_torch()  # which may take minutes
    finally:
        notice.end()
    from gradwire.bench.doctor.examine import examine_job, open_control  # here: one machine is looked at without torch

    try:
        control = open_control(start)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise RuntimeError(
            f"cannot reach the rendezvous store at {start.address}:{start.port} ({first}); check that rank 0 "
            "runs, that the name of its host is right, and that no firewall blocks the port"
        ) from error
    return examine_job(start, control, wanted)


def _wanted(options: argparse.Namespace, status: StatusLine) -> Wanted:
    """Checks the options, and converts them to bytes and seconds.

    Raises:
        ValueError: An option has a value that does not fit; the message names it.
    """
    check_number("--gradient-mb", options.gradient_mb, LEAST_GRADIENT_MB, MOST_GRADIENT_MB)
    check_number("--step-seconds", options.step_seconds, LEAST_STEP_SECONDS, MOST_SECONDS)
    check_number("--seconds", options.seconds, LEAST_SECONDS, MOST_SECONDS)
    script = tuple(options.script or ())
    if options.script is not None and not script:
        raise ValueError("`--script`: found nothing after it, wanted a script, for example --script train.py")
    if script and not _is_file(script[0]):
        raise ValueError(
            f"`--script`: there is no file {script[0]}; wanted a Python script, and its arguments after it"
        )
    check_output("--svg", options.svg)
    check_output("--json", options.json)
    return Wanted(
        gradient_nbytes=None if options.gradient_mb is None else int(options.gradient_mb * 1e6),
        step_seconds=options.step_seconds,
        link_bytes_per_second=None if options.link is None else parse_rate(options.link, "--link") / 8,
        script=script,
        seconds=options.seconds,
        show_progress=status.show,
    )


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # a name that is too long, or holds NUL
        return False


def _report(facts: JobFacts, options: argparse.Namespace, took_seconds: float) -> int:
    """Prints the report and writes the files of `--svg` and `--json`; returns the exit status."""
    found: list[Diagnosis] = diagnose(facts)
    status = facts.script_status or (NOTHING if all(each.remark for each in found) else FINDINGS)
    if options.json != STDOUT:
        console = CleanConsole(highlight=False, emoji=False, width=fitting_width(PIPE_WIDTH))
        print_report(facts, found, console, took_seconds)
    if options.svg is not None:
        if facts.pairs:
            with writing("--svg", options.svg):
                replace_text(options.svg, svg(facts), lasting=False)
            print(printable(f"wrote {options.svg}"), file=sys.stderr)
        else:
            complain("doctor", f"`--svg` {options.svg} was not written: no link was measured")
    write_json(options.json, as_record(facts, found, status, took_seconds))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
