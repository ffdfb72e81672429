"""Works of CPU transports: objects that are waited for, and combinations of them.

`Waiting` gives a work of gloo a deadline and makes it react to an abort signal. `Works` joins several works, `Then`
runs a function on the bytes that arrived, and `Done` is the work of an operation that has returned its result.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch import Tensor

from gradwire.comms.bootstrap.compat import BackendWork
from gradwire.comms.errors import OverdueError, PeerError
from gradwire.compressors.base import Work

log = logging.getLogger("gradwire")

Aborted = Callable[[], str | None]
"""Returns the reason why another rank has aborted; None while none has."""

SLICE = timedelta(seconds=1)
"""Time between two checks during a wait whether another rank has aborted: one request to the store a second for each
waiting lane."""

WAIT_MARGIN = timedelta(seconds=30)
"""Longest time by which a wait of the backend outlasts the group's time-out. The wait below it ends by that time-out
and then asks the other ranks who is missing (`failure_reporter.PATIENCE` and more); their answers explain more than
this wait could."""

MAKING_MARGIN = timedelta(seconds=5)
"""Time by which the wait for a work of gloo outlasts the time-out. Gloo's own error, which names a connection, comes
first unless gloo's threads are all busy."""

CLOSE_SECONDS = 5.0
"""Longest time that closing a transport waits for collectives in flight and for the other ranks to finish. Far longer
than a bucket takes, and than the time between ranks that leave a step together."""


LEAST_DRAIN_SECONDS = 0.05
"""Time that each work in flight is given at least, after the time of all has passed: long enough for a failed one to
raise."""


class Done:
    """A work that was finished when it was returned."""

    def wait(self) -> None:
        """Returns at once."""


class Works:
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Waits for all of them, in order; the first error is raised at once."""
        for work in self._works:
            work.wait()


@dataclass(slots=True, eq=False)
class Waiting:
    """A work of gloo whose wait has a deadline and ends if another rank aborts.

    Attributes:
        work: Work of torch.
        abort_reason: Called about once a second during the wait. None: the wait goes on until gloo's own time-out.
        timeout: Time-out of the group, for every collective.
        in_flight: The transport's works by id, from which this one is removed when gloo has finished with its tensors.
            An abandoned wait leaves it there: gloo's threads may still read bytes that had arrived, or add them up.
    """

    work: BackendWork
    abort_reason: Aborted | None
    timeout: timedelta
    in_flight: dict[int, BackendWork] | None = None

    def wait(self) -> None:
        """Waits for gloo's work, and asks once a second whether another rank has aborted, if `abort_reason` is given.

        Raises:
            RuntimeError: Gloo's own error; without `abort_reason` also gloo's own time-out.
            OverdueError: `timeout` and `MAKING_MARGIN` are over.
            PeerError: Another rank has aborted.
        """
        if self.abort_reason is None:
            self.work.wait(self.timeout)
            return
        if not wait_in_slices(self.work, self.timeout + MAKING_MARGIN, self.abort_reason):
            raise OverdueError(
                f"a collective of gloo was not done within `timeout` ({self.timeout.total_seconds():g} s): a rank is "
                "late, or has issued another collective"
            )
        if self.in_flight is not None:
            self.in_flight.pop(id(self.work), None)


def wait_in_slices(work: BackendWork, limit: timedelta, abort_reason: Aborted) -> bool:
    """Waits for a work of gloo, and asks once a second whether another rank has aborted.

    Args:
        work: Work of torch.
        limit: Longest time. A wait that gloo does not cut short (reduce_scatter's) ends by gloo's own time-out.
        abort_reason: Returns the reason why another rank has aborted.

    Returns:
        True if the work is done, False if `limit` is over.

    Raises:
        RuntimeError: Gloo's own error.
        PeerError: Another rank has aborted.
    """
    deadline = time.monotonic() + limit.total_seconds()
    while True:
        began = time.monotonic()
        part = min(SLICE.total_seconds(), max(deadline - began, 0.001))
        try:
            work.wait(timedelta(seconds=part))
            return True
        except RuntimeError:
            # A time-out and a failure both raise here. A failed work raises at once when it is waited for again; not
            # every work of gloo says by `is_completed` that it has failed.
            if work.is_completed() or time.monotonic() - began < part / 2:
                work.wait(timedelta(seconds=part))  # raises the failure, unless the work is done by now
                return True
            if reason := abort_reason():
                raise PeerError(reason) from None
            if time.monotonic() >= deadline:
                return False


def drain(works: dict[int, BackendWork], seconds: float) -> bool:
    """Waits until gloo's threads have finished with the tensors of works whose wait was abandoned, or never began.

    Shutting down a connection does not end a work at once: bytes that had arrived before are still read into the
    work's tensors, and a sum that has begun is completed. The tensors are gradients, which elastic training sends again
    from the same memory, so nothing may write to them then.

    Args:
        works: Works by id; those that have ended are removed.
        seconds: Longest wait in all.

    Returns:
        True if all have ended, with or without an error; False if time was over before.
    """
    deadline = time.monotonic() + seconds
    for key, work in list(works.items()):
        try:
            left = max(deadline - time.monotonic(), LEAST_DRAIN_SECONDS)
            if not wait_in_slices(work, timedelta(seconds=left), lambda: None):
                return False
        except RuntimeError as error:
            log.debug("a collective in flight has ended: %s", error)
        works.pop(key, None)
    return True


class Then:
    """A work with a second part that runs once, inside the first `wait`.

    Args:
        work: The work that comes first.
        follow: Second part, such as the sum of the tensors that arrived; None: there is none. It may change tensors
            in place, so it must not run again.
        held: Tensor that the work reads, kept alive as long as this object.
    """

    def __init__(self, work: Work, follow: Callable[[], None] | None = None, held: Tensor | None = None) -> None:
        self._work = work
        self._follow = follow
        self._held = held

    def wait(self) -> None:
        """Waits for the work, then runs what follows it, once."""
        self._work.wait()
        follow, self._follow = self._follow, None
        if follow is not None:
            follow()
