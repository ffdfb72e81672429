"""A torch process group as `Peers`: for optimizers, which communicate from the training thread by torch's calls."""

from collections.abc import Iterator
from typing import Protocol

import torch.distributed as dist
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


def carry_out(requests: Iterator[Request], peers: Peers) -> None:
    """Carries out the collectives that a compressor's generator yields, one request after the other.

    Args:
        requests: What `Compressor.all_reduce` or `two_stage` returned.
        peers: The ranks; all of them call this with generators of the same collectives.
    """
    for request in requests:
        collectives = (request,) if isinstance(request, Collective) else request
        works: list[Work] = [getattr(peers, each.op)(*each.tensors) for each in collectives]
        for work in works:
            work.wait()


class PeerWork:
    """A collective of torch.distributed."""

    def __init__(self, work: dist.Work | None) -> None:
        self._work = work

    def wait(self) -> None:
        """See `Work.wait`."""
        if self._work is not None:
            self._work.wait()


class TorchPeers:
    """The ranks of a torch process group. The caller keeps it, and must not run other collectives on it during a call.

    Args:
        group: Used as it is, and not destroyed.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, tensor: Tensor) -> PeerWork:
        """See `Peers.all_reduce`."""
        return PeerWork(dist.all_reduce(tensor, group=self._group, async_op=True))

    def all_to_all(self, output: Tensor, source: Tensor) -> PeerWork:
        """See `Peers.all_to_all`."""
        return PeerWork(dist.all_to_all_single(output, source, group=self._group, async_op=True))

    def all_gather(self, output: Tensor, source: Tensor) -> PeerWork:
        """See `Peers.all_gather`."""
        return PeerWork(
            dist.all_gather(list(output.view(self.size, -1)), source.view(-1), group=self._group, async_op=True)
        )


def peers_of(group: Peers | dist.ProcessGroup | None) -> Peers:
    """Returns what an optimizer communicates through.

    Args:
        group: A torch process group; None is the default one; anything else is used as it is.

    Raises:
        RuntimeError: There is no default group.
    """
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(
                "`group` is None and torch.distributed is not initialised: call dist.init_process_group() "
                "before the optimizer is made, or pass a process group"
            )
        group = dist.group.WORLD
        assert group is not None
    return TorchPeers(group) if isinstance(group, dist.ProcessGroup) else group
