"""Start of ranks by forking a process that has imported torch, so that dozens start in seconds on a few cores.

The first `run_forked` of a process starts this module, outside the nodes: it imports torch, once for all jobs, and ends
with the process that started it. For each job it forks a process that imports the job's MODULE. On every node,
`EmulatedCluster.run` starts a small program (`_CLIENT`), which hands its output and its environment to the job's
process. That forks a process, which enters the node's namespaces, and there forks the ranks that sit on the node; each
of them calls `MODULE.rank_main(ForkedRank, ARGUMENTS) -> int`. The small program ends with their status, and they end
with it.

Source: setns(2), pid_namespaces(7), pidfd_send_signal(2), unix(7) (SCM_RIGHTS, SO_PEERCRED).
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import io
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Protocol, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from gradwire.bench.emulation.cluster import INTERFACE, WITH_ONE_THREAD, EmulatedCluster, RunResult
from gradwire.bench.emulation.launch import RankLine
from gradwire.bench.emulation.paths import PathOptions
from gradwire.bench.emulation.placement import place_ranks
from gradwire.bench.emulation.signals import die_with_parent
from gradwire.bench.pipe import status_of
from gradwire.comms.environment import launcher_variables

START_TIMEOUT = timedelta(minutes=5)
"""Time limit for all ranks to connect, enough for 32 ranks on 2 busy cores."""


LAZY = ("torch.nn.parallel", "torch._dynamo")
"""Modules that `import torch` leaves out and that each rank would import itself; the first DDP model imports
torch._dynamo, with 800 modules."""


@dataclass(frozen=True, slots=True)
class ForkedRank:
    """Rank and node of a forked process, and the address at which the ranks meet.

    Attributes:
        rank: Rank in the job.
        world_size: Number of ranks in the job.
        node: Number of its node.
        nodes: Number of ranks of each node.
        address: Address of the node of rank 0.
        port: TCP port of the store that rank 0 serves.
        interface: Name of the node's network interface.
    """

    rank: int
    world_size: int
    node: int
    nodes: tuple[int, ...]
    address: str
    port: int
    interface: str

    def connect(self, timeout: timedelta = START_TIMEOUT) -> None:
        """Makes a gloo group of all ranks the default process group. Collective.

        Args:
            timeout: Time limit for all ranks to join, and of the group's collectives.

        Raises:
            RuntimeError: A rank did not join within `timeout`.
        """
        store = TCPStore(self.address, self.port, self.world_size, self.rank == 0, timeout)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)

    def leave(self) -> None:
        """Waits for all ranks, then destroys the default process group. Release every model before. Collective.

        A DDP model that outlives its gloo group can wait for gloo's threads for ever (torch 2.13).
        """
        gc.collect()
        # Rank 0 serves the store: nobody may still need it when it leaves.
        dist.barrier()
        dist.destroy_process_group()

    def tell(self, found: object) -> None:
        """Sends rank 0's result to the caller of `hear_forked`, then calls `leave`. Collective.

        Args:
            found: Result, of types that JSON has; ignored on other ranks.
        """
        if self.rank == 0:
            print(json.dumps(found), flush=True)
        self.leave()


def run_forked(
    cluster: EmulatedCluster,
    module: str,
    arguments: Sequence[str],
    *,
    nodes: Sequence[int],
    order: str = "contiguous",
    timeout_seconds: float | None = None,
    grace_seconds: float = 5.0,
    on_line: RankLine | None = None,
) -> RunResult:
    """Runs `module.rank_main` as every rank of a job on an emulated cluster.

    Args:
        cluster: Cluster that was made with one rank for each node: `EmulatedCluster([1] * len(nodes), nic)`.
        module: Full name, or path, of a module with `rank_main(place, arguments) -> int`.
        arguments: Arguments that every rank gets.
        nodes: Number of ranks of each node.
        order: Order in which ranks are assigned to nodes, see `Order`.
        timeout_seconds: Time limit of the whole job; None for no limit.
        grace_seconds: Seconds for which the other nodes may go on after a rank has failed.
        on_line: Callback with (node, line) for every line printed.

    Returns:
        Statuses and output by node, not by rank, and the traffic of the nodes.

    Raises:
        ValueError: `cluster` has other nodes.
        RuntimeError: The process that forks the ranks could not start, or was ended; its error is on stderr.
    """
    if list(cluster.nodes) != [1] * len(nodes):
        raise ValueError(f"`cluster` has {list(cluster.nodes)} ranks on its nodes; wanted one on each of {len(nodes)}")
    shape = ",".join(map(str, nodes))
    with tempfile.TemporaryDirectory(prefix="gradwire-fork-") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = str(Path(folder, "socket"))
        listener.bind(path)
        listener.listen(len(nodes))
        with _warmed_process().job(module, listener):
            # Only the job's process listens from here on: if it ends, the nodes get an error instead of waiting.
            listener.close()
            command = [sys.executable, "-I", "-S", "-c", _CLIENT, path, shape, order, *arguments]
            return cluster.run(command, timeout_seconds=timeout_seconds, grace_seconds=grace_seconds, on_line=on_line)


class _Warmed:
    """Child process that has imported torch, and forks a process for each job; it ends with this process."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, "-m", "gradwire.bench.emulation.fork", str(theirs.fileno())]
            # torch reads the number of threads when it is imported, which is here and not on the nodes.
            self._process = subprocess.Popen(
                ["sh", "-c", WITH_ONE_THREAD, "sh", *words],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for the command, which ends it
            )
        atexit.register(self._end)

    @property
    def runs(self) -> bool:
        """Whether the child process still runs."""
        return self._process.poll() is None

    @contextlib.contextmanager
    def job(self, module: str, listener: socket.socket) -> Iterator[None]:
        """Starts the process of a job, which imports a module and forks ranks for the nodes that connect.

        It gets this process's environment variables, folder and output. It is killed at the end of the block, with all
        processes that it has forked.

        Args:
            module: Full name, or path, of the job's module.
            listener: Listening socket to which the nodes connect.

        Raises:
            RuntimeError: The child process has ended.
        """
        ours, theirs = socket.socketpair()
        with ours:
            try:
                with theirs:
                    socket.send_fds(self._control, [b"j"], [theirs.fileno(), listener.fileno(), 1, 2])
                ours.sendall(json.dumps([dict(os.environ), str(Path.cwd()), module]).encode() + b"\n")  # noqa: TID251
                _, handles, _, _ = socket.recv_fds(ours, 1, 1)
            except ConnectionError:
                handles = []
            if not handles:
                raise RuntimeError(f"the process that forks the ranks ended with status {self._process.wait()}")
            try:
                yield
            finally:
                with contextlib.suppress(ProcessLookupError):  # it ended with the warmed process
                    signal.pidfd_send_signal(handles[0], signal.SIGKILL)
                os.close(handles[0])

    def _end(self) -> None:
        """Kills the child process, which may still be importing torch."""
        self._control.close()
        self._process.kill()
        self._process.wait()


_started: list[_Warmed] = []
"""Child process that this process has started last; empty or of one item."""


def _warmed_process() -> _Warmed:
    if not _started or not _started[-1].runs:
        _started[:] = [_Warmed()]
    return _started[-1]


def hear_forked(
    module: str,
    arguments: Sequence[str],
    *,
    nodes: Sequence[int],
    nic: str | None,
    timeout_seconds: float,
    order: str = "contiguous",
    path: PathOptions | None = None,
    congestion: str | None = None,
) -> Any:
    """Runs `module.rank_main` as every rank of a job on a new emulated cluster, and returns the ranks' result.

    Args:
        module: Full name, or path, of a module with `rank_main(place, arguments) -> int`.
        arguments: Arguments that every rank gets.
        nodes: Number of ranks of each node.
        nic: Rate of each node's link, as for `EmulatedCluster`; None for no limit.
        timeout_seconds: Time limit of the whole job.
        order: Order in which ranks are assigned to nodes, see `Order`.
        path: Delay, loss and queues between the nodes, as for `EmulatedCluster`.
        congestion: Congestion control of TCP, as for `EmulatedCluster`.

    Returns:
        The value that rank 0 passed to `ForkedRank.tell`.

    Raises:
        RuntimeError: This machine cannot emulate a cluster, or a rank failed.
    """
    with EmulatedCluster([1] * len(nodes), nic, path=path, congestion=congestion) as cluster:
        outcome = run_forked(cluster, module, arguments, nodes=nodes, order=order, timeout_seconds=timeout_seconds)
    outcome.check()
    return json.loads(next(line for line in outcome.output[0].splitlines() if line.startswith(("{", "["))))


_CLIENT = r"""
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as warmed:
    warmed.connect(sys.argv[1])
    socket.send_fds(warmed, [b"f"], [1, 2])
    warmed.sendall(json.dumps([dict(os.environ), os.getcwd(), sys.argv[2:]]).encode() + b"\n")
    status = warmed.makefile().read()
sys.exit(int(status) if status else "the process that forks the ranks has ended")
"""
"""Program that runs on every node with the words SOCKET SHAPE ORDER ARGUMENTS...; it imports no large module."""

_NAMESPACES = ("net", "uts", "pid", "mnt")
"""Kinds of namespaces of a `Holder`. A process that enters a PID namespace is not in it itself; its children are."""


BAD_FLAG = 2
"""Exit status for a wrong command line."""


class HasRank(Protocol):
    """Protocol of the places that `fork_ranks` takes."""

    @property
    def rank(self) -> int:
        """Number of the rank."""


P = TypeVar("P", bound=HasRank)


def fork_ranks(places: Sequence[P], entry: Callable[[P, list[str]], int], arguments: list[str]) -> int:
    """Forks a process for each place and waits for all; after the first failure the others get SIGTERM.

    After status `BAD_FLAG` they do not, because all ranks end with it by themselves.

    Args:
        places: Place of each rank, which its process gets.
        entry: Function (place, arguments) that a process runs; it returns the exit status.
        arguments: Arguments that every process gets.

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


def ask_in_child(question: Callable[[], bool]) -> bool:
    """Calls a function in a forked process and returns its answer, so that this process can still fork ranks.

    torch.cuda.device_count() is such a function: without NVML (WSL, containers without NVIDIA's `utility` capability)
    it initializes CUDA, and a rank that is forked after that cannot use a GPU.

    Args:
        question: Function to call.

    Raises:
        RuntimeError: The child process ended without an answer; its error is on stderr.
    """
    yes, no = 10, 11
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        exit_as(lambda: yes if question() else no)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if ended not in (yes, no):
        raise RuntimeError(f"a child process that was to look for devices ended with status {ended}")
    return ended == yes


def print_whole_lines() -> None:
    """Sets stdout and stderr to write each line in one piece, also under PYTHONUNBUFFERED.

    Ranks share a pipe, in which pieces of two lines would mix.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a test's capture need not be one
            stream.reconfigure(line_buffering=True, write_through=False)


def _fork(place: P, entry: Callable[[P, list[str]], int], arguments: list[str]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid

    def run() -> int:
        die_with_parent(parent)
        print_whole_lines()
        return entry(place, arguments)

    exit_as(run)


def exit_as(body: Callable[[], int]) -> NoReturn:
    """Runs a function in a forked process and ends the process, so that it never runs on into its parent's code.

    Args:
        body: Function whose return value is the exit status; if it raises, the traceback is printed and the status is
            1.
    """
    status = 1
    try:
        status = status_of(body)
    except BaseException:  # noqa: BLE001 - see above
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # Not sys.exit: the parent's exit handlers are not this process's to run.
            os._exit(status)


def _load(module: str) -> ModuleType:
    """Imports a module by its full name, or by the path of its file, which ends in .py."""
    if not module.endswith(".py"):
        return importlib.import_module(module)
    spec = importlib.util.spec_from_file_location(Path(module).stem, module)
    assert spec is not None and spec.loader is not None  # the loader goes by the suffix
    loaded = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def main(argv: list[str]) -> int:
    """Imports torch, then forks a process for each requested job, until the process that requests them has ended.

    Args:
        argv: A list of one item, the descriptor of the socket on which jobs are requested.
    """
    gc.disable()
    for lazy in LAZY:
        importlib.import_module(lazy)
    gc.freeze()  # ranks that collect do not walk, and so copy, all that was imported
    gc.enable()
    own = os.getpid()
    with socket.socket(fileno=int(argv[0])) as control:
        while True:
            _, descriptors, _, _ = socket.recv_fds(control, 1, 4)
            if not descriptors:
                return 0
            pid = os.fork()
            if not pid:
                control.close()
                exit_as(partial(_serve_job, own, descriptors))
            _give_handle(pid, descriptors)
            with contextlib.suppress(ChildProcessError):  # there is none any more
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _give_handle(pid: int, descriptors: Sequence[int]) -> None:
    """Sends the pidfd of a job's process to the process that requested the job; kills the job if that has ended.

    Args:
        pid: Process ID of the job's process.
        descriptors: Descriptors that came with the request; all are closed here. The pidfd is sent on the first.
    """
    handle = os.pidfd_open(pid)
    with socket.socket(fileno=descriptors[0]) as asking:
        try:
            socket.send_fds(asking, [b"h"], [handle])
        except OSError:  # it was interrupted
            os.kill(pid, signal.SIGKILL)
    for descriptor in (handle, *descriptors[1:]):
        os.close(descriptor)


def _serve_job(parent: int, descriptors: Sequence[int]) -> NoReturn:
    """Imports the module of a job, then forks a process for each node that connects, until it is killed.

    Args:
        parent: Process ID of the process that has imported torch.
        descriptors: Descriptors of the socket on which the job's description comes, of the socket to which the nodes
            connect, and of the job's stdout and stderr.
    """
    die_with_parent(parent)
    job, listening, *outputs = descriptors
    with socket.socket(fileno=job) as asking, asking.makefile() as words:
        _take(outputs)
        environment, folder, module = json.loads(words.readline())
    _become(environment)
    os.chdir(folder)
    loaded, problem = None, ""
    gc.disable()
    try:
        loaded = _load(module)
    except Exception:  # noqa: BLE001 - every node prints it, as ranks print what goes wrong
        problem = traceback.format_exc()
    gc.freeze()
    gc.enable()
    own = os.getpid()
    with socket.socket(fileno=listening) as listener:
        while True:
            asking, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                exit_as(partial(_serve, asking, own, loaded, problem))
            asking.close()


def _take(outputs: Sequence[int]) -> None:
    """Makes two descriptors this process's stdout and stderr, and closes them."""
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
        os.close(output)


def _become(environment: dict[str, str]) -> None:
    """Replaces all environment variables of this process, as if it had been started with these."""
    os.environ.clear()  # noqa: TID251
    os.environ.update(environment)  # noqa: TID251


def _serve(asking: socket.socket, parent: int, loaded: ModuleType | None, problem: str) -> int:
    """Runs one node's ranks with the output and environment of the program on the node, and sends it their status.

    Args:
        asking: Connection to the program (`_CLIENT`) on the node.
        parent: Process ID of the job's process.
        loaded: Module of the job; None if it could not be imported.
        problem: Traceback to print if it could not.
    """
    status = 1
    die_with_parent(parent)
    _, outputs, _, _ = socket.recv_fds(asking, 1, 2)
    _take(outputs)
    environment, folder, words = json.loads(asking.makefile().readline())
    if loaded is None:
        print(problem, file=sys.stderr)
    else:
        _become(environment)
        status = _inside(asking, folder, loaded, words)
    asking.sendall(str(status).encode())
    return status


def enter_namespaces(pid: int, names: Sequence[str]) -> None:
    """Moves this process, which must have one thread only, into namespaces of another process.

    Args:
        pid: Process ID of the other process.
        names: Kinds of namespaces, as in /proc/PID/ns. A PID namespace holds for the children of this process only.

    Raises:
        OSError: The kernel refuses.
    """
    # Who is not root has a user namespace around the others, and none of them opens before it.
    own_user, its_user = (Path(f"/proc/{process}/ns/user").stat().st_ino for process in ("self", pid))
    names = names if own_user == its_user else ("user", *names)
    doors = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in names]
    libc = ctypes.CDLL(None, use_errno=True)
    for name, door in zip(names, doors, strict=True):
        if libc.setns(door, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter the node's {name} namespace: {os.strerror(number)}")
        os.close(door)


def _inside(asking: socket.socket, folder: str, loaded: ModuleType, words: list[str]) -> int:
    """Forks a process in the namespaces of a node, which forks its ranks; returns their status.

    The process is killed if the program on the node ends before.

    Args:
        asking: Connection to the program on the node.
        folder: Working directory of the ranks.
        loaded: Module of the job.
        words: Number of ranks of each node (`2,2`), order, then the arguments of the ranks.
    """
    pid, _, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    enter_namespaces(pid, _NAMESPACES)
    os.chdir(folder)
    child = os.fork()
    if child == 0:
        exit_as(partial(_fork_node, loaded, words))
    ended = os.pidfd_open(child)
    waiting = select.poll()
    waiting.register(ended, select.POLLIN)
    waiting.register(asking, select.POLLIN)  # who asks says nothing more: this is its end
    if ended not in {descriptor for descriptor, _ in waiting.poll()}:
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _fork_node(loaded: ModuleType, words: list[str]) -> int:
    """Forks the ranks of the node that this process is on, and returns their status.

    Args:
        loaded: Module of the job, with `rank_main`.
        words: Number of ranks of each node (`2,2`), order, then the arguments of the ranks.
    """
    shape, order, *arguments = words
    nodes = tuple(int(word) for word in shape.split(","))
    variables = launcher_variables()
    node = int(variables["RANK"])
    places = [
        ForkedRank(
            placement.rank,
            sum(nodes),
            node,
            nodes,
            variables["MASTER_ADDR"],
            int(variables["MASTER_PORT"]) + 1000,
            INTERFACE,
        )
        for placement in place_ranks(nodes, order)
        if placement.node == node
    ]
    return fork_ranks(places, loaded.rank_main, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
