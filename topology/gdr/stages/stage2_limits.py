"""Stage 2, continued: lossless Ethernet, locked memory, shared memory, the container's network."""

import re

from gradwire.topology.gdr.host import Host
from gradwire.topology.gdr.model import Check, Finding, Verdict, failed, informed, passed, unknown, warned
from gradwire.topology.gdr.place import CAP_IPC_LOCK

_COUNTERS = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err")
_MEMLOCK_FLOOR_NBYTES = 64 << 20
_SHM_FLOOR_NBYTES = 1 << 30


def lossless_ethernet(host: Host) -> Finding:
    """RoCE loses speed, not correctness, when frames are dropped: retransmission counters should be zero.

    Command: `grep . /sys/class/infiniband/*/ports/*/hw_counters/{out_of_sequence,packet_seq_err}; mlnx_qos -i DEV`
    Source: NVIDIA, Understanding mlx5 Linux counters (HW counters).
    """
    ports = [(d.name, port) for d in host.rdma_devices or () for port in d.ports if port.link_layer]
    ethernet = [(name, port.number) for name, port in ports if port.link_layer == "Ethernet"]
    if ports and not ethernet:
        return informed("no RoCE port: InfiniBand and Slingshot are lossless by themselves")
    counts: dict[str, int] = {}
    for name, number in ethernet:
        for counter in _COUNTERS:
            text = host.files.text(f"sys/class/infiniband/{name}/ports/{number}/hw_counters/{counter}")
            if text and re.fullmatch(r"[0-9]{1,20}", text):
                counts[f"{name}/{counter}"] = int(text)
    lossy = [f"{name} {count}" for name, count in counts.items() if count]
    if lossy:
        remedy = "priority flow control or ECN on switch and NIC (mlnx_qos --pfc), NCCL_IB_TC as the site says"
        return warned(f"retransmissions: {', '.join(lossy[:4])}", remedy)
    return passed(f"{len(counts)} retransmission counters are zero") if counts else unknown("no counters can be read")


def locked_memory(host: Host) -> Finding:
    """Registered memory is locked memory: the limit has to allow it.

    Command: `ulimit -l; grep locked /proc/self/limits`
    Source: NCCL user guide, Troubleshooting, section Memory issues; nccl-tests issue 206.
    """
    lines = host.files.find("proc/self/limits", r"^Max locked memory .*$")
    words = lines[0].split() if lines else []
    if len(words) < 4:
        return unknown("/proc/self/limits cannot be read", "ulimit -l")
    remedy = (
        "docker --ulimit memlock=-1; limits.conf; systemd LimitMEMLOCK=infinity; Slurm PropagateResourceLimitsExcept"
    )
    soft = words[3]
    if soft == "unlimited":
        return passed("unlimited")
    if not soft.isdigit() or len(soft) > 20:
        return unknown(f"limit `{soft[:20]}` is no number")
    if int(soft) < _MEMLOCK_FLOOR_NBYTES and not (host.place.root and host.place.can(CAP_IPC_LOCK)):
        return failed(f"{int(soft) >> 10} KiB of locked memory", remedy)
    return warned(f"{int(soft) >> 20} MiB of locked memory", remedy)


def shared_memory(host: Host) -> Finding:
    """NCCL's transport inside a node needs room in /dev/shm (Docker gives 64 MiB).

    Command: `df /dev/shm`
    Source: NCCL user guide, Troubleshooting, section Shared memory.
    """
    nbytes = host.facts.shm_nbytes
    if nbytes is None:
        return unknown("/dev/shm was not asked", "run on the live host")
    if nbytes < _SHM_FLOOR_NBYTES:
        return warned(f"{nbytes >> 20} MiB", "docker --shm-size=16g; Kubernetes: emptyDir with medium Memory")
    return passed(f"{nbytes >> 20} MiB")


def container_network(host: Host) -> Finding:
    """In a container the network interfaces behind the RoCE addresses are there too.

    Command: `ls /sys/class/net; cat /sys/class/infiniband/*/ports/*/gid_attrs/ndevs/*`
    Source: nccl issue 1573.
    """
    if host.place.container == "":
        return passed("no container")
    interfaces = host.files.names("sys/class/net")
    wanted = {g.net_device for d in host.rdma_devices or () for port in d.ports for g in port.gids if g.net_device}
    if interfaces is None or host.place.container is None:
        return unknown("the network namespace cannot be seen")
    missing = sorted(wanted - set(interfaces))
    if missing:
        return warned(
            f"RoCE interfaces not in this namespace: {', '.join(missing[:8])}", "hostNetwork, or a CNI for RDMA"
        )
    return passed(f"{len(wanted)} RoCE interfaces visible")


CHECKS = (
    Check("R9", "lossless Ethernet", lossless_ethernet, None, ("R1",)),
    Check("R10", "locked memory", locked_memory, Verdict.CONFIGURED, ()),
    Check("R11", "/dev/shm", shared_memory, None, ()),
    Check("R12", "container network", container_network, None, ("R1",)),
)
