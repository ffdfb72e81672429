"""Jobs that outlive the process which serves their store: buckets need it no more once the hook is registered."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.bootstrap.compat import HashStore, Store
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.plan.rank_plans import LaneGroup
from gradwire.comms.run.all_reduces import Bucket
from gradwire.compressors.base import Layout, Slice
from gradwire.compressors.composite import make_composite
from gradwire.compressors.registry import BUILT_IN, Option, options_of
from support.processes import Processes
from support.threads import run_ranks


def wait_for_the_end_of(store: Store) -> None:
    """Returns when rank 0, whose process serves the store, has exited."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            store.get("bound/1")
        except RuntimeError:
            return
        time.sleep(0.05)


def after_the_store(
    rank: int, made: Callable[[], nn.Module], batch: torch.Tensor, compressor: str | None
) -> torch.Tensor:
    """Rank 0 serves the store, waits until the sub-group of the others has bound its model, and exits before a step."""
    dist.init_process_group("gloo")
    group = dist.new_group([1, 2])
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["bound/1", "bound/2"])
        return torch.empty(0)
    model = DistributedDataParallel(made(), process_group=group)
    model.register_comm_hook(gradwire.HookState(model, compressor=compressor), gradwire.comm_hook)
    store.set(f"bound/{rank}", "")
    wait_for_the_end_of(store)
    model(batch).sum().backward()
    gradient = model.module.weight.grad
    assert isinstance(gradient, torch.Tensor)
    return gradient.to_dense()


def train_after_the_store(rank: int, compressor: str | None, numel: int) -> list[float]:
    """The first and the last value of a dense gradient that is summed without the store."""
    batch = torch.full((1, numel), float(rank))
    gradient = after_the_store(rank, partial(nn.Linear, numel, 1, bias=False), batch, compressor)
    return [float(gradient[0, 0]), float(gradient[0, -1])] if rank else []


@pytest.mark.parametrize("compressor", [None, "int8"])
def test_a_sub_group_trains_on_without_the_store(processes: Processes, compressor: str | None) -> None:
    numel = 1 << 18  # a MiB: large enough for gloo's second group
    _, *found = processes(3, train_after_the_store, compressor, numel, nodes="abc", lost=[0])
    for result in found:
        assert result == pytest.approx([1.5, 1.5], rel=0.01)


def train_an_embedding_after_the_store(rank: int) -> list[float]:
    """As `train_after_the_store`, with sparse gradients; both ranks look up row 3 and one of their own."""
    made = partial(nn.Embedding, 1 << 14, 64, sparse=True)
    gradient = after_the_store(rank, made, torch.tensor([3, rank]), None)
    return [float(gradient[row, 0]) for row in (1, 2, 3)] if rank else []


def test_sparse_gradients_need_the_store_no_more(processes: Processes) -> None:
    _, *found = processes(3, train_an_embedding_after_the_store, nodes="abc", lost=[0])
    assert found == [[0.5, 0.5, 1.0]] * 2


@pytest.mark.parametrize("nodes", ["ab", "aabb", "aab"])
@pytest.mark.parametrize("name", sorted([*set(BUILT_IN) - {"none"}, "powersgd+int8", "powersgd fp16", "dgc+int8"]))
def test_no_step_connects(nodes: str, name: str) -> None:
    """Whatever compresses, and sparse sums beside it: each (lane, ranks) that a step uses is there before the first."""
    store = HashStore()
    name, _, factor_dtype = name.partition(" ")
    options: dict[str, Option] = {"factor_dtype": "float16"} if factor_dtype else {}
    if "warmup_steps" in options_of(name):
        options["warmup_steps"] = 1
    layout = Layout((Slice("matrix", (96, 64), 0, 0, 6144), Slice("flat", (2, 4096), 0, 6144, 8192)))

    def run(rank: int) -> set[LaneGroup]:
        config = Config(hostname=nodes[rank], compressor=name, timeout=timedelta(seconds=60))
        compressor = make_composite(name, options, [])
        compressor.bind_model({"matrix": 6144, "flat": 8192})
        communicator = Communicator(
            store, rank, len(nodes), torch.device("cpu"), config, name="test", compressor=compressor
        )
        try:
            communicator.connect(layout.numel * 4, sparse_nbytes=1 << 20)
            before = set(communicator._groups)
            for flush in (False, False, True):
                communicator.all_reduce(torch.randn(layout.numel), layout=layout, flush=flush).wait()
                compressor.end_step(True)
            places = torch.tensor([[rank]])
            rows = torch.sparse_coo_tensor(places, torch.ones(1, 2), (9, 2), check_invariants=True)
            for as_dense in (False, True):
                bucket = Bucket.of(rows)
                communicator.start_sparse(bucket, as_dense=as_dense)
                bucket.result().wait()
            return set(communicator._groups) - before
        finally:
            communicator.close()

    assert run_ranks(len(nodes), run) == [set()] * len(nodes)


def save_and_exit(rank: int, late: int) -> int:
    """Takes two steps and saves; the rank `late` reads the others' counts a second after they were written."""
    dist.init_process_group("gloo")
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = gradwire.Outer(model, optimizer, every=1, fragments=1, delay=0, inside="none")
    for _ in range(2):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    if rank == late:
        messages = outer.exchange.averaging.messages
        read = messages.steps

        def read_late(ranks: Sequence[int]) -> dict[int, int]:
            time.sleep(1.0)
            return read(ranks)

        messages.steps = read_late  # type: ignore[method-assign]
    return len(outer.state_dict())


def test_the_rank_that_serves_the_store_may_exit_as_soon_as_it_has_saved_outer(processes: Processes) -> None:
    first, second = processes(2, save_and_exit, 1, nodes="ab")
    assert first == second > 0
