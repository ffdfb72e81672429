"""Reads the GPUs from NVML: the facts that `nvidia-smi -q` and `nvidia-smi nvlink -s` print.

`read` returns an `NvmlReading`, the parts of a Machine that NVML knows: GPUs, NVLinks, NVSwitches. `gdr_facts` returns
further facts for the checks of GPUDirect RDMA: BAR1, links that are up, the fabric's state, MIG, confidential
computing. Without a driver both are empty and name the reason. NVML does not know network cards.
"""

import ctypes
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gradwire.topology.bandwidth import nvlink_bytes_per_second
from gradwire.topology.graph import DeviceLink, Gpu, NvSwitch, PcieLink
from gradwire.topology.pci_ids import NVIDIA
from gradwire.topology.readers.nvml_calls import (
    C2C_LINK_COUNT,
    C2C_MEGABYTES_PER_SECOND,
    NOT_INSTALLED,
    Library,
    NvmlCalls,
    start_nvml,
)

PCIE_GENERATIONS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
REMOTE_GPU, REMOTE_SWITCH = 0, 2
CLOCK_MEM = 2
"""nvmlIntNvLinkDeviceType_t."""
FABRIC_COMPLETED = 3
"""NVML_GPU_FABRIC_STATE_COMPLETED: the GPU is registered."""
P2P_SUPPORTED = 0
"""nvmlNvLinkCapability_t: the link carries traffic between GPUs."""
MAX_SLICES = 64
"""No GPU has more than 7 so far."""
HIDDEN = "fffffff"
"""How a far end begins that the driver does not show, in a virtual machine for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlReading:
    """Holds the GPUs and links that NVML reports, or the reason why there are none."""

    gpus: tuple[Gpu, ...] = ()
    links: tuple[DeviceLink, ...] = ()
    nvswitches: tuple[NvSwitch, ...] = ()
    c2c: Mapping[str, DeviceLink] = field(default_factory=dict)
    """GPU -> its chip-to-chip link, whose other end is the CPU above the GPU; the driver does not name that."""
    unresolved: int = 0
    """NVLinks that are up and do not say where they lead."""
    silent: int = 0
    """GPUs that the driver counts and that do not respond."""
    reason: str | None = None
    """Reason why there are no GPUs; None if there are."""


@dataclass(slots=True)
class _Bundles:
    """Counts the NVLinks of one GPU by the device they lead to."""

    ends: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """(far end, whether it is a switch) -> number of links."""
    unresolved: int = 0


def read(library: Library | None = None) -> NvmlReading:
    """Returns the GPUs of this host and the NVLinks between them.

    Args:
        library: Anything with pynvml's functions; the installed nvidia-ml-py by default.
    """
    nvml, problem = start_nvml(library)
    if nvml is None:
        missing = problem == NOT_INSTALLED
        return NvmlReading(
            reason=f"{problem} (pip install nvidia-ml-py)" if missing else f"NVML does not start: {problem}"
        )
    try:
        return _read(nvml)
    finally:
        nvml.call("nvmlShutdown")


def _read(nvml: NvmlCalls) -> NvmlReading:
    """Reads GPUs and links from a library that has started."""
    handles = nvml.handles()
    count = nvml.integer("nvmlDeviceGetCount") or 0
    gpus = {index: _gpu(nvml, handles, index) for index in handles}
    if not gpus:
        reason = f"none of the driver's {count} GPUs answers" if count else "the NVIDIA driver reports no GPU"
        return NvmlReading(reason=reason)
    known = frozenset(gpu.key for gpu in gpus.values())
    bundles = {gpu.key: _bundles(nvml, handles[index], gpu, known) for index, gpu in gpus.items()}
    coherent = [_c2c(nvml, handles[index], gpu) for index, gpu in gpus.items()]
    return NvmlReading(
        gpus=tuple(gpus.values()),
        links=_links(gpus.values(), bundles),
        nvswitches=tuple(NvSwitch(key=key) for key in _switches(bundles.values())),
        c2c={link.a: link for link in coherent if link is not None},
        unresolved=sum(bundle.unresolved for bundle in bundles.values()),
        silent=max(0, count - len(gpus)),
    )


def _identity(nvml: NvmlCalls, handle: object) -> tuple[str | None, str | None, int | None]:
    """Returns a GPU's bus id, its name and the bytes of its memory."""
    bus, _ = nvml.bus_id("nvmlDeviceGetPciInfo", handle)
    name = nvml.text("nvmlDeviceGetName", handle)
    return bus, name, nvml.number_in("total", "nvmlDeviceGetMemoryInfo", handle)


def _gpu(nvml: NvmlCalls, handles: Mapping[int, object], index: int) -> Gpu:
    """Returns the GPU with this number.

    Args:
        nvml: The started library.
        handles: Number of each GPU -> NVML's handle.
        index: Number of the GPU.
    """
    handle, states = handles[index], nvml.peer_states(handles, index)
    bus, name, memory_nbytes = _identity(nvml, handle)
    capability = nvml.call("nvmlDeviceGetCudaComputeCapability", handle)
    pair = capability if isinstance(capability, tuple | list) and len(capability) == 2 else None
    rate = PCIE_GENERATIONS.get(nvml.integer("nvmlDeviceGetMaxPcieLinkGeneration", handle) or 0)
    lanes = nvml.integer("nvmlDeviceGetCurrPcieLinkWidth", handle)
    return Gpu(
        key=bus or f"GPU{index}",
        bus=bus,
        index=index,
        name=name,
        vendor=NVIDIA,
        compute_capability=int(pair[0]) * 10 + int(pair[1]) if pair else None,
        memory_nbytes=memory_nbytes,
        memory_bytes_per_second=_memory_bytes_per_second(nvml, handle),
        pcie=PcieLink(gigatransfers_per_second=rate, lanes=lanes) if rate or lanes else None,
        peers=not any(states) if len(states) > 1 else None,
        uuid=nvml.text("nvmlDeviceGetUUID", handle),
        slices=_slices(nvml, handle),
        nvlink_domain=nvlink_domain(nvml, handle),
    )


def _memory_bytes_per_second(nvml: NvmlCalls, handle: object) -> float | None:
    """Returns the peak bandwidth of a GPU's memory: two transfers a cycle of the memory clock, over its whole bus.

    None if clock or width is unsupported or zero, as for GPUs that share the host's memory.
    """
    megahertz = nvml.integer("nvmlDeviceGetMaxClockInfo", handle, CLOCK_MEM)
    bits = nvml.integer("nvmlDeviceGetMemoryBusWidth", handle)
    return 2 * megahertz * 1e6 * bits / 8 if megahertz and bits else None


def nvlink_domain(nvml: NvmlCalls, handle: object) -> str | None:
    """Returns the NVLink domain of several hosts that a GPU has joined, as `cluster/clique`; None if it has not.

    Source: NCCL v2.30 src/mnnvl.cc (the state is COMPLETED, and the cluster's UUID is not all zeros: a host with
    NVSwitches of its own registers as well, without one).
    """
    info = _fabric_info(nvml, handle, "V") or _fabric_info(nvml, handle, "")
    cluster = bytes(getattr(info, "clusterUuid", b""))
    if info is None or getattr(info, "state", 0) != FABRIC_COMPLETED or getattr(info, "status", 0) or not any(cluster):
        return None
    return f"{cluster.hex()}/{int(getattr(info, 'cliqueId', 0))}"


def _slices(nvml: NvmlCalls, handle: object) -> tuple[str, ...]:
    """Returns the UUIDs of a GPU's MIG slices, as `nvidia-smi -L` lists them."""
    most = min(nvml.integer("nvmlDeviceGetMaxMigDeviceCount", handle) or 0, MAX_SLICES)
    handles = (nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index) for index in range(most))
    uuids = [nvml.text("nvmlDeviceGetUUID", each) for each in handles if each is not None]
    return tuple(uuid for uuid in uuids if uuid)


def _bundles(nvml: NvmlCalls, handle: object, gpu: Gpu, known: frozenset[str]) -> _Bundles:
    """Returns the NVLinks of a GPU that are up and carry traffic between GPUs, by where they lead.

    As in NCCL, a far end that the driver does not show is a switch. Where the driver shows it without its kind, one of
    this host's GPUs is a GPU; anything else stays unresolved.

    Source: NCCL v2.30 src/graph/xml.cc (which links count, what a far end that cannot be seen is taken for).
    """
    found = _Bundles()
    for link in range(nvml.max_nvlinks):
        if not nvml.link_is_active(handle, link):
            continue
        if nvml.integer("nvmlDeviceGetNvLinkCapability", handle, link, P2P_SUPPORTED) == 0:
            continue
        target, written = nvml.bus_id("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        kind = nvml.integer("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        if written.lower().startswith(HIDDEN):
            found.ends["hidden", True] += 1
        elif target is None or (kind is None and target not in known):
            found.unresolved += 1
        elif kind == REMOTE_SWITCH:
            found.ends[target, True] += 1
        elif kind in (REMOTE_GPU, None) and target != gpu.key:
            found.ends[target, False] += 1
    return found


def _links(gpus: Iterable[Gpu], bundles: Mapping[str, _Bundles]) -> tuple[DeviceLink, ...]:
    """Returns the bundles, one between two GPUs counted once."""
    links: dict[frozenset[str], DeviceLink] = {}
    for gpu in gpus:
        for (target, _), number in bundles[gpu.key].ends.items():
            rate = nvlink_bytes_per_second(gpu, number)
            link = DeviceLink(a=gpu.key, b=target, kind="nvlink", count=number, bytes_per_second=rate)
            links.setdefault(frozenset((gpu.key, target)), link)
    return tuple(links.values())


def _switches(bundles: Iterable[_Bundles]) -> list[str]:
    """Returns the switches that links lead to."""
    return sorted({target for bundle in bundles for target, is_switch in bundle.ends if is_switch})


def _c2c(nvml: NvmlCalls, handle: object, gpu: Gpu) -> DeviceLink | None:
    """Returns the chip-to-chip link between a GPU and its CPU (Grace), or None where there is none."""
    count = nvml.field(handle, C2C_LINK_COUNT)
    if not count:
        return None
    megabytes = nvml.field(handle, C2C_MEGABYTES_PER_SECOND)
    rate = None if megabytes is None else megabytes * 1e6 * count
    return DeviceLink(a=gpu.key, b="", kind="c2c", count=count, bytes_per_second=rate)


def gdr_facts(library: Library | None = None) -> dict[str, object]:
    """Collects NVML's facts for the GPUDirect-RDMA checks, named as the fields of gdr's HostFacts and GpuFacts.

    They are the driver version and, per GPU, its name, BAR1, memory, NVLinks, fabric and MIG state; only `nvml_error`
    if NVML does not start.

    Args:
        library: Anything with pynvml's functions; the installed nvidia-ml-py by default.
    """
    nvml, problem = start_nvml(library)
    if nvml is None:
        return {"nvml_error": problem}
    everywhere = _confidential(nvml)
    gpus = [_gpu_facts(nvml, handle) | everywhere for handle in nvml.handles().values()]
    version = nvml.text("nvmlSystemGetDriverVersion")
    return {"driver_version": version, "gpus": [gpu for gpu in gpus if gpu.get("bus_id")]}


def _gpu_facts(nvml: NvmlCalls, handle: object) -> dict[str, object]:
    """Returns the facts of one GPU that are known: old drivers and virtual GPUs refuse some."""
    bus, name, memory_nbytes = _identity(nvml, handle)
    links = [active for link in range(nvml.max_nvlinks) if (active := nvml.link_is_active(handle, link)) is not None]
    c2c = nvml.field(handle, C2C_LINK_COUNT)
    facts: dict[str, object] = {
        "bus_id": bus,
        "name": name,
        "bar1_nbytes": nvml.number_in("bar1Total", "nvmlDeviceGetBAR1MemoryInfo", handle),
        "memory_nbytes": memory_nbytes,
        "nvlinks": len(links),
        "nvlinks_active": sum(links),
        "mig": _mig(nvml, handle),
        "c2c": None if c2c is None else c2c > 0,
    }
    facts |= _fabric(nvml, handle, "V") or _fabric(nvml, handle, "")
    return {name: value for name, value in facts.items() if value is not None}


def _mig(nvml: NvmlCalls, handle: object) -> bool | None:
    """Returns whether MIG is on; a GPU that has no MIG has it off. Source: nvml.h, NVML_DEVICE_MIG_ENABLE."""
    modes = nvml.call("nvmlDeviceGetMigMode", handle)  # current, pending
    if isinstance(modes, list | tuple) and modes:
        return bool(modes[0] == 1)
    return False if nvml.lacks("nvmlDeviceGetMigMode", handle) else None


def _confidential(nvml: NvmlCalls) -> dict[str, object]:
    """Returns whether confidential computing is on: one fact for all GPUs, as NVML reports it for the system.

    Source: nvml.h, nvmlConfComputeSystemState_t.
    """
    feature = nvml.number_in("ccFeature", "nvmlSystemGetConfComputeState")
    return {} if feature is None else {"confidential": bool(feature)}


def _fabric_info(nvml: NvmlCalls, handle: object, suffix: str) -> ctypes.Structure | None:
    """Returns NVML's structure about a GPU's fabric registration; None if the driver does not know the call.

    Args:
        nvml: The started library.
        handle: NVML's handle of the GPU.
        suffix: `V` for the versioned call, empty for the one that is deprecated from CUDA 13 on.
    """
    info = nvml.call(f"c_nvmlGpuFabricInfo{suffix}_t")
    if not isinstance(info, ctypes.Structure):
        return None
    failed = nvml.error_of(f"nvmlDeviceGetGpuFabricInfo{suffix}", handle, ctypes.byref(info)) is not None
    return None if failed else info


def _fabric(nvml: NvmlCalls, handle: object, suffix: str) -> dict[str, object]:
    """Returns the facts `fabric_state` and `fabric_status` of a GPU; no facts if the driver does not know the call.

    Args:
        nvml: The started library.
        handle: NVML's handle of the GPU.
        suffix: `V` for the versioned call, empty for the one that is deprecated from CUDA 13 on.
    """
    info = _fabric_info(nvml, handle, suffix)
    state, status = getattr(info, "state", None), getattr(info, "status", None)
    return {} if state is None else {"fabric_state": int(state), "fabric_status": int(status or 0)}
