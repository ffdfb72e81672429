"""The ranks of a node's shared memory belong to one user, whatever number that one has."""

import os
import socket
import struct
from collections.abc import Callable

import pytest

from gradwire.comms.transport.segment import _RankConnection


class Called:
    """A connection whose kernel names some user."""

    def __init__(self, uid: int) -> None:
        self.uid = uid

    def getsockopt(self, level: int, option: int, nbytes: int) -> bytes:
        assert (level, option, nbytes) == (socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return struct.pack("=iII", 1, self.uid, self.uid)


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda uid: monkeypatch.setattr(os, "getuid", lambda: uid)


@pytest.mark.parametrize("uid", [0, 1000, (1 << 31) - 1, 1 << 31, 4294967290])
def test_a_caller_of_the_same_user_is_let_in(uid: int, user: Callable[[int], None]) -> None:
    user(uid)
    _RankConnection(Called(uid))  # type: ignore[arg-type]
    user(uid ^ 1)
    with pytest.raises(PermissionError, match=f"of user {uid} has connected; this one is of user {uid ^ 1}"):
        _RankConnection(Called(uid))  # type: ignore[arg-type]
