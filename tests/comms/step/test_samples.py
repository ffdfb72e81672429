"""Gradients weighed by samples: the bits of scaled ones in an ordinary sum, the average of one process over all."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.bootstrap.compat import GradBucket
from gradwire.fsdp import FsdpState
from support.processes import Processes

NODES = "aabb"
COUNTS = ((3, 1, 5, 2), (4, 4, 4, 4), (1, 7, 2, 1), (2, 0, 6, 3))
"""Samples of each rank, step by step."""

COMPRESSORS = (None, "fp16", "bf16", "int8", "waterfill4", "powersgd")


class Model(nn.Module):
    """Several buckets, matrices and vectors."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(30, 32, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 4))

    def forward(self, places: Tensor) -> Tensor:
        value: Tensor = self.layers(self.table(places))
        return value


def samples(step: int) -> list[Tensor]:
    """Of each rank."""
    places = torch.randint(0, 30, (sum(COUNTS[step]),), generator=torch.Generator().manual_seed(step))
    return list(torch.split(places, list(COUNTS[step])))


def train(hooked: Callable[[DistributedDataParallel], Any], sparse: bool = False, **ddp: Any) -> list[Tensor]:
    """The gradients of each step, which are what the optimizer takes, too."""
    model = DistributedDataParallel(Model(sparse), bucket_cap_mb=0.01, **ddp)
    say = hooked(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(len(COUNTS)):
        optimizer.zero_grad()
        say(step)
        model(samples(step)[dist.get_rank()]).square().mean().backward()
        grads = [each.grad for each in model.parameters()]
        found.append(torch.cat([each.to_dense().flatten() for each in grads if each is not None]))
        optimizer.step()
    return found


def by_samples(compressor: str | None, **options: Any) -> Callable[[DistributedDataParallel], Any]:
    def hook(model: DistributedDataParallel) -> Callable[[int], None]:
        state = gradwire.HookState(model, reduction="samples", compressor=compressor, **options)
        model.register_comm_hook(state, gradwire.comm_hook)

        def say(step: int) -> None:
            state.samples = COUNTS[step][dist.get_rank()]

        return say

    return hook


def scaled_before(compressor: str | None) -> Callable[[DistributedDataParallel], Any]:
    """An ordinary sum of gradients that each rank has multiplied by n_i / N."""

    def hook(model: DistributedDataParallel) -> Callable[[int], None]:
        state = gradwire.HookState(model, reduction={"average": False}, compressor=compressor)
        now = [0]

        def scale_and_sum(state: gradwire.HookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            counts, buffer = COUNTS[now[0]], bucket.buffer()
            own = counts[dist.get_rank()]
            buffer.mul_(own / sum(counts)) if own else buffer.zero_()
            return gradwire.comm_hook(state, bucket)

        model.register_comm_hook(state, scale_and_sum)

        def say(step: int) -> None:
            now[0] = step

        return say

    return hook


def of_one_process() -> list[Tensor]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(len(COUNTS)):
        optimizer.zero_grad()
        model(torch.cat(samples(step))).square().mean().backward()
        found.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
        optimizer.step()
    return found


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(first, second) for first, second in zip(one, other, strict=True))


def near(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((first - second).norm() / second.norm()) for first, second in zip(one, other, strict=True))


def job(rank: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    alone = of_one_process()
    found: dict[str, Any] = {
        "bits": {
            str(name): same_bits(train(by_samples(name)), train(scaled_before(name))) for name in COMPRESSORS
        },
        "apart": {
            "default": near(train(by_samples(None)), alone),
            "joined": near(train(by_samples(None, fusion=25.0)), alone),
            "static graph": near(train(by_samples(None), static_graph=True), alone),
            "sparse": near(train(by_samples(None), sparse=True), alone),
        },
        "equal counts": equal_counts(),
        "accumulated": accumulated(),
        "unsaid": unsaid(rank),
        "digest": str(train(by_samples("int8"))[-1].double().sum().item()),
    }  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()
    return found


def equal_counts() -> bool:
    """As many samples on all ranks: the bits of the average over ranks."""
    both = []
    for reduction in ("samples", "sum"):
        model = DistributedDataParallel(Model(), bucket_cap_mb=0.01)
        state = gradwire.HookState(model, reduction=reduction)
        model.register_comm_hook(state, gradwire.comm_hook)
        if reduction == "samples":
            state.samples = 3
        model(samples(1)[dist.get_rank()]).square().mean().backward()
        both.append([each.grad for each in model.parameters() if each.grad is not None])
    return same_bits(*both)


def accumulated() -> float:
    """Two micro-batches with no_sync, the second one shorter: the sum over samples, divided by those of all."""
    model = DistributedDataParallel(Model())
    state = gradwire.HookState(model, reduction="samples")
    model.register_comm_hook(state, gradwire.comm_hook)
    parts = [samples(step)[dist.get_rank()] for step in (0, 2)]
    state.samples = sum(map(len, parts))
    for place, part in enumerate(parts):
        with nullcontext() if place else model.no_sync():
            (model(part).square().mean(1).sum() / state.samples).backward()
    alone = Model()
    alone(torch.cat([*samples(0), *samples(2)])).square().mean().backward()
    grads = [
        torch.cat([each.grad.flatten() for each in found.parameters() if each.grad is not None])
        for found in (model, alone)
    ]
    return float((grads[0] - grads[1]).norm() / grads[1].norm())


def unsaid(rank: int) -> list[str]:
    """What is raised where a rank does not say its samples, and where none has any."""
    raised = []
    for count in (None if rank == 2 else 4, 0):
        model = DistributedDataParallel(nn.Linear(4, 4))
        state = gradwire.HookState(model, reduction="samples")
        model.register_comm_hook(state, gradwire.comm_hook)
        if count is not None:
            state.samples = count
        try:
            model(torch.ones(2, 4)).sum().backward()
        except Exception as error:  # noqa: BLE001 - whatever comes out of backward, it is looked at below
            raised.append(str(error))
    return raised


def test_samples_weigh(processes: Processes) -> None:
    found = processes(len(NODES), job, nodes=list(NODES), seconds=300)
    assert len({each["digest"] for each in found}) == 1
    for each in found:
        assert each["bits"] == dict.fromkeys(map(str, COMPRESSORS), True)
        assert max(each["apart"].values()) < 1e-5, each["apart"]
        assert each["equal counts"]
        assert each["accumulated"] < 1e-5
        missing, empty = each["unsaid"]
        assert "rank 2 has not set how many samples" in missing and "state.samples" in missing
        assert "`samples` is 0 on every rank" in empty


def test_a_number_of_samples_that_makes_no_sense_is_refused() -> None:
    state = gradwire.HookState(reduction="samples")
    assert state.samples is None
    with pytest.raises(ValueError, match="`samples` is -1; wanted a number of samples >= 0"):
        state.samples = -1
    for wrong in (True, 2.0):
        with pytest.raises(TypeError, match=r"`samples` is .* wanted int"):
            state.samples = wrong  # type: ignore[assignment]
    with pytest.raises(ValueError, match="`samples` is given, and `reduction` is 'sum'"):
        gradwire.HookState().samples = 4


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"elastic": True, "reduction": "samples"}, "`reduction` is samples and `elastic` is set"),
        ({"reduction": {"kind": "samples", "average": False}}, "`average` is False and `reduction` is samples"),
        ({"reduction": {"kind": "samples", "predivide": 2.0}}, r"`predivide` is 2\.0 and `reduction` is samples"),
    ],
)
def test_what_cannot_go_with_samples_is_refused_by_name(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        gradwire.Config.from_env(**options)


@pytest.mark.parametrize("kind", [FsdpState, gradwire.Outer])
def test_other_states_refuse_samples_by_name(kind: type[Any]) -> None:
    with pytest.raises(AttributeError, match=f"`samples` is not there for {kind.__name__}"):
        object.__new__(kind).samples = 3
