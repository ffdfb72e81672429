"""Laws of the timeline: clocks are aligned to within what it says, and each rank's steps are in it, in true order."""

import json
import random
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.bench.plot.timeline import middle_step, rows_of, shown_ranks
from gradwire.comms.config import Config
from gradwire.comms.errors import PeerError
from gradwire.comms.observe.observer import Observer
from gradwire.comms.observe.recorder import PREFIX, Note, Recorder
from gradwire.comms.observe.trace import Offset, aligned, chrome, offset, spread
from gradwire.comms.step.listeners import EndedStep
from gradwire.comms.streams import HostClock
from support.observed import PARAMETERS, Steps, on_ranks

seconds = st.floats(0, 1e-2)


@given(st.lists(st.tuples(seconds, seconds, seconds, seconds), min_size=1, max_size=8), st.floats(-1e4, 1e4))
def test_the_true_offset_is_within_the_bounds(rounds: list[tuple[float, float, float, float]], truth: float) -> None:
    """However late ranks enter and leave an all-reduce: nobody leaves before all have entered."""
    first, other, now = [], [], 0.0
    for enters, enters_too, leaves, leaves_too in rounds:
        met = now + max(enters, enters_too)
        first.append((now + enters, met + leaves))
        other.append((now + enters_too + truth, met + leaves_too + truth))
        now = met + 0.02
    found = offset(first, other)
    assert abs(found.seconds - truth) <= found.error_seconds + 1e-9 * max(1.0, abs(truth))
    assert found.error_seconds <= min(max(a, b) - min(a, b) + c + d for a, b, c, d in rounds) / 2 + 1e-9


@given(st.floats(-1e-4, 1e-4), st.floats(-100, 100), st.floats(0, 1))
def test_clocks_of_different_speed_are_aligned_in_between(drift: float, ahead: float, share: float) -> None:
    def own(true: float) -> float:
        return true * (1 + drift) + ahead

    before, after = (Offset(own(at) - at, 0.0, own(at)) for at in (10.0, 30.0))
    true = 10.0 + 20.0 * share
    assert aligned(own(true), before, after) == pytest.approx(true, abs=1e-7)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=20))
def test_notes_in_one_row_never_overlap_in_part(spans: list[tuple[int, int]]) -> None:
    notes = [Note("buckets", str(number), float(at), float(at + took), {}) for number, (at, took) in enumerate(spans)]
    rows = spread(sorted(notes, key=lambda note: (note.began, -note.ended)))  # type: ignore[operator]
    assert sorted(note.name for row in rows for note in row) == sorted(note.name for note in notes)
    for row in rows:
        for one, other in [(one, other) for one in row for other in row if one is not other]:
            apart = one.ended <= other.began or other.ended <= one.began  # type: ignore[operator]
            inside = one.began <= other.began and other.ended <= one.ended  # type: ignore[operator]
            assert apart or inside or (other.began <= one.began and one.ended <= other.ended)  # type: ignore[operator]


STEPS = 3


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of four ranks on two nodes with a compressor; rank 2 is late to the second bucket."""
    file = tmp_path_factory.mktemp("trace") / "steps.json"
    through: Counter[int] = Counter()
    changed = threading.Condition()

    def pause(steps: Steps, index: int) -> float:
        if steps.communicator.rank != 2:
            with changed:
                through[steps.steps] += index == 2  # the second bucket is on its way
                changed.notify_all()
        elif index == 1:  # not by the clock, which runs on while another rank waits for a core
            with changed:
                changed.wait_for(lambda: through[steps.steps] == 3, 30)
            return 0.03
        return 1e-3

    def body(steps: Steps) -> None:
        steps.step()
        steps.observer.trace(file, STEPS)
        for _ in range(STEPS + 1):
            assert steps.communicator.executor.stats.recorder is None or steps.steps <= STEPS
            steps.step(partial(pause, steps))
        assert steps.communicator.executor.stats.recorder is None  # with the last step the trace ends

    on_ranks("aabb", body, numel=8000, compressor="int8", stall_seconds=0.0)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_the_trace_holds_every_bucket_of_every_rank(traced: dict[str, Any]) -> None:
    events = [event for event in traced["traceEvents"] if event["ph"] == "X"]
    for rank in range(4):
        own = [event for event in events if event["pid"] == rank]
        buckets = [event["args"] for event in own if event["cat"] == "buckets"]
        assert sorted((each["step"], each["bucket"]) for each in buckets) == [
            (step, bucket) for step in range(2, 2 + STEPS) for bucket in range(len(PARAMETERS))
        ]
        assert {each["parameters"][0] for each in buckets} == set(PARAMETERS)
        transfers = [event for event in own if event["cat"] == "transfers"]
        assert len(transfers) == STEPS * len(PARAMETERS)
        assert all(event["args"]["compressor"] == "int8" for event in transfers)
        names = {event["name"] for event in own}
        assert {"reduce_scatter intra_node", "codec int8", "wait for all_reduce inter_node"} <= names
        lanes = {lane: {each["name"] for each in own if each["cat"].startswith(f"lane {lane}.")} for lane in range(3)}
        assert lanes[0] >= {"reduce_scatter intra_node"} and "all_gather intra_node" not in lanes[0] | lanes[1]
        behind = {name for name in lanes[2] if not name.startswith("wait for ")}
        assert behind == {"all_gather intra_node"}, "in the lane behind the transfer is the phase behind it"
        assert all(event["dur"] >= 0 for event in own)
    assert traced["otherData"]["steps"] == STEPS


def test_on_aligned_clocks_no_bucket_ends_before_its_last_arrival(traced: dict[str, Any]) -> None:
    """Also between ranks, whose clocks differ by the error that the file states."""
    slack = 2e6 * max(traced["otherData"]["clock_error_seconds"])
    buckets = [event for event in traced["traceEvents"] if event.get("cat") == "buckets"]
    for one in buckets:
        same = [each for each in buckets if each["args"]["step"] == one["args"]["step"]]
        same = [each for each in same if each["args"]["bucket"] == one["args"]["bucket"]]
        assert len(same) == 4
        assert one["ts"] + one["dur"] >= max(each["ts"] for each in same) - slack


def test_the_picture_shows_each_rank_and_the_wait_for_the_late_one(traced: dict[str, Any]) -> None:
    rows = rows_of(traced, middle_step(traced))
    assert shown_ranks(rows) == [0, 1, 2, 3]
    arrived = {rank: max(bar.began for bar in rows[rank]["arrivals"] if bar.text == "1") for rank in rows}
    assert max(arrived, key=arrived.__getitem__) == 2
    waits = {rank: sum(bar.ended - bar.began for bar in rows[rank]["step"] if bar.kind == "wait") for rank in rows}
    assert min(waits, key=waits.__getitem__) == 2
    with pytest.raises(ValueError, match=r"`--step`: found 99, wanted 2 to 4, which the trace holds"):
        rows_of(traced, 99)


def test_of_many_ranks_the_picture_shows_the_first_and_the_last() -> None:
    notes = {
        rank: [Note("buckets", "bucket 0", 1.0 + rank / 100, 2.0, {"step": 1, "bucket": 0, "nbytes": 4})]
        for rank in range(40)
    }
    record = json.loads(json.dumps(chrome(notes, ["a"] * 40, {})))
    shown = shown_ranks(rows_of(record, 1))
    assert len(shown) == 8
    assert {0, 39} <= set(shown)


def test_a_file_that_cannot_be_written_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def body(steps: Steps) -> str:
        with pytest.raises(OSError, match=r"`file` is .*nowhere.* cannot write") as caught:
            steps.observer.trace(tmp_path / "nowhere" / "trace.json", 2)
        steps.step()
        return str(caught.value)

    assert len(on_ranks("ab", body, stall_seconds=0.0)) == 2


def test_a_trace_by_configuration_begins_behind_the_first_steps(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"

    def body(steps: Steps) -> None:
        for _ in range(8):
            steps.step()

    on_ranks("ab", body, stall_seconds=0.0, trace=(str(file), 2))
    about = json.loads(file.read_text())["otherData"]
    assert (about["first_step"], about["steps"]) == (6, 2)


def test_marks_of_cuda_that_are_asked_for_without_it_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    on_ranks("ab", Steps.step, stall_seconds=0.0, trace="nvtx")
    (record,) = caplog.records
    assert "`trace` is 'nvtx'" in record.message and "on a cpu" in record.message


def test_a_trace_whose_steps_do_not_come_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once, by rank 0; and no empty file stays."""
    file = tmp_path / "trace.json"

    def body(steps: Steps) -> None:
        for _ in range(8):
            steps.step()

    on_ranks("ab", body, stall_seconds=0.0, trace=(str(file), 20))
    said = [record.getMessage() for record in caplog.records if "trace" in record.getMessage()]
    assert said == [f"gradwire: the trace {file} is not written: training ended after 3 of its 20 steps"]
    assert not file.exists()


def test_profilers_see_our_phases_by_name_and_cost_nothing_otherwise() -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    def body(steps: Steps) -> set[str]:
        steps.step()
        assert steps.communicator.executor.stats.recorder is None
        if steps.communicator.rank:
            steps.step()
            return set()
        with profile(
            activities=[ProfilerActivity.CPU],
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        ) as profiler:
            steps.step()
        return {event.key for event in profiler.key_averages()}

    seen, _ = on_ranks("ab", body, numel=8000, compressor="int8", stall_seconds=0.0)
    assert PREFIX + "codec int8" in seen
    assert PREFIX + "wait for all_reduce over all ranks" in seen


def test_a_recorder_that_keeps_nothing_keeps_nothing() -> None:
    recorder = Recorder(HostClock(), keeps=False, ranges=False)
    with recorder.span("lane", "what", launch=random.randrange(9)):
        pass
    recorder.note("lane", "what", 0.0, 1.0)
    assert recorder.notes == []


def test_a_trace_whose_epoch_ends_while_ranks_tell_of_a_step_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    communicator: Any = SimpleNamespace(size=1, rank=0, executor=SimpleNamespace(stats=SimpleNamespace(recorder=None)))
    before, after = (Observer(communicator, Config(elastic=True)) for _ in range(2))

    def end(*step: object) -> bool:
        raise PeerError("the process of rank 1 has ended")

    trace: Any = SimpleNamespace(step_ended=end)
    before._trace = trace
    for step in (8, 9):
        before.step_ended(EndedStep(step, (), (), lambda number: pytest.fail("no report is made")))
    after.follow(before)
    assert "the trace is given up" in caplog.text
