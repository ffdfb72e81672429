"""Whether exponents are packed in a plan: from what links save by fewer bytes, and what packing costs a busy CPU."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from gradwire.comms.plan.codec_price import CPU_BYTES_PER_SECOND, ELEMENT_NBYTES, ROUNDS, codec_seconds
from gradwire.comms.plan.cost import EXCHANGE_ROUNDS, CodecPrice
from gradwire.comms.plan.plan import Plan
from gradwire.comms.plan.planner import candidates
from gradwire.topology.cluster import Cluster

NEVER = 2.0
"""`Member.break_even` where no saving is enough."""

BUSY_PACKING_SECONDS = 14e-9
"""What packing takes for an element of a shard where the processor is busy: 4 ranks on the 2 cores of an EPYC VM, with
the messages about lengths (`bench/studies/hook_speed.py`, 16 MB, 1 Gbit/s, 2026-11-22). With a core for each rank it is
2 ns; but a plan must not count on idle cores beside a backward pass."""

BREAK_EVEN_HALVINGS = 10
"""To a thousandth."""


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
        price = CodecPrice(name, 2 / ELEMENT_NBYTES * share, codec, rounds=ROUNDS.get(name, EXCHANGE_ROUNDS))
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
