"""The tasks that are trained: a small CNN on Fashion-MNIST with SGD, and a byte-level transformer with AdamW.

Fashion-MNIST comes from Debian's package `dataset-fashion-mnist`, unpacked into a cache folder without root.
"""

import gzip
import math
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gradwire.bench.train.model import ByteTransformer, loss_in_nats
from gradwire.bench.train.text import batch_at, library_text, split_text

CACHE = Path("~/.cache/gradwire/fashion-mnist").expanduser()
INSTALLED = Path("/usr/share/datasets/fashion-mnist")
"""Folder of the package's files, below the root of the file system or the folder that it was unpacked into."""
PACKAGE = "dataset-fashion-mnist"


def data_folder(cache: Path = CACHE) -> Path:
    """Returns the folder of the four IDX files; fetches and unpacks the package if it is not there yet.

    Args:
        cache: Folder that the package is unpacked into.

    Raises:
        RuntimeError: There is no apt here, or it cannot fetch the package; the message says what to do instead.
    """
    unpacked = cache / INSTALLED.relative_to("/")
    for folder in (INSTALLED, unpacked):
        if folder.is_dir():
            return folder
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise RuntimeError(
                f"Fashion-MNIST is not here and `{tool}` is missing: put the four .gz files of Zalando "
                f"Research's fashion-mnist into {unpacked}, or run where Debian's packages are"
            )
    cache.mkdir(parents=True, exist_ok=True)
    _run(["apt-get", "download", PACKAGE], cache)
    package = next(cache.glob(f"{PACKAGE}_*.deb"))
    _run(["dpkg-deb", "-x", package.name, "."], cache)
    package.unlink()
    return unpacked


def _run(command: list[str], folder: Path) -> None:
    ended = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(
            f"`{' '.join(command)}` failed: {ended.stderr.strip()[-400:]}; refresh the lists with "
            "`apt-get update`, or install the package"
        )


def read_idx(file: Path) -> torch.Tensor:
    """Returns the tensor of a gzipped IDX file of bytes: uint8.

    Raises:
        ValueError: The file is no IDX file of bytes.

    Source: LeCun, Cortes, Burges, The MNIST database, section "File formats": two zero bytes, the type (8: unsigned
        byte), the number of dimensions, each length as a big-endian 32-bit integer, the data.
    """
    raw = gzip.decompress(file.read_bytes())
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise ValueError(f"`file` {file} is no IDX file of bytes: it begins with {raw[:3]!r}")
    header = 4 + 4 * raw[3]
    shape = tuple(np.frombuffer(raw, ">u4", count=raw[3], offset=4).tolist())
    return torch.from_numpy(np.frombuffer(bytearray(raw), np.uint8, offset=header)).view(shape)


def load_images(part: str, folder: Path | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (images, labels) of Fashion-MNIST: float32 (n, 1, 28, 28) around zero, int64 (n).

    Args:
        part: `train` (60,000) or `t10k` (10,000).
        folder: Folder with the files; None fetches them if necessary.

    Source: Xiao, Rasul, Vollgraf, Fashion-MNIST, 2017.
    """
    folder = folder or data_folder()
    images = read_idx(folder / f"{part}-images-idx3-ubyte.gz").float().div_(255.0)
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz").long()
    # Mean and deviation of the training pixels, so that both parts are scaled alike.
    return images.sub_(0.286).div_(0.353).unsqueeze(1), labels


RANKS = 4
EVALUATION_BATCH = 250
SEED_STRIDE = 1_000_000
"""Distance between the batch numbers of two seeds of the text task: more than any run has steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """Describes a task for tables and pictures."""

    name: str
    title: str
    quality: str
    """Name of the measured quality, with its unit."""
    higher_is_better: bool
    tolerance: float
    """Distance from plain DDP's mean quality that still counts as its quality, in the unit of the quality."""
    steps: int
    optimizer: str


class Task(Protocol):
    """Defines a training that every rank of a job can take part in: data, model, optimizer, loss and score."""

    facts: TaskFacts

    def load(self) -> None:
        """Reads the data, so that forked ranks share it."""

    def model(self, seed: int) -> nn.Module:
        """Returns a new model, the same on every rank for the same seed."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Returns the task's own optimizer for these parameters."""

    def loss(self, model: nn.Module, step: int, rank: int, seed: int) -> Tensor:
        """Returns the loss of a rank's batch of a step: a scalar tensor with a graph."""

    def score(self, model: nn.Module, rank: int) -> Tensor:
        """Scores a model on a rank's share of the held-out data.

        Returns:
            (sum, count), shape (2,), float64; the quality is the ranks' sums over their counts.
        """


class BatchedTask(Task, Protocol):
    """Defines a task whose batches can be concatenated, so that one rank can stand for several."""

    def loss(self, model: nn.Module, step: int, rank: int, seed: int) -> Tensor:
        """Returns the loss of a rank's batch of a step: a scalar tensor with a graph."""
        return self.loss_of(model, *self.batch_of(step, rank, seed))

    def batch_of(self, step: int, rank: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns a rank's batch of a step: (inputs, targets), a row for each sample."""

    def loss_of(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss of a batch: a scalar tensor with a graph."""


def share_of_peak(step: int, steps: int) -> float:
    """Returns the learning rate over its peak: a linear rise over a twentieth of the steps, then half a cosine."""
    rise = max(1, steps // 20)
    return min((step + 1) / rise, 0.5 + 0.5 * math.cos(math.pi * step / steps))


def schedules_of(optimizers: Iterable[Optimizer], steps: int) -> list[LambdaLR]:
    """Returns a schedule of `share_of_peak` for each optimizer; the caller steps it once after each update."""
    return [LambdaLR(each, lambda step: share_of_peak(step, steps)) for each in optimizers]


def marks_of(steps: int, shares: Iterable[float]) -> list[int]:
    """Returns the numbers of the steps after which the quality is measured, ascending.

    Args:
        steps: Number of steps of the run.
        shares: Fractions of the run, 0 to 1.
    """
    return sorted({max(1, round(steps * share)) for share in shares})


@torch.no_grad()
def quality_of_ranks(task: Task, model: nn.Module, rank: int) -> float:
    """Returns the quality of the ranks' models, each on its share of the held-out data; all ranks have to call it.

    Args:
        task: Task with its data loaded.
        model: Model of this rank, wrapped in DDP or not.
        rank: Number of this rank.
    """
    total = task.score(getattr(model, "module", model), rank)
    dist.all_reduce(total)
    return float(total[0] / total[1])


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Describes the CNN of the image task: the channels of its two convolutions, and the width of its dense layer."""

    first: int
    second: int
    width: int
    title: str


IMAGE_SIZES = {"0.1M": ImageSize(16, 32, 64, "106 k"), "5M": ImageSize(32, 64, 1600, "5 M")}
"""Approximate number of parameters -> shape; exactly they are 105,866 and 5,054,026."""


class SmallCnn(nn.Sequential):
    """Classifies images with two convolutions and two dense layers."""

    def __init__(self, seed: int, size: ImageSize = IMAGE_SIZES["0.1M"]) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__(
                nn.Conv2d(1, size.first, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(size.first, size.second, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(size.second * 7 * 7, size.width),
                nn.ReLU(),
                nn.Linear(size.width, 10),
            )


@dataclass
class FashionTask(BatchedTask):
    """Trains the CNN on Fashion-MNIST under SGD with momentum 0.9; the quality is the test accuracy.

    Attributes:
        epochs: Passes over the training images.
        batch: Number of images per rank and step.
        ranks: Number of ranks among which the images are divided.
        size: Key of `IMAGE_SIZES`.
        facts: Description of the task.
    """

    epochs: int = 4
    batch: int = 32
    ranks: int = RANKS
    size: str = "0.1M"
    facts: TaskFacts = field(init=False)

    def __post_init__(self) -> None:
        self._steps_of_epoch = 60_000 // (self.batch * self.ranks)
        self.facts = TaskFacts(
            name="fashion",
            title=f"CNN of {IMAGE_SIZES[self.size].title} parameters on Fashion-MNIST, SGD with momentum 0.9",
            quality="test accuracy, %",
            higher_is_better=True,
            tolerance=0.5,
            steps=self.epochs * self._steps_of_epoch,
            optimizer="sgd",
        )

    def load(self) -> None:
        """Reads the images and labels, so that forked ranks share them."""
        _ = self._train, self._test

    def model(self, seed: int) -> nn.Module:
        """Returns a new CNN, the same on every rank for the same seed."""
        return SmallCnn(seed, IMAGE_SIZES[self.size])

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Returns SGD with momentum 0.9 and weight decay."""
        return SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)

    def batch_of(self, step: int, rank: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns a rank's images and labels of a step."""
        epoch, number = divmod(step, self._steps_of_epoch)
        first = (number * self.ranks + rank) * self.batch
        chosen = _shuffled(seed, epoch)[first : first + self.batch]
        images, labels = self._train
        return images[chosen], labels[chosen]

    def loss_of(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy of a batch: a scalar tensor with a graph."""
        return functional.cross_entropy(model(inputs), targets)

    def score(self, model: nn.Module, rank: int) -> Tensor:
        """Returns (100 x correct answers, number of images) of a rank's share of the test images, float64."""
        images, labels = (part[rank :: self.ranks] for part in self._test)
        right = 0
        for first in range(0, len(labels), EVALUATION_BATCH):
            some = slice(first, first + EVALUATION_BATCH)
            right += int((model(images[some]).argmax(1) == labels[some]).sum())
        return torch.tensor([100.0 * right, len(labels)], dtype=torch.float64)

    @cached_property
    def _train(self) -> tuple[Tensor, Tensor]:
        return load_images("train")

    @cached_property
    def _test(self) -> tuple[Tensor, Tensor]:
        return load_images("t10k")


@lru_cache(maxsize=1)
def _shuffled(seed: int, epoch: int) -> Tensor:
    """Returns the indices of the training images in the order of an epoch, the same on all ranks."""
    return torch.randperm(60_000, generator=torch.Generator().manual_seed(1000 * seed + epoch))


@dataclass(frozen=True, slots=True)
class TextSize:
    """Describes the transformer of the text task."""

    width: int
    layers: int
    heads: int
    lr: float
    """Learning rate of AdamW if it trains all parameters."""


TEXT_SIZES = {"0.5M": TextSize(128, 2, 4, 3e-3), "10M": TextSize(320, 8, 5, 1e-3)}
"""By the number of parameters: 470,528 and 10,048,640.

With 3e-3 trainings of 10 M parameters end up to 0.3 bits from each other for a difference of one rounding. Source of
1e-3: Karpathy, nanoGPT, config/train_shakespeare_char.py, of 10.7 M parameters.
"""


@dataclass
class TextTask(BatchedTask):
    """Bits per byte of the transformer under AdamW; 4 sequences of 64 bytes a rank and step."""

    batch: int = 4
    context: int = 64
    validation_batches: int = 6
    size: str = "0.5M"
    facts: TaskFacts = field(init=False)

    def __post_init__(self) -> None:
        self.facts = TaskFacts(
            name="text",
            title=f"byte-level transformer of {self.size[:-1]} M parameters on the standard library's source, AdamW",
            quality="bits per byte on held-out text",
            higher_is_better=False,
            tolerance=0.06,
            steps=800,
            optimizer="adamw",
        )

    def load(self) -> None:
        """Reads the text, so that forked ranks share it."""
        _ = self._text

    def model(self, seed: int) -> nn.Module:
        """Returns a new transformer, the same on every rank for the same seed."""
        size = TEXT_SIZES[self.size]
        return ByteTransformer(context=self.context, width=size.width, layers=size.layers, heads=size.heads, seed=seed)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Returns AdamW with the learning rate of the size."""
        return AdamW(parameters, lr=TEXT_SIZES[self.size].lr, betas=(0.9, 0.95))

    def batch_of(self, step: int, rank: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns a rank's batch of a step: bytes and those that follow, as `batch_at` draws them."""
        return batch_at(self._text[0], step + SEED_STRIDE * seed, rank, batch=self.batch, context=self.context)

    def loss_of(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss of a batch in nats a byte: a scalar tensor with a graph."""
        return loss_in_nats(model, inputs, targets)

    def score(self, model: nn.Module, rank: int) -> Tensor:
        """Returns (sum of the batches' losses in bits a byte, number of batches) on held-out text, float64."""
        total = 0.0
        for number in range(self.validation_batches):
            inputs, targets = batch_at(self._text[1], number, rank, batch=8, context=self.context)
            total += loss_in_nats(model, inputs, targets).item() / math.log(2)
        return torch.tensor([total, self.validation_batches], dtype=torch.float64)

    @cached_property
    def _text(self) -> tuple[Tensor, Tensor]:
        return split_text(library_text())


TASKS: dict[str, Callable[[], BatchedTask]] = {"fashion": FashionTask, "text": TextTask}
