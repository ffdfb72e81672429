"""How many planted delays and disagreements a watch names, in jobs of seven kinds, and whom it names without any.

Feeds docs/results/diagnosis.md; with all of its defaults in one command:

    python -m gradwire.bench.studies.watch.planted --write docs/results/diagnosis.md

A delay: one rank of four computes 200 ms longer for 20 steps. It counts as named if the watch names this rank, and no
other, before the 20th step ends. A disagreement: one rank leaves out a collective, swaps two, or gives another shape or
dtype. It counts as explained if the watch says what that rank has issued, with file and line, before gloo's time-out.
Ranks are forked from this process (`forked`), and sleep where they would compute.
"""

import argparse
import importlib
import json
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradwire
from gradwire.bench.machine import machine_line
from gradwire.bench.studies.watch import job
from gradwire.bench.studies.watch.forked import join, run_ranks
from gradwire.bench.studies.watch.job import FAULT_AT, FAULT_STEP, KINDS, STEPS_TO_NAME, PlantedDelay

WARMED = ("gradwire.comms.watch.session", "torch._dynamo", "torch.distributed.pipelining")
"""What ranks would each import for themselves, later."""

RANKS = 4
LIMIT_SECONDS = 600.0
STALL_SECONDS = 3.0
SMALL_STEP_SECONDS = 0.002
"""What each rank computes in a healthy step: as small as a step over gloo gets."""

DISAGREEMENTS = {
    "skip": "a rank leaves out a collective",
    "order": "a rank swaps two",
    "shape": "a rank gives another shape",
    "dtype": "a rank gives another dtype",
}
AT_A_TIME = 3
"""Jobs; they sleep most of the time. What must name nobody runs alone."""

RESULT = "result:"
"""What rank 0 prints before it."""

BEGIN, END = "<!-- planted: begin -->", "<!-- planted: end -->"


def run(kind: str, fault: str, rank: int, steps: int, **variables: str) -> tuple[dict[str, Any] | None, str]:
    """Runs the job under torchrun with GRADWIRE_WATCH=1, as a user does.

    Args:
        kind: Of the job.
        fault: That is planted.
        rank: Which rank has it.
        steps: Of the job.
        variables: More of the watch's: `TRACE="t.json"` is GRADWIRE_WATCH_TRACE.

    Returns:
        The watch's report, None where the job died before it could be written; and what the job printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "watch.json"
        given = {"JSON": str(report), "STALL_SECONDS": str(STALL_SECONDS)} | variables
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
        words = ("-m", job.__name__, "--kind", kind, "--fault", fault, "--rank", str(rank), "--steps", str(steps))
        ended = subprocess.run(
            [
                "env",
                "GRADWIRE_WATCH=1",
                *(f"GRADWIRE_WATCH_{key}={value}" for key, value in given.items()),
                *torchrun,
                *words,
            ],
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        found = json.loads(report.read_text()) if report.exists() else None
        return found, ended.stdout + ended.stderr


def watched(work: Callable[[], object], rank: int, port: int) -> None:
    """What a forked rank does: watches itself, works, and prints what that returns on rank 0.

    Args:
        work: Given a default group.
        rank: This one.
        port: Of the ranks' store.
    """
    logging.basicConfig(format="%(created).3f %(message)s")
    torch.set_num_threads(1)
    gradwire.watch(STALL_SECONDS)
    join(rank, RANKS, port, job.TIMEOUT)
    found = work()
    if rank == 0:
        print(f"{RESULT} {json.dumps(found)}", flush=True)
    dist.destroy_process_group()


def result_of(work: Callable[[], object]) -> Any:
    """What a job's rank 0 returns.

    Args:
        work: Of each rank, given a default group.

    Raises:
        RuntimeError: The job failed.
    """
    statuses, text = run_ranks(RANKS, partial(watched, work), LIMIT_SECONDS)
    if any(statuses):
        raise RuntimeError(f"the job ended with {statuses}: {text[-4000:]}")
    return json.loads(text.partition(RESULT)[2].partition("\n")[0])


def planted_delays(kind: str, ranks: Sequence[int]) -> list[PlantedDelay]:
    """What the watch says of delays in one job.

    Args:
        kind: Of the job.
        ranks: Who is late, in turn.

    Raises:
        RuntimeError: The job failed.
    """
    found = result_of(lambda: [asdict(each) for each in job.delays(kind, ranks)])
    return [PlantedDelay(each["rank"], tuple(each["named"]), tuple(each["after"])) for each in found]


def planted_disagreement(fault: str, rank: int) -> float | None:
    """Seconds until a disagreement was explained; None where it was not, or not before the time-out.

    Args:
        fault: One of `DISAGREEMENTS`.
        rank: Who disagrees.
    """
    work = partial(job.train, "ddp", fault, rank, FAULT_STEP + STEPS_TO_NAME)
    _, text = run_ranks(RANKS, partial(watched, work), LIMIT_SECONDS)
    began = re.search(rf"{FAULT_AT} ([\d.]+)", text)
    said = re.search(
        rf"^([\d.]+) watch: .*disagree in collective.*\brank {rank} issued [^;]* at job\.py:\d+", text, re.MULTILINE
    )
    if began is None or said is None or float(said[1]) - float(began[1]) > job.TIMEOUT.total_seconds():
        print(f"{fault} on rank {rank} was not explained: {text[-4000:]}", file=sys.stderr)
        return None
    return float(said[1]) - float(began[1])


def healthy(steps: int) -> tuple[list[int], float]:
    """Trains where nobody is late.

    Args:
        steps: How many.

    Returns:
        Whom the watch has named, and the seconds of a step.

    Raises:
        RuntimeError: The job failed.
    """

    def work() -> tuple[list[int], float]:
        job.train("ddp", "none", 0, steps, SMALL_STEP_SECONDS)
        report = gradwire.watch().report
        return ([each.late.rank for each in report.late], report.seconds / steps) if report else ([], 0.0)

    named, seconds = result_of(work)
    return named, seconds


def delay_row(kind: str, found: Sequence[PlantedDelay]) -> str:
    """A row of the table: how many were named, and who was named without being late."""
    right = sum(set(each.named) == {each.rank} for each in found)
    wrong = sum(bool({*each.named, *each.after} - {each.rank}) for each in found)
    others = f"; another rank was named {wrong} times" if wrong else ", nobody else"
    return f"| a rank is 200 ms late, {kind} | {right} of {len(found)} named within {STEPS_TO_NAME} steps{others} |"


def disagreement_row(fault: str, found: Sequence[float | None]) -> str:
    """A row of the table: how many were explained, and after how long."""
    seconds = [each for each in found if each is not None]
    after = f", after {min(seconds):.1f} to {max(seconds):.1f} s" if seconds else ""
    return f"| {DISAGREEMENTS[fault]} | {len(seconds)} of {len(found)} explained with file and line{after} |"


def healthy_row(steps: int, named: Sequence[int], seconds: float) -> str:
    """A row of the table: who was named though nobody was late."""
    whom = ", ".join(f"rank {rank}" for rank in named) or "nobody"
    return f"| nothing: {steps:,} steps of DDP, {seconds * 1e3:.1f} ms each | {whom} named |"


def write(page: Path, rows: Sequence[str], command: str) -> None:
    """Puts the table into a page, between its two marks.

    Args:
        page: With `BEGIN` and `END`.
        rows: Of the table.
        command: That made them.

    Raises:
        ValueError: The page has no such marks.
    """
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"`write` is {page}, which has no {BEGIN} and {END}")
    load = os.getloadavg()[2]
    where = f"{RANKS} ranks over gloo, `{command}`, {machine_line()}, at a load of {load:.0f}."
    table = "\n".join(["| planted | said |", "|---|---|", *rows])
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(f"{head}{BEGIN}\n\n{table}\n\n{where}\n\n{END}{tail}")


def main() -> None:
    """Runs all of it, or the parts that are asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench.studies.watch.planted",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=("late", "disagree", "healthy"), help="this part alone (default: all)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="jobs with delays (default: all)")
    parser.add_argument(
        "--faults", nargs="+", choices=DISAGREEMENTS, default=tuple(DISAGREEMENTS), help="disagreements (default: all)"
    )
    parser.add_argument("--repeats", type=int, default=10, help="of each delay and disagreement (default: 10)")
    parser.add_argument("--steps", type=int, default=10_000, help="of the healthy job (default: 10,000)")
    parser.add_argument("--seed", type=int, default=0, help="of which ranks have the faults (default: 0)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="puts the table into this page")
    options = parser.parse_args()
    for module in WARMED:
        importlib.import_module(module)
    drawn = random.Random(options.seed)
    rows: list[str] = []
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        if options.only in (None, "late"):
            late = {kind: in_turn(options.repeats, drawn) for kind in options.kinds}
            rows += [
                delay_row(kind, found)
                for kind, found in zip(late, pool.map(planted_delays, late, late.values()), strict=True)
            ]
        if options.only in (None, "disagree"):
            for fault in options.faults:
                ranks = in_turn(options.repeats, drawn)
                rows.append(disagreement_row(fault, list(pool.map(partial(planted_disagreement, fault), ranks))))
    if options.only in (None, "healthy"):
        rows.append(healthy_row(options.steps, *healthy(options.steps)))
    print("\n".join(rows))
    if options.write is not None:
        write(options.write, rows, " ".join(["python -m gradwire.bench.studies.watch.planted", *sys.argv[1:]]))


def in_turn(count: int, drawn: random.Random) -> list[int]:
    """Ranks, drawn so that none follows itself."""
    ranks = [drawn.randrange(RANKS)]
    while len(ranks) < count:
        ranks.append((ranks[-1] + drawn.randrange(1, RANKS)) % RANKS)
    return ranks


if __name__ == "__main__":
    main()
