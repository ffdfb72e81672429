"""Report of the self-test: printed with failures first, and as JSON for an issue."""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from gradwire.bench.selftest.checks import FAIL, PASS, SKIPPED, SelftestResult
from gradwire.bench.selftest.kernel_checks import KernelBandwidth
from gradwire.bench.selftest.run import SelftestFindings
from gradwire.bench.terminal import right_columns

WIDTH = 80
"""Columns of the report: fewer than any terminal has, and few enough for an issue without a scroll bar."""
SLOW = 0.5
"""Share of a copy's bandwidth below which kernels are in the printed table; the JSON has all."""


def exit_status(findings: SelftestFindings) -> int:
    """Returns the exit status of the command: 1 if a check failed, else 0. A skipped check is no failure."""
    return int(any(each.outcome == FAIL for each in findings.checks))


def as_record(findings: SelftestFindings, took_seconds: float) -> dict[str, object]:
    """Returns the whole report as a JSON object, for an issue.

    Args:
        findings: Findings of all parts.
        took_seconds: Seconds since the start of the command.
    """
    return {
        "kind": "selftest",
        "exit_status": exit_status(findings),
        "seconds": round(took_seconds, 1),
        **findings.facts,
        "not_run": findings.notes,
        "coverage": {
            kind: {"touched": len(each.all) - len(each.missing), "all": len(each.all), "missing": each.missing}
            for kind, each in findings.coverage.items()
        },
        "checks": [_short_record(each) for each in findings.checks],
        "losses": {name: [round(loss, 4) for loss in losses] for name, losses in findings.losses.items()},
        "bandwidth": [asdict(each) for each in findings.bandwidths],
    }


def _short_record(check: SelftestResult) -> dict[str, object]:
    """Returns a check as a JSON object without its empty fields, so that the whole report fits into an issue."""
    record = asdict(check) | {"seconds": round(check.seconds, 3)}
    return {name: value for name, value in record.items() if value not in ("", None)}


def print_report(findings: SelftestFindings, console: Console, took_seconds: float) -> None:
    """Prints the report: failures, skipped checks, tables of the parts and of the slowest kernels, coverage.

    Args:
        findings: Findings of all parts.
        console: Console to print to.
        took_seconds: Seconds since the start of the command.
    """
    counts = {outcome: sum(each.outcome == outcome for each in findings.checks) for outcome in (FAIL, PASS, SKIPPED)}
    console.print(
        f"gradwire selftest: {counts[FAIL]} failed, {counts[PASS]} passed, {counts[SKIPPED]} skipped, "
        f"{took_seconds:.0f} s"
    )
    for line in _report_lines(findings):
        console.print(Text(line))
    console.print(_table_of_parts(findings.checks))
    for each in findings.coverage.values():
        console.print(Text(f"touched {each.words()}"))
        if each.missing and each.touched:
            _wrapped(console, f"not touched: {', '.join(each.missing)}")
    if findings.bandwidths:
        rows = sorted(findings.bandwidths, key=lambda each: each.of_copy)
        shown = [each for each in rows if each.of_copy < SLOW] or rows[:5]
        console.print(f"{len(rows)} kernels beside a copy of as many bytes; the {len(shown)} slowest:")
        console.print(_table_of_bandwidths(shown))


def _report_lines(findings: SelftestFindings) -> Iterator[str]:
    """Yields lines on the checks that failed or were skipped, on what was not run, and on the machine."""
    for outcome, word in ((FAIL, "FAILED"), (SKIPPED, "skipped")):
        reasons: dict[tuple[str, str], list[str]] = {}
        for each in findings.checks:
            if each.outcome == outcome:
                reasons.setdefault((each.part, each.reason), []).append(each.name)
        for (part, reason), names in reasons.items():
            yield ""
            what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            yield from textwrap.wrap(f"{word}: {part}: {what}", WIDTH)
            for line in reason.splitlines():
                yield from textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="  ")
    for note in findings.notes:
        yield ""
        yield from textwrap.wrap(f"not run: {note}", WIDTH, subsequent_indent="  ")
    if "machine" in findings.facts:
        yield ""
        yield from textwrap.wrap(str(findings.facts["machine"]), WIDTH)


def _wrapped(console: Console, text: str) -> None:
    for line in textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  "):
        console.print(Text(line))


def _table_of_parts(checks: list[SelftestResult]) -> Table:
    figures = right_columns("failed", "passed", "skipped", "worst difference", "s")
    table = Table(Column("part", no_wrap=True), *figures, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for part in dict.fromkeys(each.part for each in checks):
        own = [each for each in checks if each.part == part]
        worst = [each.worst_difference for each in own if each.worst_difference is not None]
        table.add_row(
            part,
            *(str(sum(each.outcome == outcome for each in own)) for outcome in (FAIL, PASS, SKIPPED)),
            f"{max(worst):.2g}" if worst else "-",
            f"{sum(each.seconds for each in own):.1f}",
        )
    return table


def _table_of_bandwidths(rows: list[KernelBandwidth]) -> Table:
    columns = Column("kernel", no_wrap=True), *right_columns("MB", "us", "GB/s", "of a copy")
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        rate = row.nbytes / row.seconds / 1e9
        figures = (f"{row.nbytes / 1e6:.1f}", f"{row.seconds * 1e6:.1f}", f"{rate:.0f}", f"{row.of_copy:.2f}")
        table.add_row(row.kernel, *figures)
    return table
