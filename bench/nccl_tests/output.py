"""Output of a run: the text of nccl-tests, its JSON (file version 3), and CSV."""

import argparse
import csv
import dataclasses
import datetime
import sys
from pathlib import Path

from gradwire.bench.nccl_tests.checks import CodingLoss
from gradwire.bench.nccl_tests.ranks import World
from gradwire.bench.nccl_tests.rows import IterationTimes, RowHalf, TableRow
from gradwire.bench.terminal import fitting_width

MIN_BANDWIDTH_SHARE = 0.9
"""Share of NCCL_TESTS_MIN_BW below which the mean bandwidth makes a run fail, as in nccl-tests."""

_TIME_WIDTH, _RATE_WIDTH = 7, 6


def number_text(value: float, width: int) -> str:
    """Formats a number with two decimals, or as many as fit into `width`, right-justified and without an exponent."""
    for decimals in (2, 1, 0):
        text = f"{value:{width}.{decimals}f}"
        if len(text) <= width:
            return text
    return text


def plain_number(value: float) -> str:
    """Formats a number with six significant digits, as C's %g does, but without an exponent."""
    text = f"{value:g}"
    return text if "e" not in text else f"{value:.12f}".rstrip("0").rstrip(".") if abs(value) < 1 else f"{value:.0f}"


def opening(collective: str, options: argparse.Namespace, version: str) -> list[str]:
    """Returns the first lines of a table: the collective and the flags of the run."""
    step = f"{plain_number(options.stepfactor)}(factor)" if options.stepfactor > 1 else f"{options.stepbytes}(bytes)"
    return [
        f"# gradwire bench {version}, output as nccl-tests version 2.19",
        f"# Collective test starting: {collective}",
        (
            f"# nThread 1 nGpus {options.ngpus or 1} minBytes {options.minbytes} maxBytes {options.maxbytes} "
            f"step: {step} warmup iters: {options.warmup_iters} iters: {options.iters} agg iters: {options.agg_iters} "
            f"validation: {options.check} graph: {options.cudagraph} unalign: 0"
        ),
        "#",
    ]


def devices(world: World, device_name: str) -> list[str]:
    """Returns the lines that list the ranks: process, host and device of each.

    Args:
        world: All ranks.
        device_name: Name of the device, which is taken to be the same on all ranks.
    """
    return (
        ["# Using devices"]
        + [
            f"#  Rank {info.rank:2d} Group  0 Pid {info.pid:6d} on {info.hostname:>10s} device {info.local_rank:2d} "
            f"[0000:00:00] {device_name}"
            for info in world.ranks
        ]
        + ["#"]
    )


def facts(pairs: dict[str, str]) -> list[str]:
    """Returns facts as lines `# key: value`, without the words by which parsers find other lines.

    Args:
        pairs: Key -> value, of one or more lines.
    """
    lines = []
    for key, value in pairs.items():
        first, *rest = value.splitlines() or [""]
        lines += [f"# {key}: {first}", *(f"#   {line}" for line in rest)]
    return [
        line.replace("bandwidth", "data rate").replace("out-of-place", "apart").replace("FAILED", "failed")
        for line in lines
    ]


def compact_fits_better(options: argparse.Namespace) -> bool:
    """Returns whether rows should be shortened: stdout is a terminal on which those of nccl-tests would wrap.

    Pipes get the full rows, because parsers expect them; so do -I and -S, whose columns the short rows do not have.
    """
    plain = not (options.per_iter_timing or options.report_timestamps)
    return plain and sys.stdout.isatty() and fitting_width() < len(header(options)[2])


def header(options: argparse.Namespace, *, compact: bool = False) -> list[str]:
    """Returns the lines above the columns.

    Args:
        options: Options of the command line.
        compact: Whether rows are shortened to 80 columns, without count, operation and root.
    """
    if compact:
        return [
            "#",
            f"# {'size':>10s} {'type':>8s} {'out-of-place':^28s} {'in-place':^28s}".rstrip(),
            f"# {'(B)':>10s} {'':>8s}" + f" {'(us)':>7s} {'algbw':>6s} {'busbw':>6s} {'#wrong':>6s}" * 2,
        ]
    time = "cputime" if options.report_cputime else "time"
    extra = f" {'i_min':>8s}  {'i_max':>8s}  {'i_p99':>8s}  {'i_cv%':>6s}" if options.per_iter_timing else ""
    extra_units = f" {'(us)':>8s}  {'(us)':>8s}  {'(us)':>8s}  {'(%)':>6s}" if options.per_iter_timing else ""
    stamp = f" {'timestamp':>19s}" if options.report_timestamps else ""
    gap = " " * 10
    return [
        "#",
        (
            f"# {'':>10s}  {'':>12s}  {'':>8s}  {'':>6s}  {'':>6s}           out-of-place           {' ' * len(extra)}"
            f"            in-place{gap}"
        ),
        f"# {'size':>10s}  {'count':>12s}  {'type':>8s}  {'redop':>6s}  {'root':>6s}"
        + f"  {time:>7s}  {'algbw':>6s}  {'busbw':>6s}  {'#wrong':>6s}{extra}" * 2
        + stamp,
        f"# {'(B)':>10s}  {'(elements)':>12s}  {'':>8s}  {'':>6s}  {'':>6s}"
        + f"  {'(us)':>7s}  {'(GB/s)':>6s}  {'(GB/s)':>6s}  {'':>6s}{extra_units}" * 2,
    ]


def row_line(row: TableRow, options: argparse.Namespace, *, compact: bool = False) -> str:
    """Returns the line of a row: 13 words, more only with -I or -S.

    Args:
        row: Measurements of the row.
        options: Options of the command line.
        compact: Whether rows are shortened, see `header`.
    """
    if compact:
        return f"{row.nbytes:12d} {row.element:>8s}{_half(row.out_of_place, ' ')}{_half(row.in_place, ' ')}"
    line = (
        f"{row.nbytes:12d}  {row.count:12d}  {row.element:>8s}  {row.operation:>6s}  {row.root:6d}"
        + _half(row.out_of_place)
        + _half(row.in_place)
    )
    if options.report_timestamps:
        line += f" {datetime.datetime.now().astimezone():%Y-%m-%d %H:%M:%S}"
    return line


def _half(half: RowHalf, gap: str = "  ") -> str:
    wrong = f"{half.wrong:6d}" if half.wrong is not None else "   N/A"
    text = (
        f"{gap}{number_text(half.timing.seconds * 1e6, _TIME_WIDTH)}{gap}{number_text(half.algbw, _RATE_WIDTH)}"
        f"{gap}{number_text(half.busbw, _RATE_WIDTH)}{gap}{wrong}"
    )
    each = half.timing.iterations
    if each is None:
        return text
    p99 = each.percentile(99)
    return (
        text
        + "".join(f" {number_text(seconds * 1e6, 8)} " for seconds in (min(each.seconds), max(each.seconds), p99))
        + f" {number_text(each.variation, 6)}"
    )


def mean_busbw(rows: list[TableRow]) -> float:
    """Returns the mean of all busbw values of both halves, in GB/s; 0 without rows."""
    values = [half.busbw for row in rows for half in (row.out_of_place, row.in_place)]
    return sum(values) / len(values) if values else 0.0


def too_slow(rows: list[TableRow], wanted: float | None) -> bool:
    """Returns whether the mean bandwidth is below `MIN_BANDWIDTH_SHARE` of the wanted one.

    Args:
        rows: Rows of a table.
        wanted: Value of NCCL_TESTS_MIN_BW in GB/s; None without it, for which nothing is too slow.
    """
    return wanted is not None and mean_busbw(rows) < MIN_BANDWIDTH_SHARE * wanted


def closing(collective: str, rows: list[TableRow], wanted: float | None) -> list[str]:
    """Returns the last lines of a table: the number of wrong elements, and the mean bandwidth.

    Args:
        collective: Name of the collective.
        rows: Rows of the table.
        wanted: Value of NCCL_TESTS_MIN_BW in GB/s; None without it.
    """
    wrong = sum(row.wrong for row in rows)
    verdict = "" if wanted is None else " FAILED" if too_slow(rows, wanted) else " OK"
    return [
        f"# {'Out of bounds values':<20s} : {wrong} {'OK' if not wrong else 'FAILED'}",
        f"# {'Avg bus bandwidth':<20s} : {plain_number(mean_busbw(rows))}{verdict}",
        "#",
        f"# Collective test concluded: {collective}",
        "#",
    ]


FILE_VERSION = 3
"""Version of nccl-tests' JSON format."""

Json = dict[str, object]


@dataclasses.dataclass(slots=True)
class BenchBlock:
    """Table of one backend, with one plan and compressor, in one cycle of -N.

    Attributes:
        facts: Facts that are printed around the table: key -> value.
        rows: Rows of the table.
        losses: Errors and bytes of the compressor, in the order of the rows; empty without one.
    """

    facts: dict[str, str]
    rows: list[TableRow] = dataclasses.field(default_factory=list)
    losses: list[CodingLoss] = dataclasses.field(default_factory=list)


def now() -> str:
    """Returns the date and time in ISO 8601, with the time zone."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def fresh_name(path: Path) -> Path:
    """Returns the first of `path`, `path.0`, `path.1` ... that does not exist; like nccl-tests, it overwrites nothing.

    Args:
        path: Name of the file that the user gave.
    """
    number, candidate = 0, path
    while candidate.exists():
        candidate = path.with_name(f"{path.name}.{number}")
        number += 1
    return candidate


def to_json(
    blocks: list[BenchBlock],
    options: argparse.Namespace,
    world: World,
    device: str,
    *,
    argv: list[str],
    started: str,
    wanted: float | None,
    version: str,
    machine: str,
) -> Json:
    """Returns the JSON object of a run: nccl-tests' fields, with the rows of all blocks in one list, and gradwire's.

    Args:
        blocks: All tables.
        options: Options of the command line.
        world: All ranks.
        device: Name of the device.
        argv: Words of the command line after `bench`.
        started: Date and time of the run's start.
        wanted: Value of NCCL_TESTS_MIN_BW in GB/s; None without it.
        version: Version of gradwire.
        machine: Description of the machine.
    """
    # The run passes if no block is slower than the wanted bandwidth.
    rows = [row for block in blocks for row in block.rows]
    wrong = sum(row.wrong for row in rows)
    okay = "unchecked" if wanted is None else not any(too_slow(block.rows, wanted) for block in blocks)
    return {
        "version": FILE_VERSION,
        "start_time": started,
        "args": ["gradwire", "bench", *argv],
        "gradwire_version": version,
        "machine": machine,
        "config": _config(options, world, device),
        "results": [
            _row_json(row, options.collective, number) for number, block in enumerate(blocks) for row in block.rows
        ],
        "blocks": [
            {
                "facts": block.facts,
                "average_bus_bandwidth": mean_busbw(block.rows),
                "lossy": [dataclasses.asdict(loss) for loss in block.losses],
            }
            for block in blocks
        ],
        "out_of_bounds": {"count": wrong, "okay": wrong == 0},
        "average_bus_bandwidth": {"bandwidth": mean_busbw(rows), "okay": okay},
        "errors": [],
        "end_time": now(),
    }


def write_csv(path: Path, blocks: list[BenchBlock], collective: str) -> None:
    """Writes a CSV file with a line for each half of each row.

    Args:
        path: File to create; it must not exist.
        blocks: Tables, with at least one row in total.
        collective: Name of the collective.
    """
    lines: list[Json] = [
        {
            "collective": collective,
            **{key: block.facts.get(key, "") for key in ("backend", "algorithm", "compressor")},
            "size_bytes": row.nbytes,
            "count": row.count,
            "type": row.element,
            "redop": row.operation,
            "root": row.root,
            "in_place": place,
            "time_us": half.timing.seconds * 1e6,
            "algbw_GBps": half.algbw,
            "busbw_GBps": half.busbw,
            "wrong": half.wrong,
        }
        for block in blocks
        for row in block.rows
        for place, half in enumerate((row.out_of_place, row.in_place))
    ]
    with path.open("x", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)


def _config(options: argparse.Namespace, world: World, device: str) -> Json:
    step: Json = {"step_factor": options.stepfactor} if options.stepfactor > 1 else {"step_bytes": options.stepbytes}
    return {
        "nthreads": 1,
        "ngpus": options.ngpus or 1,
        "minimum_bytes": options.minbytes,
        "maximum_bytes": options.maxbytes,
        **step,
        "warmup_iters": options.warmup_iters,
        "iterations": options.iters,
        "aggregated_iterations": options.agg_iters,
        "validation": options.check,
        "graph": options.cudagraph,
        "blocking_collectives": "true" if options.blocking else "false",
        "per_iter_timing": options.per_iter_timing,
        "per_iter_skip": options.per_iter_skip,
        "parallel_init": options.parallel_init,
        "devices": [
            {
                "rank": info.rank,
                "group": 0,
                "pid": info.pid,
                "hostname": info.hostname,
                "device": info.local_rank,
                "device_hex": "0000:00:00",
                "device_info": device,
            }
            for info in world.ranks
        ],
    }


def _row_json(row: TableRow, collective: str, block: int) -> Json:
    found: Json = {
        "size": row.nbytes,
        "count": row.count,
        "type": row.element,
        "redop": row.operation,
        "root": str(row.root),
        "out_of_place": _half_json(row.out_of_place),
        "in_place": _half_json(row.in_place),
    }
    for name, half in (("out_of_place", row.out_of_place), ("in_place", row.in_place)):
        if half.timing.iterations is not None:
            found[f"{name}_per_iter"] = _iterations_json(half.timing.iterations)
    return found | {"experiment_name": collective, "block": block}


def _half_json(half: RowHalf) -> Json:
    return {"time": half.timing.seconds * 1e6, "alg_bw": half.algbw, "bus_bw": half.busbw, "nwrong": half.wrong}


def _iterations_json(each: IterationTimes) -> Json:
    return {
        "skipped_iterations": each.skipped,
        "min_us": min(each.seconds) * 1e6,
        "max_us": max(each.seconds) * 1e6,
        "avg_us": each.mean * 1e6,
        "p50_us": each.percentile(50) * 1e6,
        "p95_us": each.percentile(95) * 1e6,
        "p99_us": each.percentile(99) * 1e6,
        "stdev_us": each.deviation * 1e6,
        "cv_pct": each.variation,
        "times_us": [seconds * 1e6 for seconds in each.seconds],
        "per_process_max_times_us": [[seconds * 1e6 for seconds in rank] for rank in each.by_rank],
    }
