"""What each link between ranks gives, where that is known from, and what it may decide.

| origin | found out by | when | decides |
|---|---|---|---|
| `assumed` | nobody | | plans; reports say that it is assumed |
| `given`, `topology` | bootstrap/placement.py | as ranks meet | plans |
| `probed` | probe.py, unit_rates.py: `probe=True` | before the first step | plans and bits, in place of all else |
| `probed` | quick_probe.py | before the first step | predictions; shares in plans whose bits stay |
| `transfers` | first_steps.py | behind the first steps | predictions |

A clock must change no bit: what was measured without being asked for prices plans, and chooses none.
"""

from collections.abc import Sequence
from dataclasses import replace

from gradwire.comms.plan.plan import Plan
from gradwire.topology.cluster import Cluster, Level

GIVEN, TOPOLOGY, PROBED, TRANSFERS, ASSUMED = "given", "topology", "probed", "transfers", "assumed"


class Links:
    """The links of one communicator's ranks.

    Args:
        cluster: The ranks, with the links as they are known before the ranks connect.

    Attributes:
        cluster: The ranks, with the links that plans are chosen by.
        priced: With the links that predictions are made for.
        shares: With the rates that owners' shares go by in plans whose bits do not; None where links are alike.
        origin: Where the rates come from that are not assumed.
        decided: Whether measured links have replaced all others.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = self.priced = cluster
        self.shares: Cluster | None = None
        self.origin = TOPOLOGY if cluster.fabric is not None else GIVEN
        self.decided = False

    @property
    def learned(self) -> bool:
        """Whether predictions are made for other links than those that plans are chosen by."""
        return self.priced is not self.cluster

    def decide(self, levels: Sequence[Level]) -> None:
        """Takes these links for everything: what NCCL says of its own gives way to them."""
        self.cluster = self.priced = replace(self.cluster, levels=tuple(levels), fabric=None)
        self.shares, self.origin, self.decided = None, PROBED, True

    def learn(self, levels: Sequence[Level], *, at_start: bool) -> None:
        """Takes these links for predictions.

        Args:
            levels: With the links as they were seen.
            at_start: Nothing has travelled yet: shares go by them, too, where units' rates differ.
        """
        self.priced = replace(self.cluster, levels=tuple(levels))
        if at_start:
            # A latency that was seen while the processors were busy would make chunks too few: it prices plans alone.
            assumed = [
                replace(level, link=replace(level.link, alpha_seconds=before.link.alpha_seconds))
                for level, before in zip(levels, self.cluster.levels, strict=True)
            ]
            uneven = any(level.unit_rates for level in levels)
            self.shares = replace(self.cluster, levels=tuple(assumed)) if uneven else None
        if not self.decided:
            self.origin = PROBED if at_start else TRANSFERS

    def priced_for(self, plan: Plan) -> Cluster:
        """The cluster that a plan is priced for: where owners are equal, all links are as fast as the slowest."""
        if any(phase.shares for phase in plan.phases):
            return self.priced
        return replace(self.priced, levels=tuple(replace(level, unit_rates=()) for level in self.priced.levels))

    def describe(self) -> str:
        """The rates that plans are predicted with, in one line, each with one word for where it comes from."""
        rates = ", ".join(
            f"{_rates(level)} {level.name} ({ASSUMED if level.link.presumed else self.origin})"
            for level in map(self.priced.levels.__getitem__, self.cluster.wide_levels)
        )
        return f"links: {rates or 'none'}" + ("; `probe=True` measures them" if "(assumed)" in rates else "")


def _rates(level: Level) -> str:
    """Return a level's rate in bits, as links are sold; the slowest and the fastest one if they differ."""
    known = sorted(8 * rate for rate in level.unit_rates or (level.link.bytes_per_second,))
    unit, name = (1e9, "Gbit/s") if known[-1] >= 1e9 else (1e6, "Mbit/s")
    spread = " to ".join(f"{rate / unit:.3g}" for rate in dict.fromkeys((known[0], known[-1])))
    return f"{spread} {name}"
