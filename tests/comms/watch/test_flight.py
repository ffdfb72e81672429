"""What is read of torch's recorder: the line of the script that asked for a collective, and how far a group is."""

from pathlib import Path
from typing import Any

import pytest

from gradwire.comms.observe.stack import TORCH
from gradwire.comms.watch import flight
from gradwire.comms.watch.flight import _line

HERE = str(Path(__file__).resolve())
API = (str(TORCH / "distributed" / "distributed_c10d.py"), 3141, "all_reduce")
SCHEDULE = (str(TORCH / "distributed" / "pipelining" / "schedules.py"), 476, "_initialize")
STAGE = (str(TORCH / "distributed" / "pipelining" / "stage.py"), 12, "backward")
SHARDS = (str(TORCH / "distributed" / "fsdp" / "collectives.py"), 99, "reduce")


def entry(*frames: tuple[str, int, str]) -> dict[str, object]:
    """What the recorder holds of a collective: the innermost frame first."""
    return {"frames": [{"filename": file, "line": line, "name": name} for file, line, name in frames]}


def test_it_is_the_scripts_wherever_a_library_lies_between() -> None:
    assert _line(entry(API, (HERE, 7, "step"))) == "test_flight.py:7 in step"
    assert _line(entry(API, SHARDS, (HERE, 8, "step"), (HERE, 99, "main"))) == "test_flight.py:8 in step"


def test_what_a_pipeline_issues_itself_is_asked_for_by_one_line_on_all_stages() -> None:
    first, last = (_line(entry(API, SCHEDULE, (HERE, line, "step"))) for line in (10, 20))
    assert first == last == "schedules.py:476 in _initialize"
    assert _line(entry(API, SHARDS, STAGE, SCHEDULE, (HERE, 10, "step"))) == "stage.py:12 in backward"


def test_a_script_that_a_pipeline_calls_is_a_script() -> None:
    assert _line(entry(API, (HERE, 5, "forward"), STAGE, SCHEDULE, (HERE, 10, "step"))) == "test_flight.py:5 in forward"


def test_without_a_script_the_innermost_line_is_all_there_is() -> None:
    assert _line(entry(API, SHARDS)) == "distributed_c10d.py:3141 in all_reduce"
    assert _line({}) is None


@pytest.mark.parametrize(
    ("retired", "ended"), [((True, True, True), 9), ((True, True, False), 8), ((True, False, True), 7)]
)
def test_where_the_recorder_lags_each_collective_is_asked(
    monkeypatch: pytest.MonkeyPatch, retired: tuple[bool, ...], ended: int
) -> None:
    """Of 7, 8 and 9 the 7th has ended last: the recorder goes on saying 7, whatever else is under way."""
    entries = [
        {
            "pg_id": 0,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": number,
            "retired": each,
            "is_p2p": False,
        }
        for number, each in zip((7, 8, 9), retired, strict=True)
    ]
    status = {"last_enqueued_collective": 9, "last_completed_collective": 7}

    def records(*, collectives: bool, stacks: bool) -> dict[str, dict[str, Any]]:
        return {"gloo": {"pg_status": {"0": status}} | ({"entries": entries} if collectives else {})}

    monkeypatch.setattr(flight, "flight_records", records)
    monkeypatch.setattr(flight, "group_members", lambda: {"0": (0, 1)})
    reader = flight.FlightReader()
    said = [reader.progress()["default"] for _ in range(4)]
    assert said[0] == flight.Progress(9, 7)
    assert said[-1] == flight.Progress(9, ended)
