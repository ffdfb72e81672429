"""The hook looks at the optimizer when it first steps: at the main compressor's fit, and at that of every rule's."""

from collections.abc import Sequence
from typing import Protocol, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

SETTINGS = {
    "main": (gradwire.Config(compressor="dgc"), "compressor 'dgc', which is known not to converge"),
    "rule": (
        gradwire.Config(compressor="int8", rules=[{"pattern": "0.weight", "compressor": "onebit"}]),
        "compressor 'onebit' of the rule with pattern '0.weight', which is known not to converge",
    ),
    "rule of nobody": (gradwire.Config(compressor="int8", rules=[{"pattern": "1.weight", "compressor": "onebit"}]), ""),
}
"""Name -> (configuration, what the optimizer's step says)."""


class Processes(Protocol):
    """See conftest.py."""

    def __call__(self, size: int, target: object, *arguments: object) -> Sequence[object]: ...


def step_under_adam(rank: int, case: str) -> tuple[str, bool]:
    """Returns what the optimizer's step raised, and whether the weights have changed."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32)))
    model.register_comm_hook(gradwire.HookState(model, config=SETTINGS[case][0]), gradwire.comm_hook)
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
