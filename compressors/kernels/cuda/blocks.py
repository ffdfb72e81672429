"""The four operations of block codecs on CUDA: each checks its tensors and is one launch."""

import torch
from torch import Tensor

from gradwire.compressors.kernels.block import BlockFormat
from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.kernels.cuda.families import Family, Stage, family_of
from gradwire.compressors.kernels.cuda.launch import (
    Argument,
    address,
    blocks_of_pieces,
    check_pieces,
    check_rows,
    check_tensors,
)


def encode_pieces(
    codec: BlockFormat,
    gradient: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    payloads: Tensor,
    width: int,
) -> None:
    """Encodes each run of `width` elements of gradient + residual into its row of `payloads`; one launch."""
    family, device, numel = family_of(codec), gradient.device, gradient.numel()
    check_tensors(device, numel, torch.float32, gradient=gradient, residual=residual, new_residual=new_residual)
    check_pieces(device, payloads, numel, width, codec.wire_nbytes(width))
    addresses = gradient.data_ptr(), address(residual), address(new_residual)
    if family.decode_pieces is None:
        whole = _side_by_side(codec, payloads, numel, width)
        _launch(family, family.encode_pieces, device, numel, numel, (*addresses, _start(family, whole), numel))
        return
    rows = _start(family, payloads), _stride(family, payloads)
    _launch(family, family.encode_pieces, device, numel, width, (*addresses, *rows, numel, width))


def decode_pieces(codec: BlockFormat, payloads: Tensor, target: Tensor, width: int) -> None:
    """Decodes each row of `payloads` into its run of `width` elements of `target`; one launch."""
    family, device, numel = family_of(codec), target.device, target.numel()
    check_tensors(device, numel, torch.float32, target=target)
    check_pieces(device, payloads, numel, width, codec.wire_nbytes(width))
    if family.decode_pieces is None:
        decode_reduce(codec, _side_by_side(codec, payloads, numel, width), None, target)
        return
    rows = _start(family, payloads), _stride(family, payloads)
    _launch(family, family.decode_pieces, device, numel, width, (*rows, target.data_ptr(), numel, width))


def decode_reduce(codec: BlockFormat, payloads: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """Writes `addend` plus the decoded payloads, added in their order, into `target`; one launch."""
    family, device, numel = family_of(codec), target.device, target.numel()
    check_tensors(device, numel, torch.float32, addend=addend, target=target)
    check_rows(device, "payloads", payloads, codec.wire_nbytes(numel))
    rows = _start(family, payloads), _stride(family, payloads), len(payloads)
    arguments = (*rows, address(addend), target.data_ptr(), numel)
    _launch(family, family.decode_reduce, device, numel, numel, arguments)


def reduce_encode(
    codec: BlockFormat,
    payloads: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    reduced: Tensor,
    numel: int,
) -> None:
    """Encodes the sum of the decoded payloads plus `residual` into `reduced`, on a CUDA device.

    One launch; for a codec without a kernel of this kind two, of `decode_reduce` and `encode_pieces`, with a temporary
    tensor of the sum.

    Args:
        codec: Format of the payloads.
        payloads: (workers, at least wire_nbytes(numel)) uint8: the workers' payloads of the owner's part.
        residual: (numel) float32, compression error of the owner's reduced payloads so far; or None.
        new_residual: (numel) float32, receives the sum plus `residual` less what `reduced` decodes to; None keeps
            nothing.
        reduced: (wire_nbytes(numel)) uint8, overwritten.
        numel: Elements of the owner's part.
    """
    family, device = family_of(codec), reduced.device
    check_tensors(device, numel, torch.float32, residual=residual, new_residual=new_residual)
    check_tensors(device, codec.wire_nbytes(numel), torch.uint8, reduced=reduced)
    check_rows(device, "payloads", payloads, codec.wire_nbytes(numel))
    if family.reduce_encode is None:
        total = torch.empty(numel, dtype=torch.float32, device=device)
        decode_reduce(codec, payloads, None, total)
        encode_pieces(codec, total, residual, new_residual, reduced.unsqueeze(0), numel)
        return
    rows = _start(family, payloads), _stride(family, payloads), len(payloads)
    arguments = (*rows, address(residual), address(new_residual), _start(family, reduced), numel)
    _launch(family, family.reduce_encode, device, numel, numel, arguments)


def _launch(
    family: Family, stage: Stage, device: torch.device, numel: int, width: int, arguments: tuple[Argument, ...]
) -> None:
    units = blocks_of_pieces(numel, width, stage.unit) if numel else 0
    if family.cta_each:
        ctas = units
    elif stage.resident:
        ctas = cuda_launch.blocks_in_waves(device, stage.lanes * units, stage.resident)
    else:
        ctas = cuda_launch.blocks_for(device, stage.lanes * units)
    counts = (units,) if stage.counted else ()
    every = (*stage.first, *arguments, *counts, *stage.last)
    cuda_launch.launch(family.file, stage.kernel, device, ctas, every, family.threads)


def _start(family: Family, payloads: Tensor) -> int:
    """Returns the address of payloads.

    Raises:
        ValueError: The address is no multiple of `family.word`.
    """
    if payloads.data_ptr() % family.word:
        raise ValueError(f"`payloads` begin at an odd address; wanted a multiple of {family.word} bytes")
    return payloads.data_ptr()


def _stride(family: Family, payloads: Tensor) -> int:
    if payloads.stride(0) % family.word:
        raise ValueError(f"`payloads` are {payloads.stride(0)} bytes apart; wanted a multiple of {family.word}")
    return payloads.stride(0) // family.word


def _side_by_side(codec: BlockFormat, payloads: Tensor, numel: int, width: int) -> Tensor:
    """Returns the payloads of all pieces as the payload of the whole tensor, (1, wire_nbytes(numel)) uint8.

    Raises:
        ValueError: There are gaps between the payloads.
    """
    nbytes = codec.wire_nbytes(numel)
    if len(payloads) > 1 and payloads.stride(0) != codec.wire_nbytes(width):
        raise ValueError(f"`payloads` are {payloads.stride(0)} bytes apart; wanted {codec.wire_nbytes(width)}")
    return payloads.as_strided((1, nbytes), (nbytes, 1), payloads.storage_offset())
