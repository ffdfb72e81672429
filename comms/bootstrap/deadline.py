"""Timeout of work on a device, which no transport can interrupt."""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch

from gradwire.comms.bootstrap.failures import OVERDUE, PeerFailure


class Deadline:
    """Reports device work, such as a CUDA event or a collective, that is in flight for longer than a timeout.

    Thread safety: all methods may be called from any thread.

    Args:
        timeout: Time for each piece of work.
        device: CUDA device of the work; None if querying it needs none.
    """

    def __init__(self, timeout: timedelta, device: torch.device | None = None) -> None:
        self._seconds = timeout.total_seconds()
        self._device = device
        self._marks: deque[tuple[float, Callable[[], bool]]] = deque()
        self._lock = threading.Lock()  # Guards _marks.

    def watch(self, has_passed: Callable[[], bool]) -> None:
        """Starts the timeout of a piece of work that was just issued. Work must complete in the order of these calls.

        Args:
            has_passed: Returns whether it has completed: `query` of an event, `is_completed` of a collective.
        """
        with self._lock:
            self._drop_passed()
            self._marks.append((time.monotonic(), has_passed))

    @property
    def is_in_flight(self) -> bool:
        """Returns whether some of the work has not completed yet."""
        with self._lock:
            self._drop_passed()
            return bool(self._marks)

    def overdue(self) -> PeerFailure | None:
        """Returns the failure to report if the oldest work has exceeded its timeout, else None.

        The device is asked only after the timeout: a query from another thread would break the capture of a CUDA graph
        that the user makes between two steps.
        """
        with self._lock:
            if not self._is_late():
                return None
            with self._on_device():
                self._drop_passed()
            if not self._is_late():
                return None
        reason = f"no progress for {self._seconds:g} s: a rank is late, or has issued other collectives"
        return PeerFailure(reason, OVERDUE)

    def _is_late(self) -> bool:
        return bool(self._marks) and time.monotonic() - self._marks[0][0] >= self._seconds

    def _drop_passed(self) -> None:
        while self._marks and self._marks[0][1]():
            self._marks.popleft()

    def _on_device(self) -> AbstractContextManager[object]:
        """Selects the device: a thread that has not would create a context on the first device."""
        return nullcontext() if self._device is None else torch.cuda.device(self._device)
