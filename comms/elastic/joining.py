"""Lets a process join a running job: it puts a request into the job's store, and is admitted between two steps.

A joining process must not harm the job. A thread of rank 0 reads its request, and refuses one that does not fit with a
reason, before the training ranks take part. The process shows that it lives by a counter in the store (a heartbeat).
No step waits for a store that does not answer, because only that thread polls it.
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
"""Seconds between two polls of the store for requests, on rank 0."""

HEARTBEAT_SECONDS = 0.1
"""Seconds between two heartbeats of a waiting process, and between its polls for an answer."""

SILENT_SECONDS = 2.0
"""Seconds without a heartbeat after which a waiting process is not admitted. No rank of the job waits for it."""

FORGOTTEN_SECONDS, UNSEEN_SECONDS = 60.0, 10.0
"""Seconds without a heartbeat after which a request is refused; the second number is for a request with fewer than two
different heartbeats so far, which takes one of the `MOST_OPEN` places."""

MOST_OPEN = 256
"""Largest number of requests that rank 0 polls at a time: each costs three calls of the store in `POLL_SECONDS`."""

MOST_REQUEST_NBYTES = 1 << 24
"""Largest size of a request in bytes: a model of 100,000 parameters, with some 100 characters for each."""

MOST_PEER_INFO = 1 << 20
"""Largest number of characters of a process's peer info."""

JoiningProcess = tuple[int, str, str]
"""A process that wants to join: number of its request, its name, and its peer info in the form of `packed`."""

Fits = Callable[[JoiningProcess], None]
"""Raises a ValueError if the running ranks cannot go on with this process."""


_JOINING: MessageType[tuple[JoiningProcess, ...]] = MessageType(tuple[tuple[Count, str, str], ...], most_nbytes=1 << 28)
"""List of accepted requests that rank 0 puts into the store for all ranks."""


@dataclass(frozen=True, slots=True)
class _JoinRequest:
    """A request to join, as the process puts it into the store.

    Attributes:
        name: Name of the process; see `own_name`.
        shared: Options of the process that must equal the job's, with their values.
        peer_info: Peer info of the process, in the form of `packed`.
        model: Shapes and dtypes of its model; see `described`.
    """

    name: Annotated[str, Most(1000)]
    shared: Mapping[str, object]
    peer_info: Annotated[str, Most(MOST_PEER_INFO)]
    model: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Admitted:
    """The answer to a process that is admitted.

    Attributes:
        generation: Number of the generation that begins.
        rank: Rank of the process in it.
        members: Names of all its processes, by rank.
        packed_infos: Peer info of each member by name, in the form of `packed`.
    """

    generation: Count
    rank: Rank
    members: tuple[str, ...]
    packed_infos: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Refused:
    """The answer to a process that is not admitted: the reason, in words."""

    refused: str


_REQUEST: MessageType[_JoinRequest] = MessageType(_JoinRequest, most_nbytes=MOST_REQUEST_NBYTES)
_ANSWER: MessageType[_Admitted | _Refused] = MessageType(_Admitted | _Refused, most_nbytes=1 << 28)


def job_key(name: str) -> str:
    """Returns the key at which a job publishes the prefix of its membership's keys, in the store without any prefix.

    Args:
        name: Name of the hook state, unique in the job.
    """
    return f"gradwire/elastic/{name}"


def described(module: nn.Module) -> dict[str, str]:
    """Describes a model for `check_model`: returns the dtype, shape and whether it is trained of each state entry.

    Args:
        module: The module inside the DDP model.

    Returns:
        Name of the entry -> words such as `float32 of [8, 4], trained`, in the order of the state dict; for an entry
        that is no tensor the name of its type.
    """
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {
        name: f"{str(value.dtype).removeprefix('torch.')} of {list(value.shape)}{', trained' * (name in trained)}"
        if isinstance(value, Tensor)
        else type(value).__name__
        for name, value in module.state_dict().items()
    }


def check_model(theirs: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Checks that the model of a process that wants to join equals the running job's.

    Args:
        theirs: Result of `described` for the model of the process.
        own: Result of `described` for the job's model.

    Raises:
        ValueError: They differ in an entry, or in the order of the entries.
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
    """A process's request to join that has not been answered yet, as rank 0 tracks it.

    Attributes:
        heartbeat: Last value of the heartbeat counter of the process; None before the first.
        is_beating: Whether two different heartbeats were seen.
        changed: Time of the last new heartbeat, by time.monotonic().
        process: Content of the request; None before it has been read and found to fit.
    """

    def __init__(self) -> None:
        self.heartbeat: int | None = None
        self.is_beating = False
        self.changed = time.monotonic()
        self.process: JoiningProcess | None = None

    def record(self, heartbeat: int) -> None:
        """Records the process's heartbeat counter, as the store has it now; a changed value is a sign of life."""
        if heartbeat != self.heartbeat:
            self.is_beating = self.heartbeat is not None
            self.heartbeat, self.changed = heartbeat, time.monotonic()

    @property
    def is_alive(self) -> bool:
        """Whether a new heartbeat came within the last `SILENT_SECONDS`."""
        return self.is_beating and time.monotonic() - self.changed < SILENT_SECONDS


class Requests:
    """Collects the requests of processes that want to join the running job.

    Thread safety: `close` may be called from any thread, all other methods from the training thread. A thread of its
    own polls the store.

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

    def poll(self, fits: Fits) -> int:
        """Puts the list of processes that wait and fit into the store (on rank 0); the first call starts the thread.

        It makes requests to the store only if there are such processes or refused ones, which its thread has found.

        Args:
            fits: Called with each waiting process; one for which it raises is refused.

        Returns:
            Number of the list, for `listed` on all ranks; 0 if no process can join now.
        """
        if self._thread is None:
            self._thread = BackgroundThread(
                "gradwire requests",
                self._serve,
                without="no process can join any more",
                on_failure=self._fail,
                end=self._closed.set,
            )
            self._thread.start()
        with self._lock:
            waiting = [each.process for each in self._open.values() if each.process is not None and each.is_alive]
        fitting = []
        for process in waiting:
            try:
                fits(process)
            except Exception as error:  # noqa: BLE001 - whatever it is, those that train go on
                self._refuse(process[0], f"{error}" if isinstance(error, ValueError) else f"{error!r}")
            else:
                fitting.append(process)
        if not fitting:
            return 0
        listed = self._store.add("join/lists", 1)
        self._store.set(f"join/list/{listed}", json.dumps(fitting))
        return listed

    def listed(self, number: int) -> list[JoiningProcess]:
        """Returns the processes of a list that rank 0 has put into the store.

        Args:
            number: Result of `poll` on rank 0.
        """
        return list(_JOINING.read(self._store.get(f"join/list/{number}")))

    def answer(self, joining: Sequence[JoiningProcess], view: View, packed_infos: Mapping[str, str]) -> None:
        """Sends each admitted process its rank and the members of its generation (on rank 0).

        Args:
            joining: The processes of the list; those that are no members of `view` get no answer.
            view: The generation that begins.
            packed_infos: Peer info of each member by name, in the form of `packed`.
        """
        known = {name: packed_infos[name] for name in view.members if name in packed_infos}
        for number, name, _ in joining:
            if name in view.members:
                word = {
                    "generation": view.generation,
                    "rank": view.members.index(name),
                    "members": view.members,
                    "packed_infos": known,
                }
                self._store.set(f"join/{number}/answer", json.dumps(word))
                self._drop(number)

    def close(self) -> None:
        """Ends the thread that polls for requests."""
        self._closed.set()

    def _fail(self, error: BaseException) -> None:
        """Refuses all waiting processes after an error of the thread; if the store fails, they time out instead."""
        self._closed.set()
        with self._lock:
            waiting, self._open = list(self._open), {}
        for number in waiting:
            self._refuse(number, f"the running job admits no process any more: {error!r}")

    def _serve(self) -> None:
        """Polls for requests until `close`, in a thread of rank 0: a slow store delays no training step."""
        while not self._closed.wait(POLL_SECONDS):
            try:
                self._poll_store()
            except RuntimeError as error:
                log.debug("requests to join cannot be read from the store: %s", error)

    def _poll_store(self) -> None:
        """Polls the store once for new requests and for heartbeats, and refuses requests without a recent heartbeat."""
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
            request.record(self._store.add(f"join/{number}/heartbeat", 0))
            if request.process is None and self._store.check([f"join/{number}/request"]):
                self._read(number, request)
            elif time.monotonic() - request.changed > (FORGOTTEN_SECONDS if request.is_beating else UNSEEN_SECONDS):
                self._refuse(number, f"no heartbeat from it for {time.monotonic() - request.changed:.0f} s")

    def _read(self, number: int, request: _Request) -> None:
        """Reads a request into `request.process`, or refuses it if it cannot be read or differs from the job.

        Args:
            number: Number of the request in the store.
            request: Record of the request; changed in place.

        Raises:
            RuntimeError: The store failed.
        """
        try:
            word = _REQUEST.read(self._store.read(f"join/{number}/request"))
            process = (number, word.name, word.peer_info)
            for name, value in self._shared.items():
                if word.shared.get(name) != value:
                    found = word.shared.get(name)
                    raise ValueError(f"`{name}` is {found} here and {value} in the running job; wanted the same")
            check_model(word.model, self._model)
            unpacked(process[2])
        except MessageError as error:
            self._refuse(number, f"its request cannot be read: {error}")
        except ValueError as error:
            self._refuse(number, str(error))
        except RuntimeError:  # of the store
            raise
        except Exception as error:  # noqa: BLE001 - a request that no gradwire of this version has written
            self._refuse(number, f"its request cannot be read: {error!r}")
        else:
            request.process = process

    def _refuse(self, number: int, reason: str) -> None:
        """Answers a request with the reason why it is refused, and logs it."""
        log.warning("a process that wants to join is refused: %s", reason)
        self._drop(number)
        self._store.compare_set(f"join/{number}/answer", "", json.dumps({"refused": reason}))

    def _drop(self, number: int) -> None:
        """Stops tracking a request, because it has been answered."""
        with self._lock:
            self._open.pop(number, None)


def find_job(address: str, name: str, timeout: timedelta) -> Store:
    """Connects to the store of a running job, and returns it below the prefix of the job's membership.

    Args:
        address: HOST:PORT of the store with which the job's ranks were started.
        name: Name of the hook state in the job.
        timeout: Longest wait for the connection, and then for the job's ranks to connect with each other.

    Raises:
        RuntimeError: No store answers there, or no elastic job uses it.
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


def request_admission(
    store: Store, shared: Mapping[str, str], timeout: timedelta, peer_info: str, model: Mapping[str, str]
) -> tuple[View, dict[str, str]]:
    """Puts a request to join a running job into its store, and waits for the answer; sends heartbeats meanwhile.

    Args:
        store: Store of the job's membership; see `find_job`.
        shared: Options that must equal the job's, with their values.
        timeout: Longest wait for the answer, which comes after a step of the job.
        peer_info: Peer info of this process, in the form of `packed`.
        model: Result of `described` for this process's model.

    Returns:
        The generation that begins with this process, and the peer info of each member by name.

    Raises:
        EvictedError: The job refuses this process, or has not answered within `timeout`.
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
        own.add(f"join/{number}/heartbeat", 1)
        time.sleep(HEARTBEAT_SECONDS)
    answer = _ANSWER.read(own.read(f"join/{number}/answer"))
    if isinstance(answer, _Refused):
        raise EvictedError(f"the running job refuses this process: {answer.refused}")
    return View(answer.generation, answer.rank, answer.members, joined=(name,)), dict(answer.packed_infos)
