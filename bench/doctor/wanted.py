"""Options of an examination, and how `--script` runs are merged into its facts. Needs no torch."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gradwire.bench.doctor.facts import DEFAULT_GRADIENT_NBYTES, JobFacts, ScriptRun
from gradwire.topology.wording import listed

left_behind: list[threading.Thread] = []
"""Threads still in gloo's connect at the end of the examination; the process must exit without joining them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Options of an examination, from the command line."""

    gradient_nbytes: int | None = None
    """Bytes of all gradients; None if not given."""
    step_seconds: float | None = None
    """Seconds of a step of the user's training on all nodes; None if not given."""
    link_bytes_per_second: float | None = None
    """Rate that a node's link should have in one direction; None if not given."""
    script: tuple[str, ...] = ()
    """Script to run and its arguments; empty for none."""
    seconds: float = 45.0
    """Approximate length of the examination, without the run of the user's script."""
    show_progress: Callable[[str], None] = field(default=lambda text: None)
    """Callback with a line of progress."""


def with_script(facts: JobFacts, wanted: Wanted, runs: Sequence[ScriptRun]) -> JobFacts:
    """Returns a job's facts with the options of the command line and the runs of `--script` added.

    For each fact the command line comes first, then the script:

    - `gradient_nbytes`: `--gradient-mb`, else the largest of all ranks' runs, else `DEFAULT_GRADIENT_NBYTES` (100 MB).
    - `step_seconds`: `--step-seconds`, else the longest of all ranks' runs, else None.
    - `link_bytes_per_second`: `--link`, else None.
    - `script_runs`, `script_status`: the runs, and the exit status of the run that failed first; 0 if none failed.
    - `notes`: one more for the error of the run that failed first or, if none failed, of rank 0's run, if it has one.

    Args:
        facts: Measurements of the job.
        wanted: Options of the command line.
        runs: Runs of the script, by rank; empty if none was run.
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
    """Returns a note on the error of a run of the script, with the line at which each rank stood if it did not end.

    Args:
        run: Run with the error. Its rank is named if it has failed and there are several.
        runs: Runs of all ranks, in their order.
    """
    whose = f" on rank {runs.index(run)}" if run.status and len(runs) > 1 else ""
    places: dict[str, list[int]] = {}
    for rank, each in enumerate(runs):
        if each.stands:
            places.setdefault(each.stands, []).append(rank)
    found = "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} stood at {place}" for place, ranks in places.items()
    )
    return f"`--script`{whose}: {run.error}" + (f"; {found}" if found else "")
