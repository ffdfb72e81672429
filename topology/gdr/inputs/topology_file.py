"""Distances from an NCCL topology file: where one is in force, NCCL believes it and not the PCI bus."""

import re
from collections.abc import Mapping, Sequence

TAGS = r"</?(?:system|cpu|pci)\b[^<>]{0,2000}>"
"""The tags that hold the tree. Only they are searched for: no entity is expanded, no guid is captured."""
STANDARD_PATH = "var/run/nvidia-topologyd/virtualTopology.xml"
"""File that NCCL reads by default. Source: NCCL src/graph/topo.cc (NCCL_TOPO_XML_FILE default)."""

_MAX_DEPTH = 64

FilePosition = tuple[str, tuple[str, ...]]
"""(NUMA id of the CPU, bus ids of the switches above, nearest first)."""


def read_positions(tags: Sequence[str]) -> dict[str, FilePosition]:
    """Finds the position of each PCI device in a topology file: bus id -> its CPU and the switches above.

    Args:
        tags: Matches of `TAGS`, in the file's order.

    Source: NCCL src/graph/xml.h: `pci` elements nest below `cpu` as the switches do.
    """
    positions: dict[str, FilePosition] = {}
    numa = ""
    above: list[str] = []
    for tag in tags:
        if tag.startswith("</"):
            above = above[:-1] if tag.startswith("</pci") else above
        elif tag.startswith("<cpu"):
            numa, above = _attribute(tag, "numaid"), []
        elif tag.startswith("<pci") and len(above) < _MAX_DEPTH:
            bus_id = _attribute(tag, "busid").lower()
            positions.setdefault(bus_id, (numa, tuple(reversed(above))))
            above = above if tag.endswith("/>") else [*above, bus_id]
    positions.pop("", None)
    return positions


def _attribute(tag: str, name: str) -> str:
    match = re.search(rf'\b{name}="([^"]{{0,40}})"', tag)
    return match[1] if match else ""


def file_path_type(positions: Mapping[str, FilePosition], one: str, other: str) -> str | None:
    """Returns the path type between two devices of a topology file; None if the file lacks one of them.

    Args:
        positions: Result of `read_positions`.
        one: Bus id.
        other: Bus id.
    """
    if one not in positions or other not in positions:
        return None
    (first_numa, first), (second_numa, second) = positions[one], positions[other]
    if first and second and first[0] == second[0]:
        return "PIX"
    if set(first) & set(second):
        return "PXB"
    return "PHB" if first_numa == second_numa else "SYS"
