"""What cannot work is refused in the same words on every rank, and nobody waits for the others."""

import inspect
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import gradwire
import gradwire.fsdp
from gradwire.comms.bootstrap import failure_reporter
from gradwire.comms.sharded.param_groups import ShardedParamGroup
from support.processes import Processes
from support.sharded import Tiny, applied, job, mesh_of, sharded, train


def with_complex(mesh: DeviceMesh) -> Tiny:
    model = Tiny()
    model.spare.bias = nn.Parameter(model.spare.bias.detach().to(torch.complex64))
    return sharded(mesh["shard"], model)


def with_several_dtypes(mesh: DeviceMesh) -> Iterator[Tiny]:
    """Models with a parameter group that torch gathers as bytes: of a frozen layer, and by a policy (torch 2.15)."""
    frozen = Tiny()
    frozen.spare.requires_grad_(False).bfloat16()
    yield sharded(mesh["shard"], frozen)
    if "param_dtype_override_fn" in inspect.signature(MixedPrecisionPolicy).parameters:
        keep: Any = {"param_dtype_override_fn": lambda parameter: parameter.dtype if parameter.ndim == 1 else None}
        yield sharded(mesh["shard"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, **keep))


def refusals(rank: int) -> list[str]:
    said = []

    def refused(match: str, model: nn.Module, kind: type[Exception] = ValueError, **options: Any) -> None:
        with pytest.raises(kind, match=match) as caught:
            gradwire.fsdp.apply(model, **options)
        said.append(str(caught.value))

    with job() as mesh:
        replicas = mesh["replicate"]
        refused("call fully_shard on its blocks and on the model itself first", Tiny(), replicas=replicas)
        refused("`compressor` is 'int8'.*`replicas` is not given.*mesh=mesh", sharded(mesh["shard"]), compressor="int8")
        partly = Tiny()
        fully_shard(partly.blocks[0], mesh=mesh)
        fully_shard(partly, mesh=mesh["shard"])
        refused("without replicas, and others have replicas", partly, compressor="int8")
        refused("`fusion` is 25", sharded(mesh["shard"]), replicas=replicas, fusion=25.0)
        refused("`reduction` is 'samples'", sharded(mesh["shard"]), replicas=replicas, reduction="samples")
        refused("`fusion` is 'cuts.json'", sharded(mesh["shard"]), fusion="cuts.json")
        sparse = {"sparse_as_dense": True}
        refused(r"`reduction` is \{'sparse_as_dense'", sharded(mesh["shard"]), replicas=replicas, reduction=sparse)
        for between in (None, replicas):
            refused("`elastic` is True.*shards are lost", sharded(mesh["shard"]), replicas=between, elastic=True)
        refused("`elastic` is 'host:1'", sharded(mesh["shard"]), replicas=replicas, elastic="host:1")
        refused("`trace` is 'steps.json'.*`replicas` is not given", sharded(mesh["shard"]), trace="steps.json")
        refused("`replicas` has 2 dimensions", sharded(mesh["shard"]), replicas=mesh)
        refused("wanted one dimension of a DeviceMesh", sharded(mesh["shard"]), TypeError, replicas=dist.group.WORLD)
        refused("nothing|unknown|colour", sharded(mesh["shard"]), TypeError, replicas=replicas, colour="red")
        offloaded = sharded(mesh["shard"], offload_policy=CPUOffloadPolicy(pin_memory=False))
        refused("CPUOffloadPolicy.*180665", offloaded, replicas=replicas)
        blocks = Tiny()
        for block in blocks.blocks:
            fully_shard(block, mesh=mesh["shard"])
        refused("call fully_shard on the model itself", blocks, replicas=replicas)
        for few in ({"shards": "int8"}, {"weights": "bf16"}, {"replicas": replicas, "compressor": "int8"}):
            refused(f"`{[*few][-1]}` is .* complex parameters .spare.bias.", with_complex(mesh), **few)
        gradwire.fsdp.apply(with_complex(mesh), replicas=replicas)
        for mixed in with_several_dtypes(mesh):
            refused("`weights` is 'int8'.*torch.bfloat16, torch.float32.*gathers as bytes", mixed, weights="int8")
        here = torch.device("xpu", 0) if rank == 1 else torch.device("cpu")
        with patch.object(ShardedParamGroup, "device", here):  # of one rank: no other may go on
            refused("`model` is on xpu:0; wanted cpu or cuda", sharded(mesh["shard"]), replicas=replicas)
        model, _ = applied(mesh)
        refused("hook or collectives of its own already", model, replicas=replicas)
        for inside in (sharded(mesh["shard"]), blocks):  # a DDP hook would never be called
            with pytest.raises(TypeError, match=r"FSDP2 reduces its gradients itself.*gradwire.fsdp.apply"):
                gradwire.HookState(inside)
        # What one rank alone does wrong.
        wrong = mesh["shard"] if rank == 2 else replicas
        refused("`replicas` of rank 2 is of ranks .2, 3.", sharded(mesh["shard"]), replicas=wrong)
        other = Tiny()
        if rank == 1:
            other.extra = nn.Linear(3, 3)
        refused("wanted the same on all", sharded(mesh["shard"], other), replicas=replicas)
        # A unit that comes after apply() would never be averaged.
        late = Tiny()
        fully_shard(late, mesh=mesh["shard"])
        gradwire.fsdp.apply(late, replicas=replicas)
        late.added = nn.Linear(4, 4)
        fully_shard(late.added, mesh=mesh["shard"])
        with pytest.raises(RuntimeError, match=r"call gradwire.fsdp.apply\(\) after all fully_shard"):
            train(late, 1)
    return said


def test_bad_input_is_an_error_on_all_ranks_alike(processes: Processes) -> None:
    said = processes(4, refusals, nodes="aabb")
    for one, *others in zip(*cast(list[list[str]], said), strict=True):
        digests = ", replicas of " in one  # each rank sees its own neighbour's
        assert digests or all(other == one for other in others), (one, others)


def lost(rank: int, way: str) -> str:
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    failure_reporter.PATIENCE = timedelta(minutes=10)  # a rank that is gone is found out, not waited for
    if way == "replicas":
        model, state = applied(mesh_of(), compressor="int8")
    else:
        model = sharded(init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)))
        state = gradwire.fsdp.apply(model, shards="int4", weights="exact", plan="hierarchical")
    train(model, 1)
    if rank == 3:
        os._exit(1)
    with pytest.raises(RuntimeError) as caught:
        train(model, 3)
    state.close()
    return str(caught.value)


@pytest.mark.parametrize("way", ["replicas", "shards"])
def test_a_lost_rank_is_named_by_all_others(way: str, processes: Processes) -> None:
    """By those too that have no collective with it, and wait for one that has."""
    said = processes(4, lost, way, nodes="aabb", agent=True, lost=(3,), seconds=120.0)
    assert said[3] is None
    assert all("rank 3 of 4 is missing" in each for each in said[:3]), said
