"""The machine and the date under every figure: one line that a reader who was not there can place."""

import datetime
import os
import platform
import resource
from pathlib import Path

import torch


def processor() -> str:
    """The processor's name as the kernel gives it; the architecture where it gives none (Arm)."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def machine_line() -> str:
    """Processor, cores, GPU if any, torch, date."""
    cores = len(os.sched_getaffinity(0))
    gpu = f", {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return f"{processor()}, {cores} cores{gpu}, torch {torch.__version__}, {today}"


def memory_line(device: torch.device) -> str:
    """The most memory that this process has held: resident, and on its GPU where it uses one."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts it in KiB: getrusage(2)
    text = f"{resident / 2**20:.0f} MiB resident"
    if device.type == "cuda":
        text += f", {torch.cuda.max_memory_allocated(device) / 2**20:.0f} MiB on the GPU"
    return text
