"""The stand-in's functions through ctypes, without torch: a process that uses them starts in no time."""

import ctypes
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LIBRARIES = next(Path(sys.prefix, "lib").glob("python*/site-packages/nvidia/cu13/lib"), None)
"""Where build.py has put the stand-in; None where this environment is not the stand-in's."""


def is_standin() -> bool:
    """Whether this interpreter's environment is the stand-in's."""
    return LIBRARIES is not None and (LIBRARIES.parents[2] / "gpu_standin_cupy.pth").exists()


SUM, PROD, MAX, MIN, AVG = range(5)
DTYPES = {"int8": 0, "uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
"""NCCL's numbers."""
SUCCESS, SYSTEM_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 0, 2, 4, 5, 6, 7
NOT_READY, OUT_OF_MEMORY, INVALID_VALUE = 600, 2, 1
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    """The first members of ncclConfig_t."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


UNDEFINED = -(2**31)


def make_config(blocking: bool, max_ctas: int = UNDEFINED) -> Config:
    """A configuration in which only these are set."""
    return Config(ctypes.sizeof(Config), 0, 0, int(blocking), UNDEFINED, UNDEFINED, max_ctas, None, UNDEFINED)


class CallError(Exception):
    """A function of the stand-in returned an error; `code` is its number."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} returned {code}")
        self.code = code


class Library:
    """A library whose functions raise CallError where they do not return 0."""

    def __init__(self, soname: str) -> None:
        assert LIBRARIES is not None, "this is not the stand-in's environment: make gpu-standin"
        self.raw = ctypes.CDLL(str(LIBRARIES / soname))

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self.raw, name)

        def call(*arguments: Any) -> None:
            if code := function(*arguments):
                raise CallError(name, code)

        return call


class Cuda:
    """What the tests need of the runtime, in Python's types."""

    def __init__(self) -> None:
        self.api = Library("libcudart.so.13")
        self._alive: list[Any] = []  # callbacks that streams may still call

    def code(self, name: str, *arguments: Any) -> int:
        """What a function returns."""
        return int(getattr(self.api.raw, name)(*arguments))

    def malloc(self, nbytes: int) -> int:
        pointer = ctypes.c_void_p()
        self.api.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        assert pointer.value is not None
        return pointer.value

    def free(self, pointer: int) -> None:
        self.api.cudaFree(ctypes.c_void_p(pointer))

    def stream(self, blocking: bool = False) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self.api.cudaStreamCreateWithFlags(ctypes.byref(stream), 0 if blocking else 1)
        return stream

    def event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self.api.cudaEventCreateWithFlags(ctypes.byref(event), 0)
        return event

    def submit(self, stream: ctypes.c_void_p | None, work: Callable[[], object]) -> None:
        """Runs `work` on the stream's thread, after what was submitted before."""
        function = HOST_FUNCTION(lambda _: work() and None)
        self._alive.append(function)
        self.api.cudaLaunchHostFunc(stream, function, None)

    def to_device(self, values: bytes) -> int:
        """A new allocation that holds `values`."""
        pointer = self.malloc(len(values))
        self.api.cudaMemcpy(ctypes.c_void_p(pointer), values, ctypes.c_size_t(len(values)), 1)
        return pointer

    def to_host(self, pointer: int, nbytes: int) -> bytes:
        """What `nbytes` of memory hold once the device has come to a rest."""
        self.api.cudaDeviceSynchronize()
        return ctypes.string_at(pointer, nbytes)

    def set(self, name: str, value: str) -> None:
        """Sets the variable GPU_STANDIN_<name> of this process."""
        self.api.raw.gpu_standin_set(name.encode(), value.encode())

    def counts(self) -> dict[str, int]:
        """Calls of each function so far."""
        self.api.raw.gpu_standin_counts.restype = ctypes.c_char_p
        counts: dict[str, int] = json.loads(self.api.raw.gpu_standin_counts())
        return counts

    def describe(self) -> str:
        """What the streams are doing."""
        self.api.raw.gpu_standin_describe.restype = ctypes.c_char_p
        text: bytes = self.api.raw.gpu_standin_describe()
        return text.decode()


class Nccl:
    """NCCL in one process, which is one rank."""

    def __init__(self) -> None:
        self.api = Library("libnccl.so.2")
        self.api.raw.ncclGetLastError.restype = ctypes.c_char_p

    def unique_id(self) -> UniqueId:
        made = UniqueId()
        self.api.ncclGetUniqueId(ctypes.byref(made))
        return made

    def init(self, ranks: int, unique_id: UniqueId, rank: int, config: Config | None = None) -> ctypes.c_void_p:
        """A communicator; with blocking=0 it may still be connecting."""
        comm = ctypes.c_void_p()
        code = self.api.raw.ncclCommInitRankConfig(
            ctypes.byref(comm), ranks, unique_id, rank, None if config is None else ctypes.byref(config)
        )
        if code not in (SUCCESS, IN_PROGRESS):
            raise CallError("ncclCommInitRankConfig", code)
        return comm

    def state(self, comm: ctypes.c_void_p) -> int:
        result = ctypes.c_int()
        self.api.ncclCommGetAsyncError(comm, ctypes.byref(result))
        return result.value

    def last_error(self, comm: ctypes.c_void_p) -> str:
        text: bytes = self.api.raw.ncclGetLastError(comm)
        return text.decode()

    def all_reduce(
        self, pointer: int, numel: int, dtype: str, op: int, comm: ctypes.c_void_p, stream: ctypes.c_void_p | None
    ) -> None:
        """In place."""
        self.api.ncclAllReduce(
            ctypes.c_void_p(pointer), ctypes.c_void_p(pointer), ctypes.c_size_t(numel), DTYPES[dtype], op, comm, stream
        )


def run_case(cases: Mapping[str, Callable[..., None]]) -> None:
    """Runs the case that the command line names, and leaves at once: streams may be waiting for a peer for ever."""
    status = 1
    try:
        cases[sys.argv[1]](*sys.argv[2:])
        status = 0
    except BaseException:  # noqa: BLE001 - the test reads it; the process ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
