"""The text of `lspci -vvv` (with or without -nn, -D) as a PCI tree: what a colleague pastes into a ticket."""

import re
from collections.abc import Iterable, Iterator
from types import MappingProxyType

from gradwire.topology.readers.pci import PciFunction, PciTree
from gradwire.topology.readers.pci_config import REDIRECT_BITS, ConfigSpace

CLASSES = {
    "VGA compatible controller": 0x030000,
    "3D controller": 0x030200,
    "Display controller": 0x038000,
    "Ethernet controller": 0x020000,
    "Infiniband controller": 0x020700,
    "Network controller": 0x028000,
    "PCI bridge": 0x060400,
    "Host bridge": 0x060000,
    "Bridge": 0x068000,
}
"""Class names of functions that matter. Source: pci.ids, section C."""
VENDORS = {
    "NVIDIA": 0x10DE,
    "Mellanox": 0x15B3,
    "Broadcom / LSI": 0x1000,
    "Broadcom": 0x14E4,
    "Intel": 0x8086,
    "Amazon": 0x1D0F,
    "Cray": 0x17DB,
    "Hewlett Packard Enterprise": 0x1590,
    "Chelsio": 0x1425,
    "PMC-Sierra": 0x11F8,
}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_HEAD = re.compile(
    r"((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) ([^:\[]{2,60}?)(?: \[([0-9a-f]{4})\])?: (.{1,300})"
)
_BUSES = re.compile(r"Bus: primary=([0-9a-f]{2}), secondary=([0-9a-f]{2}), subordinate=([0-9a-f]{2})")
_ACS_BITS = dict(zip(("SrcValid", "TransBlk"), (0, 1), strict=True)) | {
    name: bit for bit, name in REDIRECT_BITS.items()
}
_MAX_FUNCTIONS = 65536
_MAX_LINES = 5_000_000


def parse_lspci(lines: Iterable[str]) -> PciTree:
    """Builds the tree from buses: a function on bus B hangs below the bridge whose secondary bus is B.

    Vendors of devices without -nn are told by name; NUMA nodes, links, ACS and read requests need -vvv and root.

    Source: lspci(8); PCI Local Bus 3.0 section 3.2.2.3 (type 1 header: primary and secondary bus).
    """
    blocks = list(_blocks(lines))
    above: dict[tuple[str, str], str] = {}
    for bus_id, _, text in blocks:
        match = _BUSES.search(text)
        if match:
            above[bus_id[:-8], match[2]] = bus_id
    functions = {}
    for bus_id, head, text in blocks[:_MAX_FUNCTIONS]:
        functions[bus_id] = _function(bus_id, head, text, _chain(bus_id, above))
    problems = () if functions else ("no line begins with a bus id: is this the output of lspci?",)
    return PciTree(MappingProxyType(dict(sorted(functions.items()))), problems)


def _blocks(lines: Iterable[str]) -> Iterator[tuple[str, "re.Match[str]", str]]:
    """(full bus id, match of the first line, all lines) of each function."""
    head, block = None, [""]
    for number, line in enumerate(lines):
        match = _HEAD.match(line[:400])
        if match or number == _MAX_LINES:
            if head:
                yield _full(head[1]), head, "".join(block)
            head, block = match, []
        if number == _MAX_LINES:
            return
        if len(block) < 1000:
            block.append(line[:1000])
    if head:
        yield _full(head[1]), head, "".join(block)


def _full(bus_id: str) -> str:
    return bus_id if bus_id.count(":") == 2 else f"0000:{bus_id}"


def _chain(bus_id: str, above: dict[tuple[str, str], str]) -> tuple[str, ...] | None:
    """Bridges above a function; None when the buses run in a circle."""
    chain: list[str] = []
    domain, bus = bus_id[:-8], bus_id[-7:-5]
    while (bridge := above.get((domain, bus))) is not None:
        if bridge in chain or bridge == bus_id:
            return None
        chain.append(bridge)
        bus = bridge[-7:-5]
    return tuple(chain)


def _number(pattern: str, text: str, base: int = 10) -> int | None:
    match = re.search(pattern, text)
    return int(match[1], base) if match else None


def _function(bus_id: str, head: "re.Match[str]", text: str, chain: tuple[str, ...] | None) -> PciFunction:
    ids = re.search(r"\[([0-9a-f]{4}):([0-9a-f]{4})\]", head[4])
    name = next((word for word in VENDORS if head[4].startswith(word)), None)
    code = int(head[3], 16) << 8 if head[3] else CLASSES.get(head[2].strip())
    now, most = (
        re.search(rf"{word}:.{{0,40}}?Speed ([0-9.]{{1,5}})GT/s.{{0,40}}?Width x([0-9]{{1,2}})", text)
        for word in ("LnkSta", "LnkCap")
    )
    driver = re.search(r"Kernel driver in use: (\S{1,40})", text)
    sizes = re.findall(r"Region \d: Memory .{1,100}?\[size=(\d{1,4})([KMGT]?)\]", text)
    return PciFunction(
        bus_id=bus_id,
        class_code=code,
        vendor=int(ids[1], 16) if ids else VENDORS.get(name or ""),
        device=int(ids[2], 16) if ids else _number(r"Device ([0-9a-f]{4})\b", head[4], 16),
        parents=chain,
        driver=driver[1] if driver else None,
        numa_node=_number(r"NUMA node: (\d{1,4})", text),
        current_gigatransfers=_float(now),
        current_width=int(now[2]) if now else None,
        max_gigatransfers=_float(most),
        max_width=int(most[2]) if most else None,
        iommu_group=_number(r"IOMMU group: (\d{1,6})", text),
        bar_nbytes=tuple(int(count) * _UNITS[unit] for count, unit in sizes),
        config=_config(text),
    )


def _float(match: "re.Match[str] | None") -> float | None:
    try:
        return float(match[1]) if match else None
    except ValueError:
        return None


def _config(text: str) -> ConfigSpace:
    """What -vvv decodes; without root lspci says `Capabilities: <access denied>`, without -v nothing."""
    if "Capabilities: [" not in text:
        return ConfigSpace(header_only=True)
    acs = re.search(r"ACSCtl:\s*(.{1,120})", text)
    word = None if acs is None else sum(1 << bit for name, bit in _ACS_BITS.items() if f"{name}+" in acs[1])
    ats = re.search(r"ATSCtl:\s*Enable([+-])", text)
    ordering = re.search(r"RlxdOrd([+-])", text)
    return ConfigSpace(
        header_only=False,
        pci_express="Express (v" in text,
        extended=bool(re.search(r"Capabilities: \[[0-9a-f]{3} v", text)) or "Express (v" not in text,
        acs_control=word,
        ats_enabled=ats[1] == "+" if ats else None,
        relaxed_ordering=ordering[1] == "+" if ordering else None,
        max_payload_nbytes=_number(r"DevCtl:(?:.|\n){1,400}?MaxPayload (\d{3,4}) bytes", text),
        max_read_request_nbytes=_number(r"MaxReadReq (\d{3,4}) bytes", text),
    )
