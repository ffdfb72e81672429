"""Several network cards of a host whose networks reach the other hosts, for what one card would carry alone.

A network counts where every rank has a card in it, with an address of its own on each host: 172.17.0.1 of docker0 is
everybody's and nobody's. Of two interfaces over one card, of tunnels and of bridges that nobody has named none is a
second card. What each rank says of its cards travels with what it says of itself, so all ranks come to the same
networks without asking.

Loaded where a host has several networks; `gradwire.comms.transport.cards` sends over them.
"""

import fcntl
import logging
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_interface
from pathlib import Path

from gradwire.comms.bootstrap.addresses import HostAddress, is_outside
from gradwire.comms.config import ALL_NICS, NIC_PER_RANK, ONE_NIC, Config, gloo_interfaces

log = logging.getLogger("gradwire")

_CARD_TYPES = ("1", "32")
"""Ethernet and InfiniBand; tunnels are others. Source: Linux include/uapi/linux/if_arp.h."""
_GET_FLAGS, _UP_AND_RUNNING = 0x8913, 0x1 | 0x40
"""Source: netdevice(7), SIOCGIFFLAGS; a cable that is out leaves an interface up and not running."""
_SYSFS = Path("/sys/class/net")


def is_running(interface: str) -> bool:
    """Whether an interface of this process's network is up, and has a link."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        try:
            answer = fcntl.ioctl(door, _GET_FLAGS, struct.pack("16sh22x", interface.encode(), 0))
        except OSError:  # it is gone
            return False
    flags: int = struct.unpack_from("H", answer, 16)[0]
    return flags & _UP_AND_RUNNING == _UP_AND_RUNNING


def own_cards(found: Sequence[HostAddress], config: Config, sysfs: Path = _SYSFS) -> tuple[str, ...]:
    """This host's cards as `eth0 10.77.0.1/16`, each in a network of its own; none where there are fewer than two.

    Args:
        found: What the kernel has given to the interfaces.
        config: `nics` names the cards, or leaves it to gloo; else GLOO_SOCKET_IFNAME does, where it has a name.
        sysfs: Where the kernel describes interfaces.

    Raises:
        ValueError: `nics` names an interface that this host does not have.
    """
    named = gloo_interfaces() if config.nics == ALL_NICS else tuple(config.nics.split(","))
    if config.nics in (ONE_NIC, NIC_PER_RANK) or config.transport_name == "mpi" or len(named) == 1:
        return ()
    names = {index: name for index, name in socket.if_nameindex()}
    if config.nics != ALL_NICS and (missing := [name for name in named if name not in names.values()]):
        raise ValueError(
            f"`nics` names {missing[0]!r}, and this host has {', '.join(sorted(names.values()))}; wanted some of them"
        )
    cards: dict[str, str] = {}
    taken: set[str] = set()
    candidates = [each for each in found if each.index in names and is_outside(each.address)]
    for each in sorted(candidates, key=lambda each: (each.index, ":" in each.address)):
        name, own = names[each.index], ip_interface(f"{each.address}/{each.prefix}")
        alone = own.network.num_addresses == 1  # of a tunnel, or of a host whose routes say the rest
        if alone or name in taken or (named and name not in named) or not is_running(name):
            continue
        bottom = _bottom(name, sysfs) if named or _is_card(name, sysfs) else None
        if bottom is not None and bottom not in taken and str(own.network) not in cards:
            cards[str(own.network)] = f"{name} {own}"
            taken |= {name, bottom}
    found_cards = sorted(cards.values(), key=lambda card: named.index(card.split()[0])) if named else cards.values()
    return tuple(found_cards) if len(cards) > 1 else ()


def _is_card(name: str, sysfs: Path) -> bool:
    """Whether an interface is a card, or what stands for one in a namespace."""
    here = sysfs / name
    try:
        kind = (here / "type").read_text().strip()
    except OSError:
        return False
    return kind in _CARD_TYPES and not (here / "tun_flags").exists() and not (here / "bridge").exists()


def _bottom(name: str, sysfs: Path) -> str:
    """The interface that another one is a part of: of a VLAN the card below it."""
    while below := sorted((sysfs / name).glob("lower_*")):
        name = below[0].name.removeprefix("lower_")
    return name


@dataclass(frozen=True, slots=True)
class CardTotals:
    """What one card of this rank's host has carried of large messages to and from other hosts, for this rank.

    Attributes:
        name: Its interface.
        sent_nbytes: Without the headers of TCP and below.
        received_nbytes: Likewise.
        bytes_per_second: To one other rank, as last seen; None before.
        failed: Why it is left out; None while it is in use.
    """

    name: str
    sent_nbytes: int
    received_nbytes: int
    bytes_per_second: float | None
    failed: str | None

    def __str__(self) -> str:
        rate = "" if self.bytes_per_second is None else f" at {self.bytes_per_second * 8 / 1e6:.3g} Mbit/s"
        text = f"{self.name} sent {self.sent_nbytes / 1e6:.3g} MB{rate}, received {self.received_nbytes / 1e6:.3g} MB"
        return text if self.failed is None else f"{text} (left out: {self.failed})"


class Cards:
    """The cards of one rank, and where those of the others are; in the same order of networks on all ranks.

    Args:
        names: This rank's interfaces.
        addresses: Rank -> address in each network.
        rank: This rank.
    """

    def __init__(self, names: Sequence[str], addresses: Mapping[int, tuple[str, ...]], rank: int) -> None:
        self.names = tuple(names)
        self.addresses = dict(addresses)
        self.own = self.addresses[rank]
        self.are_used = True
        """Whether large messages go over them; the same on all ranks."""
        self.were_tried = False
        self._lock = threading.Lock()
        self._sent, self._received = [0] * len(names), [0] * len(names)
        self._rates: list[float | None] = [None] * len(names)
        self._failed: dict[int, str] = {}
        self.gloos: int | None = None
        """The one that gloo's own messages go over, once that is known."""

    @property
    def gloo_interface(self) -> str | None:
        """Which of them gloo is to use; None leaves it to torch, which takes the only one that is named, if any is."""
        return self.names[0] if gloo_interfaces() else None

    @classmethod
    def of(cls, said: Sequence[tuple[Sequence[str], object]], rank: int) -> "Cards | None":
        """The cards in networks that reach all ranks; None where those are fewer than two.

        Args:
            said: What each rank says: its `own_cards`, and what its host is known by; in rank order.
            rank: This rank.
        """
        by_rank = [_by_network(cards) for cards, _ in said]
        networks = [network for network in by_rank[0] if all(network in cards for cards in by_rank)]
        for network in list(networks):
            hosts: dict[str, object] = {}
            for (_, host), cards in zip(said, by_rank, strict=True):
                if hosts.setdefault(cards[network][1], host) != host:
                    networks.remove(network)
                    break
        if len(networks) < 2:
            return None
        addresses = {number: tuple(cards[each][1] for each in networks) for number, cards in enumerate(by_rank)}
        return cls([by_rank[rank][each][0] for each in networks], addresses, rank)

    def rail(self, members: Sequence[int], rank: int) -> "Rail":
        """The cards of some ranks.

        Args:
            members: Ranks of the communicator.
            rank: Index of this one among them.
        """
        return Rail(self, [self.addresses[member] for member in members], rank)

    def usable(self, card: int) -> bool:
        """Whether a card has not failed, and has a link now."""
        return card not in self._failed and is_running(self.names[card])

    def leave_out(self, card: int, why: str) -> None:
        """Notes, and says once, that a card carries nothing any more."""
        with self._lock:
            if card in self._failed:
                return
            self._failed[card] = why
        if card == self.gloos:
            log.error("%s", gloos_failure(self.names[card], self.own[card], why))
            return
        left = [name for number, name in enumerate(self.names) if number not in self._failed]
        log.warning(
            "the network card %s (%s) is left out: %s; what it carried goes over %s from here on, in the same bits",
            self.names[card],
            self.own[card],
            why,
            ", ".join(left) or "none",
        )

    def trouble(self) -> str | None:
        """Why gloo's own messages do not get through; None where its card has a link, or is not one of these."""
        if self.gloos is None or is_running(self.names[self.gloos]):
            return None
        return gloos_failure(self.names[self.gloos], self.own[self.gloos], "its link is down")

    def carried(self, card: int, sent_nbytes: int, received_nbytes: int) -> None:
        """Counts; any thread."""
        with self._lock:
            self._sent[card] += sent_nbytes
            self._received[card] += received_nbytes

    def seen(self, card: int, bytes_per_second: float) -> None:
        """Notes what a card gives; any thread."""
        self._rates[card] = bytes_per_second

    def rate(self, card: int) -> float | None:
        """What a card was last seen to give, bytes per second; None before."""
        return self._rates[card]

    def totals(self) -> tuple[CardTotals, ...]:
        """What each has carried."""
        rows = zip(self.names, self._sent, self._received, self._rates, strict=True)
        return tuple(CardTotals(*row, self._failed.get(card)) for card, row in enumerate(rows))

    def describe(self) -> str:
        """What each has carried, in one line."""
        if not self.are_used:
            why = "was as fast alone" if self.were_tried else "was not tried against all"
            return f"network cards: {', '.join(self.names)}; gloo's one {why}, and carries everything"
        return f"network cards: {'; '.join(map(str, self.totals()))}"


@dataclass(frozen=True, slots=True)
class Rail:
    """The cards of some ranks that exchange something.

    Attributes:
        cards: Of this rank.
        addresses: Of each rank, in each network.
        rank: This one, among these.
    """

    cards: Cards
    addresses: Sequence[tuple[str, ...]]
    rank: int


def gloos_failure(name: str, address: str, why: str) -> str:
    """Why training cannot go on without a card."""
    return (
        f"the network card {name} ({address}) has failed: {why}. gloo's own messages and the store go over it, so "
        "training cannot go on without it: mend its link, or start again with GLOO_SOCKET_IFNAME and MASTER_ADDR of "
        "another network"
    )


def _by_network(cards: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Network -> (interface, address)."""
    found = {}
    for name, own in (card.split() for card in cards):
        interface = ip_interface(own)
        found[str(interface.network)] = (name, str(interface.ip))
    return found
