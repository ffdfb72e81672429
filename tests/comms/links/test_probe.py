"""Law: a link that is fitted to the model's own predictions is the link that they were made with."""

from datetime import timedelta

import pytest
import torch

from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.links.probe import LARGE_NBYTES, SMALL_NBYTES, fitted, probe, probe_phases
from gradwire.comms.plan.cost import EXACT, CodecPrice, CostModel
from gradwire.comms.plan.plan import REDUCE_SCATTER
from gradwire.comms.plan.planner import candidate_plans
from gradwire.topology.cluster import LEVEL_NAMES, Cluster, Level, Link, uniform_cluster
from support.threads import run_ranks

GUESS = Link(1e-4, 1e9)


def cluster_with(counts: tuple[int, ...], *links: Link) -> Cluster:
    return uniform_cluster(counts, [Level(name, link) for name, link in zip(LEVEL_NAMES, links, strict=False)])


@pytest.mark.parametrize("counts", [(2, 2), (4, 3), (2, 3, 2)])
@pytest.mark.parametrize("true", [Link(3e-4, 25e6), Link(5e-6, 12e9, nics=2, channels=2), Link(0.0, 1e8)])
def test_the_fit_inverts_the_model(counts: tuple[int, ...], true: Link) -> None:
    inner = [Link(5e-6, 5e9)] * (len(counts) - 1)
    level = len(counts) - 1
    truth = cluster_with(counts, *inner, true)
    phases = probe_phases(truth, level)
    model = CostModel(truth, {phase.level: phase.parts for phase in phases if phase.op == REDUCE_SCATTER})
    small, large = (
        sum(model.phase(phase).seconds(nbytes) for phase in phases) for nbytes in (SMALL_NBYTES, LARGE_NBYTES)
    )
    guess = Link(GUESS.alpha_seconds, GUESS.bytes_per_second, true.nics, true.channels)
    found = fitted(cluster_with(counts, *inner, guess), level, small, large, LARGE_NBYTES)
    assert found.bytes_per_second == pytest.approx(true.bytes_per_second, rel=1e-6)
    assert found.alpha_seconds == pytest.approx(true.alpha_seconds, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("nodes", ["aabb", "abc", "aabbc"])
def test_every_rank_plans_with_the_same_measured_links(nodes: str) -> None:
    store = HashStore()

    def run(rank: int) -> tuple[Level, ...]:
        config = Config(hostname=nodes[rank], timeout=timedelta(seconds=30))
        communicator = Communicator(store, rank, len(nodes), torch.device("cpu"), config, name="probe")
        try:
            levels = probe(communicator, Agreement(store, rank, len(nodes), "probe", timedelta(seconds=30)))
            assert communicator.cluster.levels == levels
            flat = torch.full((1000,), 1.0)
            assert communicator.all_reduce(flat).wait().eq(len(nodes)).all()
        finally:
            communicator.close()
        return levels

    first, *others = run_ranks(len(nodes), run)
    assert all(other == first for other in others)
    assert first[1].link.bytes_per_second > 0


def test_payloads_are_priced_with_the_share_that_an_exchange_reaches() -> None:
    cluster = cluster_with((2, 4), Link(5e-6, 5e9), Link(0.0, 25e6))
    slower = cluster_with((2, 4), Link(5e-6, 5e9), Link(0.0, 25e6, exchange_share=0.5))
    for price, factor in ((EXACT, 1.0), (CodecPrice("int8", 0.25), 2.0)):
        fast, slow = (next(candidate_plans(each, 1 << 24, "hierarchical", 1, price)) for each in (cluster, slower))
        inside = sum(Link(5e-6, 5e9).seconds(1, 1 << 23) for _ in range(2))
        assert (slow.seconds - inside) / (fast.seconds - inside) == pytest.approx(factor)


def test_an_exchange_moves_what_the_ring_moves() -> None:
    cluster = cluster_with((2, 4), Link(5e-6, 5e9), Link(0.0, 25e6))
    nbytes = []
    for exchange in (False, True):
        phases = probe_phases(cluster, 1, exchange=exchange)
        model = CostModel(cluster, {phase.level: phase.parts for phase in phases if phase.op == REDUCE_SCATTER})
        nbytes.append(sum(model.phase(phase).egress.nbytes[1] for phase in phases))
    assert nbytes[0] == pytest.approx(nbytes[1])
