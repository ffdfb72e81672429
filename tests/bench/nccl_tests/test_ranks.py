"""Who started this rank: torchrun, srun, or nobody; and what is wrong with half a set of variables."""

import pytest

from gradwire.bench.nccl_tests.ranks import RankInfo, World
from gradwire.bench.nccl_tests.start import OWN_LAUNCHER, Start, find_start, first_host

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}


def test_torchrun_and_srun_are_recognised() -> None:
    assert find_start({}) is None
    assert find_start(TORCHRUN) == Start("torchrun", 3, 8, "10.0.0.1", 29500)
    pod = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}
    assert find_start(pod) == Start(OWN_LAUNCHER, 3, 8, "10.0.0.1", 29500)
    srun = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "7"}
    found = find_start(srun)
    assert found is not None and (found.by, found.rank, found.size, found.address) == ("srun", 2, 4, "gpu03")
    assert find_start(srun | {"SLURM_STEP_ID": "1"}) != found
    assert find_start({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_half_a_launcher_is_an_error(missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        find_start({name: value for name, value in TORCHRUN.items() if name != missing})


def test_a_rank_that_is_no_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="`RANK` is 'x'"):
        find_start(TORCHRUN | {"RANK": "x"})


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("alpha", "alpha"), ("alpha,beta", "alpha"), ("node[03-07,9],login", "node03"), ("n[1,5]-ib", "n1-ib")],
)
def test_first_host_of_a_slurm_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("a", "1 (1 node x 1 local rank)"),
        ("aabb", "4 (2 nodes x 2 local ranks)"),
        ("aaab", "4 (2 nodes with 3, 1 local ranks)"),
        ("abab", "4 (2 nodes x 2 local ranks)"),
    ],
)
def test_shape_in_words(hosts: str, text: str) -> None:
    ranks = tuple(RankInfo(rank, 1, host, 0) for rank, host in enumerate(hosts))
    world = World(Start("-g", 0, len(hosts), "", 0), None, None, ranks)  # type: ignore[arg-type]  # words need no store
    assert world.shape() == text
