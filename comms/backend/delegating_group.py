"""A process group in Python around one of torch's own, which runs every collective that it does not run itself.

Torch calls a group from C++ as well: functional collectives (DTensor, torch.compile) and DDP's reducer do. Its
trampoline takes the GIL, looks for a method in Python and, where there is none, runs C++'s own while it holds the GIL.
That can wait for ever (seen on torch 2.13): gloo's queue has a mutex, and a thread of gloo holds it while it frees a
work to which nothing else refers; the work's tensors have Python objects, so freeing them takes the GIL. Torch's
Python bindings release the GIL. So every method that the trampoline knows exists here, and calls the inner group's
binding.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from gradwire.comms.backend.arguments import WHOLE_AND_PART, check, check_message, reduces, written_and_read
from gradwire.comms.backend.inner_launches import InnerLaunches
from gradwire.comms.backend.strided import Packing, tensors_in
from gradwire.comms.backend.work import FutureWork, PackedWork, WatchedWork
from gradwire.comms.bootstrap.compat import BackendWork, outside_graphs
from gradwire.comms.communicator import Communicator
from gradwire.comms.transport.works import WAIT_MARGIN, Waiting

log = logging.getLogger("gradwire")

MESSAGES = ("send", "recv", "recv_anysource")
"""Point-to-point methods, whose waits are not cut into slices: gloo closes all connections of the group after a wait
that times out. Such a wait ends when its connection does, and a rank that learns of a failure shuts its connections
down."""

KEEPS_TIMEOUT = (
    "changes the timeout of what gloo or NCCL runs; what gradwire runs itself keeps the one that the group was made "
    "with: give `timeout=` to init_process_group or new_group"
)

RUNS_NO_HOOKS = "registers a hook that is never called: gradwire's groups run no hooks of torch's"


def _collective(name: str) -> Callable[..., dist.Work]:
    """Returns a method that checks the arguments of a collective, and runs it in the group itself or in the inner one.

    The group itself is asked by `own_work`, unless the call has keyword arguments. The method raises ArgumentError if
    `arguments.check` refuses the call.

    Args:
        name: Name of the inner group's method for the collective.
    """

    @outside_graphs
    def call(group: "DelegatingGroup", *arguments: object, **named: object) -> dist.Work:
        check(name, group.size(), arguments, named)
        work = None if named else group.own_work(name, arguments)
        return work or _pass_on(group, name, arguments, named)

    return call


def _point_to_point(name: str) -> Callable[..., dist.Work]:
    """Returns a method that sends or receives one message: `arguments.check_message`, then the inner group's method.

    Args:
        name: Name of the inner group's method, one of `MESSAGES`.
    """

    @outside_graphs
    def call(group: "DelegatingGroup", *arguments: object, **named: object) -> dist.Work:
        check_message(name, group.size(), arguments, named)
        return _delegate(group, name, arguments, named)

    return call


def _pass_on(
    group: "DelegatingGroup", name: str, arguments: Sequence[object], named: Mapping[str, object]
) -> dist.Work:
    """Calls a collective of the inner group, with contiguous copies in place of CPU tensors that gloo cannot take.

    Args:
        group: The group whose inner group runs the collective.
        name: Name of the inner group's method.
        arguments: Positional arguments of the call.
        named: Keyword arguments of the call.

    Returns:
        The work; its end copies the results back into the outputs if copies of them were sent.
    """
    moves, flat = not reduces(name), name.startswith(WHOLE_AND_PART)
    written, read = Packing(moves, flat), Packing(moves, flat)
    positional = [(read if place else written).pack(argument) for place, argument in enumerate(arguments)]
    by_name = {key: (read if key.startswith("input") else written).pack(argument) for key, argument in named.items()}
    first = next(iter(tensors_in([*positional, *by_name.values()])), None)
    device = None if first is None else first.device
    work = group.inner_launches.issue(lambda: _delegate(group, name, positional, by_name), device)
    if not written.changes:
        return work
    outputs = tensors_in(written_and_read(arguments, named)[0])

    def finish() -> list[Tensor]:
        written.copy_back()
        return outputs

    return group.issued(PackedWork(work, finish))


def _delegate(
    group: "DelegatingGroup", name: str, arguments: Sequence[object], named: Mapping[str, object]
) -> dist.Work:
    """Calls a method of the inner group as it is.

    Args:
        group: The group whose inner group is called.
        name: Name of the inner group's method.
        arguments: Positional arguments of the call.
        named: Keyword arguments of the call.

    Returns:
        Torch's work; on CPU tensors, if the group has a communicator, a `WatchedWork` around it, whose `wait` also
        ends when another rank reports a failure, and has a deadline.
    """
    work: dist.Work = getattr(group.inner, name)(*arguments, **named)
    communicator = group.communicator
    first = next(iter(tensors_in([*arguments, *named.values()])), None)
    on_cpu = not torch.cuda.is_available() if first is None else first.device.type == "cpu"  # a barrier has none
    if communicator is None or not on_cpu:
        return work

    def wait(seconds: float | None) -> None:
        issued = cast(BackendWork, work)
        if name in MESSAGES:
            limit = communicator.config.timeout if seconds is None else timedelta(seconds=seconds)
            message, members = Waiting(issued, None, limit), range(group.size())
            communicator.run_collective(name, lambda: message, members, refusable=True)
        else:
            communicator.run_collective(name, lambda: issued, seconds=seconds, refusable=True)

    return WatchedWork(work, wait)


def _warned(name: str, what: str) -> Callable[..., None]:
    """Returns a method that calls torch's own of the same name, after a warning of what that does not reach here.

    Args:
        name: Name of the method.
        what: End of the warning's sentence, which begins with the name.
    """

    def call(group: "DelegatingGroup", *arguments: object) -> None:
        log.warning("`%s` of a process group of gradwire's %s", name, what)
        getattr(dist.ProcessGroup, name)(group, *arguments)

    return call


class DelegatingGroup(dist.ProcessGroup):
    """Delegates every collective, under all its names in torch 2.13 to 2.15, to one of torch's groups.

    CPU tensors that are not contiguous are sent as contiguous copies.

    Args:
        inner: Torch's group of the same ranks, with backends for all devices.

    Attributes:
        inner: Torch's group, to which collectives are delegated.
        inner_launches: Order of the collectives that NCCL runs for `inner`, among gradwire's own.
        timeout: Timeout of a collective.
        communicator: Communicator of the ranks for CPU tensors, which reports failures to all ranks, also to those that
            wait for the inner group. None leaves failures to torch.
    """

    def __init__(self, inner: dist.ProcessGroup) -> None:
        # The stubs know the form with a store alone, for which torch makes no trampoline.
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        self.inner_launches = InnerLaunches(inner)
        self.timeout = default_pg_timeout
        self.communicator: Communicator | None = None
        self._outstanding: deque[dist.Work] = deque()

    def issued(self, work: dist.Work) -> dist.Work:
        """Registers a collective that this rank has issued and gradwire completes, so that `barrier` waits for it.

        Args:
            work: Work of the collective, in flight or done.

        Returns:
            The same work.
        """
        while self._outstanding and self._outstanding[0].is_completed():
            self._outstanding.popleft()
        self._outstanding.append(work)
        return work

    def own_work(self, name: str, arguments: Sequence[object]) -> dist.Work | None:
        """Starts a collective that the group runs itself; this base class runs none.

        Args:
            name: Name of the inner group's method.
            arguments: Positional arguments of the call, which has no others.

        Returns:
            The work, in flight; None if the inner group shall run the collective.
        """
        return None

    @outside_graphs
    def barrier(self, *arguments: object, **named: object) -> dist.Work:
        """Waits on the host for the collectives of this group that this rank has issued, then starts a barrier.

        Args:
            arguments: Positional arguments of the inner group's barrier.
            named: Keyword arguments of the inner group's barrier.

        Returns:
            The work of the inner group's barrier, which is done when all ranks have called it.

        Raises:
            RuntimeError: A collective failed while it was waited for, or the issued ones are not done within the
                group's timeout and `WAIT_MARGIN`.
        """
        deadline = time.monotonic() + (self.timeout + WAIT_MARGIN).total_seconds()
        while self._outstanding:
            work = self._outstanding.popleft()
            if work.is_completed():  # an error is raised by its own `wait`
                continue
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            if isinstance(work, FutureWork):
                work.wait_on_host(left)
            else:
                work.wait(left)
        return _delegate(self, "barrier", arguments, named)

    allreduce = _collective("allreduce")
    allreduce_coalesced = _collective("allreduce_coalesced")
    broadcast = _collective("broadcast")
    reduce = _collective("reduce")
    allgather = _collective("allgather")
    allgather_coalesced = _collective("allgather_coalesced")
    all_gather_single = _allgather_base = _collective("_allgather_base")
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _collective("allgather_into_tensor_coalesced")
    reduce_scatter = _collective("reduce_scatter")
    reduce_scatter_single = _reduce_scatter_base = _collective("_reduce_scatter_base")
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _collective("reduce_scatter_tensor_coalesced")
    gather = _collective("gather")
    scatter = _collective("scatter")
    alltoall = _collective("alltoall")
    all_to_all_single = alltoall_base = _collective("alltoall_base")
    send = _point_to_point("send")
    recv = _point_to_point("recv")
    recvAnysource = recv_anysource = _point_to_point("recv_anysource")
    # Since torch 2.15 `dist.set_timeout`, and hooks that C++ runs around its own collectives.
    set_timeout = _warned("set_timeout", KEEPS_TIMEOUT)
    register_pre_hook = _warned("register_pre_hook", RUNS_NO_HOOKS)
    register_post_hook = _warned("register_post_hook", RUNS_NO_HOOKS)
