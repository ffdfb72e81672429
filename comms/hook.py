"""The DDP comm hook: `model.register_comm_hook(gradwire.HookState(model), gradwire.comm_hook)`.

DDP hands over buckets of gradients during backward. Fusion says what is to be launched, the communicator launches it,
and DDP gets a future. The gradients arrive undivided, so the division by the world size happens here, before anything
is narrowed.
"""

import logging
import weakref
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradwire.comms.bootstrap.compat import (
    STEPS_IN_BACKWARD,
    GradBucket,
    is_at_node,
    queue_end_of_backward,
    steps_in_backward,
    timeout_of,
    why_no_ddp_hook,
)
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import COMPRESSION, ELASTIC, FUSION, MEASURING, PLANNING, SAMPLES, SUMMING, WATCHING, Config
from gradwire.comms.errors import DidNotJoinError
from gradwire.comms.fusion import FusionPlan
from gradwire.comms.names import ParameterNames
from gradwire.comms.report import Report
from gradwire.comms.run.all_reduces import AllReduce, Bucket, FutureTensor
from gradwire.comms.session import GradientSession, GradientState, SessionRanks
from gradwire.comms.step.backward_tracker import BackwardTracker, StepState, is_timed
from gradwire.comms.step.listeners import EndedStep
from gradwire.comms.step.model_group import NOT_ALL_CAME, checked_group, group_of
from gradwire.comms.streams import Mark
from gradwire.compressors.base import Layout

if TYPE_CHECKING:
    from gradwire.comms.checkpoint import Checkpoint
    from gradwire.comms.compression import Compression
    from gradwire.comms.elastic.ddp import ElasticTraining, OnMembershipChange
    from gradwire.comms.elastic.membership import View
    from gradwire.comms.elastic.resilient_ops import Change
    from gradwire.comms.elastic.transfer import Carried
    from gradwire.comms.resume import Resume
    from gradwire.comms.step.used_map import UsedMap

log = logging.getLogger("gradwire")

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

JOINED = (
    "`state` was loaded by a process that has just joined a running job. That job has sent it the model, the objects "
    "in `extra_state` and the compressor's counters: load no checkpoint if GRADWIRE_ELASTIC names a job"
)

UNNAMED = (
    "This state was made without a model, so parameters are called by their place in its first step: give the model, "
    "gradwire.HookState(model) or state.bind(model) before the first step, for rules that match its names."
)

_on_cuda: "weakref.WeakSet[HookState]" = weakref.WeakSet()
"""States on CUDA that are open: an optimizer asks them for failures before it steps."""


def _samples(state: "HookState") -> int | None:
    """How many samples this rank's next gradients are the mean of; None where it was not said.

    With `reduction="samples"` each rank says it before its backward pass, and whenever it changes; gradients are then
    averaged over samples. Of accumulated gradients it is the samples of all micro-batches, where these weigh alike in
    the loss. A rank with 0 takes part and adds nothing. Exact: n_i / N scales each rank's gradient before the sum.
    """
    return state._samples


def _say_samples(state: "HookState", count: int) -> None:
    """Says how many samples this rank's next gradients are the mean of.

    Raises:
        ValueError: `reduction` is another one, or `count` is negative.
        TypeError: `count` is no int.
    """
    if state.config.sums.kind != SAMPLES:
        raise ValueError(
            f"`samples` is given, and `reduction` is {state.config.reduction!r}, which weighs all ranks alike; wanted "
            'reduction="samples"'
        )
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"`samples` is {count!r} ({type(count).__name__}); wanted int, such as len(batch)")
    if count < 0:
        raise ValueError(f"`samples` is {count}; wanted a number of samples >= 0")
    state._samples = count


class HookState(GradientState[GradientSession]):
    """What the hook keeps between steps. One for each model.

    Args:
        model_or_group: The DDP model, or any module (its parameter names are used), or a process group; None binds to
            the model's group at the first bucket, for frameworks that want the state before the model exists.
        config: The configuration; by default what the environment gives.
        extra_state: In elastic training, the objects whose `state_dict` a joining process receives in addition to the
            model: the optimizer, scheduler, GradScaler, data loader. The same on all ranks, in the same order. Without
            it no process can join.
        on_membership_change: In elastic training, called as `on_membership_change(old, new)` with two `View`s, inside
            `loss.backward()`, at the end of the first step that ran on other ranks than the step before. Assign the
            data to the ranks again here.
        **options: Fields of `Config` by name; they win over the environment.

    Raises:
        TypeError: An option has an unknown name, or `model_or_group` is neither, or a sharded model.
        ValueError: A value does not fit, or differs between the ranks.
        RuntimeError: torch.distributed is not initialised, or a rank did not join.
    """

    OPTIONS = (*PLANNING, *MEASURING, *COMPRESSION, *SUMMING, *FUSION, *WATCHING, *ELASTIC)
    NOT_CONNECTED = "this state has not seen a bucket yet: call {call} after the first backward pass"

    samples = property(_samples, _say_samples)

    def __init__(
        self,
        model_or_group: nn.Module | dist.ProcessGroup | None = None,
        *,
        config: Config | None = None,
        extra_state: "Sequence[Carried]" = (),
        on_membership_change: "OnMembershipChange | None" = None,
        **options: object,
    ) -> None:
        super().__init__(Config.given(config, options))
        self.names = ParameterNames()
        self._backward = BackwardTracker()
        self._used_map: UsedMap | None = None
        """Where it takes one, once the ranks have connected: see there."""
        self._timed = True
        self._sparse: list[Bucket] = []
        self._buckets: list[Bucket] = []
        self._transfers: list[Layout] = []
        self._resume: Resume | None = None
        self._elastic: ElasticTraining | None = None
        self._samples: int | None = None
        for name, given in (("on_membership_change", on_membership_change), ("extra_state", extra_state)):
            if given and not self.config.elastic:
                raise ValueError(f"`{name}` is given but `elastic` is not set: pass elastic=True, too")
        if self.config.elastic:
            from gradwire.comms.elastic import ddp  # here: a step that is not kept needs none of it

            self._elastic = ddp.ElasticTraining(self, extra_state, on_membership_change)
        if isinstance(model_or_group, nn.Module):
            self.bind(model_or_group)
        elif isinstance(model_or_group, dist.ProcessGroup):
            self._group = model_or_group
        elif model_or_group is not None:
            raise TypeError(
                f"`model_or_group` is a {type(model_or_group).__name__}; wanted a torch.nn.Module, a process "
                "group, or None"
            )
        if self.config.compressor is not None and not self.names.bound:
            from gradwire.compressors.optim.first_step import watch_optimizers

            watch_optimizers()  # also in the steps before the first bucket names the model

    def bind(self, model: nn.Module) -> None:
        """Takes parameter names from `model`, and the process group of its DDP model; connects the ranks.

        A state that was loaded before is restored now.

        Args:
            model: Best the DDP model that the hook is registered on.

        Raises:
            ValueError: The state has been given a model before, or has compressed gradients under numbers already;
                `model` has no parameters, or an optimizer that steps in backward, or is a module inside of several DDP
                models with different groups; or a state that was loaded does not fit.
            TypeError: `model` is sharded (FSDP, FSDP2, DeepSpeed): no DDP hook is ever called for it.
            RuntimeError: torch.distributed is not initialised, or a rank did not join.
        """
        if (why := why_no_ddp_hook(model)) is not None:
            raise TypeError(f"`model` is {why}")
        if steps_in_backward(model):
            raise ValueError(f"`model` {STEPS_IN_BACKWARD}")
        compresses = self._connection is not None and self._connection.compression is not None
        if compresses and self.names.shapes and not self.names.bound:
            raise ValueError(
                "`model` comes after the first step: residuals are already kept under numbers instead of its "
                "parameters' names; call state.bind(model) before the first backward pass"
            )
        self.names.bind(model)
        if self.config.compressor is not None:
            from gradwire.compressors.rules import warn_of_idle

            self._check_optimizers(model)
            warn_of_idle(self.config.rules, self.names.numels(), "Patterns are shell-style, of the whole name.")
        self._backward.marks_last_bucket = isinstance(model, DistributedDataParallel) and not model.static_graph
        self._group = group_of(model) or self._group
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise ValueError("`model` has no parameters: there is nothing to reduce")
        if self._elastic is not None:
            if not isinstance(model, DistributedDataParallel):
                raise ValueError(
                    f"`elastic` is set, and `model` is a {type(model).__name__}; wanted the DistributedDataParallel "
                    "model: its own process group has to change with the ranks"
                )
            self._elastic.bind(model)
        if getattr(model, "skip_all_reduce_unused_params", False):
            raise ValueError(
                "`model` skips the all-reduce of unused parameters; wanted skip_all_reduce_unused_params=False: the "
                "hook detects the end of a step by its last bucket, which DDP may skip with this option"
            )
        self._connect(parameter.device, model)
        if self._elastic is not None:
            self._group = self._elastic.take_over_group()

    def unbind(self, model: nn.Module) -> None:
        """Ends the state because another hook has taken its place on `model`; its optimizer is not checked any more."""
        self._check_no_optimizers(model)
        self.close()

    @property
    def view(self) -> "View":
        """The ranks that there are now, and which of them is this one, in elastic training.

        Raises:
            RuntimeError: `elastic` is not set, or the ranks have not connected.
        """
        if self._elastic is None or self._elastic.resilient_ops is None:
            raise RuntimeError("there is no view: `elastic` is not set, or no model is bound yet")
        return self._elastic.resilient_ops.view

    @property
    def changes(self) -> "tuple[Change, ...]":
        """The changes of the ranks so far, and what of each took how long here, oldest first; in elastic training.

        Raises:
            RuntimeError: `elastic` is not set, or the ranks have not connected.
        """
        if self._elastic is None or self._elastic.resilient_ops is None:
            raise RuntimeError("there are no changes: `elastic` is not set, or no model is bound yet")
        return tuple(self._elastic.resilient_ops.changes)

    def report(self) -> Report:
        """Calls, bytes and seconds of every phase so far, and the plans in use with their reasons.

        Raises:
            RuntimeError: The state has neither a model nor seen a bucket.
        """
        return self._connected("report()").report(self.steps)

    def close(self) -> None:
        """Ends the threads and releases shared memory; happens by itself when the state is collected or at exit."""
        _on_cuda.discard(self)
        if self._connection is not None:
            self._connection.observer.close()
        if self._elastic is not None:
            self._elastic.close()
        if self._connection is not None and (self._elastic is None or self._elastic.resilient_ops is None):
            self._connection.communicator.close()

    def admit_joining(self) -> None:
        """Admits the processes that wait to join; the model calls it before each forward pass in elastic training."""
        if self._elastic is not None:
            self._elastic.admit_joining()

    def reduce(self, bucket: GradBucket) -> FutureTensor:
        """Averages one bucket over all ranks; the future's value is the bucket's own buffer."""
        flat = bucket.buffer()
        begins = self._backward.state is StepState.BETWEEN_STEPS
        if begins and flat.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(CAPTURED)  # before anything is connected or begun: the next step goes on
        if begins and self.steps == 0 and self._elastic is None:  # in elastic training the model's group changes
            own = self._group if self._connection is None else self._connection.group
            self._group = checked_group(self, bucket.parameters()[0], self.names.model(), own)
        connection = self._connection or self._connect(flat.device)
        if begins:
            self._begin_step(connection)
        stats = connection.communicator.executor.stats
        now = stats.clock.now() if self._timed else None
        if stats.recorder is None:
            future = self._reduce(bucket, flat, connection, now)
        else:
            with stats.recorder.host_range(f"bucket {len(self._buckets)}"):
                future = self._reduce(bucket, flat, connection, now)
        if bucket.is_last():
            self._last_came(connection)
        return future

    def _reduce(self, bucket: GradBucket, flat: Tensor, connection: GradientSession, now: Mark | None) -> FutureTensor:
        if flat.layout != torch.strided:
            if self._elastic is not None:
                raise TypeError("a sparse gradient in elastic training; wanted dense ones: nn.Embedding(sparse=False)")
            return self._reduce_sparse(bucket, flat, connection)
        layout = None
        if connection.communicator.compressor is not None or self._elastic is not None:
            parameters = tuple(map(id, bucket.parameters()))
            layout = self.names.layouts.get(parameters) or self.names.layout(bucket)
            if self._used_map is not None:
                self._used_map.bucket_came(bucket.parameters(), flat)
            if connection.returned is not None:
                connection.returned.bucket_came(layout, bucket.parameters())
        index, contents = len(self._buckets), connection.observer.contents
        if index not in contents or contents[index][0] != flat.numel():
            contents[index] = flat.numel(), self.names.known(bucket.parameters())
        arrived = Bucket.of(flat, layout, now, index)
        self._buckets.append(arrived)
        if self._elastic is not None:
            return self._elastic.add(arrived, lambda: self._travel(connection, arrived))
        self._travel(connection, arrived)
        return arrived.result()

    def _reduce_sparse(self, bucket: GradBucket, sparse: Tensor, connection: GradientSession) -> FutureTensor:
        """Gradients of nn.Embedding(sparse=True) come in buckets of their own; none is joined or compressed."""
        named, contents = self.names.known(bucket.parameters()), connection.observer.contents
        index = next(
            (index for index, (_, names) in contents.items() if index < 0 and names == named), -1 - len(contents)
        )
        contents[index] = sparse.numel(), named
        arrived = Bucket.of(sparse, index=index)
        self._sparse.append(arrived)
        if connection.weights is not None:
            self._launch(connection, (), wait=True)  # what came before it
            connection.weights.weigh(sparse)
        scale = connection.scale * connection.after
        connection.communicator.start_sparse(arrived, scale=scale, as_dense=self.config.sums.sparse_as_dense)
        return arrived.result()

    def _travel(self, connection: GradientSession, arrived: Bucket) -> None:
        """Launches what is due now that a bucket has arrived."""
        if self._elastic is not None:
            self._elastic.agree(connection)
        if self._resume is not None and arrived.layout is not None:
            self._resume.add(arrived)
        else:
            self._launch(connection, connection.fusion.add(arrived))
            if not self._backward.marks_last_bucket:
                self._launch(connection, connection.fusion.flush())
        if self._resume is not None and self._resume.is_complete:
            self._launch_resumed(connection)

    def fuse(self, plan: FusionPlan) -> None:
        """Changes which buckets travel together, from the next step on; every rank calls it between the same two steps.

        Raises:
            RuntimeError: No bucket has been reduced yet.
            ValueError: Not all ranks ask for the same plan: refused on all of them.
        """
        self._connected("fuse()").fuse(plan)

    def _connect(self, device: torch.device, model: nn.Module | None = None) -> GradientSession:
        if self._connection is None:
            if not dist.is_initialized():
                raise RuntimeError(
                    "torch.distributed is not initialised: call dist.init_process_group() before the hook is used"
                )
            group = self._group or dist.group.WORLD
            assert group is not None
            self.config = self.config.with_timeout_of(timeout_of(group, device))
            if self._elastic is not None:
                self._elastic.connect(group, device)
            else:
                ranks = SessionRanks.of(group, "hook")
                try:
                    self._connection = GradientSession(ranks, device, self.config, self.names)
                except DidNotJoinError as error:
                    raise error if self._group is not None else DidNotJoinError(f"{error}. {NOT_ALL_CAME}") from None
            assert self._connection is not None
            holds_back = self.config.compressor is not None
            if device.type == "cuda" or (holds_back and getattr(model, "find_unused_parameters", True)):
                from gradwire.comms.step.used_map import UsedMap  # here: most models on a CPU need none of it

                self._used_map = UsedMap(model, holds_back=holds_back)
            if device.type == "cuda":
                _on_cuda.add(self)
                _register()
            if self._pending is not None:
                self._restore(self._pending)
        return self._connection

    def _restore(self, found: "Checkpoint") -> None:
        if self._elastic is None or not self._elastic.has_just_joined:
            super()._restore(found)
        elif found is self._pending:  # loaded before, as are weights that it was given anew
            self._pending = None
            log.warning("a state was loaded, and this process has joined a running job: it goes on from that job's own")
        else:
            raise ValueError(JOINED)

    def _begin_step(self, connection: GradientSession) -> None:
        self._backward.begin(autograd_calls=queue_end_of_backward(self._backward_ended))
        if self.steps == 0 and not self.names.bound and self.config.compressor is not None:
            self._check_optimizers(self.names)
        communicator = connection.communicator
        if self._used_map is not None:
            self._used_map.step_begins(communicator.device, self.steps)
        if communicator.device.type == "cuda":
            communicator.executor.stats.timing = is_timed(self.steps) or connection.listeners.wants_times
        self._timed = connection.listeners.wants_arrivals or communicator.executor.stats.timing
        if connection.compression is not None:
            if connection.compression.loss_scale.follows_scaler:
                with communicator.exclusive():
                    connection.compression.loss_scale.follow()
            saved = connection.compression.take_saved_transfers()
            self._resume = None if saved is None else _resume(saved)
        if connection.weights is not None:
            connection.weights.count = self._samples
        connection.listeners.step_began(self.steps)
        if self._elastic is not None:
            self._resume = self._elastic.begin_step(communicator, self._resume)

    def _last_came(self, connection: GradientSession) -> None:
        """Holds nothing back any more: DDP may wait for the futures before it returns to autograd."""
        ends = self._backward.last_bucket_came()
        if self._elastic is not None:
            self._elastic.complete_step()
        else:
            self._release(connection)
        if self._used_map is not None:
            self._used_map.last_is_issued(connection.communicator)
        if ends:
            self._end_step()

    def _send_again(self, buckets: list[Bucket], rows: Tensor | None) -> None:
        """Launches a step's buckets anew, with the ranks that are left."""
        connection = self._connected("backward()")
        self._transfers.clear()
        self._buckets = buckets
        self._resume = None if rows is None else _resume(rows)
        for bucket in buckets:
            self._travel(connection, bucket)

    def _release(self, connection: GradientSession) -> None:
        self._launch(connection, connection.fusion.flush())
        self._launch_resumed(connection)
        connection.communicator.executor.release()

    def _backward_ended(self) -> None:
        """Called by autograd."""
        if not self._backward.backward_ended(inside=is_at_node()):
            return
        used_map = self._used_map
        behind_map = used_map is not None and used_map.ends_backward

        def ddp_ended() -> None:  # it has taken the averages by now, or left them alone
            assert used_map is not None
            if (compression := self._connected("backward()").compression) is not None:
                compression.left_alone = self.names.known(used_map.left_alone())
            self._end_step()

        if not (behind_map and queue_end_of_backward(ddp_ended)):  # DDP has queued its own call by now
            self._end_step()

    def _launch_resumed(self, connection: GradientSession) -> None:
        """Sends what waits for the transfers of the step that was saved."""
        if self._resume is not None:
            resume, self._resume = self._resume, None
            self._launch(connection, resume.end_step())

    def _launch(self, connection: GradientSession, launches: Sequence[AllReduce], *, wait: bool = False) -> None:
        """Starts what fusion has decided on; where samples weigh, once the step's weights have come.

        Args:
            connection: Of the ranks.
            launches: Behind all that were given before.
            wait: For the weights; so it does anyway where nothing may be held back any more.
        """
        if connection.weights is not None:
            in_backward = self._backward.marks_last_bucket and self._backward.state is StepState.IN_BACKWARD
            launches = connection.weights.due(launches, wait=wait or not in_backward)
        compression = connection.compression
        for all_reduce in launches:
            if all_reduce.layout is not None:
                self._transfers.append(all_reduce.layout)
            scale, after = connection.scale, connection.after
            flush = compression is not None and compression.flushing
            connection.communicator.start(
                all_reduce, scale=scale, after=after, flush=flush, hold=self._backward.marks_last_bucket
            )

    def _end_step(self) -> None:
        """Runs once at the end of each backward pass, on all ranks at the same point of the sequence of buckets.

        First the rest of the gradients travels, then the compressor keeps what it has held back, then listeners hear of
        the step, in their order; what a rank has failed with comes last, so that all ranks have done the same before.
        """
        if self._elastic is not None:
            self._elastic.complete_step()
        connection = self._connected("backward()")
        self.steps += 1
        if self.steps == 1 and not self.names.bound and self.config.compressor is not None:
            from gradwire.compressors.rules import warn_of_idle

            warn_of_idle(self.config.rules, self.names.numels(), UNNAMED)
        self._launch(connection, connection.fusion.end_step())
        self._launch_resumed(connection)
        executor = connection.communicator.executor
        executor.release()
        executor.stats.read_times()
        buckets, self._buckets = self._buckets, []
        transfers, self._transfers = self._transfers, []
        sparse, self._sparse = self._sparse, []
        if self._elastic is not None:
            self._elastic.end_step(transfers)
        if connection.compression is not None:
            _end_compression(connection.communicator, connection.compression, buckets, sparse, transfers)
        together = self._elastic is None or self._elastic.together
        connection.listeners.step_ended(
            EndedStep(self.steps, buckets, transfers, self.report, timed=executor.stats.timing, together=together)
        )
        if buckets:
            executor.poison(buckets[-1])
        if self._elastic is not None:
            self._elastic.tell_change()
        executor.raise_failure()

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


@cache
def _register() -> RemovableHandle:
    """Once for the process: torch runs its hooks in a loop that does not allow one to remove itself."""
    return register_optimizer_step_pre_hook(_refuse_step)


def _refuse_step(optimizer: Optimizer, args: object, named: object) -> None:
    """Raises what has failed in the step whose averages it would take (before any optimizer's step)."""
    for state in list(_on_cuda):
        if state._connection is not None:
            state._connection.communicator.executor.raise_failure()


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


def _end_compression(
    communicator: Communicator,
    compression: "Compression",
    buckets: Sequence[Bucket],
    sparse: Sequence[Bucket],
    transfers: Sequence[Layout],
) -> None:
    """Has the compressor keep what it has held back in a step, or drop it where the step is not finite."""
    if communicator.device.type != "cuda":
        compression.end_step([*buckets, *sparse], transfers)
        return
    try:
        with communicator.exclusive():
            compression.end_step_on_device([*communicator.executor.extremes(), *_sparse_extremes(sparse)], transfers)
    except Exception as error:  # no memory, say: what this rank holds back is not what the others think
        communicator.executor.interrupt(error)
        raise


def _sparse_extremes(buckets: Sequence[Bucket]) -> list[Tensor]:
    """The extremes of the rows of sparse averages, 0-dim: finite if and only if all of them are."""
    values = [bucket.result().wait()._values() for bucket in buckets]
    return [extreme for value in values if value.numel() for extreme in torch.aminmax(value)]


def _resume(rows: Tensor) -> "Resume":
    from gradwire.comms.resume import Resume  # here: exact gradients may travel together in any way

    return Resume(rows)


def _restore(config: Config) -> HookState:
    return HookState(config=config)
