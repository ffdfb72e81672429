"""What ranks' last collectives mean, side by side."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gradwire.comms.observe.diagnosis import Stuck, continues, origin
from gradwire.comms.watch.collective import IssuedCollective, channel_name
from gradwire.comms.watch.rank import GroupState, RankStatus
from gradwire.comms.watch.trouble import (
    find_absent,
    find_all_stuck,
    find_disagreement,
    find_disagreements,
    positions_in,
    stalls_in_words,
    stuck_in_words,
)

MEMBERS = {"default": (0, 1, 2)}


def status(issued: int, ended: int, still: float, at: str | None = None, name: str = "default") -> RankStatus:
    return RankStatus(1, 0.0, {name: GroupState(issued, ended, still, 0.0)}, {}, {}, at)


def test_the_rank_that_has_not_issued_what_the_others_wait_in_is_missing() -> None:
    statuses = {0: status(7, 6, 12.0), 1: status(6, 6, 0.0, "data.py:8 in load"), 2: status(7, 6, 11.0)}
    (stuck,) = find_all_stuck(statuses, MEMBERS, (), 10.0)
    assert stuck == Stuck("default", 7, 12.0, (0, 2), (1,), ())
    issued = {0: {"default": [IssuedCollective(7, "all_reduce of [4] Float", "train.py:3 in step")]}}
    text = stuck_in_words(stuck, statuses, issued, {0: "a", 1: "b", 2: "b"})
    assert (
        "rank 1 on b has not reached collective 7 of group default (all_reduce of [4] Float, issued at train.py:3"
        in text
    )
    assert "ranks 0, 2 wait in it; rank 1 is at data.py:8 in load" in text


def test_a_rank_that_says_nothing_is_not_said_to_have_missed_anything() -> None:
    statuses = {0: status(7, 6, 12.0), 1: status(7, 6, 3.0), 2: status(7, 6, 11.0)}
    (stuck,) = find_all_stuck(statuses, MEMBERS, (1,), 10.0)
    assert (stuck.missing, stuck.silent) == ((), (1,))


def test_nothing_is_stuck_before_the_time() -> None:
    assert find_all_stuck({0: status(7, 6, 9.0), 1: status(6, 6, 0.0)}, MEMBERS, (), 10.0) == []


def test_where_all_have_come_a_link_is_at_fault() -> None:
    statuses = {rank: status(7, 6, 12.0) for rank in range(3)}
    (stuck,) = find_all_stuck(statuses, MEMBERS, (), 10.0)
    assert "a link is slow or broken" in stuck_in_words(stuck, statuses, {}, {})


LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer"


def leaving(why: str | None) -> RankStatus:
    return replace(status(7, 7, 0.0), leaves=why)


def test_who_does_not_answer_is_named_in_the_collective_that_failed_last() -> None:
    issued = {
        "default": [IssuedCollective(7, "all_reduce", began=5.0)],
        "rows": [IssuedCollective(3, "all_gather", began=4.0)],
    }
    statuses = {0: leaving(LOST), 1: leaving(None), 2: leaving(LOST)}
    responses = {0: issued, 2: issued}
    quiet = {0: 0.0, 1: 6.0, 2: 0.0}
    members = MEMBERS | {"rows": (0, 1, 2)}
    assert list(find_absent(responses, statuses, members, quiet)) == [Stuck("default", 7, 6.0, (0, 2), (), (1,))]
    left = statuses | {1: leaving("ValueError: odd")}
    (stuck,) = find_absent(responses, left, members, quiet)
    assert stuck == Stuck("default", 7, 6.0, (0, 2), (), (1,))
    text = stuck_in_words(stuck, left, responses, {1: "b"})
    assert text.startswith("rank 1 on b does not respond, and has not ended collective 7 of group default")
    assert text.endswith("ranks 0, 2 wait in it; rank 1 ended with ValueError: odd")


def test_nobody_is_absent_where_all_answer_or_no_collective_failed() -> None:
    issued = {"default": [IssuedCollective(7, "all_reduce", began=5.0)]}
    quiet = dict.fromkeys(range(3), 6.0)
    everybody = dict.fromkeys(range(3), issued)
    assert list(find_absent(everybody, {rank: leaving(LOST) for rank in range(3)}, MEMBERS, quiet)) == []
    for why in (None, "ValueError: odd"):
        assert list(find_absent({0: issued}, {0: leaving(why)}, MEMBERS, quiet)) == []
    assert list(find_absent({0: {}}, {0: leaving(LOST)}, MEMBERS, quiet)) == []


def test_of_two_groups_the_one_whose_missing_rank_waits_nowhere_is_the_origin() -> None:
    first = Stuck("tp", 3, 12.0, (0,), (1,), ())
    second = Stuck("dp", 9, 14.0, (2,), (0,), ())
    assert origin([second, first]) == first
    assert origin([]) is None


def test_ranks_that_wait_in_each_others_groups_are_not_accused() -> None:
    """Ranks 0 and 1 issue the collectives of two groups in another order: neither is late."""
    members = {"tp": (0, 1), "dp": (0, 1)}
    statuses = {
        rank: RankStatus(1, 0.0, {name: GroupState(4, 3, 12.0, 0.0), other: GroupState(3, 3, 0.0, 0.0)}, {}, {})
        for rank, (name, other) in enumerate([("tp", "dp"), ("dp", "tp")])
    }
    found = find_all_stuck(statuses, members, (), 10.0)
    _, text = stalls_in_words(found, statuses, {}, {0: "a", 1: "b"})
    assert text == (
        "ranks wait for each other, none of them is late: rank 0 in collective 4 of group tp; "
        "rank 1 in collective 4 of group dp"
    )


def in_order(rank: int, steps: int, order: Sequence[tuple[str, str]]) -> dict[str, list[IssuedCollective]]:
    """What a rank has issued that goes through the same calls (group, line) in each step."""
    issued: dict[str, list[IssuedCollective]] = {}
    for place in range(steps * len(order)):
        group, line = order[place % len(order)]
        of_group = issued.setdefault(group, [])
        of_group.append(IssuedCollective(len(of_group) + 1, "a message of [4] float32", line, began=float(place)))
    return issued


@pytest.mark.parametrize("skips", [0, None])
def test_a_send_that_was_left_out_is_told_from_ranks_that_wait_for_each_other(skips: int | None) -> None:
    """Both wait to receive; rank 0 has sent before it received in each step so far."""
    there, back = channel_name("default", 0, 1), channel_name("default", 1, 0)
    orders = {
        0: [(there, "a.py:1"), (back, "a.py:2"), ("default", "a.py:9")],
        1: [(there, "a.py:5"), (back, "a.py:6"), ("default", "a.py:9")],
    }
    responses = {rank: in_order(rank, 5, order) for rank, order in orders.items()}
    waits = IssuedCollective(6, "a message of [4] float32", began=99.0)
    responses[0][back].append(replace(waits, line="a.py:2" if skips == 0 else "elsewhere.py:2"))
    responses[1][there].append(replace(waits, line="a.py:5"))
    if skips is None:
        responses[0][there].clear()
    statuses = {
        0: RankStatus(1, 0.0, {there: GroupState(5, 5, 0.0, 0.0), back: GroupState(6, 5, 12.0, 0.0)}, {}, {}, "a.py:2"),
        1: RankStatus(1, 0.0, {there: GroupState(6, 5, 12.0, 0.0), back: GroupState(5, 5, 0.0, 0.0)}, {}, {}, "a.py:5"),
    }
    found = find_all_stuck(statuses, {there: (0, 1), back: (1, 0)}, (), 10.0)
    stuck, text = stalls_in_words(found, statuses, responses, {0: "a", 1: "b"})
    if skips is None:
        assert text.startswith("ranks wait for each other, none of them is late: ")
    else:
        assert (stuck.group, stuck.missing) == (there, (0,))
        assert text == (
            "rank 0 on a has not sent message 6 from 0 to 1 of group default (a message of [4] float32, issued at "
            "a.py:5), 12 s late; rank 1 waits for it; rank 0 is at a.py:2; it sent the earlier ones at a.py:1"
        )


@pytest.mark.parametrize(
    ("issued", "ended", "wanted"), [(7, 6, False), (7, 7, False), (8, 7, True)], ids=["waits", "failed", "goes on"]
)
def test_training_continues_once_the_ranks_that_waited_issue_more(issued: int, ended: int, wanted: bool) -> None:
    """A time-out ends a collective as well."""
    stuck = Stuck("default", 7, 12.0, (0, 2), (1,), ())
    statuses = {rank: status(issued, ended, 0.0) for rank in range(3)}
    assert continues(stuck, positions_in("default", statuses)) == wanted


@pytest.mark.parametrize(
    "other",
    [IssuedCollective(3, "broadcast of [4] Float", "b.py:1"), IssuedCollective(3, "all_reduce of [5] Float", "a.py:1")],
)
def test_unlike_operations_or_shapes_are_a_disagreement(other: IssuedCollective) -> None:
    same = [IssuedCollective(2, "barrier", "a.py:9"), IssuedCollective(3, "all_reduce of [4] Float", "a.py:1")]
    found = find_disagreement("default", {0: same, 1: [same[0], other], 2: same}, lines=True)
    assert found is not None and found.number == 3 and not found.by_line_alone
    assert "ranks 0, 2 issued all_reduce of [4] Float at a.py:1; rank 1 issued" in str(found)


def test_a_left_out_collective_of_the_same_shape_shows_by_its_line() -> None:
    lines = {0: ["a", "b", "a", "b"], 1: ["a", "a", "b", "a"]}
    issued = {
        rank: [IssuedCollective(n, "all_reduce of [4] Float", line) for n, line in enumerate(some)]
        for rank, some in lines.items()
    }
    found = find_disagreement("default", issued, lines=True)
    assert found is not None and found.by_line_alone and found.number == 1
    assert find_disagreement("default", issued, lines=False) is None


def test_each_group_is_compared_among_the_ranks_that_have_answered() -> None:
    """Rank 0 is gone: C++ has ended it."""
    narrow, wide = (IssuedCollective(4, f"all_reduce of [3] {dtype}", "a.py:1") for dtype in ("Float", "Double"))
    responses = {1: {"dp": [narrow], "tp": [narrow]}, 2: {"dp": [narrow]}, 3: {"dp": [wide], "tp": [narrow]}}
    (found,) = find_disagreements(responses)
    assert str(found).endswith(
        "ranks 1, 2 issued all_reduce of [3] Float at a.py:1; rank 3 issued all_reduce of [3] Double at a.py:1"
    )


def test_only_what_all_ranks_still_remember_is_compared() -> None:
    old, new = IssuedCollective(1, "barrier", None), IssuedCollective(2, "barrier", None)
    assert find_disagreement("default", {0: [old, new], 1: [new]}, lines=True) is None
