"""The connection of a model's ranks: who they are, the communicator, what compresses, what travels together, listeners.

A state has one from the moment at which its ranks have connected; in elastic training one after the other.
"""

import weakref
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gradwire.comms.autotune.consensus import Consensus
from gradwire.comms.bootstrap.compat import Store, store_of
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.communicator import Communicator, Oversight
from gradwire.comms.config import Config
from gradwire.comms.fusion import Fusion, FusionPlan
from gradwire.comms.names import ParameterNames
from gradwire.comms.plan.plan import BUCKET_NBYTES
from gradwire.comms.step.features import choose_compressors, measure_links, tune, watch_steps
from gradwire.comms.step.listeners import Listeners
from gradwire.compressors.adasum import Adasum
from gradwire.compressors.base import Compressor
from gradwire.compressors.dense import WideSum

FUSION_TIMEOUT = timedelta(seconds=30)
"""How long `fuse()` waits for the other ranks to ask for the same."""

GRADIENT_NBYTES = 4
"""Of an element, where the size of a model's gradients is estimated."""

if TYPE_CHECKING:
    from gradwire.comms.compression import Compression

_numbers: "dict[str, count[int]]" = {}
"""Process group -> numbers for the states that are made on it, in the same order on all ranks."""


@dataclass(frozen=True, slots=True)
class SessionRanks:
    """The ranks that connect.

    Attributes:
        store: Shared by all of them.
        name: Unique in the store; equal on all ranks, which connect their states in the same order.
        rank: This one.
        size: How many.
        group: Torch's group of them; None in elastic training, once the ranks have changed.
        oversight: In elastic training, who hears of a failure.
    """

    store: Store
    name: str
    rank: int
    size: int
    group: dist.ProcessGroup | None
    oversight: Oversight | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup, oversight: Oversight | None) -> "SessionRanks":
        """The ranks of a group of torch's."""
        return cls(store_of(group), cls.name_in(group), group.rank(), group.size(), group, oversight)

    @classmethod
    def name_in(cls, group: dist.ProcessGroup | None) -> str:
        """The name of the next state of a group."""
        assert group is not None
        return f"hook{next(_numbers.setdefault(group.group_name, count()))}"


class GradientSession:
    """What a state has once its ranks have connected.

    Args:
        peers: The ranks.
        device: Where the gradients are.
        config: What the user set.
        names: Which parameter is which.
        previous: What there was before the ranks have changed; its compressor goes on.
        joined: Ranks have joined, which know nothing of what others have learned of links and cuts.

    Raises:
        RuntimeError: A rank did not join within the time-out.
        ValueError: A rank joined with another world size or configuration.
    """

    def __init__(
        self,
        peers: SessionRanks,
        device: torch.device,
        config: Config,
        names: ParameterNames,
        previous: "GradientSession | None" = None,
        joined: bool = False,
    ) -> None:
        self.group = peers.group
        self._config = config
        self.compression: Compression | None = previous.compression if previous else _compression(config, names, peers)
        name, compressor = peers.name, self.compression.compressor if self.compression else _reduction(config)
        self.communicator = Communicator(
            peers.store,
            peers.rank,
            peers.size,
            device,
            config,
            name=name,
            compressor=compressor,
            group=peers.group,
            oversight=peers.oversight,
        )
        weakref.finalize(self, self.communicator.close)  # also where something below raises
        self.communicator.executor.checking = self.compression is not None
        store = self.communicator.plain_store
        threshold_nbytes = round(config.fusion_mb * 2**20)
        delayed = config.fusion == "delayed"
        if delayed and names.bound:
            threshold_nbytes = sum(names.numels().values()) * GRADIENT_NBYTES
        first = FusionPlan(threshold_nbytes=threshold_nbytes, delayed=delayed)
        self.fusion: Fusion = Fusion(previous.fusion.plan if previous and not joined else first)
        self.agrees = previous is None and not joined
        """Whether what payloads are decoded with is the same on all ranks."""
        self.fusion_plans = self._consensus(store, f"fusion/{name}", FUSION_TIMEOUT)
        self.listeners = Listeners()

        def consensus(what: str, timeout: timedelta) -> Consensus:
            return self._consensus(store, f"{what}/{name}", timeout)

        if previous is not None and not joined:
            self._go_on(previous)
        if previous is not None or joined:
            self._move_state()
        else:
            measure_links(self.listeners, self.communicator, config, consensus)
        self.communicator.routes.settle(threshold_nbytes or BUCKET_NBYTES)
        self.communicator.connect(threshold_nbytes or BUCKET_NBYTES)
        if self.compression is not None:
            choose_compressors(self.listeners, self.communicator, self.compression, consensus)
        self.scale, self.after = _factors(config, self.communicator)
        """On every rank's gradients, and on their sum."""
        self.watch, self.observer = watch_steps(self.listeners, self.communicator, config, peers.group)
        if previous is not None:
            self.observer.follow(previous.observer)
        weakref.finalize(self, self.observer.close)
        if previous is None and not joined:
            tune(self.listeners, self.communicator, self.fusion, name, names.shapes)

    def _go_on(self, previous: "GradientSession") -> None:
        """Takes over what was learned with the ranks before: the links' rates."""
        routes, before = self.communicator.routes, previous.communicator.routes
        if before.is_measured and before.cluster.depth == routes.cluster.depth:
            routes.measured(before.cluster.levels)

    def _move_state(self) -> None:
        """Has the compressor's state move to the ranks that own it now."""
        if self.compression is not None:
            self.compression.renumber(self.communicator.rank, self.communicator.size)
            self.communicator.state_loaded()

    def _consensus(self, store: Store, name: str, timeout: timedelta) -> Consensus:
        own = PollingStore(store, self._config.timeout, ranks=self.communicator.size)
        return Consensus(own, self.communicator.rank, self.communicator.size, name, timeout)


def _compression(config: Config, names: ParameterNames, peers: SessionRanks) -> "Compression | None":
    if config.compressor in (None, "none"):
        return None
    from gradwire.comms.compression import Compression  # here: exact gradients need no compressor

    compression = Compression(
        config.compressor, config.compressor_options, config.rules, peers.rank, peers.size, config.error_budget
    )
    compression.compressor.bind_model(names.numels())
    return compression


def _reduction(config: Config) -> Compressor | None:
    """What combines gradients between nodes, where that is no plain sum in their own dtype."""
    if config.reduction == "adasum":
        return Adasum()
    return WideSum() if config.sum_dtype == "float32" else None


def _factors(config: Config, communicator: Communicator) -> tuple[float, float]:
    """The factor on every rank's gradients before they are summed, and the one on the sum."""
    if not config.average:
        return 1.0, 1.0
    cluster = communicator.cluster
    if config.reduction == "adasum":
        node = cluster.ranks(cluster.unit(communicator.rank, 0))
        return (1.0 if config.plan == "flat" else 1.0 / len(node)), 1.0
    if config.predivide is not None:
        return 1.0 / config.predivide, config.predivide / cluster.size
    return 1.0 / cluster.size, 1.0
