"""Jobs on the backend "gradwire": DDP, FSDP2, meshes, a second job, a new start, a killed rank.

Ranks are processes; nodes are logical (GRADWIRE_HOSTNAME).
"""

import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.distributed_c10d import _get_default_store

from gradwire.bench.emulation.launch import held_port
from gradwire.comms.backend import process_group
from gradwire.comms.backend.node_collectives import NodeCollectives
from gradwire.comms.backend.process_group import GradwireGroup
from gradwire.comms.bootstrap.compat import GroupOptions, Store, register_backends
from gradwire.comms.bootstrap.probe import PeerWait
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from support.processes import Processes

NODES = {"one node": ["a"] * 4, "2x2": ["a", "a", "b", "b"]}
LARGE = 1 << 20
"""Elements: enough for a hierarchical plan in several chunks."""

every_cluster = pytest.mark.parametrize("nodes", NODES.values(), ids=NODES.keys())


def start(rank: int, backend: str = "gradwire") -> list[int]:
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    assert dist.get_backend() == backend and dist.get_rank() == rank
    return list(range(dist.get_world_size()))


def make_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 600), nn.Linear(600, 4))


def train(model: nn.Module, rank: int, steps: int = 3) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
        model(inputs).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_ddp(rank: int, backend: str, hooked: bool) -> list[Tensor]:
    import gradwire

    start(rank, backend)
    model = nn.parallel.DistributedDataParallel(make_model(), bucket_cap_mb=0.1)
    if hooked:
        state = gradwire.HookState(model)
        model.register_comm_hook(state, gradwire.comm_hook)
    held = train(model, rank)
    assert not hooked or state.report().buckets > 3
    if backend == "gloo":
        del model  # outliving its group, the reducer of a DDP model can wait for ever for gloo's threads
    dist.destroy_process_group()
    return held


@every_cluster
@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
def test_ddp_trains_as_on_gloo(processes: Processes, nodes: list[str], hooked: bool) -> None:
    ours = processes(4, train_ddp, "gradwire", hooked, nodes=nodes)
    theirs = processes(4, train_ddp, "gloo", False)
    for left, right in zip(ours[0], theirs[0], strict=True):
        assert torch.allclose(left, right, rtol=1e-4, atol=1e-6)  # sums of floats in another order
    for other in ours[1:]:
        assert all(torch.equal(left, right) for left, right in zip(ours[0], other, strict=True)), "ranks have drifted"


def train_compiled(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    start(rank)
    plain = train(nn.parallel.DistributedDataParallel(make_model()), rank)
    # The buffers of the batch norm are broadcast from within the compiled forward pass.
    wrapped = torch.compile(nn.parallel.DistributedDataParallel(make_model()), backend="aot_eager")
    compiled = train(cast(nn.Module, wrapped), rank)
    dist.destroy_process_group()
    return plain, compiled


def test_a_compiled_ddp_model_trains_as_a_plain_one(processes: Processes) -> None:
    for plain, compiled in processes(2, train_compiled, nodes=["a", "a"]):
        assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(plain, compiled, strict=True))


def train_in_a_start(rank: int, port: int, dies: bool) -> list[Tensor]:
    import os

    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gradwire", store=store, rank=rank, world_size=4)
    held = train(nn.parallel.DistributedDataParallel(make_model()), rank)
    if dies:
        os._exit(0)  # nothing is tidied up
    dist.destroy_process_group()
    return held


@every_cluster
@pytest.mark.one_machine
def test_a_restart_on_the_same_store_meets_nothing_of_the_start_before(processes: Processes, nodes: list[str]) -> None:
    """torchrun --max-restarts keeps the store, with the addresses and segments of processes that are dead."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes(4, train_in_a_start, store.port, True, nodes=nodes, lost=range(4))
    again = processes(4, train_in_a_start, store.port, False, nodes=nodes)
    assert all(torch.equal(left, right) for held in again for left, right in zip(held, again[0], strict=True))


def check_sharded(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    start(rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    assert dist.get_backend(mesh.get_group("inner")) == "gradwire"
    whole = torch.arange(24.0).view(6, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert isinstance(sharded, DTensor) and torch.equal(sharded.full_tensor(), whole)
    product = distribute_tensor(whole, mesh["inner"], [Shard(1)]) @ distribute_tensor(
        whole.t(), mesh["inner"], [Shard(0)]
    )
    assert isinstance(product, DTensor)
    assert torch.equal(product.redistribute(mesh["inner"], [Replicate()]).to_local(), whole @ whole.t())

    reference = train(nn.parallel.DistributedDataParallel(make_model()), rank)
    model = make_model()
    for layer in (model[0], model[3], model[4]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)  # HSDP: sharded inside, replicated outside
    fully_shard(model, mesh=mesh)
    held = train(model, rank)
    for left, right in zip(held, reference, strict=True):
        assert isinstance(left, DTensor) and torch.allclose(left.full_tensor(), right, rtol=1e-4, atol=1e-6)

    zero = nn.parallel.DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(zero.parameters(), torch.optim.SGD, lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        zero(torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))).square().mean().backward()
        optimizer.step()
    for left, right in zip(zero.parameters(), reference, strict=True):
        assert torch.allclose(left, right, rtol=1e-4, atol=1e-6)
    dist.destroy_process_group()


@every_cluster
def test_device_mesh_dtensor_fsdp2_and_zero1(processes: Processes, nodes: list[str]) -> None:
    processes(4, check_sharded, nodes=nodes)


def check_again(rank: int, folder: str) -> int:
    import threading
    import time

    for number in range(3):  # a file each: torch's TCPStore cannot be made anew on one port without a race
        dist.init_process_group("gradwire", init_method=f"file://{folder}/{number}", rank=rank, world_size=4)
        tensor = torch.ones(LARGE)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.destroy_process_group()
        assert tensor[0] == 4
    deadline = time.monotonic() + 30  # a thread that has been told to end may still be on its way
    while (left := sum("gradwire" in thread.name for thread in threading.enumerate())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.mark.parametrize("nodes", [NODES["one node"], NODES["2x2"]], ids=["one node", "2x2"])
def test_destroy_ends_all_lanes_and_init_works_again(processes: Processes, nodes: list[str], tmp_path: Path) -> None:
    assert processes(4, check_again, str(tmp_path), nodes=nodes) == [0, 0, 0, 0]


def two_jobs(rank: int, ports: tuple[int, int]) -> float:
    """Ranks 0, 1 are one job, 2, 3 another one on the same host, with ranks and names as in the first."""
    store = TCPStore("127.0.0.1", ports[rank // 2], 2, rank % 2 == 0, timedelta(seconds=60))
    dist.init_process_group("gradwire", store=store, rank=rank % 2, world_size=2)
    tensor = torch.zeros(LARGE)
    for _ in range(10):
        tensor.fill_(float(rank))
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 1)
    dist.destroy_process_group()
    return float(tensor[-1])


def test_a_second_job_on_the_host_is_not_met(processes: Processes) -> None:
    with held_port() as first, held_port() as second:
        assert processes(4, two_jobs, (first, second)) == [1.0, 1.0, 5.0, 5.0]


def alone(rank: int) -> None:
    start(rank)
    group = dist.group.WORLD
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        tensor = torch.arange(5.0)
        dist.all_reduce(tensor, op=op)
        assert torch.equal(tensor, torch.arange(5.0))
    assert group._planned is None and group._node is None  # type: ignore[union-attr]
    dist.destroy_process_group()


def test_a_group_of_one_is_torchs_own(processes: Processes) -> None:
    processes(1, alone)


def asks(rank: int, options: Config | str) -> str:
    try:
        dist.init_process_group("gradwire", pg_options=options)
    except (TypeError, ValueError) as error:
        return str(error)
    dist.barrier()  # the store is on rank 0, which must not leave before rank 1 is through
    return ""


def test_options_that_do_not_fit_are_refused_in_words(processes: Processes) -> None:
    assert processes(2, asks, Config(plan="flat")) == ["", ""]
    (lossy, _) = processes(2, asks, Config(compressor="onebit"))
    assert "`pg_options`" in lossy and "HookState" in lossy
    (lossless, _) = processes(2, asks, Config(elastic=True))
    assert "`pg_options` has `elastic` True" in lossless and "gradwire.HookState" in lossless
    (measured, _) = processes(2, asks, Config(nic_bytes_per_second="measure"))
    assert "`pg_options` has `nic_bytes_per_second` 'measure'" in measured
    (other, _) = processes(2, asks, "fast")
    assert "`pg_options` is a str" in other


def from_environment(rank: int) -> bool:
    os.environ.update({"GRADWIRE_ELASTIC": "1", "GRADWIRE_FUSION": "25", "GRADWIRE_PLAN": "flat"})
    os.environ["GRADWIRE_NIC_BYTES_PER_SECOND"] = "measure"
    dist.init_process_group("gradwire")
    group = dist.group.WORLD
    assert group.config == Config(plan="flat", nic_bytes_per_second="measure", timeout=group.config.timeout)  # type: ignore[union-attr]
    dist.barrier()
    return True


def test_variables_of_the_hook_are_not_the_backends(processes: Processes) -> None:
    processes(2, from_environment)


def differs(rank: int) -> str:
    try:
        dist.init_process_group("gradwire", pg_options=Config(plan={"chunks": rank}))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_different_options_do_not_meet(processes: Processes) -> None:
    for message in processes(2, differs):
        assert "`plan` is" in message and "{'chunks': 1}" in message


def dies(rank: int, op: dist.ReduceOp.RedOpType) -> tuple[str, str]:
    start(rank)
    tensor = torch.ones(LARGE)
    dist.all_reduce(tensor, op)
    if rank == 3:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(tensor, op, async_op=True)
    assert work is not None
    try:
        work.wait()
    except RuntimeError as error:
        reported = str(error), str(work.exception())
        store = _get_default_store()
        store.set(f"reported/{rank}", "")
        if rank == 0:  # serves the store: the others may still be asking who is missing
            store.wait(["reported/1", "reported/2"], timedelta(seconds=30))
        return reported
    return "", ""


@pytest.mark.parametrize(
    ("nodes", "op"), [("aaaa", dist.ReduceOp.SUM), ("aabb", dist.ReduceOp.SUM), ("aabb", dist.ReduceOp.MAX)]
)
def test_a_killed_rank_is_named_by_the_survivors(processes: Processes, nodes: str, op: dist.ReduceOp.RedOpType) -> None:
    """Law: also where the inner gloo makes the reduction, whose work keeps gloo's words besides."""
    results = processes(4, dies, op, nodes=nodes, lost=[3], seconds=60.0)
    for waited, reported in results[:3]:
        texts = (waited, reported) if op == dist.ReduceOp.SUM else (waited,)
        for text in texts:  # on a busy machine a survivor that speaks late is named as well
            assert re.search(r"rank 3 of 4 is missing|ranks ([0-2], )+3 of 4 are missing", text), text


def gives_up(rank: int, broadcasts: bool) -> str:
    """Rank 0 aborts the group before anything has connected; returns what the others hear in a collective."""
    start(rank)
    store = _get_default_store()
    if rank == 0:
        store.wait(["made/1", "made/2"], timedelta(seconds=60))
        assert isinstance(dist.group.WORLD, GradwireGroup)
        dist.group.WORLD.abort()
        store.wait(["leaves/1", "leaves/2"], timedelta(seconds=60))  # it serves the store
        return ""
    store.set(f"made/{rank}", "")
    tensor = torch.ones(LARGE)
    with pytest.raises(RuntimeError) as caught:
        dist.broadcast(tensor, 0) if broadcasts else dist.all_reduce(tensor)
    store.set(f"leaves/{rank}", "")
    return str(caught.value)


@pytest.mark.parametrize(("nodes", "broadcasts"), [("aaa", False), ("aaa", True), ("aab", False)])
def test_who_waits_for_a_first_connection_hears_that_a_rank_has_given_up(
    processes: Processes, nodes: str, broadcasts: bool
) -> None:
    """Law: before the time-out, as in every other wait; the rank's process lives on, and is not missing."""
    for text in processes(3, gives_up, broadcasts, nodes=nodes, seconds=50.0)[1:]:
        assert "rank 0 has aborted the process group" in text, text
        assert not re.search(r"(?<!none of the . ranks )(is|are) missing", text), text


def gives_up_before_others_are_through(rank: int) -> str:
    """Rank 0 has made the group and aborts it, so that gloo fails on rank 1 as it connects; returns what that says."""
    stores: list[Store] = []

    def register(groups: list[dist.ProcessGroup], options: GroupOptions) -> list[object]:
        stores.append(options.store)  # first: rank 0 may be so early that gloo does fail here
        made = register_backends(groups, options)
        if rank == 1:
            options.store.wait(["aborted"], timedelta(seconds=60))
            raise RuntimeError("Connection closed by peer")
        return made

    with patch.object(process_group, "register_backends", register):
        if rank == 1:
            with pytest.raises(RuntimeError) as caught:
                start(rank)
            stores[0].set("leaves", "")
            return str(caught.value)
        start(rank)
    assert isinstance(dist.group.WORLD, GradwireGroup)
    dist.group.WORLD.abort()
    stores[0].set("aborted", "")
    stores[0].wait(["leaves"], timedelta(seconds=60))
    return ""


def test_who_still_makes_the_group_hears_why_another_rank_has_given_up(processes: Processes) -> None:
    """Law: instead of what gloo says of a connection that was closed."""
    _, text = processes(2, gives_up_before_others_are_through, nodes="aa", seconds=50.0)
    assert "rank 0 has aborted the process group" in text, text
    assert not re.search(r"(?<!none of the . ranks )(is|are) missing", text), text


def gives_up_while_gloo_waits(rank: int, receives: bool) -> str:
    """Rank 0 aborts the group while the others wait in what torch's gloo does; returns what they hear."""
    start(rank)
    store, tensor = _get_default_store(), torch.ones(3)
    if rank == 0:
        store.wait([f"issued/{other}" for other in (1, 2, 3)], timedelta(seconds=60))
        assert isinstance(dist.group.WORLD, GradwireGroup)
        dist.group.WORLD.abort()
        store.wait([f"leaves/{other}" for other in (1, 2, 3)], timedelta(seconds=60))  # it serves the store
        return ""
    work = dist.irecv(tensor, rank - 1) if receives else dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    store.set(f"issued/{rank}", "")
    with pytest.raises(RuntimeError) as caught:
        work.wait()
    store.set(f"leaves/{rank}", "")
    return str(caught.value)


@pytest.mark.parametrize("receives", [False, True])
def test_who_waits_in_torchs_gloo_hears_that_a_rank_has_given_up(processes: Processes, receives: bool) -> None:
    """Law: also who exchanges nothing with that rank: gloo's collectives end at the time-out alone."""
    for text in processes(4, gives_up_while_gloo_waits, receives, nodes="aabb", seconds=50.0)[1:]:
        assert "rank 0 has aborted the process group" in text, text
        assert not re.search(r"(?<!none of the . ranks )(is|are) missing", text), text


def test_what_ends_a_nodes_collectives_is_told_to_all_ranks_of_the_group() -> None:
    """Law: who waits elsewhere for this rank hears of the lost one, and not of this one's end alone."""
    told: list[str] = []
    communicator = SimpleNamespace(
        rank=0,
        size=2,
        config=Config(timeout=timedelta(minutes=10)),
        peer_wait=lambda: PeerWait((0, 1), 0, lambda ranks: list(ranks)),
        abort=told.append,
    )
    collectives = NodeCollectives(cast(Communicator, communicator), HashStore(), "node")
    with pytest.raises(RuntimeError, match="rank 1 has ended during the set-up"):
        collectives.broadcast(torch.ones(3), 0).wait()
    collectives.close()
    assert len(told) == 1 and told[0].startswith("rank 0 gave up a collective of its node: rank 1 has ended"), told


KNOWN = """
import sys, torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers as known
print(dist.is_backend_available('gradwire') and 'mpi' in known and 'mpi4py' not in sys.modules)
"""


@pytest.mark.parametrize(
    ("code", "autoload"),
    [
        (f"import torch\n{KNOWN}\nimport gradwire\n{KNOWN}", "1"),  # torch alone, and then both
        (f"import gradwire, torch\n{KNOWN}", "1"),
        (f"import torch, gradwire\n{KNOWN}", "0"),
    ],
)
def test_the_name_is_known_whoever_is_imported_first(code: str, autoload: str) -> None:
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "True\n" * code.count("print")
