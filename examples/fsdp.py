"""FSDP2 and HSDP on the backend "gradwire": there is no hook to register, so the process group is what changes.

    torchrun --standalone --nproc-per-node 4 examples/fsdp.py           # HSDP: sharded in pairs, replicated twice
    torchrun --standalone --nproc-per-node 4 examples/fsdp.py --shard 4 # FSDP2: sharded over all ranks

Exact: the backend compresses nothing. Inside a node all_gather and reduce_scatter go through shared memory; the
all_reduce between replicas follows gradwire's plan. Give --shard the ranks of a node, so that shards never leave it.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire  # noqa: F401  # the name "gradwire"; torch finds it by itself where gradwire is installed


def build(device: str) -> nn.Sequential:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)


def train(model: nn.Module, steps: int, average: bool, device: str) -> None:
    """Trains on data that every rank draws for itself; `average` is what plain data parallelism does by hand."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(32, 64, generator=generator).to(device)).square().mean().backward()
        for parameter in model.parameters() if average else ():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()


def main() -> None:
    """Trains sharded and whole, and compares the weights."""
    parser = argparse.ArgumentParser(description='FSDP2 and HSDP on the backend "gradwire".')
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--shard", type=int, default=2, help="ranks that a parameter is sharded over")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()

    if options.device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("gradwire")
    replicas = dist.get_world_size() // options.shard
    mesh = init_device_mesh(options.device, (replicas, options.shard), mesh_dim_names=("replicate", "shard"))
    mesh = mesh if replicas > 1 else mesh["shard"]
    sharded = build(options.device)
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    train(sharded, options.steps, average=False, device=options.device)

    whole = build(options.device)
    train(whole, options.steps, average=True, device=options.device)
    for parameter, reference in zip(sharded.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), reference)
    if dist.get_rank() == 0:
        local = sum(parameter.to_local().numel() for parameter in sharded.parameters())
        print(f"{local} of {sum(p.numel() for p in whole.parameters())} parameters on rank 0, {replicas} replicas")
        print("the same weights as with whole models, up to rounding")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
