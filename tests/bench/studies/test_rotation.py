"""Matrices in bases of their own: nothing is lost, and Muon's steps are nearer to the exact ones."""

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from gradwire.bench.studies.convergence.alone import reduce_together
from gradwire.bench.studies.convergence.angles import SETTLED, Kept, degrees, table
from gradwire.bench.studies.convergence.rotation import LONGEST, RotatedWaterfill, Rotation
from gradwire.compressors.base import Compressor, Layout, Slice
from gradwire.compressors.registry import make

ROWS, COLUMNS, STEPS = 64, 96, 40
LAYOUT = Layout(
    (Slice("weight", (ROWS, COLUMNS), 0, 0, ROWS * COLUMNS), Slice("bias", (COLUMNS,), 0, ROWS * COLUMNS, COLUMNS))
)


def gradient(step: int, node: int) -> Tensor:
    """Of a layer: its directions differ in size by ten on both sides, in bases that are no coordinates'."""
    bases = torch.Generator().manual_seed(7)
    left = torch.linalg.qr(torch.randn(ROWS, ROWS, generator=bases))[0]
    right = torch.linalg.qr(torch.randn(COLUMNS, COLUMNS, generator=bases))[0]
    noise = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1000 * step + node))
    matrix = left @ (torch.logspace(0, -1, ROWS)[:, None] * noise * torch.logspace(0, -1, COLUMNS)) @ right.t()
    return torch.cat([matrix.view(-1), noise[0]])


def averages(compressors: list[Compressor]) -> list[Tensor]:
    """What two nodes make of the sums of their gradients."""
    found = []
    for step in range(STEPS):
        flats = [gradient(step, node) for node in range(2)]
        reduce_together(compressors, flats, LAYOUT)
        assert torch.equal(*flats)
        found.append(flats[0])
    return found


def rotated(bits: int) -> list[Compressor]:
    first, second = RotatedWaterfill(bits), RotatedWaterfill(bits)
    second.rotation = first.rotation
    return [first, second]


def momentum(gradients: list[Tensor]) -> Tensor:
    total = torch.zeros(ROWS, COLUMNS)
    for each in gradients:
        total.lerp_(each[: ROWS * COLUMNS].view(ROWS, COLUMNS), 0.05)
    return total


def alike(one: Tensor, other: Tensor) -> float:
    """Cosine of the angle between two matrices once Muon has made them orthogonal."""
    steps = [_zeropower_via_newtonschulz(each, (3.4445, -4.775, 2.0315), 5, 1e-7).float() for each in (one, other)]
    return float(torch.nn.functional.cosine_similarity(steps[0].view(-1), steps[1].view(-1), dim=0))


@pytest.mark.parametrize("bits", [2, 4])
def test_orthogonalised_steps_are_nearer_to_the_exact_ones(bits: int) -> None:
    exact = momentum([gradient(step, 0) + gradient(step, 1) for step in range(STEPS)])
    plain = alike(exact, momentum(averages([make(f"waterfill{bits}") for _ in range(2)])))
    turned = alike(exact, momentum(averages(rotated(bits))))
    assert 1 - turned < 0.6 * (1 - plain)


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
    torch.testing.assert_close(arrived, sent, rtol=0.0, atol=1e-4)  # two products in float32 a step


def test_what_is_turned_comes_back() -> None:
    rotation = Rotation()
    for step in range(1, 8):
        rotation.into(gradient(0, 0), LAYOUT)
        rotation.observe(gradient(step, 0), LAYOUT)
        rotation.end_step(step)
    flat = gradient(9, 0)
    turned = flat.clone()
    rotation.into(turned, LAYOUT)
    assert (turned - flat).norm() > 0.5 * flat.norm()
    assert torch.equal(turned[ROWS * COLUMNS :], flat[ROWS * COLUMNS :])
    rotation.back(turned, LAYOUT)
    torch.testing.assert_close(turned, flat, rtol=0.0, atol=1e-5)


def test_long_sides_are_left_as_they_are_and_parts_of_matrices_too() -> None:
    def sides(shape: tuple[int, ...], numel: int) -> list[tuple[int, ...]]:
        return [each.sides for each in Rotation().matrices(Layout((Slice("a", shape, 0, 0, numel),)))]

    assert sides((LONGEST + 1, 64), 64 * (LONGEST + 1)) == [(1,)]
    assert sides((LONGEST + 1, LONGEST + 1), (LONGEST + 1) ** 2) == []
    assert sides((64,), 64) == []
    assert sides((64, 64), 32 * 64) == []
    bounds = RotatedWaterfill(2).partition(LAYOUT, 3)
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
    assert "| `int8` | 8.1" in table(kept, ["int8"])
