"""A step that loses a rank never ends in one rank's own gradients, on devices and NCCL as they are.

The stream on which the loss is marked must not be one that hangs with the lost collective: torch deals 32 streams to
the callbacks of futures, so a step has more buckets than that. Callbacks are what a step has that is not timed.
"""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

JOB = Path(__file__).resolve().parents[2] / "gpu_standin" / "jobs" / "endings.py"
BUCKETS, ROUNDS = 40, 4
"""In each round every one of those streams hangs, so that a few tell; one takes 20 to 50 s."""
KILLED = -9


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def survivor(plan: str) -> dict[str, Any]:
    """What rank 0 of two saw of a step in which the other was killed."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"NODES": "ab", "BUCKETS": str(BUCKETS), "PYTHONPATH": str(JOB.parents[2])}
    words = [sys.executable, str(JOB), "kill", plan, "600", "900", "1"]
    own = [os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    ranks = [subprocess.Popen(words, env=each, stdout=subprocess.PIPE, text=True) for each in own]
    try:
        output, _ = ranks[0].communicate(timeout=240)
        ranks[1].communicate(timeout=60)
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [0, KILLED]
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("plan", ["flat", "hierarchical"])
def test_no_step_is_taken_silently_on_what_was_not_averaged(plan: str) -> None:
    for _ in range(ROUNDS):
        found = survivor(plan)
        assert "rank 1 of 2 is missing" in found["error"]
        assert not found["timed"]
        assert found["stepped"] == found["ends_in"] or any(map(math.isnan, found["weights"]))
