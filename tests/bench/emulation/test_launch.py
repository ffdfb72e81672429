"""Ranks as processes: statuses, output, time-outs, and nothing left behind."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from gradwire.bench.emulation.launch import Ranks, python_module, run_logical


def shell(*scripts: str) -> list[list[str]]:
    return [["sh", "-c", script] for script in scripts]


def test_output_and_statuses_are_by_rank() -> None:
    lines: list[tuple[int, str]] = []
    with Ranks(shell("echo zero", "echo one; echo uno >&2"), on_line=lambda *line: lines.append(line)) as ranks:
        outcome = ranks.wait(60, 60)
    assert outcome.returncodes == (0, 0)
    assert outcome.output == ("zero\n", "one\nuno\n")
    assert sorted(lines) == [(0, "zero"), (1, "one"), (1, "uno")]
    assert outcome.exit_status == 0
    outcome.check()


def test_the_first_failure_in_time_decides(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    # Rank 0 fails once rank 1 has gone, which it has when its parent has seen it fail.
    later = f"until [ -s {pid} ]; do sleep 0.02; done; while [ -e /proc/$(cat {pid}) ]; do sleep 0.02; done; exit 7"
    with Ranks(shell(later, f"echo $$ > {pid}; exit 3", "exit 0")) as ranks:
        outcome = ranks.wait(60, 60)
    assert outcome.returncodes == (7, 3, 0)
    assert (outcome.first_failure, outcome.exit_status) == (1, 3)


def test_a_killed_rank_gives_128_and_the_signal() -> None:
    with Ranks(shell("kill -9 $$", "true")) as ranks:
        outcome = ranks.wait(60, 60)
    assert outcome.returncodes == (-signal.SIGKILL, 0)
    assert outcome.exit_status == 128 + signal.SIGKILL


def test_survivors_get_their_grace(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    later = (
        f"until [ -s {pid} ]; do sleep 0.02; done; while [ -e /proc/$(cat {pid}) ]; do sleep 0.02; done; echo said it"
    )
    with Ranks(shell(f"echo $$ > {pid}; exit 1", later)) as ranks:
        outcome = ranks.wait(None, 60)
    assert outcome.returncodes == (1, 0)
    assert outcome.output[1] == "said it\n"


def test_survivors_are_ended_after_their_grace() -> None:
    with Ranks(shell("echo bad; exit 1", "exec sleep 600")) as ranks:
        outcome = ranks.wait(None, 0.1)
    assert outcome.returncodes == (1, -signal.SIGTERM)
    assert outcome.exit_status == 1 and not outcome.timed_out
    with pytest.raises(RuntimeError, match=r"rank 0 failed; statuses by rank \[1, -15\](.|\n)*bad"):
        outcome.check()


def test_time_is_up() -> None:
    with Ranks(shell("exec sleep 600", "true")) as ranks:
        outcome = ranks.wait(0.5, 60)
    assert outcome.timed_out and outcome.exit_status == 124 and outcome.first_failure is None
    with pytest.raises(RuntimeError, match="the time was up"):
        outcome.check()


def test_a_rank_deaf_to_sigterm_is_killed() -> None:
    ready = threading.Event()
    script = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    with Ranks(shell(script), on_line=lambda *_: ready.set()) as ranks:
        assert ready.wait(60)
        ranks.stop(0.3)
        assert ranks.wait(60, 60).returncodes == (-signal.SIGKILL,)


def test_an_exception_leaves_no_rank_nor_its_children(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with (
        pytest.raises(ZeroDivisionError),
        Ranks(shell(f"sleep 600 & echo $! > {file}.new; mv {file}.new {file}; wait")),
    ):
        deadline = time.monotonic() + 30
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        child = int(file.read_text())
        raise ZeroDivisionError
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_a_missing_program_is_an_error_at_once() -> None:
    with pytest.raises(FileNotFoundError):
        Ranks([["/no/such/program"]])


def test_ranks_get_torchruns_variables_and_their_nodes_name() -> None:
    script = 'echo "$RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $WORLD_SIZE $GRADWIRE_HOSTNAME $EXTRA"'
    outcome = run_logical([2, 1], ["sh", "-c", script], environment={"EXTRA": "x"}, timeout_seconds=60)
    assert outcome.output == ("0 0 2 3 node0 x\n", "1 1 2 3 node0 x\n", "2 0 1 3 node1 x\n")


def test_round_robin() -> None:
    outcome = run_logical([2, 1], ["sh", "-c", "echo $GRADWIRE_HOSTNAME"], order="round-robin", timeout_seconds=60)
    assert outcome.output == ("node0\n", "node1\n", "node0\n")


def test_modules_run_under_this_interpreter() -> None:
    outcome = run_logical([1], python_module("gradwire", "--help"), timeout_seconds=120)
    assert outcome.exit_status == 0
    assert "emulate" in outcome.output[0]
