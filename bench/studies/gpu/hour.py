"""Runs what has never run on a GPU, in the order in which it decides something: the first hour on a machine with GPUs.

    gradwire selftest --hour --json hour.json                               # in a checkout; the same as
    python -m gradwire.bench.studies.gpu.hour --json hour.json

Each step is a command that can be run by hand as well. If a step fails whose success all later ones take for granted
(kernels are right, sums are right), the hour ends: what is timed after that would mean nothing. How to read the JSON is
in docs/develop/run_on_a_gpu.md. `--short` runs the same steps on small inputs, which shows in minutes that the hour
itself works on a machine, the GPU stand-in of the tests included; its figures mean nothing.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gradwire.bench.arguments import check_output
from gradwire.bench.machine import machine_line
from gradwire.bench.selftest.checks import FAIL, PASS, SKIPPED
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.bench.terminal import write_json

CHECKOUT = Path(__file__).resolve().parents[3]
RESULT = "{result}"
"""Word of a command in whose place the path of its own JSON is put."""


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
    """

    name: str
    words: Sequence[str]
    decides: str
    seconds: float = 900.0
    decisive: bool = False
    gpus: int = 0


def steps_of(gpus: int, *, short: bool = False) -> list[HourStep]:
    """Returns the steps of the hour, in order.

    Args:
        gpus: Number of GPUs of this machine.
        short: Whether inputs are small and repetitions few, to try the steps themselves.
    """
    # Words of the commands.
    ranks = min(gpus, 8)
    largest, training_steps, numels = ("64K", "8", (4096,)) if short else ("128M", "300", (25 << 18, 800 << 10))
    checked = ("--ranks", "2", "--numel", "1100", "--bandwidth-numel", "0") if short else ()
    repeats = ("--repeats", "2") if short else ()
    rounds = ("--rounds", "2") if short else ()
    run, tests = (sys.executable, "-m"), (sys.executable, "-m", "pytest", "-q", "-m", "gpu")
    sanitizer = ("compute-sanitizer", "--error-exitcode", "1", "--tool")
    edges = ("tests/csrc", "-k", "4097 or large_input")
    torchrun = (*run, "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m")
    nodes = "a" * (ranks - ranks // 2) + "b" * (ranks // 2)
    modes = ("--nodes", nodes, "--modes", "flat,hierarchical,hierarchical:int8")
    hooks = ("--hook", "plain", "--hook", "gradwire", "--hook", "gradwire:int8")
    train = ("gradwire.bench.train.train", "--device", "cuda", *hooks)
    sizes = ("bench", "all_reduce", "-b", "8", "-e", largest, "-f", "2", "-g", str(ranks), "--backend", "gradwire,nccl")
    kernels = [
        HourStep(
            f"kernels, {numel} values",
            (
                *run,
                "gradwire",
                "bench",
                "kernels",
                "--device",
                "cuda",
                "--numel",
                str(numel),
                *repeats,
                "--json",
                RESULT,
            ),
            "share of a copy's bandwidth: 0.9 at 25 MiB; at what one of eight ranks has of that, the launch decides",
        )
        for numel in numels
    ]
    # Decisive steps first: if one fails, later figures mean nothing.
    return [
        HourStep("selftest", (*run, "gradwire", "selftest", "--seconds", "850", *checked, "--json", RESULT),
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
        HourStep("host cost", (*torchrun, "gradwire.bench.studies.gpu.host_ratio", *modes, *rounds),
                 "the host keeps up: flat at most 1.10 of torch's own hook, hierarchical at most 2.5", gpus=2),
        *kernels,
        HourStep("all_reduce",
                 ("env", "NCCL_DEBUG=INFO", "NCCL_DEBUG_SUBSYS=TUNING", *run, "gradwire", *sizes, "-J", RESULT),
                 "NCCL takes the same algorithm for both (NVLS with an NVSwitch), bus bandwidth within 3 %", gpus=2),
        HourStep("trainings", (*torchrun, *train, "--steps", training_steps, "--json", RESULT),
                 "the exact hook takes plain DDP's time within 1 %, and int8 follows its losses", gpus=2),
        HourStep("two machines", ("torchrun", "--nnodes=2", f"--nproc-per-node={ranks}", "-m", *train),
                 "sums are plain DDP's; a rank that ends by kill -9 or kill -STOP is named within 11 s", seconds=0.0),
    ]  # fmt: skip


def attempt(step: HourStep, gpus: int) -> dict[str, object]:
    """Runs one step, and returns its entry of the JSON.

    Args:
        step: Step to run.
        gpus: Number of GPUs of this machine.
    """
    entry: dict[str, object] = {"name": step.name, "command": " ".join(step.words), "decides": step.decides}
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
        words = [word.replace(RESULT, str(result)) for word in step.words]
        pipe, both = subprocess.PIPE, subprocess.STDOUT
        process = subprocess.Popen(words, cwd=CHECKOUT, text=True, start_new_session=True, stdout=pipe, stderr=both)
        try:
            output, reason = process.communicate(timeout=step.seconds)[0], f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, reason = process.communicate()[0], f"not through after {step.seconds:g} s"
        finally:
            if process.poll() is None:  # interrupted
                os.killpg(process.pid, signal.SIGKILL)
        if result.exists() and result.stat().st_size:
            entry["result"] = json.loads(result.read_text())
    failed = process.returncode != 0
    entry |= {"outcome": FAIL if failed else PASS, "seconds": round(time.monotonic() - began, 1)}
    return entry | {"output": output.splitlines()[-60:]} | ({"reason": reason} if failed else {})


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
    """Runs the hour, and writes its JSON after each step.

    Args:
        argv: Words of the command line.
        steps: Steps to run; None takes those for the number of GPUs that torch sees.

    Returns:
        The exit status: 0 if no step failed, 1 if one did, 2 for bad use.
    """
    parser = StudyParser("gpu.hour", __doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--short", action="store_true", help="small inputs: tries the steps, measures nothing")
    options = parser.parse_args(argv)
    gpus = torch.cuda.device_count()
    try:
        check_output("--json", options.json)
        if not gpus and steps is None:
            raise ValueError("torch sees no CUDA device; wanted at least one: `gradwire selftest` needs none")
    except ValueError as error:
        print(f"gradwire selftest --hour: {error}", file=sys.stderr)
        return 2
    steps = steps_of(gpus, short=options.short) if steps is None else steps
    entries: list[dict[str, object]] = []
    for step in steps:
        print(f"{step.name}: {' '.join(step.words)}", flush=True)
        entries.append(attempt(step, gpus))
        print(f"{step.name}: {entries[-1]['outcome']} {entries[-1].get('reason', '')}".rstrip(), flush=True)
        record = {
            "kind": "hour",
            "steps": entries,
            "machine": machine_line(),
            "gpus": gpus,
            "short": options.short,
            "decision": decision(steps, entries),
        }
        write_json(options.json, record)
        if step.decisive and entries[-1]["outcome"] == FAIL:
            break
    print(decision(steps, entries))
    return int(any(entry["outcome"] == FAIL for entry in entries))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
