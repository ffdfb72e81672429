"""The hook over two network cards of each node: the bits of one, and training goes on when a card dies."""

import re
import subprocess
import sys

import pytest

from gradwire.bench.emulation.cluster import EmulatedCluster

pytestmark = [pytest.mark.netns, pytest.mark.slow]

HOOK = """
import logging
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import gradwire

logging.basicConfig(level=logging.WARNING, format="%(message)s")
dist.init_process_group("gloo")
torch.manual_seed(0)
inner = torch.nn.Linear(1024, 512)
model = DistributedDataParallel(inner)
state = gradwire.HookState(model)
model.register_comm_hook(state, gradwire.comm_hook)
for step in range(12):
    torch.manual_seed(10 * step + dist.get_rank())
    data = torch.randn(8, 1024)
    own = torch.autograd.grad(inner(data).square().sum(), list(inner.parameters()))
    expected = [gradient / 2 for gradient in own]
    for gradient in expected:
        dist.all_reduce(gradient)
    model.zero_grad()
    model(data).square().sum().backward()
    for parameter, gradient in zip(inner.parameters(), expected, strict=True):
        assert parameter.grad.view(torch.uint8).equal(gradient.view(torch.uint8))
    print("step", step, flush=True)
print(next(line for line in state.report().links if line.startswith("network cards")))
dist.barrier()
dist.destroy_process_group()
"""


def test_both_cards_carry_by_their_rates_and_one_that_dies_is_left_out() -> None:
    killed: list[str] = []

    def on_line(rank: int, line: str) -> None:
        if rank == 1 and line == "step 5" and not killed:
            killed.append(line)
            subprocess.run([*cluster.enter(1), "ip", "link", "set", "eth1", "down"], check=True)

    environment = {"GRADWIRE_NICS": "eth0,eth1"}  # a trial on a busy machine may find gloo's one as fast
    with EmulatedCluster([1, 1], nic="30mbit+10mbit") as cluster:
        result = cluster.run(
            [sys.executable, "-c", HOOK], timeout_seconds=240, environment=environment, on_line=on_line
        )
    result.check()
    for output, host in zip(result.output, ("10.78.0.1", "10.78.0.2"), strict=True):
        lines = output.splitlines()
        assert [line for line in lines if line.startswith("step")] == [f"step {step}" for step in range(12)]
        assert sum(f"the network card eth1 ({host}) is left out: " in line for line in lines) == 1
        carried = re.search(r"eth0 sent ([\d.]+) MB.*; eth1 sent ([\d.]+) MB.* \(left out: ", output)
        assert carried is not None, output
        # 2.1 MB a step: about half of the steps over both cards, the rest over the first one.
        fast, slow = map(float, carried.groups())
        assert 0.5 < slow < fast and fast + slow > 12 * 2.0
