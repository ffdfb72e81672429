"""Ranks of unlike speed: each takes as many samples as it is fast, and gradients are averaged over samples.

    torchrun --standalone --nproc-per-node 2 examples/unlike_speeds.py

Rank 1 is made slow: it rests for 2 ms a sample. Equal shares make the other wait; by speed both are ready at once.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradwire

REST_SECONDS = (1e-3, 2e-3)
"""Of each rank, a sample: it stands for the work of a larger model on a slower machine."""


def main() -> None:
    """Trains, and prints the shares at the beginning and at the end."""
    parser = argparse.ArgumentParser(description="Shares by speed.")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    inputs = torch.randn(24 * options.steps, 64)
    dataset = TensorDataset(inputs, (inputs @ torch.randn(64, 10)).argmax(dim=1))
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    state = gradwire.HookState(model, reduction="samples")
    model.register_comm_hook(state, gradwire.comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = gradwire.data.SpeedBatchSampler(dataset, batch_size=24, state=state)  # of both ranks together
    before = sampler.shares()
    for features, labels in DataLoader(dataset, batch_sampler=sampler):
        state.samples = len(labels)
        time.sleep(REST_SECONDS[rank] * len(labels))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()

    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    other = mine.clone()
    dist.broadcast(other, 0)
    assert torch.equal(mine, other)
    if rank == 0:
        print(f"samples of each rank in a batch: {before} at first, {sampler.shares()} in the end")
        print("the same weights on both ranks, bit for bit", flush=True)
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
