"""Encodes the peer info of elastic training's members (host, NICs, options), which all ranks keep from then on.

Each member publishes it once, at the start or when it joins; a new generation needs no second exchange.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from gradwire.comms.bootstrap.placement import PeerInfo
from gradwire.comms.bootstrap.rendezvous import PeerInfos
from gradwire.comms.boundary.messages import MessageError

MOST_NBYTES = 1 << 20
"""Largest size of one process's peer info after decompression, in bytes."""

START = "start"
"""Generation name in the peer infos that `peer_infos` returns: constant, as no store exchanges them."""


def packed(peer_info: PeerInfo) -> str:
    """Encodes a process's peer info as base64 text, for the store; `unpacked` is the inverse."""
    return base64.b64encode(PeerInfos.of([peer_info], "").pack()).decode()


def peer_infos(members: Sequence[str], packed_infos: Mapping[str, str]) -> PeerInfos:
    """Returns the peer infos of a generation's members with their ranks in it, from what is known here already.

    Args:
        members: Names of the processes, by rank.
        packed_infos: Name -> peer info in the form of `packed`, for at least these members.

    Raises:
        MessageError: A text in `packed_infos` is no packed peer info.
    """
    known = (unpacked(packed_infos[name]) for name in members)
    return PeerInfos.of([replace(each, rank=rank, size=len(members)) for rank, each in enumerate(known)], START)


@lru_cache(maxsize=1024)
def unpacked(text: str) -> PeerInfo:
    """Decodes the peer info of one process.

    Args:
        text: Result of `packed`, maybe of another process.

    Raises:
        MessageError: `text` is no base64, or not the peer info of exactly one process.
    """
    try:
        packed = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise MessageError(f"the peer info of a process is no base64: {error}") from None
    found = PeerInfos.unpack("", packed, most_nbytes=MOST_NBYTES)
    if len(found) != 1:
        raise MessageError(f"the peer info of a process holds those of {len(found)} processes")
    return found[0]


def next_across(members: Sequence[str], rank: int, packed_infos: Mapping[str, str]) -> int | None:
    """Returns a rank on the next host, in a circle of the hosts; the ranks of one host get different ones if they can.

    Args:
        members: Names of the processes, by rank.
        rank: This rank.
        packed_infos: Name -> peer info in the form of `packed`; may lack members.

    Returns:
        The rank; None if all members are on one host, or the peer info of a member is missing.
    """
    if any(name not in packed_infos for name in members):
        return None
    hosts: dict[tuple[str, ...], list[int]] = {}
    for each, name in enumerate(members):
        hosts.setdefault(_host(packed_infos[name]), []).append(each)
    own = _host(packed_infos[members[rank]])
    if len(hosts) == 1:
        return None
    following = [*hosts.values()][([*hosts].index(own) + 1) % len(hosts)]
    return following[hosts[own].index(rank) % len(following)]


def _host(text: str) -> tuple[str, ...]:
    peer_info = unpacked(text)
    return (*peer_info.host, peer_info.kernel)
