"""NCCL logs: channels by rank and direction, the reasons, and the two real logs that fool other tools."""

from pathlib import Path

import pytest

from gradwire.topology.gdr.example import ExampleMachine
from gradwire.topology.gdr.inputs.nccl_log import parse_nccl_log, read_nccl_log
from gradwire.topology.gdr.model import CheckOutcome, Finding
from gradwire.topology.gdr.nccl import default_level, parse_level, parse_version, path_name
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
    assert judged([channel(0, 1, "send", via)], tmp_path).outcome is CheckOutcome.PASS


def test_one_direction_alone_is_a_warning_that_names_it(tmp_path: Path) -> None:
    finding = judged([channel(0, 1, "send"), channel(1, 0, "receive", "NET/IB/0")], tmp_path)
    assert finding.outcome is CheckOutcome.WARN and "rank 0 receive 0/1" in finding.text


def test_the_reason_is_named_whatever_the_numbers_of_the_release(tmp_path: Path) -> None:
    for release, number, level in (("2.12.12", 6, 4), ("2.26.2", 7, 5), ("2.27.3", 8, 6)):
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


def test_versions_and_levels() -> None:
    assert parse_version("2.27.3+cuda12.9") == parse_version("22703") == (2, 27, 3)
    assert parse_version("2.7") == (2, 7) and parse_version("cheese") is None is parse_version(None)
    assert [parse_level(text) for text in ("phb", "0", "5", "6", "", "NODE")] == ["PHB", "LOC", "SYS", None, None, None]
    assert [default_level(version) for version in (None, (2, 20), (2, 26), (2, 27))] == ["PXB", "PXB", "PXB", "P2C"]
    assert path_name(7, (2, 26)) == "PHB" and path_name(99, (2, 26)) is None and path_name(3, None) is None
