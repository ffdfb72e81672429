"""A link that is down for three seconds ends nothing: training goes on, to the weights of an undisturbed run."""

import hashlib
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.bench.emulation.cluster import INTERFACE, EmulatedCluster
from gradwire.bench.emulation.fork import ForkedRank, run_forked

STEPS, DOWN_BEFORE, DOWN_SECONDS = 8, 3, 3.0
WAIT_SECONDS = 60.0


def train(place: ForkedRank, *, disturbed: bool) -> str:
    """Some steps; a digest of the weights."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)), bucket_cap_mb=0.02)
    state = gradwire.HookState(model)
    model.register_comm_hook(state, gradwire.comm_hook)
    state_of_link = Path("/sys/class/net", place.interface, "operstate")
    for step in range(STEPS):
        if disturbed and step == DOWN_BEFORE and place.node == 1:
            print("cut me off", flush=True)
            deadline = time.monotonic() + WAIT_SECONDS
            while state_of_link.read_text().strip() == "up":
                assert time.monotonic() < deadline, "the link was not cut"
                time.sleep(0.01)
        rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + place.rank))
        model.zero_grad()
        model(rows).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
    state.close()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(weights).hexdigest()


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    """One of two ranks."""
    torch.set_num_threads(1)
    place.connect()
    print("weights", *(train(place, disturbed=disturbed) for disturbed in (False, True)), flush=True)
    place.leave()
    return 0


@pytest.mark.netns
def test_training_goes_on_when_a_link_returns() -> None:
    with EmulatedCluster([1, 1]) as cluster:

        def cut_off() -> None:
            for state, seconds in (("down", DOWN_SECONDS), ("up", 0.0)):
                subprocess.run([*cluster.enter(1), "ip", "link", "set", INTERFACE, state], check=True)
                time.sleep(seconds)

        cutting = threading.Thread(target=cut_off)

        def listen(node: int, line: str) -> None:
            if line == "cut me off":
                cutting.start()

        run = run_forked(
            cluster,
            __file__,
            [],
            nodes=[1, 1],
            timeout_seconds=120,
            on_line=listen,
        )
        run.check()
        cutting.join()
    digests = {word for text in run.output for line in text.splitlines() if "weights" in line for word in line.split()}
    assert len(digests - {"weights"}) == 1, run.output
