"""What the tests of the emulated cluster share: who lives below a process, and who holds a namespace open."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def _network_namespaces() -> dict[int, str]:
    """Process id -> its network namespace, for every process that can be read."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = str((entry / "ns" / "net").readlink())
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                # It ended while the list was made, or is none of ours.
                continue
    return found


def _parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


@pytest.fixture
def namespaces_below() -> Callable[[int], set[str]]:
    """A function: process id -> the network namespaces of its descendants, this machine's own left out."""

    def below(pid: int) -> set[str]:
        parents, family = _parents(), {pid}
        while grown := {child for child, parent in parents.items() if parent in family} - family:
            family |= grown
        namespaces = _network_namespaces()
        return {namespaces[member] for member in family if member in namespaces} - {
            str(Path("/proc/self/ns/net").readlink())
        }

    return below


@pytest.fixture
def wait_until_gone() -> Callable[[set[str]], set[str]]:
    """A function: network namespaces -> those that some process still holds after at most 20 seconds."""

    def wait(namespaces: set[str]) -> set[str]:
        deadline = time.monotonic() + 20
        while (left := namespaces & set(_network_namespaces().values())) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    return wait


FORK_SERVER = """
import json, os, sys
import gradwire.__main__, gradwire.bench.nccl_tests.command
for line in sys.stdin:
    task = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.environ.update(task["variables"])
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(task[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        status = 1
        try:
            status = gradwire.__main__.main(task["words"])
        except SystemExit as left:
            status = left.code
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
# torch is imported once for all runs; each run is a process of its own, which has started no thread of torch's yet.


@pytest.fixture(scope="session")
def run_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """A function that runs `gradwire bench` with the given words, environment variables by keyword, as a user does."""
    folder = tmp_path_factory.mktemp("bench")
    files = {name: folder / name for name in ("stdout", "stderr")}
    words_of_server = [sys.executable, "-c", FORK_SERVER]
    with contextlib.ExitStack() as servers:

        def start() -> subprocess.Popen[str]:
            server = subprocess.Popen(
                words_of_server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            servers.enter_context(server)
            servers.callback(end, server)
            return server

        def end(server: subprocess.Popen[str]) -> None:
            """At once, with the run that is under way: nothing is lost, and torch's slow exit is saved."""
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)

        running = [start()]

        def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
            server = running[0]
            assert server.stdin is not None and server.stdout is not None
            task = {"words": ["bench", *words], "variables": variables} | {name: str(files[name]) for name in files}
            server.stdin.write(json.dumps(task) + "\n")
            server.stdin.flush()
            if not select.select([server.stdout], [], [], 120)[0]:
                end(server)
                running[0] = start()  # the next run has nothing to do with this one
                pytest.fail(f"`gradwire bench {' '.join(words)}` takes longer than 120 s")
            status = int(server.stdout.readline())
            return subprocess.CompletedProcess(
                ["gradwire", "bench", *words], status, files["stdout"].read_text(), files["stderr"].read_text()
            )

        yield run
