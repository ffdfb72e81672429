"""Failure state of one group of ranks: which ranks failed, why, and who reported it.

Three objects share a failure on a rank. `GroupFailures` here holds what is known of the group: detectors call its
`report()` or are sources that it polls, and blocking waits poll it. A `FailureReporter` (failure_reporter.py) tells the
other ranks and asks them who is missing. A `FailureHandler` (run/failure_handler.py) aborts this rank's collectives and
keeps the error that they raise. A failure is one `PeerFailure`, whatever detects it and however it is sent:

| source | who knows | detected by |
|---|---|---|
| `ended` | a kernel: port not listening, or connection closed | liveness.py, ring_connections.py, probe.py |
| `broken` | a kernel: a connection has ended, though the process at its other end has not | liveness.py |
| `left` | the rank itself, which shut down before an operation that needs it | ring_connections.py |
| `silent` | a neighbour that has received nothing for long, while all ranks wait | liveness.py |
| `absent`, `unreached` | a neighbour of a rank that has not joined, or is unreachable | ring_connections.py |
| `overdue` | a timeout, of work on a device or of connecting | deadline.py; transport/nccl.py |
| `failed` | an operation of this rank that raised | run/failure_handler.py, elastic/resilient_ops.py |
| `over` | the ranks, which have agreed to continue with other members | elastic/membership.py |

A job on CPUs mostly learns of an exit by a collective of its own, which raises: `failed`. How the exit of a rank shows:

- In shared memory the rank's record lock is gone. Ranks that wait for it look every 100 ms (csrc/cpu/shm/wait.cpp), and
  wake the others of the node. Their collectives raise a `PeerError` that names the rank. If the rank has closed the
  group, they first wait up to 5 s for the end of its process, because launchers show the error of who ends first.
- Over gloo, and over the `Streams` of transport/parallel_tcp.py, the kernel closes the rank's sockets. Collectives of
  the ranks at the other ends raise at once: a plain RuntimeError, which names no rank.
- Other waits for gloo and `Streams`, and all for MPI, see nothing. They ask `abort_reason` of the reporter about once
  a second (`SLICE` of transport/works.py), and raise a `PeerError` after the first report of another rank. A host that
  is lost closes no connection: without a report these waits end by `timeout`.
- NCCL sees nothing. The liveness ring does, within a second; after 11 s if a host is lost.
- While ranks connect, `PeerWait` of probe.py probes those that have not come, after 1, 2, 4, ... 15 s.

What is raised on one rank while it lives, in the hook before anything is sent (planning, packing, a listener) or in the
script itself, is told to nobody: on all ranks alike it is no failure of the group, and training can go on. If it was on
one rank alone and ends the process, the others learn of it as of any exit. If the script catches it, they wait for this
rank until `timeout`. What fails in a lane, or on CUDA in `StreamExecutor.start` or `release`, is told at once.

So an exit is noticed at the next collective with that rank, unless there is a ring: on CUDA, and in elastic training.
A process that is stopped, but has not exited, is noticed by heartbeats in elastic training (10 s), else by `timeout`.

The first `PeerFailure` ends the group. It is sent to the other ranks through the store, along the liveness ring and to
the probe servers, in one format. Which ranks are missing is then decided in one of two ways. The reporter of
failure_reporter.py collects the reports of the ranks that live, and ends the job; elastic/membership.py has them agree
on who goes on. They stay two because the results bind differently. The reporter's is part of an error message, so a
rank that gets none, or has lost the store, makes one of its own. The members' says who trains on: it must be the same
on all ranks even if the rank that writes it fails, and a report that comes too late does not count. Both ask
`kernel.listener_state` if a process has exited: nothing else counts as an exit but a connection or a record lock that
its kernel closed, or silence for long.

How long the reporter takes, from the first report to the error on every rank (constants of failure_reporter.py): other
ranks poll the abort signal each second (more rarely above 2048 ranks), so about 1 s if shared memory has named the
ranks that are gone; about 3 s if they are found by probing what is silent after `PROBE_AFTER` and a poll (2 s + 1 s);
at most `PATIENCE` and two polls (15 s + 1 s + 1 s) if neither finds them, as on a host that is lost. Without the store,
whose requests end after `STORE_PATIENCE` (5 s), each rank probes some peers itself.

A training script sees a RuntimeError, at the end of `loss.backward()`. On CPUs it comes out of a future, which keeps no
types: a plain RuntimeError with the text of the CollectiveError. It is the CollectiveError itself, a subclass, where no
future passes it: with a compressor in each later step; and on CUDA, where the host is ahead of the device: what was
averaged is undefined, one element of the step's last bucket becomes NaN, and the next use of the hook raises.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from gradwire.comms.boundary.messages import MessageType, Most, Rank
from gradwire.comms.errors import OverdueError, PeerError

ENDED, BROKEN, LEFT, SILENT, ABSENT = "ended", "broken", "left", "silent", "absent"
UNREACHED, OVERDUE, FAILED, OVER = "unreached", "overdue", "failed", "over"
"""Sources of a failure; see the table above."""

LONGEST_REASON = 1000
"""Characters of a reason that is sent to other ranks; longer ones are cut."""

MOST_RANKS = 64
"""Failed ranks that are named to other ranks, at most."""

LONGEST_FAILURE_NBYTES = 1 << 16
"""Bytes of a packed failure that are accepted from another rank, at most."""

_SourceName = Literal["ended", "broken", "left", "silent", "absent", "unreached", "overdue", "failed", "over"]

_FAILURE: MessageType[tuple[str, _SourceName, tuple[int, ...], int | None]] = MessageType(
    tuple[
        Annotated[str, Most(LONGEST_REASON)], _SourceName, Annotated[tuple[Rank, ...], Most(MOST_RANKS)], Rank | None
    ],
    most_nbytes=LONGEST_FAILURE_NBYTES,
)
"""A packed failure: reason, source, failed ranks, and the rank that reported it first."""


class PeerFailureError(PeerError):
    """Raised when a `PeerFailure` ends an operation.

    Args:
        failure: The failure; kept as an attribute.
    """

    def __init__(self, failure: "PeerFailure") -> None:
        super().__init__(failure.reason, failure.ranks)
        self.failure = failure

    def __reduce__(self) -> tuple[type["PeerFailureError"], tuple["PeerFailure"]]:  # type: ignore[override]
        """Pickles this together with the failure."""
        return type(self), (self.failure,)


@dataclass(frozen=True, slots=True)
class PeerFailure:
    """Reason why ranks that wait for each other cannot continue.

    Attributes:
        reason: One line of text.
        source: How the failure was detected; see the table of this module.
        ranks: Failed ranks, as the group numbers them; empty if unknown.
        reported_by: Rank that reported the failure first; None if that is this rank, or unknown.
        since: `time.time()` at which this rank learned of it.
    """

    reason: str
    source: str
    ranks: tuple[int, ...] = ()
    reported_by: int | None = None
    since: float = field(default_factory=time.time, compare=False)

    @classmethod
    def of(cls, error: BaseException) -> "PeerFailure":
        """Returns the failure of a `PeerFailureError`; for any other exception it makes one.

        Its reason is the first line of the message, or the name of the exception's type if there is no message. Its
        source is `overdue` for an `OverdueError`, else `failed`. Its ranks are those that a `PeerError` names as
        missing, else none.
        """
        if isinstance(error, PeerFailureError):
            return error.failure
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        source = OVERDUE if isinstance(error, OverdueError) else FAILED
        return cls(reason, source, error.missing if isinstance(error, PeerError) else ())

    @classmethod
    def unpacked(cls, data: bytes) -> "PeerFailure":
        """Parses what `packed` returned on another rank.

        Raises:
            MessageError: The bytes are malformed.
        """
        return cls(*_FAILURE.read(data))

    def packed(self, rank: int) -> bytes:
        """Serializes the failure for another rank: reason, source, failed ranks and the rank that reported it first.

        The reason is cut to 1000 characters, and the ranks to the first 64. `since` is not sent: each rank notes its
        own.

        Args:
            rank: This rank, which is sent as `reported_by` unless another rank has reported the failure first.

        Returns:
            JSON, which `unpacked` reads.
        """
        by = rank if self.reported_by is None else self.reported_by
        return json.dumps([self.reason[:LONGEST_REASON], self.source, self.ranks[:MOST_RANKS], by]).encode()


Source = Callable[[], PeerFailure | None]
"""Returns a failure that it knows of; None if there is none. Polled by `GroupFailures.poll` or by a liveness ring."""


class GroupFailures:
    """Failures among the ranks of one group, as far as this rank knows. The first one ends the group.

    Thread safety: all methods may be called from any thread.

    Args:
        sources: Polled by `poll`, in this order, as long as no failure is known.
        send: Sends the other ranks the failure that ended the group, unless it is `known_to_all` (see `report`).

    Attributes:
        first: The failure that ended the group; None if there is none.
        ranks: All ranks known to have failed.
        send: Function that sends a failure to the other ranks; may be replaced before the first failure.
    """

    def __init__(
        self, sources: Iterable[Source] = (), send: Callable[[PeerFailure], None] = lambda failure: None
    ) -> None:
        self.first: PeerFailure | None = None
        self.ranks: set[int] = set()
        self.send = send
        self._sources = list(sources)
        self._lock = threading.Lock()  # Guards the change of `first` and `ranks`; reads need no lock.

    def add_source(self, source: Source) -> None:
        """Adds a source that `poll` asks after all others."""
        self._sources.append(source)

    def poll(self) -> PeerFailure | None:
        """Returns the failure that ended the group; None if there is none.

        If none is known yet, the sources are asked. The first failure that one returns is recorded, and not sent to the
        other ranks.
        """
        if self.first is not None:
            return self.first
        found = next((failure for source in self._sources if (failure := source()) is not None), None)
        return None if found is None else self.report(found, known_to_all=True)

    def report(self, failure: PeerFailure, *, known_to_all: bool = False) -> PeerFailure:
        """Records a failure and its ranks; the first one ends the group, and is passed to `send`.

        Args:
            failure: The failure.
            known_to_all: The other ranks learn of it by themselves, so `send` is not called.

        Returns:
            The first failure of the group.
        """
        with self._lock:
            self.ranks.update(failure.ranks)
            first = self.first = self.first or failure
        if first is failure and not known_to_all:
            self.send(failure)
        return first
