"""Description of the machine for a report: versions, GPUs, their topology, and environment variables."""

import importlib
import platform

import torch

from gradwire.bench.doctor.local import versions
from gradwire.bench.machine import machine_line
from gradwire.comms.environment import steering_variables
from gradwire.topology.errors import TopologyError
from gradwire.topology.labels import gigabytes
from gradwire.topology.levels import levels_of
from gradwire.topology.readers.detect import detect_machine
from gradwire.topology.show.draw import summary


def machine_facts() -> dict[str, object]:
    """Returns a description of the machine for an issue, without names of hosts and users.

    It initializes CUDA in this process.
    """
    return {
        "machine": machine_line(),
        "system": " ".join((platform.system(), platform.release(), *platform.libc_ver())),
        "versions": versions() | cuda_versions(),
        "gpus": gpus() if torch.cuda.is_available() else [],
        "topology": topology_lines(),
        "variables": {name: text for name, text in steering_variables().items() if name not in OWN_VARIABLES},
    }


OWN_VARIABLES = ("GRADWIRE_HOSTNAME", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID")
"""Environment variables that the command sets for its processes, and that the description leaves out."""


def cuda_versions() -> dict[str, str]:
    """Returns the versions of CUDA's libraries below gradwire's kernels: name -> version.

    Without a GPU only that of torch's CUDA; if CuPy cannot be used, its entry says so.
    """
    found = {"torch CUDA": str(torch.version.cuda)}
    if not torch.cuda.is_available():
        return found
    try:
        cupy, cuda = importlib.import_module("cupy"), importlib.import_module("cupy.cuda")
        found["cupy"] = str(cupy.__version__)
        found["NVRTC"] = ".".join(map(str, cuda.nvrtc.getVersion()))
        found["driver CUDA"] = str(cuda.runtime.driverGetVersion())
    except (ImportError, AttributeError, RuntimeError, OSError) as error:  # the kernels' own check says what to do
        found.setdefault("cupy", f"not usable: {type(error).__name__}")
    return found


def gpus() -> list[dict[str, object]]:
    """Returns name, compute capability, memory and multiprocessors of each GPU that torch sees."""
    found: list[dict[str, object]] = []
    for index in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": seen.name,
                "capability": f"{seen.major}.{seen.minor}",
                "memory_nbytes": seen.total_memory,
                "multiprocessors": seen.multi_processor_count,
            }
        )
    return found


def topology_lines() -> list[str]:
    """Returns a summary of the machine's topology, and a line with the rate of each level; or the reason why not."""
    try:
        machine = detect_machine()
    except TopologyError as error:
        return [f"not readable: {error}"]
    rates = [f"{level.name}: {gigabytes(level.bytes_per_second)} ({level.source})" for level in levels_of(machine)]
    return [summary(machine), *rates]
