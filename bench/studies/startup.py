"""What a start costs at scale: questions to the store, bytes through its host, memory of a rank.

Feeds docs/reference/startup.md.

    python -m gradwire.bench.studies.startup count --ranks 16 64 256 1024 4096
    python -m gradwire.bench.studies.startup real --ranks 256
    python -m gradwire.bench.studies.startup table --ranks 16384

`count` runs the start-up, one decision of all ranks, and the failure of a node, with a thread for each rank, on a store
that counts: the code is that of a job, nothing is modelled. `real` makes communicators in threads, each rank with its
own connection to one TCPStore that a process of its own serves. `table` makes what the ranks exchange, and measures it.
"""

import argparse
import hashlib
import multiprocessing
import os
import resource
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from multiprocessing.connection import Connection
from unittest.mock import patch

import torch

from gradwire.comms.autotune.consensus import Consensus
from gradwire.comms.bootstrap.compat import Store, TCPStore
from gradwire.comms.bootstrap.failure import FailureBoard
from gradwire.comms.bootstrap.hardware import Hardware
from gradwire.comms.bootstrap.placement import Presence, cluster_of
from gradwire.comms.bootstrap.rendezvous import Presences, exchange
from gradwire.comms.bootstrap.store import PollingStore, epoch_store
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.errors import PeerError
from gradwire.topology.cluster import GpuFabric
from gradwire.topology.fabric import fabric_of
from gradwire.topology.presets import dgx_h100

RANKS_PER_NODE = 8
TIMEOUT = timedelta(seconds=300)
CPU = torch.device("cpu")


class Memory:
    """The keys that counting stores share."""

    def __init__(self) -> None:
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
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory
        self.asked: Counter[str] = Counter()
        self.looks = 0
        self._seen: dict[str, bytes] = {}
        self.nbytes = 0

    def set(self, key: str, value: str | bytes) -> None:
        """See `Store.set`."""
        data = value.encode() if isinstance(value, str) else value
        self._count("set", len(key) + len(data))
        with self._memory.lock:
            self._memory.values[key] = data

    def get(self, key: str) -> bytes:
        """See `Store.get`; the key must be there."""
        value = self._memory.values[key]
        self._count("get", len(key) + len(value))
        self.looks += self._seen.get(key) is value
        self._seen[key] = value
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """See `Store.multi_get`; the keys must be there."""
        values = [self._memory.values[key] for key in keys]
        self._count("multi_get", sum(map(len, keys)) + sum(map(len, values)))
        return values

    def check(self, keys: Sequence[str]) -> bool:
        """See `Store.check`."""
        self._count("check", sum(map(len, keys)))
        found = all(key in self._memory.values for key in keys)
        self.looks += not found
        return found

    def add(self, key: str, value: int) -> int:
        """See `Store.add`."""
        self._count("add", len(key) + 8)
        with self._memory.lock:
            total = int(self._memory.values.get(key, b"0")) + value
            self._memory.values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """See `Store.compare_set`."""
        expected, desired = (
            each.encode() if isinstance(each, str) else each for each in (expected_value, desired_value)
        )
        with self._memory.lock:
            found = self._memory.values.get(key)
            if (found or b"") == expected:
                found = self._memory.values[key] = desired
        self._count("compare_set", len(key) + len(expected_value) + 2 * len(desired_value))
        return found or b""

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See `Store.wait`; looks again every millisecond, and counts as one question."""
        self._count("wait", sum(map(len, keys)))
        deadline = time.monotonic() + (timeout or TIMEOUT).total_seconds()
        while not all(key in self._memory.values for key in keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no value for {', '.join(keys)}")
            time.sleep(0.001)

    def _count(self, kind: str, nbytes: int) -> None:
        self.asked[kind] += 1
        self.nbytes += nbytes


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
        seconds: It took here.
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
        size: Number of ranks, each a thread.
    """
    memory = Memory()
    clients = [CountingStore(memory) for _ in range(size)]
    said = [presence(rank, size) for rank in range(size)]
    costs = []

    def measured(name: str, body: Callable[[int, PollingStore], object]) -> None:
        before = [(client.asked.total(), client.nbytes) for client in clients]
        looks = sum(client.looks for client in clients)
        began = time.perf_counter()

        def run(rank: int) -> None:
            body(rank, PollingStore(epoch_store(clients[rank], "study", 0), TIMEOUT, ranks=size))

        on_ranks(size, run)
        seconds = time.perf_counter() - began
        asked = [client.asked.total() - was for client, (was, _) in zip(clients, before, strict=True)]
        nbytes = sum(client.nbytes - was for client, (_, was) in zip(clients, before, strict=True))
        looks = sum(client.looks for client in clients) - looks
        costs.append(Cost(name, size, sum(asked), looks, max(asked), nbytes, seconds))

    lost = set(range(size // 2 // RANKS_PER_NODE * RANKS_PER_NODE, size // 2 // RANKS_PER_NODE * RANKS_PER_NODE + 8))
    read_once = lru_cache(maxsize=1)(Presences.unpack)  # by all threads: the processes of a job do not share a core
    with patch.object(Presences, "unpack", read_once):
        measured("start", lambda rank, store: exchange(store, said[rank], TIMEOUT))
    measured("decision", lambda rank, store: Consensus(store, rank, size, "study", TIMEOUT).decide([rank] * 8, len))

    def fail(rank: int, store: PollingStore) -> None:
        if rank not in lost:
            gone = tuple(lost) if rank + 8 in lost or rank - 8 in lost else ()
            found = FailureBoard(store, rank, size).diagnose(
                PeerError("connection closed", gone), (0, 0), "all_reduce inter_node", range(size)
            )
            assert set(found.missing) == lost, found

    measured("failure", fail)
    return costs


def _serve(port: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send((store.port, _busy_seconds()))
    while port.poll(None):
        if port.recv() is None:
            return
        port.send(_busy_seconds())


def _busy_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def real(size: int) -> tuple[float, float]:
    """Makes a communicator for each rank, in threads, each with its own connection to one TCPStore.

    Args:
        size: Number of ranks.

    Returns:
        Seconds that it took, and seconds that the process which serves the store worked.
    """
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("fork").Process(target=_serve, args=(there,), daemon=True)
    server.start()
    port, before = here.recv()
    clients = [TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for _ in range(size)]
    made: dict[int, Communicator] = {}

    def start(rank: int) -> None:
        config = Config(hostname=f"node{rank // RANKS_PER_NODE}", timeout=TIMEOUT)
        made[rank] = Communicator(clients[rank], rank, size, CPU, config, name="study")

    began = time.perf_counter()
    on_ranks(size, start)
    seconds = time.perf_counter() - began
    here.send("used")
    busy = here.recv() - before
    for communicator in made.values():
        assert len(communicator.cluster.nodes) == -(-size // RANKS_PER_NODE)
        communicator.close()
    here.send(None)
    server.join()
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
    doors = {each.rank: (each.port, each.addresses) for each in found}
    cluster = cluster_of(found, Config())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(doors) == cluster.size == size
    return Table(size, len(packed), peak, unpacking, packing)


def main() -> None:
    """Prints what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("count", "real", "table"))
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
        elif chosen.what == "real":
            seconds, busy = real(size)
            print(f"| {size} | {seconds:.2f} s | server {busy:.2f} s |", flush=True)
        else:
            print(table(size), flush=True)


if __name__ == "__main__":
    main()
