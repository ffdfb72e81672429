"""Laws of sharded training over a slow link: unbiased sums, equal weights on all ranks, few bytes between nodes."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import gradwire.fsdp
from gradwire.comms.sharded.collectives import codec_of
from gradwire.comms.sharded.flat_shards import decode, encode, payload_nbytes
from gradwire.comms.sharded.layout import ShardRuns
from gradwire.comms.sharded.nodes import arrange
from gradwire.fsdp import FsdpState
from support.processes import Processes
from support.sharded import (
    Tiny,
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

RUNS = ShardRuns(3000, ((10, 1500), (2000, 2900)), ((0, 10), (1500, 2000), (2900, 3000)))


def test_a_row_of_one_payload_comes_back_dense_exactly_and_the_rest_nearly() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        row = torch.randn(RUNS.numel, generator=torch.Generator().manual_seed(0)).to(dtype)
        for choice, step in (("bf16", 2.0**-8), ("int8", 8 / 255), ("int4", 8 / 15), ("waterfill4", 8 / 15)):
            codec = codec_of(choice, 5 if choice == "int4" else None)
            payload = torch.full((1, payload_nbytes(codec, RUNS, dtype)), 255, dtype=torch.uint8)
            encode(codec, RUNS, row, payload[0])
            back = decode(codec, RUNS, payload, dtype, None)
            for start, stop in RUNS.dense:
                assert torch.equal(back[start:stop], row[start:stop].float())
            assert (back - row.float()).abs().max() <= step * (1 if choice != "bf16" else 4)
            doubled = decode(codec, RUNS, payload, dtype, row)
            assert torch.allclose(doubled, back + row.float(), atol=1e-6)


def test_random_rounding_has_no_bias() -> None:
    row = torch.randn(RUNS.numel, generator=torch.Generator().manual_seed(0))
    mean = torch.zeros_like(row)
    for key in range(200):
        codec = codec_of("int4", key)
        payload = torch.empty(1, payload_nbytes(codec, RUNS, row.dtype), dtype=torch.uint8)
        encode(codec, RUNS, row, payload[0])
        mean += decode(codec, RUNS, payload, row.dtype, None) / 200
    once = 7 / 15 / 2  # a level of a block of normal numbers, and half of it is the largest standard deviation
    assert (mean - row).norm() < 1.5 * once / 200**0.5 * row.numel() ** 0.5


def test_nodes_of_one_size_have_counterparts_and_others_are_flat() -> None:
    assert arrange("abba") == ((0, 3), (1, 2))
    assert arrange("aaaa") == ((0, 1, 2, 3),)
    assert arrange("aaab") == ((0,), (1,), (2,), (3,))


def row_of(mesh: DeviceMesh, **options: Any) -> tuple[Tiny, FsdpState]:
    """Tiny sharded over all four ranks."""
    fsdp = options.pop("fsdp", {})
    model = sharded(mesh, **fsdp)
    return model, gradwire.fsdp.apply(model, **options)


def link_cases(rank: int) -> None:
    with job():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
        exact = sharded(mesh)
        plain_step(exact, 0)
        wanted = gradients(exact)
        for shards, limit in (("bf16", 0.004), ("int8", 0.02), ("int4", 0.4), ("waterfill4", 0.1)):
            for plan in ("auto", "flat"):
                model, state = row_of(mesh, shards=shards, plan=plan)
                plain_step(model, 0)
                off = error_of(gradients(model), wanted)
                assert 0 < off < limit, (shards, plan, off)
                level = "inter_node" if plan == "auto" else "all ranks"
                (row,) = (row for row in state.report().rows if row.level.startswith(level))
                assert row.op == "reduce_scatter" and row.seconds > 0
                assert any(shards in each and "predicted to take" in each for each in state.report().plans)
                assert row.calls == 3
                peers = 1 if plan == "auto" else 3
                sent_dense = peers * sum(local(one).numel() for one in model.parameters()) * 4
                assert (
                    row.wire_nbytes < sent_dense * {"bf16": 0.65, "int8": 0.4, "int4": 0.3, "waterfill4": 0.3}[shards]
                )
        for choice in ("bf16", "int8"):
            model, state = row_of(mesh, weights=choice)
            same_output(model)
            x = torch.ones(2, 16)
            off, near = model(x).detach() - Tiny()(x).detach(), Tiny()(x).detach()
            assert 0 < float(off.norm() / near.norm()) < 0.02
            train(model, 2)
            assert "all_gather" in state.report().full()
        exact_by_plan(mesh)
        mixed_precision(mesh)
        resumes(mesh)
        unused(mesh)
        inside_the_node(mesh)
        both(mesh)


def exact_by_plan(mesh: DeviceMesh) -> None:
    """Exact ones are planned on any backend, also with a factor that gloo has no sum for; small ones stay with gloo."""
    native = sharded(mesh)
    for plan, fsdp in (("hierarchical", {}), ("hierarchical", {"reshard_after_forward": 2}), ("auto", {})):
        model, state = row_of(mesh, plan=plan, fsdp=fsdp)
        for each in (native, model):
            each.zero_grad()
            plain_step(each, 0)
        assert error_of(gradients(model), gradients(native)) < 1e-6
        found = {row.op for row in state.report().rows if row.level.startswith("inter_node")}
        assert found == ({"all_gather", "reduce_scatter"} if plan == "hierarchical" else set()), (plan, found)
        assert state.state_dict() == {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(8.0)
    model.zero_grad()
    plain_step(model, 0)
    assert error_of({name: 2 * one for name, one in gradients(model).items()}, gradients(native)) < 1e-6
    state.close()
    assert torch.equal(model(batch(1)), native(batch(1)))  # torch's own collectives are back


def same_output(model: Tiny) -> None:
    """All ranks compute with the same weights."""
    x = torch.ones(2, 16)
    found = model(x).detach()
    there = [torch.empty_like(found) for _ in range(4)]
    dist.all_gather(there, found)
    assert all(torch.equal(found, other) for other in there)


def mixed_precision(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for choice, reshard in (("int8", 2), ("bf16", False)):
        fsdp: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": reshard}
        model, _ = row_of(mesh, fsdp=fsdp, shards=choice, weights=choice)
        native = sharded(mesh, **fsdp)
        train(model, 2)
        train(native, 2)
        assert error_of(weights(model), weights(native)) < 0.01


def resumes(mesh: DeviceMesh) -> None:
    whole, state = row_of(mesh, shards="int4", weights="int8")
    train(whole, 2)
    saved, kept = state.state_dict(), weights(whole)
    train(whole, 1, first=2)
    again, other = row_of(mesh, shards="int4", weights="int8")
    assert saved.keys() == other.state_dict().keys()
    with torch.no_grad():
        for name, parameter in again.named_parameters():
            local(parameter).copy_(kept[name])
    other.load_state_dict(saved)
    train(again, 1, first=2)
    assert not differs(weights(again), weights(whole))


def unused(mesh: DeviceMesh) -> None:
    """Parameters without a gradient are left out of a row; a factor of the user's own counts."""
    model, _ = row_of(mesh, shards="int8")
    native = sharded(mesh)
    for step in range(2):
        for one in (model, native):
            one(batch(step), spare=step == 0).square().mean().backward()
        found, wanted = gradients(model), gradients(native)
        assert found.keys() == wanted.keys()
        assert error_of(found, wanted) < 0.02
        model.zero_grad()
        native.zero_grad()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(8.0)  # torch's own needs PREMUL_SUM here, which gloo lacks
    plain_step(model, 3)
    plain_step(native, 3)
    assert error_of({name: 2 * one for name, one in gradients(model).items()}, gradients(native)) < 0.02


def inside_the_node(mesh: DeviceMesh) -> None:
    """Ranks of one node: nothing is slow, and torch's own collectives stay."""
    one = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    model = sharded(one["shard"])
    state = gradwire.fsdp.apply(model, shards="int4", weights="int8")
    native = sharded(one["shard"])
    train(model, 1)
    train(native, 1)
    assert not differs(weights(model), weights(native))
    assert "2 ranks of one node, exact" in state.report().full()


def both(mesh: DeviceMesh) -> None:
    """Shards across the nodes, replicas inside them; and a NaN is seen."""
    two = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
    model = sharded(two["shard"])
    state = gradwire.fsdp.apply(
        model, replicas=two["replicate"], compressor="int8", shards="int8", weights="int8", plan="flat"
    )
    native = sharded(two)
    train(model, 3)
    train(native, 3)
    assert error_of(weights(model), weights(native)) < 0.01
    assert state.dirty
    model.zero_grad()
    out: Tensor = model(batch(3))
    loss: Tensor = out.sum() * (torch.nan if dist.get_rank() == 1 else 1.0)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert not torch.isfinite(local(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))


def test_few_bits_between_nodes_train_as_exact_ones_do(processes: Processes) -> None:
    processes(4, link_cases, nodes="aabb")


def crossed(rank: int) -> None:
    with job("gradwire") as both:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
        native = sharded(mesh)
        train(native, 2)
        for options, limit in (({"shards": "int8", "weights": "int8"}, 0.01), ({"plan": "hierarchical"}, 1e-6)):
            model, state = row_of(mesh, **options)
            train(model, 2)
            assert error_of(weights(model), weights(native)) < limit
            same_output(model)
            assert ("plan" in options) == (not state.report().rows)  # exact ones are the backend's own, and its plans
        replicated = sharded(both["shard"])
        gradwire.fsdp.apply(replicated, replicas=both["replicate"], compressor="int8")
        whole = sharded(both)
        train(replicated, 2)
        train(whole, 2)
        assert error_of(weights(replicated), weights(whole)) < 0.01


def test_ranks_may_lie_on_the_nodes_in_any_order_on_the_backend_too(processes: Processes) -> None:
    """Counterparts are then not in the order of their nodes."""
    processes(4, crossed, nodes="abba")
