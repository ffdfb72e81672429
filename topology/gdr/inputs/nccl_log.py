"""What an NCCL_DEBUG=INFO log proves about GPUDirect RDMA: channels by rank and direction, and the reasons why not."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from gradwire.topology.gdr.nccl import Version, parse_version, path_name, within

_MAX_NBYTES = 256 << 20
_MAX_LINE = 4096
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_VERSION = re.compile(r"NCCL version (\d+\.\d+(?:\.\d+)?)")
_NETWORK = re.compile(r"Using network ([\w. -]{1,40}?)\s*$")
_HCA = re.compile(r"GPU Direct RDMA (Enabled|Disabled) for HCA (\d+) '([^']{1,64})'")
_REASON = re.compile(r"GPU Direct RDMA Disabled for GPU (\S+) / HCA (\S+) \(distance (\d{1,2}) >=? (\d{1,2})\)")
_CHANNEL = re.compile(
    r"Channel \d+(?:/\d+)? : (\d+)\[[0-9a-fx]*\] -> (\d+)\[[0-9a-fx]*\] \[(send|receive)\] via (NET/.{1,80})"
)
_PATH_LINE = re.compile(r"(GPU|NET)/\S+ ?:")
_PATH_ENTRY = re.compile(r"(GPU|NET)/(\S+) \(\d+/[\d.]+/([A-Z0-9]{2,4})\)")
_OVERRIDE = re.compile(r"(NCCL_NET_GDR_(?:LEVEL|READ|C2C)) set by environment to (\S{1,20})")
_PATHS = ("PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
_IB_DEVICES = re.compile(r"NET/IB : Using .*")


@dataclass(slots=True)
class NcclLog:
    """Counts and facts from one log."""

    lines: int = 0
    version: Version | None = None
    networks: set[str] = field(default_factory=set)
    no_device: bool = False
    """`NET/IB : No device found.`"""
    hcas: dict[str, bool] = field(default_factory=dict)
    """NIC -> "Enabled for HCA": the NIC could, which proves nothing about use."""
    gdr_channels: Counter[tuple[int, str]] = field(default_factory=Counter)
    """(rank, send or receive) -> channels with GDRDMA."""
    staged_channels: Counter[tuple[int, str]] = field(default_factory=Counter)
    """(rank, send or receive) -> network channels through host memory."""
    reasons: Counter[str] = field(default_factory=Counter)
    nearest: str | None = None
    """Nearest GPU-NIC path in the tables that NCCL prints."""
    overrides: dict[str, str] = field(default_factory=dict)
    relaxed_ordering: bool | None = None
    acs_hint: bool = False
    truncated: bool = False

    @property
    def network_channels(self) -> int:
        """Channels that cross the network, sending and receiving."""
        return self.gdr_channels.total() + self.staged_channels.total()


def parse_nccl_log(lines: Iterable[str]) -> NcclLog:
    """Reads log lines of any NCCL version, of one rank or of many mixed together.

    Source: NCCL src/transport/net.cc (channel lines), src/graph/topo.cc (HCA line), src/graph/paths.cc (reason line,
    path tables), src/transport/net_ib (device line, ACS hint).
    """
    log = NcclLog()
    for raw in lines:
        line = _ANSI.sub("", raw[:_MAX_LINE]).rstrip()
        log.lines += 1
        if "NCCL" in line or "GPU Direct" in line or "via NET" in line:
            _read_line(log, line)
    return log


def read_nccl_log(path: Path) -> NcclLog:
    """Reads a log file, at most 256 MiB of it.

    Raises:
        OSError: The file cannot be read.
    """
    if not path.is_file():
        raise OSError(f"{path}: no regular file")
    with path.open("rb") as file:
        log = parse_nccl_log(_bounded(file))
        log.truncated = bool(file.read(1))
    return log


def merged_logs(logs: Sequence[NcclLog]) -> NcclLog | None:
    """One log of the logs that ranks wrote each for itself; None of none."""
    if not logs:
        return None
    whole = NcclLog()
    for log in logs:
        whole.lines += log.lines
        whole.version = whole.version or log.version
        whole.networks |= log.networks
        whole.no_device |= log.no_device
        whole.hcas |= {name: able and whole.hcas.get(name, True) for name, able in log.hcas.items()}
        whole.gdr_channels += log.gdr_channels
        whole.staged_channels += log.staged_channels
        whole.reasons += log.reasons
        whole.nearest = _nearer(whole.nearest, log.nearest)
        whole.overrides |= log.overrides
        if log.relaxed_ordering is not None:
            whole.relaxed_ordering = log.relaxed_ordering and whole.relaxed_ordering is not False
        whole.acs_hint |= log.acs_hint
        whole.truncated |= log.truncated
    return whole


def _nearer(one: str | None, other: str | None) -> str | None:
    """The nearer of two path types; None is unknown."""
    if one is None or other is None:
        return one or other
    return one if within(one, other) else other


def _bounded(file: BinaryIO) -> Iterable[str]:
    left = _MAX_NBYTES
    while left > 0 and (line := file.readline(_MAX_LINE * 16)):
        left -= len(line)
        yield line.decode("utf-8", "replace")


def _read_line(log: NcclLog, line: str) -> None:
    if match := _CHANNEL.search(line):
        rank = int(match[1 if match[3] == "send" else 2])
        counter = log.gdr_channels if "GDRDMA" in match[4] else log.staged_channels
        counter[rank, match[3]] += 1
    elif match := _REASON.search(line):
        names = [path_name(int(match[index]), log.version) or match[index] for index in (3, 4)]
        log.reasons[f"path {names[0]} is beyond level {names[1]}"] += 1
    elif match := _HCA.search(line):
        log.hcas[match[3]] = match[1] == "Enabled" and log.hcas.get(match[3], True)
    elif match := _VERSION.search(line):
        log.version = parse_version(match[1])
    elif match := _NETWORK.search(line):
        log.networks.add(match[1])
    elif match := _OVERRIDE.search(line):
        log.overrides[match[1]] = match[2]
    elif _IB_DEVICES.search(line):
        log.relaxed_ordering = "[RO]" in line
    elif "NET/IB : No device found" in line:
        log.no_device = True
    elif "ACS is enabled" in line:
        log.acs_hint = True
    else:
        _read_path_table(log, line)


def _read_path_table(log: NcclLog, line: str) -> None:
    """A row `NET/0 :GPU/3000 (4/16.0/SYS) ...`, or the mirror image that begins with GPU."""
    head = _PATH_LINE.search(line)
    if head is None:
        return
    wanted = "GPU" if head[1] == "NET" else "NET"
    for kind, _, path in _PATH_ENTRY.findall(line):
        if kind == wanted and path in _PATHS:
            log.nearest = _nearer(log.nearest, path)
