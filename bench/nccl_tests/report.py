"""Standard output in the format of nccl-tests, which public parsers read (SuperBench, CloudAI, AWS, Azure NHC).

What they rely on: 13 words in a row, which starts with a digit, as no other line does; a header with `time` and
`busbw`, the only line with `out-of-place`; one line with `bandwidth`, whose last word is the number; numbers without
exponents; and the word FAILED on failure alone.

Source: nccl-tests, src/util.cu and src/common.cu, for the layout of the lines.
"""

import argparse
import datetime

from gradwire.bench.nccl_tests.ranks import World
from gradwire.bench.nccl_tests.table import Half, Row

MIN_BANDWIDTH_SHARE = 0.9
"""nccl-tests fails a run whose average is below this share of NCCL_TESTS_MIN_BW."""

_TIME_WIDTH, _RATE_WIDTH = 7, 6


def number_text(value: float, width: int) -> str:
    """As many of two decimals as fit into `width`, right-justified; never an exponent."""
    for decimals in (2, 1, 0):
        text = f"{value:{width}.{decimals}f}"
        if len(text) <= width:
            return text
    return text


def plain_number(value: float) -> str:
    """Six significant digits, as C's %g gives them, but without an exponent."""
    text = f"{value:g}"
    return text if "e" not in text else f"{value:.12f}".rstrip("0").rstrip(".") if abs(value) < 1 else f"{value:.0f}"


def opening(collective: str, options: argparse.Namespace, version: str) -> list[str]:
    """The first lines: what runs, with which flags."""
    step = f"{plain_number(options.stepfactor)}(factor)" if options.stepfactor > 1 else f"{options.stepbytes}(bytes)"
    return [
        f"# gradwire bench {version}, output as nccl-tests version 2.19",
        f"# Collective test starting: {collective}",
        (
            f"# nThread 1 nGpus {options.ngpus or 1} minBytes {options.minbytes} maxBytes {options.maxbytes} step: {step} "
            f"warmup iters: {options.warmup_iters} iters: {options.iters} agg iters: {options.agg_iters} "
            f"validation: {options.check} graph: {options.cudagraph} unalign: 0"
        ),
        "#",
    ]


def devices(world: World, device_name: str) -> list[str]:
    """One line a rank."""
    return (
        ["# Using devices"]
        + [
            f"#  Rank {seat.rank:2d} Group  0 Pid {seat.pid:6d} on {seat.hostname:>10s} device {seat.local_rank:2d} "
            f"[0000:00:00] {device_name}"
            for seat in world.seats
        ]
        + ["#"]
    )


def facts(pairs: dict[str, str]) -> list[str]:
    """`# key: value` lines; words that parsers look for are kept out of them."""
    lines = []
    for key, value in pairs.items():
        first, *rest = value.splitlines() or [""]
        lines += [f"# {key}: {first}", *(f"#   {line}" for line in rest)]
    return [
        line.replace("bandwidth", "data rate").replace("out-of-place", "apart").replace("FAILED", "failed")
        for line in lines
    ]


def header(options: argparse.Namespace) -> list[str]:
    """The heading of the columns."""
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


def row_line(row: Row, options: argparse.Namespace) -> str:
    """One row: 13 words, more only with -I or -S."""
    line = (
        f"{row.nbytes:12d}  {row.count:12d}  {row.element:>8s}  {row.operation:>6s}  {row.root:6d}"
        + _half(row.out_of_place)
        + _half(row.in_place)
    )
    if options.report_timestamps:
        line += f" {datetime.datetime.now().astimezone():%Y-%m-%d %H:%M:%S}"
    return line


def _half(half: Half) -> str:
    wrong = f"{half.wrong:6d}" if half.wrong is not None else "   N/A"
    text = (
        f"  {number_text(half.timing.seconds * 1e6, _TIME_WIDTH)}  {number_text(half.algbw, _RATE_WIDTH)}"
        f"  {number_text(half.busbw, _RATE_WIDTH)}  {wrong}"
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


def mean_busbw(rows: list[Row]) -> float:
    """The mean of all busbw values of both halves, in GB/s."""
    values = [half.busbw for row in rows for half in (row.out_of_place, row.in_place)]
    return sum(values) / len(values) if values else 0.0


def too_slow(rows: list[Row], wanted: float | None) -> bool:
    """Whether the mean misses what NCCL_TESTS_MIN_BW asks for."""
    return wanted is not None and mean_busbw(rows) < MIN_BANDWIDTH_SHARE * wanted


def closing(collective: str, rows: list[Row], wanted: float | None) -> list[str]:
    """The last lines: wrong elements, the mean, the end."""
    wrong = sum(row.wrong for row in rows)
    verdict = "" if wanted is None else " FAILED" if too_slow(rows, wanted) else " OK"
    return [
        f"# {'Out of bounds values':<20s} : {wrong} {'OK' if not wrong else 'FAILED'}",
        f"# {'Avg bus bandwidth':<20s} : {plain_number(mean_busbw(rows))}{verdict}",
        "#",
        f"# Collective test concluded: {collective}",
        "#",
    ]
