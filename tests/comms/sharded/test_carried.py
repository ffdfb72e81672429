"""Laws of four bits both ways: nothing is lost for good, all ranks have the same bits, the backward pass is free."""

import itertools
import math
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire.fsdp
from gradwire.comms.checkpoint import ENTRIES, JOB, PREFIX, pack, rank_key
from gradwire.comms.run.phase_stats import PhaseTotals
from gradwire.comms.sharded.carried import SentShards, ShardResidual
from gradwire.comms.sharded.collectives import CARRIED, codec_of
from gradwire.comms.sharded.flat_shards import add_payload, encode, payload_nbytes
from gradwire.comms.sharded.layout import NamedShard, ShardRuns, runs_of
from gradwire.compressors.base import StateDict
from gradwire.compressors.rules import DEFAULT_RULES
from gradwire.fsdp import FsdpState
from support.processes import Processes
from support.sharded import (
    Tiny,
    applied,
    batch,
    differs,
    error_of,
    gradients,
    job,
    local,
    mesh_of,
    plain_step,
    sharded,
    train,
    weights,
)

Case = Callable[[DeviceMesh], None]

RUNS = ShardRuns(3000, ((10, 1500), (2000, 2900)), ((0, 10), (1500, 2000), (2900, 3000)))
CODEC = codec_of(CARRIED, None)


def row_of(seed: int) -> torch.Tensor:
    return torch.randn(RUNS.numel, generator=torch.Generator().manual_seed(seed))


def sent_after(sent: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """What a receiver has when a difference has come."""
    payload = torch.empty(payload_nbytes(CODEC, RUNS, row.dtype), dtype=torch.uint8)
    encode(CODEC, RUNS, row, payload, sent=sent)
    new = sent.clone()
    add_payload(CODEC, RUNS, payload, row.dtype, new)
    return new


def test_a_row_that_stays_is_had_more_exactly_each_time() -> None:
    row, sent = row_of(0), torch.zeros(RUNS.numel)
    off = [float((row - sent).norm())]
    for _ in range(8):
        sent = sent_after(sent, row)
        off.append(float((row - sent).norm()))
        assert torch.equal(sent[:10], row[:10]) and torch.equal(sent[1500:2000], row[1500:2000])
    assert all(later < 0.1 * before for before, later in itertools.pairwise(off[:5])), off
    assert off[-1] < 1e-6 * off[0]


def test_what_one_payload_leaves_out_is_in_the_next() -> None:
    """The sums of what was sent and of what was to be sent differ by what is left now, and not by more with time."""
    left = torch.zeros(RUNS.compressed_numel)
    wanted, had = torch.zeros(RUNS.numel), torch.zeros(RUNS.numel)
    for step in range(12):
        row = row_of(step)
        payload = torch.empty(payload_nbytes(CODEC, RUNS, row.dtype), dtype=torch.uint8)
        encode(CODEC, RUNS, row, payload, residual=left)
        got = torch.zeros(RUNS.numel)
        add_payload(CODEC, RUNS, payload, row.dtype, got)
        wanted, had = wanted + row, had + got
        off = torch.cat([(wanted - had)[start:stop] for start, stop in RUNS.compressed])
        assert torch.allclose(off, left, atol=1e-5)
        assert float(left.norm() / row.norm()) < 0.1


def test_the_residual_goes_by_the_parameter_and_not_by_its_place() -> None:
    shards = [NamedShard(name, (64, 64), (32, 64), 2048) for name in "abc"]
    shards.insert(1, NamedShard("bias", (64,), (32,), 32))
    left = ShardResidual(shards, DEFAULT_RULES, 1)
    (row,) = left.take(shards, torch.device("cpu"))
    assert row.numel() == runs_of(shards, DEFAULT_RULES).compressed_numel == 3 * 2048
    row.copy_(torch.arange(3 * 2048.0))
    left.put(shards, [row])
    some = [shards[0], shards[3]]
    (row,) = left.take(some, torch.device("cpu"))
    assert torch.equal(row, torch.cat([torch.arange(2048.0), torch.arange(4096.0, 6144.0)]))
    row.fill_(torch.nan)
    left.put(some, [row])
    (row,) = left.take(shards, torch.device("cpu"))
    assert torch.equal(row, torch.cat([torch.zeros(2048), torch.arange(2048.0, 4096.0), torch.zeros(2048)]))


def test_rows_of_another_model_are_refused() -> None:
    sent = SentShards(RUNS, 2)
    sent.check(torch.zeros(2, 3000))
    left = ShardResidual([NamedShard("a", (64, 64), (32, 64), 2048)], DEFAULT_RULES, 1)
    for each, rows in ((sent, torch.zeros(1, 3000)), (left, torch.zeros(2, 2048))):
        try:
            each.check(rows)
        except ValueError as error:
            assert "`state` has" in str(error)
        else:
            raise AssertionError(each)


def test_the_residual_carries_the_scale_of_the_next_gradients() -> None:
    shards = [NamedShard("a", (64, 64), (32, 64), 2048)]
    left = ShardResidual(shards, DEFAULT_RULES, 1)
    left.loss_scale.set(1024.0)
    (row,) = left.take(shards, torch.device("cpu"))
    left.put(shards, [row.fill_(3.0)])
    left.loss_scale.set(512.0)
    (row,) = left.take(shards, torch.device("cpu"))
    assert torch.equal(row, torch.full((2048,), 1.5))
    with pytest.raises(ValueError, match="`scale` is nan"):
        left.loss_scale.set(math.nan)
    with pytest.raises(ValueError, match="holds a NaN or an infinity in 'residual'"):
        left.check(torch.full((1, 2048), torch.nan))


def both_ways(mesh: DeviceMesh, **options: Any) -> tuple[Tiny, FsdpState]:
    model = sharded(mesh, **options.pop("fsdp", {}))
    return model, gradwire.fsdp.apply(model, **{"shards": CARRIED, "weights": CARRIED, **options})


def row_named(state: FsdpState, op: str) -> PhaseTotals:
    (found,) = (row for row in state.report().rows if row.op == op and row.level.startswith("inter_node"))
    return found


def carried_cases(rank: int, names: Sequence[str]) -> None:
    with job():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
        for name in names:
            globals()[name](mesh)


def evaluated_in_inference_mode(mesh: DeviceMesh) -> None:
    """Rows that an evaluation has begun anew change in the next step, as where it went without gradients alone."""

    def run(without: Callable[[], AbstractContextManager[object]]) -> dict[str, torch.Tensor]:
        model, state = both_ways(mesh)
        train(model, 1)  # torch's own memory for weights must not be made in inference mode
        state.flush()
        with without():
            model(batch(7))
        train(model, 2, first=1)
        return weights(model)

    assert not differs(run(torch.inference_mode), run(torch.no_grad))


def near_exact(mesh: DeviceMesh) -> None:
    native = sharded(mesh)
    train(native, 6)
    for plan in ("auto", "flat"):
        for fsdp in ({}, {"reshard_after_forward": False}, {"reshard_after_forward": 2}):
            model, _ = both_ways(mesh, plan=plan, fsdp=fsdp)
            train(model, 6)
            assert error_of(weights(model), weights(native)) < 0.01, (plan, fsdp)
            found = model(torch.ones(2, 16)).detach()
            there = [torch.empty_like(found) for _ in range(4)]
            dist.all_gather(there, found)
            assert all(torch.equal(found, other) for other in there)


class Scale:
    """What gradwire asks of a GradScaler."""

    def __init__(self) -> None:
        self.scale = 1.0

    def get_scale(self) -> float:
        return self.scale


def follows_the_loss_scale(mesh: DeviceMesh) -> None:
    """Powers of two change no bit, also where the scale has changed between a save and a load."""

    def run(scales: list[float], resumed: bool = False) -> dict[str, torch.Tensor]:
        model, state = both_ways(mesh)
        scale = Scale()
        state.watch(scale)

        def step(one: Any, number: int) -> None:
            scale.scale = scales[number]
            if resumed and number == 2:
                saved = state.state_dict()
                for each in state._loss_scales("the test"):
                    each.value = 7.0
                state.load_state_dict(saved)
            (one(batch(number)).square().mean() * scale.scale).backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    if parameter.grad is not None:
                        parameter.grad.div_(scale.scale)

        train(model, 4, step)
        return weights(model)

    expected = run([1.0, 1.0, 1.0, 1.0])
    assert not differs(run([1024.0, 512.0, 2048.0, 256.0]), expected)
    assert not differs(run([1024.0, 512.0, 2048.0, 256.0], resumed=True), expected)


def backward_is_free(mesh: DeviceMesh) -> None:
    """The units of a step are gathered once between nodes, though torch gathers each of the blocks twice."""
    model, state = both_ways(mesh)
    plain_step(model, 0)
    assert row_named(state, "all_gather").calls == 3
    first = row_named(state, "all_gather").wire_nbytes  # exact
    plain_step(model, 1)
    gathered = row_named(state, "all_gather")
    assert gathered.calls == 6
    assert gathered.wire_nbytes - first < 0.3 * first
    sums = row_named(state, "reduce_scatter")
    assert sums.calls == 6
    assert sums.wire_nbytes < 0.3 * 2 * sum(local(one).numel() for one in model.parameters()) * 4
    x = torch.ones(2, 16)
    off = []
    for _ in range(4):  # what nobody changes is had more exactly each time
        off.append(float((model(x).detach() - Tiny()(x).detach()).norm()))
    assert off[-1] < 1e-5


def resumes_bit_for_bit(mesh: DeviceMesh) -> None:
    whole, state = both_ways(mesh)
    train(whole, 2)
    assert state.dirty
    saved, kept = state.state_dict(), weights(whole)
    train(whole, 2, first=2)
    again, other = both_ways(mesh)
    assert saved.keys() == other.state_dict().keys()
    with torch.no_grad():
        for name, parameter in again.named_parameters():
            local(parameter).copy_(kept[name])
    other.load_state_dict(saved)
    train(again, 2, first=2)
    assert not differs(weights(again), weights(whole))
    earlier, other = both_ways(mesh)  # of a version that kept less
    with torch.no_grad():
        for name, parameter in earlier.named_parameters():
            local(parameter).copy_(kept[name])
    own = dict(saved[rank_key(dist.get_rank())])
    left = {
        key: value for key, value in own.items() if not key.startswith((PREFIX + "sums/", PREFIX + "nodes", ENTRIES))
    }
    other.load_state_dict({JOB: (("size", 4), ("dirty", 1)), rank_key(dist.get_rank()): tuple(left.items())})
    train(earlier, 2, first=2)
    assert not differs(weights(earlier), weights(whole))
    lossy, _ = both_ways(mesh)
    with torch.no_grad():
        for name, parameter in lossy.named_parameters():
            local(parameter).copy_(kept[name])
    train(lossy, 2, first=2)
    assert differs(weights(lossy), weights(whole))  # the state is what made them equal


def flushed(mesh: DeviceMesh) -> None:
    """After a flush the next step has exact weights and all of what was held back."""
    model, state = both_ways(mesh)
    native = sharded(mesh)
    total = {name: torch.zeros_like(one) for name, one in weights(model).items()}
    wanted = {name: torch.zeros_like(one) for name, one in weights(model).items()}
    for step in range(3):
        if step == 2:
            state.flush()
        for each, sums in ((model, total), (native, wanted)):
            each.zero_grad()
            plain_step(each, step)
            for name, one in gradients(each).items():
                sums[name] += one
        assert state.dirty == (step < 2)
    # Gradients of all three steps were taken at weights that did not change, and the first all-gather is exact.
    shown = [name for name in wanted if "spare" not in name]
    assert error_of({name: total[name] for name in shown}, {name: wanted[name] for name in shown}) < 1e-4
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).add_(1.0)
        state.flush()
        for parameter in native.parameters():
            local(parameter).add_(1.0)
    x = batch(9)
    assert torch.equal(model(x), native(x))


def flushed_in_micro_batches(mesh: DeviceMesh) -> None:
    """Nothing is held back after a step that was flushed, however many micro-batches have their own reduce-scatter."""
    model, state = both_ways(mesh)
    native = sharded(mesh)
    sums = [{name: torch.zeros_like(one) for name, one in weights(model).items()} for _ in range(2)]
    for step in range(2):
        if step == 1:
            state.flush()
        for each, total in zip((model, native), sums, strict=True):
            each.zero_grad()
            for micro in range(3):
                each.set_is_last_backward(micro == 2)  # type: ignore[operator]
                each(batch(step, micro)).square().mean().backward()
            for name, one in gradients(each).items():
                total[name] += one
        assert state.dirty == (step < 1)
    shown = [name for name in sums[0] if "spare" not in name]
    assert error_of(*({name: total[name] for name in shown} for total in sums)) < 1e-4


def of_other_nodes(mesh: DeviceMesh) -> None:
    """A residual for other owners is refused where nodes hold other ranks; flushed, it begins anew exactly."""
    model, state = both_ways(mesh)
    train(model, 2)
    again, other = both_ways(mesh, hostname="abab"[dist.get_rank()])
    with pytest.raises(ValueError, match="on the nodes 0,1 2,3, which are on 0,2 1,3 now"):
        other.load_state_dict(state.state_dict())
    state.flush()
    train(model, 2, first=2, lr=0.0)
    assert state.dirty
    state.flush()
    train(model, 1, first=4, lr=0.0)
    native = sharded(mesh)
    for one in (again, native):
        train(one, 1)  # what has trained already keeps nothing of its own
        with torch.no_grad():
            for (_, parameter), kept in zip(one.named_parameters(), weights(model).values(), strict=True):
                local(parameter).copy_(kept)
    other.load_state_dict(state.state_dict())
    assert not other.dirty
    assert torch.equal(again(batch(9)), native(batch(9)))


def of_other_options(_mesh: DeviceMesh) -> None:
    """No residual is dropped where one of the two collectives that hold some back has no place for them."""
    options: dict[str, dict[str, Any]] = {
        "replicas": {"compressor": "int8"},
        "shards": {"shards": CARRIED, "weights": CARRIED},
    }
    options["both"] = {**options["replicas"], **options["shards"]}
    made = {name: applied(mesh_of(), hostname=f"host{dist.get_rank()}", **each) for name, each in options.items()}
    for model, _ in made.values():
        train(model, 2)
    for saved, loaded, match in (
        ("shards", "replicas", "`shards` keeps no residual here, and `state` holds"),
        ("both", "replicas", "`shards` keeps no residual here, and `state` holds"),
        ("replicas", "shards", "`compressor` is not set, and `state` holds"),
        ("both", "shards", "`compressor` is not set, and `state` holds"),
        ("shards", "both", "`compressor` is 'int8', and `state` was saved without"),
    ):
        assert made[saved][1].dirty
        with pytest.raises(ValueError, match=match):
            made[loaded][1].load_state_dict(made[saved][1].state_dict())
    made["both"][1].load_state_dict(made["replicas"][1].state_dict())
    model, state = made["both"]
    train(model, 1, first=2)
    state.flush()
    train(model, 1, first=3)
    for _, other in made.values():
        other.load_state_dict(state.state_dict())
        assert not other.dirty


def damaged(mesh: DeviceMesh) -> None:
    """Entries of a kind that nobody saves are refused by their names, and change nothing."""
    model, state = both_ways(mesh)
    train(model, 2)
    saved = state.state_dict()
    own = {key: value for key, value in saved[rank_key(dist.get_rank())] if key != ENTRIES}
    two = torch.zeros(2)
    odd: StateDict = {"shards": two, "nodes": 1, "rounding": two, "loss_scale/residual/0": two, "carried/sent/0": "x"}
    odd["sums/residual/0"] = two
    for name, value in odd.items():
        assert PREFIX + name in own
        with pytest.raises(
            ValueError,
            match=f"^`state.'{PREFIX}{name}'.` is .*which no saved state holds: the checkpoint is corrupt; load",
        ):
            state.load_state_dict(pack({**own, PREFIX + name: value}, dist.get_rank(), 4, True))
        assert str(state.state_dict()) == str(saved)
    sent = own[PREFIX + "carried/sent/0"]
    assert isinstance(sent, torch.Tensor)
    with pytest.raises(ValueError, match=r"`state` has rows of torch\.bfloat16; wanted torch\.float32"):
        state.load_state_dict(pack({**own, PREFIX + "carried/sent/0": sent.bfloat16()}, dist.get_rank(), 4, True))
    assert str(state.state_dict()) == str(saved)


def of_vectors_alone(mesh: DeviceMesh) -> None:
    """Units of which nothing is in four bits, as norms and blocks with frozen matrices: exact, through a flush, too."""

    def trained(carried: bool) -> dict[str, torch.Tensor]:
        model = Tiny()
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() == 1)
        for block in model.blocks:
            fully_shard(block[0], mesh=mesh)  # type: ignore[index]
        sharded(mesh, model)
        state = gradwire.fsdp.apply(model, shards=CARRIED) if carried else None
        train(model, 2)
        if state is not None:
            state.flush()
        train(model, 2, first=2)
        return weights(model)

    assert error_of(trained(True), trained(False)) < 1e-6


def skips(mesh: DeviceMesh) -> None:
    """A step that is not finite leaves nothing behind."""
    model, _ = both_ways(mesh)
    train(model, 1)
    model.zero_grad()
    (model(batch(1)).sum() * (torch.nan if dist.get_rank() == 1 else 1.0)).backward()
    assert not all(one.isfinite().all() for one in gradients(model).values())
    model.zero_grad()
    plain_step(model, 2)
    assert all(one.isfinite().all() for one in gradients(model).values())


CASES: dict[str, tuple[Case, ...]] = {
    "weights": (near_exact, backward_is_free),
    "residuals": (flushed, flushed_in_micro_batches, of_vectors_alone, skips, follows_the_loss_scale),
    "states": (evaluated_in_inference_mode, resumes_bit_for_bit, of_other_nodes, of_other_options, damaged),
}
"""Jobs of their own, which machines with other work can do in time."""


@pytest.mark.parametrize("cases", CASES.values(), ids=CASES.keys())
def test_four_bits_both_ways_between_nodes(processes: Processes, cases: tuple[Case, ...]) -> None:
    processes(4, carried_cases, [case.__name__ for case in cases], nodes="aabb")


def crossed(rank: int) -> None:
    with job("gradwire"):
        near_exact(init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)))


def test_counterparts_in_another_order_than_their_nodes(processes: Processes) -> None:
    processes(4, crossed, nodes="abba")


def gathered_without_one(rank: int) -> str:
    """One rank has ended before; what the others are told."""
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    model, state = both_ways(init_device_mesh("cpu", (3,), mesh_dim_names=("shard",)))
    train(model, 1)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        state.gathered_state_dict(on_all_ranks=True)
    return str(caught.value)


def test_a_rank_that_has_ended_is_named_where_states_are_gathered(processes: Processes) -> None:
    found = processes(3, gathered_without_one, nodes="abb", agent=True, lost=[2])
    why = "rank 2 has ended before it had given its state: look at its output"
    assert found[:2] == [f"the ranks' states cannot be gathered: {why}"] * 2


def of_another_moment(rank: int) -> None:
    def refused(
        make: Callable[[], tuple[Tiny, FsdpState]],
        sharers: Sequence[int],
        odd: int,
        like: int,
        cases: Sequence[tuple[int, int]],
        key: str = "carried/sent/0",
        take: Callable[[Tiny], object] = lambda model: model(batch(9)),
    ) -> None:
        """In each case `odd` alone loads an older state, or none, after so many steps; it is compared with `like`."""
        model, state = make()
        saved = [None, state.state_dict()]
        for step in range(2):
            train(model, 1, first=step)
            saved.append(state.state_dict())
        for older, trained in cases:
            again, other = make()
            train(again, trained)
            own = saved[older if rank == odd else -1]
            if own is not None:
                other.load_state_dict(own)
            if rank not in sharers:  # its replica has loaded alike
                take(again)
                continue
            what = rf"\['gradwire/{key}'\]" if older else ""
            with pytest.raises(
                ValueError, match=f"^`state{what}` is .* on rank {odd} and .* on rank {like}; .* moment"
            ):
                take(again)

    def residual() -> tuple[Tiny, FsdpState]:
        model = sharded(mesh)
        return model, gradwire.fsdp.apply(model, shards=CARRIED)

    with job() as grid:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
        refused(lambda: both_ways(mesh), range(4), 3, 1, [(0, 0), (1, 0), (2, 1)])
        for cases in ([(0, 0)], [(1, 0)], [(2, 1)]):
            refused(residual, range(4), 3, 0, cases, "sums/residual/0", lambda model: plain_step(model, 9))
        host = f"host{rank}"
        refused(lambda: applied(grid, hostname=host, weights=CARRIED), (2, 3), 3, 2, [(2, 0)])


def test_a_rank_that_loads_another_state_is_named(processes: Processes) -> None:
    """It would get differences from weights that it does not have, or send whole rows where others wait for them.

    Or it would add the residual of gradients at other weights.
    """
    processes(4, of_another_moment, nodes="aabb")


def of_crossing_groups(rank: int) -> None:
    """Groups with one first rank, of several models and of one: nothing that is kept or said is another group's."""
    host = f"host{rank}"

    def both(meshes: Sequence[DeviceMesh]) -> list[tuple[Tiny, FsdpState]]:
        return [both_ways(mesh, hostname=host) for mesh in meshes]

    def run(made: Sequence[tuple[Tiny, FsdpState]], steps: int, first: int = 0) -> list[dict[str, torch.Tensor]]:
        for step in range(first, first + steps):
            for model, _ in made:
                train(model, 1, first=step)
        return [weights(model) for model, _ in made]

    def fill(model: Tiny, kept: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                local(parameter).copy_(kept[name])

    def of_two_meshes(**options: Any) -> tuple[Tiny, FsdpState]:
        model = Tiny()
        fully_shard(model.blocks[0], mesh=everyone)
        fully_shard(model.blocks[1], mesh=rows)
        fully_shard(model, mesh=everyone)
        return model, gradwire.fsdp.apply(model, hostname=host, **options)

    with job() as grid:
        rows, columns = grid["shard"], grid["replicate"]
        everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
        meshes = [rows, columns, everyone, rows]
        alone = [run(both([mesh]), 4)[0] for mesh in meshes]
        made = both(meshes)
        kept = run(made, 2)
        saved = [state.state_dict() for _, state in made]
        assert not any(differs(*each) for each in zip(run(made, 2, first=2), alone, strict=True))
        again = both(meshes[::-1])[::-1]
        for (model, state), own, values in zip(again, saved, kept, strict=True):
            fill(model, values)
            state.load_state_dict(own)
        assert not any(differs(*each) for each in zip(run(again, 2, first=2), alone, strict=True))
        with pytest.raises(ValueError, match="`state` is of another mesh than 4 shards"):
            made[2][1].load_state_dict(saved[1])

        native = Tiny()
        fully_shard(native.blocks[0], mesh=everyone)
        fully_shard(native.blocks[1], mesh=rows)
        fully_shard(native, mesh=everyone)
        train(native, 4)
        exact, _ = of_two_meshes()
        train(exact, 4)
        assert error_of(weights(exact), weights(native)) < 1e-6
        carried = {"shards": CARRIED, "weights": CARRIED}
        whole, state = of_two_meshes(**carried)
        train(whole, 2)
        own, values = state.state_dict(), weights(whole)
        train(whole, 2, first=2)
        assert error_of(weights(whole), weights(native)) < 0.01
        resumed, other = of_two_meshes(**carried)
        fill(resumed, values)
        other.load_state_dict(own)
        train(resumed, 2, first=2)
        assert not differs(weights(resumed), weights(whole))


def test_groups_with_one_first_rank_are_not_mixed_up(processes: Processes) -> None:
    processes(4, of_crossing_groups, nodes="aabb")


def of_another_replica(rank: int, hosts: str, options: dict[str, Any]) -> str:
    """The second replica loads an older state; what all ranks are told."""
    with job() as grid:
        model, state = applied(grid, hostname=hosts[rank], **options)
        saved = []
        for step in range(2):
            plain_step(model, step)
            saved.append(state.state_dict())
        again, other = applied(grid, hostname=hosts[rank], **options)
        other.load_state_dict(saved[0 if rank > 1 else 1])
        try:
            plain_step(again, 9)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("options", [{"compressor": "int4"}, {"shards": CARRIED}])
def test_a_replica_that_loads_another_state_is_named_by_its_number_in_the_job(
    processes: Processes, options: dict[str, Any]
) -> None:
    for rank, text in enumerate(processes(4, of_another_replica, "abcd", options)):
        assert f"is 1 on rank {rank % 2 + 2} and 2 on rank {rank % 2};" in text, text


def test_replicas_that_keep_other_things_load_what_they_have(processes: Processes) -> None:
    """One lies on a node, and has no residual."""
    assert processes(4, of_another_replica, "abcc", {"shards": CARRIED}) == [""] * 4
