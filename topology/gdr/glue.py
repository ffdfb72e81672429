"""The two mechanisms that give a NIC access to GPU memory: peer memory (a kernel module) and dma-buf."""

import re
from dataclasses import dataclass

from gradwire.topology.gdr.host import Host

PEERMEM_PATHS = (
    "sys/kernel/mm/memory_peers/nv_mem/version",
    "sys/kernel/mm/memory_peers/nv_mem_nc/version",
    "sys/module/nvidia_peermem/version",
)
"""Any of these makes NCCL use peer memory. Source: NCCL src/transport/net_ib/gdr.cc."""


DATA_CENTRE = {
    0x1DB1: "V100 SXM2 16GB",
    0x1DB5: "V100 SXM2 32GB",
    0x1DB6: "V100 PCIe 32GB",
    0x20B0: "A100 SXM4 40GB",
    0x20B2: "A100 SXM4 80GB",
    0x20B5: "A100 PCIe 80GB",
    0x20F1: "A100 PCIe 40GB",
    0x2330: "H100 SXM5 80GB",
    0x2331: "H100 PCIe",
    0x2335: "H200 SXM 141GB",
    0x2342: "GH200",
    0x26B9: "L40S",
    0x2901: "B200",
}
"""Device ids of GPUs sold with GPUDirect RDMA. Source: pci.ids and NVIDIA's data sheets."""


_PROFESSIONAL = re.compile(r"Tesla|Quadro|RTX PRO|RTX A\d|RTX \d{4} Ada|\b(A|H|B|L|V|GH|GB|P)\d{2,3}S?\b")
UNIFIED = {0x2E12: "GB10"}
"""GPUs that share the processor's memory: CUDA offers no GPUDirect RDMA there. Source: NVIDIA DGX Spark, Known issues
and frequently asked questions; pci.ids."""


def gpu_has_gdr(host: Host, gpu: str) -> tuple[bool | None, str]:
    """Returns whether a GPU's memory can be registered with a NIC at all, and the evidence in words.

    Args:
        host: The machine as it was read.
        gpu: Bus id of one of its GPUs.

    Returns:
        (True or False, evidence), or (None, why the GPU was not asked) if it is unknown.
    """
    facts, function = host.gpu_facts(gpu), host.tree.functions[gpu]
    name = facts.name or DATA_CENTRE.get(function.device or 0) or UNIFIED.get(function.device or 0, "")
    if facts.gdr_supported is not None:
        return facts.gdr_supported, f"attribute 116 is {facts.gdr_supported:d}"
    if "GeForce" in name or re.search(r"\bGB10\b", name):
        return False, f"{name} has no GPUDirect RDMA"
    if _PROFESSIONAL.search(name):
        return True, f"{name} has GPUDirect RDMA"
    why = host.facts.cuda_error or "no libcuda, no NVML"
    return None, f"GPU {function.device or 0:04x} was not asked: {why}"


def no_gpu_has_gdr(host: Host) -> bool:
    """Returns whether all GPUs are known to lack GPUDirect RDMA, so that there is nothing to load or repair.

    False if the host has no GPU, or if it is unknown for one of them.
    """
    return bool(host.gpus) and all(gpu_has_gdr(host, gpu.bus_id)[0] is False for gpu in host.gpus)


@dataclass(frozen=True, slots=True)
class DmabufCondition:
    """Describes one condition of dma-buf and whether the host meets it."""

    name: str
    """Short name for messages, such as `kernel` or `CUDA`."""
    good: bool | None
    """True if it holds, False if not, None if unknown."""
    text: str
    """Text about the thing that was found, or that is needed."""


def peermem_path(host: Host) -> str | None:
    """Returns the first of `PEERMEM_PATHS` that exists, by which NCCL detects peer memory; None if there is none."""
    return next((path for path in PEERMEM_PATHS if host.files.state(path) == "present"), None)


def peermem_known(host: Host) -> bool:
    """Returns whether /sys/module is visible, so that a missing module path means that the module is not loaded."""
    return host.files.state("sys/module") == "present"


def driver_flavour(host: Host) -> str | None:
    """Returns the kind of NVIDIA's kernel module, `open` or `proprietary`; None if its version file cannot be read."""
    lines = host.files.find("proc/driver/nvidia/version", r"NVRM version:.*")
    if not lines:
        return None
    return "open" if "Open Kernel Module" in lines[0] else "proprietary"


def kernel_version(host: Host) -> tuple[int, int] | None:
    """Returns the running kernel's version as (major, minor), for example (5, 15); None if unknown."""
    text = host.facts.kernel or host.files.text("proc/sys/kernel/osrelease") or ""
    match = re.match(r"(\d{1,3})\.(\d{1,3})", text)
    return (int(match[1]), int(match[2])) if match else None


def dmabuf_chain(host: Host) -> tuple[DmabufCondition, ...]:
    """Checks every condition of dma-buf, and returns them in the order in which they are worth repairing.

    Source: NVIDIA GPU Operator documentation, GPUDirect RDMA, prerequisites; Linux 5.12 (RDMA dma-buf), rdma-core 34.
    """
    kernel, flavour = kernel_version(host), driver_flavour(host)
    supported = [host.gpu_facts(gpu.bus_id).dmabuf_supported for gpu in host.gpus]
    cuda = host.facts.cuda_version
    return (
        DmabufCondition(
            "kernel", None if kernel is None else kernel >= (5, 12), f"kernel {kernel}, 5.12 or later is needed"
        ),
        _kernel_option(host),
        DmabufCondition(
            "module", None if flavour is None else flavour == "open", f"{flavour or 'unknown'} kernel module"
        ),
        DmabufCondition(
            "CUDA", None if cuda is None else cuda >= 11070, f"driver for CUDA {cuda}, 11070 or later is needed"
        ),
        DmabufCondition("GPU", _all(supported), "attribute 124 (DMA_BUF_SUPPORTED)"),
        DmabufCondition("rdma-core", host.facts.verbs_dmabuf, "ibv_reg_dmabuf_mr in libibverbs (rdma-core 34)"),
    )


def _all(supported: list[bool | None]) -> bool | None:
    if False in supported:
        return False
    return True if supported and all(supported) else None


def _kernel_option(host: Host) -> DmabufCondition:
    """Checks CONFIG_PCI_P2PDMA in the kernel's configuration file; unknown if the distribution ships none."""
    release = host.facts.kernel or host.files.text("proc/sys/kernel/osrelease")
    found = host.files.find(f"boot/config-{release}", r"^CONFIG_PCI_P2PDMA=y$") if release else None
    return DmabufCondition("P2PDMA", None if found is None else bool(found), "CONFIG_PCI_P2PDMA=y in the kernel")


def chain_state(chain: tuple[DmabufCondition, ...]) -> bool | None:
    """Returns whether dma-buf can work: True if all conditions hold, False if one does not, None if one is unknown.

    An unknown kernel option (no configuration file) does not make the answer unknown.
    """
    if any(link.good is False for link in chain):
        return False
    return True if all(link.good for link in chain if link.name != "P2PDMA") else None
