"""Runs what has never run on a GPU, in the order in which it decides something: the first hour on a machine with GPUs.

    gradwire selftest --hour --json hour.json                               # in a checkout; the same as
    python -m gradwire.bench.studies.gpu.hour --json hour.json

Each step is a command that can be run by hand as well. If a step fails whose success all later ones take for granted
(kernels are right, sums are right), the hour ends: what is timed after that would mean nothing. How to read the JSON is
in docs/develop/run_on_a_gpu.md.

A device that copies less than any GPU (an emulated one, as the stand-in of the tests) is noticed before the first step:
there each step runs on its smallest inputs, and again on larger ones as long as those are foreseen to end within a
budget of time. The JSON says how large the inputs were; its figures mean nothing. Time decides sizes alone: a larger
input that does not end leaves the result of the smaller one. `--short` stops at the smallest inputs.
"""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gradwire.bench.arguments import check_output
from gradwire.bench.machine import machine_line
from gradwire.bench.selftest.checks import FAIL, PASS, SKIPPED
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.bench.terminal import write_json

CHECKOUT = Path(__file__).resolve().parents[3]
RESULT = "{result}"
"""Word of a command in whose place the path of its own JSON is put."""
NOT_THROUGH = "not through after"
NCCL_INFO = re.compile(r"\bNCCL INFO (.*)")
"""Report of NCCL, behind the host, process, thread and device that it begins with. Source: NCCL src/debug.cc."""
MOST_REPORTS = 500
"""Most of NCCL's reports that are kept of a step: those of one subsystem, or the begin of all."""
SLOW_DEVICE = (
    "This device copies {:.1f} GB/s, less than any GPU: it is emulated or slow. Each step begins with its smallest "
    "inputs and takes larger ones as long as they end soon; its figures mean nothing"
)
SHARES = (0.0, 1 / 256, 1 / 16, 1.0)
"""Shares of the full inputs and repetitions that a slow device is tried with; 0 is the least of each."""
BUDGET_SECONDS = 240.0
"""Time within which the next share must be foreseen to end on a slow device."""
SLOW_SECONDS = 3600.0
"""Longest time of a step there: only one that hangs is ended by it."""
SLOWEST_GPU = 40e9
"""Bytes per second that the slowest GPU copies in its memory: below it, the device is emulated or will not take the
full inputs. A GTX 1650 has 128 GB/s on paper, of which a copy uses half each way; one core copies 5 to 20 GB/s."""


@dataclass(frozen=True, slots=True)
class HourStep:
    """Describes one step of the hour.

    Attributes:
        name: Name of the step.
        words: Words of its command.
        decides: What is known if it passes.
        seconds: Longest time that it may take; 0 for a step that is described and not run, because it needs two
            machines.
        decisive: Whether the hour ends if it fails.
        gpus: Number of GPUs that it needs; 0 if one is enough, which the machine has.
        share: Share of the full inputs that its words ask for.
    """

    name: str
    words: Sequence[str]
    decides: str
    seconds: float = 900.0
    decisive: bool = False
    gpus: int = 0
    share: float = 1.0


def steps_of(gpus: int, *, share: float = 1.0, seconds: float = 900.0) -> list[HourStep]:
    """Returns the steps of the hour, in order.

    Args:
        gpus: Number of GPUs of this machine.
        share: Share of the full inputs and repetitions, of each no less than what its program takes.
        seconds: Longest time that a step may take.
    """

    def sized(full: int, least: int, multiple: int = 1) -> str:
        return str(max(least, int(full * share) // multiple * multiple))

    # Words of the commands.
    ranks = min(gpus, 8)
    checked = ("--ranks", str(max(2, ranks) if share == 1.0 else 2), "--numel", sized(1_000_003, 1100),
               "--bandwidth-numel", sized(25 << 18, 1024, 1024) if share else "0")  # fmt: skip
    run, tests = (sys.executable, "-m"), (sys.executable, "-m", "pytest", "-q", "-m", "gpu")
    sanitizer = ("compute-sanitizer", "--error-exitcode", "1", "--tool")
    edges = ("tests/csrc", "-k", "4097 or large_input")
    torchrun = (*run, "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m")
    nodes = "a" * (ranks - ranks // 2) + "b" * (ranks // 2)
    modes = ("--nodes", nodes, "--modes", "flat,hierarchical,hierarchical:int8")
    hooks = ("--hook", "plain", "--hook", "gradwire", "--hook", "gradwire:int8")
    train = ("gradwire.bench.train.train", "--device", "cuda", *hooks)
    largest = sized(128 << 20, 64 << 10)
    sizes = f"bench all_reduce -b 8 -e {largest} -f 2 -g {ranks} --backend gradwire,nccl".split()
    repeats = 2 if seconds == SLOW_SECONDS else 15  # not both size and repeats grow: the time of the next is foreseen
    kernels = f"gradwire bench kernels --device cuda --repeats {repeats} --json {RESULT} --numel".split()
    of_floor = "share of a copy's bandwidth: 0.9 at 25 MiB; at what one of eight ranks has of that, the launch decides"
    # Decisive steps first: if one fails, later figures mean nothing.
    steps = [
        HourStep("selftest",
                 (*run, "gradwire", "selftest", "--seconds", f"{seconds - 50:g}", *checked, "--json", RESULT),
                 "kernels load, launch and are right; NCCL takes every call and its sums are exact", decisive=True),
        HourStep("memcheck", (*sanitizer, "memcheck", *tests, *edges),
                 "no kernel leaves its tensors, and no wide access is misaligned", decisive=True),
        HourStep("racecheck", (*sanitizer, "racecheck", *tests, *edges),
                 "no kernel has a race in shared memory", decisive=True),
        HourStep("NCCL", (*tests, "tests/comms/transport/test_nccl.py"),
                 "order, group calls and closing are right on real NCCL", decisive=True),
        HourStep("lost rank", (*tests, "tests/comms/bootstrap/test_lost_rank_on_gpu.py"),
                 "a step that loses a rank ends in NaN or an error, never in one rank's own gradients",
                 decisive=True, gpus=2),
        HourStep("host cost", (*torchrun, "gradwire.bench.studies.gpu.host_ratio", *modes, "--rounds", sized(15, 2)),
                 "the host keeps up: flat at most 1.10 of torch's own hook, hierarchical at most 2.5", gpus=2),
        HourStep("kernels", (*run, *kernels, sized(25 << 18, 4096, 1024)), of_floor),
        HourStep("kernels, one rank of eight", (*run, *kernels, sized(800 << 10, 4096, 1024)), of_floor),
        HourStep("all_reduce",
                 ("env", "NCCL_DEBUG=INFO", "NCCL_DEBUG_SUBSYS=TUNING", *run, "gradwire", *sizes, "-J", RESULT),
                 "NCCL takes the same algorithm for both (NVLS with an NVSwitch), bus bandwidth within 3 %", gpus=2),
        HourStep("trainings", (*torchrun, *train, "--steps", sized(300, 8), "--json", RESULT),
                 "the exact hook takes plain DDP's time within 1 %", gpus=2),
        HourStep("trainings, two nodes",
                 ("env", "GRADWIRE_PLAN=hierarchical", *torchrun, *train, "--nodes", nodes, "--steps", sized(300, 8),
                  "--json", RESULT),
                 "forced hierarchical sums and int8, which one node alone does not use, follow plain DDP's losses",
                 gpus=2),
        HourStep("two machines", ("torchrun", "--nnodes=2", f"--nproc-per-node={ranks}", "-m", *train),
                 "sums are plain DDP's; a rank that ends by kill -9 or kill -STOP is named within 11 s", seconds=0.0),
    ]  # fmt: skip
    return [replace(step, share=share, seconds=min(step.seconds, 1.0) * seconds) for step in steps]


def copy_bytes_per_second(device: torch.device) -> float:
    """Measures how fast a device copies 64 MiB of its memory, the best of five times.

    Args:
        device: CUDA device.
    """
    source = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(device)

    return source.numel() / min(timeit.repeat(copy, number=1, repeat=5))


def grow(versions: Sequence[HourStep], run: Callable[[HourStep], dict[str, Any]]) -> dict[str, Any]:
    """Runs a step on growing inputs, and returns the entry of the largest that ended.

    The second size follows if the first took a quarter of the budget at most; a later one if the time that the last
    growth took, as many times as the inputs grow now, fits in the budget.

    Args:
        versions: The step with its inputs, smallest first; those with the same words as one before are left out.
        run: Runs a step and returns its entry of the JSON.
    """
    unlike = list({version.words: version for version in versions}.values())
    entry = run(unlike[0])
    if entry["outcome"] == SKIPPED:
        return entry  # it had no inputs
    entry["share"] = unlike[0].share
    smaller: list[dict[str, object]] = []
    for last, step in itertools.pairwise(unlike):
        if entry["outcome"] != PASS:
            break
        took = float(str(entry["seconds"]))
        more = max(0.0, took - float(str(smaller[-1]["seconds"]))) * step.share / last.share if smaller else 3 * took
        if took + more > BUDGET_SECONDS:
            return entry | {"smaller": smaller, "larger": f"left out: {took + more:.0f} s foreseen"}
        smaller.append({"share": entry["share"], "seconds": took})
        larger = run(replace(step, seconds=4 * BUDGET_SECONDS)) | {"share": step.share}
        if str(larger.get("reason", "")).startswith(NOT_THROUGH):
            return entry | {"smaller": smaller[:-1], "larger": f"left out: {larger['reason']}"}
        entry = larger
    return entry | ({"smaller": smaller} if smaller else {})


def attempt(step: HourStep, gpus: int) -> dict[str, Any]:
    """Runs one step, and returns its entry of the JSON.

    Args:
        step: Step to run.
        gpus: Number of GPUs of this machine.
    """
    entry: dict[str, Any] = {"name": step.name, "command": shlex.join(step.words), "decides": step.decides}
    missing = (
        "needs two machines: run it by hand on both, with torchrun's options for the rendezvous" * (not step.seconds),
        f"needs {step.gpus} GPUs" * (gpus < step.gpus),
        f"{step.words[0]} is not on PATH" * (shutil.which(step.words[0]) is None),
    )
    if any(missing):
        return entry | {"outcome": SKIPPED, "reason": next(filter(None, missing))}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        words = ["env", "COLUMNS=120", *(word.replace(RESULT, str(result)) for word in step.words)]  # no name is cut
        pipe, both = subprocess.PIPE, subprocess.STDOUT
        process = subprocess.Popen(words, cwd=CHECKOUT, text=True, start_new_session=True, stdout=pipe, stderr=both)
        try:
            output, reason = process.communicate(timeout=step.seconds)[0], f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, reason = process.communicate()[0], f"{NOT_THROUGH} {step.seconds:g} s"
        finally:
            if process.poll() is None:  # interrupted
                os.killpg(process.pid, signal.SIGKILL)
        if result.exists() and result.stat().st_size:
            entry["result"] = json.loads(result.read_text())
    failed = process.returncode != 0
    entry |= {"outcome": FAIL if failed else PASS, "seconds": round(time.monotonic() - began, 1)}
    lines, of_nccl = without_nccl(output.splitlines())
    return entry | {"output": lines[-60:], "nccl": of_nccl} | ({"reason": reason} if failed else {})


def without_nccl(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates NCCL's reports (NCCL_DEBUG=INFO) from the other lines of a step; its warnings stay where they are.

    Args:
        lines: Output of all ranks.

    Returns:
        The other lines; and each report once, without the rank that has written it, at most `MOST_REPORTS`.
    """
    found = [(line, NCCL_INFO.search(line)) for line in lines]
    reports = dict.fromkeys(info[1] for _, info in found if info)
    return [line for line, info in found if not info], list(reports)[:MOST_REPORTS]


def in_words(entry: Mapping[str, object]) -> str:
    """Returns the outcome of a step in words: `pass in 104.4 s, with 1/256 of the inputs; larger: left out: ...`.

    Args:
        entry: Its entry of the JSON.
    """
    share = float(str(entry.get("share", 1.0)))
    words = f"{entry['outcome']}" + (f" in {entry['seconds']} s" if "seconds" in entry else "")
    words += f", with {f'1/{1 / share:.0f}' if share else 'the least'} of the inputs" if share < 1 else ""
    words += f": {entry['reason']}" if "reason" in entry else ""
    return words + (f"; larger inputs: {entry['larger']}" if "larger" in entry else "")


def decision(steps: Sequence[HourStep], entries: Sequence[Mapping[str, object]]) -> str:
    """Returns the decision of the hour in a sentence.

    Args:
        steps: All steps.
        entries: Entries of those that were run or skipped, in the same order.
    """
    ended = list(zip(steps, entries, strict=False))
    failed = [step for step, entry in ended if entry["outcome"] == FAIL]
    if failed and failed[-1].decisive:
        return (
            f"stop: `{failed[-1].name}` failed, so it is not known that {failed[-1].decides}; nothing after it was run"
        )
    undecided = [step.name for step, entry in ended if step.decisive and entry["outcome"] == SKIPPED]
    words = "go on: nothing that decides has failed"
    for what, names in (("not decided", undecided), ("failed", [step.name for step in failed])):
        words += f"; {what}: {', '.join(names)}" if names else ""
    return words


def main(argv: list[str], steps: Sequence[HourStep] | None = None) -> int:
    """Runs the hour, and writes its JSON after each step; it ends early if a decisive step fails.

    Args:
        argv: Words of the command line.
        steps: Steps to run; None takes those for the number of GPUs that torch sees.

    Returns:
        The exit status: 0 if no step failed, 1 if one did, 2 for bad use.
    """
    parser = StudyParser("gpu.hour", __doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--short", action="store_true", help="smallest inputs: tries the steps, measures nothing")
    options = parser.parse_args(argv)
    gpus = torch.cuda.device_count()
    try:
        check_output("--json", options.json)
        if not gpus and steps is None:
            raise ValueError("torch sees no CUDA device; wanted at least one: `gradwire selftest` needs none")
    except ValueError as error:
        print(f"gradwire selftest --hour: {error}", file=sys.stderr)
        return 2
    rate = copy_bytes_per_second(torch.device("cuda")) if steps is None else None
    slow = rate is not None and rate < SLOWEST_GPU
    if rate is not None and slow:
        print(SLOW_DEVICE.format(rate / 1e9), flush=True)
    shares, seconds = (SHARES, SLOW_SECONDS) if slow else ((1.0,), 900.0)
    sizes = [steps_of(gpus, share=share, seconds=seconds) for share in ((0.0,) if options.short else shares)]
    versions = list(zip(*sizes, strict=True)) if steps is None else [(step,) for step in steps]
    steps, entries = [each[0] for each in versions], []
    reported: set[str] = set()
    for step, growing in zip(steps, versions, strict=True):
        print(f"{step.name}: {shlex.join(step.words)}", flush=True)
        entry = grow(growing, partial(attempt, gpus=gpus))
        if reports := [line for line in entry.pop("nccl", ()) if line not in reported]:  # each once in the JSON
            entry["nccl"] = reports
            reported.update(reports)
        entries.append(entry)
        print(f"{step.name}: {in_words(entries[-1])}", flush=True)
        record = {
            "kind": "hour",
            "steps": entries,
            "machine": machine_line(),
            "gpus": gpus,
            "short": options.short,
            "copy_bytes_per_second": rate,
            "decision": decision(steps, entries),
        }
        write_json(options.json, record)
        if step.decisive and entries[-1]["outcome"] == FAIL:
            break
    print(decision(steps, entries))
    return int(any(entry["outcome"] == FAIL for entry in entries))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
