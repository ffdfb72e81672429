"""bf16 with packed exponents: the same bits as bf16, whatever the values, and lengths that all ranks agree on."""

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from gradwire.comms.transport.echo import EchoGroup
from gradwire.compressors.base import Layout, Member, Slice
from gradwire.compressors.codecs.packed_cast import MOST_REST_STEPS, PackedCast
from gradwire.compressors.kernels import reference
from gradwire.compressors.optim.peers import carry_out
from gradwire.compressors.registry import Option, make
from support.guarded import guarded
from support.threads import ThreadGroup, take_turns

GENERATOR = torch.Generator().manual_seed(0)


def normal(numel: int) -> Tensor:
    return torch.randn(numel, generator=GENERATOR)


def special(numel: int) -> Tensor:
    x = normal(numel)
    x[::5], x[1::7], x[2::11] = 0.0, -0.0, 1e-40
    x[3::13], x[4::17], x[5::19] = float("inf"), float("nan"), -3e38
    return x


VALUES: dict[str, Callable[[int], Tensor]] = {
    "normal": normal,
    "heavy tails": lambda numel: normal(numel) ** 9,
    "far apart": lambda numel: normal(numel) * torch.exp2(normal(numel) * 8),
    "zeros": lambda numel: torch.zeros(numel),
    "negative zeros": lambda numel: -torch.zeros(numel),
    "mostly zeros": lambda numel: normal(numel) * (torch.rand(numel, generator=GENERATOR) < 0.03),
    "denormal": lambda numel: normal(numel) * 1e-40,
    "special": special,
    "all patterns": lambda numel: torch.arange(numel).short().view(torch.bfloat16).float().roll(numel // 3),
}


def bits_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def reduced(
    name: str, inputs: list[list[Tensor]], **options: Option
) -> tuple[list[list[Tensor]], list[int], list[PackedCast]]:
    """Each rank's outputs of all steps, the bytes that it sent, and its compressor."""
    groups = ThreadGroup.create(len(inputs[0]))
    layout = Layout((Slice("w", (inputs[0][0].numel(),), 0, 0, inputs[0][0].numel()),))

    def body(rank: int) -> tuple[list[Tensor], PackedCast]:
        ours, outputs = make(name, options), []
        for each in inputs:
            shard = each[rank].clone()
            carry_out(ours.all_reduce(shard, layout, groups[rank].member), groups[rank])
            ours.end_step(bool(shard.isfinite().all()))
            outputs.append(shard)
        return outputs, ours  # type: ignore[return-value]

    found = take_turns(len(groups), body)
    return [each for each, _ in found], [group.sent_nbytes for group in groups], [each for _, each in found]


@pytest.mark.parametrize("values", VALUES)
def test_every_rank_has_the_bits_of_bf16(values: str) -> None:
    for size, numel in ((2, 5000), (3, 64 * 40 + 1), (2, 1), (4, 63), (5, 65_536)):
        inputs = [[VALUES[values](numel) for _ in range(size)] for _ in range(2)]
        for options in ({}, {"residual": True}):
            wanted, _, _ = reduced("bf16", inputs, **options)
            found, _, _ = reduced("bf16_packed", inputs, **options)
            for ours, theirs in zip(found, wanted, strict=True):
                for one, other in zip(ours, theirs, strict=True):
                    assert torch.equal(bits_of(one), bits_of(other))


def test_normal_values_take_no_more_than_plans_expect() -> None:
    inputs = [[normal(100_000) * 10.0 ** float(normal(1)) for _ in range(3)]]
    _, plain, _ = reduced("bf16", inputs)
    _, packed, _ = reduced("bf16_packed", inputs)
    assert all(ours < 0.70 * theirs for ours, theirs in zip(packed, plain, strict=True))


def test_values_that_cannot_be_packed_cost_a_header_and_then_a_rest() -> None:
    """Random bit patterns: the payload is bf16's and a header; the next steps do not try again."""
    patterns = torch.randint(-(2**15), 2**15, (2, 50_000), generator=GENERATOR).short().view(torch.bfloat16).float()
    finite = torch.where(patterns.isfinite(), patterns, 1.0)
    inputs = [list(finite)] * 3
    _, plain, _ = reduced("bf16", inputs)
    _, packed, compressors = reduced("bf16_packed", inputs)
    assert all(ours <= theirs + 100 for ours, theirs in zip(packed, plain, strict=True))
    assert all((each.totals.packed, each.totals.plain) == (1, 2) for each in compressors)
    assert "saved too little" in str(compressors[0].totals)
    compressors[0].replanned()
    assert not compressors[0]._trials


def test_sums_longer_than_their_summands_follow_in_a_rest() -> None:
    """Each rank has another half of the values and zeros: the sums take twice the room that was agreed on."""
    numel, half = 64 * 1024, torch.arange(64 * 1024) // 128 % 2
    whole = normal(numel)
    inputs = [[whole * (half == rank) for rank in range(2)]]
    wanted, plain, _ = reduced("bf16", inputs)
    found, packed, _ = reduced("bf16_packed", inputs)
    assert torch.equal(bits_of(found[0][0]), bits_of(wanted[0][0]))
    assert packed[0] < 0.8 * plain[0]


@pytest.mark.parametrize("values", VALUES)
def test_kernels_write_what_the_reference_writes(values: str, native_kernels: object) -> None:
    for count in (1, 2, 37, 1024):
        blocks = VALUES[values](64 * count).bfloat16().view(-1, 64)
        apart = torch.zeros(count, 3, 64, dtype=torch.bfloat16)
        apart[:, 1] = blocks
        payloads = torch.zeros(3, reference.exponents_most_nbytes(64 * count), dtype=torch.uint8)
        packs = (reference.exponents_pack, native_kernels.exponents_pack)  # type: ignore[attr-defined]
        lengths = [pack(blocks, row) for pack, row in zip(packs, payloads, strict=False)]
        lengths.append(packs[1](apart[:, 1], payloads[2]))
        assert len(set(lengths)) == 1
        assert lengths[0] == reference.exponents_nbytes(payloads[0], 64 * count)
        assert all(torch.equal(row[: lengths[0]], payloads[0, : lengths[0]]) for row in payloads)
        for unpack in (reference.exponents_unpack, native_kernels.exponents_unpack):  # type: ignore[attr-defined]
            unpack(payloads[0, : lengths[0]], apart[:, 2])
            assert torch.equal(bits_of(apart[:, 2]), bits_of(blocks))


def test_a_damaged_payload_is_refused_or_decoded_but_never_read_beyond(native_kernels: object) -> None:
    blocks = normal(64 * 8).bfloat16().view(-1, 64)
    payload = torch.zeros(reference.exponents_most_nbytes(512), dtype=torch.uint8)
    length = reference.exponents_pack(blocks, payload)
    refused = 0
    for unpack in (reference.exponents_unpack, native_kernels.exponents_unpack):  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="damaged"):
            unpack(payload[: length - 1], blocks.clone())
        for at in range(60):
            damaged = payload[:length].clone()
            damaged[at] ^= 0x15
            try:
                unpack(damaged, blocks.clone())
            except ValueError:
                refused += 1
    assert refused > 60


def test_nothing_beyond_a_payload_is_read_whatever_its_header_says(native_kernels: object) -> None:
    """Payloads end where the process would die; headers are random, and as good as right but for one number."""
    pack, unpack = native_kernels.exponents_pack, native_kernels.exponents_unpack  # type: ignore[attr-defined]
    for count in (1, 2, 3, 15, 17, 63, 65):
        blocks = (normal(64 * count) ** 9).bfloat16().view(-1, 64)
        room = torch.zeros(reference.exponents_most_nbytes(64 * count), dtype=torch.uint8)
        length = pack(blocks, room)
        with guarded(length) as payload:
            payload.copy_(room[:length])
            back = torch.empty_like(blocks)
            unpack(payload, back)
            assert torch.equal(bits_of(back), bits_of(blocks))
            for trial in range(40):
                payload.copy_(room[:length])
                number = trial % 8
                high = (1 << 31) if trial % 3 == 0 else 64 * count + 2
                word = torch.randint(0, high, (1,), generator=GENERATOR, dtype=torch.int32)
                payload[4 * number : 4 * number + 4] = word.view(torch.uint8)
                if trial % 5 == 0:
                    payload[:32] = torch.randint(0, 256, (32,), generator=GENERATOR, dtype=torch.uint8)
                with suppress(ValueError):
                    unpack(payload, back)
            with pytest.raises(ValueError, match="damaged"):
                unpack(payload[: length - 1], back)


@pytest.mark.parametrize("stage", ["lengths", "sums"])
def test_a_length_that_no_payload_has_is_refused_before_memory_is_taken(stage: str) -> None:
    """Both ranks see it in what all have received alike, before the next collective."""
    layout, shard = Layout((Slice("w", (6400,), 0, 0, 6400),)), normal(6400)
    steps = PackedCast().all_reduce(shard, layout, Member(0, 2))
    request = next(steps)
    received, own = request.tensors  # type: ignore[union-attr]
    received.copy_(own.repeat(2))
    if stage == "lengths":
        received[1] = 1 << 50
    else:
        received, own = next(steps).tensors  # type: ignore[union-attr]
        received.copy_(own)
        received, own = next(steps).tensors  # type: ignore[union-attr]
        received[0], received[1] = own, 0xFE
    with pytest.raises(ValueError, match="damaged"):
        next(steps)


def packs(compressor: PackedCast, shard: Tensor, even: float) -> bool:
    """Has a shard exchanged, with a rank that sends the same, and says whether it was packed."""
    before, group = compressor.totals.packed, EchoGroup(2)
    layout = Layout((Slice("w", (shard.numel(),), 0, 0, shard.numel()),))
    carry_out(compressor.all_reduce(shard.clone(), layout, Member(0, 2, break_even=even)), group)
    compressor.end_step(True)
    return compressor.totals.packed > before


def test_what_packing_has_saved_counts_and_not_what_was_expected() -> None:
    """Zeros are packed to a 64th: refused on expectation, tried after a while, packed from then on."""
    ours, zeros = PackedCast(), torch.zeros(6400)
    assert not packs(ours, zeros, 0.5)
    ours.step = MOST_REST_STEPS - 1
    assert not packs(ours, zeros, 0.5)
    assert packs(ours, zeros, 0.5)
    assert packs(ours, zeros, 0.9) and packs(ours, zeros, 0.01)  # the links are seen otherwise: what is known stays
    assert len(ours._trials) == 1
    assert not packs(ours, zeros, 2.0)
    worse = PackedCast()
    assert packs(worse, normal(6400), 0.2)
    assert not packs(worse, normal(6400), 0.4)  # it has saved less than that
    assert packs(worse, normal(6400), 0.2)


def test_fast_links_get_plain_bf16_and_the_report_says_why() -> None:
    layout, shard = Layout((Slice("w", (6400,), 0, 0, 6400),)), normal(6400)
    fast = PackedCast()
    requests = list(fast.all_reduce(shard.clone(), layout, Member(0, 2, break_even=0.5)))
    assert len(requests) == 2
    assert "would have to save 50%" in fast.note()
    for packs, even in ((PackedCast(), 0.1), (PackedCast(always=True), 0.5)):
        first = next(packs.all_reduce(shard, layout, Member(0, 2, break_even=even)))
        assert first.tensors[0].dtype == torch.int64  # type: ignore[union-attr]
