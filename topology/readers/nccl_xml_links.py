"""The links of a topology file: <nvlink>, <xgmi>, <c2c> below a <gpu>, and <pcilink> between switches."""

from collections.abc import Sequence

from gradwire.topology.bandwidth import GIGABYTE, nvlink_bytes_per_second, xgmi_bytes_per_second
from gradwire.topology.graph import Cpu, Defect, Gpu, Link, NvSwitch
from gradwire.topology.pci_ids import normal_bus_id, role_of_class
from gradwire.topology.readers.xml_tree import Element

HIDDEN_PEER = "fffffff:ffff:ff"
"""Target that a virtual machine sees instead of the switch's bus id. Source: NCCL src/graph/xml.cc."""

MAX_LINKS_OF_A_GPU = 64
"""No GPU has more; NVLink 5 has 18."""


def links_of(
    gpus: Sequence[tuple[Gpu, Element | None]], cpus: Sequence[Cpu], peers: Sequence[tuple[str, Element]]
) -> tuple[tuple[Link, ...], tuple[NvSwitch, ...], tuple[Defect, ...]]:
    """Returns the links, the switches they name, and what had to be left out.

    Args:
        gpus: Every GPU with its <gpu> element.
        cpus: The CPUs; a chip-to-chip link leads to the one above its GPU.
        peers: (key of a switch, its <pcilink>).
    """
    collected = _Collected({gpu.key: gpu for gpu, _ in gpus})
    for gpu, element in gpus:
        for child in element.children if element is not None else ():
            if child.tag in ("nvlink", "xgmi"):
                collected.add(gpu, child)
            elif child.tag == "c2c":
                collected.add_c2c(gpu, child, {cpu.key for cpu in cpus})
    for key, element in peers:
        target = normal_bus_id(element.text("target") or "")
        if target is not None and target != key:
            collected.links.setdefault(frozenset((key, target)), Link(a=key, b=target, kind="pci_peer"))
    switches = tuple(NvSwitch(key=key) for key in sorted(collected.switches))
    return tuple(collected.links.values()), switches, tuple(collected.defects)


class _Collected:
    """Links by their two ends, so that a link written on both sides counts once."""

    def __init__(self, gpus: dict[str, Gpu]) -> None:
        self.gpus = gpus
        self.links: dict[frozenset[str], Link] = {}
        self.switches: set[str] = set()
        self.defects: list[Defect] = []

    def add(self, gpu: Gpu, element: Element) -> None:
        """Adds one <nvlink> or <xgmi>."""
        text = element.text("target") or ""
        target = normal_bus_id(text)
        tclass = element.integer("tclass")
        where = f"line {element.line}: {element.tag} {gpu.key} -> {text or '?'}"
        if text.startswith(HIDDEN_PEER):
            target = "hidden"
        elif target == gpu.key:
            self.defects.append(Defect(kind="self_link", where=where))
            return
        elif target not in self.gpus and (tclass is None or role_of_class(tclass) != "nvswitch"):
            target = None
        if target is None:
            self.defects.append(Defect(kind="dangling_link", where=where))
            return
        if target not in self.gpus:
            self.switches.add(target)
        self._keep(gpu, target, element)

    def _keep(self, gpu: Gpu, target: str, element: Element) -> None:
        """Stores a link whose other end is known."""
        count = min(max(element.integer("count") or 1, 1), MAX_LINKS_OF_A_GPU)
        ends = frozenset((gpu.key, target))
        if ends in self.links and self.links[ends].count >= count:
            return
        if element.tag == "nvlink":
            rate = nvlink_bytes_per_second(gpu, count)
            self.links[ends] = Link(a=gpu.key, b=target, kind="nvlink", count=count, bytes_per_second=rate)
        else:
            rate = xgmi_bytes_per_second(gpu, count)
            self.links[ends] = Link(a=gpu.key, b=target, kind="xgmi", count=count, bytes_per_second=rate)

    def add_c2c(self, gpu: Gpu, element: Element, cpus: set[str]) -> None:
        """Adds one <c2c>; its `bw` is in MB/s per link."""
        if gpu.parent not in cpus or gpu.parent is None:
            where = f"line {element.line}: c2c of {gpu.key}, which does not hang off a CPU"
            self.defects.append(Defect(kind="dangling_link", where=where))
            return
        count = min(max(element.integer("count") or 1, 1), MAX_LINKS_OF_A_GPU)
        megabytes = element.integer("bw")
        rate = None if not megabytes else megabytes * count * GIGABYTE / 1000
        link = Link(a=gpu.key, b=gpu.parent, kind="c2c", count=count, bytes_per_second=rate)
        self.links[frozenset((gpu.key, gpu.parent))] = link
