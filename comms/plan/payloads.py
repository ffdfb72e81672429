"""What a compressor sends in a plan, and whether exponents are packed in it: links save by fewer bytes, CPUs pay."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from gradwire.comms.links.links import Links
from gradwire.comms.plan.codec_price import (
    CPU_BYTES_PER_SECOND,
    ELEMENT_NBYTES,
    GPU_BYTES_PER_SECOND,
    codec_facts,
    codec_seconds,
    gpu_bytes_per_second,
    owned_share,
    wire_ratio,
)
from gradwire.comms.plan.cost import EXCHANGE_ROUNDS, CodecPrice
from gradwire.comms.plan.plan import Plan
from gradwire.comms.plan.planner import candidates
from gradwire.compressors.base import Compressor, Layout, Packer, planned
from gradwire.topology.cluster import Cluster

NEVER = 2.0
"""`Member.break_even` where no saving is enough."""

BUSY_PACKING_SECONDS = 14e-9
"""What packing takes for an element of a shard where the processor is busy: 4 ranks on the 2 cores of an EPYC VM, with
the messages about lengths (`bench/studies/hook_speed.py`, 16 MB, 1 Gbit/s, 2026-11-22). With a core for each rank it is
2 ns; but a plan must not count on idle cores beside a backward pass."""

BREAK_EVEN_HALVINGS = 10
"""Halvings of the interval that holds the share: to a thousandth."""


def packing_break_even(cluster: Cluster, plan: Plan, library: str) -> float:
    """The share of bf16's bytes that packing must save, to take no more time in a plan than it costs a busy CPU.

    As if nothing overlapped: what packs one chunk while another is on the wire has no core of its own.

    Args:
        cluster: Where the ranks are and what the links give; the same on all ranks.
        plan: With a compressed phase.
        library: `nccl` on GPUs.

    Returns:
        `NEVER` where none is enough, and on GPUs; 0 where nothing is known of the links.
    """
    if library == "nccl":
        return NEVER
    from gradwire.compressors.codecs.packed_cast import PackedCast  # here: exact plans need no compressor

    levels = {phase.level for phase in plan.phases if phase.compressor}
    if not levels or any(cluster.levels[level].link.presumed for level in levels):
        return 0.0

    def seconds(name: str, share: float, extra: float) -> float:
        codec = codec_seconds("bf16", CPU_BYTES_PER_SECOND) + extra / ELEMENT_NBYTES
        price = CodecPrice(name, 2 / ELEMENT_NBYTES * share, codec, rounds=codec_facts(name).rounds)
        (priced,) = candidates(cluster, plan.nbytes, plan.name, 1, price)
        return priced.seconds

    plain, packed = seconds("bf16", 1.0, 0.0), partial(seconds, PackedCast.name, extra=BUSY_PACKING_SECONDS)
    low, high = 0.0, 1.0
    if packed(0.0) >= plain:
        return NEVER
    for _ in range(BREAK_EVEN_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if packed(1 - middle) < plain else (middle, high)
    return high


def price_as_sent(
    cluster: Cluster, nbytes: int, plan_name: str, price: CodecPrice, prices: Sequence[CodecPrice], library: str
) -> CodecPrice:
    """The price of a compressor for a bucket: `bf16_packed` costs what `bf16` does where its exponents are not packed.

    Args:
        cluster: As for `packing_break_even`.
        nbytes: Of the bucket, at least 1.
        plan_name: `flat`, `hierarchical` or `leader`.
        price: As `codec_price` or `measured_price` makes it.
        prices: Of other compressors; `bf16`'s, if it is among them, is taken.
        library: As for `packing_break_even`.
    """
    from gradwire.compressors.codecs.packed_cast import PACKED_SHARE, PackedCast  # here: as above

    if price.name != PackedCast.name:
        return price
    (plan,) = candidates(cluster, nbytes, plan_name, 1, price)
    if 1 - PACKED_SHARE > packing_break_even(cluster, plan, library):
        return price
    scaled = replace(price, ratio=price.ratio / PACKED_SHARE, rounds=EXCHANGE_ROUNDS)
    return replace(next((each for each in prices if each.name == "bf16"), scaled), name=price.name)


def gpu_memory(cluster: Cluster) -> float:
    """Bytes per second that codecs move on the slowest GPU; of the slowest known where it is not known."""
    fabric = cluster.fabric
    return min(GPU_BYTES_PER_SECOND.values()) if fabric is None else gpu_bytes_per_second(fabric.compute_capability)


class Payloads:
    """What a communicator's compressor sends in a plan, and how long that takes as the links are known now.

    Args:
        compressor: Whose payloads.
        links: Of the ranks.
        device_type: Where the buckets are: `cpu` or `cuda`.

    Attributes:
        library: `nccl` on GPUs, else `gloo`.
    """

    def __init__(self, compressor: Compressor, links: Links, device_type: str) -> None:
        self.library = "nccl" if device_type == "cuda" else "gloo"
        self._compressor = compressor
        self._links = links
        self._device_type = device_type
        self._packers = [cast(Packer, each) for each in planned(compressor).every() if isinstance(each, Packer)]

    @property
    def packs(self) -> bool:
        """Whether exponents may be packed."""
        return bool(self._packers)

    def watch(self, on: bool) -> None:
        """Begins or ends to pack nothing, so that transfers show what the links give; with nothing in flight."""
        for each in self._packers:
            each.watched = on

    def price(self, nbytes: int, layout: Layout, group_size: int, plan: Plan | None = None) -> CodecPrice:
        """What the compressor does to a bucket.

        Args:
            nbytes: Of the bucket; payloads of 16-bit gradients are as large as of 32-bit ones.
            layout: Of the bucket.
            group_size: Ranks that exchange each shard.
            plan: Decides whether exponents are packed; without one they are.
        """
        compressor, packers = self._compressor, self._packers
        even = 0.0 if plan is None or not packers else self.break_even(plan)

        def sent(each: Compressor, part: Layout, size: int) -> int:
            if isinstance(each, Packer) and plan is not None:
                return each.expected_nbytes(part, size, even, self._device_type)
            return each.wire_nbytes(part, size)

        ratio = wire_ratio(compressor, layout, group_size, sent if packers else None)
        ratio = ratio * ELEMENT_NBYTES * layout.numel / nbytes if nbytes else ratio
        expects = any(each.expects_to_pack(even, self._device_type) for each in packers)
        packing = expects if plan is not None else bool(packers)
        plain = {each.name: each.plain_name for each in packers}
        name = packers[0].name if packing else plain.get(compressor.name, compressor.name)
        codec = codec_seconds(name, gpu_memory(self._links.cluster)) if self.library == "nccl" else 0.0
        owned = owned_share(compressor, layout, group_size)
        return CodecPrice(compressor.name, ratio, codec, rounds=codec_facts(name).rounds, owned=owned)

    def break_even(self, plan: Plan) -> float:
        """See `Member.break_even`, of the compressed phase of a plan; the same on all ranks."""
        if not self._packers:
            return 0.0
        return packing_break_even(self._links.priced_for(plan), plan, self.library)

    def note(self, plan: Plan) -> str:
        """What the compressor says of its payloads in a plan; empty where it has no choice."""
        if not self._packers or not any(phase.compressor for phase in plan.phases):
            return ""
        even = self.break_even(plan)
        notes = (each.payload_note(even, self._device_type) for each in self._packers)
        return " ".join(dict.fromkeys(notes))
