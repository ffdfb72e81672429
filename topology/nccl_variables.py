"""The variables of NCCL, torch and their plug-ins: which names are read, which were renamed, and which values hurt.

One table for each question; `gradwire gdr-check` and `gradwire doctor` read them.
"""

from collections.abc import Callable
from dataclasses import dataclass

_DOCUMENTED = """IB_DISABLE NET NET_PLUGIN IB_HCA NET_GDR_LEVEL NET_GDR_READ NET_GDR_C2C DMABUF_ENABLE IB_GID_INDEX
P2P_DISABLE SHM_DISABLE P2P_LEVEL SOCKET_IFNAME TOPO_FILE TOPO_DUMP_FILE DEBUG DEBUG_SUBSYS DEBUG_FILE IB_TC IB_SL
IB_TIMEOUT IB_RETRY_CNT IB_QPS_PER_CONNECTION IB_SPLIT_DATA_ON_QPS IB_PCI_RELAXED_ORDERING IB_ADAPTIVE_ROUTING
IB_ROCE_VERSION_NUM IB_ADDR_FAMILY IB_ADDR_RANGE IB_MERGE_VFS IB_MERGE_NICS IB_DATA_DIRECT IB_OOO_RQ
IB_ECE_ENABLE SOCKET_FAMILY SOCKET_NTHREADS NSOCKS_PERTHREAD CROSS_NIC PXN_DISABLE PXN_C2C P2P_PXN_LEVEL
P2P_DIRECT_DISABLE BUFFSIZE NTHREADS MIN_NCHANNELS MAX_NCHANNELS MIN_CTAS MAX_CTAS CTA_POLICY CGA_CLUSTER_SIZE ALGO
PROTO NVLS_ENABLE NVB_DISABLE IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P IGNORE_NET_MISMATCH IGNORE_COLLNET_MISMATCH
CONF_FILE COMM_ID COMM_BLOCKING LAUNCH_MODE CHECK_POINTERS CHECK_MODE COLLNET_ENABLE MEM_SYNC_DOMAIN
COLLNET_NODE_THRESHOLD GRAPH_FILE GRAPH_DUMP_FILE GRAPH_REGISTER GRAPH_MIXING_SUPPORT TUNER_PLUGIN TUNER_CONFIG_PATH
PROFILER_PLUGIN MNNVL_ENABLE MNNVL_UUID MNNVL_CLIQUE_ID CUMEM_ENABLE CUMEM_HOST_ENABLE LOCAL_REGISTER
NET_SHARED_BUFFERS NET_SHARED_COMMS OOB_NET_ENABLE OOB_NET_IFNAME SET_THREAD_NAME SET_STACK_SIZE MULTI_RANK_GPU_ENABLE
SET_CPU_STACK_SIZE NVLSTREE_MAX_CHUNKSIZE WORK_FIFO_BYTES RAS_ENABLE RAS_ADDR PROGRESS_APPENDOP_FREQ GDRCOPY_ENABLE
GDRCOPY_SYNC_ENABLE GDRCOPY_FLUSH_ENABLE GDRCOPY_FIFO_ENABLE GDR_FLUSH_DISABLE HOSTID NETDEVS_POLICY SYM_CTAS WIN_ENABLE
RUNTIME_CONNECT NET_OVERHEAD IB_AR_THRESHOLD IB_FIFO_TC IB_PKEY IB_USE_INLINE IB_WARN_RAIL_LOCAL LL_BUFFSIZE
LL128_BUFFSIZE TOPO_DUMP_FILE_RANK UNPACK_MEM DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS WARN_ENABLE_DEBUG_INFO
ALLOC_P2P_NET_LL_BUFFERS LEGACY_CUDA_REGISTER CREATE_THREAD_CONTEXT DUMP_TOPO VERSION IB_SUBNET_AWARE_ROUTING
P2P_NET_CHUNKSIZE NCHANNELS_PER_NET_PEER P2P_READ_ENABLE THREAD_THRESHOLDS CHUNK_SIZE NVLS_NCHANNELS RINGS
FASTRAK_CTRL_DEV FASTRAK_IFNAME MIN_NRINGS MAX_NRINGS CHECKS_DISABLE BLOCKING_WAIT ASYNC_ERROR_HANDLING DESYNC_DEBUG
ENABLE_TIMING USE_TENSOR_REGISTER_ALLOCATOR_HOOK"""
KNOWN = frozenset(f"NCCL_{word}" for word in _DOCUMENTED.split())
"""Names that NCCL, its plug-ins or torch read.

Source: NCCL user guide, src/**/*.cc (NCCL_PARAM); ProcessGroupNCCL.hpp of torch 2.13.
"""


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
"""How the evidence begins that is a condition by itself."""

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
