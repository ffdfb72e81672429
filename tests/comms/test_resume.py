"""Resume equals no interruption, bit for bit, also in the first step after it, whose buckets DDP has yet to rebuild."""

import hashlib
import io
from collections.abc import Sequence
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer

import gradwire
from gradwire.comms.fusion import Fusion, FusionPlan
from gradwire.comms.resume import Resume, decode_all_reduces, encode_all_reduces
from gradwire.comms.run.all_reduces import Bucket, FutureTensor, finish, pack
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


def gradients(model: DistributedDataParallel, step: int) -> Tensor:
    """The averages of one step; what the ranks have of them must be the same bits."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    model(torch.randn(4, 48, generator=generator)).square().mean().backward()
    found = torch.cat([each.grad.reshape(-1) for each in model.parameters() if each.grad is not None])
    digests: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(found.numpy().tobytes()).hexdigest())
    assert len(set(digests)) == 1, digests
    return found


def check_other_placement(rank: int) -> None:
    """Ranks placed unlike those that saved decode identically, and residuals are sent once."""
    dist.init_process_group("gloo")
    exact = DistributedDataParallel(Shuffled(), bucket_cap_mb=0.02)
    for name, options in {"onebit": {"warmup_steps": 1, "momentum": 0.0}, "int4": {}}.items():

        def start(hosts: str, plan: str = "auto") -> tuple[DistributedDataParallel, gradwire.HookState]:
            model = DistributedDataParallel(Shuffled(), bucket_cap_mb=0.02)
            hook: dict[str, Any] = {"compressor": name, "compressor_options": options, "plan": plan}  # noqa: B023 - called in this round
            state = gradwire.HookState(model, hostname=hosts[rank], **hook)
            model.register_comm_hook(state, gradwire.comm_hook)
            return model, state

        for before, after in ((("aabb",), ("abab",)), (("aabb",), ("abcd",)), (("aaab",), ("aabb", "flat"))):
            model, state = start(*before)
            sent = [gradients(model, step) for step in range(3)]
            saved = state.state_dict()
            model, state = start(*after)
            state.load_state_dict(saved)
            sent += [gradients(model, step) for step in range(3, 5)]
            state.flush()
            sent.append(gradients(model, 5))
            wanted = torch.stack([gradients(exact, step) for step in range(6)]).sum(0)
            off = torch.dist(torch.stack(sent).sum(0), wanted) / wanted.norm()
            assert off < 1e-6, (name, before, after, off)
        model, state = start("aaaa")
        with pytest.raises(ValueError, match=r"compressed \(hierarchical 0,1,2 3\).*compressed \(exact 0,1,2,3\)"):
            state.load_state_dict(saved)
    dist.destroy_process_group()


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
    for others, wanted in ((None, "`state` is not loaded"), (restored.state_dict(), r"`state\['0\|step'\]` is 6")):
        unlike, state = start(name)
        own = saved["hook"] if rank == 0 else others
        if own is not None:
            state.load_state_dict(own)
        with pytest.raises(ValueError, match=f"{wanted} on rank 1 and .* on rank 0; .* saved at one moment"):
            train(unlike, rank, 0, 1)
    dist.destroy_process_group()
    return same


def test_resume_equals_no_interruption(processes: Processes) -> None:
    for same in processes(len(NODES), check_resume, nodes=NODES):
        assert same == dict.fromkeys(OPTIONS, True)


UNDER_MUON = ("powersgd", "int4")
"""Of these what Muon and AdamW can be trained with."""


def two_optimizers(model: DistributedDataParallel) -> list[Optimizer]:
    parameters = list(model.parameters())
    return [
        Muon([each for each in parameters if each.ndim == 2], lr=0.02),
        AdamW([each for each in parameters if each.ndim != 2], lr=3e-3),
    ]


class Steps(Protocol):
    """What is needed of an optimizer here."""

    def step(self) -> object:
        """Changes the weights."""


def train_with(model: DistributedDataParallel, optimizers: Sequence[Steps], rank: int, first: int, last: int) -> Tensor:
    """Trains as two optimizers do, which both step once after a backward pass; returns all weights."""
    for step in range(first, last):
        rows = torch.randn(4, 48, generator=torch.Generator().manual_seed(100 * step + rank))
        model.zero_grad()
        model(rows).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def test_a_state_goes_on_where_ranks_sit_otherwise(processes: Processes) -> None:
    processes(len(NODES), check_other_placement, nodes=NODES)


def check_resume_of_two_optimizers(rank: int) -> dict[str, tuple[bool, bool]]:
    """Whether a training from a checkpoint ends with the same bits; whether it does with new optimizers, too."""
    dist.init_process_group("gloo")
    found = {}
    for name in UNDER_MUON:
        model, state = start(name)
        optimizers = two_optimizers(model)
        train_with(model, optimizers, rank, 0, STEPS // 2)
        file = io.BytesIO()
        saved_optimizers = [each.state_dict() for each in optimizers]
        torch.save(
            {"model": model.module.state_dict(), "hook": state.state_dict(), "optimizers": saved_optimizers}, file
        )
        through = train_with(model, optimizers, rank, STEPS // 2, STEPS)
        ends = []
        for complete in (True, False):
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            model, state = start(name)
            model.module.load_state_dict(saved["model"])
            state.load_state_dict(saved["hook"])
            optimizers = two_optimizers(model)
            if complete:
                for optimizer, value in zip(optimizers, saved["optimizers"], strict=True):
                    optimizer.load_state_dict(value)
            ends.append(torch.equal(train_with(model, optimizers, rank, STEPS // 2, STEPS), through))
        found[name] = ends[0], ends[1]
    dist.destroy_process_group()
    return found


def test_two_optimizers_on_one_model_resume_as_one_does(processes: Processes) -> None:
    """Muon for matrices and AdamW for the rest; what is compressed and held back is the hook's alone."""
    for found in processes(len(NODES), check_resume_of_two_optimizers, nodes=NODES):
        assert found == dict.fromkeys(UNDER_MUON, (True, False))


class SharedOutMuon:
    """Muon that shares out its work over a process group, as `Muon(process_group)` of the package `dion` does.

    Each matrix is stepped by one rank, which then sends it to the others: by collectives of its own between two
    backward passes.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
        self.matrices, self.group = matrices, group
        self.optimizer: Optimizer = Muon(matrices[dist.get_rank(group) :: dist.get_world_size(group)], lr=0.02)

    def step(self) -> None:
        self.optimizer.step()
        works = [
            dist.broadcast(each.detach(), number % dist.get_world_size(self.group), self.group, async_op=True)
            for number, each in enumerate(self.matrices)
        ]
        for work in works:
            assert work is not None
            work.wait()


def check_muon_that_shares_out_its_work(rank: int) -> dict[str, bool]:
    """Whether it ends with the bits of one that does all of it on every rank; in the hook's own group."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    same = {}
    for name in ("none", "int8"):
        ends = []
        for shared_out in (False, True):
            model = DistributedDataParallel(Shuffled(), bucket_cap_mb=0.02)
            model.register_comm_hook(gradwire.HookState(model, compressor=name), gradwire.comm_hook)
            muon, adamw = two_optimizers(model)
            matrices = [each for each in model.parameters() if each.ndim == 2]
            chosen: list[Steps] = [SharedOutMuon(matrices, group) if shared_out else muon, adamw]
            ends.append(train_with(model, chosen, rank, 0, STEPS))
        same[name] = torch.equal(*ends)
    dist.destroy_process_group()
    return same


def test_a_muon_that_shares_out_its_work_runs_beside_the_hook(processes: Processes) -> None:
    for same in processes(len(NODES), check_muon_that_shares_out_its_work, nodes=NODES):
        assert same == {"none": True, "int8": True}


def layout(*runs: tuple[str, int, int], shape: tuple[int, ...] = (10,)) -> Layout:
    slices, at = [], 0
    for name, start, numel in runs:
        slices.append(Slice(name, shape, start, at, numel))
        at += numel
    return Layout(tuple(slices))


def test_rows_bring_back_the_transfers_of_other_buckets() -> None:
    transfers = [layout(("b", 0, 10), ("a", 0, 4)), layout(("a", 4, 6))]
    assert decode_all_reduces(encode_all_reduces(transfers), [layout(("a", 0, 10)), layout(("b", 0, 10))]) == transfers


@pytest.mark.parametrize("present", [[layout(("a", 0, 10))], [layout(("a", 0, 10), ("b", 0, 9))], []])
def test_a_step_with_other_elements_is_not_forced_into_them(present: list[Layout]) -> None:
    assert decode_all_reduces(encode_all_reduces([layout(("a", 0, 10), ("b", 0, 10))]), present) is None


def a_bucket(flat: Tensor, layout: Layout) -> tuple[Bucket, FutureTensor]:
    bucket = Bucket.of(flat, layout)
    return bucket, bucket.result()


def test_gradients_travel_in_the_saved_transfers_and_come_back_to_their_buckets() -> None:
    transfers = [layout(("b", 0, 10), ("a", 0, 4)), layout(("a", 4, 6))]
    resume = Resume(encode_all_reduces(transfers), Fusion(FusionPlan()))
    a, b = torch.arange(10.0), torch.arange(100.0, 110.0)
    waiting = [a_bucket(a, layout(("a", 0, 10))), a_bucket(b, layout(("b", 0, 10)))]
    assert not resume.add(waiting[0][0])
    launches = resume.add(waiting[1][0])
    assert not resume.flush() and not resume.end_step()
    assert [launch.layout for launch in launches] == transfers
    assert torch.equal(pack(launches[0]), torch.cat([torch.arange(100.0, 110.0), torch.arange(4.0)]))
    for launch in launches:
        assert not any(future.done() for _, future in waiting)
        finish(launch, pack(launch).neg_(), None, None)
    futures = [future for _, future in waiting]
    assert torch.equal(futures[0].wait(), -torch.arange(10.0)) and futures[0].value() is a
    assert torch.equal(futures[1].wait(), -torch.arange(100.0, 110.0)) and futures[1].value() is b


def test_a_step_with_other_parameters_travels_as_it_comes_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    resume = Resume(encode_all_reduces([layout(("a", 0, 10), ("b", 0, 10))]), Fusion(FusionPlan()))
    bucket, future = a_bucket(torch.arange(10.0), layout(("a", 0, 10)))
    resume.add(bucket)
    for launch in resume.end_step():
        finish(launch, pack(launch).neg_(), None, None)
    assert torch.equal(future.wait(), -torch.arange(10.0))
    assert "not bit for bit" in caplog.text


def test_an_error_reaches_every_bucket() -> None:
    resume = Resume(encode_all_reduces([layout(("a", 0, 10))]), Fusion(FusionPlan()))
    bucket, future = a_bucket(torch.zeros(10), layout(("a", 0, 10)))
    for launch in resume.add(bucket):
        finish(launch, pack(launch), RuntimeError("rank 3 is missing"), None)
    with pytest.raises(RuntimeError, match="rank 3 is missing"):
        future.wait()
