"""A training step without its GPU: the real parameters, in the real order, with the computation as timed waits.

What is assumed, and stated with every result: a third of the step is the forward pass, two thirds the backward pass,
spread evenly over the weight matrices (biases and norms come for free), gradients arriving from the last layer to the
first. The optimizer's time is left out.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gradwire.bench.compare.replay_shapes import SHAPES, Shape

FORWARD_SHARE = 1 / 3
"""A backward pass computes two products for each one of the forward pass."""

TIMM = (
    "timm results/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv (huggingface/pytorch-image-models): one RTX 3090, "
    "mixed precision, {rate} samples/s"
)
DLPERF = (
    "DLPerf v1.0 (Oneflow-Inc/DLPerf, README.md): OneFlow, V100 16 GB, FP32, 32 sentences of 128, 3715.08/s on 32 GPUs "
    "at a speed-up of 25.59: {rate}/s on one"
)

_PUBLISHED = {
    "resnet50": (1218.01, 64, TIMM),
    "vgg16": (546.06, 32, TIMM),
    "swin_t": (648.69, 128, TIMM),
    "bert_base": (145.18, 32, DLPERF),
}
"""Name -> (samples per second of one GPU, samples per GPU and step, source)."""


@dataclass(frozen=True, slots=True)
class ReplayCase:
    """One network's step on one GPU.

    Attributes:
        name: Of the network.
        parameters: Names and shapes in the order of the layers.
        step_seconds: Forward and backward pass on one GPU.
        source: Where that was published.
    """

    name: str
    parameters: tuple[Shape, ...]
    step_seconds: float
    source: str

    @property
    def nbytes(self) -> int:
        """Of all gradients in float32."""
        return 4 * sum(math.prod(shape) for _, shape in self.parameters)


def load_case(name: str, batch: int | None = None) -> ReplayCase:
    """A built-in case, or one from a file.

    Args:
        name: One of `SHAPES`, or a JSON file `{"name", "source", "step_seconds", "parameters": [[name, [2, 3]], ...]}`.
        batch: Samples per GPU and step of a built-in case.

    Raises:
        ValueError: Neither, or the file lacks something.
    """
    if name in SHAPES:
        rate, samples, source = _PUBLISHED[name]
        samples = batch or samples
        return ReplayCase(name, tuple(SHAPES[name]()), samples / rate, source.format(rate=rate) + f"; {samples} a step")
    file = Path(name)
    if file.suffix != ".json" or not file.exists():
        raise ValueError(f"`--replay` is {name!r}; wanted {', '.join(SHAPES)}, or an existing FILE.json")
    try:
        record = json.loads(file.read_text())
        parameters = tuple((str(each), tuple(int(size) for size in shape)) for each, shape in record["parameters"])
        return ReplayCase(str(record["name"]), parameters, float(record["step_seconds"]), str(record["source"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"`--replay` {name}: {error!r}; wanted an object with name, source, step_seconds and parameters "
            "([[name, [sizes]], ...])"
        ) from None


class _Layer(torch.autograd.Function):
    """Passes a number on; its backward pass waits, then hands out the parameter's gradient."""

    @staticmethod
    def forward(ctx: "_Context", x: Tensor, parameter: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: "_Context", *outputs: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.seconds:
            time.sleep(ctx.seconds)
        return outputs[0], ctx.gradient, None, None


class _Context:
    """What a layer remembers."""

    gradient: Tensor
    seconds: float


class ReplayModel(nn.Module):
    """The parameters of a case, 1/factor of each, and its waits in slow motion.

    Args:
        case: What to replay.
        factor: By which the gradients are smaller.
        slow_motion: How many times as long the waits last.
        rank: Seeds the gradients, which differ between the ranks.
    """

    def __init__(self, case: ReplayCase, factor: int, slow_motion: int, rank: int) -> None:
        super().__init__()
        shapes = [shrink(shape, factor) for _, shape in case.parameters]
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
        generator = torch.Generator().manual_seed(rank)
        self._gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        seconds = case.step_seconds * slow_motion
        self.forward_seconds = seconds * FORWARD_SHARE
        self.backward_seconds = spread(shapes, seconds * (1 - FORWARD_SHARE))

    def forward(self, start: Tensor) -> Tensor:
        """Waits for the forward pass and returns a number whose backward pass replays the layers.

        Args:
            start: A scalar that requires a gradient.
        """
        time.sleep(self.forward_seconds)
        for parameter, gradient, seconds in zip(self.weights, self._gradients, self.backward_seconds, strict=True):
            start = _Layer.apply(start, parameter, gradient, seconds)  # type: ignore[no-untyped-call]  # torch's
        return start


def shrink(shape: Sequence[int], factor: int) -> tuple[int, ...]:
    """A shape with about 1/factor of the elements: the first dimensions shrink, to no less than 1."""
    left, sizes = factor, []
    for size in shape:
        smaller = max(1, round(size / left))
        left = max(1, round(left * smaller / size)) if smaller > 1 else max(1, -(-left // size))
        sizes.append(smaller)
    return tuple(sizes)


def spread(shapes: Sequence[tuple[int, ...]], seconds: float) -> list[float]:
    """Each parameter's share of the backward pass: matrices alike, the rest nothing."""
    matrices = sum(len(shape) > 1 for shape in shapes)
    return [seconds / matrices if len(shape) > 1 else 0.0 for shape in shapes]
