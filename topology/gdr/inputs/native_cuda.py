"""The few calls of the CUDA driver that are needed, with their prototypes.

Source: cuda.h; CUDA driver API reference.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from gradwire.topology.gdr.inputs.facts import RawFacts
from gradwire.topology.pci_ids import normal_bus_id

LIBRARY = "libcuda.so.1"

_GPU_DIRECT_RDMA_SUPPORTED = 116  # CU_DEVICE_ATTRIBUTE_*
_DMA_BUF_SUPPORTED = 124
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_MAX_DEVICES = 256
_NUMBER, _DEVICE = ctypes.POINTER(ctypes.c_int), ctypes.c_int
_ADDRESS, _NBYTES = ctypes.c_uint64, ctypes.c_size_t
_PROTOTYPES: dict[str, tuple[type, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuDriverGetVersion": (_NUMBER,),
    "cuDeviceGetCount": (_NUMBER,),
    "cuDeviceGet": (_NUMBER, ctypes.c_int),
    "cuDeviceGetPCIBusId": (ctypes.c_char_p, ctypes.c_int, _DEVICE),
    "cuDeviceGetAttribute": (_NUMBER, ctypes.c_int, _DEVICE),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), _DEVICE),
    "cuDevicePrimaryCtxRelease_v2": (_DEVICE,),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuMemAlloc_v2": (ctypes.POINTER(_ADDRESS), _NBYTES),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemGetHandleForAddressRange": (_NUMBER, _ADDRESS, _NBYTES, ctypes.c_int, ctypes.c_ulonglong),
}


class CudaError(Exception):
    """Reports a call of the CUDA driver that failed, or that this driver does not have."""


class Cuda:
    """Calls the CUDA driver through ctypes; an instance has started it."""

    def __init__(self) -> None:
        """Loads and starts the driver.

        Raises:
            OSError: libcuda is not there.
            CudaError: It does not start.
        """
        self._library = ctypes.CDLL(LIBRARY)
        for name, arguments in _PROTOTYPES.items():
            if hasattr(self._library, name):
                getattr(self._library, name).argtypes = arguments
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function of the driver.

        Args:
            name: Function as libcuda exports it.
            arguments: Arguments as in cuda.h.

        Raises:
            CudaError: It failed, or this driver lacks it.
        """
        function = getattr(self._library, name, None)
        if function is None:
            raise CudaError(f"this driver has no {name}")
        status = int(function(*arguments))
        if status:
            raise CudaError(f"{name}: {self._error_name(status)}")

    def _error_name(self, status: int) -> str:
        name = ctypes.c_char_p()
        known = hasattr(self._library, "cuGetErrorName") and not self._library.cuGetErrorName(status, name)
        return f"{name.value.decode()} ({status})" if known and name.value else f"error {status}"

    def number(self, name: str, *arguments: object) -> int:
        """Calls a function and returns the integer that it writes to its first argument.

        Args:
            name: Function as libcuda exports it.
            arguments: Arguments after the first.

        Raises:
            CudaError: It failed, or this driver lacks it.
        """
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def devices(self) -> list[int]:
        """Returns the handles of all GPUs."""
        count = min(self.number("cuDeviceGetCount"), _MAX_DEVICES)
        return [self.number("cuDeviceGet", index) for index in range(count)]

    def bus_id(self, device: int) -> str:
        """Returns the bus id of a GPU, as sysfs writes it."""
        buffer = ctypes.create_string_buffer(32)
        self.call("cuDeviceGetPCIBusId", buffer, len(buffer), device)
        text = buffer.value.decode("ascii", "replace")
        return normal_bus_id(text) or text

    def supports(self, attribute: int, device: int) -> bool | None:
        """Returns a yes-or-no attribute of a GPU; None if this driver does not know it.

        Args:
            attribute: Number of a CU_DEVICE_ATTRIBUTE.
            device: Handle of the GPU.
        """
        try:
            return bool(self.number("cuDeviceGetAttribute", attribute, device))
        except CudaError:
            return None

    @contextmanager
    def memory(self, device: int, nbytes: int) -> Iterator[int]:
        """Allocates GPU memory and yields its address; the memory is freed afterwards.

        Args:
            device: Handle of the GPU.
            nbytes: Size in bytes.

        Raises:
            CudaError: It cannot be allocated, for example because a job uses it all.
        """
        context, address = ctypes.c_void_p(), _ADDRESS()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            self.call("cuCtxSetCurrent", context)
            self.call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
            try:
                yield address.value
            finally:
                self.call("cuMemFree_v2", address)
        finally:
            self.call("cuDevicePrimaryCtxRelease_v2", device)

    def dmabuf(self, address: int, nbytes: int) -> int:
        """Exports GPU memory as dma-buf and returns a new file descriptor, which the caller closes.

        Args:
            address: Start of the memory, at a page's boundary.
            nbytes: Size in bytes, whole pages.

        Raises:
            CudaError: The GPU or its driver exports none.
        """
        return self.number("cuMemGetHandleForAddressRange", address, nbytes, _DMA_BUF_FD, 0)


def cuda_facts() -> RawFacts:
    """Asks libcuda for its version and attributes 116 and 124 of every GPU; `cuda_error` without a usable driver."""
    try:
        cuda = Cuda()
        gpus = [
            {
                "bus_id": cuda.bus_id(device),
                "gdr_supported": cuda.supports(_GPU_DIRECT_RDMA_SUPPORTED, device),
                "dmabuf_supported": cuda.supports(_DMA_BUF_SUPPORTED, device),
            }
            for device in cuda.devices()
        ]
        return {"cuda_version": cuda.number("cuDriverGetVersion"), "gpus": gpus}
    except (OSError, CudaError) as error:
        return {"cuda_error": str(error)}
