"""Counts how many injected delays and disagreements a watch names, and how many ranks it names without any.

Feeds docs/results/diagnosis.md, whose table is made of the data file by `python -m gradwire.bench.studies.tables`:

    python -m gradwire.bench.studies.watch.injected --data docs/results/data/watch.jsonl

Each job's result is a line of the data file as soon as it is there. What the file has is not run again, so that the
same command goes on where it was stopped; take a line out to repeat it.

A delay, in jobs of seven kinds of parallelism: one rank of four computes 200 ms longer for 20 steps. It counts as named
if the watch names this rank, and no other, before the 20th step ends. A rank that is named because it waits for a
processor is counted apart: on a machine with fewer processors than work it is late. A disagreement: one rank leaves out
a collective, swaps two, or gives another shape or dtype. It counts as explained if the watch says what that rank has
issued, with file and line, before gloo's time-out. Ranks are forked from this process (`forked`), and sleep in place of
computing.
"""

import importlib
import json
import logging
import os
import random
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradwire
from gradwire.bench.machine import machine_line
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.bench.studies.tables.page import put_between
from gradwire.bench.studies.watch import job
from gradwire.bench.studies.watch.forked import RESULT, join, result_of, run_ranks
from gradwire.bench.studies.watch.job import (
    FAULT_AT,
    FAULT_STEP,
    KINDS,
    STEPS_TO_NAME,
    InjectedDelay,
    NamedRank,
    named_since,
)
from gradwire.comms.watch.activity import QUEUE

WARMED = ("gradwire.comms.watch.session", "torch._dynamo", "torch.distributed.pipelining")
"""Modules that are imported before ranks are forked, so that not every rank imports them for itself."""

RANKS = 4
LIMIT_SECONDS = 600.0
STALL_SECONDS = 3.0
SMALL_STEP_SECONDS = 0.002
"""Computation of each rank in a healthy step: as short as a step over gloo gets."""

DISAGREEMENTS = {
    "skip": "a rank leaves out a collective",
    "order": "a rank swaps two",
    "shape": "a rank gives another shape",
    "dtype": "a rank gives another dtype",
}
AT_A_TIME = 3
"""Number of jobs that run at the same time; they sleep most of it. The healthy job, which must not be disturbed, runs
alone."""

PARTS = ("late", "disagree", "healthy")

COMMAND = "python -m gradwire.bench.studies.watch.injected --data docs/results/data/watch.jsonl"
"""Makes the data file of the page."""
BEGIN, END = "<!-- injected: begin -->", "<!-- injected: end -->"


def watched(work: Callable[[], object], rank: int, port: int) -> None:
    """Runs a function as a forked rank under `gradwire.watch`; rank 0 prints its result.

    Args:
        work: Function to run in the default group; its result is written as JSON.
        rank: Number of this rank.
        port: Port of the ranks' store.
    """
    logging.basicConfig(format="%(created).3f %(message)s")
    torch.set_num_threads(1)
    gradwire.watch(STALL_SECONDS)
    join(rank, RANKS, port, job.TIMEOUT)
    found = work()
    if rank == 0:
        print(f"{RESULT} {json.dumps(found)}", flush=True)
    dist.destroy_process_group()


def outcome_of(work: Callable[[], object]) -> Any:
    """Runs a job under the watch and returns the result of its rank 0.

    Args:
        work: Function that each rank runs in the default group.

    Raises:
        RuntimeError: The job failed.
    """
    return result_of(RANKS, partial(watched, work), LIMIT_SECONDS)


def injected_delays(kind: str, ranks: Sequence[int]) -> list[InjectedDelay]:
    """Delays ranks of one job in turn, and returns which ranks the watch named each time.

    Args:
        kind: Kind of the job, one of `KINDS`.
        ranks: Ranks to delay, in this order.

    Raises:
        RuntimeError: The job failed.
    """
    return delays_of(outcome_of(lambda: [asdict(each) for each in job.delays(kind, ranks)]))


def delays_of(found: Sequence[dict[str, Any]]) -> list[InjectedDelay]:
    """Rebuilds the delays from dictionaries that `dataclasses.asdict` made and JSON stored."""
    return [
        InjectedDelay(each["rank"], *(tuple(NamedRank(**named) for named in each[when]) for when in ("named", "after")))
        for each in found
    ]


def injected_disagreement(fault: str, rank: int) -> float | None:
    """Injects a disagreement and returns the seconds until the watch explained it.

    Args:
        fault: Key of `DISAGREEMENTS`.
        rank: Rank that disagrees.

    Returns:
        None if the watch did not explain it, or not before the time-out.
    """
    work = partial(job.train, fault, rank, FAULT_STEP + STEPS_TO_NAME)
    _, text = run_ranks(RANKS, partial(watched, work), LIMIT_SECONDS)
    began = re.search(rf"{FAULT_AT} ([\d.]+)", text)
    at = explained_at(text, rank)
    if began is None or at is None or at - float(began[1]) > job.TIMEOUT.total_seconds():
        print(f"{fault} on rank {rank} was not explained: {text[-4000:]}", file=sys.stderr)
        return None
    return at - float(began[1])


def explained_at(text: str, rank: int) -> float | None:
    """Finds the watch's message about a disagreement that names the call of one rank, with file and line.

    Args:
        text: Output of the ranks; log messages begin with their time.
        rank: Rank that disagreed.

    Returns:
        Time of the first such message, in seconds since the epoch; None without one.
    """
    pattern = rf"^([\d.]+) gradwire: watch: .*disagree in collective.*\brank {rank} issued [^;]* at job\.py:\d+"
    found = re.search(pattern, text, re.MULTILINE)
    return None if found is None else float(found[1])


def healthy(steps: int) -> tuple[list[NamedRank], float]:
    """Trains without a late rank.

    Args:
        steps: Number of steps.

    Returns:
        (ranks that the watch named nevertheless, seconds of a step).

    Raises:
        RuntimeError: The job failed.
    """

    def work() -> tuple[list[dict[str, Any]], float]:
        job.train("none", 0, steps, SMALL_STEP_SECONDS)
        report = gradwire.watch().report
        return [asdict(each) for each in named_since(0)], report.seconds / steps if report else 0.0

    named, seconds = outcome_of(work)
    return [NamedRank(**each) for each in named], seconds


def delay_row(kind: str, found: Sequence[InjectedDelay]) -> str:
    """Returns a table row: how many late ranks were named, and how often others were named."""
    right = sum(own_names(each) == {each.rank} for each in found)
    others = [named for each in found for named in (*each.named, *each.after) if named.rank != each.rank]
    said = f"{right} of {len(found)} named within {STEPS_TO_NAME} steps{besides(others)}"
    return f"| a rank is 200 ms late, {kind} | {said} |"


def own_names(delay: InjectedDelay) -> set[int]:
    """Returns the ranks named during a delay, without other ranks that only waited for a processor."""
    return {each.rank for each in delay.named if each.rank == delay.rank or each.busy_with != QUEUE}


def besides(others: Sequence[NamedRank]) -> str:
    """Returns a clause on how often other ranks were named, and how often only for waiting for a processor."""
    queued = sum(each.busy_with == QUEUE for each in others)
    if not others:
        return ", nobody else"
    return f"; another rank was named {len(others)} times, {queued} of them as waiting for a processor"


def disagreement_row(fault: str, found: Sequence[float | None]) -> str:
    """Returns a table row: how many disagreements were explained, and after how many seconds."""
    seconds = [each for each in found if each is not None]
    after = f", after {min(seconds):.1f} to {max(seconds):.1f} s" if seconds else ""
    return f"| {DISAGREEMENTS[fault]} | {len(seconds)} of {len(found)} explained with file and line{after} |"


def healthy_row(steps: int, named: Sequence[NamedRank], seconds: float) -> str:
    """Returns a table row: which ranks were named although none was late."""
    whom = ", ".join(f"rank {each.rank} (in {each.busy_with})" for each in named) or "nobody"
    return f"| nothing: {steps:,} steps of DDP, {seconds * 1e3:.1f} ms each | {whom} named |"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds the result of one job, or of the jobs of one fault: a line of the data file.

    Attributes:
        part: `late`, `disagree` or `healthy`.
        what: Kind of job, fault, or number of steps, depending on the part.
        found: Result of `injected_delays`, `injected_disagreement` or `healthy` as plain data.
        machine: Machine and date.
        load: Load of the machine over the last five minutes of the job.
    """

    part: str
    what: str
    found: Any
    machine: str = field(default_factory=machine_line)
    load: float = field(default_factory=lambda: round(os.getloadavg()[1], 1))

    @property
    def row(self) -> str:
        """Returns the row of the table."""
        if self.part == "late":
            return delay_row(self.what, delays_of(self.found))
        if self.part == "disagree":
            return disagreement_row(self.what, self.found)
        named, seconds = self.found
        return healthy_row(int(self.what), [NamedRank(**each) for each in named], seconds)


class Outcomes:
    """Collects the outcomes, those of a data file and those of this run.

    Args:
        data: Data file to read and append to; None keeps the outcomes in memory only.
    """

    def __init__(self, data: Path | None) -> None:
        lines = data.read_text().splitlines() if data is not None and data.exists() else []
        self.all = [Outcome(**json.loads(line)) for line in lines]
        self._data = data

    def missing(self, part: str, whats: Sequence[str]) -> list[str]:
        """Returns those of `whats` that have no outcome of this part yet."""
        known = {each.what for each in self.all if each.part == part}
        return [each for each in whats if each not in known]

    def add(self, outcome: Outcome) -> None:
        """Adds an outcome to `all` and prints its row; if there is a data file, appends the outcome to it as a line."""
        self.all.append(outcome)
        print(outcome.row, flush=True)
        if self._data is not None:
            with self._data.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")


def with_table(page: str, outcomes: Sequence[Outcome]) -> str:
    """Returns a page with the table put between its two marks.

    Args:
        page: Text of the page in Markdown, with the lines `BEGIN` and `END`.
        outcomes: Outcomes, a row each; at least one.

    Raises:
        ValueError: The page lacks the marks.
    """
    order = {part: place for place, part in enumerate(PARTS)}
    rows = [each.row for each in sorted(outcomes, key=lambda each: order[each.part])]
    loads = [each.load for each in outcomes]
    machines = "; ".join(dict.fromkeys(each.machine for each in outcomes))
    where = f"{RANKS} ranks over gloo, `{COMMAND}`, {machines}, at a load of {min(loads):.0f} to {max(loads):.0f}."
    table = "\n".join(["| injected | said |", "|---|---|", *rows])
    return put_between(page, f"{table}\n\n{where}", BEGIN, END)


def main() -> None:
    """Runs the injections that have no result yet, all of them or the parts that the options select."""
    parser = StudyParser("watch.injected", __doc__)
    parser.add_argument("--only", choices=PARTS, help="this part alone (default: all)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="jobs with delays (default: all)")
    parser.add_argument(
        "--faults", nargs="+", choices=DISAGREEMENTS, default=tuple(DISAGREEMENTS), help="disagreements (default: all)"
    )
    parser.add_argument("--repeats", type=int, default=10, help="of each delay and disagreement (default: 10)")
    parser.add_argument("--steps", type=int, default=10_000, help="of the healthy job (default: 10,000)")
    parser.add_argument("--seed", type=int, default=0, help="of which ranks have the faults (default: 0)")
    parser.add_argument("--data", type=Path, metavar="FILE.jsonl", help="keeps results; what it has is not run again")
    options = parser.parse_args()
    for module in WARMED:
        importlib.import_module(module)
    outcomes = Outcomes(options.data)
    drawn = random.Random(options.seed)
    late = {kind: in_turn(options.repeats, drawn) for kind in KINDS}
    disagree = {fault: in_turn(options.repeats, drawn) for fault in DISAGREEMENTS}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        if options.only in (None, "late"):
            kinds = outcomes.missing("late", options.kinds)
            running = pool.map(injected_delays, kinds, [late[kind] for kind in kinds])
            for kind, found in zip(kinds, running, strict=True):
                outcomes.add(Outcome("late", kind, [asdict(each) for each in found]))
        if options.only in (None, "disagree"):
            for fault in outcomes.missing("disagree", options.faults):
                explained = list(pool.map(partial(injected_disagreement, fault), disagree[fault]))
                outcomes.add(Outcome("disagree", fault, explained))
    if options.only in (None, "healthy"):
        for steps in outcomes.missing("healthy", [str(options.steps)]):
            named, took = healthy(int(steps))
            outcomes.add(Outcome("healthy", steps, [[asdict(each) for each in named], took]))


def in_turn(count: int, drawn: random.Random) -> list[int]:
    """Draws `count` ranks at random so that none follows itself."""
    ranks = [drawn.randrange(RANKS)]
    while len(ranks) < count:
        ranks.append((ranks[-1] + drawn.randrange(1, RANKS)) % RANKS)
    return ranks


if __name__ == "__main__":
    main()
