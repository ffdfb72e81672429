"""Stage 4, the path between GPU and NIC: distance, assignment, IOMMU, ACS, PCIe registers and links, NUMA."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from gradwire.topology.assign import spread
from gradwire.topology.gdr.host import Host
from gradwire.topology.gdr.model import (
    CheckOutcome,
    Finding,
    GdrCheck,
    Verdict,
    failed,
    informed,
    judge_pairs,
    passed,
    unknown,
    warned,
)
from gradwire.topology.gdr.nccl import name_matches, within
from gradwire.topology.gdr.rdma import pcie_gigabits
from gradwire.topology.pci_ids import AMAZON, MELLANOX
from gradwire.topology.readers.affinity import members
from gradwire.topology.readers.pci import PciFunction
from gradwire.topology.readers.pci_config import ConfigSpace

_READ_REQUEST_NBYTES = 4096  # what NVIDIA's and Oracle's tuning scripts set on ConnectX cards


def distance(host: Host) -> Finding:
    """Checks that NCCL uses GDR by default on the path from each GPU to its nearest NIC that is up: PIX, PXB or P2C.

    On PIX and PXB the two share a PCIe switch; P2C is a chip-to-chip link from the GPU to the CPU that has the NIC.

    Command: `lspci -tv; nvidia-smi topo -m`
    Source: NCCL src/graph/paths.cc (ncclTopoCheckGdr): default level PXB, P2C with a chip-to-chip link.
    """

    def judge(gpu: str, nic: str) -> Finding:
        path = host.distances[gpu, nic]
        if path is None:
            return unknown(f"{gpu} to {nic}: the PCI tree does not say")
        if path in ("PIX", "PXB", "P2C"):
            return passed(f"{gpu} to {nic} is {path}")
        down = [each.name for each in host.nearer_and_down(gpu)] if (gpu, nic) in host.best_pairs else []
        why = f", and {' and '.join(down)}, which is nearer, is down (R4)" if down else ""
        return warned(f"{gpu} to {nic} is {path}: not by default{why}")

    fix = "move the card below the GPU's switch; or measure NCCL_NET_GDR_LEVEL=PHB (SYS) against the default"
    return judge_pairs(host, judge, host.to_bring_up + fix)


def assignment(host: Host) -> Finding:
    """Checks that every GPU has a NIC of its own, if there are enough.

    Warns if GPUs share a NIC while another one has none, each with one of its nearest and shared as little as possible
    (`spread`, as `gradwire topo` and plans do it); or if only some GPUs have a NIC within PXB.

    Command: `nvidia-smi topo -m`
    Source: NCCL src/graph/search.cc (NIC selection); user guide, NCCL_PXN_DISABLE and NCCL_CROSS_NIC.
    """
    if not host.best_pairs or any(host.distances[pair] is None for pair in host.best_pairs):
        return unknown("distances are not known")
    choices = {gpu.bus_id: [nic for one, nic in host.best_pairs if one == gpu.bus_id] for gpu in host.gpus}
    shared = Counter(spread(choices).values())
    busy = [f"{nic} ({count} GPUs)" for nic, count in shared.items() if count > 1]
    idle = {nic.bus_id for nic in host.nics if not nic.down} - set(shared)
    if busy and idle:
        return warned(
            f"NICs shared while others idle: {', '.join(busy[:4])}",
            "spread the cards; over NVLink a neighbour GPU sends meanwhile, unless NCCL_PXN_DISABLE=1",
        )
    far = [gpu for gpu, nics in choices.items() if not within(str(host.distances[gpu, nics[0]]), "PXB")]
    if far and len(far) < len(choices):
        return warned(
            f"GPUs without a near NIC: {', '.join(far[:4])}",
            "over NVLink a neighbour GPU sends, unless NCCL_PXN_DISABLE=1",
        )
    return passed(f"{len(choices)} GPUs, {len(host.nics)} NICs" + (f", shared: {len(busy)}" if busy else ""))


def foreign_nics(host: Host) -> Finding:
    """Checks that NCCL_IB_HCA leaves out storage and management NICs, which are near no GPU.

    Command: `echo $NCCL_IB_HCA; nvidia-smi topo -m`
    Source: NCCL user guide, NCCL_IB_HCA (prefix match; `=` exact, `^` exclude).
    """
    if host.settings is None or any(path is None for path in host.distances.values()):
        return unknown("environment or distances are not known", "give --env FILE (the output of env)")
    near = {pair[1] for pair, path in host.distances.items() if path and within(path, "P2C")}
    foreign = [nic.name for nic in host.nics if nic.bus_id not in near]
    value = host.setting("NCCL_IB_HCA")
    used = [name for name in foreign if value is None or name_matches(value, name)]
    if near and used:
        return warned(f"near no GPU, yet usable by NCCL: {', '.join(used[:8])}", f"NCCL_IB_HCA=^={','.join(foreign)}")
    return passed(f"NCCL_IB_HCA={value}" if value else "no foreign NIC")


def iommu(host: Host) -> Finding:
    """Checks that the IOMMU is off or passes through; a translated domain slows or breaks traffic between devices.

    Command: `cat /sys/kernel/iommu_groups/*/type | sort | uniq -c; dmesg | grep -E "DMAR|AMD-Vi"`
    Source: Linux Documentation/ABI/testing/sysfs-kernel-iommu_groups; nccl-tests issue 115.
    """
    groups = host.files.names("sys/kernel/iommu_groups")
    if host.files.state("sys/kernel") != "present" or (
        groups is None and "sys/kernel/iommu_groups" in host.files.unreadable
    ):
        return unknown("/sys/kernel/iommu_groups cannot be seen", "mount /sys")
    if not groups:
        return passed("no IOMMU groups: off")

    def judge(gpu: str, nic: str) -> Finding:
        kinds = [domain_type(host, host.tree.functions[bus_id]) for bus_id in (gpu, nic)]
        if None in kinds:
            return unknown(f"{gpu}, {nic}: IOMMU domain type not known")
        translated = any(str(kind).startswith("DMA") for kind in kinds)
        words = f"{gpu}, {nic}: IOMMU {' and '.join(map(str, kinds))}"
        return warned(words) if translated else passed(words)

    if host.process.virtual:
        return informed("virtual machine: the host's IOMMU decides")
    return judge_pairs(host, judge, "kernel command line iommu=pt, or VT-d/AMD-Vi off in the firmware")


def domain_type(host: Host, function: PciFunction) -> str | None:
    """Returns the domain type of a function's IOMMU group; `none` outside every group, None if it cannot be read."""
    if function.iommu_group is None:
        return "none"
    return host.files.text(f"sys/kernel/iommu_groups/{function.iommu_group}/type")


def access_control(host: Host) -> Finding:
    """Checks that no bridge between GPU and NIC redirects traffic to the CPU (ACS); source validation is harmless.

    Command: `lspci -vvv -s BDF | grep ACSCtl` for each bridge between them, as root
    Source: NCCL user guide, Troubleshooting, section PCI Access Control Services; PCIe Base 5.0 section 7.7.8.3.
    """

    def judge(gpu: str, nic: str) -> Finding:
        if host.distances[gpu, nic] in ("PHB", "SYS", "P2C"):
            return informed(f"{gpu} to {nic} goes through the CPU anyway")
        between = host.tree.bridges_between(gpu, nic)
        bits = {bridge: _redirect(host, bridge) for bridge in between or ()}
        on = [f"{bridge} {'+ '.join(names)}+" for bridge, names in bits.items() if names]
        if on:
            return failed(f"ACS redirects between {gpu} and {nic}: {'; '.join(on)}")
        if between is None or None in bits.values():
            return unknown(f"{gpu} to {nic}: ACS bits cannot be read")
        return passed(f"none of {len(bits)} bridges between {gpu} and {nic} redirects")

    if host.process.virtual:
        return informed("virtual machine: ACS must stay on, ATS decides (P6)")
    finding = judge_pairs(host, judge, "run as root on the host")
    if finding.outcome is not CheckOutcome.FAIL:
        return finding
    bridges = sorted(
        {b for pair in host.best_pairs for b in host.tree.bridges_between(*pair) or () if _redirect(host, b)}
    )
    fix = "; ".join(f"setpci -s {bridge} ECAP_ACS+0x6.w=0000" for bridge in bridges[:8])
    return replace(finding, fix=f"{fix} (at each boot), or ACS off in the firmware")


def _redirect(host: Host, bridge: str) -> tuple[str, ...] | None:
    function = host.tree.functions.get(bridge)
    return None if function is None or function.config is None else function.config.acs_redirect


def _registers(host: Host, read: Callable[[ConfigSpace], bool | None]) -> tuple[list[str], bool]:
    """Returns the NICs for which a register is bad, and whether every NIC's register is known."""
    values = {nic.name: read(nic.function.config) if nic.function.config else None for nic in host.nics}
    return [name for name, good in values.items() if good is False], bool(values) and None not in values.values()


def address_translation(host: Host) -> Finding:
    """Checks in a virtual machine that ATS is on, with which traffic between devices skips the host's IOMMU.

    Command: `lspci -vvv -s NIC | grep ATSCtl; mlxconfig -d NIC q ATS_ENABLED`
    Source: NCCL user guide, Troubleshooting, section PCI Access Control Services (virtual machines).
    """
    if host.process.virtual is None:
        return unknown("virtual machine or not?")
    if not host.process.virtual:
        return passed("bare metal needs no ATS")
    off, known = _registers(host, _ats)
    if off:
        return warned(f"ATS off on {', '.join(off[:8])}", _ats_fix(host, off))
    return passed("ATS on") if known else unknown("ATS bits cannot be read", "run as root")


def _ats_fix(host: Host, names: list[str]) -> str:
    """Returns the fix for the maker of the NICs: NVIDIA's tool works with NVIDIA's NICs only."""
    makers = {nic.function.vendor for nic in host.nics if nic.name in names}
    if makers <= {MELLANOX}:
        return "mlxconfig -d NIC set ATS_ENABLED=1 on the host, reboot"
    if makers <= {AMAZON}:
        return "nothing to do: on EC2 the hypervisor decides how EFA reaches a GPU"
    return "ATS in the NIC's firmware, by its maker's tool on the host"


def _ats(config: ConfigSpace) -> bool | None:
    """Returns whether ATS is on: False also without the capability, None if it cannot be read."""
    return False if config.ats_enabled is None and config.extended else config.ats_enabled


def read_requests(host: Host) -> Finding:
    """Checks that NICs may read 4096 bytes at once, which keeps them busy, and that payload sizes of GPU and NIC agree.

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
    """Checks that the NIC may reorder writes, which matters most on AMD and in virtual machines.

    Command: `lspci -vvv -s NIC | grep RlxdOrd; grep -F "[RO]" NCCL_LOG`
    Source: NCCL user guide, NCCL_IB_PCI_RELAXED_ORDERING; src/transport/net_ib (ibv_reg_mr_iova2); release notes of
    NCCL 2.18.1 (LL128 and relaxed ordering).
    """
    verbs = "NCCL_IB_PCI_RELAXED_ORDERING=1, but for NCCL 2.18.1; rdma-core with IBVERBS_1.8"
    nvidia = any(nic.function.vendor == MELLANOX for nic in host.nics)
    if host.nics and all(nic.plugin for nic in host.nics):
        return informed("libfabric's provider decides for EFA, Slingshot and Omni-Path, not NCCL's verbs")
    fix = f"mlxconfig -d NIC set PCI_WR_ORDERING=1; {verbs}" if nvidia else f"{verbs}; the NIC's own firmware tool"
    if host.log is not None and host.log.relaxed_ordering is not None:
        return passed("NCCL's log says [RO]") if host.log.relaxed_ordering else warned("NCCL's log lacks [RO]", fix)
    off, known = _registers(host, lambda config: config.relaxed_ordering)
    if off:
        return warned(f"off on {', '.join(off[:8])}", fix)
    if host.facts.verbs_relaxed_ordering is False:
        return warned("libibverbs lacks ibv_reg_mr_iova2", fix)
    return passed("on") if known else unknown("Device Control cannot be read", "run as root")


def nic_link(host: Host) -> Finding:
    """Checks that the NIC's PCIe link has its full width and speed, and that no bridge up to the GPU slows it down.

    A bridge is named if its link is narrower than it could be, and slower than the links of all NICs on the way.

    Command: `lspci -vvv -s BDF | grep LnkSta` for the NIC and each bridge
    Source: Linux Documentation/ABI/testing/sysfs-bus-pci; PCIe Base 5.0 section 4.2 (encoding).
    """
    if host.process.virtual:
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
    """Returns whether a bridge's port is slower than every NIC on the way, and so the bottleneck; False if unknown.

    Args:
        port: The port's function, with its current link.
        links: Functions on the way from NIC to GPU; only its NICs count.
    """
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
    """Checks that the kernel knows the NUMA node of each device, and that this process may run on it.

    Command: `cat /sys/bus/pci/devices/BDF/numa_node; taskset -pc $$`
    Source: NCCL src/graph/xml.cc (numaid, affinity); Linux Documentation/ABI/testing/sysfs-bus-pci.
    """
    functions = [*host.gpus, *(nic.function for nic in host.nics)]
    nodes = {f.bus_id: f.numa_node for f in functions}
    lost = [bus_id for bus_id, node in nodes.items() if node == -1]
    status = host.files.find("proc/self/status", r"^Cpus_allowed_list:.*$")
    allowed = set(members(status[0].partition(":")[2])) if status else None
    if lost and len(host.files.names("sys/devices/system/node") or ()) and len(_nodes(host)) > 1:
        return warned(f"no NUMA node: {', '.join(lost[:4])}", "firmware, hypervisor or numa=off hides it")
    cpus = {f.bus_id: set(members(f.local_cpulist or "")) for f in functions}
    far = [bus_id for bus_id, near in cpus.items() if near and allowed and not near & allowed]
    if far:
        return warned(f"bound away from {', '.join(far[:4])}", "numactl --cpunodebind, Slurm --gpu-bind=closest")
    if not nodes or None in nodes.values() or allowed is None:
        return unknown("NUMA nodes or this process's CPUs are not known")
    return passed(f"nodes {', '.join(sorted({str(node) for node in nodes.values()}))}")


def _nodes(host: Host) -> list[str]:
    return [name for name in host.files.names("sys/devices/system/node") or () if re.fullmatch(r"node\d+", name)]


def virtual_topology(host: Host) -> Finding:
    """Checks that a virtual machine without PCI topology has NCCL_TOPO_FILE; otherwise NCCL takes every path for PHB.

    Command: `lspci -tv; echo $NCCL_TOPO_FILE`
    Source: NCCL user guide, NCCL_TOPO_FILE; nccl issues 921 and 1843; Azure azhpc-images topology folder.
    """
    if host.process.virtual is None:
        return unknown("virtual machine or not?")
    if not host.process.virtual:
        return passed("bare metal")
    if host.file_positions:
        return passed("a topology file describes the machine")
    if not host.distances or any(path not in ("PHB", "SYS") for path in host.distances.values()):
        return passed("topology is visible") if host.distances else unknown("no pair is known")
    if host.settings is None:
        return unknown("flat virtual machine; NCCL_TOPO_FILE not known", "give --env FILE")
    return warned("the virtual machine hides its PCI topology", "NCCL_TOPO_FILE: Azure, OCI, AWS and IBM ship one")


CHECKS = (
    GdrCheck("P1", "distance", distance, Verdict.POSSIBLE, ("E1",)),
    GdrCheck("P2", "a NIC for every GPU", assignment, None, ("P1",)),
    GdrCheck("P3", "foreign NICs", foreign_nics, None, ("P1",)),
    GdrCheck("P4", "IOMMU", iommu, Verdict.POSSIBLE, ("P1",)),
    GdrCheck("P5", "ACS between GPU and NIC", access_control, Verdict.POSSIBLE, ("P1",)),
    GdrCheck("P6", "ATS", address_translation, None, ("P1",)),
    GdrCheck("P7", "read request size", read_requests, None, ("P1",)),
    GdrCheck("P8", "relaxed ordering", relaxed_ordering, None, ("R1",)),
    GdrCheck("P9", "PCIe link of the NIC", nic_link, None, ("R1",)),
    GdrCheck("P10", "NUMA", numa, None, ("E1", "R1")),
    GdrCheck("P11", "virtual topology", virtual_topology, None, ("P1",)),
)
