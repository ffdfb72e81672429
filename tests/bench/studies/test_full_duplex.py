"""The comparison of one and of two gloo groups: what a rank does, and the tables."""

import pytest

from gradwire.bench.configuration import Configuration
from gradwire.bench.emulation.fork import ForkedRank
from gradwire.bench.studies.exchanges import full_duplex
from gradwire.comms.bootstrap.compat import HashStore, make_gloo
from gradwire.comms.transport import torch_group
from support.threads import run_ranks


def place(rank: int) -> ForkedRank:
    return ForkedRank(rank, 2, rank, (1, 1), "127.0.0.1", 0, "lo")


@pytest.mark.parametrize("large_nbytes", [0, full_duplex.NEVER])
def test_an_exchange_takes_one_group_or_two(large_nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_group, "LARGE_NBYTES", torch_group.LARGE_NBYTES)  # put back at the end
    made = list[str]()
    connect = make_gloo

    def counted(store: object, *rest: object) -> object:
        made.append("group")
        return connect(store, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(torch_group, "make_gloo", counted)
    store = HashStore()

    def body(rank: int) -> None:
        full_duplex.exchange(place(rank), store, "exchange", large_nbytes).step(0)

    run_ranks(2, body)
    assert len(made) == 2 * (2 if large_nbytes == 0 else 1)


def test_every_order_of_sums_makes_a_configuration() -> None:
    store = HashStore()

    def body(rank: int) -> Configuration:
        one = full_duplex.summed(place(rank), store, "flat", 2, "two groups", torch_group.LARGE_NBYTES)
        one.step(0)
        return one

    assert [one.name for one in run_ranks(2, body)] == ["flat, two groups, 2"] * 2


def test_the_tables_hold_every_figure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"one group": 0.172, "two groups": 0.088} | {
        f"{plan}, {order}, {chunks}": 0.5 + chunks / 1000
        for plan in ("hierarchical", "flat")
        for order in ("ring", "one group", "two groups")
        for chunks in full_duplex.CHUNKS
    }
    monkeypatch.setattr(full_duplex, "measure", lambda case, nic, what: figures)
    assert full_duplex.main(["2x1"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("2x1", "84", "172", "88"))
    assert full_duplex.main(["4x2", "--sums"]) == 0
    out = capsys.readouterr().out
    assert "flat, two groups" in out and all(str(500 + chunks) in out for chunks in full_duplex.CHUNKS)


def test_an_unknown_cluster_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        full_duplex.main(["7x7"])
    assert "`CASE` is '7x7'" in capsys.readouterr().err
