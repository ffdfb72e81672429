from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.topology.bandwidth import (
    AMD_MEMORY,
    memory_bytes_per_second,
    nic_bytes_per_second,
    nvlink_bytes_per_second,
    pcie_bytes_per_second,
    socket_bytes_per_second,
    xgmi_bytes_per_second,
)
from gradwire.topology.graph import Cpu, Gpu, Nic, PcieLink, Port
from gradwire.topology.pci_ids import PciRole, normal_bus_id, role_of_class, role_of_function
from gradwire.topology.readers.affinity import cores_of_mask, members, ranges


@pytest.mark.parametrize(
    ("rate", "lanes", "gigabytes"),
    [(8.0, 16, 12), (16.0, 16, 24), (32.0, 16, 48), (64.0, 16, 96), (8.0, 8, 6), (2.5, 1, 0.1875)],
)
def test_pcie_generations(rate: float, lanes: int, gigabytes: float) -> None:
    assert pcie_bytes_per_second(PcieLink(gigatransfers_per_second=rate, lanes=lanes)) == gigabytes * 1e9


@pytest.mark.parametrize(
    "link",
    [
        None,
        PcieLink(),
        PcieLink(gigatransfers_per_second=16.0),
        PcieLink(lanes=16),
        PcieLink(gigatransfers_per_second=7.0, lanes=16),
        PcieLink(gigatransfers_per_second=16.0, lanes=16, virtual=True),
    ],
)
def test_an_unknown_or_virtual_pcie_link_has_no_rate(link: PcieLink | None) -> None:
    assert pcie_bytes_per_second(link) is None


@pytest.mark.parametrize(
    ("capability", "count", "gigabytes"),
    [
        (60, 4, 72),
        (70, 6, 120),
        (80, 12, 240),
        (86, 4, 48),
        (89, 1, 20),
        (90, 18, 370.8),
        (100, 18, 721.8),
        (120, 1, 40.1),
    ],
)
def test_nvlink_generations(capability: int, count: int, gigabytes: float) -> None:
    rate = nvlink_bytes_per_second(Gpu(key="g", compute_capability=capability), count)
    assert rate == pytest.approx(gigabytes * 1e9)


def test_a_generation_without_a_figure_is_unknown() -> None:
    assert nvlink_bytes_per_second(Gpu(key="rubin", compute_capability=107), 18) is None
    assert xgmi_bytes_per_second(Gpu(key="mi355x", architecture="gfx950"), 7) == pytest.approx(336e9)


def test_unknown_generations_have_no_rate() -> None:
    assert nvlink_bytes_per_second(Gpu(key="g"), 4) is None
    assert nvlink_bytes_per_second(Gpu(key="g", compute_capability=52), 4) is None
    assert xgmi_bytes_per_second(Gpu(key="g", architecture="gfx1100"), 4) is None
    assert xgmi_bytes_per_second(Gpu(key="g", architecture="gfx942"), 7) == 336e9


MEMORIES = {
    "NVIDIA A100-SXM4-40GB": (80, 1555), "NVIDIA A100-PCIE-40GB": (80, 1555), "NVIDIA A100-SXM4-80GB": (80, 2039),
    "NVIDIA A100 80GB PCIe": (80, 2039), "GA100 [A100 SXM4 40GB]": (80, 1555),
    "NVIDIA Corporation GA100 [A100 SXM4 80GB]": (0, 2039), "GH100 [H100 SXM5 80GB]": (0, 3350),
    "Tesla V100-SXM2-16GB": (70, 900), "GB202GL [RTX PRO 6000 Blackwell Server Edition]": (0, 1597),
    "NVIDIA A30": (80, 933),
    "NVIDIA A10": (86, 600), "NVIDIA A10G": (86, 600), "NVIDIA A40": (86, 696), "NVIDIA RTX A6000": (86, 768),
    "NVIDIA GeForce RTX 3090": (86, 936), "Orin": (87, 205), "NVIDIA L4": (89, 300), "NVIDIA L40": (89, 864),
    "NVIDIA L40S": (89, 864), "NVIDIA GeForce RTX 4090": (89, 1008), "NVIDIA RTX 6000 Ada Generation": (89, 960),
    "NVIDIA H100 80GB HBM3": (90, 3350), "NVIDIA H100 PCIe": (90, 2039), "NVIDIA H100 NVL": (90, 3938),
    "NVIDIA H200": (90, 4800), "NVIDIA H200 NVL": (90, 4800), "NVIDIA H20": (90, 4000),
    "NVIDIA GH200 480GB": (90, 4000), "NVIDIA GH200 144G HBM3e": (90, 4900), "NVIDIA B200": (100, 8000),
    "NVIDIA GB200": (100, 8000), "NVIDIA B300 SXM6 AC": (103, 8000), "NVIDIA GB10": (121, 273),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (120, 1792),
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": (120, 1792),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (120, 1597), "NVIDIA RTX PRO 5000 Blackwell": (120, 1344),
    "NVIDIA GeForce RTX 5090": (120, 1792), "NVIDIA GeForce RTX 5080": (120, 960),
    "AMD Instinct MI250X": ("gfx90a", 1638), "AMD Instinct MI300X": ("gfx942", 5300),
    "AMD Instinct MI325X OAM": ("gfx942", 6000), "Aqua Vanjaram [Instinct MI325X]": (None, 6000),
    "AMD Instinct MI350X": ("gfx950", 8000), "AMD Instinct MI355X": ("gfx950", 8000),
    "AMD Radeon PRO W7900": ("gfx1100", 864), "AMD Radeon RX 7900 XT or XTX": ("gfx1100", 960),
}  # fmt: skip
"""Name that a driver, lspci or PCI ids give -> compute capability or architecture, GB/s of its data sheet."""


@pytest.mark.parametrize("name", MEMORIES)
def test_a_cards_memory_is_its_own_and_not_its_generations(name: str) -> None:
    kind, gigabytes = MEMORIES[name]
    gpu = Gpu(
        key="g", name=name, vendor=0x10DE if isinstance(kind, int) else 0x1002,
        compute_capability=kind if isinstance(kind, int) else None,
        architecture=kind if isinstance(kind, str) else None,
    )  # fmt: skip
    assert memory_bytes_per_second(gpu) / 1e9 == pytest.approx(gigabytes, rel=0.02)
    assert memory_bytes_per_second(replace(gpu, memory_bytes_per_second=1e9)) == 1e9  # the driver's comes first


@pytest.mark.parametrize(("sm", "gcn", "gigabytes"), [(104, "910", 1638), (304, "gfx942", 5300), (256, "gfx951", None)])
def test_amds_number_of_multiprocessors_is_no_capability(sm: int, gcn: str, gigabytes: float | None) -> None:
    """RCCL writes it where NCCL has the compute capability: 104 would be faster than any B200."""
    gpu = Gpu(key="g", vendor=0x1002, compute_capability=sm, architecture=gcn)
    assert memory_bytes_per_second(gpu) == (gigabytes or min(AMD_MEMORY.values())[0]) * 1e9


@pytest.mark.parametrize(
    ("cpu", "gigabytes"),
    [
        (Cpu(key="", vendor="GenuineIntel", model=0x4F), 6),
        (Cpu(key="", vendor="GenuineIntel", model=0x55), 10),
        (Cpu(key="", vendor="GenuineIntel", model=0x8F), 22),
        (Cpu(key="", vendor="GenuineIntel", model=0xCF), 40),
        (Cpu(key="", vendor="AuthenticAMD", model=1), 16),
        (Cpu(key="", architecture="arm64"), 6),
        (Cpu(key="", architecture="ppc64"), 32),
        (Cpu(key="", vendor="GenuineIntel"), None),
        (Cpu(key=""), None),
    ],
)
def test_links_between_sockets(cpu: Cpu, gigabytes: float | None) -> None:
    assert socket_bytes_per_second(cpu) == (None if gigabytes is None else gigabytes * 1e9)


def test_a_card_sends_what_its_ports_and_its_slot_allow() -> None:
    port = Port(name="p", bits_per_second=200e9, active=True)
    gen4 = PcieLink(gigatransfers_per_second=16.0, lanes=16)
    assert nic_bytes_per_second(Nic(key="n", ports=(port,))) == 25e9
    assert nic_bytes_per_second(Nic(key="n", ports=(port, port))) == 50e9
    assert nic_bytes_per_second(Nic(key="n", ports=(port, port), pcie=gen4)) == 24e9
    assert nic_bytes_per_second(Nic(key="n")) is None
    assert nic_bytes_per_second(Nic(key="n", ports=(Port(name="p", bits_per_second=1e9, active=False),))) is None


@given(st.sets(st.integers(0, 600), min_size=1))
def test_masks_and_ranges_say_the_same(cores: set[int]) -> None:
    text = ranges(sorted(cores))
    assert members(text) == sorted(cores)
    assert cores_of_mask(f"{sum(1 << core for core in cores):x}") == text


@pytest.mark.parametrize("mask", ["", "0", "xyz", ",", "f" * 20_000])
def test_masks_that_are_none(mask: str) -> None:
    assert cores_of_mask(mask) is None


def test_a_range_without_an_end_in_sight_is_bounded() -> None:
    assert len(members("0-999999")) == 65_537


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"), ("3b:00.0", "0000:3b:00.0"), ("10000:e1:00.0", "10000:e1:00.0"),
        ("0000:3b:00.8", None), ("3b:00", None), ("", None), ("0000:3b:00.0\n", "0000:3b:00.0"),
        ("fffffff:ffff:ff", None),
    ],
)  # fmt: skip
def test_bus_ids(text: str, expected: str | None) -> None:
    assert normal_bus_id(text) == expected


@pytest.mark.parametrize(
    ("code", "vendor", "in_a_file", "on_a_bus"),
    [
        (0x030200, 0x10DE, "gpu", "gpu"), (0x030000, 0x102B, "gpu", "other"), (0x120000, 0x1002, "gpu", "gpu"),
        (0x020700, 0x15B3, "nic", "nic"), (0x068000, 0x10DE, "nvswitch", "nvswitch"),
        (0x068000, 0x8086, "nvswitch", "other"),
        (0x060400, 0x1000, "switch", "switch"), (0x068001, None, "cpu", "cpu"), (0x010802, 0x144D, "other", "other"),
    ],
)  # fmt: skip
def test_roles(code: int, vendor: int | None, in_a_file: PciRole, on_a_bus: PciRole) -> None:
    assert role_of_class(code) == in_a_file
    assert role_of_function(code, vendor) == on_a_bus
