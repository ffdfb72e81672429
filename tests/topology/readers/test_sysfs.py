import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gradwire.topology.assign import fastest_nics
from gradwire.topology.bandwidth import memory_bytes_per_second, nic_bytes_per_second
from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import PcieLink
from gradwire.topology.labels import nic_rate
from gradwire.topology.levels import levels_of
from gradwire.topology.paths import Distances, PathType
from gradwire.topology.readers.sysfs import read

if TYPE_CHECKING:
    from topology.conftest import SysTree

ROOT = "pci0000:00"


def gpu_server(systree: "SysTree", gpus: int) -> None:
    """A switch per GPU with an InfiniBand card next to it, two GPUs to a NUMA node."""
    systree.host({0: "0-15", 1: "16-31"})
    for index in range(gpus):
        chains = systree.switch(
            f"pci{index:04x}:00", 1 + index % 30, 0x10 + 4 * (index % 50), 2, numa=2 * index // gpus
        )
        gpu, nic = (*chains[0], f"{index:04x}:e1:00.0"), (*chains[1], f"{index:04x}:e2:00.0")
        systree.device(*gpu, kind=0x030200, vendor=0x10DE, numa=2 * index // gpus)
        systree.device(*nic, kind=0x020700, vendor=0x15B3, numa=2 * index // gpus)
        systree.rdma(f"mlx5_{index}", *nic)


def test_each_gpu_finds_the_card_on_its_switch(systree: "SysTree") -> None:
    systree.host({0: "0-15", 1: "16-31"})
    for index, numa in enumerate((0, 1)):
        chains = systree.switch(f"pci000{index}:00", 1 + index, 0x10 + 0x40 * index, 2, numa=numa)
        systree.device(*chains[0], f"0000:{0x12 + 0x40 * index:02x}:00.0", kind=0x030200, vendor=0x10DE, numa=numa)
        nic = (*chains[1], f"0000:{0x13 + 0x40 * index:02x}:00.0")
        systree.device(*nic, kind=0x020700, vendor=0x15B3, numa=numa)
        systree.rdma(f"mlx5_{index}", *nic)
        systree.interface(f"ib{index}", *nic)
    machine = read(systree.root)
    distances = Distances(machine)
    nearest = [distances.nearest_nics(gpu) for gpu in machine.gpus]
    assert [(path, nics[0].ports[0].name) for path, nics in nearest] == [
        (PathType.PIX, "mlx5_0"),
        (PathType.PIX, "mlx5_1"),
    ]
    assert distances.gpu_nic(machine.gpus[0], machine.nics[1]) is PathType.SYS
    port = machine.nics[0].ports[0]
    assert (port.interfaces, port.bits_per_second, port.active) == (("ib0",), 400e9, True)
    assert machine.gpus[0].pcie == PcieLink(gigatransfers_per_second=32.0, lanes=16)
    assert [(cpu.socket, cpu.cores, cpu.model) for cpu in machine.cpus] == [(0, "0-15", 143), (1, "16-31", 143)]
    assert (machine.hostname, machine.virtual, machine.nics[0].driver) == ("testhost", False, "mlx5_core")


def test_functions_of_a_card_are_one_nic_and_virtual_functions_are_counted(systree: "SysTree") -> None:
    systree.host({0: "0-15"})
    for function in ("0", "1"):
        chain = (ROOT, "0000:00:01.0", f"0000:05:00.{function}")
        systree.device(*chain, kind=0x020000, vendor=0x15B3)
        systree.rdma(f"mlx5_{function}", *chain, rate="100 Gb/sec (4X EDR)", layer="Ethernet")
    for function in ("2", "3"):
        chain = (ROOT, "0000:00:01.0", f"0000:05:00.{function}")
        systree.device(*chain, kind=0x020000, vendor=0x15B3)
        systree.rdma(f"mlx5_{function}", *chain)
        systree.link("/".join(["sys/devices", *chain, "physfn"]), f"sys/devices/{ROOT}/0000:00:01.0/0000:05:00.1")
    (nic,) = read(systree.root).nics
    assert (nic.key, nic.functions, nic.virtual_functions) == ("0000:05:00.0", 2, 2)
    assert [port.name for port in nic.ports] == ["mlx5_0", "mlx5_1"]


def test_a_pod_that_was_given_a_virtual_function_has_its_port(systree: "SysTree") -> None:
    systree.host({0: "0-15"})
    card, lent = (ROOT, "0000:00:01.0", "0000:05:00.0"), (ROOT, "0000:00:01.0", "0000:05:00.2")
    for chain in (card, lent):
        systree.device(*chain, kind=0x020000, vendor=0x15B3)
    systree.link("/".join(["sys/devices", *lent, "physfn"]), "/".join(["sys/devices", *card]))
    systree.rdma("mlx5_4", *lent, rate="100 Gb/sec (4X EDR)", layer="Ethernet")
    systree.interface("net1", *lent)
    (nic,) = read(systree.root).nics
    assert (nic.key, nic.functions, nic.virtual_functions) == ("0000:05:00.0", 1, 1)
    assert [(port.name, port.interfaces, port.bits_per_second) for port in nic.ports] == [("mlx5_4", ("net1",), 100e9)]


def test_bonds_slingshot_and_virtual_drivers(systree: "SysTree") -> None:
    systree.host({0: "0-15"}, virtual=True)
    bonded, cxi, virtio = (ROOT, "0000:01:00.0"), (ROOT, "0000:02:00.0"), (ROOT, "0000:03:00.0")
    for chain, vendor in ((bonded, 0x15B3), (cxi, 0x17DB), (virtio, 0x1AF4)):
        systree.device(*chain, kind=0x020000, vendor=vendor)
    systree.interface("eth0", *bonded)
    systree.write("sys/devices/virtual/net/bond0/bonding/slaves", "eth0")
    systree.link("sys/class/net/bond0", "sys/devices/virtual/net/bond0")
    systree.link(f"sys/devices/{ROOT}/0000:01:00.0/net/eth0/master", "sys/devices/virtual/net/bond0")
    systree.link(f"sys/devices/{ROOT}/0000:02:00.0/cxi/cxi0/device", f"sys/devices/{ROOT}/0000:02:00.0")
    systree.link("sys/class/cxi/cxi0", f"sys/devices/{ROOT}/0000:02:00.0/cxi/cxi0")
    systree.interface("hsn0", *cxi, speed="200000", driver="cxi_core")
    # HPE's driver for verbs shows the same card once more.
    systree.link("sys/class/infiniband/hsi0/device", f"sys/devices/{ROOT}/0000:02:00.0")
    systree.write("sys/class/infiniband/hsi0/ports/1/rate", "200 Gb/sec (4X HDR)")
    systree.interface("eth1", *virtio, speed="-1", driver="virtio_net")
    machine = read(systree.root)
    ports = {nic.key: nic.ports[0] for nic in machine.nics}
    assert ports["0000:01:00.0"].bond == "bond0"
    assert (ports["0000:02:00.0"].name, ports["0000:02:00.0"].bits_per_second) == ("cxi0", 200e9)
    assert [len(nic.ports) for nic in machine.nics] == [1, 1, 1]
    assert (ports["0000:03:00.0"].virtual, ports["0000:03:00.0"].bits_per_second) == (True, None)
    assert machine.virtual is True


@pytest.mark.parametrize(("stated", "mode", "rate"), [
    ("100 Gb/sec (4X EDR)", "802.3ad 4", 200e9),
    ("200 Gb/sec (4X HDR)", "802.3ad 4", 200e9),
    ("100 Gb/sec (4X EDR)", "active-backup 1", 100e9),
])  # fmt: skip
def test_a_bond_of_rdma_ports_is_one_port(systree: "SysTree", stated: str, mode: str, rate: float) -> None:
    systree.host({0: "0-15"})
    ports = [(ROOT, "0000:00:01.0", f"0000:05:00.{function}") for function in (0, 1)]
    for number, chain in enumerate(ports):
        systree.device(*chain, kind=0x020000, vendor=0x15B3)
        systree.interface(f"eth{number}", *chain)
        systree.link("/".join(["sys/devices", *chain, f"net/eth{number}/master"]), "sys/devices/virtual/net/bond0")
    systree.write("sys/devices/virtual/net/bond0/bonding/mode", mode)
    systree.link("sys/class/net/bond0", "sys/devices/virtual/net/bond0")
    systree.rdma("mlx5_bond_0", *ports[0], rate=stated, layer="Ethernet")
    (nic,) = read(systree.root).nics
    (port,) = nic.ports
    assert (port.name, port.interfaces, port.bond) == ("mlx5_bond_0", ("eth0", "eth1"), "bond0")
    assert port.bits_per_second == rate


def bonded(systree: "SysTree", *members: tuple[str, ...]) -> None:
    """Puts `eth0`, `eth1`, ... of some functions into bond0."""
    systree.host({0: "0-15"})
    for number, chain in enumerate(members):
        systree.device(*chain, kind=0x020000, vendor=0x8086)
        systree.interface(f"eth{number}", *chain, driver="ice")
        systree.link("/".join(["sys/devices", *chain, f"net/eth{number}/master"]), "sys/devices/virtual/net/bond0")
    systree.write("sys/devices/virtual/net/bond0/bonding/slaves", " ".join(f"eth{i}" for i in range(len(members))))
    systree.link("sys/class/net/bond0", "sys/devices/virtual/net/bond0")


@pytest.mark.parametrize(("mode", "files", "rate"), [
    ("active-backup 1", {"bonding/active_slave": "eth1"}, 100e9),
    ("active-backup 1", {"eth0": "backup", "eth1": "active"}, 100e9),
    ("active-backup 1", {}, None),
    ("802.3ad 4", {"eth0": "active", "eth1": "active"}, 200e9),
    ("802.3ad 4", {"eth0": "active", "eth1": "backup"}, 100e9),
    ("802.3ad 4", {}, 200e9),
    ("balance-alb 6", {"bonding/active_slave": "eth0", "eth0": "active", "eth1": "active"}, 200e9),
])  # fmt: skip
def test_what_a_bond_holds_in_reserve_is_not_counted(
    systree: "SysTree", mode: str, files: dict[str, str], rate: float | None
) -> None:
    ports = [(ROOT, "0000:00:01.0", f"0000:05:00.{function}") for function in (0, 1)]
    bonded(systree, *ports)
    systree.write("sys/devices/virtual/net/bond0/bonding/mode", mode)
    for name, text in files.items():
        own = f"net/{name}/bonding_slave/state"
        place = "sys/devices/virtual/net/bond0" if "/" in name else "/".join(["sys/devices", *ports[int(name[3:])]])
        systree.write(f"{place}/{name if '/' in name else own}", text)
    (nic,) = read(systree.root).nics
    assert nic_bytes_per_second(nic) == (rate and rate / 8)
    assert nic_rate(nic) == ("standby" if rate is None else f"{rate / 1e9:g} Gbit/s")
    assert {port.above for port in nic.ports} == {"bond0"}


def test_the_card_that_a_bond_uses_is_driven_and_not_the_other(systree: "SysTree") -> None:
    bonded(systree, (ROOT, "0000:05:00.0"), (ROOT, "0000:06:00.0"))
    systree.write("sys/devices/virtual/net/bond0/bonding/mode", "active-backup 1")
    systree.write("sys/devices/virtual/net/bond0/bonding/active_slave", "eth1")
    machine = read(systree.root)
    assert [nic.key for nic in fastest_nics(machine.nics)] == ["0000:06:00.0"]
    assert levels_of(machine)[1].bytes_per_second == 12.5e9


def test_the_device_of_a_roce_lag_is_never_in_reserve(systree: "SysTree") -> None:
    card = (ROOT, "0000:05:00.0")
    bonded(systree, card, (ROOT, "0000:00:03.0", "0000:06:00.0"))  # the other member is another card's
    systree.write("sys/devices/virtual/net/bond0/bonding/mode", "active-backup 1")
    systree.write("sys/devices/virtual/net/bond0/bonding/active_slave", "eth1")
    systree.rdma("mlx5_bond_0", *card, rate="100 Gb/sec (4X EDR)", layer="Ethernet")
    machine = read(systree.root)
    assert [(nic.ports[0].name, nic_bytes_per_second(nic)) for nic in machine.nics] == [
        ("mlx5_bond_0", 12.5e9), ("eth1", 12.5e9),
    ]  # fmt: skip


def test_a_bond_of_ipoib_holds_no_infiniband_in_reserve(systree: "SysTree") -> None:
    ports = [(ROOT, f"0000:0{number}:00.0") for number in (5, 6)]
    for number, chain in enumerate(ports):
        systree.rdma(f"mlx5_{number}", *chain)
    bonded(systree, *ports)
    systree.write("sys/devices/virtual/net/bond0/bonding/mode", "active-backup 1")
    systree.write("sys/devices/virtual/net/bond0/bonding/active_slave", "eth1")
    assert [nic_bytes_per_second(nic) for nic in read(systree.root).nics] == [48e9, 48e9]


@pytest.mark.parametrize(("above", "flags", "wanted"), [
    ("bridge", "0x1003", "over0"),
    ("bonding", "0x1403", "over0"),
    ("statistics", "0x1003", "over0"),  # a team
    ("statistics", "0x481", None),  # a VRF
    ("statistics", "0x1002", None),  # ovs-system
    ("statistics", "", None),
])  # fmt: skip
def test_the_address_is_that_of_the_interface_above(
    systree: "SysTree", above: str, flags: str, wanted: str | None
) -> None:
    systree.host({0: "0-15"})
    systree.device(ROOT, "0000:05:00.0", kind=0x020000, vendor=0x8086)
    systree.interface("eth0", ROOT, "0000:05:00.0", driver="ice")
    systree.write(f"sys/devices/virtual/net/over0/{above}/x", "1")
    systree.write("sys/devices/virtual/net/over0/flags", flags)
    systree.link("sys/class/net/over0", "sys/devices/virtual/net/over0")
    systree.link(f"sys/devices/{ROOT}/0000:05:00.0/net/eth0/master", "sys/devices/virtual/net/over0")
    assert [port.above for port in read(systree.root).nics[0].ports] == [wanted]


def test_a_bond_in_a_bridge_leaves_it_the_address(systree: "SysTree") -> None:
    bonded(systree, (ROOT, "0000:05:00.0"))
    systree.write("sys/devices/virtual/net/br0/bridge/stp_state", "0")
    systree.link("sys/class/net/br0", "sys/devices/virtual/net/br0")
    systree.link("sys/devices/virtual/net/bond0/master", "sys/devices/virtual/net/br0")
    (port,) = read(systree.root).nics[0].ports
    assert (port.bond, port.above) == ("bond0", "br0")


def scalable(systree: "SysTree", card: tuple[str, ...]) -> None:
    """A scalable function with its RDMA device and its interface, as in a pod."""
    part = f"{'/'.join(['sys/devices', *card])}/mlx5_core.sf.4"
    for file, text in (("rate", "100 Gb/sec (4X EDR)"), ("state", "4: ACTIVE"), ("link_layer", "Ethernet")):
        systree.write(f"{part}/infiniband/mlx5_2/ports/1/{file}", text)
    for file, text in (("type", "1"), ("speed", "100000"), ("operstate", "up"), ("ifindex", "5"), ("iflink", "5")):
        systree.write(f"{part}/net/enp5s0f0s4/{file}", text)
    for kind, name in (("infiniband", "mlx5_2"), ("net", "enp5s0f0s4")):
        systree.link(f"sys/class/{kind}/{name}", f"{part}/{kind}/{name}")
        systree.link(f"{part}/{kind}/{name}/device", part)


@pytest.mark.parametrize("alone", [False, True])
def test_a_scalable_function_shares_the_port_of_its_card(systree: "SysTree", alone: bool) -> None:
    card = (ROOT, "0000:00:01.0", "0000:05:00.0")
    systree.host({0: "0-15"})
    systree.device(*card, kind=0x020000, vendor=0x15B3)
    scalable(systree, card)
    if not alone:
        systree.rdma("mlx5_0", *card, rate="100 Gb/sec (4X EDR)", layer="Ethernet")
        systree.interface("enp5s0f0np0", *card)
    (nic,) = read(systree.root).nics
    (port,) = nic.ports
    assert (port.name, port.interfaces, port.bits_per_second) == (
        ("mlx5_2", ("enp5s0f0s4",), 100e9) if alone else ("mlx5_0", ("enp5s0f0np0",), 100e9)
    )


def test_a_container_sees_a_virtual_interface_and_says_so(systree: "SysTree") -> None:
    systree.host({0: "0-15"})
    for name, iflink in (("eth0", "7"), ("lo", "2")):
        for file, text in (("type", "1" if name == "eth0" else "772"), ("ifindex", "2"), ("iflink", iflink)):
            systree.write(f"sys/class/net/{name}/{file}", text)
    machine = read(systree.root)
    assert [(nic.key, nic.bus, nic.parent, nic.ports[0].virtual) for nic in machine.nics] == [
        ("eth0", None, "numa0", True)
    ]
    assert any("virtual (a container)" in note for note in machine.notes)


@pytest.mark.parametrize(("place", "driver", "speed", "rate"), [
    ("LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/f8615163-df3e-46c5-913f-f2d2f965ed0e", "hv_netvsc", "50000", None),
    ("platform/virtio-mmio.1/virtio1", "virtio_net", "-1", None),
    ("vif-0", "vif", "-1", None),
    ("platform/6800000.ethernet", "nvethernet", "10000", 10e9),
])  # fmt: skip
def test_a_card_that_is_not_on_pci_is_a_card(
    systree: "SysTree", place: str, driver: str, speed: str, rate: float | None
) -> None:
    systree.host({0: "0-15"})
    systree.interface("eth0", place, speed=speed, driver=driver)
    machine = read(systree.root)
    assert [(nic.key, nic.bus, nic.parent) for nic in machine.nics] == [("eth0", None, "numa0")]
    assert nic_bytes_per_second(machine.nics[0]) == (rate and rate / 8)
    assert not any("container)" in note for note in machine.notes)


def test_hyper_v_stands_before_the_card_that_it_lends(systree: "SysTree") -> None:
    systree.host({0: "0-15"}, virtual=True)
    place, lent = "VMBUS:00/f8615163-df3e-46c5-913f-f2d2f965ed0e", ("VMBUS:00", "pci0001:00", "0001:00:02.0")
    systree.device(*lent, kind=0x020000, vendor=0x15B3)
    systree.interface("enP1s1", *lent, speed="50000")
    systree.interface("eth0", place, speed="50000", driver="hv_netvsc")
    systree.link(f"sys/devices/{place}/net/eth0/lower_enP1s1", "/".join(["sys/devices", *lent, "net/enP1s1"]))
    systree.link("/".join(["sys/devices", *lent, "net/enP1s1/master"]), f"sys/devices/{place}/net/eth0")
    (nic,) = read(systree.root).nics
    assert (nic.key, [port.above for port in nic.ports]) == ("0001:00:02.0", ["eth0"])  # eth0 has the address


def test_a_containers_vlan_is_no_second_card(systree: "SysTree") -> None:
    systree.host({0: "0-15"})
    for name, index, below in (("eth0", "9", "33"), ("eth0.5", "10", "9"), ("macvlan0", "11", "9")):
        own = f"sys/devices/virtual/net/{name}"
        for file, text in (("type", "1"), ("ifindex", index), ("iflink", below)):
            systree.write(f"{own}/{file}", text)
        systree.link(f"sys/class/net/{name}", own)
        if name != "eth0":
            systree.link(f"{own}/lower_eth0", "sys/devices/virtual/net/eth0")
    assert [nic.key for nic in read(systree.root).nics] == ["eth0"]


def test_minus_one_is_the_only_node_or_unknown(systree: "SysTree") -> None:
    systree.host({0: "0-15"})
    systree.device(ROOT, "0000:01:00.0", kind=0x030200, vendor=0x10DE, numa=-1)
    assert read(systree.root).gpus[0].parent == "numa0"
    systree.write("sys/devices/system/node/node1/cpulist", "16-31")
    machine = read(systree.root)
    assert machine.gpus[0].parent == f"numa?@{ROOT}"
    assert any("NUMA node -1" in note for note in machine.notes)


def test_memory_only_nodes_are_no_cpus(systree: "SysTree") -> None:
    systree.host({0: "0-15"})
    systree.write("sys/devices/system/node/node1/cpulist", "")
    assert [cpu.numa for cpu in read(systree.root).cpus] == [0]


def test_infiniband_entries_without_a_pci_device_are_kept(systree: "SysTree", fixtures: Path) -> None:
    systree.host({0: "0-15"})
    (systree.root / "sys/class").mkdir(parents=True)
    (systree.root / "sys/class/infiniband").symlink_to(fixtures / "sys-class-infiniband-h100")
    machine = read(systree.root)
    names = {nic.key: nic.ports[0].bits_per_second for nic in machine.nics}
    assert len(names) == 9
    assert names["mlx5_bond_0"] == 200e9
    assert names["mlx5_0"] == 400e9


def test_symlink_loops_pipes_and_foreign_links_leave_a_partial_answer(systree: "SysTree", tmp_path: Path) -> None:
    gpu_server(systree, 2)
    (systree.root / "sys/bus/pci/devices/0000:ee:00.0").symlink_to("0000:ee:00.0")
    (systree.root / "sys/bus/pci/devices/0000:ef:00.0").symlink_to(tmp_path)
    (systree.root / "sys/class/infiniband/loop").symlink_to("loop")
    (systree.root / "sys/class/net").mkdir(parents=True)
    (systree.root / "sys/class/net/loop").symlink_to("../net")
    os.mkfifo(systree.root / "sys/devices/system/node/node0/fifo")
    (systree.root / "proc/sys/kernel/hostname").unlink()
    os.mkfifo(systree.root / "proc/sys/kernel/hostname")
    machine = read(systree.root)
    assert len(machine.gpus) == 2
    assert machine.hostname is None
    assert len([note for note in machine.notes if "0000:e" in note]) == 2


def test_a_folder_that_is_no_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="no folder `sys`"):
        read(tmp_path)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts the files and folders that are opened."""
    count = 0
    real = os.open

    def counting(*arguments: object, **more: object) -> int:
        nonlocal count
        count += 1
        return real(*arguments, **more)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(os, "open", counting)
    return lambda: count


def test_reading_costs_the_same_for_every_device(systree: "SysTree", tmp_path: Path, opened: Callable[[], int]) -> None:
    counts = []
    for gpus, root in ((40, "small"), (160, "large")):
        tree = type(systree)(tmp_path / root)
        gpu_server(tree, gpus)
        before = opened()
        machine = read(tree.root)
        counts.append((opened() - before) / len(os.listdir(tree.root / "sys/bus/pci/devices")))  # noqa: PTH208
        assert len(machine.gpus) == gpus
    assert counts[1] <= counts[0] * 1.05


@pytest.mark.parametrize(("written", "product"), [("DGXH100", "DGXH100"), ("System Product Name", None)])
def test_the_model_is_what_the_maker_wrote(systree: "SysTree", written: str, product: str | None) -> None:
    systree.host({0: "0-15"})
    systree.write("sys/class/dmi/id/product_name", written)
    assert read(systree.root).product == product


def test_nvidias_driver_names_its_gpus_without_its_libraries(systree: "SysTree") -> None:
    systree.host({0: "0-15"})
    uuids = {"0000:01:00.0": "GPU-9221d5d1-b60b-a624-bf14-0a1819cfda3b", "0000:02:00.0": "GPU-????????-????-????"}
    for bus, uuid in uuids.items():
        systree.device(ROOT, bus, kind=0x030200, vendor=0x10DE)
        about = f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 10\nGPU UUID: \t {uuid}\nBus Location: \t {bus}"
        systree.write(f"proc/driver/nvidia/gpus/{bus}/information", about)
    one, other = read(systree.root).gpus
    assert (one.name, one.uuid) == ("NVIDIA H100 80GB HBM3", uuids["0000:01:00.0"])
    assert (other.name, other.uuid) == ("NVIDIA H100 80GB HBM3", None)


def kfd(systree: "SysTree", number: int, location: int, unique: int = 0, *, simds: int = 416, version: int = 0) -> None:
    about = f"cpu_cores_count 0\nsimd_count {simds}\nlocation_id {location}\ndomain 0\nunique_id {unique}"
    about += f"\ngfx_target_version {version}"
    systree.write(f"sys/class/kfd/kfd/topology/nodes/{number}/properties", about)


def test_amds_driver_numbers_its_gpus_in_an_order_of_its_own(systree: "SysTree") -> None:
    systree.host({0: "0-15"})
    for bus in ("03", "23", "43", "63"):
        systree.device(ROOT, f"0000:{bus}:00.0", kind=0x038000, vendor=0x1002)
    kfd(systree, 0, 0, simds=0)
    for number, place in ((10, 0x0300), (2, 0x4300), (3, 0x2300)):  # 63 is not given to this container
        kfd(systree, number, place, 0xDEADBEEF0 + number)
    systree.write("sys/class/kfd/kfd/topology/nodes/4/gpu_id", "0")
    assert [(gpu.key, gpu.index, gpu.uuid) for gpu in read(systree.root).gpus] == [
        ("0000:03:00.0", 2, "GPU-0000000deadbeefa"),
        ("0000:23:00.0", 1, "GPU-0000000deadbeef3"),
        ("0000:43:00.0", 0, "GPU-0000000deadbeef2"),
        ("0000:63:00.0", None, None),
    ]


@pytest.mark.parametrize(("device", "version", "name", "architecture", "gigabytes"), [
    (0x74A1, 90402, "AMD Instinct MI300X", "gfx942", 5300),
    (0x74A5, 90402, "AMD Instinct MI325X", "gfx942", 6000),
    (0x75A3, 90500, "AMD Instinct MI355X", "gfx950", 8000),
    (0x740C, 90010, "AMD Instinct MI250X", "gfx90a", 1638),
    (0x1586, 110501, "AMD Radeon 8060S or 8050S", "gfx1151", 256),
    (0x7551, 120001, "AMD Radeon AI PRO R9700", "gfx1201", 640),
    (0x1681, 100305, None, "gfx1035", 256),  # nothing is known of it: AMD's slowest
])  # fmt: skip
def test_amds_cards_have_model_architecture_and_memory(
    systree: "SysTree", device: int, version: int, name: str | None, architecture: str, gigabytes: float
) -> None:
    systree.host({0: "0-15"})
    systree.device(ROOT, "0000:03:00.0", kind=0x038000, vendor=0x1002, device=device)
    kfd(systree, 1, 0x0300, version=version)
    [gpu] = read(systree.root).gpus
    assert (gpu.name, gpu.architecture) == (name, architecture)
    assert memory_bytes_per_second(gpu) == gigabytes * 1e9


@pytest.mark.parametrize("bit", [28, 0])
def test_a_card_of_amd_in_partitions_is_as_many_gpus(systree: "SysTree", bit: int) -> None:
    systree.host({0: "0-15"})
    systree.device(ROOT, "0000:05:00.0", kind=0x120000, vendor=0x1002)
    for part in range(4):
        kfd(systree, 1 + part, 0x0500 | part << bit)
    gpus = read(systree.root).gpus
    assert [(gpu.key, gpu.part, gpu.index) for gpu in gpus] == [
        ("0000:05:00.0", 0, 0), ("0000:05:00.0/1", 1, 1), ("0000:05:00.0/2", 2, 2), ("0000:05:00.0/3", 3, 3),
    ]  # fmt: skip
    assert {gpu.bus for gpu in gpus} == {"0000:05:00.0"}


def test_beside_another_makers_gpu_amds_are_not_numbered(systree: "SysTree") -> None:
    systree.host({0: "0-15"})
    systree.device(ROOT, "0000:01:00.0", kind=0x030200, vendor=0x10DE)
    systree.device(ROOT, "0000:0b:00.0", kind=0x030000, vendor=0x1002)
    kfd(systree, 1, 0x0B00)
    assert [gpu.index for gpu in read(systree.root).gpus] == [None, None]


@pytest.mark.parametrize(("name", "below", "code", "speed", "driver", "wanted"), [
    ("thunderbolt0", "domain0/0-0/0-1/0-1.0", 0x0C0340, "20000", "thunderbolt-net", 10e9),  # USB4 or Thunderbolt 4
    ("thunderbolt0", "domain0/0-0/0-1/0-1.0", 0x088000, "20000", "thunderbolt-net", 10e9),  # Thunderbolt 3
    ("enx00e04c", "usb4/4-1/4-1:1.0", 0x0C0330, "2500", "r8152", 2.5e9),  # an adapter on USB 3
    ("usb0", "usb2/2-1/2-1:1.0", 0x0C0320, "425", "cdc_ether", 425e6),
])  # fmt: skip
def test_an_adapter_on_usb_or_thunderbolt_is_a_card(
    systree: "SysTree", name: str, below: str, code: int, speed: str, driver: str, wanted: float
) -> None:
    """The only link of many a pair of small machines: below a controller that is no network card."""
    systree.host({0: "0-15"})
    systree.device("pci0000:00", "0000:c7:00.5", kind=code, vendor=0x1022)
    systree.device("pci0000:00", "0000:c3:00.0", kind=0x020000, vendor=0x10EC)
    systree.interface("enp195s0", "pci0000:00", "0000:c3:00.0", speed="5000", driver="r8169")
    systree.interface(name, "pci0000:00", "0000:c7:00.5", below, speed=speed, driver=driver)
    machine = read(systree.root)
    found = {nic.ports[0].name: (nic.parent, nic.ports[0].bits_per_second) for nic in machine.nics}
    assert found == {"enp195s0": ("numa0", 5e9), name: ("numa0", wanted)}
