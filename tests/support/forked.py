"""Scripts as ranks of one machine, forked by a process that has imported torch once; torchrun imports it in each."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gradwire.bench.emulation.launch import held_port

SERVER = """
import gc, importlib, json, os, runpy, sys, time, traceback

gc.disable()
for name in sys.argv[1:]:
    importlib.import_module(name)
gc.freeze()  # ranks that collect do not walk, and so copy, all that was imported
gc.enable()


def rank_main(task, rank):
    os.environ.update(task["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(task["folder"])
    for descriptor, name in ((1, f"output{rank}"), (2, f"errors{rank}")):
        with open(name, "wb") as file:
            os.dup2(file.fileno(), descriptor)
    sys.argv = [task["script"], *task["arguments"]]
    sys.path[0] = os.path.dirname(task["script"])
    sys.stdout.reconfigure(line_buffering=True)
    status = 1
    try:
        runpy.run_path(task["script"], run_name="__main__")
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


for line in sys.stdin:
    task = json.loads(line)
    ranks = []
    for rank in range(task["ranks"]):
        pid = os.fork()
        if not pid:
            rank_main(task, rank)
        ranks.append(pid)
    statuses, deadline = {}, time.monotonic() + task["seconds"]
    while len(statuses) < len(ranks):
        for pid in set(ranks) - statuses.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, 9)
        time.sleep(0.01)
    print(json.dumps([statuses[pid] for pid in ranks]), flush=True)
"""
"""Reads tasks, forks their ranks, and answers with the exit codes."""

TORCH = ("torch._dynamo",)
"""What the first DDP model imports."""
GRADWIRE = (
    *TORCH,
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "gradwire.comms.backend.process_group",
    "gradwire.comms.hook",
)

SECONDS = 120
"""Then ranks that are still there are killed, where nothing else is asked for."""


@dataclass(frozen=True)
class Ranks:
    """How the ranks of a script ended.

    Attributes:
        statuses: Their exit codes.
        outputs: What each printed.
        errors: What each wrote to stderr.
    """

    statuses: list[int]
    outputs: list[str]
    errors: list[str]


class ForkServer:
    """Runs scripts; see `fork_server`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(
        self,
        script: Path,
        arguments: Sequence[str],
        ranks: int,
        folder: Path,
        seconds: float = SECONDS,
        **environment: str,
    ) -> Ranks:
        """Runs a script as so many ranks, in a folder, with the variables that torchrun sets, and others.

        Args:
            script: What `python` would run.
            arguments: Of its command line.
            ranks: How many.
            folder: Where they run, and where their output goes.
            seconds: Then ranks that are still there are killed.
            **environment: Other variables.
        """
        with held_port() as port:
            variables = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "OMP_NUM_THREADS": "1",
            }
            task = {
                "script": str(script),
                "arguments": list(arguments),
                "folder": str(folder),
                "ranks": ranks,
                "environment": variables | environment,
                "seconds": seconds,
            }
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
            statuses = json.loads(self._process.stdout.readline())
        outputs, errors = (
            [(folder / f"{name}{rank}").read_text() for rank in range(ranks)] for name in ("output", "errors")
        )
        return Ranks(statuses, outputs, errors)


@contextmanager
def fork_server(imported: Sequence[str] = GRADWIRE, **environment: str) -> Iterator[ForkServer]:
    """A server that has imported some modules under these variables, and is gone afterwards.

    Args:
        imported: Full names; its ranks have them already.
        **environment: Variables.
    """
    words = [sys.executable, "-c", SERVER, *imported]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
    ) as process:
        yield ForkServer(process)
        assert process.stdin is not None
        process.stdin.close()
