"""Reading the hook's report: what this node sent, what plain DDP would have sent, and what would save more.

    torchrun --standalone --nproc-per-node 4 examples/read_report.py

The four processes call themselves two nodes of two, so that there is a network between them to save on.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


def main() -> None:
    """Trains, prints the report, and computes from its fields what a step costs."""
    parser = argparse.ArgumentParser(description="What the report of gradwire's hook says.")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)))
    state = gradwire.HookState(model, hostname=f"node{rank // 2}")
    model.register_comm_hook(state, gradwire.comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(options.steps):
        optimizer.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()

    report = state.report()
    # Rows are phases: what this rank did in each, on which level. `wire_nbytes` is what it sent, `seconds` overlap.
    crossed = sum(row.wire_nbytes for row in report.rows if row.level == "inter_node")
    by_node = torch.tensor([0.0, 0.0], dtype=torch.float64)
    by_node[rank // 2] = crossed
    dist.all_reduce(by_node)
    gradient = 4 * sum(parameter.numel() for parameter in model.parameters())
    if rank == 0:
        print(report)
        print(f"\nthe model has {gradient / 1e6:.3f} MB of gradients in {report.buckets // report.steps} bucket(s)")
        print(f"a node sent    {by_node[0].item() / report.steps / 1e6:.3f} MB a step to the other node")
        print(f"plain DDP sends {2 * (ranks - 1) / ranks * gradient / 1e6:.3f} MB: once around a ring of {ranks} ranks")
        print(f"\n{state.advise('sgd')}")
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
