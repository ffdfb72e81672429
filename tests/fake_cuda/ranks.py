"""Ranks as threads, each with the device of its number, and process groups for them."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import distributed_c10d

from fake_cuda.machine import Machine
from fake_cuda.nccl import FakeNccl, OrderError, exchange

Result = TypeVar("Result")
_worlds = iter(range(10**9))


def run_ranks(running: Machine, size: int, body: Callable[[int], Result]) -> list[Result]:
    """Runs `body(rank)` in `size` threads, rank r on `cuda:r`, and returns the results in rank order.

    At the end of each rank its GPU is waited for, so that what a rank still holds is let go in order.

    Raises:
        Exception: What the lowest failing rank raised; an error of its own comes before an OrderError, which all ranks
            get as soon as one of them has failed.
    """
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    meeting = exchange()
    meeting.running += size
    real_sleep = time.sleep

    def sleep(seconds: float) -> None:
        """A rank that naps lets the others run: whoever polls a store does."""
        held = meeting.baton.pass_on()
        real_sleep(seconds)
        if held:
            meeting.baton.take()

    def run(rank: int) -> None:
        meeting.ranks.add(threading.current_thread())
        meeting.baton.take()
        torch.cuda.set_device(rank)
        try:
            results[rank] = body(rank)
            torch.cuda.synchronize()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            errors[rank] = error
            meeting.fail(OrderError(f"rank {rank} has failed: {type(error).__name__}: {error}"))
        finally:
            meeting.baton.pass_on()
            meeting.ended()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    with patch.object(time, "sleep", sleep):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        own = [rank for rank, error in sorted(errors.items()) if not isinstance(error, OrderError)]
        order = [rank for rank, error in sorted(errors.items()) if "has failed" not in str(error)[:40]]
        raise errors[(own or order or sorted(errors))[0]]
    return [results[rank] for rank in range(size)]


class FakeProcessGroup(dist.ProcessGroup):
    """A process group as the user of a hook has it: a store, and NCCL for the whole set of ranks on CUDA."""

    def __init__(self, store: Store, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = name
        self.store = store
        self._nccl = FakeNccl(PrefixStore("nccl", store), rank, size)
        self._nccl.options.group_name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def group_desc(self) -> str:
        return "default_pg"

    def getBackendName(self) -> str:
        return "nccl"

    def _get_backend(self, device: torch.device) -> FakeNccl:  # type: ignore[override]
        if torch.device(device).type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self._nccl


@contextmanager
def process_groups(size: int) -> Iterator[list[FakeProcessGroup]]:
    """A process group for each of `size` ranks, known to torch.distributed until the context ends."""
    world, store, number = distributed_c10d._world, HashStore(), next(_worlds)
    made = [FakeProcessGroup(store, rank, size, f"fake world {number}, rank {rank}") for rank in range(size)]
    for group in made:
        world.pg_map[group] = ("nccl", store)
        world.pg_names[group] = group.group_name  # type: ignore[assignment]
        world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    try:
        yield made
    finally:
        for group in made:
            for table in (world.pg_map, world.pg_names, world.pg_group_ranks):
                table.pop(group, None)
