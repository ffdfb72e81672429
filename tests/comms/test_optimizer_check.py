"""The hook looks at the optimizer when it first steps: at the main compressor's fit, and at that of every rule's."""

import warnings
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from support.processes import Processes

SETTINGS = {
    "main": (gradwire.Config(compressor="dgc"), "compressor 'dgc', which is known not to converge"),
    "rule": (
        gradwire.Config(compressor="int8", rules=[{"pattern": "0.weight", "compressor": "onebit"}]),
        "compressor 'onebit' of the rule with pattern '0.weight', which is known not to converge",
    ),
    "rule of nobody": (gradwire.Config(compressor="int8", rules=[{"pattern": "1.weight", "compressor": "onebit"}]), ""),
}
"""Name -> (configuration, what the optimizer's step says)."""


def step_under_adam(rank: int, case: str, bound: bool = True) -> tuple[str, bool]:
    """Returns what the optimizer's step raised, and whether the weights have changed."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32)))
    state = gradwire.HookState(model if bound else None, config=SETTINGS[case][0])
    model.register_comm_hook(state, gradwire.comm_hook)
    before = model.module[0].weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 64) * (1 + rank)).square().sum().backward()
    message = ""
    try:
        optimizer.step()
    except ValueError as error:
        message = str(error)
    dist.barrier()
    dist.destroy_process_group()
    return message, not torch.equal(model.module[0].weight, before)


@pytest.mark.parametrize("case", SETTINGS)
def test_a_pair_that_is_known_to_fail_takes_no_step(processes: Processes, case: str) -> None:
    wanted = SETTINGS[case][1]
    for message, changed in cast(list[tuple[str, bool]], processes(2, step_under_adam, case)):
        assert wanted in message and bool(message) == bool(wanted)
        assert changed == (not wanted)


def test_a_state_without_a_model_checks_the_optimizer_too(processes: Processes) -> None:
    for message, changed in cast(list[tuple[str, bool]], processes(2, step_under_adam, "main", False)):
        assert SETTINGS["main"][1] in message and not changed


def warned(rank: int, bound: bool) -> list[str]:
    """Returns what a state warns of that has one rule for a name of the model, and one for nobody's."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32)))
    rules = [{"pattern": "0.weight"}, {"pattern": "*.embedding.weight"}]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = gradwire.HookState(model if bound else None, compressor="int8", rules=rules)
        model.register_comm_hook(state, gradwire.comm_hook)
        for _ in range(2):
            model(torch.ones(4, 64)).sum().backward()
    dist.barrier()
    dist.destroy_process_group()
    said = [each for each in caught if "`rules[" in str(each.message)]
    assert all(each.filename == __file__ for each in said), [each.filename for each in said]
    return [str(each.message) for each in said]


def test_rules_that_match_no_parameter_are_named(processes: Processes) -> None:
    for messages in cast(list[list[str]], processes(2, warned, True)):
        assert len(messages) == 1 and "`rules[1]` has the pattern '*.embedding.weight'" in messages[0]
        assert "'0.weight', '0.bias'" in messages[0]
    for messages in cast(list[list[str]], processes(2, warned, False)):
        assert len(messages) == 2 and all("'parameter0'" in each and "HookState(model)" in each for each in messages)
