"""What is read of torch's recorder: the line of the script that asked for a collective, and how far a group is."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.comms.environment import set_flight_recorder_size
from gradwire.comms.observe.stack import TORCH
from gradwire.comms.watch import flight
from gradwire.comms.watch.collective import MessageCount
from gradwire.comms.watch.flight import _line
from support.processes import Processes

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


def recorded(operations: str) -> dict[str, Any]:
    """What gloo's recorder holds after collectives (`C`), messages (`m`), and those in flight (`c`, `n`)."""
    ended = max((place for place, each in enumerate(operations, 1) if each in "Cm"), default=0)
    retired = [each == "C" for each in operations if each in "Cc"]
    group = {"pg_id": 0, "process_group": ("0", "default_pg"), "is_p2p": False}
    return {
        "pg_status": {"0": {"last_enqueued_collective": len(operations), "last_completed_collective": ended}},
        "entries": [group | {"collective_seq_id": n, "retired": each} for n, each in enumerate(retired, 1)],
    }


@pytest.mark.parametrize(
    ("before", "now", "blocked", "wanted"),
    [
        ("C", "CmCmC", False, (3, 3)),
        ("mmC", "mmCmmC", False, (2, 2)),  # two messages from before the watch began
        ("C", "CmCn", True, (2, 2)),  # a thread waits for a message
        ("C", "CmCmc", False, (3, 2)),  # and here for a collective
        ("C", "CmCnc", False, (3, 2)),
    ],
)
def test_collectives_are_numbered_without_the_messages_of_their_group(
    monkeypatch: pytest.MonkeyPatch, before: str, now: str, blocked: bool, wanted: tuple[int, int]
) -> None:
    """Law: a rank that sends more messages than another one has not come to a later collective by that."""
    operations = before
    messages = 0

    def records(*, collectives: bool, stacks: bool) -> dict[str, dict[str, Any]]:
        found = recorded(operations)
        return {"gloo": found if collectives else {"pg_status": found["pg_status"]}}

    monkeypatch.setattr(flight, "flight_records", records)
    monkeypatch.setattr(flight, "group_members", lambda: {"0": (0, 1)})
    reader = flight.FlightReader(lambda: {"0": MessageCount(messages, messages, blocked)})
    reader.progress()
    operations, messages = now, sum(each in "mn" for each in now[len(before) :])
    found = [reader.progress()["default"] for _ in range(3)]
    assert found[-1] == flight.Progress(*wanted)


def read_lines(_: int) -> list[str]:
    """The modules of torch's compiler that reading the lines of collectives loads."""
    for name in [name for name in sys.modules if name.startswith("torch._inductor")]:
        del sys.modules[name]  # another test of this process may have loaded it
    vars(torch).pop("_inductor", None)
    set_flight_recorder_size(16)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3))
    reader = flight.FlightReader()
    reader.progress()
    (issued,) = reader.issued()["default"]
    assert issued.line is not None and issued.line.startswith("test_flight.py:"), issued
    return [name for name in (*sys.modules, *vars(torch)) if name in ("torch._inductor", "_inductor")]


def test_the_lines_of_collectives_are_read_without_loading_the_compiler(processes: Processes) -> None:
    """Its import takes seconds in which a rank does not respond: as many as it has until C++ ends it."""
    assert processes(1, read_lines) == [[]]
