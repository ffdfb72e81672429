"""Stage 3, the glue: the mechanism by which the NIC's driver reaches the GPU's memory, peer memory or dma-buf."""

import re

from gradwire.topology.gdr.glue import (
    PEERMEM_PATHS,
    chain_state,
    dmabuf_chain,
    no_gpu_has_gdr,
    peermem_known,
    peermem_path,
)
from gradwire.topology.gdr.host import Host
from gradwire.topology.gdr.model import Finding, GdrCheck, Verdict, failed, informed, passed, unknown, warned
from gradwire.topology.gdr.nccl import DMABUF_SINCE, MODULE_PATH_SINCE

_NO_GDR = "no GPU here has GPUDirect RDMA (G2): there is nothing to load"
_PINS = "{} asks the GPU's driver for its memory itself: neither peer memory nor verbs with dma-buf are needed"
_SYMBOLS = re.compile(r"(disagrees about version of|[Uu]nknown) symbol (\w*peer_memory\w*)")


def _pinning(host: Host) -> str:
    """Returns the modules of the NICs if all of them ask the GPU's driver for its memory themselves; else empty."""
    families = [nic.family for nic in host.nics]
    return ", ".join({family.module: "" for family in families if family and family.pins}) * all(
        family is not None and family.pins for family in families
    )


def some_mechanism(host: Host) -> Finding:
    """Checks that a NIC can register GPU memory: by peer memory, by dma-buf, or by a driver that asks the GPU's itself.

    Command: `ls /sys/kernel/mm/memory_peers/ /sys/module/nvidia_peermem; gradwire gdr-check --prove`
    Source: NCCL src/transport/net_ib/gdr.cc (ncclIbGdrSupport, ncclIbDmaBufSupport).
    """
    peermem, chain = peermem_path(host), dmabuf_chain(host)
    if no_gpu_has_gdr(host):
        return informed(_NO_GDR)
    if modules := _pinning(host):
        return passed(_PINS.format(modules))
    if peermem:
        return passed(f"peer memory: /{peermem}")
    state = chain_state(chain)
    if state:
        return passed("dma-buf: every link of the chain holds")
    if state is False and peermem_known(host):
        broken = next(link for link in chain if link.good is False)
        return failed(f"no peer memory, and dma-buf breaks at {broken.name}: {broken.text}", "see M2 and M3")
    return unknown("no peer memory seen; dma-buf not known to the end", "run as root on the live host, or --prove")


def peermem_quality(host: Host) -> Finding:
    """Checks nvidia_peermem: says why it is missing, or whether an old module for the same purpose is loaded as well.

    Command: `modprobe nvidia_peermem; dmesg | grep -i peer_mem; lsmod | grep peer`
    Source: NVIDIA open-gpu-kernel-modules kernel-open/nvidia-peermem; gpu-operator issue 2868.
    """
    log = host.facts.kernel_log
    if no_gpu_has_gdr(host):
        return informed(_NO_GDR)
    if modules := _pinning(host):
        return informed(_PINS.format(modules))
    symbol = next((match for line in log or () if (match := _SYMBOLS.search(line))), None)
    legacy = host.files.state("sys/module/nv_peer_mem") == "present"
    if host.files.state("sys/module/nvidia_peermem") == "present" and not legacy:
        return passed("nvidia_peermem is loaded")
    if legacy:
        return warned("legacy nv_peer_mem is loaded", "remove it, load nvidia_peermem of the driver's own version")
    state = chain_state(dmabuf_chain(host))
    if state:
        return informed("not loaded, and not needed: dma-buf works")
    if symbol:
        found = f"kernel log: {symbol[0]}"
        return failed(found, "install DOCA/OFED first, then rebuild the driver; or the open module with dma-buf")
    if state is None or not peermem_known(host):
        found = "not seen; whether it is needed depends on dma-buf, which is not known"
        return unknown(found, "modprobe nvidia_peermem; dmesg | grep peer")
    fix = "modprobe nvidia_peermem (needs DOCA/OFED's ib_core); at boot: /etc/modules-load.d"
    return failed("nvidia_peermem is not loaded", fix)


def dmabuf_quality(host: Host) -> Finding:
    """Checks every part that dma-buf needs, and names those that lack; only a note if peer memory works.

    The finding names every broken link, in the order of the chain. It fails only where peer memory does not serve in
    the place of dma-buf; where peer memory serves, broken links are a note.
    Command: `uname -r; grep P2PDMA /boot/config-$(uname -r); modinfo -F license nvidia; ibv_devinfo --version`
    Source: NVIDIA GPU Operator documentation, GPUDirect RDMA; siderolabs/pkgs issue 1356.
    """
    chain = dmabuf_chain(host)
    if no_gpu_has_gdr(host):
        return informed(_NO_GDR)
    if modules := _pinning(host):
        return informed(_PINS.format(modules))
    broken = [f"{link.name} ({link.text})" for link in chain if link.good is False]
    missing = [link.name for link in chain if link.good is None]
    if broken and peermem_path(host):
        return informed(f"broken at {', '.join(broken)}; peer memory serves instead")
    if broken and peermem_known(host):
        return failed(f"broken at {', '.join(broken)}", "Linux 5.12, nvidia-open, CUDA 11.7, rdma-core 34 or later")
    if chain_state(chain):
        return passed("kernel, module, CUDA, GPU and rdma-core all support it")
    return unknown(f"not known: {', '.join(missing)}", "run on the live host with the driver's libraries")


def nccl_and_mechanism(host: Host) -> Finding:
    """Checks that the NCCL release supports the mechanism that is there: peer memory or dma-buf.

    Command: `python -c "import torch; print(torch.cuda.nccl.version())"`
    Source: NCCL tags v2.13.4-1 (dma-buf), v2.23.4-1 (/sys/module/nvidia_peermem), v2.26, v2.27 (C2C default).
    """
    version, peermem = host.nccl_version, peermem_path(host)
    if no_gpu_has_gdr(host):
        return informed(_NO_GDR)
    if modules := _pinning(host):
        return informed(f"NCCL's plug-in registers memory, through {modules}: NCCL's release does not matter")
    if version is None:
        if peermem in PEERMEM_PATHS[:2]:
            return passed(f"version not known, but every release looks at /{peermem}")
        why = f": libnccl {host.facts.nccl_error}" if host.facts.nccl_error else ""
        return unknown(f"NCCL version not known{why}", "give --nccl-version or --nccl-log")
    shown = f"NCCL {'.'.join(map(str, version))}"
    if version[:2] == (2, 26) and any(host.gpu_facts(gpu.bus_id).c2c for gpu in host.gpus):
        return warned(f"{shown} leaves GDR over C2C off", "NCCL_NET_GDR_C2C=1, or NCCL 2.27")
    if peermem in PEERMEM_PATHS[:2] or (peermem and version >= MODULE_PATH_SINCE):
        return passed(f"{shown} looks at /{peermem}")
    dmabuf = version >= DMABUF_SINCE and chain_state(dmabuf_chain(host))
    blind = f"does not look at /{peermem}" if peermem else "finds no peer memory"
    if dmabuf is False:
        return failed(f"{shown} {blind} and cannot use dma-buf", "NCCL 2.13 for dma-buf, 2.23.4 for this module's path")
    return passed(f"{shown} uses dma-buf") if dmabuf else unknown(f"{shown} {blind}; dma-buf not known", "see M3")


def stack_level(host: Host) -> Finding:
    """Checks that the kernel and user-space parts of OFED are of one release.

    Command: `ofed_info -s; cat /sys/module/mlx5_core/version; cat /sys/class/infiniband/*/fw_ver`
    Source: NVIDIA DOCA-Host release notes, upgrade section.
    """
    module = host.files.text("sys/module/mlx5_core/version")
    user = host.facts.ofed_version
    firmware = sorted({device.firmware for device in host.rdma_devices or () if device.firmware})
    numbers = [match[0] if (match := re.search(r"\d{1,2}\.\d{1,2}", text or "")) else None for text in (module, user)]
    if all(numbers) and numbers[0] != numbers[1]:
        return warned(f"kernel mlx5_core {module}, user space {user}", "install both halves from one release, reboot")
    if module or user or firmware:
        return passed(
            f"mlx5_core {module or 'inbox'}, OFED {user or 'none'}, firmware {', '.join(firmware) or 'unknown'}"
        )
    return unknown("neither driver version nor firmware can be read")


def gdrcopy(host: Host) -> Finding:
    """Checks for GDRCopy, which is optional: NCCL leaves it off, UCX and the EFA provider use it for small messages.

    Command: `ls -l /dev/gdrdrv; lsmod | grep gdrdrv`
    Source: NVIDIA gdrcopy README.
    """
    module, node = host.files.state("sys/module/gdrdrv"), host.files.state("dev/gdrdrv")
    if not peermem_known(host):
        return unknown("/sys/module cannot be seen")
    if module == "present" and node != "present":
        return warned("gdrdrv is loaded, /dev/gdrdrv is missing", "docker --device=/dev/gdrdrv")
    return passed("gdrdrv is loaded") if module == "present" else informed("not installed (optional)")


_LIBRARY_FOLDERS = (
    "opt/amazon/ofi-nccl/lib",
    "opt/amazon/ofi-nccl/lib64",
    "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    "opt/aws-ofi-nccl/lib",
    "usr/local/lib",
    "usr/local/lib64",
    "usr/lib",
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib/x86_64-linux-gnu",
    "lib64",
)
"""Where the EFA installer, distributions and `make install` put libnccl-net.so. Source: Amazon EC2 user guide, Get
started with EFA and NCCL; aws-ofi-nccl README."""


def plugin_below(host: Host) -> bool | None:
    """Returns whether a network plug-in of NCCL lies in a library folder below the host's root (`--root`, a capture).

    Args:
        host: The machine as it was read.

    Returns:
        None if no folder of libraries can be listed, so that the answer is unknown.
    """
    variable = host.setting("LD_LIBRARY_PATH") or ""
    folders = [*(path.lstrip("/") for path in variable.split(":") if path), *_LIBRARY_FOLDERS]
    listed = [names for folder in folders if (names := host.files.names(folder)) is not None]
    if any(name.startswith(("libnccl-net", "libaws-ofi-nccl")) and ".so" in name for names in listed for name in names):
        return True
    return False if listed else None


def vendor_path(host: Host) -> Finding:
    """Checks that EFA, Slingshot and Omni-Path have their plugin for NCCL; without it NCCL uses sockets, or slow verbs.

    Command: `ldconfig -p | grep libnccl-net; cat /sys/class/infiniband/*/device/p2p; fi_info -c FI_HMEM`
    Source: aws-ofi-nccl README and issue 889; libfabric fi_efa(7), fi_cxi(7), fi_opx(7).
    """
    special = [nic for nic in host.nics if nic.plugin is not None]
    wanted = next((nic.plugin for nic in special), None)
    if wanted is None:
        return passed("verbs NICs need no plugin") if host.nics else unknown("no NIC to look at")
    names = ", ".join(nic.name for nic in special[:4])
    plugin = host.facts.nccl_plugin if host.facts.nccl_plugin is not None else plugin_below(host)
    if plugin is False:
        return failed(
            f"{names}: libnccl-net.so is not found, NCCL would use {wanted.without}", f"install {wanted.name}"
        )
    providers = {nic.name: host.files.text(f"sys/class/infiniband/{nic.name}/device/p2p") for nic in special}
    if "NA" in providers.values():
        return warned(
            "EFA driver has no peer-to-peer provider", "efa driver 1.12.1 or later after the NVIDIA driver, or dma-buf"
        )
    return passed(f"{names}: plugin found") if plugin else unknown(f"{names}: plugin not looked for")


CHECKS = (
    GdrCheck("M1", "a way to register GPU memory", some_mechanism, Verdict.CONFIGURED, ("G1", "R1")),
    GdrCheck("M2", "peer memory", peermem_quality, None, ("G1", "R1")),
    GdrCheck("M3", "dma-buf chain", dmabuf_quality, None, ("G1", "R1")),
    GdrCheck("M4", "NCCL knows the way", nccl_and_mechanism, Verdict.CONFIGURED, ("M1",)),
    GdrCheck("M5", "driver and firmware levels", stack_level, None, ("R1",)),
    GdrCheck("M6", "GDRCopy", gdrcopy, None, ()),
    GdrCheck("M7", "vendor plugin", vendor_path, Verdict.CONFIGURED, ("R1",)),
)
