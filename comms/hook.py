"""The DDP comm hook: `model.register_comm_hook(gradwire.HookState(model), gradwire.comm_hook)`.

DDP calls the hook with one bucket of gradients after another during backward. The session's grouping returns the
all-reduces to start, the communicator starts them, and DDP gets a future of the bucket. DDP divides no gradients if a
hook is registered: the first phase of a plan multiplies each rank's contribution by 1 / ranks (run/programs.py).

Optional features follow a step as listeners (`step/listeners.py`), or are a subclass (`step/features.py` chooses it).
One is asked here by a name of the session's: `weights`, which weighs gradients before they are sent.

Thread safety: the thread that runs backward calls `reduce`, `_backward_ended` and `_finish_step`; other methods are for
the training thread between two steps. No lock is needed, because the two never run at once.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.comms.bootstrap.compat import (
    CAPTURED,
    MIXED_PRECISION,
    PYTHON_REDUCER,
    STEPS_IN_BACKWARD,
    GradBucket,
    is_at_node,
    queue_end_of_backward,
    steps_in_backward,
    timeout_of,
    why_no_ddp_hook,
)
from gradwire.comms.config import Config
from gradwire.comms.errors import DidNotJoinError
from gradwire.comms.fusion import FusionPlan
from gradwire.comms.names import ParameterNames
from gradwire.comms.report import Report
from gradwire.comms.run.all_reduces import AllReduce, Bucket, FutureTensor
from gradwire.comms.session import GradientSession, GradientState, SessionRanks
from gradwire.comms.step.backward_tracker import BackwardTracker, StepState, is_timed
from gradwire.comms.step.features import HOOK_OPTIONS, OptionalMembers, refuse_without_option, state_class
from gradwire.comms.step.listeners import EndedStep
from gradwire.comms.step.model_group import NOT_ALL_JOINED, checked_group, group_of, owners_of
from gradwire.comms.streams import Mark
from gradwire.compressors.base import Layout

if TYPE_CHECKING:
    from gradwire.comms.step.features import OnMembershipChange, StateOwner

log = logging.getLogger("gradwire")

UNNAMED = (
    "This state was made without a model, so parameters are called by their place in its first step: give the model, "
    "gradwire.HookState(model) or state.bind(model) before the first step, for rules that match its names."
)


class HookState(OptionalMembers, GradientState[GradientSession]):
    """Holds what the hook knows of one model: its connected ranks, the compressor's state and the running step.

    Args:
        model_or_group: The DDP model, or any module, whose parameter names are used, or a process group; None binds to
            the model's group at the first bucket, for frameworks that create the state before the model.
        config: The configuration; None reads the environment.
        extra_state: Objects whose `state_dict` a process that joins the running job receives in addition to the model:
            the optimizer, scheduler, GradScaler, data loader. The same on all ranks, in the same order. Without it no
            process can join.
        on_membership_change: Called as `on_membership_change(old, new)` with two `View`s, once for each change: inside
            `loss.backward()` at the end of the step in which ranks have failed, or before the forward pass in which
            others join. Assign the data to the ranks again here.
        **options: Fields of `Config` by name; they override the environment.

    Raises:
        TypeError: An option has an unknown name, `model_or_group` has another type, or the model is sharded.
        ValueError: An option has an invalid value, or another one than on other ranks; or `extra_state` or
            `on_membership_change` is given without the option that uses them; or `bind` refuses the model.
        RuntimeError: torch.distributed is not initialised, or a rank did not join.
    """

    OPTIONS = HOOK_OPTIONS
    NOT_CONNECTED = "this state has not seen a bucket yet: call {call} after the first backward pass"
    NEEDS_LAYOUTS = False
    """Whether buckets need a layout even if nothing is compressed."""

    def __new__(
        cls,
        model_or_group: nn.Module | dist.ProcessGroup | None = None,
        *,
        config: Config | None = None,
        extra_state: "Sequence[StateOwner]" = (),
        on_membership_change: "OnMembershipChange | None" = None,
        **options: object,
    ) -> Self:
        """Creates an instance of the subclass that the options ask for, as `pathlib.Path` does."""
        found = Config.given(config, options)
        self = super().__new__(state_class(cls, found) if cls is HookState else cls)
        self.config = found
        return self

    def __init__(
        self,
        model_or_group: nn.Module | dist.ProcessGroup | None = None,
        *,
        config: Config | None = None,
        extra_state: "Sequence[StateOwner]" = (),
        on_membership_change: "OnMembershipChange | None" = None,
        **options: object,
    ) -> None:
        super().__init__(self.config)
        refuse_without_option(on_membership_change=on_membership_change, extra_state=extra_state)
        self.names = ParameterNames()
        self._backward = BackwardTracker()
        self._ddp: Callable[[], DistributedDataParallel | None] = lambda: None
        self._has_inputs = True
        """False in a step that `Join` takes for this rank, which has no inputs left: its gradients are zeros."""
        self._timed = True
        self._sparse: list[Bucket] = []
        self._buckets: list[Bucket] = []
        self._reduced_layouts: list[Layout] = []
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

            # An optimizer may step before the first bucket names the model.
            watch_optimizers()

    def bind(self, model: nn.Module) -> None:
        """Takes the parameter names of `model` and the process group of its DDP model, and connects the ranks.

        Restores the state that was passed to `load_state_dict` before.

        Args:
            model: The DDP model on which the hook is registered, if possible.

        Raises:
            ValueError: The state has a model already, or has compressed gradients without names; `model` has no
                parameters, has an optimizer that steps in backward or DDP's `mixed_precision`, or belongs to several
                DDP models with different groups; or the loaded state does not fit.
            TypeError: `model` is sharded (FSDP, FSDP2, DeepSpeed): no DDP hook is ever called for it.
            RuntimeError: torch.distributed is not initialised, or a rank did not join.
        """
        if (why := why_no_ddp_hook(model)) is not None:
            raise TypeError(f"`model` is {why}")
        if steps_in_backward(model):
            raise ValueError(f"`model` {STEPS_IN_BACKWARD}")
        if isinstance(model, DistributedDataParallel) and model.mixed_precision is not None:
            raise ValueError(MIXED_PRECISION)
        compresses = self._session is not None and self._session.compression is not None
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
        self._check_model(model)
        self._connect(parameter.device)

    def unbind(self, model: nn.Module) -> None:
        """Closes the state after another hook has replaced it on `model`, and stops checking the model's optimizer."""
        self._check_no_optimizers(model)
        self.close()

    def report(self) -> Report:
        """Returns calls, bytes and seconds of every phase so far, and the plans in use with their reasons.

        Raises:
            RuntimeError: The state has neither a model nor seen a bucket.
        """
        return self._connected("report()").report(self.steps)

    def close(self) -> None:
        """Waits for all-reduces in flight, ends threads and frees shared memory; also when collected, and at exit."""
        if self._session is not None:
            if self._session.communicator.device.type == "cuda":
                from gradwire.comms.step import optimizer_guard

                optimizer_guard.release(self)
            self._session.observer.close()
            self._close_ranks(self._session)

    def fuse(self, plan: FusionPlan) -> None:
        """Changes which buckets are joined into all-reduces, from the next step on; all ranks call it between steps.

        Raises:
            RuntimeError: No bucket has been reduced yet.
            ValueError: On all ranks: their plans differ, or one did not call it within 30 s; the present plan stays.
        """
        self._connected("fuse()").fuse(plan)

    def reduce(self, bucket: GradBucket) -> FutureTensor:
        """Starts averaging a bucket, which may begin or end the step; the future's value is the bucket's own buffer."""
        if begins := not self._backward.in_step:
            self._has_inputs = queue_end_of_backward(self._backward_ended)
            self._backward.begin(self._buckets, self._sparse, autograd_calls=self._has_inputs)
        ends = bucket.is_last() and self._backward.last_bucket_arrived()
        future = self._unless_failed(lambda: self._add(bucket, begins=begins))
        if begins and self._has_inputs:
            self._backward.follow(self._ddp() or self.names.model())
        if ends:
            self._finish_step()
        return Bucket.of(bucket.buffer()).give_up() if future is None else future

    def _add(self, bucket: GradBucket, *, begins: bool) -> FutureTensor:
        """Adds a bucket to the step, which it begins if `begins`; connects at the first bucket; returns its future."""
        flat = bucket.buffer()
        # Refuse before anything is connected or sent, so that the next step works.
        if begins and flat.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(CAPTURED)
        if begins and self.steps == 0:
            self._check_group(bucket)
        session = self._connect(flat.device)
        if begins:
            self._begin_step(session)
        # Reduce the bucket, inside a range of the profiler if one is recorded.
        stats = session.communicator.executor.stats
        now = stats.clock.now() if self._timed else None
        recorder = stats.recorder
        with nullcontext() if recorder is None else recorder.host_range(f"bucket {len(self._buckets)}"):
            future = self._reduce(bucket, flat, session, now)
        if bucket.is_last():
            # Start the deferred all-reduces, for which DDP may wait.
            self._send_rest(session)
            session.listeners.last_bucket_sent(session.communicator)
        return future

    def raise_failure(self) -> None:
        """Raises the error with which a step failed on CUDA; no-op on CPUs, where the futures of a step raise it."""
        if self._session is not None:
            self._session.communicator.executor.raise_failure()

    def _reduce(self, bucket: GradBucket, flat: Tensor, session: GradientSession, now: Mark | None) -> FutureTensor:
        """Adds a bucket to the step, starts the all-reduces that it completes by the fusion plan; returns its future.

        `now` is the time of its arrival; None if arrivals are not timed in this step.
        """
        if flat.layout != torch.strided:
            return self._reduce_sparse(bucket, flat, session)
        layout = None
        if session.communicator.compressor is not None or self.NEEDS_LAYOUTS:
            parameters = tuple(map(id, bucket.parameters()))
            layout = self.names.layouts.get(parameters) or self.names.layout(bucket)
        for listener in session.listeners.for_buckets if self._has_inputs else ():
            listener.bucket_arrived(layout, bucket.parameters(), flat)
        index, contents = len(self._buckets), session.observer.contents
        if index not in contents or contents[index][0] != flat.numel():
            contents[index] = flat.numel(), self.names.known(bucket.parameters())
        arrived = Bucket.of(flat, layout, now, index)
        self._buckets.append(arrived)
        return self._send(session, arrived)

    def _reduce_sparse(self, bucket: GradBucket, sparse: Tensor, session: GradientSession) -> FutureTensor:
        """Starts averaging a bucket of sparse gradients, which is never compressed; the future has a new tensor."""
        named, contents = self.names.known(bucket.parameters()), session.observer.contents
        index = next(
            (index for index, (_, names) in contents.items() if index < 0 and names == named), -1 - len(contents)
        )
        contents[index] = sparse.numel(), named
        arrived = Bucket.of(sparse, index=index)
        self._sparse.append(arrived)
        if session.weights is not None:
            # Start what was deferred before, so that all ranks start it in the same order.
            self._launch(session, (), wait=True)
            session.weights.weigh(sparse)
        scale = session.scale * session.after
        session.communicator.start_sparse(arrived, scale=scale, as_dense=self.config.sums.sparse_as_dense)
        return arrived.result()

    def _send(self, session: GradientSession, arrived: Bucket) -> FutureTensor:
        """Adds a bucket to the grouping, and starts the all-reduces that it completes: none, one or more.

        Returns a future of the bucket's averages, which a later bucket may complete.
        """
        self._launch(session, session.grouping.add(arrived))
        return arrived.result()

    def _send_rest(self, session: GradientSession) -> None:
        """Starts all deferred all-reduces of the step and, on CUDA, issues the all-gathers that were deferred."""
        self._launch(session, session.grouping.flush())
        session.communicator.executor.release()

    def _connect(self, device: torch.device) -> GradientSession:
        """Returns the connected ranks; at the first call it connects them, and restores a state that was loaded before.

        Args:
            device: Device of the gradients.

        Raises:
            ValueError: That state does not fit. Later calls raise it again, so that no step runs without the state.
        """
        if self._session is None:
            if not dist.is_initialized():
                raise RuntimeError(
                    "torch.distributed is not initialised: call dist.init_process_group() before the hook is used"
                )
            group = self._group or dist.group.WORLD
            assert group is not None
            self.config = self.config.with_timeout_of(timeout_of(group, device))
            self._session = self._connect_ranks(group, device)
            if device.type == "cuda":
                from gradwire.comms.step import optimizer_guard

                optimizer_guard.guard(self)
        if self._pending is not None:
            self._restore(self._pending)
        return self._session

    def _connect_ranks(self, group: dist.ProcessGroup, device: torch.device) -> GradientSession:
        """Connects the ranks of a process group.

        Args:
            group: The process group; every rank calls it.
            device: Device of the gradients.

        Raises:
            DidNotJoinError: A rank did not join within the timeout.
        """
        ranks = SessionRanks.of(group, "hook")
        try:
            return GradientSession(ranks, device, self.config, self.names)
        except DidNotJoinError as error:
            raise error if self._group is not None else DidNotJoinError(f"{error}. {NOT_ALL_JOINED}") from None

    def _close_ranks(self, session: GradientSession) -> None:
        """Closes the communicator of the connected ranks."""
        session.communicator.close()

    def _check_model(self, model: nn.Module) -> None:
        """Raises a ValueError if `model` is a DDP with `skip_all_reduce_unused_params=True`."""
        if getattr(model, "skip_all_reduce_unused_params", False):
            raise ValueError(
                "`model` skips the all-reduce of unused parameters; wanted skip_all_reduce_unused_params=False: the "
                "hook detects the end of a step by its last bucket, which DDP may skip with this option"
            )

    def _check_group(self, bucket: GradBucket) -> None:
        """Finds the group of the model whose first bucket arrived; a ValueError if it differs from the state's own."""
        own = self._group if self._session is None else self._session.group
        owners = owners_of(self, bucket.parameters()[0], self.names.model())
        self._group = checked_group(owners, own)
        if len(owners) == 1:
            self._ddp = weakref.ref(owners[0])

    def _begin_step(self, session: GradientSession) -> None:
        """Begins a step at its first bucket: decides what is timed and deferred, and calls the listeners."""
        if self._backward.follows_error:
            session.go_on(self.steps)
            self._backward.follows_error = False
        if self.steps == 0 and not self.names.bound and self.config.compressor is not None:
            self._check_optimizers(self.names)
        communicator = session.communicator
        if communicator.device.type == "cuda":
            communicator.executor.stats.timing = is_timed(self.steps) or session.listeners.wants_times
        self._timed = session.listeners.wants_arrivals or communicator.executor.stats.timing
        self._step_options(session, self._ddp(), has_inputs=self._has_inputs)
        session.fusion.defers = self._backward.marks_last_bucket
        session.grouping = session.fusion
        session.listeners.step_began(self.steps)

    def _backward_ended(self) -> None:
        """Ends the step if it ends with this backward pass, now or by a callback behind DDP's; autograd calls it.

        It runs before DDP's own callback, which takes the averages (but in the first step of a static graph).
        """
        if not self._backward.backward_ended(inside=is_at_node()):
            return
        after_ddp = self._session is not None and self._session.listeners.ends_after_ddp
        if not (after_ddp and self._backward.call_behind_ddp(partial(self._finish_step, after_ddp=True))):
            self._finish_step()

    def _finish_step(self, *, after_ddp: bool = False) -> None:
        """Ends a step unless it has failed, and raises the error of a failed one, in backward behind DDP's callback.

        Args:
            after_ddp: Whether DDP has copied the averages into the gradients, but of parameters that no rank has used.
        """
        if after_ddp:
            self._unless_failed(self._connected("backward()").listeners.ddp_ended)
        self._unless_failed(self._end_step)
        self._backward.raise_error()

    def _unless_failed(self, call: Callable[[], FutureTensor | None]) -> FutureTensor | None:
        """Calls a function and returns its result; returns None if the step has failed, before or by this call.

        If the step has failed before, the function is not called. An error of a type in `BackwardTracker.kept` fails
        the step, completes all its open futures, and is raised by `_finish_step`. Other errors leave at once: all of
        them if `kept` is empty.
        """
        if not self._backward.has_failed:
            with self._backward.keeping_error():
                return call()
        return None

    def _launch(self, session: GradientSession, launches: Sequence[AllReduce], *, wait: bool = False) -> None:
        """Starts all-reduces; with weighed ranks they may be deferred until the weights of the step are known.

        Args:
            session: Session of the connected ranks.
            launches: All-reduces to start, in order, after those of earlier calls.
            wait: Whether to wait for the weights. After the last bucket it always waits.
        """
        if session.weights is not None:
            in_backward = self._backward.marks_last_bucket and self._backward.state is StepState.IN_BACKWARD
            launches = session.weights.due(launches, wait=wait or not in_backward)
        compression = session.compression
        for all_reduce in launches:
            if all_reduce.layout is not None:
                self._reduced_layouts.append(all_reduce.layout)
            scale, after = session.scale, session.after
            flush = compression is not None and compression.flushing
            session.communicator.start(
                all_reduce, scale=scale, after=after, flush=flush, hold=self._backward.marks_last_bucket
            )

    def _end_step(self) -> None:
        """Starts deferred all-reduces and calls the listeners, once a backward pass; raises a failure known on CUDA."""
        session = self._connected("backward()")
        self.steps += 1
        if self.steps == 1 and not self.names.bound and self.config.compressor is not None:
            from gradwire.compressors.rules import warn_of_idle

            warn_of_idle(self.config.rules, self.names.numels(), UNNAMED)
        # Send the rest of the gradients.
        self._launch(session, session.grouping.end_step())
        executor, report = session.communicator.executor, session.communicator.report
        executor.release()
        executor.stats.read_times()
        # Pass the step to the listeners; the compressor's is among the first.
        buckets, self._buckets = self._buckets, []
        layouts, self._reduced_layouts = self._reduced_layouts, []
        sparse, self._sparse = self._sparse, []
        taken_by_all, timed = self._is_taken_by_all(), executor.stats.timing
        session.listeners.step_ended(
            EndedStep(self.steps, buckets, layouts, report, timed=timed, taken_by_all=taken_by_all, sparse=sparse)
        )
        # Raise a failure last, so that all ranks have run the same collectives before.
        if buckets:
            executor.poison(buckets[-1])
        executor.raise_failure()

    def _is_taken_by_all(self) -> bool:
        """Returns whether all ranks took this step with this communicator; see `EndedStep.taken_by_all`."""
        return True

    def __deepcopy__(self, memo: dict[int, object]) -> "HookState":
        """Returns a new, unbound state, and warns: a copy of a DDP model has no hook."""
        log.warning(
            "a DDP model with gradwire's hook was copied: torch drops the hook in copies; call "
            "register_comm_hook on the copy if it is to be trained"
        )
        return HookState(config=self.config)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the configuration only: threads and connections belong to the process."""
        return _unpickled, (self.config,)


def comm_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket over all ranks of `state`; the function to register on the DDP model, which calls it.

    Args:
        state: The state made for this model.
        bucket: The bucket from DDP.

    Returns:
        A future of the averaged buffer. Its error, if any, is raised by `loss.backward()`.

    Raises:
        TypeError: Called by the compiled-autograd reducer, which passes single gradients.
    """
    if isinstance(bucket, tuple):
        raise TypeError(PYTHON_REDUCER)
    return state.reduce(bucket)


def _unpickled(config: Config) -> HookState:
    """Makes a new, unbound state with a pickled configuration; see `HookState.__reduce__`."""
    return HookState(config=config)
