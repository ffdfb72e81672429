"""When a step begins and ends, whatever DDP and autograd say, and in whichever order."""

import pytest

from gradwire.comms.step.backward_tracker import BackwardTracker, StepState, is_timed


def tracker_after(
    *happened: str, marks_last_bucket: bool = True, autograd_calls: bool = True
) -> tuple[BackwardTracker, list[bool]]:
    """A tracker after the first bucket and what has happened since; and whether each of that has ended the step."""
    tracker = BackwardTracker()
    tracker.marks_last_bucket = marks_last_bucket
    tracker.begin(autograd_calls=autograd_calls)
    said = {"last bucket": tracker.last_bucket_arrived, "backward ended": tracker.backward_ended}
    return tracker, [said[each]() for each in happened]


def test_a_step_ends_when_backward_has_ended_behind_the_last_bucket() -> None:
    assert tracker_after("last bucket")[0].state is StepState.LAST_BUCKET_CAME
    tracker, ended = tracker_after("last bucket", "backward ended", "backward ended")
    assert ended == [False, True, False]
    assert tracker.state is StepState.BETWEEN_STEPS


def test_a_backward_pass_inside_a_checkpoint_ends_no_step() -> None:
    """Autograd has called for the inner pass, and calls no more: the last bucket ends the step."""
    tracker, ended = tracker_after("backward ended", "last bucket")
    assert ended == [False, True]
    assert not tracker.in_step


def test_a_static_graphs_first_step_ends_with_backward() -> None:
    """DDP does not say which bucket is the last then, and says so from the second step on."""
    tracker, ended = tracker_after("backward ended", marks_last_bucket=False)
    assert ended == [True]
    assert not tracker.marks_last_bucket
    tracker, ended = tracker_after("last bucket", "backward ended", marks_last_bucket=False)
    assert ended == [False, True]
    assert tracker.marks_last_bucket


def test_a_pass_that_is_known_to_be_inside_another_one_ends_no_step() -> None:
    tracker = BackwardTracker()
    tracker.begin(autograd_calls=True)
    assert not tracker.backward_ended(inside=True)
    assert tracker.in_step and tracker.last_bucket_arrived()


def test_outside_of_backward_the_last_bucket_ends_the_step() -> None:
    tracker, ended = tracker_after("last bucket", autograd_calls=False)
    assert ended == [True]
    assert tracker.marks_last_bucket


@pytest.mark.parametrize("steps", [1, 3])
def test_one_end_for_each_begin(steps: int) -> None:
    tracker = BackwardTracker()
    tracker.marks_last_bucket = True
    ends = 0
    for _ in range(steps):
        assert not tracker.in_step
        tracker.begin(autograd_calls=True)
        assert tracker.in_step
        ends += tracker.last_bucket_arrived() + tracker.backward_ended()
    assert ends == steps


def test_the_first_23_steps_and_three_of_every_hundred_are_timed() -> None:
    assert [step for step in range(210) if is_timed(step)] == [*range(23), 100, 101, 102, 200, 201, 202]
