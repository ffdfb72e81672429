"""The hook over an emulated ocean: the bits of one machine, over as many connections as the round trip asks for."""

import sys

import pytest

from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.paths import PathOptions

pytestmark = [pytest.mark.netns, pytest.mark.slow]

HOOK = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import gradwire

dist.init_process_group("gloo")
torch.manual_seed(0)
inner = torch.nn.Linear(1024, 512)
model = DistributedDataParallel(inner)
state = gradwire.HookState(model)
model.register_comm_hook(state, gradwire.comm_hook)
for step in range(3):
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
with open("/proc/net/tcp") as table:
    # Source: proc_pid_net(5): state 01 is established, addresses are in hexadecimal, 4D0A is 10.77 from the right.
    rows = [line.split() for line in table.readlines()[1:]]
print("connections", sum(row[3] == "01" and row[2].split(":")[0].endswith("4D0A") for row in rows))
dist.barrier()
dist.destroy_process_group()
"""


def test_the_hook_opens_connections_over_an_ocean_and_sums_the_bits_of_gloo() -> None:
    with EmulatedCluster([1, 1], nic="100mbit", path=PathOptions(delay="40ms", loss="0.5%")) as cluster:
        result = cluster.run([sys.executable, "-c", HOOK], timeout_seconds=240)
    result.check()
    counts = [int(line.split()[1]) for output in result.output for line in output.splitlines() if "connections" in line]
    # 69 first windows are under way at 100 Mbit/s and 80 ms, and no more than 64 are opened; gloo and the store have
    # some of their own.
    assert len(counts) == 2 and min(counts) >= 64
