"""A PCI tree as the files it could have been read from: nothing but what the checks know, so nothing else leaks."""

import struct

from gradwire.topology.readers.pci import PciFunction, PciTree
from gradwire.topology.readers.pci_config import CAPABILITY_PCI_EXPRESS, EXTENDED_ACS, EXTENDED_ATS, ConfigSpace

_EXPRESS = 0x60
_LOOP = 0x40


def tree_files(tree: PciTree) -> tuple[dict[str, bytes], dict[str, str]]:
    """Returns the files and links of sysfs that describe a PCI tree; reading them gives the same tree.

    Args:
        tree: PCI functions to write.

    Returns:
        (path -> content, path -> target of the link), all relative to the root folder.
    """
    contents: dict[str, bytes] = {}
    links: dict[str, str] = {}
    for function in tree.functions.values():
        link = f"sys/bus/pci/devices/{function.bus_id}"
        folder = link
        if function.parents is not None:
            root = (function.host_bridge or "pci0000:00",) if function.reaches_root else ()
            folder = "/".join(("sys/devices", *root, *reversed(function.parents), function.bus_id))
            links[link] = folder
        contents |= {f"{folder}/{name}": content for name, content in _attributes(function).items()}
        links |= {f"{folder}/{name}": target for name, target in _links(function).items()}
        for kind, names in (("net", function.net_devices), ("infiniband", function.rdma_devices)):
            contents |= {f"{folder}/{kind}/{name}/uevent": b"" for name in names}
    return contents, links


def _attributes(function: PciFunction) -> dict[str, bytes]:
    bars = "\n".join(
        f"0x{1 << 40:016x} 0x{(1 << 40) + n - 1:016x} 0x0" if n else "0x0 0x0 0x0" for n in function.bar_nbytes
    )
    values = {
        "class": _hexadecimal(function.class_code, 6),
        "vendor": _hexadecimal(function.vendor, 4),
        "device": _hexadecimal(function.device, 4),
        "subsystem_vendor": _hexadecimal(function.subsystem_vendor, 4),
        "subsystem_device": _hexadecimal(function.subsystem_device, 4),
        "numa_node": _decimal(function.numa_node),
        "local_cpulist": function.local_cpulist,
        "current_link_speed": _speed(function.current_gigatransfers),
        "max_link_speed": _speed(function.max_gigatransfers),
        "current_link_width": _decimal(function.current_width),
        "max_link_width": _decimal(function.max_width),
        "resource": bars or None,
    }
    files = {name: value.encode() + b"\n" for name, value in values.items() if value is not None}
    return files | ({"config": config_bytes(function.config)} if function.config else {})


def _links(function: PciFunction) -> dict[str, str]:
    links = {f"virtfn{i}": f"sys/bus/pci/devices/{bus_id}" for i, bus_id in enumerate(function.virtual_functions)}
    if function.physical_function:
        links["physfn"] = f"sys/bus/pci/devices/{function.physical_function}"
    if function.driver:
        links["driver"] = f"sys/bus/pci/drivers/{function.driver}"
    if function.iommu_group is not None:
        links["iommu_group"] = f"sys/kernel/iommu_groups/{function.iommu_group}"
    return links


def _hexadecimal(value: int | None, digits: int) -> str | None:
    return None if value is None else f"0x{value:0{digits}x}"


def _decimal(value: int | None) -> str | None:
    return None if value is None else str(value)


def _speed(gigatransfers: float | None) -> str | None:
    return None if gigatransfers is None else f"{gigatransfers} GT/s PCIe"


def config_bytes(config: ConfigSpace) -> bytes:
    """Encodes a configuration space that decodes to the same facts and has nothing else in it (no serial number)."""
    if config.header_only:
        return bytes(64)
    space = bytearray(4096)
    if config.pci_express is None:  # a capability list that runs in a circle cannot be followed
        struct.pack_into("<H", space, 0x06, 0x10)
        space[0x34] = space[_LOOP + 1] = _LOOP
        return bytes(space)
    if not config.pci_express:
        return bytes(space)
    struct.pack_into("<H", space, 0x06, 0x10)
    space[0x34] = _EXPRESS
    struct.pack_into("<BBH", space, _EXPRESS, CAPABILITY_PCI_EXPRESS, 0, 2)
    if config.relaxed_ordering is None:
        return bytes(space[: _EXPRESS + 8])
    payload, request = (_code(n) for n in (config.max_payload_nbytes, config.max_read_request_nbytes))
    struct.pack_into("<H", space, _EXPRESS + 8, config.relaxed_ordering << 4 | payload << 5 | request << 12)
    _write_extended(space, config)
    return bytes(space)


def _code(nbytes: int | None) -> int:
    return 7 if nbytes is None else nbytes.bit_length() - 8


def _write_extended(space: bytearray, config: ConfigSpace) -> None:
    words = [
        (EXTENDED_ACS, config.acs_control),
        (EXTENDED_ATS, None if config.ats_enabled is None else config.ats_enabled << 15),
    ]
    present = [(capability, word) for capability, word in words if word is not None]
    offset = 0x100
    for index, (capability, word) in enumerate(present):
        more = index + 1 < len(present) or not config.extended
        struct.pack_into("<IHH", space, offset, capability | 1 << 16 | (offset + 0x10 if more else 0) << 20, 0, word)
        offset += 0x10
    if not config.extended:
        struct.pack_into("<I", space, offset, 0xFFFFFFFF)
