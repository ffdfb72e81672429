"""Times a training step under every method, in turns on one emulated cluster of two nodes with two ranks each."""

import torch
from torch import nn

from gradwire.bench.configuration import Configuration
from gradwire.bench.emulation.fork import ForkedRank
from gradwire.bench.emulation.rate import format_rate, parse_rate
from gradwire.bench.machine import machine_line
from gradwire.bench.studies.convergence.record import HALF, Speed, Timed
from gradwire.bench.studies.convergence.tasks import TASKS, Task
from gradwire.bench.studies.convergence.training import METHODS, PLAIN, MethodTraining, make_training
from gradwire.bench.studies.shared.turns import hear_turns, tell_turns
from gradwire.bench.train.main_job import readable_rate
from gradwire.comms.bootstrap.compat import Store

NODES = (2, 2)
LINKS = (HALF, HALF / 4)
"""Rates of the links, relative to the rate at which plain DDP spends half of its step on the link."""
ROUNDS = 15
WARMUP_ROUNDS = 3
TIMEOUT_SECONDS = 300.0


def measure(task: Task, share: float, half: tuple[str, float] | None) -> Speed:
    """Times a step of every method on links of one rate.

    Args:
        task: Task to train.
        share: Rate of the links relative to that at which plain DDP spends half of its step on the link: one of
            `LINKS`.
        half: (rate of the latter as text, seconds of a step of plain DDP without a limit); None measures them first.

    Raises:
        RuntimeError: This machine cannot emulate a cluster, or a rank failed.
    """
    rate, free_seconds = half or _rate_of_half(task)
    nic = format_rate(round(parse_rate(rate, "--nic") * share))
    methods = [method.name for method in METHODS[task.facts.optimizer]]
    steps = tuple(_run(task, nic, methods))
    return Speed(task.facts.name, share, nic, free_seconds, machine_line(), steps)


def _rate_of_half(task: Task) -> tuple[str, float]:
    """Finds the rate of a link that takes as long for plain DDP's bytes as a step takes on links without a limit.

    Returns:
        (rate as text, seconds of that step).
    """
    plain = _run(task, None, [PLAIN])[0]
    return readable_rate(plain.nic_nbytes, plain.seconds), plain.seconds


def _run(task: Task, nic: str | None, methods: list[str]) -> list[Timed]:
    bytes_per_second = 0.0 if nic is None else parse_rate(nic, "--nic") / 8
    found = hear_turns(
        "convergence.speed",
        [task.facts.name, str(bytes_per_second), *methods],
        nodes=NODES,
        nic=nic,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    return [Timed(name, one.median_seconds, one.median_nic_nbytes) for name, one in found.items()]


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    """Times steps as one rank of the forked job; rank 0 reports the figures. Returns the exit status.

    Args:
        place: Rank and nodes of the forked job.
        arguments: Name of the task, bytes per second of the links (0: no limit), then the names of the methods.
    """
    task, rate = TASKS[arguments[0]](), float(arguments[1]) or None

    def make(_: Store) -> list[Configuration]:
        return [
            _configuration(
                task, method.name, make_training(task, method, warm=True, nic_bytes_per_second=rate), place.rank
            )
            for method in METHODS[task.facts.optimizer]
            if method.name in arguments[2:]
        ]

    return tell_turns(place, make, rounds=ROUNDS, warmup=WARMUP_ROUNDS)


def _configuration(task: Task, name: str, training: MethodTraining, rank: int) -> Configuration:
    def step(number: int) -> None:
        def loss(model: nn.Module) -> torch.Tensor:
            return task.loss(model, number, rank, seed=0)

        training.take_step(loss)

    return Configuration(name, step)
