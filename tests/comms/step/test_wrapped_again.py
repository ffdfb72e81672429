"""Law: a model that is wrapped in DDP again trains on as it was, or the script is told what was lost."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from support.processes import Processes, Said

OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {},
    "onebit": {"warmup_steps": 2},
    "dgc": {"density": 0.1, "warmup_steps": 1},
    "powersgd": {"rank": 2, "warmup_steps": 2},
    "fp16": {},
}
"""Compressor -> options: with residuals alone, with a momentum, with factors, and one that keeps nothing."""
KEEPS_NOTHING = "fp16"
TOLD = "another state has averaged gradients of this model before"
STEPS = 6


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))


def wrapped(module: nn.Module, compressor: str) -> tuple[DistributedDataParallel, gradwire.HookState]:
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.01)
    state = gradwire.HookState(ddp, compressor=compressor, compressor_options=OPTIONS[compressor])
    ddp.register_comm_hook(state, gradwire.comm_hook)
    return ddp, state


def train(ddp: DistributedDataParallel, first: int, steps: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD([each for each in ddp.parameters() if each.requires_grad], lr=0.05)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        ddp(inputs).square().mean().backward()
        optimizer.step()


def freeze(module: nn.Sequential, *, frozen: bool) -> None:
    for each in module[0].parameters():
        each.requires_grad_(not frozen)


def kept(state: gradwire.HookState, layer: str) -> dict[str, float]:
    """What the compressor keeps of a layer on this rank: field and parameter -> sum of its elements, however cut."""
    entries = next(dict(entry) for key, entry in state.state_dict().items() if "rank" in key)
    sums: dict[str, float] = {}
    for key, value in entries.items():
        if isinstance(value, Tensor) and f"/{layer}." in key:
            field, name = key.split("|")[-1].split("/")[:: key.count("/")]
            sums[f"{field} {name}"] = sums.get(f"{field} {name}", 0.0) + value.double().sum().item()
    return sums


def told(_: int, compressor: str) -> dict[str, Any]:
    """The warnings and the weights of trainings whose model is wrapped again after half of the steps."""
    dist.init_process_group("gloo")
    said = Said()
    logging.getLogger("gradwire").addHandler(said)
    found: dict[str, Any] = {}
    for case in ("once", "again", "loaded", "flushed", "another optimizer"):
        module = model()
        ddp, state = wrapped(module, compressor)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        said.lines.clear()
        if case == "flushed":
            train(ddp, 0, STEPS - 1, optimizer)
            state.flush()
        train(ddp, STEPS - 1 if case == "flushed" else 0, 1 if case == "flushed" else STEPS, optimizer)
        if case != "once":
            earlier = state
            ddp, state = wrapped(module, compressor)
            if case == "loaded":
                state.load_state_dict(earlier.state_dict())
            earlier.close()
        train(ddp, STEPS, STEPS, None if case == "another optimizer" else optimizer)
        weights = torch.cat([each.detach().view(-1) for each in module.parameters()])
        found[case] = [line for line in said.lines if TOLD in line], weights
        state.close()
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("compressor", OPTIONS)
def test_a_state_that_starts_afresh_says_so_and_a_loaded_one_goes_on_bit_for_bit(
    processes: Processes, compressor: str
) -> None:
    for found in processes(2, told, compressor, nodes="ab", seconds=150):
        lines = {case: said for case, (said, _) in found.items()}
        keeps = compressor != KEEPS_NOTHING
        momentum = compressor in ("onebit", "dgc")
        assert [len(lines[case]) for case in ("once", "loaded")] == [0, 0], lines
        assert [len(lines[case]) for case in ("again", "another optimizer")] == [keeps, keeps], lines
        assert len(lines["flushed"]) == momentum, "a flush sends residuals, and no momentum"
        assert all(f"{compressor} starts without" in line for each in lines.values() for line in each)
        weights = {case: values for case, (_, values) in found.items()}
        assert torch.equal(weights["loaded"], weights["once"])
        assert torch.equal(weights["again"], weights["once"]) != keeps


def across_freezing(_: int, compressor: str) -> list[dict[str, dict[str, float]]]:
    """What is kept of the first and of the last layer before the model is wrapped again, and a step after that.

    The first layer is frozen then; in a second training it was frozen before.
    """
    dist.init_process_group("gloo")
    found = []
    for thaws in (False, True):
        module = model()
        freeze(module, frozen=thaws)
        ddp, state = wrapped(module, compressor)
        train(ddp, 0, STEPS)
        freeze(module, frozen=not thaws)
        ddp, again = wrapped(module, compressor)
        again.load_state_dict(state.state_dict())
        sums = {
            f"{layer} {when}": kept(each, layer)
            for layer in "04"
            for when, each in (("before", state), ("loaded", again))
        }
        state.close()
        train(ddp, STEPS, 1)
        found.append(sums | {f"{layer} behind": kept(again, layer) for layer in "04"})
        again.close()
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("compressor", ["int8", "dgc", "powersgd"])
def test_a_state_is_taken_over_where_layers_were_frozen_or_thawed(processes: Processes, compressor: str) -> None:
    for frozen, thawed in processes(2, across_freezing, compressor, nodes="ab", seconds=150):
        for found in (frozen, thawed):
            assert found["4 loaded"] == found["4 before"] != {}
            assert {key.split()[1] for key in found["4 behind"]} == {key.split()[1] for key in found["4 before"]}
            assert found["4 behind"] != found["4 before"]
        assert frozen["0 behind"] == frozen["0 before"] != {}, "it waits until the layer is trained again"
        assert thawed["0 before"] == {} != thawed["0 behind"]
