"""Measures what watching costs the thread that trains, for a collective, a message, and a wait for either.

Feeds docs/results/diagnosis.md.

    python -m gradwire.bench.studies.watch.cost

Ranks over gloo, forked in turn without a watch and with one, each the only rank of its group, so that nobody is waited
for, issue small collectives from stacks of several depths; the difference of two neighbours is what watching takes.
What a message costs, asked for and waited for, is measured on one that goes nowhere. Processor time of the thread that
trains, because on a shared machine the clock on the wall says nothing, and of blocks of calls the cheapest: what others
push out of the caches is no cost of the watch. And the time of the watch's own thread, as a share of a second.
"""

import importlib
import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.distributed as dist

import gradwire
from gradwire.bench.machine import machine_line
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.bench.studies.watch.forked import RESULT, join, result_of
from gradwire.bench.studies.watch.injected import LIMIT_SECONDS, WARMED
from gradwire.bench.studies.watch.job import TIMEOUT
from gradwire.comms.bootstrap.compat import BackendWork
from gradwire.comms.watch.messages import MessageNotes

BLOCKS, CALLS = 200, 50
STEPS, STEP_SECONDS = 600, 0.02
DEPTHS = (3, 30)
"""Numbers of Python frames from which a call is measured: the watch walks the stack."""

Costs = dict[str, float]
"""Name of a call -> microseconds of processor time of the training thread."""


def deep(depth: int, call: Callable[[], object]) -> None:
    """Calls a function with `depth` more frames on the stack."""
    if depth:
        deep(depth - 1, call)
    else:
        call()


class Nowhere:
    """Stands in for the work of a message that is not sent, so that torch's own cost is not measured."""


def message(notes: MessageNotes, tensor: torch.Tensor) -> None:
    """Records the sending of a message and the wait for it, as the methods that the watch wraps do.

    Args:
        notes: Record of messages.
        tensor: The message; not sent.
    """
    world = dist.group.WORLD
    assert world is not None
    work = notes._message(lambda *_: cast(BackendWork, Nowhere()), world, [tensor], 0, 0, sends=True)
    notes._wait(lambda _: True, work)


def measured(watches: bool, rank: int, port: int) -> None:
    """Measures the costs of calls as the only rank of a job, and prints them as JSON.

    Args:
        watches: True runs the watch.
        rank: Number of this rank; 0.
        port: Port of the job's store.
    """
    torch.set_num_threads(1)
    if watches:
        gradwire.watch()
    join(rank, 1, port, TIMEOUT)
    tensor, notes = torch.ones(4), MessageNotes()
    calls: dict[str, Callable[[], object]] = {"all_reduce": lambda: dist.all_reduce(tensor)}
    if watches:
        calls["message and its wait"] = lambda: message(notes, tensor)
    found: Costs = {}
    for depth in DEPTHS:
        for name, call in calls.items():
            deep(depth, partial(repeat, call, CALLS))
            used_by_calls: list[float] = []
            deep(depth, partial(repeat_blocks, call, used_by_calls))
            found[f"{name}, {depth} frames"] = min(used_by_calls) / CALLS * 1e6
    if rank == 0:
        print(RESULT, json.dumps(found), flush=True)
    dist.destroy_process_group()


def looked(rank: int, port: int) -> None:
    """Takes steps as one of two watched ranks; rank 0 prints the share of a core that its watch's thread takes."""
    torch.set_num_threads(1)
    gradwire.watch()
    join(rank, 2, port, TIMEOUT)
    tensor, began, before = torch.ones(4), time.monotonic(), own_seconds()
    for _ in range(STEPS):
        time.sleep(STEP_SECONDS)
        dist.all_reduce(tensor)
    share = (own_seconds() - before) / (time.monotonic() - began)
    if rank == 0:
        print(RESULT, json.dumps(share), flush=True)
    dist.destroy_process_group()


def repeat(call: Callable[[], object], times: int) -> None:
    """Calls a function `times` times."""
    for _ in range(times):
        call()


def repeat_blocks(call: Callable[[], object], used: list[float]) -> None:
    """Makes `BLOCKS` blocks of `CALLS` calls each; appends the processor seconds of each block to `used`."""
    for _ in range(BLOCKS):
        before = time.thread_time()
        repeat(call, CALLS)
        used.append(time.thread_time() - before)


def own_seconds() -> float:
    """Returns the processor seconds of the watch's thread so far; 0 if there is none."""
    thread = next((each for each in threading.enumerate() if each.name == "gradwire watch"), None)
    if thread is None or thread.ident is None:
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def main() -> None:
    """Runs ranks without and with the watch in turn, and prints a table of both and of the difference.

    Then it runs two watched ranks, twice, and prints the share of a core that the watch's own thread takes.
    """
    parser = StudyParser("watch.cost", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="ranks without and with (default: 5)")
    options = parser.parse_args()
    told = partial(result_of, seconds=LIMIT_SECONDS)
    for module in WARMED[:1]:
        importlib.import_module(module)
    rounds: list[tuple[Costs, Costs]] = [
        (told(1, partial(measured, False)), told(1, partial(measured, True))) for _ in range(options.rounds)
    ]
    print("| call | us without, least | us with, least | more, of each round |\n|---|---|---|---|")
    for name in rounds[0][1]:
        off, on = ([each[way].get(name, 0.0) for each in rounds] for way in (0, 1))
        more = ", ".join(f"{b - a:.1f}" for a, b in zip(off, on, strict=True))
        print(f"| {name} | {min(off):.1f} | {min(on):.1f} | {more} |")
    own = [100 * told(2, looked) for _ in range(2)]
    print(f"\nthe watch's thread: {min(own):.2f} to {max(own):.2f} % of a core")
    print(f"{machine_line()}, at a load of {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()
