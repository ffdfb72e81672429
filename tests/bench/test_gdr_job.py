"""`gradwire gdr-check` across a job: hosts without the hardware have nothing to check, an odd one out is named."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from gradwire.bench.cluster import Cluster
from gradwire.topology.gdr import command
from gradwire.topology.gdr.command import Peers
from gradwire.topology.gdr.compare import differences


@pytest.mark.netns
def test_an_emulated_job_meets_and_rank_0_speaks() -> None:
    with Cluster(nodes=[2, 2]) as cluster:
        result = cluster.run([sys.executable, "-m", "gradwire", "gdr-check"], timeout_seconds=120)
    if result.returncodes[0] != 3:
        pytest.skip("this host has hardware to check")
    assert "nothing to check" in result.output[0]
    assert not any("nothing to check" in text for text in result.output[1:])


def examined(capsys: pytest.CaptureFixture[str], *others: Mapping[str, object], rank: int = 0) -> tuple[int, str]:
    """Exit code and output of a healthy machine among others."""
    status = command.main(["--example"], lambda own: Peers(rank, ({"name": "here", **own}, *others)))
    return status, capsys.readouterr().out


def test_hosts_that_agree_pass(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Mapping[str, object]] = []

    def gather(own: Mapping[str, object]) -> Peers:
        seen.append(own)
        return Peers(0, ({"name": "a", **own}, {"name": "b", **own}))

    assert command.main(["--example"], gather) == 0
    assert "2 hosts agree" in capsys.readouterr().out and len(seen) == 1


def test_a_host_without_hardware_is_the_odd_one_out(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = examined(capsys, {"name": "there", "nothing": "0 NVIDIA GPUs", "checks": []})
    assert status == 2
    assert "there has nothing to check: 0 NVIDIA GPUs" in " ".join(text.split())


def test_only_rank_0_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert examined(capsys, rank=1)[1] == ""


def test_hosts_that_all_have_nothing_do_not_differ() -> None:
    assert differences([{"name": "a", "nothing": "no GPU"}, {"name": "b", "nothing": "no GPU"}]) == []


def test_one_machine_is_checked_without_torch(tmp_path: Path) -> None:
    script = "import sys; from gradwire.bench.gdr_job import main; main([]); print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert told.stdout.splitlines()[-1] == "False"
