"""Facts that one rank reads on its machine, without the other ranks: NICs, cores, memory, variables, versions.

Files of sysfs and procfs are read below a root folder, so that a folder of a test, or a captured machine, can replace
this machine.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from gradwire.bench.doctor.facts import GpuState, NetworkInterface, RankFacts
from gradwire.comms.bootstrap.addresses import host_addresses, is_outside
from gradwire.comms.bootstrap.kernel import host_identity
from gradwire.comms.environment import steering_variables
from gradwire.topology.gdr.inputs.files import Files
from gradwire.topology.gdr.model import CheckOutcome
from gradwire.topology.gdr.nccl import name_matches
from gradwire.topology.gdr.process_context import read_process_context
from gradwire.topology.gdr.rdma import pcie_gigabits
from gradwire.topology.gdr.runner import run_checks
from gradwire.topology.gdr.sources import HostInputs, SourceError, opened_host
from gradwire.topology.readers.nvml import nvlink_domain
from gradwire.topology.readers.nvml_calls import start_nvml
from gradwire.topology.readers.pci_sysfs import gigatransfers
from gradwire.topology.readers.small_files import names_in, number_of, text_of
from gradwire.topology.readers.sysfs import is_virtual
from gradwire.topology.readers.sysfs_ports import find_ports

LIVE = Path("/")
_LOOPBACK = 772
"""Value of /sys/class/net/*/type for loopback interfaces. Source: Linux include/uapi/linux/if_arp.h."""
SOFTWARE_NAMES = re.compile(r"(docker|br-|virbr|cni|veth|cali|flannel|tun|tap|wg|kube|lxc|vnet|podman|tailscale|zt)")
"""Beginnings of the names of interfaces that lead to containers, virtual machines or tunnels on this host."""


def read_rank(rank: int, local_rank: int | None, root: Path = LIVE) -> RankFacts:
    """Reads the facts of this process and its machine, without measuring anything.

    Args:
        rank: Rank of this process.
        local_rank: LOCAL_RANK of this process; None if the launcher does not set it.
        root: Folder that contains sys/, proc/ and dev/.
    """
    variables = steering_variables()
    interfaces = read_interfaces(root)
    memory = _shared_memory(root / "dev/shm")
    return RankFacts(
        rank=rank,
        host=host_identity(),
        local_rank=local_rank,
        device="cuda" if has_torch() and _cuda() else "cpu",
        versions=versions(root),
        variables=variables,
        cores=os.cpu_count() or 1,
        affinity=tuple(sorted(os.sched_getaffinity(0))),
        cpu_limit=cpu_limit(root),
        threads=_threads() if has_torch() else 1,
        shm_nbytes=memory[0] if memory else None,
        shm_free_nbytes=memory[1] if memory else None,
        interfaces=interfaces,
        gloo_interface=gloo_choice(interfaces, variables, _own_address()),
        nccl_interface=nccl_choice(interfaces, variables),
        tcp_window_nbytes=_largest(root / "proc/sys/net/ipv4/tcp_rmem"),
        tcp_send_nbytes=_largest(root / "proc/sys/net/ipv4/tcp_wmem"),
        container=read_process_context(Files(root), "KUBERNETES_SERVICE_HOST" in variables).container or "",
        governor=text_of(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
    )


def has_torch() -> bool:
    """Returns whether torch is installed in this Python; it is not imported."""
    return importlib.util.find_spec("torch") is not None


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def versions(root: Path = LIVE) -> dict[str, str]:
    """Returns the versions of the software that should be the same on all ranks: name -> version.

    Args:
        root: Folder that contains proc/, where the GPU driver's version is read.
    """
    found = {"python": platform.python_version(), "gradwire": importlib.metadata.version("gradwire")}
    driver = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\S+)", text_of(root / "proc/driver/nvidia/version") or "")
    if driver is not None:
        found["driver"] = driver[1]
    if not has_torch():
        return found
    import torch

    found["torch"] = torch.__version__
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda or "?"
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch has no types there
    return found


def read_interfaces(root: Path = LIVE) -> tuple[NetworkInterface, ...]:
    """Reads the network interfaces of the machine, loopback included.

    Args:
        root: Folder that contains sys/ and proc/. Interfaces have addresses only if it is `/`, because sysfs does not
            have them and the kernel is asked.
    """
    ports = find_ports(root)
    rates: dict[str, float] = {}
    for port in ports.all():
        if port.bits_per_second is not None and not port.virtual:
            for name in port.interfaces:
                rates[name] = port.bits_per_second
                if port.bond is not None and port.carries:
                    rates[port.bond] = rates.get(port.bond, 0.0) + port.bits_per_second
    folder = root / "sys/class/net"
    addresses = _addresses() if root == LIVE else {}
    found = []
    for name in sorted(names_in(folder)):
        own = folder / name
        if not own.is_dir():  # bonding_masters is a file
            continue
        state, kind = text_of(own / "operstate"), _kind(folder, name)
        found.append(
            NetworkInterface(
                name=name,
                kind=kind,
                addresses=tuple(addresses.get(name, ())),
                mtu=number_of(own / "mtu") or 1500,
                bits_per_second=_rate(folder, name, rates),
                pcie_bits_per_second=None if root == LIVE and is_virtual(root) else pcie_rate(own / "device"),
                other_half=_other_half(folder, name),
                duplex=text_of(own / "duplex") if kind == "nic" else None,
                up=state in ("up", "unknown", None),
            )
        )
    return tuple(found)


def link_changes(root: Path = LIVE) -> dict[str, int]:
    """Reads how often the link of each interface has gone up or down since the machine started.

    Source: Linux Documentation/ABI/testing/sysfs-class-net, carrier_changes.

    Args:
        root: Folder that contains sys/.

    Returns:
        Interface -> number of changes; 0 if the kernel does not count them.
    """
    folder = root / "sys/class/net"
    return {name: number_of(folder / name / "carrier_changes") or 0 for name in names_in(folder)}


def interface_nbytes(root: Path = LIVE) -> dict[str, tuple[int, int]]:
    """Reads the byte counters of each network interface.

    Source: Linux Documentation/ABI/testing/sysfs-class-net-statistics.

    Args:
        root: Folder that contains sys/.

    Returns:
        Interface -> (bytes sent, bytes received) since the machine started.
    """
    folder = root / "sys/class/net"
    return {
        name: (
            number_of(folder / name / "statistics/tx_bytes") or 0,
            number_of(folder / name / "statistics/rx_bytes") or 0,
        )
        for name in names_in(folder)
    }


def pcie_rate(device: Path) -> float | None:
    """Returns the bits per second of a device's PCIe link in one direction; None if the kernel does not report it.

    Source: Linux Documentation/ABI/testing/sysfs-bus-pci; the encoding of PCIe as in `pcie_gigabits`.

    Args:
        device: Folder of the PCIe function in sysfs.
    """
    speed, width = gigatransfers(text_of(device / "current_link_speed")), number_of(device / "current_link_width")
    return 1e9 * pcie_gigabits(speed, width) if speed and width else None


def _port_of_nic(own: Path) -> tuple[str, str] | None:
    """Returns the GUID of the NIC and the number of the PCIe function, which together name a port.

    Two functions of one NIC with the same number belong to the same port: see `_other_half`. None if the interface is
    no RDMA NIC.

    Args:
        own: Folder of the interface in /sys/class/net.
    """
    folder = own / "device" / "infiniband"
    guids = [text_of(folder / name / "sys_image_guid") for name in names_in(folder)]
    try:
        function = (own / "device").resolve().name.rpartition(".")[2]
    except OSError:
        return None
    return (guids[0], function) if guids and guids[0] and guids[0].strip("0:") and function else None


def _other_half(folder: Path, name: str) -> str | None:
    """Returns the other interface of the same port, if the port has two PCIe links; None if it has one.

    See `half_ports` of gdr-check.
    """
    port = _port_of_nic(folder / name)
    if port is None:
        return None
    return next(
        (each for each in sorted(names_in(folder)) if each != name and _port_of_nic(folder / each) == port), None
    )


def _kind(folder: Path, name: str) -> str:
    """Returns the kind of an interface, as `NetworkInterface.kind` lists them."""
    own = folder / name
    if number_of(own / "type") == _LOOPBACK:
        return "loopback"
    is_bridge = (own / "bridge").is_dir()
    if is_bridge and _is_over_a_nic(folder, name):  # of a host of virtual machines: it has the NIC's address
        return "nic"
    if is_bridge or SOFTWARE_NAMES.match(name):
        return "bridge"
    return "nic" if (own / "device").exists() or (own / "bonding").is_dir() or _below(folder, name) else "virtual"


def _below(folder: Path, name: str) -> list[str]:
    """Returns the interfaces that this one is made of: the one below a VLAN, the members of a bond, team or bridge."""
    return [each.removeprefix("lower_") for each in names_in(folder / name) if each.startswith("lower_")]


def _is_over_a_nic(folder: Path, name: str) -> bool:
    """Returns whether an interface has a NIC below it, directly or through other interfaces."""
    return any((folder / each / "device").exists() or _is_over_a_nic(folder, each) for each in _below(folder, name))


def _rate(folder: Path, name: str, rates: Mapping[str, float]) -> float | None:
    """Returns the rate of an interface in bits per second, or that of the fastest one below it; None if unknown.

    Rates of a team's or bridge's members are not added, because some may be in reserve.

    Args:
        folder: /sys/class/net below the root.
        name: Name of the interface.
        rates: Interface -> known rate, with bonds.
    """
    if name in rates or (folder / name / "bonding").is_dir():
        return rates.get(name)
    return max(filter(None, (_rate(folder, each, rates) for each in _below(folder, name))), default=None)


def _addresses() -> dict[str, list[str]]:
    """Returns the addresses of this host by interface: the first IPv4 address, and IPv6 addresses that others reach."""
    names, found = dict(socket.if_nameindex()), dict[str, list[str]]()
    for each in host_addresses():
        own = found.setdefault(names.get(each.index, ""), [])
        if is_outside(each.address) if ":" in each.address else not own:
            own.append(each.address)
    return found


def _own_address() -> str | None:
    """Returns the address to which this host's name resolves; None if it does not resolve."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def gloo_choice(
    interfaces: tuple[NetworkInterface, ...], variables: Mapping[str, str], own_address: str | None
) -> str | None:
    """Returns the interface that torch's gloo would choose; None if this machine has no interface for it.

    It is the first of GLOO_SOCKET_IFNAME if that is set, else the one that has the address of the host's name, else the
    loopback.

    Source: torch, ProcessGroupGloo::createDefaultDevice, and the documentation of torch.distributed, section "Common
    environment variables".

    Args:
        interfaces: Interfaces of this machine.
        variables: Environment variables of this process.
        own_address: Address to which the host's name resolves; None if it does not resolve.
    """
    if given := variables.get("GLOO_SOCKET_IFNAME"):
        return given.split(",")[0]
    owner = next((each.name for each in interfaces if own_address in each.addresses), None)
    if owner is None and own_address is not None and own_address.startswith("127."):
        owner = "lo"
    return owner or next((each.name for each in interfaces if each.kind == "loopback"), None)


def nccl_choice(interfaces: tuple[NetworkInterface, ...], variables: Mapping[str, str]) -> str | None:
    """Returns the interface that NCCL would choose for its sockets; None if it would find none.

    Source: NCCL user guide, NCCL_SOCKET_IFNAME: prefixes, `=` for whole names, `^` for all others; without it `ib*`
    first, then any other than `docker*` and `lo`, then those.

    Args:
        interfaces: Interfaces of this machine.
        variables: Environment variables of this process.
    """
    usable = [each for each in interfaces if each.up and each.addresses]
    if given := variables.get("NCCL_SOCKET_IFNAME"):
        return next((each.name for each in usable if name_matches(given, each.name)), None)
    classes = (
        [each for each in usable if each.name.startswith("ib")],
        [each for each in usable if not each.name.startswith(("docker", "virbr")) and each.kind != "loopback"],
        usable,
    )
    return next((each[0].name for each in classes if each), None)


def cpu_limit(root: Path = LIVE) -> float | None:
    """Returns the CPUs that the quotas of this process's cgroups allow, as a fraction; None without a quota.

    All processes of a cgroup share its quota, and those of the groups above it apply too: the least is returned.

    Source: Linux Documentation/admin-guide/cgroup-v2.rst, cpu.max; Documentation/scheduler/sched-bwc.rst for version 1.

    Args:
        root: Folder that contains sys/ and proc/.
    """
    limits = []
    for line in (text_of(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        tops = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"] if not controllers else []
        tops += [root / "sys/fs/cgroup" / each for each in (controllers, "cpu", "cpu,cpuacct") if controllers]
        parts = [part for part in path.split("/") if part and part != ".."]
        for top in tops:
            folders = [top.joinpath(*parts[:count]) for count in range(len(parts) + 1)]
            limits += [limit for folder in folders if (limit := _quota(folder)) is not None]
    return min(limits, default=None)


def _quota(folder: Path) -> float | None:
    """Returns the CPUs that a cgroup's folder allows, by version 2 or version 1; None without a quota."""
    words = (text_of(folder / "cpu.max") or "").split()
    if len(words) == 2 and words[0].isdigit() and int(words[1]):
        return int(words[0]) / int(words[1])
    quota, period = number_of(folder / "cpu.cfs_quota_us"), number_of(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _shared_memory(folder: Path) -> tuple[int, int] | None:
    """Returns the size and the free space of a shared-memory folder, in bytes; None if it does not exist."""
    if not folder.is_dir():
        return None
    facts = os.statvfs(folder)
    return facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize


def _largest(file: Path) -> int | None:
    """Returns the maximum of a TCP buffer's size, the third number of its file; None if the file has no such number.

    Source: tcp(7), tcp_rmem and tcp_wmem.
    """
    words = (text_of(file) or "").split()
    return int(words[2]) if len(words) == 3 and words[2].isdigit() else None


def gdr_verdicts() -> tuple[tuple[str, str, str], ...]:
    """Runs `gradwire gdr-check` on this machine, and returns what it finds wrong.

    Returns:
        A tuple (`fail` or `warn`, finding, fix) for each check that does not pass; one `warn` if the machine cannot be
        examined.
    """
    try:
        with opened_host(HostInputs()) as host:
            report = run_checks(host)
    except SourceError as error:
        return (("warn", f"gdr-check cannot look at this machine: {error}", "gradwire gdr-check"),)
    wrong = {CheckOutcome.FAIL: "fail", CheckOutcome.WARN: "warn"}
    return tuple(
        (wrong[each.finding.outcome], f"{each.check.title}: {each.finding.text}", each.finding.fix)
        for each in report.results
        if each.finding.outcome in wrong
    )


def gpu_states() -> tuple[GpuState, ...]:
    """Reads the states of this machine's GPUs by NVML: clocks, why the driver lowers them, peer access, NVLink domain.

    Call it while the GPUs compute, because idle GPUs have low clocks. Empty without an NVIDIA driver.

    Source: NVML API reference, nvmlDeviceGetCurrentClocksEventReasons and its constants.
    """
    nvml, _ = start_nvml()
    if nvml is None:  # no driver: no GPUs
        return ()
    handles = nvml.handles()
    found = tuple(
        GpuState(
            index=index,
            name=nvml.text("nvmlDeviceGetName", handle) or "",
            sm_mhz=nvml.integer("nvmlDeviceGetClockInfo", handle, CLOCK_SM),
            max_sm_mhz=nvml.integer("nvmlDeviceGetMaxClockInfo", handle, CLOCK_SM),
            p2p=nvml.peer_states(handles, index),
            nvlink_domain=nvlink_domain(nvml, handle),
            slowed_by=_reasons(nvml.integer("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0),
        )
        for index, handle in handles.items()
    )
    nvml.call("nvmlShutdown")
    return found


CLOCK_SM = 1
"""NVML's number of the SM clock. Source: nvml.h, NVML_CLOCK_SM."""

SLOWED = {
    0x08: "hardware slowdown",
    0x20: "too hot (software limit)",
    0x40: "too hot (hardware limit)",
    0x80: "power brake (power supply)",
}
"""Bit of NVML's throttle reasons -> words, for those that are a fault; idling and clocks set by the user are left out.

Source: nvml.h, nvmlClocksThrottleReason*.
"""


def _reasons(bits: int) -> tuple[str, ...]:
    return tuple(text for bit, text in SLOWED.items() if bits & bit)
