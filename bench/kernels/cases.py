"""Cases of `gradwire bench kernels`: each kernel, the bytes it must move, and the best composition in torch.

Compositions are written as a careful user would: preallocated outputs, few passes, NumPy's packbits where it is
faster than torch. Every case works on a few sets of buffers in turn, so that inputs come from memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors.codecs.base import BlockCodec
from gradwire.compressors.codecs.cast import CastCodec
from gradwire.compressors.codecs.onebit import OneBitCodec
from gradwire.compressors.codecs.quantize import QuantizeCodec
from gradwire.compressors.codecs.waterfill import WaterfillCodec
from gradwire.compressors.kernels import reference
from gradwire.compressors.kernels.dispatch import KERNELS_ON
from gradwire.compressors.kernels.reference import DgcRule, DgcState

SETS = 3
"""Sets of buffers: with 25 MiB in each tensor, more than any cache holds."""
WORKERS = 4
RANK = 4
DENSITY = 0.001
Step = Callable[[int], object]
"""Function (number of a set of buffers, below `SETS`) that runs once on these buffers."""


@dataclass(frozen=True, slots=True)
class KernelCase:
    """Kernel to time, with a composition of torch's functions that computes the same.

    A row of the table shows one case.
    """

    name: str
    nbytes: float
    """Bytes that the kernel must read and write at least."""
    ours: Step
    """Run of the kernel."""
    composed: Step
    """Run of the composition."""
    outputs: list[Tensor]
    """Tensors that both write, one for each set, so that a test can compare them."""


def _randn(numel: int, device: torch.device) -> list[Tensor]:
    return [torch.randn(numel, device=device) for _ in range(SETS)]


def _payloads(codec: BlockCodec, gradients: Sequence[Tensor]) -> Tensor:
    """Encodes gradients; returns a uint8 tensor of shape (workers, bytes), one payload in each row."""
    x = gradients[0]
    made = torch.empty(len(gradients), codec.wire_nbytes(x.numel()), dtype=torch.uint8, device=x.device)
    for gradient, payload in zip(gradients, made, strict=True):
        codec.encode(gradient, payload)
    return made


def cast_case(numel: int, device: torch.device) -> KernelCase:
    """Returns the case of scaling a gradient and casting it to float16."""
    x, half, scaled = (
        _randn(numel, device),
        torch.empty(numel, dtype=torch.float16, device=device),
        _randn(numel, device),
    )
    codec = CastCodec("float16", 0.125)

    def composed(i: int) -> None:
        torch.mul(x[i], 0.125, out=scaled[i])
        half.copy_(scaled[i])

    return KernelCase(
        "fp16_encode", 6.0 * numel, lambda i: codec.encode(x[i], half.view(torch.uint8)), composed, [half]
    )


def onebit_encode_case(numel: int, device: torch.device) -> KernelCase:
    """Returns the case of 1-bit encoding: signs and block scales of gradient + residual; the residual is replaced."""
    g, e, p, signs = (_randn(numel, device) for _ in range(4))
    codec = OneBitCodec()
    payload = torch.empty(codec.wire_nbytes(numel), dtype=torch.uint8, device=device)

    def composed(i: int) -> object:
        torch.add(g[i], e[i], out=p[i])
        blocks = p[i].view(-1, 1024)
        scales = torch.abs(p[i], out=signs[i]).view(-1, 1024).mean(1)  # faster than vector_norm along rows
        torch.copysign(scales[:, None], blocks, out=signs[i].view(-1, 1024))
        torch.sub(p[i], signs[i], out=e[i])
        return pack_bits(p[i] >= 0), scales

    return KernelCase(
        "onebit_encode", 12.125 * numel, lambda i: codec.encode_residual(g[i], e[i], e[i], payload), composed, e
    )


def pack_bits(mask: Tensor) -> object:
    """Packs a bool tensor, the lowest bit first: NumPy on the CPU, a weighted sum elsewhere."""
    if mask.is_cpu:
        return np.packbits(mask.numpy(), bitorder="little")
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=mask.device)
    return (mask.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """Unpacks what `pack_bits` packed, as a uint8 tensor of zeros and ones."""
    if packed.is_cpu:
        return torch.from_numpy(np.unpackbits(packed.numpy(), bitorder="little"))
    return (packed[:, None] >> torch.arange(8, device=packed.device) & 1).view(-1)


def onebit_decode_case(numel: int, device: torch.device) -> KernelCase:
    """Returns the case of decoding and adding four workers' 1-bit payloads."""
    codec, target, x = OneBitCodec(), _randn(numel, device), torch.randn(numel, device=device)
    payloads = _payloads(codec, [x] * WORKERS)
    split = codec.wire_nbytes(numel) - numel // 8
    scales = payloads[:, :split].contiguous().view(torch.float32)

    def composed(i: int) -> None:
        total = target[i].view(-1, 1024)
        total.copy_(-scales.sum(0)[:, None].expand_as(total))
        for worker in range(WORKERS):
            bits = unpack_bits(payloads[worker, split:]).view(-1, 1024)
            total.addcmul_(bits, 2 * scales[worker][:, None])

    return KernelCase(
        "onebit_decode_reduce",
        (4 + WORKERS / 8) * numel,
        lambda i: codec.decode_reduce(payloads, None, target[i]),
        composed,
        target,
    )


def quantize_case(bits: int, numel: int, device: torch.device) -> KernelCase:
    """Returns the case of encoding a gradient in block-wise min-max codes of `bits` bits."""
    x, codec = _randn(numel, device), QuantizeCodec(bits)
    payloads = [torch.empty(codec.wire_nbytes(numel), dtype=torch.uint8, device=device) for _ in range(2)]
    levels, split = 2**bits - 1, numel // 512 * 8
    meta, codes_out = payloads[1][:split].view(torch.float32).view(-1, 2), payloads[1][split:]
    scaled = torch.empty(numel // 512, 512, device=device)
    codes = codes_out if bits == 8 else torch.empty(numel, dtype=torch.uint8, device=device)
    pairs = torch.empty(numel // 2, dtype=torch.int16, device=device)

    def composed(i: int) -> None:
        blocks = x[i].view(-1, 512)
        low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)  # nine times as fast as aminmax
        unit = (high - low).div_(levels)
        inverse = torch.where(unit > 0, 1 / unit, 0.0)
        torch.addcmul(0.5 - low * inverse, blocks, inverse, out=scaled)
        codes.copy_(scaled.view(-1))
        meta[:, :1], meta[:, 1:] = unit, low
        if bits == 4:
            torch.bitwise_right_shift(codes.view(torch.int16), 4, out=pairs)
            codes_out.copy_(pairs.bitwise_or_(codes.view(torch.int16)))

    return KernelCase(
        f"int{bits}_encode",
        (4 + bits / 8) * numel,
        lambda i: codec.encode(x[i], payloads[0]),
        composed,
        payloads,
    )


def quantize_decode_case(bits: int, numel: int, device: torch.device) -> KernelCase:
    """Returns the case of decoding and adding four workers' block-wise codes of `bits` bits."""
    codec, target, x = QuantizeCodec(bits), _randn(numel, device), torch.randn(numel, device=device)
    payloads = _payloads(codec, [x] * WORKERS)
    split = numel // 512 * 8
    meta, codes = payloads[:, :split].contiguous().view(torch.float32).view(WORKERS, -1, 2), payloads[:, split:]
    pairs, high = (torch.empty(numel // 2, dtype=torch.int16, device=device) for _ in range(2))

    def unpacked(worker: int) -> Tensor:
        if bits == 8:
            return codes[worker]
        pairs.copy_(codes[worker])
        torch.bitwise_left_shift(pairs, 4, out=high)
        return pairs.bitwise_or_(high).bitwise_and_(0x0F0F).view(torch.uint8)

    def composed(i: int) -> None:
        total = target[i].view(-1, 512)
        total.copy_(meta[:, :, 1].sum(0)[:, None].expand_as(total))
        for worker in range(WORKERS):
            total.addcmul_(unpacked(worker).view(-1, 512), meta[worker, :, :1])

    return KernelCase(
        f"int{bits}_decode_reduce",
        (4 + WORKERS * bits / 8) * numel,
        lambda i: codec.decode_reduce(payloads, None, target[i]),
        composed,
        target,
    )


def waterfill_blocks(numel: int, device: torch.device) -> Tensor:
    """Returns factors for a gradient's elements that give blocks of 32 different magnitudes, as in real gradients."""
    exponents = torch.randn(-(-numel // 32), device=device)
    return torch.exp2(exponents).repeat_interleave(32)[:numel]


def waterfill_case(bits: int, numel: int, device: torch.device) -> KernelCase:
    """Returns the case of encoding a gradient by waterfill, with `bits` bits a value on average."""
    x, codec = [each * waterfill_blocks(numel, device) for each in _randn(numel, device)], WaterfillCodec(bits)
    payloads = [torch.empty(codec.wire_nbytes(numel), dtype=torch.uint8, device=device) for _ in range(2)]
    return KernelCase(
        f"waterfill{bits}_encode",
        (4 + bits / 8) * numel,
        lambda i: codec.encode(x[i], payloads[0]),
        lambda i: codec.torch_encode(x[i], payloads[1]),
        payloads,
    )


def waterfill_decode_case(bits: int, numel: int, device: torch.device) -> KernelCase:
    """Returns the case of decoding and adding four workers' waterfill payloads."""
    codec, target = WaterfillCodec(bits), _randn(numel, device)
    x = [torch.randn(numel, device=device) * waterfill_blocks(numel, device) for _ in range(WORKERS)]
    payloads = _payloads(codec, x)
    return KernelCase(
        f"waterfill{bits}_decode_reduce",
        (4 + WORKERS * bits / 8) * numel,
        lambda i: codec.decode_reduce(payloads, None, target[i]),
        lambda i: reference.decode_reduce(codec, payloads, None, target[i]),
        target,
    )


def dgc_case(numel: int, device: torch.device) -> KernelCase:
    """Returns the case of a DGC step: momentum correction, selection of a thousandth, masking; the state in place."""
    g, u, v = (_randn(numel, device) for _ in range(3))
    magnitude = torch.empty(numel, device=device)
    k = int(DENSITY * numel)
    indices = torch.empty(k, dtype=torch.int32, device=device)
    values = torch.empty(k, device=device)
    kernels, rule = KERNELS_ON[indices.device.type], DgcRule(0.9)

    def ours(i: int) -> None:
        kernels.dgc_step(g[i], DgcState(u[i], v[i], u[i], v[i]), rule, indices, values)

    def composed(i: int) -> object:
        torch.add(g[i], u[i], alpha=0.9, out=u[i])
        v[i].add_(u[i])
        torch.abs(v[i], out=magnitude)
        sampled = magnitude[::97]
        threshold = torch.topk(sampled, max(1, int(DENSITY * sampled.numel()))).values[-1]
        chosen = (magnitude >= threshold).nonzero().view(-1)
        if chosen.numel() > k:
            chosen = chosen[torch.topk(magnitude[chosen], k).indices]
        sent = v[i][chosen]
        u[i][chosen] = 0.0
        v[i][chosen] = 0.0
        return sent

    return KernelCase("dgc_step", (20 + 8 * DENSITY) * numel, ours, composed, v)


def powersgd_case(numel: int, device: torch.device) -> KernelCase:
    """Returns the case of PowerSGD's local work on a square matrix at rank 4, against that of torch's powerSGD_hook."""
    side = int(numel**0.5)
    g, e, copy = (_randn(side * side, device) for _ in range(3))
    q_rows, p_rows, q_sum = (torch.randn(RANK, side, device=device) for _ in range(3))
    q, p = torch.randn(side, RANK, device=device), torch.randn(side, RANK, device=device)
    kernels = KERNELS_ON[q.device.type]

    def ours(i: int) -> None:
        matrix, residual = g[i].view(side, side), e[i].view(side, side)
        kernels.powersgd_project(matrix, residual, q_rows, p_rows)
        kernels.orthogonalize_many([p_rows], [0])
        kernels.powersgd_back_project(matrix, p_rows, q_rows)
        q_sum.copy_(q_rows)
        kernels.powersgd_restore(matrix, residual, p_rows, q_rows, q_sum)

    def composed(i: int) -> None:
        matrix = g[i].view(side, side)
        g[i].add_(e[i])
        copy[i].copy_(g[i])
        torch.linalg.qr(q, out=(q, torch.empty(0, device=device)))
        torch.matmul(matrix, q, out=p)
        torch.linalg.qr(p, out=(p, torch.empty(0, device=device)))
        torch.matmul(matrix.t(), p, out=q)
        torch.matmul(p, q.t(), out=matrix)
        torch.sub(copy[i], g[i], out=e[i])

    return KernelCase("powersgd_step", 28.0 * side * side, ours, composed, e)


def all_cases(numel: int, device: torch.device) -> dict[str, Callable[[], KernelCase]]:
    """Returns name -> function that makes the case; buffers are made only when it is called.

    Args:
        numel: Elements of the gradient, a multiple of 1024.
        device: Device to run on.
    """
    return {
        "fp16_encode": lambda: cast_case(numel, device),
        "onebit_encode": lambda: onebit_encode_case(numel, device),
        "onebit_decode_reduce": lambda: onebit_decode_case(numel, device),
        "int8_encode": lambda: quantize_case(8, numel, device),
        "int4_encode": lambda: quantize_case(4, numel, device),
        "int8_decode_reduce": lambda: quantize_decode_case(8, numel, device),
        "int4_decode_reduce": lambda: quantize_decode_case(4, numel, device),
        "waterfill5_encode": lambda: waterfill_case(5, numel, device),
        "waterfill5_decode_reduce": lambda: waterfill_decode_case(5, numel, device),
        "dgc_step": lambda: dgc_case(numel, device),
        "powersgd_step": lambda: powersgd_case(numel, device),
    }
