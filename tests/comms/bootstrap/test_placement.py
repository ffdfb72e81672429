"""Who shares a node: from what ranks say, never from their numbers."""

import socket
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.bootstrap.hardware import Hardware
from gradwire.comms.bootstrap.placement import INTER_NODE, Presence, cluster_of, exchange, host_identity, start_of
from gradwire.comms.config import Config
from gradwire.comms.plan.machine_cluster import cluster_of_machines
from gradwire.topology.fabric import fabric_of
from gradwire.topology.presets import dgx_h100, p4d
from support.threads import run_ranks


def presences(hosts: str, locations: list[tuple[str, ...]] | None = None) -> list[Presence]:
    own = Presence.here(0, len(hosts), Config(), torch.device("cpu"))
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
    assert cluster_of(presences(hosts), Config()).nodes == nodes


@pytest.mark.parametrize("field", [0, 1, 2])
def test_another_hostname_kernel_or_shared_memory_is_another_node(field: int) -> None:
    here, there = presences("aa")
    host = list(there.host)
    host[field] += "x"
    assert len(cluster_of([here, replace(there, host=tuple(host))], Config()).nodes) == 2


def test_equal_hosts_in_two_racks_are_two_nodes_of_three_levels() -> None:
    cluster = cluster_of(presences("aabb", [("r1",), ("r1",), ("r2",), ("r2",)]), Config())
    assert [level.name for level in cluster.levels] == ["intra_node", "inter_node", "inter_rack"]
    assert cluster.nodes == ((0, 1), (2, 3))


def test_locations_of_different_depth_are_refused() -> None:
    with pytest.raises(ValueError, match="`location` has"):
        cluster_of(presences("ab", [(), ("r1",)]), Config())


def test_the_slowest_known_card_counts_and_an_unknown_one_makes_it_unknown() -> None:
    fast, slow, unknown = (Hardware(None, rate, None) for rate in (25e9, 3e9, None))
    here, there = presences("ab")
    cluster = cluster_of([replace(here, hardware=fast), replace(there, hardware=slow)], Config())
    assert (cluster.levels[1].link.bytes_per_second, cluster.levels[1].unit_rates) == (3e9, (25e9, 3e9))
    silent = cluster_of([replace(here, hardware=fast), replace(there, hardware=unknown)], Config())
    assert silent.levels[1].link.bytes_per_second == INTER_NODE.bytes_per_second
    asked = cluster_of([replace(each, hardware=fast, nic_bytes_per_second=1e6) for each in (here, there)], Config())
    assert (asked.levels[1].link.bytes_per_second, asked.levels[1].unit_rates) == (1e6, ())


def test_ranks_give_their_nodes_rates_all_or_none() -> None:
    store = HashStore()

    def run(rank: int) -> str:
        config = Config(hostname=f"n{rank}", nic_bytes_per_second=1e6 if rank else None)
        with pytest.raises(ValueError, match="`nic_bytes_per_second` is") as caught:
            exchange(store, Presence.here(rank, 2, config, torch.device("cpu")), timedelta(seconds=10))
        return str(caught.value)

    assert all("1000000.0" in text and "None" in text for text in run_ranks(2, run))


def test_this_host_says_hostname_boot_id_and_shared_memory() -> None:
    name, boot, memory = host_identity()
    assert name == socket.gethostname()
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert memory == str(Path("/dev/shm").stat().st_dev)
    assert host_identity("other")[0] == "other"


def test_what_is_published_is_what_is_read() -> None:
    store = HashStore()

    def run(rank: int) -> list[Presence]:
        own = Presence.here(rank, 3, Config(hostname=f"n{rank}", location=("r",)), torch.device("cpu"))
        return exchange(store, own, timedelta(seconds=10))

    first, *others = run_ranks(3, run)
    assert all(first == other for other in others)
    assert [presence.host[0] for presence in first] == ["n0", "n1", "n2"]


def gpu_ranks(
    hosts: str, config: Config | None = None, cards: str = "01234567", **changes: Any
) -> tuple[list[Presence], Config]:
    """Ranks of DGX H100s, in CUDA memory; each drives the card with its local number."""
    fabric, config = fabric_of(dgx_h100()), config or Config()
    seen: dict[str, int] = {}
    found = []
    for presence in presences(hosts):
        local = seen.setdefault(presence.host[0], 0)
        seen[presence.host[0]] += 1
        facts = Hardware(370.8e9, 384e9, f"mlx5_{cards[local]}", nics=8, fabric=fabric)
        rate = config.nic_bytes_per_second
        found.append(replace(presence, device="cuda", hardware=replace(facts, **changes), nic_bytes_per_second=rate))
    return found, config


def test_cuda_ranks_plan_with_nccls_latencies_and_all_cards() -> None:
    cluster = cluster_of(*gpu_ranks("a" * 8 + "b" * 8))
    intra, inter = (level.link for level in cluster.levels)
    assert (intra.alpha_seconds, intra.bytes_per_second) == (3.4e-6, 370.8e9)
    assert (inter.alpha_seconds, inter.bytes_per_second, inter.nics, inter.sender_nics) == (14e-6, 384e9, 8, 1)
    assert cluster.fabric is not None and cluster.fabric.nvls
    assert cluster == replace(cluster_of_machines(dgx_h100(), 2), locations=cluster.locations)
    assert not intra.presumed and not inter.presumed


def test_few_ranks_drive_few_cards() -> None:
    inter = cluster_of(*gpu_ranks("aabb")).levels[1].link
    assert (inter.nics, inter.bytes_per_second, inter.sender_nics) == (2, 96e9, 1)
    shared = cluster_of(*gpu_ranks("aabb", cards="00")).levels[1].link
    assert (shared.nics, shared.bytes_per_second) == (1, 48e9)
    nobody_said = cluster_of(*gpu_ranks("aabb", nic=None)).levels[1].link
    assert (nobody_said.nics, nobody_said.bytes_per_second, nobody_said.sender_nics) == (8, 384e9, 4)


def test_an_unknown_card_is_presumed_until_somebody_says_its_rate() -> None:
    cluster = cluster_of(*gpu_ranks("aabb", inter_node=None))
    assert cluster.levels[1].link.presumed and cluster.fabric is None
    given = cluster_of(*gpu_ranks("aabb", Config(nic_bytes_per_second=25e9), inter_node=None))
    assert given.levels[1].link.bytes_per_second == 25e9 and not given.levels[1].link.presumed
    assert given.fabric is not None
    alone = cluster_of(*gpu_ranks("aa", inter_node=None))
    assert alone.fabric is not None, "one node has no use for its cards"
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


def test_what_a_gpu_rank_publishes_is_what_is_read() -> None:
    store = HashStore()
    ranks, _ = gpu_ranks("ab")
    found = run_ranks(2, lambda rank: exchange(store, ranks[rank], timedelta(seconds=10)))
    assert found == [ranks, ranks]


def test_a_restart_takes_no_presence_of_the_start_before() -> None:
    """Rank 1 comes late to the second start: its old presence is there, and nothing of it may be taken."""
    store = HashStore()

    def join(rank: int, wait_seconds: float) -> list[Presence]:
        time.sleep(wait_seconds * rank)
        return exchange(store, Presence.here(rank, 3, Config(), torch.device("cpu")), timedelta(seconds=10))

    first = run_ranks(3, lambda rank: join(rank, 0.0))
    second = run_ranks(3, lambda rank: join(rank, 0.05))
    assert len({start_of(found) for found in first}) == len({start_of(found) for found in second}) == 1
    assert not {each.start for each in first[0]} & {each.start for each in second[0]}


def test_a_rank_that_does_not_come_back_is_missing() -> None:
    store = HashStore()
    own = Presence.here(0, 2, Config(), torch.device("cpu"))
    run_ranks(2, lambda rank: exchange(store, replace(own, rank=rank), timedelta(seconds=10)))
    with pytest.raises(RuntimeError, match="rank 1 did not join"):
        exchange(store, replace(own, start="again"), timedelta(seconds=0.1))
