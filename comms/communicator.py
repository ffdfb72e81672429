"""One rank's end of everything: where the ranks are, which plan a bucket takes, and the executor that runs it.

The hook and the process group are two faces of this object.
"""

import logging
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import PrefixStore, Store
from gradwire.comms.bootstrap.failure import CollectiveError, FailureBoard
from gradwire.comms.bootstrap.nics import describe_nics, interface_of
from gradwire.comms.bootstrap.placement import Presence, cluster_of, exchange
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.config import Config
from gradwire.comms.execute import Chunk, Executor
from gradwire.comms.futures import FutureTensor, Open, open_future, unwrap
from gradwire.comms.lanes import Hop, Job, Lanes
from gradwire.comms.migration import Homes, migrate
from gradwire.comms.plan.plan import ALL_REDUCE, Phase, Plan
from gradwire.comms.plan.routes import Route, Routes
from gradwire.comms.report import Ledger, Report
from gradwire.comms.streams import SideStreams
from gradwire.comms.transport.groups import Groups
from gradwire.compressors.base import Compressor, Layout
from gradwire.topology.cluster import Cluster

log = logging.getLogger("gradwire")


class Communicator:
    """All-reduces flat tensors over a group of ranks by the cheapest plan.

    Args:
        store: A store that all ranks of the group share; keys are put below `name`.
        rank: This rank in the group.
        size: Number of ranks.
        device: Where the tensors are.
        config: The configuration; must agree on all ranks.
        name: Unique among the communicators of this store, equal on all ranks.
        compressor: Shrinks the phase over the slowest level of gradients that are given with a layout.

    Raises:
        RuntimeError: A rank did not come within the time-out.
        ValueError: A rank came with another world size or configuration.
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
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.config = config
        self.compressor = compressor
        store = PollingStore(PrefixStore(f"gradwire/{name}", store), config.timeout)
        presences = exchange(store, Presence.here(rank, size, config, device), config.timeout)
        self.routes = Routes(
            cluster_of(presences, config), rank, config, compressor, library="nccl" if device.type == "cuda" else "gloo"
        )
        self._ledger = Ledger(self.cluster.level_names)
        self._lanes = Lanes(f"gradwire {name}")
        self._board = FailureBoard(store, rank, size)
        self._nics = describe_nics(presences, config)
        self._groups = Groups(
            store,
            rank,
            device,
            self._same_node,
            config.transport,
            config.timeout,
            self._board.alarm,
            interface_of(presences, rank, config),
        )
        self._executor = Executor(self._groups, rank, self._hops, compressor, self._ledger, self._in_rank_order)
        self._failure: CollectiveError | None = None
        self._streams = SideStreams(device) if device.type == "cuda" else None
        self._buckets = 0
        self._homes = Homes()

    @property
    def cluster(self) -> Cluster:
        """Where the ranks are, with the links as assumed or measured."""
        return self.routes.cluster

    def all_reduce(
        self, flat: Tensor, *, scale: float = 1.0, layout: Layout | None = None, flush: bool = False
    ) -> FutureTensor:
        """Sums `scale * flat` over all ranks, in place.

        Args:
            flat: 1-D, contiguous, on this communicator's device, same numel and dtype on all ranks. Not to be touched
                until the future is done.
            scale: Factor on every rank's contribution, applied before anything is narrowed; 1 for integers.
            layout: Which parameter lies where. With it, and a compressor, the slowest phase is compressed.
            flush: Send it dense, with what the compressor holds back added.

        Returns:
            A future whose value is `flat`; waiting for it raises a RuntimeError with the text of the CollectiveError
            where the collective failed. Its callbacks must not issue collectives.

        Raises:
            ValueError: `flat` does not fit.
        """
        self._check(flat, scale)
        self._buckets += 1
        if self.compressor and layout and self._homes.moves(layout):
            self._migrate(self.compressor, flat, layout)
        return self._run(flat, self.routes.route(flat, layout), scale, layout, flush)

    def run(self, flat: Tensor, plan: Plan) -> FutureTensor:
        """Runs any plan on a tensor, whatever the planner thinks of it: for measurements.

        Args:
            flat: As for `all_reduce`; what it holds afterwards is the plan's affair.
            plan: The same on all ranks.
        """
        self._check(flat, 1.0)
        return self._run(flat, self.routes.along(flat, plan), 1.0, None)

    def _run(
        self, flat: Tensor, route: Route, scale: float, layout: Layout | None, flush: bool = False
    ) -> FutureTensor:
        chunks = [
            Chunk(flat, start, stop, transfers, scale, layout, flush)
            for (start, stop), transfers in zip(pairwise(route.bounds), route.transfers, strict=True)
        ]
        if self._streams is not None:
            return self._streams.run(flat, [self._executor.walk(chunk, route.plan) for chunk in chunks])
        return self._in_lanes(flat, chunks, route.plan)

    def report(self, steps: int = 0) -> Report:
        """What has travelled so far, and by which plans."""
        plans = dict.fromkeys(plan.describe(self.cluster.level_names) for plan in self.routes.plans())
        return Report(
            self.cluster.describe(),
            tuple(plans),
            self._ledger.rows(),
            self._buckets,
            steps,
            (self.routes.describe_links(), *self._nics),
        )

    def abort(self, reason: str) -> None:
        """Wakes the ranks of this node that wait for this one, and tells them why. Any thread."""
        self._groups.abort(reason)

    def close(self) -> None:
        """Ends the lanes and releases shared memory and connections."""
        self._lanes.close()
        self._groups.close()

    def _in_lanes(self, flat: Tensor, chunks: list[Chunk], plan: Plan) -> FutureTensor:
        done: Open = open_future(flat)
        remaining = len(chunks)

        def steps(chunk: Chunk):  # type: ignore[no-untyped-def]  # a generator of Hops
            nonlocal remaining
            if self._failure:
                raise self._failure
            yield from self._executor.walk(chunk, plan)
            remaining -= 1
            if remaining == 0:
                done.set_result(flat)

        def failed(error: BaseException) -> None:
            if not done.done():
                done.set_result(self._fail(error, plan))

        for chunk in chunks:
            self._lanes.submit(Job(steps(chunk), failed, self._executor.lanes(plan)))
        return done.then(unwrap)

    def _fail(self, error: BaseException, plan: Plan) -> CollectiveError:
        if self._failure is None:
            lane = self._lanes.current
            phase = plan.phases[min(lane[0], len(plan.phases) - 1)]
            place = "over all ranks" if phase.whole else self.cluster.level_names[phase.level]
            self._groups.abort(f"rank {self.rank} gave up in {phase.op} {place}: {error}")
            self._failure = self._board.diagnose(error, lane, f"{phase.op} {place}", self._node_ranks())
            log.error("%s", self._failure)
        return self._failure

    def _migrate(self, compressor: Compressor, flat: Tensor, layout: Layout) -> None:
        """Has the ranks of this node hand over the state of a bucket whose parameters travel in a new layout."""
        route = self.routes.route(flat, layout)
        members = self._node_ranks()

        def move() -> Iterator[Hop]:
            node = self._groups.get((0, 0), members) if len(members) > 1 else None
            migrate(compressor, layout, route.compressed_shards(), node, self.device)
            yield from ()

        def failed(error: BaseException) -> None:
            self._fail(error, route.plan)

        if self.device.type == "cuda":
            list(move())
        else:
            self._lanes.submit(Job(move(), failed))

    def _same_node(self, members: tuple[int, ...]) -> bool:
        return len({self.cluster.unit(rank, 0) for rank in members}) == 1

    def _hops(self, phase: Phase) -> bool:
        local = phase.level == 0 and (not phase.whole or len(self.cluster.nodes) == 1)
        return not (local and self.device.type == "cpu")

    def _in_rank_order(self, phase: Phase) -> bool:
        """Gloo's ring sums an element in an order that depends on its place; of two ranks, any order gives the same.

        Only fusion moves elements to other places, so only then is the price of a fixed order paid.
        """
        if not self.config.fuses:
            return False
        members = self.size if phase.whole else self.cluster.widest(phase.level)
        return phase.op == ALL_REDUCE and self.device.type == "cpu" and self._hops(phase) and members > 2

    def _node_ranks(self) -> tuple[int, ...]:
        return self.cluster.ranks(self.cluster.unit(self.rank, 0))

    def _check(self, flat: Tensor, scale: float) -> None:
        if flat.device.type != self.device.type:
            raise ValueError(
                f"`flat` is on {flat.device}; wanted {self.device}, where this communicator was made: "
                "move the model before the hook's first step"
            )
        if flat.dim() != 1 or not flat.is_contiguous():
            raise ValueError(
                f"`flat` has shape {tuple(flat.shape)} and strides {flat.stride()}; wanted a contiguous 1-D "
                "tensor: pass tensor.contiguous().view(-1)"
            )
        if scale != 1.0 and not (flat.is_floating_point() or flat.is_complex()):
            raise ValueError(f"`scale` is {scale} but `flat` has dtype {flat.dtype}; wanted 1 for integers")
