"""The choice of a plan for each bucket size: the one asked for or the fastest, with or without a compressor.

Whether a gradient is compressed is decided step by step, each time alike on all ranks:

1. `Compression` of compression.py makes the compressor that the options ask for. None of it: all is exact.
2. `HookState._reduce` gives each dense bucket a `Layout` if there is a compressor; a sparse one never has one. Fusion
   joins only buckets that are alike in that.
3. `Communicator.start` drops the layout if the bucket's dtype is none of `CompressorTraits.dtypes`.
4. `PlanChooser._compressed_plan` here decides for each size of bucket with a layout: compressed between nodes if there
   are several; on one node only with plan="flat", with a compressor that keeps the optimizer's momentum, or on GPUs
   with slow links; and a compressor that only sums in another way never. `compressed_name` says so for all sizes.
5. `Composite` (compressors/composite.py) sends parameters dense inside of a compressed phase, as the rules say; the
   default ones are biases, norms and small parameters.
6. `TwoStage.all_reduce` (compressors/two_stage.py) sends a shard dense during `warmup_steps`, and alone in a group;
   PowerSGD has such steps, too, and DGC lowers its density in them. A step of `HookState.flush` is sent exactly, by
   `Programs`.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gradwire.comms.config import Config
from gradwire.comms.links.estimates import Links
from gradwire.comms.plan.cost import EXACT
from gradwire.comms.plan.plan import ALL_REDUCE, Plan
from gradwire.comms.plan.planner import candidate_plans, plan_all_reduce, presumed, with_reason
from gradwire.compressors.base import Compressor, Layout, keeps_momentum, traits_of

if TYPE_CHECKING:
    from gradwire.comms.plan.payloads import Payloads

COMPRESS_INSIDE_GAIN = 1.5
"""Predicted speed-up over the exact plan with which buckets are compressed inside a single node of GPUs. More than the
2 % of exact plans, because a codec changes the result, and because no prediction for GPUs has been measured yet."""

OWNED = "Owners by the links' rates as measured at the start, which changes no bit."
"""Note of a plan whose shares follow rates measured at the start."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan chosen for a bucket.

    Attributes:
        plan: The plan to run, with its predicted seconds.
        equal_shares: The plan whose owners have equal shares, and whose order of sums `plan` keeps; `plan` unless
            the links' rates differ.
    """

    plan: Plan
    equal_shares: Plan


class PlanChooser:
    """Chooses a plan for each size of bucket.

    Args:
        links: Rates of the links between the ranks.
        config: Configuration; its `plan` restricts the choice.
        compressor: Compressor of one phase of buckets that have a layout; None if all is exact.
        payloads: Cost of the compressor's payloads; None without a compressor.
        library: Kind of device whose costs count: `nccl` for GPUs, `gloo` for CPUs, over MPI too.

    Attributes:
        plan_name: Plan of exact buckets: `flat`, `hierarchical` or `leader`; `auto` chooses by size.
        chunks: Number of chunks; 0 leaves it to the planner.
    """

    def __init__(
        self, links: Links, config: Config, compressor: Compressor | None, payloads: "Payloads | None", library: str
    ) -> None:
        self.plan_name = config.plan_name
        self.chunks = config.chunks
        self._links = links
        self._asked_for = config.plan_name
        self._fixed_order = config.fuses
        self._why = ""
        self._compressor = compressor
        self.library = library
        self._payloads = payloads

    def take(self, plan: str, chunks: int, why: str) -> None:
        """Uses one plan for exact buckets of every size that is planned from now on; see `RankPlans.choose`.

        Args:
            plan: `flat`, `hierarchical` or `leader`; `auto` chooses by size again.
            chunks: Number of chunks, of compressed buckets too; 0 leaves it to the planner.
            why: Reason as a sentence, for reports; empty keeps the planner's.
        """
        self.plan_name, self.chunks, self._why = plan, chunks, why

    def best_for_all(self, nbytes: int) -> Plan | None:
        """Returns the best plan for one size, to be used for all sizes; None if a plan was asked for by name.

        Args:
            nbytes: Size of a usual bucket.
        """
        if self._asked_for != "auto":
            return None
        best = plan_all_reduce(self._links.cluster, nbytes, library=self.library)
        if not best.phases:
            return best
        return with_reason(best, f"{best.why} (Chosen for buckets of {nbytes / 1e6:.3g} MB, and used for all sizes.)")

    def choose(self, nbytes: int, layout: Layout | None) -> Choice:
        """Chooses the plan that a bucket runs with, unequal shares included if the links' rates differ.

        Args:
            nbytes: Size of the bucket.
            layout: Parameters of the bucket, if it may be compressed.
        """
        equal_shares = self.plan(nbytes, layout)
        plan = self.with_owners(equal_shares, layout) or equal_shares
        return Choice(self.repriced(plan, layout), equal_shares)

    def plan(self, nbytes: int, layout: Layout | None) -> Plan:
        """Returns the plan for a bucket with equal shares.

        Args:
            nbytes: Size of the bucket.
            layout: Parameters of the bucket, if it may be compressed.
        """
        if self._compressor is not None and layout is not None:
            assert self._payloads is not None
            plan = self._compressed_plan(self._compressor, self._payloads, nbytes, layout)
            if plan is not None:
                return plan
        plan = plan_all_reduce(
            self._links.cluster, nbytes, name=self.plan_name, chunks=self.chunks, library=self.library
        )
        plan = with_reason(plan, self._why) if self._why else plan
        sums = self._compressor is not None and traits_of(self._compressor).is_sum
        if self._compressor is not None and sums and self._links.cluster.size > 1:
            return with_reason(plan, f"{self._compressor.name} was asked for: it works between nodes alone. {plan.why}")
        if self._compressor is not None and layout is not None and self._links.cluster.size > 1:
            unused = f"{self._compressor.name} is not used: nothing crosses between nodes."
            return with_reason(plan, f'{unused} It compresses between all ranks with plan="flat". {plan.why}')
        return plan

    def with_owners(self, plan: Plan, layout: Layout | None) -> Plan | None:
        """Returns the plan with shares that follow the links' rates; None if the plan is to stay as it is.

        It stays if no shares are known, because rates are equal or unknown; if it has no phases; if it compresses with
        a codec that does not round each element by itself; if it is `flat` and was asked for by name, or some ranks
        share a node; and if the shares turn out to be equal. A `flat` plan of ranks that are each on a node of its own,
        chosen by `auto`, becomes a `hierarchical` one.

        Exact sums keep the order of the plan with equal shares, so the number of chunks is free. Codecs that round each
        element by itself may be cut anywhere, too. Other codecs would have other blocks, and residuals of the second
        stage would belong to other ranks after each start.

        Args:
            plan: Plan with equal shares.
            layout: Parameters of the bucket, if it may be compressed; else None.
        """
        compressed = any(phase.compressor for phase in plan.phases)
        if self._links.shares is None or not plan.phases or (compressed and not _is_by_element(self._compressor)):
            return None
        if plan.name == "flat" and (
            self._asked_for == "flat" or not self._links.cluster.all_apart(range(self._links.cluster.size))
        ):
            return None
        price = EXACT
        if compressed:
            assert layout is not None and self._payloads is not None
            price = self._payloads.price(plan.nbytes, layout, len(self._links.cluster.nodes))
        name, chunks = "leader" if plan.name == "leader" else "hierarchical", plan.chunks if compressed else self.chunks
        made = plan_all_reduce(
            self._links.shares, plan.nbytes, name=name, chunks=chunks, price=price, library=self.library
        )
        if not any(phase.shares for phase in made.phases if phase.op == ALL_REDUCE):
            return None
        in_ring_order = compressed or not self._fixed_order
        phases = tuple(replace(phase, in_ring_order=in_ring_order and phase.op == ALL_REDUCE) for phase in made.phases)
        return replace(made, phases=phases, why=plan.why, notes=(*plan.notes, OWNED))

    def repriced(self, plan: Plan, layout: Layout | None) -> Plan:
        """Returns the plan with predictions for the link rates known now.

        Args:
            plan: Plan of a bucket.
            layout: Parameters of the bucket, if it may be compressed; else None.
        """
        compressed, payloads = next((phase for phase in plan.phases if phase.compressor), None), self._payloads
        if not plan.phases or not self._links.learned:
            return plan
        price = EXACT
        if compressed is not None:
            assert layout is not None and payloads is not None
            ranks = self._links.cluster.size if compressed.whole else len(self._links.cluster.nodes)
            price = payloads.price(plan.nbytes, layout, ranks)
        cluster, by_links = self._links.priced_for(plan), compressed is not None and bool(compressed.shares)
        (priced,) = candidate_plans(cluster, plan.nbytes, plan.name, plan.chunks, price, by_links=by_links)
        return replace(
            plan,
            seconds=priced.seconds,
            limit=priced.limit,
            busy_seconds=priced.busy_seconds,
            assumed=presumed(cluster),
        )

    def compressed_name(self) -> str | None:
        """Returns the name of the plan for compressed buckets; None if no bucket of any size is compressed."""
        if self._compressor is None:
            return None
        if self._asked_for == "flat":
            return "flat"
        if len(self._links.cluster.nodes) > 1:
            return "leader" if self._asked_for == "leader" else "hierarchical"
        # Inside one node of GPUs the predicted gain of each bucket size decides.
        weighs = self._asked_for == "auto" and self.library == "nccl"
        compresses = self._links.cluster.size > 1 and (weighs or keeps_momentum(self._compressor))
        return "flat" if compresses else None

    def _compressed_plan(
        self, compressor: Compressor, payloads: "Payloads", nbytes: int, layout: Layout
    ) -> Plan | None:
        """Returns the plan of a bucket with a compressor.

        Args:
            compressor: The compressor.
            payloads: Cost of its payloads.
            nbytes: Size of the bucket.
            layout: Parameters of the bucket.

        Returns:
            The plan; None if the bucket is not compressed. On a single node that is so unless `flat` is asked for, or
            the compressor keeps the optimizer's momentum, which exact averages would lack, or the plan is `auto` over
            NCCL with known links and this compressor, no sum, is predicted to be `COMPRESS_INSIDE_GAIN` times as fast.
        """
        nodes, size, name = len(self._links.cluster.nodes), self._links.cluster.size, compressor.name

        def priced(plan_name: str, group_size: int, why: str) -> Plan:
            plan = plan_all_reduce(
                self._links.cluster,
                nbytes,
                name=plan_name,
                chunks=self.chunks,
                price=payloads.price(nbytes, layout, group_size),
                library=self.library,
            )
            return replace(plan, why=f"{name} was asked for, {why}")

        # Between all ranks if the flat plan was asked for; else between nodes if there are several.
        if self._asked_for == "flat" and size > 1:
            return priced("flat", size, "and the flat plan by name: it works between all ranks.")
        if nodes > 1:
            plan_name = "leader" if self._asked_for == "leader" else "hierarchical"
            return priced(plan_name, nodes, "and works on what crosses between nodes.")
        if size > 1 and keeps_momentum(compressor):
            return priced("flat", size, "and keeps the optimizer's momentum: it works between all ranks of this node.")
        if traits_of(compressor).is_sum:
            return None
        if (
            self._asked_for != "auto"
            or self.library != "nccl"
            or size == 1
            or self._links.cluster.levels[0].link.presumed
        ):
            return None
        # One node of GPUs: inside it, compression pays where the links are slow (PCIe), and costs where they are fast.
        from gradwire.comms.plan.codec_price import codec_price
        from gradwire.comms.plan.payloads import gpu_memory_rate

        price = codec_price(name, layout, size, gpu_memory_rate(self._links.cluster), kernels=payloads.kernels)
        exact = plan_all_reduce(self._links.cluster, nbytes, chunks=self.chunks, library=self.library)
        compressed = plan_all_reduce(
            self._links.cluster, nbytes, name="flat", chunks=self.chunks, price=price, library=self.library
        )
        gain = exact.seconds / compressed.seconds
        if gain < COMPRESS_INSIDE_GAIN:
            return None
        return priced(
            "flat", size, f"and is predicted to be {gain:.2f}x faster inside this node, whose links are slow."
        )


def _is_by_element(compressor: Compressor | None) -> bool:
    return compressor is not None and traits_of(compressor).by_element
