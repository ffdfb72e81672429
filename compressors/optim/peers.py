"""Carries out a compressor's collectives one after the other, from the calling thread."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from gradwire.compressors.base import Collective, Request, Work


class Peers(Protocol):
    """A fixed set of ranks and the collectives of a two-stage exchange, each issued in the same order on all of them.

    Every tensor is contiguous, on the group's device, and of the same numel and dtype on all ranks. It must stay
    alive and unread until the returned Work has been waited for.
    """

    @property
    def rank(self) -> int:
        """This rank's index in the group, 0 <= rank < size."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, tensor: Tensor) -> Work:
        """Replaces `tensor` by its sum over the ranks, the same bits on all of them."""

    def all_to_all(self, output: Tensor, source: Tensor) -> Work:
        """Sends the r-th of `size` equal parts of `source` (along dim 0) to rank r; `output` has the same shape."""

    def all_gather(self, output: Tensor, source: Tensor) -> Work:
        """Fills `output` (numel = size * source.numel()) with every rank's `source`, in rank order."""


def run_requests(requests: Iterator[Request], peers: Peers) -> None:
    """Carries out the collectives that a compressor's generator yields, one request after the other.

    Args:
        requests: Generator from `Compressor.all_reduce` or `two_stage`.
        peers: The ranks; all of them call this with generators of the same collectives.
    """
    for request in requests:
        collectives = (request,) if isinstance(request, Collective) else request
        works: list[Work] = [getattr(peers, each.op)(*each.tensors) for each in collectives]
        for work in works:
            work.wait()
