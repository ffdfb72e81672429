"""Children that end well, badly, or not at all."""

import sys

import pytest

from gradwire.topology.gdr.inputs import collect
from gradwire.topology.gdr.inputs.child import run_child


def run(code: str) -> tuple[int | None, str, str]:
    ended = run_child([sys.executable, "-c", code], 60.0)
    return ended.code, ended.output.decode(), ended.explanation


def test_a_good_end() -> None:
    assert run("print('all')") == (0, "all\n", "no usable answer")


def test_a_bad_end_comes_with_its_last_line() -> None:
    assert run("import sys; print('first', file=sys.stderr); sys.exit('boom')") == (1, "", "exit code 1: boom")


def test_a_crash_has_its_signal() -> None:
    assert run("import os; os.kill(os.getpid(), 11)") == (-11, "", "crashed (SIGSEGV)")


def test_a_program_that_is_not_there() -> None:
    ended = run_child(["/nowhere/tool"], 1.0)
    assert (ended.code, ended.problem) == (None, "/nowhere/tool: No such file or directory")


def test_a_child_that_hangs_is_given_up_and_what_it_said_is_kept() -> None:
    ended = run_child(["/bin/sh", "-c", "echo half; exec sleep 100"], 2.0)
    assert (ended.code, ended.output, ended.explanation) == (None, b"half\n", "no answer within 2 s")


def test_a_child_that_cannot_be_killed_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grandchild holds the pipe open, as a process asleep in a driver would."""
    monkeypatch.setattr("gradwire.topology.gdr.inputs.child._GRACE_SECONDS", 0.5)
    ended = run_child(["/bin/sh", "-c", "sleep 8; echo late"], 1.0)
    assert (ended.code, ended.output, ended.explanation) == (None, b"", "no answer within 1 s")


@pytest.mark.parametrize(("executable", "words"), [("/bin/false", "exit code 1"), ("/bin/echo", "no usable answer")])
def test_a_library_whose_child_prints_no_json_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, executable: str, words: str
) -> None:
    monkeypatch.setattr("sys.executable", executable)
    assert collect.ask_libraries(prove=False) == {f"{name}_error": words for name in ("nvml", "cuda", "verbs", "nccl")}
