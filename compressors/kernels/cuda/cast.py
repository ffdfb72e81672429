"""float16 and bfloat16 payloads on CUDA: the launches of csrc/cuda/cast.cu."""

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.kernels.cuda.launch import RUN, address, check_rows, check_tensors

_FORMATS = {torch.float16: "f16", torch.bfloat16: "bf16"}


def _format(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in _FORMATS:
        raise ValueError(f"`{name}` is {tensor.dtype}; wanted torch.float16 or torch.bfloat16")
    return _FORMATS[tensor.dtype]


def cast_encode(
    gradient: Tensor, scale: float, residual: Tensor | None, new_residual: Tensor | None, target: Tensor
) -> None:
    """See reference.cast_encode."""
    device, numel = gradient.device, gradient.numel()
    check_tensors(device, numel, torch.float32, gradient=gradient, residual=residual, new_residual=new_residual)
    check_tensors(device, numel, target.dtype, target=target)
    cuda_launch.launch(
        "cast",
        f"cast_encode_{_format('target', target)}",
        device,
        cuda_launch.blocks_for(device, -(-numel // RUN)),
        (gradient.data_ptr(), np.float32(scale), address(residual), address(new_residual), target.data_ptr(), numel),
    )


def cast_decode_reduce(sources: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """See reference.cast_decode_reduce."""
    device, numel = target.device, target.numel()
    check_tensors(device, numel, torch.float32, addend=addend, target=target)
    check_rows(device, "sources", sources, 2 * numel)
    cuda_launch.launch(
        "cast",
        f"cast_decode_reduce_{_format('sources', sources)}",
        device,
        cuda_launch.blocks_for(device, -(-numel // RUN)),
        (sources.data_ptr(), sources.stride(0), len(sources), address(addend), target.data_ptr(), numel),
    )


def cast_reduce_encode(sources: Tensor, residual: Tensor | None, new_residual: Tensor | None, reduced: Tensor) -> None:
    """See reference.cast_reduce_encode."""
    device, numel = reduced.device, reduced.numel()
    check_tensors(device, numel, torch.float32, residual=residual, new_residual=new_residual)
    check_tensors(device, numel, sources.dtype, reduced=reduced)
    check_rows(device, "sources", sources, 2 * numel)
    cuda_launch.launch(
        "cast",
        f"cast_reduce_encode_{_format('sources', sources)}",
        device,
        cuda_launch.blocks_for(device, -(-numel // RUN)),
        (
            sources.data_ptr(),
            sources.stride(0),
            len(sources),
            address(residual),
            address(new_residual),
            reduced.data_ptr(),
            numel,
        ),
    )
