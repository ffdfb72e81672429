"""Wraps collectives in the `Work` objects that torch expects of a process group."""

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms.errors import UnfinishedError
from gradwire.comms.streams import IssuedWork
from gradwire.comms.transport.works import WAIT_MARGIN

FutureTensors = torch.futures.Future[list[Tensor]]
"""Future whose value is the list of a collective's output tensors."""


class FutureWork(dist.Work):
    """Wraps the future of a collective of gradwire's own; `dist.all_reduce(..., async_op=True)` returns it.

    Args:
        future: Future that is done when the collective is (CUDA: when all of it has been issued). Its value is the list
            of output tensors, as DDP's reducer expects.
        timeout: Timeout of the group; `wait` ends at the latest after it and `WAIT_MARGIN`.
        passed: On CUDA, an event or a work that is reached when the device has done the collective; None on CPUs.
    """

    def __init__(
        self, future: FutureTensors, timeout: timedelta, passed: torch.cuda.Event | IssuedWork | None = None
    ) -> None:
        super().__init__()
        self._future = future
        self._timeout = timeout
        self._passed = passed

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until done (CUDA: makes the current stream wait); raises what the collective raised.

        Args:
            timeout: Longest wait; None, zero or less takes the group's timeout and `WAIT_MARGIN`.

        Returns:
            True.

        Raises:
            RuntimeError: The collective failed, or is not done in time.
        """
        given = timeout is not None and timeout > timedelta(0)
        limit = timeout if timeout is not None and given else self._timeout + WAIT_MARGIN
        if not self._future.done() and not self._done_within(limit):
            raise RuntimeError(
                f"`timeout` of {(limit if given else self._timeout).total_seconds():g} s has passed and the collective "
                "is not done: a rank is late or has issued other collectives"
            )
        self._future.wait()  # done: raises what it holds, and on CUDA has the stream wait
        return True

    def get_future(self) -> FutureTensors:
        """Returns the future whose value is the list of output tensors."""
        return self._future

    def is_completed(self) -> bool:
        """Returns whether `wait` would return (or raise) at once; on CUDA, whether the device is done with it."""
        if self._passed is not None:
            return bool(self._passed.query())
        return self._future.done()

    def wait_on_host(self, timeout: timedelta | None = None) -> None:
        """Blocks the host until the collective is done, also on CUDA.

        Args:
            timeout: Longest wait, as for `wait`; on CUDA it does not limit the wait for the device.

        Raises:
            RuntimeError: The collective failed, or is not done in time.
        """
        self.wait(timeout)
        if self._passed is not None:
            self._passed.synchronize()

    def is_success(self) -> bool:
        """Returns whether the collective is done and did not fail."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Returns what `wait` would raise; None while the collective is in flight and after success."""
        if self.is_completed():
            try:
                self._future.value()
            except RuntimeError as error:
                return error
        return None

    def result(self) -> list[Tensor]:
        """Returns the output tensors; the collective must be done, and its error is raised if it failed."""
        return self._future.value()

    def synchronize(self) -> None:
        """Makes the current CUDA stream wait for the collective; on the CPU the same as `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Makes the current CUDA stream wait for the collective; on the CPU, waits for it."""
        self.wait()

    def _done_within(self, timeout: timedelta) -> bool:
        """Waits for the future, and returns whether it is done before the timeout.

        Args:
            timeout: Longest wait; zero does not wait, and returns whether the future is done now.
        """
        done = threading.Event()
        self._future.add_done_callback(lambda _: done.set())
        return done.wait(timeout.total_seconds())


class WatchedWork(dist.Work):
    """Wraps the work of torch's own collective on a CPU, so that `wait` also ends when another rank reports a failure.

    Torch's own work notices only failures of its connections.

    Args:
        work: Work that torch's group returned.
        wait: Waits for `work`, for the given seconds or, given None, as long as the group's timeout allows; see
            `Communicator.run_collective`. Raises if the collective failed or time is up.
    """

    def __init__(self, work: dist.Work, wait: Callable[[float | None], object]) -> None:
        super().__init__()
        self._work = work
        self._wait = wait
        self._ended = False
        """True once a wait has reached the collective's end; some of gloo's works never report that themselves."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the results are there.

        Args:
            timeout: Longest wait; None, zero or less takes the group's timeout.

        Returns:
            True.

        Raises:
            RuntimeError: The collective failed, or another rank has aborted; UnfinishedError if `timeout` has passed,
                after which the collective goes on and can be waited for again.
        """
        try:
            self._wait(timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None)
        except UnfinishedError:  # still in flight
            raise
        except BaseException:
            self._ended = True
            raise
        self._ended = True
        return True

    def get_future(self) -> FutureTensors:
        """Returns the future of the output tensors.

        Raises:
            RuntimeError: Torch's work has no future.
        """
        return self._work.get_future()

    def is_completed(self) -> bool:
        """Returns whether `wait` would return (or raise) at once."""
        return self._ended or bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Returns whether the collective is done and did not fail."""
        return self.is_completed() and self._work.is_success()

    def exception(self) -> Exception | None:
        """Returns the error that torch's work reports; None if there is none."""
        error: Exception | None = self._work.exception()
        return error

    def result(self) -> list[Tensor]:
        """Returns the output tensors."""
        return self._work.result()

    def synchronize(self) -> None:
        """Does what `wait` does: the tensors are on the CPU."""
        self.wait()

    def block_current_stream(self) -> None:
        """Does what `wait` does: the tensors are on the CPU."""
        self.wait()

    def _source_rank(self) -> int:
        """Returns the rank whose message was received, for a receive from any rank."""
        return self._work._source_rank()


def _wait_for(work: dist.Work, seconds: float | None) -> None:
    """Waits for a work of the inner group.

    Args:
        work: The work.
        seconds: Longest wait; None takes the work's own timeout.
    """
    if seconds is None:
        work.wait()
    else:
        work.wait(timedelta(seconds=seconds))


class PackedWork(WatchedWork):
    """Wraps the work of a collective that runs on copies of the user's tensors, and copies the results back.

    Not every work of gloo has a future (reduce_scatter's has none), so the results are copied back by the first call of
    `wait`, `is_completed` or `result` that finds the collective done, or by the future.

    Thread safety: all methods may be called from any thread.

    Args:
        work: Work of the collective on the copies.
        finish: Copies the results back, and returns the user's output tensors; called once.
    """

    def __init__(self, work: dist.Work, finish: Callable[[], list[Tensor]]) -> None:
        super().__init__(work, partial(_wait_for, work))
        self._finish = finish
        self._lock = threading.Lock()  # Guards _outputs, so that `finish` is called once.
        self._outputs: list[Tensor] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the collective, then copies the results back to the user's tensors."""
        super().wait(timeout)
        self.result()
        return True

    def get_future(self) -> FutureTensors:
        """Returns a future of the user's tensors, completed after the results are copied back."""
        return super().get_future().then(self._after)

    def is_completed(self) -> bool:
        """Returns whether `wait` would return (or raise) at once; if so, the results have been copied back."""
        done = super().is_completed()
        if done:
            self.result()
        return done

    def result(self) -> list[Tensor]:
        """Returns the user's output tensors, with the results copied back; the collective must be done."""
        with self._lock:
            if self._outputs is None:
                self._outputs = self._finish()
            return self._outputs

    def _after(self, done: FutureTensors) -> list[Tensor]:
        """Copies the results back when the future is done, or raises its error; for `Future.then`."""
        done.value()
        return self.result()


def finished(future: torch.futures.Future[Tensor], finish: Callable[[], list[Tensor]]) -> FutureTensors:
    """Returns a future that runs `finish` when another one has succeeded.

    Args:
        future: Future of a collective.
        finish: Copies results on this rank, and returns the output tensors; must not start a collective.

    Returns:
        Future with the value of `finish`. If `future` failed, it raises an error with the same text.
    """

    def then(done: torch.futures.Future[Tensor]) -> list[Tensor]:
        done.value()
        return finish()

    return future.then(then)
