"""Prices compression: bytes on the wire, and seconds of encoding and decoding.

Bytes come from the compressor itself. Seconds come from the bytes that its kernels read and write, all of them limited
by memory, or from a measurement on this machine.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradwire.comms.plan.cost import EXACT, EXCHANGE_ROUNDS, CodecPrice
from gradwire.comms.transport.echo import EchoGroup
from gradwire.compressors.base import Compressor, Layout, Slice, traits_of
from gradwire.topology.bandwidth import AMD_MEMORY, GIGABYTE, GPU_MEMORY

if TYPE_CHECKING:  # compressors are loaded where one is priced: exact plans need none
    from gradwire.compressors.registry import Option

ELEMENT_NBYTES = 4
"""Gradients are float32 when they are encoded."""

GPU_MEMORY_SHARE = 0.7
"""Share of a GPU's peak memory bandwidth that kernels reach which only move data."""

SLOWEST_GPU_BYTES_PER_SECOND = GPU_MEMORY_SHARE * min(*GPU_MEMORY.values(), *AMD_MEMORY.values())[0] * GIGABYTE
"""Bytes per second that codecs are assumed to move through the memory of an unknown GPU."""


@dataclass(frozen=True, slots=True)
class CodecFacts:
    """Facts about a compressor that predictions and advice need.

    Attributes:
        touched_nbytes: Bytes that encoding and decoding read and write for each element of a shard, residual and
            momentum included: encode (gradient in, residual in and out, payload out), decode and sum a slice, decode
            the result. One pass each; onebit has two more, for its scales of elements.
        operators_nbytes: The same without kernels, in torch's operators: their inputs and outputs, counted in the
            reference with a group of two. That is what runs on AMD's GPUs.
        kept_nbytes: Bytes that it keeps from step to step for each element of a shard, and for each element of the part
            of it that a rank owns. A residual or a momentum is two float32: the value, and the one that takes its place
            when the step is known to be finite; onebit's scale of an element is one. PowerSGD's factors, which are
            small, are left out.
        trained: Optimizers of `OPTIMIZER_NAMES` with which docs/results/convergence.md or docs/results/optimizers.md
            has a training. It is recommended with these only.
        rounds: Number of collectives that follow one another, each of every member with every other.
    """

    touched_nbytes: float
    operators_nbytes: float
    kept_nbytes: tuple[float, float]
    trained: tuple[str, ...]
    rounds: int = EXCHANGE_ROUNDS


OPTIMIZER_NAMES = {"sgd": "SGD", "adamw": "AdamW", "muon": "Muon"}
"""Optimizers with which compressors were tested in trainings, with their names in sentences."""
_ALL = tuple(OPTIMIZER_NAMES)

CODEC_FACTS = {
    "none": CodecFacts(0.0, 0.0, (0.0, 0.0), _ALL),
    "bf16": CodecFacts(14.0, 114.0, (0.0, 0.0), _ALL),
    "fp16": CodecFacts(14.0, 114.0, (0.0, 0.0), _ALL),
    "int8": CodecFacts(19.0, 364.0, (8.0, 8.0), _ALL),
    "waterfill5": CodecFacts(18.5, 2400.0, (8.0, 8.0), ("muon",)),
    "waterfill4": CodecFacts(18.0, 2384.0, (8.0, 8.0), _ALL),
    "waterfill3": CodecFacts(18.0, 2367.0, (8.0, 8.0), ("adamw", "muon")),
    "int4": CodecFacts(18.0, 373.0, (8.0, 8.0), _ALL),
    "waterfill2": CodecFacts(17.0, 2351.0, (8.0, 8.0), ("adamw", "muon")),
    "powersgd": CodecFacts(32.0, 198.0, (8.0, 0.0), _ALL),
    "onebit": CodecFacts(49.0, 355.0, (20.0, 8.0), ("sgd", "muon")),
    "dgc": CodecFacts(28.0, 151.0, (16.0, 0.0), ("sgd", "muon")),
}
"""Facts about every built-in compressor, in ascending order of distortion."""

UNKNOWN_CODEC = CodecFacts(32.0, 32.0, (8.0, 8.0), ())
"""Facts assumed of a compressor that a user has registered: those of a codec with both residuals."""

EDGE = 0.25
"""Part at the beginning and at the end of a measurement that is ignored, because some ranks may be idle then."""


def codec_facts(name: str) -> CodecFacts:
    """Returns the facts about a compressor; assumed ones if it is not built in.

    Args:
        name: Name in the registry.
    """
    return CODEC_FACTS.get(name, UNKNOWN_CODEC)


def codec_price(
    name: str, layout: Layout, group_size: int, memory_bytes_per_second: float, *, kernels: bool = True
) -> CodecPrice:
    """Returns the cost of a compressor after its warm-up.

    Args:
        name: Name of the compressor.
        layout: Parameters of the gradient; the ratio of PowerSGD depends on their shapes.
        group_size: Ranks that exchange each shard: the number of nodes.
        memory_bytes_per_second: Memory rate of the processor that encodes.
        kernels: Whether it has kernels, see `codec_seconds`.

    Raises:
        ValueError: No such compressor.
    """
    if name == EXACT.name:
        return EXACT
    return CodecPrice(
        name,
        wire_ratio(final(name), layout, group_size),
        codec_seconds(name, memory_bytes_per_second, kernels=kernels),
        rounds=codec_facts(name).rounds,
        owned=owned_share(final(name), layout, group_size),
    )


def codec_seconds(name: str, memory_bytes_per_second: float, *, kernels: bool = True) -> float:
    """Returns the seconds of encoding and decoding for each byte of a shard, predicted from the bytes that are touched.

    Args:
        name: Name of the compressor, built in or registered by a user.
        memory_bytes_per_second: Memory rate of the processor that encodes.
        kernels: Whether it has kernels of gradwire's; False: torch's operators compute.
    """
    facts = codec_facts(name)
    return (facts.touched_nbytes if kernels else facts.operators_nbytes) / ELEMENT_NBYTES / memory_bytes_per_second


def final(name: str) -> Compressor:
    """Makes a compressor by name with default options but no warm-up: as it is in the later steps of training."""
    from gradwire.compressors import registry

    return registry.make(name, {"warmup_steps": 0} if "warmup_steps" in registry.options_of(name) else {})


def short_start(name: str) -> dict[str, "Option"]:
    """Returns the options that end a compressor's warm-up after one step, so that the second step can be measured.

    Args:
        name: Name of the compressor.

    Returns:
        `warmup_steps` of 1; empty if the compressor has no warm-up.
    """
    from gradwire.compressors import registry

    return {"warmup_steps": 1} if "warmup_steps" in registry.options_of(name) else {}


def with_short_start(name: str) -> Compressor:
    """Makes a compressor by name with default options, but a warm-up of one step at most; see `short_start`."""
    from gradwire.compressors import registry

    return registry.make(name, short_start(name))


def wire_ratio(compressor: Compressor, layout: Layout, group_size: int) -> float:
    """Returns the bytes that a rank sends with a compressor, divided by those of a float32 ring all-reduce.

    Args:
        compressor: The compressor.
        layout: Place of each parameter in the shard.
        group_size: Number of ranks that the shard is summed over.

    Returns:
        The ratio; 1.0 for a single rank or an empty shard, for which nothing is sent.
    """
    exact = 2 * (group_size - 1) / group_size * ELEMENT_NBYTES * layout.numel
    if not exact:
        return 1.0
    return compressor.wire_nbytes(layout, group_size) / exact


def owned_share(compressor: Compressor, layout: Layout, group_size: int) -> float:
    """Returns the share of the bytes on the wire that a compressor sends in exchanges with owners; see `has_owners`.

    In such an exchange each rank owns a part of the shard: payloads of the part go to the owner in an all-to-all, and
    their encoded sum comes back in an all-gather. All other bytes are all-reduced (parameters that rules leave
    uncompressed, as biases; PowerSGD's factors), or are payloads that all ranks gather.

    Args:
        compressor: The compressor.
        layout: Place of each parameter in the shard.
        group_size: Number of ranks that the shard is summed over.

    Returns:
        The share, 0 to 1; 0.0 if nothing is sent.
    """
    sent = [(each, each.wire_nbytes(part, group_size)) for each, part in traits_of(compressor).parts(layout)]
    owned = sum(nbytes for each, nbytes in sent if traits_of(each).has_owners)
    return owned / total if (total := sum(nbytes for _, nbytes in sent)) else 0.0


def alone(processor_seconds: float, share: float) -> float:
    """Returns the wall-clock seconds of a computation from this rank's figures alone; the default for `measured_price`.

    Args:
        processor_seconds: Processor seconds of the computation.
        share: Processor seconds that this rank gets in a second: below 1 if more ranks than cores compute, above 1 with
            several threads.
    """
    return processor_seconds / share


def measured_price(
    name: str,
    layout: Layout,
    group_size: int,
    seconds: float = 0.1,
    together: Callable[[], object] = lambda: None,
    agree: Callable[[float, float], float] = alone,
    make: Callable[[], Compressor] | None = None,
) -> CodecPrice:
    """Measures the cost of a compressor on this machine: encodes and decodes for a while, and returns the mean.

    Two sizes, the whole gradient and its first parameter, separate the cost of a call from that of a byte.

    Args:
        name: Name of the compressor.
        layout: Parameters of the gradient that is encoded; more bytes than the caches hold, as in training.
        group_size: Number of ranks that exchange each shard.
        seconds: Seconds for which each size is encoded repeatedly, after a dense round and the first compressed one,
            which allocates memory.
        together: Called before the rounds of each size; returns when all ranks of this machine have called it, so that
            they share its cores as in training. The default does not wait.
        agree: Function from processor seconds and part of a core to wall-clock seconds, as `alone`; may return one
            value for all ranks, so that all choose the same plan.
        make: Makes the compressor; None takes the one of that name with default options.
    """
    if name == EXACT.name:
        return EXACT
    # Time the whole gradient and its first parameter alone.
    group, first = EchoGroup(group_size), Layout(layout.slices[:1])
    (whole, hops, whole_share), (part, _, part_share) = (
        _timed(with_short_start(name) if make is None else make(), each, group, seconds, together)
        for each in (layout, first)
    )
    # Their difference is the cost of the elements; what is left of the small one is the cost of a call.
    whole, part = agree(whole, whole_share), agree(part, part_share)
    per_element = (whole - part) / (layout.numel - first.numel) if len(layout.slices) > 1 else whole / layout.numel
    return CodecPrice(
        name,
        wire_ratio(final(name) if make is None else make(), layout, group_size),
        max(per_element, 0.0) / ELEMENT_NBYTES,
        max(part - per_element * first.numel, 0.0),
        hops,
        group.exchanged,
        owned_share(final(name) if make is None else make(), layout, group_size),
    )


def _timed(
    compressor: Compressor, layout: Layout, group: EchoGroup, seconds: float, together: Callable[[], object]
) -> tuple[float, int, float]:
    """Measures the processor time of one compressed all-reduce of a random gradient, in which nothing is sent.

    The wall-clock time of one all-reduce depends on the scheduler if ranks share cores. So this measures processor
    seconds, and beside them the part of a core that this rank gets; `alone` makes wall-clock seconds of the two. All
    ranks measure for the same time, so that none ends early and leaves its core to the others.

    Args:
        compressor: The compressor; its state is changed.
        layout: Place of each parameter in the gradient.
        group: Simulates the other ranks; its counters are changed.
        seconds: Time for which the all-reduce is repeated, after a dense one and a compressed one that are not timed.
        together: Returns when all ranks of this machine have called it; called before the timed all-reduces.

    Returns:
        Mean processor seconds of an all-reduce; how many times in it all ranks wait for each other, see
        `EchoGroup.rounds`; and processor seconds per second of wall-clock time while all ranks measure.
    """
    from gradwire.compressors.optim.peers import run_requests

    gradient = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")

    def once() -> float:
        shard = gradient.clone()
        began = time.process_time()
        run_requests(compressor.all_reduce(shard, layout, group.member), group)
        took = time.process_time() - began
        compressor.end_step(True)
        return took

    # The first round is dense, the second compressed; count the collectives of the second.
    once()
    before = group.rounds
    once()
    hops = group.rounds - before
    # Repeat rounds for the whole time, and note wall-clock and processor time before each.
    together()
    began, marks, rounds = time.perf_counter(), [(time.perf_counter(), time.process_time())], [once()]
    while (now := time.perf_counter()) < began + seconds:
        marks.append((now, time.process_time()))
        rounds.append(once())
    marks.append((time.perf_counter(), time.process_time()))
    # Take this rank's part of a core from the middle of the measurement, while all ranks compute.
    inside = [mark for mark in marks if EDGE * seconds <= mark[0] - began <= (1 - EDGE) * seconds]
    first, last = (inside[0], inside[-1]) if len(inside) > 1 else (marks[0], marks[-1])
    return statistics.fmean(rounds), hops, (last[1] - first[1]) / (last[0] - first[0])


def layout_of(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> Layout:
    """Makes the layout of a flat gradient in which parameters follow one another.

    Args:
        shapes: (Name, shape) of each parameter, in order.
    """
    slices, start = [], 0
    for name, shape in shapes:
        numel = int(torch.Size(shape).numel())
        slices.append(Slice(name, shape, 0, start, numel))
        start += numel
    return Layout(tuple(slices))


def square_layout(nbytes: float, side: int = 1024) -> Layout:
    """Makes the layout of an unknown model's gradient: square matrices, and the remainder as a vector.

    Args:
        nbytes: Bytes of the gradient in float32.
        side: Rows and columns of a matrix; more beyond 4,096 matrices, as large models have larger ones, not only more.
    """
    numel = max(1, round(nbytes / ELEMENT_NBYTES))
    side = max(side, int((numel // 4096) ** 0.5))
    matrices, rest = divmod(numel, side * side)
    shapes = [(f"matrix{index}", (side, side)) for index in range(matrices)]
    return layout_of([*shapes, ("rest", (rest,))] if rest else shapes)
