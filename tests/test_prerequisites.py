"""What a machine or an environment lacks for `make` is said at once, before anything is downloaded."""

import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "prerequisites"

PYTHON = """#!/bin/sh
case "$*" in
  *--version*) echo "Python 3.12.3" ;;
  *version_info*) exit {old} ;;
  *ensurepip*) exit {without_venv} ;;
  *Python.h*) exit {without_headers} ;;
esac
"""
"""Answers what the script asks an interpreter; 1: it has not got that."""

ALL = {"python3": "", "c++": "", "setpriv": "", "ip": "", "tc": ""}


def machine(folder: Path, lacks: Collection[str], old: bool = False) -> dict[str, str]:
    """The environment of a machine with the shell, a python3, and what of `ALL` it does not lack."""
    for name in ("bash", "dirname", "id"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    for name in ALL.keys() - set(lacks):
        text = PYTHON.format(old=int(old), without_venv=int("venv" in lacks), without_headers=int("Python.h" in lacks))
        (folder / name).write_text(text if name == "python3" else "#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder)}


def ask(environment: dict[str, str], *words: str) -> tuple[int, str, str]:
    # The script looks for ip and tc in the system's folders, too; this machine may have them there.
    text = SCRIPT.read_text().replace("PATH=$PATH:/usr/sbin:/sbin\n", "")
    words = ("bash", "-s", "--", *words)
    done = subprocess.run(words, input=text, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("lacks", "packages"),
    [
        ((), ""),
        (("Python.h",), "python3-dev"),
        (("venv", "Python.h", "c++"), "python3-venv python3-dev g++"),
        (("python3", "c++", "setpriv", "ip"), "python3 python3-venv python3-dev g++ util-linux iproute2"),
    ],
)
def test_all_that_is_missing_is_in_one_message(lacks: tuple[str, ...], packages: str, tmp_path: Path) -> None:
    status, _, said = ask(machine(tmp_path, lacks))
    assert status == (1 if lacks else 0)
    last = said.strip().rpartition("\n")[2]
    assert last.partition("--no-install-recommends ")[2] == packages
    assert ("sudo" in last) == bool(lacks and os.getuid())


def test_without_a_compiler_a_wheel_needs_none(tmp_path: Path) -> None:
    assert ask(machine(tmp_path, ("c++", "Python.h")), "--wheel")[0] == 0


def test_what_only_the_emulated_cluster_needs_stops_nobody_and_is_listed(tmp_path: Path) -> None:
    environment = machine(tmp_path, ("tc",))
    assert ask(environment)[0] == 0
    assert ask(environment, "--list")[1] == "iproute2\n"


def test_an_old_python_is_named(tmp_path: Path) -> None:
    status, _, said = ask(machine(tmp_path, (), old=True))
    assert status == 1
    assert "Python 3.12.3, wanted Python 3.11 or newer" in said


def ask_in(folder: Path, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """As in a checkout, on this machine."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    command = [str(SCRIPT), *words]
    return subprocess.run(command, cwd=folder, env=kept | environment, capture_output=True, text=True, check=False)


@pytest.fixture
def half_made(tmp_path: Path) -> Path:
    """A folder whose .venv has no pip."""
    if (done := ask_in(tmp_path)).returncode:
        pytest.skip(done.stderr.strip())
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / ".venv")], check=True)
    return tmp_path


def test_an_environment_without_pip_is_named_with_what_to_do(half_made: Path) -> None:
    done = ask_in(half_made)
    assert done.returncode == 1 and "rm -r .venv" in done.stderr and "has no pip" in done.stderr
    assert ask_in(half_made, "--list").returncode == 0
    python = half_made / ".venv" / "bin" / "python"
    done = ask_in(half_made, PYTHON=str(python))
    assert done.returncode == 1 and f"`{python} -m ensurepip`" in done.stderr
