"""Runs broadcast, all_gather and reduce_scatter through shared memory if all ranks of a process group share one node.

The group has a thread and a segment of its own, made at its first collective, so it does not interfere with the
all-reduces of the communicator; the thread runs the collectives in the order of the calls. On several nodes
`PlannedCollectives` or torch's own group runs these collectives.
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
    """A collective in the queue of `NodeCollectives`' thread, and the future by which its caller learns the result.

    Args:
        run: Function of the ranks' `ShmGroup` that runs the collective through shared memory, and fills `outputs`.
        outputs: Tensors that are filled.

    Attributes:
        run: The function that runs the collective.
        outputs: Tensors that are filled.
        done: Future that the thread completes: its value is `outputs` or, after a failure, the exception.
    """

    def __init__(self, run: Callable[[ShmGroup], None], outputs: list[Tensor]) -> None:
        self.run = run
        self.outputs = outputs
        self.done: torch.futures.Future[list[Tensor] | BaseException] = torch.futures.Future()


class NodeCollectives:
    """Runs broadcast, all_gather and reduce_scatter between the ranks of one node, on a thread of its own.

    The data passes through shared memory. Every rank makes one object, and calls the same methods in the same order.
    Tensors are on the CPU, with any strides; they must not be touched until the returned future is done, whose value is
    the list of filled tensors. A method itself raises RuntimeError after `close`. What fails on the thread (connecting
    to the other ranks at the first collective, the collective itself) is raised by the future, as a RuntimeError with
    the error's text.

    Thread safety: one thread issues collectives; `abort` may be called from any thread.

    Args:
        communicator: Communicator of the ranks of the group, all on one node. It is aborted if a collective here fails
            because of another rank.
        store: Store that all ranks of the group share, with a prefix of its own.
        name: Name of the thread.
    """

    def __init__(self, communicator: Communicator, store: Store, name: str) -> None:
        self._communicator = communicator
        self._store = store
        self._rank = communicator.rank
        self._size = communicator.size
        self._name = name
        self._group: ShmGroup | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._in_flight: _Call | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failed: BaseException | None = None
        """Error that has ended the thread, after which every call fails with it; None while the thread serves."""

    def broadcast(self, tensor: Tensor, root: int) -> FutureTensors:
        """Copies `tensor` of rank `root` to all ranks, in place.

        Args:
            tensor: Any dtype; the same shape and dtype on all ranks. Overwritten on all ranks but `root`.
            root: Sending rank, in this group.
        """
        tensor = tensor.detach()

        def run(group: ShmGroup) -> None:
            flat = plain(tensor)
            group.broadcast(flat, root)
            if flat is not tensor and self._rank != root:
                overwrite(tensor, flat)

        return self._submit(run, [tensor])

    def all_gather(self, output: Tensor, source: Tensor) -> FutureTensors:
        """Fills `output` with every rank's `source`, in rank order.

        Args:
            output: Any shape with size * source.numel() elements, of the dtype of `source`.
            source: Any dtype; the same number of elements and dtype on all ranks.
        """
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
        """Fills `outputs[r]` with rank r's `source`.

        Args:
            outputs: One tensor for each rank, with the shape and dtype of `source`.
            source: Any dtype; the same shape and dtype on all ranks.
        """
        outputs, source = [output.detach() for output in outputs], source.detach()

        def run(group: ShmGroup) -> None:
            gathered = source.new_empty((self._size, *source.shape))
            group.all_gather(gathered, plain(source))
            for output, contribution in zip(outputs, gathered, strict=True):
                output.copy_(contribution)

        return self._submit(run, outputs)

    def reduce_scatter(self, output: Tensor, source: Tensor, scale: float) -> FutureTensors:
        """Fills `output` with this rank's part of the sum of `scale * source` over all ranks.

        Args:
            output: Any shape; part r of the sum goes to rank r.
            source: size * output.numel() elements of the dtype of `output`: a part for each rank, end to end. As before
                when the future is done, except where `output` overlaps it.
            scale: Factor on every rank's contribution; 1 for integers.
        """
        output, source, numel = output.detach(), source.detach(), output.numel()
        bounds = [numel * rank for rank in range(self._size + 1)]

        def run(group: ShmGroup) -> None:
            flat = plain(source).view(-1)
            own = flat[bounds[self._rank] : bounds[self._rank + 1]]
            if own.data_ptr() == output.data_ptr() and is_plain(output):
                group.reduce_scatter(flat, bounds, scale)
                return
            kept = own.clone()  # the sum is made in place, in this slice alone
            group.reduce_scatter(flat, bounds, scale)
            total = own.clone()  # `output` may overlap what is restored
            own.copy_(kept)
            output.copy_(total.view(output.shape))

        return self._submit(run, [output])

    def reduce_scatter_list(self, output: Tensor, sources: Sequence[Tensor], scale: float) -> FutureTensors:
        """Fills `output` on each rank r with the sum over all ranks of `scale * sources[r]`.

        Args:
            output: Tensor that is filled with this rank's part of the sum.
            sources: One tensor for each rank, with the number of elements of `output`; copied before this returns.
            scale: Factor on every rank's contribution; 1 for integers.
        """
        return self.reduce_scatter(output, torch.cat([source.detach().reshape(-1) for source in sources]), scale)

    def abort(self, reason: str) -> None:
        """Wakes the ranks that wait for this one in shared memory, and gives them the reason. Any thread may call it.

        Args:
            reason: Text of the error that those ranks raise.
        """
        if self._group is not None:
            self._group.abort(reason)

    def close(self) -> None:
        """Ends the thread after the calls in its queue, and releases the segment.

        If the thread still waits for another rank after five seconds, its collective is aborted.
        """
        self._closed = True
        if self._thread is not None:
            self._calls.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(timeout=5.0)
                if self._thread.is_alive():  # it waits for a rank that does not come
                    self.abort(f"rank {self._rank} has closed the process group while a collective was in flight")
                    self._thread.join(timeout=1.0)
        if self._group is not None:
            self._group.close()

    def _connect(self) -> ShmGroup:
        """Returns the group in shared memory; makes it at the first call, which waits for all ranks."""
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
        """Queues a collective, and starts the thread at the first call.

        Args:
            run: Runs the collective; called on the thread.
            outputs: Tensors that it fills.

        Returns:
            Future of `outputs`; if the collective failed, it raises a RuntimeError with the text of its error.

        Raises:
            RuntimeError: `close` was called before.
        """
        if self._closed:
            raise RuntimeError("gradwire is closed: close() was called, or its process group has been destroyed")
        call = _Call(run, outputs)
        future = call.done.then(_unwrap)
        if self._thread is None:
            self._thread = BackgroundThread(
                self._name,
                self._serve,
                without="collectives inside the node fail on this rank",
                on_failure=self._fail,
                end=partial(self._calls.put, None),
                give_up=partial(self.abort, f"the process of rank {self._rank} ends while a collective is in flight"),
            )
            self._thread.start()
        self._calls.put(call)
        if self._failed is not None:  # checked after the put: the thread may have ended just before it
            self._drain(self._failed)
        return future

    def _serve(self) -> None:
        """Runs the queued collectives in their order, until `close`; this is the thread."""
        while (call := self._calls.get()) is not None:
            self._in_flight = call
            self._run(call)
            self._in_flight = None
            del call  # it holds tensors

    def _run(self, call: "_Call") -> None:
        """Runs one collective on the calling thread, and completes its future with the filled tensors or the exception.

        It raises nothing. If the collective failed because of another rank, the communicator is aborted, so that ranks
        that wait elsewhere get the reason.

        Args:
            call: The collective.
        """
        try:
            with torch.inference_mode(any(output.is_inference() for output in call.outputs)), torch.no_grad():
                call.run(self._connect())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the future carries it
            try:
                if isinstance(error, PeerError):  # tells ranks that wait elsewhere the reason, not only that one ended
                    self._communicator.abort(f"rank {self._rank} gave up a collective of its node: {error}")
            finally:
                call.done.set_result(error)
        else:
            call.done.set_result(call.outputs)

    def _fail(self, error: BaseException) -> None:
        """Completes all queued calls with the error that has ended the thread, and aborts the waits of other ranks."""
        self._failed = error
        if (call := self._in_flight) is not None and not call.done.done():
            call.done.set_result(error)
        self._in_flight = None
        self._drain(error)
        self.abort(f"rank {self._rank} has given up collectives of its node: {error!r}")

    def _drain(self, error: BaseException) -> None:
        """Empties the queue, and completes each of its calls with the error."""
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if call is not None:
                call.done.set_result(error)


def _unwrap(done: "torch.futures.Future[list[Tensor] | BaseException]") -> list[Tensor]:
    """Returns the outputs of a done `_Call`, or raises the exception that is its future's value; for `Future.then`.

    The future that `then` returns raises this as a RuntimeError with the exception's text in its own: torch keeps
    neither the type nor the object (2.13 to 2.15).

    Args:
        done: Future `_Call.done`, which is always completed with a value.
    """
    value = done.value()
    if isinstance(value, BaseException):
        raise value
    return value
