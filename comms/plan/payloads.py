"""Cost of a compressor's payloads in a plan: bytes on the wire, and seconds of encoding."""

from gradwire.comms.links.estimates import Links
from gradwire.comms.plan.codec_price import (
    ELEMENT_NBYTES,
    GPU_MEMORY_SHARE,
    SLOWEST_GPU_BYTES_PER_SECOND,
    codec_facts,
    codec_seconds,
    owned_share,
    wire_ratio,
)
from gradwire.comms.plan.cost import CodecPrice
from gradwire.compressors.base import Compressor, Layout
from gradwire.compressors.kernels.dispatch import has_kernels
from gradwire.topology.cluster import Cluster


def gpu_memory_rate(cluster: Cluster) -> float:
    """Returns the bytes per second that a codec moves through the memory of a cluster's GPUs.

    It is a share of their peak bandwidth; for unknown GPUs that of the slowest known one.

    Args:
        cluster: Cluster of GPUs.
    """
    known = cluster.memory_bytes_per_second
    return SLOWEST_GPU_BYTES_PER_SECOND if known is None else GPU_MEMORY_SHARE * known


class Payloads:
    """Cost of the payloads of a communicator's compressor.

    Args:
        compressor: The compressor.
        links: Rates of the links between the ranks.
        device_type: Device of the buckets: `cpu` or `cuda`.

    Attributes:
        library: `nccl` on GPUs, else `gloo`.
        kernels: Whether the compressor has kernels there; without any it computes in torch's operators.
    """

    def __init__(self, compressor: Compressor, links: Links, device_type: str) -> None:
        self.library = "nccl" if device_type == "cuda" else "gloo"
        self.kernels = has_kernels(device_type)
        self._compressor = compressor
        self._links = links

    def price(self, nbytes: int, layout: Layout, group_size: int) -> CodecPrice:
        """Returns the cost of compressing a bucket.

        Args:
            nbytes: Size of the bucket; payloads of 16-bit gradients are as large as those of 32-bit ones.
            layout: Parameters of the bucket.
            group_size: Ranks that exchange each shard.
        """
        name = self._compressor.name
        ratio = wire_ratio(self._compressor, layout, group_size)
        ratio = ratio * ELEMENT_NBYTES * layout.numel / nbytes if nbytes else ratio
        memory = gpu_memory_rate(self._links.cluster)
        codec = codec_seconds(name, memory, kernels=self.kernels) if self.library == "nccl" else 0.0
        owned = owned_share(self._compressor, layout, group_size)
        return CodecPrice(name, ratio, codec, rounds=codec_facts(name).rounds, owned=owned)
