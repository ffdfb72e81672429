"""The first failure of a rank decides, whichever thread reports it, and is never replaced by another."""

import threading

import pytest

from gradwire.comms.bootstrap.failure_reporter import CollectiveError
from gradwire.comms.run.failure_handler import FailureHandler


class Groups:
    """In place of the transports."""

    def abort(self, reason: str) -> None: ...


class Reporter:
    """In place of the one that asks the other ranks: its answer comes when the test lets it."""

    rank = 0

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()

    def diagnose(self, *arguments: object, **named: object) -> CollectiveError:
        self.asked.set()
        assert self.answers.wait(20)
        return CollectiveError("diagnosed", ())

    def signal_abort(self, reason: str) -> None: ...


@pytest.mark.parametrize("gives_up", [False, True])
def test_who_leaves_during_a_diagnosis_does_not_wait_and_has_the_last_word(gives_up: bool) -> None:
    reporter, found, told = Reporter(), list[CollectiveError](), list[CollectiveError]()
    handler = FailureHandler(Groups(), reporter, 0)  # type: ignore[arg-type]
    handler.on_failure = told.append
    thread = threading.Thread(target=lambda: found.append(handler.fail("a sum", (0, 1), RuntimeError("broken"))))
    thread.start()
    assert reporter.asked.wait(20)
    assert handler.error is None
    if gives_up:
        handler.leave(CollectiveError("left", ()))
        assert str(handler.error) == "left"
    reporter.answers.set()
    thread.join(20)
    assert [str(each) for each in (*found, *told, handler.error)] == ["left" if gives_up else "diagnosed"] * 3
