"""Measures the false alarms, the cost and the diagnoses of the straggler watch.

Feeds docs/results/diagnosis.md.

    python -m gradwire.bench.studies.stragglers alarms --steps 10000     # no rank is late: is one named?
    python -m gradwire.bench.studies.stragglers cost                     # processor time, with and without; needs root
    python -m gradwire.bench.studies.stragglers cause                    # a slow link, or a slow rank? needs root

For `alarms` ranks are threads of one process on logical nodes, with real transports; computing is a sleep.
On a busy machine that is the harder case: threads are late by chance all the time. `alarms` also says what has grown
meanwhile. For `cost` and `cause` ranks are processes with DDP and the hook on an emulated cluster. `cost` goes through
blocks of steps with and without the watch in turn and compares the processor time of whole processes: all their
threads, exchanges included.
"""

import json
import logging
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.bench.emulation.cluster import INTERFACE, EmulatedCluster
from gradwire.bench.emulation.fork import ForkedRank, run_forked
from gradwire.bench.emulation.signals import clean_end
from gradwire.bench.machine import machine_line
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.observe import stragglers
from gradwire.comms.observe.number_exchange import NumberExchange
from gradwire.comms.observe.observer import Observer
from gradwire.comms.run.all_reduces import AllReduce, Bucket, Times
from gradwire.comms.step.listeners import EndedStep

Result = TypeVar("Result")
BUCKETS = 4
NUMEL = 4096
CASES = ("compute", "link", "slow from the start")


class WatchedRank:
    """Takes steps of a few buckets on one rank, under gradwire's observer."""

    def __init__(self, communicator: Communicator, config: Config) -> None:
        self.communicator = communicator
        self.observer = Observer(communicator, config)
        self.steps = 0
        self._flats = [torch.ones(NUMEL) for _ in range(BUCKETS)]
        for index in range(BUCKETS):
            self.observer.contents[index] = NUMEL, (f"layers.{BUCKETS - 1 - index}.weight",)

    def step(self, computes: Callable[[int], float]) -> None:
        """Takes one step.

        Args:
            computes: Function of a bucket's index that returns the seconds to sleep before its all-reduce.
        """
        self.observer.step_began(self.steps)
        buckets = []
        for index, flat in enumerate(self._flats):
            time.sleep(computes(index))
            bucket = Bucket.of(flat, None, self.communicator.clock.now(), index)
            self.communicator.start(AllReduce((flat,), None, (bucket,)), scale=1 / self.communicator.size)
            buckets.append(bucket)
        self.steps += 1
        self.observer.step_ended(EndedStep(self.steps, buckets, (), self.communicator.report))
        for bucket in buckets:
            bucket.result().wait()


def on_threads(nodes: str, body: Callable[[WatchedRank], Result]) -> list[Result]:
    """Runs a function as every rank of a job, each on a thread; returns the results by rank.

    Args:
        nodes: A letter for each rank, which names its node: `aabb` is two nodes of two ranks.
        body: Function that a rank runs.
    """
    store = HashStore()

    def run(rank: int) -> Result:
        config = Config(hostname=f"node-{nodes[rank]}", timeout=timedelta(seconds=60), straggler_every=50)
        communicator = Communicator(store, rank, len(nodes), torch.device("cpu"), config, name="study")
        watched = WatchedRank(communicator, config)
        try:
            return body(watched)
        finally:
            watched.observer.close()
            communicator.close()

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(run, range(len(nodes))))


def alarms(nodes: str, steps: int, seconds: float) -> str:
    """Takes steps without a late rank, and returns a report of the warnings and of what has grown meanwhile.

    Args:
        nodes: A letter for each rank, which names its node.
        steps: Number of steps.
        seconds: Seconds that each bucket computes.
    """
    said: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, handler = logging.getLogger("gradwire"), Listening(logging.WARNING)
    logger.addHandler(handler)
    used: list[str] = []

    def body(rank: WatchedRank) -> float:
        began = time.perf_counter()
        for step in range(steps):
            rank.step(lambda index: seconds)
            if rank.communicator.rank == 0 and step in (steps // 10, steps - 1):
                used.append(held())
        return (time.perf_counter() - began) / steps

    try:
        length = on_threads(nodes, body)[0]
    finally:
        logger.removeHandler(handler)
    found = f"{nodes}: {steps} steps of {length * 1e3:.1f} ms, {len(said)} warnings, load {os.getloadavg()[0]:.1f}"
    return "\n".join([found, f"after a tenth: {used[0]}; at the end: {used[-1]}", *said])


def held() -> str:
    """Returns the memory, threads and descriptors of this process as text."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    resident = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return f"{resident:.1f} MiB resident, {threading.active_count()} threads, {descriptors} descriptors"


class SleepingLayers(nn.Module):
    """Stacks linear layers, each a bucket of DDP; the gradient of a layer takes a sleep, which uses no processor.

    Args:
        width: Features of each layer.
        computes: Function of a bucket's index that returns the seconds of its sleep.
    """

    def __init__(self, width: int, computes: Callable[[int], float]) -> None:
        super().__init__()
        layers = [nn.Linear(width, width, bias=False) for _ in range(BUCKETS)]
        self.layers = nn.ModuleList(layers)
        for index, layer in enumerate(reversed(layers)):
            layer.weight.register_hook(self._computing(index, computes))  # type: ignore[no-untyped-call]

    @staticmethod
    def _computing(index: int, computes: Callable[[int], float]) -> Callable[[Tensor], Tensor]:
        def compute(gradient: Tensor) -> Tensor:
            time.sleep(computes(index))
            return gradient

        return compute

    def forward(self, rows: Tensor) -> Tensor:
        """Returns a scalar for rows of shape (any, width)."""
        for layer in self.layers:
            rows = layer(rows)
        return rows.sum()


def _hooked(module: SleepingLayers, width: int, every: int) -> tuple[DistributedDataParallel, gradwire.HookState]:
    model = DistributedDataParallel(module, bucket_cap_mb=width * width * 4 / 2**20 * 0.9)
    return model, gradwire.attach(model, straggler_every=every, stall_seconds=10.0 if every else 0.0)


WITH, WITHOUT, CONTROL, OFTEN = "with", "without", "without again", "often"
"""Names of the compared models: with the watch, twice without it, and with exchanges as often as possible."""

COLUMNS = "wall", "own", "exchanges"


def _cost_rank(seconds: float, blocks: int, steps: int) -> list[dict[str, float]]:
    """Measures one rank's processor time with and without the watch, in blocks of steps taken in random turns.

    Args:
        seconds: Seconds that a step computes (sleeps).
        blocks: Number of blocks of each model.
        steps: Number of steps of a block.

    Returns:
        For each block: name of a model -> microseconds of processor time of a step; `NAME, wall` and `NAME, own` are
        the wall-clock time and the watch's own part, `NAME, exchanges` the number of exchanges of a step.
    """
    width, exchanges, own = 64, 0, 0.0

    class Counted(NumberExchange):
        def __init__(self, communicator: Communicator, values: Sequence[float]) -> None:
            nonlocal exchanges
            exchanges += 1
            super().__init__(communicator, values)

    class Timed(stragglers.StragglerWatch):
        def step_ended(self, step: int, buckets: Sequence[Times]) -> None:
            nonlocal own
            began = time.thread_time()
            super().step_ended(step, buckets)
            own += time.thread_time() - began

    # Models with the watch, without it (twice, for the noise), and with an exchange in every step.
    with patch("gradwire.comms.observe.stragglers.StragglerWatch", Timed):
        models = {
            name: _hooked(SleepingLayers(width, lambda index: seconds / BUCKETS), width, every)
            for name, every in ((WITH, 50), (WITHOUT, 0), (CONTROL, 0), (OFTEN, 50))
        }
        for model, state in models.values():
            model(torch.ones(1, width)).backward()  # the hook connects, and makes its watch
            assert state.steps == 1
    # Measure blocks of steps of each model in random turns.
    rows, draw = torch.ones(1, width), random.Random(0)
    found: list[dict[str, float]] = []
    for block in range(-1, blocks):
        taken: dict[str, float] = {}
        for name in draw.sample(list(models), len(models)):  # the same order on all ranks
            with ExitStack() as patches:
                patches.enter_context(patch.object(stragglers, "NumberExchange", Counted))
                if name == OFTEN:
                    patches.enter_context(patch.object(stragglers, "SUMMARY_STEPS", 1))
                    patches.enter_context(patch.object(stragglers, "SUMMARY_SECONDS", 0.0))
                dist.barrier()
                exchanges, own, began = 0, 0.0, (time.process_time(), time.perf_counter())
                for _ in range(steps):
                    models[name][0](rows).backward()
                dist.barrier()
                used = time.process_time() - began[0], time.perf_counter() - began[1], own
                taken[name], taken[f"{name}, wall"], taken[f"{name}, own"] = (each / steps * 1e6 for each in used)
                taken[f"{name}, exchanges"] = exchanges / steps
        if block >= 0:  # in the first one buckets are rebuilt, and connections made
            found.append(taken)
    return found


def cost(seconds: float, blocks: int, steps: int) -> str:
    """Measures the processor time that the watch adds to a rank's process, on two emulated nodes; returns a report.

    Args:
        seconds: Seconds that a step computes (sleeps).
        blocks: Number of blocks of each model.
        steps: Number of steps of a block.
    """
    found: list[list[dict[str, float]]] = _emulated([2, 2], "1gbit", ["cost", str(seconds), str(blocks), str(steps)])
    every = [block for rank in found for block in rank]
    lines = [f"2x2 processes, {BUCKETS} buckets, {blocks} x {steps} steps each, in turn; microseconds of a step:"]
    for name in (WITHOUT, CONTROL, WITH, OFTEN):
        more = [block[name] - (block[WITHOUT] + block[CONTROL]) / 2 for block in every]
        error = statistics.stdev(more) / len(more) ** 0.5
        used, wall, own, exchanges = (
            statistics.mean(block[column] for block in every)
            for column in (name, *(f"{name}, {each}" for each in COLUMNS))
        )
        lines.append(
            f"{name:>13}: wall clock {wall:.0f}, its process {used:.0f}, more: {statistics.mean(more):+.0f} "
            f"(standard error {error:.0f}), at the end of a step {own:.1f}, exchanges a step {exchanges:.3f}"
        )
    return "\n".join(lines)


def _cause_rank(case: str, rank: int) -> str:
    """Takes 150 steps as one rank of `cause` and returns the stragglers that its report named, by step.

    Args:
        case: One of `CASES`. From step 60 on rank 2 computes longer, or rank 0 prints a line at which the link is
            made slow.
        rank: Number of this rank.
    """
    width, begins = 256, 60
    place = {"step": 0}

    def computes(index: int) -> float:
        late = case == "compute" and rank == 2 and place["step"] >= begins and index == 1
        return 0.005 + (0.2 if late else 0.0)

    model, state = _hooked(SleepingLayers(width, computes), width, 50)
    rows, said = torch.ones(1, width), list[str]()
    for step in range(begins + 90):
        place["step"] = step
        if step == begins:
            dist.barrier()
            if rank == 0:
                print("now", flush=True)
            time.sleep(0.5)
            dist.barrier()
        model(rows).backward()
        named = [str(each) for each in state.report().stragglers if not each.once]
        if step % 10 == 9 or (named and not said):
            said.append(f"step {step}: {'; '.join(named) or 'nobody'}")
    state.close()
    return "\n    ".join(dict.fromkeys(said))


def cause(case: str) -> str:
    """Runs one case on three emulated nodes of one rank and returns what rank 0's report named.

    Args:
        case: `compute` (rank 2 computes longer from step 60 on), `link` (its link becomes slow then), or
            `slow from the start` (its link has always been slow).
    """
    nic = "200mbit,200mbit,50mbit" if case == "slow from the start" else "200mbit"
    found: list[str] = _emulated([1, 1, 1], nic, ["cause", case], slow=case == "link")
    return f"{case}:\n    {found[0]}"


def _emulated(nodes: list[int], nic: str, arguments: list[str], *, slow: bool = False) -> list[Any]:
    """Runs `rank_main` on an emulated cluster and returns the value that each rank printed, by rank.

    Args:
        nodes: Number of ranks on each node.
        nic: Rate of all nodes' links, or rates separated by commas.
        arguments: Arguments of `rank_main`.
        slow: True limits the link of node 2 to 50 Mbit/s once a rank has printed `now`.

    Raises:
        RuntimeError: This machine cannot emulate a cluster, or a rank failed.
    """
    found: dict[int, Any] = {}
    with EmulatedCluster([1] * len(nodes), nic) as cluster:

        def listen(node: int, line: str) -> None:
            if line == "now" and slow:
                cluster.limit(2, INTERFACE, 0, 50_000_000)
            if line.startswith("{"):
                word = json.loads(line)
                found[word["rank"]] = word["found"]

        run = run_forked(
            cluster, "gradwire.bench.studies.stragglers", arguments, nodes=nodes, timeout_seconds=540, on_line=listen
        )
    run.check()
    return [found[rank] for rank in range(sum(nodes))]


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    """Runs one rank's part of `cost` or `cause`, prints what it has found as a line of JSON, and returns 0."""
    torch.set_num_threads(1)
    place.connect()
    if arguments[0] == "cost":
        found: object = _cost_rank(float(arguments[1]), int(arguments[2]), int(arguments[3]))
    else:
        found = _cause_rank(arguments[1], place.rank)
    print(json.dumps({"rank": place.rank, "found": found}), flush=True)
    place.leave()
    return 0


def main() -> None:
    """Runs the chosen measurement and prints its report."""
    parser = StudyParser("stragglers", __doc__)
    parser.add_argument("what", choices=("alarms", "cost", "cause"))
    parser.add_argument("--nodes", default="aabb", help="a letter for each rank")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--bucket-seconds", type=float, default=1e-3, help="that a bucket computes")
    parser.add_argument("--blocks", type=int, default=6, help="of `--steps` steps, with and without (cost)")
    parser.add_argument("--case", choices=CASES, nargs="+", default=CASES, help="(cause)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("gradwire").propagate = False
    print(machine_line(), f"load {os.getloadavg()[0]:.1f}")
    if given.what == "alarms":
        print(alarms(given.nodes, given.steps, given.bucket_seconds))
    elif given.what == "cost":
        with clean_end():
            print(cost(given.bucket_seconds * BUCKETS, given.blocks, given.steps))
    else:
        with clean_end():
            for case in given.case:
                print(cause(case), flush=True)


if __name__ == "__main__":
    main()
