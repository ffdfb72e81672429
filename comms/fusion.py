"""Which gradients travel together: DDP's buckets are joined into transfers, and large ones cut, by a plan of cuts.

DDP fixes its buckets when the model is wrapped; what is launched, and when, is decided here and may change between
two steps. Every rank sees the same buckets in the same order, so every rank launches the same transfers. An element's
sum does not depend on where it lies where the configuration fuses (see `rank_order`): no plan then changes a bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from gradwire.comms.run.all_reduces import AllReduce, Bucket, Pool
from gradwire.compressors.base import Layout, Slice


@dataclass(frozen=True, slots=True)
class FusionPlan:
    """Where the sequence of a step's buckets is cut into transfers.

    Attributes:
        cuts: A transfer ends after this many buckets, counted from the start of the step, ascending; buckets behind the
            last cut travel when the step ends.
        sizes: Bytes of the step's buckets that the cuts were made for; another sequence falls back to
            `threshold_nbytes`.
        threshold_nbytes: Without fitting cuts a transfer ends as soon as it holds so much; 0 sends every bucket alone.
        piece_nbytes: A bucket larger than this travels in several transfers; 0 leaves buckets whole.
        delayed: Nothing travels before the step's last bucket has come; then all buckets of a dtype travel together.
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

    def ends_transfer(self, sizes: Sequence[int], pending_nbytes: int) -> bool:
        """Whether a transfer ends after the last of the buckets seen so far.

        Args:
            sizes: Bytes of the step's buckets so far.
            pending_nbytes: Bytes of those that have not been launched.
        """
        if self.delayed:
            return False
        if self.sizes and tuple(sizes) == self.sizes[: len(sizes)]:
            return len(sizes) in self.cuts
        return pending_nbytes >= self.threshold_nbytes

    def cuts_up(self, flat: Tensor) -> bool:
        """Whether a bucket, travelling alone, is larger than a piece."""
        return self.piece_nbytes > 0 and flat.nbytes > self.piece_nbytes

    def pieces(self, flat: Tensor) -> list[tuple[int, int]]:
        """The runs of elements that a bucket, travelling alone, is cut into.

        Args:
            flat: 1-D, any dtype; read for its size alone.

        Returns:
            (start, stop) of each run, ascending and without gaps; one run where nothing is cut.
        """
        if not self.cuts_up(flat):
            return [(0, flat.numel())]
        step = max(1, self.piece_nbytes // flat.element_size())
        return [(start, min(start + step, flat.numel())) for start in range(0, flat.numel(), step)]


class Fusion:
    """Decides when buckets travel, and which of them together.

    Args:
        plan: The plan of the first step.

    Attributes:
        last_sizes: Bytes of the last step's buckets, in the order of their arrival.
        defers: Whether a bucket may wait for later ones. False sends each at once, for a DDP model that waits for the
            averages without having marked the last bucket.
    """

    def __init__(self, plan: FusionPlan) -> None:
        self._plan = plan
        self._next: FusionPlan | None = None
        self._waiting: list[Bucket] = []
        self._sizes: list[int] = []
        self._pool = Pool()
        self.last_sizes: tuple[int, ...] = ()
        self.defers = True

    @property
    def plan(self) -> FusionPlan:
        """The plan of the running step."""
        return self._plan

    def change(self, plan: FusionPlan) -> None:
        """Sets the plan from the next step on; every rank must do so in the same step."""
        if self._sizes:
            self._next = plan
        else:
            self._take_up(plan)

    def add(self, bucket: Bucket) -> list[AllReduce]:
        """Takes in a bucket; nothing is copied or changed before a launch starts.

        Args:
            bucket: Buckets of one dtype and device may be joined, if all or none of them have a layout.

        Returns:
            What is to be launched now, in this order: nothing, as long as the plan ends no transfer here.
        """
        plan, nbytes = self._plan, bucket.flat.nbytes
        self._sizes.append(nbytes)
        if not self._waiting and plan.ends_transfer(self._sizes, nbytes):
            return self._pieces(bucket)  # as most do
        parted = self._waiting and not plan.delayed and not _alike(self._waiting[0], bucket)
        launches = self._join() if parted else []
        ends = plan.ends_transfer(self._sizes, nbytes + sum(each.flat.nbytes for each in self._waiting))
        if ends and not self._waiting:
            return launches + self._pieces(bucket)
        self._waiting.append(bucket)
        return launches + self._join() if ends or not self.defers else launches

    def flush(self) -> list[AllReduce]:
        """What is held back, to be launched now, in the middle of a step."""
        return self._join()

    def end_step(self) -> list[AllReduce]:
        """Takes up a new plan; all ranks, at the same point of the sequence of buckets.

        Returns:
            What remains to be launched.
        """
        launches = self._join()
        self.last_sizes = tuple(self._sizes)
        self._sizes.clear()
        if self._next is not None:
            self._take_up(self._next)
        return launches

    def _take_up(self, plan: FusionPlan) -> None:
        self._plan, self._next = plan, None
        self._pool = Pool()  # launches under way give their buffers back to the old one, which ends with them

    def _join(self) -> list[AllReduce]:
        """The buckets that wait, as what is to be launched."""
        groups: list[list[Bucket]] = []
        for bucket in self._waiting:
            group = next((group for group in groups if _alike(group[0], bucket)), None)
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
        if not self._plan.cuts_up(bucket.flat):
            return [AllReduce((bucket.flat,), bucket.layout, (bucket,))]
        runs = self._plan.pieces(bucket.flat)
        bucket.pending = len(runs)
        return [
            AllReduce((bucket.flat[start:stop],), bucket.layout.cut(start, stop) if bucket.layout else None, (bucket,))
            for start, stop in runs
        ]

    def _joined(self, group: list[Bucket]) -> AllReduce:
        layouts = tuple(bucket.layout for bucket in group if bucket.layout is not None)
        layout = _joined_layout(layouts) if len(layouts) == len(group) else None
        return AllReduce([bucket.flat for bucket in group], layout, group, self._pool)


def _alike(first: Bucket, other: Bucket) -> bool:
    """Whether a bucket may travel with one that waits: one tensor has one dtype, and one layout or none."""
    same = first.flat.dtype == other.flat.dtype and first.flat.device == other.flat.device
    return same and (first.layout is None) == (other.layout is None)


@lru_cache(maxsize=1024)
def _joined_layout(layouts: tuple[Layout, ...]) -> Layout:
    """The layout of tensors one after another."""
    slices, offset = [], 0
    for layout in layouts:
        slices += [
            Slice(piece.name, piece.shape, piece.parameter_start, piece.start + offset, piece.numel)
            for piece in layout.slices
        ]
        offset += layout.numel
    return Layout(tuple(slices))
