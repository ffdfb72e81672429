"""Export of metrics for Prometheus: into a text file for node_exporter's textfile collector, or at an HTTP port.

Source: https://github.com/prometheus/node_exporter#textfile-collector (files are replaced in one piece).
"""

import logging
import math
import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from gradwire.comms.bootstrap.forks import leave_to_parent
from gradwire.comms.bootstrap.pending_connections import PendingConnections
from gradwire.comms.bootstrap.threads import BackgroundThread
from gradwire.comms.boundary.files import replace_text

log = logging.getLogger("gradwire")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MOST_REQUEST_NBYTES = 8192
"""Most bytes of a request that are read: the usual limit of web servers for a request's line and headers."""

RESPONSE_SECONDS = 2.0
"""Timeout of sending a response. It has some tens of kilobytes, which the kernel mostly buffers at once."""

POLL_SECONDS = 5.0
"""Interval between two checks for clients that have sent no request for too long."""


class _Scrapes:
    """HTTP server of the metrics: one thread, and as many clients at a time as `PendingConnections` accepts.

    Args:
        port: Port to listen on; 0 chooses a free one.
        address: Address of this host to listen on.
        text: Function that returns the metrics. It is called in the thread of the server.

    Attributes:
        address: Address that it listens on.
        port: Port that it listens on.
        is_open: True while it responds: False once it is closed, or its thread has failed.

    Raises:
        OSError: The port is in use, or the address is not one of this host.
    """

    def __init__(self, port: int, address: str, text: Callable[[], str]) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, backlog=64)
        self._text = text
        self.is_open = True
        self.address = address
        self.port: int = self._listener.getsockname()[1]
        BackgroundThread(
            "gradwire metrics",
            self._serve,
            without="metrics are not served any more",
            on_failure=lambda error: self.close(),
            awaited=False,
        ).start()
        leave_to_parent(self)

    def leave_to_parent(self) -> None:
        """Closes a forked child's copy of the port, which would keep it taken after this process has ended."""
        self._listener.close()

    def close(self) -> None:
        """Ends the server and frees the port."""
        self.is_open = False
        try:
            # Wakes the thread.
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("the port of the metrics was closed already: %s", error)
        self._listener.close()

    def _serve(self) -> None:
        """Responds to requests until the port is closed; the body of the server's thread."""
        with closing(PendingConnections(self._listener, _lacks)) as pending:
            while self.is_open:
                try:
                    clients = pending.next(POLL_SECONDS)
                except (OSError, ValueError) as error:
                    # A closed listener has no descriptor.
                    if self.is_open:
                        raise
                    log.debug("the port of the metrics is closed: %s", error)
                    return
                for client, request in clients:
                    with client:
                        try:
                            self._respond(client, request)
                        except Exception as error:  # noqa: BLE001 - one client's failure must not end the server
                            log.debug("a request for metrics cannot be responded to: %r", error)

    def _respond(self, client: socket.socket, request: bytes) -> None:
        """Responds to one request; ignores what is not HTTP."""
        parts = request.partition(b"\r\n")[0].split(b" ")
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/1.") or b"\r\n\r\n" not in request:
            return
        if parts[0] not in (b"GET", b"HEAD"):
            status, body = "405 Method Not Allowed", b"wanted GET\n"
        elif parts[1].partition(b"?")[0] in (b"/", b"/metrics"):
            status, body = "200 OK", self._text().encode()
        else:
            status, body = "404 Not Found", b"wanted /metrics\n"
        head = f"HTTP/1.0 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
        client.settimeout(RESPONSE_SECONDS)
        client.sendall(head.encode() + (b"" if parts[0] == b"HEAD" else body))
        client.shutdown(socket.SHUT_WR)


def _lacks(received: bytes) -> int:
    """Returns how many more bytes of a request may be read: none after the empty line that ends its headers."""
    return 0 if b"\r\n\r\n" in received else max(MOST_REQUEST_NBYTES - len(received), 0)


class Metrics:
    """Metrics of one rank, in a file, at a port, or both.

    The text is made at the end of a step, in the training thread, because a report is not consistent while buckets are
    in flight. A scrape shows the text of the last export, which follows the step that ends `every_seconds` or more
    after the export before.

    Thread safety: the methods are for the training thread; the server's thread reads the text, which is replaced as a
    whole.

    Args:
        file: File that is emptied now, and replaced at each export; None writes none.
        port: Port to serve on `address`; 0 chooses a free one, None serves none.
        address: Address of this host.
        every_seconds: Least time between two exports.

    Raises:
        OSError: The file cannot be written, or the port is in use.
        ValueError: `port` or `every_seconds` is out of range.
    """

    def __init__(self, file: Path | None, port: int | None, address: str, every_seconds: float) -> None:
        self._file: Path | None = None
        self._text = ""
        self._server: _Scrapes | None = None
        self.change(file, port, address, every_seconds)
        leave_to_parent(self)

    def change(self, file: Path | None, port: int | None, address: str, every_seconds: float) -> None:
        """Adds a file or a port, or replaces the present one; the interval is replaced in any case.

        Args:
            file: File that is emptied now, and replaced at each export in place of the present one; None keeps that.
            port: Port to serve in place of the present one; 0 chooses a free one, None keeps the present one.
            address: Address of this host for `port`; ignored without it.
            every_seconds: Least time between two exports from now on; the next one comes at the end of the next step.

        Raises:
            OSError: The file cannot be written, or the port is in use. Nothing is changed.
            ValueError: `port` or `every_seconds` is out of range. Nothing is changed.
        """
        if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 1 << 16):
            raise ValueError(f"`port` is {port!r}; wanted a whole number from 1 to 65535, or 0 for a free one")
        if not 0 <= every_seconds < math.inf:
            raise ValueError(f"`every_seconds` is {every_seconds}; wanted a number of seconds, or 0 for each step")
        # Open the port before the file is emptied: if one of the two fails, neither has changed.
        server = self._server if port is None else self._server_at(port, address)
        if file is not None:
            try:
                replace_text(file, "", lasting=False)
            except OSError:
                if server is not None and server is not self._server:
                    server.close()
                raise
            self._file = file
        if server is not self._server:
            self.close()
            self._server = server
        self._every_seconds, self._next = every_seconds, 0.0

    def _server_at(self, port: int, address: str) -> _Scrapes:
        """Returns the present server if it is at this port and address, else a new one."""
        if (present := self._server) and present.is_open and (present.address, present.port) == (address, port):
            return present
        return _Scrapes(port, address, lambda: self._text)

    @property
    def port(self) -> int | None:
        """Port that is served; None if there is none, or if its server has failed."""
        return None if self._server is None or not self._server.is_open else self._server.port

    def step_ended(self, text: Callable[[], str]) -> None:
        """Exports metrics if the last export is `every_seconds` old, or if this is the first step since `change`.

        Args:
            text: Function that returns the metrics of the steps so far; called only then.
        """
        if (now := time.monotonic()) >= self._next:
            self._next = now + self._every_seconds
            self._export(text())

    def _export(self, text: str) -> None:
        """Replaces the text that is served and the file; after a failed write, the file is no longer written."""
        self._text = text
        if self._file is not None:
            try:
                replace_text(self._file, self._text, lasting=False)
            except OSError as error:
                log.warning("metrics cannot be written to %s any more: %s", self._file, error.strerror)
                self._file = None

    def leave_to_parent(self) -> None:
        """Leaves the file alone in a forked child, whose counters stay as they were at the fork."""
        self._file = None

    def close(self, last: str | None = None) -> None:
        """Ends the server.

        Args:
            last: Metrics that are exported before, however recent the previous ones are; None exports nothing more.
        """
        if last is not None:
            self._export(last)
        if self._server is not None:
            self._server.close()
            self._server = None
