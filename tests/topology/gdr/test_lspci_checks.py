"""The text of lspci: real machines, and the ACS alarm that a grep raises and the checker does not."""

from pathlib import Path

import pytest

from gradwire.topology.gdr.host import Host
from gradwire.topology.gdr.inputs.files import Files
from gradwire.topology.gdr.model import CheckOutcome
from gradwire.topology.gdr.runner import exit_code, run_checks
from gradwire.topology.gdr.stages.stage4_path import access_control
from gradwire.topology.readers.lspci import read_tree as read_lspci_tree

LSPCI = Path(__file__).resolve().parents[3].parent / "shared" / "fixtures" / "lspci"
real = pytest.mark.skipif(not LSPCI.is_dir(), reason=f"no {LSPCI}")


def read(name: str) -> list[str]:
    return (LSPCI / name).read_text(errors="replace").splitlines(keepends=True)


@real
def test_h100_pairs_and_registers(tmp_path: Path) -> None:
    tree = read_lspci_tree(read("h100-sxm-pex890-lspci-vvv.txt"))
    host = Host(Files(tmp_path), tree)
    assert len(tree.functions) == 517 and len(host.gpus) == 8
    pairs = {(gpu[5:7], nic[5:7]) for gpu, nic in host.best_pairs}
    straight = {
        ("19", "1a"),
        ("3b", "3c"),
        ("4c", "4d"),
        ("5d", "5e"),
        ("9b", "9c"),
        ("bb", "bc"),
        ("cb", "cc"),
        ("db", "dc"),
    }
    assert pairs == straight | {("19", "1b"), ("9b", "9d")}
    assert {host.distances[pair] for pair in host.best_pairs} == {"PIX"}
    for gpu in host.gpus:
        assert (gpu.current_gigatransfers, gpu.current_width, max(gpu.bar_nbytes)) == (32.0, 16, 128 << 30)
        assert gpu.config is not None and gpu.config.max_read_request_nbytes == 4096 and gpu.config.relaxed_ordering
    assert {gpu.numa_node for gpu in host.gpus[:4]} == {0} and {gpu.numa_node for gpu in host.gpus[4:]} == {1}


@real
def test_h100_acs_is_on_elsewhere_and_passes(tmp_path: Path) -> None:
    lines = read("h100-sxm-pex890-lspci-vvv.txt")
    assert any("ACSCtl" in line and "ReqRedir+" in line for line in lines), "what a grep would raise the alarm for"
    finding = access_control(_bare_metal(tmp_path, lines))
    assert finding.outcome is CheckOutcome.PASS
    assert {each.outcome for each in finding.pairs.values()} == {CheckOutcome.PASS, CheckOutcome.INFO}


@real
def test_h100_acs_on_the_path_fails_for_that_pair_alone(tmp_path: Path) -> None:
    lines = read("h100-sxm-pex890-lspci-vvv.txt")
    start = next(index for index, line in enumerate(lines) if line.startswith("39:02.0"))
    at = next(index for index in range(start, len(lines)) if "ACSCtl" in lines[index])
    lines[at] = lines[at].replace("ReqRedir-", "ReqRedir+")
    finding = access_control(_bare_metal(tmp_path, lines))
    failed = {pair for pair, each in finding.pairs.items() if each.outcome is CheckOutcome.FAIL}
    assert finding.outcome is CheckOutcome.FAIL and failed == {("0000:3b:00.0", "0000:3c:00.0")}
    assert "setpci -s 0000:39:02.0 ECAP_ACS+0x6.w=0000" in finding.fix


def _bare_metal(folder: Path, lines: list[str]) -> Host:
    (folder / "proc").mkdir()
    (folder / "proc/cpuinfo").write_text("flags : fpu\n")
    (folder / "sys/class/dmi/id").mkdir(parents=True)
    return Host(Files(folder), read_lspci_tree(lines))


@real
def test_text_without_the_rest_of_the_machine_is_unknown(tmp_path: Path) -> None:
    host = Host(Files(tmp_path), read_lspci_tree(read("h100-sxm-pex890-lspci-vvv.txt")))
    assert exit_code(host, run_checks(host)) == 3


@real
def test_azure_virtual_machine_has_no_tree() -> None:
    tree = read_lspci_tree(read("azure-nd-a100v4-lspci-nn.txt"))
    gpus = [f for f in tree.of_class(0x03) if f.vendor == 0x10DE]
    assert len(gpus) == 8 and {gpu.device for gpu in gpus} == {0x20B2}
    assert sum(f.vendor == 0x15B3 and f.class_code == 0x020700 for f in tree.functions.values()) == 8
    assert sum(f.vendor == 0x10DE and f.class_code == 0x068000 for f in tree.functions.values()) == 6


def test_buses_in_a_circle_and_foreign_text() -> None:
    ring = ["01:00.0 PCI bridge: X\n", "\tBus: primary=02, secondary=01, subordinate=02\n"]
    ring += ["02:00.0 PCI bridge: Y\n", "\tBus: primary=01, secondary=02, subordinate=02\n"]
    assert {f.parents for f in read_lspci_tree(ring).functions.values()} == {None}
    assert read_lspci_tree(["<html>", "\x00\xff", ""]).problems


def test_not_root_means_unknown() -> None:
    text = ["01:00.0 Ethernet controller: Mellanox Technologies\n", "\tCapabilities: <access denied>\n"]
    config = read_lspci_tree(text).functions["0000:01:00.0"].config
    assert config is not None and config.header_only and config.acs_redirect is None
