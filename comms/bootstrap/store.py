"""A store whose waits do not hold the connection: several threads can wait on it at the same time.

A client of torch's TCPStore is one connection with one lock. A thread that waits for a key keeps the other threads of
its process from setting theirs, so two lanes (or two models) that connect in different order on two ranks would wait
for each other. A client each (`Store.clone()`) costs a connection each, and bursts of them stall for five seconds (seen
on torch 2.13); looking again every few milliseconds costs neither.
"""

import time
from collections.abc import Sequence
from datetime import timedelta

from gradwire.comms.bootstrap.compat import Store

FIRST_NAP_SECONDS = 0.001
LONGEST_NAP_SECONDS = 0.05


class PollingStore(Store):
    """Passes everything on to another store; `wait` and `get` look again and again instead of blocking inside.

    Args:
        store: Where the keys are.
        timeout: For `get`, and for a `wait` without one.
    """

    def __init__(self, store: Store, timeout: timedelta) -> None:
        super().__init__()
        self._store = store
        self._timeout = timeout

    @property
    def plain(self) -> Store:
        """The store underneath, for C++ threads that go on asking it: through this one they would need the GIL."""
        return self._store

    def set(self, key: str, value: str | bytes) -> None:
        """Sets a key."""
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Returns a key's value, once it has one.

        Raises:
            RuntimeError: It had none within the time-out.
        """
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        """Adds to a counter and returns the sum."""
        return self._store.add(key, value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Sets a key that holds `expected_value` (or has none, if that is empty), and returns what it holds then."""
        return self._store.compare_set(key, expected_value, desired_value)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return self._store.check(list(keys))

    def delete_key(self, key: str) -> bool:
        """Deletes a key; whether there was one."""
        return self._store.delete_key(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when all keys have values.

        Raises:
            RuntimeError: They had none within the time-out.
        """
        limit = timeout or self._timeout
        deadline = time.monotonic() + limit.total_seconds()
        nap_seconds = FIRST_NAP_SECONDS
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no value for {', '.join(keys)} within {limit.total_seconds():g} s")
            time.sleep(nap_seconds)
            nap_seconds = min(2 * nap_seconds, LONGEST_NAP_SECONDS)
