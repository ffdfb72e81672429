"""Runs `gradwire bench` in a process of its own, as a user does."""

import subprocess
import sys
from collections.abc import Callable

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run_bench() -> Run:
    """Returns a function that runs `gradwire bench` with the given words, and environment variables by keyword."""

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = ["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable, "-m", "gradwire"]
        return subprocess.run([*command, "bench", *words], capture_output=True, text=True, timeout=120, check=False)

    return run
