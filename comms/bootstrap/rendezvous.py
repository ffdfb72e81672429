"""Rendezvous: the ranks of a group exchange `PeerInfo` over the store, with O(n) requests in all and a few per rank.

Rank 0 draws a generation id and publishes it. Every rank publishes its info below that id, one rank in `BLOCK` packs
the infos of its block into one value, and rank 0 packs all blocks into one table, which every rank reads. A table of
16,384 ranks has some 100 kB, because most ranks have equal values in most fields.

The store may still hold what an earlier start has left (an elastic restart keeps it). Keys below another id are
ignored, and a rank that has followed the id of an earlier start follows the new one as soon as it is published.

A rank publishes the address of its probe server with its info. So a rank that exits before all have joined is detected
by those that wait for it: rank 0 probes the packers, and they probe rank 0. A rank that never joined cannot be probed,
unless the ranks have met before, in a group that still exists.
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
from gradwire.comms.bootstrap.probe import MOST_PROBES, Backoff, FindExited, PeerTable, ProbeServer
from gradwire.comms.bootstrap.store import Naps, PollingStore, StoreUnreachableError
from gradwire.comms.boundary.messages import Count, MessageError, MessageType, Most, Within, inflated
from gradwire.comms.config import VERSION, own_version
from gradwire.comms.errors import DidNotJoinError, PeerError

log = logging.getLogger("gradwire")

BLOCK = 64
"""Ranks whose infos one of them packs. With 64, rank 0 of 16,384 ranks reads 256 values and each packer 64; the square
root of the number of ranks would give the smallest maximum, 128."""

GENERATION_NBYTES = 16
"""Bytes of a generation id: hexadecimal digits."""

LINGER_SECONDS = 2.0
"""Time for the other ranks to read why the rendezvous was refused, before a process that may serve the store exits."""

GRACE_SECONDS = 2.0
"""Time for rank 0, after its timeout, to publish which ranks are missing."""

LATE_SECONDS = 30.0
"""Time after which a rank logs which ranks all wait for. The timeout, torch's by default, may be half an hour."""

ONE_VERSION = "install the same version on all nodes, from one wheel or one commit (`gradwire --version` prints it)"
"""Remedy where ranks have unlike versions of gradwire."""

ROUND = "round"
"""Key of rank 0's record: generation id, the settings that must agree, and the outcome once there is one."""

MOST_TABLE_NBYTES = 1 << 26
"""Bytes of a table, decompressed, at most: 500 per rank for 100,000 ranks."""


@dataclass(frozen=True, slots=True)
class _Round:
    """Record that rank 0 publishes under `ROUND`, for the other ranks to follow.

    Attributes:
        generation: Generation id.
        size: Number of ranks.
        device: Type of the device: `cpu` or `cuda`.
        shared: Settings that must be equal on all ranks.
        outcome: None while ranks join; empty if all have; else `refused`, `missing` or `ended`, with reason or ranks.
    """

    generation: Annotated[str, Most(64)]
    size: Count
    device: str
    shared: Mapping[str, object]
    outcome: Mapping[str, str | tuple[int, ...]] | None


@dataclass(frozen=True, slots=True)
class _Table:
    """Head of a packed table.

    Attributes:
        ranks: Number of ranks.
        values: Field -> distinct values as JSON. The index of each rank's value follows the head.
    """

    ranks: Annotated[int, Within(1, 1 << 24)]
    values: Mapping[str, tuple[str, ...]]


_PEER_INFO: MessageType[PeerInfo] = MessageType(PeerInfo)
_ROUND: MessageType[_Round] = MessageType(_Round)
_TABLE: MessageType[_Table] = MessageType(_Table, most_nbytes=MOST_TABLE_NBYTES)


class PeerInfos(Sequence[PeerInfo]):
    """The `PeerInfo` of every rank, in rank order, stored as a table with each distinct value of a field once.

    Args:
        generation: Generation id: the same on all ranks, and another one after a restart.
        columns: For each field of `PeerInfo` but the rank, its distinct values as JSON and the index of each rank's.

    Attributes:
        generation: Generation id.
    """

    def __init__(self, generation: str, columns: "dict[str, Column]") -> None:
        self.generation = generation
        self._columns = columns
        self._parsed = {name: [_FIELDS[name].read(text) for text in values] for name, (values, _) in columns.items()}

    @classmethod
    def of(cls, peer_infos: Iterable[PeerInfo], generation: str) -> "PeerInfos":
        """Makes the table of infos given in rank order."""
        return cls(generation, _columns([json.dumps(asdict(info)) for info in peer_infos]))

    def __len__(self) -> int:
        """Returns the number of ranks."""
        return len(next(iter(self._columns.values()))[1])

    @overload
    def __getitem__(self, index: int) -> PeerInfo: ...
    @overload
    def __getitem__(self, index: slice) -> list[PeerInfo]: ...
    def __getitem__(self, index: int | slice) -> PeerInfo | list[PeerInfo]:
        """Returns the info of a rank, or a list for a slice."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        rank = range(len(self))[index]
        own: Any = {name: values[self._columns[name][1][rank]] for name, values in self._parsed.items()}
        return PeerInfo(rank=rank, **own)

    def __eq__(self, other: object) -> bool:
        """Compares the infos; the generation does not count."""
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def settings(self) -> list[tuple[int, Mapping[str, str]]]:
        """Returns each distinct value of `PeerInfo.shared`, after the first rank that has it."""
        ranks = self._columns["shared"][1]
        return [(ranks.index(number), shared) for number, shared in enumerate(self._parsed["shared"])]

    def pack(self) -> bytes:
        """Serializes this into compressed bytes, which `unpack` parses on another rank."""
        return _pack(self._columns)

    @classmethod
    def unpack(cls, generation: str, packed: bytes, most_nbytes: int = MOST_TABLE_NBYTES) -> "PeerInfos":
        """Parses what `pack` returned on another rank.

        Args:
            generation: Generation id of the result.
            packed: Bytes from `pack`.
            most_nbytes: Decompressed bytes, at most.

        Raises:
            MessageError: The bytes are malformed.
        """
        return cls(generation, _unpack(packed, most_nbytes))


Column = tuple[list[str], "array[int]"]
"""Distinct values of a field, and for each rank the index of its value."""


def exchange(
    store: Store, own: PeerInfo, timeout: timedelta, server: ProbeServer | None = None, ended: FindExited | None = None
) -> PeerInfos:
    """Publishes this rank's info, waits until all ranks have called this, and returns the infos of all ranks.

    On an error the probe server no longer answers for this rank.

    Args:
        store: Store shared by all ranks, with a prefix of its own.
        own: Info of this rank.
        timeout: Timeout of the whole rendezvous.
        server: Probe server that answers for this rank from now on, at the port that `own` gives; None if none does.
        ended: Finds ranks that have exited, if these ranks have met before; None if they have not.

    Raises:
        RuntimeError: A rank did not join within the timeout, and the message names the missing ranks; or rank 0 joined
            and did not finish.
        PeerError: A rank exited before all had joined.
        StoreUnreachableError: The store does not answer.
        ValueError: A rank has another world size, device, configuration or version of gradwire; the message names the
            field and both values. Raised on every rank.
    """
    polling = store if isinstance(store, PollingStore) else PollingStore(store, timeout, ranks=own.size)
    rank = (_Leader if own.rank == 0 else _Follower)(polling, own, timeout, server, ended)
    try:
        return rank.run()
    except StoreUnreachableError as error:
        rank.leave()
        raise StoreUnreachableError(f"rank {own.rank} of {own.size} could not finish its start-up: {error}") from error
    except MessageError as error:
        rank.leave()
        raise rank.refuse(
            f"rank {own.rank}, of gradwire {own_version()}, cannot read what another rank has published, which is "
            f"probably of another version: {ONE_VERSION} ({error})"
        ) from error
    except BaseException:
        rank.leave()
        raise


class _Rank:
    """Part of the rendezvous that rank 0 and the other ranks have in common; arguments as those of `exchange`."""

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
        """Reports this rank as stopped to probes from now on; does nothing without a probe server."""
        if self._server is not None:
            self._server.unregister(self._generation, self._own.rank)

    def _publish(self, generation: str) -> None:
        """Publishes this rank's info below a generation id."""
        self._generation = generation
        # Register first: peers may probe as soon as the address is published.
        if self._server is not None:
            self._server.register(generation, self._own.rank)
        # Only the first rank of a block packs.
        self._packed = self._own.rank % BLOCK != 0
        self._store.set(f"{generation}/rank/{self._own.rank}", json.dumps(asdict(self._own)))

    def _pack_block(self) -> None:
        """Packs the infos of this rank's block, if that is its task and all have been published."""
        if self._packed:
            return
        keys = [f"{self._generation}/rank/{rank}" for rank in self._block(self._own.rank // BLOCK)]
        if self._store.check(keys):
            texts = [text.decode() for text in self._store.multi_get(keys)]
            self._store.set(f"{self._generation}/block/{self._own.rank // BLOCK}", _pack(_columns(texts)))
            self._packed = True

    def _block(self, number: int) -> range:
        return range(number * BLOCK, min((number + 1) * BLOCK, self._own.size))

    def refuse(self, reason: str) -> ValueError:
        """Publishes why the rendezvous is refused, and returns the error once the other ranks have read it.

        Waits for them for `LINGER_SECONDS` at most: this process may serve the store.
        """
        self._tell(reason)
        deadline = time.monotonic() + LINGER_SECONDS
        naps = Naps(self._own.size)
        key = f"{self._generation}/refusals"
        try:
            self._store.add(key, 1)
            while self._store.add(key, 0) < self._own.size and time.monotonic() < deadline:
                naps.sleep(deadline)
        except StoreUnreachableError:
            # The server has exited nevertheless, so there is nothing to wait for.
            return ValueError(reason)
        return ValueError(reason)

    def _tell(self, reason: str) -> None:
        """Asks rank 0 to refuse the rendezvous for all, unless another rank has asked before."""
        self._store.compare_set(f"{self._generation}/refused", "", reason)

    def _ended(self, ranks: Sequence[int]) -> list[int]:
        """Probes ranks at the addresses they have published, now or in an earlier group.

        Args:
            ranks: Ranks to probe; those without a known address are skipped.

        Returns:
            Those whose process has exited, or lives on and has left the group, in ascending order.
        """
        addresses = {}
        for rank in ranks:
            if self._generation and self._store.check([f"{self._generation}/rank/{rank}"]):
                try:
                    address = _PEER_INFO.read(self._store.read(f"{self._generation}/rank/{rank}")).address
                except MessageError as error:
                    log.debug("the info of rank %d is malformed: %s", rank, error)
                    continue
                if address is not None:
                    addresses[rank] = address
        found = PeerTable(self._generation, self._own.rank, addresses).exited(list(addresses))
        if self._ended_before is not None:
            found += self._ended_before([rank for rank in ranks if rank not in addresses])
        return sorted(found)

    def _warn_once(self, missing: Callable[[], Sequence[int]]) -> None:
        """Logs once, after `LATE_SECONDS`, which ranks all wait for.

        Args:
            missing: Returns those ranks.
        """
        if time.monotonic() <= self._warns_at:
            return
        self._warns_at = math.inf
        log.warning(
            "rank %s of %d has not joined after %g s; the others wait until `timeout`, %g s in all: look at its output",
            ", ".join(map(str, missing())),
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
    """Rank 0: draws the generation id, and decides the outcome."""

    def run(self) -> PeerInfos:
        """Returns the infos of all ranks once they have joined; otherwise publishes for all ranks why they cannot.

        Raises:
            ValueError: A setting differs between the ranks.
            DidNotJoinError: A rank did not join within the timeout.
            PeerError: A rank has exited before all had joined.
        """
        self._announce(uuid.uuid4().hex[:GENERATION_NBYTES])
        self._publish(self._generation)
        blocks = [f"{self._generation}/block/{number}" for number in range(-(-self._own.size // BLOCK))]
        naps, refused_until = Naps(), math.inf
        while True:
            self._pack_block()
            have_joined = self._packed and self._store.check(blocks)
            # A rank whose settings differ has refused: end for all with its reason, once all follow this generation.
            # A rank that comes later would take the outcome for one that an earlier start of the job has left.
            if self._store.check([f"{self._generation}/refused"]):
                refused_until = min(refused_until, time.monotonic() + LINGER_SECONDS)
                if have_joined or time.monotonic() > min(refused_until, self._deadline):
                    raise self.refuse(self._store.read(f"{self._generation}/refused").decode())
            elif have_joined:
                break
            # Name the missing ranks after the timeout, or earlier if they are known to have exited.
            if time.monotonic() > self._deadline:
                missing = self._missing(blocks)
                self._announce(self._generation, {"missing": missing})
                raise self._did_not_join(missing)
            if (
                self._can_probe()
                and self._backoff.is_due()
                and (ended := self._ended(self._missing(blocks, MOST_PROBES)))
            ):
                self._announce(self._generation, {"ended": ended})
                raise self._has_ended(ended)
            self._warn_once(lambda: self._missing(blocks, MOST_PROBES))
            naps.sleep(self._deadline)
        # All have joined: publish the table, then the outcome.
        found = PeerInfos(self._generation, _join([_unpack(block) for block in self._store.multi_get(blocks)]))
        for rank, shared in found.settings():  # a rank of a version that compares no versions has refused nothing
            if shared.get(VERSION) != (own := self._own.shared.get(VERSION)):
                raise self.refuse(_mismatch(VERSION, rank, shared.get(VERSION), own))
        self._store.set(f"{self._generation}/all", found.pack())
        self._announce(self._generation, {})
        return found

    def _tell(self, reason: str) -> None:
        """Refuses the rendezvous for all ranks."""
        self._announce(self._generation, {"refused": reason})

    def _announce(self, generation: str, outcome: dict[str, object] | None = None) -> None:
        """Publishes rank 0's record under `ROUND`, for the other ranks to follow.

        Args:
            generation: Generation id.
            outcome: None while ranks join; empty if all have; else `refused`, `missing` or `ended` -> reason or ranks.
        """
        self._generation = generation
        record = {
            "generation": generation,
            "size": self._own.size,
            "device": self._own.device,
            "shared": self._own.shared,
        }
        self._store.set(ROUND, json.dumps({**record, "outcome": outcome}))

    def _can_probe(self) -> bool:
        """Returns whether missing ranks can be probed: only if the group met before, or other blocks have addresses."""
        return self._ended_before is not None or self._own.size > BLOCK

    def _missing(self, blocks: Sequence[str], most: int | None = None) -> list[int]:
        """Returns the ranks that have published nothing, and packers that have not packed; about `most` of them."""
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
    """Every other rank: follows the generation id of rank 0."""

    def run(self) -> PeerInfos:
        """Takes part in the rendezvous as a rank other than 0: waits until rank 0 publishes that all ranks have joined.

        Rank 0 names each start of the job by a generation id in the store. This rank publishes its info under that id,
        and again under another one if rank 0 replaces it, and packs the infos of a block of ranks if that is its part.

        Returns:
            The infos of all ranks.

        Raises:
            ValueError: A setting differs between the ranks.
            DidNotJoinError: A rank did not join within the timeout.
            PeerError: A rank has exited before all had joined.
            RuntimeError: Rank 0 has joined, but did not finish within the timeout.
        """
        naps, announced = self._naps(), False
        while True:
            announced = announced or self._store.check([ROUND])
            # Follow rank 0: join a generation that is open, end with one that has an outcome.
            if announced:
                record = asdict(_ROUND.read(self._store.read(ROUND)))
                if record["generation"] != self._generation and record["outcome"] is None:
                    self._follow(record)
                    naps = self._naps()
                elif record["generation"] == self._generation and record["outcome"] is not None:
                    return self._finish(record["outcome"])
            if self._generation:
                self._pack_block()
            # Give up after the timeout, or if rank 0 has exited.
            if time.monotonic() > self._deadline:
                raise self._timed_out()
            if self._own.rank == 1 and not self._generation:
                self._warn_once(lambda: [0])
            if self._backoff.is_due() and self._probes_leader() and self._ended([0]):
                self._report_leader_exited()
                continue
            naps.sleep(self._deadline)

    def _naps(self) -> Naps:
        """Returns the pauses between polls of the store: short for the ranks that pack the infos of a block."""
        return Naps(self._own.size if self._own.rank % BLOCK else -(-self._own.size // BLOCK))

    def _probes_leader(self) -> bool:
        """Returns whether this rank probes rank 0.

        All do in groups of up to `BLOCK` ranks, and as long as they follow no generation. Else the second rank of each
        block does, and, once rank 0 has published its info, all ranks on its kernel, whom it costs no connection.
        """
        if not self._generation or self._own.size <= BLOCK or self._own.rank % BLOCK == 1:
            return True
        key = f"{self._generation}/rank/0"
        return self._store.check([key]) and _PEER_INFO.read(self._store.read(key)).kernel == own_kernel()

    def _report_leader_exited(self) -> None:
        """Publishes that rank 0 has exited, unless rank 0 has published an outcome before.

        Raises:
            PeerError: Rank 0 has exited before it published a generation.
        """
        if not self._generation:
            raise self._has_ended([0])
        text = self._store.read(ROUND).decode()
        record = asdict(_ROUND.read(text))
        if record["generation"] == self._generation and record["outcome"] is None:
            self._store.compare_set(ROUND, text, json.dumps({**record, "outcome": {"ended": [0]}}))

    def _follow(self, record: dict[str, Any]) -> None:
        """Joins the generation that rank 0 has published; refuses it if its settings differ from this rank's.

        If an earlier start of the job has left it unfinished, a later record of rank 0 replaces it. This rank's
        deadline is extended beyond rank 0's, so that rank 0 times out first and all ranks name the same missing ranks.

        Raises:
            ValueError: A setting differs; rank 0 then ends the rendezvous for all.
        """
        self.leave()
        self._generation = record["generation"]
        if (reason := _misfit(self._own, record)) is not None:
            self._tell(reason)  # before this rank joins: rank 0 must not see that all have joined without the reason
            self._publish(record["generation"])
            raise self.refuse(reason)
        self._publish(record["generation"])
        self._deadline = time.monotonic() + self._timeout.total_seconds() + GRACE_SECONDS + Naps(self._own.size).longest

    def _finish(self, outcome: dict[str, Any]) -> PeerInfos:
        """Reads the table of infos, or raises the error that rank 0 has published as the outcome."""
        if "refused" in outcome:
            raise self.refuse(outcome["refused"])
        if "missing" in outcome:
            raise self._did_not_join(outcome["missing"])
        if "ended" in outcome:
            raise self._has_ended(outcome["ended"])
        return PeerInfos.unpack(self._generation, self._store.read(f"{self._generation}/all"))

    def _timed_out(self) -> RuntimeError:
        """Returns the error after this rank's timeout: rank 0 did not join, or did not finish."""
        if not self._generation:
            return self._did_not_join([0])
        return RuntimeError(
            f"rendezvous timed out: rank {self._own.rank} of {self._own.size} waited "
            f"{self._timeout.total_seconds():g} s for rank 0, which started but did not finish; check the log of rank 0"
        )


def _misfit(own: PeerInfo, record: dict[str, Any]) -> str | None:
    """Returns the error message if a setting differs between a rank and rank 0, else None."""
    if own.size != record["size"]:
        return _mismatch("world_size", own.rank, own.size, record["size"])
    if own.device != record["device"]:
        return _mismatch("device", own.rank, own.device, record["device"])
    for name, value in own.shared.items():
        if record["shared"].get(name) != value:
            return _mismatch(name, own.rank, value, record["shared"].get(name))
    return None


def _mismatch(name: str, rank: int, here: object, there: object) -> str:
    if name == VERSION:
        return (
            f"`{VERSION}` is {here or 'of an earlier version'} on rank {rank} and {there or 'of an earlier version'} "
            f"on rank 0; wanted the same on all ranks, as their messages may differ: {ONE_VERSION}"
        )
    if name == "kernels":
        return (
            f"`kernels` are {here} on rank {rank} and {there} on rank 0; wanted the same on all ranks: "
            "the warning of the rank with `reference` says what to install there"
        )
    return (
        f"`{name}` is {here} on rank {rank} and {there} on rank 0; wanted the same on all ranks: start them with one "
        "configuration"
    )


def _columns(texts: Sequence[str]) -> dict[str, Column]:
    """Makes a column for every field of `PeerInfo` but `rank`: its distinct values, and each rank's index among them.

    Args:
        texts: Each rank's `PeerInfo` as JSON, in rank order.

    Raises:
        MessageError: An info is malformed.
    """
    infos = [asdict(_PEER_INFO.read(text)) for text in texts]
    found = {}
    for name in (each.name for each in fields(PeerInfo) if each.name != "rank"):
        values = [json.dumps(one[name]) for one in infos]
        numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
        found[name] = (list(numbers), array("I", (numbers[value] for value in values)))
    return found


def _join(parts: Sequence[dict[str, Column]]) -> dict[str, Column]:
    """Concatenates the columns of several blocks of ranks."""
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
    """Serializes columns: compressed JSON of the values, and for each index its difference to the previous rank's.

    Those differences are mostly 0 (equal values) or 1 (all values distinct), which compresses well.
    """
    ranks = len(next(iter(columns.values()))[1])
    head = json.dumps({"ranks": ranks, "values": {name: values for name, (values, _) in columns.items()}}).encode()
    body = bytearray()
    for _, index in columns.values():
        steps = array("i", map(operator.sub, index, [0, *index[:-1]]))
        body += _little(steps).tobytes()
    return zlib.compress(len(head).to_bytes(4, "little") + head + bytes(body))


def _unpack(packed: bytes, most_nbytes: int = MOST_TABLE_NBYTES) -> dict[str, Column]:
    """Parses what `_pack` returned.

    Raises:
        MessageError: The bytes are malformed.
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
    """Swaps bytes in place on big-endian hosts, so that 4-byte numbers are little-endian in the table; returns them."""
    assert numbers.itemsize == 4
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


_FIELDS: dict[str, MessageType[Any]] = {
    name: MessageType(kind) for name, kind in get_type_hints(PeerInfo).items() if name != "rank"
}
"""Field of a `PeerInfo` -> parser of its JSON value."""
