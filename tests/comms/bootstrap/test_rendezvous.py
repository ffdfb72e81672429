"""Laws of a start: everybody reads what everybody has said, and a start that fails names who is missing."""

import json
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from datetime import timedelta

import pytest
import torch

from gradwire.comms.bootstrap import probe, rendezvous
from gradwire.comms.bootstrap.addresses import listener
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.bootstrap.kernel import own_kernel
from gradwire.comms.bootstrap.placement import PeerInfo
from gradwire.comms.bootstrap.probe import PeerTable, ProbeServer
from gradwire.comms.bootstrap.rendezvous import BLOCK, PeerInfos, exchange
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.config import VERSION, Config
from gradwire.comms.errors import PeerError
from gradwire.topology.fabric import fabric_of
from gradwire.topology.host_summary import Hardware
from gradwire.topology.presets import dgx_h100
from support.threads import run_ranks

SECONDS = timedelta(seconds=20)


def saying(rank: int, size: int) -> PeerInfo:
    """What a rank says, different from others in most things and alike in some.

    Without a port: one that nobody serves is probed after a second, and its rank then counts as ended.
    """
    own = PeerInfo.here(rank, size, Config(hostname=f"r/{rank % 2}/n{rank // 3}"), torch.device("cpu"))
    facts = Hardware(None, 12.5e9, f"mlx5_{rank % 8}", fastest=("mlx5_0", "mlx5_1"), nics=8)
    if rank % 5 == 0:
        facts = replace(facts, fabric=fabric_of(dgx_h100()))
    return replace(own, hardware=facts, port=0, addresses=(f"10.0.0.{rank // 3}", "fd00::1"))


@pytest.mark.parametrize("size", [1, 3, BLOCK + 2])
def test_what_is_published_is_what_everybody_reads(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous._Rank, "_ended", lambda self, ranks: [])  # nobody serves these ports
    store = HashStore()
    ranks = [replace(saying(rank, size), port=30_000 + 7 * rank) for rank in range(size)]
    found = run_ranks(size, lambda rank: exchange(store, ranks[rank], SECONDS))
    assert all(list(one) == ranks for one in found)
    assert len({one.generation for one in found}) == 1


@pytest.mark.parametrize("size", [1, 2, 300])
def test_a_table_is_unpacked_as_it_was_packed(size: int) -> None:
    own = saying(0, size)
    said = [replace(own, rank=rank, port=rank) for rank in range(size)]
    table = PeerInfos.of(said, "start")
    packed = table.pack()
    found = PeerInfos.unpack("start", packed)
    assert list(found) == said and found[-1] == said[-1] and found[:2] == said[:2]
    assert found.pack() == packed


def test_a_restart_takes_nothing_of_the_start_before() -> None:
    """Rank 1 comes late to the second start, and finds what the first one has left."""
    store = HashStore()

    def join(rank: int, wait_seconds: float) -> PeerInfos:
        time.sleep(wait_seconds * rank)
        return exchange(store, replace(saying(rank, 3), port=int(wait_seconds * 1000)), SECONDS)

    first = run_ranks(3, lambda rank: join(rank, 0.0))
    second = run_ranks(3, lambda rank: join(rank, 0.05))
    assert len({found.generation for found in first}) == len({found.generation for found in second}) == 1
    assert first[0].generation != second[0].generation
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

    def join(rank: int) -> PeerInfos:
        time.sleep(0.0 if rank else 0.1)
        return exchange(store, saying(rank, 3), SECONDS)

    assert len({found.generation for found in run_ranks(3, join)}) == 1


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


@pytest.mark.parametrize("late", [0, 1, 2])
def test_who_is_late_is_named_long_before_the_time_out(monkeypatch: pytest.MonkeyPatch, late: int) -> None:
    """Law: by a rank that waits, which goes on waiting."""
    store, said, lines = HashStore(), threading.Event(), []

    def warn(words: str, *values: object) -> None:
        lines.append(words % values)
        said.set()

    monkeypatch.setattr(rendezvous, "LATE_SECONDS", 0.2)
    monkeypatch.setattr(rendezvous.log, "warning", warn)

    def join(rank: int) -> PeerInfos:
        assert rank != late or said.wait(60)
        return exchange(store, saying(rank, 3), SECONDS)

    run_ranks(3, join)
    named = [line.removeprefix("rank ").partition(" of 3 has not joined after ")[0].split(", ") for line in lines]
    assert any(str(late) in ranks for ranks in named), lines


def test_without_rank_0_it_is_named() -> None:
    with pytest.raises(RuntimeError, match="rank 0 did not join"):
        exchange(HashStore(), saying(1, 2), timedelta(seconds=0.1))


def ended(rank: int, size: int) -> PeerInfo:
    """What a rank has said whose process has ended since: nobody listens at its port."""
    with closing(listener(1)) as gone:
        return replace(saying(rank, size), port=gone.getsockname()[1], kernel=own_kernel())


def test_rank_0_that_ends_before_all_have_come_is_named_by_the_others() -> None:
    store, size = HashStore(), 4
    first = ended(0, size)
    alone = rendezvous._Leader(PollingStore(store, SECONDS), first, SECONDS, None, None)
    alone._announce("start")
    alone._publish("start")

    def join(rank: int) -> str:
        if rank in (0, 3):
            return ""
        with pytest.raises(PeerError) as caught:
            exchange(store, saying(rank, size), timedelta(minutes=10))
        assert caught.value.missing == (0,)
        return str(caught.value)

    began = time.monotonic()
    assert all("rank 0 has ended before all 4 ranks" in text for text in run_ranks(size, join) if text)
    assert time.monotonic() - began < SECONDS.total_seconds()


def test_a_packer_that_has_ended_is_named() -> None:
    """Its word is there, and what its block has said will not be."""
    store, size = HashStore(), BLOCK + 2
    said = [ended(rank, size) if rank == BLOCK else saying(rank, size) for rank in range(size)]

    def join(rank: int) -> str:
        with pytest.raises(PeerError) as caught:
            if rank == BLOCK:
                gone = rendezvous._Follower(PollingStore(store, SECONDS), said[rank], SECONDS, None, None)
                gone._packed, gone._pack_block = True, lambda: None  # type: ignore[method-assign]
                gone.run()
            exchange(store, said[rank], timedelta(minutes=10))
        return str(caught.value)

    assert all(f"rank {BLOCK} has ended before" in text for text in run_ranks(size, join))


def test_a_rank_that_has_met_the_others_before_and_ended_is_named() -> None:
    """It has not come to this start; those that it has met know where it was."""
    store, size = HashStore(), 3

    def join(rank: int) -> str:
        if rank == 2:
            return ""
        own = saying(rank, size)
        with pytest.raises(PeerError, match="rank 2 has ended before") as caught:
            exchange(store, own, timedelta(minutes=10), None, lambda ranks: [2] if 2 in ranks else [])
        return str(caught.value)

    run_ranks(size, join)


def test_a_rank_that_is_waited_for_answers_probes_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a rank that is there is never taken for one that has ended, however long another one takes."""
    monkeypatch.setattr(probe, "FIRST_POLL_SECONDS", 0.01)
    store, size = HashStore(), 3
    looked: list[list[int]] = []

    def look(directory: PeerTable, ranks: Sequence[int]) -> list[int]:
        looked.append([rank for rank, outcome in directory.probe(ranks).items() if outcome == probe.EXITED])
        return looked[-1]

    monkeypatch.setattr(PeerTable, "exited", look)
    servers = [ProbeServer.open() for _ in range(size)]  # one for all threads of this process

    def join(rank: int) -> PeerInfos:
        time.sleep(2.0 * (rank == 2))
        own = replace(saying(rank, size), port=servers[rank].port, addresses=("127.0.0.1",), kernel=own_kernel())
        return exchange(store, own, SECONDS, servers[rank])

    found = run_ranks(size, join)
    for each in servers:
        each.close()
    assert looked and not any(looked)
    assert len({one.generation for one in found}) == 1


def test_ranks_give_their_nodes_rates_all_or_none() -> None:
    store = HashStore()

    def run(rank: int) -> str:
        config = Config(hostname=f"n{rank}", nic_bytes_per_second=1e6 if rank else None)
        with pytest.raises(ValueError, match="`nic_bytes_per_second` is") as caught:
            exchange(store, PeerInfo.here(rank, 2, config, torch.device("cpu")), timedelta(seconds=10))
        return str(caught.value)

    assert all("'a number' on rank 1 and None on rank 0" in text for text in run_ranks(2, run))


@pytest.mark.parametrize(("first", "second"), [("0.1", "0.2"), ("0.2", None), (None, "0.2")])
def test_ranks_of_different_versions_do_not_start(first: str | None, second: str | None) -> None:
    """Law: all ranks hear of both; None is of a version that publishes and compares none."""
    store, versions = HashStore(), (first, second, first)

    def run(rank: int) -> str:
        own, version = saying(rank, 3), versions[rank]
        others = {name: value for name, value in own.shared.items() if name != VERSION}
        with pytest.raises(ValueError, match="install the same version on all nodes") as caught:
            exchange(store, replace(own, shared=others if version is None else {VERSION: version} | others), SECONDS)
        return str(caught.value)

    texts = run_ranks(3, run)
    assert len(set(texts)) == 1
    assert texts[0].startswith(
        f"`gradwire` is {second or 'of an earlier version'} on rank 1 and {first or 'of an earlier version'} on rank 0"
    )


def test_a_rank_that_starts_after_a_refusal_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcome must not look like one that an earlier start has left."""
    monkeypatch.setattr(rendezvous, "LINGER_SECONDS", SECONDS.total_seconds())
    store = HashStore()
    reader = PollingStore(store, SECONDS)

    def is_refused() -> bool:
        return reader.check(["round"]) and reader.check([f"{json.loads(reader.read('round'))['generation']}/refused"])

    def run(rank: int) -> str:
        while rank == 2 and not is_refused():
            time.sleep(0.01)
        time.sleep(0.1 * (rank == 2))  # rank 0 has seen it, too
        own = saying(rank, 3)
        with pytest.raises(ValueError, match=f"`{VERSION}` is 0.2 on rank 1") as caught:
            exchange(store, replace(own, shared={**own.shared, VERSION: "0.2"} if rank == 1 else own.shared), SECONDS)
        return str(caught.value)

    assert len(set(run_ranks(3, run))) == 1


def test_a_rank_whose_info_cannot_be_read_is_taken_for_one_of_another_version() -> None:
    """It says more than this version knows; the others are told so before the time-out."""
    store = HashStore()

    def run(rank: int) -> str:
        follower = rendezvous._Follower(PollingStore(store, SECONDS), saying(2, 3), SECONDS, None, None)

        def publish(generation: str) -> None:
            follower._generation, follower._packed = generation, True
            store.set(f"{generation}/rank/2", json.dumps(asdict(saying(2, 3)) | {"hue": 3}))

        follower._publish = publish  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="install the same version on all nodes") as caught:
            follower.run() if rank == 2 else exchange(store, saying(rank, 3), SECONDS)
        return str(caught.value)

    texts = run_ranks(3, run)
    assert len(set(texts)) == 1 and texts[0].startswith("rank 0, of gradwire ")
