"""Laws of the recorder itself: what nothing orders is found, what is ordered is not, and torch is as it was."""

import json
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_cuda.kernel import run_kernel
from fake_cuda.machine import Machine, RaceError
from fake_cuda.patch import fake_cuda
from fake_cuda.streams import FakeEvent, default_stream, side_stream

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu() -> Iterator[Machine]:
    with fake_cuda() as running:
        yield running


def kinds(running: Machine) -> list[str]:
    return [fault.kind for fault in running.faults]


def test_a_side_stream_that_does_not_wait_races(gpu: Machine) -> None:
    x = torch.ones(8, device="cuda")
    with torch.cuda.stream(side_stream()):
        x * 2
    assert kinds(gpu) == ["race"]
    with pytest.raises(
        RaceError, match=r"(?s)ones writes bytes 0 to 32 on cuda:0 default.*test_recorder.*aten.mul reads"
    ):
        gpu.check()


@pytest.mark.parametrize("how", ["wait_stream", "event", "host"])
def test_a_side_stream_that_waits_does_not(gpu: Machine, how: str) -> None:
    side, x = side_stream(), torch.ones(8, device="cuda")
    if how == "wait_stream":
        side.wait_stream(torch.cuda.current_stream())
    elif how == "event":
        event = FakeEvent()
        event.record()
        side.wait_event(event)
    else:
        torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x.mul_(2)
    torch.cuda.current_stream().wait_stream(side)
    assert x.sum().item() == 16
    gpu.check()


def test_slices_of_one_bucket_may_be_on_different_streams(gpu: Machine) -> None:
    bucket, streams = torch.zeros(10, device="cuda"), [side_stream() for _ in range(2)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for number, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            bucket[5 * number : 5 * number + 5].add_(1)
    gpu.check()
    with torch.cuda.stream(streams[0]):
        bucket[4:6].add_(1)
    assert kinds(gpu) == ["race"]


def test_columns_of_a_matrix_do_not_overlap(gpu: Machine) -> None:
    rows, side = torch.zeros(4, 6, device="cuda"), side_stream()
    side.wait_stream(torch.cuda.current_stream())
    rows[:, :3].add_(1)
    with torch.cuda.stream(side):
        rows[:, 3:].add_(1)
    gpu.check()


@pytest.mark.parametrize("mended", ["", "record_stream", "wait"])
def test_memory_that_is_reused_before_completion(gpu: Machine, mended: str) -> None:
    side, x = side_stream(), torch.ones(8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    if mended == "record_stream":
        x.record_stream(side)
    if mended == "wait":
        torch.cuda.current_stream().wait_stream(side)
    del x
    torch.empty(2, device="cuda")
    assert kinds(gpu) == ([] if mended else ["reuse"])


def test_record_stream_covers_what_the_recorded_stream_has_waited_for(gpu: Machine) -> None:
    side, third, x = side_stream(), side_stream(), torch.ones(8, device="cuda")
    third.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(third):
        x.add_(1)
    x.record_stream(side)
    side.wait_stream(third)
    del x
    torch.empty(2, device="cuda")
    gpu.check()


def test_a_view_keeps_the_memory(gpu: Machine) -> None:
    x = torch.ones(8, device="cuda")
    part = x[2:4]
    del x
    assert gpu.devices[0].allocated_nbytes == 32
    del part
    assert gpu.devices[0].allocated_nbytes == 0
    assert gpu.devices[0].peak_nbytes == 32


WAITING: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).any()),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
    "tensor": lambda x: torch.tensor([1.0], device="cuda"),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "stream": lambda x: default_stream().synchronize(),
    "event": lambda x: default_stream().record_event().synchronize(),
}
NOT_WAITING: dict[str, Callable[[torch.Tensor], object]] = {
    "where": lambda x: torch.where(x > 0, x, -x),
    "pinned": lambda x: x.to("cpu", non_blocking=True),
    "masked_fill": lambda x: x.masked_fill_(x == 0, 1.0),
    "isfinite": lambda x: torch.isfinite(x).all(),
    "query": lambda x: default_stream().record_event().query(),
    "topk": lambda x: x.topk(2),
    "full": lambda x: torch.full((3,), 2.0, device="cuda"),
}


@pytest.mark.parametrize("name", [*WAITING, *NOT_WAITING])
def test_what_makes_the_host_wait(gpu: Machine, name: str) -> None:
    x = torch.ones(8, device="cuda")
    with gpu.forbid_host_waits():
        (WAITING | NOT_WAITING)[name](x)
    assert kinds(gpu) == (["host wait"] if name in WAITING else [])
    assert len(gpu.host_waits) == (name in WAITING)
    if name in WAITING:
        assert "test_recorder" in str(gpu.faults[0])


def test_a_flag_may_be_read_a_step_late(gpu: Machine) -> None:
    flag = torch.isfinite(torch.ones(8, device="cuda")).all().to("cpu", non_blocking=True)
    copied = torch.cuda.current_stream().record_event()
    with gpu.forbid_host_waits(late=True):
        torch.ones(8, device="cuda")
        copied.synchronize()
        assert bool(flag)
    gpu.check()
    assert [wait.late for wait in gpu.host_waits] == [True]


def test_pinned_memory_is_not_read_before_the_copy_is_done(gpu: Machine) -> None:
    copy = torch.ones(8, device="cuda").to("cpu", non_blocking=True)
    assert copy.sum().item() == 8
    assert kinds(gpu) == ["race"]


def test_a_query_is_false_once_and_then_true(gpu: Machine) -> None:
    x = torch.ones(8, device="cuda")
    event = torch.cuda.current_stream().record_event()
    assert [event.query(), event.query()] == [False, True]
    with torch.cuda.stream(side_stream()):
        x.add_(1)
    gpu.check()
    assert not gpu.host_waits


@pytest.mark.parametrize("read", ["wait", "value", "then", "then, wait"])
def test_futures_order_what_reads_their_value(gpu: Machine, read: str) -> None:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[CUDA])
    with torch.cuda.stream(side_stream()):
        future.set_result(torch.ones(8, device="cuda"))
    if read == "wait":
        future.wait().add(1)
    elif read == "value":
        future.value().add(1)
    else:
        child = future.then(lambda done: done.value().add_(1))
        (child.wait() if "wait" in read else child.value()).add(1)
    assert set(kinds(gpu)) == (set() if "wait" in read else {"race"})


def test_a_callback_runs_on_a_stream_behind_the_value(gpu: Machine) -> None:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[CUDA])
    seen = []

    def callback(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        seen.append(torch.cuda.current_stream())
        return done.value() + 1

    child = future.then(callback)
    with torch.cuda.stream(side_stream()) as _:
        future.set_result(torch.ones(4, device="cuda"))
    assert seen[0] != torch.cuda.current_stream()
    assert child.wait().tolist() == [2.0] * 4
    gpu.check()
    with pytest.raises(RuntimeError, match="ValueError: no"):
        future.then(lambda done: (_ for _ in ()).throw(ValueError("no"))).wait()


def test_a_value_on_another_device_than_promised_is_refused(gpu: Machine) -> None:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[torch.device("cuda", 1)])
    with pytest.raises(ValueError, match="not among the expected"):
        future.set_result(torch.ones(4, device="cuda"))


def test_cpu_and_cuda_do_not_mix(gpu: Machine) -> None:
    x = torch.ones(8, device="cuda")
    with pytest.raises(RuntimeError, match="same device"):
        x.add_(torch.ones(8))
    assert x.add(torch.tensor(1.0)).device == CUDA
    assert torch.empty(3).device.type == "cpu"


def test_a_kernel_is_one_operation(gpu: Machine) -> None:
    x, y, side = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda"), side_stream()

    def doubled(source: torch.Tensor, target: torch.Tensor) -> None:
        assert bool((source > 0).all())
        target[:4] = source[:4] * 2

    side.wait_stream(torch.cuda.current_stream())
    run_kernel("doubled", doubled, (x, y))
    assert not gpu.host_waits
    assert gpu.schedule()[0][-1]["op"] == "doubled"
    with torch.cuda.stream(side):
        x + 1
        assert not gpu.faults
        y + 1
    assert kinds(gpu) == ["race"]
    assert y.tolist() == [2.0] * 4 + [0.0] * 4


def test_the_schedule_is_plain_data(gpu: Machine) -> None:
    side, x = side_stream(), torch.ones(8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2)
    first, second = json.loads(json.dumps(gpu.schedule()))[0]
    assert (first["op"], first["written_nbytes"], first["waits"]) == ("ones", 32, [])
    assert (second["op"], second["read_nbytes"], second["waits"]) == (
        "aten.mul_",
        0,
        [[first["stream"], first["tick"]]],
    )
    assert "test_recorder.py" in second["where"]


def test_torch_is_as_it_was() -> None:
    def state() -> list[tuple[object, str, object]]:
        owners = (torch, torch.cuda, torch.futures, torch.distributed, torch.Tensor)
        return [(owner, name, value) for owner in owners for name, value in sorted(vars(owner).items())]

    before = state()
    with fake_cuda():
        torch.ones(3, device="cuda")
    assert len(state()) == len(before)
    assert all(a[:2] == b[:2] and a[2] is b[2] for a, b in zip(before, state(), strict=True))
    assert not torch.cuda.is_available()


STREAMS, CELLS = 3, 3
Program = list[tuple[str, int, int]]


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from(["read", "write", "wait"]), st.integers(0, STREAMS - 1), st.integers(0, 2)),
        max_size=14,
    )
)
def test_faults_are_exactly_the_conflicts_that_no_path_orders(program: Program) -> None:
    """The clocks against a search for paths in the graph of all operations and waits."""
    edges: dict[int, set[int]] = {}
    last: list[list[int]] = [[] for _ in range(STREAMS)]
    accesses: list[tuple[int, int, bool]] = []
    expected = False
    with fake_cuda() as running:
        streams = [side_stream() for _ in range(STREAMS)]
        cells = torch.empty(CELLS, device="cuda")
        for number, (what, stream, other) in enumerate(program):
            if what == "wait":
                streams[stream].wait_stream(streams[other])
                last[stream] = last[stream] + last[other]
                continue
            with torch.cuda.stream(streams[stream]):
                cells[other].add_(1) if what == "write" else cells[other] + 1
            reached, frontier = set(), list(last[stream])
            while frontier:
                node = frontier.pop()
                if node not in reached:
                    reached.add(node)
                    frontier += edges.get(node, ())
            for node, cell, write in accesses:
                expected |= cell == other and (write or what == "write") and node not in reached
            edges[number] = set(last[stream])
            accesses.append((number, other, what == "write"))
            last[stream] = [number]
        found = [fault for fault in running.faults if fault.kind == "race"]
    assert bool(found) == expected


def test_an_operation_without_result_reads_nothing(gpu: Machine) -> None:
    """Torch 2.15 names a stream to the allocator by such an operation; no kernel is launched."""
    with torch.library._scoped_library("gradwire_test", "FRAGMENT") as library:
        library.define("note(Tensor buffer, int number) -> ()")
        library.impl("note", lambda buffer, number: None, "CompositeExplicitAutograd")
        x, side = torch.ones(8, device="cuda"), side_stream()
        with torch.cuda.stream(side):
            torch.ops.gradwire_test.note(x, 1)
        gpu.check()
        with torch.cuda.stream(side):
            x + 1
    assert kinds(gpu) == ["race"]
