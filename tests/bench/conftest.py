"""What the tests of the emulated cluster share: who lives below a process, and who holds a namespace open."""

import subprocess
import sys
import time
from collections.abc import Callable
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


@pytest.fixture(scope="session")
def run_bench() -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs `gradwire bench` with the given words, environment variables by keyword, as a user does."""

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = ["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable, "-m", "gradwire"]
        return subprocess.run([*command, "bench", *words], capture_output=True, text=True, timeout=120, check=False)

    return run
