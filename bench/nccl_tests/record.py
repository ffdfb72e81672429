"""The run as JSON in the shape of nccl-tests' -J (file version 3), and as CSV. The environment is left out."""

import argparse
import csv
import dataclasses
import datetime
from pathlib import Path

from gradwire.bench.nccl_tests.lossy import Loss
from gradwire.bench.nccl_tests.measure import IterationTimes
from gradwire.bench.nccl_tests.ranks import World
from gradwire.bench.nccl_tests.report import mean_busbw, too_slow
from gradwire.bench.nccl_tests.table import Half, Row

FILE_VERSION = 3
"""Of nccl-tests' JSON."""

Json = dict[str, object]


@dataclasses.dataclass(slots=True)
class Block:
    """One way's table.

    Attributes:
        facts: What stood above it.
        rows: Of all cycles.
        losses: For lossy ways, by size in bytes.
    """

    facts: dict[str, str]
    rows: list[Row] = dataclasses.field(default_factory=list)
    losses: list[Loss] = dataclasses.field(default_factory=list)


def now() -> str:
    """Date and time of day with time zone."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def fresh_name(path: Path) -> Path:
    """`path`, or the first of `path.0`, `path.1` ... that does not exist: as nccl-tests, nothing is overwritten."""
    number, candidate = 0, path
    while candidate.exists():
        candidate = path.with_name(f"{path.name}.{number}")
        number += 1
    return candidate


def to_json(
    blocks: list[Block],
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
    """The whole run; rows of all blocks in one list, each with its block's number."""
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
        "results": [_row(row, options.collective, number) for number, block in enumerate(blocks) for row in block.rows],
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


def write_csv(path: Path, blocks: list[Block], collective: str) -> None:
    """One line for each row and half."""
    columns = [
        "collective",
        "backend",
        "algorithm",
        "compressor",
        "size_bytes",
        "count",
        "type",
        "redop",
        "root",
        "in_place",
        "time_us",
        "algbw_GBps",
        "busbw_GBps",
        "wrong",
    ]
    with path.open("x", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for block in blocks:
            ways = [block.facts.get(key, "") for key in ("backend", "algorithm", "compressor")]
            for row in block.rows:
                for place, half in enumerate((row.out_of_place, row.in_place)):
                    writer.writerow(
                        [
                            collective,
                            *ways,
                            row.nbytes,
                            row.count,
                            row.element,
                            row.operation,
                            row.root,
                            place,
                            half.timing.seconds * 1e6,
                            half.algbw,
                            half.busbw,
                            "" if half.wrong is None else half.wrong,
                        ]
                    )


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
        "parallel_init": 0,
        "devices": [
            {
                "rank": seat.rank,
                "group": 0,
                "pid": seat.pid,
                "hostname": seat.hostname,
                "device": seat.local_rank,
                "device_hex": "0000:00:00",
                "device_info": device,
            }
            for seat in world.seats
        ],
    }


def _row(row: Row, collective: str, block: int) -> Json:
    found: Json = {
        "size": row.nbytes,
        "count": row.count,
        "type": row.element,
        "redop": row.operation,
        "root": str(row.root),
        "out_of_place": _half(row.out_of_place),
        "in_place": _half(row.in_place),
    }
    for name, half in (("out_of_place", row.out_of_place), ("in_place", row.in_place)):
        if half.timing.iterations is not None:
            found[f"{name}_per_iter"] = _iterations(half.timing.iterations)
    return found | {"experiment_name": collective, "block": block}


def _half(half: Half) -> Json:
    return {"time": half.timing.seconds * 1e6, "alg_bw": half.algbw, "bus_bw": half.busbw, "nwrong": half.wrong}


def _iterations(each: IterationTimes) -> Json:
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
