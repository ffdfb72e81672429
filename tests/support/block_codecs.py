"""Every block codec at every kind of parameter, and what all sets of kernels must do with it alike."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.compressors.codecs.base import BlockCodec
from gradwire.compressors.codecs.cast import CastCodec
from gradwire.compressors.codecs.onebit import OneBitCodec
from gradwire.compressors.codecs.quantize import QuantizeCodec
from gradwire.compressors.codecs.waterfill import WaterfillCodec
from gradwire.compressors.kernels import reference

CPU = torch.device("cpu")
CODECS: dict[str, BlockCodec] = {
    "onebit": OneBitCodec(),
    **{f"waterfill{bits}": WaterfillCodec(bits) for bits in (2, 3, 4, 5)},
    **{f"int{bits}": QuantizeCodec(bits) for bits in (4, 8)},
    **{f"int{bits} random": QuantizeCodec(bits, 0xFFFFFFFF) for bits in (4, 8)},
    **{name: CastCodec(name) for name in ("float16", "bfloat16")},
    "float16 scaled": CastCodec("float16", 0.125),
}
GROUPS: dict[str, tuple[BlockCodec, ...]] = {
    **{name: (codec,) for name, codec in CODECS.items() if codec.family != "waterfill"},
    "waterfill": tuple(codec for codec in CODECS.values() if codec.family == "waterfill"),
}
"""By name; of waterfill's numbers of bits each length gets one, because its reference takes long."""
HEADS = {"onebit": (1024, 4), "quantize": (512, 8)}
"""Family -> elements of a block, and bytes of float32 that it has in front of all codes; they may be any NaN."""


def randn(numel: int, seed: int) -> Tensor:
    """Normally distributed numbers, always the same."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def uneven(numel: int) -> Tensor:
    """Sizes that differ from block to block, some of them by more than a byte of scale says."""
    exponents = torch.randint(-20, 4, (-(-numel // 32),), generator=torch.Generator().manual_seed(numel)).float()
    exponents[::7] = -60
    return torch.exp2(exponents).repeat_interleave(32)[:numel]


def assert_same(ours: Tensor, wanted: Tensor) -> None:
    """The same numbers bit for bit, zeros with their signs; a NaN equals any NaN."""
    ours, number = ours.cpu(), ~wanted.isnan()
    torch.testing.assert_close(ours, wanted, rtol=0.0, atol=0.0, equal_nan=True)
    assert torch.equal(ours.signbit()[number], wanted.signbit()[number])


def assert_same_payload(codec: BlockCodec, ours: Tensor, wanted: Tensor, numel: int) -> None:
    """The same bytes, but for the bits of a NaN."""
    ours = ours.cpu()
    if isinstance(codec, CastCodec):
        assert_same(ours.view(codec.dtype).float(), wanted.view(codec.dtype).float())
        return
    block, nbytes = HEADS.get(codec.family, (1, 0))
    head = -(-numel // block) * nbytes
    assert torch.equal(ours[head:], wanted[head:])
    assert_same(ours[:head].view(torch.float32), wanted[:head].view(torch.float32))


def check_codec(of: Any, codec: BlockCodec, x: Tensor, device: torch.device = CPU, apart: int = 0) -> None:
    """All four operations of a set of kernels are the reference's; with a residual where the number of values is odd.

    Args:
        of: The kernels.
        codec: Format of the payloads.
        x: 1-D float32 on the CPU.
        device: Where the kernels' tensors lie.
        apart: Elements that tensors, and twice the bytes that rows, lie behind where they would be aligned.
    """
    numel, nbytes = x.numel(), codec.wire_nbytes(x.numel())
    other = randn(numel, numel + 1) * uneven(numel)
    residual = other.flip(0).clone() if numel % 2 else None
    table = torch.full((3, nbytes), 0xAA, dtype=torch.uint8)
    for payload, values in zip(table, (x, other, x), strict=True):
        reference.encode_pieces(codec, values, None, None, payload[None], numel)
    outcomes = []
    for kernels, there, gap in ((of, device, apart), (reference, CPU, 0)):
        given = [None if each is None else _behind(each, there, gap) for each in (x, residual)]
        rows = torch.zeros(3, nbytes + 2 * gap, dtype=torch.uint8, device=there)[:, :nbytes].copy_(table)
        payload, reduced = (torch.full((nbytes,), 0xAA, dtype=torch.uint8, device=there) for _ in range(2))
        left, owner_left, total, one = (_behind(torch.zeros(numel), there, gap) for _ in range(4))
        kernels.encode_pieces(codec, *given, left, payload[None], numel)
        kernels.decode_reduce(codec, rows, given[1], total)
        kernels.decode_reduce(codec, rows[:1], None, one)
        kernels.reduce_encode(codec, rows, given[1], owner_left, reduced, numel)
        outcomes.append(((payload, reduced), (left, owner_left, total, one)))
    (payloads, numbers), (wanted_payloads, wanted_numbers) = outcomes
    for ours, wanted in zip(payloads, wanted_payloads, strict=True):
        assert_same_payload(codec, ours, wanted, numel)
    for ours, wanted in zip(numbers, wanted_numbers, strict=True):
        assert_same(ours, wanted)


def _behind(tensor: Tensor, device: torch.device, gap: int) -> Tensor:
    """A copy there that starts `gap` elements after an aligned address."""
    return torch.cat([torch.zeros(gap), tensor]).to(device)[gap:]


def check_pieces(
    of: Any, codec: BlockCodec, numel: int, width: int, device: torch.device = CPU, padding: int = 0
) -> None:
    """What is written of pieces, and what comes back of them, is the reference's; rows are `padding` bytes longer."""
    x, residual, rows = randn(numel, 0), randn(numel, 1), -(-numel // width)
    found: list[Sequence[Tensor]] = []
    for there, kernels in ((device, of), (CPU, reference)):
        payloads = torch.full((rows, codec.wire_nbytes(width) + padding), 0xAA, dtype=torch.uint8, device=there)
        left, target = torch.empty(numel, device=there), torch.empty(numel, device=there)
        kernels.encode_pieces(codec, x.to(there), residual.to(there), left, payloads, width)
        kernels.decode_pieces(codec, payloads, target, width)
        found.append((payloads.cpu(), left.cpu(), target.cpu()))
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(*found, strict=True))
