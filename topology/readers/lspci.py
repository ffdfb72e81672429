"""The text of `lspci -vvv` (with or without -nn, -D): what a colleague pastes into a ticket.

`read_tree` gives the PCI tree, which the GPUDirect-RDMA checks look at; `read` gives the Machine in it. The bus numbers
of bridges give the tree. Without -v there are no bridges' bus numbers and no NUMA nodes, so nothing is known about
distances and every path is unknown. ACS and read requests need -vvv and root.

Source: lspci(8); PCI Local Bus 3.0 section 3.2.2.3 (type 1 header: primary and secondary bus).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Gpu, Machine, Nic
from gradwire.topology.pci_ids import (
    AMAZON,
    AMD_GPU,
    BROADCOM,
    BROADCOM_LSI,
    CHELSIO,
    CRAY,
    HPE,
    INTEL,
    MELLANOX,
    MICROSOFT,
    NVIDIA,
    RED_HAT,
    normal_bus_id,
    role_of_function,
)
from gradwire.topology.readers.forest import Forest, link_between
from gradwire.topology.readers.pci import PciFunction, PciTree
from gradwire.topology.readers.pci_config import REDIRECT_BITS, ConfigSpace

HEAD = re.compile(
    r"((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (.{1,80}?)(?: \[([0-9a-f]{4})\])?: (.{0,300})", re.IGNORECASE
)
"""`19:00.0 3D controller [0302]: NVIDIA Corporation GH100 [10de:2330] (rev a1)`."""
_IDS = re.compile(r"\[([0-9a-f]{4}):([0-9a-f]{4})\]", re.IGNORECASE)
_UNNAMED = re.compile(r"Device ([0-9a-f]{4}):([0-9a-f]{4})", re.IGNORECASE)
"""What lspci prints where its list of names lacks the maker."""
_ROOT_PORT = re.compile(r"Express \(v\d\) Root Port")
_BUSES = re.compile(r"Bus: primary=([0-9a-f]{2}), secondary=([0-9a-f]{2})", re.IGNORECASE)
_LINK_NOW, _LINK_MOST = (
    re.compile(
        rf"{word}:.{{0,40}}?Speed (?:([0-9]{{1,3}}(?:\.[0-9]{{1,2}})?)\s*GT/s|\S+).{{0,60}}?Width x([0-9]{{1,2}})\b"
    )
    for word in ("LnkSta", "LnkCap")
)
"""(GT/s, lanes) of the link as it is and as the function could have it; newer versions write `Speed unknown`."""

CLASSES = {
    "VGA compatible controller": 0x030000, "3D controller": 0x030200, "Display controller": 0x038000,
    "Processing accelerators": 0x120000, "Ethernet controller": 0x020000, "Infiniband controller": 0x020700,
    "InfiniBand controller": 0x020700, "Network controller": 0x028000, "PCI bridge": 0x060400,
    "Host bridge": 0x060000, "Bridge": 0x068000,
}  # fmt: skip
"""lspci's word for a class -> its code; only the classes that matter here. Source: pci.ids, section C."""

VENDORS = (
    ("NVIDIA", NVIDIA), ("Advanced Micro Devices, Inc. [AMD/ATI]", AMD_GPU), ("Mellanox", MELLANOX),
    ("Broadcom / LSI", BROADCOM_LSI), ("Amazon", AMAZON), ("Cray", CRAY), ("Hewlett Packard", HPE),
    ("Broadcom", BROADCOM), ("Intel", INTEL), ("Chelsio", CHELSIO), ("PMC-Sierra", 0x11F8),
    ("Microsoft", MICROSOFT), ("Red Hat", RED_HAT), ("VMware", 0x15AD),
)  # fmt: skip
"""Beginning of a description -> vendor id, for text without the numbers of -nn."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_ACS_BITS = {"SrcValid": 0, "TransBlk": 1} | {name: bit for bit, name in REDIRECT_BITS.items()}
_MAX_FUNCTIONS = 16_384
"""Sixteen cards with 256 virtual functions each are 4,096."""
_MAX_LINES = 5_000_000
_MAX_LINES_OF_A_FUNCTION = 1000


def looks_like_lspci(text: str) -> bool:
    """Returns whether some line of a text is the head of a function as lspci prints it.

    Args:
        text: Any text.
    """
    return any(HEAD.match(line) for line in text.splitlines())


def read_tree(lines: Iterable[str]) -> PciTree:
    """Returns the PCI tree of a listing without ever raising; what the listing lacks is None.

    Of a function that is listed twice the last entry counts.

    Args:
        lines: Output of lspci, with or without line ends.
    """
    return _tree(list(_listed(lines)))[0]


def read(text: str) -> Machine:
    """Returns the machine that a listing describes.

    Args:
        text: Output of `lspci -vvv`, `lspci -vvvnn` or `lspci -nn`.

    Raises:
        TopologyError: There is no PCI function in the text, one is listed twice, or bridges form a cycle.
    """
    listed = list(_listed(text.splitlines()))
    if not listed:
        raise TopologyError("no PCI function found; expected the output of `lspci -vvv`")
    seen: dict[str, int] = {}
    for entry in listed:
        if entry.bus_id in seen:
            raise TopologyError(
                f"PCI function {entry.bus_id} is listed twice, first on line {seen[entry.bus_id]}; "
                "if these are two hosts, give the listing of one",
                line=entry.line,
            )
        seen[entry.bus_id] = entry.line
    tree, circles = _tree(listed)
    functions = list(tree.functions.values())
    for function in functions:
        role = role_of_function(function.class_code or 0, function.vendor)
        if function.bus_id in circles and role in ("gpu", "nic", "nvswitch"):
            raise TopologyError(f"the PCI bridges above {function.bus_id} form a cycle")
    verbose = any(entry.body for entry in listed)
    if verbose:
        functions = [replace(function, host_bridge=f"pci{function.bus_id[:-5]}") for function in functions]
    machine = Forest(functions, (), link_between).build({})
    return replace(machine, notes=(*machine.notes, *_notes(verbose, text, machine)), sources=("lspci",))


@dataclass(slots=True)
class _Listed:
    """Holds the text of one function in a listing."""

    line: int
    """Number of its first line, from 1."""
    bus_id: str
    kind: str
    """Name of its class."""
    class_id: str | None
    """Class and subclass in hexadecimal, with -nn."""
    description: str
    body: list[str] = field(default_factory=list)
    """Further lines of the function."""
    ended: bool = False
    """True after a blank line: lines without indentation no longer belong to the function."""

    @property
    def text(self) -> str:
        """Returns the lines of the function after its first one, joined by newlines."""
        return "\n".join(self.body)

    @property
    def is_root(self) -> bool:
        """Returns whether the function proves that its bus is directly below a host bridge."""
        host = self.kind.strip() == "Host bridge" or self.class_id == "0600"
        return host or self.bus_id[-7:-5] == "00" or _ROOT_PORT.search(self.text) is not None


def _listed(lines: Iterable[str]) -> Iterator[_Listed]:
    """Yields the functions of a listing; lines that belong to none are skipped."""
    entry: _Listed | None = None
    count = 0
    for number, raw in enumerate(lines, start=1):
        line = raw[:1000].rstrip("\r\n")
        match = HEAD.match(line)
        if match is not None or number > _MAX_LINES:
            if entry is not None:
                yield entry
            count += 1
            if match is None or count > _MAX_FUNCTIONS:
                return
            bus_id = normal_bus_id(match[1])
            assert bus_id is not None  # the pattern of a head is that of a bus id
            entry = _Listed(number, bus_id, match[2], match[3], match[4])
        elif entry is not None:
            entry.ended |= not line.strip()
            belongs = line[:1] in ("\t", " ") or not entry.ended
            if belongs and line.strip() and len(entry.body) < _MAX_LINES_OF_A_FUNCTION:
                entry.body.append(line)
    if entry is not None:
        yield entry


def _tree(listed: list[_Listed]) -> tuple[PciTree, frozenset[str]]:
    """Builds the tree from buses: a function on bus B hangs below the bridge whose secondary bus is B.

    A listing that was filtered or cut lacks bridges. That a chain of bridges is whole shows the bus it ends on: bus
    00, one with a host bridge or a root port, or, in a listing that has the host's bus 00 and so was not filtered,
    any bus that a bridge stands on.

    Returns:
        The tree, and the functions above which the buses run in a circle.
    """
    above: dict[tuple[str, str], str] = {}
    roots = {(entry.bus_id[:-8], entry.bus_id[-7:-5]) for entry in listed if entry.is_root}
    for entry in listed:
        buses = _BUSES.search(entry.text)
        if buses is not None and buses[2] != "00":
            above[entry.bus_id[:-8], buses[2].lower()] = entry.bus_id
    whole = any(entry.bus_id.startswith("0000:00:") for entry in listed)
    functions, circles = {}, set()
    for entry in listed:
        chain = _chain(entry.bus_id, above)
        if chain is None:
            circles.add(entry.bus_id)
        top = (chain or (entry.bus_id,))[-1]
        rooted = (top[:-8], top[-7:-5]) in roots or (whole and bool(chain))
        function = _function(entry, chain if chain or rooted else None)
        functions[entry.bus_id] = replace(function, reaches_root=rooted and chain is not None)
    problems = () if functions else ("no line begins with a bus id: is this the output of lspci?",)
    return PciTree(MappingProxyType(dict(sorted(functions.items()))), problems), frozenset(circles)


def _chain(bus_id: str, above: dict[tuple[str, str], str]) -> tuple[str, ...] | None:
    """Returns the bridges above a function, nearest first; None if the buses form a cycle.

    Args:
        bus_id: Bus id of the function.
        above: (domain, bus number) -> bus id of the bridge above that bus.
    """
    chain: list[str] = []
    domain, bus = bus_id[:-8], bus_id[-7:-5]
    while (bridge := above.get((domain, bus))) is not None:
        # A chain through more than the 256 buses of a domain comes by one of them twice.
        if len(chain) > 256 or bridge == bus_id:
            return None
        chain.append(bridge)
        bus = bridge[-7:-5]
    return tuple(chain)


def _function(entry: _Listed, parents: tuple[str, ...] | None) -> PciFunction:
    """Parses one function from its lines.

    Args:
        entry: Text of the function.
        parents: Bridges above it, nearest first; None if unknown.
    """
    text, description = entry.text, entry.description
    unnamed = _UNNAMED.match(description)
    ids = _IDS.findall(description) or ([unnamed.groups()] if unnamed else [])
    by_name = next((code for name, code in VENDORS if description.startswith(name)), None)
    driver = re.search(r"Kernel driver in use: (\S{1,40})", text)
    sizes = re.findall(r"Region \d: Memory .{1,100}?\[size=(\d{1,4})([KMGT]?)\]", text)
    now, most = _LINK_NOW.search(text), _LINK_MOST.search(text)
    return PciFunction(
        bus_id=entry.bus_id,
        class_code=int(entry.class_id, 16) << 8 if entry.class_id else CLASSES.get(entry.kind.strip()),
        vendor=int(ids[-1][0], 16) if ids else by_name,
        device=int(ids[-1][1], 16) if ids else _device_by_name(description),
        parents=parents,
        name=re.sub(r" \(rev .*| \[[0-9a-f]{4}:[0-9a-f]{4}\].*", "", description),
        driver=driver[1] if driver else None,
        numa_node=_number(r"NUMA node: (\d{1,5})\b", text),
        current_gigatransfers=float(now[1]) if now and now[1] else None,
        current_width=int(now[2]) if now else None,
        max_gigatransfers=float(most[1]) if most and most[1] else None,
        max_width=int(most[2]) if most else None,
        iommu_group=_number(r"IOMMU group: (\d{1,6})", text),
        bar_nbytes=tuple(int(count) * _UNITS[unit] for count, unit in sizes),
        config=_config(text),
    )


def _device_by_name(description: str) -> int | None:
    """Returns the PCI device id that a line of `lspci` without -nn shows in its description; None if it shows none.

    `Device 2330` shows it as a hexadecimal number, because lspci knows no name for it. `PEX880xx` and `PEX890xx`, two
    series of Broadcom's PCIe switches, stand for 0xC010 and 0xC030.

    Args:
        description: Text after the class of the device.
    """
    unnamed = re.search(r"Device ([0-9a-f]{4})\b", description)
    if unnamed is not None:
        return int(unnamed[1], 16)
    return {"PEX880xx": 0xC010, "PEX890xx": 0xC030}.get(next(iter(re.findall(r"PEX8[89]0xx", description)), ""))


def _number(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return int(match[1]) if match else None


def _config(text: str) -> ConfigSpace:
    """Parses the configuration space as -vvv decodes it.

    Without root lspci prints `Capabilities: <access denied>`, without -v nothing: the result is `header_only` then.
    """
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


def _notes(verbose: bool, text: str, machine: Machine) -> list[str]:
    """Returns sentences on what this listing cannot show."""
    notes = ["lspci does not know network ports, their speed or NVLink."]
    devices: list[Gpu | Nic] = [*machine.gpus, *machine.nics]
    lost = sum(not device.bridges_known for device in (*devices, *machine.switches))
    if not verbose:
        notes.append("The listing has no bridges' bus numbers: use `lspci -vvv`; every distance is unknown.")
    elif lost:
        notes.append(
            f"Of {lost} devices the listing lacks bridges above them, as one that was filtered or cut does: distances "
            "below one CPU are unknown; give the whole output of `lspci -vvv`."
        )
    if verbose and "NUMA node:" not in text:
        notes.append("The listing names no NUMA node: which CPU a device hangs off is unknown.")
    return notes
