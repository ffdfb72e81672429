"""A TCPStore behind a link that can be cut: what clients see of a stopped server, or of a network that is gone."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from gradwire.comms.bootstrap.compat import TCPStore

HOST = "127.0.0.1"
WAIT = timedelta(seconds=60)


class Link:
    """Passes on what clients and the server say, while it is open."""

    def __init__(self) -> None:
        self._server = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._listener = socket.create_server((HOST, 0))
        self._open = threading.Event()
        self._open.set()
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def client(self) -> TCPStore:
        """A connection to the store, over the link."""
        port = self._listener.getsockname()[1]
        return TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=WAIT)

    def cut(self) -> None:
        """Nothing passes any more."""
        self._open.clear()

    def mend(self) -> None:
        """What has waited passes."""
        self._open.set()

    def close(self) -> None:
        """The server is gone, as the clients see it."""
        self._open.set()
        for end in (self._listener, *self._ends):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:  # closed already by its client
                continue
            finally:
                end.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection((HOST, self._server.port))
            self._ends += [client, server]
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self._open.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return


@contextmanager
def store_behind_a_link() -> Iterator[Link]:
    """A link that is closed at the end."""
    link = Link()
    try:
        yield link
    finally:
        link.close()
