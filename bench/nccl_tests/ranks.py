"""Which rank this process is, and how it meets the others: torchrun, mpirun, srun, or started here with -g."""

import os
import re
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from gradwire.comms.bootstrap import mpi_launch
from gradwire.comms.bootstrap.compat import PrefixStore, Store
from gradwire.comms.config import launcher_number, launcher_text, torchrun_place

_FIRST_PORT, _PORTS = 20000, 20000
"""Ports for srun's ranks, picked by the job's number: below the kernel's own range (32768...), or above it rarely."""


@dataclass(frozen=True, slots=True)
class Start:
    """How this rank came to be, before it has met the others.

    Attributes:
        by: `torchrun`, `mpirun`, `srun`, or `-g`.
        rank: This rank.
        size: Number of ranks.
        address: Of the store that rank 0 serves.
        port: Its TCP port.
        agent_store: The launcher serves the store itself.
    """

    by: str
    rank: int
    size: int
    address: str
    port: int
    agent_store: bool = False


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One rank as the output lists it."""

    rank: int
    pid: int
    hostname: str
    local_rank: int


@dataclass(frozen=True, slots=True)
class World:
    """All ranks, met.

    Attributes:
        start: How this rank came to be.
        store: Reaches all ranks.
        control: gloo, for barriers and figures; never inside the timed part.
        ranks: By rank.
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
        """Nodes and ranks in words: `4 (2 nodes x 2 local ranks)`."""
        counts = list(Counter(info.hostname for info in self.ranks).values())
        nodes = f"{len(counts)} node{'s' if len(counts) > 1 else ''}"
        if len(set(counts)) == 1:
            return f"{self.size} ({nodes} x {counts[0]} local rank{'s' if counts[0] > 1 else ''})"
        return f"{self.size} ({nodes} with {', '.join(map(str, counts))} local ranks)"


def speaks(variables: Mapping[str, str]) -> bool:
    """Whether this process says what all ranks find alike, as the launcher's variables number it.

    Args:
        variables: Of the environment, see `launcher_variables`.
    """
    numbers = (variables.get(name) for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"))
    return next((number for number in numbers if number is not None), "0") == "0"


def find_start(variables: Mapping[str, str]) -> Start | None:
    """What the launcher's variables say; None where no launcher started this process.

    Args:
        variables: Of the environment, see `launcher_variables`.

    Raises:
        ValueError: The variables contradict each other.
        RuntimeError: mpirun started this process and mpi4py cannot be loaded, or belongs to another MPI.
    """
    if "RANK" in variables and "WORLD_SIZE" in variables:
        place = torchrun_place(variables)
        return Start("torchrun", *place, variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
    if "OMPI_COMM_WORLD_RANK" in variables or "PMI_RANK" in variables:
        return _from_mpi(variables)
    if "SLURM_PROCID" in variables and launcher_number(variables, "SLURM_STEP_NUM_TASKS", 1) > 1:
        job = launcher_number(variables, "SLURM_JOB_ID", 0) + 101 * launcher_number(variables, "SLURM_STEP_ID", 0)
        address = variables.get("MASTER_ADDR") or first_host(launcher_text(variables, "SLURM_STEP_NODELIST"))
        port = launcher_number(variables, "MASTER_PORT", _FIRST_PORT + job % _PORTS)
        size = launcher_number(variables, "SLURM_STEP_NUM_TASKS")
        return Start("srun", launcher_number(variables, "SLURM_PROCID"), size, address, port)
    return None


def first_host(nodelist: str) -> str:
    """The first host of Slurm's list: `node[03-07,9],login` -> `node03`. Source: scontrol(1), show hostnames."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^,\[]*)", nodelist)
    if match is None:
        raise ValueError(f"`SLURM_STEP_NODELIST` is {nodelist!r}; wanted a list of hosts: set MASTER_ADDR")
    number = re.split(r"[-,]", match[2])[0] if match[2] else ""
    return match[1] + number + match[3]


def meet(start: Start, timeout: timedelta) -> World:
    """Connects this rank with all others.

    Raises:
        RuntimeError: A rank did not come within `timeout`.
    """
    serves = start.rank == 0 and not start.agent_store
    store: Store = TCPStore(start.address, start.port, start.size, serves, timeout)
    if start.agent_store:
        store = PrefixStore("gradwire-bench", store)
    dist.init_process_group("gloo", store=store, rank=start.rank, world_size=start.size, timeout=timeout)
    control = dist.group.WORLD
    assert control is not None
    own = (os.getpid(), socket.gethostname())
    everybody: list[tuple[int, str]] = [own] * start.size
    dist.all_gather_object(everybody, own)
    seen: Counter[str] = Counter()
    ranks = []
    for rank, (pid, hostname) in enumerate(everybody):
        ranks.append(RankInfo(rank, pid, hostname, seen[hostname]))
        seen[hostname] += 1
    return World(start, PrefixStore("backends", store), control, tuple(ranks))


def gather(value: float, group: dist.ProcessGroup) -> list[float]:
    """One number from every rank, by rank."""
    size = dist.get_world_size(group)
    own = torch.tensor([value], dtype=torch.float64)
    found = [torch.empty(1, dtype=torch.float64) for _ in range(size)]
    dist.all_gather(found, own, group=group)
    return [each.item() for each in found]


def _from_mpi(variables: Mapping[str, str]) -> Start:
    started = launcher_number(variables, "OMPI_COMM_WORLD_SIZE", launcher_number(variables, "PMI_SIZE", 1))
    place = mpi_launch.find_place()
    if place.world_size != started:
        raise RuntimeError(
            f"mpirun started {started} ranks but mpi4py sees {place.world_size}: its MPI library is not the "
            f"one that this mpirun belongs to, so each rank would run alone; {mpi_launch.INSTALL}"
        )
    return Start("mpirun", place.rank, place.world_size, place.address, place.port)
