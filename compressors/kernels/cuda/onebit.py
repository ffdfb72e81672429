"""One bit an element on CUDA: the launches of csrc/cuda/onebit.cu."""

import torch
from torch import Tensor

from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.kernels.cuda.launch import address, blocks_of_pieces, check_pieces, check_rows, check_tensors
from gradwire.compressors.kernels.reference import ONEBIT_BLOCK, onebit_nbytes

_RESIDENT = 3
"""kResident of csrc/cuda/onebit.cu: CTAs of the encoding kernel that a multiprocessor keeps."""


def onebit_encode(gradient: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor) -> None:
    """See reference.onebit_encode."""
    check_tensors(gradient.device, onebit_nbytes(gradient.numel()), torch.uint8, payload=payload)
    onebit_encode_pieces(gradient, residual, new_residual, payload.unsqueeze(0), gradient.numel())


def onebit_encode_pieces(
    gradient: Tensor, residual: Tensor | None, new_residual: Tensor | None, payloads: Tensor, width: int
) -> None:
    """See reference.onebit_encode_pieces; one launch."""
    device, numel = gradient.device, gradient.numel()
    check_tensors(device, numel, torch.float32, gradient=gradient, residual=residual, new_residual=new_residual)
    check_pieces(device, payloads, numel, width, onebit_nbytes(width))
    blocks = blocks_of_pieces(numel, width, ONEBIT_BLOCK)
    cuda_launch.launch(
        "onebit",
        "onebit_encode",
        device,
        cuda_launch.blocks_in_waves(device, 32 * blocks, _RESIDENT),
        (
            gradient.data_ptr(),
            address(residual),
            address(new_residual),
            payloads.data_ptr(),
            payloads.stride(0),
            numel,
            width,
            blocks,
        ),
    )


def onebit_decode_pieces(payloads: Tensor, target: Tensor, width: int) -> None:
    """See reference.onebit_decode_pieces; one launch."""
    device, numel = target.device, target.numel()
    check_tensors(device, numel, torch.float32, target=target)
    check_pieces(device, payloads, numel, width, onebit_nbytes(width))
    blocks = blocks_of_pieces(numel, width, ONEBIT_BLOCK)
    cuda_launch.launch(
        "onebit",
        "onebit_decode_pieces",
        device,
        cuda_launch.blocks_for(device, 32 * blocks),
        (payloads.data_ptr(), payloads.stride(0), target.data_ptr(), numel, width, blocks),
    )


def onebit_decode_reduce(payloads: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """See reference.onebit_decode_reduce."""
    device, numel = target.device, target.numel()
    check_tensors(device, numel, torch.float32, addend=addend, target=target)
    check_rows(device, "payloads", payloads, onebit_nbytes(numel))
    cuda_launch.launch(
        "onebit",
        "onebit_decode_reduce",
        device,
        cuda_launch.blocks_for(device, 32 * -(-numel // ONEBIT_BLOCK)),
        (payloads.data_ptr(), payloads.stride(0), len(payloads), address(addend), target.data_ptr(), numel),
    )


def onebit_reduce_encode(
    payloads: Tensor, residual: Tensor | None, new_residual: Tensor | None, reduced: Tensor, numel: int
) -> None:
    """See reference.onebit_reduce_encode."""
    device = reduced.device
    check_tensors(device, numel, torch.float32, residual=residual, new_residual=new_residual)
    check_tensors(device, onebit_nbytes(numel), torch.uint8, reduced=reduced)
    check_rows(device, "payloads", payloads, onebit_nbytes(numel))
    cuda_launch.launch(
        "onebit",
        "onebit_reduce_encode",
        device,
        cuda_launch.blocks_for(device, 32 * -(-numel // ONEBIT_BLOCK)),
        (
            payloads.data_ptr(),
            payloads.stride(0),
            len(payloads),
            address(residual),
            address(new_residual),
            reduced.data_ptr(),
            numel,
        ),
    )
