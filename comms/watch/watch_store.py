"""Client of the store of the default group, through which the ranks of a watch exchange statuses and responses.

Each rank publishes its status twice a second under a key of its own; rank 0 reads all of them. A request is a counter:
a rank that needs the last collectives of all ranks adds one to it, every rank that sees a new number publishes its
collectives under that number, and rank 0 marks the number as concluded once it has compared them.
"""

import json
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

from gradwire.comms.bootstrap.compat import PrefixStore, Store, clone_of
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.boundary.messages import COUNT, MessageError, MessageType, Rank
from gradwire.comms.watch.collective import IssuedCollective, TimelinePart
from gradwire.comms.watch.rank import RankStatus

log = logging.getLogger("gradwire")

REQUEST_TIMEOUT = timedelta(seconds=2)
"""Timeout of each request to the store. Short, because the training thread may be the one that waits for it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Member:
    """Host of a rank, and the ranks of each of its groups."""

    host: str
    members: Mapping[str, tuple[Rank, ...]]


_MEMBER: MessageType[_Member] = MessageType(_Member, most_nbytes=1 << 24)
_STATUS: MessageType[RankStatus] = MessageType(RankStatus, most_nbytes=1 << 24)
_RESPONSE: MessageType[dict[str, list[IssuedCollective]]] = MessageType(
    dict[str, list[IssuedCollective]], most_nbytes=1 << 26
)
_TIMELINE: MessageType[TimelinePart] = MessageType(TimelinePart, most_nbytes=1 << 26)

Issued = Callable[[], Mapping[str, Sequence[IssuedCollective]]]
"""Function that returns group -> its last collectives, as far as this rank knows them."""

REQUESTED, CONCLUDED, TIMELINES = "requested", "concluded", "timelines"
"""Keys of the counters: requests for collectives, the last one that was compared, requests for timelines."""


class WatchStore:
    """Client of one rank to the store that all ranks of a watch share.

    Thread safety: requests may be made and concluded from any thread, because the connection serializes them; `Session`
    calls the other methods under its lock.

    Args:
        store: Store of the default group. It is cloned: the training thread may block in the given connection.
        rank: This rank, in the default group.
        size: Number of ranks in the default group.

    Raises:
        RuntimeError: The store is gone or does not respond within `REQUEST_TIMEOUT`. Every method raises it.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = PollingStore(PrefixStore("gradwire/watch", clone_of(store)), REQUEST_TIMEOUT)
        self.rank = rank
        self.size = size
        self._published_groups = self._responded = self._timelines = 0

    def publish_status(self, status: RankStatus) -> None:
        """Publishes the status of this rank, in place of its previous one."""
        self._put("status", asdict(status))

    def publish_groups(self, members: Mapping[str, Sequence[int]]) -> None:
        """Publishes the process groups of this rank and its host, if the number of groups is not that of the last call.

        Args:
            members: Group -> its ranks in the default group.
        """
        if len(members) != self._published_groups:
            self._published_groups = len(members)
            self._put("member", {"host": socket.gethostname(), "members": members})

    def groups(self) -> dict[int, tuple[str, dict[str, tuple[int, ...]]]]:
        """Reads rank -> (host, its groups), of the ranks that have published them."""
        return {rank: (found.host, dict(found.members)) for rank, found in self._read("member", _MEMBER).items()}

    def statuses(self) -> dict[int, RankStatus]:
        """Reads the newest status of each rank that has published one."""
        return self._read("status", _STATUS)

    def request_collectives(self) -> int:
        """Requests the last collectives of all ranks.

        Returns:
            Number of the request; that of an earlier request if it is not concluded yet.
        """
        last = self.newest_request()
        return last if last and not self.is_concluded(last) else self._store.add(REQUESTED, 1)

    def newest_request(self) -> int:
        """Reads the number of the last request for collectives; 0 before the first one."""
        return self._store.add(REQUESTED, 0)

    def respond(self, issued: Issued, timeline: Issued | None) -> int:
        """Responds to the newest request of each kind, if it has come since the last call; older ones get no response.

        Args:
            issued: Called for the response to a request for collectives.
            timeline: Called for the response to a request for timelines; None if there are none in this job.

        Returns:
            Number of the newest request for collectives; 0 before the first one.
        """
        request = self.newest_request()
        if request > self._responded:
            self._responded = request
            found = {name: [asdict(each) for each in some] for name, some in issued().items()}
            self._put(f"response/{request}", found)
        if timeline is not None and (wanted := self._store.add(TIMELINES, 0)) > self._timelines:
            self._timelines = wanted
            self._put("timeline", asdict(TimelinePart(wanted, time.time(), timeline())))
        return request

    def responses(self, request: int) -> dict[int, dict[str, list[IssuedCollective]]]:
        """Reads rank -> group -> its last collectives, of the ranks that have responded to a request."""
        return self._read(f"response/{request}", _RESPONSE)

    def request_timelines(self) -> int:
        """Makes a new request for the times of the last collectives of all ranks; returns its number, from 1."""
        return self._store.add(TIMELINES, 1)

    def timelines(self, request: int) -> dict[int, TimelinePart]:
        """Reads rank -> its times, of the ranks that have responded to this request for timelines."""
        return {rank: part for rank, part in self._read("timeline", _TIMELINE).items() if part.request == request}

    def conclude(self, request: int) -> None:
        """Marks a request, and all before it, as compared: ranks that wait for the result may end."""
        self._store.set(CONCLUDED, str(request))

    def is_concluded(self, request: int) -> bool:
        """Returns whether the responses to a request have been compared."""
        return self._store.check([CONCLUDED]) and COUNT.read(self._store.read(CONCLUDED)) >= request

    def _put(self, kind: str, found: object) -> None:
        self._store.set(f"{kind}/{self.rank}", json.dumps(found))

    def _read(self, kind: str, message: MessageType[T]) -> dict[int, T]:
        """Reads rank -> its message of a kind; skips ranks without one, and messages that cannot be parsed."""
        keys = [f"{kind}/{rank}" for rank in range(self.size)]
        # One round trip if all ranks have published, as in nearly every call; else one for each rank.
        if self._store.check(keys):
            texts = dict(enumerate(self._store.multi_get(keys)))
        else:
            texts = {rank: self._store.read(key) for rank, key in enumerate(keys) if self._store.check([key])}
        found = {}
        for rank, text in texts.items():
            try:
                found[rank] = message.read(text)
            except MessageError as error:
                log.debug("the %s of rank %d cannot be read: %s", kind, rank, error)
        return found
