"""The pairs of a training and a device that are held to any schedule, and a queue of them that goes on where it was.

    python tests/gpu_standin/schedules.py --schedules 200 --data FILE     # runs what the file lacks, a job a pair
    python tests/gpu_standin/schedules.py --data FILE --write PAGE        # puts a table of what it has into a page

In the environment of the GPU stand-in; docs/results/data has schedules.jsonl. A job that ends otherwise
is written down as well, and is not tried again until its row is deleted.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_standin.conftest import JOBS, Jobs
from gpu_standin.test_trainings import (
    APART,
    BACKEND,
    COMPRESSED,
    EXACT,
    GROUPS,
    OTHER_ORDER,
    SHARDED,
    Settings,
)
from support.forked import fork_server

IN_ORDER, IN_TURNS = ({"NCCL_LAUNCH_ORDER_IMPLICIT": value} for value in "10")
"""Who keeps the order: NCCL, or gradwire's events. Where NCCL has run before a hook is made, as in DDP's constructor,
only the environment can ask NCCL for it; elsewhere gradwire asks, unless the environment says no."""
DEVICES: dict[str, dict[str, str]] = {
    "one kernel": IN_ORDER | {"GPU_STANDIN_NCCL_KERNELS": "1"},
    "few multiprocessors": IN_TURNS | {"GPU_STANDIN_SMS": "28"},
    "room for all": {},
    "memory calls wait": IN_ORDER | {"GPU_STANDIN_MALLOC_WAITS": "1", "GPU_STANDIN_POISON": "1"},
}
"""What a device is like. Of 28 multiprocessors two kernels of 24 and 8 thread blocks do not both have enough."""
CASES: dict[str, dict[str, Settings]] = {
    "exact": EXACT,
    "compressed": COMPRESSED,
    "backend": BACKEND,
    "sharded": SHARDED,
    "apart": APART,
}
OF_A_SCHEDULE = 3.0
"""Seconds that a schedule may take on average, on a machine that does much else."""


BEGIN, END = "<!-- schedules -->", "<!-- /schedules -->"
Row = dict[str, Any]
"""A line of the file: what is in Found, and of the machine."""


@dataclass(frozen=True)
class Found:
    """What came of one case on one device.

    Attributes:
        group: One of CASES.
        case: Of that group.
        device: One of DEVICES.
        schedules: How many were run.
        wrong: Those with other bits than wanted, on any rank.
        seconds: Processor time of all ranks, with the training that gives the wanted bits where that was not kept.
        problem: What ended otherwise; empty where nothing did.
    """

    group: str
    case: str
    device: str
    schedules: int
    wrong: list[int] = field(default_factory=list)
    seconds: float = 0.0
    problem: str = ""


def run_cases(
    jobs: Jobs, group: str, device: str, schedules: int, wanted: Path, only: str | None = None
) -> list[Found]:
    """Runs the cases of a group, or one, in four processes on two nodes.

    Args:
        jobs: Where.
        group: One of CASES.
        device: One of DEVICES.
        schedules: Of each case.
        wanted: A folder that keeps the wanted bits, for other devices.
        only: The case.
    """
    backend, kind, cases = GROUPS[group]
    named = [only] if only is not None else list(cases)
    listed = [
        [name, {"kind": kind, "net": "layers", "reference": reference(group, name)} | cases[name]] for name in named
    ]
    jobs = replace(jobs, seconds=120 + OF_A_SCHEDULE * schedules * len(listed))
    arguments = (backend, str(schedules), json.dumps(listed), str(wanted))
    ranks = jobs.run("schedules.py", *arguments, ranks=4, NODES="aabb", **DEVICES[device])
    of_ranks = [dict(json.loads(line) for line in output.splitlines()) for output in ranks.outputs]
    found = []
    for name in named:
        bits = [of_rank[name] for of_rank in of_ranks if name in of_rank]
        wrong = [each for each in range(schedules) if any(one["delayed"][each] != one["wanted"][each] for one in bits)]
        whole = len(bits) == len(of_ranks) and all(len(one["delayed"]) == schedules for one in bits)
        problem = "" if whole else f"ended with {ranks.statuses}: " + " | ".join(text[-300:] for text in ranks.errors)
        seconds = round(sum(one["seconds"] for one in bits), 1)
        found.append(Found(group, name, device, schedules, wrong, seconds, problem))
    return found


def reference(group: str, case: str) -> str:
    """Whose bits a case has: the CPU's, or where sums have another order there its own without delays."""
    return "cuda" if f"{group} {case}" in OTHER_ORDER or "powersgd" in case else "cpu"


def pairs() -> Iterator[tuple[str, str, str]]:
    """Group, case and device of all of them."""
    for device in DEVICES:
        for group, cases in CASES.items():
            for case in cases:
                yield group, case, device


def rows_of(data: Path) -> list[Row]:
    """What has been run."""
    return [json.loads(line) for line in data.read_text().splitlines()] if data.exists() else []


def table(rows: list[Row]) -> str:
    """In Markdown: a line a case, a column a device, in it how many schedules had the wanted bits; then where."""
    found = {(row["group"], row["case"], row["device"]): row for row in rows}
    lines = [f"| | {' | '.join(DEVICES)} |", "|---" * (len(DEVICES) + 1) + "|"]
    for group, cases in CASES.items():
        for case in cases:
            cells = [cell(found.get((group, case, device))) for device in DEVICES]
            lines.append(f"| {group}: {case} | {' | '.join(cells)} |")
    right = sum(not row["wrong"] and not row["problem"] for row in rows)
    loads = [row["load"] for row in rows]
    machines = ", ".join(sorted({f"{row['machine']} with {row['processors']} processors" for row in rows}))
    dates = ", ".join(sorted({row["date"] for row in rows}))
    said = (
        f"{right} of {len(list(pairs()))} pairs ended, with the wanted bits after every schedule; {len(rows) - right} "
        f"did not. torch {', '.join(sorted({row['torch'] for row in rows}))}, {machines}, {dates}, at a load of "
        f"{min(loads, default=0)} to {max(loads, default=0)}; {sum(row['seconds'] for row in rows):.0f} s of "
        "processor time in the ranks."
    )
    lines += ["", said]
    return "\n".join(lines)


def write(page: Path, rows: list[Row]) -> None:
    """Puts the table into a page, between its two marks.

    Raises:
        ValueError: The page has no such marks.
    """
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"`write` is {page}, which has no {BEGIN} and {END}")
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(f"{head}{BEGIN}\n{table(rows)}\n{END}{tail}")


def cell(row: Row | None) -> str:
    """What a table says of one pair."""
    if row is None:
        return "not run"
    if row["problem"]:
        return "**did not end**"
    return f"**{len(row['wrong'])} of {row['schedules']} wrong**" if row["wrong"] else str(row["schedules"])


def main() -> None:
    """Runs what the file lacks, or writes down what it has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=200, help="of each pair")
    parser.add_argument("--data", type=Path, required=True, help="a row of JSON for each pair that was run")
    parser.add_argument("--only", default="", help="pairs whose 'GROUP CASE DEVICE' has this in it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no pair after so many")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="put a table of the file into this page, and run nothing"
    )
    given = parser.parse_args()
    if given.write is not None:
        write(given.write, rows_of(given.data))
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    ended, began = 0, time.monotonic()
    with (
        fork_server(PYTHONPATH=os.pathsep.join([str(JOBS.parents[1]), os.environ.get("PYTHONPATH", "")])) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        wanted, place = Path(folder, "wanted"), Path(folder, "ranks")
        wanted.mkdir()
        place.mkdir()
        for group, case, device in pairs():
            there = {(row["group"], row["case"], row["device"]) for row in rows_of(given.data)}
            if (group, case, device) in there or given.only not in f"{group} {case} {device}":
                continue
            if time.monotonic() - began > given.seconds:
                break
            load = os.getloadavg()[0]
            (found,) = run_cases(Jobs(place, server), group, device, given.schedules, wanted, case)
            of_machine = {
                "torch": torch.__version__,
                "machine": platform.machine(),
                "processors": os.cpu_count(),
                "load": round(load),
                "date": str(datetime.datetime.now(datetime.UTC).date()),
                "commit": commit.stdout.strip(),
            }
            with given.data.open("a") as file:
                file.write(json.dumps(asdict(found) | of_machine) + "\n")
            ended += 1
            print(f"{group} {case}, {device}: {found.wrong or found.problem or 'right'}, {found.seconds} s", flush=True)
    print(f"{ended} pairs; {len(rows_of(given.data))} of {len(list(pairs()))} in {given.data}")


if __name__ == "__main__":
    main()
