"""The order in which the chunks of a bucket are issued on CUDA: the same on all ranks, phases side by side."""

from collections.abc import Iterator
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

from gradwire.comms.futures import FutureTensor, after_all
from gradwire.comms.lanes import Hop
from gradwire.comms.streams import STREAMS, SideStreams, take_turns
from gradwire.comms.transport.torch_group import Works


def issue(walks: int, phases: int) -> list[tuple[int, int]]:
    issued: list[tuple[int, int]] = []

    def walk(number: int) -> Iterator[Hop]:
        for phase in range(phases):
            issued.append((number, phase))
            yield Hop((phase, 0), Works([]))

    take_turns([walk(number) for number in range(walks)], lambda number, walk: next(walk, None) is not None)
    return issued


def test_a_chunk_starts_while_the_one_before_it_is_in_its_next_phase() -> None:
    assert issue(3, 3) == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0), (1, 2), (2, 1), (2, 2)]


@pytest.mark.parametrize("walks", [0, 1, 2, 5])
@pytest.mark.parametrize("phases", [0, 1, 3])
def test_every_phase_of_every_chunk_is_issued_once_and_in_order(walks: int, phases: int) -> None:
    issued = issue(walks, phases)
    assert sorted(issued) == [(number, phase) for number in range(walks) for phase in range(phases)]
    for number in range(walks):
        assert [phase for each, phase in issued if each == number] == list(range(phases))


def test_after_an_error_the_current_stream_waits_for_what_was_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that only write down who waits for whom."""
    computing, waits, sides = Mock(), [], []

    def stream(_: torch.device) -> Mock:
        side = Mock()
        side.wait_stream = lambda other: waits.append(("side", other))
        sides.append(side)
        return side

    def walk() -> Iterator[Hop]:
        waits.append(("issue", None))
        raise torch.OutOfMemoryError("no memory left")
        yield

    computing.wait_stream = lambda other: waits.append(("computing", other))
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: computing)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    with pytest.raises(torch.OutOfMemoryError):
        SideStreams(torch.device("cuda", 0)).run(Mock(), [walk()])
    assert waits == [*[("side", computing)] * STREAMS, ("issue", None), *(("computing", side) for side in sides)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_after_all_calls_once_and_last(order: tuple[int, ...]) -> None:
    futures: list[FutureTensor] = [torch.futures.Future() for _ in order]
    done_at: list[int] = []
    finished = 0
    after_all(futures, lambda: done_at.append(finished))
    for number in order:
        finished += 1
        futures[number].set_result(torch.zeros(1))
    assert done_at == [len(order)]
