"""Laws of waiting for one of torch's works: what it raises goes up, an alarm is heard, and time is bounded."""

import time
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from gradwire.comms.backend import work as backend_work
from gradwire.comms.backend.work import FutureWork, WatchedWork
from gradwire.comms.bootstrap.compat import BackendWork
from gradwire.comms.errors import OverdueError, PeerError
from gradwire.comms.transport import works
from gradwire.comms.transport.works import Waiting

REFUSAL = "Invalid scalar type"


class Unfinished:
    """A work that is not done within any time, or that has failed: as gloo's of reduce_scatter, it never says so."""

    def __init__(self, error: str | None = None) -> None:
        self.waits: list[timedelta | None] = []
        self._error = error

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits.append(timeout)
        assert len(self.waits) < 100 and timeout is not None, "this wait would last for ever"
        if self._error is None:
            time.sleep(timeout.total_seconds())
        raise RuntimeError(self._error or "Operation timed out!")

    def is_completed(self) -> bool:
        return False

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        raise AssertionError


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLICE", "MAKING_MARGIN"):
        monkeypatch.setattr(works, name, timedelta(milliseconds=10))
    monkeypatch.setattr(backend_work, "WAIT_MARGIN", timedelta(milliseconds=10))


def waiting(work: BackendWork, alarm: works.Aborted | None) -> Waiting:
    return Waiting(work, alarm, timedelta(milliseconds=30))


def test_what_a_work_raises_goes_up_though_it_never_says_that_it_has_ended() -> None:
    work = Unfinished(REFUSAL)
    with pytest.raises(RuntimeError, match=REFUSAL):
        waiting(work, lambda: None).wait()
    assert len(work.waits) == 2


def test_a_work_that_is_never_done_is_given_up_after_the_time_out() -> None:
    work = Unfinished()
    with pytest.raises(OverdueError, match=r"`timeout` \(0.03 s\)"):
        waiting(work, lambda: None).wait()
    assert 2 <= len(work.waits) < 10


def test_another_ranks_alarm_ends_the_wait() -> None:
    work = Unfinished()
    with pytest.raises(PeerError, match="rank 1 has given up"):
        waiting(work, lambda: "rank 1 has given up").wait()
    assert len(work.waits) == 1


def test_a_message_is_waited_for_once_and_not_for_ever() -> None:
    work = Unfinished()
    with pytest.raises(RuntimeError):
        waiting(work, None).wait()
    assert work.waits == [timedelta(milliseconds=30)]


def test_a_future_that_is_never_done_has_a_deadline() -> None:
    work = FutureWork(torch.futures.Future(), timedelta(milliseconds=30))
    with pytest.raises(RuntimeError, match=r"`timeout` of 0.03 s has passed"):
        work.wait()


def test_a_work_that_has_failed_says_so() -> None:
    def fail(seconds: float | None) -> None:
        raise RuntimeError(REFUSAL)

    class Plain(torch.distributed.Work):
        def is_completed(self) -> bool:
            return False

    work = WatchedWork(Plain(), fail)
    assert not work.is_completed()
    with pytest.raises(RuntimeError, match=REFUSAL):
        work.wait()
    assert work.is_completed()


class EndsLater(Unfinished):
    """A work that fails, as gloo's do after a disconnect, once its threads have come to it."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after

    def wait(self, timeout: timedelta | None = None) -> bool:
        if len(self.waits) >= self._after:
            self._error = "Connection closed by peer"
        return super().wait(timeout)


def test_an_abandoned_work_is_drained_until_it_has_ended() -> None:
    in_flight: dict[int, BackendWork] = {}
    ends, stays = EndsLater(4), Unfinished()
    for work in (ends, stays):
        in_flight[id(work)] = work
        with pytest.raises(PeerError, match="rank 1 has left"):
            Waiting(work, lambda: "rank 1 has left", timedelta(seconds=1), in_flight).wait()
    assert len(in_flight) == 2
    assert not works.drain(in_flight, 0.2)
    assert list(in_flight.values()) == [stays]
    assert len(ends.waits) > 4


def test_a_work_that_was_waited_for_is_not_in_flight() -> None:
    class Ended(Unfinished):
        def wait(self, timeout: timedelta | None = None) -> bool:
            return True

    work = Ended()
    in_flight: dict[int, BackendWork] = {id(work): work}
    Waiting(work, lambda: None, timedelta(seconds=1), in_flight).wait()
    assert not in_flight and works.drain(in_flight, 0.0)
