"""Plants each fault in a scratch copy of the checkout, runs its tests there, and says whether they caught it.

python tests/mutations/run.py [PART OF THE NAME ...]      # all of them, or those whose names have one of the parts

In the environment of the GPU stand-in those of on_standin.py are planted, which its drawn schedules must show;
elsewhere the others. Ends with 1 if one survived, or its tests could not be run.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_standin.calls import is_standin

from mutations.collectives import COLLECTIVES
from mutations.elastic import ELASTIC
from mutations.keeping import KEEPING
from mutations.mutation import ROOT, Mutation
from mutations.on_standin import ON_STANDIN
from mutations.streams import STREAMS

MUTATIONS = (*STREAMS, *COLLECTIVES, *KEEPING, *ELASTIC, *ON_STANDIN)
SECONDS = 900
"""For the tests of one fault: no test hangs for a fault of ours, as the fakes have time-outs."""
SURVIVED, CAUGHT = 0, 1
"""What pytest ends with."""

_FINDER = '''"""Has gradwire found in this copy, before any installed one."""

import sys
from importlib.machinery import PathFinder


class CopyFirst:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "gradwire":
            return PathFinder.find_spec(name, [{root!r}])
        return PathFinder.find_spec(name, path) if name.startswith("gradwire.") else None


sys.meta_path.insert(0, CopyFirst)
'''


def copy_checkout(to: Path) -> None:
    """Copies what git knows of the checkout, and the compiled part, and has Python find gradwire there.

    Raises:
        RuntimeError: gradwire's compiled part is not installed.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, to / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    compiled = importlib.util.find_spec("gradwire._native")
    if compiled is None or compiled.origin is None:
        raise RuntimeError("gradwire._native is missing: `make test` builds it")
    shutil.copy2(compiled.origin, to / "gradwire")
    (to / "sitecustomize.py").write_text(_FINDER.format(root=str(to)))


@contextmanager
def planted(mutation: Mutation, copy: Path) -> Iterator[None]:
    """Inside it the copy has the fault."""
    file = copy / mutation.file
    text = file.read_text(encoding="utf-8")
    file.write_text(mutation.planted(text), encoding="utf-8")
    _forget_bytecode(file)
    try:
        yield
    finally:
        file.write_text(text, encoding="utf-8")
        _forget_bytecode(file)


def _forget_bytecode(file: Path) -> None:
    """Python takes bytecode for current whose source has the same length and second."""
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def run_tests(tests: Sequence[str], copy: Path) -> tuple[int, str]:
    """What pytest ended with, and the first test that failed, or its last words."""
    paths = os.pathsep.join([str(copy), str(copy / "tests")])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-n", "0", *tests]
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"not done after {SECONDS} s"
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (failed or lines or done.stderr.strip().splitlines() or [""])[-1 if not failed else 0]


def main() -> None:
    """Prints a line for each fault, and how many were caught."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", help="of the names of those to plant; all by default")
    wanted = parser.parse_args().parts
    here = ON_STANDIN if is_standin() else [each for each in MUTATIONS if each not in ON_STANDIN]
    chosen = [each for each in here if not wanted or any(part in each.name for part in wanted)]
    caught = 0
    with tempfile.TemporaryDirectory(prefix="gradwire-mutations-") as folder:
        copy_checkout(Path(folder))
        for mutation in chosen:
            began = time.monotonic()
            with planted(mutation, Path(folder)):
                ended, words = run_tests(mutation.tests, Path(folder))
            verdict = {SURVIVED: "SURVIVED", CAUGHT: "caught"}.get(ended, f"NOT RUN ({ended})")
            caught += ended == CAUGHT
            print(f"{verdict:9} {mutation.name} ({time.monotonic() - began:.0f} s): {words[:160]}", flush=True)
    print(f"{caught} of {len(chosen)} caught")
    sys.exit(caught != len(chosen))


if __name__ == "__main__":
    main()
