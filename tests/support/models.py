"""Models that several tests train."""

import torch
from torch import Tensor, nn


class Shuffled(nn.Module):
    """Layers that run in another order than that of their declaration, so that DDP's rebuilt buckets differ."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(8))

    def forward(self, rows: Tensor) -> Tensor:
        """(rows, 48) -> (rows, 48)."""
        for number in (3, 0, 6, 1, 7, 4, 2, 5):
            rows = torch.relu(self.layers[number](rows)) + rows
        return rows
