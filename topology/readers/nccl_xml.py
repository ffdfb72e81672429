"""NCCL's topology XML -> Machine: what NCCL_TOPO_DUMP_FILE writes and NCCL_TOPO_FILE reads; RCCL's version 2 as well.

Source: NCCL v2.30 src/graph/xml.cc and src/graph/topo.cc; RCCL's topology models (tags xgmi and gcn, version 2).
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

from gradwire.topology.bandwidth import GIGABYTE, nvlink_bytes_per_second, xgmi_bytes_per_second
from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import (
    Cpu,
    Defect,
    DeviceLink,
    Gpu,
    LinkKind,
    Machine,
    Nic,
    NvSwitch,
    PcieLink,
    PciSwitch,
    Port,
)
from gradwire.topology.networks import THUNDERBOLT_DRIVER, interface_bits_per_second
from gradwire.topology.pci_ids import amd_name, is_virtual_bridge, normal_bus_id, role_of_class
from gradwire.topology.printable import shortened
from gradwire.topology.readers.affinity import cores_of_mask
from gradwire.topology.readers.xml_tree import Element
from gradwire.topology.readers.xml_tree import read as read_xml

_INTERFACE = re.compile(r"(eth|(en|wl)[opsP]|ib|bond|hsn|thunderbolt|usb|wlan)\d|(en|wl)x[0-9a-f]{12}")
"""How the names of network interfaces begin, of which devices of verbs have none. Source: systemd.net-naming-scheme(7);
Linux drivers/net/thunderbolt/main.c and drivers/net/usb/usbnet.c.
"""

OTHER_FILES = {
    "graphs": "an NCCL graph file (NCCL_GRAPH_DUMP_FILE); a topology is what NCCL_TOPO_DUMP_FILE writes",
    "topology": "an hwloc file (lstopo); a topology is what NCCL_TOPO_DUMP_FILE writes",
}
"""Root element of files that people mistake for a topology -> what they are."""


_HIDDEN = "fffffff:ff"
"""How the target begins that a virtual machine sees instead of the switch's bus id; some releases write a bus id of all
ones. Source: NCCL src/graph/xml.cc."""

NCCL_SPEEDS = (
    "2.5 GT/s", "5 GT/s", "8 GT/s", "16 GT/s", "32 GT/s",
    "2.5 GT/s PCIe", "5.0 GT/s PCIe", "8.0 GT/s PCIe", "16.0 GT/s PCIe", "32.0 GT/s PCIe", "64.0 GT/s PCIe",
)  # fmt: skip
"""Beginnings of `link_speed` that NCCL knows; it takes any other text for 8 GT/s.

Source: NCCL v2.30 src/graph/topo.cc (kvDictPciGen), src/graph/xml.h (kvConvertToInt compares beginnings).
"""

_OF_ONE_HOST = frozenset({"host_hash", "rank", "guid"})
"""Attributes whose values differ between hosts that are otherwise alike; ignored when two hosts are compared."""

MAX_LINKS_OF_A_GPU = 64
"""Most links in one element that are counted: more than any GPU has (NVLink 5: 18), so a larger `count` is a slip."""

MAX_SPEED_NOTES = 8


@dataclass(slots=True)
class _Reading:
    """Collects what has been read so far."""

    cpus: list[Cpu] = field(default_factory=list)
    switches: list[PciSwitch] = field(default_factory=list)
    gpus: list[tuple[Gpu, Element | None]] = field(default_factory=list)
    nics: list[Nic] = field(default_factory=list)
    peers: list[tuple[str, Element]] = field(default_factory=list)
    unclassified: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    """Key of every device and CPU -> the line that has it."""

    def name(self, key: str, element: Element) -> str:
        """Registers a key and returns it.

        Args:
            key: Key of a device or CPU.
            element: Element that has it, for its line.

        Raises:
            TopologyError: Another element has the same key.
        """
        if key in self.lines:
            # Files of two hosts in one repeat their CPUs, which stand above everything else.
            why = (
                "if these are two hosts, give the file of one, or set host_hash on every <cpu>"
                if element.tag == "cpu"
                else "a host has each bus id once: one of the two is a slip, as in files that were put together by hand"
            )
            raise TopologyError(
                f"<{element.tag}> {key} was already given on line {self.lines[key]}; {why}", line=element.line
            )
        self.lines[key] = element.line
        return key


def read(text: str) -> Machine:
    """Returns the machine that a topology file describes.

    Args:
        text: Decoded text of the whole file.

    Raises:
        TopologyError: The text is no topology XML, or has a malformed or repeated bus id; the message names the line.
    """
    root = read_xml(text)
    if root.tag != "system":
        what = OTHER_FILES.get(root.tag, f"no topology: its root element is <{root.tag}>, expected <system>")
        raise TopologyError(f"this is {what}", line=root.line)
    reading = _Reading()
    if root.integer("version") not in (1, 2):
        reading.notes.append(f'version="{root.text("version")}": NCCL reads only version 1, RCCL version 2.')
    for element in _one_host(root, reading):
        if element.tag == "cpu":
            _read_cpu(element, reading)
        else:
            reading.notes.append(f"line {element.line}: <{element.tag}> below <system> was ignored.")
    _doubt_speeds(root, reading)
    links, nvswitches, defects = _links_of(reading)
    return Machine(
        cpus=tuple(reading.cpus),
        switches=tuple(reading.switches),
        gpus=tuple(gpu for gpu, _ in reading.gpus),
        nics=tuple(reading.nics),
        nvswitches=nvswitches,
        links=links,
        links_known=any(element is not None for _, element in reading.gpus),
        unclassified=tuple(reading.unclassified),
        defects=defects,
        notes=(*reading.notes, *_doubts(reading, defects)),
        sources=("NCCL XML",),
    )


def _one_host(root: Element, reading: _Reading) -> list[Element]:
    """Returns the elements of the first host; the file of a multi-node NVLink domain holds all of its hosts."""
    hosts: dict[str, list[Element]] = {}
    for element in root.all("cpu"):
        hosts.setdefault(element.text("host_hash") or "", []).append(element)
    if len(hosts) < 2:
        return root.children
    first, *others = hosts.values()
    alike = all([_shape(cpu) for cpu in other] == [_shape(cpu) for cpu in first] for other in others)
    reading.notes.append(
        f"The file describes {len(hosts)} hosts (host_hash {', '.join(list(hosts)[:4])}), as NCCL writes it for a "
        f"multi-node NVLink domain; the first is shown, the others {'are alike' if alike else 'differ from it'}."
    )
    return [element for element in root.children if element.tag != "cpu" or element in first]


def _shape(element: Element) -> tuple[object, ...]:
    """Returns an element and all elements below it as nested tuples, to compare the hosts of a file with each other.

    The attributes `host_hash`, `rank` and `guid` are left out, because they differ between hosts that are otherwise
    alike.

    Args:
        element: Element of the file, such as a <cpu>.
    """
    own = sorted((name, text) for name, text in element.attributes.items() if name not in _OF_ONE_HOST)
    return element.tag, tuple(own), tuple(_shape(child) for child in element.children)


def _doubt_speeds(root: Element, reading: _Reading) -> None:
    """Adds a note for each text of `link_speed` that NCCL does not know, or of which it reads only the beginning."""
    lines: dict[str, int] = {}
    waiting = [root]
    while waiting:
        element = waiting.pop()
        waiting += reversed(element.children)
        speed = element.text("link_speed") if element.tag == "pci" else None
        if speed is not None and speed not in NCCL_SPEEDS:
            lines.setdefault(speed, element.line)
    for speed, line in sorted(lines.items(), key=lambda item: item[1])[:MAX_SPEED_NOTES]:
        known = speed.startswith(NCCL_SPEEDS)
        what = "NCCL reads its beginning alone" if known else "NCCL does not know it and takes it for 8 GT/s"
        reading.notes.append(
            f'line {line}: link_speed="{shortened(speed, 40)}" is no text that the kernel writes; {what}.'
        )


def _doubts(reading: _Reading, defects: tuple[Defect, ...]) -> list[str]:
    """Returns notes on the links that were left out, on PCI functions without a class, and on a file without NVLink.

    Args:
        reading: Devices read from the file.
        defects: Links that were left out.
    """
    notes = [f"{defect.where}: the link was left out ({defect.kind.replace('_', ' ')})." for defect in defects]
    if reading.unclassified:
        count = len(reading.unclassified)
        notes.append(f"{count} PCI functions have no class: whether they are GPUs or NICs is unknown from this file.")
    if reading.gpus and not any(element is not None for _, element in reading.gpus):
        notes.append("The file has no <gpu> elements: NVLink is unknown (NCCL adds it when it runs).")
    return notes


def _read_cpu(element: Element, reading: _Reading) -> None:
    """Adds one <cpu> and everything below it."""
    numa = element.integer("numaid")  # -1 is no number here: unknown
    key = "numa?" if numa is None else f"numa{numa}"
    cpu = Cpu(
        key=reading.name(key, element),
        numa=numa,
        architecture=element.text("arch"),
        vendor=element.text("vendor"),
        family=element.integer("familyid"),
        model=element.integer("modelid"),
        cores=cores_of_mask(element.text("affinity") or ""),
    )
    reading.cpus.append(cpu)
    for child in element.children:
        _read_child(child, cpu.key, reading)


def _read_child(element: Element, parent: str, reading: _Reading) -> None:
    """Adds a child of a <cpu>, or of a <pci> that is a switch; one of an unknown kind gives a note."""
    if element.tag == "pci":
        _read_pci(element, parent, reading)
    elif element.tag == "nic":
        _add_nic(element, None, parent, reading)
    elif element.tag == "pcilink":
        reading.peers.append((parent, element))
    else:
        reading.notes.append(f"line {element.line}: <{element.tag}> was ignored.")


def _read_pci(element: Element, parent: str, reading: _Reading) -> None:
    """Adds one <pci> and everything below it."""
    bus = normal_bus_id(element.text("busid") or "")
    if bus is None:
        found = element.text("busid")
        raise TopologyError(f"`busid` of <pci> is {found!r}, expected for example 0000:04:00.0", line=element.line)
    reading.name(bus, element)
    class_code = element.integer("class")
    gpus, nic = list(element.all("gpu")), next(element.all("nic"), None)
    role = "other" if class_code is None else role_of_class(class_code)
    if gpus:
        _add_gpus(gpus, element, bus, parent, reading)
    elif role == "gpu" and nic is None:
        reading.gpus.append((_gpu(element, bus, parent, None), None))
    elif nic is not None or role == "nic":
        _add_nic(nic, element, parent, reading)
    elif role == "switch" or any(element.all("pci")):
        reading.switches.append(_switch(element, bus, parent))
    elif class_code is None:
        reading.unclassified.append(bus)
    for child in element.children:
        if child.tag not in ("gpu", "nic"):
            _read_child(child, bus, reading)


def _add_gpus(gpus: Sequence[Element], pci: Element, bus: str, parent: str, reading: _Reading) -> None:
    """Adds the GPUs of a <pci>: several where one card shows itself as several devices (`dev`, `mlopart`).

    Several <gpu> of one device are ranks that share it.

    Source: NCCL v2.30 src/graph/topo.cc (ncclTopoXmlIsPrimaryGpuForDev).
    """
    parts: dict[tuple[int | None, int | None], Element] = {}
    for gpu in gpus:
        parts.setdefault((gpu.integer("dev"), gpu.integer("mlopart")), gpu)
    for position, gpu in enumerate(parts.values()):
        found = _gpu(pci, bus, parent, gpu)
        if len(parts) > 1:
            found = replace(found, key=found.key if position == 0 else f"{bus}/{position}", part=position)
            reading.lines.setdefault(found.key, gpu.line)
        reading.gpus.append((found, gpu))
    if len(parts) < len(gpus):
        reading.notes.append(f"line {pci.line}: {len(gpus)} ranks share {len(parts)} GPU{'s'[: len(parts) > 1]} {bus}.")
    if len(parts) > 1:
        reading.notes.append(f"line {pci.line}: the card {bus} is {len(parts)} GPUs, which share its links.")


class _Ids(TypedDict):
    """Holds the four ids of a PCI function."""

    vendor: int | None
    device: int | None
    subsystem_vendor: int | None
    subsystem_device: int | None


def _ids(element: Element) -> _Ids:
    """Returns vendor, device, subsystem vendor and subsystem device of a <pci>; each is None if the file lacks it."""
    return _Ids(
        vendor=element.integer("vendor"),
        device=element.integer("device"),
        subsystem_vendor=element.integer("subsystem_vendor"),
        subsystem_device=element.integer("subsystem_device"),
    )


def _link(element: Element) -> PcieLink | None:
    """Returns the PCIe link of a <pci>, or None where neither speed nor width is there."""
    speed = re.match(r"\s*(\d{1,3}(?:\.\d)?)\s*GT/s", element.attributes.get("link_speed", ""))
    lanes = element.integer("link_width") or None
    if speed is None and lanes is None:
        return None
    rate = float(speed[1]) if speed else None
    virtual = is_virtual_bridge(
        normal_bus_id(element.text("busid") or "") or "", element.integer("vendor"), element.integer("device")
    )
    return PcieLink(gigatransfers_per_second=rate, lanes=lanes, virtual=virtual)


def _switch(element: Element, bus: str, parent: str) -> PciSwitch:
    """Returns the switch that a <pci> is."""
    ids = _ids(element)
    virtual = is_virtual_bridge(bus, ids["vendor"], ids["device"])
    return PciSwitch(key=bus, parent=parent, pcie=_link(element), virtual=virtual, **ids)


def _gpu(element: Element, bus: str, parent: str, gpu: Element | None) -> Gpu:
    """Returns the GPU that a <pci> holds; `gpu` is its <gpu> element, if it has one."""
    ids = _ids(element)
    found = Gpu(
        key=bus, bus=bus, parent=parent, class_code=element.integer("class"), pcie=_link(element),
        name=amd_name(ids["vendor"], ids["device"]), **ids,
    )  # fmt: skip
    if gpu is None:
        return found
    return replace(
        found,
        index=gpu.integer("dev"),
        compute_capability=gpu.integer("sm"),
        architecture=gpu.text("gcn"),
        rank=gpu.integer("rank"),
        gdr=_flag(gpu, "gdr"),
    )


def _flag(element: Element, name: str) -> bool | None:
    """Returns an attribute that is 0 or 1 as a bool; None if it is absent."""
    number = element.integer(name)
    return None if number is None else number != 0


def _add_nic(nic: Element | None, pci: Element | None, parent: str, reading: _Reading) -> None:
    """Adds a NIC from its <nic> element, its <pci> element, or both.

    The ports of a NIC without a PCI device are marked virtual, because NCCL invents their speed (10000 if the driver
    reports none).

    Args:
        nic: Element with the ports; None if the file has none, then `pci` is set.
        pci: Element of the PCI function; None if the file has none, then `nic` is set.
        parent: Key of the switch or CPU above.
        reading: Collection that the NIC is added to.
    """
    ports = () if nic is None else tuple(_port(net) for net in nic.all("net"))
    if pci is not None:
        bus = normal_bus_id(pci.text("busid") or "") or ""
        card = Nic(key=bus, bus=bus, class_code=pci.integer("class"), pcie=_link(pci), **_ids(pci))
    else:
        names = "+".join(port.name for port in ports) or "nic"
        card = Nic(key=reading.name(f"{parent}/{names}", nic or Element("nic", {}, 0)))
        ports = tuple(replace(port, virtual=True) for port in ports)
    reading.nics.append(replace(card, parent=parent, ports=ports))


def _port(net: Element) -> Port:
    """Returns the port of a <net>: of a network interface, if it goes by the name of one (NCCL uses sockets then)."""
    megabits = net.integer("speed")
    number = net.integer("port")
    name = net.text("name") or "?"
    stated = megabits * 1e6 if megabits and 0 < megabits < 10**9 else None
    driver = THUNDERBOLT_DRIVER if name.startswith("thunderbolt") else None
    return Port(
        name=name,
        interfaces=(name,) if _INTERFACE.match(name) else (),
        number=1 if number is None else number,
        index=net.integer("dev"),
        bits_per_second=interface_bits_per_second(driver, stated),
        gdr=_flag(net, "gdr"),
        guid=net.text("guid"),
    )


def _links_of(reading: _Reading) -> tuple[tuple[DeviceLink, ...], tuple[NvSwitch, ...], tuple[Defect, ...]]:
    """Returns (links, NVSwitches they lead to, defects: links that had to be left out)."""
    collected = _Collected(reading)
    for gpu, element in reading.gpus:
        for child in element.children if element is not None else ():
            if child.tag in ("nvlink", "xgmi"):
                collected.add(gpu, child)
            elif child.tag == "c2c":
                collected.add_c2c(gpu, child)
    for key, element in reading.peers:
        target = normal_bus_id(element.text("target") or "")
        if target is not None and target != key:
            collected.links.setdefault(frozenset((key, target)), DeviceLink(a=key, b=target, kind="pci_peer"))
    switches = tuple(NvSwitch(key=key) for key in sorted(collected.switches))
    return tuple(collected.links.values()), switches, tuple(collected.defects)


class _Collected:
    """Collects links by their two ends, so that a link written on both sides counts once."""

    def __init__(self, reading: _Reading) -> None:
        self.gpus = {gpu.key: gpu for gpu, _ in reading.gpus}
        self.links: dict[frozenset[str], DeviceLink] = {}
        self.switches: set[str] = set()
        self.defects: list[Defect] = []
        self._notes = reading.notes
        self._above = {switch.key: switch.parent for switch in reading.switches}
        self._cpus = {cpu.key for cpu in reading.cpus}
        self._parts = Counter(gpu.bus for gpu, _ in reading.gpus)

    def add(self, gpu: Gpu, element: Element) -> None:
        """Adds one <nvlink> or <xgmi> of a GPU; one that leads to itself or nowhere becomes a defect."""
        text = element.text("target") or ""
        target = normal_bus_id(text)
        tclass = element.integer("tclass")
        where = f"line {element.line}: {element.tag} {gpu.key} -> {text or '?'}"
        if text.startswith(_HIDDEN):
            target = "hidden"
        elif target == gpu.bus:
            self.defects.append(Defect(kind="self_link", where=where))
            return
        elif target not in self.gpus and (tclass is None or role_of_class(tclass) != "nvswitch"):
            target = None
        if target is None:
            self.defects.append(Defect(kind="dangling_link", where=where))
            return
        count = self._count(element, where)
        if count == 0:
            return
        if target not in self.gpus:
            self.switches.add(target)
        self._keep(gpu, target, element.tag, count)

    def _count(self, element: Element, where: str) -> int:
        """Returns the number of links in an element; one without `count`, which NCCL refuses, counts as one link."""
        count = element.integer("count")
        if count is None:
            self._notes.append(f"{where} has no count: taken for one link; NCCL refuses it.")
        return min(1 if count is None else count, MAX_LINKS_OF_A_GPU)

    def _keep(self, gpu: Gpu, target: str, tag: str, count: int) -> None:
        """Stores a bundle of links between a GPU and a target; if both ends name a count, the larger one is kept.

        Args:
            gpu: GPU that has the element.
            target: Key of the other GPU or the switch.
            tag: `nvlink` or `xgmi`.
            count: Number of links in the bundle.
        """
        ends = frozenset((gpu.key, target))
        known = self.links.get(ends)
        if known is not None and known.a != gpu.key and known.count != count:
            self._notes.append(
                f"{known.a} says {known.count} links to {target}, {gpu.key} says {count} to {known.a}: the larger "
                "number is taken; a link may be down at one end."
            )
        if known is not None and known.count >= count:
            return
        rate = nvlink_bytes_per_second(gpu, count) if tag == "nvlink" else xgmi_bytes_per_second(gpu, count)
        rate = None if rate is None else rate / self._parts[gpu.bus]
        kind: LinkKind = "nvlink" if tag == "nvlink" else "xgmi"
        self.links[ends] = DeviceLink(a=gpu.key, b=target, kind=kind, count=count, bytes_per_second=rate)

    def add_c2c(self, gpu: Gpu, element: Element) -> None:
        """Adds one <c2c>, to the CPU above the GPU and its switches; its `bw` is in MB/s per link.

        Source: NCCL v2.30 src/graph/topo.cc (ncclTopoAddC2c climbs through PCI switches, findLocalCpu).
        """
        cpu = gpu.parent
        while cpu in self._above:
            cpu = self._above[cpu]
        where = f"line {element.line}: c2c of {gpu.key}"
        if cpu is None or cpu not in self._cpus:
            self.defects.append(Defect(kind="dangling_link", where=f"{where}, which does not hang off a CPU"))
            return
        count = self._count(element, where)
        if count == 0:
            return
        megabytes = element.integer("bw")
        rate = None if not megabytes else megabytes * count * GIGABYTE / 1000 / self._parts[gpu.bus]
        link = DeviceLink(a=gpu.key, b=cpu, kind="c2c", count=count, bytes_per_second=rate)
        self.links[frozenset((gpu.key, cpu))] = link
