"""`lspci -vvv` (with or without -nn) -> Machine.

The bus numbers of bridges give the tree. Without -v there are no bridges' bus numbers and no NUMA nodes, so nothing is
known about distances and every path is unknown.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Machine, PcieLink
from gradwire.topology.pci_ids import AMAZON, AMD_GPU, BROADCOM_LSI, CRAY, HPE, MELLANOX, NVIDIA, normal_bus_id
from gradwire.topology.readers.forest import Forest, PciEntry

HEAD = re.compile(
    r"((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (.+?)(?: \[([0-9a-f]{4})\])?: (.*)", re.IGNORECASE
)
"""`19:00.0 3D controller [0302]: NVIDIA Corporation GH100 [10de:2330] (rev a1)`."""
_IDS = re.compile(r"\[([0-9a-f]{4}):([0-9a-f]{4})\]", re.IGNORECASE)
_BUSES = re.compile(r"Bus: primary=([0-9a-f]{2}), secondary=([0-9a-f]{2})", re.IGNORECASE)
_LINK = re.compile(r"LnkSta:\s*Speed (?:([0-9]{1,3}(?:\.[0-9])?)\s*GT/s|\S+).*?Width x([0-9]{1,2})\b")

CLASSES = {
    "VGA compatible controller": 0x030000, "3D controller": 0x030200, "Display controller": 0x038000,
    "Processing accelerators": 0x120000, "Ethernet controller": 0x020000, "Infiniband controller": 0x020700,
    "InfiniBand controller": 0x020700, "Network controller": 0x028000, "PCI bridge": 0x060400, "Bridge": 0x068000,
}  # fmt: skip
"""lspci's word for a class -> its code; only the classes that matter here."""

VENDORS = (
    ("NVIDIA", NVIDIA), ("Advanced Micro Devices, Inc. [AMD/ATI]", AMD_GPU), ("Mellanox", MELLANOX),
    ("Broadcom / LSI", BROADCOM_LSI), ("Amazon", AMAZON), ("Cray", CRAY), ("Hewlett Packard", HPE),
    ("Broadcom", 0x14E4), ("Intel", 0x8086), ("Microsoft", 0x1414), ("Red Hat", 0x1B36), ("VMware", 0x15AD),
)  # fmt: skip
"""Beginning of a description -> vendor id, for text without the numbers of -nn."""

Block = tuple[int, str, list[str]]
"""Line number, first line, further lines of one function."""


def looks_like_lspci(text: str) -> bool:
    """Returns whether some line of a text is the head of a function as lspci prints it.

    Args:
        text: Any text.
    """
    return any(HEAD.match(line) for line in text.splitlines())


def read(text: str) -> Machine:
    """Returns the machine that a listing describes.

    Args:
        text: What `lspci -vvv`, `lspci -vvvnn` or `lspci -nn` printed.

    Raises:
        TopologyError: There is no PCI function in the text, or one is listed twice.
    """
    blocks = list(_blocks(text))
    if not blocks:
        raise TopologyError("no PCI function found; expected the output of `lspci -vvv`")
    functions: dict[str, PciEntry] = {}
    behind: dict[tuple[str, str], str] = {}
    for line, head, body in blocks:
        function = _function(head, "\n".join(body))
        if function.bus in functions:
            raise TopologyError(f"PCI function {function.bus} is listed twice", line=line)
        functions[function.bus] = function
        buses = _BUSES.search("\n".join(body))
        if buses is not None and buses[2] != "00":
            behind[function.bus.split(":")[0], buses[2].lower()] = function.bus
    verbose = any(body for _, _, body in blocks)
    placed = [_placed(function, behind) if verbose else function for function in functions.values()]
    machine = Forest(placed, ()).build({})
    return replace(machine, notes=_notes(verbose, text), sources=("lspci",))


def _blocks(text: str) -> Iterator[Block]:
    """Yields one block per function; lines that belong to none are skipped."""
    block: Block | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if HEAD.match(line):
            if block is not None:
                yield block
            block = (number, line, [])
        elif block is not None and line[:1] in ("\t", " "):
            block[2].append(line)
    if block is not None:
        yield block


def _function(head: str, body: str) -> PciEntry:
    """Returns one function; the head is known to match."""
    match = HEAD.match(head)
    assert match is not None
    bus = normal_bus_id(match[1])
    assert bus is not None
    ids = _IDS.findall(match[4])
    vendor = int(ids[-1][0], 16) if ids else next((code for name, code in VENDORS if match[4].startswith(name)), None)
    numa = re.search(r"NUMA node: ([0-9]{1,5})\b", body)
    driver = re.search(r"Kernel driver in use: (\S+)", body)
    return PciEntry(
        bus=bus,
        class_code=int(match[3], 16) << 8 if match[3] else CLASSES.get(match[2], 0),
        vendor=vendor,
        device=int(ids[-1][1], 16) if ids else _device_by_name(match[4]),
        numa=int(numa[1]) if numa else None,
        pcie=_link(body),
        driver=driver[1] if driver else None,
        name=re.sub(r" \(rev .*| \[[0-9a-f]{4}:[0-9a-f]{4}\].*", "", match[4]),
    )


def _device_by_name(description: str) -> int | None:
    """Returns the device id that text without -nn still gives away: `Device 2330`, or a Broadcom switch's series."""
    unnamed = re.search(r"Device ([0-9a-f]{4})\b", description)
    if unnamed is not None:
        return int(unnamed[1], 16)
    return {"PEX880xx": 0xC010, "PEX890xx": 0xC030}.get(next(iter(re.findall(r"PEX8[89]0xx", description)), ""))


def _link(body: str) -> PcieLink | None:
    """Returns the link status, or None for a function without one."""
    match = _LINK.search(body)
    if match is None:
        return None
    return PcieLink(gigatransfers_per_second=float(match[1]) if match[1] else None, lanes=int(match[2]))


def _placed(function: PciEntry, behind: dict[tuple[str, str], str]) -> PciEntry:
    """Returns the function with its bridge, which is the one whose secondary bus it sits on, or its root complex."""
    domain, bus, _ = function.bus.split(":")
    bridge = behind.get((domain, bus))
    return replace(function, bridge=None if bridge == function.bus else bridge, root=f"pci{domain}:{bus}")


def _notes(verbose: bool, text: str) -> tuple[str, ...]:
    """Returns what this listing cannot tell."""
    notes = ["lspci does not know network ports, their speed or NVLink."]
    if not verbose:
        notes.append("The listing has no bridges' bus numbers: use `lspci -vvv`; every distance is unknown.")
    elif "NUMA node:" not in text:
        notes.append("The listing names no NUMA node: which CPU a device hangs off is unknown.")
    return tuple(notes)
