"""Topology files that cloud images ship: with one in force, distances are the file's."""

import re
from pathlib import Path

import pytest

from gradwire.topology.gdr.example import GPU, NIC, ExampleMachine
from gradwire.topology.gdr.inputs.topology_file import TAGS, file_path_type, read_positions

XML = Path(__file__).resolve().parents[4].parent / "shared" / "fixtures" / "nccl_xml"
real = pytest.mark.skipif(not XML.is_dir(), reason=f"no {XML}")


def distances(name: str) -> list[str]:
    """Each GPU's nearest NIC, by name, in a real file; GPU and NIC are told by their PCI class."""
    text = (XML / name).read_text()
    places = read_positions(re.findall(TAGS, text))
    pci = re.findall(r'<pci busid="([^"]+)" class="0x0(2|3)', text)
    gpus, nics = ([bus_id.lower() for bus_id, kind in pci if kind == digit] for digit in "32")
    order = ["PIX", "PXB", "PHB", "SYS"]
    return [min((str(file_path_type(places, gpu, nic)) for nic in nics), key=order.index) for gpu in gpus]


@real
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("azure-ndv4-topo.xml", ["PIX"] * 8),
        ("aws-p4d-24xl-topo.xml", ["PIX"] * 8),
        ("azure-ndv2-topo.xml", ["PHB"] * 4 + ["SYS"] * 4),
        ("simllm-perlmutter-a100x4-cxi.xml", ["PHB"] * 4),
    ],
)
def test_real_files(name: str, expected: list[str]) -> None:
    assert sorted(distances(name)) == sorted(expected)


def test_a_virtual_machine_with_a_file_is_judged_by_it(tmp_path: Path) -> None:
    machine = ExampleMachine(tmp_path)
    host = machine.host()
    assert host.distances[GPU, NIC] == "PIX"
    far = (
        f'<cpu numaid="0"><pci busid="{GPU}" class="0x030200"/></cpu><cpu numaid="1"><pci busid="{NIC.upper()}"/></cpu>'
    )
    machine.write("opt/topo.xml", f'<system version="1">{far}</system>')
    machine.environment = {"NCCL_TOPO_FILE": "/opt/topo.xml"}
    assert machine.host().distances[GPU, NIC] == "SYS"
    machine.environment = {}
    machine.write("var/run/nvidia-topologyd/virtualTopology.xml", f'<system version="1">{far}</system>')
    assert machine.host().distances[GPU, NIC] == "SYS"


def test_broken_files_say_nothing() -> None:
    deep = ['<pci busid="0000:00:00.0">'] * 100_000
    assert len(read_positions(deep)) == 1
    assert read_positions(["</pci>", "</cpu>", "<pci>", "<cpu", '<pci busid="">']) == {}
