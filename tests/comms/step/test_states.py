"""What the states of DDP, FSDP2 and Outer share: one base class, which has nothing that one of them must take back."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.checkpoint import rank_key
from gradwire.comms.session import GradientState, TrainingState
from gradwire.comms.sharded.apply import unfit_option
from gradwire.fsdp import FsdpState
from support.processes import Processes
from support.sharded import Tiny, batch, mesh_of, sharded

STATES: list[type[Any]] = [gradwire.HookState, FsdpState, gradwire.Outer]
SHARED = {"trace", "export_metrics", "dirty", "state_dict", "load_state_dict", "gathered_state_dict"}
"""Public names of `TrainingState`."""
OF_GRADIENTS = {"advise", "watch", "set_loss_scale", "flush"}
"""Public names that `GradientState` adds."""


def test_a_base_class_has_only_what_its_subclasses_have() -> None:
    """Nothing has to be taken back: Outer, which sees no gradients, inherits what it has."""

    def public(kind: type[Any]) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_") and not name.isupper()}

    assert (public(TrainingState), public(GradientState)) == (SHARED, OF_GRADIENTS)
    for state in STATES:
        assert issubclass(state, GradientState) == (state is not gradwire.Outer)
        for name in ("report", "close", *SHARED):
            assert callable(getattr(state, name)) or isinstance(vars(TrainingState).get(name), property)
    assert not any(hasattr(gradwire.Outer, name) for name in OF_GRADIENTS)


ASKED = {"fusion": 25.0, "reduction": {"average": False}, "elastic": True}


def test_each_state_declares_its_options_and_refuses_the_others() -> None:
    every = {entry.name for entry in dataclasses.fields(gradwire.Config)}
    assert len(every) <= 21
    for state in STATES:
        assert set(state.OPTIONS) <= every
    assert set(gradwire.HookState.OPTIONS) == set(gradwire.Outer.OPTIONS) == every
    for name in every - set(FsdpState.OPTIONS):
        refused = unfit_option(gradwire.Config.from_env(**{name: ASKED[name]}))
        assert refused is not None and refused.startswith(f"`{name}` is ")
    measured = unfit_option(gradwire.Config(nic_bytes_per_second="measure"))
    assert measured is not None and measured.startswith("`nic_bytes_per_second` is 'measure'")


def test_what_states_share_is_written_once() -> None:
    """A state may add to what is shared, and says so by calling it; `report` differs in kind."""
    for name in ("advise", "trace", "export_metrics", "watch", "set_loss_scale", "flush", "load_state_dict"):
        owners = [state for state in STATES[:2] if name in vars(state)]
        assert not owners and name in SHARED | OF_GRADIENTS, f"{name} is written again in {owners}"


def model_of(kind: str) -> tuple[nn.Module, Any, Callable[[int], None]]:
    """A model, its state, and a training step."""
    options: dict[str, Any] = {"compressor": "int8"}
    model: nn.Module = Tiny()
    if kind == "sharded":
        mesh = mesh_of(2, 1)
        model = sharded(mesh["shard"], Tiny())
        state: Any = gradwire.fsdp.apply(model, replicas=mesh["replicate"], **options)
    elif kind == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=True)
        state = gradwire.HookState(model, **options)
        model.register_comm_hook(state, gradwire.comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "outer":
        state = gradwire.Outer(model, optimizer, every=1, fragments=1, delay=0, inside="none", **options)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(batch(number)).square().mean().backward()
        optimizer.step()

    return model, state, step


def use(rank: int, kind: str, folder: str) -> dict[str, object]:
    dist.init_process_group("gloo")
    _, state, step = model_of(kind)
    place = Path(folder)
    for number in range(3):
        step(number)
    state.export_metrics(file=place / f"{rank}.prom", every_seconds=0.0)
    state.trace(place / "steps.json", steps=2)
    for number in range(3, 6):
        step(number)
    own, everybody = state.state_dict(), state.gathered_state_dict(on_all_ranks=True)
    assert rank_key(rank) in own and set(everybody) >= {rank_key(0), rank_key(1)}
    said: dict[str, object] = {"steps": state.steps, "dirty": state.dirty, "text": str(state.report())}
    state.load_state_dict(everybody)
    again = state.state_dict()
    assert again.keys() == own.keys()
    for (key, one), (other, two) in zip(own[rank_key(rank)], again[rank_key(rank)], strict=True):
        assert key == other
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(two)) if isinstance(one, torch.Tensor) else one == two
    if kind != "outer":
        said["advice"] = str(state.advise(accumulate=2))
        for wrong, error in (("a", TypeError), (0.0, ValueError), (float("nan"), ValueError)):
            with pytest.raises(error, match=f"`scale` is {wrong!r}.*wanted a positive number"):
                state.set_loss_scale(wrong)
        state.set_loss_scale(2.0)
        state.flush()
        step(6)
        said["held after a flush"] = state.dirty
    state.close()
    dist.destroy_process_group()
    return said


@pytest.mark.parametrize("kind", ["ddp", "sharded", "outer"])
def test_what_is_alike_works_on_each(kind: str, processes: Processes, tmp_path: Path) -> None:
    for said in processes(2, use, kind, str(tmp_path), nodes=["a", "b"]):
        assert isinstance(said, dict)
        assert (said["steps"], said["dirty"]) == (6, True)
        assert "int8" in said["text"]
        if kind != "outer":
            assert said["advice"] and not said["held after a flush"]
    assert "gradwire" in (tmp_path / "0.prom").read_text()
    record = json.loads((tmp_path / "steps.json").read_text())
    events = [event for event in record["traceEvents"] if event["ph"] == "X"]
    steps = {event["args"]["step"] for event in events if event["cat"] == "step"}
    assert len(steps) == 2 and {event["pid"] for event in events} == {0, 1}
    named = {name for event in events if event["cat"] == "buckets" for name in event["args"]["parameters"]}
    assert "outside.weight" in named
