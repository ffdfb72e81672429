"""Laws of the rules by which stragglers and stalls are named, whoever feeds them."""

from collections.abc import Sequence

import pytest

from gradwire.comms.observe.diagnosis import (
    Issue,
    Margin,
    Position,
    Stuck,
    behind_median,
    excesses,
    find_stuck,
    is_behind,
    median_rank,
    skipped_send,
)

SEND, RECEIVE, REDUCE = Issue("a: 0 to 1", "t.py:1", sends=True), Issue("a: 1 to 0", "t.py:2"), Issue("a", "t.py:3")


@pytest.mark.parametrize("waits", [[0.3, 0.1], [0.1, 0.3], [0.2, 0.3, 0.1], [0.4, 0.1, 0.3, 0.2]])
def test_of_two_ranks_one_is_behind_and_the_median_rank_never_is(waits: Sequence[float]) -> None:
    delays = behind_median(waits)
    assert delays[median_rank(waits)] == 0.0
    assert max(delays) == delays[min(range(len(waits)), key=waits.__getitem__)] > 0.0


def test_a_rank_is_behind_by_more_than_the_margin_but_for_its_exceptions() -> None:
    margin, lengths = Margin(0.01, 0.1), [1.0, 1.0, 0.02]
    assert is_behind([0.2, 0.2, 0.011], lengths, margin)
    assert not is_behind([0.2, 0.1, 0.011], lengths, margin)
    assert is_behind([0.2, 0.1, 0.011], lengths, margin, exceptions=1)
    assert not is_behind([0.2, 0.1, 0.01], lengths, margin, exceptions=1)


def test_what_a_rank_does_longer_is_compared_with_the_median_of_the_others() -> None:
    found = excesses({0: {"a": 1.0}, 1: {"a": 3.0, "b": 0.5}, 2: {"a": 2.0}, 3: {"a": 9.0}}, 1)
    assert found == {"a": 1.0, "b": 0.5}


def test_a_rank_with_later_launches_and_a_silent_one_are_not_missing() -> None:
    positions = {0: Position(7, 7, 12.0), 1: Position(6, None, 0.0), 2: Position(8, 8, 3.0), 3: Position(6, 6, 99.0)}
    assert find_stuck("g", range(5), positions, [3]) == Stuck("g", 7, 12.0, (0, 2), (1, 4), (3,))
    assert find_stuck("g", range(5), {1: positions[1]}, []) is None


@pytest.mark.parametrize(
    ("calls", "missing"),
    [
        ([SEND, RECEIVE, REDUCE] * 4 + [RECEIVE], SEND),
        ([SEND, RECEIVE, REDUCE] * 4 + [SEND], None),
        ([SEND, RECEIVE, REDUCE] * 3 + [RECEIVE], None),  # twice is no habit
        ([SEND, RECEIVE, REDUCE] * 4 + [SEND, REDUCE], None),  # a receive was left out, which makes nobody wait
        ([SEND, RECEIVE, REDUCE, RECEIVE, REDUCE] * 4 + [RECEIVE], None),  # not each time
        ([RECEIVE], None),
    ],
)
def test_a_send_that_came_each_time_before_is_missed(calls: list[Issue], missing: Issue | None) -> None:
    assert skipped_send(calls) == missing
