"""Which cluster and library the process group prices its sums with."""

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from gradwire.comms.backend import planned
from gradwire.comms.backend.planned import PlannedAllReduce
from gradwire.comms.bootstrap.compat import GroupOptions, HashStore
from gradwire.comms.config import Config
from gradwire.comms.plan.machine_cluster import cluster_of_machines
from gradwire.comms.plan.rank_plans import RankPlans
from gradwire.topology.cluster import Cluster, Link
from gradwire.topology.presets import dgx_a100, dgx_h100
from support.simulate import two_level_cluster

SIZES = (1, 1024, 1 << 18, 25 << 18)


class FakeCommunicator:
    """Where the ranks are, as each device sees it; the real one talks to the others."""

    clusters: dict[str, Cluster]
    made: list[str]

    def __init__(self, store: object, rank: int, size: int, device: torch.device, config: Config, **_: object) -> None:
        FakeCommunicator.made.append(device.type)
        self.rank_plans = RankPlans(FakeCommunicator.clusters[device.type], rank, device.type, config, None)
        self.cluster = self.rank_plans.cluster


def sums(monkeypatch: pytest.MonkeyPatch, gpus: Cluster, config: Config | None = None) -> PlannedAllReduce:
    places = [location[0] for location in gpus.locations]
    cpus = two_level_cluster(places, Link(20e-6, 5e9), Link(100e-6, gpus.levels[1].link.bytes_per_second))
    FakeCommunicator.clusters = {"cpu": cpus, "cuda": gpus}
    FakeCommunicator.made = []
    monkeypatch.setattr(planned, "Communicator", FakeCommunicator)
    options = GroupOptions(HashStore(), 0, gpus.size, timedelta(seconds=9), "group", [])
    return PlannedAllReduce(options, config or Config())


def better(group: PlannedAllReduce, device: str, numel: int) -> bool:
    tensor = SimpleNamespace(device=torch.device(device), nbytes=4 * numel)
    return group.beats_inner([tensor])  # type: ignore[list-item]  # there is no CUDA tensor without a GPU


def test_cuda_sums_are_priced_with_the_cuda_links_and_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    group = sums(monkeypatch, cluster_of_machines(dgx_h100(), 2))
    assert not any(better(group, "cuda", numel) for numel in SIZES)
    assert all(better(group, "cpu", numel) for numel in SIZES)
    slow = sums(monkeypatch, cluster_of_machines(dgx_a100(), 4, nic_bits_per_second=25e9))
    assert [better(slow, "cuda", numel) for numel in SIZES] == [False, False, True, True]


def test_an_unknown_nic_leaves_cuda_sums_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    known = cluster_of_machines(dgx_a100(), 4)
    unknown = replace(known.levels[1], link=Link(1e-4, 1.25e9, presumed=True))
    group = sums(monkeypatch, replace(known, levels=(known.levels[0], unknown), fabric=None))
    assert not any(better(group, "cuda", numel) for numel in SIZES)


@pytest.mark.parametrize(("plan", "taken"), [("hierarchical", True), ("leader", True), ("flat", False)])
def test_a_plan_by_name_is_taken(monkeypatch: pytest.MonkeyPatch, plan: str, taken: bool) -> None:
    group = sums(monkeypatch, cluster_of_machines(dgx_h100(), 2), Config(plan=plan))
    assert better(group, "cuda", 1 << 20) == taken
    assert FakeCommunicator.made == ["cpu"], "a plan by name needs no prices"


def test_one_node_and_nothing_need_no_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    group = sums(monkeypatch, cluster_of_machines(dgx_h100(), 1))
    assert not better(group, "cuda", 1 << 20) and better(group, "cpu", 1 << 20)
    assert not better(group, "cuda", 0)
    assert FakeCommunicator.made == ["cpu"]
