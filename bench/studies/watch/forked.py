"""Runs the ranks of a small job as forks of a process that has imported torch: forty jobs in minutes, not in hours.

They end as under torchrun: when one has failed the others get SIGTERM. Each watches itself as `GRADWIRE_WATCH=1` does.
"""

import atexit
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import IO, Any, NoReturn

import torch.distributed as dist

from gradwire.bench.emulation.signals import die_with_parent
from gradwire.bench.studies.shared.store import serve_store
from gradwire.comms.bootstrap.compat import TCPStore

GRACE_SECONDS = 30.0
"""Seconds between SIGTERM and SIGKILL. Source: torchrun's default."""

POLL_SECONDS = 0.05
RESULT = "result:"
"""Text that rank 0 prints before its result."""

_one_forks = threading.Lock()
"""Guards the start of a store and the forks of its ranks: several threads may each run a job, but one forks at a time,
so that no rank inherits another job's half-made store."""


def join(rank: int, size: int, port: int, timeout: timedelta) -> None:
    """Creates a default process group with gloo.

    Args:
        rank: Number of this rank.
        size: Number of ranks.
        port: Port of the job's store on this machine.
        timeout: Timeout of collectives.
    """
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def run_ranks(size: int, main: Callable[[int, int], None], seconds: float) -> tuple[list[int], str]:
    """Runs a function as every rank of a job, each in a forked process.

    After a rank failed, the others get SIGTERM, and SIGKILL `GRACE_SECONDS` later.

    Args:
        size: Number of ranks.
        main: Function that a rank runs, of its number and the port of the ranks' store.
        seconds: Time limit, after which all ranks are killed.

    Returns:
        (exit status of each rank, negative for a signal; output of all ranks, one after the other).
    """
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(size)]
        parent = os.getpid()
        with _one_forks:
            port, _ = stack.enter_context(serve_store())
            running = {_fork(rank, port, parent, file.fileno(), main): rank for rank, file in enumerate(files)}
        statuses = [0] * size
        until, told = time.monotonic() + seconds, False
        try:
            while running:
                for process in list(running):
                    ended, status = os.waitpid(process, os.WNOHANG)
                    if ended:
                        statuses[running.pop(process)] = os.waitstatus_to_exitcode(status)
                if any(statuses) and not told:
                    told, until = True, min(until, time.monotonic() + GRACE_SECONDS)
                    for process in running:
                        os.kill(process, signal.SIGTERM)
                if time.monotonic() > until:
                    break
                time.sleep(POLL_SECONDS)
        finally:
            for process, rank in running.items():
                os.kill(process, signal.SIGKILL)
                statuses[rank] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        return statuses, "".join(_read(file) for file in files)


def result_of(size: int, main: Callable[[int, int], None], seconds: float) -> Any:
    """Runs a job and returns the JSON value that its rank 0 printed after `RESULT`.

    Args:
        size: Number of ranks.
        main: Function that a rank runs, of its number and the port of the ranks' store.
        seconds: Time limit, after which all ranks are killed.

    Raises:
        RuntimeError: A rank failed.
    """
    statuses, text = run_ranks(size, main, seconds)
    if any(statuses):
        raise RuntimeError(f"the ranks ended with {statuses}: {text[-4000:]}")
    return json.loads(text.partition(RESULT)[2].partition("\n")[0])


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _fork(rank: int, port: int, parent: int, output: int, main: Callable[[int, int], None]) -> int:
    process = os.fork()
    if not process:
        _be_rank(rank, port, parent, output, main)
    return process


def _be_rank(rank: int, port: int, parent: int, output: int, main: Callable[[int, int], None]) -> NoReturn:
    gc.freeze()  # garbage of whoever forks may have threads that are not here, and cannot be ended
    status = 1
    try:
        die_with_parent(parent)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)  # whoever forks may have put others in their place
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        main(rank, port)
        status = 0
    finally:
        if status:
            sys.excepthook(*sys.exc_info())  # an exception is on its way
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
