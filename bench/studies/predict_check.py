"""Predicted against measured: times plans and compressors on a real or emulated cluster beside what the model says.

Run it as the ranks of a job: `gradwire emulate --nodes 2 --ranks-per-node 2 --nic 200mbit -- python -m
gradwire.bench.studies.predict_check`, or as `run_forked`'s module. Rank 0 prints one JSON line a case.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire.bench.emulation.fork import Place
from gradwire.comms.autotune.consensus import Consensus
from gradwire.comms.autotune.probe import line_up, probe
from gradwire.comms.bootstrap.compat import store_of
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.plan.codec_price import alone, final, measured_price, settling, square_layout, wire_ratio
from gradwire.comms.plan.cost import CodecPrice
from gradwire.comms.plan.planner import plan_all_reduce
from gradwire.compressors import registry
from gradwire.compressors.base import Layout
from gradwire.topology.cluster import Cluster

TIMEOUT = timedelta(seconds=120)
LAZY = ()
"""See compare_fork: nothing is trained."""

CASES = ("flat", "hierarchical", *(f"hierarchical+{name}" for name in registry.names() if name != "none"))

SAMPLE_NBYTES, SIDE = 16 << 20, 256
"""Gradient that the codecs are timed on (more than the caches hold, as a model's is), and the sides of its matrices."""

PRICE_SECONDS = 0.4
"""For each of a codec's two sizes: the turns of ranks that share a core are milliseconds."""

ON_THEIR_WAY_SECONDS = 0.1
"""For acknowledgements, before a card's bytes are read."""


class Check:
    """One rank's measurements.

    Args:
        rounds: All-reduces timed of each case, after those that are not: the first connects; with a compressor it is dense,
            and the second connects and takes memory.
        seconds: What is over sooner is repeated until it has taken this long: of something short, a disturbance of a few
            milliseconds is a large part.
    """

    def __init__(self, rounds: int, seconds: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        group = dist.group.WORLD
        assert group is not None
        self.store = store_of(group)
        self.rounds, self.seconds, self.shares = rounds, seconds, list[float]()
        self.consensus = Consensus(PollingStore(self.store, TIMEOUT), self.rank, self.size, "check", TIMEOUT)
        probing = self.communicator("probe", Config.from_env(timeout=TIMEOUT), "none")
        self.levels = probe(probing, self.consensus)
        probing.close()

    def communicator(self, name: str, config: Config, compressor: str) -> Communicator:
        """A communicator of its own, with a compressor whose warm-up is over after the first round."""
        used = None if compressor == "none" else settling(compressor)
        return Communicator(self.store, self.rank, self.size, torch.device("cpu"), config, name=name, compressor=used)

    def run(self, name: str, nbytes: int) -> dict[str, object]:
        """Predicted and measured seconds of one case, and the bytes that the busiest card sends.

        Args:
            name: A plan, or `plan+compressor`.
            nbytes: Of the gradient.
        """
        plan, _, compressor = name.partition("+")
        layout, compressor = square_layout(nbytes, side=SIDE), compressor or "none"
        communicator = self.communicator(f"{name} {nbytes}", Config.from_env(plan=plan, timeout=TIMEOUT), compressor)
        communicator.routes.measured(self.levels)
        price = self.price(compressor, layout, communicator.cluster.nodes)
        predicted = plan_all_reduce(communicator.cluster, 4 * layout.numel, name=plan, price=price)
        inside = plan_all_reduce(
            without_links(communicator.cluster), 4 * layout.numel, name=plan, chunks=predicted.chunks, price=price
        )
        communicator.routes.choose(plan, predicted.chunks, "Under test.")
        measured, sent = self._time(communicator, layout, max(self.rounds, math.ceil(self.seconds / predicted.seconds)))
        communicator.close()
        middle = statistics.median(measured)
        return {
            "name": name,
            "gradient_nbytes": 4 * layout.numel,
            "predicted_seconds": predicted.seconds,
            "predicted_inside_seconds": inside.seconds,
            "chunks": predicted.chunks,
            "measured_seconds": middle,
            "ratio": predicted.seconds / middle,
            "rounds_seconds": measured,
            "predicted_nic_nbytes": predicted.bytes_by_level["inter_node"],
            "nic_nbytes": sent,
        }

    def price(self, compressor: str, layout: Layout, nodes: Sequence[Sequence[int]]) -> CodecPrice:
        """What a compressor costs with all ranks encoding at once, one price and hence one plan on all of them.

        The slowest node's processor counts, with the share of a core that ranks usually have: in a short while the
        scheduler gives one of them more and another less.
        """

        def agree(processor_seconds: float, share: float) -> float:
            numbers = torch.zeros(2, self.size, dtype=torch.float64)
            numbers[:, self.rank] = torch.tensor([processor_seconds, share])
            dist.all_reduce(numbers)
            self.shares.append(float(numbers[1].mean()))
            of_node = max(float(numbers[0, list(ranks)].mean()) for ranks in nodes)
            return alone(of_node, statistics.median(self.shares))

        price = measured_price(
            compressor, square_layout(SAMPLE_NBYTES, side=SIDE), len(nodes), PRICE_SECONDS, dist.barrier, agree
        )
        return (
            price if compressor == "none" else replace(price, ratio=wire_ratio(final(compressor), layout, len(nodes)))
        )

    def _time(self, communicator: Communicator, layout: Layout, rounds: int) -> tuple[list[float], float]:
        """Each all-reduce's time on the slowest rank, and the bytes of one on the busiest card; the ranks begin together."""
        gradient = torch.randn(layout.numel, generator=torch.Generator().manual_seed(self.rank))
        flat, compressor = torch.empty_like(gradient), communicator.compressor

        def once() -> float:
            flat.copy_(gradient)
            line_up(communicator)
            began = time.perf_counter()
            communicator.all_reduce(flat, layout=layout if compressor else None).wait()
            took = time.perf_counter() - began
            if compressor:
                compressor.end_step(True)
            return took

        for _ in range(2 if compressor else 1):
            once()
        before = self._sent(communicator)
        times = [once() for _ in range(rounds)]
        sent = self._sent(communicator) - before
        return self.slowest(times), self.slowest([sent / rounds])[0]

    def _sent(self, communicator: Communicator) -> int:
        """Bytes that this node's cards have sent, once all ranks are through."""
        line_up(communicator)
        time.sleep(ON_THEIR_WAY_SECONDS)
        cards = [card for card in Path("/sys/class/net").iterdir() if card.name != "lo"]
        sent = sum(int((card / "statistics" / "tx_bytes").read_text()) for card in cards)
        line_up(communicator)
        return sent

    def slowest(self, own: list[float]) -> list[float]:
        """Place by place the largest of all ranks' numbers."""
        numbers = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return numbers.tolist()


def without_links(cluster: Cluster) -> Cluster:
    """The cluster with links between nodes that take no time: what is left is what its processors do."""
    level = cluster.levels[-1]
    link = replace(level.link, alpha_seconds=0.0, exchange_alpha_seconds=0.0, bytes_per_second=1e18)
    return replace(cluster, levels=(*cluster.levels[:-1], replace(level, link=link)))


def _check(options: argparse.Namespace) -> int:
    """Runs the cases as one rank, the default group being up; takes it down and returns 0."""
    check = Check(options.rounds, options.seconds)
    if check.rank == 0:
        print(json.dumps({level.name: asdict(level.link) for level in check.levels}))
    for case in options.cases.split(","):
        name, _, megabytes = case.partition("@")
        result = check.run(name, round(float(megabytes or options.gradient_mb) * 1e6))
        if check.rank == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()
    return 0


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gradwire.bench.studies.predict_check", description=__doc__)
    parser.add_argument("--gradient-mb", type=float, default=26.2144, help="default 26.2144: DDP's bucket of 25 MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.4, help="repeat what is short for this long (default 0.4)")
    parser.add_argument(
        "--cases",
        default=",".join(CASES),
        help="plans, with a compressor, with a gradient of their own in MB: flat@8,hierarchical+int8",
    )
    return parser.parse_args(argv)


def rank_main(place: Place, arguments: list[str]) -> int:
    """Runs all cases as one forked rank; returns 0.

    Args:
        place: Where this rank is.
        arguments: As of `main`.
    """
    options = _options(arguments)
    torch.set_num_threads(1)
    place.connect(TIMEOUT)
    return _check(options)


def main(argv: list[str]) -> int:
    """Runs all cases as one rank of a launched job; returns 0.

    Args:
        argv: Words after the module's name.
    """
    options = _options(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    return _check(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
