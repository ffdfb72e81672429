"""Kills, freezes and cuts off ranks of a training job, and starts others: docs/results/elastic.md.

    python -m gradwire.bench.studies.losses --nodes 2 --compressors none,int8,onebit --faults 20
    python -m gradwire.bench.studies.losses --nodes 4 --nic 200mbit --faults 4 --every 15 --compute 0.1
    python -m gradwire.bench.studies.losses --kinds again,freeze,cut,forward --faults 8
    python -m gradwire.bench.studies.losses --faults 0 --steps 10000 --compute 0

Ranks are processes, two on each node: shared memory inside, gloo between. With `--nic` the nodes are emulated, with
hostnames, memory, processes and links of their own; else they are logical ones of this machine. An agent on each node
starts its ranks and sends them signals; a process of its own serves the store, as torchrun's agent does, so any rank
may be lost. Each rank writes down every step: when it ended, with how many ranks, a checksum of the weights, its
threads and descriptors. What is checked: the checksums of a step are the same on all ranks, no survivor leaves a step
out or makes one twice, nothing grows, and nothing is left in /dev/shm.

Kinds of faults: `kill` a rank at a random moment; kill one, and another one in the middle of the recovery (`again`);
kill one in the forward pass, where DDP broadcasts its buffers (`forward`); `freeze` one by SIGSTOP, and wake it up when
the others have gone on; `cut` a connection between two ranks that both live.

Goodput: the steps that were made, each counted with the share of the ranks that made it, against the steps that the
undisturbed job makes in the same time; how fast that is, is measured before each fault in the same run.
"""

import argparse
import json
import multiprocessing
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

RANKS_PER_NODE = 2
WIDTH = 256
"""Width of the model's hidden layers; the model has about WIDTH^2 parameters."""
PORT_OF_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable by which torch takes the store at MASTER_PORT instead of serving one itself."""
KINDS = ("kill", "again", "forward", "freeze", "cut")

STEP_AGAIN_SECONDS, REJOIN_SECONDS = 60.0, 120.0
"""Limits after which the study reports a failure: for the survivors' next step, and for the first step of all ranks
with the replacement. Wanted are 10 s and 60 s."""

STABLE_SECONDS = 1.0
"""Pause after a fault is over and its rank replaced; steps after it count as undisturbed."""


def train(environment: dict[str, str], log: str, options: dict[str, Any]) -> None:
    """Runs one rank: trains, and logs its steps, until the file `stop` next to its log names a step to end at.

    Args:
        environment: Variables to set in this process, which was forked for the rank.
        log: File for the steps, a line of JSON each; the changes of membership are written beside it at the end.
        options: `compressor`, `compute` (seconds of computation a step) and `row_every` (steps for each logged line).
    """
    os.environ.update(environment)  # noqa: TID251 - of this rank, which was forked
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import gradwire
    from gradwire.comms.bootstrap.compat import HashStore
    from gradwire.comms.transport.gloo_sockets import connections

    def cut(number: int, frame: object) -> None:
        for connection in sorted(connections(), key=lambda each: each.descriptor)[:1]:
            connection.shut_down()

    # Join the job: with its other ranks, or later through the store of `GRADWIRE_ELASTIC`.
    signal.signal(signal.SIGUSR1, cut)
    torch.set_num_threads(1)
    if ":" in environment.get("GRADWIRE_ELASTIC", ""):
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)

    class Work(nn.Module):
        """Passes its input on after a pause, in place of a model's computation."""

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            time.sleep(options["compute"] / 3)
            return rows

    # The model, and the hook in elastic training.
    module = nn.Sequential(
        nn.Linear(32, WIDTH), Work(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
    )
    model = DistributedDataParallel(module, bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compressor = options["compressor"]
    settings = {"warmup_steps": 3} if compressor in ("powersgd", "onebit", "dgc") else {}
    state = gradwire.attach(
        model,
        elastic=True,
        extra_state=[optimizer],
        compressor=None if compressor == "none" else compressor,
        compressor_options=settings,
        timeout=timedelta(seconds=60),
    )
    # Train, and write a line every `row_every` steps.
    generator = torch.Generator().manual_seed(os.getpid())
    stop = Path(log).parent / "stop"
    with Path(log).open("w", buffering=1) as file:
        while not stop.exists() or state.steps < int(stop.read_text() or 0):
            optimizer.zero_grad()
            time.sleep(options["compute"] * 2 / 3)
            model(torch.randn(8, 32, generator=generator)).square().mean().backward()
            optimizer.step()
            if state.steps % options["row_every"]:
                continue
            weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            row = {
                "time": time.time(),
                "step": state.steps,
                "size": state.view.size,
                "generation": state.view.generation,
                "weights": zlib.crc32(weights.numpy().tobytes()),
                "threads": len(list(Path("/proc/self/task").iterdir())),
                "descriptors": len(list(Path("/proc/self/fd").iterdir())),
                "resident": int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
            }
            file.write(json.dumps(row) + "\n")
    changes = [{"joined": bool(each.joined), "began": each.began, "seconds": each.seconds} for each in state.changes]
    Path(log).with_suffix(".changes").write_text(json.dumps(changes))
    state.close()


def agent() -> int:
    """Runs a node's agent: starts ranks and signals them, as orders on stdin say, until stdin ends.

    An order is a line of JSON on stdin; the exit code of each rank, and the list of the node's shared memory segments
    when asked for, are lines of JSON on stdout. Ranks that still run at the end are killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.nn.parallel", "gradwire.comms.hook"])
    ranks: dict[int, BaseProcess] = {}
    ended: set[int] = set()
    waiting = b""
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], 0.02)
        if readable:
            heard = os.read(sys.stdin.fileno(), 1 << 16)
            if not heard:
                break
            *orders, waiting = (waiting + heard).split(b"\n")
            for order in map(json.loads, orders):
                number = order["rank"]
                if "signal" in order:
                    pid = ranks[number].pid
                    assert pid is not None
                    os.kill(pid, order["signal"])
                elif "segments" in order:
                    found = sorted(str(each) for each in Path("/dev/shm").glob("gradwire-*"))
                    print(json.dumps({"rank": number, "segments": found}), flush=True)
                else:
                    ranks[number] = context.Process(
                        target=train, args=(order["environment"], order["log"], order["options"])
                    )
                    ranks[number].start()
        for number, rank in ranks.items():
            if number not in ended and not rank.is_alive():
                ended.add(number)
                print(json.dumps({"rank": number, "code": rank.exitcode}), flush=True)
    for rank in ranks.values():
        if rank.is_alive():
            rank.kill()
    return 0


def serve_store(host: str) -> int:
    """Serves the job's TCPStore on a free port of `host`, which is printed, until stdin ends."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()
    return 0


class Node:
    """Starts the agent of one node, sends it orders and collects the exit codes of its ranks.

    Args:
        prefix: Words to put before a command so that it runs on the node; empty for this machine itself.

    Attributes:
        codes: Exit codes by rank number, of the ranks that have ended.
    """

    def __init__(self, prefix: Sequence[str]) -> None:
        words = [*prefix, sys.executable, "-m", "gradwire.bench.studies.losses", "--agent"]
        self._agent = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.codes: dict[int, int] = {}
        self._segments: list[str] | None = None
        self._heard = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._agent.stdout is not None
        for line in self._agent.stdout:
            word = json.loads(line)
            if "segments" in word:
                self._segments = word["segments"]
                self._heard.set()
            else:
                self.codes[word["rank"]] = word["code"]

    def order(self, **words: object) -> None:
        """Sends the agent one order; see `agent`. Does not wait until it is carried out."""
        assert self._agent.stdin is not None
        self._agent.stdin.write(json.dumps(words) + "\n")

    def segments(self) -> set[str]:
        """Returns the paths of gradwire's segments in the node's /dev/shm; empty also if no answer came in 30 s."""
        self._heard.clear()
        self.order(rank=0, segments=True)
        self._heard.wait(30)
        return set(self._segments or ())

    def close(self) -> None:
        """Ends the agent and its ranks; kills the agent if it has not ended after 20 s."""
        assert self._agent.stdin is not None
        self._agent.stdin.close()
        try:
            self._agent.wait(20)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            self._agent.wait()


@dataclass
class Rank:
    """One process of the job, with its node and its log.

    Attributes:
        number: Position of the process in the order in which processes were started; a replacement gets a new one.
        place: Index of the node.
        node: The agent that has started the process: that of this machine if nodes are logical.
        log: File of the process's steps.
        started: Time of the start, by time.time().
    """

    number: int
    place: int
    node: Node
    log: Path
    started: float

    @property
    def code(self) -> int | None:
        """The exit code, negative after a signal; None while the process runs."""
        return self.node.codes.get(self.number)

    def send(self, number: signal.Signals) -> float:
        """Sends the process a signal through its agent; returns the time of the order, by time.time()."""
        self.node.order(rank=self.number, signal=int(number))
        return time.time()


@dataclass
class Findings:
    """Measurements and problems of one job that was disturbed by faults.

    Attributes:
        struck: Times of the faults, by time.time().
        stepped: For each fault, seconds until the last survivor's next step.
        rejoined: For each replaced rank, seconds from the start of the new process to the first step of all ranks.
        problems: Sentences about everything that was wrong; empty if nothing was.
        steps: Number of steps that the job has made, each counted as the share of the ranks that made it.
        seconds: Duration of those steps, from the first pause before a fault to the end.
        undisturbed: Mean seconds of a step without a fault; 0.0 if none was seen.
        kinds: Number of faults of each kind.
        parts: For changes without (False) and with (True) new ranks, the median seconds of each part of a change on
            its slowest rank, by the part's name.
    """

    struck: list[float] = field(default_factory=list)
    stepped: list[float] = field(default_factory=list)
    rejoined: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    steps: float = 0.0
    seconds: float = 0.0
    undisturbed: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    parts: dict[bool, dict[str, float]] = field(default_factory=dict)


class Job:
    """Starts an elastic job, its nodes and its store, and follows it by the logs of its ranks.

    Args:
        options: Options of the study, as `main` parses them.
        compressor: Name of the compressor, or `none`.
        folder: Folder for the ranks' logs.
        stack: Receives callbacks that end the nodes, the store and the emulated cluster.

    Attributes:
        size: Number of ranks of the complete job.
        nodes: The nodes' agents; only one if nodes are logical.
        all: Every process started so far, replaced ones included.
        ranks: The processes that are meant to be running.
        segments: For each of `nodes`, the segments in /dev/shm before the job.
    """

    def __init__(self, options: argparse.Namespace, compressor: str, folder: Path, stack: ExitStack) -> None:
        prefixes: list[list[str]] = [[]]
        self._host = "127.0.0.1"
        self._interface: dict[str, str] = {}
        if options.nic:
            from gradwire.bench.emulation.cluster import INTERFACE, EmulatedCluster

            cluster = stack.enter_context(EmulatedCluster([RANKS_PER_NODE] * options.nodes, options.nic))
            prefixes = [[*cluster.enter(node), "env", f"--chdir={Path.cwd()}"] for node in range(options.nodes)]
            self._host = cluster.address(0)
            self._interface = {"GLOO_SOCKET_IFNAME": INTERFACE}
        self.nodes = [Node(prefix) for prefix in prefixes]
        for node in self.nodes:
            stack.callback(node.close)
        words = [*prefixes[0], sys.executable, "-m", "gradwire.bench.studies.losses", "--store", self._host]
        serving = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(serving.wait)
        assert serving.stdin is not None and serving.stdout is not None
        stack.callback(serving.stdin.close)
        self._port = int(serving.stdout.readline())
        self._folder = folder
        self._options = {"compressor": compressor, "compute": options.compute, "row_every": options.row_every}
        self._logical = not options.nic
        self.size = options.nodes * RANKS_PER_NODE
        self.all: list[Rank] = []
        self.segments = [node.segments() for node in self.nodes]
        self.ranks = [self._start(rank, rank // RANKS_PER_NODE) for rank in range(self.size)]

    def _start(self, rank: int | None, place: int) -> Rank:
        number = len(self.all)
        log = self._folder / f"{number:03d}.jsonl"
        log.touch()
        environment = {"OMP_NUM_THREADS": "1", **self._interface}
        if self._logical:
            environment["GRADWIRE_HOSTNAME"] = f"node{place}"
        if rank is None:
            environment["GRADWIRE_ELASTIC"] = f"{self._host}:{self._port}"
        else:
            environment |= {"MASTER_ADDR": self._host, "MASTER_PORT": str(self._port)}
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(self.size), PORT_OF_AGENT: "True"}
        node = self.nodes[0 if self._logical else place]
        node.order(rank=number, environment=environment, log=str(log), options=self._options)
        made = Rank(number, place, node, log, time.time())
        self.all.append(made)
        return made

    def replace(self, rank: Rank) -> Rank:
        """Starts a process that joins the job, on the node of a rank that was lost, and returns it."""
        made = self._start(None, rank.place)
        self.ranks.append(made)
        return made

    def rows(self, rank: Rank, last: int | None = None) -> list[dict[str, Any]]:
        """Returns the complete lines of a rank's log, parsed.

        Args:
            rank: The process.
            last: About how many lines from the end to read; None reads all.
        """
        with rank.log.open("rb") as file:
            if last is not None:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 200 * last))
            lines = file.read().decode().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def wait(self, ranks: Sequence[Rank], after: float, size: int, seconds: float) -> float | None:
        """Waits until each of `ranks` has made a step together with `size` ranks later than `after`.

        Returns:
            The time at which the last of them ended its first such step, by time.time(); None if a rank ended before,
            or `seconds` passed.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ends = []
            for rank in ranks:
                rows = self.rows(rank, 400)
                ended = [row["time"] for row in rows if row["time"] > after and row["size"] == size]
                ends.append(min(ended, default=None))
                if rank.code is not None:
                    return None
            if None not in ends:
                return float(max(end for end in ends if end is not None))
            time.sleep(0.05)
        return None

    def stop(self) -> None:
        """Tells all ranks to end at the same step, and waits at most 60 s for them."""
        latest = max((row["step"] for rank in self.ranks for row in self.rows(rank)[-1:]), default=0)
        (self._folder / "stop.new").write_text(str(latest + 20))
        (self._folder / "stop.new").rename(self._folder / "stop")
        deadline = time.monotonic() + 60
        while any(rank.code is None for rank in self.ranks) and time.monotonic() < deadline:
            time.sleep(0.05)

    def check(self) -> list[str]:
        """Returns what is wrong after the job has ended, a sentence each; empty if nothing is.

        Checks the logs for steps that are missing, repeated or differ in their weights between ranks, the exit codes
        of the ranks that were meant to run, and /dev/shm for new segments.
        """
        problems = []
        weights: dict[int, set[int]] = defaultdict(set)
        every = self._options["row_every"]
        for rank in self.all:
            rows = self.rows(rank)
            steps = [row["step"] for row in rows]
            if any(b - a != every for a, b in pairwise(steps)):
                problems.append(f"{rank.log.name} leaves out or repeats a step")
            for row in rows:
                weights[row["step"]].add(row["weights"])
        odd = [step for step, found in weights.items() if len(found) > 1]
        if odd:
            problems.append(f"weights differ between ranks after {len(odd)} steps, first after {min(odd)}")
            for rank in self.all:
                rows = [row for row in self.rows(rank) if abs(row["step"] - min(odd)) < 3]
                seen = [(row["step"], row["generation"], row["size"], row["weights"]) for row in rows]
                print(f"  {rank.log.name} on node {rank.place}: {seen}", flush=True)
        for rank in self.ranks:
            if rank.code != 0:
                problems.append(f"{rank.log.name} ended with {rank.code}")
        left = [each for node, had in zip(self.nodes, self.segments, strict=True) for each in node.segments() - had]
        if left:
            problems.append(f"{len(left)} segments are left in /dev/shm")
        return problems

    def parts(self, struck: Sequence[float]) -> dict[bool, dict[str, float]]:
        """Returns how long each part of a change of membership took: medians over the changes, of the slowest rank.

        Args:
            struck: Times of the faults, by time.time(). The time from a fault until a rank begins to recover is the
                part `notice`.

        Returns:
            For changes without (False) and with (True) new ranks, seconds by name of the part.
        """
        slowest: dict[tuple[bool, int], dict[str, float]] = {}
        for rank in self.ranks:
            file = rank.log.with_suffix(".changes")
            for change in json.loads(file.read_text()) if file.exists() else ():
                key = bool(change["joined"]), round(change["began"] / 2)
                worst = slowest.setdefault(key, {})
                before = [at for at in struck if at < change["began"]]
                notice = {"notice": change["began"] - before[-1]} if before and not change["joined"] else {}
                for name, seconds in (notice | change["seconds"]).items():
                    worst[name] = max(worst.get(name, 0.0), seconds)
        found: dict[bool, dict[str, float]] = {}
        for joined in (False, True):
            each = [seconds for key, seconds in slowest.items() if key[0] == joined]
            names = dict.fromkeys(name for seconds in each for name in seconds)
            found[joined] = {name: statistics.median(seconds.get(name, 0.0) for seconds in each) for name in names}
        return found


@contextmanager
def job(options: argparse.Namespace, compressor: str) -> Iterator[Job]:
    """Runs an elastic job in the `with` block; ends its processes and removes its logs at the block's end."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        yield Job(options, compressor, Path(folder), stack)


def grown(rows: Sequence[dict[str, Any]], size: int) -> list[str]:
    """Returns which resources of the oldest rank grew, a sentence each; prints the figures it judges by.

    The least of each generation's values is taken, of generations that had all ranks; threads and descriptors have
    grown if a later half of the generations has more than the earlier one. Memory is printed, but not judged.

    Args:
        rows: The lines of the rank's log.
        size: Number of ranks of the complete job.
    """
    problems = []
    generations: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["size"] == size:
            generations[row["generation"]].append(row)
    for what in ("threads", "descriptors", "resident"):
        values = [
            min(row[what] for row in found) >> (20 if what == "resident" else 0) for found in generations.values()
        ]
        print(f"  {what} of the oldest rank, generation by generation: {' '.join(map(str, values))}", flush=True)
        half = len(values) // 2
        if what != "resident" and half > 1 and max(values[half:]) > max(values[:half]):
            problems.append(f"{what} have grown from {max(values[:half])} to {max(values[half:])}")
    return problems


def disturb(running: Job, kind: str, found: Findings) -> tuple[float, list[Rank]]:
    """Injects one fault of `kind` into a job; see the module's docstring for the kinds.

    Args:
        running: The job; lost ranks are removed from its `ranks`.
        kind: One of `KINDS`.
        found: Its count of the kind is increased.

    Returns:
        The time of the fault, by time.time(), and the ranks that are lost by it; none for `cut`.
    """
    found.kinds[kind] += 1
    victim = random.choice(running.ranks)
    if kind == "cut":
        return victim.send(signal.SIGUSR1), []
    running.ranks.remove(victim)
    if kind == "freeze":
        return victim.send(signal.SIGSTOP), [victim]
    if kind == "forward":  # the pass follows a step's end by the time that its input takes
        last = running.rows(victim, 3)[-1]["step"]
        while running.rows(victim, 3)[-1]["step"] == last:
            time.sleep(0.001)
        time.sleep(running._options["compute"] * (2 / 3 + random.random() / 3))
        return victim.send(signal.SIGKILL), [victim]
    began = victim.send(signal.SIGKILL)
    if kind == "kill":
        return began, [victim]
    second = running.ranks.pop(random.randrange(len(running.ranks)))
    time.sleep(0.5 * random.random())
    second.send(signal.SIGKILL)
    return began, [victim, second]


def faults(options: argparse.Namespace, compressor: str) -> Findings:
    """Injects `options.faults` faults into one job, one after the other, and replaces the ranks that are lost.

    Returns:
        The measurements; they end early, with a problem, if the job does not recover within the limits.
    """
    found = Findings()
    with job(options, compressor) as running:
        if running.wait(running.ranks, 0.0, running.size, 120) is None:
            found.problems.append("the job did not start")
            return found
        time.sleep(2.0)
        began = stable = time.time()
        quiet_steps, quiet_seconds, kinds = 0, 0.0, options.kinds.split(",")
        for number in range(options.faults):
            # Wait, by a random time, and count the undisturbed steps since the last fault was over.
            pause = (options.every or options.pause) * (0.75 + 0.5 * random.random())
            due = began + (number + 0.25 + 0.5 * random.random()) * options.every if options.every else stable + pause
            time.sleep(max(0.0, due - time.time()))
            quiet = [row["time"] for row in running.rows(running.ranks[0]) if row["time"] > stable]
            quiet_steps += max(0, len(quiet) - 1)
            quiet_seconds += quiet[-1] - quiet[0] if quiet else 0.0
            # Inject the fault, and wait until the survivors step again.
            kind = kinds[number % len(kinds)]
            struck, lost = disturb(running, kind, found)
            size = running.size - len(lost)
            end = running.wait(running.ranks, struck, size, STEP_AGAIN_SECONDS)
            if kind == "cut" and end is not None:  # the steps that were under way end before it is noticed
                end = running.wait(running.ranks, struck + 3.0, size, STEP_AGAIN_SECONDS) and end
            if end is None:
                codes = [rank.code for rank in running.ranks]
                found.problems.append(
                    f"{kind} {number}: no step of {size} ranks after {STEP_AGAIN_SECONDS:g} s, {codes}"
                )
                return found
            found.struck.append(struck)
            found.stepped.append(end - struck)
            # Replace the lost ranks, and wait for a step of all ranks. A frozen one wakes up and must end by itself.
            for rank in lost:
                if kind == "freeze":
                    rank.send(signal.SIGCONT)
                running.replace(rank)
            if lost:
                started = running.ranks[-1].started
                end = running.wait(running.ranks, started, running.size, REJOIN_SECONDS)
                if end is None:
                    found.problems.append(f"{kind} {number}: no new rank after {REJOIN_SECONDS:g} s")
                    return found
                found.rejoined.append(end - started)
            if kind == "freeze":
                deadline = time.monotonic() + 30
                while lost[0].code is None and time.monotonic() < deadline:
                    time.sleep(0.1)
                if lost[0].code in (None, 0):
                    found.problems.append(f"{kind} {number}: the rank that woke up has ended with {lost[0].code}")
            stable = time.time() + STABLE_SECONDS
        if options.every:
            time.sleep(max(0.0, began + options.faults * options.every - time.time()))
        # Count the steps by the share of the ranks that made them, then end the job and check what it left.
        ended = time.time()
        oldest = max(running.ranks, key=lambda rank: len(running.rows(rank)))
        found.seconds = ended - began
        sizes = {
            row["step"]: row["size"]
            for rank in running.all
            for row in running.rows(rank)
            if began < row["time"] <= ended
        }
        found.steps = sum(size / running.size for size in sizes.values())
        found.undisturbed = quiet_seconds / quiet_steps if quiet_steps else 0.0
        running.stop()
        rows = running.rows(oldest)
        found.problems += running.check() + grown(rows, running.size)
        found.parts = running.parts(found.struck)
    return found


def soak(options: argparse.Namespace, compressor: str) -> int:
    """Trains for `options.steps` steps without a fault, and prints what grew between the second tenth and the last.

    Returns:
        The exit status: 1 if a rank ended, a check failed, or threads, descriptors or memory (by over 2 %) have grown.
    """
    began = time.time()
    with job(options, compressor) as running:
        while (rows := running.rows(running.ranks[0], 3)) == [] or rows[-1]["step"] < options.steps:
            if any(rank.code is not None for rank in running.ranks):
                print("a rank has ended", flush=True)
                return 1
            time.sleep(0.5)
        running.stop()
        problems = running.check()
        for rank in running.ranks:
            rows = running.rows(rank)
            tenth = len(rows) // 10
            words = []
            for what, scale in (("threads", 1), ("descriptors", 1), ("resident", 1 << 20)):
                early = statistics.median(row[what] for row in rows[tenth : 2 * tenth]) / scale
                late = statistics.median(row[what] for row in rows[-tenth:]) / scale
                words.append(f"{what} {early:.1f} to {late:.1f}{' MB' if scale > 1 else ''}")
                if late > early + (0.02 * early if scale > 1 else 0.0):
                    problems.append(f"{what} have grown from {early:.1f} to {late:.1f}")
            print(f"  {rank.log.name}: {', '.join(words)}", flush=True)
    print(
        f"{options.nodes}x{RANKS_PER_NODE} {compressor}: {options.steps} steps in {time.time() - began:.0f} s; load "
        f"{os.getloadavg()[0]:.0f}; {'; '.join(problems) or 'nothing has grown'}",
        flush=True,
    )
    return 1 if problems else 0


def main(arguments: list[str]) -> int:
    """Runs the study for each compressor and prints a line a job; returns 1 if anything was wrong, 0 otherwise.

    The processes that the study starts call it with `--agent` or `--store`, as a node's agent or to serve the store.
    """
    from gradwire.bench.studies.shared.parser import StudyParser

    parser = StudyParser("losses", __doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--nic", help="emulate the nodes, with links of this rate: 200mbit")
    parser.add_argument("--compressors", default="none")
    parser.add_argument("--kinds", default="kill", help=f"of faults, in turn: {', '.join(KINDS)}")
    parser.add_argument("--faults", type=int, default=10, help="of each job")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds before a fault, about")
    parser.add_argument("--every", type=float, default=0.0, help="seconds from fault to fault, instead")
    parser.add_argument("--compute", type=float, default=0.02, help="seconds of a step besides its communication")
    parser.add_argument("--steps", type=int, default=0, help="train so many without a fault, and see what grows")
    parser.add_argument("--row-every", type=int, default=1, help="steps from one that is written down to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--agent", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    # A process that the study itself has started.
    if options.agent:
        return agent()
    if options.store:
        return serve_store(options.store)
    # One job for each compressor, with a line about its faults.
    random.seed(options.seed)
    wrong = 0
    for compressor in options.compressors.split(","):
        if options.steps:
            wrong += soak(options, compressor)
            continue
        found = faults(options, compressor)
        wrong += len(found.problems)
        stepped, rejoined = found.stepped or [0.0], found.rejoined or [0.0]
        goodput = found.steps * found.undisturbed / found.seconds if found.seconds else 0.0
        for joined, parts in found.parts.items():
            words = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
            print(f"  {'joined' if joined else 'lost'}: {words}", flush=True)
        print(
            f"{options.nodes}x{RANKS_PER_NODE} {options.nic or 'logical'} {compressor:9s} "
            f"{', '.join(f'{count} {kind}' for kind, count in found.kinds.items())}: stepped again after "
            f"{statistics.median(stepped):.2f} s (most {max(stepped):.2f}), full again "
            f"{statistics.median(rejoined):.2f} s (most {max(rejoined):.2f}) after the start of the new rank; "
            f"{found.steps:.0f} steps of {found.undisturbed * 1e3:.0f} ms in {found.seconds:.0f} s, "
            f"goodput {goodput:.3f}; load {os.getloadavg()[0]:.0f}; {'; '.join(found.problems) or 'nothing wrong'}",
            flush=True,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
