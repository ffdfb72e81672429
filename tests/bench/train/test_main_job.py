import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gradwire.bench.emulation.rate import parse_rate
from gradwire.bench.train.main_job import READABLE_MBIT, main, readable_rate, result_table
from gradwire.bench.train.story import tell
from gradwire.bench.train.train import TrainingResult


def a_result(
    hook: str,
    seconds: float,
    nbytes: float | None,
    *,
    final_loss: float = 2.5,
    predicted_seconds: dict[str, float] | None = None,
) -> TrainingResult:
    return TrainingResult(
        hook=hook,
        steps=10,
        gradient_nbytes=4,
        seconds_per_step=seconds,
        nic_nbytes_per_step=nbytes,
        first_loss=5.5,
        final_loss=final_loss,
        loss_deviation=0.05,
        validation_bits_per_byte=3.5,
        report=None,
        predicted_seconds=predicted_seconds,
    )


@given(st.floats(min(READABLE_MBIT), max(READABLE_MBIT)))
def test_the_rate_makes_the_bytes_take_about_the_seconds(mbit: float) -> None:
    chosen = parse_rate(readable_rate(nbytes=mbit * 1e6 / 8 * 0.5, seconds=0.5), "nic")
    assert 0.75 < chosen / (mbit * 1e6) < 1.35


def test_the_table_compares_with_the_first_row() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(result_table([a_result("plain", 0.8, 3e6), a_result("gradwire", 0.5, None)], "here"))
    rows = {line.split()[0]: line.split() for line in capture.get().splitlines() if "x " in line}
    assert rows["plain"][-1] == "1.00x" and "3.00" in rows["plain"]
    assert rows["gradwire"][-1] == "1.60x" and "-" in rows["gradwire"]


PREDICTED = {"none": 0.40, "fp16": 0.30, "int8": 0.20, "powersgd": 0.05}


def test_the_story_says_what_was_saved_on_which_link_and_that_the_loss_held() -> None:
    results = [
        a_result("plain", 0.8, 3e6),
        a_result("gradwire", 0.5, 2e6, predicted_seconds=PREDICTED),
        a_result("gradwire:int8", 0.25, 0.5e6, final_loss=2.51),
    ]
    exact, lossy, more, quality = tell(results, 60_000_000)
    assert (
        "links of 60 Mbit/s" in exact and "0.300 s saved, 1.60x" in exact and "2.00 MB a step instead of 3.00" in exact
    )
    assert 'compressor="int8" saves more' in lossy and "3.20x" in lossy and "83% less" in lossy
    assert 'compressor="powersgd" would save another 0.150 s' in more and "predicted" in more
    assert quality.startswith("Quality held: the loss ended at 2.5000") and "+0.0100" in quality


def test_the_story_does_not_call_a_loss_a_success() -> None:
    results = [
        a_result("plain", 0.5, 3e6),
        a_result("gradwire", 0.6, 3.1e6, predicted_seconds=PREDICTED | {"powersgd": 0.39, "fp16": 0.38}),
        a_result("gradwire:int8", 0.55, 0.5e6, final_loss=2.6),
    ]
    exact, lossy, more, quality = tell(results, 2_500_000_000)
    assert "2500 Mbit/s" in exact and "0.100 s lost" in exact and "3% more" in exact
    assert "saves nothing" in lossy
    assert more.startswith("No other setting")
    assert quality.startswith("Quality did not hold") and "more than it varies" in quality


def test_without_a_slow_link_nothing_is_predicted() -> None:
    story = tell([a_result("plain", 0.5, None), a_result("gradwire", 0.5, None, predicted_seconds=PREDICTED)], None)
    assert len(story) == 2 and "With no slow link" in story[0] and "predicted" not in " ".join(story)


def test_a_rate_that_makes_no_sense_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gradwire.bench.train.main_job.available", lambda: None)
    assert main(["--nic", "fast"]) == 1
    assert "`nic`: found 'fast'" in capsys.readouterr().out
