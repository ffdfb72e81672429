"""`gradwire gdr-check`: this machine; under torchrun, every host of the job, and which one is the odd one out.

torchrun --nnodes 2 --nproc-per-node 8 ... -m gradwire gdr-check [--prove]
"""

from datetime import timedelta
from typing import TypeVar

from gradwire.comms.config import local_rank, world_size
from gradwire.topology.gdr import command
from gradwire.topology.gdr.job import Job

T = TypeVar("T")

JOB_OPTIONS = frozenset({"--json", "--prove", "--all-pairs"})
"""With any other option not the job is looked at, but a description: by the first rank of each host."""
_TIMEOUT = timedelta(minutes=10)  # a probe with two all-reduces may take six


def main(argv: list[str]) -> int:
    """Runs `gradwire gdr-check` and returns its exit status; in a job rank 0 prints.

    Args:
        argv: Words after `gdr-check`.
    """
    if world_size() == 1:
        return command.main(argv)
    if not JOB_OPTIONS.issuperset(argv):
        return 0 if local_rank() else command.main(argv)
    import torch.distributed as dist  # here, because `gradwire gdr-check` on one machine needs no torch

    from gradwire.comms.bootstrap.placement import host_identity

    def gather(own: T) -> list[T]:
        told = [own] * dist.get_world_size()
        dist.all_gather_object(told, own)
        return told

    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        return command.main(argv, Job(dist.get_rank(), host_identity(), gather))
    finally:
        dist.destroy_process_group()
