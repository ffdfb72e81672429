"""Asks NVML, libcuda, libibverbs and libnccl through ctypes; run as a child, so that a crash or a hang there is survived."""

import ctypes
import json
import sys
from collections.abc import Callable, Mapping

from gradwire.topology.gdr.native_nvml import Answers, nvml_answers
from gradwire.topology.nvml_calls import text_of
from gradwire.topology.pci_ids import normal_bus_id

_MTU_BASE_NBYTES = 128  # ibv_mtu 1 to 5 is 256 to 4096 bytes
_MAX_DEVICES = 256


def load(name: str) -> ctypes.CDLL:
    """Opens a shared library.

    Raises:
        OSError: It is not there.
    """
    return ctypes.CDLL(name, use_errno=True)


class Cuda:
    """The few driver calls that are needed. Source: CUDA driver API reference."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def call(self, name: str, *args: object) -> int:
        """Calls a function and returns its CUresult; -1 where this driver lacks it."""
        function = getattr(self.library, name, None)
        return -1 if function is None else int(function(*args))

    def bus_id(self, device: int) -> str:
        """Bus id of a device ordinal's handle."""
        buffer = ctypes.create_string_buffer(32)
        self.call("cuDeviceGetPCIBusId", buffer, 32, device)
        text = buffer.value.decode("ascii", "replace")
        return normal_bus_id(text) or text

    def attribute(self, number: int, device: int) -> bool | None:
        """A boolean attribute, None when this driver does not know it."""
        value = ctypes.c_int()
        return (
            bool(value.value) if self.call("cuDeviceGetAttribute", ctypes.byref(value), number, device) == 0 else None
        )


def cuda_answers(loader: Callable[[str], ctypes.CDLL] = load) -> Answers:
    """CUDA version and attributes 116 and 124 of every GPU; `cuda_error` when there is no usable driver."""
    try:
        cuda = Cuda(loader("libcuda.so.1"))
    except OSError as error:
        return {"cuda_error": str(error)}
    status = cuda.call("cuInit", 0)
    if status:
        return {"cuda_error": f"cuInit returned {status}"}
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.call("cuDriverGetVersion", ctypes.byref(version))
    cuda.call("cuDeviceGetCount", ctypes.byref(count))
    gpus = []
    for index in range(min(count.value, _MAX_DEVICES)):
        device = ctypes.c_int()
        if cuda.call("cuDeviceGet", ctypes.byref(device), index) == 0:
            answers = {
                "gdr_supported": cuda.attribute(116, device.value),
                "dmabuf_supported": cuda.attribute(124, device.value),
            }
            gpus.append({"bus_id": cuda.bus_id(device.value)} | answers)
    return {"cuda_version": version.value, "gpus": gpus}


class Verbs:
    """The few verbs that are needed, with pointers declared. Source: rdma-core libibverbs/verbs.h and its manual pages."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for name in ("ibv_get_device_list", "ibv_open_device", "ibv_alloc_pd", "ibv_reg_mr", "ibv_reg_dmabuf_mr"):
            if hasattr(library, name):
                getattr(library, name).restype = ctypes.c_void_p
        library.ibv_get_device_name.restype = ctypes.c_char_p

    def has(self, name: str) -> bool:
        """Whether this libibverbs exports a function."""
        return hasattr(self.library, name)

    def devices(self) -> dict[str, int]:
        """Name -> ibv_device pointer; the list stays allocated for the life of this short process."""
        count = ctypes.c_int()
        address = self.library.ibv_get_device_list(ctypes.byref(count))
        if not address:
            return {}
        pointers = ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))
        found = [int(pointers[index] or 0) for index in range(min(count.value, _MAX_DEVICES))]
        return {text_of(self.library.ibv_get_device_name(ctypes.c_void_p(p))) or "?": p for p in found if p}

    def active_mtu(self, device: int) -> int | None:
        """Bytes of port 1's active MTU: the third int of ibv_port_attr."""
        context = self.library.ibv_open_device(ctypes.c_void_p(device))
        if not context:
            return None
        attributes = (ctypes.c_int * 64)()
        failed = self.library.ibv_query_port(ctypes.c_void_p(context), ctypes.c_uint8(1), ctypes.byref(attributes))
        self.library.ibv_close_device(ctypes.c_void_p(context))
        return None if failed or not 1 <= attributes[2] <= 5 else _MTU_BASE_NBYTES << attributes[2]


def verbs_answers(loader: Callable[[str], ctypes.CDLL] = load) -> Answers:
    """Devices of libibverbs, their MTU, and which calls it has; `verbs_error` when it cannot be loaded."""
    try:
        verbs = Verbs(loader("libibverbs.so.1"))
    except (OSError, AttributeError) as error:
        return {"verbs_error": str(error)}
    devices = verbs.devices()
    mtus = {f"{name}/1": verbs.active_mtu(pointer) for name, pointer in devices.items()}
    return {
        "verbs_devices": list(devices),
        "verbs_dmabuf": verbs.has("ibv_reg_dmabuf_mr"),
        "verbs_relaxed_ordering": verbs.has("ibv_reg_mr_iova2"),
        "active_mtu": {name: mtu for name, mtu in mtus.items() if mtu},
    }


def nccl_answers(loader: Callable[[str], ctypes.CDLL] = load) -> Answers:
    """Version of libnccl.so.2 where the loader finds it, and whether a network plugin is there."""
    answers: Answers = {}
    try:
        version = ctypes.c_int()
        loader("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
        answers["nccl_version"] = str(version.value)
    except (OSError, AttributeError):  # not in the loader's path; the caller may know a wheel's version
        pass
    try:
        loader("libnccl-net.so")
        answers["nccl_plugin"] = True
    except OSError:
        answers["nccl_plugin"] = False
    return answers


def merged(first: Answers, second: Answers) -> Answers:
    """Both answers; descriptions of one GPU by its bus id become one."""
    gpus: dict[str, Answers] = {}
    for part in (first, second):
        listed = part.get("gpus")
        for gpu in listed if isinstance(listed, list) else ():
            gpus.setdefault(gpu["bus_id"], {}).update(gpu)
    everything: Mapping[str, object] = first | second
    return dict(everything) | ({"gpus": list(gpus.values())} if "gpus" in everything else {})


def main(argv: list[str]) -> int:
    """Prints the answers as one JSON object; `--prove` also registers memory."""
    answers = merged(merged(nvml_answers(), cuda_answers()), merged(verbs_answers(), nccl_answers()))
    if "--prove" in argv:
        from gradwire.topology.gdr.registration import prove

        answers |= prove(load)
    print(json.dumps(answers))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
