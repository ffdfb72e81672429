"""Kills ranks of a training job at random moments and starts others in their place: docs/how-to/survive_a_lost_node.md.

    python -m gradwire.bench.studies.losses --nodes 2 --compressors none,int8,onebit --kills 20

Ranks are processes of this machine, two on each logical node: shared memory inside, gloo over loopback between. The
store is served by this process, as torchrun's agent serves it, so any rank may be killed. Each rank writes down every
step: when it ended, with how many ranks, a checksum of the weights, its threads and descriptors. What is checked: the
checksums of a step are the same on all ranks, no survivor leaves a step out, and nothing grows. A step takes
`--compute` seconds besides its communication.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

RANKS_PER_NODE = 2
PORT_OF_AGENT = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass
class Rank:
    """A process, the node it is on, and what it writes.

    Attributes:
        process: The process.
        node: Its node's name.
        log: Its file of steps.
        started: When, by time.time().
    """

    process: BaseProcess
    node: str
    log: Path
    started: float


@dataclass
class Findings:
    """What the kills of one job showed.

    Attributes:
        stepped: Seconds from a kill to the last survivor's next step.
        rejoined: Seconds from the start of the new process to the first step of all ranks.
        problems: What was wrong, in words.
        steps: Steps that the job has made.
        seconds: How long it ran.
        seconds_undisturbed: Of a step, without a kill.
    """

    stepped: list[float] = field(default_factory=list)
    rejoined: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    seconds_undisturbed: float = 0.0


def train(environment: dict[str, str], log: str, compressor: str, compute_seconds: float) -> None:
    """One rank: trains until it is told to stop by a file beside its log."""
    os.environ.update(environment)  # noqa: TID251 - of this rank, which was forked
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import gradwire
    from gradwire.comms.bootstrap.compat import HashStore

    torch.set_num_threads(1)
    if "GRADWIRE_JOIN" in environment:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 256), nn.BatchNorm1d(256), nn.Linear(256, 256), nn.Linear(256, 10))
    model = DistributedDataParallel(module, bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"warmup_steps": 3} if compressor in ("powersgd", "onebit", "dgc") else {}
    state = gradwire.HookState(
        model,
        elastic=True,
        carries=[optimizer],
        compressor=None if compressor == "none" else compressor,
        compressor_options=options,
        timeout=timedelta(seconds=60),
    )
    model.register_comm_hook(state, gradwire.comm_hook)
    generator = torch.Generator().manual_seed(os.getpid())
    stop = Path(log).parent / "stop"
    with Path(log).open("w", buffering=1) as file:
        while not stop.exists() or state.steps < int(stop.read_text() or 0):
            optimizer.zero_grad()
            time.sleep(compute_seconds)
            model(torch.randn(8, 32, generator=generator)).square().mean().backward()
            optimizer.step()
            weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            row = {
                "time": time.time(),
                "step": state.steps,
                "size": state.view.size,
                "epoch": state.view.epoch,
                "weights": zlib.crc32(weights.numpy().tobytes()),
                "threads": len(list(Path("/proc/self/task").iterdir())),
                "descriptors": len(list(Path("/proc/self/fd").iterdir())),
                "resident": int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
            }
            file.write(json.dumps(row) + "\n")
    state.close()


class Job:
    """A running job.

    Args:
        nodes: How many; two ranks on each.
        compressor: Its name, or `none`.
        compute_seconds: Of a step.
        folder: For the ranks' logs.
    """

    def __init__(self, nodes: int, compressor: str, compute_seconds: float, folder: Path) -> None:
        import torch.distributed as dist

        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch._dynamo", "gradwire.comms.hook"])
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._compressor, self._compute, self._folder = compressor, compute_seconds, folder
        self._count = 0
        self.size = nodes * RANKS_PER_NODE
        self.all: list[Rank] = []
        self.ranks = [self._start(rank, f"node{rank // RANKS_PER_NODE}") for rank in range(self.size)]

    def _start(self, rank: int | None, node: str) -> Rank:
        self._count += 1
        log = self._folder / f"{self._count:03d}.jsonl"
        log.touch()
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
        own = {"RANK": str(rank), "WORLD_SIZE": str(self.size), PORT_OF_AGENT: "True", **address}
        joins = {"GRADWIRE_JOIN": f"127.0.0.1:{self._store.port}"}
        environment = {"OMP_NUM_THREADS": "1", "GRADWIRE_HOSTNAME": node} | (joins if rank is None else own)
        process = self._context.Process(target=train, args=(environment, str(log), self._compressor, self._compute))
        process.start()
        made = Rank(process, node, log, time.time())
        self.all.append(made)
        return made

    def kill(self, rank: Rank) -> float:
        """Ends a rank as the kernel would; when."""
        assert rank.process.pid is not None
        self.ranks.remove(rank)
        os.kill(rank.process.pid, signal.SIGKILL)
        return time.time()

    def replace(self, rank: Rank) -> Rank:
        """Starts another process on the node of a rank that is gone."""
        made = self._start(None, rank.node)
        self.ranks.append(made)
        return made

    def rows(self, rank: Rank) -> list[dict[str, Any]]:
        """The steps that a rank has written down."""
        lines = rank.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait(self, ranks: list[Rank], after: float, size: int, seconds: float) -> float | None:
        """When the last of the ranks had ended a step of so many, later than `after`; None if that did not come."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ends = []
            for rank in ranks:
                ended = [row["time"] for row in self.rows(rank)[-50:] if row["time"] > after and row["size"] == size]
                ends.append(min(ended, default=None))
                if not rank.process.is_alive():
                    return None
            if None not in ends:
                return float(max(end for end in ends if end is not None))
            time.sleep(0.05)
        return None

    def stop(self) -> None:
        """Has all ranks end at the same step, and waits for them."""
        latest = max((row["step"] for rank in self.ranks for row in self.rows(rank)[-1:]), default=0)
        (self._folder / "stop.new").write_text(str(latest + 20))
        (self._folder / "stop.new").rename(self._folder / "stop")
        for rank in self.ranks:
            rank.process.join(60)
        for rank in self.all:
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()

    def check(self) -> list[str]:
        """What is wrong with what the ranks have written down."""
        problems = []
        weights: dict[int, set[int]] = defaultdict(set)
        for rank in self.all:
            rows = self.rows(rank)
            steps = [row["step"] for row in rows]
            if steps and steps != list(range(steps[0], steps[0] + len(steps))):
                problems.append(f"{rank.log.name} leaves out or repeats a step")
            for row in rows:
                weights[row["step"]].add(row["weights"])
        odd = [step for step, found in weights.items() if len(found) > 1]
        if odd:
            problems.append(f"weights differ between ranks after {len(odd)} steps, first after {min(odd)}")
            for rank in self.all:
                rows = [row for row in self.rows(rank) if abs(row["step"] - min(odd)) < 3]
                seen = [(row["step"], row["epoch"], row["size"], row["weights"]) for row in rows]
                print(f"  {rank.log.name} on {rank.node}: {seen}", flush=True)
        for rank in self.ranks:
            if rank.process.exitcode != 0:
                problems.append(f"{rank.log.name} ended with {rank.process.exitcode}")
        return problems


@contextmanager
def job(nodes: int, compressor: str, compute_seconds: float) -> Iterator[Job]:
    """A job, ended in any case."""
    with tempfile.TemporaryDirectory() as folder:
        made = Job(nodes, compressor, compute_seconds, Path(folder))
        try:
            yield made
        finally:
            for rank in made.all:
                if rank.process.is_alive():
                    rank.process.kill()
                    rank.process.join()


def kills(nodes: int, compressor: str, count: int, pause_seconds: float, compute_seconds: float) -> Findings:
    """Kills `count` ranks of one job, one after the other, and replaces each of them."""
    found = Findings()
    segments = set(Path("/dev/shm").glob("gradwire-*"))
    with job(nodes, compressor, compute_seconds) as running:
        if running.wait(running.ranks, 0.0, running.size, 120) is None:
            found.problems.append("the job did not start")
            return found
        began, quiet = time.time(), []
        for number in range(count):
            time.sleep(pause_seconds * (0.75 + 0.5 * random.random()))
            before = [row["time"] for row in running.rows(running.ranks[0])[-10:]]
            quiet += [b - a for a, b in pairwise(before)]
            victim = random.choice(running.ranks)
            killed = running.kill(victim)
            end = running.wait(running.ranks, killed, running.size - 1, 60)
            if end is None:
                found.problems.append(f"kill {number}: the survivors did not step again within 60 s")
                return found
            found.stepped.append(end - killed)
            made = running.replace(victim)
            end = running.wait(running.ranks, made.started, running.size, 120)
            if end is None:
                found.problems.append(f"kill {number}: no new rank after 120 s")
                return found
            found.rejoined.append(end - made.started)
        found.seconds = time.time() - began
        oldest = max(running.ranks, key=lambda rank: len(running.rows(rank)))
        rows = running.rows(oldest)
        found.steps, found.seconds_undisturbed = len(rows), statistics.median(quiet) if quiet else 0.0
        running.stop()
        found.problems += running.check()
        epochs = {row["epoch"]: row for row in rows if row["size"] == running.size}  # the last row of each
        for what in ("threads", "descriptors", "resident"):
            values = [row[what] >> (20 if what == "resident" else 0) for row in epochs.values()]
            print(f"  {what} of the oldest rank, epoch by epoch: {' '.join(map(str, values))}", flush=True)
            half = len(values) // 2
            if what != "resident" and half > 1 and max(values[half:]) > max(values[:half]):
                found.problems.append(f"{what} have grown from {max(values[:half])} to {max(values[half:])}")
    left = set(Path("/dev/shm").glob("gradwire-*")) - segments
    if left:
        found.problems.append(f"{len(left)} segments are left in /dev/shm")
    return found


def main(arguments: list[str]) -> int:
    """Runs the study and prints one line a job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--compressors", default="none")
    parser.add_argument("--kills", type=int, default=10, help="of each job")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds before a kill")
    parser.add_argument("--compute", type=float, default=0.02, help="seconds of a step besides its communication")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    random.seed(options.seed)
    wrong: Counter[str] = Counter()
    for compressor in options.compressors.split(","):
        found = kills(options.nodes, compressor, options.kills, options.pause, options.compute)
        wrong.update(found.problems)
        stepped, rejoined = found.stepped or [0.0], found.rejoined or [0.0]
        goodput = found.steps * found.seconds_undisturbed / found.seconds if found.seconds else 0.0
        print(
            f"{options.nodes}x{RANKS_PER_NODE} {compressor:9s} {len(found.stepped)} kills: stepped again after "
            f"{statistics.median(stepped):.2f} s (most {max(stepped):.2f}), full again "
            f"{statistics.median(rejoined):.2f} s (most {max(rejoined):.2f}) after the start of the new rank; "
            f"{found.steps} steps in {found.seconds:.0f} s, goodput {goodput:.2f}; load {os.getloadavg()[0]:.0f}; "
            f"{'; '.join(found.problems) or 'nothing wrong'}",
            flush=True,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
