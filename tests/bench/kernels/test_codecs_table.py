"""The table of number formats: what they are made of is right, and the command says what is wrong with a file."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gradwire.bench.kernels.codecs import main, vnmse
from gradwire.bench.kernels.formats import (
    E4M3,
    E5M2,
    Minifloat,
    all_formats,
    fill,
    filled,
    gaussian_levels,
    hadamard,
)
from gradwire.compressors.codecs.waterfill import waterfill_widths


def uneven(numel: int) -> torch.Tensor:
    """Like a gradient: runs whose sizes differ by orders of magnitude, zeros among them."""
    generator = torch.Generator().manual_seed(numel)
    sizes = torch.exp2(torch.randint(-12, 1, (-(-numel // 200),), generator=generator).float())
    x = torch.randn(numel, generator=generator) * sizes.repeat_interleave(200)[:numel]
    x[100:150] = 0.0
    return x


@pytest.mark.parametrize(("ours", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_a_minifloat_is_torchs(ours: Minifloat, dtype: torch.dtype) -> None:
    x = torch.cat([uneven(4000) * 100, torch.tensor([0.0, -0.0, 2.0**-9, 1.5 * 2.0**-9, 2.0**-17, ours.largest])])
    assert torch.equal(ours.round(x), x.clamp(-ours.largest, ours.largest).to(dtype).float())


@pytest.mark.parametrize(("bits", "error"), [(1, 0.3634), (2, 0.1175), (4, 0.009497), (5, 0.002499)])
def test_the_normal_levels_are_the_published_ones(bits: int, error: float) -> None:
    """Max's table of the least squared errors."""
    levels, x = gaussian_levels(bits), torch.linspace(-6.0, 6.0, 200_001)
    weights = torch.exp(-(x.double() ** 2) / 2)
    edges = (levels[1:] + levels[:-1]) / 2
    off = (x - levels[torch.bucketize(x, edges)]).double() ** 2
    assert float((off * weights).sum() / weights.sum()) == pytest.approx(error, rel=3e-3)


def test_the_rotation_is_its_own_inverse() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hadamard(hadamard(x)), x)
    torch.testing.assert_close(hadamard(x).norm(dim=1), x.norm(dim=1))


def test_bits_are_shared_out_to_the_last_and_louder_blocks_have_more() -> None:
    scales = torch.exp2(torch.randint(-20, 20, (5, 64), generator=torch.Generator().manual_seed(1)).float() / 4)
    widths = fill(scales, 200)
    assert (widths.sum(1) == 200).all()
    assert ((widths >= 0) & (widths <= 8)).all()
    for row, width in zip(scales, widths, strict=True):
        assert (width[row.argsort(stable=True)].diff() >= -1).all()
        free = (width > 0) & (width < 8)
        left = torch.log2(row) - width  # what a block's error is after its bits: alike wherever there is a choice
        assert float(left[free].max() - left[free].min()) <= 1.0


@pytest.mark.parametrize("words", [1, 64, 200, 511, 512, 600])
def test_waterfill_shares_out_as_well_as_sorting_every_bit_by_what_it_gains(words: int) -> None:
    """Of what gains as much either may come first, so the sums of the gains are compared."""
    below = torch.randint(0, 70, (5, 64), generator=torch.Generator().manual_seed(words))
    below[:, ::9] = 255
    scales = torch.where(below == 255, 0.0, torch.exp2(-below / 8))
    gained = []
    for widths in (fill(scales, min(words, 8 * 56)), waterfill_widths(below, words, 0)):
        rank = torch.arange(8)
        gains = torch.where(rank < widths.unsqueeze(2), below.unsqueeze(2) + 8 * rank, 0)
        gained.append((widths.sum(1), gains.sum((1, 2))))
    assert all(torch.equal(one, another) for one, another in zip(*gained, strict=True))


def test_shared_out_bits_lessen_the_error_of_uneven_gradients() -> None:
    x = uneven(3 * 4096 + 77)
    even = next(each for each in all_formats() if each.name == "even levels, 5 bits, blocks of 32")
    assert vnmse(x, filled(5, 32, 4096, x)) < vnmse(x, even.approximate(x)) / 2
    assert not filled(5, 32, 4096, torch.zeros(100)).any()


def test_the_command_measures_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "gradients.npz", tmp_path / "table.json"
    arrays = {name: uneven(5000 + seed).numpy() for seed, name in enumerate(("a/1", "a/2", "b"))}
    np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stubs take the names for its own options
    assert main(["--gradients", str(file), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [row["format"] for row in found["formats"]] == [each.name for each in all_formats()]
    assert all(set(row["vnmse"]) == {"a", "b"} for row in found["formats"])
    assert "vNMSE a" in capsys.readouterr().out


def test_a_wrong_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gradients.npz"
    file.write_text("no zip")
    assert main(["--gradients", str(file)]) == 2
    np.savez(file, square=np.ones((2, 2), np.float32))
    assert main(["--gradients", str(file)]) == 2
    assert main(["--gradients", str(tmp_path / "nowhere.npz")]) == 2
    said = capsys.readouterr().err
    assert said.count("`--gradients`") == 3
    assert "'square' is (2, 2)" in said
