"""Predictions for nodes of one kind with NICs and numbers of ranks that may differ, for `predict` and `doctor`."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gradwire.comms.bootstrap.placement import with_node_rates
from gradwire.comms.plan.advise import Advice, Candidate, Workload, advise
from gradwire.comms.plan.machine_cluster import cluster_of_machines, payload_share
from gradwire.topology.cluster import Cluster
from gradwire.topology.graph import Machine


def cluster_of_nodes(
    machine: Machine,
    nodes: int,
    *,
    ranks: Sequence[int] = (),
    rates: Sequence[float] = (),
    nics_per_node: int | None = None,
    intra_bits_per_second: float | None = None,
    round_trip_seconds: float = 0.0,
    loss: float = 0.0,
) -> Cluster:
    """Returns the cluster of the first nodes of a list.

    Args:
        machine: Topology of each node.
        nodes: Number of nodes.
        ranks: Ranks of each node, or one number for all; empty takes one for each GPU, else CPU socket.
        rates: Rate of a NIC of each node in bits per second, or one for all; empty takes the machine's.
        nics_per_node: NICs used for gradients; None takes 1 with rates given, else those of the machine.
        intra_bits_per_second: Rate of one rank inside its node instead of the topology's.
        round_trip_seconds: Round trip between two nodes, without GPUs.
        loss: Probability that a packet between nodes is lost, with a round trip.

    Raises:
        ValueError: A number is out of range, or a bandwidth is neither known nor given.
    """
    rates = rates[:nodes]
    whole = cluster_of_machines(
        machine,
        nodes,
        ranks_per_node=max(ranks[:nodes], default=None),
        nic_bits_per_second=min(rates, default=None),
        nics_per_node=nics_per_node,
        intra_bits_per_second=intra_bits_per_second,
        round_trip_seconds=round_trip_seconds,
        loss=loss,
    )
    if len(ranks) > 1:
        counts = dict(zip(whole.units(0), ranks, strict=False))
        whole = replace(whole, locations=tuple(node for node, count in counts.items() for _ in range(count)))
    share = (nics_per_node or 1) * payload_share(has_gpus=bool(machine.gpus))
    return with_node_rates(whole, [rate / 8 * share for rate in rates] if len(set(rates)) > 1 else [])


def exact_candidates(advice: Advice) -> list[Candidate]:
    """Returns the exact candidates that a job can use, and in any case the flat all-reduce."""
    return [
        candidate
        for candidate in advice.candidates
        if candidate.compressor == "none" and (candidate.available or candidate.name == "flat")
    ]


def exact_gain(cluster_of: Callable[[int], Cluster], nodes: int, workload: Workload, library: str) -> float:
    """Returns how many times as much some nodes train as one of them, each with its best exact plan.

    Args:
        cluster_of: Returns the cluster of a number of nodes.
        nodes: Number of nodes.
        workload: Gradients and computation of one step.
        library: Library that runs a flat plan, as `machine_cluster.library_of` returns it.
    """
    one, all_nodes = (
        min(each.step_seconds for each in exact_candidates(advise(cluster_of(count), workload, (), library=library)))
        for count in (1, nodes)
    )
    return nodes * one / all_nodes
