from pathlib import Path

import pytest

from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import PcieLink
from gradwire.topology.labels import model_name, pcie_text
from gradwire.topology.paths import Distances, PathType
from gradwire.topology.readers import lspci
from gradwire.topology.readers.pci import path_type

ROOT = """00:01.0 PCI bridge: Intel Corporation Device 352a (rev 04)
\tNUMA node: 0
\tBus: primary=00, secondary=01, subordinate=04, sec-latency=0
"""
GPU = """05:00.0 3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev a1)
\tNUMA node: 0
\t\tLnkSta:\tSpeed 32GT/s (ok), Width x16 (ok)
\tKernel driver in use: nvidia
"""


def test_the_h100_server_pairs_each_gpu_with_the_nic_on_its_switch(fixtures: Path) -> None:
    machine = lspci.read((fixtures / "lspci/h100-sxm-pex890-lspci-vvv.txt").read_text())
    distances = Distances(machine)
    nearest = {gpu.key[5:7]: distances.nearest_nics(gpu) for gpu in machine.gpus}
    assert {path for path, _ in nearest.values()} == {PathType.PIX}
    found = {gpu: [nic.key[5:7] for nic in nics] for gpu, (_, nics) in nearest.items()}
    assert found == {
        "19": ["1a", "1b"], "3b": ["3c"], "4c": ["4d"], "5d": ["5e"],
        "9b": ["9c", "9d"], "bb": ["bc"], "cb": ["cc"], "db": ["dc"],
    }  # fmt: skip
    assert len(machine.nvswitches) == 4
    assert [cpu.numa for cpu in machine.cpus] == [0, 1]
    assert {gpu.pcie for gpu in machine.gpus} == {PcieLink(gigatransfers_per_second=32.0, lanes=16)}
    dual = {nic.key: nic.functions for nic in machine.nics if nic.functions > 1}
    assert dual == {"0000:01:00.0": 2, "0000:1b:00.0": 2, "0000:9d:00.0": 2}


def test_a_listing_without_details_knows_devices_and_no_distance(fixtures: Path) -> None:
    machine = lspci.read((fixtures / "lspci/azure-nd-a100v4-lspci-nn.txt").read_text())
    assert (len(machine.gpus), len(machine.nics), len(machine.nvswitches)) == (8, 9, 6)
    distances = Distances(machine)
    assert all(distances.nearest_nics(gpu) == (None, ()) for gpu in machine.gpus)
    assert any("use `lspci -vvv`" in note for note in machine.notes)
    assert {gpu.device for gpu in machine.gpus} == {0x20B2}


def test_a_device_below_nothing_hangs_off_its_numa_node() -> None:
    (gpu,) = lspci.read(ROOT + GPU).gpus
    assert (gpu.parent, model_name(gpu)) == ("numa0", "H100 SXM5 80GB")


CARD = """{bus}:00.0 {kind}
\tNUMA node: {numa}
\t\tLnkCap:\tPort #0, Speed {cap}GT/s, Width x16, ASPM not supported
\t\tLnkSta:\tSpeed {now}GT/s, Width x16
"""


def card(bus: str, numa: int = 0, *, gpu: bool = True, cap: str = "32", now: str = "32") -> str:
    kind = "3D controller: NVIDIA Corporation GH100" if gpu else "Infiniband controller: Mellanox MT2910 [ConnectX-7]"
    return CARD.format(bus=bus, kind=kind, numa=numa, cap=cap, now=now)


def bridge(bus: str, below: str, more: str = "") -> str:
    return f"{bus} PCI bridge: PLX\n\tNUMA node: 0\n\tBus: primary={bus[:2]}, secondary={below}\n{more}"


ROOTS = {
    "on bus 00": ("00:01.0", ""),
    "a root port": ("40:01.0", "\tCapabilities: [68] Express (v2) Root Port (Slot+), MSI 00\n"),
    "beside a host bridge": ("40:01.0", "40:00.0 Host bridge: AMD Device 1480\n\tx\n"),
    "in a listing that begins at bus 00": ("40:01.0", "00:14.0 USB controller: Intel\n\tx\n"),
}


@pytest.mark.parametrize("root", ROOTS)
def test_two_cards_below_their_own_ports_meet_at_the_cpu(root: str) -> None:
    port, evidence = ROOTS[root]
    other = port.replace("01.0", "02.0")
    text = bridge(port, "05", evidence) + bridge(other, "06") + card("05") + card("06", gpu=False)
    machine = lspci.read(text)
    assert Distances(machine).gpu_nic(machine.gpus[0], machine.nics[0]) is PathType.PHB
    tree = lspci.read_tree(text.splitlines())
    assert path_type(tree, "0000:05:00.0", "0000:06:00.0") == "PHB"


@pytest.mark.parametrize("above", ["", bridge("45:00.0", "05") + bridge("46:00.0", "06")])
def test_a_listing_without_the_bridges_above_knows_no_distance_below_one_cpu(above: str) -> None:
    """`lspci -d 10de: -vvv`, or a listing that was cut: two cards of one CPU may share a switch or not."""
    text = above + card("05") + card("06", gpu=False) + card("07", 1, gpu=False)
    machine, tree = lspci.read(text), lspci.read_tree(text.splitlines())
    distances = Distances(machine)
    assert [distances.gpu_nic(machine.gpus[0], nic) for nic in machine.nics] == [None, PathType.SYS]
    assert [gpu.parent for gpu in machine.gpus] == ["numa0"]
    assert [path_type(tree, "0000:05:00.0", f"0000:0{i}:00.0") for i in (6, 7)] == [None, "SYS"]
    assert tree.bridges_between("0000:05:00.0", "0000:06:00.0") is None, "no ACS verdict out of ignorance"
    assert any("lacks bridges above" in note for note in machine.notes)


def test_a_shared_switch_is_known_without_what_is_above_it() -> None:
    text = bridge("44:00.0", "45") + bridge("45:00.0", "05") + bridge("45:01.0", "06") + card("05")
    machine = lspci.read(text + card("06", gpu=False))
    assert Distances(machine).gpu_nic(machine.gpus[0], machine.nics[0]) is PathType.PIX


def test_an_idle_links_speed_is_shown_beside_what_the_link_can_do() -> None:
    port = ROOT.replace("secondary=01", "secondary=05") + "\t\tLnkCap:\tPort #2, Speed 16GT/s, Width x16\n"
    (gpu,) = lspci.read(port + card("05", now="2.5")).gpus
    assert gpu.pcie == PcieLink(gigatransfers_per_second=16.0, current_gigatransfers_per_second=2.5, lanes=16)
    assert pcie_text(gpu.pcie) == "16 GT/s x16, 24 GB/s (now 2.5 GT/s)"
    (busy,) = lspci.read(port + card("05", now="16")).gpus
    assert busy.pcie == PcieLink(gigatransfers_per_second=16.0, lanes=16)


def test_a_display_adapter_of_an_unnamed_vendor_is_not_lost() -> None:
    machine = lspci.read("05:00.0 3D controller: Device 2330 (rev a1)\n" + GPU.replace("05:", "06:"))
    assert len(machine.gpus) == 1
    assert machine.unclassified == ("0000:05:00.0",)
    assert any("0000:05:00.0 is a GPU is unknown" in note for note in machine.notes)
    bare = lspci.read("05:00.0 3D controller: Device 10de:2330 (rev a1)\n")
    assert [(gpu.vendor, gpu.device) for gpu in bare.gpus] == [(0x10DE, 0x2330)]
    screen = lspci.read("05:00.0 VGA compatible controller: ASPEED Technology, Inc. Graphics Family\n")
    assert (screen.gpus, screen.unclassified) == ((), ())


def test_other_makers_display_adapters_are_no_gpus() -> None:
    text = "03:00.0 VGA compatible controller: Matrox Electronics Systems Ltd. Integrated Matrox G200eW3\n\tx\n"
    assert lspci.read(text + GPU).gpus[0].key == "0000:05:00.0"
    assert len(lspci.read(text + GPU).gpus) == 1


def test_domains_keep_equal_bus_numbers_apart() -> None:
    bridge = ROOT.replace("00:01.0", "0001:00:01.0").replace("secondary=01", "secondary=05")
    machine = lspci.read(bridge + GPU)
    assert machine.gpus[0].parent == "numa0"
    assert machine.switches == ()


def test_without_numa_nodes_the_cpu_is_unknown() -> None:
    text = (ROOT + GPU).replace("\tNUMA node: 0\n", "")
    machine = lspci.read(text)
    assert machine.cpus[0].numa is None
    assert any("names no NUMA node" in note for note in machine.notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "no PCI function"), ("hello\nworld", "no PCI function"), (GPU + GPU, "line 5: .* listed twice.* two hosts")],
)
def test_broken_listings_are_refused(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        lspci.read(text)


def test_the_tree_and_the_machine_are_read_from_the_same_lines() -> None:
    tree, machine = lspci.read_tree((ROOT + GPU).splitlines()), lspci.read(ROOT + GPU)
    function = tree.functions["0000:05:00.0"]
    assert (function.vendor, function.driver, function.numa_node) == (0x10DE, "nvidia", 0)
    assert machine.gpus[0].pcie == PcieLink(gigatransfers_per_second=function.current_gigatransfers, lanes=16)
    assert lspci.read_tree((GPU + GPU).splitlines()).functions.keys() == {"0000:05:00.0"}


def test_a_ticket_that_lost_the_indentation_is_read_and_what_follows_is_not() -> None:
    text = (ROOT + GPU).replace("\t", "") + "\nNUMA node: 7\n"
    assert lspci.read(text).gpus == lspci.read(ROOT + GPU).gpus


def test_bridges_that_form_a_ring_are_refused() -> None:
    with pytest.raises(TopologyError, match="form a cycle"):
        lspci.read(_ring() + GPU.replace("05:00.0", "01:01.0"))


def _ring() -> str:
    """Three bridges, each on the bus behind the one before."""
    pairs = ((1, 2), (2, 3), (3, 1))
    return "".join(
        f"0{a}:00.0 PCI bridge: Intel\n\tBus: primary=0{a}, secondary=0{b}, subordinate=09\n" for a, b in pairs
    )
