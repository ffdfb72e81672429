"""Law: every CUDA kernel equals its torch twin, on any input and length, on a GPU and with its source on the CPU."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.compressors.codecs.cast import CastCodec
from gradwire.compressors.codecs.chunk_topk import ChunkRule, ChunkTopkCodec
from gradwire.compressors.codecs.onebit import OneBitCodec
from gradwire.compressors.kernels import cuda, reference
from gradwire.compressors.kernels.dispatch import Kernels
from support.block_codecs import CHUNK_RULES, GROUPS, assert_same, check_codec, randn

Maker = Callable[[int], Tensor]
EachNumel = Callable[[Callable[[int], None]], None]


@pytest.mark.parametrize("name", GROUPS)
def test_a_codec_is_the_reference(device: torch.device, make_input: Maker, each_numel: EachNumel, name: str) -> None:
    def check(numel: int) -> None:
        codec = GROUPS[name][numel % len(GROUPS[name])]
        apart = int(numel % 4 != 1)  # how a tensor is read depends on its address, not on what is in it
        check_codec(cuda, codec, make_input(numel), device, apart)

    each_numel(check)


@pytest.mark.parametrize("rule", CHUNK_RULES, ids=str)
def test_damaged_places_stay_inside(device: torch.device, rule: ChunkRule) -> None:
    codec = ChunkTopkCodec(rule)
    for numel in (129, 4097):
        generator = torch.Generator().manual_seed(numel)
        damaged = torch.randint(256, (3, codec.wire_nbytes(numel)), generator=generator, dtype=torch.uint8)
        damaged[0], damaged[2] = 0xFF, 0
        for start in range(0, numel, rule.chunk):  # levels whose sums are exact: a place may come twice
            at = start // rule.chunk * rule.record_nbytes(rule.chunk)
            damaged[:, at : at + 4] = torch.tensor([0x80, 0x3F, 0x00, 0x40])
        guarded, wanted = torch.full((numel + 200,), 7.0, device=device), torch.empty(numel)
        cuda.decode_reduce(codec, damaged.to(device), None, guarded[100:-100])
        reference.decode_reduce(codec, damaged, None, wanted)
        before, summed, behind = torch.split(guarded.cpu(), [100, numel, 100])  # a GPU's fault is raised here
        assert (before == 7).all() and (behind == 7).all()
        if device.type == "cpu":
            assert_same(summed, wanted)
        else:  # two threads may add to one place at once: any of the levels may be missing, and nothing else is added
            assert torch.equal(summed, summed.round())
            assert summed.abs().max() <= 2 * rule.keep * len(damaged)


def test_every_half_survives_the_round_trip(device: torch.device) -> None:
    for codec in (CastCodec("float16"), CastCodec("bfloat16")):
        halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        wide, back = torch.empty(1 << 16, device=device), torch.empty_like(halves, device=device)
        cuda.decode_pieces(codec, halves.view(torch.uint8)[None].to(device), wide, 1 << 16)
        assert_same(wide, halves.view(codec.dtype).float())
        cuda.encode_pieces(codec, wide, None, None, back.view(torch.uint8)[None], 1 << 16)
        number = ~halves.view(codec.dtype).isnan()
        assert torch.equal(back.cpu()[number], halves[number])


def test_a_residual_may_be_replaced_in_place(device: torch.device) -> None:
    numel, codec = 3000, OneBitCodec()
    x, residual = randn(numel, 1), randn(numel, 2)
    ours, wanted = residual.to(device, copy=True), torch.empty(numel)
    payload = torch.empty(1, codec.wire_nbytes(numel), dtype=torch.uint8)
    cuda.encode_pieces(codec, x.clone().to(device), ours, ours, payload.to(device), numel)
    reference.encode_pieces(codec, x, residual, wanted, payload, numel)
    assert_same(ours, wanted)


def test_a_wrong_tensor_is_refused(device: torch.device) -> None:
    x, payload, codec = (
        torch.randn(64, device=device),
        torch.empty(1, 12, dtype=torch.uint8, device=device),
        OneBitCodec(),
    )
    with pytest.raises(ValueError, match="`payloads`"):
        cuda.encode_pieces(codec, x, None, None, payload[:, :3], 64)
    with pytest.raises(ValueError, match="`residual`"):
        cuda.encode_pieces(codec, x, x[:32], None, payload, 64)
    with pytest.raises(ValueError, match="`gradient`"):
        cuda.encode_pieces(codec, x.double(), None, None, payload, 64)
    with pytest.raises(ValueError, match="`payloads`"):
        cuda.decode_reduce(codec, torch.empty(2, 3, dtype=torch.uint8, device=device), None, x)
    halves = torch.empty(2, 131, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="odd address"):
        cuda.encode_pieces(CastCodec("float16"), x, None, None, halves[:1, 1:130], 64)
    with pytest.raises(ValueError, match="131 bytes apart"):
        cuda.decode_reduce(CastCodec("float16"), halves[:, :128], None, x)


def test_a_codec_without_kernels_is_refused(device: torch.device) -> None:
    class Unknown(OneBitCodec):
        family = "unknown"

    with pytest.raises(ValueError, match="`family` is 'unknown'"):
        cuda.decode_reduce(Unknown(), torch.empty(1, 12, dtype=torch.uint8), None, torch.empty(64, device=device))


@pytest.mark.parametrize("name", sorted(name for name in vars(Kernels) if not name.startswith("_")))
def test_the_door_takes_every_function(name: str) -> None:
    """The names and parameters of the protocol, so that a compressor may call any set of kernels."""
    wanted = list(inspect.signature(getattr(Kernels, name)).parameters)[1:]
    assert list(inspect.signature(getattr(cuda, name)).parameters) == wanted
    assert list(inspect.signature(getattr(reference, name)).parameters) == wanted
