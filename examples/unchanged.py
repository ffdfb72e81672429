"""Plain DDP: this script knows nothing of gradwire. One variable in front of the command gives every model its hook.

    GRADWIRE_HOOK=none torchrun --standalone --nproc-per-node 2 examples/unchanged.py   # exact
    GRADWIRE_HOOK=int8 torchrun --standalone --nproc-per-node 2 examples/unchanged.py   # int8 between the nodes

The other GRADWIRE_ variables are its options. A hook that a script registers itself takes its place.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Trains on data that every rank draws for itself."""
    parser = argparse.ArgumentParser(description="Plain DDP.")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    teacher, loss = torch.randn(64, 10), torch.zeros(())
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(options.steps):
        inputs = torch.randn(32, 64, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), (inputs @ teacher).argmax(dim=1))
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f} after {options.steps} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
