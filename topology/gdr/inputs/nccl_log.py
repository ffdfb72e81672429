"""Reads from an NCCL_DEBUG=INFO log whether GPUDirect RDMA is used, by rank and direction, and if not, why."""

import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from gradwire.topology.gdr.inputs.nccl_warnings import SPEAKS, KnownWarning, read_warning
from gradwire.topology.gdr.nccl import Version, named_distance, parse_level, parse_version, within
from gradwire.topology.readers.kinds import HEAD_CHARACTERS, tool_of

_MAX_NBYTES = 256 << 20
_MAX_SECONDS = 20.0
_SAY_EVERY_LINES = 1 << 16
_MAX_LINE = 4096
_OF_INTEREST = re.compile(
    rf"[NR]CCL version|Using network|GPU Direct|via (?:NET|P2P|SHM|NVLS)/|(?:GPU|NET)/|NCCL_\w+ set |ACS is enabled"
    rf"|{SPEAKS}".encode()
)
"""One of these stands in every line that `_read_line` makes something of, and in few of the others."""
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_VERSION = re.compile(r"(?<!with )NCCL version (\d+\.\d+(?:\.\d+)?)")
"""Not `compiled with NCCL version 2.30.3`, which is the application's. Source: NCCL v2.30 src/dev_runtime.cc."""
_NETWORK = re.compile(r"Using network ([\w. -]{1,40}?)\s*$")
_HCA = re.compile(
    r"(?:NET/([\w. -]{1,24}?) ?: )?GPU Direct RDMA (?:\([\w -]{1,24}\) )?(enable|disable)d? for "
    r"(?:GPU \S{1,24} / )?HCA (?:\d+ )?(?!\d+\b)'?([^'\s(]{1,64})'?(?: \(([^)]{1,60})\))?",
    re.IGNORECASE,
)
"""`NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0' (no module)`; plug-ins add the way or the reason, NCCL before
2.5 the GPU."""
_PAIR = re.compile(r"GPU Direct RDMA (Enabled|Disabled) for GPU[ /].{1,160}?distance (\d+) ([<>]=?) (\d+)\b")
"""`GPU Direct RDMA Disabled for GPU ca000 / HCA 0 (distance 7 > 4)`, 2.29's form with ranks and PXN, and `2 >= 2`
before 2.6, where the level itself is too far. From 2.30 on only builds with traces print it."""
_CHANNEL = re.compile(
    r"(?:Channel|Ring) \d+(?:/\d+)? : (\d+)(?:\[[0-9a-fx]*\])? -> (\d+)(?:\[[0-9a-fx]*\])? \[(send|receive)\] via "
    r"(NET/.{1,80})"
)
"""NCCL before 2.7 calls a channel a ring, before 2.5 it leaves out the bus ids, before 2.4 the direction as well."""
_LOCAL_CHANNEL = re.compile(
    r"(?:Channel|Ring) \d+(?:/\d+)? : \d+(?:\[.{0,20}?\])? -> \d+(?:\[.{0,20}?\])? via (P2P/MNNVL|P2P|SHM|direct)"
)
"""`P2P/MNNVL`: over NVLink, also between hosts of one NVLink domain. Source: NCCL v2.30 src/transport/p2p.cc."""
_HOST = re.compile(r"(?:^|[\s:|>\]])([\w.-]{1,64}):\d+:\d+ \[")
"""`node1:123:456 [0] NCCL INFO`, behind a time stamp where NCCL_DEBUG_TIMESTAMP_FORMAT asks for one, and behind what a
launcher or a shell puts before each line: `[default0]:`, `3: `, `[1,0]<stdout>:`, `node1 | `."""
_MAX_WARNINGS = 16
_PATH_LINE = re.compile(r"(GPU|NET)/\S+ ?:")
_PATH_ENTRY = re.compile(r"(GPU|NET)/(\S+) \(\d+/[\d.]+/([A-Z0-9]{2,4})\)")
_OVERRIDE = re.compile(r"(NCCL_[A-Z0-9_]{2,64}) set (?:(?:by|from) environment )?to (\S{1,200})")
"""`from` is NCCL 2.6's word for a level."""
_MAX_OVERRIDES = 64
_PATHS = ("PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
_IB_DEVICES = re.compile(r"NET/IB ?: Using.*; OOB ")
_RELAXED_SINCE = (2, 12)
"""First release whose line of devices says `[RO]`."""


@dataclass(slots=True)
class NcclLog:
    """Holds the counts and facts from one log, or from the merged logs of several ranks."""

    lines: int = 0
    spoken: int = 0
    """Lines that NCCL wrote."""
    other_tool: str = ""
    """Tool that seems to have written the file, if NCCL wrote none of it; empty if NCCL did, or if it is unknown."""
    version: Version | None = None
    is_rccl: bool = False
    """True if AMD's RCCL wrote it, whose lines are NCCL's."""
    networks: set[str] = field(default_factory=set)
    hosts_without_device: set[str] = field(default_factory=set)
    """Hosts that said `NET/IB : No device found.`; "" where lines do not say whose they are."""
    hosts_with_gdr: set[str] = field(default_factory=set)
    """Hosts with a GDRDMA channel, through whatever plug-in."""
    hosts_on_network: set[str] = field(default_factory=set)
    """Hosts with a channel over a network."""
    local_channels: int = 0
    """Channels inside a host: peer-to-peer or shared memory."""
    nvlink_channels: int = 0
    """Number of these local channels that go over NVLink and may join hosts (P2P/MNNVL)."""
    hosts_with_local: set[str] = field(default_factory=set)
    """Hosts with a local channel."""
    warnings: dict[str, KnownWarning | None] = field(default_factory=dict)
    """Text of a line that warns -> its meaning, None if unknown. Only the first line of each meaning is kept."""
    hcas: dict[str, bool] = field(default_factory=dict)
    """NIC -> "Enabled for HCA": the NIC could, which proves nothing about use."""
    hca_reasons: set[str] = field(default_factory=set)
    """Reasons behind "Disabled for HCA": `no module`."""
    gdr_channels: Counter[tuple[int, str]] = field(default_factory=Counter)
    """(rank, send or receive) -> channels with GDRDMA."""
    staged_channels: Counter[tuple[int, str]] = field(default_factory=Counter)
    """(rank, send or receive) -> network channels through host memory."""
    socket_channels: int = 0
    """Number of the channels through host memory that are NET/Socket."""
    far_pairs: Counter[tuple[int, int, bool]] = field(default_factory=Counter)
    """(distance, level, whether the level itself is too far), as NCCL numbers them -> lines that say "Disabled" for a
    GPU and a NIC."""
    near_pairs: int = 0
    """Lines that say "Enabled" for a GPU and a NIC: within the level, which is no use yet."""
    nearest: str | None = None
    """Nearest GPU-NIC path in the tables that NCCL prints."""
    overrides: dict[str, str] = field(default_factory=dict)
    """Variables that the log says are set -> their values."""
    relaxed_ordering: bool | None = None
    acs_hint: bool = False
    truncated: bool = False

    @property
    def network_channels(self) -> int:
        """Returns the number of channels that cross the network, sending and receiving."""
        return self.gdr_channels.total() + self.staged_channels.total()

    @property
    def hosts_lacking_device(self) -> set[str]:
        """Returns the hosts that found no RDMA device though they need one: not all their channels are local."""
        inside = self.hosts_with_local - self.hosts_on_network
        return self.hosts_without_device - self.hosts_with_gdr - inside

    @property
    def fatal(self) -> tuple[str, KnownWarning] | None:
        """Returns the first warning that ends a job and its meaning; None if there is none.

        A warning that follows from other errors is returned only if no other one ends the job.
        """
        found = [(text, known) for text, known in self.warnings.items() if known is not None and known.ends_job]
        return min(found, key=lambda each: each[1].kind == "follows", default=None)

    @property
    def reasons(self) -> list[str]:
        """Returns every reason that the log gives for not using GPUDirect RDMA, a sentence each."""
        disabled = [name for name, able in self.hcas.items() if not able]
        why = f" ({', '.join(sorted(self.hca_reasons))})" if self.hca_reasons else ""
        found = [f"Disabled for HCA {', '.join(disabled[:8])}{why}: no way to register GPU memory"] if disabled else []
        level_name = parse_level(self.overrides.get("NCCL_NET_GDR_LEVEL", ""), self.version)
        for distance, level, exclusive in sorted(self.far_pairs):
            names = named_distance(distance, level, self.version, level_name, exclusive=exclusive)
            found.append(f"path {names[0]} is beyond level {names[1]}")
        found += [known.cause for known in self.notes]
        return found

    @property
    def notes(self) -> list[KnownWarning]:
        """Returns the known lines that say why GPUDirect RDMA is not used; those about sockets if sockets are used."""
        sockets = self.socket_channels > 0 or self.networks == {"Socket"} or bool(self.hosts_lacking_device)
        kinds = ("gdr", "sockets") if sockets else ("gdr",)
        return [known for known in self.warnings.values() if known is not None and known.kind in kinds]

    @property
    def switched_off(self) -> str:
        """Returns the variable in the log that keeps NCCL from RDMA, as `NAME=value`; empty if there is none.

        Source: NCCL user guide, NCCL_IB_DISABLE, NCCL_NET, NCCL_NET_PLUGIN, NCCL_IB_HCA.
        """
        off: dict[str, Callable[[str], bool]] = {
            "NCCL_IB_DISABLE": lambda value: value != "0",
            "NCCL_NET": lambda value: value.lower() == "socket",
            "NCCL_NET_PLUGIN": lambda value: value == "none",
            "NCCL_IB_HCA": lambda _: bool(self.hosts_without_device),
        }
        set_ones = ((name, self.overrides[name], hurts) for name, hurts in off.items() if name in self.overrides)
        return next((f"{name}={value}" for name, value, hurts in set_ones if hurts(value)), "")


def parse_nccl_log(lines: Iterable[str]) -> NcclLog:
    """Reads log lines of any NCCL version, of one rank or of many mixed together.

    Args:
        lines: Lines of the log; lines without interest may be passed as empty strings, so that they still count.

    Source: NCCL src/transport/net.cc (channel lines), src/graph/topo.cc (HCA line), src/graph/paths.cc (reason line,
    path tables), src/transport/net_ib (device line, ACS hint).
    """
    log = NcclLog()
    for raw in lines:
        line = raw[:_MAX_LINE].rstrip()
        if "\x1b" in line:
            line = _ANSI.sub("", line)
        log.lines += 1
        log.spoken += "NCCL" in line
        if "NCCL" in line or "RCCL" in line or "GPU Direct" in line or "via " in line:
            _read_line(log, line)
    return log


def read_nccl_log(path: Path, say: Callable[[str], None] = lambda _: None) -> NcclLog:
    """Reads a log file, at most 256 MiB of it, and for at most 20 s; `truncated` says that there is more.

    Args:
        path: A regular file.
        say: Function that is called repeatedly with a line about the progress.

    Raises:
        OSError: The file cannot be read.
    """
    if not path.is_file():
        raise OSError(f"{path}: no regular file")
    with path.open("rb") as file:
        log = parse_nccl_log(_bounded(file, say, path.stat().st_size))
        log.truncated = bool(file.read(1))
        if not log.spoken:
            file.seek(0)
            head = file.read(HEAD_CHARACTERS)
            log.spoken = head.count(b"NCCL INFO")
            tool = None if log.spoken or b"\0" in head else tool_of(head.decode("utf-8", "replace"))
            log.other_tool = "" if tool is None else tool[0]
    return log


def merged_logs(logs: Sequence[NcclLog]) -> NcclLog | None:
    """Merges the logs that ranks wrote each for itself into a new one; None if `logs` is empty."""
    if not logs:
        return None
    whole = NcclLog()
    for log in logs:
        whole.lines += log.lines
        whole.spoken += log.spoken
        whole.version = whole.version or log.version
        whole.networks |= log.networks
        whole.hosts_without_device |= log.hosts_without_device
        whole.hosts_with_gdr |= log.hosts_with_gdr
        whole.hosts_on_network |= log.hosts_on_network
        whole.is_rccl |= log.is_rccl
        whole.local_channels += log.local_channels
        whole.nvlink_channels += log.nvlink_channels
        whole.hosts_with_local |= log.hosts_with_local
        whole.warnings = log.warnings | whole.warnings
        whole.hcas |= {name: able and whole.hcas.get(name, True) for name, able in log.hcas.items()}
        whole.gdr_channels += log.gdr_channels
        whole.staged_channels += log.staged_channels
        whole.hca_reasons |= log.hca_reasons
        whole.socket_channels += log.socket_channels
        whole.far_pairs += log.far_pairs
        whole.near_pairs += log.near_pairs
        whole.nearest = _nearer(whole.nearest, log.nearest)
        whole.overrides |= log.overrides
        if log.relaxed_ordering is not None:
            whole.relaxed_ordering = log.relaxed_ordering and whole.relaxed_ordering is not False
        whole.acs_hint |= log.acs_hint
        whole.truncated |= log.truncated
    return whole


def _nearer(one: str | None, other: str | None) -> str | None:
    """Returns the nearer of two path types; an unknown one (None) is ignored."""
    if one is None or other is None:
        return one or other
    return one if within(one, other) else other


def _bounded(file: BinaryIO, say: Callable[[str], None], nbytes: int) -> Iterable[str]:
    left, deadline = _MAX_NBYTES, time.monotonic() + _MAX_SECONDS
    for number in itertools.count(1):
        if left <= 0 or not (line := file.readline(min(left, _MAX_LINE * 16))):
            return
        left -= len(line)
        yield line.decode("utf-8", "replace") if _OF_INTEREST.search(line) else ""
        if number % _SAY_EVERY_LINES == 0:
            say(f"reading the log: {_MAX_NBYTES - left >> 20} of {nbytes >> 20} MiB")
            if time.monotonic() > deadline:
                return


def _read_line(log: NcclLog, line: str) -> None:
    if match := _CHANNEL.search(line):
        rank = int(match[1 if match[3] == "send" else 2])
        counter = log.gdr_channels if "GDRDMA" in match[4] else log.staged_channels
        counter[rank, match[3]] += 1
        log.hosts_on_network.add(_host(line))
        if counter is log.gdr_channels:
            log.hosts_with_gdr.add(_host(line))
        log.socket_channels += match[4].startswith("NET/Socket")
    elif match := _PAIR.search(line):
        if match[1] == "Enabled":
            log.near_pairs += 1
        else:
            log.far_pairs[int(match[2]), int(match[4]), match[3] == ">="] += 1
    elif match := _HCA.search(line):
        _read_hca(log, match)
    elif match := _VERSION.search(line):
        log.version = parse_version(match[1])
    elif match := _NETWORK.search(line):
        log.networks.add(match[1])
    elif "RCCL version" in line:
        log.is_rccl = True
    elif match := _OVERRIDE.search(line):
        if len(log.overrides) < _MAX_OVERRIDES:
            log.overrides[match[1]] = match[2].rstrip(".")
    elif _IB_DEVICES.search(line):
        if log.version is None or log.version >= _RELAXED_SINCE:
            log.relaxed_ordering = "[RO]" in line
    elif "NET/IB : No device found" in line:
        log.hosts_without_device.add(_host(line))
    elif match := _LOCAL_CHANNEL.search(line):
        log.local_channels += 1
        log.nvlink_channels += match[1] == "P2P/MNNVL"
        log.hosts_with_local.add(_host(line))
    elif warning := read_warning(line):
        _keep_warning(log, *warning)
    elif "ACS is enabled" in line:
        log.acs_hint = True
    else:
        _read_path_table(log, line)


def _host(line: str) -> str:
    """Returns the name of the host that wrote a line; empty if the line does not begin with it."""
    match = _HOST.search(line)
    return match[1] if match else ""


def _keep_warning(log: NcclLog, text: str, known: KnownWarning | None) -> None:
    """Adds a warning to the log unless its meaning is in there already, as every rank repeats it."""
    if len(log.warnings) < _MAX_WARNINGS and not (known is not None and known in log.warnings.values()):
        log.warnings.setdefault(text, known)


def _read_hca(log: NcclLog, match: re.Match[str]) -> None:
    """Stores whether NCCL can register GPU memory with a NIC; for sockets, only that the network is Socket."""
    network, verb, name, reason = match.groups()
    if network == "Socket":
        log.networks.add(network)
        return
    able = verb.lower() == "enable"
    log.hcas[name] = able and log.hcas.get(name, True)
    if reason and not able:
        log.hca_reasons.add(reason)


def _read_path_table(log: NcclLog, line: str) -> None:
    """Reads a row of NCCL's path table, `NET/0 :GPU/3000 (4/16.0/SYS) ...` or its mirror image that begins with GPU."""
    head = _PATH_LINE.search(line)
    if head is None:
        return
    wanted = "GPU" if head[1] == "NET" else "NET"
    for kind, _, path in _PATH_ENTRY.findall(line):
        if kind == wanted and path in _PATHS:
            log.nearest = _nearer(log.nearest, path)
