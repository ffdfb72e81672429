"""Decodes a PCI function's configuration space: ACS, ATS, relaxed ordering, payload and read request sizes."""

from collections.abc import Callable
from dataclasses import dataclass

Reader = Callable[[int, int], bytes]
"""(offset, nbytes) -> the bytes there; fewer, or none, where the kernel hides or lacks them."""

REDIRECT_BITS = {2: "ReqRedir", 3: "CmpltRedir", 4: "UpstreamFwd", 5: "EgressCtrl"}
"""ACS control bits that take peer-to-peer traffic off the short way. Source: PCI Express Base 5.0, section 7.7.8.3."""

CAPABILITY_PCI_EXPRESS = 0x10
EXTENDED_ACS = 0x000D
EXTENDED_ATS = 0x000F
_STANDARD_NBYTES = 256
_END = 4096
_HEADER_NBYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSpace:
    """Holds the registers that decide about peer-to-peer traffic; None is "could not be read", never "off"."""

    header_only: bool
    """True if the kernel showed 64 bytes or fewer: it hides the rest from everybody but root."""
    pci_express: bool | None = None
    """True if the function has a PCI Express capability; None if the list of capabilities cannot be followed."""
    extended: bool = False
    """True if every extended capability was read, so that an absent one is really absent."""
    acs_control: int | None = None
    """ACS control word; None with `extended` means that the function has no ACS capability."""
    ats_enabled: bool | None = None
    """True if the address translation service is on; None with `extended` means no ATS capability."""
    relaxed_ordering: bool | None = None
    """True if relaxed ordering is on (Device Control bit 4)."""
    max_payload_nbytes: int | None = None
    """Largest payload of a packet in bytes (Device Control bits 7:5)."""
    max_read_request_nbytes: int | None = None
    """Largest read request in bytes (Device Control bits 14:12)."""

    @property
    def acs_redirect(self) -> tuple[str, ...] | None:
        """Returns the names of the set ACS bits that redirect peer traffic; None if the register is unknown."""
        if self.acs_control is None:
            return () if self.extended else None
        return tuple(name for bit, name in REDIRECT_BITS.items() if self.acs_control >> bit & 1)


def decode(read: Reader) -> ConfigSpace:
    """Decodes a configuration space with few, small reads (each double word costs a bus transaction).

    Args:
        read: Function of (offset, nbytes) that returns the bytes there; the space may be cut at 64 bytes (not root) or
            at 256 (no extended space).

    Source: PCI Local Bus 3.0 section 6.7 (capability list), PCI Express Base 5.0 sections 7.5.3.4 (Device Control)
    and 7.6.3 (extended capability header).
    """
    header = read(0, _HEADER_NBYTES)
    probe = read(_HEADER_NBYTES, 1)
    if len(header) < _HEADER_NBYTES or not probe or header[:2] == b"\xff\xff":
        return ConfigSpace(header_only=True)
    express = _find_standard(read, header)
    control = read(express + 8, 2) if express else b""
    extended, offsets = _walk_extended(read) if express else (express is not None, {})
    word = int.from_bytes(control, "little") if len(control) == 2 else None
    acs = _word(read, offsets, EXTENDED_ACS)
    ats = _word(read, offsets, EXTENDED_ATS)
    broken = (EXTENDED_ACS in offsets and acs is None) or (EXTENDED_ATS in offsets and ats is None)
    return ConfigSpace(
        header_only=False,
        pci_express=None if express is None else bool(express),
        extended=extended and not broken,
        acs_control=acs,
        ats_enabled=None if ats is None else bool(ats >> 15),
        relaxed_ordering=None if word is None else bool(word >> 4 & 1),
        max_payload_nbytes=_size(word, 5),
        max_read_request_nbytes=_size(word, 12),
    )


def decode_bytes(space: bytes) -> ConfigSpace:
    """Decodes a configuration space that is already in memory."""
    return decode(lambda offset, nbytes: space[offset : offset + nbytes])


def _size(word: int | None, shift: int) -> int | None:
    """Decodes a size in bytes from a three-bit field of Device Control; None for the reserved codes 6 and 7.

    Args:
        word: Device Control; None gives None.
        shift: Lowest bit of the field.
    """
    code = None if word is None else word >> shift & 7
    return None if code is None or code > 5 else 128 << code


def _word(read: Reader, offsets: dict[int, int], capability: int) -> int | None:
    """Returns the control word of an extended capability (6 bytes into it); None if it is absent or unreadable."""
    if capability not in offsets:
        return None
    data = read(offsets[capability] + 6, 2)
    return int.from_bytes(data, "little") if len(data) == 2 else None


def _find_standard(read: Reader, header: bytes) -> int | None:
    """Returns the offset of the PCI Express capability; 0 if there is none, None if the list cannot be followed."""
    if not header[0x06] >> 4 & 1:
        return 0
    seen: set[int] = set()
    offset = header[0x34] & 0xFC
    while offset >= _HEADER_NBYTES and offset not in seen:
        seen.add(offset)
        entry = read(offset, 2)
        if len(entry) < 2 or offset + 2 > _STANDARD_NBYTES:
            return None
        if entry[0] == CAPABILITY_PCI_EXPRESS:
            return offset
        offset = entry[1] & 0xFC
    return 0 if offset == 0 else None


def _walk_extended(read: Reader) -> tuple[bool, dict[int, int]]:
    """Walks the extended capabilities; returns (walked to the end, capability id -> offset)."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    offset = _STANDARD_NBYTES
    while offset not in seen:
        seen.add(offset)
        data = read(offset, 4)
        entry = int.from_bytes(data, "little")
        if len(data) < 4 or entry == 0xFFFFFFFF:
            return False, found
        if entry == 0:
            return offset == _STANDARD_NBYTES, found
        found.setdefault(entry & 0xFFFF, offset)
        offset = entry >> 20 & 0xFFC
        if offset == 0:
            return True, found
        if not _STANDARD_NBYTES <= offset < _END:
            return False, found
    return False, found
