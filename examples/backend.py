"""gradwire as the process group itself, for code without a DDP hook: every all_reduce of torch.distributed uses it.

torchrun --standalone --nproc-per-node 2 examples/backend.py    # --device cuda: on two GPUs
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import gradwire


def average_gradients(model: nn.Module) -> None:
    """What DDP does, by hand: one all_reduce for each parameter."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def main() -> None:
    """Trains without DDP and checks that all ranks hold the same weights in the end."""
    parser = argparse.ArgumentParser(description="gradwire as a process group.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()

    if options.device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("gradwire", pg_options=gradwire.Config(plan="auto"))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(64, 10).to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1 + rank)
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = model(torch.randn(32, 64, generator=generator).to(options.device)).square().mean()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        if rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    gathered = [torch.empty_like(model.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, model.weight.detach())
    if not all(torch.equal(weight, gathered[0]) for weight in gathered):
        raise SystemExit("the ranks ended with different weights")
    if rank == 0:
        print(f"the same weights, bit for bit, on all {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
