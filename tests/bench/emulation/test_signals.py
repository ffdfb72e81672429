import os
import signal

import pytest

from gradwire.bench.emulation.signals import ENDING, clean_end


@pytest.mark.parametrize("number", ENDING)
def test_the_first_signal_ends_and_a_second_does_not_disturb(number: signal.Signals) -> None:
    before = [signal.getsignal(ending) for ending in ENDING]
    cleaned = False
    with pytest.raises(SystemExit) as left, clean_end():
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)
            cleaned = True
    assert cleaned
    assert left.value.code == 128 + number
    assert [signal.getsignal(ending) for ending in ENDING] == before
