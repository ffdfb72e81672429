"""When a step begins and ends, whatever DDP and autograd say, and in whichever order."""

import pytest

from gradwire.comms.step.life import StepLife, StepState


def life_in(*happened: str, announces_last: bool = True, autograd_calls: bool = True) -> tuple[StepLife, list[bool]]:
    """A life after the first bucket and what has happened since; and whether each of that has ended the step."""
    life = StepLife()
    life.announces_last = announces_last
    life.begin(autograd_calls=autograd_calls)
    said = {"last bucket": life.last_bucket_came, "backward ended": life.backward_ended}
    return life, [said[each]() for each in happened]


def test_a_step_ends_when_backward_has_ended_behind_the_last_bucket() -> None:
    assert life_in("last bucket")[0].state is StepState.LAST_BUCKET_CAME
    life, ended = life_in("last bucket", "backward ended", "backward ended")
    assert ended == [False, True, False]
    assert life.state is StepState.BETWEEN_STEPS


def test_a_backward_pass_inside_a_checkpoint_ends_no_step() -> None:
    """Autograd has called for the inner pass, and calls no more: the last bucket ends the step."""
    life, ended = life_in("backward ended", "last bucket")
    assert ended == [False, True]
    assert not life.in_step


def test_a_static_graphs_first_step_ends_with_backward() -> None:
    """DDP does not say which bucket is the last then, and says so from the second step on."""
    life, ended = life_in("backward ended", announces_last=False)
    assert ended == [True]
    assert not life.announces_last
    life, ended = life_in("last bucket", "backward ended", announces_last=False)
    assert ended == [False, True]
    assert life.announces_last


def test_a_pass_that_is_known_to_be_inside_another_one_ends_no_step() -> None:
    life = StepLife()
    life.begin(autograd_calls=True)
    assert not life.backward_ended(inside=True)
    assert life.in_step and life.last_bucket_came()


def test_outside_of_backward_the_last_bucket_ends_the_step() -> None:
    life, ended = life_in("last bucket", autograd_calls=False)
    assert ended == [True]
    assert life.announces_last


@pytest.mark.parametrize("steps", [1, 3])
def test_one_end_for_each_begin(steps: int) -> None:
    life = StepLife()
    life.announces_last = True
    ends = 0
    for _ in range(steps):
        assert not life.in_step
        life.begin(autograd_calls=True)
        assert life.in_step
        ends += life.last_bucket_came() + life.backward_ended()
    assert ends == steps
