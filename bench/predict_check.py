"""Predicted against measured: times plans and compressors on a real or emulated cluster beside what the model says.

Run it as the ranks of a job: `gradwire emulate --nodes 2 --ranks-per-node 2 --nic 200mbit -- python -m
gradwire.bench.predict_check`. Rank 0 prints one JSON line a case.
"""

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.comms.codec_price import final, measured_price, settling, square_layout, wire_ratio
from gradwire.comms.communicator import Communicator
from gradwire.comms.compat import store_of
from gradwire.comms.config import Config
from gradwire.comms.consensus import Consensus
from gradwire.comms.planner import plan_all_reduce
from gradwire.comms.price import CodecPrice
from gradwire.comms.probe import line_up, probe
from gradwire.comms.store import PollingStore
from gradwire.compressors import registry
from gradwire.compressors.base import Layout

TIMEOUT = timedelta(seconds=120)

CASES = ("flat", "hierarchical", *(f"hierarchical+{name}" for name in registry.names() if name != "none"))

SAMPLE_NBYTES, SIDE = 4 << 20, 256
"""Gradient that the codecs are timed on, and the sides of its matrices."""


class Check:
    """One rank's measurements.

    Args:
        nbytes: Size of the gradient.
        rounds: All-reduces timed of each case, after two that are not: the first is dense, the second connects and takes memory.
        seconds: What is over sooner is repeated until it has taken this long: of something short, a disturbance of a few
            milliseconds is a large part.
    """

    def __init__(self, nbytes: int, rounds: int, seconds: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        group = dist.group.WORLD
        assert group is not None
        self.store = store_of(group)
        self.layout = square_layout(nbytes, side=SIDE)
        self.rounds, self.seconds = rounds, seconds
        self.consensus = Consensus(PollingStore(self.store, TIMEOUT), self.rank, self.size, "check", TIMEOUT)
        probing = self.communicator("probe", Config.from_env(timeout=TIMEOUT), "none")
        self.levels = probe(probing, self.consensus)
        probing.close()

    def communicator(self, name: str, config: Config, compressor: str) -> Communicator:
        """A communicator of its own, with a compressor whose warm-up is over after the first round."""
        used = None if compressor == "none" else settling(compressor)
        return Communicator(self.store, self.rank, self.size, torch.device("cpu"), config, name=name, compressor=used)

    def run(self, plan: str, compressor: str) -> dict[str, object]:
        """Predicted and measured seconds of one plan with one compressor."""
        communicator = self.communicator(f"{plan}+{compressor}", Config.from_env(plan=plan, timeout=TIMEOUT), compressor)
        communicator.routes.measured(self.levels)
        predicted = plan_all_reduce(communicator.cluster, 4 * self.layout.numel, name=plan,
                                    price=self.price(compressor, len(communicator.cluster.nodes)))
        communicator.routes.choose(plan, predicted.chunks, "Under test.")
        rounds = max(self.rounds, math.ceil(self.seconds / predicted.seconds))
        measured = self._time(communicator, None if compressor == "none" else self.layout, rounds)
        communicator.close()
        middle = statistics.median(measured)
        return {"predicted_seconds": predicted.seconds, "chunks": predicted.chunks,
                "measured_seconds": middle, "ratio": predicted.seconds / middle, "rounds_seconds": measured,
                "nic_nbytes": predicted.bytes_by_level["inter_node"]}

    def price(self, compressor: str, nodes: int) -> CodecPrice:
        """What a compressor costs with all ranks encoding at once: the slowest rank's, hence one plan on all of them."""
        own = measured_price(compressor, square_layout(SAMPLE_NBYTES, side=SIDE), nodes,
                             slowest=lambda seconds: self.slowest([seconds])[0])
        return own if compressor == "none" else replace(own, ratio=wire_ratio(final(compressor), self.layout, nodes))

    def _time(self, communicator: Communicator, layout: Layout | None, rounds: int) -> list[float]:
        """Each all-reduce's time on the slowest rank; the ranks begin together."""
        gradient = torch.randn(self.layout.numel, generator=torch.Generator().manual_seed(self.rank))
        flat, times = torch.empty_like(gradient), []
        for _ in range(rounds + 2):
            flat.copy_(gradient)
            line_up(communicator)
            began = time.perf_counter()
            communicator.all_reduce(flat, layout=layout).wait()
            times.append(time.perf_counter() - began)
            if communicator.compressor:
                communicator.compressor.end_step(True)
        return self.slowest(times[2:])

    def slowest(self, own: list[float]) -> list[float]:
        """Place by place the largest of all ranks' numbers."""
        numbers = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return numbers.tolist()


def main(argv: list[str]) -> int:
    """Runs all cases as one rank; returns 0.

    Args:
        argv: Words after the module's name.
    """
    parser = argparse.ArgumentParser(prog="gradwire.bench.predict_check", description=__doc__)
    parser.add_argument("--gradient-mb", type=float, default=8.388608)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.4, help="repeat what is short for this long (default 0.4)")
    parser.add_argument("--cases", default=",".join(CASES), help="plans, and plans with a compressor: flat,hierarchical+int8")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    check = Check(round(options.gradient_mb * 1e6), options.rounds, options.seconds)
    if check.rank == 0:
        print(json.dumps({level.name: asdict(level.link) for level in check.levels}))
    for name in options.cases.split(","):
        plan, _, compressor = name.partition("+")
        result = check.run(plan, compressor or "none")
        if check.rank == 0:
            print(json.dumps({"name": name} | result), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
