"""Streams are a law in the backend: sums of CUDA tensors by a plan, waited for on whatever stream the user likes."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fake_cuda.drive import first_module, group_options, on_cuda
from fake_cuda.machine import machine
from fake_cuda.streams import FakeEvent, side_stream

NODES = "aabb"


def planned(group: Any, rank: int, plan: str = "hierarchical") -> Any:
    """The all-reduces of one rank's process group."""
    module = first_module("gradwire.comms.backend.planned", "gradwire.comms.sums")
    config = first_module("gradwire.comms.config").Config
    made = getattr(module, "PlannedAllReduce", None) or module.Sums
    options = group_options(group.store, rank, len(NODES), "fake")
    return made(
        options, config(hostname=NODES[rank], plan={"name": plan, "chunks": 2 if plan == "hierarchical" else 1})
    )


def tensors(rank: int, device: torch.device, strided: bool = False) -> list[Tensor]:
    made = [torch.arange(numel, device=device).float() + rank for numel in (700, 1, 333)]
    made.append((torch.arange(48, device=device).float() + rank).view(6, 8))
    return [each.t() if strided and each.dim() == 2 else each for each in made]


def sums(strided: bool = False) -> list[Tensor]:
    flats = [torch.arange(numel).float() * 4 + 6 for numel in (700, 1, 333)]
    matrix = (torch.arange(48).float() * 4 + 6).view(6, 8)
    return [*flats, matrix.t() if strided else matrix]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("waits_on", ["the current stream", "another stream", "a callback"])
def test_sums(strided: bool, together: bool, waits_on: str) -> None:
    def body(rank: int, device: torch.device, group: Any) -> list[Tensor]:
        backend = planned(group, rank)
        each = tensors(rank, device, strided)
        calls = [each] if together else [[one] for one in each]
        works = [backend.all_reduce(call, 1.0) for call in calls]
        torch.empty(1, device=device)
        other = side_stream()
        found = []
        with torch.cuda.stream(other if waits_on == "another stream" else torch.cuda.current_stream()):
            for work in works:
                if waits_on == "a callback":
                    doubled = work.get_future().then(lambda done: [one * 2 for one in done.value()])
                    found += [one / 2 for one in doubled.wait()]
                else:
                    assert work.wait()
            found = found or [one + 0 for one in each]
        torch.cuda.current_stream().wait_stream(other)
        for one in each:
            one.record_stream(other)
        del each, calls, works
        torch.empty(1, device=device)
        result = [one.cpu() for one in found]
        backend.close()
        return result

    results, _ = on_cuda(len(NODES), body)
    for rank in results:
        for have, want in zip(rank, sums(strided), strict=True):
            assert torch.equal(have, want)


def test_a_sum_makes_the_host_wait_for_nothing() -> None:
    def body(rank: int, device: torch.device, group: Any) -> float:
        backend = planned(group, rank)
        flat = torch.ones(1000, device=device)
        with machine().forbid_host_waits():
            works = [backend.all_reduce([flat], 0.5) for _ in range(3)]
            for work in works:
                work.wait()
            total = flat.sum()
        backend.close()
        return float(total)

    results, _ = on_cuda(len(NODES), body)
    assert results == [8000.0] * 4


def test_a_work_is_not_complete_while_the_gpu_is_busy() -> None:
    def body(rank: int, device: torch.device, group: Any) -> list[bool]:
        backend = planned(group, rank)
        work = backend.all_reduce([torch.ones(1000, device=device)], 1.0)
        before = work.is_completed()
        work.wait()
        torch.cuda.synchronize()
        after = work.is_completed()
        backend.close()
        return [before, after]

    with patch.object(FakeEvent, "query", lambda event: event.known):  # or who asks a second time would hear yes
        results, _ = on_cuda(len(NODES), body)
    assert results == [[False, True]] * 4


def test_a_sum_that_goes_directly_is_watched_and_not_complete_while_the_gpu_is_busy() -> None:
    """As one call of NCCL, without an event of gradwire's, once the first sums have been timed."""
    steps_in_a_row = first_module("gradwire.comms.step.backward_tracker").STEPS_IN_A_ROW

    def body(rank: int, device: torch.device, group: Any) -> list[bool]:
        backend = planned(group, rank, "flat")
        for _ in range(steps_in_a_row):
            backend.all_reduce([torch.ones(1000, device=device)], 1.0).wait()
        torch.cuda.synchronize()
        (executor,) = (each.executor for each in backend._communicators.values() if each.device.type == "cuda")
        idle = not executor.deadline.is_in_flight
        work = backend.all_reduce([torch.ones(1000, device=device)], 1.0)
        found = [idle, executor.deadline.is_in_flight, work.is_completed()]
        work.wait()
        torch.cuda.synchronize()
        found += [executor.deadline.is_in_flight, work.is_completed()]
        backend.close()
        return found

    with patch.object(FakeEvent, "query", lambda event: event.known):
        results, _ = on_cuda(len(NODES), body)
    assert results == [[True, True, False, False, True]] * 4


def test_only_sums_and_averages_are_planned() -> None:
    def body(rank: int, device: torch.device, group: Any) -> list[float | None]:
        backend = planned(group, rank)
        flat = torch.ones(8, device=device)
        factors = [backend.scale(op, [flat]) for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX)]
        backend.close()
        return factors

    assert on_cuda(len(NODES), body)[0] == [[1.0, 0.25, None]] * 4
