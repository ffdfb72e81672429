"""A client of torch's store in which every request ends: with a response, or by a timeout.

A TCPStore client is one connection with one lock and no timeout for a response. If the process that serves it is
stopped, or the network is cut, a request waits forever (seen on torch 2.13: `check` in `recvBytes` of c10d/Utils.hpp),
and every other thread that makes one waits behind it. So requests are made by a thread of their own, and each caller
waits for the response only as long as its timeout.

A thread that waits for a key inside the client keeps the other threads of its process from setting theirs, so two lanes
(or two models) that connect in different order on two ranks would deadlock. A client each (`Store.clone()`) costs a
connection each, and bursts of them stall for five seconds (seen on torch 2.13). Polling has neither problem.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar, cast

import torch.distributed as dist

from gradwire.comms.bootstrap.compat import PrefixStore, Store, TCPStore
from gradwire.comms.bootstrap.threads import BackgroundThread

FIRST_NAP_SECONDS = 0.001
LONGEST_NAP_SECONDS = 0.05
"""First and longest pause between two polls of one rank, if few ranks wait."""

POLLS_PER_SECOND = 8192
"""Polls per second of all ranks that may wait for one key, at most: a server answers some 20,000, on one thread."""

IDLE_SECONDS = 3.0
"""Idle time after which the request thread ends; the next request starts another."""

Result = TypeVar("Result")


class StoreUnreachableError(RuntimeError):
    """Raised if the store has not answered a request in time, or the connection to it is broken."""


class PollingStore(Store):
    """Wraps a store: every request has a timeout, and `wait` and `get` poll instead of blocking inside the client.

    Thread safety: all methods may be called from any thread.

    Args:
        store: Store with the keys.
        timeout: Timeout of every request without one of its own.
        ranks: Number of ranks that may wait for the same key; the more, the more rarely each of them polls.
    """

    def __init__(self, store: Store, timeout: timedelta, *, ranks: int = 1) -> None:
        super().__init__()
        self._store = store
        self._seconds = timeout.total_seconds()
        self._ranks = ranks
        # Kept: torch makes a new Python object for it at each access, which would get a client each.
        self._root = unprefixed(store)
        self._client = _client_of(self._root)

    @property
    def plain(self) -> Store:
        """The wrapped store, for C++ threads that use it: through this wrapper they would need the GIL."""
        return self._store

    @property
    def host(self) -> str | None:
        """Host name of the store's server; None if unknown, or if the store is in this process."""
        return self._root.host if isinstance(self._root, TCPStore) else None

    @property
    def is_answering(self) -> bool:
        """Returns whether a new request would be served at once.

        It would if the connection is not broken, and no request is pending whose caller has timed out. Always true for
        a store in this process.
        """
        return self._client is None or self._client.is_answering

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last response, or since the client began; 0 if the store is in this process."""
        return 0.0 if self._client is None else self._client.silent_seconds

    def give_up_if_silent(self, patience: timedelta) -> None:
        """Checks whether another thread's request has been pending for `patience`. Sends no request.

        Raises:
            StoreUnreachableError: It has.
        """
        if self._client is not None:
            self._client.give_up_if_silent(patience.total_seconds())

    def within(self, timeout: timedelta) -> "PollingStore":
        """Returns a view of this store with another timeout of each request; it shares the connection."""
        return PollingStore(self._store, timeout, ranks=self._ranks)

    def below(self, prefix: str) -> "PollingStore":
        """Returns a view of this store that adds `prefix/` to each key; it shares the connection."""
        return PollingStore(PrefixStore(prefix, self._store), timedelta(seconds=self._seconds), ranks=self._ranks)

    def set(self, key: str, value: str | bytes) -> None:
        """Sets a key.

        Raises:
            StoreUnreachableError: The store did not answer in time; every method that makes a request raises this.
        """
        # torch's stub lacks bytes.
        self._ask(f"set {key}", lambda: self._store.set(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Waits until a key has a value, and returns it.

        Raises:
            RuntimeError: It had none within the timeout.
        """
        self.wait([key])
        return self._ask(f"get {key}", lambda: self._store.get(key))

    def read(self, key: str) -> bytes:
        """Returns the value of a key that is known to have one, with a single request.

        Without a value the request stays in torch's client, and the others of this process behind it.
        """
        return self._ask(f"get {key}", lambda: self._store.get(key))

    def add(self, key: str, value: int) -> int:
        """Adds `value` to the counter under `key`, in one step for all clients, and returns the sum.

        Raises:
            StoreUnreachableError: The store did not answer in time.
        """
        return self._ask(f"add {key}", lambda: self._store.add(key, value))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Sets a key if it holds `expected_value` (or nothing, if that is empty), and returns its value after that."""
        return self._ask(f"compare_set {key}", lambda: self._store.compare_set(key, expected_value, desired_value))

    def elect(self, key: str, rank: int) -> int:
        """Returns the first rank to call this with `key`: the one that collects or decides for all ranks."""
        return int(self.compare_set(key, "", str(rank)))

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys have values."""
        return self._check(keys, self._seconds)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Waits until all keys have values, and returns them with one request.

        Raises:
            RuntimeError: One had none within the timeout.
        """
        self.wait(keys)
        return list(self._ask(f"multi_get {_shortly(keys)}", lambda: self._store.multi_get(list(keys))))

    def delete_key(self, key: str) -> bool:
        """Deletes a key and returns whether it existed."""
        return self._ask(f"delete_key {key}", lambda: self._store.delete_key(key))

    def wait(
        self, keys: Sequence[str], timeout: timedelta | None = None, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """Waits until all keys have values.

        Args:
            keys: Keys to wait for.
            timeout: Longest wait; None for the store's timeout.
            meanwhile: Called between two polls; an exception that it raises ends the wait.

        Raises:
            RuntimeError: They had none within the timeout.
        """
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        naps = Naps(self._ranks)
        while not self._check(keys, max(deadline - time.monotonic(), 0.0) + LONGEST_NAP_SECONDS):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no value for {_shortly(keys)} within {seconds:g} s")
            meanwhile()
            naps.sleep(deadline)

    def _check(self, keys: Sequence[str], seconds: float) -> bool:
        return self._ask(f"check {_shortly(keys)}", lambda: self._store.check(list(keys)), seconds)

    def _ask(self, description: str, request: Callable[[], Result], seconds: float | None = None) -> Result:
        """Makes a request: through the client's thread, or directly if the store is in this process."""
        if self._client is None:
            return request()
        return self._client.ask(description, request, self._seconds if seconds is None else seconds)


class Naps:
    """Pauses between polls of a store, each twice as long as the one before, up to `longest`.

    Args:
        ranks: Number of ranks that poll for the same key.

    Attributes:
        longest: Longest pause, in seconds.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._next = max(FIRST_NAP_SECONDS, ranks / POLLS_PER_SECOND / 8)
        self.longest = max(LONGEST_NAP_SECONDS, ranks / POLLS_PER_SECOND)

    def sleep(self, deadline: float) -> None:
        """Sleeps for the next pause, or until `deadline` (monotonic seconds) if that is earlier."""
        time.sleep(max(FIRST_NAP_SECONDS, min(self._next, deadline - time.monotonic())))
        self._next = min(2 * self._next, self.longest)


class _Request(Generic[Result]):
    """Request to the store that one thread waits for and the request thread makes.

    Args:
        description: Operation and keys, such as `get left/3`, for messages.
        request: Sends the request and returns the response.

    Attributes:
        description: Operation and keys, for messages.
        request: Sends the request and returns the response.
        answered: Set once `answer` or `error` is set.
        timed_out: Whether the caller has stopped waiting; the request is then skipped, or its response is dropped.
        answer: Response of the store.
        error: Exception that the request has raised.
    """

    def __init__(self, description: str, request: Callable[[], Result]) -> None:
        self.description = description
        self.request = request
        self.answered = threading.Event()
        self.timed_out = False
        self.answer: Result | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.answer = self.request()
        except BaseException as error:  # noqa: BLE001 - raised where the answer is waited for
            self.error = error
        self.answered.set()


class _Client:
    """Makes the requests to one store, on a thread of its own that lives as long as there are requests.

    Thread safety: all methods may be called from any thread.

    Invariant: no lock is held. A finalizer may make a request in whichever thread collects garbage, at any point; on
    the request thread itself the request is made at once.

    Args:
        name: Name of the store in messages, such as `the store at HOST:PORT`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin()

    def _begin(self) -> None:
        """Starts without requests and without a thread; in a forked child, too."""
        self._process = os.getpid()
        self._requests: SimpleQueue[_Request[object] | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._ends = False
        self._asking: _Request[object] | None = None
        self._asked_at = 0.0
        self._last_answer = time.monotonic()
        self._broken: str | None = None

    @property
    def is_answering(self) -> bool:
        """Returns whether the connection stands and no request is pending whose caller has timed out."""
        asking = self._asking
        return self._broken is None and not (asking is not None and asking.timed_out)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last response, or since this client began."""
        return time.monotonic() - self._last_answer

    def give_up_if_silent(self, seconds: float) -> None:
        """Raises `StoreUnreachableError` if a request has been pending for `seconds`."""
        asking, waited = self._asking, time.monotonic() - self._asked_at
        if asking is not None and not asking.answered.is_set() and waited >= seconds:
            raise StoreUnreachableError(self._silence(asking.description, waited))

    def _silence(self, description: str, seconds: float) -> str:
        """Returns the error message for a request that has had no response within `seconds`."""
        return (
            f"{self._name} cannot be reached: no answer to `{description}` within {seconds:.3g} s, and the last one to "
            f"anything {self.silent_seconds:.3g} s ago; the process that serves it is stopped or overloaded, or "
            "the network to its host is cut"
        )

    def ask(self, description: str, request: Callable[[], Result], seconds: float) -> Result:
        """Makes a request and returns the store's response.

        Args:
            description: Operation and keys, for messages.
            request: Sends the request and returns the response; called on the request thread.
            seconds: Longest wait.

        Raises:
            StoreUnreachableError: There was none within `seconds`, or the connection is broken.
            Exception: What the request has raised, or a `RuntimeError` if the request thread has failed.
        """
        # A fork has copies of the requests, but not the thread.
        if self._process != os.getpid():
            self._begin()
        # A broken connection stays broken, and torch logs a whole stack for each further request.
        if self._broken is not None:
            raise StoreUnreachableError(self._broken)
        asked = _Request(description, request)
        if threading.current_thread() in self._threads:
            asked.run()
        else:
            self._requests.put(cast("_Request[object]", asked))
            if not self._threads:
                BackgroundThread(
                    "gradwire store",
                    self._serve,
                    without=f"its pending requests to {self._name} fail, and the next request starts another thread",
                    on_failure=self._fail,
                    end=self._end,
                ).start()
        if not asked.answered.wait(seconds):
            asked.timed_out = True
            raise StoreUnreachableError(self._silence(description, seconds))
        if isinstance(asked.error, dist.DistNetworkError):
            self._broken = (
                f"{self._name} cannot be reached ({str(asked.error).splitlines()[0]}): the process that serves it is "
                "gone"
            )
            raise StoreUnreachableError(self._broken) from asked.error
        if asked.error is not None:
            raise asked.error
        return cast(Result, asked.answer)

    def _end(self) -> None:
        """Lets the thread end as soon as there are no requests."""
        self._ends = True
        self._requests.put(None)

    def _fail(self, error: BaseException) -> None:
        """Passes the error to all callers that wait for a response."""
        self._threads.discard(threading.current_thread())
        asking, self._asking = self._asking, None
        while asking is not None or not self._requests.empty():
            if asking is not None and not asking.answered.is_set():
                asking.error = RuntimeError(f"the thread that makes requests to {self._name} has failed: {error!r}")
                asking.answered.set()
            try:
                asking = self._requests.get_nowait()
            except Empty:
                return

    def _serve(self) -> None:
        """Makes requests until there are none for `IDLE_SECONDS`, or none at all after `_end`; the request thread."""
        this = threading.current_thread()
        self._threads.add(this)
        while True:
            try:
                asked = self._requests.get(timeout=0.0 if self._ends else IDLE_SECONDS)
            except Empty:
                self._threads.discard(this)
                # A caller may have put a request in the queue meanwhile, expecting this thread to make it.
                if self._requests.empty():
                    return
                self._threads.add(this)
                continue
            if asked is not None and not asked.timed_out:
                self._asked_at = time.monotonic()
                self._asking = asked
                asked.run()
                self._asking = None
                self._last_answer = time.monotonic()
            # Release the store now: the next request may come much later.
            del asked


_clients: "weakref.WeakKeyDictionary[Store, _Client]" = weakref.WeakKeyDictionary()
_clients_lock = threading.RLock()
"""Guards `_clients`. Reentrant: while a thread holds it, the garbage collector may run a finalizer that takes it."""


def _client_of(root: Store) -> _Client | None:
    """Returns the client shared by all users of a connection; None for a store that needs none."""
    if not isinstance(root, TCPStore):
        return None
    with _clients_lock:
        if root not in _clients:
            _clients[root] = _Client(f"the store at {root.host}:{root.port}")
        return _clients[root]


def unprefixed(store: Store) -> Store:
    """Returns the store below all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _shortly(keys: Sequence[str]) -> str:
    return f"{', '.join(keys[:4])}, ... ({len(keys)} keys)" if len(keys) > 5 else ", ".join(keys)
