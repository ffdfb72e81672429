"""The advisor's verdict on a running job: measured steps, measured links, codecs timed on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from gradwire.comms.autotune.stepwatch import Observed
from gradwire.comms.plan.advise import Advice, Workload, advise
from gradwire.comms.plan.codec_price import GPU_BYTES_PER_SECOND, codec_price, measured_price, square_layout
from gradwire.comms.plan.price import CodecPrice
from gradwire.compressors import registry
from gradwire.topology.cluster import Cluster

SAMPLE_NBYTES = 16 << 20
"""Gradient that the codecs are timed on: more than the caches of a rank hold, as a model's gradients are."""


@dataclass(frozen=True, slots=True)
class JobAdvice:
    """What `HookState.advise()` gives; `print` it, or read its fields.

    Attributes:
        advice: Every plan and compressor, and the recommendation.
        observed: What the steps are now.
        headroom_seconds: The step without communication: the best that anything could reach.
    """

    advice: Advice
    observed: Observed
    headroom_seconds: float

    def __str__(self) -> str:
        seen, verdict = self.observed, self.advice.recommend
        return (
            f"a step takes {seen.step_seconds * 1e3:.3g} ms, {seen.exposed_seconds * 1e3:.3g} ms of it waiting for "
            f"communication; without any it would take {self.headroom_seconds * 1e3:.3g} ms\n"
            f"recommended: plan {verdict.plan}, compressor {verdict.compressor}. {verdict.why}"
        )


def advise_job(cluster: Cluster, sizes: Sequence[int], observed: Observed, optimizer: str, library: str) -> JobAdvice:
    """Prices every plan and compressor for a job as it was observed.

    Args:
        cluster: Where the ranks are, with the links as measured or assumed.
        sizes: Bytes of the buckets of a step.
        observed: The last steps.
        optimizer: As for `Workload`.
        library: As for `advise`.
    """
    workload = Workload(sum(sizes), observed.backward_seconds, max([*sizes, 1]), optimizer)
    return JobAdvice(
        advise(cluster, workload, prices(len(cluster.nodes), library), library=library),
        observed,
        observed.headroom_seconds,
    )


@lru_cache(maxsize=8)
def prices(nodes: int, library: str) -> tuple[CodecPrice, ...]:
    """What each compressor costs: timed once on a CPU, computed for a GPU, whose memory bandwidth is known.

    Args:
        nodes: Ranks that exchange a shard.
        library: `nccl` where gradients are on GPUs.
    """
    layout = square_layout(SAMPLE_NBYTES, side=256)
    if library == "nccl":
        rate = min(GPU_BYTES_PER_SECOND.values())
        return tuple(codec_price(name, layout, nodes, rate) for name in registry.names())
    return tuple(measured_price(name, layout, nodes) for name in registry.names())
