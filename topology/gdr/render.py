"""A report as a table for people and as JSON for machines."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from gradwire.topology.gdr.host import Host, Pair
from gradwire.topology.gdr.inputs.nccl_log import NcclLog
from gradwire.topology.gdr.model import CheckOutcome, CheckResult, Verdict
from gradwire.topology.gdr.runner import GdrReport, usable_gpus
from gradwire.topology.gdr.stages.basis import HOLDS, source_of
from gradwire.topology.readers.affinity import ranges

DIRECTIONS = ("send", "receive")

_STYLES = {
    CheckOutcome.PASS: "green",
    CheckOutcome.INFO: "cyan",
    CheckOutcome.WARN: "yellow",
    CheckOutcome.FAIL: "bold red",
    CheckOutcome.UNKNOWN: "magenta",
    CheckOutcome.SKIPPED: "dim",
}
_FORMAT = 1
_LENGTH = 600


def _plain(text: str) -> str:
    """Escapes markup and control characters in a text (a capture may come from anybody), and cuts it to 600."""
    return escape("".join(c if c.isprintable() else "?" for c in text[:_LENGTH]))


def _coloured(outcome: CheckOutcome) -> str:
    return f"[{_STYLES[outcome]}]{outcome.upper()}[/]"


def print_report(host: Host, report: GdrReport, console: Console, all_pairs: bool = False) -> None:
    """Prints checks, channels of the log, pairs, verdicts, and the first cause with its fix.

    Args:
        host: The machine as it was read.
        report: Results of the checks on this host.
        console: Console to print to.
        all_pairs: True prints every pair, not only each GPU's nearest NICs.
    """
    if report.nothing:
        but = " here but what was given" if report.results else ""
        console.print(f"[bold]nothing to check{but}[/]: {_plain(report.nothing)}")
    if report.results:
        console.print(_check_table(report))
    if host.log is not None and host.log.network_channels:
        console.print(_channel_table(host.log))
    if report.pairs:
        console.print(_pair_table(host, report, list(report.pairs) if all_pairs else list(host.best_pairs)))
        for verdict, judgement in report.verdicts.items():
            console.print(f"[bold]{verdict.upper():<11}[/]{_coloured(judgement.outcome)}  {_plain(judgement.text)}")
        good, unsure, count = usable_gpus(host, report)
        unclear = f", unknown for {unsure}" if unsure else ""
        console.print(f"{good} of {count} GPUs have a pair that will use GPUDirect RDMA{unclear}")
    if report.cause is not None:
        console.print(f"[bold red]first cause[/]: {report.cause.check.name} {_plain(report.cause.finding.text)}")
        if report.cause.finding.fix:
            console.print(f"[bold]fix[/] (not applied): {_plain(report.cause.finding.fix)}")
            console.print(f"[bold]if[/]: {_plain(_basis(report.cause))}")


def _basis(result: CheckResult) -> str:
    """Returns the condition under which a check's fix helps, and its source in brackets."""
    return f"{HOLDS[result.check.name]} [{source_of(result.check)}]"


def _table(title: str, *headings: str) -> Table:
    """Returns an empty table for 80 columns: no lines between columns, long texts folded inside their cell."""
    columns = [Column(str(heading), overflow="fold") for heading in headings]
    return Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _check_table(report: GdrReport) -> Table:
    table = _table("GPUDirect RDMA checklist; fixes are not applied", "", "check", "outcome", "found")
    for result in report.results:
        finding = result.finding
        found = _plain(finding.text) + (f"\n[bold]fix:[/] {_plain(finding.fix)}" if finding.fix else "")
        if finding.fix and finding.outcome in (CheckOutcome.WARN, CheckOutcome.FAIL) and result != report.cause:
            found += f"\n[bold]if:[/] {_plain(_basis(result))}"  # that of the first cause stands below
        table.add_row(result.check.name, result.check.title, _coloured(finding.outcome), found)
    return table


def _channel_table(log: NcclLog) -> Table:
    table = _table("channels with GDRDMA", "ranks", *DIRECTIONS)
    for row in channel_rows(log):
        table.add_row(*row)
    return table


def _pair_table(host: Host, report: GdrReport, pairs: list[Pair]) -> Table:
    table = _table("pairs", "GPU", "NIC", "path", *Verdict, "because")
    names = {nic.bus_id: nic.name for nic in host.nics}
    for pair in pairs:
        judgements = report.pairs[pair]
        decisive = next(
            (a for a in judgements.values() if a.outcome not in (CheckOutcome.PASS, CheckOutcome.SKIPPED)), None
        )
        table.add_row(
            f"{host.gpu_names.get(pair[0], '')}\n{pair[0]}",
            pair[1] if names[pair[1]] == pair[1] else f"{_plain(names[pair[1]])}\n{pair[1]}",
            host.distances[pair] or "?",
            *(_coloured(judgements[verdict].outcome) for verdict in Verdict),
            _plain(decisive.text) if decisive else "",
        )
    return table


def report_json(host: Host, report: GdrReport, status: int) -> dict[str, object]:
    """Returns the report as plain data for JSON.

    Args:
        host: The machine as it was read.
        report: Results of the checks on this host.
        status: Exit code of the command, from `exit_code`.
    """
    good, unsure, count = usable_gpus(host, report)
    version = host.nccl_version
    return {
        "tool": "gradwire gdr-check",
        "format": _FORMAT,
        "exit": status,
        "nothing": report.nothing or None,
        "gpus": {"count": count, "will_use_gdr": good, "unknown": unsure},
        "verdicts": {str(verdict): str(judgement.outcome) for verdict, judgement in report.verdicts.items()},
        "because": {str(verdict): judgement.text for verdict, judgement in report.verdicts.items()},
        "cause": None if report.cause is None else report.cause.check.name,
        "versions": {
            "nccl": ".".join(map(str, version)) if version else None,
            "driver": host.facts.driver_version,
            "kernel": host.facts.kernel,
            "ofed": host.facts.ofed_version,
        },
        "checks": [
            {
                "id": result.check.name,
                "title": result.check.title,
                "verdict": result.check.verdict,
                "outcome": str(result.finding.outcome),
                "text": result.finding.text,
                "fix": result.finding.fix,
                "holds": HOLDS[result.check.name] if result.finding.fix else None,
                "source": source_of(result.check),
            }
            for result in report.results
        ],
        "channels": None if host.log is None else channel_json(host.log),
        "pairs": [_pair_json(host, report, pair) for pair in report.pairs],
    }


def _pair_json(host: Host, report: GdrReport, pair: Pair) -> dict[str, object]:
    nic = next(nic for nic in host.nics if nic.bus_id == pair[1])
    judgements = report.pairs[pair].items()
    return {
        "gpu": pair[0],
        "gpu_name": host.gpu_names.get(pair[0]),
        "nic": pair[1],
        "device": nic.name,
        "path": host.distances[pair],
        "nearest": pair in host.best_pairs,
        **{str(verdict): {"outcome": str(a.outcome), "because": a.text} for verdict, a in judgements},
    }


def channel_counts(log: NcclLog) -> dict[int, tuple[tuple[int, int], ...]]:
    """Counts network channels: rank -> ((GDRDMA, all) while sending, (GDRDMA, all) while receiving)."""
    ranks = sorted({rank for counter in (log.gdr_channels, log.staged_channels) for rank, _ in counter})
    return {
        rank: tuple(
            (
                log.gdr_channels[rank, direction],
                log.gdr_channels[rank, direction] + log.staged_channels[rank, direction],
            )
            for direction in DIRECTIONS
        )
        for rank in ranks
    }


def channel_rows(log: NcclLog) -> list[tuple[str, ...]]:
    """Returns table rows (ranks, sending, receiving), equal ranks in one: (`0-2, 5`, `8 of 8`, `0 of 8`)."""
    alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank, counts in channel_counts(log).items():
        alike.setdefault(counts, []).append(rank)
    return [
        (ranges(ranks).replace(",", ", "), *(f"{good} of {total}" if total else "-" for good, total in counts))
        for counts, ranks in alike.items()
    ]


def channel_json(log: NcclLog) -> list[dict[str, int]]:
    """Returns a row for each rank: `rank`, `send_gdr`, `send`, `receive_gdr`, `receive`."""
    return [
        {"rank": rank, "send_gdr": send[0], "send": send[1], "receive_gdr": receive[0], "receive": receive[1]}
        for rank, (send, receive) in channel_counts(log).items()
    ]
