"""How the ranks of a start find each other: O(n) questions to the store in all, a few of each rank.

Rank 0 draws a name for the start and publishes it. Every rank puts what it says about itself below that name, one rank
in `BLOCK` packs what its block has said into one value, and rank 0 makes one of all blocks, which everybody reads. A
table of 16,384 ranks has some 100 kB, because most ranks say the same about most things.

The store may still hold what an earlier start has left (an elastic restart keeps it): nothing below another name is
read, and a rank that has followed the name of an earlier start follows the new one as soon as it is there.

A rank says where it can be called as soon as there is a name. So one that ends before all have come is looked for at
its probe server by those that wait for it: rank 0 for the packers, and they for rank 0. Of a rank that has not come
nothing is known, unless the ranks have met before, in a group that is still there.
"""

import json
import logging
import math
import operator
import sys
import time
import uuid
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from itertools import accumulate
from typing import Annotated, Any, get_type_hints, overload

from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.bootstrap.kernel import own_kernel
from gradwire.comms.bootstrap.placement import PeerInfo
from gradwire.comms.bootstrap.probe import MOST_PROBES, Backoff, FindExited, PeerAddress, PeerTable, ProbeServer
from gradwire.comms.bootstrap.store import Naps, PollingStore, StoreUnreachableError
from gradwire.comms.boundary.messages import Count, MessageError, MessageType, Most, Within, inflated
from gradwire.comms.errors import DidNotJoinError, PeerError

log = logging.getLogger("gradwire")

BLOCK = 64
"""Ranks whose words one of them packs. The root of the ranks would ask the fewest questions of any single rank: 128 of
16,384; with 64, rank 0 reads 256 values and each packer 64."""

GENERATION_NBYTES = 16
"""Bytes of a start's name: hexadecimal digits."""

LINGER_SECONDS = 2.0
"""Seconds for the others to read what does not fit, before the process that may serve the store ends."""

GRACE_SECONDS = 2.0
"""Seconds for rank 0 to find out who is missing, and to say so, after its time-out."""

LATE_SECONDS = 30.0
"""Seconds after which a rank says for whom all wait: the time-out, torch's own by default, may be half an hour."""

ROUND = "round"
"""The key of rank 0's word: the start's name, what all have to agree about, and the outcome once there is one."""


MOST_TABLE_NBYTES = 1 << 26
"""Bytes of what all ranks say, inflated: 500 a rank, of 100,000 ranks."""


@dataclass(frozen=True, slots=True)
class _Round:
    """Rank 0's word: see `ROUND`."""

    generation: Annotated[str, Most(64)]
    size: Count
    device: str
    nic_bytes_per_second: float | None
    shared: Mapping[str, object]
    outcome: Mapping[str, str | tuple[int, ...]] | None


@dataclass(frozen=True, slots=True)
class _Table:
    """What stands before the numbers of a packed table: how many ranks, and each column's different values."""

    ranks: Annotated[int, Within(1, 1 << 24)]
    values: Mapping[str, tuple[str, ...]]


_PEER_INFO: MessageType[PeerInfo] = MessageType(PeerInfo)
_ROUND: MessageType[_Round] = MessageType(_Round)
_TABLE: MessageType[_Table] = MessageType(_Table, most_nbytes=MOST_TABLE_NBYTES)


class PeerInfos(Sequence[PeerInfo]):
    """What all ranks have said, in rank order: a column for each field, with every different value once.

    Args:
        generation: A name for this start of these ranks: the same on all of them, and another after a restart.
        columns: For each field of `PeerInfo` but the rank, its values as JSON and the index of each rank's.
    """

    def __init__(self, generation: str, columns: "dict[str, Column]") -> None:
        self.generation = generation
        self._columns = columns
        self._parsed = {name: [_FIELDS[name].read(text) for text in values] for name, (values, _) in columns.items()}

    @classmethod
    def of(cls, peer_infos: Iterable[PeerInfo], generation: str) -> "PeerInfos":
        """Those given, in rank order."""
        return cls(generation, _columns([json.dumps(asdict(info)) for info in peer_infos]))

    def __len__(self) -> int:
        """Number of ranks."""
        return len(next(iter(self._columns.values()))[1])

    @overload
    def __getitem__(self, index: int) -> PeerInfo: ...
    @overload
    def __getitem__(self, index: slice) -> list[PeerInfo]: ...
    def __getitem__(self, index: int | slice) -> PeerInfo | list[PeerInfo]:
        """What a rank says; with a slice, several ranks."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        rank = range(len(self))[index]
        said: Any = {name: values[self._columns[name][1][rank]] for name, values in self._parsed.items()}
        return PeerInfo(rank=rank, **said)

    def __eq__(self, other: object) -> bool:
        """Whether the ranks have said the same."""
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def pack(self) -> bytes:
        """Bytes for the store; see `unpack`."""
        return _pack(self._columns)

    @classmethod
    def unpack(cls, generation: str, packed: bytes, most_nbytes: int = MOST_TABLE_NBYTES) -> "PeerInfos":
        """What `pack` was called on.

        Args:
            generation: As in the constructor.
            packed: Bytes of another rank.
            most_nbytes: Bytes of the table, inflated, at most.

        Raises:
            MessageError: They are something else.
        """
        return cls(generation, _unpack(packed, most_nbytes))


Column = tuple[list[str], "array[int]"]
"""Different values, and of each rank the index of its own."""


def exchange(
    store: Store, own: PeerInfo, timeout: timedelta, server: ProbeServer | None = None, ended: FindExited | None = None
) -> PeerInfos:
    """Publishes this rank's info and returns every rank's.

    Args:
        store: A store that all ranks share, with a prefix of its own.
        own: This rank's.
        timeout: For all of it.
        server: Probe server that answers for this rank from now on, at the port that `own` gives; None if none does.
        ended: Says which of these ranks have ended that have met before; None: they have not.

    Raises:
        RuntimeError: A rank did not join within the time-out; the message names those that are missing.
        PeerError: A rank has ended before all had joined.
        StoreUnreachableError: The store does not answer.
        ValueError: A rank has another world size, device, or configuration; the message names the field and both
            values. Raised on every rank.
    """
    polling = store if isinstance(store, PollingStore) else PollingStore(store, timeout, ranks=own.size)
    rank = (_Leader if own.rank == 0 else _Follower)(polling, own, timeout, server, ended)
    try:
        return rank.meet()
    except StoreUnreachableError as error:
        rank.leave()
        raise StoreUnreachableError(f"rank {own.rank} of {own.size} could not finish its start-up: {error}") from error
    except BaseException:
        rank.leave()
        raise


class _Rank:
    """What rank 0 and the others do alike."""

    def __init__(
        self,
        store: PollingStore,
        own: PeerInfo,
        timeout: timedelta,
        server: ProbeServer | None,
        ended: FindExited | None,
    ) -> None:
        self._store = store
        self._own = own
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._generation = ""
        self._packed = False
        self._server = server
        self._ended_before = ended
        self._backoff = Backoff()
        self._warns_at = time.monotonic() + LATE_SECONDS

    def leave(self) -> None:
        """Is called in vain from now on."""
        if self._server is not None:
            self._server.unregister(self._generation, self._own.rank)

    def _publish(self, generation: str) -> None:
        """Puts this rank's info below the name of a start."""
        self._generation = generation
        if self._server is not None:  # before anybody knows where to call
            self._server.register(generation, self._own.rank)
        self._packed = self._own.rank % BLOCK != 0  # nothing to do then
        self._store.set(f"{generation}/rank/{self._own.rank}", json.dumps(asdict(self._own)))

    def _pack_block(self) -> None:
        """Packs the words of the block, where this rank does that and all are there."""
        if self._packed:
            return
        keys = [f"{self._generation}/rank/{rank}" for rank in self._block(self._own.rank // BLOCK)]
        if self._store.check(keys):
            words = [text.decode() for text in self._store.multi_get(keys)]
            self._store.set(f"{self._generation}/block/{self._own.rank // BLOCK}", _pack(_columns(words)))
            self._packed = True

    def _block(self, number: int) -> range:
        return range(number * BLOCK, min((number + 1) * BLOCK, self._own.size))

    def _refuse(self, reason: str) -> ValueError:
        """Keeps this process, which may serve the store, here until the other ranks have read the reason, too."""
        deadline = time.monotonic() + LINGER_SECONDS
        naps = Naps(self._own.size)
        key = f"{self._generation}/refusals"
        try:
            self._store.add(key, 1)
            while self._store.add(key, 0) < self._own.size and time.monotonic() < deadline:
                naps.sleep(deadline)
        except StoreUnreachableError:  # its server has left nevertheless: nothing more to wait for
            return ValueError(reason)
        return ValueError(reason)

    def _ended(self, ranks: Sequence[int]) -> list[int]:
        """Those of some ranks that are known to have ended: at the places that they have given, now or before."""
        places = {}
        for rank in ranks:
            if self._generation and self._store.check([f"{self._generation}/rank/{rank}"]):
                try:
                    said = _PEER_INFO.read(self._store.read(f"{self._generation}/rank/{rank}"))
                except MessageError as error:
                    log.debug("what rank %d says about itself cannot be read: %s", rank, error)
                    continue
                if said.port:
                    places[rank] = PeerAddress(said.port, said.addresses, said.kernel)
        found = PeerTable(self._generation, self._own.rank, places).exited(list(places))
        if self._ended_before is not None:
            found += self._ended_before([rank for rank in ranks if rank not in places])
        return sorted(found)

    def _warn_once(self, late: Callable[[], Sequence[int]]) -> None:
        """Says, once that has taken long, for which ranks all wait."""
        if time.monotonic() <= self._warns_at:
            return
        self._warns_at = math.inf
        log.warning(
            "rank %s of %d has not come for %g s; the others wait until `timeout`, %g s in all: look at its output",
            ", ".join(map(str, late())),
            self._own.size,
            LATE_SECONDS,
            self._timeout.total_seconds(),
        )

    def _has_ended(self, ranks: Sequence[int]) -> PeerError:
        who = f"rank {', '.join(map(str, ranks))}"
        return PeerError(
            f"{who} has ended before all {self._own.size} ranks had joined: look at its output", tuple(ranks)
        )

    def _did_not_join(self, ranks: Sequence[int]) -> DidNotJoinError:
        return DidNotJoinError(
            f"`world_size` is {self._own.size} on rank {self._own.rank}, but rank {', '.join(map(str, ranks))} did not "
            f"join within {self._timeout.total_seconds():g} s: start all ranks, with the same world size"
        )


class _Leader(_Rank):
    """Rank 0."""

    def meet(self) -> PeerInfos:
        self._say(uuid.uuid4().hex[:GENERATION_NBYTES])
        self._publish(self._generation)
        blocks = [f"{self._generation}/block/{number}" for number in range(-(-self._own.size // BLOCK))]
        naps = Naps()
        while True:
            self._pack_block()
            if self._store.check([f"{self._generation}/refused"]):
                reason = self._store.read(f"{self._generation}/refused").decode()
                self._say(self._generation, {"refused": reason})
                raise self._refuse(reason)
            if self._packed and self._store.check(blocks):
                break
            if time.monotonic() > self._deadline:
                missing = self._missing(blocks)
                self._say(self._generation, {"missing": missing})
                raise self._did_not_join(missing)
            if (
                self._may_know()
                and self._backoff.is_due()
                and (ended := self._ended(self._missing(blocks, MOST_PROBES)))
            ):
                self._say(self._generation, {"ended": ended})
                raise self._has_ended(ended)
            self._warn_once(lambda: self._missing(blocks, MOST_PROBES))
            naps.sleep(self._deadline)
        found = PeerInfos(self._generation, _join([_unpack(block) for block in self._store.multi_get(blocks)]))
        self._store.set(f"{self._generation}/all", found.pack())
        self._say(self._generation, {})
        return found

    def _say(self, generation: str, outcome: dict[str, object] | None = None) -> None:
        self._generation = generation
        word = {
            "generation": generation,
            "size": self._own.size,
            "device": self._own.device,
            "nic_bytes_per_second": self._own.nic_bytes_per_second,
            "shared": self._own.shared,
        }
        self._store.set(ROUND, json.dumps({**word, "outcome": outcome}))

    def _may_know(self) -> bool:
        """Whether anything can be known of who is missing: of this rank's own block that is who has not come."""
        return self._ended_before is not None or self._own.size > BLOCK

    def _missing(self, blocks: Sequence[str], most: int | None = None) -> list[int]:
        """The ranks that have said nothing, or whose packer has stopped; not many more than `most`."""
        missing: list[int] = []
        for number, block in enumerate(blocks):
            if most is not None and len(missing) >= most:
                break
            if not self._store.check([block]):
                ranks = self._block(number)
                silent = [rank for rank in ranks if not self._store.check([f"{self._generation}/rank/{rank}"])]
                missing += silent or [ranks[0]]
        return missing


class _Follower(_Rank):
    """Every other rank."""

    def meet(self) -> PeerInfos:
        naps, came = self._naps(), False
        while True:
            came = came or self._store.check([ROUND])
            if came:
                word = asdict(_ROUND.read(self._store.read(ROUND)))
                if word["generation"] != self._generation and word["outcome"] is None:
                    self._follow(word)
                    naps = self._naps()
                elif word["generation"] == self._generation and word["outcome"] is not None:
                    return self._obey(word["outcome"])
            if self._generation:
                self._pack_block()
            if time.monotonic() > self._deadline:
                raise self._nobody_decided()
            if self._own.rank == 1 and not self._generation:
                self._warn_once(lambda: [0])
            if self._backoff.is_due() and self._is_to_look() and self._ended([0]):
                self._end_without_leader()
                continue
            naps.sleep(self._deadline)

    def _naps(self) -> Naps:
        """The packers look more often: they are few, and all others wait for them."""
        return Naps(self._own.size if self._own.rank % BLOCK else -(-self._own.size // BLOCK))

    def _is_to_look(self) -> bool:
        """Whether this rank looks after rank 0: where its own kernel knows, or as one of few."""
        if not self._generation or self._own.size <= BLOCK or self._own.rank % BLOCK == 1:
            return True
        key = f"{self._generation}/rank/0"
        return self._store.check([key]) and _PEER_INFO.read(self._store.read(key)).kernel == own_kernel()

    def _end_without_leader(self) -> None:
        """Says to all, in the place of rank 0, that it has ended, unless it has come to an outcome before.

        Raises:
            PeerError: There is no start that could end.
        """
        if not self._generation:
            raise self._has_ended([0])
        word = self._store.read(ROUND).decode()
        said = asdict(_ROUND.read(word))
        if said["generation"] == self._generation and said["outcome"] is None:
            self._store.compare_set(ROUND, word, json.dumps({**said, "outcome": {"ended": [0]}}))

    def _follow(self, word: dict[str, Any]) -> None:
        """Takes part in a generation, unless it does not fit this rank; it is an earlier one if nobody ever ends it.

        From now on rank 0's time-out decides, which began not later, so that all ranks hear from it who is missing.
        """
        self.leave()  # of an earlier start
        self._generation = word["generation"]
        if (reason := _misfit(self._own, word)) is not None:
            self._store.compare_set(f"{self._generation}/refused", "", reason)
            raise self._refuse(reason)
        self._publish(word["generation"])
        self._deadline = time.monotonic() + self._timeout.total_seconds() + GRACE_SECONDS + Naps(self._own.size).longest

    def _obey(self, outcome: dict[str, Any]) -> PeerInfos:
        if "refused" in outcome:
            raise self._refuse(outcome["refused"])
        if "missing" in outcome:
            raise self._did_not_join(outcome["missing"])
        if "ended" in outcome:
            raise self._has_ended(outcome["ended"])
        return PeerInfos.unpack(self._generation, self._store.read(f"{self._generation}/all"))

    def _nobody_decided(self) -> RuntimeError:
        if not self._generation:
            return self._did_not_join([0])
        return RuntimeError(
            f"rendezvous timed out: rank {self._own.rank} of {self._own.size} waited "
            f"{self._timeout.total_seconds():g} s for rank 0, which started but did not finish; check the log of rank 0"
        )


def _misfit(own: PeerInfo, word: dict[str, Any]) -> str | None:
    """What a rank and rank 0 do not agree about, in words."""
    if own.size != word["size"]:
        return _words("world_size", own.rank, own.size, word["size"])
    if own.device != word["device"]:
        return _words("device", own.rank, own.device, word["device"])
    if (own.nic_bytes_per_second is None) != (word["nic_bytes_per_second"] is None):
        return _words("nic_bytes_per_second", own.rank, own.nic_bytes_per_second, word["nic_bytes_per_second"])
    for name, value in own.shared.items():
        if word["shared"].get(name) != value:
            return _words(name, own.rank, value, word["shared"].get(name))
    return None


def _words(name: str, rank: int, here: object, there: object) -> str:
    if name == "kernels":
        return (
            f"`kernels` are {here} on rank {rank} and {there} on rank 0; wanted the same on all ranks: "
            "the warning of the rank with `reference` says what to install there"
        )
    return (
        f"`{name}` is {here} on rank {rank} and {there} on rank 0; wanted the same on all ranks: start them with one "
        "configuration"
    )


def _columns(words: Sequence[str]) -> dict[str, Column]:
    """PeerInfos as JSON, one for each rank, by field.

    Raises:
        MessageError: One is something else.
    """
    said = [asdict(_PEER_INFO.read(word)) for word in words]
    found = {}
    for name in (each.name for each in fields(PeerInfo) if each.name != "rank"):
        texts = [json.dumps(one[name]) for one in said]
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        found[name] = (list(numbers), array("I", (numbers[text] for text in texts)))
    return found


def _join(parts: Sequence[dict[str, Column]]) -> dict[str, Column]:
    """The columns of several blocks of ranks, one below the other."""
    found = {}
    for name in parts[0]:
        numbers: dict[str, int] = {}
        index = array("I")
        for part in parts:
            values, own = part[name]
            own_numbers = [numbers.setdefault(text, len(numbers)) for text in values]
            index.extend(own_numbers[each] for each in own)
        found[name] = (list(numbers), index)
    return found


def _pack(columns: dict[str, Column]) -> bytes:
    """A table in few bytes: deflated JSON of the values, and of each index the difference to the rank before.

    Those differences are mostly 0 (ranks that say the same) or 1 (ranks that all say something else).
    """
    ranks = len(next(iter(columns.values()))[1])
    head = json.dumps({"ranks": ranks, "values": {name: values for name, (values, _) in columns.items()}}).encode()
    body = bytearray()
    for _, index in columns.values():
        steps = array("i", map(operator.sub, index, [0, *index[:-1]]))
        body += _little(steps).tobytes()
    return zlib.compress(len(head).to_bytes(4, "little") + head + bytes(body))


def _unpack(packed: bytes, most_nbytes: int = MOST_TABLE_NBYTES) -> dict[str, Column]:
    """What `_pack` was given.

    Raises:
        MessageError: It is something else.
    """
    text = inflated(packed, most_nbytes)
    stop = 4 + int.from_bytes(text[:4], "little")
    head = _TABLE.read(text[4:stop])
    if head.values.keys() != _FIELDS.keys() or len(text) != stop + 4 * len(_FIELDS) * head.ranks:
        raise MessageError(f"a table of {head.ranks} ranks has {len(text)} bytes, and the columns {list(head.values)}")
    found = {}
    for number, (name, values) in enumerate(head.values.items()):
        steps = array("i")
        steps.frombytes(text[stop + 4 * number * head.ranks : stop + 4 * (number + 1) * head.ranks])
        index = list(accumulate(_little(steps)))
        if not all(0 <= each < len(values) for each in index):
            raise MessageError(f"a table's column {name} names values that it has not")
        found[name] = (list(values), array("I", index))
    return found


def _little(numbers: "array[int]") -> "array[int]":
    """Numbers of 4 bytes each, the lowest first, on every host."""
    assert numbers.itemsize == 4
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


_FIELDS: dict[str, MessageType[Any]] = {
    name: MessageType(kind) for name, kind in get_type_hints(PeerInfo).items() if name != "rank"
}
"""Field of a `PeerInfo` -> what reads its value, as JSON."""
