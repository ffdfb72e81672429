"""What a rank learns of its own machine, and how little of this folder that takes."""

import subprocess
import sys

import pytest

from gradwire.topology.graph import Machine, Nic, Port
from gradwire.topology.host_summary import host_summary
from gradwire.topology.levels import levels_of
from gradwire.topology.presets import dgx_h100
from gradwire.topology.readers import detect
from gradwire.topology.readers.detect import detect_machine

OFFLINE = {"files", "lspci", "smi", "nccl_xml", "xml_tree"}
"""Readers of files that people give to `gradwire topo`; a rank reads none."""


def loaded(script: str) -> set[str]:
    """The modules of topology that a fresh process has after a script."""
    script += "\nimport sys; print([name for name in sys.modules if name.startswith('gradwire.topology.')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name.removeprefix("gradwire.topology.") for name in eval(done.stdout)}


def test_the_summary_is_that_of_the_whole_machine() -> None:
    summary, (intra, inter) = host_summary(0), levels_of(detect_machine())
    assert summary.intra_node == intra.bytes_per_second
    assert summary.inter_node == inter.bytes_per_second
    assert host_summary(None).nic is None and host_summary(None).fastest == summary.fastest


@pytest.mark.parametrize(("bond", "above", "wanted"), [
    (None, None, "eth1"),
    ("bond0", None, "bond0"),
    (None, "eth0", "eth0"),
    ("bond0", "br0", "br0"),
])  # fmt: skip
def test_what_stands_before_a_port_has_its_address(
    monkeypatch: pytest.MonkeyPatch, bond: str | None, above: str | None, wanted: str
) -> None:
    port = Port(name="eth1", interfaces=("eth1",), bond=bond, above=above)
    monkeypatch.setattr(detect, "detect_machine", lambda: Machine(nics=(Nic(key="eth1", ports=(port,)),)))
    assert host_summary(0).interface == wanted


def test_a_rank_whose_gpu_nobody_can_tell_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "detect_machine", dgx_h100)
    summary = host_summary(0, {"CUDA_VISIBLE_DEVICES": "MIG-41b36412"})
    assert summary.nic is None and summary.interface is None and "MIG-41b36412" in summary.nic_unknown
    for known in ({}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "3"}):
        assert host_summary(0, known).nic_unknown == ""


def test_importing_it_loads_nothing_else() -> None:
    assert loaded("import gradwire.topology.host_summary") == {"cluster", "host_summary"}


def test_a_rank_loads_no_reader_of_files() -> None:
    names = loaded("from gradwire.topology.host_summary import host_summary; host_summary(0)")
    assert not {f"readers.{name}" for name in OFFLINE} & names
    assert not any(name.startswith(("show", "gdr")) for name in names)


def test_the_rates_are_those_of_the_gpus_that_the_job_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of eight GPUs drive two of eight cards, and are planned with these."""
    monkeypatch.setattr(detect, "detect_machine", dgx_h100)
    whole, pair = host_summary(0, {}), host_summary(0, {"CUDA_VISIBLE_DEVICES": "2,5"})
    assert (whole.nics, pair.nics) == (8, 2)
    assert (whole.inter_node, pair.inter_node) == (8 * 48e9, 2 * 48e9)
    assert (pair.nic, pair.intra_node) == ("mlx5_2", whole.intra_node)
