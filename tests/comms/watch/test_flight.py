"""Law: the line that is compared is the script's, but where ranks have parts of their own by torch's design."""

from pathlib import Path

from gradwire.comms.observe.stack import TORCH
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
