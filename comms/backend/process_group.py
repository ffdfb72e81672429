"""The torch.distributed backend "gradwire": `dist.init_process_group("gradwire")`, `new_group(backend="gradwire")`.

The group holds torch's own backends, gloo for CPU and NCCL for CUDA tensors, and hands everything to them but what
gradwire does faster. Sums run by a plan wherever that beats the inner group's all-reduce. Broadcast, all-gather and
reduce-scatter of CPU tensors go through shared memory on a single node; on several nodes they run by a plan, if it is
predicted to beat gloo or asked for by name (but `flat`, which is gloo). Everything is exact: nothing is compressed
here.

A call is handled here only in the shape that torch's own functions use, `(list of tensors, options)`; every other shape
goes to the inner group, which knows them all, as does every collective that is not here: see `delegating_group`.
"""

import atexit
from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    ReduceScatterOptions,
)

from gradwire.comms.backend.delegating_group import DelegatingGroup
from gradwire.comms.backend.node_collectives import NodeCollectives
from gradwire.comms.backend.planned import PlannedAllReduce
from gradwire.comms.backend.planned_collectives import PlannedCollectives, together
from gradwire.comms.backend.work import FutureTensors, FutureWork
from gradwire.comms.bootstrap.compat import (
    GroupName,
    GroupOptions,
    PrefixStore,
    Store,
    clone_of,
    factor_of,
    register_backends,
)
from gradwire.comms.config import ASSUME, MEASURE, PLANNING, Config
from gradwire.comms.plan.collectives import BROADCAST
from gradwire.comms.plan.plan import ALL_GATHER, REDUCE_SCATTER
from gradwire.comms.transport.gloo_sockets import GlooSockets

_retired: list[object] = []
"""Backends of groups that were shut down, kept until the next group is made or the process ends.

DDP's reducer may own a group longer than Python does, and destroys it while it holds the GIL. Were that the last owner
of a gloo backend, its destructor would wait for gloo's threads, and one of them might be waiting for the GIL to free
its last work: a deadlock, seen on torch 2.13 with plain gloo. Torch releases the GIL where Python is the last owner.
"""
atexit.register(_retired.clear)


def create(options: object, config: object = None) -> "GradwireGroup":
    """Creates a process group; torch calls it on every rank of the new group.

    Args:
        options: Torch's options of the group: store, rank, size, timeout and name.
        config: Value of `pg_options=` of init_process_group and new_group: a `Config`. None takes the options of
            planning from the environment.

    Raises:
        TypeError: `pg_options` is neither a `Config` nor None.
        ValueError: `pg_options` asks for a compressor, or for anything else that the backend does not do; or it
            differs between the ranks.
        RuntimeError: A rank did not join.
    """
    return GradwireGroup(GroupOptions.of(options), _checked(config))


def _checked(config: object) -> Config:
    """Returns the options of a new group, those of the environment if `config` is None; see `create` for its errors."""
    if config is None:  # the environment's other options are for hooks
        config = Config.from_env(compressor=None).only(PLANNING)
    elif not isinstance(config, Config):
        raise TypeError(f"`pg_options` is a {type(config).__name__}; wanted a gradwire.Config or None")
    elif config.measures_links:
        raise ValueError(
            f"`pg_options` has `nic_bytes_per_second` {MEASURE!r}, and the backend measures no links; wanted a number, "
            f"{ASSUME!r} or None: let gradwire.HookState measure them"
        )
    if config.compressor is not None:
        raise ValueError(
            f"`pg_options` asks for the compressor {config.compressor!r}, but the backend is exact: it cannot "
            "tell gradients from anything else; give the compressor to gradwire.HookState"
        )
    for entry in fields(Config):
        if entry.name not in PLANNING and config.asked_for([entry.name]):
            raise ValueError(
                f"`pg_options` has `{entry.name}` {getattr(config, entry.name)!r}, and the backend knows of no steps "
                f"and no gradients; wanted {', '.join(PLANNING)} alone: give the rest to gradwire.HookState"
            )
    return config


def _gloo_lacks(op: object, tensor: Tensor) -> bool:
    """Returns whether the inner group cannot run a reduce op on a tensor at all: gloo has no PREMUL_SUM."""
    return tensor.device.type == "cpu" and factor_of(op) is not None


def _are_dense_on_cpu(*tensors: Tensor) -> bool:
    """Returns whether all tensors are strided (not sparse) and on the CPU."""
    return all(tensor.device.type == "cpu" and tensor.layout == torch.strided for tensor in tensors)


def _is_local(*tensors: Tensor) -> bool:
    """Returns whether all tensors are strided (not sparse), on the CPU, and not empty."""
    return _are_dense_on_cpu(*tensors) and all(tensor.numel() > 0 for tensor in tensors)


class GradwireGroup(DelegatingGroup):
    """Runs collectives as the process group of backend "gradwire".

    Itself it runs sums by a plan and, of CPU tensors, broadcast, all-gather and reduce-scatter (through shared memory
    on one node, by a plan on several) where that is faster; torch's own group runs everything else.

    Args:
        options: Store, rank, size, timeout and name of the group.
        config: Options of planning; its timeout is replaced by the group's.

    Attributes:
        config: Options of planning, with the group's timeout.
    """

    serializes_launches = True
    """Marks a group that orders its own launches with those of other communicators of a device."""

    def __init__(self, options: GroupOptions, config: Config) -> None:
        # Torch's own group, which has no backends yet.
        super().__init__(dist.ProcessGroup(options.store, options.group_rank, options.group_size))
        self._store = options.store
        options = replace(options, store=clone_of(options.store))
        self.config = replace(config, timeout=options.timeout)
        self.timeout = options.timeout
        _retired.clear()
        self._planned: PlannedAllReduce | None = None
        self._node: NodeCollectives | None = None
        self._collectives: PlannedCollectives | None = None
        if options.group_size > 1:
            self._planned = PlannedAllReduce(options, self.config, self.inner)
            options = replace(options, store=self._planned.store)
        self._sockets = sockets = GlooSockets()
        if self._planned:
            self.communicator = self._planned.on_cpu
            self.communicator.executor.failure_handler.wake = sockets.shut_down
        try:
            self._backends = sockets.opened_by(lambda: register_backends([self, self.inner], options))
        except RuntimeError as error:
            if self.communicator is None or self.communicator.peer_wait().abort_reason(at_once=True) is None:
                raise
            # Another rank has aborted and shut its sockets down; gloo's error names only these. Raise the reason.
            raise self.communicator.executor.failure_handler.fail("connecting", (), error) from None
        if self._planned and len(self._planned.cluster.nodes) == 1:
            store = PrefixStore("gradwire/node", options.store)
            self._node = NodeCollectives(self._planned.on_cpu, store, f"gradwire {options.group_id}")
        elif self._planned:
            self._collectives = PlannedCollectives(self._planned.on_cpu)

    def getBackendName(self) -> str:
        """Returns the backend's name; C++ calls it."""
        return "gradwire"

    def name(self) -> str:
        """Returns the backend's name."""
        return "gradwire"

    def ended(self, ranks: Sequence[int]) -> list[int]:
        """Returns those of the given ranks whose process has exited or has left this group; takes some seconds.

        Args:
            ranks: Ranks of this group to check.

        Returns:
            The ranks that are known to have ended; empty also if that cannot be found out, or if this rank is alone.
        """
        ended = self._planned.on_cpu.ended if self._planned else None
        return ended(ranks) if ended else []

    def get_group_store(self) -> Store:
        """Returns the store that all ranks of this group share."""
        return self._store

    def own_work(self, name: str, arguments: Sequence[object]) -> dist.Work | None:
        """Starts a collective that gradwire runs faster than the inner group; all ranks decide the same.

        These are sums by a plan and, of CPU tensors, broadcast, all-gather and reduce-scatter: through shared memory on
        one node, by a plan on several.

        Args:
            name: Name of the method of `dist.ProcessGroup`.
            arguments: Positional arguments of the call. Only the shapes that torch's own functions use are known here.

        Returns:
            The work, in flight; None if the inner group shall run the collective.
        """
        match name, arguments:
            case "allreduce", [[Tensor() as tensor], AllreduceOptions() as options]:
                return self._sum([tensor], options.reduceOp)
            case "allreduce_coalesced", [
                list() as tensors,
                AllreduceOptions() | AllreduceCoalescedOptions() as given,
            ] if tensors:
                return self._sum(tensors, given.reduceOp)
        future = self._own_future(name, arguments)
        return None if future is None else self.issued(FutureWork(future, self.config.timeout))

    def _own_future(self, name: str, arguments: Sequence[object]) -> FutureTensors | None:
        """Starts a collective other than an all-reduce; as for `own_work`, with a future in place of a work."""
        match name, arguments:
            case "broadcast", [[Tensor() as tensor], dist.BroadcastOptions() as options] if _is_local(tensor):
                if 0 <= options.rootRank < self.size():
                    own = self._runner(BROADCAST, tensor.nbytes, options.rootRank)
                    return None if own is None else own.broadcast(tensor, options.rootRank)
            case "allgather", [[list() as outputs], [Tensor() as source], AllgatherOptions()]:
                if _is_local(source, *outputs) and self._matches(source, outputs):
                    own = self._runner(ALL_GATHER, source.nbytes * self.size())
                    return None if own is None else own.all_gather_list(outputs, source)
            case "_allgather_base", [Tensor() as output, Tensor() as source, AllgatherOptions()]:
                if _is_local(source, output):
                    own = self._runner(ALL_GATHER, output.nbytes)
                    return None if own is None else own.all_gather(output, source)
            case "allgather_into_tensor_coalesced", [list() as outputs, list() as sources, *_]:
                if len(outputs) == len(sources) > 0 and _is_local(*outputs, *sources):
                    own = self._runner(ALL_GATHER, sum(output.nbytes for output in outputs))
                    pairs = zip(outputs, sources, strict=True)
                    return None if own is None else together([own.all_gather(*pair) for pair in pairs])
            case "reduce_scatter", [[Tensor() as output], [list() as sources], ReduceScatterOptions() as options]:
                if _are_dense_on_cpu(output, *sources):
                    own, scale = self._sum_runner(options.reduceOp, [output], output.nbytes * self.size())
                    return None if own is None else own.reduce_scatter_list(output, sources, scale)
            case "_reduce_scatter_base", [Tensor() as output, Tensor() as source, ReduceScatterOptions() as options]:
                if _are_dense_on_cpu(source, output):
                    own, scale = self._sum_runner(options.reduceOp, [source], source.nbytes)
                    return None if own is None else own.reduce_scatter(output, source, scale)
            case "reduce_scatter_tensor_coalesced", [
                list() as outputs,
                list() as sources,
                ReduceScatterOptions() as given,
            ]:
                if len(outputs) == len(sources) > 0 and _are_dense_on_cpu(*sources, *outputs):
                    own, scale = self._sum_runner(given.reduceOp, sources, sum(source.nbytes for source in sources))
                    pairs = zip(outputs, sources, strict=True)
                    return None if own is None else together([own.reduce_scatter(*pair, scale) for pair in pairs])
        return None

    def _start_coalescing(self, device: torch.device) -> None:
        """Begins coalescing on a device: collectives from here on are issued together by `_end_coalescing`.

        Torch's `_coalescing_manager` calls it. Until then every all-reduce, of CPU tensors too, goes to the inner
        group, as do other collectives of CUDA tensors at all times; NCCL collects them (ncclGroupStart). Broadcast,
        all-gather and reduce-scatter of CPU tensors go there, too, unless all ranks are on one node: then they run
        through shared memory at once, as without coalescing.

        Args:
            device: Device of the tensors.
        """
        self.inner_launches.start_coalescing()
        self.inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """Ends coalescing: launches the collected calls (ncclGroupEnd), and returns one work for all of them.

        Args:
            device: Device of the tensors.
        """
        return self.inner_launches.end_coalescing(lambda: self.inner._end_coalescing(device), device)

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> "GradwireGroup | None":
        """Makes a group of some of this group's ranks; each of these calls it, with the ranks of its own new group.

        Args:
            ranks: Ranks of this group that the new one has; their order does not matter.
            timeout: Timeout of the new group's collectives; None takes this group's.
            opts: A `Config` for the new group; None, or any other object, takes this group's.
            group_name: Name, equal on all ranks of the new group and different from every other group's; None makes one
                from this group's name and `ranks`.
            group_desc: Description for people; None makes one from this group's.
            device_types: Ignored: a group always serves all device types.

        Returns:
            The new group; None if this rank is not among `ranks`.

        Raises:
            ValueError: `opts` asks for what the backend does not do; see `create`.
        """
        ranks = sorted(ranks)
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{'-'.join(map(str, ranks))}"
        store = PrefixStore(f"{name}/", self.get_group_store())
        options = GroupOptions(store, ranks.index(self.rank()), len(ranks), timeout or self.config.timeout, name, ranks)
        child = GradwireGroup(options, _checked(opts) if isinstance(opts, Config) else self.config)
        child._set_group_name(GroupName(name))
        child._set_group_desc(group_desc or f"{self.group_desc}:split")
        return child

    splitGroup = split_group

    def abort(self) -> None:
        """Ends waits in this group with an error, here and as far as possible on other ranks; it is unusable then.

        Woken at once are ranks that wait in shared memory, or over a connection of gloo with this rank; by the abort
        signal in the store, within about a second, all others that wait in a collective of CPU tensors. Ranks that wait
        for NCCL are woken only if gradwire has a communicator for CUDA here, which it makes for sums on several nodes.
        Not woken are ranks that wait for another rank's point-to-point message: these end by their time-out.
        """
        reason = f"rank {self.rank()} has aborted the process group {self.group_name}"
        for part in (self._planned, self._node):
            if part:
                part.abort(reason)
        self._sockets.shut_down()
        self.inner.abort()

    def shutdown(self) -> None:
        """Closes threads, shared memory and connections; `dist.destroy_process_group` calls it.

        Waits first for gradwire's own collectives in flight: on a CPU for a few seconds, after which they fail; on CUDA
        up to the timeout.
        """
        for part in (self._planned, self._node):
            if part:
                part.close()
        self.inner.shutdown()
        self._outstanding.clear()
        self.inner_launches.leave()
        _retired.extend(self._backends)

    def _sum(self, tensors: list[Tensor], op: object) -> dist.Work | None:
        """Starts an all-reduce by a plan of gradwire's, unless the inner group shall run it.

        Args:
            tensors: Tensors to reduce together, at least one; changed in place.
            op: Reduce op.

        Returns:
            The work, in flight. None if the inner group shall run it: in a group of one rank, while coalescing, if no
            plan can run the op on these tensors, or if no plan is faster than the inner group's all-reduce (but gloo
            lacks PREMUL_SUM, which a plan runs however slow).
        """
        if self._planned is None or self.inner_launches.coalescing:
            return None
        scale = self._planned.scale(op, tensors)
        if scale is None:
            return None
        if not self._planned.beats_inner(tensors) and not _gloo_lacks(op, tensors[0]):
            return None
        return self.issued(self._planned.all_reduce(tensors, scale))

    def _runner(self, op: str, nbytes: int, root: int = 0) -> NodeCollectives | PlannedCollectives | None:
        """Chooses what runs an all-gather, a broadcast or a reduce-scatter of CPU tensors.

        Args:
            op: `all_gather`, `reduce_scatter` or `broadcast`.
            nbytes: Bytes of the pieces of all ranks together.
            root: Sending rank of a broadcast.

        Returns:
            `NodeCollectives` (through shared memory) if the group has several ranks, all on one node.
            `PlannedCollectives` if the ranks are on several nodes and these are predicted to be faster than gloo, or a
            plan is asked for by name. None, for the inner group, otherwise: in a group of one rank, and on several
            nodes while coalescing or if gloo is faster.
        """
        if self._node is not None:
            return self._node
        if (
            self._collectives is None
            or self.inner_launches.coalescing
            or not self._collectives.beats_library(op, nbytes, root)
        ):
            return None
        return self._collectives

    def _sum_runner(
        self, op: object, tensors: list[Tensor], nbytes: int
    ) -> tuple[NodeCollectives | PlannedCollectives | None, float]:
        """Chooses what runs a reduce_scatter, and the factor by which a plain sum gives `op` (AVG: 1 / ranks).

        Args:
            op: Reduce op.
            tensors: Tensors of the call whose dtype and device decide whether gradwire can add them.
            nbytes: Bytes of the pieces of all ranks together.

        Returns:
            (`NodeCollectives`, `PlannedCollectives`, or None for the inner group; factor on each rank's input).
        """
        scale = None if self._planned is None else self._planned.scale(op, tensors)
        if scale is None:
            return None, 1.0
        if self._node is not None:
            return (self._node if _is_local(*tensors) else None), scale
        if _gloo_lacks(op, tensors[0]):
            return (None if self.inner_launches.coalescing else self._collectives), scale
        return self._runner(REDUCE_SCATTER, nbytes), scale

    def _matches(self, source: Tensor, outputs: list[Tensor]) -> bool:
        """Returns whether there is one output for each rank, with the shape and dtype of the source."""
        return len(outputs) == self.size() and all(
            output.shape == source.shape and output.dtype == source.dtype for output in outputs
        )
