"""Summary of this rank's machine: the rates inside and to other nodes, and the NICs by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradwire.topology.cluster import GpuFabric

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Hardware:
    """Summarizes one machine for a rank on it: link rates in bytes per second (one direction) and NICs.

    Attributes:
        intra_node: Rate per GPU inside the node; None if unknown, as for ranks that keep their gradients in host
            memory.
        inter_node: Rate of the whole node, over all NICs that its GPUs drive; None if no NIC reports its rate.
        nic: Name of the NIC that this rank should drive; None if it cannot be known.
        interface: Network interface with the address of that NIC's first usable port: its own, or that of the bond or
            bridge it is in. None if it has none.
        fastest: Names of all NICs of the machine that are as fast as its fastest.
        nics: Number of NICs whose rates `inter_node` sums; None without GPUs.
        fabric: Properties of the GPUs for NCCL's cost model; None for ranks that keep their gradients in host memory,
            and if they are not known.
        nic_unknown: Reason why `nic` is None, if the rank's GPU cannot be determined; empty otherwise.
        nvlink_domain: NVLink domain of several hosts that all GPUs of the machine have joined; empty if there is none.
        memory_bytes_per_second: Peak bandwidth of the slowest GPU's memory; None for ranks that keep their gradients in
            host memory, and for MIG slices.
    """

    intra_node: float | None
    inter_node: float | None
    nic: str | None
    interface: str | None = None
    fastest: tuple[str, ...] = ()
    nics: int | None = None
    fabric: GpuFabric | None = None
    nic_unknown: str = ""
    nvlink_domain: str = ""
    memory_bytes_per_second: float | None = None


def host_summary(local_rank: int | None, variables: Mapping[str, str] | None = None) -> Hardware:
    """Reads this machine's topology and returns what a rank needs of it.

    The readers are imported here: importing the comm hook needs none of them, and only a communicator calls this.

    Args:
        local_rank: Index of the rank on this machine; None if the launcher did not set it: no NIC is chosen then.
        variables: Name -> value of those variables in `visible.VARIABLES` that are set for the rank; None means none.

    Raises:
        TopologyError: The machine has no folder /sys.
    """
    from gradwire.topology.assign import fastest_nics, nic_for_local_rank, nics_of_gpus
    from gradwire.topology.fabric import fabric_of, slowest_memory
    from gradwire.topology.labels import nic_name
    from gradwire.topology.levels import levels_of
    from gradwire.topology.readers.detect import detect_machine
    from gradwire.topology.visible import visible_gpus, without_idle_gpus

    machine = detect_machine()
    used = without_idle_gpus(machine, variables or {})
    intra, inter = levels_of(used)
    nic = nic_for_local_rank(machine, local_rank, variables or {}) if local_rank is not None else None
    driven = {card.key for card in nics_of_gpus(used).values() if card is not None}
    up = () if nic is None else (port for port in nic.ports if port.carries)
    return Hardware(
        intra_node=intra.bytes_per_second,
        inter_node=inter.bytes_per_second,
        nic=nic_name(nic) if nic else None,
        nic_unknown="" if nic or local_rank is None else visible_gpus(machine, variables or {}).why,
        interface=next((port.above or port.bond or name for port in up for name in port.interfaces), None),
        fastest=tuple(nic_name(fast) for fast in fastest_nics(machine.nics)),
        nics=len(driven) or None,
        fabric=fabric_of(used),
        nvlink_domain=machine.nvlink_domain or "",
        memory_bytes_per_second=slowest_memory(used),
    )
