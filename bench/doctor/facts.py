"""Data of an examination: facts that ranks read on their machines, measurements, and the findings of the checks."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar, get_args, get_type_hints

from gradwire.topology.fabric import TCP_SHARE

R = TypeVar("R")

PLAIN = ("gloo", "nccl")
"""Backends that plain DDP runs on."""

DEFAULT_GRADIENT_NBYTES = 100_000_000
"""Bytes of gradients without `--gradient-mb` and `--script`: 25 million float32 parameters, as ResNet-50 has."""

BUCKET_NBYTES = 25 << 20
"""Bytes of DDP's default bucket, which is one all-reduce. Source: DistributedDataParallel, bucket_cap_mb."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInterface:
    """One network interface of a node: a NIC, a virtual interface, a bridge or the loopback; its link and addresses."""

    name: str
    kind: str
    """`nic` (a device, or a bond, team or bridge that one is in), `virtual`, `bridge` (of none) or `loopback`."""
    addresses: tuple[str, ...] = ()
    """IPv4 and global IPv6, without prefix lengths."""
    mtu: int = 1500
    """Bytes of the largest packet."""
    bits_per_second: float | None = None
    """Rate of the link by the driver; None for virtual NICs, whose drivers report a made-up rate."""
    pcie_bits_per_second: float | None = None
    """Rate of the PCIe link to the NIC; None if it has none, and in virtual machines, which show a made-up one."""
    other_half: str | None = None
    """The interface of the same port that has PCIe lanes of its own, as on DGX Spark."""
    duplex: str | None = None
    """`full` or `half` by the driver; None if it does not say."""
    up: bool = True
    link_changes: int = 0
    """Number of times that the link went up or down during the examination."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """State of a GPU under load, read by NVML."""

    index: int
    name: str
    sm_mhz: int | None = None
    """Clock under load."""
    max_sm_mhz: int | None = None
    p2p: tuple[int, ...] = ()
    """Peer access to each GPU of the node, as NVML's nvmlGpuP2PStatus_t numbers it: 0 where this one may read its
    memory."""
    nvlink_domain: str | None = None
    """NVLink domain of several hosts that the GPU has joined (NVL72); None if it has joined none."""
    slowed_by: tuple[str, ...] = ()
    """Reasons for which the driver lowers the clock, such as heat or the power limit; empty if it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Facts that one rank reads on its machine, without measuring anything."""

    rank: int
    host: tuple[str, ...]
    """Hostname, boot id and device number of /dev/shm. Two ranks share a node if all three are equal."""
    local_rank: int | None = None
    """LOCAL_RANK; None if the launcher does not set it."""
    device: str = "cpu"
    versions: Mapping[str, str] = field(default_factory=dict)
    """Name -> version: python, torch, gradwire; with GPUs also nccl, cuda, driver."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that configure NCCL, gloo, torch, UCX and gradwire."""
    cores: int = 1
    """Logical CPUs of the machine."""
    affinity: tuple[int, ...] = (0,)
    """Logical CPUs that this process may use."""
    cpu_limit: float | None = None
    """CPUs that a cgroup's quota allows its processes together; None without a quota."""
    threads: int = 1
    """torch's threads for one operation."""
    shm_nbytes: int | None = None
    """Size of /dev/shm."""
    shm_free_nbytes: int | None = None
    interfaces: tuple[NetworkInterface, ...] = ()
    gloo_interface: str | None = None
    """Interface of gloo's connections; if none could be observed, the one that gloo would choose."""
    gloo_seen: bool = False
    """True if `gloo_interface` was observed on connections, False if it was derived."""
    gloo_error: str | None = None
    """Error of gloo's connection; None if it connected."""
    nccl_interface: str | None = None
    """Interface that NCCL would choose for sockets."""
    gpus: tuple[GpuState, ...] = ()
    gdr: tuple[tuple[str, str, str], ...] = ()
    """Findings of `gradwire gdr-check`: (`fail` or `warn`, text, fix)."""
    tcp_window_nbytes: int | None = None
    """Maximum of net.ipv4.tcp_rmem in bytes; half of it is available as receive window."""
    tcp_send_nbytes: int | None = None
    """Maximum of net.ipv4.tcp_wmem, a connection's send buffer, in bytes."""
    container: str = ""
    governor: str | None = None
    """Name of the kernel's CPU frequency governor, such as `performance`."""

    @property
    def hostname(self) -> str:
        """Hostname of the rank's node."""
        return self.host[0]

    def interface(self, name: str | None) -> NetworkInterface | None:
        """Returns the interface with this name; None if the node has none."""
        return next((each for each in self.interfaces if each.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRates:
    """TCP measurements between two nodes: the best of several tries. Rates are bytes per second, as (a to b, b to a).

    `a` and `b` are numbers of nodes, see `JobFacts.nodes`.
    """

    a: int
    b: int
    latency_seconds: float
    """Half of the shortest round trip."""
    one: tuple[float, float] = (0.0, 0.0)
    """Rates of one connection."""
    many: tuple[float, float] = (0.0, 0.0)
    """Rates of several connections together, one direction at a time."""
    both: tuple[float, float] = (0.0, 0.0)
    """Rates of several connections together, while both directions are used."""
    sent: tuple[int, int] = (0, 0)
    """Segments sent in all tries by flows that were paced below half of the link's rate."""
    lost: tuple[int, int] = (0, 0)
    """Segments of `sent` that the senders' kernels retransmitted."""
    window_share: float | None = None
    """Share of time in which the receiver's window limited one connection, in the worse direction; None if the kernel
    does not report it."""
    buffer_share: float | None = None
    """Share of time in which the send buffer limited it."""
    clock_seconds: float = 0.0
    """Seconds by which b's clock is ahead of a's."""
    packet_nbytes: int | None = None
    """Size of the probe packets, which routers must not fragment; None if no such probe was possible."""
    packets_pass: bool | None = None
    """True if the probe packets were echoed, False if only small ones were; None if not even those."""
    times: int = 1
    """Number of measurements that are combined here."""

    def better(self, other: "PairRates") -> "PairRates":
        """Returns two measurements of a pair as one, with the better value of each field: other load makes them worse.

        Segments and tries are added. The difference of the clocks, and the size of the probe packets if known, are
        those of this measurement.

        Args:
            other: Later measurement of the same pair.
        """
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
    """Pair of nodes that was not measured, because node `a` could not connect to node `b`; see `JobFacts.nodes`."""

    a: int
    b: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceRate:
    """Rate between the nodes numbered a and b over an interface of theirs that the job does not use."""

    a: int
    b: int
    interface: str
    bytes_per_second: float
    """Rate of the slower direction; 0 if the nodes do not reach each other over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignTraffic:
    """Rates of other programs' traffic: the byte counters of one NIC while no rank sent anything. Bytes per second."""

    node: int
    interface: str
    sent: float
    received: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreWork:
    """Speed of one rank's core: repetitions of a small computation while all ranks compute."""

    rank: int
    per_second: float
    """Repetitions a second in one thread."""
    again: tuple[float, ...] = ()
    """For a node that looked slow: its speed over a good node's, while only these two compute, for each repetition."""
    threads_seconds: float | None = None
    """Seconds of a multi-threaded operation with torch's number of threads, while all ranks run it."""
    fair_seconds: float | None = None
    """Seconds of the same operation with one thread for each core that the rank has to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTime:
    """Timing of one backend's all-reduce over all ranks."""

    backend: str
    nbytes: int
    seconds: float | None
    """Median over the rounds of the slowest rank's time; None if it failed."""
    best_seconds: float | None = None
    """Shortest round: other load only makes rounds longer."""
    error: str | None = None
    rank: int | None = None
    """Rank on which it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """Measurements of the `--script` on one rank."""

    gradient_nbytes: int = 0
    """Bytes of the gradients of all parameters that had one, in their own dtypes."""
    unused_nbytes: int = 0
    """Bytes of the trainable parameters of the optimizers that had no gradient in any step."""
    step_seconds: float | None = None
    """Median seconds from one optimizer step to the next; None if the script made fewer than two."""
    activity: Mapping[str, float] = field(default_factory=dict)
    """Activity of the main thread, as `gradwire.comms.watch.activity` names it -> seconds of a step."""
    lines: Mapping[str, str] = field(default_factory=dict)
    """Activity -> line of the script in which it was observed most often."""
    all_reduces: Mapping[str, float] = field(default_factory=dict)
    """Line of the script -> all-reduces over all ranks that it issued, for each step."""
    under_way_seconds: float | None = None
    """Seconds of a step in which this rank had a collective in flight; None if it had none."""
    error: str | None = None
    status: int = 0
    """Exit status of a script that exited by itself, 128 + N for signal N; 0 if the doctor ended it."""
    seconds: float = 0.0
    """Seconds from its start until it exited or was ended."""
    stands: str | None = None
    """Line of the main thread shortly before the time limit; None if the script did not reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """The input of the checks: what was read and measured on all ranks of a job, and options of the command line.

    The options are the user's gradients, step and link, which no examination can measure without the user's script.
    """

    ranks: tuple[RankFacts, ...]
    gradient_nbytes: int = DEFAULT_GRADIENT_NBYTES
    step_seconds: float | None = None
    """Seconds of a step of the user's script, by `--step-seconds` or measured by `--script`; None without both."""
    link_bytes_per_second: float | None = None
    """Rate of a node's link in one direction by `--link`; None if not given."""
    pairs: tuple[PairRates, ...] = ()
    unreached: tuple[UnreachedPair, ...] = ()
    """Pairs of nodes that could not be measured."""
    others: tuple[InterfaceRate, ...] = ()
    foreign: tuple[ForeignTraffic, ...] = ()
    """Other programs' traffic on the NICs in use, by node."""
    own_bytes_per_second: Mapping[int, float] = field(default_factory=dict)
    """Node -> rate of the same measurement over its loopback: the most that this program could measure on a network."""
    work: tuple[CoreWork, ...] = ()
    backends: tuple[BackendTime, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    """Ranks that did not join within the time limit."""
    started_ranks: Mapping[int, str] = field(default_factory=dict)
    """Missing rank that reported its start before it imported torch -> its host."""
    launcher: str = ""
    """Launcher of the ranks, as `bench.nccl_tests.start.Start.by` names it."""
    waited_seconds: float = 0.0
    """Seconds for which the others waited for the missing ranks."""
    notes: tuple[str, ...] = ()
    """Things that could not be examined, each with the reason."""
    script_runs: tuple[ScriptRun, ...] = ()
    """Runs of `--script`, by rank."""
    script_status: int = 0
    """Exit status of the rank whose script failed first, as a shell reports it; 0 if none failed."""

    @property
    def nodes(self) -> list[list[RankFacts]]:
        """Facts of the ranks of each node, by rank; nodes are numbered from 0, in the order of their lowest rank."""
        found: dict[tuple[str, ...], list[RankFacts]] = {}
        for each in sorted(self.ranks, key=lambda one: one.rank):
            found.setdefault(each.host, []).append(each)
        return list(found.values())

    @property
    def names(self) -> list[str]:
        """Hostname of each node, with its number appended if two nodes share one."""
        hosts = [node[0].hostname for node in self.nodes]
        return [f"{name}#{place}" if hosts.count(name) > 1 else name for place, name in enumerate(hosts)]

    @property
    def nvlink_domains(self) -> list[str | None]:
        """NVLink domain that all GPUs of a node have joined, by node; None for a node without one, and on CPUs."""
        gpus = [{gpu.nvlink_domain for one in node for gpu in one.gpus if one.device == "cuda"} for node in self.nodes]
        return [domains.pop() if len(domains) == 1 else None for domains in gpus]

    @property
    def joined_by_nvlink(self) -> bool:
        """Whether the nodes are hosts of one NVLink domain, so that gradients on GPUs use no network card."""
        domains = self.nvlink_domains
        return len(domains) > 1 and len(set(domains)) == 1 and domains[0] is not None

    def without_pairs_in_domains(self) -> "JobFacts":
        """Returns the facts without the TCP rates (`pairs`) between nodes of one NVLink domain.

        Gradients between these go over NVLink, so a check of the network must not report a slow link between them.
        """
        of = self.nvlink_domains
        pairs = tuple(pair for pair in self.pairs if of[pair.a] is None or of[pair.a] != of[pair.b])
        return self if len(pairs) == len(self.pairs) else dataclasses.replace(self, pairs=pairs)

    @property
    def no_gpu_has_peers(self) -> bool:
        """Whether the drivers say that no GPU reaches another GPU of its node; False if that is not known."""
        several = [node[0].gpus for node in self.nodes if len(node[0].gpus) > 1]
        states = [status for gpus in several for gpu in gpus for to, status in enumerate(gpu.p2p) if to != gpu.index]
        return bool(states) and all(states) and all(gpu.p2p for gpus in several for gpu in gpus)

    @property
    def has_gpus(self) -> bool:
        """Whether any rank sees a GPU."""
        return any(each.gpus or each.device == "cuda" for each in self.ranks)

    def reached(self, node: int) -> tuple[float, float] | None:
        """Returns the rates at which a node sends to and receives from its best partners, in bytes per second.

        None if no pair with this node was measured. Pairs whose full-size packets are lost do not count.

        Args:
            node: Number of the node.
        """
        whole = [pair for pair in self.pairs if pair.packets_pass is not False]
        sent = [pair.many[0] for pair in whole if pair.a == node] + [pair.many[1] for pair in whole if pair.b == node]
        received = [pair.many[1] for pair in whole if pair.a == node]
        received += [pair.many[0] for pair in whole if pair.b == node]
        return (max(sent), max(received)) if sent else None

    def expected_rate(self, node: int) -> float | None:
        """Returns the payload rate that a node's link should have, by `--link` or by the NIC in use.

        Bytes per second; None if neither says.

        Args:
            node: Number of the node.
        """
        if self.link_bytes_per_second is not None:
            return self.link_bytes_per_second * TCP_SHARE
        first = self.nodes[node][0]
        nic = first.interface(first.gloo_interface)
        if nic is None or nic.bits_per_second is None:
            return None
        return min(nic.bits_per_second, nic.pcie_bits_per_second or float("inf")) / 8 * TCP_SHARE

    def good_rate(self) -> float:
        """Returns the rate of a healthy link of this job, in bytes per second.

        It is the median of the rates that the nodes reach with their best partners. It is what `--link`, else the NIC
        of the first node for which it is known, says that a link should have, if that is more; but no more than the
        slowest rate that the doctor itself reached over a node's loopback. 10 Gbit/s if nothing is known.
        """
        reached = [min(rates) for node in range(len(self.nodes)) if (rates := self.reached(node)) is not None]
        expected = [rate for node in range(len(self.nodes)) if (rate := self.expected_rate(node)) is not None]
        limit = min(self.own_bytes_per_second.values(), default=float("inf"))
        usual = median(reached) if reached else 0.0
        return max([usual, *(min(rate, limit) for rate in expected[:1])]) or 1.25e9

    def foreign_share(self, node: int) -> float:
        """Returns the share of a healthy link that other programs use on a node's NIC, in the busier direction, 0 to 1.

        Args:
            node: Number of the node.
        """
        rates = [max(each.sent, each.received) for each in self.foreign if each.node == node]
        return min(1.0, max(rates, default=0.0) / self.good_rate())

    @property
    def gains_by_gradwire(self) -> bool:
        """Whether init_process_group("gradwire") is no slower than gloo in this run, or was not measured."""
        times = {each.backend: each.seconds / each.nbytes for each in self.backends if each.seconds is not None}
        return times.get("gradwire", 0.0) <= times.get("gloo", float("inf"))

    @property
    def all_reduce_seconds(self) -> float | None:
        """Time of the fastest measured backend, scaled to the job's gradients; None if none was measured."""
        times = [each.seconds / each.nbytes for each in self.backends if each.seconds is not None]
        return min(times) * self.gradient_nbytes if times else None

    def exchange_seconds(self, bytes_per_second: float) -> float:
        """Returns the least time of an exact all-reduce of the gradients if every node's link has this rate.

        Source: 2 (n - 1) / n of the bytes cross each link in each direction: Patarasu and Yuan, "Bandwidth optimal
        all-reduce algorithms for clusters of workstations", JPDC 2009, section 3.

        Args:
            bytes_per_second: Rate in each direction.
        """
        count = len(self.nodes)
        return 2 * (count - 1) / count * self.gradient_nbytes / max(bytes_per_second, 1.0)

    def plain_exchange_seconds(self) -> float:
        """Returns the seconds that plain DDP needs to exchange the gradients of a step.

        That is what the faster of gloo and NCCL needs by its measured time for each byte; if neither was measured, the
        least time at the rate of a healthy link.
        """
        times = [each.seconds / each.nbytes for each in self.backends if each.seconds and each.backend in PLAIN]
        return min(times) * self.gradient_nbytes if times else self.exchange_seconds(self.good_rate())

    @property
    def compute_seconds(self) -> float:
        """Seconds that a step computes: the step if known, else assumed to be its exchange, and 1 s on one node."""
        if self.step_seconds is not None:
            return self.step_seconds
        return self.exchange_seconds(self.good_rate()) if len(self.nodes) > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Finding of a check: what is wrong, what it costs and what to do, in words that need no knowledge of gradwire."""

    key: str
    """Stable identifier for programs, a key of `checks.basis.BASES`."""
    title: str
    confidence: float
    """Probability that the finding is right, 0 to 1."""
    cost_seconds: float = 0.0
    """Seconds that it adds to each step, for the user's gradients; 0 if it adds none or the cost is unknown."""
    evidence: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    """Commands to type or things to change, a line each."""
    nodes: tuple[str, ...] = ()
    stops: bool = False
    """True if a job would not start, or would hang, because of it."""
    wrong: bool = False
    """True if a job may compute something else because of it: a fault whatever it costs, no remark."""
    remark: bool = False
    """True if it costs nothing, or too little to be a fault: it does not change the exit status."""
    fixed_bytes_per_second: float | None = None
    """Rate of a link once the fix is applied; None if the fix does not change it."""


def to_record(facts: object) -> dict[str, object]:
    """Converts a dataclass of this module to a JSON object.

    Args:
        facts: Instance to convert.
    """
    assert dataclasses.is_dataclass(facts) and not isinstance(facts, type)
    record = json.loads(json.dumps(dataclasses.asdict(facts)))
    assert isinstance(record, dict)
    return record


def from_record(kind: type[R], record: object) -> R:
    """Builds a dataclass of this module from its record.

    Fields of other versions, unknown to this one, are ignored.

    Args:
        kind: Class to build.
        record: Return value of `to_record`.
    """
    assert isinstance(record, dict) and dataclasses.is_dataclass(kind)
    types = get_type_hints(kind)
    known = {each.name for each in dataclasses.fields(kind)}
    return kind(**{name: _value_of(types[name], value) for name, value in record.items() if name in known})


def _value_of(annotation: object, value: object) -> object:
    """Returns a field's value: lists as tuples, with the dataclasses that the field's annotation names in them."""
    for inner in get_args(annotation):
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            return tuple(from_record(inner, each) for each in value) if isinstance(value, list) else ()
    return _as_tuple(value)


def _as_tuple(value: object) -> object:
    return tuple(_as_tuple(each) for each in value) if isinstance(value, list) else value
