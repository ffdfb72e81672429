"""`make run`: one training under plain DDP, gradwire and gradwire with a compressor, on two nodes of two ranks.

The hooks take turns step by step in one job (see gradwire.bench.train.train) instead of running one after the other:
on a shared machine the minutes differ more than the hooks do.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from gradwire.bench.arguments import CommandParser
from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.launch import JobOutcome, python_module, run_logical
from gradwire.bench.emulation.namespaces import available
from gradwire.bench.emulation.rate import format_rate, parse_rate
from gradwire.bench.emulation.signals import clean_end
from gradwire.bench.machine import machine_line
from gradwire.bench.terminal import STDOUT, StatusLine, add_json_option, right_columns, working, write_json
from gradwire.bench.train.summary import predicted_seconds, summarize, summarize_prediction
from gradwire.bench.train.train import TrainingResult

NODES = [2, 2]
HOOKS = ["plain", "gradwire", "gradwire:int8"]
"""The rows of the table; the first is what the others are compared with. Of the compressors that fit the job's AdamW,
int8 sends the fewest bytes without costing loss, or a dense start that would be the whole of a run as short as this."""

STEPS = 56
"""Steps of each hook."""
LEAST_STEPS = 12
"""Minimum number of steps of each hook: fewer say nothing about the loss."""
BUDGET_SECONDS = 300.0
"""Time limit of the whole run in seconds: if all steps would take longer, fewer are made."""
STEPS_IN_COMPUTATIONS = 5.0
"""Estimated duration of one step of all `HOOKS` together, in units of a step's computation: plain DDP 2, by the choice
of the links' rate; the others less."""
CALIBRATION_STEPS = 8
READABLE_MBIT = (5, 8, 10, 15, 20, 25, 30, 40, 50, 60, 80, 100, 120, 150, 200, 300, 400)
TIMEOUT_SECONDS = 900.0

console = Console(highlight=False, markup=False)


def train_on(
    cluster: EmulatedCluster | None,
    hooks: list[str],
    *,
    steps: int,
    batch: int,
    device: str = "cpu",
    show: bool = True,
    nic_bits_per_second: int | None = None,
) -> list[TrainingResult]:
    """Runs the training once and returns the results by hook.

    Args:
        cluster: Emulated cluster to run on; None for logical nodes on this machine.
        hooks: Names of the hooks to compare.
        steps: Number of optimizer steps of each hook.
        batch: Number of sequences per rank and step.
        device: Device on which the model trains: cpu or cuda.
        show: True prints rank 0's lines as they come.
        nic_bits_per_second: Link rate that logical nodes assume; None if unknown. Ignored with a cluster.

    Raises:
        RuntimeError: A rank failed; the message has what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-job-") as folder:
        file = Path(folder, "results.json")
        words = ["--steps", str(steps), "--batch", str(batch), "--device", device, "--json", str(file)]
        words += [word for hook in hooks for word in ("--hook", hook)]
        status = StatusLine(shown=show)
        status.show("starting the ranks ...")

        def print_line(rank: int, line: str) -> None:
            if show and rank == 0:
                status.clear()
                console.print(Padding(Text(line), (0, 0, 0, 2)))

        if cluster is not None:
            words += ["--nic-interface", "eth0"]
            nic_bits_per_second = cluster.nic_bits_per_second
        if nic_bits_per_second is not None:
            words += ["--nic-bytes-per-second", str(nic_bits_per_second / 8)]
        command = python_module("gradwire.bench.train.train", *words)
        outcome: JobOutcome
        if cluster is not None:
            outcome = cluster.run(command, timeout_seconds=TIMEOUT_SECONDS, on_line=print_line)
        else:
            outcome = run_logical(NODES, command, timeout_seconds=TIMEOUT_SECONDS, on_line=print_line)
        status.clear()
        outcome.check()
        return [TrainingResult(**row) for row in json.loads(file.read_text())]


def readable_rate(nbytes: float, seconds: float) -> str:
    """Returns the round link rate at which a number of bytes takes about a given time.

    Args:
        nbytes: Bytes on the busiest link in a step.
        seconds: Wanted duration of their transfer.
    """
    mbit = nbytes * 8 / seconds / 1e6
    return f"{min(READABLE_MBIT, key=lambda readable: abs(readable / mbit - 1))}mbit"


def steps_within(computation_seconds: float) -> int:
    """Returns the number of steps of each hook that fit into the time budget, and prints it.

    Args:
        computation_seconds: Duration of a step without communication.
    """
    round_seconds = STEPS_IN_COMPUTATIONS * computation_seconds
    steps = max(LEAST_STEPS, min(STEPS, round(BUDGET_SECONDS / round_seconds)))
    fewer = f", in place of {STEPS} (--steps says another number)" if steps < STEPS else ""
    minutes = max(1, round(steps * round_seconds / 60))
    console.print(f"{steps} steps of each{fewer}: about {minutes} minute{'s' if minutes > 1 else ''}")
    return steps


def calibrate(batch: int) -> tuple[str, float]:
    """Measures plain DDP on links without a rate limit.

    Args:
        batch: Sequences per rank and step.

    Returns:
        The rate of links that doubles its step, and the seconds that a step computes.
    """
    what = "calibrating: a few steps of plain DDP on links without a limit"
    console.print(f"{what} ...")
    with working(what), EmulatedCluster(NODES) as cluster:
        plain = train_on(cluster, ["plain"], steps=CALIBRATION_STEPS, batch=batch, show=False)[0]
    assert plain.nic_nbytes_per_step is not None
    rate = readable_rate(plain.nic_nbytes_per_step, plain.seconds_per_step)
    console.print(
        f"a step computes for {plain.seconds_per_step:.2f} s and puts {plain.nic_nbytes_per_step / 1e6:.2f} MB on a "
        f"node's link, so the links get {rate}: communication about as long as computation, as for a Swin-T on 8 GPUs "
        "behind 25 Gbit"
    )
    return rate, plain.seconds_per_step


def presume_rate(batch: int) -> str:
    """Measures plain DDP on loopback, and returns the link rate that would double its step.

    Args:
        batch: Sequences per rank and step.
    """
    what = "a few steps of plain DDP, for the rate of the links that times are predicted for"
    console.print(f"{what} ...")
    with working(what):
        plain = train_on(None, ["plain"], steps=CALIBRATION_STEPS, batch=batch, show=False)[0]
    assert plain.node_nbytes_per_step is not None
    return readable_rate(plain.node_nbytes_per_step, plain.seconds_per_step)


def result_table(results: list[TrainingResult], title: str, *, counted: bool = False) -> Table:
    """Returns the table of the comparison.

    Args:
        results: Results by hook; the first is the baseline of the speed-up.
        title: Description of the nodes and links, above the table.
        counted: True shows the bytes that a node would send, and predicted seconds, because the links were not slow.
    """
    figures = ["MB a node sends", "predicted s"] if counted else ["MB on a link", "s per step"]
    columns = right_columns(*figures, "loss at the end", "bits/byte", *(() if counted else ("speed-up",)))
    title_row = Column("hook", no_wrap=True)
    table = Table(title_row, *columns, title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    seconds = predicted_seconds(results) if counted else {one.hook: one.seconds_per_step for one in results}
    for result in results:
        nbytes = result.node_nbytes_per_step if counted else result.nic_nbytes_per_step
        cells = ["-" if nbytes is None else f"{nbytes / 1e6:.2f}"]
        cells += [f"{seconds[result.hook]:.3f}" if result.hook in seconds else "-"]
        cells += [f"{result.final_loss:.4f}", f"{result.validation_bits_per_byte:.3f}"]
        cells += [] if counted else [f"{results[0].seconds_per_step / result.seconds_per_step:.2f}x"]
        table.add_row(result.hook, *cells)
    return table


def run(options: argparse.Namespace) -> dict[str, object]:
    """Compares the hooks, prints the table, and summarizes it in sentences.

    Args:
        options: Parsed options of `main`.

    Returns:
        The results, as JSON holds them.
    """
    bits_per_second = None
    reason = "asked for with --logical" if options.logical else available()
    if options.device == "cuda":
        reason = "NCCL joins the GPUs of one machine without them"
    hooks = options.hook or HOOKS
    # Train on logical nodes if no link can be made slow here, else on an emulated cluster.
    if reason is not None:
        console.print(
            f"No gain in seconds can be shown: no link can be made slow here ({reason}). The ranks train as two "
            "logical nodes on this machine's loopback; bytes are counted, and the times behind a slow link predicted."
        )
        rate = options.nic or presume_rate(options.batch)
        bits_per_second = parse_rate(rate, "nic")
        results = train_on(
            None,
            hooks,
            steps=options.steps or STEPS,
            batch=options.batch,
            device=options.device,
            nic_bits_per_second=bits_per_second,
        )
        title = f"2 logical nodes x 2 ranks; times predicted for {format_rate(bits_per_second)} links"
    else:
        rate, steps = options.nic, options.steps or STEPS
        if rate is None:
            rate, computation_seconds = calibrate(options.batch)
            steps = options.steps or steps_within(computation_seconds)
        with EmulatedCluster(NODES, rate) as cluster:
            results = train_on(cluster, hooks, steps=steps, batch=options.batch)
            bits_per_second = cluster.nic_bits_per_second
            assert bits_per_second is not None
            title = f"2 nodes x 2 ranks, {format_rate(bits_per_second)} links"
    # Print the table and the summary.
    first = results[0]
    console.print(result_table(results, title, counted=reason is not None))
    console.print(
        f"{first.steps} steps, {first.gradient_nbytes / 1e6:.2f} MB of gradients; per step; loss in nats, "
        f"{first.first_loss:.2f} at the start\n"
    )
    summary = (summarize if reason is None else summarize_prediction)(results, bits_per_second)
    for line in summary:
        console.print(line)
    return {
        "kind": "main_job",
        "nodes": NODES,
        "nic_bits_per_second": bits_per_second,
        "results": [asdict(one) for one in results],
        "summary": summary,
    }


def main(argv: list[str]) -> int:
    """Runs the main job and returns the exit status.

    Args:
        argv: Words of the command line; no option is required.

    Returns:
        0, or 1 for a bad rate or hook, or a failed rank. Words that argparse refuses end the process with status 2.
    """
    parser = CommandParser(prog="python -m gradwire.bench.train.main_job", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hook", action="append", help=f"rows of the table (default {' '.join(HOOKS)}); repeatable")
    parser.add_argument(
        "--steps",
        type=int,
        help=f"optimizer steps of each (default {STEPS}, or what {BUDGET_SECONDS / 60:.0f} minutes hold)",
    )
    parser.add_argument("--batch", type=int, default=24, help="sequences per rank and step (default 24)")
    parser.add_argument("--nic", metavar="RATE", help="rate of the links (default: measured, see above)")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the model trains (default cpu); cuda: on logical nodes, over NCCL",
    )
    parser.add_argument("--logical", action="store_true", help="logical nodes even where links could be emulated")
    add_json_option(parser)
    options = parser.parse_args(argv)
    console.stderr = options.json == STDOUT
    try:
        with clean_end():
            write_json(options.json, {**run(options), "machine": machine_line(), "args": argv})
    except (ValueError, RuntimeError) as error:
        console.print(f"main job: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
