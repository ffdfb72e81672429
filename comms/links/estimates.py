"""Holds the estimated rates of the links between ranks, and which decisions may use them.

| origin | source | when | used for |
|---|---|---|---|
| `assumed` | a default | | plans; reports mark it as assumed |
| `given`, `topology` | bootstrap/placement.py | when ranks connect | plans |
| `probed` | probe.py, unit_rates.py: `measure`, or learned cuts | before the first step, again | plans and bits |
| `probed` | quick_probe.py | before the first step | predictions; shares in plans whose bits do not change |
| `transfers` | first_steps.py | after the first steps | predictions |

Invariant: a measurement that the user has not asked for changes no bit of a sum. It is used for predictions only.
"""

from collections.abc import Sequence
from dataclasses import replace

from gradwire.comms.plan.plan import Plan
from gradwire.topology.cluster import Cluster, Level
from gradwire.topology.wording import rates_in_words

GIVEN, TOPOLOGY, PROBED, TRANSFERS, ASSUMED = "given", "topology", "probed", "transfers", "assumed"


class Links:
    """Holds the estimated rates of the links between one communicator's ranks.

    Args:
        cluster: The ranks, with the link rates that are known before they connect.

    Attributes:
        cluster: The ranks, with the link rates by which plans are chosen.
        priced: The ranks, with the link rates by which the times of plans are predicted.
        shares: The ranks, with the link rates by which nodes with slow links own a smaller part of each exchange, in
            plans whose bits do not depend on it; None if all links are taken to be equal.
        origin: Origin of the rates that are not assumed: `given`, `topology`, `probed` or `transfers`.
        decided: True after `decide`: measured rates have replaced all others, for plans too.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = self.priced = cluster
        self.shares: Cluster | None = None
        self.origin = TOPOLOGY if cluster.fabric is not None else GIVEN
        self.decided = False

    @property
    def learned(self) -> bool:
        """Whether predictions use measured rates that the choice of plans does not."""
        return self.priced is not self.cluster

    def decide(self, levels: Sequence[Level]) -> None:
        """Sets measured rates for plans and predictions, in place of all other rates and of NCCL's own model.

        Args:
            levels: Levels of the cluster with the measured links.
        """
        self.cluster = self.priced = replace(self.cluster, levels=tuple(levels), fabric=None)
        self.shares, self.origin, self.decided = None, PROBED, True

    def learn(self, levels: Sequence[Level], *, at_start: bool) -> None:
        """Sets measured rates for predictions only; plans stay as they were chosen.

        Args:
            levels: Levels of the cluster with the measured links.
            at_start: True before the first bucket: if the nodes' rates differ, the shares that nodes own of an exchange
                then follow the rates.
        """
        self.priced = replace(self.cluster, levels=tuple(levels))
        if at_start:
            # A latency that was measured on busy processors would make chunks too few: it is for predictions only.
            assumed = [
                replace(level, link=replace(level.link, alpha_seconds=before.link.alpha_seconds))
                for level, before in zip(levels, self.cluster.levels, strict=True)
            ]
            uneven = any(level.unit_rates for level in levels)
            self.shares = replace(self.cluster, levels=tuple(assumed)) if uneven else None
        if not self.decided:
            self.origin = PROBED if at_start else TRANSFERS

    def priced_for(self, plan: Plan) -> Cluster:
        """Returns the cluster with the link rates by which the time of a plan is predicted.

        If all nodes own equal shares of the plan's exchanges, the rates of single nodes are left out: the slowest link
        decides.

        Args:
            plan: The plan.
        """
        if any(phase.shares for phase in plan.phases):
            return self.priced
        return replace(self.priced, levels=tuple(replace(level, unit_rates=()) for level in self.priced.levels))

    def describe(self) -> str:
        """Returns one line with the rates that plans are predicted with, each with its origin, such as `probed`."""
        described = []
        for level in map(self.priced.levels.__getitem__, self.cluster.wide_levels):
            origin = ASSUMED if level.link.presumed else self.origin
            spread = rates_in_words(level.unit_rates or (level.link.bytes_per_second,))
            described.append(f"{spread} {level.name} ({origin})")
        rates = ", ".join(described)
        unknown = '; `nic_bytes_per_second="measure"` measures them' if f"({ASSUMED})" in rates else ""
        return f"links: {rates or 'none'}{unknown}"
