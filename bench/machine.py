"""Description of the machine in one line, with the date, for the reports of measurements."""

import datetime
import os
import platform
import resource
from pathlib import Path

import torch


def processor() -> str:
    """Returns the processor's name by /proc/cpuinfo; the architecture if that has none, as on Arm."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def machine_line() -> str:
    """Returns a line with the processor, the usable cores, the GPUs if any, torch's version and the date."""
    cores = len(os.sched_getaffinity(0))
    gpu = f", {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return f"{processor()}, {cores} cores{gpu}, torch {torch.__version__}, {today}"


def memory_line(device: torch.device) -> str:
    """Returns words for the most memory that this process has used: resident, and on its GPU if it uses one.

    Args:
        device: Device of the process's tensors.
    """
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts it in KiB: getrusage(2)
    text = f"{resident / 2**20:.0f} MiB resident"
    if device.type == "cuda":
        text += f", {torch.cuda.max_memory_allocated(device) / 2**20:.0f} MiB on the GPU"
    return text
