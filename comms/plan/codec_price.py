"""What compression costs and saves: bytes on the wire, and seconds of encoding and decoding.

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
from gradwire.compressors.base import Compressor, Layout, Slice, planned
from gradwire.topology.bandwidth import AMD_MEMORY, GIGABYTE, GPU_MEMORY

if TYPE_CHECKING:  # compressors are loaded where one is priced: exact plans need none
    from gradwire.compressors.registry import Option

ELEMENT_NBYTES = 4
"""Gradients are float32 when they are encoded."""

CPU_BYTES_PER_SECOND = 20e9
"""What one core moves through memory in such kernels, payload buffers included: EPYC (Zen 4), 8 MiB gradients, 2026."""

GPU_MEMORY_SHARE = 0.7
"""Share of a GPU's peak memory bandwidth that kernels reach which only move data."""

SLOWEST_GPU_BYTES_PER_SECOND = GPU_MEMORY_SHARE * min(*GPU_MEMORY.values(), *AMD_MEMORY.values()) * GIGABYTE
"""What codecs are taken to move on a GPU of which nothing is known."""


@dataclass(frozen=True, slots=True)
class CodecFacts:
    """Facts about a compressor that predictions and advice need.

    Attributes:
        touched_nbytes: Bytes that encoding and decoding read and write for each element of a shard, residual and
            momentum included: encode (gradient in, residual in and out, payload out), decode and sum a slice, decode
            the result. One pass each; onebit has two more, for its units.
        kept_nbytes: Bytes that it keeps from step to step for each element of a shard, and for each element of the part
            of it that a rank owns. A residual or a momentum is two float32: the value, and the one that takes its place
            when the step is known to be finite; onebit's units are one. PowerSGD's factors, which are small, are left
            out.
        trained: Optimizers of `OPTIMIZER_NAMES` with which docs/results/convergence.md or docs/results/optimizers.md
            has a training. It is recommended with these only.
        rounds: Exchanges of every member with every other.
    """

    touched_nbytes: float
    kept_nbytes: tuple[float, float]
    trained: tuple[str, ...]
    rounds: int = EXCHANGE_ROUNDS


OPTIMIZER_NAMES = {"sgd": "SGD", "adamw": "AdamW", "muon": "Muon"}
"""Optimizers with which compressors were tested in trainings, with their names in sentences."""
_ALL = tuple(OPTIMIZER_NAMES)

CODEC_FACTS = {
    "none": CodecFacts(0.0, (0.0, 0.0), _ALL),
    "bf16": CodecFacts(14.0, (0.0, 0.0), _ALL),
    "fp16": CodecFacts(14.0, (0.0, 0.0), _ALL),
    "int8": CodecFacts(19.0, (8.0, 8.0), _ALL),
    "waterfill5": CodecFacts(18.5, (8.0, 8.0), ("muon",)),
    "waterfill4": CodecFacts(18.0, (8.0, 8.0), _ALL),
    "waterfill3": CodecFacts(18.0, (8.0, 8.0), ("adamw", "muon")),
    "int4": CodecFacts(18.0, (8.0, 8.0), _ALL),
    "waterfill2": CodecFacts(17.0, (8.0, 8.0), ("adamw", "muon")),
    "powersgd": CodecFacts(32.0, (8.0, 0.0), _ALL),
    "onebit": CodecFacts(49.0, (20.0, 8.0), ("sgd", "muon")),
    "dgc": CodecFacts(28.0, (16.0, 0.0), ("sgd", "muon")),
}
"""Facts about every built-in compressor, in ascending order of distortion."""

UNKNOWN_CODEC = CodecFacts(32.0, (8.0, 8.0), ())
"""Facts assumed of a compressor that a user has registered: those of a codec with both residuals."""

EDGE = 0.25
"""Part at the beginning and at the end of a measurement that is ignored, because some ranks may be idle then."""


def codec_facts(name: str) -> CodecFacts:
    """Returns the facts about a compressor; assumed ones if it is not built in.

    Args:
        name: Name in the registry.
    """
    return CODEC_FACTS.get(name, UNKNOWN_CODEC)


def codec_price(name: str, layout: Layout, group_size: int, memory_bytes_per_second: float) -> CodecPrice:
    """Returns the cost of a compressor after its warm-up.

    Args:
        name: Name of the compressor.
        layout: Parameters of the gradient; the ratio of PowerSGD depends on their shapes.
        group_size: Ranks that exchange each shard: the number of nodes.
        memory_bytes_per_second: Memory rate of the processor that encodes.

    Raises:
        ValueError: No such compressor.
    """
    if name == EXACT.name:
        return EXACT
    return CodecPrice(
        name,
        wire_ratio(final(name), layout, group_size),
        codec_seconds(name, memory_bytes_per_second),
        rounds=codec_facts(name).rounds,
        owned=owned_share(final(name), layout, group_size),
    )


def codec_seconds(name: str, memory_bytes_per_second: float) -> float:
    """Seconds of encoding and decoding for each byte of a shard, by the bytes that the kernels touch.

    Args:
        name: Of the compressor; also one that a user has registered.
        memory_bytes_per_second: Memory rate of the processor that encodes.
    """
    return codec_facts(name).touched_nbytes / ELEMENT_NBYTES / memory_bytes_per_second


def final(name: str) -> Compressor:
    """A compressor by name, with its defaults but without a warm-up."""
    from gradwire.compressors import registry

    return registry.make(name, {"warmup_steps": 0} if "warmup_steps" in registry.options_of(name) else {})


def short_start(name: str) -> dict[str, "Option"]:
    """Options with which a compressor's first step is its last dense one: the next is as in the middle of training."""
    from gradwire.compressors import registry

    return {"warmup_steps": 1} if "warmup_steps" in registry.options_of(name) else {}


def settling(name: str) -> Compressor:
    """A compressor by name, with its defaults but `short_start`."""
    from gradwire.compressors import registry

    return registry.make(name, short_start(name))


def wire_ratio(compressor: Compressor, layout: Layout, group_size: int) -> float:
    """Bytes that a rank sends over those of a ring all-reduce of the same elements in float32; 1 where none travel.

    Args:
        compressor: Whose payloads.
        layout: Which parameter lies where in the shard.
        group_size: Ranks that the shard is summed over.
    """
    exact = 2 * (group_size - 1) / group_size * ELEMENT_NBYTES * layout.numel
    if not exact:
        return 1.0
    return compressor.wire_nbytes(layout, group_size) / exact


def owned_share(compressor: Compressor, layout: Layout, group_size: int) -> float:
    """Part of the bytes that a compressor sends as payloads to owners of parts, who send their sum to all.

    Not so what it has summed exactly (biases, by the default rules; PowerSGD's factors), and what everybody gathers.

    Args:
        compressor: Whose payloads.
        layout: Which parameter lies where in the shard.
        group_size: Ranks that the shard is summed over.
    """
    sent = [(each, each.wire_nbytes(part, group_size)) for each, part in planned(compressor).parts(layout)]
    owned = sum(nbytes for each, nbytes in sent if planned(each).has_owners)
    return owned / total if (total := sum(nbytes for _, nbytes in sent)) else 0.0


def alone(processor_seconds: float, share: float) -> float:
    """Seconds that pass while a process computes for `processor_seconds`, having `share` of a core.

    The share is below 1 where more ranks than cores compute, above 1 where a rank has several threads.
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
    """The price with encoding and decoding timed here: the mean of as many rounds as a while takes.

    Two sizes, the whole gradient and its first parameter, separate the cost of a call from that of a byte.

    Args:
        name: As in `compressor=`.
        layout: What is encoded, in several parameters: more than the caches hold, as a model's gradients are.
        group_size: As for `codec_price`.
        seconds: How long each size is encoded again and again, after a dense round and the first compressed one, which
            takes its memory.
        together: Returns when all ranks of this machine have arrived, where they measure together, as they share its
            cores in training. Called before the rounds of a size; between them nobody waits.
        agree: As `alone`, but makes one number of all ranks', so that all of them plan alike.
        make: Makes the compressor, where it is not the one of that name with its defaults.
    """
    if name == EXACT.name:
        return EXACT
    group, first = EchoGroup(group_size), Layout(layout.slices[:1])
    (whole, hops, whole_share), (part, _, part_share) = (
        _timed(settling(name) if make is None else make(), each, group, seconds, together) for each in (layout, first)
    )
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
    """What an all-reduce takes in which nothing travels.

    What the processor needs for a round and what share of it there is are measured apart: where ranks share cores, a
    round's own time is that of the scheduler's turns, some short and some long. A time and not a number of rounds, so
    that no rank ends early and leaves its core to the others.

    Returns:
        Processor seconds of a round (the mean), how often it would have waited for all ranks, and this rank's share of
        a core.
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

    once()
    before = group.rounds
    once()
    hops = group.rounds - before
    together()
    began, marks, rounds = time.perf_counter(), [(time.perf_counter(), time.process_time())], [once()]
    while (now := time.perf_counter()) < began + seconds:
        marks.append((now, time.process_time()))
        rounds.append(once())
    marks.append((time.perf_counter(), time.process_time()))
    inside = [mark for mark in marks if EDGE * seconds <= mark[0] - began <= (1 - EDGE) * seconds]
    first, last = (inside[0], inside[-1]) if len(inside) > 1 else (marks[0], marks[-1])
    return statistics.fmean(rounds), hops, (last[1] - first[1]) / (last[0] - first[0])


def layout_of(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> Layout:
    """The layout of parameters one after another.

    Args:
        shapes: Name and shape of each.
    """
    slices, start = [], 0
    for name, shape in shapes:
        numel = int(torch.Size(shape).numel())
        slices.append(Slice(name, shape, 0, start, numel))
        start += numel
    return Layout(tuple(slices))


def square_layout(nbytes: float, side: int = 1024) -> Layout:
    """A gradient of `nbytes` of which nothing else is known: square matrices, and the remainder as a vector."""
    numel = max(1, round(nbytes / ELEMENT_NBYTES))
    matrices, rest = divmod(numel, side * side)
    shapes = [(f"matrix{index}", (side, side)) for index in range(matrices)]
    return layout_of([*shapes, ("rest", (rest,))] if rest else shapes)
