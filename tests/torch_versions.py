"""Runs the tests that meet torch's own classes against several releases of torch, one after the other.

    python tests/torch_versions.py                      # all but the pinned one: `make torch-versions`
    python tests/torch_versions.py 2.14.1 -- -k hook    # one release; what follows `--` goes to pytest

Each release gets an environment of its own, which sees this one's packages (gradwire, numpy, pytest) behind its own
torch, and is deleted after its tests unless `--keep` is given. pip decides from where: PIP_INDEX_URL or
PIP_EXTRA_INDEX_URL name an index of CPU wheels (200 MB a release); without one, PyPI's bring CUDA along, which is 3 GB
to download and 6 GB of disk at a time.
"""

import argparse
import shutil
import site
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

RELEASES = ("2.14.1", "2.15.0")
"""The newest patch of each minor release that gradwire supports, beside the one in constraints.txt."""

TESTS = (
    "tests/comms/backend",
    "tests/comms/bootstrap",
    "tests/comms/sharded",
    "tests/comms/transport",
    "tests/comms/test_communicator.py",
    "tests/comms/test_compression.py",
    "tests/comms/test_execute.py",
    "tests/comms/test_hook.py",
    "tests/comms/test_optimizer_check.py",
    "tests/comms/test_resume.py",
    "tests/comms/test_wrap.py",
    "tests/compressors/optim",
    "tests/test_public_names.py",
)
"""What touches process groups, works, stores, DDP's buckets and optimizers; the rest is arithmetic on tensors."""


def make_environment(folder: Path, release: str) -> Path:
    """Installs one release of torch, and nothing of ours; returns the environment's interpreter.

    Args:
        folder: For the environment; replaced if it exists.
        release: `2.14.1`.

    Raises:
        subprocess.CalledProcessError: pip finds no wheel of this release for this machine, or its index refuses.
    """
    venv.create(folder, clear=True)
    python = folder / "bin" / "python"
    # The constraint also holds for what torch itself asks for, so no other release can come in its place.
    pinned = folder / "constraints.txt"
    pinned.write_text(f"torch=={release}\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run(
        [*install, "--disable-pip-version-check", "--only-binary", ":all:", "-c", str(pinned), f"torch=={release}"],
        check=True,
    )
    [packages] = (folder / "lib").glob("python*/site-packages")
    # Behind its own packages, and with this environment's .pth files, so that an editable install is seen, too.
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "beside.pth").write_text("\n".join(lines) + "\n")
    return python


def try_release(release: str, folder: Path, pytest_options: list[str]) -> int:
    """Runs the tests on one release and returns pytest's exit status.

    Args:
        release: `2.14.1`.
        folder: For the environment.
        pytest_options: Added to the list of tests.
    """
    python = make_environment(folder, release)
    found = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()
    if found.partition("+")[0] != release:
        raise RuntimeError(f"the environment for torch {release} has torch {found}: something in front of it hides it")
    print(f"torch {found}", flush=True)
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, *pytest_options]
    return subprocess.run(command, check=False, cwd=ROOT).returncode


def main() -> int:
    """Returns 0 where the tests passed on every release."""
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "releases", nargs="*", default=RELEASES, metavar="RELEASE", help=f"default: {' '.join(RELEASES)}"
    )
    parser.add_argument("--keep", action="store_true", help="keep the environments, to run something in them by hand")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "torch", help="for the environments")
    options = parser.parse_args(words[:split])
    verdicts = {}
    for release in options.releases:
        started, folder = time.monotonic(), options.folder.absolute() / release
        try:
            status = try_release(release, folder, words[split + 1 :])
            verdicts[release] = "passed" if status == 0 else f"FAILED (pytest: {status})"
        except subprocess.CalledProcessError as error:
            verdicts[release] = f"FAILED: {' '.join(map(str, error.cmd[-2:]))} ended with {error.returncode}"
        finally:
            if not options.keep:
                shutil.rmtree(folder, ignore_errors=True)
        print(f"torch {release}: {verdicts[release]}, {time.monotonic() - started:.0f} s", flush=True)
    print("\n".join(f"torch {release:<8} {verdict}" for release, verdict in verdicts.items()))
    return 0 if all(verdict == "passed" for verdict in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
