"""RDMA devices: which PCI functions should be some, and what /sys/class/infiniband says about those that are."""

import re
from dataclasses import dataclass

from gradwire.topology.gdr.inputs.files import Files
from gradwire.topology.networks import INFINIBAND_CLASS, CardFamily, family_of
from gradwire.topology.readers.pci import PciFunction, PciTree
from gradwire.topology.readers.pci_sysfs import BUS_ID
from gradwire.topology.readers.sysfs_ports import SCALABLE

_MAX_GIDS = 256


@dataclass(frozen=True, slots=True)
class Gid:
    """Describes one entry of a RoCE port's GID table."""

    index: int
    gid: str
    kind: str
    """`RoCE v2`, `IB/RoCE v1`, ..."""
    net_device: str

    @property
    def scope(self) -> str:
        """Returns the kind of address: `ipv4`, `ipv6`, `link-local` or `empty`."""
        words = self.gid.lower().split(":")
        if not self.gid.strip("0:"):
            return "empty"
        if words[0] == "fe80":
            return "link-local"
        return "ipv4" if words[:6] == ["0000"] * 5 + ["ffff"] else "ipv6"


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """Describes one port of an RDMA device; None is unknown."""

    number: str
    state: str | None
    """`ACTIVE`, `DOWN`, `INIT`, ..."""
    physical: str | None
    """`LinkUp`, `Polling`, `Disabled`, ..."""
    link_layer: str | None
    """`InfiniBand` or `Ethernet`."""
    gigabits: float | None
    gids: tuple[Gid, ...] = ()


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """Describes one RDMA device: an entry of /sys/class/infiniband, or of /sys/class/cxi (Slingshot)."""

    name: str
    bus_id: str | None
    firmware: str | None
    ports: tuple[RdmaPort, ...]
    system_guid: str | None = None
    """GUID of the card: the same on all its functions, in whatever slot they are."""
    verbs: bool = True
    """False for Slingshot: libfabric's cxi provider, no verbs."""
    scalable: bool = False
    """True if it belongs to a scalable function (mlx5), which shares the ports of the PCI function it is on."""

    @property
    def software(self) -> bool:
        """Returns whether it is Soft-RoCE or soft-iWARP, which cannot reach GPU memory."""
        return self.name.startswith(("rxe", "siw"))


def family_of_function(function: PciFunction) -> CardFamily | None:
    """Returns the row of `networks.CARDS` of a PCI function; None if there is none."""
    return family_of(function.vendor, function.device, function.driver)


def rdma_capable(function: PciFunction) -> bool:
    """Returns whether a PCI function is a NIC that should appear as an RDMA device."""
    if function.base_class != 0x02 or function.vendor is None:
        return False
    family = family_of_function(function)
    if family is None:
        return function.class_code is not None and function.class_code >> 8 == INFINIBAND_CLASS
    return bool(family.module)


def read_rdma_devices(files: Files, tree: PciTree) -> tuple[RdmaDevice, ...] | None:
    """Reads all RDMA devices; returns None if /sys/class or its folder of devices cannot be read.

    Args:
        files: Root folder to read below.
        tree: PCI functions, by which a device without a link to its function is placed.
    """
    if files.state("sys/class") != "present":
        return None
    verbs = files.names("sys/class/infiniband")
    if verbs is None and files.state("sys/class/infiniband") == "unreadable":
        return None
    owners = {name: function.bus_id for function in tree.functions.values() for name in function.rdma_devices}
    slingshot = [_read_device(files, "cxi", name, owners) for name in files.names("sys/class/cxi") or ()]
    known = {
        device.bus_id for device in slingshot if device.bus_id
    }  # HPE has verbs for it, too, which NCCL leaves alone
    devices = [_read_device(files, "infiniband", name, owners) for name in verbs or ()]
    return (*(device for device in devices if device.bus_id not in known), *slingshot)


def _read_device(files: Files, folder: str, name: str, owners: dict[str, str]) -> RdmaDevice:
    top = f"sys/class/{folder}/{name}"
    target = files.target(f"{top}/device")
    parts = target.split("/") if target else []
    scalable = bool(parts) and SCALABLE.fullmatch(parts[-1]) is not None
    bus_id = next((part for part in reversed(parts) if BUS_ID.fullmatch(part)), None) if target else owners.get(name)
    if folder == "cxi":
        ports = tuple(_read_slingshot_port(files, net) for net in files.names(f"{top}/device/net") or ())
        return RdmaDevice(name, bus_id, files.text(f"{top}/fw_ver"), ports, verbs=False)
    ports = tuple(_read_port(files, f"{top}/ports/{port}") for port in files.names(f"{top}/ports") or ())
    return RdmaDevice(
        name,
        bus_id,
        files.text(f"{top}/fw_ver"),
        ports,
        _guid(files, top),
        scalable=scalable,
    )


def _guid(files: Files, top: str) -> str | None:
    text = files.text(f"{top}/sys_image_guid")
    return None if text is None or not text.strip("0:") else text


def _read_slingshot_port(files: Files, net: str) -> RdmaPort:
    """Reads a Slingshot port from its network interface (hsn0), as it has no verbs port."""
    state = files.text(f"sys/class/net/{net}/operstate")
    speed = files.text(f"sys/class/net/{net}/speed") or ""
    megabits = int(speed) if re.fullmatch(r"[0-9]{1,8}", speed) else None
    rate = None if megabits is None else megabits / 1000
    return RdmaPort(net, "ACTIVE" if state == "up" else state and state.upper(), None, "Slingshot", rate)


def _read_port(files: Files, top: str) -> RdmaPort:
    layer = files.text(f"{top}/link_layer")
    return RdmaPort(
        number=top.rpartition("/")[2],
        state=_after_colon(files.text(f"{top}/state")),
        physical=_after_colon(files.text(f"{top}/phys_state")),
        link_layer=layer,
        gigabits=gigabits(files.text(f"{top}/rate")),
        gids=_read_gids(files, top) if layer == "Ethernet" else (),
    )


def _read_gids(files: Files, top: str) -> tuple[Gid, ...]:
    indices = sorted(int(name) for name in files.names(f"{top}/gids") or () if re.fullmatch(r"[0-9]{1,4}", name))
    found = []
    for index in indices[:_MAX_GIDS]:
        # Unused slots have no readable type: that is the cheap test.
        kind = files.text(f"{top}/gid_attrs/types/{index}")
        if kind:
            gid = files.text(f"{top}/gids/{index}") or ""
            found.append(Gid(index, gid, kind, files.text(f"{top}/gid_attrs/ndevs/{index}") or ""))
    return tuple(found)


def _after_colon(text: str | None) -> str | None:
    return None if text is None else text.rpartition(":")[2].strip()


def gigabits(text: str | None) -> float | None:
    """Parses the rate of a port: 400.0 of `400 Gb/sec (4X NDR)`, in Gbit/s; None for any other text."""
    match = re.match(r"([0-9]{1,5}(?:\.[0-9]{1,3})?) ?Gb/sec", text or "")
    return float(match[1]) if match else None


def pcie_gigabits(gigatransfers: float, width: int) -> float:
    """Returns the raw bandwidth of a PCIe link in one direction, in Gbit/s: 252 for 16 GT/s x16.

    Args:
        gigatransfers: Rate of one lane in GT/s.
        width: Number of lanes.

    Source: PCI Express Base 5.0 section 4.2: 8b/10b up to 5 GT/s, 128b/130b from 8 GT/s on.
    """
    return gigatransfers * width * (0.8 if gigatransfers <= 5 else 128 / 130)
