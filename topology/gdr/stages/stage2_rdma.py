"""Stage 2, the RDMA devices: present, accessible, up, addressed, and with enough locked and shared memory."""

import errno
import re
from dataclasses import replace

from gradwire.topology.gdr.host import Host, RdmaNic
from gradwire.topology.gdr.model import (
    Finding,
    GdrCheck,
    Verdict,
    failed,
    informed,
    passed,
    unknown,
    warned,
)
from gradwire.topology.gdr.nccl import DYNAMIC_GID_SINCE, name_matches
from gradwire.topology.gdr.process_context import CAP_IPC_LOCK
from gradwire.topology.gdr.rdma import RdmaPort, family_of_function, pcie_gigabits
from gradwire.topology.networks import CARDS, TCPX, TCPXO
from gradwire.topology.pci_ids import MELLANOX

_JUMBO_NBYTES = 4200  # MTU of an Ethernet interface that holds a 4096-byte RDMA payload and its headers
_COUNTERS = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err")
_MEMLOCK_FLOOR_NBYTES = 64 << 20
_SHM_FLOOR_NBYTES = 1 << 30


def devices_of_hardware(host: Host) -> Finding:
    """Checks that every NIC on the bus that could do RDMA has an RDMA device.

    Command: `lspci -nn -d ::0207; lspci -nn -d 15b3:; ls -l /sys/class/infiniband /sys/class/cxi`
    Source: Linux Documentation/ABI/stable/sysfs-class-infiniband.
    """
    if host.rdma_devices is None:
        return unknown("/sys/class cannot be read", "mount /sys in the container")
    known = host.tree.functions
    homeless = [device.name for device in host.rdma_devices if not device.software and device.bus_id not in known]
    if not host.capable:
        if homeless:
            return _unmatched(homeless)
        if (kind := _with_efa(host)) is not None:
            return failed(
                f"this is {kind}, which can have EFA, and none is attached: NCCL uses sockets without a word",
                "attach interfaces of type efa when the instance is launched, with a security group that lets its own "
                "members through (Amazon EC2 user guide, Elastic Fabric Adapter)",
            )
        if any(family_of_function(function) in _BY_TCPX for function in known.values()):
            return failed(
                "gVNIC has no RDMA: only Google's plug-ins for NCCL reach GPUs from it, which are not examined here",
                f"{TCPX.name} or {TCPXO.name}, as Google Cloud's guide says; a3-ultragpu and later have ConnectX",
            )
        return failed(
            "no NIC on the PCI bus that can do RDMA", "use nodes with InfiniBand, RoCE, EFA, Slingshot or Omni-Path"
        )
    bonded = {nic.bus_id[:-1] for nic in host.capable if any("bond" in device.name for device in nic.devices)}
    lent = {nic.function.physical_function for nic in host.capable if nic.devices}
    bare = [
        nic
        for nic in host.capable
        if not nic.devices and nic.bus_id[:-1] not in bonded and not (nic.bus_id in lent and host.process.container)
    ]
    modules = {nic.family.module for nic in bare if nic.family is not None}
    fix = f"modprobe {' '.join(sorted(modules))}; in a container check the RDMA network namespace (rdma system)"
    if bare and homeless:
        return _unmatched(homeless)
    if len(bare) == len(host.capable):
        return failed(f"{len(bare)} NICs on the bus, none is an RDMA device", fix)
    if bare:
        return warned(f"no RDMA device on {', '.join(nic.bus_id for nic in bare[:8])}", fix)
    return passed(f"{len(host.capable)} NICs: {', '.join(nic.name for nic in host.capable[:16])}")


_BY_TCPX = [card for card in CARDS if card.plugin == TCPX]


def _unmatched(names: list[str]) -> Finding:
    """Returns an UNKNOWN finding for RDMA devices without a visible PCI function: only a part of /sys was mounted."""
    found = f"{', '.join(names[:8])} cannot be matched to a PCI function"
    return unknown(found, "run on the host, or mount (capture) all of /sys, its links too")


_EFA_KINDS = re.compile(
    r"(p4d|p4de|p5|p5e|p5en|p6-\w+|p6e-\w+|trn1|trn1n|trn2|dl1|hpc\w+|g4dn\.(8xlarge|12xlarge|16xlarge|metal)|"
    r"p3dn\.24xlarge|g5\.(8|12|16|24|48)xlarge|g6e?\.(8|12|16|24|48)xlarge|g7e?\.(8|12|24|48)xlarge)(\.|$)"
)
"""Instance types with GPUs or accelerators that can have EFA. Source: Amazon EC2 user guide, Elastic Fabric Adapter,
supported instance types."""


def _with_efa(host: Host) -> str | None:
    """Returns the type of this EC2 instance if it can have EFA; None for others and for other machines."""
    vendor = host.files.text("sys/class/dmi/id/sys_vendor") or ""
    kind = host.files.text("sys/class/dmi/id/product_name") or ""
    return kind if vendor == "Amazon EC2" and _EFA_KINDS.match(kind) else None


def device_files(host: Host) -> Finding:
    """Checks that the RDMA character devices exist and may be opened: a container sees sysfs even if it was given none.

    Command: `ls -l /dev/infiniband/uverbs*; ls -l /dev/cxi*`
    Source: rdma-core Documentation/udev.md; nccl issue 1925.
    """
    fix = (
        "docker: --device=/dev/infiniband; Kubernetes: request the RDMA device plugin's resource; "
        "else modprobe ib_uverbs"
    )
    names = host.files.names("dev/infiniband") or ()
    verbs = [f"/dev/infiniband/{name}" for name in names if name.startswith("uverbs")]
    slingshot = [f"/dev/{device.name}" for device in host.rdma_devices or () if not device.verbs]
    cxi = [path for path in slingshot if host.files.state(path[1:]) == "present"]
    if host.files.state("dev") != "present":
        return unknown("/dev cannot be seen", "run on the host, or capture there")
    if not verbs and not cxi:
        found = f"sysfs lists {len(host.rdma_devices or ())} RDMA devices, /dev/infiniband has none"
        return failed(f"{found}: RDMA was bought, this {host.process.container or 'host'} was not given it", fix)
    opened = host.facts.device_files
    if opened is None:
        return unknown(f"{len(verbs + cxi)} device files, not tried to open", "run on the live host")
    refused = {path: code for path, code in opened.items() if code}
    if refused:
        path, code = next(iter(refused.items()))
        return failed(
            f"{path}: {errno.errorcode.get(code, code)}", "give the user or the device cgroup read-write access"
        )
    return passed(f"{len(opened)} device files open")


def user_space(host: Host) -> Finding:
    """Checks that the verbs library finds as many devices as the kernel; none means missing provider libraries.

    Command: `ibv_devices; ls /usr/lib/*/libibverbs/*`
    Source: rdma-core README (providers); NCCL src/transport/net_ib (`NET/IB : No device found`).
    """
    fix = "install libibverbs1, ibverbs-providers (Debian) or rdma-core (Red Hat) in the image"
    kernel = [device.name for device in host.rdma_devices or () if device.verbs]
    if host.rdma_devices and not kernel:
        return informed("Slingshot needs libfabric, not verbs")
    if host.facts.verbs_error:
        return failed(f"libibverbs: {host.facts.verbs_error}", fix)
    if host.facts.verbs_devices is None:
        return unknown("libibverbs was not asked", "run on the live host")
    found = host.facts.verbs_devices
    if not found and kernel:
        return failed(f"libibverbs sees none of {len(kernel)} devices", fix)
    if len(found) < len(kernel):
        return warned(f"libibverbs sees {len(found)} of {len(kernel)} devices", fix)
    return passed(f"libibverbs sees {len(found)} devices")


def _ports(host: Host) -> list[tuple[str, RdmaPort]]:
    devices = host.rdma_devices or ()
    return [(device.name, port) for device in devices if not device.software for port in device.ports]


def port_state(host: Host) -> Finding:
    """Checks that at least one port of the RDMA devices is ACTIVE.

    Fails if none is; warns if some are not, and then fails for the pairs whose NIC has no ACTIVE port.

    Command: `ibstat | grep -E "State|CA '"; cat /sys/class/infiniband/*/ports/*/state`
    Source: Linux Documentation/ABI/stable/sysfs-class-infiniband (state, phys_state).
    """
    ports = [(name, port) for name, port in _ports(host) if port.state]
    down = [f"{name}/{port.number} {port.state} ({port.physical})" for name, port in ports if port.state != "ACTIVE"]
    fix = "cable and switch port; INIT on InfiniBand waits for a subnet manager (opensm)"
    if not ports:
        return unknown("no port state can be read")
    if len(down) == len(ports):
        return failed(f"no ACTIVE port: {', '.join(down[:8])}", fix)
    if down:
        finding = warned(f"not ACTIVE: {', '.join(down[:8])}", fix)
        return replace(finding, pairs={pair: _state_of(host, pair[1]) for pair in host.distances})
    return passed(f"{len(ports)} ports ACTIVE")


def _state_of(host: Host, bus_id: str) -> Finding:
    """Judges whether NCCL can use a NIC: FAIL if no port is ACTIVE, else PASS, with the state of each port."""
    nic = next(nic for nic in host.nics if nic.bus_id == bus_id)
    states = ", ".join(f"{port.number} {port.state}" for port in nic.ports)
    if nic.down:
        return failed(f"no port of {nic.name} is ACTIVE: {states}")
    return passed(f"{nic.name}: {states}")


def _fastest(nic: RdmaNic) -> float:
    return max((port.gigabits or 0 for port in nic.ports if port.state != "DOWN"), default=0)


def half_ports(host: Host) -> list[tuple[RdmaNic, ...]]:
    """Finds NICs that are two halves of one port, as on DGX Spark: each has a part of the PCIe lanes it needs.

    Such functions have the card's one system image GUID and the same function number, in different slots, and both
    state the whole port's rate. Source: geerlingguy/sbc-reviews issue 92 (GB10: `rocep1s0f0` and `roceP2p1s0f0`, both
    MT4129 with a rate of 200); NVIDIA, ConnectX-7 adapter cards user manual, Socket Direct.

    Args:
        host: The machine as it was read.

    Returns:
        A tuple of NICs for each such port.
    """
    groups: dict[tuple[str, str], list[RdmaNic]] = {}
    for nic in host.nics:
        guid = next((device.system_guid for device in nic.devices if device.system_guid), None)
        if guid is not None:
            groups.setdefault((guid, nic.bus_id.rpartition(".")[2]), []).append(nic)
    found = []
    for group in groups.values():
        rates = [
            pcie_gigabits(nic.function.current_gigatransfers, nic.function.current_width)
            for nic in group
            if nic.function.current_gigatransfers and nic.function.current_width
        ]
        port = max(map(_fastest, group))
        if len(group) > 1 and len(rates) == len(group) and port and max(rates) < port:
            found.append(tuple(group))
    return found


def _halves_in_use(host: Host, halves: list[tuple[RdmaNic, ...]]) -> Finding:
    """Judges whether both halves of each port have an address and are allowed by NCCL_IB_HCA.

    Args:
        host: The machine as it was read.
        halves: Result of `half_ports`, not empty.
    """
    value = host.setting("NCCL_IB_HCA")
    words = []
    for group in halves:
        names = [device.name for nic in group for device in nic.devices]
        shares = [pcie_gigabits(n.function.current_gigatransfers or 0, n.function.current_width or 0) for n in group]
        text = f"{' and '.join(names)} are halves of one {max(map(_fastest, group)):g} Gb/s port, {shares[0]:.0f} each"
        bare = [
            device.name
            for nic in group
            for device in nic.devices
            for port in device.ports
            if port.gids and not any(gid.scope in ("ipv4", "ipv6") for gid in port.gids)
        ]
        unused = [name for name in names if value and not name_matches(value, name)]
        if bare or unused:
            why = f"{', '.join(bare)} has no address" if bare else f"NCCL_IB_HCA={value} leaves out {', '.join(unused)}"
            fix = f"an address on each half's interface, and NCCL_IB_HCA={','.join(names)}"
            return warned(f"{text}: {why}, so half the rate is lost", fix)
        words.append(text)
    return passed(f"{'; '.join(words)}: NCCL uses both; one TCP interface has one half")


def link_layer_and_speed(host: Host) -> Finding:
    """Checks that all ports have the same link layer and speed, and that no NIC's PCIe link is slower than its port.

    Command: `ibstat | grep -E "Rate|Link layer"; cat /sys/class/infiniband/*/ports/*/rate`
    Source: Linux Documentation/ABI/stable/sysfs-class-infiniband (rate, link_layer); PCIe Base 5.0 section 4.2
    (encoding); geerlingguy/sbc-reviews issue 92 (two halves of one port).
    """
    halves = half_ports(host)
    split = {nic.bus_id for group in halves for nic in group}
    slow, whole = [], []
    for nic in host.nics:
        fastest = _fastest(nic)
        speed, width = nic.function.current_gigatransfers, nic.function.current_width
        if not (fastest and speed and width) or host.process.virtual or pcie_gigabits(speed, width) >= fastest:
            continue
        if nic.bus_id in split:
            continue
        most = nic.function.max_width
        of = f" of x{most}" if most and most > width else ""
        slow.append(
            f"{nic.name}: {fastest:g} Gb/s port on {pcie_gigabits(speed, width):.0f} Gb/s of PCIe "
            f"({speed:g} GT/s x{width}{of})"
        )
        whole.append(bool(most and most > width))
    if slow:
        fix = (
            "the card could use more lanes: another slot, or the slot's bifurcation in the firmware"
            if all(whole)
            else "a slot with as many lanes of as high a speed as the port needs; else count on PCIe's rate"
        )
        return warned("; ".join(slow[:4]), fix)
    if halves:
        return _halves_in_use(host, halves)
    up = [port for _, port in _ports(host) if port.gigabits and port.state != "DOWN"]  # a port that is down states any
    rates = {f"{port.gigabits:g} Gb/s {port.link_layer}" for port in up}
    if not rates:
        return unknown("no rate of a port that is up can be read")
    if len(rates) > 1:
        return warned(f"ports differ: {', '.join(sorted(rates))}", "name the training NICs in NCCL_IB_HCA")
    return passed(f"all ports {rates.pop()}")


def real_hardware(host: Host) -> Finding:
    """Checks that the RDMA devices are hardware; soft-RoCE (rxe) and soft-iWARP (siw) cannot reach a GPU.

    Fails if all are software; warns if some are.

    Command: `rdma link show; cat /sys/class/infiniband/*/hca_type`
    Source: Linux drivers/infiniband/sw/rxe and siw.
    """
    if host.rdma_devices is None and host.capable:
        return passed(f"{len(host.capable)} NICs on the PCI bus are hardware")
    if host.rdma_devices is None:
        return unknown("/sys/class cannot be read", "mount /sys in the container")
    software = [device.name for device in host.rdma_devices if device.software]
    if software and len(software) == len(host.rdma_devices):
        return failed(f"only software RDMA: {', '.join(software)}", "use a NIC with RDMA in hardware")
    if software:
        return warned(f"software RDMA among the devices: {', '.join(software)}", "NCCL_IB_HCA=^rxe,siw")
    return passed("all hardware") if host.rdma_devices else unknown("no RDMA device to look at")


def roce_address(host: Host) -> Finding:
    """Checks that each RoCE port has a RoCE v2 address; NCCL picks it by itself from 2.21 on.

    Fails if no port has a routable one, or if NCCL_IB_GID_INDEX names none; warns if some ports have none, or if an
    older NCCL needs that variable.

    Command: `show_gids; cat /sys/class/infiniband/*/ports/*/gid_attrs/types/*`
    Source: NCCL user guide, NCCL_IB_GID_INDEX and NCCL_IB_ROCE_VERSION_NUM; nccl issues 769 and 1573.
    """
    ports = [(name, port) for name, port in _ports(host) if port.link_layer == "Ethernet" and port.state != "DOWN"]
    if not ports:
        return informed("no RoCE port") if _ports(host) else unknown("no port can be read")
    fix = "give the interface an IP address; leave NCCL_IB_GID_INDEX unset from NCCL 2.21 on"
    usable = {
        f"{name}/{port.number}": [g for g in port.gids if "v2" in g.kind and g.scope in ("ipv4", "ipv6")]
        for name, port in ports
    }
    if not any(port.gids for _, port in ports):
        return unknown("GID tables cannot be read", "show_gids on the host")
    bare = [name for name, gids in usable.items() if not gids]
    if len(bare) == len(ports):
        return failed(f"no routable RoCE v2 address on {', '.join(bare[:8])}", fix)
    index = host.setting("NCCL_IB_GID_INDEX")
    if index is not None and index != "-1" and not any(str(g.index) == index for gids in usable.values() for g in gids):
        return failed(f"NCCL_IB_GID_INDEX={index} is no usable RoCE v2 entry", fix)
    if bare:
        return warned(f"only link-local RoCE addresses on {', '.join(bare[:8])}", fix)
    old = host.nccl_version is not None and host.nccl_version < DYNAMIC_GID_SINCE
    hint = (
        f"; NCCL before 2.21 needs NCCL_IB_GID_INDEX={next(iter(usable.values()))[0].index}"
        if old and index is None
        else ""
    )
    return (
        warned(f"RoCE v2 addresses are there{hint}", fix) if hint else passed("every RoCE port has a routable address")
    )


def mtu(host: Host) -> Finding:
    """Checks that the RDMA MTU is 4096 bytes, the largest; if it is not known, that the Ethernet MTU is at least 4200.

    The active MTU of the RDMA ports is what the driver reports. Only if none is reported, the MTU of the Ethernet
    interfaces of RDMA NICs is read: 4200 bytes hold an RDMA packet of 4096 bytes with its headers.

    Command: `ibv_devinfo | grep active_mtu; ip link`
    Source: InfiniBand Architecture 1.4 section 14.2.5.6 (MTU codes); RoCE adds up to 104 bytes of headers.
    """
    small = [f"{name} {nbytes}" for name, nbytes in (host.facts.active_mtu or {}).items() if nbytes < 4096]
    known = len(host.facts.active_mtu or {})
    for nic in host.nics if not known else ():
        for name in nic.function.net_devices:
            text = host.files.text(f"sys/class/net/{name}/mtu")
            if (
                text
                and text.isdigit()
                and len(text) < 8
                and any(p.link_layer == "Ethernet" for d in nic.devices for p in d.ports)
            ):
                known += 1
                small += [f"{name} {text}"] if int(text) < _JUMBO_NBYTES else []
    if small:
        return warned(f"small MTU: {', '.join(small[:8])}", "ip link set DEV mtu 9000, on the switch too")
    return passed(f"{known} ports large enough") if known else unknown("MTU not known", "ibv_devinfo")


def lossless_ethernet(host: Host) -> Finding:
    """Checks that RoCE's retransmission counters are zero: dropped frames cost speed, not correctness.

    Command: `grep . /sys/class/infiniband/*/ports/*/hw_counters/{out_of_sequence,packet_seq_err}; mlnx_qos -i DEV`
    Source: NVIDIA, Understanding mlx5 Linux counters (HW counters).
    """
    ports = [(d.name, port) for d in host.rdma_devices or () for port in d.ports if port.link_layer]
    ethernet = [(name, port.number) for name, port in ports if port.link_layer == "Ethernet"]
    if ports and not ethernet:
        return informed("no RoCE port: InfiniBand and Slingshot are lossless by themselves")
    counts: dict[str, int] = {}
    for name, number in ethernet:
        for counter in _COUNTERS:
            text = host.files.text(f"sys/class/infiniband/{name}/ports/{number}/hw_counters/{counter}")
            if text and re.fullmatch(r"[0-9]{1,20}", text):
                counts[f"{name}/{counter}"] = int(text)
    lossy = [f"{name} {count}" for name, count in counts.items() if count]
    if lossy:
        nvidia = any(nic.function.vendor == MELLANOX for nic in host.nics)
        tool = " (mlnx_qos --pfc)" if nvidia else " (the maker's tool, or dcb pfc)"
        fix = f"priority flow control or ECN on switch and NIC{tool}, NCCL_IB_TC as the site says"
        return warned(f"retransmissions: {', '.join(lossy[:4])}", fix)
    return passed(f"{len(counts)} retransmission counters are zero") if counts else unknown("no counters can be read")


def locked_memory(host: Host) -> Finding:
    """Checks that the limit of locked memory is high enough: memory is locked when it is registered.

    Fails below 64 MiB, unless the process is root with CAP_IPC_LOCK; warns of every other limit.

    Command: `ulimit -l; grep locked /proc/self/limits`
    Source: NCCL user guide, Troubleshooting, section Memory issues; nccl-tests issue 206.
    """
    lines = host.files.find("proc/self/limits", r"^Max locked memory .*$")
    words = lines[0].split() if lines else []
    if len(words) < 4:
        return unknown("/proc/self/limits cannot be read", "ulimit -l")
    fix = "docker --ulimit memlock=-1; limits.conf; systemd LimitMEMLOCK=infinity; Slurm PropagateResourceLimitsExcept"
    soft = words[3]
    if soft == "unlimited":
        return passed("unlimited")
    if not soft.isdigit() or len(soft) > 20:
        return unknown(f"limit `{soft[:20]}` is no number")
    if int(soft) < _MEMLOCK_FLOOR_NBYTES and not (host.process.root and host.process.can(CAP_IPC_LOCK)):
        return failed(f"{int(soft) >> 10} KiB of locked memory", fix)
    return warned(f"{int(soft) >> 20} MiB of locked memory", fix)


def shared_memory(host: Host) -> Finding:
    """Checks that /dev/shm has room for NCCL's transport inside a node (Docker gives 64 MiB).

    Warns if it is smaller than 1 GiB as a whole.

    Command: `df /dev/shm`
    Source: NCCL user guide, Troubleshooting, section Shared memory.
    """
    nbytes = host.facts.shm_nbytes
    if nbytes is None:
        return unknown("/dev/shm was not asked", "run on the live host")
    if nbytes < _SHM_FLOOR_NBYTES:
        return warned(f"{nbytes >> 20} MiB", "docker --shm-size=16g; Kubernetes: emptyDir with medium Memory")
    return passed(f"{nbytes >> 20} MiB")


def container_network(host: Host) -> Finding:
    """Checks that a container has the network interfaces behind the RoCE addresses.

    Command: `ls /sys/class/net; cat /sys/class/infiniband/*/ports/*/gid_attrs/ndevs/*`
    Source: nccl issue 1573.
    """
    if host.process.container == "":
        return passed("no container")
    interfaces = host.files.names("sys/class/net")
    wanted = {g.net_device for d in host.rdma_devices or () for port in d.ports for g in port.gids if g.net_device}
    if interfaces is None or host.process.container is None:
        return unknown("the network namespace cannot be seen")
    missing = sorted(wanted - set(interfaces))
    if missing:
        return warned(
            f"RoCE interfaces not in this namespace: {', '.join(missing[:8])}", "hostNetwork, or a CNI for RDMA"
        )
    return passed(f"{len(wanted)} RoCE interfaces visible")


CHECKS = (
    GdrCheck("R1", "RDMA devices", devices_of_hardware, Verdict.CONFIGURED, ("E1",)),
    GdrCheck("R2", "device files", device_files, Verdict.CONFIGURED, ("R1",)),
    GdrCheck("R3", "user-space verbs", user_space, Verdict.CONFIGURED, ("R1", "R2")),
    GdrCheck("R4", "port state", port_state, Verdict.CONFIGURED, ("R1",)),
    GdrCheck("R5", "link layer and speed", link_layer_and_speed, None, ("R1",)),
    GdrCheck("R6", "hardware, not software", real_hardware, Verdict.POSSIBLE, ("E1",)),
    GdrCheck("R7", "RoCE address", roce_address, Verdict.CONFIGURED, ("R1", "R4")),
    GdrCheck("R8", "MTU", mtu, None, ("R1",)),
    GdrCheck("R9", "lossless Ethernet", lossless_ethernet, None, ("R1",)),
    GdrCheck("R10", "locked memory", locked_memory, Verdict.CONFIGURED, ()),
    GdrCheck("R11", "/dev/shm", shared_memory, None, ()),
    GdrCheck("R12", "container network", container_network, None, ("R1",)),
)
