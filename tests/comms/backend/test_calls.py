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
    gloo = processes(2, make_all, "gloo", seconds=300.0)
    one = processes(2, make_all, "gradwire", nodes=["a", "a"], seconds=300.0)
    two = processes(2, make_all, "gradwire", nodes=["a", "b"], seconds=300.0)
    for theirs, ours, apart in zip(gloo, one, two, strict=True):
        assert len(theirs) > 1500 and len(ours) > len(theirs)
        refused = [each for each in ours.values() if each.stage != "done"]
        assert len(refused) > 500
        assert not [each for each in refused if "failed on rank" in str(each.said)], "a refusal is no failure"
        unlike: list[object] = [
            (name, each, apart[name]) for name, each in ours.items() if not alike(each, apart[name])
        ]
        for name, wanted in theirs.items():
            found = ours[name]
            if wanted.stage == found.stage == "done":
                fits = found == wanted
            elif wanted.stage == "done":
                fits = torch_refuses(name, found)
            elif found.stage == "done":
                fits = takes_more(name)
            else:
                fits = STAGES.index(found.stage) <= STAGES.index(wanted.stage)
            if not fits:
                unlike.append((name, found, wanted))
        assert not unlike, "\n".join(map(str, unlike))


def torch_refuses(name: str, found: Outcome) -> bool:
    """What gloo was given contiguous for, and torch or its gloo refuse as it is; or would send without its sign."""
    said = str(found.said)
    lies = any(layout in name for layout in calls.AS_IT_LIES)
    return lies and found.stage == "call" and ("view_as_real" in said or name.startswith("message"))


def alike(one: Outcome, other: Outcome) -> bool:
    """Whether a call ends in the same way on one node and on two."""
    return one.stage == other.stage and (one.stage != "done" or one == other)


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


def test_a_message_to_no_rank_of_the_group_is_refused(processes: Processes) -> None:
    """Gloo waits for it in vain, or ends the process by SIGSEGV."""
    processes(2, check_messages, nodes=["a", "b"])


def check_messages(rank: int) -> None:
    dist.init_process_group("gradwire", timeout=timedelta(seconds=60))
    group, own = dist.group.WORLD, torch.ones(2)
    assert group is not None
    for other in (2, 99, -1):
        for call in (
            partial(group.send, [own], other, 0),
            partial(group.recv, [own], other, 0),
            partial(dist.isend, own, group_dst=other),
            partial(dist.irecv, own, group_src=other),
        ):
            error = calls.attempt((call, []))
            assert error.stage == "call", (call, error)
    for call in (partial(group.send, [torch._neg_view(own)], 1 - rank, 0), partial(group.send, [own], 2, 0)):
        assert "wanted" in str(calls.attempt((call, [])).said)
    dist.all_reduce(own)
    assert own.tolist() == [2.0, 2.0]
    dist.barrier()
    dist.destroy_process_group()
