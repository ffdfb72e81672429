"""Backend `nccl-raw`: NCCL without torch, through NVIDIA's own binding nccl4py, on the library that torch has loaded.

nccl4py first looks for a libnccl that the process has mapped, and torch has mapped its own, so that there are never two
versions in one process. Compared with `nccl`, this backend has no synchronization of torch's streams, no watchdog and
no work objects: the difference of the times is their cost. nccl4py examines its tensors in every call, which takes time
on the host; `-G` avoids that.

Source: NVIDIA NCCL documentation, "nccl4py": nccl.core, the only module whose interface is stable between versions.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from gradwire.bench.nccl_tests.backends.backend import REDUCTIONS, Issue
from gradwire.bench.nccl_tests.dtypes import ELEMENT_TYPES
from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.transport.works import Done

_DONE = Done()
_TYPES = (
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bfloat16,
)
_OPERATIONS = ("sum", "prod", "max", "min", "avg")


class RawCommunicator(Protocol):
    """Methods of nccl.core.Communicator that are used here; each returns as soon as its work is queued on `stream`."""

    def allreduce(self, sendbuf: Tensor, recvbuf: Tensor, op: object, *, stream: int) -> None:
        """Calls ncclAllReduce."""

    def reduce(self, sendbuf: Tensor, recvbuf: Tensor, op: object, root: int, *, stream: int) -> None:
        """Calls ncclReduce."""

    def reduce_scatter(self, sendbuf: Tensor, recvbuf: Tensor, op: object, *, stream: int) -> None:
        """Calls ncclReduceScatter."""

    def allgather(self, sendbuf: Tensor, recvbuf: Tensor, *, stream: int) -> None:
        """Calls ncclAllGather."""

    def broadcast(self, sendbuf: Tensor, recvbuf: Tensor, root: int, *, stream: int) -> None:
        """Calls ncclBroadcast."""

    def send(self, sendbuf: Tensor, peer: int, *, stream: int) -> None:
        """Calls ncclSend."""

    def recv(self, recvbuf: Tensor, peer: int, *, stream: int) -> None:
        """Calls ncclRecv."""

    def destroy(self) -> None:
        """Calls ncclCommDestroy, after the operations in flight have ended."""


def _load() -> ModuleType:
    """Imports nccl.core, and checks that it has found a libnccl.

    Raises:
        RuntimeError: nccl4py or libnccl is missing; the message says what to install.
    """
    try:
        nccl = importlib.import_module("nccl.core")
    except ImportError as error:
        raise RuntimeError(
            f"`--backend` is nccl-raw, but nccl4py cannot be imported ({error}): pip install nccl4py, "
            "and cuda-bindings where torch did not bring it"
        ) from error
    if nccl.get_version().libnccl is None:
        raise RuntimeError("`--backend` is nccl-raw, but nccl4py finds no libnccl.so.2: install a CUDA build of torch")
    return nccl


class NcclRawBackend:
    """Backend of one NCCL communicator of all ranks; all operations are queued on torch's current stream."""

    def __init__(self, nccl: ModuleType, communicator: RawCommunicator, rank: int, size: int) -> None:
        self.rank = rank
        self._size = size
        self._nccl = nccl
        self._communicator = communicator

    @classmethod
    def connect(cls, store: Store, rank: int, size: int, device: torch.device) -> "NcclRawBackend":
        """Makes the communicator. Collective.

        Args:
            store: Store that all ranks reach, for NCCL's unique ID.
            rank: This rank.
            size: Number of ranks.
            device: CUDA device of this rank, which must be the current one.

        Raises:
            RuntimeError: nccl4py or NCCL is missing, or NCCL reports an error.
        """
        torch.cuda.synchronize(device)  # makes the context, and has torch map its libnccl
        nccl = _load()
        if rank == 0:
            store.set("nccl-id", bytes(nccl.get_unique_id()).hex())
        unique = nccl.UniqueId.from_bytes(bytes.fromhex(store.get("nccl-id").decode()))
        return cls(nccl, nccl.Communicator.init(size, rank, unique), rank, size)

    def facts(self) -> dict[str, str]:
        """Returns the versions of NCCL and nccl4py, for the header of the table."""
        versions = self._nccl.get_version()
        return {"library": f"NCCL {versions.libnccl.version} through nccl4py {versions.nccl4py}"}

    def refusal(self, collective: str, element: str, operation: str) -> str | None:
        """Returns why NCCL cannot run this; None if it can."""
        if collective == "barrier":
            return "NCCL has no barrier"
        if collective not in REDUCTIONS:
            return None
        if ELEMENT_TYPES[element].torch not in _TYPES:
            return f"NCCL does not reduce {element}"
        return None if operation in _OPERATIONS else f"NCCL has no {operation}"

    def all_reduce(self, tensor: Tensor, operation: str) -> Issue:
        """Prepares ncclAllReduce of `tensor` on the current stream, in place."""
        op = self._operation(operation)
        return self._on_stream(lambda stream: self._communicator.allreduce(tensor, tensor, op, stream=stream))

    def reduce(self, tensor: Tensor, root: int, operation: str) -> Issue:
        """Prepares ncclReduce of `tensor` to the root on the current stream, in place."""
        op = self._operation(operation)
        return self._on_stream(lambda stream: self._communicator.reduce(tensor, tensor, op, root, stream=stream))

    def reduce_scatter(self, output: Tensor, source: Tensor, operation: str) -> Issue:
        """Prepares ncclReduceScatter of `source` into this rank's `output` on the current stream."""
        op = self._operation(operation)
        return self._on_stream(lambda stream: self._communicator.reduce_scatter(source, output, op, stream=stream))

    def all_gather(self, output: Tensor, source: Tensor) -> Issue:
        """Prepares ncclAllGather of every rank's `source` into `output` on the current stream, as bytes."""
        sent, received = _bytes(source), _bytes(output)
        return self._on_stream(lambda stream: self._communicator.allgather(sent, received, stream=stream))

    def broadcast(self, tensor: Tensor, root: int) -> Issue:
        """Prepares ncclBroadcast of `tensor` from the root on the current stream, as bytes."""
        data = _bytes(tensor)
        return self._on_stream(lambda stream: self._communicator.broadcast(data, data, root, stream=stream))

    def all_to_all(self, output: Tensor, source: Tensor) -> Issue:
        """Prepares an all-to-all as sends and receives in one group of calls, as nccl-tests does it."""
        sent, received = _bytes(source).chunk(self._size), _bytes(output).chunk(self._size)
        return self._exchange([(peer, sent[peer], peer, received[peer]) for peer in range(self._size)])

    def send_receive(self, output: Tensor, source: Tensor) -> Issue:
        """Prepares a send to the next rank and a receive from the previous one, in one group of calls."""
        return self._exchange(
            [((self.rank + 1) % self._size, _bytes(source), (self.rank - 1) % self._size, _bytes(output))]
        )

    def barrier(self) -> Issue:
        """Raises NotImplementedError; never called, because `refusal` excludes it."""
        raise NotImplementedError("NCCL has no barrier")

    def close(self) -> None:
        """Waits for the device, then destroys the communicator."""
        torch.cuda.synchronize()
        self._communicator.destroy()

    def _operation(self, operation: str) -> object:
        return getattr(self._nccl, operation.upper())

    def _on_stream(self, call: Callable[[int], None]) -> Issue:
        def issue() -> Done:
            call(torch.cuda.current_stream().cuda_stream)  # asked each time: a graph's capture has a stream of its own
            return _DONE

        return issue

    def _exchange(self, pairs: list[tuple[int, Tensor, int, Tensor]]) -> Issue:
        """Prepares sends and receives in one group of calls.

        Args:
            pairs: (rank to send to, tensor to send, rank to receive from, tensor to fill) of each exchange.
        """

        def call(stream: int) -> None:
            with self._nccl.group():
                for receiver, sent, sender, received in pairs:
                    self._communicator.send(sent, receiver, stream=stream)
                    self._communicator.recv(received, sender, stream=stream)

        return self._on_stream(call)


def _bytes(tensor: Tensor) -> Tensor:
    """Returns a view of a tensor as uint8, so that collectives which do not reduce take any element type."""
    return tensor.view(torch.uint8)
