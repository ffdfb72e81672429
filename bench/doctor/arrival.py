"""A rank says that it has started before it imports torch, which takes minutes from a cold network file system.

The launcher's store is torch's TCPStore, and torch is what is not there yet: so its one request to set a key is written
here by hand. Nothing depends on it but a sentence, which says of a rank that is late whether it has started; where the
store is not there yet (rank 0 serves it and imports torch itself) it is tried again until torch has been imported.

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
"""As `PrefixStore(PREFIX, store)` finds it: `started/3`."""

TRY_SECONDS = 0.5
CALL_SECONDS = 5.0
LONGEST_SECONDS = 300.0


def request(key: str, value: str) -> bytes:
    """The bytes that set a key in a TCPStore.

    Args:
        key: As a client names it.
        value: Anything.
    """
    words = (f"/{key}".encode(), value.encode())
    return (
        struct.pack("=BI", _VALIDATE, _MAGIC)
        + bytes([_SET])
        + b"".join(struct.pack("=Q", len(each)) + each for each in words)
    )


class StartNotice:
    """Says in a thread that this rank has started.

    Args:
        address: Of the store.
        port: Its TCP port.
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
        """Tries no more: torch is there, and says the rest."""
        self._done.set()
