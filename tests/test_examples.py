"""The scripts in examples/ run as they stand, on two ranks of this machine."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

LAST_WORDS = {
    "ddp_hook.py": "all-reduces in 4 steps",
    "backend.py": "the same weights, bit for bit, on all 2 ranks",
    "compressed_resume.py": "the resumed run ends with the same weights, bit for bit",
}
"""Example -> what rank 0 prints when all went well."""


def test_every_example_is_run() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == LAST_WORDS.keys()


@pytest.mark.parametrize("name", LAST_WORDS)
def test_it_runs(name: str, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(EXAMPLES / name), "--steps", "4"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert LAST_WORDS[name] in done.stdout
    assert all(len((EXAMPLES / name).read_text().splitlines()) < 80 for name in LAST_WORDS)
