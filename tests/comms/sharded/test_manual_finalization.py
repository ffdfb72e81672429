"""torch 2.15 lets a script end backward itself: `finalize_backward()` of FSDP2 is where gradwire's step ends, too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import gradwire.fsdp
from gradwire.fsdp import FsdpState
from support.processes import Processes
from support.sharded import Tiny, batch, differs, error_of, job, mesh_of, train, weights

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_manual_backward_finalization"), reason="torch has no manual finalization before 2.15"
)


def layered(on: DeviceMesh, kind: Callable[..., Any] = fully_shard) -> Any:
    """Tiny with a unit for the first layer, whose input needs no gradient: torch reduces it at the very end."""
    model = Tiny()
    for each in (model.inside, *model.blocks, model.outside):
        kind(each, mesh=on)
    return kind(model, mesh=on)


def backward(model: Any, step: int, micro: int = 0) -> None:
    model(batch(step, micro)).square().mean().backward()


def once(model: Any, step: int) -> None:
    backward(model, step)


def without_sync(model: Any, step: int) -> None:
    for micro in range(2):
        model.set_requires_gradient_sync(False)
        backward(model, step, micro)
    model.set_requires_gradient_sync(True)
    if not manual(model):
        backward(model, step, 2)


def last_without_sync(model: Any, step: int) -> None:
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        backward(model, step, micro)


def twice(model: Any, step: int) -> None:
    backward(model, step)
    backward(model, step, 1)


def without_all_reduce(model: Any, step: int) -> None:
    for micro in range(3):
        model.set_requires_all_reduce(micro == 2)
        backward(model, step, micro)


def not_the_last(model: Any, step: int) -> None:
    """By hand, `set_is_last_backward` says nothing."""
    model.set_is_last_backward(not manual(model))
    backward(model, step)


def manual(model: Any) -> bool:
    return bool(model._get_fsdp_state()._state_ctx.manual_backward_finalization)


PASSES: dict[str, tuple[Callable[[Any, int], None], int]] = {
    "once": (once, 1),
    "set_requires_gradient_sync": (last_without_sync, 1),
    "twice": (twice, 2),
    "set_requires_all_reduce": (without_all_reduce, 1),
    "set_is_last_backward": (not_the_last, 1),
}
"""Backward passes -> and gradwire's steps in one of the optimizer's."""


def by_hand(take: Callable[[Any, int], None], asynchronous: bool = False) -> Callable[[Any, int], None]:
    def step_of(model: Any, step: int) -> None:
        model.set_manual_backward_finalization(True)
        take(model, step)
        if asynchronous:
            model.finalize_backward(async_op=True).wait()
        else:
            model.finalize_backward()

    return step_of


def replicas_agree(mesh: DeviceMesh, model: Any) -> None:
    group = mesh["replicate"].get_group()
    for value in weights(model).values():
        there = [torch.empty_like(value) for _ in range(group.size())]
        dist.all_gather(there, value.contiguous(), group=group)
        assert torch.equal(there[0], there[-1])


def between_replicas(rank: int) -> None:
    with job() as mesh:
        for name, (take, steps) in PASSES.items():
            native = layered(mesh)
            train(native, 2, take)
            for compressor in ("none", "int8"):
                automatic = layered(mesh["shard"])
                gradwire.fsdp.apply(automatic, replicas=mesh["replicate"], compressor=compressor)
                train(automatic, 2, take)
                for asynchronous in (False, True) if take is once else (False,):
                    ours = layered(mesh["shard"])
                    state = gradwire.fsdp.apply(ours, replicas=mesh["replicate"], compressor=compressor)
                    train(ours, 2, by_hand(take, asynchronous))
                    case = name, compressor, asynchronous
                    assert state.steps == 2 * steps, (*case, state.steps)
                    replicas_agree(mesh, ours)
                    if compressor == "none":
                        # Gradients of micro-batches are added in another order, which rounds otherwise.
                        assert error_of(weights(ours), weights(native)) < 1e-6, case
                        assert name != "once" or not differs(weights(ours), weights(native)), case
                    elif name != "twice":
                        assert error_of(weights(ours), weights(automatic)) < 1e-6, case
                    state.close()
        all_at_the_end(mesh)
        nothing_is_left(mesh)
        without_shards(mesh)


def all_at_the_end(mesh: DeviceMesh) -> None:
    """No pass reduces anything: all of it happens in `finalize_backward()`."""

    def hooked(model: Any) -> FsdpState:
        return gradwire.fsdp.apply(model, replicas=mesh["replicate"])

    native, ours = layered(mesh), layered(mesh["shard"])
    state = hooked(ours)
    train(native, 2, by_hand(without_sync))
    train(ours, 2, by_hand(without_sync))
    assert not differs(weights(ours), weights(native))
    assert state.steps == 2


def nothing_is_left(mesh: DeviceMesh) -> None:
    """Sums of shards that were never averaged would be lost."""
    ours = layered(mesh["shard"])
    gradwire.fsdp.apply(ours, replicas=mesh["replicate"])
    ours.set_manual_backward_finalization(True)
    ours.set_requires_all_reduce(False)
    backward(ours, 0)
    with pytest.raises(RuntimeError, match=r"leave out set_requires_all_reduce\(False\)"):
        ours.finalize_backward()


def without_shards(mesh: DeviceMesh) -> None:
    for take in (once, last_without_sync):
        native, ours = (layered(mesh["replicate"], replicate) for _ in range(2))
        state = gradwire.fsdp.apply(ours)
        train(native, 2, by_hand(take))
        train(ours, 2, by_hand(take))
        assert not differs(weights(ours), weights(native))
        assert state.steps == 2


def test_a_step_ends_behind_finalize_backward(processes: Processes) -> None:
    processes(4, between_replicas, nodes="aabb")


def between_shards(rank: int) -> None:
    with job():
        mesh = mesh_of(1, 4)["shard"]
        for shards in ("exact", "waterfill4"):
            for take in (once, last_without_sync, twice):
                automatic, ours = layered(mesh), layered(mesh)
                for model in (automatic, ours):
                    gradwire.fsdp.apply(model, shards=shards, seed=1)
                train(automatic, 2, take)
                train(ours, 2, by_hand(take))
                limit = 1e-6 if shards == "exact" else 0.05
                assert error_of(weights(ours), weights(automatic)) < limit, (shards, take)


def test_shards_are_reduced_behind_finalize_backward(processes: Processes) -> None:
    processes(4, between_shards, nodes="aabb")
