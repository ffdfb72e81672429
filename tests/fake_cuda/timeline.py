"""When things would happen: a recorded schedule, replayed on streams, links and memory of given speeds, and drawn.

`record` runs the hook's CUDA path on fake CUDA and keeps what every rank issued in one step: streams, operations,
bytes, communicators, waits, order. `replay` is an event simulation of it: an operation begins when the one before it on
its stream and all that it waits for are done, a collective when it has come so far on all of its members; what runs at
the same time on one link shares it. No thread and no clock takes part, so a replay is the same every time.

The law of motion. A collective is a ring, as NCCL runs it: `base + steps * hop` seconds in which the links stand still,
then bytes, as fast as the slowest of its links allows. A link that several use at a time is shared in equal parts
(max-min fairness: Bertsekas and Gallager, Data Networks, 1992, 6.5.2). A kernel takes `kernel_seconds` and its bytes at
the rate of memory. Not modelled: multiprocessors and memory bandwidth taken from kernels by collectives, and NCCL's
protocols below Simple; the host is as far ahead as the schedule lets it be.

The picture: `PYTHONPATH=tests python -m fake_cuda.timeline --draw docs/pictures/overlap.png`.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fake_cuda.drive import Job, Model, gradient, make_state, on_cuda
from fake_cuda.machine import machine
from fake_cuda.ranks import FakeProcessGroup
from gradwire.bench.plot.style import load_pyplot, save, strip
from gradwire.comms.plan.nccl_model import BASE_SECONDS, HOP_SECONDS, SIMPLE
from gradwire.comms.plan.plan import RING

OpKey = tuple[int, int]
"""(stream, number on that stream)."""
LinkKey = tuple[str, int, int]
"""("nvlink", rank, 0) or ("nic", node, index): what leaves there."""

WARM_STEPS = 1
"""Steps before the recorded one: in it the hook connects."""
OPTIMIZER = "aten.clone"
"""What `drive.Job` has in the place of an optimizer."""
BACKWARD, KERNEL, COLLECTIVE = "backward", "kernel", "collective"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What the links and the GPUs of a machine do.

    Latencies are those of NCCL's own model for the protocol Simple.
    """

    nic_bytes_per_second: float
    """Of one NIC, in one direction."""
    nics: int = 1
    """NICs of a node; a rank uses that of its place in the node modulo this."""
    nvlink_bytes_per_second: float = 300e9
    """Of one GPU, in one direction."""
    memory_bytes_per_second: float = 2e12
    """Of one GPU's memory, read and written together."""
    kernel_seconds: float = 4e-6
    """Least time of a kernel: from one to the next on a stream."""
    base_seconds: float = BASE_SECONDS[RING][SIMPLE]
    """Of each collective."""
    nvlink_hop_seconds: float = HOP_SECONDS["nvlink"][RING][SIMPLE]
    """Of each step of a ring inside a node."""
    nic_hop_seconds: float = HOP_SECONDS["network"][RING][SIMPLE]
    """Of each step of a ring between nodes."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of the recorded step.

    Attributes:
        rank: Whose it is.
        stream: Number of its stream, unlike that of any other rank.
        tick: Its number on that stream; the one before it comes first.
        stream_name: For people.
        kind: `backward` (its gradients come when the replay says), `kernel` or `collective`.
        name: Of the operation.
        waits: What must be done before it begins.
        nbytes: Read and written by a kernel; of a collective, the larger of what is read and written.
        launch: Number of the transfer that it belongs to, -1 for none.
        communicator: Of a collective.
        members: Ranks of the communicator.
        sequence: Of the collective in its communicator.
    """

    rank: int
    stream: int
    tick: int
    stream_name: str
    kind: str
    name: str
    waits: tuple[OpKey, ...]
    nbytes: int
    launch: int
    communicator: int = -1
    members: tuple[int, ...] = ()
    sequence: int = -1

    @property
    def key(self) -> OpKey:
        """Stream and number."""
        return self.stream, self.tick


@dataclass(slots=True)
class Recorded:
    """What the ranks issued in one step.

    Attributes:
        nodes: A letter for each rank's node.
        ops: Of all ranks, each in its order of issue.
        buckets: Number of buckets of the step.
        arrivals: Operation after which bucket k's gradients are there, for each rank.
        bucket_nbytes: Of each bucket.
        joined_nbytes: Of the launch of each number, if several buckets travel in it, else 0.
        peak_nbytes: Most that the hook's calls of the step held besides what was held at its begin, rank by rank.
    """

    nodes: str
    ops: list[Op] = field(default_factory=list)
    buckets: int = 0
    arrivals: list[list[OpKey]] = field(default_factory=list)
    bucket_nbytes: list[int] = field(default_factory=list)
    joined_nbytes: list[int] = field(default_factory=list)
    peak_nbytes: list[int] = field(default_factory=list)


class _Watched:
    """A HookState that notes what was issued where: in which call of the hook, and for which launch."""

    def __init__(self, state: Any, rank: int, *, release_each: bool) -> None:
        self._state, self._rank, self._release_each = state, rank, release_each
        self._numbers: dict[int, int] = {}
        self._launches: list[Any] = []
        self.watching = False
        self.calls: list[tuple[int, int]] = []
        """First entry of the schedule in each call of the hook, and the first one behind it."""
        self.owned: list[tuple[int, int, int]] = []
        """(first, behind, launch): the later in the list, the truer."""
        self.joined_nbytes: list[int] = []
        self._base_nbytes = self.peak_nbytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def reduce(self, bucket: Any) -> Any:
        """Takes the bucket to the hook."""
        if not self.watching:
            return self._state.reduce(bucket)
        began = self._issued
        if not self.calls:
            self._base_nbytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        future = self._state.reduce(bucket)
        self.peak_nbytes = max(self.peak_nbytes, torch.cuda.max_memory_allocated() - self._base_nbytes)
        self.calls.append((began, self._issued))
        return future

    def watch(self) -> None:
        """Notes everything from here on."""
        executor = self._state._connection.communicator.executor
        start, rest = executor.start, executor._issue_rest

        def watched_start(launch: Any, *arguments: Any, **named: Any) -> None:
            began, number = self._issued, len(self._launches)
            self._launches.append(launch)  # kept: a number means this object
            self._numbers[id(launch)] = number
            self.joined_nbytes.append(sum(part.nbytes for part in launch.parts) if len(launch.parts) > 1 else 0)
            place = len(self.owned)
            self.owned.append((began, began, number))
            start(launch, *arguments, **named)
            self.owned[place] = (began, self._issued, number)
            held = executor._held
            if self._release_each and held is not None:  # what the order of issue was before chunks were held
                executor._held = None
                executor._issue_rest(held)

        def watched_rest(held: Any) -> None:
            began, number = self._issued, self._numbers[id(held.run.all_reduce)]
            rest(held)
            self.owned.append((began, self._issued, number))

        executor.start, executor._issue_rest = watched_start, watched_rest
        self.watching = True

    @property
    def _issued(self) -> int:
        return len(machine().devices[self._rank].schedule)


def record(
    nodes: str,
    buckets: Sequence[int],
    *,
    release_each: bool = False,
    **options: Any,
) -> Recorded:
    """Records one step of the hook on fake CUDA, after one in which it connects.

    Args:
        nodes: A letter for each rank's node.
        buckets: Rows of 256 elements of float32 in each bucket, in the order in which they come. Keep them small, and
            let `replay` scale them: the values are really summed.
        release_each: Issue the all-gathers of each launch at once, not behind the next launch's way up: an order that
            the hook does not have any more, for comparison.
        **options: Fields of `Config`.
    """
    shapes = {f"weight{number}": (rows, 256) for number, rows in enumerate(buckets)}
    names = [(name,) for name in shapes]
    watched: dict[int, _Watched] = {}
    began: dict[int, int] = {}

    def body(rank: int, device: torch.device, group: FakeProcessGroup) -> None:
        model = Model(group, device, shapes)
        state = watched[rank] = _Watched(
            make_state(group, model, nodes[rank], **options), rank, release_each=release_each
        )
        job = Job(state, model, device, rank)
        try:
            for step in range(WARM_STEPS + 1):
                if step == WARM_STEPS:
                    began[rank] = len(machine().devices[rank].schedule)
                    state.watch()
                job.step(names, gradient(rank, step, shapes))
        finally:
            state.close()

    _, running = on_cuda(len(nodes), body)
    recorded = Recorded(nodes, buckets=len(buckets), bucket_nbytes=[rows * 1024 for rows in buckets])
    for rank, schedule in enumerate(running.schedule()):
        _take(recorded, schedule, began[rank], watched[rank])
    return recorded


def _take(recorded: Recorded, schedule: list[dict[str, Any]], began: int, watched: _Watched) -> None:
    """Adds one rank's step to what was recorded."""
    launches = [-1] * len(schedule)
    for first, behind, launch in watched.owned:
        launches[first:behind] = [launch] * (behind - first)
    recorded.joined_nbytes, recorded.peak_nbytes = watched.joined_nbytes, [*recorded.peak_nbytes, watched.peak_nbytes]
    arrivals: dict[int, OpKey] = {}
    number = 0  # of the bucket that comes next
    for place in range(began, len(schedule)):
        entry = schedule[place]
        while number < recorded.buckets and place >= watched.calls[number][0]:
            number += 1
        in_backward = number < recorded.buckets and (number == 0 or place >= watched.calls[number - 1][1])
        if entry["kind"] == "host wait":
            continue  # what the test moves from and to the host is no part of a step
        if number == recorded.buckets and launches[place] < 0 and entry["op"] == OPTIMIZER:
            continue  # what reads the averages when the step is over
        kind = BACKWARD if in_backward else COLLECTIVE if entry["kind"] == "collective" else KERNEL
        both = entry["read_nbytes"], entry["written_nbytes"]
        op = Op(
            entry["rank"],
            entry["stream"],
            entry["tick"],
            entry["stream_name"],
            kind,
            entry["op"],
            tuple(dict.fromkeys((stream, tick) for stream, tick in entry["waits"] if tick)),
            max(both) if kind == COLLECTIVE else sum(both),
            launches[place],
            -1 if entry["communicator"] is None else entry["communicator"],
            tuple(entry["members"]),
            -1 if entry["sequence"] is None else entry["sequence"],
        )
        if in_backward:
            arrivals[number] = op.key
        recorded.ops.append(op)
    recorded.arrivals.append([arrivals[bucket] for bucket in range(recorded.buckets)])


@dataclass(slots=True, eq=False)
class _Flow:
    """Operations that run together: one kernel, or the members of a collective."""

    ops: list[Op]
    latency: float
    loads: dict[LinkKey, float]
    """Bytes on each link."""
    left: float = 1.0
    rate: float = 0.0
    """Of the whole, a second."""

    @property
    def heaviest(self) -> float:
        """Bytes on the link that carries most of it."""
        return max(self.loads.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class Interval:
    """An operation and when it ran, in seconds."""

    op: Op
    start: float
    end: float


@dataclass(slots=True)
class Timeline:
    """What a replay gives.

    Attributes:
        recorded: What was replayed.
        intervals: Of all operations, in the order of their ends.
        carried: For each link (seconds, seconds, bytes): what it carried in which time, without gaps of its own.
        speeds: Of the machine.
        arrived: Seconds at which bucket k's gradients were there.
    """

    recorded: Recorded
    intervals: list[Interval]
    carried: dict[LinkKey, list[tuple[float, float, float]]]
    speeds: Speeds
    arrived: list[float]

    @property
    def end(self) -> float:
        """Seconds until everything is done."""
        return max(each.end for each in self.intervals)

    def _between_nodes(self) -> list[Interval]:
        return [each for each in self.intervals if _kind_of(each.op, self.recorded.nodes) == "nic"]

    @property
    def nic_window(self) -> tuple[float, float]:
        """From the begin of the first collective between nodes to the end of the last one."""
        found = self._between_nodes()
        return min(each.start for each in found), max(each.end for each in found)

    @property
    def nic_busy(self) -> float:
        """Bytes that the idlest NIC carried in `nic_window`, as a share of what it can: latencies count as idle."""
        first, last = self.nic_window
        return min(
            sum(nbytes for _, _, nbytes in carried) / (self.speeds.nic_bytes_per_second * (last - first))
            for link, carried in self.carried.items()
            if link[0] == "nic"
        )

    @property
    def nic_occupied(self) -> float:
        """Share of `nic_window` in which rank 0 has a collective between nodes under way, its latency included."""
        first, last = self.nic_window
        spans = sorted((each.start, each.end) for each in self._between_nodes() if each.op.rank == 0)
        covered, at = 0.0, first
        for start, end in spans:
            covered += max(0.0, end - max(start, at))
            at = max(at, end)
        return covered / (last - first)

    def in_flight(self, rank: int = 0) -> int:
        """Most buffers of joined buckets in use at a time: from the kernel that fills one to that which empties it."""
        edges: list[tuple[float, int]] = []
        for number, nbytes in enumerate(self.recorded.joined_nbytes):
            own = [each for each in self.intervals if each.op.launch == number and each.op.rank == rank]
            if nbytes and own:
                edges += [(min(each.start for each in own), 1), (max(each.end for each in own), -1)]
        most = now = 0
        for _, change in sorted(edges):
            now += change
            most = max(most, now)
        return most


def _kind_of(op: Op, nodes: str) -> str:
    """`nic`, `nvlink` or ``: what a collective's bytes cross."""
    if op.kind != COLLECTIVE:
        return ""
    return "nic" if len({nodes[rank] for rank in op.members}) > 1 else "nvlink"


def _links(op: Op, nodes: str, speeds: Speeds, nbytes: float) -> tuple[float, dict[LinkKey, float]]:
    """Seconds of latency of a collective, and the bytes that it puts on each link."""
    size = len(op.members)
    if size == 1:
        return speeds.base_seconds, {}
    rounds = 2 if "all_reduce" in op.name else 1
    exchange = "all_to_all" in op.name
    steps = 1 if exchange else rounds * (size - 1)
    sent = rounds * nbytes * (size - 1) / size
    if _kind_of(op, nodes) == "nvlink":
        latency = speeds.base_seconds + steps * speeds.nvlink_hop_seconds
        return latency, {("nvlink", rank, 0): sent for rank in op.members}
    loads: dict[LinkKey, float] = defaultdict(float)
    for rank in op.members:
        peers = sum(nodes[other] == nodes[rank] for other in op.members)
        node, place = _node(nodes, rank)
        # A ring leaves a node once, whatever the number of its ranks there; an exchange is of every pair.
        outwards = nbytes * (size - peers) / size if exchange else sent / peers
        loads["nic", node, place % speeds.nics] += outwards
        if peers > 1:
            loads["nvlink", rank, 0] += nbytes * (peers - 1) / size if exchange else sent
    return speeds.base_seconds + steps * speeds.nic_hop_seconds, dict(loads)


def _node(nodes: str, rank: int) -> tuple[int, int]:
    """Number of a rank's node, and its place there."""
    return sorted(set(nodes)).index(nodes[rank]), nodes[:rank].count(nodes[rank])


def share_links(flows: Iterable[_Flow], capacity: Callable[[LinkKey], float]) -> None:
    """Sets the rate of each flow: max-min fair on the bytes of its most loaded link.

    Args:
        flows: With bytes on links.
        capacity: Of a link, in bytes a second.
    """
    growing = list(flows)
    left: dict[LinkKey, float] = {}
    weights: dict[LinkKey, float] = {}
    for flow in growing:
        for link, nbytes in flow.loads.items():
            left.setdefault(link, capacity(link))
            weights[link] = weights.get(link, 0.0) + nbytes / flow.heaviest
    while growing:
        speed = min(left[link] / weight for link, weight in weights.items() if weight > 1e-9)
        full = {link for link, weight in weights.items() if weight > 1e-9 and left[link] <= speed * weight * (1 + 1e-9)}
        stopped = [flow for flow in growing if not full.isdisjoint(flow.loads)]
        for flow in stopped:
            flow.rate = speed / flow.heaviest
            for link, nbytes in flow.loads.items():
                left[link] -= speed * nbytes / flow.heaviest
                weights[link] -= nbytes / flow.heaviest
        growing = [flow for flow in growing if full.isdisjoint(flow.loads)]


class _Replay:
    """One replay under way."""

    def __init__(self, recorded: Recorded, speeds: Speeds, arrivals: Sequence[float], scale: float) -> None:
        self._recorded, self._speeds, self._scale = recorded, speeds, scale
        self._arrives = {key: arrivals[number] for keys in recorded.arrivals for number, key in enumerate(keys)}
        self._ops = {op.key: op for op in recorded.ops}
        self._missing: dict[OpKey, int] = {}
        self._behind: dict[OpKey, list[OpKey]] = defaultdict(list)
        self._gathering: dict[tuple[int, int], list[Op]] = defaultdict(list)
        self._turns: dict[int, int] = {}
        self._now = 0.0
        self._sleeping: list[tuple[float, _Flow]] = []
        """Flows in their latency, kernels and backward, by the second at which that ends."""
        self._flowing: list[_Flow] = []
        self._began: dict[OpKey, float] = {}
        self.intervals: list[Interval] = []
        self.carried: dict[LinkKey, list[tuple[float, float, float]]] = defaultdict(list)
        before: dict[int, OpKey] = {}
        for op in recorded.ops:
            needs = {key for key in op.waits if key in self._ops}
            if op.stream in before:
                needs.add(before[op.stream])
            before[op.stream] = op.key
            self._missing[op.key] = len(needs)
            for key in needs:
                self._behind[key].append(op.key)
            if op.kind == COLLECTIVE:
                self._turns[op.communicator] = min(op.sequence, self._turns.get(op.communicator, op.sequence))

    def run(self) -> None:
        """Until everything is done.

        Raises:
            RuntimeError: Operations wait for each other.
        """
        for op in self._recorded.ops:
            if not self._missing[op.key]:
                self._ready(op)
        while self._sleeping or self._flowing:
            share_links(self._flowing, self._capacity)
            upcoming = [end for end, _ in self._sleeping]
            upcoming += [self._now + flow.left / flow.rate for flow in self._flowing]
            self._forward(min(upcoming))
        if len(self.intervals) < len(self._recorded.ops):
            done = {each.op.key for each in self.intervals}
            stuck = [op for op in self._recorded.ops if op.key not in done]
            raise RuntimeError(f"{len(stuck)} operations wait for each other; the first is {stuck[0]}")

    def _capacity(self, link: LinkKey) -> float:
        return self._speeds.nvlink_bytes_per_second if link[0] == "nvlink" else self._speeds.nic_bytes_per_second

    def _forward(self, moment: float) -> None:
        """Lets the time pass until then, and ends what ends there."""
        passed = moment - self._now
        for flow in self._flowing:
            share = min(flow.left, flow.rate * passed)
            flow.left -= share
            for link, nbytes in flow.loads.items():
                self.carried[link].append((self._now, moment, nbytes * share))
        self._now = moment
        awake = [flow for end, flow in self._sleeping if end <= moment + 1e-12]
        self._sleeping = [(end, flow) for end, flow in self._sleeping if end > moment + 1e-12]
        ended = [flow for flow in self._flowing if flow.left <= 1e-9]
        self._flowing = [flow for flow in self._flowing if flow.left > 1e-9]
        ended += [flow for flow in awake if not flow.loads]
        self._flowing += [flow for flow in awake if flow.loads]
        for flow in ended:
            for op in flow.ops:
                self._end(op)
            if flow.ops[0].kind == COLLECTIVE:
                self._turns[flow.ops[0].communicator] += 1
                self._meet(flow.ops[0].communicator)

    def _end(self, op: Op) -> None:
        self.intervals.append(Interval(op, self._began[op.key], self._now))
        for key in self._behind[op.key]:
            self._missing[key] -= 1
            if not self._missing[key]:
                self._ready(self._ops[key])

    def _ready(self, op: Op) -> None:
        """Everything before an operation is done."""
        if op.kind == COLLECTIVE:
            self._gathering[op.communicator, op.sequence].append(op)
            self._meet(op.communicator)
            return
        self._began[op.key] = self._now
        if op.kind == BACKWARD:
            seconds = max(0.0, self._arrives.get(op.key, 0.0) - self._now)
        else:
            nbytes = op.nbytes * self._scale
            seconds = max(self._speeds.kernel_seconds, nbytes / self._speeds.memory_bytes_per_second)
        self._sleeping.append((self._now + seconds, _Flow([op], 0.0, {})))

    def _meet(self, communicator: int) -> None:
        """Starts a communicator's next collective, if all members have come to it."""
        number = communicator, self._turns[communicator]
        here = self._gathering.get(number, [])
        if not here or len(here) < len(here[0].members):
            return
        del self._gathering[number]
        nbytes = max(op.nbytes for op in here) * self._scale
        latency, loads = _links(here[0], self._recorded.nodes, self._speeds, nbytes)
        for op in here:
            self._began[op.key] = self._now
        self._sleeping.append((self._now + latency, _Flow(here, latency, {k: v for k, v in loads.items() if v})))


def replay(recorded: Recorded, speeds: Speeds, arrivals: Sequence[float], *, scale: float = 1.0) -> Timeline:
    """Says when each operation of a recorded step would begin and end.

    Args:
        recorded: The step.
        speeds: Of the machine.
        arrivals: Seconds at which backward has each bucket's gradients, ascending; one a bucket.
        scale: Bytes that one recorded byte stands for.

    Raises:
        ValueError: There are more or fewer arrivals than buckets.
    """
    if len(arrivals) != recorded.buckets:
        raise ValueError(f"`arrivals` has {len(arrivals)} moments; wanted one for each of {recorded.buckets} buckets")
    running = _Replay(recorded, speeds, arrivals, scale)
    running.run()
    return Timeline(recorded, running.intervals, dict(running.carried), speeds, list(arrivals))


def apart(recorded: Recorded) -> Recorded:
    """The same step if every other launch had communicators of its own between the nodes: what that would gain."""
    keys: dict[OpKey, OpKey] = {}
    ticks: dict[int, int] = defaultdict(int)
    sequences: dict[tuple[int, int], int] = defaultdict(int)
    ops = []
    for op in recorded.ops:
        if _kind_of(op, recorded.nodes) != "nic":
            keys[op.key] = op.key
            ops.append(op)
            continue
        # Odd launches move to negative numbers, which nothing else has.
        stream, communicator = (-1 - op.stream, -1 - op.communicator) if op.launch % 2 else (op.stream, op.communicator)
        ticks[stream] += 1
        keys[op.key] = stream, ticks[stream]
        member = op.rank, communicator
        ops.append(
            replace(op, stream=stream, tick=ticks[stream], communicator=communicator, sequence=sequences[member])
        )
        sequences[member] += 1
    renamed = [replace(op, waits=tuple(keys[key] for key in op.waits if key in keys)) for op in ops]
    return replace(recorded, ops=renamed)


ROWS = ("backward", "kernels", "NVLink", "NIC")
UP, DOWN = "0123456789", "abcdefghij"
"""How a bucket is written on its way up, and on its way down (the all-gathers behind its sum)."""


def row_of(interval: Interval, nodes: str) -> str:
    """Where an operation is drawn."""
    kind = _kind_of(interval.op, nodes)
    return {"nic": "NIC", "nvlink": "NVLink"}.get(kind, "backward" if interval.op.kind == BACKWARD else "kernels")


def is_way_down(op: Op) -> bool:
    """Whether it is an all-gather of a whole bucket: one inside a node."""
    return op.kind == COLLECTIVE and "all_gather" in op.name


def drawn(timeline: Timeline, rank: int = 0) -> dict[str, list[tuple[float, float, int, bool]]]:
    """What one rank does, in rows, empty ones left out: (start, end, bucket or launch, whether it comes down)."""
    rows: dict[str, list[tuple[float, float, int, bool]]] = {name: [] for name in ROWS}
    before = 0.0
    for bucket, arrived in enumerate(timeline.arrived):
        rows["backward"].append((before, arrived, bucket, False))
        before = max(before, arrived)
    for each in timeline.intervals:
        row = row_of(each, timeline.recorded.nodes)
        if each.op.rank == rank and row != "backward" and each.op.launch >= 0:
            rows[row].append((each.start, each.end, each.op.launch, row == "NVLink" and is_way_down(each.op)))
    return {name: spans for name, spans in rows.items() if spans}


def summary(timeline: Timeline) -> str:
    """The figures in one line."""
    return (
        f"NIC busy {timeline.nic_busy:.1%} of the time between the first and the last bucket, occupied "
        f"{timeline.nic_occupied:.1%}; all done after {timeline.end * 1e3:.2f} ms"
    )


def as_text(timeline: Timeline, columns: int = 110) -> str:
    """The timeline of rank 0 for a terminal: a row for each resource, a column for each slice of time.

    A digit is a bucket (or a transfer of joined ones) on its way up, a letter the same one on its way down, a dot
    nothing: what takes most of the slice is shown.
    """
    width = timeline.end / columns
    lines = []
    for name, spans in drawn(timeline).items():
        cells = []
        for column in range(columns):
            first, last = column * width, (column + 1) * width
            taken: dict[str, float] = {".": width / 2}
            for start, end, number, down in spans:
                mark = (DOWN if down else UP)[number % len(UP)]
                taken[mark] = taken.get(mark, 0.0) + max(0.0, min(end, last) - max(start, first))
            cells.append(max(taken, key=lambda mark: taken[mark]))
        lines.append(f"{name:>9} {''.join(cells)}")
    return "\n".join([*lines, f"{'':>9} {summary(timeline)}"])


def draw(timelines: Mapping[str, Timeline], output: Path, notes: list[str]) -> None:
    """Draws timelines of rank 0 below each other, on one axis.

    Args:
        timelines: By title.
        output: .png or .svg.
        notes: The caption.
    """
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(
        len(timelines), 1, figsize=(11, 2.3 * len(timelines)), sharex=True, squeeze=False, layout="constrained"
    )
    colours = pyplot.get_cmap("tab10")
    for axes, (title, timeline) in zip(panels[:, 0], timelines.items(), strict=True):
        rows = drawn(timeline)
        for place, spans in enumerate(rows.values()):
            for start, end, number, down in spans:
                axes.barh(
                    -place,
                    (end - start) * 1e3,
                    left=start * 1e3,
                    height=0.7,
                    color=colours(number % 10),
                    hatch="////" if down else None,
                    edgecolor="white",
                    linewidth=0.4,
                )
        axes.set_yticks([-place for place in range(len(rows))], list(rows))
        axes.set_title(f"{title}\n{summary(timeline)}", loc="left", fontsize=9)
        strip(axes)
    panels[-1, 0].set_xlabel("milliseconds")
    save(figure, output, notes)


def table() -> list[str]:
    """Rows of Markdown: nodes, NIC, compressor, shares of time in the hook's order and in others."""
    lines = []
    for name, nodes in (("2 x 8", "aaaaaaaabbbbbbbb"), ("4 x 4", "aaaabbbbccccdddd")):
        for compressor in (None, "int8"):
            held, at_once = (
                record(
                    nodes,
                    [64] * 6,
                    release_each=early,
                    plan={"name": "hierarchical", "chunks": 1},
                    compressor=compressor,
                )
                for early in (False, True)
            )
            for gbit in (25, 100, 200):
                speeds = Speeds(nic_bytes_per_second=gbit * 1e9 / 8)
                one, early, two = (
                    replay(
                        each,
                        speeds,
                        [1e-4 * (number + 1) for number in range(6)],
                        scale=25 * 2**20 / held.bucket_nbytes[0],
                    )
                    for each in (held, at_once, apart(held))
                )
                shares = (one.nic_busy, one.nic_occupied, early.nic_busy, two.nic_busy)
                cells = " | ".join(f"{100 * share:.1f} %" for share in shares)
                lines.append(f"| {name} | {gbit} | {compressor or 'exact'} | {cells} |")
    return lines


def main(words: Sequence[str] | None = None) -> None:
    """Prints a timeline in the hook's order and in one without holding, and draws both."""
    parser = argparse.ArgumentParser(prog="PYTHONPATH=tests python -m fake_cuda.timeline", description=main.__doc__)
    parser.add_argument("--nodes", default="aaaaaaaabbbbbbbb", help="a letter for each rank's node")
    parser.add_argument("--compressor", help="as in Config; default: none")
    parser.add_argument("--buckets", type=int, default=6, help="equal ones")
    parser.add_argument("--megabytes", type=float, default=25.0, help="MiB of a bucket")
    parser.add_argument("--gap-ms", type=float, default=0.1, help="from bucket to bucket, in backward")
    parser.add_argument("--nic-gbit", type=float, default=200.0, help="Gbit/s of a NIC")
    parser.add_argument("--nics", type=int, default=1, help="of a node")
    parser.add_argument("--nvlink", type=float, default=300.0, help="GB/s of a GPU in one direction")
    parser.add_argument("--draw", type=Path, metavar="FILE", help=".png or .svg")
    parser.add_argument("--table", action="store_true", help="print the table of docs/develop/cuda.md instead")
    chosen = parser.parse_args(words)
    if chosen.table:
        print("\n".join(table()))
        return
    speeds = Speeds(
        nic_bytes_per_second=chosen.nic_gbit * 1e9 / 8, nics=chosen.nics, nvlink_bytes_per_second=chosen.nvlink * 1e9
    )
    rows = 64
    timelines = {}
    for title, release_each in (("held: the order of issue", False), ("all-gathers issued at once", True)):
        recorded = record(
            chosen.nodes,
            [rows] * chosen.buckets,
            release_each=release_each,
            plan={"name": "hierarchical", "chunks": 1},
            compressor=chosen.compressor,
        )
        arrivals = [chosen.gap_ms * 1e-3 * (number + 1) for number in range(chosen.buckets)]
        scale = chosen.megabytes * 2**20 / recorded.bucket_nbytes[0]
        timelines[title] = replay(recorded, speeds, arrivals, scale=scale)
        print(f"{title}\n{as_text(timelines[title])}\n")
    if chosen.draw is not None:
        count = len(set(chosen.nodes))
        note = (
            f"Simulated, not measured: {chosen.buckets} buckets of {chosen.megabytes:g} MiB, "
            f"{chosen.compressor or 'exact'}, {count} nodes of {len(chosen.nodes) // count} GPUs, "
            f"{chosen.nics} x {chosen.nic_gbit:g} Gbit/s a node, NVLink {chosen.nvlink:g} GB/s; rank 0. A colour is a "
            "bucket; hatched: on its way down. `PYTHONPATH=tests python -m fake_cuda.timeline`"
        )
        draw(timelines, chosen.draw, [note])


if __name__ == "__main__":
    main()
