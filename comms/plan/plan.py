"""Plans: the ordered phases for one bucket, how each runs, the predicted cost, and the reason for the choice.

A plan is data. `schedule.py` turns it into transfers, which executors run on transports, and the simulator of the tests
on plain arrays; nothing else decides how data moves.
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
"""Description of a plan without phases, which is that of a single rank."""

RATES_OPTION = '`nic_bytes_per_second` gives the rates, or measures them if it is "measure"'
"""What to do where a rate is assumed, for reasons and reports."""

BUCKET_NBYTES = 25 << 20
"""DDP's default `bucket_cap_mb`."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One collective over the groups of one level."""

    op: str
    """`reduce_scatter`, `all_reduce` or `all_gather`."""
    level: int
    """Index into the cluster's levels; that of the outermost one if `whole`."""
    parts: int = 1
    """Shards that a region is cut into (reduce_scatter, all_gather): one for each rail."""
    whole: bool = False
    """Whether the group is the whole cluster, whatever the level."""
    compressor: str | None = None
    """Name of the compressor of this phase; None is exact."""
    algorithm: str = RING
    """Algorithm of a `whole` all_reduce: `ring`, `tree` (NCCL's double binary tree), `halving_doubling`, `nvls` and
    `nvls_tree` (the NVSwitch sums inside the nodes, and that tree between them)."""
    asynchronous: bool = False
    """Whether its collectives are in flight after the call (network), not done (shared memory). A chunk then continues
    in the next lane, which waits for them, so that the next chunk can start this phase."""
    in_rank_order: bool = False
    """Whether every element is summed in the same order, whatever its position: the all_reduce is then split into the
    steps of `rank_order`. Otherwise the order is the library's; a ring's depends on the position of an element."""
    shares: tuple[int, ...] = ()
    """Weight of each rank's share of the bucket if link rates differ; the members of a transfer own parts in
    proportion. Empty for equal parts."""
    in_ring_order: bool = False
    """Whether, with `shares`, every element is summed in the order of gloo's ring with equal shares, so that no bit
    depends on the shares; else in rank order."""

    def describe(self, level_names: tuple[str, ...]) -> str:
        """Returns the phase in a few words, for reports.

        Args:
            level_names: Names of the cluster's levels, innermost first.
        """
        order = "sums in the order of a ring" if self.in_ring_order else "sums in rank order"
        how = [self.compressor or "", "asynchronous" * self.asynchronous, order * self.in_rank_order,
               "owners by their links" * bool(self.shares)]  # fmt: skip
        details = ", ".join(filter(None, how))
        return f"{self._name()} {self.place(level_names)}" + (f" ({details})" if details else "")

    def place(self, level_names: tuple[str, ...]) -> str:
        """Returns the name of its level, or `over all ranks`."""
        return "over all ranks" if self.whole else level_names[self.level]

    def _name(self) -> str:
        if self.op != ALL_REDUCE and self.parts == 1:
            return "reduce" if self.op == REDUCE_SCATTER else "broadcast"
        return self.op


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective of a phase, or of one step of a phase, for one set of ranks.

    Attributes:
        op: `reduce_scatter`, `all_reduce` or `all_gather`.
        level: Index into the cluster's levels, as in the phase.
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
    """A range of elements that one rank sends to another, at the same offset in the tensors of both.

    Attributes:
        source: Sending rank.
        target: Receiving rank.
        start: First element.
        stop: One past the last element.
    """

    source: int
    target: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Exchange(Transfer):
    """Messages between some ranks, all in flight together; at most one for each pair of ranks and direction.

    As an `all_gather` the received elements overwrite those of the target; as a `reduce_scatter` they are added to
    them, in the order of the members.

    Attributes:
        messages: All messages; their elements count from the beginning of the tensor, not from `start`.
    """

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The all-reduce of one bucket: phases, prediction and reason.

    Attributes:
        name: `flat`, `hierarchical` or `leader`; `tree`, `nvls_tree` and `halving_doubling` are predicted for
            comparison only, because a library chooses its algorithm itself.
        phases: Phases in order; each works on the result of the one before it.
        chunks: Number of chunks of the bucket; the phases of one overlap those of the next.
        nbytes: Size of the bucket that the prediction is for.
        seconds: Predicted seconds.
        bytes_by_level: For each level's name the predicted bytes that leave the busiest unit below that level (a rank
            for `intra_node`, a node for `inter_node`, ...), one direction.
        why: Reason for this plan, as a sentence.
        notes: Further decisions, a sentence each.
        limit: Resource that limits the prediction: a level's name, `processor` (encoding and decoding) or `latency`.
        busy_seconds: Seconds for which that resource is busy; the next bucket may start so much later.
        assumed: Links whose rates are assumed, because they were neither published, given nor measured, in words; empty
            if there are none. `describe` names no time for such a plan.
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
        """Reason for this plan and further decisions, a sentence each."""
        return tuple(filter(None, (self.why, *self.notes)))

    def describe(self, level_names: tuple[str, ...]) -> str:
        """Returns the plan as one paragraph.

        Args:
            level_names: Names of the cluster's levels, innermost first.
        """
        return describe_plans([self], level_names)[0]


_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def describe_plans(plans: Iterable[Plan], level_names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a paragraph for each group of plans that differ only in numbers; their numbers become ranges.

    Args:
        plans: Plans in use.
        level_names: Names of the cluster's levels, innermost first.
    """
    return tuple(_paragraph(alike, level_names) for alike in _alike(plans, level_names))


def summarise_plans(plans: Iterable[Plan], level_names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns two short lines, the plans and the reasons; empty if nothing is planned yet.

    Args:
        plans: Plans in use.
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
    """Returns the plans in groups whose descriptions differ only in numbers, each sorted by bucket size."""
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
            f"({RATES_OPTION}). {reasons}"
        )
    return f"{head} take {_span([plan.seconds * 1e3 for plan in alike], '.3g')} ms and to send {traffic}. {reasons}"


def _span(values: Sequence[float], form: str = "") -> str:
    """Returns `0.131 to 1.05`, or one number if all are written the same."""
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least} to {most}"


def _merged(texts: Sequence[tuple[str, ...]]) -> list[str]:
    """Merges texts that differ only in numbers into one with ranges: `Predicted 1.84 to 1.9x faster`."""
    return [_merged_text(list(dict.fromkeys(alike))) for alike in zip(*texts, strict=True)]


def _merged_text(alike: Sequence[str]) -> str:
    if len(alike) == 1:
        return alike[0]
    numbers = zip(*(map(float, _NUMBER.findall(text)) for text in alike), strict=True)
    spans = iter([_span(values, ".12g") for values in numbers])
    return _NUMBER.sub(lambda _: next(spans), alike[0])
