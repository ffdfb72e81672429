"""The store's port of a job that mpirun starts: nobody else gets it between its choice and the store."""

import errno
import socket
from datetime import timedelta

import pytest

from gradwire.comms.bootstrap import mpi_launch
from gradwire.comms.bootstrap.mpi_launch import MpiPlace, open_store


def test_a_port_is_held_until_the_store_listens_at_it() -> None:
    port = mpi_launch._hold_port()
    with socket.socket() as other, pytest.raises(OSError) as refused:
        other.bind(("", port))
    assert refused.value.errno == errno.EADDRINUSE
    store = open_store(MpiPlace(0, 1, 0, 1, "127.0.0.1", port), timedelta(seconds=20))
    store.set("a", "1")
    assert store.port == port and store.get("a") == b"1"
    assert port not in mpi_launch._holders
