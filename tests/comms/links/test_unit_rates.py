"""Law: nodes that meet in pairs find out whose link is slow, all ranks alike, and plans follow at once."""

import itertools
from datetime import timedelta

import pytest
import torch

from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.links.unit_rates import EQUAL_SHARE, PARTNERS, measure_units, pairings, relative_rates
from support.threads import run_ranks


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9])
def test_everybody_meets_somebody_else_in_each_round(count: int) -> None:
    rounds = pairings(count, PARTNERS)
    assert len(rounds) == min(PARTNERS, count - 1 + count % 2)
    met = list(itertools.chain.from_iterable(rounds))
    assert len(set(met)) == len(met)
    for pairs in rounds:
        assert len(set(itertools.chain.from_iterable(pairs))) == 2 * len(pairs) == count - count % 2
    assert len(set(itertools.chain.from_iterable(pairings(count, count)))) == count * (count - 1) // 2


@pytest.mark.parametrize("rates", [(4.0, 1.0, 4.0), (4.0, 4.0, 4.0, 1.0), (4.0, 3.5, 2.0, 4.0, 1.0, 4.0, 4.0, 4.0)])
def test_a_node_is_as_fast_as_its_best_pair(rates: tuple[float, ...]) -> None:
    meetings = [
        (*pair, 1 / min(rates[pair[0]], rates[pair[1]])) for pairs in pairings(len(rates), PARTNERS) for pair in pairs
    ]
    expected = tuple(1.0 if rate >= EQUAL_SHARE * max(rates) else rate / max(rates) for rate in rates)
    assert relative_rates(len(rates), meetings) == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_plans_follow_the_links_as_they_change(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store, rates = HashStore(), [4.0, 4.0, 1.0]
    real = Communicator.sendrecv

    def timed(self: Communicator, other: int, nbytes: int) -> float:
        real(self, other, nbytes)
        return 1 / min(rates[self.rank // ranks], rates[other // ranks])

    monkeypatch.setattr(Communicator, "sendrecv", timed)

    def run(rank: int) -> list[tuple[float, ...]]:
        config = Config(hostname=str(rank // ranks), timeout=timedelta(seconds=30))
        size = 3 * ranks
        communicator = Communicator(store, rank, size, torch.device("cpu"), config, name="units")
        consensus = Agreement(store, rank, size, "units", timedelta(seconds=30))
        found: list[tuple[float, ...]] = []
        least = communicator.cluster.levels[1].link.bytes_per_second
        try:
            for now in ([4.0, 4.0, 1.0], [4.0, 4.0, 1.0], [2.0, 4.0, 4.0], [4.0, 4.0, 4.0]):
                communicator.run(torch.zeros(1), communicator.rank_plans.plan_for(1, torch.float32, None).plan).wait()
                if rank == 0:
                    rates[:] = now
                consensus.decide(0, lambda ranks: len(ranks))
                changed = measure_units(communicator, consensus, again=bool(found))
                level = communicator.cluster.levels[1]
                found.append((float(changed), *(rate / least for rate in level.unit_rates)))
                assert communicator.all_reduce(torch.ones(1000)).wait().eq(size).all()
        finally:
            communicator.close()
        return found

    results = run_ranks(3 * ranks, run)
    assert results[0] == [(1, 4, 4, 1), (0, 4, 4, 1), (1, 2, 4, 4), (1,)]
    assert all(result == results[0] for result in results)
