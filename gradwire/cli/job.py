"""What the commands that look at every host of a job share: the ranks meet, or it is said why they cannot."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from gradwire.bench.terminal import working
from gradwire.comms.config import launcher_variables, torchrun_place

if TYPE_CHECKING:
    import torch.distributed as dist


@contextmanager
def joined_job(timeout: timedelta) -> Iterator["dist.ProcessGroup"]:
    """Makes gloo the default process group of all ranks that torchrun started, and takes it down in the end.

    Args:
        timeout: Longest wait for a rank, here and in every collective.

    Yields:
        The group of all ranks.

    Raises:
        ValueError: torchrun's variables make no sense; nothing was started.
        RuntimeError: The ranks do not meet.
    """
    rank, size, address, port = torchrun_place(launcher_variables())
    import torch.distributed as dist  # here, because on one machine these commands need no torch

    try:
        with working(f"waiting for {size} ranks", shown=rank == 0):
            dist.init_process_group("gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:  # no such address, no such port, a rank that does not come
        raise RuntimeError(f"rank {rank} of {size} cannot meet the others at {address}:{port}: {error}") from error
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()
