"""A small training with gradwire's DDP hook: the two lines that it takes are marked.

torchrun --standalone --nproc-per-node 2 examples/ddp_hook.py                  # --device cuda: on two GPUs
gradwire emulate --nodes 2 --ranks-per-node 2 --nic 200mbit -- python examples/ddp_hook.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


def main() -> None:
    """Trains on data that every rank draws for itself, and prints the hook's report on rank 0."""
    parser = argparse.ArgumentParser(description="A small training with gradwire's DDP hook.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compressor", help="fp16, int8, ...; without it GRADWIRE_COMPRESSOR counts, else exact")
    options = parser.parse_args()
    settings = {"compressor": options.compressor} if options.compressor else {}  # an option wins over its variable

    if options.device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same weights everywhere; DDP would see to it, too
    layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    model = DistributedDataParallel(layers.to(options.device))

    state = gradwire.HookState(model, **settings)  # 1
    model.register_comm_hook(state, gradwire.comm_hook)  # 2

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    teacher = torch.randn(64, 10)
    generator = torch.Generator().manual_seed(1 + rank)
    for step in range(options.steps):
        inputs = torch.randn(32, 64, generator=generator)
        labels = (inputs @ teacher).argmax(dim=1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs.to(options.device)), labels.to(options.device))
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    if rank == 0:
        print(state.report())
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
