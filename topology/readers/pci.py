"""The PCI tree below a root folder: `lspci -tvv` from sysfs, of this machine or of a captured one."""

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from gradwire.topology.readers.pci_attributes import (
    BUS_ID,
    Attributes,
    bar_nbytes,
    bus_id,
    children,
    gigatransfers,
    integer,
    parents,
)
from gradwire.topology.readers.pci_config import ConfigSpace

DEVICES = "sys/bus/pci/devices"
PATH_TYPES = ("LOC", "PIX", "PXB", "PHB", "SYS")
"""Names that PCI alone can tell apart, nearest first. Source: NCCL src/include/graph.h."""

_MAX_FUNCTIONS = 65536
_ENDPOINTS = (0x02, 0x03, 0x12)  # network, display, accelerator
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PciFunction:
    """One function on the bus, as far as it could be read; None is unknown."""

    bus_id: str
    """domain:bus:device.function, lower case."""
    class_code: int | None = None
    """24 bits: class, subclass, programming interface."""
    vendor: int | None = None
    device: int | None = None
    subsystem_vendor: int | None = None
    subsystem_device: int | None = None
    parents: tuple[str, ...] | None = None
    """Bus ids of the bridges above, nearest first, root port last; None when the tree does not say."""
    host_bridge: str | None = None
    """Kernel name of the host bridge, `pci0000:00`."""
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
    """For an SR-IOV virtual function: bus id of its physical function."""
    virtual_functions: tuple[str, ...] = ()
    iommu_group: int | None = None
    net_devices: tuple[str, ...] = ()
    rdma_devices: tuple[str, ...] = ()
    bar_nbytes: tuple[int, ...] = ()
    """Sizes of the base address registers 0 to 5 (GPUs only)."""
    config: ConfigSpace | None = None
    """None where it was not read (classes that no check asks about) or could not be opened."""
    unreadable: tuple[str, ...] = ()
    """Attributes that are there but could not be read."""

    @property
    def base_class(self) -> int | None:
        """The class alone: 0x02 network, 0x03 display, 0x06 bridge."""
        return None if self.class_code is None else self.class_code >> 16

    @property
    def is_bridge(self) -> bool:
        """A PCI-to-PCI bridge: a root port or one port of a switch."""
        return self.class_code is not None and self.class_code >> 8 == 0x0604

    @property
    def is_virtual(self) -> bool:
        """An SR-IOV virtual function."""
        return self.physical_function is not None


@dataclass(frozen=True, slots=True)
class PciTree:
    """Every function by bus id, and what could not be read."""

    functions: Mapping[str, PciFunction] = field(default_factory=lambda: MappingProxyType({}))
    problems: tuple[str, ...] = ()

    def of_class(self, *base_classes: int) -> list[PciFunction]:
        """Functions of these base classes, in bus order."""
        return [function for function in self.functions.values() if function.base_class in base_classes]

    def chain(self, bus_id: str) -> tuple[str, ...] | None:
        """Bridges above a function, nearest first; a virtual function hangs where its physical function does."""
        function = self.functions.get(bus_id)
        if function is not None and function.physical_function in self.functions:
            function = self.functions[str(function.physical_function)]
        return None if function is None else function.parents

    def bridges_between(self, one: str, other: str) -> tuple[str, ...] | None:
        """Ports that traffic between two functions crosses, below their common ancestor; None when unknown.

        Without a common ancestor the traffic climbs to the host bridge, so all bridges of both, root ports included.
        """
        first, second = self.chain(one), self.chain(other)
        if first is None or second is None:
            return None
        shared = set(first) & set(second)
        return tuple(bridge for bridge in (*first, *second) if bridge not in shared)

    def common_ancestor(self, one: str, other: str) -> str | None:
        """The nearest bridge above both functions, None when only the host bridge is (or nothing is known)."""
        first, second = self.chain(one), set(self.chain(other) or ())
        return next((bridge for bridge in first or () if bridge in second), None)


def path_type(tree: PciTree, one: str, other: str, *, flatten: bool = True) -> str | None:
    """Names the distance between two functions as NCCL does; None when the tree does not say.

    A switch is two bridges deep in sysfs (upstream port, downstream port), so every second bridge of a chain is a
    switch. LOC: the same function. PIX: one switch. PXB: several. PHB: through the host bridge of one NUMA node.
    SYS: between NUMA nodes.

    Args:
        tree: The tree that holds both.
        one: Bus id.
        other: Bus id.
        flatten: Count the two halves of one Broadcom Gen4/Gen5 switch as one, as NCCL does.

    Source: NCCL src/graph/xml.cc (ncclTopoGetXmlFromSys), src/graph/paths.cc (ncclTopoSetPaths), src/graph/topo.cc
    (ncclTopoFlattenBcmSwitches).
    """
    if one == other:
        return "LOC"
    first, second = _switches(tree, one, flatten), _switches(tree, other, flatten)
    if first is None or second is None:
        return None
    common = next((switch for switch in first if switch in second), None)
    if common is not None:
        return "PIX" if first[0] == second[0] else "PXB"
    nodes = [tree.functions[bus_id].numa_node for bus_id in (one, other)]
    if None in nodes:
        return None
    return "PHB" if nodes[0] == nodes[1] else "SYS"


def _switches(tree: PciTree, bus_id: str, flatten: bool) -> list[str] | None:
    chain = tree.chain(bus_id)
    if chain is None:
        return None
    switches = list(chain[1::2])
    if flatten:
        generations = [(broadcom_generation(tree, s, 1), broadcom_generation(tree, s, 0)) for s in switches]
        for index in range(len(switches) - 2, -1, -1):
            if generations[index][0] and generations[index][0] == generations[index + 1][1]:
                switches[index] = switches[index + 1]
    return list(dict.fromkeys(switches))


def broadcom_generation(tree: PciTree, bus_id: str, level: int) -> int:
    """4 or 5 for a Broadcom PEX switch of that PCIe generation that NCCL flattens, else 0.

    Args:
        tree: The tree that holds the bridge.
        bus_id: The switch's upstream port.
        level: 0 for the outer half of the switch, 1 for an inner one (Gen5 tells them apart in its subsystem id).

    Source: NCCL src/graph/topo.cc (getBcmGen).
    """
    bridge = tree.functions.get(bus_id)
    if bridge is None or bridge.vendor != 0x1000 or bridge.subsystem_vendor != 0x1000:
        return 0
    half = (bridge.subsystem_device or 0) >> 12
    if (bridge.device, half) == (0xC010, 0xA):
        return 4
    return 5 if (bridge.device, half) == (0xC030, level) else 0


def read_tree(root: Path) -> PciTree:
    """Reads every PCI function below `root`; never raises, what cannot be read is None and named in `problems`.

    Args:
        root: Folder that holds `sys/`: `/` for this machine, else a captured tree.
    """
    top = root / DEVICES
    try:
        names = sorted(entry.name for entry in top.iterdir())
    except OSError as error:
        return PciTree(problems=(f"{top}: {error.strerror}",))
    problems = [f"{top}: `{name}` is no bus id" for name in names if not BUS_ID.fullmatch(name)][:8]
    functions: dict[str, PciFunction] = {}
    base = root.resolve()
    for name in [name for name in names if BUS_ID.fullmatch(name)][:_MAX_FUNCTIONS]:
        try:
            functions[name] = _read_function(base, top / name, name)
        except (OSError, RuntimeError) as error:  # RuntimeError: a symlink loop, before Python 3.13
            reason = error.strerror if isinstance(error, OSError) and error.strerror else "symlink loop"
            problems.append(f"{top / name}: {reason}")
    return PciTree(MappingProxyType(functions), tuple(problems))


def _read_function(base: Path, link: Path, name: str) -> PciFunction:
    folder = link.resolve(strict=True)
    if not folder.is_relative_to(base):
        raise OSError(errno.EXDEV, "leads out of the root folder")
    present = {entry.name for entry in folder.iterdir()}
    with _opened(folder) as handle:
        read = Attributes(handle, present)
        class_code = read.number("class")
        base_class = None if class_code is None else class_code >> 16
        endpoint = base_class in _ENDPOINTS
        return PciFunction(
            bus_id=name,
            class_code=class_code,
            vendor=read.number("vendor"),
            device=read.number("device"),
            subsystem_vendor=read.number("subsystem_vendor"),
            subsystem_device=read.number("subsystem_device"),
            parents=parents(folder, base),
            host_bridge=next((part for part in reversed(folder.parts) if _HOST_BRIDGE.fullmatch(part)), None),
            driver=read.link("driver"),
            numa_node=read.number("numa_node"),
            local_cpulist=read.text("local_cpulist") if endpoint else None,
            current_gigatransfers=gigatransfers(read.text("current_link_speed")),
            max_gigatransfers=gigatransfers(read.text("max_link_speed")),
            current_width=read.number("current_link_width"),
            max_width=read.number("max_link_width"),
            physical_function=bus_id(read.link("physfn")),
            virtual_functions=tuple(sorted(filter(None, (bus_id(read.link(f)) for f in present if f[:6] == "virtfn")))),
            iommu_group=integer(read.link("iommu_group")),
            net_devices=children(folder / "net") if "net" in present else (),
            rdma_devices=children(folder / "infiniband") if "infiniband" in present else (),
            bar_nbytes=bar_nbytes(read.text("resource")) if base_class in (0x03, 0x12) else (),
            config=read.config() if endpoint or base_class == 0x06 else None,
            unreadable=tuple(read.unreadable),
        )


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)
