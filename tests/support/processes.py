"""What the fixture `processes` of tests/comms/conftest.py is, for the tests that take it."""

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
