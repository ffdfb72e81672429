"""What a rank knows of its own machine without measuring: how fast it is inside and outwards, and its nearest NIC."""

from dataclasses import dataclass
from functools import lru_cache

from gradwire.comms.config import visibility
from gradwire.topology.cluster import GpuFabric


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates in bytes per second, one direction; None is unknown (a virtual NIC, a link nobody published).

    Attributes:
        intra_node: Per GPU, inside the node; unknown for ranks that keep their gradients in host memory.
        inter_node: Of the whole node, over the NICs that its GPUs drive.
        nic: The NIC that this rank should drive; None where nothing is known about it.
        interface: Its network interface; None where it has none.
        nic_unknown: Why `nic` is None, where that is because nobody can tell which GPU the rank has.
        fastest: All NICs of the machine that are as fast as its fastest.
        nics: NICs that `inter_node` is of, all together.
        fabric: What NCCL's cost model asks about the GPUs; None for ranks that keep their gradients in host memory, and
            where it is not known.
    """

    intra_node: float | None
    inter_node: float | None
    nic: str | None
    interface: str | None = None
    fastest: tuple[str, ...] = ()
    nics: int | None = None
    fabric: GpuFabric | None = None
    nic_unknown: str = ""


@lru_cache(maxsize=8)
def hardware(local_rank: int | None, device_type: str) -> Hardware:
    """Reads this host's topology, once a process.

    Args:
        local_rank: Index of this rank on its host; None where the launcher did not say.
        device_type: `cpu` or `cuda`: where the gradients are.
    """
    from gradwire.topology.host_summary import host_summary  # here: ranks of one host have nobody to reach

    host = host_summary(local_rank, visibility())
    return Hardware(
        intra_node=host.intra_node_bytes_per_second if device_type == "cuda" else None,
        inter_node=host.inter_node_bytes_per_second,
        nic=host.nic,
        interface=host.interface,
        fastest=host.fastest_nics,
        nics=host.nics,
        nic_unknown=host.nic_unknown,
        fabric=host.fabric if device_type == "cuda" else None,
    )
