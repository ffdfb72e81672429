"""Models of a requested size in plain torch, and batches for them, on which all configurations train."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire.bench.train.model import TransformerBlock

BATCHES = 4
"""Number of different batches of a rank. The configurations cycle through them, so that a compressor with error
feedback does not see the same gradient in each step."""

_WIDTH, _SAMPLES, _CONTEXT = 256, 4, 32
"""The width of layers, where the wanted size is about a number of them."""
_CHANNELS, _PIXELS = 128, 8
FEW_LAYERS = 4
"""Layers from which on their number comes near enough to a size, and widths stay multiples of 16."""
_OUTPUTS = 32

BatchLoss = Callable[[nn.Module, int], Tensor]
"""(model, number of the batch) -> loss of this rank's batch."""


def _layers(nbytes: float, weights: int, width: int) -> tuple[int, int]:
    """How many layers, and how wide, so that the gradients come near a size: where layers are few, their width helps.

    Args:
        nbytes: Wanted size of all gradients.
        weights: Of a layer, in squares of its width.
        width: Of a layer where many of them make up the size.
    """
    layers = max(1, round(nbytes / (4 * weights * width * width)))
    step = 16 if layers >= FEW_LAYERS else 4
    # weights * layers * w^2 + _OUTPUTS * w = nbytes / 4: the last layer counts where the others are narrow.
    squares = weights * layers
    wanted = ((_OUTPUTS**2 + squares * nbytes) ** 0.5 - _OUTPUTS) / (2 * squares)
    return layers, max(step, step * round(wanted / step))


def _linear(nbytes: float) -> tuple[nn.Module, tuple[int, ...]]:
    layers, width = _layers(nbytes, 1, _WIDTH)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width, bias=False), nn.Tanh()]
    return nn.Sequential(*parts, nn.Linear(width, _OUTPUTS)), (_SAMPLES, width)


def _cnn(nbytes: float) -> tuple[nn.Module, tuple[int, ...]]:
    layers, channels = _layers(nbytes, 9, _CHANNELS)
    parts: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for _ in range(layers):
        parts += [
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(8 if channels % 8 == 0 else 4, channels),
            nn.ReLU(),
        ]
    parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, _OUTPUTS)]
    return nn.Sequential(*parts), (_SAMPLES, 3, _PIXELS, _PIXELS)


def _transformer(nbytes: float) -> tuple[nn.Module, tuple[int, ...]]:
    layers, width = _layers(nbytes, 12, _WIDTH)
    blocks = (TransformerBlock(width, 4) for _ in range(layers))
    return nn.Sequential(*blocks, nn.Linear(width, _OUTPUTS)), (_SAMPLES, _CONTEXT, width)


_BUILDERS: dict[str, Callable[[float], tuple[nn.Module, tuple[int, ...]]]] = {
    "transformer": _transformer,
    "cnn": _cnn,
    "linear": _linear,
}
"""Each returns a model and the shape of a batch."""
MODELS = tuple(_BUILDERS)


def build(name: str, nbytes: float, rank: int) -> tuple[nn.Module, BatchLoss]:
    """A model with about `nbytes` of float32 gradients, the same on all ranks, and this rank's batches.

    Args:
        name: One of `MODELS`.
        nbytes: Wanted size of all gradients.
        rank: Seeds the batches.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, shape = _BUILDERS[name](nbytes)
    generator = torch.Generator().manual_seed(1 + rank)
    inputs = torch.randn((BATCHES, *shape), generator=generator)
    targets = torch.randint(
        _OUTPUTS, (BATCHES, *shape[:-1]) if name == "transformer" else (BATCHES, _SAMPLES), generator=generator
    )

    def loss(module: nn.Module, number: int) -> Tensor:
        outputs: Tensor = module(inputs[number % BATCHES])
        return functional.cross_entropy(outputs.flatten(0, -2), targets[number % BATCHES].flatten())

    return model, loss
