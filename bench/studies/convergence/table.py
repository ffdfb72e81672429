"""The results as Markdown tables."""

from collections.abc import Sequence
from pathlib import Path

from gradwire.bench.studies.convergence.methods import METHODS, PLAIN
from gradwire.bench.studies.convergence.reach import ending, plain_runs, seconds_to, steps_of, target
from gradwire.bench.studies.convergence.record import Record, Speed
from gradwire.bench.studies.convergence.speed import LINKS
from gradwire.bench.studies.convergence.tasks import TASKS, Facts

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
"""Between them a page holds the tables."""


def replace_tables(page: Path, text: str) -> None:
    """Puts `text` where a page holds its tables.

    Raises:
        ValueError: The page has no such place.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"`--page` {page} has no lines `{BEGIN}` and `{END}`; put them where the tables belong")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def tables(record: Record) -> str:
    """Returns a heading, a line of facts and a table for each task that was trained."""
    parts = []
    for make in TASKS.values():
        facts = make().facts
        if record.runs_of(facts.name, PLAIN):
            parts.append(
                "\n".join([f"### {facts.title}", "", _introduction(record, facts), "", *_table(record, facts)])
            )
    return "\n\n".join([*parts, f"Machine: {record.machine}."])


def _introduction(record: Record, facts: Facts) -> str:
    wanted = target(record, facts)
    text = (
        f"{facts.steps} steps; quality: {facts.quality}. To reach: "
        f"{wanted:.2f}, which is plain DDP's mean within {facts.tolerance:g}."
    )
    for speed in _speeds(record, facts):
        share = 1.0 - speed.free_seconds / speed.seconds(PLAIN)
        text += (
            f" On {speed.nic} links plain DDP spends {share:.0%} of its step on communication "
            f"({speed.free_seconds:.3f} s without a limit)."
        )
    return text


def _speeds(record: Record, facts: Facts) -> list[Speed]:
    return [speed for share in LINKS if (speed := record.speed_of(facts.name, share)) is not None]


def _table(record: Record, facts: Facts) -> list[str]:
    speeds = _speeds(record, facts)
    lines = [
        _line(
            [
                "method",
                "final",
                "against plain DDP",
                "lowest to highest",
                "seeds",
                "steps to reach",
                *(word for speed in speeds for word in (f"s per step, {speed.nic}", "time to quality", "speed-up")),
            ]
        )
    ]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    missing = [method.name for method in METHODS[facts.optimizer] if not record.runs_of(facts.name, method.name)]
    for method in METHODS[facts.optimizer]:
        if method.name in missing:
            continue
        runs = record.runs_of(facts.name, method.name)
        end = ending(runs)
        steps = steps_of(record, facts, method.name)
        apart = end.mean - ending(plain_runs(record, facts.name, method.name)).mean
        lines.append(
            _line(
                [
                    method.name,
                    f"{end.mean:.2f}",
                    f"{apart:+.2f}",
                    f"{end.low:.2f} to {end.high:.2f}",
                    f"{len(runs)}",
                    "never" if steps is None else f"{steps:.0f}",
                    *(word for speed in speeds for word in _times(record, facts, method.name, speed)),
                ]
            )
        )
    return lines + (["", f"Not trained yet: {'; '.join(missing)}."] if missing else [])


def _times(record: Record, facts: Facts, method: str, speed: Speed) -> tuple[str, str, str]:
    per_step = f"{speed.seconds(method):.3f}"
    seconds, plain = seconds_to(record, facts, method, speed), seconds_to(record, facts, PLAIN, speed)
    if seconds is None or plain is None:
        return per_step, "never", ""
    return per_step, f"{seconds:.0f} s", f"{plain / seconds:.2f}x"


def _line(words: Sequence[str]) -> str:
    return f"| {' | '.join(words)} |"
