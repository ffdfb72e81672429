"""Trains a little with the default look at the links and without it, and prints the bits; a job of test_quick_probe."""

import hashlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.bench.emulation.fork import ForkedRank


def trained(rate: str | None) -> tuple[str, str]:
    """What is known of links and plans after two steps, and the digest of the weights."""
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(1 << 8, 1 << 8))
    state = gradwire.HookState(model, nic_bytes_per_second=rate)
    model.register_comm_hook(state, gradwire.comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 1 << 8, generator=generator)).square().mean().backward()
        optimizer.step()
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
    text = state.report().full()
    state.close()
    return text, digest


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    torch.set_num_threads(1)
    place.connect()
    for name, rate in (("default", None), ("not measured", "assume")):
        text, digest = trained(rate)
        owners = "owners by their links" if "owners by their links" in text else "equal owners"
        links = "probed" if "(probed)" in text else "not probed"
        print(f"{name}: {owners}, {links}; bits {digest}", flush=True)
    place.leave()
    return 0
