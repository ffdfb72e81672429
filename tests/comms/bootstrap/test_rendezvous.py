"""Laws of a start: everybody reads what everybody has said, and a start that fails names who is missing."""

import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.bootstrap.hardware import Hardware
from gradwire.comms.bootstrap.placement import Presence
from gradwire.comms.bootstrap.rendezvous import BLOCK, Presences, exchange
from gradwire.comms.config import Config
from gradwire.topology.fabric import fabric_of
from gradwire.topology.presets import dgx_h100
from support.threads import run_ranks

SECONDS = timedelta(seconds=20)


def saying(rank: int, size: int) -> Presence:
    """What a rank says, different from others in most things and alike in some."""
    own = Presence.here(
        rank, size, Config(hostname=f"n{rank // 3}", location=("r", str(rank % 2))), torch.device("cpu")
    )
    facts = Hardware(None, 12.5e9, f"mlx5_{rank % 8}", fastest=("mlx5_0", "mlx5_1"), nics=8)
    if rank % 5 == 0:
        facts = replace(facts, fabric=fabric_of(dgx_h100()))
    return replace(own, hardware=facts, port=30_000 + 7 * rank, addresses=(f"10.0.0.{rank // 3}", "fd00::1"))


@pytest.mark.parametrize("size", [1, 3, BLOCK + 2])
def test_what_is_published_is_what_everybody_reads(size: int) -> None:
    store = HashStore()
    ranks = [saying(rank, size) for rank in range(size)]
    found = run_ranks(size, lambda rank: exchange(store, ranks[rank], SECONDS))
    assert all(list(one) == ranks for one in found)
    assert len({one.start for one in found}) == 1


@pytest.mark.parametrize("size", [1, 2, 300])
def test_a_table_is_unpacked_as_it_was_packed(size: int) -> None:
    own = saying(0, size)
    said = [replace(own, rank=rank, port=rank) for rank in range(size)]
    table = Presences.of(said, "start")
    packed = table.pack()
    found = Presences.unpack("start", packed)
    assert list(found) == said and found[-1] == said[-1] and found[:2] == said[:2]
    assert found.pack() == packed


def test_a_restart_takes_nothing_of_the_start_before() -> None:
    """Rank 1 comes late to the second start, and finds what the first one has left."""
    store = HashStore()

    def join(rank: int, wait_seconds: float) -> Presences:
        time.sleep(wait_seconds * rank)
        return exchange(store, replace(saying(rank, 3), port=int(wait_seconds * 1000)), SECONDS)

    first = run_ranks(3, lambda rank: join(rank, 0.0))
    second = run_ranks(3, lambda rank: join(rank, 0.05))
    assert len({found.start for found in first}) == len({found.start for found in second}) == 1
    assert first[0].start != second[0].start
    assert {said.port for found in second for said in found} == {50}


def test_a_rank_that_follows_an_earlier_start_follows_the_new_one() -> None:
    """The start before has failed half-way: its name stands in the store, without an outcome."""
    store = HashStore()

    def alone(rank: int) -> str:
        with pytest.raises(RuntimeError, match="did not join"):
            exchange(store, saying(0, 3), timedelta(seconds=0.1))
        return ""

    alone(0)
    word = store.get("round").decode()
    store.set("round", word.replace(word[word.index('"outcome"') :], '"outcome": null}'))

    def join(rank: int) -> Presences:
        time.sleep(0.0 if rank else 0.1)
        return exchange(store, saying(rank, 3), SECONDS)

    assert len({found.start for found in run_ranks(3, join)}) == 1


def test_ranks_that_do_not_come_are_named_on_all_others() -> None:
    """One of them would have packed the words of its block."""
    store, size, missing = HashStore(), BLOCK + 2, {5, BLOCK}
    said = [saying(rank, size) for rank in range(size)]

    def join(rank: int) -> str:
        if rank in missing:
            return ""
        with pytest.raises(RuntimeError) as caught:
            exchange(store, said[rank], timedelta(seconds=3))
        return str(caught.value)

    assert all(f"rank 5, {BLOCK} did not join" in text for text in run_ranks(size, join) if text)


def test_without_rank_0_it_is_named() -> None:
    with pytest.raises(RuntimeError, match="rank 0 did not join"):
        exchange(HashStore(), saying(1, 2), timedelta(seconds=0.1))


def test_ranks_give_their_nodes_rates_all_or_none() -> None:
    store = HashStore()

    def run(rank: int) -> str:
        config = Config(hostname=f"n{rank}", nic_bytes_per_second=1e6 if rank else None)
        with pytest.raises(ValueError, match="`nic_bytes_per_second` is") as caught:
            exchange(store, Presence.here(rank, 2, config, torch.device("cpu")), timedelta(seconds=10))
        return str(caught.value)

    assert all("1000000.0" in text and "None" in text for text in run_ranks(2, run))
