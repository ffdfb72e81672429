"""Speed of processors: repetitions of a small computation in a fixed time, on one core or with torch's threads."""

import time
from statistics import median

import torch

from gradwire.bench.doctor import local
from gradwire.bench.doctor.facts import GpuState

WORK_SECONDS = 0.4
"""Seconds of a measurement of a core: long enough that a quota or a throttle takes its share."""

NUMEL = 1 << 16
"""Elements of the computation: 256 kB of float32 stay in a core's cache, so that shared memory is not measured."""

WIDE_NUMEL = 1 << 20
"""Elements of the multi-threaded computation; torch uses threads from 32768 on. Source: at::internal::GRAIN_SIZE."""


def core_work(seconds: float) -> float:
    """Measures the speed of a core: returns repetitions of a small computation per second in one thread.

    Args:
        seconds: Length of the measurement.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _per_second(torch.ones(NUMEL), seconds)
    finally:
        torch.set_num_threads(threads)


def _per_second(values: torch.Tensor, seconds: float) -> float:
    """Computes the sine of `values` repeatedly for some seconds; returns the repetitions per second."""
    result = torch.empty_like(values)
    count = 0
    began = time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        torch.sin(values, out=result)
        count += 1
    return count / passed


def threads_seconds(fair: int, seconds: float) -> tuple[float, float]:
    """Returns the median seconds of a multi-threaded operation, the sine of 2**20 numbers, with two numbers of threads.

    The two alternate, so that other load slows both.

    Args:
        fair: Number of threads for which there are cores.
        seconds: Length of each of the six measurements.

    Returns:
        (Seconds with torch's own number of threads, seconds with `fair` threads).
    """
    own = torch.get_num_threads()
    values = torch.ones(WIDE_NUMEL)
    found: dict[int, list[float]] = {own: [], fair: []}
    try:
        for _ in range(3):
            for count in (own, fair):
                torch.set_num_threads(count)
                found[count].append(1 / _per_second(values, seconds))
    finally:
        torch.set_num_threads(own)
    return median(found[own]), median(found[fair])


def busy_gpu_states() -> tuple[GpuState, ...]:
    """Returns the states of the node's GPUs, read while this process keeps its current GPU busy."""
    if torch.cuda.is_available():
        square = torch.ones(4096, 4096, device="cuda")
        for _ in range(50):
            square = square @ square.clamp(max=1e-4)
    found = local.gpu_states()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found
