"""What `make` says of a machine or an environment that lacks something, before anything is downloaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def ask(folder: Path, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    command = [str(ROOT / ".ci" / "prerequisites"), *words]
    return subprocess.run(command, cwd=folder, env=kept | environment, capture_output=True, text=True, check=False)


@pytest.fixture
def half_made(tmp_path: Path) -> Path:
    """A folder whose .venv has no pip."""
    if (done := ask(tmp_path)).returncode:
        pytest.skip(done.stderr.strip())
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / ".venv")], check=True)
    return tmp_path


def test_an_environment_without_pip_is_named_with_what_to_do(half_made: Path) -> None:
    done = ask(half_made)
    assert done.returncode == 1 and "rm -r .venv" in done.stderr and "has no pip" in done.stderr
    assert ask(half_made, "--list").returncode == 0
    python = half_made / ".venv" / "bin" / "python"
    done = ask(half_made, PYTHON=str(python))
    assert done.returncode == 1 and f"`{python} -m ensurepip`" in done.stderr
