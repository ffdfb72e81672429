"""This module makes and holds the transports of one rank: one for each lane and each set of ranks; see `Groups`.

A *lane* is a pipeline stage with its own worker thread and communicators (see comms/lanes.py). A transport is made when
it is first used, inside the ordered sequence of its lane, so all its members make it at the same point. Keys in the
store contain lane and members, so no two transports share one. `Groups.connect` makes the transports of a full bucket
in advance: the process that serves the store may have ended before the first bucket.

A new transport is a module of this folder: a class with the methods of `Transport`, and of the other protocols below as
far as it has something for them. It also has a place in

- `TRANSPORTS` of config.py, for its name (and `TCP_TRANSPORTS`, if it takes a number of connections); what is said of
  one transport alone compares `Config.transport_name` (links/quick_probe.py, bootstrap/nics.py, and
  `Config.__post_init__`, which refuses some options with it);
- `check_transport`, which says on which devices it can be used;
- `Groups._make`, which chooses for a set of ranks: NCCL for CUDA tensors, else shared memory for ranks of one node,
  and only for the others what `Config.transport_name` asks for;
- the table of bootstrap/failures.py, if it finds out by itself that a rank has ended;
- `leave_to_parent` of bootstrap/forks.py, if it has sockets, which a forked child must not hold open;
- `TRANSPORT_MODULES` of docs/capabilities.py, and the row of `transport` in docs/reference/hook.md;
- `PARSERS` of tests/comms/boundary/test_messages.py, if it parses bytes of other ranks; the table of threads.py and
  `THREADS` of tests/comms/bootstrap/test_thread_failures.py, if it has a thread;
- tests/comms/transport/test_waits.py, if it has a wait without a time limit; `OFF` of
  tests/comms/step/test_loaded_modules.py, as a job that does not ask for it does not load it.

Works are waited for in another thread than the one that issues them, several lanes at a time.

No other folder asks for its class (tests/test_layers.py): what differs is said by a protocol below.

Not asked of the transport, but decided by device and level: whether a phase is asynchronous (`executable` of
plan/schedule.py: all but shared memory), and by which library's costs a plan is chosen (`PlanChooser.library`).

Some things are of one class alone, and other transports do without: `Groups.disconnect` and `close` shut down and drain
gloo's connections, and close NCCL's communicators together; quick_probe.py measures links over gloo's `sendrecv`, which
it takes every `MeetsInPairs` to have; and `_with_sum_order` of run/programs.py refuses a plan that sums in the order of
gloo's rings on a transport that does not say `takes_sum_order`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import PrefixStore
from gradwire.comms.bootstrap.probe import FindExited, PeerWait
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.errors import PeerError
from gradwire.comms.lanes import Lane
from gradwire.comms.transport.torch_group import GlooTransport, connect_gloo
from gradwire.comms.transport.works import CLOSE_SECONDS, Aborted
from gradwire.compressors.base import Collective, Work

if TYPE_CHECKING:  # at run time loaded only if it is used
    from gradwire.comms.transport.nccl import NcclGroups, NcclTransport


class Transport(Protocol):
    """The collectives of plans and compressors over a fixed set of ranks, issued in the same order on all of them.

    Every tensor is contiguous, on the transport's device, and of the same numel and dtype on all ranks. It must stay
    alive and unread until the returned Work has been waited for.
    """

    @property
    def rank(self) -> int:
        """This rank's index in the group, 0 <= rank < size."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, tensor: Tensor, scale: float = 1.0) -> Work:
        """Replaces `tensor` by the sum of `scale * tensor` over the ranks, with the same bits on all ranks.

        If torch cannot allocate memory for the sum, `tensor` is left as it was.

        Args:
            tensor: Any shape; changed in place.
            scale: Factor on every rank's contribution; 1 for integers.
        """

    def reduce_scatter(self, tensor: Tensor, bounds: Sequence[int], scale: float = 1.0) -> Work:
        """Sums `scale * tensor` in place, so that `tensor[bounds[r]:bounds[r + 1]]` holds the sum on rank r.

        Args:
            tensor: 1-D; undefined outside this rank's slice afterwards.
            bounds: `size + 1` ascending offsets from 0 to `tensor.numel()`; empty slices are fine.
            scale: Factor on every rank's contribution.
        """

    def all_gather_slices(self, tensor: Tensor, bounds: Sequence[int]) -> Work:
        """Copies every rank's slice, as in `reduce_scatter`, to all ranks, in place.

        Args:
            tensor: 1-D; slices of the other ranks are overwritten.
            bounds: `size + 1` ascending offsets; rank r's slice is `tensor[bounds[r]:bounds[r + 1]]`.
        """

    def all_to_all(self, output: Tensor, source: Tensor) -> Work:
        """Sends the r-th of `size` equal parts of `source` (along dim 0) to rank r.

        Args:
            output: Overwritten with the parts that arrive, in rank order; of the shape of `source`.
            source: Parts to send, in rank order.
        """

    def all_gather(self, output: Tensor, source: Tensor) -> Work:
        """Fills `output` (numel = size * source.numel()) with every rank's `source`, in rank order."""

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Copies `tensor` of rank `root` to all ranks, in place.

        Args:
            tensor: Any shape; overwritten on all ranks but `root`.
            root: Index of the sending rank in the group.
        """


class SendsUnequal(Protocol):
    """A transport that can send messages of unequal sizes, for nodes with different numbers of ranks."""

    def exchange(
        self, output: Tensor, source: Tensor, output_splits: list[int], source_splits: list[int], largest_nbytes: int
    ) -> Work:
        """Sends runs of a flat tensor to the other ranks, and receives one from each.

        Args:
            output: 1-D; takes the runs that arrive, in rank order.
            source: 1-D; the runs to send, in rank order.
            output_splits: Elements that arrive from each rank, this one included.
            source_splits: Elements for each rank, this one included.
            largest_nbytes: Bytes of the largest message of any rank; the same number on all ranks.
        """


class IssuesTogether(Protocol):
    """A transport that can merge several collectives into fewer messages or kernels."""

    def issue_together(self, collectives: Sequence[Collective]) -> Work | None:
        """Issues the collectives as one, and returns its work.

        Returns:
            The work; None, with nothing issued, if issuing them one by one is better. The same on all ranks.
        """


@runtime_checkable
class Abortable(Protocol):
    """A transport whose waits can be ended by another thread."""

    def abort(self, reason: str) -> None:
        """Ends all waits, present and later ones, with an error.

        Thread safety: may be called from any thread.

        Args:
            reason: Text of the error.
        """


@runtime_checkable
class MeetsInPairs(Protocol):
    """A transport whose members can exchange bytes pair by pair, over connections for each direction."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def connect_both_ways(self) -> object:
        """Connects all members a second time, for messages to lower ranks; all of them call it."""

    def connect_for(self, nbytes: int) -> None:
        """Calls `connect_both_ways` if messages of `nbytes` need it; all members call it with the same number."""


@runtime_checkable
class Closable(Abortable, Protocol):
    """A transport with something to release: shared memory, or communicators of MPI."""

    def close(self) -> None:
        """Releases it. All members call it, in the order in which they were connected."""


FIRST_LANE: Lane = (0, 0)
"""Lane whose transports serve all lanes on CUDA, where collectives are issued in one order."""


def why_unusable(device: torch.device) -> str | None:
    """Returns why no transport takes tensors of a device, in words that continue the name of what is there; or None.

    Args:
        device: Device of gradients. CUDA is NVIDIA's and AMD's GPUs; Intel's (xpu) and Apple's (mps) are not taken.
    """
    if device.type in ("cpu", "cuda"):
        return None
    return (
        f"on {device}; wanted cpu or cuda (NVIDIA's and AMD's GPUs): no transport here takes tensors of other devices, "
        "so train there without gradwire"
    )


def check_transport(transport: str, device: torch.device | None = None) -> None:
    """Checks that this process can use a transport.

    Called before the ranks connect: a rank that raises later may be the one that serves the store.

    Args:
        transport: `auto`, `gloo`, `nccl` or `mpi`.
        device: Device of the gradients; None if it is not known yet.

    Raises:
        ValueError: The transport does not support the device.
        RuntimeError: `transport` is mpi, and mpi4py cannot be loaded or MPI does not support threads.
    """
    if device is not None:
        if (why := why_unusable(device)) is not None:
            raise ValueError(f"the gradients are {why}")
        if transport == "nccl" and device.type != "cuda":
            raise ValueError(f"`transport` is nccl but the gradients are on {device}; wanted gloo or auto")
        if transport == "gloo" and device.type == "cuda":
            raise ValueError(f"`transport` is gloo but the gradients are on {device}; wanted nccl or auto")
        if transport == "mpi" and device.type != "cpu":
            raise ValueError(f"`transport` is mpi but the gradients are on {device}; wanted nccl or auto")
    if transport == "mpi":
        from gradwire.comms.transport import mpi  # here: it is loaded where it is asked for

        mpi.load()


class _AbortState:
    """Returns the reason why this rank or another one has aborted; None if none has. Waits call it once a second.

    Transports hold this object and not their `Groups`: a reference cycle would keep both until the next garbage
    collection.

    Args:
        abort_reason: Returns the reason why another rank has aborted.

    Attributes:
        own: Reason why this rank has aborted; None if it has not.
    """

    def __init__(self, abort_reason: Aborted) -> None:
        self.own: str | None = None
        self._abort_reason = abort_reason

    def __call__(self) -> str | None:
        return self.own or self._abort_reason()


class Groups(dict[tuple[Lane, tuple[int, ...]], Transport]):
    """The transports of one rank: `groups[lane, members]` with the global ranks of the members, this one included.

    On CUDA all collectives are issued in one order, so all lanes of a set of ranks share one NCCL communicator. The set
    of all ranks uses the user's own process group if that is one of NCCL.

    Thread safety: `abort` and `disconnect` may be called from any thread. A transport is made by one thread: that of
    its lane, that of lane (0, 0) for a job that stays there, or the caller of `Communicator.connect`.

    Args:
        store: Store that all ranks share, with a prefix of its own; its waits do not block other threads.
        rank: Global rank of this process.
        device: Device of the tensors.
        same_node: Returns True if a set of ranks shares memory.
        transport: `auto`, `gloo`, `nccl` or `mpi`, as in `Config`.
        timeout: Time-out of every collective, and of connecting.
        abort_reason: Returns the reason why another rank has aborted; None while none has.
        interface: Network interface for gloo; None leaves the choice to gloo.
        nccl_groups: Names, global ranks and the user's own group, for CUDA.
        connections: Maps a round trip in seconds to the number of TCP connections for large messages; None: 1.
        ended: Says which ranks have ended, for those that wait for them to connect.
    """

    def __init__(
        self,
        store: PollingStore,
        rank: int,
        device: torch.device,
        same_node: Callable[[tuple[int, ...]], bool],
        transport: str,
        timeout: timedelta,
        abort_reason: Aborted,
        interface: str | None = None,
        *,
        nccl_groups: "NcclGroups | None" = None,
        connections: Callable[[float], int] | None = None,
        ended: FindExited | None = None,
    ) -> None:
        super().__init__()
        self._store = store
        self._rank = rank
        self._device = device
        self._transport = transport
        self._same_node = same_node
        self._timeout = timeout
        self._aborted = _AbortState(abort_reason)
        self._connect_gloo = partial(
            connect_gloo, timeout=timeout, abort_reason=self._aborted, interface=interface, connections=connections
        )
        self.ended = ended
        self._nccl = nccl_groups
        self._connecting: NcclTransport | None = None
        self._users: NcclTransport | None = None
        """Transport on the user's own group. Plans may not use it; `abort` aborts it in any case."""
        if self._nccl is not None and self._nccl.backend is not None:
            from gradwire.comms.transport import nccl

            members = tuple(range(self._nccl.size))
            in_switch = self._nccl.sums_in_switch(members)
            self._users = nccl.borrow(self._nccl.backend, rank, self._nccl.size, sums_in_switch=in_switch)
        self._closed = False
        self.drained = True
        """Whether gloo's threads have finished with all tensors; False after a `close` whose wait was too short."""

    def __missing__(self, key: tuple[Lane, tuple[int, ...]]) -> Transport:
        if self._closed:
            raise RuntimeError("gradwire is closed: close() was called, or its process group has been destroyed")
        lane, members = key
        serving = self._serving(lane)
        made = self._make(lane, members) if serving == lane else self[serving, members]
        self[key] = made
        return made

    def peer_wait(self, members: Sequence[int]) -> PeerWait:
        """Returns the liveness check for a wait of some ranks, this one among them, for example while they connect.

        Args:
            members: Global ranks that wait for each other.
        """
        return PeerWait(members, members.index(self._rank), self.ended, self._aborted)

    def connect(self, wanted: Mapping[tuple[Lane, tuple[int, ...]], bool], nbytes: int) -> None:
        """Connects the transports that buckets need and this rank is a member of, one after the other.

        Args:
            wanted: (Lane, global ranks) -> True if the members send each other parts of a bucket. The same on all
                ranks, in the same order: they would wait for each other in a circle otherwise.
            nbytes: Size of a bucket. Gloo connects its second group if a part, one member's share of it, has at least
                `LARGE_NBYTES` (256 KiB).

        Raises:
            RuntimeError: A rank did not join, has exited or has aborted; or gradwire is closed.
            OSError: Shared memory cannot be allocated or mapped.
        """
        own: dict[tuple[Lane, tuple[int, ...]], bool] = {}
        for (lane, members), sends_parts in wanted.items():
            if self._rank in members:
                key = self._serving(lane), members
                own[key] = own.get(key, False) or sends_parts
        if self._device.type == "cuda":
            from gradwire.comms.transport.launch_order import devices

            devices.prepare(several=len(own) > 1)
        for key, sends_parts in own.items():
            made = self[key]
            if sends_parts and isinstance(made, MeetsInPairs):
                made.connect_for(nbytes // made.size)

    def _serving(self, lane: Lane) -> Lane:
        """Returns the lane whose transport serves `lane`: the first one on CUDA, elsewhere itself."""
        return FIRST_LANE if self._device.type == "cuda" else lane

    def abort(self, reason: str) -> None:
        """Ends the waits of this rank, present and later ones, and of ranks that wait for it in shared memory or NCCL.

        NCCL's communicators are aborted all at once, in the background. A wait for one to connect ends, too; NCCL's own
        thread continues in the background.

        Thread safety: may be called from any thread.

        Args:
            reason: Reason, for the errors of the waits.
        """
        self._aborted.own = reason
        for group in [*self.values(), self._connecting, self._users]:
            if isinstance(group, Abortable):
                group.abort(reason)

    def disconnect(self) -> None:
        """Shuts down gloo's connections, so that collectives in flight on them fail at once, at both ends.

        Thread safety: may be called from any thread.
        """
        for group in list(self.values()):
            if isinstance(group, GlooTransport):
                group.disconnect()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Releases shared memory, connections and communicators. Later uses of a (lane, members) raise RuntimeError.

        NCCL's communicators are closed in the order in which they were made, which is the same on all ranks; each after
        all members have finished with it, unless this rank has aborted.

        Args:
            seconds: Longest wait for collectives in flight, in all.
        """
        self._closed = True
        # After a failure gloo's destructors would wait for collectives in flight.
        deadline = time.monotonic() + seconds
        if self._aborted.own is not None:
            self.disconnect()
            gloo = [group for group in list(self.values()) if isinstance(group, GlooTransport)]
            self.drained = all(group.drain(max(0.0, deadline - time.monotonic())) for group in gloo)
        for (lane, members), group in list(self.items()):
            if self._device.type != "cuda":
                if isinstance(group, Closable):
                    group.close()
            elif lane == FIRST_LANE:
                self._close_nccl(lane, members, max(0.0, deadline - time.monotonic()))
        self.clear()

    def _close_nccl(self, lane: Lane, members: tuple[int, ...], seconds: float) -> None:
        """Closes one communicator of NCCL, after all members have finished with it or `seconds` are over."""
        from gradwire.comms.transport.launch_order import devices

        group = cast("NcclTransport", self[lane, members])
        together = self._store.below(f"end/{self._name_of(lane, members)}") if self._aborted.own is None else None
        group.close(seconds, together)
        devices.leave(group)

    def _make(self, lane: Lane, members: tuple[int, ...]) -> Transport:
        """Returns a connected transport: NCCL on CUDA, shared memory in a node; else MPI if it was chosen, or gloo.

        Args:
            lane: Pipeline stage (phase, step) whose collectives it runs; a part of its name alone, so that stages in
                flight at once have connections of their own.
            members: Global ranks, ascending, this one among them. If all are on this rank's node and the device is a
                CPU, they use shared memory.
        """
        name = self._name_of(lane, members)
        index, size = members.index(self._rank), len(members)
        if self._device.type == "cuda":
            return self._make_nccl(name, members)
        if self._same_node(members):
            from gradwire.comms.transport.shm import ShmGroup

            peer_wait = self.peer_wait(members)
            return ShmGroup.create(
                self._store,
                index,
                size,
                key=f"shm/{name}",
                timeout=self._timeout,
                peer_wait=peer_wait,
                members=members,
            )
        if self._transport == "mpi":
            from gradwire.comms.transport import mpi  # here: it is loaded where it is asked for

            store, wait = PrefixStore(f"mpi/{name}", self._store), partial(self.peer_wait, members)
            return mpi.connect(store, index, size, self._timeout, self._aborted, wait)
        store = PrefixStore(f"gloo/{name}", self._store)
        return self._connect_gloo(store, index, size, peer_wait=partial(self.peer_wait, members))

    @staticmethod
    def _name_of(lane: Lane, members: tuple[int, ...]) -> str:
        return f"{lane[0]}.{lane[1]}/{'-'.join(map(str, members))}"

    def _make_nccl(self, name: str, members: tuple[int, ...]) -> "NcclTransport":
        """Returns a connected NCCL transport; `abort` ends the connecting as well."""
        from gradwire.comms.transport import nccl
        from gradwire.comms.transport.launch_order import devices

        shared = self._nccl or nccl.NcclGroups(size=0)
        index, size = members.index(self._rank), len(members)
        if self._users is not None and members == tuple(range(shared.size)):
            made = self._users
        else:
            ranks = shared.global_ranks
            made = nccl.connect(
                PrefixStore(f"nccl/{name}", self._store.plain),
                index,
                size,
                self._timeout,
                name=f"gradwire/{shared.name}/{nccl.describe_ranks(members)}",
                global_ranks=[ranks[member] for member in members] if ranks else members,
                max_ctas=nccl.INTER_NODE_CTAS if shared.between_nodes(members) else None,
                sums_in_switch=shared.sums_in_switch(members),
            )
        self._connecting = made
        try:
            # Only after `_connecting` is set: an `abort` in between has seen it, one before is seen here.
            if self._aborted.own is not None:
                raise PeerError(self._aborted.own)
            made.connect(self._device, self._timeout)
        except BaseException as error:
            made.abort(f"NCCL could not connect ranks {nccl.describe_ranks(members)}: {error}")  # ends torch's threads
            raise
        finally:
            self._connecting = None
        devices.join(made, self._device)
        return made
