"""What the doctor knows of a job, as data: each rank's own view, what was measured, and what is wrong by it."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TypeVar

from gradwire.topology.fabric import TCP_SHARE

R = TypeVar("R")

DEFAULT_GRADIENT_NBYTES = 100_000_000
"""Gradient bytes where the user gave none: 25 million parameters in float32, which is ResNet-50."""

BUCKET_NBYTES = 25 << 20
"""DDP's default bucket, each of which waits for the network once. Source: DistributedDataParallel, bucket_cap_mb."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInterface:
    """One network interface of a node."""

    name: str
    kind: str
    """`nic` (a device, or a bond, team or bridge that one is in), `virtual`, `bridge` (of none) or `loopback`."""
    addresses: tuple[str, ...] = ()
    """IPv4 and global IPv6, without prefix lengths."""
    mtu: int = 1500
    """Bytes of the largest packet."""
    bits_per_second: float | None = None
    """What the NIC says its link runs at; None where a virtual driver would make it up."""
    pcie_bits_per_second: float | None = None
    """Rate of the PCIe link to the NIC; None for others, and in virtual machines, where it means nothing."""
    other_half: str | None = None
    """The interface of the same port that has PCIe lanes of its own, as on DGX Spark."""
    duplex: str | None = None
    """`full` or `half`, as the driver says."""
    up: bool = True
    link_changes: int = 0
    """How often its link came or went while the doctor looked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One GPU as NVML sees it while its ranks work."""

    index: int
    name: str
    sm_mhz: int | None = None
    """Clock under load."""
    max_sm_mhz: int | None = None
    p2p: tuple[int, ...] = ()
    """Peer access to each GPU of the node, as NVML's nvmlGpuP2PStatus_t numbers it: 0 where this one may read its
    memory."""
    slowed_by: tuple[str, ...] = ()
    """Why the driver holds its clock down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What one rank sees of its machine."""

    rank: int
    host: tuple[str, ...]
    """Hostname, boot id, device number of /dev/shm: equal on ranks that share a node."""
    local_rank: int | None = None
    """The rank's number on its node, as the launcher says."""
    device: str = "cpu"
    versions: Mapping[str, str] = field(default_factory=dict)
    """python, torch, gradwire, and where there are GPUs nccl, cuda, driver."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that steer libraries."""
    cores: int = 1
    """Logical CPUs of the machine."""
    affinity: tuple[int, ...] = (0,)
    """Logical CPUs that this process may use."""
    cpu_limit: float | None = None
    """CPUs that a container's quota allows all its processes together."""
    threads: int = 1
    """torch's threads for one operation."""
    shm_nbytes: int | None = None
    """Size of /dev/shm."""
    shm_free_nbytes: int | None = None
    interfaces: tuple[NetworkInterface, ...] = ()
    gloo_interface: str | None = None
    """The interface on which gloo's connections were seen; where none could be, the one it would take."""
    gloo_seen: bool = False
    """Whether gloo's connections were seen."""
    gloo_error: str | None = None
    """Why gloo did not connect."""
    nccl_interface: str | None = None
    """The one NCCL would take for its sockets."""
    gpus: tuple[GpuState, ...] = ()
    gdr: tuple[tuple[str, str, str], ...] = ()
    """(`fail` or `warn`, what is wrong, what to do) of `gradwire gdr-check`."""
    tcp_window_nbytes: int | None = None
    """The most that the kernel lets a connection's receiver buffer, net.ipv4.tcp_rmem; half of it is window."""
    tcp_send_nbytes: int | None = None
    """The most that it lets a sender buffer, net.ipv4.tcp_wmem."""
    container: str = ""
    governor: str | None = None
    """How the kernel picks the CPU's clock."""

    @property
    def hostname(self) -> str:
        """The node's name."""
        return self.host[0]

    def interface(self, name: str | None) -> NetworkInterface | None:
        """One interface by its name."""
        return next((each for each in self.interfaces if each.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRates:
    """What two nodes reach with plain TCP; rates in bytes per second, (there, back). The best of `times` tries."""

    a: int
    b: int
    latency_seconds: float
    """Seconds one way: half of the shortest round trip seen."""
    one: tuple[float, float] = (0.0, 0.0)
    """Rates of one connection."""
    many: tuple[float, float] = (0.0, 0.0)
    """Rates of several at once."""
    both: tuple[float, float] = (0.0, 0.0)
    """Rates of several in each direction, both at once."""
    sent: tuple[int, int] = (0, 0)
    """Segments of flows that left the link more than half empty, all tries together."""
    lost: tuple[int, int] = (0, 0)
    """Segments of these that were lost, as the senders' kernels count them."""
    window_share: float | None = None
    """Share of one connection's time in which the receiver's window held it back, in the worse direction; None where
    the kernel does not say."""
    buffer_share: float | None = None
    """Share of that time in which the sender's buffer did."""
    clock_seconds: float = 0.0
    """How far b's clock is ahead of a's."""
    packet_nbytes: int | None = None
    """Packets of this size were sent that no router may cut; None: no such probe was possible."""
    packets_pass: bool | None = None
    """Whether they came back, where small ones did."""
    times: int = 1

    def better(self, other: "PairRates") -> "PairRates":
        """The better of two measurements in each: noise only makes a network look worse than it is."""
        return dataclasses.replace(
            self,
            latency_seconds=min(self.latency_seconds, other.latency_seconds),
            one=_larger(self.one, other.one),
            many=_larger(self.many, other.many),
            both=_larger(self.both, other.both),
            sent=(self.sent[0] + other.sent[0], self.sent[1] + other.sent[1]),
            lost=(self.lost[0] + other.lost[0], self.lost[1] + other.lost[1]),
            window_share=_smaller(self.window_share, other.window_share),
            buffer_share=_smaller(self.buffer_share, other.buffer_share),
            packets_pass=other.packets_pass if not self.packets_pass else self.packets_pass,
            packet_nbytes=self.packet_nbytes if self.packet_nbytes is not None else other.packet_nbytes,
            times=self.times + other.times,
        )


def _smaller(a: float | None, b: float | None) -> float | None:
    return min((each for each in (a, b) if each is not None), default=None)


def _larger(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return max(a[0], b[0]), max(a[1], b[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreachedPair:
    """Two nodes of which the first one could not reach the second one's listener."""

    a: int
    b: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceRate:
    """What two nodes reach over one interface that is not in use."""

    a: int
    b: int
    interface: str
    bytes_per_second: float
    """Rate of the slower direction; 0 where the interface does not lead from one to the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignTraffic:
    """What one node's NIC carried, by its counters, while no rank of the doctor sent anything; bytes per second."""

    node: int
    interface: str
    sent: float
    received: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreWork:
    """How much one rank's core does beside all others'; the same small sum again and again."""

    rank: int
    per_second: float
    """Sums a second of one thread, all ranks at once."""
    again: tuple[float, ...] = ()
    """Shares of a good node's work that a node which looked slow does, both alone, one for each repetition."""
    threads_seconds: float | None = None
    """Seconds of an operation with torch's own number of threads, all ranks at once."""
    fair_seconds: float | None = None
    """The same with as many threads as the rank has cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTime:
    """An all-reduce of all ranks by one backend."""

    backend: str
    nbytes: int
    seconds: float | None
    """A usual round of the slowest rank; None where it failed."""
    best_seconds: float | None = None
    """The best round; noise only makes it longer."""
    error: str | None = None
    rank: int | None = None
    """The rank on which it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """What was seen of a script on one rank."""

    gradient_nbytes: int = 0
    """Bytes of the gradients of all parameters that had one, in their own type."""
    unused_nbytes: int = 0
    """Bytes of the trainable parameters of the optimizers that had no gradient in any step."""
    step_seconds: float | None = None
    """Seconds from one optimizer step to the next, the usual one; None where fewer than two were made."""
    activity: Mapping[str, float] = field(default_factory=dict)
    """What its main thread did in a step, as `gradwire.comms.watch.activity` names it -> seconds."""
    lines: Mapping[str, str] = field(default_factory=dict)
    """What its main thread did -> the line where it did that most."""
    all_reduces: Mapping[str, float] = field(default_factory=dict)
    """Line of the script -> all-reduces that it issued in a step, of the group of all ranks."""
    under_way_seconds: float | None = None
    """Seconds of a step in which this rank had a collective under way; None without one."""
    error: str | None = None
    status: int = 0
    """Exit status of a script that ended by itself, 128 + N for signal N; 0 where its steps or time were up."""
    seconds: float = 0.0
    """Seconds until it ended, or was ended."""
    stands: str | None = None
    """The line that its main thread was at shortly before its time was up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """Everything the checks look at."""

    ranks: tuple[RankFacts, ...]
    gradient_nbytes: int = DEFAULT_GRADIENT_NBYTES
    step_seconds: float | None = None
    """Seconds of a step of the user's script, measured or given."""
    link_bytes_per_second: float | None = None
    """What the user says a node's link gives, one direction."""
    pairs: tuple[PairRates, ...] = ()
    unreached: tuple[UnreachedPair, ...] = ()
    """Pairs of nodes that could not be measured."""
    others: tuple[InterfaceRate, ...] = ()
    foreign: tuple[ForeignTraffic, ...] = ()
    """What the NICs in use carried while no rank sent anything, by node."""
    own_bytes_per_second: Mapping[int, float] = field(default_factory=dict)
    """Node -> what the same program moves inside it, over the loopback: more it could not show on a network."""
    work: tuple[CoreWork, ...] = ()
    backends: tuple[BackendTime, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    """Ranks that did not come."""
    started_ranks: Mapping[int, str] = field(default_factory=dict)
    """The started ranks of these, those that have said that they run, before they import torch -> their host."""
    launcher: str = ""
    """What started the ranks, as `bench.nccl_tests.start.Start.by` names it."""
    waited_seconds: float = 0.0
    """Seconds for ranks that are missing."""
    notes: tuple[str, ...] = ()
    """What could not be looked at, and why."""
    script_runs: tuple[ScriptRun, ...] = ()
    """Runs of `--script`, by rank."""
    script_status: int = 0
    """The first status other than 0 with which the user's script ended by itself on a rank, as a shell says it."""

    @property
    def nodes(self) -> list[list[RankFacts]]:
        """The ranks of each node, both in order of the ranks."""
        found: dict[tuple[str, ...], list[RankFacts]] = {}
        for each in sorted(self.ranks, key=lambda one: one.rank):
            found.setdefault(each.host, []).append(each)
        return list(found.values())

    @property
    def names(self) -> list[str]:
        """The nodes' names; numbered where two share one."""
        hosts = [node[0].hostname for node in self.nodes]
        return [f"{name}#{place}" if hosts.count(name) > 1 else name for place, name in enumerate(hosts)]

    @property
    def no_gpu_has_peers(self) -> bool:
        """Whether on every node with several GPUs none of them reaches another one: known, and so."""
        several = [node[0].gpus for node in self.nodes if len(node[0].gpus) > 1]
        states = [status for gpus in several for gpu in gpus for to, status in enumerate(gpu.p2p) if to != gpu.index]
        return bool(states) and all(states) and all(gpu.p2p for gpus in several for gpu in gpus)

    @property
    def has_gpus(self) -> bool:
        """Whether any rank sees one."""
        return any(each.gpus or each.device == "cuda" for each in self.ranks)

    def reached(self, node: int) -> tuple[float, float] | None:
        """What a node sends and receives with its best partner, bytes per second; None where that is not known.

        Pairs that lose whole packets say nothing of the link's rate.
        """
        whole = [pair for pair in self.pairs if pair.packets_pass is not False]
        sent = [pair.many[0] for pair in whole if pair.a == node] + [pair.many[1] for pair in whole if pair.b == node]
        received = [pair.many[1] for pair in whole if pair.a == node]
        received += [pair.many[0] for pair in whole if pair.b == node]
        return (max(sent), max(received)) if sent else None

    def promised(self, node: int) -> float | None:
        """What a node's link should give by the user's word, or by the NIC in use; payload bytes per second."""
        if self.link_bytes_per_second is not None:
            return self.link_bytes_per_second * TCP_SHARE
        first = self.nodes[node][0]
        nic = first.interface(first.gloo_interface)
        if nic is None or nic.bits_per_second is None:
            return None
        return min(nic.bits_per_second, nic.pcie_bits_per_second or float("inf")) / 8 * TCP_SHARE

    def good_rate(self) -> float:
        """What a healthy link of this job gives, bytes per second: the usual best of its nodes, or what is promised."""
        reached = [min(rates) for node in range(len(self.nodes)) if (rates := self.reached(node)) is not None]
        promised = [rate for node in range(len(self.nodes)) if (rate := self.promised(node)) is not None]
        limit = min(self.own_bytes_per_second.values(), default=float("inf"))
        usual = median(reached) if reached else 0.0
        return max([usual, *(min(rate, limit) for rate in promised[:1])]) or 1.25e9

    def foreign_share(self, node: int) -> float:
        """Share of a good link that other programs use on a node's NIC, in the busier direction, 0 to 1."""
        rates = [max(each.sent, each.received) for each in self.foreign if each.node == node]
        return min(1.0, max(rates, default=0.0) / self.good_rate())

    @property
    def gains_by_gradwire(self) -> bool:
        """Whether init_process_group("gradwire") is no slower than gloo in this run, or was not measured."""
        times = {each.backend: each.seconds / each.nbytes for each in self.backends if each.seconds is not None}
        return times.get("gradwire", 0.0) <= times.get("gloo", float("inf"))

    @property
    def all_reduce_seconds(self) -> float | None:
        """The fastest measured all-reduce, for the job's gradients; None if none was measured."""
        times = [each.seconds / each.nbytes for each in self.backends if each.seconds is not None]
        return min(times) * self.gradient_nbytes if times else None

    def exchange_seconds(self, bytes_per_second: float) -> float:
        """The least time of an exact all-reduce of the gradients between the nodes, in which every link has this rate.

        Source: 2 (n - 1) / n of the bytes cross each link in each direction: Patarasu and Yuan, "Bandwidth optimal
        all-reduce algorithms for clusters of workstations", JPDC 2009, section 3.

        Args:
            bytes_per_second: One direction.
        """
        count = len(self.nodes)
        return 2 * (count - 1) / count * self.gradient_nbytes / max(bytes_per_second, 1.0)

    @property
    def compute_seconds(self) -> float:
        """A step of the user's script; where it is not known, as long as a healthy exchange takes, 1 s on one node."""
        if self.step_seconds is not None:
            return self.step_seconds
        return self.exchange_seconds(self.good_rate()) if len(self.nodes) > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Something that is wrong, in words for someone who knows none of ours."""

    key: str
    """Identifier for programs: never changes."""
    title: str
    confidence: float
    """Probability that the finding is right, 0 to 1."""
    cost_seconds: float = 0.0
    """Seconds that it costs a step, for the user's gradients; 0 where it cannot be told."""
    evidence: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    """What to type or change."""
    nodes: tuple[str, ...] = ()
    stops: bool = False
    """Whether a job would not start, or would hang."""
    remark: bool = False
    """Whether it costs nothing, or too little to be a fault: it does not change the exit status."""
    mended_bytes_per_second: float | None = None
    """Rate of a link once the fix is applied; None if the fix does not change it."""


def to_record(facts: object) -> dict[str, object]:
    """A dataclass as what JSON knows.

    Args:
        facts: Of this file.
    """
    assert dataclasses.is_dataclass(facts) and not isinstance(facts, type)
    record = json.loads(json.dumps(dataclasses.asdict(facts)))
    assert isinstance(record, dict)
    return record


def from_record(kind: type[R], record: object) -> R:
    """A dataclass of this file from its record; fields that are unknown here are left out, as other versions have them.

    Args:
        kind: Of the dataclass.
        record: What `to_record` gave.
    """
    assert isinstance(record, dict) and dataclasses.is_dataclass(kind)
    known = {each.name for each in dataclasses.fields(kind)}
    values = {name: _INNER.get(name, _as_tuple)(value) for name, value in record.items() if name in known}
    return kind(**values)


def _as_tuple(value: object) -> object:
    return tuple(_as_tuple(each) for each in value) if isinstance(value, list) else value


def _each_of(kind: type[R], value: object) -> object:
    return tuple(from_record(kind, each) for each in value) if isinstance(value, list) else ()


_INNER = {"interfaces": partial(_each_of, NetworkInterface), "gpus": partial(_each_of, GpuState)}
