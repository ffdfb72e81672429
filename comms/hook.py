"""The DDP comm hook: `model.register_comm_hook(gradwire.HookState(model), gradwire.comm_hook)`.

DDP hands over buckets of gradients during backward. Fusion says what is to be launched, the communicator launches it,
and DDP gets a future. The gradients arrive undivided, so the division by the world size happens here, before anything
is narrowed.
"""

import json
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradwire.comms.autotune.choose import LayerChooser
from gradwire.comms.autotune.consensus import Consensus
from gradwire.comms.autotune.first_steps import FirstSteps
from gradwire.comms.autotune.probe import probe
from gradwire.comms.autotune.profile import fingerprint
from gradwire.comms.autotune.quick_probe import quick_probe
from gradwire.comms.autotune.stepwatch import JobAdvice, StepWatch, advise_job
from gradwire.comms.autotune.tune import Tuning
from gradwire.comms.autotune.unit_rates import REMEASURE_STEPS, measure_units
from gradwire.comms.bootstrap.compat import (
    GradBucket,
    PrefixStore,
    Store,
    queue_end_of_backward,
    store_of,
    swap_process_group,
    timeout_of,
    why_no_ddp_hook,
)
from gradwire.comms.bootstrap.nics import interface_of
from gradwire.comms.bootstrap.placement import Presence, cluster_of
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.checkpoint import JOB, NAMED, Checkpoint, gather, normalize, pack, unpack
from gradwire.comms.communicator import Communicator, Oversight
from gradwire.comms.compression import Compression, LossScaler
from gradwire.comms.config import Config
from gradwire.comms.elastic.group import ElasticGroup
from gradwire.comms.elastic.introductions import packed, presences
from gradwire.comms.elastic.joining import Newcomer, Requests, ask, described, find_job, job_key, unprefixed
from gradwire.comms.elastic.membership import Membership, View
from gradwire.comms.elastic.step import Kept, agree
from gradwire.comms.elastic.survive import Change, EpochBoard, Survivor, first_oversight, oversight
from gradwire.comms.elastic.transfer import Carried, Handed, StateTransfer, check_state, load_module, rehearse
from gradwire.comms.execute import Bucket, FutureTensor, Launch
from gradwire.comms.fusion import Fusion, FusionPlan
from gradwire.comms.names import ParameterNames
from gradwire.comms.observe.observer import Observer
from gradwire.comms.plan.advise import BUCKET_NBYTES
from gradwire.comms.report import Report
from gradwire.comms.resume import COLUMNS, Resume, to_rows
from gradwire.compressors.adaptive import AUTO
from gradwire.compressors.adasum import Adasum
from gradwire.compressors.base import Compressor, Layout, StateDict
from gradwire.compressors.dense import WideSum
from gradwire.compressors.optim.first_step import Check, HasParameters, check_at_first_step, withdraw
from gradwire.compressors.routed import Routed
from gradwire.compressors.rules import warn_of_idle

log = logging.getLogger("gradwire")

FUSION_TIMEOUT = timedelta(seconds=30)
"""How long `fuse()` waits for the other ranks to ask for the same."""

GRADIENT_NBYTES = 4
"""Of an element, where the size of a model's gradients is estimated."""

TIMED_FROM, TIMED_UNTIL, TIMED_EVERY, STEPS_IN_A_ROW = 3, 23, 100, 3
"""Steps whose events `report()` and `advise()` go by on CUDA, where events cost host time: 20 of the first ones, then 3
in a hundred. Their uncompressed buckets travel beside the stream that computes even where one all-reduce is all."""

MOST_ATTEMPTS = 5
"""Of a process to join a running job: each costs the others a change of the ranks, and the end of it another one."""

NOTE_EVERY = 20
"""Steps, in elastic training: so often each rank leaves word of how much its compressor holds back. It reads its
residuals once, some thousandths of what twenty steps do with them."""

CAPTURED = (
    "a CUDA graph is being captured, and gradwire's hook was called in it: each step issues other collectives than the "
    "one before (plans, residuals, timed steps), which a graph cannot hold. Capture forward and backward without "
    "DistributedDataParallel's hook, or leave torch.cuda.graph out of the training step"
)

PYTHON_REDUCER = (
    'torch.compile with optimize_ddp="python_reducer" calls the hook once a parameter from inside a compiled '
    "graph, which gradwire does not support: leave torch._dynamo.config.optimize_ddp at its default, "
    "with which compiled models work"
)

UNNAMED = (
    "This state was made without a model, so parameters are called by their place in its first step: give the model, "
    "gradwire.HookState(model) or state.bind(model) before the first step, for rules that match its names."
)

OnChange = Callable[[View, View], None]
"""Called with the ranks as they were and as they are; see `HookState`."""

_on_cuda: "weakref.WeakSet[HookState]" = weakref.WeakSet()
"""States on CUDA that are open: an optimizer asks them for failures before it steps."""

_numbers: "dict[str, count[int]]" = {}
"""Process group -> numbers for the states that are made on it, in the same order on all ranks."""


@dataclass(frozen=True, slots=True)
class _Peers:
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
    def of(cls, group: dist.ProcessGroup, oversight: Oversight | None) -> "_Peers":
        """The ranks of a group of torch's."""
        return cls(store_of(group), cls.name_in(group), group.rank(), group.size(), group, oversight)

    @classmethod
    def name_in(cls, group: dist.ProcessGroup | None) -> str:
        """The name of the next state of a group."""
        assert group is not None
        return f"hook{next(_numbers.setdefault(group.group_name, count()))}"


class _Connection:
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
        peers: _Peers,
        device: torch.device,
        config: Config,
        names: ParameterNames,
        previous: "_Connection | None" = None,
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
        self.units: Consensus | None = None
        self.first_steps: FirstSteps | None = None
        if previous is not None and not joined:
            self._go_on(previous)
        if previous is not None or joined:
            self._move_state()
        elif config.learns_cuts or config.probe or config.compressor == AUTO:
            probe(self.communicator, self._consensus(store, f"probe/{name}", config.timeout))
            self.units = self._consensus(store, f"units/{name}", config.timeout)
            measure_units(self.communicator, self.units)
        elif not config.elastic:
            if config.probe is None:
                quick_probe(self.communicator)
            self.first_steps = FirstSteps(
                self.communicator, self._consensus(store, f"first_steps/{name}", config.timeout)
            )
        self.communicator.routes.settle(threshold_nbytes or BUCKET_NBYTES)
        self.communicator.connect(threshold_nbytes or BUCKET_NBYTES)
        self.chooser: LayerChooser | None = None
        if self.compression is not None and config.compressor == AUTO:
            choice = self._consensus(store, f"choice/{name}", config.timeout)
            self.chooser = LayerChooser(self.communicator, self.compression, choice)
        self.watch = StepWatch(self.communicator.clock)
        self.scale, self.after = _factors(config, self.communicator)
        """On every rank's gradients, and on their sum."""
        self.observer = Observer(self.communicator, config, peers.group)
        if previous is not None:
            self.observer.follow(previous.observer)
        weakref.finalize(self, self.observer.close)
        self.tuning: Tuning | None = None
        if config.learns_cuts and previous is None and not joined:
            self.tuning = Tuning(
                self.communicator, self.fusion, store, name, fingerprint(names.shapes), clock=self.communicator.clock
            )

    def _go_on(self, previous: "_Connection") -> None:
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


class HookState:
    """What the hook keeps between steps. One for each model.

    Args:
        model_or_group: The DDP model, or any module (its parameter names are used), or a process group; None binds to
            the default group at the first bucket, for frameworks that want the state before the model exists.
        config: The configuration; by default what the environment gives.
        carries: In elastic training, what a process that joins must know besides the model: the optimizer, and whatever
            else has a `state_dict`: scheduler, GradScaler, data loader. The same on all ranks, in the same order.
            Without it nobody can join.
        on_change: In elastic training, called with (old, new) `View`s at the end of the first step that other ranks
            have made than the one before, from inside of `loss.backward()`: the place to deal out the data anew.
        **options: Fields of `Config` by name; they win over the environment.

    Raises:
        TypeError: An option has an unknown name, or `model_or_group` is neither, or a sharded model.
        ValueError: A value does not fit, or differs between the ranks.
        RuntimeError: torch.distributed is not initialised, or a rank did not join.
    """

    def __init__(
        self,
        model_or_group: nn.Module | dist.ProcessGroup | None = None,
        *,
        config: Config | None = None,
        carries: Sequence[Carried] = (),
        on_change: OnChange | None = None,
        **options: object,
    ) -> None:
        if config is not None and options:
            raise TypeError(
                f"`config` and {', '.join(f'`{name}`' for name in options)} are both given: put the options "
                "into the Config"
            )
        self.config = config or Config.from_env(**options)
        self.names = ParameterNames()
        self.steps = 0
        """Backward passes so far."""
        self._group: dist.ProcessGroup | None = None
        self._connection: _Connection | None = None
        self._in_step = False
        self._in_backward = False
        self._timed = True
        self._last_bucket_came = False
        self._announces_last = False
        """Whether DDP says which bucket is a step's last. With static_graph it does not in the first step, and waits
        for the futures before autograd says that backward has ended: then nothing may be held back."""
        self._sparse: list[Bucket] = []
        self._buckets: list[Bucket] = []
        self._transfers: list[Layout] = []
        self._resume: Resume | None = None
        self._carries = tuple(carries)
        self._on_change = on_change
        self._survivor: Survivor | None = None
        self._kept: Kept | None = None
        self._told: View | None = None
        """The ranks that the user knows of."""
        self._requests: Requests | None = None
        self._listed = 0
        """The list of those that join before the next step; 0 where nobody does."""
        self._last_rows: list[list[int]] = []
        """The transfers of the last step, for those that join."""
        self._next_rows: Tensor | None = None
        """The transfers of the next step, where ranks have joined whose buckets are others."""
        self._model: weakref.ref[DistributedDataParallel] | None = None
        self._pending: Checkpoint | None = None
        """A state that was loaded before the ranks had connected."""
        self._loaded = False
        """Whether a state was loaded."""
        self._check: Check | None = None
        for name, given in (("on_change", on_change), ("carries", carries), ("join", self.config.join)):
            if given and not self.config.elastic:
                raise ValueError(f"`{name}` is given but `elastic` is not set: pass elastic=True, too")
        if isinstance(model_or_group, nn.Module):
            self.bind(model_or_group)
        elif isinstance(model_or_group, dist.ProcessGroup):
            self._group = model_or_group
        elif model_or_group is not None:
            raise TypeError(
                f"`model_or_group` is a {type(model_or_group).__name__}; wanted a torch.nn.Module, a process "
                "group, or None"
            )

    def bind(self, model: nn.Module) -> None:
        """Takes parameter names from `model`, and its process group where it is a DDP model; connects the ranks.

        A state that was loaded before is restored now.

        Args:
            model: Best the DDP model that the hook is registered on.

        Raises:
            ValueError: The state belongs to another model, or has compressed gradients under numbers already; `model`
                has no parameters; or a state that was loaded does not fit.
            TypeError: `model` is sharded (FSDP, FSDP2, DeepSpeed): no DDP hook is ever called for it.
            RuntimeError: torch.distributed is not initialised, or a rank did not join.
        """
        if (why := why_no_ddp_hook(model)) is not None:
            raise TypeError(f"`model` is {why}")
        if self._compresses and self.names.shapes and not self.names.bound:
            raise ValueError(
                "`model` comes after the first step: residuals are already kept under numbers instead of its "
                "parameters' names; call state.bind(model) before the first backward pass"
            )
        self.names.bind(model)
        if self.config.compressor is not None:
            self._check = self._checked_later(model)
            warn_of_idle(self.config.rules, self.names.numels(), "Patterns are shell-style, of the whole name.")
        self._announces_last = isinstance(model, DistributedDataParallel) and not model.static_graph
        self._group = getattr(model, "process_group", None) or self._group
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise ValueError("`model` has no parameters: there is nothing to reduce")
        if self.config.elastic and not isinstance(model, DistributedDataParallel):
            raise ValueError(
                f"`elastic` is set, and `model` is a {type(model).__name__}; wanted the DistributedDataParallel model: "
                "its own process group has to change with the ranks"
            )
        if self.config.elastic and isinstance(model, DistributedDataParallel):
            self._model = weakref.ref(model)
        if getattr(model, "skip_all_reduce_unused_params", False):
            raise ValueError(
                "`model` skips the all-reduce of unused parameters; wanted skip_all_reduce_unused_params=False: a step "
                "whose last bucket is left out has no end that the hook could see"
            )
        self._connect(parameter.device)
        if self._survivor is not None and isinstance(model, DistributedDataParallel):
            self._group = ElasticGroup(self._survivor)
            swap_process_group(model, self._group)
            model.register_forward_pre_hook(_TakeIn(weakref.ref(self)), prepend=True)

    def unbind(self, model: nn.Module) -> None:
        """Ends the state because another hook has taken its place on `model`; its optimizer is not checked any more."""
        withdraw(model, self._check)
        self.close()

    @property
    def view(self) -> View:
        """In elastic training: which ranks there are now, and which of them is this one.

        Raises:
            RuntimeError: `elastic` is not set, or the ranks have not connected.
        """
        if self._survivor is None:
            raise RuntimeError("there is no view: `elastic` is not set, or no model is bound yet")
        return self._survivor.view

    @property
    def changes(self) -> tuple[Change, ...]:
        """In elastic training: the changes of the ranks so far, and what of each took how long here, oldest first.

        Raises:
            RuntimeError: `elastic` is not set, or the ranks have not connected.
        """
        if self._survivor is None:
            raise RuntimeError("there are no changes: `elastic` is not set, or no model is bound yet")
        return tuple(self._survivor.changes)

    def report(self) -> Report:
        """Calls, bytes and seconds of every phase so far, and the plans in use with their reasons.

        Raises:
            RuntimeError: The state has neither a model nor seen a bucket.
        """
        connection = self._connected("report()")
        found = connection.observer.add_to(connection.communicator.report(self.steps))
        return found if connection.chooser is None else replace(found, choices=connection.chooser.choices)

    def trace(self, file: str | Path, steps: int = 20) -> None:
        """Writes a timeline of all ranks' next steps into one file; every rank calls it between the same two steps.

        Buckets, transfers, phases, codecs, lanes and waits, on one clock, for https://ui.perfetto.dev, chrome://tracing
        and `gradwire plot`. The file is there when the last of the steps has ended.

        Args:
            file: JSON; rank 0 writes it.
            steps: How many.

        Raises:
            ValueError: `steps` is less than one.
            OSError: Rank 0 cannot write the file; raised on all ranks.
            RuntimeError: The ranks have not connected yet, or a trace is being made already.
        """
        self._connected("trace()").observer.trace(Path(file), steps)

    def export_metrics(
        self,
        *,
        file: str | Path | None = None,
        port: int | None = None,
        address: str = "127.0.0.1",
        every_seconds: float = 15.0,
    ) -> int | None:
        """Exports this rank's numbers for Prometheus, made anew at the end of a step.

        A second call adds a file or a port, or replaces the one there was; what it does not name goes on.

        Args:
            file: Replaced in one piece, as node_exporter's textfile collector wants it.
            port: Served as http://address:port/metrics; 0 takes a free one.
            address: That the port is opened at; "0.0.0.0" for all of this host.
            every_seconds: At most so often.

        Returns:
            The port; None without one.

        Raises:
            ValueError: Neither `file` nor `port` is given.
            OSError: The file cannot be written, or the port is taken.
            RuntimeError: The ranks have not connected yet.
        """
        observer = self._connected("export_metrics()").observer
        return observer.export_metrics(None if file is None else Path(file), port, address, every_seconds)

    def watch(self, scaler: LossScaler) -> None:
        """Follows a torch.amp.GradScaler: residuals are rescaled when it changes its scale.

        Raises:
            ValueError: There is no compressor, or no model yet.
        """
        self._compressed().watch(scaler)

    def set_loss_scale(self, scale: float) -> None:
        """Sets the factor that the next gradients carry, where no GradScaler does; call it before backward."""
        self._compressed().set_loss_scale(scale)

    def flush(self) -> None:
        """Sends the next step's gradients dense, with every residual added: afterwards nothing is held back.

        To be called on all ranks before the same step.
        """
        self._compressed().flushing = True

    def state_dict(self) -> Checkpoint:
        """This rank's residuals, momenta and factors; every rank saves its own.

        An entry under a key that carries the rank, and one that is the same on all ranks, both plain tuples of CPU
        tensors, numbers and strings: safe with `torch.load(weights_only=True)`, and with torch.distributed.checkpoint,
        which may be given the state itself. A state that has just been made for the model has the same keys. Empty
        without a compressor, and while neither torch.distributed is initialised nor a state has been loaded.
        """
        if not self._wants_compression:
            return {}
        if self._connection is None and self._pending is not None:
            return dict(self._pending)
        group = self._group or dist.group.WORLD if dist.is_initialized() else None
        if group is None:
            return {}
        own: StateDict = {}
        dirty = False
        if self._connection is not None:
            with self._connection.communicator.alone():
                own = self._compressed().state_dict() | {NAMED: int(self.names.bound)}
            self._connection.communicator.rejoin()
            dirty = self._compressed().dirty
        return pack(own, group.rank(), group.size(), dirty)

    def gathered_state_dict(self, *, on_all_ranks: bool = False) -> Checkpoint:
        """The states of all ranks in one, for frameworks in which rank 0 writes the checkpoint; all ranks call it.

        `load_state_dict` takes each rank's own part of it.

        Args:
            on_all_ranks: Whether every rank shall have all of it (one writes on each node); else rank 0 of the group
                alone, and the others get their own part.

        Raises:
            RuntimeError: torch.distributed is not initialised.
        """
        if not self._wants_compression:
            return {}
        group = self._group or dist.group.WORLD if dist.is_initialized() else None
        if group is None:
            raise RuntimeError("torch.distributed is not initialised: there are no ranks to gather a state from")
        return gather(self.state_dict(), group, on_all_ranks)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restores what `state_dict` returned on this rank, or `gathered_state_dict`; training goes on bit for bit.

        Before the state has a model or has seen a bucket, `state` is kept until then, and checked then. At another
        world size a state is taken only if it was flushed before it was saved (`flush()`, one step, save); momenta and
        warm-start factors then build up again.

        Raises:
            ValueError: The state is of another model, compressor, rank or world size; nothing was changed.
        """
        if not state and not self._wants_compression:
            return
        found = normalize(state)
        self._loaded = True
        if not self._wants_compression:
            if dict(found[JOB])["dirty"]:
                raise ValueError(
                    "`compressor` is not set, and `state` holds residuals that would be lost: set the compressor that "
                    "saved it, or call state.flush() and train one more step before saving"
                )
            return
        if self._connection is None:
            self._pending = found
        else:
            self._take_over(self._connection, found)

    def _take_over(self, connection: _Connection, state: Checkpoint) -> None:
        own = unpack(state, connection.communicator.rank, connection.communicator.size)
        if own is None:
            return
        named = own.pop(NAMED, None)
        if named is not None and bool(named) != self.names.bound:
            has, other = ("its parameters' names", "numbers") if self.names.bound else ("numbers", "parameters' names")
            raise ValueError(
                f"`state` keeps residuals under {other}, this HookState under {has}: give both the model, with "
                "HookState(model) or state.bind(model) before the first backward pass, or neither"
            )
        with connection.communicator.alone():
            self._compressed().load_state_dict(own)
        connection.communicator.state_loaded()

    def close(self) -> None:
        """Ends the threads and releases shared memory; happens by itself when the state is collected or at exit."""
        _on_cuda.discard(self)
        if self._connection is not None:
            self._connection.observer.close()
        if self._requests is not None:
            self._requests.close()
        if self._survivor is not None:
            self._survivor.close()
        elif self._connection is not None:
            self._connection.communicator.close()

    def reduce(self, bucket: GradBucket) -> FutureTensor:
        """Averages one bucket over all ranks; the future's value is the bucket's own buffer."""
        flat = bucket.buffer()
        if not self._in_step and flat.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(CAPTURED)  # before anything is connected or begun: the next step goes on
        connection = self._connection or self._connect(flat.device)
        if not self._in_step:
            self._begin_step(connection)
        recorder = connection.communicator.executor.recorder
        if recorder is None:
            future = self._reduce(bucket, flat, connection)
        else:
            with recorder.host_range(f"bucket {len(self._buckets)}"):
                future = self._reduce(bucket, flat, connection)
        if bucket.is_last():
            self._last_came(connection)
        return future

    def _reduce(self, bucket: GradBucket, flat: Tensor, connection: _Connection) -> FutureTensor:
        if flat.layout != torch.strided:
            if self._survivor is not None:
                raise TypeError("a sparse gradient in elastic training; wanted dense ones: nn.Embedding(sparse=False)")
            if self.config.reduction == "adasum":
                raise TypeError("a sparse gradient, and `reduction` is adasum; wanted dense ones: sparse=False")
            return self._reduce_sparse(bucket, flat, connection)
        layout = None
        if connection.communicator.compressor is not None or self._survivor is not None:
            parameters = tuple(map(id, bucket.parameters()))
            layout = self.names.layouts.get(parameters) or self.names.layout(bucket)
        index, contents = len(self._buckets), connection.observer.contents
        if index not in contents or contents[index][0] != flat.numel():
            contents[index] = flat.numel(), self.names.known(bucket.parameters())
        arrived = Bucket.of(flat, layout, connection.communicator.clock.now() if self._timed else None, index)
        self._buckets.append(arrived)
        if self._kept is not None:
            return self._kept.add(arrived, lambda: self._travel(connection, arrived))
        self._travel(connection, arrived)
        return arrived.result()

    def _reduce_sparse(self, bucket: GradBucket, sparse: Tensor, connection: _Connection) -> FutureTensor:
        """Gradients of nn.Embedding(sparse=True) come in buckets of their own; none is joined or compressed."""
        named, contents = self.names.known(bucket.parameters()), connection.observer.contents
        index = next(
            (index for index, (_, names) in contents.items() if index < 0 and names == named), -1 - len(contents)
        )
        contents[index] = sparse.numel(), named
        arrived = Bucket.of(sparse, index=index)
        self._sparse.append(arrived)
        scale = connection.scale * connection.after
        connection.communicator.start_sparse(arrived, scale=scale, as_dense=self.config.sparse_as_dense)
        return arrived.result()

    def _travel(self, connection: _Connection, arrived: Bucket) -> None:
        """Launches what is due now that a bucket has arrived."""
        if self._survivor is not None and not connection.agrees:
            self._agree(connection, self._survivor)
        if self._resume is not None and arrived.layout is not None:
            self._resume.add(arrived)
        else:
            self._launch(connection, connection.fusion.add(arrived))
            if not self._announces_last:
                self._launch(connection, connection.fusion.flush())
        if self._resume is not None and self._resume.is_complete:
            self._launch_resumed(connection)

    def advise(self, optimizer: str = "sgd", accumulate: int = 1) -> JobAdvice:
        """Recommends a plan and a compressor, from what this rank has measured, and says what could be gained at most.

        Args:
            optimizer: `sgd`, `adam`, ...: some compressors require one.
            accumulate: How many of the steps as they are shall be one, as micro-batches that are accumulated.

        Raises:
            RuntimeError: Fewer than three steps have been seen.
            ValueError: `accumulate` is less than one.
        """
        connection = self._connection
        observed = connection.watch.observed() if connection else None
        if connection is None or observed is None:
            raise RuntimeError("this state has seen fewer than three steps: call advise() later")
        routes = connection.communicator.routes
        return advise_job(routes.priced, connection.fusion.last_sizes, observed, optimizer, routes.library, accumulate)

    def fuse(self, plan: FusionPlan) -> None:
        """Changes which buckets travel together, from the next step on; every rank calls it between the same two steps.

        Raises:
            RuntimeError: No bucket has been reduced yet.
            ValueError: Not all ranks ask for the same plan: refused on all of them. Or it cuts buckets, and `reduction`
                is adasum.
        """
        if plan.piece_nbytes and self.config.reduction == "adasum":
            raise ValueError(
                f"`plan` has piece_nbytes {plan.piece_nbytes}, and `reduction` is adasum, which needs a parameter's "
                "gradient in one piece; wanted 0"
            )
        connection = self._connected("fuse()")
        connection.fusion_plans.agree(asdict(plan))
        connection.fusion.change(plan)

    def _connected(self, call: str) -> _Connection:
        if self._connection is None:
            raise RuntimeError(f"this state has not seen a bucket yet: call {call} after the first backward pass")
        return self._connection

    @property
    def _wants_compression(self) -> bool:
        return self.config.compressor not in (None, "none")

    @property
    def _compresses(self) -> bool:
        return self._connection is not None and self._connection.compression is not None

    def _compressed(self) -> Compression:
        if self._connection is None or self._connection.compression is None:
            raise ValueError("`compressor` is not set, or no model is bound yet: there is no state to keep")
        return self._connection.compression

    def _connect(self, device: torch.device) -> _Connection:
        if self._connection is None:
            if not dist.is_initialized():
                raise RuntimeError(
                    "torch.distributed is not initialised: call dist.init_process_group() before the hook is used"
                )
            group = self._group or dist.group.WORLD
            assert group is not None
            self.config = self.config.with_timeout_of(timeout_of(group, device))
            if self.config.join is not None:
                self._join(self.config.join, device)
            elif self.config.elastic:
                self._connect_elastic(group, device)
            else:
                self._connection = _Connection(_Peers.of(group, None), device, self.config, self.names)
            assert self._connection is not None
            if device.type == "cuda":
                _on_cuda.add(self)
                _register()
            pending, self._pending = self._pending, None
            if pending is not None:
                self._take_over(self._connection, pending)
        return self._connection

    def _connect_elastic(self, group: dist.ProcessGroup, device: torch.device) -> None:
        first = first_oversight(group.rank(), group.size(), self.config.timeout)
        peers = _Peers.of(group, first)
        name = peers.name
        self._connection = _Connection(peers, device, self.config, self.names)
        communicator = self._connection.communicator
        view = View(0, group.rank(), tuple(f"rank {rank}" for rank in range(group.size())))
        prefix = f"gradwire/elastic/{name}/{communicator.start_name}"
        outside = unprefixed(communicator.plain_store)
        said = {name: packed(each) for name, each in zip(view.members, communicator.presences, strict=True)}
        membership = Membership(PrefixStore(prefix, outside), view, self.config.timeout, said)
        assert isinstance(first.board, EpochBoard)
        first.board.membership = membership
        if self._carries:
            self._requests = self._open_door(PrefixStore(prefix, outside), device)
            if view.rank == 0:
                outside.set(job_key(name), prefix)
        self._survive(membership, communicator, joins=False)

    def _open_door(self, store: Store, device: torch.device) -> Requests:
        """For those that want to join."""
        made = Requests(store, self.config.timeout, self._shared(device), described(self._bound().module))
        weakref.finalize(self, made.close)
        return made

    def _bound(self) -> DistributedDataParallel:
        model = self._model() if self._model else None
        assert model is not None
        return model

    def _check_newcomer(self, newcomer: Newcomer) -> None:
        """Whether the ranks could go on with one more process; before anybody but rank 0 has heard of it.

        Raises:
            ValueError: They could not.
        """
        assert self._survivor is not None
        _, name, said = newcomer
        membership = self._survivor.membership
        known = presences([*membership.view.members, name], {**membership.said, name: said})
        cluster_of(known, self.config)
        interface_of(known, 0, self.config)
        check_state(self._own_state)

    def _shared(self, device: torch.device) -> dict[str, str]:
        """What a process that joins must have in common with the others."""
        given = "unknown" if self.config.nic_bytes_per_second is None else "known"
        return {**self.config.shared(), "device": device.type, "nic_bytes_per_second": given}

    def _join(self, address: str, device: torch.device) -> None:
        """Joins a running job: waits until it takes this process in, and takes over its state."""
        if not self._carries:
            raise ValueError("`join` is set and `carries` is empty; wanted the optimizer in it, as in the running job")
        name = _Peers.name_in(self._group or dist.group.WORLD)
        store = find_job(address, name, self.config.timeout)
        self._requests = self._open_door(store, device)
        presence, own = packed(Presence.here(0, 1, self.config, device)), described(self._bound().module)
        rehearse()
        for attempt in range(MOST_ATTEMPTS):
            view, said = ask(store, self._shared(device), self.config.timeout, presence, own)
            membership = Membership(store, view, self.config.timeout, said)
            try:
                overseen = oversight(view, membership, self.config.timeout)
                peers = _Peers(membership.store, "hook", view.rank, view.size, None, overseen)
                self._connection = _Connection(peers, device, self.config, self.names, joined=True)
                self._survive(membership, self._connection.communicator, joins=True)
                self._exchange_state(view.joined)
                return
            except BaseException as error:
                membership.close(orderly=False)
                if self._connection is not None:
                    self._connection.communicator.close()
                self._survivor = self._connection = None
                if not isinstance(error, RuntimeError | OSError) or attempt == MOST_ATTEMPTS - 1:
                    raise
                log.warning("could not join, and asks again: %s", error)

    def _survive(self, membership: Membership, communicator: Communicator, *, joins: bool) -> None:
        this = weakref.ref(self)

        def rebuild(view: View, store: Store, oversight: Oversight) -> Communicator:
            state = this()
            assert state is not None
            return state._rebuild(view, store, oversight)

        survivor = Survivor(membership, communicator, rebuild, self.config.timeout, joins=joins)
        weakref.finalize(self, survivor.close)
        self._survivor, self._told = survivor, survivor.view

    def _rebuild(self, view: View, store: Store, oversight: Oversight) -> Communicator:
        """In elastic training: connects the ranks of a new epoch."""
        previous = self._connected("elastic training")
        peers = _Peers(store, "hook", view.rank, view.size, None, oversight)
        made = _Connection(
            peers, previous.communicator.device, self.config, self.names, previous, joined=bool(view.joined)
        )
        self._connection = made
        return made.communicator

    def _checked_later(self, model: HasParameters) -> Check:
        config = self.config
        assert config.compressor is not None
        options, rules = config.compressor_options, config.rules
        this = weakref.ref(self)

        def resumed() -> None:
            if (state := this()) is not None:
                state._warn_of_resume()

        return check_at_first_step(model, config.compressor, options, rules, config.error_budget, resumed)

    def _warn_of_resume(self) -> None:
        """Called where the optimizer goes on from a checkpoint, before its first step here."""
        compression = self._connection.compression if self._connection is not None else None
        if self._loaded or compression is None or self.config.join is not None:
            return
        if any(isinstance(value, Tensor) for value in compression.compressor.state_dict().values()):
            log.warning(
                "the optimizer goes on from a checkpoint, and gradwire's state was not loaded: %s starts without what "
                "it held back, so training goes on otherwise than it would have. Save state.state_dict() of each "
                "rank, and load it",
                self.config.compressor,
            )

    def _begin_step(self, connection: _Connection) -> None:
        self._in_step = True
        self._last_bucket_came = False
        self._in_backward = queue_end_of_backward(self._backward_ended)
        if self.steps == 0 and not self.names.bound and self.config.compressor is not None:
            self._check = self._checked_later(self.names)
        communicator = connection.communicator
        if communicator.device.type == "cuda":
            communicator.executor.timing = is_timed(self.steps) or connection.observer.wants_times
        if connection.units is not None and self._survivor is None and self.steps and self.steps % REMEASURE_STEPS == 0:
            measure_units(communicator, connection.units, again=True)
        if connection.first_steps is not None and self._survivor is None:
            connection.first_steps.step_began(self.steps)
        connection.observer.step_began()
        self._timed = connection.tuning is not None or communicator.executor.timing
        if connection.compression is not None:
            if connection.compression.follows_scaler:
                with communicator.alone():
                    connection.compression.begin_step()
            saved = connection.compression.take_saved_transfers()
            self._resume = None if saved is None else Resume(saved)
        if connection.chooser is not None:
            connection.chooser.step_begins()
        if self._survivor is not None:
            rows, self._next_rows = self._next_rows, None
            self._resume = Resume(rows) if rows is not None else self._resume
            self._kept = Kept(connection.communicator, self._resume.rows if self._resume else None)

    def _last_came(self, connection: _Connection) -> None:
        """Holds nothing back any more: DDP may wait for the futures before it returns to autograd."""
        self._last_bucket_came = self._announces_last = True
        if self._kept is not None:
            self._settle()
        else:
            self._release(connection)
        if not self._in_backward:
            self._end_step()

    def _agree(self, connection: _Connection, survivor: Survivor) -> None:
        """Has all ranks decode payloads alike: what that takes may be on some nodes alone after a change."""
        routed = connection.compression.compressor if connection.compression is not None else None
        if isinstance(routed, Routed) and (stores := routed.shared()):
            agree(stores, self.names.numels(), connection.communicator, survivor.wait)
        connection.agrees = True

    def _release(self, connection: _Connection) -> None:
        self._launch(connection, connection.fusion.flush())
        self._launch_resumed(connection)
        connection.communicator.executor.release()

    def _settle(self) -> None:
        """In elastic training: returns when the step's gradients are averaged on all ranks that are left."""
        kept, survivor = self._kept, self._survivor
        if kept is not None and survivor is not None and not kept.settled:
            like = torch.zeros(1, dtype=torch.int64, device=survivor.communicator.device)
            listed = survivor.complete(lambda: self._attempt(kept, survivor), like)
            kept.settle()
            self._listed = int(like.copy_(listed).item()) if listed is not None else 0

    def _attempt(self, kept: Kept, survivor: Survivor) -> Tensor:
        """Sends the step's gradients, or sends them again, and returns when all ranks have the averages.

        Returns:
            The number of the list of those that want to join; int64, one element.

        Raises:
            RuntimeError: A rank was lost.
        """
        connection = self._connected("backward()")
        communicator = connection.communicator
        if kept.belongs_to(communicator):
            kept.check()
        else:
            self._transfers.clear()
            if connection.compression is not None:
                with communicator.alone():
                    connection.compression.compressor.end_step(False)
            self._buckets = kept.restore(communicator)
            self._resume = None if kept.rows is None else Resume(kept.rows)
            for bucket in self._buckets:
                self._travel(connection, bucket)
        self._release(connection)
        kept.wait()
        communicator.rejoin()
        looks = self._requests is not None and communicator.rank == 0
        found = self._requests.look(self._check_newcomer) if looks and self._requests else 0
        listed = torch.tensor([found], device=communicator.device)
        return survivor.wait(communicator.all_reduce(listed))

    def take_in(self) -> None:
        """In elastic training: takes in processes that wait; called by the model before each forward pass."""
        if not self._listed or self._in_step or self._survivor is None or self._requests is None:
            return
        listed, self._listed = self._listed, 0
        newcomers = self._requests.listed(listed)
        self._survivor.admit(newcomers, self._requests)
        began = time.perf_counter()
        self._exchange_state([name for _, name, _ in newcomers])
        self._survivor.changes[-1].seconds["hand over"] = time.perf_counter() - began
        self._tell_change()

    def _exchange_state(self, names: Sequence[str]) -> None:
        """Gives rank 0's state to those that have joined; all ranks."""
        survivor, model = self._survivor, self._model() if self._model else None
        assert survivor is not None and model is not None
        joins = survivor.view.members[survivor.view.rank] in names
        handed: list[Handed] = []

        def attempt() -> Tensor:
            handed.clear()
            if set(names) & set(survivor.view.members):
                transfer = StateTransfer(survivor.communicator, survivor.wait)
                handed.append(transfer.run(self._own_state, self._last_rows, wanted=joins))
            return survivor.wait(survivor.communicator.all_reduce(torch.zeros_like(like)))

        like = torch.zeros(1, dtype=torch.int64, device=survivor.communicator.device)
        survivor.complete(attempt, like)
        if not handed:
            return
        found = handed[0]
        self._next_rows = torch.tensor(found.shared, dtype=torch.int64).view(-1, COLUMNS) if found.shared else None
        if not joins:
            swap_process_group(model, model.process_group)
        elif found.state is None:
            raise ValueError(f"the running job cannot take this process in: {found.refused}")
        else:
            self._take_state(model, found.state)

    def _own_state(self) -> dict[str, object]:
        """What a process that joins has to know."""
        model = self._model() if self._model else None
        compression = self._connected("elastic training").compression
        assert model is not None
        return {
            "steps": self.steps,
            "model": model.module.state_dict(),
            "carried": [each.state_dict() for each in self._carries],
            "compression": {} if compression is None else compression.progress(),
        }

    def _take_state(self, model: DistributedDataParallel, found: Mapping[str, Any]) -> None:
        load_module(model.module, found["model"])
        if len(found["carried"]) != len(self._carries):
            raise ValueError(
                f"`carries` has {len(self._carries)} entries here and {len(found['carried'])} in the running job; "
                "wanted the same objects in the same order"
            )
        for number, (each, state) in enumerate(zip(self._carries, found["carried"], strict=True)):
            try:
                each.load_state_dict(state)
            except Exception as error:
                raise ValueError(
                    f"`carries` has a {type(each).__name__} as number {number} here, which does not take the state "
                    f"that the running job has there: {error}"
                ) from error
        self.steps = found["steps"]
        compression = self._connected("elastic training").compression
        if compression is not None:
            compression.take_progress(found["compression"])

    def _backward_ended(self) -> None:
        """Called by autograd; too early where the first bucket came in a checkpoint that runs a backward of its own."""
        if not self._in_step:
            return
        self._in_backward = False
        if self._last_bucket_came or not self._announces_last:
            self._end_step()

    def _launch_resumed(self, connection: _Connection) -> None:
        """Sends what waits for the transfers of the step that was saved."""
        if self._resume is not None:
            resume, self._resume = self._resume, None
            self._launch(connection, resume.end_step())

    def _launch(self, connection: _Connection, launches: Sequence[Launch]) -> None:
        """Starts what fusion has decided on."""
        compression = connection.compression
        for launch in launches:
            if launch.layout is not None:
                self._transfers.append(launch.layout)
            scale, after = connection.scale, connection.after
            flush = compression is not None and compression.flushing
            connection.communicator.start(launch, scale=scale, after=after, flush=flush, hold=self._announces_last)

    def _end_step(self) -> None:
        """Runs once at the end of each backward pass, on all ranks at the same point of the sequence of buckets."""
        self._settle()
        self._kept = None
        connection = self._connected("backward()")
        self._in_step = False
        self.steps += 1
        if self.steps == 1 and not self.names.bound and self.config.compressor is not None:
            warn_of_idle(self.config.rules, self.names.numels(), UNNAMED)
        self._launch(connection, connection.fusion.end_step())
        self._launch_resumed(connection)
        communicator = connection.communicator
        communicator.executor.release()
        communicator.executor.read_times()
        buckets, self._buckets = self._buckets, []
        transfers, self._transfers = self._transfers, []
        sparse, self._sparse = self._sparse, []
        if self._requests is not None:
            self._last_rows = to_rows(transfers).tolist()
        if connection.compression is not None:
            if communicator.device.type == "cuda":
                try:
                    with communicator.alone():
                        extremes = [*communicator.executor.extremes(), *_sparse_extremes(sparse)]
                        connection.compression.end_step_on_device(extremes, transfers)
                except Exception as error:  # no memory, say: what this rank holds back is not what the others think
                    communicator.executor.interrupt(error)
                    raise
            else:
                connection.compression.end_step([*buckets, *sparse], transfers)
        if connection.chooser is not None:
            connection.chooser.step_ended(buckets, transfers)
        times = [bucket.times for bucket in buckets]
        if communicator.executor.timing:
            connection.watch.step_ended(times)
        else:
            connection.watch.step_passed()
        if self._survivor is not None and connection.compression is not None and self.steps % NOTE_EVERY == 0:
            with communicator.alone():
                self._survivor.membership.note = json.dumps([self.steps, connection.compression.held_norm()])
        # What asks all ranks is asked where all have made this step in one epoch, or none has.
        together = self._survivor is None or self._survivor.by_itself
        connection.observer.step_ended(self.steps, buckets, self.report, together=together)
        if communicator.device.type == "cuda" and buckets:
            communicator.executor.spoil(buckets[-1])
        if connection.tuning is not None:
            connection.tuning.step_ended([each.arrived for each in times if each.arrived is not None])
        self._tell_change()
        communicator.executor.raise_failure()

    def _tell_change(self) -> None:
        """In elastic training: tells the user that other ranks have made this step than the one before."""
        if self._survivor is None or self._told is None or self._survivor.view.epoch == self._told.epoch:
            return
        old, now = self._told, self._survivor.view
        lost = tuple(name for name in old.members if name not in now.members)
        joined = tuple(name for name in now.members if name not in old.members)
        new = self._told = replace(now, lost=lost, joined=joined)
        if lost and self._compresses and now.rank == 0:
            for name in lost:
                note = self._survivor.membership.note_of(name)
                norm = (
                    "its norm is unknown"
                    if note is None
                    else "its norm was {1:.3g} after step {0}".format(*json.loads(note))
                )
                log.warning("what the compressor held back on %s is lost; %s", name, norm)
        if self._on_change is not None:
            self._on_change(old, new)

    def __deepcopy__(self, memo: dict[int, object]) -> "HookState":
        """A copy of a DDP model loses its hook; its state starts anew, unbound, and says so."""
        log.warning(
            "a DDP model with gradwire's hook was copied: torch drops the hook in copies; call "
            "register_comm_hook on the copy if it is to be trained"
        )
        return HookState(config=self.config)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the configuration alone: threads and connections stay with the process."""
        return _restore, (self.config,)


class _TakeIn:
    """Forward pre-hook of an elastic model; called by all ranks alike in training, which an evaluation need not be.

    Args:
        state: The model's; not kept alive.
    """

    def __init__(self, state: "weakref.ref[HookState]") -> None:
        self._state = state

    def __call__(self, model: nn.Module, inputs: object) -> None:
        """Takes in processes that wait, before a step."""
        state = self._state()
        if state is not None and model.training and torch.is_grad_enabled():
            state.take_in()

    def __reduce__(self) -> tuple[object, ...]:
        """A copy of the model has no state."""
        return _TakeIn, (_no_state,)


def _no_state() -> None:
    """Of a copied model."""


@cache
def _register() -> RemovableHandle:
    """Once for the process: torch runs its hooks in a loop that does not allow one to remove itself."""
    return register_optimizer_step_pre_hook(_refuse_step)


def _refuse_step(optimizer: Optimizer, args: object, named: object) -> None:
    """Before any optimizer's step: raises what has failed in the step whose averages it would take."""
    for state in list(_on_cuda):
        if state._connection is not None:
            state._connection.communicator.executor.raise_failure()


def is_timed(step: int) -> bool:
    """Whether a step on CUDA is timed: two in a row give a step's length, the first ones hold start-up.

    Args:
        step: Backward passes before this one.
    """
    return TIMED_FROM <= step < TIMED_UNTIL or step % TIMED_EVERY < STEPS_IN_A_ROW


def comm_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook to register: averages a bucket over all ranks of `state`.

    Args:
        state: Made for this model.
        bucket: What DDP hands over.

    Returns:
        A future of the averaged buffer. Its error, if any, comes out of `loss.backward()`.

    Raises:
        TypeError: Called by the compiled-autograd reducer, which hands over single gradients.
    """
    if isinstance(bucket, tuple):
        raise TypeError(PYTHON_REDUCER)
    return state.reduce(bucket)


def _compression(config: Config, names: ParameterNames, peers: _Peers) -> Compression | None:
    if config.compressor in (None, "none"):
        return None
    compression = Compression(
        config.compressor, config.compressor_options, config.rules, peers.rank, peers.size, config.error_budget
    )
    compression.compressor.bind_model(names.numels())
    return compression


def _sparse_extremes(buckets: Sequence[Bucket]) -> list[Tensor]:
    """Of the rows of sparse averages, 0-dim: finite if and only if all of them are."""
    values = [bucket.result().wait()._values() for bucket in buckets]
    return [extreme for value in values if value.numel() for extreme in torch.aminmax(value)]


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


def _restore(config: Config) -> HookState:
    return HookState(config=config)
