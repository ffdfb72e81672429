"""`gradwire gdr-check`: this machine; under torchrun, every host of the job, and which one is the odd one out.

torchrun --nnodes 2 --nproc-per-node 8 ... -m gradwire gdr-check [--prove]
"""

from collections.abc import Mapping
from datetime import timedelta

from gradwire.comms.config import world_size
from gradwire.topology.gdr import command
from gradwire.topology.gdr.command import Peers

JOB_OPTIONS = frozenset({"--json", "--prove", "--all-pairs"})
"""With any other option a description is looked at, not the job."""
_TIMEOUT = timedelta(minutes=10)  # a probe with two all-reduces may take six


def main(argv: list[str]) -> int:
    """Runs `gradwire gdr-check` and returns its exit status; in a job rank 0 prints.

    Args:
        argv: Words after `gdr-check`.
    """
    if world_size() == 1 or not JOB_OPTIONS.issuperset(argv):
        return command.main(argv)
    import torch.distributed as dist  # here, because `gradwire gdr-check` on one machine needs no torch

    from gradwire.comms.placement import host_identity

    def gather(own: Mapping[str, object]) -> Peers:
        """Everybody's result, one for each host."""
        dist.init_process_group("gloo", timeout=_TIMEOUT)
        try:
            rank = dist.get_rank()
            told: list[tuple[tuple[str, ...], Mapping[str, object]]] = [((), {})] * dist.get_world_size()
            dist.all_gather_object(told, (host_identity(), own))
        finally:
            dist.destroy_process_group()
        hosts = dict(reversed(told))  # the lowest rank of a host speaks for it
        ordered = dict.fromkeys(host for host, _ in told)
        return Peers(rank, tuple({"name": host[0], **hosts[host]} for host in ordered))

    return command.main(argv, gather)
