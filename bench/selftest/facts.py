"""The machine under a report: versions, GPUs, how they hang together, and the variables that steer them."""

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
    """What an issue has to say of the machine; names no host and no user.

    CUDA is asked, so this is for a process that uses it anyway.
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
"""What the command itself sets for its processes."""


def cuda_versions() -> dict[str, str]:
    """Versions of what lies below gradwire's own kernels; what is missing is left out, or says so."""
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
    """Each GPU as torch sees it."""
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
    """The machine in three lines."""
    try:
        machine = detect_machine()
    except TopologyError as error:
        return [f"not readable: {error}"]
    rates = [f"{level.name}: {gigabytes(level.bytes_per_second)} ({level.source})" for level in levels_of(machine)]
    return [summary(machine), *rates]
