"""The PCI functions of a machine and the bridges above them, whichever source they were read from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from gradwire.topology.pci_ids import broadcom_generation
from gradwire.topology.readers.pci_config import ConfigSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class PciFunction:
    """Describes one PCI function, as far as it could be read; None is unknown."""

    bus_id: str
    """domain:bus:device.function, lower case."""
    class_code: int | None = None
    """24 bits: class, subclass, programming interface."""
    vendor: int | None = None
    device: int | None = None
    subsystem_vendor: int | None = None
    subsystem_device: int | None = None
    parents: tuple[str, ...] | None = None
    """Bus ids of the bridges above, nearest first, root port last; None if they are unknown."""
    reaches_root: bool = True
    """False if the source may lack bridges above those in `parents`, in which the function may meet others."""
    host_bridge: str | None = None
    """Kernel name of the host bridge, `pci0000:00`."""
    name: str | None = None
    """Model, if the source has it (lspci does, sysfs does not)."""
    driver: str | None = None
    numa_node: int | None = None
    """-1 is the kernel's "no node"."""
    local_cpulist: str | None = None
    current_gigatransfers: float | None = None
    """Link speed now, GT/s per lane."""
    max_gigatransfers: float | None = None
    current_width: int | None = None
    """Lanes in use."""
    max_width: int | None = None
    physical_function: str | None = None
    """Bus id of an SR-IOV virtual function's physical function; None for others."""
    virtual_functions: tuple[str, ...] = ()
    removable: bool = False
    """True if the kernel says that the device lies behind a port that leads out of the machine: Thunderbolt, USB4."""
    iommu_group: int | None = None
    net_devices: tuple[str, ...] = ()
    rdma_devices: tuple[str, ...] = ()
    bar_nbytes: tuple[int, ...] = ()
    """Sizes of the base address registers 0 to 5 (GPUs only)."""
    config: ConfigSpace | None = None
    """Decoded configuration space; None if it was not read (classes that no check needs) or could not be opened."""
    unreadable: tuple[str, ...] = ()
    """Attributes that are there but could not be read."""

    @property
    def base_class(self) -> int | None:
        """Returns the upper 8 bits of the class code: 0x02 network, 0x03 display, 0x06 bridge; None if unknown."""
        return None if self.class_code is None else self.class_code >> 16

    @property
    def is_virtual(self) -> bool:
        """Returns whether this is an SR-IOV virtual function."""
        return self.physical_function is not None


@dataclass(frozen=True, slots=True)
class PciTree:
    """Holds every PCI function by bus id, and sentences on what could not be read."""

    functions: Mapping[str, PciFunction] = field(default_factory=lambda: MappingProxyType({}))
    problems: tuple[str, ...] = ()

    def of_class(self, *base_classes: int) -> list[PciFunction]:
        """Returns the functions of these base classes, in bus order."""
        return [function for function in self.functions.values() if function.base_class in base_classes]

    def chain(self, bus_id: str) -> tuple[str, ...] | None:
        """Returns the bridges above a function, nearest first; for a virtual one, those of its physical function.

        None if the function is not in the tree, or if its bridges are unknown.
        """
        function = self.functions.get(bus_id)
        if function is not None and function.physical_function in self.functions:
            function = self.functions[str(function.physical_function)]
        return None if function is None else function.parents

    def complete(self, bus_id: str) -> bool:
        """Returns whether all bridges above a function, up to the host bridge, are known."""
        function = self.functions.get(bus_id)
        return self.chain(bus_id) is not None and function is not None and function.reaches_root

    def bridges_between(self, one: str, other: str) -> tuple[str, ...] | None:
        """Returns the bridges that traffic between two functions crosses below their common ancestor.

        Without a common ancestor the traffic climbs to the host bridge, so the result has all bridges of both, root
        ports included.

        Args:
            one: Bus id.
            other: Bus id.

        Returns:
            Bus ids, first those above `one`; None if they are not known.
        """
        first, second = self.chain(one), self.chain(other)
        if first is None or second is None:
            return None
        shared = set(first) & set(second)
        if not shared and not (self.complete(one) and self.complete(other)):
            return None
        return tuple(bridge for bridge in (*first, *second) if bridge not in shared)


def path_type(tree: PciTree, one: str, other: str) -> str | None:
    """Returns the path type between two functions under NCCL's name; None if the tree does not show it.

    A switch is two bridges deep in sysfs (upstream port, downstream port), so every second bridge of a chain is a
    switch; the two halves of one Broadcom Gen4/Gen5 switch count as one. LOC: the same function. PIX: one switch. PXB:
    several. PHB: through the host bridge of one NUMA node. SYS: between NUMA nodes.

    Args:
        tree: PCI tree with both functions.
        one: Bus id of one function.
        other: Bus id of the other.

    Source: NCCL src/graph/xml.cc (ncclTopoGetXmlFromSys), src/graph/paths.cc (ncclTopoSetPaths), src/graph/topo.cc
    (ncclTopoFlattenBcmSwitches).
    """
    if one == other:
        return "LOC"
    first, second = _switches(tree, one), _switches(tree, other)
    common = next((switch for switch in first if switch in second), None)
    if common is not None:
        return "PIX" if first[0] == second[0] else "PXB"
    nodes = [tree.functions[bus_id].numa_node if bus_id in tree.functions else None for bus_id in (one, other)]
    if None in nodes:
        return None
    if nodes[0] != nodes[1]:
        return "SYS"
    return "PHB" if tree.complete(one) and tree.complete(other) else None


def _switches(tree: PciTree, bus_id: str) -> list[str]:
    """Returns the bus ids of the switches above a function, nearest first; two halves of one switch as one."""
    switches = list((tree.chain(bus_id) or ())[1::2])
    generations = [(_stacked_generation(tree, s, 1), _stacked_generation(tree, s, 0)) for s in switches]
    for index in range(len(switches) - 2, -1, -1):
        if generations[index][0] and generations[index][0] == generations[index + 1][1]:
            switches[index] = switches[index + 1]
    return list(dict.fromkeys(switches))


def _stacked_generation(tree: PciTree, bus_id: str, level: int) -> int:
    """Returns the PCIe generation, 4 or 5, of a bridge that is half of a stacked Broadcom switch; 0 for all others.

    Args:
        tree: PCI tree; a bridge that is not in it gives 0.
        bus_id: Bus id of the bridge.
        level: 0 asks whether it is an upper half, 1 whether it is a lower one; see `broadcom_generation`.
    """
    bridge = tree.functions.get(bus_id)
    if bridge is None:
        return 0
    return broadcom_generation(bridge.vendor, bridge.device, bridge.subsystem_vendor, bridge.subsystem_device, level)
