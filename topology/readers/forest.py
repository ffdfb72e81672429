"""The switches, GPUs and NICs of a machine, from a list of PCI functions, as sysfs or lspci show them.

Source: NCCL v2.30 src/graph/xml.cc (a switch is two bridges, upstream and downstream port, so the tree is climbed two
bridges at a time; the functions of a multi-port card and its virtual functions are one NIC).
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from types import MappingProxyType
from typing import Any, TypeVar

from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Cpu, Endpoint, Gpu, Machine, Nic, NvSwitch, PciDevice, PcieLink, PciSwitch, Port
from gradwire.topology.pci_ids import PciRole, is_virtual_bridge, role_of_class, role_of_function
from gradwire.topology.readers.pci import PciFunction

MAX_DEPTH = 64
"""Bridges above a device; PCI has 256 buses in a domain and real machines stack six."""
TUNNEL_GIGATRANSFERS = 2.5
"""Rate that the ports of a PCIe tunnel through Thunderbolt or USB4 report, whatever the cable carries."""


_NO_VENDOR = "Whether {} is a GPU is unknown: the source gives a display adapter's class and no vendor."

Device = TypeVar("Device", bound=PciDevice)
Card = TypeVar("Card", bound=Endpoint)

LinkOf = Callable[[PciFunction, PciFunction | None], PcieLink | None]
"""(function, bridge above it) -> the link between them; None where nothing is known about it."""


def card_of(bus: str) -> str:
    """Returns the bus id of function 0, which names the card as a whole.

    Args:
        bus: A normal bus id.
    """
    return f"{bus[:-1]}0"


def _may_be_a_gpu(function: PciFunction) -> bool:
    """Returns whether a function may be a GPU or NVSwitch, but only its unknown vendor could tell."""
    named = function.name is not None and not re.match(r"Device\b|$", function.name)
    unknown = function.vendor is None and not named  # a maker that is named and has no number here makes no GPUs
    return unknown and role_of_class(function.class_code or 0) in ("gpu", "nvswitch")


def link_between(function: PciFunction, bridge: PciFunction | None) -> PcieLink | None:
    """Returns the link to the bridge above: the slower of the two ends' highest rates, and the lanes in use.

    The current rate is kept beside it if it is lower: an idle GPU lowers it, so it says little about the link.

    Args:
        function: PCI function at the lower end.
        bridge: PCI bridge at the upper end; None if unknown.

    Returns:
        None if neither rate nor width is known.

    Source: NCCL v2.30 src/graph/xml.cc takes the same minimum.
    """
    ends = [end for end in (function, bridge) if end is not None]
    rates = [end.max_gigatransfers for end in ends if end.max_gigatransfers]
    rate, now = min(rates, default=None), function.current_gigatransfers
    lanes = function.current_width or function.max_width
    if rate is None and now is None and not lanes:
        return None
    lowered = now if now is not None and rate is not None and now < rate else None
    return PcieLink(
        gigatransfers_per_second=now if rate is None else rate, lanes=lanes, current_gigatransfers_per_second=lowered
    )


class Forest:
    """Builds a machine from its PCI functions, and finds for each the switches and the CPU above it."""

    def __init__(self, functions: Iterable[PciFunction], cpus: Sequence[Cpu], link_of: LinkOf) -> None:
        """Stores the functions.

        Args:
            functions: All functions, bridges included, each bus id once.
            cpus: NUMA nodes that are known already; others are added as functions name them.
            link_of: Function of (function, bridge above it) that returns their link, or None if it is unknown.
        """
        self._functions = {function.bus_id: function for function in functions}
        self._link_of = link_of
        self._cpus = {cpu.numa: cpu for cpu in cpus}
        self._unknown: dict[str, Cpu] = {}
        self._only = cpus[0] if len(cpus) == 1 else None

    def _above(self, function: PciFunction) -> list[PciFunction]:
        """Returns the bridges above a function, nearest first."""
        known = takewhile(self._functions.__contains__, function.parents or ())
        chain = [self._functions[bus] for bus in islice(known, MAX_DEPTH + 1)]
        if len(chain) > MAX_DEPTH:
            raise TopologyError(f"more than {MAX_DEPTH} PCI bridges above {function.bus_id}: they form a cycle")
        return chain

    def _cpu(self, function: PciFunction, chain: Sequence[PciFunction]) -> str | None:
        """Returns the key of the CPU a function hangs off: by NUMA node, else one per root complex."""
        nodes = (step.numa_node for step in (function, *chain))
        numa = next((node for node in nodes if node is not None and node >= 0), None)
        if numa is not None:
            return self._cpus.setdefault(numa, Cpu(key=f"numa{numa}", numa=numa)).key
        if self._only is not None:
            return self._only.key
        root = function.host_bridge
        return None if root is None else self._unknown.setdefault(root, Cpu(key=f"numa?@{root}")).key

    def _parents(self, role: PciRole) -> dict[str, list[PciFunction]]:
        """Returns bus id of every function with a role -> the switches above it, nearest first."""
        return {
            bus: self._above(function)[1::2]
            for bus, function in self._functions.items()
            if role_of_function(function.class_code or 0, function.vendor) == role
        }

    def build(
        self, ports: Mapping[str, Sequence[Port]], parts: Mapping[str, Sequence[Port]] = MappingProxyType({})
    ) -> Machine:
        """Returns the machine: switches with something below them, GPUs, NICs and NVSwitches.

        Args:
            ports: Bus id of a function -> the network ports found on it.
            parts: Bus id of a function -> the network ports found on its scalable functions.

        Raises:
            TopologyError: The bridges form a cycle.
        """
        gpus, cards = self._parents("gpu"), self._parents("nic")
        doubtful = sorted(bus for bus, function in self._functions.items() if _may_be_a_gpu(function))
        switches = {step.bus_id: step for steps in (*gpus.values(), *cards.values()) for step in steps}
        machine = Machine(
            switches=tuple(self._switch(function) for _, function in sorted(switches.items())),
            gpus=tuple(self._endpoint(Gpu, bus, steps) for bus, steps in sorted(gpus.items())),
            nics=self._nics(cards, ports, parts),
            nvswitches=tuple(NvSwitch(key=bus) for bus in sorted(self._parents("nvswitch"))),
            unclassified=tuple(doubtful),
            notes=(_NO_VENDOR.format(", ".join(doubtful[:8])),) if doubtful else (),
        )
        known = [cpu for _, cpu in sorted(self._cpus.items(), key=lambda item: (item[0] is None, item[0]))]
        return replace(machine, cpus=(*known, *(self._unknown[root] for root in sorted(self._unknown))))

    def _parent(self, function: PciFunction, steps: Sequence[PciFunction]) -> str | None:
        """Returns the key of the switch above, or of the CPU if there is no switch; None if neither is known."""
        return steps[0].bus_id if steps else self._cpu(function, self._above(function))

    def _switch(self, function: PciFunction) -> PciSwitch:
        virtual = is_virtual_bridge(function.bus_id, function.vendor, function.device)
        return self._device(PciSwitch, function, self._above(function)[1::2], virtual=virtual)

    def _endpoint(self, kind: type[Card], bus: str, steps: Sequence[PciFunction]) -> Card:
        function = self._functions[bus]
        return self._device(kind, function, steps, bus=bus, name=function.name, class_code=function.class_code)

    def _device(self, kind: type[Device], function: PciFunction, steps: Sequence[PciFunction], **more: Any) -> Device:
        """Builds a device of any kind from its PCI function.

        Args:
            kind: Class of the device.
            function: PCI function of the device.
            steps: Switches above it, nearest first.
            more: Further fields of that class.
        """
        parent = self._parent(function, steps)
        return kind(
            key=function.bus_id,
            parent=parent,
            bridges_known=parent in self._functions or (function.parents is not None and function.reaches_root),
            vendor=function.vendor,
            device=function.device,
            subsystem_vendor=function.subsystem_vendor,
            subsystem_device=function.subsystem_device,
            pcie=self._link(function),
            **more,
        )

    def _link(self, function: PciFunction) -> PcieLink | None:
        """Returns a function's link, marked virtual if its figures say nothing; None if it is unknown.

        They say nothing if one of its ends is emulated, and for a tunnel through Thunderbolt or USB4, whose ports
        always say 2.5 GT/s. Source: USB4 specification 2.0, section 11.2.1 (PCIe adapters behave as a PCIe 1.x device).
        """
        bridge = next(iter(self._above(function)), None)
        link = self._link_of(function, bridge)
        if link is None:
            return None
        ends = (function,) if bridge is None else (function, bridge)
        tunnelled = function.removable and link.gigatransfers_per_second == TUNNEL_GIGATRANSFERS
        emulated = any(is_virtual_bridge(end.bus_id, end.vendor, end.device) for end in ends)
        return replace(link, virtual=tunnelled or emulated)

    def _nics(
        self,
        cards: Mapping[str, list[PciFunction]],
        ports: Mapping[str, Sequence[Port]],
        parts: Mapping[str, Sequence[Port]],
    ) -> tuple[Nic, ...]:
        """Returns one NIC per card: its physical functions and their ports, its virtual functions counted.

        If the physical functions show no port, those of the virtual or scalable ones are the card's: a pod may have
        one of these alone, and NCCL counts it as the card (v2.30 src/transport/net_ib, NCCL_IB_MERGE_VFS).

        The key is the bus id of function 0, unless that function is not a NIC.

        Args:
            cards: Bus id of every network function -> the switches above it.
            ports: Bus id of a function -> its network ports.
            parts: Bus id of a function -> the ports of its scalable functions.
        """
        owners = {bus: self._functions[bus].physical_function for bus in cards}
        virtual = Counter(card_of(owner) for owner in owners.values() if owner is not None and owner in cards)
        functions: dict[str, list[str]] = {}
        lent: dict[str, list[Port]] = {}
        for bus in sorted(cards):
            owner = owners[bus]
            if owner not in cards:
                functions.setdefault(card_of(bus), []).append(bus)
            else:
                lent.setdefault(card_of(str(owner)), []).extend(ports.get(bus, ()))
            lent.setdefault(card_of(str(owner) if owner in cards else bus), []).extend(parts.get(bus, ()))
        return tuple(
            replace(
                self._endpoint(Nic, buses[0], cards[buses[0]]),
                key=card if card in cards or card not in self._functions else buses[0],
                ports=tuple(port for bus in buses for port in ports.get(bus, ())) or tuple(lent.get(card, ())),
                driver=self._functions[buses[0]].driver,
                functions=len(buses),
                virtual_functions=virtual[card],
            )
            for card, buses in functions.items()
        )
