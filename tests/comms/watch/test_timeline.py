"""A timeline of ranks whose clocks differ: what happened together is drawn together."""

import pytest

from gradwire.comms.watch.collective import IssuedCollective, TimelinePart
from gradwire.comms.watch.timeline import clock_offsets, timeline

AHEAD = {0: 0.0, 1: 4.0, 2: -7.0, 3: 100.0}
"""Seconds of each rank's clock before rank 0's."""


def part(rank: int, groups: dict[str, list[tuple[int, float, float | None, str]]]) -> TimelinePart:
    """What a rank tells, given true times."""
    ahead = AHEAD[rank]
    return TimelinePart(
        1,
        50.0 + ahead,
        {
            name: [
                IssuedCollective(number, what, None, began + ahead, None if ended is None else ended + ahead)
                for number, began, ended, what in some
            ]
            for name, some in groups.items()
        },
    )


def meeting(number: int, began: float, ended: float | None) -> tuple[int, float, float | None, str]:
    return number, began, ended, "all_reduce of [4] Float"


PARTS = {
    0: part(0, {"tp": [meeting(1, 10.0, 10.5), meeting(2, 11.0, 11.01)]}),
    1: part(1, {"tp": [meeting(1, 10.4, 10.5), meeting(2, 11.0, 11.01)], "dp": [meeting(1, 12.0, 12.02)]}),
    2: part(2, {"dp": [meeting(1, 12.0, 12.02)], "default: 2 to 3": [(1, 13.0, 13.5, "a message of [4] float32")]}),
    3: part(3, {"default: 2 to 3": [(1, 12.9, None, "a message of [4] float32")]}),
}


def test_clocks_are_compared_by_what_ranks_meet_in_also_by_way_of_others() -> None:
    found = clock_offsets(PARTS)
    assert set(found) == {0, 1, 2}  # a message does not hold its sender back
    for rank, offset in found.items():
        assert offset.seconds == pytest.approx(AHEAD[rank], abs=offset.error_seconds + 1e-9)
        assert offset.error_seconds <= 0.031


def test_clocks_of_stages_are_compared_by_messages_both_ways() -> None:
    there, back = "default: 0 to 1", "default: 1 to 0"
    sent = (1, 10.0, 10.01, "a message of [4] float32")
    parts = {
        0: part(0, {there: [sent], back: [(1, 10.0, 10.3, "a message of [4] float32")]}),
        1: part(1, {there: [(1, 9.0, 10.02, "a message of [4] float32")], back: [(1, 10.25, 10.25, "a message")]}),
    }
    offset = clock_offsets(parts)[1]
    assert abs(offset.seconds - AHEAD[1]) <= offset.error_seconds <= 0.036


def test_a_process_for_each_rank_and_a_track_for_each_group() -> None:
    drawn = timeline(PARTS, {0: "a", 1: "a", 2: "b", 3: "b"})
    events = drawn["traceEvents"]
    assert isinstance(events, list)
    spans = [each for each in events if each["ph"] == "X"]
    assert {(each["pid"], each["cat"]) for each in spans} == {
        (0, "group tp"),
        (1, "group tp"),
        (1, "group dp"),
        (2, "group dp"),
        (2, "messages from 2 to 3 of group default"),
        (3, "messages from 2 to 3 of group default"),
    }
    second = {each["pid"]: each for each in spans if each["cat"] == "group tp" and each["args"]["number"] == 2}
    assert second[0]["ts"] == pytest.approx(second[1]["ts"], abs=31e3)
    (open_one,) = [each for each in spans if each["args"]["under_way"]]
    assert open_one["pid"] == 3
    about = drawn["otherData"]
    assert isinstance(about, dict) and about["ranks_without_common_clock"] == [3]
