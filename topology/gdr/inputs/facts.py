"""Facts that are in no file: from NVML, libcuda, libibverbs and the kernel log, as plain data that can be captured."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import get_type_hints

RawFacts = dict[str, object]
"""Facts as a library's child process prints them in JSON, under the names of the fields below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """Describes one GPU as NVML and libcuda report it; None is unknown."""

    bus_id: str = ""
    name: str | None = None
    gdr_supported: bool | None = None
    """CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED (116)."""
    dmabuf_supported: bool | None = None
    """CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED (124)."""
    bar1_nbytes: int | None = None
    memory_nbytes: int | None = None
    nvlinks: int | None = None
    """Number of NVLinks that the GPU has."""
    nvlinks_active: int | None = None
    c2c: bool | None = None
    """True if the GPU has a chip-to-chip link to the CPU (Grace)."""
    fabric_state: int | None = None
    """nvmlGpuFabricState_t: 0 not supported, 1 not started, 2 in progress, 3 completed."""
    fabric_status: int | None = None
    """nvmlReturn_t of the fabric registration; 0 is success."""
    mig: bool | None = None
    confidential: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """Describes one attempt to register GPU memory with one RDMA device.

    Attributes:
        gpu: Bus id of the GPU.
        device: Name of the RDMA device.
        peermem_errno: Errno of registering through peer memory; 0 is success, None is not tried.
        dmabuf_errno: Errno of registering through dma-buf; 0 is success, None is not tried.
        note: Reason why something was not tried.
    """

    gpu: str = ""
    device: str = ""
    peermem_errno: int | None = None
    dmabuf_errno: int | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Holds everything that driver libraries, commands and the kernel log said; None is "not asked, or not known"."""

    kernel: str | None = None
    """Release, `5.15.0-105-generic`."""
    driver_version: str | None = None
    nvml_error: str | None = None
    cuda_version: int | None = None
    """cuDriverGetVersion: 12040 for 12.4."""
    cuda_error: str | None = None
    gpus: tuple[GpuFacts, ...] | None = None
    verbs_error: str | None = None
    """Why libibverbs could not be asked."""
    verbs_devices: tuple[str, ...] | None = None
    """Names of the devices that ibv_get_device_list returned."""
    verbs_dmabuf: bool | None = None
    """True if libibverbs has ibv_reg_dmabuf_mr."""
    verbs_relaxed_ordering: bool | None = None
    """True if libibverbs has ibv_reg_mr_iova2."""
    active_mtu: Mapping[str, int] | None = None
    """Device/port -> bytes."""
    device_files: Mapping[str, int] | None = None
    """Path in /dev/infiniband -> errno of opening it for reading and writing."""
    shm_nbytes: int | None = None
    """Size of /dev/shm."""
    kernel_log: tuple[str, ...] | None = None
    """Lines about peer memory and the IOMMU."""
    fabric_manager_active: bool | None = None
    fabric_manager_version: str | None = None
    nccl_version: str | None = None
    nccl_error: str | None = None
    """End of the child that asked libnccl, if it crashed or hung; None otherwise."""
    nccl_plugin: bool | None = None
    """True if the loader finds libnccl-net.so."""
    ofed_version: str | None = None
    user_conf: str | None = None
    """The NCCL_ lines of ~/.nccl.conf."""
    registrations: tuple[Registration, ...] | None = None
    probe_error: str | None = None

    def to_json(self) -> dict[str, object]:
        """Returns the known facts as plain data for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def facts_from_json(data: object) -> HostFacts:
    """Builds facts from JSON data of any origin: fields of the wrong type count as unknown, others are ignored.

    Args:
        data: Parsed JSON from `HostFacts.to_json` or a library's child process; anything but a mapping gives no facts.
    """
    if not isinstance(data, Mapping):
        return HostFacts()
    return HostFacts(**_known(HostFacts, data))  # type: ignore[arg-type]  # _known keeps only values of each field's own type


def _known(kind: type, data: Mapping[object, object]) -> dict[str, object]:
    hints = get_type_hints(kind)
    values = {field.name: _coerce(str(hints[field.name]), data.get(field.name)) for field in fields(kind)}
    return {name: value for name, value in values.items() if value is not None}


def _coerce(hint: str, value: object) -> object:
    """Returns the value if it has the field's type, else None; long texts and lists are cut to 4096."""
    if "tuple[" in hint:
        return tuple(filter(None, (_item(hint, item) for item in value[:4096]))) if isinstance(value, list) else None
    if "Mapping[str, int]" in hint:
        return {name: v for name, v in value.items() if type(v) is int} if isinstance(value, dict) else None
    if "bool" in hint:
        return value if isinstance(value, bool) else None
    if "int" in hint:
        return value if type(value) is int and abs(value) < 1 << 63 else None
    return value[:4096] if isinstance(value, str) else None


def _item(hint: str, item: object) -> object:
    """Converts one entry of a list to the list's type; None if it has another one."""
    for kind in (GpuFacts, Registration):
        if kind.__name__ in hint:
            return kind(**_known(kind, item)) if isinstance(item, dict) else None  # type: ignore[arg-type]  # as above
    return item[:4096] if isinstance(item, str) else None
