"""`gradwire.Outer` as users call it, ranks as processes: two nodes of two ranks, DDP or FSDP2 inside."""

import gc
import hashlib
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.outer.options import idle_in, refuse_idle
from gradwire.comms.outer.workers import shard_groups
from support.processes import Processes
from support.sharded import mesh_of, sharded

NODES = ["one", "one", "two", "two"]


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": list(model.parameters())[:2], "lr": 1e-3},
        {"params": list(model.parameters())[2:]},
    ]
    return torch.optim.AdamW(groups, lr=3e-3, foreach=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, width: int = 24) -> None:
    train_by([optimizer], model, steps, width)


def train_by(optimizers: list[torch.optim.Optimizer], model: nn.Module, steps: range, width: int = 24) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        for _ in range(2):  # two micro-batches
            loss = model(torch.randn(8, width, generator=generator)).square().mean()
            scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()


def flat(model: nn.Module) -> Tensor:
    parts = [each.to_local() if hasattr(each, "to_local") else each for each in model.parameters()]
    return torch.cat([part.detach().reshape(-1) for part in parts])


def same_on(ranks: Callable[[int], int], value: Tensor) -> None:
    """All ranks of one colour hold the same bits."""
    everybody: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, hashlib.sha256(value.numpy().tobytes()).hexdigest())
    own = dist.get_rank()
    assert all((each == everybody[own]) == (ranks(rank) == ranks(own)) for rank, each in enumerate(everybody))


def use(rank: int) -> None:
    dist.init_process_group("gloo")
    replicated(rank)
    wrapped_by_the_user(rank)
    alone(rank)
    by_two_optimizers(rank)
    muon(rank)
    unlike(rank)
    in_shards(rank)
    dist.barrier()
    dist.destroy_process_group()


def replicated(rank: int) -> None:
    """A plain module: DDP inside the nodes, int4 between them, and a resume in the middle of a delay."""
    options: dict[str, Any] = {"every": 4, "fragments": 2, "delay": 2, "compressor": "int4", "lr": 0.7, "momentum": 0.9}
    model = build()
    optimizer = adam(model)
    outer = gradwire.Outer(model, optimizer, **options)
    assert isinstance(outer.model, DistributedDataParallel)
    train(outer.model, optimizer, range(7))
    same_on(lambda each: each // 2, flat(model))
    stateful: list[Any] = [outer, model, optimizer]
    saved = [copy(each.state_dict()) for each in stateful]
    train(outer.model, optimizer, range(7, 15))
    after = flat(model)
    report = outer.report()
    assert report.workers == ((0, 1), (2, 3))
    assert (report.steps, report.exchanges, report.skipped) == (15, 6, 0)
    assert 0 < report.bits_per_parameter_and_step < 8  # of 32 bits in every fourth step, some parameters dense
    assert "2 workers of 2, 2 ranks; 15 steps, 6 exchanges" in str(report)
    assert report.to_dict()["workers"] == [[0, 1], [2, 3]]
    outer.synchronize()
    synchronized = outer.report()
    assert report.synchronized_nbytes == 0 and "synchronize()" not in str(report)
    assert synchronized.synchronized_nbytes == synchronized.nic_nbytes - report.nic_nbytes > 0
    assert synchronized.bits_per_parameter_and_step == report.bits_per_parameter_and_step  # of exchanges alone
    assert " MB in synchronize()" in " ".join(str(synchronized).split())
    same_on(lambda _: 0, flat(model))
    same_on(lambda _: 0, model[1].running_mean)  # type: ignore[index]
    outer.close()

    model = build()
    optimizer = adam(model)
    outer = gradwire.Outer(model, optimizer, **options)
    stateful = [outer, model, optimizer]
    for each, state in zip(stateful, saved, strict=True):
        each.load_state_dict(state)
    train(outer.model, optimizer, range(7, 15))
    assert torch.equal(flat(model), after)
    with pytest.raises(ValueError, match=r"wanted what HookState\.state_dict\(\) returned"):
        outer.load_state_dict(saved[0] if rank else None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`state` is of a DistributedDataParallel model .* of gradwire\.Outer"):
        outer.load_state_dict({"gradwire/job": (("size", 4), ("dirty", 0)), f"gradwire/rank{rank}": (("a", 1),)})
    with pytest.raises(ValueError, match="`state` is of 3 ranks, there are 4"):
        outer.load_state_dict({"gradwire/job": (("size", 3), ("dirty", 1)), f"gradwire/rank{rank}": ()})
    outer.close()


def copy(state: Mapping[str, Any]) -> dict[str, Any]:
    """Through a file's bytes, read as plain values."""

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


def wrapped_by_the_user(rank: int) -> None:
    """A DDP model over the worker's own group keeps its own averaging."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(build(), process_group=groups[rank // 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outer = gradwire.Outer(model, optimizer, every=2, fragments=1, delay=0, lr=1.0, momentum=0.0)
    assert outer.model is model
    assert outer.hook is None
    train(model, optimizer, range(4))
    same_on(lambda _: 0, flat(model))
    outer.close()
    with pytest.raises(ValueError, match="`model` is a DistributedDataParallel over all ranks"):
        everywhere = DistributedDataParallel(build())
        gradwire.Outer(everywhere, optimizer_of(everywhere))
    compiled: Any = torch.compile(everywhere, backend="eager")  # the default one would be imported, 600 modules
    with pytest.raises(ValueError, match="`model` is a DistributedDataParallel over all ranks"):
        gradwire.Outer(compiled, optimizer_of(everywhere))
    with pytest.raises(ValueError, match="holds a DistributedDataParallel as `0`"):
        gradwire.Outer(nn.Sequential(everywhere), optimizer_of(everywhere))
    with pytest.raises(ValueError, match=r"`reduction` is \{'average': False\}"):
        gradwire.Outer(model, optimizer, reduction={"average": False})
    with pytest.raises(ValueError, match="`optimizer` trains no parameter"):
        gradwire.Outer(build(), optimizer_of(build()))
    with pytest.raises(ValueError, match=r"`optimizer`: SGD and Adam train the same parameter of shape \(64, 24\)"):
        gradwire.Outer(model, [optimizer, torch.optim.Adam(model.parameters())])
    with pytest.raises(ValueError, match="`optimizer` is empty"):
        gradwire.Outer(model, [])
    with pytest.raises(TypeError, match=r"`optimizer` is a list of \['SGD', 'int'\]"):
        gradwire.Outer(model, [optimizer, 3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="`inside` is 'rack'"):
        gradwire.Outer(model, optimizer, inside="rack")
    with pytest.raises(ValueError, match="`elastic` is set, and a worker has several ranks"):
        gradwire.Outer(model, optimizer, every=2, fragments=1, delay=1, elastic=True)
    with pytest.raises(ValueError, match="`elastic` is 'host:1'"):
        gradwire.Outer(model, optimizer, elastic="host:1")


def unlike(rank: int) -> None:
    """What no exchange would ever mend: frozen parameters and buffers are rank 0's; other differences are refused."""
    model: Any = build()
    for each in model[0].parameters():
        each.requires_grad_(False)
        each.data.add_(rank)
    model.register_buffer("seen", torch.tensor([rank, 2**53 + 1 + rank]))
    model.register_buffer("mask", torch.tensor(rank == 0))
    outer = gradwire.Outer(model, torch.optim.SGD(model[3].parameters()), fragments=1, inside="none")
    same_on(lambda _: 0, flat(model))
    assert model.seen.tolist() == [0, 2**53 + 1]
    assert bool(model.mask)
    outer.close()
    with pytest.raises(ValueError, match="`every` is 38 on rank 2 and 39 on rank 0"):
        gradwire.Outer(model, optimizer_of(model), every=38 if rank == 2 else 39)
    with pytest.raises(ValueError, match=r"`3\.bias` is .*not trained on rank 3"):
        gradwire.Outer(model, torch.optim.SGD(list(model.parameters())[: 5 if rank == 3 else 6]))
    with pytest.raises(ValueError, match=r"`trace` is 'a\.json'"):
        gradwire.Outer(model, optimizer_of(model), inside="none", trace="a.json")
    with pytest.raises(ValueError, match="`fusion` is 4"):
        gradwire.Outer(model, optimizer_of(model), inside="none", config=Config(fusion=4.0))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def alone(rank: int) -> None:
    """Every rank by itself between exchanges."""
    model = build()
    optimizer = optimizer_of(model)
    outer = gradwire.Outer(model, optimizer, every=3, fragments=1, delay=0, inside="none", compressor="int8")
    assert outer.model is model
    train(model, optimizer, range(4))
    same_on(lambda each: each, flat(model))
    train(model, optimizer, range(4, 6))
    same_on(lambda _: 0, flat(model))
    assert outer.report().workers == ((0,), (1,), (2,), (3,))
    outer.close()


def by_two_optimizers(rank: int) -> None:
    """Half of the model each: the same bits, exchanges and bytes as by one for all of it."""
    found = []
    for parts in (1, 2):
        model = build()
        parameters = list(model.parameters())
        split = [parameters] if parts == 1 else [parameters[:3], parameters[3:]]
        optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in split]
        outer = gradwire.Outer(
            model, optimizers if parts > 1 else optimizers[0], every=4, fragments=2, delay=1, compressor="int4"
        )
        train_by(optimizers, outer.model, range(9))
        report = outer.report()
        found.append((flat(model), report.steps, report.exchanges, report.bits_per_parameter_and_step))
        outer.close()
    (one, *facts), (two, *same_facts) = found
    assert torch.equal(one, two)
    assert facts == same_facts
    assert facts[:2] == [9, 4]


def muon(rank: int) -> None:
    """Muon for the matrices and AdamW for the rest: what is resumed goes on as if nothing had been interrupted."""

    def start() -> tuple[nn.Module, list[torch.optim.Optimizer], gradwire.Outer]:
        model = build()
        matrices = [each for each in model.parameters() if each.ndim == 2]
        others = [each for each in model.parameters() if each.ndim != 2]
        optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-3)]
        return model, optimizers, gradwire.Outer(model, optimizers, every=4, fragments=2, delay=2, compressor="int4")

    model, optimizers, outer = start()
    train_by(optimizers, outer.model, range(7))
    saved = [copy(outer.state_dict()), copy(model.state_dict()), *(copy(each.state_dict()) for each in optimizers)]
    train_by(optimizers, outer.model, range(7, 15))
    after = flat(model)
    assert (outer.report().steps, outer.report().exchanges) == (15, 6)
    outer.synchronize()
    same_on(lambda _: 0, flat(model))
    outer.close()
    model, optimizers, outer = start()
    stateful: list[Any] = [outer, model, *optimizers]
    optimizers[0].step()  # a GradScaler has skipped the other one when training falls back on what was saved
    for each, state in zip(stateful, saved, strict=True):
        each.load_state_dict(state)
    train_by(optimizers, outer.model, range(7, 15))
    assert torch.equal(flat(model), after)
    outer.close()


def in_shards(rank: int) -> None:
    """FSDP2 inside the nodes: ranks that hold the same shards exchange them, and resume from one checkpoint of all."""
    mesh = mesh_of()

    def start() -> tuple[nn.Module, torch.optim.Optimizer, gradwire.Outer]:
        model = sharded(mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, gradwire.Outer(model, optimizer, every=2, fragments=2, delay=1, compressor="int8")

    model, optimizer, outer = start()
    assert outer.model is model
    train(model, optimizer, range(3), width=16)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, outer.state_dict())
    merged = {key: value for state in everybody for key, value in state.items()}
    assert len(merged) == 1 + dist.get_world_size()  # ranks of a worker do not write over each other
    weights, inner = copy(model.state_dict()), copy(optimizer.state_dict())
    train(model, optimizer, range(3, 5), width=16)
    again, other_optimizer, other = start()
    other.load_state_dict(merged)
    again.load_state_dict(weights)
    other_optimizer.load_state_dict(inner)
    train(again, other_optimizer, range(3, 5), width=16)
    assert torch.equal(flat(again), flat(model))
    with pytest.raises(ValueError, match=f"`state` holds the part of rank {rank ^ 1} alone"):
        other.load_state_dict(everybody[rank ^ 1])
    other.close()
    assert outer.report().workers == ((rank % 2,), (rank % 2 + 2,))
    assert outer.report().exchanges == 4
    outer.synchronize()
    same_on(lambda each: each % 2, flat(model))
    outer.close()


def saves_in_order(rank: int, model_first: bool) -> str:
    """Saves with an exchange in flight, loads into a new Outer, and returns the error of the first step; "" if none."""
    dist.init_process_group("gloo")

    def start() -> tuple[nn.Module, torch.optim.Optimizer, gradwire.Outer]:
        model = build()
        optimizer = optimizer_of(model)
        return model, optimizer, gradwire.Outer(model, optimizer, every=4, fragments=2, delay=2, inside="none", lr=0.7)

    model, optimizer, outer = start()
    train(model, optimizer, range(3))  # the first exchange began after the second step
    early = copy(model.state_dict())
    state = copy(outer.state_dict())
    weights, inner = early if model_first else copy(model.state_dict()), copy(optimizer.state_dict())
    outer.close()
    model, optimizer, outer = start()
    outer.load_state_dict(state)
    model.load_state_dict(weights)
    optimizer.load_state_dict(inner)
    try:
        train(model, optimizer, range(3, 4))
    except RuntimeError as error:
        return str(error)
    finally:
        outer.close()
    return ""


@pytest.mark.parametrize("model_first", [False, True])
def test_a_model_that_is_saved_before_the_exchange_is_finished_is_an_error(
    processes: Processes, model_first: bool
) -> None:
    """`outer.state_dict()` finishes the exchange in flight, so a model that was saved before is of another moment."""
    for found in processes(2, saves_in_order, model_first, nodes="ab"):
        if model_first:
            assert "call outer.state_dict() first" in found
        else:
            assert found == ""


def lose(rank: int, compressor: str, options: dict[str, Any]) -> dict[str, Any]:
    """Rank 2 dies beside a step, rank 1 leaves; both with an exchange under way. Who is left goes on to the end."""
    dist.init_process_group("gloo")
    model = build()
    optimizer = optimizer_of(model)
    compressing: dict[str, Any] = {"compressor": compressor, "compressor_options": options}
    outer = gradwire.Outer(model, optimizer, every=2, fragments=2, delay=1, inside="none", elastic=True, **compressing)
    workers = []
    for step in range(16):
        if rank == 2 and step == 4:
            threading.Timer(0.001, os.kill, (os.getpid(), signal.SIGKILL)).start()
            time.sleep(1)
        if rank == 1 and step == 9:
            outer.close()
            return {}
        train(model, optimizer, range(step, step + 1))
        workers.append(len(outer.report().workers))
    outer.synchronize()
    report = outer.report()
    gc.collect()
    generations = [each for each in gc.get_objects() if isinstance(each, Communicator)]
    assert len(generations) == 2, generations  # beside all that began; those that are over are let go of
    result = {"flat": flat(model), "mean": model[1].running_mean, "workers": workers, "exchanges": report.exchanges}  # type: ignore[index]
    outer.close()
    return result


@pytest.mark.parametrize(
    ("nodes", "compressor", "options"),
    [
        ("abca", "int8", {}),
        ("aabb", "int8", {}),
        ("aabb", "onebit", {"warmup_steps": 1, "momentum": 0.0}),  # those that are left decode with what all held
    ],
)
def test_workers_that_are_lost_leave_the_others_training(
    processes: Processes, nodes: str, compressor: str, options: dict[str, Any]
) -> None:
    found = processes(4, lose, compressor, options, nodes=list(nodes), lost=[2], agent=True)
    first, second = found[0], found[3]
    assert torch.equal(first["flat"], second["flat"])
    assert torch.equal(first["mean"], second["mean"])
    assert first["workers"][:3] == [4, 4, 4]
    assert first["workers"][-1] == second["workers"][-1] == 2
    assert 3 in first["workers"]
    assert first["exchanges"] == second["exchanges"] == 16 + 2  # none is left out, and the end counts each fragment


def dies_in_a_worker(rank: int) -> str:
    """Rank 0 is killed beside a step; who waits for it inside its worker leaves as soon as that has failed."""
    dist.init_process_group("gloo")
    model = nn.Linear(24, 8)  # without buffers, which DDP would broadcast through torch's own group
    optimizer = optimizer_of(model)
    outer = gradwire.Outer(model, optimizer, every=2, fragments=1, delay=0)
    train(outer.model, optimizer, range(1))
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        train(outer.model, optimizer, range(1, 9))
    return str(caught.value)


def test_who_fails_inside_its_unit_is_not_missing_for_the_others(processes: Processes) -> None:
    """Law: other workers name the rank that was lost, and not the one that had heard of it and left."""
    for text in processes(4, dies_in_a_worker, nodes=NODES, lost=[0], agent=True)[2:]:
        assert "rank 0 of 4 is missing" in text, text


def dies_before_the_end(rank: int) -> str:
    """Rank 2 is killed where the others wait for it in the end."""
    dist.init_process_group("gloo")
    model = nn.Linear(24, 8)
    optimizer = optimizer_of(model)
    outer = gradwire.Outer(model, optimizer, every=2, fragments=1, delay=0)
    train(outer.model, optimizer, range(2))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        outer.synchronize()
    return str(caught.value)


def test_who_has_ended_is_not_waited_for_in_the_end(processes: Processes) -> None:
    """Law: it is named within seconds; torch's time-out is half an hour."""
    found = processes(4, dies_before_the_end, nodes=NODES, lost=[2], agent=True)
    assert all("rank 2 of 4 is missing" in text for rank, text in enumerate(found) if rank != 2), found


def dies_in_the_constructor(rank: int, before: str) -> str:
    """Rank 2 is killed where the others make Outer; what those are told that wait for it."""
    dist.init_process_group("gloo")
    model, place = build(), f"gradwire.comms.outer.outer.{before}"
    with patch(place, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)) if rank == 2 else nullcontext():
        try:
            gradwire.Outer(model, optimizer_of(model), every=2, fragments=1, delay=0)
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("before", "waiting", "named"),
    [("peers_of", (0, 1, 3), 2), ("copy_from_rank_0", (0, 1, 3), 2), ("attach", (3,), 0)],  # the last in its worker
)
def test_who_has_ended_is_not_waited_for_where_others_make_outer(
    processes: Processes, before: str, waiting: Sequence[int], named: int
) -> None:
    """Law: it is named within seconds; torch's time-out is half an hour."""
    found = processes(4, dies_in_the_constructor, before, nodes=NODES, lost=[2], agent=True)
    assert all(f"rank {named} has ended" in found[rank] for rank in waiting), found


def test_workers_train_and_exchange(processes: Processes) -> None:
    processes(4, use, nodes=NODES)


def test_every_shard_is_exchanged_with_every_worker() -> None:
    one, two, rest = (0, 1), (2, 3), (4,)
    said = [("first", one), ("second", one), ("first", two), ("second", two)]
    assert shard_groups(said) == [[0, 2], [1, 3]]
    with pytest.raises(ValueError, match="workers of 2, 2, 1 ranks"):
        shard_groups([*said, ("whole", rest)])


def test_variables_for_gradients_do_not_vanish_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("GRADWIRE_FUSION", "4"),
        ("GRADWIRE_NIC_BYTES_PER_SECOND", "measure"),
        ("GRADWIRE_COMPRESSOR", "int4"),
    ):
        monkeypatch.setenv(name, value)
    assert idle_in(Config.from_env()) == ["nic_bytes_per_second", "fusion"]  # the compressor is of exchanges
    assert idle_in(Config.from_env(), without={"nic_bytes_per_second"}) == ["fusion"]
    assert idle_in(Config()) == idle_in(Config(nic_bytes_per_second="assume")) == []
    refuse_idle({"nic_bytes_per_second": 1e9}, "there is no worker")
    refuse_idle({"trace": "nvtx"}, "there is no worker")  # what is exchanged is marked, too
    assert idle_in(Config(trace="nvtx")) == [] and idle_in(Config(trace="steps.json")) == ["trace"]
    with pytest.raises(ValueError, match="`nic_bytes_per_second` is 'measure'"):
        refuse_idle({"nic_bytes_per_second": "measure"}, "there is no worker")
