"""What a rank needs to know of its own machine: how fast it is inside and outwards, and its NICs by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradwire.topology.cluster import GpuFabric

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates in bytes per second, one direction; None is unknown (a virtual NIC, a link nobody published).

    Attributes:
        intra_node: Per GPU, inside the node; unknown for ranks that keep their gradients in host memory.
        inter_node: Of the whole node, over the NICs that its GPUs drive.
        nic: The NIC that this rank should drive; None where nothing is known about it.
        interface: Network interface of that NIC's first port that is up; the bond or bridge it is in, which has the
            address. None where it has none.
        fastest: All NICs of the machine that are as fast as its fastest.
        nics: NICs that `inter_node` is of, all together.
        fabric: What NCCL's cost model asks about the GPUs; None for ranks that keep their gradients in host memory, and
            where it is not known.
        nic_unknown: Why `nic` is None, where that is because nobody can tell which GPU the rank has.
    """

    intra_node: float | None
    inter_node: float | None
    nic: str | None
    interface: str | None = None
    fastest: tuple[str, ...] = ()
    nics: int | None = None
    fabric: GpuFabric | None = None
    nic_unknown: str = ""


def host_summary(local_rank: int | None, variables: Mapping[str, str] | None = None) -> Hardware:
    """Reads this machine's topology and returns what a rank needs of it.

    The readers are imported here: importing the comm hook needs none of them, and only a communicator calls this.

    Args:
        local_rank: Index of the rank on this machine; None where the launcher did not say, and no NIC is chosen then.
        variables: Those of `visible.VARIABLES` that are set for the rank.
    """
    from gradwire.topology.assign import fastest_nics, nic_for_local_rank, nics_of_gpus
    from gradwire.topology.fabric import fabric_of
    from gradwire.topology.labels import nic_name
    from gradwire.topology.levels import levels_of
    from gradwire.topology.readers.detect import detect_machine
    from gradwire.topology.visible import visible_gpus

    machine = detect_machine()
    intra, inter = levels_of(machine)
    nic = nic_for_local_rank(machine, local_rank, variables or {}) if local_rank is not None else None
    driven = {card.key for card in nics_of_gpus(machine).values() if card is not None}
    up = () if nic is None else (port for port in nic.ports if port.carries)
    return Hardware(
        intra_node=intra.bytes_per_second,
        inter_node=inter.bytes_per_second,
        nic=nic_name(nic) if nic else None,
        nic_unknown="" if nic or local_rank is None else visible_gpus(machine, variables or {}).why,
        interface=next((port.above or port.bond or name for port in up for name in port.interfaces), None),
        fastest=tuple(nic_name(fast) for fast in fastest_nics(machine.nics)),
        nics=len(driven) or None,
        fabric=fabric_of(machine),
    )
