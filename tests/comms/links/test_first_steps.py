"""Law: what a job's own first transfers show prices its plans, alike on all ranks, and changes nothing that is done."""

from datetime import timedelta

import pytest
import torch

from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.links.first_steps import FIRST_WATCHED, STEPS_WATCHED, FirstSteps, busy_seconds
from support.threads import run_ranks


def test_what_overlaps_counts_once_and_pauses_do_not() -> None:
    assert busy_seconds([]) == 0
    assert busy_seconds([(5, 6), (0, 2), (1, 3), (1.5, 2), (6, 6.5)]) == pytest.approx(4.5)


@pytest.mark.parametrize(
    ("numel", "rate", "learns"), [(1 << 20, None, True), (1 << 10, None, False), (1 << 20, 1e9, None)]
)
def test_plans_are_priced_by_what_was_seen_and_stay_as_they_are(
    numel: int, rate: float | None, learns: bool | None
) -> None:
    store, timeout = HashStore(), timedelta(seconds=30)

    def run(rank: int) -> tuple[object, ...]:
        config = Config(hostname=str(rank // 2), timeout=timeout, nic_bytes_per_second=rate)
        communicator = Communicator(store, rank, 4, torch.device("cpu"), config, name="steps")
        try:
            watched = FirstSteps(communicator, Agreement(store, rank, 4, "steps", timeout))
            assert watched.is_over == (learns is None)
            key = (numel, torch.float32, None)
            before = communicator.rank_plans.plan_for(*key)
            for steps in range(FIRST_WATCHED + STEPS_WATCHED + 1):
                watched.step_began(steps)
                assert communicator.all_reduce(torch.ones(numel)).wait().eq(4).all()
            after = communicator.rank_plans.plan_for(*key)
            assert after.chunks == before.chunks and after.plan.phases == before.plan.phases
            assert communicator.executor.stats.ended is None and watched.is_over
            words = after.plan.describe(communicator.cluster.level_names)
            assert ("ms and to send" in words) == (learns is True or (rate is not None and not after.plan.assumed))
            assert ("(transfers)" in communicator.rank_plans.links.describe()) == bool(learns)
            if not learns:
                assert after.plan == before.plan and communicator.rank_plans.links.priced == communicator.cluster
            # The bucket of another size, which comes later, is priced by it too.
            assert (communicator.rank_plans.plan_for(numel // 2, torch.float32, None).plan.assumed == "") == bool(
                learns
            )
            return after.plan.seconds, communicator.rank_plans.links.priced.levels
        finally:
            communicator.close()

    seen = run_ranks(4, run)
    assert len(set(seen)) == 1
    outer = seen[0][1][1].link  # type: ignore[index]
    assert outer.presumed == (learns is False)
