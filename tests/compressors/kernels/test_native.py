"""Law: every compiled kernel equals its torch twin, on any input, any length, any instruction set."""

import importlib
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from gradwire import _native
from gradwire.compressors import compiled
from gradwire.compressors.codecs.cast import CastCodec
from gradwire.compressors.codecs.onebit import OneBitCodec
from gradwire.compressors.codecs.waterfill import WaterfillCodec
from gradwire.compressors.kernels import native, reference
from gradwire.compressors.kernels.reference import DgcRule, DgcState
from support.block_codecs import GROUPS, assert_same, check_codec
from support.guarded import guarded

Maker = Callable[[int], Tensor]
EachNumel = Callable[[Callable[[int], None]], None]


def other(numel: int) -> Tensor:
    return torch.randn(numel + 3, generator=torch.Generator().manual_seed(numel + 1))[3:]


def test_a_module_compiled_from_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "INTERFACE", _native.INTERFACE - 1)
    with pytest.raises(RuntimeError, match="rebuild it"):
        importlib.reload(compiled)
    monkeypatch.delattr(_native, "INTERFACE")
    with pytest.raises(RuntimeError, match="found interface None"):
        importlib.reload(compiled)


@pytest.mark.parametrize("name", GROUPS)
def test_a_codec_is_the_reference(
    native_kernels: ModuleType, make_input: Maker, each_numel: EachNumel, name: str
) -> None:
    def check(numel: int) -> None:
        codec = GROUPS[name][numel % len(GROUPS[name])]
        check_codec(native_kernels, codec, make_input(numel), apart=numel // 2 % 2)

    each_numel(check)
    if name == "waterfill":
        check(40_001)  # whole groups, and a short one


def test_a_damaged_payload_takes_no_more_words_than_there_are(native_kernels: ModuleType) -> None:
    """Whatever the scales say, widths are shared out of the payload's own words, and nothing is read behind them."""
    for seed in range(24):
        numel, bits = (100, 16_384, 16_385, 16_416, 17_000, 32_769)[seed % 6], 2 + seed // 6
        codec = WaterfillCodec(bits)
        nbytes = codec.wire_nbytes(numel)
        random = torch.randint(0, 256, (1, nbytes), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
        if seed % 2:
            random[0, :4] = torch.tensor([0xE0, 3, 0, 0], dtype=torch.uint8)
        targets = torch.empty(2, numel)
        with guarded(nbytes) as payload:
            payload.copy_(random[0])
            native_kernels.decode_reduce(codec, payload[None], None, targets[0])
        reference.decode_reduce(codec, random, None, targets[1])
        assert_same(targets[0], targets[1])


def test_every_half_survives_the_round_trip(native_kernels: ModuleType) -> None:
    for codec in (CastCodec("float16"), CastCodec("bfloat16")):
        halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        wide, back = torch.empty(1 << 16), torch.empty_like(halves)
        native_kernels.decode_pieces(codec, halves.view(torch.uint8)[None], wide, 1 << 16)
        assert_same(wide, halves.view(codec.dtype).float())
        native_kernels.encode_pieces(codec, wide, None, None, back.view(torch.uint8)[None], 1 << 16)
        number = ~wide.isnan()
        assert torch.equal(back[number], halves[number])


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("density", [0.001, 0.3, 1.0])
def test_dgc_is_the_reference(
    native_kernels: ModuleType, make_input: Maker, each_numel: EachNumel, nesterov: bool, density: float
) -> None:
    def check(numel: int) -> None:
        x, k = make_input(numel), max(1, int(density * numel))
        rule, results = DgcRule(0.9, nesterov, 0.5), []
        for kernels in (native_kernels, reference):
            state = DgcState(other(numel), other(numel).flip(0).clone(), torch.empty(numel), torch.empty(numel))
            indices, values = torch.empty(k, dtype=torch.int32), torch.empty(k)
            kernels.dgc_step(x, state, rule, indices, values)
            results.append((indices, values, state.velocity_out, state.total_out))
        for ours, wanted in zip(*results, strict=True):
            assert_same(ours, wanted)

    each_numel(check)


def test_dgc_selects_exactly_on_a_large_input(native_kernels: ModuleType) -> None:
    """The sampled threshold only helps: far more elements than the sample has, and a sample that is misled."""
    numel, k = 300_000, 300
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(numel, generator=generator)
    lumpy = spread * 1e-3
    lumpy[1000:1100] += 5.0
    for x in (spread, lumpy, torch.ones(numel), torch.arange(numel).float() - numel / 2):
        zeros = torch.zeros(numel)
        state = DgcState(zeros, zeros, torch.empty(numel), torch.empty(numel))
        indices, values = torch.empty(k, dtype=torch.int32), torch.empty(k)
        native_kernels.dgc_step(x, state, DgcRule(0.0), indices, values)
        wanted = torch.argsort(x.abs(), descending=True, stable=True)[:k].sort().values
        assert torch.equal(indices.long(), wanted)
        assert torch.equal(values, x[wanted])
        assert not state.total_out[wanted].any()


def test_scatter_add_is_the_reference_and_checks_its_indices() -> None:
    indices, values = torch.tensor([4, 0, 4], dtype=torch.int32), torch.tensor([1.0, 2.0, 3.0])
    targets = [torch.ones(5), torch.ones(5)]
    native.scatter_add(indices, values, targets[0])
    reference.scatter_add(indices, values, targets[1])
    assert torch.equal(targets[0], targets[1])
    for bad in (5, -1):
        with pytest.raises(IndexError, match="`indices`"):
            native.scatter_add(torch.tensor([0, bad], dtype=torch.int32), torch.ones(2), targets[0])
    assert torch.equal(targets[0], targets[1])


@pytest.mark.parametrize("shape", [(1, 40), (40, 1), (5, 3), (33, 70), (64, 64), (130, 1100)])
@pytest.mark.parametrize("rank", [1, 2, 4, 7])
def test_powersgd_is_the_reference(native_kernels: ModuleType, shape: tuple[int, int], rank: int) -> None:
    """The products within float32 rounding of the sums; the restored matrix bit for bit, as all ranks must agree."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(rank)
    matrix, residual = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    q, p = torch.randn(rank, columns, generator=generator), torch.empty(2, rank, rows)
    copies = [matrix.clone(), matrix.clone()]
    for kernels, copy, target in zip((native_kernels, reference), copies, p, strict=True):
        kernels.powersgd_project(copy, residual, q, target)
    assert_same(copies[0], copies[1])
    bound = 4e-7 * (columns**0.5 + 2)
    torch.testing.assert_close(p[0], p[1], rtol=0.0, atol=bound * 8)
    back = torch.empty(2, rank, columns)
    for kernels, target in zip((native_kernels, reference), back, strict=True):
        kernels.powersgd_back_project(copies[0], p[1], target)
    torch.testing.assert_close(back[0], back[1], rtol=0.0, atol=float(p.abs().max()) * 4e-7 * (rows**0.5 + 2) * 8)
    new_residuals = torch.empty(2, *shape)
    for kernels, copy, new_residual in zip((native_kernels, reference), copies, new_residuals, strict=True):
        kernels.powersgd_restore(copy, new_residual, p[1], back[1], q)
    assert_same(copies[0], copies[1])
    assert_same(new_residuals[0], new_residuals[1])


def test_orthogonal_rows_for_any_input() -> None:
    generator = torch.Generator().manual_seed(0)
    usual = torch.randn(4, 50, generator=generator)
    dependent = torch.stack([usual[0], 2 * usual[0], usual[1], torch.zeros(50)])
    cases = [usual, dependent, torch.zeros(4, 50), usual * 1e30, usual * 1e-40, torch.ones(3, 3), torch.zeros(1, 1)]
    for case in cases:
        ours, twin = case.clone(), case.clone()
        native.orthogonalize(ours, 7)
        reference.orthogonalize(twin, 7)
        torch.testing.assert_close(ours @ ours.t(), torch.eye(len(case)), rtol=0.0, atol=1e-5)
        torch.testing.assert_close(ours, twin, rtol=0.0, atol=1e-5)
    bad = usual.clone()
    bad[1, 3] = float("inf")
    native.orthogonalize(bad, 7)
    assert bad[1].isnan().any()


def test_factors_do_not_depend_on_the_instruction_set(native_kernels: ModuleType) -> None:
    """Ranks on different processors must decode the same bits; the plain loop is what they are compared with."""
    generator = torch.Generator().manual_seed(3)
    matrix, q = torch.randn(37, 90, generator=generator), torch.randn(3, 90, generator=generator)
    isa, results = _native.isa(), []
    for name in (isa, "plain"):
        _native.limit_isa(name)
        p, back = torch.empty(3, 37), torch.empty(3, 90)
        native_kernels.powersgd_project(matrix, None, q, p)
        native_kernels.powersgd_back_project(matrix, p, back)
        native_kernels.orthogonalize(p, 0)
        results.append((p, back))
    for ours, plain in zip(*results, strict=True):
        assert torch.equal(ours, plain)


def test_a_wrong_tensor_is_refused() -> None:
    x, codec = torch.randn(64), OneBitCodec()
    payload = torch.empty(1, codec.wire_nbytes(64), dtype=torch.uint8)
    with pytest.raises(ValueError, match="`payloads`"):
        native.encode_pieces(codec, x, None, None, payload[:, :3], 64)
    with pytest.raises(ValueError, match="`residual`"):
        native.encode_pieces(codec, x, x[:32], None, payload, 64)
    with pytest.raises(ValueError, match="`gradient`"):
        native.encode_pieces(codec, x.double(), None, None, payload, 64)
    with pytest.raises(ValueError, match="`gradient`"):
        native.encode_pieces(codec, torch.randn(128)[::2], None, None, payload, 64)
    with pytest.raises(ValueError, match="`payloads`"):
        native.decode_reduce(codec, torch.empty(2, 3, dtype=torch.uint8), None, x)


def test_a_codec_without_kernels_is_refused() -> None:
    class Unknown(OneBitCodec):
        family = "unknown"

    with pytest.raises(ValueError, match="`family` is 'unknown'"):
        native.decode_reduce(Unknown(), torch.empty(1, 12, dtype=torch.uint8), None, torch.empty(64))
