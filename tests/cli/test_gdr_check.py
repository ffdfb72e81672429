"""`gradwire gdr-check` across a job: hosts without the hardware have nothing to check, an odd one out is named."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.cli import gdr_check as gdr_job
from gradwire.topology.gdr import command
from gradwire.topology.gdr.compare import differences
from gradwire.topology.gdr.example import ExampleMachine
from gradwire.topology.gdr.job import Job, T, Told


@pytest.mark.netns
def test_an_emulated_job_meets_and_rank_0_speaks() -> None:
    with EmulatedCluster(nodes=[2, 2]) as cluster:
        result = cluster.run([sys.executable, "-m", "gradwire", "gdr-check"], timeout_seconds=120)
    if result.returncodes[0] != 3:
        pytest.skip("this host has hardware to check")
    assert "nothing to check" in result.output[0]
    assert not any("nothing to check" in text for text in result.output[1:])


def meeting(*others: dict[str, object], rank: int = 0) -> Job:
    """A job whose other hosts say what this one says, but for some words of their results."""

    def gather(own: T) -> list[T]:
        assert isinstance(own, Told)
        strangers = [
            replace(own, host=(f"there{n}",), result={**own.result, **words}) for n, words in enumerate(others)
        ]
        return [own, *strangers]

    return Job(rank, ("here",), gather)


def test_hosts_that_agree_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--example"], meeting({})) == 0
    assert "2 hosts agree" in capsys.readouterr().out


def test_a_host_without_hardware_is_the_odd_one_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--example"], meeting({"nothing": "0 NVIDIA GPUs", "checks": []})) == 2
    assert "there0 has nothing to check: 0 NVIDIA GPUs" in " ".join(capsys.readouterr().out.split())


def test_only_rank_0_prints_and_all_end_alike(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--example"], meeting({"nothing": "0 NVIDIA GPUs", "checks": []}, rank=1)) == 2
    assert capsys.readouterr().out == ""


def test_a_description_is_shown_once_a_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, shown in (("0", True), ("1", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert gdr_job.main(["--example"]) == 0
        assert bool(capsys.readouterr().out) is shown


DRIVER = """
import sys
from pathlib import Path
from gradwire.cli import gdr_check as gdr_job
from gradwire.topology.gdr import prove, sources
sources.LIVE_ROOT = Path(sys.argv[1])
if sys.argv[2]:
    prove.CHILD = (sys.executable, sys.argv[2])
sys.exit(gdr_job.main(["--prove", "--json"]))
"""
CHILD = """
import json, os
rank = int(os.environ["RANK"])
line = "n:1:2 [0] NCCL INFO Channel {0:02}/0 : {1}[0] -> {2}[0] [{3}] via NET/IB/0{4}"
with open(os.environ["NCCL_DEBUG_FILE"], "w") as log:
    for channel in range(4):
        print(line.format(channel, rank, 1 - rank, "send", "/GDRDMA"), file=log)
        print(line.format(channel, 1 - rank, rank, "receive", "" if rank else "/GDRDMA"), file=log)
print(json.dumps({"gigabits_per_second": 90.5}))
"""


def proved(folder: Path, child: str) -> tuple[dict[str, object], str]:
    """The report, and what was said on the way, of two ranks under torchrun on the example machine."""
    machine = ExampleMachine(folder / "tree")
    machine.write_tree()
    (folder / "driver.py").write_text(DRIVER)
    (folder / "child.py").write_text(child)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(folder / "driver.py"),
    ]
    words = [str(machine.root), str(folder / "child.py") if child else ""]
    done = subprocess.run([*launch, *words], capture_output=True, text=True, timeout=300, check=False)
    report = json.loads(done.stdout)
    assert isinstance(report, dict)
    assert done.returncode == 1, "torchrun makes one of every exit code but 0"
    return report, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_two_ranks_without_cuda_say_so_and_end(tmp_path: Path) -> None:
    report, said = proved(tmp_path, "")
    reason = "all-reduce (default): torch sees no CUDA device: the all-reduce was not run"
    assert [said.count(f"gradwire gdr-check: rank {rank}: {reason}") for rank in (0, 1)] == [1, 1]
    checks = report["checks"]
    assert isinstance(checks, list)
    assert [check["text"] for check in checks if check["id"] in ("U3", "U4")] == [reason] * 2
    assert report["exit"] in (2, 3) and report["channels"] is None, "2 where this machine lacks the verbs library"


def test_channels_of_two_ranks_are_counted_by_direction(tmp_path: Path) -> None:
    report, _ = proved(tmp_path, CHILD)
    good = {"send_gdr": 4, "send": 4, "receive": 4}
    assert report["channels"] == [{"rank": 0, "receive_gdr": 4, **good}, {"rank": 1, "receive_gdr": 0, **good}]
    checks = {check["id"]: check for check in report["checks"]}  # type: ignore[attr-defined]
    assert checks["U3"]["text"].startswith("12 of 16 channels use GDRDMA: rank 1 receive 0/4")
    assert checks["U3"]["outcome"] == "warn"
    assert checks["U4"]["text"] == "90.5 Gb/s as configured, 90.5 through the host"


def test_hosts_that_all_have_nothing_do_not_differ() -> None:
    assert differences([{"name": "a", "nothing": "no GPU"}, {"name": "b", "nothing": "no GPU"}]) == []


def test_one_machine_is_checked_without_torch(tmp_path: Path) -> None:
    script = "import sys; from gradwire.cli.gdr_check import main; main([]); print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert told.stdout.splitlines()[-1] == "False"
