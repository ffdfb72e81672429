"""Models of a wanted size in plain torch, and batches for them: what the contenders train on."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire.bench.train.model import TransformerBlock

BATCHES = 4
"""Different batches of a rank; the contenders go round them, so that no compressor sees one gradient over and over."""

_WIDTH, _SAMPLES, _CONTEXT = 256, 4, 32
_CHANNELS, _PIXELS = 128, 8
_OUTPUTS = 32

BatchLoss = Callable[[nn.Module, int], Tensor]
"""(model, number of the batch) -> loss of this rank's batch."""


def _linear(nbytes: float) -> nn.Module:
    layers = max(1, round(nbytes / (4 * _WIDTH * _WIDTH)))
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(_WIDTH, _WIDTH, bias=False), nn.Tanh()]
    return nn.Sequential(*parts, nn.Linear(_WIDTH, _OUTPUTS))


def _cnn(nbytes: float) -> nn.Module:
    layers = max(1, round(nbytes / (4 * 9 * _CHANNELS * _CHANNELS)))
    parts: list[nn.Module] = [nn.Conv2d(3, _CHANNELS, 3, padding=1)]
    for _ in range(layers):
        parts += [nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1, bias=False), nn.GroupNorm(8, _CHANNELS), nn.ReLU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(_CHANNELS, _OUTPUTS))


def _transformer(nbytes: float) -> nn.Module:
    layers = max(1, round(nbytes / (4 * 12 * _WIDTH * _WIDTH)))
    return nn.Sequential(*(TransformerBlock(_WIDTH, 4) for _ in range(layers)), nn.Linear(_WIDTH, _OUTPUTS))


_BUILDERS: dict[str, tuple[Callable[[float], nn.Module], tuple[int, ...]]] = {
    "transformer": (_transformer, (_SAMPLES, _CONTEXT, _WIDTH)),
    "cnn": (_cnn, (_SAMPLES, 3, _PIXELS, _PIXELS)),
    "linear": (_linear, (_SAMPLES, _WIDTH)),
}
MODELS = tuple(_BUILDERS)


def build(name: str, nbytes: float, rank: int) -> tuple[nn.Module, BatchLoss]:
    """A model with about `nbytes` of float32 gradients, the same on all ranks, and this rank's batches.

    Args:
        name: One of `MODELS`.
        nbytes: Wanted size of all gradients.
        rank: Seeds the batches.
    """
    builder, shape = _BUILDERS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = builder(nbytes)
    generator = torch.Generator().manual_seed(1 + rank)
    inputs = torch.randn((BATCHES, *shape), generator=generator)
    targets = torch.randint(
        _OUTPUTS, (BATCHES, *shape[:-1]) if name == "transformer" else (BATCHES, _SAMPLES), generator=generator
    )

    def loss(module: nn.Module, number: int) -> Tensor:
        outputs: Tensor = module(inputs[number % BATCHES])
        return functional.cross_entropy(outputs.flatten(0, -2), targets[number % BATCHES].flatten())

    return model, loss
