"""Connection of this rank with the others, and a list of all ranks."""

import os
import socket
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from gradwire.bench.nccl_tests.start import Start
from gradwire.comms.bootstrap.compat import PrefixStore, Store
from gradwire.comms.boundary.gathering import gather_records


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Process, host and index of one rank, as the output lists them.

    Attributes:
        rank: Rank in the job.
        pid: Process ID.
        hostname: Name of its host.
        local_rank: Index among the ranks of its host.
    """

    rank: int
    pid: int
    hostname: str
    local_rank: int


@dataclass(frozen=True, slots=True)
class _Process:
    """Message of a rank to the others: its process ID and hostname."""

    pid: int
    hostname: str


@dataclass(frozen=True, slots=True)
class World:
    """All ranks of a job, connected with each other.

    Attributes:
        start: Rank, size and launcher of this process.
        store: Store that all ranks reach.
        control: gloo group of all ranks, for barriers and for exchanging measurements; never used while the clock runs.
        ranks: Description of each rank, by rank.
    """

    start: Start
    store: Store
    control: dist.ProcessGroup
    ranks: tuple[RankInfo, ...]

    @property
    def rank(self) -> int:
        """This rank."""
        return self.start.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.start.size

    @property
    def local_rank(self) -> int:
        """Index among the ranks of this node."""
        return self.ranks[self.rank].local_rank

    def shape(self) -> str:
        """Returns the number of ranks and of nodes in words, as `4 (2 nodes x 2 local ranks)`."""
        counts = list(Counter(info.hostname for info in self.ranks).values())
        nodes = f"{len(counts)} node{'s' if len(counts) > 1 else ''}"
        if len(set(counts)) == 1:
            return f"{self.size} ({nodes} x {counts[0]} local rank{'s' if counts[0] > 1 else ''})"
        return f"{self.size} ({nodes} with {', '.join(map(str, counts))} local ranks)"


def meet(start: Start, timeout: timedelta) -> World:
    """Connects this rank with all others by gloo, as torch's default process group. Collective.

    Args:
        start: Rank, size and store address of this process.
        timeout: Time limit for all ranks to join, and of the group's collectives.

    Raises:
        RuntimeError: A rank did not join within `timeout`.
    """
    serves = start.rank == 0 and not start.agent_store
    store: Store = TCPStore(start.address, start.port, start.size, serves, timeout)
    if start.agent_store:
        store = PrefixStore("gradwire-bench", store)
    dist.init_process_group("gloo", store=store, rank=start.rank, world_size=start.size, timeout=timeout)
    control = dist.group.WORLD
    assert control is not None
    processes = gather_records(_Process(os.getpid(), socket.gethostname()))
    seen: Counter[str] = Counter()
    ranks = []
    for rank, process in enumerate(processes):
        ranks.append(RankInfo(rank, process.pid, process.hostname, seen[process.hostname]))
        seen[process.hostname] += 1
    return World(start, PrefixStore("backends", store), control, tuple(ranks))


def gather(value: float, group: dist.ProcessGroup) -> list[float]:
    """Exchanges a number; returns every rank's on all ranks, by rank. Collective.

    Args:
        value: Number of this rank.
        group: gloo group of all ranks.
    """
    size = dist.get_world_size(group)
    own = torch.tensor([value], dtype=torch.float64)
    found = [torch.empty(1, dtype=torch.float64) for _ in range(size)]
    dist.all_gather(found, own, group=group)
    return [each.item() for each in found]
