"""Moves compressor state to the new owners of its elements when shard boundaries change.

Residuals belong to gradient elements of a node. Bucket rebuild, another fusion or another layout after a resume give
elements to other ranks of the same node; a sum over the node, in which each rank contributes its state and zero
elsewhere, moves all of it at once.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor

from gradwire.comms.transport.groups import Transport
from gradwire.compressors.base import Compressor, Layout, StateRun


def migrate(
    compressor: Compressor,
    layout: Layout,
    shards: Sequence[tuple[int, int]],
    node: Transport | None,
    device: torch.device,
    *,
    ask: bool = True,
) -> None:
    """Moves the state of a bucket's elements to the ranks of this node that own them now.

    All ranks of the node call it, and wait for each other. With `ask`, nothing is changed if all state is with its
    owners already (an interrupted run that goes on as it was), so that training goes on bit for bit.

    Args:
        compressor: Compressor whose state is moved, in place.
        layout: Layout of the bucket.
        shards: (start, stop) of each run of the bucket that this rank owns in the compressed phase.
        node: Transport among the ranks of this node; None if this rank is alone.
        device: Device of the bucket.
        ask: True if the ranks of the node first find out by a collective whether any state must move, for which the
            host waits on CUDA, too; False exchanges all of it.
    """
    own = [layout.cut(start, stop) for start, stop in shards]
    misplaced = (not ask and node is not None) or not is_with_owners(compressor.state_runs(), layout, own)
    if node is not None and ask:  # all ranks of the node must decide equally: what follows is collective
        word = torch.tensor([int(misplaced)], dtype=torch.int32, device=device)
        node.all_reduce(word).wait()
        misplaced = bool(word.item())
    if not misplaced:
        return
    rows = compressor.export(layout, device)
    if node is not None and rows.numel():
        node.all_reduce(rows.view(-1)).wait()
    for piece, (start, stop) in zip(own, shards, strict=True):
        compressor.adopt(piece, rows[:, start:stop].contiguous())


def is_with_owners(runs: Iterable[StateRun], layout: Layout, own: Sequence[Layout]) -> bool:
    """Returns whether all state that this rank has for a bucket belongs to elements that it owns.

    Args:
        runs: Elements for which this rank has state, as `Compressor.state_runs` yields them; parameters that are not in
            `layout` do not count.
        layout: Layout of the bucket.
        own: Layouts of the parts of the bucket that this rank owns; each run must lie in a single slice of one.
    """
    bucket = {item.name: item for item in layout.slices}
    owned: dict[str, list[tuple[int, int]]] = {}
    for piece in own:
        for item in piece.slices:
            owned.setdefault(item.name, []).append((item.parameter_start, item.parameter_start + item.numel))
    for run in runs:
        if run.name in bucket:
            stop = run.start + (bucket[run.name].numel if run.numel is None else run.numel)
            if not any(first <= run.start and stop <= last for first, last in owned.get(run.name, ())):
                return False
    return True


def shared(held: Tensor, sum_of_ranks: Callable[[Tensor], object]) -> Tensor:
    """Combines the elements that different ranks hold into a new tensor, equal on all ranks; every rank calls it.

    An element that several ranks hold must be equal on these: it is their mean.

    Args:
        held: 1-D float32 tensor with the elements of this rank, and zeros for those that it does not hold.
        sum_of_ranks: Sums a 1-D tensor over all ranks, in place, and waits for it.
    """
    both = torch.stack([held, (held != 0.0).to(held.dtype)])
    sum_of_ranks(both.view(-1))
    return both[0] / both[1].clamp(min=1.0)


class StateLayouts:
    """Tracks the layouts for which a compressor has state, to find buckets whose state must be moved.

    Only for a state that was loaded the ranks of a node first ask each other whether it must move, because on CUDA the
    host waits for the answer. State from earlier steps of this process is exchanged without a question.

    Args:
        dtypes: Dtypes of buckets that have state; see `CompressorTraits.dtypes`.
        loaded: True if the state was loaded or comes from other ranks, so that its layouts are not known here.
        as_saved: True if the state was saved with the placement that ranks have now, so that each node has all
            state that payloads are decoded with.

    Attributes:
        dtypes: Dtypes of buckets that have state.
        as_saved: True if the state was saved with the placement that ranks have now.
        migrated: Layouts whose state is with its owners.
        asks: Value for `ask` of `migrate` after `has_moved` has returned True: whether the ranks of the node ask each
            other before they move the state.
    """

    def __init__(self, dtypes: Collection[torch.dtype] | None, *, loaded: bool = False, as_saved: bool = True) -> None:
        self.dtypes = dtypes
        self.as_saved = as_saved
        self.asks = False
        self._loaded = loaded
        self._layout_of: dict[str, Layout] = {}
        self.migrated: set[Layout] = set()

    def has_moved(self, layout: Layout) -> bool:
        """Returns whether state may have to be moved before a bucket is compressed; records the layout, sets `asks`.

        Args:
            layout: Layout of the bucket. The next call with the same layout returns False, unless other layouts of the
                same parameters came in between.
        """
        if layout in self.migrated:
            return False
        known = [self._layout_of.get(item.name) for item in layout.slices]
        had, moves = any(each is not None for each in known), False
        if any(each is not layout and each != layout for each in {id(each): each for each in known}.values()):
            self._layout_of.update((item.name, layout) for item in layout.slices)
            self.migrated.clear()
            moves, self.asks = had or self._loaded, not had
        self.migrated.add(layout)
        return moves
