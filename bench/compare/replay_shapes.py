"""The parameters of well-known networks, in the order of their layers: names and shapes alone, no weights.

Each generator ends at the published number of parameters, which a test holds it to.
"""

from collections.abc import Callable, Iterator

Shape = tuple[str, tuple[int, ...]]
"""Name and shape of one parameter."""


def _convolution(name: str, outputs: int, inputs: int, kernel: int) -> Iterator[Shape]:
    yield f"{name}.weight", (outputs, inputs, kernel, kernel)


def _norm(name: str, width: int) -> Iterator[Shape]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _linear(name: str, outputs: int, inputs: int, bias: bool = True) -> Iterator[Shape]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def resnet50() -> Iterator[Shape]:
    """25,557,032 parameters. Source: He et al., Deep Residual Learning (CVPR 2016), table 1 (50-layer)."""
    yield from _convolution("stem", 64, 3, 7)
    yield from _norm("stem.norm", 64)
    inputs = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            name = f"stage{stage}.{block}"
            for part, (outputs, source, kernel) in enumerate(
                ((width, inputs, 1), (width, width, 3), (4 * width, width, 1))
            ):
                yield from _convolution(f"{name}.{part}", outputs, source, kernel)
                yield from _norm(f"{name}.{part}.norm", outputs)
            if block == 0:
                yield from _convolution(f"{name}.shortcut", 4 * width, inputs, 1)
                yield from _norm(f"{name}.shortcut.norm", 4 * width)
            inputs = 4 * width
    yield from _linear("classifier", 1000, 2048)


def vgg16() -> Iterator[Shape]:
    """138,357,544 parameters. Source: Simonyan and Zisserman, Very Deep Networks (ICLR 2015), table 1, column D."""
    inputs = 3
    for number, width in enumerate((64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)):
        yield from _convolution(f"layer{number}", width, inputs, 3)
        yield f"layer{number}.bias", (width,)
        inputs = width
    yield from _linear("classifier0", 4096, 512 * 7 * 7)
    yield from _linear("classifier1", 4096, 4096)
    yield from _linear("classifier2", 1000, 4096)


def bert_base() -> Iterator[Shape]:
    """109,482,240 parameters: the encoder with its pooler, without heads. Source: Devlin et al. (NAACL 2019), section 3."""
    width = 768
    yield "words.weight", (30522, width)
    yield "positions.weight", (512, width)
    yield "segments.weight", (2, width)
    yield from _norm("embedding.norm", width)
    for layer in range(12):
        for part in ("query", "key", "value", "output"):
            yield from _linear(f"layer{layer}.{part}", width, width)
        yield from _norm(f"layer{layer}.norm0", width)
        yield from _linear(f"layer{layer}.in", 4 * width, width)
        yield from _linear(f"layer{layer}.out", width, 4 * width)
        yield from _norm(f"layer{layer}.norm1", width)
    yield from _linear("pooler", width, width)


def swin_t() -> Iterator[Shape]:
    """28,288,354 parameters. Source: Liu et al., Swin Transformer (ICCV 2021), section 3.3 (Swin-T), window 7."""
    width, window = 96, 7
    yield from _convolution("patches", width, 3, 4)
    yield "patches.bias", (width,)
    yield from _norm("patches.norm", width)
    for stage, (blocks, heads) in enumerate(((2, 3), (2, 6), (6, 12), (2, 24))):
        for block in range(blocks):
            name = f"stage{stage}.{block}"
            yield from _norm(f"{name}.norm0", width)
            yield f"{name}.relative_position", ((2 * window - 1) ** 2, heads)
            yield from _linear(f"{name}.query_key_value", 3 * width, width)
            yield from _linear(f"{name}.output", width, width)
            yield from _norm(f"{name}.norm1", width)
            yield from _linear(f"{name}.in", 4 * width, width)
            yield from _linear(f"{name}.out", width, 4 * width)
        if stage < 3:
            yield from _norm(f"merge{stage}.norm", 4 * width)
            yield from _linear(f"merge{stage}", 2 * width, 4 * width, bias=False)
            width *= 2
    yield from _norm("norm", width)
    yield from _linear("classifier", 1000, width)


SHAPES: dict[str, Callable[[], Iterator[Shape]]] = {
    "resnet50": resnet50,
    "bert_base": bert_base,
    "vgg16": vgg16,
    "swin_t": swin_t,
}
"""By the name that `--replay` takes."""
