"""Metrics for Prometheus on request: a text file for node_exporter's textfile collector, or a port of this process.

Source: https://github.com/prometheus/node_exporter#textfile-collector (files are replaced in one piece).
"""

import logging
import math
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Protocol

from gradwire.comms.bootstrap.threads import BackgroundThread
from gradwire.comms.boundary.files import replace_text

log = logging.getLogger("gradwire")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Exported(Protocol):
    """What can be exported."""

    def to_prometheus(self) -> str:
        """The metrics in the text format of Prometheus."""


class Metrics:
    """What one rank exports. The text is made at the end of a step, so a scrape costs training nothing.

    Args:
        file: Written again and again; None writes none.
        port: Served on `address`; 0 takes a free one, None serves none.
        address: Of this host.
        every_seconds: At most so often.

    Raises:
        OSError: The file cannot be written, or the port is taken.
        ValueError: The port or the seconds are none.
    """

    def __init__(self, file: Path | None, port: int | None, address: str, every_seconds: float) -> None:
        self._file: Path | None = None
        self._every_seconds, self._next = every_seconds, 0.0
        self._text = ""
        self._server: ThreadingHTTPServer | None = None
        self.change(file, port, address, every_seconds)

    def change(self, file: Path | None, port: int | None, address: str, every_seconds: float) -> None:
        """Adds a file or a port, or replaces the one there was; what is not named goes on.

        Args:
            file: As in the constructor.
            port: As in the constructor.
            address: As in the constructor.
            every_seconds: As in the constructor.

        Raises:
            OSError: The file cannot be written, or the port is taken; then what there was goes on.
            ValueError: The port or the seconds are none; likewise.
        """
        if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 1 << 16):
            raise ValueError(f"`port` is {port!r}; wanted a whole number from 1 to 65535, or 0 for a free one")
        if not 0 <= every_seconds < math.inf:
            raise ValueError(f"`every_seconds` is {every_seconds}; wanted a number of seconds, or 0 for each step")
        if file is not None:
            replace_text(file, "", lasting=False)
        if port is not None:
            self._serve(port, address)
        if file is not None:
            self._file = file
        self._every_seconds, self._next = every_seconds, 0.0

    def _serve(self, port: int, address: str) -> None:
        """Opens a port in place of the one that is open."""
        if self._server is not None and self._server.server_address[:2] == (address, port):
            return
        metrics = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path in ("/", "/metrics")
                body = metrics._text.encode() if found else b"wanted /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                log.debug(format, *args)

        server = ThreadingHTTPServer((address, port), Handler)
        server.daemon_threads = True
        self.close()
        self._server = server
        BackgroundThread("gradwire metrics", server.serve_forever, awaited=False).start()

    @property
    def port(self) -> int | None:
        """The port that is served; None without one."""
        return None if self._server is None else self._server.server_port

    def step_ended(self, report: Callable[[], Exported]) -> None:
        """Makes the text anew, if it is time to."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._every_seconds
        self._export(report())

    def _export(self, report: Exported) -> None:
        self._text = report.to_prometheus()
        if self._file is not None:
            try:
                replace_text(self._file, self._text, lasting=False)
            except OSError as error:
                log.warning("metrics cannot be written to %s any more: %s", self._file, error.strerror)
                self._file = None

    def close(self, last: Exported | None = None) -> None:
        """Ends the server.

        Args:
            last: What is written once more before, however soon; None leaves it at what was written.
        """
        if last is not None:
            self._export(last)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
