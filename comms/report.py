"""What travelled: calls, bytes and seconds of every phase on every level, and the plan with its reason."""

import threading
from dataclasses import dataclass, field

from gradwire.comms.plan.cost import sent_nbytes
from gradwire.comms.plan.plan import Phase
from gradwire.comms.plan.schedule import Transfer


@dataclass(slots=True)
class Row:
    """One phase of a plan, summed over all chunks of all buckets that went through it.

    Attributes:
        phase: Its place in the plan.
        op: The collective.
        level: Name of the level.
        calls: Collectives that this rank took part in.
        logical_nbytes: Bytes of gradient that this rank handed to them.
        wire_nbytes: Bytes that this rank sent, headers not counted.
        seconds: From issuing a chunk's collectives to having their result, summed; phases of different chunks overlap.
    """

    phase: int
    op: str
    level: str
    calls: int = 0
    logical_nbytes: int = 0
    wire_nbytes: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """What `HookState.report()` gives; `print` it, or read its fields.

    Attributes:
        cluster: Nodes and ranks in one line.
        plans: Each plan in use, described with its reason.
        rows: One for each phase and level.
        buckets: All-reduces run.
        steps: Backward passes seen; 0 where there is no hook.
        links: The rates that the plans are predicted with; the NIC that each local rank should drive, where it is known,
            and what speaks against it.
    """

    cluster: str
    plans: tuple[str, ...]
    rows: tuple[Row, ...]
    buckets: int
    steps: int = 0
    links: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = [
            f"{self.cluster}; {self.buckets} all-reduces in {self.steps} steps",
            *self.links,
            *self.plans,
            f"{'phase':>5}  {'collective':<15} {'level':<13} {'calls':>8} {'logical MB':>12} {'sent MB':>12} {'seconds':>10}",
        ]
        body = [
            f"{row.phase:>5}  {row.op:<15} {row.level:<13} {row.calls:>8} {row.logical_nbytes / 1e6:>12.3f} "
            f"{row.wire_nbytes / 1e6:>12.3f} {row.seconds:>10.3f}"
            for row in self.rows
        ]
        return "\n".join(head + body)


@dataclass(slots=True)
class Ledger:
    """Collects rows; every lane writes to it.

    Attributes:
        level_names: Names of the cluster's levels, innermost first.
    """

    level_names: tuple[str, ...]
    _rows: dict[tuple[int, str, str], Row] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self,
        index: int,
        phase: Phase,
        rank: int,
        transfers: list[Transfer],
        element_nbytes: int,
        seconds: float,
        wire_nbytes: float | None = None,
    ) -> None:
        """Books one chunk's phase.

        Args:
            index: The phase's place in the plan.
            phase: The phase.
            rank: This rank.
            transfers: The transfers it had a part in.
            element_nbytes: Bytes of an element.
            seconds: From issue to result.
            wire_nbytes: Bytes sent; computed from the collectives where not given (a compressor gives them).
        """
        level = "all ranks" if phase.whole else self.level_names[phase.level]
        with self._lock:
            row = self._rows.setdefault((index, phase.op, level), Row(index, phase.op, level))
            row.seconds += seconds
            for transfer in transfers:
                numel = transfer.stop - transfer.start
                row.calls += 1
                row.logical_nbytes += numel * element_nbytes
                if wire_nbytes is None:
                    place = transfer.members.index(rank)
                    row.wire_nbytes += element_nbytes * sent_nbytes(
                        transfer.op, numel, len(transfer.members), place, transfer.bounds
                    )
            row.wire_nbytes += wire_nbytes or 0.0

    def rows(self) -> tuple[Row, ...]:
        """A copy, in the order of the phases."""
        with self._lock:
            return tuple(
                Row(row.phase, row.op, row.level, row.calls, row.logical_nbytes, row.wire_nbytes, row.seconds)
                for _, row in sorted(self._rows.items())
            )
