"""Law: every compiled kernel equals its torch twin, on any input, any length, any instruction set."""

import importlib
import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from gradwire import _native
from gradwire.compressors.kernels import native, reference
from gradwire.compressors.kernels.reference import ChunkRule, DgcRule, DgcState
from gradwire.compressors.kernels.reference import pack as reference_pack
from support.guarded import guarded

Maker = Callable[[int], Tensor]
EachNumel = Callable[[Callable[[int], None]], None]


def assert_same(ours: Tensor, wanted: Tensor) -> None:
    """The same numbers bit for bit; a NaN equals any NaN."""
    torch.testing.assert_close(ours, wanted, rtol=0.0, atol=0.0, equal_nan=True)


def other(numel: int) -> Tensor:
    return torch.randn(numel + 3, generator=torch.Generator().manual_seed(numel + 1))[3:]


def payload_of(nbytes: int) -> Tensor:
    return torch.full((nbytes,), 0xAA, dtype=torch.uint8)


def test_a_module_compiled_from_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "INTERFACE", _native.INTERFACE - 1)
    with pytest.raises(RuntimeError, match="rebuild it"):
        importlib.reload(native)
    monkeypatch.delattr(_native, "INTERFACE")
    with pytest.raises(RuntimeError, match="found interface None"):
        importlib.reload(native)


@pytest.mark.parametrize("with_residual", [False, True])
def test_onebit_is_the_reference(
    native_kernels: ModuleType, make_input: Maker, each_numel: EachNumel, with_residual: bool
) -> None:
    def check(numel: int) -> None:
        x, residual = make_input(numel), other(numel) if with_residual else None
        payloads = [payload_of(reference.onebit_nbytes(numel)) for _ in range(2)]
        new_residuals = [torch.empty(numel + 1)[1:], torch.empty(numel)]
        for kernels, payload, new_residual in zip((native_kernels, reference), payloads, new_residuals, strict=True):
            kernels.onebit_encode(x, residual, new_residual, payload)
        split = reference.onebit_nbytes(numel) - -(-numel // 8)
        assert torch.equal(payloads[0][split:], payloads[1][split:])
        assert_same(payloads[0][:split].view(torch.float32), payloads[1][:split].view(torch.float32))
        assert_same(new_residuals[0], new_residuals[1])

        table = torch.stack([payloads[0], payloads[1].flip(0), payloads[0]])
        table[1] = payloads[1]
        targets = [torch.empty(numel + 1)[1:], torch.empty(numel)]
        for kernels, target in zip((native_kernels, reference), targets, strict=True):
            kernels.onebit_decode_reduce(table, residual, target)
        assert_same(targets[0], targets[1])
        for kernels, payload, new_residual in zip((native_kernels, reference), payloads, new_residuals, strict=True):
            kernels.onebit_reduce_encode(table, residual, new_residual, payload, numel)
        assert_same(new_residuals[0], new_residuals[1])
        assert torch.equal(payloads[0][split:], payloads[1][split:])

    each_numel(check)


@pytest.mark.parametrize("rule", [ChunkRule(), ChunkRule(256, 200, 0.5)], ids=str)
def test_chunk_topk_is_the_reference(
    native_kernels: ModuleType, make_input: Maker, each_numel: EachNumel, rule: ChunkRule
) -> None:
    def check(numel: int) -> None:
        x, residual = make_input(numel), other(numel) if numel % 2 else None
        payloads = [payload_of(reference.chunk_topk_nbytes(numel, rule)) for _ in range(2)]
        new_residuals, targets = [torch.empty(numel + 1)[1:], torch.empty(numel)], torch.empty(2, numel)
        for kernels, payload, new_residual in zip((native_kernels, reference), payloads, new_residuals, strict=True):
            kernels.chunk_topk_encode(rule, x, residual, new_residual, payload)
        assert torch.equal(payloads[0], payloads[1])
        assert_same(new_residuals[0], new_residuals[1])
        second = payload_of(len(payloads[1]))
        reference.chunk_topk_encode(rule, other(numel), None, None, second)
        table = torch.stack([payloads[1], second, payloads[1]])
        for kernels, target in zip((native_kernels, reference), targets, strict=True):
            kernels.chunk_topk_decode_reduce(rule, table, residual, target)
        assert_same(targets[0], targets[1])
        for kernels, payload, new_residual in zip((native_kernels, reference), payloads, new_residuals, strict=True):
            kernels.chunk_topk_reduce_encode(rule, table, residual, new_residual, payload, numel)
        assert torch.equal(payloads[0], payloads[1])
        assert_same(new_residuals[0], new_residuals[1])

    each_numel(check)


def test_chunk_topk_places_take_little_more_than_there_are_choices() -> None:
    """Law: where half are kept or fewer, log2 of the combinations and 0.6 bits a place; never more than a bitmap.

    Rounding to whole bytes comes on top, twice.
    """
    for chunk in (256, 4096):
        for keep in range(1, min(chunk, 512) + 1, 3):
            rule = ChunkRule(chunk, keep)
            for numel in {chunk, chunk // 3, 1 + keep % chunk}:
                kept = rule.kept(numel)
                bits = 8 * (rule.record_nbytes(numel) - 4) - 2 * kept - 14
                assert bits <= numel, (rule, numel)
                if 2 * kept <= numel:
                    assert bits <= math.log2(math.comb(numel, kept)) + 0.6 * kept + 1, (rule, numel)


RULES = [ChunkRule(c, k) for c in (256, 512, 4096) for k in (1, 2, 37, 63, 64, 255, 256, 511, 512) if k <= c]


def test_chunk_topk_sends_the_largest_at_every_setting(native_kernels: ModuleType) -> None:
    """Law: what a payload decodes to and the new residual are all of p, and the largest of each chunk were sent.

    Also where they stand in a row at the beginning or at the end. Nothing is read behind the payload.
    """
    for seed, rule in enumerate(RULES):
        numel = 2 * rule.chunk + 1 + 97 * seed % rule.chunk
        sizes = (numel - torch.arange(numel)) ** (seed % 3)
        x = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * sizes
        x = x.flip(0) if seed % 2 else x
        new_residual, decoded = torch.empty(numel), torch.empty(numel)
        with guarded(reference.chunk_topk_nbytes(numel, rule)) as payload:
            native_kernels.chunk_topk_encode(rule, x, None, new_residual, payload)
            native_kernels.chunk_topk_decode_reduce(rule, payload[None], None, decoded)
            wanted = torch.empty_like(payload)
            reference.chunk_topk_encode(rule, x, None, None, wanted)
            assert torch.equal(payload, wanted), rule
        assert_same(x - decoded, new_residual)
        for chunk, sent in zip(torch.split(x.abs(), rule.chunk), torch.split(decoded, rule.chunk), strict=True):
            kept = rule.kept(chunk.numel())
            assert sent.count_nonzero() == kept, rule
            assert torch.equal(sent.nonzero().view(-1), chunk.topk(kept).indices.sort().values), rule


def test_damaged_places_stay_inside(native_kernels: ModuleType) -> None:
    """Nothing outside payloads and target is touched, and all read the same: too few ones, too many, any places.

    The levels are numbers whose sums are exact, because a damaged record may name a place twice.
    """
    for seed, rule in enumerate(RULES):
        for numel in (rule.chunk, rule.chunk // 3):
            noise = torch.randint(256, (3, rule.record_nbytes(numel)), generator=torch.Generator().manual_seed(seed))
            noise[1], noise[2] = 0xFF, 0
            noise[:, :4] = torch.tensor([0x80, 0x3F, 0x00, 0x40])  # 1 and 2 as bfloat16
            target, wanted = torch.full((numel + 200,), 7.0), torch.empty(numel)
            with guarded(noise.numel()) as payload:
                payload.copy_(noise.view(-1))
                rows = payload.view(noise.shape)
                native_kernels.chunk_topk_decode_reduce(rule, rows, None, target[100:-100])
                reference.chunk_topk_decode_reduce(rule, rows, None, wanted)
                del rows
            assert torch.equal(target[100:-100], wanted), (rule, numel)
            assert (target[:100] == 7).all()
            assert (target[-100:] == 7).all()


def test_waterfill_is_the_reference(native_kernels: ModuleType, make_input: Maker, each_numel: EachNumel) -> None:
    def check(numel: int) -> None:
        bits = 2 + numel % 4
        x, residual = make_input(numel), other(numel) * uneven(numel) if numel % 2 else None
        payloads = [payload_of(reference.waterfill_nbytes(numel, bits)) for _ in range(2)]
        new_residuals, targets = [torch.empty(numel + 1)[1:], torch.empty(numel)], torch.empty(2, numel)
        for kernels, payload, new_residual in zip((native_kernels, reference), payloads, new_residuals, strict=True):
            kernels.waterfill_encode(bits, x, residual, new_residual, payload)
        assert torch.equal(payloads[0], payloads[1])
        assert_same(new_residuals[0], new_residuals[1])
        second = payload_of(len(payloads[1]))
        reference.waterfill_encode(bits, other(numel) * uneven(numel), None, None, second)
        table = torch.stack([payloads[1], second, payloads[1]])
        for kernels, target in zip((native_kernels, reference), targets, strict=True):
            kernels.waterfill_decode_reduce(bits, table, residual, target)
        assert_same(targets[0], targets[1])
        for kernels, payload, new_residual in zip((native_kernels, reference), payloads, new_residuals, strict=True):
            kernels.waterfill_reduce_encode(bits, table, residual, new_residual, payload, numel)
        assert torch.equal(payloads[0], payloads[1])
        assert_same(new_residuals[0], new_residuals[1])

    each_numel(check)
    check(40_001)  # whole groups, and a short one


def uneven(numel: int) -> Tensor:
    """Sizes that differ from block to block, some of them by more than a byte of scale says."""
    exponents = torch.randint(-20, 4, (-(-numel // 32),), generator=torch.Generator().manual_seed(numel)).float()
    exponents[::7] = -60
    return torch.exp2(exponents).repeat_interleave(32)[:numel]


def test_a_damaged_payload_takes_no_more_words_than_there_are(native_kernels: ModuleType) -> None:
    """Whatever the scales say, widths are shared out of the payload's own words, and nothing is read behind them."""
    for seed in range(24):
        numel, bits = (100, 16_384, 16_385, 16_416, 17_000, 32_769)[seed % 6], 2 + seed // 6
        nbytes = reference.waterfill_nbytes(numel, bits)
        random = torch.randint(0, 256, (1, nbytes), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
        if seed % 2:
            random[0, :4] = torch.tensor([0xE0, 3, 0, 0], dtype=torch.uint8)
        targets = torch.empty(2, numel)
        with guarded(nbytes) as payload:
            payload.copy_(random[0])
            native_kernels.waterfill_decode_reduce(bits, payload[None], None, targets[0])
        reference.waterfill_decode_reduce(bits, random, None, targets[1])
        assert_same(targets[0], targets[1])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("key", [None, 0xFFFFFFFF])
def test_quantize_is_the_reference(
    native_kernels: ModuleType, make_input: Maker, each_numel: EachNumel, bits: int, key: int | None
) -> None:
    def check(numel: int) -> None:
        x, residual = make_input(numel), other(numel) if numel % 2 else None
        payloads = [payload_of(reference.quantize_nbytes(numel, bits)) for _ in range(2)]
        new_residuals = [torch.empty(numel + 1)[1:], torch.empty(numel)]
        for kernels, payload, new_residual in zip((native_kernels, reference), payloads, new_residuals, strict=True):
            kernels.quantize_encode(bits, x, residual, new_residual, payload, key)
        split = reference.quantize_nbytes(numel, bits) - -(-numel * bits // 8)
        assert torch.equal(payloads[0][split:], payloads[1][split:])
        assert_same(payloads[0][:split].view(torch.float32), payloads[1][:split].view(torch.float32))
        assert_same(new_residuals[0], new_residuals[1])
        targets = [torch.empty(numel + 1)[1:], torch.empty(numel)]
        for kernels, target in zip((native_kernels, reference), targets, strict=True):
            kernels.quantize_decode_reduce(bits, torch.stack(payloads), residual, target)
        assert_same(targets[0], targets[1])
        table, reduced_payloads = torch.stack([payloads[1]] * 3), [torch.empty_like(payload) for payload in payloads]
        for kernels, reduced, new_residual in zip(
            (native_kernels, reference), reduced_payloads, new_residuals, strict=True
        ):
            kernels.quantize_reduce_encode(bits, table, residual, new_residual, reduced, numel, key)
        assert torch.equal(reduced_payloads[0][split:], reduced_payloads[1][split:])
        assert_same(reduced_payloads[0][:split].view(torch.float32), reduced_payloads[1][:split].view(torch.float32))
        assert_same(new_residuals[0], new_residuals[1])

    each_numel(check)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cast_is_the_reference(
    native_kernels: ModuleType, make_input: Maker, each_numel: EachNumel, dtype: torch.dtype
) -> None:
    def check(numel: int) -> None:
        x, residual = make_input(numel), other(numel) if numel % 2 else None
        narrow = [torch.empty(numel, dtype=dtype) for _ in range(2)]
        new_residuals = [torch.empty(numel + 1)[1:], torch.empty(numel)]
        for kernels, target, new_residual in zip((native_kernels, reference), narrow, new_residuals, strict=True):
            kernels.cast_encode(x, 0.125, residual, new_residual, target)
        assert_same(narrow[0].float(), narrow[1].float())
        assert_same(new_residuals[0], new_residuals[1])
        targets = [torch.empty(numel + 1)[1:], torch.empty(numel)]
        for addend, sources in ((residual, torch.stack(narrow)), (None, narrow[0].unsqueeze(0))):
            for kernels, target in zip((native_kernels, reference), targets, strict=True):
                kernels.cast_decode_reduce(sources, addend, target)
            assert_same(targets[0], targets[1])

    each_numel(check)


def test_every_half_survives_the_round_trip(native_kernels: ModuleType) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        wide, back = torch.empty(1 << 16), torch.empty(1 << 16, dtype=dtype)
        native_kernels.cast_decode_reduce(halves.unsqueeze(0), None, wide)
        assert_same(wide, halves.float())
        native_kernels.cast_encode(wide, 1.0, None, None, back)
        number = ~wide.isnan()
        assert torch.equal(back.view(torch.int16)[number], halves.view(torch.int16)[number])


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


@pytest.mark.parametrize("bucket_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pack_and_unpack_are_the_reference(
    native_kernels: ModuleType, make_input: Maker, bucket_dtype: torch.dtype
) -> None:
    """Any dtypes and places in one bucket; what lies between the tensors stays as it was."""
    numels = (1, 0, 7, 16, 31, 1025, 300_001)  # the last makes the bucket larger than what is kept in a cache
    offsets, tensors, start = [], [], 3
    for number, numel in enumerate(numels):
        dtype = (torch.float32, torch.float16, torch.bfloat16)[number % 3]
        tensors.append(make_input(numel).to(dtype) if numel else torch.empty(0, 2, dtype=dtype))
        offsets.append(start)
        start += numel + number % 2
    copies = [tensor.clone() for tensor in tensors]
    buckets = [torch.full((start + 5,), 9.0, dtype=bucket_dtype) for _ in range(2)]
    for kernels, bucket in zip((native_kernels, reference_pack), buckets, strict=True):
        kernels.pack(tensors, offsets, 0.3, bucket)
    assert_same(buckets[0], buckets[1])
    native_kernels.unpack(tensors, offsets, 3.0, buckets[0])
    reference_pack.unpack(copies, offsets, 3.0, buckets[0])
    for ours, wanted in zip(tensors, copies, strict=True):
        assert_same(ours, wanted)


def test_unpack_undoes_pack(native_kernels: ModuleType, make_input: Maker) -> None:
    tensors = [make_input(numel) for numel in (5, 4097, 64)]
    before, bucket = [tensor.clone() for tensor in tensors], torch.empty(5000)
    native_kernels.pack(tensors, (1, 6, 4200), 1.0, bucket)
    for tensor in tensors:
        tensor.fill_(7.0)
    native_kernels.unpack(tensors, (1, 6, 4200), 1.0, bucket)
    for tensor, wanted in zip(tensors, before, strict=True):
        assert_same(tensor, wanted)


def test_pack_refuses_what_does_not_fit() -> None:
    x, bucket = torch.ones(8), torch.zeros(8)
    with pytest.raises(ValueError, match="`offsets`"):
        native.pack([x], [1], 1.0, bucket)
    with pytest.raises(ValueError, match="`offsets`"):
        native.unpack([x], [-1], 1.0, bucket)
    with pytest.raises(ValueError, match="contiguous"):
        native.pack([torch.ones(8)[::2]], [0], 1.0, bucket)
    with pytest.raises(ValueError, match="float64"):
        native.pack([x.double()], [0], 1.0, bucket)
    assert not bucket.any()


def test_a_wrong_tensor_is_refused() -> None:
    x = torch.randn(64)
    with pytest.raises(ValueError, match="`payload`"):
        native.onebit_encode(x, None, None, torch.empty(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="`residual`"):
        native.onebit_encode(x, x[:32], None, payload_of(reference.onebit_nbytes(64)))
    with pytest.raises(ValueError, match="`gradient`"):
        native.onebit_encode(x.double(), None, None, payload_of(reference.onebit_nbytes(64)))
    with pytest.raises(ValueError, match="`gradient`"):
        native.onebit_encode(torch.randn(128)[::2], None, None, payload_of(reference.onebit_nbytes(64)))
    for rule, name in ((ChunkRule(300), "chunk"), (ChunkRule(256, 300), "keep")):
        with pytest.raises(ValueError, match=f"`{name}`"):
            native.chunk_topk_encode(rule, x, None, None, payload_of(reference.chunk_topk_nbytes(64, rule)))
    with pytest.raises(ValueError, match="`payloads`"):
        native.onebit_decode_reduce(torch.empty(2, 3, dtype=torch.uint8), None, x)
