"""Laws of the queue of sharded collectives: in order, one at a time, whoever waits; errors go to who waits for them."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.comms.sharded.overlap import MOST_REDUCING, Overlap, Submitted


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 2)), max_size=12))
def test_jobs_run_in_order_and_one_at_a_time_and_errors_go_to_who_waits(
    plan: list[tuple[bool, bool, int]],
) -> None:
    """Drawn: whether a job fails, whether it is waited for at once, and how long (ms) it takes."""
    overlap = Overlap([])
    ran: list[int] = []
    inside: list[int] = []
    submitted: list[Submitted] = []
    for number, (fails, at_once, milliseconds) in enumerate(plan):

        def job(number: int = number, fails: bool = fails, milliseconds: int = milliseconds) -> None:
            assert not inside
            inside.append(number)
            time.sleep(milliseconds / 1000)
            ran.append(number)
            inside.pop()
            if fails:
                raise ValueError(f"job {number}")

        submitted.append(overlap.submit(job))
        if at_once:
            check(submitted[-1], number, fails)
            assert ran == list(range(number + 1))
    for number in reversed(range(len(plan))):
        check(submitted[number], number, plan[number][0])
    assert ran == list(range(len(plan)))
    overlap.close()


def check(submitted: Submitted, number: int, fails: bool) -> None:
    if fails:
        with pytest.raises(ValueError, match=f"job {number}$"):
            submitted.wait()
    else:
        assert submitted.wait()


def test_only_so_many_reduce_scatters_hold_whole_gradients() -> None:
    overlap, go = Overlap([]), threading.Event()
    ended: list[int] = []

    def waiting() -> None:
        go.wait(5.0)
        ended.append(0)

    for _ in range(MOST_REDUCING):
        overlap.reduce(waiting, later=True)
    assert not ended  # returned before they were done
    go.set()
    overlap.reduce(lambda: ended.append(MOST_REDUCING), later=True)
    assert ended[:1] == [0]
    overlap.settle()
    overlap.reduce(lambda: ended.append(-1), later=False)
    assert ended[-1] == -1
    overlap.close()


def test_settling_waits_for_all_and_raises_the_first_error() -> None:
    overlap, ended = Overlap([]), []

    def failing() -> None:
        raise ValueError("first")

    overlap.reduce(failing, later=True)
    overlap.submit(lambda: ended.append(1))
    with pytest.raises(ValueError, match="first"):
        overlap.settle()
    overlap.settle()
    overlap.close()
