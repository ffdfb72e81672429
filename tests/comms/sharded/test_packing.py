"""torch 2.15 packs the gradients of a parameter group by dtype; names, rules and residuals follow the values."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import gradwire.fsdp
from gradwire.comms.sharded.carried import ShardResidual
from gradwire.comms.sharded.layout import NamedShard
from support.processes import Processes
from support.sharded import Tiny, batch, differs, error_of, gradients, job, mesh_of, sharded, train, weights

NEW = hasattr(nn.Parameter(torch.zeros(1)), "_has_grad_dtype_override")
"""Whether FSDP2 heeds a parameter's own `grad_dtype`."""

OF_ITS_OWN = "inside.bias"
"""The parameter whose gradient has another dtype; second in its parameter group, and packed last."""


def mixed(on: DeviceMesh, own: torch.dtype, grad_dtype: torch.dtype) -> Any:
    model = Tiny().to(own)
    model.inside.bias.grad_dtype = grad_dtype
    return sharded(on, model)


def passes(model: Any, step: int) -> None:
    """Members of the parameter group get a gradient in every second step alone."""
    given = batch(step).to(model.inside.weight.dtype)
    model(given, spare=step % 2 == 1).square().mean().backward()


def between_replicas(rank: int) -> None:
    with job() as mesh:
        for own, grad_dtype in (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16):
            native, ours = (mixed(on, own, grad_dtype) for on in (mesh, mesh["shard"]))
            state = gradwire.fsdp.apply(ours, replicas=mesh["replicate"])
            train(native, take=passes)
            train(ours, take=passes)
            assert not differs(weights(ours), weights(native)), own
            param_group = next(param_group for param_group in state._param_groups if param_group.module is ours)
            names = [shard.name for shard in state._names.of(param_group.present)]
            assert names[0] == "inside.weight" and names[-1] == OF_ITS_OWN, names
            # Vectors and the rule's parameter are exact, and the others are not.
            native, ours = (mixed(on, own, grad_dtype) for on in (mesh, mesh["shard"]))
            rules = [{"pattern": "spare.*"}]
            state = gradwire.fsdp.apply(ours, replicas=mesh["replicate"], compressor="int4", rules=rules)
            passes(native, 1)
            passes(ours, 1)
            found, wanted = gradients(ours), gradients(native)
            exact = {name for name in wanted if torch.equal(found[name], wanted[name])}
            assert {OF_ITS_OWN, "spare.weight", "outside.bias"} <= exact, exact
            assert not {"outside.weight", "blocks.0.1.weight"} & exact, exact


def between_shards(rank: int) -> None:
    with job():
        mesh = mesh_of(1, 4)["shard"]
        for choice in ("int8", "waterfill4"):
            native, ours = (mixed(mesh, torch.bfloat16, torch.float32) for _ in range(2))
            gradwire.fsdp.apply(ours, shards=choice)
            passes(native, 1)
            passes(ours, 1)
            found, wanted = gradients(ours), gradients(native)
            assert error_of({OF_ITS_OWN: found[OF_ITS_OWN]}, {OF_ITS_OWN: wanted[OF_ITS_OWN]}) < 1e-6, choice
            off = error_of({"": found["outside.weight"].float()}, {"": wanted["outside.weight"].float()})
            assert 1e-4 < off < 0.3, (choice, off)


@pytest.mark.skipif(not NEW, reason="torch packs in the parameters' order before 2.15")
def test_a_gradient_of_another_dtype_keeps_its_name_between_replicas(processes: Processes) -> None:
    processes(4, between_replicas, nodes="aabb")


@pytest.mark.skipif(not NEW, reason="torch packs in the parameters' order before 2.15")
def test_a_gradient_of_another_dtype_keeps_its_name_between_shards(processes: Processes) -> None:
    processes(4, between_shards, nodes="aabb")


def test_the_residual_goes_by_name_in_whatever_order_rows_are() -> None:
    shards = [NamedShard(name, (n, 1), (n, 1), n) for name, n in (("a", 3), ("b", 2), ("c", 4))]
    kept = ShardResidual(shards, (), 1)
    device = torch.device("cpu")
    a, b, c = shards

    def add(present: list[NamedShard], values: list[float]) -> None:
        rows = kept.take(present, device)
        rows[0] += torch.tensor(values)
        kept.put(present, rows)

    add([a, c, b], [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert kept.rows is not None and kept.rows.tolist() == [[1, 2, 3, 8, 9, 4, 5, 6, 7]]
    add([c, b], [10, 10, 10, 10, 20, 20])
    assert kept.rows.tolist() == [[1, 2, 3, 28, 29, 14, 15, 16, 17]]
    assert [row.tolist() for row in kept.take([b, a], device)] == [[28, 29, 1, 2, 3]]
    assert [row.tolist() for row in kept.take(shards, device)] == kept.rows.tolist()
