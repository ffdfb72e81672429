"""Variables that slow a job down, left over from a hunt for a bug or copied from another cluster; each with its source.

The costs are estimates, because what would be without the variable is not measured: a share of a healthy exchange of
the gradients, or of the step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gradwire.bench.doctor.checks.words import listed
from gradwire.bench.doctor.facts import Diagnosis, JobFacts

NCCL_GUIDE = "NCCL user guide, Environment Variables"
WANTED_HERE = "it may be wanted here: "
"""How the evidence begins that is a condition by itself."""
TORCH_GUIDE = "documentation of torch.distributed"
TORCH_SOURCES = "github.com/pytorch/pytorch, torch/csrc/distributed/c10d"


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().lower() in values


def _set(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "n", "no", "false", "off")


def _below(limit: int) -> Callable[[str], bool]:
    return lambda value: value.strip().isdigit() and int(value) < limit


def _any(value: str) -> bool:
    return bool(value.strip())


@dataclass(frozen=True, slots=True)
class HarmfulVariable:
    """One variable that hurts.

    Attributes:
        name: Of the variable.
        hurts: Whether a value does.
        why: What it does to a job.
        source: Where that is written.
        exchange_share: Its cost as a share of a healthy exchange between nodes.
        step_share: Its cost as a share of the step.
        gpus: It acts on GPUs alone.
        sure: That it hurts where it is set.
        remedy: What to type; unset it where empty.
        cures: Where the variable is the cure for something worse, with the source; empty where it never is. What may be
            a cure is to be tried, not taken away: without it a job may hang.
    """

    name: str
    hurts: Callable[[str], bool]
    why: str
    source: str
    exchange_share: float = 0.0
    step_share: float = 0.0
    gpus: bool = True
    sure: float = 0.9
    remedy: str = ""
    cures: str = ""

    @property
    def advice(self) -> tuple[str, ...]:
        """The lines of the remedy."""
        if self.remedy:
            return (self.remedy,)
        if self.cures:
            return (
                f"keep it until one short run without it has ended and was faster: timeout 300 env -u {self.name} ...",
            )
        return (f"unset {self.name}",)

    @property
    def caution(self) -> tuple[str, ...]:
        """The line of the evidence that says where the variable is wanted."""
        return (f"{WANTED_HERE}{self.cures}",) if self.cures else ()


_ACS = (
    "where PCIe access control (ACS) or an IOMMU sends transfers between GPUs through the root, or GPUs have no "
    "peer-to-peer at all, NCCL hangs or is wrong without it (NCCL user guide, Troubleshooting, ACS; "
    "github.com/local-inference-lab/rtx6kpro/issues/15)"
)
_FEW_CTAS = (
    "few blocks leave the multiprocessors to a computation that they overlap with, and have doubled the speed of a job "
    "(github.com/NVIDIA/nccl/issues/1298)"
)
_NO_FABRIC = (
    "where InfiniBand or RoCE is there but does not lead to the other nodes, or RoCE loses packets, NCCL fails or "
    "stalls without it (NCCL user guide, NCCL_IB_DISABLE)"
)
_SMALL_SHM = (
    "in a container whose /dev/shm is too small NCCL fails without it; docker --shm-size is the better cure "
    "(NCCL user guide, Troubleshooting, Shared memory)"
)

_NO_PLUGIN = (
    "a plug-in that finds no device of its own, or was built for another NCCL, ends or hangs the job "
    "(github.com/ai-dynamo/dynamo/pull/6944, github.com/NVIDIA/nccl/issues/513)"
)
_NO_GDR = (
    "where PCIe access control (ACS) sends what cards read through the root, GPUDirect RDMA is slow or hangs "
    "(NCCL user guide, Troubleshooting, PCI Access Control Services); gradwire gdr-check says whether it does"
)
_SLOW_READS = (
    "on machines without NVLink cards may read host memory faster than a GPU's, and NCCL's default there is 0 "
    "(NCCL user guide, NCCL_NET_GDR_READ; github.com/NVIDIA/nccl/issues/1295)"
)
_NO_LL128 = (
    "LL128 has corrupted data on machines whose cards share a switch with one GPU alone (release notes of NCCL 2.18.1)"
)
_ONE_SUM = (
    "sums of ring and tree differ in their last bits; who compares runs bit by bit, or needs a tree's accuracy, fixes "
    "it (github.com/NVIDIA/nccl/issues/1055)"
)
_NO_MULTICAST = (
    "where the fabric manager or the switches' multicast fail, NCCL ends or hangs without it "
    "(github.com/NVIDIA/nccl/issues/1197 and 2077, github.com/pytorch/pytorch/pull/177472)"
)
_SPARES_MEMORY = "each channel has such a buffer on the GPU: smaller ones leave memory to the model (NCCL user guide)"
_FAILS_LOUDLY = (
    "a collective that times out then raises an error in the training thread (documentation of torch.distributed)"
)

_ISSUES = "github.com/pytorch/torchtitan/issues/1147, Megatron-FSDP user guide"

HARMFUL = (
    HarmfulVariable(
        "NCCL_IB_DISABLE",
        _set,
        "NCCL uses TCP although there may be InfiniBand or RoCE",
        NCCL_GUIDE,
        1.0,
        sure=0.5,
        cures=_NO_FABRIC,
    ),
    HarmfulVariable(
        "NCCL_NET",
        _is("socket"),
        "NCCL uses TCP whatever network is there",
        NCCL_GUIDE,
        1.0,
        sure=0.5,
        cures=_NO_FABRIC,
    ),
    HarmfulVariable(
        "NCCL_NET_PLUGIN",
        _is("none"),
        "a cloud's network plug-in (EFA, GPUDirect-TCPX) is not loaded",
        NCCL_GUIDE,
        1.0,
        sure=0.6,
        cures=_NO_PLUGIN,
    ),
    HarmfulVariable(
        "NCCL_P2P_DISABLE",
        _set,
        "GPUs of a node do not copy to each other directly, over NVLink or PCIe",
        NCCL_GUIDE,
        0.5,
        sure=0.4,
        cures=_ACS,
    ),
    HarmfulVariable(
        "NCCL_P2P_LEVEL",
        _is("loc", "0"),
        "GPUs of a node do not copy to each other directly",
        NCCL_GUIDE,
        0.5,
        sure=0.4,
        cures=_ACS,
    ),
    HarmfulVariable(
        "NCCL_SHM_DISABLE",
        _set,
        "GPUs of a node that cannot reach each other go over the network",
        NCCL_GUIDE,
        0.5,
        sure=0.5,
        cures=_SMALL_SHM,
    ),
    HarmfulVariable(
        "NCCL_NET_GDR_LEVEL",
        _is("loc", "0"),
        "network cards do not read GPU memory themselves",
        NCCL_GUIDE,
        0.5,
        sure=0.5,
        cures=_NO_GDR,
    ),
    HarmfulVariable(
        "NCCL_NET_GDR_READ",
        _is("0"),
        "what GPUs send goes through the host's memory",
        NCCL_GUIDE,
        0.25,
        sure=0.4,
        cures=_SLOW_READS,
    ),
    HarmfulVariable(
        "NCCL_DMABUF_ENABLE", _is("0"), "one of two ways to GPUDirect RDMA is off", NCCL_GUIDE, 0.25, sure=0.5
    ),
    HarmfulVariable(
        "NCCL_ALGO",
        _any,
        "NCCL may not choose between ring, tree and NVLS by size",
        NCCL_GUIDE,
        0.25,
        sure=0.6,
        cures=_ONE_SUM,
    ),
    HarmfulVariable(
        "NCCL_PROTO", _any, "NCCL may not choose its protocol by size", NCCL_GUIDE, 0.25, sure=0.6, cures=_NO_LL128
    ),
    HarmfulVariable(
        "NCCL_MAX_NCHANNELS",
        _below(4),
        "NCCL keeps few blocks of the GPU busy",
        NCCL_GUIDE,
        0.5,
        sure=0.4,
        cures=_FEW_CTAS,
    ),
    HarmfulVariable(
        "NCCL_MAX_CTAS", _below(4), "NCCL keeps few blocks of the GPU busy", NCCL_GUIDE, 0.5, sure=0.4, cures=_FEW_CTAS
    ),
    HarmfulVariable(
        "NCCL_BUFFSIZE",
        _below(1 << 20),
        "NCCL's buffers are below 1 MiB; its default is 4 MiB",
        NCCL_GUIDE,
        0.25,
        sure=0.5,
        cures=_SPARES_MEMORY,
    ),
    HarmfulVariable("NCCL_NTHREADS", _below(128), "NCCL's blocks have few threads", NCCL_GUIDE, 0.25, sure=0.6),
    HarmfulVariable(
        "NCCL_PXN_DISABLE", _set, "GPUs do not share the card that is on the right rail", NCCL_GUIDE, 0.1, sure=0.5
    ),
    HarmfulVariable(
        "NCCL_NVLS_ENABLE", _is("0"), "NVSwitches do not sum", NCCL_GUIDE, 0.1, sure=0.4, cures=_NO_MULTICAST
    ),
    HarmfulVariable("NCCL_CHECK_POINTERS", _set, "NCCL checks every pointer of every call", NCCL_GUIDE, 0.02, sure=0.7),
    HarmfulVariable(
        "NCCL_LAUNCH_MODE",
        _is("group"),
        "one process launches for all its GPUs, with a barrier",
        NCCL_GUIDE,
        0.05,
        sure=0.5,
    ),
    HarmfulVariable(
        "NCCL_DEBUG",
        _is("trace"),
        "NCCL writes a line for every call",
        NCCL_GUIDE,
        0.1,
        sure=0.7,
        remedy="export NCCL_DEBUG=WARN",
    ),
    HarmfulVariable(
        "NCCL_IGNORE_CPU_AFFINITY",
        _set,
        "NCCL's threads leave the cores that the job gave the rank",
        NCCL_GUIDE,
        0.05,
        sure=0.4,
    ),
    HarmfulVariable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        _is("1"),
        "kernels start in the order they were launched, so gradients of FSDP or DDP may wait for computation; "
        "Megatron's tensor parallelism wants it, nothing else does",
        _ISSUES,
        0.5,
        sure=0.6,
        remedy="unset CUDA_DEVICE_MAX_CONNECTIONS   # or 32, without Megatron's tensor parallelism",
    ),
    HarmfulVariable(
        "CUDA_LAUNCH_BLOCKING",
        _set,
        "every kernel is waited for: nothing overlaps",
        "CUDA C++ programming guide",
        1.0,
        step_share=0.3,
    ),
    *(
        HarmfulVariable(
            name,
            _set,
            "every collective is waited for on the CPU",
            f"{TORCH_SOURCES}/ProcessGroupNCCL.hpp",
            0.5,
            sure=0.6,
            cures=_FAILS_LOUDLY,
        )
        for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
    ),
    HarmfulVariable(
        "TORCH_NCCL_ENABLE_TIMING",
        _set,
        "two events for every collective, and with CUDA_DEVICE_MAX_CONNECTIONS=1 no overlap",
        "github.com/pytorch/pytorch/issues/143890",
        0.1,
        sure=0.5,
    ),
    HarmfulVariable(
        "TORCH_NCCL_DESYNC_DEBUG",
        _set,
        "every collective writes to the store",
        f"{TORCH_SOURCES}/ProcessGroupNCCL.cpp, DesyncDebugger",
        0.1,
        sure=0.6,
    ),
    HarmfulVariable(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _set,
        "every tensor is a cudaMalloc, which waits for the GPU",
        "PyTorch, CUDA semantics",
        step_share=0.5,
    ),
    HarmfulVariable(
        "TORCH_DISTRIBUTED_DEBUG",
        _is("detail"),
        "every collective is first compared among all ranks, which doubles the waits and ends asynchrony",
        TORCH_GUIDE + ", section Debugging",
        0.5,
        step_share=0.1,
        gpus=False,
    ),
    HarmfulVariable(
        "GLOO_DEVICE_TRANSPORT",
        _is("tcp_tls"),
        "gloo encrypts what it sends, on one core",
        f"{TORCH_SOURCES}/GlooDeviceFactory.cpp",
        0.5,
        gpus=False,
        sure=0.7,
    ),
    HarmfulVariable(
        "FI_PROVIDER",
        _is("tcp", "sockets"),
        "libfabric uses TCP whatever network is there",
        "libfabric, fabric(7)",
        0.5,
        sure=0.6,
    ),
    HarmfulVariable(
        "UCX_TLS",
        _is("tcp", "tcp,self"),
        "UCX uses TCP, also inside a node",
        "OpenUCX documentation",
        0.5,
        gpus=False,
        sure=0.6,
    ),
)

MAY_DIFFER = ("_SOCKET_IFNAME", "_IB_HCA", "_TOPO_FILE", "_DEBUG", "_HOSTID", "VISIBLE_DEVICES", "_CONF_FILE")
"""Variables that are each node's own, or change nothing between ranks."""

NO_GPUS = "no rank has a GPU here: it costs nothing until one has"


def harmful_variables(facts: JobFacts) -> Iterator[Diagnosis]:
    """Variables of the table that are set to what hurts."""
    for rule in HARMFUL:
        ranks = [each for each in facts.ranks if rule.name in each.variables and rule.hurts(each.variables[rule.name])]
        if not ranks:
            continue
        idle = rule.gpus and not facts.has_gpus
        nothing = NO_GPUS if idle else ""
        if rule.name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL") and facts.no_gpu_has_peers:
            nothing = (
                "it costs nothing: the driver says that no GPU here reaches another one directly, with it or without"
            )
        exchange = facts.exchange_seconds(facts.good_rate()) if len(facts.nodes) > 1 else 0.0
        nodes = tuple(dict.fromkeys(each.hostname for each in ranks))
        who = "all ranks" if len(ranks) == len(facts.ranks) else f"{len(ranks)} of {len(facts.ranks)} ranks"
        yield Diagnosis(
            key="variable",
            title=f"{rule.name}={ranks[0].variables[rule.name]}: {rule.why}",
            sure=rule.sure,
            cost_seconds=0.0 if nothing else rule.exchange_share * exchange + rule.step_share * facts.compute_seconds,
            evidence=(
                f"set for {who} on {listed(nodes)} (what it does: {rule.source})",
                *rule.caution,
                nothing or "the cost is an estimate: a run without it would tell",
            ),
            remedy=rule.advice,
            nodes=nodes,
        )


def differing_variables(facts: JobFacts) -> Iterator[Diagnosis]:
    """Variables of NCCL that differ between ranks: its ranks must choose alike."""
    names = {name for each in facts.ranks for name in each.variables if name.startswith("NCCL_")}
    for name in sorted(names):
        if name.endswith(MAY_DIFFER) or "_DEBUG" in name:
            continue
        values = {each.variables.get(name, "not set") for each in facts.ranks}
        if len(values) < 2:
            continue
        yield Diagnosis(
            key="variables_differ",
            title=f"{name} is not the same on all ranks: {listed(sorted(values))}",
            sure=0.7,
            evidence=("NCCL's ranks choose algorithms each for itself: other settings mean a hang or an error",),
            remedy=(
                "mpirun: -x NAME   Slurm: --export=ALL   ssh: set it in the job's script, not in a shell's profile",
            ),
            nodes=tuple(dict.fromkeys(e.hostname for e in facts.ranks if name in e.variables)),
            stops=facts.has_gpus,
        )


CHECKS = (harmful_variables, differing_variables)
