"""A process group in Python around one of torch's own, which runs every collective that it does not run itself.

Torch calls a group from C++ as well: functional collectives (DTensor, torch.compile) and DDP's reducer do. Its
trampoline takes the GIL, looks for a method in Python and, where there is none, runs C++'s own while it holds the GIL.
That can wait for ever (seen on torch 2.13): gloo's queue has a mutex, and a thread of gloo holds it while it frees a
work that nobody else holds any more; the work's tensors have Python objects, so freeing them takes the GIL. Torch's
Python bindings release the GIL. So every method that the trampoline knows exists here, and calls the inner group's
binding.
"""

from collections import deque
from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms.backend.inner_turns import InnerTurns
from gradwire.comms.backend.strided import Packing, tensors_in
from gradwire.comms.backend.work import FutureWork, PackedWork, WatchedWork
from gradwire.comms.bootstrap.compat import BackendWork, outside_graphs
from gradwire.comms.communicator import Communicator

MESSAGES = ("send", "recv", "recv_anysource")
"""Whose waits are not cut into slices: after one that times out gloo closes all connections of the group. They end
where a connection does, and whoever hears of a failure shuts his down."""


def _delegate(name: str) -> Callable[..., dist.Work]:
    """A method that calls the inner group's of this name with the same arguments, which torch checks itself."""

    @outside_graphs
    def delegate(group: "DelegatingGroup", *arguments: object, **named: object) -> dist.Work:
        work: dist.Work = getattr(group.inner, name)(*arguments, **named)
        communicator = group.communicator
        first = next(iter(tensors_in([*arguments, *named.values()])), None)
        on_cpu = not torch.cuda.is_available() if first is None else first.device.type == "cpu"  # a barrier has none
        if communicator is None or not on_cpu:
            return work
        members = range(group.size()) if name in MESSAGES else ()
        return WatchedWork(work, lambda: communicator.carry_out(name, lambda: cast(BackendWork, work), members))

    return delegate


def _packed(name: str) -> Callable[..., dist.Work]:
    """The same for a method that would take strided tensors as they lie.

    It writes to its first argument, and to all arguments given by name but `input...`.
    """
    delegate = _delegate(name)

    @outside_graphs
    def delegate_packed(group: "DelegatingGroup", *arguments: object, **named: object) -> dist.Work:
        written, read = Packing(), Packing()
        positional = [(read if place else written).pack(argument) for place, argument in enumerate(arguments)]
        by_name = {
            key: (read if key.startswith("input") else written).pack(argument) for key, argument in named.items()
        }
        first = next(iter(tensors_in([*positional, *by_name.values()])), None)
        device = None if first is None else first.device
        work = group.turns.issue(lambda: delegate(group, *positional, **by_name), device)
        if not written.copies:
            return work
        outputs = tensors_in([*arguments[:1], *(named[key] for key in named if not key.startswith("input"))])

        def finish() -> list[Tensor]:
            written.copy_back()
            return outputs

        return group.issued(PackedWork(work, finish))

    return delegate_packed


class DelegatingGroup(dist.ProcessGroup):
    """Delegates every collective, under all its names in torch 2.13 to 2.15; strided CPU tensors travel as copies.

    Args:
        inner: Has backends for all devices.

    Attributes:
        inner: The same.
        turns: Of what it issues.
        communicator: Of the ranks, for CPU tensors: what fails is told to all of them, and heard of by those who wait
            for the inner group; None: torch says what it sees.
    """

    def __init__(self, inner: dist.ProcessGroup) -> None:
        # The stubs know the form with a store alone, for which torch makes no trampoline.
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        self.turns = InnerTurns(inner)
        self.communicator: Communicator | None = None
        self._outstanding: deque[dist.Work] = deque()

    def issued(self, work: dist.Work) -> dist.Work:
        """The work of a collective that this group finishes itself; `barrier` waits for it."""
        while self._outstanding and self._outstanding[0].is_completed():
            self._outstanding.popleft()
        self._outstanding.append(work)
        return work

    @outside_graphs
    def barrier(self, *arguments: object, **named: object) -> dist.Work:
        """Waits on the host for what this rank has issued, as gloo's does, then for the other ranks."""
        for work in self._outstanding:
            if isinstance(work, FutureWork):
                work.wait_on_host()
            else:
                work.wait()
        return _delegate("barrier")(self, *arguments, **named)

    allreduce = _packed("allreduce")
    allreduce_coalesced = _packed("allreduce_coalesced")
    broadcast = _packed("broadcast")
    reduce = _packed("reduce")
    allgather = _packed("allgather")
    allgather_coalesced = _packed("allgather_coalesced")
    all_gather_single = _allgather_base = _packed("_allgather_base")
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _packed("allgather_into_tensor_coalesced")
    reduce_scatter = _packed("reduce_scatter")
    reduce_scatter_single = _reduce_scatter_base = _packed("_reduce_scatter_base")
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _packed("reduce_scatter_tensor_coalesced")
    gather = _packed("gather")
    scatter = _packed("scatter")
    alltoall = _packed("alltoall")
    all_to_all_single = alltoall_base = _packed("alltoall_base")
    send = _delegate("send")
    recv = _delegate("recv")
    recvAnysource = recv_anysource = _delegate("recv_anysource")
