"""The CUDA kernels behind tensors: each function is the twin of the one in compressors/reference.py.

Payloads are the same bits as on the CPU. Every function returns as soon as its kernels are on torch's current stream.
"""

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors import cuda_launch
from gradwire.compressors.cuda_dgc import dgc_step, scatter_add
from gradwire.compressors.cuda_launch import address, check_rows, check_tensors
from gradwire.compressors.cuda_powersgd import (
    orthogonalize_many,
    powersgd_back_project,
    powersgd_project,
    powersgd_restore,
)

__all__ = [
    "cast_decode_reduce", "cast_encode", "dgc_step", "onebit_decode_reduce", "onebit_encode", "onebit_nbytes",
    "onebit_serve", "orthogonalize_many", "powersgd_back_project", "powersgd_project", "powersgd_restore",
    "quantize_decode_reduce", "quantize_encode", "quantize_nbytes", "scatter_add",
]

_FORMATS = {torch.float16: "f16", torch.bfloat16: "bf16"}


def _format(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in _FORMATS:
        raise ValueError(f"`{name}` is {tensor.dtype}; wanted torch.float16 or torch.bfloat16")
    return _FORMATS[tensor.dtype]


def cast_encode(gradient: Tensor, scale: float, residual: Tensor | None, left: Tensor | None, target: Tensor) -> None:
    """See reference.cast_encode."""
    device, numel = gradient.device, gradient.numel()
    check_tensors(device, numel, torch.float32, gradient=gradient, residual=residual, left=left)
    check_tensors(device, numel, target.dtype, target=target)
    cuda_launch.launch(
        "cast", f"cast_encode_{_format('target', target)}", device, cuda_launch.blocks_for(device, -(-numel // 8)),
        (gradient.data_ptr(), np.float32(scale), address(residual), address(left), target.data_ptr(), numel))


def cast_decode_reduce(sources: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """See reference.cast_decode_reduce."""
    device, numel = target.device, target.numel()
    check_tensors(device, numel, torch.float32, addend=addend, target=target)
    check_rows(device, "sources", sources, 2 * numel)
    cuda_launch.launch(
        "cast", f"cast_decode_reduce_{_format('sources', sources)}", device,
        cuda_launch.blocks_for(device, -(-numel // 8)),
        (sources.data_ptr(), sources.stride(0), len(sources), address(addend), target.data_ptr(), numel))


def onebit_nbytes(numel: int) -> int:
    """Bytes of a 1-bit payload: a float32 scale for each 1024 elements and a bit for each one."""
    return -(-numel // 1024) * 4 + -(-numel // 8)


def _onebit_blocks(device: torch.device, numel: int) -> int:
    return cuda_launch.blocks_for(device, -(-numel // 1024) * 32)


def onebit_encode(gradient: Tensor, residual: Tensor | None, left: Tensor | None, payload: Tensor) -> None:
    """See reference.onebit_encode."""
    device, numel = gradient.device, gradient.numel()
    check_tensors(device, numel, torch.float32, gradient=gradient, residual=residual, left=left)
    check_tensors(device, onebit_nbytes(numel), torch.uint8, payload=payload)
    cuda_launch.launch("onebit", "onebit_encode", device, _onebit_blocks(device, numel),
                       (gradient.data_ptr(), address(residual), address(left), payload.data_ptr(), numel))


def onebit_decode_reduce(payloads: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """See reference.onebit_decode_reduce."""
    device, numel = target.device, target.numel()
    check_tensors(device, numel, torch.float32, addend=addend, target=target)
    check_rows(device, "payloads", payloads, onebit_nbytes(numel))
    cuda_launch.launch(
        "onebit", "onebit_decode_reduce", device, _onebit_blocks(device, numel),
        (payloads.data_ptr(), payloads.stride(0), len(payloads), address(addend), target.data_ptr(), numel))


def onebit_serve(
    payloads: Tensor, residual: Tensor | None, left: Tensor | None, answer: Tensor, numel: int
) -> None:
    """See reference.onebit_serve."""
    device = answer.device
    check_tensors(device, numel, torch.float32, residual=residual, left=left)
    check_tensors(device, onebit_nbytes(numel), torch.uint8, answer=answer)
    check_rows(device, "payloads", payloads, onebit_nbytes(numel))
    cuda_launch.launch(
        "onebit", "onebit_serve", device, _onebit_blocks(device, numel),
        (payloads.data_ptr(), payloads.stride(0), len(payloads), address(residual), address(left), answer.data_ptr(),
         numel))


def quantize_nbytes(numel: int, bits: int) -> int:
    """Bytes of a payload of `bits` an element: (unit, low) in float32 for each 512 elements, and the codes."""
    return -(-numel // 512) * 8 + -(-numel * bits // 8)


def _check_bits(bits: int) -> None:
    if bits not in (4, 8):
        raise ValueError(f"`bits` is {bits}; wanted 4 or 8")


def quantize_encode(
    bits: int, gradient: Tensor, residual: Tensor | None, left: Tensor | None, payload: Tensor, key: int | None
) -> None:
    """See reference.quantize_encode."""
    _check_bits(bits)
    device, numel = gradient.device, gradient.numel()
    check_tensors(device, numel, torch.float32, gradient=gradient, residual=residual, left=left)
    check_tensors(device, quantize_nbytes(numel, bits), torch.uint8, payload=payload)
    cuda_launch.launch(
        "quantize", f"quantize_encode_{bits}", device, cuda_launch.blocks_for(device, -(-numel // 512) * 32),
        (gradient.data_ptr(), address(residual), address(left), payload.data_ptr(), numel, np.int32(key is not None),
         np.uint32(key or 0)))


def quantize_decode_reduce(bits: int, payloads: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """See reference.quantize_decode_reduce."""
    _check_bits(bits)
    device, numel = target.device, target.numel()
    check_tensors(device, numel, torch.float32, addend=addend, target=target)
    check_rows(device, "payloads", payloads, quantize_nbytes(numel, bits))
    cuda_launch.launch(
        "quantize", f"quantize_decode_reduce_{bits}", device, cuda_launch.blocks_for(device, -(-numel // 8)),
        (payloads.data_ptr(), payloads.stride(0), len(payloads), address(addend), target.data_ptr(), numel))
