"""Streams are a law in sharded training: torch's own reduction of a parameter group drives gradwire on fake CUDA.

`foreach_reduce` is torch's: its streams, its casts, and what it lets go of when. Around it stand what a parameter group
has, and the all-gather of the weights in the order of FSDP2.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter, foreach_reduce
from torch.distributed.tensor import Shard

from fake_cuda.drive import TIMEOUT, on_cuda
from fake_cuda.machine import Machine, RaceError, machine
from fake_cuda.ranks import FakeProcessGroup
from fake_cuda.streams import FakeFuture, side_stream
from fake_cuda.tensor import FakeTensor
from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.bootstrap.failure_reporter import StoreFailureReporter
from gradwire.comms.config import Config
from gradwire.comms.run.phase_stats import PhaseStats
from gradwire.comms.sharded.apply import ShardLinks
from gradwire.comms.sharded.carried import RESIDUAL, SENT, LoadedShards
from gradwire.comms.sharded.collectives import Rounding, ShardLink, install
from gradwire.comms.sharded.layout import ShardNames
from gradwire.comms.sharded.nodes import StreamNodes, TorchMembers, arrange
from gradwire.comms.sharded.overlap import Overlap
from gradwire.comms.sharded.param_groups import ShardedParamGroup
from gradwire.comms.sharded.state import FsdpState
from gradwire.comms.step.loaded import LoadConsistencyCheck
from gradwire.comms.streams import HostClock
from gradwire.compressors.rules import rules_from

SIZE = 4
SHAPES = ({"inside.weight": (64, 40), "inside.bias": (64,)}, {"outside.weight": (48, 66), "outside.bias": (48,)})
"""Of two parameter groups."""


class Group(FakeProcessGroup):
    """NCCL by the methods that torch.distributed calls."""

    def __init__(self, store: Any, ranks: tuple[int, ...], rank: int) -> None:
        super().__init__(store, ranks.index(rank), len(ranks), f"{ranks} of rank {rank}")
        world = distributed_c10d._world
        world.pg_map[self], world.pg_names[self] = ("nccl", store), self.group_name  # type: ignore[assignment]
        world.pg_group_ranks[self] = {each: place for place, each in enumerate(ranks)}

    def allreduce(self, *arguments: Any) -> Any:
        return self._nccl.allreduce(*arguments)

    def _allgather_base(self, *arguments: Any) -> Any:
        return self._nccl._allgather_base(*arguments)

    def _reduce_scatter_base(self, *arguments: Any) -> Any:
        return self._nccl._reduce_scatter_base(*arguments)

    def alltoall_base(self, *arguments: Any) -> Any:
        return self._nccl.alltoall_base(*arguments)

    all_gather_single = _allgather_base  # type: ignore[assignment]
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]
    all_to_all_single = alltoall_base  # type: ignore[assignment]


class Unit:
    """What `ShardedUnit` and `foreach_reduce` look at, of a parameter group and its parameters."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], group: Group, device: torch.device, narrow: bool) -> None:
        self.names = list(shapes)
        self.mesh_info = SimpleNamespace(shard_process_group=group)
        self.device = device
        self.offload_policy, self.gradient_divide_factor, self._all_reduce_hook = None, None, None
        self.all_reduce_grads, self.reduce_scatter_unused_params, self._orig_dtype = True, False, torch.float32
        self._all_gather_comm, self._reduce_scatter_comm = DefaultAllGather(), DefaultReduceScatter()
        self._training_state = SimpleNamespace(name="FORWARD")
        self.reduce_dtype = torch.bfloat16 if narrow else torch.float32
        self.fsdp_params = [self._parameter(shape, group.size(), device) for shape in shapes.values()]

    def _parameter(self, shape: tuple[int, ...], shards: int, device: torch.device) -> SimpleNamespace:
        size = torch.Size((shape[0] // shards, *shape[1:]))
        numel = size.numel()
        return SimpleNamespace(
            fsdp_placement=Shard(0),
            offload_to_cpu=False,
            pin_memory=False,
            sharded_grad_dtype=torch.float32,
            _orig_size=torch.Size(shape),
            sharded_size=size,
            padded_sharded_param_size=size,
            contiguous_sharded_stride=torch.empty(size).stride(),
            sharded_param=nn.Parameter(torch.arange(numel, device=device).view(size) / numel),
            to_sharded_dtensor=lambda tensor: tensor,
            _sharded_local_tensor=None,
            _unsharded_param=SimpleNamespace(grad=True, requires_grad=True),
            unsharded_accumulated_grad=None,
        )

    def post_backward(self, *unused: object) -> None: ...

    def reduce(self, gradients: list[Tensor], streams: dict[str, Any]) -> tuple[Any, ...]:
        """Torch's reduction, whose result is what must be kept until the next one."""
        known = inspect.signature(foreach_reduce).parameters
        for each in self.fsdp_params:
            each.sharded_param.grad = None
        self.post_backward()
        arguments = {
            "fsdp_params": self.fsdp_params,
            "unsharded_grads": gradients,
            "reduce_scatter_group": self.mesh_info.shard_process_group,
            "reduce_scatter_comm": self._reduce_scatter_comm,
            "orig_dtype": torch.float32,
            "reduce_dtype": self.reduce_dtype,
            "device": self.device,
            "gradient_divide_factor": None,
            "all_reduce_group": None,
            "all_reduce_grads": True,
            "partial_reduce_output": None,
            "all_reduce_hook": self._all_reduce_hook,
            "allocate_memory_from_process_group": False,
        } | streams
        return foreach_reduce(**{name: one for name, one in arguments.items() if name in known})[:2]

    def gather(self, stream: Any) -> Tensor:
        """All weights, on the all-gather's stream, for the one that computes."""
        group = self.mesh_info.shard_process_group
        stream.wait_stream(torch.cuda.current_stream())  # the optimizer
        with torch.cuda.stream(stream):
            row = torch.cat([each.sharded_param.detach().view(-1) for each in self.fsdp_params])
            whole = self._all_gather_comm.allocate((row.numel() * group.size(),), dtype=row.dtype, device=self.device)
            work = self._all_gather_comm(output_tensor=whole, input_tensor=row, group=group, async_op=False)
            done = stream.record_event()
        assert work is None
        torch.cuda.current_stream().wait_event(done)
        used = whole + 0
        done = torch.cuda.current_stream().record_event()
        stream.wait_event(done)  # FSDP2 frees it behind an event, on the next gather
        del row, whole
        return used


@contextmanager
def groups_of(rows: tuple[tuple[int, ...], ...]) -> Iterator[Callable[[tuple[int, ...], int], Group]]:
    store, made = HashStore(), list[Group]()

    def make(ranks: tuple[int, ...], rank: int) -> Group:
        made.append(Group(PrefixStore(str(ranks), store), ranks, rank))
        return made[-1]

    try:
        yield make
    finally:
        world = distributed_c10d._world
        for group in [*made, *(each for each in world.pg_map if isinstance(each, Group))]:
            for table in ("pg_map", "pg_names", "pg_group_ranks"):
                getattr(distributed_c10d._world, table).pop(group, None)


def trained(
    nodes: str,
    rows: tuple[tuple[int, ...], ...],
    *,
    narrow: bool = False,
    shards: str = "exact",
    weights: str = "exact",
    steps: int = 3,
    check: bool = True,
    **options: Any,
) -> tuple[list[list[Tensor]], Machine]:
    """Trains on ranks whose shards are the rows of a grid; returns each rank's gradients and weights of all steps.

    Gradients are whole numbers: rank r gives parameter p of step s the value r + p + s + its index modulo 8.
    """
    with groups_of(rows) as make:
        boards = HashStore()

        def body(rank: int, device: torch.device, _: FakeProcessGroup) -> list[Tensor]:
            row = next(row for row in rows if rank in row)
            column = tuple(each[row.index(rank)] for each in rows)
            shard = make(row, rank)
            replicas = make(column, rank) if len(column) > 1 else None
            made = [Unit(shapes, shard, device, narrow) for shapes in SHAPES]
            state_of_all = SimpleNamespace(
                _state_ctx=SimpleNamespace(is_last_backward=True), _root_post_backward_final_callback=lambda: None
            )
            param_groups = [ShardedParamGroup(nn.Identity(), param_group, state_of_all) for param_group in made]
            named = {
                id(each.sharded_param): name
                for param_group in made
                for name, each in zip(param_group.names, param_group.fsdp_params, strict=True)
            }
            names = ShardNames(named, param_groups)
            for each in param_groups:
                each.note_present()
            config = Config(timeout=TIMEOUT, hostname=nodes[rank], **options)
            reporter = StoreFailureReporter(boards, rank, SIZE)
            state = FsdpState(nn.Identity(), param_groups, names, replicas, config, reporter)
            placed, loaded = nodes_of(shard, row, nodes, make, rank), {}
            for kind, like in ((RESIDUAL, None), (SENT, placed.counterparts)):
                words = PrefixStore(f"{kind}/{row}", boards)
                consensus = Agreement(words, row.index(rank), len(row), "loaded", TIMEOUT)
                loaded[kind] = LoadedShards(partial(LoadConsistencyCheck, None, consensus=consensus, like=like))
            link = ShardLink(placed, None, None, None, loaded)
            install(
                param_groups,
                names,
                shards,
                weights,
                rules_from(()),
                Rounding(0, rank),
                lambda group: link,
                Overlap(),
            )
            streams = {f"{name}_stream": side_stream() for name in ("reduce_scatter", "all_reduce")}
            gathering, found = side_stream(), list[Tensor]()
            for step in range(steps):
                held: tuple[Any, ...] = ()
                with machine().forbid_host_waits(late=True) if step else nullcontext():
                    for param_group in made:
                        found.append(param_group.gather(gathering))
                    for param_group in reversed(made):
                        gradients = [gradient(rank, step, each._orig_size, device) for each in param_group.fsdp_params]
                        if held:
                            torch.cuda.current_stream().wait_event(held[1])
                        held = ()
                        held = param_group.reduce(gradients, streams)
                        for stream in streams.values():  # what backward allocates there next
                            with torch.cuda.stream(stream):
                                torch.empty(1, device=device)
                    state_of_all._root_post_backward_final_callback()
                    for stream in streams.values():
                        torch.cuda.current_stream().wait_stream(stream)
                    found += [each.sharded_param.grad + 0 for param_group in made for each in param_group.fsdp_params]
            result = [one.cpu() for one in found]
            state.close()
            return result

        return on_cuda(SIZE, body, check=check)


def nodes_of(
    shard: Group, row: tuple[int, ...], nodes: str, make: Callable[[tuple[int, ...], int], Group], rank: int
) -> StreamNodes:
    members = arrange([nodes[each] for each in row])
    node = next(indices for indices in members if shard.rank() in indices)
    place = node.index(shard.rank())
    inner, outer = (tuple(row[one] for one in part) for part in (node, [each[place] for each in members]))
    inside = TorchMembers(make(inner, rank), row) if len(inner) > 1 else None
    between = TorchMembers(make(outer, rank), row) if len(outer) > 1 else None
    return StreamNodes(members, shard.rank(), inside, between, PhaseStats(HostClock(), ()))


def gradient(rank: int, step: int, shape: torch.Size, device: torch.device) -> Tensor:
    numel = shape.numel()
    return (torch.arange(numel, device=device) % 8 + (rank + step)).float().view(shape)


def expected(rank: int, row: tuple[int, ...], step: int, shape: tuple[int, ...]) -> Tensor:
    numel, shards = torch.Size(shape).numel(), len(row)
    whole = (torch.arange(numel) % 8 + step).float() + sum(range(SIZE)) / SIZE
    return whole.view(shards, -1)[row.index(rank)]


def check_values(
    results: list[list[Tensor]], rows: tuple[tuple[int, ...], ...], off: float, off_weights: float
) -> None:
    per_step = len(SHAPES) + sum(map(len, SHAPES))
    for rank, found in enumerate(results):
        row = next(row for row in rows if rank in row)
        for step in range(len(found) // per_step):
            mine = found[step * per_step : (step + 1) * per_step]
            for shapes, whole in zip(SHAPES, mine, strict=False):
                parts = [torch.arange(n) / n for n in (torch.Size(one).numel() // len(row) for one in shapes.values())]
                assert (whole - torch.cat(parts).repeat(len(row))).abs().max() <= off_weights
            shapes_of_all = [shape for shapes in SHAPES for shape in shapes.values()]
            for shape, have in zip(shapes_of_all, mine[len(SHAPES) :], strict=True):
                assert (have.flatten() - expected(rank, row, step, shape)).abs().max() <= off, (rank, step, shape)


INSIDE, ACROSS, ALL = ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("options", "narrow"),
    [({}, True), ({"plan": {"name": "hierarchical", "chunks": 2}}, False), ({"compressor": "int8"}, True)],
    ids=str,
)
def test_between_replicas(options: dict[str, Any], narrow: bool) -> None:
    results, running = trained("aabb", INSIDE, narrow=narrow, **{"plan": "hierarchical"} | options)
    check_values(results, INSIDE, 0.0 if not options.get("compressor") and not narrow else 0.1, 0.0)
    assert all(wait.late for wait in running.host_waits if wait.forbidden)


@pytest.mark.parametrize(
    ("shards", "weights", "rows", "nodes"),
    [
        ("int4", "int8", ALL, "aabb"),
        ("bf16", "bf16", ALL, "aaab"),
        ("int4", "int8", ACROSS, "aabb"),
        ("waterfill4", "waterfill4", ALL, "aabb"),
    ],
    ids=str,
)
def test_in_few_bits_between_nodes(shards: str, weights: str, rows: Any, nodes: str) -> None:
    results, running = trained(nodes, rows, shards=shards, weights=weights, narrow=shards == "bf16", steps=2)
    check_values(results, rows, {"int4": 1.5, "bf16": 0.1, "waterfill4": 1.5}[shards], 0.01)
    assert not [wait for wait in running.host_waits if wait.forbidden]


def test_a_row_that_is_let_go_too_early_is_found() -> None:
    """Torch drops the row of the reduce dtype at its cast: unless its streams are noted, its memory is used anew."""

    def wait_alone(future: FakeFuture) -> None:
        for event in future._events:
            event.wait()

    unnoted = patch.object(FakeTensor, "record_stream", lambda *_: None)
    waiting = patch.object(FakeFuture, "_join_current_streams", wait_alone)
    with unnoted, waiting, pytest.raises(RaceError, match="let go before that stream was behind it"):
        trained("aabb", INSIDE, narrow=True, plan="hierarchical", compressor="int8", steps=1)


def test_a_hook_that_goes_on_without_its_average_is_found() -> None:
    unordered = patch.object(FakeFuture, "wait", lambda future: future.value())
    with unordered, pytest.raises(RaceError, match="nothing orders"):
        trained("aabb", INSIDE, plan="hierarchical", compressor="int8", steps=1)


def test_the_report_of_exact_shards_speaks_of_plans_where_there_are_some() -> None:
    reporter: Any = None  # asked only for what is compressed
    links = ShardLinks(torch.device("cuda"), Config(), reporter, None, PhaseStats(HostClock(), ()), compressed=False)
    group: Any = Group(HashStore(), (0, 1), 0)
    assert links.of(group).planned is None
    assert links.describe() == "the group's own exact collectives"
    planned: Any = SimpleNamespace()
    links.made[2, 3] = ShardLink(None, None, planned)
    assert "exact collectives by plans where they are faster" in links.describe()
