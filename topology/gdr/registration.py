"""The one proof no setting can fake: allocate GPU memory and register it with every NIC, both ways."""

import ctypes
import os
from collections.abc import Callable

from gradwire.topology.gdr.native import Cuda, Verbs
from gradwire.topology.gdr.native_nvml import Answers

_NBYTES = 2 << 20  # one large page: dma-buf export wants page-aligned ranges
_ACCESS = 1 | 2 | 4  # IBV_ACCESS_LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD


def prove(loader: Callable[[str], ctypes.CDLL]) -> Answers:
    """Tries every GPU with every device; a library that is missing is an answer of its own.

    Source: ibv_reg_mr(3), ibv_reg_dmabuf_mr(3); CUDA driver API, cuMemGetHandleForAddressRange.
    """
    try:
        cuda, verbs = Cuda(loader("libcuda.so.1")), Verbs(loader("libibverbs.so.1"))
    except (OSError, AttributeError) as error:
        return {"probe_error": f"not tried: {error}"}
    status = cuda.call("cuInit", 0)
    if status:
        return {"probe_error": f"not tried: cuInit returned {status}"}
    count = ctypes.c_int()
    cuda.call("cuDeviceGetCount", ctypes.byref(count))
    devices = verbs.devices()
    rows = [row for index in range(count.value) for row in _prove_gpu(cuda, verbs, index, devices)]
    return (
        {"registrations": rows} if rows else {"probe_error": f"{count.value} GPUs, {len(devices)} RDMA devices to try"}
    )


def _prove_gpu(cuda: Cuda, verbs: Verbs, index: int, devices: dict[str, int]) -> list[Answers]:
    device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    cuda.call("cuDeviceGet", ctypes.byref(device), index)
    bus_id = cuda.bus_id(device.value)
    status = cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    status = status or cuda.call("cuCtxSetCurrent", context)
    status = status or cuda.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(_NBYTES))
    if status:
        note = f"GPU memory could not be allocated: CUDA error {status}"
        return [{"gpu": bus_id, "device": name, "note": note} for name in devices]
    try:
        return [
            {"gpu": bus_id, "device": name} | _register(cuda, verbs, p, pointer.value) for name, p in devices.items()
        ]
    finally:
        cuda.call("cuMemFree_v2", pointer)
        cuda.call("cuDevicePrimaryCtxRelease_v2", device)


def _register(cuda: Cuda, verbs: Verbs, device: int, pointer: int) -> Answers:
    """Registers one buffer with one device; the errno of each way, 0 for success."""
    library = verbs.library
    context = library.ibv_open_device(ctypes.c_void_p(device))
    if not context:
        return {"note": f"ibv_open_device: {os.strerror(ctypes.get_errno())}"}
    try:
        domain = library.ibv_alloc_pd(ctypes.c_void_p(context))
        if not domain:
            return {"note": f"ibv_alloc_pd: {os.strerror(ctypes.get_errno())}"}
        try:
            peermem = _outcome(
                verbs,
                library.ibv_reg_mr,
                (ctypes.c_void_p(domain), ctypes.c_void_p(pointer), ctypes.c_size_t(_NBYTES), ctypes.c_int(_ACCESS)),
            )
            return {"peermem_errno": peermem} | _register_dmabuf(cuda, verbs, domain, pointer)
        finally:
            library.ibv_dealloc_pd(ctypes.c_void_p(domain))
    finally:
        library.ibv_close_device(ctypes.c_void_p(context))


def _register_dmabuf(cuda: Cuda, verbs: Verbs, domain: int, pointer: int) -> Answers:
    if not verbs.has("ibv_reg_dmabuf_mr"):
        return {"note": "libibverbs has no ibv_reg_dmabuf_mr"}
    handle = ctypes.c_int(-1)
    arguments = (ctypes.c_uint64(pointer), ctypes.c_size_t(_NBYTES), ctypes.c_int(_DMA_BUF_FD), ctypes.c_ulonglong(0))
    status = cuda.call("cuMemGetHandleForAddressRange", ctypes.byref(handle), *arguments)
    if status:
        return {"note": f"the GPU exports no dma-buf: CUDA error {status}"}
    try:
        where = (ctypes.c_uint64(0), ctypes.c_size_t(_NBYTES), ctypes.c_uint64(pointer))
        return {
            "dmabuf_errno": _outcome(
                verbs, verbs.library.ibv_reg_dmabuf_mr, (ctypes.c_void_p(domain), *where, handle, ctypes.c_int(_ACCESS))
            )
        }
    finally:
        os.close(handle.value)


def _outcome(verbs: Verbs, register: Callable[..., int | None], arguments: tuple[object, ...]) -> int:
    """Registers and gives back at once; 0 or the errno."""
    ctypes.set_errno(0)
    region = register(*arguments)
    if not region:
        return ctypes.get_errno() or -1
    verbs.library.ibv_dereg_mr(ctypes.c_void_p(region))
    return 0
