"""Law: every CUDA kernel equals its torch twin, on any input and length, on a GPU and with its source on the CPU."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.compressors.codecs.cast import CastCodec
from gradwire.compressors.codecs.onebit import OneBitCodec
from gradwire.compressors.kernels import cuda, reference
from gradwire.compressors.kernels.dispatch import Kernels
from support.block_codecs import GROUPS, assert_same, check_codec, randn

Maker = Callable[[int], Tensor]
EachNumel = Callable[[Callable[[int], None]], None]


@pytest.mark.parametrize("name", GROUPS)
def test_a_codec_is_the_reference(device: torch.device, make_input: Maker, each_numel: EachNumel, name: str) -> None:
    def check(numel: int) -> None:
        codec = GROUPS[name][numel % len(GROUPS[name])]
        apart = int(numel % 4 != 1)  # how a tensor is read depends on its address, not on what is in it
        check_codec(cuda, codec, make_input(numel), device, apart)

    each_numel(check)


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
