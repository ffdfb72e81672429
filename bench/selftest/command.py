"""`gradwire selftest` checks that gradwire works on this machine's GPUs, and measures how fast its kernels are.

It compares kernels with their reference and their bandwidth with that of a copy, tries every call of NCCL, and runs
three short trainings, in under five minutes and without a checkout. Its JSON is meant for issues, also if nothing
failed.
"""

import argparse
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from gradwire.bench.arguments import MOST_SECONDS, CommandParser, check_memory, check_number, check_output
from gradwire.bench.emulation.signals import clean_end
from gradwire.bench.kernels.command import DEFAULT_NUMEL
from gradwire.bench.pipe import reader_may_leave
from gradwire.bench.selftest.report import WIDTH, as_record, exit_status, print_report
from gradwire.bench.selftest.run import MOST_RANKS, SelftestFindings, parts_of, run_parts
from gradwire.bench.terminal import STDOUT, CleanConsole, StatusLine, add_json_option, complain, write_json

BAD_USE = 2
DEFAULT_CHECKED = 1_000_003
"""Default of `--numel`: more elements than a small GPU's thread blocks process at a time, and a prime, so that the last
block is not full."""
MOST_NUMEL = 2**28
"""Upper limit of elements: one GiB of float32, and some calls need ten times as much."""
DEFAULT_SECONDS = 300.0
HOUR_NEEDS = (
    "`--hour` runs tests and studies of gradwire's sources, and there is no {} here; wanted a checkout: type "
    "`pip install -e . pytest hypothesis` in its folder, then this command. Without `--hour` nothing more is needed"
)
LEAST_SECONDS = 20.0
"""Lower limit of `--seconds`: in less, no part would run."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's options."""
    options = CommandParser(
        prog="gradwire selftest",
        description="Tries on this machine what gradwire does on GPUs: every kernel against its reference and a copy, "
        "every call of NCCL, three short trainings. Without a GPU it tries the same on the CPU, over gloo, and says "
        "what was not run. Paste what --json prints into an issue.",
        epilog="exit status: 0 nothing failed, 1 something failed, 2 bad use",
    )
    options.add_argument(
        "--device", choices=("cpu", "cuda"), help="device to check (default: cuda if torch sees a GPU, else cpu)"
    )
    options.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="processes of the collectives and trainings (default: one a GPU, at least 2, at most 8); "
        "where there are fewer GPUs they share them",
    )
    options.add_argument(
        "--seconds", type=float, default=DEFAULT_SECONDS, metavar="S", help="stop after this time (default: 300)"
    )
    options.add_argument(
        "--numel",
        type=int,
        default=DEFAULT_CHECKED,
        metavar="N",
        help=f"values in the largest input that a kernel is checked with (default: {DEFAULT_CHECKED})",
    )
    options.add_argument(
        "--bandwidth-numel",
        type=int,
        default=DEFAULT_NUMEL,
        metavar="N",
        help=f"values in the gradient that bandwidth is measured with; 0 measures none (default: {DEFAULT_NUMEL})",
    )
    options.add_argument(
        "--hour", action="store_true", help="run what never ran on a GPU; needs a checkout and --json FILE"
    )
    add_json_option(options)
    return options


def main(argv: list[str]) -> int:
    """Runs `gradwire selftest`: starts the parts, and reports their results.

    Args:
        argv: Words of the command line after `selftest`.

    Returns:
        The exit status: 0 if no check failed, 1 if one did or no process can be started, 2 for bad use.
    """
    options = parser().parse_args(argv)
    if options.hour:
        if missing := _missing_for_the_hour():
            complain("selftest", HOUR_NEEDS.format(missing))
            return BAD_USE
        words = [sys.executable, "-m", "gradwire.bench.studies.gpu.hour", f"--json={options.json or ''}"]
        return subprocess.run(words, check=False).returncode
    began, status = time.monotonic(), StatusLine()
    try:
        device = _device(options)
        _check(options)
        gpus = torch.cuda.device_count() if device == "cuda" else 0
        ranks = options.ranks or min(MOST_RANKS, max(2, gpus))
        with clean_end():
            parts = parts_of(device, gpus, ranks, options.numel, options.bandwidth_numel)
            findings = run_parts(parts, options.seconds, status.show)
    except ValueError as error:
        complain("selftest", error)
        return BAD_USE
    except RuntimeError as error:
        status.clear()
        complain("selftest", error)
        return 1
    finally:
        status.clear()
    if device == "cpu":
        findings.notes.append(f"CUDA kernels, their bandwidth, NCCL: {_why_no_gpu(options.device)}")
    return _report(findings, options, time.monotonic() - began)


def _missing_for_the_hour() -> str:
    """Returns what `--hour` needs and this installation lacks, in words; empty if everything is there."""
    studies = Path(__file__).resolve().parents[1] / "studies" / "gpu"
    lacking = ["checkout"] * (not studies.is_dir())
    return " and no ".join([*lacking, *(name for name in ("pytest", "hypothesis") if find_spec(name) is None)])


def _device(options: argparse.Namespace) -> str:
    """Returns the device to use, `cpu` or `cuda`: that of `--device`, else `cuda` if torch sees a GPU.

    Raises:
        ValueError: `--device cuda` was given, and torch sees no GPU.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"`--device cuda`: {_why_no_gpu(None)}")
    return str(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _why_no_gpu(asked: str | None) -> str:
    if asked == "cpu":
        return "`--device cpu` was given"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    return f"torch {torch.__version__} sees no CUDA device: does `nvidia-smi` list one, and is its driver new enough?"


def _check(options: argparse.Namespace) -> None:
    """Checks that the options have sensible values, and that the file of `--json` can be written.

    Raises:
        ValueError: A value does not fit; the message names it.
    """
    check_number("--ranks", options.ranks, 1, MOST_RANKS)
    check_number("--seconds", options.seconds, LEAST_SECONDS, MOST_SECONDS)
    check_number("--numel", options.numel, 1, MOST_NUMEL)
    if options.bandwidth_numel:
        check_number("--bandwidth-numel", options.bandwidth_numel, 1024, MOST_NUMEL)
    check_memory("--numel", 80 * options.numel, "the tensors")
    check_output("--json", options.json)


def _report(findings: SelftestFindings, options: argparse.Namespace, took_seconds: float) -> int:
    if options.json != STDOUT:
        print_report(findings, CleanConsole(highlight=False, emoji=False, width=WIDTH), took_seconds)
        if options.json is None:
            with reader_may_leave():
                print("For an issue: run it with --json FILE and paste that file.")
    try:
        write_json(options.json, as_record(findings, took_seconds))
    except RuntimeError as error:
        complain("selftest", error)
        return BAD_USE
    return exit_status(findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
