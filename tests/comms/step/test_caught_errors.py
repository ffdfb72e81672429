"""Law: a script that catches an error of `backward()` goes on, or gets the same error again; never one of DDP's own."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from support.processes import Processes

COMPRESSORS = ("none", "int8", "onebit")
"""Exact, a compressor without a state of the optimizer, and one that keeps its momentum."""
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
}
BY_HAND = hasattr(DistributedDataParallel, "finalize_backward")
"""Whether a script may end backward itself, from torch 2.15 on."""
DDPS_OWN = ("INTERNAL ASSERT", "Expected to have finished reduction")
"""What DDP says of a pass that it could not end."""


class PlantedError(LookupError):
    """No error of gradwire's or torch's own."""


class Training:
    """A model of several buckets, which a script trains that catches errors."""

    def __init__(self, compressor: str, ddp: dict[str, Any], *, by_hand: bool = False) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        model: Any = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.001, **ddp)
        self.model, self.by_hand = model, by_hand
        if by_hand:
            model.require_manual_backward_finalization = True
        self.state = gradwire.HookState(self.model, compressor=compressor, plan="flat")
        self.model.register_comm_hook(self.state, gradwire.comm_hook)
        self.inputs = torch.randn(4, 32, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(self, *, clears: bool = True) -> str:
        """One step; the error that the script has caught, or "ok"."""
        if clears:
            self.model.zero_grad()
        try:
            self.model(self.inputs).square().mean().backward()
            if self.by_hand:
                self.model.finalize_backward()
        except Exception as error:  # noqa: BLE001 - as such a script does
            return f"{type(error).__name__}: {error}"
        return "ok"

    def gradients(self) -> Tensor:
        return torch.cat([each.grad.view(-1) for each in self.model.parameters() if each.grad is not None])

    def fails_in(self, place: str, call: int = 0, error: type[Exception] = PlantedError) -> str:
        """One step in which that call of a part of the hook raises; the error that the script has caught."""
        session = self.state._session
        assert session is not None
        owner: Any = {"start": session.communicator, "_connect": self.state, "_reduce": self.state}.get(place)
        owner = session.listeners if owner is None else owner
        calls, original = [], getattr(owner, place)

        def planted(*arguments: Any, **options: Any) -> Any:
            calls.append(place)
            if len(calls) == call + 1:
                raise error("planted")
            return original(*arguments, **options)

        setattr(owner, place, planted)
        try:
            return self.step()
        finally:
            setattr(owner, place, original)


FAILURES: dict[str, tuple[bool, Callable[[Training], str]]] = {
    "before it connects": (True, lambda training: training.fails_in("_connect")),
    "as a step begins": (True, lambda training: training.fails_in("step_began")),
    "before the first bucket is sent": (True, lambda training: training.fails_in("_reduce")),
    "before the second bucket is sent": (False, lambda training: training.fails_in("_reduce", 1)),
    "without memory": (False, lambda training: training.fails_in("start", error=torch.OutOfMemoryError)),
    "without memory for a later bucket": (
        False,
        lambda training: training.fails_in("start", 1, error=torch.OutOfMemoryError),
    ),
    "behind the last bucket": (False, lambda training: training.fails_in("last_bucket_sent")),
    "as a step ends": (False, lambda training: training.fails_in("step_ended")),
}
"""Where the hook fails on all ranks -> whether nothing of the step was sent, so that the next one works."""


def every_failure(_: int, compressor: str) -> list[tuple[str, bool, list[str], Tensor, Tensor]]:
    """What is raised in a step that fails, in the two that follow, and the gradients of a step before and behind it."""
    dist.init_process_group("gloo")
    found = []
    for (options, ddp), by_hand in product(OPTIONS.items(), (False, True) if BY_HAND else (False,)):
        for name, (recovers, fail) in FAILURES.items():
            if options != "as it is" and name not in ("as a step begins", "before the second bucket is sent"):
                continue
            training = Training(compressor, ddp, by_hand=by_hand)
            assert [training.step() for _ in range(2)] == ["ok", "ok"]
            before = training.gradients()
            said = [fail(training), training.step(), training.step()]
            found.append((f"{options}, {name}, by hand: {by_hand}", recovers, said, before, training.gradients()))
            training.state.close()
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_a_failed_step_is_followed_by_a_working_one_or_by_the_same_error(processes: Processes, compressor: str) -> None:
    ranks = processes(2, every_failure, compressor, seconds=300)
    for results in ranks:
        for name, recovers, said, before, behind in results:
            first, *later = said
            assert first.endswith("Error: planted"), name
            assert later == (["ok"] * 2 if recovers else [first] * 2), name
            if recovers and compressor == "none":
                assert torch.equal(before, behind), name
    for name, recovers, _, _, behind in ranks[0]:
        other = next(result[4] for result in ranks[1] if result[0] == name)
        assert not recovers or torch.equal(behind, other), name


def refused_gradients(_: int) -> list[list[str]]:
    """A second pass on top of an average, which a momentum refuses; again, until the script clears the gradients."""
    dist.init_process_group("gloo")
    found = []
    for options, by_hand in product(("as it is", "views", "unused"), (False, True) if BY_HAND else (False,)):
        training = Training("onebit", OPTIONS[options], by_hand=by_hand)
        found.append([training.step(), *(training.step(clears=clears) for clears in (False, False, True, True))])
        training.state.close()
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_gradients_that_hold_an_average_are_refused_until_they_are_cleared(processes: Processes) -> None:
    for results in processes(2, refused_gradients):
        for first, *refused, third, fourth in results:
            assert (first, third, fourth) == ("ok", "ok", "ok"), (first, refused, third)
            assert all("still holds the average" in each for each in refused), refused


def behind_different_steps(rank: int) -> list[str]:
    dist.init_process_group("gloo")
    training = Training("int8", {})
    training.step()
    training.state.steps += rank  # as a rank would count that has failed alone
    said = [training.fails_in("step_began"), training.step(), training.step()]
    dist.barrier()
    dist.destroy_process_group()
    return said


def test_ranks_that_failed_in_different_steps_do_not_go_on_together(processes: Processes) -> None:
    for planted, *later in processes(2, behind_different_steps):
        assert planted == "PlantedError: planted"
        assert all("after an error" in each and "rank 1: {'finished steps': 2}" in each for each in later), later


def without_a_peer(rank: int) -> list[tuple[str, list[str]]]:
    """What rank 0 gets in three steps after rank 1 has left."""
    dist.init_process_group("gloo")
    trainings = {
        f"{compressor}, {options}": Training(compressor, ddp)
        for compressor in COMPRESSORS
        for options, ddp in OPTIONS.items()
    }
    for training in trainings.values():
        # DDP exchanges its buckets in the second forward pass, with a static graph in the third.
        assert [training.step() for _ in range(3)] == ["ok"] * 3
    dist.barrier()
    if rank == 1:
        for training in trainings.values():
            training.state.close()
        return []
    return [(name, [training.step() for _ in range(3)]) for name, training in trainings.items()]


def test_steps_without_a_peer_raise_the_same_error(processes: Processes) -> None:
    results, _ = processes(2, without_a_peer, lost=[1], seconds=300)
    assert len(results) == len(COMPRESSORS) * len(OPTIONS)
    for name, said in results:
        causes = {each[each.index("CollectiveError: ") :].partition("\n")[0] for each in said}
        assert len(causes) == 1 and "rank 1" in causes.pop(), (name, said)
        assert not any(words in each for words in DDPS_OWN for each in said), name
