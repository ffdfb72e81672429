"""What a comparison leaves behind: a table, a file of JSON, a picture."""

import argparse
import json
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from gradwire.bench.compare.replay import ReplayCase, load_case
from gradwire.bench.compare.replay_scale import Scale
from gradwire.bench.compare.results import Result
from gradwire.bench.emulation.rate import parse_rate
from gradwire.bench.machine import machine_line

_WIDTH = 124
_REASON_WIDTH = 60


@dataclass(frozen=True, slots=True)
class Measured:
    """What a comparison found.

    Attributes:
        results: Of all ways.
        where: The cluster in words.
        nodes: Ranks of each node.
        gradient_nbytes: Of one step on one rank.
        scale: Of a replay.
        expected_seconds: Of a replayed step of plain DDP, by its waits and its link alone; None where that is unknown.
    """

    results: list[Result]
    where: str
    nodes: list[int]
    gradient_nbytes: int
    scale: Scale
    expected_seconds: float | None = None


def report(options: argparse.Namespace, argv: list[str], measured: Measured) -> None:
    """Prints the table and writes what was asked for.

    Args:
        options: Of the command line.
        argv: As the user wrote it.
        measured: What is to be told.
    """
    case = load_case(options.replay, options.batch) if options.replay else None
    what = (
        f"{options.model}, {measured.gradient_nbytes / 1e6:.1f} MB of gradients"
        if case is None
        else _describe_replay(case, measured)
    )
    title = f"{what}; {measured.where}; median of {options.rounds} steps, taken in turns"
    Console(width=_WIDTH).print(f"{title}; {machine_line()}", table(measured.results), sep="\n", highlight=False)
    if case is not None:
        print(f"step time: {case.source}")
    if measured.expected_seconds is not None:
        print(f"plain DDP by its waits and its link alone: {measured.expected_seconds:.3f} s per step")
    record = {
        "kind": "compare",
        "title": title,
        "machine": machine_line(),
        "args": argv,
        "rounds": options.rounds,
        "nodes": measured.nodes,
        "source": case.source if case else None,
        "scale": asdict(measured.scale),
        "expected_plain_seconds": measured.expected_seconds,
        "results": [asdict(one) for one in measured.results],
    }
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    if options.plot is not None:
        from gradwire.bench.plot.bars import draw_compare  # matplotlib is optional

        draw_compare(record, options.plot)


def table(results: list[Result]) -> Table:
    """The results as a table, fastest first."""
    rows = Table()
    for heading in ("way", "s per step", "MB on NIC", "gradient error", "speed-up"):
        rows.add_column(heading, justify="left" if heading == "way" else "right")
    for one in sorted(results, key=lambda each: each.seconds or float("inf")):
        if one.seconds is None:
            rows.add_row(one.name, "-", "-", "-", f"does not run: {one.reason}"[:_REASON_WIDTH])
            continue
        nbytes = "-" if one.nic_nbytes is None else f"{one.nic_nbytes / 1e6:.2f}"
        error = "-" if one.error is None else f"{one.error:.1e}"
        rows.add_row(one.name, f"{one.seconds:.3f}", nbytes, error, f"{one.speed_up:.2f}x")
    return rows


def describe_emulated(options: argparse.Namespace, nodes: list[int], scale: Scale) -> str:
    """The emulated cluster in words."""
    order = " round-robin" if options.order == "round-robin" else ""
    link = scale.link(parse_rate(options.nic, "--nic"))
    scaled = f", replayed on links of {link / 1e6:.3g} Mbit" if options.replay else ""
    stream = f" ({options.stream} a connection)" if options.stream else ""
    return f"{shape(nodes)} ranks{order} behind {options.nic}{stream}{scaled}"


def shape(nodes: list[int]) -> str:
    """Nodes and ranks: `2x8`, or `3+1` where they differ."""
    return f"{len(nodes)}x{nodes[0]}" if len(set(nodes)) == 1 else "+".join(map(str, nodes))


def _describe_replay(case: ReplayCase, measured: Measured) -> str:
    scale = measured.scale
    return (
        f"{case.name} replayed, gradients and links 1/{scale.factor}, {scale.slow_motion} times slower: "
        f"{measured.gradient_nbytes / 1e6:.2f} MB of gradients (really {case.nbytes / 1e6:.0f}), "
        f"{case.step_seconds * scale.slow_motion:.2f} s of waits a step (really {case.step_seconds * 1e3:.0f} ms)"
    )
