"""Times large messages between nodes through one gloo group and through two, and sums in two orders.

Feeds docs/results/exchanges.md.

    python -m gradwire.bench.studies.exchanges.full_duplex              # 2x1, 2x2 and 4x2; needs root
    python -m gradwire.bench.studies.exchanges.full_duplex 4x2 --sums   # all-reduces in rank order, beside gloo's ring

All configurations take turns in one job on an emulated cluster, so that a slow moment of the machine slows all alike.
"""

import sys
from datetime import timedelta

import torch
from rich.console import Console
from rich.table import Table

from gradwire.bench.configuration import Configuration
from gradwire.bench.emulation.fork import ForkedRank
from gradwire.bench.emulation.rate import parse_rate
from gradwire.bench.emulation.signals import clean_end
from gradwire.bench.machine import machine_line
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.bench.studies.shared.turns import hear_turns, tell_turns
from gradwire.comms.bootstrap.compat import PrefixStore, Store
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.transport import torch_group

TIMEOUT = timedelta(seconds=60)
CASES = {"2x1": [1, 1], "2x2": [2, 2], "4x2": [2] * 4}
PAYLOAD_NBYTES = 2 << 20
"""Bytes that every rank sends to all of its peers together."""

SUM_NUMEL = 2_000_000
CHUNKS = (1, 2, 4, 8)
ROUNDS = 5
NEVER = 1 << 40


def exchange(place: ForkedRank, store: Store, name: str, large_nbytes: int) -> Configuration:
    """Makes the configuration of an all-to-all with the ranks of the same index on the other nodes.

    Args:
        place: Rank and nodes of the forked job.
        store: Store of the default group.
        name: Name of the configuration.
        large_nbytes: Size of a message from which on it is sent over two gloo groups.
    """
    count, index = len(place.nodes), place.rank % place.nodes[0]
    transport = torch_group.connect_gloo(
        PrefixStore(f"{name}/{index}", store), place.node, count, TIMEOUT, interface=place.interface
    )
    piece = PAYLOAD_NBYTES // (count - 1)
    source, output = torch.zeros(2, count * piece, dtype=torch.uint8)

    def step(_: int) -> None:
        torch_group.LARGE_NBYTES = large_nbytes
        transport.all_to_all(output, source).wait()

    return Configuration(name, step)


def summed(place: ForkedRank, store: Store, plan: str, chunks: int, order: str, large_nbytes: int) -> Configuration:
    """Makes the configuration of an exact all-reduce of `SUM_NUMEL` float32.

    Args:
        place: Rank and nodes of the forked job.
        store: Store of the default group.
        plan: Name of the plan.
        chunks: Number of chunks.
        order: `ring` sums in the order of gloo's ring; any other name sums in the order of ranks.
        large_nbytes: Size of a message from which on it is sent over two gloo groups.
    """
    fusion = {} if order == "ring" else {"fusion": 25.0}
    name = f"{plan}, {order}, {chunks}"
    communicator = Communicator(
        store,
        place.rank,
        place.world_size,
        torch.device("cpu"),
        Config.from_env(plan=plan, timeout=TIMEOUT, **fusion),
        name=name,
    )
    communicator.rank_plans.choose(plan, chunks, "Under test.")
    flat = torch.zeros(SUM_NUMEL)

    def step(_: int) -> None:
        torch_group.LARGE_NBYTES = large_nbytes
        communicator.all_reduce(flat).wait()

    return Configuration(name, step)


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    """Measures as one rank of the forked job; rank 0 reports the figures. Returns the exit status.

    Args:
        place: Rank and nodes of the forked job.
        arguments: One word: `exchange` or `sums`.
    """
    usual = torch_group.LARGE_NBYTES

    def make(store: Store) -> list[Configuration]:
        if arguments == ["exchange"]:
            return [exchange(place, store, "one group", NEVER), exchange(place, store, "two groups", 0)]
        return [
            summed(place, store, plan, chunks, order, large)
            for plan in ("hierarchical", "flat")
            for chunks in CHUNKS
            for order, large in (("ring", usual), ("one group", NEVER), ("two groups", usual))
        ]

    return tell_turns(place, make, rounds=ROUNDS, timeout=TIMEOUT)


def measure(case: str, nic: str, what: str) -> dict[str, float]:
    """Measures every configuration on one emulated cluster; returns name -> median seconds.

    Args:
        case: Key of `CASES`.
        nic: Rate of each node's link.
        what: `exchange` or `sums`.

    Raises:
        RuntimeError: This machine cannot emulate a cluster, or a rank failed.
    """
    found = hear_turns("exchanges.full_duplex", [what], nodes=CASES[case], nic=nic, timeout_seconds=300)
    return {name: one.median_seconds for name, one in found.items()}


def exchanges(cases: list[str], nic: str) -> Table:
    """Measures the all-to-all on some clusters; returns a table with the time that the link alone would take."""
    rows = Table("nodes x ranks", "the wire alone, ms", "one group", "two groups", title=machine_line())
    for case in cases:
        found = measure(case, nic, "exchange")
        wire = CASES[case][0] * PAYLOAD_NBYTES / (parse_rate(nic, "--nic") / 8)
        rows.add_row(case, *(f"{1e3 * each:.0f}" for each in (wire, found["one group"], found["two groups"])))
    return rows


def sums(case: str, nic: str) -> Table:
    """Measures an all-reduce of 8 MB on one cluster; returns a table by plan, order of the sum and number of chunks."""
    found = measure(case, nic, "sums")
    rows = Table("plan, sums", *(f"{chunks} chunks, ms" for chunks in CHUNKS), title=f"{case}; {machine_line()}")
    for plan in ("hierarchical", "flat"):
        for order in ("ring", "one group", "two groups"):
            rows.add_row(f"{plan}, {order}", *(f"{1e3 * found[f'{plan}, {order}, {chunks}']:.0f}" for chunks in CHUNKS))
    return rows


def main(argv: list[str]) -> int:
    """Measures and prints the tables; returns the exit status."""
    parser = StudyParser("exchanges.full_duplex", __doc__)
    parser.add_names("case", CASES)
    parser.add_argument("--sums", action="store_true", help="all-reduces in rank order, in place of exchanges")
    parser.add_argument("--nic", default="200mbit", help="rate of each node's link (default 200mbit)")
    options = parser.parse_args(argv)
    cases = options.cases or list(CASES)
    with clean_end():
        for found in [sums(case, options.nic) for case in cases] if options.sums else [exchanges(cases, options.nic)]:
            Console(width=110).print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
