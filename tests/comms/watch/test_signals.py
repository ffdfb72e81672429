"""Signals under a watch: they are seen while the main thread stands, and end the process again behind it."""

import signal
import subprocess
import sys

import pytest

CODE = """
import os, signal, sys
from gradwire.comms.watch.signals import END, REPORT, Signals

signals = Signals()
os.kill(os.getpid(), REPORT)
os.kill(os.getpid(), END)
print(sorted(signals.come()) == sorted([REPORT, END]), signals.come(), flush=True)
signals.close()
os.kill(os.getpid(), END)
print("still here")
"""


def test_signals_are_seen_and_end_the_process_once_the_watch_is_closed() -> None:
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "True frozenset()\n"), ended.stderr


OWN = """
import os, signal
from gradwire.comms.watch.signals import END, Signals

signals = Signals()
came = []
signal.signal(END, lambda number, frame: came.append(number))  # to save a checkpoint, say
os.kill(os.getpid(), END)
print(came == [END], END in signals.come())
signals.release()
signals.close()
os.kill(os.getpid(), END)
print(len(came))
"""


def test_a_signal_that_the_program_answers_itself_from_now_on_is_left_to_it() -> None:
    ended = subprocess.run([sys.executable, "-c", OWN], capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "True False\n2\n"), ended.stderr


ANOTHER = """
import os, signal, socket
from gradwire.comms.watch.signals import END, Signals

signals = Signals()
one, other = socket.socketpair()
one.setblocking(False)
signal.set_wakeup_fd(one.fileno())  # as asyncio does for signals that it is given
os.kill(os.getpid(), END)
print(END in signals.come(), END in signals.come(), signal.set_wakeup_fd(-1) == one.fileno())
"""


def test_a_signal_is_seen_though_another_library_has_taken_the_descriptor() -> None:
    ended = subprocess.run([sys.executable, "-c", ANOTHER], capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "True False True\n"), ended.stderr


RELEASED = """
import os, signal, threading, time
from gradwire.comms.watch.signals import END, Signals

signals = Signals()
{before}
releasing = threading.Thread(target=signals.release)
releasing.start()
releasing.join()
{behind}
time.sleep(20)
"""


@pytest.mark.parametrize("when", ["before", "behind"])
def test_released_from_any_thread_a_signal_ends_the_process_also_one_that_has_come_before(when: str) -> None:
    sent = {"before": "", "behind": ""} | {when: "os.kill(os.getpid(), END)"}
    code = RELEASED.format(**sent)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == -signal.SIGTERM, ended.stderr


ABORTS = """
import ctypes, sys, threading, time
from gradwire.comms.watch.signals import HELD_ABORT, Signals

signals = Signals()
signals.hold_abort(60.0)

def look():
    while HELD_ABORT not in signals.come():
        time.sleep(0.01)
    print("heard of it", flush=True)
    signals.let_abort_go()

looking = threading.Thread(target=look)
if "let go" in sys.argv:
    signals.let_abort_go()
else:
    looking.start()
{abort}
"""
ABORT_ALONE = "ctypes.CDLL(None).abort()"
"""As a thread of C++ would: without the interpreter."""
ABORT_WITHIN = "ctypes.PyDLL(None).abort()"
"""With it: nobody else could run Python."""


@pytest.mark.parametrize(
    ("abort", "words", "heard"),
    [(ABORT_ALONE, [], "heard of it\n"), (ABORT_ALONE, ["let go"], ""), (ABORT_WITHIN, ["let go"], "")],
)
def test_an_abort_waits_until_the_watch_lets_it_go_and_still_shows_where_threads_stand(
    abort: str, words: list[str], heard: str
) -> None:
    code = ABORTS.format(abort=abort)
    ended = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGABRT, heard), ended.stderr
    assert "Fatal Python error: Aborted" in ended.stderr and "most recent call first" in ended.stderr


HOLD = "signals.hold_abort(60.0)\n"


@pytest.mark.parametrize("then", ["", f"faulthandler.enable(); {HOLD}"], ids=["", "and another one again"])
def test_an_abort_is_held_again_after_the_program_has_put_back_a_handler(then: str) -> None:
    """`faulthandler.disable()` puts back what it had found: the system's own end."""
    code = ABORTS.format(abort=f"import faulthandler; faulthandler.disable(); {HOLD}{then}{ABORT_ALONE}")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout) == (-signal.SIGABRT, "heard of it\n"), ended.stderr
    assert ended.stderr.count("Fatal Python error: Aborted") == bool(then)


def test_an_abort_with_the_interpreter_waits_for_nobody() -> None:
    code = ABORTS.format(abort=ABORT_WITHIN).replace("looking.start()", "pass")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50)
    assert (ended.returncode, ended.stdout) == (-signal.SIGABRT, ""), ended.stderr


def test_an_abort_that_nobody_lets_go_ends_by_itself() -> None:
    code = ABORTS.format(abort=ABORT_ALONE).replace("looking.start()", "pass").replace("60.0", "0.2")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50)
    assert (ended.returncode, ended.stdout) == (-signal.SIGABRT, ""), ended.stderr


def test_a_forked_child_aborts_at_once_and_its_parent_hears_nothing_of_it() -> None:
    fork = "import os\nchild = os.fork()\nif not child: ctypes.CDLL(None).abort()\nprint(os.waitpid(child, 0)[1] & 127)"
    code = ABORTS.format(abort=fork).replace("looking.start()", "pass") + "\nprint(signals.come())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50)
    assert (ended.returncode, ended.stdout) == (0, f"{int(signal.SIGABRT)}\nfrozenset()\n"), ended.stderr


def test_a_signal_that_the_program_answers_itself_is_no_abort_that_is_held() -> None:
    own = "import os, signal\nsignal.signal(signal.SIGABRT, lambda *_: None)\nos.kill(os.getpid(), signal.SIGABRT)"
    code = ABORTS.format(abort=own).replace("looking.start()", "pass") + "\nprint(signals.come())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50)
    assert (ended.returncode, ended.stdout) == (0, "frozenset()\n"), ended.stderr


FORKS = """
import os, signal, time
from gradwire.comms.watch.signals import Signals

signals = Signals()
for number in (signal.SIGTERM, signal.SIGUSR2):
    child = os.fork()
    if not child:
        signals.come()
        time.sleep(60)
    time.sleep(0.2)
    os.kill(child, number)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number, signals.come())
"""


def test_a_signal_ends_a_forked_child_and_its_parent_hears_nothing_of_it() -> None:
    """So does multiprocessing's pool end its workers."""
    ended = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=False, timeout=50)
    assert (ended.returncode, ended.stdout) == (0, "True frozenset()\n" * 2), ended.stderr
