"""NCCL without torch in between: its C functions through ctypes, on the library that torch has loaded.

torch brings a libnccl of its own; binding to that very one rules out two versions in one process. What this way leaves
out against `nccl` is torch's stream hand-over, watchdog and work objects: the difference is their price.

Source: NCCL documentation, NCCL API (nccl.h): functions, ncclDataType_t, ncclRedOp_t.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gradwire.bench.dtypes import ELEMENT_TYPES
from gradwire.bench.way import Issue
from gradwire.comms.compat import Store
from gradwire.comms.transport.threads import Done
from gradwire.compressors.base import Work

_DONE = Done()
_ID_NBYTES = 128
"""NCCL_UNIQUE_ID_BYTES."""

_TYPES = {torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.uint32: 3, torch.int64: 4, torch.uint64: 5,
          torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}
_OPERATIONS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
_BYTES = 1
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _ID_NBYTES),)


def _load() -> ctypes.CDLL:
    """The libnccl that this process has mapped, or the system's.

    Raises:
        RuntimeError: There is none.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libnccl.so" in line:
            return ctypes.CDLL(line.split(maxsplit=5)[5])
    try:
        return ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise RuntimeError(f"`--backend` is nccl-raw, but no libnccl can be loaded ({error}): install a CUDA build of "
                           "torch") from error


class NcclRawWay:
    """One communicator of all ranks; everything is issued on torch's current stream."""

    def __init__(self, library: ctypes.CDLL, communicator: ctypes.c_void_p, rank: int, size: int) -> None:
        self.rank = rank
        self._size = size
        self._library = library
        self._communicator = communicator

    @classmethod
    def connect(cls, store: Store, rank: int, size: int, device: torch.device) -> "NcclRawWay":
        """Makes the communicator; all ranks together.

        Raises:
            RuntimeError: There is no NCCL, or it refuses.
        """
        torch.cuda.synchronize(device)  # makes the context, and has torch map its libnccl
        library = _load()
        library.ncclGetErrorString.restype = ctypes.c_char_p
        unique = _UniqueId()
        if rank == 0:
            _check(library, library.ncclGetUniqueId(ctypes.byref(unique)))
            store.set("nccl-id", bytes(unique).hex())
        text = store.get("nccl-id").decode()
        ctypes.memmove(ctypes.byref(unique), bytes.fromhex(text), _ID_NBYTES)
        communicator = ctypes.c_void_p()
        _check(library, library.ncclCommInitRank(ctypes.byref(communicator), ctypes.c_int(size), unique,
                                                 ctypes.c_int(rank)))
        return cls(library, communicator, rank, size)

    def facts(self) -> dict[str, str]:
        """See `Way.facts`."""
        version = ctypes.c_int()
        _check(self._library, self._library.ncclGetVersion(ctypes.byref(version)))
        major, rest = divmod(version.value, 10000)
        return {"library": f"NCCL {major}.{rest // 100}.{rest % 100}"}

    def refusal(self, collective: str, element: str, operation: str) -> str | None:
        """See `Way.refusal`."""
        if collective == "barrier":
            return "NCCL has no barrier"
        if collective not in _REDUCTIONS:
            return None
        if ELEMENT_TYPES[element].torch not in _TYPES:
            return f"this binding of NCCL does not reduce {element}"
        return None if operation in _OPERATIONS else f"this binding of NCCL has no {operation}"

    def all_reduce(self, tensor: Tensor, operation: str) -> Issue:
        """See `Way.all_reduce`."""
        return self._call("ncclAllReduce", _pointer(tensor), _pointer(tensor), _count(tensor), *_reduction(tensor, operation))

    def reduce(self, tensor: Tensor, root: int, operation: str) -> Issue:
        """See `Way.reduce`."""
        return self._call("ncclReduce", _pointer(tensor), _pointer(tensor), _count(tensor), *_reduction(tensor, operation),
                          ctypes.c_int(root))

    def reduce_scatter(self, output: Tensor, source: Tensor, operation: str) -> Issue:
        """See `Way.reduce_scatter`."""
        return self._call("ncclReduceScatter", _pointer(source), _pointer(output), _count(output),
                          *_reduction(source, operation))

    def all_gather(self, output: Tensor, source: Tensor) -> Issue:
        """See `Way.all_gather`."""
        return self._call("ncclAllGather", _pointer(source), _pointer(output), ctypes.c_size_t(source.nbytes),
                          ctypes.c_int(_BYTES))

    def broadcast(self, tensor: Tensor, root: int) -> Issue:
        """See `Way.broadcast`."""
        return self._call("ncclBroadcast", _pointer(tensor), _pointer(tensor), ctypes.c_size_t(tensor.nbytes),
                          ctypes.c_int(_BYTES), ctypes.c_int(root))

    def all_to_all(self, output: Tensor, source: Tensor) -> Issue:
        """See `Way.all_to_all`: sends and receives in one group of calls."""
        part = source.nbytes // self._size
        return self._together([call for peer in range(self._size) for call in (
            self._exchange("ncclSend", source.data_ptr() + peer * part, part, peer),
            self._exchange("ncclRecv", output.data_ptr() + peer * part, part, peer))])

    def send_receive(self, output: Tensor, source: Tensor) -> Issue:
        """See `Way.send_receive`."""
        return self._together([
            self._exchange("ncclSend", source.data_ptr(), source.nbytes, (self.rank + 1) % self._size),
            self._exchange("ncclRecv", output.data_ptr(), output.nbytes, (self.rank - 1) % self._size)])

    def barrier(self) -> Issue:
        """Not reached: `refusal` names it."""
        raise NotImplementedError("NCCL has no barrier")

    def close(self) -> None:
        """See `Way.close`."""
        torch.cuda.synchronize()
        _check(self._library, self._library.ncclCommDestroy(self._communicator))

    def _call(self, name: str, *arguments: object) -> Issue:
        function: Callable[..., int] = getattr(self._library, name)

        def issue() -> Work:
            # Asked each time: the capture of a CUDA graph has a stream of its own.
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            _check(self._library, function(*arguments, self._communicator, stream))
            return _DONE

        return issue

    def _exchange(self, name: str, address: int, nbytes: int, peer: int) -> Issue:
        return self._call(name, ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(_BYTES), ctypes.c_int(peer))

    def _together(self, calls: list[Issue]) -> Issue:
        def issue() -> Work:
            _check(self._library, self._library.ncclGroupStart())
            for call in calls:
                call()
            _check(self._library, self._library.ncclGroupEnd())
            return _DONE

        return issue


def _check(library: ctypes.CDLL, result: int) -> None:
    if result:
        raise RuntimeError(f"NCCL: {library.ncclGetErrorString(ctypes.c_int(result)).decode()} (status {result}); set "
                           "NCCL_DEBUG=WARN to see why")


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _count(tensor: Tensor) -> ctypes.c_size_t:
    return ctypes.c_size_t(tensor.numel())


def _reduction(tensor: Tensor, operation: str) -> tuple[ctypes.c_int, ctypes.c_int]:
    return ctypes.c_int(_TYPES[tensor.dtype]), ctypes.c_int(_OPERATIONS[operation])
