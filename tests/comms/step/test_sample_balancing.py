"""Dealing samples by speed: every sample once, the same batches whatever the shares, and as early ready as can be."""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any

import pytest

from gradwire.comms.step.sample_balancing import FIRST_STEPS, LEAST_GAIN, WINDOW, SpeedBatchSampler, shares_of
from gradwire.comms.step.samples import UNKNOWN, Told


@dataclass
class Weights:
    """Stands for what tells the ranks' numbers."""

    assigner: Any = None


@dataclass
class State:
    """One rank's state, as a sampler sees it."""

    rank: int
    size: int
    weights: Any = field(default_factory=Weights)

    @property
    def communicator(self) -> "State":
        return self

    def _connected(self, call: str) -> Any:
        return self


def flat(parts: Iterable[Iterable[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def samplers(ranks: int, length: int, batch_size: int, **options: Any) -> list[SpeedBatchSampler]:
    return [SpeedBatchSampler(range(length), batch_size, State(rank, ranks), **options) for rank in range(ranks)]


def tell(all_of_them: Sequence[SpeedBatchSampler], sizes: Sequence[int], seconds: Sequence[float]) -> None:
    """What one step's exchange does, on all ranks."""
    told = [
        Told(size, each_seconds, size, each.place, each.checksum)
        for each, size, each_seconds in zip(all_of_them, sizes, seconds, strict=True)
    ]
    for each in all_of_them:
        each.heard(told)


def train(
    all_of_them: Sequence[SpeedBatchSampler], seconds_of: Any, epochs: int = 1, ahead: int = 0
) -> list[list[list[int]]]:
    """Batch after batch of all ranks; `ahead` is how many a DataLoader's workers have drawn besides."""
    found = []
    for epoch in range(epochs):
        for each in all_of_them:
            each.set_epoch(epoch)
        drawn: list[list[list[int]]] = []
        iterators = [iter(each) for each in all_of_them]
        for step in range(len(all_of_them[0])):
            while len(drawn) <= min(step + ahead, len(all_of_them[0]) - 1):
                drawn.append([next(each) for each in iterators])
            sizes = [len(part) for part in drawn[step]]
            tell(all_of_them, sizes, seconds_of(sizes))
        assert all(next(each, None) is None for each in iterators)
        found += drawn
    return found


def test_no_other_shares_are_ready_sooner() -> None:
    random.seed(0)
    for _ in range(60):
        ranks = random.randint(1, 4)
        speeds = [random.choice((0.5, 1.0, 2.0, random.uniform(0.1, 9.0))) for _ in range(ranks)]
        total = random.randint(ranks, 11)
        shares = shares_of(total, speeds)
        assert sum(shares) == total and min(shares) >= 1

        def ready(sizes: Sequence[int], speeds: Sequence[float] = speeds) -> float:
            return max(size / speed for size, speed in zip(sizes, speeds, strict=True))

        every = (sizes for sizes in product(range(1, total + 1), repeat=ranks) if sum(sizes) == total)
        assert ready(shares) <= min(map(ready, every)) * (1 + 1e-12), (speeds, shares)


def test_equal_speeds_get_equal_shares() -> None:
    assert shares_of(10, (3.0, 3.0, 3.0)) == [4, 3, 3]
    assert shares_of(7, (2.0, 1.0)) == [5, 2]
    for wrong in ((2, (1.0, 1.0, 1.0)), (4, (1.0, 0.0)), (4, (1.0, float("inf")))):
        with pytest.raises(ValueError, match=r"`total` is 2|`speeds` is"):
            shares_of(*wrong)


@pytest.mark.parametrize("length", [64, 67, 70, 71, 16, 5])
@pytest.mark.parametrize("ahead", [0, 3])
def test_every_sample_of_an_epoch_goes_to_one_rank_and_batches_do_not_depend_on_the_shares(
    length: int, ahead: int
) -> None:
    slow = samplers(4, length, 16 if length > 5 else 5, seed=7)
    alike = samplers(4, length, 16 if length > 5 else 5, seed=7, adapt=False)
    epochs = 12
    dealt = train(
        slow, lambda sizes: [size * (1.0, 1.0, 1.0, 2.0)[rank] for rank, size in enumerate(sizes)], epochs, ahead
    )
    equal = train(alike, lambda sizes: [UNKNOWN] * 4, epochs)
    count = len(slow[0])
    assert len(dealt) == epochs * count
    for one, other in zip(dealt, equal, strict=True):
        assert all(one) and flat(one) == flat(other)
    for epoch in range(epochs):
        seen = flat(map(flat, dealt[epoch * count : (epoch + 1) * count]))
        assert sorted(seen) == list(range(length))
    assert flat(dealt[0]) != flat(dealt[count])  # another order in the next epoch
    if length >= 64:
        whole = dealt[-count]
        assert len(whole[3]) < len(whole[0]), "nobody took up what was measured"


@pytest.mark.parametrize("fixed", [0.0, 2.0, 20.0])
def test_shares_end_where_all_are_ready_at_once(fixed: float) -> None:
    """A step takes what does not depend on the samples, too: an optimizer, a data loader's word."""
    cost = (1.0, 1.0, 1.0, 2.0)
    everybody = samplers(4, 6400, 128)

    def seconds(sizes: Sequence[int]) -> list[float]:
        return [fixed + size * each for size, each in zip(sizes, cost, strict=True)]

    batches = train(everybody, seconds, epochs=3)
    found = [max(seconds([len(part) for part in batch])) for batch in batches[:: len(everybody[0])]]
    best = max(seconds(shares_of(128, [1 / each for each in cost])))
    assert found[0] == max(seconds([32] * 4)) > 1.2 * best
    assert found[-1] <= best * (1 + 2 * LEAST_GAIN)
    assert len(everybody[0].state_dict()["assignments"]) == 1  # type: ignore[arg-type]  # they do not go to and fro


def test_noise_changes_no_share() -> None:
    random.seed(1)
    everybody = samplers(4, 6400, 128)
    train(everybody, lambda sizes: [size * random.gauss(1.0, 0.01) for size in sizes], epochs=2)
    assert everybody[0].shares() == [32] * 4


def test_new_shares_begin_at_the_first_batch_that_no_rank_has_drawn() -> None:
    everybody = samplers(2, 640, 16)
    iterators = [iter(each) for each in everybody]
    for _ in range(5):
        for each in iterators:
            next(each)
    next(iterators[1])  # draws one more ahead
    for _ in range(FIRST_STEPS + WINDOW):
        tell(everybody, [8, 8], [8.0, 24.0])
    assert [everybody[0].shares(place) for place in (5, 6)] == [[8, 8], [12, 4]]
    assert len(next(iterators[0])) == 8 and [len(next(each)) for each in iterators] == [12, 4]


def test_batches_that_another_thread_draws_are_refused() -> None:
    (one, other) = samplers(2, 640, 16)
    told = [Told(8, each, 8, 0, one.checksum) for each in (8.0, 24.0)]
    for _ in range(FIRST_STEPS + WINDOW - 1):
        one.heard(told)
    next(iter(one))
    with pytest.raises(RuntimeError, match="batch 0 was drawn while the ranks told each other their speeds"):
        one.heard(told)
    assert other.shares() == [8, 8]


@pytest.mark.parametrize("unlike", [{"seed": 1}, {"batch_size": 8}, {"shuffle": False}])
def test_ranks_that_do_not_deal_alike_hear_of_it(unlike: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"batch_size": 16} | unlike
    one, other = samplers(2, 64, 16)[0], SpeedBatchSampler(range(64), state=State(1, 2), **arguments)
    for each in (one, other):
        with pytest.raises(ValueError, match="differs on other ranks"):
            each.heard([Told(8, 1.0, 8, 0, float(every.checksum)) for every in (one, other)])


def seconds_of_a_slow_one(sizes: Sequence[int]) -> list[float]:
    return [size * (2.0 if rank == 1 else 1.0) for rank, size in enumerate(sizes)]


@pytest.mark.parametrize("batches", [0, 3, 12, 40])
def test_a_saved_state_goes_on_with_the_same_shares_and_samples(batches: int) -> None:
    """Saved while workers had drawn ahead, as json, in the second epoch."""
    whole = samplers(3, 640, 16, seed=5)
    train(whole, seconds_of_a_slow_one)
    for each in whole:
        each.set_epoch(1)
    wanted = [list(parts) for parts in zip(*whole, strict=True)]
    saved = [json.loads(json.dumps(each.state_dict(batches))) for each in whole]
    assert saved[0] == saved[1] == saved[2]
    again = samplers(3, 640, 16, seed=5)
    for each, state in zip(again, saved, strict=True):
        each.load_state_dict(state)
        if batches < 40:
            each.set_epoch(1)
    found = [list(parts) for parts in zip(*again, strict=True)]
    if batches < 40:
        assert found == wanted[batches:]
    else:  # the epoch was over
        assert len(found) == 40 and found != wanted
        assert [len(part) for part in found[0]] == [len(part) for part in wanted[-1]] != [6, 5, 5]
    with pytest.raises(ValueError, match=r"`batches` is 41, and 40 of this epoch were drawn"):
        whole[0].state_dict(41)


def test_on_another_number_of_ranks_batches_hold_what_they_would_have_held() -> None:
    three, two = samplers(3, 640, 16), samplers(2, 640, 16)
    train(three, seconds_of_a_slow_one)
    for each in two:
        each.load_state_dict(three[0].state_dict(7))
        assert each.shares() == [8, 8]
    rest = [flat(parts) for parts in zip(*two, strict=True)]
    other = samplers(3, 640, 16, adapt=False)
    assert rest == [flat(parts) for parts in zip(*other, strict=True)][7:]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": 3}, "`seed` is 0, and `state` was saved with 3"),
        ({"length": 60}, "`length` is 64, and `state` was saved with 60"),
        ({"assignments": []}, "`state` is damaged"),
        ({"assignments": None}, "`state` is damaged"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any], match: str) -> None:
    (one, _) = samplers(2, 64, 16)
    with pytest.raises(ValueError, match=match):
        one.load_state_dict(one.state_dict() | change)
    with pytest.raises(ValueError, match="`state` lacks length, batch_size"):
        one.load_state_dict({})


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="`batch_size` is of 3 samples, and there are 4 ranks"):
        samplers(4, 64, 3)
    with pytest.raises(ValueError, match="`dataset` is of 2 samples, and there are 4 ranks"):
        samplers(4, 2, 16)
    with pytest.raises(ValueError, match='wanted HookState\\(model, reduction="samples"\\)'):
        SpeedBatchSampler(range(64), 16, State(0, 2, weights=None))
