"""The CUDA kernels behind tensors: each function is the twin of the one in compressors/kernels/reference/codecs.py.

Payloads are the same bits as on the CPU. Every function returns as soon as its kernels are on torch's current stream.
"""

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.kernels.cuda.dgc import dgc_step, dgc_step_many, scatter_add
from gradwire.compressors.kernels.cuda.launch import address, check_pieces, check_rows, check_tensors
from gradwire.compressors.kernels.cuda.powersgd import (
    orthogonalize_many,
    powersgd_back_project,
    powersgd_project,
    powersgd_restore,
)
from gradwire.compressors.kernels.reference.codecs import ONEBIT_BLOCK, QUANTIZE_BLOCK, onebit_nbytes, quantize_nbytes

__all__ = [
    "cast_decode_reduce",
    "cast_encode",
    "cast_serve",
    "dgc_step",
    "dgc_step_many",
    "onebit_decode_pieces",
    "onebit_decode_reduce",
    "onebit_encode",
    "onebit_encode_pieces",
    "onebit_nbytes",
    "onebit_serve",
    "orthogonalize_many",
    "powersgd_back_project",
    "powersgd_project",
    "powersgd_restore",
    "quantize_decode_pieces",
    "quantize_decode_reduce",
    "quantize_encode",
    "quantize_encode_pieces",
    "quantize_nbytes",
    "quantize_serve",
    "scatter_add",
]

_FORMATS = {torch.float16: "f16", torch.bfloat16: "bf16"}
_RUN = 8
"""kRun of csrc/cuda/formats.cuh: elements that a thread decodes at once."""


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
        "cast",
        f"cast_encode_{_format('target', target)}",
        device,
        cuda_launch.blocks_for(device, -(-numel // _RUN)),
        (gradient.data_ptr(), np.float32(scale), address(residual), address(left), target.data_ptr(), numel),
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
        cuda_launch.blocks_for(device, -(-numel // _RUN)),
        (sources.data_ptr(), sources.stride(0), len(sources), address(addend), target.data_ptr(), numel),
    )


def cast_serve(sources: Tensor, residual: Tensor | None, left: Tensor | None, answer: Tensor) -> None:
    """See reference.cast_serve."""
    device, numel = answer.device, answer.numel()
    check_tensors(device, numel, torch.float32, residual=residual, left=left)
    check_tensors(device, numel, sources.dtype, answer=answer)
    check_rows(device, "sources", sources, 2 * numel)
    cuda_launch.launch(
        "cast",
        f"cast_serve_{_format('sources', sources)}",
        device,
        cuda_launch.blocks_for(device, -(-numel // _RUN)),
        (
            sources.data_ptr(),
            sources.stride(0),
            len(sources),
            address(residual),
            address(left),
            answer.data_ptr(),
            numel,
        ),
    )


def _blocks_of_pieces(numel: int, width: int, block: int) -> int:
    """Blocks of all pieces together: each piece begins a block of its own."""
    return numel // width * -(-width // block) + -(-(numel % width) // block)


def onebit_encode(gradient: Tensor, residual: Tensor | None, left: Tensor | None, payload: Tensor) -> None:
    """See reference.onebit_encode."""
    check_tensors(gradient.device, onebit_nbytes(gradient.numel()), torch.uint8, payload=payload)
    onebit_encode_pieces(gradient, residual, left, payload.unsqueeze(0), gradient.numel())


def onebit_encode_pieces(
    gradient: Tensor, residual: Tensor | None, left: Tensor | None, payloads: Tensor, width: int
) -> None:
    """See reference.onebit_encode_pieces; one launch."""
    device, numel = gradient.device, gradient.numel()
    check_tensors(device, numel, torch.float32, gradient=gradient, residual=residual, left=left)
    check_pieces(device, payloads, numel, width, onebit_nbytes(width))
    blocks = _blocks_of_pieces(numel, width, ONEBIT_BLOCK)
    cuda_launch.launch(
        "onebit",
        "onebit_encode",
        device,
        cuda_launch.blocks_for(device, 32 * blocks),
        (
            gradient.data_ptr(),
            address(residual),
            address(left),
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
    blocks = _blocks_of_pieces(numel, width, ONEBIT_BLOCK)
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


def onebit_serve(payloads: Tensor, residual: Tensor | None, left: Tensor | None, answer: Tensor, numel: int) -> None:
    """See reference.onebit_serve."""
    device = answer.device
    check_tensors(device, numel, torch.float32, residual=residual, left=left)
    check_tensors(device, onebit_nbytes(numel), torch.uint8, answer=answer)
    check_rows(device, "payloads", payloads, onebit_nbytes(numel))
    cuda_launch.launch(
        "onebit",
        "onebit_serve",
        device,
        cuda_launch.blocks_for(device, 32 * -(-numel // ONEBIT_BLOCK)),
        (
            payloads.data_ptr(),
            payloads.stride(0),
            len(payloads),
            address(residual),
            address(left),
            answer.data_ptr(),
            numel,
        ),
    )


def _check_bits(bits: int) -> None:
    if bits not in (4, 8):
        raise ValueError(f"`bits` is {bits}; wanted 4 or 8")


def _rounding(key: int | None) -> tuple[np.int32, np.uint32]:
    """Whether codes are rounded at random, and by which key."""
    return np.int32(key is not None), np.uint32(key or 0)


def quantize_encode(
    bits: int, gradient: Tensor, residual: Tensor | None, left: Tensor | None, payload: Tensor, key: int | None
) -> None:
    """See reference.quantize_encode."""
    _check_bits(bits)
    check_tensors(gradient.device, quantize_nbytes(gradient.numel(), bits), torch.uint8, payload=payload)
    quantize_encode_pieces(bits, gradient, residual, left, payload.unsqueeze(0), gradient.numel(), key)


def quantize_encode_pieces(
    bits: int,
    gradient: Tensor,
    residual: Tensor | None,
    left: Tensor | None,
    payloads: Tensor,
    width: int,
    key: int | None,
) -> None:
    """See reference.quantize_encode_pieces; one launch."""
    _check_bits(bits)
    device, numel = gradient.device, gradient.numel()
    check_tensors(device, numel, torch.float32, gradient=gradient, residual=residual, left=left)
    check_pieces(device, payloads, numel, width, quantize_nbytes(width, bits))
    blocks = _blocks_of_pieces(numel, width, QUANTIZE_BLOCK)
    cuda_launch.launch(
        "quantize",
        f"quantize_encode_{bits}",
        device,
        cuda_launch.blocks_for(device, 32 * blocks),
        (
            gradient.data_ptr(),
            address(residual),
            address(left),
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
    runs = _blocks_of_pieces(numel, width, 32 * _RUN)
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
        cuda_launch.blocks_for(device, -(-numel // _RUN)),
        (payloads.data_ptr(), payloads.stride(0), len(payloads), address(addend), target.data_ptr(), numel),
    )


def quantize_serve(
    bits: int,
    payloads: Tensor,
    residual: Tensor | None,
    left: Tensor | None,
    answer: Tensor,
    numel: int,
    key: int | None,
) -> None:
    """See reference.quantize_serve."""
    _check_bits(bits)
    device = answer.device
    check_tensors(device, numel, torch.float32, residual=residual, left=left)
    check_tensors(device, quantize_nbytes(numel, bits), torch.uint8, answer=answer)
    check_rows(device, "payloads", payloads, quantize_nbytes(numel, bits))
    cuda_launch.launch(
        "quantize",
        f"quantize_serve_{bits}",
        device,
        cuda_launch.blocks_for(device, 32 * -(-numel // QUANTIZE_BLOCK)),
        (
            payloads.data_ptr(),
            payloads.stride(0),
            len(payloads),
            address(residual),
            address(left),
            answer.data_ptr(),
            numel,
            *_rounding(key),
        ),
    )
