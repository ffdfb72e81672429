"""Fusion: joins DDP's buckets into all-reduces, and cuts large ones into pieces.

DDP fixes its buckets when the model is wrapped. Fusion decides which of them are reduced together, and when; that may
change between two steps. Every rank sees the same buckets in the same order, so all start the same all-reduces. If the
configuration fuses, the order of sums does not depend on the position of an element (see `rank_order`), so that no
fusion plan changes a bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from gradwire.comms.run.all_reduces import AllReduce, Bucket, Pool
from gradwire.compressors.base import Layout, Slice


@dataclass(frozen=True, slots=True)
class FusionPlan:
    """Boundaries between the all-reduces of a step.

    Attributes:
        cuts: Numbers of buckets, counted from the start of the step, after which an all-reduce ends; ascending. Buckets
            after the last cut are reduced when the step ends.
        sizes: Bytes of the buckets for which the cuts were made; a step with other sizes uses `threshold_nbytes`.
        threshold_nbytes: Bytes at which an all-reduce ends if there are no cuts for these sizes; 0 reduces each bucket
            alone.
        piece_nbytes: Size above which a bucket is cut into several all-reduces; 0 leaves buckets whole.
        delayed: True sends nothing before the step's last bucket has arrived; then all buckets of a dtype are one
            all-reduce.

    Raises:
        ValueError: `cuts` are not ascending numbers from 1 to the number of `sizes`, or a number of bytes is negative.
    """

    cuts: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    threshold_nbytes: int = 0
    piece_nbytes: int = 0
    delayed: bool = False

    def __post_init__(self) -> None:
        if list(self.cuts) != sorted(set(self.cuts)) or any(cut < 1 or cut > len(self.sizes) for cut in self.cuts):
            raise ValueError(
                f"`cuts` is {self.cuts}; wanted ascending numbers from 1 to {len(self.sizes)}, the number of `sizes`"
            )
        for name in ("threshold_nbytes", "piece_nbytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}; wanted 0 or a positive number")

    def ends_all_reduce(self, sizes: Sequence[int], pending_nbytes: int) -> bool:
        """Returns whether an all-reduce ends after the last bucket seen so far.

        It does after the buckets in `cuts` as long as the step's buckets have the sizes for which these were made, else
        when `threshold_nbytes` are pending; with `delayed` it never does.

        Args:
            sizes: Bytes of the buckets of this step so far.
            pending_nbytes: Bytes of those that have not been started.
        """
        if self.delayed:
            return False
        if self.sizes and tuple(sizes) == self.sizes[: len(sizes)]:
            return len(sizes) in self.cuts
        return pending_nbytes >= self.threshold_nbytes

    def pieces(self, flat: Tensor) -> list[tuple[int, int]]:
        """Returns the pieces that a bucket is cut into.

        Args:
            flat: Tensor of the bucket, 1-D; only its size and dtype are used.

        Returns:
            (start, stop) of each piece, ascending and without gaps; one piece if the bucket is not cut.
        """
        if not 0 < self.piece_nbytes < flat.nbytes:
            return [(0, flat.numel())]
        step = max(1, self.piece_nbytes // flat.element_size())
        return [(start, min(start + step, flat.numel())) for start in range(0, flat.numel(), step)]


class Fusion:
    """Collects the buckets of a step, and returns the all-reduces to start: of several buckets, one, or a piece of one.

    Args:
        plan: Fusion plan of the first step.

    Attributes:
        last_sizes: Bytes of the last step's buckets, in the order of their arrival.
        defers: Whether a bucket may wait for later ones. False sends each at once, for a DDP model that waits for the
            averages without having marked the last bucket.
        prescribed: None, because no saved step prescribes the all-reduces; see `Grouping`.
    """

    def __init__(self, plan: FusionPlan) -> None:
        self._plan = plan
        self._next: FusionPlan | None = None
        self._waiting: list[Bucket] = []
        self._sizes: list[int] = []
        self._pool = Pool()
        self.prescribed = None
        self.last_sizes: tuple[int, ...] = ()
        self.defers = True

    @property
    def plan(self) -> FusionPlan:
        """The fusion plan of the current step."""
        return self._plan

    def change(self, plan: FusionPlan) -> None:
        """Sets the plan of the steps that follow, also of the next one if it is called between two steps.

        All ranks call it in the same step.

        Args:
            plan: The new plan.
        """
        if self._sizes:
            self._next = plan
        else:
            self._use(plan)

    def add(self, bucket: Bucket) -> list[AllReduce]:
        """Adds a bucket; nothing is copied or changed before an all-reduce starts.

        Args:
            bucket: The bucket. Buckets of one dtype and device are joined, if all or none of them have a layout.

        Returns:
            All-reduces to start now, in this order; empty if the plan waits for further buckets.
        """
        plan, nbytes = self._plan, bucket.flat.nbytes
        self._sizes.append(nbytes)
        if not self._waiting and plan.ends_all_reduce(self._sizes, nbytes):
            # The usual case: the bucket is reduced alone.
            return self._pieces(bucket)
        parted = self._waiting and not plan.delayed and not _joinable(self._waiting[0], bucket)
        launches = self._join() if parted else []
        ends = plan.ends_all_reduce(self._sizes, nbytes + sum(each.flat.nbytes for each in self._waiting))
        if ends and not self._waiting:
            return launches + self._pieces(bucket)
        self._waiting.append(bucket)
        return launches + self._join() if ends or not self.defers else launches

    def flush(self) -> list[AllReduce]:
        """Takes all waiting buckets, and returns their all-reduces, to start now in this order; empty if none waits."""
        return self._join()

    def end_step(self) -> list[AllReduce]:
        """Ends a step, and uses a plan set by `change` from now on.

        Returns:
            All-reduces of the buckets that were still waiting, to start now in this order; empty if none was.
        """
        launches = self._join()
        self.last_sizes = tuple(self._sizes)
        self._sizes.clear()
        if self._next is not None:
            self._use(self._next)
        return launches

    def _use(self, plan: FusionPlan) -> None:
        """Uses a plan from now on; no bucket is waiting."""
        self._plan, self._next = plan, None
        # All-reduces in flight return their buffers to the old pool, which is freed with them.
        self._pool = Pool()

    def _join(self) -> list[AllReduce]:
        """Takes all waiting buckets, and returns their all-reduces: one for each dtype and device.

        Buckets that wait alone of their dtype and device may be cut into several all-reduces; see
        `FusionPlan.piece_nbytes`.
        """
        groups: list[list[Bucket]] = []
        for bucket in self._waiting:
            group = next((group for group in groups if _joinable(group[0], bucket)), None)
            if group is None:
                groups.append([bucket])
            else:
                group.append(bucket)
        self._waiting = []
        launches: list[AllReduce] = []
        for group in groups:
            launches += self._pieces(group[0]) if len(group) == 1 else [self._joined(group)]
        return launches

    def _pieces(self, bucket: Bucket) -> list[AllReduce]:
        """Returns the all-reduces of one bucket that is not fused: one, or one for each piece that it is cut into."""
        runs = self._plan.pieces(bucket.flat)
        if len(runs) == 1:
            return [AllReduce((bucket.flat,), bucket.layout, (bucket,))]
        bucket.pending = len(runs)
        return [
            AllReduce((bucket.flat[start:stop],), bucket.layout.cut(start, stop) if bucket.layout else None, (bucket,))
            for start, stop in runs
        ]

    def _joined(self, group: list[Bucket]) -> AllReduce:
        """Makes one all-reduce of several buckets: copied end to end into one buffer of the pool, in their order.

        Args:
            group: Buckets of one dtype and device, at least two; all of them have a layout, or none.

        Returns:
            The all-reduce, whose layout is that of the joined buckets; None if they have none.
        """
        layouts = tuple(bucket.layout for bucket in group if bucket.layout is not None)
        layout = _joined_layout(layouts) if len(layouts) == len(group) else None
        return AllReduce([bucket.flat for bucket in group], layout, group, self._pool)


def _joinable(first: Bucket, other: Bucket) -> bool:
    """Returns whether two buckets may be all-reduced as one: equal dtype and device, and both or neither a layout."""
    same = first.flat.dtype == other.flat.dtype and first.flat.device == other.flat.device
    return same and (first.layout is None) == (other.layout is None)


@lru_cache(maxsize=1024)
def _joined_layout(layouts: tuple[Layout, ...]) -> Layout:
    """Returns the layout of several tensors that are copied end to end, given the layout of each, in order."""
    slices, offset = [], 0
    for layout in layouts:
        slices += [
            Slice(piece.name, piece.shape, piece.parameter_start, piece.start + offset, piece.numel)
            for piece in layout.slices
        ]
        offset += layout.numel
    return Layout(tuple(slices))
