"""`gradwire gdr-check`: is GPUDirect RDMA possible, configured, in use? On this machine, or on every host of a job.

    torchrun --nnodes 2 --nproc-per-node 8 ... -m gradwire gdr-check [--prove]

In a job every host is checked, and the report names the one that differs from the others.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from gradwire.bench.arguments import CommandParser, check_output
from gradwire.bench.pipe import reader_may_leave
from gradwire.bench.terminal import CleanConsole, complain, working
from gradwire.cli.job import joined_job
from gradwire.comms.environment import local_rank, world_size
from gradwire.topology.gdr.capture import write_capture
from gradwire.topology.gdr.compare import differences
from gradwire.topology.gdr.host import Host
from gradwire.topology.gdr.job import JobRank, exchange_results, prove_together
from gradwire.topology.gdr.nccl import parse_version
from gradwire.topology.gdr.render import print_report, report_json
from gradwire.topology.gdr.runner import EXIT_FAIL, EXIT_PASS, EXIT_UNKNOWN, exit_code, run_checks
from gradwire.topology.gdr.sources import HostInputs, SourceError, opened_host, read_text
from gradwire.topology.printable import printable

JOB_OPTIONS = frozenset({"--json", "--prove", "--all-pairs"})
"""Options with which the whole job is checked. With any other option the first rank of each host runs by itself."""
PROVE_COMMAND = (sys.executable, "-P", "-m", "gradwire.cli.gdr_prove")
"""The all-reduce that `--prove` runs in a child process of every rank."""
_TIMEOUT = timedelta(minutes=10)  # a probe with two all-reduces may take six
_EPILOG = """exit code: 0 pass, 1 warning, 2 failure or bad usage, 3 not known (or nothing
to check). Nothing is changed on the machine; fixes are printed. As root more
can be seen (ACS)."""


def parser() -> CommandParser:
    """Returns a parser of the options of `gradwire gdr-check`."""
    parse = CommandParser(
        prog="gradwire gdr-check",
        usage="%(prog)s [options]\n       [--root DIR | --from FILE | --example | --compare JSON...]",
        description="Checks for each GPU and NIC whether GPUDirect RDMA is possible, configured\nand in use.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parse.add_mutually_exclusive_group()
    source.add_argument(
        "--root", type=Path, metavar="DIR", help="check a captured tree, or a host mounted in a container"
    )
    source.add_argument("--from", type=Path, dest="archive", metavar="FILE.tar.gz", help="check what --capture wrote")
    source.add_argument("--example", action="store_true", help="show the report of a healthy, made-up machine")
    source.add_argument(
        "--compare", type=Path, nargs="+", metavar="JSON", help="compare the --json of the hosts of a job"
    )
    parse.add_argument(
        "--capture", type=Path, metavar="FILE.tar.gz", help="write what the checks read, without secrets"
    )
    parse.add_argument("--lspci", type=Path, metavar="FILE", help="take the PCI tree from the output of lspci -vvvnn")
    parse.add_argument(
        "--env", type=Path, metavar="FILE", help="check these variables: output of env, or /proc/PID/environ"
    )
    parse.add_argument("--nccl-log", type=Path, metavar="FILE", help="read a log written with NCCL_DEBUG=INFO")
    parse.add_argument("--nccl-version", metavar="X.Y.Z", help="version of NCCL, if neither log nor wheel says")
    parse.add_argument("--nvlink", type=Path, metavar="FILE", help="read the output of nvidia-smi nvlink --status")
    parse.add_argument(
        "--perftest",
        type=Path,
        nargs=2,
        metavar=("HOST", "GPU"),
        help="read the outputs of ib_write_bw without and with --use_cuda",
    )
    parse.add_argument(
        "--prove", action="store_true", help="register GPU memory with the NICs; under torchrun also all-reduce"
    )
    parse.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parse.add_argument("--all-pairs", action="store_true", help="show every pair, not only each GPU's nearest NICs")
    return parse


def main(argv: list[str]) -> int:
    """Runs `gradwire gdr-check`.

    In a job all hosts are checked together, and rank 0 prints. With any option but those of `JOB_OPTIONS`, the first
    rank of each host checks or prints by itself, as outside a job, and the others do nothing.

    Args:
        argv: Words after `gdr-check`.

    Returns:
        Exit status: 0 pass, 1 warning, 2 failure or bad usage, 3 not known or nothing to check. With `--compare`: 0 if
        all hosts agree, 2 if any differs, 3 for a single host. 0 after `--help` and on ranks that do nothing. 2 also
        after an error of the job, such as ranks that cannot connect, which is printed.
    """
    try:
        if world_size() == 1:
            return check(argv)
        if not JOB_OPTIONS.issuperset(argv):
            return 0 if local_rank() else check(argv)
        with joined_job(_TIMEOUT) as job:
            return check(argv, job)
    except (ValueError, RuntimeError) as error:  # of the job; `check` says itself what it finds
        complain("gdr-check", error)
        return EXIT_FAIL


def check(argv: Sequence[str], job: JobRank | None = None) -> int:
    """Runs the checks, or the comparison of `--compare`, prints the result, and writes the file of `--capture`.

    The machine is that of this process unless `--root`, `--from` or `--example` gives another. An error in an option
    or in a file is printed on stderr, by each rank that has it, and is returned as 2.

    Args:
        argv: Words after `gdr-check`.
        job: This rank of a job whose hosts are checked together: every rank calls it, and rank 0 alone prints the
            report. None: no other rank takes part.

    Returns:
        Exit status: 0 pass, 1 warning, 2 failure or bad usage, 3 not known or nothing to check. With `--compare`: 0 if
        all hosts agree, 2 if any differs, 3 for a single host. 0 after `--help`.

    Raises:
        RuntimeError: The exchange with the other ranks of `job` has failed.
        ValueError: Another rank of `job` sent something else than its result.
    """
    parse = parser()
    try:
        options = parse.parse_naming(argv, "--from")
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        return _compare(options.compare, options.json) if options.compare else _check(options, job)
    except SourceError as error:
        complain("gdr-check", error)
        return EXIT_FAIL


def _check(options: argparse.Namespace, job: JobRank | None) -> int:
    inputs = HostInputs(
        root=options.root,
        archive=options.archive,
        lspci=options.lspci,
        env=options.env,
        nccl_log=options.nccl_log,
        nvlink=options.nvlink,
        perftest=tuple(options.perftest or ()),
        prove=options.prove,
        example=options.example,
    )
    if options.prove and not inputs.live:
        raise SourceError("`--prove` needs this machine itself: leave out --root, --from and --lspci")
    if options.nccl_version and parse_version(options.nccl_version) is None:
        raise SourceError(f"`--nccl-version` {options.nccl_version}: want three numbers, 2.27.3")
    prints = job is None or job.rank == 0
    try:
        check_output("--capture", options.capture)
    except ValueError as error:
        raise SourceError(str(error)) from error
    with ExitStack() as stack:
        what = "registering GPU memory with the NICs, all-reducing" if options.prove else "asking drivers and sysfs"
        with working(what, shown=prints) as say:
            host = stack.enter_context(opened_host(inputs, say))
            if options.nccl_version:
                host.facts = replace(host.facts, nccl_version=options.nccl_version)
            if job is not None and options.prove and host.log is None:
                prove_together(host, job, PROVE_COMMAND)
            if job is not None:
                exchange_results(host, job)
        return _report(host, options, prints=prints)


def _report(host: Host, options: argparse.Namespace, *, prints: bool) -> int:
    report = run_checks(host)
    status = exit_code(host, report, asked_for_proof=options.prove)
    if not prints:
        return status
    with reader_may_leave():
        if options.json:
            print(json.dumps(report_json(host, report, status), indent=1))
        else:
            print_report(host, report, CleanConsole(emoji=False), options.all_pairs)  # 0000:cd:00.0 is no disc
    if options.capture is not None:
        try:
            count = write_capture(options.capture, host)
        except OSError as error:
            raise SourceError(f"`--capture` {options.capture}: {error.strerror or error}") from error
        print(printable(f"wrote {count} files to {options.capture}"), file=sys.stderr)
    return status


def _compare(paths: list[Path], as_json: bool) -> int:
    """Prints the differences between the results of several hosts, for `--compare`.

    Args:
        paths: Files with the output of `gradwire gdr-check --json`, one for each host, named after it.
        as_json: Whether to print JSON instead of lines.

    Returns:
        Exit status: 0 if all hosts agree, 2 if any differs, 3 for a single host.

    Raises:
        SourceError: A file cannot be read, or holds something else.
    """
    results: list[dict[str, object]] = []
    for path in paths:
        try:
            result = json.loads(read_text(path, "--compare"))
        except (ValueError, RecursionError) as error:
            raise error if isinstance(error, SourceError) else SourceError(f"`--compare` {path}: no JSON") from error
        if not isinstance(result, dict) or not isinstance(result.get("checks"), list):
            raise SourceError(f"`--compare` {path}: want the output of `gradwire gdr-check --json`")
        results.append({"name": path.stem, **result})
    found = differences(results)
    agreed = f"{len(results)} hosts agree" if len(results) > 1 else "one host only: nothing to compare it with"
    shown = json.dumps({"hosts": [result["name"] for result in results], "differences": found}, indent=1)
    with reader_may_leave():
        print(shown if as_json else printable("\n".join(found)) or agreed)
    if len(results) < 2:
        return EXIT_UNKNOWN
    return EXIT_FAIL if found else EXIT_PASS
