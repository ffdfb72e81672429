"""What the trainings train: a convolution, batch norm, a transformer's block and linear layers, on images of noise."""

import hashlib
from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from gradwire.bench.train.model import TransformerBlock

WIDTH, CLASSES, BATCH = 32, 10, 4


class Net(nn.Module):
    """Images (batch, 1, 8, 8) to scores (batch, CLASSES).

    Attributes:
        sharded: What FSDP2 gathers by itself.

    Args:
        skips: Leaves out a layer in every second step, whose parameters have no gradient then.
        normed: Has batch norm, whose running means DDP broadcasts; units that train by themselves have means of
            their own.
    """

    def __init__(self, *, skips: bool = False, normed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.patches = nn.Conv2d(1, WIDTH, 3, stride=2, padding=1)
        self.norm: nn.Module = nn.BatchNorm2d(WIDTH) if normed else nn.Identity()
        self.block = TransformerBlock(WIDTH, 2)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.sharded: tuple[str, ...] = ("block",)
        self.skips = skips
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) -> (batch, CLASSES)."""
        tokens = self.norm(self.patches(images)).flatten(2).transpose(1, 2)
        mean = self.block(tokens).mean(1)
        if not (self.skips and self.calls % 2):
            mean = mean + self.spare(mean)
        self.calls += 1
        scores: Tensor = self.head(mean)
        return scores


class Layers(nn.Module):
    """The same in a fifth of the kernels, with parameters of the same sizes: linear layers alone.

    Many schedules want many steps, and what is delayed in them is gradwire's, not attention. The arguments are Net's.
    """

    def __init__(self, *, skips: bool = False, normed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.patches = nn.Linear(64, WIDTH)
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if normed else nn.Identity()
        self.block = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.sharded = ("block.0", "block.1", "spare")  # one is gathered while the sum of another is under way
        self.skips = skips
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) -> (batch, CLASSES)."""
        hidden = self.block(self.norm(self.patches(images.flatten(1))).tanh()).tanh()  # no step grows beyond bounds
        if not (self.skips and self.calls % 2):
            hidden = hidden + self.spare(hidden)
        self.calls += 1
        scores: Tensor = self.head(hidden)
        return scores


NETS: dict[str, Callable[..., Net | Layers]] = {"block": Net, "layers": Layers}


@cache
def batch_of(step: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A rank's images and labels, made once; which of four corners is brighter than noise says the class."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    labels = torch.randint(4, (BATCH,), generator=generator)
    images = torch.randn(BATCH, 1, 8, 8, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[0, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1.5
    return images.to(device), labels.to(device)


def loss_of(model: nn.Module, step: int, rank: int, device: torch.device) -> Tensor:
    """This rank's loss in one step."""
    images, labels = batch_of(step, rank, device)
    return functional.cross_entropy(model(images), labels)


def digest_of(tensors: Iterable[Tensor]) -> str:
    """The bits of some tensors; of those that are sharded, of the part that lies here."""
    digest = hashlib.sha256()
    for tensor in tensors:
        here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(here.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
