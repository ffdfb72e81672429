"""Where the stand-in is: its tests run in its environment, and are skipped with the reason elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpu_standin.calls import is_standin
from support.forked import ForkServer, Ranks, fork_server

JOBS = Path(__file__).parent / "jobs"
SECONDS = 120
"""Few of the jobs take a tenth of it alone on a machine."""


def missing() -> str | None:
    """Why the stand-in cannot be used here."""
    if not is_standin():
        return "runs in the environment of the GPU stand-in: make test-gpu-standin"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "gpu_standin" in config.getoption("--require") and (reason := missing()) is not None:
        raise pytest.UsageError(f"`--require=gpu_standin` was given, but this Python is not the stand-in's: {reason}")
    reason = missing()
    for item in items:
        if item.nodeid.startswith("tests/gpu_standin/"):
            item.add_marker(pytest.mark.gpu_standin)
            item.add_marker(pytest.mark.slow)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@dataclass(frozen=True)
class Jobs:
    """Runs the scripts in jobs/: those that use ctypes alone as processes, those that need torch forked."""

    folder: Path
    server: ForkServer | None = None
    seconds: float = SECONDS
    """Then ranks that are still there are killed."""

    def run(self, script: str, *arguments: str, ranks: int = 1, **environment: str) -> Ranks:
        """Runs a script as so many ranks; GPU_STANDIN_... and other variables are `environment`."""
        if self.server is not None:
            return self.server.run(JOBS / script, arguments, ranks, self.folder, self.seconds, **environment)
        return self._run_processes(script, arguments, ranks, environment)

    def _run_processes(self, script: str, arguments: Sequence[str], ranks: int, environment: dict[str, str]) -> Ranks:
        paths = os.pathsep.join([str(JOBS.parents[1]), os.environ.get("PYTHONPATH", "")])
        processes = []
        for rank in range(ranks):
            variables = {
                "PYTHONPATH": paths,
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "JOB_FOLDER": str(self.folder),
            }
            with (
                (self.folder / f"output{rank}").open("wb") as output,
                (self.folder / f"errors{rank}").open("wb") as errors,
            ):
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(JOBS / script), *arguments],
                        stdout=output,
                        stderr=errors,
                        env=os.environ | variables | environment,
                    )
                )
        statuses = []
        for process in processes:
            try:
                statuses.append(process.wait(self.seconds))
            except subprocess.TimeoutExpired:
                process.kill()
                statuses.append(process.wait())
        read = [[(self.folder / f"{name}{rank}").read_text() for rank in range(ranks)] for name in ("output", "errors")]
        return Ranks(statuses, *read)


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    """Runs scripts that need no torch."""
    return Jobs(tmp_path)


@pytest.fixture(scope="session")
def standin_server() -> Iterator[ForkServer]:
    """A process that has imported torch once."""
    with fork_server(PYTHONPATH=os.pathsep.join([str(JOBS.parents[1]), os.environ.get("PYTHONPATH", "")])) as server:
        yield server


@pytest.fixture
def torch_jobs(tmp_path: Path, standin_server: ForkServer) -> Jobs:
    """Runs scripts that need torch."""
    return Jobs(tmp_path, standin_server)
