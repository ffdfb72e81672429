"""A group whose ranks are threads of one process: proofs and tests in milliseconds, without sockets."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from gradwire.comms.transport.works import Done
from gradwire.compressors.base import Member

Result = TypeVar("Result")

_own = threading.local()
"""`turn`: the lock that this thread holds while it computes, if it takes turns."""


@contextmanager
def _others_turn() -> Iterator[None]:
    """While this thread waits for others, one of them may compute."""
    turn: threading.Lock | None = getattr(_own, "turn", None)
    if turn is None:
        yield
        return
    turn.release()
    try:
        yield
    finally:
        turn.acquire()


class _Meeting:
    """What the ranks of one group share: a place for each rank's tensor and a barrier around it."""

    def __init__(self, size: int, timeout_seconds: float) -> None:
        self.slots: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=timeout_seconds)


class ThreadGroup:
    """One rank's end of a thread group; `ThreadGroup.create(size)` makes all of them.

    Each collective copies the inputs out of a shared list between two barriers. Sums run in rank order in the
    tensors' own dtype, so the result has the same bits on all ranks. `sent_nbytes` counts what this rank would have
    sent with the bandwidth-optimal algorithm of each collective.
    """

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = len(meeting.slots)
        self.sent_nbytes = 0
        self._meeting = meeting

    @property
    def member(self) -> Member:
        """This rank's place, as compressors want it."""
        return Member(self.rank, self.size)

    @classmethod
    def create(cls, size: int, timeout_seconds: float = 60.0) -> "list[ThreadGroup]":
        """Returns the `size` ends of a new group; a rank that never comes breaks it after the time-out."""
        meeting = _Meeting(size, timeout_seconds)
        return [cls(rank, meeting) for rank in range(size)]

    def _exchange(self, tensor: Tensor, nbytes: float) -> list[Tensor]:
        meeting = self._meeting
        meeting.slots[self.rank] = tensor.detach().clone()
        with _others_turn():
            meeting.barrier.wait()
            everybody = list(meeting.slots)
            meeting.barrier.wait()
        self.sent_nbytes += round(nbytes)
        return everybody

    def _sum(self, tensor: Tensor, nbytes: float) -> Tensor:
        first, *others = self._exchange(tensor, nbytes)
        total = first.clone()
        for other in others:
            total += other
        return total

    def all_reduce(self, tensor: Tensor) -> Done:
        """See `Group.all_reduce`."""
        tensor.copy_(self._sum(tensor, 2 * (self.size - 1) / self.size * tensor.nbytes))
        return Done()

    def all_to_all(self, output: Tensor, source: Tensor) -> Done:
        """See `Group.all_to_all`."""
        everybody = self._exchange(source, (self.size - 1) / self.size * source.nbytes)
        output.copy_(
            torch.cat([other.chunk(self.size)[self.rank] for other in everybody]) if source.numel() else source
        )
        return Done()

    def all_gather(self, output: Tensor, source: Tensor) -> Done:
        """See `Group.all_gather`."""
        output.copy_(torch.cat(self._exchange(source, (self.size - 1) * source.nbytes)).view_as(output))
        return Done()

    def reduce_scatter(self, tensor: Tensor, bounds: Sequence[int]) -> Done:
        """See `Group.reduce_scatter`."""
        start, stop = bounds[self.rank], bounds[self.rank + 1]
        total = self._sum(tensor, (tensor.numel() - (stop - start)) * tensor.element_size())
        tensor[start:stop] = total[start:stop]
        return Done()

    def all_gather_slices(self, tensor: Tensor, bounds: Sequence[int]) -> Done:
        """See `Group.all_gather_slices`."""
        own = (bounds[self.rank + 1] - bounds[self.rank]) * tensor.element_size()
        for rank, other in enumerate(self._exchange(tensor, (self.size - 1) * own)):
            tensor[bounds[rank] : bounds[rank + 1]] = other[bounds[rank] : bounds[rank + 1]]
        return Done()

    def broadcast(self, tensor: Tensor, root: int) -> Done:
        """See `Group.broadcast`."""
        tensor.copy_(self._exchange(tensor, tensor.nbytes if self.rank == root else 0)[root])
        return Done()


def run_ranks(size: int, body: Callable[[int], Result]) -> list[Result]:
    """Runs `body(rank)` in `size` threads and returns the results in rank order.

    Raises:
        Exception: What the lowest failing rank raised.
    """
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[rank] for rank in range(size)]


def take_turns(size: int, body: Callable[[int], Result]) -> list[Result]:
    """The same, for bodies that meet in a `ThreadGroup` alone: one rank at a time computes.

    Threads that compute side by side hand the interpreter to each other at every operation of torch, which takes twice
    what they compute.
    """
    turn = threading.Lock()
    return run_ranks(size, partial(_in_turn, turn, body))


def _in_turn(turn: threading.Lock, body: Callable[[int], Result], rank: int) -> Result:
    _own.turn = turn
    with turn:
        return body(rank)
