"""Reads variables of the environment that others set: torch, NCCL and the launcher; and those of single commands.

`comms.config` reads the options of the hook. In `comms` these two modules alone read the environment, and in `topology`
`gdr/inputs/environment.py` does.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

ON, OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
"""Values of variables that switch something on or off, in lower case."""

WATCH = "GRADWIRE_WATCH"


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Holds the parameters of `gradwire.watch` that the environment sets; None for a file or port that is not set."""

    stall_seconds: float
    json: str | None
    metrics: str | None
    trace: str | None


def watch_wanted() -> bool:
    """Returns whether GRADWIRE_WATCH is set, to something else than 0, false, no or off; the value is checked later."""
    return os.environ.get(WATCH, "").lower() not in ("", *OFF)


def watch_options() -> "WatchOptions":
    """Reads GRADWIRE_WATCH_STALL_SECONDS, GRADWIRE_WATCH_JSON, GRADWIRE_WATCH_METRICS and GRADWIRE_WATCH_TRACE.

    Call it only if `watch_wanted` returns True.

    Raises:
        ValueError: GRADWIRE_WATCH is not in `ON` (1, true, yes, on, in any case), also if it is not set or in `OFF`; or
            the seconds are no positive, finite number. Files and ports are not checked.
    """
    if (wanted := os.environ.get(WATCH, "")).lower() not in ON:
        raise ValueError(f"`{WATCH}` is {wanted!r}; wanted {', '.join(ON)}, or one of {', '.join(OFF)}")
    text = os.environ.get(f"{WATCH}_STALL_SECONDS") or "10"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"`{WATCH}_STALL_SECONDS` is {text!r}; wanted a positive number of seconds, such as 10")
    json, metrics, trace = (os.environ.get(f"{WATCH}_{name}") or None for name in ("JSON", "METRICS", "TRACE"))
    return WatchOptions(seconds, json, metrics, trace)


FLIGHT_RECORDER_SIZE = "TORCH_FR_BUFFER_SIZE"
"""torch's variable for the number of collectives in its flight recorder, read when the first group is made. By default
gloo's recorder keeps none, NCCL's 2,000."""


def flight_recorder_size() -> int:
    """Returns TORCH_FR_BUFFER_SIZE, the number of collectives that torch's flight recorders keep; 0 if it is not set.

    Raises:
        ValueError: The variable is no whole number.
    """
    return int(os.environ.get(FLIGHT_RECORDER_SIZE) or 0)


def set_flight_recorder_size(collectives: int) -> None:
    """Sets TORCH_FR_BUFFER_SIZE: how many collectives torch's flight recorders keep, for gloo and for NCCL.

    It replaces a value that is set already. torch reads the variable when the first process group is made; later
    changes have no effect.

    Args:
        collectives: Number of the last collectives that are kept.
    """
    os.environ[FLIGHT_RECORDER_SIZE] = str(collectives)


def world_size() -> int:
    """Returns WORLD_SIZE as torchrun sets it; 1 if it is not set.

    Raises:
        ValueError: WORLD_SIZE is no number, or empty.
    """
    return launcher_number(os.environ, "WORLD_SIZE", 1)


GLOO_INTERFACES = "GLOO_SOCKET_IFNAME"
"""torch's variable for the network interfaces that gloo uses: names, separated by commas."""


def gloo_interfaces() -> tuple[str, ...]:
    """Returns the interfaces in GLOO_SOCKET_IFNAME; empty if it is not set."""
    return tuple(name for name in os.environ.get(GLOO_INTERFACES, "").split(",") if name)


LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
"""NCCL's variable: 1 makes the kernels of all communicators of a GPU start in the order in which they were issued."""


def launch_order() -> bool | None:
    """Returns whether NCCL_LAUNCH_ORDER_IMPLICIT makes NCCL keep the order of issue across communicators.

    None if the variable is not set; False if it is empty or 0.
    """
    text = os.environ.get(LAUNCH_ORDER)
    return None if text is None else text.strip() not in ("", "0")


def set_launch_order() -> None:
    """Sets NCCL_LAUNCH_ORDER_IMPLICIT=1: NCCL, from 2.26 on, keeps the order of issue across communicators.

    It overwrites a value that is set already: the caller asks `launch_order` before. NCCL reads the variable once, so
    the caller also makes sure that NCCL has run no collective in this process yet.
    """
    os.environ[LAUNCH_ORDER] = "1"


BLOCKING_WAITS = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
"""Torch's variables that make the host wait for each collective of NCCL; if both are set, the first one counts."""


def blocking_wait() -> str | None:
    """Returns the variable that makes the host wait for each collective of NCCL; None if none does.

    Source: torch 2.13 torch/csrc/distributed/c10d/Utils.hpp, getCvarBool.
    """
    name = next((each for each in BLOCKING_WAITS if each in os.environ), None)
    return name if name and os.environ[name].lower() in ("y", "yes", "1", "t", "true") else None


def visibility() -> dict[str, str]:
    """Returns name -> value of the variables that are set and decide which GPUs this process sees; see `VARIABLES`."""
    from gradwire.topology.visible import VARIABLES  # here: a configuration needs nothing of the topology

    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def local_rank() -> int | None:
    """Returns LOCAL_RANK as torchrun sets it; None if it is not set, or no number."""
    text = os.environ.get("LOCAL_RANK")
    return int(text) if text is not None and _is_number(text) else None


def job_is_on_one_host() -> bool:
    """Returns whether the launcher has started all ranks on this host; False if that is not known."""
    local, world = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    return local is not None and local == world


def _is_number(text: str) -> bool:
    """Returns whether a text is a whole number of at most ten digits."""
    return text.isascii() and text.isdecimal() and len(text) <= 10


def launcher_text(variables: Mapping[str, str], name: str) -> str:
    """Returns one of a launcher's variables.

    Args:
        variables: Environment; see `launcher_variables`.
        name: Name of the variable.

    Raises:
        ValueError: The variable is not set, or empty.
    """
    if not variables.get(name):
        raise ValueError(
            f"`{name}` is not set although another variable of a launcher is; wanted all of them, as torchrun or srun "
            "sets them, or none"
        )
    return variables[name]


def launcher_number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Returns one of a launcher's variables as a number.

    Args:
        variables: Environment; see `launcher_variables`.
        name: Name of the variable.
        default: Value that is returned if the variable is not set; None if it must be set.

    Raises:
        ValueError: The variable is no number, or not set.
    """
    if default is not None and name not in variables:
        return default
    text = launcher_text(variables, name)
    if not _is_number(text):
        raise ValueError(f"`{name}` is {text[:40]!r}; wanted a number, as torchrun or srun sets it, or leave it unset")
    return int(text)


def torchrun_place(variables: Mapping[str, str]) -> tuple[int, int, str, int]:
    """Returns (rank, number of ranks, address, port) of a process that torchrun started.

    Args:
        variables: Environment; see `launcher_variables`.

    Raises:
        ValueError: A variable is not set, or out of range.
    """
    rank, size, port = (launcher_number(variables, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank >= size:
        raise ValueError(f"`RANK` is {rank} and `WORLD_SIZE` {size}; wanted a rank from 0 to {size - 1}")
    if not 0 < port < 2**16:
        raise ValueError(f"`MASTER_PORT` is {port}; wanted a TCP port from 1 to 65535")
    return rank, size, launcher_text(variables, "MASTER_ADDR"), port


def launcher_variables() -> dict[str, str]:
    """Returns name -> value of the variables about this rank that torchrun, mpirun or srun have set; may be empty."""
    return {name: os.environ[name] for name in _LAUNCHER_VARIABLES if name in os.environ}


def steering_variables() -> dict[str, str]:
    """Returns name -> value of the variables that configure torch, NCCL, gloo, OpenMP and the like, sorted by name.

    Includes only known names and prefixes, so that a user may show them without the rest of the environment. Values
    are cut at 200 characters, and nothing in them is masked.
    """
    return {
        name: value[:_LONGEST_VALUE]
        for name, value in sorted(os.environ.items())
        if name.startswith(_STEERING_BEGINNINGS) or name in _STEERING_NAMES
    }


def bench_environment() -> float | None:
    """Returns NCCL_TESTS_MIN_BW, the bus bandwidth in GB/s that a benchmark must reach; None if it is not set.

    An empty value is 0, as for nccl-tests, which reads it with atof: any bandwidth is enough.

    Raises:
        ValueError: It is no number; or another variable of nccl-tests asks for several groups of ranks.
    """
    for name in ("NCCL_TESTS_SPLIT", "NCCL_TESTS_SPLIT_MASK"):
        if text := os.environ.get(name):
            raise ValueError(
                f"`{name}` is {text!r}, but all ranks are one group here; wanted it unset: start a bench for each "
                "group of ranks"
            )
    text = os.environ.get("NCCL_TESTS_MIN_BW")
    try:
        wanted = None if text is None else float(text or 0)
    except ValueError:
        wanted = math.nan
    if wanted is not None and math.isnan(wanted):
        raise ValueError(f"`NCCL_TESTS_MIN_BW` is {text!r}; wanted a number of GB/s, or leave it unset")
    return wanted


_LONGEST_VALUE = 200
_STEERING_BEGINNINGS = ("NCCL_", "GLOO_", "TORCH_", "CUDA_", "OMP_", "GOMP_", "KMP_", "MKL_", "UCX_", "FI_",
                        "OFI_NCCL_", "PYTORCH_", "GRADWIRE_", "TP_SOCKET_")  # fmt: skip
_STEERING_NAMES = ("KUBERNETES_SERVICE_HOST", "SLURM_CPU_BIND", "SLURM_CPUS_PER_TASK")

_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",  # torchrun
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",  # Open MPI
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "PMIX_RANK",  # MPICH, Intel MPI, PMIx
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NODELIST",  # srun
    "SLURM_STEP_NUM_TASKS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
)
