"""A plan is data: the ordered phases for one bucket, how each is carried out, what they cost, and why they were chosen.

`schedule.py` turns a plan into transfers. The executor runs those on real transports, the simulator of the tests runs
the same ones on plain arrays; nothing else decides how data moves.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

REDUCE_SCATTER = "reduce_scatter"
ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"

RING = "ring"
TREE = "tree"
HALVING_DOUBLING = "halving_doubling"
NVLS = "nvls"
NVLS_TREE = "nvls_tree"

NOTHING_TO_DO = "nothing to do"
"""What a plan without phases does, that of one rank."""

BUCKET_NBYTES = 25 << 20
"""DDP's default `bucket_cap_mb`."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One collective over one level's groups."""

    op: str
    """`reduce_scatter`, `all_reduce` or `all_gather`."""
    level: int
    """Index into the cluster's levels; an all_reduce at level 0 with `whole` joins all ranks in one ring."""
    parts: int = 1
    """Shards that a region is cut into (reduce_scatter, all_gather): one for each rail."""
    whole: bool = False
    """The group is the whole cluster, whatever the levels."""
    compressor: str | None = None
    """What compresses the data of this phase; None is exact."""
    algorithm: str = RING
    """How a `whole` all_reduce runs: `ring`, `tree` (NCCL's double binary tree), `nvls` and `nvls_tree` (the NVSwitch
    sums, and that tree between nodes) or `halving_doubling`."""
    asynchronous: bool = False
    """Whether its collectives are still under way when they return (a network) or done (shared memory). A chunk then
    goes on in the next lane, which waits for them, so that the chunk behind it can start this phase."""
    in_rank_order: bool = False
    """Whether every element is summed in the same order wherever it lies: the all_reduce is then taken apart into the
    steps of `rank_order`. Otherwise the order is the library's own, and a ring's depends on an element's place."""
    shares: tuple[int, ...] = ()
    """Where the links of the units differ: what each rank would own of a bucket that its group shares out, in any
    measure; the members of a transfer own in proportion. Empty: equal parts."""
    in_ring_order: bool = False
    """Whether, with shares, every element is summed in the order in which gloo's ring sums it with equal shares, so
    that no bit depends on the shares; else in rank order, wherever it lies."""

    def describe(self, level_names: tuple[str, ...]) -> str:
        """The phase in a few words.

        Args:
            level_names: Names of the cluster's levels, innermost first.
        """
        order = "sums in the order of a ring" if self.in_ring_order else "sums in rank order"
        how = [self.compressor or "", "asynchronous" * self.asynchronous, order * self.in_rank_order,
               "owners by their links" * bool(self.shares)]  # fmt: skip
        details = ", ".join(filter(None, how))
        return f"{self._name()} {self.place(level_names)}" + (f" ({details})" if details else "")

    def place(self, level_names: tuple[str, ...]) -> str:
        """Where it runs: the name of its level, or `over all ranks`."""
        return "over all ranks" if self.whole else level_names[self.level]

    def _name(self) -> str:
        if self.op != ALL_REDUCE and self.parts == 1:
            return "reduce" if self.op == REDUCE_SCATTER else "broadcast"
        return self.op


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective: what a phase, or one step of a phase, is for one set of ranks.

    Attributes:
        op: `reduce_scatter`, `all_reduce` or `all_gather`.
        level: As in the phase.
        members: Global ranks, in group order.
        start: First element of the region.
        stop: One past its last element.
        bounds: `len(members) + 1` offsets relative to `start`: member k owns `bounds[k]:bounds[k + 1]` after a
            reduce_scatter and before an all_gather. Empty for an all_reduce.
    """

    op: str
    level: int
    members: tuple[int, ...]
    start: int
    stop: int
    bounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """A run of elements that one rank sends to another, in place: both have it at the same offset."""

    source: int
    target: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Exchange(Transfer):
    """Messages between some ranks, all under way together; at most one for each pair of ranks and direction.

    As an `all_gather` what arrives overwrites; as a `reduce_scatter` it is added to what the target has there, in the
    order of the members.

    Attributes:
        messages: All of them; elements count from the beginning of the tensor, whatever `start` is.
    """

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to one bucket.

    Attributes:
        name: `flat`, `hierarchical` or `leader`; `tree`, `nvls_tree` and `halving_doubling` are priced for comparison
            only, which algorithm a library runs is its own choice.
        phases: In order; every phase works on the result of the one before it.
        chunks: Pieces that the bucket is cut into, so that the phases of one overlap those of the next.
        nbytes: Size of the bucket that the prediction is for.
        seconds: Predicted time.
        bytes_by_level: For each level's name the predicted bytes that leave the busiest unit below that level (a rank
            for `intra_node`, a node for `inter_node`, ...), one direction.
        why: One sentence: why this plan and not another.
        notes: What was decided besides, a sentence each.
        limit: What the prediction is limited by: a level's name, `processor` (encoding and decoding) or `latency`.
        busy_seconds: How long what limits it is occupied; the next bucket may start that much later.
        assumed: The links whose rates went into the prediction though nobody has published, given or measured them, in
            words; empty where there are none. `describe` then names no time.
    """

    name: str
    phases: tuple[Phase, ...]
    chunks: int
    nbytes: int
    seconds: float
    bytes_by_level: dict[str, float]
    why: str
    limit: str = ""
    busy_seconds: float = 0.0
    assumed: str = ""
    notes: tuple[str, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why this plan, and what was decided besides, a sentence each."""
        return tuple(filter(None, (self.why, *self.notes)))

    def describe(self, level_names: tuple[str, ...]) -> str:
        """The plan as one readable paragraph.

        Args:
            level_names: Names of the cluster's levels, innermost first.
        """
        return describe_plans([self], level_names)[0]


_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def describe_plans(plans: Iterable[Plan], level_names: tuple[str, ...]) -> tuple[str, ...]:
    """One readable paragraph for all plans that differ in numbers alone; their numbers become ranges.

    Args:
        plans: In use.
        level_names: Names of the cluster's levels, innermost first.
    """
    return tuple(_paragraph(alike, level_names) for alike in _alike(plans, level_names))


def summarise_plans(plans: Iterable[Plan], level_names: tuple[str, ...]) -> tuple[str, ...]:
    """What is done and why, in two short lines; empty where nothing is planned yet.

    Args:
        plans: In use.
        level_names: Names of the cluster's levels, innermost first.
    """
    groups = _alike(plans, level_names)
    if not groups:
        return ()
    done = []
    for alike in groups:
        if not alike[0].phases:
            done.append(NOTHING_TO_DO)
            continue
        codecs = dict.fromkeys(
            f", {phase.compressor} {phase.place(level_names)}" for phase in alike[0].phases if phase.compressor
        )
        sizes = _span([plan.nbytes / 1e6 for plan in alike], ".3g")
        chunks = _span([plan.chunks for plan in alike])
        pieces = "in one piece" if chunks == "1" else f"in {chunks} chunks"
        done.append(f"{alike[0].name}{''.join(codecs)} for {sizes} MB {pieces}")
    whys = dict.fromkeys(reason for alike in groups for reason in _merged([plan.reasons[:1] for plan in alike]))
    return (f"plan: {'; '.join(done)}", f"why: {' '.join(whys)}")


def _alike(plans: Iterable[Plan], level_names: tuple[str, ...]) -> list[list[Plan]]:
    """The plans in groups whose descriptions differ in numbers alone, smallest bucket first in each."""
    groups: dict[tuple[object, ...], list[Plan]] = {}
    for plan in plans:
        steps = tuple(phase.describe(level_names) for phase in plan.phases)
        reasons = tuple(_NUMBER.sub("#", reason) for reason in plan.reasons)
        groups.setdefault((plan.name, steps, plan.assumed, tuple(plan.bytes_by_level), reasons), []).append(plan)
    return [sorted(alike, key=lambda plan: plan.nbytes) for alike in groups.values()]


def _paragraph(alike: list[Plan], level_names: tuple[str, ...]) -> str:
    first = alike[0]
    reasons = " ".join(_merged([plan.reasons for plan in alike]))
    if not first.phases:
        return f"{first.name}: {NOTHING_TO_DO}. {reasons}"
    steps = " -> ".join(phase.describe(level_names) for phase in first.phases)
    chunks = _span([plan.chunks for plan in alike])
    pieces = "in one piece" if chunks == "1" else f"in {chunks} pipelined chunks"
    traffic = ", ".join(
        f"{_span([plan.bytes_by_level[name] / 1e6 for plan in alike], '.3g')} MB {name}"
        for name in first.bytes_by_level
    )
    sizes = _span([plan.nbytes / 1e6 for plan in alike], ".3g")
    head = f"{first.name}: {steps}, {pieces}; {sizes} MB predicted to"
    if first.assumed:
        return (
            f"{head} send {traffic}; its time is not known: the rates {first.assumed} are assumed "
            f"(`nic_bytes_per_second` gives them, `probe=True` measures them). {reasons}"
        )
    return f"{head} take {_span([plan.seconds * 1e3 for plan in alike], '.3g')} ms and to send {traffic}. {reasons}"


def _span(values: Sequence[float], form: str = "") -> str:
    """`0.131 to 1.05`; one number where all look alike."""
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least} to {most}"


def _merged(texts: Sequence[tuple[str, ...]]) -> list[str]:
    """Texts that differ in numbers alone as one, place by place: `Predicted 1.84 to 1.9x faster` has both."""
    return [_merged_text(list(dict.fromkeys(alike))) for alike in zip(*texts, strict=True)]


def _merged_text(alike: Sequence[str]) -> str:
    if len(alike) == 1:
        return alike[0]
    numbers = zip(*(map(float, _NUMBER.findall(text)) for text in alike), strict=True)
    spans = iter([_span(values, ".12g") for values in numbers])
    return _NUMBER.sub(lambda _: next(spans), alike[0])
