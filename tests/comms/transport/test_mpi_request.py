"""MPI's waits end by an abort, and what MPI may still use is neither freed nor let go of."""

import gc
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from gradwire.comms.errors import PeerError
from gradwire.comms.transport import mpi
from gradwire.comms.transport.mpi import MpiGroup
from gradwire.compressors.base import Work


class Never:
    """A request of MPI that does not end; calls a function at the third poll."""

    def __init__(self, at_third: Callable[[], object] = lambda: None) -> None:
        self.polls = 0
        self._at_third = at_third

    def Test(self) -> bool:
        self.polls += 1
        if self.polls == 3:
            self._at_third()
        assert self.polls < 100_000
        return False


class Ended:
    """A request of MPI that has ended."""

    def Test(self) -> bool:
        return True


class Communicator:
    """A communicator of MPI that counts how often it was freed."""

    def __init__(self) -> None:
        self.freed = 0

    def Free(self) -> None:
        self.freed += 1


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mpi, "_POLL_SECONDS", (0.0,))
    monkeypatch.setattr(mpi, "_in_flight", {})
    monkeypatch.setattr(mpi, "SLICE", timedelta(0))
    yield


def group_of(*communicators: Any, seconds: float = 60.0, alarm: Callable[[], str | None] | None = None) -> MpiGroup:
    first, second = communicators or (Communicator(), Communicator())
    return MpiGroup(module_of((4, 0)), first, second, 0, 2, timedelta(seconds=seconds), alarm)


def module_of(version: tuple[int, int]) -> Any:
    """mpi4py's module, as far as a group without collectives uses it, of an MPI of that version."""
    return SimpleNamespace(Get_version=lambda: version, BYTE="byte", IN_PLACE="in place")


def request_of(group: MpiGroup, request: Any, *buffers: object) -> mpi._Request:
    return mpi._Request(request, buffers, "all_reduce", group)


def test_the_buffers_of_a_request_that_takes_too_long_are_kept() -> None:
    buffer = numpy.zeros(4)
    kept = weakref.ref(buffer)
    request = request_of(group_of(seconds=0.0), Never(), buffer)
    del buffer
    with pytest.raises(PeerError, match="MPI all_reduce took longer than 0 s"):
        request.wait()
    del request
    gc.collect()
    assert kept() is not None


def test_so_are_those_of_a_request_that_nobody_waits_for_until_it_has_ended() -> None:
    buffer = numpy.zeros(4)
    kept = weakref.ref(buffer)
    request_of(group_of(), Never(), buffer)
    gc.collect()
    del buffer
    assert kept() is not None
    (left,) = mpi._in_flight.values()
    left._request = Ended()
    left.wait()
    gc.collect()
    assert kept() is None and not mpi._in_flight


def test_an_abort_ends_a_wait_and_all_later_collectives() -> None:
    group = group_of()
    request = request_of(group, Never(lambda: group.abort("rank 0 has given up")))
    with pytest.raises(PeerError, match="rank 0 has given up"):
        request.wait()
    with pytest.raises(PeerError, match="rank 0 has given up"):
        _ = group._first


def test_the_alarm_of_another_rank_ends_a_wait() -> None:
    request = request_of(group_of(alarm=lambda: "rank 1 has failed"), Never())
    with pytest.raises(PeerError, match="rank 1 has failed"):
        request.wait()


def test_closing_frees_both_communicators_once() -> None:
    both = Communicator(), Communicator()
    group = group_of(*both)
    request_of(group, Ended()).wait()
    group.close()
    group.close()
    assert [each.freed for each in both] == [1, 1]


def test_communicators_that_a_request_still_uses_are_not_freed() -> None:
    both = Communicator(), Communicator()
    group = group_of(*both)
    request_of(group, Never())
    group.close()
    assert [each.freed for each in both] == [0, 0]


CALLS: dict[str, Callable[[MpiGroup, Tensor], Work]] = {
    "all_reduce": lambda group, tensor: group.all_reduce(tensor, 0.5),
    "reduce_scatter": lambda group, tensor: group.reduce_scatter(tensor, (0, 1, tensor.numel()), 0.5),
    "all_gather_slices": lambda group, tensor: group.all_gather_slices(tensor, (0, 1, tensor.numel())),
    "all_to_all": lambda group, tensor: group.all_to_all(torch.empty_like(tensor), tensor),
    "all_gather": lambda group, tensor: group.all_gather(torch.empty(2 * tensor.numel()), tensor),
    "broadcast": lambda group, tensor: group.broadcast(tensor, 0),
    "exchange": lambda group, tensor: group.exchange(
        torch.empty_like(tensor), tensor, [1, tensor.numel() - 1], [1, tensor.numel() - 1], tensor.nbytes
    ),
}
NBYTES = 64


class Issuing:
    """A communicator of MPI that begins whatever it is told to."""

    def __getattr__(self, name: str) -> Callable[..., Ended]:
        return lambda *arguments, **named: Ended()


@pytest.mark.parametrize("version", [(3, 1), (4, 0)])
@pytest.mark.parametrize("call", CALLS)
def test_what_an_mpi_cannot_count_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, call: str, version: tuple[int, int]
) -> None:
    """Open MPI 5 says MPI_ERR_ARG of more than 2**31 - 1 bytes; law: nothing is issued or changed then."""
    group = MpiGroup(module_of(version), Issuing(), Issuing(), 0, 2, timedelta(seconds=60))
    tensor = torch.ones(NBYTES // 4)
    monkeypatch.setattr(mpi, "MOST_NBYTES", NBYTES * (2 if call == "all_gather" else 1))
    CALLS[call](group, tensor)
    monkeypatch.setattr(mpi, "MOST_NBYTES", mpi.MOST_NBYTES - 1)
    if version >= mpi.LARGE_COUNTS:
        CALLS[call](group, tensor)
        return
    begun, before = len(mpi._in_flight), tensor.clone()
    with pytest.raises(ValueError, match=r"a call of an MPI before 4\.0 takes"):
        CALLS[call](group, tensor)
    assert len(mpi._in_flight) == begun and torch.equal(tensor, before)
