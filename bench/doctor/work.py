"""How much work a core does: the same small sum again and again, for a while, beside all other ranks or alone."""

import time
from statistics import median

import torch

from gradwire.bench.doctor import local
from gradwire.bench.doctor.facts import GpuState

WORK_SECONDS = 0.4
"""How long a core's work is measured."""

NUMEL = 1 << 16
"""256 kB of float32: in every core's own cache, so that the memory that cores share is not measured."""

WIDE_NUMEL = 1 << 20
"""Enough that torch splits it over its threads (it does from 32768 elements on: at::internal::GRAIN_SIZE)."""


def core_work(seconds: float) -> float:
    """Sums per second of one thread. The time is long enough that a quota or a throttle takes its share of it.

    Args:
        seconds: How long to work.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _per_second(torch.ones(NUMEL), seconds)
    finally:
        torch.set_num_threads(threads)


def _per_second(values: torch.Tensor, seconds: float) -> float:
    result = torch.empty_like(values)
    count = 0
    began = time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        torch.sin(values, out=result)
        count += 1
    return count / passed


def threads_seconds(fair: int, seconds: float) -> tuple[float, float]:
    """One operation with torch's own number of threads, and with `fair` of them; in turns, of which the usual counts.

    Args:
        fair: Threads for which there are cores.
        seconds: Each of the six turns.
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
    """The clocks of the GPUs while this process's own one works."""
    if torch.cuda.is_available():
        square = torch.ones(4096, 4096, device="cuda")
        for _ in range(50):
            square = square @ square.clamp(max=1e-4)
    found = local.gpu_states()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found
