"""What links and paths do to packets, in times that no clock decides: the relay's own rules, without its sockets."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire._native import RelayTimeline

MS = 1_000_000
"""Nanoseconds."""
NBYTES = 1250
"""10,000 bits: 0.1 ms at 100 Mbit/s."""

TICK = MS // 5
"""How often the relay looks while packets come."""


class Network:
    """A timeline whose packets come out as they are handed over."""

    def __init__(self, network: RelayTimeline) -> None:
        self.counts = network.counts
        self._network = network
        self.order: list[int] = []

    def pass_frames(self, frames: list[tuple[int, int, int, int]], tick: int = TICK) -> list[int]:
        there, self.order = self._network.pass_frames(frames, tick)
        return there


def timeline(
    nodes: int = 2,
    *,
    rate: float = 0,
    queue: float = 10.0,
    delay: float = 0,
    jitter: float = 0,
    loss: float = 0,
    reorder: bool = False,
    seed: int = 0,
) -> Network:
    pairs = nodes * nodes
    return Network(
        RelayTimeline([rate] * nodes, [queue] * nodes, [delay] * pairs, [jitter] * pairs, [loss] * pairs, reorder, seed)
    )


def test_a_lone_packet_takes_the_delay_and_its_own_length_at_both_links() -> None:
    assert timeline(delay=0.04).pass_frames([(5 * MS, 0, 1, NBYTES)]) == [45 * MS]
    assert timeline(delay=0.04, rate=1e8).pass_frames([(0, 0, 1, NBYTES)]) == [40 * MS + 2 * MS // 10]


def test_packets_sent_at_once_come_at_the_rate_of_the_link() -> None:
    there = timeline(delay=0.04, rate=1e8).pass_frames([(0, 0, 1, NBYTES)] * 100)
    assert {later - earlier for earlier, later in pairwise(there)} == {MS // 10}
    # 100 x 1,250 bytes at 100 Mbit/s are 10 ms.
    assert there[-1] == 40 * MS + 10 * MS + MS // 10


def test_two_senders_share_the_receivers_link() -> None:
    network = timeline(3, rate=1e8)
    there = network.pass_frames([(0, source, 2, NBYTES) for _ in range(50) for source in (0, 1)])
    assert max(there) == 10 * MS + MS // 10
    assert sum(row[4] for row in network.counts()) == 100


def test_the_two_directions_do_not_share() -> None:
    there = timeline(rate=1e8).pass_frames([(0, source, 1 - source, NBYTES) for _ in range(50) for source in (0, 1)])
    assert max(there) == 5 * MS + MS // 10


def test_what_would_wait_longer_than_the_queue_is_dropped_at_the_tail() -> None:
    # 5 ms hold 50 packets; the first one waits for nothing, the 51st for 5 ms.
    network = timeline(rate=1e8, queue=0.005)
    there = network.pass_frames([(0, 0, 1, NBYTES)] * 100)
    assert [at for at, time in enumerate(there) if time >= 0] == list(range(51))
    offered, _, lost, dropped, delivered = network.counts()[1]
    assert (offered, lost, dropped, delivered) == (100, 0, 49, 51)


def test_the_receivers_queue_drops_too() -> None:
    network = timeline(4, rate=1e8, queue=0.005)
    network.pass_frames([(0, source, 3, NBYTES) for _ in range(50) for source in range(3)])
    dropped = [network.counts()[source * 4 + 3][3] for source in range(3)]
    # 150 packets come within 5 ms at three times the rate; 50 pass meanwhile and 51 wait, give or take the first.
    assert sum(dropped) in range(48, 51)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.001, 0.01, 0.1]))
def test_losses_are_as_many_as_asked_for_and_each_is_counted(seed: int, loss: float) -> None:
    network = timeline(loss=loss, seed=seed)
    sent = 20_000
    there = network.pass_frames([(0, 0, 1, NBYTES)] * sent)
    offered, _, lost, dropped, delivered = network.counts()[1]
    assert there.count(-1) == lost and (offered, dropped, delivered) == (sent, 0, sent - lost)
    # Six standard deviations of a binomial: one failure in 5 x 10^8 seeds.
    assert abs(lost - sent * loss) < 6 * (sent * loss * (1 - loss)) ** 0.5


def test_losses_are_repeated_by_their_seed_alone() -> None:
    frames = [(0, 0, 1, NBYTES)] * 5000
    first, again, other = (timeline(loss=0.01, seed=seed).pass_frames(frames) for seed in (1, 1, 2))
    assert first == again != other


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 20 * MS), st.integers(0, 1), st.integers(60, 1514)), min_size=2, max_size=60),
    st.sampled_from([0.0, 1e7, 1e8]),
    st.integers(MS // 10, 5 * MS),
    st.sampled_from([0.0, 0.005]),
)
def test_packets_of_a_pair_are_handed_over_in_their_order_however_seldom_the_relay_looks(
    packets: list[tuple[int, int, int]], rate: float, tick: int, jitter: float
) -> None:
    frames = [(time, source, 2, nbytes) for time, source, nbytes in sorted(packets)]
    network = timeline(3, rate=rate, delay=0.005, jitter=jitter)
    there = network.pass_frames(frames, tick)
    assert sorted(network.order) == list(range(len(frames)))
    for source in (0, 1):
        own = [at for at in network.order if frames[at][1] == source]
        assert own == sorted(own)
    # And those of both as they are due.
    assert [there[at] for at in network.order] == sorted(there)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_jitter_keeps_the_order_unless_asked(seed: int) -> None:
    frames = [(at * MS, 0, 1, NBYTES) for at in range(200)]
    in_order = timeline(delay=0.04, jitter=0.02, seed=seed).pass_frames(frames)
    assert in_order == sorted(in_order)
    free = timeline(delay=0.04, jitter=0.02, seed=seed, reorder=True).pass_frames(frames)
    assert free != sorted(free)
    delays = [time - at * MS for at, time in enumerate(free)]
    assert 20 * MS <= min(delays) and max(delays) <= 60 * MS
    # The mean of 200 uniform draws: 20 ms / sqrt(3 x 200) is a standard deviation.
    assert abs(sum(delays) / 200 - 40 * MS) < 6 * 20 * MS / (3 * 200) ** 0.5


def test_a_network_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="wanted a rate and a queue for each node"):
        RelayTimeline([1e8], [0.1], [0.0] * 4, [0.0] * 4, [0.0] * 4, False, 0)
    with pytest.raises(ValueError, match="a frame of a node that is not there"):
        timeline().pass_frames([(0, 0, 2, NBYTES)])
