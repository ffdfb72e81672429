"""Law: what several communicators of one GPU issue starts in one order on all ranks, by NCCL, by room or by events."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.comms.backend import inner_launches
from gradwire.comms.backend.process_group import GradwireGroup
from gradwire.comms.bootstrap.compat import GroupOptions, HashStore
from gradwire.comms.config import Config
from gradwire.comms.environment import BLOCKING_WAITS, LAUNCH_ORDER, launch_order
from gradwire.comms.transport import launch_order as module
from gradwire.comms.transport.launch_order import KEPT_FROM, Devices, TorchIssuer
from gradwire.comms.transport.nccl import INTER_NODE_CTAS, NcclTransport
from support.nccl import FakeNccl, FakeNcclWorld, FakeWork

DEVICE = torch.device("cuda", 0)
NODE_CTAS = 32
"""Thread blocks of a collective that NCCL limits itself, on a GPU up to Hopper."""


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "most_ctas", lambda device: NODE_CTAS)


@dataclass
class Waited(FakeWork):
    """Notes who makes a stream wait for it."""

    name: str = ""
    log: list[str] = field(default_factory=list)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.log.append(f"wait for {self.name}")
        return True


class Logged(FakeNccl):
    """Notes what is issued."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__(FakeNcclWorld(1), 0)
        self._name, self._log = name, log

    def _launch(self, calls: Any) -> FakeWork:
        self._log.append(self._name)
        return Waited((), self._name, self._log)


def transports(log: list[str]) -> tuple[NcclTransport, NcclTransport]:
    return NcclTransport(Logged("node", log), 0, 1), NcclTransport(Logged("between", log), 0, 1, ctas=INTER_NODE_CTAS)


def issue(node: NcclTransport, between: NcclTransport) -> None:
    for each in (node, node, between, node):
        each.all_reduce(torch.zeros(4))


def test_they_take_turns_where_there_is_no_room_for_both(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "multiprocessors", lambda device: NODE_CTAS + INTER_NODE_CTAS - 1)
    log: list[str] = []
    node, between = transports(log)
    devices = Devices()
    with caplog.at_level(logging.WARNING, "gradwire"):
        for each in (node, between, node):
            devices.join(each, DEVICE)
    (record,) = caplog.records
    assert f"With {LAUNCH_ORDER}=1" in record.getMessage()
    issue(node, between)
    assert log == ["node", "node", "wait for node", "between", "wait for between", "node"]
    devices.leave(node)
    devices.leave(between)
    assert node.serializer is between.serializer is None


@pytest.mark.parametrize(("major", "serialized"), [(9, False), (10, True)])
def test_a_blackwell_gpu_needs_room_for_twice_as_many_thread_blocks(
    major: int, serialized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    properties = SimpleNamespace(major=major, multi_processor_count=NODE_CTAS + INTER_NODE_CTAS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    node, between = transports([])
    devices = Devices()
    for each in (node, between):
        devices.join(each, DEVICE)
    assert (node.serializer is not None) is serialized


@pytest.mark.parametrize(("units", "serialized"), [(304, False), (228, False), (104, True)])
def test_rccl_takes_more_thread_blocks_and_is_not_known_to_keep_the_order(
    units: int, serialized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    properties = SimpleNamespace(major=9, multi_processor_count=units)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(module, "nccl_version", lambda: (2, 27, 7))
    monkeypatch.setenv(LAUNCH_ORDER, "1")
    node, between = transports([])
    devices = Devices()
    devices.prepare(several=True)
    for each in (node, between):
        devices.join(each, DEVICE)
    assert (node.serializer is not None) is serialized


@pytest.mark.parametrize("room", [True, False])
def test_they_overlap_where_there_is_room_or_nccl_keeps_the_order(room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "multiprocessors", lambda device: NODE_CTAS + INTER_NODE_CTAS if room else 1)
    if not room:
        monkeypatch.setenv(LAUNCH_ORDER, "1")
        monkeypatch.setattr(module, "nccl_version", lambda: KEPT_FROM)
    log: list[str] = []
    node, between = transports(log)
    devices = Devices()
    devices.prepare(several=True)
    for each in (node, between):
        devices.join(each, DEVICE)
    issue(node, between)
    assert log == ["node", "node", "between", "node"]


def test_transports_of_one_communicator_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "multiprocessors", lambda device: NODE_CTAS)
    backend, devices = FakeNcclWorld(1).backends()[0], Devices()
    for _ in range(3):
        devices.join(NcclTransport(backend, 0, 1, owned=False), DEVICE)
    assert not devices._serializers


@pytest.mark.parametrize(
    ("given", "version", "has_run", "several", "kept", "left"),
    [
        pytest.param(None, (2, 29, 7), False, True, True, True, id="set in time"),
        pytest.param(None, (2, 29, 7), True, True, False, None, id="too late"),
        pytest.param(None, (2, 25, 1), False, True, False, None, id="too old"),
        pytest.param("1", (2, 25, 1), False, True, False, True, id="too old to know it"),
        pytest.param("0", (2, 29, 7), False, True, False, False, id="the user wants none"),
        pytest.param("1", (2, 29, 7), True, True, True, True, id="the user has set it"),
        pytest.param(None, (2, 29, 7), False, False, None, None, id="one communicator"),
    ],
)
def test_nccl_is_asked_to_keep_the_order(
    given: str | None,
    version: tuple[int, ...],
    has_run: bool,
    several: bool,
    kept: bool | None,
    left: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(LAUNCH_ORDER, given or "")
    if given is None:
        monkeypatch.delenv(LAUNCH_ORDER)
    monkeypatch.setattr(module, "nccl_version", lambda: version)
    monkeypatch.setattr(module, "nccl_has_run", lambda: has_run)
    devices = Devices()
    devices.prepare(several=several)
    assert devices._kept is kept
    assert launch_order() is left
    monkeypatch.delenv(LAUNCH_ORDER, raising=False)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, None),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "TORCH_NCCL_BLOCKING_WAIT"),
        ({"NCCL_BLOCKING_WAIT": "True"}, "NCCL_BLOCKING_WAIT"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "0", "NCCL_BLOCKING_WAIT": "1"}, None),
        ({"TORCH_NCCL_BLOCKING_WAIT": "yes", "NCCL_BLOCKING_WAIT": "0"}, "TORCH_NCCL_BLOCKING_WAIT"),
    ],
)
def test_a_host_that_waits_for_each_collective_is_told_so_once(
    variables: dict[str, str], named: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for each in BLOCKING_WAITS:
        monkeypatch.delenv(each, raising=False)
    for each, value in variables.items():
        monkeypatch.setenv(each, value)
    devices = Devices()
    for _ in range(2):
        devices.prepare(several=False)
    assert len(caplog.messages) == (named is not None)
    assert all(f"{named} is set: the host waits for each collective" in line for line in caplog.messages)


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCH_ORDER, raising=False)
    Devices().prepare(several=True)
    assert launch_order() is None


def test_what_torch_issues_takes_turns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2's own collectives beside gradwire's: those that the current stream waits for by an event behind them."""
    monkeypatch.setattr(module, "multiprocessors", lambda device: NODE_CTAS)
    log: list[str] = []
    event = Waited((), "event", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(record_event=lambda: event))

    def torchs(work: Waited | None) -> Waited | None:
        log.append("torch")
        return work

    between = NcclTransport(Logged("between", log), 0, 1, ctas=INTER_NODE_CTAS)
    issuer, devices = TorchIssuer("torch's group"), Devices()
    issuer.issue(lambda: torchs(None))
    assert log == ["torch"], "nobody else is there"
    devices.join(between, DEVICE)
    devices.join(issuer, DEVICE)
    for work in (None, Waited((), "work", log)):
        issuer.issue(lambda work=work: torchs(work))  # type: ignore[misc]
        between.all_reduce(torch.zeros(4))
    waits = ["wait for between", "torch", "wait for work", "between"]
    assert log == ["torch", "torch", "wait for event", "between", *waits]
    devices.leave(between)
    devices.leave(issuer)
    assert issuer.serializer is None


@pytest.mark.parametrize("room", [NODE_CTAS, NODE_CTAS + INTER_NODE_CTAS])
def test_what_torch_issues_by_itself_waits_for_the_last_where_there_is_no_room(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "multiprocessors", lambda device: room)
    log: list[str] = []
    node, between = transports(log)
    devices = Devices()
    for each in (node, between):
        devices.join(each, DEVICE)
    devices.wait_for_last(DEVICE)
    issue(node, between)
    log.clear()
    devices.wait_for_last(DEVICE)
    assert log == (["wait for node"] if room == NODE_CTAS else [])


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[GradwireGroup]:
    """One of a single rank, whose torch's own group has an NCCL; `devices` counts it in for themselves."""
    monkeypatch.setattr(module, "multiprocessors", lambda device: NODE_CTAS)
    monkeypatch.setattr(module, "devices", Devices())
    monkeypatch.setattr(inner_launches, "nccl_backend_of", lambda group, device: "torch's NCCL")
    made = GradwireGroup(GroupOptions(HashStore(), 0, 1, timedelta(seconds=9), "one", [0]), Config())
    yield made
    made.shutdown()


def test_what_a_group_of_the_backend_leaves_to_torchs_nccl_takes_its_turn(group: GradwireGroup) -> None:
    log: list[str] = []

    def issue_torchs() -> Any:
        log.append("torch")
        return Waited((), "torch", log)

    between = NcclTransport(Logged("between", log), 0, 1, ctas=INTER_NODE_CTAS)
    group.inner_launches.issue(issue_torchs, DEVICE)
    assert log == ["torch"], "nobody else is there"
    module.devices.join(between, DEVICE)
    group.inner_launches.issue(issue_torchs, DEVICE)
    between.all_reduce(torch.zeros(4))
    group.inner_launches.issue(issue_torchs, torch.device("cpu"))
    group.inner_launches.issue(issue_torchs, DEVICE)
    assert log[1:] == ["torch", "wait for torch", "between", "torch", "wait for between", "torch"]
    module.devices.leave(between)


@pytest.mark.parametrize("messages", [False, True])
def test_what_is_coalesced_takes_one_turn_at_its_end_and_messages_none(group: GradwireGroup, messages: bool) -> None:
    log: list[str] = []

    def issue(word: str) -> Any:
        log.append(word)
        return Waited((), word, log)

    group.inner = SimpleNamespace(  # type: ignore[assignment]
        _start_coalescing=lambda device: None, _end_coalescing=lambda device: issue("end"), shutdown=lambda: None
    )
    between = NcclTransport(Logged("between", log), 0, 1, ctas=INTER_NODE_CTAS)
    module.devices.join(between, DEVICE)
    group.inner_launches.issue(lambda: issue("first"), DEVICE)  # counts it in
    between.all_reduce(torch.zeros(4))
    log.clear()
    group._start_coalescing(DEVICE)
    if not messages:
        group.inner_launches.issue(lambda: issue("collected"), DEVICE)
    group._end_coalescing(DEVICE)
    assert log == (["end"] if messages else ["collected", "wait for between", "end"])
    module.devices.leave(between)
