"""Laws of the agreement, with ranks as threads: whoever is lost, all survivors name the same members in one order."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from gradwire.comms.bootstrap import liveness
from gradwire.comms.bootstrap.compat import HashStore, PrefixStore, Store
from gradwire.comms.bootstrap.failure_reporter import AbortSignal
from gradwire.comms.bootstrap.failures import FAILED, OVER, SILENT, PeerFailure
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.elastic.membership import (
    LEADER_SECONDS,
    SILENCE_SECONDS,
    EvictedError,
    GenerationStore,
    Membership,
    View,
)
from gradwire.comms.elastic.resilient_ops import GenerationFailureReporter
from gradwire.comms.errors import PeerError
from support.threads import run_ranks

TIMEOUT = timedelta(seconds=20)
SECONDS = 20.0


def members(store: Store, size: int) -> list[Membership]:
    names = tuple(f"rank {rank}" for rank in range(size))
    return [Membership(store, View(0, rank, names), TIMEOUT) for rank in range(size)]


def lose(made: Sequence[Membership], lost: Sequence[int]) -> None:
    """Ends ranks as a process ends: their connections close, and nothing is said."""
    for rank in lost:
        made[rank].close(orderly=False)


def next_of(made: Sequence[Membership], left: Sequence[int]) -> Callable[[int], View]:
    """The first view with so few members: a rank may have said that it is here just before it was lost."""

    def settle(index: int) -> View:
        view = made[left[index]].next(SECONDS)
        while view.size > len(left):
            view = made[left[index]].next(SECONDS)
        return view

    return settle


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("seed", range(3))
def test_all_survivors_name_the_same_members(seed: int) -> None:
    choose = random.Random(seed)
    size = choose.randint(2, 6)
    made = members(HashStore(), size)
    left = list(range(size))
    while len(left) > 1:
        lost = choose.sample(left, choose.randint(1, len(left) - 1))
        lose(made, lost)
        left = [rank for rank in left if rank not in lost]
        views = run_ranks(len(left), next_of(made, left))
        assert {view.members for view in views} == {tuple(f"rank {rank}" for rank in left)}
        assert [view.rank for view in views] == list(range(len(left)))
        assert set(views[0].lost) >= {f"rank {rank}" for rank in lost} or views[0].generation > 1
    lose(made, left)


def test_one_rank_asks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that asked whether every other one is there would load the store with the square of the ranks."""
    made = members(HashStore(), 6)
    left = [0, 1, 2, 4, 5]
    asked: list[int] = []
    collect = Membership._collect

    def counted(self: Membership, generation: Any) -> list[int]:
        asked.append(generation.view.generation)
        return collect(self, generation)

    monkeypatch.setattr(Membership, "_collect", counted)
    lose(made, [3])
    views = run_ranks(len(left), next_of(made, left))
    assert {view.size for view in views} == {5}
    assert sorted(asked) == list(range(views[0].generation))
    lose(made, left)


def all_enter_the_next(made: Sequence[Membership]) -> None:
    """Nobody is lost by an alarm, and all are in the generation after it."""
    views = run_ranks(len(made), lambda rank: made[rank].next(SECONDS))
    assert [(view.generation, view.size) for view in views] == [(1, len(made))] * len(made)
    lose(made, range(len(made)))


def test_an_alarm_that_is_in_the_store_alone_is_heard_by_all() -> None:
    """As of a rank whose connections say nothing: its process lives, and its neighbours cannot tell the others."""
    store = HashStore()
    made = members(store, 3)
    AbortSignal(PollingStore(store, TIMEOUT), 1, "0/abort").set(PeerFailure("rank 1 cannot go on", FAILED))
    all_enter_the_next(made)


def test_what_a_rank_reports_is_in_the_store_for_those_that_are_no_neighbours() -> None:
    store = HashStore()
    made = members(store, 3)
    made[1].failures.report(PeerFailure("rank 1 cannot go on", FAILED))
    said = AbortSignal(PollingStore(store, TIMEOUT), 0, "0/abort").read()
    assert said is not None and said.reason == "rank 1 cannot go on" and said.reported_by == 1
    all_enter_the_next(made)


def test_who_joins_is_among_the_members_of_all_or_of_none() -> None:
    store = HashStore()
    made = members(store, 3)
    before = [each.failures for each in made]
    views = run_ranks(3, lambda rank: made[rank].admit({"new": "says this"}))
    assert {view.members for view in views} == {("rank 0", "rank 1", "rank 2", "new")}
    assert {view.joined for view in views} == {("new",)}
    assert [each.packed_infos["new"] for each in made] == ["says this"] * 3
    assert [str(each.first and each.first.source) for each in before] == [OVER] * 3
    # It never comes: the ranks that wait for it go on without it.
    views = run_ranks(3, lambda rank: made[rank].next(SECONDS))
    assert {view.members for view in views} == {("rank 0", "rank 1", "rank 2")}
    lose(made, [0, 1, 2])


def test_another_rank_leads_where_the_leader_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    made, collect = members(HashStore(), 3), Membership._collect
    dead: list[Membership] = []

    def die(leader: Membership, generation: Any) -> list[int]:
        if not dead:  # the first one that leads ends before it has written down who is left
            dead.append(leader)
            generation.ring._connections.listener.close()
            generation.ring._pass_on = lambda error: None
            raise EvictedError("lost")
        return collect(leader, generation)

    monkeypatch.setattr(Membership, "_collect", die)
    began = time.monotonic()
    for each in made:
        each.failures.report(PeerFailure("an operation has failed", FAILED))
    left = run_ranks(3, lambda rank: None if made[rank] in dead or died(made[rank]) else made[rank].view)
    assert sum(view is None for view in left) == 1
    assert time.monotonic() - began < SILENCE_SECONDS + LEADER_SECONDS
    assert all(view.generation > 0 for view in left if view is not None)
    lose(made, [0, 1, 2])


def died(rank: Membership) -> bool:
    try:
        rank.next(SECONDS)
    except EvictedError:
        return True
    return False


def test_a_lost_member_leaves_its_note() -> None:
    made = members(HashStore(), 2)
    made[1].note = "0.5 after step 20"
    deadline = time.monotonic() + SECONDS
    while made[0].note_of("rank 1") is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (made[0].note_of("rank 1"), made[0].note_of("rank 0")) == ("0.5 after step 20", None)
    lose(made, [0, 1])


def test_a_failure_ends_the_epoch_for_all_and_its_store_says_why() -> None:
    store = HashStore()
    made = members(store, 2)
    reporter, failures = GenerationFailureReporter(0, made[0].failures), [each.failures for each in made]
    told = GenerationStore(store, TIMEOUT, reporter.abort_reason)
    assert not told.check(["anything"])
    reporter.signal_abort("a connection broke")
    with pytest.raises(PeerError, match="a connection broke"):
        told.wait(["anything"])
    views = run_ranks(2, lambda rank: made[rank].next(SECONDS))
    assert {view.members for view in views} == {("rank 0", "rank 1")}
    said = [each.first for each in failures]
    assert [(each.reason, each.source, each.ranks) for each in said if each] == [("a connection broke", FAILED, ())] * 2
    assert said[1] is not None and said[1].reported_by == 0
    assert [each.failures.first for each in made] == [None, None]
    lose(made, [0, 1])


@pytest.mark.parametrize("stalled", [(1,), (0, 1, 2, 3)])
def test_who_waits_for_the_store_is_not_taken_for_frozen(
    stalled: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(liveness, "FROZEN_SECONDS", 0.8)
    made = members(HashStore(), 4)
    rings = [each._current.ring for each in made]
    for each in made:
        each.waited = lambda: SECONDS
    until(
        lambda: all(ring and sum(peer.known for peer in list(ring._connections.peers.values())) == 2 for ring in rings)
    )
    answers, asking = threading.Event(), set()

    def stall(rank: int, check: Callable[[list[str]], bool], keys: list[str]) -> bool:
        asking.add(rank)
        answers.wait(SECONDS)
        return check(keys)

    for rank in stalled:
        monkeypatch.setattr(made[rank]._store, "check", partial(stall, rank, made[rank]._store.check))
    until(lambda: asking == set(stalled))
    time.sleep(2.0)
    answers.set()
    time.sleep(0.3)
    assert [each.failures.first for each in made] == [None] * 4
    assert rings[2] is not None
    monkeypatch.setattr(rings[2]._connections, "send", lambda *said: None)
    failures = made[0].failures
    until(lambda: failures.first is not None and "no heartbeat from rank 2" in failures.first.reason)
    # It may have heard of it in the store, which names nobody, before the ring, which does, and from a neighbour of the
    # rank that has heard of it there, too: the other one has missed it, and knows.
    assert failures.first is not None and failures.first.source == SILENT and failures.first.reported_by in (1, 3)
    until(lambda: {2} in (made[1].failures.ranks, made[3].failures.ranks))
    for each in made:
        each.close(orderly=False)


def test_an_evicted_rank_gets_an_error() -> None:
    store = HashStore()
    made = members(store, 2)
    PrefixStore("0", store).set("members", '{"left": [1], "joined": {}}')
    made[0].failures.report(PeerFailure("silence", FAILED))
    with pytest.raises(EvictedError, match="rank 0 was removed from the job by the other ranks"):
        made[0].next(SECONDS)
    assert made[1].next(SECONDS).members == ("rank 1",)
    lose(made, [0, 1])
