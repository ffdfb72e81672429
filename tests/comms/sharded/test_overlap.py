"""Laws of reduce-scatters in flight: few hold whole gradients, and errors go to who waits for them."""

import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.comms.sharded.overlap import MOST_REDUCING, Overlap


class Reducing(dist.Work):
    """A reduce-scatter that is in flight until it is waited for."""

    def __init__(self, number: int, ended: list[int], fails: bool) -> None:
        super().__init__()
        self.number, self.ended, self.fails = number, ended, fails

    def wait(self, timeout: object = None) -> bool:
        self.ended.append(self.number)
        if self.fails:
            raise ValueError(f"{self.number}")
        return True


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=8))
def test_only_so_many_reduce_scatters_hold_whole_gradients(later: list[bool]) -> None:
    overlap, ended = Overlap(), list[int]()
    for number, may_wait in enumerate(later):
        overlap.add(Reducing(number, ended, fails=False), later=may_wait)
        assert ended == list(range(number + 1 - (MOST_REDUCING if may_wait else 0)))
    overlap.wait_all()
    assert ended == list(range(len(later)))


def test_it_waits_for_all_and_raises_the_first_error() -> None:
    overlap, ended, failed = Overlap(), list[int](), None
    overlap._reducing = [Reducing(number, ended, fails=number > 0) for number in range(3)]
    try:
        overlap.wait_all()
    except ValueError as error:
        failed = str(error)
    assert (ended, failed) == ([0, 1, 2], "1")
    overlap.wait_all()
    assert ended == [0, 1, 2]
