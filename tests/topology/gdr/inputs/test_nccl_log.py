"""NCCL logs: channels by rank and direction, the reasons, and the two real logs that fool other tools."""

from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.topology.gdr.example import ExampleMachine
from gradwire.topology.gdr.inputs.nccl_log import parse_nccl_log, read_nccl_log
from gradwire.topology.gdr.model import CheckOutcome, Finding
from gradwire.topology.gdr.nccl import default_level, parse_level, parse_version
from gradwire.topology.gdr.stages.stage6_proof import nccl_log

LOGS = Path(__file__).resolve().parents[4].parent / "shared" / "fixtures" / "nccl_logs"
real = pytest.mark.skipif(not LOGS.is_dir(), reason=f"no {LOGS}")


def judged(lines: list[str], folder: Path) -> Finding:
    machine = ExampleMachine(folder)
    machine.log = lines
    return nccl_log(machine.host())


def channel(a: int, b: int, way: str, via: str = "NET/IB/0/GDRDMA") -> str:
    return f"n:1:2 [0] NCCL INFO Channel 00/0 : {a}[0] -> {b}[0] [{way}] via {via}"


@real
def test_enabled_for_every_card_and_used_by_none(tmp_path: Path) -> None:
    lines = (LOGS / "simllm-perlmutter-gdr-hca-ok-but-phb.log").read_text().splitlines()
    log = parse_nccl_log(lines)
    assert log.version == (2, 29, 7) and log.networks == {"AWS Libfabric"}
    assert log.hcas == {f"cxi{index}": True for index in range(4)} and log.nearest == "PHB"
    finding = judged(lines, tmp_path)
    assert finding.outcome is CheckOutcome.FAIL and "PHB" in finding.text and "4 NICs say Enabled" in finding.text


@real
def test_rdma_was_bought_and_sockets_are_used(tmp_path: Path) -> None:
    lines = (LOGS / "simllm-vastai-h200-socket-only.log").read_text().splitlines()
    finding = judged(lines, tmp_path)
    assert finding.outcome is CheckOutcome.FAIL and "Socket" in finding.text


def test_channels_are_counted_by_rank_and_direction(tmp_path: Path) -> None:
    lines = [channel(0, 8, "send"), channel(8, 0, "receive"), channel(0, 8, "send"), channel(1, 9, "send", "NET/IB/1")]
    lines += [channel(2, 3, "send", "P2P/CUMEM"), channel(0, 4, "receive", "NET/Socket/0")]
    log = parse_nccl_log(lines)
    assert dict(log.gdr_channels) == {(0, "send"): 2, (0, "receive"): 1}
    assert dict(log.staged_channels) == {(1, "send"): 1, (4, "receive"): 1}
    assert judged(lines, tmp_path).outcome is CheckOutcome.WARN


@pytest.mark.parametrize("via", ["NET/IB/0/GDRDMA", "NET/IB/0/GDRDMA(PCI)/Shared", "NET/AWS Libfabric/0/GDRDMA"])
def test_every_spelling_of_gdrdma(via: str, tmp_path: Path) -> None:
    lines = [channel(0, 1, "send", via), channel(1, 0, "receive", via)]
    assert judged(lines, tmp_path).outcome is CheckOutcome.PASS


@pytest.mark.parametrize(("given", "missing"), [("send", "receive"), ("receive", "send")])
@pytest.mark.parametrize("ranks", [1, 3])
def test_one_direction_proves_nothing_about_the_other(given: str, missing: str, ranks: int, tmp_path: Path) -> None:
    """The log of one rank, or of a grep: that all lines have GDRDMA does not mean that all channels have."""
    finding = judged([channel(rank, rank + 1, given) for rank in range(ranks)], tmp_path)
    assert finding.outcome is CheckOutcome.UNKNOWN and f"how ranks {missing}" in finding.text


def hca(word: str, number: int, network: str = "IB") -> str:
    device = f"HCA {number} 'mlx5_{number}'"
    return f"n:1:2 [0] NCCL INFO NET/{network} : GPU Direct RDMA {word.format(device)}"


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("Disabled for {}", ""),
        ("Disabled for {} (no module)", "(no module)"),
        ("disabled for {} (no DMABUF)", "(no DMABUF)"),
    ],
)
@pytest.mark.parametrize("staged", [False, True])
def test_cards_that_nccl_cannot_register_with_are_the_reason(
    word: str, reason: str, staged: bool, tmp_path: Path
) -> None:
    channels = [channel(0, 1, "send", "NET/IB/0"), channel(1, 0, "receive", "NET/IB/0")] if staged else []
    finding = judged([hca(word, 0), hca(word, 1), *channels], tmp_path)
    assert finding.outcome is CheckOutcome.FAIL
    assert f"Disabled for HCA mlx5_0, mlx5_1{' ' * bool(reason)}{reason}" in finding.text
    assert "nvidia_peermem" in finding.fix


@pytest.mark.parametrize("word", ["Enabled for {}", "(DMABUF) enabled for {}", "(nvidia-peermem) enable for {}"])
def test_cards_that_nccl_can_register_with_are_no_reason(word: str, tmp_path: Path) -> None:
    log = parse_nccl_log([hca(word, 0).rstrip("'")])
    assert log.hcas == {"mlx5_0": True} and log.reasons == []
    assert judged([hca(word, 0)], tmp_path).outcome is CheckOutcome.UNKNOWN


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("Disabled for GPU ca000 / HCA 0 (distance 7 > 4)", "path SYS is beyond level PXB"),  # 2.12 to 2.24
        ("Disabled for GPU 18000 / HCA 0 (distance 5 > 3)", "path SYS is beyond level PXB"),  # before 2.8
        ("Disabled for GPU 18000 / HCA 0 (distance 5 > 4)", "path PHB is beyond level PXB"),  # 2.8 to 2.11
        ("Disabled for GPU ca000 / HCA 0 (distance 6 > 4)", "path PHB or SYS is beyond level PXB"),  # 2.12 or before
        ("Disabled for GPU/0-1 (rank 0) - NET/0-0 (distance 8 > 6)", "path PHB is beyond level P2C"),  # from 2.29
        ("Disabled for GPU ca000 / HCA 0 (distance 31 > 30)", "path 31 is beyond level 30"),
    ],
)
@pytest.mark.parametrize("staged", [False, True])
def test_a_distance_is_the_reason_with_and_without_channels(
    line: str, names: str, staged: bool, tmp_path: Path
) -> None:
    """The log of somebody who cut out what matters has no version: the level's number tells whose numbers these are."""
    channels = [channel(0, 1, "send", "NET/IB/0")] if staged else []
    finding = judged([f"NCCL INFO GPU Direct RDMA {line}", *channels], tmp_path)
    assert finding.outcome is CheckOutcome.FAIL and names in finding.text


def test_some_pairs_within_the_level_are_a_warning(tmp_path: Path) -> None:
    lines = ["NCCL_NET_GDR_LEVEL set by environment to PHB"]
    lines += [f"NCCL INFO GPU Direct RDMA Disabled for GPU {gpu}8000 / HCA 0 (distance 5 > 4)" for gpu in (1, 3)]
    lines += ["NCCL INFO GPU Direct RDMA Enabled for GPU 86000 / HCA 0 (distance 4 <= 4), read 0"]
    finding = judged(lines, tmp_path)
    assert finding.outcome is CheckOutcome.WARN
    assert "2 of 3 GPU-NIC pairs" in finding.text and "path SYS is beyond level PHB" in finding.text


@pytest.mark.parametrize("lines", [
    [channel(0, 1, "send", "NET/Socket/0"), channel(1, 0, "receive", "NET/Socket/1/Shared")],
    [hca("Disabled for {}", 0, "Socket")],
])  # fmt: skip
def test_sockets_are_named_by_whichever_line_shows_them(lines: list[str], tmp_path: Path) -> None:
    finding = judged(lines, tmp_path)
    assert finding.outcome is CheckOutcome.FAIL and "Socket: RDMA is not used at all" in finding.text
    mixed = judged([*lines[:1], channel(0, 1, "send"), channel(1, 0, "receive")], tmp_path)
    assert mixed.outcome is (CheckOutcome.WARN if "Channel" in lines[0] else CheckOutcome.FAIL)


def test_one_direction_alone_is_a_warning_that_names_it(tmp_path: Path) -> None:
    finding = judged([channel(0, 1, "send"), channel(1, 0, "receive", "NET/IB/0")], tmp_path)
    assert finding.outcome is CheckOutcome.WARN and "rank 0 receive 0/1" in finding.text


def test_the_reason_is_named_whatever_the_numbers_of_the_release(tmp_path: Path) -> None:
    for release, number, level in (("2.12.12", 6, 4), ("2.26.2", 7, 5), ("2.27.3", 8, 5), ("2.29.7", 8, 6)):
        reason = f"GPU Direct RDMA Disabled for GPU ca000 / HCA 0 (distance {number} > {level})"
        lines = [f"NCCL version {release}+cuda12", f"NCCL INFO {reason}", channel(0, 1, "send", "NET/IB/0")]
        finding = judged(lines, tmp_path)
        assert finding.outcome is CheckOutcome.FAIL and "path PHB is beyond level P" in finding.text, finding


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        ([], CheckOutcome.UNKNOWN),
        (["NCCL INFO NET/IB : No device found."], CheckOutcome.FAIL),
        (
            ["NCCL INFO NET/0 :GPU/0-3000 (3/24.0/PHB)", "NCCL_NET_GDR_LEVEL set by environment to PHB"],
            CheckOutcome.UNKNOWN,
        ),
        (["NCCL INFO NET/0 :GPU/0-3000 (3/24.0/PIX)"], CheckOutcome.UNKNOWN),
        (["NCCL INFO Using network Socket", "NCCL INFO Using network IB"], CheckOutcome.UNKNOWN),
    ],
)
def test_without_channel_lines(lines: list[str], outcome: CheckOutcome, tmp_path: Path) -> None:
    assert judged(lines, tmp_path).outcome is outcome


def test_colours_cut_lines_and_wrong_encodings(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xff\xfe\x00NCCL\n\x1b[31m" + channel(0, 1, "send").encode() + b"\x1b[0m\n" + b"NCCL" * 100_000)
    assert read_nccl_log(path).gdr_channels.total() == 1
    with pytest.raises(OSError):
        read_nccl_log(tmp_path)


def test_a_long_log_is_read_in_part_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, said = tmp_path / "log", list[str]()
    path.write_text(channel(0, 1, "send") + "\n" + "NCCL INFO Channel 00/08 : 0 1 2 3\n" * 300_000)
    log = read_nccl_log(path, said.append)
    assert (log.lines, log.truncated) == (300_001, False)
    assert said[0].startswith("reading the log: 2 of ") and len(said) == 4
    monkeypatch.setattr(f"{read_nccl_log.__module__}._MAX_NBYTES", 1 << 20)
    log = read_nccl_log(path)
    assert log.truncated and log.lines < 40_000 and log.gdr_channels.total() == 1
    monkeypatch.setattr(f"{read_nccl_log.__module__}._MAX_NBYTES", 256 << 20)
    monkeypatch.setattr(f"{read_nccl_log.__module__}._MAX_SECONDS", -1.0)
    assert read_nccl_log(path).truncated
    path.write_text("\n".join([channel(0, 1, "send"), channel(0, 1, "receive")] + ["NCCL"] * 70_000))
    host = ExampleMachine(tmp_path / "machine").host()
    host.log = read_nccl_log(path)
    assert "in the first 65536 lines (the log goes on)" in nccl_log(host).text


def test_versions_and_levels() -> None:
    assert parse_version("2.27.3+cuda12.9") == parse_version("22703") == (2, 27, 3)
    assert parse_version("2.7") == (2, 7) and parse_version("cheese") is None is parse_version(None)
    assert [parse_level(text) for text in ("phb", "0", "5", "6", "", "NODE")] == ["PHB", "LOC", "SYS", None, None, None]
    assert [default_level(version) for version in (None, (2, 20), (2, 26), (2, 27))] == ["PXB", "PXB", "PXB", "P2C"]


HEALTHY_CHANNELS = [channel(0, 1, "send"), channel(1, 0, "receive")]


@pytest.mark.parametrize(
    ("line", "cause", "fix"),
    [
        ("Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory", "locked memory", "memlock"),
        ("Call to ibv_reg_mr failed with error Bad address", "neither peer memory nor dma-buf", "M1"),
        ("Call to ibv_modify_qp failed with 19 No such device, on dev mlx5_1:1, curr state INIT", "GID", "show_gids"),
        ("Call to ibv_modify_qp failed with 22 Invalid argument, on dev mlx5_1:1", "GID_INDEX", "unset"),
        ("Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1", "rails", "NCCL_CROSS_NIC"),
        ("Call to ibv_create_qp failed with error Cannot allocate memory", "queue pair", "ulimit"),
        (
            "NET/IB : Got completion from peer 10.0.0.2<4> with status=12 opcode=0 len=0 vendor err 129",
            "answered",
            "RoCE",
        ),
        (
            "NET/IB: Got completion from peer 10.0.0.2<4> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0)",
            "answered",
            "NCCL_IB_TIMEOUT",
        ),
        (
            "NET/IB : Got completion from peer 10.0.0.2<4> with error 12, opcode 0, len 0, vendor err 129",
            "answered",
            "RoCE",
        ),
        ("NET/IB : Got completion from peer 10.0.0.2<4> with status=4 opcode=32578", "ACS", "P5"),
        ("Error : too many XML nodes (max 1024)", "more devices", "NCCL_TOPO_FILE"),
        ("Error: network AWS Libfabric not found.", "NCCL_NET", "LD_LIBRARY_PATH"),
        ("Error : XML parser is limited to 1024 nodes", "more devices", "NCCL_TOPO_FILE"),
        ("XML Topology has wrong version 2, 1 needed", "does not fit this NCCL", "unset"),
        ("Could not find any local path from gpu 3 to net.", "does not fit this machine", "NCCL_TOPO_DUMP_FILE"),
    ],
)
@pytest.mark.parametrize("channels", [[], HEALTHY_CHANNELS])
def test_a_warning_that_ends_the_job_outweighs_channels_that_were_made(
    line: str, cause: str, fix: str, channels: list[str], tmp_path: Path
) -> None:
    warned = f"n1:1:2 [0] transport/net_ib.cc:1 NCCL WARN {line}"
    finding = judged([*channels, warned, warned.replace("n1:", "n2:")], tmp_path)
    assert finding.outcome is CheckOutcome.FAIL, finding
    assert cause in finding.text, finding
    assert fix in f"{finding.text} {finding.fix}", finding


def test_a_warning_that_nobody_knows_is_shown_where_no_channel_follows(tmp_path: Path) -> None:
    finding = judged(["NCCL version 2.27.3", "n1:1:2 [0] src/new.cc:1 NCCL WARN never seen before"], tmp_path)
    assert finding.outcome is CheckOutcome.WARN and "never seen before" in finding.text


def test_a_host_without_a_card_counts_where_it_uses_a_network(tmp_path: Path) -> None:
    """One whose channels are all inside it, as a login node's, needs none; one that leaves itself over sockets does."""
    no_card = "c:3:4 [0] NCCL INFO NET/IB : No device found."
    healthy = [f"{host}:1:2 [0] NCCL INFO {line}" for host, line in zip("ab", HEALTHY_CHANNELS, strict=True)]
    inside = "c:3:4 [0] NCCL INFO Channel 00/0 : 2[0] -> 3[1] via P2P/CUMEM"
    assert judged([*healthy, no_card, inside], tmp_path).outcome is CheckOutcome.PASS
    over_sockets = f"c:3:4 [0] NCCL INFO {channel(2, 0, 'send', 'NET/Socket/0')}"
    finding = judged([*healthy, no_card, over_sockets], tmp_path)
    assert finding.outcome is CheckOutcome.FAIL
    assert "on c" in finding.text and "at all" not in finding.text


def test_a_hint_and_a_retry_end_nothing(tmp_path: Path) -> None:
    lines = [
        "n:1:2 [0] NCCL INFO Call to ibv_modify_qp failed with 110 Connection timed out, on dev x, retrying 1/35",
        "n:1:2 [0] NCCL INFO HINT: In many cases this error occurs when ACS is enabled which would break GPU Direct",
    ]
    assert judged([*HEALTHY_CHANNELS, *lines], tmp_path).outcome is CheckOutcome.PASS


def test_a_warning_that_nobody_knows_keeps_a_pass_from_being_one(tmp_path: Path) -> None:
    line = "n:1:2 [0] misc/foo.cc:7 NCCL WARN The frobnicator gave up"
    finding = judged([*HEALTHY_CHANNELS, line], tmp_path)
    assert finding.outcome is CheckOutcome.WARN and "frobnicator" in finding.text


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("NCCL INFO NET/OFI No eligible providers were found", "no provider"),
        ("NCCL INFO NET/OFI Could not disable CUDA API usage for HMEM, disabling GDR", "switched GPUDirect RDMA off"),
        ("NCCL WARN Failed to initialize any NET plugin", "plug-in was not loaded"),
        ("NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.", "no network plug-in"),
    ],
)
def test_a_plug_ins_own_reason_is_told(line: str, cause: str, tmp_path: Path) -> None:
    staged = [channel(0, 1, "send", "NET/Socket/0"), channel(1, 0, "receive", "NET/Socket/0")]
    finding = judged([f"n:1:2 [0] {line}", *staged], tmp_path)
    assert finding.outcome is CheckOutcome.FAIL and cause in finding.text, finding
    assert "libnccl-net" in finding.fix or "fi_info" in finding.fix, finding


LOCAL = "n:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"
NO_CARD = "n:1:2 [0] NCCL INFO NET/IB : No device found."


def test_one_node_without_a_card_is_no_failure(tmp_path: Path) -> None:
    for others in ([], ["n:1:2 [0] NCCL INFO Using network Socket"]):
        finding = judged([NO_CARD, *others, LOCAL, LOCAL], tmp_path)
        assert finding.outcome is CheckOutcome.UNKNOWN and "inside a host" in finding.text
        assert ("sockets" in finding.text) is bool(others)


def test_a_line_of_one_host_is_not_everybodys(tmp_path: Path) -> None:
    """A host whose plug-in serves it says "No device found" of verbs, and its channels use GPUDirect RDMA."""
    assert judged([NO_CARD, *HEALTHY_CHANNELS], tmp_path).outcome is CheckOutcome.PASS
    other = NO_CARD.replace("n:1", "m:1")
    assert judged([other, *HEALTHY_CHANNELS], tmp_path).outcome is CheckOutcome.FAIL


WATCHDOG = (
    "[rank1]:[E1 ProcessGroupNCCL.cpp:633] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
)
IMEX = """n0:1:2 [0] misc/cudawrap.cc:9 NCCL WARN Cuda failure 800 'operation not permitted'
n0:1:2 [0] mnnvl.cc:63 NCCL WARN MNNVL (cliqueSize 8) is available but not working on this system. Check the IMEX \
channel configuration (/dev/nvidia-caps-imex-channels). Set NCCL_MNNVL_ENABLE=0 to ignore this issue."""
CLOSED = "n0:1:2 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer n1<41234>"


@pytest.mark.parametrize(
    ("line", "cause", "fix"),
    [
        (WATCHDOG, "a rank did not come", "GRADWIRE_WATCH=1"),
        (CLOSED, "another rank had ended before", "first error of that host"),
        (
            "n0:1:2 [0] init.cc:943 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 3d000",
            "same GPU",
            "LOCAL_RANK",
        ),
        ("n0:1:2 [0] include/alloc.h:228 NCCL WARN Cuda failure 2 'out of memory'", "no memory left", "smaller batch"),
        (
            IMEX,
            "NVLink between hosts does not work",
            "nvidia-imex-ctl -N",
        ),
        ("n0:1:2 [0] alloc.h:9 NCCL WARN Cuda failure 800 'operation not permitted'", "the driver refuses", "CUMEM"),
        (
            "n0:1:2 [0] transport/nvls.cc:244 NCCL WARN Cuda failure 801 'operation not supported'",
            "multicast",
            "one run with NCCL_NVLS_ENABLE=0",
        ),
        (
            "n0:1:2 [0] init.cc:9 NCCL WARN Mismatched NCCL version detected : rank 0 version 22703 rank 1 version 228",
            "unlike releases",
            "one environment",
        ),
    ],
)
def test_what_ended_a_job_outside_the_network_is_named_too(line: str, cause: str, fix: str, tmp_path: Path) -> None:
    lines = [channel(0, 1, "send"), channel(0, 1, "receive"), line]
    finding = judged(lines, tmp_path)
    assert finding.outcome is CheckOutcome.FAIL and cause in finding.text and fix in finding.fix


def test_what_follows_from_another_error_gives_way_to_it(tmp_path: Path) -> None:
    memlock = "n1:1:2 [0] misc/ibvwrap.cc:297 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory"
    for lines in ([CLOSED, WATCHDOG, memlock], [memlock, CLOSED, WATCHDOG]):
        assert "locked memory" in judged([channel(0, 1, "send"), *lines], tmp_path).text
    path = tmp_path / "job.log"
    path.write_text("\n".join([channel(0, 1, "send"), channel(0, 1, "receive"), WATCHDOG]))
    assert read_nccl_log(path).fatal is not None, "the filter of long logs lets it pass"


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "the file is empty"), ("epoch 1 loss 2.3\nepoch 2 loss 2.2\n", "2 lines, none of them NCCL's"),
     ("CA 'mlx5_0'\n\tCA type: MT4129\n", "it looks like `ibstat`")],
)  # fmt: skip
def test_a_file_that_nccl_did_not_write_is_no_log(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(text)
    machine = ExampleMachine(tmp_path)
    host = replace(machine.host(), log=read_nccl_log(path))
    finding = nccl_log(host)
    assert finding.outcome is CheckOutcome.UNKNOWN and words in finding.text and "NCCL_DEBUG=INFO" in finding.fix


def test_a_plug_ins_note_brings_its_own_fix(tmp_path: Path) -> None:
    lines = ["n0:1:2 [0] NCCL INFO NET/OFI Could not disable CUDA API usage for HMEM, disabling GDR",
             channel(0, 1, "send", "NET/AWS Libfabric/0")]  # fmt: skip
    assert judged(lines, tmp_path).fix.startswith("fi_info -p efa -c FI_HMEM")


AT = "hostA:100:200 [0]"
RCCL = "RCCL version 2.7.8+hip3.9"
STAGED = [channel(0, 1, "send", "NET/IB/0"), channel(1, 0, "receive", "NET/IB/0")]
SOCKETS = [channel(0, 1, "send", "NET/Socket/0"), channel(1, 0, "receive", "NET/Socket/0")]
GID = f"{AT} transport/net_ib.cc:123 NCCL WARN NET/IB : mlx5_0:1 Got async event : GID table change"
GIN = f"{AT} NCCL INFO Unable to use GIN: Peermem is not supported, nor DMA-BUF."
VENDOR = "Got completion from peer 10.1.0.2<36315> with status=12 opcode=32698 len=32696 vendor err 129 (Send)"

STATED = {
    "a completion error of NCCL 2.8, without the peer": (
        [*HEALTHY_CHANNELS, f"{AT} net_ib.cc:818 NCCL WARN NET/IB : Got completion with error 4, opcode 8983, len 0"],
        CheckOutcome.FAIL, "the job failed: the card could not reach GPU memory", "P5",
    ),
    "a status that no entry names": (
        [*HEALTHY_CHANNELS, f"{AT} NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4> with status=7 opcode=0"],
        CheckOutcome.FAIL, "a transfer between two cards failed", "ibv_wc_status",
    ),
    "rings of NCCL 2.4": (
        ["h:1:2 [7] NCCL INFO Ring 00 : 7[7000] -> 8[4000] [send] via NET/IB/0",
         "h:1:2 [0] NCCL INFO Ring 00 : 7[7000] -> 8[4000] [receive] via NET/IB/0"],
        CheckOutcome.FAIL, "0 of 2 network channels use GDRDMA", "",
    ),
    "rings of NCCL 2.5, without bus ids": (
        ["h:1:2 [0] NCCL INFO Ring 00 : 1 -> 0 [receive] via NET/IB/0/GDRDMA",
         "h:1:2 [1] NCCL INFO Ring 00 : 1 -> 0 [send] via NET/IB/0/GDRDMA"],
        CheckOutcome.PASS, "all 2 network channels of 2 ranks", "",
    ),
    "an AMD GPU without peer memory": (
        ["br1:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB eth0:10.1.0.1<0>", RCCL, hca("Disabled for {}", 0),
         *STAGED],
        CheckOutcome.FAIL, "Disabled for HCA mlx5_0", "amdgpu",
    ),
    "an AMD GPU whose memory cannot be registered": (
        [RCCL, f"{AT} NCCL WARN Call to ibv_reg_mr failed with error Bad address"],
        CheckOutcome.FAIL, "could not be registered", "amdgpu",
    ),
    "the number behind the error": (
        [f"{AT} ibp_plugin.c:900 NCCL WARN NET/IBP:{VENDOR}"], CheckOutcome.FAIL, "vendor err 129 (Send)", "",
    ),
    "NVLink between hosts": (
        [f"g{1 + rank // 4}:1:2 [0] NCCL INFO Channel 00/0 : {rank}[0] -> {(rank + 4) % 8}[0] via P2P/MNNVL"
         for rank in range(8)],
        CheckOutcome.INFO, "8 channels of 2 hosts go over NVLink between hosts", "",
    ),
    "a reason of NCCL 2.29": ([GIN, *STAGED], CheckOutcome.FAIL, "neither peer memory nor dma-buf", "nvidia_peermem"),
    "a variable that names no card": (
        [f"{AT} NCCL INFO NCCL_IB_HCA set to mlx5_9", f"{AT} NCCL INFO NET/IB : No device found.", *SOCKETS],
        CheckOutcome.FAIL, "the log has NCCL_IB_HCA=mlx5_9", "in place of mlx5_9",
    ),
    "a variable that switches RDMA off": (
        [f"{AT} NCCL INFO NCCL_IB_DISABLE set by environment to 1.", *SOCKETS],
        CheckOutcome.FAIL, "the log has NCCL_IB_DISABLE=1", "without NCCL_IB_DISABLE",
    ),
    "addresses that changed": ([*HEALTHY_CHANNELS, GID], CheckOutcome.WARN, "addresses of a card changed", "show_gids"),
    "memory that is freed twice at the end": (
        [*HEALTHY_CHANNELS, f"{AT} proxy.cc:1500 NCCL WARN [Service thread] shm close failed"],
        CheckOutcome.PASS, "all 2 network channels", "",
    ),
    "a warning beside a failure": (
        [*STAGED, f"{AT} NCCL WARN The frobnicator gave up"], CheckOutcome.FAIL, "The frobnicator gave up", "",
    ),
    "what torch says of it": (
        ["torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1970, unhandled system error"],
        CheckOutcome.FAIL, "torch reports that NCCL failed", "NCCL_DEBUG",
    ),
    "another CUDA error": (
        [*HEALTHY_CHANNELS, f"{AT} enqueue.cc:1 NCCL WARN Cuda failure 700 'an illegal memory access was encountered'"],
        CheckOutcome.FAIL, "a call of CUDA failed", "xid",
    ),
}  # fmt: skip
"""Case -> lines of a log, the outcome, words of the finding, words of the fix."""


@pytest.mark.parametrize("case", STATED)
def test_what_the_log_states_is_used(case: str, tmp_path: Path) -> None:
    lines, outcome, said, fix = STATED[case]
    for host, suffix in ((judged(lines, tmp_path / "lines"), ""), (_from_file(lines, tmp_path), " from a file")):
        assert host.outcome is outcome, (case + suffix, host)
        assert said in host.text and fix in host.fix, (case + suffix, host)
        if RCCL in lines:
            assert "nvidia" not in host.fix.lower() and "M1" not in host.fix, host


@pytest.mark.parametrize("before", ["", "[default{}]:", "{}: ", "[1,{}]<stdout>:", "g{} | ", "[2026-11-29 02:00:00] "])
def test_a_host_is_known_behind_what_a_launcher_puts_before_its_lines(before: str) -> None:
    lines = [f"{before.format(rank)}g{rank}:1:2 [0] NCCL INFO Channel 00/0 : {rank}[0] -> {1 - rank}[0] via P2P/MNNVL"
             for rank in range(2)]  # fmt: skip
    assert parse_nccl_log(lines).hosts_with_local == {"g0", "g1"}


def _from_file(lines: list[str], folder: Path) -> Finding:
    """The finding of the same lines read from a file, where lines without interest are skipped."""
    (folder / "log").write_text("\n".join(lines))
    host = ExampleMachine(folder / "file").host()
    host.log = read_nccl_log(folder / "log")
    return nccl_log(host)


def test_a_long_quotation_is_cut_at_a_blank_and_marked(tmp_path: Path) -> None:
    words = " ".join(f"word{number}" for number in range(100, 200))
    text = judged([f"{AT} NCCL WARN {words}"], tmp_path).text
    quoted = text.partition("NCCL warned: ")[2]
    assert quoted.endswith(" ...") and quoted.removesuffix(" ...") in words
    assert set(quoted.removesuffix(" ...").split()) <= set(words.split())
