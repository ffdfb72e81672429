"""Explains warnings of NCCL and of its plug-ins: the cause in words, and the command that shows or mends it.

A job that fails because of its network logs a WARN line, often after all channels were made; the lines about channels
alone would look healthy.
"""

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class KnownWarning:
    """Describes a kind of log line that names a cause.

    Attributes:
        pattern: Regular expression that such a line contains.
        cause: Meaning of the line in plain words.
        fix: Advice: a command that shows or repairs the cause.
        source: Public page or source file that explains cause and fix.
        kind: `ends`: the job does not survive it; `follows`: it follows from another error, and counts only if nothing
            else is in the log; `gdr`: it explains why GPUDirect RDMA is not used; `sockets`: it explains why sockets
            are used, if they are; `remark`: the job goes on;
            `harmless`: it says nothing of the job.
    """

    pattern: str
    cause: str
    fix: str
    source: str
    kind: Literal["ends", "follows", "gdr", "sockets", "remark", "harmless"] = "ends"

    @property
    def ends_job(self) -> bool:
        """Returns whether the job does not survive it."""
        return self.kind in ("ends", "follows")


_STATUS = r"Got completion .*?(?:status=(?:\w+\()?|with error )"
"""Pattern of what precedes the number of an ibv_wc_status; NCCL before 2.20 called it an error, before 2.12 without the
peer's name."""

KNOWN_WARNINGS = (
    KnownWarning(
        r"Call to ibv_reg_(?:mr\w*|dmabuf_mr) failed.*(?:Cannot allocate memory|\b12\b)",
        "memory could not be pinned for the card: the limit of locked memory",
        "ulimit -l must say unlimited: --ulimit memlock=-1 (docker), LimitMEMLOCK=infinity (systemd, slurmd)",
        "NCCL user guide, Troubleshooting, Memory issues; ibv_reg_mr(3)",
    ),
    KnownWarning(
        r"Call to ibv_reg_(?:mr\w*|dmabuf_mr) failed.*(?:Bad address|\b14\b|not supported|\b95\b)",
        "GPU memory could not be registered with the card: neither peer memory nor dma-buf works",
        "see M1, M2 and M3; NCCL_NET_GDR_LEVEL=LOC goes through the host until they are mended",
        "ibv_reg_mr(3), ibv_reg_dmabuf_mr(3); NCCL user guide, NCCL_NET_GDR_LEVEL",
    ),
    KnownWarning(
        r"Call to ibv_reg_(?:mr\w*|dmabuf_mr) failed",
        "memory could not be registered with the card",
        "ulimit -l; then M1, M2 and M3",
        "ibv_reg_mr(3)",
    ),
    KnownWarning(
        r"Call to ibv_create_(?:qp|cq|srq)\w* failed|mlx5dv_create_qp failed",
        "the card gave no queue pair: locked memory, or another job's queue pairs",
        "ulimit -l must say unlimited; rdma resource show qp",
        "ibv_create_qp(3); rdma-resource(8)",
    ),
    KnownWarning(
        r"Call to ibv_modify_qp failed.*(?:Invalid argument|\b22\b)",
        "a connection was refused by the card: the GID does not fit, as where NCCL_IB_GID_INDEX is fixed",
        "unset NCCL_IB_GID_INDEX (NCCL 2.21 or later); show_gids on both hosts",
        "NCCL user guide, NCCL_IB_GID_INDEX; ibv_modify_qp(3)",
    ),
    KnownWarning(
        r"Call to ibv_modify_qp failed.*(?:No such device|\b19\b|GID fe80|fe80::)",
        "a card has only a link-local GID, or the GID's interface is not in this network namespace",
        "give the card's interface an address; in a container host networking or an SR-IOV device plug-in; show_gids",
        "github.com/NVIDIA/nccl/issues/1573; NCCL user guide, Troubleshooting, RDMA over Converged Ethernet",
    ),
    KnownWarning(
        r"Call to ibv_modify_qp failed.*(?:timed out|\b110\b)",
        "cards that are to talk to each other cannot: rails without a way between them, or an address without a route",
        "NCCL_CROSS_NIC=0 to confirm; ping between the cards' addresses",
        "NCCL user guide, NCCL_CROSS_NIC; ibv_modify_qp(3)",
    ),
    KnownWarning(
        r"Call to ibv_modify_qp failed",
        "a connection between two cards was not made",
        "show_gids on both hosts; ping between the cards' addresses",
        "ibv_modify_qp(3)",
    ),
    KnownWarning(
        rf"{_STATUS}12\b",
        "packets to a peer were not answered: a link that is down, RoCE without lossless queues, or a wrong GID",
        "counters of port and switch (ethtool -S, pause and discards); show_gids; then a longer NCCL_IB_TIMEOUT",
        "ibv_poll_cq(3), IBV_WC_RETRY_EXC_ERR; NCCL user guide, NCCL_IB_TIMEOUT",
    ),
    KnownWarning(
        rf"{_STATUS}4\b",
        "the card could not reach GPU memory: most often PCIe access control (ACS)",
        "see P5; NCCL_NET_GDR_LEVEL=LOC confirms it where the job then runs",
        "ibv_poll_cq(3), IBV_WC_LOC_PROT_ERR; NCCL user guide, Troubleshooting, PCI Access Control Services",
    ),
    KnownWarning(
        rf"{_STATUS}5\b",
        "a card dropped what was queued after another error; the first one counts",
        "the first WARN line of all ranks",
        "ibv_poll_cq(3), IBV_WC_WR_FLUSH_ERR",
        kind="follows",
    ),
    KnownWarning(
        rf"{_STATUS}(?:9|10|11)\b",
        "the peer's card refused a transfer, as where its GPU memory is not registered",
        "see M1 on the peer; all hosts with one driver and one NCCL",
        "ibv_poll_cq(3), IBV_WC_REM_ACCESS_ERR and its neighbours",
    ),
    KnownWarning(
        rf"{_STATUS}13\b",
        "a peer's card was not ready to receive for too long: its process had stopped, or had ended",
        "the first error of the peer's host, in its own output",
        "ibv_poll_cq(3), IBV_WC_RNR_RETRY_EXC_ERR",
    ),
    KnownWarning(
        rf"{_STATUS}\d",
        "a transfer between two cards failed",
        "the meaning of the number: ibv_poll_cq(3), enum ibv_wc_status; then counters of the port (ethtool -S)",
        "ibv_poll_cq(3); verbs.h, enum ibv_wc_status",
    ),
    KnownWarning(
        r"[Aa]sync event ?: ?GID table change|GID table changed?\b",
        "the addresses of a card changed while the job ran: connections that use a GID that is gone will fail",
        "keep addresses as they are while jobs run (NetworkManager, DHCP, containers that start); show_gids before and "
        "after; NCCL 2.21 or later without NCCL_IB_GID_INDEX",
        "ibv_get_async_event(3), IBV_EVENT_GID_CHANGE; NCCL user guide, NCCL_IB_GID_INDEX",
        kind="remark",
    ),
    KnownWarning(
        r"Unable to use GIN: Peermem is not supported, nor DMA-BUF",
        "neither peer memory nor dma-buf is there to register GPU memory with",
        "load nvidia_peermem (M1), or make dma-buf work (M3)",
        "NCCL src/transport/net_ib (ncclGinIbGdrSupport)",
        kind="gdr",
    ),
    KnownWarning(
        r"[Aa]sync event ?: ?port (?:error|active)|[Nn]on-fatal async event: port (?:error|active)",
        "a card's port went down or came back while the job ran",
        "cable, transceiver and the switch's port; ip -s link, ibdiagnet; NCCL waits NCCL_IB_TIMEOUT for it",
        "ibv_get_async_event(3), IBV_EVENT_PORT_ERR; NCCL src/transport/net_ib (ncclIbAsyncThreadMain)",
        kind="remark",
    ),
    KnownWarning(
        r"[Aa]sync event ?: ?(?:LID change|P_Key change|SM change|client reregistration|path migration)"
        r"|[Nn]on-fatal async event: (?:LID change|P_Key change|SM change|client reregistration|path migration)",
        "the InfiniBand subnet manager changed something while the job ran",
        "log of the subnet manager (opensm); jobs survive it unless addresses or partitions are gone",
        "ibv_get_async_event(3); NCCL src/transport/net_ib (ncclIbAsyncThreadMain)",
        kind="remark",
    ),
    KnownWarning(
        r"async fatal event|[Aa]sync event ?: ?local (?:work queue catastrophic|catastrophic|access violation)",
        "a card reported a fatal event: it was reset, or its port went down",
        "dmesg | grep -iE 'mlx5|link'; ethtool DEV",
        "ibv_get_async_event(3)",
    ),
    KnownWarning(
        r"XML parser is limited to \d+ (?:sub)?nodes|too many XML nodes",
        "the topology has more devices than this NCCL can hold",
        "a newer NCCL; or NCCL_TOPO_FILE with the devices that this job uses",
        "NCCL src/graph/xml.h (MAX_NODES); NCCL user guide, NCCL_TOPO_FILE",
    ),
    KnownWarning(
        r"XML (?:Topology|Graph) has wrong version|XML (?:Parse|Mismatch)|Could not open XML",
        "the file of NCCL_TOPO_FILE or NCCL_GRAPH_FILE does not fit this NCCL",
        "unset it, or take the file that this machine type and this NCCL want",
        "NCCL src/graph/xml.cc; NCCL user guide, NCCL_TOPO_FILE",
    ),
    KnownWarning(
        r"Could not find (?:any local path from gpu|NET with id|node of type|CPU numa)",
        "the topology that NCCL was given does not fit this machine",
        "unset NCCL_TOPO_FILE; NCCL_TOPO_DUMP_FILE shows what NCCL finds by itself",
        "NCCL src/graph/topo.cc; NCCL user guide, NCCL_TOPO_DUMP_FILE",
    ),
    KnownWarning(
        r"Error: network .*not found",
        "the network that NCCL_NET names is not there, as where its plug-in was not loaded",
        "one run without NCCL_NET; or the plug-in's folder in LD_LIBRARY_PATH: ldconfig -p | grep libnccl-net",
        "NCCL user guide, NCCL_NET and NCCL_NET_PLUGIN",
    ),
    KnownWarning(
        r"incompatible devices|device is incompatible with the local",
        "cards of unlike kind, InfiniBand and RoCE, were to talk to each other",
        "NCCL_IB_HCA names cards of one kind",
        "NCCL src/transport/net_ib; NCCL user guide, NCCL_IB_HCA",
    ),
    KnownWarning(
        r"No IP interface found|Bootstrap : no socket interface found",
        "no network interface was left to start with",
        "NCCL_SOCKET_IFNAME names one that exists: ip -br link",
        "NCCL user guide, NCCL_SOCKET_IFNAME",
    ),
    KnownWarning(
        r"[Cc]onnect to \S+ (?:failed ?: ?|returned )(?:\d+\()?(?:No route|Connection refused|Connection timed out|"
        r"Network is unreachable)|[sS]ocketPollConnect.*(?:No route|timed out|unreachable)|exceeded timeouts \(",
        "a rank's address cannot be reached: a firewall, or the wrong interface",
        "NCCL_SOCKET_IFNAME; open the ports between the nodes; gradwire doctor tries every pair",
        "NCCL user guide, Troubleshooting, Networking issues",
    ),
    KnownWarning(
        r"posix_fallocate|shm_open|(?:creating|attaching to|allocate) shared memory|failed to extend|"
        r"failed to create shared memory|Could not map /dev/shm|/dev/shm.*No space|No space left on device",
        "/dev/shm is too small",
        "docker --shm-size=1g (or --ipc=host); an emptyDir of medium Memory at /dev/shm",
        "NCCL user guide, Troubleshooting, Shared memory",
    ),
    KnownWarning(
        r"shm (?:close|unlink) failed|(?:munmap of|unlink) shared memory .*failed|munmap of shared memory failed",
        "a rank that ended could not free its shared memory once more",
        "nothing: the job's work was done",
        "NCCL src/proxy.cc (ncclProxyService); src/misc/shmutils.cc (ncclShmClose)",
        kind="harmless",
    ),
    KnownWarning(
        r"No eligible providers were found|no eligible provider",
        "the plug-in for EFA or Slingshot found no provider of libfabric and left NCCL to sockets",
        "fi_info -p efa -c FI_HMEM; the interface with EFA, its security group, libfabric of the plug-in's release",
        "aws-ofi-nccl README; libfabric fi_efa(7)",
        kind="gdr",
    ),
    KnownWarning(
        r"HMEM, disabling GDR|GDR disabled on GDR-supported instance type|[Dd]isabling GDR",
        "the plug-in switched GPUDirect RDMA off: libfabric cannot use GPU memory here",
        "fi_info -p efa -c FI_HMEM; libfabric and plug-in of one release, built with CUDA",
        "aws-ofi-nccl src/nccl_ofi_ofiutils.cpp; libfabric fi_efa(7)",
        kind="gdr",
    ),
    KnownWarning(
        r"Failed to initialize any NET plugin",
        "NCCL found no network to use: the plug-in was not loaded, or NCCL_NET names one that is not there",
        "ldconfig -p | grep libnccl-net; LD_LIBRARY_PATH of the job; one run without NCCL_NET and NCCL_NET_PLUGIN",
        "NCCL v2.27 src/plugin/net.cc (ncclNetInit); NCCL user guide, NCCL_NET and NCCL_NET_PLUGIN",
    ),
    KnownWarning(
        r"NET/Plugin ?: .*(?:Plugin load .*returned|No plugin found|Could not find|cannot open shared object)",
        "no network plug-in was loaded, which a cloud's own network (EFA, GPUDirect-TCPX) needs",
        "ldconfig -p | grep libnccl-net; LD_LIBRARY_PATH of the job; NCCL_NET_PLUGIN",
        "NCCL user guide, NCCL_NET_PLUGIN",
        kind="sockets",
    ),
    KnownWarning(
        r"NET/OFI .*(?:failed|could not|Couldn't|Failed)",
        "the plug-in for EFA or Slingshot failed",
        "fi_info -p efa -c FI_HMEM; the plug-in's lines with NCCL_DEBUG_SUBSYS=INIT,NET",
        "aws-ofi-nccl README; libfabric fi_efa(7)",
        kind="gdr",
    ),
    KnownWarning(
        r"Duplicate GPU detected",
        "two ranks of one host use the same GPU",
        "each rank its own: torch.cuda.set_device(LOCAL_RANK) before init_process_group; CUDA_VISIBLE_DEVICES of each",
        "NCCL user guide, Creating a communicator; NCCL src/init.cc",
    ),
    KnownWarning(
        r"Mismatched NCCL version detected|NCCL version mismatch with remote peer",
        "ranks run unlike releases of NCCL",
        "one environment or image on all hosts; python -c 'import torch; print(torch.cuda.nccl.version())' on each",
        "NCCL src/init.cc (Mismatched NCCL version detected)",
    ),
    KnownWarning(
        r"NCCL library (?:version )?is (?:too old|not backwards compatible)|compiled with too old version of NCCL",
        "the application was built with another release of NCCL than the one that it loaded",
        "the libnccl of the build first in LD_LIBRARY_PATH; lsof -p PID | grep libnccl shows which one is loaded",
        "NCCL src/dev_runtime.cc",
    ),
    KnownWarning(
        r"[Cc]uda failure (?:2\b.*)?'?out of memory",
        "a GPU had no memory left for NCCL's buffers",
        "leave it some: a smaller batch, or fewer channels (NCCL_MAX_CTAS, NCCL_BUFFSIZE), which cost speed",
        "NCCL user guide, NCCL_BUFFSIZE and NCCL_MAX_CTAS; CUDA runtime API, cudaErrorMemoryAllocation",
    ),
    KnownWarning(
        r"nvls\.cc:\d+ .*(?:[Cc]uda failure|Failed)|NVLS.*(?:failed|not supported)|Failed to bind NVLink SHARP",
        "the NVSwitches' multicast did not start: the fabric manager, or a virtual machine without it",
        "systemctl status nvidia-fabricmanager; one run with NCCL_NVLS_ENABLE=0 shows whether it is this",
        "github.com/NVIDIA/nccl/issues/1197; NCCL user guide, NCCL_NVLS_ENABLE",
    ),
    KnownWarning(
        r"MNNVL .*is available but not working|\bIMEX\b|nvidia-imex",
        "NVLink between hosts does not work: hosts of one NVLink domain cannot share memory without IMEX",
        "nvidia-imex-ctl -N; ls /dev/nvidia-caps-imex-channels (a container needs the channel, too); "
        "NCCL_MNNVL_ENABLE=0 goes over the network until then",
        "NCCL src/mnnvl.cc; NVIDIA IMEX service guide",
    ),
    KnownWarning(
        r"[Cc]uda failure.*operation not (?:permitted|supported)",
        "the driver refuses a call of CUDA here: memory that processes share, inside a container or between hosts",
        "NCCL_DEBUG=INFO, and the lines around the call; NCCL_CUMEM_ENABLE=0 for one run",
        "CUDA runtime API, cudaErrorNotPermitted and cudaErrorNotSupported; NCCL user guide, NCCL_CUMEM_ENABLE",
        kind="follows",
    ),
    KnownWarning(
        r"[Cc]uda failure",
        "a call of CUDA failed inside NCCL: another kernel's error, a GPU that fell off the bus, or an old driver",
        "the error's own words behind the number; dmesg | grep -i xid; CUDA_LAUNCH_BLOCKING=1 for one run",
        "CUDA runtime API, cudaError_t; NCCL user guide, Errors, ncclUnhandledCudaError",
    ),
    KnownWarning(
        r"Connection closed by remote peer|Connection reset by peer|[sS]ocketPollConnect.*(?:refused|retr)",
        "another rank had ended before, and this one lost it",
        "the first error of that host, in its own output: grep -nE 'Error|WARN|Killed|out of memory' of all ranks",
        "NCCL user guide, Errors, ncclRemoteError",
        kind="follows",
    ),
    KnownWarning(
        r"Watchdog caught collective operation timeout",
        "a collective timed out: a rank did not come to it, or a link hangs",
        "GRADWIRE_WATCH=1 says which rank, and where it is; the rank with the lowest SeqNum is the one that is behind",
        "documentation of torch.distributed, init_process_group, timeout",
        kind="follows",
    ),
    KnownWarning(
        r"DistBackendError: NCCL error",
        "torch reports that NCCL failed",
        "the first NCCL WARN line of all ranks: NCCL_DEBUG=WARN prints it",
        "documentation of torch.distributed, Debugging; NCCL user guide, Errors",
        kind="follows",
    ),
)
"""The first that fits counts.

Source: NCCL 2.30 src/misc/ibvwrap.cc, src/transport/net_ib/p2p.cc and common.h (hints by status), src/graph/xml.cc,
src/os/linux.cc; aws-ofi-nccl src/nccl_ofi_ofiutils.cpp, nccl_ofi_rdma.cpp, platform-aws.cpp; verbs.h (ibv_wc_status).
"""

TORCH_SPEAKS = ("Watchdog caught", "DistBackendError: NCCL error")
"""Beginnings of torch's lines that belong to a log of NCCL."""

SPEAKS = (
    rf"NCCL WARN|{'|'.join(TORCH_SPEAKS)}|eligible provider|isabling GDR|GDR disabled|NET plugin|NET/Plugin ?:|use GIN"
    r"|GID table change"
)
"""Pattern of what is in every line that may be one of the table, but for those of the plug-in for libfabric."""
_MESSAGE = re.compile(rf"NCCL (WARN|INFO) (.*)|()((?:{'|'.join(TORCH_SPEAKS)}).*)")
_SPEAKS = re.compile(rf"{SPEAKS}|NET/OFI .*(?:ailed|ould)")


def read_warning(line: str) -> tuple[str, KnownWarning | None] | None:
    """Recognizes a line of a log that warns of something.

    Args:
        line: A line without terminal escapes.

    Returns:
        (text of the message, its entry in `KNOWN_WARNINGS`, or None if it has none); None instead of the pair for a
        line that warns of nothing.
    """
    if not _SPEAKS.search(line) or not (match := _MESSAGE.search(line)):
        return None
    level, text = match[1], (match[2] or match[4]).strip()
    found = next((known for known in KNOWN_WARNINGS if re.search(known.pattern, line)), None)
    if level == "INFO" and (found is None or found.ends_job):  # a retry, or a hint: what ends a job is a WARN
        return None
    return text, found
