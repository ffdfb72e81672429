"""What each codec promises beyond the common laws."""

import pytest
import torch
from torch import Tensor

from gradwire.compressors.base import Codec
from gradwire.compressors.codecs.cast import CastCodec
from gradwire.compressors.codecs.onebit import OneBitCodec
from gradwire.compressors.codecs.quantize import QuantizeCodec
from gradwire.compressors.codecs.waterfill import WaterfillCodec
from gradwire.compressors.registry import BUILT_IN, make
from gradwire.compressors.two_stage import TwoStage

CODECS: dict[str, Codec] = {
    "onebit": OneBitCodec(),
    "int8": QuantizeCodec(8),
    "int4": QuantizeCodec(4),
    "int4-random": QuantizeCodec(4, 9),
    "waterfill5": WaterfillCodec(5),
    "waterfill2": WaterfillCodec(2),
    "float16": CastCodec("float16"),
    "bfloat16": CastCodec("bfloat16"),
}
CODECS |= {
    name: made.codec
    for name in BUILT_IN
    if isinstance(made := make(name), TwoStage) and type(made.codec) not in map(type, CODECS.values())
}


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec:
    return CODECS[request.param]


def through(codec: Codec, flat: Tensor) -> Tensor:
    payload = torch.zeros(codec.wire_nbytes(flat.numel()), dtype=torch.uint8)
    codec.encode(flat, payload)
    decoded = torch.empty_like(flat)
    codec.decode(payload, decoded)
    return decoded


@pytest.mark.parametrize("numel", [0, 1, 3, 1000, 1024, 5000])
def test_zero_stays_zero(codec: Codec, numel: int) -> None:
    assert not through(codec, torch.zeros(numel)).any()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_bad_number_is_seen_on_the_other_side(codec: Codec, value: float) -> None:
    flat = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    flat[18_000] = value
    decoded = through(codec, flat)
    assert not decoded.isfinite().all()
    assert decoded[:16384].isfinite().all(), "an inf or a NaN spoils its block alone, of 16,384 elements at most"


def test_encode_does_not_change_its_input(codec: Codec) -> None:
    flat = torch.randn(2000, generator=torch.Generator().manual_seed(1))
    before = flat.clone()
    through(codec, flat)
    assert torch.equal(flat, before)


def test_one_bit_is_one_bit() -> None:
    assert OneBitCodec().wire_nbytes(1 << 20) == (1 << 20) // 8 + 4 * 1024


def test_the_scale_is_the_mean_magnitude_of_what_is_there() -> None:
    """A short last block: padding would make its scale smaller."""
    flat = torch.cat([torch.full((1024,), 3.0), torch.tensor([-2.0, 4.0])])
    decoded = through(OneBitCodec(), flat)
    assert torch.equal(decoded, torch.cat([torch.full((1024,), 3.0), torch.tensor([-3.0, 3.0])]))


def test_signs_never_make_the_error_larger_than_the_input() -> None:
    heavy = torch.distributions.StudentT(torch.tensor(1.5)).sample(torch.Size([100_000]))
    assert float((heavy - through(OneBitCodec(), heavy)).norm() / heavy.norm()) < 1.0


@pytest.mark.parametrize("bits", [4, 8])
def test_the_error_is_at_most_half_a_step(bits: int) -> None:
    flat = torch.randn(512, generator=torch.Generator().manual_seed(2))
    step = float(flat.max() - flat.min()) / (2**bits - 1)
    assert float((flat - through(QuantizeCodec(bits), flat)).abs().max()) <= 0.5001 * step


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_larger_blocks_get_more_bits(bits: int) -> None:
    """No block has less than one bit below the average, and the largest have one more than it at least."""
    sizes = 2.0 ** torch.randint(-3, 4, (512,), generator=torch.Generator().manual_seed(6))
    signs = torch.randint(0, 2, (512, 32), generator=torch.Generator().manual_seed(7)).float() * 2 - 1
    noise = 0.25 + 0.75 * torch.rand(512, 32, generator=torch.Generator().manual_seed(8))
    noise[:, 0] = 1.0
    flat = (sizes[:, None] * signs * noise).view(-1)
    difference = flat - through(WaterfillCodec(bits), flat)
    shares = difference.view(512, 32).abs().amax(1) / sizes
    assert float(shares.max()) <= 2.0 ** (1 - bits)
    assert float(shares[sizes == 8].max()) <= 2.0 ** (-1 - bits)
    if bits == 4:
        even = flat - through(QuantizeCodec(4), flat)
        assert float(difference.square().sum()) < 0.2 * float(even.square().sum())


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_a_group_is_its_bits_to_the_byte(bits: int) -> None:
    codec = WaterfillCodec(bits)
    assert codec.wire_nbytes(1 << 20) == bits << 17
    nbytes = [codec.wire_nbytes(numel) for numel in range(0, 40_000, 7)]
    assert nbytes == sorted(nbytes)
    assert all(each <= bits * -(-numel // 32) * 4 + 8 for numel, each in zip(range(0, 40_000, 7), nbytes, strict=True))


def test_random_rounding_is_unbiased_and_repeatable() -> None:
    flat = torch.rand(512, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    mean = torch.stack([through(QuantizeCodec(4, key), flat) for key in range(2000)]).mean(0)
    assert torch.equal(torch.get_rng_state(), before)
    step = float(flat.max() - flat.min()) / 15
    assert float((mean - flat).abs().max()) < 5 * step / 2 / 2000**0.5
    assert torch.equal(through(QuantizeCodec(4, 7), flat), through(QuantizeCodec(4, 7), flat))


def test_overflow_becomes_inf_and_stays() -> None:
    decoded = through(CastCodec("float16"), torch.tensor([65519.0, 65520.0, -1e6, 1.0]))
    assert decoded.tolist() == [65504.0, float("inf"), float("-inf"), 1.0]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="`dtype` is 'float8'"):
        CastCodec("float8")
    with pytest.raises(ValueError, match="`bits` is 6"):
        WaterfillCodec(6)
