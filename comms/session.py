"""Base classes of the states for DDP (`HookState`), FSDP2 (`FsdpState`) and `Outer`, and of their sessions.

A *session* is the connected side of a state: communicator, compressor and listeners. A state has one as soon as its
ranks have connected; in elastic training a new one each time that ranks leave or join. `TrainingState` is the user's
side: traces, metrics and checkpoints. `GradientState` adds what only gradients of every step have: advice, loss scales,
flushing and the check of optimizers.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradwire.comms.bootstrap.compat import Store, store_of
from gradwire.comms.bootstrap.failure_reporter import FailureReporter
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.communicator import Communicator, FailurePolicy
from gradwire.comms.config import DELAYED, SAMPLES, Config
from gradwire.comms.fusion import Fusion, FusionPlan
from gradwire.comms.names import ParameterNames
from gradwire.comms.plan.plan import BUCKET_NBYTES
from gradwire.comms.report import Report
from gradwire.comms.step.features import (
    compare_loaded,
    compress_steps,
    follow_backward,
    learn_cuts,
    measure_links,
    watch_steps,
    weigh_ranks,
)
from gradwire.comms.step.listeners import Grouping, Listeners
from gradwire.comms.transport.groups import check_transport
from gradwire.compressors.base import Compressor, StateDict, keeps_momentum, traits_of

FUSION_TIMEOUT = timedelta(seconds=30)
"""Timeout of `fuse()` for the other ranks to call it with the same plan."""

GRADIENT_NBYTES = 4
"""Bytes of a gradient element in estimates of a model's gradient size: float32."""

UNUSABLE = (
    "{found}, and `state` holds residuals that would be lost: set the one that saved it, or call state.flush() and "
    "train one more step before saving"
)
"""Message about a state with residuals; `found` says why this state has no place for them."""
NO_COMPRESSOR = "`compressor` is not set"

GOES_ON = (
    "the optimizer goes on from a checkpoint, and gradwire's state was not loaded: %s starts without what it held "
    "back, so training goes on otherwise than it would have. Save state.state_dict() of each rank, and load it"
)
GOES_ON_IN_ANOTHER = (
    "another state has averaged gradients of this model before, and this one is new: %s starts without the momentum "
    "and the residuals that the other one holds, so training goes on otherwise than it would have. Before the first "
    "step call state.load_state_dict(other.state_dict()); if the compressor is another one, call other.flush() and "
    "take one more step before the model is wrapped again"
)
LOST_MOMENTUM = (
    "`state` is of another number of ranks, or another mesh: its residuals are in the weights, and the momentum that "
    "%s keeps for the optimizer builds up again from zero"
)
"""Warnings about a state that starts afresh in a training that does not; `%s` is the name of the compressor."""

log = logging.getLogger("gradwire")

if TYPE_CHECKING:
    from gradwire.comms.autotune.job_advice import JobAdvice
    from gradwire.comms.bootstrap.agree import Agreement
    from gradwire.comms.bootstrap.probe import PeerWait
    from gradwire.comms.checkpoint import Checkpoint
    from gradwire.comms.compression import Compression
    from gradwire.comms.loss_scale import LossScale, LossScaler
    from gradwire.comms.step.loaded import Loaded
    from gradwire.comms.step.samples import SampleWeights
    from gradwire.compressors.optim.first_step import Check, HasParameters

_numbers: "weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]]" = weakref.WeakKeyDictionary()
"""Process group -> numbers of sessions of each kind so far; its ranks make them in the same order.

By the group itself: torch gives names again after `destroy_process_group()`, and of the new group's ranks some may have
been in the old one, and others not.
"""

_compressed_by = WeakIdKeyDictionary()
"""Parameter -> weak reference to the `Compression` that has averaged its gradients last, of those that keep tensors."""


@dataclass(frozen=True, slots=True)
class SessionRanks:
    """Describes the ranks of a session that is about to connect.

    Attributes:
        store: Store that all of these ranks share.
        name: Name of the session, unique in the store and equal on all ranks.
        rank: This rank.
        size: Number of ranks.
        group: Process group of these ranks; None after ranks have left or joined a job that goes on without failed
            ones.
        failure_policy: Replaces the report of failed ranks, so that training goes on without them; with None a failed
            rank ends the job.
        reporter: Failure reporter shared with other groups; None makes one for these ranks.
    """

    store: Store
    name: str
    rank: int
    size: int
    group: dist.ProcessGroup | None
    failure_policy: FailurePolicy | None = None
    reporter: FailureReporter | None = None

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup,
        kind: str,
        *,
        failure_policy: FailurePolicy | None = None,
        reporter: FailureReporter | None = None,
    ) -> "SessionRanks":
        """Describes all ranks of a process group for its next session of a kind, which it names by `name_in`.

        Args:
            group: The process group.
            kind: Kind of session; sessions of a kind are made in the same order on all ranks of the group.
            failure_policy: Replaces the report of failed ranks; with None a failed rank ends the job.
            reporter: Failure reporter shared with other groups; None makes one for these ranks.
        """
        name = cls.name_in(group, kind)
        return cls(store_of(group), name, group.rank(), group.size(), group, failure_policy, reporter)

    @classmethod
    def name_in(cls, group: dist.ProcessGroup, kind: str) -> str:
        """Returns the name of the next session of a kind on a group: `hook0`, then `hook1`; each call counts one more.

        Args:
            group: The process group; all its ranks make their sessions of a kind in the same order.
            kind: Kind of session, such as `hook`.
        """
        numbers = _numbers.setdefault(group, Counter())
        numbers[kind] += 1
        return f"{kind}{numbers[kind] - 1}"


class AveragingSession:
    """Holds the connected ranks of a state: communicator, compressor and listeners.

    Args:
        ranks: Ranks to connect.
        device: Device of the tensors.
        config: The user's configuration.
        numels: Elements of each parameter on this rank, by name.
        reduction: Combines tensors between nodes if there is no compressor; None is a plain sum.
        previous: Session before the ranks changed, whose compressor is kept; None for the first session.

    Attributes:
        group: Process group; see `SessionRanks`.
        communicator: Communicator of the ranks.
        compression: Compressor and its state; None if tensors are exact.
        listeners: Listeners of its steps.
        watch: Times the steps, for `advise()`; set by `watch_steps`.
        observer: Has stragglers, stalls, traces and metrics; set by `watch_steps`.

    Raises:
        RuntimeError: A rank did not join within the time-out.
        ValueError: A rank joined with another world size or configuration.
    """

    def __init__(
        self,
        ranks: SessionRanks,
        device: torch.device,
        config: Config,
        numels: Mapping[str, int],
        *,
        reduction: Compressor | None = None,
        previous: "AveragingSession | None" = None,
    ) -> None:
        check_transport(config.transport_name, device)  # before a compressor is prepared there
        self.group = ranks.group
        self._config = config
        self._failure_policy = ranks.failure_policy
        self._called = (
            None if ranks.reporter is None or ranks.group is None else dist.get_process_group_ranks(ranks.group)
        )
        """Rank numbers used in messages: those of the reporter, which may be for more ranks than this session."""
        self._sizes: Sequence[int] = ()
        self.compression: Compression | None = previous.compression if previous else _compression(config, numels, ranks)
        self.communicator = Communicator(
            ranks.store,
            ranks.rank,
            ranks.size,
            device,
            config,
            name=ranks.name,
            compressor=self.compression.compressor if self.compression else reduction,
            group=ranks.group,
            reporter=ranks.reporter,
            failure_policy=ranks.failure_policy,
            kernels=_kernels(device, self.compression.compressor) if self.compression else "",
        )
        # Registered at once: a later line may raise.
        weakref.finalize(self, self.communicator.close)
        if self.compression is not None:
            self.compression.placement = self.communicator.placement
        self.listeners = Listeners()

    def connect(self, nbytes: int, sparse_nbytes: int = 0) -> None:
        """Fixes the plan of exact buckets, and connects the transports of this session's plans; all ranks call it.

        The plan is the best one for a bucket of `nbytes`, unless the user asked for one by name. Compressed buckets
        have plans of their own.

        Args:
            nbytes: Bytes of a usual bucket; the same on all ranks.
            sparse_nbytes: Bytes of the largest parameter whose gradient is sparse; 0 if there is none.

        Raises:
            CollectiveError: The ranks could not connect; see `Communicator.connect`.
        """
        self.communicator.rank_plans.fix_plan(nbytes)
        self.communicator.connect(nbytes, sparse_nbytes)

    def watch_steps(self, previous: "AveragingSession | None" = None) -> None:
        """Adds the listeners that time steps and warn of stragglers and stalls; sets `watch` and `observer` to them.

        Args:
            previous: Session whose metrics are continued; None starts new ones.
        """
        self.watch, self.observer = watch_steps(self.listeners, self.communicator, self._config, self.group)
        if previous is not None:
            self.observer.follow(previous.observer)
        weakref.finalize(self, self.observer.close)

    def compare_loaded(self, *, changed: bool = False, beside: "Loaded | None" = None, kept: str = "") -> None:
        """Adds the listener that checks, when steps begin, that all ranks have loaded the same checkpoint.

        Args:
            changed: Whether the ranks have changed: those that have joined have loaded nothing, so only states loaded
                from now on are compared.
            beside: Object whose `loaded` is compared if there is no compressor; without either, nothing is compared.
            kept: Text about the state that this rank keeps, such as how the ranks are placed: only ranks with the same
                text are compared with each other. Empty compares all.
        """
        source = beside if self.compression is None else self.compression
        if source is not None:
            ranks, consensus = self.communicator, self._consensus
            compare_loaded(self.listeners, ranks, source, consensus, changed=changed, kept=kept)

    def _consensus(self, name: str, timeout: timedelta) -> "Agreement":
        """Makes an object by which ranks agree on values, through the store; all ranks call it with equal arguments.

        Args:
            name: Prefix of its keys, unique among the agreements of this session.
            timeout: Longest wait for the other ranks.
        """
        from gradwire.comms.bootstrap.agree import Agreement  # here: fixed plans need no decisions

        ranks = self.communicator
        # In elastic training no rank may wait for one that has failed.
        if self._failure_policy is not None:
            own = self._failure_policy.polling(ranks.plain_store)
        else:
            own = PollingStore(ranks.plain_store, self._config.timeout, ranks=ranks.size)
        return Agreement(
            own, ranks.rank, ranks.size, name, timeout, find_exited=ranks.peer_wait().exited_among, names=self._called
        )

    @property
    def last_sizes(self) -> Sequence[int]:
        """Bytes of each all-reduce of the last step, in order."""
        return self._sizes

    def note_sizes(self, sizes: Sequence[int]) -> None:
        """Records the bytes of each all-reduce of a step, in order, for `last_sizes`."""
        self._sizes = tuple(sizes)

    def report(self, steps: int) -> Report:
        """Returns this rank's report: bytes, seconds and plans so far, with the stragglers and stalls that were found.

        Args:
            steps: Number of steps so far.
        """
        return self.observer.add_to(self.communicator.report(steps))

    def state_dict(self) -> StateDict:
        """Returns this rank's compressor state; empty without a compressor. On CUDA it waits for the last step."""
        if self.compression is None:
            return {}
        with self.communicator.exclusive():
            own = self.compression.state_dict()
        self.communicator.sync_current_stream()
        return own

    def load_state_dict(self, own: StateDict) -> None:
        """Restores a state that `state_dict` returned on the same rank of the same number of ranks; between two steps.

        Args:
            own: State of this rank; ignored without a compressor.

        Raises:
            ValueError: The state is of another model or compressor, or is damaged; nothing was changed.
        """
        if self.compression is not None:
            with self.communicator.exclusive():
                self.compression.load_state_dict(own)
            self.communicator.state_loaded(as_saved=self.compression.as_saved)


class GradientSession(AveragingSession):
    """Holds the connected ranks of a DDP model's gradients; also joins buckets, measures links and learns cuts.

    Args:
        peers: Ranks to connect.
        device: Device of the gradients.
        config: The user's configuration.
        names: Names of the parameters.
        previous: Session before the ranks changed, whose compressor is kept; None for the first session.
        joined: Whether ranks have joined. They lack the link rates and cuts that the others have learned, so all ranks
            go back to the configured ones.

    Attributes:
        fusion: Joins buckets into all-reduces, by its plan.
        grouping: Decides which buckets of the running step are joined: `fusion`, unless a listener replaces it for a
            step.
        agrees: Whether the state that decodes payloads is known to be equal on all ranks.
        scale: Factor on every rank's gradients before the sum.
        after: Factor on the sum.
        weights: Weights of the ranks' gradients, applied before anything else; None if all ranks weigh the same.

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
        super().__init__(peers, device, config, names.numels(), reduction=_reduction(config), previous=previous)
        # The fusion plan of the first step.
        name = self._name = peers.name
        self._names = names
        self.communicator.executor.checking = self.compression is not None
        threshold_nbytes = round(config.fusion_mb * 2**20)
        delayed = config.fusion == DELAYED
        if delayed and names.bound:
            threshold_nbytes = sum(names.numels().values()) * GRADIENT_NBYTES
        first = FusionPlan(threshold_nbytes=threshold_nbytes, delayed=delayed)
        self.fusion: Fusion = Fusion(previous.fusion.plan if previous and not joined else first)
        self.grouping: Grouping = self.fusion
        self.agrees = previous is None and not joined
        self._fusion_plans: Agreement | None = None
        self._after_error: Agreement | None = None

        def consensus(what: str, timeout: timedelta) -> "Agreement":
            return self._consensus(f"{what}/{name}", timeout)

        # Take over what earlier ranks have learned, or measure links; then connect.
        if previous is not None and not joined:
            self._take_over_rates(previous)
        if previous is not None or joined:
            self._move_state()
        else:
            measure_links(self.listeners, self.communicator, config, consensus)
        self.connect(threshold_nbytes or BUCKET_NBYTES, names.sparse_nbytes)
        # Listeners of each step.
        if self.compression is not None:
            compress_steps(self.listeners, self, self.communicator, self.compression)
        follow_backward(
            self.listeners, names, device, self.compression, None if previous is None else previous.listeners
        )
        self.compare_loaded(changed=previous is not None or joined)
        self.scale, self.after = _factors(config, self.communicator)
        self.weights: SampleWeights | None = None
        if config.sums.kind == SAMPLES:
            self.weigh_ranks()
        self.watch_steps(previous)
        if previous is None and not joined:
            learn_cuts(self.listeners, self.communicator, self.fusion, name, names.shapes)

    def weigh_ranks(self) -> None:
        """Makes each rank's gradients count by its samples, from the next step on; every rank calls it before that.

        Sets `weights`, which multiplies the gradients before they are sent, and `scale` and `after` to 1.
        """
        self.weights = weigh_ranks(self.listeners, self.communicator)
        self.scale, self.after = 1.0, 1.0

    @property
    def last_sizes(self) -> Sequence[int]:
        """Bytes of the last step's buckets, in the order in which they arrived."""
        return self.fusion.last_sizes

    def state_dict(self) -> StateDict:
        """Returns this rank's compressor state, and whether its keys are parameter names; empty if exact."""
        own = super().state_dict()
        if not own:
            return own
        from gradwire.comms.checkpoint import NAMED  # here: an exact hook has nothing to save

        return own | {NAMED: int(self._names.bound)}

    def load_state_dict(self, own: StateDict) -> None:
        """Restores a state that `state_dict` returned on the same rank of the same number of ranks.

        Args:
            own: State of this rank; the entry that says whether its keys are names is taken out of it.

        Raises:
            ValueError: The state is of another model or compressor, under other names, or damaged; nothing was changed.
        """
        from gradwire.comms.checkpoint import NAMED, refuse_other_kinds  # here: an exact hook has nothing to restore

        if NAMED in own:
            refuse_other_kinds(own, {NAMED: int})
        named = own.pop(NAMED, None)
        if named is not None and bool(named) != self._names.bound:
            has, other = ("its parameters' names", "numbers") if self._names.bound else ("numbers", "parameters' names")
            raise ValueError(
                f"`state` keeps residuals under {other}, this HookState under {has}: give both the model, with "
                "HookState(model) or state.bind(model) before the first backward pass, or neither"
            )
        super().load_state_dict(own)

    def go_on(self, steps: int) -> None:
        """Checks that all ranks go on after the same failed backward pass; every rank calls it, and waits for others.

        Args:
            steps: Number of finished steps on this rank.

        Raises:
            ValueError: The numbers differ, so gradients of different steps would be summed, or a rank has not called it
                within the time-out.
        """
        after = self._after_error or self._consensus(f"backward() after an error/{self._name}", self._config.timeout)
        self._after_error = after
        after.same({"finished steps": steps})

    def _take_over_rates(self, previous: "GradientSession") -> None:
        """Takes over the link rates that the session before the ranks changed has measured for its plans.

        Does nothing if it has measured none, or had another number of levels.
        """
        rank_plans, before = self.communicator.rank_plans, previous.communicator.rank_plans
        if before.links.decided and before.cluster.depth == rank_plans.cluster.depth:
            rank_plans.measured(before.cluster.levels)

    def _move_state(self) -> None:
        """Tells the compressor this rank's new number, and has its state moved to the new owners at the next step."""
        if self.compression is not None:
            self.compression.renumber(self.communicator.rank, self.communicator.size)
            self.communicator.state_loaded()

    def fuse(self, plan: FusionPlan) -> None:
        """Changes which buckets are joined into all-reduces; all ranks call it with the same plan, between two steps.

        Args:
            plan: Fusion plan from the next step on.

        Raises:
            ValueError: On all ranks: the ranks' plans differ, or a rank did not call it within 30 s (`FUSION_TIMEOUT`);
                the present plan stays.
        """
        self._fusion_plans = self._fusion_plans or self._consensus(f"fusion/{self._name}", FUSION_TIMEOUT)
        self._fusion_plans.same(asdict(plan))
        self.fusion.change(plan)


def refused(name: str, why: str) -> Any:
    """Makes a property that raises when it is read or set, for an attribute that users may take over from `HookState`.

    Without it `state.samples = 8` on a state that has no samples would be accepted and change nothing.

    Args:
        name: Name of the attribute.
        why: Reason, and what to do instead.

    Raises:
        AttributeError: In each access, with `name` and `why`.
    """

    def refuse(state: object, value: object = None) -> Any:
        raise AttributeError(f"`{name}` is not there for {type(state).__name__}: {why}")

    return property(refuse, refuse)


S = TypeVar("S", bound=AveragingSession)


class TrainingState(Generic[S]):
    """Base class of the states that users hold; has what all of them have: traces, metrics, saving and loading.

    `GradientState` adds what needs gradients of every step. Its ranks connect later, and then it has a session.

    Args:
        config: The configuration.
        peer_wait: Makes the check for ranks that exit while states are gathered; None uses the communicator's, once the
            ranks have connected.

    Attributes:
        config: The configuration.
        steps: Number of finished steps.

    Raises:
        RuntimeError: `transport` is mpi, which this process cannot have.
    """

    OPTIONS: ClassVar[tuple[str, ...]]
    """Fields of `Config` that the class takes; `unfit_option` and the like refuse the others by name."""

    MARK: ClassVar[str] = ""
    """Prefix of keys that only this class has in its entries of a checkpoint; see `checkpoint.OWNERS`."""

    NOT_CONNECTED: ClassVar[str]
    """Message of the error of a call that needs a session before there is one; `{call}` is replaced by the call."""

    def __init__(self, config: Config, peer_wait: "Callable[[], PeerWait] | None" = None) -> None:
        check_transport(config.transport_name)
        self.config = config
        self.steps = 0
        self._peer_wait = peer_wait
        self._group: dist.ProcessGroup | None = None
        self._session: S | None = None
        """None before the ranks have connected; another one after the ranks have changed."""
        self._pending: Checkpoint | None = None
        """Checkpoint that was loaded before the ranks have connected; None if there is none, or it was restored. One
        that was refused then stays, so that no step runs without it."""
        self._loaded = False
        """True once a checkpoint was loaded."""

    def trace(self, file: str | Path, steps: int = 20) -> None:
        """Writes a timeline of all ranks' next steps into one file; every rank calls it between the same two steps.

        It shows buckets, transfers, phases, codecs, lanes and waits on one clock, for https://ui.perfetto.dev,
        chrome://tracing and `gradwire plot`. The file is written when the last of the steps has ended.

        Args:
            file: Path of the JSON file, which rank 0 writes.
            steps: Number of steps to trace.

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
        every_seconds: float = 1.0,
    ) -> int | None:
        """Exports metrics of this rank for Prometheus, updated at the ends of steps.

        A last update, at `close()` or at exit, has all steps; a signal that kills the process leaves that out. A second
        call adds a file or a port, or replaces the earlier one; an export that it does not name goes on. Its
        `every_seconds` holds for both.

        Args:
            file: Path of a file that is emptied now, and replaced atomically at each update, as node_exporter's
                textfile collector needs it; None writes none.
            port: Port at which http://address:port/metrics is served; 0 takes a free one, None serves none.
            address: Address of this host at which the port is opened; "0.0.0.0" for all of them. Ignored without
                `port`.
            every_seconds: Shortest time between two updates, which happen at ends of steps; 0 updates at each step.

        Returns:
            The port that is served; None if there is none.

        Raises:
            ValueError: Neither `file` nor `port` is given, or a number is out of range.
            OSError: The file cannot be written, or the port is taken; nothing is changed.
            RuntimeError: The ranks have not connected yet.
        """
        observer = self._connected("export_metrics()").observer
        return observer.export_metrics(None if file is None else Path(file), port, address, every_seconds)

    @property
    def dirty(self) -> bool:
        """Whether residuals are pending, so that a checkpoint fits these ranks only; equal on all ranks.

        On CUDA it waits until the device has decided about the last step.
        """
        compression = None if self._session is None else self._session.compression
        return compression is not None and compression.dirty

    def state_dict(self) -> "Checkpoint":
        """Returns this rank's residuals, momenta and factors for a checkpoint; every rank saves its own.

        The result has an entry under a key that carries the rank, and one that is the same on all ranks, both plain
        tuples of CPU tensors, numbers and strings. So it is safe with `torch.load(weights_only=True)` and with
        torch.distributed.checkpoint, which may be given this object itself: one that has just been made for the model
        has the same keys.

        Returns:
            The checkpoint; empty if nothing is compressed, and as long as neither torch.distributed is initialised nor
            a state has been loaded.
        """
        if not self._keeps:
            return {}
        if self._pending is not None:
            return dict(self._pending)
        from gradwire.comms.checkpoint import pack  # here: an exact hook has nothing to save

        place = self._place()
        return {} if place is None else pack(self._own_state(), *place, self.dirty)

    def gathered_state_dict(self, *, on_all_ranks: bool = False) -> "Checkpoint":
        """Returns the states of all ranks in one, for frameworks whose rank 0 writes the checkpoint; all ranks call it.

        `load_state_dict` takes each rank's own part of it.

        Args:
            on_all_ranks: True returns all of it on every rank, for frameworks that write on each node. False returns it
                on rank 0 of the group, and on the others their own part.

        Returns:
            The checkpoint; empty if nothing is compressed.

        Raises:
            RuntimeError: torch.distributed is not initialised, or a rank has exited.
        """
        if not self._keeps:
            return {}
        group = self._group or dist.group.WORLD if dist.is_initialized() else None
        if group is None:
            raise RuntimeError("torch.distributed is not initialised: there are no ranks to gather a state from")
        from gradwire.comms.checkpoint import gather  # here: an exact hook has nothing to save

        peer_wait = self._peer_wait
        if peer_wait is None and self._session is not None:
            peer_wait = self._session.communicator.peer_wait
        return gather(self.state_dict(), group, on_all_ranks, peer_wait)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restores what `state_dict` returned on this rank, or `gathered_state_dict`; training continues bit for bit.

        Refused at once are a damaged state, one of a newer format or of another kind (of DDP, FSDP2 or `Outer`), and
        one that holds residuals if no compressor is set. Whether it fits model, compressor and ranks is checked once
        the ranks have connected: before the state has a model or has seen a bucket, `state` is kept until then. If it
        is refused then, every step raises the same error until a state that fits is loaded. On other ranks (another
        world size, another mesh) a state is taken only if it was flushed before it was saved (`flush()`, one step,
        save); momenta and warm-start factors then build up again.

        Args:
            state: Result of `state_dict` or `gathered_state_dict`. If nothing is compressed, an empty one is ignored,
                and one without residuals is checked for damage and not used.

        Raises:
            ValueError: The state is none of gradwire's, damaged, of a newer format, or of another kind, model,
                compressor, rank, world size or mesh; or it holds residuals and no compressor is set. Nothing was
                changed.
        """
        if not state and not self._keeps:
            return
        from gradwire.comms.checkpoint import JOB, normalize, refuse_other_owner  # here: many jobs restore nothing

        found = normalize(state)
        refuse_other_owner(found, self.MARK)
        self._loaded = True
        if dict(found[JOB])["dirty"]:
            self._refuse_unknown_residuals(found)
        if self._keeps:
            self._restore(found)

    def _refuse_unknown_residuals(self, saved: "Checkpoint") -> None:
        """Refuses a checkpoint with residuals that this state cannot keep.

        Args:
            saved: Checkpoint whose residuals have not been flushed.

        Raises:
            ValueError: No compressor is set.
        """
        if not _compresses(self.config):
            raise ValueError(UNUSABLE.format(found=NO_COMPRESSOR))

    @property
    def _keeps(self) -> bool:
        """Whether this state has anything to save: whether a compressor is set."""
        return _compresses(self.config)

    def _place(self) -> tuple[int, int] | None:
        """Returns (rank, number of ranks) in the state's process group, under which a checkpoint is saved.

        Before the ranks have connected, the group is the one that the state was made for, or else the default group;
        None if torch.distributed is not initialised yet.
        """
        if self._session is not None:
            return self._session.communicator.rank, self._session.communicator.size
        group = self._group or dist.group.WORLD if dist.is_initialized() else None
        return None if group is None else (group.rank(), group.size())

    def _own_state(self) -> StateDict:
        """Returns the state dict that this rank saves; empty before the ranks have connected."""
        return {} if self._session is None else self._session.state_dict()

    def _restore(self, saved: "Checkpoint") -> None:
        """Restores this rank's part of a checkpoint; before the ranks have connected, keeps it until then.

        Raises:
            ValueError: The checkpoint does not fit; nothing was changed.
        """
        if self._session is None:
            self._pending = saved
            return
        from gradwire.comms.checkpoint import unpack  # here: an exact hook has nothing to restore

        own = unpack(saved, self._session.communicator.rank, self._session.communicator.size)
        if own is not None:
            self._session.load_state_dict(own)
        else:
            self._starts_afresh(saved)
        self._pending = None

    def _starts_afresh(self, found: "Checkpoint") -> None:
        """Warns if nothing of a checkpoint of other ranks is loaded, and a momentum that it holds is lost.

        Residuals are not: such a checkpoint was flushed.
        """
        from gradwire.comms.checkpoint import JOB  # here: an exact hook has nothing to restore

        compression = None if self._session is None else self._session.compression
        holds = any(len(entry) > 1 for key, entry in found.items() if key != JOB)
        if holds and compression is not None and keeps_momentum(compression.compressor):
            log.warning(LOST_MOMENTUM, self.config.compressor)

    def _connected(self, call: str) -> S:
        """Returns the session, or raises a RuntimeError that names the user's call if the ranks have not connected."""
        if self._session is None:
            raise RuntimeError(self.NOT_CONNECTED.format(call=call))
        return self._session


class GradientState(TrainingState[S]):
    """Base class of the states that average gradients at every step: `HookState` and `FsdpState`.

    See `TrainingState` for the arguments.
    """

    def __init__(self, config: Config, peer_wait: "Callable[[], PeerWait] | None" = None) -> None:
        super().__init__(config, peer_wait)
        self._check: Check | None = None
        """Check of the model's optimizers, if gradients are compressed."""

    def advise(self, optimizer: str = "any", accumulate: int = 1) -> "JobAdvice":
        """Recommends a plan and a compressor, from what this rank has measured, and says what could be gained at most.

        Args:
            optimizer: Name of the job's optimizer, `sgd`, `adam`, ...: compressors that train worse with it are not
                recommended. `any` recommends only those that train well with both SGD and AdamW.
            accumulate: Number of steps, as they are now, that one step shall replace as its accumulated micro-batches;
                1 leaves steps as they are.

        Returns:
            The advice, to print or to read.

        Raises:
            RuntimeError: The ranks have not connected, or fewer than three steps have been seen.
            ValueError: `accumulate` is less than one.
        """
        session = self._connected("advise()")
        observed = session.watch.observed()
        if observed is None:
            raise RuntimeError("this state has seen fewer than three steps: call advise() later")
        from gradwire.comms.autotune.job_advice import Running, advise_job  # here: it knows every compressor

        rank_plans = session.communicator.rank_plans
        largest = max(rank_plans.plans(), key=lambda plan: plan.nbytes, default=None)
        name = (
            largest.name if largest is not None else rank_plans.chooser.compressed_name()
        )  # behind a checkpoint none is in use
        if name is None:
            name = rank_plans.unlisted(max(session.last_sizes) // GRADIENT_NBYTES, torch.float32).plan.name
        running = Running(name, self.config.compressor or "none")
        return advise_job(
            rank_plans.links.priced, session.last_sizes, observed, optimizer, rank_plans.library, running, accumulate
        )

    def watch(self, scaler: "LossScaler") -> None:
        """Follows a torch.amp.GradScaler: residuals are rescaled when it changes its scale.

        Args:
            scaler: The GradScaler that scales the loss.

        Raises:
            ValueError: There is no compressor, or no model yet.
            TypeError: `scaler` has no scale.
        """
        if not callable(getattr(scaler, "get_scale", None)):
            raise TypeError(f"`scaler` is a {type(scaler).__name__}; wanted a torch.amp.GradScaler")
        for each in self._loss_scales("watch()"):
            each.watch(scaler)

    def set_loss_scale(self, scale: float) -> None:
        """Sets the loss scale of the next gradients, without a GradScaler; call it before the backward pass.

        Args:
            scale: Factor on the loss, positive.

        Raises:
            ValueError: There is no compressor, or no model yet; or `scale` is not a positive number.
            TypeError: `scale` is no number.
        """
        for each in self._loss_scales("set_loss_scale()"):
            each.set(scale)

    def _loss_scales(self, call: str) -> "list[LossScale]":
        """Returns the loss scales by which residuals are rescaled; `call` names the user's call in the ValueError.

        Raises:
            ValueError: There is no compressor, or no model yet.
        """
        return [self._compressed(call).loss_scale]

    def flush(self) -> None:
        """Makes the next step send uncompressed, with every residual added; afterwards all residuals are zero.

        Call it on all ranks before the same step, for example before a checkpoint that is to be loaded on other ranks.
        That step also sends the weights of a sharded model exactly, if they are sent as differences: call it after
        weights were changed by hand.

        Raises:
            ValueError: There is no compressor, or no model yet.
        """
        if not self._flush_shards() or _compresses(self.config):
            self._compressed("flush()").flushing = True

    def _flush_shards(self) -> bool:
        """Makes the next step send the residuals of a sharded model's weights, too; returns whether there are any.

        False here: only `FsdpState` has such residuals.
        """
        return False

    def _check_optimizers(self, model: "HasParameters") -> None:
        """Registers a check that each optimizer of the model's parameters passes before its first step.

        The check raises for an optimizer that the compressor does not fit, and warns if the optimizer continues from a
        checkpoint and this state does not.
        """
        from gradwire.compressors.optim.first_step import check_at_first_step  # here: exact gradients fit all of them

        config, this = self.config, weakref.ref(self)

        def begins(optimizer_resumes: bool, parameters: Sequence[Tensor]) -> None:
            if (state := this()) is not None:
                state._training_begins(parameters, optimizer_resumes=optimizer_resumes)

        def averaged() -> bool:
            return (state := this()) is not None and (state.steps > 0 or state.dirty)

        name = config.compressor or "none"
        options, rules = config.compressor_options, config.rules
        self._check = check_at_first_step(model, name, options, rules, begins, averaged)

    def _check_no_optimizers(self, model: "HasParameters") -> None:
        """Ends the checks that `_check_optimizers` has registered."""
        if self._check is not None:
            from gradwire.compressors.optim.first_step import withdraw

            withdraw(model, self._check)

    def _training_begins(self, parameters: Sequence[Tensor], *, optimizer_resumes: bool) -> None:
        """Warns if the compressor starts afresh, while the training goes on; called before an optimizer's first step.

        It goes on if the optimizer continues from a checkpoint, or if another state has compressed gradients of the
        same parameters before and was not flushed, as when a model is wrapped in DDP again. It warns if the compressor
        keeps tensors from step to step, such as a residual or a momentum, and no state was loaded into this object. It
        does not warn in a process that joins a running elastic job: the other ranks send it their state.

        Args:
            parameters: Parameters of the model that require a gradient.
            optimizer_resumes: Whether the optimizer's state of them was loaded from a checkpoint.
        """
        before = next((_compressed_by[each] for each in parameters if each in _compressed_by), None)
        other = None if before is None else before()
        loses = before is not None and (other is None or other.dirty or keeps_momentum(other.compressor))
        compression = None if self._session is None else self._session.compression
        if compression is not None and compression.keeps:
            for each in parameters:
                _compressed_by[each] = weakref.ref(compression)
        afresh = not self._loaded and self.config.join is None
        if (optimizer_resumes or loses) and afresh and (kept := self._kept_in_words()):
            log.warning(GOES_ON if optimizer_resumes else GOES_ON_IN_ANOTHER, kept)

    def _kept_in_words(self) -> str:
        """Returns the name of the compressor if it holds tensors for the next step, such as residuals; else ""."""
        compression = None if self._session is None else self._session.compression
        return str(self.config.compressor) if compression is not None and compression.keeps else ""

    def _compressed(self, call: str) -> "Compression":
        """Returns the compression, or raises a ValueError that names the user's call if there is none."""
        if not _compresses(self.config):
            raise ValueError(
                f"`compressor` is not set: gradients are exact, there are no residuals, and {call} has nothing "
                "to do; leave the call out, or set a compressor"
            )
        if self._session is None or self._session.compression is None:
            raise ValueError(self.NOT_CONNECTED.format(call=call))
        return self._session.compression


def _compresses(config: Config) -> bool:
    """Returns whether a compressor is set, other than `none`."""
    return config.compressor not in (None, "none")


def _compression(config: Config, numels: Mapping[str, int], ranks: SessionRanks) -> "Compression | None":
    """Makes the compressor that the configuration names, with an empty state.

    Args:
        config: The user's configuration.
        numels: Number of elements of each parameter on this rank, by name.
        ranks: Ranks of the session.

    Returns:
        Compressor and its state; None if tensors are exact.
    """
    if not _compresses(config) or config.compressor is None:
        return None
    from gradwire.comms.compression import Compression  # here: exact gradients need no compressor

    compression = Compression(config.compressor, config.compressor_options, config.rules, ranks.rank, ranks.size)
    compression.compressor.bind_model(numels)
    return compression


def _kernels(device: torch.device, compressor: Compressor) -> str:
    """Returns the name of the compressor's kernels on a GPU, equal on all ranks (roundings differ); empty on a CPU.

    Kernels that are compiled at run time are compiled here, before data is loaded.
    """
    traits_of(compressor).prepare(device)
    if device.type == "cpu":
        return ""
    from gradwire.compressors.kernels.dispatch import kernels_name  # here: exact gradients need no kernels

    return kernels_name(device)


def _reduction(config: Config) -> Compressor | None:
    """Makes the compressor that sums gradients between nodes in float32; None for a plain sum in their own dtype."""
    if config.sums.sum_dtype == "float32":
        from gradwire.compressors.dense import WideSum

        return WideSum()
    return None


def _factors(config: Config, communicator: Communicator) -> tuple[float, float]:
    """Returns (factor on every rank's gradients before the sum, factor on their sum).

    Args:
        config: The user's configuration, with the reduction.
        communicator: Communicator of the ranks.
    """
    sums = config.sums
    if not sums.average:
        return 1.0, 1.0
    cluster = communicator.cluster
    if sums.predivide is not None:
        return 1.0 / sums.predivide, sums.predivide / cluster.size
    return 1.0 / cluster.size, 1.0
