"""`gradwire compare`: every way of averaging gradients, side by side, on one emulated cluster in one run.

All contenders live in one process group and take turns step by step, so that whatever else the machine does slows all
of them alike. Under torchrun or mpirun the ranks that are given take part instead, on the network that is there.
"""

import argparse
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from gradwire.bench.cluster import Cluster
from gradwire.bench.compare_fork import run_forked
from gradwire.bench.compare_hooks import PLAIN, entrants, select
from gradwire.bench.compare_models import MODELS
from gradwire.bench.compare_ranks import Setting, compare
from gradwire.bench.compare_rounds import Contender
from gradwire.bench.emulate import ranks_of_nodes
from gradwire.bench.machine import machine_line
from gradwire.bench.ranks import find_start, meet
from gradwire.bench.rate import parse_rate
from gradwire.bench.replay import load_case
from gradwire.bench.signals import clean_end
from gradwire.comms.config import launcher_variables

START_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Result:
    """One contender's figures: medians over the rounds.

    Attributes:
        name: Of the contender.
        seconds: Per step, of the slowest rank; None where it does not run here.
        nic_nbytes: Per step, the most that a node sent or received; None where it was not counted.
        error: Relative error of the gradients; None where gradients mean nothing.
        speed_up: Seconds of plain DDP over `seconds`.
        reason: Why it does not run.
    """

    name: str
    seconds: float | None = None
    nic_nbytes: float | None = None
    error: float | None = None
    speed_up: float | None = None
    reason: str | None = None


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(prog="gradwire compare", description="Every way of averaging gradients, side by side.")
    parser.add_argument("--nodes", type=int, help="emulated nodes (default 2, with --replay 4)")
    parser.add_argument("--ranks-per-node", type=int, help="ranks on each (default 2, with --replay 8)")
    parser.add_argument("--uneven", metavar="3,1", help="ranks of each node, one by one")
    parser.add_argument("--order", choices=("contiguous", "round-robin"), default="contiguous")
    parser.add_argument("--nic", help="rate of each node's link (default 200mbit; with --replay the real one, 25gbit)")
    parser.add_argument("--megabytes", type=float, default=16.0, help="size of the gradients in 10^6 bytes (default 16)")
    parser.add_argument("--model", choices=MODELS, default="transformer")
    parser.add_argument("--replay", metavar="CASE", help="resnet50, bert_base, vgg16, swin_t, or a FILE.json: real shapes, "
                                                         "timed waits instead of computation")
    parser.add_argument("--factor", type=int, default=16, help="with --replay: gradients 1/F, time F times, link 1/F^2 "
                                                               "(default 16)")
    parser.add_argument("--batch", type=int, help="with --replay: samples per GPU and step")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each contender (default 7)")
    parser.add_argument("--only", metavar="WORDS", help="contenders whose name contains one of these, with commas")
    parser.add_argument("--interface", metavar="NAME", help="under a launcher: the network card whose bytes are counted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (.png or .svg)")
    return parser


def check(options: argparse.Namespace) -> None:
    """Fills in defaults that depend on each other.

    Raises:
        ValueError: A value does not fit.
    """
    for name in ("rounds", "factor", "batch", "nodes", "ranks_per_node"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"`--{name.replace('_', '-')}` is {value}; wanted at least 1")
    if options.megabytes <= 0:
        raise ValueError(f"`--megabytes` is {options.megabytes}; wanted more than 0")
    if options.plot is not None and options.plot.suffix not in (".png", ".svg"):
        raise ValueError(f"`--plot` is {options.plot}; wanted a name that ends in .png or .svg")
    if options.batch is not None and options.replay is None:
        raise ValueError("`--batch` is for --replay; leave it out")
    if options.replay is not None:
        load_case(options.replay, options.batch)
    if options.uneven is None:
        options.nodes = options.nodes or (4 if options.replay else 2)
        options.ranks_per_node = options.ranks_per_node or (8 if options.replay else 2)
    options.nic = options.nic or ("25gbit" if options.replay else "200mbit")
    parse_rate(options.nic, "--nic")
    select(entrants(with_mpi=True), options.only)


def link_bits_per_second(options: argparse.Namespace) -> int:
    """Rate of the emulated links: that of `--nic`, divided by the square of the factor in a replay."""
    rate = parse_rate(options.nic, "--nic")
    return rate // options.factor**2 if options.replay else rate


def setting_of(options: argparse.Namespace, rate: float | None, with_mpi: bool) -> Setting:
    """What the ranks are told."""
    return Setting(options.model, options.megabytes * 1e6, options.replay, options.factor, options.batch, options.rounds,
                   rate, options.only, with_mpi)


class Collector:
    """Takes the ranks' lines of JSON in, moves the progress bar, and keeps the results."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID = progress.add_task("starting", total=None)
        self.gradient_nbytes = 0
        self.ranks = 0
        self.contenders: list[Contender] = []
        self.errors: dict[str, float | None] = {}
        self.refused: list[Result] = []
        self.other: list[str] = []

    def line(self, _: int, text: str) -> None:
        """One line that a rank printed."""
        if not text.startswith("{"):
            self.other.append(text)
            return
        record = json.loads(text)
        if "turn" in record:
            self._progress.update(self._task, total=record["turns"], completed=record["turn"], description=record["name"])
        elif "gradient_nbytes" in record:
            self.gradient_nbytes, self.ranks = record["gradient_nbytes"], record["ranks"]
        elif "reason" in record:
            self.refused.append(Result(record["name"], reason=record["reason"]))
        else:
            one = Contender(record["name"], lambda _: None, None, record["seconds"], record["nic_nbytes"])
            self.contenders.append(one)
            self.errors[one.name] = record["error"]

    def results(self, counted: bool) -> list[Result]:
        """All figures; contenders that do not run at the end."""
        plain = next(one.median_seconds for one in self.contenders if one.name == PLAIN)
        found = [Result(one.name, one.median_seconds, one.median_nic_nbytes if counted else None, self.errors[one.name],
                        plain / one.median_seconds) for one in self.contenders]
        return found + self.refused


def table(results: list[Result]) -> Table:
    """The results as a table, fastest first."""
    rows = Table()
    for heading in ("way", "s per step", "MB on NIC", "gradient error", "speed-up"):
        rows.add_column(heading, justify="left" if heading == "way" else "right")
    for one in sorted(results, key=lambda each: each.seconds or float("inf")):
        if one.seconds is None:
            rows.add_row(one.name, "-", "-", "-", f"does not run: {one.reason}"[:60])
            continue
        nbytes = "-" if one.nic_nbytes is None else f"{one.nic_nbytes / 1e6:.2f}"
        error = "-" if one.error is None else f"{one.error:.1e}"
        rows.add_row(one.name, f"{one.seconds:.3f}", nbytes, error, f"{one.speed_up:.2f}x")
    return rows


def describe(options: argparse.Namespace, nodes: list[int], gradient_nbytes: int) -> str:
    """One line: what was run on what."""
    shape = f"{len(nodes)}x{nodes[0]}" if len(set(nodes)) == 1 else "+".join(map(str, nodes))
    cluster = f"{shape} ranks{' round-robin' if options.order == 'round-robin' else ''}"
    if options.replay is None:
        return f"{options.model}, {gradient_nbytes / 1e6:.1f} MB of gradients, {cluster}, links of {options.nic}"
    case = load_case(options.replay, options.batch)
    return (f"{case.name} on {cluster} behind {options.nic}, replayed with factor {options.factor}: "
            f"{gradient_nbytes / 1e6:.2f} MB of gradients (really {case.nbytes / 1e6:.0f}), "
            f"{case.step_seconds * options.factor:.2f} s of waits a step (really {case.step_seconds * 1e3:.0f} ms), "
            f"links of {link_bits_per_second(options) / 1e6:.3g} Mbit")


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """On stderr, so that stdout holds the table alone."""
    with Progress(TextColumn("{task.description:<32}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
                  TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        yield progress


def run_emulated(options: argparse.Namespace) -> tuple[Collector, list[int]]:
    """Emulates the cluster, forks the ranks, collects.

    Raises:
        RuntimeError: This machine cannot emulate a cluster, or a rank failed.
    """
    nodes = ranks_of_nodes(options)
    rate = link_bits_per_second(options)
    with progress_bar() as progress, Cluster([1] * len(nodes), f"{rate}bit") as cluster:
        collector = Collector(progress)
        setting = setting_of(options, rate / 8, with_mpi=False)
        outcome = run_forked(cluster, "gradwire.bench.compare_ranks", [json.dumps(asdict(setting))], nodes=nodes,
                             order=options.order, on_line=collector.line)
    if outcome.exit_status:
        raise RuntimeError("a rank failed; the last lines were:\n" + "\n".join(collector.other[-30:]))
    return collector, nodes


def run_given(options: argparse.Namespace) -> tuple[Collector, list[int]] | None:
    """Takes part as one of a launcher's ranks; only rank 0 gets the figures."""
    start = find_start(launcher_variables())
    assert start is not None
    world = meet(start, START_TIMEOUT)
    setting = setting_of(options, None, with_mpi=start.by == "mpirun")
    said = io.StringIO()
    with redirect_stdout(said):
        compare(setting, options.interface)
    hosts = [seat.hostname for seat in world.seats]
    dist.barrier()
    dist.destroy_process_group()
    if world.rank:
        return None
    with progress_bar() as progress:
        collector = Collector(progress)
        for line in said.getvalue().splitlines():
            collector.line(0, line)
    return collector, [hosts.count(host) for host in dict.fromkeys(hosts)]


def report(options: argparse.Namespace, collector: Collector, nodes: list[int], counted: bool) -> None:
    """Prints the table and writes what was asked for."""
    results = collector.results(counted)
    title = describe(options, nodes, collector.gradient_nbytes)
    Console(width=124).print(f"{title}; {machine_line()}", table(results), sep="\n")
    case = load_case(options.replay, options.batch) if options.replay else None
    if case is not None:
        print(f"step time: {case.source}")
    record = {"kind": "compare", "title": title, "machine": machine_line(), "rounds": options.rounds, "nodes": nodes,
              "source": case.source if case else None, "results": [asdict(one) for one in results]}
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    if options.plot is not None:
        from gradwire.bench.plot import draw_compare  # matplotlib is optional
        draw_compare(record, options.plot)


def main(argv: list[str]) -> int:
    """Compares and prints the table; returns the exit status: 2 for a bad flag, 1 for a failure.

    Args:
        argv: Options.
    """
    options = build_parser().parse_args(argv)
    try:
        check(options)
        given = find_start(launcher_variables()) is not None
        with clean_end():
            found = run_given(options) if given else run_emulated(options)
        if found is not None:
            report(options, *found, counted=options.interface is not None if given else True)
    except ValueError as error:
        print(f"gradwire compare: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"gradwire compare: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
