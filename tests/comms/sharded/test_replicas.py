"""Laws of sharded training between replicas: exact is native HSDP's bits, compressed is near, state resumes."""

import logging
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradwire.fsdp
from gradwire.comms.checkpoint import SHARDS, Checkpoint, pack
from support.processes import Processes
from support.sharded import (
    Tiny,
    applied,
    batch,
    differs,
    error_of,
    gradients,
    job,
    local,
    mesh_of,
    plain_step,
    sharded,
    train,
    weights,
)

NODES = "aabb"


def with_spare(model: Any, step: int) -> None:
    """A parameter group's last members get a gradient in every second step alone."""
    model(batch(step), spare=step % 2 == 1).square().mean().backward()


def clipped(model: Any, step: int) -> None:
    plain_step(model, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def without_all_reduce(model: Any, step: int) -> None:
    """Native HSDP's own way to accumulate: the shards' sums stay here until the last micro-batch."""
    for micro in range(3):
        model.set_requires_all_reduce(micro == 2)
        model(batch(step, micro)).square().mean().backward()


def without_sync(model: Any, step: int) -> None:
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        model(batch(step, micro)).square().mean().backward()


def last_backward(model: Any, step: int) -> None:
    for micro in range(2):
        model.set_is_last_backward(micro == 1)
        model.set_requires_all_reduce(micro == 1)
        model(batch(step, micro)).square().mean().backward()


def divided(model: Any, step: int) -> None:
    """A factor of the user's own: sums, and no division but this."""
    model.set_force_sum_reduction_for_comms(True)
    for block in model.blocks:
        block.set_force_sum_reduction_for_comms(True)
    plain_step(model, step)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES: dict[str, tuple[Callable[[Any, int], None], dict[str, Any]]] = {
    "plain": (plain_step, {}),
    "unused parameters": (with_spare, {}),
    "clip_grad_norm_": (clipped, {}),
    "set_requires_all_reduce": (without_all_reduce, {}),
    "set_requires_gradient_sync": (without_sync, {}),
    "set_is_last_backward": (last_backward, {}),
    "force_sum": (divided, {}),
    "param_dtype bf16": (plain_step, {"mp_policy": BF16}),
    "reduce_dtype bf16": (plain_step, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}),
    "reduce_dtype fp16": (plain_step, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}),
    "no reshard": (plain_step, {"reshard_after_forward": False}),
}


def exact_cases(rank: int) -> None:
    with job() as mesh:
        for name, (step, fsdp) in CASES.items():
            native = sharded(mesh, **fsdp)
            train(native, take=step)
            taken = sharded(mesh, **fsdp)  # native HSDP, too, until apply() takes its all-reduce over
            for ours, state in (applied(mesh, fsdp=fsdp), (taken, gradwire.fsdp.apply(taken))):
                train(ours, take=step)
                if name == "reduce_dtype fp16":  # torch divides behind the sum, which differs where halves are denormal
                    assert error_of(weights(ours), weights(native)) < 1e-5
                else:
                    assert not differs(weights(ours), weights(native)), name
                assert state.steps == 3, name
                assert "all-reduces in 3 steps" in str(state.report()), name
                assert state.state_dict() == {}, name
                state.close()
            if not name.startswith("reduce_dtype"):
                for each in (native, taken):  # both with torch's own all-reduce
                    train(each, 1, take=step, first=3)
                assert not differs(weights(taken), weights(native)), name
                assert state.steps == 3, name
        tied_weights(mesh)
        activation_checkpointing(mesh)
        two_units_in_one_module(mesh)
        outermost_without_parameters(mesh)


def tied_weights(mesh: DeviceMesh) -> None:
    native = sharded_whole(Tiny(tied=True), mesh)
    ours = sharded_whole(Tiny(tied=True), mesh["shard"])
    gradwire.fsdp.apply(ours, replicas=mesh["replicate"])
    train(native, take=with_spare)
    train(ours, take=with_spare)
    assert not differs(weights(ours), weights(native))


def sharded_whole(model: Tiny, mesh: DeviceMesh) -> Tiny:
    fully_shard(model, mesh=mesh)
    return model


def activation_checkpointing(mesh: DeviceMesh) -> None:
    def checkpointed() -> Tiny:
        model = Tiny()
        for number, block in enumerate(model.blocks):
            model.blocks[number] = checkpoint_wrapper(block)
        return model

    native = sharded(mesh, checkpointed())
    ours, state = applied(mesh, checkpointed(), compressor=None)
    train(native)
    train(ours)
    assert not differs(weights(ours), weights(native))
    assert state.steps == 3


def two_units_in_one_module(mesh: DeviceMesh) -> None:
    """fully_shard([a, b]): one unit of two modules."""

    def grouped(on: DeviceMesh) -> Tiny:
        model = Tiny()
        fully_shard([model.inside, model.outside], mesh=on)
        fully_shard(model, mesh=on)
        return model

    native, ours = grouped(mesh), grouped(mesh["shard"])
    state = gradwire.fsdp.apply(ours, replicas=mesh["replicate"])
    train(native)
    train(ours)
    assert not differs(weights(ours), weights(native))
    assert "6 all-reduces in 3 steps" in str(state.report())


class Doubled(Tiny):
    """Computes behind its last layer."""

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        """(batch, 16) -> (batch, 33)."""
        return 2 * super().forward(x, spare)


def outermost_without_parameters(mesh: DeviceMesh) -> None:
    """All are in groups inside it, and yet torch ends a backward pass there."""

    def layers_of(on: DeviceMesh) -> Tiny:
        model = Doubled()
        for each in (model.inside, *model.blocks, model.spare, model.outside):
            fully_shard(each, mesh=on)
        return sharded_whole(model, on)

    one_dimension = mesh_of(1, 4)["shard"]
    native, ours, torchs, alone = map(layers_of, (mesh, mesh["shard"], one_dimension, one_dimension))
    part = layers_of(mesh["shard"])
    around = nn.Sequential(part, nn.Identity(), nn.Flatten(0))
    fully_shard(around, mesh=mesh["shard"])
    state = gradwire.fsdp.apply(ours, replicas=mesh["replicate"])
    gradwire.fsdp.apply(part, replicas=mesh["replicate"])
    gradwire.fsdp.apply(alone, shards="bf16")
    for model in native, ours, torchs:
        train(model, take=with_spare)
    train(around, take=plain_step)
    train(native_again := layers_of(mesh), take=plain_step)
    assert not differs(weights(part), weights(native_again))
    train(alone, take=with_spare)
    assert not differs(weights(ours), weights(native))
    assert error_of(weights(alone), weights(torchs)) < 1e-3
    assert state.steps == 3


def test_exact_gives_the_bits_of_native_hsdp(processes: Processes) -> None:
    processes(4, exact_cases, nodes=NODES)


LIMITS = {"bf16": 0.004, "int8": 0.01, "int4": 0.25, "onebit": 1.0, "powersgd": 1.0}
"""Compressor -> largest error of the first averaged gradients: two roundings to a level of a block."""


def compressed_cases(rank: int) -> None:
    with job() as mesh:
        native = sharded(mesh)
        plain_step(native, 0)
        wanted = gradients(native)
        for name, limit in LIMITS.items():
            options = {"warmup_steps": 0} if name in ("onebit", "powersgd") else {}
            ours, state = applied(mesh, compressor=name, compressor_options=options)
            plain_step(ours, 0)
            found = gradients(ours)
            assert 0 < error_of(found, wanted) < limit, (name, error_of(found, wanted))
            norms = [one for one in wanted if wanted[one].dim() == 1]
            assert not differs({one: found[one] for one in norms}, {one: wanted[one] for one in norms}), name
            replicas_agree(mesh, found)
            assert state.dirty or name == "bf16"
            state.close()
        halves = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
        ours, _ = applied(mesh, fsdp=halves, compressor="int8")
        plain_step(ours, 0)
        assert 0 < error_of(gradients(ours), wanted) < 0.02
        nothing_is_lost(mesh)
        resumes(mesh)
        not_finite(mesh)
        accumulates(mesh)
        drops_half_a_step(mesh)


def replicas_agree(mesh: DeviceMesh, tensors: dict[str, Any]) -> None:
    for value in tensors.values():
        there = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(there, value.contiguous(), group=mesh["replicate"].get_group())
        assert torch.equal(there[0], there[1])


def nothing_is_lost(mesh: DeviceMesh) -> None:
    """Law of error feedback: with plain SGD, compressed steps and a flush end where exact steps do.

    The loss is linear, so that gradients do not depend on the weights.
    """

    def linear(model: Any, step: int) -> None:
        model(batch(step)).mean().backward()

    def line(on: DeviceMesh) -> nn.Module:
        torch.manual_seed(1)
        model = nn.Linear(16, 200)
        fully_shard(model, mesh=on)
        return model

    native, ours = line(mesh), line(mesh["shard"])
    state = gradwire.fsdp.apply(ours, replicas=mesh["replicate"], compressor="int4")
    train(native, 4, linear)
    train(ours, 3, linear)
    assert state.dirty
    state.flush()
    train(ours, 1, linear, first=3)
    assert not state.dirty
    off = error_of(weights(ours), weights(native))
    assert off < 1e-6, off
    assert not dict(state.state_dict()).keys() - {"gradwire/job", f"gradwire/rank{dist.get_rank()}"}


def resumes(mesh: DeviceMesh) -> None:
    """A state that is loaded before the first step goes on with the same bits."""
    for name, options in {"int4": {}, "powersgd": {"warmup_steps": 1}}.items():
        whole, state = applied(mesh, compressor=name, compressor_options=options)
        train(whole, 2)
        saved, kept = state.state_dict(), weights(whole)
        train(whole, 2, first=2)
        again, other = applied(mesh, compressor=name, compressor_options=options)
        with torch.no_grad():
            for key, parameter in again.named_parameters():
                local(parameter).copy_(kept[key])
        assert other.state_dict().keys() == saved.keys()
        other.load_state_dict(saved)
        train(again, 2, first=2)
        assert not differs(weights(again), weights(whole)), name
        foreign = {key: value for key, value in saved.items() if "rank" not in key}
        with pytest.raises(ValueError, match="this is rank"):
            other.load_state_dict(foreign)
        exact, without = applied(mesh)
        with pytest.raises(ValueError, match="holds residuals that would be lost"):
            without.load_state_dict(saved)
        del exact


def not_finite(mesh: DeviceMesh) -> None:
    """An overflow in the rows of one shard drops the step of every rank's state, also where the rows are finite."""
    ours = nn.Linear(16, 200)
    fully_shard(ours, mesh=mesh["shard"])
    state = gradwire.fsdp.apply(ours, replicas=mesh["replicate"], compressor="int8")
    train(ours, 2)
    before = state.state_dict()
    out: torch.Tensor = ours(batch(2))
    (out.square().mean() + out[0, 0] * torch.inf).backward()  # type: ignore[no-untyped-call]
    finite = all(bool(one.isfinite().all()) for one in gradients(ours).values())
    assert finite == (mesh["shard"].get_local_rank() == 1)
    key = f"gradwire/rank{dist.get_rank()}"
    kept = tensors_of(before[key])
    assert not differs(tensors_of(state.state_dict()[key]), kept)
    ours.zero_grad()
    train(ours, 1, first=3)
    assert differs(tensors_of(state.state_dict()[key]), kept)


def tensors_of(entry: Iterable[tuple[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in entry if isinstance(value, torch.Tensor)}


def accumulates(mesh: DeviceMesh) -> None:
    """Three micro-batches travel once."""
    ours, state = applied(mesh, compressor="int8")
    train(ours, 2, without_all_reduce)
    calls = {row.calls for row in state.report().rows}
    once, other = applied(mesh, compressor="int8")
    train(once, 2)
    assert calls == {row.calls for row in other.report().rows}
    assert state.steps == 2


def drops_half_a_step(mesh: DeviceMesh) -> None:
    """What was summed of a step's micro-batches is not added to the first step behind a state that is loaded."""

    def run(interrupted: bool, saved: Checkpoint | None) -> dict[str, torch.Tensor]:
        model, state = applied(mesh, compressor="int8")
        train(model, 1)
        saved = saved or state.state_dict()
        if interrupted:
            model.set_requires_all_reduce(False)  # type: ignore[operator]
            plain_step(model, 7)
            model.set_requires_all_reduce(True)  # type: ignore[operator]
        with patch.object(logging.getLogger("gradwire"), "warning") as warning:
            state.load_state_dict(saved)
        said = [str(call.args[0] % call.args[1:]) for call in warning.call_args_list]
        assert len(said) == interrupted and all("were not averaged" in each for each in said), said
        train(model, 1, first=1)
        return weights(model)

    of_two_ranks = pack({SHARDS: 2}, 0, 2, dirty=False)
    for saved in (None, of_two_ranks):
        assert not differs(run(interrupted=True, saved=saved), run(interrupted=False, saved=saved))


def test_compressed_is_near_and_its_state_is_whole(processes: Processes) -> None:
    processes(4, compressed_cases, nodes=NODES)
