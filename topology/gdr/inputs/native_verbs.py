"""The few libibverbs calls that are needed, with their prototypes.

Source: rdma-core libibverbs/verbs.h and its manual pages.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from gradwire.topology.gdr.inputs.facts import RawFacts
from gradwire.topology.readers.nvml_calls import text_of

LIBRARY = "libibverbs.so.1"

_MAX_DEVICES = 256
_PORT_INTS = 64  # ibv_port_attr has 52 bytes; a later library may write more
_ACTIVE_MTU = 2  # its third int
_MTU_BASE_NBYTES = 128  # ibv_mtu 1 to 5 is 256 to 4096 bytes
_POINTER, _NUMBER, _NBYTES, _FAR = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64
_PROTOTYPES: dict[str, tuple[type | None, tuple[type, ...]]] = {  # result, arguments
    "ibv_get_device_list": (_POINTER, (ctypes.POINTER(_NUMBER),)),
    "ibv_free_device_list": (None, (_POINTER,)),
    "ibv_get_device_name": (ctypes.c_char_p, (_POINTER,)),
    "ibv_open_device": (_POINTER, (_POINTER,)),
    "ibv_close_device": (_NUMBER, (_POINTER,)),
    "ibv_query_port": (_NUMBER, (_POINTER, ctypes.c_uint8, _POINTER)),
    "ibv_alloc_pd": (_POINTER, (_POINTER,)),
    "ibv_dealloc_pd": (_NUMBER, (_POINTER,)),
    "ibv_reg_mr": (_POINTER, (_POINTER, _POINTER, _NBYTES, _NUMBER)),
    "ibv_reg_dmabuf_mr": (_POINTER, (_POINTER, _FAR, _NBYTES, _FAR, _NUMBER, _NUMBER)),
    "ibv_dereg_mr": (_NUMBER, (_POINTER,)),
}


class VerbsError(Exception):
    """Reports a call of libibverbs that returned nothing; the message has its name and what errno means."""

    def __init__(self, name: str, code: int) -> None:
        """Builds the message.

        Args:
            name: Function that failed.
            code: Errno that it set; 0 if it set none.
        """
        super().__init__(f"{name}: {os.strerror(code) if code else 'failed without an errno'}")
        self.code = code


class Verbs:
    """Calls libibverbs through ctypes."""

    def __init__(self) -> None:
        """Loads the library.

        Raises:
            OSError: It is not there.
            AttributeError: It is something else.
        """
        self._library = ctypes.CDLL(LIBRARY, use_errno=True)
        for name, (result, arguments) in _PROTOTYPES.items():
            if name != "ibv_reg_dmabuf_mr" or self.has(name):
                function = getattr(self._library, name)
                function.restype, function.argtypes = result, arguments

    def has(self, name: str) -> bool:
        """Returns whether this libibverbs exports a function."""
        return hasattr(self._library, name)

    def made(self, name: str, *arguments: object) -> int:
        """Calls a function and returns the pointer that it returns.

        Args:
            name: Function of libibverbs.
            arguments: Arguments as in the header.

        Raises:
            VerbsError: It returned a null pointer.
        """
        ctypes.set_errno(0)
        pointer = getattr(self._library, name)(*arguments)
        if not pointer:
            raise VerbsError(name, ctypes.get_errno())
        return int(pointer)

    @contextmanager
    def devices(self) -> Iterator[dict[str, int]]:
        """Yields name -> ibv_device pointer for all devices, and frees the list afterwards; empty without RDMA."""
        count = ctypes.c_int()
        try:
            address = self.made("ibv_get_device_list", ctypes.byref(count))
        except VerbsError:  # a kernel without RDMA returns ENOSYS: no devices
            yield {}
            return
        try:
            pointers = ctypes.cast(address, ctypes.POINTER(_POINTER))[: min(count.value, _MAX_DEVICES)]
            yield {text_of(self._library.ibv_get_device_name(p)) or "?": int(p) for p in pointers if p}
        finally:
            self._library.ibv_free_device_list(address)

    @contextmanager
    def opened(self, device: int) -> Iterator[int]:
        """Opens a device and yields its ibv_context, which is closed afterwards.

        Raises:
            VerbsError: It cannot be opened.
        """
        context = self.made("ibv_open_device", device)
        try:
            yield context
        finally:
            self._library.ibv_close_device(context)

    @contextmanager
    def domain(self, context: int) -> Iterator[int]:
        """Allocates a protection domain and yields it (an ibv_pd); it is deallocated afterwards.

        Raises:
            VerbsError: It cannot be allocated.
        """
        domain = self.made("ibv_alloc_pd", context)
        try:
            yield domain
        finally:
            self._library.ibv_dealloc_pd(domain)

    def registered(self, name: str, *arguments: object) -> None:
        """Registers memory and deregisters it at once.

        Args:
            name: `ibv_reg_mr` or `ibv_reg_dmabuf_mr`.
            arguments: Arguments as in the header, the protection domain first.

        Raises:
            VerbsError: Library or kernel refused.
        """
        self._library.ibv_dereg_mr(self.made(name, *arguments))

    def active_mtu(self, device: int) -> int | None:
        """Returns the active MTU of port 1 in bytes; None if the device or port cannot be queried."""
        attributes = (ctypes.c_int * _PORT_INTS)()
        try:
            with self.opened(device) as context:
                failed = self._library.ibv_query_port(context, 1, ctypes.byref(attributes))
        except VerbsError:
            return None
        number = attributes[_ACTIVE_MTU]
        return _MTU_BASE_NBYTES << number if not failed and 1 <= number <= 5 else None


def verbs_facts() -> RawFacts:
    """Asks libibverbs for its devices, their MTU and the calls it has; `verbs_error` if it cannot be loaded."""
    try:
        verbs = Verbs()
    except (OSError, AttributeError) as error:
        return {"verbs_error": str(error)}
    with verbs.devices() as devices:
        mtus = {f"{name}/1": verbs.active_mtu(pointer) for name, pointer in devices.items()}
        return {
            "verbs_devices": list(devices),
            "verbs_dmabuf": verbs.has("ibv_reg_dmabuf_mr"),
            "verbs_relaxed_ordering": verbs.has("ibv_reg_mr_iova2"),
            "active_mtu": {name: mtu for name, mtu in mtus.items() if mtu},
        }
