"""A rank is lost in the middle of a training, and the others go on without a restart.

    torchrun --standalone --nproc-per-node 4 examples/elastic.py

The last rank ends itself without a word after a third of the steps, as a machine without power does. (It ends with
status 0, because torchrun would end all ranks of its node otherwise.) Each process here calls itself a node of its own.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradwire


def main() -> None:
    """Trains, loses a rank, goes on, and compares the survivors' weights."""
    parser = argparse.ArgumentParser(description="A training that survives a lost rank.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4096, 64), torch.randint(10, (4096,)))
    layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(options.device)
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(DataLoader(data, 32, sampler=DistributedSampler(data, size, rank)))

    def deal_out(old: object, view: Any) -> None:
        """The ranks have changed: this one takes its share of the data anew."""
        nonlocal batches
        batches = iter(DataLoader(data, 32, sampler=DistributedSampler(data, view.size, view.rank)))
        if view.rank == 0:
            print(f"lost {', '.join(view.lost)}; {view.size} ranks go on", flush=True)

    state = gradwire.attach(
        model, elastic=True, extra_state=[optimizer], on_membership_change=deal_out, hostname=f"node{rank}"
    )
    while state.steps < options.steps:
        if rank == size - 1 and state.steps == options.steps // 3:
            os._exit(0)
        inputs, labels = next(batches)
        optimizer.zero_grad()
        outputs = model(inputs.to(options.device))
        nn.functional.cross_entropy(outputs, labels.to(options.device)).backward()
        optimizer.step()

    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    together = mine.clone()
    dist.all_reduce(together, group=model.process_group)  # the group that follows the ranks
    assert torch.equal(together, state.view.size * mine)
    if state.view.rank == 0:
        print(
            f"{state.view.size} of {size} ranks have done {state.steps} steps: the same weights, bit for bit",
            flush=True,
        )
    state.close()


if __name__ == "__main__":
    main()
