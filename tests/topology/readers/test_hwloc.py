"""hwloc's XML: the same machine in the three versions of the format."""

from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest

from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Machine
from gradwire.topology.paths import Distances, PathType
from gradwire.topology.readers import files

NETWORK, FABRIC, GPU = ({1: 2, 2: 2, 3: 16}, {1: 3, 2: 3, 3: 48}, {1: 1, 2: 1, 3: 12})
"""Kind of OS device -> its number in each version."""


def element(kind: str, *inside: str, **attributes: object) -> str:
    own = "".join(f" {name}={quoteattr(str(value))}" for name, value in attributes.items())
    return f'<object type="{kind}"{own}>{"".join(inside)}</object>\n'


def info(name: str, value: str) -> str:
    return f'<info name="{name}" value="{value}"/>'


def device(bus: str, kind: str, *inside: str) -> str:
    return element("PCIDev", *inside, pci_busid=f"0000:{bus}:00.0", pci_type=f"{kind} a1", pci_link_speed="0.5")


def switch(bus: int, *below: str) -> str:
    """Upstream port and a downstream port for each device."""
    ports = (
        bridge(f"0000:{bus + 1:02x}:{number:02x}.0", text) for number, text in enumerate(below)
    )  # fmt: skip
    return bridge(f"0000:{bus:02x}:00.0", *ports)


def bridge(bus: str, *inside: str) -> str:
    return element("Bridge", *inside, bridge_type="1-1", pci_busid=bus, pci_type="0604 [11f8:4000] [0000:0000] 00")


def package(version: int, number: int, *inputs: str) -> str:
    """One socket with one NUMA node and a host bridge."""
    near = {"cpuset": "0x0000000f" if number == 0 else "0x000000f0", "nodeset": f"0x{1 << number:08x}"}
    about = info("CPUVendor", "GenuineIntel") + info("CPUModelNumber", "143")
    bridges = element("Bridge", *inputs, bridge_type="0-1", bridge_pci=f"0000:[{0x80 * number:02x}-7f]")
    if version == 1:
        return element("NUMANode", element("Package", about, os_index=number, **near), bridges, os_index=number, **near)
    return element("Package", about, element("NUMANode", os_index=number, **near), bridges, os_index=number, **near)


def lstopo(version: int) -> str:
    """Two sockets; on the first a switch with a GPU and a card, and a card of its own; on the second a GPU."""
    gpu = "0302 [10de:2330] [10de:16c1]"
    nic = "0207 [15b3:1021] [15b3:0041]"
    first = device("03", gpu, info("PCIVendor", "NVIDIA Corporation"), info("PCIDevice", "GH100 [H100 SXM5]"),
                   element("OSDev", name="nvml1", osdev_type=GPU[version]))  # fmt: skip
    near = device("04", nic, element("OSDev", name="ibs1", osdev_type=NETWORK[version]),
                  element("OSDev", info("Port1State", "4"), name="mlx5_0", osdev_type=FABRIC[version]))  # fmt: skip
    far = device("06", "0200 [8086:1592] [8086:0002]", element("OSDev", name="eth0", osdev_type=NETWORK[version]))
    other = device("83", gpu, element("OSDev", name="nvml0", osdev_type=GPU[version]))
    sockets = package(version, 0, bridge("0000:00:01.0", switch(1, first, near)), bridge("0000:00:02.0", far))
    sockets += package(version, 1, bridge("0000:80:01.0", other))
    name = {1: "hwloc.dtd", 2: "hwloc2.dtd", 3: "hwloc2.dtd"}[version]
    root = "<topology>" if version == 1 else f'<topology version="{version}.0">'
    about = info("HostName", "node7") + info("DMIProductName", "XE9680") + info("Architecture", "x86_64")
    machine = element("Machine", about, sockets, nodeset="0x00000003", cpuset="0x000000ff")
    return f'<?xml version="1.0"?>\n<!DOCTYPE topology SYSTEM "{name}">\n{root}\n{machine}</topology>\n'


@pytest.mark.parametrize("version", [1, 2, 3])
def test_lstopo_of_every_version_is_the_same_machine(version: int, tmp_path: Path) -> None:
    file = tmp_path / "lstopo.xml"
    file.write_text(lstopo(version))
    machine: Machine = files.read_file(file)
    assert [(cpu.key, cpu.socket, cpu.cores, cpu.model) for cpu in machine.cpus] == [
        ("numa0", 0, "0-3", 143),
        ("numa1", 1, "4-7", 143),
    ]
    assert [(gpu.bus, gpu.index, gpu.vendor) for gpu in machine.gpus] == [
        ("0000:03:00.0", 1, 0x10DE),
        ("0000:83:00.0", 0, 0x10DE),
    ]
    assert [[(port.name, port.interfaces, port.active) for port in nic.ports] for nic in machine.nics] == [
        [("mlx5_0", ("ibs1",), True)],
        [("eth0", ("eth0",), None)],
    ]
    distances = Distances(machine)
    paths = [[distances.gpu_nic(gpu, nic) for nic in machine.nics] for gpu in machine.gpus]
    assert paths == [[PathType.PIX, PathType.PHB], [PathType.SYS, PathType.SYS]]
    assert (machine.hostname, machine.product) == ("node7", "XE9680")
    assert {device.pcie for device in (*machine.gpus, *machine.nics)} == {None}, "an idle link's speed is no rate"
    assert not machine.links_known


def test_devices_without_bridges_in_the_file_have_no_distance_below_one_cpu() -> None:
    cards = device("03", "0302 [10de:2330]") + device("04", "0207 [15b3:1021]")
    machine = files.machine_of(f'<topology version="2.0">{element("Machine", cards, nodeset="0x1")}</topology>')
    assert Distances(machine).gpu_nic(machine.gpus[0], machine.nics[0]) is None
    assert any("no bridges above" in note for note in machine.notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<topology/>", "no hwloc XML"),
        ('<topology version="2.0"><object/></topology>', "no hwloc XML"),
        (lstopo(2).replace("0000:04:00.0", "0000:03:00.0"), "in the file twice"),
        ('<!DOCTYPE topology SYSTEM "file:///etc/passwd"><topology/>', "DTD"),
        (lstopo(2).replace("</topology>", ""), "cut off"),
    ],
)
def test_what_is_no_hwloc_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        files.machine_of(text)
