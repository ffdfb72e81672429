"""Public models by name: the shapes of their gradients, and an assumed computation time of a step.

Shapes are written out from the models' published configurations, so nothing is downloaded. The computation time is an
assumption, which outputs state; it is for one GPU as PCIe servers have it (A10, RTX 4090).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

Shapes = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class PublicModel:
    """A model that many people train.

    Attributes:
        name: Value of `--model`.
        title: Name of the model in tables.
        shapes: Name and shape of each parameter that has a gradient, in the order of the model.
        step_seconds: Assumed seconds of a step on one GPU without communication: forward, backward and optimizer.
        batch: Samples or tokens of one GPU in one step, in words.
        assumed: Sentence on the device for which `step_seconds` is assumed; empty for the reference device's own time.
    """

    name: str
    title: str
    shapes: Shapes
    step_seconds: float
    batch: str
    assumed: str = ""

    @property
    def numel(self) -> int:
        """Number of trained parameters, in elements."""
        return sum(prod(shape) for _, shape in self.shapes)

    @property
    def backward_seconds(self) -> float:
        """Seconds of the backward pass: two thirds of a step, as it takes twice the forward pass (optimizer left out).

        Source: Kaplan et al., "Scaling Laws for Neural Language Models", arXiv:2001.08361, section 2.1.
        """
        return 2 / 3 * self.step_seconds


def linear(name: str, outputs: int, inputs: int, *, bias: bool = True) -> Shapes:
    """Returns the names and shapes of a linear layer's parameters."""
    return [(f"{name}.weight", (outputs, inputs)), *([(f"{name}.bias", (outputs,))] if bias else [])]


def norm(name: str, width: int) -> Shapes:
    """Returns the names and shapes of a normalization layer's scale and bias."""
    return [(f"{name}.weight", (width,)), (f"{name}.bias", (width,))]


def _gpt2(width: int = 768, layers: int = 12, vocabulary: int = 50257, context: int = 1024) -> Shapes:
    """Returns the shapes of GPT-2's small model, whose head shares the embedding's weight.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, table 2.
    """
    shapes: Shapes = [("wte", (vocabulary, width)), ("wpe", (context, width))]
    for layer in range(layers):
        at = f"h.{layer}"
        shapes += norm(f"{at}.ln_1", width) + linear(f"{at}.attn.c_attn", 3 * width, width)
        shapes += linear(f"{at}.attn.c_proj", width, width) + norm(f"{at}.ln_2", width)
        shapes += linear(f"{at}.mlp.c_fc", 4 * width, width) + linear(f"{at}.mlp.c_proj", width, 4 * width)
    return shapes + norm("ln_f", width)


_LLAMA_WIDTH, _LLAMA_LAYERS, _LLAMA_FEED_FORWARD, _LLAMA_KEYS, _LLAMA_VOCABULARY = 2048, 16, 8192, 512, 128256
"""Llama 3.2 1B: 32 heads of 64, 8 of them for keys and values; embeddings tied. Source: its published config.json."""


def _llama_linears(layer: int) -> Iterator[tuple[str, int, int]]:
    """Yields (name, outputs, inputs) of each linear layer of a block."""
    width, keys, hidden = _LLAMA_WIDTH, _LLAMA_KEYS, _LLAMA_FEED_FORWARD
    at = f"layers.{layer}"
    yield from ((f"{at}.q_proj", width, width), (f"{at}.k_proj", keys, width), (f"{at}.v_proj", keys, width))
    yield from ((f"{at}.o_proj", width, width), (f"{at}.gate_proj", hidden, width), (f"{at}.up_proj", hidden, width))
    yield (f"{at}.down_proj", width, hidden)


def _llama() -> Shapes:
    shapes: Shapes = [("embed_tokens", (_LLAMA_VOCABULARY, _LLAMA_WIDTH))]
    for layer in range(_LLAMA_LAYERS):
        for each in _llama_linears(layer):
            shapes += linear(*each, bias=False)
        shapes += [(f"layers.{layer}.{name}", (_LLAMA_WIDTH,)) for name in ("input_norm", "post_norm")]
    return [*shapes, ("norm", (_LLAMA_WIDTH,))]


def _adapter(name: str, outputs: int, inputs: int, rank: int) -> Shapes:
    """Returns the shapes of the two factors of a LoRA adapter.

    Source: Hu et al., "LoRA", arXiv:2106.09685, section 4.1.
    """
    return [(f"{name}.lora_a", (rank, inputs)), (f"{name}.lora_b", (outputs, rank))]


def _llama_lora(rank: int = 16) -> Shapes:
    """Returns the shapes of the LoRA adapters of all linear layers of all blocks of Llama."""
    layers = range(_LLAMA_LAYERS)
    return [shape for layer in layers for each in _llama_linears(layer) for shape in _adapter(*each, rank)]


def resnet50(classes: int = 1000) -> Shapes:
    """Returns the shapes of ResNet-50's parameters, 25,557,032 elements with 1000 classes.

    Source: He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385, table 1.
    """

    def convolution(name: str, outputs: int, inputs: int, kernel: int) -> Shapes:
        return [(f"{name}.weight", (outputs, inputs, kernel, kernel)), *norm(f"{name}.norm", outputs)]

    shapes, inputs = convolution("stem", 64, 3, 7), 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            at = f"layer{stage}.{block}"
            shapes += convolution(f"{at}.conv1", width, inputs, 1) + convolution(f"{at}.conv2", width, width, 3)
            shapes += convolution(f"{at}.conv3", 4 * width, width, 1)
            shapes += convolution(f"{at}.downsample", 4 * width, inputs, 1) if block == 0 else []
            inputs = 4 * width
    return shapes + linear("fc", classes, inputs)


_SDXL_TRANSFORMERS = ((640, 2 * 2 + 3 * 2), (1280, 2 * 10 + 10 + 3 * 10))
"""(width, number of transformer layers of that width) of SDXL's U-Net: the sums are over its way down, its middle and
its way up.

Source: Podell et al., "SDXL", arXiv:2307.01952, table 1 ([0, 2, 10] transformer blocks; width 320 times 1, 2, 4).
"""
_SDXL_CONTEXT = 2048


def _sdxl_lora(rank: int = 16) -> Shapes:
    """Returns the shapes of SDXL's LoRA adapters.

    Each transformer layer has two attentions, and each of these an adapter for queries, keys, values and outputs.
    """
    shapes: Shapes = []
    for width, layers in _SDXL_TRANSFORMERS:
        for layer in range(layers):
            for attention, context in (("attn1", width), ("attn2", _SDXL_CONTEXT)):
                at = f"{width}.{layer}.{attention}"
                for name, inputs in (("to_q", width), ("to_k", context), ("to_v", context), ("to_out", width)):
                    shapes += _adapter(f"{at}.{name}", width, inputs, rank)
    return shapes


def _models() -> tuple[PublicModel, ...]:
    rows: tuple[tuple[str, str, Callable[[], Shapes], float, str], ...] = (
        ("resnet50", "ResNet-50", resnet50, 0.08, "64 images"),
        ("gpt2", "GPT-2 124M", _gpt2, 0.25, "12 x 1,024 tokens"),
        ("llama-3.2-1b", "Llama-3.2-1B, full", _llama, 0.75, "4,096 tokens"),
        ("llama-3.2-1b-lora", "Llama-3.2-1B, LoRA 16", _llama_lora, 0.5, "4,096 tokens"),
        ("sdxl-lora", "SDXL, LoRA 16", _sdxl_lora, 0.5, "1 image of 1,024 x 1,024"),
    )
    return tuple(PublicModel(name, title, shapes(), seconds, batch) for name, title, shapes, seconds, batch in rows)


PUBLIC_MODELS = {model.name: model for model in _models()}
