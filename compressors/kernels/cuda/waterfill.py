"""A few bits an element, shared out between blocks, on CUDA: the launches of csrc/cuda/waterfill.cu."""

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.kernels.cuda.launch import (
    address,
    blocks_of_pieces,
    check_pieces,
    check_rows,
    check_tensors,
)
from gradwire.compressors.kernels.reference import WATERFILL_BITS, WATERFILL_GROUP, waterfill_nbytes

_THREADS = 512
"""Of a CTA, which has a group: kThreads of csrc/cuda/waterfill.cu, one for each block."""


def _check_bits(bits: int) -> None:
    if bits not in WATERFILL_BITS:
        raise ValueError(f"`bits` is {bits}; wanted one of {', '.join(map(str, WATERFILL_BITS))}")


def _launch(kernel: str, device: torch.device, groups: int, arguments: tuple[cuda_launch.Argument, ...]) -> None:
    cuda_launch.launch("waterfill", kernel, device, groups, arguments, _THREADS)


def waterfill_encode(
    bits: int, gradient: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor
) -> None:
    """See reference.waterfill_encode."""
    _check_bits(bits)
    check_tensors(gradient.device, waterfill_nbytes(gradient.numel(), bits), torch.uint8, payload=payload)
    waterfill_encode_pieces(bits, gradient, residual, new_residual, payload.unsqueeze(0), gradient.numel())


def waterfill_encode_pieces(
    bits: int, gradient: Tensor, residual: Tensor | None, new_residual: Tensor | None, payloads: Tensor, width: int
) -> None:
    """See reference.waterfill_encode_pieces; one launch."""
    _check_bits(bits)
    device, numel = gradient.device, gradient.numel()
    check_tensors(device, numel, torch.float32, gradient=gradient, residual=residual, new_residual=new_residual)
    check_pieces(device, payloads, numel, width, waterfill_nbytes(width, bits))
    _launch(
        "waterfill_encode",
        device,
        blocks_of_pieces(numel, width, WATERFILL_GROUP),
        (
            np.int32(bits),
            gradient.data_ptr(),
            address(residual),
            address(new_residual),
            payloads.data_ptr(),
            payloads.stride(0),
            numel,
            width,
        ),
    )


def waterfill_decode_pieces(bits: int, payloads: Tensor, target: Tensor, width: int) -> None:
    """See reference.waterfill_decode_pieces; one launch."""
    _check_bits(bits)
    device, numel = target.device, target.numel()
    check_tensors(device, numel, torch.float32, target=target)
    check_pieces(device, payloads, numel, width, waterfill_nbytes(width, bits))
    _launch(
        "waterfill_decode_pieces",
        device,
        blocks_of_pieces(numel, width, WATERFILL_GROUP),
        (np.int32(bits), payloads.data_ptr(), payloads.stride(0), target.data_ptr(), numel, width),
    )


def waterfill_decode_reduce(bits: int, payloads: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """See reference.waterfill_decode_reduce."""
    _check_bits(bits)
    device, numel = target.device, target.numel()
    check_tensors(device, numel, torch.float32, addend=addend, target=target)
    check_rows(device, "payloads", payloads, waterfill_nbytes(numel, bits))
    _launch(
        "waterfill_decode_reduce",
        device,
        -(-numel // WATERFILL_GROUP),
        (
            np.int32(bits),
            payloads.data_ptr(),
            payloads.stride(0),
            len(payloads),
            address(addend),
            target.data_ptr(),
            numel,
        ),
    )


def waterfill_reduce_encode(
    bits: int,
    payloads: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    reduced: Tensor,
    numel: int,
) -> None:
    """See reference.waterfill_reduce_encode."""
    _check_bits(bits)
    device = reduced.device
    check_tensors(device, numel, torch.float32, residual=residual, new_residual=new_residual)
    check_tensors(device, waterfill_nbytes(numel, bits), torch.uint8, reduced=reduced)
    check_rows(device, "payloads", payloads, waterfill_nbytes(numel, bits))
    _launch(
        "waterfill_reduce_encode",
        device,
        -(-numel // WATERFILL_GROUP),
        (
            np.int32(bits),
            payloads.data_ptr(),
            payloads.stride(0),
            len(payloads),
            address(residual),
            address(new_residual),
            reduced.data_ptr(),
            numel,
        ),
    )
