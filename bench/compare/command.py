"""`gradwire compare`: plain DDP, torch's hooks, gradwire's plans and compressors, on one emulated cluster in one run.

All configurations live in one process group and take turns step by step, so that other load on the machine slows all
of them alike. Under torchrun, mpirun or srun the launched ranks take part instead, on the network that is there.
"""

import argparse
import json
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradwire.bench.arguments import check_memory
from gradwire.bench.compare.options import check_outputs, parse
from gradwire.bench.compare.ranks import CompareSettings, compare
from gradwire.bench.compare.replay import Scale, fit_scale, load_case, plain_step_seconds
from gradwire.bench.compare.report import Collector, Measured, describe_emulated, report, shape
from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.command import ranks_of_nodes
from gradwire.bench.emulation.fork import BAD_FLAG, run_forked
from gradwire.bench.emulation.rate import parse_rate
from gradwire.bench.emulation.signals import clean_end
from gradwire.bench.nccl_tests.ranks import meet
from gradwire.bench.nccl_tests.start import Start, find_start, speaks
from gradwire.bench.terminal import PlainLines, complain, progress_bar
from gradwire.comms.environment import launcher_variables

START_TIMEOUT = timedelta(minutes=5)

_LAST_LINES = 30


def run_emulated(options: argparse.Namespace) -> Measured:
    """Runs the comparison with forked ranks on an emulated cluster and returns its measurements.

    Args:
        options: Options of the command line, as `options.parse` returns them.

    Raises:
        ValueError: A flag has a value that does not fit.
        RuntimeError: This machine cannot emulate a cluster, or a rank failed.
    """
    # Check that the models fit in memory, and choose the scale of a replay.
    nodes = ranks_of_nodes(options)
    if not options.replay:
        check_memory("--megabytes", 2e6 * options.megabytes * sum(nodes), "weights and gradients of all ranks")
    rate, scale, expected = parse_rate(options.nic, "--nic"), Scale(), None
    stream = rate if options.stream is None else min(rate, parse_rate(options.stream, "--stream"))
    if options.replay:
        case = load_case(options.replay, options.batch)
        scale = fit_scale(case, sum(nodes), stream, options.factor, options.slow_motion)
        if options.order == "contiguous":
            expected = scale.slow_motion * plain_step_seconds(case, sum(nodes), stream)
    link = scale.link(rate)
    # Emulate the cluster and fork its ranks; rank 0 prints records of JSON, which the collector reads.
    with progress_bar() as progress, EmulatedCluster([1] * len(nodes), f"{link}bit") as cluster:
        lines = PlainLines()
        lines.show(
            f"{shape(nodes)} ranks on links of {options.nic}: configurations take turns, some minutes if a step is slow"
        )
        collector = Collector(progress, lines)
        settings = settings_of(
            options,
            scale,
            bytes_per_second=link / 8,
            stream_bytes_per_second=scale.link(stream) / 8 if options.stream else None,
        )
        with collector.stopped_in_words():
            outcome = run_forked(
                cluster,
                "gradwire.bench.compare.ranks",
                [json.dumps(asdict(settings))],
                nodes=nodes,
                order=options.order,
                on_line=collector.line,
            )
    if outcome.exit_status:
        raise RuntimeError("a rank failed; the last lines were:\n" + "\n".join(collector.other[-_LAST_LINES:]))
    return Measured(
        collector.results(counted=True),
        describe_emulated(options, nodes, scale),
        nodes,
        collector.gradient_nbytes,
        scale,
        expected,
    )


def run_given(options: argparse.Namespace, start: Start) -> Measured | None:
    """Runs the comparison as one of the ranks that a launcher started, over the network of these hosts.

    Nothing is scaled down: a replay has the size and speed of the real training unless --factor or --slow-motion is
    given.

    Args:
        options: Options of the command line, as `options.parse` returns them.
        start: Rank, size and launcher of this process.

    Returns:
        The measurements on rank 0; None on the other ranks.
    """
    world = meet(start, START_TIMEOUT)
    scale = Scale(options.factor or 1, options.slow_motion or 1)
    try:
        with progress_bar(shown=world.rank == 0) as progress:
            collector = Collector(progress, PlainLines(shown=world.rank == 0))
            with collector.stopped_in_words() if world.rank == 0 else nullcontext():
                compare(
                    settings_of(options, scale, with_mpi=start.by == "mpirun"),
                    options.interface,
                    lambda text: collector.line(world.rank, text),
                )
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if world.rank != 0:
        return None
    nodes = list(Counter(info.hostname for info in world.ranks).values())
    return Measured(
        collector.results(counted=options.interface is not None),
        f"{shape(nodes)} ranks started by {start.by}",
        nodes,
        collector.gradient_nbytes,
        scale,
    )


def settings_of(options: argparse.Namespace, scale: Scale, **network: Any) -> CompareSettings:
    """Returns the settings of a comparison that every rank receives.

    Args:
        options: Options of the command line, as `options.parse` returns them.
        scale: Factors by which a replay is shrunk and slowed down; both are 1 without a replay.
        network: Further fields of `CompareSettings`: the rates of the links, and whether mpirun started the ranks.
    """
    same = {name: getattr(options, name) for name in ("model", "replay", "batch", "rounds", "only", "imports")}
    return CompareSettings(nbytes=options.megabytes * 1e6, **same, **asdict(scale), **network)


def main(argv: list[str]) -> int:
    """Compares, prints the table and writes the files; returns the exit status: 0, 2 for a bad flag, 1 for a failure.

    Args:
        argv: Words of the command line after `compare`.
    """
    variables = launcher_variables()
    try:
        options = parse(argv)
        with clean_end():
            start = find_start(variables)
            if start is None or start.rank == 0:
                check_outputs(options)
            measured = run_emulated(options) if start is None else run_given(options, start)
        if measured is not None:
            report(options, argv, measured)
    except (ValueError, RuntimeError) as error:
        bad_flag = isinstance(error, ValueError)
        if speaks(variables) or not bad_flag:  # a bad flag is the same on all ranks
            complain("compare", error)
        return BAD_FLAG if bad_flag else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
