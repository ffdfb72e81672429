"""The four operations of block codecs in torch: one piece, and one payload, after the other."""

import torch
from torch import Tensor

from gradwire.compressors.kernels.block import BlockFormat


def encode_pieces(
    codec: BlockFormat,
    gradient: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    payloads: Tensor,
    width: int,
) -> None:
    """Encodes each run of `width` elements of gradient + residual into its row of `payloads`.

    Args:
        codec: Format of the payloads.
        gradient: (n) float32 values to encode; not changed.
        residual: (n) float32 compression error of earlier payloads, which is added; None for none.
        new_residual: (n) float32, overwritten with the compression error of these payloads; None discards it.
        payloads: (pieces, at least wire_nbytes(width)) uint8; each row is overwritten up to its payload's own size.
        width: Elements of a piece, at least 1 if there are any; the last piece may be shorter.
    """
    if not gradient.numel():
        return
    for start, row in zip(range(0, gradient.numel(), width), payloads, strict=False):
        run = slice(start, start + width)
        p = codec.torch_input(gradient[run], None if residual is None else residual[run])
        decoded = codec.torch_encode(p, row[: codec.wire_nbytes(p.numel())])
        if new_residual is not None:
            torch.sub(p, decoded, out=new_residual[run])


def decode_pieces(codec: BlockFormat, payloads: Tensor, target: Tensor, width: int) -> None:
    """Decodes each row of `payloads` into its run of `width` elements: the inverse of encode_pieces.

    Args:
        codec: Format of the payloads.
        payloads: (pieces, at least wire_nbytes(width)) uint8; what is behind a shorter payload is not read.
        target: (n) float32, overwritten with the decoded elements.
        width: Elements of a piece, at least 1 if there are any; the last piece may be shorter.
    """
    if not target.numel():
        return
    for start, row in zip(range(0, target.numel(), width), payloads, strict=False):
        decode_reduce(codec, row[None], None, target[start : start + width])


def decode_reduce(codec: BlockFormat, payloads: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """Writes addend + decode(payloads[0]) + decode(payloads[1]) + ..., in this order, into `target`.

    Args:
        codec: Format of the payloads.
        payloads: (workers, at least wire_nbytes(numel)) uint8, one row at least.
        addend: (numel) float32 that the sum starts from; None starts from zero.
        target: (numel) float32, overwritten with the sum.
    """
    if addend is None:
        total = torch.full_like(target, codec.alone_from if len(payloads) == 1 else 0.0)
    else:
        total = addend.clone()
    for payload in payloads:
        codec.torch_add(payload, total)
    target.copy_(total)


def reduce_encode(
    codec: BlockFormat,
    payloads: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    reduced: Tensor,
    numel: int,
) -> None:
    """Decodes and sums all payloads, and encodes the sum again: the owner's stage of the two-stage exchange.

    Args:
        codec: Format of the payloads.
        payloads: (workers, at least wire_nbytes(numel)) uint8: the workers' payloads of the owner's part.
        residual: (numel) float32, compression error of the owner's reduced payloads so far; or None.
        new_residual: (numel) float32, receives the compression error of `reduced`; or None.
        reduced: (wire_nbytes(numel)) uint8, overwritten with the payload of the sum plus the residual.
        numel: Elements of the owner's part.

    Source: Tang et al., 1-bit Adam, ICML 2021, section 4.
    """
    total = torch.empty(numel, dtype=torch.float32, device=payloads.device)
    decode_reduce(codec, payloads, None, total)
    encode_pieces(codec, total, residual, new_residual, reduced[None], numel)
