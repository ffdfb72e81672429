"""How a process joins a running job: it leaves a request in the job's store, and is taken in between two steps."""

import base64
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from gradwire.comms.bootstrap.compat import PrefixStore, Store
from gradwire.comms.bootstrap.door import listener, own_addresses
from gradwire.comms.bootstrap.liveness import has_ended
from gradwire.comms.bootstrap.placement import Presence
from gradwire.comms.bootstrap.rendezvous import Presences
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.elastic.membership import GivenUpError, View, own_name

log = logging.getLogger("gradwire")

LOOK_SECONDS = 0.5
"""Between two looks of rank 0 for requests, at the end of a step."""

ASKING_TIMEOUT = timedelta(seconds=1)
"""For the store to say where a process that waits can be called."""

BACKLOG = 128
"""Calls that a waiting process takes without answering: rank 0 asks so whether it is still there."""

Newcomer = tuple[int, str, str]
"""Number of the request, name of the process, and what it says about itself: see `packed`."""


def job_key(name: str) -> str:
    """Where a job says below which prefix its members meet, in the store without any prefix.

    Args:
        name: Of the hook's state: unique in the job.
    """
    return f"gradwire/elastic/{name}"


def packed(presence: Presence) -> str:
    """What a process says about itself, for the others to know once and for all; see `presences`."""
    return base64.b64encode(Presences.of([presence], "").pack()).decode()


def presences(view: View, said: Mapping[str, str]) -> Presences:
    """What the members of an epoch have said about themselves, as `packed`: nobody is asked again."""
    known = (_unpacked(said[name]) for name in view.members)
    return Presences.of([replace(each, rank=rank, size=view.size) for rank, each in enumerate(known)], START)


@lru_cache(maxsize=1024)
def _unpacked(said: str) -> Presence:
    return Presences.unpack("", base64.b64decode(said))[0]


START = "start"
"""Of the ranks of an epoch, which start once."""


def unprefixed(store: Store) -> Store:
    """The store below all prefixes: that which a process from outside can reach."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


class Requests:
    """The requests, seen from the ranks of the job.

    Args:
        store: The membership's.
        timeout: For a key that another rank sets.
        shared: The configuration that newcomers must have.
    """

    def __init__(self, store: Store, timeout: timedelta, shared: Mapping[str, str]) -> None:
        self._store = PollingStore(store, timeout)
        self._shared = dict(shared)
        self._done = 0
        self._next_look = 0.0

    def look(self) -> int:
        """Rank 0: looks for processes that wait.

        Returns:
            Number of a list of them, for `listed`; 0 where there are none.
        """
        if time.monotonic() < self._next_look:
            return 0
        self._next_look = time.monotonic() + LOOK_SECONDS
        waiting: list[Newcomer] = []
        for number in range(self._done + 1, self._store.add("join/count", 0) + 1):
            if not self._store.check([f"join/{number}/request"]):
                break
            request = json.loads(self._store.read(f"join/{number}/request"))
            if self._is_open(number, request):
                waiting.append((number, str(request["name"]), str(request["presence"])))
            elif not waiting:
                self._done = number
        if not waiting:
            return 0
        listed = self._store.add("join/lists", 1)
        self._store.set(f"join/list/{listed}", json.dumps(waiting))
        return listed

    def listed(self, number: int) -> list[Newcomer]:
        """The processes of a list."""
        return [(each, name, said) for each, name, said in json.loads(self._store.get(f"join/list/{number}"))]

    def answer(self, newcomers: Sequence[Newcomer], view: View, said: Mapping[str, str]) -> None:
        """Rank 0: tells those that are among the members now, and what all have said about themselves."""
        known = {name: said[name] for name in view.members if name in said}
        for number, name, _ in newcomers:
            if name in view.members:
                word = {"epoch": view.epoch, "rank": view.members.index(name), "members": view.members, "said": known}
                self._store.set(f"join/{number}/answer", json.dumps(word))

    def _is_open(self, number: int, request: Mapping[str, object]) -> bool:
        if self._store.check([f"join/{number}/answer"]):
            return False
        if has_ended(self._store.below(f"join/{number}").within(ASKING_TIMEOUT), 0):
            return False
        theirs = request["shared"]
        assert isinstance(theirs, dict)
        for name, value in self._shared.items():
            if theirs.get(name) != value:
                refusal = f"`{name}` is {theirs.get(name)} here and {value} in the running job; wanted the same"
                self._store.set(f"join/{number}/answer", json.dumps({"refused": refusal}))
                return False
        return True


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
            "MASTER_ADDR:MASTER_PORT of the job's ranks, trained with elastic=True and `carries`"
        ) from None
    return PrefixStore(prefix, store)


def ask(store: Store, shared: Mapping[str, str], timeout: timedelta, presence: str) -> tuple[View, dict[str, str]]:
    """Waits until a running job takes this process in.

    Args:
        store: The membership's.
        shared: This process's configuration.
        timeout: Longest wait: for the end of the job's step.
        presence: What this process says about itself, as `packed`.

    Returns:
        The epoch that begins with it, and what its members have said about themselves.

    Raises:
        GivenUpError: The job refuses it, or has not answered within `timeout`.
    """
    own = PollingStore(store, timeout)
    number, name = own.add("join/count", 1), own_name()
    with listener(BACKLOG) as waiting:
        address = [waiting.getsockname()[1], own_addresses(), ""]
        own.set(f"join/{number}/alive/0", json.dumps(address))
        own.set(f"join/{number}/request", json.dumps({"name": name, "shared": dict(shared), "presence": presence}))
        log.info("waiting to be taken in, as %s", name)
        try:
            word = json.loads(own.get(f"join/{number}/answer"))
        except RuntimeError as error:
            raise GivenUpError(f"the running job has not taken this process in: {error}") from error
    if "refused" in word:
        raise GivenUpError(f"the running job refuses this process: {word['refused']}")
    members = tuple(map(str, word["members"]))
    return View(int(word["epoch"]), int(word["rank"]), members, joined=(name,)), dict(word["said"])
