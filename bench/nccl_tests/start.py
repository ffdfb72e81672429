"""Detection of the launcher that started this process (torchrun, mpirun, srun, another), without torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gradwire.comms.environment import launcher_number, launcher_text, torchrun_place

_FIRST_PORT, _PORTS = 20000, 20000
"""First port and number of ports for srun's ranks, among which the job's number chooses. Most are below the range that
the kernel uses for outgoing connections, 32768 and above."""


OWN_LAUNCHER = "your own launcher"
"""Name of a launcher that set RANK and WORLD_SIZE and is not torchrun."""


@dataclass(frozen=True, slots=True)
class Start:
    """Rank of this process, and where it meets the others.

    Attributes:
        by: Launcher: `torchrun`, `mpirun`, `srun`, `OWN_LAUNCHER`, or `-g` for ranks that the bench forked itself.
        rank: This rank.
        size: Number of ranks.
        address: Host of the rendezvous store.
        port: TCP port of the store.
        agent_store: Whether the launcher serves the store; otherwise rank 0 does.
    """

    by: str
    rank: int
    size: int
    address: str
    port: int
    agent_store: bool = False


def speaks(variables: Mapping[str, str]) -> bool:
    """Returns whether this process is the one that prints messages which all ranks would print alike.

    It is the process of rank 0 by the launcher's variables, and any process without a launcher.

    Args:
        variables: Environment variables of the launcher, see `launcher_variables`.
    """
    numbers = (variables.get(name) for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"))
    return next((number for number in numbers if number is not None), "0") == "0"


def find_start(variables: Mapping[str, str]) -> Start | None:
    """Returns the rank of this process by the launcher's variables; None if no launcher started it.

    Args:
        variables: Environment variables of the launcher, see `launcher_variables`.

    Raises:
        ValueError: The variables contradict each other.
        RuntimeError: mpirun started this process and mpi4py cannot be loaded, or belongs to another MPI.
    """
    if "RANK" in variables and "WORLD_SIZE" in variables:
        place = torchrun_place(variables)
        # torchrun's agent alone sets the run's identifier: pods, DeepSpeed and users set only RANK and WORLD_SIZE.
        # Source: torch/distributed/elastic/agent/server/local_elastic_agent.py.
        by = "torchrun" if "TORCHELASTIC_RUN_ID" in variables else OWN_LAUNCHER
        return Start(by, *place, variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
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
    """Returns the first host of a list of hosts as Slurm writes it: `node[03-07,9],login` -> `node03`.

    Source: scontrol(1), show hostnames.

    Args:
        nodelist: Value of SLURM_STEP_NODELIST.

    Raises:
        ValueError: The list is empty, or begins with a bracket or comma.
    """
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^,\[]*)", nodelist)
    if match is None:
        raise ValueError(f"`SLURM_STEP_NODELIST` is {nodelist!r}; wanted a list of hosts: set MASTER_ADDR")
    number = re.split(r"[-,]", match[2])[0] if match[2] else ""
    return match[1] + number + match[3]


def _from_mpi(variables: Mapping[str, str]) -> Start:
    from gradwire.comms.bootstrap import mpi_launch  # here, because it needs torch

    started = launcher_number(variables, "OMPI_COMM_WORLD_SIZE", launcher_number(variables, "PMI_SIZE", 1))
    place = mpi_launch.find_place()
    if place.world_size != started:
        raise RuntimeError(
            f"mpirun started {started} ranks but mpi4py sees {place.world_size}: its MPI library is not the "
            f"one that this mpirun belongs to, so each rank would run alone; {mpi_launch.INSTALL}"
        )
    return Start("mpirun", place.rank, place.world_size, place.address, place.port)
