"""Stage 4, continued: registers and placement that cost speed: ATS, read requests, ordering, links, NUMA."""

import re
from collections.abc import Callable

from gradwire.topology.gdr.host import Host
from gradwire.topology.gdr.model import Check, Finding, informed, passed, unknown, warned
from gradwire.topology.gdr.rdma import pcie_gigabits
from gradwire.topology.readers.pci import PciFunction
from gradwire.topology.readers.pci_config import ConfigSpace

_READ_REQUEST_NBYTES = 4096  # what NVIDIA's and Oracle's tuning scripts set on ConnectX cards


def _registers(host: Host, read: Callable[[ConfigSpace], bool | None]) -> tuple[list[str], bool]:
    """NICs for which a register is bad, and whether every NIC's register is known."""
    answers = {nic.name: read(nic.function.config) if nic.function.config else None for nic in host.nics}
    return [name for name, good in answers.items() if good is False], bool(answers) and None not in answers.values()


def address_translation(host: Host) -> Finding:
    """In a virtual machine ATS lets traffic between devices skip the host's IOMMU.

    Command: `lspci -vvv -s NIC | grep ATSCtl; mlxconfig -d NIC q ATS_ENABLED`
    Source: NCCL user guide, Troubleshooting, section PCI Access Control Services (virtual machines).
    """
    if host.place.virtual is None:
        return unknown("virtual machine or not?")
    if not host.place.virtual:
        return passed("bare metal needs no ATS")
    off, known = _registers(host, _ats)
    if off:
        return warned(f"ATS off on {', '.join(off[:8])}", "mlxconfig -d NIC set ATS_ENABLED=1 on the host, reboot")
    return passed("ATS on") if known else unknown("ATS bits cannot be read", "run as root")


def _ats(config: ConfigSpace) -> bool | None:
    """Without the capability ATS is as good as off."""
    return False if config.ats_enabled is None and config.extended else config.ats_enabled


def read_requests(host: Host) -> Finding:
    """Large read requests keep a NIC busy; GPU and NIC agree about the payload.

    Command: `lspci -vvv -s NIC | grep -E "MaxPayload|MaxReadReq"`
    Source: PCIe Base 5.0 section 7.5.3.4; Oracle oci-hpc tuning scripts (MaxReadReq 4096).
    """
    small, known = _registers(host, lambda config: _at_least(config.max_read_request_nbytes, _READ_REQUEST_NBYTES))
    if small:
        return warned(f"MaxReadReq below 4096 on {', '.join(small[:8])}", "setpci -s NIC CAP_EXP+8.w=5000:7000")
    payloads = {
        f.config.max_payload_nbytes
        for pair in host.best_pairs
        for f in map(host.tree.functions.get, pair)
        if f and f.config
    }
    if known and len(payloads - {None}) > 1:
        return warned(
            f"MaxPayload differs: {sorted(p for p in payloads if p)}", "pci=pcie_bus_perf on the kernel command line"
        )
    return (
        passed("MaxReadReq 4096 and equal payloads")
        if known
        else unknown("Device Control cannot be read", "run as root")
    )


def _at_least(value: int | None, floor: int) -> bool | None:
    return None if value is None else value >= floor


def relaxed_ordering(host: Host) -> Finding:
    """The NIC may reorder writes; matters most on AMD and in virtual machines.

    Command: `lspci -vvv -s NIC | grep RlxdOrd; grep -F "[RO]" NCCL_LOG`
    Source: NCCL user guide, NCCL_IB_PCI_RELAXED_ORDERING; src/transport/net_ib (ibv_reg_mr_iova2).
    """
    remedy = "mlxconfig -d NIC set PCI_WR_ORDERING=1; NCCL_IB_PCI_RELAXED_ORDERING=1; rdma-core with IBVERBS_1.8"
    if host.log is not None and host.log.relaxed_ordering is not None:
        return passed("NCCL's log says [RO]") if host.log.relaxed_ordering else warned("NCCL's log lacks [RO]", remedy)
    off, known = _registers(host, lambda config: config.relaxed_ordering)
    if off:
        return warned(f"off on {', '.join(off[:8])}", remedy)
    if host.facts.verbs_relaxed_ordering is False:
        return warned("libibverbs lacks ibv_reg_mr_iova2", remedy)
    return passed("on") if known else unknown("Device Control cannot be read", "run as root")


def nic_link(host: Host) -> Finding:
    """No link on the way, from the NIC up to the GPU, is narrower than the card or slower than the port.

    Command: `lspci -vvv -s BDF | grep LnkSta` for the NIC and each bridge
    Source: Linux Documentation/ABI/testing/sysfs-bus-pci; PCIe Base 5.0 section 4.2 (encoding).
    """
    if host.place.virtual:
        return informed("virtual machine: link speed and width mean nothing")
    narrow, known = [], 0
    for nic in host.nics:
        chain = (
            nic.bus_id,
            *(b for pair in host.best_pairs if pair[1] == nic.bus_id for b in host.tree.bridges_between(*pair) or ()),
        )
        links = {bus_id: host.tree.functions[bus_id] for bus_id in chain if bus_id in host.tree.functions}
        known += bool(nic.function.current_width and nic.function.max_width)
        narrow += [
            _describe(f) for f in links.values() if _below(f) and (f.bus_id == nic.bus_id or _port_slow(f, links))
        ]
    if narrow:
        return warned(
            f"reduced links: {', '.join(dict.fromkeys(narrow))}", "reseat the card; look at slot, riser, firmware"
        )
    return (
        passed(f"{known} NICs at full width")
        if known and known == len(host.nics)
        else unknown("link widths unreadable")
    )


def _below(function: PciFunction) -> bool:
    now, most = function.current_width, function.max_width
    slow = (function.current_gigatransfers or 0) < (function.max_gigatransfers or 0) and bool(
        function.current_gigatransfers
    )
    return bool(now and most and now < most) or (slow and function.base_class == 0x02)


def _port_slow(port: PciFunction, links: dict[str, PciFunction]) -> bool:
    """A port that is wider than the card below it is no fault: it counts only when it is the bottleneck."""
    rates = [
        pcie_gigabits(f.current_gigatransfers, f.current_width)
        for f in links.values()
        if f.current_gigatransfers and f.current_width and f.base_class == 0x02
    ]
    if not rates or not port.current_gigatransfers or not port.current_width:
        return False
    return pcie_gigabits(port.current_gigatransfers, port.current_width) < min(rates)


def _describe(function: PciFunction) -> str:
    return f"{function.bus_id} {function.current_gigatransfers or 0:g} GT/s x{function.current_width}"


def numa(host: Host) -> Finding:
    """The kernel knows each device's node, and this process may run near them.

    Command: `cat /sys/bus/pci/devices/BDF/numa_node; taskset -pc $$`
    Source: NCCL src/graph/xml.cc (numaid, affinity); Linux Documentation/ABI/testing/sysfs-bus-pci.
    """
    functions = [*host.gpus, *(nic.function for nic in host.nics)]
    nodes = {f.bus_id: f.numa_node for f in functions}
    lost = [bus_id for bus_id, node in nodes.items() if node == -1]
    status = host.files.find("proc/self/status", r"^Cpus_allowed_list:.*$")
    allowed = parse_cpu_list(status[0].partition(":")[2]) if status else None
    if lost and len(host.files.names("sys/devices/system/node") or ()) and len(_nodes(host)) > 1:
        return warned(f"no NUMA node: {', '.join(lost[:4])}", "firmware, hypervisor or numa=off hides it")
    cpus = {f.bus_id: parse_cpu_list(f.local_cpulist or "") for f in functions}
    far = [bus_id for bus_id, near in cpus.items() if near and allowed and not near & allowed]
    if far:
        return warned(f"bound away from {', '.join(far[:4])}", "numactl --cpunodebind, Slurm --gpu-bind=closest")
    if not nodes or None in nodes.values() or allowed is None:
        return unknown("NUMA nodes or this process's CPUs are not known")
    return passed(f"nodes {', '.join(sorted({str(node) for node in nodes.values()}))}")


def _nodes(host: Host) -> list[str]:
    return [name for name in host.files.names("sys/devices/system/node") or () if re.fullmatch(r"node\d+", name)]


def parse_cpu_list(text: str) -> set[int]:
    """CPUs of `0-3,8`; what is no such list gives the empty set."""
    cpus: set[int] = set()
    for word in text.strip().split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", word)
        if match:
            cpus.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return cpus


def virtual_topology(host: Host) -> Finding:
    """A virtual machine without PCI topology needs NCCL_TOPO_FILE, or NCCL takes every path for PHB.

    Command: `lspci -tv; echo $NCCL_TOPO_FILE`
    Source: NCCL user guide, NCCL_TOPO_FILE; nccl issues 921 and 1843; Azure azhpc-images topology folder.
    """
    if host.place.virtual is None:
        return unknown("virtual machine or not?")
    if not host.place.virtual:
        return passed("bare metal")
    if host.file_places:
        return passed("a topology file describes the machine")
    if not host.distances or any(path not in ("PHB", "SYS") for path in host.distances.values()):
        return passed("topology is visible") if host.distances else unknown("no pair is known")
    if host.settings is None:
        return unknown("flat virtual machine; NCCL_TOPO_FILE not known", "give --env FILE")
    return warned("the virtual machine hides its PCI topology", "NCCL_TOPO_FILE: Azure, OCI, AWS and IBM ship one")


CHECKS = (
    Check("P6", "ATS", address_translation, None, ("P1",)),
    Check("P7", "read request size", read_requests, None, ("P1",)),
    Check("P8", "relaxed ordering", relaxed_ordering, None, ("R1",)),
    Check("P9", "PCIe link of the NIC", nic_link, None, ("R1",)),
    Check("P10", "NUMA", numa, None, ("E1", "R1")),
    Check("P11", "virtual topology", virtual_topology, None, ("P1",)),
)
