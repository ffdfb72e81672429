"""Law: every wait ends, whatever is gone, and the error says what cannot be reached and who was heard of."""

import gc
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from gradwire.comms.bootstrap import failure_reporter, probe
from gradwire.comms.bootstrap.addresses import listener
from gradwire.comms.bootstrap.compat import PrefixStore, TCPStore
from gradwire.comms.bootstrap.probe import ProbeServer
from gradwire.comms.bootstrap.store import PollingStore, StoreUnreachableError
from gradwire.comms.bootstrap.threads import BackgroundThread
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from support.frozen_store import Link, store_behind_a_link
from support.threads import run_ranks

CPU = torch.device("cpu")


def seconds_of(body: Callable[[], object]) -> float:
    began = time.monotonic()
    body()
    return time.monotonic() - began


@pytest.mark.parametrize("question", ["get", "add", "check", "compare_set", "multi_get", "wait"])
def test_every_question_ends_where_the_link_is_cut_and_is_answered_when_it_is_back(question: str) -> None:
    arguments = {
        "add": ("n", 1),
        "check": (["a"],),
        "compare_set": ("a", "1", "2"),
        "multi_get": (["a"],),
        "wait": (["a"],),
    }
    with store_behind_a_link() as link:
        store = PollingStore(PrefixStore("test", link.client()), timedelta(seconds=0.2))
        store.set("a", "1")
        link.cut()
        with pytest.raises(StoreUnreachableError, match="cannot be reached: no answer"):
            getattr(store, question)(*arguments.get(question, ("a",)))
        assert not store.is_answering and store.silent_seconds >= 0.2
        store.give_up_if_silent(timedelta(seconds=60))
        with pytest.raises(StoreUnreachableError, match=r"no answer to `\w+ .*within"):
            store.below("b").give_up_if_silent(timedelta(seconds=0.1))  # at once: it has been silent for so long
        other = store.below("b").within(timedelta(seconds=0.1))
        with pytest.raises(StoreUnreachableError):
            other.check(["c"])
        link.mend()
        assert store.within(timedelta(seconds=20)).get("a") in (b"1", b"2")
        assert store.is_answering
        store.give_up_if_silent(timedelta(0))


class Garbage:
    """A circle whose end runs a call, in whichever thread collects it."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.itself = self
        self.call = call

    def __del__(self) -> None:
        self.call()


@pytest.mark.parametrize("where", ["the thread that asks", "the start of that thread"])
def test_garbage_that_asks_is_answered_wherever_it_is_collected(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = PollingStore(server, timedelta(seconds=10))
    heard: list[bytes] = []
    server.set("a", "1")
    Garbage(lambda: heard.append(store.get("a")))
    if where == "the thread that asks":
        store._ask("collect", gc.collect)
    else:
        start = BackgroundThread.start
        monkeypatch.setattr(BackgroundThread, "start", lambda thread: (gc.collect(), start(thread)))
        store.set("b", "2")
    assert heard == [b"1"]


def test_garbage_that_closes_a_probe_server_may_be_collected_while_one_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProbeServer, "_shared", None)
    old = ProbeServer.open()
    monkeypatch.setattr(ProbeServer, "_shared", None)
    Garbage(old.close)
    opened: list[ProbeServer] = []

    def collecting(backlog: int) -> socket.socket:
        gc.collect()
        return listener(backlog)

    monkeypatch.setattr(probe, "listener", collecting)
    opening = threading.Thread(target=lambda: opened.append(ProbeServer.open()), daemon=True)
    opening.start()
    opening.join(10.0)
    assert len(opened) == 1 and old._closed
    opened[0].close()


def test_a_server_that_is_gone_is_asked_once() -> None:
    with store_behind_a_link() as link:
        store = PollingStore(link.client(), timedelta(seconds=20))
        store.set("a", "1")
        link.close()
        for _ in range(2):
            with pytest.raises(StoreUnreachableError, match="is gone"):
                store.check(["a"])


def test_all_that_share_a_connection_ask_on_one_thread() -> None:
    # Nobody but C++ keeps the server's own object, as after init_process_group().
    shared = PrefixStore("job", TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    stores = [PollingStore(PrefixStore(f"model {number}", shared), timedelta(seconds=20)) for number in range(4)]
    before = set(threading.enumerate())
    assert [store.add("asked", 1) for store in (*stores, stores[0].below("deeper"))] == [1] * 5
    assert len(set(threading.enumerate()) - before) == 1


def test_a_thread_that_waits_keeps_no_other_from_asking() -> None:
    with store_behind_a_link() as link:
        store = PollingStore(link.client(), timedelta(seconds=20))
        waiting = threading.Thread(target=store.wait, args=(["a"],))
        waiting.start()
        store.set("a", "1")
        waiting.join(20)
        assert not waiting.is_alive()


def ranks_on(link: Link, nodes: str, body: Callable[[Communicator], str]) -> list[str]:
    """What `body` returns on the ranks of some nodes, each with its own connection to the store."""

    def run(rank: int) -> str:
        config = Config(hostname=nodes[rank], timeout=timedelta(seconds=2))
        communicator = Communicator(link.client(), rank, len(nodes), CPU, config, name="test")
        try:
            communicator.all_reduce(torch.ones(10)).wait()
            return body(communicator)
        finally:
            communicator.close()

    return run_ranks(len(nodes), run)


def error_of(communicator: Communicator) -> str:
    with pytest.raises(RuntimeError) as caught:
        communicator.all_reduce(torch.ones(10)).wait()
    return str(caught.value)


@pytest.mark.parametrize("nodes", ["aab", "abc"])
def test_a_cut_off_store_is_named_with_the_ranks_that_answer(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 does not come to a collective, and the store cannot say whether it lives: its own port does."""
    monkeypatch.setattr(failure_reporter, "STORE_PATIENCE", timedelta(seconds=0.5))
    met, done = threading.Barrier(3), threading.Barrier(3)

    with store_behind_a_link() as link:

        def body(communicator: Communicator) -> str:
            if met.wait(20) == 0:
                link.cut()
            if communicator.rank == 2:
                done.wait(20)  # it lives until both others have called it
                return ""
            try:
                return error_of(communicator)
            finally:
                done.wait(20)

        for text in ranks_on(link, nodes, body)[:2]:
            assert "the store at 127.0.0.1:" in text and "cannot be reached" in text
            assert "answer" in text and "is missing" not in text


def test_rank_0_is_named_where_the_store_is_gone_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    met, done = threading.Barrier(3), threading.Barrier(2)
    with store_behind_a_link() as link:

        def body(communicator: Communicator) -> str:
            met.wait(20)
            if communicator.rank == 0:
                link.close()
                communicator.close()
                return ""
            try:
                return error_of(communicator)
            finally:
                done.wait(20)  # who has ended is missing, too

        for text in ranks_on(link, "aab", body)[1:]:
            assert "rank 0 of 3 is missing" in text and "the store at" in text


def test_a_start_without_a_store_ends_at_its_time_out() -> None:
    with store_behind_a_link() as link:
        client = link.client()
        link.cut()
        config = Config(hostname="a", timeout=timedelta(seconds=0.5))
        with pytest.raises(StoreUnreachableError, match="rank 1 of 2 could not finish its start-up: the store at"):
            Communicator(client, 1, 2, CPU, config, name="test")
        link.mend()


def test_a_link_that_returns_ends_nothing() -> None:
    """Neither a start nor a step fails where the store is away for less than the time-out."""
    met = threading.Barrier(2)
    with store_behind_a_link() as link:

        def body(communicator: Communicator) -> str:
            if met.wait(20) == 0:
                link.cut()
                threading.Timer(1.0, link.mend).start()
            total = communicator.all_reduce(torch.ones(10)).wait()
            return str(total[0].item())

        assert ranks_on(link, "ab", body) == ["2.0", "2.0"]
