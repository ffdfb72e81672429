"""Laws of the agreement, with ranks as threads: whoever is lost, all survivors name the same members in one order."""

import random
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest

from gradwire.comms.bootstrap.compat import HashStore, PrefixStore, Store
from gradwire.comms.elastic.joining import Requests
from gradwire.comms.elastic.membership import EpochStore, GivenUpError, Membership, View
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
        assert set(views[0].lost) >= {f"rank {rank}" for rank in lost} or views[0].epoch > 1
    lose(made, left)


def test_who_joins_is_among_the_members_of_all_or_of_none() -> None:
    store = HashStore()
    made = members(store, 3)
    views = run_ranks(3, lambda rank: made[rank].admit(["new"]))
    assert {view.members for view in views} == {("rank 0", "rank 1", "rank 2", "new")}
    assert {view.joined for view in views} == {("new",)}
    # It never comes: the ranks that wait for it go on without it.
    views = run_ranks(3, lambda rank: made[rank].next(SECONDS))
    assert {view.members for view in views} == {("rank 0", "rank 1", "rank 2")}
    lose(made, [0, 1, 2])


def test_a_failure_ends_the_epoch_for_all_and_its_store_says_why() -> None:
    store = HashStore()
    made = members(store, 2)
    told = EpochStore(store, TIMEOUT, lambda: made[0].alarm(0))
    assert not told.check(["anything"])
    made[0].report(0, "a connection broke")
    with pytest.raises(PeerError, match="a connection broke"):
        told.wait(["anything"])
    views = run_ranks(2, lambda rank: made[rank].next(SECONDS))
    assert {view.members for view in views} == {("rank 0", "rank 1")}
    assert made[0].alarm(0) == "epoch 0 is over"
    assert made[0].alarm(1) is None
    lose(made, [0, 1])


def test_who_was_given_up_is_told_so() -> None:
    store = HashStore()
    made = members(store, 2)
    PrefixStore("0", store).set("members", '{"left": [1], "joined": []}')
    made[0].report(0, "silence")
    with pytest.raises(GivenUpError, match="rank 0 was given up by the others"):
        made[0].next(SECONDS)
    assert made[1].next(SECONDS).members == ("rank 1",)
    lose(made, [0, 1])


def test_a_newcomer_with_another_configuration_is_refused() -> None:
    store = HashStore()
    store.add("join/count", 1)
    store.set("join/1/request", '{"name": "new", "shared": {"plan": "flat"}}')
    assert Requests(store, TIMEOUT, {"plan": "auto"}).look() == 0
    assert b"`plan` is flat here and auto in the running job" in store.get("join/1/answer")
