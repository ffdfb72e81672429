"""Whatever bytes come from another process, a parser gives a value of its type or one error; never anything else."""

import ast
import dataclasses
import gc
import json
import random
import socket
import tracemalloc
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import pytest

from gradwire.bench.doctor import control as doctor_control
from gradwire.bench.doctor import network as doctor
from gradwire.comms import checkpoint
from gradwire.comms.bootstrap import agree, failure_reporter, failures, probe, rendezvous, ring_connections
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.bootstrap.failures import FAILED, PeerFailure
from gradwire.comms.bootstrap.kernel import UNKNOWN
from gradwire.comms.bootstrap.placement import PeerInfo
from gradwire.comms.bootstrap.rendezvous import PeerInfos
from gradwire.comms.boundary.messages import (
    COUNT,
    MOST_DEPTH,
    MessageError,
    MessageType,
    Most,
    Within,
    inflated,
    parsed,
)
from gradwire.comms.elastic import joining, membership, peer_info, residual_notes, transfer
from gradwire.comms.observe import metrics, order, stall, trace
from gradwire.comms.outer import exchange, start, workers
from gradwire.comms.sharded import agreement, nodes
from gradwire.comms.transport import segment
from gradwire.comms.watch import watch_store
from gradwire.comms.watch.collective import IssuedCollective, TimelinePart
from gradwire.comms.watch.links import LinkState
from gradwire.comms.watch.rank import EndPoint, GroupState, RankStatus
from gradwire.topology.cluster import GpuFabric
from gradwire.topology.host_summary import Hardware

ROOT = Path(__file__).resolve().parents[3]


@dataclasses.dataclass(frozen=True)
class Example:
    number: Annotated[int, Within(0, 10)]
    names: Annotated[tuple[str, ...], Most(2)]
    rate: float | None = None
    kind: Literal["a", "b"] = "a"

    def __post_init__(self) -> None:
        if self.number == 7:
            raise ValueError("seven")


EXAMPLE: MessageType[Example] = MessageType(Example, most_nbytes=200)


def test_a_value_of_the_declared_type_comes_back() -> None:
    assert EXAMPLE.read(b'{"number": 3, "names": ["x"], "rate": 2}') == Example(3, ("x",), 2.0)
    assert EXAMPLE.read('{"number": 3, "names": [], "kind": "b"}') == Example(3, (), None, "b")
    numbered: MessageType[Mapping[int, tuple[bool, list[int]]]] = MessageType(Mapping[int, tuple[bool, list[int]]])
    assert numbered.read('{"4": [true, [1, 2]]}') == {4: (True, [1, 2])}
    assert MessageType[float](float, finite=False).read("Infinity") == float("inf")


@pytest.mark.parametrize(
    "said",
    [
        *(b"", b"\xff", b"{", b"nonsense", b"[]", b"3", b"null", b"{}", b'"x"'),
        *(b'{"number": 11, "names": []}', b'{"number": -1, "names": []}', b'{"number": 3.0, "names": []}'),
        *(b'{"number": true, "names": []}', b'{"number": 7, "names": []}', b'{"number": 1, "names": ["a","b","c"]}'),
        *(b'{"number": 1, "names": "a"}', b'{"number": 1, "names": [1]}', b'{"number": 1, "names": [], "more": 1}'),
        *(b'{"number": 1, "names": [], "rate": 1e999}', b'{"number": 1, "names": [], "rate": NaN}'),
        *(b'{"number": 1, "names": [], "rate": -Infinity}', b'{"number": 1, "names": [], "kind": "c"}'),
        *(b'{"number": 1, "names": [], "rate": "1"}', b'{"number": 1, "names": []}' + b" " * 200),
        b'{"number": ' + b"1" * 100 + b', "names": []}',
    ],
)
def test_everything_else_is_one_error(said: bytes) -> None:
    with pytest.raises(MessageError):
        EXAMPLE.read(said)


@pytest.mark.parametrize(
    "said",
    [b"[" * 100_000, b'{"a":' * 50_000, b"[" * 50_000 + b"]" * 50_000, b'"' + b'\\"' * 100_000, b"9" * 1_000_000],
)
def test_depth_and_length_are_refused(said: bytes) -> None:
    """In a time that grew with the square of the bytes this would take minutes."""
    with pytest.raises(MessageError):
        parsed(said)
    assert parsed(b"[" * MOST_DEPTH + b"]" * MOST_DEPTH) != []
    assert parsed(json.dumps(["[{" * 100])) == ["[{" * 100]


@dataclasses.dataclass
class Tallies:
    """Fields of every kind that a record of a rank may have."""

    hosts: set[str]
    channels: Counter[tuple[int, str]] = dataclasses.field(default_factory=Counter)
    names: Mapping[int, str] = dataclasses.field(default_factory=dict)


TALLIES: MessageType[Tallies] = MessageType(Tallies)


@pytest.mark.parametrize("filled", [True, False])
def test_what_is_written_is_read_back(filled: bool) -> None:
    own = Tallies({"b", "a"}, Counter({(0, "send"): 2, (1, "receive"): 1}), {3: "x"}) if filled else Tallies(set())
    found = TALLIES.read(MessageType.write(own))
    assert found == own and type(found.channels) is Counter


@pytest.mark.parametrize(
    "said",
    [
        b'{"hosts": ["a", "a"]}',
        b'{"hosts": {"a": 1}}',
        b'{"hosts": [], "channels": [[[0, "send"], 1], [[0, "send"], 2]]}',
        b'{"hosts": [], "channels": [[[0, 1], 1]]}',
        b'{"hosts": [], "channels": {"0": 1}}',
        b'{"hosts": [], "channels": [[[0, "send"], "many"]]}',
    ],
)
def test_sets_and_counts_are_checked(said: bytes) -> None:
    with pytest.raises(MessageError):
        TALLIES.read(said)


def test_inflating_takes_no_more_memory_than_is_allowed() -> None:
    bomb = zlib.compress(bytes(300 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(MessageError):
            inflated(bomb, 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    packed = zlib.compress(b"x" * 1000)
    assert inflated(packed, 1000) == b"x" * 1000
    for wrong, most in ((packed, 999), (packed[:-1], 1000), (packed + b"y", 1000), (b"", 1000), (b"zip", 1000)):
        with pytest.raises(MessageError):
            inflated(wrong, most)


def test_no_message_keeps_what_its_reader_holds() -> None:
    """An error that were kept would hold its frames, and those of all callers, until the next collection."""

    class Held:
        pass

    def read(said: str) -> "weakref.ref[Held]":
        held = Held()
        try:
            EXAMPLE.read(said)
        except MessageError:
            return weakref.ref(held)
        return weakref.ref(held)

    gc.disable()
    try:
        for said in ('{"number": 1, "names": [], "rate": null}', '{"number": 1, "names": [], "rate": 1}', "[", "1e999"):
            assert read(said)() is None, said
    finally:
        gc.enable()


def test_a_type_that_no_message_can_have_is_refused() -> None:
    with pytest.raises(TypeError, match="no message can be declared with"):
        MessageType(type[int])


FABRIC = GpuFabric(
    compute_capability=90,
    nvlink=True,
    nvls=True,
    ll128=True,
    amd_cpu=False,
    network="roce",
    network_seconds=0.0,
)
HARDWARE = Hardware(1e9, 2e9, "mlx5_0", fabric=FABRIC, fastest=("a", "b"))
PEER_INFO = PeerInfo(
    1, 2, ("h", "b", "1"), ("rack",), "cpu", "2.13.0", HARDWARE, {"compressor": "int8"}, 1e9, 80, ("10.0.0.1",), "k"
)
STATUS = RankStatus(
    3,
    1.5,
    {"default": GroupState(4, 3, 0.5, 1.0, (EndPoint(3, 0.1, 1.0),))},
    {"backward": 1.0},
    {"backward": "train.py:3"},
    links={"10.0.0.1>10.0.0.2": LinkState(0.1, 5, 6, 7)},
)
ISSUED = {"default": [IssuedCollective(3, "all_reduce", "train.py:3", 1.0, 2.0)]}


def read_control(said: bytes) -> object:
    return doctor_control._STARTED.read(said)


def read_metrics(said: bytes) -> object:
    """What the metrics' port does with a request."""
    here, there = socket.socketpair()
    with here, there:
        assert 0 <= metrics._lacks(said) <= metrics.MOST_REQUEST_NBYTES
        server = object.__new__(metrics._Scrapes)
        server._text = lambda: "x 1\n"
        try:
            server._respond(there, said)
        except OSError as error:
            raise AssertionError(error) from error
        there.close()
        return here.recv(4096)


PARSERS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "failure, at servers, in rings and as the alarm": (
        PeerFailure.unpacked,
        PeerFailure("it has ended", FAILED, (1, 2), 3).packed(0),
    ),
    "a probe server's place": (
        probe.PeerAddress.unpacked,
        probe.PeerAddress(4000, ("10.0.0.1", "fe80::1"), "kernel").packed().encode(),
    ),
    "a ring's place": (ring_connections._RECORD.read, json.dumps([4000, ["10.0.0.1"], "kernel", "ab" * 16]).encode()),
    "launches of a rank that has left": (COUNT.read, b"17"),
    "a survivor's report": (
        failure_reporter._REPORT.read,
        json.dumps(
            {"dead": [1], "phase": "x", "launches": 3, "waiting": True, "overdue": False, "seen": "y", "own": True}
        ).encode(),
    ),
    "a verdict": (failure_reporter._Verdict.unpacked, failure_reporter._Verdict({1}, {2: "it"}).packed().encode()),
    "a peer info": (rendezvous._PEER_INFO.read, json.dumps(asdict(PEER_INFO)).encode()),
    "a round": (
        rendezvous._ROUND.read,
        json.dumps(
            {
                "generation": "ab",
                "size": 2,
                "device": "cpu",
                "shared": {"a": "b"},
                "outcome": {"missing": [1]},
            }
        ).encode(),
    ),
    "a table of peer_infos": (lambda said: PeerInfos.unpack("", said)[0], PeerInfos.of([PEER_INFO] * 3, "").pack()),
    "the peer info of a joining process": (
        lambda said: peer_info.unpacked(said.decode("latin1")),
        peer_info.packed(PEER_INFO).encode(),
    ),
    "a request to join": (
        joining._REQUEST.read,
        json.dumps({"name": "h/1/2", "shared": {"a": "b"}, "peer_info": "x", "model": {"w": "float32"}}).encode(),
    ),
    "an answer to it": (
        joining._ANSWER.read,
        json.dumps({"generation": 3, "rank": 1, "members": ["a", "b"], "packed_infos": {"a": "x"}}).encode(),
    ),
    "a list of joining processes": (joining._JOINING.read, json.dumps([[1, "a", "x"]]).encode()),
    "the members": (membership._MEMBERS.read, json.dumps({"left": [0, 2], "joined": {"a": "x"}}).encode()),
    "ranks that are gone": (membership._RANKS.read, b"[1, 5]"),
    "a note of residuals": (residual_notes._NOTE.read, b"[20, 1.5]"),
    "what comes before a state": (
        transfer._HEAD.read,
        json.dumps({"shared": [1], "refused": None, "plain": 10, "pieces": [[4, 4]]}).encode(),
    ),
    "why a state was refused": (transfer._WHY.read, b'"it is of another model"'),
    "a line at shared memory": (segment._MESSAGE.read, b'{"rank": 1, "mapped": true}'),
    "an offer of shared memory": (
        segment._OFFER.read,
        json.dumps({"name": "gradwire-ab", "network": "4.1", "size": 2, "block_nbytes": 4096}).encode(),
    ),
    "a decision": (agree._DECIDED.read, b'["accepted", {"a": [1, 2.5, null]}]'),
    "a value to agree on": (agree._VALUE.read, b'{"a": [1, 2.5, null]}'),
    "facts that must be equal": (agree._FACTS.read, b'[["compressor", "int8"]]'),
    "a start of sharded training": (agreement._START.read, b'"ab12"'),
    "ranks of a row": (agreement._RANKS.read, b"[0, 2]"),
    "the host of a rank": (nodes._HOST.read, b'["h", "b", "1"]'),
    "digests of tensors that are not trained": (start._DIGESTS.read, b'["ab", "cd"]'),
    "shards of a worker": (workers._SHARDS.read, b'["w", [0, 1]]'),
    "a word about a state of Outer": (exchange._WORD.read, b'{"round": 3, "digest": "ab"}'),
    "values of a saved state": (checkpoint._LIST.read, b'["3", {"w": [4, 17], "step": [null, null]}]'),
    "values of a state of format 2": (checkpoint._LIST_IN_2.read, b'{"w": 4, "step": null}'),
    "whether a file was found": (checkpoint._FOUND.read, b'[true, ""]'),
    "notes of a trace": (trace._NOTES.read, b'[["lane 0.0", "send", 1.5, 2.5, {"nbytes": 8}]]'),
    "where a rank waits": (order._WAIT.read, json.dumps(asdict(order.Wait("ab", 0, 3, "0 (w)"))).encode()),
    "a stalled rank's report": (
        stall._REPORT.read,
        json.dumps(asdict(stall.StallReport(3, 1.5, 2, "x", "b", "w"))).encode(),
    ),
    "a watch's status": (watch_store._STATUS.read, json.dumps(asdict(STATUS)).encode()),
    "a watch's introduction": (watch_store._MEMBER.read, b'{"host": "h", "members": {"default": [0, 1]}}'),
    "a watch's answer": (
        watch_store._RESPONSE.read,
        json.dumps({name: [asdict(each) for each in some] for name, some in ISSUED.items()}).encode(),
    ),
    "a watch's timeline": (watch_store._TIMELINE.read, json.dumps(asdict(TimelinePart(3, 1.0, ISSUED))).encode()),
    "a doctor's question": (
        doctor._REQUEST.read,
        json.dumps({"do": "flow", "sends": 1, "receives": 1, "seconds": 0.1, "buffer": 0, "pace": 0.0}).encode(),
    ),
    "a doctor's answer": (
        doctor._FLOWED.read,
        json.dumps({"rate": 1e9, "sent": asdict(doctor.SentSegments(1, 2, 0.5, 0.5))}).encode(),
    ),
    "a doctor's time": (doctor._CLOCK.read, b'{"time": 1.5}'),
    "a doctor that is ready": (doctor._READY.read, b'{"ready": true}'),
    "a doctor that has started": (read_control, b'{"host": "h", "time": 1.5}'),
    "a request for metrics": (read_metrics, b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n"),
}
"""Name -> the parser of a message, and one that it takes."""

INSIDE = {
    "failure_reporter._VERDICT": "_Verdict.unpacked",
    "failures._FAILURE": "PeerFailure.unpacked",
    "probe._ADDRESS": "PeerAddress.unpacked",
    "rendezvous._TABLE": "PeerInfos.unpack",
}
"""Message type -> the parser in `PARSERS` that reads it."""


def test_every_message_type_is_in_the_table() -> None:
    """A new one gets a line in `PARSERS`, and so 100,000 mutated messages."""
    text, declared = Path(__file__).read_text(), set()
    for folder in ("comms", "bench"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("MessageType["):
                    declared.add(f"{file.stem}.{ast.unparse(node.target)}")
    assert len(declared) > 35
    aliased = {"network": "doctor", "control": "doctor_control"}
    for each in declared - INSIDE.keys() - {"messages.COUNT"}:
        module, _, name = each.partition(".")
        assert f"{aliased.get(module, module)}.{name}.read" in text, f"{each} is in no line of PARSERS"
    assert declared >= INSIDE.keys()


TOKENS = (
    *(b"1e999", b"-1e999", b"NaN", b"Infinity", b"-1", b"1e30", b"9" * 40, b"0.5", b"true", b"null", b'""', b"[]"),
    *(b"{}", b"[" * 40, b"]", b"}", b'"', b"\\", b"\\u0000", b"\xff", b"\x00", b",", b":", b'"\\ud800"', b"65536"),
    *(b"18446744073709551616", b"-9223372036854775809", b'{"a":1}', b"\r\n\r\n", b" ", b"\x80\x04."),
)


def mutated(said: bytes, numbers: random.Random) -> bytes:
    """A message with one to four changes: bits, bytes, tokens that are put in or taken for others, parts doubled."""
    found = bytearray(said)
    for _ in range(numbers.choice((1, 1, 1, 2, 4))):
        at = numbers.randrange(len(found) + 1)
        end = min(at + numbers.choice((0, 1, 1, 2, 8)), len(found))
        match numbers.randrange(5):
            case 0 if at < len(found):
                found[at] ^= 1 << numbers.randrange(8)
            case 1:
                found[at:end] = numbers.choice(TOKENS)
            case 2:
                del found[at:end]
            case 3:
                found[at:at] = found[numbers.randrange(len(found) + 1) :][: numbers.randrange(40)]
            case _:
                found[at:end] = bytes([numbers.randrange(256)])
    return bytes(found)


def hold(name: str, count: int) -> None:
    read, good = PARSERS[name]
    read(good)
    numbers = random.Random(name)
    refused = 0
    for _ in range(count):
        said = mutated(good, numbers)
        try:
            read(said)
        except MessageError:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{said!r} raises {error!r}") from error
    assert refused or name == "a request for metrics"


@pytest.mark.parametrize("name", PARSERS)
def test_mutated_messages_are_values_or_one_error(name: str) -> None:
    hold(name, 300)


@pytest.mark.parametrize("name", PARSERS)
def test_a_hundred_thousand_mutated_messages(name: str) -> None:
    hold(name, 100_000)


NOT_FINITE = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999")
TOO_LONG = ("9" * 30, "-" + "9" * 30, "9" * 5000)
TOO_LARGE = (str(1 << 64), str(-(1 << 63) - 1))
OF_ANY_VALUE = {
    *("a decision", "what comes before a state", "a value to agree on", "a word about a state of Outer"),
    "notes of a trace",
}
"""Parsers of a part that its reader checks."""
TAKE_INFINITY = {"a decision", "a note of residuals", "a value to agree on"}
"""Parsers of numbers that may be infinite; see `test_structure.py`."""


def with_numbers(
    value: object, put: Callable[[object], None]
) -> Iterator[tuple[int | float, Callable[[object], None]]]:
    """Yields each number in a parsed message, with a function that puts something else in its place."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value, put
    if isinstance(value, dict | list):
        for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield from with_numbers(each, partial(value.__setitem__, key))


@pytest.mark.parametrize("name", PARSERS)
def test_no_number_is_taken_that_is_not_finite_or_too_large(name: str) -> None:
    read, good = PARSERS[name]
    try:
        value = [json.loads(good)]
    except ValueError:
        pytest.skip("no JSON")
    for number, put in with_numbers(value, lambda other: None):
        tokens = [*TOO_LONG, *(TOO_LARGE if isinstance(number, int) and name not in OF_ANY_VALUE else ())]
        for token in tokens if name in TAKE_INFINITY else (*NOT_FINITE, *tokens):
            put("the number")
            with pytest.raises(MessageError):
                read(json.dumps(value[0]).replace('"the number"', token).encode())
        put(number)


@pytest.mark.parametrize("address", ["node7", "node7.cluster.example", "", "10.0.0.1:80", "10.0.0.256", "a" * 300])
def test_an_address_is_a_number_so_that_no_name_is_looked_up(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver may take half a minute, in the thread of the ring for example."""

    def look_up(*arguments: object, **named: object) -> list[object]:
        raise AssertionError(f"{arguments} is looked up")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    store = HashStore()
    store.set("alive/1", json.dumps([4000, [address], "kernel", "ab" * 16]))
    assert ring_connections.rank_state(store, 1) == UNKNOWN
    for read, said in (
        (probe.PeerAddress.unpacked, [4000, ["10.0.0.1", address], "kernel"]),
        (rendezvous._PEER_INFO.read, asdict(dataclasses.replace(PEER_INFO, addresses=(address,)))),
    ):
        with pytest.raises(MessageError, match=r"IP address|at most 64"):
            read(json.dumps(said).encode())


def test_the_numbers_that_ended_a_probe_server_are_refused() -> None:
    for said in (b'["x", "failed", [1e999], null]', b'["x", "failed", [-1], null]', b'["x", "other", [], null]'):
        with pytest.raises(MessageError):
            PeerFailure.unpacked(said)
    assert failures.LONGEST_FAILURE_NBYTES < 1 << 20
