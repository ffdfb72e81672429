"""Where a thread stands: a look from another thread must not stop the process."""

import subprocess
import sys

LOOKS = """
import gc
import threading

from gradwire.comms.observe.stack import frame_of


class Loader:
    '''As a data loader's iterator: garbage in a circle, whose end waits for a thread.'''

    def __init__(self):
        self.itself = self
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.over.wait)
        self.thread.start()

    def __del__(self):
        self.over.set()
        self.thread.join()


gc.disable()
for _ in range(20):
    Loader()
    gc.set_threshold(1, 1, 1)
    gc.enable()
    frame = frame_of(threading.get_ident())
    assert gc.isenabled()
    assert frame.f_code is frame_of.__code__
    gc.disable()
    assert frame_of(threading.get_ident()) and not gc.isenabled()
    gc.collect()
assert threading.active_count() == 1
"""


def test_garbage_whose_end_waits_for_a_thread_does_not_stop_the_process() -> None:
    """Python 3.11.0 to 3.11.8 collect it in sys._current_frames(), under a lock that the thread's end needs."""
    done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
