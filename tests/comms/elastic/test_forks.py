"""Law: a fork of a rank, a DataLoader's worker say, holds nothing open that tells others of the rank's end."""

import gc
import os
import stat
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.transport.gloo_sockets import connections
from support.processes import Processes


def sockets() -> set[int]:
    """Numbers of this process's sockets."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            status = entry.stat()
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            found.add(status.st_ino)
    return found


def fork(rank: int, nodes: int) -> list[str]:
    """Which of the sockets that gradwire has made here a fork still has, and what it could do with the rest."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(4, 4))
    before = sockets()
    state = gradwire.HookState(model, elastic=True)
    model.register_comm_hook(state, gradwire.comm_hook)
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
    own = sockets() - before
    assert own & {each.inode for each in connections()} or nodes == 1
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        left = sockets() & own
        lines = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
        tcp = {int(line.split()[9]): line for line in lines if line.split()[9].isdecimal()}
        os.write(writing, "\n".join(tcp.get(each, f"{each} is no socket of TCP") for each in left).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as file:
        left_open = file.read().splitlines()
    for _ in range(3):  # the parent's own are whole
        model(torch.randn(2, 4)).sum().backward()
    assert state.view.size == 2
    dist.barrier()
    state.close()
    return left_open


def test_a_fork_has_none_of_its_parents_connections(processes: Processes) -> None:
    assert processes(2, fork, 2, nodes=["a", "b"]) == [[], []]


def test_a_fork_has_none_of_its_parents_connections_inside_a_node(processes: Processes) -> None:
    assert processes(2, fork, 1, nodes=["a", "a"]) == [[], []]


def drop_in_child(rank: int, elastic: bool) -> int:
    """How a fork ends that collects its copy of a model, as a DataLoader's worker collects one dropped before it."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(4, 4))
    state = gradwire.HookState(model, elastic=elastic, plan="flat", compressor="int8")
    model.register_comm_hook(state, gradwire.comm_hook)
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
    child = os.fork()
    if not child:
        del model, state
        gc.collect()
        os._exit(0)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.01)
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
    dist.barrier()
    state.close()
    return ended[1]


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("nodes", ["ab", "aa"])
def test_a_fork_may_collect_what_its_parent_uses(processes: Processes, nodes: str, elastic: bool) -> None:
    assert processes(2, drop_in_child, elastic, nodes=list(nodes)) == [0, 0]
