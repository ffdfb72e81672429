"""Every cheap command under odd conditions: it works, or ends in one line of words; never in a traceback."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradwire.bench.emulation.namespaces import available

COMMANDS = {
    "topo": ["topo"],
    "gdr-check": ["gdr-check", "--example"],
    "predict": ["predict", "--preset", "dgx_a100", "--nodes", "4", "--gradient-mb", "100"],
    "doctor": ["doctor"],
    "bench kernels": ["bench", "kernels", "--numel", "1024", "--repeats", "1"],
    "plot of no file": ["plot", "none.json"],
    "emulate": ["emulate", "--nodes", "1", "--", "true"],
}
"""What is done in a few seconds. What a closed or full standard output does is in test_output.py."""
FAILS = {"plot of no file": 2}
"""Status of those that do not end with 0."""
CONDITIONS = {
    "a narrow window": 'COLUMNS=1 exec "$@"',
    "a terminal of 20 columns": 'exec script -qec "stty cols 20; $*" /dev/null',
    "a dumb terminal": 'TERM=dumb exec script -qec "$*" /dev/null',
    "an ASCII locale": 'LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 exec "$@"',
    "no home": 'unset HOME; exec "$@"',
    "no place for temporary files": 'TMPDIR=/proc/none exec "$@"',
    "no standard input": 'exec "$@" <&-',
    "no standard error": 'exec "$@" 2>&-',
}
"""Condition -> line of a shell that runs its words under it."""


def run(shell: str, name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    if name == "emulate" and (reason := available()) is not None:
        pytest.skip(reason)
    words = ["sh", "-c", shell, "sh", sys.executable, "-m", "gradwire", *COMMANDS[name]]
    return subprocess.run(words, capture_output=True, text=True, cwd=folder, stdin=subprocess.DEVNULL, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("name", COMMANDS)
def test_an_odd_condition_changes_neither_status_nor_kind_of_output(name: str, condition: str, tmp_path: Path) -> None:
    done = run(CONDITIONS[condition], name, tmp_path)
    assert done.returncode == FAILS.get(name, 0), done.stderr[-2000:]
    assert "Traceback" not in done.stdout + done.stderr
    assert "Exception ignored" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_was_removed_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    done = run('cd gone; rmdir ../gone; exec "$@"', name, tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        f"gradwire {name.split()[0]}: the current folder has been removed; `cd` to one that there is\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("words", [["doctor"], ["selftest"]])
def test_an_interrupt_amid_the_work_is_one_line(words: list[str], tmp_path: Path) -> None:
    """Only what SIGINT itself has ended, status 130 for a shell, ends a loop of that shell."""
    # The line that says that the imports of the command itself have begun: before it Python starts. A shell's jobs in
    # the background ignore SIGINT, and so does what they start.
    started = (
        "import signal, sys, threading; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from gradwire.__main__ import main; print('started', flush=True); sys.exit(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", started, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGINT
    assert said.splitlines()[-1] == "gradwire: interrupted" and "Traceback" not in said
