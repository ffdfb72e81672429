"""Lines and variables of NCCL by release, as its source has them at the tags v2.4.2-1 to v2.30.7-1."""

import ast
import re
from pathlib import Path

import pytest

from gradwire.topology import nccl_variables
from gradwire.topology.gdr.inputs.nccl_log import NcclLog, parse_nccl_log
from gradwire.topology.gdr.nccl import parse_level, parse_version
from gradwire.topology.nccl_variables import FIRST_RELEASE, KNOWN, LAST_RELEASE, RENAMED, unread

ROOT = Path(__file__).resolve().parents[4]
NEWEST = "2.30.7"

SEND, RECEIVE = (1, "send"), (0, "receive")
LINES: tuple[tuple[str, str, str, str, dict[str, object]], ...] = (
    # Channels over a network: src/transport/net.cc.
    ("2.4.2", "2.4.8", "net.cc", "Ring 02 : 1 -> 0 [send] via NET/IB/0/GDRDMA", {"gdr_channels": {SEND: 1}}),
    ("2.4.2", "2.4.8", "net.cc", "Ring 02 : 1 -> 0 [receive] via NET/Socket/0",
     {"staged_channels": {RECEIVE: 1}, "socket_channels": 1}),
    ("2.5.6", "2.6.4", "net.cc", "Ring 00 : 1[3000] -> 0[4000] [receive] via NET/IB/0",
     {"staged_channels": {RECEIVE: 1}}),
    ("2.5.6", "2.6.4", "net.cc", "Ring 00 : 1[3000] -> 0[ca000] [send] via NET/IB/0/GDRDMA",
     {"gdr_channels": {SEND: 1}}),
    ("2.7.3", "2.11.4", "net.cc", "Channel 00 : 1[3000] -> 0[4000] [send] via NET/IB/0/GDRDMA",
     {"gdr_channels": {SEND: 1}}),
    ("2.8.3", "2.11.4", "net.cc", "Channel 01 : 1[3000] -> 0[4000] [receive] via NET/IB/0/GDRDMA/Shared",
     {"gdr_channels": {RECEIVE: 1}}),
    ("2.12.7", "2.18.1", "net.cc", "Channel 00/0 : 1[3000] -> 0[4000] [send] via NET/IB/0(3)/GDRDMA",
     {"gdr_channels": {SEND: 1}}),
    ("2.18.3", NEWEST, "net.cc", "Channel 00/0 : 1[1] -> 0[0] [receive] via NET/Socket/0/Shared",
     {"staged_channels": {RECEIVE: 1}, "socket_channels": 1}),
    ("2.26.2", NEWEST, "net.cc", "Channel 00/0 : 1[1] -> 0[0] [send] via NET/AWS Libfabric/0/GDRDMA(PCI)/Shared",
     {"gdr_channels": {SEND: 1}}),
    # Channels inside a host, or over NVLink between hosts: src/transport/p2p.cc, shm.cc.
    ("2.4.2", "2.4.8", "p2p.cc", "Ring 00 : 0 -> 1 via P2P/common device", {"local_channels": 1}),
    ("2.4.2", "2.6.4", "p2p.cc", "Ring 00 : 0[0] -> 1[1] via P2P/direct pointer", {"local_channels": 1}),
    ("2.5.6", "2.6.4", "shm.cc", "Ring 00 : 0[3000] -> 1[4000] via direct shared memory", {"local_channels": 1}),
    ("2.8.3", "2.13.4", "p2p.cc", "Channel 00 : 0[3000] -> 1[4000] via P2P/indirect/2[5000]/read",
     {"local_channels": 1}),
    ("2.13.4", NEWEST, "shm.cc", "Channel 00 : 0[0] -> 1[1] via SHM/direct/direct", {"local_channels": 1}),
    ("2.18.1", NEWEST, "p2p.cc", "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read/CE", {"local_channels": 1}),
    ("2.20.3", NEWEST, "p2p.cc", "Channel 00/1 : 0[0] -> 4[0] via P2P/MNNVL",
     {"local_channels": 1, "nvlink_channels": 1}),
    # What a card can: src/transport/net_ib.cc, from 2.13 on src/graph/topo.cc.
    ("2.4.2", "2.4.8", "net_ib.cc",
     "NET/IB : GPU Direct RDMA Disabled for GPU 0[1] / HCA 0 'mlx5_0' (no module or not supported by GPU)",
     {"hcas": {"mlx5_0": False}, "hca_reasons": {"no module or not supported by GPU"}}),
    ("2.5.6", "2.12.12", "net_ib.cc", "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0' (no module)",
     {"hcas": {"mlx5_0": False}, "hca_reasons": {"no module"}}),
    ("2.13.4", NEWEST, "topo.cc", "NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'", {"hcas": {"mlx5_0": True}}),
    ("2.13.4", NEWEST, "topo.cc", "NET/Socket : GPU Direct RDMA Disabled for HCA 0 'eth0'", {"networks": {"Socket"}}),
    ("2.13.4", NEWEST, "init.cc", "DMA-BUF is available on GPU device 0", {}),
    # Which pairs are too far: src/transport/net.cc, from 2.6 on src/graph/paths.cc.
    ("2.4.2", "2.4.8", "net.cc", "NET/IB : GPU Direct RDMA Disabled for GPU 0[0] / HCA 0 (distance 2 >= 2)",
     {"reasons": ["path PHB is beyond level PXB"]}),
    ("2.5.6", "2.5.7", "net.cc", "NET/IB : GPU Direct RDMA Disabled for GPU 3000 / HCA 0 (distance 4 >= 2)",
     {"reasons": ["path SYS is beyond level PXB"]}),
    ("2.5.6", "2.5.7", "net.cc", "NET/IB : GPU Direct RDMA Enabled for GPU 3000 / HCA 0 (distance 1 < 2), read 0",
     {"near_pairs": 1}),
    ("2.6.4", "2.7.8", "paths.cc", "GPU Direct RDMA Disabled for GPU 3000 / HCA 0 (distance 4 > 3)",
     {"reasons": ["path PHB is beyond level PXB"]}),
    ("2.8.3", "2.11.4", "paths.cc", "GPU Direct RDMA Disabled for GPU 3000 / HCA 0 (distance 5 > 4)",
     {"reasons": ["path PHB is beyond level PXB"]}),
    ("2.12.7", "2.23.4", "paths.cc", "GPU Direct RDMA Disabled for GPU ca000 / HCA 0 (distance 6 > 4)",
     {"reasons": ["path PHB is beyond level PXB"]}),
    ("2.24.3", "2.25.1", "paths.cc", "GPU Direct RDMA Disabled for GPU 3 / HCA 0 (distance 6 > 4)",
     {"reasons": ["path PHB is beyond level PXB"]}),
    ("2.26.2", "2.26.6", "paths.cc", "GPU Direct RDMA Disabled for GPU 3 / HCA 0 (distance 7 > 5)",
     {"reasons": ["path PHB is beyond level PXB"]}),
    ("2.26.2", "2.28.9", "paths.cc",
     "GPU Direct RDMA Enabled for GPU 3 / HCA 1 (distance 5 <= 5), read 1 mode Default", {"near_pairs": 1}),
    ("2.29.2", "2.29.7", "paths.cc",
     "GPU Direct RDMA Disabled for GPU/0-3000 (rank 0) - NET/0-0 ( using PXN via GPU/0-4000, distance 9 > 6)",
     {"reasons": ["path SYS is beyond level P2C"]}),
    # Variables that were read: src/include/param.h, src/misc/param.cc, src/graph/paths.cc.
    ("2.4.2", "2.12.7", "param.h", "NCCL_NET_GDR_LEVEL set by environment to 3.",
     {"overrides": {"NCCL_NET_GDR_LEVEL": "3"}}),
    ("2.6.4", "2.6.4", "paths.cc", "NCCL_NET_GDR_LEVEL set from environment to PHB",
     {"overrides": {"NCCL_NET_GDR_LEVEL": "PHB"}}),
    ("2.7.3", NEWEST, "paths.cc", "NCCL_NET_GDR_LEVEL set by environment to PHB",
     {"overrides": {"NCCL_NET_GDR_LEVEL": "PHB"}}),
    ("2.6.4", NEWEST, "socket.cc", "NCCL_SOCKET_IFNAME set to eth1", {"overrides": {"NCCL_SOCKET_IFNAME": "eth1"}}),
    ("2.7.3", NEWEST, "init.cc", "NCCL_IB_HCA set to mlx5_9", {"overrides": {"NCCL_IB_HCA": "mlx5_9"}}),
    # The network that was chosen: src/init.cc, src/transport/net_ib.
    ("2.6.4", NEWEST, "init.cc", "Using network IB", {"networks": {"IB"}}),
    ("2.4.2", NEWEST, "net_ib", "NET/IB : No device found.", {"hosts_without_device": {"n"}}),
    ("2.4.2", "2.11.4", "net_ib.cc", "NET/IB : Using [0]mlx5_0:1/IB ; OOB ib0:10.0.0.1<0>", {"relaxed_ordering": None}),
    ("2.12.7", NEWEST, "net_ib", "NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",
     {"relaxed_ordering": True}),
    ("2.12.7", NEWEST, "net_ib", "NET/IB : Using [0]mlx5_0:1/RoCE ; OOB eth0:10.0.0.1<0>", {"relaxed_ordering": False}),
    # A plug-in that is not there, which every job without one says.
    ("2.4.2", "2.4.8", "init.cc", "NET/Plugin : No plugin found (libnccl-net.so).", {"reasons": []}),
    ("2.5.6", "2.10.3", "init.cc", "NET/Plugin : No plugin found (libnccl-net.so), using internal implementation",
     {"reasons": []}),
    ("2.17.1", "2.18.6", "net.cc", "NET/Plugin : No plugin found, using internal implementation", {"reasons": []}),
    ("2.22.3", "2.25.1", "net.cc", "NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
     {"reasons": []}),
    ("2.22.3", NEWEST, "net.cc",
     "NET/Plugin: libnccl-net.so: cannot open shared object file: No such file or directory", {"reasons": []}),
    ("2.26.2", NEWEST, "net_v10.cc", "NET/Plugin: Loaded net plugin IBext (v10)", {"reasons": []}),
)  # fmt: skip
"""First and last release, source file, INFO line, attributes of the log that is read."""

WARNINGS: tuple[tuple[str, str, str, str, str, bool], ...] = (
    ("2.4.2", "2.9.9", "net_ib.cc", "NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129",
     "not answered", True),
    ("2.10.3", "2.19.4", "net_ib.cc",
     "NET/IB : Got completion from peer 10.0.0.2<4> with error 4, opcode 8, len 0, vendor err 81", "ACS", True),
    ("2.20.3", "2.21.5", "net_ib.cc",
     "NET/IB : Got completion from peer 10.0.0.2<4> with status=5 opcode=0 len=0 vendor err 249 (Send)",
     "after another error", True),
    ("2.22.3", "2.28.3", "net_ib.cc",
     "NET/IB: Got completion from peer 10.0.0.2<4> with status=12 opcode=0 len=0 vendor err 129 (Send) hca mlx5_0",
     "not answered", True),
    ("2.28.7", NEWEST, "gin.cc",
     "NET/IB/GIN: Got completion from peer 10.0.0.2<4> with status=12 opcode=0 len=0 vendor err 129 (Send) hca mlx5_0",
     "not answered", True),
    ("2.29.2", NEWEST, "p2p.cc", "NET/IB: Got completion from peer 10.0.0.2<4> with status=IBV_WC_RETRY_EXC_ERR(12)",
     "not answered", True),
    ("2.4.2", "2.19.4", "net_ib.cc", "NET/IB : Got async event : GID table change", "addresses of a card", False),
    ("2.4.2", "2.19.4", "net_ib.cc", "NET/IB : Got async event : port error", "port went down", False),
    ("2.20.3", "2.22.3", "net_ib.cc", "NET/IB : mlx5_0:1 Got async event : port active", "came back", False),
    ("2.20.3", "2.22.3", "net_ib.cc", "NET/IB : mlx5_0:1 Got async event : local catastrophic error", "fatal", True),
    ("2.23.4", NEWEST, "common.cc", "NET/IB : mlx5_0:1 Got non-fatal async event: port error(10)", "went down", False),
    ("2.23.4", NEWEST, "common.cc", "NET/IB : mlx5_0:1 Got non-fatal async event: SM change(14)", "subnet", False),
    ("2.23.4", NEWEST, "common.cc", "NET/IB : mlx5_0:1 async fatal event: local catastrophic error", "fatal", True),
    ("2.28.3", NEWEST, "common.cc", "NET/IB : mlx5_0:1 GID table changed", "addresses of a card", False),
    ("2.4.2", "2.9.9", "socket.h", "Connect to 10.0.0.2<4000> failed : No route to host", "cannot be reached", True),
    ("2.10.3", "2.15.5", "socket.h", "Net : Connect to 10.0.0.2<4000> failed : Connection timed out",
     "cannot be reached", True),
    ("2.16.2", "2.23.4", "socket.cc", "socketStartConnect: Connect to 10.0.0.2<4> failed : Network is unreachable",
     "cannot be reached", True),
    ("2.16.2", "2.23.4", "socket.cc", "socketPollConnect: exceeded timeouts (20000)", "cannot be reached", True),
    ("2.20.3", "2.23.4", "socket.cc",
     "socketPollConnect: Connect to 10.0.0.2<4> returned 113(No route to host) errno 115(Operation now in progress)",
     "cannot be reached", True),
    ("2.27.3", NEWEST, "linux.cc", "socketStartConnect: connect to 10.0.0.2<4> failed : Connection refused",
     "cannot be reached", True),
    ("2.29.2", NEWEST, "linux.cc", "ncclOsSocketPollConnect to 10.0.0.2<4> failed with error No route to host",
     "cannot be reached", True),
    ("2.4.2", "2.11.4", "shm.h", "Error while creating shared memory segment nccl-shm-recv-1 (size 4460544)",
     "/dev/shm", True),
    ("2.12.7", "2.21.5", "shmutils.cc", "Error: failed to extend /dev/shm/nccl-BN4rQ2 to 9637892 bytes", "/dev/shm",
     True),
    ("2.22.3", NEWEST, "linux.cc",
     "Error: failed to extend /dev/shm/nccl-BN4rQ2 to 9637892 bytes, error: No space left on device (28)", "/dev/shm",
     True),
    ("2.10.3", "2.26.6", "net.cc", "Error: network AWS Libfabric not found.", "NCCL_NET names", True),
    ("2.27.3", NEWEST, "net.cc", "Failed to initialize any NET plugin", "no network to use", True),
    ("2.23.4", NEWEST, "init.cc", "Mismatched NCCL version detected : rank 0 version 22304 rank 1 version 22105",
     "unlike releases", True),
    ("2.30.3", NEWEST, "dev_runtime.cc",
     "NCCL library is too old. This application was compiled with NCCL version 2.31.2, but is running with NCCL",
     "another release", True),
    ("2.4.2", "2.28.9", "checks.h", "Cuda failure 'out of memory'", "no memory left", True),
    ("2.27.3", NEWEST, "nvls.cc", "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error",
     "multicast", True),
    ("2.5.6", "2.29.7", "init.cc", "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 3000", "same GPU",
     True),
    ("2.4.2", NEWEST, "bootstrap.cc", "Bootstrap : no socket interface found", "no network interface", True),
    ("2.26.2", NEWEST, "connect.cc",
     "NET/IB : Attempted to connect incompatible devices: [0]mlx5_0:1/IB and [0]mlx5_1:1/RoCE.", "unlike kind", True),
)  # fmt: skip
"""First and last release, source file, text of a WARN line, words of its meaning, whether the job ends."""

HARMLESS = (
    "[Service thread] shm close failed",
    "munmap of shared memory 0x7f0000000000 size 9637892 failed, error: Invalid argument (22)",
    "unlink shared memory /dev/shm/nccl-BN4rQ2 failed, error: No such file or directory (2)",
)
"""WARN lines at the end of a job that say nothing of /dev/shm's size. Source: src/misc/shmutils.cc, src/proxy.cc."""


def read(release: str, line: str, kind: str = "INFO") -> NcclLog:
    """The log of a release with this line, behind the line of its version."""
    return parse_nccl_log([f"NCCL version {release}+cuda12.4", f"n:1:2 [0] NCCL {kind} {line}"])


@pytest.mark.parametrize("row", LINES, ids=lambda row: f"{row[0]} {row[3][:60]}")
def test_a_line_is_read_as_the_release_means_it(row: tuple[str, str, str, str, dict[str, object]]) -> None:
    first, last, _, line, expected = row
    for release in (first, last):
        log = read(release, line)
        assert log.version == parse_version(release)
        assert {name: getattr(log, name) for name in expected} == expected, release


@pytest.mark.parametrize("row", WARNINGS, ids=lambda row: f"{row[0]} {row[3][:60]}")
def test_a_warning_has_its_meaning_in_each_release(row: tuple[str, str, str, str, str, bool]) -> None:
    first, last, _, line, words, ends = row
    for release in (first, last):
        log = read(release, line, "WARN")
        assert log.version == parse_version(release)
        ((text, known),) = log.warnings.items()
        assert text == line and known is not None and words in known.cause, release
        assert (log.fatal is not None) is ends


@pytest.mark.parametrize("line", HARMLESS)
def test_what_a_job_says_at_its_end_is_no_full_disk(line: str) -> None:
    log = read(NEWEST, line, "WARN")
    ((_, known),) = log.warnings.items()
    assert log.fatal is None and known is not None and known.kind == "harmless"


def test_a_plug_in_that_is_not_there_is_a_reason_for_sockets_alone() -> None:
    missing = "n:1:2 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal implementation"
    over = "n:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/{}/0"
    assert parse_nccl_log([missing, over.format("IB")]).reasons == []
    assert "no network plug-in" in parse_nccl_log([missing, over.format("Socket")]).reasons[0]


def test_before_2_6_a_level_is_a_number() -> None:
    assert [parse_level(text, (2, 5, 7)) for text in ("PHB", "0", "1", "2", "3", "4", "5")] == [
        None, "LOC", "PIX", "PXB", "PHB", "PHB", "SYS",
    ]  # fmt: skip
    assert parse_level("PHB", (2, 6, 4)) == parse_level("PHB") == "PHB"


def test_a_variable_is_read_from_its_first_release_to_its_last() -> None:
    assert unread("NCCL_SOCKET_RCVBUF", (2, 21, 5)) == "is read from NCCL 2.27 on, and this is 2.21.5"
    assert unread("NCCL_PROXY_PROFILE", (2, 23, 4)) == "is not read from NCCL 2.23 on"
    assert all(not unread(name, None) and not unread(name, FIRST_RELEASE[name]) for name in FIRST_RELEASE)
    assert set(LAST_RELEASE) <= set(FIRST_RELEASE)
    assert all(FIRST_RELEASE[name] <= last for name, last in LAST_RELEASE.items())


def test_renamed_variables_agree_with_the_releases() -> None:
    """A name that no release reads any longer was last read by the one before, and the new name is read since."""
    for old, renamed in RENAMED.items():
        if old in LAST_RELEASE:
            major, minor = LAST_RELEASE[old]
            assert renamed.since == f"NCCL {major}.{minor + 1}", old
            if renamed.new:
                assert FIRST_RELEASE[renamed.new] <= (major, minor + 1), old
        assert not old.startswith("NCCL_") or old not in FIRST_RELEASE or old in LAST_RELEASE, old


OF_OTHERS = ("NCCL_TESTS_", "NCCL_OFI_")
"""Beginnings of names that other programs read: nccl-tests, and aws-ofi-nccl's, which stand behind OFI_."""
NAMES = re.compile(r"(?<![A-Z_])NCCL_[A-Z0-9]+(?:_[A-Z0-9]+)*\b(?!_)")


def named_variables() -> dict[str, str]:
    """Variables of NCCL that the doctor, gdr-check and the readers say or set -> one file that does."""
    found: dict[str, str] = {}
    for folder in ("bench/doctor", "bench/selftest", "topology", "gradwire/cli"):
        for file in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                    found |= dict.fromkeys(NAMES.findall(node.value), str(file.relative_to(ROOT)))
    return found


def test_every_variable_that_is_named_to_a_user_is_one_that_nccl_reads() -> None:
    named = {name: file for name, file in named_variables().items() if not name.startswith(OF_OTHERS)}
    assert len(named) > 40
    unknown = {name: file for name, file in named.items() if name not in KNOWN and name not in RENAMED}
    assert not unknown, f"no release reads {unknown}; wanted names of {nccl_variables.__name__}.FIRST_RELEASE"
