"""A limit on each connection to another node: which connections get it."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gradwire.bench.emulation.connections import limit_streams

PACING = 47
HERE, THERE = "127.0.0.1", "127.0.0.2"


@contextmanager
def connection(server: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection from HERE."""
    with (
        socket.create_server((server, 0)) as listener,
        socket.create_connection(listener.getsockname(), source_address=(HERE, 0)) as ours,
    ):
        theirs, _ = listener.accept()
        with theirs:
            yield ours, theirs


@pytest.mark.parametrize("bytes_per_second", [1e5, 1.25e6])
def test_connections_to_another_address_are_limited_and_no_others(bytes_per_second: float) -> None:
    left, right = socket.socketpair()
    with left, right, connection(HERE) as near, connection(THERE) as far, socket.socket() as unconnected:
        before = [each.getsockopt(socket.SOL_SOCKET, PACING) for each in (*near, unconnected)]
        assert limit_streams(bytes_per_second) >= 2
        assert [each.getsockopt(socket.SOL_SOCKET, PACING) for each in far] == [int(bytes_per_second)] * 2
        assert [each.getsockopt(socket.SOL_SOCKET, PACING) for each in (*near, unconnected)] == before


def test_connections_stay_usable_and_open() -> None:
    with connection(THERE) as (ours, theirs):
        limit_streams(1e6)
        limit_streams(1e7)
        ours.sendall(b"still here")
        assert theirs.recv(64) == b"still here"
