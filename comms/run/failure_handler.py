"""Handling of the first failure on a rank: everything is aborted, and the other ranks are asked what they saw."""

import logging
import threading
from collections.abc import Callable, Sequence

from gradwire.comms.bootstrap.failure_reporter import CollectiveError, FailureReporter
from gradwire.comms.transport.groups import Groups

log = logging.getLogger("gradwire")


class FailureHandler:
    """What has failed first on this rank, with what the other ranks say about it. Any thread.

    Args:
        groups: Aborted, so that nobody waits for this rank any more.
        reporter: Where ranks that survive a failure exchange what they saw.
        rank: This rank.
        device_state: On CUDA: how many launches have been started, and whether the device waits for others.

    Attributes:
        error: The diagnosis; None while nothing has failed.
        tell: Called with it, once: for ranks that wait for this one elsewhere.
        wake: Called before the others are asked, who may wait for this rank in what is in none of the groups.
    """

    def __init__(
        self,
        groups: Groups,
        reporter: FailureReporter,
        rank: int,
        device_state: Callable[[], tuple[int, bool]] = lambda: (0, True),
    ) -> None:
        self.error: CollectiveError | None = None
        self.tell: Callable[[CollectiveError], object] = lambda error: None
        self.wake: Callable[[], object] = lambda: None
        self._groups = groups
        self._reporter = reporter
        self._rank = rank
        self._device_state = device_state
        self._diagnosing = threading.Lock()

    def fail(
        self, where: str, members: Sequence[int], error: BaseException, first: Callable[[], None] = lambda: None
    ) -> CollectiveError:
        """Ends everything because a collective has failed, and says what happened to the ranks.

        Args:
            where: Which collective, in words.
            members: The ranks that an error's `missing` are indices of.
            error: What it raised.
            first: Done before anything else if nothing has failed before.

        Returns:
            The diagnosis of the first failure: one that comes of it takes it too.
        """
        with self._diagnosing:
            if self.error is not None:
                return self.error
            first()
            found = self.error = self._diagnose(where, members, error)
            log.error("%s", found)
        self.tell(found)
        return found

    def give_up(self, error: CollectiveError) -> None:
        """Ends everything without asking the other ranks, because this one leaves; wakes whoever waits in the groups.

        Args:
            error: What the futures of what is under way raise, unless something has failed before.
        """
        if self.error is None:
            self.error = error
        self._groups.abort(str(error))
        self.wake()
        self._reporter.signal_abort(str(error))

    def diagnosed(self) -> CollectiveError | None:
        """The same as `error`, once a diagnosis that is under way has ended."""
        with self._diagnosing:
            return self.error

    def forget_frames(self) -> None:
        """Drops the traceback: futures keep the error, and its frames what was under way, gloo's works and so on."""
        if self.error is not None:
            self.error.__traceback__ = self.error.__context__ = None

    def _diagnose(self, where: str, members: Sequence[int], error: BaseException) -> CollectiveError:
        try:
            launches, waiting = self._device_state()
            self._groups.abort(f"rank {self._reporter.rank} gave up in {where}: {error}")
            self.wake()
            return self._reporter.diagnose(error, where, members, launches=launches, waiting=waiting)
        except Exception as second:  # noqa: BLE001 - or nobody would hear of the first
            return CollectiveError(
                f"{where} failed on rank {self._rank} ({type(error).__name__}: {error}), and asking the other ranks "
                f"failed too ({type(second).__name__}: {second})",
                (),
            )
