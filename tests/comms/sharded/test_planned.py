"""Laws of few-bit collectives as plans: bits of a codec applied by hand, bytes of the payloads, words of a failure.

Ranks are threads; elements are whole numbers, so that sums inside a node are exact in any order.
"""

from collections.abc import Generator, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.comms.bootstrap.failure_reporter import CollectiveError
from gradwire.comms.plan.collectives import plan_compressed
from gradwire.comms.plan.plan import ALL_GATHER, REDUCE_SCATTER
from gradwire.comms.run.lane_executor import LaneExecutor
from gradwire.comms.run.phase_stats import PhaseTotals
from gradwire.comms.sharded.collectives import codec_of
from gradwire.comms.sharded.flat_shards import decode, encode, payload_nbytes
from gradwire.comms.sharded.layout import ShardRuns
from gradwire.comms.sharded.nodes import PlannedNodes, arrange
from gradwire.comms.transport.works import Done
from gradwire.compressors.base import ALL_TO_ALL, Collective, Member, Request
from gradwire.topology.cluster import Cluster, Link
from support.simulate import two_level_cluster
from support.threads import ThreadGroup, run_ranks

RUNS = ShardRuns(700, ((20, 600),), ((0, 20), (600, 700)))
CODEC = codec_of("int8", None)
NBYTES = payload_nbytes(CODEC, RUNS, torch.float32)
PLACEMENTS = [([0, 0, 1, 1], False), ([0, 1, 1, 0], False), ([0, 0, 0, 1], False), ([0, 0, 1, 1], True)]
"""Node of each rank, and whether the flat plan is asked for."""


class Transport:
    """One rank's end of a thread group; shared memory takes a factor, too."""

    def __init__(self, group: ThreadGroup, broken: bool) -> None:
        self.group, self.rank, self.size, self.broken = group, group.rank, group.size, broken

    def reduce_scatter(self, tensor: Tensor, bounds: Sequence[int], scale: float) -> Done:
        assert scale == 1.0
        return self.group.reduce_scatter(tensor, bounds)

    def all_to_all(self, output: Tensor, source: Tensor) -> Done:
        if self.broken:
            raise RuntimeError("unplugged")
        return self.group.all_to_all(output, source)

    def all_gather(self, output: Tensor, source: Tensor) -> Done:
        return self.group.all_gather(output, source)

    def all_gather_slices(self, tensor: Tensor, bounds: Sequence[int]) -> Done:
        return self.group.all_gather_slices(tensor, bounds)


class Groups(dict[Any, Transport]):
    """The transports of one rank: a thread group for each set of members that it is in."""

    def __init__(self, made: dict[tuple[int, ...], list[ThreadGroup]], rank: int, broken: bool) -> None:
        super().__init__()
        self._ends = {
            members: Transport(ends[members.index(rank)], broken) for members, ends in made.items() if rank in members
        }

    def __missing__(self, key: tuple[object, tuple[int, ...]]) -> Transport:
        return self._ends[key[1]]

    def sent(self) -> int:
        return sum(end.group.sent_nbytes for end in self._ends.values())

    def abort(self, reason: str) -> None: ...


def cluster_of(places: list[int]) -> Cluster:
    return two_level_cluster(places, Link(4e-6, 5e9), Link(30e-6, 25e6))


def nodes_of(places: list[int], flat: bool, broken: bool = False) -> list[tuple[PlannedNodes, LaneExecutor, Groups]]:
    cluster, size = cluster_of(places), len(places)
    members = arrange(range(size) if flat else places)
    sets = {tuple(range(size)), *members, *(tuple(sorted(ranks)) for ranks in zip(*members, strict=True))}
    made = {ranks: ThreadGroup.create(len(ranks)) for ranks in sets}
    found = []
    for rank in range(size):
        groups, reporter = Groups(made, rank, broken), SimpleNamespace(rank=rank, diagnose=diagnosed)
        executor = LaneExecutor("test", groups, rank, cluster, None, reporter)  # type: ignore[arg-type]
        config = SimpleNamespace(timeout=timedelta(seconds=60))
        communicator: Any = SimpleNamespace(rank=rank, cluster=cluster, executor=executor, config=config)
        found.append((PlannedNodes(members, communicator), executor, groups))
    return found


def diagnosed(error: BaseException, where: str, members: object, **unused: object) -> CollectiveError:
    return CollectiveError(f"{where}: {error}", ())


def encoded(row: Tensor) -> Tensor:
    payload = torch.zeros(NBYTES, dtype=torch.uint8)
    encode(CODEC, RUNS, row, payload)
    return payload


def source_of(rank: int, size: int) -> Tensor:
    return torch.randint(-99, 99, (size, RUNS.numel), generator=torch.Generator().manual_seed(rank)).float()


@pytest.mark.parametrize(("places", "flat"), PLACEMENTS)
def test_a_reduce_scatter_has_the_bits_of_its_codec(places: list[int], flat: bool) -> None:
    size = len(places)
    ends, members = nodes_of(places, flat), arrange(range(size) if flat else places)

    def body(rank: int) -> tuple[Tensor, tuple[PhaseTotals, ...]]:
        nodes, executor, _ = ends[rank]
        total = torch.empty(RUNS.numel)

        def exchange(rows: Sequence[Tensor], member: Member) -> Iterator[Request]:
            payloads = torch.stack([encoded(row) for row in rows])
            received = torch.empty_like(payloads)
            yield Collective(ALL_TO_ALL, (received, payloads))
            others = torch.cat([received[: member.rank], received[member.rank + 1 :]])
            total.copy_(decode(CODEC, RUNS, others, torch.float32, rows[member.rank]))

        nodes.reduce_scatter("int8", NBYTES, source_of(rank, size).view(-1), exchange).wait()
        executor.close()
        return total, executor.stats.totals()

    for rank, (total, rows) in enumerate(run_ranks(size, body)):
        sums = {node: torch.stack([source_of(each, size)[rank] for each in node]).sum(0) for node in members}
        own = next(node for node in members if rank in node)
        place = own.index(rank)
        others = sorted((node for node in members if node is not own), key=lambda node: node[place])
        payloads = torch.stack([encoded(sums[node]) for node in others])
        assert torch.equal(total, decode(CODEC, RUNS, payloads, torch.float32, sums[own]))
        between = next(row for row in rows if row.level in ("inter_node", "all ranks"))
        assert (between.op, between.calls) == (REDUCE_SCATTER, 1) and between.seconds > 0
        assert between.wire_nbytes == (len(members) - 1) * NBYTES


@pytest.mark.parametrize(("places", "flat"), PLACEMENTS)
@pytest.mark.parametrize("known", [False, True])
def test_an_all_gather_passes_on_what_was_sent_and_nothing_that_is_known(
    places: list[int], flat: bool, known: bool
) -> None:
    size = len(places)
    ends = nodes_of(places, flat)
    rows = [source_of(9, size)[rank] for rank in range(size)]

    def body(rank: int) -> tuple[Tensor, tuple[PhaseTotals, ...]]:
        nodes, executor, _ = ends[rank]
        found = torch.zeros(size, RUNS.numel)
        counterparts = sorted(node[nodes.place] for node in nodes.members)

        def exchange(member: Member) -> Generator[Request, None, Tensor]:
            if known:
                return torch.stack([encoded(rows[each]) for each in counterparts])
            across = torch.empty(member.size, NBYTES, dtype=torch.uint8)
            yield Collective(ALL_GATHER, (across.view(-1), encoded(rows[rank])))
            return across

        def place(index: int, payload: Tensor) -> None:
            found[index] = decode(CODEC, RUNS, payload[None], torch.float32, None)

        sent = 0 if known else NBYTES
        nodes.all_gather("int8", sent, (NBYTES, torch.uint8), exchange, place).wait()
        executor.close()
        return found, executor.stats.totals()

    expected = torch.stack([decode(CODEC, RUNS, encoded(row)[None], torch.float32, None) for row in rows])
    for found, totals in run_ranks(size, body):
        assert torch.equal(found, expected)
        crossed = sum(row.wire_nbytes for row in totals if row.level != "intra_node")
        assert crossed == (0 if known else (len(arrange(range(size) if flat else places)) - 1) * NBYTES)


def test_a_failure_names_the_phase_and_reaches_the_caller() -> None:
    ends = nodes_of([0, 1], flat=False, broken=True)

    def body(rank: int) -> str:
        nodes, executor, _ = ends[rank]

        def exchange(rows: Sequence[Tensor], member: Member) -> Iterator[Request]:
            payloads = torch.stack([encoded(row) for row in rows])
            yield Collective(ALL_TO_ALL, (torch.empty_like(payloads), payloads))

        with pytest.raises(CollectiveError) as raised:
            nodes.reduce_scatter("int8", NBYTES, source_of(rank, 2).view(-1), exchange).wait()
        executor.close()
        return str(raised.value)

    assert run_ranks(2, body) == ["reduce_scatter inter_node: unplugged"] * 2


def test_a_plan_has_a_price_and_the_bytes_of_its_payloads() -> None:
    cluster = cluster_of([0, 0, 1, 1])
    for op in (ALL_GATHER, REDUCE_SCATTER):
        plan = plan_compressed(cluster, op, 1 << 20, 4, "int8", 1 << 20, flat=False).plan
        between = next(phase for phase in plan.phases if phase.level == 1)
        assert between.compressor == "int8" and plan.chunks == 1
        assert plan.bytes_by_level["inter_node"] == pytest.approx(2 << 20)
        flat = plan_compressed(cluster, op, 1 << 20, 4, "int8", 1 << 20, flat=True).plan
        assert flat.seconds > plan.seconds > 0 and flat.bytes_by_level["inter_node"] == pytest.approx(4 << 20)
    inside = plan_compressed(cluster, ALL_GATHER, 1 << 20, 4, "int8", 0, flat=False).plan
    assert [phase.level for phase in inside.phases] == [0] and inside.bytes_by_level["inter_node"] == 0
