"""Law: what a report says that a rank has sent is what its transports were given to send, also by unequal owners."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.comms.plan.plan import ALL_REDUCE, Phase, Plan, Transfer
from gradwire.comms.plan.rank_plans import Chunk, PhasePart, RankPlan
from gradwire.comms.run.all_reduces import AllReduce, Bucket
from gradwire.comms.run.lane_executor import LaneExecutor
from gradwire.comms.transport.sum_order import RANK_ORDER, SumOrder
from gradwire.comms.transport.works import Done
from gradwire.compressors.base import Layout, Slice
from gradwire.compressors.registry import make
from gradwire.topology.cluster import Link
from support.simulate import two_level_cluster
from support.threads import ThreadGroup, run_ranks

SIZE, NUMEL = 3, 96 * 40
LAYOUT = Layout((Slice("weight", (96, 40), 0, 0, NUMEL),))
CLUSTER = two_level_cluster([0, 1, 2], Link(4e-6, 5e9), Link(30e-6, 25e6))


class Counting:
    """One rank's end of a group of threads, which counts what that rank sends."""

    takes_sum_order = True

    def __init__(self, group: ThreadGroup) -> None:
        self._group = group
        self.rank = group.rank

    @property
    def sent_nbytes(self) -> int:
        return self._group.sent_nbytes

    def all_reduce(self, tensor: Tensor, scale: float = 1.0) -> Done:
        return self._group.all_reduce(tensor)

    def reduce_scatter(
        self, tensor: Tensor, bounds: Sequence[int], scale: float = 1.0, order: SumOrder = RANK_ORDER
    ) -> Done:
        return self._group.reduce_scatter(tensor, bounds)

    def all_gather_slices(self, tensor: Tensor, bounds: Sequence[int]) -> Done:
        return self._group.all_gather_slices(tensor, bounds)


class Transports:
    """In place of the groups: one serves all lanes."""

    def __init__(self, only: Counting) -> None:
        self._only = only

    def __getitem__(self, key: object) -> Counting:
        return self._only

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)


@pytest.mark.parametrize("shares", [(), (1, 1, 1), (5, 2, 1), (1, 0, 7), (0, 3, 0)])
@pytest.mark.parametrize("name", ["none", "powersgd"])
def test_reported_bytes_are_those_that_were_sent(name: str, shares: tuple[int, ...]) -> None:
    groups = ThreadGroup.create(SIZE)
    phase = Phase(ALL_REDUCE, 1, compressor=name)
    plan = Plan("flat", (phase,), 1, 4 * NUMEL, 0.0, {}, "")

    def body(rank: int) -> tuple[float, int]:
        transfer = Transfer(ALL_REDUCE, 1, tuple(range(SIZE)), 0, NUMEL, ())
        part = PhasePart(phase, ((transfer,),), (LAYOUT,), (shares,), True, 1, NUMEL, 0.0)
        rank_plan = RankPlan(plan, (Chunk(0, NUMEL, (part,)),), ((0, 0),), turn=1, direct=False)
        counting = Counting(groups[rank])
        transports: Any = Transports(counting)
        reporter: Any = SimpleNamespace(rank=rank)
        executor = LaneExecutor("test", transports, rank, CLUSTER, make(name), reporter)
        bucket = Bucket.of(torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)), LAYOUT)
        executor.start(AllReduce((bucket.flat,), LAYOUT, (bucket,)), rank_plan, 1 / SIZE, flush=False)
        bucket.result().wait()
        executor.close()
        (row,) = executor.stats.totals()
        return row.wire_nbytes, counting.sent_nbytes

    for reported, sent in run_ranks(SIZE, body):
        assert sent > 0
        assert reported == pytest.approx(sent, abs=4 * SIZE), "rounded once a collective"
