"""Several network cards are used where they carry more than gloo's one, and all ranks come to the same answer."""

from datetime import timedelta

import pytest
import torch

from gradwire.comms import communicator as communicator_module
from gradwire.comms.autotune.card_trial import try_cards
from gradwire.comms.bootstrap.cards import Cards
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import ALL_NICS, Config
from gradwire.comms.links import quick_probe as probe_module
from gradwire.comms.transport.torch_group import LARGE_NBYTES, GlooTransport
from support.threads import run_ranks


def tried(
    hosts: str, monkeypatch: pytest.MonkeyPatch, gain: float, nics: str = ALL_NICS
) -> list[tuple[bool, list[int], str, bytes]]:
    """Of each rank: whether all cards are used, what each sent of a sum, the report's line, and the sum's bits.

    Args:
        hosts: A letter for each rank.
        monkeypatch: Times swaps as if all cards were so many times as fast as gloo's one.
        gain: See above.
        nics: The option.
    """
    size, real = len(hosts), probe_module.swaps

    def cards(presences: object, rank: int, config: Config) -> Cards:
        addresses = {other: tuple(f"127.{card + 1}.0.{other + 1}" for card in range(2)) for other in range(size)}
        found = Cards(["lo", "lo"], addresses, rank)
        found.are_used = config.nics != ALL_NICS
        return found

    def swaps(rail: GlooTransport, other: int, nbytes: int, saved_nbytes: int) -> tuple[float, float]:
        real(rail, other, nbytes, saved_nbytes)
        return (1e-2 if rail.over_cards is None else 1e-2 / gain), 1e-4

    monkeypatch.setattr(communicator_module, "_cards", cards)
    monkeypatch.setattr(probe_module, "swaps", swaps)
    store = HashStore()

    def run(rank: int) -> tuple[bool, list[int], str, bytes]:
        config = Config(hostname=hosts[rank], timeout=timedelta(seconds=60), nics=nics)
        communicator = Communicator(store, rank, size, torch.device("cpu"), config, name="test")
        try:
            assert communicator.cards is not None
            try_cards(communicator)
            before = [each.sent_nbytes for each in communicator.cards.totals()]
            drawn = torch.randn(LARGE_NBYTES, generator=torch.Generator().manual_seed(rank))
            communicator.all_reduce(drawn).wait()
            after = [each.sent_nbytes for each in communicator.cards.totals()]
            sent = [now - then for now, then in zip(after, before, strict=True)]
            line = next(each for each in communicator.report().links if each.startswith("network cards"))
            return communicator.cards.are_used, sent, line, drawn.numpy().tobytes()
        finally:
            communicator.close()

    found = run_ranks(size, run)
    assert all(isinstance(each, tuple) for each in found)
    return found


@pytest.mark.parametrize("hosts", ["ab", "aabb", "abc"])
def test_what_is_faster_is_used_on_all_ranks_with_the_same_bits(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        faster = tried(hosts, patch, gain=1.5)
    with monkeypatch.context() as patch:
        slower = tried(hosts, patch, gain=0.9)
    assert [used for used, *_ in faster] == [True] * len(hosts) and [used for used, *_ in slower] == [False] * len(
        hosts
    )
    assert all(sum(sent) > 0 for _, sent, _, _ in faster)
    assert all(sum(sent) == 0 and "gloo's one was as fast alone" in line for _, sent, line, _ in slower)
    assert len({bits for *_, bits in (*faster, *slower)}) == 1


def test_cards_that_are_named_are_used_whatever_the_trial_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [used for used, *_ in tried("ab", monkeypatch, gain=0.5, nics="eth0,eth1")] == [True] * 2
