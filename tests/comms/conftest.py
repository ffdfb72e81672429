"""What the tests of this folder share."""

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import pytest

from gradwire.comms.compat import HashStore
from gradwire.comms.transport.shm import ShmGroup
from gradwire.comms.transport.threads import run_ranks

BLOCK_NBYTES = 4096  # small: a few thousand elements already stream through several chunks


class OnGroups(Protocol):
    """Runs a body on every rank of a new shared-memory group, ranks as threads."""

    def __call__(self, size: int, body: Callable[[ShmGroup], None], seconds: float = 60.0,
                 block: int = BLOCK_NBYTES) -> None: ...


@pytest.fixture(scope="session")
def on_groups() -> OnGroups:
    """`on_groups(size, body)`; closes the groups only when all are through, as a barrier at the end would."""

    def on_groups(size: int, body: Callable[[ShmGroup], None], seconds: float = 60.0, block: int = BLOCK_NBYTES) -> None:
        store = HashStore()

        def run(rank: int) -> None:
            group = ShmGroup.create(store, rank, size, key="laws", timeout=timedelta(seconds=seconds), block_nbytes=block)
            try:
                body(group)
            finally:
                group.close()

        run_ranks(size, run)

    return on_groups
