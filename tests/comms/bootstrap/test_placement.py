"""Who shares a node: from what ranks say, never from their numbers."""

import socket
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.bootstrap.hardware import Hardware
from gradwire.comms.bootstrap.placement import INTER_NODE, Presence, cluster_of, exchange, host_identity, start_of
from gradwire.comms.config import Config
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
    assert cluster.levels[1].link.bytes_per_second == 3e9
    silent = cluster_of([replace(here, hardware=fast), replace(there, hardware=unknown)], Config())
    assert silent.levels[1].link.bytes_per_second == INTER_NODE.bytes_per_second
    asked = cluster_of(presences("ab"), Config(nic_bytes_per_second=1e6))
    assert asked.levels[1].link.bytes_per_second == 1e6


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
