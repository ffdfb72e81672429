"""State follows its parameters: when shard boundaries move, the ranks of a node exchange what they hold.

Residuals belong to gradient elements of a node. Bucket rebuild, another fusion or another layout after a resume give
elements to other ranks of the same node; a sum over the node, in which each rank contributes what it holds and zero
elsewhere, moves all of it at once.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.comms.transport.groups import Transport
from gradwire.compressors.base import Compressor, Layout, StateValue


def migrate(
    compressor: Compressor,
    layout: Layout,
    shards: Sequence[tuple[int, int]],
    node: Transport | None,
    device: torch.device,
) -> None:
    """Moves the state of a bucket's elements to the ranks of this node that own them now.

    Where everything lies with its owner already (an interrupted run that goes on as it was), nothing is touched, so
    that training goes on bit for bit.

    Args:
        compressor: Whose state.
        layout: Which parameter lies where in the bucket.
        shards: The runs of the bucket that this rank owns in the compressed phase.
        node: The ranks of this node; None where this rank is alone.
        device: Where the bucket is.
    """
    own = [layout.cut(start, stop) for start, stop in shards]
    misplaced = torch.tensor(
        [0 if is_settled(compressor.state_dict(), layout, own) else 1], dtype=torch.int32, device=device
    )
    if node is not None:
        node.all_reduce(misplaced).wait()
    if not misplaced.item():
        return
    rows = compressor.export(layout, device)
    if node is not None and rows.numel():
        node.all_reduce(rows.view(-1)).wait()
    for piece, (start, stop) in zip(own, shards, strict=True):
        compressor.adopt(piece, rows[:, start:stop].contiguous())


def is_settled(state: Mapping[str, StateValue], layout: Layout, own: Sequence[Layout]) -> bool:
    """Whether everything in `state` about the elements of `layout` lies in one of the layouts `own`.

    Args:
        state: As `Compressor.state_dict` returns it; keys are `[<route>|]<field>/<start>/<parameter>`, or
            `[<route>|]factor/<parameter>` for what belongs to a whole parameter.
        layout: A bucket's.
        own: Of this rank's shards.
    """
    bucket = {item.name: item for item in layout.slices}
    for key, value in state.items():
        field, _, rest = key.rpartition("|")[2].partition("/")
        start, _, name = rest.partition("/") if field != "factor" else ("0", "", rest)
        if isinstance(value, Tensor) and name in bucket and start.isdigit():
            numel = bucket[name].numel if field == "factor" else value.numel()
            if not any(_covers(piece, name, int(start), int(start) + numel) for piece in own):
                return False
    return True


def _covers(layout: Layout, name: str, start: int, stop: int) -> bool:
    return any(
        item.name == name and item.parameter_start <= start and stop <= item.parameter_start + item.numel
        for item in layout.slices
    )
