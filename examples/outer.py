"""Local training on a very slow link: workers train by themselves and exchange parameters every few steps.

    torchrun --standalone --nproc-per-node 2 examples/outer.py

Each process here calls itself a node of its own, so each is a worker. At the end both hold the same model.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import gradwire


def main() -> None:
    """Trains two workers on data of their own, and says what they exchanged."""
    parser = argparse.ArgumentParser(description="Workers that train by themselves and exchange parameters.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, help="steps between two exchanges of the same parameter; else chosen")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")

    torch.manual_seed(0)
    teacher = torch.randn(64, 10)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = gradwire.Outer(model, optimizer, every=options.every, hostname=f"node{dist.get_rank()}")
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(options.steps):
        inputs = torch.randn(32, 64, generator=generator)
        labels = (inputs @ teacher).argmax(dim=1)
        optimizer.zero_grad()
        outputs = outer.model(inputs.to(options.device))
        nn.functional.cross_entropy(outputs, labels.to(options.device)).backward()
        optimizer.step()  # drives the exchanges, too

    outer.synchronize()  # before you judge, save or export the model
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    assert torch.equal(mine, first)
    report = outer.report()
    if dist.get_rank() == 0:
        bits = report.bits_per_parameter_and_step
        print(f"exchanged every {outer.settings.every} steps: {report.chosen}")
        print(
            f"{report.exchanges} exchanges in {report.steps} steps, {bits:.2f} bits a parameter and step; DDP sends 32"
        )
        print(f"the same model on all {len(report.workers)} workers, bit for bit", flush=True)
    outer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
