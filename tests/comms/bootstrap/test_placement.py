"""Who shares a node: from what ranks say, never from their numbers."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradwire.comms.bootstrap.kernel import host_identity
from gradwire.comms.bootstrap.placement import INTER_NODE, PeerInfo, cluster_of
from gradwire.comms.config import Config
from gradwire.comms.plan.codec_price import SLOWEST_GPU_BYTES_PER_SECOND
from gradwire.comms.plan.machine_cluster import cluster_of_machines, codec_bytes_per_second
from gradwire.comms.plan.payloads import gpu_memory_rate
from gradwire.comms.plan.planner import plan_all_reduce
from gradwire.topology.fabric import fabric_of, slowest_memory
from gradwire.topology.host_summary import Hardware
from gradwire.topology.levels import levels_of
from gradwire.topology.presets import dgx_h100, gb200_nvl72, mi300x, p4d
from support.simulate import simulate


def peer_infos(hosts: str, locations: list[tuple[str, ...]] | None = None) -> list[PeerInfo]:
    own = PeerInfo.here(0, len(hosts), Config(), torch.device("cpu"))
    return [
        replace(own, rank=rank, host=(host, "boot", "1"), location=locations[rank] if locations else ())
        for rank, host in enumerate(hosts)
    ]


@pytest.mark.parametrize(
    ("hosts", "nodes"),
    [
        ("aabb", ((0, 1), (2, 3))),
        ("abab", ((0, 2), (1, 3))),
        ("aaab", ((0, 1, 2), (3,))),
        ("baab", ((0, 3), (1, 2))),
        ("a", ((0,),)),
        ("abc", ((0,), (1,), (2,))),
    ],
)
def test_ranks_of_one_host_are_one_node(hosts: str, nodes: tuple[tuple[int, ...], ...]) -> None:
    assert cluster_of(peer_infos(hosts), Config()).nodes == nodes


@pytest.mark.parametrize("field", [0, 1, 2])
def test_another_hostname_kernel_or_shared_memory_is_another_node(field: int) -> None:
    here, there = peer_infos("aa")
    host = list(there.host)
    host[field] += "x"
    assert len(cluster_of([here, replace(there, host=tuple(host))], Config()).nodes) == 2


def test_equal_hosts_in_two_racks_are_two_nodes_of_three_levels() -> None:
    cluster = cluster_of(peer_infos("aabb", [("r1",), ("r1",), ("r2",), ("r2",)]), Config())
    assert [level.name for level in cluster.levels] == ["intra_node", "inter_node", "inter_rack"]
    assert cluster.nodes == ((0, 1), (2, 3))


def test_locations_of_different_depth_are_refused() -> None:
    with pytest.raises(ValueError, match="`hostname` has"):
        cluster_of(peer_infos("ab", [(), ("r1",)]), Config())


def test_the_slowest_known_nic_counts_and_an_unknown_one_makes_it_unknown() -> None:
    fast, slow, unknown = (Hardware(None, rate, None) for rate in (25e9, 3e9, None))
    here, there = peer_infos("ab")
    cluster = cluster_of([replace(here, hardware=fast), replace(there, hardware=slow)], Config())
    assert (cluster.levels[1].link.bytes_per_second, cluster.levels[1].unit_rates) == (3e9, (25e9, 3e9))
    silent = cluster_of([replace(here, hardware=fast), replace(there, hardware=unknown)], Config())
    assert silent.levels[1].link.bytes_per_second == INTER_NODE.bytes_per_second
    asked = cluster_of([replace(each, hardware=fast, nic_bytes_per_second=1e6) for each in (here, there)], Config())
    assert (asked.levels[1].link.bytes_per_second, asked.levels[1].unit_rates) == (1e6, ())


def test_this_host_says_hostname_boot_id_and_shared_memory() -> None:
    name, boot, memory = host_identity()
    assert name == socket.gethostname()
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert memory == str(Path("/dev/shm").stat().st_dev)
    assert host_identity("other")[0] == "other"


def gpu_ranks(
    hosts: str, config: Config | None = None, nics: str = "01234567", **changes: Any
) -> tuple[list[PeerInfo], Config]:
    """Ranks of DGX H100s, in CUDA memory; each drives the NIC with its local number."""
    fabric, config = fabric_of(dgx_h100()), config or Config()
    seen: dict[str, int] = {}
    found = []
    for peer_info in peer_infos(hosts):
        local = seen.setdefault(peer_info.host[0], 0)
        seen[peer_info.host[0]] += 1
        memory = slowest_memory(dgx_h100())
        facts = Hardware(370.8e9, 384e9, f"mlx5_{nics[local]}", nics=8, fabric=fabric, memory_bytes_per_second=memory)
        rate = config.given_rate
        found.append(replace(peer_info, device="cuda", hardware=replace(facts, **changes), nic_bytes_per_second=rate))
    return found, config


def test_cuda_ranks_plan_with_nccls_latencies_and_all_nics() -> None:
    cluster = cluster_of(*gpu_ranks("a" * 8 + "b" * 8))
    intra, inter = (level.link for level in cluster.levels)
    assert (intra.alpha_seconds, intra.bytes_per_second) == (3.4e-6, 370.8e9)
    assert (inter.alpha_seconds, inter.bytes_per_second, inter.nics, inter.sender_nics) == (14e-6, 384e9, 8, 1)
    assert cluster.fabric is not None and cluster.fabric.nvls
    assert cluster == replace(cluster_of_machines(dgx_h100(), 2), locations=cluster.locations)
    assert not intra.presumed and not inter.presumed


def test_cards_without_a_fabric_have_the_memory_of_the_slowest_of_them() -> None:
    """NCCL's model has no AMD GPU; what codecs cost on one is known all the same."""
    amd: dict[str, Any] = {"fabric": fabric_of(mi300x()), "memory_bytes_per_second": slowest_memory(mi300x())}
    infos, config = gpu_ranks("a" * 8 + "b" * 8, **amd)
    cluster = cluster_of(infos, config)
    assert cluster.fabric is None and gpu_memory_rate(cluster) == codec_bytes_per_second(mi300x())
    slow = replace(infos[3], hardware=replace(infos[3].hardware, memory_bytes_per_second=1e9))
    assert gpu_memory_rate(cluster_of([*infos[:3], slow, *infos[4:]], config)) == 0.7e9
    unknown = replace(infos[3], hardware=replace(infos[3].hardware, memory_bytes_per_second=None))
    assert gpu_memory_rate(cluster_of([unknown, *infos[1:]], config)) == SLOWEST_GPU_BYTES_PER_SECOND


def test_hosts_of_one_nvlink_domain_are_joined_by_nvlink_and_others_by_their_nics() -> None:
    """Two trays of an NVL72: 722 GB/s a GPU between them as inside, whatever their cards have."""
    machines = cluster_of_machines(gb200_nvl72(), 2)
    rate = machines.levels[0].link.bytes_per_second
    assert rate == pytest.approx(721.8e9)
    tray: dict[str, Any] = {"intra_node": rate, "fabric": fabric_of(gb200_nvl72()), "nvlink_domain": "aa/1",
                            "memory_bytes_per_second": slowest_memory(gb200_nvl72())}  # fmt: skip
    infos, config = gpu_ranks("aaaabbbb", **tray)
    inter = cluster_of(infos, config).levels[1].link
    assert (inter.bytes_per_second, inter.alpha_seconds, inter.nvlink) == (4 * rate, 3.4e-6, True)
    assert cluster_of(infos, config) == replace(machines, locations=cluster_of(infos, config).locations)
    other = [replace(e, hardware=replace(e.hardware, nvlink_domain="aa/2")) for e in infos[4:]]
    assert not cluster_of([*infos[:4], *other], config).levels[1].link.nvlink
    alone, config = gpu_ranks("aaaa", **tray)
    assert cluster_of(alone, config).fabric is not None


TRAYS = "".join(map(chr, range(ord("A"), ord("A") + 36)))
"""Names of the hosts of two NVL72."""


def trays(hosts: str, domains: dict[str, str], config: Config | None = None) -> tuple[list[PeerInfo], Config]:
    """Ranks of GB200 trays, whose hosts are in these NVLink domains, or in none."""
    machine = gb200_nvl72()
    intra, inter = (level.bytes_per_second for level in levels_of(machine))
    facts: dict[str, Any] = {"intra_node": intra, "inter_node": inter, "fabric": fabric_of(machine)}
    infos, config = gpu_ranks(hosts, config, **facts)
    named = [replace(each.hardware, nics=4, nvlink_domain=domains.get(each.host[0], "")) for each in infos]
    return [replace(each, hardware=own) for each, own in zip(infos, named, strict=True)], config


def test_several_nvlink_domains_are_racks_joined_by_the_nics_of_all_their_hosts() -> None:
    """As `predict` plans for them: what a job chooses at run time and what was predicted are one plan."""
    domains = {host: f"aa/{number // 18}" for number, host in enumerate(TRAYS)}
    cluster = cluster_of(*trays("".join(host * 4 for host in TRAYS), domains))
    predicted = cluster_of_machines(gb200_nvl72(), 36)
    assert cluster.describe() == predicted.describe() == "36 nodes x 4 ranks, 2 racks"
    assert cluster.levels == predicted.levels
    hosts = trays("AAAABBBB", {})[0], Config()
    (_, between, across), host = cluster.levels, cluster_of(*hosts).levels[1].link
    assert between.link.nvlink and not across.link.nvlink
    assert (across.link.bytes_per_second, across.link.nics) == (18 * host.bytes_per_second, 72)
    generator = np.random.default_rng(0)
    inputs = [generator.integers(-1000, 1000, 1009) for _ in range(cluster.size)]
    for name in ("flat", "hierarchical", "leader"):
        plan = plan_all_reduce(cluster, 8072, name=name, chunks=2, library="nccl")
        results, sent = simulate(cluster, plan, inputs, element_nbytes=8)
        assert all(np.array_equal(result, sum(inputs)) for result in results), name
        if name != "flat":
            assert sent["inter_rack"] == 8072, "a bucket leaves a domain once: 2 (n - 1)/n of it, with n = 2"


@pytest.mark.parametrize(
    ("domains", "racks"),
    [
        ({"A": "x/1", "B": "x/1", "C": "x/2", "D": "x/2"}, ((0, 1, 2, 3), (4, 5, 6, 7))),
        ({"A": "x/1", "C": "x/1", "B": "x/2", "D": "x/2"}, ((0, 1, 4, 5), (2, 3, 6, 7))),
        ({"A": "x/1", "B": "x/1", "C": "x/1"}, ((0, 1, 2, 3, 4, 5), (6, 7))),
        ({"A": "x/1", "B": "x/1"}, ((0, 1, 2, 3), (4, 5), (6, 7))),
    ],
)
def test_hosts_outside_of_a_domain_are_racks_of_their_own(
    domains: dict[str, str], racks: tuple[tuple[int, ...], ...]
) -> None:
    cluster = cluster_of(*trays("AABBCCDD", domains))
    assert tuple(cluster.ranks(unit) for unit in cluster.units(1)) == racks
    assert [level.link.nvlink for level in cluster.levels] == [False, True, False]
    assert cluster.fabric is None and cluster.equal_sums


@pytest.mark.parametrize(
    ("capability", "hip", "wanted"),
    [((9, 0), None, True), ((10, 0), None, True), ((8, 0), None, False), ((9, 4), "7.0", False)],
)
def test_whatever_is_unknown_of_a_machine_its_switches_may_sum(
    capability: tuple[int, int], hip: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL sums in a switch only what is a plain sum, so averages would go round in a ring."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    hosts = "a" * 8 + "b" * 8
    known = Hardware(None, None, None)
    possible = PeerInfo.here(0, 16, Config(), torch.device("cuda", 0), known=known).nvls_possible
    assert possible == wanted
    infos, config = gpu_ranks(hosts)
    infos = [replace(each, nvls_possible=possible) for each in infos]
    hidden = [replace(infos[0], hardware=replace(infos[0].hardware, fabric=None)), *infos[1:]]
    slow = [replace(each, hardware=replace(each.hardware, inter_node=None)) for each in infos]
    racks = [replace(each, location=("rack",)) for each in infos]
    for case in (hidden, slow, racks):
        cluster = cluster_of(case, config)
        assert cluster.fabric is None
        assert cluster.sums_in_switch(range(16)) == cluster.sums_in_switch(range(8)) == wanted
        assert not cluster.sums_in_switch((0, 8)), "a rank of each host"


def test_the_switches_of_an_nvlink_domain_sum_for_a_rank_of_each_of_its_hosts() -> None:
    for domains, wanted in ({"A": "x/1", "B": "x/1"}, True), ({"A": "x/1", "B": "x/2"}, False), ({}, False):
        infos, config = trays("AB", domains)
        cluster = cluster_of([replace(each, nvls_possible=True) for each in infos], config)
        assert cluster.sums_in_switch((0, 1)) == wanted
    both, config = trays("AABBCCDD", {"A": "x/1", "B": "x/1", "C": "x/2", "D": "x/2"})
    cluster = cluster_of([replace(each, nvls_possible=True) for each in both], config)
    assert [cluster.sums_in_switch(pair) for pair in ((0, 2), (4, 6), (0, 4))] == [True, True, False]


def test_domains_of_one_host_each_change_nothing() -> None:
    apart = cluster_of(*trays("AABB", {"A": "x/1", "B": "x/2"}))
    assert apart == cluster_of(*trays("AABB", {})) and apart.fabric is not None


def test_rates_that_are_given_are_of_the_nics_and_never_of_nvlink() -> None:
    joined = {"A": "x/1", "B": "x/1", "C": "x/2", "D": "x/2"}
    infos, config = trays("ABCD", joined, Config(nic_bytes_per_second=1e9))
    levels = cluster_of([replace(infos[0], nic_bytes_per_second=3e9), *infos[1:]], config).levels
    assert levels[1].link.nvlink and not levels[1].unit_rates
    assert levels[2].unit_rates == (4e9, 2e9)
    assert cluster_of(*trays("AABB", {"A": "x/1", "B": "x/1"}, config)).levels[1].link.nvlink


def test_racks_of_the_user_stay_and_nvlink_joins_the_nodes_inside_if_that_is_true_of_all() -> None:
    joined = {"A": "x/1", "B": "x/1", "C": "x/2", "D": "x/2"}
    for domains, nvlink in ((joined, True), (joined | {"D": "x/3"}, False)):
        infos, config = trays("ABCD", domains)
        placed = [replace(each, location=("row", "ab")[each.rank // 2 :][:1]) for each in infos]
        cluster = cluster_of(placed, config)
        assert cluster.depth == 3 and cluster.levels[1].link.nvlink is nvlink
        assert not cluster.levels[2].link.nvlink


def test_few_ranks_drive_few_nics() -> None:
    inter = cluster_of(*gpu_ranks("aabb")).levels[1].link
    assert (inter.nics, inter.bytes_per_second, inter.sender_nics) == (2, 96e9, 1)
    shared = cluster_of(*gpu_ranks("aabb", nics="00")).levels[1].link
    assert (shared.nics, shared.bytes_per_second) == (1, 48e9)
    nobody_said = cluster_of(*gpu_ranks("aabb", nic=None)).levels[1].link
    assert (nobody_said.nics, nobody_said.bytes_per_second, nobody_said.sender_nics) == (8, 384e9, 4)


def test_cuda_nodes_have_links_of_their_own_only_where_all_ranks_say_so() -> None:
    """Neither fewer ranks on a node nor a slower machine: sums have equal parts, and no payload goes by the links."""
    ranks, config = gpu_ranks("aabbc")
    ranks[4] = replace(ranks[4], hardware=replace(ranks[4].hardware, inter_node=192e9))
    given = [replace(rank, nic_bytes_per_second=25e9 / (1 + 3 * (rank.rank == 4))) for rank in ranks]
    for each in (ranks, [*given[:4], ranks[4]]):
        cluster = cluster_of(each, config)
        assert (
            cluster.equal_sums and cluster.fabric is not None and not any(level.unit_rates for level in cluster.levels)
        )
    assert cluster_of(given, Config(nic_bytes_per_second=25e9)).levels[1].unit_rates == (25e9, 25e9, 6.25e9)


def test_an_unknown_nic_is_presumed_until_somebody_says_its_rate() -> None:
    cluster = cluster_of(*gpu_ranks("aabb", inter_node=None))
    assert cluster.levels[1].link.presumed and cluster.fabric is None
    given = cluster_of(*gpu_ranks("aabb", Config(nic_bytes_per_second=25e9), inter_node=None))
    assert given.levels[1].link.bytes_per_second == 25e9 and not given.levels[1].link.presumed
    assert given.fabric is not None
    alone = cluster_of(*gpu_ranks("aa", inter_node=None))
    assert alone.fabric is not None, "one node has no use for its NICs"
    inside = cluster_of(*gpu_ranks("aabb", intra_node=None))
    assert inside.levels[0].link.presumed and inside.fabric is None


def test_nodes_of_several_kinds_count_as_the_weakest() -> None:
    ranks, config = gpu_ranks("ab")
    weaker = fabric_of(p4d())
    ranks[1] = replace(ranks[1], hardware=replace(ranks[1].hardware, fabric=weaker, nics=4, inter_node=48e9))
    cluster = cluster_of(ranks, config)
    assert cluster.fabric is not None and weaker is not None
    assert (cluster.fabric.compute_capability, cluster.fabric.nvls, cluster.fabric.network) == (80, False, "efa")
    assert cluster.levels[1].link.alpha_seconds == pytest.approx(14e-6 + 75e-6)
    ranks[1] = replace(ranks[1], hardware=replace(ranks[1].hardware, fabric=None))
    assert cluster_of(ranks, config).fabric is None


def test_cpu_ranks_of_a_machine_with_gpus_plan_as_ever() -> None:
    ranks, config = gpu_ranks("aabb")
    on_cpu = [replace(rank, device="cpu", hardware=replace(rank.hardware, fabric=None)) for rank in ranks]
    cluster = cluster_of(on_cpu, config)
    assert cluster.fabric is None
    assert cluster.levels[1].link == replace(INTER_NODE, bytes_per_second=384e9, presumed=False)
