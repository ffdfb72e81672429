import json
from pathlib import Path

import pytest

from gradwire.topology.errors import TopologyError
from gradwire.topology.networks import network_of
from gradwire.topology.paths import Distances, PathType
from gradwire.topology.readers import nccl_xml, xml_tree
from gradwire.topology.show import draw
from gradwire.topology.show.json_form import to_object

GPU = '<pci busid="0000:01:00.0" class="0x030200"><gpu dev="0" sm="80">{}</gpu></pci>'
SYSTEM = '<system version="1"><cpu numaid="0">{}</cpu></system>'


def test_every_fixture_has_the_right_answer(fixtures: Path) -> None:
    expected = json.loads((fixtures / "expected_nccl_xml.json").read_text())
    assert len(expected) == 10
    for name, answer in expected.items():
        found = json.loads(json.dumps(to_object(nccl_xml.read((fixtures / name).read_text()))))
        for key, value in answer.items():
            if key in ("gpus", "nics"):
                subsets = [{k: item[k] for k in wanted} for item, wanted in zip(found[key], value, strict=True)]
                assert subsets == value, (name, key)
            else:
                assert found[key] == value, (name, key)


def test_a_graph_file_is_refused_by_name(fixtures: Path) -> None:
    with pytest.raises(TopologyError, match=r"line 1: this is an NCCL graph file .* NCCL_TOPO_DUMP_FILE"):
        nccl_xml.read((fixtures / "nccl_xml/azure-ncv4-graph.xml").read_text())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<topology/>", "hwloc"),
        ("<html/>", "root element is <html>"),
        ("<system>", "cut off"),
        ("<system", "not well-formed"),
        ("", "not well-formed"),
        ('<!DOCTYPE s [<!ENTITY a "b">]><system/>', "entities"),
        ('<!DOCTYPE s SYSTEM "file:///etc/passwd"><system/>', "DTD"),
        ("<system>&lol;</system>", "undefined entity"),
        ("<system>" + "<cpu>" * 70, "nested more than 64 deep"),
        (SYSTEM.format("<pci/>"), "`busid` of <pci> is None"),
        (SYSTEM.format('<pci busid="zz"/>'), "`busid` of <pci> is 'zz'"),
        (SYSTEM.format('<pci busid="0:01:00.0"/>\n<pci busid="0000:01:00.0"/>'), "line 2: .* already given on line 1"),
        (SYSTEM.format('<pci busid="0:01:00.0"><pci busid="0:01:00.0"/></pci>'), "already given"),
        ('<system><cpu numaid="0"/><cpu numaid="0"/></system>', "already given"),
    ],
)
def test_broken_files_are_refused_with_a_reason(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        nccl_xml.read(text)


def test_more_elements_than_any_machine_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xml_tree, "MAX_ELEMENTS", 1000)
    assert nccl_xml.read("<system>" + "<x/>" * 999 + "</system>").cpus == ()
    with pytest.raises(TopologyError, match="line 2: more than 1000 elements"):
        nccl_xml.read("<system>\n" + "<x/>" * 1000 + "</system>")


def test_an_exponential_entity_bomb_is_refused() -> None:
    entities = "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 12))
    with pytest.raises(TopologyError, match="entities"):
        nccl_xml.read(f'<!DOCTYPE s [<!ENTITY a0 "x">{entities}]><system>&a11;</system>')


def test_twenty_thousand_switches_are_read() -> None:
    nodes = "".join(f'<pci busid="{i >> 8:04x}:{i & 255:02x}:00.0" class="0x060400"/>' for i in range(20_000))
    assert len(nccl_xml.read(SYSTEM.format(nodes)).switches) == 20_000


@pytest.mark.parametrize(
    ("link", "kind"),
    [
        ('<nvlink target="0000:01:00.0" count="12" tclass="0x030200"/>', "self_link"),
        ('<nvlink target="0000:02:00.0" count="12" tclass="0x030200"/>', "dangling_link"),
        ('<nvlink target="" count="12"/>', "dangling_link"),
    ],
)
def test_links_that_lead_nowhere_are_left_out_and_named(link: str, kind: str) -> None:
    machine = nccl_xml.read(SYSTEM.format(GPU.format(link)))
    assert machine.links == ()
    assert [defect.kind for defect in machine.defects] == [kind]
    assert any("line 1" in note for note in machine.notes)


@pytest.mark.parametrize("target", ["fffffff:ffff:ff", "fffffff:ff:ff.0"])
def test_a_hidden_peer_is_a_switch(target: str) -> None:
    machine = nccl_xml.read(SYSTEM.format(GPU.format(f'<nvlink target="{target}" count="18"/>')))
    assert [switch.key for switch in machine.nvswitches] == ["hidden"]


@pytest.mark.parametrize("tag", ["nvlink", "xgmi", "c2c"])
def test_a_bundle_of_no_links_is_none(tag: str) -> None:
    machine = nccl_xml.read(SYSTEM.format(GPU.format(f'<{tag} target="fffffff:ffff:ff" bw="1" count="0"/>')))
    assert (machine.links, machine.nvswitches, machine.defects) == ((), (), ())
    machine = nccl_xml.read(SYSTEM.format(GPU.format(f'<{tag} target="fffffff:ffff:ff" bw="1"/>')))
    assert [link.count for link in machine.links] == [1]
    assert any("has no count" in note for note in machine.notes)


def test_a_link_written_on_both_sides_counts_once() -> None:
    other = GPU.replace("0000:01", "0000:02")
    one = '<nvlink target="0000:02:00.0" count="4" tclass="0x030200"/>'
    text = SYSTEM.format(GPU.format(one) + other.format(one.replace("0000:02", "0000:01")))
    (link,) = nccl_xml.read(text).links
    assert (link.count, link.bytes_per_second) == (4, 80e9)


@pytest.mark.parametrize(("name", "speed", "wanted"), [
    ("thunderbolt0", 20000, 10e9), ("enxa0cec8012345", 2500, 2.5e9), ("usb0", 425, 425e6), ("wlp195s0", 1000, 1e9),
])  # fmt: skip
def test_an_interface_without_a_card_is_no_rdma_device(name: str, speed: int, wanted: float) -> None:
    """NCCL writes the interface that it opens sockets on, with the rate that the driver states."""
    text = f'<pci busid="0000:c7:00.5" class="0x0c0340"><nic><net name="{name}" speed="{speed}"/></nic></pci>'
    (nic,) = nccl_xml.read(SYSTEM.format(text)).nics
    assert (network_of(nic), nic.ports[0].bits_per_second) == ("tcp", wanted)


NIC = '<pci busid="0000:{bus}:00.0" class="0x020000"><nic><net name="mlx5_{bus}" speed="{speed}"/></nic></pci>'


def below(switches: int, text: str) -> str:
    """A part of a file below some PCIe switches, each below the one before."""
    for number in range(switches):
        text = f'<pci busid="0000:{0xA0 + number:02x}:00.0" class="0x060400">{text}</pci>'
    return text


def tray(host: str, switches: int, *nics: str) -> str:
    """One host of a multi-node NVLink domain: two CPUs, a coherent GPU on each, the cards on the first."""
    gpu = GPU.format('<nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/><c2c bw="44712" count="5"/>')
    cpu = f'<cpu host_hash="{host}" numaid="{{}}" arch="arm64">{{}}</cpu>'
    far = gpu.replace("0000:01", "0000:02").replace('dev="0"', 'dev="1"')
    return cpu.format(0, below(switches, gpu) + "".join(nics)) + cpu.format(1, far)


@pytest.mark.parametrize("switches", range(4))
def test_c2c_climbs_to_the_cpu_above_all_switches(switches: int) -> None:
    """NCCL finds the CPU by climbing: a GPU below a switch (GB300) is as coherent as one right below (GH200)."""
    machine = nccl_xml.read(f'<system version="1">{tray("0xa", switches, NIC.format(bus=31, speed=400000))}</system>')
    gpus, (nic,), distances = machine.gpus, machine.nics, Distances(machine)
    coherent = {link.a: link for link in machine.links if link.kind == "c2c"}
    assert [coherent[gpu.key].b for gpu in gpus] == ["numa0", "numa1"]
    assert coherent[gpus[0].key].bytes_per_second == pytest.approx(223.56e9)
    assert [distances.gpu_nic(gpu, nic) for gpu in gpus] == [PathType.P2C, PathType.SYS]
    assert distances.qualifies_for_gdr(gpus[0], nic)
    assert [switch.key for switch in machine.nvswitches] == ["hidden"]


def test_c2c_is_for_a_gpus_local_cards_alone() -> None:
    """NCCL reaches the fastest cards over the link, and of those the nearest; to all others the path is PHB."""
    slow, fast = NIC.format(bus=31, speed=100000), NIC.format(bus=32, speed=400000)
    machine = nccl_xml.read(f'<system version="1">{tray("0xa", 1, slow, fast)}</system>')
    distances = Distances(machine)
    assert [distances.gpu_nic(machine.gpus[0], nic) for nic in machine.nics] == [PathType.PHB, PathType.P2C]
    gpu = GPU.format('<c2c bw="44712" count="5"/>')
    machine = nccl_xml.read(SYSTEM.format(below(1, gpu + NIC.format(bus=33, speed=400000)) + fast))
    distances = Distances(machine)
    assert [distances.gpu_nic(machine.gpus[0], nic) for nic in machine.nics] == [PathType.PIX, PathType.PHB]


@pytest.mark.parametrize(("second", "word"), [(tray("0xb", 1), "are alike"), (tray("0xb", 2), "differ from it")])
def test_a_file_of_several_hosts_shows_the_first_and_says_so(second: str, word: str) -> None:
    machine = nccl_xml.read(f'<system version="1">{tray("0xa", 1)}{second}</system>')
    assert machine.gpus == nccl_xml.read(f'<system version="1">{tray("0xa", 1)}</system>').gpus
    (note,) = machine.notes
    assert "2 hosts (host_hash 0xa, 0xb)" in note and word in note


@pytest.mark.parametrize("attributes", [('dev="0"', 'dev="1"'), ('dev="0" mlopart="0"', 'dev="0" mlopart="1"')])
def test_every_gpu_of_a_card_counts(attributes: tuple[str, str]) -> None:
    link = '<nvlink target="0000:09:00.0" count="18" tclass="0x068000"/>'
    gpus = "".join(f'<gpu {own} sm="100">{link}</gpu>' for own in attributes)
    machine = nccl_xml.read(SYSTEM.format(f'<pci busid="0000:01:00.0" class="0x030200">{gpus}</pci>'))
    assert [gpu.bus for gpu in machine.gpus] == ["0000:01:00.0"] * 2
    assert sum(link.bytes_per_second or 0 for link in machine.links) == pytest.approx(18 * 40.1e9), (
        "shared, not doubled"
    )
    assert Distances(machine).gpu_gpu(*machine.gpus) is PathType.NVL


def test_ranks_that_share_a_gpu_are_one_gpu() -> None:
    gpus = "".join(f'<gpu dev="0" sm="80" rank="{rank}"/>' for rank in range(3))
    machine = nccl_xml.read(SYSTEM.format(f'<pci busid="0000:01:00.0" class="0x030200">{gpus}</pci>'))
    assert len(machine.gpus) == 1
    assert any("3 ranks share 1 GPU" in note for note in machine.notes)


@pytest.mark.parametrize(
    ("speed", "words"),
    [
        ("32.0 GT/s PCIe", None),
        ("16 GT/s", None),
        ("32 GT/s PCIe/s", "reads its beginning alone"),
        ("64 GT/s", "takes it for 8 GT/s"),
        ("Unknown", "takes it for 8 GT/s"),
    ],
)
def test_speeds_that_nccl_takes_for_something_else_are_named(speed: str, words: str | None) -> None:
    one = GPU.replace("class=", f'link_speed="{speed}" link_width="16" class=').format("")
    notes = [note for note in nccl_xml.read(SYSTEM.format(one)).notes if "link_speed" in note]
    assert len(notes) == (words is not None) and all(str(words) in note for note in notes)


@pytest.mark.parametrize(("busid", "vendor", "virtual"), [
    ("ffff:ff:01.0", "0x1000", True), ("0000:01:00.0", "0xffff", True), ("0000:01:00.0", "0x104c", True),
    ("0000:01:00.0", "0x1000", False),
])  # fmt: skip
def test_virtual_switches_are_called_virtual(busid: str, vendor: str, virtual: bool) -> None:
    text = SYSTEM.format(f'<pci busid="{busid}" class="0x060400" vendor="{vendor}" device="0x8232" link_width="16"/>')
    (switch,) = nccl_xml.read(text).switches
    assert switch.virtual is virtual


def test_a_class_less_function_is_unknown_and_said_so(fixtures: Path) -> None:
    machine = nccl_xml.read((fixtures / "nccl_xml/aws-g5.48xl-topo.xml").read_text())
    assert len(machine.unclassified) == 9
    assert any("whether they are GPUs or NICs is unknown" in note for note in machine.notes)


def test_versions_that_nobody_reads_are_noted() -> None:
    assert any("version" in note for note in nccl_xml.read('<system version="7"/>').notes)


TWICE = """<system version="1"><cpu numaid="{numa}">
<pci busid="0000:01:00.0" class="0x060400"><pci busid="0000:05:00.0" class="0x030200"/></pci>
<pci busid="0000:02:00.0" class="0x060400"><pci busid="{again}" class="0x030200"/></pci></cpu></system>"""


def test_a_bus_id_on_two_switches_of_one_host_is_not_two_hosts() -> None:
    with pytest.raises(TopologyError, match=r"0000:05:00.0 was already given on line 2; a host has each bus id once"):
        nccl_xml.read(TWICE.format(numa=0, again="0000:05:00.0"))
    with pytest.raises(TopologyError, match=r"if these are two hosts"):
        nccl_xml.read('<system version="1"><cpu numaid="0"/><cpu numaid="0"/></system>')


def test_an_unknown_numa_node_is_not_counted_as_one() -> None:
    assert "NUMA" not in draw.summary(nccl_xml.read(TWICE.format(numa=-1, again="0000:06:00.0")))
    assert "1 NUMA node ·" in draw.summary(nccl_xml.read(TWICE.format(numa=0, again="0000:06:00.0")))
