"""What a start costs at scale: questions to the store, bytes through its host, memory of a rank.

Feeds docs/develop/startup.md.

    python -m gradwire.bench.studies.startup count --ranks 16 64 256 1024 4096
    python -m gradwire.bench.studies.startup real --ranks 256
    python -m gradwire.bench.studies.startup table --ranks 16384
    python -m gradwire.bench.studies.startup gloo --ranks 4 8 16 32

`count` runs the start-up, one decision of all ranks, and the failure of a node, on a store that counts: the code is
that of a job. What is simulated is time: one rank runs at a time, until it sleeps or asks the store, which answers one
question after the other, and the next one is whose turn comes first. So 4,096 ranks need no 4,096 cores, nobody sleeps
really, and the same run gives the same figures everywhere; computing takes no time. `real` makes communicators in
threads, each rank with its own connection to one TCPStore that a process of its own serves. `table` makes what the
ranks exchange, and measures it. `gloo` counts what torch's own group of CPUs asks until all its ranks are connected.
"""

import argparse
import hashlib
import heapq
import os
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import count as count_up
from unittest.mock import patch

import torch
import torch.distributed as dist

from gradwire.bench.studies.shared.store import serve_store
from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.compat import PrefixStore, Store, TCPStore, make_gloo
from gradwire.comms.bootstrap.door import Place
from gradwire.comms.bootstrap.failure import FailureBoard
from gradwire.comms.bootstrap.placement import Presence, cluster_of
from gradwire.comms.bootstrap.rendezvous import Presences, exchange
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.errors import PeerError
from gradwire.topology.cluster import GpuFabric
from gradwire.topology.fabric import fabric_of
from gradwire.topology.host_summary import Hardware
from gradwire.topology.presets import dgx_h100

RANKS_PER_NODE = 8
TIMEOUT = timedelta(seconds=300)
CPU = torch.device("cpu")


ANSWERS_PER_SECOND = 20_000
"""Of one TCPStore, on one thread; 20,000 to 50,000 were measured."""


class WallClock:
    """Where ranks sleep, and wait for the store's turn: this machine's clock, and a store that answers at once."""

    def sleep(self, seconds: float) -> None:
        """As `time.sleep`."""
        time.sleep(seconds)

    def monotonic(self) -> float:
        """As `time.monotonic`."""
        return time.monotonic()

    def ask(self) -> None:
        """Returns when the store has answered one question more."""


class SimulatedClock(WallClock):
    """Runs threads one at a time, in the order of their times, which pass only while all of them sleep."""

    def __init__(self) -> None:
        self._now = self._free = 0.0
        self._order = count_up()
        self._sleeping: list[tuple[float, int, threading.Lock]] = []
        self._own = threading.local()

    def monotonic(self) -> float:
        """Seconds since the first thread began."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Lets the others run until it is this thread's turn."""
        heapq.heappush(self._sleeping, (self._now + max(seconds, 0.0), next(self._order), self._own.turn))
        self._pass_on()
        self._own.turn.acquire()

    def ask(self) -> None:
        """Waits until the store has answered the questions before this one, and this one."""
        self._free = max(self._free, self._now) + 1 / ANSWERS_PER_SECOND
        self.sleep(self._free - self._now)

    def run(self, size: int, body: Callable[[int], object]) -> None:
        """Runs `body(rank)` in a thread for each rank; the first question of each comes a microsecond after another's.

        Raises:
            Exception: What one of them raised.
        """
        turns = [threading.Lock() for _ in range(size)]
        for rank, turn in enumerate(turns):
            turn.acquire()
            heapq.heappush(self._sleeping, (self._now + rank * 1e-6, next(self._order), turn))

        def begin(rank: int) -> None:
            self._own.turn = turns[rank]
            turns[rank].acquire()
            try:
                body(rank)
            finally:
                if self._sleeping:
                    self._pass_on()

        def first(rank: int) -> None:  # one more thread: it begins once all others wait
            if rank < size:
                begin(rank)
            else:
                self._pass_on()

        on_ranks(size + 1, first)

    def _pass_on(self) -> None:
        self._now, _, turn = heapq.heappop(self._sleeping)
        turn.release()


class Memory:
    """The keys that counting stores share.

    Args:
        clock: Of the ranks.
    """

    def __init__(self, clock: WallClock) -> None:
        self.clock = clock
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()


class CountingStore(Store):
    """One rank's client of a store in memory: counts what it asks.

    Args:
        memory: Shared with the other ranks.

    Attributes:
        asked: Questions, by kind.
        looks: Those that told nothing new: a key was not there yet, or held what it had held the last time.
        nbytes: Of keys and values, to the store and back.
        keys: That were asked for, or set; a key as often as that was so.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory
        self.asked: Counter[str] = Counter()
        self.looks = 0
        self._seen: dict[str, bytes] = {}
        self.nbytes = 0
        self.keys = 0

    def set(self, key: str, value: str | bytes) -> None:
        """See `Store.set`."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._count("set", [key], len(data))
        with self._memory.lock:
            self._memory.values[key] = data

    def get(self, key: str) -> bytes:
        """See `Store.get`; waits for the key."""
        if key not in self._memory.values:
            self.wait([key])
        value = self._memory.values[key]
        self._count("get", [key], len(value))
        self.looks += self._seen.get(key) is value
        self._seen[key] = value
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """See `Store.multi_get`; the keys must be there."""
        values = [self._memory.values[key] for key in keys]
        self._count("multi_get", keys, sum(map(len, values)))
        return values

    def check(self, keys: Sequence[str]) -> bool:
        """See `Store.check`."""
        self._count("check", keys)
        found = all(key in self._memory.values for key in keys)
        self.looks += not found
        return found

    def add(self, key: str, value: int) -> int:
        """See `Store.add`."""
        self._count("add", [key], 8)
        with self._memory.lock:
            total = int(self._memory.values.get(key, b"0")) + value
            self._memory.values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """See `Store.compare_set`."""
        expected, desired = (
            each.encode() if isinstance(each, str) else each for each in (expected_value, desired_value)
        )
        self._count("compare_set", [key], len(expected_value) + 2 * len(desired_value))
        with self._memory.lock:
            found = self._memory.values.get(key)
            if (found or b"") == expected:
                found = self._memory.values[key] = desired
        return found or b""

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See `Store.wait`; looks again every millisecond, and counts as one question."""
        self._count("wait", keys)
        clock = self._memory.clock
        deadline = clock.monotonic() + (timeout or TIMEOUT).total_seconds()
        while not all(key in self._memory.values for key in keys):
            if clock.monotonic() > deadline:
                raise RuntimeError(f"no value for {', '.join(keys)}")
            clock.sleep(0.001)

    def _count(self, kind: str, keys: Sequence[str], nbytes: int = 0) -> None:
        self.asked[kind] += 1
        self.keys += len(keys)
        self.nbytes += sum(map(len, keys)) + nbytes
        self._memory.clock.ask()


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one thing that all ranks do.

    Attributes:
        name: What.
        ranks: How many.
        asked: Questions to the store, of all ranks.
        looks: Those of them that told nothing new; how many there are is a matter of time.
        most: Questions of the rank that asked most.
        nbytes: Through the store's host, of all ranks.
        seconds: Until the last rank had it, where the store answers `ANSWERS_PER_SECOND` and nothing else takes time.
    """

    name: str
    ranks: int
    asked: int
    looks: int
    most: int
    nbytes: int
    seconds: float


def on_ranks(size: int, body: Callable[[int], object]) -> None:
    """Runs `body(rank)` in a thread for each rank.

    Raises:
        Exception: What one of them raised.
    """
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            body(rank)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    before = threading.stack_size(256 << 10)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    threading.stack_size(before)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def presence(rank: int, size: int) -> Presence:
    """What a rank on node `rank // 8` of DGX H100s says."""
    node = rank // RANKS_PER_NODE
    boot = hashlib.sha256(str(node).encode()).hexdigest()  # random, as a boot id is
    facts = Hardware(370.8e9, 384e9, f"mlx5_{rank % 8}", f"eth{rank % 8}", nics=8, fabric=_fabric())
    return Presence(
        rank,
        size,
        (f"node-{node:05d}.cluster", f"{boot[:8]}-{boot[8:12]}-{boot[12:16]}-{boot[16:20]}-{boot[20:32]}", "26"),
        (),
        "cuda",
        torch.__version__,
        facts,
        Config().shared(),
        port=32768 + int(hashlib.sha256(f"port {rank}".encode()).hexdigest()[:8], 16) % 28_000,
        addresses=(f"10.{node >> 8}.{node & 255}.7", "127.0.0.1"),
    )


@lru_cache(maxsize=1)
def _fabric() -> GpuFabric | None:
    return fabric_of(dgx_h100())


def count(size: int) -> list[Cost]:
    """What a start, a decision, and the failure of a node cost.

    Args:
        size: Number of ranks.
    """
    clock = SimulatedClock()
    memory = Memory(clock)
    clients = [CountingStore(memory) for _ in range(size)]
    said = [presence(rank, size) for rank in range(size)]
    costs = []

    def measured(name: str, body: Callable[[int, PollingStore], object]) -> None:
        before = [(client.asked.total(), client.nbytes) for client in clients]
        looks, began = sum(client.looks for client in clients), clock.monotonic()

        def run(rank: int) -> None:
            body(rank, PollingStore(PrefixStore("gradwire/study", clients[rank]), TIMEOUT, ranks=size))

        clock.run(size, run)
        seconds = clock.monotonic() - began
        asked = [client.asked.total() - was for client, (was, _) in zip(clients, before, strict=True)]
        nbytes = sum(client.nbytes - was for client, (_, was) in zip(clients, before, strict=True))
        looks = sum(client.looks for client in clients) - looks
        costs.append(Cost(name, size, sum(asked), looks, max(asked), nbytes, seconds))

    lost = set(range(size // 2 // RANKS_PER_NODE * RANKS_PER_NODE, size // 2 // RANKS_PER_NODE * RANKS_PER_NODE + 8))
    read_once = lru_cache(maxsize=1)(Presences.unpack)  # by all threads: the processes of a job do not share a core

    def fail(rank: int, store: PollingStore) -> None:
        if rank not in lost:
            gone = tuple(lost) if rank + 8 in lost or rank - 8 in lost else ()
            found = FailureBoard(store, rank, size).diagnose(
                PeerError("connection closed", gone), "all_reduce inter_node", range(size)
            )
            assert set(found.missing) == lost, found

    with ExitStack() as patches:
        patches.enter_context(patch.object(Presences, "unpack", read_once))
        for module in ("bootstrap.rendezvous", "bootstrap.store", "bootstrap.failure", "bootstrap.agree"):
            patches.enter_context(patch(f"gradwire.comms.{module}.time", clock))
        measured("start", lambda rank, store: exchange(store, said[rank], TIMEOUT))
        measured("decision", lambda rank, store: Agreement(store, rank, size, "study", TIMEOUT).decide([rank] * 8, len))
        measured("failure", fail)
    return costs


def gloo(size: int) -> tuple[int, int, int]:
    """Connects a group of torch's over gloo, and goes through one all-reduce.

    Args:
        size: Number of ranks, each a thread.

    Returns:
        Questions of all ranks, keys in them, and bytes through the store's host.
    """
    memory = Memory(WallClock())
    clients = [CountingStore(memory) for _ in range(size)]
    groups: dict[int, object] = {}
    together = threading.Barrier(size)

    def connect(rank: int) -> None:
        groups[rank] = group = make_gloo(clients[rank], rank, size, TIMEOUT)
        group.allreduce([torch.ones(1)], dist.AllreduceOptions()).wait()
        together.wait()  # nobody leaves before all have come

    on_ranks(size, connect)
    groups.clear()
    return (
        sum(client.asked.total() for client in clients),
        sum(client.keys for client in clients),
        sum(client.nbytes for client in clients),
    )


def real(size: int) -> tuple[float, float]:
    """Makes a communicator for each rank, in threads, each with its own connection to one TCPStore.

    Args:
        size: Number of ranks.

    Returns:
        Seconds that it took, and seconds that the process which serves the store worked.
    """
    made: dict[int, Communicator] = {}
    with serve_store() as (port, busy_seconds):
        clients = [TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for _ in range(size)]

        def start(rank: int) -> None:
            config = Config(hostname=f"node{rank // RANKS_PER_NODE}", timeout=TIMEOUT)
            made[rank] = Communicator(clients[rank], rank, size, CPU, config, name="study")

        began = time.perf_counter()
        on_ranks(size, start)
        seconds, busy = time.perf_counter() - began, busy_seconds()
        for communicator in made.values():
            assert len(communicator.cluster.nodes) == -(-size // RANKS_PER_NODE)
            communicator.close()
    return seconds, busy


@dataclass(frozen=True, slots=True)
class Table:
    """What the ranks of a start read.

    Attributes:
        ranks: How many.
        nbytes: That each of them reads.
        memory_nbytes: Most that reading it, and the placement made from it, takes.
        unpack_seconds: Of a core, that each rank spends on it.
        pack_seconds: Of a core, that rank 0 spends on packing.
    """

    ranks: int
    nbytes: int
    memory_nbytes: int
    unpack_seconds: float
    pack_seconds: float


def table(size: int) -> Table:
    """Makes and measures what the ranks of a start exchange."""
    said = Presences.of((presence(rank, size) for rank in range(size)), "0123456789abcdef")
    began = time.process_time()
    packed = said.pack()
    packing = time.process_time() - began
    began = time.process_time()
    cluster_of(Presences.unpack(said.start, packed), Config())
    unpacking = time.process_time() - began
    tracemalloc.start()
    found = Presences.unpack(said.start, packed)
    doors = {each.rank: Place(each.port, each.addresses, each.kernel) for each in found}
    cluster = cluster_of(found, Config())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(doors) == cluster.size == size
    return Table(size, len(packed), peak, unpacking, packing)


def main() -> None:
    """Prints what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("count", "real", "table", "gloo"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256, 1024, 4096])
    chosen = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, torch {torch.__version__}")
    for size in chosen.ranks:
        if chosen.what == "count":
            for cost in count(size):
                each = (cost.asked - cost.looks) / cost.ranks
                print(
                    f"| {cost.ranks} | {cost.name} | {cost.asked} | {each:.1f} | {cost.most} | "
                    f"{cost.nbytes / 1e6:.2f} | {cost.nbytes / cost.ranks / 1e3:.1f} | {cost.seconds:.1f} |",
                    flush=True,
                )
        elif chosen.what == "gloo":
            asked, keys, nbytes = gloo(size)
            print(f"| {size} | {asked} | {keys} | {keys / size:.1f} | {nbytes / 1e6:.3f} |", flush=True)
        elif chosen.what == "real":
            seconds, busy = real(size)
            print(f"| {size} | {seconds:.2f} s | server {busy:.2f} s |", flush=True)
        else:
            print(table(size), flush=True)


if __name__ == "__main__":
    main()
