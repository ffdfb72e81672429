"""8 or 4 bits an element on CUDA: the launches of csrc/cuda/quantize.cu."""

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.kernels.cuda.launch import (
    RUN,
    address,
    blocks_of_pieces,
    check_pieces,
    check_rows,
    check_tensors,
)
from gradwire.compressors.kernels.reference import QUANTIZE_BLOCK, quantize_nbytes


def _check_bits(bits: int) -> None:
    if bits not in (4, 8):
        raise ValueError(f"`bits` is {bits}; wanted 4 or 8")


def _rounding(key: int | None) -> tuple[np.int32, np.uint32]:
    """Whether codes are rounded at random, and by which key."""
    return np.int32(key is not None), np.uint32(key or 0)


def quantize_encode(
    bits: int, gradient: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor, key: int | None
) -> None:
    """See reference.quantize_encode."""
    _check_bits(bits)
    check_tensors(gradient.device, quantize_nbytes(gradient.numel(), bits), torch.uint8, payload=payload)
    quantize_encode_pieces(bits, gradient, residual, new_residual, payload.unsqueeze(0), gradient.numel(), key)


def quantize_encode_pieces(
    bits: int,
    gradient: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    payloads: Tensor,
    width: int,
    key: int | None,
) -> None:
    """See reference.quantize_encode_pieces; one launch."""
    _check_bits(bits)
    device, numel = gradient.device, gradient.numel()
    check_tensors(device, numel, torch.float32, gradient=gradient, residual=residual, new_residual=new_residual)
    check_pieces(device, payloads, numel, width, quantize_nbytes(width, bits))
    blocks = blocks_of_pieces(numel, width, QUANTIZE_BLOCK)
    cuda_launch.launch(
        "quantize",
        f"quantize_encode_{bits}",
        device,
        cuda_launch.blocks_for(device, 32 * blocks),
        (
            gradient.data_ptr(),
            address(residual),
            address(new_residual),
            payloads.data_ptr(),
            payloads.stride(0),
            numel,
            width,
            blocks,
            *_rounding(key),
        ),
    )


def quantize_decode_pieces(bits: int, payloads: Tensor, target: Tensor, width: int) -> None:
    """See reference.quantize_decode_pieces; one launch."""
    _check_bits(bits)
    device, numel = target.device, target.numel()
    check_tensors(device, numel, torch.float32, target=target)
    check_pieces(device, payloads, numel, width, quantize_nbytes(width, bits))
    runs = blocks_of_pieces(numel, width, 32 * RUN)
    cuda_launch.launch(
        "quantize",
        f"quantize_decode_pieces_{bits}",
        device,
        cuda_launch.blocks_for(device, 32 * runs),
        (payloads.data_ptr(), payloads.stride(0), target.data_ptr(), numel, width, runs),
    )


def quantize_decode_reduce(bits: int, payloads: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """See reference.quantize_decode_reduce."""
    _check_bits(bits)
    device, numel = target.device, target.numel()
    check_tensors(device, numel, torch.float32, addend=addend, target=target)
    check_rows(device, "payloads", payloads, quantize_nbytes(numel, bits))
    cuda_launch.launch(
        "quantize",
        f"quantize_decode_reduce_{bits}",
        device,
        cuda_launch.blocks_for(device, -(-numel // RUN)),
        (payloads.data_ptr(), payloads.stride(0), len(payloads), address(addend), target.data_ptr(), numel),
    )


def quantize_reduce_encode(
    bits: int,
    payloads: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    reduced: Tensor,
    numel: int,
    key: int | None,
) -> None:
    """See reference.quantize_reduce_encode."""
    _check_bits(bits)
    device = reduced.device
    check_tensors(device, numel, torch.float32, residual=residual, new_residual=new_residual)
    check_tensors(device, quantize_nbytes(numel, bits), torch.uint8, reduced=reduced)
    check_rows(device, "payloads", payloads, quantize_nbytes(numel, bits))
    cuda_launch.launch(
        "quantize",
        f"quantize_reduce_encode_{bits}",
        device,
        cuda_launch.blocks_for(device, 32 * -(-numel // QUANTIZE_BLOCK)),
        (
            payloads.data_ptr(),
            payloads.stride(0),
            len(payloads),
            address(residual),
            address(new_residual),
            reduced.data_ptr(),
            numel,
            *_rounding(key),
        ),
    )
