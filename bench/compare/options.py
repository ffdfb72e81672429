"""The command line of `gradwire compare`."""

import argparse
from pathlib import Path

from gradwire.bench.arguments import (
    add_import_option,
    check_can_plot,
    check_number,
    check_output,
    check_picture,
    import_modules,
)
from gradwire.bench.compare.configurations import configuration_specs, select
from gradwire.bench.compare.models import MODELS
from gradwire.bench.compare.replay import load_case
from gradwire.bench.emulation.rate import parse_rate
from gradwire.bench.nccl_tests.options import Parser
from gradwire.bench.terminal import add_json_option
from gradwire.topology.readers.small_files import names_in

REPLAY_CONFIGURATIONS = "gradwire hier,gradwire fp16,gradwire powersgd,gradwire onebit"
"""Value of --only with --replay if the user gives none: few configurations, because each step of a replay is slow."""

_MOST = 10**6
"""Upper limit of whole-number options; the lower one is 1. The emulation checks how many nodes and ranks it can run."""
_LEAST_MEGABYTES, _MOST_MEGABYTES = 1e-3, 1e6


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line, fills in defaults that depend on each other, and checks what argparse cannot.

    It also imports the modules of `--import`, and reads the case of `--replay` to check it.

    Args:
        argv: Words of the command line after `compare`.

    Raises:
        ValueError: A value does not fit; the message names the flag.
    """
    options = build_parser().parse_args(argv)
    for name in ("rounds", "factor", "slow_motion", "batch", "nodes", "ranks_per_node"):
        check_number(f"--{name.replace('_', '-')}", getattr(options, name), 1, _MOST)
    check_number("--megabytes", options.megabytes, _LEAST_MEGABYTES, _MOST_MEGABYTES)
    if options.plot is not None:
        check_picture("--plot", options.plot)
    if options.interface is not None and options.interface not in names_in(Path("/sys/class/net")):
        raise ValueError(
            f"`--interface`: found {options.interface}, which this host does not have; `ip link` lists those it has"
        )
    for name in ("batch", "factor", "slow_motion"):
        if getattr(options, name) is not None and options.replay is None:
            raise ValueError(f"`--{name.replace('_', '-')}` is for --replay; leave it out")
    _fill_in(options)
    parse_rate(options.nic, "--nic")
    if options.stream is not None:
        parse_rate(options.stream, "--stream")
    import_modules(options.imports)
    if options.script is None:
        select(configuration_specs(with_mpi=True), options.only)
    return options


def check_outputs(options: argparse.Namespace) -> None:
    """Checks before the measurements that the files of `--json` and `--plot` can be written.

    Args:
        options: Options of the command line, as `parse` returns them.

    Raises:
        ValueError: A file cannot be written, or matplotlib is missing.
    """
    check_output("--json", options.json)
    check_output("--plot", options.plot)
    if options.plot is not None:
        check_can_plot("--plot")


def _fill_in(options: argparse.Namespace) -> None:
    replay: bool = options.replay is not None
    if replay:
        load_case(options.replay, options.batch)
        options.only = options.only or REPLAY_CONFIGURATIONS
    if options.uneven is None:
        options.nodes = options.nodes or (4 if replay else 2)
        options.ranks_per_node = options.ranks_per_node or (8 if replay else 2)
    options.nic = options.nic or ("25gbit" if replay else "200mbit")
    options.rounds = options.rounds or (20 if options.script else 2 if replay else 7)


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        prog="gradwire compare",
        description="Compares plain DDP, torch's hooks, and gradwire's plans and compressors side by side, on an "
        "emulated cluster. Under torchrun, mpirun or srun the ranks that were started take part instead.",
    )
    parser.add_argument("--model", choices=MODELS, default="transformer", help="network that is trained")
    parser.add_argument(
        "--megabytes", type=float, default=16.0, help="size of the gradients in 10^6 bytes (default 16)"
    )
    parser.add_argument(
        "--rounds", type=int, help="timed steps of each configuration (default 7, with --replay 2, with --script 20)"
    )
    parser.add_argument(
        "--only", metavar="WORDS", help="configurations whose name contains one of these, with commas between them"
    )
    add_import_option(parser)
    add_json_option(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the results (.png or .svg)")
    parser.add_argument("--interface", metavar="NAME", help="NIC whose bytes are counted, under a launcher")
    _add_cluster(parser)
    _add_replay(parser)
    parser.add_argument(
        "--script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="train your unchanged script for --rounds steps (default 20) under plain DDP, torch's fp16 hook, exact "
        "sums and int8, or the settings of --only; everything after --script is the script's",
    )
    return parser


def _add_cluster(parser: Parser) -> None:
    cluster = parser.add_argument_group("the emulated cluster")
    cluster.add_argument("--nodes", type=int, help="emulated nodes (default 2, with --replay 4)")
    cluster.add_argument("--ranks-per-node", type=int, help="ranks on each (default 2, with --replay 8)")
    cluster.add_argument("--uneven", metavar="3,1", help="ranks of each node, one by one")
    cluster.add_argument("--order", choices=("contiguous", "round-robin"), default="contiguous")
    cluster.add_argument("--nic", help="rate of each node's link (default 200mbit; with --replay the real one, 25gbit)")
    cluster.add_argument(
        "--stream",
        metavar="RATE",
        help="rate of one TCP connection between nodes (default: all of the "
        "link; with --replay the real one, for example 5gbit)",
    )


def _add_replay(parser: Parser) -> None:
    replay = parser.add_argument_group("a real network without its GPUs")
    replay.add_argument(
        "--replay",
        metavar="CASE",
        help="resnet50, bert_base, vgg16, swin_t, or a FILE.json: real shapes, timed waits instead of computation",
    )
    replay.add_argument("--batch", type=int, help="samples per GPU and step")
    replay.add_argument(
        "--factor", type=int, help="size of gradients and links, 1/F of the real ones (default: so that 9 MB remain)"
    )
    replay.add_argument(
        "--slow-motion",
        type=int,
        metavar="T",
        help="make everything last T times as long (default: so that a step of plain DDP lasts 4 to 11 s)",
    )
