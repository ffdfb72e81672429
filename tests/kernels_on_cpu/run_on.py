"""Puts an `Emulator` in the place of CUDA, for the wrappers of compressors/kernels/cuda."""

import pytest
import torch

from gradwire.compressors.kernels.cuda import launch as cuda_launch
from kernels_on_cpu.emulator import Emulator


def run_on(emulated: Emulator, patch: pytest.MonkeyPatch, most_ctas: int = 2) -> torch.device:
    """Makes the wrappers start their kernels on the CPU.

    Args:
        emulated: Runs them.
        patch: Undoes it.
        most_ctas: Few of them, so that the grid-stride loops turn.

    Returns:
        Where the tensors must be.
    """

    def few(device: torch.device, threads: int, limit: int = 0) -> int:
        return min(-(-threads // cuda_launch.THREADS), most_ctas)

    patch.setattr(cuda_launch, "DEVICE_TYPE", "cpu")
    patch.setattr(cuda_launch, "launch", emulated.launch)
    patch.setattr(cuda_launch, "blocks_for", few)
    patch.setattr(cuda_launch, "blocks_in_waves", few)
    patch.setattr(cuda_launch, "stream_of", lambda device: 0)
    return torch.device("cpu")
