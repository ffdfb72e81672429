"""A state averages over the group of the model it is registered on, whatever it was made from, or refuses."""

import gc
import logging
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import gradwire
from gradwire.comms import automatic
from gradwire.comms.bootstrap import compat
from gradwire.compressors.kernels.dispatch import KERNELS_ON
from support.processes import Processes, Said

MADE_FROM = ["ddp", "group", "module", "compiled", "nothing", "bound later", "module before", "other group"]


def averaged(rank: int) -> dict[str, object]:
    """Returns each rank's gradient, or the refusal, of models that each rank averages alone, of two ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    alone = [dist.new_group([each]) for each in range(2)][rank]
    found: dict[str, object] = {}
    for made_from in MADE_FROM:
        gc.collect()
        inner = nn.Linear(2, 1, bias=False)
        if made_from == "module before":
            state = gradwire.HookState(inner)
        wrapped = torch.compile(inner, backend="eager") if made_from == "compiled" else inner
        model = DistributedDataParallel(wrapped, process_group=alone)
        if made_from == "ddp":
            state = gradwire.HookState(model)
        elif made_from == "group":
            state = gradwire.HookState(alone)
        elif made_from in ("module", "compiled"):
            state = gradwire.HookState(inner)
        elif made_from in ("nothing", "bound later"):
            state = gradwire.HookState()
        elif made_from == "other group":
            state = gradwire.HookState(dist.group.WORLD)
        if made_from == "bound later":
            state.bind(inner)
        model.register_comm_hook(state, gradwire.comm_hook)
        try:
            model(torch.full((1, 2), float(rank))).sum().backward()
            assert inner.weight.grad is not None
            found[made_from] = inner.weight.grad[0, 0].item()
        except (ValueError, RuntimeError) as error:
            found[made_from] = str(error)
        state.close()
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_it_averages_over_the_models_group_or_refuses(processes: Processes) -> None:
    for rank, found in enumerate(processes(2, averaged, environment={"GRADWIRE_HOSTNAME": "a"})):
        for made_from in ("ddp", "group", "module", "compiled", "nothing", "bound later"):
            assert found[made_from] == rank, (made_from, found)
        for made_from in ("module before", "other group"):
            assert "averages over all 2 ranks, and the Distributed" in str(found[made_from]), (made_from, found)
            assert f"averages over rank {rank}: make the state from the wrapped model" in str(found[made_from])


def waited_in_vain(rank: int) -> str:
    """Returns what rank 0 is told whose model rank 1 does not train."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    said = ""
    if rank == 0:
        try:
            gradwire.HookState(nn.Linear(2, 1), timeout=timedelta(seconds=2))
        except RuntimeError as error:
            said = str(error)
    dist.barrier()
    dist.destroy_process_group()
    return said


def test_a_time_out_at_the_start_names_a_model_that_not_all_ranks_train(processes: Processes) -> None:
    said, _ = processes(2, waited_in_vain, environment={"GRADWIRE_HOSTNAME": "a"})
    assert "made without a process group, so it waited for all ranks of the default group" in said


@pytest.mark.usefixtures("alone")
def test_a_state_of_the_ddp_model_looks_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search goes through all objects of the process."""
    monkeypatch.setattr(gc, "get_referrers", lambda *kinds: pytest.fail("searched"))
    model = DistributedDataParallel(nn.Linear(2, 1))
    model.register_comm_hook(gradwire.HookState(model), gradwire.comm_hook)
    model(torch.ones(1, 2)).sum().backward()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrapped", [False, True])
def test_an_optimizer_in_backward_is_refused_at_once(wrapped: bool) -> None:
    inner = nn.Linear(2, 1)
    _apply_optimizer_in_backward(torch.optim.SGD, inner.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(inner)
    with pytest.raises(ValueError, match="`model` has parameters whose optimizer steps in backward"):
        gradwire.HookState(model if wrapped else inner)
    with pytest.raises(ValueError, match="`model` has parameters whose optimizer steps in backward"):
        gradwire.attach(model)


@pytest.mark.skipif(
    torch.accelerator.current_accelerator() is not None and not torch.accelerator.is_available(),
    reason="DDP makes a stream for `mixed_precision`, and torch's CUDA build makes none without a GPU",
)
@pytest.mark.usefixtures("alone")
def test_mixed_precision_of_ddp_is_refused_at_once() -> None:
    """Its own hook is there already, and torch says of gradwire's that one can be registered only once."""
    model = DistributedDataParallel(nn.Linear(8, 8), mixed_precision=_MixedPrecision(reduce_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"`mixed_precision`.* leave that option out, .* compressor=\"bf16\""):
        gradwire.HookState(model)


@pytest.mark.usefixtures("alone")
def test_an_optimizer_in_backward_of_parameters_that_ddp_ignores_is_none_of_its() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    _apply_optimizer_in_backward(torch.optim.SGD, inner[0].parameters(), {"lr": 0.1})
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
        inner, ["0.weight", "0.bias"]
    )
    model = DistributedDataParallel(inner)
    model.register_comm_hook(gradwire.HookState(model), gradwire.comm_hook)
    model(torch.ones(1, 2)).sum().backward()


class Elsewhere(nn.Parameter):
    """Says that it is on another device: torch's builds for XPU and MPS need a machine that has one."""

    kind = "xpu"
    device = property(lambda self: torch.device(self.kind, 0))


def elsewhere(kind: str) -> nn.Linear:
    model = nn.Linear(2, 1)
    model.weight = type("OnOne", (Elsewhere,), {"kind": kind})(model.weight.detach())
    model.bias = None  # type: ignore[assignment]  # torch's own way of having none
    return model


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", ["xpu", "mps"])
@pytest.mark.parametrize("compressor", ["none", "int8"])
def test_intels_and_apples_gpus_are_refused_in_words(
    kind: str, compressor: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the ranks meet, without a warning about kernels that would not have been used, and without CuPy."""
    with pytest.raises(ValueError, match=rf"on {kind}:0; wanted cpu or cuda .* train there without gradwire"):
        gradwire.HookState(elsewhere(kind), compressor=compressor)
    assert not caplog.records and kind not in KERNELS_ON and "cupy" not in sys.modules


@pytest.mark.usefixtures("alone")
def test_the_variable_leaves_a_model_on_xpu_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever sets it for all jobs has not asked for an error in a script that trains."""
    model = DistributedDataParallel(nn.Linear(2, 1))
    model.module.weight = elsewhere("xpu").weight
    monkeypatch.setenv("GRADWIRE_HOOK", "int8")
    automatic._add(model)
    (line,) = caplog.messages
    assert not compat.comm_hook_name(model)
    assert "a DistributedDataParallel is on xpu:0; wanted cpu or cuda" in line and "torch reduces its gradients" in line


def left_alone(rank: int) -> tuple[str, list[str]]:
    """Returns the name of the hook that GRADWIRE_HOOK has given such a model, and what was logged."""
    logging.getLogger("gradwire").addHandler(said := Said())
    automatic.install()
    dist.init_process_group("gloo")
    inner = nn.Linear(2, 1)
    _apply_optimizer_in_backward(torch.optim.SGD, inner.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(inner)
    dist.destroy_process_group()
    return compat.comm_hook_name(model), said.lines


def test_the_variable_leaves_a_model_with_such_an_optimizer_alone(processes: Processes) -> None:
    ((name, lines),) = processes(1, left_alone, environment={"GRADWIRE_HOOK": "none"})
    assert not name and any("has an optimizer that steps in backward" in line for line in lines), lines
