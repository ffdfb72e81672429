"""Law: DGC's, PowerSGD's and the packing kernels equal their torch twins, on a GPU and with their source on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.compressors.kernels import cuda, reference
from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.kernels.reference import DgcRule, DgcRun, DgcState, FactorRun, FactorRuns

Maker = Callable[[int], Tensor]
EachNumel = Callable[[Callable[[int], None]], None]


def assert_same(ours: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(ours.cpu(), wanted, rtol=0.0, atol=0.0, equal_nan=True)


def other(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel + 1))


def run_dgc(
    step: Callable[[Tensor, DgcState, DgcRule, Tensor, Tensor], None],
    device: torch.device,
    inputs: list[Tensor],
    rule: DgcRule,
    k: int,
) -> list[Tensor]:
    x, velocity, total = (tensor.to(device, copy=True) for tensor in inputs)
    state = DgcState(velocity, total, torch.empty_like(velocity), torch.empty_like(total))
    indices, values = torch.empty(k, dtype=torch.int32, device=device), torch.empty(k, device=device)
    step(x, state, rule, indices, values)
    return [indices, values, state.velocity_out, state.total_out]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("density", [0.001, 0.3, 1.0])
def test_dgc_is_the_reference(
    device: torch.device, make_input: Maker, each_numel: EachNumel, nesterov: bool, density: float
) -> None:
    def check(numel: int) -> None:
        inputs, k = [make_input(numel), other(numel), other(numel).flip(0).clone()], max(1, int(density * numel))
        rule = DgcRule(0.9, nesterov, 0.5)
        wanted = run_dgc(reference.dgc_step, torch.device("cpu"), inputs, rule, k)
        for ours, twin in zip(run_dgc(cuda.dgc_step, device, inputs, rule, k), wanted, strict=True):
            assert_same(ours, twin)

    each_numel(check)


@pytest.mark.parametrize("kind", ["spread", "lumpy", "equal", "mostly_zero", "ordered"])
def test_dgc_selects_exactly_on_a_large_input(device: torch.device, kind: str) -> None:
    """The sampled threshold only helps: far more elements than the sample has, and samples that are misled."""
    numel, k = 60_000, 300
    spread = other(numel)
    lumpy, sparse = spread * 1e-3, torch.zeros(numel)
    lumpy[1000:1100] += 5.0
    sparse[::997] = 1.0
    x = {
        "spread": spread,
        "lumpy": lumpy,
        "equal": torch.ones(numel),
        "mostly_zero": sparse,
        "ordered": torch.arange(numel).float() - numel / 2,
    }[kind]
    inputs, rule = [x, torch.zeros(numel), torch.zeros(numel)], DgcRule(0.0)
    wanted = run_dgc(reference.dgc_step, torch.device("cpu"), inputs, rule, k)
    for ours, twin in zip(run_dgc(cuda.dgc_step, device, inputs, rule, k), wanted, strict=True):
        assert_same(ours, twin)


def test_dgc_selects_exactly_where_the_sample_promised_too_much(device: torch.device) -> None:
    """The sampled elements are large and hardly any other is: fewer than k reach the threshold."""
    numel, k = 60_000, 20_000
    x = other(numel) * 1e-6
    stride = numel // 16 // 1024 * 16
    for line in range(1024):
        x[line * stride : line * stride + 16] += 10.0
    inputs, rule = [x, torch.zeros(numel), torch.zeros(numel)], DgcRule(0.0)
    assert stride > 16, "the sample must not be everything"
    wanted = run_dgc(reference.dgc_step, torch.device("cpu"), inputs, rule, k)
    for ours, twin in zip(run_dgc(cuda.dgc_step, device, inputs, rule, k), wanted, strict=True):
        assert_same(ours, twin)


def test_dgc_state_may_be_replaced_in_place(device: torch.device) -> None:
    numel, k, rule = 5000, 50, DgcRule(0.9)
    inputs = [other(numel), other(numel) * 2, other(numel).flip(0).clone()]
    wanted = run_dgc(reference.dgc_step, torch.device("cpu"), inputs, rule, k)
    x, velocity, total = (tensor.to(device, copy=True) for tensor in inputs)
    indices, values = torch.empty(k, dtype=torch.int32, device=device), torch.empty(k, device=device)
    cuda.dgc_step(x, DgcState(velocity, total, velocity, total), rule, indices, values)
    for ours, twin in zip((indices, values, velocity, total), wanted, strict=True):
        assert_same(ours, twin)


SHAPES: dict[str, tuple[int, ...]] = {"one": (5000,), "small": (1, 3, 33, 7), "mixed": (9001, 5, 4096, 20_000, 4097, 1)}
"""Elements of a shard's parameters: below a line, of whole tiles, above the sample."""


@pytest.mark.parametrize("numels", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("density", [0.002, 0.4])
@pytest.mark.parametrize("clipped", [False, True])
def test_dgc_of_many_parameters_is_the_reference(
    device: torch.device, numels: tuple[int, ...], density: float, clipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each parameter selects for itself, with a factor read from the device, and all share seven launches."""
    numel, launched, start = sum(numels), [], cuda_launch.launch
    runs = [DgcRun(sum(numels[:index]), part, max(1, int(density * part))) for index, part in enumerate(numels)]
    chosen, rule = sum(run.count for run in runs), DgcRule(0.9, nesterov=clipped)
    factors = torch.linspace(0.3, 1.0, len(runs)) if clipped else None

    def count(*arguments: Any, **named: Any) -> None:
        launched.append(arguments[1])
        start(*arguments, **named)

    monkeypatch.setattr(cuda_launch, "launch", count)
    results: list[list[Tensor]] = []
    for there, step in ((device, cuda.dgc_step_many), (torch.device("cpu"), reference.dgc_step_many)):
        x, velocity, total = (each.to(there) for each in (other(numel), other(numel) * 2, other(numel).flip(0)))
        state = DgcState(velocity, total, torch.empty_like(velocity), torch.empty_like(total))
        indices, values = torch.empty(chosen, dtype=torch.int32, device=there), torch.empty(chosen, device=there)
        step(x, state, rule, None if factors is None else factors.to(there), runs, indices, values)
        results.append([indices, values, state.velocity_out, state.total_out])
    assert len(launched) == 7, launched
    for ours, twin in zip(*results, strict=True):
        assert_same(ours, twin)


def test_dgc_refuses_what_it_cannot_select(device: torch.device) -> None:
    x = torch.zeros(4, device=device)
    state = DgcState(x, x, x.clone(), x.clone())
    with pytest.raises(ValueError, match="`indices`"):
        cuda.dgc_step(
            x, state, DgcRule(0.0), torch.empty(5, dtype=torch.int32, device=device), torch.empty(5, device=device)
        )
    with pytest.raises(ValueError, match="`runs`"):
        cuda.dgc_step_many(
            x,
            state,
            DgcRule(0.0),
            None,
            [DgcRun(3, 2, 1)],
            torch.empty(1, dtype=torch.int32, device=device),
            torch.empty(1, device=device),
        )


def test_scatter_add_is_the_reference_and_marks_a_bad_index(device: torch.device) -> None:
    indices, values = torch.tensor([4, 0, 4], dtype=torch.int32), torch.tensor([1.0, 1e-40, 3.0])
    ours, wanted = torch.zeros(5, device=device), torch.zeros(5)
    cuda.scatter_add(indices.to(device), values.to(device), ours)
    reference.scatter_add(indices, values, wanted)
    assert_same(ours, wanted)
    for bad in (5, -1):
        damaged = torch.tensor([2, bad], dtype=torch.int32, device=device)
        cuda.scatter_add(damaged, torch.ones(2, device=device), ours)
        assert ours[0].isnan()
        ours[0] = 0.0


@pytest.mark.parametrize("value_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 5, 4096, 4097, 9001, 20_000])
def test_the_sum_of_sparse_payloads_is_the_reference(
    device: torch.device, numel: int, value_dtype: torch.dtype
) -> None:
    """In the order of the ranks, with rows at odd addresses; a bad index makes the sum NaN."""
    generator = torch.Generator().manual_seed(numel)
    for share in (0.001, 0.1, 1.0):
        count = max(1, int(share * numel))
        rows = []
        for _ in range(5):
            places = torch.randperm(numel, generator=generator)[:count].sort().values.to(torch.int32)
            values = torch.randn(count, generator=generator) * torch.exp(9 * torch.randn(count, generator=generator))
            values[::3] = -0.0
            rows.append(torch.cat([places.view(torch.uint8), values.to(value_dtype).view(torch.uint8)]))
        payloads, wanted = torch.stack(rows), torch.empty(numel)
        there = torch.zeros(5, payloads.shape[1] + 3, dtype=torch.uint8, device=device)[:, 1:-2]
        there.copy_(payloads)
        ours = torch.full((numel + 1,), 7.0, device=device)
        cuda.dgc_sum(there, count, value_dtype, ours[1:])
        reference.dgc_sum(payloads, count, value_dtype, wanted)
        assert torch.equal(ours[1:].cpu().view(torch.int32), wanted.view(torch.int32))
        assert ours[0] == 7.0
    for number, bad in ((0, -1), (count - 1, numel)):
        damaged = there.clone()
        damaged[2, 4 * number : 4 * number + 4] = torch.tensor([bad], dtype=torch.int32).view(torch.uint8).to(device)
        cuda.dgc_sum(damaged, count, value_dtype, ours[1:])
        assert ours[1].isnan()
    with pytest.raises(ValueError, match="`value_dtype`"):
        cuda.dgc_sum(there, count, torch.float64, ours[1:])
    with pytest.raises(ValueError, match="`payloads`"):
        cuda.dgc_sum(there[:, :4], count, value_dtype, ours[1:])


@pytest.mark.parametrize("shape", [(1, 40), (40, 1), (5, 3), (33, 70), (64, 64), (13, 1100), (3, 2500)])
@pytest.mark.parametrize("rank", [1, 2, 7])
@pytest.mark.parametrize("with_residual", [True, False])
def test_powersgd_restore_is_the_reference(
    device: torch.device, shape: tuple[int, int], rank: int, with_residual: bool
) -> None:
    rows, columns = shape
    generator = torch.Generator().manual_seed(rank)
    wanted, p = torch.randn(shape, generator=generator), torch.randn(rank, rows, generator=generator)
    own, total = torch.randn(2, rank, columns, generator=generator).unbind(0)
    ours, new_residual, wanted_residual = (
        wanted.to(device, copy=True),
        torch.empty(shape, device=device),
        torch.empty(shape),
    )
    cuda.powersgd_restore(ours, new_residual if with_residual else None, *(part.to(device) for part in (p, own, total)))
    reference.powersgd_restore(wanted, wanted_residual if with_residual else None, p, own, total)
    assert_same(ours, wanted)
    if with_residual:
        assert_same(new_residual, wanted_residual)


MATRICES: dict[str, list[tuple[int, int, int]]] = {
    "one": [(33, 70, 3)],
    "layers": [(16, 24, 2)] * 3 + [(24, 40, 2)] * 2,
    "blocks": [(16, 24, 2), (24, 40, 3)] * 3,
    "uneven": [(16, 24, 2), (16, 24, 2), (5, 1100, 1), (16, 24, 2), (1, 3, 1), (16, 24, 2), (16, 24, 1)],
}
"""Rows, columns and rank of a shard's matrices: in a row, at even distances, and at others."""


@pytest.mark.parametrize("shapes", MATRICES.values(), ids=MATRICES)
@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.parametrize("with_residual", [True, False])
def test_powersgd_of_many_matrices_is_the_reference(
    device: torch.device, shapes: list[tuple[int, int, int]], gap: int, with_residual: bool
) -> None:
    """What lies between the matrices stays as it is; the restoration is the reference's bit for bit, in one launch."""
    runs, start, p_start, q_start = [], gap, 0, 0
    for rows, columns, rank in shapes:
        runs.append(FactorRun(start, rows, columns, rank, p_start, q_start))
        start, p_start, q_start = start + rows * columns + gap, p_start + rank * rows, q_start + rank * columns
    matrices, generator = FactorRuns(tuple(runs)), torch.Generator().manual_seed(len(shapes))
    flat, residual = torch.randn(2, start, generator=generator).unbind(0)
    q, q_sum = torch.randn(2, q_start, generator=generator).unbind(0)
    results: list[list[Tensor]] = []
    for there, kernels in ((device, cuda), (torch.device("cpu"), reference)):
        x, r, p, own = (
            flat.to(there, copy=True),
            residual.to(there, copy=True),
            torch.empty(p_start),
            torch.empty(q_start),
        )
        p, own, given = p.to(there), own.to(there), r if with_residual else None
        kernels.powersgd_project_many(x, given, matrices, q.to(there), p)
        kernels.powersgd_back_project_many(x, matrices, p, own)
        results.append([x.clone(), p.clone(), own.clone()])
        p.copy_(results[0][1])
        own.copy_(results[0][2])
        kernels.powersgd_restore_many(x, given, matrices, p, own, q_sum.to(there))
        results[-1] += [x, r]
    for number, (ours, twin) in enumerate(zip(*results, strict=True)):
        if number in (1, 2):  # products: another library's order of sums
            torch.testing.assert_close(ours.cpu(), twin, rtol=1e-4, atol=1e-4)
        else:
            assert_same(ours, twin)
    short, factors = torch.zeros(start - gap - 1, device=device), own.to(device)
    with pytest.raises(ValueError, match="`matrices` reach"):
        cuda.powersgd_restore_many(short, None, matrices, torch.empty(p_start, device=device), factors, factors)


def test_orthogonal_rows_for_any_input_in_one_launch(device: torch.device) -> None:
    usual = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    dependent = torch.stack([usual[0], 2 * usual[0], usual[1], torch.zeros(50)])
    wide = torch.randn(3, 700, generator=torch.Generator().manual_seed(1))
    cases = [
        usual,
        dependent,
        torch.zeros(4, 50),
        usual * 1e30,
        usual * 1e-40,
        torch.ones(3, 3),
        torch.zeros(1, 1),
        wide,
    ]
    ours = [case.to(device, copy=True) for case in cases]
    cuda.orthogonalize_many(ours, list(range(len(cases))))
    for key, (matrix, case) in enumerate(zip(ours, cases, strict=True)):
        twin = case.clone()
        reference.orthogonalize(twin, key)
        torch.testing.assert_close(matrix.cpu() @ matrix.cpu().t(), torch.eye(len(case)), rtol=0.0, atol=1e-5)
        torch.testing.assert_close(matrix.cpu(), twin, rtol=0.0, atol=1e-5)
    bad = usual.to(device, copy=True)
    bad[1, 3] = float("inf")
    cuda.orthogonalize_many([bad], [7])
    assert bad[1].isnan().any()
    with pytest.raises(ValueError, match="`matrix`"):
        cuda.orthogonalize_many([usual.t().contiguous().to(device)], [7])
