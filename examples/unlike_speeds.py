"""Ranks of unlike speed: each takes as many samples as it is fast, and gradients are averaged over samples.

    torchrun --standalone --nproc-per-node 2 examples/unlike_speeds.py

Rank 1 is made slow: it rests for 2 ms a sample. Equal shares make the other wait; by speed both are ready at once.
"""

import argparse
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import gradwire

REST_SECONDS = (1e-3, 2e-3)
"""Of each rank, a sample: it stands for the work of a larger model on a slower machine."""
STEPS_MEASURED = 4  # between two changes of the shares


def shares_of(total: int, speeds: Sequence[float]) -> list[int]:
    """Returns the samples of each rank: at least one, and each further one for the rank that is done with it first."""
    sizes = [1] * len(speeds)
    for _ in range(total - len(speeds)):
        sizes[min(range(len(speeds)), key=lambda rank: (sizes[rank] + 1) / speeds[rank])] += 1
    return sizes


class SpeedBatchSampler(Sampler[list[int]]):
    """Yields this rank's part of each batch; a batch of all ranks holds the same samples whatever the shares."""

    def __init__(self, length: int, batch_size: int) -> None:
        self._length, self._batch_size = length, batch_size
        self.shares = shares_of(batch_size, [1.0] * dist.get_world_size())

    def __len__(self) -> int:
        """Returns the number of batches; the last samples are left out if they fill none."""
        return self._length // self._batch_size

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the indices of this rank's samples, in an order that is the same on all ranks."""
        order = torch.randperm(self._length, generator=torch.Generator().manual_seed(0)).tolist()
        for batch in range(len(self)):
            begin = batch * self._batch_size + sum(self.shares[: dist.get_rank()])
            yield order[begin : begin + self.shares[dist.get_rank()]]

    def follow(self, samples: int, seconds: float) -> None:
        """Changes the shares from the next batch on, by what each rank has computed; all call it in the same step."""
        speeds = torch.zeros(dist.get_world_size(), dtype=torch.float64)
        speeds[dist.get_rank()] = samples / seconds
        dist.all_reduce(speeds)
        self.shares = shares_of(self._batch_size, speeds.tolist())


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
    sampler = SpeedBatchSampler(len(dataset), batch_size=24)
    before, samples, seconds = sampler.shares, 0, 0.0
    for step, (features, labels) in enumerate(DataLoader(dataset, batch_sampler=sampler), 1):
        state.samples = len(labels)
        began = time.perf_counter()
        time.sleep(REST_SECONDS[rank] * len(labels))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), labels)
        samples, seconds = samples + len(labels), seconds + time.perf_counter() - began
        loss.backward()  # waits for the other ranks, so it is not timed
        optimizer.step()
        if step % STEPS_MEASURED == 0:
            sampler.follow(samples, seconds)
            samples, seconds = 0, 0.0

    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    dist.broadcast(other := mine.clone(), 0)
    assert torch.equal(mine, other)
    if rank == 0:
        print(f"samples of each rank in a batch: {before} at first, {sampler.shares} in the end")
        print("the same weights on both ranks, bit for bit", flush=True)
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
