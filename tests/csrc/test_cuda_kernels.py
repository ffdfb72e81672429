"""Law: every CUDA kernel equals its torch twin, on any input and length, on a GPU and with its source on the CPU."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.compressors.kernels import cuda, reference
from gradwire.compressors.kernels.dispatch import Kernels
from gradwire.compressors.kernels.reference import ChunkRule

Maker = Callable[[int], Tensor]
EachNumel = Callable[[Callable[[int], None]], None]


def assert_same(ours: Tensor, wanted: Tensor) -> None:
    """The same numbers bit for bit, zeros with their signs; a NaN equals any NaN."""
    torch.testing.assert_close(ours.cpu(), wanted, rtol=0.0, atol=0.0, equal_nan=True)
    number = ~wanted.isnan()
    assert torch.equal(ours.cpu().signbit()[number], wanted.signbit()[number])


def assert_same_payload(ours: Tensor, wanted: Tensor, head_nbytes: int) -> None:
    assert torch.equal(ours.cpu()[head_nbytes:], wanted[head_nbytes:])
    assert_same(ours.cpu()[:head_nbytes].view(torch.float32), wanted[:head_nbytes].view(torch.float32))


def other(numel: int) -> Tensor:
    return torch.randn(numel + 3, generator=torch.Generator().manual_seed(numel + 1))[3:]


def to(device: torch.device, tensor: Tensor | None) -> Tensor | None:
    """A copy there that starts four bytes after an aligned address."""
    if tensor is None:
        return None
    return torch.cat([torch.zeros(1), tensor]).to(device)[1:]


def given(device: torch.device, tensor: Tensor) -> Tensor:
    copy = to(device, tensor)
    assert copy is not None
    return copy


def test_onebit_is_the_reference(device: torch.device, make_input: Maker, each_numel: EachNumel) -> None:
    def check(numel: int) -> None:
        aligned = numel % 4 == 1  # 1, 33, 129, ...: how a tensor is read depends on its address, not on what is in it
        x, residual = make_input(numel), other(numel) if numel % 2 else None
        gradient = x.clone().to(device) if aligned else given(device, x)
        nbytes, head = reference.onebit_nbytes(numel), -(-numel // 1024) * 4
        ours, new_residual = torch.empty(nbytes, dtype=torch.uint8, device=device), torch.empty(numel, device=device)
        wanted, wanted_residual = torch.empty(nbytes, dtype=torch.uint8), torch.empty(numel)
        cuda.onebit_encode(gradient, to(device, residual), new_residual, ours)
        reference.onebit_encode(x, residual, wanted_residual, wanted)
        assert_same_payload(ours, wanted, head)
        assert_same(new_residual, wanted_residual)

        table = torch.empty(3, nbytes + (0 if aligned else 1), dtype=torch.uint8)[:, :nbytes]
        table[:] = wanted
        table[1] = wanted
        table[1, head:] ^= 0x55
        there = torch.empty(3, nbytes + (0 if aligned else 1), dtype=torch.uint8, device=device)[:, :nbytes]
        there.copy_(table)
        target, wanted_target = given(device, torch.empty(numel)), torch.empty(numel)
        cuda.onebit_decode_reduce(there, to(device, residual), target)
        reference.onebit_decode_reduce(table, residual, wanted_target)
        assert_same(target, wanted_target)
        cuda.onebit_reduce_encode(there, to(device, residual), new_residual, ours, numel)
        reference.onebit_reduce_encode(table, residual, wanted_residual, wanted, numel)
        assert_same_payload(ours, wanted, head)
        assert_same(new_residual, wanted_residual)

    each_numel(check)


# Entries of 8, 2 (behind them a bitmap), 14 and 5 bits: those of the last two straddle bytes in full chunks, too.
CHUNK_RULES = [ChunkRule(), ChunkRule(256, 200, 0.5), ChunkRule(4096, 1), ChunkRule(512, 37, 0.5)]


@pytest.mark.parametrize("rule", CHUNK_RULES, ids=str)
def test_chunk_topk_is_the_reference(
    device: torch.device, make_input: Maker, each_numel: EachNumel, rule: ChunkRule
) -> None:
    def check(numel: int) -> None:
        x, residual = make_input(numel), other(numel) if numel % 2 else None
        nbytes = reference.chunk_topk_nbytes(numel, rule)
        ours, new_residual = torch.empty(nbytes, dtype=torch.uint8, device=device), torch.empty(numel, device=device)
        wanted, wanted_residual = torch.empty(nbytes, dtype=torch.uint8), torch.empty(numel)
        cuda.chunk_topk_encode(rule, given(device, x), to(device, residual), new_residual, ours)
        reference.chunk_topk_encode(rule, x, residual, wanted_residual, wanted)
        assert torch.equal(ours.cpu(), wanted)
        assert_same(new_residual, wanted_residual)
        table = torch.stack([wanted, wanted, wanted])
        reference.chunk_topk_encode(rule, other(numel), None, None, table[1])
        target, wanted_target = torch.empty(numel, device=device), torch.empty(numel)
        cuda.chunk_topk_decode_reduce(rule, table.to(device), to(device, residual), target)
        reference.chunk_topk_decode_reduce(rule, table, residual, wanted_target)
        assert_same(target, wanted_target)
        if numel not in (129, 4097):
            return
        damaged = torch.randint(256, table.shape, generator=torch.Generator().manual_seed(numel), dtype=torch.uint8)
        damaged[0], damaged[2] = 0xFF, 0
        for start in range(0, numel, rule.chunk):  # levels whose sums are exact: a place may come twice
            at = start // rule.chunk * rule.record_nbytes(rule.chunk)
            damaged[:, at : at + 4] = torch.tensor([0x80, 0x3F, 0x00, 0x40])
        guarded = torch.full((numel + 200,), 7.0, device=device)
        cuda.chunk_topk_decode_reduce(rule, damaged.to(device), None, guarded[100:-100])
        reference.chunk_topk_decode_reduce(rule, damaged, None, wanted_target)
        before, summed, behind = torch.split(guarded.cpu(), [100, numel, 100])  # a GPU's fault is raised here
        assert (before == 7).all() and (behind == 7).all()
        if device.type == "cpu":
            assert_same(summed, wanted_target)
        else:  # two threads may add to one place at once: any of the levels may be missing, and nothing else is added
            assert torch.equal(summed, summed.round())
            assert summed.abs().max() <= 2 * rule.keep * len(damaged)

    each_numel(check)


def test_waterfill_is_the_reference(device: torch.device, make_input: Maker, each_numel: EachNumel) -> None:
    def check(numel: int) -> None:
        bits = 2 + numel % 4
        x, sizes = make_input(numel), torch.exp2(torch.arange(numel) // 32 % 37 - 30.0)
        residual = other(numel) * sizes if numel % 2 else None
        nbytes = reference.waterfill_nbytes(numel, bits)
        ours, new_residual = torch.empty(nbytes, dtype=torch.uint8, device=device), torch.empty(numel, device=device)
        wanted, wanted_residual = torch.empty(nbytes, dtype=torch.uint8), torch.empty(numel)
        cuda.waterfill_encode(bits, given(device, x), to(device, residual), new_residual, ours)
        reference.waterfill_encode(bits, x, residual, wanted_residual, wanted)
        assert torch.equal(ours.cpu(), wanted)
        assert_same(new_residual, wanted_residual)
        table = torch.stack([wanted, wanted, wanted])
        reference.waterfill_encode(bits, other(numel) * sizes, None, None, table[1])
        target, wanted_target = torch.empty(numel, device=device), torch.empty(numel)
        cuda.waterfill_decode_reduce(bits, table.to(device), to(device, residual), target)
        reference.waterfill_decode_reduce(bits, table, residual, wanted_target)
        assert_same(target, wanted_target)

    each_numel(check)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("key", [None, 0xFFFFFFFF])
def test_quantize_is_the_reference(
    device: torch.device, make_input: Maker, each_numel: EachNumel, bits: int, key: int | None
) -> None:
    def check(numel: int) -> None:
        x, residual = make_input(numel), other(numel) if numel % 2 else None
        gradient = given(device, x) if key is None else x.clone().to(device)
        nbytes, head = reference.quantize_nbytes(numel, bits), -(-numel // 512) * 8
        ours, new_residual = torch.empty(nbytes, dtype=torch.uint8, device=device), torch.empty(numel, device=device)
        wanted, wanted_residual = torch.empty(nbytes, dtype=torch.uint8), torch.empty(numel)
        cuda.quantize_encode(bits, gradient, to(device, residual), new_residual, ours, key)
        reference.quantize_encode(bits, x, residual, wanted_residual, wanted, key)
        assert_same_payload(ours, wanted, head)
        assert_same(new_residual, wanted_residual)
        target, wanted_target = torch.empty(numel, device=device), torch.empty(numel)
        table = torch.stack([wanted, wanted])
        cuda.quantize_decode_reduce(bits, table.to(device), to(device, residual), target)
        reference.quantize_decode_reduce(bits, table, residual, wanted_target)
        assert_same(target, wanted_target)

    each_numel(check)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cast_is_the_reference(
    device: torch.device, make_input: Maker, each_numel: EachNumel, dtype: torch.dtype
) -> None:
    def check(numel: int) -> None:
        x, residual = make_input(numel), other(numel) if numel % 2 else None
        gradient = given(device, x) if numel % 3 else x.clone().to(device)
        ours, new_residual = torch.empty(numel, dtype=dtype, device=device), torch.empty(numel, device=device)
        wanted, wanted_residual = torch.empty(numel, dtype=dtype), torch.empty(numel)
        cuda.cast_encode(gradient, 0.125, to(device, residual), new_residual, ours)
        reference.cast_encode(x, 0.125, residual, wanted_residual, wanted)
        assert_same(ours.float(), wanted.float())
        assert_same(new_residual, wanted_residual)
        target, wanted_target = torch.empty(numel, device=device), torch.empty(numel)
        for addend, sources in ((residual, torch.stack([wanted, wanted])), (None, wanted.unsqueeze(0))):
            cuda.cast_decode_reduce(sources.to(device), to(device, addend), target)
            reference.cast_decode_reduce(sources, addend, wanted_target)
            assert_same(target, wanted_target)

    each_numel(check)


def test_every_half_survives_the_round_trip(device: torch.device) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        wide = torch.empty(1 << 16, device=device)
        back = torch.empty(1 << 16, dtype=dtype, device=device)
        cuda.cast_decode_reduce(halves.unsqueeze(0).to(device), None, wide)
        assert_same(wide, halves.float())
        cuda.cast_encode(wide, 1.0, None, None, back)
        number = ~halves.float().isnan()
        assert torch.equal(back.cpu().view(torch.int16)[number], halves.view(torch.int16)[number])


def test_a_residual_may_be_replaced_in_place(device: torch.device) -> None:
    numel = 3000
    x, residual = other(numel), other(numel).flip(0).clone()
    ours, wanted = residual.to(device, copy=True), torch.empty(numel)
    payload = torch.empty(reference.onebit_nbytes(numel), dtype=torch.uint8)
    cuda.onebit_encode(x.clone().to(device), ours, ours, payload.to(device))
    reference.onebit_encode(x, residual, wanted, payload)
    assert_same(ours, wanted)


def test_a_wrong_tensor_is_refused(device: torch.device) -> None:
    x, payload = torch.randn(64, device=device), torch.empty(12, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="`payload`"):
        cuda.onebit_encode(x, None, None, payload[:3])
    with pytest.raises(ValueError, match="`residual`"):
        cuda.onebit_encode(x, x[:32], None, payload)
    with pytest.raises(ValueError, match="`gradient`"):
        cuda.onebit_encode(x.double(), None, None, payload)
    with pytest.raises(ValueError, match="`payloads`"):
        cuda.onebit_decode_reduce(torch.empty(2, 3, dtype=torch.uint8, device=device), None, x)
    with pytest.raises(ValueError, match="`bits`"):
        cuda.quantize_encode(3, x, None, None, payload, None)
    with pytest.raises(ValueError, match="`bits`"):
        cuda.waterfill_encode(8, x, None, None, payload)
    with pytest.raises(ValueError, match="`target`"):
        cuda.cast_encode(x, 1.0, None, None, x.double())


@pytest.mark.parametrize("name", sorted(name for name in vars(Kernels) if not name.startswith("_")))
def test_the_door_takes_every_function(name: str) -> None:
    """The names and parameters of the protocol, so that a compressor may call any set of kernels."""
    wanted = list(inspect.signature(getattr(Kernels, name)).parameters)[1:]
    assert list(inspect.signature(getattr(cuda, name)).parameters) == wanted
    assert list(inspect.signature(getattr(reference, name)).parameters) == wanted
