"""How many planted delays and disagreements a watch names, in jobs of six kinds. Feeds docs/results/diagnosis.md.

python -m gradwire.bench.studies.watch.planted late --repeats 10     # a rank is 200 ms late: is it named, and alone?
python -m gradwire.bench.studies.watch.planted disagree --repeats 4  # a rank leaves out, swaps, or resizes one
python -m gradwire.bench.studies.watch.planted healthy --steps 2500  # nobody is late
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gradwire.bench.studies.watch.job import FAULT_STEP, KINDS

JOB = "gradwire.bench.studies.watch.job"
RANKS = 4
STEPS_TO_NAME = 20
LIMIT_SECONDS = 600.0


def run(kind: str, fault: str, rank: int, steps: int) -> tuple[dict[str, Any] | None, str]:
    """Runs the job with a watch.

    Args:
        kind: Of the job.
        fault: That is planted.
        rank: Which rank has it.
        steps: Of the job.

    Returns:
        The watch's report, None where the job died before it could be written; and what the job printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "watch.json"
        variables = {"GRADWIRE_WATCH": "1", "GRADWIRE_WATCH_JSON": str(report), "GRADWIRE_WATCH_STALL_SECONDS": "3"}
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
        job = ("-m", JOB, "--kind", kind, "--fault", fault, "--rank", str(rank), "--steps", str(steps))
        ended = subprocess.run(
            ["env", *(f"{name}={value}" for name, value in variables.items()), *torchrun, *job],
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        found = json.loads(report.read_text()) if report.exists() else None
        return found, ended.stdout + ended.stderr


def late(repeats: int, drawn: random.Random) -> None:
    """Prints for each kind of job how often the late rank, and no other, was named within `STEPS_TO_NAME` steps."""
    for kind in KINDS:
        right = 0
        for _ in range(repeats):
            rank = drawn.randrange(RANKS)
            report, text = run(kind, "late", rank, FAULT_STEP + STEPS_TO_NAME)
            named = [each["late"]["rank"] for each in report["late"]] if report else text
            right += named == [rank]
            if named != [rank]:
                print(f"  {kind}: rank {rank} was late, named: {named}")
        print(f"{kind}: {right} of {repeats} named within {STEPS_TO_NAME} steps", flush=True)


def disagree(repeats: int, drawn: random.Random) -> None:
    """Prints how often a disagreement was explained with the file and line of the rank that is alone in it."""
    for fault in ("skip", "order", "shape"):
        right = 0
        for _ in range(repeats):
            rank = drawn.randrange(RANKS)
            _, text = run("ddp", fault, rank, FAULT_STEP + STEPS_TO_NAME)
            said = [line for line in text.splitlines() if "disagree in collective" in line and "job.py:" in line]
            right += bool(said)
            if not said:
                print(f"  {fault} on rank {rank}: {text[-2000:]}")
        print(f"{fault}: {right} of {repeats} explained", flush=True)


def healthy(steps: int) -> None:
    """Prints whom the watch names in jobs without a fault."""
    for kind in KINDS:
        report, text = run(kind, "none", 0, steps)
        print(f"{kind}: {steps} steps, named: {report['late'] if report else text[-2000:]}", flush=True)


def main() -> None:
    """Runs one of them."""
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench.studies.watch.planted",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("late", "disagree", "healthy"))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    drawn = random.Random(arguments.seed)
    if arguments.what == "healthy":
        healthy(arguments.steps)
    else:
        (late if arguments.what == "late" else disagree)(arguments.repeats, drawn)


if __name__ == "__main__":
    main()
