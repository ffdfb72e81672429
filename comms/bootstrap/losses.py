"""Which ranks are lost, why, since when, and who says so: one object for the ranks that wait for each other.

Whatever notices a loss puts a `Loss` into the group's `Losses`, or is asked for one by it; whoever waits asks `Losses`.

| source | what says so | noticed by |
|---|---|---|
| `ended` | a kernel: of a process at whose port nobody listens, or whose connection it closed | liveness.py, probe.py |
| `broken` | a kernel: of a connection that has ended, though the process at its other end has not | liveness.py |
| `left` | the rank itself, before an operation that takes it | liveness.py |
| `silent` | a neighbour that has heard nothing for long, while all wait | liveness.py |
| `absent`, `unreached` | a neighbour, of a rank that has not come, or that cannot be connected to | liveness.py |
| `overdue` | the time-out, of work on a device or of connecting | liveness.py: `Deadline`; transport/nccl.py |
| `failed` | an operation that failed here, whatever it raised | run/failure_handler.py, elastic/resilient_ops.py |
| `over` | the ranks, which have agreed to go on as others | elastic/membership.py |

The first `Loss` is what the group ends with, and what is told to the other ranks: through the store, along the ring, to
the probe servers, in one form. Who is missing is then decided in one of two ways. The board of failure.py collects the
words of those that live, and ends the job; elastic/membership.py has them agree on who goes on.
They stay two because what they
find binds differently: the board's verdict is part of an error message, so a rank that hears none, or has lost the
store, finds one for itself, from what each rank saw. Members' verdict is who trains on, so it has to be one for all
even where the rank that writes it down is lost, and a word that comes too late does not count. Both ask
`kernel.look_at` if a process has ended: nothing else counts as an end but a connection that its kernel closed, or
silence for long. Transports raise a PeerError of what their own connections say, and ask a board's `alarm` while they
wait.
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

LONGEST_REASON = 1000
"""Characters of a reason that is told to others."""

MOST_RANKS = 64
"""Ranks that are named to others, at most."""

LONGEST_WORD_NBYTES = 1 << 16
"""Most bytes of a loss that another rank tells."""

_SourceName = Literal["ended", "broken", "left", "silent", "absent", "unreached", "overdue", "failed", "over"]

_LOSS: MessageType[tuple[str, _SourceName, tuple[int, ...], int | None]] = MessageType(
    tuple[
        Annotated[str, Most(LONGEST_REASON)], _SourceName, Annotated[tuple[Rank, ...], Most(MOST_RANKS)], Rank | None
    ],
    most_nbytes=LONGEST_WORD_NBYTES,
)
"""Its reason, its source, the ranks that are gone, and the one that said so first."""


class LostError(PeerError):
    """A rank is lost, as the source says that `loss` names.

    Args:
        loss: What is known.
    """

    def __init__(self, loss: "Loss") -> None:
        super().__init__(loss.reason, loss.ranks)
        self.loss = loss

    def __reduce__(self) -> tuple[type["LostError"], tuple["Loss"]]:  # type: ignore[override]
        """Pickles with what is known."""
        return type(self), (self.loss,)


@dataclass(frozen=True, slots=True)
class Loss:
    """Why ranks that wait for each other cannot go on.

    Attributes:
        reason: In words, one line.
        source: What says so; see above.
        ranks: Those that are gone, as the group numbers them; empty where they are not known.
        said_by: The rank that was the first to say so; None: this one, or nobody knows.
        since: When this rank has heard of it, by time.time().
    """

    reason: str
    source: str
    ranks: tuple[int, ...] = ()
    said_by: int | None = None
    since: float = field(default_factory=time.time, compare=False)

    @classmethod
    def of(cls, error: BaseException) -> "Loss":
        """What an error says of other ranks."""
        if isinstance(error, LostError):
            return error.loss
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        source = OVERDUE if isinstance(error, OverdueError) else FAILED
        return cls(reason, source, error.missing if isinstance(error, PeerError) else ())

    @classmethod
    def unpacked(cls, said: bytes) -> "Loss":
        """What another rank has told.

        Raises:
            MessageError: It is something else.
        """
        return cls(*_LOSS.read(said))

    def packed(self, teller: int) -> bytes:
        """What is told to another rank.

        Args:
            teller: This rank: the first to say so where no other one has told it.
        """
        by = teller if self.said_by is None else self.said_by
        return json.dumps([self.reason[:LONGEST_REASON], self.source, self.ranks[:MOST_RANKS], by]).encode()


Source = Callable[[], Loss | None]
"""Says what it knows; None where nobody is lost."""


class Losses:
    """What one rank knows of losses among the ranks of one group. Any thread.

    Args:
        sources: Asked in this order by `look`, while nothing is known.
        tell: Tells the other ranks what this one is the first here to know of.

    Attributes:
        first: Why the group is over; None while it is not.
        ranks: All that are known to be gone.
    """

    def __init__(self, sources: Iterable[Source] = (), tell: Callable[[Loss], None] = lambda loss: None) -> None:
        self.first: Loss | None = None
        self.ranks: set[int] = set()
        self.tell = tell
        self._sources = list(sources)
        self._lock = threading.Lock()

    def ask(self, source: Source) -> None:
        """Has `look` ask one more."""
        self._sources.append(source)

    def look(self) -> Loss | None:
        """Why the group is over, as far as this rank knows or its sources say."""
        if self.first is not None:
            return self.first
        found = next((loss for source in self._sources if (loss := source()) is not None), None)
        return None if found is None else self.take(found, told=True)

    def take(self, loss: Loss, *, told: bool = False) -> Loss:
        """Takes in what a source says; the first one counts.

        Args:
            loss: What.
            told: The other ranks hear of it by themselves.

        Returns:
            The first one.
        """
        with self._lock:
            self.ranks.update(loss.ranks)
            first = self.first = self.first or loss
        if first is loss and not told:
            self.tell(loss)
        return first
