"""The largest few of each chunk on CUDA: the launches of csrc/cuda/chunk_topk.cu."""

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.kernels.cuda.launch import (
    THREADS,
    address,
    blocks_of_pieces,
    check_pieces,
    check_rows,
    check_tensors,
)
from gradwire.compressors.kernels.reference import ChunkRule, chunk_topk_nbytes


def _words(rule: ChunkRule) -> tuple[np.int32, np.int32]:
    return np.int32(rule.chunk), np.int32(rule.keep)


def chunk_topk_encode(
    rule: ChunkRule, gradient: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor
) -> None:
    """See reference.chunk_topk_encode."""
    check_tensors(gradient.device, chunk_topk_nbytes(gradient.numel(), rule), torch.uint8, payload=payload)
    chunk_topk_encode_pieces(rule, gradient, residual, new_residual, payload.unsqueeze(0), gradient.numel())


def chunk_topk_encode_pieces(
    rule: ChunkRule,
    gradient: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    payloads: Tensor,
    width: int,
) -> None:
    """See reference.chunk_topk_encode_pieces; one launch."""
    device, numel = gradient.device, gradient.numel()
    check_tensors(device, numel, torch.float32, gradient=gradient, residual=residual, new_residual=new_residual)
    check_pieces(device, payloads, numel, width, chunk_topk_nbytes(width, rule))
    chunks = blocks_of_pieces(numel, width, rule.chunk)
    cuda_launch.launch(
        "chunk_topk",
        "chunk_topk_encode",
        device,
        cuda_launch.blocks_for(device, THREADS * chunks),
        (
            *_words(rule),
            np.float32(rule.decay),
            gradient.data_ptr(),
            address(residual),
            address(new_residual),
            payloads.data_ptr(),
            payloads.stride(0),
            numel,
            width,
            chunks,
        ),
    )


def chunk_topk_decode_pieces(rule: ChunkRule, payloads: Tensor, target: Tensor, width: int) -> None:
    """See reference.chunk_topk_decode_pieces; one launch."""
    device, numel = target.device, target.numel()
    check_tensors(device, numel, torch.float32, target=target)
    check_pieces(device, payloads, numel, width, chunk_topk_nbytes(width, rule))
    chunks = blocks_of_pieces(numel, width, rule.chunk)
    cuda_launch.launch(
        "chunk_topk",
        "chunk_topk_decode_pieces",
        device,
        cuda_launch.blocks_for(device, THREADS * chunks),
        (*_words(rule), payloads.data_ptr(), payloads.stride(0), target.data_ptr(), numel, width, chunks),
    )


def chunk_topk_decode_reduce(rule: ChunkRule, payloads: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """See reference.chunk_topk_decode_reduce."""
    device, numel = target.device, target.numel()
    check_tensors(device, numel, torch.float32, addend=addend, target=target)
    check_rows(device, "payloads", payloads, chunk_topk_nbytes(numel, rule))
    chunks = -(-numel // rule.chunk)
    cuda_launch.launch(
        "chunk_topk",
        "chunk_topk_decode_reduce",
        device,
        cuda_launch.blocks_for(device, THREADS * chunks),
        (
            *_words(rule),
            payloads.data_ptr(),
            payloads.stride(0),
            len(payloads),
            address(addend),
            target.data_ptr(),
            numel,
            chunks,
        ),
    )


def chunk_topk_reduce_encode(
    rule: ChunkRule,
    payloads: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    reduced: Tensor,
    numel: int,
) -> None:
    """See reference.chunk_topk_reduce_encode."""
    device = reduced.device
    check_tensors(device, numel, torch.float32, residual=residual, new_residual=new_residual)
    check_tensors(device, chunk_topk_nbytes(numel, rule), torch.uint8, reduced=reduced)
    check_rows(device, "payloads", payloads, chunk_topk_nbytes(numel, rule))
    chunks = -(-numel // rule.chunk)
    cuda_launch.launch(
        "chunk_topk",
        "chunk_topk_reduce_encode",
        device,
        cuda_launch.blocks_for(device, THREADS * chunks),
        (
            *_words(rule),
            np.float32(rule.decay),
            payloads.data_ptr(),
            payloads.stride(0),
            len(payloads),
            address(residual),
            address(new_residual),
            reduced.data_ptr(),
            numel,
            chunks,
        ),
    )
