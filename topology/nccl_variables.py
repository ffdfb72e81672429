"""Variables of NCCL, torch and their plug-ins: names by release, names that were renamed, and values that hurt.

One table for each question; `gradwire gdr-check` and `gradwire doctor` read them.
"""

from collections.abc import Callable
from dataclasses import dataclass

_READ_FROM = """
2.3 BUFFSIZE CHECK_POINTERS COMM_ID DEBUG DEBUG_FILE DEBUG_SUBSYS GDR_FLUSH_DISABLE GROUP_CUDA_STREAM IB_CUDA_SUPPORT
2.3 IB_DISABLE IB_GDR_LEVEL IB_GID_INDEX IB_HCA IB_RETRY_CNT IB_SL IB_TC IB_TIMEOUT LAUNCH_MODE LL_THRESHOLD MAX_NRINGS
2.3 MIN_NRINGS NET_GDR_READ NTHREADS P2P_DISABLE P2P_LEVEL RINGS SHM_DISABLE SOCKET_FAMILY SOCKET_IFNAME
2.3 THREAD_THRESHOLD
2.4 IGNORE_CPU_AFFINITY NET_GDR_LEVEL NSOCKS_PERTHREAD SOCKET_NTHREADS TREE_THRESHOLD
2.5 ALGO CROSS_NIC GRAPH HOSTID LL128_NTHREADS MAX_NCHANNELS MIN_NCHANNELS PROTO THREAD_THRESHOLDS
2.6 COLLNET_ENABLE GRAPH_DUMP_FILE GRAPH_DUMP_FILE_RANK GRAPH_FILE IB_AR_THRESHOLD TOPO_DUMP_FILE TOPO_DUMP_FILE_RANK
2.6 TOPO_FILE
2.7 LL128_BUFFSIZE LL_BUFFSIZE MAX_P2P_NCHANNELS MIN_P2P_NCHANNELS P2P_READ_ENABLE
2.8 IB_PKEY IB_USE_INLINE NET_SHARED_BUFFERS SHARED_BUFF_COUNT
2.9 COLLNET_NODE_THRESHOLD GDRCOPY_ENABLE GDRCOPY_FIFO_ENABLE GDRCOPY_FLUSH_ENABLE GDRCOPY_TAIL_ENABLE NVB_DISABLE
2.9 NVB_PRECONNECT SET_STACK_SIZE
2.10 AGG_ALLOC_MODE AGG_CHANNEL_SIZE IB_QPS_PER_CONNECTION NET
2.11 GRAPH_HELPER_DISABLE GRAPH_REGISTER NET_PLUGIN
2.12 CHUNK_SIZE GDRCOPY_SYNC_ENABLE IB_PCI_RELAXED_ORDERING IGNORE_DISABLED_P2P L1_SHARED_MEMORY_CARVEOUT
2.12 NCHANNELS_PER_NET_PEER NET_DISABLE_INTRA NET_SHARED_COMMS P2P_DIRECT_DISABLE P2P_PXN_LEVEL PROXY_PROFILE
2.12 PXN_DISABLE SET_THREAD_NAME
2.13 CREATE_THREAD_CONTEXT CUDA_PATH DMABUF_ENABLE GRAPH_MIXING_SUPPORT P2P_USE_CUDA_MEMCPY SHM_LOCALITY
2.13 SHM_MEMCPY_MODE SHM_USE_CUDA_MEMCPY WORK_FIFO_DEPTH
2.14 ALLOC_P2P_NET_LL_BUFFERS COMM_BLOCKING P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE PROXY_DUMP_SIGNAL
2.15 CGA_CLUSTER_SIZE NET_FORCE_FLUSH
2.16 IB_ADAPTIVE_ROUTING MEM_SYNC_DOMAIN P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE PROGRESS_APPENDOP_FREQ
2.16 PROXY_APPEND_BATCH_SIZE
2.17 MAX_CTAS MIN_CTAS NVLS_ENABLE NVLS_NCHANNELS
2.18 COMM_SPLIT_SHARE_RESOURCES CUMEM_ENABLE IB_MERGE_VFS IB_SPLIT_DATA_ON_QPS NET_OVERHEAD
2.19 CONNECT_ROUND_MAX_PEERS LOCAL_REGISTER REPORT_CONNECT_PROGRESS TUNER_PLUGIN WARN_ENABLE_DEBUG_INFO
2.20 IB_MERGE_NICS MNNVL NVLSTREE_MAX_CHUNKSIZE
2.21 IB_ADDR_FAMILY IB_ADDR_RANGE IB_ROCE_VERSION_NUM MNNVL_ENABLE NVLS_CHUNKSIZE
2.22 IB_FIFO_TC IB_ROUTABLE_FLID_GID_INDEX RUNTIME_CONNECT UNPACK_DOUBLE_NCHANNELS WORK_ARGS_BYTES WORK_FIFO_BYTES
2.23 CONF_FILE CUMEM_HOST_ENABLE IB_ECE_ENABLE IB_RETURN_ASYNC_EVENTS MNNVL_CLIQUE_ID OOB_NET_ENABLE OOB_NET_IFNAME
2.23 PAT_ENABLE PROFILER_PLUGIN UID_STAGGER_RATE UID_STAGGER_THRESHOLD
2.24 IB_MQP_RETRY_ALL IB_MQP_RETRY_CNT IB_MQP_RETRY_SLEEP_MSEC IB_WARN_RAIL_LOCAL LEGACY_CUDA_REGISTER NET_FORCE_MERGE
2.24 NET_MERGE_LEVEL NET_OPTIONAL_RECV_COMPLETION RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR SOCKET_RETRY_CNT
2.24 SOCKET_RETRY_SLEEP_MSEC
2.25 MNNVL_UUID
2.26 DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL NET_GDR_C2C
2.26 NET_PLUGIN_REF_COUNT
2.27 COMM_SHRINK_SHARE_RESOURCES CTA_POLICY IB_DATA_DIRECT LL128_C2C MNNVL_SCATTER_NETS_ENABLE
2.27 NVLINK_UTIL_CENTRIC_SCHED_ENABLE PXN_C2C SOCKET_INLINE SOCKET_MIN_TASKSIZE SOCKET_RCVBUF SOCKET_SNDBUF SYM_CTAS
2.27 SYM_KERNEL WIN_ENABLE WIN_STRIDE
2.28 ENV_PLUGIN GIN_COUNTER_POOL_SIZE GIN_ENABLE GIN_ERROR_QUERY_SEC GIN_GDAKI_NIC_HANDLER GIN_GDAKI_QP_DEPTH
2.28 GIN_NCONTEXTS GIN_PROXY_QUEUE_SIZE GIN_SIGNAL_POOL_SIZE GIN_TYPE MNNVL_RAIL_PER_HOST NETDEVS_POLICY NVTX_DISABLE
2.28 P2P_SCHEDULE_GROUP_SIZE PROXY_CPUSET SET_CPU_STACK_SIZE SINGLE_PROC_MEM_REG_ENABLE
2.29 ALLGATHERV_ENABLE CHECK_MODE DISABLE_MEM_MANAGER ENABLE_VERSION_CHECK GDAKI_USE_RELIABLE_DB
2.29 GIN_EXCLUSIVE_CONTEXTS GIN_NCONNECTIONS GIN_PLUGIN GIN_PLUGIN_REF_COUNT IB_DEVICE_PCI_ORDER
2.29 IB_PREPOST_RECEIVE_WORK_REQUESTS IB_RECEIVER_SIDE_MATCHING_SCHEME IB_RESILIENCY_PORT_FAILOVER
2.29 IB_RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS IB_RESILIENCY_PORT_FAILOVER_PROBE_DELAY IPC_USE_ABSTRACT_SOCKET
2.29 LSA_TEAM_SIZE MULTI_SEGMENT_REGISTER NO_CACHE NUM_RMA_CTX P2P_EPOCH_ENABLE P2P_PER_CHANNEL_NET_BW
2.29 RMA_PROXY_DUMP_SIGNAL RMA_PROXY_QUEUE_SIZE SOCKET_POLL_TIMEOUT_MSEC SYM_CE_THRESHOLD SYM_GIN_KERNELS_ENABLE
2.29 SYM_NOWIN_ENABLE
2.30 DEV_API_JIT ELASTIC_BUFFER_REGISTER GIN_CONNECTION_RAIL GIN_GDAKI_MAX_DEST_RD_ATOMIC GIN_GDAKI_MAX_QP_RD_ATOMIC
2.30 GIN_IB_TC GRAPH_STREAM_ORDERING IBVERBS_LIB IB_OOO_RQ IB_QUERY_PORT_SPEED IB_RESILIENCY_PORT_RECOVERY
2.30 IB_RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL
2.30 IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_SIZE IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_SEQUENCE_SIZE
2.30 IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX
2.30 IB_RESILIENCY_PORT_RECOVERY_START_DELAY IB_SUBNET_AWARE_ROUTING IB_SUBNET_PREFIX_LEN IGNORE_COLLNET_MISMATCH
2.30 IGNORE_NET_MISMATCH MLOPART_RDMA_ENABLE MNNVL_CROSS_CLIQUE MULTI_RANK_GPU_ENABLE NET_GDR_MLOPART NET_MERGE_POLICY
2.30 P2P_MAX_PEERS PARAM_DUMP_ALL RMA_DISABLE RMA_PLUGIN RMA_PLUGIN_REF_COUNT SHADOW_MEMPOOL_MAX_SIZE SOCKET_MAGIC
2.30 SYM_REUSE_SYSMEM_HANDLES SYM_RS_GIN_CHUNK_SIZE SYM_TMA_ENABLE TOPO_SPLIT_MLOPART
"""
_READ_UNTIL = """
2.3 IB_CUDA_SUPPORT IB_GDR_LEVEL
2.4 LL_THRESHOLD RINGS THREAD_THRESHOLD TREE_THRESHOLD
2.5 GRAPH
2.8 SHARED_BUFF_COUNT
2.11 GDRCOPY_TAIL_ENABLE
2.12 AGG_ALLOC_MODE
2.19 AGG_CHANNEL_SIZE
2.20 CUDA_PATH MNNVL
2.21 WORK_FIFO_DEPTH
2.22 PROXY_PROFILE
2.29 GIN_COUNTER_POOL_SIZE GIN_EXCLUSIVE_CONTEXTS GIN_NCONTEXTS GIN_SIGNAL_POOL_SIZE
"""


def _by_release(table: str) -> dict[str, tuple[int, int]]:
    """Returns name -> release of a table with a release and names without `NCCL_` in each line."""
    rows = [line.split() for line in table.strip().splitlines()]
    releases = [(int(row[0].partition(".")[0]), int(row[0].partition(".")[2])) for row in rows]
    return {f"NCCL_{word}": release for release, row in zip(releases, rows, strict=True) for word in row[1:]}


FIRST_RELEASE, LAST_RELEASE = _by_release(_READ_FROM), _by_release(_READ_UNTIL)
"""Name -> first and last release of NCCL that reads it. A name without a last release is read by 2.30.7, the newest
that was looked at; one of 2.3 may be older.

Source: NCCL_PARAM, DEFINE_NCCL_PARAM and getenv in src/ at all 62 tags from v2.3.5-5 to v2.30.7-1.
"""

_OTHERS = """CHECKS_DISABLE DUMP_TOPO VERSION TUNER_CONFIG_PATH UNPACK_MEM FASTRAK_CTRL_DEV FASTRAK_IFNAME BLOCKING_WAIT
ASYNC_ERROR_HANDLING DESYNC_DEBUG ENABLE_TIMING USE_TENSOR_REGISTER_ALLOCATOR_HOOK"""
KNOWN = frozenset(FIRST_RELEASE) | {f"NCCL_{word}" for word in _OTHERS.split()}
"""Names that NCCL, its plug-ins, its images or torch read.

Source: the tables above; NCCL user guide; Google's FasTrak plug-in; ProcessGroupNCCL.hpp of torch 2.13.
"""


def unread(name: str, version: tuple[int, ...] | None) -> str:
    """Returns a clause that says why a release of NCCL does not read a variable; empty if it does, or if unknown.

    Args:
        name: Name of the variable.
        version: Release of NCCL; None if unknown.
    """
    first, last = FIRST_RELEASE.get(name), LAST_RELEASE.get(name)
    if version is None or first is None:
        return ""
    if version[:2] < first:
        return f"is read from NCCL {first[0]}.{first[1]} on, and this is {'.'.join(map(str, version))}"
    if last is not None and version[:2] > last:
        return f"is not read from NCCL {last[0]}.{last[1] + 1} on"
    return ""


@dataclass(frozen=True, slots=True)
class RenamedVariable:
    """Describes a variable's name that no release reads any longer.

    Attributes:
        new: Name to set instead; empty if nothing has the same effect.
        since: First release that ignores the old name; empty if none ever read it.
        source: Public page that says so.
    """

    new: str
    since: str
    source: str

    @property
    def words(self) -> str:
        """Returns a clause to follow the old name: `is not read from NCCL 2.5 on; set NCCL_ALGO instead`."""
        unread = f"is not read from {self.since} on" if self.since else "is read by no release"
        return f"{unread}; {f'set {self.new} instead' if self.new else 'unset it'}"


NCCL_GUIDE = "NCCL user guide, Environment Variables"
_TORCH = "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
_RENAMED = (
    ("NCCL_IB_GDR_LEVEL", "NCCL_NET_GDR_LEVEL", "NCCL 2.4", NCCL_GUIDE),
    ("NCCL_IB_CUDA_SUPPORT", "NCCL_NET_GDR_LEVEL", "NCCL 2.4", NCCL_GUIDE),
    ("NCCL_SINGLE_RING_THRESHOLD", "", "NCCL 2.3", NCCL_GUIDE),
    ("NCCL_LL_THRESHOLD", "NCCL_PROTO", "NCCL 2.5", NCCL_GUIDE),
    ("NCCL_TREE_THRESHOLD", "NCCL_ALGO", "NCCL 2.5", NCCL_GUIDE),
    ("NCCL_THREAD_THRESHOLD", "NCCL_THREAD_THRESHOLDS", "NCCL 2.5", "NCCL src/graph/tuning.cc"),
    ("NCCL_RINGS", "", "NCCL 2.5", "NCCL v2.4.8 src/misc/rings.cc"),
    ("NCCL_MNNVL", "NCCL_MNNVL_ENABLE", "NCCL 2.21", "NCCL src/init.cc"),
    ("NCCL_WORK_FIFO_DEPTH", "NCCL_WORK_FIFO_BYTES", "NCCL 2.22", "NCCL src/init.cc"),
    ("NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "torch 2.13", _TORCH),
    ("NCCL_ENABLE_MONITORING", "TORCH_NCCL_ENABLE_MONITORING", "torch 2.13", _TORCH),
    ("NCCL_TIMEOUT", "`timeout` of init_process_group", "", _TORCH),
)
RENAMED = {old: RenamedVariable(*rest) for old, *rest in _RENAMED}
"""Old name -> what became of it. Not here, because newer releases read them still: NCCL_MIN_NRINGS and NCCL_MAX_NRINGS
(NCCL), NCCL_BLOCKING_WAIT and its kind (torch)."""


@dataclass(frozen=True, slots=True)
class HarmfulVariable:
    """Describes a variable that slows a job down, left over from a hunt for a bug or copied from another cluster.

    The costs are estimates, because a run without the variable is not measured.

    Attributes:
        name: Name of the variable.
        hurts: Function of the variable's value that returns whether this value is harmful.
        why: Effect on a job, as a clause.
        source: Public page that describes the effect.
        exchange_share: Cost as a fraction of a healthy exchange between nodes.
        step_share: Cost as a fraction of the training step.
        gpus: True if it affects only jobs on GPUs.
        confidence: Probability from 0 to 1 that a harmful value really costs time.
        fix: Command that repairs it; empty means to unset the variable.
        cures: Situation in which the variable prevents something worse, with the source; empty if there is none. Such a
            variable is to be removed in a short trial run first: without it a job may hang.
    """

    name: str
    hurts: Callable[[str], bool]
    why: str
    source: str
    exchange_share: float = 0.0
    step_share: float = 0.0
    gpus: bool = True
    confidence: float = 0.9
    fix: str = ""
    cures: str = ""

    @property
    def advice(self) -> tuple[str, ...]:
        """Returns the lines of the fix: a command, or a trial run without a variable that may be needed."""
        if self.fix:
            return (self.fix,)
        if self.cures:
            return (
                f"keep it until one short run without it has ended and was faster: timeout 300 env -u {self.name} ...",
            )
        return (f"unset {self.name}",)

    @property
    def caution(self) -> tuple[str, ...]:
        """Returns a line of evidence that says when the variable is needed; no line if it never is."""
        return (f"{WANTED_HERE}{self.cures}",) if self.cures else ()


WANTED_HERE = "it may be wanted here: "
"""Beginning of a line of evidence that is a condition by itself."""

_SOURCES = {
    "nccl": NCCL_GUIDE,
    "pg.hpp": "github.com/pytorch/pytorch, torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp",
    "pg.cpp": "github.com/pytorch/pytorch, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, DesyncDebugger",
    "gloo": "github.com/pytorch/pytorch, torch/csrc/distributed/c10d/GlooDeviceFactory.cpp",
    "timing": "github.com/pytorch/pytorch/issues/143890",
    "titan": "github.com/pytorch/torchtitan/issues/1147, Megatron-FSDP user guide",
    "cuda": "CUDA C++ programming guide",
    "torch cuda": "PyTorch, CUDA semantics",
    "torch": "documentation of torch.distributed, section Debugging",
    "fabric": "libfabric, fabric(7)",
    "ucx": "OpenUCX documentation",
}

CURES = {
    "acs": "where PCIe access control (ACS) or an IOMMU sends transfers between GPUs through the root, or GPUs have no "
    "peer-to-peer at all, NCCL hangs or is wrong without it (NCCL user guide, Troubleshooting, ACS; "
    "github.com/local-inference-lab/rtx6kpro/issues/15)",
    "ctas": "few blocks leave the multiprocessors to a computation that they overlap with, and have doubled the speed "
    "of a job (github.com/NVIDIA/nccl/issues/1298)",
    "ib": "where InfiniBand or RoCE is there but does not lead to the other nodes, or RoCE loses packets, NCCL fails "
    "or stalls without it (NCCL user guide, NCCL_IB_DISABLE)",
    "shm": "in a container whose /dev/shm is too small NCCL fails without it; docker --shm-size is the better cure "
    "(NCCL user guide, Troubleshooting, Shared memory)",
    "plugin": "a plug-in that finds no device of its own, or was built for another NCCL, ends or hangs the job "
    "(github.com/ai-dynamo/dynamo/pull/6944, github.com/NVIDIA/nccl/issues/513)",
    "gdr": "where PCIe access control (ACS) sends what cards read through the root, GPUDirect RDMA is slow or hangs "
    "(NCCL user guide, Troubleshooting, PCI Access Control Services); gradwire gdr-check says whether it does",
    "read": "on machines without NVLink cards may read host memory faster than a GPU's, and NCCL's default there is 0 "
    "(NCCL user guide, NCCL_NET_GDR_READ; github.com/NVIDIA/nccl/issues/1295)",
    "dmabuf": "where peer memory works and registering through dma-buf fails, NCCL fails without it "
    "(github.com/NVIDIA/nccl/issues/778)",
    "ll128": "LL128 has corrupted data on machines whose cards share a switch with one GPU alone (release notes of "
    "NCCL 2.18.1)",
    "sum": "sums of ring and tree differ in their last bits; who compares runs bit by bit, or needs a tree's accuracy, "
    "fixes it (github.com/NVIDIA/nccl/issues/1055)",
    "nvls": "where the fabric manager or the switches' multicast fail, NCCL ends or hangs without it "
    "(github.com/NVIDIA/nccl/issues/1197 and 2077, github.com/pytorch/pytorch/pull/177472)",
    "memory": "each channel has such a buffer on the GPU: smaller ones leave memory to the model (NCCL user guide)",
    "loud": "a collective that times out then raises an error in the training thread (documentation of "
    "torch.distributed)",
    "": "",
}
"""Word of the table -> when the variable is the cure, with the source."""

_FIXES = {
    "NCCL_DEBUG": "export NCCL_DEBUG=WARN",
    "CUDA_DEVICE_MAX_CONNECTIONS": "unset CUDA_DEVICE_MAX_CONNECTIONS   # or 32, without Megatron's tensor parallelism",
}

_HARMFUL = """
name                          |hurts   |exchange|step|sure|acts on|source    |cure  |why
NCCL_IB_DISABLE               |on      |1   |  |.5|GPUs|nccl      |ib    |NCCL uses TCP although there may be InfiniBand or RoCE
NCCL_NET                      |=socket |1   |  |.5|GPUs|nccl      |ib    |NCCL uses TCP whatever network is there
NCCL_NET_PLUGIN               |=none   |1   |  |.6|GPUs|nccl      |plugin|a cloud's network plug-in (EFA, GPUDirect-TCPX) is not loaded
NCCL_P2P_DISABLE              |on      |.5  |  |.4|GPUs|nccl      |acs   |GPUs of a node do not copy to each other directly, over NVLink or PCIe
NCCL_P2P_LEVEL                |=loc =0 |.5  |  |.4|GPUs|nccl      |acs   |GPUs of a node do not copy to each other directly
NCCL_SHM_DISABLE              |on      |.5  |  |.5|GPUs|nccl      |shm   |GPUs of a node that cannot reach each other go over the network
NCCL_NET_GDR_LEVEL            |=loc =0 |.5  |  |.5|GPUs|nccl      |gdr   |network cards do not read GPU memory themselves
NCCL_NET_GDR_READ             |=0      |.25 |  |.4|GPUs|nccl      |read  |what GPUs send goes through the host's memory
NCCL_DMABUF_ENABLE            |=0      |.25 |  |.5|GPUs|nccl      |dmabuf|one of two ways to GPUDirect RDMA is off
NCCL_ALGO                     |any     |.25 |  |.6|GPUs|nccl      |sum   |NCCL may not choose between ring, tree and NVLS by size
NCCL_PROTO                    |any     |.25 |  |.6|GPUs|nccl      |ll128 |NCCL may not choose its protocol by size
NCCL_MAX_NCHANNELS            |<4      |.5  |  |.4|GPUs|nccl      |ctas  |NCCL keeps few blocks of the GPU busy
NCCL_MAX_CTAS                 |<4      |.5  |  |.4|GPUs|nccl      |ctas  |NCCL keeps few blocks of the GPU busy
NCCL_BUFFSIZE                 |<1048576|.25 |  |.5|GPUs|nccl      |memory|NCCL's buffers are below 1 MiB; its default is 4 MiB
NCCL_NTHREADS                 |<128    |.25 |  |.6|GPUs|nccl      |      |NCCL's blocks have few threads
NCCL_PXN_DISABLE              |on      |.1  |  |.5|GPUs|nccl      |      |GPUs do not share the card that is on the right rail
NCCL_NVLS_ENABLE              |=0      |.1  |  |.4|GPUs|nccl      |nvls  |NVSwitches do not sum
NCCL_CHECK_POINTERS           |on      |.02 |  |.7|GPUs|nccl      |      |NCCL checks every pointer of every call
NCCL_LAUNCH_MODE              |=group  |.05 |  |.5|GPUs|nccl      |      |one process launches for all its GPUs, with a barrier
NCCL_DEBUG                    |=trace  |.1  |  |.7|GPUs|nccl      |      |NCCL writes a line for every call
NCCL_IGNORE_CPU_AFFINITY      |on      |.05 |  |.4|GPUs|nccl      |      |NCCL's threads leave the cores that the job gave the rank
CUDA_DEVICE_MAX_CONNECTIONS   |=1      |.5  |  |.6|GPUs|titan     |      |kernels start in the order they were launched, so gradients of FSDP or DDP may wait for computation; Megatron's tensor parallelism wants it, nothing else does
CUDA_LAUNCH_BLOCKING          |on      |1   |.3|.9|GPUs|cuda      |      |every kernel is waited for: nothing overlaps
TORCH_NCCL_BLOCKING_WAIT      |on      |.5  |  |.6|GPUs|pg.hpp    |loud  |every collective is waited for on the CPU
NCCL_BLOCKING_WAIT            |on      |.5  |  |.6|GPUs|pg.hpp    |loud  |every collective is waited for on the CPU
TORCH_NCCL_ENABLE_TIMING      |on      |.1  |  |.5|GPUs|timing    |      |two events for every collective, and with CUDA_DEVICE_MAX_CONNECTIONS=1 no overlap
TORCH_NCCL_DESYNC_DEBUG       |on      |.1  |  |.6|GPUs|pg.cpp    |      |every collective writes to the store
PYTORCH_NO_CUDA_MEMORY_CACHING|on      |    |.5|.9|GPUs|torch cuda|      |every tensor is a cudaMalloc, which waits for the GPU
TORCH_DISTRIBUTED_DEBUG       |=detail |.5  |.1|.9|all |torch     |      |every collective is first compared among all ranks, which doubles the waits and ends asynchrony
GLOO_DEVICE_TRANSPORT         |=tcp_tls|.5  |  |.7|all |gloo      |      |gloo encrypts what it sends, on one core
FI_PROVIDER                   |=tcp =sockets|.5||.6|GPUs|fabric   |      |libfabric uses TCP whatever network is there
UCX_TLS                       |=tcp =tcp,self|.5||.6|all|ucx      |      |UCX uses TCP, also inside a node
"""  # noqa: E501 - a row is a line, so that columns can be compared


def _is_harmful(words: str) -> Callable[[str], bool]:
    """Builds the test for a variable's value from a cell of the column `hurts`.

    Args:
        words: `on` (any value but an empty or negative one), `any` (any but an empty one), `<4` (a smaller number), or
            values in lower case, each after `=`.
    """
    if words == "on":
        return lambda value: value.strip().lower() not in ("", "0", "n", "no", "false", "off")
    if words == "any":
        return lambda value: bool(value.strip())
    if words.startswith("<"):
        return lambda value: value.strip().isdigit() and int(value) < int(words[1:])
    values = tuple(word.removeprefix("=") for word in words.split())
    return lambda value: value.strip().lower() in values


def _harmful() -> tuple[HarmfulVariable, ...]:
    """Returns the rows of `_HARMFUL` as objects."""
    rows = [[cell.strip() for cell in line.split("|")] for line in _HARMFUL.strip().splitlines()[1:]]
    return tuple(
        HarmfulVariable(
            name,
            _is_harmful(hurts),
            why,
            _SOURCES[source],
            float(exchange or 0),
            float(step or 0),
            acts_on == "GPUs",
            float(sure),
            _FIXES.get(name, ""),
            CURES[cure],
        )
        for name, hurts, exchange, step, sure, acts_on, source, cure, why in rows
    )


HARMFUL = _harmful()
