"""Matrices in bases of their own: nothing is lost, all ranks have the same bits, and Muon's steps are nearer."""

import math

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from gradwire.bench.studies.convergence.alone import reduce_together, run_together
from gradwire.bench.studies.convergence.angles import SETTLED, Kept, degrees, keep_gradients, table
from gradwire.bench.studies.convergence.tasks import TextTask
from gradwire.compressors.base import Compressor, Layout, Member, Slice
from gradwire.compressors.registry import make
from gradwire.compressors.rotated.bases import DAMPING, TILE, Side, looked, side_of, turns_of
from gradwire.compressors.rotated.rotated import EVERY, matrix_of
from gradwire.compressors.rotated.whole import gram, product, roots_of, rounded

ROWS, COLUMNS, STEPS = 64, 96, 40
LAYOUT = Layout(
    (Slice("weight", (ROWS, COLUMNS), 0, 0, ROWS * COLUMNS), Slice("bias", (COLUMNS,), 0, ROWS * COLUMNS, COLUMNS))
)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradient(step: int, node: int) -> Tensor:
    """Of a layer: its directions differ in size by ten on both sides, in bases that are no coordinates'."""
    left = torch.linalg.qr(normal(ROWS, ROWS, seed=7))[0]
    right = torch.linalg.qr(normal(COLUMNS, COLUMNS, seed=8))[0]
    noise = normal(ROWS, COLUMNS, seed=1000 * step + node)
    matrix = left @ (torch.logspace(0, -1, ROWS)[:, None] * noise * torch.logspace(0, -1, COLUMNS)) @ right.t()
    return torch.cat([matrix.reshape(-1), noise[0]])


def averages(compressors: list[Compressor], steps: range = range(STEPS)) -> list[Tensor]:
    """What two nodes make of the sums of their gradients."""
    found = []
    for step in steps:
        flats = [gradient(step, node) for node in range(2)]
        reduce_together(compressors, flats, LAYOUT)
        assert torch.equal(*flats)
        found.append(flats[0])
    return found


def rotated(bits: int) -> list[Compressor]:
    return [make(f"rotated{bits}") for _ in range(2)]


def momentum(gradients: list[Tensor]) -> Tensor:
    total = torch.zeros(ROWS, COLUMNS)
    for each in gradients:
        total.lerp_(each[: ROWS * COLUMNS].view(ROWS, COLUMNS), 0.05)
    return total


def alike(one: Tensor, other: Tensor) -> float:
    """Cosine of the angle between two matrices once Muon has made them orthogonal."""
    steps = [_zeropower_via_newtonschulz(each, (3.4445, -4.775, 2.0315), 5, 1e-7).float() for each in (one, other)]
    return float(torch.nn.functional.cosine_similarity(steps[0].view(-1), steps[1].view(-1), dim=0))


@pytest.mark.parametrize(("bits", "share"), [(2, 0.9), (4, 0.7)])
def test_orthogonalised_steps_are_nearer_to_the_exact_ones(bits: int, share: float) -> None:
    exact = momentum([gradient(step, 0) + gradient(step, 1) for step in range(STEPS)])
    plain = alike(exact, momentum(averages([make(f"waterfill{bits}") for _ in range(2)])))
    turned = alike(exact, momentum(averages(rotated(bits))))
    assert 1 - turned < share * (1 - plain)


@pytest.mark.parametrize("bits", [2, 4])
def test_outputs_and_residuals_account_for_every_gradient(bits: int) -> None:
    compressors = rotated(bits)
    arrived = torch.stack(averages(compressors)).double().sum(0)
    for each in compressors:
        held_back = torch.zeros(LAYOUT.numel)
        each.flush(held_back, LAYOUT)
        assert held_back.any()
        arrived += held_back.double()
    sent = sum(gradient(step, node).double() for step in range(STEPS) for node in range(2))
    torch.testing.assert_close(arrived, sent, rtol=0.0, atol=2e-5)


def test_a_resumed_run_has_the_same_bits() -> None:
    whole = averages(compressors := rotated(4), range(20))
    averages(compressors := rotated(4), range(9))
    again = rotated(4)
    for old, new in zip(compressors, again, strict=True):
        new.bind_model({item.name: item.numel for item in LAYOUT.slices})
        new.load_state_dict(old.state_dict())
    assert all(torch.equal(*each) for each in zip(averages(again, range(9, 20)), whole[9:], strict=True))


def test_a_bad_step_leaves_the_bases_as_they_were() -> None:
    averages(compressors := rotated(4), range(EVERY))
    before = [each.state_dict() for each in compressors]
    flats = [gradient(EVERY, node) for node in range(2)]  # bases are looked at in this step
    flats[1][5] = torch.inf
    run_together(
        [
            each.all_reduce(flat, LAYOUT, Member(node, 2))
            for node, (each, flat) in enumerate(zip(compressors, flats, strict=True))
        ]
    )
    assert not flats[0].isfinite().all()
    for each, old in zip(compressors, before, strict=True):
        each.end_step(False)
        state = each.state_dict()
        assert set(state) == set(old)
        assert {"left/0/weight", "right/0/weight"} < set(state)
        for key, value in state.items():
            assert torch.equal(value, torch.as_tensor(old[key])) if isinstance(value, Tensor) else value == old[key]


def test_a_product_has_no_order_of_summation() -> None:
    a, b = normal(3, 40, 500, seed=0), normal(3, 500, 70, seed=1)
    found = product(a, b)
    torch.testing.assert_close(found, a.double() @ b.double(), rtol=0.0, atol=1e-3)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(2))
    assert torch.equal(found, product(a[..., order], b[:, order]))
    (left, _), (right, _) = rounded(a, 22), rounded(b, 22)
    assert torch.equal((left @ right).long(), left.long() @ right.long())
    assert torch.equal(gram(a), product(a, a.mT))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_has_no_unit(value: float) -> None:
    x = normal(4, 5, seed=0)
    x[2, 3] = value
    assert math.isnan(rounded(x, 22)[1])
    assert not product(x, x.t()).isfinite().any()
    assert not gram(x).isfinite().any()


def test_bases_are_the_same_bits_with_any_number_of_threads_and_wherever_they_lie() -> None:
    squares = [product(each, each.t()).unsqueeze(0) for each in (normal(64, 200, seed=n) for n in range(3))]
    found = []
    before = torch.get_num_threads()
    try:
        for threads, shift in ((1, 0), (2, 1), (1, 3)):
            torch.set_num_threads(threads)
            held = torch.zeros(1, 64, 64)
            for square in squares:
                moved = torch.empty(square.numel() + shift, dtype=torch.float64)[shift:].view_as(square)
                held = looked([held], [moved.copy_(square)])[0]
            into, back = turns_of(held) or pytest.fail("no bases")
            found.append((held, into.whole, back.whole))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(*each) for each in zip(found[0], other, strict=True))


def test_bases_find_the_eigenvectors() -> None:
    basis = torch.linalg.qr(normal(32, 32, seed=3))[0]
    lengths = torch.logspace(0, -1, 32)
    held = torch.zeros(1, 32, 32)
    for step in range(60):
        rows = (basis * lengths) @ normal(32, 400, seed=10 + step)
        held = looked([held], [product(rows, rows.t()).unsqueeze(0)])[0]
    vectors = held[0] / held[0].norm(dim=0)
    torch.testing.assert_close(vectors.t() @ vectors, torch.eye(32), rtol=0.0, atol=1e-5)
    wanted = lengths.square() / lengths.square().mean() + DAMPING
    torch.testing.assert_close(held[0].norm(dim=0), wanted, rtol=0.3, atol=0.0)
    assert (vectors.t() @ basis).abs().diagonal()[:8].min() > 0.8


def test_what_is_turned_comes_back() -> None:
    rows = normal(2, 48, 300, seed=4) * torch.logspace(0, -1, 48).view(1, -1, 1)
    held = looked([torch.zeros(2, 48, 48)], [product(rows, rows.transpose(1, 2))])[0]
    into, back = turns_of(held) or pytest.fail("no bases")
    x = normal(96, 70, seed=5)
    turned = into.apply(x)
    assert (turned - x).norm() > 0.5 * x.norm()
    torch.testing.assert_close(back.apply(turned).float(), x, rtol=0.0, atol=1e-4)


def test_sides_are_cut_into_equal_parts_and_parts_of_matrices_are_left() -> None:
    assert side_of(320, 1280) == Side(1, 320)
    assert side_of(1280, 320) == Side(4, 320)
    assert side_of(2 * TILE, 10 * TILE) == Side(2, TILE)
    assert side_of(7919, 512) is None  # a prime
    assert matrix_of(Slice("a", (64,), 0, 0, 64)) is None
    assert matrix_of(Slice("a", (64, 64), 0, 0, 32 * 64)) is None
    assert matrix_of(Slice("a", (4, 4), 0, 0, 16)) is None
    bounds = make("rotated2").partition(LAYOUT, 3)
    assert not any(0 < bound < ROWS * COLUMNS for bound in bounds)


def test_the_more_bits_the_less_a_step_is_turned() -> None:
    layout = Layout(LAYOUT.slices[:1])
    steps = tuple(
        tuple(gradient(step, node)[: layout.numel].contiguous() for node in range(2)) for step in range(SETTLED + 1)
    )
    kept = Kept(layout, steps)
    means = [degrees(kept, name)[0] for name in ("none", "int8", "waterfill4", "waterfill2")]
    assert means[0] < 1.0
    assert means == sorted(means)
    assert 45 < means[-1] < 90
    assert "| `int8` | 8.1" in list(table(kept, ["int8"]))[-1]


def test_a_pattern_of_no_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`only` is 'bytes.\*'.*wanted one as blocks"):  # AdamW trains it
        keep_gradients(TextTask(), 0, "bytes.*")


def test_square_roots_are_rounded_alike_on_every_processor() -> None:
    """math.sqrt is the processor's, which IEEE 754 binds; torch's own on a CPU is a library's."""
    x = torch.rand(4_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e3
    assert roots_of(x).tolist() == [math.sqrt(each) for each in x.tolist()]
    assert torch.equal(roots_of(x.view(40, 100).T), roots_of(x).view(40, 100).T)
