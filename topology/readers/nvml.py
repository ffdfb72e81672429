"""GPUs, NVLink and NVSwitch through NVIDIA's management library; `nvidia-smi -q` and `nvidia-smi nvlink -s` in one.

The library is asked, never trusted to be there: without a driver the reading is empty and says why. NVML knows no
network cards.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gradwire.topology.bandwidth import nvlink_bytes_per_second
from gradwire.topology.graph import Gpu, Link, NvSwitch, PcieLink
from gradwire.topology.pci_ids import NVIDIA
from gradwire.topology.readers.nvml_calls import C2C_LINK_COUNT, C2C_MEGABYTES_PER_SECOND, Library, NvmlCalls

PCIE_GENERATIONS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
REMOTE_GPU, REMOTE_SWITCH = 0, 2
"""nvmlIntNvLinkDeviceType_t."""
P2P_SUPPORTED = 0
"""nvmlNvLinkCapability_t: the link carries traffic between GPUs."""
HIDDEN = "fffffff"
"""How a far end begins that the driver does not show, in a virtual machine for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlReading:
    """What the library told, or why it told nothing."""

    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    nvswitches: tuple[NvSwitch, ...] = ()
    c2c: Mapping[str, Link] = field(default_factory=dict)
    """GPU -> its chip-to-chip link, whose other end is the CPU above the GPU; the driver does not name that."""
    unresolved: int = 0
    """NVLinks that are up and do not say where they lead."""
    silent: int = 0
    """GPUs that the driver counts and that do not answer."""
    reason: str | None = None
    """Why there are no GPUs in it; None where there are."""


@dataclass(slots=True)
class _Bundles:
    """The NVLinks of one GPU, by what they lead to."""

    ends: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """(far end, whether it is a switch) -> number of links."""
    unresolved: int = 0


def read(library: Library | None = None) -> NvmlReading:
    """Returns the GPUs of this host and the NVLinks between them.

    Args:
        library: Anything with pynvml's functions; the installed nvidia-ml-py by default.
    """
    if library is None:
        try:
            import pynvml  # the driver is optional, and so is this
        except ImportError:
            return NvmlReading(reason="nvidia-ml-py is not installed (pip install nvidia-ml-py)")
        library = pynvml
    nvml = NvmlCalls(library)
    started = nvml.error_of("nvmlInit")
    if started is not None:
        return NvmlReading(reason=f"NVML does not start: {started}")
    try:
        return _read(nvml)
    finally:
        nvml.call("nvmlShutdown")


def _read(nvml: NvmlCalls) -> NvmlReading:
    """Returns the reading of a library that has started."""
    handles = nvml.handles()
    count = nvml.integer("nvmlDeviceGetCount") or 0
    gpus = {index: _gpu(nvml, handle, index) for index, handle in handles.items()}
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


def _gpu(nvml: NvmlCalls, handle: object, index: int) -> Gpu:
    """Returns one GPU."""
    bus, _ = nvml.bus_id("nvmlDeviceGetPciInfo", handle)
    capability = nvml.call("nvmlDeviceGetCudaComputeCapability", handle)
    pair = capability if isinstance(capability, tuple | list) and len(capability) == 2 else None
    rate = PCIE_GENERATIONS.get(nvml.integer("nvmlDeviceGetMaxPcieLinkGeneration", handle) or 0)
    lanes = nvml.integer("nvmlDeviceGetCurrPcieLinkWidth", handle)
    return Gpu(
        key=bus or f"GPU{index}",
        bus=bus,
        index=index,
        name=nvml.text("nvmlDeviceGetName", handle),
        vendor=NVIDIA,
        compute_capability=int(pair[0]) * 10 + int(pair[1]) if pair else None,
        memory_nbytes=nvml.number_in("total", "nvmlDeviceGetMemoryInfo", handle),
        pcie=PcieLink(gigatransfers_per_second=rate, lanes=lanes) if rate or lanes else None,
    )


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


def _links(gpus: Iterable[Gpu], bundles: Mapping[str, _Bundles]) -> tuple[Link, ...]:
    """Returns the bundles, one between two GPUs counted once."""
    links: dict[frozenset[str], Link] = {}
    for gpu in gpus:
        for (target, _), number in bundles[gpu.key].ends.items():
            rate = nvlink_bytes_per_second(gpu, number)
            link = Link(a=gpu.key, b=target, kind="nvlink", count=number, bytes_per_second=rate)
            links.setdefault(frozenset((gpu.key, target)), link)
    return tuple(links.values())


def _switches(bundles: Iterable[_Bundles]) -> list[str]:
    """Returns the switches that links lead to."""
    return sorted({target for bundle in bundles for target, is_switch in bundle.ends if is_switch})


def _c2c(nvml: NvmlCalls, handle: object, gpu: Gpu) -> Link | None:
    """Returns the chip-to-chip link between a GPU and its CPU (Grace), or None where there is none."""
    count = nvml.field(handle, C2C_LINK_COUNT)
    if not count:
        return None
    megabytes = nvml.field(handle, C2C_MEGABYTES_PER_SECOND)
    rate = None if megabytes is None else megabytes * 1e6 * count
    return Link(a=gpu.key, b="", kind="c2c", count=count, bytes_per_second=rate)
