"""Scripts whose ranks cannot meet as a command with `--script` starts them: each is told so before it waits."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gradwire.bench.compare.report import ConfigurationResult
from gradwire.bench.compare.script import PLAIN, ConfigurationRun
from gradwire.bench.doctor import script
from gradwire.bench.meeting import INSTEAD, MARK, GivenJob, refusal_of

JOB = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
"""Two nodes with a rank on each."""


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> GivenJob:
    def leave(status: int) -> None:
        raise SystemExit(status)

    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "_exit", leave)
    return GivenJob.read()


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "file": (
        lambda: dist.init_process_group("gloo", init_method="file:///tmp/there", rank=0, world_size=2),
        "`init_method` is file:///tmp/there; this run ends in the middle of the script and leaves that file behind",
    ),
    "loopback": (
        lambda: dist.init_process_group("gloo", init_method="tcp://127.0.0.1:23456", rank=0, world_size=2),
        "`init_method` is tcp://127.0.0.1:23456; each node has a 127.0.0.1 of its own",
    ),
    "loopback by its name": (
        lambda: dist.init_process_group("gloo", init_method="tcp://localhost:23456?rank=0&world_size=2"),
        "each node has a localhost of its own",
    ),
    "a name of no host": (
        lambda: dist.init_process_group("gloo", init_method="tcp://no-host.invalid:23456", rank=0, world_size=2),
        "`init_method` is tcp://no-host.invalid:23456; this node cannot reach no-host.invalid (",
    ),
    "another size": (
        lambda: dist.init_process_group("gloo", rank=0, world_size=1),
        "`world_size` is 1, and this job has 2 ranks: ",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_ranks_that_cannot_meet_are_told_what_to_write(
    name: str, job: GivenJob, capfd: pytest.CaptureFixture[str]
) -> None:
    call, said = CALLS[name]
    with pytest.raises(SystemExit, match="1"), job.watched():
        call()
    refusal = refusal_of(capfd.readouterr().out.splitlines())
    assert said in str(refusal) and str(refusal).endswith(INSTEAD)


def test_an_address_that_the_script_has_set_is_told_apart(job: GivenJob, monkeypatch: pytest.MonkeyPatch) -> None:
    assert job.why_not_met("env://") is None and job.why_not_met("tcp://10.77.0.1:1", 2) is None
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert "`MASTER_ADDR` is localhost; each node" in (said := str(job.why_not_met("env://")))
    assert f"where no other node's ranks are: leave out the line of the script that sets it, and {INSTEAD}" in said
    on_one_node = GivenJob(2, True, "10.77.0.1", os.getpid())
    assert on_one_node.why_not_met("env://") is on_one_node.why_not_met("tcp://127.0.0.1:1", 2) is None


def test_methods_are_back_behind_the_block(job: GivenJob) -> None:
    before = vars(distributed_c10d)["rendezvous"]
    with job.watched():
        assert vars(distributed_c10d)["rendezvous"] is not before
    assert vars(distributed_c10d)["rendezvous"] is before


def test_steps_without_the_other_ranks_are_told(job: GivenJob) -> None:
    assert "optimizer steps without `init_process_group()`, and this job has 2 ranks" in str(job.why_apart())
    assert GivenJob(1, True, None, os.getpid()).why_apart() is None


STARTS_RANKS = """
import os, sys, torch.distributed as dist, torch.multiprocessing as mp
def train(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", rank=rank, world_size=2)
if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        mp.spawn(train, nprocs=2)
    mp.set_start_method(sys.argv[1], force=True)
    started = [mp.Process(target=train, args=(rank,)) for rank in range(2)]
    for each in started:
        each.start()
    mp.Queue().get()  # of what no process gives
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_a_script_that_starts_ranks_itself_is_told(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "LIMIT_SECONDS", 600.0)  # a busy machine may import torch for a minute
    (tmp_path / "train.py").write_text(STARTS_RANKS)
    run = script.run_script([str(tmp_path / "train.py"), how], JOB)
    assert run.error is not None and run.error.startswith("`init_process_group` is called in a process that the script")
    assert INSTEAD in run.error and run.status != 0 and run.gradient_nbytes == 0


ALONE = """
import torch
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight])
while True:
    weight.sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_script_that_reads_no_rank_is_measured_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's do not use torch.distributed either: what the doctor measures of them counts."""
    monkeypatch.setattr(script, "LIMIT_SECONDS", 600.0)
    (tmp_path / "train.py").write_text(ALONE)
    run = script.run_script([str(tmp_path / "train.py")], JOB)
    assert (run.status, run.gradient_nbytes) == (0, 12) and run.step_seconds is not None
    assert run.error is not None and "without `init_process_group()`" in run.error


def test_a_comparison_says_the_reason_alone() -> None:
    run = ConfigurationRun(PLAIN)
    for text in ("Traceback", f"{MARK}the reason", "bye"):
        run.line(1, text)
    assert run.result(2, counted=False) == ConfigurationResult(PLAIN, reason="the reason")
