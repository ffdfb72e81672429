"""A collective of gradwire's own in the shape that torch expects of a process group: a `Work` around a future."""

import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms.streams import IssuedWork

FutureTensors = torch.futures.Future[list[Tensor]]


class FutureWork(dist.Work):
    """What `dist.all_reduce(..., async_op=True)` returns.

    Args:
        future: Done when the collective is; its value is the list of output tensors, as DDP's reducer expects.
        passed: On CUDA, where the future is done as soon as all is issued: a moment behind the collective.
    """

    def __init__(self, future: FutureTensors, passed: torch.cuda.Event | IssuedWork | None = None) -> None:
        super().__init__()
        self._future = future
        self._passed = passed

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until done (CUDA: makes the current stream wait); raises what the collective raised.

        Args:
            timeout: None, zero or less waits as long as the group's own time-out allows.

        Raises:
            RuntimeError: The collective failed, or is not done within `timeout`.
        """
        if timeout is not None and timeout > timedelta(0) and not self._done_within(timeout):
            raise RuntimeError(
                f"`timeout` of {timeout.total_seconds():g} s has passed and the collective is not done: a "
                "rank is late or has issued other collectives"
            )
        self._future.wait()
        return True

    def get_future(self) -> FutureTensors:
        """The future whose value is the list of output tensors."""
        return self._future

    def is_completed(self) -> bool:
        """Whether `wait` would return (or raise) at once; on CUDA whether the device has come to its end."""
        if self._passed is not None:
            return bool(self._passed.query())
        return self._future.done()

    def wait_on_host(self) -> None:
        """Blocks the host until done, on CUDA too."""
        self.wait()
        if self._passed is not None:
            self._passed.synchronize()

    def is_success(self) -> bool:
        """Whether it is done and did not fail."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What `wait` would raise; None while under way and after success."""
        if self.is_completed():
            try:
                self._future.value()
            except RuntimeError as error:
                return error
        return None

    def result(self) -> list[Tensor]:
        """The output tensors of a collective that is done."""
        return self._future.value()

    def synchronize(self) -> None:
        """Makes the current CUDA stream wait for the collective; on the CPU the same as `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """See `synchronize`."""
        self.wait()

    def _done_within(self, timeout: timedelta) -> bool:
        done = threading.Event()
        self._future.add_done_callback(lambda _: done.set())
        return done.wait(timeout.total_seconds())


class WatchedWork(dist.Work):
    """The work of a collective of torch's own on a CPU, which hears of no failure but of its own connections.

    Args:
        work: What torch's group returned.
        carry_out: Waits for it, as long as the group's own time-out allows; see `Communicator.carry_out`.
    """

    def __init__(self, work: dist.Work, carry_out: Callable[[], object]) -> None:
        super().__init__()
        self._work = work
        self._carry_out = carry_out

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the results are there.

        Args:
            timeout: None or zero waits as long as the group's own time-out allows.

        Raises:
            RuntimeError: The collective failed, another rank has given up, or it is not done within `timeout`.
        """
        if timeout is not None and timeout > timedelta(0):
            self._work.wait(timeout)
        else:
            self._carry_out()
        return True

    def get_future(self) -> FutureTensors:
        """A future of the tensors that were written.

        Raises:
            RuntimeError: Torch's work has none.
        """
        return self._work.get_future()

    def is_completed(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Whether it is done and did not fail."""
        return self.is_completed() and self._work.is_success()

    def exception(self) -> Exception | None:
        """What `wait` would raise, as torch's work reports it."""
        error: Exception | None = self._work.exception()
        return error

    def result(self) -> list[Tensor]:
        """The tensors that were written."""
        return self._work.result()

    def synchronize(self) -> None:
        """The same as `wait`: the tensors are on the CPU."""
        self.wait()

    def block_current_stream(self) -> None:
        """See `synchronize`."""
        self.wait()

    def _source_rank(self) -> int:
        """Whose message has come, where that was left open."""
        return self._work._source_rank()


class PackedWork(WatchedWork):
    """The work of a collective that was given copies; the results are there once it is seen to be done.

    Not every work of gloo has a future (reduce_scatter's has none), so the first caller copies the results back.

    Args:
        work: The collective's.
        finish: Copies the results back and returns the tensors that were written; called once.
    """

    def __init__(self, work: dist.Work, finish: Callable[[], list[Tensor]]) -> None:
        super().__init__(work, work.wait)
        self._finish = finish
        self._lock = threading.Lock()
        self._outputs: list[Tensor] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See `WatchedWork.wait`."""
        super().wait(timeout)
        self.result()
        return True

    def get_future(self) -> FutureTensors:
        """See `WatchedWork.get_future`."""
        return super().get_future().then(self._after)

    def is_completed(self) -> bool:
        """Whether `wait` would return (or raise) at once; if so, the results are there."""
        done = super().is_completed()
        if done:
            self.result()
        return done

    def result(self) -> list[Tensor]:
        """The output tensors of a collective that is done."""
        with self._lock:
            if self._outputs is None:
                self._outputs = self._finish()
            return self._outputs

    def _after(self, done: FutureTensors) -> list[Tensor]:
        done.value()
        return self.result()


def finished(future: torch.futures.Future[Tensor], finish: Callable[[], list[Tensor]]) -> FutureTensors:
    """A future that runs `finish` (local copies only, never a collective) when `future` is done well.

    Returns:
        Its value is what `finish` returns; where `future` failed it raises with the same text.
    """

    def then(done: torch.futures.Future[Tensor]) -> list[Tensor]:
        done.value()
        return finish()

    return future.then(then)
