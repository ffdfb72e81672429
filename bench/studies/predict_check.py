"""Compares predicted and measured seconds and bytes of plans and compressors, for docs/results/predictions.md.

    python -m gradwire.bench.studies.predict_check                  # 2x2, 4x2 and 4x4 at 200 Mbit/s; needs root
    python -m gradwire.bench.studies.predict_check 2x2 --bytes      # bytes alone: nothing is probed or timed

It ends with status 1 if a case is off: bytes by more than headers explain, or seconds by more than 20 % on a machine
that had nothing else to do. As the ranks of a job (`gradwire emulate --nodes 2 --ranks-per-node 2 --nic 200mbit --
python -m gradwire.bench.studies.predict_check`) it measures the network that is there, and rank 0 prints one JSON line
a case.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.fork import ForkedRank, run_forked
from gradwire.bench.emulation.rate import parse_rate
from gradwire.bench.emulation.signals import clean_end
from gradwire.bench.machine import machine_line
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.compat import store_of
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.environment import launcher_variables
from gradwire.comms.links.probe import line_up, probe
from gradwire.comms.plan.codec_price import (
    alone,
    codec_price,
    final,
    measured_price,
    square_layout,
    wire_ratio,
    with_short_start,
)
from gradwire.comms.plan.cost import CodecPrice
from gradwire.comms.plan.planner import plan_all_reduce
from gradwire.compressors import registry
from gradwire.compressors.base import Layout
from gradwire.compressors.speed import core_bytes_per_second
from gradwire.topology.cluster import Level

TIMEOUT = timedelta(seconds=120)

CLUSTERS = {"2x2": [2] * 2, "4x2": [2] * 4, "4x4": [4] * 4}
"""Name -> ranks of each node."""
NIC = "200mbit"
LARGE_MB = 26.2144
"""DDP's bucket of 25 MiB, so that what ranks on a core do to each other is a small part of a compressed case."""
SMALL_MB = {"flat": 8, "hierarchical": 8, "hierarchical+fp16": 8, "hierarchical+bf16": 8}
"""Megabytes of the gradient, by name, of cases that would take long on emulated clusters; others have `LARGE_MB`."""

CASES = ("flat", "hierarchical", *(f"hierarchical+{name}" for name in registry.names() if name != "none"))

SAMPLE_NBYTES, SIDE = 16 << 20, 256
"""Gradient that the codecs are timed on (more than the caches hold, as a model's is), and the sides of its matrices."""

PRICE_SECONDS = 0.4
"""Time for which a codec is timed on each of two sizes: long against the milliseconds for which the scheduler lets one
of several ranks on a core run."""

ON_THEIR_WAY_SECONDS = 0.1
"""Pause before a NIC's bytes are read, so that acknowledgements have arrived."""

HEADER_SHARE, SMALL_NBYTES = 1.08, 8_000
"""Most bytes on a NIC over the predicted ones, and bytes for each rank on top. Headers, acknowledgements and control
messages are 4 to 6 % of large messages; a round's barrier and its acknowledgements are what the second covers."""

NEAR = 0.2
"""Largest deviation of predicted from measured seconds, as a share of the measured ones. Only cases that the links
between nodes limit are judged: if ranks share cores, a phase inside a node that takes 1.3 ms takes up to 6.3 for a rank
that gets its core late."""

STEADY = 1.25
"""Factor by which the medians of the even and of the odd rounds may differ in a measurement that counts."""

FOREIGN_SHARE = 0.15
"""Share of one core below which other programs must stay for the seconds to count."""


class CaseRunner:
    """Measures cases on one rank; all ranks must call the same methods in the same order.

    Args:
        rounds: Least number of timed all-reduces of a case, after those that are not timed: the first one connects;
            with a compressor the first is dense, and the second connects and allocates.
        seconds: Least predicted time of all rounds of a case together: a short case is repeated more often, because a
            disturbance of a few milliseconds is a large part of it.
        probed: True measures the links first; without it only their rate is known, which is enough for `count`.
    """

    def __init__(self, rounds: int, seconds: float, probed: bool = True) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        group = dist.group.WORLD
        assert group is not None
        self.store = store_of(group)
        self.rounds, self.seconds, self.shares = rounds, seconds, list[float]()
        self.consensus = Agreement(PollingStore(self.store, TIMEOUT), self.rank, self.size, "check", TIMEOUT)
        self.levels: tuple[Level, ...] = ()
        if probed:
            probing = self.communicator("probe", Config.from_env(timeout=TIMEOUT), "none")
            self.levels = tuple(probe(probing, self.consensus))
            probing.close()

    def communicator(self, name: str, config: Config, compressor: str) -> Communicator:
        """Returns a new communicator with a compressor whose warm-up is over after the first round.

        Args:
            name: Name that no other communicator of the job has; the same on all ranks.
            config: Settings of the communicator.
            compressor: Name of the compressor, or `none`.
        """
        used = None if compressor == "none" else with_short_start(compressor)
        return Communicator(self.store, self.rank, self.size, torch.device("cpu"), config, name=name, compressor=used)

    def run(self, name: str, nbytes: int) -> dict[str, object]:
        """Predicts and measures the seconds of one case, and the bytes that the busiest NIC sends.

        Args:
            name: Name of a plan, or `plan+compressor`.
            nbytes: Size of the gradient in bytes.

        Returns:
            The figures by name, as rank 0 prints them; those that `CheckedCase` holds are among them.
        """
        plan, compressor, layout, communicator = self._case(name, nbytes)
        communicator.rank_plans.measured(self.levels)
        price = self.price(compressor, layout, communicator.cluster.nodes)
        predicted = plan_all_reduce(communicator.cluster, 4 * layout.numel, name=plan, price=price)
        communicator.rank_plans.choose(plan, predicted.chunks, "Under test.")
        measured, sent = self._time(communicator, layout, max(self.rounds, math.ceil(self.seconds / predicted.seconds)))
        communicator.close()
        middle = statistics.median(measured)
        return {
            "name": name,
            "predicted_seconds": predicted.seconds,
            "limit": predicted.limit,
            "measured_seconds": middle,
            "rounds_seconds": measured,
            "predicted_nic_nbytes": predicted.bytes_by_level["inter_node"],
            "nic_nbytes": sent,
        }

    def count(self, name: str, nbytes: int) -> dict[str, object]:
        """Predicts and counts the bytes of one case, on links of which only the rate `NIC` is known.

        Args:
            name: Name of a plan, or `plan+compressor`.
            nbytes: Size of the gradient in bytes.

        Returns:
            The case's name, and the predicted and counted bytes.
        """
        rate = parse_rate(NIC, "nic") / 8
        plan, compressor, layout, communicator = self._case(name, nbytes, nic_bytes_per_second=rate)
        core = self.slowest([core_bytes_per_second()])[0]  # each rank measures another rate; one makes equal plans
        price = codec_price(compressor, layout, len(communicator.cluster.nodes), core)
        predicted = plan_all_reduce(communicator.cluster, 4 * layout.numel, name=plan, price=price)
        communicator.rank_plans.choose(plan, predicted.chunks, "Under test.")
        _, sent = self._time(communicator, layout, self.rounds)
        communicator.close()
        return {"name": name, "predicted_nic_nbytes": predicted.bytes_by_level["inter_node"], "nic_nbytes": sent}

    def _case(self, name: str, nbytes: int, **options: float) -> tuple[str, str, Layout, Communicator]:
        """Returns the plan, the compressor, the gradient's layout and a new communicator for a case."""
        plan, _, word = name.partition("+")
        compressor, config = word or "none", Config.from_env(plan=plan, timeout=TIMEOUT, **options)
        communicator = self.communicator(f"{name} {nbytes}", config, compressor)
        return plan, compressor, square_layout(nbytes, side=SIDE), communicator

    def price(self, compressor: str, layout: Layout, nodes: Sequence[Sequence[int]]) -> CodecPrice:
        """Measures what a compressor costs while all ranks encode at once; the result is the same on all ranks.

        Equal prices make all ranks choose the same plan. The price is that of the node with the slowest processor, for
        the share of a core that ranks usually have: in a short measurement the scheduler gives some more than others.

        Args:
            compressor: Name of the compressor, or `none`.
            layout: Gradient that the compression ratio is computed for.
            nodes: Ranks of each node.
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
        """Times all-reduces that all ranks begin together, after one or two that are not timed.

        Returns:
            (Seconds of each all-reduce on its slowest rank; bytes that the busiest node's NICs sent for one).
        """
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
        """Waits for all ranks and returns the bytes that this node's NICs have sent since they exist, without `lo`."""
        line_up(communicator)
        time.sleep(ON_THEIR_WAY_SECONDS)
        nics = [nic for nic in Path("/sys/class/net").iterdir() if nic.name != "lo"]
        sent = sum(int((nic / "statistics" / "tx_bytes").read_text()) for nic in nics)
        line_up(communicator)
        return sent

    def slowest(self, own: list[float]) -> list[float]:
        """Returns, for each position, the largest of the ranks' numbers there; a collective."""
        numbers = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return numbers.tolist()


@dataclass(frozen=True, slots=True)
class CheckedCase:
    """One case as rank 0 printed it, predicted and measured; the seconds are 0 if only bytes were counted.

    Attributes:
        name: Name of a plan, or `plan+compressor`.
        predicted_nic_nbytes: Predicted bytes that leave the busiest node in one all-reduce.
        nic_nbytes: Bytes that the NICs of the busiest node sent in one all-reduce.
        predicted_seconds: Predicted duration of an all-reduce.
        limit: What limits the prediction: a level's name, `processor` or `latency`.
        measured_seconds: Median of `rounds_seconds`.
        rounds_seconds: Duration of each all-reduce on its slowest rank.
    """

    name: str
    predicted_nic_nbytes: float
    nic_nbytes: float
    predicted_seconds: float = 0.0
    limit: str = "inter_node"
    measured_seconds: float = 0.0
    rounds_seconds: tuple[float, ...] = ()

    def sends_what_was_predicted(self, ranks: int) -> bool:
        """Returns whether the busiest node sent more than the predicted bytes, and no more than headers explain."""
        most = HEADER_SHARE * self.predicted_nic_nbytes + SMALL_NBYTES * ranks
        return self.predicted_nic_nbytes < self.nic_nbytes < most

    @property
    def steady(self) -> bool:
        """True if the medians of the even and of the odd rounds differ by less than the factor `STEADY`."""
        one, other = (statistics.median(self.rounds_seconds[first::2]) for first in (0, 1))
        return max(one, other) < STEADY * min(one, other)

    @property
    def near(self) -> bool:
        """True if the predicted seconds are close to the measured ones, or the links do not limit; see `NEAR`."""
        apart = abs(self.predicted_seconds - self.measured_seconds)
        return self.limit != "inter_node" or apart < NEAR * self.measured_seconds


def check_on_cluster(nodes: list[int], nic: str | None, arguments: list[str]) -> list[CheckedCase]:
    """Runs this study as the ranks of an emulated cluster and returns the cases that rank 0 printed.

    Args:
        nodes: Number of ranks on each node.
        nic: Rate of each node's link, such as `200mbit`; None for no limit.
        arguments: Words of the command line for the ranks.

    Raises:
        RuntimeError: This machine cannot emulate a cluster, or a rank failed.
    """
    with EmulatedCluster([1] * len(nodes), nic) as cluster:
        result = run_forked(
            cluster, "gradwire.bench.studies.predict_check", arguments, nodes=nodes, timeout_seconds=300
        )
    result.check()
    lines = [json.loads(line) for line in result.output[0].splitlines() if line.startswith("{")]
    known = {each.name for each in fields(CheckedCase)}
    return [CheckedCase(**{key: line[key] for key in known & line.keys()}) for line in lines if "name" in line]


def _clocks() -> tuple[float, float, float]:
    """Returns three clocks in seconds: monotonic time, processor time of all programs, and our own processor time.

    The second includes time that a hypervisor gave to other machines (steal); the third includes our children.
    """
    user, nice, *_, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    own = os.times()
    return time.monotonic(), (user + nice + steal) / os.sysconf("SC_CLK_TCK"), own.user + own.children_user


def _remarks(case: CheckedCase, ranks: int, timed: bool) -> list[str]:
    remarks = [] if case.sends_what_was_predicted(ranks) else ["bytes are off"]
    if timed and not case.near:
        remarks.append("seconds are off" if case.steady else "unsteady")
    return remarks


def _report(options: argparse.Namespace) -> int:
    """Runs the cases on emulated clusters and prints a table of each; returns 1 if a case is off, 0 otherwise."""
    status, words = 0, ["--seconds", str(options.seconds), "--rounds", str(options.rounds), "--cases", options.cases]
    for name in options.clusters or CLUSTERS:
        nodes = CLUSTERS[name]
        before = _clocks()
        cases = check_on_cluster(nodes, NIC, [*words, *(["--bytes"] if options.bytes else [])])
        passed, computed, own = (now - then for now, then in zip(_clocks(), before, strict=True))
        foreign = (computed - own) / passed
        busy = foreign >= FOREIGN_SHARE
        table = Table("case", "predicted, ms", "measured, ms", "ratio", "predicted, MB", "on the NIC, MB", "remark")
        table.title = f"{name}, {NIC}; {machine_line()}" + (f"; other programs had {foreign:.0%} of a core" * busy)
        for case in cases:
            remarks = _remarks(case, sum(nodes), not options.bytes)
            status |= "bytes are off" in remarks or ("seconds are off" in remarks and not busy)
            seconds = [f"{1e3 * each:.0f}" for each in (case.predicted_seconds, case.measured_seconds)]
            ratio = f"{case.predicted_seconds / case.measured_seconds:.2f}" if case.measured_seconds else "-"
            nbytes = [f"{each / 1e6:.3f}" for each in (case.predicted_nic_nbytes, case.nic_nbytes)]
            table.add_row(case.name, *seconds, ratio, *nbytes, ", ".join(remarks))
        Console(width=124).print(table)
    return int(status)


def _check(options: argparse.Namespace) -> int:
    """Runs the cases as one rank, the default group being up; takes it down and returns 0."""
    runner = CaseRunner(options.rounds, options.seconds, probed=not options.bytes)
    if runner.rank == 0 and not options.bytes:
        print(json.dumps({level.name: asdict(level.link) for level in runner.levels}))
    for case in options.cases.split(","):
        name, _, megabytes = case.partition("@")
        run = runner.count if options.bytes else runner.run
        result = run(name, round(float(megabytes or LARGE_MB) * 1e6))
        if runner.rank == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()
    return 0


def _options(argv: list[str]) -> argparse.Namespace:
    parser = StudyParser("predict_check", __doc__)
    parser.add_names("cluster", CLUSTERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.4, help="repeat what is short for this long (default 0.4)")
    parser.add_argument("--bytes", action="store_true", help="count bytes alone: nothing is probed or timed")
    parser.add_argument(
        "--cases", help="plans, with a compressor, with a gradient of their own in MB: flat@8,hierarchical+int8"
    )
    return parser.parse_args(argv)


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    """Runs all cases as one forked rank; returns 0.

    Args:
        place: Rank and node of this process.
        arguments: Words of the command line, as for `main`.
    """
    options = _options(arguments)
    torch.set_num_threads(1)
    place.connect(TIMEOUT)
    return _check(options)


def main(argv: list[str]) -> int:
    """Checks emulated clusters, or runs all cases as one rank of a launched job.

    Returns 1 if a case is off on an emulated cluster, else 0; in a launched job nothing is judged.

    Args:
        argv: Words after the module's name.
    """
    options = _options(argv)
    if "RANK" not in launcher_variables():
        options.cases = options.cases or ",".join(f"{name}@{SMALL_MB.get(name, LARGE_MB)}" for name in CASES)
        with clean_end():
            return _report(options)
    options.cases = options.cases or ",".join(CASES)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    return _check(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
