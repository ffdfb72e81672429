"""Law: no thread of gradwire is in C++ when the interpreter ends: before Python 3.14 the process would abort."""

import ast
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwire.comms.bootstrap import threads
from gradwire.comms.bootstrap.compat import TCPStore

ROOT = Path(threads.__file__).resolve().parents[2]
STARTING = {"Thread", "Timer", "start_new_thread", "start_joinable_thread"}
WITHOUT = "something is not done any more"

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


def started(name: str, target: Callable[[], object], **options: Any) -> threads.BackgroundThread:
    """A thread that runs."""
    chosen: dict[str, Any] = {"without": WITHOUT, "on_failure": lambda error: None} | options
    thread = threads.BackgroundThread(name, target, **chosen)
    thread.start()
    return thread


LEFT_BEHIND = (
    OPEN_QUESTION.replace("seconds=1.0", "seconds=2.0").replace("sleep(2.0)", "sleep(5.0)")
    + """
import sys
from gradwire.comms.bootstrap import threads

threads.wait_for_all.__defaults__ = (0.1, 0.1)
sys.exit(3)
"""
)
"""As `OPEN_QUESTION`, and nobody waits until the thread is back from C++: it comes while Python is being finalized."""

ENDS_IN_MEMORY = """
import os, sys, time
from datetime import timedelta
from gradwire.comms.bootstrap import threads
from gradwire.comms.bootstrap.compat import TCPStore
from gradwire.comms.transport.shm import ShmGroup

class Slow:
    def __del__(self):  # while Python is finalized; far longer than a wait in shared memory takes to look at signals
        time.sleep(2.0)

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
group = ShmGroup.create(store, rank, 2, key="test", timeout=timedelta(seconds=120))
if rank == 1:
    sys.stdin.read()  # never comes
    os._exit(0)
threads.wait_for_all.__defaults__ = (0.1, 0.1)
threads.in_thread(group.barrier, "test")
time.sleep(0.3)
slow = Slow()
sys.exit(3)
"""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that other tests have left are none of these tests' business."""
    monkeypatch.setattr(threads, "_running", set())


@pytest.mark.slow
def test_a_process_with_an_open_question_to_the_store_ends_in_order() -> None:
    done = subprocess.run([sys.executable, "-c", OPEN_QUESTION], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "given up\n"), done.stderr


@pytest.mark.slow
def test_a_thread_that_comes_back_while_python_ends_leaves_the_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT_BEHIND], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "given up\n"), done.stderr


@pytest.mark.slow
def test_a_thread_that_waits_in_shared_memory_while_python_ends_leaves_the_exit_code() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    late, leaves = (
        subprocess.Popen(
            [sys.executable, "-c", ENDS_IN_MEMORY, str(rank), str(server.port)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 0)
    )
    said = leaves.communicate()[1]
    late.communicate()
    assert leaves.returncode == 3, said


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

    started("test", run, end=end)
    assert threads.wait_for_all(20) == []
    assert asked == [1]


@pytest.mark.usefixtures("alone")
def test_one_that_waits_for_others_is_made_to_give_up_once_its_time_is_over() -> None:
    given_up = threading.Event()
    started("waits", lambda: given_up.wait(20), give_up=given_up.set)
    assert threads.wait_for_all(0.0, 20) == []


@pytest.mark.usefixtures("alone")
def test_one_that_cannot_be_asked_keeps_no_other_from_ending(caplog: pytest.LogCaptureFixture) -> None:
    stuck, ending = threading.Event(), threading.Event()

    def refuse() -> None:
        raise RuntimeError("no")

    started("stuck", lambda: stuck.wait(20), end=refuse)
    started("ends", lambda: ending.wait(20), end=ending.set)
    assert threads.wait_for_all(0.2, 0.0) in (["stuck"], ["ends", "stuck"], ["stuck", "ends"])
    assert ending.is_set()
    assert "cannot be told to end" in caplog.text
    stuck.set()
    assert threads.wait_for_all(20) == []


@pytest.mark.parametrize("error", [ValueError("odd"), MemoryError(), SystemExit(3), KeyboardInterrupt()])
def test_whatever_ends_a_thread_is_logged_and_handed_to_its_one_handler(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[BaseException] = []

    def fail() -> None:
        raise error

    started("test", fail, on_failure=found.append).join(20)
    assert found == [error]
    (said,) = caplog.records
    assert said.levelname == "ERROR" and "'test' has failed" in said.getMessage() and WITHOUT in said.getMessage()


def test_a_handler_that_fails_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*unused: object) -> None:
        raise OSError("again")

    started("test", fail, on_failure=fail).join(20)
    assert "could not be released" in caplog.records[-1].getMessage()


def test_what_a_thread_raises_for_a_caller_is_raised_there_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        threads.outcome_of(threads.in_thread(leave, "test").get(timeout=20))
    assert caplog.records == []


def test_calls_are_made_at_once_and_all_have_ended_when_one_raises() -> None:
    met, ended = threading.Barrier(3), []

    def call(number: int) -> int:
        met.wait(20)
        if number == 0:
            raise ValueError("the first")
        ended.append(number)
        return number

    with pytest.raises(ValueError, match="the first"):
        threads.call_each(call, range(3), "test")
    assert sorted(ended) == [1, 2]
    assert threads.call_each(str, [2, 1], "test") == ["2", "1"]


@pytest.mark.usefixtures("alone")
def test_one_that_does_not_end_is_left_behind() -> None:
    ending = threading.Event()
    started("stuck", lambda: ending.wait(20))
    assert threads.wait_for_all(0.1, 0.1) == ["stuck"]
    ending.set()
    assert threads.wait_for_all(20) == []


@pytest.mark.parametrize(("state", "rests"), [("S", True), ("R", False), ("D", False)])
def test_gloos_threads_rest_where_the_kernel_says_so(tmp_path: Path, state: str, rests: bool) -> None:
    for number, line in enumerate(("1 (python) R 0", f"2 (pt_gloo_runloop) {state} 0", "3 (a) b) R 0")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "stat").write_text(line)
    assert threads.gloo_rests(tmp_path) is rests


def _starts(file: Path) -> Iterator[str]:
    """What a module starts threads with: a class of `threading`, or a pool that is not closed where it is opened."""
    tree = ast.parse(file.read_text())
    within = {id(item.context_expr) for node in ast.walk(tree) if isinstance(node, ast.With) for item in node.items}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("threading", "_thread"):
            yield from STARTING & {each.name for each in node.names}
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if isinstance(node.func, ast.Attribute) and name in STARTING:
                yield name
            if name == "ThreadPoolExecutor" and id(node) not in within:
                yield name


def test_no_other_module_starts_a_thread_of_its_own() -> None:
    """But studies and the launcher of emulated clusters, which are run beside a job; a pool hands every error on."""
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for folder in ("adapters", "bench", "cli", "comms", "compressors", "gradwire", "topology")
        for file in (ROOT / folder).rglob("*.py")
        if not {"studies", "emulation"} & set(file.parts)
        for name in _starts(file)
    ]
    assert found == []


def test_every_thread_says_what_is_lost_and_turns_its_feature_off() -> None:
    """No thread is started with a handler that does nothing and says nothing."""
    starts = [
        (file, node)
        for folder in ("bench", "comms")
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "BackgroundThread"
    ]
    assert len(starts) > 15
    for file, node in starts:
        named = {each.arg for each in node.keywords}
        assert {"without", "on_failure"} <= named, f"{file}:{node.lineno}"
