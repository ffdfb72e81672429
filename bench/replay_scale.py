"""How a replay is made to fit a small machine: less of everything by one factor, in slow motion.

Gradients have 1/F of their elements, DDP's buckets and the links 1/F of theirs: every ratio of seconds stays. What does
not shrink is what a message costs a processor, and dozens of ranks share a few cores here. So everything also lasts T
times as long: waits T times, links 1/T of the rate, until that cost is small beside them.
"""

from dataclasses import dataclass

from gradwire.bench.replay import FORWARD_SHARE, ReplayCase

MOST_GRADIENT_NBYTES = 9_000_000
"""With 32 ranks and five contenders the buffers then take some 5 GB, and a flat all-reduce 0.5 s of two cores."""

STEP_SECONDS = 2.5
"""About how long a step of plain DDP shall last: five contenders and seven steps of each take a minute and a half."""

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
        """Rate of an emulated link that stands for one of `bits_per_second`."""
        return bits_per_second // (self.factor * self.slow_motion)


def fit_scale(case: ReplayCase, ranks: int, bits_per_second: int, factor: int | None, slow_motion: int | None) -> Scale:
    """The scale of a replay on emulated nodes.

    Args:
        case: What is replayed.
        ranks: In all.
        bits_per_second: Of the real links.
        factor: As the user wants it; None: the smallest power of two that leaves `MOST_GRADIENT_NBYTES`.
        slow_motion: As the user wants it; None: what makes a step last about `STEP_SECONDS`.
    """
    if factor is None:
        factor = 1
        while case.nbytes > factor * MOST_GRADIENT_NBYTES:
            factor *= 2
    if slow_motion is None:
        # A flat ring through the link while the backward pass runs, see docs/algorithms.md.
        ring = 2 * (ranks - 1) / ranks * case.nbytes * 8 / bits_per_second
        step = case.step_seconds * FORWARD_SHARE + max(case.step_seconds * (1 - FORWARD_SHARE), ring)
        slow_motion = max(1, round(STEP_SECONDS / step))
    return Scale(factor, slow_motion)
