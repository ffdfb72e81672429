"""Resume equals no interruption, bit for bit, also in the first step after it, whose buckets DDP has yet to rebuild."""

import hashlib
import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.resume import Resume, from_rows, to_rows
from gradwire.comms.run.launches import Bucket, FutureTensor, finish, pack
from gradwire.compressors.base import Layout, Slice
from support.models import Shuffled
from support.processes import Processes

NODES = ["a", "a", "b", "b"]
STEPS = 6
OPTIONS: dict[str, dict[str, object]] = {
    "onebit": {"warmup_steps": 1},
    "dgc": {"warmup_steps": 1},
    "powersgd": {"warmup_steps": 1, "rank": 2},
    "int4": {},
}


def start(name: str) -> tuple[DistributedDataParallel, gradwire.HookState]:
    model = DistributedDataParallel(Shuffled(), bucket_cap_mb=0.02)
    state = gradwire.HookState(model, compressor=name, compressor_options=OPTIONS[name])
    model.register_comm_hook(state, gradwire.comm_hook)
    return model, state


def train(model: DistributedDataParallel, rank: int, first: int, last: int) -> str:
    for step in range(first, last):
        rows = torch.randn(4, 48, generator=torch.Generator().manual_seed(100 * step + rank))
        model.zero_grad()
        model(rows).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.01 * parameter.grad)
    return hashlib.sha256(
        b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    ).hexdigest()


def check_resume(rank: int) -> dict[str, bool]:
    dist.init_process_group("gloo")
    same = {}
    for name in OPTIONS:
        model, state = start(name)
        train(model, rank, 0, STEPS // 2)
        file = io.BytesIO()
        torch.save({"model": model.module.state_dict(), "hook": state.state_dict()}, file)
        through = train(model, rank, STEPS // 2, STEPS)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        again, restored = start(name)
        again.module.load_state_dict(saved["model"])
        restored.load_state_dict(saved["hook"])
        same[name] = train(again, rank, STEPS // 2, STEPS) == through
    dist.destroy_process_group()
    return same


def test_resume_equals_no_interruption(processes: Processes) -> None:
    for same in processes(len(NODES), check_resume, nodes=NODES):
        assert same == dict.fromkeys(OPTIONS, True)


def layout(*runs: tuple[str, int, int], shape: tuple[int, ...] = (10,)) -> Layout:
    slices, at = [], 0
    for name, start, numel in runs:
        slices.append(Slice(name, shape, start, at, numel))
        at += numel
    return Layout(tuple(slices))


def test_rows_bring_back_the_transfers_of_other_buckets() -> None:
    transfers = [layout(("b", 0, 10), ("a", 0, 4)), layout(("a", 4, 6))]
    assert from_rows(to_rows(transfers), [layout(("a", 0, 10)), layout(("b", 0, 10))]) == transfers


@pytest.mark.parametrize("present", [[layout(("a", 0, 10))], [layout(("a", 0, 10), ("b", 0, 9))], []])
def test_a_step_with_other_elements_is_not_forced_into_them(present: list[Layout]) -> None:
    assert from_rows(to_rows([layout(("a", 0, 10), ("b", 0, 10))]), present) is None


def a_bucket(flat: Tensor, layout: Layout) -> tuple[Bucket, FutureTensor]:
    bucket = Bucket.of(flat, layout)
    return bucket, bucket.result()


def test_gradients_travel_in_the_saved_transfers_and_come_back_to_their_buckets() -> None:
    transfers = [layout(("b", 0, 10), ("a", 0, 4)), layout(("a", 4, 6))]
    resume = Resume(to_rows(transfers))
    a, b = torch.arange(10.0), torch.arange(100.0, 110.0)
    waiting = [a_bucket(a, layout(("a", 0, 10))), a_bucket(b, layout(("b", 0, 10)))]
    for bucket, _ in waiting:
        resume.add(bucket)
    launches = resume.end_step()
    assert [launch.layout for launch in launches] == transfers
    assert torch.equal(pack(launches[0]), torch.cat([torch.arange(100.0, 110.0), torch.arange(4.0)]))
    for launch in launches:
        assert not any(future.done() for _, future in waiting)
        finish(launch, pack(launch).neg_(), None, None)
    futures = [future for _, future in waiting]
    assert torch.equal(futures[0].wait(), -torch.arange(10.0)) and futures[0].value() is a
    assert torch.equal(futures[1].wait(), -torch.arange(100.0, 110.0)) and futures[1].value() is b


def test_a_step_with_other_parameters_travels_as_it_comes_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    resume = Resume(to_rows([layout(("a", 0, 10), ("b", 0, 10))]))
    bucket, future = a_bucket(torch.arange(10.0), layout(("a", 0, 10)))
    resume.add(bucket)
    for launch in resume.end_step():
        finish(launch, pack(launch).neg_(), None, None)
    assert torch.equal(future.wait(), -torch.arange(10.0))
    assert "not bit for bit" in caplog.text


def test_an_error_reaches_every_bucket() -> None:
    resume = Resume(to_rows([layout(("a", 0, 10))]))
    bucket, future = a_bucket(torch.zeros(10), layout(("a", 0, 10)))
    resume.add(bucket)
    for launch in resume.end_step():
        finish(launch, pack(launch), RuntimeError("rank 3 is missing"), None)
    with pytest.raises(RuntimeError, match="rank 3 is missing"):
        future.wait()
