"""What an exact sum between nodes gains by a second network card: gloo, the hook over one card, and over all.

    python -m gradwire.bench.studies.distance.cards --nics 100mbit+100mbit,75mbit+25mbit --megabytes 16

Each pair of cards is one emulated cluster, on which the contenders take turns. The first card is gloo's. The ratios are
of medians of one run: how many times as fast as over gloo's card the hook is over all cards, beside what the sum of the
rates would give.
"""

import os
import sys

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from gradwire.bench.contender import Contender, take_turns
from gradwire.bench.emulation.fork import ForkedRank, hear_forked
from gradwire.bench.emulation.rate import parse_cards
from gradwire.bench.emulation.signals import clean_end
from gradwire.bench.machine import machine_line
from gradwire.bench.studies.distance.streams import GLOO, TIMEOUT, gloo
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.bench.terminal import right_columns
from gradwire.comms.autotune.card_trial import try_cards
from gradwire.comms.bootstrap.compat import Store, store_of
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config

ONE, ALL = "one card", "all cards"


def gradwire(place: ForkedRank, store: Store, numel: int, name: str) -> tuple[Contender, Communicator]:
    """The hook's sum over gloo's card, or over all of them."""
    config = Config.from_env(timeout=TIMEOUT, nics="one" if name == ONE else ",".join(place_cards()))
    communicator = Communicator(store, place.rank, len(place.nodes), torch.device("cpu"), config, name=name)
    try_cards(communicator)
    flat = torch.ones(numel)

    def step(_: int) -> None:
        communicator.all_reduce(flat).wait()

    return Contender(name, step), communicator


def place_cards() -> list[str]:
    """The cards of this node, in order."""
    return sorted(name for name in os.listdir("/sys/class/net") if name.startswith("eth"))  # noqa: PTH208 - names alone


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    """One rank's part; rank 0 tells the medians in seconds, by name, and what the cards carried.

    Args:
        place: Where this rank is.
        arguments: Elements, rounds.
    """
    numel, rounds = int(arguments[0]), int(arguments[1])
    torch.set_num_threads(1)
    place.connect(TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    store = store_of(group)
    one, _ = gradwire(place, store, numel, ONE)
    every, communicator = gradwire(place, store, numel, ALL)
    contenders = [gloo(place, store, numel), one, every]
    take_turns(contenders, rounds=rounds, warmup=1, interface=None)
    assert communicator.cards is not None
    carried = [each.sent_nbytes for each in communicator.cards.totals()]
    place.tell({"seconds": {each.name: each.median_seconds for each in contenders}, "carried": carried})
    return 0


def main(argv: list[str]) -> int:
    """Measures and prints the table; returns the exit status."""
    parser = StudyParser("distance.cards", __doc__)
    parser.add_argument("--nics", default="100mbit+100mbit,75mbit+25mbit", help="clusters to try, with commas")
    parser.add_argument("--megabytes", type=float, default=16.0)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    numel = int(options.megabytes * 1e6 / 4)
    headings = "cards", GLOO, ONE, ALL, "over gloo", "over one", "sum of rates", "carried", "load"
    title = f"{options.megabytes:g} MB over {options.nodes} nodes, medians; {machine_line()}"
    table = Table(*right_columns(*headings), title=title)
    for nic in options.nics.split(","):
        rates = parse_cards(nic, 1, "--nics")[0]
        found = hear_forked(
            "gradwire.bench.studies.distance.cards",
            [str(numel), str(options.rounds)],
            nodes=[1] * options.nodes,
            nic=nic,
            timeout_seconds=600,
        )
        took, carried = found["seconds"], found["carried"]
        row = [
            nic,
            *(f"{took[name]:.3f} s" for name in (GLOO, ONE, ALL)),
            f"{took[GLOO] / took[ALL]:.2f}",
            f"{took[ONE] / took[ALL]:.2f}",
            f"{sum(rates) / rates[0]:.2f}",
            "+".join(f"{each / sum(carried):.2f}" for each in carried),
            f"{os.getloadavg()[0]:.0f}",
        ]
        print(*row, flush=True)
        table.add_row(*row)
    Console(width=130).print(table)
    return 0


if __name__ == "__main__":
    with clean_end():
        sys.exit(main(sys.argv[1:]))
