"""A training step without its GPU: the real parameters, in the real order, with the computation as timed waits.

Three parts follow each other here: the parameters of well-known networks (names and shapes alone; a test holds each to
its published number), the model that replays them, and the scale that makes it fit a small machine.

What is assumed, and stated with every result: a third of the step is the forward pass, two thirds the backward pass,
spread evenly over the weight matrices (biases and norms come for free), gradients arriving from the last layer to the
first. The optimizer's time is left out.

The scale is less of everything by one factor, in slow motion. Gradients have 1/F of their elements, DDP's buckets and
the links 1/F of theirs: every ratio of seconds stays. What does not shrink is what a message costs a processor, and
dozens of ranks share a few cores here. So everything also lasts T times as long: waits T times, links 1/T of the rate,
until that cost is small beside them.
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
    """138,357,544 parameters. Source: Simonyan and Zisserman, Very Deep Networks (ICLR 2015), table 1, column D."""
    inputs = 3
    for number, width in enumerate((64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)):
        yield from _convolution(f"layer{number}", width, inputs, 3)
        inputs = width
    yield from linear("classifier0", 4096, 512 * 7 * 7)
    yield from linear("classifier1", 4096, 4096)
    yield from linear("classifier2", 1000, 4096)


def bert_base() -> Iterator[Shape]:
    """109,482,240 parameters: encoder and pooler, without heads. Source: Devlin et al. (NAACL 2019), section 3."""
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
    """28,288,354 parameters. Source: Liu et al., Swin Transformer (ICCV 2021), section 3.3 (Swin-T), window 7."""
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
"""Name that `--replay` takes -> what yields the shapes of its parameters."""


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

_MOST_STEP_SECONDS = 3600
_MOST_CASE_NBYTES = 10**13
"""Bounds of a file's case: a step of an hour, gradients of 2.5 * 10^12 parameters."""


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
        """Bytes of all gradients in float32."""
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
    """Passes a number on; its backward pass waits, then hands out the parameter's gradient."""

    @staticmethod
    def forward(ctx: "_Context", x: Tensor, parameter: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        """Returns `x`; keeps the gradient, and how long the backward pass lasts."""
        ctx.gradient, ctx.seconds = gradient, seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: "_Context", *outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Sleep for the layer's time, then return the gradients of the input and of the parameter."""
        if ctx.seconds:
            sleep(ctx.seconds)
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
        sleep(self.forward_seconds)
        for parameter, gradient, seconds in zip(self.weights, self._gradients, self.backward_seconds, strict=True):
            start = ReplayLayer.apply(start, parameter, gradient, seconds)  # type: ignore[no-untyped-call]  # torch's
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


MOST_GRADIENT_NBYTES = 9_000_000
"""Most bytes of scaled gradients: with 32 ranks and five configurations the buffers then take some 5 GB."""

MESSAGE_SECONDS = 130e-6
"""Processor time of one message of gloo's ring, all included: 16 or 32 ranks on one machine, 60 B to 25 KB alike.

Measured: all_reduce without a limited link, AMD EPYC, 2 cores, torch 2.13.0, 2026-11-21: 104 to 135 us at 16 ranks, 128
to 142 us at 32.
"""

MESSAGE_SHARE = 1 / 6
"""A step of plain DDP shall last so long that its messages, if nothing hides them, take this part of it."""

LEAST_STEP_SECONDS, MOST_STEP_SECONDS = 4.0, 11.0
"""Bounds of that: four steps of each of five configurations take three minutes at most."""

DDP_BUCKET_MEGABYTES = 25.0
"""Source: torch.nn.parallel.DistributedDataParallel, bucket_cap_mb."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What is smaller and what is slower.

    Attributes:
        factor: Gradients, buckets and links have 1/factor of their bytes.
        slow_motion: Everything lasts so many times as long.
    """

    factor: int = 1
    slow_motion: int = 1

    @property
    def bucket_megabytes(self) -> float:
        """The value of DDP's `bucket_cap_mb` that makes as many buckets as the whole network has."""
        return DDP_BUCKET_MEGABYTES / self.factor

    def link(self, bits_per_second: int) -> int:
        """Rate of an emulated link or connection that stands for one of `bits_per_second`."""
        return bits_per_second // (self.factor * self.slow_motion)


def plain_step_seconds(case: ReplayCase, ranks: int, bits_per_second: int) -> float:
    """Return the predicted seconds of a real step of plain DDP: a flat ring, from the first bucket of backward on.

    Args:
        case: What is replayed.
        ranks: In all, placed node by node.
        bits_per_second: That the ring reaches between two nodes.

    Source: docs/explanation/plans.md for the ring's bytes.
    """
    ring = 2 * (ranks - 1) / ranks * case.nbytes * 8 / bits_per_second
    return case.step_seconds * FORWARD_SHARE + max(case.step_seconds * (1 - FORWARD_SHARE), ring)


def count_buckets(case: ReplayCase) -> int:
    """Buckets that DDP makes of a network: it closes one as soon as it holds the cap or more."""
    buckets, held = 0, 0
    for _, shape in reversed(case.parameters):
        held += 4 * math.prod(shape)
        if held >= DDP_BUCKET_MEGABYTES * 2**20:
            buckets, held = buckets + 1, 0
    return buckets + (held > 0)


def message_seconds(case: ReplayCase, ranks: int) -> float:
    """What the messages of a step of plain DDP cost when all ranks share this machine's processors.

    gloo's ring has 2(n-1) rounds, in each of which every rank sends two messages. Source: gloo, allreduce.cc (ring).
    """
    messages = count_buckets(case) * 2 * (ranks - 1) * 2 * ranks
    return messages * MESSAGE_SECONDS / len(os.sched_getaffinity(0))


def fit_scale(case: ReplayCase, ranks: int, bits_per_second: int, factor: int | None, slow_motion: int | None) -> Scale:
    """Return how much a replay on emulated nodes shrinks gradients and slows time down.

    Args:
        case: What is replayed.
        ranks: In all.
        bits_per_second: That a ring of all ranks reaches between two real nodes.
        factor: As the user wants it; None: the smallest power of two that leaves `MOST_GRADIENT_NBYTES`.
        slow_motion: As the user wants it; None: what keeps the messages' part to `MESSAGE_SHARE`, within the bounds.
    """
    if factor is None:
        factor = 1
        while case.nbytes > factor * MOST_GRADIENT_NBYTES:
            factor *= 2
    if slow_motion is None:
        wanted = max(LEAST_STEP_SECONDS, min(MOST_STEP_SECONDS, message_seconds(case, ranks) / MESSAGE_SHARE))
        slow_motion = max(1, round(wanted / plain_step_seconds(case, ranks, bits_per_second)))
    return Scale(factor, slow_motion)
