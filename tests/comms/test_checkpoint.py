"""Every rank's state comes back from the checkpoints that people write: of all ranks, of rank 0, of a killed job."""

import logging
import os
import pickle
import runpy
import signal
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.checkpoint import (
    ENTRIES,
    JOB,
    OUTER,
    OWNERS,
    SHARDS,
    find_own,
    gather,
    normalize,
    pack,
    rank_file,
    rank_key,
    refuse_other_owner,
    save_file,
    unpack,
)
from gradwire.compressors.base import StateDict
from support.models import Shuffled
from support.processes import Processes, Said

NODES = ["a", "a", "b", "b"]
STEPS = 6
OPTIONS: dict[str, dict[str, object]] = {
    "onebit": {"warmup_steps": 1},
    "powersgd": {"warmup_steps": 1, "rank": 2},
}
OLD = {
    "gradwire/rank": 1,
    "gradwire/size": 2,
    "gradwire/dirty": 1,
    "gradwire/loss_scale": 0.0,
    "gradwire/transfers": torch.zeros(0, 4, dtype=torch.int64),
    "0|compressor": "int8",
}
"""A state of rank 1 of 2 as it was before keys carried the rank."""


def start(name: str) -> tuple[DistributedDataParallel, gradwire.HookState]:
    model = DistributedDataParallel(Shuffled(), bucket_cap_mb=0.02)
    state = gradwire.HookState(model, compressor=name, compressor_options=OPTIONS[name])
    model.register_comm_hook(state, gradwire.comm_hook)
    return model, state


def train(model: DistributedDataParallel, first: int, last: int) -> Tensor:
    for step in range(first, last):
        rows = torch.randn(4, 48, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        model.zero_grad()
        model(rows).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.01 * parameter.grad)
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def same(one: object, other: object) -> bool:
    """Whether two states are equal, bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other


def check_resume(rank: int, folder: str) -> dict[str, list[bool]]:
    """For each compressor: what was resumed in each of the ways ends where the uninterrupted run does."""
    dist.init_process_group("gloo")
    savers = dist.new_group(backend="gloo")
    found = {}
    for name in OPTIONS:
        model, state = start(name)
        fresh = state.state_dict()
        train(model, 0, STEPS // 2)
        saved = state.state_dict()
        keys = [fresh.keys() == saved.keys(), list(saved) == ["gradwire/job", f"gradwire/rank{rank}"]]
        parts = {"model": model.module.state_dict(), "hook": state}
        written = async_save(parts, checkpoint_id=f"{folder}/{name}", process_group=savers)  # while training goes on
        gathered = state.gathered_state_dict()
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "hook": gathered}, f"{folder}/{name}.pt")
        keys.append(len(gathered) == (1 + len(NODES) if rank == 0 else 2))
        keys.append(len(state.gathered_state_dict(on_all_ranks=True)) == 1 + len(NODES))
        through = train(model, STEPS // 2, STEPS)
        assert isinstance(written, Future)
        written.result()
        dist.barrier()
        found[name] = [*keys, *resume(name, folder, saved, through)]
    dist.destroy_process_group()
    return found


def resume(name: str, folder: str, saved: object, through: Tensor) -> list[bool]:
    model, state = start(name)
    parts = {"model": model.module.state_dict(), "hook": state}
    load(parts, checkpoint_id=f"{folder}/{name}")
    results = [same(state.state_dict(), saved), torch.equal(train(model, STEPS // 2, STEPS), through)]

    model, state = start(name)  # an optimizer step further, and back: what was loaded is all there is
    train(model, 0, 1)
    of_all = torch.load(f"{folder}/{name}.pt", weights_only=True)
    model.module.load_state_dict(of_all["model"])
    state.load_state_dict(of_all["hook"])
    again = state.state_dict()
    state.load_state_dict(again)  # a save right after a load
    results += [same(again, saved), torch.equal(train(model, STEPS // 2, STEPS), through)]

    state = gradwire.HookState(compressor=name, compressor_options=OPTIONS[name])  # loaded before it has a model
    parts = {"hook": state}
    load(parts, checkpoint_id=f"{folder}/{name}")
    results.append(same(state.state_dict(), saved))
    model = DistributedDataParallel(Shuffled(), bucket_cap_mb=0.02)
    model.module.load_state_dict(of_all["model"])
    state.bind(model)
    model.register_comm_hook(state, gradwire.comm_hook)
    return [*results, same(state.state_dict(), saved), torch.equal(train(model, STEPS // 2, STEPS), through)]


def test_resume_equals_no_interruption(processes: Processes, tmp_path: Path) -> None:
    for found in processes(len(NODES), check_resume, str(tmp_path), nodes=NODES):
        assert isinstance(found, dict) and {name: all(each) for name, each in found.items()} == dict.fromkeys(
            OPTIONS, True
        ), found


def gather_without_one(rank: int, on_all_ranks: bool) -> str:
    """One rank has ended before; what the others are told."""
    dist.init_process_group("gloo")
    model, state = start("onebit")
    train(model, 0, 1)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        state.gathered_state_dict(on_all_ranks=on_all_ranks)
    return str(caught.value)


def find_beside_damaged(rank: int, place: str) -> str:
    """Two ranks, of whom rank 1 finds half of its file, and nothing in it that torch can read."""
    dist.init_process_group("gloo")
    own = rank_file(place, rank)
    save_file({rank_key(rank): (("gradwire/rank", rank),)}, own)
    assert find_own(place) is not None
    if rank == 1:
        Path(own).write_bytes(Path(own).read_bytes()[:300])
    with pytest.raises(ValueError) as refused:
        find_own(place)
    return str(refused.value)


def test_a_file_that_cannot_be_read_is_an_error_on_all_ranks(processes: Processes, tmp_path: Path) -> None:
    place = f"{tmp_path}/"
    said = processes(2, find_beside_damaged, place, nodes="ab")
    assert said[0] == said[1] and f"{rank_file(place, 1)} cannot be read on rank 1 (" in said[0], said


@pytest.mark.parametrize("on_all_ranks", [False, True])
def test_a_rank_that_has_ended_is_named_where_states_are_gathered(on_all_ranks: bool, processes: Processes) -> None:
    found = processes(3, gather_without_one, on_all_ranks, nodes="abb", agent=True, lost=[2])
    why = "rank 2 has ended before it had given its state: look at its output"
    assert found[:2] == [f"the ranks' states cannot be gathered: {why}"] * 2


def save_flushed(_: int, folder: str) -> None:
    dist.init_process_group("gloo")
    model, state = start("onebit")
    train(model, 0, 3)
    save({"model": model.module.state_dict(), "hook": state}, checkpoint_id=f"{folder}/dirty")
    state.flush()
    train(model, 3, 4)
    save({"model": model.module.state_dict(), "hook": state}, checkpoint_id=f"{folder}/flushed")
    dist.destroy_process_group()


def load_flushed(_: int, folder: str, partial: bool) -> tuple[str, bool, float, int]:
    """What another number of ranks says to a state with residuals; whether it starts anew, trains, and what it warns.

    The number is of warnings that the momentum is lost.
    """
    dist.init_process_group("gloo")
    said = Said()
    logging.getLogger("gradwire").addHandler(said)
    model, state = start("onebit")
    fresh, refused = state.state_dict(), ""
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    try:
        load({"hook": state}, checkpoint_id=f"{folder}/dirty", planner=planner)
    except ValueError as error:
        refused = str(error)
    weights = {"model": model.module.state_dict()}
    load(weights, checkpoint_id=f"{folder}/flushed")
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    load({"hook": state}, checkpoint_id=f"{folder}/flushed", planner=planner)
    anew = same(state.state_dict(), fresh)
    total = train(model, 4, 6).double().sum().item()
    dist.destroy_process_group()
    return refused, anew, total, sum("the momentum that onebit keeps" in line for line in said.lines)


@pytest.mark.parametrize(("before", "after"), [("aabb", "ab"), ("ab", "abb")])
def test_a_flushed_state_is_taken_at_another_world_size(
    before: str, after: str, processes: Processes, tmp_path: Path
) -> None:
    processes(len(before), save_flushed, str(tmp_path), nodes=before)
    results = processes(len(after), load_flushed, str(tmp_path), len(after) > len(before), nodes=after)
    for found in results:
        assert isinstance(found, tuple)
        assert f"of {len(before)} ranks, there are {len(after)}" in found[0] and "state.flush()" in found[0]
        assert found[1:] == (True, results[0][2], 1)


def bind_late(_: int) -> list[str]:
    """The errors of a state that learns of its model too late, and of one whose parameters are called otherwise."""
    dist.init_process_group("gloo")
    errors = []
    named = gradwire.HookState(model := DistributedDataParallel(nn.Linear(64, 64)), compressor="int8").state_dict()
    unbound = gradwire.HookState(compressor="int8")
    model.register_comm_hook(unbound, gradwire.comm_hook)
    model(torch.ones(1, 64)).sum().backward()
    with pytest.raises(ValueError, match="bind") as caught:
        unbound.bind(model)
    errors.append(str(caught.value))
    with pytest.raises(ValueError, match="bind") as caught:
        unbound.load_state_dict(named)
    errors.append(str(caught.value))
    part = {key: value for key, value in named[rank_key(0)] if key != ENTRIES}
    for odd in (torch.zeros(3), "1"):
        bound = gradwire.HookState(model, compressor="int8")
        saved = pack({**part, "gradwire/named": odd}, 0, 1, True)
        with pytest.raises(
            ValueError,
            match=r"`state\['gradwire/named'\]` is .*which no saved state holds: the checkpoint is corrupt; load",
        ):
            bound.load_state_dict(saved)
    dist.destroy_process_group()
    return errors


def test_residuals_under_numbers_and_under_names_are_not_mixed(processes: Processes) -> None:
    (errors,) = processes(1, bind_late, nodes=["a"])
    assert isinstance(errors, list)
    assert "comes after the first step" in errors[0] and "residuals under parameters' names" in errors[1]


def test_an_old_state_loads_where_it_is_this_ranks() -> None:
    assert unpack(normalize(OLD), 1, 2) == OLD
    with pytest.raises(ValueError, match="part of rank 1 alone, this is rank 0 of 2"):
        unpack(normalize(OLD), 0, 2)
    with pytest.raises(ValueError, match=r"of 2 ranks, there are 4"):
        unpack(normalize(OLD), 1, 4)
    assert unpack(normalize(OLD | {"gradwire/dirty": 0}), 3, 4) is None


def load_of_earlier(rank: int) -> list[bool]:
    """Whether states as earlier versions wrote them go on as the one of this version does, which has more in it."""
    dist.init_process_group("gloo")
    model, state = start("onebit")
    train(model, 0, 3)
    own = dict(state.state_dict()[rank_key(rank)])
    kept = {name: value.clone() for name, value in model.module.state_dict().items()}
    through, found = train(model, 3, STEPS), []
    for later in ENTRIES, "gradwire/placement", "gradwire/named":
        del own[later]
    job = (("size", 2), ("dirty", 1))
    for saved in ({JOB: job, rank_key(rank): tuple(own.items())}, own):
        model, state = start("onebit")
        model.module.load_state_dict(kept)
        state.load_state_dict(saved)
        found.append(torch.equal(train(model, 3, STEPS), through))
    dist.destroy_process_group()
    return found


def test_states_of_earlier_versions_go_on_bit_for_bit(processes: Processes) -> None:
    assert processes(2, load_of_earlier, nodes="ab") == [[True, True]] * 2


def test_a_rank_takes_its_own_part_and_says_what_is_missing() -> None:
    first, second = (pack({"step": rank, "x": torch.ones(rank)}, rank, 2, True) for rank in range(2))
    assert unpack(first | second, 1, 2) == {"step": 1, "x": torch.ones(1)}
    as_lists = {key: [list(pair) for pair in entry] for key, entry in (first | second).items()}
    assert unpack(normalize(as_lists), 1, 2) == unpack(first | second, 1, 2)
    with pytest.raises(ValueError, match=r"part of rank 0 alone, this is rank 1 of 2: .*gathered_state_dict\(\)"):
        unpack(first, 1, 2)
    assert unpack(pack({}, 0, 2, False), 0, 2) is None


def test_a_state_that_lost_anything_on_the_way_is_refused_on_every_rank() -> None:
    parts: StateDict = {"0|compressor": "int8", "0|residual/0/0.weight": torch.ones(3), "0|step": 2}
    saved = pack(parts, 0, 2, True) | pack({}, 1, 2, True)
    assert unpack(normalize(saved), 0, 2) == parts and unpack(normalize(saved), 1, 2) is None
    whole = dict(saved[rank_key(0)])
    for name in whole:
        damaged = {key: value for key, value in whole.items() if key != name}
        with pytest.raises(
            ValueError, match=r"does not state its entries" if name == ENTRIES else rf"lacks 1 .*{name[:3]}"
        ):
            normalize(saved | {rank_key(0): tuple(damaged.items())})
    with pytest.raises(ValueError, match=r"saved with 3 elements under '0\|residual/0/0.weight' and holds 2"):
        normalize(saved | {rank_key(0): tuple((whole | {"0|residual/0/0.weight": torch.ones(2)}).items())})
    with pytest.raises(ValueError, match="does not state its entries"):
        normalize(saved | {rank_key(1): ()})
    with pytest.raises(ValueError, match="format 4, this gradwire reads up to 3"):
        normalize(saved | {JOB: (("size", 2), ("dirty", 1), ("format", 4))})


def test_another_value_than_was_saved_is_refused() -> None:
    parts: StateDict = {
        "0|compressor": "int8",
        "0|step": 2,
        "0|x": torch.ones(3),
        "0|y": torch.zeros((), dtype=torch.int8),
    }
    saved = pack(parts, 0, 2, True)
    others: StateDict = {
        "0|compressor": "int4",
        "0|step": 2.0,
        "0|x": torch.tensor([1.0, 1.0, 1.0000001]),
        "0|y": torch.zeros((), dtype=torch.uint8),
    }
    for key, other in others.items():
        changed = {**dict(saved[rank_key(0)]), key: other}
        with pytest.raises(ValueError, match=r"another value under '0\|\w+' than it was saved with .*is damaged"):
            normalize(saved | {rank_key(0): tuple(changed.items())})
    with pytest.raises(ValueError, match=r"does not state its entries .*of another rank"):
        normalize({JOB: saved[JOB], rank_key(1): saved[rank_key(0)]})
    for job in ("size", 3), ("dirty", 0), ("format", 2), ("format", 1), ("check", 5):
        with pytest.raises(ValueError, match=r"state\['gradwire/job'\]` is not what was saved"):
            normalize(saved | {JOB: tuple((dict(saved[JOB]) | dict([job])).items())})


def test_what_is_no_state_of_a_rank_is_refused_where_states_are_gathered() -> None:
    class Group:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 2

        def gather_bytes(self, own: bytes) -> list[bytes]:
            return [own, pickle.dumps(os.getcwd)]

    with pytest.raises(ValueError, match="a rank has given no state"):
        gather(pack({"x": torch.ones(3)}, 0, 2, True), Group(), on_all_ranks=True)  # type: ignore[arg-type]


def test_a_state_from_before_there_were_checksums_loads_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    job = (("size", 1), ("dirty", 1), ("format", 2))
    saved = {JOB: job, rank_key(0): (("x", torch.ones(3)), (ENTRIES, '{"x":3}'))}
    found = unpack(normalize(saved), 0, 1)
    assert found is not None and torch.equal(found["x"], torch.ones(3))  # type: ignore[arg-type]
    assert "has no checksums" in caplog.text
    with pytest.raises(ValueError, match="saved with 4 elements"):
        normalize({JOB: job, rank_key(0): (("x", torch.ones(3)), (ENTRIES, '{"x":4}'))})


def test_a_state_from_before_entries_were_stated_loads() -> None:
    assert unpack(normalize({JOB: (("size", 1), ("dirty", 1)), rank_key(0): (("step", 2),)}), 0, 1) == {"step": 2}


def test_a_state_of_another_kind_is_refused_by_the_names_of_both() -> None:
    """Names, shapes and compressors may be the same, and its elements lie elsewhere."""
    part: StateDict = {"0|compressor": "int8", "0|residual/0/0.weight": torch.ones(3)}
    saved = {"": pack(part, 1, 2, True)}
    saved[SHARDS] = pack(part | {SHARDS: 2}, 1, 2, True)
    saved[OUTER] = pack({OUTER + key: value for key, value in part.items()}, 1, 2, True)
    for mark, name in OWNERS.items():
        for other, each in saved.items():
            if other == mark:
                refuse_other_owner(normalize(each), mark)
                continue
            with pytest.raises(ValueError, match="`state` is of ") as refused:
                refuse_other_owner(normalize(each), mark)
            assert name in str(refused.value) and OWNERS[other] in str(refused.value)
        refuse_other_owner(normalize(pack({}, 0, 2, False)), mark)  # of a rank that has seen no bucket
    state = gradwire.HookState(compressor="int8")
    with pytest.raises(ValueError, match=r"`state` is of gradwire\.Outer, and this one is of a Distributed"):
        state.load_state_dict(saved[OUTER])


@pytest.mark.parametrize("state", [{}, {"step": 3}, {"gradwire/job": ()}, {"gradwire/job": 5}])
def test_what_is_no_state_of_the_hook_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"wanted what HookState\.state_dict\(\) returned"):
        gradwire.HookState(compressor="int8").load_state_dict(state)


def test_an_exact_hook_has_no_state_and_takes_none() -> None:
    state = gradwire.HookState()
    state.load_state_dict({})
    assert state.state_dict() == state.gathered_state_dict() == {}
    with pytest.raises(ValueError, match="`compressor` is not set"):
        state.load_state_dict(OLD)


def launch_restarted_job(rank: int, folder: str) -> None:
    """What torchrun is: its agent, here with ranks that it forks, which have torch imported already."""
    # Without it torch gives the new attempt the store of the old one, old keys included: plain gloo hangs too.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="restarted",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        local_addr=os.environ["MASTER_ADDR"],  # without it the ranks are told a host name, which may not resolve
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, restarted_job)(folder)


def restarted_job(folder: str) -> None:
    """One rank."""
    job = Path(__file__).parent / "jobs" / "restarted_job.py"
    sys.argv = [str(job), folder]
    runpy.run_path(str(job), run_name="__main__")


def test_a_job_that_torchrun_restarts_ends_where_an_undisturbed_one_does(processes: Processes, tmp_path: Path) -> None:
    processes(1, launch_restarted_job, str(tmp_path))
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text() == "restart 1, step 3: the same"
