"""Trains with a compressor and rules, saves on every rank, resumes, and compares with a run without interruption.

    torchrun --standalone --nproc-per-node 2 examples/compressed_resume.py --folder checkpoints

Only what crosses the network is compressed, so each process here calls itself a node of its own.
"""

import argparse
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

RULES = [
    gradwire.Rule(pattern="head.*"),  # sent exactly
    gradwire.Rule(pattern="embed.*", compressor="fp16"),
]
"""By the names of the model's parameters, the first that matches; all others take `--compressor`."""


def build() -> nn.Sequential:
    """Three layers with names, so that rules can speak of them."""
    layers = {"embed": nn.Linear(64, 256), "relu": nn.ReLU(), "body": nn.Linear(256, 256), "head": nn.Linear(256, 10)}
    return nn.Sequential(OrderedDict(layers))


class Run:
    """A model, its optimizer and its hook."""

    def __init__(self, compressor: str, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = DistributedDataParallel(build().to(device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        node = f"node{dist.get_rank()}"
        self.state = gradwire.HookState(self.model, compressor=compressor, rules=RULES, hostname=node)
        self.model.register_comm_hook(self.state, gradwire.comm_hook)

    def train(self, first: int, last: int) -> list[Tensor]:
        """Takes the steps from `first` to `last` and returns the weights."""
        for step in range(first, last):
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            self.optimizer.zero_grad()
            self.model(torch.randn(32, 64, generator=generator).to(self.device)).square().mean().backward()
            self.optimizer.step()
        return [parameter.detach() for parameter in self.model.parameters()]

    def save(self, file: Path) -> None:
        """Writes this rank's file: residuals differ between ranks, so each saves its own."""
        parts = {"model": self.model.module, "optimizer": self.optimizer, "hook": self.state}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)

    def load(self, file: Path) -> None:
        """Reads what `save` wrote on this rank."""
        saved = torch.load(file, weights_only=True, map_location=self.device)
        self.model.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.state.load_state_dict(saved["hook"])


def main() -> None:
    """Trains twice: in one go, and with a restart in the middle."""
    parser = argparse.ArgumentParser(description="Save and resume with a compressor.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compressor", default="int8")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    options.folder.mkdir(parents=True, exist_ok=True)
    file, half = options.folder / f"rank{dist.get_rank()}.pt", options.steps // 2

    whole = Run(options.compressor, options.device).train(0, options.steps)
    before = Run(options.compressor, options.device)
    before.train(0, half)
    before.save(file)
    after = Run(options.compressor, options.device)
    after.load(file)
    resumed = after.train(half, options.steps)
    if not all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True)):
        raise SystemExit("the resumed run ended elsewhere")
    if dist.get_rank() == 0:
        print("the resumed run ends with the same weights, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
