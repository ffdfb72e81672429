"""Machine -> NCCL's topology XML, a file that NCCL_TOPO_FILE accepts (RCCL's dialect for AMD GPUs).

Unknown attributes are left out: NCCL fills them in when it runs. What the reader understands comes back unchanged.
"""

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import quoteattr

from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Cpu, DeviceLink, Gpu, Machine, Nic, PcieLink, PciSwitch, Port
from gradwire.topology.readers.affinity import mask_of_cores
from gradwire.topology.readers.nccl_xml import HIDDEN_PEER
from gradwire.topology.readers.xml_tree import allowed

NCCL_MAX_NODES = 256
"""NCCL refuses files with more elements. Source: NCCL v2.30 src/graph/xml.h."""

GPU_CLASS, NIC_CLASS, SWITCH_CLASS, NVSWITCH_CLASS, AMD_GPU_CLASS = 0x030200, 0x020000, 0x060400, 0x068000, 0x120000

Attributes = Sequence[tuple[str, object | None]]


def write(machine: Machine) -> str:
    """Returns the file's text.

    Args:
        machine: The machine; every GPU and every card needs a bus id or a CPU above it.

    Raises:
        TopologyError: The machine came from a source without bus ids or without places, such as nvidia-smi's matrix,
            or has functions of which nothing is known but the bus id.
    """
    if machine.unclassified:
        raise TopologyError(
            f"{len(machine.unclassified)} PCI functions ({', '.join(machine.unclassified[:4])}, ...) have no class, so "
            "whether they are GPUs or NICs is unknown and they would be lost; give NCCL the original file, or run "
            "`gradwire topo --nccl-xml` on the machine itself"
        )
    placed = {cpu.key for cpu in machine.cpus} | {switch.key for switch in machine.switches}
    lost = [gpu.key for gpu in machine.gpus if gpu.parent not in placed or gpu.bus is None]
    lost += [nic.key for nic in machine.nics if nic.parent not in placed]
    if lost:
        raise TopologyError(
            f"{lost[0]} has no bus id or no known place, so NCCL's file cannot be written; "
            "run `gradwire topo --nccl-xml` on the machine itself"
        )
    return _Writer(machine).text()


def element_count(text: str) -> int:
    """Returns the number of elements in a text that `write` returned; NCCL refuses more than `NCCL_MAX_NODES`.

    Args:
        text: The file's text.
    """
    return text.count("<") - text.count("</")


def _open(tag: str, attributes: Attributes, *, close: bool = False) -> str:
    """Returns an element's first tag without the attributes that are None."""
    pairs = "".join(f" {name}={quoteattr(allowed(str(value)))}" for name, value in attributes if value is not None)
    return f"<{tag}{pairs}{'/' if close else ''}>"


def _hex(value: int | None, digits: int = 4) -> str | None:
    """Returns a number as NCCL writes ids."""
    return None if value is None else f"0x{value:0{digits}x}"


def _link(link: PcieLink | None) -> Attributes:
    """Returns the attributes of a PCIe link."""
    if link is None:
        return []
    rate = link.gigatransfers_per_second
    return [("link_speed", None if rate is None else f"{rate:.1f} GT/s PCIe"), ("link_width", link.lanes)]


def _flag(value: bool | None) -> int | None:
    return None if value is None else int(value)


class _Writer:
    """Writes the tree from the CPUs down."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.amd = any(link.kind == "xgmi" for link in machine.links) or any(gpu.architecture for gpu in machine.gpus)
        self.lines: list[str] = []
        self.below: dict[str | None, list[PciSwitch | Gpu | Nic]] = {}
        items: list[PciSwitch | Gpu | Nic] = [*machine.switches, *machine.gpus, *machine.nics]
        for item in items:
            self.below.setdefault(item.parent, []).append(item)
        self.links: dict[str, list[DeviceLink]] = {}
        for link in machine.links:
            for end in {link.a} if link.kind == "pci_peer" else {link.a, link.b}:
                self.links.setdefault(end, []).append(link)
        usual = AMD_GPU_CLASS if self.amd else GPU_CLASS
        self.classes = {gpu.key: gpu.class_code or usual for gpu in machine.gpus}

    def text(self) -> str:
        """Returns the whole file."""
        self._line(0, _open("system", [("version", 2 if self.amd else 1)]))
        # A file has each NUMA node once. Where none is known NCCL, too, puts all under one. Source: src/graph/xml.cc.
        nodes: dict[int | None, list[Cpu]] = {}
        for cpu in self.machine.cpus:
            nodes.setdefault(cpu.numa, []).append(cpu)
        for first, *others in nodes.values():
            self._line(1, _open("cpu", self._cpu(first)))
            for cpu in (first, *others):
                self._children(cpu.key, 2)
            self._line(1, "</cpu>")
        self._line(0, "</system>")
        return "\n".join(self.lines) + "\n"

    def _line(self, depth: int, text: str) -> None:
        self.lines.append("  " * depth + text)

    def _cpu(self, cpu: Cpu) -> Attributes:
        return [
            ("numaid", -1 if cpu.numa is None else cpu.numa),
            ("affinity", None if cpu.cores is None else mask_of_cores(cpu.cores)),
            ("arch", cpu.architecture),
            ("vendor", cpu.vendor),
            ("familyid", cpu.family),
            ("modelid", cpu.model),
        ]

    def _children(self, key: str, depth: int) -> None:
        """Writes what hangs off a CPU or a switch; the depth is that of the tree, which the reader has limited."""
        for item in self.below.get(key, ()):
            if isinstance(item, PciSwitch):
                self._line(depth, _open("pci", self._pci(item, item.key, SWITCH_CLASS)))
                self._children(item.key, depth + 1)
                self._line(depth, "</pci>")
            elif isinstance(item, Gpu):
                if not item.part:  # further parts of a card stand in the first one's element
                    self._gpu(item, depth)
            elif item.bus is not None:
                self._line(depth, _open("pci", self._pci(item, item.bus, NIC_CLASS)))
                self._nic(item, depth + 1)
                self._line(depth, "</pci>")
            else:
                self._nic(item, depth)
        for link in self.links.get(key, ()):
            if link.kind == "pci_peer":
                self._line(depth, _open("pcilink", [("target", link.b)], close=True))

    def _pci(self, item: PciSwitch | Gpu | Nic, bus: str, usual_class: int) -> Attributes:
        class_code = None if isinstance(item, PciSwitch) else item.class_code
        ids = (item.vendor, item.device, item.subsystem_vendor, item.subsystem_device)
        names = ("vendor", "device", "subsystem_vendor", "subsystem_device")
        return [
            ("busid", bus),
            ("class", _hex(usual_class if class_code is None else class_code, 6)),
            *((name, _hex(number)) for name, number in zip(names, ids, strict=True)),
            *_link(item.pcie),
        ]

    def _gpu(self, gpu: Gpu, depth: int) -> None:
        """Writes a card: one GPU, or all the parts it shows itself as.

        Without its <gpu> where nobody knows of NVLink: one without <nvlink> would say that there is none, and NCCL adds
        it where it runs.
        """
        self._line(depth, _open("pci", self._pci(gpu, gpu.bus or "", AMD_GPU_CLASS if self.amd else GPU_CLASS)))
        parts = [gpu] if gpu.part is None else [one for one in self.machine.gpus if one.bus == gpu.bus]
        for part in parts:
            links = [link for link in self.links.get(part.key, ()) if link.kind != "pci_peer"]
            facts: Attributes = [
                ("dev", part.index),
                ("sm", part.compute_capability),
                ("gcn", part.architecture),
                ("rank", part.rank),
                ("gdr", _flag(part.gdr)),
                ("mlopart", part.part),
            ]
            if links or (self.machine.links_known and any(value is not None for _, value in facts)):
                self._line(depth + 1, _open("gpu", facts))
                for link in links:
                    self._line(depth + 2, self._gpu_link(part, link, len(parts)))
                self._line(depth + 1, "</gpu>")
        self._line(depth, "</pci>")

    def _gpu_link(self, gpu: Gpu, link: DeviceLink, parts: int) -> str:
        """Returns one <nvlink>, <xgmi> or <c2c>; the parts of a card share a link's rate."""
        if link.kind == "c2c":
            whole = None if link.bytes_per_second is None else link.bytes_per_second * parts
            rate = None if whole is None else round(whole / max(link.count, 1) / 1e6)
            return _open("c2c", [("bw", rate), ("count", link.count)], close=True)
        other = link.b if link.a == gpu.key else link.a
        tclass = self.classes.get(other, NVSWITCH_CLASS)
        target = HIDDEN_PEER if other == "hidden" else other
        return _open(link.kind, [("target", target), ("count", link.count), ("tclass", _hex(tclass, 6))], close=True)

    def _nic(self, nic: Nic, depth: int) -> None:
        if nic.ports:
            self._line(depth, "<nic>")
            for line in self._nets(nic.ports):
                self._line(depth + 1, line)
            self._line(depth, "</nic>")

    def _nets(self, ports: Iterable[Port]) -> Iterable[str]:
        """Yields one <net> per port."""
        for port in ports:
            speed = None if port.bits_per_second is None else round(port.bits_per_second / 1e6)
            yield _open(
                "net",
                [
                    ("name", port.name),
                    ("dev", port.index),
                    ("speed", speed),
                    ("port", port.number),
                    ("guid", port.guid),
                    ("gdr", _flag(port.gdr)),
                ],
                close=True,
            )
