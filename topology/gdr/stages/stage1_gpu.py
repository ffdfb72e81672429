"""Stage 1, the GPU: driver, its flavour, BAR1, links, fabric."""

import re

from gradwire.topology.gdr.glue import driver_flavour, gpu_has_gdr, no_gpu_has_gdr, peermem_known, peermem_path
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
from gradwire.topology.pci_ids import NVIDIA

_BAR1_FLOOR_NBYTES = 1 << 30  # 256 MiB is the size without Above-4G decoding; a judgement, no vendor publishes a limit


def driver_loaded(host: Host) -> Finding:
    """Checks that NVIDIA's kernel module is loaded, in the same version as the user-space library.

    Command: `cat /proc/driver/nvidia/version; nvidia-smi`
    Source: NVML API reference, nvmlInit_v2 (NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIB_RM_VERSION_MISMATCH).
    """
    lines = host.files.find("proc/driver/nvidia/version", r"NVRM version:.*")
    nvml = host.facts.nvml_error or ""
    if "mismatch" in nvml.lower():
        return failed(f"driver and library differ: {nvml}", "reboot, or reload the nvidia modules")
    if nvml.startswith(("crashed", "no answer")):
        return failed(f"NVML {nvml}: the driver is broken", "nvidia-smi; dmesg | grep -iE 'NVRM|Xid'; reboot")
    if lines:
        version = re.search(r"\d{3}\.\d+(\.\d+)?", lines[0])
        return passed(f"driver {version[0] if version else 'of unknown version'}")
    if any(gpu.driver == "nvidia" for gpu in host.gpus) or host.files.state("proc/self/status") != "present":
        return unknown("/proc/driver/nvidia/version cannot be read", "mount /proc")
    drivers = {gpu.driver or "none" for gpu in host.gpus}
    return failed(
        f"nvidia module not loaded (driver in use: {', '.join(sorted(drivers))})", "install the driver, reboot"
    )


def gpu_can_register(host: Host) -> Finding:
    """Checks that the GPU claims to support GDR; that is no proof (an L4 does, and EFA cannot register its memory).

    If libcuda was not asked, the GPU's name or device id decides.

    Command: `python -c "cuDeviceGetAttribute(116)"` (CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)
    Source: CUDA driver API; GPUDirect RDMA guide, section 1.1 (Tesla and Quadro class).
    """

    def judge(gpu: str, nic: str) -> Finding:
        del nic
        has, why = gpu_has_gdr(host, gpu)
        outcomes = {True: CheckOutcome.PASS, False: CheckOutcome.FAIL, None: CheckOutcome.UNKNOWN}
        return Finding(outcomes[has], why)

    if no_gpu_has_gdr(host):
        fix = "none: this GPU's memory cannot be registered with a NIC, by no module and no variable; NCCL stages it"
        return judge_pairs(host, judge, fix)
    return judge_pairs(
        host, judge, "use a data-centre or professional GPU; where unknown, run with the driver's libraries"
    )


def module_flavour(host: Host) -> Finding:
    """Checks whether the kernel modules are open ones, which can export dma-buf; proprietary ones need nvidia-peermem.

    Fails for proprietary modules if peer memory is known to be missing.

    Command: `modinfo -F license nvidia` (Dual MIT/GPL is open)
    Source: NVIDIA GPU Operator documentation, GPUDirect RDMA; open-gpu-kernel-modules kernel-open/nvidia/nv.c.
    """
    flavour = driver_flavour(host)
    if no_gpu_has_gdr(host):
        return informed("no GPU here has GPUDirect RDMA (G2): either flavour will do")
    if flavour is None:
        return unknown("the driver does not say which flavour it is", "modinfo -F license nvidia")
    if flavour == "open":
        return passed("open kernel module: dma-buf is possible")
    if peermem_path(host):
        return informed("proprietary kernel module: no dma-buf, peer memory serves instead")
    if not peermem_known(host):
        return unknown("proprietary kernel module; whether peer memory is loaded cannot be seen", "lsmod | grep peer")
    return failed("proprietary kernel module without nvidia_peermem", "install nvidia-open, or load nvidia_peermem")


def gpu_dmabuf(host: Host) -> Finding:
    """Checks that the GPU can export its memory as dma-buf, with CUDA 11.7 or later; not needed with peer memory.

    Command: `python -c "cuDeviceGetAttribute(124)"` (CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)
    Source: NCCL src/misc/cudawrap.cc and src/transport/net_ib (dmaBufSupported).
    """
    if no_gpu_has_gdr(host):
        return informed("no GPU here has GPUDirect RDMA (G2)")
    exported = [host.gpu_facts(gpu.bus_id).dmabuf_supported for gpu in host.gpus]
    version = host.facts.cuda_version
    if version is not None and version >= 11070 and exported and all(exported):
        return passed(f"every GPU exports dma-buf, CUDA {version // 1000}.{version % 1000 // 10}")
    if peermem_path(host):
        return informed("not needed: peer memory is loaded")
    if False in exported or (version is not None and version < 11070):
        return failed("a GPU or its driver cannot export dma-buf", "driver for CUDA 11.7 or later, open kernel module")
    why = f"libcuda: {host.facts.cuda_error}" if host.facts.cuda_error else "libcuda was not asked"
    return unknown(why, "run where libcuda.so.1 is installed and starts")


def bar1(host: Host) -> Finding:
    """Checks the size of BAR1, through which a NIC sees GPU memory; 256 MiB means firmware without large BARs.

    Warns below 1 GiB, or below the GPU's memory if that is smaller.

    Command: `nvidia-smi -q -d MEMORY | grep -A3 BAR1; lspci -vs BDF | grep Region`
    Source: GPUDirect RDMA guide, section 2.5; the threshold is a judgement.
    """
    small, known = [], 0
    for gpu in host.gpus:
        facts = host.gpu_facts(gpu.bus_id)
        nbytes = facts.bar1_nbytes or max(gpu.bar_nbytes, default=0)
        known += bool(nbytes)
        if nbytes and nbytes < min(_BAR1_FLOOR_NBYTES, facts.memory_nbytes or _BAR1_FLOOR_NBYTES):
            small.append(f"{gpu.bus_id} {nbytes >> 20} MiB")
    if small:
        return warned(
            f"small BAR1: {', '.join(small)}", "firmware: Above 4G Decoding, Resizable BAR; vSphere: use64bitMMIO"
        )
    return passed(f"{known} GPUs, all large") if known and known == len(host.gpus) else unknown("BAR sizes unreadable")


def gpu_link(host: Host) -> Finding:
    """Checks that the GPU's PCIe link is as wide as card and port allow; an idle GPU may lower its speed.

    Command: `nvidia-smi --query-gpu=pcie.link.width.current,pcie.link.width.max --format=csv`
    Source: Linux Documentation/ABI/testing/sysfs-bus-pci (current_link_width).
    """
    if host.process.virtual:
        return informed("virtual machine: link speed and width mean nothing")
    widths = [(gpu.bus_id, gpu.current_width, _most_lanes(host, gpu.bus_id)) for gpu in host.gpus]
    narrow = [f"{bus_id} x{now} of x{most}" for bus_id, now, most in widths if now and most and now < most]
    if narrow:
        return warned(f"narrow link: {', '.join(narrow)}", "reseat the card; look at the slot and the firmware")
    if not widths or any(not now or not most for _, now, most in widths):
        return unknown("link width cannot be read")
    return passed(f"all GPUs x{', x'.join(sorted({str(now) for _, now, _ in widths}))}")


def _most_lanes(host: Host, bus_id: str) -> int | None:
    """Returns the most lanes that a function and the port above it both have."""
    function = host.tree.functions[bus_id]
    port = host.tree.functions.get((function.parents or ("",))[0]) if function.parents else None
    widths = [width for width in (function.max_width, port.max_width if port else None) if width]
    return min(widths, default=None)


def nvlink(host: Host) -> Finding:
    """Checks that all NVLinks are up, and that every GPU has the same number of them.

    PCIe cards without an NVLink bridge are left out. An output given with --nvlink counts instead of what the driver
    says here.

    Command: `nvidia-smi nvlink --status`
    Source: NVML API reference, nvmlDeviceGetNvLinkState.
    """
    facts = [host.gpu_facts(gpu.bus_id) for gpu in host.gpus]
    active = {f.bus_id: f.nvlinks_active for f in facts if f.nvlinks_active is not None}
    if host.nvlinks is not None:  # what was given counts, not what the driver says here
        active = {f"GPU {index}": count for index, count in host.nvlinks.items()}
    if not active:
        return unknown(
            "neither NVML nor a status file says", "give the output of nvidia-smi nvlink --status with --nvlink"
        )
    bridgeless = {f.bus_id for f in facts if not f.nvlinks_active and (f.nvlinks == 0 or "PCIe" in (f.name or ""))}
    wanted = {f.bus_id: f.nvlinks or 0 for f in facts}
    most = {name: max(wanted.get(name, 0), *active.values()) for name in active}
    down = [
        f"{name} has {count} of {most[name]}" if most[name] else f"{name} has none active"
        for name, count in active.items()
        if name not in bridgeless and (count == 0 or count < most[name])
    ]
    if down:
        return warned(f"NVLinks missing: {', '.join(down)}", "look at the fabric manager and dmesg (Xid 74); reseat")
    if not any(active.values()):
        return informed("PCIe cards without an NVLink bridge")
    count = len(active) - len(bridgeless)
    each = f"each of {count} GPUs" if count != 1 else "the GPU"
    return passed(f"{max(active.values())} NVLinks active on {each}")


def fabric_manager(host: Host) -> Finding:
    """Checks that the fabric manager has finished: with NVSwitches CUDA works only after that (else error 802).

    Command: `systemctl is-active nvidia-fabricmanager; nvidia-smi -q | grep -A4 Fabric`
    Source: NVIDIA Fabric Manager user guide; NVML API reference, nvmlDeviceGetGpuFabricInfoV.
    """
    switches = [function for function in host.tree.of_class(0x06) if function.vendor == NVIDIA]
    states = [(f.fabric_state, f.fabric_status) for f in map(host.gpu_facts, (gpu.bus_id for gpu in host.gpus))]
    known = [state for state in states if state[0] not in (None, 0)]
    fix = "systemctl enable --now nvidia-fabricmanager, of the driver's own version"
    if switches and "(802)" in (host.facts.cuda_error or ""):
        return failed(f"CUDA does not start: {host.facts.cuda_error}", fix)
    if any(state[0] != 3 or state[1] not in (None, 0) for state in known):
        return failed(f"GPU fabric not ready: states {sorted({str(s[0]) for s in known})}", fix)
    if (
        host.facts.fabric_manager_active is False
        and switches
        and not host.process.virtual
        and not host.process.container
    ):
        return failed("nvidia-fabricmanager is not active", fix)
    versions = {host.facts.fabric_manager_version, host.facts.driver_version} - {None}
    if switches and host.facts.fabric_manager_version and len(versions) == 2:
        return failed("fabric manager and driver differ in version", fix)
    if known or (switches and host.facts.fabric_manager_active):
        return passed("GPU fabric ready")
    if switches or not host.tree.functions:
        return unknown("NVSwitches are there, their fabric's state is not known from here", "nvidia-smi -q on the host")
    return passed("no NVSwitch on the bus")


def mig_and_confidential(host: Host) -> Finding:
    """Checks for MIG and confidential computing, which restrict what NCCL and a NIC may do.

    Command: `nvidia-smi --query-gpu=mig.mode.current --format=csv; nvidia-smi conf-compute -f`
    Source: NVIDIA MIG user guide, section Application considerations.
    """
    facts = [host.gpu_facts(gpu.bus_id) for gpu in host.gpus]
    if any(f.mig for f in facts):
        return warned("MIG is on: NCCL uses at most one slice a GPU", "nvidia-smi -mig 0 for training across nodes")
    if any(f.confidential for f in facts):
        return warned("confidential computing is on: GPU memory is encrypted on the bus", "expect host staging")
    return passed("off") if facts and all(f.mig is not None for f in facts) else unknown("NVML was not asked")


CHECKS = (
    GdrCheck("G1", "NVIDIA driver", driver_loaded, Verdict.CONFIGURED, ("E1",)),
    GdrCheck("G2", "GPU supports GDR", gpu_can_register, Verdict.POSSIBLE, ("E1",)),
    GdrCheck("G3", "kernel module flavour", module_flavour, Verdict.CONFIGURED, ("G1",)),
    GdrCheck("G4", "dma-buf on the GPU", gpu_dmabuf, Verdict.CONFIGURED, ("G1",)),
    GdrCheck("G5", "BAR1 size", bar1, None, ("E1",)),
    GdrCheck("G6", "PCIe link of the GPU", gpu_link, None, ("E1",)),
    GdrCheck("G7", "NVLink", nvlink, None, ("G1",)),
    GdrCheck("G8", "fabric manager", fabric_manager, None, ("G1",)),
    GdrCheck("G9", "MIG and confidential mode", mig_and_confidential, None, ("G1",)),
)
