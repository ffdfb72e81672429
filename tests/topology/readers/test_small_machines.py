"""Machines of people without a cluster, and cloud machines without switches: which card is used, and how fast it is."""

from typing import TYPE_CHECKING

import pytest

from gradwire.bench.doctor.local import read_interfaces
from gradwire.topology.assign import fastest_nics, nic_for_local_rank, nics_of_gpus
from gradwire.topology.bandwidth import nic_bytes_per_second
from gradwire.topology.levels import levels_of
from gradwire.topology.presets import PRESETS
from gradwire.topology.readers.sysfs import read

if TYPE_CHECKING:
    from topology.conftest import SysTree

ROOT = "pci0000:00"
ETHERNET, WIFI, USB, USB4, BRIDGE, GPU = 0x020000, 0x028000, 0x0C0330, 0x0C0340, 0x060400, 0x030000
INTEL, AMD, NVIDIA, AMAZON = 0x8086, 0x1002, 0x10DE, 0x1D0F


def docked(systree: "SysTree", *, rate: str) -> tuple[str, ...]:
    """Adds a Thunderbolt dock; returns the chain of its PCIe switch's last port, which leads through the tunnel."""
    chain = (ROOT, "0000:00:07.0", "0000:2b:00.0", "0000:2c:01.0")
    for length in (2, 3, 4):
        systree.device(
            *chain[:length], kind=BRIDGE, vendor=INTEL, max_link_speed=rate, current_link_width="4",
            removable="fixed" if length == 2 else "removable",
        )  # fmt: skip
    return chain


def test_wireless_is_not_taken_before_a_cable(systree: "SysTree") -> None:
    """A small machine has both: the PCIe link of the wireless card is faster than the cable's 2.5 Gbit/s."""
    systree.host({0: "0-31"})
    systree.device(ROOT, "0000:c5:00.0", kind=GPU, vendor=AMD)
    systree.device(
        ROOT, "0000:c3:00.0", kind=WIFI, vendor=0x14C3, max_link_speed="8.0 GT/s PCIe", current_link_width="1"
    )
    systree.interface("wlp195s0", ROOT, "0000:c3:00.0", speed="", driver="mt7925e")
    systree.device(ROOT, "0000:c4:00.0", kind=ETHERNET, vendor=0x10EC, current_link_width="1")
    systree.interface("enp196s0", ROOT, "0000:c4:00.0", speed="2500", driver="r8169")
    machine = read(systree.root)
    assert [nic.key for nic in fastest_nics(machine.nics)] == ["0000:c4:00.0"]
    assert levels_of(machine)[1].bytes_per_second == 2.5e9 / 8


def test_a_machine_with_nothing_but_wireless_uses_it(systree: "SysTree") -> None:
    systree.host({0: "0-7"})
    systree.device(ROOT, "0000:c3:00.0", kind=WIFI, vendor=INTEL)
    systree.interface("wlan0", ROOT, "0000:c3:00.0", speed="", driver="iwlwifi")
    assert [nic.key for nic in fastest_nics(read(systree.root).nics)] == ["0000:c3:00.0"]


@pytest.mark.parametrize(("rate", "wanted"), [("2.5 GT/s PCIe", 10e9 / 8), ("8.0 GT/s PCIe", 10e9 / 8)])
def test_a_card_in_a_dock_is_as_fast_as_its_cable(systree: "SysTree", rate: str, wanted: float) -> None:
    """A PCIe tunnel always says 2.5 GT/s, which four lanes would make 6 Gbit/s of a card of 10."""
    systree.host({0: "0-15"})
    chain = (*docked(systree, rate=rate), "0000:2d:00.0")
    systree.device(*chain, kind=ETHERNET, vendor=0x1D6A, current_link_width="4", removable="removable")
    systree.interface("enp45s0", *chain, speed="10000", driver="atlantic")
    (nic,) = read(systree.root).nics
    assert nic_bytes_per_second(nic) == wanted


def test_an_old_card_inside_the_machine_keeps_its_slow_link(systree: "SysTree") -> None:
    systree.host({0: "0-15"})
    systree.device(ROOT, "0000:05:00.0", kind=ETHERNET, vendor=INTEL, max_link_speed="2.5 GT/s PCIe",
                   current_link_width="4", removable="fixed")  # fmt: skip
    systree.interface("enp5s0", ROOT, "0000:05:00.0", speed="10000", driver="ixgbe")
    (nic,) = read(systree.root).nics
    assert nic_bytes_per_second(nic) == 0.75e9


def test_a_gpu_in_an_enclosure_has_an_unknown_link(systree: "SysTree") -> None:
    systree.host({0: "0-15"})
    chain = (*docked(systree, rate="2.5 GT/s PCIe"), "0000:2d:00.0")
    systree.device(*chain, kind=GPU, vendor=NVIDIA, removable="removable")
    (gpu,) = read(systree.root).gpus
    assert gpu.pcie is not None and gpu.pcie.virtual


def test_an_adapter_in_a_dock_is_a_card_beside_the_one_on_the_board(systree: "SysTree") -> None:
    """On USB below the controller of a dock, three bridges and a hub away."""
    systree.host({0: "0-15"})
    chain = (*docked(systree, rate="2.5 GT/s PCIe"), "0000:2f:00.0")
    systree.device(*chain, kind=USB, vendor=INTEL, removable="removable")
    systree.interface("enx00aa", *chain, "usb6", "6-1", "6-1.2", "6-1.2:2.0", speed="5000", driver="r8152")
    systree.device(ROOT, "0000:00:1f.6", kind=ETHERNET, vendor=INTEL)
    systree.interface("eno1", ROOT, "0000:00:1f.6", speed="1000", driver="e1000e")
    machine = read(systree.root)
    assert nic_for_local_rank(machine, 0) == fastest_nics(machine.nics)[0]
    assert levels_of(machine)[1].bytes_per_second == 5e9 / 8


@pytest.mark.parametrize("stated", ["20000", "40000", ""])
def test_a_usb4_cable_is_as_fast_as_that_of_the_preset(systree: "SysTree", stated: str) -> None:
    """Its driver states the rate of the cable, or none, of which TCP reaches 10 Gbit/s."""
    systree.host({0: "0-31"})
    systree.device(ROOT, "0000:c5:00.0", kind=GPU, vendor=AMD)
    systree.device(ROOT, "0000:c7:00.5", kind=USB4, vendor=0x1022)
    below = "domain0/0-0/0-1/0-1.0"
    systree.interface("thunderbolt0", ROOT, "0000:c7:00.5", below, speed=stated, driver="thunderbolt-net")
    live, preset = levels_of(read(systree.root))[1], levels_of(PRESETS["strix_halo"]())[1]
    assert live == preset
    (doctors,) = read_interfaces(systree.root)
    assert doctors.bits_per_second == 8 * (live.bytes_per_second or 0) == 10e9


def test_two_usb4_cables_are_two_cards(systree: "SysTree") -> None:
    """Three small machines in a ring: each has a neighbour on either side."""
    systree.host({0: "0-31"})
    for number, bus in enumerate(("0000:c7:00.5", "0000:c7:00.6")):
        systree.device(ROOT, bus, kind=USB4, vendor=0x1022)
        below = f"domain{number}/{number}-0/{number}-1/{number}-1.0"
        systree.interface(f"thunderbolt{number}", ROOT, bus, below, speed="20000", driver="thunderbolt-net")
    machine = read(systree.root)
    assert [nic.ports[0].name for nic in fastest_nics(machine.nics)] == ["thunderbolt0", "thunderbolt1"]
    assert [nic_for_local_rank(machine, rank) for rank in range(2)] == list(machine.nics)


def test_a_gpu_drives_a_card_with_rdma_and_not_a_nearer_one_without(systree: "SysTree") -> None:
    """Eight RTX PRO 6000 and four EFA cards at root ports of their own, and Amazon's Ethernet, which tells no rate."""
    systree.host({0: "0-95", 1: "96-191"})
    for index in range(8):
        bus = 0x10 * (index + 1)
        systree.device(f"pci0000:{bus:02x}", f"0000:{bus + 1:02x}:00.0", kind=0x030200, vendor=NVIDIA, numa=index // 4)
    cards = []
    for index in range(4):
        bus = 0x10 * (index + 1)
        chain = (f"pci0000:{bus:02x}", f"0000:{bus + 3:02x}:00.0")
        cards.append(chain[1])
        systree.device(*chain, kind=ETHERNET, vendor=AMAZON, device=0xEFA3, numa=index // 2)
        systree.rdma(f"rdmap{bus + 3}s0", *chain, layer="Unspecified")
    systree.device(ROOT, "0000:00:05.0", kind=ETHERNET, vendor=AMAZON, device=0xEC20)
    systree.interface("ens5", ROOT, "0000:00:05.0", speed="-1", driver="ena")
    chosen = [nic.key for nic in nics_of_gpus(read(systree.root)).values() if nic is not None]
    assert sorted(chosen) == sorted(cards * 2)


def test_the_two_halves_of_a_sparks_port_are_two_cards_of_four_lanes(systree: "SysTree") -> None:
    """Each is a PCIe function in a domain of its own, which says 200 Gbit/s and carries 12 GB/s."""
    systree.host({0: "0-19"})
    systree.device("pci000f:00", "000f:00:00.0", kind=BRIDGE, vendor=NVIDIA)
    systree.device("pci000f:00", "000f:00:00.0", "000f:01:00.0", kind=GPU, vendor=NVIDIA)
    for domain, prefix in (("0000", "enp1s0"), ("0002", "enP2p1s0")):
        systree.device(f"pci{domain}:00", f"{domain}:00:00.0", kind=BRIDGE, vendor=NVIDIA)
        for number, state in enumerate(("up", "down")):
            chain = (f"pci{domain}:00", f"{domain}:00:00.0", f"{domain}:01:00.{number}")
            systree.device(*chain, kind=ETHERNET, vendor=0x15B3, device=0x1021, current_link_width="4")
            systree.interface(f"{prefix}f{number}np{number}", *chain, speed="200000", state=state)
    machine = read(systree.root)
    assert [(nic.key, nic.functions) for nic in machine.nics] == [("0000:01:00.0", 2), ("0002:01:00.0", 2)]
    assert [nic_bytes_per_second(nic) for nic in machine.nics] == [12e9, 12e9]
    assert levels_of(machine)[1].bytes_per_second == 12e9
