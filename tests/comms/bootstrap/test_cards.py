"""Which network cards of a host are several, and of all hosts: the same answer on every rank."""

import random
import socket
from pathlib import Path

import pytest

from gradwire.comms.bootstrap import cards as module
from gradwire.comms.bootstrap.addresses import HostAddress, has_several_networks, host_addresses
from gradwire.comms.bootstrap.cards import Cards, is_running, own_cards
from gradwire.comms.config import Config

INTERFACES = {1: "lo", 2: "eth0", 3: "eth1", 4: "docker0", 5: "tun0", 6: "eth0.7", 7: "wlan0"}
FOUND = [
    HostAddress(1, "127.0.0.1", 8),
    HostAddress(2, "10.0.0.1", 16),
    HostAddress(2, "fe80::1", 64),
    HostAddress(3, "10.1.0.1", 16),
    HostAddress(4, "172.17.0.1", 16),
    HostAddress(5, "100.64.0.1", 10),
    HostAddress(6, "10.2.0.1", 16),
    HostAddress(7, "10.0.0.2", 16),
]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of a host with two cards, a bridge, a tunnel, a VLAN over the first card, and Wi-Fi beside it."""
    for name, kind in {"eth0": 1, "eth1": 1, "docker0": 1, "tun0": 65534, "eth0.7": 1, "wlan0": 1}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(f"{kind}\n")
    (tmp_path / "docker0" / "bridge").mkdir()
    (tmp_path / "tun0" / "tun_flags").write_text("0x1002\n")
    (tmp_path / "eth0.7" / "lower_eth0").mkdir()
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(INTERFACES.items()))
    monkeypatch.setattr(module, "is_running", lambda name: True)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    return tmp_path


def test_two_cards_are_two_and_nothing_else_is(host: Path) -> None:
    """No bridge, no tunnel, no second interface over one card, no second card in one network."""
    assert own_cards(FOUND, Config(), host) == ("eth0 10.0.0.1/16", "eth1 10.1.0.1/16")


def test_one_card_is_none(host: Path) -> None:
    assert own_cards([each for each in FOUND if each.index != 3], Config(), host) == ()


def test_a_card_without_a_link_is_none(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_running", lambda name: name != "eth1")
    assert own_cards(FOUND, Config(), host) == ()


def test_what_is_named_is_taken_in_that_order(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_cards(FOUND, Config(nics="eth1,docker0"), host) == ("eth1 10.1.0.1/16", "docker0 172.17.0.1/16")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1,eth0")
    assert own_cards(FOUND, Config(), host) == ("eth1 10.1.0.1/16", "eth0 10.0.0.1/16")


def test_one_name_for_gloo_wins_and_the_option_wins_over_it(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert own_cards(FOUND, Config(), host) == ()
    assert len(own_cards(FOUND, Config(nics="eth0,eth1"), host)) == 2


@pytest.mark.parametrize("options", [{"nics": "one"}, {"nics": "per_rank"}, {"transport": "mpi"}])
def test_options_that_leave_one_card(host: Path, options: dict[str, object]) -> None:
    assert own_cards(FOUND, Config(**options), host) == ()  # type: ignore[arg-type]


def test_a_name_that_is_not_there_is_an_error(host: Path) -> None:
    with pytest.raises(ValueError, match=r"`nics` names 'ens5', and this host has .*eth1.*; wanted some of them"):
        own_cards(FOUND, Config(nics="eth0,ens5"), host)


def test_only_whether_ranks_listen_on_their_own_has_to_agree() -> None:
    assert Config(nics="eth0,eth1").shared() == Config(nics="one").shared() != Config(nics="per_rank").shared()


@pytest.mark.parametrize("nics", ["", "eth0", "eth0,eth0", "eth0,", "none", 2, None])
def test_what_names_no_two_cards_is_refused(nics: object) -> None:
    with pytest.raises(ValueError, match=r"`nics` is .*; wanted auto, one, per_rank, or names of two cards or more"):
        Config(nics=nics)  # type: ignore[arg-type]


def test_the_kernel_is_asked_for_links_and_networks() -> None:
    loopback = next(each for each in host_addresses() if each.address == "127.0.0.1")
    assert (socket.if_indextoname(loopback.index), loopback.prefix) == ("lo", 8)
    assert is_running("lo") and not is_running("nosuchcard0")
    assert not has_several_networks([loopback, HostAddress(2, "10.0.0.1", 16), HostAddress(2, "2001:db8::1", 64)])
    assert has_several_networks(FOUND)


def test_all_ranks_find_the_same_networks_in_the_same_order() -> None:
    """Drawn hosts with drawn names and orders: what counts is a network of all, with an address of its own on each."""
    for seed in range(200):
        draw = random.Random(seed)
        networks = draw.sample(range(1, 9), draw.randint(1, 5))
        private = draw.choice(networks)  # the same address on every host, as of docker0
        hosts = draw.randint(2, 4)
        said: list[tuple[list[str], object]] = []
        for host in range(hosts):
            own = [each for each in networks if draw.random() < 0.9]
            draw.shuffle(own)
            cards = [f"if{host}{each} 10.{each}.0.{1 if each == private else host + 1}/16" for each in own]
            said += [(cards, f"host{host}")] * draw.randint(1, 2)
        found = [Cards.of(said, rank) for rank in range(len(said))]
        common = [
            each for each in networks
            if each != private and all(any(f" 10.{each}.0." in card for card in cards) for cards, _ in said)
        ]  # fmt: skip
        if len(common) < 2:
            assert found == [None] * len(said)
            continue
        for rank, each in enumerate(found):
            assert each is not None and found[0] is not None
            assert each.addresses == found[0].addresses
            assert each.own == each.addresses[rank]
            assert {int(address.split(".")[1]) for address in each.own} == set(common)
            assert all(
                f"{name} {address}/16" in said[rank][0] for name, address in zip(each.names, each.own, strict=True)
            )


def test_totals_say_what_was_carried_and_what_failed(caplog: pytest.LogCaptureFixture) -> None:
    found = Cards.of([(["eth0 10.0.0.1/16", "eth1 10.1.0.1/16"], "a"), (["a0 10.0.0.2/16", "a1 10.1.0.2/16"], "b")], 0)
    assert found is not None
    found.carried(0, 2_000_000, 1_000_000)
    found.carried(1, 500_000, 0)
    found.seen(0, 12.5e6)
    for _ in range(2):
        found.leave_out(1, "its link is down")
    assert found.describe() == (
        "network cards: eth0 sent 2 MB at 100 Mbit/s, received 1 MB; eth1 sent 0.5 MB, received 0 MB (left out: its "
        "link is down)"
    )
    said = "the network card eth1 (10.1.0.1) is left out: its link is down; what it carried goes over eth0 from here on"
    assert [record.getMessage() for record in caplog.records] == [f"{said}, in the same bits"]
    assert not found.usable(1)
