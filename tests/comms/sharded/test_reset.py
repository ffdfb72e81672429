"""`reset_iter_state()` of FSDP2 drops an iteration that failed: gradwire keeps nothing of it either."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule

import gradwire.fsdp
from support.processes import Processes
from support.sharded import Step, Tiny, batch, differs, error_of, job, sharded, train, weights


class PlantedError(Exception):
    """Of a backward pass, behind the first reductions of gradients."""


class Failing(torch.autograd.Function):
    """Passes its input on, and raises in backward."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise PlantedError


def backward(model: Any, step: int) -> None:
    model(batch(step)).square().mean().backward()


def with_failed_backward(model: Any, step: int) -> None:
    fail: Any = Failing.apply
    handle = model.blocks[0].register_forward_hook(lambda module, given, out: fail(out))
    try:
        backward(model, step)
    except PlantedError:
        handle.remove()
        return
    raise AssertionError("nothing failed")


def with_sums_of_shards(model: Any, step: int) -> None:
    model.set_requires_all_reduce(False)
    backward(model, step)
    model.set_requires_all_reduce(True)


def with_unused_forward(model: Any, step: int) -> None:
    model(batch(step))


DROPPED: tuple[Callable[[Any, int], None], ...] = (with_failed_backward, with_sums_of_shards, with_unused_forward)
TORCH_KEEPS = () if hasattr(FSDPModule, "finalize_backward") else (with_failed_backward,)
"""Before 2.15 torch itself adds gradients of a failed backward pass that were not reduced yet to the next ones."""


def behind(dropped: Callable[[Any, int], None]) -> Step:
    """A step; in front of the third an iteration that is dropped."""

    def take(model: Any, step: int) -> None:
        if step == 2:
            dropped(model, 50)
            model.reset_iter_state()
            model.zero_grad()  # since 2.15 done by the former
        backward(model, step)

    return take


def dropped_iterations(rank: int) -> None:
    with job() as mesh:

        def replicated() -> Any:
            model = Tiny()
            for block in model.blocks:
                replicate(block, mesh=mesh["replicate"])
            return replicate(model, mesh=mesh["replicate"])

        def trained(model: Any, take: Step, **options: Any) -> dict[str, Tensor]:
            state = gradwire.fsdp.apply(model, **options) if options else None
            train(model, 4, take)
            if state is not None:
                state.close()
            return weights(model)

        for dropped in DROPPED:
            take = behind(dropped)
            native = trained(sharded(mesh), take)
            assert error_of(trained(sharded(mesh["shard"]), take, replicas=mesh["replicate"]), native) < 1e-6, dropped
            assert error_of(trained(replicated(), take, compressor="none"), trained(replicated(), take)) < 1e-6, dropped
            if dropped in TORCH_KEEPS:
                continue
            for made, options in (
                (lambda: sharded(mesh["shard"]), {"replicas": mesh["replicate"], "compressor": "waterfill4"}),
                (replicated, {"compressor": "waterfill4"}),
            ):
                found, wanted = (trained(made(), each, **options) for each in (take, backward))
                assert not differs(found, wanted), dropped


def test_nothing_of_a_dropped_iteration_gets_into_the_next_step(processes: Processes) -> None:
    processes(4, dropped_iterations, nodes="aabb")
