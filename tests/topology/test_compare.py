from dataclasses import replace

import pytest

from gradwire.topology.assign import nic_sharing
from gradwire.topology.compare import RankPlacement, compare, nvlink_domains, ring_cost
from gradwire.topology.graph import Machine
from gradwire.topology.presets import dgx_h100, pcie_box
from gradwire.topology.show import draw, json_form


def nodes(count: int) -> list[Machine]:
    return [replace(dgx_h100(), hostname=f"node{i}") for i in range(count)]


def in_order(count: int, each: int) -> list[RankPlacement]:
    return [RankPlacement(rank=r, node=r // each, gpu=r % each) for r in range(count * each)]


def round_robin(count: int, each: int) -> list[RankPlacement]:
    return [RankPlacement(rank=r, node=r % count, gpu=r // count) for r in range(count * each)]


def test_equal_nodes_with_ranks_in_order_have_no_findings() -> None:
    assert compare(nodes(4), in_order(4, 8)) == []


def test_the_odd_node_out_is_named_with_what_differs() -> None:
    machines = nodes(4)
    machines[2] = replace(machines[2], gpus=machines[2].gpus[:7], links=machines[2].links[:-4])
    (finding,) = [line for line in compare(machines, []) if "GPUs:" in line and "nearest" not in line]
    assert finding.startswith("node2 differs: GPUs: 7 x NVIDIA H100")
    assert "3 of 4 nodes have 8 x" in finding


@pytest.mark.parametrize(("count", "each"), [(2, 4), (4, 8), (3, 1)])
def test_round_robin_costs_a_ring_as_many_times_the_bytes_as_a_node_has_ranks(count: int, each: int) -> None:
    assert ring_cost({place.rank: place.node for place in in_order(count, each)}) == 1
    assert ring_cost({place.rank: place.node for place in round_robin(count, each)}) == each


def test_round_robin_is_reported() -> None:
    found = compare(nodes(2), round_robin(2, 8))
    assert any(line.startswith("The ranks of node0 are not consecutive: 0, 2, 4") for line in found)
    assert any("puts 8 times the necessary bytes" in line for line in found)


def test_a_rank_on_the_wrong_nic_is_told_the_right_one() -> None:
    found = compare(nodes(1), [RankPlacement(rank=0, node=0, gpu=0, nic="mlx5_7")])
    assert found == ["Rank 0 on node0: GPU0 sends through mlx5_7 at SYS; mlx5_0 is at PIX."]
    assert compare(nodes(1), [RankPlacement(rank=0, node=0, gpu=0, nic="mlx5_0")]) == []


def test_a_nearer_nic_that_is_down_is_said_to_be_down() -> None:
    (machine,) = nodes(1)
    port = replace(machine.nics[0].ports[0], active=False)
    machine = replace(machine, nics=(replace(machine.nics[0], ports=(port,)), *machine.nics[1:]))
    found = compare([machine], [RankPlacement(rank=0, node=0, gpu=0, nic="mlx5_1")])
    assert found == ["Rank 0 on node0: GPU0 sends through mlx5_1 at PHB; mlx5_0 (down) is at PIX."]


def test_a_gpu_without_a_near_nic_is_named() -> None:
    found = compare([pcie_box()], [RankPlacement(rank=3, node=0, gpu=3)])
    assert found == ["Rank 3 on pcie_box: GPU3 has no NIC nearer than mlx5_0 at SYS: no GPUDirect RDMA by default."]


def test_ranks_that_share_a_gpu_are_named() -> None:
    twice = [RankPlacement(rank=r, node=0, gpu=0) for r in range(2)]
    assert compare(nodes(1), twice) == ["Ranks 0, 1 share GPU0 of node0."]


def test_ranks_on_cpus_and_one_node_need_no_nic() -> None:
    assert compare(nodes(1), [RankPlacement(rank=r, node=0) for r in range(8)]) == []
    assert ring_cost({0: 0, 1: 0}) == 0
    assert ring_cost({}) == 0
    assert compare([], []) == []


@pytest.mark.parametrize(
    ("drivers", "fastest", "told"),
    [
        ({0: "a", 1: "b"}, ("a", "b"), None),
        ({0: "a", 1: "a"}, ("a",), None),
        ({0: "a", 1: None}, ("a", "b"), None),
        ({0: "a", 1: "a"}, ("a", "b", "c"), "ranks 0, 1 share a while b, c is idle"),
    ],
)
def test_a_shared_card_matters_only_beside_an_idle_one(
    drivers: dict[int, str | None], fastest: tuple[str, ...], told: str | None
) -> None:
    assert nic_sharing(drivers, fastest) == told


def test_ranks_that_share_a_nic_beside_an_idle_one_are_named() -> None:
    places = [RankPlacement(rank=rank, node=0, gpu=rank, nic="mlx5_0") for rank in (0, 1)]
    assert any(line.startswith("On node0 ranks 0, 1 share mlx5_0 while") for line in compare(nodes(1), places))


def test_trays_of_one_nvlink_domain_are_named() -> None:
    def tray(domain: str | None) -> Machine:
        machine = dgx_h100()
        return replace(machine, gpus=tuple(replace(gpu, nvlink_domain=domain) for gpu in machine.gpus))

    (said,) = nvlink_domains([tray("aa/1"), tray("aa/1"), tray("aa/2"), tray(None)])
    assert said.startswith("Nodes 0, 1 are one NVLink domain (clique 1)")
    assert nvlink_domains([tray(None), tray(None), tray("aa/1")]) == []
    mixed = replace(tray("aa/1"), gpus=(*tray("aa/1").gpus[:4], *tray("aa/2").gpus[4:]))
    assert mixed.nvlink_domain is None
    assert json_form.read(json_form.write(tray("aa/1"))).nvlink_domain == "aa/1"
    assert "NVLink domain of several hosts, clique 1" in draw.summary(tray("aa/1"))
