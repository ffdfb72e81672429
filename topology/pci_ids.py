"""Meaning of PCI bus ids, class codes and vendor ids.

Source: PCI Code and ID Assignment Specification 1.11 (class codes); NCCL v2.30 src/graph/topo.cc (which class is which
node for NCCL); the public PCI ID repository (vendors).
"""

import re
from typing import Literal

PciRole = Literal["gpu", "nic", "nvswitch", "cpu", "switch", "other"]

NVIDIA, AMD_GPU, MELLANOX, BROADCOM_LSI, AMAZON = 0x10DE, 0x1002, 0x15B3, 0x1000, 0x1D0F
CRAY, HPE, MICROSOFT, RED_HAT = 0x17DB, 0x1590, 0x1414, 0x1B36
BROADCOM, INTEL, CHELSIO, PENSANDO = 0x14E4, 0x8086, 0x1425, 0x1DD8
CORNELIS, GOOGLE = 0x434E, 0x1AE0

VENDOR_NAMES = {
    NVIDIA: "NVIDIA", AMD_GPU: "AMD", MELLANOX: "Mellanox", BROADCOM_LSI: "Broadcom", AMAZON: "Amazon",
    CRAY: "Cray", HPE: "HPE", BROADCOM: "Broadcom", INTEL: "Intel", 0x1022: "AMD", 0x11F8: "Microchip",
    0x10B5: "PLX", MICROSOFT: "Microsoft", RED_HAT: "QEMU", 0x1AF4: "virtio", 0x15AD: "VMware", GOOGLE: "Google",
    CORNELIS: "Cornelis", 0x104C: "Texas Instruments", 0x1A03: "ASPEED", 0x102B: "Matrox",
}  # fmt: skip
"""Vendor id -> the name people use."""

AMD_NAMES = {
    0x1586: "Radeon 8060S or 8050S", 0x738C: "Instinct MI100", 0x7408: "Instinct MI250X", 0x740C: "Instinct MI250X",
    0x740F: "Instinct MI210", 0x744C: "Radeon RX 7900 XT or XTX", 0x74A0: "Instinct MI300A", 0x74A1: "Instinct MI300X",
    0x74A2: "Instinct MI308X", 0x74A5: "Instinct MI325X", 0x74B5: "Instinct MI300X", 0x74B9: "Instinct MI325X",
    0x7551: "Radeon AI PRO R9700", 0x75A0: "Instinct MI350X", 0x75A3: "Instinct MI355X",
}  # fmt: skip
"""PCI device id of an AMD GPU, or of its virtual function -> its model, which Linux's driver does not tell. Source:
pci.ids."""

VIRTUAL_BRIDGE_VENDORS = frozenset({0xFFFF, RED_HAT, 0x1AF4, 0x15AD, MICROSOFT, 0x5853})
"""Bridges of these vendors are software: hand-written files, QEMU, virtio, VMware, Hyper-V, Xen."""

EMULATED_BRIDGES = frozenset({(0x104C, 0x8232), (0x104C, 0x8233)})
"""QEMU's `x3130-upstream` and `xio3130-downstream`; the real XIO3130 is a 2.5 GT/s x1 part."""

_BUS_ID = re.compile(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")


def amd_name(vendor: int | None, device: int | None) -> str | None:
    """Returns the model of AMD's GPU with these PCI ids, `AMD Instinct MI300X`; None for any other device.

    Args:
        vendor: PCI vendor id.
        device: PCI device id.
    """
    model = AMD_NAMES.get(device or 0) if vendor == AMD_GPU else None
    return None if model is None else f"AMD {model}"


def normal_bus_id(text: str) -> str | None:
    """Returns a bus id as sysfs writes it (`0000:04:00.0`), or None if the text is no bus id.

    Args:
        text: Bus id in any case, with or without a domain, which NVML pads to eight digits.
    """
    match = _BUS_ID.fullmatch(text.strip())
    if match is None:
        return None
    domain = int(match[1] or "0", 16)
    return f"{domain:04x}:{match[2]}:{match[3]}.{match[4]}".lower()


def role_of_class(class_code: int) -> PciRole:
    """Returns the role that a collective library assigns to a PCI function by its class: `gpu`, `nic`, `switch`, ...

    Args:
        class_code: 24 bits: base class, sub-class, programming interface.
    """
    base, sub = class_code >> 16, class_code >> 8
    if base == 0x03 or sub == 0x1200:
        return "gpu"
    if base == 0x02:
        return "nic"
    if class_code == 0x068001:
        return "cpu"
    if sub == 0x0680:
        return "nvswitch"
    return "switch" if sub == 0x0604 else "other"


def role_of_function(class_code: int, vendor: int | None) -> PciRole:
    """Returns the role of a function found on a real bus, where a VGA adapter need not be a GPU one can train on.

    Args:
        class_code: 24 bits: base class, sub-class, programming interface.
        vendor: PCI vendor id; None if unknown, and the function is then neither `gpu` nor `nvswitch`.
    """
    role = role_of_class(class_code)
    if role == "gpu" and vendor not in (NVIDIA, AMD_GPU):
        return "other"
    if role == "nvswitch" and vendor != NVIDIA:
        return "other"
    return role


def broadcom_generation(
    vendor: int | None, device: int | None, subsystem_vendor: int | None, subsystem_device: int | None, level: int
) -> int:
    """Returns 4 or 5 for a Broadcom PEX switch of that PCIe generation that shows itself as two stacked ones, else 0.

    Args:
        vendor: PCI vendor id of the switch's upstream port.
        device: PCI device id of that port.
        subsystem_vendor: PCI subsystem vendor id of that port.
        subsystem_device: PCI subsystem id of that port.
        level: 0 for the upper one of the stack, 1 for a lower one (Gen5 tells them apart in its subsystem id).

    Source: NCCL src/graph/topo.cc (getBcmGen).
    """
    if (vendor, subsystem_vendor) != (BROADCOM_LSI, BROADCOM_LSI):
        return 0
    half = (subsystem_device or 0) >> 12
    if (device, half) == (0xC010, 0xA):
        return 4
    return 5 if (device, half) == (0xC030, level) else 0


def is_virtual_bridge(bus: str, vendor: int | None, device: int | None) -> bool:
    """Returns whether a bridge is software, so that its link speed means nothing.

    Args:
        bus: Bus id; `ffff:ff:..` is what cloud providers write for a switch they made up.
        vendor: PCI vendor id, where known.
        device: PCI device id, where known.
    """
    return bus.startswith("ffff:ff:") or vendor in VIRTUAL_BRIDGE_VENDORS or (vendor, device) in EMULATED_BRIDGES
