"""Which plan a bucket of some size takes, and this rank's part in it: worked out once for each size."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from math import prod
from typing import cast

import torch

from gradwire.comms.config import Config
from gradwire.comms.plan.cost import EXACT, EXCHANGE_ROUNDS, CodecPrice, sent_nbytes
from gradwire.comms.plan.plan import ALL_GATHER, ALL_REDUCE, Phase, Plan, Transfer
from gradwire.comms.plan.planner import candidates, make_phases, plan_all_reduce, presumed, with_note, with_reason
from gradwire.comms.plan.schedule import (
    ALIGN_NUMEL,
    Partition,
    Schedule,
    equal_partition,
    even_partition,
    executable,
    member_shares,
)
from gradwire.compressors.base import Compressor, Layout, Packer, planned
from gradwire.topology.cluster import Cluster, Level

log = logging.getLogger("gradwire")

COMPRESS_INSIDE_GAIN = 1.5
"""What is compressed inside a single node of GPUs must be predicted to be so many times faster than exact. More than
the 2 % of exact plans, because a codec changes the result, and because no prediction for GPUs has been measured yet."""

RouteKey = tuple[int, torch.dtype, Layout | None]
"""Of a bucket: elements, dtype, and which parameter lies where if it may be compressed."""


@dataclass(frozen=True, slots=True)
class PhasePart:
    """What one rank does in one phase, for one chunk.

    Attributes:
        phase: The phase.
        steps: This rank's transfers, step by step. A compressed phase is one step, whose transfers are its shards.
        layouts: Of a compressed phase, which parameter lies where in each shard; else empty.
        shares: Of a compressed phase, what each member of a shard's group owns of it; empty for equal parts.
        whole_chunk: Whether one transfer of the first step takes all of the chunk: a factor is then applied in its
            pass.
        shards: Regions of the bucket that this rank has a part in.
        logical_numel: Elements of those.
        sent_numel: Elements that this rank sends; of a compressed phase unknown beforehand, and 0.
        owners: Of a compressed phase, all ranks that have a shard in it, ascending; else empty.
        break_even: Of a compressed phase, see `Member.break_even`.
        rings: Of an exact all_reduce whose sums are made in the order of rings: the runs of elements, one beside the
            other, that one ring each would sum.
    """

    phase: Phase
    steps: tuple[tuple[Transfer, ...], ...]
    layouts: tuple[Layout, ...]
    shares: tuple[tuple[int, ...], ...]
    whole_chunk: bool
    shards: int
    logical_numel: int
    sent_numel: float
    owners: tuple[int, ...] = ()
    break_even: float = 0.0
    rings: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of a bucket, and what this rank does with it.

    Attributes:
        start: First element.
        stop: One past the last.
        parts: Phase by phase.
    """

    start: int
    stop: int
    parts: tuple[PhasePart, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """A plan cut to one size of bucket, for one rank.

    Attributes:
        plan: What is done.
        chunks: The pieces that the bucket is cut into, in order.
        lanes: The lanes that each chunk visits on every rank: one more after each asynchronous phase.
        turn: Phases of the way up: behind them come all-gathers alone.
        direct: Whether all of it is one all-reduce over all ranks, as without a plan.
    """

    plan: Plan
    chunks: tuple[Chunk, ...]
    lanes: tuple[tuple[int, int], ...]
    turn: int
    direct: bool

    def compressed_shards(self) -> list[tuple[int, int]]:
        """The runs of elements that this rank compresses."""
        return [
            (transfer.start, transfer.stop)
            for chunk in self.chunks
            for part in chunk.parts
            if part.phase.compressor
            for transfer in part.steps[0]
        ]

    @property
    def shares_ownership(self) -> bool:
        """Whether the ranks of a node compress different shards of one sum; else each rank has residuals of its own."""
        return not any(phase.whole for phase in self.plan.phases if phase.compressor)


def _rates(level: Level) -> str:
    """A level's rate; its slowest and its fastest where its units differ."""
    known = sorted(level.unit_rates or (level.link.bytes_per_second,))
    unit, name = (1e9, "GB/s") if known[-1] >= 1e8 else (1e6, "MB/s")
    spread = " to ".join(f"{rate / unit:.3g}" for rate in dict.fromkeys((known[0], known[-1])))
    return f"{spread} {name}"


class Routes(dict[RouteKey, Route]):
    """The routes of one communicator's buckets, planned when they are first asked for.

    All ranks ask for the same ones, and change them at the same point.

    Args:
        cluster: Where the ranks are.
        rank: This rank.
        device_type: Where the buckets are: `cpu` or `cuda`.
        config: The plan and the number of chunks that were asked for.
        compressor: Compresses one phase of buckets that have a layout.
    """

    def __init__(
        self, cluster: Cluster, rank: int, device_type: str, config: Config, compressor: Compressor | None
    ) -> None:
        super().__init__()
        self.cluster = cluster
        self.library = "nccl" if device_type == "cuda" else "gloo"
        self.plan_name = config.plan
        whole = compressor is not None and planned(compressor).whole_parameters
        self.chunks = 1 if whole else config.chunks
        self._rank = rank
        self._device_type = device_type
        self._fixed_order = config.fuses
        self._asked_for = config.plan
        self._why = ""
        self._measured = False
        self._learned: Cluster | None = None
        self._owners: Cluster | None = None
        """With the rates that owners' shares go by, where they change no bit; nothing else goes by these."""
        self._measured_at_start = self._refined = False
        self._compressor = compressor
        every = () if compressor is None else planned(compressor).every()
        self._packers = [cast(Packer, each) for each in every if isinstance(each, Packer)]
        self._unlisted: dict[tuple[int, torch.dtype], Route] = {}
        self._tell()

    def __missing__(self, key: RouteKey) -> Route:
        numel, dtype, layout = key
        base = self._plan(numel * dtype.itemsize, layout)
        plan = self._with_owners(base, layout) or base
        plan = plan if self._learned is None else self._repriced(plan, layout)
        self[key] = route = self.along(numel, plan, layout, base)
        log.info("%d elements of %s: %s", numel, dtype, route.plan.describe(self.cluster.level_names))
        return route

    def unlisted(self, numel: int, dtype: torch.dtype) -> Route:
        """The exact route of what the ranks tell each other about themselves: reports do not list it."""
        if (numel, dtype) not in self._unlisted:
            self._unlisted[numel, dtype] = self.along(numel, self._plan(numel * dtype.itemsize, None))
        return self._unlisted[numel, dtype]

    def clear(self) -> None:
        """Forgets all routes."""
        super().clear()
        self._unlisted.clear()
        self._tell()

    def _tell(self) -> None:
        """Has the compressor forget what ranks know of each other that may exchange with others from now on."""
        if self._compressor is not None:
            planned(self._compressor).replanned()

    def along(self, numel: int, plan: Plan, layout: Layout | None = None, base: Plan | None = None) -> Route:
        """The route of a bucket along any plan, whatever the planner thinks of it.

        Args:
            numel: Elements of the bucket.
            plan: The plan.
            layout: Which parameter lies where, if it may be compressed.
            base: The plan with equal shares whose bits a plan in the order of rings is to give. Not wanted where a
                phase is compressed: its whole shard is one ring.

        Raises:
            ValueError: The plan compresses a phase, and there is no compressor or no layout to do so with; or the
                layout is of another number of elements; or an exact plan sums in the order of rings, and no `base`
                says which.
        """
        if layout is not None and layout.numel != numel:
            raise ValueError(
                f"`layout` is of {layout.numel} elements, but `flat` has {numel}; wanted slices that cover all of "
                "`flat`: what lies outside of them would stay unreduced"
            )
        named = next((phase.compressor for phase in plan.phases if phase.compressor), None)
        if named and (self._compressor is None or layout is None):
            raise ValueError(
                f"`plan` compresses with {named}, but this communicator has no compressor or the bucket no layout: "
                "nothing would be compressed"
            )
        plan = executable(plan, self.cluster, self._device_type, fixed_order=self._fixed_order)
        partition = self._partition(plan, layout)
        schedule = Schedule(self.cluster, plan)
        break_even = self._break_even(plan) if named else 0.0
        rings: list[tuple[int, int]] = []
        if not named and _in_ring_order(plan):
            if base is None:
                raise ValueError(
                    f"`base` is None, and {plan.describe(self.cluster.level_names)} sums in the order of rings: pass "
                    "the plan with equal shares whose rings these are"
                )
            rings = self._rings(numel, base, layout)
        chunks = tuple(
            Chunk(
                start,
                stop,
                tuple(
                    self._part(phase, steps, (start, stop), layout, break_even, rings)
                    for phase, steps in zip(
                        plan.phases, schedule.transfers(stop - start, partition, start), strict=True
                    )
                ),
            )
            for start, stop in pairwise(partition(0, numel, plan.chunks))
        )
        hops = [(number + 1, 0) for number, phase in enumerate(plan.phases) if phase.asynchronous]
        turn = max((number for number, phase in enumerate(plan.phases, 1) if phase.op != ALL_GATHER), default=0)
        direct = len(chunks) == len(plan.phases) == 1 and plan.phases[0].whole and not plan.phases[0].compressor
        return Route(plan, chunks, ((0, 0), *hops), turn, direct)

    def _rings(self, numel: int, base: Plan, layout: Layout | None) -> list[tuple[int, int]]:
        """The runs of a bucket that a plan with equal shares has one ring each sum, ascending."""
        plan = executable(base, self.cluster, self._device_type, fixed_order=self._fixed_order)
        partition, schedule = self._partition(plan, layout), Schedule(self.cluster, plan)
        return sorted(
            {
                (transfer.start, transfer.stop)
                for start, stop in pairwise(partition(0, numel, plan.chunks))
                for transfer in chain.from_iterable(
                    chain.from_iterable(schedule.transfers(stop - start, partition, start))
                )
                if transfer.op == ALL_REDUCE
            }
        )

    def groups(self, nbytes: int) -> tuple[tuple[int, ...], ...]:
        """Every set of ranks that the plans in use join for buckets of `nbytes`, dense, compressed or migrated.

        All ranks get the same sets in the same order: ranks that connect those they are in, in this order, never wait
        for each other in a circle. Once `settle` has chosen a plan, buckets of any other size need no further ones.

        Args:
            nbytes: Size of a bucket.
        """
        numel = ALIGN_NUMEL * prod(self.cluster.widest(level) for level in range(self.cluster.depth))  # no empty region
        plans = [self._plan(nbytes, None)]
        name = self.compressed_name()
        if name is not None:
            plans.append(plan_all_reduce(self.cluster, nbytes, name=name, chunks=self.chunks))
        found: dict[tuple[int, ...], None] = {}
        for plan in plans:
            plan = executable(plan, self.cluster, self._device_type, fixed_order=self._fixed_order)
            for steps in Schedule(self.cluster, plan).transfers(numel, equal_partition):
                found.update((transfer.members, None) for transfer in chain.from_iterable(steps))
        if name in ("hierarchical", "leader"):  # a compressor's state moves inside the node
            found.update((node, None) for node in self.cluster.nodes if len(node) > 1)
        return tuple(found)

    def return_groups(self) -> tuple[tuple[int, ...], ...]:
        """On CUDA, the sets of ranks of `groups` between which owners of unequal parts send back what they have summed.

        Also where the first buckets are too small for such owners: larger ones may have them, and nothing may connect
        during a step. They do so through communicators of their own: see `RETURN_LANE` in transport/groups.py.
        """
        name, compressor = self.compressed_name(), self._compressor
        if self._device_type != "cuda" or name is None or compressor is None:
            return ()
        owned = any(planned(each).has_owners for each in planned(compressor).every())
        phases = make_phases(self.cluster, name, compressor.name, owned=owned)
        found: dict[tuple[int, ...], None] = {}
        numel = ALIGN_NUMEL * prod(self.cluster.widest(level) for level in range(self.cluster.depth))
        plan = Plan(name, phases, 1, numel, 0.0, {}, "")
        for phase, (transfers,) in zip(
            phases, Schedule(self.cluster, plan).transfers(numel, equal_partition), strict=True
        ):
            found.update((each.members, None) for each in transfers if member_shares(phase, each))
        return tuple(found)

    def choose(self, plan: str, chunks: int, why: str) -> None:
        """Takes one plan for every size from the next bucket on.

        Args:
            plan: `flat`, `hierarchical` or `leader`; `auto` goes by size again.
            chunks: Pieces of a bucket; 0 leaves it to the planner.
            why: The reason, as a sentence, for the report.
        """
        self.plan_name, self.chunks, self._why = plan, chunks, why
        self.clear()

    def settle(self, nbytes: int) -> None:
        """Takes the plan that is best for `nbytes` for every size: two plans sum in two orders, one plan in one."""
        if self._asked_for == "auto":
            best = plan_all_reduce(self.cluster, nbytes, library=self.library)
            self.choose(
                best.name,
                self.chunks,
                f"{best.why} (Chosen for buckets of {nbytes / 1e6:.3g} MB, and used for all sizes.)",
            )

    def measured(self, levels: Sequence[Level]) -> None:
        """Plans with these links from now on, and with nothing else: what NCCL says of its own gives way to them."""
        self.cluster = replace(self.cluster, levels=tuple(levels), fabric=None)
        self._measured, self._learned, self._owners = True, None, None
        self.clear()

    def learned(self, levels: Sequence[Level], *, at_start: bool = False) -> None:
        """Predicts with these links from now on, and gives the bits that it gave before: a clock must change none.

        Whether exponents are packed goes by them, because that changes none.

        Args:
            levels: With the links as they were seen.
            at_start: Nothing has travelled yet. Where units' rates differ they own by them from now on what they
                exchange, in plans whose bits do not depend on it.
        """
        self._learned = replace(self.cluster, levels=tuple(levels))
        if at_start:
            # A latency that was seen while the processors were busy would make chunks too few: it prices plans alone.
            assumed = [
                replace(level, link=replace(level.link, alpha_seconds=before.link.alpha_seconds))
                for level, before in zip(levels, self.cluster.levels, strict=True)
            ]
            uneven = any(level.unit_rates for level in levels)
            self._owners = replace(self.cluster, levels=tuple(assumed)) if uneven else None
            self._measured_at_start = True
            self.clear()
        else:
            self._refined = True
        self._reprice()
        log.info("%s", self.describe_links())

    def watch(self, on: bool) -> None:
        """Begins or ends to pack nothing, so that transfers show what the links give; with nothing in flight."""
        for each in self._packers:
            each.watched = on
        if self._packers:
            self._reprice()

    def _reprice(self) -> None:
        for key, route in self.items():
            plan = self._repriced(route.plan, key[2])
            self[key] = replace(route, plan=plan, chunks=self._evened(route.chunks, plan))

    @property
    def priced(self) -> Cluster:
        """The cluster that predictions are made for: with links as first steps have shown them, where they have."""
        return self._learned or self.cluster

    @property
    def is_measured(self) -> bool:
        """Whether the links are as `measured` says."""
        return self._measured

    def describe_links(self) -> str:
        """The rates that plans are predicted with, in one line, each with one word for where it comes from.

        `given`, `topology`, `probed` before the first step, seen in the first steps' `transfers`, `assumed`.
        """
        rates = ", ".join(
            f"{_rates(level)} {level.name} ({'assumed' if level.link.presumed else self._origin})"
            for number, level in enumerate(self.priced.levels)
            if self.cluster.widest(number) > 1
        )
        return f"links: {rates or 'none'}" + ("; `probe=True` measures them" if "(assumed)" in rates else "")

    @property
    def _origin(self) -> str:
        """Where the rates come from that are not assumed."""
        if self._measured:
            return "probed"
        if self._measured_at_start:
            return "transfers" if self._refined else "probed"
        if self._learned is not None:
            return "transfers"
        return "topology" if self.cluster.fabric is not None else "given"

    def plans(self) -> list[Plan]:
        """The plans in use."""
        return [route.plan for route in self.values()]

    def _plan(self, nbytes: int, layout: Layout | None) -> Plan:
        if self._compressor is not None and layout is not None:
            plan = self._compressed_plan(self._compressor, nbytes, layout)
            if plan is not None:
                return plan
        plan = plan_all_reduce(self.cluster, nbytes, name=self.plan_name, chunks=self.chunks, library=self.library)
        plan = with_reason(plan, self._why) if self._why else plan
        sums = self._compressor is not None and planned(self._compressor).is_sum
        if self._compressor is not None and sums and self.cluster.size > 1:
            return with_note(plan, f"{self._compressor.name} was asked for: it works between nodes alone.")
        if self._compressor is not None and layout is not None and self.cluster.size > 1:
            return with_note(
                plan,
                f"{self._compressor.name} was asked for, but nothing crosses between nodes: nothing is "
                'compressed (plan="flat" compresses between all ranks).',
            )
        return plan

    def _with_owners(self, plan: Plan, layout: Layout | None) -> Plan | None:
        """The same plan with owners by the links' rates; None where they are alike, or where bits would depend on it.

        Exact sums are made in the order in which the plan makes them without; so how many chunks there are is free.
        What is rounded element by element may be cut anywhere, too; other codecs would see other blocks, and what a
        second stage leaves out would lie with other ranks in every start.
        """
        compressed = any(phase.compressor for phase in plan.phases)
        if self._owners is None or not plan.phases or (compressed and not _is_by_element(self._compressor)):
            return None
        if plan.name == "flat" and (self._asked_for == "flat" or not self.cluster.all_apart(range(self.cluster.size))):
            return None
        price = EXACT
        if compressed:
            assert layout is not None
            price = self._price(plan.nbytes, layout, len(self.cluster.nodes), plan)
        name, chunks = "leader" if plan.name == "leader" else "hierarchical", plan.chunks if compressed else self.chunks
        made = plan_all_reduce(self._owners, plan.nbytes, name=name, chunks=chunks, price=price, library=self.library)
        if not any(phase.shares for phase in made.phases if phase.op == ALL_REDUCE):
            return None
        in_ring_order = compressed or not self._fixed_order
        phases = tuple(replace(phase, in_ring_order=in_ring_order and phase.op == ALL_REDUCE) for phase in made.phases)
        return replace(made, phases=phases, why=plan.why, notes=(*plan.notes, OWNED), payload_note=plan.payload_note)

    def _priced_for(self, plan: Plan) -> Cluster:
        """The cluster that a plan is priced for: where owners are equal, all links are as fast as the slowest."""
        if any(phase.shares for phase in plan.phases):
            return self.priced
        return replace(self.priced, levels=tuple(replace(level, unit_rates=()) for level in self.priced.levels))

    def _repriced(self, plan: Plan, layout: Layout | None) -> Plan:
        """The same plan with what it sends, as exponents are packed now, and how long that takes over the links."""
        compressed = next((phase for phase in plan.phases if phase.compressor), None)
        packs = compressed is not None and bool(self._packers)
        if not plan.phases or (self._learned is None and not packs):
            return plan
        price = EXACT
        if compressed is not None:
            assert layout is not None
            ranks = self.cluster.size if compressed.whole else len(self.cluster.nodes)
            price = self._price(plan.nbytes, layout, ranks, plan)
        cluster, by_links = self._priced_for(plan), compressed is not None and bool(compressed.shares)
        (priced,) = candidates(cluster, plan.nbytes, plan.name, plan.chunks, price, by_links=by_links)
        return replace(
            plan,
            seconds=priced.seconds,
            limit=priced.limit,
            busy_seconds=priced.busy_seconds,
            bytes_by_level=priced.bytes_by_level if packs else plan.bytes_by_level,
            assumed=presumed(cluster),
            payload_note=self._payload_note(plan),
        )

    def _price(self, nbytes: int, layout: Layout, group_size: int, plan: Plan | None = None) -> CodecPrice:
        """What the compressor does to a bucket.

        Args:
            nbytes: Of the bucket; payloads of 16-bit gradients are as large as of 32-bit ones.
            layout: Of the bucket.
            group_size: Ranks that exchange each shard.
            plan: Decides whether exponents are packed; without one they are.
        """
        from gradwire.comms.plan.codec_price import ELEMENT_NBYTES, ROUNDS, codec_seconds, owned_share, wire_ratio

        compressor, packers = self._compressor, self._packers
        assert compressor is not None
        even = 0.0 if plan is None or not packers else self._break_even(plan)

        def sent(each: Compressor, part: Layout, size: int) -> int:
            if isinstance(each, Packer) and plan is not None:
                return each.expected_nbytes(part, size, even, self._device_type)
            return each.wire_nbytes(part, size)

        ratio = wire_ratio(compressor, layout, group_size, sent if packers else None)
        ratio = ratio * ELEMENT_NBYTES * layout.numel / nbytes if nbytes else ratio
        expects = any(each.expects_to_pack(even, self._device_type) for each in packers)
        packing = expects if plan is not None else bool(packers)
        plain = {each.name: each.plain_name for each in packers}
        name = packers[0].name if packing else plain.get(compressor.name, compressor.name)
        codec = codec_seconds(name, self.gpu_memory()) if self.library == "nccl" else 0.0
        owned = owned_share(compressor, layout, group_size)
        return CodecPrice(compressor.name, ratio, codec, rounds=ROUNDS.get(name, EXCHANGE_ROUNDS), owned=owned)

    def compressed_name(self) -> str | None:
        """The plan that a compressor's buckets take, if it finds anything to do."""
        if self._compressor is None or self.cluster.size == 1:
            return None
        if self._asked_for == "flat" or len(self.cluster.nodes) == 1:
            return "flat"
        return "leader" if self._asked_for == "leader" else "hierarchical"

    def _compressed_plan(self, compressor: Compressor, nbytes: int, layout: Layout) -> Plan | None:
        """The plan with a compressor; None where there is nothing for it to do."""
        nodes, size, name = len(self.cluster.nodes), self.cluster.size, compressor.name

        def priced(plan_name: str, group_size: int, why: str) -> Plan:
            price = self._price(nbytes, layout, group_size)
            asked = partial(
                plan_all_reduce, self.cluster, nbytes, name=plan_name, chunks=self.chunks, library=self.library
            )
            plan = asked(price=price)
            if (known := self._price(nbytes, layout, group_size, plan)) != price:
                plan = asked(price=known)
            return replace(plan, why=f"{name} was asked for, {why}", payload_note=self._payload_note(plan))

        if self._asked_for == "flat" and size > 1:
            return priced("flat", size, "and the flat plan by name: it works between all ranks.")
        if nodes > 1:
            plan_name = "leader" if self._asked_for == "leader" else "hierarchical"
            return priced(plan_name, nodes, "and works on what crosses between nodes.")
        if planned(compressor).is_sum:
            return None
        if self._asked_for != "auto" or self.library != "nccl" or size == 1 or self.cluster.levels[0].link.presumed:
            return None
        # One node of GPUs: inside it, compression pays where the links are slow (PCIe), and costs where they are fast.
        from gradwire.comms.plan.codec_price import codec_price
        from gradwire.comms.plan.packing import price_as_sent

        price, plain = (codec_price(each, layout, size, self.gpu_memory()) for each in (name, "bf16"))
        price = price_as_sent(self.cluster, nbytes, "flat", price, (plain,), self.library)
        exact = plan_all_reduce(self.cluster, nbytes, chunks=self.chunks, library=self.library)
        compressed = plan_all_reduce(
            self.cluster, nbytes, name="flat", chunks=self.chunks, price=price, library=self.library
        )
        gain = exact.seconds / compressed.seconds
        if gain < COMPRESS_INSIDE_GAIN:
            return None
        return priced(
            "flat", size, f"and is predicted to be {gain:.2f}x faster inside this node, whose links are slow."
        )

    def _break_even(self, plan: Plan) -> float:
        """See `Member.break_even`, of the compressed phase of a plan; the same on all ranks."""
        if not self._packers:
            return 0.0
        from gradwire.comms.plan.packing import packing_break_even

        return packing_break_even(self._priced_for(plan), plan, self.library)

    def _evened(self, chunks: tuple[Chunk, ...], plan: Plan) -> tuple[Chunk, ...]:
        """The same chunks with the links as they are known now."""
        if not self._packers or not any(phase.compressor for phase in plan.phases):
            return chunks
        even = self._break_even(plan)
        return tuple(
            replace(
                chunk, parts=tuple(replace(part, break_even=even) if part.layouts else part for part in chunk.parts)
            )
            for chunk in chunks
        )

    def _payload_note(self, plan: Plan) -> str:
        """What the compressor says of its payloads in a plan; empty where it has no choice."""
        if not self._packers or not any(phase.compressor for phase in plan.phases):
            return ""
        even = self._break_even(plan)
        notes = (each.payload_note(even, self._device_type) for each in self._packers)
        return " ".join(dict.fromkeys(notes))

    def gpu_memory(self) -> float:
        """Bytes per second that codecs move on the slowest GPU; of the slowest known where it is not known."""
        from gradwire.comms.plan.codec_price import GPU_BYTES_PER_SECOND, gpu_bytes_per_second

        fabric = self.cluster.fabric
        return min(GPU_BYTES_PER_SECOND.values()) if fabric is None else gpu_bytes_per_second(fabric.compute_capability)

    def _part(
        self,
        phase: Phase,
        steps: list[list[Transfer]],
        run: tuple[int, int],
        layout: Layout | None,
        break_even: float,
        rings: Sequence[tuple[int, int]] = (),
    ) -> PhasePart:
        own = [tuple(transfer for transfer in step if self._rank in transfer.members) for step in steps]
        while len(own) > 1 and not own[-1]:
            own.pop()
        first = own[0] if own else ()
        layouts: tuple[Layout, ...] = ()
        if phase.compressor and self._compressor is not None and layout is not None:
            layouts = tuple(layout.cut(transfer.start, transfer.stop) for transfer in first)
        logical = sum(transfer.stop - transfer.start for transfer in first)
        sent = 0.0 if layouts else sum(self._sent_numel(transfer) for step in own for transfer in step)
        whole = len(first) == 1 and (first[0].start, first[0].stop) == run
        shares = tuple(member_shares(phase, transfer) for transfer in first) if layouts else ()
        owners = sorted({rank for transfer in steps[0] for rank in transfer.members}) if layouts else ()
        even = break_even if layouts else 0.0
        within = tuple(ring for ring in rings if ring[0] < run[1] and run[0] < ring[1]) if phase.in_ring_order else ()
        return PhasePart(
            phase, tuple(own), layouts, shares, whole, len(first), logical, sent, tuple(owners), even, within
        )

    def _sent_numel(self, transfer: Transfer) -> float:
        place = transfer.members.index(self._rank)
        return sent_nbytes(transfer.op, transfer.stop - transfer.start, len(transfer.members), place, transfer.bounds)

    def _partition(self, plan: Plan, layout: Layout | None) -> Partition:
        compressor = self._compressor
        exact = equal_partition if self._device_type == "cuda" else even_partition
        if compressor is None or layout is None:
            return exact
        if self._device_type == "cuda" and not any(phase.compressor for phase in plan.phases):
            return exact

        def partition(start: int, stop: int, parts: int) -> tuple[int, ...]:
            return tuple(start + offset for offset in compressor.partition(layout.cut(start, stop), parts))

        return partition


OWNED = "Owners by the links' rates as measured at the start, which changes no bit."
"""Of a plan whose shares a quick probe has given."""


def _in_ring_order(plan: Plan) -> bool:
    return any(phase.in_ring_order for phase in plan.phases)


def _is_by_element(compressor: Compressor | None) -> bool:
    return compressor is not None and planned(compressor).by_element
