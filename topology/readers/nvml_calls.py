"""NVIDIA's management library (NVML) behind calls that never raise: whatever it cannot say is None.

Old drivers lack functions, virtual GPUs and MIG slices refuse some, and a GPU that fell off the bus refuses all.
"""

from collections.abc import Mapping
from types import ModuleType, SimpleNamespace

from gradwire.topology.pci_ids import normal_bus_id

MAX_GPUS = 64
DEFAULT_NVLINKS = 18
"""Links of a GPU where the binding does not say; NVML_NVLINK_MAX_LINKS of those that knew Hopper and Blackwell."""
NVLINK_STATE, C2C_LINK_COUNT, C2C_MEGABYTES_PER_SECOND = 165, 170, 172
"""Fields of nvmlDeviceGetFieldValues; the last is the rate of one active link. Source: nvml.h, NVML_FI_DEV_*."""
NVLINK_ACTIVE, NVLINK_ASLEEP = 1, 2
"""Values of that state; a link of an idle GPU may sleep, and wakes when it is used.

Source: nvml.h, NVML_NVLINK_STATE_*.
"""

P2P_READ = 0
"""Kind of peer access: reads. Source: nvml.h, NVML_P2P_CAPS_INDEX_READ."""

Library = ModuleType | SimpleNamespace

NOT_INSTALLED = "nvidia-ml-py is not installed"


class NvmlCalls:
    """Calls NVML without ever raising: a call that fails returns None."""

    def __init__(self, library: Library) -> None:
        """Takes pynvml, or anything with its names.

        Args:
            library: The module; it is not started yet.
        """
        self._library = library
        self._error: type[Exception] = getattr(library, "NVMLError", RuntimeError)
        self._not_supported: type[Exception] | None = getattr(library, "NVMLError_NotSupported", None)
        found: object = getattr(library, "NVML_NVLINK_MAX_LINKS", None)
        self.max_nvlinks = found if isinstance(found, int) else DEFAULT_NVLINKS

    def _attempt(self, name: str, *arguments: object) -> tuple[object | None, Exception | None]:
        """Calls a function; returns (its result, None), or (None, the exception) if it failed."""
        try:
            return getattr(self._library, name)(*arguments), None
        except (self._error, AttributeError, TypeError, ValueError, OSError) as error:
            return None, error  # ValueError: a name that is no UTF-8

    def error_of(self, name: str, *arguments: object) -> str | None:
        """Calls a function and returns the message of its error, or None if it succeeded.

        Args:
            name: Name of the function in pynvml.
            arguments: Arguments that the function is called with.
        """
        _, error = self._attempt(name, *arguments)
        return None if error is None else str(error) or type(error).__name__

    def call(self, name: str, *arguments: object) -> object | None:
        """Calls a function and returns its result, or None if it failed.

        Args:
            name: Name of the function in pynvml.
            arguments: Arguments that the function is called with.
        """
        found, _ = self._attempt(name, *arguments)
        return found

    def lacks(self, name: str, *arguments: object) -> bool:
        """Calls a function and returns whether the driver answers that this GPU does not support it.

        Args:
            name: Name of the function in pynvml.
            arguments: Arguments that the function is called with.
        """
        _, error = self._attempt(name, *arguments)
        return self._not_supported is not None and isinstance(error, self._not_supported)

    def integer(self, name: str, *arguments: object) -> int | None:
        """Calls a function and returns its result if that is an integer, else None.

        Args:
            name: Name of the function in pynvml.
            arguments: Arguments that the function is called with.
        """
        found = self.call(name, *arguments)
        return found if isinstance(found, int) else None

    def text(self, name: str, *arguments: object) -> str | None:
        """Calls a function and returns its result as text (old bindings return bytes); None if it is none.

        Args:
            name: Name of the function in pynvml.
            arguments: Arguments that the function is called with.
        """
        return text_of(self.call(name, *arguments))

    def number_in(self, attribute: str, name: str, *arguments: object) -> int | None:
        """Calls a function and returns an integer field of the structure it returns; None if there is none.

        Args:
            attribute: Name of the structure's field.
            name: Name of the function in pynvml.
            arguments: Arguments that the function is called with.
        """
        found = getattr(self.call(name, *arguments), attribute, None)
        return found if isinstance(found, int) else None

    def field(self, handle: object, identifier: int, scope: int = 0) -> int | None:
        """Returns one of a GPU's field values, or None if the driver does not know it.

        Args:
            handle: NVML's handle of the GPU.
            identifier: Number of the field, NVML_FI_DEV_*.
            scope: Index for fields that exist several times, such as the number of a link.
        """
        values = self.call("nvmlDeviceGetFieldValues", handle, [(identifier, scope)])
        try:
            first: object = values[0]  # type: ignore[index]  # a ctypes array, or None
        except (TypeError, IndexError):
            return None
        number = getattr(getattr(first, "value", None), "uiVal", None)
        return number if getattr(first, "nvmlReturn", 1) == 0 and isinstance(number, int) else None

    def link_is_active(self, handle: object, link: int) -> bool | None:
        """Returns whether an NVLink is up; None if there is no such link.

        Args:
            handle: NVML's handle of the GPU.
            link: Number of the link, from 0.

        Source: NCCL v2.30 src/graph/xml.cc asks the field from Hopper on, the function before.
        """
        state = self.field(handle, NVLINK_STATE, link)
        state = self.integer("nvmlDeviceGetNvLinkState", handle, link) if state is None else state
        return None if state is None else state in (NVLINK_ACTIVE, NVLINK_ASLEEP)

    def handles(self) -> dict[int, object]:
        """Returns the driver's number -> NVML's handle for each GPU that answers."""
        count = min(self.integer("nvmlDeviceGetCount") or 0, MAX_GPUS)
        found = {index: self.call("nvmlDeviceGetHandleByIndex", index) for index in range(count)}
        return {index: handle for index, handle in found.items() if handle is not None}

    def peer_states(self, handles: Mapping[int, object], index: int) -> tuple[int, ...]:
        """Returns whether a GPU can read the memory of each GPU, in the order of their numbers, as NVML's status.

        0 is yes; any other status is a reason why not. A GPU's status towards itself is 0. Empty if the driver does not
        tell all of them.

        Args:
            handles: Number of each GPU -> NVML's handle.
            index: Number of the GPU that reads.

        Source: NVML API reference, nvmlDeviceGetP2PStatus and nvmlGpuP2PStatus_t.
        """
        own = handles[index]
        states = [
            0 if other == index else self.integer("nvmlDeviceGetP2PStatus", own, handles.get(other), P2P_READ)
            for other in range(max(handles) + 1)
        ]
        known = [state for state in states if state is not None]
        return tuple(known) if len(known) == len(states) else ()

    def bus_id(self, name: str, *arguments: object) -> tuple[str | None, str]:
        """Calls a function and returns the bus id in its result: (normal form or None, text as the driver wrote it).

        Args:
            name: Name of the function in pynvml.
            arguments: Arguments that the function is called with.
        """
        try:
            written = text_of(getattr(self.call(name, *arguments), "busId", None)) or ""
        except ValueError:  # the binding decodes when the field is read
            written = ""
        return normal_bus_id(written), written


def start_nvml(library: Library | None = None) -> tuple[NvmlCalls | None, str]:
    """Starts NVML; returns (its calls, ""), or (None, why it does not start).

    Args:
        library: Anything with pynvml's functions; the installed nvidia-ml-py by default.
    """
    if library is None:
        try:
            import pynvml  # the driver is optional, and so is this
        except ImportError:
            return None, NOT_INSTALLED
        library = pynvml
    nvml = NvmlCalls(library)
    problem = nvml.error_of("nvmlInit")
    return (nvml, "") if problem is None else (None, problem)


def text_of(found: object) -> str | None:
    """Returns a name as text (old bindings return bytes); None for anything else.

    Args:
        found: Result of a call to NVML.
    """
    if isinstance(found, bytes):
        return found.decode("utf-8", "replace")
    return found if isinstance(found, str) else None
