"""The communicator: connected ranks that all-reduce flat tensors, each by the cheapest plan.

It owns the placement of the ranks, the plans, the transports and the executor. The hook, the process group "gradwire",
FSDP2 and `Outer` send all of their tensors through one.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms.bootstrap.addresses import own_addresses
from gradwire.comms.bootstrap.compat import (
    BackendWork,
    PrefixStore,
    Store,
    blames_connection,
    is_known,
    nccl_backend_of,
    store_of,
    timeout_of,
)
from gradwire.comms.bootstrap.failure_reporter import CollectiveError, FailureReporter, StoreFailureReporter
from gradwire.comms.bootstrap.forks import leave_to_parent
from gradwire.comms.bootstrap.placement import PeerInfo, cluster_of
from gradwire.comms.bootstrap.probe import FindExited, PeerTable, PeerWait, ProbeServer
from gradwire.comms.bootstrap.rendezvous import PeerInfos, exchange
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.config import NIC_PER_RANK, Config
from gradwire.comms.environment import job_is_on_one_host
from gradwire.comms.errors import PeerError, UnfinishedError
from gradwire.comms.lanes import Lane
from gradwire.comms.plan.plan import Plan, describe_plans, summarise_plans
from gradwire.comms.plan.rank_plans import RankPlans
from gradwire.comms.report import Report
from gradwire.comms.run.all_reduces import AllReduce, Bucket, FutureTensor
from gradwire.comms.run.executor import Executor
from gradwire.comms.transport.groups import Groups, Transport, check_transport
from gradwire.comms.transport.works import Waiting, wait_in_slices
from gradwire.compressors.base import Compressor, Layout, Work, traits_of
from gradwire.topology.cluster import Cluster
from gradwire.topology.host_summary import Hardware

if TYPE_CHECKING:  # each is loaded where it is asked for
    from gradwire.comms.bootstrap.liveness import LivenessRing
    from gradwire.comms.migration import StateLayouts
    from gradwire.comms.run.stream_executor import StreamExecutor
    from gradwire.comms.streams import Clock
    from gradwire.comms.transport.nccl import NcclGroups

    MakesKind = Callable[[], type[StreamExecutor]]

SPARSE_PHASE = 20
"""First index of the steps of sparse sums in reports; larger than that of any phase of a plan."""

_of_parent: "list[Communicator]" = []
"""In a forked child, the communicators of its parent."""


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """Replaces how a communicator reports a failed rank, so that training can go on without that rank.

    Attributes:
        reporter: Receives the failures that this communicator sees.
        polling: Wraps a store so that each wait for a key ends when a rank of the communicator fails.
        peer_infos: Hardware and settings of each rank, if they are known already; None lets the ranks exchange them.
        on_cuda: Imports and returns the class of the executor on CUDA; None takes `StreamExecutor`.
    """

    reporter: FailureReporter
    polling: Callable[[Store], PollingStore]
    peer_infos: PeerInfos | None = None
    on_cuda: "MakesKind | None" = None


class Communicator:
    """All-reduces flat tensors over a group of ranks by the cheapest plan.

    Invariant: all ranks call the same methods in the same order.

    Thread safety: one thread starts all-reduces; `abort` and `abandon` may be called from any thread.

    Args:
        store: Store that all ranks of the group share; keys begin with `name`.
        rank: This rank in the group.
        size: Number of ranks.
        device: Device of the tensors.
        config: Configuration; must be equal on all ranks.
        name: Name, unique among the communicators of this store and equal on all ranks.
        compressor: Compressor for one phase of tensors that have a layout; None if all is exact.
        group: Process group of the same ranks in the same order. On CUDA its NCCL backend, if it has one, runs the
            collectives over all ranks; it stays the user's, and is aborted only if gradwire aborts.
        global_ranks: Ranks of the group in the default group, for logs; None asks torch, which knows registered groups.
        reporter: Failure reporter shared with other groups that wait for this one; None makes one for this group.
        failure_policy: Replaces this communicator's own detection and report of failed ranks; its reporter is used
            in place of `reporter`.
        kernels: Name of the compressor's kernels, which must be equal on all ranks; empty if it does not matter.

    Attributes:
        rank: This rank in the group.
        device: Device of the tensors; a CUDA device has an index.
        config: Configuration, with the time-out of the process group if it has none of its own.
        compressor: Compressor for one phase of tensors that have a layout; None if all is exact. One that is
            there need not save bytes: the wider sum of `sum_dtype` is one, too (`CompressorTraits.is_sum`).
        peer_infos: Host, devices and settings of every rank.
        plain_store: Store for messages between these ranks, without keys of an earlier start of them.
        rank_plans: Plans by bucket size, and the link rates by which they are chosen.
        executor: Object that runs the plans: threads on a CPU, streams on CUDA.

    Raises:
        RuntimeError: A rank did not join within the time-out.
        ValueError: A rank joined with another world size or configuration.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        config: Config,
        *,
        name: str,
        compressor: Compressor | None = None,
        group: dist.ProcessGroup | None = None,
        global_ranks: Sequence[int] | None = None,
        reporter: FailureReporter | None = None,
        failure_policy: FailurePolicy | None = None,
        kernels: str = "",
    ) -> None:
        # Determine the device and the timeout.
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        check_transport(config.transport_name, device)
        self._kernels = kernels
        config = config.with_timeout_of(timeout_of(group, device))
        self.rank = rank
        self.device = device
        self.config = config
        self.compressor = compressor

        def polling(plain: Store) -> PollingStore:
            return failure_policy.polling(plain) if failure_policy else PollingStore(plain, config.timeout, ranks=size)

        # Exchange placement, hardware and settings with the other ranks, unless they are known.
        own = polling(PrefixStore(f"gradwire/{name}", store))
        server: ProbeServer | None = None
        self._leave: Callable[[], object] = lambda: None
        if failure_policy is not None and failure_policy.peer_infos is not None:
            peer_infos = failure_policy.peer_infos
        else:
            server = ProbeServer.open()
            try:
                peer_info = self._peer_info(server, own.host, size)
                peer_infos = exchange(own, peer_info, config.timeout, server, _find_exited_of(group, global_ranks))
            except BaseException:
                server.close()
                raise
            self._leave = weakref.finalize(self, _leave, server, peer_infos.generation, rank)
        self.peer_infos = peer_infos
        """Host, devices and settings of every rank; its `generation` is unique to this start of these ranks."""
        self.plain_store = PrefixStore(peer_infos.generation, own.plain)
        """Store for messages between these ranks, without keys of an earlier generation."""
        # Plans, and how failed ranks are reported.
        store = polling(self.plain_store)
        cluster = cluster_of(peer_infos, config)
        self.rank_plans = RankPlans(cluster, rank, device.type, config, compressor)
        peer_table = None if server is None else _peer_table(peer_infos, cluster, rank, server)
        if failure_policy is not None:
            reporter = failure_policy.reporter
        elif reporter is None:
            reporter = StoreFailureReporter(store, rank, size, peer_table=peer_table)
        self._reporter = reporter
        # Transports, which connect later, and the executor.
        interface = None
        if config.nics == NIC_PER_RANK:
            from gradwire.comms.bootstrap.nics import interface_of  # here: usually gloo chooses it

            interface = interface_of(peer_infos, rank, config)
        self._groups = Groups(
            store,
            rank,
            device,
            cluster.share_a_node,
            config.transport_name,
            config.timeout,
            reporter.abort_reason,
            interface,
            nccl_groups=_nccl_groups(name, cluster, device, group, global_ranks) if device.type == "cuda" else None,
            connections=_connections(config, self.rank_plans),
            ended=None if peer_table is None else peer_table.exited,
        )
        # On CUDA nothing may connect during a step. CPU groups that a session has not connected connect at first use.
        self._connected = device.type != "cuda"
        on_cuda = None if failure_policy is None else failure_policy.on_cuda
        self.executor = self._make_executor(f"gradwire {name}", cluster, on_cuda)
        self._ring = _ring(self.executor, store, rank, size, reporter) if failure_policy is None else None
        self._state = _state_layouts(compressor, loaded=False)
        leave_to_parent(self)

    def _peer_info(self, server: ProbeServer, store_host: str | None, size: int) -> PeerInfo:
        """Returns what this rank publishes: hardware, settings that must be equal, and its probe address.

        Args:
            server: Server that answers the probes of other ranks.
            store_host: Host of the store, by which this rank's own addresses are chosen; None if it is not known.
            size: Number of ranks.
        """
        config = self.config
        on_one_host = config.host is None and self.device.type == "cpu" and job_is_on_one_host()
        needless = (size == 1 or on_one_host) and not config.elastic and config.nics != NIC_PER_RANK
        unread = Hardware(None, None, None) if needless else None  # no other host: the hardware need not be read
        own = PeerInfo.here(self.rank, size, config, self.device, known=unread)
        if self._kernels:
            own = replace(own, shared=own.shared | {"kernels": self._kernels})
        return replace(own, port=server.port, addresses=tuple(own_addresses(store_host)))

    def _make_executor(self, name: str, cluster: Cluster, on_cuda: "MakesKind | None") -> Executor:
        """Makes the executor of this device: one of side streams on CUDA, one of worker threads on a CPU.

        Args:
            name: Name of its threads.
            cluster: Placement of the ranks.
            on_cuda: Imports and returns the class of the executor on CUDA; None takes `StreamExecutor`.
        """
        device, common = self.device, (self._groups, self.rank, cluster, self.compressor, self._reporter)
        if device.type == "cuda":
            from gradwire.comms.bootstrap.deadline import Deadline
            from gradwire.comms.run.stream_executor import StreamExecutor
            from gradwire.comms.streams import DeviceClock, SideStreams

            # CPU transports have a time-out of their own.
            streams, deadline = SideStreams(device), Deadline(self.config.timeout, device)
            kind = StreamExecutor if on_cuda is None else on_cuda()
            return kind(*common, streams, DeviceClock(device), deadline)
        from gradwire.comms.run.lane_executor import LaneExecutor

        return LaneExecutor(name, *common)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.peer_infos)

    @property
    def hostnames(self) -> tuple[str, ...]:
        """Host name of each rank."""
        return tuple(peer_info.host[0] for peer_info in self.peer_infos)

    @property
    def ended(self) -> FindExited | None:
        """Function that takes ranks, and returns those of them that have exited or left this communicator.

        None after the ranks of an elastic job have changed: then a ring of heartbeats finds them.
        """
        return self._groups.ended

    def peer_wait(self) -> PeerWait:
        """Returns a new check for failed ranks of this communicator, which a blocking wait calls from time to time.

        It is for operations that report no failures to the other ranks themselves, such as making gloo groups. When it
        finds a rank that has exited, it makes the other ranks abort with the reason, even without the store.
        """
        check = self._groups.peer_wait(range(self.size))
        check.notify = partial(self._reporter.signal_abort, directly=True)
        return check

    @property
    def clock(self) -> "Clock":
        """Clock of the device: the host's on a CPU, events on CUDA."""
        return self.executor.stats.clock

    @property
    def cluster(self) -> Cluster:
        """Placement of the ranks, with the link rates that plans are chosen by."""
        return self.rank_plans.cluster

    def connect(self, nbytes: int, sparse_nbytes: int = 0) -> None:
        """Connects the transports that buckets of `nbytes` need, and waits for all ranks, which call it at one point.

        The point is one of the sequence of collectives, after the plans are fixed. Sets of ranks are connected in the
        same order everywhere, so that uneven nodes do not wait for each other in a cycle. A plan chosen later connects
        further transports at its first bucket.

        Args:
            nbytes: Bytes of a bucket; any number if the plans are fixed.
            sparse_nbytes: Bytes of the largest parameter whose gradient is sparse; 0 if there is none.

        Raises:
            CollectiveError: A rank did not join within the time-out, this torch has no NCCL, or any other reason; it is
                reported to the other ranks.
        """
        executor = self.executor
        before = executor.activity
        executor.activity = "connecting NCCL" if self.device.type == "cuda" else "connecting the ranks"
        failed: str | None = None
        try:
            wanted = self.rank_plans.groups(nbytes)
            if sparse_nbytes:
                from gradwire.comms.run.sparse import groups_of

                wanted |= groups_of(self.cluster, self.config.plan_name)
            # A rank may send all rows of a sparse gradient to each other one.
            self._groups.connect(wanted, max(nbytes, sparse_nbytes * self.size))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must learn of it
            executor.interrupt(error.with_traceback(None))
            failed = f"{error}"
            if self.device.type != "cuda":  # lanes have nothing to interrupt, so the other ranks do not know of it yet
                self._reporter.signal_abort(failed)
        finally:
            executor.activity = before
        if failed is not None:
            failure = executor.failure
            raise CollectiveError(*((str(failure), failure.missing) if failure else (failed, ())))  # no frame is kept
        self._connected = True

    def all_reduce(
        self, flat: Tensor, *, scale: float = 1.0, layout: Layout | None = None, flush: bool = False
    ) -> FutureTensor:
        """Starts summing `scale * flat` over all ranks, in place, and returns a future of the result.

        All ranks start the same all-reduces in the same order. The first one on CUDA connects the ranks, and waits for
        them, if `connect` was not called.

        Args:
            flat: 1-D and contiguous, on this communicator's device, of the same size and dtype on all ranks. Must not
                be used until the future is done.
            scale: Factor on every rank's contribution, applied before any conversion to a narrower dtype. Must be 1 if
                `flat` holds integers.
            layout: Places of the parameters, which together cover all of `flat`. With it and a compressor, one phase is
                compressed.
            flush: Whether to send uncompressed, with the compressor's residuals added.

        Returns:
            A future whose value is `flat`. On a CPU, if the collective fails, waiting raises a RuntimeError with the
            text of the CollectiveError. On CUDA waiting makes the current stream wait, not the host, and a failure is
            raised by a later call. Callbacks of the future must not issue collectives.

        Raises:
            ValueError: `flat` is not flat or on another device, `layout` has another size, or integers have a factor.
            CollectiveError: On CUDA: an earlier all-reduce has failed or, if `connect` was not called, the ranks could
                not connect.
            RuntimeError: The communicator is closed.
        """
        bucket = Bucket.of(flat, layout)
        self.start(AllReduce((flat,), layout, (bucket,)), scale=scale, flush=flush)
        return bucket.result()

    def start(
        self, all_reduce: AllReduce, *, scale: float = 1.0, after: float = 1.0, flush: bool = False, hold: bool = False
    ) -> None:
        """Starts an all-reduce and returns at once; the futures of its buckets are completed when it ends.

        On CUDA it first connects, and waits for that, if `connect` was not called. If the layout of a compressed bucket
        has changed, the compressor's state is moved between the ranks of the node before.

        Args:
            all_reduce: The tensors and their buckets.
            scale: Factor on every rank's contribution; 1 for integers.
            after: Factor on the sum; 1 for integers.
            flush: True sends uncompressed, with the compressor's residuals added.
            hold: Whether its last phases may be deferred until the next all-reduce or `Executor.release`, on CUDA only:
                that keeps the links between the nodes busy.

        Raises:
            ValueError: A tensor is not flat, on another device, or does not fit its layout, or integers have a factor.
            CollectiveError: On CUDA: an earlier all-reduce has failed or, if `connect` was not called, the ranks could
                not connect.
            RuntimeError: The communicator is closed.
        """
        # Buckets of a dtype that the compressor takes keep their layout; all others are exact.
        state, dtype, numel = self._state, all_reduce.parts[0].dtype, 0
        layout = all_reduce.layout if state is not None and (state.dtypes is None or dtype in state.dtypes) else None
        for part in all_reduce.parts:
            _check(part, scale * after, self.device)
            numel += part.numel()
        if not self._connected:
            self.connect(numel * dtype.itemsize)
        self.executor.stats.all_reduces += all_reduce.counted
        if all_reduce.counted:
            # Planned once for each bucket size; later buckets of that size take one dictionary access.
            rank_plan = self.rank_plans.planned.get((numel, dtype, layout))
            if rank_plan is None:
                rank_plan = self.rank_plans.plan_for(numel, dtype, layout)
        else:
            rank_plan = self.rank_plans.unlisted(numel, dtype)
        # Move compression state if the parameters of this bucket have moved since it was last reduced.
        if layout is not None and state is not None and layout not in state.migrated and state.has_moved(layout):
            if not state.as_saved:
                _share(self, layout, whole=not rank_plan.shares_ownership)
            self.executor.migrate(layout, rank_plan, self.device, ask=state.asks)
        self.executor.start(all_reduce, rank_plan, scale, flush, hold=hold, after=after)

    def start_sparse(self, bucket: Bucket, *, scale: float = 1.0, as_dense: bool | str = "auto") -> None:
        """Starts an all-reduce of a sparse tensor: inside the nodes first, or with plan `flat` over all ranks at once.

        All ranks start the same all-reduces in the same order. On a CPU this returns at once, and the bucket's future
        raises what fails later. On CUDA it returns when everything has been issued, and wherever rows may be sent the
        host waits for the other ranks' numbers of rows.

        Args:
            bucket: Bucket of a floating-point tensor in layout torch.sparse_coo, of the same shape and dtype on all
                ranks. Its future is completed with a new, coalesced tensor.
            scale: Factor on every rank's contribution.
            as_dense: Whether a dense tensor is sent between nodes, not the rows; "auto" if that takes fewer bytes.

        Raises:
            TypeError: The tensor has another layout, or is not floating-point.
            RuntimeError: The communicator is closed; or, a torch.OutOfMemoryError, the CUDA device has no memory left.
            CollectiveError: On CUDA: an earlier all-reduce has failed, or this one could not be issued.
        """
        from gradwire.comms.run.sparse import BETWEEN, LANES, Sharing, check_sparse, sum_sparse

        check_sparse(bucket.flat)
        sharing = Sharing.of(self.cluster, self.rank, self.config.plan_name)
        names, inside = self.cluster.level_names, self.cluster.level_names[0]
        between = "all ranks" if self.config.plan_name == "flat" or len(names) == 1 else names[1]

        def count(place: int, op: str, logical_nbytes: int, wire_nbytes: float) -> None:
            level = between if place == BETWEEN else inside
            self.executor.stats.add(SPARSE_PHASE + place, f"sparse {op}", level, logical_nbytes, wire_nbytes)

        self.executor.stats.all_reduces += 1
        steps = sum_sparse(bucket.flat, self._groups, self.rank, sharing, scale=scale, as_dense=as_dense, count=count)
        self.executor.start_steps(bucket, "the sum of a sparse gradient", steps, LANES)

    def exclusive(self) -> AbstractContextManager[None]:
        """Makes a context for reading or changing a compressor's state outside of an all-reduce.

        On CUDA its work runs on a side stream, after all earlier all-reduces and before all later ones. Neither the
        host nor the stream that computes waits for it: call `sync_current_stream` before that stream uses what it has
        changed. Does nothing on a CPU, where the caller has to wait for all all-reduces first.

        Raises:
            CollectiveError: On CUDA: an all-reduce has failed, or another rank has exited; the block does not run.
        """
        return self.executor.exclusive()

    def sync_current_stream(self) -> None:
        """Makes the current CUDA stream, not the host, wait for everything issued so far; does nothing on a CPU."""
        self.executor.sync_current_stream()

    def run(self, flat: Tensor, plan: Plan) -> FutureTensor:
        """Runs a given plan on a tensor, for measurements, and returns at once.

        Args:
            flat: 1-D, contiguous, on this communicator's device; overwritten with what the plan makes of it, which is
                not always the sum.
            plan: Plan, the same on all ranks.

        Returns:
            Future whose value is `flat`.

        Raises:
            ValueError: `flat` is not flat or on another device.
        """
        _check(flat, 1.0, self.device)
        bucket = Bucket.of(flat)
        self.executor.start(
            AllReduce((flat,), None, (bucket,)), self.rank_plans.along(flat.numel(), plan), 1.0, flush=False
        )
        return bucket.result()

    def transport(self, lane: Lane, members: tuple[int, ...]) -> Transport:
        """Returns the transport between some ranks, for a caller that issues collectives itself.

        The first call connects it, unless that has been done already, and waits for the other members.

        Args:
            lane: Key of the transport besides its members, see `lanes.Lane`: one that no plan uses, so that the
                transport is the caller's own, for one thread at a time. While nothing is in flight, for measurements,
                also one that plans use.
            members: Ranks of this communicator, with this one, in the same order on all of them.

        Raises:
            RuntimeError: The members could not connect.
        """
        return self._groups[lane, members]

    def run_collective(
        self,
        where: str,
        issue: Callable[[], Work | BackendWork],
        members: Sequence[int] = (),
        *,
        seconds: float | None = None,
        refusable: bool = False,
    ) -> None:
        """Runs one collective in the calling thread, on a CPU, and waits for it.

        Args:
            where: Name of the collective, for errors.
            issue: Issues it on a `transport`, or on a process group of torch.
            members: Ranks of the transport; empty for torch's group, whose waits are interrupted by failure reports.
            seconds: Longest wait for torch's group; None takes the group's time-out.
            refusable: Whether the arguments are a user's. An error that concerns no connection is then raised as it is,
                and the group stays usable.

        Raises:
            CollectiveError: The collective failed, or another rank has aborted; the group cannot be used afterwards.
            UnfinishedError: `seconds` have passed, and the collective is still in flight.
            RuntimeError: It was refused, if it is `refusable`.
        """
        try:
            work = issue()
            if not members:
                on_torch = cast(BackendWork, work)
                if seconds is not None:
                    if not wait_in_slices(on_torch, timedelta(seconds=seconds), self._reporter.abort_reason):
                        raise UnfinishedError(f"{where} is not done within `timeout` ({seconds:g} s)")
                    return
                work = Waiting(on_torch, self._reporter.abort_reason, self.config.timeout)
            work.wait()
        except UnfinishedError:
            raise
        except Exception as error:
            if refusable and not isinstance(error, PeerError | MemoryError) and not blames_connection(error):
                raise  # on every rank, or the others' wait ends by their time-out
            raise self.executor.failure_handler.fail(where, members, error) from None

    def sendrecv(self, other: int, nbytes: int) -> float:
        """Exchanges bytes with another rank, for measurements; both ranks call it while nothing else is in flight.

        Args:
            other: Rank on another node.
            nbytes: Bytes that each sends to the other, rounded up to a multiple of 4.

        Returns:
            Seconds that the exchange took, on a CPU. On CUDA the host does not wait for the device, so they are only
            the time to issue the exchange.
        """
        transport = self._groups[(0, 0), tuple(sorted((self.rank, other)))]
        source = torch.zeros(2, -(-nbytes // 4), dtype=torch.float32, device=self.device)
        received = torch.empty_like(source)
        began = time.perf_counter()
        transport.all_to_all(received, source).wait()
        return time.perf_counter() - began

    def report(self, steps: int = 0) -> Report:
        """Returns what was sent so far, and by which plans.

        Args:
            steps: Number of steps, for the report.
        """
        from gradwire.comms.bootstrap.nics import describe_nics  # here: a step without a report needs none

        in_use = self.rank_plans.plans()
        plans = dict.fromkeys(describe_plans(in_use, self.cluster.level_names))
        if self.compressor is not None:
            plans.update(dict.fromkeys(traits_of(self.compressor).report_lines()))
        links = (self.rank_plans.links.describe(), *describe_nics(self.peer_infos, self.config))
        totals = self.executor.stats.totals()
        return Report(
            self.cluster.describe(),
            tuple(plans),
            totals,
            self.executor.stats.all_reduces,
            steps,
            links,
            rank=self.rank,
            summary=summarise_plans(in_use, self.cluster.level_names),
            one_node=len(self.cluster.nodes) == 1,
            alone=self.cluster.size == 1,
            ranks=self.cluster.size,
            node_ranks=len(next(node for node in self.cluster.nodes if self.rank in node)),
        )

    def abort(self, reason: str) -> None:
        """Makes all collectives of this communicator fail, on all ranks, and publishes the reason. Any thread.

        Ranks in shared memory or NCCL are woken at once. All others, also those still connecting, find the abort signal
        in the store about once a second.

        Args:
            reason: Sentence for the errors of the other ranks.
        """
        self.executor.aborted = True
        self._groups.abort(reason)
        self._reporter.signal_abort(reason)

    def abandon(self, reason: str) -> None:
        """Aborts what is in flight on this rank and closes gloo's connections, without an abort signal. Any thread.

        For elastic training, in which the same ranks connect again: closed connections end the waits for this rank.

        Args:
            reason: Sentence for errors on this rank.
        """
        self.executor.aborted = True
        self.executor.interrupt(PeerError(reason))
        self._groups.abort(reason)
        self._groups.disconnect()

    def leave_to_parent(self) -> None:
        """Keeps the copy of this object in a forked child alive until the child exits, so that no destructor runs.

        Destructors of gloo would wait for threads, which only the parent has. Called in the child.
        """
        _of_parent.append(self)

    def close(self, seconds: float | None = None) -> None:
        """Waits for all-reduces in flight, and releases threads, memory and connections; a forked child does nothing.

        Args:
            seconds: Longest wait. None waits 5 s on a CPU; on CUDA up to the timeout, as long as the other ranks are
                alive. All-reduces that are unfinished then are given up, see `Executor.close`.
        """
        if self in _of_parent:
            return
        orderly = self.executor.close(seconds)
        self._leave()
        if self._ring is not None:
            self._ring.close(orderly=orderly)
        if orderly:
            self._groups.close()
        else:
            # The executor has waited already: publish that nothing more will come, and do not wait again.
            self._groups.close(0.0)

    @property
    def has_stopped(self) -> bool:
        """Whether, after `close`, no thread can write to tensors of earlier all-reduces any more."""
        return self.executor.has_ended and self._groups.drained

    @property
    def placement(self) -> str:
        """The plan that a compressor works in and the ranks of each node: they decide which rank keeps which residuals.

        Begins with `exact` if no bucket of any size is compressed.
        """
        name = self.rank_plans.chooser.compressed_name() or "exact"
        return f"{name} {' '.join(','.join(map(str, node)) for node in self.cluster.nodes)}"

    def state_loaded(self, *, as_saved: bool = True) -> None:
        """Records that the compressor's state was replaced, and forgets the plans; all ranks call it between two steps.

        Args:
            as_saved: True if the state was saved with the placement that ranks have now; the same on all ranks.
        """
        self._state = _state_layouts(self.compressor, loaded=True, as_saved=as_saved)
        # The boundaries of shards may be part of the compressor's state.
        self.rank_plans.clear()


def _check(flat: Tensor, scale: float, device: torch.device) -> None:
    """Refuses a tensor that is not 1-D, contiguous and on the communicator's device, or an integer one with a factor.

    Args:
        flat: Tensor of an all-reduce.
        scale: Product of the factors on it.
        device: Device of the communicator.

    Raises:
        ValueError: The tensor is refused.
    """
    if flat.device != device and (flat.device.type != device.type or device.index is not None):
        raise ValueError(
            f"`flat` is on {flat.device}; wanted {device}, where this communicator was made: "
            "move the model before the hook's first step"
        )
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(
            f"`flat` has shape {tuple(flat.shape)} and strides {flat.stride()}; wanted a contiguous 1-D "
            "tensor: pass tensor.contiguous().view(-1)"
        )
    if scale != 1.0 and not (flat.is_floating_point() or flat.is_complex()):
        raise ValueError(f"`scale` is {scale} but `flat` has dtype {flat.dtype}; wanted 1 for integers")


def _peer_table(peer_infos: PeerInfos, cluster: Cluster, rank: int, server: ProbeServer) -> PeerTable:
    """Makes the table of addresses at which this rank asks other ranks' probe servers whether their processes live.

    Args:
        peer_infos: Facts that each rank has published, among them the address of its probe server.
        cluster: Placement of the ranks; those on this rank's node are probed first.
        rank: This rank.
        server: Probe server of this process.
    """
    addresses = {each.rank: address for each in peer_infos if (address := each.address) is not None}
    node = next(node for node in cluster.nodes if rank in node)
    return PeerTable(peer_infos.generation, rank, addresses, node, server)


_with_addresses: "weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator]" = weakref.WeakKeyDictionary()
"""Process group -> communicator that `exchange_addresses` has made for it."""


def exchange_addresses(group: dist.ProcessGroup, config: Config) -> Communicator:
    """Exchanges the probe addresses of all ranks of a group, once for each group.

    Communicators that are made later of these ranks (for the default group, also of some of them) then do not wait for
    a rank that has exited.

    Args:
        group: Process group of torch; all its ranks call this function.
        config: Configuration; its time-out and host name are used.

    Returns:
        A communicator that has connected nothing yet; must not be closed.

    Raises:
        RuntimeError: A rank did not join within the time-out.
    """
    if group not in _with_addresses:
        own, cpu = Config(timeout=config.timeout, hostname=config.hostname), torch.device("cpu")
        _with_addresses[group] = Communicator(store_of(group), group.rank(), group.size(), cpu, own, name="all")
    return _with_addresses[group]


def _ended_of(group: dist.ProcessGroup | None) -> FindExited | None:
    """Returns a function that takes ranks of a group and returns those that have exited; None if there is none.

    There is one for a group for which `exchange_addresses` was called, and for a group of the backend "gradwire".
    """
    if (ended := getattr(group, "ended", None)) is not None:
        return cast(FindExited, ended)
    return _with_addresses[group].ended if group is not None and group in _with_addresses else None


def _find_exited_of(group: dist.ProcessGroup | None, global_ranks: Sequence[int] | None) -> FindExited | None:
    """Returns a function that finds exited ranks of a group, by its own means or those of the default group.

    Args:
        group: The process group; None if there is none.
        global_ranks: Ranks of the group in the default group; None asks torch.

    Returns:
        The function, which takes and returns ranks of the group; None if neither group has one.
    """
    if (ended := _ended_of(group)) is not None:
        return ended
    if not dist.is_initialized() or (ended := _ended_of(dist.group.WORLD)) is None:
        return None
    if global_ranks is None:
        global_ranks = dist.get_process_group_ranks(group) if group is not None and is_known(group) else ()
    members = tuple(global_ranks)

    def of_them(ranks: Sequence[int]) -> list[int]:
        return [members.index(each) for each in ended([members[rank] for rank in ranks])]

    return of_them if members else None


def _leave(server: ProbeServer, generation: str, rank: int) -> None:
    """Stops answering the probes of other ranks as a rank of a generation, so that they count it as having left.

    Args:
        server: Probe server of this process; closed.
        generation: Generation id of the communicator.
        rank: This rank in it.
    """
    server.unregister(generation, rank)
    server.close()


def _ring(
    executor: Executor, store: PollingStore, rank: int, size: int, reporter: FailureReporter
) -> "LivenessRing | None":
    """Makes the ring of heartbeats on CUDA, where waits on the device do not notice that a rank has exited.

    Args:
        executor: Executor of the device, which the ring interrupts if a rank fails.
        store: Store of these ranks.
        rank: This rank.
        size: Number of ranks.
        reporter: Reports failures to the other ranks.

    Returns:
        The ring; None on a CPU, and for a single rank.
    """
    deadline = executor.deadline
    if deadline is None or size == 1:
        return None
    from gradwire.comms.bootstrap.liveness import LivenessRing

    sources, launches = (deadline.overdue,), lambda: executor.launches
    return LivenessRing(store, rank, size, reporter.failures, executor.interrupt, sources, launches)


def _share(ranks: Communicator, layout: Layout, *, whole: bool) -> None:
    """Gives all nodes the state that decodes the payloads of a bucket, after the placement of ranks has changed.

    The ranks of a node keep different elements of that state, and all nodes the same ones. With another placement some
    elements are missing on a node and others are there twice. Afterwards the first rank of each node has all of them,
    or every rank if each compresses the whole bucket. Every rank calls it, and waits for the others.

    Args:
        ranks: Communicator, whose compressor's state is changed.
        layout: Layout of the bucket.
        whole: True if each rank compresses the whole bucket.
    """
    from gradwire.comms.migration import shared  # here: as in `_state_layouts`

    assert ranks.compressor is not None
    holds = whole or ranks.cluster.ranks(ranks.cluster.unit(ranks.rank, 0))[0] == ranks.rank
    for compressor, part in traits_of(ranks.compressor).parts(layout):
        for store in traits_of(compressor).shared():
            with ranks.exclusive():
                held = store.peek(part, ranks.device)
            ranks.sync_current_stream()
            values = shared(held, lambda both: ranks.all_reduce(both).wait())
            with ranks.exclusive():
                store.export(part, ranks.device)
                if holds:
                    store.adopt(part, values)


def _state_layouts(compressor: Compressor | None, *, loaded: bool, as_saved: bool = True) -> "StateLayouts | None":
    """Makes a new record of the bucket layouts that a compressor has state for; returns None without a compressor.

    Args:
        compressor: The compressor.
        loaded: True if its state was loaded or comes from other ranks.
        as_saved: True if that state was saved with the placement that ranks have now.
    """
    if compressor is None:
        return None
    from gradwire.comms.migration import StateLayouts  # here: exact gradients leave nothing behind

    return StateLayouts(traits_of(compressor).dtypes, loaded=loaded, as_saved=as_saved)


def _connections(config: Config, rank_plans: RankPlans) -> Callable[[float], int] | None:
    """Returns the function that decides the number of TCP connections between two nodes.

    Args:
        config: Configuration, with a fixed number or none.
        rank_plans: Plans of the ranks, with the link rates.

    Returns:
        Function from the round trip in seconds to the number of connections; None leaves all messages to gloo.
    """
    if config.connections == 1:
        return None
    if config.connections:
        return lambda _: config.connections

    def choose(round_trip_seconds: float) -> int:
        from gradwire.comms.links.distance import connections_for
        from gradwire.comms.transport.parallel_tcp import LEAST_RATE, UNSEEN_RATE  # as above

        level = rank_plans.links.priced.levels[-1]  # rates measured at the start: no bit depends on them
        rate = max(level.unit_rates or (level.link.bytes_per_second,))
        if config.given_rate is None:
            rate = UNSEEN_RATE if level.link.presumed else max(rate, LEAST_RATE)
        return connections_for(round_trip_seconds, rate)

    return choose


def _nccl_groups(
    name: str,
    cluster: Cluster,
    device: torch.device,
    group: dist.ProcessGroup | None,
    global_ranks: Sequence[int] | None,
) -> "NcclGroups":
    """Makes the NCCL groups of a communicator on CUDA.

    Args:
        name: Name of the communicator.
        cluster: Placement of its ranks.
        device: CUDA device.
        group: Process group of the same ranks, whose NCCL backend is used if it has one; None if there is none.
        global_ranks: Ranks of the group in the default group; None asks torch.
    """
    from gradwire.comms.transport.nccl import NcclGroups

    if global_ranks is None:
        global_ranks = () if group is None else dist.get_process_group_ranks(group)
    return NcclGroups(
        name=name,
        global_ranks=tuple(global_ranks),
        size=cluster.size,
        backend=None if group is None else nccl_backend_of(group, device),
        between_nodes=cluster.all_apart,
        sums_in_switch=cluster.sums_in_switch,
    )
