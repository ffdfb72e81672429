"""Laws of the optimizer of a sharded model: one that does not fit takes no step, one that goes on alone is told."""

import logging
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gradwire.fsdp
from gradwire.fsdp import FsdpState
from support.processes import Processes, Said
from support.sharded import Tiny, applied, differs, job, plain_step, sharded, weights

GOES_ON = "goes on from a checkpoint"
OUTSIDE = {"pattern": "outside.weight", "compressor": "onebit", "options": {"warmup_steps": 0}}


def cases(_: int) -> None:
    with job() as mesh:
        said = Said()
        logging.getLogger("gradwire").addHandler(said)
        refused(mesh, "compressor 'onebit'", compressor="onebit")
        refused(mesh, r"of the rule with pattern 'outside\.weight'", compressor="int8", rules=[OUTSIDE])
        takes_steps(mesh)
        tells_of_what_is_lost(said, "int8", lambda: applied(mesh, compressor="int8"))
        line = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
        tells_of_what_is_lost(said, "`shards`", lambda: residual_of(line))


def residual_of(mesh: DeviceMesh) -> tuple[Tiny, FsdpState]:
    model = sharded(mesh)
    return model, gradwire.fsdp.apply(model, shards="waterfill4")


def refused(mesh: DeviceMesh, words: str, **options: Any) -> None:
    """No weight changes, and none is kept from changing once gradients are torch's own again."""
    model, state = applied(mesh, **options)
    plain_step(model, 0)
    before, optimizer = weights(model), torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with pytest.raises(ValueError, match=f"`optimizer` is AdamW with .*{words}"):
            optimizer.step()
    assert not differs(weights(model), before)
    state.close()
    optimizer.step()
    assert differs(weights(model), before)


def takes_steps(mesh: DeviceMesh) -> None:
    """What fits, and what compresses nothing, is let alone."""
    choices: tuple[dict[str, Any], ...] = ({"compressor": "int8"}, {"compressor": "none"}, {})
    for options in choices:
        model, _ = applied(mesh, **options)
        plain_step(model, 0)
        before = weights(model)
        torch.optim.AdamW(model.parameters()).step()
        assert differs(weights(model), before), options


def tells_of_what_is_lost(said: Said, what: str, make: Any) -> None:
    """Once, and only where an optimizer's state was loaded and gradwire's was not."""
    saved: tuple[Any, Any] | None = None
    for loads, expected in ((False, 0), (False, 1), (True, 0)):
        model, state = make()
        optimizer = torch.optim.Adam(model.parameters())
        if saved is not None:
            optimizer.load_state_dict(saved[0])
            if loads:
                state.load_state_dict(saved[1])
        said.lines.clear()
        for step in range(2):
            plain_step(model, step)
            optimizer.step()
        found = [line for line in said.lines if GOES_ON in line]
        assert len(found) == expected, (what, loads, found)
        assert all(f"{what} starts without what it held back" in line for line in found)
        saved = optimizer.state_dict(), state.state_dict()
        state.close()


def test_a_sharded_models_optimizer_is_looked_at_as_that_of_a_ddp_model(processes: Processes) -> None:
    processes(4, cases, nodes="aabb")
