"""What the command line asks of the doctor, and what its examinations leave behind; needs no torch."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gradwire.bench.doctor.facts import DEFAULT_GRADIENT_NBYTES, JobFacts, ScriptRun
from gradwire.topology.wording import listed

left_behind: list[threading.Thread] = []
"""Threads that still try to connect: the process must end without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the command line asks for."""

    gradient_nbytes: int | None = None
    step_seconds: float | None = None
    link_bytes_per_second: float | None = None
    script: tuple[str, ...] = ()
    seconds: float = 45.0
    """Seconds for everything; the user's script comes on top."""
    say: Callable[[str], None] = field(default=lambda text: None)
    """Called with what is being done."""


def with_script(facts: JobFacts, wanted: Wanted, runs: Sequence[ScriptRun]) -> JobFacts:
    """Takes the user's own figures: those of the command line, then those of their script, then the usual ones.

    Args:
        facts: Of the job.
        wanted: What the command line says.
        runs: Of the script, by rank; empty where none was run.
    """
    nbytes = max((run.gradient_nbytes for run in runs), default=0)
    steps = [run.step_seconds for run in runs if run.step_seconds is not None]
    failed = sorted((run for run in runs if run.status), key=lambda run: run.seconds)  # the first takes others along
    errors = tuple(_in_words(run, runs) for run in failed[:1] or runs[:1] if run.error)
    return replace(
        facts,
        gradient_nbytes=wanted.gradient_nbytes or nbytes or DEFAULT_GRADIENT_NBYTES,
        step_seconds=wanted.step_seconds if wanted.step_seconds is not None else max(steps, default=None),
        link_bytes_per_second=wanted.link_bytes_per_second,
        script_runs=tuple(runs),
        notes=(*facts.notes, *errors),
        script_status=failed[0].status if failed else 0,
    )


def _in_words(run: ScriptRun, runs: Sequence[ScriptRun]) -> str:
    """What is wrong with a script's run, on which rank, and where the ranks stood if it did not end."""
    whose = f" on rank {runs.index(run)}" if run.status and len(runs) > 1 else ""
    places: dict[str, list[int]] = {}
    for rank, each in enumerate(runs):
        if each.stands:
            places.setdefault(each.stands, []).append(rank)
    found = "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} stood at {place}" for place, ranks in places.items()
    )
    return f"`--script`{whose}: {run.error}" + (f"; {found}" if found else "")
