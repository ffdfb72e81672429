"""Law: of a rank that is killed while groups are made nothing stays, and no other waits longer than its time-out.

Four ranks, as processes of two logical nodes, make a communicator and go through a few all-reduces. One of them ends by
SIGKILL, as the kernel's out-of-memory killer does it, or because it may take no more memory from then on (RLIMIT_AS).
The store is served by a process of its own, as torchrun's is.
"""

import faulthandler
import json
import multiprocessing
import os
import re
import resource
import signal
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from gradwire.bench.studies.shared.store import serve_store
from gradwire.comms.bootstrap.compat import TCPStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config

NODES = "aabb"
TIMEOUT = timedelta(seconds=3)
GRACE_SECONDS = 25.0
"""Seconds after the timeout from which on a rank counts as hanging: for a busy machine, and because survivors wait for
the report of a stuck rank (`PATIENCE` of comms/bootstrap/failure_reporter.py)."""

ALL_REDUCES = 3
NUMEL = 1 << 16
SHARED = Path("/dev/shm")
LEAVING_SECONDS = 10.0
"""Longest wait until gradwire's names in /dev/shm are gone; usually that takes milliseconds, until all ranks have
mapped them. Other jobs may have names there meanwhile."""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """Describes the end of a rank that was not killed.

    Attributes:
        rank: Number of the rank.
        seconds: Seconds from the victim's end to this rank's end; from its own start if no rank was killed.
        error: Error that it raised; empty if it succeeded.
    """

    rank: int
    seconds: float
    error: str


@dataclass(frozen=True, slots=True)
class Round:
    """Describes one start of four ranks of which one ended early.

    Attributes:
        victim: Number of the rank that ended.
        how: Cause of its end: `kill` (SIGKILL) or `memory` (no more memory).
        after_seconds: Seconds from the start to the victim's end.
        ended: True if the victim ended before the others had finished.
        survivors: Ends of the other ranks; those that hang or crashed are missing.
        left: Names of gradwire in /dev/shm that were not there before, and stay.
        crashed: Survivor that ended without a report -> its exit code, negative for a signal.
        traces: Survivor that hangs or crashed -> stack traces of its threads.
    """

    victim: int
    how: str
    after_seconds: float
    ended: bool
    survivors: list[RankEnd]
    left: list[str]
    crashed: dict[int, int]
    traces: dict[int, str]

    @property
    def hanging(self) -> int:
        """Returns the number of survivors that had not ended after the timeout and the grace."""
        return len(NODES) - 1 - len(self.survivors) - len(self.crashed)

    @property
    def naming(self) -> int:
        """Returns the number of survivors whose error names the victim, as lost or (without memory) by its report."""
        spoke = "(?! (?:of \\d+ )?(?:could|cannot|saw))" if self.how == "kill" else ""
        words = re.compile(rf"\brank (?:\d+, )*{self.victim}\b{spoke}")
        return sum(bool(words.search(each.error)) for each in self.survivors)


def _rank(rank: int, port: int, victim: int, after_seconds: float, how: str, folder: Path) -> None:
    """Runs one rank in its own process: makes a communicator and all-reduces; writes its end to a file.

    Args:
        rank: Number of this rank.
        port: Port of the ranks' store.
        victim: Number of the rank that ends early; -1 if none.
        after_seconds: Seconds from the start to the victim's end.
        how: `kill` or `memory`.
        folder: Folder for the files with ends and traces.
    """
    torch.set_num_threads(1)
    told = (folder / f"{rank}.trace").open("w")
    faulthandler.enable(told)
    faulthandler.dump_traceback_later(after_seconds + TIMEOUT.total_seconds() + GRACE_SECONDS - 1.0, file=told)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store.add("here", 1)
    while store.add("here", 0) < len(NODES):
        time.sleep(0.005)
    began = time.monotonic()

    def end() -> None:
        (folder / "ended").write_text(str(time.monotonic()))
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (taken, taken))

    if rank == victim:
        timer = threading.Timer(after_seconds, end)
        timer.daemon = True
        timer.start()
    error = ""
    communicator = None
    try:
        config = Config(hostname=f"node-{NODES[rank]}", timeout=TIMEOUT)
        communicator = Communicator(store, rank, len(NODES), torch.device("cpu"), config, name="start")
        for _ in range(ALL_REDUCES):
            communicator.all_reduce(torch.ones(NUMEL)).wait()
    except Exception as raised:  # noqa: BLE001 - without memory it may be anything
        error = f"{type(raised).__name__}: {raised}".split("\n\nAt:")[0]
    if rank != victim or how == "memory":
        now, note = time.monotonic(), folder / "ended"
        since = float(note.read_text() or began) if note.exists() else began
        (folder / f"{rank}.json").write_text(json.dumps(asdict(RankEnd(rank, now - since, error))))
    # Not closed in order: an error is followed by the end of the process in most jobs.
    os._exit(0 if not error else 1)


def one_round(victim: int, after_seconds: float, how: str = "kill") -> Round:
    """Starts four ranks of which one ends early, and returns what became of all of them.

    Args:
        victim: Number of the rank that ends; -1 for a start without such a rank.
        after_seconds: Seconds from the start to its end.
        how: Cause of the end: `kill` (SIGKILL) or `memory` (no more memory).
    """
    before = _segments()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="gradwire-kills-") as name, serve_store() as (port, _):
        folder = Path(name)
        ranks = [
            context.Process(target=_rank, args=(rank, port, victim, after_seconds, how, folder), daemon=True)
            for rank in range(len(NODES))
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + after_seconds + TIMEOUT.total_seconds() + GRACE_SECONDS
        for rank, process in enumerate(ranks):
            if rank != victim:
                process.join(max(0.0, deadline - time.monotonic()))
        codes = {rank: process.exitcode for rank, process in enumerate(ranks) if rank != victim}
        for process in ranks:
            process.kill()
            process.join()
        survivors = [
            RankEnd(**json.loads((folder / f"{rank}.json").read_text()))
            for rank in range(len(NODES))
            if rank != victim and (folder / f"{rank}.json").exists()
        ]
        traces = {rank: (folder / f"{rank}.trace").read_text() for rank in codes if (folder / f"{rank}.trace").exists()}
        ended = (folder / "ended").exists()
    said = {each.rank for each in survivors}
    crashed = {rank: code for rank, code in codes.items() if code is not None and rank not in said}
    left = _left_since(before)
    traces = {rank: trace for rank, trace in traces.items() if rank not in said}
    return Round(victim, how, after_seconds, ended, survivors, left, crashed, traces)


def _segments() -> set[str]:
    return {path.name for path in SHARED.glob("gradwire-*")}


def _left_since(before: set[str]) -> list[str]:
    left, deadline = _segments() - before, time.monotonic() + LEAVING_SECONDS
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left &= _segments()
    return sorted(left)


@pytest.mark.parametrize(("victim", "how"), [(1, "kill"), (2, "memory")])
def test_a_rank_that_ends_at_once_is_named_and_nothing_stays(victim: int, how: str) -> None:
    found = one_round(victim, 0.0, how)
    assert found.ended and found.hanging == 0 and found.left == [] and not found.crashed, found
    assert found.naming == 3 or not any(each.error for each in found.survivors), found
