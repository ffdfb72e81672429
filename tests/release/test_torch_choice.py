"""Which torch `make` brings: the newest tested release of which pip finds a CPU build; and what is said of it where."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gradwire.comms.bootstrap.compat import GLOO_SUMS_KNOWN_UP_TO
from gradwire.comms.bootstrap.requirement import OLDEST
from support.cuda_wheel import listed_releases

ROOT = Path(__file__).resolve().parents[2]

PYTHON = """#!/bin/sh
echo "$@" >> "$0.log"
case "$*" in
  *"index versions torch"*"$PYTORCH_INDEX"*) echo "Available versions: $FOUND_AT_PYTORCH" ;;
  *"index versions torch"*) echo "torch (2.15.0)"; echo "Available versions: $FOUND" ;;
  *--dry-run*) for release in $REFUSED; do case "$*" in *"torch==$release"*) exit 1 ;; esac; done ;;
  *"pip install"*) ;;
  *) echo "torch==brought" ;;
esac
"""
"""In the place of the environment's: says which releases there are, and notes what is asked for."""


PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def brought(
    folder: Path, found: str, *words: str, refused: str = "", at_pytorch: str = "", fails: bool = False
) -> tuple[str, str]:
    """Run `make` with a stand-in for pip; return its line of installation ("" if there is none) and what it printed.

    Args:
        folder: A new folder.
        found: Releases that pip finds by its configuration.
        words: Further words of the command.
        refused: Releases that the user's constraints refuse.
        at_pytorch: Releases at PyTorch's index of CPU builds; none if it cannot be reached.
        fails: Whether `make` must refuse to go on.
    """
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / ".ci").mkdir()
    (folder / ".ci" / "prerequisites").write_text("#!/bin/sh\n")
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    for program in (folder / ".ci" / "prerequisites", python):
        program.chmod(0o755)
    done = subprocess.run(
        ["make", *words, str(folder / ".venv" / ".gradwire-torch")],
        cwd=folder,
        env={
            **os.environ,
            "FOUND": found,
            "REFUSED": refused,
            "PYTHON": "",
            "PYTORCH_INDEX": PYTORCH_INDEX,
            "FOUND_AT_PYTORCH": at_pytorch,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stderr
    if fails:
        assert "pip install" not in (folder / ".venv/bin/python.log").read_text().replace("pip install --dry-run", "")
        return "", done.stdout
    assert (folder / ".venv" / ".gradwire-torch").read_text() == "torch==brought\n"
    lines = (folder / ".venv/bin/python.log").read_text().splitlines()
    [asked] = [line for line in lines if "pip install" in line and "--dry-run" not in line]
    return asked, done.stdout


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is missing: apt-get install make")


@needs_make
@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ("2.16.0+cpu, 2.16.0, 2.15.0+cpu, 2.15.0, 2.14.1+cpu, 2.13.0+cpu", "torch==2.15.0+cpu"),
        ("2.15.0, 2.14.1+cpu, 2.14.1, 2.13.0+cpu", "torch==2.14.1+cpu"),
        ("2.15.0, 2.14.1, 2.13.0+cpu, 2.13.0", "torch==2.13.0+cpu"),
    ],
)
def test_the_newest_tested_release_with_a_build_for_cpus_is_brought(tmp_path: Path, found: str, wanted: str) -> None:
    asked, said = brought(tmp_path, found)
    assert asked.split()[-2:] == [wanted, "numpy"]
    assert "constraints.txt" in asked and PYTORCH_INDEX not in asked
    assert "3 GB" not in said


@needs_make
@pytest.mark.parametrize("found", ["2.15.0+cpux, 2.15.0, 2.14.1, 2.13.0", ""])
def test_pytorchs_index_is_asked_if_pip_finds_no_build_for_cpus(tmp_path: Path, found: str) -> None:
    asked, said = brought(tmp_path, found, at_pytorch="2.16.0+cpu, 2.15.0+cpu, 2.13.0+cpu")
    assert asked.split()[-2:] == ["torch==2.15.0+cpu", "numpy"] and f"--extra-index-url {PYTORCH_INDEX}" in asked
    assert "0.2 GB" in said


@needs_make
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="PyPI has CPU builds for other machines")
def test_the_large_build_is_brought_only_if_it_is_asked_for(tmp_path: Path) -> None:
    _, said = brought(tmp_path, "2.15.0, 2.14.1", fails=True)
    assert all(words in said for words in ("TORCH_INDEX=", "TORCH_BUILD=any", "PYTHON=", "3 GB"))
    for words in ("TORCH_BUILD=any", "DEVICE=cuda"):
        folder = tmp_path / words.replace("=", "-")
        folder.mkdir()
        asked, said = brought(folder, "2.15.0, 2.14.1", words)
        assert asked.split()[-2:] == ["torch==2.15.0", "numpy"] and "3 GB" in said and PYTORCH_INDEX not in asked


@needs_make
@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ("2.15.0+cpu, 2.15.0, 2.14.1+cpu, 2.14.1, 2.13.0+cpu", "torch==2.14.1+cpu"),
        ("2.15.0+cpu, 2.15.0, 2.14.1, 2.13.0", "torch==2.14.1"),
        ("2.15.0, 2.14.1, 2.13.0", "torch==2.14.1"),
    ],
)
def test_a_release_that_the_users_own_constraints_refuse_is_not_taken(tmp_path: Path, found: str, wanted: str) -> None:
    asked, _ = brought(tmp_path, found, "TORCH_BUILD=any", refused="2.15.0")
    assert asked.split()[-2:] == [wanted, "numpy"]


@needs_make
def test_where_all_are_refused_pip_says_why(tmp_path: Path) -> None:
    asked, _ = brought(tmp_path, "2.15.0", "TORCH_BUILD=any", refused="2.15.0 2.14.1 2.13.0")
    assert asked.split()[-2:] == ["torch==2.15.0", "numpy"]


@needs_make
def test_an_index_that_is_named_is_asked(tmp_path: Path) -> None:
    asked, _ = brought(tmp_path, "2.15.0+cpu", "TORCH_INDEX=ftp://wheels")
    assert "--extra-index-url ftp://wheels" in asked


def test_what_is_tested_is_said_alike_everywhere() -> None:
    releases = listed_releases()
    numbers = [tuple(map(int, release.split("."))) for release in releases]
    assert numbers == sorted(numbers, reverse=True)
    newest, oldest = numbers[0], numbers[-1]
    assert oldest[:2] == OLDEST
    assert newest[:2] == GLOO_SUMS_KNOWN_UP_TO
    assert f"torch>={releases[-1]},<={releases[0]}" in (ROOT / "constraints.txt").read_text().splitlines()
    spoken = f"2.{oldest[1]} to 2.{newest[1]}"
    for name in ("README.md", "docs/start/install.md", "comms/bootstrap/compat.py"):
        assert spoken in re.sub(r"\s+", " ", (ROOT / name).read_text()), name
    assert all(f"| {release} |" in (ROOT / "docs/develop/torch_releases.md").read_text() for release in releases)
