"""Stage 4, the path: distance, assignment, IOMMU, ACS on the bridges between GPU and NIC."""

from collections import Counter

from gradwire.topology.gdr.host import Host
from gradwire.topology.gdr.model import Check, Finding, Outcome, Verdict, informed, passed, unknown, warned
from gradwire.topology.gdr.nccl import within
from gradwire.topology.gdr.stages.stage4_registers import CHECKS as REGISTER_CHECKS
from gradwire.topology.readers.pci import PciFunction


def distance(host: Host) -> Finding:
    """GPU and NIC hang below common switches; through the CPU NCCL does not use GDR unless it is told to.

    Command: `lspci -tv; nvidia-smi topo -m`
    Source: NCCL src/graph/paths.cc (ncclTopoCheckGdr): default level PXB, P2C with a chip-to-chip link.
    """

    def judge(gpu: str, nic: str) -> tuple[Outcome, str]:
        path = host.distances[gpu, nic]
        if path is None:
            return Outcome.UNKNOWN, f"{gpu} to {nic}: the PCI tree does not say"
        if path in ("PIX", "PXB", "P2C"):
            return Outcome.PASS, f"{gpu} to {nic} is {path}"
        return Outcome.WARN, f"{gpu} to {nic} is {path}: not by default"

    remedy = "move the card below the GPU's switch; or measure NCCL_NET_GDR_LEVEL=PHB (SYS) against the default"
    return host.judge_pairs(judge, remedy)


def assignment(host: Host) -> Finding:
    """Every GPU has a NIC of its own where there are enough.

    Command: `nvidia-smi topo -m`
    Source: NCCL src/graph/search.cc (NIC selection); user guide, NCCL_PXN_DISABLE and NCCL_CROSS_NIC.
    """
    if not host.best_pairs or any(host.distances[pair] is None for pair in host.best_pairs):
        return unknown("distances are not known")
    choices = {gpu.bus_id: [nic for one, nic in host.best_pairs if one == gpu.bus_id] for gpu in host.gpus}
    shared = Counter(nics[0] for nics in choices.values() if len(nics) == 1)
    crowded = [f"{nic} ({count} GPUs)" for nic, count in shared.items() if count > 1]
    idle = {nic.bus_id for nic in host.nics} - {nic for nics in choices.values() for nic in nics}
    if crowded and idle:
        return warned(
            f"NICs shared while others idle: {', '.join(crowded[:4])}", "NCCL_PXN_DISABLE=0; spread the cards"
        )
    far = [gpu for gpu, nics in choices.items() if not within(str(host.distances[gpu, nics[0]]), "PXB")]
    if far and len(far) < len(choices):
        return warned(f"GPUs without a near NIC: {', '.join(far[:4])}", "NCCL_PXN_DISABLE=0 lets a neighbour GPU send")
    return passed(f"{len(choices)} GPUs, {len(host.nics)} NICs" + (f", shared: {len(crowded)}" if crowded else ""))


def foreign_nics(host: Host) -> Finding:
    """Storage and management NICs, near no GPU, are kept out of NCCL_IB_HCA.

    Command: `echo $NCCL_IB_HCA; nvidia-smi topo -m`
    Source: NCCL user guide, NCCL_IB_HCA (prefix match; `=` exact, `^` exclude).
    """
    if host.settings is None or any(path is None for path in host.distances.values()):
        return unknown("environment or distances are not known", "give --env FILE (the output of env)")
    near = {pair[1] for pair, path in host.distances.items() if path and within(path, "P2C")}
    foreign = [nic.name for nic in host.nics if nic.bus_id not in near]
    value = host.setting("NCCL_IB_HCA")
    used = [name for name in foreign if value is None or hca_matches(value, name)]
    if near and used:
        return warned(f"near no GPU, yet usable by NCCL: {', '.join(used[:8])}", f"NCCL_IB_HCA=^={','.join(foreign)}")
    return passed(f"NCCL_IB_HCA={value}" if value else "no foreign NIC")


def hca_matches(value: str, name: str) -> bool:
    """Whether NCCL_IB_HCA lets NCCL use a device.

    Source: NCCL user guide, NCCL_IB_HCA; src/misc/utils.cc (parseStringList, matchIfList).
    """
    exclude, rest = value.startswith("^"), value.lstrip("^")
    exact, rest = rest.startswith("="), rest.lstrip("=")
    words = [word.partition(":")[0] for word in rest.split(",") if word]
    listed = any(name == word if exact else name.startswith(word) for word in words)
    return listed != exclude


def iommu(host: Host) -> Finding:
    """The IOMMU is off or passes through; a translated domain slows or breaks traffic between devices.

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

    def judge(gpu: str, nic: str) -> tuple[Outcome, str]:
        kinds = [_domain(host, host.tree.functions[bus_id]) for bus_id in (gpu, nic)]
        if None in kinds:
            return Outcome.UNKNOWN, f"{gpu}, {nic}: IOMMU domain type not known"
        translated = any(str(kind).startswith("DMA") for kind in kinds)
        return (Outcome.WARN if translated else Outcome.PASS), f"{gpu}, {nic}: IOMMU {' and '.join(map(str, kinds))}"

    if host.place.virtual:
        return informed("virtual machine: the host's IOMMU decides")
    return host.judge_pairs(judge, "kernel command line iommu=pt, or VT-d/AMD-Vi off in the firmware")


def _domain(host: Host, function: PciFunction) -> str | None:
    """Domain type of a function's group; `none` outside every group."""
    if function.iommu_group is None:
        return "none"
    return host.files.text(f"sys/kernel/iommu_groups/{function.iommu_group}/type")


def access_control(host: Host) -> Finding:
    """No downstream port between GPU and NIC redirects their traffic to the CPU; source validation alone is harmless.

    Command: `lspci -vvv -s BDF | grep ACSCtl` for each bridge between them, as root
    Source: NCCL user guide, Troubleshooting, section PCI Access Control Services; PCIe Base 5.0 section 7.7.8.3.
    """

    def judge(gpu: str, nic: str) -> tuple[Outcome, str]:
        if host.distances[gpu, nic] in ("PHB", "SYS", "P2C"):
            return Outcome.INFO, f"{gpu} to {nic} goes through the CPU anyway"
        between = host.tree.bridges_between(gpu, nic)
        bits = {bridge: _redirect(host, bridge) for bridge in between or ()}
        on = [f"{bridge} {'+ '.join(names)}+" for bridge, names in bits.items() if names]
        if on:
            return Outcome.FAIL, f"ACS redirects between {gpu} and {nic}: {'; '.join(on)}"
        if between is None or None in bits.values():
            return Outcome.UNKNOWN, f"{gpu} to {nic}: ACS bits cannot be read"
        return Outcome.PASS, f"none of {len(bits)} bridges between {gpu} and {nic} redirects"

    if host.place.virtual:
        return informed("virtual machine: ACS must stay on, ATS decides (P6)")
    finding = host.judge_pairs(judge, "run as root on the host")
    if finding.outcome is not Outcome.FAIL:
        return finding
    bridges = sorted(
        {b for pair in host.best_pairs for b in host.tree.bridges_between(*pair) or () if _redirect(host, b)}
    )
    remedy = "; ".join(f"setpci -s {bridge} ECAP_ACS+0x6.w=0000" for bridge in bridges[:8])
    return Finding(finding.outcome, finding.text, f"{remedy} (at each boot), or ACS off in the firmware", finding.pairs)


def _redirect(host: Host, bridge: str) -> tuple[str, ...] | None:
    function = host.tree.functions.get(bridge)
    return None if function is None or function.config is None else function.config.acs_redirect


CHECKS = (
    Check("P1", "distance", distance, Verdict.POSSIBLE, ("E1",)),
    Check("P2", "a NIC for every GPU", assignment, None, ("P1",)),
    Check("P3", "foreign NICs", foreign_nics, None, ("P1",)),
    Check("P4", "IOMMU", iommu, Verdict.POSSIBLE, ("P1",)),
    Check("P5", "ACS between GPU and NIC", access_control, Verdict.POSSIBLE, ("P1",)),
    *REGISTER_CHECKS,
)
