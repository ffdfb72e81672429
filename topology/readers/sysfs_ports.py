"""The network ports of a machine: RDMA devices, Slingshot (cxi) devices and network interfaces, by PCI function.

Source: Linux Documentation/ABI/stable/sysfs-class-infiniband and Documentation/ABI/testing/sysfs-class-net.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from gradwire.topology.graph import Port
from gradwire.topology.networks import interface_bits_per_second
from gradwire.topology.pci_ids import normal_bus_id, role_of_class
from gradwire.topology.readers.small_files import link_name, names_in, number_of, real_path, text_of

VIRTUAL_DRIVERS = frozenset({"veth", "virtio_net", "vmxnet3", "hv_netvsc", "xen_netfront", "vif", "tun", "macvlan"})
"""Drivers whose `speed` is a constant or a wish."""
SOFTWARE_RDMA = re.compile(r"(rxe|siw)")
"""Names of RDMA devices that are software on an ordinary interface."""
SCALABLE = re.compile(r"[\w-]+\.sf\.\d{1,5}")
"""Name of a scalable function on the auxiliary bus."""
_REPRESENTOR = re.compile(r"(c\d+)?pf\d+(vf|sf)\d+")
"""`phys_port_name` of the host's end of a virtual function, which is no port of the card."""
ETHERNET, INFINIBAND = 1, 32
"""/sys/class/net/*/type. Source: Linux include/uapi/linux/if_arp.h."""
_UP, _NO_ARP = 0x1, 0x80
"""Bits of /sys/class/net/*/flags."""


@dataclass(slots=True)
class FoundPorts:
    """Holds the ports of a machine by the PCI function they belong to."""

    by_bus: dict[str, list[Port]] = field(default_factory=dict)
    lent: dict[str, list[Port]] = field(default_factory=dict)
    """Bus id of a PCI function -> ports of its scalable functions, which share the function's own ports."""
    loose: list[Port] = field(default_factory=list)
    """Ports of no PCI network card: adapters on USB, Thunderbolt and USB4, virtual interfaces in a container, software
    RDMA."""
    notes: list[str] = field(default_factory=list)

    def all(self) -> list[Port]:
        """Returns every port."""
        return [port for ports in (*self.by_bus.values(), *self.lent.values(), self.loose) for port in ports]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interface:
    """Describes one network interface."""

    name: str
    bus: str | None
    part: str
    """Scalable function of `bus`, `mlx5_core.sf.4`; empty for the PCI function itself."""
    card: bool
    """True if the interface belongs to a device, on PCI or not."""
    port: Port
    number: int


def find_ports(root: Path) -> FoundPorts:
    """Returns every port below a root folder.

    Args:
        root: Folder that holds `sys/`.
    """
    found = FoundPorts()
    parts: dict[tuple[str, str], list[Port]] = {}
    slingshot = list(_cxi_ports(root))
    cards = {_bus_of(device) for _, device in slingshot}
    verbs = [(port, device) for port, device in _rdma_ports(root) if _bus_of(device) not in cards - {None}]
    for port, device in (*verbs, *slingshot):
        bus = _bus_of(device)
        if bus is None:
            found.loose.append(port)
        else:
            parts.setdefault((bus, _part_of(device)), []).append(port)
    interfaces = list(_interfaces(root))
    for interface in interfaces:
        if interface.bus is not None:
            _join(parts.setdefault((interface.bus, interface.part), []), interface)
    for (bus, part), ports in parts.items():
        (found.lent if part else found.by_bus).setdefault(bus, []).extend(ports)
    _aggregate(root / "sys/class/net", found.by_bus)
    found.loose += [interface.port for interface in interfaces if interface.card and interface.bus is None]
    if not any(interface.card for interface in interfaces):
        found.loose += [interface.port for interface in interfaces]
        if found.loose:
            found.notes.append("The network interfaces are virtual (a container): the cards behind them are unknown.")
    return found


def _join(ports: list[Port], interface: _Interface) -> None:
    """Adds an interface to the RDMA port it shares, in place, or as a port of its own."""
    for position, port in enumerate(ports):
        if port.number == interface.number and not _is_interface(port):
            own = interface.port
            ports[position] = replace(
                port,
                interfaces=(*port.interfaces, interface.name),
                bond=port.bond or own.bond,
                standby=port.standby or (own.standby and not _chooses_itself(port)),
                above=port.above or own.above,
                bits_per_second=port.bits_per_second or own.bits_per_second,
            )
            return
    ports.append(interface.port)


def _chooses_itself(port: Port) -> bool:
    """Returns whether an RDMA device sends regardless of the bond that its network interface is in.

    A bond of IPoIB leaves InfiniBand itself alone, and the device of a RoCE LAG sends over the member that is in use.
    """
    return port.link_layer == "InfiniBand" or "bond" in port.name


def _aggregate(folder: Path, by_bus: dict[str, list[Port]]) -> None:
    """Merges the members of a bond with RoCE LAG into the port of the RDMA device that sends over all of them.

    With RoCE LAG `mlx5_bond_0` sends over all members. Some drivers report the sum as its rate, others one member's;
    the larger of the reported rate and the sum of the members in use is kept.

    Args:
        folder: `sys/class/net` of the machine.
        by_bus: Bus id -> its ports; changed in place.
    """
    for bus, ports in by_bus.items():
        for position, port in enumerate(ports):
            if port.bond is None or _is_interface(port):
                continue
            members = {
                member.name: (other, member)
                for other, theirs in by_bus.items()
                if other[:-1] == bus[:-1] and other != bus
                for member in theirs
                if member.bond == port.bond and _is_interface(member)
            }
            if not members:
                continue
            for other, member in members.values():
                by_bus[other] = [each for each in by_bus[other] if each is not member]
            names = (*port.interfaces, *members)
            used = [
                name
                for name in names
                if text_of(folder / name / "operstate") == "up" and not _in_reserve(folder, name, port.bond)
            ]
            total = sum(max(0, number_of(folder / name / "speed") or 0) for name in used) * 1e6
            rate = max(port.bits_per_second or 0.0, total) or None
            ports[position] = replace(port, interfaces=names, standby=False, bits_per_second=rate)


def _is_interface(port: Port) -> bool:
    """Returns whether a port is known by its network interface alone."""
    return port.name in port.interfaces


def _bus_of(path: Path) -> str | None:
    """Returns the bus id of the network card's PCI function that a device link leads to, or below which it ends.

    An adapter on USB, Thunderbolt or USB4 leads to that controller's function, which is no network card: None.
    """
    target = real_path(path)
    for folder in () if target is None else (target, *target.parents):
        bus = normal_bus_id(folder.name)
        if bus is not None:
            code = re.fullmatch(r"0x([0-9a-f]{1,6})", text_of(folder / "class") or "")
            return bus if code is None or role_of_class(int(code[1], 16)) == "nic" else None
    return None


def _part_of(path: Path) -> str:
    """Returns the scalable function that a device link leads to; empty where it leads to the PCI function itself.

    Source: Linux Documentation/networking/devlink/devlink-port.rst, Subfunction; mlx5/core/sf/dev.
    """
    target = real_path(path)
    return target.name if target is not None and SCALABLE.fullmatch(target.name) else ""


def _rdma_ports(root: Path) -> Iterator[tuple[Port, Path]]:
    """Yields (port, path of the link to its device) for every port of every RDMA device."""
    folder = root / "sys/class/infiniband"
    for name in names_in(folder):
        for number in names_in(folder / name / "ports"):
            if re.fullmatch(r"\d{1,3}", number):
                yield _rdma_port(folder / name / "ports" / number, name, int(number)), folder / name / "device"


def _rdma_port(folder: Path, name: str, number: int) -> Port:
    """Returns one port of an RDMA device."""
    rate = re.match(r"(\d{1,5}(?:\.\d)?)\s*Gb/sec", text_of(folder / "rate") or "")
    state = text_of(folder / "state")
    return Port(
        name=name,
        number=number,
        link_layer=text_of(folder / "link_layer"),
        bits_per_second=float(rate[1]) * 1e9 if rate and float(rate[1]) else None,
        active=None if state is None else "ACTIVE" in state,
        virtual=SOFTWARE_RDMA.match(name) is not None,
    )


def _cxi_ports(root: Path) -> Iterator[tuple[Port, Path]]:
    """Yields (port, path of the link to its device) for Slingshot devices; their rate comes from their interface."""
    folder = root / "sys/class/cxi"
    for name in names_in(folder):
        yield Port(name=name, link_layer="Ethernet"), folder / name / "device"


def _interfaces(root: Path) -> Iterator[_Interface]:
    """Yields the network interfaces that belong to a card or lead out of this container; VLANs and such are skipped."""
    folder = root / "sys/class/net"
    for name in names_in(folder):
        own = folder / name
        kind = number_of(own / "type")
        if kind not in (ETHERNET, INFINIBAND) or _REPRESENTOR.match(text_of(own / "phys_port_name") or ""):
            continue
        card = (own / "device").is_symlink()
        bus = _bus_of(own / "device") if card else None
        leads_out = number_of(own / "iflink") != number_of(own / "ifindex")
        if bus is None and (_is_over_another(own) or not (card or leads_out)):
            continue
        number = (number_of(own / "dev_port") or 0) + 1
        port = _interface_port(folder, name, kind, card)
        part = _part_of(own / "device") if card else ""
        yield _Interface(name=name, bus=bus, part=part, card=card, port=port, number=number)


def _is_over_another(own: Path) -> bool:
    """Returns whether an interface is on top of another one: a VLAN, or Hyper-V's above a card's virtual function.

    Args:
        own: Folder of the interface below sys/class/net.
    """
    return any(name.startswith("lower_") for name in names_in(own))


def _in_reserve(folder: Path, name: str, bond: str) -> bool:
    """Returns whether a bond sends nothing through a member: a backup one, or one without an LACP partner.

    Source: Linux drivers/net/bonding/bond_sysfs_slave.c (`state`, from 3.14 on), Documentation/networking/bonding.rst
    (`active_slave`).
    """
    state = text_of(folder / name / "bonding_slave/state")
    if state is not None:
        return state == "backup"
    mode, active = (text_of(folder / bond / "bonding" / each) for each in ("mode", "active_slave"))
    return (mode or "").startswith("active-backup") and active != name


def _above(folder: Path, name: str) -> str | None:
    """Returns the uppermost interface that took over an interface's IP address; None if it has its own.

    Bonds, teams and bridges take over a member's address, and so does the interface that Hyper-V or virtio's failover
    puts above a virtual function: that one has a device of its own. A VRF and Open vSwitch's bridge do not.

    Source: Linux drivers/net/hyperv/netvsc_drv.c (netvsc_vf_join), net/bridge/br_if.c, drivers/net/net_failover.c.
    """
    found: list[str] = []
    while (master := link_name(folder / (found[-1] if found else name) / "master")) is not None:
        own = folder / master
        takes = (own / "bonding").is_dir() or (own / "bridge").is_dir() or (own / "device").is_symlink()
        if not (takes or _is_team(own)) or master in found:
            break
        found.append(master)
    return found[-1] if found else None


def _is_team(own: Path) -> bool:
    """Returns whether an interface with members is a team, judged by its flags, as sysfs has no folder for teams.

    A VRF has ARP turned off, and Open vSwitch's interface with the members is down.

    Source: Linux drivers/net/vrf.c (vrf_dev_init), include/uapi/linux/if.h (IFF_UP, IFF_NOARP).
    """
    flags = re.fullmatch(r"0x([0-9a-f]{1,8})", text_of(own / "flags") or "0x0")
    return flags is not None and int(flags[1], 16) & (_UP | _NO_ARP) == _UP


def _interface_port(folder: Path, name: str, kind: int, card: bool) -> Port:
    """Returns a network interface as a port of its own.

    Args:
        folder: `sys/class/net` of the machine.
        name: Name of the interface.
        kind: `ETHERNET` or `INFINIBAND`.
        card: True if the interface belongs to a device.
    """
    own = folder / name
    megabits = number_of(own / "speed")
    driver = link_name(own / "device/driver")
    master = link_name(own / "master")
    bond = master if master is not None and (folder / master / "bonding").is_dir() else None
    state = text_of(own / "operstate")
    stated = megabits * 1e6 if megabits is not None and 0 < megabits < 10**8 else None
    return Port(
        name=name,
        interfaces=(name,),
        link_layer="InfiniBand" if kind == INFINIBAND else "Ethernet",
        bits_per_second=interface_bits_per_second(driver, stated),
        active=None if state in (None, "unknown") else state == "up",
        bond=bond,
        standby=bond is not None and _in_reserve(folder, name, bond),
        above=_above(folder, name),
        virtual=not card or driver in VIRTUAL_DRIVERS,
    )
