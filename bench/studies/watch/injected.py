"""How many injected delays and disagreements a watch names, in jobs of seven kinds, and whom it names without any.

Feeds docs/results/diagnosis.md, whose table is made of the data file by `python -m gradwire.bench.studies.tables`:

    python -m gradwire.bench.studies.watch.injected --data docs/results/data/watch.jsonl

Each job's result is a line of the data file as soon as it is there. What the file has is not run again, so that the
same command goes on where it was stopped; take a line out to repeat it.

A delay: one rank of four computes 200 ms longer for 20 steps. It counts as named if the watch names this rank, and no
other, before the 20th step ends. A rank that is named because it waits for a processor is counted apart: on a machine
with fewer processors than work it is late. A disagreement: one rank leaves out a collective, swaps two, or gives
another shape or dtype. It counts as explained if the watch says what that rank has issued, with file and line, before
gloo's time-out. Ranks are forked from this process (`forked`), and sleep where they would compute.
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

PARTS = ("late", "disagree", "healthy")

COMMAND = "python -m gradwire.bench.studies.watch.injected --data docs/results/data/watch.jsonl"
"""Makes the data file of the page."""
BEGIN, END = "<!-- injected: begin -->", "<!-- injected: end -->"


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


def outcome_of(work: Callable[[], object]) -> Any:
    """What a job's rank 0 returns.

    Args:
        work: Of each rank, given a default group.

    Raises:
        RuntimeError: The job failed.
    """
    return result_of(RANKS, partial(watched, work), LIMIT_SECONDS)


def injected_delays(kind: str, ranks: Sequence[int]) -> list[InjectedDelay]:
    """What the watch says of delays in one job.

    Args:
        kind: Of the job.
        ranks: Who is late, in turn.

    Raises:
        RuntimeError: The job failed.
    """
    return delays_of(outcome_of(lambda: [asdict(each) for each in job.delays(kind, ranks)]))


def delays_of(found: Sequence[dict[str, Any]]) -> list[InjectedDelay]:
    """From what `dataclasses.asdict` has made, by way of JSON."""
    return [
        InjectedDelay(each["rank"], *(tuple(NamedRank(**named) for named in each[when]) for when in ("named", "after")))
        for each in found
    ]


def injected_disagreement(fault: str, rank: int) -> float | None:
    """Seconds until a disagreement was explained; None where it was not, or not before the time-out.

    Args:
        fault: One of `DISAGREEMENTS`.
        rank: Who disagrees.
    """
    work = partial(job.train, fault, rank, FAULT_STEP + STEPS_TO_NAME)
    _, text = run_ranks(RANKS, partial(watched, work), LIMIT_SECONDS)
    began = re.search(rf"{FAULT_AT} ([\d.]+)", text)
    said = re.search(
        rf"^([\d.]+) watch: .*disagree in collective.*\brank {rank} issued [^;]* at job\.py:\d+", text, re.MULTILINE
    )
    if began is None or said is None or float(said[1]) - float(began[1]) > job.TIMEOUT.total_seconds():
        print(f"{fault} on rank {rank} was not explained: {text[-4000:]}", file=sys.stderr)
        return None
    return float(said[1]) - float(began[1])


def healthy(steps: int) -> tuple[list[NamedRank], float]:
    """Trains where nobody is late.

    Args:
        steps: How many.

    Returns:
        Whom the watch has named, and the seconds of a step.

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
    """A row of the table: how many were named, and who was named without being late."""
    right = sum(own_names(each) == {each.rank} for each in found)
    others = [named for each in found for named in (*each.named, *each.after) if named.rank != each.rank]
    said = f"{right} of {len(found)} named within {STEPS_TO_NAME} steps{besides(others)}"
    return f"| a rank is 200 ms late, {kind} | {said} |"


def own_names(delay: InjectedDelay) -> set[int]:
    """Whom the watch has named while a rank was late, but for those that waited for a processor."""
    return {each.rank for each in delay.named if each.rank == delay.rank or each.busy_with != QUEUE}


def besides(others: Sequence[NamedRank]) -> str:
    """Who was named besides: ranks that waited for a processor on a busy machine were late, too."""
    queued = sum(each.busy_with == QUEUE for each in others)
    if not others:
        return ", nobody else"
    return f"; another rank was named {len(others)} times, {queued} of them as waiting for a processor"


def disagreement_row(fault: str, found: Sequence[float | None]) -> str:
    """A row of the table: how many were explained, and after how long."""
    seconds = [each for each in found if each is not None]
    after = f", after {min(seconds):.1f} to {max(seconds):.1f} s" if seconds else ""
    return f"| {DISAGREEMENTS[fault]} | {len(seconds)} of {len(found)} explained with file and line{after} |"


def healthy_row(steps: int, named: Sequence[NamedRank], seconds: float) -> str:
    """A row of the table: who was named though nobody was late."""
    whom = ", ".join(f"rank {each.rank} (in {each.busy_with})" for each in named) or "nobody"
    return f"| nothing: {steps:,} steps of DDP, {seconds * 1e3:.1f} ms each | {whom} named |"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one job, or the jobs of one fault, have come to: a line of the data file.

    Attributes:
        part: `late`, `disagree` or `healthy`.
        what: The kind of job, the fault, or the number of steps.
        found: Of `injected_delays`, `injected_disagreement` or `healthy`, as JSON has it.
        machine: On which, and when.
        load: Of the machine, over the last five minutes of it.
    """

    part: str
    what: str
    found: Any
    machine: str = field(default_factory=machine_line)
    load: float = field(default_factory=lambda: round(os.getloadavg()[1], 1))

    @property
    def row(self) -> str:
        """Of the table."""
        if self.part == "late":
            return delay_row(self.what, delays_of(self.found))
        if self.part == "disagree":
            return disagreement_row(self.what, self.found)
        named, seconds = self.found
        return healthy_row(int(self.what), [NamedRank(**each) for each in named], seconds)


class Outcomes:
    """The outcomes so far, in a data file and of this run.

    Args:
        data: The file; None keeps them for this run alone.
    """

    def __init__(self, data: Path | None) -> None:
        lines = data.read_text().splitlines() if data is not None and data.exists() else []
        self.all = [Outcome(**json.loads(line)) for line in lines]
        self._data = data

    def missing(self, part: str, whats: Sequence[str]) -> list[str]:
        """Of these what is still to be run."""
        known = {each.what for each in self.all if each.part == part}
        return [each for each in whats if each not in known]

    def add(self, outcome: Outcome) -> None:
        """Keeps, shows, and writes down one more."""
        self.all.append(outcome)
        print(outcome.row, flush=True)
        if self._data is not None:
            with self._data.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")


def with_table(page: str, outcomes: Sequence[Outcome]) -> str:
    """A page with the table between its two marks.

    Args:
        page: Markdown, with `BEGIN` and `END`.
        outcomes: A row each.

    Raises:
        ValueError: The page has no such marks.
    """
    order = {part: place for place, part in enumerate(PARTS)}
    rows = [each.row for each in sorted(outcomes, key=lambda each: order[each.part])]
    loads = [each.load for each in outcomes]
    machines = "; ".join(dict.fromkeys(each.machine for each in outcomes))
    where = f"{RANKS} ranks over gloo, `{COMMAND}`, {machines}, at a load of {min(loads):.0f} to {max(loads):.0f}."
    table = "\n".join(["| injected | said |", "|---|---|", *rows])
    return put_between(page, f"{table}\n\n{where}", BEGIN, END)


def main() -> None:
    """Runs all of it, or the parts that are asked for."""
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
    """Ranks, drawn so that none follows itself."""
    ranks = [drawn.randrange(RANKS)]
    while len(ranks) < count:
        ranks.append((ranks[-1] + drawn.randrange(1, RANKS)) % RANKS)
    return ranks


if __name__ == "__main__":
    main()
