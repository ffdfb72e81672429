"""Law: every rank gets the same decision, also where some are absent."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest

from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.bootstrap.probe import PeerWait
from support.threads import run_ranks


def test_rank_0_decides_for_all() -> None:
    store = HashStore()

    def run(rank: int) -> list[object]:
        voice = Agreement(store, rank, 3, "test", timedelta(seconds=10))
        return [voice.decide(rank + step, max) for step in range(3)]  # type: ignore[arg-type]

    assert run_ranks(3, run) == [[2, 3, 4]] * 3


def outcome(store: HashStore, rank: int, size: int, value: object, seconds: float) -> str:
    try:
        Agreement(store, rank, size, "plan", timedelta(seconds=seconds)).same(value)
    except ValueError as error:
        return str(error)
    return "agreed"


def test_a_change_that_all_want_is_taken() -> None:
    store = HashStore()
    assert run_ranks(3, lambda rank: outcome(store, rank, 3, {"cuts": [1]}, 10)) == ["agreed"] * 3


def test_ranks_that_want_different_things_are_refused_alike() -> None:
    store = HashStore()
    texts = run_ranks(3, lambda rank: outcome(store, rank, 3, rank // 2, 10))
    assert len(set(texts)) == 1
    assert "different things" in texts[0]


def fails(values: list[object]) -> object:
    raise LookupError(f"no plan for {values}")


@pytest.mark.parametrize(("rule", "cause"), [(fails, "LookupError: no plan for [0, 1, 2]"), (set, "TypeError: ")])
def test_a_rule_that_fails_or_returns_no_json_refuses_on_all(
    rule: Callable[[list[object]], object], cause: str
) -> None:
    """Law: rank 0, which alone applies the rule, ends as the others do, and at once."""
    store = HashStore()

    def run(rank: int) -> str:
        with pytest.raises(ValueError, match="`plan` was refused on all ranks") as caught:
            Agreement(store, rank, 3, "plan", timedelta(seconds=10)).decide(rank, rule)
        return str(caught.value)

    texts = run_ranks(3, run)
    assert len(set(texts)) == 1 and cause in texts[0]


@pytest.mark.parametrize("absent", [0, 2])
def test_a_change_that_one_rank_does_not_want_is_refused_on_all(absent: int) -> None:
    store = HashStore()

    def run(rank: int) -> str:
        if rank == absent:
            time.sleep(1.5)  # it asks too late: the others have given up
        return outcome(store, rank, 3, "plan", 0.5)

    for text in run_ranks(3, run):
        assert "`plan` was refused on all ranks" in text
        assert f"rank {absent}" in text


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_has_ended_is_named_before_the_time_out(gone: int) -> None:
    """Law: all others hear the same, whichever of them has found it out."""
    store, size = HashStore(), 3

    def ended(ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank == gone]

    def run(rank: int) -> str:
        if rank == gone:
            return ""
        own = Agreement(store, rank, size, "plan", timedelta(minutes=10), find_exited=ended)
        with pytest.raises(ValueError, match="refused on all ranks") as caught:
            own.decide(rank, list)
        return str(caught.value)

    assert all(f"rank {gone} has ended" in text for text in run_ranks(size, run) if text)


@pytest.mark.parametrize("rank", [0, 1])
def test_who_waits_hears_that_another_rank_has_given_up(rank: int) -> None:
    """Law: before the time-out, though no rank has ended."""
    peer_wait = PeerWait(range(3), rank, None, lambda: "rank 2 has run out of luck")
    own = Agreement(HashStore(), rank, 3, "plan", timedelta(minutes=10), find_exited=peer_wait.exited_among)
    with pytest.raises(ValueError, match="refused on all ranks: rank 2 has run out of luck"):
        own.decide(rank, list)
