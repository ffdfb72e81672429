import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gradwire.bench.emulation.rate import parse_rate
from gradwire.bench.train.main_job import READABLE_MBIT, main, readable_rate, result_table
from gradwire.bench.train.train import TrainingResult


def a_result(hook: str, seconds: float, nbytes: float | None) -> TrainingResult:
    return TrainingResult(
        hook=hook,
        steps=10,
        gradient_nbytes=4,
        seconds_per_step=seconds,
        nic_nbytes_per_step=nbytes,
        first_loss=5.5,
        final_loss=2.5,
        validation_bits_per_byte=3.5,
        report=None,
    )


@given(st.floats(min(READABLE_MBIT), max(READABLE_MBIT)))
def test_the_rate_makes_the_bytes_take_about_the_seconds(mbit: float) -> None:
    chosen = parse_rate(readable_rate(nbytes=mbit * 1e6 / 8 * 0.5, seconds=0.5), "nic")
    assert 0.75 < chosen / (mbit * 1e6) < 1.35


def test_the_table_compares_with_the_first_row() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(result_table([a_result("plain", 0.8, 3e6), a_result("gradwire", 0.5, None)], "here"))
    rows = {line.split()[1]: line for line in capture.get().splitlines() if "x │" in line}
    assert "1.00x" in rows["plain"] and "3,000,000" in rows["plain"]
    assert "1.60x" in rows["gradwire"] and "not measured" in rows["gradwire"]


def test_a_rate_that_makes_no_sense_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gradwire.bench.train.main_job.available", lambda: None)
    assert main(["--nic", "fast"]) == 1
    assert "`nic`: found 'fast'" in capsys.readouterr().out
