"""Stage 0, where am I: what can be seen from here at all."""

from gradwire.topology.gdr.host import Host
from gradwire.topology.gdr.model import Finding, GdrCheck, Verdict, failed, passed, unknown, warned
from gradwire.topology.gdr.process_context import CAP_SYS_ADMIN


def where_am_i(host: Host) -> Finding:
    """Decides what can be seen: only root sees the PCI configuration space beyond its first 64 bytes.

    Warns unless the process is root and has CAP_SYS_ADMIN, as far as its capabilities are known.

    Command: `id -u; grep CapEff /proc/self/status; cat /proc/1/cgroup; systemd-detect-virt`
    Source: Linux Documentation/PCI/sysfs-pci.rst (config), capabilities(7).
    """
    if host.process.root is None:
        return unknown("/proc/self/status cannot be read", "mount /proc")
    if not host.process.root or host.process.can(CAP_SYS_ADMIN) is False:
        return warned(
            f"{host.process}: ACS and other PCI settings are hidden", "run as root on the host, or with CAP_SYS_ADMIN"
        )
    return passed(str(host.process))


def sysfs_readable(host: Host) -> Finding:
    """Checks that the PCI bus can be listed: NCCL builds its topology from it.

    Fails if it is missing or empty; warns if some of its entries cannot be read.

    Command: `ls /sys/bus/pci/devices`
    Source: NCCL user guide, Troubleshooting, section Topology detection.
    """
    if host.tree.functions:
        missing = f"; {len(host.tree.problems)} entries cannot be read" if host.tree.problems else ""
        found = f"{len(host.tree.functions)} PCI functions{missing}"
        return warned(found, host.tree.problems[0]) if missing else passed(found)
    if host.files.names("sys/bus/pci/devices") is None and host.files.state("sys/bus/pci/devices") == "unreadable":
        return unknown("/sys/bus/pci/devices cannot be listed", "run with the right to read /sys")
    return failed("/sys/bus/pci/devices is missing or empty", "mount /sys in the container")


def kernel_command_line(host: Host) -> Finding:
    """Checks the kernel's command line for numa=off; other parameters of NUMA, IOMMU and PCI are only shown.

    With numa=off every device claims to be near every CPU.

    Command: `cat /proc/cmdline`
    Source: Linux Documentation/admin-guide/kernel-parameters.txt.
    """
    tokens = host.files.find("proc/cmdline", r"(?<!\S)(numa|iommu|intel_iommu|amd_iommu|pci|pcie_acs_override)=\S+")
    if tokens is None:
        return unknown("/proc/cmdline cannot be read", "mount /proc")
    if "numa=off" in tokens:
        return warned(
            "numa=off: every device claims to be near every CPU", "remove numa=off from the kernel command line"
        )
    return passed(" ".join(tokens) or "nothing about NUMA, IOMMU or PCI")


CHECKS = (
    GdrCheck("E0", "where am I", where_am_i),
    GdrCheck("E1", "PCI bus visible", sysfs_readable, Verdict.POSSIBLE),
    GdrCheck("E2", "kernel command line", kernel_command_line),
)
