"""Condition and source of the fix of each kind of finding; the report prints them below the fix.

They let the reader see whether the advice is for a machine like theirs.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Basis:
    """Condition and source of the fixes of one kind of finding.

    Attributes:
        holds: Condition under which the fix helps, printed after `if:`.
        source: Public document that says so.
    """

    holds: str
    source: str


_NCCL = "NCCL user guide"
_TORCHRUN = "documentation of torchrun, Environment Variables"

BASES = {
    "slow_link": Basis(
        "nothing else used that link meanwhile: another job on it looks the same",
        "ethtool(8), tc(8)",
    ),
    "slow_path": Basis(
        "the two nodes have several switches between them; behind one switch look at their ports",
        "traceroute(8); NCCL user guide, Troubleshooting, Networking issues",
    ),
    "narrow_slot": Basis(
        "the NIC runs in the slot that it will be used in: an idle NIC may lower its speed, never its lanes",
        "Linux Documentation/ABI/testing/sysfs-bus-pci; for two halves of one port github.com/geerlingguy/sbc-reviews, "
        "issue 92",
    ),
    "single_connection": Basis(
        "gradients travel over TCP; RDMA opens its own connections, and needs none of this",
        f"{_NCCL}, NCCL_SOCKET_NTHREADS; Amazon EC2 user guide, Network bandwidth (5 Gbit/s a flow)",
    ),
    "half_duplex": Basis(
        "no limit of sent plus received bytes is wanted there, as some clouds have it",
        "ethtool(8), IEEE 802.3 clause 28",
    ),
    "flapping": Basis(
        "the interface was not taken down and up by hand during the examination",
        "Linux Documentation/ABI/testing/sysfs-class-net, carrier_changes; ethtool(8)",
    ),
    "far_apart": Basis(
        "the nodes could be nearer: two sites keep their distance, and want fewer exchanges",
        "documentation of DistributedDataParallel, bucket_cap_mb; Amazon EC2 user guide, Placement groups",
    ),
    "mtu": Basis(
        "all switches on the way carry packets of that size; one that does not drops them without a word",
        "ip-link(8), ping(8); RFC 2923 section 2.1, Black hole detection",
    ),
    "wrong_interface": Basis(
        "that interface leads to all nodes, as `ip route get ADDRESS` shows",
        f"{_NCCL}, NCCL_SOCKET_IFNAME; documentation of torch.distributed, Choosing the network interface to use",
    ),
    "idle_nic": Basis(
        "both NICs of each node lead to all others",
        f"{_NCCL}, NCCL_SOCKET_IFNAME and NCCL_IB_HCA; documentation of torch.distributed, GLOO_SOCKET_IFNAME",
    ),
    "no_connection": Basis(
        "the launcher's own port is open, as it is here, and others are not",
        f"{_NCCL}, Troubleshooting, Networking issues; documentation of torch.distributed, GLOO_SOCKET_IFNAME",
    ),
    "packet_loss": Basis(
        "packets are lost on a way that is not full; on a full one loss is what slows senders down",
        "RFC 5681 section 3; ethtool(8)",
    ),
    "tcp_buffers": Basis(
        "both nodes have the memory for so much of each connection, and TCP carries the gradients",
        "tcp(7), tcp_rmem and tcp_wmem; RFC 7323 section 1.1",
    ),
    "unreachable": Basis(
        "the nodes belong to one network, and you may change its firewalls and routes",
        f"{_NCCL}, Troubleshooting, Networking issues; ip-route(8)",
    ),
    "foreign_traffic": Basis(
        "that traffic is not this job's own data, read from a file system over the same NIC",
        "Linux Documentation/ABI/testing/sysfs-class-net-statistics; ss(8)",
    ),
    "slow_exchange": Basis(
        "the links were measured at the same time of day: other jobs may have come since",
        "Thakur et al., Optimization of Collective Communication Operations in MPICH, 2005 (the bound)",
    ),
    "rank_order": Basis(
        "the launcher may place ranks as it likes; a scheduler that shares nodes may not",
        f"mpirun(1), --map-by; srun(1), --distribution; {_TORCHRUN}",
    ),
    "shared_gpu": Basis(
        "each rank is to have a GPU of its own, as NCCL wants it",
        f"srun(1), SLURM_LOCALID; {_TORCHRUN}; {_NCCL}, Creating a communicator",
    ),
    "shared_memory": Basis(
        "ranks of one node share memory there: NCCL and gradwire do, gloo does not, DataLoader's workers do",
        f"{_NCCL}, Troubleshooting, Shared memory; docker run reference, --shm-size",
    ),
    "oversubscribed_cores": Basis(
        "the node is this job's alone; on a shared one the quota or binding is what others were assigned",
        "PyTorch, Performance tuning guide, Utilize OpenMP; srun(1), --cpu-bind; cgroups(7)",
    ),
    "slow_node": Basis(
        "all nodes are of one kind; of unlike nodes the slower one is no fault, and wants fewer samples",
        "Linux Documentation/admin-guide/pm/cpufreq.rst; proc(5), steal",
    ),
    "slow_gpu": Basis(
        "the GPU works as hard as the others: an idle one is slow on purpose",
        "NVML API reference, nvmlDeviceGetCurrentClocksEventReasons",
    ),
    "no_peer_to_peer": Basis(
        "the driver says so, as here; where it says yes and NCCL hangs, PCIe access control is the reason",
        f"NVML API reference, nvmlDeviceGetP2PStatus; {_NCCL}, Troubleshooting, PCI Access Control Services",
    ),
    "gpudirect": Basis(
        "the GPUs are data-centre or professional ones, with network cards that do RDMA in hardware",
        f"{_NCCL}, NCCL_NET_GDR_LEVEL; NVIDIA, GPUDirect RDMA guide",
    ),
    "clocks": Basis("no hypervisor sets the clock of a virtual machine", "timedatectl(1), chronyc(1)"),
    "late_rank": Basis(
        "the rank is late in every run; one that is late once had a neighbour",
        "documentation of DistributedDataParallel, join (uneven inputs); of torch.distributed.checkpoint, async_save",
    ),
    "many_exchanges": Basis(
        "the exchanges may wait or be joined: a step that needs a sum at once keeps it",
        "documentation of DistributedDataParallel, no_sync, bucket_cap_mb and find_unused_parameters",
    ),
    "unused_parameters": Basis(
        "no later step uses those parameters either: a branch that is taken rarely needs them",
        "documentation of DistributedDataParallel, find_unused_parameters",
    ),
    "slow_loader": Basis(
        "the node has cores and memory left for more workers",
        "documentation of torch.utils.data, DataLoader, num_workers and prefetch_factor",
    ),
    "checkpoints": Basis(
        "there is memory for a copy of what is saved",
        "documentation of torch.distributed.checkpoint, async_save",
    ),
    "variable": Basis(
        "a short run without the variable ends, and is faster: what it would bring was not measured",
        "beside the variable",
    ),
    "variables_differ": Basis(
        "the nodes are to run one job with one NCCL",
        f"{_NCCL}, Environment Variables; mpirun(1), -x; sbatch(1), --export",
    ),
    "versions": Basis(
        "they do not differ on purpose, as during a rolling upgrade",
        "NCCL src/init.cc (Mismatched NCCL version detected); documentation of torch.distributed, Initialization",
    ),
    "missing_ranks": Basis(
        "as many ranks were started as the launcher was told",
        "documentation of torchrun, --nnodes and --rdzv-conf; nc(1)",
    ),
    "backend_fails": Basis(
        "the same all-reduce is what the job needs: a backend that it never uses may fail",
        "documentation of torch.distributed, Which backend to use?",
    ),
}
"""Key of a finding -> condition and source of its fix."""
