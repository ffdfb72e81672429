"""Start of ranks as processes, with their output and exit statuses; none is left behind."""

import math
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import P_PID, WEXITED, WNOHANG, WNOWAIT, close, killpg, pidfd_open, waitid
from pathlib import Path
from typing import Self

from gradwire.bench.emulation.placement import Order, Placement, place_ranks, torchrun_environment

TERMINATE_SECONDS = 5.0
"""Seconds that a rank has to end after SIGTERM before it is killed."""

ASK_SECONDS = 1.0
"""Seconds between two calls of the callback that says whether all ranks are to be ended."""

RankLine = Callable[[int, str], None]
"""Callback with (rank, line without its newline) for every line that a rank prints, from one thread for each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """Exit statuses and output of the ranks of a job."""

    returncodes: tuple[int, ...]
    """Exit statuses by rank, as subprocess gives them: -9 for a rank that SIGKILL ended."""
    output: tuple[str, ...]
    """Output of each rank, stdout and stderr in the order printed; empty if the ranks wrote it themselves (`raw`)."""
    seconds: float
    """Seconds from the first rank's start to the last rank's end."""
    first_failure: int | None
    """The rank that failed first in time; None if none did."""
    timed_out: bool
    """Whether the job was stopped because its time was up."""

    @property
    def exit_status(self) -> int:
        """Status of the rank that failed first in time, as a shell writes it; 124 after a time-out, otherwise 0.

        A rank that a signal ended has 128 + signal.
        """
        if self.first_failure is None:
            return 124 if self.timed_out else 0
        returncode = self.returncodes[self.first_failure]
        return returncode if returncode > 0 else 128 - returncode

    def check(self) -> None:
        """Raises RuntimeError if a rank failed or the time was up, with the last lines of the first rank that failed.

        After a time-out without such a rank they are those of rank 0. A rank that `Ranks` itself has ended, because of
        another one, has not failed.
        """
        if self.exit_status == 0:
            return
        rank = self.first_failure if self.first_failure is not None else 0
        cause = f"rank {rank} failed" if self.first_failure is not None else "the time was up"
        tail = "\n".join(self.output[rank].splitlines()[-40:])
        raise RuntimeError(f"{cause}; statuses by rank {list(self.returncodes)}; rank {rank} printed last:\n{tail}")


class Ranks:
    """Processes of the ranks of a job; leaving the `with` block ends those that still run."""

    def __init__(self, argvs: Sequence[Sequence[str]], *, raw: bool = False, on_line: RankLine | None = None) -> None:
        """Starts a process for each rank, each in its own session, so that signals reach its children too.

        Args:
            argvs: Command line of each rank, by rank.
            raw: Whether the ranks write to this process's stdout and stderr themselves; no output is collected then.
            on_line: Callback for every line printed; not called with `raw`.
        """
        self._started = time.monotonic()
        self._lines: list[list[str]] = [[] for _ in argvs]
        self._readers: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._first_failure: int | None = None
        self._on_line = on_line
        self._line_error: Exception | None = None
        try:
            for rank, argv in enumerate(argvs):
                self._start(rank, argv, raw)
        except BaseException:
            self.stop(0.0)
            raise

    def _start(self, rank: int, argv: Sequence[str], raw: bool) -> None:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=None if raw else subprocess.PIPE,
            stderr=None if raw else subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._processes.append(process)
        if process.stdout is not None:
            reader = threading.Thread(target=self._read, args=(rank, process), daemon=True, name=f"rank {rank} output")
            self._readers.append(reader)
            reader.start()

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines[rank].append(line)
            if self._on_line is not None:
                try:
                    self._on_line(rank, line.rstrip("\n"))
                except Exception as error:  # noqa: BLE001 - `wait` raises it; unread, a rank would stand still
                    self._line_error = self._line_error or error

    def wait(
        self,
        timeout_seconds: float | None,
        grace_seconds: float,
        needed: Sequence[int] = (),
        stop: Callable[[], bool] | None = None,
    ) -> JobOutcome:
        """Waits until every rank has ended, or ends those that run too long; returns their statuses and output.

        Args:
            timeout_seconds: Time limit of the whole job since its start; None for no limit.
            grace_seconds: Seconds for which the others may go on after the first rank failed, to print their errors.
            needed: Process IDs of children of this process; if one of them ends, all ranks are ended at once.
            stop: Callback that is asked once in `ASK_SECONDS`; once it returns True, all ranks are ended.

        Raises:
            Exception: The first exception that `on_line` raised, once all ranks have ended.
        """
        limit = float("inf") if timeout_seconds is None else self._started + timeout_seconds
        deadline = limit
        while (
            self._running()
            and time.monotonic() < deadline
            and not any(map(_has_ended, needed))
            and not (stop is not None and stop())
        ):
            if self._first_failure is not None:
                # From the first failure on; later rounds do not prolong it.
                deadline = min(deadline, time.monotonic() + grace_seconds)
                grace_seconds = float("inf")
            asked_again = math.inf if stop is None else time.monotonic() + ASK_SECONDS
            self._wait_for_an_end(min(deadline, asked_again), needed)
        timed_out = bool(self._running()) and time.monotonic() >= limit
        self.stop()
        for reader in self._readers:
            # A daemon that a rank left behind may hold the pipe open; the ranks' own lines are in by then.
            reader.join(timeout=2.0)
        if self._line_error is not None:
            raise self._line_error
        return JobOutcome(
            returncodes=tuple(process.wait() for process in self._processes),
            output=tuple("".join(lines) for lines in self._lines),
            seconds=time.monotonic() - self._started,
            first_failure=self._first_failure,
            timed_out=timed_out,
        )

    def _running(self) -> list[int]:
        """Returns the ranks that still run, and records the first one that is seen to have failed."""
        running = []
        for rank, process in enumerate(self._processes):
            returncode = process.poll()
            if returncode is None:
                running.append(rank)
            elif returncode != 0 and self._first_failure is None:
                self._first_failure = rank
        return running

    def _wait_for_an_end(self, deadline: float, needed: Sequence[int] = ()) -> None:
        """Sleeps until a running rank or a needed process ends, or the deadline (monotonic seconds) has come."""
        running = [process.pid for process in self._processes if process.returncode is None]
        descriptors = [pidfd_open(pid) for pid in (*running, *needed)]
        try:
            poller = select.poll()
            for descriptor in descriptors:
                poller.register(descriptor, select.POLLIN)
            left = deadline - time.monotonic()
            poller.poll(None if left == float("inf") else max(0.0, left) * 1000)
        finally:
            for descriptor in descriptors:
                close(descriptor)
        self._running()

    def stop(self, terminate_seconds: float = TERMINATE_SECONDS) -> None:
        """Ends the ranks that still run: SIGTERM, then SIGKILL for those that have not left in time."""
        failure = self._first_failure
        if self._running() and terminate_seconds > 0:
            failure = self._first_failure
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + terminate_seconds
            while self._running() and time.monotonic() < deadline:
                self._wait_for_an_end(deadline)
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        # A rank that was ended from here did not fail.
        self._first_failure = failure

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._running():
            killpg(self._processes[rank].pid, number)

    def __enter__(self) -> Self:
        """Returns the ranks themselves, for `with`."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Ends the ranks that still run."""
        self.stop()


def _has_ended(pid: int) -> bool:
    """Returns whether a child of this process has ended, without reaping it.

    Args:
        pid: Process ID of the child.
    """
    # Source: waitid(2): with WNOHANG and nothing to report it returns no result.
    return waitid(P_PID, pid, WEXITED | WNOHANG | WNOWAIT) is not None


@contextmanager
def held_port() -> Iterator[int]:
    """Reserves a TCP port of this host inside the block, on which a rank's store can listen; yields its number.

    Source: socket(7): with SO_REUSEADDR, as torch's TCPStore sets it, two sockets may be bound to a port as long as
    none of them listens; ip(7): a bound port is chosen neither for a connection nor for who asks for any.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def run_logical(
    nodes: Sequence[int],
    command: Sequence[str],
    *,
    order: Order = "contiguous",
    timeout_seconds: float | None = None,
    grace_seconds: float = 30.0,
    environment: Mapping[str, str] | Callable[[Placement], Mapping[str, str]] | None = None,
    on_line: RankLine | None = None,
) -> JobOutcome:
    """Runs a command as every rank on this machine, with torchrun's variables and a node's name for gradwire.

    Args:
        nodes: Number of ranks of each node; GRADWIRE_HOSTNAME tells gradwire which ranks share one.
        command: Program and arguments.
        order: Order in which ranks are assigned to nodes.
        timeout_seconds: Time limit of the whole job; None for no limit.
        grace_seconds: Seconds for which the other ranks may go on after one has failed.
        environment: Environment variables to set, which replace the others; or a function that returns them for a
            rank's placement.
        on_line: Callback with (rank, line) for every line printed.

    Returns:
        Exit statuses and output of the ranks; a failed rank raises no exception here, but in `JobOutcome.check`.
    """
    placements = place_ranks(nodes, order)
    with held_port() as port:
        argvs = []
        for placement in placements:
            variables = torchrun_environment(
                placement, placements, master_address="127.0.0.1", master_port=port, run_id=f"logical-{port}"
            )
            variables |= {
                "GRADWIRE_HOSTNAME": f"node{placement.node}",
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            }
            variables |= (environment(placement) if callable(environment) else environment) or {}
            words = [f"{name}={value}" for name, value in variables.items()]
            # The kernel ends the ranks if this process is killed.
            argvs.append(["setpriv", "--pdeathsig", "KILL", "env", *words, *command])
        with Ranks(argvs, on_line=on_line) as ranks:
            return ranks.wait(timeout_seconds, grace_seconds)


def python_module(name: str, *arguments: str) -> list[str]:
    """Returns the command line that runs a module under this interpreter.

    Args:
        name: Full name of the module.
        arguments: Arguments of the module.
    """
    return [str(Path(sys.executable)), "-m", name, *arguments]
