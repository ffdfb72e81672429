"""Sharded training together with what torch offers beside it: checkpoints, compilation, tensor parallelism, scalers."""

import gc
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradwire.fsdp
from support.processes import Processes
from support.sharded import (
    WIDTH,
    Tiny,
    applied,
    batch,
    differs,
    error_of,
    gradients,
    job,
    local,
    plain_step,
    sharded,
    train,
    weights,
)


def combinations(rank: int, folder: str) -> None:
    with job() as mesh:
        memory(mesh)
        checkpoints(mesh, Path(folder))
        other_mesh(mesh, Path(folder))
        compiled(mesh)
        tensor_parallel()
        second_dimension(mesh)
        scaled(mesh)
        experts(mesh)
        one_shard(mesh)
        gradient_hooks(mesh)


def checkpoints(mesh: DeviceMesh, folder: Path) -> None:
    """torch.distributed.checkpoint takes the state as it is."""
    whole, state = applied(mesh, compressor="int8")
    train(whole, 2)
    save({"model": get_model_state_dict(whole), "hook": state}, checkpoint_id=folder / "same")
    train(whole, 1, first=2)
    again, other = applied(mesh, compressor="int8")
    found = {"model": get_model_state_dict(again), "hook": other}
    load(found, checkpoint_id=folder / "same")
    set_model_state_dict(again, found["model"])  # type: ignore[arg-type]
    train(again, 1, first=2)
    assert not differs(weights(again), weights(whole))


def other_mesh(mesh: DeviceMesh, folder: Path) -> None:
    """On another mesh of as many ranks a state is refused while it holds residuals, and taken when it was flushed."""
    whole, state = applied(mesh, compressor="int8")
    train(whole, 2)
    dirty = state.state_dict()
    state.flush()
    train(whole, 1, first=2)
    assert not state.dirty
    save({"model": get_model_state_dict(whole), "hook": state}, checkpoint_id=folder / "other")
    columns = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
    again, other = applied(columns, compressor="int8")
    with pytest.raises(ValueError, match="another mesh than 1 shards"):
        other.load_state_dict(dirty)
    found = {"model": get_model_state_dict(again), "hook": other}
    load(found, checkpoint_id=folder / "other")
    set_model_state_dict(again, found["model"])  # type: ignore[arg-type]
    full = {name: one.full_tensor() for name, one in whole.named_parameters()}  # type: ignore[attr-defined]
    assert not differs(weights(again), full)
    train(again, 1, first=3)


def compiled(mesh: DeviceMesh) -> None:
    """Blocks compiled before they are sharded, and the whole model after."""
    native = sharded(mesh)
    train(native, 1)
    blocks = Tiny()
    for block in blocks.blocks:
        block.compile(backend="eager")
    inner, _ = applied(mesh, blocks)
    train(inner, 1)
    assert not differs(weights(inner), weights(native))
    model, state = applied(mesh)
    outer = torch.compile(model, backend="eager")
    train(outer, 1)  # type: ignore[arg-type]
    assert state.steps == 1
    assert error_of(weights(model), weights(native)) < 1e-6
    rows = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))

    def checkpointed() -> Tiny:
        inside = Tiny()
        for number, block in enumerate(inside.blocks):
            inside.blocks[number] = checkpoint_wrapper(block)
            block.compile(backend="eager")
        return inside

    plain = sharded(rows, checkpointed())
    coded, _ = applied(rows, checkpointed(), shards="int8", weights="int8", plan="flat")
    train(plain, 1)
    train(coded, 1)
    assert 0 < error_of(weights(coded), weights(plain)) < 0.01


def tensor_parallel() -> None:
    """Replicas x tensor parallelism, shards of one rank: the state names parameters, and finds this rank's part."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))

    def model_on(on: DeviceMesh) -> nn.Module:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 33))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=on)
        return model

    def step(model: Any, number: int) -> None:
        seed = 10 * number + mesh["replicate"].get_local_rank()
        model(torch.randn(6, 16, generator=torch.Generator().manual_seed(seed))).square().mean().backward()

    native, ours = model_on(mesh["replicate", "shard"]), model_on(mesh["shard"])
    gradwire.fsdp.apply(ours, replicas=mesh["replicate"])
    train(native, 2, step)
    train(ours, 2, step)
    assert not differs(weights(ours), weights(native))
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))  # shards between nodes
    native, ours = model_on(mesh["shard"]), model_on(mesh["shard"])
    gradwire.fsdp.apply(ours, shards="int8", weights="int8")
    train(native, 2, step)
    train(ours, 2, step)
    assert 0 < error_of(weights(ours), weights(native)) < 0.01


def second_dimension(mesh: DeviceMesh) -> None:
    """A weight that is sharded by columns."""

    def columns(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 2 == 0 else None

    native = sharded(mesh, shard_placement_fn=columns)
    ours, state = applied(mesh, fsdp={"shard_placement_fn": columns})
    coded, _ = applied(mesh, fsdp={"shard_placement_fn": columns}, compressor="int8")
    for model in (native, ours, coded):
        train(model, 2)
    assert not differs(weights(ours), weights(native))
    assert error_of(weights(coded), weights(native)) < 0.01
    assert state.steps == 2


def experts(mesh: DeviceMesh) -> None:
    """Two units in one module: the spare weight has one shard, and each place in a shard group has its own."""
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        return  # torch before several units in one module
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "expert", "inner"))

    def model_on(on: DeviceMesh, usual: Any, own: Any) -> Tiny:
        model = Tiny()
        ours = set(model.spare.parameters())

        def place(parameter: nn.Parameter) -> Any:
            return common.ShardPlacementResult(Shard(0), own if parameter in ours else usual)

        fully_shard(model, mesh=on, shard_placement_fn=place)
        return model

    native, taken = (
        model_on(
            mesh,
            common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0),
            common.HSDPMeshInfo(cube["replicate", "inner"], shard_mesh_dim=1, replicate_mesh_dim=0),
        )
        for _ in range(2)
    )
    model = model_on(
        mesh["shard"],
        common.FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0),
        common.FSDPMeshInfo(cube["inner"], shard_mesh_dim=0),
    )
    states = [gradwire.fsdp.apply(model, replicas=mesh["replicate"]), gradwire.fsdp.apply(taken)]
    for each in (native, model, taken):
        train(each, 2, lambda one, step: one(batch(step), spare=True).square().mean().backward())
    for each, state in zip((model, taken), states, strict=True):
        assert not differs(weights(each), weights(native))
        assert "4 all-reduces in 2 steps" in str(state.report())


class Scale:
    """What gradwire asks of a GradScaler."""

    def __init__(self) -> None:
        self.scale = 1024.0

    def get_scale(self) -> float:
        return self.scale


def scaled(mesh: DeviceMesh) -> None:
    """Residuals follow the scale: a power of two changes no bit."""

    def run(scales: list[float]) -> dict[str, torch.Tensor]:
        model, state = applied(mesh, compressor="int4")
        scale = Scale()
        state.watch(scale)

        def step(one: Any, number: int) -> None:
            scale.scale = scales[number]
            (one(batch(number)).square().mean() * scale.scale).backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    if parameter.grad is not None:
                        parameter.grad.div_(scale.scale)

        train(model, 3, step)
        return weights(model)

    assert not differs(run([1.0, 1.0, 1.0]), run([1024.0, 512.0, 2048.0]))


def one_shard(mesh: DeviceMesh) -> None:
    """Shards of one rank: replicas alone, as DDP."""
    columns = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
    model, state = applied(columns, compressor="int8", shards="int8", weights="int8", nic_bytes_per_second=1e9)
    train(model, 2)
    for value in weights(model).values():
        there = [torch.empty_like(value) for _ in range(4)]
        dist.all_gather(there, value)
        assert all(torch.equal(value, other) for other in there)
    assert "all-reduces in 2 steps" in str(state.report())
    assert local(next(model.parameters())).shape == (WIDTH, 16)
    plain_step(model, 2)
    with patch("gradwire.comms.autotune.job_advice.SAMPLE_NBYTES", 1 << 16):  # codecs are timed on less
        assert "recommended" in str(state.advise()), state.advise()


def gradient_hooks(mesh: DeviceMesh) -> None:
    """A hook on a gradient, as of an optimizer in the backward pass, reads it when it is reduced, not under way."""
    row = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    both: dict[str, Any] = {"replicas": mesh["replicate"], "compressor": "int8"}
    for on, options in ((mesh["shard"], both), (row, {"shards": "int8"}), (row, {})):
        model = sharded(on)
        gradwire.fsdp.apply(model, plan="hierarchical", **options)
        seen: dict[str, torch.Tensor] = {}
        for name, parameter in list(model.named_parameters())[::2]:

            def note(one: nn.Parameter, name: str = name, seen: dict[str, torch.Tensor] = seen) -> None:
                assert one.grad is not None
                seen[name] = local(one.grad).clone()

            parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        plain_step(model, 0)
        found = gradients(model)
        assert seen and not differs(seen, {name: found[name] for name in seen}), options


def memory(mesh: DeviceMesh) -> None:
    """What docs/how-to/train_sharded.md says a rank keeps beside FSDP2's own, by counting live tensors."""

    def kept(**options: Any) -> int:
        model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
        for layer in model:
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        state = gradwire.fsdp.apply(model, **options)
        before = live_nbytes()
        for _ in range(3):
            model(torch.randn(4, 256)).sum().backward()
            model.zero_grad()
        del state
        counted = [live_nbytes()]
        while counted.count(counted[-1]) < 5:  # the threads of the lanes let go a moment after the futures are done
            time.sleep(0.05)
            counted.append(live_nbytes())
        return counted[-1] - before

    gc.freeze()  # what was there before is not looked at
    shard, slack = 2 * 256 * 256 // 2, 16384  # slack: scalars, factors, and torch's own empty tensors
    assert kept() < slack
    assert kept(replicas=mesh["replicate"]) < slack
    assert kept(shards="int4", weights="int8", plan="flat") < slack
    for compressor, nbytes in (("fp16", 0), ("int8", 12), ("onebit", 24), ("powersgd", 8), ("dgc", 16)):
        options = {"warmup_steps": 1} if compressor in ("onebit", "powersgd") else {}
        found = kept(replicas=mesh["replicate"], compressor=compressor, compressor_options=options)
        assert abs(found - shard * nbytes) < slack, (compressor, found / shard)
    gc.unfreeze()


def live_nbytes() -> int:
    """Of all tensors that Python can reach, each memory once."""
    gc.collect()
    tensors = [local(one) for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def test_together_with_torch(processes: Processes, tmp_path: Path) -> None:
    processes(4, combinations, str(tmp_path), nodes="aabb", seconds=240.0)
