"""Report of a rank's start to the launcher's store before the rank imports torch, which may take minutes.

The store is torch's TCPStore, and its client is part of torch. Therefore this module builds the bytes of its request to
set a key itself. The report has one purpose: the message about a missing rank says whether it has started. If the store
does not answer yet (rank 0 may serve it, and imports torch itself) the request is repeated until torch has been
imported.

Source: torch/csrc/distributed/c10d/TCPStoreBackend.hpp and TCPStore.cpp: QueryType VALIDATE and SET, the magic number,
and the "/" in front of every key.
"""

import json
import socket
import struct
import threading
import time

from gradwire.comms.bootstrap.threads import BackgroundThread

_VALIDATE, _SET = 0, 1
_MAGIC = 0x3C85F7CE
PREFIX, KEY = "gradwire-doctor", "started"
"""Prefix of the doctor's store, and beginning of a rank's key: `PrefixStore(PREFIX, store)` has `started/3`."""

TRY_SECONDS = 0.5
CALL_SECONDS = 5.0
LONGEST_SECONDS = 300.0


def request(key: str, value: str) -> bytes:
    """Returns the bytes that a client sends to a TCPStore to set a key.

    Args:
        key: Name of the key, with the prefixes of `PrefixStore`.
        value: Text to store.
    """
    words = (f"/{key}".encode(), value.encode())
    return (
        struct.pack("=BI", _VALIDATE, _MAGIC)
        + bytes([_SET])
        + b"".join(struct.pack("=Q", len(each)) + each for each in words)
    )


class StartNotice:
    """Thread that writes into the launcher's store that this rank has started, before torch is imported.

    It tries every half second for up to five minutes, until the store takes it or `end` is called.

    Args:
        address: Host of the store.
        port: TCP port of the store.
        rank: This rank.
    """

    def __init__(self, address: str, port: int, rank: int) -> None:
        self._to = (address, port)
        word = json.dumps({"host": socket.gethostname(), "time": time.time()})
        self._request = request(f"{PREFIX}/{KEY}/{rank}", word)
        self._done = threading.Event()
        BackgroundThread(
            "doctor's start notice",
            self._run,
            without="other ranks do not hear that this one has started until torch is imported",
            on_failure=lambda error: self._done.set(),
            end=self._done.set,
            awaited=False,
        ).start()

    def _run(self) -> None:
        until = time.monotonic() + LONGEST_SECONDS
        while time.monotonic() < until and not self._done.wait(TRY_SECONDS):
            try:
                with socket.create_connection(self._to, CALL_SECONDS) as connection:
                    connection.sendall(self._request)
                return
            except OSError:  # nobody serves it yet
                continue

    def end(self) -> None:
        """Stops trying: torch has been imported, and its own store client takes over."""
        self._done.set()
