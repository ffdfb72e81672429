"""What watching costs: processor time of the thread that trains, for a collective, a message, and a wait for either.

Feeds docs/results/diagnosis.md.

    python -m gradwire.bench.studies.watch.cost

Pairs of ranks over gloo, forked in turn without a watch and with one, issue the same small collectives and messages
from stacks of several depths; the difference of two neighbouring pairs is what watching takes. Processor time, because
on a shared machine the clock on the wall says nothing, and of blocks of calls the cheapest: what others push out of the
caches is no cost of the watch. And the time of the watch's own thread, as a share of a second.
"""

import argparse
import importlib
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import gradwire
from gradwire.bench.machine import machine_line
from gradwire.bench.studies.watch.forked import join, run_ranks
from gradwire.bench.studies.watch.job import TIMEOUT
from gradwire.bench.studies.watch.planted import LIMIT_SECONDS, RESULT, WARMED

BLOCKS, CALLS = 40, 50
DEPTHS = (3, 30)
"""Frames of Python above a call."""

Costs = dict[str, float]
"""What -> microseconds of processor time of the training thread; `thread`: of the watch's own, in a second."""


def deep(depth: int, call: Callable[[], None]) -> None:
    """Calls from so many frames further down."""
    if depth:
        deep(depth - 1, call)
    else:
        call()


def message(tensor: torch.Tensor) -> None:
    """A message to the other rank, and one from it."""
    other = 1 - dist.get_rank()
    works = [dist.isend(tensor, other), dist.irecv(torch.empty_like(tensor), other)]
    for work in works:
        if work is not None:
            work.wait()


def measured(watches: bool, rank: int, port: int) -> None:
    """One rank's part; rank 0 prints the costs."""
    torch.set_num_threads(1)
    if watches:
        gradwire.watch()
    join(rank, 2, port, TIMEOUT)
    tensor = torch.ones(4)
    calls: dict[str, Callable[[], None]] = {
        "all_reduce": lambda: (dist.all_reduce(tensor), None)[1],
        "two messages": lambda: message(tensor),
    }
    found: Costs = {}
    began, before = time.monotonic(), own_seconds()
    for depth in DEPTHS:
        for name, call in calls.items():
            deep(depth, partial(repeat, call, CALLS))
            used_by_calls: list[float] = []
            deep(depth, partial(repeat_blocks, call, used_by_calls))
            found[f"{name}, {depth} frames"] = min(used_by_calls) / CALLS * 1e6
    if watches:
        found["thread"] = (own_seconds() - before) / (time.monotonic() - began) * 1e6
    if rank == 0:
        print(RESULT, json.dumps(found), flush=True)
    dist.destroy_process_group()


def repeat(call: Callable[[], None], times: int) -> None:
    """Calls so many times."""
    for _ in range(times):
        call()


def repeat_blocks(call: Callable[[], None], used: list[float]) -> None:
    """Calls `CALLS` times, `BLOCKS` times, and appends the processor time of each block in seconds."""
    for _ in range(BLOCKS):
        before = time.thread_time()
        repeat(call, CALLS)
        used.append(time.thread_time() - before)


def own_seconds() -> float:
    """Processor time of the watch's thread so far; 0 where there is none."""
    thread = next((each for each in threading.enumerate() if each.name == "gradwire watch"), None)
    if thread is None or thread.ident is None:
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def costs(watches: bool) -> Costs:
    """Of one pair of ranks.

    Args:
        watches: Whether they are watched.

    Raises:
        RuntimeError: A rank failed.
    """
    statuses, text = run_ranks(2, partial(measured, watches), LIMIT_SECONDS)
    if any(statuses):
        raise RuntimeError(f"the ranks ended with {statuses}: {text[-4000:]}")
    found: Costs = json.loads(text.partition(RESULT)[2].partition("\n")[0])
    return found


def main() -> None:
    """Runs pairs in turn, and prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench.studies.watch.cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, help="pairs without and with (default: 5)")
    options = parser.parse_args()
    for module in WARMED[:1]:
        importlib.import_module(module)
    rounds = [(costs(False), costs(True)) for _ in range(options.rounds)]
    print("| call | us without | us with | more, of each round |\n|---|---|---|---|")
    for name in rounds[0][0]:
        off, on = ([each[way][name] for each in rounds] for way in (0, 1))
        more = ", ".join(f"{b - a:.1f}" for a, b in zip(off, on, strict=True))
        print(f"| {name} | {statistics.median(off):.1f} | {statistics.median(on):.1f} | {more} |")
    own = [each[1]["thread"] / 1e4 for each in rounds]
    print(f"\nthe watch's thread: {min(own):.2f} to {max(own):.2f} % of a core")
    print(f"{machine_line()}, at a load of {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()
