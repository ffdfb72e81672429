"""Who is named late in thousands of real steps without a late rank, how soon one is named, and what watching costs.

Ranks are threads of one process on logical nodes, with real transports; computing is a sleep. On a busy machine that is
the harder case: threads are late by chance all the time. Feeds docs/how-to/find_the_slow_rank.md.

    python -m gradwire.bench.studies.stragglers alarms --steps 10000     # nobody is late: who is named?
    python -m gradwire.bench.studies.stragglers inject --seconds 0.2     # one rank is: after how many steps?
    python -m gradwire.bench.studies.stragglers cost                     # of a step's end, in processor time
"""

import argparse
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch

from gradwire.bench.machine import machine_line
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.execute import Bucket, Launch
from gradwire.comms.observe.observer import Observer

Result = TypeVar("Result")
BUCKETS = 4
NUMEL = 4096


class WatchedRank:
    """One rank, and its steps of a few buckets."""

    def __init__(self, communicator: Communicator, config: Config) -> None:
        self.communicator = communicator
        self.observer = Observer(communicator, config)
        self.steps = 0
        self.watching: list[float] = []
        """Seconds of processor time of this rank's own thread at the end of each step."""
        self._flats = [torch.ones(NUMEL) for _ in range(BUCKETS)]
        for index in range(BUCKETS):
            self.observer.contents[index] = NUMEL, (f"layers.{BUCKETS - 1 - index}.weight",)

    def step(self, computes: Callable[[int], float]) -> None:
        """One step; `computes` gives the seconds of each bucket."""
        self.observer.step_began()
        buckets = []
        for index, flat in enumerate(self._flats):
            time.sleep(computes(index))
            bucket = Bucket.of(flat, None, self.communicator.clock.now(), index)
            self.communicator.start(Launch((flat,), None, (bucket,)), scale=1 / self.communicator.size)
            buckets.append(bucket)
        self.steps += 1
        began = time.thread_time()
        self.observer.step_ended(self.steps, buckets, lambda: self.communicator.report(self.steps))
        self.watching.append(time.thread_time() - began)
        for bucket in buckets:
            bucket.result().wait()

    @property
    def named(self) -> list[str]:
        """What the report says of late ranks and slow links."""
        return [str(each) for each in self.observer.add_to(self.communicator.report()).stragglers]


def on_threads(nodes: str, body: Callable[[WatchedRank], Result], every: int) -> list[Result]:
    """Runs `body` on each rank; its node is its letter in `nodes`."""
    store, results = HashStore(), dict[int, Result]()

    def run(rank: int) -> None:
        config = Config(hostname=f"node-{nodes[rank]}", timeout=timedelta(seconds=60), straggler_every=every)
        communicator = Communicator(store, rank, len(nodes), torch.device("cpu"), config, name="study")
        watched = WatchedRank(communicator, config)
        try:
            results[rank] = body(watched)
        finally:
            watched.observer.close()
            communicator.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(len(nodes))]


def alarms(nodes: str, steps: int, seconds: float) -> str:
    """Goes through `steps` without a late rank."""
    said: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, handler = logging.getLogger("gradwire"), Listening(logging.WARNING)
    logger.addHandler(handler)

    def body(rank: WatchedRank) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            rank.step(lambda index: seconds)
        return (time.perf_counter() - began) / steps

    try:
        length = on_threads(nodes, body, 50)[0]
    finally:
        logger.removeHandler(handler)
    return "\n".join([f"{nodes}: {steps} steps of {length * 1e3:.1f} ms, {len(said)} warnings", *said])


def inject(nodes: str, steps: int, late_seconds: float, seconds: float) -> str:
    """Makes the last rank late from some step on, and says after how many steps it is named."""
    begins = 30

    def body(rank: WatchedRank) -> tuple[int, list[str]]:
        late = rank.communicator.rank == len(nodes) - 1
        while rank.steps < steps and not rank.named:
            slow = late_seconds if late and rank.steps >= begins else 0.0
            rank.step(lambda index: seconds + (slow if index == 2 else 0.0))  # noqa: B023 - called at once
        return rank.steps, rank.named

    after, named = on_threads(nodes, body, 50)[0]
    return f"{nodes}: named after {after - begins} steps: {'; '.join(named) or 'nobody'}"


def cost(nodes: str, steps: int, seconds: float) -> str:
    """What watching takes of a rank's own thread at the ends of steps."""

    def body(rank: WatchedRank) -> list[float]:
        for _ in range(steps):
            rank.step(lambda index: seconds)
        return sorted(rank.watching)

    words = []
    for every in (50, 0):
        taken = min(on_threads(nodes, body, every), key=sum)
        mean, median = sum(taken) / steps * 1e6, statistics.median(taken) * 1e6
        words.append(f"{mean:.1f} us a step with `straggler_every={every}`, half of the steps below {median:.1f} us")
    return f"{nodes}, {BUCKETS} buckets, {steps} steps, processor time of a rank's own thread: {'; '.join(words)}"


def main() -> None:
    """Prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("alarms", "inject", "cost"))
    parser.add_argument("--nodes", default="aabb", help="a letter for each rank")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=0.2, help="that a rank is late (inject)")
    parser.add_argument("--bucket-seconds", type=float, default=1e-3, help="that a bucket computes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("gradwire").propagate = False
    print(machine_line(), f"load {os.getloadavg()[0]:.1f}")
    if given.what == "alarms":
        print(alarms(given.nodes, given.steps, given.bucket_seconds))
    elif given.what == "inject":
        print(inject(given.nodes, given.steps, given.seconds, given.bucket_seconds))
    else:
        print(cost(given.nodes, given.steps, given.bucket_seconds))


if __name__ == "__main__":
    main()
