"""Measures the share of a link with delay and loss that an exact sum uses: gloo, and gradwire by TCP connections.

    python -m gradwire.bench.studies.distance.streams --delays 1ms,40ms --losses 0%,0.1% --megabytes 16

Every pair of delay and loss is one emulated cluster, on which all configurations take turns. The last column is the
prediction of `gradwire predict --rtt --loss` for such a link.
"""

import os
import sys
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from gradwire.bench.configuration import Configuration
from gradwire.bench.emulation.fork import ForkedRank
from gradwire.bench.emulation.paths import MOST_DELAY_SECONDS, PathOptions, parse_loss, parse_seconds
from gradwire.bench.emulation.rate import parse_rate
from gradwire.bench.emulation.signals import clean_end
from gradwire.bench.machine import machine_line
from gradwire.bench.studies.hook_speed import DATA_SHARE
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.bench.studies.shared.turns import hear_turns, tell_turns
from gradwire.comms.bootstrap.compat import PrefixStore, Store, make_gloo
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.links.distance import over_distance
from gradwire.comms.links.quick_probe import quick_probe
from gradwire.topology.cluster import Link
from gradwire.topology.fabric import TCP_ALPHA_SECONDS

TIMEOUT = timedelta(seconds=600)
GLOO = "gloo"


def gloo(place: ForkedRank, store: Store, numel: int) -> Configuration:
    """Makes the configuration of gloo's all-reduce, which plain DDP uses, of `numel` float32."""
    group = make_gloo(PrefixStore("gloo", store), place.rank, len(place.nodes), TIMEOUT, (place.interface,))
    flat = torch.ones(numel)

    def step(_: int) -> None:
        group.allreduce([flat], dist.AllreduceOptions()).wait()

    return Configuration(GLOO, step)


def gradwire(place: ForkedRank, store: Store, numel: int, connections: int) -> Configuration:
    """Makes the configuration of gradwire's exact sum over a number of connections.

    Args:
        place: Rank and nodes of the forked job.
        store: Store of the default group.
        numel: Number of float32 that are summed.
        connections: Number of connections; 0 leaves it to gradwire, which probes the links.
    """
    name = f"gradwire, {connections or 'chosen'}"
    config = Config.from_env(timeout=TIMEOUT, transport=f"gloo:{connections}" if connections else "gloo")
    communicator = Communicator(store, place.rank, len(place.nodes), torch.device("cpu"), config, name=name)
    quick_probe(communicator)
    flat = torch.ones(numel)

    def step(_: int) -> None:
        communicator.all_reduce(flat).wait()

    return Configuration(name, step)


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    """Runs one rank's part of the comparison; returns its exit status.

    Args:
        place: Rank and nodes of the forked job.
        arguments: Number of elements, number of rounds, numbers of connections to try with commas between them.
    """
    numel, rounds, counts = int(arguments[0]), int(arguments[1]), [int(count) for count in arguments[2].split(",")]

    def make(store: Store) -> list[Configuration]:
        return [gloo(place, store, numel), *(gradwire(place, store, numel, count) for count in counts)]

    return tell_turns(place, make, rounds=rounds, timeout=TIMEOUT)


def measure(
    nic: str, path: PathOptions, numel: int, rounds: int, congestion: str, connections: str, nodes: int = 2
) -> dict[str, float]:
    """Runs all configurations on an emulated cluster of nodes with one rank, and returns name -> median seconds.

    Args:
        nic: Rate of each node's link.
        path: Delay and loss between the nodes.
        numel: Number of float32 that are summed.
        rounds: Number of rounds of each configuration.
        congestion: Name of TCP's congestion control, see `EmulatedCluster`.
        connections: Numbers of connections to try, with commas between them.
        nodes: Number of nodes.

    Raises:
        RuntimeError: This machine cannot emulate a cluster, or a rank failed.
    """
    found = hear_turns(
        "distance.streams",
        [str(numel), str(rounds), connections],
        nodes=[1] * nodes,
        nic=nic,
        timeout_seconds=600,
        path=path,
        congestion=congestion,
    )
    return {name: one.median_seconds for name, one in found.items()}


def predicted(nic: str, round_trip_seconds: float, loss: float, numel: int, nodes: int) -> float:
    """Returns the seconds that `gradwire predict --rtt --loss` would predict for the exact sum, one rank a node."""
    bare = Link(TCP_ALPHA_SECONDS, parse_rate(nic, "--nic") * DATA_SHARE / 8)
    link = over_distance(bare, nodes, round_trip_seconds, loss)
    messages = 2 * (nodes - 1)
    return messages * link.alpha_seconds + messages / nodes * 4 * numel / link.rate(1)


def main(argv: list[str]) -> int:
    """Measures every pair of delay and loss on a cluster of its own, prints a row each, then the table; returns 0."""
    parser = StudyParser("distance.streams", __doc__)
    parser.add_argument("--nic", default="100mbit")
    parser.add_argument("--delays", default="0.5ms,10ms,40ms,75ms", help="one way")
    parser.add_argument("--losses", default="0%,0.01%,0.1%,1%")
    parser.add_argument("--megabytes", type=float, default=16.0)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--congestion", default="cubic")
    parser.add_argument("--connections", default="1,0", help="0: chosen by gradwire")
    options = parser.parse_args(argv)
    numel = int(options.megabytes * 1e6 / 4)
    share = 2 * (options.nodes - 1) / options.nodes
    best = share * numel * 4 * 8 / (parse_rate(options.nic, "--nic") * DATA_SHARE)
    table = Table("round trip", "loss", title=f"{options.megabytes:g} MB, share of the goodput; {machine_line()}")
    rows, names = [], list[str]()
    for delay, loss in product(options.delays.split(","), options.losses.split(",")):
        trip = 2e3 * parse_seconds(delay, "--delays", MOST_DELAY_SECONDS)
        lost = parse_loss(loss, "--losses")
        path = PathOptions(delay=delay, loss=loss)
        found = measure(
            options.nic, path, numel, options.rounds, options.congestion, options.connections, options.nodes
        )
        found["predicted"] = predicted(options.nic, trip / 1e3, lost, numel, options.nodes)
        names = list(found)
        row = [f"{trip:g} ms", loss, *(f"{best / seconds:.2f}" for seconds in found.values())]
        rows.append(row)
        print(*row, f"load {os.getloadavg()[0]:.0f}", flush=True)
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    with clean_end():
        sys.exit(main(sys.argv[1:]))
