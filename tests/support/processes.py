"""What the fixture `processes` of tests/comms/conftest.py is, for the tests that take it, and what a rank logs."""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol


class Processes(Protocol):
    """Starts ranks as processes."""

    def __call__(
        self,
        size: int,
        target: Callable[..., object],
        *arguments: object,
        nodes: Sequence[str] | None = None,
        environment: dict[str, str] | None = None,
        seconds: float = 90.0,
        lost: Collection[int] = (),
        agent: bool = False,
    ) -> list[Any]:
        """Runs `target(rank, *arguments)` in `size` processes and returns the results in rank order."""


class Said(logging.Handler):
    """The warnings and errors of a logger that has it as a handler."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the message."""
        self.lines.append(record.getMessage())
