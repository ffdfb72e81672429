"""Ranks forked from one warmed process on each node, so that dozens of ranks start in seconds on a few cores.

`python -m gradwire.bench.emulation.fork MODULE SHAPE ORDER ARGUMENTS...` is started once on every node (by
`EmulatedCluster.run`); it imports torch and MODULE, then forks the ranks that sit on its node, each of which calls
`MODULE.rank_main(ForkedRank, ARGUMENTS) -> int`.
"""

import gc
import importlib
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from gradwire.bench.emulation.cluster import INTERFACE, EmulatedCluster, RunResult
from gradwire.bench.emulation.launch import RankLine
from gradwire.bench.emulation.seats import seat_ranks
from gradwire.bench.emulation.signals import die_with_parent
from gradwire.comms.config import launcher_variables

START_TIMEOUT = timedelta(minutes=5)
"""For 32 ranks to find each other on 2 busy cores."""


LAZY = ("torch.nn.parallel", "torch._dynamo")
"""What torch imports late, and every rank would import for itself; the first DDP model wants the second, 800 modules.
A module that trains nothing has a `LAZY` of its own."""


@dataclass(frozen=True, slots=True)
class ForkedRank:
    """Where a forked rank is, and how it reaches the others.

    Attributes:
        rank: Of the job.
        world_size: Ranks in the job.
        node: Number of its node.
        nodes: Ranks of each node.
        address: Of the node of rank 0.
        port: Where rank 0 serves the store.
        interface: The node's network card.
    """

    rank: int
    world_size: int
    node: int
    nodes: tuple[int, ...]
    address: str
    port: int
    interface: str

    def connect(self, timeout: timedelta = START_TIMEOUT) -> None:
        """Makes gloo the default process group of all ranks.

        Raises:
            RuntimeError: A rank did not come within `timeout`.
        """
        store = TCPStore(self.address, self.port, self.world_size, self.rank == 0, timeout)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)

    def leave(self) -> None:
        """Takes the default process group down, once all ranks have come; release every model before.

        A DDP model that outlives its gloo group can wait for gloo's threads for ever (torch 2.13).
        """
        gc.collect()
        # Rank 0 serves the store: nobody may still need it when it leaves.
        dist.barrier()
        dist.destroy_process_group()


def run_forked(
    cluster: EmulatedCluster,
    module: str,
    arguments: Sequence[str],
    *,
    nodes: Sequence[int],
    order: str = "contiguous",
    timeout_seconds: float | None = None,
    on_line: RankLine | None = None,
) -> RunResult:
    """Runs `module.rank_main` as every rank of a job on an emulated cluster.

    Args:
        cluster: Made with one rank for each node: `EmulatedCluster([1] * len(nodes), nic)`.
        module: Full name, or path, of a module with `rank_main(place, arguments) -> int`.
        arguments: Passed to every rank.
        nodes: Ranks of each node.
        order: How the ranks are dealt over the nodes.
        timeout_seconds: Longest time for the whole job.
        on_line: Called with (node, line) for every line printed.
    """
    if list(cluster.nodes) != [1] * len(nodes):
        raise ValueError(f"`cluster` has {list(cluster.nodes)} ranks on its nodes; wanted one on each of {len(nodes)}")
    shape = ",".join(map(str, nodes))
    command = [str(Path(sys.executable)), "-m", "gradwire.bench.emulation.fork", module, shape, order, *arguments]
    return cluster.run(command, timeout_seconds=timeout_seconds, grace_seconds=5.0, on_line=on_line)


BAD_FLAG = 2
"""Exit status of a command line that makes no sense."""


class HasRank(Protocol):
    """What `fork_ranks` needs to know of a rank."""

    @property
    def rank(self) -> int:
        """Its number."""


P = TypeVar("P", bound=HasRank)


def fork_ranks(places: Sequence[P], entry: Callable[[P, list[str]], int], arguments: list[str]) -> int:
    """Forks one process for each place and waits for all; the first failure ends the others.

    Returns:
        0, or the status of the rank that failed first (128 + signal for one that a signal ended).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    children = {_fork(place, entry, arguments): place.rank for place in places}
    status = 0
    while children:
        pid, ended = os.wait()
        rank = children.pop(pid, None)
        code = os.waitstatus_to_exitcode(ended)
        if rank is None or code == 0:
            continue
        if status == 0:
            status = code if code > 0 else 128 - code
            if code == BAD_FLAG:  # every rank finds the same, and the first has said it
                continue
            print(f"rank {rank} ended with status {status}", file=sys.stderr, flush=True)
            for other in children:
                os.kill(other, signal.SIGTERM)
    return status


def _fork(place: P, entry: Callable[[P, list[str]], int], arguments: list[str]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent(parent)
        status = entry(place, arguments)
    except BaseException:  # noqa: BLE001 - the child must not run on into the parent's code, whatever happened
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: the parent's exit handlers are not this process's to run.
        os._exit(status)


def _load(module: str) -> ModuleType:
    """Imports a module that is given by its name or by its file."""
    if not module.endswith(".py"):
        return importlib.import_module(module)
    spec = importlib.util.spec_from_file_location(Path(module).stem, module)
    assert spec is not None and spec.loader is not None  # the loader goes by the suffix
    loaded = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def main(argv: list[str]) -> int:
    """Forks this node's ranks.

    Args:
        argv: Module, ranks of each node (`2,2`), order, then what the ranks are given.
    """
    module, shape, order, *arguments = argv
    nodes = tuple(int(word) for word in shape.split(","))
    variables = launcher_variables()
    node = int(variables["RANK"])
    loaded = _load(module)
    for lazy in getattr(loaded, "LAZY", LAZY):
        importlib.import_module(lazy)
    places = [
        ForkedRank(
            seat.rank,
            sum(nodes),
            node,
            nodes,
            variables["MASTER_ADDR"],
            int(variables["MASTER_PORT"]) + 1000,
            INTERFACE,
        )
        for seat in seat_ranks(nodes, order)
        if seat.node == node
    ]
    return fork_ranks(places, loaded.rank_main, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
