"""Replays of training steps without GPUs: the real parameters in the real order, with the computation as timed waits.

This module has three parts: the parameters of well-known networks (names and shapes only; a test compares their number
with the published one), the model that replays them, and the scale that makes a replay fit a small machine.

Every result states these assumptions: a third of the step is the forward pass, and two thirds are the backward pass,
divided evenly among the weight matrices (biases and norms take no time). Gradients become ready from the last layer to
the first. The optimizer's time is left out.

A replay is scaled in two ways. By `factor` F, gradients have 1/F of their elements, and DDP's buckets and the links 1/F
of their size and rate, so that every ratio of times stays the same. The processor time of a message does not shrink
with F, and dozens of ranks share a few cores here. By `slow_motion` T, therefore, waits last T times as long and links
have 1/T of the rate, with T so large that the messages' processor time is a small part of a step.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import sleep

import torch
from torch import Tensor, nn

from gradwire.bench.arguments import read_input
from gradwire.bench.compare.public_models import linear, norm, resnet50

Shape = tuple[str, tuple[int, ...]]
"""Name and shape of one parameter."""


def _convolution(name: str, outputs: int, inputs: int, kernel: int) -> Iterator[Shape]:
    yield f"{name}.weight", (outputs, inputs, kernel, kernel)
    yield f"{name}.bias", (outputs,)


def vgg16() -> Iterator[Shape]:
    """Yields the shapes of VGG-16's 138,357,544 parameters.

    Source: Simonyan and Zisserman, Very Deep Networks (ICLR 2015), table 1, column D.
    """
    inputs = 3
    for number, width in enumerate((64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)):
        yield from _convolution(f"layer{number}", width, inputs, 3)
        inputs = width
    yield from linear("classifier0", 4096, 512 * 7 * 7)
    yield from linear("classifier1", 4096, 4096)
    yield from linear("classifier2", 1000, 4096)


def bert_base() -> Iterator[Shape]:
    """Yields the shapes of BERT base's 109,482,240 parameters: encoder and pooler, without heads.

    Source: Devlin et al. (NAACL 2019), section 3.
    """
    width = 768
    yield "words.weight", (30522, width)
    yield "positions.weight", (512, width)
    yield "segments.weight", (2, width)
    yield from norm("embedding.norm", width)
    for layer in range(12):
        for part in ("query", "key", "value", "output"):
            yield from linear(f"layer{layer}.{part}", width, width)
        yield from norm(f"layer{layer}.norm0", width)
        yield from linear(f"layer{layer}.in", 4 * width, width)
        yield from linear(f"layer{layer}.out", width, 4 * width)
        yield from norm(f"layer{layer}.norm1", width)
    yield from linear("pooler", width, width)


def swin_t() -> Iterator[Shape]:
    """Yields the shapes of Swin-T's 28,288,354 parameters.

    Source: Liu et al., Swin Transformer (ICCV 2021), section 3.3 (Swin-T), window 7.
    """
    width, window = 96, 7
    yield from _convolution("patches", width, 3, 4)
    yield from norm("patches.norm", width)
    for stage, (blocks, heads) in enumerate(((2, 3), (2, 6), (6, 12), (2, 24))):
        for block in range(blocks):
            name = f"stage{stage}.{block}"
            yield from norm(f"{name}.norm0", width)
            yield f"{name}.relative_position", ((2 * window - 1) ** 2, heads)
            yield from linear(f"{name}.query_key_value", 3 * width, width)
            yield from linear(f"{name}.output", width, width)
            yield from norm(f"{name}.norm1", width)
            yield from linear(f"{name}.in", 4 * width, width)
            yield from linear(f"{name}.out", width, 4 * width)
        if stage < 3:
            yield from norm(f"merge{stage}.norm", 4 * width)
            yield from linear(f"merge{stage}", 2 * width, 4 * width, bias=False)
            width *= 2
    yield from norm("norm", width)
    yield from linear("classifier", 1000, width)


SHAPES: dict[str, Callable[[], Iterable[Shape]]] = {
    "resnet50": resnet50,
    "bert_base": bert_base,
    "vgg16": vgg16,
    "swin_t": swin_t,
}
"""Name of a network for `--replay` -> function that yields the names and shapes of its parameters."""


FORWARD_SHARE = 1 / 3
"""Share of a step that the forward pass takes: the backward pass computes two matrix products for each of its own."""

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

_MOST_STEP_SECONDS = 3600
_MOST_CASE_NBYTES = 10**13
"""Upper bounds for a case from a file: a step of an hour, and the gradients of 2.5 * 10^12 parameters in float32."""


@dataclass(frozen=True, slots=True)
class ReplayCase:
    """A network to replay: its parameters and the time of its training step on one GPU.

    Attributes:
        name: Name of the network, for titles.
        parameters: Name and shape of each parameter, in the order of the layers.
        step_seconds: Seconds of a forward and a backward pass on one GPU.
        source: Publication of `step_seconds`, which the report cites.
    """

    name: str
    parameters: tuple[Shape, ...]
    step_seconds: float
    source: str

    @property
    def nbytes(self) -> int:
        """Total bytes of the gradients in float32."""
        return 4 * sum(math.prod(shape) for _, shape in self.parameters)


def load_case(name: str, batch: int | None = None) -> ReplayCase:
    """Returns the built-in case with this name, or reads one from a file.

    Args:
        name: One of `SHAPES`, or a JSON file `{"name", "source", "step_seconds", "parameters": [[name, [2, 3]], ...]}`.
        batch: Samples per GPU and step of a built-in case, which scale its step time; None for the published number.
            Ignored for a file.

    Raises:
        ValueError: `name` is no built-in case and no readable .json file, or the file lacks a field or has one out of
            bounds.
    """
    if name in SHAPES:
        rate, samples, source = _PUBLISHED[name]
        samples = batch or samples
        return ReplayCase(name, tuple(SHAPES[name]()), samples / rate, source.format(rate=rate) + f"; {samples} a step")
    file = Path(name)
    if file.suffix != ".json":
        raise ValueError(f"`--replay`: found {name!r}, wanted {', '.join(SHAPES)}, or an existing FILE.json")
    text = read_input("--replay", file)
    try:
        record = json.loads(text)
        parameters = tuple((str(each), tuple(int(size) for size in shape)) for each, shape in record["parameters"])
        case = ReplayCase(str(record["name"]), parameters, float(record["step_seconds"]), str(record["source"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"`--replay` {name}: {error!r}; wanted an object with name, source, step_seconds and parameters "
            "([[name, [sizes]], ...])"
        ) from None
    if not 0 < case.step_seconds <= _MOST_STEP_SECONDS or not 0 < case.nbytes <= _MOST_CASE_NBYTES:
        raise ValueError(
            f"`--replay` {name}: {case.nbytes:.3g} bytes of gradients in {case.step_seconds:g} s; wanted some, at most "
            f"{_MOST_CASE_NBYTES:.0e} in {_MOST_STEP_SECONDS} s"
        )
    if any(size < 1 for _, shape in parameters for size in shape):
        raise ValueError(f"`--replay` {name} has a parameter without elements; wanted sizes of at least 1")
    return case


class ReplayLayer(torch.autograd.Function):
    """Autograd function that stands for a layer: forward returns its input, backward waits and yields a gradient."""

    @staticmethod
    def forward(ctx: "_Context", x: Tensor, parameter: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        """Returns a view of `x`, and stores in `ctx` what the backward pass needs.

        Args:
            ctx: Context of autograd.
            x: Scalar that connects the layers.
            parameter: Parameter of the layer, which makes autograd ask for its gradient.
            gradient: Gradient that the backward pass returns for `parameter`.
            seconds: Time that the backward pass waits.
        """
        ctx.gradient, ctx.seconds = gradient, seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: "_Context", *outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Sleeps for the layer's time, then returns the gradients of the input and of the parameter."""
        if ctx.seconds:
            sleep(ctx.seconds)
        return outputs[0], ctx.gradient, None, None


class _Context:
    """Autograd context of a `ReplayLayer`: the values that its forward pass keeps for its backward pass."""

    gradient: Tensor
    seconds: float


class ReplayModel(nn.Module):
    """Module with the parameters of a case, shrunk, whose passes wait instead of computing.

    Args:
        case: Network to replay.
        factor: Divisor of the number of elements of each parameter.
        slow_motion: Multiplier of the duration of all waits.
        rank: Rank of this process, the seed of its random gradients.
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
        """Waits as long as the forward pass lasts, and returns a scalar whose backward pass replays the layers.

        Args:
            start: A scalar that requires a gradient.
        """
        sleep(self.forward_seconds)
        for parameter, gradient, seconds in zip(self.weights, self._gradients, self.backward_seconds, strict=True):
            start = ReplayLayer.apply(start, parameter, gradient, seconds)  # type: ignore[no-untyped-call]  # torch's
        return start


def shrink(shape: Sequence[int], factor: int) -> tuple[int, ...]:
    """Returns a shape with about 1/factor of the elements: the first dimensions shrink, each to no less than 1.

    Args:
        shape: Sizes of a parameter.
        factor: Divisor of the number of elements.
    """
    left, sizes = factor, []
    for size in shape:
        smaller = max(1, round(size / left))
        left = max(1, round(left * smaller / size)) if smaller > 1 else max(1, -(-left // size))
        sizes.append(smaller)
    return tuple(sizes)


def spread(shapes: Sequence[tuple[int, ...]], seconds: float) -> list[float]:
    """Divides the time of the backward pass equally among the parameters of two or more dimensions.

    Args:
        shapes: Shapes of the parameters.
        seconds: Duration of the backward pass.

    Returns:
        Seconds for each parameter, in the order of `shapes`; 0 for those of one dimension.
    """
    matrices = sum(len(shape) > 1 for shape in shapes)
    return [seconds / matrices if len(shape) > 1 else 0.0 for shape in shapes]


MOST_GRADIENT_NBYTES = 9_000_000
"""Upper limit of a rank's scaled gradients, in bytes: the buffers of 32 ranks and five configurations then take some
5 GB."""

MESSAGE_SECONDS = 130e-6
"""Processor time of sending and receiving one message of gloo's ring on this machine, for messages of 60 B to 25 KB.

Measured: all_reduce without a limited link, AMD EPYC, 2 cores, torch 2.13.0, 2026-11-21: 104 to 135 us at 16 ranks, 128
to 142 us at 32.
"""

MESSAGE_SHARE = 1 / 6
"""Share of a replayed step of plain DDP that its messages' processor time may take; slow motion is chosen by it."""

LEAST_STEP_SECONDS, MOST_STEP_SECONDS = 4.0, 11.0
"""Bounds of a replayed step of plain DDP: four steps of each of five configurations take four minutes at most."""

DDP_BUCKET_MEGABYTES = 25.0
"""DDP's default bucket size in MiB. Source: torch.nn.parallel.DistributedDataParallel, bucket_cap_mb."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Factors by which a replay is shrunk and slowed down.

    Attributes:
        factor: Divisor of the sizes of gradients and buckets, and of the rates of links.
        slow_motion: Multiplier of the duration of waits, and divisor of the rates of links.
    """

    factor: int = 1
    slow_motion: int = 1

    @property
    def bucket_megabytes(self) -> float:
        """Value of DDP's `bucket_cap_mb` with which the shrunk network has as many buckets as the real one."""
        return DDP_BUCKET_MEGABYTES / self.factor

    def link(self, bits_per_second: int) -> int:
        """Returns the rate to emulate in place of a real link's, in bits per second: divided by `factor * slow_motion`.

        Gradients have `factor` times fewer bytes and waits last `slow_motion` times as long, so the emulated steps take
        `slow_motion` times as long as real ones.

        Args:
            bits_per_second: Rate of the real link, or of one real connection.
        """
        return bits_per_second // (self.factor * self.slow_motion)


def plain_step_seconds(case: ReplayCase, ranks: int, bits_per_second: int) -> float:
    """Returns the predicted seconds of a step of plain DDP on the real network, without any scale.

    The model is a ring all-reduce over all ranks that overlaps the whole backward pass: the step lasts as long as the
    forward pass and the longer of the two.

    Args:
        case: Network that is replayed.
        ranks: Number of all ranks, which are numbered node by node.
        bits_per_second: Rate of the ring between two nodes.

    Source: docs/explanation/plans.md for the ring's bytes.
    """
    ring = 2 * (ranks - 1) / ranks * case.nbytes * 8 / bits_per_second
    return case.step_seconds * FORWARD_SHARE + max(case.step_seconds * (1 - FORWARD_SHARE), ring)


def count_buckets(case: ReplayCase) -> int:
    """Returns the number of buckets into which DDP divides a network's gradients at its default bucket size.

    DDP closes a bucket as soon as its gradients reach the size or exceed it.

    Args:
        case: Network that is replayed.
    """
    buckets, held = 0, 0
    for _, shape in reversed(case.parameters):
        held += 4 * math.prod(shape)
        if held >= DDP_BUCKET_MEGABYTES * 2**20:
            buckets, held = buckets + 1, 0
    return buckets + (held > 0)


def message_seconds(case: ReplayCase, ranks: int) -> float:
    """Returns the seconds that this machine's processors need for the messages of one step of plain DDP.

    All ranks share the processors that this process may use. gloo's ring has 2(n-1) rounds, in each of which every rank
    sends two messages. Source: gloo, allreduce.cc (ring).

    Args:
        case: Network that is replayed.
        ranks: Number of all ranks.
    """
    messages = count_buckets(case) * 2 * (ranks - 1) * 2 * ranks
    return messages * MESSAGE_SECONDS / len(os.sched_getaffinity(0))


def fit_scale(case: ReplayCase, ranks: int, bits_per_second: int, factor: int | None, slow_motion: int | None) -> Scale:
    """Returns the scale of a replay on emulated nodes; values that the user left out are chosen here.

    Args:
        case: Network that is replayed.
        ranks: Number of all ranks.
        bits_per_second: Rate between two real nodes of a ring over all ranks.
        factor: Value of `--factor`; None for the smallest power of two that leaves at most `MOST_GRADIENT_NBYTES`.
        slow_motion: Value of `--slow-motion`; None for the one at which messages take `MESSAGE_SHARE` of a step, with
            the step between `LEAST_STEP_SECONDS` and `MOST_STEP_SECONDS`.
    """
    if factor is None:
        factor = 1
        while case.nbytes > factor * MOST_GRADIENT_NBYTES:
            factor *= 2
    if slow_motion is None:
        wanted = max(LEAST_STEP_SECONDS, min(MOST_STEP_SECONDS, message_seconds(case, ranks) / MESSAGE_SHARE))
        slow_motion = max(1, round(wanted / plain_step_seconds(case, ranks, bits_per_second)))
    return Scale(factor, slow_motion)
