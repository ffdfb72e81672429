"""Law: exchanges over gloo move the same elements whether they go through one group or through two."""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import HashStore, PrefixStore, TorchGroup, make_gloo
from gradwire.comms.bootstrap.probe import PeerWait
from gradwire.comms.errors import PeerError
from gradwire.comms.run.programs import issue_together
from gradwire.comms.transport import torch_group, works
from gradwire.comms.transport.gloo_sockets import connections, listeners
from gradwire.comms.transport.torch_group import LARGE_NBYTES, GlooTransport, connect_gloo
from gradwire.compressors.base import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, Collective
from support.nccl import NoAllocation
from support.threads import run_ranks

SMALL, LARGE = 1000, LARGE_NBYTES // 4
"""Elements of a message."""


def on_transports(size: int, body: Callable[[GlooTransport], object]) -> list[tuple[object, list[str]]]:
    """What `body(transport)` returns on each rank, and the names of the groups that it connected."""
    store = HashStore()

    def run(rank: int) -> tuple[object, list[str]]:
        names: list[str] = []

        def connect(name: str) -> TorchGroup:
            names.append(name)
            return make_gloo(PrefixStore(name, store), rank, size, timedelta(seconds=30), ("lo",))

        return body(GlooTransport(connect, rank, size)), names

    return run_ranks(size, run)


def contribution(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("numel", [SMALL, LARGE, LARGE + 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_to_all_gives_everybody_what_was_meant_for_him(size: int, numel: int) -> None:
    def body(transport: GlooTransport) -> Tensor:
        output = torch.empty(size * numel)
        transport.all_to_all(output, contribution(transport.rank, size * numel)).wait()
        return output

    for rank, (output, names) in enumerate(on_transports(size, body)):
        expected = torch.cat([contribution(peer, size * numel).chunk(size)[rank] for peer in range(size)])
        assert isinstance(output, Tensor)
        assert output.equal(expected)
        assert len(names) == (2 if numel >= LARGE and size > 1 else 1)


@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("size", [2, 3])
def test_all_gather_gives_everybody_everything(size: int, numel: int) -> None:
    def body(transport: GlooTransport) -> Tensor:
        output, own = torch.empty(size, numel), contribution(transport.rank, numel)
        with NoAllocation() if size == 2 and numel == LARGE else nullcontext():  # torch's own takes a copy of it all
            transport.all_gather(output, own).wait()
        return output

    expected = torch.stack([contribution(rank, numel) for rank in range(size)])
    assert all(isinstance(output, Tensor) and output.equal(expected) for output, _ in on_transports(size, body))


@pytest.mark.parametrize(("size", "numel", "fits"), [(2, 0, True), (2, SMALL, True), (2, LARGE, False), (3, 9, False)])
def test_small_collectives_of_two_ranks_travel_together_and_give_what_each_gives_alone(
    size: int, numel: int, fits: bool
) -> None:
    def asked(rank: int) -> list[Collective]:
        payload = contribution(rank, size * numel).to(torch.int8).view(size, numel)
        own = contribution(rank, SMALL).double()
        return [
            Collective(ALL_TO_ALL, (torch.empty_like(payload), payload)),
            Collective(ALL_REDUCE, (contribution(rank, SMALL - 1),)),
            Collective(ALL_GATHER, (own.new_empty(size * SMALL), own)),
        ]

    def body(transport: GlooTransport) -> bool:
        alone, together = asked(transport.rank), asked(transport.rank)
        for each in alone:
            issue_together(transport, [each]).wait()
        work = transport.issue_together(together)
        if work is None:
            return False
        work.wait()
        work.wait()  # again: it changes nothing
        assert all(one.tensors[0].equal(other.tensors[0]) for one, other in zip(alone, together, strict=True))
        assert alone[1].tensors[0].equal(contribution(0, SMALL - 1) + contribution(1, SMALL - 1))
        return True

    assert [went for went, _ in on_transports(size, body)] == [fits] * size


@pytest.mark.parametrize("sizes", [(SMALL, SMALL), (LARGE, 0), (LARGE + 1, SMALL, 0), (0, SMALL, LARGE, LARGE)])
def test_slices_of_any_size_are_summed_in_rank_order_by_their_owners(sizes: tuple[int, ...]) -> None:
    bounds = [0, *accumulate(sizes)]

    def body(transport: GlooTransport) -> Tensor:
        tensor = contribution(transport.rank, sum(sizes))
        transport.reduce_scatter(tensor, bounds).wait()
        return tensor[bounds[transport.rank] : bounds[transport.rank + 1]]

    total = contribution(0, sum(sizes)).clone()
    for rank in range(1, len(sizes)):
        total += contribution(rank, sum(sizes))
    for rank, (own, _) in enumerate(on_transports(len(sizes), body)):
        assert isinstance(own, Tensor)
        assert own.equal(total[bounds[rank] : bounds[rank + 1]])


def test_exchanges_of_both_kinds_can_be_on_their_way_together() -> None:
    def body(transport: GlooTransport) -> bool:
        sources = [
            contribution(transport.rank + 10 * index, 2 * numel) for index, numel in enumerate([LARGE, SMALL] * 3)
        ]
        outputs = [torch.empty_like(source) for source in sources]
        for work in [transport.all_to_all(*pair) for pair in zip(outputs, sources, strict=True)]:
            work.wait()
        other = 1 - transport.rank
        return all(
            output.chunk(2)[other].equal(contribution(other + 10 * index, output.numel()).chunk(2)[transport.rank])
            for index, output in enumerate(outputs)
        )

    assert [right for right, _ in on_transports(2, body)] == [True, True]


@pytest.mark.parametrize("reason", [None, "rank 2 gave up"])
def test_nobody_waits_for_a_rank_that_has_left_its_address_and_died(
    monkeypatch: pytest.MonkeyPatch, reason: str | None
) -> None:
    """Law: no longer than the time-out, or until somebody has given up; gloo itself waits five time-outs."""
    timeout, over = timedelta(seconds=0 if reason is None else 60), threading.Event()
    monkeypatch.setattr(torch_group, "make_gloo", lambda *arguments: over.wait())
    with pytest.raises(RuntimeError, match=reason or "did not connect within `timeout`"):
        connect_gloo(HashStore(), 0, 2, timeout, lambda: reason, "lo")
    over.set()


def test_nobody_waits_for_a_rank_that_has_ended_before_it_had_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: it is named as soon as its kernel says so, whatever the time-out."""
    over = threading.Event()
    monkeypatch.setattr(torch_group, "make_gloo", lambda *arguments: over.wait())

    def peer_wait() -> PeerWait:
        return PeerWait((4, 7, 9), 1, lambda ranks: [each for each in ranks if each == 4])

    with pytest.raises(PeerError, match="rank 4 has ended before it had connected") as caught:
        connect_gloo(HashStore(), 1, 3, timedelta(minutes=10), None, "lo", peer_wait=peer_wait)
    assert caught.value.missing == ()  # indices would be taken for those of the node's ranks
    over.set()


def test_who_looks_at_sockets_leaves_their_mode_alone() -> None:
    """It is shared with whoever else has a descriptor of the socket: gloo's threads wait in theirs."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as caller:
        socket.setdefaulttimeout(5.0)
        try:
            found = {each.descriptor for each in listeners()}
            assert not {each.descriptor for each in connections()} & {server.fileno(), caller.fileno()}
        finally:
            socket.setdefaulttimeout(None)
        assert server.fileno() in found and caller.fileno() not in found
        assert os.get_blocking(server.fileno()) and os.get_blocking(caller.fileno())


def test_who_has_heard_the_alarm_and_ended_before_it_had_connected_is_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Law: the reason is that of the rank that gave up first."""
    over, heard = threading.Event(), threading.Event()
    monkeypatch.setattr(torch_group, "make_gloo", lambda *arguments: over.wait())

    def ended(ranks: Sequence[int]) -> list[int]:
        heard.set()  # between this rank's last look for an alarm and its look for ends
        return list(ranks)

    def peer_wait() -> PeerWait:
        return PeerWait((4, 7), 1, ended, lambda: "rank 9 has run out of luck" if heard.is_set() else None)

    with pytest.raises(PeerError, match=r"^rank 9 has run out of luck$"):
        connect_gloo(HashStore(), 1, 2, timedelta(minutes=10), None, "lo", peer_wait=peer_wait)
    over.set()


@pytest.mark.parametrize("drained", [False, True])
def test_no_late_message_reaches_a_tensor_after_an_abandoned_wait(
    drained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elastic training restores gradients in place after it has left a wait: gloo must have finished with them."""
    monkeypatch.setattr(works, "SLICE", timedelta(milliseconds=10))
    store, left, sent = HashStore(), threading.Event(), threading.Event()

    def run(rank: int) -> bool:
        def connect(name: str) -> TorchGroup:
            return make_gloo(PrefixStore(name, store), rank, 2, timedelta(seconds=10), ("lo",))

        transport = GlooTransport(connect, rank, 2, lambda: "rank 1 has left" if rank == 0 else None)
        tensor = torch.full((SMALL,), 5.0)
        if rank == 1:
            assert left.wait(20)
            try:
                transport.all_reduce(tensor).wait()
            except RuntimeError:
                assert drained
            sent.set()
            return True
        with pytest.raises(PeerError, match="rank 1 has left"):
            transport.all_reduce(tensor).wait()
        if drained:
            transport.disconnect()
            assert transport.drain(20.0)
        tensor.fill_(7.0)
        left.set()
        assert sent.wait(20)
        # Without a drain gloo still adds what arrives: that shows the fault, so wait until it has happened.
        if not drained:
            assert transport.drain(20.0)
        return bool((tensor == 7.0).all())

    assert run_ranks(2, run) == [drained, True]
