"""`gradwire topo`: this machine; under torchrun, the cluster, its NICs, which nodes differ, which ranks are badly placed.

torchrun --nnodes 4 --nproc-per-node 8 ... -m gradwire topo
"""

import sys
from dataclasses import dataclass, replace

from rich.console import Console

from gradwire.comms.config import local_rank, world_size
from gradwire.topology.assign import nic_for_local_rank
from gradwire.topology.compare import RankPlacement, compare
from gradwire.topology.graph import Machine
from gradwire.topology.labels import nic_name
from gradwire.topology.readers.detect import detect
from gradwire.topology.show import command, json_form
from gradwire.topology.show.draw import summary, tree


@dataclass(frozen=True, slots=True)
class Visit:
    """What one rank says: where it is, and its machine as JSON."""

    host: tuple[str, ...]
    local_rank: int
    machine: str


def main(argv: list[str]) -> int:
    """Runs `gradwire topo` and returns its exit status.

    Args:
        argv: Words after `topo`; with any of them the options of one machine apply, on rank 0 alone.
    """
    if world_size() == 1:
        return command.main(argv)
    import torch.distributed as dist  # here, because `gradwire topo` on one machine needs no torch

    from gradwire.comms.bootstrap.placement import host_identity

    dist.init_process_group("gloo")
    try:
        visits: list[Visit] = [Visit((), 0, "")] * dist.get_world_size()
        dist.all_gather_object(visits, Visit(host_identity(), local_rank() or 0, json_form.write(detect())))
        if dist.get_rank() != 0:
            return 0
        return command.main(argv) if argv else show(visits)
    finally:
        dist.destroy_process_group()


def show(visits: list[Visit]) -> int:
    """Prints each kind of machine once, the ranks of each node, and what is wrong; 1 where something is."""
    console = Console(file=sys.stdout, emoji=False)
    hosts = list(dict.fromkeys(visit.host for visit in visits))
    machines = [json_form.read(next(visit.machine for visit in visits if visit.host == host)) for host in hosts]
    console.print(f"{len(visits)} ranks on {len(hosts)} {'node' if len(hosts) == 1 else 'nodes'}")
    for number, host in enumerate(hosts):
        ranks = [rank for rank, visit in enumerate(visits) if visit.host == host]
        console.print(
            f"node {number} {host[0]}: ranks {', '.join(map(str, ranks))}; {summary(machines[number])}", highlight=False
        )
        nics = [nic_for_local_rank(machines[number], visits[rank].local_rank) for rank in ranks]
        console.print(f"  NIC by rank: {', '.join(nic_name(nic) if nic else '?' for nic in nics)}", highlight=False)
    kinds: dict[str, list[str]] = {}
    for number, machine in enumerate(machines):
        kinds.setdefault(json_form.write(replace(machine, hostname=None)), []).append(str(number))
    for kind, numbers in kinds.items():
        name = f"node{'' if len(numbers) == 1 else 's'} {', '.join(numbers)}"
        console.print(tree(replace(json_form.read(kind), hostname=name)))
    findings = compare(machines, [_placement(rank, visit, hosts, machines) for rank, visit in enumerate(visits)])
    for finding in findings:
        console.print(f"- {finding}", highlight=False)
    if not findings:
        console.print("all nodes are alike, and all ranks are well placed", highlight=False)
    return 1 if findings else 0


def _placement(rank: int, visit: Visit, hosts: list[tuple[str, ...]], machines: list[Machine]) -> RankPlacement:
    node = hosts.index(visit.host)
    gpus = len(machines[node].gpus)
    nic = nic_for_local_rank(machines[node], visit.local_rank)
    port = nic.ports[0].name if nic is not None and nic.ports else None
    return RankPlacement(rank=rank, node=node, gpu=visit.local_rank % gpus if gpus else None, nic=port)
