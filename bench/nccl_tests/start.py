"""How this process came to be: by torchrun, mpirun, srun, or started here with -g; says so without torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gradwire.comms.environment import launcher_number, launcher_text, torchrun_place

_FIRST_PORT, _PORTS = 20000, 20000
"""Ports for srun's ranks, picked by the job's number: below the kernel's own range (32768...), or above it rarely."""


OWN_LAUNCHER = "your own launcher"
"""Started the ranks if RANK and WORLD_SIZE are set and torchrun did not set them."""


@dataclass(frozen=True, slots=True)
class Start:
    """How this rank came to be, before it has met the others.

    Attributes:
        by: `torchrun`, `mpirun`, `srun`, `OWN_LAUNCHER`, or `-g`.
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
    """The first host of Slurm's list: `node[03-07,9],login` -> `node03`. Source: scontrol(1), show hostnames."""
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
