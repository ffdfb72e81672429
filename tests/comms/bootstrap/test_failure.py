"""A rank dies in the middle of a step: every survivor names it and the phase, soon, and nothing is left behind."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.shared_memory import left_since, segments

SCRIPT = Path(__file__).parents[1] / "jobs" / "failure_job.py"


@pytest.mark.parametrize(("nodes", "victim"), [("aabb", 3), ("aab", 0)])
def test_the_survivors_name_the_missing_rank_and_the_phase(nodes: str, victim: int) -> None:
    before = segments()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The store lives in a process of its own, as under torchrun: the loss of rank 0 does not take it along.
    server = subprocess.Popen(
        [
            sys.executable,
            "-c",
            (
                f"import time; from torch.distributed import TCPStore; s = TCPStore('127.0.0.1', {port}, is_master=True, "
                "wait_for_workers=False); time.sleep(300)"
            ),
        ]
    )
    ranks: list[subprocess.Popen[str]] = []
    for rank in range(len(nodes)):
        environment = os.environ | {
            "NODES": nodes,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(nodes)),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(victim)],
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    try:
        outputs = [process.communicate(timeout=120) for process in ranks]
    finally:
        server.kill()
        server.wait()
        for process in ranks:
            process.kill()
            process.wait()
    assert ranks[victim].returncode == -9
    for rank, (output, errors) in enumerate(outputs):
        if rank != victim:
            assert ranks[rank].returncode == 7, errors
            told = json.loads(output)
            assert f"rank {victim} of {len(nodes)} is missing" in told["error"], told
            assert any(name in told["error"] for name in ("reduce_scatter", "all_reduce", "all_gather"))
            assert told["seconds"] < 30
    assert not left_since(before)
