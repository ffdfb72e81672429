"""What a rank knows of its own machine without measuring: how fast it is inside and outwards, and its nearest NIC."""

from dataclasses import dataclass
from functools import lru_cache

from gradwire.topology.assign import fastest_nics, nic_for_local_rank
from gradwire.topology.graph import Nic
from gradwire.topology.labels import nic_name
from gradwire.topology.levels import levels_of
from gradwire.topology.readers.detect import detect


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates in bytes per second, one direction; None is unknown (a virtual NIC, a link nobody published).

    Attributes:
        intra_node: Per GPU, inside the node; unknown for ranks that keep their gradients in host memory.
        inter_node: Of the whole node, over the NICs that its GPUs drive.
        nic: The NIC that this rank should drive; None where nothing is known about it.
        interface: Its network interface; None where it has none.
        fastest: All NICs of the machine that are as fast as its fastest.
    """

    intra_node: float | None
    inter_node: float | None
    nic: str | None
    interface: str | None = None
    fastest: tuple[str, ...] = ()


@lru_cache(maxsize=8)
def hardware(local_rank: int | None, device_type: str) -> Hardware:
    """Reads this host's topology, once a process.

    Args:
        local_rank: Index of this rank on its host; None where the launcher did not say.
        device_type: `cpu` or `cuda`: where the gradients are.
    """
    machine = detect()
    intra, inter = levels_of(machine)
    nic = nic_for_local_rank(machine, local_rank) if local_rank is not None else None
    return Hardware(
        intra_node=intra.bytes_per_second if device_type == "cuda" else None,
        inter_node=inter.bytes_per_second,
        nic=nic_name(nic) if nic else None,
        interface=_interface(nic) if nic else None,
        fastest=tuple(nic_name(fast) for fast in fastest_nics(machine.nics)),
    )


def _interface(nic: Nic) -> str | None:
    """The network interface of the first port that is not down."""
    up = (port for port in nic.ports if port.active is not False)
    return next((name for port in up for name in port.interfaces), None)
