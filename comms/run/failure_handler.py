"""Handles the first failure on a rank: aborts everything, and makes a diagnosis from the reports of all ranks."""

import logging
import threading
from collections.abc import Callable, Sequence

from gradwire.comms.bootstrap.failure_reporter import CollectiveError, FailureReporter
from gradwire.comms.transport.groups import Groups

log = logging.getLogger("gradwire")


class FailureHandler:
    """Keeps the first failure of this rank with a diagnosis from all ranks, and aborts everything else because of it.

    Thread safety: all methods may be called from any thread; the first call of `fail` or `leave` decides.

    Args:
        groups: Transports to abort, so that no rank waits for this one.
        reporter: Exchanges reports between ranks that survive a failure, to find the cause.
        rank: This rank.
        device_state: On CUDA, returns the number of all-reduces started and whether the device waits for other ranks.

    Attributes:
        error: The first failure: a diagnosis, or what `leave` was given; None as long as nothing has failed.
        on_failure: Called once with the diagnosis, to abort groups of other ranks that wait for this one.
        wake: Called before the other ranks are asked, to end waits for this rank that `groups` knows nothing of.
    """

    def __init__(
        self,
        groups: Groups,
        reporter: FailureReporter,
        rank: int,
        device_state: Callable[[], tuple[int, bool]] = lambda: (0, True),
    ) -> None:
        self.error: CollectiveError | None = None
        # An atomic call decides which failure is first: the garbage collector may run a finalizer that calls `leave`.
        self._first: dict[str, CollectiveError] = {}
        self.on_failure: Callable[[CollectiveError], object] = lambda error: None
        self.wake: Callable[[], object] = lambda: None
        self._groups = groups
        self._reporter = reporter
        self._rank = rank
        self._device_state = device_state
        # Held during a diagnosis, which may take seconds: `fail` makes one only. It is the outermost lock of this rank:
        # a diagnosis takes others, and no caller of `fail` holds one.
        self._diagnosing = threading.Lock()

    def fail(
        self, where: str, members: Sequence[int], error: BaseException, first: Callable[[], None] = lambda: None
    ) -> CollectiveError:
        """Aborts everything because a collective has failed, and asks the other ranks for a diagnosis.

        It waits for their reports, which may take some seconds, and logs the diagnosis. After an earlier failure it
        aborts and asks nothing, and waits only for a diagnosis in progress.

        Args:
            where: Name of the collective, for the message.
            members: Ranks of the collective, by their numbers in this communicator, as are those of `error.missing`.
            error: Error that the collective raised.
            first: Called before anything else, if nothing has failed before.

        Returns:
            The diagnosis of the first failure, also for failures that follow from it.
        """
        with self._diagnosing:
            if self.error is not None:
                return self.error
            first()
            found = self.error = self._first.setdefault("error", self._diagnose(where, members, error))
            log.error("%s", found)
        self.on_failure(found)
        return found

    def leave(self, error: CollectiveError) -> None:
        """Aborts everything without a diagnosis because this rank leaves; ends the waits of other ranks for it.

        Args:
            error: Error for the futures of everything in flight, unless something has failed before.
        """
        self.error = self._first.setdefault("error", error)
        self._groups.abort(str(error))
        self.wake()
        self._reporter.signal_abort(str(error))

    def diagnosed(self) -> CollectiveError | None:
        """Returns `error`, after waiting for a diagnosis that is in progress; None if nothing has failed."""
        with self._diagnosing:
            return self.error

    def forget_frames(self) -> None:
        """Drops the traceback of `error`: futures keep the error, and its frames would keep everything in flight."""
        if self.error is not None:
            self.error.__traceback__ = self.error.__context__ = None

    def _diagnose(self, where: str, members: Sequence[int], error: BaseException) -> CollectiveError:
        """Aborts the groups, collects the reports of the other ranks, and returns the error to raise.

        Args:
            where: Name of the collective that has failed on this rank, for the message.
            members: Ranks of that collective, by their numbers in this communicator, as are those of `error.missing`.
            error: Error that the collective raised.

        Returns:
            The diagnosis; if the reports cannot be collected, an error that names both failures.
        """
        try:
            launches, waiting = self._device_state()
            self._groups.abort(f"rank {self._reporter.rank} aborted in {where}: {error}")
            self.wake()
            return self._reporter.diagnose(error, where, members, launches=launches, waiting=waiting)
        except Exception as second:  # noqa: BLE001 - the first failure must be reported in any case
            return CollectiveError(
                f"{where} failed on rank {self._rank} ({type(error).__name__}: {error}), and asking the other ranks "
                f"failed too ({type(second).__name__}: {second})",
                (),
            )
