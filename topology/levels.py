"""The two numbers that a planner needs about each level of a machine: bytes per second, and seconds per message.

Bandwidths are NCCL's usable figures, not data-sheet ones. A number that was neither published nor measured is None; the
caller then has to give it (or to measure).
"""

from dataclasses import dataclass

from gradwire.topology.assign import nics_of_gpus
from gradwire.topology.bandwidth import (
    ALPHA_SECONDS,
    nic_bytes_per_second,
    pcie_bytes_per_second,
    socket_bytes_per_second,
)
from gradwire.topology.fabric import NETWORK_SECONDS, network_of_nics
from gradwire.topology.graph import Machine
from gradwire.topology.labels import Labels
from gradwire.topology.paths import PathType
from gradwire.topology.visible import given_gpus

HOST_MEMORY_ALPHA_SECONDS = 4e-6
"""One hand-over between two processes through shared memory; an assumption, to be replaced by a measurement."""
_FEWEST_LINKS = "NVLink or xGMI of the GPU with the fewest: links per NCCL v2.30 topo.h"
_NO_FIGURE = "unknown: NVLink or xGMI joins the GPUs, and NCCL v2.30 topo.h has no figure for links of this generation"
_TUNING = "NCCL v2.28 src/graph/tuning.cc, ring, Simple"


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelEstimate:
    """Holds the estimated bandwidth and latency of one level of the hierarchy."""

    name: str
    """`intra_node` or `inter_node`."""
    bytes_per_second: float | None
    """Bandwidth in one direction; per GPU (or process) inside the node, per node between nodes. None is unknown."""
    alpha_seconds: float
    """Fixed cost of a message in seconds."""
    source: str
    """Origin of both numbers in words, for the report of a plan."""


HOST_BYTES_PER_SECOND = 12e9
"""Rate at which two GPUs without peer access exchange through the host's memory, each way: PCIe 3.0 x16 in NCCL's
model. Source: NCCL src/graph/topo.h, PCI_BW."""


def levels_of(machine: Machine, *, host_memory_bytes_per_second: float | None = None) -> tuple[LevelEstimate, ...]:
    """Estimates the two levels of a cluster of such machines, innermost first: inside the node, and between nodes.

    Args:
        machine: One of the nodes.
        host_memory_bytes_per_second: Rate of a copy in host memory, used only for machines without GPUs; None leaves
            their inner level unknown.
    """
    if not machine.gpus:
        rate = host_memory_bytes_per_second
        origin = "given by the caller" if rate is not None else "unknown until measured"
        source = f"host memory: {origin}; alpha assumed"
        intra = LevelEstimate(
            name="intra_node", bytes_per_second=rate, alpha_seconds=HOST_MEMORY_ALPHA_SECONDS, source=source
        )
        return intra, _inter_node(machine)
    return _intra_node(machine), _inter_node(machine)


def _intra_node(machine: Machine) -> LevelEstimate:
    """Estimates the link between a machine's GPUs: NVLink or xGMI if it joins all, else the slowest part of the way.

    That is PCIe, the link between two sockets, or host memory if GPUs have no peer access. The rate is unknown for MIG
    slices, for one GPU of several, and if it is not known whether NVLink joins the GPUs.

    Source: MIG user guide, Deployment considerations (slices reach each other neither over NVLink nor as peers).
    """
    labels = Labels(machine)
    gpus = given_gpus(machine)
    sliced = any(gpu.slices for gpu in gpus)
    joined = all(labels.distances.gpu_gpu(gpus[0], gpu) in (PathType.NVL, PathType.LOC) for gpu in gpus)
    if len(gpus) > 1 and joined and not sliced:
        rates = [labels.link_bytes_per_second(gpu) for gpu in gpus]
        return LevelEstimate(
            name="intra_node",
            bytes_per_second=_least(rates),
            alpha_seconds=ALPHA_SECONDS["nvlink"],
            source=f"{_NO_FIGURE if None in rates else _FEWEST_LINKS}; alpha: {_TUNING}",
        )
    alone = len(gpus) == 1 and len(machine.gpus) > 1
    if sliced or alone or (len(gpus) > 1 and not machine.links_known):
        why = "the driver gives this process one GPU of several" if alone else "this source cannot show NVLink or xGMI"
        why = "MIG slices reach each other through host memory alone" if sliced else why
        source = f"unknown: {why}; alpha: {_TUNING}"
        return LevelEstimate(
            name="intra_node", bytes_per_second=None, alpha_seconds=ALPHA_SECONDS["pcie"], source=source
        )
    pcie = [pcie_bytes_per_second(gpu.pcie) for gpu in gpus]
    crossed = {cpu for gpu in gpus if (cpu := labels.cpu(gpu)) is not None}
    sockets = [socket_bytes_per_second(cpu) for cpu in crossed] if len(crossed) > 1 else []
    host = [HOST_BYTES_PER_SECOND] if len(gpus) > 1 and any(gpu.peers is False for gpu in gpus) else []
    slowest = "PCIe" + " and the link between sockets" * bool(sockets) + " and host memory, without peers" * bool(host)
    return LevelEstimate(
        name="intra_node",
        bytes_per_second=_least([*pcie, *sockets, *host]),
        alpha_seconds=ALPHA_SECONDS["pcie"],
        source=f"slowest of {slowest}: NCCL v2.30; alpha: {_TUNING}",
    )


def _inter_node(machine: Machine) -> LevelEstimate:
    """Estimates the link between nodes: all NICs that the GPUs drive together; without GPUs, the fastest NIC."""
    nics = [nic for nic in nics_of_gpus(machine).values() if nic is not None] if machine.gpus else list(machine.nics)
    rates = {nic.key: nic_bytes_per_second(nic) for nic in nics}
    known = [rate for rate in rates.values() if rate is not None]
    total = sum(known) if machine.gpus else max(known, default=None)
    network = network_of_nics(nics)
    rdma = network != "tcp"
    alpha = ALPHA_SECONDS["network"] + NETWORK_SECONDS[network]
    origin = "unknown: no NIC reports its line rate" if not known else f"line rate of {len(known)} of {len(rates)} NICs"
    return LevelEstimate(
        name="inter_node",
        bytes_per_second=total or None,
        alpha_seconds=alpha,
        source=f"{origin}; alpha: {_TUNING if rdma else 'TCP, assumed'}{', EFA: aws-ofi-nccl' * (network == 'efa')}",
    )


def _least(rates: list[float | None]) -> float | None:
    """Returns the smallest rate, or None if one of them is unknown or there is none."""
    known = [rate for rate in rates if rate is not None]
    return min(known) if known and len(known) == len(rates) else None
