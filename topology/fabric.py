"""The facts about a machine's GPUs and network that NCCL's own cost model depends on, beside the rates of its links."""

from collections.abc import Iterable

from gradwire.topology.assign import nics_of_gpus
from gradwire.topology.bandwidth import ALPHA_SECONDS, memory_bytes_per_second
from gradwire.topology.cluster import GpuFabric
from gradwire.topology.graph import Machine, Nic
from gradwire.topology.networks import network_of
from gradwire.topology.paths import Distances, PathType
from gradwire.topology.pci_ids import AMD_GPU
from gradwire.topology.visible import given_gpus

TCP_ALPHA_SECONDS = 30e-6
"""One small TCP message between two hosts on one Ethernet switch; an assumption, to be replaced by a measurement."""

TCP_SHARE = 0.94
"""Share of an Ethernet NIC's rate that TCP leaves for payload at an MTU of 1500: 1448 bytes of a packet that takes 1538
on the wire, with preamble, gap, checksum and headers. Source: IEEE 802.3 clause 4; RFC 7323 section 3.2 (time stamps).
"""

NETWORK_SECONDS = {
    "infiniband": 0.0,
    "roce": 0.0,
    "omnipath": 0.0,
    "slingshot": 0.0,
    "efa": 75e-6,
    "tcp": TCP_ALPHA_SECONDS - ALPHA_SECONDS["network"],
}
"""What NCCL is to add to the latencies that it has for InfiniBand. Its plug-ins for InfiniBand, RoCE and sockets say 0
(NCCL v2.30 src/transport/net_ib/init.cc, net_socket.cc), that for EFA 75 us on p4d, g5 and p5 (aws-ofi-nccl
src/platform-aws.cpp); nothing is published for Slingshot and Omni-Path. For TCP the assumed latency of a message
counts."""

CHANNELS_PER_NIC = 2
"""Connections that NCCL opens between two neighbours for each card. Source: NVIDIA/nccl issue 438."""

NVLS_CAPABILITY = 90
"""NVLink SHARP: from Hopper on. Source: NCCL v2.30 src/graph/search.cc, ncclTopoCompute."""

_NEAR = (PathType.LOC, PathType.PIX, PathType.PXB)
_NEAR_FROM_HOPPER = (*_NEAR, PathType.P2C)


def sender_nics(nics: int, ranks: int) -> int:
    """Returns how many NICs one GPU's own traffic uses: an equal share of the node's, at least one.

    Args:
        nics: Number of NICs that the GPUs of a node drive together.
        ranks: Number of these GPUs.
    """
    return max(1, nics // ranks)


def network_of_nics(nics: Iterable[Nic]) -> str:
    """Returns the kind of network with the highest latency among some NICs; `tcp` if there are none.

    Args:
        nics: NICs of one machine.

    Returns:
        A key of `NETWORK_SECONDS`.
    """
    kinds = {network_of(nic) for nic in nics}
    return max(kinds or {"tcp"}, key=lambda kind: (NETWORK_SECONDS[kind], kind))


def slowest_memory(machine: Machine) -> float | None:
    """Returns the peak bandwidth of the memory of a node's slowest GPU, in bytes per second.

    Args:
        machine: One of the nodes.

    Returns:
        None if the machine has no GPU, and for MIG slices, each of which has a part of its card's bandwidth.
    """
    gpus = given_gpus(machine)
    return None if any(gpu.slices for gpu in gpus) else min(map(memory_bytes_per_second, gpus), default=None)


def fabric_of(machine: Machine, *, network: str | None = None) -> GpuFabric | None:
    """Returns the properties of a node's GPUs and network on which NCCL's cost model depends.

    Args:
        machine: One of the nodes, which are taken to be equal.
        network: Kind of network to assume instead of that of the machine's own NICs. The place of such a NIC in the
            machine is unknown, so LL128 is taken to be off. None uses the machine's NICs.

    Returns:
        None if the machine has no GPU, if not all GPUs are NVIDIA's of a known generation, if they are divided into
        MIG slices, or if this process sees one GPU of several.
    """
    gpus = given_gpus(machine)
    if len(gpus) == 1 < len(machine.gpus):  # of what joins it to the other ranks' GPUs this process sees nothing
        return None
    if any(gpu.slices for gpu in gpus):  # MIG: what joins the whole GPUs is not there for their slices
        return None
    capabilities = [gpu.compute_capability for gpu in gpus]
    oldest = min((capability for capability in capabilities if capability is not None), default=None)
    if oldest is None or None in capabilities or any(gpu.vendor == AMD_GPU or gpu.architecture for gpu in gpus):
        return None
    distances = Distances(machine)
    joined = all(distances.gpu_gpu(gpus[0], gpu) in (PathType.NVL, PathType.LOC) for gpu in gpus)
    chosen = nics_of_gpus(machine)
    near = _NEAR_FROM_HOPPER if oldest >= NVLS_CAPABILITY else _NEAR
    reached = all((nic := chosen[gpu.key]) is not None and distances.gpu_nic(gpu, nic) in near for gpu in gpus)
    kind = network or network_of_nics(nic for nic in chosen.values() if nic is not None)
    return GpuFabric(
        compute_capability=oldest,
        nvlink=joined,
        nvls=bool(machine.nvswitches) and oldest >= NVLS_CAPABILITY and len(gpus) > 1,
        ll128=joined and reached and network is None and kind != "tcp",
        amd_cpu=any(cpu.vendor == "AuthenticAMD" for cpu in machine.cpus),
        network=kind,
        network_seconds=NETWORK_SECONDS[kind],
    )
