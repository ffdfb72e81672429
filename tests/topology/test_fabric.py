"""What NCCL's model asks about a machine."""

from dataclasses import replace

import pytest

from gradwire.topology.fabric import NETWORK_SECONDS, fabric_of, network_of_nics, sender_nics, slowest_memory
from gradwire.topology.graph import Machine, Nic, Port
from gradwire.topology.presets import cpu_only, dgx_a100, dgx_h100, mi300x, p4d, pcie_box


@pytest.mark.parametrize(
    ("machine", "capability", "nvlink", "nvls", "ll128", "amd_cpu", "network"),
    [
        (dgx_a100(), 80, True, False, True, True, "infiniband"),
        (dgx_h100(), 90, True, True, True, False, "infiniband"),
        (p4d(), 80, True, False, True, False, "efa"),
        (pcie_box(), 86, False, False, False, False, "infiniband"),
    ],
    ids=["dgx_a100", "dgx_h100", "p4d", "pcie_box"],
)
def test_facts_of_known_machines(
    machine: Machine, capability: int, nvlink: bool, nvls: bool, ll128: bool, amd_cpu: bool, network: str
) -> None:
    fabric = fabric_of(machine)
    assert fabric is not None
    found = (fabric.compute_capability, fabric.nvlink, fabric.nvls, fabric.ll128, fabric.amd_cpu, fabric.network)
    assert found == (capability, nvlink, nvls, ll128, amd_cpu, network)
    assert fabric.network_seconds == NETWORK_SECONDS[network]


def test_nothing_is_said_of_machines_without_known_nvidia_gpus() -> None:
    assert fabric_of(cpu_only()) is None
    machine = dgx_a100()
    unknown = replace(machine.gpus[0], compute_capability=None)
    assert fabric_of(replace(machine, gpus=(unknown, *machine.gpus[1:]))) is None
    amd = tuple(replace(gpu, vendor=0x1002, architecture="gfx942") for gpu in machine.gpus)
    assert fabric_of(replace(machine, gpus=amd)) is None


def test_the_memory_of_any_makers_cards_is_known_and_that_of_their_slices_is_not() -> None:
    assert slowest_memory(mi300x()) == 5300e9 and slowest_memory(cpu_only()) is None
    box = pcie_box()
    slow = replace(box.gpus[1], memory_bytes_per_second=1e9)
    assert slowest_memory(replace(box, gpus=(*box.gpus[:1], slow))) == 1e9
    assert slowest_memory(replace(box, gpus=(*box.gpus[:1], replace(slow, slices=("MIG-0",))))) is None


def test_another_network_is_not_near_the_gpus() -> None:
    fabric = fabric_of(dgx_h100(), network="tcp")
    assert fabric is not None
    assert fabric.network == "tcp" and not fabric.ll128 and fabric.nvls


def test_the_network_is_that_of_the_slowest_card() -> None:
    ethernet = Nic(key="eth0", ports=(Port(name="eth0", interfaces=("eth0",), link_layer="Ethernet"),))
    roce = Nic(key="mlx5_0", vendor=0x15B3, ports=(Port(name="mlx5_0", interfaces=("eth1",), link_layer="Ethernet"),))
    infiniband = Nic(key="mlx5_1", ports=(Port(name="mlx5_1", link_layer="InfiniBand"),))
    by_class = Nic(key="mlx5_2", class_code=0x020700)
    efa = Nic(key="efa0", vendor=0x1D0F, device=0xEFA1, ports=(Port(name="rdmap16s27"),))
    cray = Nic(key="cxi0", vendor=0x17DB, ports=(Port(name="cxi0", interfaces=("hsn0",)),))
    names = [network_of_nics([nic]) for nic in (ethernet, roce, infiniband, by_class, efa, cray)]
    assert names == ["tcp", "roce", "infiniband", "infiniband", "efa", "slingshot"]
    assert network_of_nics([]) == "tcp"
    assert network_of_nics([infiniband, ethernet]) == "tcp"


def test_a_gpu_uses_the_cards_near_it() -> None:
    assert [sender_nics(nics, ranks) for nics, ranks in ((8, 8), (4, 8), (8, 4), (1, 8))] == [1, 1, 2, 1]
