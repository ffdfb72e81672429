"""What travelled: calls, bytes and seconds of every phase on every level, and the plan with its reason."""

from dataclasses import dataclass

from gradwire.comms.execute import PhaseTotals


@dataclass(frozen=True, slots=True)
class Report:
    """What `HookState.report()` gives; `print` it, or read its fields.

    Attributes:
        cluster: Nodes and ranks in one line.
        plans: Each plan in use, described with its reason.
        rows: One for each phase and level.
        buckets: All-reduces run.
        steps: Backward passes seen; 0 where there is no hook.
        links: The rates that the plans are predicted with; the NIC that each local rank should drive, where it is
            known, and what speaks against it.
    """

    cluster: str
    plans: tuple[str, ...]
    rows: tuple[PhaseTotals, ...]
    buckets: int
    steps: int = 0
    links: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = [
            f"{self.cluster}; {self.buckets} all-reduces in {self.steps} steps",
            *self.links,
            *self.plans,
            (
                f"{'phase':>5}  {'collective':<15} {'level':<13} {'calls':>6} "
                f"{'logical MB':>10} {'sent MB':>10} {'seconds':>9}"
            ),
        ]
        body = [
            f"{row.phase:>5}  {row.op:<15} {row.level:<13} {row.calls:>6} {row.logical_nbytes / 1e6:>10.3f} "
            f"{row.wire_nbytes / 1e6:>10.3f} {row.seconds:>9.3f}"
            for row in self.rows
        ]
        return "\n".join(head + body)
