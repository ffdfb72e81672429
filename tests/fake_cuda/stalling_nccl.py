"""A GPU and an NCCL on which a lost rank hangs: a collective is done when all of its members have issued it.

`stalling_cuda()` puts them into torch, over `fake_cuda`. Ranks are threads or processes: the members of a communicator
count in its store who has issued what. No data is moved: what is received is what the rank itself has sent. What counts
is who waits for whom. An event behind a
collective is done when every one that its rank had issued before it is done, so
`torch.cuda.synchronize()` blocks for ever behind a collective to which a rank did not come, until `abort()`, as on a
GPU.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from fake_cuda.drive import Job, cuda_job
from fake_cuda.machine import device_index
from fake_cuda.nccl import FakeNcclOptions
from fake_cuda.streams import FakeEvent, FakeFuture, FakeStream, current_stream

POLL_SECONDS = 0.01

_issued: dict[int, list["StallingWork"]] = {}
"""Device -> collectives that its rank has issued and that were not seen to be done."""


class StallingWork:
    """A collective under way."""

    def __init__(self, group: "StallingNccl", number: int, tensors: list[Tensor], device: int) -> None:
        self._group, self._number, self._tensors, self._device = group, number, tensors, device
        self._done = False

    def is_completed(self) -> bool:
        self._done = self._done or self._group.aborted.is_set() or self._group.have_all_come(f"call/{self._number}")
        return self._done

    def wait(self, timeout: object = None) -> bool:
        _behind_collectives(current_stream(self._device))
        return True

    def get_future(self) -> FakeFuture:
        future = FakeFuture(devices=[torch.device("cuda", self._device)])
        future.set_result(self._tensors)
        return future


class StallingNccl:
    """In the place of torch.distributed.ProcessGroupNCCL.

    Attributes:
        aborted: Set by `abort`.
        shutdowns: Calls of `shutdown`.
        made: Every group of this process.
        over: The context of `stalling_cuda` has ended: nobody comes any more.
    """

    Options = FakeNcclOptions
    made: ClassVar[list[Any]] = []
    over: ClassVar[threading.Event] = threading.Event()

    def __init__(self, store: Store, rank: int, size: int, options: object = None) -> None:
        self._store, self._size = store, size
        self._calls = 0
        self._collected: list[Tensor] | None = None
        self.options: Any = options or FakeNcclOptions()
        self.aborted = threading.Event()
        self.shutdowns = 0
        self.made.append(self)

    def name(self) -> str:
        return "nccl"

    def _set_sequence_number_for_group(self) -> None: ...

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    def have_all_come(self, what: str) -> bool:
        """Whether all members have counted themselves; a device does not hear of a store that is gone."""
        try:
            return self._store.add(what, 0) == self._size
        except RuntimeError:
            return False

    def eager_connect_single_device(self, device: object = None) -> None:
        """As ncclCommInitRankConfig: returns when all have come, and `abort` does not reach it."""
        self._store.add("connected", 1)
        while not self.have_all_come("connected"):
            if self.over.is_set():
                raise RuntimeError("the test is over")
            time.sleep(POLL_SECONDS)

    def allreduce(self, tensors: list[Tensor], options: object = None) -> StallingWork | None:
        return self._issue(tensors)

    def broadcast(self, tensors: list[Tensor], options: object = None) -> StallingWork | None:
        return self._issue(tensors)

    def reduce(self, tensors: list[Tensor], options: object = None) -> StallingWork | None:
        return self._issue(tensors)

    def alltoall_base(self, output: Tensor, source: Tensor, *more: object) -> StallingWork | None:
        output.copy_(source)
        return self._issue([output])

    def _allgather_base(self, output: Tensor, source: Tensor, options: object = None) -> StallingWork | None:
        output.view(self._size, -1).copy_(source.clone().view(1, -1))  # in place
        return self._issue([output])

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, options: object = None) -> StallingWork | None:
        return self._issue([output])

    all_to_all_single, all_gather_single, reduce_scatter_single = alltoall_base, _allgather_base, _reduce_scatter_base

    def _start_coalescing(self, device: object = None) -> None:
        self._collected = []

    def _end_coalescing(self, device: object = None) -> StallingWork | None:
        tensors, self._collected = self._collected, None
        return self._issue(tensors) if tensors else None

    def abort(self) -> None:
        self.aborted.set()

    def shutdown(self) -> None:
        self.shutdowns += 1

    def _issue(self, tensors: list[Tensor]) -> StallingWork | None:
        if self._collected is not None:
            self._collected += tensors
            return None
        if self.aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")
        index = tensors[0].device.index
        work = StallingWork(self, self._calls, tensors, index)
        self._calls += 1
        try:
            self._store.add(f"call/{work._number}", 1)
        except RuntimeError:
            pass  # the store is gone, and so is who asks it
        _issued.setdefault(index, []).append(work)
        return work


class UsersGroup(dist.ProcessGroup):
    """A process group with an NCCL backend, as the user of the hook has it."""

    def __init__(self, store: Store, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = name
        self.nccl = StallingNccl(PrefixStore("users", store), rank, size)
        world: Any = distributed_c10d._world
        world.pg_map[self], world.pg_backend_config[self] = ("nccl", store), "cuda:nccl"  # torch.profiler reads both
        world.pg_names[self] = name
        world.pg_group_ranks[self] = {each: each for each in range(size)}

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _get_backend(self, device: torch.device) -> StallingNccl:  # type: ignore[override]
        if torch.device(device).type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self.nccl


def pending(device: int) -> list[StallingWork]:
    """What a device has not come to the end of."""
    works = _issued.setdefault(device, [])
    while works and works[0].is_completed():
        works.pop(0)
    return list(works)


def synchronize(device: object = None) -> None:
    """In the place of torch.cuda.synchronize."""
    index = device_index(device)
    while pending(index):
        time.sleep(POLL_SECONDS)


_behind: set[object] = set()
"""Timelines of streams that wait for a collective."""

_recorded, _waited = FakeEvent.record, FakeEvent.wait


def _behind_collectives(stream: FakeStream) -> None:
    """Notes that a stream waits for collectives: all that its device has not come to the end of, to be short."""
    _behind.add(stream.timeline)


def _record(event: Any, stream: Any = None) -> None:
    _recorded(event, stream)
    stream = stream or current_stream()
    event.before = pending(stream.device_index) if stream.timeline in _behind else []


def _wait(event: Any, stream: Any = None) -> None:
    _waited(event, stream)
    if getattr(event, "before", ()):
        _behind_collectives(stream or current_stream())


def _query(event: Any) -> bool:
    return all(work.is_completed() for work in getattr(event, "before", ()))


def _synchronize(event: Any) -> None:
    while not _query(event):
        time.sleep(POLL_SECONDS)


EVENTS: dict[str, Any] = {
    "record": _record,
    "wait": _wait,
    "query": _query,
    "synchronize": _synchronize,
    "elapsed_time": lambda event, end: 1.0,
}


@contextmanager
def stalling_cuda(size: int) -> Iterator[None]:
    """Gives torch a device for each rank until the context ends.

    Args:
        size: Ranks; rank r uses `cuda:r`.
    """
    with ExitStack() as stack:
        stack.enter_context(cuda_job(size))
        for name, fake in EVENTS.items():
            stack.enter_context(patch.object(FakeEvent, name, fake))
        stack.enter_context(patch.object(torch.cuda, "synchronize", synchronize))
        for module in (dist, distributed_c10d):
            stack.enter_context(patch.object(module, "ProcessGroupNCCL", StallingNccl))
        _issued.clear()
        _behind.clear()
        StallingNccl.made.clear()
        StallingNccl.over.clear()
        try:
            yield
        finally:
            StallingNccl.over.set()


class Training(Job):
    """One rank's steps, each with the wait for the device that a training loop has in `loss.item()`."""

    def step(self, buckets: Any, gradients: Mapping[str, Tensor]) -> None:
        super().step(buckets, gradients)
        self.results.clear()
        torch.cuda.synchronize(self.device)
