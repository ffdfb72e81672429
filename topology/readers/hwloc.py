"""hwloc's XML -> Machine: what `lstopo machine.xml` writes, versions 1, 2 and 3.

It has the PCI tree with its bridges, NUMA nodes and the names of devices. It has no line rates, no NVLink counts that
are read here, and of a PCIe link only what it carries at the moment, which an idle GPU lowers: that is left unknown.

Source: hwloc 2.11 hwloc/topology-xml.c (attributes), hwloc/pci-common.c (pci_link_speed is that of the link status),
include/hwloc.h (kinds of OS devices; a bitmask from version 3 on).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Cpu, Machine, PcieLink, Port
from gradwire.topology.pci_ids import normal_bus_id
from gradwire.topology.readers.affinity import cores_of_mask
from gradwire.topology.readers.forest import Forest
from gradwire.topology.readers.pci import PciFunction
from gradwire.topology.readers.xml_tree import Element
from gradwire.topology.readers.xml_tree import read as read_xml

_DOCTYPE = re.compile(r'<!DOCTYPE topology SYSTEM "hwloc[0-9]?\.dtd">')
"""What every such file has, and all that is allowed of a DTD: the name of one that is never opened."""
_PCI_TYPE = re.compile(
    r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\](?: \[([0-9a-f]{4}):([0-9a-f]{4})\])?", re.IGNORECASE
)
"""`0302 [10de:2330] [10de:16c1] a1`: class, vendor and device, those of the subsystem, revision."""
_HOST_TO_PCI = "0-1"
_ARCHITECTURES = {"x86_64": "x86_64", "aarch64": "arm64", "ppc64le": "ppc64", "ppc64": "ppc64"}

OsDeviceKind = Literal["network", "openfabrics", "other"]
_KINDS: dict[int, OsDeviceKind] = {2: "network", 3: "openfabrics"}
_NETWORK_BIT, _OPENFABRICS_BIT = 1 << 4, 1 << 5
"""Bits of a device's kind from version 3 on, where an RDMA device may have both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Describes the place of an object in the file: its NUMA node, package and the bridges above."""

    numa: int | None = None
    """The only NUMA node near it; None if there are several or none."""
    package: int | None = None
    bridges: tuple[str, ...] = ()
    """Bus ids of the PCI bridges above, nearest first."""
    host_bridge: str | None = None


@dataclass(slots=True)
class _Reading:
    """Collects what has been read so far."""

    from_3: bool
    """True if hwloc 3 or later wrote the file."""
    cpus: dict[int, Cpu] = field(default_factory=dict)
    functions: dict[str, PciFunction] = field(default_factory=dict)
    ports: dict[str, list[Port]] = field(default_factory=dict)
    indices: dict[str, int] = field(default_factory=dict)
    """Bus id of a GPU -> the driver's number."""
    about: Cpu = field(default_factory=lambda: Cpu(key=""))
    """Vendor, family, model and architecture of the processors, without a key."""


def read(text: str) -> Machine:
    """Returns the machine that a file of lstopo describes.

    Args:
        text: Decoded text of the whole file.

    Raises:
        TopologyError: The text is no hwloc XML, or has a PCI function twice; the message names the line.
    """
    root = read_xml(_DOCTYPE.sub("", text, count=1))
    if root.tag != "topology" or not any(child.text("type") for child in root.all("object")):
        raise TopologyError("this is no hwloc XML: <topology> with <object type=...> in it is expected", line=root.line)
    version = re.match(r"\d{1,3}", root.text("version") or "1")
    reading = _Reading(from_3=version is not None and int(version[0]) >= 3)
    machine = next(child for child in root.all("object") if child.text("type"))
    infos = _infos(machine)
    reading.about = replace(reading.about, architecture=_ARCHITECTURES.get(infos.get("Architecture", "")))
    for child in root.all("object"):
        _walk(child, _Place(), reading)
    built = Forest(reading.functions.values(), tuple(reading.cpus.values()), _no_link).build(reading.ports)
    return replace(
        built,
        hostname=infos.get("HostName"),
        product=infos.get("DMIProductName"),
        cpus=tuple(replace(cpu, architecture=reading.about.architecture) for cpu in built.cpus),
        gpus=tuple(replace(gpu, index=reading.indices.get(gpu.bus or "")) for gpu in built.gpus),
        notes=(*built.notes, *_notes(root, reading)),
        sources=("hwloc XML",),
    )


def _no_link(function: PciFunction, bridge: PciFunction | None) -> PcieLink | None:
    """Returns None for every link: the file has only its current rate, not its generation and width."""
    del function, bridge
    return None


def _infos(element: Element) -> dict[str, str]:
    """Returns the <info> of an object by name."""
    return {info.text("name") or "": info.text("value") or "" for info in element.all("info")}


def _bits(text: str | None) -> list[int]:
    """Returns the members of a bitmap such as `0x00000003` or `0x0000ffff,,0xffffffff`; none of an infinite one."""
    words = (text or "").split(",")
    if not text or len(words) > 2048 or not all(re.fullmatch(r"(0x[0-9a-fA-F]{1,8})?", word) for word in words):
        return []
    number = int("".join(word.removeprefix("0x").zfill(8) for word in words), 16)
    return [bit for bit in range(number.bit_length()) if number >> bit & 1]


def _walk(element: Element, place: _Place, reading: _Reading) -> None:
    """Reads one object and what is in it; the depth is that of the file, which the XML reader limits."""
    kind = element.text("type") or ""
    here = place
    nodes = _bits(element.text("nodeset"))
    if nodes:
        here = replace(here, numa=nodes[0] if len(nodes) == 1 else None)
    if kind in ("Package", "Socket"):
        here = replace(here, package=element.integer("os_index"))
        _about_processor(element, reading)
    elif kind == "NUMANode":
        _add_node(element, here, reading)
    elif kind == "Bridge":
        here = _bridge(element, here, reading)
    elif kind == "PCIDev":
        _add_device(element, here, reading)
    for child in element.all("object"):
        _walk(child, here, reading)


def _about_processor(element: Element, reading: _Reading) -> None:
    """Stores a package's processor vendor, family and model in `reading`; a machine has one kind of processor."""
    infos = _infos(element)
    numbers = {name: int(infos[name]) for name in infos if re.fullmatch(r"[0-9]{1,9}", infos[name])}
    reading.about = replace(
        reading.about,
        vendor=infos.get("CPUVendor", reading.about.vendor),
        family=numbers.get("CPUFamilyNumber", reading.about.family),
        model=numbers.get("CPUModelNumber", reading.about.model),
    )


def _add_node(element: Element, place: _Place, reading: _Reading) -> None:
    """Adds a NUMA node that has processors."""
    number = element.integer("os_index")
    digits = [word.removeprefix("0x").zfill(8) for word in (element.text("cpuset") or "").split(",")]
    cores = cores_of_mask(",".join(digits))
    if number is None or cores is None or number in reading.cpus:
        return
    package = place.package
    if package is None:  # version 1 has the packages inside the nodes
        inside = [child for child in element.all("object") if child.text("type") in ("Package", "Socket")]
        package = inside[0].integer("os_index") if len(inside) == 1 else None
        for child in inside:
            _about_processor(child, reading)
    about = replace(reading.about, key=f"numa{number}", numa=number, socket=package, cores=cores)
    reading.cpus[number] = about


def _bridge(element: Element, place: _Place, reading: _Reading) -> _Place:
    """Adds a PCI bridge, and returns the place below it; a host bridge is only remembered."""
    if element.text("bridge_type") == _HOST_TO_PCI:
        buses = re.match(r"([0-9a-f]{4,8}):\[([0-9a-f]{2})-", element.text("bridge_pci") or "", re.IGNORECASE)
        name = f"pci{buses[1]}:{buses[2]}".lower() if buses else f"pci@line{element.line}"
        return replace(place, host_bridge=name, bridges=())
    bus = _add_function(element, place, reading, 0x0604)
    return place if bus is None else replace(place, bridges=(bus, *place.bridges))


def _add_function(element: Element, place: _Place, reading: _Reading, usual_class: int | None) -> str | None:
    """Adds one PCI function to `reading`.

    Args:
        element: <object> of the function.
        place: Place of the function in the file: bridges, host bridge and NUMA node.
        reading: Collection that the function is added to.
        usual_class: Class and subclass to assume if the file has none; None assumes nothing.

    Returns:
        The bus id, or None if the element has none; nothing is added then.

    Raises:
        TopologyError: The file has the function twice.
    """
    bus = normal_bus_id(element.text("pci_busid") or "")
    if bus is None:
        return None
    if bus in reading.functions:
        raise TopologyError(f"PCI function {bus} is in the file twice: are these two hosts?", line=element.line)
    ids = _PCI_TYPE.match(element.text("pci_type") or "")
    numbers = [None if number is None else int(number, 16) for number in ids.groups()] if ids else [None] * 5
    kind = numbers[0] if numbers[0] is not None else usual_class
    infos = _infos(element)
    name = " ".join(filter(None, (infos.get("PCIVendor"), infos.get("PCIDevice"))))
    model = next((found for device in element.all("object") if (found := _infos(device).get("GPUModel"))), None)
    reading.functions[bus] = PciFunction(
        bus_id=bus,
        class_code=None if kind is None else kind << 8,
        vendor=numbers[1],
        device=numbers[2],
        subsystem_vendor=numbers[3],
        subsystem_device=numbers[4],
        parents=place.bridges,
        reaches_root=place.host_bridge is not None,
        host_bridge=place.host_bridge or "pci",
        name=model or name or element.text("name"),
        numa_node=place.numa,
    )
    return bus


def _add_device(element: Element, place: _Place, reading: _Reading) -> None:
    """Adds a PCI device with its network ports, and a GPU's number, from the names that drivers gave it."""
    bus = _add_function(element, place, reading, None)
    if bus is None:
        return
    devices = list(_os_devices(element, reading))
    fabrics = [name for kind, name, _ in devices if kind == "openfabrics"]
    networks = [name for kind, name, _ in devices if kind == "network"]
    ports: list[Port] = []
    for kind, name, infos in devices:
        if kind == "openfabrics":
            state = infos.get("Port1State")
            shared = tuple(networks) if len(fabrics) == 1 else ()
            ports.append(Port(name=name, interfaces=shared, active=None if state is None else state == "4"))
        elif kind == "network" and len(fabrics) != 1:
            ports.append(Port(name=name, interfaces=(name,)))
        elif match := re.fullmatch(r"(?:nvml|rsmi)(\d{1,3})", name):
            reading.indices[bus] = int(match[1])
    if ports:
        reading.ports[bus] = ports


def _os_devices(element: Element, reading: _Reading) -> Iterator[tuple[OsDeviceKind, str, dict[str, str]]]:
    """Yields (kind, name, infos) of the devices that the operating system shows on a PCI function."""
    for child in element.all("object"):
        if child.text("type") == "OSDev" and child.text("name"):
            number = child.integer("osdev_type") or 0
            kind = _KINDS.get(number, "other")
            if reading.from_3:
                kind = "openfabrics" if number & _OPENFABRICS_BIT else "network" if number & _NETWORK_BIT else "other"
            yield kind, child.text("name") or "", _infos(child)


def _notes(root: Element, reading: _Reading) -> Sequence[str]:
    """Returns sentences on what such a file cannot show, and what is not read from it."""
    notes = ["hwloc knows no line rates of ports, and of PCIe links only the speed at the moment: unknown here."]
    bandwidths = any(child.text("name") == "NVLinkBandwidth" for child in root.children)
    notes.append(
        "NVLink is unknown: the file's NVLinkBandwidth is not read."
        if bandwidths
        else "NVLink is unknown: hwloc shows it only where it was built with NVML."
    )
    if not reading.functions:
        notes.append("The file has no PCI device: lstopo without --no-io, with PCI support, writes them.")
    if any(not function.reaches_root for function in reading.functions.values()):
        notes.append("Some PCI devices have no bridges above them in the file: distances below one CPU are unknown.")
    return notes
