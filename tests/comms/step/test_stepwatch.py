"""What is measured adds up: the step, what hides communication, what does not."""

import pytest

from gradwire.comms.run.all_reduces import Times
from gradwire.comms.step.stepwatch import StepWatch
from gradwire.comms.streams import HostClock


def test_a_step_and_its_exposed_part() -> None:
    now = 0.0
    watch = StepWatch(HostClock(lambda: now))
    for _ in range(5):
        buckets = []
        now += 1.0  # forward
        for _ in range(2):
            buckets.append(Times(now))
            now += 0.5
        watch.note(buckets)
        now += 0.25  # the last bucket is under way
        for bucket in buckets:
            bucket.reduced = now
        now += 0.25  # optimizer
    seen = watch.observed()
    assert seen is not None
    assert seen.steps == 3
    assert seen.step_seconds == pytest.approx(2.5)
    assert seen.backward_seconds == pytest.approx(1.0)
    assert seen.exposed_seconds == pytest.approx(0.25)
    assert seen.headroom_seconds == pytest.approx(2.25)


def test_the_middle_half_of_the_steps_is_known_from_the_fourth_on() -> None:
    """Law: a quarter of the steps is below it, and a quarter above."""
    now = 0.0
    watch = StepWatch(HostClock(lambda: now))
    for seconds in range(2 + 9):
        if seconds == 2 + 3:
            seen = watch.observed()
            assert seen is not None and seen.steps == 3 and seen.middle_half is None
        now += seconds
        watch.note([Times(now, reduced=now)])
    seen = watch.observed()
    assert seen is not None and seen.steps == 9
    assert seen.step_seconds == 5.0 and seen.middle_half == (3.0, 7.0)


def test_nothing_is_claimed_before_anything_was_seen() -> None:
    assert StepWatch().observed() is None
