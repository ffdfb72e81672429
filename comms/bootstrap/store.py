"""A store of which every question ends: with an answer, or within a time-out.

A client of torch's TCPStore is one connection with one lock, and has no time-out for an answer: where the process that
serves it is stopped, or the network between is cut, a question waits for ever (seen on torch 2.13: `check` in
`recvBytes` of c10d/Utils.hpp), and every other thread of the process that asks waits behind it. So a thread of its own
asks, and whoever wants the answer waits for it no longer than he has said.

A thread that waits for a key inside the client keeps the other threads of its process from setting theirs, so two
lanes (or two models) that connect in different order on two ranks would wait for each other. A client each
(`Store.clone()`) costs a connection each, and bursts of them stall for five seconds (seen on torch 2.13); looking again
and again costs neither.
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
"""Longest pause between two looks of one rank, where few wait."""

POLLS_PER_SECOND = 8192
"""Most looks a second of all ranks that may wait for one key: one server answers some 20,000, on one thread."""

IDLE_SECONDS = 3.0
"""Seconds without a question after which the thread that asks ends, until there is another one."""

Result = TypeVar("Result")


class StoreUnreachableError(RuntimeError):
    """The store has not answered in time, or its connection is broken."""


class PollingStore(Store):
    """Passes everything on to another store; `wait` and `get` look again and again instead of blocking inside.

    Args:
        store: Where the keys are.
        timeout: For every call without one of its own; an answer that takes longer raises.
        ranks: How many may wait for the same key: they look the more rarely the more there are.
    """

    def __init__(self, store: Store, timeout: timedelta, *, ranks: int = 1) -> None:
        super().__init__()
        self._store = store
        self._seconds = timeout.total_seconds()
        self._ranks = ranks
        # Kept, or torch would make another object of it at each look, with a client each.
        self._root = unprefixed(store)
        self._client = _client_of(self._root)

    @property
    def plain(self) -> Store:
        """The store underneath, for C++ threads that go on asking it: through this one they would need the GIL."""
        return self._store

    @property
    def host(self) -> str | None:
        """Where it is served; None where it is in this process, or nobody knows."""
        return self._root.host if isinstance(self._root, TCPStore) else None

    @property
    def is_answering(self) -> bool:
        """Whether nobody has given up a question that is still open: whoever asks now would wait behind it."""
        return self._client is None or self._client.is_answering

    @property
    def silent_seconds(self) -> float:
        """Seconds since the store has last answered this process; 0 where it answers in this process itself."""
        return 0.0 if self._client is None else self._client.silent_seconds

    def give_up_if_silent(self, patience: timedelta) -> None:
        """Asks nothing: looks whether another thread has waited in vain for `patience` already.

        Raises:
            StoreUnreachableError: Somebody has; he may wait still.
        """
        if self._client is not None:
            self._client.give_up_if_silent(patience.total_seconds())

    def within(self, timeout: timedelta) -> "PollingStore":
        """The same keys over the same connection, with another time-out."""
        return PollingStore(self._store, timeout, ranks=self._ranks)

    def below(self, prefix: str) -> "PollingStore":
        """The keys that begin with `prefix/`, over the same connection."""
        return PollingStore(PrefixStore(prefix, self._store), timedelta(seconds=self._seconds), ranks=self._ranks)

    def set(self, key: str, value: str | bytes) -> None:
        """Sets a key.

        Raises:
            StoreUnreachableError: As every call here.
        """
        self._ask(f"set {key}", lambda: self._store.set(key, value))  # type: ignore[arg-type]  # bytes, too

    def get(self, key: str) -> bytes:
        """Returns a key's value, once it has one.

        Raises:
            RuntimeError: It had none within the time-out.
        """
        self.wait([key])
        return self._ask(f"get {key}", lambda: self._store.get(key))

    def read(self, key: str) -> bytes:
        """The value of a key that is known to have one: a single question."""
        return self._ask(f"get {key}", lambda: self._store.get(key))

    def add(self, key: str, value: int) -> int:
        """Adds to a counter and returns the sum."""
        return self._ask(f"add {key}", lambda: self._store.add(key, value))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Sets a key that holds `expected_value` (or has none, if that is empty), and returns what it holds then."""
        return self._ask(f"compare_set {key}", lambda: self._store.compare_set(key, expected_value, desired_value))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return self._check(keys, self._seconds)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that all have one, in one question.

        Raises:
            RuntimeError: One had none within the time-out.
        """
        self.wait(keys)
        return list(self._ask(f"multi_get {_shortly(keys)}", lambda: self._store.multi_get(list(keys))))

    def delete_key(self, key: str) -> bool:
        """Deletes a key; whether there was one."""
        return self._ask(f"delete_key {key}", lambda: self._store.delete_key(key))

    def wait(
        self, keys: Sequence[str], timeout: timedelta | None = None, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """Returns when all keys have values.

        Args:
            keys: Which.
            timeout: None takes that of the store.
            meanwhile: Called between two looks; what it raises ends the wait.

        Raises:
            RuntimeError: They had none within the time-out.
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

    def _ask(self, words: str, question: Callable[[], Result], seconds: float | None = None) -> Result:
        if self._client is None:
            return question()
        return self._client.ask(words, question, self._seconds if seconds is None else seconds)


class Naps:
    """Ever longer naps between two looks at a store.

    Args:
        ranks: How many look for the same thing.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._next = max(FIRST_NAP_SECONDS, ranks / POLLS_PER_SECOND / 8)
        self.longest = max(LONGEST_NAP_SECONDS, ranks / POLLS_PER_SECOND)

    def sleep(self, deadline: float) -> None:
        """Sleeps twice as long as the last time, and hardly beyond a moment of `time.monotonic()`."""
        time.sleep(max(FIRST_NAP_SECONDS, min(self._next, deadline - time.monotonic())))
        self._next = min(2 * self._next, self.longest)


class _Question(Generic[Result]):
    """What one thread wants to know and another one asks."""

    def __init__(self, words: str, question: Callable[[], Result]) -> None:
        self.words = words
        self.question = question
        self.answered = threading.Event()
        self.given_up = False
        self.answer: Result | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.answer = self.question()
        except BaseException as error:  # noqa: BLE001 - raised where the answer is waited for
            self.error = error
        self.answered.set()


class _Client:
    """Asks one store, on one thread that lives as long as there are questions.

    A finalizer may ask, in whichever thread collects garbage and wherever that stands: so nobody holds a lock, and who
    is collected on the thread that asks is answered there.

    Args:
        place: Where the store is, in words.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._questions: SimpleQueue[_Question[object] | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._ends = False
        self._asking: _Question[object] | None = None
        self._asked_at = 0.0
        self._heard = time.monotonic()
        self._broken: str | None = None

    @property
    def is_answering(self) -> bool:
        """Whether no question is open that has been given up, and the connection stands."""
        asking = self._asking
        return self._broken is None and not (asking is not None and asking.given_up)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last answer."""
        return time.monotonic() - self._heard

    def give_up_if_silent(self, seconds: float) -> None:
        """Raises where the question that is open has been so for `seconds`."""
        asking, waited = self._asking, time.monotonic() - self._asked_at
        if asking is not None and not asking.answered.is_set() and waited >= seconds:
            raise StoreUnreachableError(self._silence(asking.words, waited))

    def _silence(self, words: str, seconds: float) -> str:
        return (
            f"{self._place} cannot be reached: no answer to `{words}` within {seconds:.3g} s, and the last one to "
            f"anything {self.silent_seconds:.3g} s ago; the process that serves it is stopped or overloaded, or "
            "the network to its host is cut"
        )

    def ask(self, words: str, question: Callable[[], Result], seconds: float) -> Result:
        """Returns the store's answer.

        Raises:
            StoreUnreachableError: There was none within `seconds`, or the connection is broken.
        """
        if self._process != os.getpid():  # a fork has the questions, but not the thread
            self._begin()
        if self._broken is not None:  # it stays so, and torch logs the whole stack for every question
            raise StoreUnreachableError(self._broken)
        asked = _Question(words, question)
        if threading.current_thread() in self._threads:
            asked.run()
        else:
            self._questions.put(cast("_Question[object]", asked))
            if not self._threads:
                BackgroundThread(
                    "gradwire store",
                    self._serve,
                    without=f"what it was asking {self._place} is not answered, and the next question starts another",
                    on_failure=self._fail,
                    end=self._end,
                ).start()
        if not asked.answered.wait(seconds):
            asked.given_up = True
            raise StoreUnreachableError(self._silence(words, seconds))
        if isinstance(asked.error, dist.DistNetworkError):
            self._broken = (
                f"{self._place} cannot be reached ({str(asked.error).splitlines()[0]}): the process that serves it is "
                "gone"
            )
            raise StoreUnreachableError(self._broken) from asked.error
        if asked.error is not None:
            raise asked.error
        return cast(Result, asked.answer)

    def _end(self) -> None:
        """Has the thread end when there are no questions."""
        self._ends = True
        self._questions.put(None)

    def _fail(self, error: BaseException) -> None:
        """Answers those who wait with the error: nobody else would."""
        self._threads.discard(threading.current_thread())
        asking, self._asking = self._asking, None
        while asking is not None or not self._questions.empty():
            if asking is not None and not asking.answered.is_set():
                asking.error = RuntimeError(f"the thread that asks {self._place} has failed: {error!r}")
                asking.answered.set()
            try:
                asking = self._questions.get_nowait()
            except Empty:
                return

    def _serve(self) -> None:
        this = threading.current_thread()
        self._threads.add(this)
        while True:
            try:
                asked = self._questions.get(timeout=0.0 if self._ends else IDLE_SECONDS)
            except Empty:
                self._threads.discard(this)
                if self._questions.empty():  # else somebody has asked who took it that this one would answer
                    return
                self._threads.add(this)
                continue
            if asked is not None and not asked.given_up:
                self._asked_at = time.monotonic()
                self._asking = asked
                asked.run()
                self._asking = None
                self._heard = time.monotonic()
            del asked  # it holds the store


_clients: "weakref.WeakKeyDictionary[Store, _Client]" = weakref.WeakKeyDictionary()
_clients_lock = threading.RLock()
"""Garbage that is collected while a thread holds it may want it, too."""


def _client_of(root: Store) -> _Client | None:
    """Who asks for all that share a connection; None for a store that answers in this process, or in Python."""
    if not isinstance(root, TCPStore):
        return None
    with _clients_lock:
        if root not in _clients:
            _clients[root] = _Client(f"the store at {root.host}:{root.port}")
        return _clients[root]


def unprefixed(store: Store) -> Store:
    """The store below all prefixes: that which a process from outside can reach."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _shortly(keys: Sequence[str]) -> str:
    return f"{', '.join(keys[:4])}, ... ({len(keys)} keys)" if len(keys) > 5 else ", ".join(keys)
