"""broadcast, all_gather and reduce_scatter of a process group whose ranks all share one node: through shared memory.

The group has a thread and a segment of its own, made at its first collective, so it does not interfere with the
all-reduces of the communicator; the thread runs the collectives in the order of the calls. On several nodes these
collectives go to gloo or NCCL as they are.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from gradwire.comms.backend.strided import is_plain, overwrite, plain
from gradwire.comms.backend.work import FutureTensors
from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.bootstrap.threads import BackgroundThread
from gradwire.comms.communicator import Communicator
from gradwire.comms.errors import PeerError
from gradwire.comms.transport.shm import ShmGroup


class _Call:
    """A collective in the queue.

    Args:
        run: Carries it out.
        outputs: The tensors that it fills.

    Attributes:
        done: Its outputs, or what it has raised.
    """

    def __init__(self, run: Callable[[ShmGroup], None], outputs: list[Tensor]) -> None:
        self.run = run
        self.outputs = outputs
        self.done: torch.futures.Future[list[Tensor] | BaseException] = torch.futures.Future()


class NodeCollectives:
    """One rank's end; every rank calls the same methods in the same order, with CPU tensors of any dtype and strides.

    Args:
        communicator: Of the ranks of the group, all on one node. It is given up with these collectives.
        store: A store that all ranks of the group share, with a prefix of its own.
        name: Names the thread.
    """

    def __init__(self, communicator: Communicator, store: Store, name: str) -> None:
        self._communicator = communicator
        self._store = store
        self._rank = communicator.rank
        self._size = communicator.size
        self._name = name
        self._group: ShmGroup | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._under_way: _Call | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failed: BaseException | None = None
        """What has ended the thread; then no call is carried out any more."""

    def broadcast(self, tensor: Tensor, root: int) -> FutureTensors:
        """Copies `tensor` of rank `root` to all ranks, in place."""
        tensor = tensor.detach()

        def run(group: ShmGroup) -> None:
            flat = plain(tensor)
            group.broadcast(flat, root)
            if flat is not tensor and self._rank != root:
                overwrite(tensor, flat)

        return self._submit(run, [tensor])

    def all_gather(self, output: Tensor, source: Tensor) -> FutureTensors:
        """Fills `output` (numel = size * source.numel()) with every rank's `source`, in rank order."""
        output, source = output.detach(), source.detach()

        def run(group: ShmGroup) -> None:
            gathered = (
                output if is_plain(output) else torch.empty(output.shape, dtype=output.dtype, device=output.device)
            )
            group.all_gather(gathered, plain(source))
            if gathered is not output:
                output.copy_(gathered)

        return self._submit(run, [output])

    def all_gather_list(self, outputs: list[Tensor], source: Tensor) -> FutureTensors:
        """Fills `outputs[r]` with rank r's `source`, all of one shape."""
        outputs, source = [output.detach() for output in outputs], source.detach()

        def run(group: ShmGroup) -> None:
            gathered = source.new_empty((self._size, *source.shape))
            group.all_gather(gathered, plain(source))
            for output, contribution in zip(outputs, gathered, strict=True):
                output.copy_(contribution)

        return self._submit(run, outputs)

    def reduce_scatter(self, output: Tensor, source: Tensor, scale: float) -> FutureTensors:
        """Fills `output` with this rank's part of the sum of `scale * source`.

        Args:
            output: Takes this rank's part.
            source: numel = size * output.numel(); unchanged afterwards (but where `output` is a part of it).
            scale: Factor on every rank's contribution; 1 for integers.
        """
        output, source, numel = output.detach(), source.detach(), output.numel()
        bounds = [numel * rank for rank in range(self._size + 1)]

        def run(group: ShmGroup) -> None:
            flat = source.contiguous().view(-1)
            own = flat[bounds[self._rank] : bounds[self._rank + 1]]
            if own.data_ptr() == output.data_ptr() and output.is_contiguous():
                group.reduce_scatter(flat, bounds, scale)
                return
            kept = own.clone()  # the sum is made in place, in this slice alone
            group.reduce_scatter(flat, bounds, scale)
            output.copy_(own.view(output.shape))
            own.copy_(kept)

        return self._submit(run, [output])

    def reduce_scatter_list(self, output: Tensor, sources: Sequence[Tensor], scale: float) -> FutureTensors:
        """As `reduce_scatter`, with one tensor for each rank; `sources` are copied."""
        return self.reduce_scatter(output, torch.cat([source.detach().reshape(-1) for source in sources]), scale)

    def abort(self, reason: str) -> None:
        """Wakes the ranks that wait for this one and gives them the reason. Any thread."""
        if self._group is not None:
            self._group.abort(reason)

    def close(self) -> None:
        """Ends the thread after the calls it holds, and releases the segment."""
        self._closed = True
        if self._thread is not None:
            self._calls.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(timeout=5.0)
                if self._thread.is_alive():  # it waits for a rank that does not come
                    self.abort(f"rank {self._rank} has closed the process group while a collective was under way")
                    self._thread.join(timeout=1.0)
        if self._group is not None:
            self._group.close()

    def _connect(self) -> ShmGroup:
        if self._group is None:
            self._group = ShmGroup.create(
                self._store,
                self._rank,
                self._size,
                key="node",
                timeout=self._communicator.config.timeout,
                peer_wait=self._communicator.peer_wait(),
            )
        return self._group

    def _submit(self, run: Callable[[ShmGroup], None], outputs: list[Tensor]) -> FutureTensors:
        if self._closed:
            raise RuntimeError("gradwire is closed: its process group has been destroyed")
        call = _Call(run, outputs)
        future = call.done.then(_unwrap)
        if self._thread is None:
            self._thread = BackgroundThread(
                self._name,
                self._serve,
                without="collectives inside the node fail on this rank",
                on_failure=self._fail,
                end=partial(self._calls.put, None),
                give_up=partial(self.abort, f"the process of rank {self._rank} ends while a collective is under way"),
            )
            self._thread.start()
        self._calls.put(call)
        if self._failed is not None:  # looked at behind the line above, so that the call does not stay there
            self._drain(self._failed)
        return future

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            self._under_way = call
            self._run(call)
            self._under_way = None
            del call  # it holds tensors

    def _run(self, call: "_Call") -> None:
        try:
            with torch.inference_mode(any(output.is_inference() for output in call.outputs)), torch.no_grad():
                call.run(self._connect())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the future carries it
            try:
                if isinstance(error, PeerError):  # or who waits elsewhere would hear of this rank's end alone
                    self._communicator.abort(f"rank {self._rank} gave up a collective of its node: {error}")
            finally:
                call.done.set_result(error)
        else:
            call.done.set_result(call.outputs)

    def _fail(self, error: BaseException) -> None:
        """Gives the error to all who wait, here and on the other ranks."""
        self._failed = error
        if (call := self._under_way) is not None and not call.done.done():
            call.done.set_result(error)
        self._under_way = None
        self._drain(error)
        self.abort(f"rank {self._rank} has given up collectives of its node: {error!r}")

    def _drain(self, error: BaseException) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if call is not None:
                call.done.set_result(error)


def _unwrap(done: "torch.futures.Future[list[Tensor] | BaseException]") -> list[Tensor]:
    """Raise the error of a future inside `.then`, so that torch keeps its message."""
    value = done.value()
    if isinstance(value, BaseException):
        raise value
    return value
