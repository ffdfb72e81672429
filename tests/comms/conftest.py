"""Ranks as processes, for what threads cannot show: torch.distributed's default group, DDP, a killed rank.

Ranks are forked by a server that has imported torch once and has no threads of its own. A rank runs this very file
(under the name RANK), loads the test's module by its path and calls one of its top-level functions.
"""

import importlib.util
import json
import multiprocessing
import pickle
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import pytest
import torch

from gradwire.bench.emulation.cluster import INTERFACE, EmulatedCluster
from gradwire.bench.emulation.fork import enter_namespaces
from gradwire.bench.emulation.launch import held_port
from gradwire.comms.bootstrap.compat import HashStore, TCPStore
from gradwire.comms.transport.shm import ShmGroup
from support.processes import Processes
from support.threads import run_ranks

RANK, AGENT = "gradwire_rank", "gradwire_agent"
BLOCK_NBYTES = 4096  # small: a few thousand elements already stream through several chunks


@dataclass(frozen=True)
class Task:
    """What one rank has to do, and where it says how that went."""

    file: str
    function: str
    rank: int
    arguments: tuple[object, ...]
    environment: dict[str, str]
    outcome: Connection
    host: int | None = None
    """A process in whose network namespace the rank runs; None leaves it where it is."""


@pytest.fixture(scope="session")
def _server() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # torch._dynamo is what the first DDP model or optimizer imports: seconds, in every rank, if it is not there
    # already.
    context.set_forkserver_preload(
        [
            "torch._dynamo",
            "torch.distributed.fsdp",
            "torch.distributed.tensor",
            "pytest",
            # What this file imports: every rank begins with it.
            "gradwire.bench.emulation.cluster",
            "gradwire.bench.emulation.fork",
            "gradwire.bench.emulation.launch",
            "gradwire.comms.backend.process_group",
            "gradwire.comms.hook",
            "gradwire.fsdp",
            "gradwire.topology.levels",
            "gradwire.topology.readers.detect",
        ]
    )
    return context


Hosts = Callable[[int], EmulatedCluster]


@pytest.fixture(scope="session")
def _hosts(request: pytest.FixtureRequest) -> Iterator[Hosts | None]:
    """A function from a number to so many emulated hosts; None where ranks stay on this machine.

    They are made once for all tests: making them takes as long as most jobs that run there.
    """
    network = request.config.getoption("--hosts-network")
    with ExitStack() as held:
        yield network and cache(
            lambda number: held.enter_context(EmulatedCluster([1] * number, names="none", network=network))
        )


@contextmanager
def _starter(server: multiprocessing.context.ForkServerContext, emulated: Hosts | None = None) -> Iterator[Processes]:
    started: list[multiprocessing.process.BaseProcess] = []
    held = ExitStack()

    def serve_store(address: str, host: int | None) -> dict[str, str]:
        ours, theirs = server.Pipe()
        serving = server.Process(target=runpy.run_path, args=(__file__, {"STORE": (address, host, theirs)}, AGENT))
        serving.start()
        theirs.close()
        held.callback(ours.close)  # which ends it
        return {"MASTER_PORT": str(ours.recv()), "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def run(
        size: int,
        target: Callable[..., object],
        *arguments: object,
        nodes: Sequence[str] | None = None,
        environment: dict[str, str] | None = None,
        seconds: float = 90.0,
        lost: Collection[int] = (),
        agent: bool = False,
    ) -> list[object]:
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(held.enter_context(held_port())),
            "WORLD_SIZE": str(size),
            "OMP_NUM_THREADS": "1",
        }
        places = [0] * size if nodes is None else [list(dict.fromkeys(nodes)).index(node) for node in nodes]
        hosts: list[int | None] = [None] * size
        if emulated is not None:
            cluster = emulated(max(places) + 1)
            common |= {"MASTER_ADDR": cluster.address(places[0]), "GLOO_SOCKET_IFNAME": INTERFACE}
            hosts = [cluster.process(place) for place in places]
        if agent:
            common |= serve_store(common["MASTER_ADDR"], hosts[0])
        common |= environment or {}
        connections = []
        for rank in range(size):
            ours, theirs = server.Pipe(duplex=False)
            own = {"RANK": str(rank)} | ({"GRADWIRE_HOSTNAME": nodes[rank]} if nodes else {})
            task = Task(
                target.__code__.co_filename, target.__name__, rank, arguments, common | own, theirs, hosts[rank]
            )
            process = server.Process(target=runpy.run_path, args=(__file__, {"TASK": task}, RANK), name=f"rank {rank}")
            process.start()
            theirs.close()
            started.append(process)
            connections.append(ours)
        return _collect(connections, started[-size:], time.monotonic() + seconds, lost)

    yield run
    for process in started:
        if process.is_alive():
            process.kill()
        process.join()
    held.close()


@pytest.fixture
def processes(
    request: pytest.FixtureRequest, _server: multiprocessing.context.ForkServerContext, _hosts: Hosts | None
) -> Iterator[Processes]:
    """Starts ranks as processes, with torchrun's variables set and a free port for the store.

    `processes(size, target, *arguments, nodes=["a", "a", "b"], environment={}, seconds=90, lost=(), agent=False)`:
    `target` is a top-level function of a test module; `nodes` names the logical node of each rank; ranks in `lost` may
    die without a result (None in the results); `agent` has a process of its own serve the store, as torchrun's agent
    does: the loss of rank 0 does not take it along. Whatever is still there after `seconds`, or when the test ends, is
    killed.
    """
    here = request.node.get_closest_marker("one_machine") is not None
    with _starter(_server, None if here else _hosts) as run:
        yield run


class RunJob(Protocol):
    """See `run_job`."""

    def __call__(self, script: Path, folder: Path, nodes: str) -> list[dict[str, Any]]:
        """Runs a script as every rank of a job, and returns what each rank wrote."""


@pytest.fixture(scope="module")
def run_job(_server: multiprocessing.context.ForkServerContext) -> Iterator[RunJob]:
    """Runs a script as every rank: `run_job(script, folder, "aab")`.

    NODES gives each rank's node as a letter. The rank leaves its results in `folder/RANK.json`, which the script's
    first argument names.
    """
    with _starter(_server) as run:

        def run_job(script: Path, folder: Path, nodes: str) -> list[dict[str, Any]]:
            run(len(nodes), run_script, str(script), str(folder), environment={"NODES": nodes}, seconds=300)
            return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(nodes))]

        yield run_job


def run_script(rank: int, script: str, folder: str) -> None:
    """A rank of `run_job`."""
    with patch.dict("os.environ", {"LOCAL_RANK": str(rank)}), patch.object(sys, "argv", [script, folder]):
        runpy.run_path(script, run_name="__main__")


def _collect(
    connections: list[Connection],
    ranks: list[multiprocessing.process.BaseProcess],
    deadline: float,
    lost: Collection[int],
) -> list[object]:
    results: list[object] = []
    problems = []
    for rank, connection in enumerate(connections):
        result = None
        try:
            if connection.poll(max(0.0, deadline - time.monotonic())):
                passed, result = pickle.loads(connection.recv_bytes())
                if not passed:
                    problems.append(f"rank {rank}:\n{result}")
            else:
                problems.append(f"rank {rank} was not through in time")
        except EOFError:
            if rank not in lost:
                ranks[rank].join(5)
                problems.append(f"rank {rank} died with exit code {ranks[rank].exitcode}")
        results.append(result)
    for rank, process in enumerate(ranks):
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            problems.append(f"rank {rank} hangs at its exit")
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)
    return results


def _serve(task: Task) -> None:
    if task.host is not None:
        enter_namespaces(task.host, ("net", "uts"))
    with patch.dict("os.environ", task.environment):
        torch.set_num_threads(1)
        try:
            spec = importlib.util.spec_from_file_location("gradwire_rank_module", task.file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            result = getattr(module, task.function)(task.rank, *task.arguments)
            task.outcome.send_bytes(
                pickle.dumps((True, result))
            )  # plain pickle: tensors by value, not as shared memory
        except BaseException:  # noqa: BLE001 - the parent prints it
            task.outcome.send_bytes(pickle.dumps((False, traceback.format_exc())))
        finally:
            task.outcome.close()


def _serve_store(address: str, host: int | None, outcome: Connection) -> None:
    """Serves a store on the host of rank 0, until the other end of the pipe is closed."""
    if host is not None:
        enter_namespaces(host, ("net", "uts"))
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    outcome.send(store.port)
    outcome.poll(None)


class OnGroups(Protocol):
    """Runs a body on every rank of a new shared-memory group, ranks as threads."""

    def __call__(
        self, size: int, body: Callable[[ShmGroup], None], seconds: float = 60.0, block: int = BLOCK_NBYTES
    ) -> None: ...


@pytest.fixture(scope="session")
def on_groups() -> OnGroups:
    """`on_groups(size, body)`; closes the groups only when all are through, as a barrier at the end would."""

    def on_groups(
        size: int, body: Callable[[ShmGroup], None], seconds: float = 60.0, block: int = BLOCK_NBYTES
    ) -> None:
        store = HashStore()

        def run(rank: int) -> None:
            group = ShmGroup.create(
                store, rank, size, key="laws", timeout=timedelta(seconds=seconds), block_nbytes=block
            )
            try:
                body(group)
            finally:
                group.close()

        run_ranks(size, run)

    return on_groups


if __name__ == RANK:
    _serve(globals()["TASK"])
if __name__ == AGENT:
    _serve_store(*globals()["STORE"])
