"""Models of a requested size in plain torch with random batches, which all configurations train."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire.bench.train.model import TransformerBlock

BATCHES = 4
"""Number of different batches of a rank. The configurations cycle through them, so that a compressor with error
feedback does not see the same gradient in each step."""

_WIDTH, _SAMPLES, _CONTEXT = 256, 4, 32
"""Usual width of a layer, samples of a batch, and length of a sequence."""
_CHANNELS, _PIXELS = 128, 8
FEW_LAYERS = 4
"""Least number of layers for which widths are multiples of 16; with fewer they are multiples of 4, to come nearer to
the wanted size."""
_OUTPUTS = 32

BatchLoss = Callable[[nn.Module, int], Tensor]
"""Function (model, number of the step) -> loss on this rank's batch of that step."""


def _layers(nbytes: float, weights: int, width: int) -> tuple[int, int]:
    """Returns the number of layers and their width with which the gradients come near a size.

    Args:
        nbytes: Wanted size of all gradients, in bytes of float32.
        weights: Number of a layer's weights, divided by the square of its width.
        width: Usual width of a layer, from which the number of layers follows; the width is then fitted to the size.
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
"""Name of a model -> function from the gradients' size in bytes to a model and the shape of a batch."""
MODELS = tuple(_BUILDERS)


def build(name: str, nbytes: float, rank: int) -> tuple[nn.Module, BatchLoss]:
    """Builds a model with about `nbytes` of float32 gradients, with the same weights on all ranks.

    Args:
        name: Name of the model, one of `MODELS`.
        nbytes: Wanted size of all gradients, in bytes.
        rank: Rank of this process, the seed of its batches.

    Returns:
        The model, and a function that computes its loss on this rank's batch of a step.
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
