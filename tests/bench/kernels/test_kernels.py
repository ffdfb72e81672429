"""The table of kernels: every row is measured, the JSON holds what was asked for. No timing decides."""

import json
from pathlib import Path

import pytest
import torch

from gradwire.bench.kernels.cases import (
    onebit_decode_case,
    onebit_encode_case,
    pack_bits,
    quantize_case,
    unpack_bits,
)
from gradwire.bench.kernels.command import main

NAMES = {
    "fp16_encode",
    "onebit_encode",
    "onebit_decode_reduce",
    "int8_encode",
    "int4_encode",
    "int8_decode_reduce",
    "int4_decode_reduce",
    "waterfill5_encode",
    "waterfill5_decode_reduce",
    "dgc_step",
    "powersgd_step",
}


def test_the_json_has_a_row_for_every_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kernels.json"
    threads = torch.get_num_threads()
    assert main(["--numel", "16384", "--repeats", "1", "--json", str(file)]) == 0
    assert torch.get_num_threads() == threads
    rows = {row["kernel"]: row for row in json.loads(file.read_text())["results"]}
    assert set(rows) == NAMES
    for row in rows.values():
        assert row["speedup"] > 0
        assert row["of_floor"] > 0
        assert row["bytes_per_second"] == pytest.approx(row["nbytes"] / row["seconds"], rel=1e-3)
    assert "of a copy" in capsys.readouterr().out


def test_one_kernel_can_be_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    assert main(["--numel", "4096", "--repeats", "1", "--kernel", "int4_encode", "--json", str(file)]) == 0
    assert [row["kernel"] for row in json.loads(file.read_text())["results"]] == ["int4_encode"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--numel", "1000"], "`--numel`: found 1000"),
        (["--repeats", "0"], "`--repeats`: found 0"),
        (["--kernel", "zip"], "no kernel `zip`"),
    ],
)
def test_bad_words_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_device_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_bits_survive_packing() -> None:
    mask = torch.rand(4096, generator=torch.Generator().manual_seed(0)) < 0.3
    packed = torch.as_tensor(pack_bits(mask))
    assert packed.numel() == 512
    assert torch.equal(unpack_bits(packed).bool(), mask)


def test_the_composition_decodes_what_the_kernel_does() -> None:
    case, targets = onebit_decode_case(8192, torch.device("cpu")), []
    for step in (case.ours, case.composed):
        step(0)
        step(1)
        targets.append(case.outputs[0].clone())
        assert torch.equal(case.outputs[0], case.outputs[1])
    torch.testing.assert_close(targets[0], targets[1])


def test_the_composition_sends_what_the_kernel_does() -> None:
    """The same new residual from the same state, whoever computed it."""
    case = onebit_encode_case(8192, torch.device("cpu"))
    start = [residual.clone() for residual in case.outputs]
    case.ours(0)
    ours = case.outputs[0].clone()
    case.outputs[0].copy_(start[0])
    case.composed(0)
    torch.testing.assert_close(ours, case.outputs[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_composition_quantizes_as_the_kernel_does(bits: int) -> None:
    """The same payload; it multiplies out the rounding differently, so that one code in a thousand may be the next."""
    case = quantize_case(bits, 8192, torch.device("cpu"))
    case.ours(0)
    case.composed(0)
    ours, composed = case.outputs
    meta = 8192 // 512 * 8
    torch.testing.assert_close(ours[:meta].view(torch.float32), composed[:meta].view(torch.float32))
    assert (ours[meta:] != composed[meta:]).float().mean() < 0.001
