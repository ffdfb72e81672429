"""What the members have said about themselves when they came: known to all, so that nobody is asked again."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from gradwire.comms.bootstrap.placement import PeerInfo
from gradwire.comms.bootstrap.rendezvous import PeerInfos
from gradwire.comms.boundary.messages import MessageError

MOST_NBYTES = 1 << 20
"""Bytes of what one process says about itself, inflated."""

START = "start"
"""Name of the start of a generation's ranks, which start once."""


def packed(peer_info: PeerInfo) -> str:
    """What a process says about itself, for the others to know once and for all; see `peer_infos`."""
    return base64.b64encode(PeerInfos.of([peer_info], "").pack()).decode()


def peer_infos(members: Sequence[str], said: Mapping[str, str]) -> PeerInfos:
    """What the members of a generation have said about themselves, as `packed`: nobody is asked again."""
    known = (unpacked(said[name]) for name in members)
    return PeerInfos.of([replace(each, rank=rank, size=len(members)) for rank, each in enumerate(known)], START)


@lru_cache(maxsize=1024)
def unpacked(said: str) -> PeerInfo:
    """What `packed` was called on.

    Raises:
        MessageError: It is something else.
    """
    try:
        packed = base64.b64decode(said, validate=True)
    except ValueError as error:
        raise MessageError(f"what a process says about itself is no base64: {error}") from None
    found = PeerInfos.unpack("", packed, most_nbytes=MOST_NBYTES)
    if len(found) != 1:
        raise MessageError(f"what a process says about itself is of {len(found)} processes")
    return found[0]


def next_across(members: Sequence[str], rank: int, said: Mapping[str, str]) -> int | None:
    """A rank of the next host, in the order of the ranks and in a circle: not the same for all ranks of this one.

    Args:
        members: By rank.
        rank: This one.
        said: What each has said about itself; where one has said nothing, nothing is known.

    Returns:
        None where all are on one host, or nobody knows.
    """
    if any(name not in said for name in members):
        return None
    hosts: dict[tuple[str, ...], list[int]] = {}
    for each, name in enumerate(members):
        hosts.setdefault(_host(said[name]), []).append(each)
    own = _host(said[members[rank]])
    if len(hosts) == 1:
        return None
    following = [*hosts.values()][([*hosts].index(own) + 1) % len(hosts)]
    return following[hosts[own].index(rank) % len(following)]


def _host(said: str) -> tuple[str, ...]:
    peer_info = unpacked(said)
    return (*peer_info.host, peer_info.kernel)
