"""A plan is data: the ordered phases for one bucket, what they cost, and why they were chosen.

`simulate.py` proves a plan on plain arrays, `execute.py` runs the very same object on real transports; nothing else
decides how data moves.
"""

from dataclasses import dataclass

REDUCE_SCATTER = "reduce_scatter"
ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"

RING = "ring"
TREE = "tree"
HALVING_DOUBLING = "halving_doubling"


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
    """Who shrinks the data of this phase; None is exact."""
    algorithm: str = RING
    """How a `whole` all_reduce runs: `ring`, `tree` (NCCL's double binary tree) or `halving_doubling`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The way of one bucket.

    Attributes:
        name: `flat`, `hierarchical` or `leader`; `tree` and `halving_doubling` are priced for comparison only, which
            algorithm a library runs is its own choice.
        phases: In order; every phase works on what the one before it left.
        chunks: Pieces that the bucket is cut into, so that the phases of one overlap those of the next.
        nbytes: Size of the bucket that the prediction is for.
        seconds: Predicted time.
        bytes_by_level: For each level's name the predicted bytes that leave the busiest unit below that level (a rank
            for `intra_node`, a node for `inter_node`, ...), one direction.
        why: One sentence: why this plan and not another.
        limit: What the prediction is limited by: a level's name, `processor` (encoding and decoding) or `latency`.
        busy_seconds: How long what limits it is occupied; the next bucket may start that much later.
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

    def describe(self, level_names: tuple[str, ...]) -> str:
        """The plan as one readable paragraph.

        Args:
            level_names: Names of the cluster's levels, innermost first.
        """
        steps = " -> ".join(_phase_text(phase, level_names) for phase in self.phases)
        pieces = "in one piece" if self.chunks == 1 else f"in {self.chunks} pipelined chunks"
        traffic = ", ".join(f"{nbytes / 1e6:.3g} MB {name}" for name, nbytes in self.bytes_by_level.items())
        return (
            f"{self.name}: {steps or 'nothing to do'}, {pieces}; {self.nbytes / 1e6:.3g} MB predicted to take "
            f"{self.seconds * 1e3:.3g} ms and to send {traffic}. {self.why}"
        )


def _phase_text(phase: Phase, level_names: tuple[str, ...]) -> str:
    place = "over all ranks" if phase.whole else level_names[phase.level]
    shrunk = f" ({phase.compressor})" if phase.compressor else ""
    if phase.op != ALL_REDUCE and phase.parts == 1:
        return f"{'reduce' if phase.op == REDUCE_SCATTER else 'broadcast'} {place}{shrunk}"
    return f"{phase.op} {place}{shrunk}"
