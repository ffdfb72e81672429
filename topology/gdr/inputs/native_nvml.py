"""What NVML knows and no file says: BAR1, NVLinks, the fabric's state, MIG, confidential computing."""

import ctypes

from gradwire.topology.readers.nvml_calls import C2C_LINK_COUNT, NvmlCalls

Answers = dict[str, object]


def nvml_answers() -> Answers:
    """Driver version and per GPU: name, BAR1, NVLinks, fabric, MIG; `nvml_error` when the driver does not answer."""
    try:
        import pynvml
    except ImportError:
        return {"nvml_error": "nvidia-ml-py is not installed"}
    nvml = NvmlCalls(pynvml)
    started = nvml.error_of("nvmlInit")
    if started is not None:
        return {"nvml_error": started}
    everywhere = _confidential(nvml)
    gpus = [_gpu(nvml, handle) | everywhere for handle in nvml.handles().values()]
    version = nvml.text("nvmlSystemGetDriverVersion")
    return {"driver_version": version, "gpus": [gpu for gpu in gpus if gpu.get("bus_id")]}


def _gpu(nvml: NvmlCalls, handle: object) -> Answers:
    """Every question on its own: old drivers and virtual GPUs refuse some."""
    links = [active for link in range(nvml.max_nvlinks) if (active := nvml.link_is_active(handle, link)) is not None]
    c2c = nvml.field(handle, C2C_LINK_COUNT)
    answers: Answers = {
        "bus_id": nvml.bus_id("nvmlDeviceGetPciInfo", handle)[0],
        "name": nvml.text("nvmlDeviceGetName", handle),
        "bar1_nbytes": nvml.number_in("bar1Total", "nvmlDeviceGetBAR1MemoryInfo", handle),
        "memory_nbytes": nvml.number_in("total", "nvmlDeviceGetMemoryInfo", handle),
        "nvlinks": len(links),
        "nvlinks_active": sum(links),
        "mig": _mig(nvml, handle),
        "c2c": None if c2c is None else c2c > 0,
    }
    answers |= _fabric(nvml, handle, "V") or _fabric(nvml, handle, "")
    return {name: value for name, value in answers.items() if value is not None}


def _mig(nvml: NvmlCalls, handle: object) -> bool | None:
    """Whether MIG is on; a GPU that has no MIG has it off. Source: nvml.h, NVML_DEVICE_MIG_ENABLE."""
    modes = nvml.call("nvmlDeviceGetMigMode", handle)  # current, pending
    if isinstance(modes, list | tuple) and modes:
        return bool(modes[0] == 1)
    return False if nvml.lacks("nvmlDeviceGetMigMode", handle) else None


def _confidential(nvml: NvmlCalls) -> Answers:
    """Confidential computing is a state of the whole system. Source: nvml.h, nvmlConfComputeSystemState_t."""
    feature = nvml.number_in("ccFeature", "nvmlSystemGetConfComputeState")
    return {} if feature is None else {"confidential": bool(feature)}


def _fabric(nvml: NvmlCalls, handle: object, suffix: str) -> Answers:
    """State of the fabric registration: with suffix `V` the versioned call, without the one deprecated from CUDA 13 on."""
    info = nvml.call(f"c_nvmlGpuFabricInfo{suffix}_t")
    if not isinstance(info, ctypes.Structure):
        return {}
    if nvml.error_of(f"nvmlDeviceGetGpuFabricInfo{suffix}", handle, ctypes.byref(info)) is not None:
        return {}
    state, status = getattr(info, "state", None), getattr(info, "status", None)
    return {} if state is None else {"fabric_state": int(state), "fabric_status": int(status or 0)}
