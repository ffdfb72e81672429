"""A collective of gradwire's own in the shape that torch expects of a process group: a `Work` around a future."""

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


class FutureWork(dist.Work):
    """What `dist.all_reduce(..., async_op=True)` returns.

    Args:
        future: Done when the collective is; its value is the list of output tensors, as DDP's reducer expects.
        timeout: The group's: `wait` ends by then and `WAIT_MARGIN`.
        passed: On CUDA, where the future is done as soon as all is issued: a moment behind the collective.
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
            timeout: None, zero or less waits as long as the group's own time-out and `WAIT_MARGIN` allow.

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
        """The future whose value is the list of output tensors."""
        return self._future

    def is_completed(self) -> bool:
        """Whether `wait` would return (or raise) at once; on CUDA whether the device has come to its end."""
        if self._passed is not None:
            return bool(self._passed.query())
        return self._future.done()

    def wait_on_host(self, timeout: timedelta | None = None) -> None:
        """Blocks the host until done, on CUDA too; the time-out as of `wait`."""
        self.wait(timeout)
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
        wait: Waits for it so many seconds, or as long as the group's own time-out allows; see
            `Communicator.run_collective`.
    """

    def __init__(self, work: dist.Work, wait: Callable[[float | None], object]) -> None:
        super().__init__()
        self._work = work
        self._wait = wait
        self._ended = False
        """Whether it was waited for until its end: some of gloo's works never say so themselves."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the results are there.

        Args:
            timeout: None or zero waits as long as the group's own time-out allows.

        Raises:
            RuntimeError: The collective failed, another rank has given up, or it is not done within `timeout`.
        """
        try:
            self._wait(timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None)
        except UnfinishedError:  # goes on
            raise
        except BaseException:
            self._ended = True
            raise
        self._ended = True
        return True

    def get_future(self) -> FutureTensors:
        """A future of the tensors that were written.

        Raises:
            RuntimeError: Torch's work has none.
        """
        return self._work.get_future()

    def is_completed(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self._ended or bool(self._work.is_completed())

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


def _wait_for(work: dist.Work, seconds: float | None) -> None:
    """Waits for a work of the inner group, which has a deadline of its own where no seconds are given."""
    if seconds is None:
        work.wait()
    else:
        work.wait(timedelta(seconds=seconds))


class PackedWork(WatchedWork):
    """The work of a collective that was given copies; the results are there once it is seen to be done.

    Not every work of gloo has a future (reduce_scatter's has none), so the first caller copies the results back.

    Args:
        work: The collective's.
        finish: Copies the results back and returns the tensors that were written; called once.
    """

    def __init__(self, work: dist.Work, finish: Callable[[], list[Tensor]]) -> None:
        super().__init__(work, partial(_wait_for, work))
        self._finish = finish
        self._lock = threading.Lock()  # Guards _outputs: `finish` is called once.
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
