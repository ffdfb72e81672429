"""Keeps copies of a step's gradients until all ranks have their averages, so that the step can be repeated."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gradwire.comms.communicator import Communicator
from gradwire.comms.migration import shared
from gradwire.comms.run.all_reduces import Bucket, FutureTensor
from gradwire.compressors.base import Layout, Slice
from gradwire.compressors.residual import ElementStore, Piece


class GradientBackup:
    """Copies of the buckets of one step, with a future for DDP of each, which `resolve_futures` completes.

    Args:
        communicator: The communicator that starts the step.
        rows: The all-reduces that the step has to use, in the encoding of `Resume`, int64 (all-reduces, columns);
            None if it is free.

    Attributes:
        resolved: Whether the futures are complete, because all ranks have the averages.
        rows: The argument of that name.
    """

    def __init__(self, communicator: Communicator, rows: Tensor | None) -> None:
        self.resolved = False
        self.rows = rows
        self._communicator = communicator
        self._error: Exception | None = None
        self._buckets: list[Bucket] = []
        self._copies: list[Tensor] = []
        self._promises: list[FutureTensor] = []

    def add(self, bucket: Bucket, start: Callable[[], None]) -> FutureTensor:
        """Copies a bucket, and starts its all-reduce unless one of this step has failed.

        Args:
            bucket: The bucket; its elements are copied before the all-reduce starts.
            start: Called without arguments to start the all-reduce.

        Returns:
            A future whose value is the bucket's buffer.
        """
        self._buckets.append(bucket)
        self._copies.append(bucket.flat.clone())
        promise: FutureTensor = torch.futures.Future(devices=[bucket.flat.device] if bucket.flat.is_cuda else [])
        self._promises.append(promise)
        if self._error is None:
            try:
                start()
            except (RuntimeError, OSError) as error:  # raised and handled at the end of the step
                self._error = error
        return promise

    def belongs_to(self, communicator: Communicator) -> bool:
        """Returns whether the buckets were given to this communicator."""
        return communicator is self._communicator

    def check(self) -> None:
        """Raises the error with which the start of an all-reduce failed, if one did."""
        if self._error is not None:
            raise self._error

    def restore(self, communicator: Communicator) -> list[Bucket]:
        """Restores the gradients from their copies, and returns new buckets of them for another communicator."""
        self._communicator, self._error = communicator, None
        for bucket, copy in zip(self._buckets, self._copies, strict=True):
            bucket.flat.copy_(copy)
        self._buckets = [Bucket.of(bucket.flat, bucket.layout, index=bucket.index) for bucket in self._buckets]
        return list(self._buckets)

    def wait(self) -> None:
        """Waits for the averages of all buckets.

        Raises:
            RuntimeError: One of them failed.
        """
        for bucket in self._buckets:
            bucket.result().wait()

    def resolve_futures(self) -> None:
        """Completes DDP's futures: the averages are in the buffers."""
        self.resolved = True
        for bucket, promise in zip(self._buckets, self._promises, strict=True):
            promise.set_result(bucket.flat)


def equalize_decoders(
    stores: Sequence[ElementStore],
    numels: Mapping[str, int],
    communicator: Communicator,
    wait: Callable[[FutureTensor], Tensor],
) -> None:
    """Makes the state with which payloads are decoded equal on all nodes again, after a rank failed or joined.

    The ranks of a node share the elements, and all nodes hold the same ones; a failed rank leaves a gap on its node.
    Afterwards the first rank of each node holds every element that any rank had, and its other ranks hold none: the
    elements move on to their owners within the node later. With the plan `flat` every rank holds every element. Nothing
    is changed before all elements have been received, so the call may be interrupted and repeated.

    Args:
        stores: Compressor state (`CompressorTraits.shared`) whose elements have one nonzero value on all ranks that
            hold them; the content is replaced. The same number of stores on all ranks.
        numels: Number of elements of each parameter, by name; the same on all ranks, in the same order.
        communicator: Communicator of all ranks.
        wait: Waits for an all-reduce and returns its tensor, or raises its error.

    Raises:
        RuntimeError: A rank failed.
    """
    cluster, rank, device = communicator.cluster, communicator.rank, communicator.device
    holds = communicator.config.plan_name == "flat" or cluster.ranks(cluster.unit(rank, 0))[0] == rank
    received: list[list[Piece]] = []
    for store in stores:
        received.append([])
        for name, numel in numels.items():
            held = store.peek(Layout((Slice(name, (numel,), 0, 0, numel),)), device)
            values = shared(held, lambda both: wait(communicator.all_reduce(both)))
            if values.any():
                received[-1].append(Piece(name, 0, values))
    for store, pieces in zip(stores, received, strict=True):
        store.replace(pieces if holds else [])
