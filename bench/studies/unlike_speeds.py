"""Measures step time and loss when one of four ranks runs at half speed, with equal and with adapted batch shares.

Feeds docs/results/diagnosis.md.

    sudo python -m gradwire.bench.studies.unlike_speeds --json unlike.json
    python -m gradwire.bench.studies.unlike_speeds --slow-by rest --json unlike.json

Ranks are processes on two logical nodes of this machine, with DDP and the hook. Each computes in a cgroup with a quota
of processor time, of which the slow rank has half as much: all it does is slow. If quotas cannot be set, ranks sleep
for each sample, the slow one twice as long. Three trainings from the same weights take turns, a few steps each: equal
shares, shares by measured speed, and the best shares, which are computed from the true speeds. The loss of a step is
over all ranks' samples.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gradwire
from gradwire.bench.machine import machine_line

RANKS, SLOW, TIMES = 4, 3, 2.0
EQUAL, SPEED, BEST = WAYS = ("equal shares", "by speed", "best shares")
SETTLED = 2
"""Number of first turns that are not counted: speeds are measured in them."""

BATCH_SIZE = 56
"""Number of samples of a step, on all ranks together."""

QUOTA, REST = "quota", "rest"
SHARE = 0.3
"""Fraction of a processor that is a fast rank's quota."""
PERIOD_MICROSECONDS = 20_000
"""Period of a quota in microseconds: short, because a step should last many of them."""
WEIGHT = 100
"""Weight of the cgroup relative to other jobs, high so that its processes get their quota at any time."""


class Quota:
    """Makes a cgroup whose processes get a fraction of one processor.

    Args:
        name: Name of the cgroup.
        share: Fraction of a processor.

    Raises:
        OSError: The user lacks the right to make cgroups, or the kernel has no quotas.
    """

    def __init__(self, name: str, share: float) -> None:
        root = Path("/sys/fs/cgroup")
        version_1 = (root / "cpu").is_dir()
        self._folder = (root / "cpu" if version_1 else root) / name
        self._folder.mkdir()
        try:
            quota = round(share * PERIOD_MICROSECONDS)
            if version_1:
                (self._folder / "cpu.cfs_period_us").write_text(f"{PERIOD_MICROSECONDS}")
                (self._folder / "cpu.cfs_quota_us").write_text(f"{quota}")
                (self._folder / "cpu.shares").write_text(f"{1024 * WEIGHT}")
            else:
                (self._folder / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
                (self._folder / "cpu.weight").write_text(f"{100 * WEIGHT}")
        except OSError:
            self.remove()
            raise

    def enter(self) -> None:
        """Moves this process into the cgroup."""
        (self._folder / "cgroup.procs").write_text(f"{os.getpid()}")

    def remove(self) -> None:
        """Removes the cgroup; its processes have to have ended."""
        self._folder.rmdir()


def spin(seconds: float) -> None:
    """Computes until this thread has used a number of seconds of processor time."""
    until, matrix = time.thread_time() + seconds, torch.ones(96, 96)
    while time.thread_time() < until:
        matrix @ matrix


class DealtTraining:
    """Trains a small model on one rank with one way of dividing the samples among ranks.

    Args:
        way: Way of dividing the samples, one of `WAYS`.
        dataset: Samples of all ranks.
        cost: Seconds that a sample takes on this rank.
        spend: Function that spends a number of seconds, by computing or by sleeping.
    """

    def __init__(self, way: str, dataset: TensorDataset, cost: float, spend: Callable[[float], None]) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.model = DistributedDataParallel(model)
        self.state = gradwire.attach(self.model, reduction="samples", hostname=f"node{dist.get_rank() // 2}")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.sampler = gradwire.data.SpeedBatchSampler(dataset, BATCH_SIZE, self.state, adapt=way == SPEED)
        if way == BEST:
            speeds = [1 / TIMES if rank == SLOW else 1.0 for rank in range(RANKS)]
            self.sampler.load_state_dict(self.sampler.state_dict() | {"assignments": [(0, speeds)]})
        self._loader = DataLoader(dataset, batch_sampler=self.sampler)
        self._cost, self._spend = cost, spend
        self._batches = self._endless()

    def _endless(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch = 0
        while True:
            self.sampler.set_epoch(epoch)
            yield from self._loader
            epoch += 1

    def step(self) -> tuple[float, float, int]:
        """Takes a step; returns (its seconds, loss summed over this rank's samples, number of these samples)."""
        inputs, labels = next(self._batches)
        began = time.perf_counter()
        self.state.samples = len(labels)
        self._spend(self._cost * len(labels))
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return time.perf_counter() - began, float(loss.detach()) * len(labels), len(labels)


def rank_main(rank: int, folder: str, options: argparse.Namespace, quota: Quota | None) -> None:
    """Runs one rank: trains with each way of sharing in turns, and writes its steps and shares to a JSON file.

    Args:
        rank: Number of this rank.
        folder: Folder for the ranks' store and files.
        options: Parsed options of the command line.
        quota: Quota that this rank enters before the steps; None sleeps instead of computing.
    """
    torch.set_num_threads(1)
    place = f"file://{Path(folder, 'store')}"
    dist.init_process_group("gloo", place, rank=rank, world_size=RANKS, timeout=timedelta(minutes=5))
    torch.manual_seed(1)
    inputs = torch.randn(BATCH_SIZE * 64, 64)
    dataset = TensorDataset(inputs, (inputs @ torch.randn(64, 10)).argmax(dim=1))
    cost, spend = options.cost_ms / 1e3, time.sleep if quota is None else spin
    if quota is None and rank == SLOW:
        cost *= TIMES
    trainings = {way: DealtTraining(way, dataset, cost, spend) for way in WAYS}
    dist.barrier()
    if quota is not None:
        quota.enter()
    steps: dict[str, list[list[tuple[float, float, int]]]] = {way: [] for way in WAYS}
    for turn in range(options.turns):
        for way in WAYS if turn % 2 == 0 else reversed(WAYS):
            dist.barrier()
            steps[way].append([trainings[way].step() for _ in range(options.steps)])
    shares = {way: each.sampler.shares() for way, each in trainings.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps({"steps": steps, "shares": shares}))
    for each in trainings.values():
        each.state.close()
    dist.destroy_process_group()


def result(folder: str, slow_by: str) -> dict[str, object]:
    """Computes the result of the study from the ranks' files, as a dictionary for JSON.

    It has the median step of each way of sharing and the ratios between the ways, over the turns that count, and the
    largest relative difference between the losses with equal shares and with shares by speed.

    Args:
        folder: Folder with the ranks' files.
        slow_by: `quota` or `rest`, for the record.
    """
    ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    seconds = {
        way: [statistics.median(step[0] for step in turn[1:]) for turn in ranks[0]["steps"][way][SETTLED:]]
        for way in WAYS
    }
    losses: dict[str, list[float]] = {}
    for way in WAYS:
        by_rank = [[step for turn in each["steps"][way] for step in turn] for each in ranks]
        losses[way] = [
            sum(step[1] for step in row) / sum(step[2] for step in row) for row in zip(*by_rank, strict=True)
        ]
    pairs = zip(losses[EQUAL], losses[SPEED], strict=True)
    to_best = [one / other for one, other in zip(seconds[SPEED], seconds[BEST], strict=True)]
    to_equal = [one / other for one, other in zip(seconds[EQUAL], seconds[SPEED], strict=True)]
    return {
        "shares": ranks[0]["shares"],
        "step_ms": {way: 1e3 * statistics.median(each) for way, each in seconds.items()},
        "by speed over best": [min(to_best), statistics.median(to_best), max(to_best)],
        "equal over by speed": [min(to_equal), statistics.median(to_equal), max(to_equal)],
        "loss_first_last": {way: [each[0], each[-1]] for way, each in losses.items()},
        "loss_apart": max(abs(one - other) / one for one, other in pairs),
        "slow by": slow_by,
        "load": os.getloadavg()[0],
        "machine": machine_line(),
    }


def main() -> None:
    """Starts the four ranks, waits for them, and prints the result as JSON."""
    parser = argparse.ArgumentParser(description="One of four ranks at half speed.")
    parser.add_argument("--slow-by", choices=(QUOTA, REST), default=QUOTA)
    parser.add_argument(
        "--cost-ms", type=float, default=10.0, help="of processor time, or rest, that a sample costs on a fast rank"
    )
    parser.add_argument("--steps", type=int, default=12, help="in a turn")
    parser.add_argument("--turns", type=int, default=8, help=f"of each way; the first {SETTLED} do not count")
    parser.add_argument("--json", type=Path, help="where the result goes, besides the screen")
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")  # torch is imported once
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        quotas: list[Quota | None] = [None] * RANKS
        if options.slow_by == QUOTA:
            for rank in range(RANKS):
                share = SHARE / (TIMES if rank == SLOW else 1.0)
                try:
                    quota = Quota(f"gradwire-{os.getpid()}-{rank}", share)
                except OSError as error:
                    parser.error(f"`--slow-by quota` needs a cgroup of its own: {error}; be root, or `--slow-by rest`")
                stack.callback(quota.remove)
                quotas[rank] = quota
        ranks = [context.Process(target=rank_main, args=(rank, folder, options, quotas[rank])) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        if any(each.exitcode for each in ranks):
            raise SystemExit("a rank has failed; its own output says why")
        found = json.dumps(result(folder, options.slow_by), indent=1)
    print(found)
    if options.json is not None:
        options.json.write_text(found + "\n")


if __name__ == "__main__":
    main()
