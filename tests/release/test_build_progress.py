"""The compilation of `make run` is not silent, and its errors are shown."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "build-progress"


def run(printed: str, status: int) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.stdout.write({printed!r}); sys.exit({status})"
    command = [sys.executable, str(SCRIPT), sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("  [3/25] Building CXX object a.o\n", "compiling: 3 of 25 files, "),  # ninja
        ("[ 12%] Building CXX object a.o\n", "compiling: 12 %, "),  # make
        ("Collecting numpy\n", "fetching what the compilation needs, "),
    ],
)
def test_progress_is_shown_and_the_output_is_not(printed: str, shown: str) -> None:
    done = run(printed, 0)
    assert done.returncode == 0
    assert done.stdout.startswith(shown) and "compiled and installed in" in done.stdout
    assert printed not in done.stdout


def test_a_failure_shows_the_last_lines_and_keeps_the_status() -> None:
    lines = [f"line {number}\n" for number in range(100)]
    done = run("".join(lines), 3)
    assert done.returncode == 3
    assert "".join(lines[-60:]) in done.stdout and lines[0] not in done.stdout
