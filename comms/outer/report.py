"""The report of `Outer`: what was exchanged, what it cost, and why so often."""

from dataclasses import asdict, dataclass

from gradwire.comms.outer.fragments import OuterSettings
from gradwire.comms.outer.schedule_selection import describe
from gradwire.comms.report import Report, in_columns


@dataclass(frozen=True, slots=True)
class OuterReport:
    """Report of `Outer.report()`: `print` it, or read its fields.

    Attributes:
        workers: Ranks of each worker, in the order of their lowest rank; of a sharded model, of the ranks that hold the
            same shards.
        steps: Steps of the optimizer.
        exchanges: Exchanges of single fragments that took effect.
        skipped: Exchanges that were not finite and changed nothing.
        numel: Elements that this rank holds of the parameters.
        sent_nbytes: Bytes that this rank has sent to other nodes, counted, headers not; on one node to other ranks.
        nic_nbytes: Bytes that have left the busiest node for others, as the plans say; as many have arrived. Of a
            sharded model, for the shards that this rank holds: the node's other ranks have sent theirs besides.
        synchronized_nbytes: Of those, what `synchronize()` has sent, which averages in full precision.
        seconds: Since the first step ended.
        waited_seconds: Of those, how long this rank has done nothing but wait for a result.
        exchange: Phases, plans and links of the exchanges.
        inside: Report on the gradients inside this worker; None if nothing is averaged there, or others do it.
        sharded: Whether this rank holds shards, which are all that `numel` and the bytes are about.
        settings: Schedule of the exchanges and rates of the outer SGD.
        chosen: Reason of settings that were chosen; empty if they were given, or are not chosen yet.
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
        """What exchanges have sent from the busiest node, without `synchronize()`: in bits, a parameter and step."""
        return 8 * (self.nic_nbytes - self.synchronized_nbytes) / max(self.numel * self.steps, 1)

    @property
    def wait_share(self) -> float:
        """Part of the time in which this rank has done nothing but wait for a result."""
        return self.waited_seconds / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, object]:
        """All of it as dicts, lists, numbers, strings and None, as JSON holds them; keys are the attributes' names."""
        reports = {"exchange": self.exchange.to_dict(), "inside": self.inside and self.inside.to_dict()}
        workers = [list(worker) for worker in self.workers]
        derived = {"wait_share": self.wait_share, "bits_per_parameter_and_step": self.bits_per_parameter_and_step}
        return {**asdict(self), **reports, "workers": workers, **derived}

    def __str__(self) -> str:
        """Five lines or fewer, and one for each finding. `full()` has the rest."""
        settings = [f"exchange: {describe(self.settings)}; full() says more"] if self.settings else []
        return "\n".join([*map(in_columns, [self._head(), *settings, self._traffic()]), self.exchange.beside_others()])

    def full(self) -> str:
        """All of it: why these settings were chosen, and what `Report.full()` says of the exchanges."""
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
