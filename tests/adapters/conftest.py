"""Runs a script as the two ranks of a job, under the variables that torchrun sets; each rank is a node of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from gradwire.bench.emulation.launch import held_port

RANKS = 2
SECONDS = 400


class RunJob(Protocol):
    """See `run_job`."""

    def __call__(self, name: str, **variables: str) -> list[dict[str, Any]]: ...


@pytest.fixture
def run_job(tmp_path: Path) -> Iterator[RunJob]:
    """`run_job("lightning_job")` runs jobs/lightning_job.py on both ranks, and returns what each wrote.

    A job's first argument is a folder; what a rank has found it writes to `<rank>.json` there.
    """

    def run(name: str, **variables: str) -> list[dict[str, Any]]:
        common = {
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "adapters",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(Path(__file__).parent / "jobs" / f"{name}.py"), str(tmp_path)]
        ranks = []
        for rank in range(RANKS):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GRADWIRE_HOSTNAME": f"node{rank}"}
            ranks.append(
                subprocess.Popen(
                    command,
                    env=os.environ | common | own | variables,
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            said = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
        finally:
            for each in ranks:
                each.kill()
        assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(text[-4000:] for text in said)
        (tmp_path / "said.txt").write_text("\n".join(said))
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]

    with held_port() as port:
        yield run
