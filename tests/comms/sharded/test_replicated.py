"""Laws of a model of `replicate()` (FSDP2 without shards): exact is DDP's bits, compressed is the DDP hook's."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire.fsdp
from gradwire.comms import automatic
from gradwire.comms.backend.register import register
from support.processes import Processes, Said
from support.sharded import Tiny, batch, differs, error_of, gradients, plain_step, sharded, train, weights


def replicated(mesh: DeviceMesh, model: nn.Module | None = None, **options: Any) -> Any:
    """Tiny in three units, or another model in one for each child, and one for itself."""
    model = model or Tiny()
    for block in model.blocks if isinstance(model, Tiny) else model.children():
        replicate(block, mesh=mesh, **options)
    return replicate(model, mesh=mesh, **options)


def layers() -> nn.Module:
    """Each layer is one parameter, as a bucket of DDP is."""
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(16 if first == 0 else 64, 64, bias=False) for first in range(3)))


def with_spare(model: Any, step: int) -> None:
    model(batch(step), spare=step % 2 == 1).square().mean().backward()


def clipped(model: Any, step: int) -> None:
    plain_step(model, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def without_sync(model: Any, step: int) -> None:
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        model(batch(step, micro)).square().mean().backward()


def without_all_reduce(model: Any, step: int) -> None:
    for micro in range(3):
        model.set_requires_all_reduce(micro == 2)
        model(batch(step, micro)).square().mean().backward()


def divided(model: Any, step: int) -> None:
    for each in model.modules():
        if hasattr(each, "set_gradient_divide_factor"):
            each.set_gradient_divide_factor(4.0)
    plain_step(model, step)


REDUCED = {"bf16": torch.bfloat16, "fp16": torch.float16}
CASES: dict[str, tuple[Callable[[Any, int], None], dict[str, Any]]] = {
    "plain": (plain_step, {}),
    "unused parameters": (with_spare, {}),
    "clip_grad_norm_": (clipped, {}),
    "set_requires_gradient_sync": (without_sync, {}),
    "set_requires_all_reduce": (without_all_reduce, {}),
    "gradient_divide_factor": (divided, {}),
    **{name: (plain_step, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=to)}) for name, to in REDUCED.items()},
}


def exact_cases(rank: int) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
    ddp = DistributedDataParallel(Tiny(), find_unused_parameters=True)
    train(ddp.module, take=lambda _, step: with_spare(ddp, step))
    for name, (step, fsdp) in CASES.items():
        native, ours = replicated(mesh, **fsdp), replicated(mesh, **fsdp)
        state = gradwire.fsdp.apply(ours, replicas=None if name == "plain" else mesh["replicate"])
        train(native, take=step)
        train(ours, take=step)
        assert error_of(weights(ours), weights(native)) < (1e-5 if name in REDUCED else 1e-12), name
        if name == "unused parameters":
            assert not differs(weights(ours), weights(ddp.module))
        assert state.steps == 3 and "all-reduces in 3 steps" in str(state.report()), name
        state.close()
        before = weights(ours)
        train(ours, 1, take=step, first=3)  # with torch's own all-reduce
        train(native, 1, take=step, first=3)
        assert state.steps == 3 and differs(weights(ours), before), name
        replicas_agree(weights(ours))
        dist.barrier()
    dist.destroy_process_group()


def replicas_agree(tensors: dict[str, Any]) -> None:
    for value in tensors.values():
        there = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(there, value.contiguous())
        assert torch.equal(there[0], there[1])


def test_exact_gives_the_bits_of_replicate_and_ddp(processes: Processes) -> None:
    processes(2, exact_cases, nodes="ab")


def compressed_cases(rank: int) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
    for name in ("fp16", "int8", "onebit", "powersgd"):
        options = {"warmup_steps": 1} if name in ("onebit", "powersgd") else {}
        ddp = DistributedDataParallel(layers(), bucket_cap_mb=0.001)
        plain_step(ddp, 0)  # DDP has one bucket in its first step, and then one for each parameter
        ddp.zero_grad()
        hook = gradwire.HookState(ddp, compressor=name, compressor_options=options)
        ddp.register_comm_hook(hook, gradwire.comm_hook)
        ours = replicated(mesh, layers())
        state = gradwire.fsdp.apply(ours, compressor=name, compressor_options=options)
        train(ddp)
        train(ours)
        assert not differs(weights(ours), weights(ddp.module)), name
        if name == "int8":
            assert state.dirty
            state.flush()
            train(ours, 1, first=3)
            assert not state.dirty
        whole = replicated(mesh)  # parameters of all sizes
        gradwire.fsdp.apply(whole, compressor=name, compressor_options=options)
        train(whole)
        replicas_agree(weights(whole))
    resumes(mesh)
    dist.destroy_process_group()


def resumes(mesh: DeviceMesh) -> None:
    """A state that is loaded before the first step goes on with the same bits."""
    whole = replicated(mesh)
    state = gradwire.fsdp.apply(whole, compressor="int4")
    train(whole, 2)
    saved, kept = state.state_dict(), {name: value.full_tensor().clone() for name, value in whole.state_dict().items()}
    train(whole, 2, first=2)
    model = Tiny()
    model.load_state_dict(kept)
    again = replicated(mesh, model)
    other = gradwire.fsdp.apply(again, compressor="int4")
    other.load_state_dict(saved)
    train(again, 2, first=2)
    assert not differs(weights(again), weights(whole))


def test_compressed_gives_the_bits_of_ddp_with_the_hook(processes: Processes) -> None:
    processes(2, compressed_cases, nodes="ab")


def refusals(rank: int) -> list[str]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    over = mesh["replicate"]
    said = []

    def refused(match: str, model: nn.Module, **options: Any) -> None:
        with pytest.raises(ValueError, match=match) as caught:
            gradwire.fsdp.apply(model, **options)
        said.append(str(caught.value))

    refused("`shards` is 'int8', and `model` is replicated", replicated(over), shards="int8")
    refused("`weights` is 'bf16', and `model` is replicated", replicated(over), weights="bf16")
    refused("`replicas` of rank .*torch averages modules of `model` over", replicated(over), replicas=mesh["shard"])
    refused("CPUOffloadPolicy", replicated(over, offload_policy=CPUOffloadPolicy(pin_memory=False)))
    refused("`elastic` is True", replicated(over), elastic=True)
    other = Tiny()
    for block, on in zip(other.blocks, ("replicate", "shard"), strict=True):
        replicate(block, mesh=mesh[on])
    replicate(other, mesh=over)
    refused("over different ranks", other)
    mixed = Tiny()
    replicate(mixed.inside, mesh=over)
    fully_shard(mixed, mesh=mesh["shard"])
    refused('replicas=mesh."replicate".', mixed, compressor="int8")
    gradwire.fsdp.apply(mixed, replicas=over, compressor="int8")  # what the words say
    plain_step(mixed, 0)
    for value in gradients(mixed).values():
        there = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(there, value.contiguous(), group=over.get_group())
        assert torch.equal(there[0], there[1])
    with pytest.raises(TypeError, match=r"gradwire.fsdp.apply\(model, \.\.\.\)"):
        gradwire.attach(replicated(over))
    dist.barrier()
    dist.destroy_process_group()
    return said


def test_what_does_not_fit_is_refused_with_the_line_to_write(processes: Processes) -> None:
    processes(4, refusals, nodes="aabb")


def by_the_environment(_: int) -> list[str]:
    dist.init_process_group("gloo")
    said = Said()
    automatic.log.addHandler(said)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mesh = square["replicate"]
    by_hand = replicated(mesh)
    gradwire.fsdp.apply(by_hand, compressor="int8")
    train(by_hand)
    os.environ["GRADWIRE_HOOK"] = "int8"
    register()
    found, own = replicated(mesh), replicated(mesh)
    if dist.get_rank() == 0:  # a forward pass is not for all ranks
        with torch.no_grad():
            replicated(mesh)(batch(0))
    gradwire.fsdp.apply(own)
    train(found)
    train(own)
    assert not differs(weights(found), weights(by_hand))
    assert differs(weights(own), weights(found))
    sharded_too, by_hand = sharded(square), sharded(square)  # native HSDP
    gradwire.fsdp.apply(by_hand, compressor="int8")
    for each in (sharded_too, by_hand):
        train(each)
    assert not differs(weights(sharded_too), weights(by_hand))
    unfit = replicated(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    train(unfit, 1)
    dist.destroy_process_group()
    return said.lines


def test_the_environment_finds_replicated_models(processes: Processes) -> None:
    first, *others = processes(4, by_the_environment, nodes="aabb")
    assert not any(others)
    averaging, left = first
    assert "GRADWIRE_HOOK=int8: gradwire averages the gradients of every FSDP2 model that has replicas" in averaging
    assert "does not apply to an FSDP2 model" in left and "CPUOffloadPolicy" in left
