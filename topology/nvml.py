"""GPUs, NVLink and NVSwitch through NVIDIA's management library; `nvidia-smi -q` and `nvidia-smi nvlink -s` in one.

The library is asked, never trusted to be there: without a driver the reading is empty and says why. NVML knows no
network cards.

Source: nvml.h of CUDA 13 (field identifiers, device types of a link's far end).
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

from gradwire.topology.bandwidth import nvlink_bytes_per_second
from gradwire.topology.graph import Gpu, Link, NvSwitch, PcieLink
from gradwire.topology.pci_ids import normal_bus_id

MAX_GPUS = 64
MAX_NVLINKS = 18
C2C_LINK_COUNT, C2C_MEGABYTES_PER_SECOND = 170, 172
"""Fields of nvmlDeviceGetFieldValues; the second is the rate of one active link."""
PCIE_GENERATIONS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
REMOTE_GPU, REMOTE_SWITCH = 0, 2
"""nvmlIntNvLinkDeviceType_t."""

Library = ModuleType | SimpleNamespace


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlReading:
    """What the library told, or why it told nothing."""

    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    nvswitches: tuple[NvSwitch, ...] = ()
    c2c: Mapping[str, Link] = field(default_factory=dict)
    """GPU -> its chip-to-chip link, whose other end is the CPU above the GPU; the driver does not name that."""
    reason: str | None = None
    """Why there are no GPUs in it; None where there are."""


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
    nvml = _Nvml(library)
    started = nvml.error_of("nvmlInit")
    if started is not None:
        return NvmlReading(reason=f"NVML does not start: {started}")
    try:
        return _read(nvml)
    finally:
        nvml.call("nvmlShutdown")


class _Nvml:
    """Calls by name; a function that is missing or fails gives None."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._error: type[Exception] = getattr(library, "NVMLError", RuntimeError)

    def _function(self, name: str) -> Callable[..., object]:
        found: Callable[..., object] = getattr(self._library, name)
        return found

    def call(self, name: str, *arguments: object) -> object | None:
        """Returns the result, or None."""
        try:
            return self._function(name)(*arguments)
        except (self._error, AttributeError, TypeError, ValueError, OSError):
            return None

    def error_of(self, name: str) -> str | None:
        """Calls a function and returns what it failed with, or None."""
        try:
            self._function(name)()
        except (self._error, AttributeError, OSError) as error:
            return str(error) or type(error).__name__
        return None

    def integer(self, name: str, *arguments: object) -> int | None:
        """Returns a result that is an integer."""
        found = self.call(name, *arguments)
        return found if isinstance(found, int) else None


def _text(found: object) -> str | None:
    """Returns a name, which old versions of the library give as bytes."""
    if isinstance(found, bytes):
        return found.decode("utf-8", "replace")
    return found if isinstance(found, str) else None


def _read(nvml: _Nvml) -> NvmlReading:
    """Returns the reading of a library that has started."""
    count = nvml.integer("nvmlDeviceGetCount") or 0
    handles = [nvml.call("nvmlDeviceGetHandleByIndex", index) for index in range(min(count, MAX_GPUS))]
    gpus = {index: _gpu(nvml, handle, index) for index, handle in enumerate(handles) if handle is not None}
    if not gpus:
        return NvmlReading(reason="the NVIDIA driver reports no GPU")
    links: dict[frozenset[str], Link] = {}
    switches: set[str] = set()
    for index, gpu in gpus.items():
        for target, is_switch, number in _bundles(nvml, handles[index], gpu):
            if is_switch:
                switches.add(target)
            ends = frozenset((gpu.key, target))
            rate = nvlink_bytes_per_second(gpu, number)
            links[ends] = Link(a=gpu.key, b=target, kind="nvlink", count=number, bytes_per_second=rate)
    return NvmlReading(
        gpus=tuple(gpus.values()),
        links=tuple(links.values()),
        nvswitches=tuple(NvSwitch(key=key) for key in sorted(switches)),
        c2c={link.a: link for index, gpu in gpus.items() if (link := _c2c(nvml, handles[index], gpu)) is not None},
    )


def _bus_of(info: object) -> str | None:
    """Returns the bus id in a PCI info structure."""
    return normal_bus_id(_text(getattr(info, "busId", None)) or "")


def _gpu(nvml: _Nvml, handle: object, index: int) -> Gpu:
    """Returns one GPU."""
    bus = _bus_of(nvml.call("nvmlDeviceGetPciInfo", handle))
    capability = nvml.call("nvmlDeviceGetCudaComputeCapability", handle)
    pair = capability if isinstance(capability, tuple | list) and len(capability) == 2 else None
    memory = getattr(nvml.call("nvmlDeviceGetMemoryInfo", handle), "total", None)
    generation = nvml.integer("nvmlDeviceGetMaxPcieLinkGeneration", handle)
    lanes = nvml.integer("nvmlDeviceGetCurrPcieLinkWidth", handle)
    rate = PCIE_GENERATIONS.get(generation or 0)
    return Gpu(
        key=bus or f"GPU{index}",
        bus=bus,
        index=index,
        name=_text(nvml.call("nvmlDeviceGetName", handle)),
        vendor=0x10DE,
        compute_capability=int(pair[0]) * 10 + int(pair[1]) if pair else None,
        memory_nbytes=memory if isinstance(memory, int) else None,
        pcie=PcieLink(gigatransfers_per_second=rate, lanes=lanes) if rate or lanes else None,
    )


def _bundles(nvml: _Nvml, handle: object, gpu: Gpu) -> list[tuple[str, bool, int]]:
    """Returns (far end, whether it is a switch, number of active links) for every far end of a GPU's NVLinks."""
    ends: Counter[tuple[str, bool]] = Counter()
    for link in range(MAX_NVLINKS):
        if nvml.integer("nvmlDeviceGetNvLinkState", handle, link) != 1:
            continue
        info = nvml.call("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        target = _bus_of(info)
        hidden = (_text(getattr(info, "busId", None)) or "").lower().startswith("fffffff")
        kind = nvml.integer("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        if hidden:
            ends["hidden", True] += 1
        elif target is not None and target != gpu.key and kind in (REMOTE_GPU, REMOTE_SWITCH):
            ends[target, kind == REMOTE_SWITCH] += 1
    return [(target, is_switch, number) for (target, is_switch), number in ends.items()]


def _c2c(nvml: _Nvml, handle: object, gpu: Gpu) -> Link | None:
    """Returns the chip-to-chip link between a GPU and its CPU (Grace), or None where there is none."""
    count = _field(nvml, handle, C2C_LINK_COUNT)
    if not count:
        return None
    megabytes = _field(nvml, handle, C2C_MEGABYTES_PER_SECOND)
    rate = None if megabytes is None else megabytes * 1e6 * count
    return Link(a=gpu.key, b="", kind="c2c", count=count, bytes_per_second=rate)


def _field(nvml: _Nvml, handle: object, identifier: int) -> int | None:
    """Returns one field's value, or None where the driver does not know it."""
    values = nvml.call("nvmlDeviceGetFieldValues", handle, [identifier])
    try:
        first: object = values[0]  # type: ignore[index]  # a ctypes array, or None
    except (TypeError, IndexError):
        return None
    number = getattr(getattr(first, "value", None), "uiVal", None)
    return number if getattr(first, "nvmlReturn", 1) == 0 and isinstance(number, int) else None
