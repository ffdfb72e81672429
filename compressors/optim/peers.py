"""A torch process group as `Peers`: for optimizers, which communicate from the training thread, by torch's own calls."""

import torch.distributed as dist
from torch import Tensor

from gradwire.compressors.base import Peers


class TorchWork:
    """A collective of torch.distributed."""

    def __init__(self, work: dist.Work | None) -> None:
        self._work = work

    def wait(self) -> None:
        """See `Work.wait`."""
        if self._work is not None:
            self._work.wait()


class TorchPeers:
    """The ranks of a process group; it stays the caller's, who must not run other collectives on it during a call."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, tensor: Tensor) -> TorchWork:
        """See `Peers.all_reduce`."""
        return TorchWork(dist.all_reduce(tensor, group=self._group, async_op=True))

    def all_to_all(self, output: Tensor, source: Tensor) -> TorchWork:
        """See `Peers.all_to_all`."""
        return TorchWork(dist.all_to_all_single(output, source, group=self._group, async_op=True))

    def all_gather(self, output: Tensor, source: Tensor) -> TorchWork:
        """See `Peers.all_gather`."""
        return TorchWork(
            dist.all_gather(list(output.view(self.size, -1)), source.view(-1), group=self._group, async_op=True)
        )


def peers_of(group: Peers | dist.ProcessGroup | None) -> Peers:
    """What an optimizer communicates through.

    Args:
        group: A process group of torch; None is the default one; anything else is taken as it is.

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
