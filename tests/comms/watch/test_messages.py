"""Point-to-point messages: what a rank notes of them, and what two ranks' notes mean together."""

import random
from collections.abc import Iterator, Sequence

import pytest

from gradwire.comms.watch.collective import IssuedCollective, channel_name, in_words, one_in_words, sender_of
from gradwire.comms.watch.messages import _Channel, _Group
from gradwire.comms.watch.rank import END_POINTS, GroupState, RankStatus
from gradwire.comms.watch.stragglers import StragglerFinder, WatchStraggler
from gradwire.comms.watch.trouble import find_all_stuck, find_disagreement, stuck_in_words

MICRO_BATCHES = 4


class Pipeline:
    """Stages that pass micro-batches on and gradients back: all forward, then all backward, as GPipe.

    Args:
        size: Stages.
    """

    def __init__(self, size: int) -> None:
        pairs = [(stage, stage + 1) for stage in range(size - 1)] + [(stage + 1, stage) for stage in range(size - 1)]
        self.members = {channel_name("default", *pair): pair for pair in pairs}
        self._waiting = [_Group() for _ in range(size)]
        self._channels = {
            (rank, pair): _Channel(channel_name("default", *pair), pair, rank == pair[0], self._waiting[rank])
            for pair in pairs
            for rank in pair
        }
        self._now = [0.0] * size

    def steps(self, compute: Iterator[Sequence[float]]) -> Iterator[dict[int, RankStatus]]:
        """A step for each row of seconds that the stages compute a micro-batch; yields their statuses, each 0.5 s."""
        spoken = 0.0
        for row in compute:
            for order in (range(len(row)), reversed(range(len(row)))):
                stages = list(order)
                for _ in range(MICRO_BATCHES):
                    sent = None
                    for before, stage in zip([None, *stages], stages, strict=False):
                        if before is not None and sent is not None:
                            self._receive(before, stage, sent)
                        self._now[stage] += row[stage]
                        sent = self._send(stage, stages) if stage != stages[-1] else None
            if min(self._now) > spoken + 0.5:
                spoken = min(self._now)
                yield self._statuses()

    def _send(self, stage: int, stages: Sequence[int]) -> float:
        channel = self._channels[stage, (stage, stages[stages.index(stage) + 1])]
        channel.issued += 1
        channel.passed(channel.issued, self._now[stage])
        return self._now[stage]

    def _receive(self, source: int, stage: int, sent: float) -> None:
        channel = self._channels[stage, (source, stage)]
        channel.issued += 1
        waited = max(sent - self._now[stage], 0.0)
        channel.group.waited += waited
        self._now[stage] += waited
        channel.passed(channel.issued, self._now[stage])

    def _statuses(self) -> dict[int, RankStatus]:
        statuses = {}
        for rank, now in enumerate(self._now):
            groups = {each.name: each.state(now) for (mine, _), each in self._channels.items() if mine == rank}
            statuses[rank] = RankStatus(1, now, groups, {}, {})
        return statuses


def named(late: int | None, steps: int, seed: int) -> list[WatchStraggler]:
    """Who is named first in a pipeline of four stages of 10 to 12 ms, one of which takes 50 ms longer each time."""
    drawn = random.Random(seed)
    rows = (
        [drawn.uniform(0.010, 0.012) + (0.05 if stage == late else 0.0) for stage in range(4)] for _ in range(steps)
    )
    pipeline = Pipeline(4)
    lateness = StragglerFinder(pipeline.members)
    for statuses in pipeline.steps(rows):
        if found := lateness.receive(statuses):
            return found
    return []


@pytest.mark.parametrize("late", range(4))
def test_the_slow_stage_of_a_pipeline_alone_is_named(late: int) -> None:
    for seed in range(3):
        assert [each.rank for each in named(late, 60, seed)] == [late]


def test_nobody_is_named_in_a_balanced_pipeline() -> None:
    assert named(None, 3000, 1) == []


def test_quiet_points_are_those_that_both_sides_keep_however_many_messages_there_are() -> None:
    channels = [_Channel("default: 0 to 1", (0, 1), sends, _Group()) for sends in (True, False)]
    for number in range(1, 5000):
        for channel, late in zip(channels, (0.0, 0.3), strict=True):
            channel.passed(number, number * 1e-3 + late)
    points = [{point.number for point in channel.ends} for channel in channels]
    assert all(len(each) <= END_POINTS for each in points)
    assert len(points[0] & points[1]) > END_POINTS // 4
    span = channels[0].ends[-1].seconds - channels[0].ends[0].seconds
    assert span > 2.0  # statuses of two ranks are half a second apart, and repeat what was said before


def test_who_has_not_sent_is_said_and_who_has_not_asked() -> None:
    name = channel_name("1 (pp)", 4, 5)
    assert (in_words(name), one_in_words(name, 7)) == (
        "messages from 4 to 5 of group 1 (pp)",
        "message 7 from 4 to 5 of group 1 (pp)",
    )
    assert sender_of(name) == 4 and sender_of("1 (pp)") is None

    def status(issued: int, ended: int, still: float) -> RankStatus:
        return RankStatus(1, 0.0, {name: GroupState(issued, ended, still, 0.0)}, {}, {}, "train.py:9 in step")

    waits = [IssuedCollective(7, "a message of [2, 8] float32", "train.py:4 in step")]
    for missing, verb in ((4, "not sent"), (5, "not asked for")):
        other = 9 - missing
        statuses = {missing: status(6, 6, 0.0), other: status(7, 6, 12.0)}
        (stuck,) = find_all_stuck(statuses, {name: (4, 5)}, (), 10.0)
        text = stuck_in_words(stuck, statuses, {other: {name: waits}}, {4: "a", 5: "b"})
        assert f"rank {missing} on {'a' if missing == 4 else 'b'} has {verb} message 7 from 4 to 5 of group 1" in text
        assert f"rank {other} waits for it; rank {missing} is at train.py:9" in text


def test_sender_and_receiver_that_differ_in_shape_disagree_and_lines_alone_mean_nothing() -> None:
    name = channel_name("default", 0, 1)
    sent, asked = (
        IssuedCollective(1, "a message of [4] float32", "a.py:1"),
        IssuedCollective(1, "a message of [4] float32", "a.py:2"),
    )
    assert find_disagreement(name, {0: [sent], 1: [asked]}, lines=False) is None
    wide = IssuedCollective(1, "a message of [5] float32", "a.py:2")
    found = find_disagreement(name, {0: [sent], 1: [wide]}, lines=False)
    assert "sender and its receiver disagree in message 1 from 0 to 1 of group default" in str(found)
    assert "rank 1 issued a message of [5] float32 at a.py:2" in str(found)
