"""Measures whether `gradwire.Outer` reaches plain DDP's quality on slow links, and how fast it trains there.

Feeds docs/results/outer.md.

    python -m gradwire.bench.studies.convergence.outer quality --json runs.jsonl            # 2 nodes of 2 ranks
    python -m gradwire.bench.studies.convergence.outer quality --json runs.jsonl --joined   # the same on 2 processes
    python -m gradwire.bench.studies.convergence.outer speed --json runs.jsonl --nic 10mbit # emulated; needs root
    python -m gradwire.bench.studies.convergence.outer cost --json runs.jsonl --method 'Outer int4, H 5'
    python -m gradwire.bench.studies.convergence.outer show --json runs.jsonl

Quality is that of the workers' own models on held-out text, at the end after `synchronize()`: time plays no part in it.
On one node, with `--nodes 1 --joined`, methods of Outer are an outer SGD around the one worker's own steps.
With `--joined` one rank stands for a node and takes the batches of all its ranks: the same sums in half of the time.
`--outer 'H 5={"every": 5, "fragments": 1}'` tries what has no name yet.
Speed is seconds a step, all methods in turns in one run, each for as many steps as an exchange of the whole model takes
turns for; `workers alone` never exchange anything: that is the machine without a limit on its links.
Cost is the processor time of all threads of a rank for one step of exchanges, between which it sleeps: other jobs on
the machine change it less than seconds. It is that of methods of Outer alone.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import gradwire
from gradwire.bench.configuration import Configuration, take_turns
from gradwire.bench.emulation.fork import ForkedRank, hear_forked
from gradwire.bench.emulation.paths import PathOptions
from gradwire.bench.emulation.placement import place_ranks
from gradwire.bench.machine import machine_line
from gradwire.bench.studies.convergence.optimizers import MUON, optimizers_of
from gradwire.bench.studies.convergence.tasks import (
    TASKS,
    BatchedTask,
    FashionTask,
    Task,
    TaskFacts,
    marks_of,
    quality_of_ranks,
    schedules_of,
)
from gradwire.bench.studies.convergence.training import on_forked_ranks
from gradwire.bench.studies.shared.parser import StudyParser, path_of

PLAIN, ALONE, INT4, POWERSGD, POST_LOCAL = (
    "plain DDP",
    "workers alone",
    "gradwire int4",
    "torch PowerSGD",
    "torch post_localSGD 30",
)
NEVER = 10**6
COST_ROUNDS = 4
"""Number of rounds of the cost measurement, of which the first is not counted."""

COST_SLEEP_SECONDS = 0.02
EVALUATED = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Shares of the run after which the quality is measured."""


@dataclass(frozen=True, slots=True)
class SlowLinkMethod:
    """Describes a method by which ranks exchange gradients or models."""

    name: str
    options: dict[str, object] | None = None
    """Options of `gradwire.Outer`; None for another method."""
    turns: int = 30
    """Number of steps in one turn of the timing."""


UNSAID: dict[str, object] = {"every": 30, "fragments": 4, "delay": 1, "compressor": None}
"""Options of `gradwire.Outer` for which a method's name says nothing, fixed so that no default changes a method."""


def _outer(name: str, **options: object) -> SlowLinkMethod:
    return SlowLinkMethod(f"Outer {name}", UNSAID | options)


METHODS = {
    each.name: each
    for each in (
        SlowLinkMethod(PLAIN, turns=2),
        SlowLinkMethod(INT4, turns=5),
        SlowLinkMethod(POWERSGD, turns=5),
        SlowLinkMethod(POST_LOCAL),
        SlowLinkMethod(ALONE, {"compressor": None, "every": NEVER, "fragments": 1, "delay": 0}),
        _outer("local SGD 5", fragments=1, delay=0, every=5),
        _outer("int4, H 5", compressor="int4", every=5, fragments=5, delay=1),
        _outer("waterfill2, H 5", compressor="waterfill2", every=5, fragments=5, delay=1),
    )
}


@dataclass
class JoinedTask(BatchedTask):
    """Wraps a task so that one rank stands for all ranks of a node, which average gradients at every step.

    Attributes:
        task: Task to train.
        ranks: Number of ranks of a node.
        lr: Factor of the inner learning rate.
        facts: Name, optimizer and other properties of the task, see `Task`.
    """

    task: BatchedTask
    ranks: int
    lr: float = 1.0
    facts: TaskFacts = field(init=False)

    def __post_init__(self) -> None:
        self.facts = self.task.facts

    def load(self) -> None:
        """Loads the data of the wrapped task."""
        self.task.load()

    def model(self, seed: int) -> nn.Module:
        """Returns the wrapped task's model, initialized with a seed."""
        return self.task.model(seed)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Returns the wrapped task's optimizer, its learning rates multiplied by `lr`."""
        optimizer = self.task.optimizer(parameters)
        for group in optimizer.param_groups:
            group["lr"] *= self.lr
        return optimizer

    def batch_of(self, step: int, rank: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns the concatenated batches of all ranks of a node; `rank` is the number of the node."""
        inputs, targets = zip(*(self.task.batch_of(step, each, seed) for each in self._ranks(rank)), strict=True)
        return torch.cat(inputs), torch.cat(targets)

    def loss_of(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the wrapped task's loss of a batch."""
        return self.task.loss_of(model, inputs, targets)

    def score(self, model: nn.Module, rank: int) -> Tensor:
        """Returns the sum of the wrapped task's scores of all ranks of a node; `rank` is the number of the node."""
        return torch.stack([self.task.score(model, each) for each in self._ranks(rank)]).sum(0)

    def _ranks(self, node: int) -> range:
        return range(node * self.ranks, (node + 1) * self.ranks)


class OuterSgd:
    """Takes a step of an outer SGD with Nesterov's momentum every few inner steps, on one worker, as SNOO does.

    Source: SNOO (arXiv 2510.15830). `gradwire.Outer` takes none where there is no other worker.

    Args:
        model: Model that the inner optimizers train; it continues from each outer step.
        every: Number of inner steps before each outer one.
        lr: Learning rate.
        momentum: Momentum.
        of_exchanges: Other options of `gradwire.Outer`, which mean nothing without an exchange.
    """

    def __init__(
        self, model: nn.Module, every: int, lr: float = 1.0, momentum: float = 0.0, **of_exchanges: object
    ) -> None:
        self._pairs = [(each, nn.Parameter(each.detach().clone())) for each in model.parameters()]
        self._sgd = SGD([anchor for _, anchor in self._pairs], lr=lr, momentum=momentum, nesterov=momentum > 0)
        self._every, self._steps = every, 0

    @torch.no_grad()
    def step(self) -> None:
        """Counts an inner step that was taken, and takes the outer step if it is due."""
        self._steps += 1
        if self._steps % self._every == 0:
            for trained, anchor in self._pairs:
                anchor.grad = anchor - trained
            self._sgd.step()
            for trained, anchor in self._pairs:
                trained.copy_(anchor)


class Training:
    """Trains a model on one rank with one method of exchange.

    Args:
        task: Task that makes model, optimizer and loss.
        method: Method of exchange.
        place: Rank and nodes of the forked job.
        seed: Seed of weights and batches.
        optimizer: Kind of optimizer, see `optimizers_of`; None takes the task's own.
    """

    def __init__(
        self, task: Task, method: SlowLinkMethod, place: ForkedRank, seed: int, optimizer: str | None = None
    ) -> None:
        self.model: nn.Module = task.model(seed)
        self.inner = optimizers_of(task, self.model, optimizer or task.facts.optimizer)
        self.optimizers: Sequence[Optimizer | PostLocalSGDOptimizer | OuterSgd] = self.inner
        self.outer: gradwire.Outer | None = None
        self._task, self._place, self._seed = task, place, seed
        node = f"node{place.node}"
        if method.options is not None and place.world_size == 1:
            self.optimizers = [*self.inner, OuterSgd(self.model, **method.options)]  # type: ignore[arg-type]
            return
        if method.options is not None:
            self.outer = gradwire.Outer(self.model, self.inner, hostname=node, **method.options)  # type: ignore[arg-type]
            self.model = self.outer.model
            return
        # One bucket: torch's PowerSGD starts collectives in callbacks, whose order on gloo differs between ranks.
        self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True, bucket_cap_mb=25)
        if method.name == INT4:
            gradwire.attach(self.model, compressor="int4", hostname=node)
        elif method.name == POWERSGD:
            power = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            self.model.register_comm_hook(power, powerSGD_hook)
        elif method.name == POST_LOCAL:
            placements = place_ranks(place.nodes)
            groups = [
                dist.new_group([placement.rank for placement in placements if placement.node == node])
                for node in range(len(place.nodes))
            ]
            local = PostLocalSGDState(None, groups[place.node], start_localSGD_iter=0)  # type: ignore[no-untyped-call]
            self.model.register_comm_hook(local, post_localSGD_hook)
            averager = PeriodicModelAverager(period=30, warmup_steps=0)
            self.optimizers = [PostLocalSGDOptimizer(each, averager) for each in self.inner]

    def step(self, number: int) -> None:
        """Takes an optimizer step on this rank's batch with this number."""
        for each in self.inner:
            each.zero_grad()
        self._task.loss(self.model, number, self._place.rank, self._seed).backward()  # type: ignore[no-untyped-call]
        for stepper in self.optimizers:
            stepper.step()

    def close(self) -> None:
        """Ends the exchanges of `gradwire.Outer`; does nothing for other methods."""
        if self.outer is not None:
            self.outer.close()


def task_of_ranks(name: str, ranks: int) -> BatchedTask:
    """Returns the task of this name, whose data are divided among a number of ranks."""
    return FashionTask(ranks=ranks) if name == "fashion" else TASKS[name]()


def train(
    task: Task, method: SlowLinkMethod, seed: int, nodes: Sequence[int], steps: int, optimizer: str | None = None
) -> dict[str, object]:
    """Trains a task once on forked ranks, and returns a record of the run for JSON.

    Args:
        task: Task to train; its data are loaded here.
        method: Method of exchange.
        seed: Seed of weights and batches.
        nodes: Number of ranks of each node.
        steps: Number of steps of the run.
        optimizer: Kind of optimizer, see `optimizers_of`; None takes the task's own.

    Raises:
        RuntimeError: A rank failed; it has printed why.
    """
    task.load()
    return on_forked_ranks(
        nodes, lambda place: _curve(task, method, seed, place, steps, optimizer), f"{method.name}, seed {seed}"
    )


def _curve(
    task: Task, method: SlowLinkMethod, seed: int, place: ForkedRank, steps: int, optimizer: str | None
) -> dict[str, object]:
    training = Training(task, method, place, seed, optimizer)
    schedules, marks = schedules_of(training.inner, steps), marks_of(steps, EVALUATED)
    curve, bits = [], None
    for step in range(steps):
        training.step(step)
        for schedule in schedules:
            schedule.step()
        if step + 1 == steps and training.outer is not None:
            report = training.outer.report()  # before synchronize(), which sends all in full precision, once a run
            bits = report.bits_per_parameter_and_step if report.exchanges else None
            if method.name != ALONE:
                training.outer.synchronize()
        if step + 1 in marks:
            curve.append((step + 1, quality_of_ranks(task, training.model, place.rank)))
    training.close()
    return {
        "what": "quality",
        "task": task.facts.name,
        "optimizer": optimizer or task.facts.optimizer,
        "steps": steps,
        "method": method.name,
        "nodes": list(place.nodes),
        "seed": seed,
        "curve": curve,
        "bits": bits,
    }


def cost(task: Task, method: SlowLinkMethod, nodes: Sequence[int], steps: int) -> dict[str, object]:
    """Measures a rank's processor time for a step of exchanges, on forked ranks that only sleep between them.

    Args:
        task: Task whose model is exchanged.
        method: Method with options of `gradwire.Outer`.
        nodes: Number of ranks of each node.
        steps: Number of steps in a round.

    Returns:
        A record for JSON; `processor_seconds` is the median over the rounds.

    Raises:
        RuntimeError: A rank failed; it has printed why.
    """
    task.load()
    found = on_forked_ranks(nodes, lambda place: _cost(task, method, place, steps), method.name)
    return {"what": "cost", "method": method.name, "nodes": list(nodes), "load": os.getloadavg()[0], **found}


def _cost(task: Task, method: SlowLinkMethod, place: ForkedRank, steps: int) -> dict[str, object]:
    training = Training(task, method, place, 0)
    assert training.outer is not None
    rounds = []
    for _ in range(COST_ROUNDS):
        dist.barrier()
        began = time.process_time()
        for _ in range(steps):
            time.sleep(COST_SLEEP_SECONDS)
            training.outer.exchange.step_ended()
        mean = torch.tensor((time.process_time() - began) / steps, dtype=torch.float64)
        dist.all_reduce(mean)
        rounds.append(float(mean) / place.world_size)
    training.close()
    return {"processor_seconds": statistics.median(rounds[1:]), "rounds": rounds}


def measure_speed(
    task_name: str,
    nodes: Sequence[int],
    nic: str | None,
    methods: Sequence[SlowLinkMethod],
    rounds: int,
    batches: int,
    path: PathOptions,
) -> object:
    """Times all methods in turns on an emulated cluster; returns what the record keeps.

    With several batches a rank takes those of as many ranks at a step: it computes longer, and sends as much.

    Raises:
        RuntimeError: This machine cannot emulate a cluster, or a rank failed.
    """
    found = hear_forked(
        "gradwire.bench.studies.convergence.outer",
        [task_name, str(rounds), str(batches), *(json.dumps(asdict(method)) for method in methods)],
        nodes=nodes,
        nic=nic,
        timeout_seconds=560,
        path=path,
    )
    return {
        "what": "speed",
        "task": task_name,
        "nodes": list(nodes),
        "nic": nic,
        "delay": path.delay,
        "loss": path.loss,
        "batches": batches,
        "machine": machine_line(),
        "load": os.getloadavg()[0],
        "steps": found,
    }


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    """Times the methods as one rank of the forked job; rank 0 reports the figures. Returns the exit status.

    Args:
        place: Rank and nodes of the forked job.
        arguments: Name of the task, number of rounds, number of ranks that one rank stands for, then each method as
            JSON.
    """
    torch.set_num_threads(1)
    place.connect()
    name, rounds, batches, *words = arguments
    methods = [SlowLinkMethod(**json.loads(word)) for word in words]
    shared = task_of_ranks(name, place.world_size * int(batches))
    task: Task = shared if batches == "1" else JoinedTask(shared, int(batches))
    place.tell(_timed(task, place, methods, int(rounds)))
    return 0


def _timed(task: Task, place: ForkedRank, methods: Sequence[SlowLinkMethod], rounds: int) -> list[dict[str, object]]:
    trainings = [Training(task, method, place, 0) for method in methods]
    processor: dict[str, list[float]] = {method.name: [] for method in methods}

    def turn(training: Training, method: SlowLinkMethod) -> Callable[[int], None]:
        def run(number: int) -> None:
            began = time.process_time()  # of all threads of this rank: lanes and gloo's too
            for step in range(method.turns):
                training.step(number * method.turns + step)
            processor[method.name].append((time.process_time() - began) / method.turns)

        return run

    configurations = [
        Configuration(method.name, turn(training, method)) for method, training in zip(methods, trainings, strict=True)
    ]
    take_turns(configurations, rounds=rounds, warmup=1, interface=place.interface)
    found: list[dict[str, object]] = []
    for method, training, one in zip(methods, trainings, configurations, strict=True):
        outer = training.outer.report() if training.outer is not None else None
        cpu = torch.tensor(statistics.median(processor[method.name][1:]), dtype=torch.float64)
        dist.all_reduce(cpu)
        found.append(
            {
                "method": method.name,
                "seconds": one.median_seconds / method.turns,
                "processor_seconds": float(cpu) / place.world_size,
                "rounds": [seconds / method.turns for seconds in one.seconds],
                "nic_nbytes": one.median_nic_nbytes / method.turns,
                "bits": outer.bits_per_parameter_and_step if outer and outer.exchanges else None,
                "wait_share": outer.waited_seconds / (sum(one.seconds) or 1) if outer else None,
            }
        )
        training.close()
    return found


def show(file: Path) -> str:
    """Returns a file's results as text: quality, steps to plain DDP's quality, and step and training time on each link.

    Results are compared only with those of the same task, nodes and number of steps.
    """
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    text = []
    kinds = dict.fromkeys((row["task"], row["steps"], tuple(row["nodes"])) for row in rows if row["what"] == "quality")
    for kind in kinds:
        # Collect the runs of each method, and the speeds of the task.
        task, steps, nodes = kind
        facts = TASKS[task]().facts
        runs: dict[str, list[dict[str, list[tuple[int, float]]]]] = {}
        for row in rows:
            if row["what"] == "quality" and (row["task"], row["steps"], tuple(row["nodes"])) == kind:
                runs.setdefault(row["method"], []).append(row)
        speeds = [row for row in rows if row["what"] == "speed" and row["task"] == task]
        text.append(f"{facts.title}: {facts.quality}; {len(nodes)} nodes of {nodes[0]} ranks, {steps} steps")
        sign = -1 if facts.higher_is_better else 1
        target = None
        if PLAIN in runs:
            target = statistics.mean(run["curve"][-1][1] for run in runs[PLAIN]) + sign * facts.tolerance
        # Quality: the mean over the seeds, and the step at which all of them reach plain DDP's quality.
        reached: dict[str, float] = {}
        for name, found in runs.items():
            finals = [run["curve"][-1][1] for run in found]
            hits = [
                next((step for step, value in run["curve"] if target and sign * value <= sign * target), None)
                for run in found
            ]
            known = [hit for hit in hits if hit is not None]
            if len(known) == len(hits):
                reached[name] = statistics.mean(known)
            bits = found[0].get("bits")
            text.append(
                f"  {name:30} {statistics.mean(finals):.3f} ({', '.join(f'{each:.3f}' for each in finals)}) "
                f"reaches {target or 0:.3f} after {reached.get(name, 'never')} steps, {bits or 0:.4g} bits"
            )
        # Speed on each link: seconds of a step, and how much sooner plain DDP's quality is reached.
        for row in speeds:
            seconds = {each["method"]: each["seconds"] for each in row["steps"]}
            text.append(f"  on {row['nic']}, load {row['load']:.1f}, {row['machine']}")
            for each in row["steps"]:
                name = each["method"]
                took = reached[name] * each["seconds"] if name in reached else None
                words = f"{seconds[ALONE] / each['seconds']:.3f} of alone" if ALONE in seconds else ""
                gain = (
                    f", {reached[PLAIN] * seconds[PLAIN] / took:.1f}x plain DDP to its quality"
                    if took and PLAIN in reached and PLAIN in seconds
                    else ""
                )
                text.append(
                    f"    {name:30} {1e3 * each['seconds']:8.1f} ms a step, {words}, "
                    f"{each['nic_nbytes'] / 1e3:8.1f} kB, {each['bits'] or 0:.4g} bits{gain}"
                )
    return "\n".join(text)


def main(argv: list[str]) -> int:
    """Measures and appends the results to the file, or prints what the file has; returns 0. A failed rank raises."""
    parser = StudyParser("convergence.outer", __doc__)
    parser.add_argument("what", choices=("quality", "speed", "cost", "show"))
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="a line for each result; added to")
    parser.add_argument("--task", choices=TASKS, default="text")
    parser.add_argument("--method", action="append", choices=METHODS, help="repeatable (default: all)")
    parser.add_argument("--outer", action="append", default=[], metavar="NAME=JSON", help="options of gradwire.Outer")
    parser.add_argument("--optimizer", help=f"of quality: {MUON}, or the task's own (default)")
    parser.add_argument("--joined", action="store_true", help="one rank stands for a node")
    parser.add_argument("--inner-lr", type=float, default=1.0, help="factor of the inner learning rate, with --joined")
    parser.add_argument("--seed", action="append", type=int, help="repeatable (default: 0)")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--nic", help="of the emulated links (default: no limit)")
    parser.add_path()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=1, help="of speed: of how many ranks one takes those")
    parser.add_argument("--steps", type=int, help="default: those of the task")
    options = parser.parse_args(argv)
    # Methods: those of the table by name, and those given as options of Outer.
    nodes = [options.ranks_per_node] * options.nodes
    task = task_of_ranks(options.task, sum(nodes))
    steps = options.steps or task.facts.steps
    methods = [METHODS[name] for name in options.method or ([] if options.outer else METHODS)]
    for word in options.outer:
        name, _, values = word.partition("=")
        methods.append(_outer(name, **json.loads(values)))
    # Show the file, or measure and add to it.
    if options.what == "show":
        print(show(options.json))
        return 0
    if options.what == "speed":
        path = path_of(options)
        found = measure_speed(options.task, nodes, options.nic, methods, options.rounds, options.batches, path)
        _add(options.json, found)
        return 0
    if options.what == "cost":
        for method in (each for each in methods if each.options is not None):
            found = cost(task, method, nodes, steps)
            _add(options.json, found)
            print(f"{method.name}: {1e3 * float(str(found['processor_seconds'])):.2f} ms, load {found['load']:.1f}")
        return 0
    trained: Task = task
    if options.joined:
        trained, nodes = JoinedTask(task, options.ranks_per_node, options.inner_lr), [1] * options.nodes
    for seed in options.seed or [0]:
        for method in methods:
            found = train(trained, method, seed, nodes, steps, options.optimizer)
            found["inner_lr"] = options.inner_lr
            _add(options.json, found)
            print(method.name, seed, found["curve"][-1], found["bits"], flush=True)  # type: ignore[index]
    return 0


def _add(file: Path, found: object) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
