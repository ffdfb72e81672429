"""The order in which the chunks of a bucket are issued on CUDA: the same on all ranks, phases side by side."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import Mock

import pytest
import torch

from gradwire.comms.execute import Bucket, Launch, issue_at_once
from gradwire.comms.lanes import Hop
from gradwire.comms.streams import STREAMS, SideStreams


class NoStreams:
    """In place of the side streams: everything is issued as it comes."""

    def begin(self, *tensors: torch.Tensor) -> None: ...

    def of(self, number: int) -> AbstractContextManager[None]:
        return nullcontext()

    def last(self) -> AbstractContextManager[None]:
        return nullcontext()

    def rejoin(self) -> None: ...


def a_launch() -> Launch:
    flat = torch.zeros(4)
    return Launch(flat, None, (Bucket.of(flat),))


def issue(walks: int, phases: int) -> list[tuple[int, int]]:
    issued: list[tuple[int, int]] = []

    def walk(number: int) -> Iterator[Hop]:
        for phase in range(phases):
            issued.append((number, phase))
            yield Hop((phase, 0), [])

    launch = a_launch()
    issue_at_once(NoStreams(), launch, [walk(number) for number in range(walks)])  # type: ignore[arg-type]
    assert launch.buckets[0].future.done()
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


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[SideStreams, list[tuple[str, object]], list[Mock]]]:
    """Streams that only write down which stream waits for which."""

    def make() -> tuple[SideStreams, list[tuple[str, object]], list[Mock]]:
        computing = Mock(name="computing")
        waits: list[tuple[str, object]] = []
        sides: list[Mock] = []

        def stream(_: torch.device) -> Mock:
            side = Mock()
            side.wait_stream = lambda other: waits.append(("side", other))
            sides.append(side)
            return side

        computing.wait_stream = lambda other: waits.append(("computing", other))
        monkeypatch.setattr(torch.cuda, "Stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: computing)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        return SideStreams(torch.device("cuda", 0)), waits, [computing, *sides]

    return make


def test_after_an_error_the_current_stream_waits_for_what_was_issued(
    recorded: Callable[[], tuple[SideStreams, list[tuple[str, object]], list[Mock]]],
) -> None:
    streams, waits, (computing, *sides) = recorded()

    def walk() -> Iterator[Hop]:
        waits.append(("issue", None))
        raise torch.OutOfMemoryError("no memory left")
        yield

    launch = Launch(Mock(), None, ())
    with pytest.raises(torch.OutOfMemoryError):
        issue_at_once(streams, launch, [walk()])
    assert waits == [*[("side", computing)] * STREAMS, ("issue", None), *(("computing", side) for side in sides)]


def test_futures_are_completed_behind_everything_that_was_issued(
    recorded: Callable[[], tuple[SideStreams, list[tuple[str, object]], list[Mock]]],
) -> None:
    streams, waits, (computing, *sides) = recorded()
    launch = a_launch()
    launch = Launch(Mock(), None, launch.buckets)
    launch.buckets[0].flat = Mock()
    issue_at_once(streams, launch, [iter(())])
    assert launch.buckets[0].future.done()
    assert waits == [*[("side", computing)] * STREAMS, *(("side", side) for side in sides[1:])]
