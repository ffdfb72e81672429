from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gradwire.bench.emulation.rate import parse_rate
from gradwire.bench.train.main_job import READABLE_MBIT, main, readable_rate, result_table, steps_within
from gradwire.bench.train.summary import summarize, summarize_prediction
from gradwire.bench.train.train import TrainingResult
from gradwire.comms.plan.advise import warning_of


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
    exact, lossy, quality = summarize(results, 60_000_000)
    assert (
        "links of 60 Mbit/s" in exact and "0.300 s saved, 1.60x" in exact and "2.00 MB a step instead of 3.00" in exact
    )
    assert 'compressor="int8" saves more' in lossy and "3.20x" in lossy and "83% less" in lossy
    assert quality.startswith("Quality held: the loss ended at 2.5000") and "+0.0100" in quality


def test_the_story_does_not_call_a_loss_a_success() -> None:
    results = [
        a_result("plain", 0.5, 3e6),
        a_result("gradwire", 0.6, 3.1e6, predicted_seconds=PREDICTED | {"powersgd": 0.39, "fp16": 0.38}),
        a_result("gradwire:int8", 0.55, 0.5e6, final_loss=2.6),
    ]
    exact, lossy, quality = summarize(results, 2_500_000_000)
    assert "2.5 Gbit/s" in exact and "0.100 s lost" in exact and "3% more" in exact
    assert "saves nothing" in lossy
    assert quality.startswith("Quality did not hold") and "more than it varies" in quality


def test_without_a_slow_link_bytes_are_told_and_times_only_predicted() -> None:
    results = [
        replace(a_result("plain", 0.7, None), node_nbytes_per_step=3e6),
        replace(
            a_result("gradwire", 0.9, None, predicted_seconds=PREDICTED),
            node_nbytes_per_step=2e6,
            predicted_plain_seconds=0.6,
        ),
        replace(a_result("gradwire:int8", 0.9, None), node_nbytes_per_step=0.5e6),
        replace(a_result("gradwire:onebit", 0.9, None), node_nbytes_per_step=0.1e6),
    ]
    exact, lossy, _, times, quality = summarize_prediction(results, 60_000_000)
    assert exact == "gradwire: a node would send 2.00 MB a step where plain DDP sends 3.00: 33% less."
    assert "0.50 MB" in lossy and "83% less" in lossy
    assert "links of 60 Mbit/s" in times and "0.600 s under plain DDP" in times and "not measured" in times
    assert "0.400 s with gradwire (1.50x as fast)" in times and "0.200 s with" in times and "onebit" not in times
    assert quality.startswith("Quality held")
    summary = exact + lossy + times
    assert "0.7" not in summary and "0.9" not in summary  # what the loopback took means nothing

    console = Console(width=80)
    with console.capture() as capture:
        console.print(result_table(results, "here", counted=True))
    rows = {
        line.split()[0]: line.split() for line in capture.get().splitlines() if "gradwire" in line or "plain" in line
    }
    assert rows["gradwire"][1:3] == ["2.00", "0.400"] and rows["gradwire:onebit"][1:3] == ["0.10", "-"]


def test_a_compressor_that_the_log_warns_of_is_not_predicted_for_this_optimizer() -> None:
    assert warning_of("powersgd", "adamw") and warning_of("onebit", "adamw") and warning_of("dgc", "adamw")
    assert not warning_of("powersgd", "sgd") and not warning_of("int4", "adamw")
    assert "no training with own was measured here" in warning_of("own", "adamw")


def test_where_no_link_can_be_made_slow_the_first_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int | None] = []

    def train_on(cluster: object, hooks: list[str], *, nic_bits_per_second: int | None = None, **_: object) -> object:
        assert cluster is None
        asked.append(nic_bits_per_second)
        return [replace(a_result(hook, 0.5, None), node_nbytes_per_step=3e6) for hook in hooks]

    monkeypatch.setattr("gradwire.bench.train.main_job.available", lambda: "the kernel has no veth devices")
    monkeypatch.setattr("gradwire.bench.train.main_job.train_on", train_on)
    assert main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith("No gain in seconds can be shown") and "no veth" in said.partition("\n\n")[0]
    assert asked == [None, 50_000_000]  # 3 MB in 0.5 s
    assert "faster" not in said and "lost" not in said and "speed-up" not in said


@pytest.mark.parametrize(("seconds", "steps", "minutes"), [(0.05, 56, 1), (1.0, 56, 5), (2.0, 30, 5), (60.0, 12, 60)])
def test_slow_machines_make_fewer_steps_and_hear_how_long_it_takes(
    seconds: float, steps: int, minutes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert steps_within(seconds) == steps
    said = capsys.readouterr().out
    assert said.startswith(f"{steps} steps of each") and f"about {minutes} minute" in said
    assert ("in place of 56" in said) is (steps < 56)


def test_a_rate_that_makes_no_sense_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gradwire.bench.train.main_job.available", lambda: None)
    assert main(["--nic", "fast"]) == 1
    assert "`nic`: found 'fast'" in capsys.readouterr().out
