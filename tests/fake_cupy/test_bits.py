"""What CUDA's own kernels compute, launched as on a GPU, has the bits of the CPU path."""

import pytest
import torch

from fake_cuda.drive import REBUILT, on_cpu, on_cuda
from fake_cuda.test_compressed_streams import APPROXIMATE
from fake_cupy.jobs import COMPRESSORS, job
from kernels_on_cpu.emulator import Emulator


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_the_kernels_of_cuda_give_the_bits_of_the_cpu(compressor: str, emulated: Emulator) -> None:
    body = job(compressor, (REBUILT,) * 4, quiet=True)
    results, _ = on_cuda(4, body, emulated=emulated)
    for have, want in zip(results, on_cpu(4, body), strict=True):
        for one, other in zip(have, want, strict=True):
            for mine, theirs in zip(one, other, strict=True):
                if compressor in APPROXIMATE:
                    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
                else:
                    assert torch.equal(mine, theirs)
