"""Which way a bucket of some size takes, worked out once for each size: its plan, and this rank's part in it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor

from gradwire.comms.config import Config
from gradwire.comms.plan.codec_price import wire_ratio
from gradwire.comms.plan.plan import Plan
from gradwire.comms.plan.planner import plan_all_reduce, with_reason
from gradwire.comms.plan.price import CodecPrice
from gradwire.comms.plan.schedule import Partition, Schedule, Transfer, even_partition
from gradwire.compressors.base import Compressor, Layout
from gradwire.topology.cluster import Cluster, Level

log = logging.getLogger("gradwire")


@dataclass(frozen=True, slots=True)
class Route:
    """A plan cut to one size of bucket.

    Attributes:
        plan: What is done.
        bounds: Where the bucket is cut into chunks: `plan.chunks + 1` ascending offsets.
        transfers: This rank's transfers, chunk by chunk and phase by phase.
    """

    plan: Plan
    bounds: tuple[int, ...]
    transfers: list[list[list[Transfer]]]

    def compressed_shards(self) -> list[tuple[int, int]]:
        """The runs of elements that this rank compresses."""
        return [
            (transfer.start, transfer.stop)
            for chunk in self.transfers
            for phase, transfers in zip(self.plan.phases, chunk, strict=True)
            if phase.compressor
            for transfer in transfers
        ]


class Routes:
    """The ways of one communicator's buckets. All ranks ask for the same ones, and change them at the same point.

    Args:
        cluster: Where the ranks are.
        rank: This rank.
        config: The plan and the number of chunks that were asked for.
        compressor: Shrinks the phase over the slowest level of buckets that come with a layout.
        library: Who runs a flat all-reduce: `gloo` or `nccl`.
    """

    def __init__(
        self, cluster: Cluster, rank: int, config: Config, compressor: Compressor | None, library: str
    ) -> None:
        self.cluster = cluster
        self.library = library
        self.plan_name, self.chunks = config.plan, config.chunks
        self._rank = rank
        self._may_choose = config.plan == "auto"
        self._why = ""
        self._measured = False
        self._compressor = compressor
        self._known: dict[object, Route] = {}

    def route(self, flat: Tensor, layout: Layout | None) -> Route:
        """The way of a bucket.

        Args:
            flat: The bucket; its size and dtype count.
            layout: Which parameter lies where in it, if it may be compressed.
        """
        key = (flat.numel(), flat.dtype, layout)
        if key not in self._known:
            plan = self._plan(flat, layout)
            log.info("%d elements of %s: %s", flat.numel(), flat.dtype, plan.describe(self.cluster.level_names))
            self._known[key] = self.along(flat, plan, layout)
        return self._known[key]

    def along(self, flat: Tensor, plan: Plan, layout: Layout | None = None) -> Route:
        """A bucket's way along any plan, whatever the planner thinks of it."""
        partition = self._partition(layout)
        schedule = Schedule(self.cluster, plan)
        bounds = partition(0, flat.numel(), plan.chunks)
        transfers = [
            [
                [transfer for transfer in phase if self._rank in transfer.members]
                for phase in schedule.transfers(stop - start, partition, start)
            ]
            for start, stop in pairwise(bounds)
        ]
        return Route(plan, bounds, transfers)

    def choose(self, plan: str, chunks: int, why: str) -> None:
        """Takes one plan for every size from the next bucket on.

        Args:
            plan: `flat`, `hierarchical` or `leader`; `auto` goes by size again.
            chunks: Pieces of a bucket; 0 leaves it to the planner.
            why: The reason, as a sentence, for the report.
        """
        self.plan_name, self.chunks, self._why = plan, chunks, why
        self._known.clear()

    def settle(self, nbytes: int) -> None:
        """Takes the plan that is best for `nbytes` for every size: two plans sum in two orders, one plan in one."""
        if self._may_choose:
            best = plan_all_reduce(self.cluster, nbytes, library=self.library)
            self.choose(best.name, self.chunks, f"{best.why} ({nbytes / 1e6:.3g} MB; one plan for all sizes.)")

    def measured(self, levels: Sequence[Level]) -> None:
        """Plans with these links from now on."""
        self.cluster = replace(self.cluster, levels=tuple(levels))
        self._measured = True
        self._known.clear()

    def describe_links(self) -> str:
        """The rates that plans are predicted with, in one line."""
        rates = ", ".join(
            f"{level.link.bytes_per_second / 1e9:.3g} GB/s {level.name}"
            for number, level in enumerate(self.cluster.levels)
            if self.cluster.widest(number) > 1
        )
        origin = "as measured" if self._measured else "as told or presumed (`probe=True` measures them)"
        return f"links {origin}: {rates or 'none'}"

    def plans(self) -> list[Plan]:
        """The plans in use."""
        return [route.plan for route in self._known.values()]

    def _plan(self, flat: Tensor, layout: Layout | None) -> Plan:
        nodes = len(self.cluster.nodes)
        if self._compressor is None or layout is None or nodes == 1:
            plan = plan_all_reduce(
                self.cluster, flat.nbytes, name=self.plan_name, chunks=self.chunks, library=self.library
            )
            return with_reason(plan, self._why) if self._why else plan
        price = CodecPrice(self._compressor.name, wire_ratio(self._compressor, layout, nodes))
        plan = plan_all_reduce(self.cluster, flat.nbytes, name="hierarchical", chunks=self.chunks, price=price)
        return with_reason(plan, f"{price.name} was asked for, and works on what crosses between nodes.")

    def _partition(self, layout: Layout | None) -> Partition:
        compressor = self._compressor
        if compressor is None or layout is None:
            return even_partition

        def partition(start: int, stop: int, parts: int) -> tuple[int, ...]:
            return tuple(start + offset for offset in compressor.partition(layout.cut(start, stop), parts))

        return partition
