"""Accelerate: one line after `prepare`, and a checkpoint from which training goes on bit for bit.

torchrun --standalone --nproc-per-node 2 examples/with_accelerate.py
"""

import argparse

import torch
from accelerate import Accelerator
from torch import Tensor, nn

import gradwire.accelerate


class Run:
    """A model and an optimizer that Accelerate has prepared, with gradwire's hook."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.accelerator = Accelerator(cpu=True)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        # int8 is for what crosses between nodes; here, on one, `plan="flat"` has it work between all ranks.
        self.state = gradwire.accelerate.attach(self.accelerator, self.model, compressor="int8", plan="flat")

    def train(self, first: int, last: int) -> list[Tensor]:
        """Takes the steps from `first` to `last` and returns the weights."""
        for step in range(first, last):
            generator = torch.Generator().manual_seed(1000 * step + self.accelerator.process_index)
            self.optimizer.zero_grad()
            self.accelerator.backward(self.model(torch.randn(32, 64, generator=generator)).square().mean())
            self.optimizer.step()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def main() -> None:
    """Trains and saves in the middle, then trains from there once more."""
    parser = argparse.ArgumentParser(description="gradwire in Accelerate.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default="accelerate-checkpoint")
    options = parser.parse_args()
    half = options.steps // 2

    run = Run()
    run.train(0, half)
    run.accelerator.save_state(options.folder)
    whole = run.train(half, options.steps)
    run.accelerator.print(run.state.report())

    again = Run()
    again.accelerator.load_state(options.folder)
    resumed = again.train(half, options.steps)
    if not all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True)):
        raise SystemExit("the resumed run ended elsewhere")
    again.accelerator.print("the resumed run ends with the same weights, bit for bit")
    again.accelerator.end_training()


if __name__ == "__main__":
    main()
