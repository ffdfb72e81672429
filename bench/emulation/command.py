"""`gradwire emulate` runs a command as the ranks of a job, on a cluster of network namespaces on this machine."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import get_args

from rich.table import Table

from gradwire.bench.arguments import MOST_SECONDS, CommandParser, check_number, check_output
from gradwire.bench.emulation.cluster import (
    FIRST_NETWORK,
    MOST_NODES,
    MOST_RANKS,
    EmulatedCluster,
    Names,
    NicBytes,
    RunResult,
    check_carrier,
    check_congestion,
    parse_network,
)
from gradwire.bench.emulation.launch import RankLine
from gradwire.bench.emulation.namespaces import available
from gradwire.bench.emulation.paths import PathOptions
from gradwire.bench.emulation.placement import Order
from gradwire.bench.emulation.rate import format_nic_rates, parse_nic_rates
from gradwire.bench.emulation.signals import EndedBySignal, clean_end
from gradwire.bench.pipe import reader_may_leave
from gradwire.bench.terminal import (
    STDOUT,
    CleanConsole,
    add_json_option,
    complain,
    fitting_width,
    right_columns,
    working,
    write_json,
)
from gradwire.topology.printable import shortened

GRACE_HELP = "time in which the other ranks may report their errors after a rank failed (default 30)"
_EXAMPLE = "example: gradwire emulate --nodes 2 --ranks-per-node 4 --nic 200mbit -- python train.py"


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the options before the `--`; the command to run follows it."""
    parser = CommandParser(
        prog="gradwire emulate",
        usage="%(prog)s --nodes N --ranks-per-node R [options] -- COMMAND...",
        description="Runs COMMAND as the ranks of a job on emulated nodes, with torchrun's environment variables. Each "
        "node has its own hostname, /dev/shm, processes and network; all are gone when the command ends. Needs root or "
        "a kernel that lets users make user namespaces. A COMMAND that starts with `python` runs under gradwire's own "
        "interpreter.",
        epilog=_EXAMPLE,
    )
    # The nodes and their ranks.
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes")
    parser.add_argument("--ranks-per-node", type=int, default=1, metavar="R", help="ranks on each node (default 1)")
    parser.add_argument("--uneven", metavar="3,1", help="ranks of each node, one by one, instead of --ranks-per-node")
    # The network of the nodes.
    parser.add_argument(
        "--nic",
        metavar="RATE[+RATE...][,...]",
        help="rate of each node's link, each direction: 200mbit, or one for each node: 200mbit,200mbit,50mbit; with "
        "100mbit+100mbit each has two NICs, eth0 and eth1 (default: no limit)",
    )
    parser.add_argument("--order", choices=get_args(Order), default="contiguous", help="how ranks are placed on nodes")
    parser.add_argument("--mtu", type=int, default=1500, metavar="BYTES", help="largest packet (default 1500)")
    parser.add_argument(
        "--names",
        choices=get_args(Names),
        default="all",
        help="what the nodes' names resolve to: their addresses, own: 127.0.1.1 as on Debian, none: nothing (default "
        "all)",
    )
    parser.add_argument(
        "--network",
        metavar="NETWORK",
        default=FIRST_NETWORK,
        help=f"network of the nodes' addresses; with fd77::/64 they have IPv6 only (default {FIRST_NETWORK})",
    )
    _add_path_options(parser)
    # The command: its output, its end, and the report.
    parser.add_argument("--prefix", action="store_true", help="start every line of output with its [rank N]")
    parser.add_argument("--grace", type=float, default=30.0, metavar="SECONDS", help=GRACE_HELP)
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="longest time for the command (default: none)")
    add_json_option(
        parser,
        "print statuses and bytes as JSON on stdout, and what the ranks print on stderr; with FILE write it there",
    )
    return parser


def _add_path_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the network between the nodes, named like the fields of `PathOptions`."""
    group = parser.add_argument_group("between the nodes (default: no delay, no loss)")
    group.add_argument(
        "--delay",
        metavar="TIME[,TIME...]",
        help="one-way delay of what a node sends, or one for each node: with 40ms ping shows 80",
    )
    group.add_argument("--jitter", metavar="TIME[,TIME...]", help="most that a packet's delay varies by, uniform: 5ms")
    group.add_argument("--loss", metavar="SHARE[,SHARE...]", help="share of a node's packets that are lost: 0.1%%")
    group.add_argument(
        "--queue",
        metavar="TIME[,TIME...]",
        help="longest wait of a packet for its node's link, else it is dropped (default 200ms); needs --nic",
    )
    group.add_argument("--regions", metavar="NAME,NAME...", help="region of each node: eu,eu,us")
    group.add_argument(
        "--between",
        action="append",
        default=[],
        metavar="REGION/REGION:...",
        help="path between two regions, both ways; repeatable: eu/us:delay=40ms,loss=0.1%%,jitter=5ms",
    )
    group.add_argument("--reorder", action="store_true", help="let packets with jitter overtake each other")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of losses and jitter (default 0)")
    group.add_argument("--congestion", metavar="NAME", help="TCP's congestion control: cubic (default: the machine's)")
    group.add_argument(
        "--carrier",
        default="auto",
        metavar="NAME",
        help="emulator of delay and loss: netem, relay (gradwire's own), or auto: netem if there is one (default)",
    )


def path_options(options: argparse.Namespace) -> PathOptions:
    """Returns the options of the network between the nodes as a `PathOptions`."""
    return PathOptions(**{each.name: getattr(options, each.name) for each in dataclasses.fields(PathOptions)})


def path_table(cluster: EmulatedCluster) -> Table:
    """Returns a table of the packets between the nodes: offered, lost, dropped and delivered, for each pair.

    Args:
        cluster: A cluster with paths.
    """
    figures = right_columns("round trip", "packets", "lost", "dropped at a queue")
    table = Table("from", "to", *figures, title="packets between the nodes")
    assert cluster.paths is not None
    pairs = [(node, other) for node in range(len(cluster.nodes)) for other in range(len(cluster.nodes))]
    for network, interface in enumerate(cluster.interfaces):
        suffix = f" {interface}" if len(cluster.interfaces) > 1 else ""
        found = cluster.path_counts(network)
        for node, other in pairs:
            if node != other:
                trip, counts = cluster.paths.round_trip_seconds(node, other), found[node][other]
                numbers = (f"{each:,}" for each in (counts.offered, counts.lost, counts.dropped))
                names = cluster.hostnames
                table.add_row(names[node] + suffix, names[other] + suffix, f"{trip * 1e3:g} ms", *numbers)
    return table


def ranks_of_nodes(options: argparse.Namespace) -> list[int]:
    """Returns the number of ranks on each node, by `--nodes` and `--ranks-per-node`, or by `--uneven`.

    Args:
        options: Options of the command line.

    Raises:
        ValueError: The options are missing, out of range, or contradict each other.
    """
    if options.uneven is not None:
        words = [word.strip() for word in options.uneven.split(",")]
        if not all(word.isdecimal() and len(word) < 10 and int(word) > 0 for word in words):
            raise ValueError(
                f"`--uneven`: found {shortened(options.uneven, 40)!r}, wanted the ranks of each node, for example 3,1"
            )
        if options.nodes not in (None, len(words)):
            raise ValueError(
                f"`--uneven`: found {options.uneven!r}, which is {len(words)} nodes, but `--nodes` is {options.nodes}; "
                "leave one of them out"
            )
        nodes = [int(word) for word in words]
        check_number("--uneven", len(nodes), 1, MOST_NODES)
    else:
        if options.nodes is None:
            raise ValueError("`--nodes` is missing: give the number of nodes, for example --nodes 2")
        check_number("--nodes", options.nodes, 1, MOST_NODES)
        check_number("--ranks-per-node", options.ranks_per_node, 1, MOST_RANKS)
        nodes = [options.ranks_per_node] * int(options.nodes)
    if sum(nodes) > MOST_RANKS:
        raise ValueError(
            f"`--{'nodes' if options.uneven is None else 'uneven'}`: {sum(nodes)} ranks in all; wanted at most "
            f"{MOST_RANKS} on one machine"
        )
    return nodes


def nic_table(cluster: EmulatedCluster, nic_bytes: Sequence[NicBytes], after: str) -> Table:
    """Returns a table of the bytes on each node's link.

    Args:
        cluster: A cluster that runs or ran.
        nic_bytes: Bytes that each node's NICs carried.
        after: Words for the time in which they did so, for the title.
    """
    rate = ", ".join(dict.fromkeys(map(format_nic_rates, cluster.rates_by_nic))) or "no limit"
    title = f"bytes on the links ({rate}, {after})"
    table = Table("node", *right_columns("ranks", "sent", "received"), title=title, min_width=min(48, fitting_width()))
    for nic in nic_bytes:
        table.add_row(nic.hostname, str(cluster.nodes[nic.node]), f"{nic.tx:,}", f"{nic.rx:,}")
        for each in nic.nics if len(nic.nics) > 1 else ():
            table.add_row(f"  {each.interface}", "", f"{each.tx:,}", f"{each.rx:,}")
    return table


def as_record(cluster: EmulatedCluster, result: RunResult, command: list[str], order: str) -> dict[str, object]:
    """Returns the result of a run as a JSON object: exit statuses, and the traffic of each node.

    Args:
        cluster: Cluster on which the command ran.
        result: Result of its `run`.
        command: Program and arguments that were run.
        order: Order in which ranks were assigned to nodes.
    """
    paths = None
    if cluster.paths is not None:
        packets = [
            [[dataclasses.asdict(counts) for counts in row] for row in cluster.path_counts(network)]
            for network in range(len(cluster.interfaces))
        ]
        paths = dataclasses.asdict(cluster.paths) | {"packets": packets[0], "packets_by_nic": packets}
    return {
        "command": command,
        "nodes": list(cluster.nodes),
        "order": order,
        "nic_bits_per_second": cluster.nic_bits_per_second,
        "nic_rates": list(cluster.nic_rates),
        "rates_by_nic": [list(nics) for nics in cluster.rates_by_nic],
        "mtu": cluster.mtu,
        "paths": paths,
        "congestion": cluster.congestion,
        "carrier": cluster.carrier,
        "seconds": result.seconds,
        "returncodes": list(result.returncodes),
        "exit_status": result.exit_status,
        "nic_bytes": [dataclasses.asdict(nic) for nic in result.nic_bytes],
    }


def own_python(command: list[str]) -> list[str]:
    """Replaces `python` at the start of a command by this interpreter, because PATH's may have no torch and gradwire.

    Args:
        command: Program and arguments; a path such as `./python` is not replaced.
    """
    if command and command[0] in ("python", "python3"):
        return [sys.executable, *command[1:]]
    return command


def _printer(options: argparse.Namespace) -> RankLine | None:
    """Returns the callback that prints a rank's line; None if the ranks write to stdout and stderr themselves."""
    if not options.prefix and options.json != STDOUT:
        return None
    stream = sys.stderr if options.json == STDOUT else sys.stdout

    def print_line(rank: int, line: str) -> None:
        with nullcontext() if options.json == STDOUT else reader_may_leave():
            stream.write(f"[rank {rank}] {line}\n" if options.prefix else f"{line}\n")
            stream.flush()

    return print_line


def _show_paths(cluster: EmulatedCluster) -> None:
    console = CleanConsole(stderr=True)
    console.print(path_table(cluster))
    for relay in cluster.relays:
        if missed := relay.overrun():
            console.print(
                f"{relay.name} could not keep up: {missed:,} packets are missing besides; this machine is too busy for "
                "what the links carry"
            )


def _run(options: argparse.Namespace, command: list[str]) -> int:
    """Checks the options, runs the command on a new cluster, and reports; returns the exit status.

    Raises:
        ValueError: An option does not fit, or this machine cannot emulate a cluster.
        RuntimeError: The cluster cannot be set up, its relay has ended, or the file cannot be written.
    """
    # Check everything before a node is made.
    if not command:
        raise ValueError(f"`COMMAND`: found nothing after `--`; {_EXAMPLE}")
    nodes = ranks_of_nodes(options)
    if options.nic is not None:
        parse_nic_rates(options.nic, len(nodes), "--nic")
    check_number("--mtu", options.mtu, 576, 65535)
    parse_network(options.network, "--network")
    path = path_options(options)
    paths = path.read(len(nodes), has_rates=options.nic is not None, prefix="--")
    check_congestion(options.congestion, "--congestion")
    check_carrier(options.carrier, paths, "--carrier")
    check_number("--grace", options.grace, 0, MOST_SECONDS)
    check_number("--timeout", options.timeout, 0, MOST_SECONDS)
    check_output("--json", options.json)
    if (reason := available()) is not None:
        raise ValueError(f"cannot emulate a cluster here: {reason}")
    # Make the nodes.
    with ExitStack() as stack:
        with working(f"starting {len(nodes)} nodes"):
            cluster = stack.enter_context(
                EmulatedCluster(
                    nodes,
                    options.nic,
                    options.mtu,
                    names=options.names,
                    network=options.network,
                    path=path,
                    congestion=options.congestion,
                    carrier=options.carrier,
                )
            )
        # Run the ranks; a signal still gets the table of the traffic until then.
        print_line = _printer(options)
        console = CleanConsole(stderr=True)
        try:
            result = cluster.run(
                own_python(command),
                order=options.order,
                timeout_seconds=options.timeout,
                grace_seconds=options.grace,
                raw=print_line is None,
                on_line=print_line,
            )
        except EndedBySignal:
            console.print(nic_table(cluster, cluster.nic_bytes(), "stopped"))
            raise
        # Report the traffic.
        console.print(nic_table(cluster, result.nic_bytes, f"{result.seconds:.1f} s"))
        if cluster.paths is not None:
            _show_paths(cluster)
        write_json(options.json, as_record(cluster, result, command, options.order))
    return result.exit_status


def main(argv: list[str]) -> int:
    """Runs a command on an emulated cluster, and returns its exit status.

    Args:
        argv: Words of the command line after `emulate`: options, `--`, and the command.

    Returns:
        0 if no rank failed; else the status of the rank that failed first, 128 + signal for one that a signal ended;
        124 after `--timeout`; 2 for parameters that make no sense and for a machine that cannot emulate; 1 if the
        cluster cannot be set up, its relay has ended, or the file cannot be written.
    """
    split = argv.index("--") if "--" in argv else len(argv)
    options = build_parser().parse_args(argv[:split])
    try:
        with clean_end():
            return _run(options, argv[split + 1 :])
    except ValueError as error:
        complain("emulate", error)
        return 2
    except RuntimeError as error:
        complain("emulate", error)
        return 1
