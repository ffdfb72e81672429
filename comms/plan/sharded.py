"""What sharded training costs: seconds, bytes and memory of FSDP2 and HSDP, for every choice of what is compressed.

FSDP2 cuts a model into units, one for each `fully_shard` call, and runs three collectives for each unit and step: it
gathers the weights for the forward pass, gathers them again for the backward pass where they were given back
(`reshard_after_forward`), and reduce-scatters the gradients. `full` shards over all ranks, so all three cross the
network. `hybrid` (HSDP) shards inside the node, and all-reduces the gradients of the shards between nodes.

Of S bytes over n ranks on N nodes, g of them on a node and equal shards as FSDP2 cuts them:

    hierarchical all_gather, reduce_scatter   S (1 - g/n) out of each node: (N - 1)/N S where nodes are alike. No
                                              algorithm puts less on the busiest card: the node with the fewest ranks
                                              lacks that many weights, and holds that many sums for others
    flat ring                                 S (n - 1)/n over every edge of the ring that leaves a node; gloo's
                                              reduce_scatter is an all-reduce, twice that
    flat all_to_all of payloads               S g (n - g)/n out of a node: nothing is summed inside it before
    all_reduce between replicas               2 S (N - 1)/N

The phases of one collective follow one another, each unit's collectives follow those of the unit before it, and no
collective is cut into chunks: a prediction is rather too long than too short, by what overlaps inside a collective. On
GPUs collectives overlap with computing (the next unit's weights are gathered while this one computes). On CPUs torch
waits for each; what `gradwire.fsdp.apply` lets run meanwhile, in the backward pass, is not priced. Padding of FSDP2's
shards to equal sizes is left out. Nothing here has been measured on a GPU.

Sources: Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", VLDB 2023, sections 3.2, 3.3
(units, prefetch, hybrid sharding); torch 2.13, torch/distributed/fsdp/_fully_shard (order of the collectives); Wang et
al., "ZeRO++: extremely efficient collective communication for giant model training", 2023 (quantized weights and
gradients, weights kept inside the node for the backward pass).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradwire.comms.plan.advise import (
    HIDDEN,
    MOST_OF_IT,
    NOTHING_TO_SEND,
    WORTHWHILE,
    caution_of,
    condition_of,
    harm_of,
    limit_in_words,
)
from gradwire.comms.plan.algorithms import Messages
from gradwire.comms.plan.codec_price import ELEMENT_NBYTES, codec_facts
from gradwire.comms.plan.cost import EXACT, CodecPrice, CostModel, PhaseCost, busiest
from gradwire.comms.plan.nccl_model import nccl_model
from gradwire.comms.plan.plan import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Phase
from gradwire.comms.plan.planner import (
    HIERARCHY_HOST_SECONDS,
    MINIMUM_GAIN,
    NCCL_MINIMUM_GAIN,
    compressed_cost,
    nccl_seconds,
)
from gradwire.comms.plan.traffic import Floats, shape_of
from gradwire.topology.cluster import Cluster

FULL, HYBRID = "full", "hybrid"
FLAT, HIERARCHICAL = "flat", "hierarchical"
SHARDS = ("exact", "bf16", "int8", "int4")
"""How gradients travel in the reduce-scatter."""
WEIGHTS = ("exact", "bf16", "int8")
"""How weights travel in the all-gather."""
RESHARD = ("yes", "no", "node")
"""What happens to gathered weights after the forward pass: given back, kept, or kept in shards inside the node
(`reshard_after_forward` as True, False, or the number of ranks on a node)."""

UNITS = 33
"""Calls of `fully_shard` where nothing else is known: 32 blocks and the root, as in a model of 7 billion parameters.
Source: Touvron et al., "LLaMA: open and efficient foundation language models", 2023, table 2."""

OPTIMIZER_NBYTES = {"sgd": 4.0, "adagrad": 4.0}
"""State for each parameter in float32: SGD's momentum, Adagrad's sum."""
OTHER_OPTIMIZER_NBYTES = 8.0
"""The same of Adam and its relatives: two moments."""

GATHERED_UNITS = 2
"""Units whose weights are whole at once: the one that computes, and the one that is gathered meanwhile."""

MOVED, EXCHANGED, REDUCED = "gather or reduce_scatter", "all_to_all", "all_reduce"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedWorkload:
    """What one step of sharded training moves, and what else it does.

    Attributes:
        numel: Parameters of the whole model.
        forward_seconds: A forward pass without communication; 0 is unknown.
        backward_seconds: A backward pass without communication; 0 is unknown.
        units: Calls of `fully_shard`, taken to be of one size.
        param_nbytes: Of one element of the gathered weights (`param_dtype`).
        reduce_nbytes: Of one element of the gradients that are reduced (`reduce_dtype`).
        reshard: One of `RESHARD`.
        optimizer: `sgd`, `adam`, ...: for its memory, and because some compressors require one.
        overlap: Whether collectives run while the processor computes: on GPUs.
        memory_nbytes: What one rank has; None where that is unknown.
        activation_nbytes: What activations and all else take of it.
    """

    numel: int
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    units: int = UNITS
    param_nbytes: int = ELEMENT_NBYTES
    reduce_nbytes: int = ELEMENT_NBYTES
    reshard: str = "yes"
    optimizer: str = "sgd"
    overlap: bool = True
    memory_nbytes: float | None = None
    activation_nbytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("numel", "units", "param_nbytes", "reduce_nbytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; wanted a whole number of at least 1")
        for name in ("forward_seconds", "backward_seconds", "activation_nbytes"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}; wanted a number >= 0")
        if self.memory_nbytes is not None and not self.memory_nbytes > 0:
            raise ValueError(f"`memory_nbytes` is {self.memory_nbytes}; wanted a number > 0")
        if self.reshard not in RESHARD:
            raise ValueError(f"`reshard` is {self.reshard!r}; wanted one of {', '.join(RESHARD)}")

    @property
    def compute_seconds(self) -> float:
        """Both passes without communication; 0 is unknown."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True)
class Leg:
    """One collective of one unit.

    Attributes:
        name: `all_gather`, `reduce_scatter` or `all_reduce`.
        seconds: From its start to its end, encoding and decoding included.
        moved: The cost of each of its phases and the bytes that the phase moves in place of a bucket.
        busy: What the seconds are spent on: a level's name, `latency` or `processor` -> seconds.
    """

    name: str
    seconds: float = 0.0
    moved: tuple[tuple[PhaseCost, float], ...] = ()
    busy: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What one rank holds, in bytes.

    Attributes:
        own_nbytes: FSDP2's own: shards of weights, gradients and the optimizer's state, gathered units, the gradients
            of one unit.
        kept_nbytes: Beyond that, from step to step: the residuals and momenta of `compressor`.
        buffer_nbytes: Beyond that, while a unit's collectives run.
        residual_nbytes: What a residual for `shards` would keep where a user pays for one; in none of the others.
    """

    own_nbytes: float
    kept_nbytes: float
    buffer_nbytes: float
    residual_nbytes: float

    @property
    def extra_nbytes(self) -> float:
        """Beyond FSDP2's own."""
        return self.kept_nbytes + self.buffer_nbytes


@dataclass(frozen=True, slots=True)
class ShardedOffer:
    """One way to shard with one choice of what is compressed.

    Attributes:
        sharded: `full` or `hybrid`.
        form: `flat` (each collective over its whole group, as FSDP2 does) or `hierarchical`.
        shards: One of `SHARDS`.
        weights: One of `WEIGHTS`.
        compressor: Between replicas; `none` where there are none.
        step_seconds: Both passes with communication; without known passes, communication alone.
        seconds: All collectives of a step, one after another.
        exposed_seconds: What communication adds to the passes.
        hidden: Communication all but disappears behind the passes.
        bytes_by_level: In a step, what leaves the busiest unit below each level.
        legs: The collectives of a step: `forward_gather`, `backward_gather`, `reduce_scatter`, `all_reduce` ->
            (seconds in a step, bytes by level).
        memory: Of one rank.
        fits: Whether that is less than a rank has; None where that is unknown.
        limit: What most of the time is spent on, in words.
        caution: Why it is not recommended whatever its speed.
    """

    sharded: str
    form: str
    shards: str
    weights: str
    compressor: str
    step_seconds: float
    seconds: float
    exposed_seconds: float
    hidden: bool
    bytes_by_level: dict[str, float]
    legs: dict[str, tuple[float, dict[str, float]]]
    memory: RankMemory
    fits: bool | None
    limit: str
    caution: str

    @property
    def name(self) -> str:
        """`full flat`, `hybrid hierarchical shards=bf16 compressor=int8`, ..."""
        words = [self.sharded, self.form]
        words += [
            f"{option}={value}"
            for option, value in (("shards", self.shards), ("weights", self.weights), ("compressor", self.compressor))
            if value not in ("exact", EXACT.name)
        ]
        return " ".join(words)

    @property
    def exact(self) -> bool:
        """Whether nothing is compressed."""
        return self.harm == 0

    @property
    def harm(self) -> int:
        """How much is lost, as a rank: 0 is exact, and each part adds its place in `HARMLESS_FIRST`."""
        return sum(
            harm_of(EXACT.name if part == "exact" else part) for part in (self.shards, self.weights, self.compressor)
        )


@dataclass(frozen=True, slots=True)
class ShardedAdvice:
    """Everything that was priced, and the verdict.

    Attributes:
        offers: All of them, those of the way of sharding that was asked for first.
        plain: What torch does alone, as asked for: flat and exact.
        recommend: One of the offers.
        why: The reason, in sentences.
    """

    offers: tuple[ShardedOffer, ...]
    plain: ShardedOffer
    recommend: ShardedOffer
    why: str


class ShardedCosts:
    """Prices the collectives of one unit on one cluster.

    Args:
        cluster: Where the ranks are and what the links give.
        workload: What a step moves.
        prices: Of the compressors, by name, as `codec_price` makes them; `bf16`, `int8` and `int4` are also what
            `shards` and `weights` send.
        memory_bytes_per_second: Of the processor that encodes.
        library: Who runs flat collectives: `gloo` or `nccl`.

    Raises:
        ValueError: A price is missing.
    """

    def __init__(
        self,
        cluster: Cluster,
        workload: ShardedWorkload,
        prices: Sequence[CodecPrice],
        memory_bytes_per_second: float,
        library: str = "gloo",
    ) -> None:
        self.cluster, self.workload, self.library = cluster, workload, library
        self.prices = {price.name: price for price in (*prices, EXACT)}
        missing = [name for name in SHARDS[1:] if name not in self.prices]
        if missing:
            raise ValueError(f"`prices` has none for {', '.join(missing)}; wanted one for each of {SHARDS[1:]}")
        self.numel = workload.numel / workload.units
        self._rate = memory_bytes_per_second
        self._nodes = cluster.nodes
        self._smallest = min(map(len, self._nodes))
        self._model = CostModel(cluster, {})
        self._nccl = nccl_model(cluster) if cluster.fabric is not None else None

    def payload_nbytes(self, choice: str, exact_nbytes: float) -> float:
        """Bytes of one element on the wire.

        Args:
            choice: Of `SHARDS` or `WEIGHTS`.
            exact_nbytes: Of an element that is sent as it is.
        """
        return exact_nbytes if choice == "exact" else ELEMENT_NBYTES * self.prices[choice].ratio

    def levels(self, sharded: str) -> list[int]:
        """Levels with siblings in a group that shares the weights."""
        return [level for level in self.cluster.wide_levels if sharded == FULL or level == 0]

    def group_size(self, sharded: str) -> int:
        """Ranks that share the weights; of unequal nodes those of the smallest."""
        return self.cluster.size if sharded == FULL else self._smallest

    def runs_as(self, form: str, choice: str) -> str:
        """The form that a collective of shards or weights really has: on CUDA exact ones are NCCL's own calls.

        Args:
            form: That was asked for.
            choice: Of `SHARDS` or `WEIGHTS`.
        """
        return FLAT if choice == "exact" and self._nccl is not None else form

    def all_gather(self, sharded: str, form: str, weights: str) -> Leg:
        """One unit's weights, gathered on every rank; payloads travel as they are and are decoded at the end."""
        form = self.runs_as(form, weights)
        exact = self.workload.param_nbytes
        element = self.payload_nbytes(weights, exact)
        nbytes, members = element * self.numel, self.group_size(sharded)
        steps = [
            (MOVED, level, count, cost, nbytes)
            for level, count, cost in reversed(self._phases(sharded, form, passes=1))
        ]
        codec = 0.0
        if weights != "exact" and members > 1:  # encode a shard, decode them all
            codec = (exact + element) * (1 + 1 / members) * self.numel / self._rate
        return self._leg(ALL_GATHER, steps, codec)

    def reduce_scatter(self, sharded: str, form: str, shards: str) -> Leg:
        """One unit's gradients, summed on the ranks that own them.

        Flat and compressed, every rank sends its payloads to every owner. In a hierarchy the levels below the highest
        sum exactly, and the highest sends payloads.
        """
        form = self.runs_as(form, shards)
        exact = self.workload.reduce_nbytes
        element = self.payload_nbytes(shards, exact)
        passes = 2 if self.library == "gloo" else 1
        phases = self._phases(sharded, form, passes=passes)
        if shards == "exact" or not phases:
            steps = [(MOVED, level, count, cost, exact * self.numel) for level, count, cost in phases]
            return self._leg(REDUCE_SCATTER, steps, 0.0)
        *inner, (level, count, cost) = phases
        if form == FLAT:
            cost = self._all_to_all(sharded)
        steps = [(MOVED, lower, each, price, exact * self.numel) for lower, each, price in inner]
        steps.append((EXCHANGED, level, count, cost, element * self.numel))
        # Encode what this rank stands for, decode as much from the others, write the sum.
        touched = self._region(sharded, form) * (exact + 2 * element + exact / count)
        return self._leg(REDUCE_SCATTER, steps, touched * self.numel / self._rate)

    def all_reduce(self, form: str, compressor: str) -> Leg:
        """The gradients of one unit's shards, summed over the replicas: one rank of each node.

        Flat is one ring; in a hierarchy of more than two levels the levels below the highest sum exactly first.
        """
        if len(self._nodes) == 1:
            return Leg(ALL_REDUCE)
        nbytes = float(self.workload.reduce_nbytes * self.numel)
        level = self.cluster.outermost
        if form == FLAT:
            rails = list(zip(*self._nodes, strict=True))
            ring = self._ring(rails, passes=2, share=1 / self._smallest, spread=False)
            return self._leg(ALL_REDUCE, [(REDUCED, level, len(self._nodes), ring, nbytes)], 0.0)
        inner = [each for each in self.cluster.wide_levels if 0 < each < level]
        parts = {each: self.cluster.widest(each) for each in (0, *inner)}
        model = CostModel(self.cluster, parts)
        members = self.cluster.widest(level)
        down, up = (
            [(MOVED, each, parts[each], model.phase(Phase(op, each, parts[each])), nbytes) for each in inner]
            for op in (REDUCE_SCATTER, ALL_GATHER)
        )
        price = self.prices[compressor]
        top = Phase(ALL_REDUCE, level, compressor=None if price is EXACT else compressor)
        cost = model.phase(top)
        if price is EXACT:
            return self._leg(ALL_REDUCE, [*down, (REDUCED, level, members, cost, nbytes), *up[::-1]], 0.0)
        leg = self._leg(ALL_REDUCE, [*down, *up[::-1]], 0.0)
        whole = ELEMENT_NBYTES * self.numel
        cost = compressed_cost(self.cluster, top, cost, price)
        wire, seconds = cost.byte_seconds(whole), cost.seconds(whole)
        if self._nccl is not None:
            seconds = nccl_seconds(self._nccl, self.cluster, top, cost, price)(whole)
        codec = price.seconds(whole * float(model.shares(level).max()))
        busy = dict(leg.busy or {})
        for what, took in ((self._name(level), wire), ("latency", seconds - wire), ("processor", codec)):
            busy[what] = busy.get(what, 0.0) + took
        return Leg(ALL_REDUCE, leg.seconds + seconds + codec, (*leg.moved, (cost, whole * price.ratio)), busy)

    def memory(self, sharded: str, form: str, shards: str, weights: str, compressor: str) -> RankMemory:
        """What one rank holds."""
        load, owners = self.workload, self.group_size(sharded)
        optimizer = OPTIMIZER_NBYTES.get(load.optimizer, OTHER_OPTIMIZER_NBYTES)
        gathered = GATHERED_UNITS * self.numel * load.param_nbytes
        if load.reshard != "yes" and owners > 1:
            kept = 1.0 if load.reshard == "no" else 1 / self._smallest
            gathered += kept * load.numel * load.param_nbytes
        own = (2 * ELEMENT_NBYTES + optimizer) * load.numel / owners
        own += gathered + self.numel * (load.param_nbytes + load.reduce_nbytes)
        part, buffers = self._region(sharded, form), 0.0
        hierarchy = form == HIERARCHICAL and len(self.levels(sharded)) > 1
        if hierarchy:  # the sums of the node
            buffers += part * self.numel * load.reduce_nbytes
        sent = self.payload_nbytes(shards, load.reduce_nbytes)
        if shards != "exact":  # payloads sent and received
            buffers += 2 * part * self.numel * sent
        elif form == HIERARCHICAL and owners > 1:  # what the owner sums is received first
            buffers += part * self.numel * sent
        if weights != "exact":  # payloads of all ranks
            buffers += (1 + 1 / owners) * self.numel * self.payload_nbytes(weights, load.param_nbytes)
        elif hierarchy:  # what the other nodes have sent, before it is in order
            buffers += part * self.numel * load.param_nbytes
        lasting = 0.0
        if compressor != EXACT.name:
            everywhere, owned = codec_facts(compressor).kept_nbytes
            lasting = (everywhere + owned / len(self._nodes)) * load.numel / owners
            buffers += 2 * ELEMENT_NBYTES * self.prices[compressor].ratio * self.numel / owners
        residual = codec_facts("int8").kept_nbytes[0] * part * load.numel if shards != "exact" else 0.0
        return RankMemory(own, lasting, buffers, residual)

    def _region(self, sharded: str, form: str) -> float:
        """The part of a unit that a rank sends at the highest level: what its node sums, cut among its ranks."""
        if form == FLAT or len(self.levels(sharded)) < 2:
            return 1.0
        return 1 / self._smallest

    def _phases(self, sharded: str, form: str, passes: int) -> list[tuple[int, int, PhaseCost]]:
        """Level, members and cost of each phase of a reduce_scatter, in order; an all_gather's in reverse."""
        levels = self.levels(sharded)
        if not levels:
            return []
        if form == HIERARCHICAL:
            return [(level, self.cluster.widest(level), self._scatter(level)) for level in levels]
        rings = [tuple(range(self.cluster.size))] if sharded == FULL else self._nodes
        cost = self._ring(rings, passes=passes, share=1.0, spread=True)
        if len(self.levels(FULL)) == 1 or sharded == HYBRID:
            share = self.cluster.levels[levels[-1]].link.ring_share if self.library == "gloo" else 1.0
            cost = replace(cost, seconds_per_byte=cost.seconds_per_byte / share)
        return [(levels[-1], max(map(len, rings)), cost)]

    def _scatter(self, level: int) -> PhaseCost:
        """A reduce_scatter between the units of one level, each for the ranks that it has; an all_gather costs as much.

        A unit of k of its parent's p ranks holds the sums of all its parent's shards and keeps its own: it sends
        1 - k/p of them, an equal part from each of its ranks. An all_gather passes on everything but what the next
        unit owns: of all units the busiest sends the same.
        """
        shape, link = shape_of(self.cluster), self.cluster.levels[level].link
        ids = shape.unit_ids[level]
        parents = shape.unit_ids[level + 1] if level + 1 < shape.depth else np.zeros_like(ids)
        child, parent = np.bincount(ids)[ids], np.bincount(parents)[parents]
        everyone = np.arange(shape.size)
        egress = shape.book(everyone, np.full_like(everyone, level), (1 - child / parent) / child)
        alpha = link.alpha_seconds
        if level and link.exchange_alpha_seconds is not None:
            alpha = link.exchange_alpha_seconds
        share = link.exchange_share if level else 1.0
        messages = self.cluster.widest(level) - 1
        return PhaseCost(messages * alpha, self._model.slowest(egress, spread=False) / share, egress)

    def _ring(self, rings: Sequence[Sequence[int]], *, passes: int, share: float, spread: bool) -> PhaseCost:
        """Rings of ranks that run at once, each element past every edge but one, `passes` times.

        Args:
            rings: Ranks of each, in order.
            passes: 1 for an all_gather or reduce_scatter, 2 for an all_reduce.
            share: Of the bucket that each ring carries.
            spread: As in `Link.rate`.
        """
        sources = np.concatenate([np.array(ring, dtype=np.intp) for ring in rings])
        targets = np.concatenate([np.roll(np.array(ring, dtype=np.intp), -1) for ring in rings])
        counts = np.concatenate([np.full(len(ring), len(ring)) for ring in rings])
        ends = np.cumsum([len(ring) for ring in rings])[:-1]

        def critical(alphas: Floats) -> float:
            return passes * max(float(edges.sum() - edges.max()) for edges in np.split(alphas, ends))

        messages = Messages(sources, targets, passes * share * (counts - 1) / counts, critical)
        return self._model.messages(messages, spread=spread)

    def _all_to_all(self, sharded: str) -> PhaseCost:
        """Equal parts from every rank of a group to every other, for each byte that one rank holds."""
        if sharded == HYBRID or len(self._nodes) == 1:
            return self._scatter(0)
        both = self._model.exchange()
        egress = replace(both.egress, nbytes=tuple(each / 2 for each in both.egress.nbytes))
        return PhaseCost(both.alpha_seconds / 2, both.seconds_per_byte / 2, egress)

    def _leg(self, name: str, steps: Sequence[tuple[str, int, int, PhaseCost, float]], codec: float) -> Leg:
        """Phases one after another: what runs, its level, its members, its cost, and the bytes that it moves."""
        busy: dict[str, float] = {"processor": codec}
        total = codec
        for kind, level, members, cost, nbytes in steps:
            wire, seconds = cost.byte_seconds(nbytes), cost.seconds(nbytes)
            if self._nccl is not None:
                crossing = 0 if level == 0 else len(self._nodes) - 1
                sent = cost.egress.of_busiest_rank(level) * nbytes
                if kind == EXCHANGED:
                    seconds = self._nccl.all_to_all(members, crossing, wire)
                elif kind == REDUCED:
                    seconds = self._nccl.all_reduce_between(members, wire, sent)
                else:
                    seconds = self._nccl.gather(members, crossing, wire, sent)
            total += seconds
            for what, took in ((self._name(level), wire), ("latency", seconds - wire)):
                busy[what] = busy.get(what, 0.0) + took
        return Leg(name, total, tuple((cost, nbytes) for *_, cost, nbytes in steps), busy)

    def _name(self, level: int) -> str:
        return self.cluster.levels[level].name


def advise_sharded(
    cluster: Cluster,
    sharded: str,
    workload: ShardedWorkload,
    prices: Sequence[CodecPrice],
    memory_bytes_per_second: float,
    *,
    library: str = "gloo",
) -> ShardedAdvice:
    """Prices every choice for sharded training and recommends one.

    Args:
        cluster: Where the ranks are and what the links give.
        sharded: `full` or `hybrid`: what was asked about. The other is priced too; it is recommended only where it
            is known to fit into memory and is faster, or where what was asked about is known not to fit.
        workload: What a step moves.
        prices: As for `ShardedCosts`.
        memory_bytes_per_second: Of the processor that encodes.
        library: Who runs flat collectives: `gloo` or `nccl`.

    Raises:
        ValueError: `sharded` is unknown, or is hybrid and the nodes have different numbers of ranks.
    """
    if sharded not in (FULL, HYBRID):
        raise ValueError(f"`sharded` is {sharded!r}; wanted {FULL} or {HYBRID}")
    alike = len(set(map(len, cluster.nodes))) == 1
    if sharded == HYBRID and not alike:
        raise ValueError(
            f"`sharded` is {HYBRID}, but there are {cluster.describe()}; wanted nodes with the same number of ranks, "
            f"because a device mesh is rectangular: use {FULL}"
        )
    costs = ShardedCosts(cluster, workload, prices, memory_bytes_per_second, library)
    offers = offers_of(costs, sharded)
    other = HYBRID if sharded == FULL else FULL
    if alike and len(cluster.nodes) > 1:
        offers += offers_of(costs, other)
    plain = next(offer for offer in offers if offer.form == FLAT and offer.exact)
    return _verdict(offers, plain, workload, cluster)


def offers_of(costs: ShardedCosts, sharded: str) -> tuple[ShardedOffer, ...]:
    """Every choice for one way of sharding, flat and exact first.

    Choices that save no byte are left out, and few bits between ranks of one node, which `gradwire.fsdp.apply` leaves
    exact.
    """
    load = costs.workload
    shards = [each for each in SHARDS if _saves(costs, each, load.reduce_nbytes)]
    weights = [each for each in WEIGHTS if _saves(costs, each, load.param_nbytes)]
    if sharded == HYBRID or len(costs.cluster.nodes) == 1:  # inside a node nothing is encoded: see `sharded/nodes.py`
        shards, weights = ["exact"], ["exact"]
    several = sharded == HYBRID and len(costs.cluster.nodes) > 1
    found = []
    for form in (FLAT, HIERARCHICAL):
        gathers = {each: costs.all_gather(sharded, form, each) for each in weights}
        scatters = {each: costs.reduce_scatter(sharded, form, each) for each in shards}
        native = sharded == HYBRID and form == FLAT  # torch's own: there is nothing to compress with
        compressors = [EXACT.name, *(each for each in costs.prices if several and not native and each != EXACT.name)]
        reduces = {
            each: costs.all_reduce(form, each) if several else Leg(ALL_REDUCE)
            for each in compressors
            if each == EXACT.name or ELEMENT_NBYTES * costs.prices[each].ratio < load.reduce_nbytes
        }
        again = costs.all_gather(HYBRID, form, "exact") if load.reshard == "node" and sharded == FULL else None
        for weight, gather in gathers.items():
            back = again or (Leg(ALL_GATHER) if load.reshard == "no" else gather)
            for shard, scatter in scatters.items():
                as_flat = sharded == FULL and {costs.runs_as(form, each) for each in (shard, weight)} == {FLAT}
                if form == HIERARCHICAL and as_flat:
                    continue
                for compressor, reduce in reduces.items():
                    if not native or (shard == weight == "exact"):
                        found.append(
                            _offer(costs, (sharded, form, shard, weight, compressor), gather, back, scatter, reduce)
                        )
    return tuple(found)


def step_seconds(workload: ShardedWorkload, forward_gather: float, backward_gather: float, reduction: float) -> float:
    """Seconds of both passes with communication.

    Where collectives overlap, two resources take turns: the network serves one unit's collectives while the processor
    computes another. The first unit's weights are waited for in both passes, and the last unit's reduction.

    Args:
        workload: Seconds of the passes, and the number of units.
        forward_gather: Seconds of one unit's all-gather in the forward pass.
        backward_gather: In the backward pass.
        reduction: Of one unit's gradients: reduce-scatter and all-reduce.
    """
    units = workload.units
    if not workload.overlap:
        return workload.compute_seconds + units * (forward_gather + backward_gather + reduction)
    forward, backward = workload.forward_seconds / units, workload.backward_seconds / units
    return (
        forward_gather
        + forward
        + (units - 1) * max(forward, forward_gather)
        + backward_gather
        + backward
        + (units - 1) * max(backward, backward_gather + reduction)
        + reduction
    )


def _saves(costs: ShardedCosts, choice: str, exact_nbytes: float) -> bool:
    return choice == "exact" or costs.payload_nbytes(choice, exact_nbytes) < exact_nbytes


def _offer(
    costs: ShardedCosts, choice: tuple[str, str, str, str, str], gather: Leg, back: Leg, scatter: Leg, reduce: Leg
) -> ShardedOffer:
    load, units = costs.workload, costs.workload.units
    step = step_seconds(load, gather.seconds, back.seconds, scatter.seconds + reduce.seconds)
    exposed = step - load.compute_seconds
    unavoidable = gather.seconds + back.seconds + scatter.seconds + reduce.seconds
    hidden = load.compute_seconds > 0 and load.overlap and exposed <= unavoidable + HIDDEN * load.compute_seconds
    named = {"forward_gather": gather, "backward_gather": back, "reduce_scatter": scatter, "all_reduce": reduce}

    def traffic(*legs: Leg) -> dict[str, float]:
        return busiest(costs.cluster, [(cost, units * nbytes) for leg in legs for cost, nbytes in leg.moved])

    sharded, form, shards, weights, compressor = choice
    memory = costs.memory(*choice)
    needed = memory.own_nbytes + memory.extra_nbytes + load.activation_nbytes
    return ShardedOffer(
        sharded,
        form,
        shards,
        weights,
        compressor,
        step,
        units * sum(leg.seconds for leg in named.values()),
        exposed,
        hidden,
        traffic(*named.values()),
        {name: (units * leg.seconds, traffic(leg)) for name, leg in named.items()},
        memory,
        None if load.memory_nbytes is None else needed <= load.memory_nbytes,
        _limit(costs.cluster, named.values()),
        caution_of(compressor, load.optimizer, library=costs.library),
    )


def _limit(cluster: Cluster, legs: Iterable[Leg]) -> str:
    busy: dict[str, float] = {}
    for leg in legs:
        for what, seconds in (leg.busy or {}).items():
            busy[what] = busy.get(what, 0.0) + seconds
    most = max(busy, key=lambda what: busy[what], default="")
    return limit_in_words(most, cluster).removesuffix(" of messages") if busy.get(most) else NOTHING_TO_SEND


def _verdict(
    offers: tuple[ShardedOffer, ...], plain: ShardedOffer, workload: ShardedWorkload, cluster: Cluster
) -> ShardedAdvice:
    asked = [offer for offer in offers if offer.sharded == plain.sharded]
    others = [offer for offer in offers if offer.sharded != plain.sharded]
    # None (memory unknown) is good enough for what was asked about, but not for a change to something else.
    able = [offer for offer in asked if offer.fits is not False]
    if plain.sharded == FULL or not able:
        able += [offer for offer in others if offer.fits]
    able = [offer for offer in able if not offer.caution]
    if not able:
        return ShardedAdvice(offers, plain, plain, _too_large(offers, workload))
    exact = _exact(able, workload, cluster)
    best = min(able, key=lambda offer: offer.step_seconds)
    enough = best.step_seconds * (1 + WORTHWHILE)
    if not workload.compute_seconds:
        enough = max(enough, exact.step_seconds - MOST_OF_IT * (exact.step_seconds - best.step_seconds))
    close = [offer for offer in able if offer.step_seconds <= enough]
    mildest = min(close, key=lambda offer: (offer.harm, offer.step_seconds))
    chosen = mildest
    if mildest.exact or mildest.step_seconds > exact.step_seconds * (1 - WORTHWHILE):
        chosen = exact
    sentences = [
        _why_compressed(chosen, exact, workload) if chosen is not exact else _why_exact(exact, workload),
        condition_of(chosen.compressor, workload.optimizer),
        _why_form(chosen, offers, cluster),
        _why_sharded(chosen, plain, offers, workload),
    ]
    return ShardedAdvice(offers, plain, chosen, " ".join(filter(None, sentences)))


def _exact(able: Sequence[ShardedOffer], workload: ShardedWorkload, cluster: Cluster) -> ShardedOffer:
    """The exact offer to beat: of each way of sharding the flat one, unless another gains enough, then the fastest."""
    found: list[ShardedOffer] = []
    for sharded in dict.fromkeys(offer.sharded for offer in able):
        candidates = [offer for offer in able if offer.exact and offer.sharded == sharded]
        flat = next((offer for offer in candidates if offer.form == FLAT), None)
        best = min(candidates, key=lambda offer: offer.step_seconds, default=None)
        if flat is not None and best is not None:
            best = best if _gains(best, flat, workload, cluster) else flat
        found += [best] if best is not None else []
    first = found[0]
    fastest = min(found, key=lambda offer: offer.step_seconds)
    return fastest if fastest.step_seconds < first.step_seconds * (1 - WORTHWHILE) else first


def _gains(best: ShardedOffer, flat: ShardedOffer, workload: ShardedWorkload, cluster: Cluster) -> bool:
    """Whether a hierarchy replaces torch's own collectives: the planner's margins, for three collectives a unit."""
    saved = flat.seconds - best.seconds
    if cluster.fabric is None:
        return saved > flat.seconds * MINIMUM_GAIN
    calls = workload.units * sum(seconds > 0 for seconds, _ in flat.legs.values())
    return saved > max(flat.seconds * NCCL_MINIMUM_GAIN, calls * HIERARCHY_HOST_SECONDS)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB"


def _needed(offer: ShardedOffer, workload: ShardedWorkload) -> float:
    return offer.memory.own_nbytes + offer.memory.extra_nbytes + workload.activation_nbytes


def _too_large(offers: Sequence[ShardedOffer], workload: ShardedWorkload) -> str:
    least = min(offers, key=lambda offer: _needed(offer, workload))
    return (
        f"Nothing fits: {least.name} needs least, {_gb(_needed(least, workload))} a rank, of "
        f"{_gb(workload.memory_nbytes or 0.0)}. Use more ranks, a narrower dtype, or activation checkpointing."
    )


def _spent(offer: ShardedOffer, workload: ShardedWorkload) -> str:
    if not workload.compute_seconds:
        return f"communication takes {_ms(offer.seconds)} (how long the passes take was not given)."
    if offer.hidden:
        return f"communication ({_ms(offer.seconds)}) hides behind the passes ({_ms(workload.compute_seconds)})."
    return f"the exact step takes {_ms(offer.step_seconds)}."


def _why_exact(exact: ShardedOffer, workload: ShardedWorkload) -> str:
    if not exact.seconds:
        return "Do not compress: there is one rank, so nothing travels."
    text = f"Do not compress: {_spent(exact, workload)}"
    if exact.hidden:
        return f"{text} A compressor can save nothing more."
    return f"{text} No choice shortens that by more than {WORTHWHILE:.0%}."


def _why_compressed(chosen: ShardedOffer, exact: ShardedOffer, workload: ShardedWorkload) -> str:
    known = workload.compute_seconds > 0
    what = "step" if known else "communication (how long the passes take was not given)"
    among = f"within {WORTHWHILE:.0%} of the fastest" if known else f"that save {MOST_OF_IT:.0%} of the most"
    harmed = "gradients" if chosen.weights == "exact" else "weights and gradients"
    if chosen.shards == "exact" and chosen.compressor == EXACT.name:
        harmed = "weights"
    return (
        f"The {what} goes from {_ms(exact.step_seconds)}, exact, to {_ms(chosen.step_seconds)}, "
        f"{exact.step_seconds / chosen.step_seconds:.2f}x, because the exact one is limited by {exact.limit}; of the "
        f"choices {among} it changes the {harmed} least. It is lossy: check the accuracy of the trained model against "
        "a run without it."
    )


def _why_form(chosen: ShardedOffer, offers: Sequence[ShardedOffer], cluster: Cluster) -> str:
    if not chosen.exact or not chosen.seconds:
        return ""
    flat = next(offer for offer in offers if offer.sharded == chosen.sharded and offer.form == FLAT and offer.exact)
    if chosen is flat:
        gain = MINIMUM_GAIN if cluster.fabric is None else NCCL_MINIMUM_GAIN
        return f"torch's own collectives: no hierarchy is predicted to be more than {gain:.0%} faster."
    return f"The hierarchy is {flat.seconds / chosen.seconds:.2f}x faster than torch's own collectives."


def _why_sharded(
    chosen: ShardedOffer, plain: ShardedOffer, offers: Sequence[ShardedOffer], workload: ShardedWorkload
) -> str:
    needs = f"needs {_gb(_needed(chosen, workload))} a rank"
    needs += "" if workload.activation_nbytes else ", activations not counted"
    if chosen.sharded != plain.sharded:
        if plain.fits is False and chosen.sharded == FULL:
            return (
                f"Use {FULL} instead of {HYBRID}, which does not fit: {HYBRID} needs {_gb(_needed(plain, workload))}."
            )
        return (
            f"Use {HYBRID} instead of {FULL}: it fits ({needs}, of {_gb(workload.memory_nbytes or 0.0)}), and the "
            f"weights then stay inside the nodes; exact {FULL} as torch runs it takes {_ms(plain.step_seconds)}."
        )
    able = [
        offer
        for offer in offers
        if offer.sharded == HYBRID
        and not offer.caution
        and offer.step_seconds <= chosen.step_seconds * (1 + WORTHWHILE)
    ]
    rival = min(able, key=lambda offer: (offer.harm, offer.step_seconds), default=None)
    if plain.sharded == FULL and rival is not None and _clearly_better(rival, chosen):
        choice = rival.name.removeprefix(f"{HYBRID} {rival.form}").strip() or "exact"
        needs = f"{HYBRID} ({choice}) would take {_ms(rival.step_seconds)} and needs {_gb(_needed(rival, workload))}"
        if rival.fits is False:
            return f"{needs} a rank, which there is not."
        return f"{needs} a rank: say what there is with --gpu-memory-gb."
    return ""


def _clearly_better(rival: ShardedOffer, chosen: ShardedOffer) -> bool:
    """Whether it loses less and is about as fast, or loses as much and is faster."""
    if rival.harm != chosen.harm:
        return rival.harm < chosen.harm
    return rival.step_seconds < chosen.step_seconds * (1 - WORTHWHILE)
