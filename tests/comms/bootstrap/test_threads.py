"""Law: no thread of gradwire is in C++ when the interpreter ends: before Python 3.14 the process would abort."""

import ast
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gradwire.comms.bootstrap import threads

COMMS = Path(threads.__file__).resolve().parents[1]

OPEN_QUESTION = """
import time
from datetime import timedelta
from gradwire.comms.bootstrap.compat import TCPStore
from gradwire.comms.bootstrap.store import _client_of

class Slow:
    def __del__(self):  # called while Python is finalized, which a thread that comes back then is not to see
        time.sleep(2.0)

server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
asked = _client_of(store)
try:
    asked.ask("wait", lambda: store.wait(["never"], timedelta(seconds=1.0)), 0.2)
except RuntimeError:
    print("given up", flush=True)
slow = Slow()
"""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that other tests have left are none of these tests' business."""
    monkeypatch.setattr(threads, "_running", set())


@pytest.mark.slow
def test_a_process_with_an_open_question_to_the_store_ends_in_order() -> None:
    done = subprocess.run([sys.executable, "-c", OPEN_QUESTION], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "given up\n"), done.stderr


@pytest.mark.usefixtures("alone")
def test_each_thread_is_asked_to_end_once_and_waited_for() -> None:
    ending = threading.Event()
    asked: list[int] = []

    def end() -> None:
        asked.append(1)
        ending.set()

    def run() -> None:
        ending.wait(20)
        time.sleep(0.1)

    threads.BackgroundThread("test", run, end=end).start()
    assert threads.wait_for_all(20) == []
    assert asked == [1]


@pytest.mark.usefixtures("alone")
def test_one_that_does_not_end_is_left_behind() -> None:
    ending = threading.Event()
    threads.BackgroundThread("stuck", lambda: ending.wait(20)).start()
    assert threads.wait_for_all(0.1) == ["stuck"]
    ending.set()
    assert threads.wait_for_all(20) == []


@pytest.mark.parametrize(("state", "rests"), [("S", True), ("R", False), ("D", False)])
def test_gloos_threads_rest_where_the_kernel_says_so(tmp_path: Path, state: str, rests: bool) -> None:
    for number, line in enumerate(("1 (python) R 0", f"2 (pt_gloo_runloop) {state} 0", "3 (a) b) R 0")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "stat").write_text(line)
    assert threads.gloo_rests(tmp_path) is rests


def test_no_other_module_starts_a_thread_of_its_own() -> None:
    calls = [
        str(file.relative_to(COMMS))
        for file in COMMS.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "Thread"
    ]
    assert calls == []
