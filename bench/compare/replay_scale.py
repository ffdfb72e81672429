"""How a replay is made to fit a small machine: less of everything by one factor, in slow motion.

Gradients have 1/F of their elements, DDP's buckets and the links 1/F of theirs: every ratio of seconds stays. What does
not shrink is what a message costs a processor, and dozens of ranks share a few cores here. So everything also lasts T
times as long: waits T times, links 1/T of the rate, until that cost is small beside them.
"""

import math
import os
from dataclasses import dataclass

from gradwire.bench.compare.replay import FORWARD_SHARE, ReplayCase

MOST_GRADIENT_NBYTES = 9_000_000
"""With 32 ranks and five contenders the buffers then take some 5 GB."""

MESSAGE_SECONDS = 130e-6
"""Processor time of one message of gloo's ring, all told, with 16 or 32 ranks on one machine, of 60 B to 25 KB alike.

Measured: all_reduce without a limited link, AMD EPYC, 2 cores, torch 2.13.0, 2026-11-21: 104 to 135 us at 16 ranks, 128
to 142 us at 32.
"""

MESSAGE_SHARE = 1 / 6
"""A step of plain DDP shall last so long that its messages, if nothing hides them, take this part of it."""

LEAST_STEP_SECONDS, MOST_STEP_SECONDS = 4.0, 11.0
"""Bounds of that: four steps of each of five contenders take three minutes at most."""

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
        """For DDP's `bucket_cap_mb`: as many buckets as the whole network has."""
        return DDP_BUCKET_MEGABYTES / self.factor

    def link(self, bits_per_second: int) -> int:
        """Rate of an emulated link or connection that stands for one of `bits_per_second`."""
        return bits_per_second // (self.factor * self.slow_motion)


def plain_step_seconds(case: ReplayCase, ranks: int, bits_per_second: int) -> float:
    """A real step of plain DDP: a flat ring fills its link while the backward pass runs, and goes on after it.

    Args:
        case: What is replayed.
        ranks: In all, seated node by node.
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
    """The scale of a replay on emulated nodes.

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
