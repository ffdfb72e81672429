"""Connects the ranks of commands that examine every host of a job."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from gradwire.bench.terminal import working
from gradwire.comms.environment import launcher_variables, torchrun_place

if TYPE_CHECKING:
    from gradwire.topology.gdr.job import JobRank


@contextmanager
def joined_job(timeout: timedelta) -> Iterator["JobRank"]:
    """Makes a gloo default process group of all ranks that torchrun started, and destroys it at the end of the block.

    Args:
        timeout: Longest wait for a rank, here and in each collective.

    Yields:
        This rank of the job.

    Raises:
        ValueError: torchrun's variables are invalid; nothing was started.
        RuntimeError: The ranks could not connect.
    """
    rank, size, address, port = torchrun_place(launcher_variables())
    import torch.distributed as dist  # here, because on one machine these commands need no torch

    from gradwire.comms.bootstrap.kernel import host_identity
    from gradwire.comms.boundary.gathering import gather_records
    from gradwire.topology.gdr.job import JobRank

    try:
        with working(f"waiting for {size} ranks", shown=rank == 0):
            dist.init_process_group("gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:  # no such address, no such port, a rank that does not come
        raise RuntimeError(f"rank {rank} of {size} cannot meet the others at {address}:{port}: {error}") from error

    try:
        yield JobRank(rank, host_identity(), gather_records)
    finally:
        dist.destroy_process_group()
