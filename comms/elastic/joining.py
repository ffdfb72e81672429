"""Lets a process join a running job: it puts a request into the job's store, and is admitted between two steps.

A newcomer may harm nobody. What it asks with is read, and refused in words where it does not fit, before any rank that
trains hears of it; that it lives it shows by counting in the store; and a thread of rank 0 looks for it, so that no
step waits for a store that does not answer.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

from gradwire.comms.bootstrap.compat import PrefixStore, Store
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.bootstrap.threads import BackgroundThread
from gradwire.comms.boundary.messages import Count, MessageError, MessageType, Most, Rank
from gradwire.comms.elastic.membership import EvictedError, View, own_name
from gradwire.comms.elastic.peer_info import unpacked

log = logging.getLogger("gradwire")

POLL_SECONDS = 0.25
"""Seconds between two looks of rank 0 for requests."""

HEARTBEAT_SECONDS = 0.1
"""Seconds between two signs of life of a process that waits, and between its looks for an answer."""

SILENT_SECONDS = 2.0
"""Seconds without a heartbeat after which a waiting process is not admitted. No rank of the job waits for it."""

FORGOTTEN_SECONDS, UNSEEN_SECONDS = 60.0, 10.0
"""Seconds without one after which it is not looked at any more, and told so, should it live; and of one that has not
shown two, which holds the place of another."""

MOST_OPEN = 256
"""Requests that are looked at, at a time: each is three questions to the store in `POLL_SECONDS`."""

MOST_REQUEST_NBYTES = 1 << 24
"""Bytes of a request: the entries of a model with 100,000 parameters, of some 100 characters each."""

MOST_PEER_INFO = 1 << 20
"""Characters of what a process says about itself."""

Newcomer = tuple[int, str, str]
"""Number of the request, name of the process, and what it says about itself: see `packed`."""

Fits = Callable[[Newcomer], None]
"""Raises a ValueError where the running ranks could not take a process in."""


_NEWCOMERS: MessageType[tuple[Newcomer, ...]] = MessageType(tuple[tuple[Count, str, str], ...], most_nbytes=1 << 28)
"""Requests that fit, as rank 0 lists them."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request: the process's name, its configuration, what it says about itself, and its model as `described`."""

    name: Annotated[str, Most(1000)]
    shared: Mapping[str, object]
    peer_info: Annotated[str, Most(MOST_PEER_INFO)]
    model: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Admitted:
    """The generation that begins, the process's rank in it, its members, and what they have said about themselves."""

    generation: Count
    rank: Rank
    members: tuple[str, ...]
    said: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Refused:
    """Why not."""

    refused: str


_REQUEST: MessageType[_Asked] = MessageType(_Asked, most_nbytes=MOST_REQUEST_NBYTES)
_ANSWER: MessageType[_Admitted | _Refused] = MessageType(_Admitted | _Refused, most_nbytes=1 << 28)


def job_key(name: str) -> str:
    """Where a job says below which prefix its members meet, in the store without any prefix.

    Args:
        name: Of the hook's state: unique in the job.
    """
    return f"gradwire/elastic/{name}"


def described(module: nn.Module) -> dict[str, str]:
    """What each entry of a model's state is: its shape and dtype, in the order of the state."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {
        name: f"{str(value.dtype).removeprefix('torch.')} of {list(value.shape)}{', trained' * (name in trained)}"
        if isinstance(value, Tensor)
        else type(value).__name__
        for name, value in module.state_dict().items()
    }


def check_model(theirs: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Compares two models as `described`: that of a process that wants to join, and the running job's.

    Raises:
        ValueError: They differ.
    """
    for name in (*own, *theirs):
        here, there = theirs.get(name, "missing"), own.get(name, "missing")
        if here != there:
            raise ValueError(
                f"`{name}` of the model is {here} here and {there} in the running job; wanted the same model"
            )
    if list(own) != list(theirs):
        raise ValueError("the model's parameters are in another order here than in the running job; wanted the same")


class _Request:
    """A process's request to join that has not been answered yet.

    Attributes:
        pulse: Last heartbeat of the process; None before the first.
        beats: Whether two different heartbeats were seen.
        changed: When the last one came, by time.monotonic().
        newcomer: What it asks with; None before it has been read.
    """

    def __init__(self) -> None:
        self.pulse: int | None = None
        self.beats = False
        self.changed = time.monotonic()
        self.newcomer: Newcomer | None = None

    def see(self, pulse: int) -> None:
        """Takes in a sign of life."""
        if pulse != self.pulse:
            self.beats = self.pulse is not None
            self.pulse, self.changed = pulse, time.monotonic()

    @property
    def is_alive(self) -> bool:
        """Whether a new heartbeat came within the last `SILENT_SECONDS`."""
        return self.beats and time.monotonic() - self.changed < SILENT_SECONDS


class Requests:
    """Collects the requests of processes that want to join the running job.

    Args:
        store: Store of the membership.
        timeout: Longest wait for a key that another rank sets.
        shared: Options that a joining process must have, too, and their values.
        model: Result of `described` for this job's model; that of a joining process must be equal.
    """

    def __init__(self, store: Store, timeout: timedelta, shared: Mapping[str, str], model: Mapping[str, str]) -> None:
        self._store = PollingStore(store, timeout)
        self._shared = dict(shared)
        self._model = dict(model)
        self._lock = threading.Lock()  # Guards _open and _seen.
        self._open: dict[int, _Request] = {}
        self._seen = 0
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def look(self, fits: Fits) -> int:
        """Rank 0: which processes wait, as its thread has last seen; asks the store only where there are some.

        Args:
            fits: Called with each of them; whom it does not suit is refused.

        Returns:
            Number of a list of them, for `listed`; 0 where there are none.
        """
        if self._thread is None:
            self._thread = BackgroundThread(
                "gradwire requests",
                self._watch,
                without="no process can join any more",
                on_failure=self._fail,
                end=self._closed.set,
            )
            self._thread.start()
        with self._lock:
            waiting = [each.newcomer for each in self._open.values() if each.newcomer is not None and each.is_alive]
        fitting = []
        for newcomer in waiting:
            try:
                fits(newcomer)
            except Exception as error:  # noqa: BLE001 - whatever it is, those that train go on
                self._refuse(newcomer[0], f"{error}" if isinstance(error, ValueError) else f"{error!r}")
            else:
                fitting.append(newcomer)
        if not fitting:
            return 0
        listed = self._store.add("join/lists", 1)
        self._store.set(f"join/list/{listed}", json.dumps(fitting))
        return listed

    def listed(self, number: int) -> list[Newcomer]:
        """The processes of a list."""
        return list(_NEWCOMERS.read(self._store.get(f"join/list/{number}")))

    def answer(self, newcomers: Sequence[Newcomer], view: View, said: Mapping[str, str]) -> None:
        """Rank 0: tells those that are among the members now, and what all have said about themselves."""
        known = {name: said[name] for name in view.members if name in said}
        for number, name, _ in newcomers:
            if name in view.members:
                word = {
                    "generation": view.generation,
                    "rank": view.members.index(name),
                    "members": view.members,
                    "said": known,
                }
                self._store.set(f"join/{number}/answer", json.dumps(word))
                self._drop(number)

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()

    def _fail(self, error: BaseException) -> None:
        """Turns away those who wait, as far as the store can be asked; the others have a time-out of their own."""
        self._closed.set()
        with self._lock:
            waiting, self._open = list(self._open), {}
        for number in waiting:
            self._refuse(number, f"the running job admits no process any more: {error!r}")

    def _watch(self) -> None:
        """Looks for requests, also while a step takes long; a store that does not answer holds up this thread alone."""
        while not self._closed.wait(POLL_SECONDS):
            try:
                self._look()
            except RuntimeError as error:
                log.debug("the store cannot say who wants to join: %s", error)

    def _look(self) -> None:
        """Takes in new requests, and signs of life. One that is not complete keeps nobody behind it waiting."""
        count = self._store.add("join/count", 0)
        with self._lock:
            # Invariant: at most `MOST_OPEN` requests are open, whatever the counter says; the others wait their turn.
            room = min(count - self._seen, MOST_OPEN - len(self._open))
            self._open |= {number: _Request() for number in range(self._seen + 1, self._seen + room + 1)}
            self._seen += max(room, 0)
            waiting = list(self._open.items())
        for number, request in waiting:
            if self._store.check([f"join/{number}/answer"]):
                self._drop(number)
                continue
            request.see(self._store.add(f"join/{number}/pulse", 0))
            if request.newcomer is None and self._store.check([f"join/{number}/request"]):
                self._read(number, request)
            elif time.monotonic() - request.changed > (FORGOTTEN_SECONDS if request.beats else UNSEEN_SECONDS):
                self._refuse(number, f"it has said nothing for {time.monotonic() - request.changed:.0f} s")

    def _read(self, number: int, request: _Request) -> None:
        """Reads what one asks with; whatever does not fit is refused."""
        try:
            word = _REQUEST.read(self._store.read(f"join/{number}/request"))
            newcomer = (number, word.name, word.peer_info)
            for name, value in self._shared.items():
                if word.shared.get(name) != value:
                    found = word.shared.get(name)
                    raise ValueError(f"`{name}` is {found} here and {value} in the running job; wanted the same")
            check_model(word.model, self._model)
            unpacked(newcomer[2])
        except MessageError as error:
            self._refuse(number, f"its request cannot be read: {error}")
        except ValueError as error:
            self._refuse(number, str(error))
        except RuntimeError:  # of the store
            raise
        except Exception as error:  # noqa: BLE001 - a request that no gradwire of this version has written
            self._refuse(number, f"its request cannot be read: {error!r}")
        else:
            request.newcomer = newcomer

    def _refuse(self, number: int, reason: str) -> None:
        log.warning("a process that wants to join is refused: %s", reason)
        self._drop(number)
        self._store.compare_set(f"join/{number}/answer", "", json.dumps({"refused": reason}))

    def _drop(self, number: int) -> None:
        with self._lock:
            self._open.pop(number, None)


def find_job(address: str, name: str, timeout: timedelta) -> Store:
    """The membership's store of a running job.

    Args:
        address: HOST:PORT of the store that its ranks were started with.
        name: Of the hook's state.
        timeout: For the connection, and for the job's first connection of its own ranks.

    Raises:
        RuntimeError: Nobody answers there, or there is no elastic job.
    """
    host, _, port = address.rpartition(":")
    try:
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        prefix = PollingStore(store, timeout).get(job_key(name)).decode()
    except (RuntimeError, dist.DistError) as error:
        raise RuntimeError(
            f"`join` is {address}, and no elastic job can be joined there ({str(error).splitlines()[0]}): wanted "
            "MASTER_ADDR:MASTER_PORT of the job's ranks, trained with elastic=True and `extra_state`"
        ) from None
    return PrefixStore(prefix, store)


def ask(
    store: Store, shared: Mapping[str, str], timeout: timedelta, peer_info: str, model: Mapping[str, str]
) -> tuple[View, dict[str, str]]:
    """Waits until a running job admits this process.

    Args:
        store: The membership's.
        shared: This process's configuration.
        timeout: Longest wait: for the end of the job's step.
        peer_info: What this process says about itself, as `packed`.
        model: This process's, as `described`.

    Returns:
        The generation that begins with it, and what its members have said about themselves.

    Raises:
        EvictedError: The job refuses it, or has not answered within `timeout`.
    """
    own = PollingStore(store, timeout)
    number, name = own.add("join/count", 1), own_name()
    word = {"name": name, "shared": dict(shared), "peer_info": peer_info, "model": dict(model)}
    own.set(f"join/{number}/request", json.dumps(word))
    log.info("waiting to be admitted to the running job as %s", name)
    deadline = time.monotonic() + timeout.total_seconds()
    while not own.check([f"join/{number}/answer"]):
        if time.monotonic() > deadline:
            raise EvictedError(f"the running job did not admit this process within {timeout.total_seconds():g} s")
        own.add(f"join/{number}/pulse", 1)
        time.sleep(HEARTBEAT_SECONDS)
    answer = _ANSWER.read(own.read(f"join/{number}/answer"))
    if isinstance(answer, _Refused):
        raise EvictedError(f"the running job refuses this process: {answer.refused}")
    return View(answer.generation, answer.rank, answer.members, joined=(name,)), dict(answer.said)
