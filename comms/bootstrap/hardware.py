"""What a rank knows of its own machine without measuring: how fast it is inside and outwards, and its nearest NIC."""

from dataclasses import replace
from functools import lru_cache

from gradwire.comms.environment import visibility
from gradwire.topology.host_summary import Hardware, host_summary


@lru_cache(maxsize=8)
def hardware(local_rank: int | None, device_type: str) -> Hardware:
    """Reads this host's topology, once a process.

    Args:
        local_rank: Index of this rank on its host; None where the launcher did not say.
        device_type: `cpu` or `cuda`: where the gradients are.
    """
    host = host_summary(local_rank, visibility())
    return host if device_type == "cuda" else replace(host, intra_node=None, fabric=None)
