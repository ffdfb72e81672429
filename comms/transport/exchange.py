"""This module issues collectives of unequal messages, which are read from and written to places in a flat tensor."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from gradwire.comms.plan.plan import REDUCE_SCATTER, Exchange, Message
from gradwire.comms.transport.groups import SendsUnequal, Transport
from gradwire.comms.transport.sum_order import SlicesToSum
from gradwire.comms.transport.works import Then
from gradwire.compressors.base import Work


def exchange(group: Transport, flat: Tensor, transfer: Exchange, rank: int) -> Work:
    """Issues the messages of an exchange; they are in their places in `flat` once the work has been waited for.

    A rank that sends or receives a single message does so without a copy, unless it adds the message.

    Args:
        group: Transport of the transfer's members: gloo or MPI.
        flat: 1-D, contiguous; changed in place. For a reduce-scatter, of a dtype that torch can add.
        transfer: Messages with their places in `flat`, and whether they are added.
        rank: Global rank of this process.

    Raises:
        TypeError: `group` cannot send unequal messages.
    """
    unequal = _unequal(group)
    members = transfer.members
    outgoing = sorted((each for each in transfer.messages if each.source == rank), key=lambda each: each.target)
    incoming = sorted((each for each in transfer.messages if each.target == rank), key=lambda each: each.source)
    width = flat.element_size()
    largest = max((each.stop - each.start for each in transfer.messages), default=0) * width
    source = _collected([flat[each.start : each.stop] for each in outgoing], flat)
    # Receive in place if there is one message that is not added.
    adds = transfer.op == REDUCE_SCATTER
    if len(incoming) == 1 and not adds:
        received = flat[incoming[0].start : incoming[0].stop]
    else:
        received = flat.new_empty(sum(each.stop - each.start for each in incoming))
    output_splits = _splits(members, {each.source: each for each in incoming}, width)
    source_splits = _splits(members, {each.target: each for each in outgoing}, width)
    issued = unequal.exchange(
        received.view(torch.uint8), source.view(torch.uint8), output_splits, source_splits, largest
    )
    # Add the messages to this rank's own part, or copy them to their places, once they have arrived.
    if adds and incoming:
        place = sum(each.source < rank for each in incoming)
        own = flat[incoming[0].start : incoming[0].stop]
        others = received.view(len(incoming), own.numel())
        rows = SlicesToSum([*others[:place], own, *others[place:]])  # in rank order
        return Then(issued, lambda: rows.sum(own), source)

    def put_in_place() -> None:
        parts = received.split_with_sizes([each.stop - each.start for each in incoming])
        for each, arrived in zip(incoming, parts, strict=True):
            flat[each.start : each.stop] = arrived

    return Then(issued, put_in_place if len(incoming) > 1 else None, source)


def all_to_all_of(group: Transport, output: Tensor, source: Tensor, splits: Sequence[int]) -> Work:
    """Sends each rank its run of `source`, and receives this rank's run of every rank, in rank order.

    Args:
        group: Transport: gloo or MPI.
        output: 1-D, `group.size * splits[group.rank]` elements; overwritten with the runs that arrive.
        source: 1-D, `sum(splits)` elements.
        splits: Elements of each rank's run, the same on all ranks.

    Raises:
        TypeError: `group` cannot send unequal messages.
    """
    own, largest = [splits[group.rank]] * group.size, max(splits) * source.element_size()
    return _unequal(group).exchange(output, source, own, list(splits), largest)


def _unequal(group: Transport) -> SendsUnequal:
    """Returns the transport as one that can send unequal messages.

    Raises:
        TypeError: It cannot.
    """
    if not hasattr(group, "exchange"):
        raise TypeError(f"`group` is a {type(group).__name__}; wanted gloo or MPI, which send unequal messages")
    return cast(SendsUnequal, group)


def _collected(runs: list[Tensor], like: Tensor) -> Tensor:
    """Returns the runs as one 1-D tensor, without a copy if there is one run; `like` gives dtype and device."""
    if len(runs) == 1:
        return runs[0]
    return torch.cat(runs) if runs else like.new_empty(0)


def _splits(members: Sequence[int], messages: dict[int, Message], width: int) -> list[int]:
    """Returns the bytes to, or from, each member.

    Args:
        members: Ranks of the exchange.
        messages: Rank of the other end -> message; ranks without one get 0 bytes.
        width: Bytes of one element.
    """
    return [(messages[member].stop - messages[member].start) * width if member in messages else 0 for member in members]
