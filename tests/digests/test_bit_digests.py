"""No result changes by a bit from version to version: portable digests, as they were recorded, against today's.

The test compares one case of each kind on three layouts; `python tests/digests/test_bit_digests.py` compares all.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

TOOL = Path(__file__).with_name("bit_digests.py")
RECORDED: dict[str, str] = json.loads(Path(__file__).with_name("recorded.json").read_text())

SAMPLES = {
    "1x4": ("exact/flat/bfloat16", "fusion/*/cuts", "backend/*/all_reduce-avg/float16", "compressor/int8"),
    "2x2": (
        "exact/*/chunks-3",
        "fusion/hierarchical/changing",
        "compressor/bf16",
        "compressor/int4",
        "compressor/int8-stochastic",
        "compressor/dgc-bare",
        "compressor/powersgd-bare",
        "ddp/no-sync/int8",
        "user-codec/*",
        "backend/hierarchical/all_reduce_coalesced-sum/int32",
    ),
    "3+1": ("exact/*/float64", "fusion/flat/some", "compressor/powersgd-rank-2", "backend/auto/plain-ddp/float32"),
}
"""Layout -> patterns of the cases that the test runs, a few seconds each."""


def digest(entry: Mapping[str, object]) -> str:
    """One short digest of all that a case has: output, every rank's state, number of transfers."""
    text = json.dumps([entry["output"], entry["state"], entry["transfers"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def changed(only: str, folder: Path) -> dict[str, str]:
    """Runs the cases that a pattern names, and returns those whose digest is not the recorded one."""
    file = folder / "now.json"
    done = subprocess.run(
        [sys.executable, str(TOOL), "record", str(file), "--only", only], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {name: digest(entry) for name, entry in json.loads(file.read_text()).items() if name in RECORDED}
    assert found, f"{only} names no portable case"
    return {name: now for name, now in found.items() if now != RECORDED[name]}


def test_no_bit_has_changed(tmp_path: Path) -> None:
    """In one run: importing torch once for all layouts."""
    patterns = [f"{layout}/{pattern}" for layout, samples in SAMPLES.items() for pattern in samples]
    found = changed(";".join(patterns), tmp_path)
    assert found == {}
    done = json.loads((tmp_path / "now.json").read_text())
    assert [pattern for pattern in patterns if not any(fnmatchcase(name, f"{pattern}*") for name in done)] == []


if __name__ == "__main__":
    print(changed("", Path(sys.argv[1]) if len(sys.argv) > 1 else Path.cwd()) or "no bit has changed")
