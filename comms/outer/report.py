"""Reports what `Outer` has done: its exchanges, their traffic, and the schedule with its reason."""

from dataclasses import asdict, dataclass

from gradwire.comms.outer.fragments import OuterSettings
from gradwire.comms.outer.schedule_selection import describe
from gradwire.comms.report import Report, in_columns


@dataclass(frozen=True, slots=True)
class OuterReport:
    """Result of `Outer.report()`: `print` it, or read its fields.

    Attributes:
        workers: Ranks of each worker, ordered by their lowest rank; of a sharded model only ranks with the same shards
            as this one.
        steps: Number of steps of the optimizer.
        exchanges: Number of exchanges of single fragments that took effect.
        skipped: Number of exchanges whose average was not finite, so that they changed nothing.
        numel: Number of parameter elements that this rank holds.
        sent_nbytes: Payload bytes that this rank has sent to other nodes, or on a single node to other ranks; counted,
            without headers.
        nic_nbytes: Bytes that the busiest node (on a single node, the busiest rank) has sent to others, by the plans;
            it has received as many. Of a sharded model, bytes of this rank's shards only.
        synchronized_nbytes: Part of `nic_nbytes` that `synchronize()` has sent, in full precision.
        seconds: Seconds since the end of the first step; 0 before.
        waited_seconds: Part of `seconds` in which this rank only waited for results.
        exchange: Phases, plans and links of the exchanges.
        inside: Report on the gradients inside this worker; None if nothing is averaged there, or others do it.
        sharded: True if this rank holds shards; `numel` and bytes are then those of its shards.
        settings: Schedule of the exchanges and rates of the outer SGD.
        chosen: Reason for the settings that Outer chose; empty if the user gave all, or they are not chosen yet.
    """

    workers: tuple[tuple[int, ...], ...]
    steps: int
    exchanges: int
    skipped: int
    numel: int
    sent_nbytes: float
    nic_nbytes: float
    synchronized_nbytes: float
    seconds: float
    waited_seconds: float
    exchange: Report
    inside: Report | None = None
    sharded: bool = False
    settings: OuterSettings | None = None
    chosen: str = ""

    @property
    def bits_per_parameter_and_step(self) -> float:
        """Bits that the busiest node has sent for each parameter and step, without `synchronize()`."""
        return 8 * (self.nic_nbytes - self.synchronized_nbytes) / max(self.numel * self.steps, 1)

    @property
    def wait_share(self) -> float:
        """Share of the time in which this rank only waited for results."""
        return self.waited_seconds / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, object]:
        """Returns all attributes by name as values that JSON can hold: dicts, lists, numbers, strings and None.

        `wait_share` and `bits_per_parameter_and_step` are added. `exchange`, `inside` and `settings` are dicts of their
        own attributes, of which the latter two may be None.
        """
        reports = {"exchange": self.exchange.to_dict(), "inside": self.inside and self.inside.to_dict()}
        workers = [list(worker) for worker in self.workers]
        derived = {"wait_share": self.wait_share, "bits_per_parameter_and_step": self.bits_per_parameter_and_step}
        return {**asdict(self), **reports, "workers": workers, **derived}

    def __str__(self) -> str:
        """Returns the short report: workers and counts, schedule, traffic, and what `Report.beside_others` says.

        `full()` has more.
        """
        settings = [f"exchange: {describe(self.settings)}; full() says more"] if self.settings else []
        return "\n".join([*map(in_columns, [self._head(), *settings, self._traffic()]), self.exchange.beside_others()])

    def full(self) -> str:
        """Returns the whole report, with the reason of the settings and `Report.full()` of the exchanges."""
        why = f": {self.chosen}" if self.chosen else ""
        settings = [f"{describe(self.settings)}{why}"] if self.settings else []
        return "\n".join([*map(in_columns, [self._head(), *settings, self._traffic()]), self.exchange.full()])

    def _head(self) -> str:
        skipped = f", {self.skipped} not finite and skipped" if self.skipped else ""
        sizes = ", ".join(str(len(worker)) for worker in self.workers)
        counts = f"{self.steps} steps, {self.exchanges} exchanges{skipped}"
        return f"{len(self.workers)} workers of {sizes} ranks; {counts}, {self.wait_share:.1%} of the time waited for"

    def _traffic(self) -> str:
        exchanged, extra = (self.nic_nbytes - self.synchronized_nbytes) / 1e6, self.synchronized_nbytes / 1e6
        shards = " for the shards of this rank" if self.sharded else ""
        traffic = f"a node sent {self.bits_per_parameter_and_step:.3g} bits a parameter and step{shards}: "
        return f"{traffic}{exchanged:.3g} MB" + (f"; {extra:.3g} MB in synchronize()" if extra else "")
