"""Bad arguments, ranks that disagree, stay away or give up: an error on every rank, nothing left behind."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from gradwire.comms.bootstrap.probe import PeerWait
from gradwire.comms.errors import MismatchError, PeerError
from gradwire.comms.transport import segment
from gradwire.comms.transport.shm import BLOCK_NBYTES, ShmGroup
from support.shared_memory import left_since, segments
from support.threads import run_ranks


class OnGroups(Protocol):
    """The fixture `on_groups`: runs a body on every rank of a new group, ranks as threads."""

    def __call__(self, size: int, body: Callable[[ShmGroup], None], seconds: float = ..., block: int = ...) -> None: ...


def test_arguments_are_checked_before_anything_moves() -> None:
    group = ShmGroup.create(HashStore(), 0, 1, key="alone", timeout=timedelta(seconds=5))
    tensor = torch.ones(4, 6)
    with pytest.raises(ValueError, match=r"`tensor` of shape \(6, 4\) is not contiguous"):
        group.all_reduce(tensor.t())
    with pytest.raises(ValueError, match="`tensor` is on device meta"):
        group.all_reduce(torch.ones(3, device="meta"))
    with pytest.raises(TypeError, match=r"`tensor` has dtype torch.complex64"):
        group.all_reduce(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"`scale` is 0.5 for an integer"):
        group.all_reduce(torch.ones(3, dtype=torch.int32), 0.5)
    with pytest.raises(ValueError, match="`op` is 'mean'"):
        group.all_reduce(tensor, op="mean")
    with pytest.raises(ValueError, match="`root` is 1"):
        group.broadcast(tensor, 1)
    with pytest.raises(ValueError, match="`bounds`"):
        group.reduce_scatter(tensor.view(-1), [0, 23])
    with pytest.raises(ValueError, match="`output` has 24 elements"):
        group.all_gather(tensor, torch.ones(5))
    group.all_reduce(tensor)
    group.close()
    with pytest.raises(RuntimeError, match="closed"):
        group.all_reduce(tensor)


@pytest.mark.parametrize(
    "wrong", [{"rank": 2}, {"rank": -1}, {"size": 0}, {"block_nbytes": 100}, {"timeout": timedelta(0)}], ids=str
)
def test_create_names_the_bad_argument(wrong: dict[str, object]) -> None:
    arguments: dict[str, object] = {"rank": 0, "size": 2, "timeout": timedelta(seconds=5), **wrong}
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}`"):
        ShmGroup.create(HashStore(), key="bad", **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [2, 3])
def test_mismatch_is_an_error_on_every_rank(on_groups: OnGroups, size: int) -> None:
    def other_numel(group: ShmGroup) -> None:
        with pytest.raises(MismatchError, match=r"`tensor` differs.*numel 1[01], dtype float32.*numel 1[01]"):
            group.all_reduce(torch.ones(10 + (group.rank == 1)))
        with pytest.raises(MismatchError):  # once failed, failed for good
            group.barrier()

    def other_dtype(group: ShmGroup) -> None:
        with pytest.raises(MismatchError, match="float16"):
            group.all_reduce(torch.ones(50_000, dtype=torch.float32 if group.rank else torch.float16))

    def other_bounds(group: ShmGroup) -> None:
        with pytest.raises(MismatchError, match="`bounds` differ"):
            group.reduce_scatter(torch.ones(8), [0, 4 + group.rank, *[8] * (group.size - 1)])

    def other_collective(group: ShmGroup) -> None:
        with pytest.raises(MismatchError, match="broadcast"):
            group.broadcast(torch.ones(8), 0) if group.rank == 0 else group.all_reduce(torch.ones(8))

    for body in (other_numel, other_dtype, other_bounds, other_collective):
        on_groups(size, body)


def test_time_out_names_who_is_missing(on_groups: OnGroups) -> None:
    begin, told = threading.Barrier(2, timeout=60), threading.Barrier(3, timeout=60)

    def body(group: ShmGroup) -> None:
        if group.rank != 2:
            begin.wait()  # on a machine with other work one of them may start late
            with pytest.raises(PeerError, match="rank 2 did not come to all_reduce within `timeout`") as caught:
                group.all_reduce(torch.ones(10))
            assert caught.value.missing == (2,)
            told.wait()
        else:
            told.wait()
            with pytest.raises(PeerError, match="did not come"):  # late: the group is given up already
                group.barrier()

    on_groups(3, body, seconds=2.0)


def test_closing_a_group_wakes_the_thread_that_waits_in_it_and_its_peers() -> None:
    store, waits, errors = HashStore(), threading.Event(), [""] * 3

    def body(rank: int) -> None:
        group = ShmGroup.create(store, rank, 3, key="test", timeout=timedelta(seconds=60))

        def wait() -> None:
            waits.set()
            try:
                group.barrier()
            except (PeerError, RuntimeError) as error:
                errors[rank] = str(error)

        if rank == 2:
            assert waits.wait(20)
            done.wait(20)
            group.close()
            return
        waiting = threading.Thread(target=wait)
        waiting.start()
        if rank == 0:
            time.sleep(0.3)  # in it, most likely; else it finds the group closed
            group.close()
        waiting.join(20)
        assert not waiting.is_alive()
        if rank == 1:
            done.set()
            group.close()

    done = threading.Event()
    run_ranks(3, body)
    assert "closed" in errors[0] and "closed the group" in errors[1]


def test_abort_wakes_every_waiter_with_the_reason(on_groups: OnGroups) -> None:
    def body(group: ShmGroup) -> None:
        if group.rank == 0:
            group.abort("the loss is purple")
        with pytest.raises(PeerError, match="the loss is purple"):
            group.barrier()
        with pytest.raises(PeerError, match="the loss is purple"):
            group.all_reduce(torch.ones(3))

    on_groups(3, body)


def test_a_rank_that_never_comes_to_create() -> None:
    before = segments()
    with pytest.raises(PeerError, match="rank 1, 2 did not come") as caught:
        ShmGroup.create(HashStore(), 0, 3, key="lonely", timeout=timedelta(seconds=0.3))
    assert caught.value.missing == (1, 2)
    assert not left_since(before)


def test_ranks_are_missing_by_their_numbers_in_the_job() -> None:
    """A plan may join two of a node's ranks: the second of them is not the second of the node."""
    store, pair, seconds = HashStore(), (2, 3), timedelta(seconds=1)

    def body(place: int) -> None:
        group = ShmGroup.create(store, place, 2, key="pair", timeout=seconds, members=pair)
        if place == 0:
            with pytest.raises(PeerError, match=r"rank 1 (did not come|has died or closed)") as caught:
                group.all_reduce(torch.ones(10))
            assert caught.value.missing == (3,)

    run_ranks(2, body)
    with pytest.raises(PeerError, match="did not come") as caught:
        ShmGroup.create(HashStore(), 0, 2, key="lonely", timeout=timedelta(seconds=0.3), members=pair)
    assert caught.value.missing == (3,)


@pytest.mark.parametrize(("rank", "gone"), [(0, 7), (1, 4)])
def test_a_rank_that_has_ended_before_it_came_to_create(rank: int, gone: int) -> None:
    """Law: it is named as soon as its kernel says so, whatever the time-out."""
    before = segments()
    peer_wait = PeerWait((4, 5, 7), rank, lambda ranks: [each for each in ranks if each == gone])
    index = (4, 5, 7).index(gone)
    with pytest.raises(PeerError, match=f"rank {gone} has ended during the set-up") as caught:
        ShmGroup.create(HashStore(), rank, 3, key="left", timeout=timedelta(minutes=10), peer_wait=peer_wait)
    assert caught.value.missing == (index,)
    assert not left_since(before)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_elsewhere_that_has_ended_is_heard_of_while_others_are_waited_for(rank: int) -> None:
    """Law: who waits for a rank that waits for the lost one does not hold up its name until both have waited long."""
    before = segments()
    peer_wait = PeerWait((4, 5), rank, None, lambda: "rank 7 has ended")
    with pytest.raises(PeerError, match="rank 7 has ended"):
        ShmGroup.create(HashStore(), rank, 2, key="heard", timeout=timedelta(seconds=20), peer_wait=peer_wait)
    assert not left_since(before)


@pytest.mark.parametrize("rank", [0, 1])
def test_who_has_heard_the_alarm_and_ended_is_not_named(rank: int) -> None:
    """Law: the reason is that of the rank that gave up first; who is gone is known all the same."""
    heard: list[int] = []

    def ended(ranks: Sequence[int]) -> list[int]:
        heard.extend(ranks)  # between this rank's last look for an alarm and its look for ends
        return heard

    peer_wait = PeerWait((4, 5), rank, ended, lambda: "rank 7 has run out of luck" if heard else None)
    with pytest.raises(PeerError, match=r"^rank 7 has run out of luck$") as caught:
        ShmGroup.create(HashStore(), rank, 2, key="messenger", timeout=timedelta(minutes=10), peer_wait=peer_wait)
    assert caught.value.missing == (1 - rank,)


def test_a_first_rank_that_has_heard_the_alarm_and_hung_up_is_not_named() -> None:
    """The same where its memory is called for in vain."""
    offer = {"name": "gradwire-gone", "network": segment._network(), "size": 2, "block_nbytes": BLOCK_NBYTES}
    store = HashStore()
    store.set("messenger/socket", json.dumps(offer))
    peer_wait = PeerWait((4, 5), 1, None, lambda: "rank 7 has run out of luck")
    with pytest.raises(PeerError, match=r"^rank 7 has run out of luck$") as caught:
        ShmGroup.create(store, 1, 2, key="messenger", timeout=timedelta(minutes=10), peer_wait=peer_wait)
    assert caught.value.missing == (0,)


def test_ranks_that_disagree_about_the_group() -> None:
    store = HashStore()

    def body(rank: int) -> None:
        with pytest.raises((ValueError, PeerError), match="`block_nbytes` is 8192 here and 4096 on rank 0"):
            ShmGroup.create(store, rank, 2, key="k", timeout=timedelta(seconds=20), block_nbytes=4096 * (1 + rank))

    run_ranks(2, body)
