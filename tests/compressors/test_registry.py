"""Strict options, and a user's own compressor in one file."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradwire.comms.plan.codec_price import CODEC_FACTS
from gradwire.compressors import registry
from gradwire.compressors.base import Codec, Compressor, Layout
from gradwire.compressors.codecs.base import BlockCodec
from gradwire.compressors.optim.peers import run_requests
from gradwire.compressors.registry import BUILT_IN, make, names, options_of, register_codec, register_compressor
from gradwire.compressors.two_stage import TwoStage
from support.block_codecs import CODECS
from support.threads import ThreadGroup, take_turns

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "compressors.md"


class TernaryCodec:
    """A user's codec: -1, 0 or 1 a byte, and one scale. Only the three methods of the protocol."""

    def wire_nbytes(self, numel: int) -> int:
        return 4 + numel

    def encode(self, flat: Tensor, payload: Tensor) -> None:
        scale = flat.abs().mean() if flat.numel() else torch.zeros(())
        payload[:4] = scale.view(1).view(torch.uint8)
        payload[4:] = (flat / scale.clamp(min=1e-30)).round().clamp(-1, 1).to(torch.int8).view(torch.uint8)

    def decode(self, payload: Tensor, flat: Tensor) -> None:
        flat.copy_(payload[4:].view(torch.int8).float() * payload[:4].clone().view(torch.float32))


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))


@pytest.mark.usefixtures("clean_registry")
def test_a_users_codec_obeys_the_laws(layout: Layout) -> None:
    codec: Codec = TernaryCodec()
    register_codec("a users own", TernaryCodec)
    size, steps, groups = 3, 5, ThreadGroup.create(3)

    def body(rank: int) -> tuple[list[Tensor], Tensor, Tensor]:
        ours, outputs, sent = make("a users own", {"residual": True}), [], torch.zeros(layout.numel)
        for step in range(steps):
            shard = torch.randn(layout.numel, generator=torch.Generator().manual_seed(10 * step + rank))
            sent += shard
            before = groups[rank].sent_nbytes
            run_requests(ours.all_reduce(shard, layout, groups[rank].member), groups[rank])
            assert groups[rank].sent_nbytes - before == ours.wire_nbytes(layout, size)
            ours.end_step(True)
            outputs.append(shard)
        held_back = torch.zeros(layout.numel)
        ours.flush(held_back, layout)
        return outputs, held_back, sent

    results = take_turns(size, body)
    for outputs, _, _ in results[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(outputs, results[0][0], strict=True))
    arrived = torch.stack(results[0][0]).sum(0) + sum(held for _, held, _ in results)
    torch.testing.assert_close(arrived, sum((sent for _, _, sent in results), torch.zeros(1)), rtol=0.0, atol=1e-4)
    assert codec.wire_nbytes(10) == 14


def test_every_compressor_obeys_the_protocol() -> None:
    for name in names():
        made = make(name)
        assert isinstance(made, Compressor)
        assert made.name == name


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_comes_with_gradwire_is_in_every_table_and_on_the_page(name: str) -> None:
    """Where CONTRIBUTING.md sends who adds one; what a user has registered is in none of them."""
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    codec = made.codec if isinstance(made := make(name), TwoStage) else None
    tested = {(each.family, each.parameters) for each in CODECS.values()}
    has = {
        "a row in docs/reference/compressors.md": any(f"`{name}`" in row for row in rows),
        "a row in CODEC_FACTS of comms/plan/codec_price.py": name in CODEC_FACTS,
        "CODECS of tests/support/block_codecs.py": not isinstance(codec, BlockCodec)
        or (codec.family, codec.parameters) in tested,
    }
    missing = [place for place, there in has.items() if not there]
    assert not missing, f"{name!r} wants {'; '.join(missing)}"


@pytest.mark.usefixtures("clean_registry")
def test_a_taken_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'int4' is taken"):
        register_codec("int4", TernaryCodec)
    register_compressor("another of a users own", lambda: make("none"))
    assert options_of("another of a users own") == {}


def test_unknown_names_list_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"`compressor` is 'onebits'.*onebit"):
        make("onebits")
    with pytest.raises(ValueError, match=r"'chunk_topk', which is gone: take waterfill2"):
        make("chunk_topk")
    with pytest.raises(ValueError, match=r"'warmup'.*momentum, return_bits, warmup_steps"):
        make("onebit", {"warmup": 3})
    with pytest.raises(ValueError, match="'rank', which 'dgc' does not take"):
        make("dgc", {"rank": 3})
    with pytest.raises(ValueError, match="it takes momentum, nesterov"):
        make("none", {"x": 1})


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("dgc", "density", 0.0),
        ("dgc", "density", 1.5),
        ("dgc", "density", -0.1),
        ("dgc", "momentum", 1.0),
        ("dgc", "clip_norm", -1.0),
        ("dgc", "warmup_steps", -1),
        ("dgc", "value_dtype", "float8"),
        ("powersgd", "rank", 0),
        ("powersgd", "rank", -2),
        ("powersgd", "min_compression_rate", 0.0),
        ("powersgd", "factor_dtype", "int8"),
        ("powersgd", "warmup_steps", -3),
        ("onebit", "return_bits", 4),
        ("onebit", "momentum", -0.5),
        ("onebit", "warmup_steps", -1),
        ("none", "momentum", 1.0),
    ],
)
def test_a_value_out_of_range_is_refused(name: str, option: str, value: float | str) -> None:
    with pytest.raises(ValueError, match=f"`{option}` is"):
        make(name, {option: value})


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("powersgd", "rank", 2.0),
        ("powersgd", "rank", True),
        ("powersgd", "warm_start", 1),
        ("dgc", "density", "0.1"),
        ("int4", "stochastic", "yes"),
        ("int8", "seed", 1.5),
        ("fp16", "plain", 0),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(name: str, option: str, value: float | str) -> None:
    with pytest.raises(TypeError, match=f"`{option}` of compressor '{name}'"):
        make(name, {option: value})


def test_an_integer_is_a_fine_float() -> None:
    assert isinstance(make("dgc", {"density": 1}), Compressor)


def test_contradicting_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`residual` is True with `plain`"):
        make("fp16", {"plain": True, "residual": True})


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_gradients_that_are_no_real_floats_are_refused(dtype: torch.dtype, layout: Layout) -> None:
    group = ThreadGroup.create(1)[0]
    for name in names():
        with pytest.raises(TypeError, match="`flat` has dtype"):
            list(make(name).all_reduce(torch.zeros(layout.numel, dtype=dtype), layout, group.member))
