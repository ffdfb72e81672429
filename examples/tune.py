"""Tuning: small buckets that gradwire joins, cut where the gradients of this model really arrive.

    torchrun --standalone --nproc-per-node 2 examples/tune.py
    torchrun --standalone --nproc-per-node 2 examples/tune.py --profile cuts.json

The first probes the links and computes the cuts once (`fusion="auto"`). The second keeps them in a file (`cuts.json`):
a second run of it takes them from there.
Each process here calls itself a node of its own.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import gradwire


def main() -> None:
    """Trains, and prints how many transfers a step makes before and after the cuts were chosen."""
    parser = argparse.ArgumentParser(description="Tuning with gradwire.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--profile", help="keep the cuts in this file")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())]
    tuning = {"fusion": f"{options.profile or 'auto'}:1"}
    # DDP's buckets are 0.25 MiB; gradwire joins them into transfers of up to 1 MiB until it knows better.
    model, state = gradwire.wrap(nn.Sequential(*layers), base_bucket_mb=0.25, hostname=f"node{rank}", **tuning)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = [0]
    for _ in range(options.steps):
        optimizer.zero_grad()
        model(torch.randn(32, 256)).square().mean().backward()
        optimizer.step()
        counts.append(state.report().buckets)

    if rank == 0:
        report = state.report()
        print(*report.links, *report.plans, sep="\n")
        print(f"transfers in step 3: {counts[3] - counts[2]}; in the last step: {counts[-1] - counts[-2]}")
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
