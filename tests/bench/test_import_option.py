"""`--import MODULE`: a codec of the user's own in the bench and in the convergence study."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gradwire.bench.compare import options
from gradwire.bench.compare.command import settings_of
from gradwire.bench.compare.configurations import configuration_specs, select
from gradwire.bench.compare.replay import Scale
from gradwire.bench.kernels import codecs
from gradwire.bench.studies.convergence import alone
from gradwire.compressors import registry

CODEC = """
import torch
from torch import Tensor

import gradwire


class Halves:
    def wire_nbytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, flat: Tensor, payload: Tensor) -> None:
        payload.copy_(flat.half().view(torch.uint8))

    def decode(self, payload: Tensor, flat: Tensor) -> None:
        flat.copy_(payload.view(torch.float16))


gradwire.register_codec("halves", Halves)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a test that imports and registers in this process what others are not to see."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    return tmp_path


def bench(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "gradwire", "bench", "all_reduce", "-b", "64K", "-e", "64K", "-n", "2", "-w", "1"]
    return subprocess.run(
        [*line, "-g", "2", *words], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_bench_takes_a_codec_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "my_codecs.py").write_text(CODEC)
    done = bench(tmp_path, "--import", "my_codecs", "--compressor", "halves")
    assert done.returncode == 0, done.stderr
    assert "halves" in done.stdout
    without = bench(tmp_path, "--compressor", "halves")
    assert without.returncode == 2 and "`--compressor`: found 'halves'" in without.stderr


def test_compare_takes_it_as_a_configuration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "eighth_codecs.py").write_text(CODEC.replace("halves", "eighths"))
    words = ["--nodes", "2", "--only", "eighths"]
    with pytest.raises(ValueError, match="`--only` has 'eighths', which is in no name"):
        options.parse(words)
    chosen = options.parse([*words, "--import", "eighth_codecs"])
    assert settings_of(chosen, Scale()).imports == ["eighth_codecs"]
    assert [each.name for each in select(configuration_specs(with_mpi=False), chosen.only)][1:] == ["gradwire eighths"]


def test_a_module_that_cannot_be_imported_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "broken_codecs.py").write_text("raise RuntimeError('no such luck')\n")
    for name, why in (("missing_codecs", "No module named"), ("broken_codecs", "RuntimeError: no such luck")):
        assert alone.main(["--task", "text", "--import", name]) == 2
        said = capsys.readouterr().err
        assert f"`--import` {name}" in said and why in said and "PYTHONPATH" in said


def test_the_study_trains_with_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert alone.main(["--task", "text", "--compressor", "quarters"]) == 2
    assert "`compressor` is 'quarters'" in capsys.readouterr().err
    (folder / "quarter_codecs.py").write_text(CODEC.replace("halves", "quarters"))
    words = ["--task", "text", "--import", "quarter_codecs", "--compressor", "quarters", "--steps", "12"]
    assert alone.main(words) == 0
    out, said = capsys.readouterr()
    assert "2.0 times fewer bytes" in out
    first, second, *points = said.splitlines()
    assert "12 steps; figures after 3, 6, 9, 10, 12." in first
    assert re.search("step 3 of 12: bits per byte on held-out text [0-9.]+, after [0-9]+ s$", second)
    assert len(points) == 4
    assert alone.main([*words[:-1], "0"]) == 2
    assert "`--steps`: found 0" in capsys.readouterr().err


def test_the_table_of_number_formats_has_a_row_for_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "tenth_codecs.py").write_text(CODEC.replace("halves", "tenths"))
    np.savez(folder / "gradients.npz", gradient=np.ones(5000, np.float32))
    assert codecs.main(["--gradients", "gradients.npz", "--import", "tenth_codecs", "--json"]) == 0
    rows = {row["format"]: row for row in json.loads(capsys.readouterr().out)["formats"]}
    assert rows["tenths"]["bits"] == rows["fp16"]["bits"] and rows["tenths"]["worst"] == 0.0
