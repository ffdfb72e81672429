"""Laws of what the backend refuses: as early as gloo does, the same on one node and on two, and the group goes on.

All calls of a table are made in one start of two ranks for each backend and placement; nodes are logical.
"""

import warnings
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from support import calls
from support.calls import Outcome
from support.processes import Processes

STAGES = ("call", "wait", "done")


def make_all(rank: int, backend: str) -> dict[str, Outcome]:
    warnings.simplefilter("ignore")  # of names that torch has renamed, and of complex32
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    found = calls.outcomes(rank, gloo=backend == "gloo")
    dist.destroy_process_group()
    return found


def takes_more(name: str) -> bool:
    """What gloo refuses and gradwire does: dtypes that only move, PREMUL_SUM, and parts of a whole of any shape."""
    moves = not name.startswith(tuple(call.__name__ for call in calls.REDUCING)) and " another dtype" not in name
    return moves or "PREMUL_SUM" in name or name.startswith("reduce_scatter_single another shape")


def test_every_call_ends_as_with_gloo_or_is_refused_as_early(processes: Processes) -> None:
    gloo = processes(2, make_all, "gloo")
    one = processes(2, make_all, "gradwire", nodes=["a", "a"])
    two = processes(2, make_all, "gradwire", nodes=["a", "b"])
    for theirs, ours, apart in zip(gloo, one, two, strict=True):
        assert len(theirs) > 1500 and len(ours) > len(theirs)
        refused = [each for each in ours.values() if each.stage != "done"]
        assert len(refused) > 500
        assert not [each for each in refused if "failed on rank" in str(each.said)], "a refusal is no failure"
        for name, outcome in ours.items():
            assert outcome.stage == apart[name].stage, (name, outcome, apart[name])
            assert outcome.stage != "done" or outcome == apart[name], (name, outcome, apart[name])
        for name, wanted in theirs.items():
            found = ours[name]
            if wanted.stage == found.stage == "done":
                assert found == wanted, (name, found, wanted)
            elif wanted.stage == "done":
                raise AssertionError(f"{name} is refused: {found}")
            elif found.stage == "done":
                assert takes_more(name), (name, wanted)
            else:
                assert STAGES.index(found.stage) <= STAGES.index(wanted.stage), (name, found, wanted)


def test_an_expanded_tensor_is_summed_and_one_to_be_filled_is_refused(processes: Processes) -> None:
    for nodes in (["a", "a"], ["a", "b"]):
        processes(2, check_expanded, nodes=nodes)


def check_expanded(rank: int) -> None:
    dist.init_process_group("gradwire", timeout=timedelta(seconds=60))
    for numel in (3, calls.LARGE):
        summed = torch.tensor([float(rank + 1)]).expand(numel)
        dist.all_reduce(summed)
        assert torch.equal(summed, torch.full((numel,), 3.0))
        copied = torch.tensor([float(rank + 1)]).expand(numel)
        dist.broadcast(copied, 1)
        assert torch.equal(copied, torch.full((numel,), 2.0))
        filled = torch.ones(1).expand(2 * numel)
        error = calls.attempt((partial(dist.all_gather_single, filled, torch.ones(numel), async_op=True), []))
        assert error.stage == "call" and "expand()" in str(error.said)
    dist.barrier()
    dist.destroy_process_group()
