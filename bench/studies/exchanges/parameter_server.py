"""Parameter servers and asynchronous updates: what they would cost on the links, and what staleness costs in quality.

Feeds docs/results/parameter_server.md.

    python -m gradwire.bench.studies.exchanges.parameter_server price
    python -m gradwire.bench.studies.exchanges.parameter_server staleness --json FILE   # 15 minutes a seed on one core
    python -m gradwire.bench.studies.exchanges.parameter_server show --json FILE

**Links.** N workers send a gradient of S bytes to servers, which own the shares f_j of it, and take the sum back; every
unit has one card that carries B_i bytes per second in each direction. Piece by piece (both directions busy at once)

    a worker that owns f_i   S (1 + (N - 2) f_i) / B_i     a server that is no worker   N f_j S / B_j

is what a card needs in each direction, and the slowest decides. Servers on the workers' own nodes are the first kind
alone: owners, as in comms/plan/owners.py, which all-reduces make of every node. `exchange_seconds` lets the messages
flow, every link shared fairly, and must come to the same. Source: Jiang et al., A Unified Architecture for Accelerating
Distributed DNN Training in Heterogeneous GPU/CPU Clusters (BytePS), OSDI 2020, sections 2 and 4: max(S/B, N S/(k B))
for k servers of their own, 2 (N - 1) S/(N B) for those on the workers' nodes, 2 N (N - 1) S/((N^2 + k N - 2 k) B) for
both together.

**Asynchronous updates.** Each worker computes, sends its gradient, and takes the parameters; nobody waits. What the
others have changed meanwhile is its staleness (`asynchronous_run`).

**Staleness** is simulated in one process: the update of step t applies the gradient at the parameters of step t - s.
Source: Zinkevich, Langford and Smola, Slow learners are fast, NeurIPS 2009, algorithm 1.
"""

import json
import math
import statistics
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from gradwire.bench.machine import machine_line
from gradwire.bench.studies.convergence.tasks import TextTask, share_of_peak
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.comms.plan.owners import exact_shares

PIECES = 16
"""That a gradient is cut into, so that what is summed goes back while the rest is still on its way."""

STALENESS = (0, 1, 2, 4, 8, 16)
"""Updates of others between reading the parameters and applying the gradient: N - 1 on average for N equal workers."""

LEARNING_RATES = (1.0, 0.25, 0.0625)
"""Times the task's own: what is stale is known to want less. The better one counts."""

RANKS = 4
"""Whose batches make up one update: those of the convergence study."""


def best_shares(rates: Sequence[float], workers: int) -> list[float]:
    """What each unit owns where all links are done at the same time.

    Args:
        rates: Bytes per second of each unit, in each direction; the workers come first.
        workers: How many of them have a gradient; the others are servers alone.

    Returns:
        A share for each unit; they add up to 1.
    """
    if workers == len(rates) and workers > 2:
        return exact_shares(rates, workers - 2)
    if workers == len(rates):
        return [1 / workers] * workers

    def owned(seconds: float) -> list[float]:
        return [
            max(seconds * rate - 1, 0.0) / (workers - 2) if unit < workers and workers > 2 else seconds * rate / workers
            for unit, rate in enumerate(rates)
        ]

    servers = sum(rates[workers:])
    least = 1 / min(rates[:workers])
    if sum(owned(least)[workers:]) >= 1:  # the servers do it all, and the slowest worker's S decides
        return [0.0] * workers + [rate / servers for rate in rates[workers:]]
    low, high = least, least + workers / servers
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(owned(middle)) < 1 else (low, middle)
    shares = owned(high)
    return [share / sum(shares) for share in shares]


def limit_seconds(rates: Sequence[float], workers: int, shares: Sequence[float]) -> float:
    """Seconds that the busiest link needs for each byte of gradient: the formulas above.

    Args:
        rates: As for `best_shares`.
        workers: As there.
        shares: What each unit owns.
    """
    return max(
        (1 + (workers - 2) * share if unit < workers else workers * share) / rate
        for unit, (rate, share) in enumerate(zip(rates, shares, strict=True))
    )


def fair_rates(sources: np.ndarray, targets: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Bytes per second of each flow where links are shared fairly (max-min), each direction of a link by itself.

    Args:
        sources: Unit that each flow leaves, int.
        targets: Unit that it goes to, int.
        rates: Bytes per second of each unit's link.

    Source: Bertsekas and Gallager, Data Networks, section 6.5.2 (progressive filling).
    """
    units = len(rates)
    links = np.concatenate([sources, targets + units])
    flows = np.concatenate([np.arange(len(sources))] * 2)
    left, given, open_flows = np.concatenate([rates, rates]), np.zeros(len(sources)), np.ones(len(sources), dtype=bool)
    while open_flows.any():
        counts = np.bincount(links[open_flows[flows]], minlength=2 * units)
        used = counts > 0
        fair = np.full(2 * units, math.inf)
        fair[used] = left[used] / counts[used]
        least = fair.min()
        tight = fair <= least * (1 + 1e-9)
        closing = open_flows & (tight[sources] | tight[targets + units])
        given[closing] = least
        left -= least * np.bincount(links[closing[flows]], minlength=2 * units)
        left = np.maximum(left, 0.0)
        open_flows &= ~closing
    return given


def exchange_seconds(
    rates: Sequence[float], workers: int, shares: Sequence[float], nbytes: float, pieces: int = PIECES
) -> float:
    """Lets a synchronous exchange flow: every worker to every owner, and each summed piece back to all workers.

    Args:
        rates: As for `best_shares`.
        workers: As there.
        shares: What each unit owns.
        nbytes: Of a gradient.
        pieces: That each owner's part is sent in; a piece goes back once all workers' have arrived.
    """
    capacity = np.array(rates, dtype=float)
    waiting: dict[tuple[int, int], deque[int]] = {}
    for owner, share in enumerate(shares):
        if share > 0:
            for worker in range(workers):
                if worker != owner:
                    waiting[worker, owner] = deque(range(pieces))
    back: dict[tuple[int, int], deque[int]] = {(owner, worker): deque() for worker, owner in waiting}
    arrived = {(owner, piece): 0 for owner in range(len(rates)) for piece in range(pieces)}
    under_way: dict[tuple[bool, int, int], float] = {}
    seconds = 0.0
    while True:
        for queues, returns in ((waiting, False), (back, True)):
            for (source, target), queue in queues.items():
                if queue and (returns, source, target) not in under_way:
                    owner = source if returns else target
                    under_way[returns, source, target] = shares[owner] * nbytes / pieces
        if not under_way:
            return seconds
        keys = list(under_way)
        given = fair_rates(np.array([key[1] for key in keys]), np.array([key[2] for key in keys]), capacity)
        step = min(under_way[key] / rate for key, rate in zip(keys, given, strict=True))
        seconds += step
        for key, rate in zip(keys, given, strict=True):
            under_way[key] -= step * rate
            if under_way[key] > 1e-9 * nbytes:
                continue
            del under_way[key]
            returns, source, target = key
            if returns:
                back[source, target].popleft()
                continue
            piece = waiting[source, target].popleft()
            arrived[target, piece] += 1
            if arrived[target, piece] == workers - (target < workers):
                for worker in range(workers):
                    if worker != target:
                        back[target, worker].append(piece)


@dataclass(frozen=True, slots=True)
class AsynchronousRun:
    """What workers that wait for nobody come to.

    Attributes:
        updates_per_second: Of all workers.
        staleness: Updates of others between a worker's parameters and its gradient, on average.
        stalest: The most.
    """

    updates_per_second: float
    staleness: float
    stalest: int


def asynchronous_run(
    compute_seconds: Sequence[float],
    rates: Sequence[float],
    server_rate: float,
    nbytes: float,
    updates: int = 400,
) -> AsynchronousRun:
    """Runs workers that compute, send a gradient to the servers and take the parameters, one after the other.

    Args:
        compute_seconds: Of each worker, for one gradient.
        rates: Bytes per second of each worker's link.
        server_rate: Of all servers' links together.
        nbytes: Of a gradient, and of the parameters.
        updates: How many to run.
    """
    count = len(rates)
    computing, sending = 0, 1  # and then takes
    doing = [computing] * count
    # Out of step from the beginning, or equal workers would all meet at the servers at once.
    left = [seconds * (1 + place / count) for place, seconds in enumerate(compute_seconds)]
    version, seen, seconds, behind = 0, [0] * count, 0.0, []
    capacity = np.array([*rates, server_rate], dtype=float)
    while version < updates:
        flows = [unit for unit in range(count) if doing[unit] != computing]
        pace = [1.0] * count
        if flows:
            sources = np.array([unit if doing[unit] == sending else count for unit in flows])
            targets = np.array([count if doing[unit] == sending else unit for unit in flows])
            for unit, rate in zip(flows, fair_rates(sources, targets, capacity), strict=True):
                pace[unit] = rate
        step = min(amount / rate for amount, rate in zip(left, pace, strict=True))
        seconds += step
        for unit in range(count):
            left[unit] -= step * pace[unit]
            if left[unit] > 1e-9 * (nbytes if doing[unit] != computing else 1.0):
                continue
            if doing[unit] == sending:
                behind.append(version - seen[unit])
                version += 1
                seen[unit] = version  # of the first piece that it takes now; later ones are fresher
            doing[unit] = (doing[unit] + 1) % 3
            left[unit] = compute_seconds[unit] if doing[unit] == computing else nbytes
    settled = behind[len(behind) // 4 :]
    return AsynchronousRun(version / seconds, statistics.mean(settled), max(settled))


def price_tables() -> list[Table]:
    """Synchronous exchanges on even and uneven links, and asynchronous updates against them."""
    headings = "workers", "links", "ring", "owners = servers on the nodes", "k own servers", "", "both"
    title = "seconds for each byte of gradient, times the workers' rate; flows simulated (limit of the formula)"
    even = Table(*headings, title=title)
    for workers, servers, slow in ((4, 1, 1.0), (4, 4, 1.0), (8, 2, 1.0), (8, 8, 1.0), (4, 4, 0.25), (8, 2, 0.25)):
        rates = [1.0] * (workers - 1) + [slow]
        cells = []
        for extra, own in (([], True), ([1.0] * servers, False), ([1.0] * servers, True)):
            shares = best_shares([*rates, *extra], workers)
            if not own:
                shares = [0.0] * workers + [1 / servers] * servers
            measured = exchange_seconds([*rates, *extra], workers, shares, 1.0)
            cells.append(f"{measured:.2f} ({limit_seconds([*rates, *extra], workers, shares):.2f})")
        links = "equal" if slow == 1 else f"one at {slow:g}"
        ring = f"{2 * (workers - 1) / workers / slow:.2f}"
        even.add_row(str(workers), links, ring, cells[0], f"k = {servers}", cells[1], cells[2])
    loose = Table(
        "workers", "slowest computes", "slowest link", "S/B", "together: N gradients in", "per second",
        "one by one, per second", "staleness", "at most",
        title="gradients per second: all together, and one by one; a gradient takes 1 s to compute",
    )  # fmt: skip
    for workers, slow_compute, slow_link, transfer in (
        (4, 1.0, 1.0, 0.1), (4, 1.0, 1.0, 1.0), (4, 4.0, 1.0, 0.1), (4, 1.0, 0.25, 1.0),
        (16, 1.0, 1.0, 0.1), (16, 1.0, 1.0, 1.0), (16, 4.0, 1.0, 0.1), (16, 1.0, 0.25, 1.0),
    ):  # fmt: skip
        compute = [1.0] * (workers - 1) + [slow_compute]
        rates = [1.0] * (workers - 1) + [slow_link]
        shares = best_shares(rates, workers)
        together = max(compute) + transfer * limit_seconds(rates, workers, shares)
        run = asynchronous_run(compute, rates, float(workers), transfer)
        loose.add_row(
            str(workers), f"{slow_compute:g} s", f"{slow_link:g} B", f"{transfer:g} s", f"{together:.2f} s",
            f"{workers / together:.2f}", f"{run.updates_per_second:.2f}", f"{run.staleness:.1f}", str(run.stalest),
        )  # fmt: skip
    return [even, loose]


class StaleUpdates:
    """Applies gradients some updates after they were computed, in one process.

    Args:
        model: Trained in place.
        optimizer: Of its parameters.
        staleness: Updates between computing a gradient and applying it; the first ones are applied at once.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, staleness: int) -> None:
        self._parameters = list(model.parameters())
        self._optimizer = optimizer
        self._staleness = staleness
        self._held: deque[list[torch.Tensor | None]] = deque()

    def step(self) -> None:
        """Takes the gradients that the parameters hold, and steps with those of `staleness` updates before."""
        self._held.append([None if each.grad is None else each.grad.detach().clone() for each in self._parameters])
        if len(self._held) > self._staleness:
            for parameter, gradient in zip(self._parameters, self._held.popleft(), strict=True):
                parameter.grad = gradient
            self._optimizer.step()


@dataclass(frozen=True, slots=True)
class StaleRun:
    """One training.

    Attributes:
        optimizer: `sgd` or `adamw`.
        staleness: See `StaleUpdates`.
        factor: Of the learning rate.
        seed: Of the weights and batches.
        steps: Updates.
        bits: Per byte of held-out text at the end; infinite where the training diverged.
    """

    optimizer: str
    staleness: int
    factor: float
    seed: int
    steps: int
    bits: float


def train_stale(task: TextTask, optimizer: str, staleness: int, factor: float, seed: int, steps: int) -> StaleRun:
    """Trains the text task, each update a batch of four ranks, with stale gradients.

    Args:
        task: Loaded.
        optimizer: `adamw`, as the task has it, or `sgd` with momentum 0.9 and a learning rate of 0.3.
        staleness: See `StaleUpdates`.
        factor: Of the learning rate.
        seed: Of weights and batches.
        steps: Updates that are computed.
    """
    model = task.model(seed)
    made: Optimizer
    if optimizer == "adamw":
        made = AdamW(model.parameters(), lr=3e-3 * factor, betas=(0.9, 0.95))
    else:
        made = SGD(model.parameters(), lr=0.3 * factor, momentum=0.9)
    peaks = [group["lr"] for group in made.param_groups]
    updates = StaleUpdates(model, made, staleness)
    for step in range(steps):
        for group, peak in zip(made.param_groups, peaks, strict=True):
            group["lr"] = peak * share_of_peak(step, steps)
        model.zero_grad(set_to_none=True)
        loss = torch.stack([task.loss(model, step, rank, seed) for rank in range(RANKS)]).mean()
        if not math.isfinite(loss.item()):
            return StaleRun(optimizer, staleness, factor, seed, steps, math.inf)
        loss.backward()  # type: ignore[no-untyped-call]
        updates.step()
    model.eval()
    with torch.no_grad():
        total, count = task.score(model, 0).tolist()
    return StaleRun(optimizer, staleness, factor, seed, steps, total / count)


def staleness_table(runs: Sequence[StaleRun]) -> Table:
    """Bits per byte for each optimizer and staleness, at the better learning rate: mean, least and most over seeds."""
    steps = sorted({run.steps for run in runs})
    headings = "optimizer", "staleness", "seeds", "learning rate", "bits per byte", "at the full rate"
    title = f"text task, {'/'.join(map(str, steps))} updates: bits per byte on held-out text, mean (range)"
    table = Table(*headings, title=title)
    for optimizer in sorted({run.optimizer for run in runs}):
        for staleness in sorted({run.staleness for run in runs if run.optimizer == optimizer}):
            by_factor: dict[float, list[float]] = {}
            for run in runs:
                if (run.optimizer, run.staleness) == (optimizer, staleness):
                    by_factor.setdefault(run.factor, []).append(run.bits)
            factor, best = min(by_factor.items(), key=lambda item: statistics.mean(item[1]))
            full = by_factor.get(1.0)
            table.add_row(
                optimizer, str(staleness), str(len(best)), f"{factor:g}", _spread(best), _spread(full) if full else "",
            )  # fmt: skip
    return table


def _spread(bits: Sequence[float]) -> str:
    return f"{statistics.mean(bits):.3f} ({min(bits):.3f} to {max(bits):.3f})"


def build_parser() -> StudyParser:
    """Returns the parser of the command line."""
    parser = StudyParser("exchanges.parameter_server", __doc__)
    parser.add_argument("what", choices=("price", "staleness", "show"))
    parser.add_argument("--json", type=Path, default=Path("staleness.json"), help="where trainings are kept")
    parser.add_argument("--steps", type=int, default=400, help="updates of a training (default 400)")
    parser.add_argument("--seed", type=int, action="append", help="may be repeated (default 0)")
    return parser


def main(argv: list[str]) -> int:
    """Prices, trains what the file does not hold yet, or shows what it holds; returns the exit status."""
    options = build_parser().parse_args(argv)
    console = Console(width=120)
    if options.what == "price":
        for table in price_tables():
            console.print(table)
        return 0
    kept = [StaleRun(**each) for each in json.loads(options.json.read_text())] if options.json.exists() else []
    if options.what == "staleness":
        torch.set_num_threads(1)
        task = TextTask()
        task.load()
        done = {(run.optimizer, run.staleness, run.factor, run.seed, run.steps) for run in kept}
        for seed in options.seed or [0]:
            for staleness in STALENESS:
                for optimizer in ("adamw", "sgd"):
                    for factor in LEARNING_RATES:
                        key = (optimizer, staleness, factor, seed, options.steps)
                        if key in done:
                            continue
                        kept.append(train_stale(task, *key))
                        options.json.write_text(json.dumps([asdict(run) for run in kept]))
                        print(kept[-1], flush=True)
    console.print(staleness_table(kept))
    console.print(machine_line())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
