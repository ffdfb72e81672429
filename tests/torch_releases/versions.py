"""Runs the tests that meet torch's own classes against several releases of torch, one after the other. With
tests/ in PYTHONPATH:

    python -m torch_releases.versions                      # all but the one of this environment: `make torch-versions`
    python -m torch_releases.versions 2.14.1 -- -k hook    # one release; what follows `--` goes to pytest
    python -m torch_releases.versions 2.14.1 --tests tests/comms/plan tests/compressors    # some folders or files
    python -m torch_releases.versions --wheels FOLDER      # its wheels are there already
    python -m torch_releases.versions --newest             # FSDP2, DDP and the backend on the newest one: `.ci/run`

Each release gets an environment of its own, which sees this one's packages (gradwire, numpy, pytest) behind its own
torch, and is deleted after its tests unless `--keep` is given. pip decides from where: PIP_INDEX_URL or
PIP_EXTRA_INDEX_URL name an index of CPU wheels (200 MB a release). PyPI's build is for CUDA, 540 MB; it is installed
without NVIDIA's packages, over stubs (support/cuda_wheel.py), and computes on CPU tensors.
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from support.cuda_wheel import BuildError, download, find_wheel, listed_releases, make_cpu_environment

ROOT = Path(__file__).resolve().parents[2]

TESTS = ("tests/comms", "tests/compressors/optim", "tests/bench/train", "tests/test_public_names.py")
"""What touches process groups, works, stores, DDP's buckets and optimizers, and the main job on a small model; the rest
is arithmetic on tensors, or needs no torch."""


NEWEST_TESTS = (
    "tests/comms/sharded",
    "tests/comms/test_hook.py",
    "tests/comms/step/test_ddp_options.py",
    "tests/comms/step/test_states.py",
    "tests/comms/backend/test_process_group.py",
    "tests/comms/backend/test_process_group_jobs.py",
    "tests/comms/backend/test_sharded_training.py",
    "tests/test_public_names.py",
)
"""What a new release of torch has broken or changed so far: FSDP2, DDP's options and the calls of a process group."""

PYTEST = ("-q", "-p", "no:cacheprovider", "--dist", "loadfile")


def try_release(
    release: str, folder: Path, wheels: Path | None, workers: int, tests: Sequence[str], pytest_options: Sequence[str]
) -> int:
    """Runs the tests on one release and returns pytest's exit status.

    Args:
        release: `2.14.1`.
        folder: For the environment.
        wheels: A folder with torch's wheels; pip downloads this one where it is None.
        workers: Processes that run tests.
        tests: Folders and files.
        pytest_options: Added to the list of tests.
    """
    python = make_cpu_environment(folder, release, wheels)
    found = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()
    if found.partition("+")[0] != release:
        raise RuntimeError(f"the environment for torch {release} has torch {found}: something in front of it hides it")
    print(f"torch {found}", flush=True)
    command = [str(python), "-m", "pytest", *PYTEST, "-n", str(workers), *tests, *pytest_options]
    return subprocess.run(command, check=False, cwd=ROOT).returncode


def bring_newest(candidates: Sequence[str], wheels: Path) -> str | None:
    """Has pip download the newest release of which it finds a wheel for this Python.

    Args:
        candidates: Releases, the newest first.
        wheels: Where the wheel goes; nothing is downloaded if one of a candidate is there.

    Returns:
        The release, or None if pip finds a wheel of none; what pip said is printed then.
    """
    for release in candidates:
        if find_wheel(wheels, release) is not None:
            return release
        try:
            download(f"torch=={release}", wheels)
        except BuildError as error:
            print(f"torch {release}: {str(error).strip().splitlines()[-1]}", flush=True)
        else:
            return release
    return None


def main() -> int:
    """Returns 0 where the tests passed on every release."""
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own, listed = metadata.version("torch").partition("+")[0], listed_releases()
    others = [each for each in listed if each != own]
    parser.add_argument("releases", nargs="*", default=others, metavar="RELEASE", help=f"default: {' '.join(others)}")
    parser.add_argument("--keep", action="store_true", help="keep the environments, to run something in them by hand")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "torch", help="for the environments")
    parser.add_argument("--wheels", type=Path, help="a folder with torch's wheels, in it or in folders inside it")
    parser.add_argument("--workers", type=int, default=3, help="processes that run tests; default: 3")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="in place of what meets torch's classes")
    parser.add_argument(
        "--newest", action="store_true", help="only FSDP2, DDP and the backend, on the newest release that can be had"
    )
    options = parser.parse_args(words[:split])
    tests = options.tests or (NEWEST_TESTS if options.newest else TESTS)
    if options.newest:
        newer = listed[: listed.index(own)] if own in listed else listed
        if options.wheels is None:
            options.wheels = options.folder.absolute() / "wheels"
            options.wheels.mkdir(parents=True, exist_ok=True)
        newest = bring_newest(newer, options.wheels)
        if newest is None:
            print(f"NOT RUN: tests on a torch newer than {own}: no wheel of {' or '.join(newer) or 'one'} was found")
            return 0
        options.releases = [newest]
    verdicts = {}
    for release in options.releases:
        started, folder = time.monotonic(), options.folder.absolute() / release
        try:
            status = try_release(release, folder, options.wheels, options.workers, tests, words[split + 1 :])
            verdicts[release] = "passed" if status == 0 else f"FAILED (pytest: {status})"
        except BuildError as error:
            verdicts[release] = f"FAILED: {error}"
        finally:
            if not options.keep:
                shutil.rmtree(folder, ignore_errors=True)
        print(f"torch {release}: {verdicts[release]}, {time.monotonic() - started:.0f} s", flush=True)
    print("\n".join(f"torch {release:<8} {verdict}" for release, verdict in verdicts.items()))
    return 0 if all(verdict == "passed" for verdict in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
