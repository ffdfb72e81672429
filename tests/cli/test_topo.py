"""`gradwire topo` across a job: every node is there, a bad placement is named; alone it needs no torch."""

import subprocess
import sys

import pytest

from gradwire.bench.emulation.cluster import EmulatedCluster


@pytest.mark.netns
def test_a_round_robin_job_is_told_what_it_costs() -> None:
    with EmulatedCluster(nodes=[2, 2]) as cluster:
        result = cluster.run([sys.executable, "-m", "gradwire", "topo"], order="round-robin", timeout_seconds=120)
    assert "4 ranks on 2 nodes" in result.output[0]
    assert "node 1 node1: ranks 1, 3" in result.output[0]
    assert "not consecutive" in result.output[0]
    assert result.returncodes[0] == 1


def test_one_machine_is_shown_without_torch() -> None:
    script = "import sys; from gradwire.cli.topo import main; main([]); print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "False"
