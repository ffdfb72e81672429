"""HSDP with compressed gradients between replicas, and FSDP2 with few bits between all ranks: `gradwire.fsdp.apply`.

    torchrun --standalone --nproc-per-node 4 examples/fsdp_compressed.py

Each two processes call themselves a node here: what is on one node stays exact.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire


def build(mesh: DeviceMesh, device: str) -> nn.Sequential:
    """The same weights on every rank, each layer sharded over the ranks of `mesh`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, steps: int, device: str) -> float:
    """Trains on data that every rank draws for itself; returns the last loss, averaged over the ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    teacher, loss = torch.randn(64, 10, generator=torch.Generator().manual_seed(0)), torch.zeros(())
    for _ in range(steps):
        inputs = torch.randn(32, 64, generator=generator)
        labels = (inputs @ teacher).argmax(dim=1).to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs.to(device)), labels)
        loss.backward()
        optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main() -> None:
    """Trains exactly, with int8 between replicas, and with int8 between all ranks, and prints the losses."""
    parser = argparse.ArgumentParser(description="FSDP2 and HSDP with compressed collectives.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    nodes = 2
    ranks_per_node = dist.get_world_size() // nodes
    hostname = f"node{dist.get_rank() // ranks_per_node}"

    hybrid = init_device_mesh(options.device, (nodes, ranks_per_node), mesh_dim_names=("replicate", "shard"))
    full = init_device_mesh(options.device, (dist.get_world_size(),), mesh_dim_names=("shard",))
    for name, mesh, settings in (
        ("HSDP, exact", hybrid, {"replicas": hybrid["replicate"]}),
        ("HSDP, int8", hybrid, {"replicas": hybrid["replicate"], "compressor": "int8"}),
        ("FSDP, int8", full, {"shards": "int8", "weights": "int8"}),
    ):
        model = build(mesh["shard"], options.device)
        state = gradwire.fsdp.apply(model, hostname=hostname, **settings)
        loss = train(model, options.steps, options.device)
        if dist.get_rank() == 0:
            print(f"{name}: loss {loss:.3f} after {options.steps} steps", flush=True)
        state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
