"""Trains a thousand steps with `elastic` over a link with delay and loss, and reports ranks that were named or lost.

    python -m gradwire.bench.studies.distance.endurance --delay 75ms --loss 1% --steps 1000

No rank is at fault, so none should be named as a straggler, removed from the job or warned of; the exit status is 1 if
one was.
"""

import json
import logging
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.fork import ForkedRank, run_forked
from gradwire.bench.emulation.paths import PathOptions
from gradwire.bench.emulation.signals import clean_end
from gradwire.bench.machine import machine_line
from gradwire.bench.studies.shared.parser import StudyParser

MODULE = "gradwire.bench.studies.distance.endurance"
TIMEOUT = timedelta(seconds=300)
WIDTH, BATCH = 16, 8

ASKED_EVERY = 25
"""Steps between two all-reduces by which the ranks agree whether the time limit has passed."""


class _Heard(logging.Handler):
    """Collects the messages of gradwire's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def endure(place: ForkedRank, steps: int, seconds: float) -> dict[str, object]:
    """Trains a tiny model with `elastic`; returns this rank's steps, seconds, stragglers and warnings.

    Args:
        place: Rank and nodes of the forked job.
        steps: Maximum number of steps.
        seconds: Time limit, checked every `ASKED_EVERY` steps.
    """
    heard = _Heard()
    logging.getLogger("gradwire").addHandler(heard)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = gradwire.attach(model, elastic=True, extra_state=[optimizer], stall_seconds=10.0, straggler_every=50)
    generator = torch.Generator().manual_seed(1 + place.rank)
    began = time.monotonic()
    for done in range(1, steps + 1):
        optimizer.zero_grad()
        loss = model(torch.randn(BATCH, WIDTH, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        if done % ASKED_EVERY == 0:
            over = torch.tensor([float(time.monotonic() - began > seconds)])
            dist.all_reduce(over, group=model.process_group)
            if over.item():
                break
    stragglers = [str(each) for each in state.report().stragglers]
    return {
        "steps": state.steps,
        "seconds": time.monotonic() - began,
        "ranks": state.view.size,
        "stragglers": stragglers,
        "warnings": heard.lines,
    }


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    """Runs one rank's part and prints its result as JSON; returns its exit status.

    Args:
        place: Rank and nodes of the forked job.
        arguments: Maximum number of steps, and time limit in seconds.
    """
    torch.set_num_threads(1)
    place.connect(TIMEOUT)
    print(json.dumps(endure(place, int(arguments[0]), float(arguments[1]))), flush=True)
    place.leave()
    return 0


def main(argv: list[str]) -> int:
    """Trains and prints each rank's result; returns 1 if a rank was named, lost or warned of, else 0."""
    parser = StudyParser("distance.endurance", __doc__)
    parser.add_argument("--nic", default="100mbit")
    parser.add_argument("--delay", default="75ms", help="one way")
    parser.add_argument("--loss", default="1%")
    parser.add_argument("--congestion", default="cubic")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=500.0, help="at most, whatever has been done by then")
    options = parser.parse_args(argv)
    path = PathOptions(delay=options.delay, loss=options.loss)
    with EmulatedCluster([1, 1], options.nic, path=path, congestion=options.congestion) as cluster:
        given = [str(options.steps), str(options.seconds)]
        outcome = run_forked(cluster, MODULE, given, nodes=[1, 1], timeout_seconds=options.seconds + 400)
    outcome.check()
    load = f"load {os.getloadavg()[0]:.0f}"
    print(f"{options.nic}, {options.delay} one way, {options.loss}; {machine_line()}, {load}")
    lines = [line for output in outcome.output for line in output.splitlines() if line.startswith('{"')]
    found = [json.loads(line) for line in lines]
    for rank, seen in enumerate(found):
        print(f"rank {rank}: {json.dumps(seen)}")
    return int(any(seen["stragglers"] or seen["warnings"] or seen["ranks"] != 2 for seen in found))


if __name__ == "__main__":
    with clean_end():
        sys.exit(main(sys.argv[1:]))
