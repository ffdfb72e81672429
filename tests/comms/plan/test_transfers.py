"""Law: the executor runs exactly the transfers that the simulator runs, and both leave the sum on every rank.

Every rank is a thread with an executor of its own; in place of the transports are groups of threads that write down
what is asked of them.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.bootstrap.failure_reporter import StoreFailureReporter
from gradwire.comms.bootstrap.placement import with_node_rates
from gradwire.comms.config import Config
from gradwire.comms.lanes import Lane
from gradwire.comms.plan.plan import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Plan
from gradwire.comms.plan.planner import plan_all_reduce
from gradwire.comms.plan.rank_plans import RankPlans
from gradwire.comms.run.all_reduces import AllReduce, Bucket
from gradwire.comms.run.lane_executor import LaneExecutor
from gradwire.comms.transport.works import Done
from gradwire.topology.cluster import LEVEL_NAMES, Cluster, Level, Link, uniform_cluster
from gradwire.topology.nvlink_domain import joined_by_nvlink
from support.simulate import simulate, transfers_of, two_level_cluster
from support.threads import ThreadGroup, run_ranks

LINKS = (Link(4e-6, 5e9), Link(30e-6, 25e6), Link(5e-5, 1e7), Link(1e-3, 1e6))
LEVELS = tuple(Level(name, link) for name, link in zip(LEVEL_NAMES, LINKS, strict=True))
NODES = {
    "1x1": [0],
    "1x3": [0, 0, 0],
    "2x1": [0, 1],
    "3x1": [0, 1, 2],
    "2x2": [0, 0, 1, 1],
    "2x2 round-robin": [0, 1, 0, 1],
    "3+1": [0, 0, 0, 1],
    "3+5": [0, 0, 0, 1, 1, 1, 1, 1],
    "4x2": [0, 0, 1, 1, 2, 2, 3, 3],
    "3+1+1 mixed": [0, 1, 2, 0, 0],
    "4x4": [rank // 4 for rank in range(16)],
}
CLUSTERS = {name: two_level_cluster(nodes, *LINKS[:2]) for name, nodes in NODES.items()} | {
    "one level": uniform_cluster((4,), LEVELS[:1]),
    "three levels": uniform_cluster((2, 3, 2), LEVELS[:3]),
    "four levels": uniform_cluster((2, 2, 2, 2), LEVELS),
    "4x2, links differ": with_node_rates(two_level_cluster(NODES["4x2"], *LINKS[:2]), [4e7, 1e7, 3e7, 4e7]),
    "3x1, links differ": with_node_rates(two_level_cluster(NODES["3x1"], *LINKS[:2]), [4e7, 2e7, 3e7]),
    "3+1+1, links differ": with_node_rates(two_level_cluster(NODES["3+1+1 mixed"], *LINKS[:2]), [4e7, 2e7, 3e7]),
    "three levels, links differ": with_node_rates(
        uniform_cluster((2, 3, 2), LEVELS[:3]), [4e7, 1e7, 4e7, 3e7, 4e7, 4e7]
    ),
    "NVLink domains and a host": joined_by_nvlink(
        two_level_cluster([0, 0, 1, 1, 2, 2, 3, 3, 4, 4], *LINKS[:2]), [*"aaaabbbb", "", ""]
    ),
    "uneven racks": Cluster(((0, 0), (0, 0), (0, 1), (1, 0), (1, 0), (1, 1), (1, 1), (1, 1)), LEVELS[:3]),
}

Asked = tuple[str, tuple[int, ...], int, int, tuple[int, ...]]
"""Collective, members, first element, one past the last, bounds."""


class Recorded:
    """A group of threads that keeps what this rank asks of it, in order."""

    def __init__(self, group: ThreadGroup, members: tuple[int, ...], bucket: Tensor) -> None:
        self.asked: list[Asked] = []
        self._group = group
        self._members = members
        self._bucket = bucket

    def all_reduce(self, tensor: Tensor, scale: float = 1.0) -> Done:
        self._note(ALL_REDUCE, tensor, ())
        return self._group.all_reduce(tensor)

    def reduce_scatter(self, tensor: Tensor, bounds: Sequence[int], scale: float = 1.0) -> Done:
        self._note(REDUCE_SCATTER, tensor, bounds)
        return self._group.reduce_scatter(tensor, bounds)

    def all_gather_slices(self, tensor: Tensor, bounds: Sequence[int]) -> Done:
        self._note(ALL_GATHER, tensor, bounds)
        return self._group.all_gather_slices(tensor, bounds)

    def _note(self, op: str, tensor: Tensor, bounds: Sequence[int]) -> None:
        start = (tensor.data_ptr() - self._bucket.data_ptr()) // self._bucket.element_size()
        self.asked.append((op, self._members, start, start + tensor.numel(), tuple(bounds)))


class Meetings:
    """The groups of all ranks: one for each lane and set of ranks, made by whoever comes first."""

    def __init__(self) -> None:
        self._made: dict[tuple[Lane, tuple[int, ...]], list[ThreadGroup]] = {}
        self._lock = threading.Lock()

    def end(self, lane: Lane, members: tuple[int, ...], rank: int) -> ThreadGroup:
        with self._lock:
            if (lane, members) not in self._made:
                self._made[lane, members] = ThreadGroup.create(len(members))
            return self._made[lane, members][members.index(rank)]


class RecordedGroups(dict[tuple[Lane, tuple[int, ...]], Recorded]):
    """In place of one rank's transports."""

    def __init__(self, meetings: Meetings, rank: int, bucket: Tensor) -> None:
        self._meetings = meetings
        self._rank = rank
        self._bucket = bucket

    def __missing__(self, key: tuple[Lane, tuple[int, ...]]) -> Recorded:
        lane, members = key
        made = self[key] = Recorded(self._meetings.end(lane, members, self._rank), members, self._bucket)
        return made

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)


def run(cluster: Cluster, plan: Plan, inputs: list[Tensor], fixed_order: bool) -> tuple[Plan, list[RecordedGroups]]:
    """Runs a plan on executors; returns the plan as it was carried out, and what each rank asked of whom."""
    meetings, store = Meetings(), HashStore()

    def body(rank: int) -> tuple[Plan, RecordedGroups]:
        flat = inputs[rank]
        groups = RecordedGroups(meetings, rank, flat)
        config = Config(fusion=25.0 if fixed_order else 0.0)
        rank_plan = RankPlans(cluster, rank, "cpu", config, None).along(flat.numel(), plan)
        reporter = StoreFailureReporter(store, rank, cluster.size)
        executor = LaneExecutor("test", groups, rank, cluster, None, reporter)  # type: ignore[arg-type]
        bucket = Bucket.of(flat)
        executor.start(AllReduce((flat,), None, (bucket,)), rank_plan, 1.0, flush=False)
        bucket.result().wait()
        executor.close()
        return rank_plan.plan, groups

    results = run_ranks(cluster.size, body)
    return results[0][0], [groups for _, groups in results]


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("name", ["flat", "hierarchical", "leader"])
@pytest.mark.parametrize(("chunks", "fixed_order"), [(1, False), (3, True)])
def test_the_executor_runs_the_transfers_of_the_simulator(
    cluster: Cluster, name: str, chunks: int, fixed_order: bool
) -> None:
    numel = 997
    generator = np.random.default_rng(cluster.size)
    inputs = [generator.integers(-1000, 1000, numel) for _ in range(cluster.size)]
    flats = [torch.from_numpy(array.copy()) for array in inputs]
    asked_for = plan_all_reduce(cluster, 8 * numel, name=name, chunks=chunks)
    plan, recorded = run(cluster, asked_for, flats, fixed_order)
    results, _ = simulate(cluster, plan, inputs)
    for flat, simulated in zip(flats, results, strict=True):
        np.testing.assert_array_equal(flat.numpy(), sum(inputs))
        np.testing.assert_array_equal(simulated, flat.numpy())
    expected = list(transfers_of(cluster, plan, numel))
    for rank, groups in enumerate(recorded):
        wanted = Counter(
            (each.op, each.members, each.start, each.stop, each.bounds) for each in expected if rank in each.members
        )
        assert Counter(chain.from_iterable(group.asked for group in groups.values())) == wanted
    in_order: dict[object, list[list[Asked]]] = defaultdict(list)
    for groups in recorded:
        for key, group in groups.items():
            in_order[key].append(group.asked)
    assert all(asked == sequences[0] for sequences in in_order.values() for asked in sequences)


def test_sums_in_rank_order_are_among_the_cases() -> None:
    plan = plan_all_reduce(CLUSTERS["4x2"], 8000, name="flat", chunks=1)
    flats = [torch.ones(1000, dtype=torch.int64) for _ in range(8)]
    carried_out, _ = run(CLUSTERS["4x2"], plan, flats, True)
    assert [phase.in_rank_order for phase in carried_out.phases] == [True]
    assert "all_reduce over all ranks (asynchronous, sums in rank order)" in carried_out.describe(LEVEL_NAMES)
