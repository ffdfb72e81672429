"""Trains a tiny model on four ranks under the methods that are named; prints the runs as one line of JSON."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire.bench.studies.convergence.tasks import TaskFacts
from gradwire.bench.studies.convergence.training import METHODS, SHARDED_METHODS, train


@dataclass
class Line:
    """Fits a line; the quality is the squared error."""

    optimizer_name: str
    steps: int = 20

    def __post_init__(self) -> None:
        self.facts = TaskFacts(
            name="line",
            title="a line",
            quality="squared error",
            higher_is_better=False,
            tolerance=0.1,
            steps=self.steps,
            optimizer=self.optimizer_name,
        )

    def load(self) -> None:
        pass

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Linear(64, 32)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(parameters, lr=0.5, momentum=0.5)
        return torch.optim.AdamW(parameters, lr=0.02, betas=(0.8, 0.9))

    def loss(self, model: nn.Module, step: int, rank: int, seed: int) -> Tensor:
        inputs = torch.randn(64, 64, generator=torch.Generator().manual_seed(100 * step + 10 * seed + rank))
        return functional.mse_loss(model(inputs), inputs[:, :32] * 2.0)

    def score(self, model: nn.Module, rank: int) -> Tensor:
        inputs = torch.randn(64, 64, generator=torch.Generator().manual_seed(rank))
        return torch.tensor([functional.mse_loss(model(inputs), inputs[:, :32] * 2.0).item(), 1.0], dtype=torch.float64)


if __name__ == "__main__":
    runs = [
        asdict(train(Line(optimizer), method, 1))
        for optimizer, methods in METHODS.items()
        for method in (*methods, *SHARDED_METHODS)
        if f"{optimizer}/{method.name}" in sys.argv[1:]
    ]
    print(json.dumps(runs), flush=True)
