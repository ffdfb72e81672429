"""Buckets overlap: the order in which the hook issues keeps the NIC busy; what holding back costs elsewhere.

Nothing here is timed: the recorded schedule is replayed on links of given speeds, and every replay is the same.
"""

from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fake_cuda.timeline import (
    BACKWARD,
    COLLECTIVE,
    Op,
    Recorded,
    Speeds,
    Timeline,
    _Flow,
    apart,
    as_text,
    draw,
    record,
    replay,
    share_links,
)

MIB = 2**20
BUCKETS, ROWS = 6, 64
NODES = {"2x8": "aaaaaaaabbbbbbbb", "4x4": "aaaabbbbccccdddd", "2x2": "aabb"}
GBIT_100, GBIT_25 = 12.5e9, 25e9 / 8
FAST = [1e-4 * (number + 1) for number in range(BUCKETS)]


@lru_cache(maxsize=16)
def recorded(nodes: str, compressor: str | None, release_each: bool = False, chunks: int = 1) -> Recorded:
    return record(
        NODES[nodes],
        [ROWS] * BUCKETS,
        release_each=release_each,
        plan={"name": "hierarchical", "chunks": chunks},
        compressor=compressor,
    )


def on(nic: float, schedule: Recorded, arrivals: list[float], mib: float = 25.0, **speeds: Any) -> Timeline:
    scale = mib * MIB / schedule.bucket_nbytes[0]
    return replay(schedule, Speeds(nic_bytes_per_second=nic, **speeds), arrivals, scale=scale)


# The simulator.


def test_links_are_shared_alike_and_wholly() -> None:
    a, b = ("nic", 0, 0), ("nvlink", 0, 0)
    flows = [_Flow([], 0.0, {a: 10.0}), _Flow([], 0.0, {a: 30.0, b: 30.0}), _Flow([], 0.0, {b: 5.0})]
    share_links(flows, {a: 100.0, b: 1000.0}.__getitem__)
    speeds = [flow.rate * flow.heaviest for flow in flows]
    assert speeds == pytest.approx([50.0, 50.0, 950.0])


def alone(members: tuple[int, ...], name: str, nbytes: int) -> Recorded:
    """A collective behind the arrival of its bucket, on all of its members."""
    ops, arrivals = [], []
    for rank in members:
        ops.append(Op(rank, 2 * rank, 1, "default", BACKWARD, "fill", (), nbytes, -1))
        ops.append(Op(rank, 2 * rank + 1, 1, "nccl", COLLECTIVE, name, ((2 * rank, 1),), nbytes, 0, 7, members, 3))
        arrivals.append([(2 * rank, 1)])
    return Recorded("aabb", ops, 1, arrivals, [nbytes], [0], [0])


@pytest.mark.parametrize(
    ("members", "name", "seconds"),
    [
        ((0, 1), "reduce_scatter", 0.5 * 8e6 / 300e9),
        ((0, 1), "all_gather", 0.5 * 8e6 / 300e9),
        ((0, 2), "all_reduce", 8e6 / GBIT_100),
        ((0, 2), "all_to_all", 0.5 * 8e6 / GBIT_100),
        ((0, 1, 2, 3), "all_reduce", 1.5 * 8e6 / GBIT_100),
    ],
)
def test_a_collective_takes_its_latency_and_its_bytes(members: tuple[int, ...], name: str, seconds: float) -> None:
    speeds = Speeds(nic_bytes_per_second=GBIT_100, base_seconds=1e-6, nvlink_hop_seconds=0.0, nic_hop_seconds=0.0)
    assert replay(alone(members, name, 8_000_000), speeds, [0.25]).end == pytest.approx(0.25 + 1e-6 + seconds)


def test_operations_that_wait_for_each_other_are_named() -> None:
    one = Op(0, 0, 1, "a", BACKWARD, "one", ((1, 1),), 4, -1)
    other = Op(0, 1, 1, "b", BACKWARD, "other", ((0, 1),), 4, -1)
    with pytest.raises(RuntimeError, match=r"2 operations wait for each other; the first is Op.*one"):
        replay(Recorded("a", [one, other], 1, [[(0, 1)]], [4], [], []), Speeds(nic_bytes_per_second=1.0), [0.0])
    with pytest.raises(ValueError, match="`arrivals` has 2 moments; wanted one for each of 1 buckets"):
        replay(Recorded("a", [one], 1, [[(0, 1)]], [4], [], []), Speeds(nic_bytes_per_second=1.0), [0.0, 1.0])


@pytest.mark.parametrize("compressor", [None, "int8"])
def test_a_replay_keeps_to_streams_waits_communicators_and_links(compressor: str | None) -> None:
    schedule = recorded("2x2", compressor)
    timeline = on(GBIT_100, schedule, FAST)
    when = {each.op.key: each for each in timeline.intervals}
    assert len(when) == len(schedule.ops)
    met: dict[tuple[int, int], set[tuple[float, float]]] = {}
    for each in timeline.intervals:
        op = each.op
        behind = [(op.stream, op.tick - 1), *op.waits]
        assert all(when[key].end <= each.start + 1e-12 for key in behind if key in when)
        if op.kind == COLLECTIVE:
            met.setdefault((op.communicator, op.sequence), set()).add((each.start, each.end))
    assert all(len(spans) == 1 for spans in met.values())  # all members begin and end together
    for before, after in pairwise(sorted(met)):
        assert before[0] != after[0] or min(met[after])[0] >= max(met[before])[1] - 1e-12  # one after the other
    for keys in schedule.arrivals:
        assert all(when[key].end >= moment - 1e-12 for key, moment in zip(keys, FAST, strict=True))
    for link, carried in timeline.carried.items():
        capacity = GBIT_100 if link[0] == "nic" else timeline.speeds.nvlink_bytes_per_second
        edges = sorted({edge for start, end, _ in carried for edge in (start, end)})
        for start, end in pairwise(edges):
            rate = sum(n / (last - first) for first, last, n in carried if first <= start and end <= last)
            assert rate <= capacity * (1 + 1e-6)


# The hook.


@pytest.mark.parametrize("nodes", ["2x8", "4x4"])
@pytest.mark.parametrize("compressor", [None, "int8"])
def test_the_network_card_is_never_idle_between_buckets(nodes: str, compressor: str | None) -> None:
    schedule = recorded(nodes, compressor)
    # A quarter of the bytes: of the network's time for 25 MiB in 8 bits at 100 Gbit/s, latencies are 8 %.
    timeline = on(GBIT_100 if compressor is None else GBIT_25, schedule, FAST)
    assert timeline.nic_busy > 0.95
    # Whatever is idle there is the latency of NCCL's calls, and the owner's stage of the compressor.
    assert on(GBIT_100, schedule, FAST).nic_occupied > 0.99


@pytest.mark.parametrize(("nodes", "compressor"), [("2x8", None), ("4x4", "int8")])
def test_coming_down_at_once_would_leave_it_idle(nodes: str, compressor: str | None) -> None:
    held = on(GBIT_100, recorded(nodes, compressor), FAST)
    at_once = on(GBIT_100, recorded(nodes, compressor, release_each=True), FAST)
    assert at_once.nic_occupied < 0.95 < held.nic_occupied
    assert at_once.nic_busy < held.nic_busy - 0.05
    assert at_once.end > held.end


def test_two_communicators_between_nodes_would_hide_latency() -> None:
    schedule = recorded("4x4", "int8")
    one, two = on(GBIT_100, schedule, FAST), on(GBIT_100, apart(schedule), FAST)
    assert one.nic_busy < two.nic_busy
    assert two.end < one.end
    carried = [sum(nbytes for _, _, nbytes in each.carried["nic", 0, 0]) for each in (one, two)]
    assert carried[0] == pytest.approx(carried[1])


def test_chunks_of_a_bucket_overlap_as_buckets_do() -> None:
    timeline = on(GBIT_100, recorded("2x2", None, chunks=2), FAST, mib=100)
    assert timeline.nic_busy > 0.95
    assert timeline.nic_occupied > 0.99


@pytest.mark.parametrize("compressor", [None, "int8"])
def test_a_step_bound_by_computing_ends_as_early_as_its_last_bucket_can(compressor: str | None) -> None:
    schedule = recorded("4x4", compressor)
    lonely = on(GBIT_100, schedule, [float(number) for number in range(BUCKETS)])
    own = lonely.end - lonely.arrived[-1]
    for gap in (own, 1.3 * own):
        timeline = on(GBIT_100, schedule, [gap * number for number in range(BUCKETS)])
        assert timeline.end - timeline.arrived[-1] == pytest.approx(own, rel=1e-6)


def test_what_holding_back_costs_at_the_end_of_a_step() -> None:
    # The bucket before the last one has been back from the network for long; it comes down only now, while the last one
    # is between the nodes. Where that is shorter than the way down of a large bucket, the difference is the price.
    small = record(NODES["2x2"], [1], plan={"name": "hierarchical", "chunks": 1})
    mixed = record(NODES["2x2"], [ROWS, ROWS, 1], plan={"name": "hierarchical", "chunks": 1})
    scale = 25 * MIB / mixed.bucket_nbytes[0]
    for nvlink, price in ((300e9, False), (30e9, True)):
        speeds = Speeds(nic_bytes_per_second=GBIT_100, nvlink_bytes_per_second=nvlink)
        alone = replay(small, speeds, [0.0], scale=scale)
        mixture = replay(mixed, speeds, [1.0, 2.0, 3.0], scale=scale)
        down = max(each.end - each.start for each in mixture.intervals if each.op.name == "all_gather")
        first, last = alone.nic_window
        expected = max(0.0, down - (last - first))
        assert (expected > 0) == price
        assert mixture.end - 3.0 == pytest.approx(alone.end + expected, abs=1e-9)


def test_few_buffers_of_joined_buckets_are_in_use() -> None:
    schedule = record(
        NODES["2x2"], [ROWS] * 12, plan={"name": "hierarchical", "chunks": 1}, fusion=2 * ROWS * 1024 / MIB
    )
    assert schedule.joined_nbytes == [2 * ROWS * 1024] * 6
    buffer = schedule.joined_nbytes[0]
    assert max(schedule.peak_nbytes) < 3 * buffer + buffer // 2  # as the allocator sees it, however far the host is
    arrivals = [1e-5 * number for number in range(12)]
    for nic in (GBIT_25, GBIT_100, 1e12):
        timeline = on(nic, schedule, arrivals)
        assert all(1 <= timeline.in_flight(rank) <= 3 for rank in range(4))


def test_the_picture(tmp_path: Path) -> None:
    timeline = on(GBIT_100, recorded("2x2", None), FAST, nvlink_bytes_per_second=30e9)
    rows = {line.split()[0]: line.split()[1] for line in as_text(timeline, 200).splitlines()[:4]}
    # Exact sums take one kernel on a GPU of 9.0: it scales the bucket before NCCL's plain sum.
    assert list(rows) == ["backward", "kernels", "NVLink", "NIC"]
    assert list(dict.fromkeys(rows["NIC"].strip("."))) == list("012345")  # no dot: never idle in between
    assert list(dict.fromkeys(rows["NVLink"].replace(".", ""))) == list("01a2b3c4d5ef")
    draw({"held": timeline}, tmp_path / "timeline.svg", ["a note"])
    assert "<svg" in (tmp_path / "timeline.svg").read_text()
